/*
 * A server that accepts, reads and writes in the ways that real ones do and
 * server.c does not. The mode says how it comes by connections and how it reads:
 *
 *   dual      one socket for IPv6 and IPv4
 *   unix      a Unix-domain socket, in the abstract namespace, named by PORT
 *   mptcp     Multipath TCP
 *   reuse     two processes, each with a listening socket of its own (SO_REUSEPORT)
 *   prefork   two processes that accept from one listening socket
 *   passed    one process accepts and hands each connection to another (SCM_RIGHTS)
 *   given     the connections come by a Unix-domain socket, named by PORT
 *   short     as plain, with room for one connection that waits; accepts when told by SIGUSR1
 *   loop      an event loop that answers everything at once, without looking at the path
 *   loops     five processes with such a loop, each with a listening socket of its own
 *   recvmmsg, uring, worker, resumed   plain, but reads by recvmmsg(2), by io_uring, by io_uring's
 *             workers, by io_uring on the way back from a read(2) of another connection
 *
 * and the path what is done with a request:
 *
 *   /sleep?MS  sleeps
 *   /sendfile?KIB, /splice?KIB, /zerocopy?KIB, /big?KIB   send so much, in this way
 *   /upload?MS reads its body of Content-Length by splice(2) into /dev/null, then sleeps
 *   /half      shuts the connection for sending after the answer, and reads on
 *
 * or it is a client: "ask" asks CONNECTIONS x REQUESTS times, as fast as it is answered or RATE times a second, "hold"
 * opens CONNECTIONS from 127.0.0.HOST and resets them at the end of its input.
 *
 * usage: sockets MODE PORT; sockets ask PORT CONNECTIONS REQUESTS RATE|0; sockets hold PORT CONNECTIONS HOST
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

static const char *mode;

static int is(const char *m) { return !strcmp(mode, m); }

static void must(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		_exit(1);
	}
}

static void sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
	nanosleep(&t, 0);
}

/* io_uring, as far as it is needed here: one operation at a time. */
struct ring {
	int fd;
	unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
};

static void ring_open(struct ring *r)
{
	struct io_uring_params p = { 0 };
	char *sq, *cq;

	r->fd = syscall(SYS_io_uring_setup, 8, &p);
	must(r->fd >= 0, "io_uring_setup");
	sq = mmap(0, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQ_RING);
	cq = mmap(0, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE,
		  MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_CQ_RING);
	r->sqes = mmap(0, p.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd,
		       IORING_OFF_SQES);
	must(sq != MAP_FAILED && cq != MAP_FAILED && (void *)r->sqes != MAP_FAILED, "map the ring");
	r->sq_tail = (void *)(sq + p.sq_off.tail);
	r->sq_mask = (void *)(sq + p.sq_off.ring_mask);
	r->sq_array = (void *)(sq + p.sq_off.array);
	r->cq_head = (void *)(cq + p.cq_off.head);
	r->cq_tail = (void *)(cq + p.cq_off.tail);
	r->cq_mask = (void *)(cq + p.cq_off.ring_mask);
	r->cqes = (void *)(cq + p.cq_off.cqes);
}

/* Has the kernel receive into buf; waits for that, if wait is 1. */
static void ring_recv(struct ring *r, int fd, char *buf, unsigned n, int flags, int wait)
{
	unsigned tail = *r->sq_tail, i = tail & *r->sq_mask;

	memset(&r->sqes[i], 0, sizeof(r->sqes[i]));
	r->sqes[i].opcode = IORING_OP_RECV;
	r->sqes[i].flags = flags;
	r->sqes[i].fd = fd;
	r->sqes[i].addr = (unsigned long)buf;
	r->sqes[i].len = n;
	r->sq_array[i] = i;
	__atomic_store_n(r->sq_tail, tail + 1, __ATOMIC_RELEASE);
	must(syscall(SYS_io_uring_enter, r->fd, 1, wait, wait ? IORING_ENTER_GETEVENTS : 0, 0, 0) == 1, "io_uring_enter");
}

