/*
 * Writes to pages at a steady rate, measures how long it stood, and checks every page:
 * `dirty MEGABYTES PAGES_A_SECOND SECONDS [HOT_MEGABYTES]`.
 *
 * Each round of 1 ms writes one word into randomly chosen pages: the page's number and how
 * often it was written, of which the program keeps a record of its own. The longest time
 * between two rounds is what whatever moves or saves the machine did to it. At the end each
 * page must hold what the record says, and nothing else.
 *
 * With HOT_MEGABYTES it writes to this part only, whose stripes of 4 MiB are spread over all,
 * prints each second `dirty: second N: WRITES writes`, and checks as soon as /tmp/told exists.
 *
 * Prints `dirty: at work` once the memory is filled, and at last
 * `dirty: right: WRITES writes, the longest gap GAP us, at AT ms`, or `dirty: wrong: …`.
 */

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 512, ROUND_NS = 1000000, STRIPE = 1024 };

static uint64_t state = 88172645463325252u;

static uint64_t random_number(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
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
		perror("dirty");
		exit(1);
	}
	return got;
}

/* What word `word` of page `page` holds after `version` writes. */
static uint64_t value(uint64_t page, uint64_t word, uint64_t version)
{
	return (page << 32 | word << 20 | version) * 0x9e3779b97f4a7c15u;
}

/* The page with this number among those that are written. */
static uint64_t hot_page(uint64_t number, uint64_t hot, uint64_t pages)
{
	if (hot == pages)
		return number;
	return number / STRIPE * (pages / STRIPE) / (hot / STRIPE) * STRIPE + number % STRIPE;
}

int main(int argc, char **argv)
{
	uint64_t pages, hot, rate, writes = 0, gap = 0, gap_at = 0, begun, start, last, end;
	uint64_t second = 1, shown = 0;
	uint64_t (*page)[WORDS];
	uint32_t *version;

	if (argc < 4 || argc > 5 || (pages = strtoull(argv[1], NULL, 10) << 8) == 0) {
		fprintf(stderr, "usage: dirty MEGABYTES PAGES_A_SECOND SECONDS [HOT_MEGABYTES]\n");
		return 2;
	}
	hot = argc == 5 ? strtoull(argv[4], NULL, 10) << 8 : pages;
	if (hot > pages || (hot != pages && (hot == 0 || hot % STRIPE != 0))) {
		fprintf(stderr, "dirty: HOT_MEGABYTES is a multiple of 4, and not more than all\n");
		return 2;
	}
	rate = strtoull(argv[2], NULL, 10);
	page = memory(pages * sizeof(*page));
	version = memory(pages * sizeof(*version));
	for (uint64_t at = 0; at < pages; at++)
		for (uint64_t word = 0; word < WORDS; word++)
			page[at][word] = value(at, word, 0);
	printf("dirty: at work\n");
	fflush(stdout);
	begun = start = last = now_ns();
	end = start + strtoull(argv[3], NULL, 10) * 1000000000u;
	while (last < end) {
		uint64_t wanted = (last - start) / 1000 * rate / 1000000, now;
		struct timespec next = { 0, 0 };

		/* After a long gap it does not catch up all at once: 10 ms of writes at most. */
		if (wanted > writes + rate / 100) {
			start += (wanted - writes - rate / 100) * 1000000000u / rate;
			wanted = writes + rate / 100;
		}
		for (; writes < wanted; writes++) {
			uint64_t at = hot_page(random_number() % hot, hot, pages);

			version[at]++;
			page[at][version[at] % WORDS] = value(at, version[at] % WORDS, version[at]);
		}
		next.tv_nsec = ROUND_NS;
		while (nanosleep(&next, &next) != 0 && errno == EINTR)
			;
		now = now_ns();
		if (now - last > gap) {
			gap = now - last;
			gap_at = now - start;
		}
		last = now;
		if (argc == 5 && now - begun >= second * 1000000000u) {
			printf("dirty: second %llu: %llu writes\n", (unsigned long long)second,
			       (unsigned long long)(writes - shown));
			fflush(stdout);
			second = (now - begun) / 1000000000u + 1;
			shown = writes;
			if (access("/tmp/told", F_OK) == 0)
				break;
		}
	}
	for (uint64_t at = 0; at < pages; at++) {
		for (uint64_t word = 0; word < WORDS; word++) {
			/* The last version that was written to this word. */
			uint64_t newest = version[at];
			uint64_t behind = (newest + WORDS - word) % WORDS;
			uint64_t wanted = newest >= behind ? newest - behind : 0;

			if (page[at][word] != value(at, word, wanted)) {
				printf("dirty: wrong: word %llu of page %llu is %llx, not %llx\n",
				       (unsigned long long)word, (unsigned long long)at,
				       (unsigned long long)page[at][word],
				       (unsigned long long)value(at, word, wanted));
				return 1;
			}
		}
	}
	printf("dirty: right: %llu writes, the longest gap %llu us, at %llu ms\n",
	       (unsigned long long)writes, (unsigned long long)(gap / 1000),
	       (unsigned long long)(gap_at / 1000000));
	return 0;
}
