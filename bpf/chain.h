/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * Wake-up chains: what a wait was for.
 *
 * When a tracked thread ends another's wait, the other's time off the CPU is
 * split by what the waker did in it, which the waker remembers: its stalls, its
 * own waits, and else its CPU time. The pieces go into the woken thread's
 * memory as handed on. The waker's own waits were split in the same way when it
 * was woken, so that chains of any length come out by induction; MAX_DEPTH
 * bounds them. A request takes its share when its response is sent.
 *
 * An interrupt wakes in the name of whoever it interrupted: the preempt count
 * tells. Of the wake-ups by softirqs only those count in which the thread is
 * inside a send to a loopback socket and the peer's bytes have just arrived.
 */
#ifndef EBPFLLM_CHAIN_H
#define EBPFLLM_CHAIN_H

#include "conn.h"
#include "preempt.h"

#define MAX_DEPTH 8		/* API, router, engine, worker: twice that */
#define LONG_WAIT_NS 1000000	/* after which a thread's totals are read even if nobody tracked has woken it */
#define JOIN_NS 100000		/* neighbours no further apart than this may become one */
#define JOIN_AMONG 4		/* how many of the latest are looked at: kinds that a thread may alternate between */

enum caused {
	CAUSE_LOST, /* something else has come in between, or the last wake-up is not understood */
	CAUSE_WOKEN,
};

/* What one CPU is about: the send to loopback that it is in, and scratch. */
struct chain_cpu {
	__u64 socket; /* that is sent to */
	__u64 net;    /* its namespace */
	__be32 local, remote; /* its IPv4 addresses */
	__u32 tid;    /* who sends; 0 nobody */
	__u32 ports;  /* of that socket: local << 16 | remote */
	__u32 ready;  /* the peer has just been told of bytes */
	__u32 pad;
	struct stretch pieces[KINDS];
	__u64 at_known[KINDS]; /* a thread's totals at the time from which on its latest stretches are complete */
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct chain_cpu);
} chain_cpus SEC(".maps");

static __always_inline struct chain_cpu *chain_cpu(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&chain_cpus, &zero);
}

/* The i-th latest stretch of a thread. */
static __always_inline struct stretch *latest(struct thread *t, __u32 i)
{
	return &t->recent[(t->next - 1 - i) & (RECENT - 1)];
}

static __always_inline __u32 kind_of(struct stretch *s)
{
	__u32 stage = s->stage;

	return s->major ? MAJOR_FAULTS : stage < THREAD_STAGES ? stage : STAGE_WAIT;
}

/* Takes a reading of the thread's totals. */
static __always_inline void chain_read_totals(struct thread *t, __u64 now)
{
	struct reading *r, *coarse;

	r = &t->readings[t->read_fine++ & (FINE - 1)];
	r->time = now;
#pragma unroll
	for (int i = 0; i < KINDS; i++)
		r->total[i] = t->total[i] >> READING_SHIFT;
	coarse = &t->readings[FINE + ((t->read_coarse - 1) & (COARSE - 1))];
	if (t->read_coarse && now < coarse->time + COARSE_NS)
		return;
	t->readings[FINE + (t->read_coarse++ & (COARSE - 1))] = *r;
}

/*
 * Keeps the sum of what is handed on and forgotten: a loop that reads a file in
 * many parts is woken by another thread of its pool for each.
 */
static __always_inline void spill(struct thread *t, struct stretch *s)
{
	__u32 kind = kind_of(s);
	struct stretch *p;

	if (!s->depth || s->early || kind >= KINDS)
		return;
	p = &t->spilled[kind];
	if (!p->to) {
		*p = *s;
	} else {
		if (s->to > p->to)
			p->to = s->to;
		if (s->from < p->from)
			p->from = s->from;
		p->ns += s->ns;
	}
	t->spills = 1;
}

static __always_inline void forget_spilled(struct thread *t)
{
	if (t->spills)
		__builtin_memset(t->spilled, 0, sizeof(t->spilled));
	t->spills = 0;
}

/* A place for a new one: what is known of the thread then begins where the replaced one ended. */
static __always_inline struct stretch *oldest_replaced(struct thread *t)
{
	struct stretch *s = &t->recent[t->next & (RECENT - 1)];

	if (s->to > t->known)
		t->known = s->to;
	spill(t, s);
	t->next++;
	return s;
}

