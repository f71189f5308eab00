/*
 * MG, multigrid: V-cycles for Poisson's equation on a periodic cube. Members
 * own slabs of planes and read the planes next to them; coarse grids are
 * smaller than a page, and shared by all.
 *
 * Judged by: a residual that falls in each cycle; its published norm; the same
 * residual computed another way.
 */

#include "npb.h"

enum { LEVELS_MAX = 10, CHARGES = 10, PUBLISHED = 4 };

#define MG_SEED UINT64_C(314159265)

static const struct problem {
	int log_side, cycles;
	/* The published norm after PUBLISHED cycles. */
	double norm;
} PROBLEMS[SIZES] = {
	{5, 4, 0.5307707005734e-4},
	{7, 4, 0.6467329375339e-5},
	{7, 20, 0.6467329375339e-5},
};

/*
 * A cube of `side` points and a layer of copies around it, so that the point
 * before the first is the last. Planes by z, lines by y.
 */
struct grid {
	int side;
	double *point;
};

/* Per level, 1 the coarsest (two points a side): solution and residual. */
static struct grid u[LEVELS_MAX], r[LEVELS_MAX], v;

static inline double *line(const struct grid *grid, long z, long y)
{
	long row = grid->side + 2;

	return grid->point + (z * row + y) * row;
}

static struct grid new_grid(int side)
{
	size_t row = (size_t)side + 2;

	return (struct grid){side, pages(row * row * row * sizeof(double), MAP_PRIVATE)};
}

/* The planes that a member computes, from 1. */
static struct part planes(const struct member *member, const struct grid *grid)
{
	struct part part = part_of(member, grid->side);

	return (struct part){part.from + 1, part.to + 1};
}

/*
 * Renews the copies around the member's planes, as members own the originals. The
 * members meet.
 */
static void wrap(struct member *member, const struct grid *grid)
{
	struct part mine = planes(member, grid);
	long side = grid->side;
	size_t plane = (size_t)(side + 2) * (size_t)(side + 2) * sizeof(double);

	for (long z = mine.from; z < mine.to; z++) {
		for (long y = 1; y <= side; y++) {
			double *points = line(grid, z, y);

			points[0] = points[side];
			points[side + 1] = points[1];
		}
		memcpy(line(grid, z, 0), line(grid, z, side), (size_t)(side + 2) * sizeof(double));
		memcpy(line(grid, z, side + 1), line(grid, z, 1), (size_t)(side + 2) * sizeof(double));
		if (z == 1)
			memcpy(line(grid, side + 1, 0), line(grid, 1, 0), plane);
		if (z == side)
			memcpy(line(grid, 0, 0), line(grid, side, 0), plane);
	}
	meet(member);
}

static void clear(struct member *member, const struct grid *grid)
{
	struct part mine = planes(member, grid);
	size_t plane = (size_t)(grid->side + 2) * (size_t)(grid->side + 2) * sizeof(double);

	for (long z = mine.from; z < mine.to; z++)
		memset(line(grid, z, 0), 0, plane);
	wrap(member, grid);
}

/*
 * Sums over a line's neighbours, of the points at distance one (`near_sum`) and
 * at a diagonal (`far_sum`) in the plane across the line.
 */
static void across(const struct grid *grid, long z, long y, double *near_sum, double *far_sum)
{
	const double *up = line(grid, z, y + 1), *down = line(grid, z, y - 1);
	const double *front = line(grid, z + 1, y), *back = line(grid, z - 1, y);
	const double *a = line(grid, z - 1, y - 1), *b = line(grid, z - 1, y + 1);
	const double *c = line(grid, z + 1, y - 1), *d = line(grid, z + 1, y + 1);

	for (long i = 0; i < grid->side + 2; i++) {
		near_sum[i] = up[i] + down[i] + front[i] + back[i];
		far_sum[i] = a[i] + b[i] + c[i] + d[i];
	}
}

