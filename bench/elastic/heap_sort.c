/* Heap sort of an array of long integers, in place. */
#include "elastic.h"

static void sift_down(long *heap, size_t root, size_t count)
{
	long value = heap[root];

	for (;;) {
		size_t child = 2 * root + 1;

		if (child >= count)
			break;
		if (child + 1 < count && heap[child + 1] > heap[child])
			child++;
		if (heap[child] <= value)
			break;
		heap[root] = heap[child];
		root = child;
	}
	heap[root] = value;
}

static void heap_sort(long *array, size_t count)
{
	for (size_t root = count / 2; root-- > 0;)
		sift_down(array, root, count);
	for (size_t end = count; end-- > 1;) {
		long greatest = array[0];

		array[0] = array[end];
		array[end] = greatest;
		sift_down(array, 0, end);
	}
}

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "heap_sort");
	size_t count = bench_bytes(&bench) / sizeof(long);
	long *array = allocate(count * sizeof(long));
	struct random random = random_from(bench.seed);

	for (size_t i = 0; i < count; i++)
		array[i] = (long)random_next(&random);

	bench_measure(&bench);
	heap_sort(array, count);
	uint64_t checksum = 0;
	for (size_t i = 0; i < count; i++) {
		if (i > 0 && array[i - 1] > array[i]) {
			fprintf(stderr, "not sorted at %zu\n", i);
			return 1;
		}
		checksum = fold(checksum, (uint64_t)array[i]);
	}
	return bench_finish(&bench, checksum);
}
