/* Answers of the kernel that programs rely on, most of them refusals, while
 * memory is elsewhere. Prints what it got.
 *
 *     answers [SIZE_MIB] */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/limits.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ballast.h"

#define PAGE 4096
#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 8
#endif

static void say(const char *what, long answer)
{
	printf("%s: %s\n", what, answer >= 0 ? "done" : strerror(errno));
	fflush(stdout);
}

static void copy(const char *from, const char *to)
{
	char block[1 << 16];
	int in = open(from, O_RDONLY), out = open(to, O_CREAT | O_TRUNC | O_WRONLY, 0755);
	ssize_t got;

	while ((got = read(in, block, sizeof(block))) > 0)
		if (write(out, block, (size_t)got) != got)
			exit(97);
	close(in);
	close(out);
}

static void write_text(const char *to, const char *text)
{
	int out = open(to, O_CREAT | O_TRUNC | O_WRONLY, 0755);

	if (write(out, text, strlen(text)) != (ssize_t)strlen(text))
		exit(97);
	close(out);
}

/* A file that is open for writing is not executed: in the first process, in a
 * child, as a script, and as a script's interpreter. */
static void busy(void)
{
	char *const none[] = { NULL };
	char *const arguments[] = { "busy", "7", NULL };
	char here[PATH_MAX], text[PATH_MAX + 16];

	copy("/bin/true", "busy");
	if (getcwd(here, sizeof(here)) == NULL)
		exit(97);
	snprintf(text, sizeof(text), "#!%s/busy\n", here);
	write_text("script-of-busy", text);
	write_text("script", "#!/bin/true\n");
	int busy = open("busy", O_WRONLY);

	say("execve of a busy file", execve("./busy", arguments, none));
	say("execve of a script whose interpreter is busy",
	    execve("./script-of-busy", arguments, none));
	int script = open("script", O_RDWR);

	say("execve of a busy script", execve("./script", arguments, none));
	int path = open("busy", O_PATH | O_CLOEXEC);

	say("execveat of a busy file", syscall(SYS_execveat, path, "", arguments, none,
					       AT_EMPTY_PATH));
	close(path);
	pid_t child = fork();
	if (child == 0) {
		execve("./busy", arguments, none);
		_exit(errno == ETXTBSY ? 1 : 2);
	}
	int status = 0;

	waitpid(child, &status, 0);
	printf("busy in a child: %d\n", WEXITSTATUS(status));
	close(busy);
	close(script);
	child = fork();
	if (child == 0) {
		execve("./script-of-busy", arguments, none);
		_exit(2);
	}
	waitpid(child, &status, 0);
	printf("no longer busy: %d\n", WEXITSTATUS(status));
	unlink("busy");
	unlink("script");
	unlink("script-of-busy");
}

/* As many descriptors as the limit says, each with its number. */
static void descriptors(void)
{
	struct rlimit limit, before;
	char block[16];

	getrlimit(RLIMIT_NOFILE, &before);
	printf("limit %lu\n", (unsigned long)before.rlim_cur);
	limit = before;
	limit.rlim_cur = before.rlim_cur < 1024 ? before.rlim_cur : 1024;
	setrlimit(RLIMIT_NOFILE, &limit);
	int first = open("/dev/null", O_RDONLY), last = first, count = 1, next;

	while ((next = dup(first)) >= 0) {
		if (next != last + 1)
			printf("%d after %d\n", next, last);
		last = next;
		count++;
	}
	printf("%d descriptors, the last %d: %s\n", count, last, strerror(errno));
	say("open", open("/dev/null", O_RDONLY));
	say("dup2 to the last", dup2(first, last));
	say("dup2 beyond", dup2(first, last + 1));
	say("fcntl", fcntl(first, F_DUPFD, last));
	/* A child needs none. */
	walk_ballast("filling the table");
	pid_t child = fork();
	if (child == 0) {
		walk_ballast("a fork with a full table");
		_exit(3);
	}
	int status = 0;

	waitpid(child, &status, 0);
	printf("child with a full table: %d\n", WEXITSTATUS(status));
	for (int number = first + 1; number <= last; number++)
		close(number);
	say("read", read(first, block, sizeof(block)));
	close(first);
	setrlimit(RLIMIT_NOFILE, &before);
}

