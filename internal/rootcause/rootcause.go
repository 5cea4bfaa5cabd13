// Package rootcause turns the stage in which a spike happened, and what else is
// known about it, into a likely cause and what to do about it.
//
// The stage is measured; the cause is inferred from it by the rules below. Every
// cause therefore begins with the word Inferred, and says what it was inferred
// from. Where the kernel is innocent the rules say that too.
package rootcause

import (
	"fmt"

	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// Evidence is what is known of a spike. The zero value of a field means that
// nothing is known of it.
type Evidence struct {
	Stage    stage.Stage // Unknown for a spike in an application span's own duration
	Span     string      // name of that application span
	Excess   float64     // seconds above the baseline
	Major    float64     // seconds in page faults that waited for I/O
	Syscall  string      // the blocking system call that took longest
	SharedBy int         // requests delayed by the same stall
	Waker    float64     // seconds in the stage on threads that the request waited for
	WakerPID int64       // process of such a thread
	WakerTID int64       // that thread
}

// Finding is a likely cause and an advice, each a sentence or two.
type Finding struct {
	Cause          string
	Recommendation string
}

const inferred = "Inferred: "

// majorShare is the part of the excess that major faults must explain to be
// blamed.
const majorShare = 0.5

// Explain returns the finding for a spike.
func Explain(e Evidence) Finding {
	f := explain(e)
	f.Cause = inferred + f.Cause + waker(e)
	if e.SharedBy > 1 {
		f.Cause += fmt.Sprintf(" The stall was shared by %d requests, which its thread or process served or had yet to read.", e.SharedBy)
	}
	return f
}

func explain(e Evidence) Finding {
	switch e.Stage {
	case stage.PageFault:
		if e.Major >= majorShare*e.Excess && e.Major > 0 {
			return Finding{
				"memory-mapped pages, most likely model weights, were no longer in the page cache and were read from storage in page faults.",
				"Keep the weights resident: mlock them (llama.cpp: --mlock), raise the memory limit or memory.low of the cgroup, and keep other readers of large files off the node.",
			}
		}
		return Finding{
			"page faults that needed no storage took long: most likely first touch of fresh memory. Reclaim and compaction within faults are counted apart.",
			"Touch memory before serving (MAP_POPULATE, warm-up requests), keep what was allocated, and use huge pages for large buffers.",
		}
	case stage.Reclaim:
		return Finding{
			"memory had run out, in the thread's cgroup or on the machine, and the thread had to free some itself before it got any (direct reclaim).",
			"Leave head room below the cgroup's memory.high and memory.max; on a full machine raise vm.min_free_kbytes or vm.watermark_scale_factor, so that kswapd frees memory before threads must; look at the memory pressure files (memory.pressure, /proc/pressure/memory) for who else fills it.",
		}
	case stage.Compaction:
		return Finding{
			"the thread asked for a huge page, or another large block, and had to move other pages together itself first (direct compaction).",
			"Set /sys/kernel/mm/transparent_hugepage/defrag to defer or defer+madvise, reserve huge pages at boot, or allocate large buffers once, before memory is fragmented.",
		}
	case stage.PageCache:
		return Finding{
			"a buffered read missed the page cache and waited for storage.",
			"Read weights, adapters and KV files before serving, keep them cached (memory.low, vmtouch), or move them to faster storage.",
		}
	case stage.BlockIO:
		return Finding{
			fmt.Sprintf("the thread waited for storage outside the page cache%s: direct I/O, fsync or writeback.", in(e.Syscall)),
			"Take logging with fsync and checkpoints off the serving thread; look for io.max limits and for other users of the device.",
		}
	case stage.RunQueue:
		return Finding{
			"the serving thread was ready to run but other threads had the CPU.",
			"Match thread counts (OMP_NUM_THREADS, --threads) to the CPUs the process may use, keep batch jobs off these cores, or raise cpu.weight.",
		}
	case stage.Throttled:
		return Finding{
			"the cgroup had used up its CPU quota and was stopped until the next period.",
			"Raise or remove the CPU limit (cpu.max), or use fewer threads: many threads burn a period's quota in its first milliseconds.",
		}
	case stage.Lock:
		return Finding{
			fmt.Sprintf("the serving thread waited for a lock%s that another thread or process held.", in(e.Syscall)),
			"Find the holder (its spans at the same time), shorten its critical section, and keep tokenisation, logging and allocation out of it.",
		}
	case stage.Syscall:
		call := "a system call"
		if e.Syscall != "" {
			call = "the system call " + e.Syscall
		}
		return Finding{
			fmt.Sprintf("the serving thread was blocked in %s.", call),
			"Take the call off the serving thread or give it a time limit; look at what it waits for: a pipe, another process, a device driver.",
		}
	case stage.Stopped:
		return Finding{
			"the process was stopped from outside: SIGSTOP, a debugger or tracer, or the cgroup freezer.",
			"Look for tools that stop or trace the process: profilers, checkpointing, the node's freezer; cgroup.events tells whether it was frozen.",
		}
	case stage.AcceptQueue:
		return Finding{
			"the connection waited in the listen queue: the accepting thread was busy or not running.",
			"Keep requests off the accepting thread, add acceptors, or let clients keep connections alive.",
		}
	case stage.RequestBody:
		return Finding{
			"the client sent the request's body slowly; the server only waited.",
			"Nothing to do in the server: look at the client's upload and the network, and let a proxy buffer request bodies.",
		}
	case stage.ReceiveQueue:
		return Finding{
			"the request lay readable in the socket while its reader was busy with other work.",
			"Take long work (tokenising long prompts, JSON of large bodies) off the event loop, or run more workers.",
		}
	case stage.SendBuffer:
		return Finding{
			"response bytes stayed in the socket's send buffer: the client reads slowly or its receive window is small, or acknowledgements came late.",
			"Look at the client and the path to it; buffer in a proxy so that slow readers do not hold the server, and set TCP_NODELAY for streamed tokens.",
		}
	case stage.Qdisc:
		return Finding{
			"packets waited in the network device's queue.",
			"Look for traffic shaping and bulk transfers on the device; use fq or fq_codel.",
		}
	case stage.Retransmit:
		return Finding{
			"bytes of the response were sent again, because the network lost them or their acknowledgement, and the client waited for them.",
			"Look for loss on the path to the client (ip -s link, nstat TcpRetransSegs, switch and NIC drop counters, full receive queues at the client); shorten the wait with tail loss probes and RACK (on by default in Linux) and a lower minimum RTO on short paths (ip route ... rto_min).",
		}
	case stage.CPU:
		return Finding{
			"the request needed more CPU time itself; the kernel is innocent.",
			"Look at the request: prompt length, batch size, tokenisation, sampling, and at a CPU profile of the process.",
		}
	case stage.Wait:
		return Finding{
			"the serving thread was idle and waited for someone else: the engine, a queue, a timer or a remote service; no kernel delay explains it.",
			"Look at the engine's queue and batch times and at downstream spans; check for batch timers.",
		}
	case stage.Unattributed:
		return Finding{
			"the time could not be tied to the serving thread or its socket.",
			"Look at the application's spans; a runtime that moves requests between threads can hide the owner.",
		}
	default:
		return Finding{
			fmt.Sprintf("the application's own span %q took longer than usual; without kernel stages of that process nothing more is known.", e.Span),
			"Run the ebpfllm receiver on that host to see the stages below the application.",
		}
	}
}

// wakerShare is the part of the excess that must have passed on threads that
// the request waited for to name one of them.
const wakerShare = 0.5

// waker says on which thread it happened where that was not the request's own.
func waker(e Evidence) string {
	switch {
	case e.Waker <= 0 || e.Waker < wakerShare*e.Excess || e.Stage == stage.Wait:
		return ""
	case e.WakerPID == 0:
		return " It happened not on the thread that served the request, but on one that this thread waited for."
	}
	return fmt.Sprintf(" It happened not on the thread that served the request, but on thread %d of process %d, which this thread waited for.",
		e.WakerTID, e.WakerPID)
}

func in(syscall string) string {
	if syscall == "" {
		return ""
	}
	return " in " + syscall
}
