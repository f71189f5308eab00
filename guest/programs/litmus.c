/*
 * Litmus tests of the x86-TSO memory model, between the guest's processors.
 *
 *   litmus [OPTION...] [TEST...]     all tests, or those named
 *   litmus [OPTION...] ROUNDS        the same as -r ROUNDS
 *
 *   -r ROUNDS   of each test; 100000
 *   -c CPUS     the processors of the threads, as in 0,2-3; else all, in order
 *   -s SECONDS  for all tests together: each gets its share, and ends with fewer
 *               rounds when that is over
 *   -d MICROSECONDS
 *               head starts of up to so long, and a random choice of who has
 *               read or written the variables' pages last: for processors on
 *               several nodes, where a page takes longer than a whole round
 *
 * Each thread is pinned to a processor of its own. A round sets the shared
 * variables to zero, lets all threads go at once, and looks at what they read
 * and left behind. One line per test:
 *
 *   litmus NAME rounds N weak W forbidden F
 *
 * `weak` counts outcomes that the model allows but an interleaving does not
 * explain (a store still in its processor's buffer); `forbidden` those that
 * the model rules out. Ends with 1 when one was seen. A test with more threads
 * than processors is left out, and named. A test that takes long says every ten
 * seconds how far it is; when nothing moves for a minute, the program ends with
 * 3 and says in which test and round.
 *
 * The model and the tests' names: P. Sewell and others, "x86-TSO: a rigorous
 * and usable programmer's model for x86 multiprocessors", CACM 53(7), 2010;
 * Intel SDM volume 3, chapter "Multiple-Processor Management", section
 * "Memory Ordering".
 */

#include "team.h"

#include <cpuid.h>

enum { THREADS_MAX = 4, PROGRESS_EVERY = 10, BOUND = 60 };

/*
 * The variables are on pages of their own: between nodes that share memory
 * page by page, each then has its own owner.
 */
static struct shared {
	_Alignas(PAGE) volatile uint32_t x;
	_Alignas(PAGE) volatile uint32_t y;
	_Alignas(PAGE) volatile uint64_t wide;
	_Alignas(PAGE) volatile uint64_t pair[2];
	/* For locked instructions that cross a line, and a page. */
	_Alignas(PAGE) unsigned char raw[2 * PAGE];
	_Alignas(PAGE) volatile uint32_t lock;
	uint64_t counter;
} *shared;

/* What the threads of a round read: results[thread][register]. */
struct results {
	_Alignas(64) uint64_t r[3];
};
static struct results results[THREADS_MAX];

/* Single instructions, so that the compiler neither joins nor moves them. */
static inline void store(volatile uint32_t *to, uint32_t value)
{
	__asm__ volatile("movl %1, %0" : "=m"(*to) : "r"(value) : "memory");
}

static inline uint32_t load(const volatile uint32_t *from)
{
	uint32_t value;

	__asm__ volatile("movl %1, %0" : "=r"(value) : "m"(*from) : "memory");
	return value;
}

static inline void fence(void)
{
	__asm__ volatile("mfence" ::: "memory");
}

static inline uint32_t exchange(volatile uint32_t *with, uint32_t value)
{
	__asm__ volatile("xchgl %0, %1" : "+r"(value), "+m"(*with) :: "memory");
	return value;
}

/* --- The classic tests ---------------------------------------------------- */

/* SB: each stores, then reads the other's. 0,0 is the store buffer's mark. */
static void sb(int t)
{
	store(t ? &shared->y : &shared->x, 1);
	results[t].r[0] = load(t ? &shared->x : &shared->y);
}

static void sb_mfence(int t)
{
	store(t ? &shared->y : &shared->x, 1);
	fence();
	results[t].r[0] = load(t ? &shared->x : &shared->y);
}

/* An exchange is a locked instruction: it empties the buffer as a fence does. */
static void sb_xchg(int t)
{
	exchange(t ? &shared->y : &shared->x, 1);
	results[t].r[0] = load(t ? &shared->x : &shared->y);
}

