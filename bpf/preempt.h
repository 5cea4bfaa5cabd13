/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/* What a CPU is in: a thread, a softirq, an interrupt. */
#ifndef EBPFLLM_PREEMPT_H
#define EBPFLLM_PREEMPT_H

#include "state.h"

/* Of <linux/preempt.h>, unchanged since 2.6.38; PREEMPT_RT counts softirqs elsewhere and is refused in user space. */
#define IN_HARD_INTERRUPT 0xff0000 /* NMI or hard interrupt */
#define IN_SOFTIRQ 0x000100	   /* serving one, not merely holding them off */

/* The preempt count of this CPU, where it can be found; else as in an interrupt, which allows no conclusion. */
static __always_inline __u32 preempt_count(struct task_struct *current)
{
	/* the static per-CPU variables of a CPU are at fixed distances from each other */
	__u64 rq = (__u64)current->se.cfs_rq->rq;
	__u32 count = IN_HARD_INTERRUPT;

	if (preempt_count_known)
		bpf_probe_read_kernel(&count, sizeof(count), (void *)(rq + preempt_count_at));
	return count;
}

#endif
