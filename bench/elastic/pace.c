/* Goes over a working set at full speed, and tells how far it came in each millisecond.
 *
 *     pace MEGABYTES SECONDS
 *
 * A step takes a page at random, reads one word of each of its cache lines and writes one. It
 * prints its clock (CLOCK_MONOTONIC) some times, so that its reader knows what the console
 * adds, and works then without a word:
 *
 *     pace: now 1234567 us
 *     pace: at work
 *     pace: began at 1434567 us
 *     pace: 0: 812 807 814 …
 *     pace: done
 *
 * where each line of steps begins with the number of its first millisecond. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

enum { WORDS = 512, LINE_WORDS = 8, SLOT_NS = 1000000, STAMPS = 10, STAMP_NS = 20000000, SHOWN = 20 };

static uint64_t state = 88172645463325252u;

static uint64_t random_below(uint64_t bound)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (state >> 32) * bound >> 32;
}

static uint64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void *memory(size_t bytes)
{
	void *got = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (got == MAP_FAILED) {
		perror("pace");
		exit(1);
	}
	return got;
}

int main(int argc, char **argv)
{
	uint64_t pages, slots, begun, slot = 0;
	volatile uint64_t (*page)[WORDS];
	uint32_t *steps;

	if (argc != 3 || (pages = strtoull(argv[1], NULL, 10) * 1000000u / sizeof(*page)) == 0 ||
	    (slots = strtoull(argv[2], NULL, 10) * 1000) == 0) {
		fprintf(stderr, "usage: pace MEGABYTES SECONDS\n");
		return 2;
	}
	page = memory(pages * sizeof(*page));
	steps = memory(slots * sizeof(*steps));
	for (uint64_t at = 0; at < pages; at++)
		for (uint64_t word = 0; word < WORDS; word++)
			page[at][word] = at + word;
	for (uint64_t at = 0; at < slots; at++)
		steps[at] = 0;
	for (int stamp = 0; stamp < STAMPS; stamp++) {
		struct timespec pause = { 0, STAMP_NS };

		printf("pace: now %llu us\n", (unsigned long long)(now_ns() / 1000));
		fflush(stdout);
		nanosleep(&pause, NULL);
	}
	printf("pace: at work\n");
	fflush(stdout);
	begun = now_ns();
	while ((slot = (now_ns() - begun) / SLOT_NS) < slots) {
		volatile uint64_t *word = page[random_below(pages)];
		uint64_t sum = 0;

		for (int line = 0; line < WORDS; line += LINE_WORDS)
			sum += word[line];
		word[sum % WORDS] = sum;
		steps[slot]++;
	}
	printf("pace: began at %llu us\n", (unsigned long long)(begun / 1000));
	for (uint64_t at = 0; at < slots; at += SHOWN) {
		printf("pace: %llu:", (unsigned long long)at);
		for (uint64_t shown = at; shown < at + SHOWN && shown < slots; shown++)
			printf(" %u", steps[shown]);
		printf("\n");
	}
	printf("pace: done\n");
	return 0;
}
