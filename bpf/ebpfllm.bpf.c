//go:build ignore
/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/* The kernel side, one object: a file for each group of stages, the state and the records in one place. */
#include "state.h"
#include "process.bpf.c"
#include "sched.bpf.c"
#include "fault.bpf.c"
#include "reclaim.bpf.c"
#include "lock.bpf.c"
#include "softirq.bpf.c"
#include "tcp_receive.bpf.c"
#include "tcp_send.bpf.c"
#include "tcp_state.bpf.c"
#include "retransmit.bpf.c"

/* Types that Go takes from here. */
const struct head_record *head_record_type __attribute__((unused));
const struct progress_record *progress_record_type __attribute__((unused));
const struct occurrence_record *occurrence_record_type __attribute__((unused));
const struct retransmit_record *retransmit_record_type __attribute__((unused));
const enum retransmit_flags *retransmit_flags_type __attribute__((unused));
const struct close_record *close_record_type __attribute__((unused));
const struct process_record *process_record_type __attribute__((unused));
const enum record_kind *record_kind_type __attribute__((unused));
const enum head_flags *head_flags_type __attribute__((unused));
const enum progress_flags *progress_flags_type __attribute__((unused));
const enum occurrence_flags *occurrence_flags_type __attribute__((unused));
const enum close_flags *close_flags_type __attribute__((unused));
const enum process_flags *process_flags_type __attribute__((unused));
const enum counter *counter_type __attribute__((unused));
const enum stage *stage_type __attribute__((unused));
