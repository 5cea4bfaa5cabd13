/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * Lanes: cumulative stage time of whoever serves requests.
 *
 * Mostly a lane is a thread. In Go it is a goroutine, which user space moves
 * between threads without telling the kernel: its g is read at the thread's
 * events (switches, faults, socket calls), and what lies between two events
 * belongs to the goroutine seen at the first of them. A goroutine that is on
 * no thread waits.
 */
#ifndef EBPFLLM_LANE_H
#define EBPFLLM_LANE_H

#include "state.h"

/* In the Go runtime: g.m, and m.curg as of Go 1.25 and before it. */
enum { G_M = 48, M_CURG = 184, M_CURG_BEFORE_1_25 = 192 };

/* m's current goroutine, if that is where m keeps it: the goroutine then points back to m. */
static __always_inline __u64 goroutine_at(__u64 m, __u32 offset)
{
	__u64 g = 0, back = 0;

	if (bpf_probe_read_user(&g, sizeof(g), (void *)(m + offset)) || !g ||
	    bpf_probe_read_user(&back, sizeof(back), (void *)(g + G_M)) || back != m)
		return 0;
	return g;
}

/*
 * The goroutine that a thread works for. Its m says which; while the thread runs
 * C code (llama.cpp called from Go) or the runtime's own, the g of the thread is
 * its scheduling stack's. An m stays with its thread, so that once it is known
 * one read is enough: 0 while no goroutine runs on it.
 */
static __always_inline __u64 goroutine_of(struct thread *t, struct task_struct *current)
{
	__u64 g = 0, m = 0;

	if (t->curg) {
		bpf_probe_read_user(&g, sizeof(g), (void *)(t->m + t->curg));
		return g;
	}
	if (bpf_probe_read_user(&g, sizeof(g), (void *)(current->thread.fsbase + t->process.go_offset)) || !g ||
	    bpf_probe_read_user(&m, sizeof(m), (void *)(g + G_M)) || !m)
		return g;
	/* which layout this runtime has shows as soon as there is a current goroutine */
	t->m = m;
	t->curg = M_CURG;
	m = goroutine_at(t->m, M_CURG);
	if (m)
		return m;
	t->curg = M_CURG_BEFORE_1_25;
	m = goroutine_at(t->m, M_CURG_BEFORE_1_25);
	if (m)
		return m;
	t->curg = 0;
	return g;
}

/* The lane that the current thread is working for now. */
static __always_inline __u64 owner_of(struct thread *t, struct task_struct *current)
{
	if (t->process.flags & PROCESS_NO_LANE)
		return 0;
	return t->process.flags & PROCESS_GO ? goroutine_of(t, current) : t->tid;
}

static __always_inline void lane_key_of(struct thread *t, __u64 owner, struct lane_key *key)
{
	key->id = owner;
	key->tgid = t->tgid;
	key->goroutine = !!(t->process.flags & PROCESS_GO);
}

static __always_inline struct lane *lane_of(struct thread *t, __u64 owner)
{
	struct lane_key key;

	if (!owner)
		return 0;
	lane_key_of(t, owner, &key);
	return bpf_map_lookup_elem(&lanes, &key);
}

/* The stage of a thread that is on a CPU. */
static __always_inline __u32 stage_running(struct thread *t)
{
	return t->memory ? t->memory & 0xff : t->fault ? STAGE_PAGE_FAULT : STAGE_CPU;
}

/* Closes the lane's present stretch at now and begins the next. */
static __always_inline void lane_to(struct lane *l, __u32 state, __u64 now)
{
	__u32 old = l->state;
	__s64 d = now - l->since;

	if (old == STAGE_WAIT)
		clock_stop(&l->wait, now);
	else if (old < STAGE_WAIT && d > 0)
		l->ns[old] += d;
	if (state == STAGE_WAIT)
		clock_start(&l->wait, now);
	l->state = state;
	l->since = now;
}

/* Sends up one stretch of a stage, if it is long enough. Without an owner it is the whole process's. */
static __always_inline void occurrence_of(struct thread *t, __u64 owner, struct lane *l, __u32 stage, __u64 start,
					  __u64 end, __s64 duration, __u32 flags)
{
	struct occurrence_record o = {};

	if (duration < (__s64)min_duration)
		return;
	o.r.kind = RECORD_OCCURRENCE;
	o.r.time = end;
	o.start = start;
	o.duration = duration;
	o.lane = owner;
	o.pid = t->tgid;
	o.tid = t->tid;
	o.stage = stage;
	o.syscall = stage == STAGE_RUN_QUEUE || stage == STAGE_THROTTLED ? -1 : t->syscall;
	o.flags = flags;
	if (!send_up(&o, sizeof(o), LOST_OCCURRENCE) && l)
		l->lost++;
}

