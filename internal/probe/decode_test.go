//go:build linux

package probe

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// raw lays a record out as the kernel does.
func raw[T any](record T, tail ...byte) []byte {
	size := unsafe.Sizeof(record)
	return append(append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(&record)), size)...), tail...)
}

func head(kind bpf.KernelRecordKind, bytes string) []byte {
	h := bpf.KernelHeadRecord{Pid: 7, Tid: 8, Start: 90, Lane: 11, Len: uint32(len(bytes)), LocalPort: 80, Flags: uint32(bpf.KernelHeadFlagsHEAD_COMPLETE)}
	h.R.Kind, h.R.Seq, h.R.Cookie, h.R.Time = uint32(kind), 3, 5, 100
	return raw(h, []byte(bytes)...)
}

func TestDecode(t *testing.T) {
	socket := Socket{Cookie: 5, Seq: 3, Time: 100}
	progress := bpf.KernelProgressRecord{Pid: 7, Lane: 11, Start: 90, FirstRead: 95, Received: 10, Sent: 20, Chunks: 2, First: 98, Major: 4}
	progress.R.Kind, progress.R.Seq, progress.R.Cookie, progress.R.Time = uint32(bpf.KernelRecordKindRECORD_PROGRESS), 3, 5, 100
	progress.SoftirqDelay, progress.RemoteFaults, progress.Retransmits, progress.Unacked = 12, -1, 13, 14
	progress.Exclusive[stage.Lock] = 6
	progress.Waker[stage.Lock] = 5
	progress.Plain[stage.SendBuffer-stage.AcceptQueue] = 9
	progress.Flags = uint32(bpf.KernelProgressFlagsPROGRESS_LAST_CHUNK | bpf.KernelProgressFlagsPROGRESS_NO_ACCEPT)
	wantProgress := &Progress{Socket: socket, Lane: Lane{7, 11}, Start: 90, FirstRead: 95, Received: 10, Sent: 20, Chunks: 2, First: 98, Major: 4, LastChunk: true, NoAccept: true, SoftirqDelay: 12, RemoteFaults: -1, Retransmits: 13, Unacked: 14000}
	wantProgress.Exclusive[stage.Lock] = 6
	wantProgress.Waker[stage.Lock] = 5
	wantProgress.Plain[stage.SendBuffer] = 9

	occurrence := bpf.KernelOccurrenceRecord{Start: 40, Duration: 60, Pid: 7, Tid: 8, Stage: uint32(stage.PageFault), Syscall: -1, Flags: uint32(bpf.KernelOccurrenceFlagsOCCURRENCE_MAJOR)}
	occurrence.R.Kind, occurrence.R.Time = uint32(bpf.KernelRecordKindRECORD_OCCURRENCE), 100
	waker := occurrence
	waker.R.Cookie, waker.R.Seq = 5, 3
	waker.Flags = uint32(bpf.KernelOccurrenceFlagsOCCURRENCE_WAKER)
	closing := bpf.KernelCloseRecord{Flags: uint32(bpf.KernelCloseFlagsCLOSE_DRAINED | bpf.KernelCloseFlagsCLOSE_ACKED)}
	closing.R.Kind, closing.R.Seq, closing.R.Cookie, closing.R.Time = uint32(bpf.KernelRecordKindRECORD_CLOSE), 3, 5, 100
	resent := bpf.KernelRetransmitRecord{Start: 40, Plain: 60, Retransmits: 2, Flags: uint32(bpf.KernelRetransmitFlagsRETRANSMIT_OVER | bpf.KernelRetransmitFlagsRETRANSMIT_ACKED)}
	resent.R.Kind, resent.R.Seq, resent.R.Cookie, resent.R.Time = uint32(bpf.KernelRecordKindRECORD_RETRANSMIT), 3, 5, 100
	process := func(kind bpf.KernelRecordKind) []byte {
		p := bpf.KernelProcessRecord{Pid: 7, Parent: 6, Netns: 99, Port: 8080}
		p.R.Kind = uint32(kind)
		return raw(p)
	}
	for _, c := range []struct {
		name string
		raw  []byte
		want Event
	}{
		{"a request's head", head(bpf.KernelRecordKindRECORD_REQUEST_HEAD, "GET"), &RequestHead{Socket: socket, PID: 7, TID: 8, Start: 90, Lane: Lane{7, 11}, LocalPort: 80, Flags: HeadFlags{Complete: true}, Bytes: []byte("GET")}},
		{"a response's head", head(bpf.KernelRecordKindRECORD_RESPONSE_HEAD, "HTTP"), &ResponseHead{Socket: socket, Flags: HeadFlags{Complete: true}, Bytes: []byte("HTTP")}},
		{"progress", raw(progress), wantProgress},
		{"an occurrence of no lane", raw(occurrence), &Occurrence{Socket: Socket{Time: 100}, PID: 7, TID: 8, Stage: stage.PageFault, Start: 40, Duration: 60, Syscall: -1, Major: true}},
		{"an occurrence on a thread that was waited for", raw(waker), &Occurrence{Socket: socket, PID: 7, TID: 8, Stage: stage.PageFault, Start: 40, Duration: 60, Syscall: -1, Waker: true}},
		{"a close", raw(closing), &Close{Socket: socket, Drained: true, Acked: true}},
		{"bytes sent again", raw(resent), &Retransmit{Socket: socket, Start: 40, Plain: 60, Retransmits: 2, Over: true, Acked: true}},
		{"an exec", process(bpf.KernelRecordKindRECORD_EXEC), &Exec{PID: 7}},
		{"a fork", process(bpf.KernelRecordKindRECORD_FORK), &Fork{PID: 7, Parent: 6}},
		{"an exit", process(bpf.KernelRecordKindRECORD_EXIT), &Exit{PID: 7}},
		{"a listener", process(bpf.KernelRecordKindRECORD_LISTEN), &Listen{PID: 7, NetNS: 99, Port: 8080}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := decode(c.raw)
			require.NoError(t, err)
			assert.Equal(t, c.want, got)
			for n := range len(c.raw) {
				_, err := decode(c.raw[:n])
				assert.Error(t, err, "cut to %d bytes", n)
			}
		})
	}
}

