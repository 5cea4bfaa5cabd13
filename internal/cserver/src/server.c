/*
 * A server in the two shapes that are not Go's: a thread per connection (default)
 * or one event loop (-loop). Each path delays its request in one known way, and the
 * header Fault-Nanoseconds says for how long by the scheduler's own account: the wall
 * time less the wait for a CPU, which the host may have caused, and where the fault is
 * a wait (lock, I/O, pipe) less the computing around it. Queued-Nanoseconds is that wait
 * for a CPU, of this thread since its last answer:
 *
 *   /cpu?MS      computes            /sleep?MS   sleeps
 *   /lock?MS     waits for a mutex that another thread holds for MS
 *   /pipe?MS     reads a pipe that another thread writes to after MS
 *   /read        reads FILE, buffered, through the page cache; /read?N reads FILE.N
 *   /direct      reads FILE past the page cache, likewise
 *   /map         touches a mapping of FILE, page by page, likewise
 *   /touch?MIB   touches fresh memory
 *   /accept?MS   answers; the next accept but one, at the latest, waits for MS
 *   /big?KIB     answers with KIB KiB
 *   /stream?N    answers in N chunks
 *   /body        answers when the whole body is read
 *
 * and those of faults.c.
 *
 * usage: server PORT FILE [-loop]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *file;
static volatile int accept_stall;
static int event_loop;
static volatile long sink;

static long now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
	nanosleep(&t, 0);
}

struct hold {
	pthread_mutex_t mutex;
	pthread_barrier_t held;
	int pipe[2];
	long ms;
};

static void *hold_mutex(void *arg)
{
	struct hold *h = arg;
	pthread_mutex_lock(&h->mutex);
	pthread_barrier_wait(&h->held);
	sleep_ms(h->ms);
	pthread_mutex_unlock(&h->mutex);
	return 0;
}

static void *write_pipe(void *arg)
{
	struct hold *h = arg;
	sleep_ms(h->ms);
	if (write(h->pipe[1], "x", 1) != 1)
		perror("write");
	return 0;
}

static long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000 + t.tv_nsec;
}

/* FILE, or FILE.N */
static const char *file_of(long n)
{
	static __thread char name[4096];
	if (!n)
		return file;
	snprintf(name, sizeof(name), "%s.%ld", file, n);
	return name;
}

#include "faults.c"

