/*
 * FT, Fourier transform: a partial differential equation in three dimensions,
 * solved in the frequency domain. Lines along x and y lie in a member's slab,
 * lines along z go through all of them: a transposition of the whole array.
 *
 * Judged by: published checksums; Parseval's relation; an inverse that gives
 * the input back.
 */

#include "npb.h"

#include <complex.h>

enum { LINES = 16, SIDE_MAX = 256, PUBLISHED = 6, SAMPLES = 1024 };

#define FT_SEED UINT64_C(314159265)
#define FT_ALPHA 1e-6

typedef double complex number_t;

static const struct problem {
	int x, y, z, iterations;
	/* The published checksum of iteration PUBLISHED. */
	double real, imaginary;
} PROBLEMS[SIZES] = {
	{64, 64, 64, 6, 554.2683411902, 493.2597244941},
	{128, 128, 32, 6, 550.4159734538, 523.9212247086},
	{128, 128, 32, 24, 550.4159734538, 523.9212247086},
};

/* The frequencies, their decay in a step, and the points; x fastest, then y. */
static number_t *frequencies, *points;
static double *decay;

/* Lines to transform: how many points, and the steps between points and lines. */
struct lines {
	int length;
	long step, next;
};

/*
 * Transforms LINES lines at once, from and to `data`, by Stockham's method:
 * each pass halves the transforms and doubles what each holds. `sign` is +1 or
 * -1; nothing is scaled.
 */
static void transform(number_t *data, struct lines lines, int sign)
{
	number_t rooms[2][SIDE_MAX * LINES];
	number_t *from = rooms[0], *to = rooms[1];
	int half = lines.length / 2;

	for (int i = 0; i < lines.length; i++)
		for (int k = 0; k < LINES; k++)
			from[i * LINES + k] = data[i * lines.step + k * lines.next];
	for (int done = 1; done < lines.length; done *= 2) {
		for (int group = 0; group < half / done; group++) {
			double angle = sign * M_PI * group * done / half;
			number_t root = CMPLX(cos(angle), sin(angle));

			for (int i = 0; i < done * LINES; i++) {
				number_t a = from[group * done * LINES + i];
				number_t b = from[(group * done + half) * LINES + i];
				number_t less = a - b;

				to[2 * group * done * LINES + i] = a + b;
				/* By hand: the library's product also cares for infinities. */
				to[(2 * group + 1) * done * LINES + i] =
					CMPLX(creal(less) * creal(root) - cimag(less) * cimag(root),
					      creal(less) * cimag(root) + cimag(less) * creal(root));
			}
		}
		number_t *swap = from;

		from = to;
		to = swap;
	}
	for (int i = 0; i < lines.length; i++)
		for (int k = 0; k < LINES; k++)
			data[i * lines.step + k * lines.next] = from[i * LINES + k];
}

/* Along x and y in the member's planes. */
static void transform_planes(struct member *member, const struct problem *n,
			     number_t *data, int sign)
{
	struct part mine = part_of(member, n->z);

	for (long z = mine.from; z < mine.to; z++) {
		number_t *plane = data + z * n->x * n->y;

		for (int y = 0; y < n->y; y += LINES)
			transform(plane + y * n->x, (struct lines){n->x, 1, n->x}, sign);
		for (int x = 0; x < n->x; x += LINES)
			transform(plane + x, (struct lines){n->y, n->x, 1}, sign);
	}
	meet(member);
}

/* Along z, for the member's lines. */
static void transform_depth(struct member *member, const struct problem *n,
			    number_t *data, int sign)
{
	struct part mine = part_of(member, (long)n->x * n->y / LINES);

	for (long i = mine.from; i < mine.to; i++)
		transform(data + i * LINES, (struct lines){n->z, (long)n->x * n->y, 1}, sign);
	meet(member);
}

/* The points at the beginning, one after another from the random numbers. */
static void make_points(struct member *member, const struct problem *n, number_t *data)
{
	struct part mine = part_of(member, n->z);
	long plane = (long)n->x * n->y;
	uint64_t state = random_skip(FT_SEED, 2 * (uint64_t)(mine.from * plane));

	for (long i = mine.from * plane; i < mine.to * plane; i++) {
		double real = random_next(&state);

		data[i] = CMPLX(real, random_next(&state));
	}
	meet(member);
}

/* The square of a frequency; the upper half are negative ones. */
static double square(int i, int length)
{
	double frequency = i < length / 2 ? i : i - length;

	return frequency * frequency;
}

