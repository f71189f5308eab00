/* Linear search: one pass over an array of long integers that does not hold
 * the wanted value until its last element. */
#include "elastic.h"

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "linear_search");
	size_t count = bench_bytes(&bench) / sizeof(long);
	long *array = allocate(count * sizeof(long));
	struct random random = random_from(bench.seed);
	const long wanted = -1;

	for (size_t i = 0; i < count; i++)
		array[i] = (long)(random_next(&random) >> 1);
	array[count - 1] = wanted;

	bench_measure(&bench);
	size_t found = 0;
	while (found < count && array[found] != wanted)
		found++;
	return bench_finish(&bench, found);
}
