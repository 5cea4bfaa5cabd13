package probe

import "github.com/ebpfllm/ebpfllm/internal/stage"

// Event is what the kernel side tells: one of the types below. An event and the
// memory it points to are valid only until the handler returns.
type Event interface{ event() }

// Socket says which request an event belongs to. Times everywhere are
// CLOCK_MONOTONIC nanoseconds.
type Socket struct {
	Cookie uint64 // of the socket
	Seq    uint32 // number of the request on its connection, from 1
	Time   uint64
}

// RequestHead are the header bytes of a request, up to and with the blank line.
// A head that arrives in pieces comes as several events, all but the first
// Continued and the last Complete or Truncated.
type RequestHead struct {
	Socket
	PID, TID   uint32 // in the initial PID namespace
	Start      uint64 // first byte readable
	Lane       Lane
	Family     uint16
	Local      [16]byte // the first 4 bytes for IPv4
	Remote     [16]byte
	LocalPort  uint16
	RemotePort uint16
	Flags      HeadFlags
	Bytes      []byte
}

// ResponseHead are the header bytes of a response, in the same way.
type ResponseHead struct {
	Socket
	Flags HeadFlags
	Bytes []byte
}

// HeadFlags say how much of a head the bytes are.
type HeadFlags struct {
	Complete   bool // they end with the blank line
	Continued  bool // they follow those of an earlier event
	Truncated  bool // the rest never comes
	Unreadable bool // read by a call whose buffer is not known (io_uring, splice): there are no bytes
	Candidate  bool // only the request line, of a process that is not yet a target
	NoArrival  bool // the first byte's arrival was not seen: Start is the read's time
	LostBefore bool // a record was lost since the last request whose head was sent up on this connection
}

// Lane is whoever serves requests: a thread, or in Go a goroutine. The zero
// Lane is an unknown one.
type Lane struct {
	PID uint32
	ID  uint64 // thread id, or address of the goroutine's g
}

// Progress is the reading of a request at the moment (Time) at which everything
// sent so far had reached the device. The last one that the framing allows is
// the request's result.
type Progress struct {
	Socket
	Lane      Lane
	Start     uint64
	FirstRead uint64
	Received  uint64 // bytes read since the request's first
	Sent      uint64 // bytes accepted by send since the response's first
	Chunks    uint32 // sends of the response, without its head and its terminator where they were sent alone
	First     uint64 // when the first byte since the reading before this one reached the device; 0 if none did
	Exclusive stage.Times
	Waker     stage.Times // of Exclusive: on threads that the serving thread waited for
	Plain     stage.Times // of the socket stages
	Major     int64       // of Exclusive[stage.PageFault]

	SoftirqDelay int64  // how late the softirq was that brought the first byte; -1 unknown
	RemoteFaults int64  // pages that faults found on another NUMA node; -1 unknown
	Retransmits  uint32 // segments of the response that were sent again
	Unacked      uint64 // for how long after Time the kernel may find that bytes sent so far were lost

	LastChunk bool // the last write ended with the terminator of chunked encoding
	Lost      bool // a record of this request was lost
	NoLane    bool // the serving thread or goroutine was not known for some of the time
	NoAccept  bool // the accept was not seen
	// UnseenRead: bytes of the request were read by a call that is not seen (splice).
	UnseenRead bool
}

// Occurrence is a stretch of one stage that ended at Time. It belongs to a
// request (Cookie is not 0), to all requests in flight on its lane, or without a
// lane to all of its process.
type Occurrence struct {
	Socket
	PID      uint32
	Lane     Lane
	TID      uint32
	Stage    stage.Stage
	Start    uint64
	Duration int64 // of the stage within [Start, Time]
	Syscall  int32 // -1 if none
	Major    bool
	Waker    bool // on the thread TID of process PID, which the request's own thread waited for
}

// Close says that a connection ends: with Final the socket is gone, without it
// it is shut for sending.
type Close struct {
	Socket
	Drained bool // nothing was left unsent
	Acked   bool // … and the client has acknowledged everything
	Final   bool
	Lost    bool
}

// Retransmit says that bytes of a request's response were lost and sent again at
// Time, or with Over that nothing which was sent again is outstanding any more.
type Retransmit struct {
	Socket
	Start       uint64 // when they were first sent, or a time after that
	Plain       int64  // the response's total so far, from the first sending to the acknowledgement
	Retransmits uint32 // segments sent again so far
	Over        bool
	Acked       bool // with Over: they are acknowledged, and not given up
	Spurious    bool // with Acked: they had arrived at their first sending
}

// Exec says that a process runs a new program; any process of the machine.
type Exec struct{ PID uint32 }

// Fork says that a tracked process has a new child process, tracked as well.
type Fork struct{ PID, Parent uint32 }

// Exit says that a tracked process ended.
type Exit struct{ PID uint32 }

// Listen says that a process listens on a TCP port; any process of the machine.
type Listen struct {
	PID, NetNS uint32
	Port       uint16
}

// Tick follows each reading of the ring, when no record is left.
type Tick struct{ Now uint64 }

func (*RequestHead) event()  {}
func (*ResponseHead) event() {}
func (*Progress) event()     {}
func (*Occurrence) event()   {}
func (*Close) event()        {}
func (*Retransmit) event()   {}
func (*Exec) event()         {}
func (*Fork) event()         {}
func (*Exit) event()         {}
func (*Listen) event()       {}
func (*Tick) event()         {}
