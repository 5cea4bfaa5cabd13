//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The life of connections, and with the handshake the beginning of
 * accept_queue.
 *
 * Kernels: inet_sock_set_state from 4.16.
 */
#include "chain.h"
#include "retransmit.h"

/* A connection that has had a request ends, or shuts its sending side: its last reading and its end. */
static __noinline int conn_ends(struct conn *c, struct sock *sk, int new_state)
{
	struct close_record r = {};
	__u64 now = bpf_ktime_get_ns();
	int drained = !clock_running(c->send) && !clock_running(c->qdisc);

	chain_ends(c);
	/*
	 * What nobody will read or send any more is all there will be. A socket that was closed with bytes unsent
	 * still sends them: the reading comes when they have reached the device, or with the socket's end.
	 */
	if (c->state == CONN_ACTIVE && (!c->responding || (c->writes != c->reported && drained) ||
					(new_state == TCP_CLOSE && (c->writes != c->reported || !drained))))
		progress(c, sk, conn_lane(c), now, now);
	r.r.kind = RECORD_CLOSE;
	r.r.cookie = c->cookie;
	r.r.seq = c->seq;
	r.r.time = now;
	r.flags = (drained ? CLOSE_DRAINED : 0) |
		  (new_state == TCP_CLOSE ? CLOSE_FINAL : 0) | (c->lost ? CLOSE_LOST : 0) | (all_acked(sk) ? CLOSE_ACKED : 0);
	send_up(&r, sizeof(r), LOST_CLOSE);
	/* a connection's goroutine ends with it, and its g may serve another by now; a thread's lane ends with the thread */
	if (new_state == TCP_CLOSE && c->lane.goroutine) {
		struct lane *l = conn_lane(c);

		if (l && !l->pending)
			bpf_map_delete_elem(&lanes, &c->lane);
	}
	return 0;
}

/* A connection to a tracked port is established; a process begins to listen; a connection ends. */
SEC("tp_btf/inet_sock_set_state")
int BPF_PROG(sock_set_state, struct sock *sk, int old_state, int new_state)
{
	struct conn *c;

	if (sk->__sk_common.skc_family != AF_INET && sk->__sk_common.skc_family != AF_INET6)
		return 0;
	if (new_state == TCP_LISTEN) {
		struct task_struct *task = bpf_get_current_task_btf();
		struct port_key key = port_of(sk);
		__u32 pid = task->tgid, open = PORT_OPEN;
		if (thread_of(task) && bpf_map_update_elem(&ports, &key, &open, BPF_ANY))
			count(FULL_PORTS);
		process_record(RECORD_LISTEN, pid, 0, key.netns, key.port);
		return 0;
	}
	if (old_state == TCP_LISTEN && new_state == TCP_CLOSE) {
		/* with SO_REUSEPORT, or at another address, others may still listen: user space, which knows, drops the port */
		struct port_key key = port_of(sk);
		__u32 *port = bpf_map_lookup_elem(&ports, &key);
		if (port)
			*port = PORT_CLOSED;
		return 0;
	}
	if (old_state == TCP_SYN_RECV && new_state == TCP_ESTABLISHED) {
		struct arrival a = {};
		__u64 key = (__u64)sk;

		if (!port_tracked(sk))
			return 0;
		c = conn_make(sk);
		if (!c)
			return 0;
		c->established = bpf_ktime_get_ns();
		a.cookie = c->cookie;
		bpf_map_update_elem(&arrivals, &key, &a, BPF_ANY);
		accept_look(c->established, 0, 0);
		c->slot = accept_waits(sk, c->established);
		return 0;
	}
	if (new_state != TCP_FIN_WAIT1 && new_state != TCP_FIN_WAIT2 && new_state != TCP_LAST_ACK && new_state != TCP_CLOSE)
		return 0;
	c = conn_of(sk);
	if (!c)
		return 0;
	if (c->losing)
		retransmit_state(c, sk, new_state == TCP_CLOSE);
	if (new_state == TCP_FIN_WAIT2)
		return 0;
	accept_forget(sk, c->slot);
	c->slot = 0;
	if (new_state == TCP_CLOSE && c->counted) {
		c->counted = 0;
		__sync_fetch_and_sub(&conns_open, 1);
	}
	if (c->seq)
		conn_ends(c, sk, new_state);
	return 0;
}