static int ring_result(struct ring *r)
{
	while (__atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE) == *r->cq_head)
		syscall(SYS_io_uring_enter, r->fd, 0, 1, IORING_ENTER_GETEVENTS, 0, 0);
	int n = r->cqes[*r->cq_head & *r->cq_mask].res;
	__atomic_store_n(r->cq_head, *r->cq_head + 1, __ATOMIC_RELEASE);
	return n;
}

static long receive(int fd, char *buf, long n)
{
	static __thread struct ring ring;

	if (is("recvmmsg")) {
		struct iovec v = { buf, n };
		struct mmsghdr m = { .msg_hdr = { .msg_iov = &v, .msg_iovlen = 1 } };
		return recvmmsg(fd, &m, 1, 0, 0) == 1 ? m.msg_len : -1;
	}
	if (is("uring") || is("worker")) {
		if (!ring.fd)
			ring_open(&ring);
		ring_recv(&ring, fd, buf, n, is("worker") ? IOSQE_ASYNC : 0, 1);
		return ring_result(&ring);
	}
	return read(fd, buf, n);
}

static void send_all(int fd, const char *p, long n, int flags)
{
	while (n > 0) {
		long k = send(fd, p, n, MSG_NOSIGNAL | flags);
		if (k <= 0)
			return;
		p += k;
		n -= k;
	}
}

static void send_head(int fd, long n, int flags)
{
	char head[128];
	int k = snprintf(head, sizeof(head), "HTTP/1.1 200 OK\r\nContent-Length: %ld\r\n\r\n", n);
	send_all(fd, head, k, flags);
}

/* A file of so many bytes. */
static int file_of(long n)
{
	int fd = memfd_create("answer", MFD_CLOEXEC);

	must(fd >= 0 && !ftruncate(fd, n), "memfd");
	return fd;
}

static void answer(int fd, char *in, long n)
{
	char path[64] = "";
	long arg = 0, want = 0;
	int pipes[2], file;

	sscanf(in, "%*s %63[^? ]?%ld", path, &arg);
	if (!strcmp(path, "/sleep")) {
		sleep_ms(arg);
	} else if (!strcmp(path, "/sendfile")) {
		file = file_of(arg << 10);
		send_head(fd, arg << 10, MSG_MORE);
		for (off_t at = 0; at < arg << 10;)
			if (sendfile(fd, file, &at, (arg << 10) - at) <= 0)
				break;
		close(file);
		return;
	} else if (!strcmp(path, "/splice")) {
		file = file_of(arg << 10);
		must(!pipe(pipes), "pipe");
		send_head(fd, arg << 10, MSG_MORE);
		for (want = arg << 10; want > 0;) {
			long k = splice(file, 0, pipes[1], 0, want < 65536 ? want : 65536, 0);
			if (k <= 0)
				break;
			want -= k;
			while (k > 0) {
				long j = splice(pipes[0], 0, fd, 0, k, want ? SPLICE_F_MORE : 0);
				if (j <= 0)
					break;
				k -= j;
			}
		}
		close(file), close(pipes[0]), close(pipes[1]);
		return;
	} else if (!strcmp(path, "/zerocopy") || !strcmp(path, "/big")) {
		int one = 1, zero = path[1] == 'z';
		char *body = calloc(1, arg << 10);
		if (zero)
			must(!setsockopt(fd, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof(one)), "SO_ZEROCOPY");
		send_head(fd, arg << 10, 0);
		send_all(fd, body, arg << 10, zero ? MSG_ZEROCOPY : 0);
		if (zero)
			sleep_ms(20); /* the kernel may still read from it */
		free(body);
		return;
	} else if (!strcmp(path, "/upload")) {
		const char *length = strcasestr(in, "content-length:");
		int null = open("/dev/null", O_WRONLY);
		must(!pipe(pipes), "pipe");
		want = (length ? atol(length + 15) : 0) + (strstr(in, "\r\n\r\n") + 4 - in) - n;
		while (want > 0) {
			long k = splice(fd, 0, pipes[1], 0, want < 65536 ? want : 65536, 0);
			if (k <= 0)
				break;
			want -= k;
			splice(pipes[0], 0, null, 0, k, 0);
		}
		close(null), close(pipes[0]), close(pipes[1]);
		sleep_ms(arg);
	}
	send_head(fd, 2, MSG_MORE);
	send_all(fd, "ok", 2, 0);
	if (!strcmp(path, "/half"))
		shutdown(fd, SHUT_WR);
}

