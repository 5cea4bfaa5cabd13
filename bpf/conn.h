/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * A server connection and the request on it: what the receiving and the
 * sending side share.
 *
 * The socket has one exclusive stage at a time (retransmit before send_buffer
 * before qdisc before receive_queue). It takes over only what its lane spends
 * waiting, so each stretch of it is measured by the lane's wait clock; the plain
 * totals run by the wall clock beside it.
 */
#ifndef EBPFLLM_CONN_H
#define EBPFLLM_CONN_H

#include "lane.h"
#include "accept.h"

#define AF_INET 2
#define AF_INET6 10
#define AF_UNIX 1
#define IPPROTO_MPTCP 262
enum { TCP_ESTABLISHED = 1, TCP_SYN_RECV = 3, TCP_FIN_WAIT1 = 4, TCP_FIN_WAIT2 = 5, TCP_TIME_WAIT = 6, TCP_CLOSE = 7, TCP_CLOSE_WAIT = 8,
       TCP_LAST_ACK = 9, TCP_LISTEN = 10, TCP_NEW_SYN_RECV = 12 };

static __always_inline struct port_key port_of(struct sock *sk)
{
	return (struct port_key){
		.netns = sk->__sk_common.skc_net.net->ns.inum,
		.port = sk->__sk_common.skc_num,
	};
}

static __always_inline int port_tracked(struct sock *sk)
{
	struct port_key key = port_of(sk);

	return bpf_map_lookup_elem(&ports, &key) != 0;
}

static __always_inline void conn_init(struct conn *c, struct sock *sk)
{
	c->cookie = bpf_get_socket_cookie(sk);
	c->family = sk->__sk_common.skc_family;
	c->local_port = sk->__sk_common.skc_num;
	c->remote_port = bpf_ntohs(sk->__sk_common.skc_dport);
	if (c->family == AF_INET6) {
		bpf_probe_read_kernel(c->local, 16, &sk->__sk_common.skc_v6_rcv_saddr);
		bpf_probe_read_kernel(c->remote, 16, &sk->__sk_common.skc_v6_daddr);
	} else {
		bpf_probe_read_kernel(c->local, 4, &sk->__sk_common.skc_rcv_saddr);
		bpf_probe_read_kernel(c->remote, 4, &sk->__sk_common.skc_daddr);
	}
}

/* Makes the state of a connection, if there may be one more. */
static __always_inline struct conn *conn_make(struct sock *sk)
{
	struct conn *c = 0;

	if (conns_open < MAX_CONNS)
		c = bpf_sk_storage_get(&conns, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!c) {
		count(FULL_SOCKETS);
		return 0;
	}
	conn_init(c, sk);
	if (!c->counted) {
		c->counted = 1;
		__sync_fetch_and_add(&conns_open, 1);
	}
	return c;
}

static __always_inline struct lane *conn_lane(struct conn *c)
{
	return c->lane.id ? bpf_map_lookup_elem(&lanes, &c->lane) : 0;
}

/* How long the process of a goroutine's lane has been stopped as a whole. */
static __always_inline __s64 conn_stopped(struct conn *c, __u64 now)
{
	struct stop *s = c->lane.goroutine ? bpf_map_lookup_elem(&stops, &c->lane.tgid) : 0;

	return s ? clock_read(s->clock, now) : 0;
}

/* The socket's exclusive stage, by precedence. */
static __always_inline __u8 conn_stage(struct conn *c)
{
	return clock_running(c->send)	 ? (c->losing == LOSING ? STAGE_RETRANSMIT : STAGE_SEND_BUFFER) :
	       clock_running(c->qdisc)	 ? STAGE_QDISC :
	       clock_running(c->receive) ? STAGE_RECEIVE_QUEUE :
					   0;
}

/* Moves the socket to its present exclusive stage, charging the last one with what the lane waited in it. */
static __always_inline void conn_settle(struct conn *c, struct lane *l, __u64 now)
{
	__u8 state = conn_stage(c);
	__s64 wait = l ? lane_read(l, STAGE_WAIT, now) : 0;
	__s64 d = wait - c->lane_wait;

	if (c->state == CONN_ACTIVE && l && d > 0) {
		if (c->socket_state == STAGE_SEND_BUFFER)
			c->done[STAGE_SEND_BUFFER] += d;
		else if (c->socket_state == STAGE_RETRANSMIT)
			c->done[STAGE_RETRANSMIT] += d;
		else if (c->socket_state == STAGE_QDISC)
			c->done[STAGE_QDISC] += d;
		else if (c->socket_state == STAGE_RECEIVE_QUEUE)
			c->done[STAGE_RECEIVE_QUEUE] += d;
	}
	c->socket_state = state;
	c->lane_wait = wait;
}

/* The same, where nothing but the stage matters: as long as it stays, its charge can wait, and the lane is not looked up. */
static __always_inline void conn_moved(struct conn *c, __u64 now)
{
	if (conn_stage(c) != c->socket_state)
		conn_settle(c, conn_lane(c), now);
}

/* What the socket's stages have taken over from the lanes' waiting since the head was read. */
static __always_inline __s64 conn_socket_time(struct conn *c)
{
	return c->body + (c->done[STAGE_RECEIVE_QUEUE] - c->body_receive) + c->done[STAGE_SEND_BUFFER] + c->done[STAGE_QDISC] +
	       c->done[STAGE_RETRANSMIT];
}

/* Takes the lane's present reading as the request's zero. */
static __always_inline void conn_take_lane(struct conn *c, struct lane *l, __u64 now)
{
#pragma unroll
	for (int i = STAGE_UNKNOWN; i < THREAD_STAGES; i++)
		c->base[i] = lane_read(l, i, now);
	c->base_major = l->major;
	c->base_remote = l->remote;
	c->lane_lost = l->lost;
	c->lane_wait = c->base[STAGE_WAIT];
	c->lane_socket = conn_socket_time(c);
	c->chain_since = now;
	c->chain_wait = c->lane_wait;
	c->chain_socket = c->lane_socket;
	__builtin_memset(c->chained, 0, sizeof(c->chained));
	c->chained_major = 0;
}

/* A stretch of a stage ends: its record, where it is long enough. */
static __noinline void conn_occurred(struct conn *c, __u32 stage, __u64 start, __u64 end)
{
	struct occurrence_record o = {};

	o.r.kind = RECORD_OCCURRENCE;
	o.r.cookie = c->cookie;
	o.r.seq = c->seq;
	o.r.time = end;
	o.start = start;
	o.duration = end - start;
	o.pid = c->pid;
	o.tid = c->tid;
	o.stage = stage;
	o.syscall = -1;
	if (!send_up(&o, sizeof(o), LOST_OCCURRENCE))
		c->lost = 1;
}

static __always_inline void conn_occurrence(struct conn *c, __u32 stage, __u64 start, __u64 end)
{
	if (start && end >= start && end - start >= min_duration)
		conn_occurred(c, stage, start, end);
}

#endif
