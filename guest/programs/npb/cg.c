/*
 * CG, conjugate gradient: the smallest eigenvalue of a large sparse matrix by
 * inverse iteration, each step of which solves a system. Members own rows;
 * every product reads the whole vector, every sum is a meeting.
 *
 * The matrix is a weighted sum of outer products of sparse random vectors, with
 * weights that fall geometrically from 1 to 0.1, and (0.1 - shift) added to the
 * diagonal.
 *
 * Judged by: the published estimate of the eigenvalue; a small residual of
 * every solution; an estimate that no longer changes.
 */

#include "npb.h"

enum { STEPS = 25 };

#define CG_SEED UINT64_C(314159265)
#define CONDITION 0.1

static const struct problem {
	int rows, nonzero, iterations;
	double shift, estimate;
} PROBLEMS[SIZES] = {
	{1400, 7, 15, 10, 8.5971775078648},
	{7000, 8, 15, 12, 10.362595087124},
	{14000, 11, 15, 20, 17.130235054029},
};

/* A member's rows in compressed form; `start` has one more entry than rows. */
struct rows {
	struct part part;
	long *start;
	int *column;
	double *value;
};

/* One of the random vectors; one entry more than `nonzero` for the diagonal. */
struct sparse {
	int count;
	int index[16];
	double value[16];
};

static struct sparse *vectors;
static double *x, *z, *p, *r;

/* The random vectors; vector `i` has 0.5 at place `i`. Drawn in order by one member. */
static void make_vectors(const struct problem *problem)
{
	uint64_t state = random_skip(CG_SEED, 1);
	int power = 1;

	while (power < problem->rows)
		power *= 2;
	for (int i = 0; i < problem->rows; i++) {
		struct sparse *vector = &vectors[i];
		int own = -1;

		while (vector->count < problem->nonzero) {
			double value = random_next(&state);
			int index = (int)(power * random_next(&state)), had = 0;

			for (int k = 0; k < vector->count; k++)
				had |= vector->index[k] == index;
			if (index >= problem->rows || had)
				continue;
			vector->index[vector->count] = index;
			vector->value[vector->count++] = value;
		}
		for (int k = 0; k < vector->count; k++)
			if (vector->index[k] == i)
				own = k;
		if (own < 0)
			own = vector->count++;
		vector->index[own] = i;
		vector->value[own] = 0.5;
	}
}

static void add_to_row(struct rows *rows, long *filled, long row, int column, double value)
{
	long at = rows->start[row];

	while (at < *filled && rows->column[at] != column)
		at++;
	if (at == *filled) {
		rows->column[at] = column;
		rows->value[at] = 0;
		++*filled;
	}
	rows->value[at] += value;
}

/*
 * A member makes its own rows, so that their memory is where it runs: first how
 * many entries each may have, then which vectors touch it, then the entries.
 */
static struct rows make_rows(struct member *member, const struct problem *problem)
{
	struct rows rows = {part_of(member, problem->rows), NULL, NULL, NULL};
	long own = rows.part.to - rows.part.from, entries = 0, filled = 0, touches;
	long *touched = pages((size_t)(own + 1) * sizeof(*touched), MAP_PRIVATE);
	int *touching;
	double weight = 1, ratio = pow(CONDITION, 1.0 / problem->rows);
	double *weights = pages((size_t)problem->rows * sizeof(*weights), MAP_PRIVATE);

	for (int i = 0; i < problem->rows; i++, weight *= ratio) {
		weights[i] = weight;
		for (int k = 0; k < vectors[i].count; k++) {
			long row = vectors[i].index[k] - rows.part.from;

			if (row < 0 || row >= own)
				continue;
			touched[row + 1]++;
			entries += vectors[i].count;
		}
	}
	for (long row = 0; row < own; row++)
		touched[row + 1] += touched[row];
	touches = touched[own];
	touching = pages((size_t)touches * sizeof(*touching), MAP_PRIVATE);
	for (int i = problem->rows - 1; i >= 0; i--)
		for (int k = 0; k < vectors[i].count; k++) {
			long row = vectors[i].index[k] - rows.part.from;

			if (row >= 0 && row < own)
				touching[--touched[row + 1]] = i;
		}
	/* Now touched[row + 1] is where the row's vectors begin, in ascending order. */
	rows.start = pages((size_t)(own + 1) * sizeof(*rows.start), MAP_PRIVATE);
	rows.column = pages((size_t)entries * sizeof(*rows.column), MAP_PRIVATE);
	rows.value = pages((size_t)entries * sizeof(*rows.value), MAP_PRIVATE);
	for (long row = 0, at = 0; row < own; row++) {
		long next = row + 1 < own ? touched[row + 2] : touches;
		int index = (int)(row + rows.part.from);

		rows.start[row] = filled;
		for (; at < next; at++) {
			const struct sparse *vector = &vectors[touching[at]];
			double scale = 0;

			for (int k = 0; k < vector->count; k++)
				if (vector->index[k] == index)
					scale = weights[touching[at]] * vector->value[k];
			for (int k = 0; k < vector->count; k++)
				add_to_row(&rows, &filled, row, vector->index[k],
					   scale * vector->value[k]);
			if (touching[at] == index)
				add_to_row(&rows, &filled, row, index,
					   CONDITION - problem->shift);
		}
	}
	rows.start[own] = filled;
	return rows;
}

