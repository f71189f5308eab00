/* Block sort: a stable merge sort of long integers that keeps to blocks.
 *
 * Blocks of BLOCK_LONGS are sorted by insertion, then merged pair by pair,
 * twice as long in each pass, with a buffer of a fixed size: where the shorter
 * side does not fit into the buffer, both sides are split at a common pivot,
 * rotated, and merged part by part. So the array is all the memory there is. */
#include "elastic.h"

#define BLOCK_LONGS 32u
#define BUFFER_LONGS 65536u

static long buffer[BUFFER_LONGS];

static void insertion_sort(long *array, size_t count)
{
	for (size_t i = 1; i < count; i++) {
		long value = array[i];
		size_t j = i;

		for (; j > 0 && array[j - 1] > value; j--)
			array[j] = array[j - 1];
		array[j] = value;
	}
}

static void reverse(long *array, size_t count)
{
	for (size_t i = 0; i < count / 2; i++) {
		long swap = array[i];

		array[i] = array[count - 1 - i];
		array[count - 1 - i] = swap;
	}
}

static void rotate(long *array, size_t left, size_t right)
{
	reverse(array, left);
	reverse(array + left, right);
	reverse(array, left + right);
}

/* Elements of a sorted array that come before `value`, equal ones included
 * when `after_equal` is set. */
static size_t bound(const long *array, size_t count, long value, int after_equal)
{
	size_t low = 0;

	while (low < count) {
		size_t middle = low + (count - low) / 2;

		if (array[middle] < value || (after_equal && array[middle] == value))
			low = middle + 1;
		else
			count = middle;
	}
	return low;
}

static void merge_from_left(long *array, size_t left, size_t right)
{
	size_t l = 0, r = left, out = 0, end = left + right;

	memcpy(buffer, array, left * sizeof(long));
	while (l < left && r < end)
		array[out++] = array[r] < buffer[l] ? array[r++] : buffer[l++];
	memcpy(array + out, buffer + l, (left - l) * sizeof(long));
}

static void merge_from_right(long *array, size_t left, size_t right)
{
	size_t l = left, r = right, out = left + right;

	memcpy(buffer, array + left, right * sizeof(long));
	while (l > 0 && r > 0)
		array[--out] = buffer[r - 1] < array[l - 1] ? array[--l] : buffer[--r];
	memcpy(array + out - r, buffer, r * sizeof(long));
}

static void merge(long *array, size_t left, size_t right)
{
	while (left > 0 && right > 0 && array[left - 1] > array[left]) {
		if (left <= BUFFER_LONGS && left <= right) {
			merge_from_left(array, left, right);
			return;
		}
		if (right <= BUFFER_LONGS) {
			merge_from_right(array, left, right);
			return;
		}
		size_t left_cut, right_cut;

		if (left >= right) {
			left_cut = left / 2;
			right_cut = bound(array + left, right, array[left_cut], 0);
		} else {
			right_cut = right / 2;
			left_cut = bound(array, left, array[left + right_cut], 1);
		}
		rotate(array + left_cut, left - left_cut, right_cut);
		merge(array, left_cut, right_cut);
		/* The second half is merged by the next turn of the loop. */
		array += left_cut + right_cut;
		left -= left_cut;
		right -= right_cut;
	}
}

static void block_sort(long *array, size_t count)
{
	for (size_t i = 0; i < count; i += BLOCK_LONGS)
		insertion_sort(array + i, count - i < BLOCK_LONGS ? count - i : BLOCK_LONGS);
	for (size_t width = BLOCK_LONGS; width < count; width *= 2) {
		for (size_t i = 0; i + width < count; i += 2 * width) {
			size_t right = count - i - width;

			merge(array + i, width, right < width ? right : width);
		}
	}
}

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "block_sort");
	size_t count = bench_bytes(&bench) / sizeof(long);
	long *array = allocate(count * sizeof(long));
	struct random random = random_from(bench.seed);

	for (size_t i = 0; i < count; i++)
		array[i] = (long)random_next(&random);

	bench_measure(&bench);
	block_sort(array, count);
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