/* A locked instruction on a third address orders what is around it, too. */
static void sb_lock(int t)
{
	uint32_t mine = 0;

	store(t ? &shared->y : &shared->x, 1);
	__asm__ volatile("lock addl $0, %0" : "+m"(mine) :: "memory", "cc");
	results[t].r[0] = load(t ? &shared->x : &shared->y);
}

static int both_zero(void)
{
	return results[0].r[0] == 0 && results[1].r[0] == 0;
}

/* MP: a message, then its flag. */
static void mp(int t)
{
	if (t == 0) {
		store(&shared->x, 1);
		store(&shared->y, 1);
	} else {
		results[1].r[0] = load(&shared->y);
		results[1].r[1] = load(&shared->x);
	}
}

static int flag_without_message(void)
{
	return results[1].r[0] == 1 && results[1].r[1] == 0;
}

/* LB: each reads, then stores what the other reads. */
static void lb(int t)
{
	results[t].r[0] = load(t ? &shared->y : &shared->x);
	store(t ? &shared->x : &shared->y, 1);
}

static int both_one(void)
{
	return results[0].r[0] == 1 && results[1].r[0] == 1;
}

/* S: a store that follows a read may not come before what was read. */
static void s(int t)
{
	if (t == 0) {
		store(&shared->x, 2);
		store(&shared->y, 1);
	} else {
		results[1].r[0] = load(&shared->y);
		store(&shared->x, 1);
	}
}

static int overwritten(void)
{
	return results[1].r[0] == 1 && shared->x == 2;
}

/* R with a fence: the last store to y is seen to come before the read of x. */
static void r_mfence(int t)
{
	if (t == 0) {
		store(&shared->x, 1);
		store(&shared->y, 1);
	} else {
		store(&shared->y, 2);
		fence();
		results[1].r[0] = load(&shared->x);
	}
}

static int late_store_early_read(void)
{
	return shared->y == 2 && results[1].r[0] == 0;
}

/* 2+2W: each stores to both, in opposite order. */
static void two_plus_two_w(int t)
{
	store(t ? &shared->y : &shared->x, 1);
	store(t ? &shared->x : &shared->y, 2);
}

static int first_stores_last(void)
{
	return shared->x == 1 && shared->y == 1;
}

/* CoRR: two reads of one place never go back in time. */
static void corr(int t)
{
	if (t == 0) {
		store(&shared->x, 1);
	} else {
		results[1].r[0] = load(&shared->x);
		results[1].r[1] = load(&shared->x);
	}
}

static int back_in_time(void)
{
	return results[1].r[0] == 1 && results[1].r[1] == 0;
}

/* CoWR: who reads another's store after its own, lost to it for good. */
static void cowr(int t)
{
	store(&shared->x, t ? 2 : 1);
	results[t].r[0] = load(&shared->x);
}

static int overtaken_twice(void)
{
	return (shared->x == 1 && results[0].r[0] == 2) ||
	       (shared->x == 2 && results[1].r[0] == 1);
}

/* WRC: what one has read, everyone who reads its store has too. */
static void wrc(int t)
{
	if (t == 0) {
		store(&shared->x, 1);
	} else if (t == 1) {
		results[1].r[0] = load(&shared->x);
		store(&shared->y, 1);
	} else {
		results[2].r[0] = load(&shared->y);
		results[2].r[1] = load(&shared->x);
	}
}

static int causality_broken(void)
{
	return results[1].r[0] == 1 && results[2].r[0] == 1 && results[2].r[1] == 0;
}

/* IRIW: two readers agree on the order of two writers' stores. */
static void iriw(int t)
{
	if (t < 2) {
		store(t ? &shared->y : &shared->x, 1);
	} else {
		results[t].r[0] = load(t == 2 ? &shared->x : &shared->y);
		results[t].r[1] = load(t == 2 ? &shared->y : &shared->x);
	}
}

static int readers_disagree(void)
{
	return results[2].r[0] == 1 && results[2].r[1] == 0 &&
	       results[3].r[0] == 1 && results[3].r[1] == 0;
}

/* --- Aligned accesses are whole ------------------------------------------- */