/* to = from - A u, with the weights -8/3, 0, 1/6, 1/12 by distance. `to` may be `from`. */
static void residual(struct member *member, const struct grid *of, const struct grid *from,
		     const struct grid *to)
{
	struct part mine = planes(member, of);
	double near_sum[1 << LEVELS_MAX], far_sum[1 << LEVELS_MAX];

	for (long z = mine.from; z < mine.to; z++)
		for (long y = 1; y <= of->side; y++) {
			const double *here = line(of, z, y), *given = line(from, z, y);
			double *result = line(to, z, y);

			across(of, z, y, near_sum, far_sum);
			for (long i = 1; i <= of->side; i++)
				result[i] = given[i] + 8.0 / 3 * here[i] -
					1.0 / 6 * (far_sum[i] + near_sum[i - 1] + near_sum[i + 1]) -
					1.0 / 12 * (far_sum[i - 1] + far_sum[i + 1]);
		}
	wrap(member, to);
}

/* u += S r, with the weights -3/8, 1/32, -1/64, 0 by distance. */
static void smooth(struct member *member, const struct grid *by, const struct grid *to)
{
	struct part mine = planes(member, by);
	double near_sum[1 << LEVELS_MAX], far_sum[1 << LEVELS_MAX];

	for (long z = mine.from; z < mine.to; z++)
		for (long y = 1; y <= by->side; y++) {
			const double *here = line(by, z, y);
			double *result = line(to, z, y);

			across(by, z, y, near_sum, far_sum);
			for (long i = 1; i <= by->side; i++)
				result[i] += -3.0 / 8 * here[i] +
					1.0 / 32 * (here[i - 1] + here[i + 1] + near_sum[i]) -
					1.0 / 64 * (far_sum[i] + near_sum[i - 1] + near_sum[i + 1]);
		}
	wrap(member, to);
}

/* A coarse point is the weighted mean (1/2, 1/4, 1/8, 1/16) around a fine one. */
static void restrict_to(struct member *member, const struct grid *fine, const struct grid *coarse)
{
	struct part mine = planes(member, coarse);
	double near_sum[1 << LEVELS_MAX], far_sum[1 << LEVELS_MAX];

	for (long z = mine.from; z < mine.to; z++)
		for (long y = 1; y <= coarse->side; y++) {
			const double *here = line(fine, 2 * z, 2 * y);
			double *result = line(coarse, z, y);

			across(fine, 2 * z, 2 * y, near_sum, far_sum);
			for (long i = 1; i <= coarse->side; i++) {
				long k = 2 * i;

				result[i] = 0.5 * here[k] +
					0.25 * (here[k - 1] + here[k + 1] + near_sum[k]) +
					0.125 * (near_sum[k - 1] + near_sum[k + 1] + far_sum[k]) +
					0.0625 * (far_sum[k - 1] + far_sum[k + 1]);
			}
		}
	wrap(member, coarse);
}

/* Adds a coarse solution to a fine one, linearly between its points. */
static void prolong(struct member *member, const struct grid *coarse, const struct grid *fine)
{
	struct part mine = planes(member, fine);

	for (long z = mine.from; z < mine.to; z++)
		for (long y = 1; y <= fine->side; y++) {
			/* The same line twice where the point lies on a coarse one. */
			const double *a = line(coarse, z / 2, y / 2);
			const double *b = line(coarse, z / 2, (y + 1) / 2);
			const double *c = line(coarse, (z + 1) / 2, y / 2);
			const double *d = line(coarse, (z + 1) / 2, (y + 1) / 2);
			double *result = line(fine, z, y);

			for (long i = 1; i <= fine->side; i++) {
				long m = i / 2, n = (i + 1) / 2;

				result[i] += 0.125 * (a[m] + a[n] + b[m] + b[n] +
						      c[m] + c[n] + d[m] + d[n]);
			}
		}
	wrap(member, fine);
}

/* One V-cycle; r[top] is the residual before. */
static void cycle(struct member *member, int top)
{
	for (int level = top; level > 1; level--)
		restrict_to(member, &r[level], &r[level - 1]);
	clear(member, &u[1]);
	smooth(member, &r[1], &u[1]);
	for (int level = 2; level < top; level++) {
		clear(member, &u[level]);
		prolong(member, &u[level - 1], &u[level]);
		residual(member, &u[level], &r[level], &r[level]);
		smooth(member, &r[level], &u[level]);
	}
	prolong(member, &u[top - 1], &u[top]);
	residual(member, &u[top], &v, &r[top]);
	smooth(member, &r[top], &u[top]);
}