/*
 * Remembers a stretch, joined to an earlier one of its kind if that ended just
 * before. Between them the thread did something else for up to JOIN_NS, and for
 * an eighth of the time at most where the stretch itself may become a span.
 */
__noinline int remember_stretch(struct thread *t, struct stretch *n)
{
	struct stretch *s, joined;
	__u64 gap;

	if (!t || !n)
		return 0;
	if (!n->early)
		t->total[kind_of(n)] += n->ns;
	for (__u32 i = 0; i < JOIN_AMONG; i++) {
		s = latest(t, i);
		if (s->stage != n->stage || s->tid != n->tid || s->waker != n->waker || s->major != n->major ||
		    s->early != n->early || !s->to)
			continue;
		gap = s->stage == STAGE_PAGE_FAULT || s->stage == STAGE_WAIT || s->waker || s->ns / 8 > JOIN_NS ?
			      JOIN_NS :
			      s->ns / 8;
		if (n->from > s->to + gap)
			continue;
		joined = *s;
		if (n->from < joined.from)
			joined.from = n->from;
		if (n->to > joined.to)
			joined.to = n->to;
		joined.ns += n->ns;
		if (n->depth > joined.depth)
			joined.depth = n->depth;
		/* the latest end stays first; a loop from i down is endless to the verifier of 6.1 */
		for (__u32 j = JOIN_AMONG - 1; j > 0; j--)
			if (j <= i)
				*latest(t, j) = *latest(t, j - 1);
		*latest(t, 0) = joined;
		return 0;
	}
	s = latest(t, 0);
	/* page faults come in without a lower bound, since many short ones make a long one */
	if (s->ns >= RECENT_NS || !s->to)
		s = oldest_replaced(t);
	*s = *n;
	return 0;
}

/* Remembers a stretch of the thread's own. */
static __always_inline void remember(struct thread *t, __u32 stage, __u64 from, __u64 to, __u64 ns, int major)
{
	struct stretch n = { .from = from, .to = to, .ns = ns, .pid = t->tgid, .tid = t->tid,
			     .stage = stage == STAGE_UNKNOWN ? STAGE_WAIT : stage, .major = major };

	if (to <= from || (ns < RECENT_NS && stage != STAGE_PAGE_FAULT))
		return;
	remember_stretch(t, &n);
}

/* The part of a stretch's time that lies within [from, to]: it is taken to be spread evenly. */
__noinline __u64 stretch_within(struct stretch *s, __u64 from, __u64 to)
{
	__u64 a, b;

	if (!s)
		return 0;
	a = s->from > from ? s->from : from;
	b = s->to < to ? s->to : to;
	if (a >= b)
		return 0;
	if (a == s->from && b == s->to)
		return s->ns;
	/* in parts of 1024, so that no product is too large */
	return s->ns >= s->to - s->from ? b - a : s->ns / (((s->to - s->from) >> 10) + 1) * ((b - a) >> 10);
}

/* Is it the current thread itself that wakes, and not an interrupt that came over it? */
static __always_inline int wakes_itself(struct task_struct *current)
{
	__u32 count = preempt_count(current);
	struct chain_cpu *cpu;

	if (count & IN_HARD_INTERRUPT)
		return 0;
	if (!(count & IN_SOFTIRQ))
		return 1;
	cpu = chain_cpu();
	return cpu && cpu->ready && cpu->tid == current->pid;
}

/* Adds to what is handed on of one kind. */
static __always_inline void chain_piece(struct chain_cpu *cpu, __u32 kind, __u64 ns, __u64 from, __u64 to, __u32 pid,
					__u32 tid, __u8 depth)
{
	struct stretch *p;

	if (kind >= KINDS || !ns)
		return;
	p = &cpu->pieces[kind];
	if (!p->to || from < p->from)
		p->from = from;
	if (to > p->to)
		p->to = to;
	/* named by whichever has most of it */
	if (!p->ns || ns > p->ns) {
		p->pid = pid;
		p->tid = tid;
		p->depth = depth < MAX_DEPTH ? depth + 1 : MAX_DEPTH;
	}
	p->ns += ns;
}

/* From one reading of a total to the next, in nanoseconds. They wrap, and the one at_known is not exact. */
static __always_inline __u64 reading_diff(__u32 from, __u32 to)
{
	__s32 d = to - from;

	return d > 0 ? (__u64)d << READING_SHIFT : 0;
}

