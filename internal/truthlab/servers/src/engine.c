/*
 * An API process and an engine process, as LLM servers have them: the API
 * serves HTTP and asks the engine for tokens, which come one by one.
 *
 *   API      loop      one event loop for all connections
 *            threads   a thread for each connection
 *   between  unix      a Unix socket (the loop has one, each thread its own)
 *            shm       shared memory and futexes; the loop is told by a thread
 *                      of its own, through an eventfd
 *
 * The engine is one thread that makes a token for each request in turn.
 *
 * GET /engine/FAULT?N  answers with a stream of TOKENS tokens; the engine
 *                      suffers the fault before the second one
 * GET /FAULT?N         answers "ok"; the API suffers the fault itself, and says
 *                      in the header Fault-Nanoseconds how long it took
 *
 *   none             nothing            cpu?MS    computes
 *   sleep?MS         sleeps             lock?MS   waits for a mutex that another thread holds
 *   pipe?MS          writes to a full pipe that is emptied after MS
 *   read?MIB         reads FILE, buffered
 *   map?PAGES        touches pages of the mapped WEIGHTS, one here, one there
 *   search?PAGES     the same, but other pages each time, until all had their turn
 *   scan?MIB         touches the mapped WEIGHTS from the beginning, page by page
 *   touch?MIB        touches fresh memory in small pages; huge?MIB in huge ones
 *   steal?MS         computes 1 ms while a real-time thread keeps the CPU for MS
 *   team4?MS, team1  4 threads, or one, compute MS each; the request waits for
 *                    all of them (OpenMP)
 *   anon?MIB         touches memory that it has held since its first such request
 *   pace?MS          is not suffered: the tokens are made one by one in the course
 *                    of MS (a path of the engine only)
 *   counter?MS       waits for another thread on a futex that counts, and stands at 2
 *
 * usage: engine PORT FILE WEIGHTS loop|threads unix|shm
 * It prints "ready API-PID ENGINE-PID".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { TOKENS = 4, TOKEN_US = 200, SLOTS = 64, CONNECTIONS = 1024 };

static const char *file;
static const char *weights;
static long weight_pages;
static volatile long sink;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static long now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void compute(long us)
{
	for (long end = now_us() + us; now_us() < end;)
		for (int i = 0; i < 1000; i++)
			sink += i;
}

static void sleep_ms(long ms)
{
	struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

static void futex_wait_for(_Atomic int *word, int value, long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };
	syscall(SYS_futex, word, FUTEX_WAIT, value, us < 0 ? 0 : &t, 0, 0);
}

static void futex_wait(_Atomic int *word, int value) { futex_wait_for(word, value, -1); }

static void futex_wake(_Atomic int *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, 0, 0, 0);
}

/* ---- the faults ---- */

struct helper {
	pthread_mutex_t mutex;
	pthread_barrier_t begun;
	_Atomic int word;
	int pipe[2], cpu;
	long ms;
};

static void *hold_mutex(void *arg)
{
	struct helper *h = arg;
	pthread_mutex_lock(&h->mutex);
	pthread_barrier_wait(&h->begun);
	sleep_ms(h->ms);
	pthread_mutex_unlock(&h->mutex);
	return 0;
}

static void *drain_pipe(void *arg)
{
	struct helper *h = arg;
	static char buffer[1 << 16];
	pthread_barrier_wait(&h->begun);
	sleep_ms(h->ms);
	if (read(h->pipe[0], buffer, sizeof(buffer)) <= 0)
		perror("read");
	return 0;
}

