//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * accept_queue, receive_queue, request_body, and the head of each request.
 *
 * Kernels: sk_data_ready and sock_recv_length from 6.3. Before that, where
 * functions can be hooked: sock_def_readable, which is where sk_data_ready stands,
 * and the return of tcp_recvmsg, which everything but kernel TLS reads by.
 */
#include "chain.h"
#include "head.h"
#include "retransmit.h"
#include "softirq.h"
#include "syscalls_x86.h"

#define MSG_PEEK 2
#define MSG_ERRQUEUE 0x2000

/* Bytes can be read, of a socket of any kind. */
static __always_inline int on_data_ready(struct sock *sk)
{
	struct tcp_sock *tp;
	struct conn *c;
	struct lane *l;
	__u64 now;
	__u32 unread;
	__u8 state = sk->__sk_common.skc_state;

	if (state != TCP_ESTABLISHED && state != TCP_CLOSE_WAIT)
		return 0;
	chain_ready(sk);
	c = conn_of(sk);
	if (!c)
		return 0;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return 0;
	/* a FIN counts as one */
	unread = tp->rcv_nxt - tp->copied_seq;
	if (unread <= (state == TCP_CLOSE_WAIT ? 1 : 0))
		return 0;
	if (c->state == CONN_ACTIVE && c->responding) {
		if (!c->next_start) {
			c->next_start = bpf_ktime_get_ns();
			c->next_softirq_delay = softirq_delay();
		}
		return 0;
	}
	now = bpf_ktime_get_ns();
	accept_look(now, 0, 0);
	if (c->state == CONN_IDLE && !c->start) {
		c->start = now;
		c->softirq_delay = softirq_delay();
	}
	if (c->state == CONN_ACTIVE) {
		/* the body is still arriving: all the waiting since the head was for it, save what other stages claim */
		l = conn_lane(c);
		conn_settle(c, l, now);
		if (l) {
			__s64 d = lane_read(l, STAGE_WAIT, now) - c->body_wait - (c->done[STAGE_RECEIVE_QUEUE] - c->body_receive) -
				  c->done[STAGE_SEND_BUFFER] - c->done[STAGE_QDISC];
			if (d > c->body)
				c->body = d;
		}
		c->plain[SOCKET_STAGE(STAGE_REQUEST_BODY)] = now - c->first_read;
		if (!clock_running(c->receive)) {
			conn_occurrence(c, STAGE_REQUEST_BODY, c->body_since, now);
		}
	}
	if (!clock_running(c->receive)) {
		clock_start(&c->receive, now);
		c->receive_since = now;
	}
	if (c->state == CONN_ACTIVE)
		conn_moved(c, now);
	return 0;
}

/* 6.3+: (sk) */
SEC("tp_btf/sk_data_ready")
int BPF_PROG(data_ready, struct sock *sk)
{
	return on_data_ready(sk);
}

SEC("fentry/sock_def_readable")
int BPF_PROG(data_ready_fentry, struct sock *sk)
{
	return on_data_ready(sk);
}

/* Whoever accepted the connection was held up: that is why it lay there so long. Returns how much of it that explains. */
static __always_inline __s64 accept_was_held(struct conn *c, __s64 accept)
{
	__s64 explained = 0;

	for (int i = 0; i < HELD_STAGES; i++) {
		struct held_by *h = &c->held.by[i];
		__u64 from = h->from > c->start ? h->from : c->start;
		__u64 to = h->to < c->start + accept ? h->to : c->start + accept;
		__s64 d = h->ns;

		if (to <= from)
			continue;
		if (d > (__s64)(to - from))
			d = to - from;
		if (d > accept - explained) /* of several who accept, one may be stopped while another waits for a CPU */
			d = accept - explained;
		explained += d;
		if (i == HELD_RUN_QUEUE) {
			c->done[STAGE_RUN_QUEUE] += d;
			conn_occurrence(c, STAGE_RUN_QUEUE, to - d, to);
		} else if (i == HELD_THROTTLED) {
			c->done[STAGE_THROTTLED] += d;
			conn_occurrence(c, STAGE_THROTTLED, to - d, to);
		} else {
			c->done[STAGE_STOPPED] += d;
			conn_occurrence(c, STAGE_STOPPED, to - d, to);
		}
	}
	return explained;
}

/* A head that was accepted lies there or is waited for, until it is read. */
struct head_wait {
	__u64 from, now;
	__u64 part; /* of a head that came in pieces the last one lay there since then */
	__s64 stalled; /* of it, the reader was kept from reading */
	__s64 told;    /* of that, since part and with a record of its own */
};

