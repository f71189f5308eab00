/* Goes to another node, and does something there:
 *
 *     elsewhere copy     copies with instructions that need a page of each node
 *     elsewhere fill     touches new memory until no node has room
 *     elsewhere call     makes a system call that a slice may not make, with the
 *                        runtime's own instruction, which no dispatch stops
 *     elsewhere clocks   asks for the time, and the processor, in every way: the
 *                        execution stays where it is
 *     elsewhere spin     computes, without a fault, until it is ended
 *
 * Where it is it knows by polling a descriptor that only home has, with that
 * same instruction. Natively, and before it has left, it ends with 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096u
#define BYTES (24u << 20)
#define SWEEPS 64
/* A descriptor that the program has and no slice. */
#define MARK 200

static const unsigned char *instruction; /* syscall; pop rbx; ret */
static unsigned char *memory;

static void find_instruction(void)
{
	static const unsigned char wanted[] = {0x0f, 0x05, 0x5b, 0xc3};
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];

	while (maps && fgets(line, sizeof line, maps)) {
		unsigned long start, end;

		if (!strstr(line, "weft-runtime") || !strstr(line, "r-xp") ||
		    sscanf(line, "%lx-%lx", &start, &end) != 2)
			continue;
		instruction = memmem((void *)start, end - start, wanted, sizeof wanted);
	}
	if (maps)
		fclose(maps);
	if (!instruction) {
		fprintf(stderr, "elsewhere: this process has no runtime\n");
		exit(1);
	}
}

static long raw(long number, long a, long b, long c)
{
	long result;

	__asm__ volatile("sub $128, %%rsp\n"
			 "lea 1f(%%rip), %%rcx\n"
			 "push %%rcx\n"
			 "push %%rbx\n"
			 "jmp *%[instruction]\n"
			 "1: add $128, %%rsp\n"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), [instruction] "r"(instruction)
			 : "rcx", "r11", "memory");
	return result;
}

static int is_away(void)
{
	static struct pollfd mark = {.fd = MARK};

	mark.revents = 0; /* and the page is here, for the kernel to write to */
	raw(SYS_poll, (long)&mark, 1, 0);
	return mark.revents & POLLNVAL;
}

static void go_away(void)
{
	for (int sweep = 0; sweep < SWEEPS; sweep++) {
		for (size_t at = 0; at < BYTES; at += PAGE) {
			((volatile unsigned char *)memory)[at]++;
			if (is_away())
				return;
		}
	}
	fprintf(stderr, "elsewhere: the execution did not leave home\n");
	exit(1);
}

static int clocks(void)
{
	struct timespec now = {0}, step = {0};
	struct timeval day = {0};
	unsigned cpu = ~0u, node = ~0u;
	time_t seconds = 0;

	/* The pages are here, for the kernel to write to. */
	if (syscall(SYS_clock_gettime, CLOCK_REALTIME, &now) ||
	    syscall(SYS_clock_getres, CLOCK_MONOTONIC, &step) ||
	    syscall(SYS_clock_getres, CLOCK_MONOTONIC, NULL) ||
	    syscall(SYS_gettimeofday, &day, NULL) ||
	    syscall(SYS_gettimeofday, NULL, NULL) ||
	    syscall(SYS_time, &seconds) != seconds ||
	    syscall(SYS_time, NULL) < seconds ||
	    syscall(SYS_getcpu, &cpu, &node, NULL))
		return 2;
	/* time(2): it counts seconds at ticks, so it may be a tick behind. */
	if (step.tv_sec || !step.tv_nsec || day.tv_sec < now.tv_sec ||
	    day.tv_usec >= 1000000 || seconds < day.tv_sec - 1 ||
	    seconds > day.tv_sec + 60 || cpu == ~0u || node == ~0u)
		return 3;
	if (syscall(SYS_clock_getres, 12345, &step) != -1 || errno != EINVAL ||
	    syscall(SYS_gettimeofday, (void *)8, NULL) != -1 || errno != EFAULT)
		return 4;
	return is_away() ? 0 : 5;
}

static void copy(void)
{
	uint64_t sum = 0;

	for (size_t at = 0; at < BYTES; at += PAGE)
		memcpy(memory + at, &at, sizeof at);
	for (size_t at = 0; at < BYTES / 2; at += PAGE) {
		void *from = memory + at, *to = memory + BYTES - PAGE - at;

		__asm__ volatile("movsq" : "+S"(from), "+D"(to) : : "memory");
	}
	for (size_t at = 0; at < BYTES; at += PAGE)
		sum = sum * 31 + *(uint64_t *)(memory + at);
	printf("%016lx\n", sum);
}

int main(int count, char **arguments)
{
	const char *mode = count > 1 ? arguments[1] : "";
	size_t all = (size_t)1 << 30;

	memory = mmap(NULL, all, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (memory == MAP_FAILED)
		return 1;
	if (!strcmp(mode, "copy")) {
		copy();
		return 0;
	}
	find_instruction();
	if (dup2(0, MARK) != MARK)
		return 1;
	go_away();
	if (!strcmp(mode, "fill")) {
		for (size_t at = BYTES; at < all; at += PAGE)
			((volatile unsigned char *)memory)[at] = 1;
	} else if (!strcmp(mode, "call")) {
		/* At home it may be made. */
		for (int tries = 0; tries < SWEEPS; tries++) {
			raw(SYS_getpid, 0, 0, 0);
			go_away();
		}
	} else if (!strcmp(mode, "clocks")) {
		return clocks();
	} else if (!strcmp(mode, "spin")) {
		for (;;)
			__asm__ volatile("pause");
	}
	return 1;
}
