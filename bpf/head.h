/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * Header bytes: copied from the caller's buffer and cut at the blank line, so
 * that no byte of a body leaves the kernel. They are parsed in Go.
 */
#ifndef EBPFLLM_HEAD_H
#define EBPFLLM_HEAD_H

#include "state.h"
#include "syscalls_x86.h"

#define LINE_BYTES 256 /* of an unclassified process no more than the request line is looked at */

static __always_inline struct head_buffer *head_buffer(__u32 which)
{
	struct head_buffer *h = bpf_map_lookup_elem(&head_buffers, &which);
	return h;
}

static __always_inline int head_copy(struct head_buffer *h, const void *from, __u64 n)
{
	if (n > HEAD_BYTES)
		n = HEAD_BYTES;
	if (bpf_probe_read_user(h->bytes, n, from))
		return 0;
	/* the scan looks at whole words */
	*(__u64 *)(h->bytes + n) = 0;
	return n;
}

/* The bytes that the current system call has read: 0 where its buffer is not known. */
static __always_inline int head_read(struct head_buffer *h, struct task_struct *task, int ret)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	struct iovec v = {};
	void *iov;

	switch (regs->orig_ax) {
	case NR_read:
	case NR_recvfrom:
		return head_copy(h, (void *)regs->si, ret);
	case NR_readv:
		iov = (void *)regs->si;
		break;
	case NR_recvmsg:
		/* struct user_msghdr: name, namelen, iov */
		if (bpf_probe_read_user(&iov, sizeof(iov), (void *)(regs->si + 16)))
			return 0;
		break;
	default:
		return 0;
	}
	if (bpf_probe_read_user(&v, sizeof(v), iov))
		return 0;
	return head_copy(h, v.iov_base, v.iov_len < ret ? v.iov_len : ret);
}

/* Do the bytes begin as a request line does? A method is upper case; bodies that begin so are rare, and refused in Go. */
static __always_inline int head_like_request(struct head_buffer *h, int n)
{
	__u8 a = h->bytes[0], b = h->bytes[1], c = h->bytes[2];

#define UPPER(x) ((__u8)((x) - 'A') < 26)
	return UPPER(a) && (n < 2 || UPPER(b)) && (n < 3 || UPPER(c));
}

/* Length of the request line, at most LINE_BYTES. */
static __always_inline __u32 head_line(struct head_buffer *h, int n)
{
	int i;

	for (i = 0; i < LINE_BYTES; i++) /* bounded by what may be looked at */
		if (i >= n || h->bytes[i] == '\n')
			break;
	return i;
}

struct scan {
	struct head_buffer *h;
	__u32 n;
	__u32 last; /* the last four bytes so far */
	__u32 end;  /* bytes up to and with the blank line, once found */
};

/* A line feed, perhaps a carriage return, and a line feed: a bare line feed ends a line for most parsers. */
static __always_inline int blank_line(__u32 last)
{
	return (last & 0xffff) == 0x0a0a || (last & 0xffffff) == 0x0a0d0a;
}

/* One word of the search for the blank line. Only the last word, and those with a line feed, are looked at byte by byte. */
static long scan_word(__u64 i, struct scan *s)
{
	__u64 at = i * 8, word, x;

	if (at >= s->n || at >= HEAD_BYTES)
		return 1;
	word = *(__u64 *)(s->h->bytes + at);
	x = word ^ 0x0a0a0a0a0a0a0a0aULL;
	if (at + 8 <= s->n && !((x - 0x0101010101010101ULL) & ~x & 0x8080808080808080ULL)) {
		s->last = __builtin_bswap32(word >> 32);
		return 0;
	}
#pragma unroll
	for (int j = 0; j < 8; j++) {
		if (at + j >= s->n)
			return 1;
		s->last = s->last << 8 | (__u8)(word >> (8 * j));
		if (blank_line(s->last)) {
			s->end = at + j + 1;
			return 1;
		}
	}
	return 0;
}

/*
 * Sets head.len and head.flags for the ret bytes of this read or write, of
 * which the buffer holds the first have. Returns whether the head ends here: its
 * blank line was found, or there is more of it than what is copied.
 */
static __always_inline int head_scan(struct head_buffer *h, int have, int ret, __u32 *last, __u16 *total, __u32 limit)
{
	__u32 n = have > (int)limit ? limit : have;
	struct scan s = { .h = h, .n = n, .last = *last };

	bpf_loop(HEAD_BYTES / 8, scan_word, &s, 0);
	if (s.end && s.end <= n) {
		h->head.len = s.end;
		h->head.flags |= HEAD_COMPLETE;
		return 1;
	}
	h->head.len = n;
	*last = s.last;
	*total += n;
	if (n < ret || *total >= limit) {
		h->head.flags |= HEAD_TRUNCATED;
		return 1;
	}
	return 0;
}

static __always_inline int head_send_up(struct head_buffer *h, __u32 lost)
{
	__u32 n = h->head.len;

	if (n > HEAD_BYTES)
		n = HEAD_BYTES;
	return send_up(h, sizeof(h->head) + n, lost);
}

#endif
