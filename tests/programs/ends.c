/* Ways to end, and signals on the way.
 *
 *     ends exit CODE        exit status CODE, through exit()
 *     ends _exit CODE       the same without flushing
 *     ends return CODE      from main
 *     ends abort            SIGABRT
 *     ends segv             SIGSEGV by a write to an unmapped address
 *     ends segv-readonly    SIGSEGV by a write to read-only memory
 *     ends fpe              SIGFPE by a division by zero
 *     ends ill              SIGILL
 *     ends bus              SIGBUS beyond the end of a mapped file
 *     ends kill SIGNAL      kills itself with SIGNAL, default action
 *     ends handler          SIGUSR1 handler on the alternate stack
 *     ends siglongjmp       leaves SIGSEGV and SIGALRM handlers by siglongjmp
 *     ends restart          a read interrupted by SIGALRM, with SA_RESTART and without
 *     ends mask             blocked, pending, sigwaitinfo, sigsuspend
 *     ends timer            setitimer in a loop that computes
 *     ends orphan           leaves a child that outlives it for a moment
 *
 * A size in MiB as the last argument makes each of them touch that much
 * memory first. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static unsigned char *ballast;
static size_t ballast_bytes;

static void touch_ballast(const char *size)
{
	ballast_bytes = (size_t)atol(size) << 20;
	ballast = malloc(ballast_bytes + 1);
	if (ballast == NULL)
		exit(99);
	for (size_t i = 0; i < ballast_bytes; i += 512)
		ballast[i] = (unsigned char)(i >> 9);
	for (size_t i = 0; i < ballast_bytes; i += 512) {
		if (ballast[i] != (unsigned char)(i >> 9)) {
			printf("wrong byte at %zu\n", i);
			exit(98);
		}
	}
}

static volatile sig_atomic_t handled;
static volatile uintptr_t handler_stack;
static volatile uintptr_t fault_address;
static sigjmp_buf back;

static void on_signal(int number)
{
	int here;

	handled += number;
	handler_stack = (uintptr_t)&here;
}

static void on_fault(int number, siginfo_t *info, void *context)
{
	(void)context;
	handled = number;
	fault_address = (uintptr_t)info->si_addr;
	siglongjmp(back, 1);
}

static void install(int number, void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };

	if (sigaction(number, &action, NULL) != 0)
		exit(97);
}

static void run_handler(void)
{
	static unsigned char stack[65536];
	stack_t alternate = { .ss_sp = stack, .ss_size = sizeof(stack) };

	sigaltstack(&alternate, NULL);
	install(SIGUSR1, on_signal, SA_ONSTACK);
	raise(SIGUSR1);
	int inside = handler_stack >= (uintptr_t)stack &&
		     handler_stack < (uintptr_t)stack + sizeof(stack);
	printf("handled %d, on the alternate stack: %d\n", (int)handled, inside);
}

static void run_siglongjmp(void)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
	volatile int faults = 0;

	sigaction(SIGSEGV, &action, NULL);
	for (volatile int round = 0; round < 20; round++) {
		if (sigsetjmp(back, 1) == 0)
			*(volatile int *)(uintptr_t)(0x10 + round) = 1;
		else if (fault_address == (uintptr_t)(0x10 + round) && handled == SIGSEGV)
			faults++;
	}
	printf("faults %d\n", faults);
	sigaction(SIGALRM, &action, NULL);
	struct itimerval soon = { .it_value = { .tv_usec = 20000 } };
	if (sigsetjmp(back, 1) == 0) {
		setitimer(ITIMER_REAL, &soon, NULL);
		for (volatile uint64_t n = 0;; n++)
			if (ballast_bytes > 0)
				ballast[n * 4096 % ballast_bytes] += 1;
	}
	printf("left the loop by signal %d\n", (int)handled);
}

static void run_restart(void)
{
	for (int restart = 1; restart >= 0; restart--) {
		int ends[2];
		char byte = 0;

		if (pipe(ends) != 0)
			exit(96);
		handled = 0;
		install(SIGALRM, on_signal, restart ? SA_RESTART : 0);
		pid_t child = fork();
		if (child == 0) {
			usleep(300000);
			_exit(write(ends[1], "x", 1) == 1 ? 0 : 1);
		}
		struct itimerval soon = { .it_value = { .tv_usec = 50000 } };
		setitimer(ITIMER_REAL, &soon, NULL);
		ssize_t got = read(ends[0], &byte, 1);
		printf("restart %d: read %zd %s, handled %d\n", restart, got,
		       got < 0 ? strerror(errno) : "", (int)handled);
		waitpid(child, NULL, 0);
		close(ends[0]);
		close(ends[1]);
	}
}

static void run_mask(void)
{
	sigset_t set, pending, empty;
	siginfo_t info;

	install(SIGUSR1, on_signal, 0);
	install(SIGUSR2, on_signal, 0);
	sigemptyset(&empty);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGUSR2);
	sigprocmask(SIG_BLOCK, &set, NULL);
	raise(SIGUSR1);
	sigpending(&pending);
	printf("handled %d, pending %d %d\n", (int)handled, sigismember(&pending, SIGUSR1),
	       sigismember(&pending, SIGUSR2));
	printf("waited for %d\n", sigwaitinfo(&set, &info));
	printf("from itself %d, handled %d\n", info.si_pid == getpid(), (int)handled);
	kill(getpid(), SIGUSR2);
	sigsuspend(&empty);
	printf("handled %d\n", (int)handled);
}

static void run_timer(void)
{
	struct itimerval often = { .it_interval = { .tv_usec = 5000 }, .it_value = { .tv_usec = 5000 } };
	uint64_t sum = 0;

	install(SIGALRM, on_signal, SA_RESTART);
	setitimer(ITIMER_REAL, &often, NULL);
	for (uint64_t n = 0; handled < 20 * SIGALRM; n++) {
		sum += n;
		if (ballast_bytes > 0)
			ballast[n * 4096 % ballast_bytes] = (unsigned char)n;
	}
	memset(&often, 0, sizeof(often));
	setitimer(ITIMER_REAL, &often, NULL);
	printf("twenty ticks, counted: %d\n", sum > 0);
}

static void run_bus(void)
{
	FILE *file = tmpfile();

	if (file == NULL || ftruncate(fileno(file), 4096) != 0)
		exit(95);
	volatile char *map = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
	if (map == MAP_FAILED)
		exit(94);
	map[0] = 1;
	printf("first page written\n");
	fflush(stdout);
	map[4096] = 1;
}

static int end(const char *how, int number)
{
	if (strcmp(how, "exit") == 0)
		exit(number);
	if (strcmp(how, "_exit") == 0)
		_exit(number);
	if (strcmp(how, "abort") == 0)
		abort();
	if (strcmp(how, "segv") == 0)
		*(volatile int *)(uintptr_t)(8 + number) = 1;
	else if (strcmp(how, "segv-readonly") == 0)
		*(volatile char *)(uintptr_t)"text" = 'x';
	else if (strcmp(how, "fpe") == 0)
		__asm__ volatile("xor %%edx, %%edx; mov $1, %%eax; xor %%ecx, %%ecx; div %%ecx"
				 ::: "eax", "ecx", "edx");
	else if (strcmp(how, "ill") == 0)
		__asm__ volatile("ud2");
	else if (strcmp(how, "bus") == 0)
		run_bus();
	else if (strcmp(how, "kill") == 0)
		kill(getpid(), number);
	else if (strcmp(how, "handler") == 0)
		run_handler();
	else if (strcmp(how, "siglongjmp") == 0)
		run_siglongjmp();
	else if (strcmp(how, "restart") == 0)
		run_restart();
	else if (strcmp(how, "mask") == 0)
		run_mask();
	else if (strcmp(how, "timer") == 0)
		run_timer();
	else if (strcmp(how, "orphan") == 0) {
		if (fork() == 0) {
			usleep(200000);
			_exit(write(STDOUT_FILENO, "child\n", 6) == 6 ? 0 : 1);
		}
	} else if (strcmp(how, "return") != 0) {
		fprintf(stderr, "ends: unknown way: %s\n", how);
		return 2;
	}
	return number;
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		fprintf(stderr, "usage: ends WAY [NUMBER [SIZE_MIB]]\n");
		return 2;
	}
	if (argc > 3)
		touch_ballast(argv[3]);
	printf("%s\n", argv[1]);
	fflush(stdout);
	return end(argv[1], argc > 2 ? atoi(argv[2]) : 0);
}
