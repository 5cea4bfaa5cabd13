/*
 * Faults that only the truth lab and some tests ask for; included by server.c. A path that is not
 * one of them is left to delay().
 *
 *   /write?MS    writes to a full pipe that another thread empties after MS
 *   /sync?KIB    writes to a file of its own and fsyncs it
 *   /soil?KIB    writes to such a file, and leaves it to the kernel to write it out
 *   /hold?MS     answers; from then on the accept loop rests for MS (an event loop:
 *                rests before it answers)
 *   /compact?N   has the kernel compact memory N times, in this thread's own time; once without N
 *   /spin?MS     spins on a lock that another thread holds for MS, without a system call
 *   /engine?MS   waits for a thread of this process that computes for MS
 *   /turns?N     waits N times, for one after the other of six such threads, which computes
 *                for 2 ms: as a loop does that reads a file in parts by a pool
 *   /collect?MS  stops the world and collects garbage for MS: every other request
 *                waits at its next safepoint
 *   /exec?N      becomes what the line of shell in EXECN says, without its descriptors
 *   /batch?MS    answers at a tick of a timer of MS, not at the very next
 */
static long hold_ms;
static pthread_t accepter;

static void compute_ms(long ms)
{
	for (long end = now_ns() + ms * 1000000; now_ns() < end;)
		for (int i = 0; i < 1000; i++)
			sink += i;
}

/* Accepts a connection. On its way it rests, if it was told to. */
static long accept_or_rest(int listener)
{
	for (;;) {
		sleep_ms(__atomic_exchange_n(&hold_ms, 0, __ATOMIC_RELAXED));
		long fd = accept(listener, 0, 0);
		if (fd >= 0)
			return fd;
		if (errno != EINTR)
			abort();
	}
}

static void interrupt(int signal)
{
}

/* One thread that does the work of all. */
static struct {
	pthread_mutex_t mutex;
	pthread_cond_t work, done;
	long asked, finished, ms;
} worker = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0 };

static void *run_worker(void *unused)
{
	for (;;) {
		pthread_mutex_lock(&worker.mutex);
		while (worker.finished == worker.asked)
			pthread_cond_wait(&worker.work, &worker.mutex);
		long ms = worker.ms;
		pthread_mutex_unlock(&worker.mutex);
		compute_ms(ms);
		pthread_mutex_lock(&worker.mutex);
		worker.finished++;
		pthread_cond_broadcast(&worker.done);
		pthread_mutex_unlock(&worker.mutex);
	}
	return unused;
}

/* Six that take turns. */
enum { TURNS = 6 };
static sem_t turn_begins[TURNS], turn_ends[TURNS];

static void *take_turns(void *arg)
{
	long i = (long)arg;

	for (;;) {
		while (sem_wait(&turn_begins[i]))
			;
		compute_ms(2);
		sem_post(&turn_ends[i]);
	}
	return 0;
}

static void start_worker(void)
{
	pthread_t t;
	for (long i = 0; i < TURNS; i++) {
		pthread_create(&t, 0, take_turns, (void *)i);
		pthread_detach(t);
	}
	struct sigaction a = { .sa_handler = interrupt }; /* not SA_RESTART: accept(2) ends */

	accepter = pthread_self();
	sigaction(SIGUSR1, &a, 0);
	pthread_create(&t, 0, run_worker, 0);
	pthread_detach(t);
}

static void ask_worker(long ms)
{
	pthread_mutex_lock(&worker.mutex);
	worker.ms = ms;
	long mine = ++worker.asked;
	pthread_cond_signal(&worker.work);
	while (worker.finished < mine)
		pthread_cond_wait(&worker.done, &worker.mutex);
	pthread_mutex_unlock(&worker.mutex);
}

/* A managed runtime, of which this is the part that hurts. */
static struct {
	pthread_mutex_t mutex;
	pthread_cond_t runs;
	int stopped;
} world = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0 };

static void safepoint(void)
{
	pthread_mutex_lock(&world.mutex);
	while (world.stopped)
		pthread_cond_wait(&world.runs, &world.mutex);
	pthread_mutex_unlock(&world.mutex);
}

static void *drain(void *arg)
{
	struct hold *h = arg;
	static __thread char all[1 << 20];
	sleep_ms(h->ms);
	if (read(h->pipe[0], all, sizeof(all)) < 0)
		perror("read");
	return 0;
}

struct spun {
	int held;
	long ms;
};

static void *hold_spinlock(void *arg)
{
	struct spun *h = arg;
	__atomic_store_n(&h->held, 1, __ATOMIC_RELEASE);
	sleep_ms(h->ms);
	__atomic_store_n(&h->held, 0, __ATOMIC_RELEASE);
	return 0;
}

/* What a thread has spent so far, in nanoseconds, by the scheduler's account. */
struct account {
	long wall, computing, queued;
};

static __thread int schedstat;

static struct account account(void)
{
	struct account a = { 0 };
	struct timespec t;
	char text[128] = "";