/* Row `row` of the matrix times `vector`. */
static double row_times(const struct rows *rows, long row, const double *vector)
{
	double all = 0;

	for (long at = rows->start[row]; at < rows->start[row + 1]; at++)
		all += rows->value[at] * vector[rows->column[at]];
	return all;
}

/*
 * Solves A z = x from z = 0; returns the norm of what is missing, |x - A z|.
 * `q` is the member's part of A p.
 */
static double solve(struct member *member, const struct rows *rows, double *q)
{
	long from = rows->part.from, to = rows->part.to;
	double rho = 0, missing = 0;

	for (long j = from; j < to; j++) {
		z[j] = 0;
		p[j] = r[j] = x[j];
		rho += r[j] * r[j];
	}
	rho = sum(member, rho);
	for (int step = 0; step < STEPS; step++) {
		double along = 0, next = 0, alpha, beta;

		for (long j = from; j < to; j++) {
			q[j - from] = row_times(rows, j - from, p);
			along += p[j] * q[j - from];
		}
		alpha = rho / sum(member, along);
		for (long j = from; j < to; j++) {
			z[j] += alpha * p[j];
			r[j] -= alpha * q[j - from];
			next += r[j] * r[j];
		}
		next = sum(member, next);
		beta = next / rho;
		rho = next;
		for (long j = from; j < to; j++)
			p[j] = r[j] + beta * p[j];
		/* The next product reads everybody's part of p. */
		meet(member);
	}
	for (long j = from; j < to; j++) {
		double left = x[j] - row_times(rows, j - from, z);

		missing += left * left;
	}
	return sqrt(sum(member, missing));
}

static void cg(struct member *member, int size)
{
	const struct problem *problem = &PROBLEMS[size];
	double estimate = 0, before = 0, missing_most = 0, *q;
	struct rows rows;

	if (member->index == 0) {
		size_t bytes = (size_t)problem->rows * sizeof(double);

		vectors = pages((size_t)problem->rows * sizeof(*vectors), MAP_PRIVATE);
		x = pages(bytes, MAP_PRIVATE);
		z = pages(bytes, MAP_PRIVATE);
		p = pages(bytes, MAP_PRIVATE);
		r = pages(bytes, MAP_PRIVATE);
		make_vectors(problem);
	}
	meet(member);
	rows = make_rows(member, problem);
	q = pages((size_t)(rows.part.to - rows.part.from + 1) * sizeof(*q), MAP_PRIVATE);
	for (long j = rows.part.from; j < rows.part.to; j++)
		x[j] = 1;
	ready(member);
	for (int i = 0; i < problem->iterations; i++) {
		double along = 0, length = 0, missing = solve(member, &rows, q);

		missing_most = fmax(missing_most, missing);
		for (long j = rows.part.from; j < rows.part.to; j++) {
			along += x[j] * z[j];
			length += z[j] * z[j];
		}
		along = sum(member, along);
		length = sqrt(sum(member, length));
		before = estimate;
		estimate = problem->shift + 1 / along;
		for (long j = rows.part.from; j < rows.part.to; j++)
			x[j] = z[j] / length;
	}
	done(member);
	if (member->index != 0)
		return;
	judge(member, missing_most < 1e-8, "a solution's residual is %g", missing_most);
	judge(member, near(estimate, problem->estimate, 1e-10),
	      "the estimate is %.13g instead of %.13g", estimate, problem->estimate);
	judge(member, near(estimate, before, 1e-8),
	      "the estimate still changes: %.13g, then %.13g", before, estimate);
}

const struct kernel CG = {
	"cg", "conjugate gradient on a sparse matrix: reads all, sums often", cg,
	{"1400 rows, 15 iterations (NPB's class S)",
	 "7000 rows, 15 iterations (NPB's class W)",
	 "14000 rows, 15 iterations (NPB's class A)"},
};
