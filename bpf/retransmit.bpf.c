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
	m = mark_of(c, seq);
	/* not before the end of an earlier loss, whose time is counted already */
	if (m && m->at > c->retransmit_since) {
		c->retransmit_since = m->at;
		/* what was held back since then is the loss's doing */
		held = c->done[STAGE_SEND_BUFFER] - m->send;
		if (held > 0) {
			c->done[STAGE_SEND_BUFFER] -= held;
			c->done[STAGE_RETRANSMIT] += held;
		}
	} else {
		c->retransmit_since = now;
	}
	c->losing = 1;
	c->lost_until = end;
	__sync_fetch_and_add(&conns_losing, 1);
	clock_start(&c->retransmit, c->retransmit_since);
	conn_settle(c, conn_lane(c), now);
	retransmit_record(c, now, 0);
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
	retransmit_ends(c, sk, bpf_ktime_get_ns(), RETRANSMIT_ACKED);
	return 0;
}
