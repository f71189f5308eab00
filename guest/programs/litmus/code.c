/*
 * Code that one processor writes and another, or the same one, runs.
 *
 * What is allowed: Intel SDM volume 3, "Handling Self- and Cross-Modifying
 * Code". Each round writes its number into code, runs that, and notes by how
 * many the number that it got is too old.
 */

#include "litmus.h"

#include "access.h"

#include <cpuid.h>

enum {
	/* Room for the code of a round. */
	ROOM = 64,
	AREA = BATCH_MAX * ROOM,
};

/*
 * One area under three addresses: one to write through, one to run at, and one
 * for both.
 */
static unsigned char *to_write, *to_run, *in_place;

void prepare_code_tests(void)
{
	/* mov $NUMBER, %eax; ret */
	static const unsigned char CODE[] = {0xb8, 0, 0, 0, 0, 0xc3};
	int file = memfd_create("litmus-code", 0);

	if (file < 0 || ftruncate(file, AREA))
		end(EXIT_USAGE, "no memory file for code: %s", strerror(errno));
	to_write = mmap(NULL, AREA, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	to_run = mmap(NULL, AREA, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0);
	in_place = mmap(NULL, AREA, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_SHARED, file, 0);
	if (to_write == MAP_FAILED || to_run == MAP_FAILED || in_place == MAP_FAILED)
		end(EXIT_USAGE, "cannot map code: %s", strerror(errno));
	for (int room = 0; room < BATCH_MAX; room++)
		memcpy(to_write + room * ROOM, CODE, sizeof(CODE));
	close(file);
}

static void write_code(unsigned char *area, const struct round *round)
{
	uint32_t number = (uint32_t)round->number;

	memcpy(area + round->index * ROOM + 1, &number, sizeof(number));
}

/* By how many its number is too old. */
static uint32_t run_code(const unsigned char *area, const struct round *round)
{
	uintptr_t at = (uintptr_t)(area + round->index * ROOM);

	return (uint32_t)round->number - ((uint32_t (*)(void))at)();
}

static void serialise(void)
{
	unsigned int a, b, c, d;

	__cpuid(0, a, b, c, d);
}

/* At one address, a processor sees its own store at the next jump. */
static void self_modify(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	write_code(in_place, round);
	__asm__ volatile("" ::: "memory");
	read[0] = run_code(in_place, round);
}

/* Written at another address, the code is new after a serialising instruction. */
static void self_modify_alias(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	write_code(to_write, round);
	serialise();
	read[0] = run_code(to_run, round);
}

static int own_code_old(const struct outcome *outcome)
{
	return outcome->read[0][0] != 0;
}

/* Another processor waits for a flag, serialises, and runs the new code. */
static void cross_modify(int t, const struct round *round, uint64_t *read)
{
	if (t == 0) {
		write_code(to_write, round);
		store(round->y, 1);
	} else {
		while (!load(round->y))
			__asm__ volatile("pause");
		serialise();
		read[0] = run_code(to_run, round);
	}
}

static int old_code_ran(const struct outcome *outcome)
{
	return outcome->read[1][0] != 0;
}

const struct test CODE_TESTS[] = {
	{.name = "self-modify", .threads = 1, .body = self_modify, .forbidden = own_code_old,
	 .parts = {READ(0, 0)}},
	{.name = "self-modify-alias", .threads = 1, .body = self_modify_alias,
	 .forbidden = own_code_old, .parts = {READ(0, 0)}},
	{.name = "cross-modify", .threads = 2, .body = cross_modify, .forbidden = old_code_ran,
	 .parts = {READ(1, 0)}},
	{0},
};
