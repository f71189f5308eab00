/* Works on memory that has been pushed away, while there is room for it.
 *
 *     tides SIZE_MIB SEED SECONDS
 *
 * Writes SIZE_MIB, then twice as much beside it, so that a budget of less than three times
 * SIZE_MIB sends the first part away; gives the second part back. Then it looks at random words
 * of the first part in rounds of 10 ms, and changes them. A word that is not as it was written
 * ends it with 99. It prints
 *
 *     tides: at work
 *     tides: 100 rounds
 *     ...
 *     tides SIZE_MIB SEED CHECKSUM
 *
 * a line for each hundred rounds: all of it is a function of the arguments. */
#include <errno.h>
#include <sys/mman.h>

#include "elastic.h"

enum { ROUND_MS = 10, ROUNDS_PER_S = 100, WORDS_PER_ROUND = 200, DAMAGED = 99 };

static uint64_t *map(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return at;
}

/* What a word holds that was changed so often. */
static uint64_t value(uint64_t index, uint64_t changes)
{
	return (index << 16 | changes) * 0x9e3779b97f4a7c15u;
}

int main(int argc, char **argv)
{
	uint64_t size_mib, seed, seconds, checksum = 0;

	if (argc != 4)
		usage("tides");
	size_mib = parse_count(argv[1], "tides");
	seed = parse_count(argv[2], "tides");
	seconds = parse_count(argv[3], "tides");
	size_t bytes = size_mib << 20, words = bytes / sizeof(uint64_t);
	struct random random = random_from(seed);
	uint64_t *kept = map(bytes);
	uint8_t *changes = allocate(words);
	uint64_t *passing;

	for (size_t at = 0; at < words; at++) {
		kept[at] = value(at, 0);
		changes[at] = 0;
	}
	passing = map(2 * bytes);
	for (size_t at = 0; at < 2 * words; at++)
		passing[at] = at;
	munmap(passing, 2 * bytes);
	printf("tides: at work\n");
	fflush(stdout);
	for (uint64_t round = 1; round <= seconds * ROUNDS_PER_S; round++) {
		struct timespec next = { 0, ROUND_MS * 1000000 };

		for (int word = 0; word < WORDS_PER_ROUND; word++) {
			size_t at = random_next(&random) % words;

			if (kept[at] != value(at, changes[at]))
				return DAMAGED;
			kept[at] = value(at, ++changes[at]);
		}
		while (nanosleep(&next, &next) != 0 && errno == EINTR)
			;
		if (round % ROUNDS_PER_S == 0) {
			printf("tides: %llu rounds\n", (unsigned long long)round);
			fflush(stdout);
		}
	}
	for (size_t at = 0; at < words; at++) {
		if (kept[at] != value(at, changes[at]))
			return DAMAGED;
		checksum = fold(checksum, kept[at]);
	}
	printf("tides %llu %llu %016llx\n", (unsigned long long)size_mib, (unsigned long long)seed,
	       (unsigned long long)checksum);
	return fflush(stdout) == 0 ? 0 : 1;
}
