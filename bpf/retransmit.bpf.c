//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * retransmit: bytes of the response that had to be sent again, from when they
 * were first sent until they are acknowledged.
 *
 * Nobody waits for the ACK of a response that needed no second try, so incoming
 * segments are looked at only while some connection waits for one (one flag).
 *
 * Kernels: tcp_retransmit_skb from 4.15 (6.18 has a third argument), tcp_probe
 * from 4.16. tcp_probe fires for established connections; after a close the
 * socket's changes of state tell.
 */
#include "retransmit.h"
#include "echo.h"

static __always_inline struct tcp_skb_cb *cb_of(struct sk_buff *skb)
{
	return (struct tcp_skb_cb *)__builtin_preserve_access_index(&skb->cb);
}

/* When the byte at seq was first sent: of the marks that reach past it the oldest. */
static __always_inline struct mark *mark_of(struct conn *c, __u32 seq)
{
	struct mark *found = 0;

	for (int i = 0; i < MARKS; i++) {
		struct mark *m = &c->marks[i];
		if (i < c->marked && (__s32)(m->end - seq) > 0 && (!found || m->at < found->at))
			found = m;
	}
	return found;
}

/* The client has little room left: its reader is late, and lets the sender wait with or without a loss. */
static __always_inline int window_full(struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 window = BPF_CORE_READ(tp, snd_wnd);

	return window < BPF_CORE_READ(tp, mss_cache) || window < BPF_CORE_READ(tp, max_window) / 4;
}

/* A segment is sent again, by the timer, as a probe, or because ACKs say that it is missing. */
SEC("tp_btf/tcp_retransmit_skb")
int BPF_PROG(tcp_retransmit, struct sock *sk, struct sk_buff *skb)
{
	struct conn *c = bpf_sk_storage_get(&conns, sk, 0, 0);
	struct mark *m;
	__s64 held;
	__u64 now;
	__u32 seq, end;

	/* a FIN alone is no part of the response */
	if (!c || c->state != CONN_ACTIVE || !c->responding || !c->marked || !skb->len)
		return 0;
	seq = BPF_CORE_READ(cb_of(skb), seq);
	end = BPF_CORE_READ(cb_of(skb), end_seq);
	if ((__s32)(end - c->response_seq) <= 0)
		return 0; /* the response before */
	now = bpf_ktime_get_ns();
	c->retransmits++;
	c->resent_at = now;
	if (c->losing) {
		if ((__s32)(end - c->lost_until) > 0)
			c->lost_until = end;
		retransmit_record(c, now, 0);
		return 0;
	}
	conn_settle(c, conn_lane(c), now);
	c->resent_first = now;
	c->duplicates = BPF_CORE_READ((struct tcp_sock *)sk, dsack_dups);
	c->retransmit_before = c->retransmit;
	c->retransmit_done = c->done[STAGE_RETRANSMIT];
	c->losing = window_full(sk) ? LOSING_FULL : LOSING;
	m = mark_of(c, seq);
	/* not before the end of an earlier loss, whose time is counted already */
	if (m && m->at > c->retransmit_since) {
		c->retransmit_since = m->at;
		/* what was held back since then is the loss's doing */
		held = c->done[STAGE_SEND_BUFFER] - m->send;
		if (held > 0 && c->losing == LOSING) {
			c->done[STAGE_SEND_BUFFER] -= held;
			c->done[STAGE_RETRANSMIT] += held;
		}
	} else {
		c->retransmit_since = now;
	}
	c->lost_until = end;
	__sync_fetch_and_add(&conns_losing, 1);
	clock_start(&c->retransmit, c->retransmit_since);
	conn_settle(c, conn_lane(c), now);
	retransmit_record(c, now, 0);
	return 0;
}

enum { OPTION_END = 0, OPTION_NOP = 1, OPTION_SACK = 5, OPTION_TIMESTAMPS = 8 };

static __always_inline __u32 word_at(const __u8 *p)
{
	return (__u32)p[0] << 24 | (__u32)p[1] << 16 | (__u32)p[2] << 8 | p[3];
}

/*
 * Does this ACK say that what was sent again had arrived at its first sending? Either it echoes a time before
 * the second sending (RFC 3522), or its first SACK block tells of a duplicate, below the ACK (RFC 2883).
 */
static __noinline int first_arrived(struct sock *sk, struct sk_buff *skb, struct conn *c, __u32 ack)
{
	__u8 *th, h[14], options[64] = {};
	__u32 n, at = 0, kind, len, echoed;

	if (!sk || !skb || !c)
		return 0;
	th = BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, transport_header);
	if (bpf_probe_read_kernel(h, sizeof(h), th))
		return 0;
	n = (h[12] >> 4) * 4;
	if (n <= 20 || n > 60)
		return 0;
	n -= 20;
	if (bpf_probe_read_kernel(options, 40, th + 20))
		return 0;
	for (int i = 0; i < 20; i++) { /* more than 40 bytes can hold, padding aside */
		if (at >= n || at >= 40)
			break;
		kind = options[at & 63];
		if (kind == OPTION_END)
			break;
		if (kind == OPTION_NOP) {
			at++;
			continue;
		}
		len = options[(at + 1) & 63];
		if (len < 2 || at + len > n)
			break;
		at &= 31; /* what follows fits behind */
		if (kind == OPTION_TIMESTAMPS && len == 10) {
			echoed = word_at(options + at + 6) - BPF_CORE_READ((struct tcp_sock *)sk, tsoffset);
			if (echoed_before(echoed, c->resent_first))
				return 1;
		}
		if (kind == OPTION_SACK && len >= 10 && (__s32)(word_at(options + at + 6) - ack) <= 0)
			return 1;
		at += len;
	}
	return 0;
}

/* A segment comes in: every one of the machine. Fires before the kernel takes the ACK in. */
SEC("tp_btf/tcp_probe")
int BPF_PROG(tcp_ack, struct sock *sk, struct sk_buff *skb)
{
	struct conn *c;
	__u32 ack;

	if (!conns_losing)
		return 0;
	c = bpf_sk_storage_get(&conns, sk, 0, 0);
	if (!c || !c->losing)
		return 0;
	ack = BPF_CORE_READ(cb_of(skb), ack_seq);
	if ((__s32)(ack - c->lost_until) < 0 || (__s32)(ack - BPF_CORE_READ((struct tcp_sock *)sk, snd_nxt)) > 0)
		return 0;
	if (first_arrived(sk, skb, c, ack))
		retransmit_spurious(c, bpf_ktime_get_ns());
	else
		retransmit_ends(c, sk, bpf_ktime_get_ns(), RETRANSMIT_ACKED);
	return 0;
}
