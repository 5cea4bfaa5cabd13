/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The state that the programs share, and the maps that hold it.
 *
 *   thread (task storage)   what a tracked thread is doing now
 *   lane   (hash)           whoever serves requests: a thread, or a goroutine.
 *                           Cumulative time per stage; a request is the
 *                           difference between two readings
 *   conn   (socket storage) a server connection and the request on it
 *
 * Each word has one writer at a time: a lane its thread (and, while the thread
 * is off the CPU, its waker), a conn whoever holds the socket's lock. A clock
 * is a single word, so that a reader on another CPU never sees it half done.
 */
#ifndef EBPFLLM_STATE_H
#define EBPFLLM_STATE_H

#include "kernel.h"
#include "records.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

char LICENSE[] SEC("license") = "Dual MIT/GPL";

/* Set before loading. */
const volatile __u8 numa = 0; /* the kernel balances memory between NUMA nodes */
const volatile __u64 min_duration = 1000000; /* ns: shorter stretches get no record of their own */
const volatile __u8 preempt_count_known = 0; /* the next one is valid: wake-ups are followed, and softirqs told from threads */
const volatile __s64 preempt_count_at = 0; /* from a CPU's run queue to its preempt count, in bytes */

enum process_flags {
	PROCESS_CANDIDATE = 1,	/* look at request lines only */
	PROCESS_GO = 2,		/* the server is a goroutine: read g at go_offset from the FS base */
	PROCESS_NO_LANE = 4,	/* Go, but where g is kept is not known: no thread time */
	PROCESS_FORGET = 8,	/* no longer tracked: the iterator removes its threads' state */
	PROCESS_FORKED = 16,	/* by a tracked process, and user space has not said anything of it yet */
};

struct process {
	__u32 flags;
	__s32 go_offset;
};

/*
 * Each thread remembers its latest stretches off its own work, round and round:
 * for the request that it will read (who will read is not known when the bytes
 * come), and for the threads that it will wake (chain.h). 16: neighbours of one
 * kind are joined, and RECENT_NS keeps the short ones out. A power of two.
 */
#define RECENT 16
#define RECENT_NS 20000
struct stretch {
	__u64 from, to;
	__u64 ns; /* of the stage, within [from, to] */
	__u32 pid, tid; /* the thread that it happened on */
	__u32 waker; /* the thread that handed it on by waking this one; 0: this thread's own */
	__u8 stage;
	__u8 depth; /* wake-ups between that thread and this one; 0: this thread's own */
	__u8 major; /* a page fault that waited for I/O */
	__u8 early; /* handed on, but from before the wait that the wake-up ended */
};

/*
 * What is older than the latest stretches is kept as sums: readings of the
 * thread's totals, taken when it wakes another tracked thread or is woken by
 * one, which is where waits begin and end. 4 of all, and 8 that lie at least
 * COARSE_NS apart: 128 ms or more for a thread that is woken all the time.
 */
#define KINDS (THREAD_STAGES + 1) /* the stages, with major faults apart */
#define MAJOR_FAULTS THREAD_STAGES
#define FINE 4
#define COARSE 8
#define COARSE_NS 16000000
#define READING_SHIFT 6 /* kept in units of 64 ns: 32 bits hold 4.5 minutes, */
#define READING_AGE_NS 100000000000 /* and older ones are not compared with */
struct reading {
	__u64 time;
	__u32 total[KINDS + (KINDS & 1)];
};

