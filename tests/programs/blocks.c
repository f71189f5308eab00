/* Coherence while the layout changes: what was written last is what is read,
 * wherever it was moved since.
 *
 *     blocks [SIZE_MIB [STEPS [SEED]]]
 *
 * Memory of BLOCK_PAGES pages a block. Between visits as those of `coherence`
 * blocks are moved by mremap, grown and shrunk, runs of pages are discarded,
 * blocks are unmapped and mapped anew, made read-only and writable again. A
 * stale, torn or zero-filled page, or one that is not zero where it must be,
 * ends the program with 1. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE_BYTES 4096u
#define PAGE_WORDS 512u
#define BLOCK_PAGES 64u
#define BLOCK_BYTES (BLOCK_PAGES * (size_t)PAGE_BYTES)
/* Words of a page that are written and looked at: spread over it. */
#define STRIDE 37u

struct block {
	uint64_t *memory;
	uint32_t versions[BLOCK_PAGES];
};

static uint64_t state;
static uint64_t checks;
static struct block *blocks;
static char *spare;

static uint64_t next(void)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1du;
}

static void fail(const char *what)
{
	perror(what);
	exit(2);
}

static uint64_t pattern(const struct block *block, unsigned page, unsigned word)
{
	uint32_t version = block->versions[page];
	uint64_t place = (uint64_t)(block - blocks) * BLOCK_PAGES + page;

	return version == 0 ? 0 : (place << 40) ^ ((uint64_t)version << 10) ^ word;
}

static void verify(const struct block *block, unsigned page, const char *after)
{
	for (unsigned word = next() % STRIDE; word < PAGE_WORDS; word += STRIDE) {
		uint64_t seen = *(volatile uint64_t *)&block->memory[page * PAGE_WORDS + word];
		uint64_t right = pattern(block, page, word);

		checks++;
		if (seen != right) {
			printf("block %zu page %u word %u after %s: %016llx instead of %016llx\n",
			       (size_t)(block - blocks), page, word, after,
			       (unsigned long long)seen, (unsigned long long)right);
			exit(1);
		}
	}
}

static void visit(struct block *block, unsigned page, uint32_t version)
{
	verify(block, page, "a visit");
	if (next() % 3 == 0)
		return;
	block->versions[page] = version;
	for (unsigned word = 0; word < PAGE_WORDS; word++)
		block->memory[page * PAGE_WORDS + word] = pattern(block, page, word);
}

/* To the spare place; its own becomes the spare one. */
static void move(struct block *block)
{
	char *old = (char *)block->memory;
	void *moved = mremap(old, BLOCK_BYTES, BLOCK_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, spare);

	if (moved == MAP_FAILED) {
		/* What is one mapping for us may be several for the kernel; it
		 * may have removed what was in the spare place. */
		if (errno != EFAULT)
			fail("mremap");
		old = spare;
	} else {
		block->memory = moved;
	}
	spare = mmap(old, BLOCK_BYTES, PROT_NONE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	if (spare == MAP_FAILED)
		fail("mmap");
}

static void grow_and_shrink(struct block *block)
{
	size_t beyond = BLOCK_PAGES + next() % BLOCK_PAGES;
	uint64_t *grown = mremap(block->memory, BLOCK_BYTES, 2 * BLOCK_BYTES, MREMAP_MAYMOVE);

	if (grown == MAP_FAILED && errno == EFAULT)
		return;
	if (grown == MAP_FAILED)
		fail("mremap");
	block->memory = grown;
	if (grown[beyond * PAGE_WORDS] != 0) {
		printf("block %zu: not zero where it grew\n", (size_t)(block - blocks));
		exit(1);
	}
	if (mremap(grown, 2 * BLOCK_BYTES, BLOCK_BYTES, 0) != grown)
		fail("mremap");
}

static void forget(struct block *block, unsigned first, unsigned count)
{
	for (unsigned page = first; page < first + count; page++)
		block->versions[page] = 0;
}

static void change(struct block *block)
{
	unsigned first = next() % BLOCK_PAGES;
	unsigned count = 1 + next() % (BLOCK_PAGES - first);
	char *run = (char *)block->memory + first * PAGE_BYTES;
	const char *after = "";

	switch (next() % 6) {
	case 0:
	case 1:
		after = "a move";
		move(block);
		break;
	case 2:
		after = "growing";
		grow_and_shrink(block);
		break;
	case 3:
		after = "madvise";
		if (madvise(run, count * PAGE_BYTES, MADV_DONTNEED) != 0)
			fail("madvise");
		forget(block, first, count);
		break;
	case 4:
		after = "mapping anew";
		if (munmap(run, count * PAGE_BYTES) != 0)
			fail("munmap");
		if (mmap(run, count * PAGE_BYTES, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != run)
			fail("mmap");
		forget(block, first, count);
		break;
	default:
		after = "mprotect";
		if (mprotect(run, count * PAGE_BYTES, PROT_READ) != 0)
			fail("mprotect");
		verify(block, first, "making it read-only");
		if (mprotect(run, count * PAGE_BYTES, PROT_READ | PROT_WRITE) != 0)
			fail("mprotect");
	}
	if (next() % 2 == 0)
		verify(block, next() % BLOCK_PAGES, after);
}

static void *map(size_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		fail("mmap");
	return memory;
}

int main(int argc, char **argv)
{
	size_t count = (size_t)(argc > 1 ? atol(argv[1]) : 16) * 4;
	uint32_t steps = argc > 2 ? (uint32_t)atol(argv[2]) : 100000;

	state = (argc > 3 ? strtoull(argv[3], NULL, 10) : 1) * 0x9e3779b97f4a7c15u + 1;
	blocks = calloc(count, sizeof(*blocks));
	if (blocks == NULL || count == 0) {
		fprintf(stderr, "usage: blocks [SIZE_MIB [STEPS [SEED]]]\n");
		return 2;
	}
	for (size_t i = 0; i < count; i++)
		blocks[i].memory = map(BLOCK_BYTES);
	spare = map(BLOCK_BYTES);
	for (uint32_t step = 1; step <= steps; step++) {
		struct block *block = &blocks[next() % count];
		unsigned first = next() % BLOCK_PAGES;
		unsigned run = 1 + next() % 16;

		if (next() % 16 == 0)
			change(block);
		for (unsigned i = 0; i < run && first + i < BLOCK_PAGES; i++)
			visit(block, first + i, step);
	}
	for (size_t i = 0; i < count; i++)
		for (unsigned page = 0; page < BLOCK_PAGES; page++)
			verify(&blocks[i], page, "everything");
	printf("%zu blocks, %u steps, %llu checks\n", count, steps, (unsigned long long)checks);
	return 0;
}
