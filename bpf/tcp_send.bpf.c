//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * send_buffer, qdisc, the response's head, and progress: what the request cost
 * up to the moment at which everything sent so far has reached the device.
 *
 * The kernel cannot know which of these is a response's last. Each one is
 * therefore a full reading, and user space keeps the last that the framing
 * allows: no thread time is charged after it.
 *
 * Kernels: tcp_sendmsg_locked from 6.16, sock_send_length from 6.3, the
 * device's tracepoints everywhere. Before that, where functions can be hooked:
 * tcp_sendmsg_locked itself, and the return of tcp_sendmsg. Up to 6.4 sendfile
 * and splice send by do_tcp_sendpages instead; compilers make one with it of what calls it.
 */
#include "chain.h"
#include "head.h"
#include "retransmit.h"

/* The buffers of a message, where it has several. */
static __always_inline const void *buffers_of(struct msghdr *msg)
{
	struct iov_iter___before_6_4 *old = (void *)&msg->msg_iter;

	return bpf_core_field_exists(old->iov) ? BPF_CORE_READ(old, iov) : BPF_CORE_READ(msg, msg_iter.__iov);
}

/* Where the bytes of a message begin and how many lie there together; 0 if they are not in user memory. */
static __always_inline __u64 message_head(struct msghdr *msg, void **base)
{
	struct iovec v = {};

	if (bpf_core_enum_value_exists(enum iter_type, ITER_UBUF) && /* 6.0+ */
	    msg->msg_iter.iter_type == bpf_core_enum_value(enum iter_type, ITER_UBUF)) {
		__u64 n = msg->msg_iter.count;
		/* else the compiler loads this and iov_len below by one instruction, from two kinds of pointer */
		asm volatile("" : "+r"(n));
		*base = BPF_CORE_READ(msg, msg_iter.ubuf) + msg->msg_iter.iov_offset;
		return n;
	}
	if (msg->msg_iter.iter_type == bpf_core_enum_value(enum iter_type, ITER_IOVEC)) {
		bpf_probe_read_kernel(&v, sizeof(v), buffers_of(msg));
		*base = v.iov_base;
		return v.iov_len;
	}
	return 0;
}

/* Does the message end with the terminator of chunked encoding, "0\r\n\r\n", alone or after a chunk's own line end? */
static __always_inline int ends_chunked(struct msghdr *msg)
{
	char tail[8] = {};
	struct iovec v = {};
	__u64 n;

	n = message_head(msg, &v.iov_base);
	if (msg->msg_iter.iter_type == bpf_core_enum_value(enum iter_type, ITER_IOVEC)) {
		__u64 last = msg->msg_iter.nr_segs;
		if (!last)
			return 0;
		bpf_probe_read_kernel(&v, sizeof(v), buffers_of(msg) + (last - 1) * sizeof(v));
		n = v.iov_len;
	}
	if (n < 5)
		return 0;
	if (n < 7) {
		if (n != 5 || bpf_probe_read_user(tail, 5, v.iov_base))
			return 0;
		return tail[0] == '0' && tail[1] == '\r' && tail[2] == '\n' && tail[3] == '\r' && tail[4] == '\n';
	}
	if (bpf_probe_read_user(tail, 7, v.iov_base + n - 7))
		return 0;
	return tail[0] == '\r' && tail[1] == '\n' && tail[2] == '0' && tail[3] == '\r' && tail[4] == '\n' &&
	       tail[5] == '\r' && tail[6] == '\n';
}

/* The same of a whole message of n bytes, which the buffer holds. */
static __always_inline int ends_chunked_copied(struct head_buffer *h, __u32 n)
{
	__u8 *tail;

	if (n == 5)
		return *(__u32 *)h->bytes == 0x0d0a0d30 && h->bytes[4] == '\n';
	if (n < 7 || n > RESPONSE_BYTES)
		return 0;
	tail = h->bytes + (n - 7);
	return tail[6] == '\n' && tail[5] == '\r' && tail[4] == '\n' && tail[3] == '\r' && tail[2] == '0' &&
	       tail[1] == '\n' && tail[0] == '\r';
}

