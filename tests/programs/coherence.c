/* A single location's coherence: what was written last is what is read.
 *
 *     coherence [SIZE_MIB [ROUNDS [SEED]]]
 *
 * Keeps a shadow of every page's version in a small table and, in a random
 * order with runs and repetitions, writes pages whole, in parts, and reads them
 * back. The memory is larger than a node's budget, so pages leave and return
 * all the time. A stale, torn or zero-filled page ends the program with 1. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE_WORDS 512u

static uint64_t state;

static uint64_t next(void)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1du;
}

struct shadow {
	uint32_t front; /* version of the first half of the page */
	uint32_t back;  /* version of the second half */
};

static uint64_t *memory;
static struct shadow *shadows;
static uint64_t checks;

static uint64_t pattern(size_t page, uint32_t version, unsigned word)
{
	return version == 0 ? 0 : (page << 40) ^ ((uint64_t)version << 10) ^ word;
}

static void verify(size_t page, unsigned word)
{
	uint32_t version = word < PAGE_WORDS / 2 ? shadows[page].front : shadows[page].back;
	uint64_t seen = *(volatile uint64_t *)&memory[page * PAGE_WORDS + word];
	uint64_t right = pattern(page, version, word);

	checks++;
	if (seen != right) {
		printf("page %zu word %u: %016llx instead of %016llx (version %u)\n", page, word,
		       (unsigned long long)seen, (unsigned long long)right, version);
		exit(1);
	}
}

static void write_half(size_t page, unsigned first, uint32_t version)
{
	for (unsigned word = first; word < first + PAGE_WORDS / 2; word++)
		memory[page * PAGE_WORDS + word] = pattern(page, version, word);
}

static void visit(size_t page, uint64_t choice, uint32_t version)
{
	/* Whatever follows, one word must be right now: often the first access
	 * after the page was away. */
	verify(page, (unsigned)(choice >> 8) % PAGE_WORDS);
	switch (choice % 4) {
	case 0:
		write_half(page, 0, version);
		write_half(page, PAGE_WORDS / 2, version);
		shadows[page] = (struct shadow){ version, version };
		break;
	case 1:
		write_half(page, 0, version);
		shadows[page].front = version;
		break;
	case 2:
		write_half(page, PAGE_WORDS / 2, version);
		shadows[page].back = version;
		break;
	default:
		for (unsigned word = 0; word < PAGE_WORDS; word++)
			verify(page, word);
	}
	verify(page, 0);
	verify(page, PAGE_WORDS - 1);
}

int main(int argc, char **argv)
{
	size_t pages = (size_t)(argc > 1 ? atol(argv[1]) : 16) * 256;
	uint32_t rounds = argc > 2 ? (uint32_t)atol(argv[2]) : 4;

	state = (argc > 3 ? strtoull(argv[3], NULL, 10) : 1) * 0x9e3779b97f4a7c15u + 1;
	memory = aligned_alloc(4096, pages * PAGE_WORDS * sizeof(uint64_t));
	shadows = calloc(pages, sizeof(*shadows));
	if (memory == NULL || shadows == NULL || pages == 0) {
		fprintf(stderr, "usage: coherence [SIZE_MIB [ROUNDS [SEED]]]\n");
		return 2;
	}
	memset(memory, 0, pages * PAGE_WORDS * sizeof(uint64_t));
	for (uint32_t round = 1; round <= rounds; round++) {
		for (size_t n = 0; n < pages;) {
			size_t start = next() % pages;
			size_t run = 1 + next() % 64;

			for (size_t i = 0; i < run && start + i < pages; i++, n++)
				visit(start + i, next(), round);
		}
	}
	for (size_t page = 0; page < pages; page++)
		for (unsigned word = 0; word < PAGE_WORDS; word++)
			verify(page, word);
	printf("%zu pages, %u rounds, %llu checks\n", pages, rounds, (unsigned long long)checks);
	return 0;
}
