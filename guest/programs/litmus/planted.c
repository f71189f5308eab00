/*
 * Tests that are wrong by intent: their forbidden outcomes do happen where
 * rounds race. A run of one shows whether wrong is found.
 */

#include "litmus.h"

#include "access.h"

/* The flag comes before its message. */
static void flag_first(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		store(round->y, 1);
		store(round->x, 1);
	} else {
		read[0] = load(round->y);
		read[1] = load(round->x);
	}
}

static int flag_without_message(const struct outcome *outcome)
{
	return outcome->read[1][0] == 1 && outcome->read[1][1] == 0;
}

/* SB without a fence, as if stores were seen at once: rare between nodes. */
static void sb(int t, const struct round *round, uint64_t *read)
{
	store(t ? round->y : round->x, 1);
	read[0] = load(t ? round->x : round->y);
}

static int both_zero(const struct outcome *outcome)
{
	return outcome->read[0][0] == 0 && outcome->read[1][0] == 0;
}

/* Additions without a lock; y is looked at in their midst, to have them slow. */
static void plain_inc(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	for (int i = 0; i < 8; i++) {
		uint32_t seen = load(round->x);

		store(round->y, seen);
		store(round->x, seen + 1);
	}
	read[0] = load(round->x);
}

static int increments_lost(const struct outcome *outcome)
{
	return outcome->x != 16;
}

const struct test PLANTED_TESTS[] = {
	{.name = "planted-MP", .threads = 2, .body = flag_first,
	 .forbidden = flag_without_message, .parts = {READ(1, 0), READ(1, 1)}, .planted = 1},
	{.name = "planted-SB", .threads = 2, .body = sb, .forbidden = both_zero,
	 .parts = {READ(0, 0), READ(1, 0)}, .planted = 1},
	{.name = "planted-inc", .threads = 2, .body = plain_inc,
	 .forbidden = increments_lost, .parts = {READ(0, 0), PART_X}, .planted = 1},
	{0},
};
