/* Count sort of long integers from a range of RANGE values: one pass counts,
 * one pass places every element into a second array. Half of the memory is the
 * input, half the output; the counts are small and hot. */
#include "elastic.h"

#define RANGE 65536u

static size_t counts[RANGE];

static void count_sort(const long *input, long *output, size_t count)
{
	size_t total = 0;

	for (size_t i = 0; i < count; i++)
		counts[input[i]]++;
	for (size_t value = 0; value < RANGE; value++) {
		size_t here = counts[value];

		counts[value] = total;
		total += here;
	}
	for (size_t i = 0; i < count; i++)
		output[counts[input[i]]++] = input[i];
}

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "count_sort");
	size_t count = bench_bytes(&bench) / (2 * sizeof(long));
	long *input = allocate(count * sizeof(long));
	long *output = allocate(count * sizeof(long));
	struct random random = random_from(bench.seed);

	for (size_t i = 0; i < count; i++)
		input[i] = (long)(random_next(&random) % RANGE);
	memset(output, 0, count * sizeof(long));

	bench_measure(&bench);
	count_sort(input, output, count);
	uint64_t checksum = 0;
	for (size_t i = 0; i < count; i++) {
		if (i > 0 && output[i - 1] > output[i]) {
			fprintf(stderr, "not sorted at %zu\n", i);
			return 1;
		}
		checksum = fold(checksum, (uint64_t)output[i]);
	}
	return bench_finish(&bench, checksum);
}
