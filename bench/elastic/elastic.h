/* What the six programs of ElasticOS's table 1 share: arguments, a
 * deterministic random source, the clock and the closing report.
 *
 * Every program is called as
 *
 *     PROGRAM [SIZE_MIB [SEED]]
 *
 * allocates about SIZE_MIB MiB, fills it from SEED, does its work and prints
 * one line on standard output, a function of the arguments alone:
 *
 *     NAME SIZE_MIB SEED CHECKSUM
 *
 * and one line on standard error, which names the phases:
 *
 *     set-up 0.412345 s, measured 1.234567 s
 *
 * With SETUP_ONLY in the environment it ends after the set-up, so that the
 * traffic of the measured phase can be told from that of the set-up.
 *
 * Nothing here is specific to Weft. */
#ifndef WEFT_BENCH_ELASTIC_H
#define WEFT_BENCH_ELASTIC_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The arguments of one run, and when its phases began. */
struct bench {
	const char *name;
	size_t size_mib;
	uint64_t seed;
	double setup_start_s;
	double measured_start_s;
};

static inline double now_s(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static inline void usage(const char *name)
{
	fprintf(stderr, "usage: %s [SIZE_MIB [SEED]]\n", name);
	exit(2);
}

static inline uint64_t parse_count(const char *text, const char *name)
{
	char *end;
	unsigned long long value = strtoull(text, &end, 10);

	if (end == text || *end != '\0')
		usage(name);
	return value;
}

/* Parses the arguments and starts the set-up phase. */
static inline struct bench bench_start(int argc, char **argv, const char *name)
{
	struct bench bench = { .name = name, .size_mib = 64, .seed = 1 };

	if (argc > 3)
		usage(name);
	if (argc > 1)
		bench.size_mib = parse_count(argv[1], name);
	if (argc > 2)
		bench.seed = parse_count(argv[2], name);
	if (bench.size_mib == 0)
		usage(name);
	bench.setup_start_s = now_s();
	return bench;
}

static inline size_t bench_bytes(const struct bench *bench)
{
	return bench->size_mib << 20;
}

/* Ends the set-up phase. */
static inline void bench_measure(struct bench *bench)
{
	if (getenv("SETUP_ONLY") != NULL)
		exit(0);
	bench->measured_start_s = now_s();
}

/* Ends the measured phase and prints both lines. */
static inline int bench_finish(const struct bench *bench, uint64_t checksum)
{
	double end_s = now_s();

	printf("%s %zu %llu %016llx\n", bench->name, bench->size_mib,
	       (unsigned long long)bench->seed, (unsigned long long)checksum);
	fprintf(stderr, "set-up %.6f s, measured %.6f s\n",
		bench->measured_start_s - bench->setup_start_s,
		end_s - bench->measured_start_s);
	return fflush(stdout) == 0 ? 0 : 1;
}

static inline void *allocate(size_t bytes)
{
	void *memory = malloc(bytes);

	if (memory == NULL) {
		fprintf(stderr, "cannot allocate %zu bytes\n", bytes);
		exit(1);
	}
	return memory;
}

/* xorshift64*: a fixed sequence for a fixed seed, on every machine. */
struct random {
	uint64_t state;
};

static inline struct random random_from(uint64_t seed)
{
	return (struct random){ .state = seed * 0x9e3779b97f4a7c15u + 1 };
}

static inline uint64_t random_next(struct random *random)
{
	random->state ^= random->state >> 12;
	random->state ^= random->state << 25;
	random->state ^= random->state >> 27;
	return random->state * 0x2545f4914f6cdd1du;
}

/* Folds one value into a checksum whose result depends on the order. */
static inline uint64_t fold(uint64_t checksum, uint64_t value)
{
	checksum ^= value;
	checksum *= 0x100000001b3u;
	return checksum ^ (checksum >> 29);
}

#endif