/* When the reader was kept from a CPU, or stopped, that is why the bytes lay there; else it was busy. */
__noinline int reader_stalls(struct conn *c, struct thread *t, struct head_wait *w)
{
	struct stretch *s;
	__u64 end;
	__s64 d, since;

	if (!c || !t || !w)
		return 0;
	for (__u32 i = 0; i < RECENT; i++) { /* bounded by what a thread remembers */
		s = latest(t, i);
		if (s->to <= w->from && !s->depth)
			break;
		if (s->depth || (s->stage != STAGE_RUN_QUEUE && s->stage != STAGE_THROTTLED && s->stage != STAGE_STOPPED))
			continue;
		d = stretch_within(s, w->from, w->now);
		if (d <= 0 || d > (__s64)(w->now - w->from) - w->stalled)
			continue;
		w->stalled += d;
		if (s->stage == STAGE_RUN_QUEUE)
			c->done[STAGE_RUN_QUEUE] += d;
		else if (s->stage == STAGE_THROTTLED)
			c->done[STAGE_THROTTLED] += d;
		else
			c->done[STAGE_STOPPED] += d;
		if (d < (__s64)min_duration)
			continue;
		end = s->to < w->now ? s->to : w->now;
		since = end - w->part;
		if (since > 0)
			w->told += since < d ? since : d;
		conn_occurred(c, s->stage, end - d, end); /* joined ones have others' time in between */
	}
	return 0;
}

/* The head is read: the request's first part is split up, and its lane's time begins. */
static __always_inline void request_begins(struct conn *c, struct thread *t, struct lane *l, __u64 now)
{
	__s64 accept = 0, held = 0, receive, rest, last;
	__s64 before = now - c->start;
	struct head_wait w = {};

	if (c->first && c->established) {
		if (!c->accepted) {
			c->no_accept = 1;
		} else {
			c->plain[SOCKET_STAGE(STAGE_ACCEPT_QUEUE)] = c->accepted - c->established;
			if (c->accepted > c->start)
				accept = c->accepted - c->start;
		}
	}
	if (accept > before)
		accept = before;
	if (accept)
		held = accept_was_held(c, accept);
	w.now = now;
	w.from = c->start + accept;
	w.part = c->receive_since > w.from ? c->receive_since : w.from;
	reader_stalls(c, t, &w);
	rest = before - accept - w.stalled;
	receive = clock_read(c->receive, now) - accept - w.stalled;
	if (receive < 0)
		receive = 0;
	if (receive > rest)
		receive = rest;
	rest -= receive;
	c->done[STAGE_ACCEPT_QUEUE] = accept - held;
	c->done[STAGE_RECEIVE_QUEUE] = receive;
	c->done[STAGE_REQUEST_BODY] = rest; /* a head that dribbles in */
	c->body_receive = receive;
	c->first_read = now;
	c->body_since = now;
	c->state = CONN_ACTIVE;
	if (l) {
		conn_take_lane(c, l, now);
		chain_begins(c, l, now);
		c->body_wait = c->lane_wait;
		c->base_stopped = conn_stopped(c, now);
	} else {
		c->no_lane = 1;
		__builtin_memset(c->chained, 0, sizeof(c->chained));
	}
	if (accept)
		conn_occurrence(c, STAGE_ACCEPT_QUEUE, c->start > c->established ? c->start : c->established, c->accepted);
	/* what the reader's stalls claim of it has records of its own, and comes off in user space */
	last = now - w.part;
	if (last > receive + w.told)
		last = receive + w.told;
	if (receive < (__s64)min_duration)
		last = 0;
	conn_occurrence(c, STAGE_RECEIVE_QUEUE, now - last, now);
	/* the head was waited for before that */
	conn_occurrence(c, STAGE_REQUEST_BODY, now - last - rest, now - last);
}