/* One store of eight bytes, one load of eight bytes: all or nothing. */
static void whole_8(int t)
{
	uint64_t value = UINT64_MAX;

	if (t == 0)
		__asm__ volatile("movq %1, %0" : "=m"(shared->wide) : "r"(value) : "memory");
	else
		__asm__ volatile("movq %1, %0" : "=r"(results[1].r[0]) : "m"(shared->wide) : "memory");
}

static int torn(void)
{
	return results[1].r[0] != 0 && results[1].r[0] != UINT64_MAX;
}

/* cmpxchg16b exchanges both halves or none, and reads them together. */
static void whole_16(int t)
{
	uint64_t low = 0, high = 0;
	unsigned char done;

	do {
		uint64_t next = low + 1;

		__asm__ volatile("lock cmpxchg16b %1\n\tsete %0"
				 : "=q"(done), "+m"(shared->pair), "+a"(low), "+d"(high)
				 : "b"(next), "c"(~next)
				 : "memory", "cc");
		if (!done && low != 0 && high != ~low)
			results[t].r[0] = 1;
	} while (!done);
}

static int pair_mixed(void)
{
	return results[0].r[0] || results[1].r[0] || shared->pair[0] != 2 ||
	       shared->pair[1] != ~(uint64_t)2;
}

/* --- Locked instructions lose nothing ------------------------------------- */

enum { ADDITIONS = 8 };

static void lock_inc(int t)
{
	(void)t;
	for (int i = 0; i < ADDITIONS; i++)
		__asm__ volatile("lock incl %0" : "+m"(shared->x) :: "memory", "cc");
}

static int increments_lost(void)
{
	return shared->x != 2 * ADDITIONS;
}

/* A locked instruction next to plain stores into the same word's other half. */
static void lock_beside_store(int t)
{
	volatile uint16_t *halves = (volatile uint16_t *)&shared->x;

	for (int i = 1; i <= ADDITIONS; i++) {
		if (t == 0)
			__asm__ volatile("lock addl $1, %0" : "+m"(shared->x) :: "memory", "cc");
		else
			__asm__ volatile("movw %1, %0" : "=m"(halves[1])
					 : "r"((uint16_t)i) : "memory");
	}
}

static int half_lost(void)
{
	return shared->x != (ADDITIONS << 16 | ADDITIONS);
}

static void xadd(int t)
{
	uint32_t ticket = 1;

	__asm__ volatile("lock xaddl %0, %1" : "+r"(ticket), "+m"(shared->x) :: "memory", "cc");
	results[t].r[0] = ticket;
}

static int tickets_wrong(void)
{
	return shared->x != 2 || results[0].r[0] + results[1].r[0] != 1;
}

static void cmpxchg(int t)
{
	(void)t;
	for (int i = 0; i < ADDITIONS; i++) {
		uint32_t seen = load(&shared->x);
		unsigned char done;

		do
			__asm__ volatile("lock cmpxchgl %3, %1\n\tsete %0"
					 : "=q"(done), "+m"(shared->x), "+a"(seen)
					 : "r"(seen + 1) : "memory", "cc");
		while (!done);
	}
}

/* Each bit can be won once. */
static void bts(int t)
{
	for (int i = 0; i < 32; i++) {
		unsigned char had;

		__asm__ volatile("lock btsl %2, %1\n\tsetc %0"
				 : "=q"(had), "+m"(shared->x) : "r"(i) : "memory", "cc");
		results[t].r[0] += !had;
	}
}

static int bits_wrong(void)
{
	return shared->x != UINT32_MAX || results[0].r[0] + results[1].r[0] != 32;
}

/* A spin lock: exchange to take it, a plain store to give it back. */
static void spin_lock(int t)
{
	(void)t;
	for (int i = 0; i < ADDITIONS; i++) {
		while (exchange(&shared->lock, 1))
			while (load(&shared->lock))
				__asm__ volatile("pause");
		shared->counter++;
		store(&shared->lock, 0);
	}
}

static int lock_leaked(void)
{
	return shared->counter != 2 * ADDITIONS;
}

static void add_across(size_t offset)
{
	for (int i = 0; i < ADDITIONS; i++)
		__asm__ volatile("lock addl $0x00010001, %0"
				 : "+m"(*(uint32_t *)(shared->raw + offset)) :: "memory", "cc");
}

