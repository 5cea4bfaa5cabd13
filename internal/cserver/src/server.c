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
 *   /spawn?N     starts N processes, each of which ends at once
 *   /accept?MS   answers; the next accept but one, at the latest, waits for MS
 *   /accept_cpu?MS  the same, but computing
 *   /accepted?MS answers; the event loop computes for MS after its next accept
 *   /big?KIB     answers with KIB KiB
 *   /stream?N    answers in N chunks
 *   /body        answers when the whole body is read
 *   /defer?MS    answers after MS; the event loop serves others meanwhile
 *   /timer?MS    waits for a timer, in the event loop beside all others
 *   /engineN/…   has engine N, a process of its own, do what follows
 *
 * and those of faults.c.
 *
 * With an engine there are two engine processes and, as number 2, a broker that
 * has engine 0 do the work. They are reached over Unix sockets, TCP on loopback
 * or memory that is shared (and a futex; a thread per connection only).
 *
 * usage: server PORT FILE [-loop] [-engine unix|tcp|futex]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *file;
static volatile int accept_stall, accept_stall_cpu, accepted_cpu;
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

static void compute(long ms)
{
	for (long end = now_ms() + ms; now_ms() < end;)
		for (int i = 0; i < 10000; i++)
			sink += i;
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
		compute(arg);
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
		began = account();
		for (long i = 0; i < st.st_size; i += 4096)
			sink += p[i];
		ended = account();
		munmap(p, st.st_size);
		close(fd);
	} else if (!strcmp(path, "/touch")) {
		long n = arg << 20;
		char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		madvise(p, n, MADV_NOHUGEPAGE);
		began = account();
		for (long i = 0; i < n; i += 4096)
			p[i] = 1;
		ended = account();
		munmap(p, n);
	} else if (!strcmp(path, "/spawn")) {
		for (long i = 0; i < arg; i++) {
			pid_t child = vfork();
			if (!child)
				_exit(0);
			if (child < 0 || waitpid(child, 0, 0) != child)
				perror("spawn");
		}
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

/* What the event loop answers later. */
static struct deferred {
	int fd;
	long due;
} deferred[64];
static int deferrals;

/* Answers what is due; milliseconds until something is, or -1. */
static int answer_deferred(void)
{
	const char *h = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
	long next = -1;

	for (int i = 0; i < deferrals;) {
		long left = deferred[i].due - now_ms();
		if (left <= 0) {
			send_all(deferred[i].fd, h, strlen(h));
			deferred[i] = deferred[--deferrals];
			continue;
		}
		if (next < 0 || left < next)
			next = left;
		i++;
	}
	return next;
}

/*
 * Engines. A job is one line, "PATH ARG", and so is the answer.
 */
enum { ENGINES = 2, BROKER = ENGINES, JOBS };
enum { IDLE, ASKED, ANSWERED }; /* states of a slot: none is 2 when waited for, which would be a mutex's */
static struct slot {
	int state;
	char job[128];
} *slots;
static const char *transport;
static int job_listener[JOBS];
static struct sockaddr_storage job_address[JOBS];
static socklen_t job_address_len[JOBS];
static pthread_mutex_t slot_mutex = PTHREAD_MUTEX_INITIALIZER;

static void must(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

static long futex(int *word, int op, int value)
{
	return syscall(SYS_futex, word, op, value, 0, 0, 0);
}

static void slot_wait_while(int *state, int value)
{
	while (__atomic_load_n(state, __ATOMIC_ACQUIRE) == value)
		futex(state, FUTEX_WAIT, value);
}

static void slot_set(int *state, int value)
{
	__atomic_store_n(state, value, __ATOMIC_RELEASE);
	futex(state, FUTEX_WAKE, 1000);
}

/* Gives engine i a job; its answer can be read from the socket that is returned. */
static int ask(int i, const char *path, long arg)
{
	char job[128];
	int n = snprintf(job, sizeof(job), "%s %ld\n", path, arg);
	int s = socket(job_address[i].ss_family, SOCK_STREAM, 0);

	must(!connect(s, (void *)&job_address[i], job_address_len[i]), "connect to the engine");
	must(write(s, job, n) == n, "write to the engine");
	return s;
}

static void await(int s)
{
	char answer[16];

	must(read(s, answer, sizeof(answer)) > 0, "read from the engine");
	close(s);
}

/* Has engine i do a job and waits for it. */
static void have_done(int i, const char *path, long arg)
{
	if (strcmp(transport, "futex")) {
		await(ask(i, path, arg));
		return;
	}
	pthread_mutex_lock(&slot_mutex);
	snprintf(slots[i].job, sizeof(slots[i].job), "%s %ld", path, arg);
	slot_set(&slots[i].state, ASKED);
	slot_wait_while(&slots[i].state, ASKED);
	slots[i].state = IDLE;
	pthread_mutex_unlock(&slot_mutex);
}

static void work(int i, const char *job)
{
	char path[64] = "";
	long arg = 0;

	sscanf(job, "%63s %ld", path, &arg);
	if (i == BROKER)
		have_done(0, path, arg);
	else
		delay(path, arg);
}

static void engine(int i)
{
	char job[128];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	prctl(PR_SET_NAME, i == BROKER ? "broker" : i ? "engine1" : "engine0");
	for (;;) {
		if (!strcmp(transport, "futex")) {
			int *state = &slots[i].state, now;
			while ((now = __atomic_load_n(state, __ATOMIC_ACQUIRE)) != ASKED)
				if (now == IDLE) /* else the answer is about to be taken */
					futex(state, FUTEX_WAIT, IDLE);
			work(i, slots[i].job);
			slot_set(state, ANSWERED);
			continue;
		}
		int s = accept(job_listener[i], 0, 0);
		long n = read(s, job, sizeof(job) - 1);
		if (n > 0) {
			job[n] = 0;
			work(i, job);
			must(write(s, "done\n", 5) == 5, "write the answer");
		}
		close(s);
	}
}

static void start_engines(int port)
{
	slots = mmap(0, sizeof(*slots) * JOBS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < JOBS; i++) {
		struct sockaddr_un u = { .sun_family = AF_UNIX };
		struct sockaddr_in in = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
		int tcp = !strcmp(transport, "tcp");
		/* in the abstract namespace, which leaves nothing behind */
		int n = snprintf(u.sun_path + 1, sizeof(u.sun_path) - 1, "ebpfllm-engine-%d-%d", port, i);

		job_listener[i] = socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM, 0);
		must(!bind(job_listener[i], tcp ? (void *)&in : (void *)&u,
			   tcp ? sizeof(in) : offsetof(struct sockaddr_un, sun_path) + 1 + n) &&
			     !listen(job_listener[i], 16),
		     "listen for jobs");
		job_address_len[i] = sizeof(job_address[i]);
		getsockname(job_listener[i], (void *)&job_address[i], &job_address_len[i]);
	}
	for (int i = 0; i < JOBS; i++)
		if (!fork())
			engine(i);
}

/* In the event loop: who waits for a descriptor, a timer or an engine's answer. */
static struct {
	int client; /* 0: nobody */
} waiting[4096];
static int loop_epoll = -1;

static void answer_later(int fd, int client)
{
	struct epoll_event e = { .events = EPOLLIN, .data.fd = fd };

	waiting[fd].client = client;
	must(!epoll_ctl(loop_epoll, EPOLL_CTL_ADD, fd, &e), "epoll_ctl");
}

static void send_answer(int fd, long body)
{
	char head[256];

	snprintf(head, sizeof(head), "HTTP/1.1 200 OK\r\nContent-Length: %ld\r\n%s\r\n", body, delays);
	delays[0] = 0; /* of this answer only */
	char *out = calloc(1, strlen(head) + body);
	memcpy(out, head, strlen(head));
	send_all(fd, out, strlen(head) + body);
	free(out);
}

/* What was waited for has come. */
static void answer_now(int fd)
{
	char answer[16];
	int client = waiting[fd].client;

	must(read(fd, answer, sizeof(answer)) > 0, "read what was waited for");
	waiting[fd].client = 0;
	close(fd);
	send_answer(client, 2);
}

/* Answers one request; 0 when the connection has ended. */
static int answer(int fd)
{
	char in[65536], path[64] = "";
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
	if (!strcmp(path, "/defer") && event_loop && deferrals < 64) {
		deferred[deferrals++] = (struct deferred){ fd, now_ms() + arg };
		return 1;
	}
	if (!strncmp(path, "/engine", 7) && path[7]) {
		if (event_loop) {
			answer_later(ask(path[7] - '0', path + 8, arg), fd);
			return 1;
		}
		have_done(path[7] - '0', path + 8, arg);
	}
	if (!strcmp(path, "/timer")) {
		int timer = timerfd_create(CLOCK_MONOTONIC, 0);
		struct itimerspec at = { .it_value = { arg / 1000, arg % 1000 * 1000000 } };
		timerfd_settime(timer, 0, &at, 0);
		answer_later(timer, fd);
		return 1;
	}
	safepoint();
	struct account before = account();
	if (!fault(path, arg))
		delay(strcmp(path, "/defer") ? path : "/sleep", arg);
	note_delays(before, is_wait(path));
	if (!strcmp(path, "/accept"))
		accept_stall = arg;
	if (!strcmp(path, "/accept_cpu"))
		accept_stall_cpu = arg;
	if (!strcmp(path, "/accepted"))
		accepted_cpu = arg;
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
	send_answer(fd, !strcmp(path, "/big") ? arg << 10 : 2);
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
	int one = 1, s;

	file = argv[2];
	for (int i = 3; i < argc; i++) {
		if (!strcmp(argv[i], "-loop"))
			event_loop = 1;
		else if (!strcmp(argv[i], "-engine") && i + 1 < argc)
			transport = argv[++i];
	}
	if (transport)
		start_engines(atoi(argv[1]));
	start_worker();
	s = socket(AF_INET, SOCK_STREAM, 0);
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
			compute(accept_stall_cpu);
			accept_stall_cpu = 0;
			long fd = accept_or_rest(s);
			pthread_create(&t, 0, serve, (void *)fd);
			pthread_detach(t);
		}
	int ep = loop_epoll = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN, .data.fd = s };
	epoll_ctl(ep, EPOLL_CTL_ADD, s, &e);
	for (;;) {
		if (epoll_wait(ep, &e, 1, answer_deferred()) != 1)
			continue;
		if (e.data.fd == s) {
			e.data.fd = accept(s, 0, 0);
			epoll_ctl(ep, EPOLL_CTL_ADD, e.data.fd, &e);
			compute(accepted_cpu);
			accepted_cpu = 0;
		} else if (waiting[e.data.fd].client) {
			answer_now(e.data.fd);
		} else if (!answer(e.data.fd)) {
			close(e.data.fd);
		}
	}
}
