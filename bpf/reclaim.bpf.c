//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * reclaim and compaction: a thread that asks for memory must free some itself
 * first, or move pages about to make room for a huge one. Either happens in the
 * middle of a page fault or a system call; whatever the thread does or waits for
 * meanwhile belongs to it.
 *
 * Kernels: vmscan's tracepoints from 2.6.35 (memcg's 3.2), compaction's begin and
 * end from 3.19. Their arguments differ between kernels, so none is read. kswapd
 * and kcompactd are kernel threads, which are never tracked.
 */
#include "chain.h"

static __always_inline void memory_begins(__u32 stage)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct thread *t = thread_of(task);
	__u32 i = stage - STAGE_RECLAIM;
	struct lane *l;
	__u64 now;

	if (!t)
		return;
	now = bpf_ktime_get_ns();
	l = lane_sync(t, owner_of(t, task), now);
	t->memory = t->memory << 8 | stage;
	t->memory_from[i] = now;
	t->memory_out[i] = t->fault_out;
	if (!l)
		return;
	lane_to(l, stage, now);
	t->memory_base[i] = l->ns[stage];
}

static __always_inline void memory_ends(__u32 stage)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct thread *t = thread_of(task);
	__u32 i = stage - STAGE_RECLAIM;
	struct pt_regs *regs;
	struct lane *l;
	__s64 spent;
	__u64 now;

	if (!t || (t->memory & 0xff) != stage)
		return; /* its beginning was not seen */
	t->memory >>= 8;
	now = bpf_ktime_get_ns();
	t->seen = now;
	/* the thread's own memory of it; what it took is neither the fault's around it nor an outer one's */
	spent = now - t->memory_from[i] - (t->fault_out - t->memory_out[i]);
	if (spent > 0) {
		remember(t, stage, t->memory_from[i], now, spent, 0);
		t->fault_out += spent;
	}
	l = lane_of(t, t->owner);
	if (!l || l->tid != t->tid || l->state != stage)
		return;
	lane_to(l, stage_running(t), now);
	regs = (struct pt_regs *)bpf_task_pt_regs(task);
	t->syscall = (long)regs->orig_ax < 0 ? -1 : regs->orig_ax;
	occurrence(t, l, stage, t->memory_from[i], now, l->ns[stage] - t->memory_base[i], 0);
}

/* for the whole machine: no zone has enough free */
SEC("tp_btf/mm_vmscan_direct_reclaim_begin")
int BPF_PROG(direct_reclaim_begin)
{
	memory_begins(STAGE_RECLAIM);
	return 0;
}

SEC("tp_btf/mm_vmscan_direct_reclaim_end")
int BPF_PROG(direct_reclaim_end)
{
	memory_ends(STAGE_RECLAIM);
	return 0;
}

/* for a cgroup at its limit (memory.max, memory.high) */
SEC("tp_btf/mm_vmscan_memcg_reclaim_begin")
int BPF_PROG(memcg_reclaim_begin)
{
	memory_begins(STAGE_RECLAIM);
	return 0;
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_end")
int BPF_PROG(memcg_reclaim_end)
{
	memory_ends(STAGE_RECLAIM);
	return 0;
}

SEC("tp_btf/mm_compaction_begin")
int BPF_PROG(compaction_begin)
{
	memory_begins(STAGE_COMPACTION);
	return 0;
}

SEC("tp_btf/mm_compaction_end")
int BPF_PROG(compaction_end)
{
	memory_ends(STAGE_COMPACTION);
	return 0;
}
