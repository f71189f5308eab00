/*
 * endures MIB FILE
 *
 * Takes so much memory in small pieces, fills it with words that it can compute again, and says
 * so. Then it looks at all of it and writes it anew, again and again, until FILE exists. At the
 * end it says what the memory says, which does not depend on how often that was. Memory that is
 * not as it was written ends it with 99.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PIECE_WORDS (64u << 10)
#define PIECES_MAX 8192
#define DAMAGED 99

static uint64_t *pieces[PIECES_MAX];

static uint64_t word(uint64_t index, uint64_t round)
{
	uint64_t x = (index + 1) * 0x9e3779b97f4a7c15ULL ^ round * 0xbf58476d1ce4e5b9ULL;
	return x ^ x >> 29;
}

/* Checks the words of one round, and writes those of the next. */
static void renew(size_t piece, uint64_t round)
{
	for (size_t at = 0; at < PIECE_WORDS; at++) {
		uint64_t index = piece * PIECE_WORDS + at;
		if (pieces[piece][at] != word(index, round)) {
			printf("damaged word %zu of piece %zu\n", at, piece);
			fflush(stdout);
			_exit(DAMAGED);
		}
		pieces[piece][at] = word(index, round + 1);
	}
}

int main(int argc, char **argv)
{
	if (argc != 3)
		return 2;
	size_t count = (size_t)atol(argv[1]) * 2;
	if (count == 0 || count > PIECES_MAX)
		return 2;
	for (size_t piece = 0; piece < count; piece++) {
		pieces[piece] = malloc(PIECE_WORDS * 8);
		if (pieces[piece] == NULL)
			return 3;
		for (size_t at = 0; at < PIECE_WORDS; at++)
			pieces[piece][at] = word(piece * PIECE_WORDS + at, 0);
	}
	printf("filled\n");
	fflush(stdout);
	uint64_t steps = 0;
	while (access(argv[2], F_OK) != 0) {
		renew(steps % count, steps / count);
		steps++;
	}
	uint64_t sum = 0;
	for (size_t piece = 0; piece < count; piece++) {
		uint64_t round = steps / count + (piece < steps % count);
		for (size_t at = 0; at < PIECE_WORDS; at++)
			sum += pieces[piece][at] ^ word(piece * PIECE_WORDS + at, round) ^ piece;
	}
	printf("sum %llu\n", (unsigned long long)sum);
	return 0;
}
