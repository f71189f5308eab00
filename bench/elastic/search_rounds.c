/* Linear search, repeated: ROUNDS passes over one array, each for a value that
 * is at its end only. Called as
 *
 *     search_rounds [SIZE_MIB [SEED [ROUNDS]]]
 *
 * Repetition shows what a policy learns: the second pass should be cheaper
 * than the first. The time of every round goes to standard error. */
#include "elastic.h"

static size_t search(const long *array, size_t count, long wanted)
{
	size_t found = 0;

	while (found < count && array[found] != wanted)
		found++;
	return found;
}

int main(int argc, char **argv)
{
	uint64_t rounds = 10;

	if (argc == 4) {
		rounds = parse_count(argv[3], "search_rounds");
		argc = 3;
	}
	struct bench bench = bench_start(argc, argv, "search_rounds");
	size_t count = bench_bytes(&bench) / sizeof(long);
	long *array = allocate(count * sizeof(long));
	struct random random = random_from(bench.seed);

	for (size_t i = 0; i < count; i++)
		array[i] = (long)(random_next(&random) >> 1);
	array[count - 1] = -1;

	bench_measure(&bench);
	uint64_t checksum = 0;
	for (uint64_t round = 0; round < rounds; round++) {
		double start_s = now_s();

		checksum = fold(checksum, search(array, count, -1));
		fprintf(stderr, "round %llu: %.6f s\n",
			(unsigned long long)round, now_s() - start_s);
	}
	return bench_finish(&bench, checksum);
}
