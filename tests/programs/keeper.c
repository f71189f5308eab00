/*
 * keeper TOKEN MIB SECONDS CODE
 *
 * Fills so much memory with words that it can compute again. Then it writes a line each second,
 * with the token and a number, looks at a part of the memory, and writes that part anew. After
 * the seconds it ends with the code. Memory that is not as it was written ends it with 99.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PARTS 64
#define DAMAGED 99

static uint64_t word(uint64_t index, uint64_t round)
{
	uint64_t x = (index + 1) * 0x9e3779b97f4a7c15ULL ^ round * 0xbf58476d1ce4e5b9ULL;
	return x ^ x >> 29;
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	size_t words = (size_t)atol(argv[2]) << 17;
	long seconds = atol(argv[3]);
	uint64_t *memory = mmap(NULL, words * 8, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return 3;
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("%s start %d\n", argv[1], (int)getpid());
	for (size_t index = 0; index < words; index++)
		memory[index] = word(index, 0);
	for (long second = 0; second < seconds; second++) {
		size_t part = (size_t)second % PARTS;
		uint64_t round = (uint64_t)second / PARTS;
		for (size_t index = words / PARTS * part; index < words / PARTS * (part + 1); index++) {
			if (memory[index] != word(index, round)) {
				printf("%s damaged word %zu\n", argv[1], index);
				return DAMAGED;
			}
			memory[index] = word(index, round + 1);
		}
		printf("%s %ld\n", argv[1], second);
		struct timespec pause = { 1, 0 };
		nanosleep(&pause, NULL);
	}
	printf("%s done\n", argv[1]);
	return atoi(argv[4]);
}
