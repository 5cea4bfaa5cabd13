//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * lock, the part that system call arguments do not show: contended locks inside
 * the kernel. Kernels: 5.19+ (contention_begin, contention_end).
 */
#include "lane.h"

static __always_inline void contended(__u8 is)
{
	struct thread *t = thread_of(bpf_get_current_task_btf());

	if (t)
		t->contended = is;
}

SEC("tp_btf/contention_begin")
int BPF_PROG(contention_begin)
{
	contended(1);
	return 0;
}

SEC("tp_btf/contention_end")
int BPF_PROG(contention_end)
{
	contended(0);
	return 0;
}