/*
 * Whether this send begins or continues the response's head; sends up what of it
 * there is. Returns how many bytes the message has, if head_buffer(1) holds it all.
 */
static __always_inline __u32 response_head(struct conn *c, struct msghdr *msg, __u32 size, __u64 now)
{
	struct head_buffer *h = head_buffer(1);
	void *base = 0;
	__u64 n = msg ? message_head(msg, &base) : 0;
	int complete;

	if (!h)
		return 0;
	h->head.flags = c->responding ? HEAD_CONTINUED : 0;
	h->head.len = 0;
	if (n > RESPONSE_BYTES)
		n = RESPONSE_BYTES;
	if (!n || !head_copy(h, base, n)) {
		h->head.flags |= HEAD_UNREADABLE;
		count(HEADS_UNREADABLE);
		complete = 1;
	} else {
		/* "HTTP/1.1 1xx": the final response is still to come, unless the protocol is switched (101) */
		if (!c->responding && n >= 12 && h->bytes[0] == 'H' && h->bytes[4] == '/' && h->bytes[8] == ' ' &&
		    h->bytes[9] == '1' && !(h->bytes[10] == '0' && h->bytes[11] == '1'))
			return 0;
		complete = head_scan(h, n, n, &c->head_last, &c->response_bytes, RESPONSE_BYTES);
	}
	c->responding = 1;
	c->response_open = !complete;
	c->head_alone = !complete || h->head.len == size;
	h->head.r.kind = RECORD_RESPONSE_HEAD;
	h->head.r.cookie = c->cookie;
	h->head.r.seq = c->seq;
	h->head.r.time = now;
	h->head.pid = c->pid;
	h->head.tid = c->tid;
	if (!head_send_up(h, LOST_RESPONSE_HEAD))
		c->lost = 1;
	return h->head.flags & HEAD_UNREADABLE || n != size ? 0 : n;
}

/*
 * The lane that the request is on from here: another than before, if another
 * thread or goroutine sends than the one that read. When it was handed over is
 * not known, so what the earlier lane did is not charged: it stays unattributed.
 */
static __always_inline struct lane *follow_sender(struct conn *c, struct task_struct *task, __u64 now)
{
	struct thread *t;
	struct lane *l;
	__u64 owner;

	t = thread_of(task);
	if (!t)
		return conn_lane(c);
	/* who read sends: mostly, and a thread's lane is always its own */
	if (c->lane.id == (__u32)task->pid && !c->lane.goroutine) {
		if (t->off)
			lane_unseen(t, now);
		l = conn_lane(c);
		if (l)
			chain_sends(c, t, l, now);
		return l;
	}
	owner = owner_of(t, task);
	l = lane_sync(t, owner, now);
	if (c->lane.id == owner && c->lane.tgid == t->tgid) {
		if (l)
			chain_sends(c, t, l, now);
		return l;
	}
	if (!l && !c->no_lane) /* else there was no room for one, and the request goes without */
		l = lane_make(t, owner, now);
	chain_ends(c);
	conn_settle(c, conn_lane(c), now);
	if (!l) {
		c->lane.id = 0;
		c->no_lane = 1;
		return 0;
	}
	lane_key_of(t, owner, &c->lane);
	conn_take_lane(c, l, now);
	return l;
}

/*
 * The answer begins, and nothing is unread, though nobody was seen to read it: splice has no hook. Since when is not
 * known, nor what of the waiting was for the bytes to come, or for them to be read.
 */
static __always_inline void unseen_read(struct conn *c, struct sock *sk, struct tcp_sock *tp)
{
	__u32 unread = tp->rcv_nxt - tp->copied_seq;

	if (!clock_running(c->receive) || unread > (sk->__sk_common.skc_state == TCP_CLOSE_WAIT ? 1 : 0))
		return;
	clock_stop(&c->receive, c->receive_since);
	c->receive_since = 0;
	c->unseen_read = 1;
}