static void names(void)
{
	char name[300];

	for (int length = 247; length <= 299; length += length < 252 ? 1 : 47) {
		memset(name, 'n', sizeof(name));
		name[length] = 0;
		int made = (int)syscall(SYS_memfd_create, name, 0);

		printf("name of %d: %s\n", length, made >= 0 ? "made" : strerror(errno));
		if (made >= 0)
			close(made);
	}
	say("bad flags", syscall(SYS_memfd_create, name, 0x80000000u));
	say("no name", syscall(SYS_memfd_create, (char *)8, 0));
	memset(name, 'n', sizeof(name));
	name[299] = 0;
	say("queue", syscall(SYS_mq_open, name, O_RDONLY, 0, NULL));
	say("attribute", syscall(SYS_getxattr, "/", name, NULL, 0));
	say("set attribute", syscall(SYS_setxattr, "/", name, "v", 1, 0));
	name[0] = 0;
	say("empty attribute", syscall(SYS_getxattr, "/", name, NULL, 0));
}

static void try_map(const char *what, int prot, int flags, int file, off_t offset)
{
	void *place = mmap(NULL, PAGE, prot, flags, file, offset);

	say(what, place == MAP_FAILED ? -1 : 0);
	if (place != MAP_FAILED)
		munmap(place, PAGE);
}

static void mappings(void)
{
	int ends[2], directory = open("/", O_RDONLY | O_DIRECTORY);
	int written = open("written", O_CREAT | O_WRONLY, 0600);
	int path = open("written", O_PATH);

	if (pipe(ends) != 0)
		exit(97);
	const int flags[] = { MAP_PRIVATE, MAP_SHARED, MAP_SHARED_VALIDATE };
	const char *const kinds[] = { "private", "shared", "validated" };

	for (int kind = 0; kind < 3; kind++) {
		for (int prot = PROT_NONE; prot <= (PROT_READ | PROT_WRITE); prot++) {
			printf("%s %d\n", kinds[kind], prot);
			try_map(" no file", prot, flags[kind], -1, 0);
			try_map(" closed", prot, flags[kind], 12345, 0);
			try_map(" pipe", prot, flags[kind], ends[0], 0);
			try_map(" directory", prot, flags[kind], directory, 0);
			try_map(" written only", prot, flags[kind], written, 0);
			try_map(" path", prot, flags[kind], path, 0);
			try_map(" offset", prot, flags[kind], written, 100);
			try_map(" offset of nothing", prot, flags[kind], 12345, 100);
			try_map(" fixed at nothing", prot, flags[kind] | MAP_FIXED, 12345, 0);
			try_map(" unknown flag", prot, flags[kind] | 0x8000000, directory, 0);
		}
	}
	try_map("no kind", PROT_READ, 0, 12345, 0);
	try_map("no kind, no file", PROT_READ, MAP_ANONYMOUS, -1, 0);
	say("no length", mmap(NULL, 0, PROT_READ, MAP_PRIVATE, 12345, 0) == MAP_FAILED ? -1 : 0);
	say("no length at all", mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
	    MAP_FAILED ? -1 : 0);
	close(ends[0]);
	close(ends[1]);
	close(directory);
	close(written);
	close(path);
	unlink("written");
}

static void links(void)
{
	const unsigned long long ways[] = { 0, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS,
					    RESOLVE_NO_XDEV, RESOLVE_BENEATH, RESOLVE_IN_ROOT,
					    RESOLVE_CACHED, 1ull << 40 };

	for (size_t i = 0; i < sizeof(ways) / sizeof(*ways); i++) {
		struct open_how how = { .flags = O_RDONLY, .resolve = ways[i] };
		long got = syscall(SYS_openat2, AT_FDCWD, "/proc/self/exe", &how, sizeof(how));

		printf("resolve %llx: %s\n", ways[i], got >= 0 ? "open" :
		       ways[i] == RESOLVE_CACHED && errno == EAGAIN ? "open" : strerror(errno));
		if (got >= 0)
			close((int)got);
	}
	struct open_how how = { .flags = O_RDONLY | O_NOFOLLOW };

	say("no follow", syscall(SYS_openat2, AT_FDCWD, "/proc/self/exe", &how, sizeof(how)));
	say("no follow, openat", openat(AT_FDCWD, "/proc/self/exe", O_RDONLY | O_NOFOLLOW));
	say("no follow, open", syscall(SYS_open, "/proc/self/exe", O_RDONLY | O_NOFOLLOW));
	say("create", open("/proc/self/exe", O_RDONLY | O_CREAT | O_EXCL, 0600));
	say("short", syscall(SYS_openat2, AT_FDCWD, "/proc/self/exe", &how, 8));
	struct stat status;

	say("link itself", fstatat(AT_FDCWD, "/proc/self/exe", &status, AT_SYMLINK_NOFOLLOW));
	printf("a link: %d\n", S_ISLNK(status.st_mode));
	struct statx more;

	say("statx", statx(AT_FDCWD, "/proc/self/exe", AT_SYMLINK_NOFOLLOW, STATX_TYPE, &more));
	printf("a link: %d\n", S_ISLNK(more.stx_mode));
}

