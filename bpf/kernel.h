/* SPDX-License-Identifier: (GPL-2.0-only OR MIT) */
/*
 * The few kernel types that the programs read. Only the fields in use are
 * named; CO-RE finds where they really are in the running kernel, so their
 * order and neighbours here mean nothing.
 */
#ifndef EBPFLLM_KERNEL_H
#define EBPFLLM_KERNEL_H

typedef _Bool bool;
typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef signed char __s8;
typedef short __s16;
typedef int __s32;
typedef long long __s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_SK_STORAGE = 24,
	BPF_MAP_TYPE_RINGBUF = 27,
	BPF_MAP_TYPE_TASK_STORAGE = 29,
};
enum { BPF_ANY = 0, BPF_NOEXIST = 1 };
enum { BPF_F_NO_PREALLOC = 1 };
enum { BPF_RB_NO_WAKEUP = 1 };
enum { BPF_LOCAL_STORAGE_GET_F_CREATE = 1, BPF_SK_STORAGE_GET_F_CREATE = 1 };

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* x86-64; named as the kernel names them, without which bpf_tracing.h finds no arguments */
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
};

struct rq;
struct cfs_rq {
	struct rq *rq;
	__u64 throttled_clock_pelt_time;
};
struct sched_entity {
	__u64 sum_exec_runtime;
	struct cfs_rq *cfs_rq;
};
struct thread_struct {
	unsigned long fsbase;
};
struct inode {
	__u16 i_mode;
};
struct file {
	void *private_data;
	struct inode *f_inode;
	unsigned int f_flags;
};
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};
struct files_struct {
	struct fdtable *fdt;
};
struct bpf_local_storage;
struct signal_struct {
	struct {
		int counter;
	} live;
};
struct task_struct {
	unsigned int __state;
	int on_cpu;
	int pid;
	int tgid;
	unsigned int in_iowait : 1;
	int pagefault_disabled;
	struct sched_entity se;
	struct files_struct *files;
	struct signal_struct *signal;
	struct bpf_local_storage *bpf_storage;
	struct thread_struct thread;
	unsigned long numa_faults_locality[3];
};

struct in6_addr {
	union {
		__u8 u6_addr8[16];
	} in6_u;
};
struct ns_common {
	unsigned int inum;
};
struct net {
	struct ns_common ns;
};
typedef struct {
	struct net *net;
} possible_net_t;
struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
};
struct socket;
struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
	struct socket *sk_socket;
	struct bpf_local_storage *sk_bpf_storage;
};
struct minmax_sample {
	__u32 v;
};
struct minmax {
	struct minmax_sample s[3];
};
struct tcp_sock {
	__u32 rcv_nxt;
	__u32 copied_seq;
	__u32 write_seq;
	__u32 snd_una;
	__u32 snd_nxt;
	__u32 srtt_us;
	__u32 rttvar_us;
	struct minmax rtt_min;
	__u32 tsoffset;
	__u32 snd_wnd;
	__u32 mss_cache;
	__u32 max_window;
	__u32 dsack_dups;
};
struct tcp_skb_cb {
	__u32 seq;
	__u32 end_seq;
	__u32 ack_seq;
};
struct socket {
	struct sock *sk;
};
struct sk_buff {
	struct sock *sk;
	char cb[48];
	unsigned int len;
	__u16 transport_header;
	unsigned char *head;
	unsigned char *data;
};

enum iter_type { ITER_UBUF, ITER_IOVEC };
struct iov_iter {
	__u8 iter_type;
	unsigned long iov_offset;
	const void *__iov;
	void *ubuf;
	unsigned long count;
	unsigned long nr_segs;
};
struct iov_iter___before_6_4 {
	const void *iov;
};
struct msghdr {
	struct iov_iter msg_iter;
};

struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};
struct linux_binprm;
struct bpf_perf_event_data;

#pragma clang attribute pop

/* Part of the system call interface, so copied as it is and not relocated. */
struct iovec {
	void *iov_base;
	unsigned long iov_len;
};

#endif
