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
	asm volatile("" : "+r"(n)); /* else the verifier of 6.1 does not see that it is compared */
	if (n > HEAD_BYTES)
		n = HEAD_BYTES;
	return bpf_probe_read_user(h->bytes, n, from) ? 0 : n;
}

#define IN_CALL -38 /* -ENOSYS: what the entry code of x86-64 leaves in ax until the call has its result */

/*
 * The bytes that the current system call has read: 0 where its buffer is not known. io_uring reads on the way back
 * from whatever call its thread was in, whose buffer is another one, and in workers, whose registers are their parent's.
 */
static __always_inline int head_read(struct head_buffer *h, struct task_struct *task, int ret)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	struct iovec v = {};
	void *iov;

	if ((int)regs->ax != IN_CALL)
		return 0;
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

/* The same, but surely: a method, a space and a path. */
static __always_inline int head_is_request(struct head_buffer *h, int n)
{
	int i;

	for (i = 0; i < 8; i++) /* bounded by the longest method in use */
		if (!UPPER(h->bytes[i]))
			break;
	return i >= 3 && i + 1 < n && h->bytes[i] == ' ' && h->bytes[i + 1] == '/';
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
	__u32 end; /* bytes up to and with the blank line, once found */
	__u64 feeds, returns; /* in the word before: a bit for each line feed, each carriage return */
};

#define SCAN_WORDS 8 /* at a time: a call for each word would cost more than the word */

/* The top bit of each byte of word that is equal to c. */
static __always_inline __u64 equal(__u64 word, __u8 c)
{
	const __u64 low = 0x7f7f7f7f7f7f7f7fULL;
	__u64 x = word ^ 0x0101010101010101ULL * c;

	return ~(((x & low) + low) | x | low);
}

/*
 * A few words of the search for the blank line: a line feed, perhaps a carriage
 * return, and a line feed, since a bare line feed ends a line for most parsers.
 * What lies behind the bytes that were read is looked at and does not count.
 */
static long scan_words(__u64 i, struct scan *s)
{
	__u64 at = i * 8 * SCAN_WORDS, before = s->feeds, returns_before = s->returns;

	if (at >= s->n || at > HEAD_BYTES - 8 * SCAN_WORDS)
		return 1;
#pragma unroll
	for (int j = 0; j < SCAN_WORDS; j++) {
		__u64 word = *(__u64 *)(s->h->bytes + at + 8 * j);
		__u64 feeds = equal(word, '\n'), returns = equal(word, '\r');
		/* whether the byte before is a line feed, or a carriage return after one */
		__u64 ends = feeds & ((feeds << 8 | before >> 56) |
				      ((returns << 8 | returns_before >> 56) & (feeds << 16 | before >> 48)));

		if (ends) {
			__u32 k = 0;
			for (; k < 7 && !(ends >> (8 * k) & 0xff); k++)
				;
			s->end = at + 8 * j + k + 1;
			return 1;
		}
		before = feeds;
		returns_before = returns;
	}
	s->feeds = before;
	s->returns = returns_before;
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
	/* the last four bytes that were read before, as the end of a word */
	__u64 past = (__u64)__builtin_bswap32(*last) << 32;
	struct scan s = { .h = h, .n = n, .feeds = equal(past, '\n'), .returns = equal(past, '\r') };

	bpf_loop(HEAD_BYTES / (8 * SCAN_WORDS), scan_words, &s, 0);
	if (s.end && s.end <= n) {
		h->head.len = s.end;
		h->head.flags |= HEAD_COMPLETE;
		return 1;
	}
	h->head.len = n;
	for (__u32 i = 4; i > 0; i--) { /* bounded by the size of last */
		__u32 at = n - i;

		asm volatile("" : "+r"(at)); /* else the verifier of 6.1 does not see that it was compared */
		if (at < HEAD_BYTES)
			*last = *last << 8 | h->bytes[at];
	}
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