static void *take_cpu(void *arg)
{
	struct helper *h = arg;
	struct sched_param first = { .sched_priority = 1 };
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(h->cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		die("sched_setaffinity");
	/* before work begins: else it may be over first */
	if (sched_setscheduler(0, SCHED_FIFO, &first))
		die("steal needs real-time priority, which this cgroup or user may not have: sched_setscheduler");
	pthread_barrier_wait(&h->begun);
	long end = now_us() + h->ms * 1000;
	while (now_us() < end)
		;
	return 0;
}

static void *bump_counter(void *arg)
{
	struct helper *h = arg;
	pthread_barrier_wait(&h->begun);
	sleep_ms(h->ms);
	h->word = 3;
	futex_wake(&h->word);
	return 0;
}

/* Runs act beside work; work begins once act has reached its barrier. */
static void beside(void *(*act)(void *), void (*work)(struct helper *), long ms)
{
	struct helper h = { .mutex = PTHREAD_MUTEX_INITIALIZER, .word = 2, .ms = ms, .pipe = { -1, -1 } };
	cpu_set_t before, here;
	pthread_t t;

	pthread_barrier_init(&h.begun, 0, 2);
	if (act == drain_pipe) {
		static const char page[1 << 16];
		if (pipe(h.pipe) || write(h.pipe[1], page, sizeof(page)) != sizeof(page))
			perror("fill a pipe");
	}
	if (act == take_cpu) {
		sched_getaffinity(0, sizeof(before), &before);
		h.cpu = sched_getcpu();
		CPU_ZERO(&here);
		CPU_SET(h.cpu, &here);
		sched_setaffinity(0, sizeof(here), &here);
	}
	if (pthread_create(&t, 0, act, &h))
		die("pthread_create");
	pthread_barrier_wait(&h.begun);
	work(&h);
	pthread_join(t, 0);
	if (act == take_cpu)
		sched_setaffinity(0, sizeof(before), &before);
	if (act == drain_pipe) {
		close(h.pipe[0]);
		close(h.pipe[1]);
	}
}

static void take_mutex(struct helper *h)
{
	pthread_mutex_lock(&h->mutex);
	pthread_mutex_unlock(&h->mutex);
}

static void write_pipe(struct helper *h)
{
	if (write(h->pipe[1], "x", 1) != 1)
		perror("write");
}

static void compute_1ms(struct helper *h)
{
	(void)h;
	compute(1000);
}

static void await_counter(struct helper *h)
{
	while (h->word == 2)
		futex_wait(&h->word, 2);
}

static void nothing(long n) { (void)n; }
static void pace(long n) { (void)n; }
static void do_cpu(long ms) { compute(ms * 1000); }
static void do_lock(long ms) { beside(hold_mutex, take_mutex, ms); }
static void do_pipe(long ms) { beside(drain_pipe, write_pipe, ms); }
static void do_steal(long ms) { beside(take_cpu, compute_1ms, ms); }
static void do_counter(long ms) { beside(bump_counter, await_counter, ms); }

static void do_read(long mib)
{
	static __thread char *buffer;
	int fd = open(file, O_RDONLY);
	if (!buffer)
		buffer = malloc(1 << 20);
	for (; mib > 0 && read(fd, buffer, 1 << 20) > 0; mib--)
		;
	close(fd);
}

static void do_map(long pages)
{
	/* a prime stride, so that no page is touched twice and none in a row */
	for (long i = 0, at = 0; i < pages; i++, at = (at + 7919) % weight_pages)
		sink += weights[at * 4096];
}

static void do_search(long pages)
{
	static long at;
	for (long i = 0; i < pages; i++, at = (at + 7919) % weight_pages)
		sink += weights[at * 4096];
}

static void do_scan(long mib)
{
	/* a mapping of its own: that of the weights is read without readahead */
	int fd = open(file, O_RDONLY);
	long n = mib << 20;
	const char *p = mmap(0, n, PROT_READ, MAP_SHARED, fd, 0);
	if (fd < 0 || p == MAP_FAILED)
		die("mmap");
	for (long i = 0; i < n; i += 4096)
		sink += p[i];
	munmap((void *)p, n);
	close(fd);
}

static void touch_fresh(long mib, int advice)
{
	long n = mib << 20;
	char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		die("mmap");
	madvise(p, n, advice);
	for (long i = 0; i < n; i += 4096)
		p[i] = 1;
	munmap(p, n);
}

static void do_touch(long mib) { touch_fresh(mib, MADV_NOHUGEPAGE); }
static void do_huge(long mib) { touch_fresh(mib, MADV_HUGEPAGE); }

static void do_anon(long mib)
{
	static char *held;
	static long size;
	long n = mib << 20;
	if (!held) {
		held = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (held == MAP_FAILED)
			die("mmap");
		size = n;
	}
	for (long i = 0; i < size && i < n; i += 4096)
		held[i]++;
}

static void team(int threads, long ms)
{
#pragma omp parallel num_threads(threads)
	{
		/* by the thread's own clock: each has as much to compute, however
		 * long it has to queue for a CPU */
		struct timespec t;
		long end = 0, at;
		do {
			clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
			at = t.tv_sec * 1000000 + t.tv_nsec / 1000;
			if (!end)
				end = at + ms * 1000;
			for (int i = 0; i < 1000; i++)
				sink += i;
		} while (at < end);
	}
}

static void do_team1(long ms) { team(1, ms); }
static void do_team4(long ms) { team(4, ms); }

static const struct {
	const char *name;
	void (*run)(long);
} faults[] = {
	{ "none", nothing }, { "cpu", do_cpu }, { "sleep", sleep_ms }, { "lock", do_lock },
	{ "pipe", do_pipe }, { "read", do_read }, { "map", do_map }, { "touch", do_touch },
	{ "huge", do_huge }, { "steal", do_steal }, { "team1", do_team1 }, { "team4", do_team4 },
	{ "anon", do_anon }, { "counter", do_counter }, { "search", do_search }, { "scan", do_scan },
	{ "pace", pace },
};
enum { FAULTS = sizeof(faults) / sizeof(*faults) };

/* ---- the engine ---- */

struct ask {
	int32_t fault, slot; /* slot: whose request, for the loop's one socket */
	int64_t arg, begun;
};

struct token {
	int32_t slot, index;
};

/* One request in shared memory. wake is 0 or 1, produced only grows: a futex
 * on produced would pass through 2, like a contended mutex. */
struct slot {
	_Atomic int taken, produced, wake;
	struct ask ask;
};

static struct shared {
	_Atomic int doorbell; /* for the engine */
	_Atomic int bell;     /* for the event loop's thread */
	struct slot slot[SLOTS];
} *shared;

static const char *engine_path; /* of the Unix socket, in the abstract namespace */

static void make_token(const struct ask *a, int index)
{
	if (index == 1)
		faults[a->fault].run(a->arg);
	compute(TOKEN_US);
}

/* Is the next token to be made? Else until keeps how long there is until then, in microseconds, if that is soonest. */
static int due(const struct ask *a, int index, long *until)
{
	long left;

	if (faults[a->fault].run != pace)
		return 1;
	left = a->begun + index * a->arg * 1000 / (TOKENS - 1) - now_us();
	if (left > 0 && (*until < 0 || left < *until))
		*until = left;
	return left <= 0;
}

static void engine_shm(int loop)
{
	for (;;) {
		int worked = 0;
		long until = -1;
		for (int i = 0; i < SLOTS; i++) {
			struct slot *s = &shared->slot[i];
			if (s->taken != 1 || s->produced == TOKENS || !due(&s->ask, s->produced, &until))
				continue;
			worked = 1;
			make_token(&s->ask, s->produced);
			s->produced++;
			s->wake = 1;
			if (loop) {
				shared->bell = 1;
				futex_wake(&shared->bell);
			} else {
				futex_wake(&s->wake);
			}
		}
		if (!worked && !atomic_exchange(&shared->doorbell, 0))
			futex_wait_for(&shared->doorbell, 0, until);
	}
}

static struct sockaddr_un engine_address(socklen_t *length)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int n = snprintf(a.sun_path + 1, sizeof(a.sun_path) - 1, "%s", engine_path);
	*length = offsetof(struct sockaddr_un, sun_path) + 1 + n;
	return a;
}

