/*
 * EP, embarrassingly parallel: pairs of Gaussian deviates by the polar method,
 * counted by square rings. The members meet only to add up.
 *
 * Judged by: counts that sum to the accepted pairs and follow the normal
 * distribution; sums of the deviates that are published; a sequence
 * of random numbers that ends where the next batch's begins.
 */

#include "npb.h"

enum { RINGS = 10, BATCH = 1 << 12 };

#define EP_SEED UINT64_C(271828183)

/* The logarithm of the number of pairs. */
static const int LOG_PAIRS[SIZES] = {20, 25, 28};

/* The published sums of the deviates; 0 where there are none. */
static const struct { double x, y; } SUMS[SIZES] = {
	{0, 0},
	{-2.863319731645753e3, -6.320053679109499e3},
	{-4.295875165629892e3, -1.580732573678431e4},
};

struct tally {
	double x, y;
	double accepted;
	double rings[RINGS];
};

static void run_batch(struct member *member, long batch, struct tally *tally)
{
	uint64_t state = random_skip(EP_SEED, (uint64_t)batch * 2 * BATCH);

	for (int i = 0; i < BATCH; i++) {
		double x = 2 * random_next(&state) - 1;
		double y = 2 * random_next(&state) - 1;
		double square = x * x + y * y, scale, larger;

		if (square > 1)
			continue;
		scale = sqrt(-2 * log(square) / square);
		x *= scale;
		y *= scale;
		larger = fmax(fabs(x), fabs(y));
		tally->rings[(int)larger]++;
		tally->x += x;
		tally->y += y;
		tally->accepted++;
	}
	judge(member, state == random_skip(EP_SEED, (uint64_t)(batch + 1) * 2 * BATCH),
	      "batch %ld does not end where the next begins", batch);
}

/* Whether a count of `all` trials is within six deviations of its expectation. */
static int likely(double count, double all, double chance)
{
	return fabs(count - all * chance) <= 6 * sqrt(all * chance * (1 - chance)) + 6;
}

static void verify(struct member *member, int size, const struct tally *tally)
{
	double pairs = ldexp(1, LOG_PAIRS[size]), counted = 0, inner = 0;

	judge(member, likely(tally->accepted, pairs, M_PI / 4),
	      "%.0f of %.0f pairs accepted", tally->accepted, pairs);
	for (int ring = 0; ring < RINGS; ring++) {
		double within = erf((ring + 1) * M_SQRT1_2), outer = within * within;

		judge(member, likely(tally->rings[ring], tally->accepted, outer - inner),
		      "ring %d holds %.0f of %.0f pairs", ring, tally->rings[ring],
		      tally->accepted);
		inner = outer;
		counted += tally->rings[ring];
	}
	judge(member, counted == tally->accepted, "the rings hold %.0f of %.0f pairs",
	      counted, tally->accepted);
	judge(member, fabs(tally->x) < 6 * sqrt(pairs) && fabs(tally->y) < 6 * sqrt(pairs),
	      "the deviates sum to %g and %g", tally->x, tally->y);
	if (SUMS[size].x != 0)
		judge(member, near(tally->x, SUMS[size].x, 1e-8) &&
			      near(tally->y, SUMS[size].y, 1e-8),
		      "the deviates sum to %.12g and %.12g", tally->x, tally->y);
}

static void ep(struct member *member, int size)
{
	struct part batches = part_of(member, (1L << LOG_PAIRS[size]) / BATCH);
	struct tally tally = {0};

	ready(member);
	for (long batch = batches.from; batch < batches.to; batch++)
		run_batch(member, batch, &tally);
	tally.x = sum(member, tally.x);
	tally.y = sum(member, tally.y);
	tally.accepted = sum(member, tally.accepted);
	for (int ring = 0; ring < RINGS; ring++)
		tally.rings[ring] = sum(member, tally.rings[ring]);
	done(member);
	if (member->index == 0)
		verify(member, size, &tally);
}

const struct kernel EP = {
	"ep", "pairs of Gaussian deviates: no sharing", ep,
	{"2^20 pairs", "2^25 pairs (NPB's class W)", "2^28 pairs (NPB's class A)"},
};
