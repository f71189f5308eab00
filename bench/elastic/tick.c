/* Writes a line at a steady rate, so that its reader sees how long it stood.
 *
 *     tick PERIOD_MS
 *
 * A line is `t`: the console of a guest costs an exit for each byte. It ends when /tmp/told
 * exists. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { LOOK = 50 };

int main(int argc, char **argv)
{
	long period_ms;

	if (argc != 2 || (period_ms = atol(argv[1])) < 1 || period_ms > 999) {
		fprintf(stderr, "usage: tick PERIOD_MS\n");
		return 2;
	}
	for (uint64_t number = 0;; number++) {
		struct timespec next = { 0, period_ms * 1000000 };

		if (write(STDOUT_FILENO, "t\n", 2) != 2)
			return 1;
		while (nanosleep(&next, &next) != 0 && errno == EINTR)
			;
		if (number % LOOK == 0 && access("/tmp/told", F_OK) == 0)
			return 0;
	}
}
