/* Children: fork with a memory that is large, fork of a fork, vfork, exec,
 * posix_spawn, wait with every kind of end, pipes, and at last an exec of the
 * program itself in its first process.
 *
 *     children [SIZE_MIB] */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static size_t words;
static uint64_t *array;

static uint64_t checksum(void)
{
	uint64_t sum = 0;

	for (size_t i = 0; i < words; i++)
		sum = sum * 31 + array[i];
	return sum;
}

static void report(const char *what, pid_t child)
{
	int status;

	if (waitpid(child, &status, 0) != child)
		printf("%s: wait failed: %s\n", what, strerror(errno));
	else if (WIFEXITED(status))
		printf("%s: exit %d\n", what, WEXITSTATUS(status));
	else if (WIFSIGNALED(status))
		printf("%s: signal %d\n", what, WTERMSIG(status));
	fflush(stdout);
}

/* The child sees the parent's memory as it was, and keeps its writes. */
static void fork_and_compare(uint64_t before)
{
	pid_t child = fork();

	if (child == 0) {
		uint64_t seen = checksum();

		for (size_t i = 0; i < words; i += 512)
			array[i] = ~array[i];
		pid_t grandchild = fork();
		if (grandchild == 0)
			_exit(checksum() != before ? 21 : 22);
		int status = 0;
		waitpid(grandchild, &status, 0);
		_exit(seen == before && WIFEXITED(status) && WEXITSTATUS(status) == 21 ? 20 : 23);
	}
	/* The parent changes its own copy at the same time, and back. */
	for (size_t i = 0; i < words; i += 512)
		array[i] += 1;
	report("fork", child);
	for (size_t i = 0; i < words; i += 512)
		array[i] -= 1;
	printf("unchanged: %d\n", checksum() == before);
	fflush(stdout);
}

static void fork_and_die(void)
{
	pid_t child = fork();

	if (child == 0)
		abort();
	report("abort", child);
	child = fork();
	if (child == 0)
		for (;;)
			pause();
	kill(child, SIGKILL);
	report("killed", child);
}

static void vfork_and_exec(void)
{
	volatile int shared = 1;
	pid_t child = vfork();

	if (child == 0) {
		shared = 2;
		execl("/bin/sh", "sh", "-c", "exit 33", (char *)NULL);
		_exit(127);
	}
	report("vfork", child);
	printf("shared %d\n", shared);
	fflush(stdout);
}

static void spawn(void)
{
	posix_spawn_file_actions_t actions;
	int ends[2];
	pid_t child;
	char text[64] = "";
	char *const arguments[] = { "sh", "-c", "echo spawned $0 $1; exit 4", "a", "b", NULL };

	if (pipe(ends) != 0)
		exit(1);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
	posix_spawn_file_actions_addclose(&actions, ends[0]);
	int error = posix_spawn(&child, "/bin/sh", &actions, NULL, arguments, environ);
	close(ends[1]);
	if (error != 0) {
		printf("spawn: %s\n", strerror(error));
		return;
	}
	ssize_t got = read(ends[0], text, sizeof(text) - 1);
	close(ends[0]);
	printf("read %zd: %s", got, text);
	report("spawn", child);
	error = posix_spawn(&child, "/does/not/exist", NULL, NULL, arguments, environ);
	printf("missing: %s\n", strerror(error));
	fflush(stdout);
}

/* Memory shared with a child really is: the parent sees what it wrote. */
static void share(void)
{
	volatile int *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE,
				    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t child = fork();

	if (child == 0) {
		*shared = 77;
		_exit(0);
	}
	report("share", child);
	printf("seen %d\n", *shared);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "again") == 0) {
		printf("again, %s\n", getenv("CHILDREN_MARK"));
		return 6;
	}
	words = ((size_t)(argc > 1 ? atol(argv[1]) : 16) << 20) / sizeof(uint64_t);
	array = malloc(words * sizeof(uint64_t));
	for (size_t i = 0; i < words; i++)
		array[i] = i * 0x9e3779b97f4a7c15u;
	uint64_t before = checksum();

	printf("%016llx\n", (unsigned long long)before);
	fflush(stdout);
	fork_and_compare(before);
	fork_and_die();
	vfork_and_exec();
	spawn();
	share();
	printf("system: %d\n", WEXITSTATUS(system("exit 9")));
	printf("after all: %d\n", checksum() == before);
	fflush(stdout);
	setenv("CHILDREN_MARK", "kept", 1);
	execl("/proc/self/exe", argv[0], "again", (char *)NULL);
	printf("exec: %s\n", strerror(errno));
	return 1;
}