static void engine_unix(int listener)
{
	struct {
		int fd, produced;
		struct ask ask;
	} active[SLOTS];
	int n = 0, ep = epoll_create1(0), rest = -1; /* milliseconds until there is something to do */
	struct epoll_event e = { .events = EPOLLIN, .data.fd = listener };

	epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
	for (;;) {
		int k = epoll_wait(ep, &e, 1, rest), worked = 0;
		long until = -1;
		if (k == 1 && e.data.fd == listener) {
			e.data.fd = accept(listener, 0, 0);
			epoll_ctl(ep, EPOLL_CTL_ADD, e.data.fd, &e);
			continue;
		}
		if (k == 1) {
			struct ask a;
			rest = 0; /* first whatever else has come */
			if (recv(e.data.fd, &a, sizeof(a), 0) != sizeof(a)) {
				close(e.data.fd);
			} else if (n < SLOTS) {
				active[n].fd = e.data.fd;
				active[n].produced = 0;
				active[n++].ask = a;
			}
			continue;
		}
		for (int i = 0; i < n;) {
			if (!due(&active[i].ask, active[i].produced, &until)) {
				i++;
				continue;
			}
			worked = 1;
			make_token(&active[i].ask, active[i].produced);
			struct token t = { active[i].ask.slot, active[i].produced++ };
			if (send(active[i].fd, &t, sizeof(t), MSG_NOSIGNAL) != sizeof(t) || active[i].produced == TOKENS)
				active[i] = active[--n];
			else
				i++;
		}
		rest = worked ? 0 : until < 0 ? -1 : (until + 999) / 1000;
	}
}