/* The place of a thread's last reading up to t0 (or, with after, of its first one after t0 and before known); -1 if there is none. */
__noinline int chain_reading(struct thread *t, __u64 t0, int after)
{
	__u64 best = 0, time;
	int place = -1;

	if (!t)
		return -1;
	for (__u32 i = 0; i < FINE + COARSE; i++) { /* all that there are */
		time = t->readings[i].time;
		if (!time || time >= t->known || time + READING_AGE_NS < t->known || (time > t0) != !!after)
			continue;
		if (place < 0 || (after ? time < best : time > best)) {
			best = time;
			place = i;
		}
	}
	return place;
}

__noinline __u64 reading_time(struct thread *t, __u32 place)
{
	return t && place < FINE + COARSE ? t->readings[place].time : 0;
}

__noinline __u32 reading_total(struct thread *t, __u32 place, __u32 kind)
{
	return t && place < FINE + COARSE && kind < KINDS ? t->readings[place].total[kind] : 0;
}

/* What a thread's totals were when its latest stretches begin. */
__noinline int chain_totals_at_known(struct thread *t)
{
	struct chain_cpu *cpu = chain_cpu();
	struct stretch *s;
	__u64 *total;
	__u32 kind;

	if (!t || !cpu)
		return 0;
	for (__u32 i = 0; i < KINDS; i++)
		cpu->at_known[i] = t->total[i];
	for (__u32 i = 0; i < RECENT; i++) { /* bounded by what a thread remembers */
		s = latest(t, i);
		kind = kind_of(s);
		if (s->early || kind >= KINDS)
			continue;
		total = &cpu->at_known[kind];
		*total = s->ns < *total ? *total - s->ns : 0;
	}
	return 0;
}

/*
 * What the waker did from t0 until its latest stretches begin, by its readings.
 * Between two of them it is taken to be spread evenly. Returns from when on
 * something is known: t0, or later.
 */
__noinline __u64 chain_older(struct thread *w, __u64 t0)
{
	struct chain_cpu *cpu = chain_cpu();
	__u64 begin = 0, end, ns, part, left, from;
	__u32 first, next;

	if (!w || !cpu)
		return t0;
	first = chain_reading(w, t0, 0);
	next = chain_reading(w, t0, 1);
	end = w->known;
	if (first < FINE + COARSE)
		begin = reading_time(w, first);
	if (next < FINE + COARSE)
		end = reading_time(w, next);
	if (!begin && end == w->known)
		return w->known;
	chain_totals_at_known(w);
	from = begin ? t0 : end;
	left = w->known - from;
	for (__u32 i = 0; i < KINDS; i++) {
		__u32 at_known = cpu->at_known[i] >> READING_SHIFT, at_end = at_known;

		if (i == STAGE_CPU)
			continue; /* what is left over */
		ns = 0;
		if (next < FINE + COARSE) {
			at_end = reading_total(w, next, i);
			ns = reading_diff(at_end, at_known);
		}
		if (first < FINE + COARSE) {
			part = reading_diff(reading_total(w, first, i), at_end);
			/* the share of [begin, end] that lies after t0 */
			ns += part * ((end - t0) >> 14) / (((end - begin) >> 14) + 1);
		}
		if (ns > left)
			ns = left;
		left -= ns;
		chain_piece(cpu, i, ns, from, w->known, w->tgid, w->tid, 0);
	}
	return from;
}

/* Adds the part of a waker's stretch that lies within [from, to]. */
__noinline int chain_add(struct stretch *s, __u64 from, __u64 to)
{
	struct chain_cpu *cpu = chain_cpu();

	if (!s || !cpu || s->early)
		return 0;
	chain_piece(cpu, s->depth >= MAX_DEPTH ? STAGE_WAIT : kind_of(s), stretch_within(s, from, to),
		    s->from > from ? s->from : from, s->to < to ? s->to : to, s->pid, s->tid, s->depth);
	return 0;
}

