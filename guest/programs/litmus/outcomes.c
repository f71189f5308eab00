/* How often each outcome was seen, by the size of batches. */

#include "litmus.h"

enum { OUTCOMES_MAX = 40 };

struct count {
	uint64_t parts[PARTS_MAX];
	long times;
};

static struct table {
	long rounds, raced;
	/* Of outcomes for which there was no more room. */
	long others;
	int length;
	struct count counts[OUTCOMES_MAX];
} tables[SIZES];

void outcomes_begin(void)
{
	memset(tables, 0, sizeof(tables));
}

static uint64_t part_of(const struct outcome *outcome, enum part part)
{
	switch (part) {
	case NO_PART:
		return 0;
	case PART_X:
		return outcome->x;
	case PART_Y:
		return outcome->y;
	default:
		return outcome->read[(part - PART_READS) / READS_MAX]
				    [(part - PART_READS) % READS_MAX];
	}
}

void count_outcome(const struct test *test, int size_class, const struct outcome *outcome,
		   int raced)
{
	struct table *table = &tables[size_class];
	uint64_t parts[PARTS_MAX];

	table->rounds++;
	table->raced += raced;
	for (int i = 0; i < PARTS_MAX; i++)
		parts[i] = part_of(outcome, test->parts[i]);
	for (int i = 0; i < table->length; i++) {
		if (!memcmp(table->counts[i].parts, parts, sizeof(parts))) {
			table->counts[i].times++;
			return;
		}
	}
	if (table->length == OUTCOMES_MAX) {
		table->others++;
		return;
	}
	memcpy(table->counts[table->length].parts, parts, sizeof(parts));
	table->counts[table->length++].times = 1;
}

/* As in `0,1`; all ones are -1. */
static int write_values(const struct test *test, const uint64_t *values, char *text,
			size_t length)
{
	int used = 0;

	for (int i = 0; i < PARTS_MAX && test->parts[i] != NO_PART; i++)
		used += snprintf(text + used, length - (size_t)used, i ? ",%lld" : "%lld",
				 (long long)values[i]);
	return used;
}

void write_parts(const struct test *test, const struct outcome *outcome, char *text,
		 size_t length)
{
	uint64_t values[PARTS_MAX];

	for (int i = 0; i < PARTS_MAX; i++)
		values[i] = part_of(outcome, test->parts[i]);
	write_values(test, values, text, length);
}

static int compare(const void *a, const void *b)
{
	const struct count *one = a, *two = b;

	for (int i = 0; i < PARTS_MAX; i++)
		if (one->parts[i] != two->parts[i])
			return one->parts[i] < two->parts[i] ? -1 : 1;
	return 0;
}

static void print_table(const struct test *test, const char *name, struct table *table)
{
	/* Four numbers and a count for each outcome. */
	char text[OUTCOMES_MAX * 5 * 21 + 64];
	int used = 0;

	qsort(table->counts, (size_t)table->length, sizeof(table->counts[0]), compare);
	for (int i = 0; i < table->length; i++) {
		text[used++] = ' ';
		used += write_values(test, table->counts[i].parts, text + used,
				     sizeof(text) - (size_t)used);
		used += snprintf(text + used, sizeof(text) - (size_t)used, ":%ld",
				 table->counts[i].times);
	}
	if (table->others)
		snprintf(text + used, sizeof(text) - (size_t)used, " others:%ld",
			 table->others);
	printf("litmus %s batches %s: %ld, raced %.1f%%;%s\n", test->name, name,
	       table->rounds, 100.0 * (double)table->raced / (double)table->rounds,
	       table->length ? text : "");
}

void print_outcomes(const struct test *test)
{
	static const char *const NAMES[SIZES] = {"of 1", "up to 16", "up to 512"};

	_Static_assert(BATCH_MAX == 512, "the name of the biggest batches");
	for (int i = 0; i < SIZES; i++)
		if (tables[i].rounds)
			print_table(test, NAMES[i], &tables[i]);
}
