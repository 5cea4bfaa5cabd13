// Package stage names the parts that a request's wall time is split into.
//
// It is the one vocabulary of the project: the kernel programs count by these
// numbers (bpf/stages.h holds the same list, and a test compares the two), the
// receiver names its spans and attributes by them, the processor looks for
// spikes in them and the root-cause rules speak of them.
package stage

import "slices"

// Stage is one kind of time in a request. The zero value is Unknown.
type Stage uint8

// The stages, in the order of the kernel's counters. A request's time in them
// never overlaps: where two apply at one moment, Precedence decides.
const (
	Unknown      Stage = iota // no stage; never exported
	CPU                       // the serving thread on a CPU
	RunQueue                  // runnable, not running
	Throttled                 // stopped by CFS bandwidth (cpu.max)
	PageFault                 // in a page fault, major or minor
	Reclaim                   // freeing memory itself, for the machine or for its cgroup (direct reclaim)
	Compaction                // moving pages together itself, for a huge one (direct compaction)
	PageCache                 // waiting for I/O in a buffered read
	BlockIO                   // waiting for other I/O (O_DIRECT, fsync, writeback)
	Lock                      // futex mutex, flock/fcntl, kernel lock
	Syscall                   // blocked in any other system call
	Stopped                   // SIGSTOP, tracer, freezer
	Wait                      // idle: epoll, poll, select, sleep, condition variable, peer
	AcceptQueue               // connection established, not yet accepted
	RequestBody               // header read, body still arriving
	ReceiveQueue              // bytes readable, not yet read
	SendBuffer                // accepted by send, not yet handed to the device
	Qdisc                     // in the device's queue
	Retransmit                // sent, lost and sent again, until acknowledged
	Unattributed              // wall time that nothing above explains
	count
)

var names = [count]string{
	Unknown: "unknown", CPU: "cpu", RunQueue: "run_queue", Throttled: "throttled",
	PageFault: "page_fault", Reclaim: "reclaim", Compaction: "compaction", PageCache: "page_cache",
	BlockIO: "block_io", Lock: "lock", Syscall: "syscall", Stopped: "stopped", Wait: "wait",
	AcceptQueue: "accept_queue", RequestBody: "request_body", ReceiveQueue: "receive_queue",
	SendBuffer: "send_buffer", Qdisc: "qdisc", Retransmit: "retransmit", Unattributed: "unattributed",
}

// Count is the number of stages, Unknown included: the length of a Times.
const Count = int(count)

// Precedence lists the stages from the strongest claim on a moment to the
// weakest. Unattributed is what remains and therefore not listed.
var Precedence = []Stage{
	Throttled, RunQueue, Reclaim, Compaction, PageFault, PageCache, BlockIO, Lock, Syscall, Stopped,
	CPU, Retransmit, SendBuffer, Qdisc, AcceptQueue, ReceiveQueue, RequestBody, Wait,
}

// String returns the stage's exported name, as used in
// ebpfllm.stage and ebpfllm.stage.<name>.
func (s Stage) String() string {
	if int(s) >= Count {
		return names[Unknown]
	}
	return names[s]
}

// Parse returns the stage of an exported name.
func Parse(name string) (Stage, bool) {
	i := slices.Index(names[:], name)
	return Stage(max(i, 0)), i > 0
}

// All returns every stage a request can have, in counter order.
func All() []Stage {
	all := make([]Stage, 0, Count-1)
	for s := CPU; s < count; s++ {
		all = append(all, s)
	}
	return all
}

// Socket tells whether the stage is read from the state of the request's
// socket, and so known whatever the server's runtime does.
func (s Stage) Socket() bool { return s >= AcceptQueue && s <= Retransmit }

// Stall tells whether the stage is a delay that somebody could remove. CPU,
// Wait and Unattributed are what is left over: they get totals, but no spans of
// their own and no cluster is blamed on them before a stall is.
func (s Stage) Stall() bool {
	return s != Unknown && s != CPU && s != Wait && s != Unattributed && s < count
}

// Times holds nanoseconds per stage.
type Times [Count]int64