/* Splits the time [t0, t1], a wait of thread t or earlier than that, by what its waker w did in it. */
__noinline int chain_split(struct thread *t, struct thread *w, __u64 t0, __u64 t1, int early)
{
	struct chain_cpu *cpu = chain_cpu();
	struct stretch *s, *p, cpu_time = {};
	__u64 left, ns, since = t0;
	__u32 kind, any = 0;

	if (!t || !w || !cpu || t0 >= t1)
		return 0;
	if (t0 < w->known) {
		__builtin_memset(cpu->pieces, 0, sizeof(cpu->pieces));
		any = 1;
		since = w->known < t1 ? w->known : t1;
		ns = chain_older(w, t0);
		if (ns > t1)
			ns = t1;
		/* of what the waker did before then nothing is known: that part stays wait */
		if (!early)
			remember(t, STAGE_WAIT, t0, ns, ns - t0, 0);
		t0 = ns;
	}
	for (__u32 i = 0; i < RECENT; i++) { /* bounded by what a thread remembers */
		s = latest(w, i);
		if (s->to > since) {
			if (!any)
				__builtin_memset(cpu->pieces, 0, sizeof(cpu->pieces));
			any = 1;
			chain_add(s, since, t1);
		} else if (!s->depth) {
			break; /* a thread's own are in order: those before ended earlier */
		}
	}
	left = t1 - t0;
	/* the sums of what is older are not exact to the last: wait is last to be given what there is */
	for (__u32 i = 0; any && i <= KINDS; i++) {
		kind = i == KINDS ? STAGE_WAIT : i;
		/* CPU time is part of what is left over, be it the waker's own or of others that it waited for */
		if (i == STAGE_CPU || i == STAGE_WAIT || kind >= KINDS)
			continue;
		p = &cpu->pieces[kind];
		if (p->ns > left)
			p->ns = left;
		if (!p->ns)
			continue;
		left -= p->ns;
		p->waker = w->tid;
		p->stage = kind == MAJOR_FAULTS ? STAGE_PAGE_FAULT : kind;
		p->major = kind == MAJOR_FAULTS;
		p->early = early;
		if (!early || kind != STAGE_WAIT)
			remember_stretch(t, p);
	}
	if (!left)
		return 0;
	cpu_time.from = t0;
	cpu_time.to = t1;
	cpu_time.ns = left;
	cpu_time.pid = w->tgid;
	cpu_time.tid = w->tid;
	cpu_time.waker = w->tid;
	cpu_time.stage = STAGE_CPU;
	cpu_time.depth = 1;
	cpu_time.early = early;
	remember_stretch(t, &cpu_time);
	return 0;
}

/*
 * When the waker last ended a wait of the thread: what it has done since then
 * is not handed on yet. 0: not known.
 */
__noinline __u64 chain_handed(struct thread *t, __u32 waker)
{
	struct stretch *s;
	__u64 until = 0;

	if (!t)
		return 0;
	for (__u32 i = 0; i < RECENT; i++) { /* bounded by what a thread remembers */
		s = latest(t, i);
		if (s->waker == waker && !s->early && s->to > until)
			until = s->to;
	}
	return until;
}

/*
 * What the waker did before the present wait: a thread that serves several
 * requests wakes up for others, and a runtime's loop for its own sake, while one
 * of them waits for the same engine all the time. Of a request that has its first byte it is not known for how long;
 * it is since the engine last woke the thread, which was why it was sent more.
 * What came before the others were read is kept apart: it is not theirs.
 */
static __always_inline void chain_early(struct thread *t, struct thread *w, struct lane *l)
{
	__u64 handed = chain_handed(t, w->tid), from = handed ? handed : t->out, pending = l->pending ? l->pending_since : 0;

	if (pending && pending < t->out) {
		if (from + RECENT_NS < pending)
			chain_split(t, w, from, pending, 1);
		if (!handed || from < pending)
			from = pending;
	}
	if (from + RECENT_NS < t->out)
		chain_split(t, w, from, t->out, 1);
}

/*
 * A wait of thread t on lane l, off the CPU since t->out, ends: by the current
 * thread, where that is one of ours.
 */
