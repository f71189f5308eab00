/*
 * What the programs that run on several processors share: which processors,
 * pinning, clocks, numbers from the command line, memory in whole pages, and a
 * gate at which threads meet.
 *
 * To be included first. Messages go to standard error and begin with the
 * program's name. Exit codes: 2 bad input or a system call that failed, 3 a
 * wait that took longer than its bound.
 */

#ifndef TEAM_H
#define TEAM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
	PAGE = 4096,
	LINE = 64,
	/* Processors that a program can name, and threads that it can start. */
	CPUS_MAX = 256,
	EXIT_USAGE = 2,
	EXIT_BOUND = 3,
	/* Looks at a word before the processor is offered to somebody else. */
	SPINS_BEFORE_YIELD = 2000,
};

/* Says what went wrong and ends. */
__attribute__((noreturn, format(printf, 2, 3)))
static inline void end(int code, const char *format, ...)
{
	char text[256];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	/* What other threads print may hold the lock of stdout for ever. */
	dprintf(STDERR_FILENO, "%s: %s\n", program_invocation_short_name, text);
	_exit(code);
}

/* Monotonic seconds. */
static inline double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/*
 * The time-stamp counter. In a measured loop, since the pages from which
 * clock_gettime reads change at every tick: on several nodes they travel.
 */
static inline uint64_t ticks(void)
{
	return __builtin_ia32_rdtsc();
}

/* Ticks in a second, measured for 20 ms. */
static inline double ticks_per_second(void)
{
	double start = seconds(), now;
	uint64_t first = ticks();

	do
		now = seconds();
	while (now < start + 0.02);
	return (double)(ticks() - first) / (now - start);
}

/* A whole number from `min` to `max`; ends with a message that names `what`. */
static inline long number(const char *what, const char *text, long min, long max)
{
	char *rest;
	long value;

	errno = 0;
	value = strtol(text, &rest, 10);
	if (errno || rest == text || *rest || value < min || value > max)
		end(EXIT_USAGE, "%s is %s: it takes a whole number from %ld to %ld",
		    what, text, min, max);
	return value;
}

/* Processors to run on, in the order in which threads get them. */
struct cpus {
	int count;
	int cpu[CPUS_MAX];
};

/* All that are online and allowed. */
static inline struct cpus cpus_allowed(void)
{
	struct cpus cpus = {0};
	cpu_set_t set;

	if (sched_getaffinity(0, sizeof(set), &set))
		end(EXIT_USAGE, "sched_getaffinity: %s", strerror(errno));
	for (int cpu = 0; cpu < CPUS_MAX; cpu++)
		if (CPU_ISSET(cpu, &set))
			cpus.cpu[cpus.count++] = cpu;
	return cpus;
}

/* `0,2-3`: each has to be online. Ends with a message that names the wrong one. */
static inline struct cpus cpus_named(const char *text)
{
	struct cpus allowed = cpus_allowed(), cpus = {0};
	char copy[256], *left = copy, *word;

	if (strlen(text) >= sizeof(copy))
		end(EXIT_USAGE, "the list of processors is too long");
	strcpy(copy, text);
	while ((word = strsep(&left, ","))) {
		char *dash = strchr(word, '-');
		long from, to;

		if (dash)
			*dash++ = 0;
		from = number("a processor", word, 0, CPUS_MAX - 1);
		to = dash ? number("a processor", dash, from, CPUS_MAX - 1) : from;
		for (long cpu = from; cpu <= to; cpu++) {
			int there = 0;

			for (int i = 0; i < allowed.count; i++)
				there |= allowed.cpu[i] == cpu;
			if (!there)
				end(EXIT_USAGE, "processor %ld is not online", cpu);
			if (cpus.count == CPUS_MAX)
				end(EXIT_USAGE, "more than %d processors", CPUS_MAX);
			cpus.cpu[cpus.count++] = (int)cpu;
		}
	}
	return cpus;
}

