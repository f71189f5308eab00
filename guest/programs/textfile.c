/*
 * Writes text that is always the same: `textfile MEGABYTES > FILE`.
 *
 * Words of a small vocabulary in random order, so that a compressor has work
 * to do: zeros would be too easy, random bytes hopeless.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WORDS = 512, BUFFER = 1 << 16 };

static uint32_t state = 88172645u;

static uint32_t random_number(void)
{
	state ^= state << 13;
	state ^= state >> 17;
	state ^= state << 5;
	return state;
}

int main(int argc, char **argv)
{
	static char words[WORDS][16], buffer[BUFFER];
	long long left;

	if (argc != 2 || (left = atoll(argv[1]) << 20) <= 0) {
		fprintf(stderr, "usage: textfile MEGABYTES\n");
		return 2;
	}
	for (int i = 0; i < WORDS; i++) {
		int length = 2 + (int)(random_number() % 10);

		for (int k = 0; k < length; k++)
			words[i][k] = (char)('a' + random_number() % 26);
		words[i][length] = random_number() % 12 ? ' ' : '\n';
	}
	while (left > 0) {
		size_t filled = 0, count;

		while (filled < BUFFER) {
			const char *word = words[random_number() % WORDS];
			size_t length = strlen(word);

			if (length > BUFFER - filled)
				length = BUFFER - filled;
			memcpy(buffer + filled, word, length);
			filled += length;
		}
		count = left < BUFFER ? (size_t)left : BUFFER;
		if (fwrite(buffer, 1, count, stdout) != count) {
			perror("textfile");
			return 1;
		}
		left -= (long long)count;
	}
	return fflush(stdout) != 0;
}
