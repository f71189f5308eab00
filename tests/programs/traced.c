/* Children that are traced: by their own wish, attached and seized, through
 * signals, system calls and an exec. Prints what the tracer sees.
 *
 *     traced [SIZE_MIB] */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ballast.h"

static volatile long word = 41;
static volatile sig_atomic_t handled;
static volatile sig_atomic_t on_alternate;
static char alternate[1 << 16];

static void on_signal(int number)
{
	char here;

	handled += number;
	on_alternate = &here >= alternate && &here < alternate + sizeof(alternate);
}

static int stopped(const char *what, pid_t child)
{
	int status = 0;
	pid_t got = waitpid(child, &status, __WALL);

	if (got != child)
		printf("%s: wait failed: %s\n", what, strerror(errno));
	else if (WIFSTOPPED(status))
		printf("%s: stopped by %d, event %d\n", what, WSTOPSIG(status), status >> 16);
	else if (WIFEXITED(status))
		printf("%s: exit %d\n", what, WEXITSTATUS(status));
	else
		printf("%s: signal %d\n", what, WTERMSIG(status));
	fflush(stdout);
	return status;
}

static void say(const char *what, long answer)
{
	printf("%s: %s\n", what, answer >= 0 ? "done" : strerror(errno));
	fflush(stdout);
}

static void install(int number)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK };

	sigaction(number, &action, NULL);
}

static void use_alternate(void)
{
	const stack_t stack = { .ss_sp = alternate, .ss_size = sizeof(alternate) };

	sigaltstack(&stack, NULL);
}

/* Handlers from before and after, on the alternate stack; memory; signals that
 * the tracer passes on or keeps. */
static void by_own_wish(void)
{
	pid_t child = fork();

	if (child == 0) {
		use_alternate();
		install(SIGUSR1);
		say("traceme", ptrace(PTRACE_TRACEME, 0, NULL, NULL));
		say("traceme again", ptrace(PTRACE_TRACEME, 0, NULL, NULL));
		install(SIGSEGV);
		raise(SIGSTOP);
		if (word != 42)
			_exit(1);
		raise(SIGUSR1);
		raise(SIGUSR2);
		raise(SIGSEGV);
		_exit(handled == SIGUSR1 + SIGSEGV && on_alternate ? 20 : 21);
	}
	stopped("stop", child);
	errno = 0;
	printf("peek %ld\n", ptrace(PTRACE_PEEKDATA, child, (void *)&word, NULL));
	say("poke", ptrace(PTRACE_POKEDATA, child, (void *)&word, 42l));
	say("cont", ptrace(PTRACE_CONT, child, NULL, 0));
	stopped("usr1", child);
	ptrace(PTRACE_CONT, child, NULL, SIGUSR1);
	stopped("usr2", child);
	ptrace(PTRACE_CONT, child, NULL, 0);
	stopped("segv", child);
	ptrace(PTRACE_CONT, child, NULL, SIGSEGV);
	stopped("end", child);
}

/* System calls one by one, registers, single steps. */
static void calls(void)
{
	pid_t child = fork();

	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		raise(SIGSTOP);
		syscall(SYS_getppid);
		syscall(SYS_getuid);
		_exit(22);
	}
	stopped("stop", child);
	say("options", ptrace(PTRACE_SETOPTIONS, child, NULL, PTRACE_O_TRACESYSGOOD));
	struct user_regs_struct *registers = malloc(sizeof(*registers));
	struct iovec *vector = malloc(sizeof(*vector));

	for (int seen = 0; seen < 5; seen++) {
		ptrace(PTRACE_SYSCALL, child, NULL, 0);
		if (!WIFSTOPPED(stopped("call", child)))
			break;
		*vector = (struct iovec){ registers, sizeof(*registers) };
		walk_ballast("a stop");
		say("registers", ptrace(PTRACE_GETREGSET, child, (void *)NT_PRSTATUS, vector));
		if (registers->orig_rax == SYS_getppid || registers->orig_rax == SYS_getuid)
			printf("number %llu, length %zu\n", registers->orig_rax, vector->iov_len);
	}
	for (int step = 0; step < 3; step++) {
		ptrace(PTRACE_SINGLESTEP, child, NULL, 0);
		if (!WIFSTOPPED(stopped("step", child)))
			return;
	}
	say("kill", ptrace(PTRACE_KILL, child, NULL, NULL));
	kill(child, SIGKILL);
	stopped("end", child);
	free(registers);
	free(vector);
}

static void through_exec(void)
{
	pid_t child = fork();

	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, NULL, NULL);
		execl("/bin/sh", "sh", "-c", "exit 23", (char *)NULL);
		_exit(1);
	}
	stopped("exec", child);
	ptrace(PTRACE_CONT, child, NULL, 0);
	stopped("end", child);
}

/* In a wait, and in a loop that makes no call. */
static void attached(int request, int waits)
{
	int ends[2];
	char byte = 0;

	if (pipe(ends) != 0)
		exit(97);
	pid_t child = fork();
	if (child == 0) {
		use_alternate();
		install(SIGUSR1);
		install(SIGUSR2);
		sigset_t none, both;

		sigemptyset(&none);
		sigemptyset(&both);
		sigaddset(&both, SIGUSR1);
		sigaddset(&both, SIGUSR2);
		/* Neither may come between a look and a wait. */
		if (waits)
			sigprocmask(SIG_BLOCK, &both, NULL);
		(void)!write(ends[1], &byte, 1);
		while (handled != SIGUSR1 + SIGUSR2)
			if (waits)
				sigsuspend(&none);
		_exit(on_alternate ? 24 : 25);
	}
	(void)!read(ends[0], &byte, 1);
	say("attach", ptrace(request, child, NULL, NULL));
	if (request == PTRACE_SEIZE)
		say("interrupt", ptrace(PTRACE_INTERRUPT, child, NULL, NULL));
	stopped("attached", child);
	say("cont", ptrace(PTRACE_CONT, child, NULL, 0));
	kill(child, SIGUSR1);
	stopped("usr1", child);
	say("detach", ptrace(PTRACE_DETACH, child, NULL, SIGUSR1));
	kill(child, SIGUSR2);
	stopped("end", child);
	close(ends[0]);
	close(ends[1]);
}

static void refused(void)
{
	say("attach to itself", ptrace(PTRACE_ATTACH, getpid(), NULL, NULL));
	say("attach to nobody", ptrace(PTRACE_ATTACH, 0x3fffffff, NULL, NULL));
	say("peek at nobody", ptrace(PTRACE_PEEKDATA, 0x3fffffff, NULL, NULL));
	say("unknown", ptrace(0x7777, getpid(), NULL, NULL));
}

int main(int argc, char **argv)
{
	touch_ballast(argc > 1 ? argv[1] : "8");
	by_own_wish();
	calls();
	through_exec();
	for (int round = 0; round < 3; round++) {
		attached(PTRACE_ATTACH, 1);
		attached(PTRACE_ATTACH, 0);
		attached(PTRACE_SEIZE, 1);
		attached(PTRACE_SEIZE, 0);
	}
	refused();
	walk_ballast("everything");
	return 0;
}
