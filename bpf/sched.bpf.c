//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * run_queue, throttled, cpu, and every stage that a thread blocks in:
 * page_cache, block_io, lock, syscall, stopped, wait.
 *
 * Kernels: sched_switch and sched_waking exist everywhere above the floor
 * (5.14, where task_struct.__state got its name). Storage is only looked up
 * here: creating it would allocate under the run-queue lock.
 */
#include "chain.h"
#include "accept.h"
#include "syscalls_x86.h"

#define TASK_STOPPED 0x4
#define TASK_STOPPED_OR_TRACED (TASK_STOPPED | 0x8)
#define TASK_FROZEN 0x8000
#define S_IFMT 0170000
#define S_IFSOCK 0140000
#define O_DIRECT 040000
#define FUTEX_CMD_MASK 0x7f
enum { FUTEX_WAIT = 0, FUTEX_LOCK_PI = 6, FUTEX_LOCK_PI2 = 13 };
enum { F_SETLKW = 7, F_OFD_SETLKW = 38 };

static __always_inline struct file *file_of(struct task_struct *task, unsigned long fd)
{
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd), *file = 0;

	if (fd >= BPF_CORE_READ(table, max_fds))
		return 0;
	bpf_probe_read_kernel(&file, sizeof(file), files + fd);
	return file;
}

static __always_inline int is_socket(struct file *file)
{
	return file && (BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT) == S_IFSOCK;
}

static __always_inline int reads_files(long nr)
{
	return nr == NR_read || nr == NR_pread64 || nr == NR_readv || nr == NR_preadv || nr == NR_preadv2 ||
	       nr == NR_sendfile || nr == NR_splice || nr == NR_copy_file_range;
}

/* The stage of a thread that blocks in system call nr, when no stronger evidence says otherwise. */
static __always_inline __u32 class_of_syscall(struct task_struct *task, struct pt_regs *regs, long nr)
{
	switch (nr) {
	case NR_futex: {
		__u32 op = regs->si & FUTEX_CMD_MASK;
		/* 2 is what glibc, musl and parking_lot store in a contended mutex; a condition variable waits by bitset */
		return (op == FUTEX_WAIT && (__u32)regs->dx == 2) || op == FUTEX_LOCK_PI || op == FUTEX_LOCK_PI2 ?
			       STAGE_LOCK :
			       STAGE_WAIT;
	}
	case NR_flock:
		return STAGE_LOCK;
	case NR_fcntl:
		return regs->si == F_SETLKW || regs->si == F_OFD_SETLKW ? STAGE_LOCK : STAGE_SYSCALL;
	case NR_poll: case NR_ppoll: case NR_select: case NR_pselect6:
	case NR_epoll_wait: case NR_epoll_pwait: case NR_epoll_pwait2:
	case NR_nanosleep: case NR_clock_nanosleep: case NR_sched_yield: case NR_pause: case NR_restart_syscall:
	case NR_rt_sigtimedwait: case NR_rt_sigsuspend: case NR_wait4: case NR_waitid: case NR_futex_wait:
	case NR_accept: case NR_accept4: case NR_recvfrom: case NR_recvmsg: case NR_recvmmsg:
	case NR_sendto: case NR_sendmsg: case NR_sendmmsg:
	case NR_io_getevents: case NR_io_uring_enter:
		return STAGE_WAIT;
	case NR_read: case NR_readv: case NR_write: case NR_writev: case NR_sendfile: {
		/* on a socket this is waiting for a peer; what our own socket does meanwhile has stages of its own */
		if (is_socket(file_of(task, regs->di)))
			return STAGE_WAIT;
		return STAGE_SYSCALL;
	}
	case NR_splice:
		return is_socket(file_of(task, regs->di)) || is_socket(file_of(task, regs->dx)) ? STAGE_WAIT : STAGE_SYSCALL;
	}
	return STAGE_SYSCALL;
}

/* The stage of the time that begins as prev leaves the CPU. */
static __always_inline __u32 class_of(struct thread *t, struct task_struct *prev, int preempted)
{
	unsigned int state = prev->__state;
	struct pt_regs *regs;
	long nr;

	t->syscall = -1;
	if (preempted || !state)
		return STAGE_RUN_QUEUE;
	if (state & (TASK_STOPPED_OR_TRACED | TASK_FROZEN))
		return STAGE_STOPPED;
	if (t->memory)
		return t->memory & 0xff; /* whatever it waits for, it is to find memory */
	regs = (struct pt_regs *)bpf_task_pt_regs(prev);
	nr = regs->orig_ax;
	/* inside a system call a fault of user mode is over: it failed, and was not counted */
	if (t->fault && t->fault_in_user && nr >= 0)
		t->fault = 0;
	if (t->fault) {
		t->fault_io |= BPF_CORE_READ_BITFIELD(prev, in_iowait);
		return STAGE_PAGE_FAULT;
	}
	t->syscall = nr;
	if (BPF_CORE_READ_BITFIELD(prev, in_iowait)) {
		if (reads_files(nr)) {
			struct file *file = file_of(prev, regs->di);
			if (file && !(BPF_CORE_READ(file, f_flags) & O_DIRECT))
				return STAGE_PAGE_CACHE;
		}
		return STAGE_BLOCK_IO;
	}
	if (t->contended)
		return STAGE_LOCK;
	if (nr < 0)
		return STAGE_UNKNOWN; /* blocked on its way to user mode */
	return class_of_syscall(prev, regs, nr);
}

