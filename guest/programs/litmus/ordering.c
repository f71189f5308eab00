/*
 * In which order stores are seen: the classic tests.
 *
 * The model and the tests' names: P. Sewell and others, "x86-TSO: a rigorous
 * and usable programmer's model for x86 multiprocessors", CACM 53(7), 2010;
 * Intel SDM volume 3, chapter "Multiple-Processor Management", section
 * "Memory Ordering".
 */

#include "litmus.h"

#include "access.h"

/* The variable that this thread stores to first, and the other one. */
static volatile uint32_t *own(int t, const struct round *round)
{
	return t ? round->y : round->x;
}

static volatile uint32_t *other(int t, const struct round *round)
{
	return t ? round->x : round->y;
}

/* SB: each stores, then reads the other's. 0,0 is the store buffer's mark. */
static void sb(int t, const struct round *round, uint64_t *read)
{
	store(own(t, round), 1);
	read[0] = load(other(t, round));
}

static void sb_mfence(int t, const struct round *round, uint64_t *read)
{
	store(own(t, round), 1);
	fence();
	read[0] = load(other(t, round));
}

/* An exchange is a locked instruction: it empties the buffer as a fence does. */
static void sb_xchg(int t, const struct round *round, uint64_t *read)
{
	exchange(own(t, round), 1);
	read[0] = load(other(t, round));
}

/* A locked instruction on a third address orders what is around it, too. */
static void sb_lock(int t, const struct round *round, uint64_t *read)
{
	uint32_t mine = 0;

	store(own(t, round), 1);
	__asm__ volatile("lock addl $0, %0" : "+m"(mine) :: "memory", "cc");
	read[0] = load(other(t, round));
}

static int both_zero(const struct outcome *outcome)
{
	return outcome->read[0][0] == 0 && outcome->read[1][0] == 0;
}

/* MP: a message, then its flag. */
static void mp(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		store(round->x, 1);
		store(round->y, 1);
	} else {
		read[0] = load(round->y);
		read[1] = load(round->x);
	}
}

static int flag_without_message(const struct outcome *outcome)
{
	return outcome->read[1][0] == 1 && outcome->read[1][1] == 0;
}

/* LB: each reads, then stores what the other reads. */
static void lb(int t, const struct round *round, uint64_t *read)
{
	read[0] = load(own(t, round));
	store(other(t, round), 1);
}

static int both_one(const struct outcome *outcome)
{
	return outcome->read[0][0] == 1 && outcome->read[1][0] == 1;
}

/* S: a store that follows a read may not come before what was read. */
static void s(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		store(round->x, 2);
		store(round->y, 1);
	} else {
		read[0] = load(round->y);
		store(round->x, 1);
	}
}

static int overwritten(const struct outcome *outcome)
{
	return outcome->read[1][0] == 1 && outcome->x == 2;
}

/* R with a fence: the last store to y is seen to come before the read of x. */
static void r_mfence(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		store(round->x, 1);
		store(round->y, 1);
	} else {
		store(round->y, 2);
		fence();
		read[0] = load(round->x);
	}
}

static int late_store_early_read(const struct outcome *outcome)
{
	return outcome->y == 2 && outcome->read[1][0] == 0;
}

/* 2+2W: each stores to both, in opposite order. */
static void two_plus_two_w(int t, const struct round *round, uint64_t *read)
{
	(void)read;
	store(own(t, round), 1);
	store(other(t, round), 2);
}

static int first_stores_last(const struct outcome *outcome)
{
	return outcome->x == 1 && outcome->y == 1;
}

/* CoRR: two reads of one place never go back in time. */
static void corr(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		store(round->x, 1);
	} else {
		read[0] = load(round->x);
		read[1] = load(round->x);
	}
}

/* CoWR: who reads another's store after its own, lost to it for good. */
static void cowr(int t, const struct round *round, uint64_t *read)
{
	store(round->x, t ? 2 : 1);
	read[0] = load(round->x);
}

static int overtaken_twice(const struct outcome *outcome)
{
	return (outcome->x == 1 && outcome->read[0][0] == 2) ||
	       (outcome->x == 2 && outcome->read[1][0] == 1);
}

/* WRC: what one has read, everyone who reads its store has too. */
static void wrc(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		store(round->x, 1);
	} else if (t == 1) {
		read[0] = load(round->x);
		store(round->y, 1);
	} else {
		read[0] = load(round->y);
		read[1] = load(round->x);
	}
}

static int causality_broken(const struct outcome *outcome)
{
	return outcome->read[1][0] == 1 && outcome->read[2][0] == 1 &&
	       outcome->read[2][1] == 0;
}

/* IRIW: two readers agree on the order of two writers' stores. */
static void iriw(int t, const struct round *round, uint64_t *read)
{
	if (t < 2) {
		store(own(t, round), 1);
	} else {
		read[0] = load(own(t - 2, round));
		read[1] = load(other(t - 2, round));
	}
}

static int readers_disagree(const struct outcome *outcome)
{
	return outcome->read[2][0] == 1 && outcome->read[2][1] == 0 &&
	       outcome->read[3][0] == 1 && outcome->read[3][1] == 0;
}

const struct test ORDERING_TESTS[] = {
	{.name = "SB", .threads = 2, .body = sb, .weak = both_zero,
	 .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "SB+mfence", .threads = 2, .body = sb_mfence, .forbidden = both_zero,
	 .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "SB+xchg", .threads = 2, .body = sb_xchg, .forbidden = both_zero,
	 .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "SB+lock", .threads = 2, .body = sb_lock, .forbidden = both_zero,
	 .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "MP", .threads = 2, .body = mp, .forbidden = flag_without_message,
	 .parts = {READ(1, 0), READ(1, 1)}},
	{.name = "LB", .threads = 2, .body = lb, .forbidden = both_one,
	 .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "S", .threads = 2, .body = s, .forbidden = overwritten,
	 .parts = {READ(1, 0), PART_X}},
	{.name = "R+mfence", .threads = 2, .body = r_mfence,
	 .forbidden = late_store_early_read, .parts = {READ(1, 0), PART_Y}},
	{.name = "2+2W", .threads = 2, .body = two_plus_two_w,
	 .forbidden = first_stores_last, .parts = {PART_X, PART_Y}},
	{.name = "CoRR", .threads = 2, .body = corr, .forbidden = flag_without_message,
	 .parts = {READ(1, 0), READ(1, 1)}},
	{.name = "CoWR", .threads = 2, .body = cowr, .forbidden = overtaken_twice,
	 .parts = {READ(0, 0), READ(1, 0), PART_X}},
	{.name = "WRC", .threads = 3, .body = wrc, .forbidden = causality_broken,
	 .parts = {READ(1, 0), READ(2, 0), READ(2, 1)}},
	{.name = "IRIW", .threads = 4, .body = iriw, .forbidden = readers_disagree,
	 .parts = {READ(2, 0), READ(2, 1), READ(3, 0), READ(3, 1)}},
	{0},
};