/* A send to a socket begins; perhaps told again for each buffer of a long one. Without a message it sends pages of a file. */
static __always_inline int on_send(struct sock *sk, struct msghdr *msg, __u32 size)
{
	struct conn *c = conn_of(sk);
	struct tcp_sock *tp;
	struct lane *l;
	__u64 now;
	__u32 copied = 0;

	chain_sending(sk);
	if (!c || c->sending || c->state != CONN_ACTIVE)
		return 0;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return 0;
	now = bpf_ktime_get_ns();
	c->sending = 1;
	if (!c->responding) {
		c->head_last = 0;
		c->response_seq = tp->write_seq;
		unseen_read(c, sk, tp);
	}
	c->head_alone = 0;
	if (!c->responding || c->response_open)
		copied = response_head(c, msg, size, now);
	l = follow_sender(c, bpf_get_current_task_btf(), now);
	if (copied) {
		struct head_buffer *h = head_buffer(1);
		c->last_chunk = h && ends_chunked_copied(h, copied);
	} else {
		c->last_chunk = msg && ends_chunked(msg);
	}
	c->send_size = size;
	if (!c->sequenced) {
		c->handed = c->transmitted = tp->write_seq;
		c->sequenced = 1;
	}
	if (!clock_running(c->send)) {
		clock_start(&c->send, now);
		c->send_since = now;
	}
	conn_settle(c, l, now);
	return 0;
}

/* 6.16+: (sk, msg, skb, size_goal) */
SEC("tp_btf/tcp_sendmsg_locked")
int BPF_PROG(sendmsg_locked, struct sock *sk, struct msghdr *msg)
{
	return on_send(sk, msg, msg->msg_iter.count);
}

/* (sk, msg, size) */
SEC("fentry/tcp_sendmsg_locked")
int BPF_PROG(sendmsg_locked_fentry, struct sock *sk, struct msghdr *msg)
{
	return on_send(sk, msg, msg->msg_iter.count);
}

/* up to 6.4: (sk, page, offset, size, flags) */
SEC("fentry/do_tcp_sendpages")
int BPF_PROG(sendpages_fentry, struct sock *sk, void *page, int offset, unsigned long size)
{
	return on_send(sk, 0, size);
}

