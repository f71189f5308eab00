/*
 * What it costs to use a page that another processor had last.
 *
 *   fetch [-c CPUS] [-n PAGES] MODE...
 *
 *   read      pages that the other processor wrote, to read
 *   write     pages that it wrote, to write
 *   upgrade   pages that both have read, to write
 *
 *   -c CPUS   who measures, and the other, as in 0,1; else the first two
 *   -n PAGES  how many, each once; 1000
 *
 * One line for each mode:
 *
 *   fetch MODE pages N: min MIN median MEDIAN p99 P99 max MAX mean MEAN us
 *
 * One thread does all of it, first on the one processor, then on the other. The
 * pages are taken in an order without neighbours: none is there because the one
 * before it was asked for. Ends with 1 when a page does not hold what was written.
 */

#include "team.h"

enum { PAGES_MAX = 1 << 20 };

static const char USAGE[] = "it is used so: fetch [-c CPUS] [-n PAGES] read|write|upgrade...";

struct page {
	_Alignas(PAGE) volatile uint64_t word;
};

static struct page *area;
static uint64_t *took;
static long count;

/* The `i`th page to be used: a walk in steps that share no factor with `count`. */
static long step;

static long at(long i)
{
	return (long)((unsigned long)i * (unsigned long)step % (unsigned long)count);
}

static long common_factor(long a, long b)
{
	return b ? common_factor(b, a % b) : a;
}

static void expect(long page, uint64_t value)
{
	if (area[page].word != value)
		end(1, "WRONG, page %ld holds %llu: %llu was written", page,
		    (unsigned long long)area[page].word, (unsigned long long)value);
}

static int ascending(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void measure(const char *mode, int here, int other, double rate)
{
	static uint64_t written;
	int writes = strcmp(mode, "read") != 0;
	double sum = 0, us = 1e6 / rate;

	pin(other);
	written++;
	for (long i = 0; i < count; i++)
		area[i].word = written * (uint64_t)PAGES_MAX + (uint64_t)i;
	pin(here);
	if (!strcmp(mode, "upgrade"))
		for (long i = 0; i < count; i++)
			expect(i, written * (uint64_t)PAGES_MAX + (uint64_t)i);
	for (long i = 0; i < count; i++) {
		long page = at(i);
		uint64_t value = written * (uint64_t)PAGES_MAX + (uint64_t)page, start = ticks();

		if (writes)
			area[page].word = value + (uint64_t)count;
		else
			(void)area[page].word;
		took[i] = ticks() - start;
	}
	for (long i = 0; i < count; i++) {
		expect(i, written * (uint64_t)PAGES_MAX + (uint64_t)i + (writes ? (uint64_t)count : 0));
		sum += (double)took[i];
	}
	qsort(took, (size_t)count, sizeof(*took), ascending);
	printf("fetch %s pages %ld: min %.2f median %.2f p99 %.2f max %.2f mean %.2f us\n", mode,
	       count, (double)took[0] * us, (double)took[count / 2] * us,
	       (double)took[count * 99 / 100] * us, (double)took[count - 1] * us,
	       sum / (double)count * us);
}

int main(int argc, char **argv)
{
	struct cpus cpus = cpus_allowed();
	double rate = ticks_per_second();
	int option;

	count = 1000;
	setvbuf(stdout, NULL, _IOLBF, 0);
	while ((option = getopt(argc, argv, "+c:n:")) != -1) {
		if (option == 'c')
			cpus = cpus_named(optarg);
		else if (option == 'n')
			count = number("-n", optarg, 16, PAGES_MAX / 2);
		else
			end(EXIT_USAGE, "%s", USAGE);
	}
	if (cpus.count < 2)
		end(EXIT_USAGE, "it takes two processors: there is one");
	if (optind == argc)
		end(EXIT_USAGE, "%s", USAGE);
	for (int i = optind; i < argc; i++)
		if (strcmp(argv[i], "read") && strcmp(argv[i], "write") && strcmp(argv[i], "upgrade"))
			end(EXIT_USAGE, "%s is no mode: %s", argv[i], USAGE);
	/* About a third of the way round: no page is next to the one before. */
	for (step = count / 3 + 1; common_factor(step, count) != 1; step++)
		;
	area = pages((size_t)count * sizeof(*area), MAP_PRIVATE);
	took = pages((size_t)count * sizeof(*took), MAP_PRIVATE);
	/* The first touch is not what is measured. */
	for (long i = 0; i < count; i++)
		took[i] = area[i].word = 0;
	for (int i = optind; i < argc; i++)
		measure(argv[i], cpus.cpu[0], cpus.cpu[1], rate);
	return 0;
}