	if (!schedstat)
		schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
	if (pread(schedstat, text, sizeof(text) - 1, 0) <= 0 || sscanf(text, "%*d %ld", &a.queued) != 1)
		abort();
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	a.computing = t.tv_sec * 1000000000 + t.tv_nsec;
	a.wall = now_ns();
	return a;
}

static long between(struct account from, struct account to, int waits_only)
{
	long took = to.wall - from.wall - (to.queued - from.queued);
	if (waits_only)
		took -= to.computing - from.computing;
	return took > 0 ? took : 0;
}

/* The lines of the next answer's head that tell of its delays. */
static __thread char delays[128];

/* The part of a path that is its fault, where it does more: to map and unmap is not to touch. */
static __thread struct account began, ended;

static void note_delays(struct account before, int waits_only)
{
	static __thread long queued;
	struct account after = account();

	if (!ended.wall)
		began = before, ended = after;
	snprintf(delays, sizeof(delays), "Fault-Nanoseconds: %019ld\r\nQueued-Nanoseconds: %019ld\r\n",
		 between(began, ended, waits_only), after.queued - queued);
	ended.wall = 0;
	queued = after.queued;
}

static int is_wait(const char *path)
{
	static const char *waits[] = { "/lock", "/pipe", "/write", "/read", "/direct", "/sync", 0 };
	for (const char **w = waits; *w; w++)
		if (!strcmp(path, *w))
			return 1;
	return 0;
}

/* Returns 0 if the path is none of these. */
static int fault(const char *path, long arg)
{
	if (!strcmp(path, "/write")) {
		static __thread char page[4096];
		struct hold h = { .ms = arg };
		pthread_t t;
		if (pipe2(h.pipe, O_NONBLOCK))
			abort();
		while (write(h.pipe[1], page, sizeof(page)) > 0)
			;
		fcntl(h.pipe[1], F_SETFL, 0);
		pthread_create(&t, 0, drain, &h);
		if (write(h.pipe[1], page, sizeof(page)) < 0)
			abort();
		pthread_join(t, 0);
		close(h.pipe[0]);
		close(h.pipe[1]);
	} else if (!strcmp(path, "/sync") || !strcmp(path, "/soil")) {
		static __thread char block[1 << 16];
		/* a new one: a file system may write out at once what replaces what was there */
		unlink(file_of(9));
		int fd = open(file_of(9), O_WRONLY | O_CREAT, 0600);
		for (long n = arg << 10; n > 0; n -= sizeof(block))
			if (write(fd, block, sizeof(block)) < 0)
				abort();
		if (path[2] == 'y' && fsync(fd))
			abort();
		close(fd);
	} else if (!strcmp(path, "/hold")) {
		if (event_loop) {
			sleep_ms(arg);
			return 1;
		}
		__atomic_store_n(&hold_ms, arg, __ATOMIC_RELAXED);
		pthread_kill(accepter, SIGUSR1);
	} else if (!strcmp(path, "/compact")) {
		int fd = open("/proc/sys/vm/compact_memory", O_WRONLY);
		do
			if (fd < 0 || write(fd, "1", 1) < 0)
				abort();
		while (--arg > 0);
		close(fd);
	} else if (!strcmp(path, "/spin")) {
		struct spun h = { 0, arg };
		pthread_t t;
		pthread_create(&t, 0, hold_spinlock, &h);
		while (!__atomic_load_n(&h.held, __ATOMIC_ACQUIRE))
			;
		while (__atomic_load_n(&h.held, __ATOMIC_ACQUIRE))
			;
		pthread_join(t, 0);
	} else if (!strcmp(path, "/engine")) {
		ask_worker(arg);
	} else if (!strcmp(path, "/turns")) {
		for (long i = 0; i < arg; i++) {
			sem_post(&turn_begins[i % TURNS]);
			while (sem_wait(&turn_ends[i % TURNS]))
				;
		}
	} else if (!strcmp(path, "/collect")) {
		pthread_mutex_lock(&world.mutex);
		while (world.stopped)
			pthread_cond_wait(&world.runs, &world.mutex);
		world.stopped = 1;
		pthread_mutex_unlock(&world.mutex);
		compute_ms(arg);
		pthread_mutex_lock(&world.mutex);
		world.stopped = 0;
		pthread_cond_broadcast(&world.runs);
		pthread_mutex_unlock(&world.mutex);
	} else if (!strcmp(path, "/exec")) {
		char name[16];
		snprintf(name, sizeof(name), "EXEC%ld", arg);
		syscall(SYS_close_range, 3, ~0U, 0);
		execl("/bin/sh", "sh", "-c", getenv(name), (char *)0);
		abort();
	} else if (!strcmp(path, "/batch")) {
		long tick = arg * 1000000, now = now_ns(), until = (now / tick + 1) * tick;
		if (until - now < tick / 2)
			until += tick;
		struct timespec t = { until / 1000000000, until % 1000000000 };
		clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0);
	} else {
		return 0;
	}
	return 1;
}