/* Everything sent so far is with the device: a reading of the request as of then. */
static __always_inline void progress(struct conn *c, struct sock *sk, struct lane *l, __u64 at, __u64 now)
{
	struct progress_record *p = bpf_ringbuf_reserve(&ring, sizeof(*p), 0);

	count(SENT_PROGRESS);
	conn_settle(c, l, now);
	c->reported = c->writes;
	if (!p) {
		count(LOST_PROGRESS);
		c->lost = 1;
		return;
	}
	p->r.kind = RECORD_PROGRESS;
	p->r.seq = c->seq;
	p->r.cookie = c->cookie;
	p->r.time = at;
	p->lane = c->lane.id;
	p->start = c->start;
	p->first_read = c->first_read;
	p->received = c->received;
	p->sent = c->sent;
	p->pid = c->pid;
	p->tid = c->tid;
	p->chunks = c->chunks;
	p->first = c->first_out;
	c->first_out = 0;
	p->flags = (c->last_chunk ? PROGRESS_LAST_CHUNK : 0) | (c->lost ? PROGRESS_LOST : 0) |
		   (c->no_lane || !l ? PROGRESS_NO_LANE : 0) | (c->no_accept ? PROGRESS_NO_ACCEPT : 0) |
		   (c->unseen_read ? PROGRESS_UNSEEN_READ : 0);
	__builtin_memcpy(p->exclusive, c->done, sizeof(c->done));
	p->exclusive[STAGE_REQUEST_BODY] += c->body;
	p->major = 0;
	p->remote_faults = -1;
	if (l) {
#pragma unroll
		for (int i = STAGE_CPU; i < THREAD_STAGES; i++) {
			__s64 d = lane_read(l, i, now) - c->base[i];
			if (d > 0)
				p->exclusive[i] += d;
		}
		p->major += l->major - c->base_major + c->chained_major;
		if (numa)
			p->remote_faults = l->remote - c->base_remote;
		if (l->lost != c->lane_lost)
			p->flags |= PROGRESS_LOST;
	}
	/* a goroutine on no thread waits, but not while the process is stopped */
	if (c->lane.goroutine) {
		__s64 stopped = conn_stopped(c, now) - c->base_stopped - p->exclusive[STAGE_STOPPED];
		if (stopped > p->exclusive[STAGE_WAIT])
			stopped = p->exclusive[STAGE_WAIT];
		if (stopped > 0) {
			p->exclusive[STAGE_STOPPED] += stopped;
			p->exclusive[STAGE_WAIT] -= stopped;
		}
	}
	/* what the wake-up chains explain of the waiting, and what the socket took over of it */
	for (int i = STAGE_UNKNOWN; i < THREAD_STAGES; i++) {
		p->waker[i] = c->chained[i];
		p->exclusive[i] += c->chained[i];
		p->exclusive[STAGE_WAIT] -= c->chained[i];
	}
	p->exclusive[STAGE_WAIT] -= conn_socket_time(c) - c->lane_socket;
	__builtin_memcpy(p->plain, c->plain, sizeof(c->plain));
	p->plain[SOCKET_STAGE(STAGE_RECEIVE_QUEUE)] = clock_read(c->receive, now);
	p->plain[SOCKET_STAGE(STAGE_SEND_BUFFER)] = clock_read(c->send, now);
	p->plain[SOCKET_STAGE(STAGE_QDISC)] = clock_read(c->qdisc, now);
	p->plain[SOCKET_STAGE(STAGE_RETRANSMIT)] = clock_read(c->retransmit, now);
	p->retransmits = c->retransmits;
	p->unacked = retransmit_timeout(sk);
	p->softirq_delay = c->softirq_delay;
	bpf_ringbuf_submit(p, BPF_RB_NO_WAKEUP);
}

/* The send call returns. */
static __always_inline int on_sent(struct sock *sk, int ret)
{
	struct conn *c;
	__u64 now;
	int all;

	chain_sent();
	c = conn_of(sk);
	if (!c || !c->sending)
		return 0;
	/*
	 * The socket is not locked any more. Here the flag is cleared and then handed is read, in dev_queue() it is
	 * the other way round: both exchanges are full barriers, so that one of the two sees the end.
	 */
	__sync_lock_test_and_set(&c->sending, 0);
	if (ret > 0 && c->responding) {
		c->sent += ret;
		c->writes++;
		if (ret < c->send_size)
			c->last_chunk = 0; /* its end is still to be sent */
		if (!c->head_alone && (!c->last_chunk || ret > 5))
			c->chunks++;
	}
	all = c->handed == BPF_CORE_READ((struct tcp_sock *)sk, write_seq);
	/* mostly the last byte has left within the call: that is when the request is read, and not the time since */
	now = all && ret > 0 && c->transmitted_at && !clock_running(c->qdisc) ? c->transmitted_at : bpf_ktime_get_ns();
	accept_look(now, 0, 0);
	if (all) {
		clock_stop(&c->send, c->handed_at ? c->handed_at : now);
		conn_occurrence(c, STAGE_SEND_BUFFER, c->send_since, c->handed_at);
		c->send_since = 0;
	}
	if (!clock_running(c->send) && !clock_running(c->qdisc) && c->writes != c->reported)
		progress(c, sk, conn_lane(c), c->transmitted_at ? c->transmitted_at : now, now);
	else
		conn_moved(c, now);
	return 0;
}