static __always_inline void occurrence(struct thread *t, struct lane *l, __u32 stage, __u64 start, __u64 end,
				       __s64 duration, __u32 flags)
{
	occurrence_of(t, t->owner, l, stage, start, end, duration, flags);
}

/*
 * The thread runs, and was not seen to come onto the CPU: some sandboxes hide what happens in the context of their
 * own threads from programs, and with it the switch from such a thread. What it has run since is the scheduler's
 * to say, of a tick ago at the latest.
 */
static __noinline int lane_unseen(struct thread *t, __u64 now)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct lane *l;
	__s64 ran;
	__u32 was;

	if (!t)
		return 0;
	t->off = 0;
	l = lane_of(t, t->owner);
	if (!l || l->tid != t->tid)
		return 0;
	was = l->state;
	if (was == STAGE_CPU || was >= THREAD_STAGES)
		return 0;
	ran = task->se.sum_exec_runtime - t->ran;
	if (ran > (__s64)(now - l->since))
		ran = now - l->since;
	lane_to(l, stage_running(t), now);
	if (ran <= 0)
		return 0;
	if (was == STAGE_WAIT)
		l->wait = l->wait > ran ? l->wait - ran : 0;
	else
		l->ns[was] -= ran;
	l->ns[STAGE_CPU] += ran;
	return 0;
}

/*
 * An event on thread t that is working for owner: brings the lane it worked for
 * before and the one it works for now up to date, and returns the latter (NULL
 * if it serves no request).
 */
static __always_inline struct lane *lane_sync(struct thread *t, __u64 owner, __u64 now)
{
	struct lane *l;

	if (t->off)
		lane_unseen(t, now);
	if (t->owner != owner) {
		l = lane_of(t, t->owner);
		if (l && l->tid == t->tid && (l->state == STAGE_CPU || (l->state >= STAGE_PAGE_FAULT && l->state <= STAGE_COMPACTION))) {
			lane_to(l, STAGE_WAIT, now);
			l->tid = 0;
		}
		t->owner = owner;
		t->fault = 0;
	}
	l = lane_of(t, owner);
	if (l && l->tid != t->tid) {
		/* it came onto this thread at some time since the thread's last event */
		__u64 from = t->seen > l->since ? t->seen : l->since;
		if (l->state != STAGE_WAIT) {
			lane_to(l, STAGE_CPU, now);
		} else if (t->queued_from > l->since) {
			/*
			 * The thread had to queue for a CPU and then took this goroutine up without sleeping in
			 * between: the queue is what the goroutine waited for.
			 */
			lane_to(l, STAGE_RUN_QUEUE, t->queued_from);
			lane_to(l, STAGE_CPU, t->queued_to);
			occurrence(t, l, STAGE_RUN_QUEUE, t->queued_from, t->queued_to,
				   t->queued_to - t->queued_from, 0);
		} else {
			lane_to(l, STAGE_CPU, from);
		}
		t->queued_from = t->queued_to = 0;
		l->tid = t->tid;
	}
	t->seen = now;
	return l;
}

/* Makes the lane of the running thread, where it serves its first request. Not in the scheduler. */
static __always_inline struct lane *lane_make(struct thread *t, __u64 owner, __u64 now)
{
	struct lane_key key;
	struct lane fresh = {};

	if (!owner)
		return 0;
	lane_key_of(t, owner, &key);
	fresh.state = STAGE_CPU;
	fresh.since = now;
	fresh.tid = t->tid;
	if (bpf_map_update_elem(&lanes, &key, &fresh, BPF_NOEXIST))
		count(FULL_LANES);
	return bpf_map_lookup_elem(&lanes, &key);
}

/* The lane's time in a stage up to now, the present stretch included. */
static __always_inline __s64 lane_read(struct lane *l, __u32 stage, __u64 now)
{
	__s64 v;

	if (stage == STAGE_WAIT)
		return clock_read(l->wait, now);
	v = l->ns[stage];
	if (l->state == stage && now > l->since)
		v += now - l->since;
	return v;
}

#endif