struct thread {
	__u32 tgid;
	__u32 tid;
	struct process process;
	__u64 owner;	 /* lane id last seen on the thread; 0 unknown */
	__u64 m;	 /* in Go: the thread's m */
	__u64 seen;	 /* time of the thread's last event */
	__u64 out;	 /* when it last left the CPU; or since when it is tracked; 0 neither */
	__u64 ran;	 /* the scheduler's account of its CPU time then */
	__u64 wake;	 /* when it was last woken */
	__u64 fault;	 /* start of the page fault it is in; 0 if none */
	__u64 fault_out; /* time since that start which is not the fault's: in the run queue, in reclaim and compaction */
	__s64 fault_base; /* the lane's page_fault time at that start */
	__u64 fault_end; /* when the latest one from user mode was over */
	/*
	 * What it is in of reclaim and compaction, innermost in the lowest byte: they nest, in a fault or a system
	 * call. For each of the two: its start, and the lane's time in it then.
	 */
	__u32 memory, pad2;
	__u64 memory_from[2];
	__u64 memory_out[2]; /* fault_out then */
	__s64 memory_base[2];
	__u64 remote_faults; /* the kernel's count at its latest fault */
	__u64 throttled; /* cfs_rq->throttled_clock_pelt_time when it left the CPU */
	__u64 cfs_rq;	 /* the run queue that was read from */
	__u64 queued_from, queued_to; /* its longest wait in the run queue for no lane, until it sleeps or takes a lane up */
	struct stretch recent[RECENT];
	__u64 total[KINDS]; /* of all stretches there ever were, its own and those handed on; CPU time is what is left over */
	struct stretch spilled[KINDS]; /* handed on, and no longer among the latest: since it last sent, or used another connection */
	struct reading readings[FINE + COARSE];
	__u32 read_fine, read_coarse; /* how many */
	__u64 known;	 /* what it did since then is in recent, or else it was on a CPU; 0: nothing is known yet */
	__u64 conn;	 /* cookie of the server connection that it last used */
	__u64 used, used_other; /* when it last used that one, and any other one */
	__u64 cause;	 /* the first socket that it read since it was last woken */
	__u32 waker;	 /* the thread that ended its last wait, if the chain could be followed; else 0 */
	__u32 next; /* of recent */
	__s32 syscall;	 /* it blocked in; -1 none */
	__u8 off;	 /* it is off the CPU */
	__u8 class;	 /* enum stage that its time off the CPU belongs to until it is woken */
	__u8 contended;	 /* inside a contended kernel lock */
	__u8 fault_in_user; /* the fault came from user mode */
	__u8 fault_io;	    /* it has waited for I/O, be it another's readahead, which the kernel does not count as major */
	__u8 caused;	 /* enum caused: whether its last wake-up is still why it does what it does */
	__u16 curg; /* in Go: where m keeps its current goroutine; 0 not known yet */
	__u8 accepts; /* it has waited for connections or its descriptors: it may be one who accepts */
	__u8 spills; /* there are any spilled */
	__u8 pad3[6];
};

struct lane_key {
	__u64 id; /* thread id, or address of a goroutine's g */
	__u32 tgid;
	__u32 goroutine;
};

struct lane {
	__s64 wait; /* clock, see clock_*() */
	__s64 ns[THREAD_STAGES]; /* ns[STAGE_WAIT] unused */
	__s64 major;
	__s64 remote; /* pages that faults found on another NUMA node */
	__u64 since; /* start of the present state */
	__u32 state; /* enum stage */
	__u32 tid;   /* thread that carries it */
	__u32 lost;  /* occurrence records lost */
	__u32 pending; /* requests that have been read and not answered */
	__u64 pending_since; /* there has always been one since then */
};

/*
 * When bytes were first sent, for when they are sent again: the latest segments of a response, those within MARK_NS
 * of each other as one. 8: a loss shows within a round trip where more is sent after it, and else is among the last.
 */
#define MARKS 8
#define MARK_NS 1000000
struct mark {
	__u64 at;
	__s64 send; /* done[STAGE_SEND_BUFFER] then */
	__u32 end;  /* sequence number behind the last byte */
	__u32 pad;
};

/* Beside a loss, what holds further bytes back: the loss itself, or a receive window that is full in any case. */
enum losing { NOT_LOSING, LOSING, LOSING_FULL };

/*
 * What kept those who accept connections from running while one waits: for each stage the stretches of the thread
 * that had most of it. (Which of them will accept it is not known before.)
 */
enum { HELD_RUN_QUEUE, HELD_THROTTLED, HELD_STOPPED, HELD_STAGES };
struct held {
	struct held_by {
		__u64 from, to; /* of the first to the last one */
		__u64 ns;	/* of all */
		__u64 tid;
	} by[HELD_STAGES];
};

enum conn_state { CONN_IDLE, CONN_HEAD, CONN_ACTIVE };

