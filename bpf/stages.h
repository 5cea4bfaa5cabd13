/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/* The stages, numbered as in internal/stage (a test compares the two). */
#ifndef EBPFLLM_STAGES_H
#define EBPFLLM_STAGES_H

enum stage {
	STAGE_UNKNOWN,
	STAGE_CPU,
	STAGE_RUN_QUEUE,
	STAGE_THROTTLED,
	STAGE_PAGE_FAULT,
	STAGE_RECLAIM,
	STAGE_COMPACTION,
	STAGE_PAGE_CACHE,
	STAGE_BLOCK_IO,
	STAGE_LOCK,
	STAGE_SYSCALL,
	STAGE_STOPPED,
	STAGE_WAIT,
	STAGE_ACCEPT_QUEUE,
	STAGE_REQUEST_BODY,
	STAGE_RECEIVE_QUEUE,
	STAGE_SEND_BUFFER,
	STAGE_QDISC,
	STAGE_RETRANSMIT,
	STAGE_COUNT, /* unattributed is what remains: user space subtracts */
};

/* Stages of a thread come before STAGE_WAIT, stages of a socket after it. */
#define THREAD_STAGES (STAGE_WAIT + 1)
#define SOCKET_STAGES (STAGE_COUNT - STAGE_ACCEPT_QUEUE)
#define SOCKET_STAGE(s) ((s) - STAGE_ACCEPT_QUEUE)

#endif