/* Binds the calling thread to one processor. */
static inline void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		end(EXIT_USAGE, "cannot run on processor %d: %s", cpu, strerror(errno));
}

/* Zeroed memory that begins on a page; `sharing` is MAP_PRIVATE or MAP_SHARED. */
static inline void *pages(size_t bytes, int sharing)
{
	void *area = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
			  sharing | MAP_ANONYMOUS, -1, 0);

	if (area == MAP_FAILED)
		end(EXIT_USAGE, "no memory for %zu bytes: %s", bytes, strerror(errno));
	return area;
}

static inline pthread_t start_thread(void *(*body)(void *), void *argument)
{
	pthread_t thread;
	int error = pthread_create(&thread, NULL, body, argument);

	if (error)
		end(EXIT_USAGE, "cannot start a thread: %s", strerror(error));
	return thread;
}

/* Waits at most `bound` seconds for a thread's end; says whether it came. */
static inline int join_within(pthread_t thread, double bound)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_nsec += (long)((bound - (double)(long)bound) * 1e9);
	until.tv_sec += (long)bound + until.tv_nsec / 1000000000;
	until.tv_nsec %= 1000000000;
	return pthread_timedjoin_np(thread, NULL, &until) == 0;
}

/* One look at a word that another processor writes. */
static inline void relax(long spins)
{
	__asm__ volatile("pause");
	/* Processors may share a core of the host, and threads a processor. */
	if (spins % SPINS_BEFORE_YIELD == 0)
		sched_yield();
}

/*
 * Where threads meet. `waiting` of them have come for turn `turn`; the last
 * one clears `waiting`, then begins the next turn. Who has waited for a while
 * sleeps on `turn`, having said so in `sleepers`.
 */
struct gate {
	_Alignas(PAGE) uint32_t waiting;
	uint32_t turn;
	uint32_t sleepers;
};

/*
 * Returns when `members` threads have called it; ends when that takes `bound`
 * seconds. `noipa`: the compiler would see that nothing in here writes a
 * static variable of the caller's, and keep what it read before the meeting.
 */
__attribute__((noipa, unused))
static void gate_meet(struct gate *gate, uint32_t members, double bound)
{
	uint32_t turn = __atomic_load_n(&gate->turn, __ATOMIC_SEQ_CST);
	struct timespec nap = {.tv_sec = 1};
	double since;

	if (__atomic_add_fetch(&gate->waiting, 1, __ATOMIC_SEQ_CST) == members) {
		__atomic_store_n(&gate->waiting, 0, __ATOMIC_SEQ_CST);
		__atomic_store_n(&gate->turn, turn + 1, __ATOMIC_SEQ_CST);
		if (__atomic_load_n(&gate->sleepers, __ATOMIC_SEQ_CST))
			syscall(SYS_futex, &gate->turn, FUTEX_WAKE_PRIVATE, INT32_MAX,
				NULL, NULL, 0);
		return;
	}
	for (int spins = 1; spins < SPINS_BEFORE_YIELD; spins++) {
		if (__atomic_load_n(&gate->turn, __ATOMIC_ACQUIRE) != turn)
			return;
		__asm__ volatile("pause");
	}
	__atomic_add_fetch(&gate->sleepers, 1, __ATOMIC_SEQ_CST);
	since = seconds();
	while (__atomic_load_n(&gate->turn, __ATOMIC_SEQ_CST) == turn) {
		syscall(SYS_futex, &gate->turn, FUTEX_WAIT_PRIVATE, turn, &nap, NULL, 0);
		if (seconds() > since + bound &&
		    __atomic_load_n(&gate->turn, __ATOMIC_SEQ_CST) == turn)
			end(EXIT_BOUND, "a thread on processor %d waited %.0f s for the others, "
			    "at their meeting %u: %u of %u came", sched_getcpu(), bound, turn,
			    __atomic_load_n(&gate->waiting, __ATOMIC_SEQ_CST), members);
	}
	__atomic_sub_fetch(&gate->sleepers, 1, __ATOMIC_SEQ_CST);
}

#endif
