/* Threads and processes by clone3, which newer C libraries ask for first, and
 * what clone3 and clone refuse.
 *
 *     clones [SIZE_MIB] */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/sched.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ballast.h"

#define STACK_BYTES ((size_t)64 << 10)
#define CLEAR_SIGHAND 0x100000000ull

static long clone3(struct clone_args *args, size_t size)
{
	return syscall(SYS_clone3, args, size);
}

static void say(const char *what, long answer)
{
	printf("%s: %s\n", what, answer >= 0 ? "done" : strerror(errno));
	fflush(stdout);
}

static void report(const char *what, pid_t child)
{
	int status = 0;

	if (waitpid(child, &status, __WALL) != child)
		printf("%s: wait failed: %s\n", what, strerror(errno));
	else if (WIFEXITED(status))
		printf("%s: exit %d\n", what, WEXITSTATUS(status));
	else
		printf("%s: signal %d\n", what, WTERMSIG(status));
	fflush(stdout);
}

/* A thread or a process on a stack of its own: the system call by hand, since
 * what follows it runs on the new stack. It calls `work`, then exits. */
static long on_own_stack(struct clone_args *args, void (*work)(void))
{
	long answer;

	__asm__ volatile("syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "call *%[work]\n\t"
			 "mov %[exit], %%eax\n\t"
			 "mov $7, %%edi\n\t"
			 "syscall\n\t"
			 "hlt\n"
			 "1:"
			 : "=a"(answer)
			 : "a"(SYS_clone3), "D"(args), "S"(sizeof(*args)), [work] "r"(work),
			   [exit] "i"(SYS_exit)
			 : "rcx", "r11", "memory");
	return answer;
}

static char *stack(void)
{
	char *place = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (place == MAP_FAILED)
		exit(97);
	return place;
}

static volatile int mark;
static volatile pid_t parent_word, child_word;
static volatile int pidfd;

static void set_mark(void)
{
	/* Both words were written before the thread's first instruction. */
	mark = parent_word != 0 && parent_word == child_word ? 1 : 2;
}

static void wait_for_end(void)
{
	pid_t now;

	while ((now = child_word) != 0)
		syscall(SYS_futex, &child_word, FUTEX_WAIT, now, NULL, NULL, 0);
}

static void thread(void)
{
	char *place = stack();
	unsigned long base = 0;

	syscall(SYS_arch_prctl, 0x1003, &base);
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
			 CLONE_SYSVSEM | CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID |
			 CLONE_CHILD_CLEARTID,
		.parent_tid = (uintptr_t)&parent_word,
		.child_tid = (uintptr_t)&child_word,
		.stack = (uintptr_t)place,
		.stack_size = STACK_BYTES,
		.tls = base,
	};
	/* Both may be elsewhere, and are needed before the thread is. */
	walk_ballast("making a stack");
	mark = 0;
	parent_word = 0;
	/* Not 0 before the thread is there to write its number. */
	child_word = -1;
	long answer = on_own_stack(&args, set_mark);

	printf("thread: %d\n", answer > 0);
	wait_for_end();
	printf("thread's mark: %d\n", mark);
	munmap(place, STACK_BYTES);
}

static void borrower(void)
{
	char *place = stack();
	struct clone_args args = {
		.flags = CLONE_VM | CLONE_VFORK | CLONE_PIDFD | CLONE_PARENT_SETTID |
			 CLONE_CHILD_SETTID,
		.pidfd = (uintptr_t)&pidfd,
		.parent_tid = (uintptr_t)&parent_word,
		.child_tid = (uintptr_t)&child_word,
		.exit_signal = SIGCHLD,
		.stack = (uintptr_t)place,
		.stack_size = STACK_BYTES,
	};

	mark = 0;
	pidfd = -1;
	long child = on_own_stack(&args, set_mark);

	printf("borrower: mark %d, pidfd %d\n", mark, fcntl(pidfd, F_GETFD));
	close(pidfd);
	report("borrower", (pid_t)child);
	/* One that runs beside its parent, which waits for the word. */
	args.flags = CLONE_VM | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
	mark = 0;
	parent_word = 0;
	child_word = -1;
	walk_ballast("setting words");
	child = on_own_stack(&args, set_mark);
	wait_for_end();
	printf("beside: mark %d\n", mark);
	report("beside", (pid_t)child);
}

static void forked(void)
{
	static int inherited = -1;
	struct clone_args args = {
		.flags = CLONE_PIDFD | CLONE_PARENT_SETTID | CLONE_CHILD_SETTID |
			 CLONE_CHILD_CLEARTID,
		.pidfd = (uintptr_t)&inherited,
		.parent_tid = (uintptr_t)&parent_word,
		.child_tid = (uintptr_t)&child_word,
		.exit_signal = SIGCHLD,
	};

	child_word = 0;
	walk_ballast("clearing a word");
	long child = clone3(&args, sizeof(args));

	if (child == 0) {
		walk_ballast("a fork");
		_exit(child_word == getpid() ? 11 : 12);
	}
	printf("fork: %d %d\n", parent_word == child, child_word);
	struct pollfd ended = { .fd = inherited, .events = POLLIN };

	printf("pidfd: %d %d\n", fcntl(inherited, F_GETFD), poll(&ended, 1, -1));
	siginfo_t info = { 0 };

	printf("waitid: %d", waitid(P_PIDFD, (id_t)inherited, &info, WEXITED));
	printf(" %d\n", info.si_status);
	close(inherited);
	struct clone_args quiet = { .flags = 0 };

	child = clone3(&quiet, CLONE_ARGS_SIZE_VER0);
	if (child == 0)
		_exit(13);
	report("no signal", (pid_t)child);
}

