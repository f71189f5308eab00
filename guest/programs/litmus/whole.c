/* Aligned accesses are whole: all of a store is seen, or nothing. */

#include "litmus.h"

#include <cpuid.h>

/* One store of eight bytes, one load of eight bytes. */
static void whole_8(int t, const struct round *round, uint64_t *read)
{
	volatile uint64_t *wide = (volatile uint64_t *)round->x;
	uint64_t value = UINT64_MAX;

	if (t == 0)
		__asm__ volatile("movq %1, %0" : "=m"(*wide) : "r"(value) : "memory");
	else
		__asm__ volatile("movq %1, %0" : "=r"(read[0]) : "m"(*wide) : "memory");
}

static int torn(const struct outcome *outcome)
{
	return outcome->read[1][0] != 0 && outcome->read[1][0] != UINT64_MAX;
}

struct pair {
	uint64_t low, high;
};

static volatile struct pair *pair_of(const struct round *round)
{
	return (volatile struct pair *)round->x;
}

/*
 * cmpxchg16b exchanges both halves or none, and reads them together. Notes
 * what was there before, and whether its halves ever did not fit.
 */
static void whole_16(int t, const struct round *round, uint64_t *read)
{
	volatile struct pair *pair = pair_of(round);
	uint64_t low = 0, high = 0;
	unsigned char done;

	(void)t;
	do {
		uint64_t next = low + 1;

		read[0] = low;
		__asm__ volatile("lock cmpxchg16b %1\n\tsete %0"
				 : "=q"(done), "+m"(*pair), "+a"(low), "+d"(high)
				 : "b"(next), "c"(~next)
				 : "memory", "cc");
		if (!done && (low | high) != 0 && high != ~low)
			read[1] = 1;
	} while (!done);
}

static int pair_mixed(const struct outcome *outcome)
{
	volatile struct pair *pair = pair_of(outcome->round);

	return outcome->read[0][1] || outcome->read[1][1] || pair->low != 2 ||
	       pair->high != ~(uint64_t)2;
}

static int has_cmpxchg16b(void)
{
	unsigned int a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && c & bit_CMPXCHG16B;
}

const struct test WHOLE_TESTS[] = {
	{.name = "whole-8", .threads = 2, .body = whole_8, .forbidden = torn,
	 .parts = {READ(1, 0)}},
	{.name = "cmpxchg16b", .threads = 2, .body = whole_16, .forbidden = pair_mixed,
	 .parts = {READ(0, 0), READ(1, 0)}, .possible = has_cmpxchg16b},
	{0},
};
