/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What became of the response's bytes after they were handed to the device: the
 * part of retransmit that the other files call.
 */
#ifndef EBPFLLM_RETRANSMIT_H
#define EBPFLLM_RETRANSMIT_H

#include "conn.h"

#define DELAYED_ACK_US 40000 /* TCP_DELACK_MIN of Linux; others wait for 25 to 200 ms */

/* A segment of the response is sent for the first time. */
static __always_inline void sent_first(struct conn *c, __u32 end, __u64 now)
{
	struct mark *m = &c->marks[(__u8)(c->marked - 1) % MARKS];

	if (!c->marked || now - m->at > MARK_NS) {
		m = &c->marks[c->marked % MARKS];
		m->at = now;
		m->send = c->done[STAGE_SEND_BUFFER];
		/* how often the ring has gone round does not matter, that it has does */
		c->marked = c->marked == 2 * MARKS - 1 ? MARKS : c->marked + 1;
	}
	m->end = end;
}

/* µs after which the kernel sends again what is not acknowledged, as of its latest measurement of the round trip. */
static __always_inline __u32 retransmit_timeout(struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;

	return (BPF_CORE_READ(tp, srtt_us) >> 3) + BPF_CORE_READ(tp, rttvar_us);
}

static __always_inline int all_acked(struct sock *sk)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;

	return BPF_CORE_READ(tp, snd_una) == BPF_CORE_READ(tp, write_seq);
}

static __always_inline void retransmit_record(struct conn *c, __u64 now, __u32 flags)
{
	struct retransmit_record r = {};

	r.r.kind = RECORD_RETRANSMIT;
	r.r.seq = c->seq;
	r.r.cookie = c->cookie;
	r.r.time = now;
	r.start = c->retransmit_since;
	r.plain = clock_read(c->retransmit, now);
	r.retransmits = c->retransmits;
	r.flags = flags;
	if (!send_up(&r, sizeof(r), LOST_RETRANSMIT))
		c->lost = 1;
}

/*
 * When the client had what was sent again, given the time of its ACK. That may come late, since a receiver may wait
 * for more before it acknowledges, but no later than a round trip after the last sending was it due. The round
 * trip is the kernel's smoothed one, less the delay that such ACKs add to it, or its least.
 */
static __always_inline __u64 ack_due(struct conn *c, struct sock *sk, __u64 now)
{
	struct tcp_sock *tp = (struct tcp_sock *)sk;
	__u32 least = BPF_CORE_READ(tp, rtt_min.s[0].v), rtt = BPF_CORE_READ(tp, srtt_us) >> 3;
	__u64 due;

	rtt = rtt > DELAYED_ACK_US ? rtt - DELAYED_ACK_US : 0;
	due = c->resent_at + (rtt > least ? rtt : least) * 1000ULL;
	return due < now ? due : now;
}

/* Nothing that was sent again is outstanding any more. */
static __always_inline void retransmit_ends(struct conn *c, struct sock *sk, __u64 now, __u32 flags)
{
	__u64 end = now;

	/* bytes that are held back until the ACK wait for the ACK itself */
	if (flags & RETRANSMIT_ACKED && !clock_running(c->send))
		end = ack_due(c, sk, now);
	clock_stop(&c->retransmit, end);
	c->losing = 0;
	__sync_fetch_and_sub(&conns_losing, 1);
	conn_settle(c, conn_lane(c), now);
	conn_occurrence(c, STAGE_RETRANSMIT, c->retransmit_since, end);
	retransmit_record(c, end, RETRANSMIT_OVER | flags);
	c->retransmit_since = end;
}

/* What was sent again had arrived: the client was late, the network has lost nothing. */
static __always_inline void retransmit_spurious(struct conn *c, __u64 now)
{
	__s64 d;

	conn_settle(c, conn_lane(c), now);
	d = c->done[STAGE_RETRANSMIT] - c->retransmit_done;
	c->done[STAGE_RETRANSMIT] -= d;
	c->done[STAGE_SEND_BUFFER] += d;
	c->retransmit = c->retransmit_before;
	c->losing = 0;
	__sync_fetch_and_sub(&conns_losing, 1);
	conn_settle(c, conn_lane(c), now);
	retransmit_record(c, now, RETRANSMIT_OVER | RETRANSMIT_ACKED | RETRANSMIT_SPURIOUS);
}

/*
 * The socket sends, or changes its state: once its own side is closed the ACK's own hook no longer fires. Was it
 * acknowledged meanwhile? If the client has told of duplicates, it had arrived at its first sending.
 */
static __noinline int retransmit_state(struct conn *c, struct sock *sk, int closed)
{
	__u32 una;

	if (!c || !sk)
		return 0;
	una = BPF_CORE_READ((struct tcp_sock *)sk, snd_una);
	if ((__s32)(una - c->lost_until) >= 0 && BPF_CORE_READ((struct tcp_sock *)sk, dsack_dups) != c->duplicates)
		retransmit_spurious(c, bpf_ktime_get_ns());
	else if ((__s32)(una - c->lost_until) >= 0)
		retransmit_ends(c, sk, bpf_ktime_get_ns(), RETRANSMIT_ACKED);
	else if (closed)
		retransmit_ends(c, sk, bpf_ktime_get_ns(), 0);
	return 0;
}

/* The next request came before the last response was acknowledged: it was not waited for. */
static __always_inline void retransmit_forgotten(struct conn *c)
{
	if (!c->losing)
		return;
	c->losing = 0;
	__sync_fetch_and_sub(&conns_losing, 1);
}

#endif
