/*
 * What machines have of their network: `talk WHAT AMOUNT`.
 *
 *   talk trip SECONDS    one byte from rank 0 to rank 1 and back, again and again:
 *                        a line for each 100 ms, and the median and the longest
 *   talk stream SECONDS  4 MiB from rank 0 to rank 1, a byte back: MB/s
 *   talk ring ROUNDS     all ranks: 1 KiB to both neighbours, and a sum of all;
 *                        ends with 1 if a sum is wrong
 */

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAM_BYTES = 4 << 20, RING_BYTES = 1 << 10, LINES_PER_S = 10, TRIPS_MAX = 4000000 };

static int compare(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;

	return (x > y) - (x < y);
}

/* Rank 0 says with each byte whether another one follows. */
static void trip(int rank, double seconds)
{
	static float took[TRIPS_MAX];
	double begun = MPI_Wtime(), line = begun, longest = 0, longest_line = 0, at = 0;
	long count = 0, count_line = 0;
	char more = 1;

	while (more) {
		double now = MPI_Wtime(), after;

		if (rank == 1) {
			MPI_Recv(&more, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(&more, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
			continue;
		}
		more = now - begun < seconds && count + 1 < TRIPS_MAX;
		MPI_Send(&more, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
		MPI_Recv(&more, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		after = MPI_Wtime() - now;
		took[count++] = (float)(after * 1e6);
		count_line++;
		if (after > longest_line)
			longest_line = after;
		if (after > longest)
			longest = after, at = now - begun;
		if (now - line >= 1.0 / LINES_PER_S || !more) {
			printf("at %.3f s: %ld trips, longest %.0f us\n", now - begun, count_line,
			       longest_line * 1e6);
			fflush(stdout);
			line = now, count_line = 0, longest_line = 0;
		}
	}
	if (rank == 0) {
		qsort(took, (size_t)count, sizeof(took[0]), compare);
		printf("trips: %ld, median %.1f us, longest %.0f us at %.3f s\n", count,
		       (double)took[count / 2], longest * 1e6, at);
	}
}

static void stream(int rank, double seconds)
{
	char *bytes = calloc(1, STREAM_BYTES);
	double begun = MPI_Wtime(), now = begun;
	long count = 0;
	char more = 1;

	if (!bytes)
		MPI_Abort(MPI_COMM_WORLD, 1);
	while (more) {
		if (rank == 1) {
			MPI_Recv(bytes, STREAM_BYTES, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			more = bytes[0];
			MPI_Send(&more, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
			continue;
		}
		more = bytes[0] = now - begun < seconds;
		MPI_Send(bytes, STREAM_BYTES, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
		MPI_Recv(&more, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		count++;
		now = MPI_Wtime();
	}
	if (rank == 0)
		printf("stream: %ld messages, %.1f MB/s\n", count,
		       (double)count * STREAM_BYTES / (now - begun) / 1e6);
	free(bytes);
}

/* Each rank sends its number and the round's; the sum of all is known. */
static int ring(int rank, int size, long rounds)
{
	static int64_t to_right[RING_BYTES / 8], to_left[RING_BYTES / 8];
	static int64_t from_left[RING_BYTES / 8], from_right[RING_BYTES / 8];
	int left = (rank + size - 1) % size, right = (rank + 1) % size, wrong = 0, any;
	double begun = MPI_Wtime();

	for (long round = 0; round < rounds; round++) {
		int64_t mine, sum;

		to_right[0] = to_left[RING_BYTES / 8 - 1] = rank * 1000003L + round;
		MPI_Sendrecv(to_right, RING_BYTES, MPI_CHAR, right, 1, from_left, RING_BYTES, MPI_CHAR,
			     left, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		MPI_Sendrecv(to_left, RING_BYTES, MPI_CHAR, left, 2, from_right, RING_BYTES, MPI_CHAR,
			     right, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		mine = from_left[0] + from_right[RING_BYTES / 8 - 1];
		MPI_Allreduce(&mine, &sum, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
		wrong |= sum != 1000003L * size * (size - 1) + 2 * round * size;
	}
	MPI_Reduce(&wrong, &any, 1, MPI_INT, MPI_MAX, 0, MPI_COMM_WORLD);
	if (rank == 0)
		printf("ring: %ld rounds of %d ranks in %.3f s: %s\n", rounds, size,
		       MPI_Wtime() - begun, any ? "wrong" : "right");
	return rank == 0 ? any : 0;
}

int main(int argc, char **argv)
{
	int rank, size, code = 2;
	double amount = argc == 3 ? atof(argv[2]) : 0;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &size);
	if (amount <= 0 || size < 2) {
		if (rank == 0)
			fprintf(stderr, "talk: trip SECONDS, stream SECONDS or ring ROUNDS, on 2 ranks at least\n");
	} else if (strcmp(argv[1], "ring") == 0) {
		code = ring(rank, size, (long)amount);
	} else if (strcmp(argv[1], "trip") == 0 || strcmp(argv[1], "stream") == 0) {
		if (rank < 2)
			(argv[1][0] == 't' ? trip : stream)(rank, amount);
		code = 0;
	} else if (rank == 0) {
		fprintf(stderr, "talk: what is %s? trip, stream and ring are known\n", argv[1]);
	}
	MPI_Finalize();
	return code;
}