static int across_lost(size_t offset)
{
	uint32_t sum;

	memcpy(&sum, shared->raw + offset, sizeof(sum));
	return sum != 2 * ADDITIONS * 0x00010001u;
}

static void split_line(int t)
{
	(void)t;
	add_across(64 - 2);
}

static int split_line_lost(void)
{
	return across_lost(64 - 2);
}

static void split_page(int t)
{
	(void)t;
	add_across(PAGE - 2);
}

static int split_page_lost(void)
{
	return across_lost(PAGE - 2);
}

/* --- Code that one processor writes and another runs ---------------------- */

/*
 * mov $VALUE, %eax; ret. One page under three addresses: one to write through,
 * one to run at, and one for both.
 */
static unsigned char *code_to_write, *code_to_run, *code_in_place;

static void map_code(void)
{
	static const unsigned char CODE[] = {0xb8, 0, 0, 0, 0, 0xc3};
	int file = memfd_create("litmus-code", 0);

	if (file < 0 || ftruncate(file, PAGE)) {
		perror("litmus: memfd");
		exit(2);
	}
	code_to_write = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	code_to_run = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, file, 0);
	code_in_place = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC,
			     MAP_SHARED, file, 0);
	if (code_to_write == MAP_FAILED || code_to_run == MAP_FAILED ||
	    code_in_place == MAP_FAILED) {
		perror("litmus: mmap of code");
		exit(2);
	}
	memcpy(code_to_write, CODE, sizeof(CODE));
	close(file);
}

/*
 * What is allowed: Intel SDM volume 3, "Handling Self- and Cross-Modifying
 * Code". The number in the code grows by one each round.
 */
static uint32_t code_value;

static void write_code(unsigned char *code)
{
	uint32_t next = code_value + 1;

	memcpy(code + 1, &next, sizeof(next));
}

static uint32_t run_code(const unsigned char *code)
{
	return ((uint32_t (*)(void))(uintptr_t)code)();
}

static void serialise(void)
{
	unsigned int a, b, c, d;

	__cpuid(0, a, b, c, d);
}

/* At one address, a processor sees its own store at the next jump. */
static void self_modify(int t)
{
	write_code(code_in_place);
	__asm__ volatile("" ::: "memory");
	results[t].r[0] = run_code(code_in_place);
}

/* Written at another address, the code is new after a serialising instruction. */
static void self_modify_alias(int t)
{
	write_code(code_to_write);
	serialise();
	results[t].r[0] = run_code(code_to_run);
}

static int own_code_old(void)
{
	code_value++;
	return results[0].r[0] != code_value;
}

/* Another processor waits for a flag, serialises, and runs the new code. */
static void cross_modify(int t)
{
	if (t == 0) {
		write_code(code_to_write);
		store(&shared->y, 1);
	} else {
		while (!load(&shared->y))
			__asm__ volatile("pause");
		serialise();
		results[1].r[0] = run_code(code_to_run);
	}
}

static int old_code_ran(void)
{
	code_value++;
	return results[1].r[0] != code_value;
}

/* --- Running them --------------------------------------------------------- */