static void make_decay(struct member *member, const struct problem *n)
{
	struct part mine = part_of(member, n->z);

	for (long z = mine.from; z < mine.to; z++)
		for (int y = 0; y < n->y; y++)
			for (int x = 0; x < n->x; x++)
				decay[(z * n->y + y) * n->x + x] =
					exp(-4 * M_PI * M_PI * FT_ALPHA *
					    (square(x, n->x) + square(y, n->y) +
					     square((int)z, n->z)));
}

/* One step of time in the frequencies; the points begin as a copy of them. */
static void evolve(struct member *member, const struct problem *n)
{
	struct part mine = part_of(member, n->z);
	long plane = (long)n->x * n->y;

	for (long i = mine.from * plane; i < mine.to * plane; i++)
		points[i] = frequencies[i] *= decay[i];
	meet(member);
}

static number_t checksum(struct member *member, const struct problem *n)
{
	struct part mine = part_of(member, SAMPLES);
	double all = (double)n->x * n->y * n->z;
	number_t mean = 0;
	double real;

	for (long j = mine.from + 1; j <= mine.to; j++)
		mean += points[(5 * j % n->z * n->y + 3 * j % n->y) * n->x + j % n->x];
	real = sum(member, creal(mean) / all);
	return CMPLX(real, sum(member, cimag(mean) / all));
}

/* The sum of the squared magnitudes. */
static double energy(struct member *member, const struct problem *n, const number_t *data)
{
	struct part mine = part_of(member, n->z);
	long plane = (long)n->x * n->y;
	double all = 0;

	for (long i = mine.from * plane; i < mine.to * plane; i++)
		all += creal(data[i]) * creal(data[i]) + cimag(data[i]) * cimag(data[i]);
	return sum(member, all);
}

/* There and back without a step of time: the points have to be those made first. */
static void check_inverse(struct member *member, const struct problem *n)
{
	struct part mine = part_of(member, n->z);
	long plane = (long)n->x * n->y;
	double all = (double)plane * n->z, worst = 0;
	uint64_t state = random_skip(FT_SEED, 2 * (uint64_t)(mine.from * plane));

	make_points(member, n, points);
	transform_planes(member, n, points, 1);
	transform_depth(member, n, points, 1);
	transform_depth(member, n, points, -1);
	transform_planes(member, n, points, -1);
	for (long i = mine.from * plane; i < mine.to * plane; i++) {
		double real = random_next(&state), imaginary = random_next(&state);

		worst = fmax(worst, fabs(creal(points[i]) / all - real));
		worst = fmax(worst, fabs(cimag(points[i]) / all - imaginary));
	}
	judge(member, worst < 1e-12, "the inverse is off by %g", worst);
}

static void ft(struct member *member, int size)
{
	const struct problem *n = &PROBLEMS[size];
	size_t all = (size_t)n->x * (size_t)n->y * (size_t)n->z;
	double before, after;
	number_t mean;

	if (member->index == 0) {
		frequencies = pages(all * sizeof(*frequencies), MAP_PRIVATE);
		points = pages(all * sizeof(*points), MAP_PRIVATE);
		decay = pages(all * sizeof(*decay), MAP_PRIVATE);
	}
	meet(member);
	make_points(member, n, frequencies);
	make_decay(member, n);
	before = energy(member, n, frequencies);
	ready(member);
	transform_planes(member, n, frequencies, 1);
	transform_depth(member, n, frequencies, 1);
	after = energy(member, n, frequencies) / (double)all;
	judge(member, near(after, before, 1e-10), "Parseval: %.13g, then %.13g", before, after);
	for (int i = 0; i < n->iterations; i++) {
		evolve(member, n);
		transform_depth(member, n, points, -1);
		transform_planes(member, n, points, -1);
		mean = checksum(member, n);
		judge(member, i + 1 != PUBLISHED || (near(creal(mean), n->real, 1e-10) &&
						     near(cimag(mean), n->imaginary, 1e-10)),
		      "the checksum is %.13g and %.13g", creal(mean), cimag(mean));
		/* What time does to the frequencies, it does to the points. */
		before = energy(member, n, frequencies);
		after = energy(member, n, points) / (double)all;
		judge(member, near(after, before, 1e-10),
		      "Parseval in iteration %d: %.13g, then %.13g", i, before, after);
	}
	done(member);
	check_inverse(member, n);
	meet(member);
}

const struct kernel FT = {
	"ft", "Fourier transforms in three dimensions: transposes all", ft,
	{"64^3, 6 iterations (NPB's class S)", "128^2 x 32, 6 iterations (NPB's class W)",
	 "128^2 x 32, 24 iterations"},
};