/* A thread of a process that is stopped as a whole stops: the first one starts the process's clock. */
static __always_inline void process_stops(struct thread *t, __u64 now)
{
	struct stop *s = bpf_map_lookup_elem(&stops, &t->tgid), first = { .clock = -(__s64)now, .since = now };

	if (!s) {
		bpf_map_update_elem(&stops, &t->tgid, &first, BPF_NOEXIST);
	} else if (!clock_running(s->clock)) {
		clock_start(&s->clock, now);
		s->since = now;
	}
}

/* … and the first to be continued stops it. */
static __always_inline void process_continues(struct thread *t, __u64 now)
{
	struct stop *s = bpf_map_lookup_elem(&stops, &t->tgid);

	if (!s || !clock_running(s->clock))
		return;
	clock_stop(&s->clock, now);
	occurrence_of(t, 0, 0, STAGE_STOPPED, s->since, now, now - s->since, 0);
}

static __always_inline void switched_out(struct thread *t, struct task_struct *prev, int preempted, __u64 now)
{
	struct lane *l;
	__u32 class;

	accept_look(now, 0, 0);
	l = lane_sync(t, owner_of(t, prev), now);
	class = class_of(t, prev, preempted);
	t->class = class;
	t->accepts |= class == STAGE_WAIT && waits_for_descriptors(t->syscall);
	t->out = now;
	t->ran = prev->se.sum_exec_runtime;
	if (!t->known) {
		t->known = now;
		chain_read_totals(t, now);
	}
	/* from here on its waker, on another CPU, may look */
	asm volatile("" ::: "memory");
	t->off = 1;
	if (class != STAGE_RUN_QUEUE)
		t->queued_from = t->queued_to = 0;
	if (class == STAGE_STOPPED && (t->process.flags & PROCESS_GO) && (prev->__state & TASK_STOPPED))
		process_stops(t, now);
	t->cfs_rq = (__u64)prev->se.cfs_rq;
	t->throttled = prev->se.cfs_rq->throttled_clock_pelt_time;
	if (l)
		lane_to(l, class, now);
}

/*
 * A thread that has slept since before it was tracked is woken, or so it seems: nothing was seen of it yet, and it
 * is on no CPU. Nobody else writes its state now: a wake-up holds the thread's own lock.
 */
static __always_inline void found_asleep(struct thread *t, struct task_struct *task)
{
	if (!t->out || *(__u8 *)&task->on_cpu) /* an int, and in 7.3 a byte */
		return;
	t->class = class_of(t, task, 0);
	t->accepts |= t->class == STAGE_WAIT && waits_for_descriptors(t->syscall);
	t->ran = task->se.sum_exec_runtime;
	t->known = t->out;
	chain_read_totals(t, t->known);
	t->off = 1;
}

/* An idle CPU takes some microseconds to wake up, and under a hypervisor some tens. */
#define IDLE_EXIT_NS 100000

/* The stages of a thread in which it waits for something that comes by itself: for I/O, a lock, memory. */
static __always_inline int stalls(__u32 class)
{
	return class != STAGE_UNKNOWN && class < STAGE_WAIT && class != STAGE_CPU && class != STAGE_RUN_QUEUE && class != STAGE_THROTTLED;
}

