/*
 * What the kernels share: the team that runs one, the suite's random numbers,
 * and how a result is judged.
 *
 * A kernel is written once, for each member of a team: all of them call it at
 * the same time, and it is serial for a team of one. Every process runs one
 * kernel once, so a kernel keeps what its members share in static variables.
 *
 * The kernels are written after D. Bailey and others, "The NAS Parallel
 * Benchmarks", technical report RNR-94-007, NASA Ames, 1994; the published
 * results are those of its classes S and W in version 3.
 */

#ifndef NPB_H
#define NPB_H

#include "../team.h"

#include <math.h>

enum { MEMBERS_MAX = 64, SIZES = 3 };

/* One member's number for a sum; a line each, all on one page. */
struct share {
	_Alignas(LINE) double value;
};

struct team {
	struct gate gate;
	/* Two sets in turns: a member may begin the next sum while others still read. */
	_Alignas(PAGE) struct share shares[2][MEMBERS_MAX];
	int members;
	/* Seconds that members wait for each other at most. */
	double bound;
	/* Where the outcome goes; shared with the parent process. */
	struct outcome *outcome;
};

struct outcome {
	/* Monotonic seconds: inputs made, and result there but not yet judged. */
	double ready, done;
	/* Ended by itself; then `wrong` is empty or says what was not as it must be. */
	int ended;
	char wrong[160];
};

struct member {
	struct team *team;
	int index;
	unsigned int sums;
};

/* A kernel, and what its sizes mean. */
struct kernel {
	const char *name;
	const char *what;
	void (*run)(struct member *member, int size);
	const char *sizes[SIZES];
};

extern const struct kernel EP, IS, CG, MG, FT;

/* --- The team ------------------------------------------------------------- */

static inline void meet(struct member *member)
{
	if (member->team->members > 1)
		gate_meet(&member->team->gate, (uint32_t)member->team->members,
			  member->team->bound);
}

/* The sum of all members' values, the same for all; they meet on the way. */
static inline double sum(struct member *member, double mine)
{
	struct share *shares = member->team->shares[member->sums++ % 2];
	double all = 0;

	shares[member->index].value = mine;
	meet(member);
	for (int i = 0; i < member->team->members; i++)
		all += shares[i].value;
	return all;
}

/* A member's part of `items` things: from `from`, up to and without `to`. */
struct part {
	long from, to;
};

static inline struct part part_of(const struct member *member, long items)
{
	long members = member->team->members, index = member->index;

	return (struct part){items * index / members, items * (index + 1) / members};
}

/* The inputs are made. The members meet. */
static inline void ready(struct member *member)
{
	meet(member);
	if (member->index == 0)
		member->team->outcome->ready = seconds();
}

/* The result is there. The members meet; what follows is not timed. */
static inline void done(struct member *member)
{
	meet(member);
	if (member->index == 0)
		member->team->outcome->done = seconds();
}

/* Unless `right` the run failed, for the reason given; the first one is kept. */
__attribute__((format(printf, 3, 4)))
static inline void judge(struct member *member, int right, const char *format, ...)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	struct outcome *outcome = member->team->outcome;
	va_list arguments;

	if (right)
		return;
	pthread_mutex_lock(&lock);
	if (!outcome->wrong[0]) {
		va_start(arguments, format);
		vsnprintf(outcome->wrong, sizeof(outcome->wrong), format, arguments);
		va_end(arguments);
	}
	pthread_mutex_unlock(&lock);
}

/* Whether a number is `wanted` but for what the order of additions may change. */
static inline int near(double value, double wanted, double relative)
{
	return fabs(value - wanted) <= relative * fabs(wanted);
}

/* --- The random numbers --------------------------------------------------- */

/*
 * x(k+1) = a x(k) modulo 2^46 with a = 5^13; the number is x / 2^46. Members
 * start anywhere in the sequence by skipping.
 */
#define RANDOM_FACTOR UINT64_C(1220703125)
#define RANDOM_MASK ((UINT64_C(1) << 46) - 1)

/* The state after `count` numbers. */
static inline uint64_t random_skip(uint64_t state, uint64_t count)
{
	uint64_t factor = RANDOM_FACTOR;

	/* a^count by squaring; the low 46 bits of a product of 64 are right. */
	for (; count; count >>= 1, factor *= factor)
		if (count & 1)
			state *= factor;
	return state & RANDOM_MASK;
}

/* The next number, between 0 and 1. */
static inline double random_next(uint64_t *state)
{
	*state = *state * RANDOM_FACTOR & RANDOM_MASK;
	return (double)*state * 0x1p-46;
}

#endif