static void delay(const char *path, long arg)
{
	pthread_t t;
	struct hold h = { .mutex = PTHREAD_MUTEX_INITIALIZER, .ms = arg };
	char byte;

	if (!strcmp(path, "/cpu")) {
		for (long end = now_ms() + arg; now_ms() < end;)
			for (int i = 0; i < 10000; i++)
				sink += i;
	} else if (!strcmp(path, "/sleep")) {
		sleep_ms(arg);
	} else if (!strcmp(path, "/lock")) {
		pthread_barrier_init(&h.held, 0, 2);
		pthread_create(&t, 0, hold_mutex, &h);
		pthread_barrier_wait(&h.held);
		pthread_mutex_lock(&h.mutex);
		pthread_mutex_unlock(&h.mutex);
		pthread_join(t, 0);
	} else if (!strcmp(path, "/pipe")) {
		if (pipe(h.pipe))
			perror("pipe");
		pthread_create(&t, 0, write_pipe, &h);
		if (read(h.pipe[0], &byte, 1) != 1)
			perror("read");
		pthread_join(t, 0);
		close(h.pipe[0]);
		close(h.pipe[1]);
	} else if (!strcmp(path, "/read") || !strcmp(path, "/direct")) {
		static __thread void *buffer;
		int fd = open(file_of(arg), O_RDONLY | (path[1] == 'd' ? O_DIRECT : 0));
		if (!buffer && posix_memalign(&buffer, 4096, 1 << 20))
			abort();
		while (read(fd, buffer, 1 << 20) > 0)
			;
		close(fd);
	} else if (!strcmp(path, "/map")) {
		int fd = open(file_of(arg), O_RDONLY);
		struct stat st;
		fstat(fd, &st);
		char *p = mmap(0, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
		madvise(p, st.st_size, MADV_RANDOM);
		for (long i = 0; i < st.st_size; i += 4096)
			sink += p[i];
		munmap(p, st.st_size);
		close(fd);
	} else if (!strcmp(path, "/touch")) {
		long n = arg << 20;
		char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		madvise(p, n, MADV_NOHUGEPAGE);
		for (long i = 0; i < n; i += 4096)
			p[i] = 1;
		munmap(p, n);
	}
}

static void send_all(int fd, const char *p, long n)
{
	while (n > 0) {
		long k = send(fd, p, n, MSG_NOSIGNAL);
		if (k < 0 && errno == EAGAIN) {
			sleep_ms(1);
			continue;
		}
		if (k <= 0)
			return;
		p += k;
		n -= k;
	}
}

/* Answers one request; 0 when the connection has ended. */
static int answer(int fd)
{
	char in[65536], path[64] = "", head[256];
	long n = recv(fd, in, sizeof(in) - 1, 0), arg = 0;

	if (n <= 0)
		return 0;
	in[n] = 0;
	while (!strstr(in, "\r\n\r\n")) {
		long k = recv(fd, in + n, sizeof(in) - 1 - n, 0);
		if (k <= 0)
			return 0;
		in[n += k] = 0;
	}
	sscanf(in, "%*s %63[^? ]?%ld", path, &arg);
	if (!strcmp(path, "/body")) {
		const char *length = strcasestr(in, "content-length:");
		long want = (length ? atol(length + 15) : 0) + (strstr(in, "\r\n\r\n") + 4 - in);
		while (n < want) {
			long k = recv(fd, in, sizeof(in), 0);
			if (k <= 0)
				return 0;
			n += k;
		}
	}
	safepoint();
	struct account before = account();
	if (!fault(path, arg))
		delay(path, arg);
	note_delays(before, is_wait(path));
	if (!strcmp(path, "/accept"))
		accept_stall = arg;
	if (!strcmp(path, "/stream")) {
		const char *h = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
		send_all(fd, h, strlen(h));
		for (long i = 0; i < arg; i++) {
			send_all(fd, "9\r\ndata: x\n\n\r\n", 14);
			sleep_ms(2);
		}
		send_all(fd, "0\r\n\r\n", 5);
		return 1;
	}
	long body = !strcmp(path, "/big") ? arg << 10 : 2;
	snprintf(head, sizeof(head), "HTTP/1.1 200 OK\r\nContent-Length: %ld\r\n%s\r\n", body, delays);
	char *out = calloc(1, strlen(head) + body);
	memcpy(out, head, strlen(head));
	send_all(fd, out, strlen(head) + body);
	free(out);
	return 1;
}

static void *serve(void *arg)
{
	while (answer((long)arg))
		;
	close((long)arg);
	if (schedstat)
		close(schedstat);
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

	event_loop = argc > 3;
	file = argv[2];
	start_worker();
	signal(SIGPIPE, SIG_IGN);
	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(s, (void *)&a, sizeof(a)) || listen(s, 128)) {
		perror("bind");
		return 1;
	}
	puts("ready");
	fflush(stdout);
	if (!event_loop)
		for (;;) {
			pthread_t t;
			if (accept_stall) {
				sleep_ms(accept_stall);
				accept_stall = 0;
			}
			long fd = accept_or_rest(s);
			pthread_create(&t, 0, serve, (void *)fd);
			pthread_detach(t);
		}
	int ep = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN, .data.fd = s };
	epoll_ctl(ep, EPOLL_CTL_ADD, s, &e);
	for (;;) {
		if (epoll_wait(ep, &e, 1, -1) != 1)
			continue;
		if (e.data.fd == s) {
			e.data.fd = accept(s, 0, 0);
			epoll_ctl(ep, EPOLL_CTL_ADD, e.data.fd, &e);
		} else if (!answer(e.data.fd)) {
			close(e.data.fd);
		}
	}
}
