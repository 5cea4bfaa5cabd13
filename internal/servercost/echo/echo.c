/*
 * The worst case for whoever watches: a server that does nothing but read a
 * request and write an answer, by blocking calls in a thread for each
 * connection, and its client.
 *
 * usage: echo serve PORT
 *        echo ask PORT REQUESTS [BESIDE]
 *
 * The client puts requests on one connection, one after the other. When it has
 * warmed the server up it writes "w" and waits for a byte; then come the
 * requests, and their latencies in nanoseconds as 32-bit words. It keeps the
 * connection, and so the server its thread, until its input ends. With BESIDE,
 * every fourth request is followed by one to that port, whose latency is not told.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const char request[] =
	"POST /v1/chat/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
	"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nContent-Length: 2\r\n\r\n{}";
static const char answer[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";

static void check(int failed, const char *what)
{
	if (failed) {
		perror(what);
		exit(1);
	}
}

static struct sockaddr_in loopback(const char *port)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(atoi(port)),
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
}

static void *answer_all(void *arg)
{
	int fd = (long)arg;
	char in[4096];

	while (recv(fd, in, sizeof(in), 0) > 0)
		if (send(fd, answer, sizeof(answer) - 1, MSG_NOSIGNAL) < 0)
			break;
	close(fd);
	return 0;
}

static int serve(const char *port)
{
	struct sockaddr_in a = loopback(port);
	int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	check(bind(s, (void *)&a, sizeof(a)) || listen(s, 16), "listen");
	puts("ready");
	fflush(stdout);
	for (;;) {
		pthread_t t;
		long fd = accept(s, 0, 0);
		check(fd < 0, "accept");
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		check(pthread_create(&t, 0, answer_all, (void *)fd), "pthread_create");
		pthread_detach(t);
	}
}

static int connect_to(const char *port)
{
	struct sockaddr_in a = loopback(port);
	int one = 1, fd = socket(AF_INET, SOCK_STREAM, 0);

	check(connect(fd, (void *)&a, sizeof(a)), "connect");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	return fd;
}

static unsigned ask(int fd)
{
	struct timespec a, b;
	char in[4096];

	clock_gettime(CLOCK_MONOTONIC, &a);
	check(send(fd, request, sizeof(request) - 1, MSG_NOSIGNAL) != sizeof(request) - 1, "send");
	/* the answer is small and one write: it comes whole */
	check(recv(fd, in, sizeof(in), 0) != sizeof(answer) - 1, "recv");
	clock_gettime(CLOCK_MONOTONIC, &b);
	return (b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec;
}

static void ask_all(int fd, int beside, int n, unsigned *latency)
{
	for (int i = 0; i < n; i++) {
		latency[i] = ask(fd);
		if (beside >= 0 && i % 4 == 0)
			ask(beside);
	}
}

int main(int argc, char **argv)
{
	signal(SIGPIPE, SIG_IGN);
	if (argc == 3 && !strcmp(argv[1], "serve"))
		return serve(argv[2]);
	if (argc < 4 || strcmp(argv[1], "ask"))
		return 2;
	int n = atoi(argv[3]), fd = connect_to(argv[2]), beside = argc > 4 ? connect_to(argv[4]) : -1;
	unsigned *latency = malloc(n * sizeof(*latency));
	char c;
	check(!latency, "malloc");
	ask_all(fd, beside, n / 20 + 1, latency);
	check(write(1, "w", 1) != 1 || read(0, &c, 1) != 1, "start");
	ask_all(fd, beside, n, latency);
	check(fwrite(latency, sizeof(*latency), n, stdout) != n || fflush(stdout), "write");
	return read(0, &c, 1) != 0;
}