/* A new request on the connection: everything but the connection's own facts begins anew. */
static __always_inline void request_reset(struct conn *c, __u64 start)
{
	retransmit_forgotten(c);
	if (c->seq)
		c->softirq_delay = c->next_start ? c->next_softirq_delay : -1;
	else if (!c->start)
		c->softirq_delay = -1;
	c->seq++;
	c->lost_before |= c->lost;
	c->state = CONN_HEAD;
	c->first = c->seq == 1;
	c->responding = c->last_chunk = c->lost = c->no_lane = c->no_accept = c->unseen_read = 0;
	c->head_last = c->response_open = c->no_arrival = 0;
	c->head_bytes = c->response_bytes = 0;
	c->socket_state = 0;
	c->start = start;
	c->next_start = c->first_read = 0;
	c->received = c->sent = 0;
	c->writes = c->reported = c->chunks = 0;
	c->first_out = 0;
	c->handed_at = c->transmitted_at = 0;
	c->body = c->body_receive = c->base_major = 0;
	c->retransmit = c->retransmits = c->marked = 0;
	__builtin_memset(c->done, 0, sizeof(c->done));
	__builtin_memset(c->plain, 0, sizeof(c->plain));
	if (c->seq > 1) {
		/* what is still unsent or unread now is this request's */
		c->send = clock_running(c->send) ? -(__s64)start : 0;
		c->qdisc = clock_running(c->qdisc) ? -(__s64)start : 0;
		c->receive = -(__s64)start;
		c->receive_since = start;
	}
}

/*
 * What a process that is not yet a target was asked. Whether it answers is not
 * watched, so any read may begin a request: its connections stay idle.
 */
static __always_inline void request_line(struct head_buffer *h, struct conn *c, struct thread *t,
					 struct task_struct *task, int ret, __u64 now)
{
	c->start = c->established = 0; /* whoever reads has accepted */
	c->receive = 0;
	ret = head_read(h, task, ret);
	if (!ret || !head_like_request(h, ret))
		return;
	h->head.flags = HEAD_CANDIDATE;
	h->head.len = head_line(h, ret);
	h->head.r.kind = RECORD_REQUEST_HEAD;
	h->head.r.cookie = c->cookie;
	h->head.r.seq = 0;
	h->head.r.time = now;
	h->head.pid = t->tgid;
	h->head.tid = t->tid;
	head_send_up(h, LOST_REQUEST_HEAD);
}

/* Requests that come by other ways than plain TCP are not measured, and counted. */
static __always_inline void other_request(struct sock *sk, struct task_struct *task, int ret)
{
	__u32 counter = REQUESTS_UNIX;
	struct head_buffer *h;

	if (sk->__sk_common.skc_family != AF_UNIX) {
		if (sk->sk_protocol != IPPROTO_MPTCP)
			return;
		counter = REQUESTS_MPTCP;
	}
	h = head_buffer(0);
	if (!h)
		return;
	ret = head_read(h, task, ret < 16 ? ret : 16);
	if (ret && head_is_request(h, ret))
		count(counter);
}

/* A thread that was not seen to begin reads a connection of ours: io_uring's workers come without a fork. */
static __always_inline struct thread *thread_unseen(struct sock *sk, struct task_struct *task)
{
	struct process *p;
	struct thread *t;
	__u32 tgid;

	if (!conn_of(sk))
		return 0;
	tgid = task->tgid;
	p = bpf_map_lookup_elem(&processes, &tgid);
	if (!p || p->flags & PROCESS_FORGET)
		return 0;
	t = bpf_task_storage_get(&threads, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!t) {
		count(FULL_THREADS);
		return 0;
	}
	t->tgid = tgid;
	t->tid = task->pid;
	t->process = *p;
	return t;
}

static int conn_ends(struct conn *c, struct sock *sk, int new_state); /* tcp_state.bpf.c */

