/*
 * Holds the kernel's lock of a file as a write(2) does, for as long as is asked:
 * the write's data lies in memory whose first touch is answered by this program
 * itself, late (userfaultfd). Whoever else writes to the file waits for it.
 *
 * usage: holdinode FILE; each line of its input is a number of milliseconds, and it
 * ends with that. It prints "ready", and "held" for each line once the lock is held.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static char *page;
static int file;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void *write_page(void *arg)
{
	(void)arg;
	if (pwrite(file, page, 1, 0) != 1)
		die("write");
	return 0;
}

int main(int argc, char **argv)
{
	static char zero[4096] __attribute__((aligned(4096)));
	struct uffdio_api api = { .api = UFFD_API };
	long ms;

	if (argc != 2)
		return 2;
	file = open(argv[1], O_WRONLY | O_CREAT, 0600);
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
	if (file < 0)
		die(argv[1]);
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api))
		die("userfaultfd");
	page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register area = { .range = { (unsigned long)page, 4096 }, .mode = UFFDIO_REGISTER_MODE_MISSING };
	if (page == MAP_FAILED || ioctl(uffd, UFFDIO_REGISTER, &area))
		die("register");
	puts("ready");
	fflush(stdout);
	while (scanf("%ld", &ms) == 1) {
		struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
		struct uffdio_copy copy = { .dst = (unsigned long)page, .src = (unsigned long)zero, .len = 4096 };
		struct uffd_msg msg;
		pthread_t writer;

		madvise(page, 4096, MADV_DONTNEED);
		if (pthread_create(&writer, 0, write_page, 0))
			die("pthread_create");
		if (read(uffd, &msg, sizeof(msg)) != sizeof(msg) || msg.event != UFFD_EVENT_PAGEFAULT)
			die("no page fault in the write");
		puts("held");
		fflush(stdout);
		nanosleep(&t, 0);
		if (ioctl(uffd, UFFDIO_COPY, &copy))
			die("end the page fault");
		pthread_join(writer, 0);
	}
}
