/* Reads memory that was pushed away, while there is room for it: each first
 * read of a page is one pull and nothing else.
 *
 *     pull [SIZE_MIB [SEED [sequential|random]]]
 *
 * Writes SIZE_MIB, then twice as much beside it, so that a budget of 1.2 times
 * SIZE_MIB sends the first part away; gives the second part back; and reads one
 * word of every page of the first. Times single reads by the time-stamp counter,
 * because reading the clock may cost more than what is measured. A read that
 * takes less than SLOW_NS found its page present. The last lines on standard
 * error are
 *
 *     16384 pages, 16000 slow, median 12345 ns, 123.4 MB/s
 *     set-up 0.1 s, measured 0.2 s
 */
#include <sys/mman.h>
#include <x86intrin.h>

#include "elastic.h"

#define PAGE_BYTES 4096u
#define SLOW_NS 700.0

static uint8_t *map(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return at;
}

static int compare(const void *left, const void *right)
{
	uint64_t l = *(const uint64_t *)left, r = *(const uint64_t *)right;

	return (l > r) - (l < r);
}

static double ticks_per_ns(void)
{
	double start_s = now_s();
	uint64_t start = __rdtsc();

	while (now_s() - start_s < 0.05)
		;
	return (double)(__rdtsc() - start) / ((now_s() - start_s) * 1e9);
}

int main(int argc, char **argv)
{
	int random_order = argc == 4 && strcmp(argv[3], "random") == 0;
	struct bench bench = bench_start(argc > 3 ? 3 : argc, argv, "pull");
	size_t bytes = bench_bytes(&bench), pages = bytes / PAGE_BYTES;
	uint8_t *away = map(bytes);
	uint32_t *order = allocate(pages * sizeof(uint32_t));
	uint64_t *ticks = allocate(pages * sizeof(uint64_t));
	struct random random = random_from(bench.seed);
	double per_ns = ticks_per_ns();

	for (size_t i = 0; i < pages; i++) {
		memset(away + i * PAGE_BYTES, (int)(i & 0x7f), PAGE_BYTES);
		order[i] = (uint32_t)i;
	}
	for (size_t i = pages; random_order && i-- > 1;) {
		size_t j = random_next(&random) % (i + 1);
		uint32_t swap = order[i];

		order[i] = order[j];
		order[j] = swap;
	}
	uint8_t *beside = map(2 * bytes);
	memset(beside, 1, 2 * bytes);
	memset(ticks, 0, pages * sizeof(uint64_t));
	munmap(beside, 2 * bytes);

	bench_measure(&bench);
	uint64_t checksum = 0;
	double start_s = now_s();
	for (size_t i = 0; i < pages; i++) {
		uint64_t before = __rdtsc();

		checksum += *(volatile uint64_t *)(away + (size_t)order[i] * PAGE_BYTES + 256);
		ticks[i] = __rdtsc() - before;
	}
	double elapsed_s = now_s() - start_s;

	qsort(ticks, pages, sizeof(uint64_t), compare);
	size_t fast = 0;
	while (fast < pages && (double)ticks[fast] / per_ns < SLOW_NS)
		fast++;
	double median_ns = fast < pages ? (double)ticks[fast + (pages - fast) / 2] / per_ns : 0;
	fprintf(stderr, "%zu pages, %zu slow, median %.0f ns, %.1f MB/s\n", pages, pages - fast,
		median_ns, (double)bytes / elapsed_s / 1e6);
	return bench_finish(&bench, checksum);
}