struct conn {
	/* What data_ready touches comes first, in one cache line: mostly it runs on another CPU than the reader. */
	__u8 state; /* enum conn_state */
	__u8 first; /* the request is the connection's first */
	__u8 responding; /* a final response has begun */
	__u8 last_chunk;
	__u8 lost;
	__u8 no_lane;
	__u8 no_accept;
	__u8 socket_state; /* exclusive stage of the socket now; 0 none */
	__u64 start;
	__u64 next_start; /* first byte after the response began: the next request's, probably */
	__s64 receive, send, qdisc; /* clocks of this request, see clock_*() */
	__u64 receive_since;
	__u64 cookie;
	__u32 seq;
	__u8 response_open; /* the response's head is not complete */
	__u8 counted;	   /* it is one of MAX_CONNS */
	__u8 no_arrival;
	__u8 head_alone;   /* the present send call is given the response's head, or part of it, and nothing else */
	__u8 slot;	   /* in pending while it waits to be accepted, from 1; 0 none */
	__u8 losing;	   /* enum losing: bytes of the response that were sent again are not acknowledged */
	__u8 marked;	   /* marks made so far, at most 2 * MARKS */
	__u8 pending;	   /* it counts in its lane's pending */
	__u8 lost_before;  /* a record was lost since the last request whose head went up */
	__u8 unseen_read;  /* bytes of the request were read, and no call was seen to do so */
	__u32 sending;	 /* inside a send call */
	__u32 head_last; /* last four bytes of the head so far */
	__u16 head_bytes;
	__u16 response_bytes;
	__u32 pid;
	__u32 tid;
	__u16 family, local_port, remote_port, pad;
	__u8 local[16], remote[16];
	__u64 established, accepted;
	struct held held; /* until it was accepted */
	__u64 first_read;
	__u64 received, sent;
	__u32 writes;
	__u32 reported; /* writes when progress was last sent up */
	__u32 chunks;	/* writes that were not the head alone, nor the terminator of chunked encoding alone */
	__u32 send_size; /* bytes that the present send call was given */
	__u64 first_out; /* when the first byte since then passed the device */
	__s64 retransmit; /* a clock of this request, too */
	__u32 handed;	  /* sequence number up to which bytes were handed to the device */
	__u32 transmitted; /* … and passed by it */
	__u8 sequenced;	  /* handed and transmitted are valid */
	__u8 pad2[7];
	__u64 handed_at, transmitted_at;
	__u32 response_seq; /* sequence number of the response's first byte */
	__u32 lost_until;   /* … behind the last byte that was sent again */
	__u32 retransmits, pad3;
	__u64 retransmit_since, resent_first, resent_at;
	__u32 duplicates, pad4; /* how many the client had told of before this loss */
	__s64 retransmit_before, retransmit_done; /* the clock and done[STAGE_RETRANSMIT] before this loss */
	struct mark marks[MARKS];
	__s64 softirq_delay, next_softirq_delay; /* of what brought start and next_start; -1 unknown */
	__s64 base_remote;
	struct lane_key lane;
	__s64 lane_wait; /* the lane's wait clock when socket_state began */
	__s64 lane_lost;
	__s64 lane_socket; /* what the socket's stages had taken over when the request came onto the lane */
	__s64 body_wait; /* the lane's wait clock at the first read */
	__s64 body_receive; /* done[STAGE_RECEIVE_QUEUE] at the first read */
	__s64 body;	 /* waiting for the body since, exclusive */
	__s64 base_stopped; /* the process's stopped clock at the first read, for a goroutine */
	__s64 base[THREAD_STAGES], base_major;
	__u64 chain_since; /* the previous send, or the first read: up to there the wake-up chains are counted */
	__s64 chain_wait, chain_socket; /* the lane's wait clock and conn_socket_time() then */
	__s64 chained[THREAD_STAGES], chained_major; /* of the lane's wait: what its wakers did */
	__s64 done[STAGE_COUNT]; /* before the first read, and what the socket took over since */
	__s64 plain[SOCKET_STAGES];
	__u64 send_since, qdisc_since, body_since; /* starts of their present stretches, as receive_since */
};

/* Processes to track, by tgid. 4096: targets with their trees; more are refused by user space with a message. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct process);
} processes SEC(".maps");

/*
 * Processes stopped as a whole (SIGSTOP), by tgid: a goroutine that is on no
 * thread is stopped with them. 1024: processes that were ever stopped while
 * tracked; LRU, since a lost one costs a label.
 */
