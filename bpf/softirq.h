/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/* The softirq that the CPU is in, or was in last, as softirq.bpf.c keeps it. */
#ifndef EBPFLLM_SOFTIRQ_H
#define EBPFLLM_SOFTIRQ_H

#include "preempt.h"

struct softirq {
	__u64 raised; /* NET_RX was raised and has not run; 0 if not */
	__u64 late;   /* how long the latest one that ran was raised, and 1; 0 if that is not known */
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct softirq);
} softirqs SEC(".maps");

static __always_inline struct softirq *softirq_of_cpu(void)
{
	__u32 key = 0;

	return bpf_map_lookup_elem(&softirqs, &key);
}

/* How late the softirq came that is bringing bytes; -1 if they come otherwise, or it is not known. */
static __always_inline __s64 softirq_delay(void)
{
	struct softirq *s;

	if ((preempt_count(bpf_get_current_task_btf()) & (IN_HARD_INTERRUPT | IN_SOFTIRQ)) != IN_SOFTIRQ)
		return -1;
	s = softirq_of_cpu();
	return s ? (__s64)s->late - 1 : -1;
}

#endif
