/* Sets debug registers of a child as a debugger does, and checks where it stops:
 * watchpoints of every size, breakpoints on instructions, four at once, single
 * steps over a system call. Needs no privilege. Says "watchpoints: well". */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INSTRUCTION = 0, WRITES = 1, ACCESSES = 3 };
enum { ROUNDS = 100 };

static volatile uint8_t watched[64] __attribute__((aligned(64)));
static volatile uint64_t counter __attribute__((aligned(8)));
static volatile int finished;

static void fail(const char *what, long found, long wanted)
{
	printf("watchpoints: %s: %ld, not %ld\n", what, found, wanted);
	exit(1);
}

static void expect(const char *what, long found, long wanted)
{
	if (found != wanted)
		fail(what, found, wanted);
}

static void set_register(pid_t child, int number, unsigned long value)
{
	size_t place = offsetof(struct user, u_debugreg) + sizeof(long) * number;
	if (ptrace(PTRACE_POKEUSER, child, place, value) != 0) {
		printf("watchpoints: debug register %d: %s\n", number, strerror(errno));
		exit(1);
	}
}

static unsigned long reasons(pid_t child)
{
	size_t place = offsetof(struct user, u_debugreg) + sizeof(long) * 6;
	unsigned long value = ptrace(PTRACE_PEEKUSER, child, place, 0);
	set_register(child, 6, 0);
	return value;
}

/* DR7's bits of a breakpoint. */
static unsigned long enabled(int number, unsigned long kind, int length)
{
	unsigned long code = length == 8 ? 2 : (unsigned long)length - 1;
	return 1UL << (2 * number) | (code << 2 | kind) << (16 + 4 * number);
}

__attribute__((noinline)) static void called(void)
{
	__asm__ volatile("" ::: "memory");
}

/* Each byte of `watched` in turn, by stores or loads of one byte. */
static void touch_all(int store)
{
	for (size_t index = 0; index < sizeof watched; index++) {
		if (store)
			watched[index] = (uint8_t)index;
		else
			(void)watched[index];
	}
}

static void count(void)
{
	for (int round = 0; round < ROUNDS; round++) {
		counter++;
		called();
	}
}

static void store_all(void)
{
	touch_all(1);
}

static void load_all(void)
{
	touch_all(0);
}

static void copy_over(void)
{
	static const uint8_t source[sizeof watched];
	__asm__ volatile("rep movsb"
			 :
			 : "S"(source), "D"(watched), "c"(sizeof watched)
			 : "memory");
}

/* A child that stops, and then does `work`. */
static pid_t start(void (*work)(void))
{
	pid_t child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		work();
		finished = 1;
		_exit(0);
	}
	int status;
	waitpid(child, &status, 0);
	if (!WIFSTOPPED(status))
		fail("the child does not stop", status, 0);
	return child;
}

/* Lets the child go on to its next trap; whether there is one. */
static int next_trap(pid_t child)
{
	int status;
	ptrace(PTRACE_CONT, child, 0, 0);
	if (waitpid(child, &status, 0) != child)
		fail("waitpid", errno, 0);
	if (WIFEXITED(status)) {
		expect("the child's status", WEXITSTATUS(status), 0);
		return 0;
	}
	expect("the child's signal", WSTOPSIG(status), SIGTRAP);
	return 1;
}

static void watch_lengths(void)
{
	for (int length = 1; length <= 8; length *= 2) {
		pid_t child = start(store_all);
		set_register(child, 1, (unsigned long)&watched[16]);
		set_register(child, 7, enabled(1, WRITES, length));
		for (int byte = 0; byte < length; byte++) {
			expect("a store", next_trap(child), 1);
			expect("DR6", reasons(child) & 15, 2);
			long word = ptrace(PTRACE_PEEKDATA, child, &watched[16], 0);
			expect("the byte", word >> (8 * byte) & 255, 16 + byte);
		}
		expect("another store", next_trap(child), 0);
	}
	for (int kind = WRITES; kind <= ACCESSES; kind += ACCESSES - WRITES) {
		pid_t child = start(load_all);
		set_register(child, 2, (unsigned long)&watched[8]);
		set_register(child, 7, enabled(2, kind, 8));
		for (int byte = 0; kind == ACCESSES && byte < 8; byte++)
			expect("a load", next_trap(child), 1);
		expect("another load", next_trap(child), 0);
	}
}