static const struct test {
	const char *name;
	int threads;
	void (*body)(int thread);
	int (*forbidden)(void);
	int (*weak)(void);
} TESTS[] = {
	{"SB", 2, sb, NULL, both_zero},
	{"SB+mfence", 2, sb_mfence, both_zero, NULL},
	{"SB+xchg", 2, sb_xchg, both_zero, NULL},
	{"SB+lock", 2, sb_lock, both_zero, NULL},
	{"MP", 2, mp, flag_without_message, NULL},
	{"LB", 2, lb, both_one, NULL},
	{"S", 2, s, overwritten, NULL},
	{"R+mfence", 2, r_mfence, late_store_early_read, NULL},
	{"2+2W", 2, two_plus_two_w, first_stores_last, NULL},
	{"CoRR", 2, corr, back_in_time, NULL},
	{"CoWR", 2, cowr, overtaken_twice, NULL},
	{"WRC", 3, wrc, causality_broken, NULL},
	{"IRIW", 4, iriw, readers_disagree, NULL},
	{"whole-8", 2, whole_8, torn, NULL},
	{"cmpxchg16b", 2, whole_16, pair_mixed, NULL},
	{"lock-inc", 2, lock_inc, increments_lost, NULL},
	{"lock-beside-store", 2, lock_beside_store, half_lost, NULL},
	{"lock-xadd", 2, xadd, tickets_wrong, NULL},
	{"lock-cmpxchg", 2, cmpxchg, increments_lost, NULL},
	{"lock-bts", 2, bts, bits_wrong, NULL},
	{"spin-lock", 2, spin_lock, lock_leaked, NULL},
	{"lock-split-line", 2, split_line, split_line_lost, NULL},
	{"lock-split-page", 2, split_page, split_page_lost, NULL},
	{"self-modify", 1, self_modify, own_code_old, NULL},
	{"self-modify-alias", 1, self_modify_alias, own_code_old, NULL},
	{"cross-modify", 2, cross_modify, old_code_ran, NULL},
};

static const struct test *test;
static long rounds = 100000;
static struct cpus cpus;
/* Head starts: 0 for a few steps, else ticks at most. */
static uint64_t spread;
static long seen_forbidden, seen_weak;
/* The rounds begun, and whether the watchdog asks for the end. */
static long begun;
static int stop;
/* Set by the first thread before a meeting: all leave after it. */
static volatile int last;

/* Threads meet here: the last to come opens the gate for all. */
static volatile int waiting;
static volatile unsigned int gate;

static void meet(void)
{
	unsigned int now = gate;
	long spins = 0;

	if (__atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST) == test->threads) {
		waiting = 0;
		__atomic_store_n(&gate, now + 1, __ATOMIC_SEQ_CST);
		return;
	}
	/* The watchdog ends what takes too long. */
	while (__atomic_load_n(&gate, __ATOMIC_ACQUIRE) == now)
		relax(++spins);
}

static void reset(void)
{
	shared->x = shared->y = 0;
	shared->wide = shared->pair[0] = shared->pair[1] = 0;
	shared->lock = 0;
	shared->counter = 0;
	memset(shared->raw + 56, 0, 16);
	memset(shared->raw + PAGE - 8, 0, 16);
	memset(results, 0, sizeof(results));
}

static uint32_t next_random(uint32_t random)
{
	random ^= random << 13;
	random ^= random >> 17;
	return random ^ random << 5;
}

/* Leaves the variable at zero, and its page read, written or alone. */
static void touch(volatile uint32_t *variable, uint32_t choice)
{
	if (choice % 4 == 0)
		store(variable, 0);
	else if (choice % 4 == 1)
		load(variable);
}

static void *run_thread(void *argument)
{
	int t = (int)(intptr_t)argument;
	uint32_t random = 2463534242u + (uint32_t)t;

	pin(cpus.cpu[t]);
	for (long i = 0; i < rounds; i++) {
		if (t == 0) {
			reset();
			last = __atomic_load_n(&stop, __ATOMIC_RELAXED);
			__atomic_store_n(&begun, i + !last, __ATOMIC_RELAXED);
		}
		meet();
		if (last)
			break;
		random = next_random(random);
		if (spread) {
			touch(&shared->x, random >> 8);
			touch(&shared->y, random >> 16);
			meet();
		}
		/* A different head start each round. */
		if (spread)
			for (uint64_t until = ticks() + random % spread; ticks() < until;)
				__asm__ volatile("pause");
		else
			for (uint32_t k = random % 32; k > 0; k--)
				__asm__ volatile("");
		test->body(t);
		meet();
		if (t == 0) {
			if (test->forbidden && test->forbidden())
				seen_forbidden++;
			if (test->weak && test->weak())
				seen_weak++;
		}
	}
	return NULL;
}