func TestDecodeRefuses(t *testing.T) {
	long := head(bpf.KernelRecordKindRECORD_REQUEST_HEAD, "GET")
	_, err := decode(long[:len(long)-1])
	require.ErrorContains(t, err, "3 header bytes and has 2")
	o := bpf.KernelOccurrenceRecord{Stage: 1 << 20}
	o.R.Kind = uint32(bpf.KernelRecordKindRECORD_OCCURRENCE)
	_, err = decode(raw(o))
	require.ErrorContains(t, err, "no stall")
	p := bpf.KernelProcessRecord{}
	p.R.Kind = 99
	_, err = decode(raw(p))
	require.ErrorContains(t, err, "unknown kind 99")
}

func FuzzDecode(f *testing.F) {
	f.Add(head(bpf.KernelRecordKindRECORD_REQUEST_HEAD, "GET / HTTP/1.1\r\n\r\n"))
	f.Add(raw(bpf.KernelProgressRecord{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decode(b)
		if (err == nil) == (e == nil) {
			t.Fatalf("event %v with error %v", e, err)
		}
	})
}

func TestMissingCapabilitiesAreNamed(t *testing.T) {
	status := func(eff string) []byte { return []byte("Name:\tx\nCapPrm:\t0\nCapEff:\t" + eff + "\nCapBnd:\t0\n") }
	const perfmon, bpfCap, admin = "0000004000000000", "0000008000000000", "0000000000200000"
	require.NoError(t, missingCapabilities(status(admin)))
	require.NoError(t, missingCapabilities(status("000000c000000000")))
	for eff, want := range map[string]string{
		"0000000000000000": "missing CAP_BPF and CAP_PERFMON",
		perfmon:            "missing CAP_BPF:",
		bpfCap:             "missing CAP_PERFMON:",
		"zz":               "invalid syntax",
	} {
		require.ErrorContains(t, missingCapabilities(status(eff)), want)
	}
	require.ErrorContains(t, missingCapabilities([]byte("Name:\tx\n")), "no CapEff")
}

func TestCPULists(t *testing.T) {
	for list, want := range map[string][]int{"0": {0}, "0-3": {0, 1, 2, 3}, "0,2-3,7": {0, 2, 3, 7}} {
		got, err := parseCPUs(list)
		require.NoError(t, err)
		assert.Equal(t, want, got)
	}
	for _, list := range []string{"", "a", "3-1", "0-99999999", "1,,2"} {
		_, err := parseCPUs(list)
		assert.ErrorContains(t, err, "CPU list", list)
	}
}

func TestTheLockdownIsWhatStandsInBrackets(t *testing.T) {
	root := t.TempDir()
	assert.Empty(t, lockedDown(root))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "sys/kernel/security"), 0o755))
	for text, want := range map[string]string{
		"[none] integrity confidentiality\n": "none",
		"none integrity [confidentiality]\n": "confidentiality",
		"":                                   "",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(root, "sys/kernel/security/lockdown"), []byte(text), 0o644))
		assert.Equal(t, want, lockedDown(root))
	}
}