static __always_inline void chain_wakes(struct thread *t, struct lane *l, __u64 now)
{
	struct task_struct *current;
	struct thread *w;

	t->waker = 0;
	t->cause = 0;
	t->caused = CAUSE_LOST;
	if (now < t->out + RECENT_NS)
		return;
	current = bpf_get_current_task_btf();
	w = preempt_count_known ? thread_of(current) : 0;
	/*
	 * Go's runtime wakes its threads for whatever goroutine is next: between the threads of one Go process
	 * a wake-up says nothing of what was waited for.
	 */
	if (!w || w == t || !w->known || ((t->process.flags & (PROCESS_GO | PROCESS_NO_LANE)) && w->tgid == t->tgid) ||
	    !wakes_itself(current)) {
		remember(t, STAGE_WAIT, t->out, now, now - t->out, 0);
		if (now > t->out + LONG_WAIT_NS)
			chain_read_totals(t, now); /* something new begins, likely */
		return;
	}
	t->waker = w->tid;
	t->caused = CAUSE_WOKEN;
	if (l && (t->used_other || l->pending) && !(t->process.flags & PROCESS_GO))
		chain_early(t, w, l);
	chain_split(t, w, t->out, now, 0);
	chain_read_totals(t, now);
	chain_read_totals(w, now);
}

/* The thread has read a socket: the second one that it reads since it was woken is a cause of its own. */
static __always_inline void chain_reads(struct thread *t, struct sock *sk)
{
	if (!t->cause)
		t->cause = (__u64)sk;
	else if (t->cause != (__u64)sk)
		t->caused = CAUSE_LOST;
}

/* The thread uses a server connection. */
static __always_inline void chain_uses(struct thread *t, struct conn *c, __u64 now)
{
	if (t->conn != c->cookie) {
		if (t->conn)
			t->used_other = t->used;
		t->conn = c->cookie;
		forget_spilled(t);
	}
	t->used = now;
}

/* A request is read, and from now on waited for on its lane, until the first byte of its answer or its end. */
static __always_inline void chain_begins(struct conn *c, struct lane *l, __u64 now)
{
	if (c->pending || !l)
		return;
	c->pending = 1;
	if (!l->pending)
		l->pending_since = now;
	__sync_fetch_and_add(&l->pending, 1);
}

static __always_inline void chain_ends(struct conn *c)
{
	struct lane *l;

	if (!c->pending)
		return;
	c->pending = 0;
	l = conn_lane(c);
	if (l)
		__sync_fetch_and_add(&l->pending, -1);
}

/* Takes the stretches into the request's account from here on. */
static __always_inline void chain_from(struct conn *c, __s64 lane_wait, __u64 now)
{
	c->chain_since = now;
	c->chain_wait = lane_wait;
	c->chain_socket = conn_socket_time(c);
}

/* Adds a stretch's part within [since, now] to the request's account, and returns what of it there was. */
__noinline __u64 chain_take(struct conn *c, struct stretch *s, __u64 left, __u64 now)
{
	struct occurrence_record o = {};
	__u64 ns;

	if (!c || !s)
		return 0;
	ns = stretch_within(s, c->chain_since, now);
	if (ns > left)
		ns = left;
	if (!ns || s->stage >= STAGE_WAIT)
		return 0;
	c->chained[s->stage] += ns;
	if (s->major)
		c->chained_major += ns;
	if (s->stage == STAGE_CPU || ns < min_duration)
		return ns;
	o.r.kind = RECORD_OCCURRENCE;
	o.r.cookie = c->cookie;
	o.r.seq = c->seq;
	o.r.time = s->to < now ? s->to : now;
	o.start = s->from > c->chain_since ? s->from : c->chain_since;
	o.duration = ns;
	o.pid = s->pid;
	o.tid = s->tid;
	o.stage = s->stage;
	o.syscall = -1;
	o.flags = OCCURRENCE_WAKER | (s->major ? OCCURRENCE_MAJOR : 0);
	if (!send_up(&o, sizeof(o), LOST_OCCURRENCE))
		c->lost = 1;
	return ns;
}

/* Whose stretches are taken: those of one waker, by its thread id, or of all that are early, or not. */
enum { ALL_BUT_EARLY = 0, ALL_EARLY = -1 };

/* Takes stretches of those that the thread remembers, and returns what is left. */
__noinline __u64 chain_take_recent(struct conn *c, struct thread *t, __s32 whose, __u64 left, __u64 now)
{
	struct stretch *s;

	if (!c || !t)
		return 0;
	for (__u32 i = 0; left && i < RECENT; i++) { /* bounded by what a thread remembers */
		s = latest(t, i);
		if (s->to <= c->chain_since && !s->depth)
			break; /* its own are in order */
		if (s->depth && (whose > 0 ? s->waker == whose : s->early == (whose == ALL_EARLY)))
			left -= chain_take(c, s, left, now);
	}
	return left;
}