struct stop {
	__s64 clock;
	__u64 since;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, struct stop);
} stops SEC(".maps");

/* Listening ports of tracked processes, by network namespace, and whether a listener has closed since user space last looked. 4096: one per listener. */
enum { PORT_OPEN, PORT_CLOSED };
struct port_key {
	__u32 netns;
	__u32 port;
};
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct port_key);
	__type(value, __u32);
} ports SEC(".maps");

/* One per tracked thread, made at fork or by the iterator, never in the scheduler. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");

/* 16384: threads and goroutines that serve requests at one time; 3 MB. A full map is counted. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct lane_key);
	__type(value, struct lane);
} lanes SEC(".maps");

/* One per server connection of a tracked port, at most MAX_CONNS; dies with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct conn);
} conns SEC(".maps");

#define MAX_CONNS 65536 /* 60 MB of storage, beside some 200 MB that the sockets themselves take */
__u64 conns_open = 0;
__u32 conns_losing = 0; /* those that wait for the acknowledgement of what was sent again */

/*
 * Connections that wait to be accepted (accept.h). 64, a bit each in
 * pending_slots: one that finds no place takes another's, which then counts as
 * accepted when it is first read.
 */
#define PENDING 64
struct pending {
	__u64 sk;	  /* 0: free, or about to be */
	__u64 unaccepted; /* when it was last seen to wait */
	__u64 woken;	  /* that was a thread coming back from waiting for its descriptors */
	__u64 since;	  /* it waits */
	struct held held;
};
struct pending pending[PENDING];
__u64 pending_slots = 0;
__u32 pending_next = 0;

/*
 * Connections between handshake and first read, by socket address, since a
 * waiting one is known by its address only, and socket storage takes no such
 * pointer. 8192: a full accept queue of 4096 twice; LRU, so that a
 * socket that is never read cannot hold a place.
 */
struct arrival {
	__u64 cookie;
	__u64 accepted;
	struct held held;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct arrival);
} arrivals SEC(".maps");

#define HEAD_BYTES 4096	    /* of a request's head; more is cut and said */
#define RESPONSE_BYTES 1024 /* of a response's */

/* Scratch for a head record; one entry for requests, one for responses, which may nest on a CPU. */
struct head_buffer {
	struct head_record head;
	__u8 bytes[HEAD_BYTES];
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct head_buffer);
} head_buffers SEC(".maps");

/* Everything that goes up. The size is set before loading (ring_buffer_mib). */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 8 << 20);
} ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/*
 * Nearly all tasks and sockets of a host have no storage at all: to see that
 * takes one load, and a helper's call less for each of them.
 */
static __always_inline struct thread *thread_of(struct task_struct *task)
{
	return task->bpf_storage ? bpf_task_storage_get(&threads, task, 0, 0) : 0;
}

static __always_inline struct conn *conn_of(struct sock *sk)
{
	return sk->sk_bpf_storage ? bpf_sk_storage_get(&conns, sk, 0, 0) : 0;
}

/* Atomic though per CPU: a program may be interrupted by another that counts the same. */
static __always_inline void count(__u32 counter)
{
	__u64 *v = bpf_map_lookup_elem(&counters, &counter);
	if (v)
		__sync_fetch_and_add(v, 1);
}

/*
 * Records never wake the reader: a wake-up would cost the traced task 14–36 µs
 * against 0.05 µs for the write. The reader polls.
 */
static __always_inline int send_up(void *record, __u64 size, __u32 lost)
{
	count(SENT_OF(lost));
	if (!bpf_ringbuf_output(&ring, record, size, BPF_RB_NO_WAKEUP))
		return 1;
	count(lost);
	return 0;
}

/*
 * A clock in one word: stopped it is the time it has run, running it is that
 * minus the time it was started at, and so negative.
 */
static __always_inline int clock_running(__s64 c) { return c < 0; }
static __always_inline __s64 clock_read(__s64 c, __u64 now) { return c < 0 ? c + (__s64)now : c; }
static __always_inline void clock_start(__s64 *c, __u64 now)
{
	if (*c >= 0)
		*c -= (__s64)now;
}
static __always_inline void clock_stop(__s64 *c, __u64 now)
{
	if (*c < 0) {
		__s64 v = *c + (__s64)now;
		*c = v > 0 ? v : 0;
	}
}

#endif
