/*
 * EP for MPI: `ep LOG_PAIRS`. Pairs of Gaussian deviates by the polar method,
 * shared out among the ranks, counted by square rings. The ranks meet only to
 * add up, and rank 0 judges the result: 0 if it is right, 1 if it is not, 2 for
 * a wrong argument.
 *
 * Written after D. Bailey and others, "The NAS Parallel Benchmarks", technical
 * report RNR-94-007, NASA Ames, 1994. Judged by the sums that are published for
 * 2^24 to 2^32 pairs; for other sizes by the normal distribution, and always by
 * counts that sum to the accepted pairs, and batches that end where the next
 * ones begin.
 */

#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { RINGS = 10, LOG_BATCH = 12, LOG_PAIRS_MAX = 36 };

#define BATCH (1L << LOG_BATCH)
#define SEED UINT64_C(271828183)
#define FACTOR UINT64_C(1220703125) /* 5^13 */
#define MODULUS_MASK ((UINT64_C(1) << 46) - 1)

/* The published sums of the deviates. */
static const struct {
	int log_pairs;
	double x, y;
} PUBLISHED[] = {
	{24, -3.247834652034740e3, -6.958407078382297e3},
	{25, -2.863319731645753e3, -6.320053679109499e3},
	{28, -4.295875165629892e3, -1.580732573678431e4},
	{30, 4.033815542441498e4, -2.660669192809235e4},
	{32, 4.764367927995374e4, -8.084072988043731e4},
};

/* All numbers of a rank, so that one reduction adds them. */
enum { X, Y, ACCEPTED, BROKEN, RING, TALLIES = RING + RINGS };

static double random_next(uint64_t *state)
{
	*state = *state * FACTOR & MODULUS_MASK;
	return (double)*state * 0x1p-46;
}

/* The state `steps` numbers after `state`. */
static uint64_t random_skip(uint64_t state, uint64_t steps)
{
	uint64_t factor = FACTOR;

	for (; steps; steps >>= 1) {
		if (steps & 1)
			state = state * factor & MODULUS_MASK;
		factor = factor * factor & MODULUS_MASK;
	}
	return state;
}

static void run_batch(long batch, double *tally)
{
	uint64_t state = random_skip(SEED, (uint64_t)batch * 2 * BATCH);

	for (long i = 0; i < BATCH; i++) {
		double x = 2 * random_next(&state) - 1;
		double y = 2 * random_next(&state) - 1;
		double square = x * x + y * y, scale;

		if (square > 1)
			continue;
		scale = sqrt(-2 * log(square) / square);
		x *= scale;
		y *= scale;
		tally[RING + (int)fmax(fabs(x), fabs(y))]++;
		tally[X] += x;
		tally[Y] += y;
		tally[ACCEPTED]++;
	}
	if (state != random_skip(SEED, (uint64_t)(batch + 1) * 2 * BATCH))
		tally[BROKEN]++;
}

static int wrong;

static void judge(int right, const char *what, double is, double expected)
{
	if (right)
		return;
	fprintf(stderr, "ep: %s: %.15g, expected %.15g\n", what, is, expected);
	wrong = 1;
}

/* A count of `all` trials within six deviations of its expectation. */
static void judge_count(const char *what, double count, double all, double chance)
{
	double expected = all * chance;

	judge(fabs(count - expected) <= 6 * sqrt(expected * (1 - chance)) + 6, what, count, expected);
}

static void verify(int log_pairs, const double *tally)
{
	double pairs = ldexp(1, log_pairs), counted = 0, inner = 0;

	judge(tally[BROKEN] == 0, "batches that do not end where the next begins", tally[BROKEN], 0);
	judge_count("accepted pairs", tally[ACCEPTED], pairs, M_PI / 4);
	for (int ring = 0; ring < RINGS; ring++) {
		double within = erf((ring + 1) * M_SQRT1_2), outer = within * within;

		judge_count("pairs in a ring", tally[RING + ring], tally[ACCEPTED], outer - inner);
		inner = outer;
		counted += tally[RING + ring];
	}
	judge(counted == tally[ACCEPTED], "pairs in all rings", counted, tally[ACCEPTED]);
	judge(fabs(tally[X]) < 6 * sqrt(pairs), "sum of x", tally[X], 0);
	judge(fabs(tally[Y]) < 6 * sqrt(pairs), "sum of y", tally[Y], 0);
	for (size_t i = 0; i < sizeof PUBLISHED / sizeof *PUBLISHED; i++) {
		if (PUBLISHED[i].log_pairs != log_pairs)
			continue;
		judge(fabs(tally[X] / PUBLISHED[i].x - 1) < 1e-8, "sum of x", tally[X], PUBLISHED[i].x);
		judge(fabs(tally[Y] / PUBLISHED[i].y - 1) < 1e-8, "sum of y", tally[Y], PUBLISHED[i].y);
	}
}

int main(int argc, char **argv)
{
	double tally[TALLIES] = {0}, all[TALLIES], started;
	int rank, ranks, log_pairs = argc == 2 ? atoi(argv[1]) : 0, name_length;
	char name[MPI_MAX_PROCESSOR_NAME];

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (log_pairs < LOG_BATCH || log_pairs > LOG_PAIRS_MAX) {
		if (rank == 0)
			fprintf(stderr, "usage: ep LOG_PAIRS, %d to %d (24 is NPB's class S)\n",
				LOG_BATCH, LOG_PAIRS_MAX);
		MPI_Finalize();
		return 2;
	}
	MPI_Get_processor_name(name, &name_length);
	printf("ep: rank %d of %d on %s\n", rank, ranks, name);
	fflush(stdout);

	started = MPI_Wtime();
	/* In turns, so that every rank has something to do at any time. */
	for (long batch = rank; batch < 1L << (log_pairs - LOG_BATCH); batch += ranks)
		run_batch(batch, tally);
	MPI_Reduce(tally, all, TALLIES, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
	if (rank == 0) {
		verify(log_pairs, all);
		printf("ep: 2^%d pairs on %d ranks in %.3f s: sums %.12e %.12e: %s\n", log_pairs, ranks,
		       MPI_Wtime() - started, all[X], all[Y], wrong ? "WRONG" : "right");
		fflush(stdout);
	}
	/* Every rank ends with the verdict. */
	MPI_Bcast(&wrong, 1, MPI_INT, 0, MPI_COMM_WORLD);
	MPI_Finalize();
	return wrong;
}
