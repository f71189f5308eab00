/* Writes SIZE_MIB MiB of text, a function of its arguments alone.
 *
 *     text SIZE_MIB [SEED] > FILE
 *
 * Lines of one to twelve words from a vocabulary that is skewed as natural
 * text is, each line behind a number: it compresses, sorts and splits like
 * text. No line is longer than 200 bytes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state;

static uint64_t next(void)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1du;
}

static size_t put_word(char *out)
{
	static const char *const syllables[] = {
		"ka", "lo", "mi", "nu", "pre", "sta", "ver", "tion", "el", "as",
		"tic", "or", "di", "na", "ry", "pa", "ge", "we", "ft", "o",
	};
	/* The product of two uniform numbers favours the small ones. */
	uint64_t rank = (next() % 700) * (next() % 700) / 10;
	size_t length = 0;

	do {
		const char *syllable = syllables[rank % 20];
		size_t bytes = strlen(syllable);

		memcpy(out + length, syllable, bytes);
		length += bytes;
		rank /= 20;
	} while (rank > 0);
	return length;
}

int main(int argc, char **argv)
{
	if (argc < 2 || argc > 3 || atol(argv[1]) <= 0) {
		fprintf(stderr, "usage: text SIZE_MIB [SEED]\n");
		return 2;
	}
	uint64_t left = (uint64_t)atol(argv[1]) << 20;

	state = (argc > 2 ? strtoull(argv[2], NULL, 10) : 1) * 0x9e3779b97f4a7c15u + 1;
	while (left > 0) {
		char line[256];
		size_t length = (size_t)snprintf(line, sizeof(line), "%llu",
						 (unsigned long long)(next() % 100000000));
		uint64_t words = 1 + next() % 12;

		for (uint64_t word = 0; word < words; word++) {
			line[length++] = ' ';
			length += put_word(line + length);
		}
		line[length++] = '\n';
		if (length > left) {
			length = left;
			line[length - 1] = '\n';
		}
		if (fwrite(line, 1, length, stdout) != length) {
			perror("text");
			return 1;
		}
		left -= length;
	}
	return fflush(stdout) == 0 ? 0 : 1;
}
