/* Signals that are held, every number of them, sent by a parent and by itself;
 * and children that die by each.
 *
 *     held [SIZE_MIB] */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ballast.h"

#define SIGNALS 64

static volatile sig_atomic_t seen[SIGNALS + 1];
static volatile sig_atomic_t codes[SIGNALS + 1];
static volatile sig_atomic_t values[SIGNALS + 1];

static void on_signal(int number, siginfo_t *info, void *context)
{
	(void)context;
	seen[number]++;
	codes[number] = info->si_code;
	values[number] = info->si_value.sival_int;
}

/* What a program may have a handler for: not the C library's own two. */
static int usable(int number)
{
	return number != SIGKILL && number != SIGSTOP && number != 32 && number != 33;
}

static int is_set(const unsigned long *set, int number)
{
	return *set >> (number - 1) & 1;
}

static void report(const char *what, int number, pid_t child)
{
	int status = 0;

	if (waitpid(child, &status, 0) != child)
		printf("%s %d: wait failed: %s\n", what, number, strerror(errno));
	else if (WIFEXITED(status))
		printf("%s %d: exit %d\n", what, number, WEXITSTATUS(status));
	else
		printf("%s %d: signal %d\n", what, number, WTERMSIG(status));
	fflush(stdout);
}

static void handle_all(void)
{
	struct sigaction action = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO };

	sigfillset(&action.sa_mask);
	for (int number = 1; number <= SIGNALS; number++)
		if (usable(number) && sigaction(number, &action, NULL) != 0)
			printf("no handler for %d\n", number);
}

static void print_seen(const char *what)
{
	printf("%s:", what);
	for (int number = 1; number <= SIGNALS; number++)
		if (seen[number])
			printf(" %d(%d%s)", number, (int)seen[number],
			       codes[number] == SI_USER ? "" :
			       codes[number] == SI_TKILL ? "t" :
			       codes[number] == SI_QUEUE ? "q" : "?");
	printf("\n");
	fflush(stdout);
	memset((void *)seen, 0, sizeof(seen));
}

static void print_pending(void)
{
	sigset_t pending;

	sigpending(&pending);
	printf("pending:");
	for (int number = 1; number <= SIGNALS; number++)
		if (is_set((unsigned long *)&pending, number))
			printf(" %d", number);
	printf("\n");
	fflush(stdout);
}

/* A child that holds every signal gets each of them twice from its parent, and
 * handles them when it releases them. */
static void from_parent(void)
{
	int ready[2], sent[2];
	char byte = 0;

	if (pipe(ready) != 0 || pipe(sent) != 0)
		exit(97);
	pid_t child = fork();
	if (child == 0) {
		sigset_t all;

		handle_all();
		sigfillset(&all);
		sigprocmask(SIG_SETMASK, &all, NULL);
		(void)!write(ready[1], &byte, 1);
		(void)!read(sent[0], &byte, 1);
		print_seen("while held");
		print_pending();
		sigemptyset(&all);
		sigprocmask(SIG_SETMASK, &all, NULL);
		print_seen("released");
		fflush(stdout);
		_exit(0);
	}
	(void)!read(ready[0], &byte, 1);
	for (int round = 0; round < 2; round++)
		for (int number = 1; number <= SIGNALS; number++)
			if (usable(number) && number != SIGCONT)
				kill(child, number);
	(void)!write(sent[1], &byte, 1);
	report("held in a child", 0, child);
	close(ready[0]);
	close(ready[1]);
	close(sent[0]);
	close(sent[1]);
}

/* The set of one signal, also of one that the C library keeps to itself. */
static sigset_t only(int number)
{
	sigset_t set;

	memset(&set, 0, sizeof(set));
	*(unsigned long *)&set = 1ul << (number - 1);
	return set;
}