/* ---- the API ---- */

static int loop, shm;

static void send_all(int fd, const char *p, long n)
{
	while (n > 0) {
		long k = send(fd, p, n, MSG_NOSIGNAL);
		if (k <= 0)
			return;
		p += k;
		n -= k;
	}
}

static void send_token(int fd, int index)
{
	static const char head[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
	static const char chunk[] = "d\r\ndata: token\n\n\r\n";
	static const char end[] = "0\r\n\r\n";
	char out[256];
	int n = snprintf(out, sizeof(out), "%s%s%s", index ? "" : head, chunk, index == TOKENS - 1 ? end : "");
	send_all(fd, out, n);
}

/* Reads a request's head: 1, or 0 at the connection's end. engine tells where
 * its fault is to happen. */
static int read_request(int fd, int *engine, struct ask *a)
{
	char in[16384], name[64] = "";
	long n = 0;

	do {
		long k = recv(fd, in + n, sizeof(in) - 1 - n, 0);
		if (k <= 0)
			return 0;
		in[n += k] = 0;
	} while (!strstr(in, "\r\n\r\n") && n < (long)sizeof(in) - 1);
	*a = (struct ask){ .begun = now_us() };
	*engine = !strncmp(in, "GET /engine/", 12);
	sscanf(in + (*engine ? 12 : 5), "%63[^? ]?%ld", name, &a->arg);
	while (a->fault < FAULTS && strcmp(faults[a->fault].name, name))
		a->fault++;
	if (a->fault == FAULTS)
		a->fault = 0;
	return 1;
}

static void answer_here(int fd, const struct ask *a)
{
	char out[256];
	long begin = now_us();

	faults[a->fault].run(a->arg);
	send_all(fd, out, snprintf(out, sizeof(out),
				   "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
				   "Fault-Nanoseconds: %ld\r\nContent-Length: 2\r\n\r\nok",
				   (now_us() - begin) * 1000));
}

static struct slot *take_slot(void)
{
	for (int i = 0;; i = (i + 1) % SLOTS) {
		struct slot *s = &shared->slot[i];
		int free = 0;
		if (atomic_compare_exchange_strong(&s->taken, &free, -1))
			return s;
		if (i == SLOTS - 1)
			sched_yield();
	}
}

static void submit(struct slot *s, const struct ask *a)
{
	s->ask = *a;
	s->produced = 0;
	s->wake = 0;
	s->taken = 1;
	shared->doorbell = 1;
	futex_wake(&shared->doorbell);
}

static int dial_engine(void)
{
	socklen_t length;
	struct sockaddr_un a = engine_address(&length);
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	if (fd < 0 || connect(fd, (void *)&a, length))
		die("connect to the engine");
	return fd;
}

static void *serve(void *arg)
{
	int fd = (long)arg, engine, socket = shm ? -1 : dial_engine();
	struct ask a;

	while (read_request(fd, &engine, &a)) {
		if (!engine) {
			answer_here(fd, &a);
		} else if (shm) {
			struct slot *s = take_slot();
			submit(s, &a);
			for (int sent = 0; sent < TOKENS;) {
				if (s->produced > sent) {
					send_token(fd, sent++);
					continue;
				}
				if (!atomic_exchange(&s->wake, 0))
					futex_wait(&s->wake, 0);
			}
			s->taken = 0;
		} else {
			struct token t = { 0 };
			if (send(socket, &a, sizeof(a), MSG_NOSIGNAL) != sizeof(a))
				break;
			do {
				if (recv(socket, &t, sizeof(t), 0) != sizeof(t))
					break;
				send_token(fd, t.index);
			} while (t.index < TOKENS - 1);
		}
	}
	close(fd);
	if (socket >= 0)
		close(socket);
	return 0;
}

static void serve_threads(int listener)
{
	for (;;) {
		pthread_t t;
		long fd = accept(listener, 0, 0);
		if (fd < 0)
			continue;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int));
		if (pthread_create(&t, 0, serve, (void *)fd))
			die("pthread_create");
		pthread_detach(t);
	}
}

static int tokens_ready; /* an eventfd */

