/* Touches an array page by page and prints the time for one page.
 *
 *     touch SIZE_MIB SEED [read|write] [sequential|random] [ROUNDS]
 *
 * Every page is written once during set-up. In each round every page is
 * touched exactly once: in the order of addresses, or in a random permutation.
 * The last lines on standard error are
 *
 *     round 0: 1234.5 ns per page
 *     set-up 0.1 s, measured 0.2 s
 */
#include "elastic.h"

#define PAGE_BYTES 4096u

struct plan {
	int write;
	int random;
	uint64_t rounds;
};

static struct plan parse(int argc, char **argv)
{
	struct plan plan = { .rounds = 1 };

	for (int i = 3; i < argc; i++) {
		if (strcmp(argv[i], "write") == 0)
			plan.write = 1;
		else if (strcmp(argv[i], "random") == 0)
			plan.random = 1;
		else if (strcmp(argv[i], "read") != 0 && strcmp(argv[i], "sequential") != 0)
			plan.rounds = parse_count(argv[i], "touch");
	}
	return plan;
}

static void shuffle(uint32_t *order, size_t pages, struct random *random)
{
	for (size_t i = pages; i-- > 1;) {
		size_t j = random_next(random) % (i + 1);
		uint32_t swap = order[i];

		order[i] = order[j];
		order[j] = swap;
	}
}

int main(int argc, char **argv)
{
	struct plan plan = parse(argc, argv);
	struct bench bench = bench_start(argc > 3 ? 3 : argc, argv, "touch");
	size_t pages = bench_bytes(&bench) / PAGE_BYTES;
	uint8_t *array = allocate(pages * PAGE_BYTES);
	uint32_t *order = allocate(pages * sizeof(uint32_t));
	struct random random = random_from(bench.seed);
	uint64_t checksum = 0;

	for (size_t i = 0; i < pages; i++) {
		order[i] = (uint32_t)i;
		memset(array + i * PAGE_BYTES, (int)(i & 0x7f), PAGE_BYTES);
	}
	if (plan.random)
		shuffle(order, pages, &random);

	bench_measure(&bench);
	for (uint64_t round = 0; round < plan.rounds; round++) {
		double start_s = now_s();

		for (size_t i = 0; i < pages; i++) {
			volatile uint64_t *word =
				(volatile uint64_t *)(array + (size_t)order[i] * PAGE_BYTES + 128);

			if (plan.write)
				*word += i;
			checksum += *word;
		}
		fprintf(stderr, "round %llu: %.1f ns per page\n", (unsigned long long)round,
			(now_s() - start_s) * 1e9 / (double)pages);
	}
	return bench_finish(&bench, checksum);
}