/* One signal at a time: held, sent, pending, released. */
static void one_by_one(void)
{
	for (int number = 1; number <= SIGNALS; number++) {
		sigset_t one = only(number), before, pending;

		if (!usable(number))
			continue;
		sigprocmask(SIG_BLOCK, &one, &before);
		union sigval value = { .sival_int = 1000 + number };
		sigqueue(getpid(), number, value);
		int early = seen[number];
		sigpending(&pending);
		sigprocmask(SIG_SETMASK, &before, NULL);
		if (early != 0 || seen[number] != 1 || !is_set((unsigned long *)&pending, number) ||
		    values[number] != 1000 + number)
			printf("signal %d: early %d, seen %d, pending %d, value %d\n", number, early,
			       (int)seen[number], is_set((unsigned long *)&pending, number),
			       (int)values[number]);
	}
	print_seen("one by one");
}

/* Waiting for a held signal takes it. */
static void waited_for(void)
{
	const int numbers[] = { SIGBUS, SIGSEGV, SIGSYS, SIGUSR1, 64, SIGTRAP };

	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
		sigset_t one = only(numbers[i]), before, pending;
		siginfo_t info = { 0 };
		const struct timespec none = { 0, 0 };

		sigprocmask(SIG_BLOCK, &one, &before);
		raise(numbers[i]);
		int got = sigtimedwait(&one, &info, &none);
		sigpending(&pending);
		printf("waited for %d: %d, code %d, pending %d", numbers[i], got, info.si_code,
		       is_set((unsigned long *)&pending, numbers[i]));
		errno = 0;
		got = sigtimedwait(&one, &info, &none);
		printf(", again %d %s\n", got, strerror(errno));
		sigprocmask(SIG_SETMASK, &before, NULL);
	}
	print_seen("waited for");
}

/* A wait whose mask lets a held signal through ends; one that does not, waits
 * on. */
static void suspended(void)
{
	const int numbers[] = { SIGBUS, SIGSEGV, SIGSYS, SIGUSR1, 64 };

	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
		sigset_t one = only(numbers[i]), before, none;
		const struct timespec moment = { 0, 1000000 };

		sigemptyset(&none);
		sigprocmask(SIG_BLOCK, &one, &before);
		raise(numbers[i]);
		printf("ppoll that holds %d: %d", numbers[i], ppoll(NULL, 0, &moment, &one));
		printf(", seen %d\n", (int)seen[numbers[i]]);
		int answer = ppoll(NULL, 0, NULL, &none);
		printf("ppoll: %d %s, seen %d\n", answer, strerror(errno), (int)seen[numbers[i]]);
		raise(numbers[i]);
		answer = sigsuspend(&none);
		printf("sigsuspend: %d %s, seen %d\n", answer, strerror(errno),
		       (int)seen[numbers[i]]);
		sigprocmask(SIG_SETMASK, &before, NULL);
	}
	print_seen("suspended");
}

/* A handler's own signal is held while it runs, whatever its sender. */
static volatile sig_atomic_t depth, deepest;

static void on_nested(int number)
{
	if (++depth > deepest)
		deepest = depth;
	if (++seen[number] < 3)
		raise(number);
	depth--;
}

static void nested(void)
{
	const int numbers[] = { SIGBUS, SIGSEGV, SIGSYS, SIGUSR1, 64 };

	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
		signal(numbers[i], on_nested);
		deepest = 0;
		raise(numbers[i]);
		printf("nested %d: seen %d, deepest %d\n", numbers[i], (int)seen[numbers[i]],
		       (int)deepest);
		seen[numbers[i]] = 0;
	}
}

/* What is held goes over an exec. */
static void over_exec(const char *self)
{
	pid_t child = fork();

	if (child == 0) {
		sigset_t all;

		sigfillset(&all);
		sigprocmask(SIG_SETMASK, &all, NULL);
		raise(SIGSEGV);
		raise(SIGUSR2);
		raise(64);
		execl(self, self, "pending", (char *)NULL);
		_exit(96);
	}
	report("over exec", 0, child);
}