__attribute__((noreturn)) static void *hear_bell(void *arg)
{
	(void)arg;
	for (;;) {
		if (!atomic_exchange(&shared->bell, 0)) {
			futex_wait(&shared->bell, 0);
			continue;
		}
		if (eventfd_write(tokens_ready, 1))
			perror("eventfd");
	}
}

static void serve_loop(int listener)
{
	static struct slot *slot_of[CONNECTIONS];
	static int sent_of[CONNECTIONS];
	int ep = epoll_create1(0), engine_fd;
	struct epoll_event e = { .events = EPOLLIN, .data.fd = listener };
	pthread_t t;

	epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
	if (shm) {
		engine_fd = tokens_ready = eventfd(0, 0);
		if (pthread_create(&t, 0, hear_bell, 0))
			die("pthread_create");
	} else {
		engine_fd = dial_engine();
	}
	e.data.fd = engine_fd;
	epoll_ctl(ep, EPOLL_CTL_ADD, engine_fd, &e);
	for (;;) {
		if (epoll_wait(ep, &e, 1, -1) != 1)
			continue;
		int fd = e.data.fd, engine;
		struct ask a;
		if (fd == listener) {
			fd = accept(listener, 0, 0);
			if (fd < 0)
				continue;
			if (fd >= CONNECTIONS) {
				close(fd);
				continue;
			}
			setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int));
			e.data.fd = fd;
			epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
		} else if (fd == engine_fd && shm) {
			eventfd_t n;
			eventfd_read(fd, &n);
			for (int c = 0; c < CONNECTIONS; c++) {
				struct slot *s = slot_of[c];
				if (!s)
					continue;
				while (sent_of[c] < s->produced)
					send_token(c, sent_of[c]++);
				if (sent_of[c] == TOKENS) {
					s->taken = 0;
					slot_of[c] = 0;
				}
			}
		} else if (fd == engine_fd) {
			struct token t;
			if (recv(fd, &t, sizeof(t), 0) != sizeof(t))
				exit(0);
			send_token(t.slot, t.index);
		} else if (!read_request(fd, &engine, &a)) {
			close(fd); /* with a request under way the client would wait: these clients do */
		} else if (!engine) {
			answer_here(fd, &a);
		} else if (shm) {
			sent_of[fd] = 0;
			slot_of[fd] = take_slot();
			submit(slot_of[fd], &a);
		} else {
			a.slot = fd;
			if (send(engine_fd, &a, sizeof(a), MSG_NOSIGNAL) != sizeof(a))
				die("ask the engine");
		}
	}
}

int main(int argc, char **argv)
{
	int one = 1, engine_listener = -1;
	char path[32];
	socklen_t length;
	struct stat st;

	if (argc != 6) {
		fputs("usage: engine PORT FILE WEIGHTS loop|threads unix|shm\n", stderr);
		return 2;
	}
	file = argv[2];
	loop = !strcmp(argv[4], "loop");
	shm = !strcmp(argv[5], "shm");
	signal(SIGPIPE, SIG_IGN);

	int fd = open(argv[3], O_RDONLY);
	if (fd < 0 || fstat(fd, &st))
		die(argv[3]);
	weight_pages = st.st_size / 4096;
	weights = mmap(0, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (weights == MAP_FAILED)
		die("mmap");
	madvise((void *)weights, st.st_size, MADV_RANDOM);
	close(fd);

	shared = mmap(0, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED)
		die("mmap");
	snprintf(path, sizeof(path), "truthlab-engine-%d", getpid());
	engine_path = path;
	if (!shm) {
		struct sockaddr_un a = engine_address(&length);
		engine_listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
		if (engine_listener < 0 || bind(engine_listener, (void *)&a, length) || listen(engine_listener, 128))
			die("the engine's socket");
	}

	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
				 .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int s = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(s, (void *)&a, sizeof(a)) || listen(s, 128))
		die("listen");

	pid_t parent = getpid(), engine = fork();
	if (engine < 0)
		die("fork");
	if (!engine) {
		prctl(PR_SET_NAME, "engine-core");
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != parent)
			return 1;
		close(s);
		if (shm)
			engine_shm(loop);
		else
			engine_unix(engine_listener);
	}
	if (engine_listener >= 0)
		close(engine_listener);
	printf("ready %d %d\n", getpid(), engine);
	fflush(stdout);
	if (loop)
		serve_loop(s);
	else
		serve_threads(s);
}
