/* Threads: a counter under a mutex, a bounded queue under condition variables,
 * a parallel sort, thread-local storage, a barrier, and a cancelled thread.
 *
 *     threads [SIZE_MIB [THREADS]] */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS_MAX 16
#define COUNTS 20000
#define QUEUE_LENGTH 16
#define ITEMS 5000

static size_t thread_count = 4;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t not_empty = PTHREAD_COND_INITIALIZER;
static pthread_cond_t not_full = PTHREAD_COND_INITIALIZER;
static pthread_barrier_t barrier;
static uint64_t counter;
static _Thread_local uint64_t mine;
static uint64_t queue[QUEUE_LENGTH];
static size_t queue_used, queue_head, produced, consumed;
static uint64_t consumed_sum;

static void *count(void *argument)
{
	for (int i = 0; i < COUNTS; i++) {
		pthread_mutex_lock(&lock);
		counter++;
		pthread_mutex_unlock(&lock);
		mine++;
	}
	pthread_barrier_wait(&barrier);
	*(uint64_t *)argument = mine;
	return argument;
}

static void *produce(void *argument)
{
	(void)argument;
	for (;;) {
		pthread_mutex_lock(&lock);
		while (queue_used == QUEUE_LENGTH && produced < ITEMS)
			pthread_cond_wait(&not_full, &lock);
		if (produced == ITEMS) {
			pthread_cond_broadcast(&not_full);
			pthread_cond_broadcast(&not_empty);
			pthread_mutex_unlock(&lock);
			return NULL;
		}
		queue[(queue_head + queue_used++) % QUEUE_LENGTH] = ++produced;
		pthread_cond_signal(&not_empty);
		pthread_mutex_unlock(&lock);
	}
}

static void *consume(void *argument)
{
	(void)argument;
	for (;;) {
		pthread_mutex_lock(&lock);
		while (queue_used == 0 && consumed < ITEMS && produced < ITEMS)
			pthread_cond_wait(&not_empty, &lock);
		if (queue_used == 0) {
			pthread_mutex_unlock(&lock);
			return NULL;
		}
		consumed_sum += queue[queue_head];
		queue_head = (queue_head + 1) % QUEUE_LENGTH;
		queue_used--;
		consumed++;
		pthread_cond_signal(&not_full);
		pthread_mutex_unlock(&lock);
	}
}

struct part {
	uint64_t *values;
	size_t count;
};

static int compare(const void *left, const void *right)
{
	uint64_t l = *(const uint64_t *)left, r = *(const uint64_t *)right;

	return (l > r) - (l < r);
}

static void *sort_part(void *argument)
{
	struct part *part = argument;

	qsort(part->values, part->count, sizeof(uint64_t), compare);
	return NULL;
}

static uint64_t merge_checksum(struct part *parts)
{
	size_t at[THREADS_MAX] = { 0 };
	uint64_t checksum = 0;

	for (;;) {
		size_t best = thread_count;

		for (size_t i = 0; i < thread_count; i++) {
			if (at[i] < parts[i].count &&
			    (best == thread_count ||
			     parts[i].values[at[i]] < parts[best].values[at[best]]))
				best = i;
		}
		if (best == thread_count)
			return checksum;
		checksum = checksum * 31 + parts[best].values[at[best]++];
	}
}

static void join_all(pthread_t *threads)
{
	for (size_t i = 0; i < thread_count; i++)
		pthread_join(threads[i], NULL);
}

static void *wait_for_cancel(void *argument)
{
	for (;;)
		pause();
	return argument;
}

int main(int argc, char **argv)
{
	size_t bytes = (size_t)(argc > 1 ? atol(argv[1]) : 16) << 20;
	pthread_t threads[THREADS_MAX];
	uint64_t locals[THREADS_MAX];
	struct part parts[THREADS_MAX];

	if (argc > 2)
		thread_count = (size_t)atol(argv[2]);
	if (thread_count < 2 || thread_count > THREADS_MAX || bytes == 0) {
		fprintf(stderr, "usage: threads [SIZE_MIB [THREADS]], 2 to 16 threads\n");
		return 2;
	}
	pthread_barrier_init(&barrier, NULL, (unsigned)thread_count);
	for (size_t i = 0; i < thread_count; i++)
		pthread_create(&threads[i], NULL, count, &locals[i]);
	join_all(threads);
	uint64_t total = 0;
	for (size_t i = 0; i < thread_count; i++)
		total += locals[i];
	printf("counted %llu and %llu, mine %llu\n", (unsigned long long)counter,
	       (unsigned long long)total, (unsigned long long)mine);

	for (size_t i = 0; i < thread_count; i++)
		pthread_create(&threads[i], NULL, i % 2 ? consume : produce, NULL);
	join_all(threads);
	printf("consumed %zu, sum %llu\n", consumed, (unsigned long long)consumed_sum);

	uint64_t state = 88172645463325252u;
	size_t each = bytes / sizeof(uint64_t) / thread_count;
	for (size_t i = 0; i < thread_count; i++) {
		parts[i].count = each;
		parts[i].values = malloc(each * sizeof(uint64_t));
		for (size_t n = 0; n < each; n++) {
			state ^= state << 13;
			state ^= state >> 7;
			state ^= state << 17;
			parts[i].values[n] = state;
		}
	}
	for (size_t i = 0; i < thread_count; i++)
		pthread_create(&threads[i], NULL, sort_part, &parts[i]);
	join_all(threads);
	printf("sorted %016llx\n", (unsigned long long)merge_checksum(parts));

	void *left;
	pthread_create(&threads[0], NULL, wait_for_cancel, NULL);
	pthread_cancel(threads[0]);
	pthread_join(threads[0], &left);
	printf("cancelled %d\n", left == PTHREAD_CANCELED);
	return 0;
}
