/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * Arithmetic on TCP's time stamps: milliseconds of the monotonic clock in 32 bits, which go round every 49.7 days. It
 * includes nothing, so that it is tested at such times too, of which no test machine has seen one.
 */
#ifndef EBPFLLM_ECHO_H
#define EBPFLLM_ECHO_H

#define ECHO_AGE_MS 3600000 /* an older one counts in another unit (µs, from 6.7 on by a route's option) */

/*
 * Whether a stamp, without the connection's offset, is from before sent (CLOCK_MONOTONIC ns). With a millisecond's
 * grace: the hook that told of the sending ran after the stamp was taken.
 */
static __inline__ __attribute__((always_inline)) int echoed_before(__u32 stamp, __u64 sent)
{
	__u32 since = stamp - (__u32)(sent / 1000000);

	return (__s32)(since + 1) < 0 && (__s32)(since + ECHO_AGE_MS) > 0;
}

#endif