static void *serve(void *arg)
{
	int fd = (long)arg;
	char in[65536];

	for (;;) {
		long n = 0, k;
		do {
			k = receive(fd, in + n, sizeof(in) - 1 - n);
			if (k <= 0) {
				close(fd);
				return 0;
			}
			in[n += k] = 0;
		} while (!strstr(in, "\r\n\r\n"));
		answer(fd, in, n);
	}
}

static void *serve_apart(int fd)
{
	pthread_t t;

	must(!pthread_create(&t, 0, serve, (void *)(long)fd), "pthread_create");
	pthread_detach(t);
	return 0;
}

static void accept_all(int s)
{
	for (;;) {
		int fd = accept(s, 0, 0);
		if (fd >= 0)
			serve_apart(fd);
	}
}

static int listening(int port)
{
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	struct sockaddr_un u = { .sun_family = AF_UNIX };
	int n = snprintf(u.sun_path + 1, sizeof(u.sun_path) - 1, "ebpfllm-sockets-%d", port), one = 1, zero = 0, s;
	struct sockaddr *a = (void *)&in;
	socklen_t len = sizeof(in);

	if (is("dual"))
		a = (void *)&in6, len = sizeof(in6);
	if (is("unix") || is("given"))
		a = (void *)&u, len = offsetof(struct sockaddr_un, sun_path) + 1 + n;
	if (getenv("EVERYWHERE"))
		in.sin_addr.s_addr = htonl(INADDR_ANY);
	s = socket(a->sa_family, SOCK_STREAM, is("mptcp") ? IPPROTO_MPTCP : 0);
	must(s >= 0, "socket");
	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (is("dual"))
		setsockopt(s, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof(zero));
	if (is("reuse") || is("loops"))
		setsockopt(s, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one));
	must(!bind(s, a, len) && !listen(s, is("short") ? 1 : 512), "listen");
	return s;
}

/* Sends a descriptor, or receives one. */
static int pass(int over, int fd)
{
	char byte = 0, room[CMSG_SPACE(sizeof(int))];
	struct iovec v = { &byte, 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	struct cmsghdr *c;

	memset(room, 0, sizeof(room));
	if (fd >= 0) {
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(c), &fd, sizeof(int));
		return sendmsg(over, &m, 0);
	}
	if (recvmsg(over, &m, 0) <= 0 || !(c = CMSG_FIRSTHDR(&m)))
		return -1;
	memcpy(&fd, CMSG_DATA(c), sizeof(int));
	return fd;
}

static int child(void)
{
	int pid = fork();

	must(pid >= 0, "fork");
	if (!pid)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return !pid;
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

/* The thread is in a read(2) of the first connection while io_uring receives from the second. */
static void resumed(int s)
{
	static char first[4096], second[4096];
	struct ring ring;
	int a = accept(s, 0, 0), b;
	long n = read(a, first, sizeof(first) - 1);

	ring_open(&ring);
	answer(a, first, n);
	b = accept(s, 0, 0);
	ring_recv(&ring, b, second, sizeof(second) - 1, 0, 0);
	for (;;) {
		n = read(a, first, sizeof(first) - 1);
		if (n <= 0)
			return;
		answer(a, first, n);
		n = ring_result(&ring);
		if (n <= 0)
			return;
		second[n] = 0;
		answer(b, second, n);
		ring_recv(&ring, b, second, sizeof(second) - 1, 0, 0);
	}
}

static void loop(int s)
{
	const char *answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
	int ep = epoll_create1(0), n = strlen(answer);
	struct epoll_event e = { .events = EPOLLIN, .data.fd = s }, all[64];
	char in[4096];

	epoll_ctl(ep, EPOLL_CTL_ADD, s, &e);
	for (;;) {
		int k = epoll_wait(ep, all, 64, -1);
		for (int i = 0; i < k; i++) {
			int fd = all[i].data.fd;
			if (fd == s) {
				e.data.fd = accept(s, 0, 0);
				epoll_ctl(ep, EPOLL_CTL_ADD, e.data.fd, &e);
			} else if (read(fd, in, sizeof(in)) <= 0 || send(fd, answer, n, MSG_NOSIGNAL) != n) {
				close(fd);
			}
		}
	}
}

static int hold(int port, int connections, int host)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_in from = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000000 + host) };
	struct linger reset = { 1, 0 };
	int *fds = calloc(connections, sizeof(int)), one = 1;

	for (int i = 0; i < connections; i++) {
		fds[i] = socket(AF_INET, SOCK_STREAM, 0);
		must(fds[i] >= 0, "socket");
		setsockopt(fds[i], IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
		setsockopt(fds[i], SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
		must(!bind(fds[i], (void *)&from, sizeof(from)) && !connect(fds[i], (void *)&to, sizeof(to)), "connect");
	}
	puts("held");
	fflush(stdout);
	return getchar() != EOF;
}

static long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000 + t.tv_nsec;
}