static void on_signal(int number)
{
	_exit(100 + number);
}

static void die_unhandled(void)
{
	raise(SIGUSR1);
}

/* Handlers go, what is ignored stays. */
static void handlers(void)
{
	struct clone_args args = { .flags = CLEAR_SIGHAND, .exit_signal = SIGCHLD };
	char *place = stack();

	signal(SIGUSR1, on_signal);
	signal(SIGSEGV, on_signal);
	signal(SIGUSR2, SIG_IGN);
	long child = clone3(&args, sizeof(args));

	if (child == 0) {
		struct sigaction action;

		raise(SIGUSR2);
		sigaction(SIGSEGV, NULL, &action);
		if (action.sa_handler != SIG_DFL)
			_exit(14);
		raise(SIGUSR1);
		_exit(15);
	}
	report("cleared", (pid_t)child);
	args.flags |= CLONE_VM | CLONE_VFORK;
	args.stack = (uintptr_t)place;
	args.stack_size = STACK_BYTES;
	child = on_own_stack(&args, die_unhandled);
	report("cleared, shared memory", (pid_t)child);
	args.flags |= CLONE_SIGHAND;
	say("cleared and shared", clone3(&args, sizeof(args)));
	struct sigaction action;

	sigaction(SIGUSR1, NULL, &action);
	printf("own handler: %d\n", action.sa_handler == on_signal);
	munmap(place, STACK_BYTES);
}

static void expect_refused(const char *what, struct clone_args args, size_t size)
{
	long answer = clone3(&args, size);

	if (answer == 0)
		_exit(0);
	say(what, answer);
	if (answer > 0)
		waitpid((pid_t)answer, NULL, __WALL);
}

static void refused(void)
{
	struct {
		struct clone_args args;
		unsigned long more;
	} longer = { .args = { .exit_signal = SIGCHLD }, .more = 1 };
	const struct clone_args plain = { .exit_signal = SIGCHLD };
	struct clone_args args = plain;
	size_t size = sizeof(args);
	int number = 1;

	say("too long", clone3(&longer.args, sizeof(longer)));
	longer.more = 0;
	long child = clone3(&longer.args, sizeof(longer));
	if (child == 0)
		_exit(0);
	say("longer, but zero", child);
	if (child > 0)
		waitpid((pid_t)child, NULL, 0);
	say("a page and more", clone3(&args, 4097));
	expect_refused("too short", plain, CLONE_ARGS_SIZE_VER0 - 1);
	say("bad address", clone3((void *)8, size));
	args.exit_signal = 65;
	expect_refused("bad signal", args, size);
	args = plain;
	args.flags = SIGCHLD;
	expect_refused("signal in the flags", args, size);
	args.flags = CLONE_DETACHED;
	expect_refused("detached", args, size);
	args.flags = 1ull << 60;
	expect_refused("unknown flag", args, size);
	args.flags = CLONE_THREAD;
	expect_refused("thread without memory", args, size);
	args.flags = CLONE_SIGHAND;
	expect_refused("handlers without memory", args, size);
	args.flags = CLONE_FS | CLONE_NEWNS;
	expect_refused("two file systems", args, size);
	args = plain;
	args.stack = 4096;
	expect_refused("stack without length", args, size);
	args.stack = 0;
	args.stack_size = 4096;
	expect_refused("length without stack", args, size);
	args.stack = -4096ull;
	expect_refused("stack at the end", args, size);
	args = plain;
	args.flags = CLONE_SETTLS;
	args.tls = 1ull << 63;
	expect_refused("bad base", args, size);
	args.flags = CLONE_PIDFD;
	args.pidfd = 8;
	expect_refused("pidfd at a bad address", args, size);
	args.flags = CLONE_PIDFD | CLONE_PARENT_SETTID;
	args.pidfd = args.parent_tid = (uintptr_t)&number;
	expect_refused("pidfd and number at one place", args, size);
	args = plain;
	args.set_tid = (uintptr_t)&number;
	expect_refused("set_tid without a count", args, size);
	args.set_tid_size = 33;
	expect_refused("set_tid too many", args, size);
	args.set_tid_size = 1;
	expect_refused("set_tid taken", args, size);
	args.set_tid = 8;
	expect_refused("set_tid at a bad address", args, size);
	args = plain;
	args.flags = 0x200000000ull;
	args.cgroup = 1;
	expect_refused("cgroup that is a pipe", args, size);
	args.cgroup = 100000;
	expect_refused("cgroup that is not open", args, size);
	/* The older call: a pidfd goes where the number would. */
	say("clone with both", syscall(SYS_clone, CLONE_PIDFD | CLONE_PARENT_SETTID | SIGCHLD, 0,
				       &number, 0, 0));
	say("clone with a bad base", syscall(SYS_clone, CLONE_SETTLS | SIGCHLD, 0, 0, 0, 1ull << 63));
}

int main(int argc, char **argv)
{
	touch_ballast(argc > 1 ? argv[1] : "8");
	for (int round = 0; round < 20; round++)
		thread();
	borrower();
	forked();
	handlers();
	refused();
	walk_ballast("everything");
	return 0;
}
