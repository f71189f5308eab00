/*
 * What a guest's everyday operations cost, timed by the guest's own clock.
 *
 *   bench [-q] [NAME...]            -q: a tenth of the rounds, for a quick look
 *   bench -t NAME COMMAND [WORD...] runs a command once, its output thrown away
 *
 * Prints one line per figure, `NAME VALUE UNIT`: of its own figures the median
 * of five runs.
 * Smaller is better for every unit but MB/s.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RUNS = 5, PAGE = 4096 };

/* Rounds are divided by this. */
static long divisor = 1;

/* Keeps the compiler from leaving out a loop whose result nobody reads. */
static volatile uint64_t kept;
static volatile double kept_double;

static void die(const char *what)
{
	fprintf(stderr, "bench: %s: %s\n", what, strerror(errno));
	exit(1);
}

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Each measure runs `rounds` operations and returns the seconds they took. */

static double run_getpid(long rounds)
{
	double start = seconds();

	for (long i = 0; i < rounds; i++)
		kept = (uint64_t)syscall(SYS_getpid);
	return seconds() - start;
}

static double run_clock(long rounds)
{
	double start = seconds();

	for (long i = 0; i < rounds; i++)
		kept_double = seconds();
	return seconds() - start;
}

/* First touches of anonymous memory, with the calls that map and unmap it. */
static double run_page_fault(long rounds)
{
	size_t length = (size_t)rounds * PAGE;
	double start = seconds();
	char *area = mmap(NULL, length, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (area == MAP_FAILED)
		die("mmap");
	for (size_t at = 0; at < length; at += PAGE)
		area[at] = 1;
	munmap(area, length);
	return seconds() - start;
}

static double run_fork(long rounds)
{
	double start = seconds();

	for (long i = 0; i < rounds; i++) {
		pid_t child = fork();

		if (child < 0)
			die("fork");
		if (child == 0)
			_exit(0);
		waitpid(child, NULL, 0);
	}
	return seconds() - start;
}

/* Starts this very program, which ends at once when it is called so. */
static const char EXEC_MARK[] = "-exec-child";

static double run_fork_exec(long rounds)
{
	double start = seconds();

	for (long i = 0; i < rounds; i++) {
		pid_t child = fork();
		int status;

		if (child < 0)
			die("fork");
		if (child == 0) {
			execl("/proc/self/exe", "bench", EXEC_MARK, (char *)NULL);
			_exit(127);
		}
		waitpid(child, &status, 0);
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
			errno = ENOEXEC;
			die("exec of /proc/self/exe");
		}
	}
	return seconds() - start;
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		die("sched_setaffinity");
}

/* A byte there and back between two processes; the partner runs on `cpu`. */
static double ping_pong(long rounds, int cpu)
{
	int there[2], back[2];
	cpu_set_t before;
	char byte = 0;
	double start, took;
	pid_t partner;

	if (pipe(there) || pipe(back))
		die("pipe");
	if (sched_getaffinity(0, sizeof(before), &before))
		die("sched_getaffinity");
	pin(0);
	partner = fork();
	if (partner < 0)
		die("fork");
	if (partner == 0) {
		pin(cpu);
		close(there[1]);
		while (read(there[0], &byte, 1) == 1)
			if (write(back[1], &byte, 1) != 1)
				_exit(1);
		_exit(0);
	}
	close(there[0]);
	start = seconds();
	for (long i = 0; i < rounds; i++)
		if (write(there[1], &byte, 1) != 1 || read(back[0], &byte, 1) != 1)
			die("pipe");
	took = seconds() - start;
	close(there[1]);
	waitpid(partner, NULL, 0);
	close(back[0]);
	close(back[1]);
	if (sched_setaffinity(0, sizeof(before), &before))
		die("sched_setaffinity");
	return took;
}

static double run_pipe(long rounds)
{
	return ping_pong(rounds, 0);
}

static double run_pipe_cross(long rounds)
{
	return ping_pong(rounds, 1);
}

/* Registers only: a multiplication, an addition, a branch. */
static double run_spin(long rounds)
{
	uint64_t x = 1;
	double start = seconds();

	for (long i = 0; i < rounds; i++)
		x = x * 6364136223846793005u + 1442695040888963407u;
	kept = x;
	return seconds() - start;
}