/* At most as many requests at a time as there are connections. Prints how many answers it has had. */
static int ask(int port, int connections, long requests, long rate)
{
	long begin = now_ns(), sent = 0;
	const char *request = "GET /load HTTP/1.1\r\nHost: x\r\n\r\n";
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int ep = epoll_create1(0), n = strlen(request), open = 0;
	struct epoll_event all[64];
	long *left = calloc(connections + 1024, sizeof(long)), answers = 0;
	char buf[4096];

	for (int i = 0; i < connections; i++, open++) {
		int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
		struct epoll_event e = { .events = EPOLLIN, .data.fd = fd };
		must(!connect(fd, (void *)&in, sizeof(in)), "connect");
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		left[fd] = requests;
		epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
		must(send(fd, request, n, 0) == n, "send");
	}
	while (open) {
		int k = epoll_wait(ep, all, 64, -1);
		for (int i = 0; i < k; i++) {
			int fd = all[i].data.fd;
			must(read(fd, buf, sizeof(buf)) > 0, "read");
			answers++;
			while (rate && ++sent > (now_ns() - begin) * rate / 1000000000)
				sent--, usleep(100);
			if (--left[fd])
				must(send(fd, request, n, 0) == n, "send");
			else
				close(fd), open--;
		}
	}
	printf("%ld\n", answers);
	return 0;
}

static void told(int signal)
{
}

int main(int argc, char **argv)
{
	int port = argc > 2 ? atoi(argv[2]) : 0, s, pair[2];

	mode = argc > 1 ? argv[1] : "";
	signal(SIGPIPE, SIG_IGN);
	if (is("ask"))
		return ask(port, atoi(argv[3]), atol(argv[4]), atol(argv[5]));
	if (is("hold"))
		return hold(port, atoi(argv[3]), atoi(argv[4]));
	if (is("reuse") || is("loops")) {
		for (int i = 0; i < (is("reuse") ? 2 : 5); i++) {
			s = listening(port);
			if (child()) {
				if (is("loops"))
					loop(s);
				accept_all(s);
			}
			close(s);
		}
		ready();
		for (;;)
			pause();
	}
	s = listening(port);
	if (is("prefork")) {
		for (int i = 0; i < 2; i++)
			if (child())
				accept_all(s);
		ready();
		for (;;)
			pause();
	}
	if (is("passed")) {
		must(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair");
		if (child())
			for (;;)
				serve_apart(pass(pair[0], -1));
		ready();
		for (;;) {
			int fd = accept(s, 0, 0);
			must(pass(pair[1], fd) > 0, "pass");
			close(fd);
		}
	}
	if (is("given")) {
		ready();
		int over = accept(s, 0, 0), fd;
		while ((fd = pass(over, -1)) >= 0)
			serve_apart(fd);
		return 0;
	}
	if (is("short")) {
		struct sigaction a = { .sa_handler = told };
		sigaction(SIGUSR1, &a, 0);
		ready();
		pause();
	} else {
		ready();
	}
	if (is("resumed"))
		resumed(s);
	else if (is("loop"))
		loop(s);
	else
		accept_all(s);
	return 0;
}
