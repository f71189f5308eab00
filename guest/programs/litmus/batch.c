/*
 * Which batch comes next.
 *
 * A meeting of threads on several nodes takes as long as hundreds of rounds,
 * so most rounds are in big batches; but most batches are small, with rounds for
 * which all threads begin at about the same time, each with its pages or
 * without. In a batch a thread's rounds begin at times that all know
 * beforehand, by the counter that they all read (as with `timebase` of litmus7:
 * J. Alglave and others, "Litmus: running tests against hardware", TACAS
 * 2011); who is late goes on at once.
 */

#include "litmus.h"

/* Of 16 batches, how many have which size. */
static const struct {
	int size, share;
} MIX[SIZES] = {{1, 6}, {16, 7}, {BATCH_MAX, 3}};

/* So that a run of few rounds has several batches, too. */
enum { BATCHES_MIN = 8 };

int size_class(int size)
{
	return size == MIX[0].size ? 0 : size <= MIX[1].size ? 1 : 2;
}

uint32_t next_random(uint32_t random)
{
	random ^= random << 13;
	random ^= random >> 17;
	return random ^ random << 5;
}

static int mixed_size(uint32_t random)
{
	int share = (int)(random % 16);

	for (int i = 0; i < SIZES - 1; i++) {
		share -= MIX[i].share;
		if (share < 0)
			return MIX[i].size;
	}
	return MIX[SIZES - 1].size;
}

static long least(long a, long b)
{
	return a < b ? a : b;
}

/*
 * Ticks between rounds. On one node, up to some rounds' length. Between nodes,
 * where a page takes about the `spread`: from none, when a thread does hundreds
 * of rounds before it loses its page, to so much that pages come and go in each
 * round and most rounds race. Big batches are mostly fast, as they would take
 * too long.
 */
static uint64_t choose_pace(const struct pattern *pattern, int size, uint32_t random)
{
	static const unsigned char EIGHTHS[] = {0, 0, 4, 4, 8, 8, 16, 16};
	static const unsigned char EIGHTHS_OF_BIG[] = {0, 0, 0, 0, 1, 1, 4, 8};

	if (!pattern->spread)
		return random % 4 ? pattern->microsecond / 4 << (random % 4 - 1) : 0;
	if (size == 1)
		return pattern->spread;
	return pattern->spread *
	       (size > MIX[1].size ? EIGHTHS_OF_BIG : EIGHTHS)[random % 8] / 8;
}

struct batch next_batch(const struct pattern *pattern, long done, long rounds,
			uint32_t *random)
{
	struct batch batch = {.first = done + 1};
	long size;

	*random = next_random(*random);
	size = pattern->size;
	if (!size) {
		long share = rounds / BATCHES_MIN;

		size = least(mixed_size(*random >> 4), share ? share : 1);
	}
	batch.size = (int)least(size, rounds - done);
	batch.layout = (enum layout)(*random >> 12) % LAYOUTS;
	batch.pace = choose_pace(pattern, batch.size, *random >> 20);
	/* Mostly so that the others have come before the one who opened the gate begins. */
	batch.lead = pattern->late / 2 * ((*random >> 24) % 4 + 1);
	return batch;
}
