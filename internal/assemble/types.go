package assemble

import (
	"github.com/ebpfllm/ebpfllm/internal/httphead"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Key names one request: the kernel's cookie of its socket and its number on
// that connection, from 1.
type Key struct {
	Cookie uint64
	Seq    uint32
}

// Link methods: how a span was tied to the application's trace.
const (
	LinkTraceparent = "traceparent" // the header on the request's own connection
	LinkNone        = "none"        // no (valid) context on the wire: a trace of the receiver's own
	LinkShared      = "shared"      // of an occurrence: the stall delayed other requests too, to which it has links
)

// Peer is the address pair of the request's socket.
type Peer struct {
	Family                uint16 // unix.AF_INET or unix.AF_INET6
	LocalAddr, RemoteAddr [16]byte
	LocalPort, RemotePort uint16
}

// Request is one request on a server socket, from its first byte's arrival in
// the kernel to its last response byte handed to the device. Times are
// CLOCK_MONOTONIC nanoseconds.
type Request struct {
	Key
	PID, TID uint32 // the process and the thread that read it, in the initial PID namespace
	Peer     Peer
	Head     httphead.Head

	Start      uint64 // first byte readable in the kernel
	FirstRead  uint64 // the read that completed the header returned
	FirstChunk uint64 // first response byte handed to the device; 0 if none
	End        uint64 // last response byte handed to the device; if bytes were sent again, their acknowledgement

	Status       int  // response status; 0 if no response head was seen
	Streaming    bool // text/event-stream, ndjson, or chunked with more than one write
	Chunks       int  // response writes that reached the device
	BytesIn      uint64
	BytesOut     uint64
	Gaps         Gaps
	GapValues    []int64       // the latest pauses between response writes, at most MaxGapValues, in nanoseconds
	Exclusive    stage.Times   // nanoseconds; sums to End-Start with Unattributed
	Waker        stage.Times   // nanoseconds of Exclusive that passed on threads that the serving thread waited for
	Plain        stage.Times   // socket stages only: overlapping totals
	MajorFault   int64         // nanoseconds of Exclusive[stage.PageFault] in faults that waited for I/O
	SharedBy     int           // largest number of requests in flight on its thread; 1 if alone
	Retransmits  int           // segments of the response that were sent again
	SoftirqDelay int64         // nanoseconds between the raising and the running of the softirq that brought the first byte; -1 unknown
	RemoteFaults int64         // pages that faults found on another NUMA node; -1 unknown
	Missing      []stage.Stage // stages that could not be measured for this request
	Refused      string        // not "" if no true account of its stages can be given
	Incomplete   []string      // why the record is not whole: lost_records, head_truncated, aborted, …
}

// MaxGapValues bounds Request.GapValues.
const MaxGapValues = 4096

// Gaps are the pauses between response writes, in nanoseconds. N counts them;
// without any the rest is zero and not exported.
type Gaps struct {
	N             int
	P50, P99, Max int64
}

// Occurrence is one stretch of a stall stage that lasted min_duration or more.
// It is delivered when it has ended, which may be long before its request does:
// one of the socket's stages at once, a thread's when it is known whom it delayed,
// see Settle.
type Occurrence struct {
	Key
	PID, TID   uint32 // of the thread it happened on
	Stage      stage.Stage
	Start, End uint64 // CLOCK_MONOTONIC nanoseconds
	Duration   int64  // End - Start: all of it is the stage's time
	Stretch    int64  // nanoseconds before End in which the stage's time lay in parts, others' between them; 0 if in one
	Syscall    int32  // system call number for Syscall, Lock, BlockIO, PageCache; -1 if none
	Major      bool   // for PageFault: it waited for I/O
	SharedBy   int    // requests that the same stall delayed for min_duration or more, this one included
	Others     []Key  // of these, the next ones behind this one in the order in which they were found, at most MaxOthers
	Waker      bool   // it happened on a thread that the request's own waited for: PID and TID are that thread's
}

// Sink takes what the assembler finds, in order: Begin once per request, then
// its occurrences, then Finish once. All calls come from one goroutine.
type Sink interface {
	Begin(*Request)
	Occurrence(*Occurrence)
	Finish(*Request)
}