static double norm(struct member *member, const struct grid *grid)
{
	struct part mine = planes(member, grid);
	double all = 0, side = grid->side;

	for (long z = mine.from; z < mine.to; z++)
		for (long y = 1; y <= grid->side; y++) {
			const double *points = line(grid, z, y);

			for (long i = 1; i <= grid->side; i++)
				all += points[i] * points[i];
		}
	return sqrt(sum(member, all) / (side * side * side));
}

/*
 * Charges of +1 where the ten largest of a cube of random numbers are, of -1
 * where the ten smallest are. By one member: it takes no time worth sharing.
 */
static void place_charges(int side)
{
	struct { double value; double *at; } high[CHARGES], low[CHARGES];
	uint64_t state = MG_SEED;

	for (int k = 0; k < CHARGES; k++) {
		high[k].value = 0;
		low[k].value = 1;
	}
	for (long z = 1; z <= side; z++)
		for (long y = 1; y <= side; y++)
			for (long i = 1; i <= side; i++) {
				double value = random_next(&state);
				double *at = &line(&v, z, y)[i];
				int k;

				/* The least of the high ones, and the greatest of the low, come first. */
				if (value > high[0].value) {
					for (k = 0; k + 1 < CHARGES && high[k + 1].value < value; k++)
						high[k] = high[k + 1];
					high[k].value = value;
					high[k].at = at;
				}
				if (value < low[0].value) {
					for (k = 0; k + 1 < CHARGES && low[k + 1].value > value; k++)
						low[k] = low[k + 1];
					low[k].value = value;
					low[k].at = at;
				}
			}
	for (int k = 0; k < CHARGES; k++) {
		*high[k].at = 1;
		*low[k].at = -1;
	}
}

/* The norm of v - A u, point by point, without the copies around the cubes. */
static double plain_norm(int top)
{
	static const double WEIGHTS[4] = {-8.0 / 3, 0, 1.0 / 6, 1.0 / 12};
	long side = u[top].side;
	double all = 0;

	for (long z = 0; z < side; z++)
		for (long y = 0; y < side; y++)
			for (long i = 0; i < side; i++) {
				double left = line(&v, z + 1, y + 1)[i + 1];

				for (int n = 0; n < 27; n++) {
					int dz = n / 9 - 1, dy = n / 3 % 3 - 1, di = n % 3 - 1;

					left -= WEIGHTS[abs(dz) + abs(dy) + abs(di)] *
						line(&u[top], (z + dz + side) % side + 1,
						     (y + dy + side) % side + 1)
						[(i + di + side) % side + 1];
				}
				all += left * left;
			}
	return sqrt(all / ((double)side * (double)side * (double)side));
}

static void mg(struct member *member, int size)
{
	const struct problem *problem = &PROBLEMS[size];
	int top = problem->log_side;
	double before, now, plain;

	if (member->index == 0) {
		v = new_grid(1 << top);
		for (int level = 1; level <= top; level++) {
			u[level] = new_grid(1 << level);
			r[level] = new_grid(1 << level);
		}
	}
	meet(member);
	clear(member, &u[top]);
	clear(member, &v);
	if (member->index == 0)
		place_charges(v.side);
	meet(member);
	wrap(member, &v);
	ready(member);
	residual(member, &u[top], &v, &r[top]);
	now = norm(member, &r[top]);
	for (int i = 0; i < problem->cycles; i++) {
		cycle(member, top);
		residual(member, &u[top], &v, &r[top]);
		before = now;
		now = norm(member, &r[top]);
		judge(member, now < before / 2, "cycle %d leaves %g of a residual of %g", i,
		      now, before);
		judge(member, i + 1 != PUBLISHED || near(now, problem->norm, 1e-8),
		      "the residual is %.13g instead of %.13g", now, problem->norm);
	}
	done(member);
	if (member->index != 0)
		return;
	plain = plain_norm(top);
	/* What is left after many cycles are the roundings, which differ. */
	judge(member, fabs(plain - now) < 1e-6 * now + 1e-15,
	      "the residual is %.13g, and %.13g point by point", now, plain);
}

const struct kernel MG = {
	"mg", "multigrid on a periodic cube: neighbours, and small grids of all", mg,
	{"32^3, 4 cycles (NPB's class S)", "128^3, 4 cycles (NPB's class W)",
	 "128^3, 20 cycles"},
};