static __always_inline void switched_in(struct thread *t, int from_idle, __u64 now)
{
	__s64 waited = 0, throttled = 0;
	__u64 from;
	struct lane *l;
	__u32 class;

	if (!t->off)
		return;
	t->off = 0;
	t->seen = now;
	l = lane_of(t, t->owner);
	if (l && l->tid != t->tid)
		l = 0;
	from = t->class == STAGE_RUN_QUEUE ? t->out : t->wake > t->out ? t->wake : now;
	/*
	 * The clock counts while the run queue is throttled. The thread stays on the queue that it was throttled on,
	 * and may run on another CPU's afterwards: so read the one that it left.
	 */
	if (t->class == STAGE_RUN_QUEUE) {
		struct cfs_rq *left = (void *)t->cfs_rq;
		throttled = BPF_CORE_READ(left, throttled_clock_pelt_time) - t->throttled;
		if (throttled < 0)
			throttled = 0;
		if (throttled > (__s64)(now - from))
			throttled = now - from;
	}
	if (pending_slots) {
		/* Go's threads are alike: any of them takes up the goroutine that accepts, unless another one runs instead */
		int any = t->process.flags & PROCESS_GO;
		struct held held = { .by = {
			[HELD_RUN_QUEUE] = { t->accepts ? from + throttled : now, now },
			[HELD_THROTTLED] = { from, from + throttled },
			[HELD_STOPPED] = { t->class == STAGE_STOPPED ? t->out : from, from },
		} };

		for (int i = 0; i < HELD_STAGES; i++)
			held.by[i].tid = t->tid;
		accept_look(now, t->class == STAGE_WAIT && waits_for_descriptors(t->syscall), t->accepts || any ? &held : 0);
	}
	if (!l && now - from > t->queued_to - t->queued_from) {
		t->queued_from = from;
		t->queued_to = now;
	}
	waited = now - from;
	/* nobody was ahead of it, the CPU itself had to wake up: that is part of what it slept for */
	class = t->class;
	asm volatile("" : "+r"(class)); /* else the verifier does not see that it was compared */
	if (from_idle && waited < IDLE_EXIT_NS && stalls(class)) {
		l = l && l->state == STAGE_RUN_QUEUE ? l : 0;
		if (l) {
			lane_to(l, stage_running(t), now);
			l->ns[STAGE_RUN_QUEUE] -= waited;
			asm volatile("" : "+r"(class)); /* … nor here, before 6.12 */
			if (class < THREAD_STAGES)
				l->ns[class] += waited;
		}
		return;
	}
	t->fault_out += waited;
	if (t->class != STAGE_RUN_QUEUE && t->class != STAGE_PAGE_FAULT && t->wake <= t->out)
		remember(t, STAGE_WAIT, t->out, now, now - t->out, 0); /* its wake-up was not seen */
	remember(t, STAGE_THROTTLED, from, from + throttled, throttled, 0);
	remember(t, STAGE_RUN_QUEUE, from + throttled, now, waited - throttled, 0);
	if (!l)
		return;
	/* a wake-up that was not seen leaves the lane in its class: all of it is that class */
	if (l->state != STAGE_RUN_QUEUE) {
		waited = 0;
		throttled = 0;
	}
	lane_to(l, stage_running(t), now);
	l->ns[STAGE_RUN_QUEUE] -= throttled;
	l->ns[STAGE_THROTTLED] += throttled;
	occurrence(t, l, STAGE_THROTTLED, from, from + throttled, throttled, 0);
	occurrence(t, l, STAGE_RUN_QUEUE, from + throttled, now, waited - throttled, 0);
}

/* 5.14+: (preempt, prev, next[, prev_state]). Fires before the switch: current is still prev. */
SEC("tp_btf/sched_switch")
int BPF_PROG(sched_switch, bool preempt, struct task_struct *prev, struct task_struct *next)
{
	struct thread *t = thread_of(prev);
	__u64 now = 0;

	if (t) {
		now = bpf_ktime_get_ns();
		switched_out(t, prev, preempt, now);
	}
	t = thread_of(next);
	if (t)
		switched_in(t, !prev->pid, now ? now : bpf_ktime_get_ns());
	return 0;
}

/* 5.14+: (task). Runs on the waker's CPU; sched_wakeup may run later, on another. */
SEC("tp_btf/sched_waking")
int BPF_PROG(sched_waking, struct task_struct *task)
{
	struct thread *t = thread_of(task);
	struct lane *l;
	__u64 now, since;

	if (!t)
		return 0;
	now = bpf_ktime_get_ns();
	t->wake = now;
	if (!t->known && !t->off)
		found_asleep(t, task);
	if (!t->off || t->class == STAGE_RUN_QUEUE)
		return 0;
	if (t->class == STAGE_STOPPED)
		process_continues(t, now);
	l = lane_of(t, t->owner);
	if (t->class == STAGE_WAIT)
		chain_wakes(t, l, now);
	else if (t->class != STAGE_PAGE_FAULT && t->class != STAGE_RECLAIM && t->class != STAGE_COMPACTION) /* remembered as a whole when they end */
		remember(t, t->class, t->out, now, now - t->out, 0);
	if (!l || l->tid != t->tid || l->state != t->class)
		return 0;
	since = l->since;
	lane_to(l, STAGE_RUN_QUEUE, now);
	/* page_fault, reclaim and compaction are reported when they end; cpu and wait are what is left over */
	if (t->class != STAGE_WAIT && t->class != STAGE_UNKNOWN &&
	    (t->class < STAGE_PAGE_FAULT || t->class > STAGE_COMPACTION))
		occurrence(t, l, t->class, since, now, now - since, 0);
	return 0;
}