/* Until the threads of a test have ended; `until` is when it has to be over. */
static void watch(const pthread_t *threads, double until)
{
	double start = seconds(), moved = start, said = start;
	long before = -1;

	for (int t = 0; t < test->threads;) {
		double now, left = until - seconds();

		if (join_within(threads[t], left < 0.01 ? 0.01 : left < 1 ? left : 1)) {
			t++;
			continue;
		}
		now = seconds();
		if (__atomic_load_n(&begun, __ATOMIC_RELAXED) != before)
			moved = now;
		before = __atomic_load_n(&begun, __ATOMIC_RELAXED);
		if (now > moved + BOUND)
			end(EXIT_BOUND, "%s: nothing moved for %d s in round %ld", test->name,
			    BOUND, before);
		if (now > said + PROGRESS_EVERY) {
			said = now;
			printf("litmus %s round %ld of %ld, %.0f s\n", test->name, before, rounds,
			       now - start);
		}
		if (now >= until)
			__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
	}
}

static void run_test(double until)
{
	pthread_t threads[THREADS_MAX];

	seen_forbidden = seen_weak = begun = stop = 0;
	for (int t = 0; t < test->threads; t++)
		threads[t] = start_thread(run_thread, (void *)(intptr_t)t);
	watch(threads, until);
	printf("litmus %s rounds %ld weak %ld forbidden %ld\n", test->name, begun,
	       seen_weak, seen_forbidden);
}

static int has_cmpxchg16b(void)
{
	unsigned int a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && c & bit_CMPXCHG16B;
}

enum { TESTS_COUNT = sizeof(TESTS) / sizeof(TESTS[0]) };

/* Whether `name` is among the words, or there are none. */
static int wanted(const char *name, char **words)
{
	if (!*words)
		return 1;
	for (; *words; words++)
		if (!strcmp(*words, name))
			return 1;
	return 0;
}

static void check_names(char **words)
{
	for (; *words; words++) {
		int known = 0;

		for (int i = 0; i < TESTS_COUNT; i++)
			known |= !strcmp(*words, TESTS[i].name);
		if (!known)
			end(EXIT_USAGE, "there is no test %s", *words);
	}
}

/* Reads the options; returns the names of tests that follow. */
static char **read_options(int argc, char **argv, double *until)
{
	int option;

	cpus = cpus_allowed();
	*until = 1e18;
	while ((option = getopt(argc, argv, "r:c:s:d:")) != -1) {
		switch (option) {
		case 'r':
			rounds = number("-r", optarg, 1, INT64_MAX);
			break;
		case 'c':
			cpus = cpus_named(optarg);
			break;
		case 's':
			*until = seconds() + (double)number("-s", optarg, 1, 1000000);
			break;
		case 'd':
			spread = (uint64_t)((double)number("-d", optarg, 1, 1000000) * 1e-6 *
					    ticks_per_second());
			break;
		default:
			end(EXIT_USAGE, "usage: litmus [-r ROUNDS] [-c CPUS] [-s SECONDS] "
			    "[-d MICROSECONDS] [TEST...]");
		}
	}
	if (optind < argc && argv[optind][0] >= '0' && argv[optind][0] <= '9' &&
	    strcmp(argv[optind], "2+2W"))
		rounds = number("ROUNDS", argv[optind++], 1, INT64_MAX);
	return argv + optind;
}

int main(int argc, char **argv)
{
	long bad = 0, left = 0;
	double until;
	char **words = read_options(argc, argv, &until);

	check_names(words);
	setvbuf(stdout, NULL, _IOLBF, 0);
	shared = pages(sizeof(*shared), MAP_SHARED);
	map_code();
	for (int i = 0; i < TESTS_COUNT; i++)
		left += wanted(TESTS[i].name, words);
	for (int i = 0; i < TESTS_COUNT; i++) {
		double now = seconds();

		test = &TESTS[i];
		if (!wanted(test->name, words))
			continue;
		left--;
		if (test->threads > cpus.count) {
			printf("litmus %s skipped: needs %d processors\n", test->name,
			       test->threads);
			continue;
		}
		if (test->body == whole_16 && !has_cmpxchg16b()) {
			printf("litmus %s skipped: no such instruction\n", test->name);
			continue;
		}
		run_test(now + (until > now ? until - now : 0) / (double)(left + 1));
		bad += seen_forbidden;
	}
	if (bad)
		printf("litmus: %ld forbidden outcomes\n", bad);
	return bad != 0;
}