/*
 * Takes what the threads that woke this one did since the request's previous
 * send: one of them, or all. What they did before the wait that they ended is
 * taken last: it may be in the time of another one, which has it then.
 */
__noinline int chain_take_all(struct conn *c, struct thread *t, __u32 waker, __u64 left, __u64 now)
{
	if (!c || !t)
		return 0;
	left = chain_take_recent(c, t, waker, left, now);
	if (waker)
		return 0;
	for (__u32 i = 0; t->spills && left && i < KINDS; i++)
		left -= chain_take(c, &t->spilled[i], left, now);
	chain_take_recent(c, t, ALL_EARLY, left, now);
	return 0;
}

/*
 * The thread sends part of the request's answer. What the lane has waited for
 * since the last one is the waker's doing where the wake-up led to this send:
 * because nothing else has come in since, or because the thread has nothing
 * else to do than this request.
 */
static __always_inline void chain_sends(struct conn *c, struct thread *t, struct lane *l, __u64 now)
{
	__s64 wait, left;
	int alone;

	if (c->pending) { /* on this lane, see follow_sender() */
		c->pending = 0;
		__sync_fetch_and_add(&l->pending, -1);
	}
	chain_uses(t, c, now);
	wait = lane_read(l, STAGE_WAIT, now);
	left = wait - c->chain_wait - (conn_socket_time(c) - c->chain_socket);
	alone = !(t->process.flags & PROCESS_GO) && !l->pending && t->used_other <= c->chain_since;
	if (left >= RECENT_NS && (alone || t->caused == CAUSE_WOKEN))
		chain_take_all(c, t, alone ? 0 : t->waker, left, now);
	forget_spilled(t);
	chain_from(c, wait, now);
}

/* Whether both ends of a socket may be on this host: 127.0.0.0/8, or the same address; IPv6 is told apart in chain_ready(). */
static __always_inline int loopback(struct sock *sk)
{
	__be32 remote = sk->__sk_common.skc_daddr;

	return (remote & 0xff) == 127 || remote == sk->__sk_common.skc_rcv_saddr;
}

static __always_inline __u32 port_pair(__u16 local, __u16 remote)
{
	return (__u32)local << 16 | remote;
}

/* The current thread is inside a send to a TCP socket: what the softirqs that it runs wake up, it has woken. */
static __always_inline void chain_sending(struct sock *sk)
{
	struct chain_cpu *cpu;

	if (!preempt_count_known || !loopback(sk))
		return;
	cpu = chain_cpu();
	if (!cpu)
		return;
	cpu->socket = (__u64)sk;
	cpu->net = (__u64)sk->__sk_common.skc_net.net;
	cpu->local = sk->__sk_common.skc_rcv_saddr;
	cpu->remote = sk->__sk_common.skc_daddr;
	cpu->tid = bpf_get_current_task_btf()->pid;
	cpu->ports = port_pair(sk->__sk_common.skc_num, bpf_ntohs(sk->__sk_common.skc_dport));
	cpu->ready = 0;
}

static __always_inline void chain_sent(void)
{
	struct chain_cpu *cpu = preempt_count_known ? chain_cpu() : 0;

	if (cpu)
		cpu->tid = 0;
}

/* Bytes have come to a TCP socket: whoever waits for them is woken next. Are they from the send that this CPU is in? */
static __always_inline void chain_ready(struct sock *sk)
{
	struct chain_cpu *cpu = preempt_count_known ? chain_cpu() : 0;
	struct sock *from;

	if (!cpu || !cpu->tid)
		return;
	cpu->ready = 0;
	if (cpu->ports != port_pair(bpf_ntohs(sk->__sk_common.skc_dport), sk->__sk_common.skc_num))
		return;
	if (cpu->net != (__u64)sk->__sk_common.skc_net.net || cpu->remote != sk->__sk_common.skc_rcv_saddr ||
	    cpu->local != sk->__sk_common.skc_daddr)
		return;
	if (sk->__sk_common.skc_family == AF_INET6) {
		from = (struct sock *)cpu->socket;
		struct in6_addr a = BPF_CORE_READ(from, __sk_common.skc_v6_daddr), b = sk->__sk_common.skc_v6_rcv_saddr;
		__u64 *x = (__u64 *)&a, *y = (__u64 *)&b;
		if (x[0] != y[0] || x[1] != y[1])
			return;
	}
	cpu->ready = 1;
}

#endif
