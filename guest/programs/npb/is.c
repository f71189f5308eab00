/*
 * IS, integer sort: ranks of small whole numbers, by buckets. Each member
 * spreads its keys over all buckets, then counts the keys of its own: every
 * page of the buckets is written by many and read by one.
 *
 * Judged by: in each round, keys that all belong to the bucket they are in,
 * and buckets that are full; at the end, ranks that put every key into a place
 * of its own, in ascending order.
 */

#include "npb.h"

enum { LOG_BUCKETS = 9, BUCKETS = 1 << LOG_BUCKETS };

#define IS_SEED UINT64_C(314159265)

static const struct problem {
	int log_keys, log_values;
	uint32_t rounds;
} PROBLEMS[SIZES] = {
	{16, 11, 10},
	{21, 17, 40},
	{22, 18, 80},
};

static uint32_t *keys;
/* The keys by bucket; and for each value the number of smaller keys. */
static uint32_t *bucketed, *ranks;
/* How many keys of each bucket a member has: counts[member][bucket]. */
static uint32_t (*counts)[BUCKETS];

static void make_keys(struct part mine, uint32_t values)
{
	uint64_t state = random_skip(IS_SEED, (uint64_t)mine.from * 4);

	for (long i = mine.from; i < mine.to; i++) {
		double four = 0;

		for (int k = 0; k < 4; k++)
			four += random_next(&state);
		keys[i] = (uint32_t)(values / 4.0 * four);
	}
}

/* Where bucket `bucket` begins, and in it the place of `member`'s first key. */
static void find_places(const struct member *member, uint32_t begin[BUCKETS + 1],
			uint32_t place[BUCKETS])
{
	uint32_t before = 0;

	for (int bucket = 0; bucket < BUCKETS; bucket++) {
		begin[bucket] = before;
		for (int i = 0; i < member->team->members; i++) {
			if (i == member->index)
				place[bucket] = before;
			before += counts[i][bucket];
		}
	}
	begin[BUCKETS] = before;
}

/* One ranking of all keys. `shift` leads from a key to its bucket. */
static void rank(struct member *member, struct part mine, long total, int shift)
{
	struct part own = part_of(member, BUCKETS);
	uint32_t begin[BUCKETS + 1], place[BUCKETS];
	uint32_t *count = counts[member->index];

	memset(count, 0, sizeof(counts[0]));
	for (long i = mine.from; i < mine.to; i++)
		count[keys[i] >> shift]++;
	meet(member);
	find_places(member, begin, place);
	judge(member, begin[BUCKETS] == total, "the buckets count %u of %ld keys",
	      begin[BUCKETS], total);
	for (long i = mine.from; i < mine.to; i++) {
		uint32_t at = place[keys[i] >> shift]++;

		/* A wrong count may lead anywhere: it was judged above. */
		if (at < total)
			bucketed[at] = keys[i];
	}
	meet(member);
	for (long bucket = own.from; bucket < own.to; bucket++) {
		uint32_t first = (uint32_t)bucket << shift, last = first + (1u << shift);
		uint32_t before = begin[bucket];

		memset(ranks + first, 0, sizeof(*ranks) << shift);
		for (uint32_t i = begin[bucket]; i < begin[bucket + 1] && i < total; i++) {
			uint32_t key = bucketed[i];

			if (key >= first && key < last)
				ranks[key]++;
		}
		for (uint32_t value = first; value < last; value++) {
			uint32_t here = ranks[value];

			ranks[value] = before;
			before += here;
		}
		judge(member, before == begin[bucket + 1],
		      "bucket %ld holds keys that are not its own", bucket);
	}
	meet(member);
}

/* Puts all keys where their ranks say. */
static void verify(struct member *member, long total)
{
	uint32_t *sorted = pages((size_t)total * sizeof(*sorted), MAP_PRIVATE);
	uint32_t *next = ranks;

	memset(sorted, 0xff, (size_t)total * sizeof(*sorted));
	for (long i = 0; i < total; i++) {
		uint32_t at = next[keys[i]]++;

		if (at >= total || sorted[at] != UINT32_MAX) {
			judge(member, 0, "key %ld has place %u, which is not free", i, at);
			return;
		}
		sorted[at] = keys[i];
	}
	/* As many keys as places, and none taken twice: a permutation. */
	for (long i = 1; i < total; i++)
		judge(member, sorted[i - 1] <= sorted[i], "place %ld holds %u, the next %u",
		      i - 1, sorted[i - 1], sorted[i]);
}

static void is(struct member *member, int size)
{
	const struct problem *problem = &PROBLEMS[size];
	long total = 1L << problem->log_keys;
	uint32_t values = 1u << problem->log_values;
	struct part mine = part_of(member, total);

	if (member->index == 0) {
		keys = pages((size_t)total * sizeof(*keys), MAP_PRIVATE);
		bucketed = pages((size_t)total * sizeof(*bucketed), MAP_PRIVATE);
		ranks = pages(values * sizeof(*ranks), MAP_PRIVATE);
		counts = pages((size_t)member->team->members * sizeof(*counts), MAP_PRIVATE);
	}
	meet(member);
	make_keys(mine, values);
	ready(member);
	for (uint32_t round = 1; round <= problem->rounds; round++) {
		/* Each round sorts something new. */
		if (member->index == 0) {
			keys[round] = round;
			keys[round + problem->rounds] = values - round;
		}
		meet(member);
		rank(member, mine, total, problem->log_values - LOG_BUCKETS);
	}
	done(member);
	if (member->index == 0)
		verify(member, total);
}

const struct kernel IS = {
	"is", "integer sort by buckets: all to all", is,
	{"2^16 keys, 10 rounds (NPB's class S)", "2^21 keys, 40 rounds",
	 "2^22 keys, 80 rounds"},
};