static void *holder(void *argument)
{
	sigset_t all;
	int *ends = argument;
	char byte = 0;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, NULL);
	(void)!write(ends[1], &byte, 1);
	for (;;)
		pause();
	return NULL;
}

/* A signal for the process goes to a thread that does not hold it. */
static void other_thread(void)
{
	pthread_t thread;
	int ends[2];
	char byte;

	if (pipe(ends) != 0 || pthread_create(&thread, NULL, holder, ends) != 0)
		exit(97);
	(void)!read(ends[0], &byte, 1);
	for (int round = 0; round < 20; round++) {
		kill(getpid(), SIGSEGV);
		kill(getpid(), SIGBUS);
		kill(getpid(), SIGSYS);
		kill(getpid(), SIGRTMAX);
	}
	/* Real-time signals queue, the others do not have to: all are handled
	 * before `kill` returns. */
	print_seen("beside a thread that holds");
	/* To that thread alone: it stays there. */
	pthread_kill(thread, SIGSEGV);
	pthread_kill(thread, SIGUSR1);
	print_seen("to the thread that holds");
}

static void remove_core(pid_t child)
{
	char name[32];

	snprintf(name, sizeof(name), "core.%d", child);
	(void)unlink(name);
	(void)unlink("core");
}

/* Children that wait and are killed, and that leave core dumps if they may. */
static void killed(void)
{
	const struct rlimit most = { (rlim_t)1 << 30, (rlim_t)1 << 30 };

	(void)setrlimit(RLIMIT_CORE, &most);
	for (int number = 1; number <= 31; number++) {
		int ready[2];
		char byte = 0;

		if (number == SIGSTOP || number == SIGTSTP || number == SIGTTIN ||
		    number == SIGTTOU || number == SIGCHLD || number == SIGCONT ||
		    number == SIGURG || number == SIGWINCH || pipe(ready) != 0)
			continue;
		pid_t child = fork();
		if (child == 0) {
			(void)!write(ready[1], &byte, 1);
			for (;;)
				pause();
		}
		(void)!read(ready[0], &byte, 1);
		kill(child, number);
		report("killed", number, child);
		remove_core(child);
		close(ready[0]);
		close(ready[1]);
	}
}

/* Children that die by every signal that they raise. */
static void deaths(void)
{
	const struct rlimit none = { 0, 0 };

	(void)setrlimit(RLIMIT_CORE, &none);
	for (int number = 1; number <= SIGNALS; number++) {
		/* Whether these stop a child depends on its session. */
		if (number == SIGSTOP || number == SIGTSTP || number == SIGTTIN ||
		    number == SIGTTOU)
			continue;
		pid_t child = fork();
		if (child == 0) {
			raise(number);
			_exit(50);
		}
		report("raised", number, child);
		child = fork();
		if (child == 0) {
			sigset_t all;
			sigfillset(&all);
			sigprocmask(SIG_BLOCK, &all, NULL);
			raise(number);
			sigemptyset(&all);
			sigprocmask(SIG_SETMASK, &all, NULL);
			_exit(51);
		}
		report("raised while held", number, child);
		child = fork();
		if (child == 0) {
			signal(number, SIG_IGN);
			raise(number);
			_exit(52);
		}
		report("ignored", number, child);
	}
}

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "pending") == 0) {
		print_pending();
		return 0;
	}
	/* A shell starts what is in the background with some of them ignored. */
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	for (int number = 1; number <= SIGNALS; number++)
		if (usable(number))
			signal(number, SIG_DFL);
	touch_ballast(argc > 1 ? argv[1] : "8");
	from_parent();
	killed();
	deaths();
	walk_ballast("deaths");
	handle_all();
	one_by_one();
	waited_for();
	suspended();
	over_exec(argv[0]);
	other_thread();
	nested();
	walk_ballast("everything");
	return 0;
}
