/* Corners of memory calls, each while most of the memory is elsewhere.
 *
 *     corners [SIZE_MIB [THREAD_ROUNDS]]
 *
 * Calls that fail after half of their work, or must leave everything as it was;
 * locked memory; a shared segment that goes; and threads that come, move large
 * blocks, discard and go while others push their pages away. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>

#define PAGE ((size_t)4096)
#define THREADS 3
#define BLOCK ((size_t)1 << 20)

static uint64_t *memory;
static size_t pages;

static void expect(int right, const char *what)
{
	if (!right) {
		printf("wrong: %s (%s)\n", what, strerror(errno));
		exit(1);
	}
}

static void *map(size_t length, int protection)
{
	void *place = mmap(NULL, length, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	expect(place != MAP_FAILED, "mmap");
	return place;
}

/* Visits all memory, so that whatever else there is goes away. */
static void walk(const char *after)
{
	for (size_t page = 0; page < pages; page++)
		expect(memory[page * 512 + page % 512] == page * 31 + 7, after);
}

static void fill(void)
{
	memory = map(pages * PAGE, PROT_READ | PROT_WRITE);
	for (size_t page = 0; page < pages; page++)
		memory[page * 512 + page % 512] = page * 31 + 7;
}

/* Three pages, the middle one unmapped. */
static char *holed(void)
{
	char *place = map(3 * PAGE, PROT_READ | PROT_WRITE);

	memset(place, 5, 3 * PAGE);
	walk("a hole");
	expect(munmap(place + PAGE, PAGE) == 0, "munmap");
	return place;
}

static void holes(void)
{
	char *place = holed();

	expect(madvise(place, 3 * PAGE, MADV_DONTNEED) == -1 && errno == ENOMEM,
	       "madvise over a hole");
	walk("madvise over a hole");
	expect(place[0] == 0 && place[2 * PAGE] == 0, "zeros after madvise over a hole");
	place = holed();
	expect(mprotect(place, 3 * PAGE, PROT_READ) == -1 && errno == ENOMEM,
	       "mprotect over a hole");
	walk("mprotect over a hole");
	expect(mprotect(place, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
	expect(++place[0] == 6 && ++place[2 * PAGE] == 6, "memory around a hole");
}

static void refused(void)
{
	char *place = map(8 * PAGE, PROT_READ | PROT_WRITE);

	memset(place, 9, 8 * PAGE);
	walk("filling");
	expect(mmap(place, 8 * PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, 12345, 0) == MAP_FAILED &&
	       errno == EBADF, "mmap of no file");
	for (size_t page = 0; page < 8; page++)
		expect(place[page * PAGE] == 9, "memory after a refused mmap");
}

static void locked(void)
{
	char *place = map(16 * PAGE, PROT_READ | PROT_WRITE);

	memset(place, 3, 16 * PAGE);
	/* Whether it can be locked is the system's affair. */
	(void)!mlock(place, 8 * PAGE);
	walk("mlock");
	expect(place[0] == 3 && place[15 * PAGE] == 3, "locked memory");
	(void)!munlock(place, 8 * PAGE);
	char *more = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);

	if (more != MAP_FAILED) {
		memset(more, 4, 4 * PAGE);
		walk("MAP_LOCKED");
		expect(more[3 * PAGE] == 4, "memory mapped locked");
	}
}

static void segments(void)
{
	int id = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);

	if (id < 0)
		return;
	char *place = shmat(id, NULL, 0);

	shmctl(id, IPC_RMID, NULL);
	expect(place != (void *)-1, "shmat");
	place[0] = 1;
	expect(shmdt(place) == 0, "shmdt");
	char *larger = map(16 * PAGE, PROT_READ | PROT_WRITE);

	memset(larger, 2, 16 * PAGE);
	walk("shmdt");
	expect(larger[15 * PAGE] == 2, "memory where a segment was");
}

static void *mover(void *argument)
{
	unsigned char mark = (unsigned char)(1 + (uintptr_t)argument);
	size_t length = BLOCK;
	unsigned char *block = map(length, PROT_READ | PROT_WRITE);

	memset(block, mark, length);
	for (int round = 0; round < 4; round++) {
		unsigned char *moved = mremap(block, length, 2 * length, MREMAP_MAYMOVE);

		expect(moved != MAP_FAILED, "mremap");
		expect(moved[0] == mark && moved[length - 1] == mark && moved[length] == 0,
		       "a moved block");
		expect(madvise(moved + length, length, MADV_DONTNEED) == 0, "madvise");
		expect(mprotect(moved, length, PROT_NONE) == 0, "mprotect");
		expect(mprotect(moved, length, PROT_READ | PROT_WRITE) == 0, "mprotect");
		for (size_t at = 0; at < length; at += PAGE)
			expect(moved[at] == mark, "a block that was out of reach");
		expect(mremap(moved, 2 * length, length, 0) == moved, "mremap");
		block = moved;
	}
	expect(munmap(block, length) == 0, "munmap");
	return NULL;
}

static void threads(int rounds)
{
	for (int round = 0; round < rounds; round++) {
		pthread_t all[THREADS];

		for (uintptr_t i = 0; i < THREADS; i++)
			expect(pthread_create(&all[i], NULL, mover, (void *)i) == 0,
			       "pthread_create");
		walk("threads");
		for (int i = 0; i < THREADS; i++)
			pthread_join(all[i], NULL);
	}
}

int main(int argc, char **argv)
{
	pages = (size_t)(argc > 1 ? atol(argv[1]) : 16) * 256;
	fill();
	holes();
	refused();
	locked();
	segments();
	threads(argc > 2 ? atoi(argv[2]) : 20);
	walk("everything");
	printf("all right\n");
	return 0;
}
