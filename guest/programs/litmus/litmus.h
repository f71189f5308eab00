/*
 * What the parts of `litmus` share: a round, its outcome, a test, a batch.
 *
 *   main.c      options, and one test after the other
 *   tests.c     the list of tests; ordering.c, whole.c, locked.c, code.c and
 *               planted.c have them
 *   runner.c    a test's threads, their watchdog, the judging of a batch
 *   batch.c     how many rounds the next batch has, where, and how fast
 *   place.c     where in memory the variables of a batch's rounds are
 *   meeting.c   where threads wait for each other
 *   outcomes.c  how often each outcome was seen
 */

#ifndef LITMUS_H
#define LITMUS_H

#include "../team.h"

enum {
	THREADS_MAX = 4,
	/* Values that a thread can note in a round. */
	READS_MAX = 2,
	/* Rounds between two meetings at most. */
	BATCH_MAX = 512,
	/* So long a way between processors, in microseconds, that a batch takes seconds. */
	SPREAD_MAX_US = 50000,
};

/* --- A round and its outcome ---------------------------------------------- */

/*
 * One go of a test: the variables, of 16 bytes each, aligned to that and zero
 * at the start. No two rounds of a batch share any of their bytes.
 */
struct round {
	volatile uint32_t *x, *y;
	/* From 0 in its batch of `batch_size`, and from 1 among all rounds of the test. */
	int index, batch_size;
	long number;
};

/* What the threads read, and what was in the variables when all had ended. */
struct outcome {
	const struct round *round;
	uint64_t read[THREADS_MAX][READS_MAX];
	uint32_t x, y;
};

/* --- Tests ---------------------------------------------------------------- */

/* A part of an outcome by which outcomes are counted apart. */
enum part { NO_PART, PART_X, PART_Y, PART_READS };
#define READ(thread, number) ((enum part)(PART_READS + (thread) * READS_MAX + (number)))
enum { PARTS_MAX = 4 };

struct test {
	const char *name;
	int threads;
	/* What a thread does in a round; `read` is zero, for what it finds. */
	void (*body)(int thread, const struct round *round, uint64_t *read);
	/* What the model rules out, and what it allows but no interleaving explains. */
	int (*forbidden)(const struct outcome *outcome);
	int (*weak)(const struct outcome *outcome);
	enum part parts[PARTS_MAX];
	/* Puts what belongs to a round, apart from x and y, back to the start. */
	void (*reset)(const struct round *round);
	/* Whether the processor has what it takes; none: it does. */
	int (*possible)(void);
	/* Wrong by intent, to see that wrong is found: runs only where it is named. */
	int planted;
};

/* The tests of a file; the last one has no name. */
extern const struct test ORDERING_TESTS[], WHOLE_TESTS[], LOCKED_TESTS[], CODE_TESTS[],
	PLANTED_TESTS[];

/* All tests in order, and none after the last. */
const struct test *test_at(int index);
const struct test *test_named(const char *name);
/* Makes the memory that tests have beside the variables. */
void prepare_locked_tests(void);
void prepare_code_tests(void);

/* --- Batches -------------------------------------------------------------- */

/* Where the variables of a batch's rounds are. */
enum layout {
	/* Both in one line, 64 rounds in a page. */
	TOGETHER,
	/* Each in a page of its own, which it shares with those of 63 more rounds. */
	APART,
	/*
	 * Each in another page than in the rounds before and after: y of a round in
	 * the page in which x of the next one is.
	 */
	STRIDED,
	LAYOUTS,
};

/* Rounds that the threads go through without waiting for each other. */
struct batch {
	/* 0: there is no more. */
	int size;
	enum layout layout;
	/* The number of its first round. */
	long first;
	/* Ticks from the opening of the gate to the first round, and between rounds. */
	uint64_t lead, pace;
};

/* How batches are chosen: the options -b and -d, and what meetings showed. */
struct pattern {
	/* 0: a mix of sizes. */
	int size;
	/* Ticks; 0 where the processors are on one node. */
	uint64_t spread;
	/* Ticks in a microsecond, at least 1. */
	uint64_t microsecond;
	/* Ticks from the opening of a gate until a thread that waited goes on. */
	uint64_t late;
};

/* Sizes of which there is a mix; they are counted apart. */
enum { SIZES = 3 };
int size_class(int size);

/* The batch that begins after `done` of `rounds` rounds. */
struct batch next_batch(const struct pattern *pattern, long done, long rounds,
			uint32_t *random);
/* The next of a row of random numbers; none of them is 0. */
uint32_t next_random(uint32_t random);

/* --- Places --------------------------------------------------------------- */

void prepare_places(void);
struct round round_at(const struct batch *batch, int index);
/* Sets the variables of all rounds to zero. */
void clear_variables(const struct batch *batch);
/* Reads or writes (a zero) pages of the variables at random, or leaves them. */
void touch_variables(const struct batch *batch, uint32_t random);

/* --- Meetings ------------------------------------------------------------- */

/* Begins a test: nobody waits. */
void meeting_begins(int members);
/* Returns when all members have called it, with the ticks at which they had. */
uint64_t meet(void);
/* What the first thread says to all before a meeting. */
void announce(const struct batch *batch);
struct batch announced(void);

/* --- Outcomes ------------------------------------------------------------- */

void outcomes_begin(void);
/* Counts an outcome; `raced`: two threads were at the round at the same time. */
void count_outcome(const struct test *test, int size_class, const struct outcome *outcome,
		   int raced);
/* The parts of an outcome that tell it apart, as in `0,1`. */
void write_parts(const struct test *test, const struct outcome *outcome, char *text,
		 size_t length);
/* A line for each class of sizes. */
void print_outcomes(const struct test *test);

/* --- Running -------------------------------------------------------------- */

struct run {
	const struct test *test;
	long rounds;
	struct cpus cpus;
	struct pattern pattern;
	/* Monotonic seconds at which it has to be over. */
	double until;
};

void prepare_runs(void);
/* Runs a test, prints what was seen; returns how many outcomes were forbidden. */
long run_test(const struct run *run);

#endif