/* A read of a socket has returned. */
static __always_inline int on_recv_length(struct sock *sk, int ret, int flags)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct head_buffer *h;
	struct tcp_sock *tp;
	struct thread *t;
	struct conn *c;
	struct lane *l;
	__u64 now, owner;
	__u32 unread, continued = 0;
	int head, complete;

	if (ret <= 0 || flags & (MSG_PEEK | MSG_ERRQUEUE))
		return 0;
	t = thread_of(task);
	if (!t)
		t = thread_unseen(sk, task);
	if (!t)
		return 0;
	chain_reads(t, sk);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp) {
		other_request(sk, task, ret);
		return 0;
	}
	c = conn_of(sk);
	if (!c) {
		/* a connection older than the receiver; not one that this process opened to somebody else */
		if (!port_tracked(sk))
			return 0;
		c = conn_make(sk);
		if (!c)
			return 0;
	}
	now = bpf_ktime_get_ns();
	accept_look(now, 0, 0);
	h = head_buffer(0);
	if (!h)
		return 0;
	if (t->process.flags & PROCESS_CANDIDATE) {
		request_line(h, c, t, task, ret, now);
		return 0;
	}
	owner = owner_of(t, task);
	l = lane_sync(t, owner, now);
	chain_uses(t, c, now);
	t->caused = CAUSE_LOST; /* a request: what comes of it is its own doing */
	unread = tp->rcv_nxt - tp->copied_seq;
	if (sk->__sk_common.skc_state == TCP_CLOSE_WAIT && unread)
		unread--;

	head = c->state != CONN_ACTIVE || c->responding;
	if (head)
		head = head_read(h, task, ret);
	if (c->state == CONN_ACTIVE && c->responding) {
		if (head && !head_like_request(h, head)) {
			c->next_start = 0; /* the rest of a body that the response did not wait for */
			c->received += ret;
			return 0;
		}
		request_reset(c, c->next_start ? c->next_start : now);
	} else if (c->state == CONN_IDLE) {
		c->accepted = accept_read(sk, c, now);
		__u64 start = c->start;
		request_reset(c, start ? start : now);
		c->no_arrival = !start;
	} else if (c->state == CONN_HEAD) {
		continued = HEAD_CONTINUED;
	}
	c->received += ret;
	c->pid = t->tgid;
	c->tid = t->tid;

	if (c->state == CONN_HEAD) {
		complete = 1;
		h->head.flags = continued | (c->no_arrival ? HEAD_NO_ARRIVAL : 0) | (c->lost_before ? HEAD_LOST_BEFORE : 0);
		h->head.len = 0;
		if (!head) {
			h->head.flags |= HEAD_UNREADABLE;
			count(HEADS_UNREADABLE);
		} else {
			complete = head_scan(h, head, ret, &c->head_last, &c->head_bytes, HEAD_BYTES);
		}
		if (complete) {
			if (!l)
				l = lane_make(t, owner, now);
			c->lane.id = l ? owner : 0;
			c->lane.tgid = t->tgid;
			c->lane.goroutine = !!(t->process.flags & PROCESS_GO);
			request_begins(c, t, l, now);
		}
		h->head.r.kind = RECORD_REQUEST_HEAD;
		h->head.r.cookie = c->cookie;
		h->head.r.seq = c->seq;
		h->head.r.time = now;
		h->head.pid = t->tgid;
		h->head.tid = t->tid;
		h->head.start = c->start;
		h->head.lane = c->lane.id;
		h->head.family = c->family;
		h->head.local_port = c->local_port;
		h->head.remote_port = c->remote_port;
		__builtin_memcpy(h->head.local, c->local, 16);
		__builtin_memcpy(h->head.remote, c->remote, 16);
		if (head_send_up(h, LOST_REQUEST_HEAD))
			c->lost_before = 0;
		else
			c->lost = 1;
	} else {
		conn_occurrence(c, STAGE_RECEIVE_QUEUE, c->receive_since, now);
		c->body_since = now;
	}
	if (unread) {
		clock_start(&c->receive, now);
		if (c->state == CONN_ACTIVE)
			c->receive_since = now;
	} else {
		clock_stop(&c->receive, now);
		c->receive_since = 0;
		/* the socket is not locked here: bytes that came since found the clock running */
		if (tp->rcv_nxt != tp->copied_seq && sk->__sk_common.skc_state == TCP_ESTABLISHED) {
			clock_start(&c->receive, now);
			c->receive_since = now;
		}
	}
	if (c->state == CONN_ACTIVE)
		conn_moved(c, now);
	/* the client has gone already, and left these bytes: nobody can be answered, and no further end will come */
	if (sk->__sk_common.skc_state == TCP_CLOSE) {
		conn_ends(c, sk, TCP_CLOSE);
		c->state = CONN_IDLE;
		c->start = 0;
	}
	return 0;
}

/* 6.3+: (sk, ret, flags) */
SEC("tp_btf/sock_recv_length")
int BPF_PROG(recv_length, struct sock *sk, int ret, int flags)
{
	return on_recv_length(sk, ret, flags);
}

/* 5.19+: (sk, msg, len, flags, addr_len) */
SEC("fexit/tcp_recvmsg")
int BPF_PROG(recv_length_fexit, struct sock *sk, struct msghdr *msg, unsigned long len, int flags, int *addr_len, int ret)
{
	return on_recv_length(sk, ret, flags);
}

/* before 5.19: (sk, msg, len, nonblock, flags, addr_len) */
SEC("fexit/tcp_recvmsg")
int BPF_PROG(recv_length_nonblock_fexit, struct sock *sk, struct msghdr *msg, unsigned long len, int nonblock, int flags,
	     int *addr_len, int ret)
{
	return on_recv_length(sk, ret, flags);
}