static void watch_string(void)
{
	pid_t child = start(copy_over);
	set_register(child, 0, (unsigned long)&watched[32]);
	set_register(child, 7, enabled(0, WRITES, 1));
	expect("the string", next_trap(child), 1);
	expect("DR6", reasons(child) & 15, 1);
	expect("the string again", next_trap(child), 0);
}

/* A loop that is hot, with a watchpoint and a breakpoint in each round. */
static void break_and_watch(void)
{
	pid_t child = start(count);
	set_register(child, 0, (unsigned long)&counter);
	set_register(child, 3, (unsigned long)called);
	set_register(child, 7, enabled(0, WRITES, 8) | enabled(3, INSTRUCTION, 1));
	for (long round = 1; round <= ROUNDS; round++) {
		struct user_regs_struct registers;
		expect("the counter", next_trap(child), 1);
		expect("DR6 of the counter", reasons(child) & 15, 1);
		expect("the value", ptrace(PTRACE_PEEKDATA, child, &counter, 0), round);
		expect("the function", next_trap(child), 1);
		expect("DR6 of the function", reasons(child) & 15, 8);
		ptrace(PTRACE_GETREGS, child, 0, &registers);
		expect("RIP", (long)registers.rip, (long)called);
	}
	expect("another trap", next_trap(child), 0);
}

static void let_go(void)
{
	pid_t child = start(count);
	set_register(child, 0, (unsigned long)&counter);
	set_register(child, 7, enabled(0, WRITES, 8));
	expect("the counter", next_trap(child), 1);
	set_register(child, 7, 0);
	expect("what was let go", next_trap(child), 0);
}

static void call_system(void)
{
	__asm__ volatile("nop\n\tsyscall\n\tnop\n\tnop"
			 :
			 : "a"(SYS_getppid)
			 : "rcx", "r11", "memory");
}

/* Each step is one instruction of the child's, system calls included. */
static void step_over_system_calls(void)
{
	pid_t child = start(call_system);
	int status, seen = 0;
	long before = 0;
	for (int steps = 0; steps < 100000; steps++) {
		struct user_regs_struct registers;
		ptrace(PTRACE_SINGLESTEP, child, 0, 0);
		waitpid(child, &status, 0);
		if (!WIFSTOPPED(status))
			break;
		ptrace(PTRACE_GETREGS, child, 0, &registers);
		long code = ptrace(PTRACE_PEEKTEXT, child, registers.rip, 0);
		/* nop; syscall, and then nop; nop */
		if (before)
			expect("behind the system call", (long)registers.rip, before + 2);
		before = 0;
		if ((code & 0xffffffff) == 0x9090050f) {
			before = (long)registers.rip;
			seen++;
		}
	}
	expect("system calls stepped over", seen, 1);
	if (WIFSTOPPED(status))
		fail("too many steps", status, 0);
}

static volatile sig_atomic_t traps;

static void on_trap(int number)
{
	(void)number;
	traps++;
}

/* A program that steps itself: TF is set when SYSCALL is executed. */
static void step_itself(void)
{
	signal(SIGTRAP, on_trap);
	for (int round = 0; round < ROUNDS; round++) {
		long number = SYS_getppid;
		traps = 0;
		__asm__ volatile("pushfq; orl $0x100, (%%rsp); popfq\n\t"
				 "syscall\n\t"
				 "pushfq; andl $~0x100, (%%rsp); popfq"
				 : "+a"(number)
				 :
				 : "rcx", "r11", "memory", "cc");
		/* pushfq, andl, and popfq, which clears TF. Not syscall: the
		   kernel masks TF, and goes back by IRET, which takes it for
		   the next instruction. */
		expect("traps around a system call", traps, 3);
		expect("its result", number, getppid());
	}
}

int main(void)
{
	watch_lengths();
	watch_string();
	break_and_watch();
	let_go();
	step_over_system_calls();
	step_itself();
	puts("watchpoints: well");
	return 0;
}
