/* Visits pages at random that do not all fit: the pattern of a sort whose merge
 * reads lines all over its buffer, and writes each when it puts it out.
 *
 *     visits [SIZE_MIB [SEED [read|update]]]
 *
 * Writes SIZE_MIB, then visits ROUNDS times as many pages as SIZE_MIB has, each at
 * random: reads a word and, with `update` (the default), writes one. A visit
 * that takes more than SLOW_NS had to wait for its page. The last lines on
 * standard error are
 *
 *     262144 visits, 65000 slow, median 12345 ns, mean 23456 ns
 *     set-up 0.1 s, measured 0.2 s
 *
 * where the mean is the whole time for each slow visit, whatever was done for it
 * outside of it. */
#include <x86intrin.h>

#include "elastic.h"

#define PAGE_BYTES 4096u
#define SLOW_NS 4000.0
#define ROUNDS 16

static int compare(const void *left, const void *right)
{
	uint64_t l = *(const uint64_t *)left, r = *(const uint64_t *)right;

	return (l > r) - (l < r);
}

int main(int argc, char **argv)
{
	int update = argc < 4 || strcmp(argv[3], "update") == 0;
	struct bench bench = bench_start(argc > 3 ? 3 : argc, argv, "visits");
	size_t bytes = bench_bytes(&bench), pages = bytes / PAGE_BYTES, visits = ROUNDS * pages;
	uint8_t *memory = allocate(bytes);
	uint64_t *ticks = allocate(visits * sizeof(uint64_t));
	struct random random = random_from(bench.seed);

	for (size_t i = 0; i < pages; i++)
		memset(memory + i * PAGE_BYTES, (int)(i & 0x7f), PAGE_BYTES);
	memset(ticks, 0, visits * sizeof(uint64_t));

	bench_measure(&bench);
	uint64_t checksum = 0, start = __rdtsc();
	double start_s = now_s();
	for (size_t i = 0; i < visits; i++) {
		size_t page = random_next(&random) % pages;
		volatile uint64_t *word = (volatile uint64_t *)(memory + page * PAGE_BYTES + 256);
		uint64_t before = __rdtsc();

		checksum = fold(checksum, *word);
		if (update)
			*word = checksum;
		ticks[i] = __rdtsc() - before;
	}
	double elapsed_ns = (now_s() - start_s) * 1e9;
	double per_ns = (double)(__rdtsc() - start) / elapsed_ns;

	qsort(ticks, visits, sizeof(uint64_t), compare);
	size_t fast = 0;
	while (fast < visits && (double)ticks[fast] / per_ns < SLOW_NS)
		fast++;
	size_t slow = visits - fast;
	double median_ns = slow > 0 ? (double)ticks[fast + slow / 2] / per_ns : 0;
	fprintf(stderr, "%zu visits, %zu slow, median %.0f ns, mean %.0f ns\n", visits, slow,
		median_ns, slow > 0 ? elapsed_ns / (double)slow : 0);
	return bench_finish(&bench, checksum);
}
