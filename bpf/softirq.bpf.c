//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * How late the softirq came that made a request's bytes readable: raised on a
 * CPU to run there. Evidence, not a stage: it lies before the request begins.
 *
 * Kernels: 3.x. A softirq that is raised while it runs runs again.
 */
#include "softirq.h"

#define NET_RX_SOFTIRQ 3

SEC("tp_btf/softirq_raise")
int BPF_PROG(softirq_raise, unsigned int vector)
{
	struct softirq *s;

	if (vector != NET_RX_SOFTIRQ)
		return 0;
	s = softirq_of_cpu();
	if (s && !s->raised)
		s->raised = bpf_ktime_get_ns();
	return 0;
}

SEC("tp_btf/softirq_entry")
int BPF_PROG(softirq_entry, unsigned int vector)
{
	struct softirq *s;

	if (vector != NET_RX_SOFTIRQ)
		return 0;
	s = softirq_of_cpu();
	if (!s)
		return 0;
	s->late = s->raised ? bpf_ktime_get_ns() - s->raised + 1 : 0;
	s->raised = 0;
	return 0;
}
