/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * When a connection was accepted.
 *
 * accept(2) has no tracepoint of its own, and a hook at every system call's
 * exit sends every process of the host the slow way through each of its calls.
 * But a connection has a struct socket (sk_socket) from accept on and not
 * before, and the few that wait for it are known. So they are looked at where
 * a program runs anyhow: when a thread of a target comes onto a CPU or leaves
 * it, forks, reads or sends, and when bytes or connections come in.
 *
 * The accept lies between the last look that found none and the first that
 * found one. It is taken to be at
 *
 *   the former, if that was a thread coming back from waiting in accept or for
 *   its descriptors to become ready: what it was woken for it does at once;
 *
 *   the latter otherwise: the thread was kept by something else (a sleep, a
 *   lock, other work), and what it does after accepting (start a thread, read,
 *   send, wait) is a look.
 *
 * What held those who accept up meanwhile (the run queue, a CPU limit, a stop)
 * is kept beside it: it is why the connection waited.
 *
 * Where the two are more than a millisecond apart the choice is a guess, and
 * counted (ACCEPTS_LOOSE).
 */
#ifndef EBPFLLM_ACCEPT_H
#define EBPFLLM_ACCEPT_H

#include "state.h"
#include "syscalls_x86.h"

#define LOOSE_NS 1000000
#define LOOKS 8 /* bounds what one event costs; the next one goes on from there */

/* Does a thread in system call nr wait for something to accept, or for one of its descriptors? */
static __always_inline __u32 waits_for_descriptors(long nr)
{
	switch (nr) {
	case NR_accept: case NR_accept4: case NR_epoll_wait: case NR_epoll_pwait: case NR_epoll_pwait2:
	case NR_poll: case NR_ppoll: case NR_select: case NR_pselect6: case NR_io_uring_enter:
		return 1;
	}
	return 0;
}

static __always_inline void accept_note(__u64 sk, __u64 from, __u64 to, __u32 woken, struct held *held)
{
	struct arrival *a = bpf_map_lookup_elem(&arrivals, &sk);

	if (!a || a->accepted)
		return;
	a->accepted = woken ? from : to;
	if (held)
		a->held = *held;
	if (to > from + LOOSE_NS)
		count(ACCEPTS_LOOSE);
}

/* One who accepts was held up while a connection waits. */
static __always_inline void accept_held(struct pending *p, struct held *held)
{
	for (int i = 0; i < HELD_STAGES; i++) {
		struct held_by *s = &held->by[i], *most = &p->held.by[i];
		__u64 from = s->from > p->since ? s->from : p->since;

		if (s->to <= from)
			continue;
		if (most->tid == s->tid) {
			most->ns += s->to - from;
			most->to = s->to;
		} else if (s->to - from > most->ns) {
			most->from = from;
			most->to = s->to;
			most->ns = s->to - from;
			most->tid = s->tid;
		}
	}
}

/* Looks at one waiting connection, whose slot this is. */
static __always_inline void accept_look_at(struct pending *p, __u64 bit, __u64 now, __u32 woken, struct held *held)
{
	__u64 sk = p->sk, from = p->unaccepted;
	__u32 was_woken = p->woken;

	if (!sk)
		return;
	if (!BPF_CORE_READ((struct sock *)sk, sk_socket)) {
		p->unaccepted = now;
		p->woken = woken;
		if (held)
			accept_held(p, held);
		return;
	}
	/* one of those who look at the same time takes it out */
	if (__sync_val_compare_and_swap(&p->sk, sk, 0) != sk)
		return;
	__sync_fetch_and_and(&pending_slots, ~bit);
	accept_note(sk, from, now, was_woken, &p->held);
}

__noinline int accept_look_some(__u64 now, __u32 woken, struct held *held)
{
	__u32 at = pending_next % PENDING, i;
	__u64 left = pending_slots;

	left = at ? left >> at | left << (PENDING - at) : left;
	for (int n = 0; n < LOOKS && left; n++) {
		__u64 below = (left & -left) - 1; /* as many ones as there are zeros at its end */

		below -= below >> 1 & 0x5555555555555555ULL;
		below = (below & 0x3333333333333333ULL) + (below >> 2 & 0x3333333333333333ULL);
		below = (below + (below >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
		i = (at + (__u32)(below * 0x0101010101010101ULL >> 56)) % PENDING;
		left &= left - 1;
		accept_look_at(&pending[i], 1ULL << i, now, woken, held);
		pending_next = i + 1;
	}
	return 0;
}

/*
 * Something happens at now. Of a thread that comes onto a CPU: whether it comes back from waiting for its descriptors,
 * and, where it may be one who accepts, what has held it up.
 */
static __always_inline void accept_look(__u64 now, __u32 woken, struct held *held)
{
	if (pending_slots)
		accept_look_some(now, woken, held);
}

/* A connection begins to wait. Returns its slot, from 1; where all are taken, that of one which waits longer. */
static __always_inline __u8 accept_waits(struct sock *sk, __u64 now)
{
	__u64 free = ~pending_slots, bit;
	__u32 i = pending_next;

	/* any will do: the lowest free one of the next few, else the one whose turn it is */
	for (int n = 0; n < PENDING; n++, i++) /* bounded by the slots there are */
		if (free >> i % PENDING & 1)
			break;
	i %= PENDING;
	bit = 1ULL << i;
	pending[i].sk = 0;
	pending[i].unaccepted = now;
	pending[i].woken = 0;
	pending[i].since = now;
	__builtin_memset(&pending[i].held, 0, sizeof(pending[i].held));
	pending[i].sk = (__u64)sk;
	__sync_fetch_and_or(&pending_slots, bit);
	return i + 1;
}

/* A connection ends, perhaps before it was accepted. */
static __always_inline void accept_forget(struct sock *sk, __u8 slot)
{
	__u32 i = (slot - 1) % PENDING;

	if (slot && __sync_val_compare_and_swap(&pending[i].sk, (__u64)sk, 0) == (__u64)sk)
		__sync_fetch_and_and(&pending_slots, ~(1ULL << i));
}

/* Who reads a connection has accepted it. Returns when; 0 if its handshake was not seen. */
static __always_inline __u64 accept_read(struct sock *sk, struct conn *c, __u64 now)
{
	__u64 key = (__u64)sk, accepted = 0;
	__u32 i = (c->slot - 1) % PENDING;
	struct arrival *a;

	if (c->slot && pending[i].sk == key)
		accept_look_at(&pending[i], 1ULL << i, now, 0, 0);
	c->slot = 0;
	a = bpf_map_lookup_elem(&arrivals, &key);
	if (!a)
		return 0;
	if (a->cookie == c->cookie) {
		/* too many waited for all of them to be looked at */
		if (!a->accepted)
			accept_note(key, c->established, now, 0, 0);
		accepted = a->accepted;
		c->held = a->held;
	}
	bpf_map_delete_elem(&arrivals, &key);
	return accepted;
}

#endif
