//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * page_fault, from the exception to the end of its handling.
 *
 * Kernels: x86-64 only (page_fault_user, page_fault_kernel). The end is the
 * software event that the kernel counts the fault by, once per CPU. A fault
 * that is not counted (it failed) ends at the thread's next blocking or socket
 * call.
 */
#include "chain.h"

/*
 * The way into the exception and the way back to user mode lie outside of the
 * hooks: half a microsecond and more, as long as some faults. What the two take
 * is no more than the shortest time ever seen between two faults of a thread.
 */
__u64 fault_around = ~0ULL;
#define FAULT_AROUND_NS 2000 /* while no shorter one was seen, it is not known */

/* How much of the time before a fault from user mode is the way back from the last one and into this. */
static __always_inline __u64 way_around(struct thread *t, __u64 now)
{
	__u64 around = fault_around;

	if (t->fault_end && now - t->fault_end < around)
		fault_around = around = now - t->fault_end;
	return around < FAULT_AROUND_NS && t->seen + around <= now ? around : 0;
}

static __always_inline void fault_begins(__u8 user)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct thread *t = thread_of(task);
	struct lane *l;
	__u64 now, around;

	if (!t || task->pagefault_disabled)
		return;
	if (user)
		t->memory = 0; /* whatever end was not seen is past */
	else if (t->memory)
		return;
	now = bpf_ktime_get_ns();
	around = user ? way_around(t, now) : 0;
	l = lane_sync(t, owner_of(t, task), now);
	if (l && (l->state != STAGE_CPU || l->since + around > now))
		around = 0;
	if (l) {
		lane_to(l, STAGE_PAGE_FAULT, now);
		t->fault_base = l->ns[STAGE_PAGE_FAULT];
		l->ns[STAGE_CPU] -= around;
		l->ns[STAGE_PAGE_FAULT] += around;
	}
	t->fault = now - around;
	t->fault_out = 0;
	t->fault_in_user = user;
	t->fault_io = 0;
}

/*
 * NUMA balancing makes pages fault to see which node uses them. The kernel counts them for its present scan and
 * then begins anew, which a smaller count shows.
 */
static __always_inline void remote_faults(struct thread *t, struct lane *l)
{
	struct task_struct *task = bpf_get_current_task_btf();
	__u64 count = 0;

	if (!bpf_core_field_exists(task->numa_faults_locality))
		return;
	count = task->numa_faults_locality[0];
	l->remote += count >= t->remote_faults ? count - t->remote_faults : count;
	t->remote_faults = count;
}

static __always_inline void fault_ends(int major)
{
	struct thread *t = thread_of(bpf_get_current_task_btf());
	struct lane *l;
	__u64 now, start;
	__s64 spent;

	if (!t || !t->fault)
		return;
	start = t->fault;
	t->fault = 0;
	now = bpf_ktime_get_ns();
	t->seen = now;
	t->fault_end = t->fault_in_user ? now : 0;
	major |= t->fault_io;
	/* the thread's own memory of it; a thread that serves no request has no lane to count it */
	if (now - start > t->fault_out)
		remember(t, STAGE_PAGE_FAULT, start, now, now - start - t->fault_out, major);
	l = lane_of(t, t->owner);
	if (!l || l->tid != t->tid || l->state != STAGE_PAGE_FAULT)
		return;
	if (numa)
		remote_faults(t, l);
	/* what it took to get here is the fault's as well */
	t->seen = bpf_ktime_get_ns();
	lane_to(l, STAGE_CPU, t->seen);
	if (t->fault_end)
		t->fault_end = t->seen;
	spent = l->ns[STAGE_PAGE_FAULT] - t->fault_base;
	if (major)
		l->major += spent;
	t->syscall = -1;
	occurrence(t, l, STAGE_PAGE_FAULT, start, now, spent, major ? OCCURRENCE_MAJOR : 0);
}

SEC("tp_btf/page_fault_user")
int BPF_PROG(page_fault_user)
{
	fault_begins(1);
	return 0;
}

/* read(2) into memory that is not there, write(2) from an evicted mapping */
SEC("tp_btf/page_fault_kernel")
int BPF_PROG(page_fault_kernel)
{
	fault_begins(0);
	return 0;
}

/* PERF_COUNT_SW_PAGE_FAULTS_MIN, sample_period 1, every CPU */
SEC("perf_event")
int page_fault_minor(struct bpf_perf_event_data *ctx)
{
	fault_ends(0);
	return 0;
}

/* PERF_COUNT_SW_PAGE_FAULTS_MAJ, sample_period 1, every CPU */
SEC("perf_event")
int page_fault_major(struct bpf_perf_event_data *ctx)
{
	fault_ends(1);
	return 0;
}