static void locks(void)
{
	char *place = mmap(NULL, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);

	memset(place, 5, 8 * PAGE);
	walk_ballast("filling pages");
	say("munlock", munlock(place, 8 * PAGE));
	say("munlockall", munlockall());
	say("msync", msync(place, 8 * PAGE, MS_SYNC));
	say("msync and invalidate", msync(place, 8 * PAGE, MS_SYNC | MS_INVALIDATE));
	say("msync both", msync(place, 8 * PAGE, MS_SYNC | MS_ASYNC));
	say("msync askew", msync(place + 1, PAGE, MS_SYNC));
	munmap(place + 4 * PAGE, PAGE);
	say("msync over a hole", msync(place, 8 * PAGE, MS_ASYNC));
	say("munlock over a hole", munlock(place, 8 * PAGE));
	munmap(place, 8 * PAGE);
}

static void usage(void)
{
	struct rusage before, after;
	pid_t child = fork();

	if (child == 0) {
		size_t length = (size_t)24 << 20;
		char *place = malloc(length);

		memset(place, 1, length);
		place[length - 1] = ((volatile char *)place)[length / 2];
		_exit(((volatile char *)place)[length - 1]);
	}
	getrusage(RUSAGE_CHILDREN, &before);
	waitpid(child, NULL, 0);
	getrusage(RUSAGE_CHILDREN, &after);
	printf("a child's memory: %d\n", after.ru_maxrss - before.ru_maxrss >= 0 &&
	       after.ru_maxrss >= 24 << 10);
}

/* The word, and the array of words, may be anywhere. */
struct waiter {
	unsigned long value, address;
	unsigned flags, reserved;
};

static _Atomic unsigned words[3];

static void *waker(void *argument)
{
	(void)argument;
	words[1] = 1;
	while (syscall(SYS_futex, &words[1], FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0) == 0)
		sched_yield();
	return NULL;
}

static void futexes(void)
{
	struct waiter *array = malloc(1 << 16);
	struct timespec past = { 1, 0 };
	pthread_t thread;

	for (int i = 0; i < 3; i++) {
		array[i].value = 0;
		array[i].address = (unsigned long)&words[i];
		array[i].flags = 2 | FUTEX_PRIVATE_FLAG;
		array[i].reserved = 0;
	}
	walk_ballast("an array of futexes");
	long got = syscall(SYS_futex_waitv, array, 3, 0, &past, CLOCK_MONOTONIC);

	printf("futex_waitv: %ld %s\n", got, strerror(errno));
	array[2].value = 1;
	walk_ballast("an array of futexes");
	got = syscall(SYS_futex_waitv, array, 3, 0, NULL, CLOCK_MONOTONIC);
	printf("another value: %ld %s\n", got, strerror(errno));
	array[2].value = 0;
	walk_ballast("an array of futexes");
	pthread_create(&thread, NULL, waker, NULL);
	got = syscall(SYS_futex_waitv, array, 3, 0, NULL, CLOCK_MONOTONIC);
	printf("woken: %d\n", got == 1 || (got == -1 && errno == EAGAIN));
	words[1] = 2;
	/* Woken or not, the waker wants one more sleeper. */
	struct timespec moment = { 0, 1000000 };
	while (pthread_tryjoin_np(thread, NULL) != 0)
		syscall(SYS_futex, &words[1], FUTEX_WAIT_PRIVATE, 2, &moment, NULL, 0);
	array[1].address = 8;
	got = syscall(SYS_futex_waitv, array, 3, 0, NULL, CLOCK_MONOTONIC);
	printf("bad word: %ld %s\n", got, strerror(errno));
	got = syscall(SYS_futex_waitv, (void *)8, 3, 0, NULL, CLOCK_MONOTONIC);
	printf("bad array: %ld %s\n", got, strerror(errno));
	free(array);
}

static void droppable(void)
{
	char *place = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE,
			   MAP_DROPPABLE | MAP_ANONYMOUS, -1, 0);

	say("droppable", place == MAP_FAILED ? -1 : 0);
	if (place != MAP_FAILED) {
		place[0] = 1;
		munmap(place, 4 * PAGE);
	}
	say("droppable file", mmap(NULL, PAGE, PROT_READ, MAP_DROPPABLE, 0, 0) == MAP_FAILED ? -1 : 0);
}

int main(int argc, char **argv)
{
	touch_ballast(argc > 1 ? argv[1] : "8");
	printf("busy\n");
	busy();
	printf("descriptors\n");
	descriptors();
	printf("names\n");
	names();
	printf("mappings\n");
	mappings();
	printf("links\n");
	links();
	printf("locks\n");
	locks();
	printf("usage\n");
	usage();
	printf("futexes\n");
	futexes();
	droppable();
	walk_ballast("everything");
	return 0;
}