/* 6.3+: (sk, ret, flags) */
SEC("tp_btf/sock_send_length")
int BPF_PROG(send_length, struct sock *sk, int ret)
{
	return on_sent(sk, ret);
}

/* (sk, msg, size) */
SEC("fexit/tcp_sendmsg")
int BPF_PROG(send_length_fexit, struct sock *sk, struct msghdr *msg, unsigned long size, int ret)
{
	return on_sent(sk, ret);
}

/* up to 6.4: (sk, page, offset, size, flags) */
SEC("fexit/do_tcp_sendpages")
int BPF_PROG(sendpages_fexit, struct sock *sk, void *page, int offset, unsigned long size, int flags, int ret)
{
	return on_sent(sk, ret);
}

/* The connection of a segment, if it is one of ours, and the sequence number behind its last byte. */
static __always_inline struct conn *conn_of_skb(struct sk_buff *skb, struct sock *sk, __u32 *end)
{
	struct conn *c;
	__u8 *th, h[14], state;

	/* request and time-wait sockets are no full sockets */
	state = sk->__sk_common.skc_state;
	if (state == TCP_NEW_SYN_RECV || state == TCP_TIME_WAIT)
		return 0;
	c = conn_of(sk);
	if (!c || !c->sequenced)
		return 0;
	th = skb->head + skb->transport_header;
	if (bpf_probe_read_kernel(h, sizeof(h), th))
		return 0;
	/* GSO: one segment stands for many, skb->len is all of them */
	*end = ((__u32)h[4] << 24 | (__u32)h[5] << 16 | (__u32)h[6] << 8 | h[7]) + skb->len - (__u32)(th - skb->data) -
	       (h[12] >> 4) * 4 + (h[13] & 1 /* FIN */);
	return c;
}

/* A segment goes to a device. The first device counts; further ones, and retransmits, end before what is handed. */
SEC("tp_btf/net_dev_queue")
int BPF_PROG(dev_queue, struct sk_buff *skb)
{
	struct sock *sk = skb->sk;
	struct conn *c;
	__u32 end = 0;
	__u64 now;

	if (!sk)
		return 0;
	c = conn_of_skb(skb, sk, &end);
	if (!c || (__s32)(end - c->handed) <= 0)
		return 0;
	if (c->losing)
		retransmit_state(c, sk, 0);
	now = bpf_ktime_get_ns();
	c->handed_at = now;
	__sync_lock_test_and_set(&c->handed, end); /* see send_length() */
	if (!clock_running(c->qdisc)) {
		clock_start(&c->qdisc, now);
		c->qdisc_since = now;
	}
	if (!c->sending && end == BPF_CORE_READ((struct tcp_sock *)sk, write_seq)) {
		clock_stop(&c->send, now);
		conn_occurrence(c, STAGE_SEND_BUFFER, c->send_since, now);
		c->send_since = 0;
	}
	conn_moved(c, now);
	return 0;
}

/* The device takes a segment. */
SEC("tp_btf/net_dev_start_xmit")
int BPF_PROG(dev_xmit, struct sk_buff *skb)
{
	struct sock *sk = skb->sk;
	struct conn *c;
	__u32 end = 0;
	__u64 now;

	if (!sk)
		return 0;
	c = conn_of_skb(skb, sk, &end);
	if (!c || (__s32)(end - c->transmitted) <= 0)
		return 0;
	now = bpf_ktime_get_ns();
	c->transmitted = end;
	c->transmitted_at = now;
	sent_first(c, end, now);
	if (c->responding && !c->first_out)
		c->first_out = now;
	if (end != c->handed)
		return 0;
	clock_stop(&c->qdisc, now);
	conn_occurrence(c, STAGE_QDISC, c->qdisc_since, now);
	c->qdisc_since = 0;
	if (!clock_running(c->send) && !c->sending && c->writes != c->reported)
		progress(c, sk, conn_lane(c), now, now);
	else
		conn_moved(c, now);
	return 0;
}
