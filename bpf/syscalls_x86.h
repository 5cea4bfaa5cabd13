/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/* System call numbers of x86-64 that the programs tell apart. */
#ifndef EBPFLLM_SYSCALLS_H
#define EBPFLLM_SYSCALLS_H

enum {
	NR_read = 0, NR_write = 1, NR_poll = 7, NR_pread64 = 17, NR_readv = 19, NR_writev = 20, NR_select = 23,
	NR_sched_yield = 24, NR_pause = 34, NR_nanosleep = 35, NR_sendfile = 40, NR_accept = 43, NR_sendto = 44,
	NR_recvfrom = 45, NR_sendmsg = 46, NR_recvmsg = 47, NR_wait4 = 61, NR_fcntl = 72, NR_flock = 73,
	NR_rt_sigtimedwait = 128, NR_rt_sigsuspend = 130, NR_futex = 202, NR_io_getevents = 208, NR_restart_syscall = 219,
	NR_clock_nanosleep = 230, NR_epoll_wait = 232, NR_waitid = 247, NR_pselect6 = 270, NR_ppoll = 271,
	NR_splice = 275, NR_epoll_pwait = 281, NR_accept4 = 288, NR_preadv = 295, NR_recvmmsg = 299, NR_sendmmsg = 307,
	NR_copy_file_range = 326, NR_preadv2 = 327, NR_io_uring_enter = 426, NR_epoll_pwait2 = 441, NR_futex_wait = 455,
};

#endif
