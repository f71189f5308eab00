/*
 * Locked instructions lose nothing. Most threads note what they find when they
 * are done: it tells how much the other had done by then.
 */

#include "litmus.h"

#include "access.h"

enum {
	ADDITIONS = 8,
	/*
	 * Words that cross pages, and rounds in turn on one: a batch has more
	 * rounds than words, so several have to share one.
	 */
	BORDERS = 16,
	ROUNDS_IN_TURN = 8,
};

static void lock_inc(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	for (int i = 0; i < ADDITIONS; i++)
		__asm__ volatile("lock incl %0" : "+m"(*round->x) :: "memory", "cc");
	read[0] = load(round->x);
}

static int increments_lost(const struct outcome *outcome)
{
	return outcome->x != 2 * ADDITIONS;
}

/* A locked instruction next to plain stores into the same word's other half. */
static void lock_beside_store(int t, const struct round *round, uint64_t *read)
{
	volatile uint16_t *halves = (volatile uint16_t *)round->x;

	for (int i = 1; i <= ADDITIONS; i++) {
		if (t == 0)
			__asm__ volatile("lock addl $1, %0" : "+m"(*round->x) :: "memory", "cc");
		else
			__asm__ volatile("movw %1, %0" : "=m"(halves[1])
					 : "r"((uint16_t)i) : "memory");
	}
	read[0] = halves[!t];
}

static int half_lost(const struct outcome *outcome)
{
	return outcome->x != (ADDITIONS << 16 | ADDITIONS);
}

static void xadd(int t, const struct round *round, uint64_t *read)
{
	uint32_t ticket = 1;

	(void)t;
	__asm__ volatile("lock xaddl %0, %1" : "+r"(ticket), "+m"(*round->x) :: "memory", "cc");
	read[0] = ticket;
}

static int tickets_wrong(const struct outcome *outcome)
{
	return outcome->x != 2 || outcome->read[0][0] + outcome->read[1][0] != 1;
}

static void cmpxchg(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	for (int i = 0; i < ADDITIONS; i++) {
		uint32_t seen = load(round->x);
		unsigned char done;

		do
			__asm__ volatile("lock cmpxchgl %3, %1\n\tsete %0"
					 : "=q"(done), "+m"(*round->x), "+a"(seen)
					 : "r"(seen + 1) : "memory", "cc");
		while (!done);
	}
	read[0] = load(round->x);
}

/* Each bit can be won once. */
static void bts(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	for (int i = 0; i < 32; i++) {
		unsigned char had;

		__asm__ volatile("lock btsl %2, %1\n\tsetc %0"
				 : "=q"(had), "+m"(*round->x) : "r"(i) : "memory", "cc");
		read[0] += !had;
	}
}

static int bits_wrong(const struct outcome *outcome)
{
	return outcome->x != UINT32_MAX || outcome->read[0][0] + outcome->read[1][0] != 32;
}

/* A spin lock, x: exchange to take it, a plain store to give it back. */
static void spin_lock(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	for (int i = 0; i < ADDITIONS; i++) {
		while (exchange(round->x, 1))
			while (load(round->x))
				__asm__ volatile("pause");
		++*round->y;
		store(round->x, 0);
	}
	read[0] = load(round->y);
}

static int lock_leaked(const struct outcome *outcome)
{
	return outcome->y != 2 * ADDITIONS;
}

/* --- Across lines and pages ----------------------------------------------- */

/* Words whose first half ends a line, or a page. */
static unsigned char *lines, *borders;

void prepare_locked_tests(void)
{
	lines = pages((BATCH_MAX + 1) * LINE, MAP_SHARED);
	borders = pages((BORDERS + 1) * PAGE, MAP_SHARED);
}

static unsigned char *across_lines(const struct round *round)
{
	return lines + (round->index + 1) * LINE - 2;
}

static int border_of(int index)
{
	return index / ROUNDS_IN_TURN % BORDERS;
}

static unsigned char *across_pages(const struct round *round)
{
	return borders + (border_of(round->index) + 1) * PAGE - 2;
}

static uint32_t sum_at(const unsigned char *word)
{
	uint32_t sum;

	memcpy(&sum, word, sizeof(sum));
	return sum;
}

/* Notes how many additions of the other were in the midst of its own. */
static void add_across(unsigned char *word, uint64_t *read)
{
	uint32_t before = sum_at(word), others;

	for (int i = 0; i < ADDITIONS; i++)
		__asm__ volatile("lock addl $0x00010001, %0"
				 : "+m"(*(uint32_t *)word) :: "memory", "cc");
	others = ((sum_at(word) - before) & 0xffff) - ADDITIONS;
	/* It may have done several rounds; they are one outcome. */
	read[0] = others < 2 * ADDITIONS ? others : 2 * ADDITIONS;
}

/* Whether it is not the sum of `rounds` rounds. */
static int across_lost(const unsigned char *word, uint32_t rounds)
{
	return sum_at(word) != rounds * 2 * ADDITIONS * 0x00010001u;
}

static void split_line(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	add_across(across_lines(round), read);
}

static int split_line_lost(const struct outcome *outcome)
{
	return across_lost(across_lines(outcome->round), 1);
}

static void reset_split_line(const struct round *round)
{
	memset(across_lines(round), 0, sizeof(uint32_t));
}

static void split_page(int t, const struct round *round, uint64_t *read)
{
	(void)t;
	add_across(across_pages(round), read);
}

static int split_page_lost(const struct outcome *outcome)
{
	const struct round *round = outcome->round;
	uint32_t sharing = 0;

	for (int index = 0; index < round->batch_size; index++)
		sharing += border_of(index) == border_of(round->index);
	return across_lost(across_pages(round), sharing);
}

static void reset_split_page(const struct round *round)
{
	memset(across_pages(round), 0, sizeof(uint32_t));
}

const struct test LOCKED_TESTS[] = {
	{.name = "lock-inc", .threads = 2, .body = lock_inc, .forbidden = increments_lost,
	 .parts = {READ(0, 0)}},
	{.name = "lock-beside-store", .threads = 2, .body = lock_beside_store,
	 .forbidden = half_lost, .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "lock-xadd", .threads = 2, .body = xadd, .forbidden = tickets_wrong,
	 .parts = {READ(0, 0), READ(1, 0)}},
	{.name = "lock-cmpxchg", .threads = 2, .body = cmpxchg, .forbidden = increments_lost,
	 .parts = {READ(0, 0)}},
	{.name = "lock-bts", .threads = 2, .body = bts, .forbidden = bits_wrong,
	 .parts = {READ(0, 0)}},
	{.name = "spin-lock", .threads = 2, .body = spin_lock, .forbidden = lock_leaked,
	 .parts = {READ(0, 0)}},
	{.name = "lock-split-line", .threads = 2, .body = split_line,
	 .forbidden = split_line_lost, .parts = {READ(0, 0)}, .reset = reset_split_line},
	{.name = "lock-split-page", .threads = 2, .body = split_page,
	 .forbidden = split_page_lost, .parts = {READ(0, 0)}, .reset = reset_split_page},
	{0},
};
