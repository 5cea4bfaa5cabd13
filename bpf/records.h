/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * What goes up the ring: the wire format between C and Go. The Go types are
 * generated from these structs (bpf2go -type), so this is its only definition.
 * Times are CLOCK_MONOTONIC nanoseconds; no struct has padding.
 */
#ifndef EBPFLLM_RECORDS_H
#define EBPFLLM_RECORDS_H

#include "stages.h"

enum record_kind {
	RECORD_REQUEST_HEAD = 1, /* struct head_record, then header bytes */
	RECORD_RESPONSE_HEAD,	 /* struct head_record, then header bytes */
	RECORD_PROGRESS,	 /* struct progress_record: response bytes reached the device */
	RECORD_OCCURRENCE,	 /* struct occurrence_record: a stretch of one stage ended */
	RECORD_CLOSE,		 /* struct close_record: the connection ends */
	RECORD_EXEC,		 /* struct process_record */
	RECORD_FORK,		 /* struct process_record, only children of tracked processes */
	RECORD_EXIT,		 /* struct process_record, only tracked processes */
	RECORD_LISTEN,		 /* struct process_record with netns and port */
	RECORD_RETRANSMIT,	 /* struct retransmit_record: bytes of a response were sent again, or are acknowledged */
};

struct record {
	__u32 kind;
	__u32 seq;    /* number of the request on its connection, from 1; 0 if none */
	__u64 cookie; /* socket cookie; 0 if none */
	__u64 time;
};

enum head_flags {
	HEAD_COMPLETE = 1,   /* the blank line is in these bytes: they end with it */
	HEAD_TRUNCATED = 2,  /* longer than what is copied: the rest never comes */
	HEAD_UNREADABLE = 4, /* bytes were read by a call whose buffer is not known (io_uring, splice) */
	HEAD_CANDIDATE = 8,  /* only the request line, of a process that is not yet a target */
	HEAD_CONTINUED = 16, /* more bytes of the head sent up before */
	HEAD_NO_ARRIVAL = 32, /* the first byte's arrival was not seen: start is the read */
	HEAD_LOST_BEFORE = 64, /* a record was lost since the last request whose head went up on this connection */
};

struct head_record {
	struct record r;
	__u32 pid;
	__u32 tid;
	__u64 start; /* first byte readable */
	__u64 lane;  /* who serves: thread id or goroutine address; 0 unknown */
	__u32 flags; /* enum head_flags */
	__u32 len;   /* header bytes that follow */
	__u16 family;
	__u16 local_port;
	__u16 remote_port;
	__u16 pad;
	__u8 local[16];
	__u8 remote[16];
};

enum progress_flags {
	PROGRESS_LAST_CHUNK = 1,   /* the last write ended with the terminator of chunked encoding */
	PROGRESS_LOST = 2,	   /* a record of this request was lost */
	PROGRESS_NO_LANE = 4,	   /* the serving thread or goroutine was not known for some of the time */
	PROGRESS_NO_ACCEPT = 8,	   /* the accept was not seen */
	PROGRESS_UNSEEN_READ = 16, /* bytes of it were read by a call that is not seen (splice) */
};

struct progress_record {
	struct record r; /* time: the last byte reached the device */
	__u64 lane;
	__u64 start;
	__u64 first_read;
	__u64 received;	 /* bytes read since the request's first */
	__u64 sent;	 /* bytes accepted by send since the response's first */
	__u32 pid;
	__u32 tid;
	__u32 chunks;	 /* sends of the response, but for its head alone and for the terminator of chunked encoding alone */
	__u32 flags;	 /* enum progress_flags */
	__u64 first;	 /* the first byte since the last reading reached the device; 0 if none did */
	__s64 exclusive[STAGE_COUNT];
	__s64 plain[SOCKET_STAGES]; /* overlapping totals of accept_queue … retransmit */
	__s64 major;	 /* of exclusive[STAGE_PAGE_FAULT]: faults that waited for I/O */
	__s64 softirq_delay; /* of the softirq that brought the first byte; -1 unknown */
	__s64 remote_faults; /* pages found on another NUMA node; -1 unknown */
	__u32 retransmits;   /* segments of the response sent again */
	__u32 unacked;	     /* µs within which the kernel would send again what is not acknowledged */
	__s64 waker[THREAD_STAGES]; /* of exclusive: on threads that the serving thread waited for */
};

enum occurrence_flags {
	OCCURRENCE_MAJOR = 1, /* a page fault that waited for I/O */
	OCCURRENCE_WAKER = 2, /* on a thread (pid, tid) that the request's thread waited for */
};

struct occurrence_record {
	struct record r; /* time: its end; cookie 0 if it belongs to a lane rather than a socket */
	__u64 start;
	__u64 duration; /* of the stage within [start, time] */
	__u64 lane;
	__u32 pid;
	__u32 tid;
	__u32 stage;
	__s32 syscall; /* -1 if none */
	__u32 flags;
	__u32 pad;
};

enum retransmit_flags {
	RETRANSMIT_OVER = 1,  /* nothing that was sent again is outstanding any more */
	RETRANSMIT_ACKED = 2, /* because all of it is acknowledged */
	RETRANSMIT_SPURIOUS = 4, /* … and it had arrived at its first sending: nothing was lost */
};

struct retransmit_record {
	struct record r;
	__u64 start;   /* when the lost bytes were first sent, or a time after that */
	__s64 plain;   /* the response's total so far, from start to acknowledgement */
	__u32 retransmits; /* segments of the response sent again so far */
	__u32 flags;   /* enum retransmit_flags */
};

enum close_flags {
	CLOSE_DRAINED = 1, /* nothing was left unsent */
	CLOSE_FINAL = 2,   /* the socket is gone, not merely shut for sending */
	CLOSE_LOST = 4,
	CLOSE_ACKED = 8,   /* the client has acknowledged everything */
};

struct close_record {
	struct record r;
	__u32 flags;
	__u32 pad;
};

struct process_record {
	struct record r;
	__u32 pid;
	__u32 parent;
	__u32 netns;
	__u32 port;
};

/* Per-CPU counters; user space sums them. Names: counterNames in internal/probe. */
enum counter {
	/* records that were to go up, by kind, and in the same order those that found no room */
	SENT_REQUEST_HEAD,
	SENT_RESPONSE_HEAD,
	SENT_PROGRESS,
	SENT_OCCURRENCE,
	SENT_CLOSE,
	SENT_PROCESS,
	SENT_RETRANSMIT,
	LOST_REQUEST_HEAD,
	LOST_RESPONSE_HEAD,
	LOST_PROGRESS,
	LOST_OCCURRENCE,
	LOST_CLOSE,
	LOST_PROCESS,
	LOST_RETRANSMIT,
	FULL_LANES,
	FULL_THREADS,
	FULL_PROCESSES,
	FULL_SOCKETS,
	FULL_PORTS,
	HEADS_UNREADABLE,
	ACCEPTS_LOOSE, /* accepts whose time is known to no better than a millisecond */
	REQUESTS_UNIX, /* requests that came over a Unix-domain socket, or a Multipath TCP one: they are not measured */
	REQUESTS_MPTCP,
	COUNTERS,
};
#define SENT_OF(lost) ((lost) - LOST_REQUEST_HEAD + SENT_REQUEST_HEAD)

#endif
