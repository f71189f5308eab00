/* Memory that makes a program larger than its home's budget, so that it has
 * spread over the nodes before it does what it is for. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static unsigned char *ballast;
static size_t ballast_bytes;

static inline unsigned char ballast_byte(size_t at)
{
	return (unsigned char)((at >> 9) * 7 + 3);
}

/* Visits all of it, so that whatever else there is goes away. */
static inline void walk_ballast(const char *after)
{
	for (size_t at = 0; at < ballast_bytes; at += 512) {
		if (ballast[at] != ballast_byte(at)) {
			printf("wrong byte at %zu after %s\n", at, after);
			fflush(stdout);
			_Exit(98);
		}
	}
}

static inline void touch_ballast(const char *mib)
{
	ballast_bytes = (size_t)atol(mib) << 20;
	ballast = malloc(ballast_bytes + 1);
	if (ballast == NULL)
		exit(99);
	for (size_t at = 0; at < ballast_bytes; at += 512)
		ballast[at] = ballast_byte(at);
	walk_ballast("writing");
}
