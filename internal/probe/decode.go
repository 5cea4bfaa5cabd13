//go:build linux

package probe

import (
	"fmt"
	"unsafe"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// The socket stages, in the order of a progress record's plain totals.
const firstSocketStage = stage.AcceptQueue

// copyRecord fills dst, which must be plain data laid out as in C, from raw.
func copyRecord[T any](dst *T, raw []byte) error {
	size := int(unsafe.Sizeof(*dst))
	if len(raw) < size {
		return fmt.Errorf("record of %d bytes, shorter than its %d", len(raw), size)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(dst)), size), raw)
	return nil
}

// header begins every record.
type header struct {
	Kind   bpf.KernelRecordKind
	Seq    uint32
	Cookie uint64
	Time   uint64
}

// timeOf is the time of a record, 0 of one that is too short.
func timeOf(raw []byte) uint64 {
	var r header
	_ = copyRecord(&r, raw)
	return r.Time
}

// decode turns a record of the ring into an event. Heads point into raw.
func decode(raw []byte) (Event, error) {
	var r header
	if err := copyRecord(&r, raw); err != nil {
		return nil, err
	}
	socket := Socket{Cookie: r.Cookie, Seq: r.Seq, Time: r.Time}
	switch r.Kind {
	case bpf.KernelRecordKindRECORD_REQUEST_HEAD, bpf.KernelRecordKindRECORD_RESPONSE_HEAD:
		var h bpf.KernelHeadRecord
		if err := copyRecord(&h, raw); err != nil {
			return nil, err
		}
		bytes := raw[unsafe.Sizeof(h):]
		if uint64(len(bytes)) < uint64(h.Len) {
			return nil, fmt.Errorf("head record says %d header bytes and has %d", h.Len, len(bytes))
		}
		bytes = bytes[:h.Len]
		flags := headFlags(bpf.KernelHeadFlags(h.Flags))
		if r.Kind == bpf.KernelRecordKindRECORD_RESPONSE_HEAD {
			return &ResponseHead{Socket: socket, Flags: flags, Bytes: bytes}, nil
		}
		return &RequestHead{
			Socket: socket, PID: h.Pid, TID: h.Tid, Start: h.Start, Lane: lane(h.Pid, h.Lane),
			Family: h.Family, Local: h.Local, Remote: h.Remote, LocalPort: h.LocalPort, RemotePort: h.RemotePort,
			Flags: flags, Bytes: bytes,
		}, nil
	case bpf.KernelRecordKindRECORD_PROGRESS:
		var p bpf.KernelProgressRecord
		if err := copyRecord(&p, raw); err != nil {
			return nil, err
		}
		flags := bpf.KernelProgressFlags(p.Flags)
		e := &Progress{
			Socket: socket, Lane: lane(p.Pid, p.Lane), Start: p.Start, FirstRead: p.FirstRead,
			Received: p.Received, Sent: p.Sent, Chunks: p.Chunks, First: p.First, Major: p.Major,
			SoftirqDelay: p.SoftirqDelay, RemoteFaults: p.RemoteFaults, Retransmits: p.Retransmits, Unacked: uint64(p.Unacked) * 1000,
			LastChunk: flags&bpf.KernelProgressFlagsPROGRESS_LAST_CHUNK != 0,
			Lost:      flags&bpf.KernelProgressFlagsPROGRESS_LOST != 0,
			NoLane:    flags&bpf.KernelProgressFlagsPROGRESS_NO_LANE != 0,
			NoAccept:  flags&bpf.KernelProgressFlagsPROGRESS_NO_ACCEPT != 0,

			UnseenRead: flags&bpf.KernelProgressFlagsPROGRESS_UNSEEN_READ != 0,
		}
		copy(e.Exclusive[:], p.Exclusive[:])
		copy(e.Waker[:], p.Waker[:])
		copy(e.Plain[firstSocketStage:], p.Plain[:])
		return e, nil
	case bpf.KernelRecordKindRECORD_OCCURRENCE:
		var o bpf.KernelOccurrenceRecord
		if err := copyRecord(&o, raw); err != nil {
			return nil, err
		}
		s := stage.Stage(min(o.Stage, uint32(stage.Unattributed)))
		if !s.Stall() {
			return nil, fmt.Errorf("occurrence of stage %d, which is no stall", o.Stage)
		}
		flags := bpf.KernelOccurrenceFlags(o.Flags)
		return &Occurrence{
			Socket: socket, PID: o.Pid, Lane: lane(o.Pid, o.Lane), TID: o.Tid, Stage: s, Start: o.Start, Duration: int64(o.Duration),
			Syscall: o.Syscall, Major: flags&bpf.KernelOccurrenceFlagsOCCURRENCE_MAJOR != 0,
			Waker: flags&bpf.KernelOccurrenceFlagsOCCURRENCE_WAKER != 0,
		}, nil
	case bpf.KernelRecordKindRECORD_RETRANSMIT:
		var t bpf.KernelRetransmitRecord
		if err := copyRecord(&t, raw); err != nil {
			return nil, err
		}
		flags := bpf.KernelRetransmitFlags(t.Flags)
		return &Retransmit{
			Socket: socket, Start: t.Start, Plain: t.Plain, Retransmits: t.Retransmits,
			Over: flags&bpf.KernelRetransmitFlagsRETRANSMIT_OVER != 0, Acked: flags&bpf.KernelRetransmitFlagsRETRANSMIT_ACKED != 0,
			Spurious: flags&bpf.KernelRetransmitFlagsRETRANSMIT_SPURIOUS != 0,
		}, nil
	case bpf.KernelRecordKindRECORD_CLOSE:
		var c bpf.KernelCloseRecord
		if err := copyRecord(&c, raw); err != nil {
			return nil, err
		}
		flags := bpf.KernelCloseFlags(c.Flags)
		return &Close{
			Socket: socket, Drained: flags&bpf.KernelCloseFlagsCLOSE_DRAINED != 0,
			Acked: flags&bpf.KernelCloseFlagsCLOSE_ACKED != 0,
			Final: flags&bpf.KernelCloseFlagsCLOSE_FINAL != 0, Lost: flags&bpf.KernelCloseFlagsCLOSE_LOST != 0,
		}, nil
	}
	var p bpf.KernelProcessRecord
	if err := copyRecord(&p, raw); err != nil {
		return nil, err
	}
	switch r.Kind {
	case bpf.KernelRecordKindRECORD_EXEC:
		return &Exec{PID: p.Pid}, nil
	case bpf.KernelRecordKindRECORD_FORK:
		return &Fork{PID: p.Pid, Parent: p.Parent}, nil
	case bpf.KernelRecordKindRECORD_EXIT:
		return &Exit{PID: p.Pid}, nil
	case bpf.KernelRecordKindRECORD_LISTEN:
		return &Listen{PID: p.Pid, NetNS: p.Netns, Port: uint16(p.Port)}, nil
	}
	return nil, fmt.Errorf("record of unknown kind %d", r.Kind)
}

func lane(pid uint32, id uint64) Lane {
	if id == 0 {
		return Lane{}
	}
	return Lane{PID: pid, ID: id}
}

func headFlags(f bpf.KernelHeadFlags) HeadFlags {
	return HeadFlags{
		Complete:   f&bpf.KernelHeadFlagsHEAD_COMPLETE != 0,
		Continued:  f&bpf.KernelHeadFlagsHEAD_CONTINUED != 0,
		Truncated:  f&bpf.KernelHeadFlagsHEAD_TRUNCATED != 0,
		Unreadable: f&bpf.KernelHeadFlagsHEAD_UNREADABLE != 0,
		Candidate:  f&bpf.KernelHeadFlagsHEAD_CANDIDATE != 0,
		NoArrival:  f&bpf.KernelHeadFlagsHEAD_NO_ARRIVAL != 0,
		LostBefore: f&bpf.KernelHeadFlagsHEAD_LOST_BEFORE != 0,
	}
}