/* Integer work with branches, memory and calls: a sort of 4096 numbers. */
static int ascending(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static double run_sort(long rounds)
{
	static uint32_t numbers[4096];
	uint32_t state = 12345;
	double start = seconds();

	for (long i = 0; i < rounds; i++) {
		for (size_t k = 0; k < 4096; k++) {
			state = state * 1664525u + 1013904223u;
			numbers[k] = state >> 8;
		}
		qsort(numbers, 4096, sizeof(numbers[0]), ascending);
		kept = numbers[7];
	}
	return seconds() - start;
}

/* Scalar SSE2 doubles: points of the Mandelbrot set, 64 steps each at most. */
static double run_mandelbrot(long rounds)
{
	long inside = 0;
	double start = seconds();

	for (long i = 0; i < rounds; i++) {
		double cr = -2.0 + 3.0 * (double)(i % 317) / 317.0;
		double ci = -1.5 + 3.0 * (double)(i % 211) / 211.0;
		double zr = 0, zi = 0;
		int step = 0;

		while (step < 64 && zr * zr + zi * zi <= 4.0) {
			double next = zr * zr - zi * zi + cr;

			zi = 2.0 * zr * zi + ci;
			zr = next;
			step++;
		}
		inside += step == 64;
	}
	kept = (uint64_t)inside;
	return seconds() - start;
}

/* Doubles with division and square root: five bodies that attract each other. */
static double run_nbody(long rounds)
{
	double place[5][3], speed[5][3] = {{0}}, mass[5];
	double start;

	for (int b = 0; b < 5; b++) {
		mass[b] = 1.0 / (b + 1);
		for (int k = 0; k < 3; k++)
			place[b][k] = (double)((b * 7 + k * 3) % 11) - 5.0;
	}
	start = seconds();
	for (long i = 0; i < rounds; i++) {
		for (int a = 0; a < 5; a++) {
			for (int b = a + 1; b < 5; b++) {
				double d[3], square = 0.01, pull;

				for (int k = 0; k < 3; k++) {
					d[k] = place[a][k] - place[b][k];
					square += d[k] * d[k];
				}
				pull = 0.001 / (square * sqrt(square));
				for (int k = 0; k < 3; k++) {
					speed[a][k] -= d[k] * mass[b] * pull;
					speed[b][k] += d[k] * mass[a] * pull;
				}
			}
		}
		for (int b = 0; b < 5; b++)
			for (int k = 0; k < 3; k++)
				place[b][k] += 0.001 * speed[b][k];
	}
	kept_double = place[0][0];
	return seconds() - start;
}

enum { COPY_BYTES = 1 << 20 };

/* The library's memcpy over a megabyte; a round copies 1 MB. */
static double run_copy(long rounds)
{
	static char from[COPY_BYTES], to[COPY_BYTES];
	double start;

	memset(from, 1, sizeof(from));
	memset(to, 2, sizeof(to));
	start = seconds();
	for (long i = 0; i < rounds; i++) {
		memcpy(to, from, sizeof(to));
		from[i % COPY_BYTES]++;
		__asm__ volatile("" ::: "memory");
	}
	kept = (uint64_t)to[9];
	return seconds() - start;
}

/* Dependent loads over 8 MB, one line at a time: the cost of an access. */
static double run_chase(long rounds)
{
	enum { LINES = 1 << 17 };
	static struct { uint32_t next; char rest[60]; } lines[LINES];
	uint32_t at = 0;
	double start;

	/* An odd step through a power of two visits every line once. */
	for (uint32_t i = 0; i < LINES; i++)
		lines[i].next = (i + 48271) % LINES;
	start = seconds();
	for (long i = 0; i < rounds; i++)
		at = lines[at].next;
	kept = at;
	return seconds() - start;
}

static const struct measure {
	const char *name;
	double (*run)(long rounds);
	long rounds;
	/* The figure is seconds per round times `scale`; MB/s: rounds per second. */
	const char *unit;
	double scale;
	int cpus;
} MEASURES[] = {
	{"getpid", run_getpid, 100000, "us", 1e6, 1},
	{"clock_gettime", run_clock, 100000, "us", 1e6, 1},
	{"page_fault", run_page_fault, 4000, "us", 1e6, 1},
	{"fork_exit_wait", run_fork, 100, "us", 1e6, 1},
	{"fork_exec_wait", run_fork_exec, 50, "us", 1e6, 1},
	{"pipe_round_trip", run_pipe, 5000, "us", 1e6, 1},
	{"pipe_round_trip_2cpu", run_pipe_cross, 2000, "us", 1e6, 2},
	{"spin_100M", run_spin, 20000000, "s", 1e8, 1},
	{"sort_4096", run_sort, 20, "ms", 1e3, 1},
	{"mandelbrot_100k", run_mandelbrot, 50000, "ms", 1e8, 1},
	{"nbody_10k", run_nbody, 10000, "ms", 1e7, 1},
	{"memory_copy", run_copy, 200, "MB/s", 1.048576, 1},
	{"pointer_chase", run_chase, 2000000, "ns", 1e9, 1},
};

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void measure(const struct measure *m)
{
	long rounds = m->rounds / divisor > 0 ? m->rounds / divisor : 1;
	double took[RUNS], value;

	for (int i = 0; i < RUNS; i++)
		took[i] = m->run(rounds);
	qsort(took, RUNS, sizeof(took[0]), by_value);
	value = took[RUNS / 2] / (double)rounds;
	value = strcmp(m->unit, "MB/s") ? value * m->scale : m->scale / value;
	printf("%s %.4g %s\n", m->name, value, m->unit);
}

/* Ends as the command did. */
static int time_command(const char *name, char **command)
{
	double start = seconds();
	pid_t child = fork();
	int status;

	if (child < 0)
		die("fork");
	if (child == 0) {
		if (!freopen("/dev/null", "w", stdout))
			_exit(127);
		execvp(command[0], command);
		fprintf(stderr, "bench: %s: %s\n", command[0], strerror(errno));
		_exit(127);
	}
	waitpid(child, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
		fprintf(stderr, "bench: %s failed\n", name);
		return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
	}
	printf("%s %.4g s\n", name, seconds() - start);
	return 0;
}

static int wanted(const char *name, char **names)
{
	if (!*names)
		return 1;
	for (; *names; names++)
		if (!strcmp(*names, name))
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	char **names = argv + 1;
	int matched = 0;

	if (argc == 2 && !strcmp(argv[1], EXEC_MARK))
		return 0;
	if (argc > 3 && !strcmp(argv[1], "-t"))
		return time_command(argv[2], argv + 3);
	if (*names && !strcmp(*names, "-q")) {
		divisor = 10;
		names++;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (size_t i = 0; i < sizeof(MEASURES) / sizeof(MEASURES[0]); i++) {
		if (!wanted(MEASURES[i].name, names))
			continue;
		matched = 1;
		if (MEASURES[i].cpus <= sysconf(_SC_NPROCESSORS_ONLN))
			measure(&MEASURES[i]);
	}
	if (!matched) {
		fprintf(stderr, "bench: no such measure:");
		for (; *names; names++)
			fprintf(stderr, " %s", *names);
		fprintf(stderr, "\n");
		return 2;
	}
	return 0;
}
