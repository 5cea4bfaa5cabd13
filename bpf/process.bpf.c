//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/* Which threads are tracked: targets and their process trees as they come and go. Kernels: all above the floor. */
#include "chain.h"

static __always_inline void process_record(__u32 kind, __u32 pid, __u32 parent, __u32 netns, __u32 port)
{
	struct process_record p = {};

	p.r.kind = kind;
	p.r.time = bpf_ktime_get_ns();
	p.pid = pid;
	p.parent = parent;
	p.netns = netns;
	p.port = port;
	send_up(&p, sizeof(p), LOST_PROCESS);
}

static __always_inline void thread_init(struct thread *t, __u32 tgid, __u32 tid, const struct process *p)
{
	t->tgid = tgid;
	t->tid = tid;
	t->process = *p;
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(process_fork, struct task_struct *parent, struct task_struct *child)
{
	struct thread *p = thread_of(parent), *t;
	__u32 tgid;

	if (!p)
		return 0;
	/* a thread for each connection: it was accepted just now */
	if (pending_slots)
		accept_look(bpf_ktime_get_ns(), 0, 0);
	t = bpf_task_storage_get(&threads, child, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t) {
		count(FULL_THREADS);
		return 0;
	}
	tgid = child->tgid;
	thread_init(t, tgid, child->pid, &p->process);
	if (tgid != p->tgid)
		t->process.flags |= PROCESS_FORKED;
	/* it begins its life in the run queue */
	t->known = t->out = bpf_ktime_get_ns();
	t->off = 1;
	t->class = STAGE_RUN_QUEUE;
	chain_read_totals(t, t->known);
	/* what kept its parent is why it comes now: for the request that it will read */
	__builtin_memcpy(t->recent, p->recent, sizeof(t->recent));
	t->next = p->next;
	if (tgid == p->tgid)
		return 0;
	if (bpf_map_update_elem(&processes, &tgid, &t->process, BPF_ANY))
		count(FULL_PROCESSES);
	process_record(RECORD_FORK, tgid, p->tgid, 0, 0);
	return 0;
}

/* Every exec is told, so that user space can match the new program. */
SEC("tp_btf/sched_process_exec")
int BPF_PROG(process_exec, struct task_struct *task, int old_pid)
{
	struct thread *t = thread_of(task);
	__u32 tgid = task->tgid;

	if (t) {
		struct lane_key key = { .id = t->tid, .tgid = tgid };
		struct process *p = bpf_map_lookup_elem(&processes, &tgid);

		/* the process's other threads have ended, and this one takes the first one's number: its lane ends with its own */
		if (t->tid != task->pid)
			bpf_map_delete_elem(&lanes, &key);
		/* a new program: no longer Go until user space has looked */
		t->process.flags &= PROCESS_CANDIDATE;
		if (p)
			p->flags &= PROCESS_CANDIDATE | PROCESS_FORGET | PROCESS_FORKED;
		t->tid = task->pid;
		t->owner = t->m = 0;
		t->curg = 0;
		t->fault = 0;
	}
	process_record(RECORD_EXEC, tgid, 0, 0, 0);
	return 0;
}

/* 6.18: (task, group_dead); earlier: (task) */
SEC("tp_btf/sched_process_exit")
int BPF_PROG(process_exit, struct task_struct *task)
{
	struct thread *t = thread_of(task);
	struct lane_key key = {};
	__u32 tgid;

	if (!t)
		return 0;
	/* in Go too: between its exec and user space's look it was not taken for Go */
	key.id = t->tid;
	key.tgid = t->tgid;
	bpf_map_delete_elem(&lanes, &key);
	tgid = task->tgid;
	/* the last thread, which need not be the first one; the count is lowered before this */
	if (!task->signal->live.counter) {
		bpf_map_delete_elem(&processes, &tgid);
		process_record(RECORD_EXIT, tgid, 0, 0, 0);
	}
	return 0;
}

/* Gives the threads that exist already their storage, and takes it from those of forgotten processes. */
SEC("iter/task")
int track_threads(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct process *p;
	struct thread *t;
	__u32 tgid;

	if (!task)
		return 0;
	tgid = task->tgid;
	p = bpf_map_lookup_elem(&processes, &tgid);
	if (!p)
		return 0;
	if (p->flags & PROCESS_FORGET) {
		struct lane_key key = { .id = task->pid, .tgid = tgid };
		bpf_task_storage_delete(&threads, task);
		bpf_map_delete_elem(&lanes, &key);
		return 0;
	}
	t = bpf_task_storage_get(&threads, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t) {
		count(FULL_THREADS);
		return 0;
	}
	if (!t->tgid)
		t->out = bpf_ktime_get_ns(); /* if it sleeps, that is what is known of its sleep */
	thread_init(t, tgid, task->pid, p);
	/* it may be waiting now; in user mode this is its latest call, or none */
	t->accepts |= waits_for_descriptors(((struct pt_regs *)bpf_task_pt_regs(task))->orig_ax);
	return 0;
}
