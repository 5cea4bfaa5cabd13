/*
 * A server whose requests depend on its network, a thread per connection:
 *
 *   /            answers at once
 *   /big?KIB     answers with KIB KiB
 *   /two         writes head and body apart, with Nagle's algorithm on
 *   /body        answers when the whole body is read
 *   /marked?TEXT answers with TEXT
 *   /cpu?MS      computes first
 *   /sleep?MS    sleeps first
 *   /map?PAGES   touches the first PAGES pages of a mapping of FILE first
 *   /ask/...     asks the upstream server for /..., on a connection of its own that it keeps
 *   /dial/...    the same, on a connection for this request alone
 *
 * usage: network FILE ADDRESS PORT [UPSTREAM_ADDRESS UPSTREAM_PORT]
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const char *file;
static struct sockaddr_in upstream;
static volatile long sink;

struct connection {
	int fd;
	int upstream; /* -1 until it is asked */
};

static long now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000 + t.tv_nsec;
}

static void nodelay(int fd, int on)
{
	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		perror("TCP_NODELAY");
}

static int send_all(int fd, const char *p, long n)
{
	while (n > 0) {
		long k = send(fd, p, n, MSG_NOSIGNAL);
		if (k <= 0)
			return 0;
		p += k;
		n -= k;
	}
	return 1;
}

/* Reads a head and the body that its Content-Length promises; 0 when there is none. */
static int read_message(int fd, char *in, long size)
{
	char *end = 0;
	long n = 0, k, want = 0;

	while (!end) {
		if (n == size - 1 || (k = recv(fd, in + n, size - 1 - n, 0)) <= 0)
			return 0;
		in[n += k] = 0;
		end = strstr(in, "\r\n\r\n");
	}
	const char *length = strcasestr(in, "\r\ncontent-length:");
	if (length && length < end)
		want = atol(length + 17);
	for (n -= end + 4 - in; n < want; n += k) {
		static __thread char rest[65536];
		if ((k = recv(fd, rest, sizeof(rest), 0)) <= 0)
			return 0;
	}
	return 1;
}

static int ask(const char *path, int *kept)
{
	static __thread char in[65536];
	char out[512];
	int fd = *kept, ok;

	if (fd < 0) {
		fd = socket(AF_INET, SOCK_STREAM, 0);
		if (fd < 0 || connect(fd, (void *)&upstream, sizeof(upstream))) {
			perror("connect");
			return 0;
		}
		nodelay(fd, 1);
		*kept = fd;
	}
	snprintf(out, sizeof(out), "GET %s HTTP/1.1\r\nHost: upstream\r\n\r\n", path);
	ok = send_all(fd, out, strlen(out)) && read_message(fd, in, sizeof(in));
	if (!ok) {
		close(fd);
		*kept = -1;
	}
	return ok;
}

static void touch(long pages)
{
	int fd = open(file, O_RDONLY);
	char *p = mmap(0, pages * 4096, PROT_READ, MAP_SHARED, fd, 0);

	close(fd);
	if (p == MAP_FAILED) {
		perror(file);
		return;
	}
	madvise(p, pages * 4096, MADV_RANDOM);
	for (long i = 0; i < pages; i++)
		sink += p[i * 4096];
	munmap(p, pages * 4096);
}

static int starts(const char *path, const char *with)
{
	return !strncmp(path, with, strlen(with));
}

/* Answers one request; 0 when the connection is to end. */
static int answer(struct connection *c)
{
	static __thread char in[65536];
	char path[512] = "", head[256], *text;
	int ok = 1;

	if (!read_message(c->fd, in, sizeof(in)))
		return 0;
	sscanf(in, "%*s %511s", path);
	text = strchr(path, '?');
	text = text ? text + 1 : path + strlen(path);
	long arg = atol(text), body = 2, begin = now_ns();

	if (starts(path, "/cpu")) {
		while (now_ns() < begin + arg * 1000000)
			sink++;
	} else if (starts(path, "/sleep")) {
		struct timespec t = { arg / 1000, arg % 1000 * 1000000 };
		nanosleep(&t, 0);
	} else if (starts(path, "/map")) {
		touch(arg);
	} else if (starts(path, "/ask/")) {
		ok = ask(path + 4, &c->upstream);
	} else if (starts(path, "/dial/")) {
		int fresh = -1;
		ok = ask(path + 5, &fresh);
		if (fresh >= 0)
			close(fresh);
	} else if (starts(path, "/big")) {
		body = arg << 10;
	} else if (starts(path, "/marked")) {
		body = strlen(text);
	}
	int two = starts(path, "/two");
	long n = snprintf(head, sizeof(head), "HTTP/1.1 %s\r\nContent-Length: %ld\r\n\r\n", ok ? "200 OK" : "502 Bad Gateway", body);
	char *out = calloc(1, n + body);
	if (!out)
		return 0;
	memcpy(out, head, n);
	if (starts(path, "/marked"))
		memcpy(out + n, text, body);
	nodelay(c->fd, !two);
	ok = two ? send_all(c->fd, out, n) && send_all(c->fd, out + n, body) : send_all(c->fd, out, n + body);
	free(out);
	return ok;
}

static void *serve(void *arg)
{
	struct connection c = { .fd = (long)arg, .upstream = -1 };

	while (answer(&c))
		;
	close(c.fd);
	if (c.upstream >= 0)
		close(c.upstream);
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

	if ((argc != 4 && argc != 6) || !inet_aton(argv[2], &a.sin_addr) || (argc == 6 && !inet_aton(argv[4], &upstream.sin_addr))) {
		fprintf(stderr, "usage: network FILE ADDRESS PORT [UPSTREAM_ADDRESS UPSTREAM_PORT]\n");
		return 2;
	}
	file = argv[1];
	a.sin_port = htons(atoi(argv[3]));
	if (argc == 6) {
		upstream.sin_family = AF_INET;
		upstream.sin_port = htons(atoi(argv[5]));
	}
	signal(SIGPIPE, SIG_IGN);
	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(s, (void *)&a, sizeof(a)) || listen(s, 128)) {
		perror("bind");
		return 1;
	}
	for (;;) {
		pthread_t t;
		long fd = accept(s, 0, 0);
		if (fd < 0)
			continue;
		if (pthread_create(&t, 0, serve, (void *)fd))
			close(fd);
		else
			pthread_detach(t);
	}
}
