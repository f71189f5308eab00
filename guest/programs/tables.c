/*
 * Are page tables that one processor writes seen by another?
 *
 *   tables [-c CPU,CPU] ROUNDS [SECONDS]
 *
 * Two threads of one process, each on a processor of its own. In turns one of
 * them leads: it changes mappings, writes what should be seen through them, and
 * gives the other orders, by a word on another page: read this, write that, or
 * find that nothing is there. The follower's reads have to return exactly what
 * was written, and its accesses have to fault exactly when they must. A round
 * goes through these steps:
 *
 *   map      new pages in a region whose page tables are new, too
 *   move     mremap to elsewhere and back; a whole table of 2 MB in some rounds
 *   protect  read only, nothing, and all again
 *   share    the follower makes page tables and the leader reads through them
 *   reuse    all is unmapped, so that pages which were tables are free; they come
 *            back as data, filled with what would be entries of a table
 *   fork     (every 8th round) copies on write by both, while a child looks
 *            after the old contents
 *
 * Prints `tables: rounds N mismatches M (...)`, and a line of progress every ten
 * seconds. Ends with 1 when something was wrong, with 3 and a message that names
 * the round and the step when nothing moves for a minute. It ends after SECONDS
 * where ROUNDS are not done by then.
 */

#include "team.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum {
	PAGES = 8,
	REGIONS = 8,
	/* Rounds between two forks, which are slow. */
	FORK_EVERY = 8,
	/* Seconds without any progress. */
	BOUND = 60,
	PROGRESS_EVERY = 10,
	MISMATCHES_PRINTED = 10,
};

/* A page of the lowest table maps this much, and one of the next. */
#define TABLE ((size_t)2 << 20)
#define DIRECTORY ((size_t)1 << 30)

/*
 * Address space that nobody else maps: far below where the kernel looks for
 * room, far above the program. Regions in it may have whole directories.
 */
static char *const space = (char *)(64 * DIRECTORY);

enum order { READ, WRITE, READ_FAULTS, WRITE_FAULTS, ROUND_ENDS };

static const char *const ORDER_NAMES[] = {
	"a read", "a write", "a read that must fault", "a write that must fault", "the end",
};

/*
 * Orders from the leader to the follower, on a page of its own. The leader
 * writes the order, then `given`; the follower the outcome, then `done`.
 */
static struct post {
	_Alignas(PAGE) uint64_t given;
	uint64_t done;
	enum order order;
	volatile uint64_t *at;
	uint64_t value;
	int faulted;
} post;

/* What the watchdog looks at: where the leader is. A page of its own, too. */
static struct progress {
	_Alignas(PAGE) long round;
	long steps;
	const char *step;
	long mismatches, moves, faults, forks;
	/* The watchdog asks for the end; the leader says after how many rounds. */
	int stop;
	long rounds_done;
} progress;

static long rounds;
static struct cpus cpus;

static void step(const char *name)
{
	__atomic_store_n(&progress.step, name, __ATOMIC_RELAXED);
	__atomic_add_fetch(&progress.steps, 1, __ATOMIC_RELAXED);
}

__attribute__((format(printf, 1, 2)))
static void mismatch(const char *format, ...)
{
	char text[200];
	va_list arguments;

	if (__atomic_add_fetch(&progress.mismatches, 1, __ATOMIC_RELAXED) > MISMATCHES_PRINTED)
		return;
	va_start(arguments, format);
	vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	printf("tables: WRONG in round %ld, step %s: %s\n", progress.round, progress.step, text);
}

/* --- Faults --------------------------------------------------------------- */

static __thread sigjmp_buf at_fault;
/* The address where a fault is looked for; 0 where none may come. */
static __thread volatile uintptr_t awaited;

static void handle_fault(int signal, siginfo_t *information, void *context)
{
	(void)context;
	if (awaited && (uintptr_t)information->si_addr == awaited)
		siglongjmp(at_fault, 1);
	end(1, "WRONG in round %ld, step %s: signal %d at %p, with %p in hand", progress.round,
	    progress.step, signal, information->si_addr, (void *)awaited);
}

static void catch_faults(void)
{
	/* No mask is kept, so that nothing has to be restored after a fault. */
	struct sigaction action = {.sa_flags = SA_SIGINFO | SA_NODEFER};

	action.sa_sigaction = handle_fault;
	if (sigaction(SIGSEGV, &action, NULL) || sigaction(SIGBUS, &action, NULL))
		end(EXIT_USAGE, "sigaction: %s", strerror(errno));
}

/* Reads or writes `*at`; says whether it faulted. */
static int access_faults(volatile uint64_t *at, int writes, uint64_t *value)
{
	awaited = (uintptr_t)at;
	if (sigsetjmp(at_fault, 0)) {
		awaited = 0;
		return 1;
	}
	if (writes)
		*at = *value;
	else
		*value = *at;
	awaited = 0;
	return 0;
}

/* --- Orders --------------------------------------------------------------- */

/* Until `*word` is `value`. The watchdog ends what takes too long. */
static void await(const uint64_t *word, uint64_t value)
{
	long spins = 0;

	while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value)
		relax(++spins);
}

static void follow(void)
{
	for (;;) {
		uint64_t number = post.done + 1;

		await(&post.given, number);
		if (post.order == READ || post.order == READ_FAULTS)
			post.faulted = access_faults(post.at, 0, &post.value);
		else if (post.order != ROUND_ENDS)
			post.faulted = access_faults(post.at, 1, &post.value);
		enum order order = post.order;

		__atomic_store_n(&post.done, number, __ATOMIC_RELEASE);
		if (order == ROUND_ENDS)
			return;
	}
}

/* Gives an order and waits for its outcome, which has to be the right one. */
static void give(enum order order, volatile uint64_t *at, uint64_t value)
{
	int faults = order == READ_FAULTS || order == WRITE_FAULTS;
	uint64_t number = post.given + 1;

	__atomic_add_fetch(&progress.steps, 1, __ATOMIC_RELAXED);
	post.order = order;
	post.at = at;
	post.value = order == READ ? ~value : value;
	__atomic_store_n(&post.given, number, __ATOMIC_RELEASE);
	await(&post.done, number);
	if (order == ROUND_ENDS)
		return;
	if (post.faulted != faults)
		mismatch("%s at %p: it %s", ORDER_NAMES[order], (void *)at,
			 faults ? "did not" : "faulted");
	else if (order == READ && post.value != value)
		mismatch("%p holds %#llx, should hold %#llx", (void *)at,
			 (unsigned long long)post.value, (unsigned long long)value);
	progress.faults += faults;
}

/* The leader's own look. */
static void look(volatile uint64_t *at, uint64_t value)
{
	uint64_t found = ~value;

	if (access_faults(at, 0, &found))
		mismatch("the leader's read at %p: it faulted", (void *)at);
	else if (found != value)
		mismatch("%p holds %#llx for the leader, should hold %#llx", (void *)at,
			 (unsigned long long)found, (unsigned long long)value);
}

/* --- Mappings ------------------------------------------------------------- */

/* Something that no other page of this run ever held at this place. */
static uint64_t stamp(int page, uint64_t variant)
{
	return (uint64_t)progress.round << 24 | variant << 8 | (uint64_t)(page + 1);
}

static volatile uint64_t *word(char *region, int page)
{
	/* A different word of each page. */
	return (volatile uint64_t *)(region + (size_t)page * PAGE) + 17 * page;
}

static char *map(char *at, size_t length)
{
	char *region = mmap(at, length, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	if (region == MAP_FAILED)
		end(EXIT_USAGE, "mmap: %s", strerror(errno));
	return region;
}

static void unmap(char *at, size_t length)
{
	if (munmap(at, length))
		end(EXIT_USAGE, "munmap: %s", strerror(errno));
}

static void protect(char *at, int protection)
{
	if (mprotect(at, PAGES * PAGE, protection))
		end(EXIT_USAGE, "mprotect: %s", strerror(errno));
}

static void move(char *from, char *to, size_t length)
{
	if (mremap(from, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
		end(EXIT_USAGE, "mremap: %s", strerror(errno));
	progress.moves++;
}

static void fill(char *region, uint64_t variant)
{
	for (int page = 0; page < PAGES; page++)
		*word(region, page) = stamp(page, variant);
}

static void follower_reads(char *region, uint64_t variant)
{
	for (int page = 0; page < PAGES; page++)
		give(READ, word(region, page), stamp(page, variant));
}

static void follower_faults(char *region)
{
	for (int page = 0; page < PAGES; page++)
		give(page % 2 ? WRITE_FAULTS : READ_FAULTS, word(region, page), 0);
}

/* --- The steps ------------------------------------------------------------ */

static void step_map(char *region)
{
	step("map");
	follower_faults(region);
	map(region, PAGES * PAGE);
	fill(region, 1);
	follower_reads(region, 1);
	for (int page = 0; page < PAGES; page++)
		give(WRITE, word(region, page), stamp(page, 2));
	for (int page = 0; page < PAGES; page++)
		look(word(region, page), stamp(page, 2));
}

/* From the first region to the second, and back. */
static void step_move(char *region, char *other, size_t length)
{
	step(length >= TABLE ? "move of a table" : "move");
	move(region, other, length);
	follower_reads(other, 2);
	follower_faults(region);
	/* Old contents must not shine through what is new at the old place. */
	map(region, PAGES * PAGE);
	for (int page = 0; page < PAGES; page++)
		give(READ, word(region, page), 0);
	fill(region, 3);
	follower_reads(region, 3);
	follower_reads(other, 2);
	unmap(region, PAGES * PAGE);
	move(other, region, length);
	follower_reads(region, 2);
	follower_faults(other);
}

static void step_protect(char *region)
{
	step("protect");
	protect(region, PROT_READ);
	for (int page = 0; page < PAGES; page++) {
		give(READ, word(region, page), stamp(page, 2));
		give(WRITE_FAULTS, word(region, page), stamp(page, 4));
		give(READ, word(region, page), stamp(page, 2));
	}
	protect(region, PROT_NONE);
	follower_faults(region);
	protect(region, PROT_READ | PROT_WRITE);
	for (int page = 0; page < PAGES; page++) {
		give(READ, word(region, page), stamp(page, 2));
		give(WRITE, word(region, page), stamp(page, 5));
		look(word(region, page), stamp(page, 5));
	}
}

/* The follower's first touches fill tables that the leader then walks. */
static void step_share(char *regions[REGIONS])
{
	step("share");
	for (int i = 1; i < REGIONS; i++) {
		map(regions[i], PAGES * PAGE);
		give(READ, word(regions[i], i), 0);
		give(WRITE, word(regions[i], i), stamp(i, 6));
		look(word(regions[i], i), stamp(i, 6));
		look(word(regions[i], (i + 1) % PAGES), 0);
	}
}

/* What was a table is soon data: here, what would be a present, writable entry. */
static void step_reuse(char *regions[REGIONS], char *data)
{
	step("reuse");
	for (int i = 0; i < REGIONS; i++)
		unmap(regions[i], i ? PAGES * PAGE : TABLE);
	for (int i = 0; i < REGIONS; i++)
		give(i % 2 ? WRITE_FAULTS : READ_FAULTS, word(regions[i], i), 0);
	map(data, 4 * REGIONS * PAGE);
	for (int page = 0; page < 4 * REGIONS; page++) {
		volatile uint64_t *entries = (volatile uint64_t *)(data + page * PAGE);

		for (size_t i = 0; i < PAGE / sizeof(*entries); i += 8)
			entries[i] = stamp(page, 7) << 12 | 0x67;
	}
	for (int i = 0; i < REGIONS; i++)
		give(i % 2 ? READ_FAULTS : WRITE_FAULTS, word(regions[i], i), 0);
	for (int page = 0; page < 4 * REGIONS; page++)
		give(READ, (volatile uint64_t *)(data + page * PAGE) + page % 64 * 8,
		     stamp(page, 7) << 12 | 0x67);
	/* And the other way: what was data is a table again. */
	unmap(data, 4 * REGIONS * PAGE);
	map(regions[0], PAGES * PAGE);
	for (int page = 0; page < PAGES; page++)
		give(READ, word(regions[0], page), 0);
	unmap(regions[0], PAGES * PAGE);
	follower_faults(regions[0]);
}

/* The child may only look: its parent has other threads. */
static void child_looks(char *region, const uint32_t *go)
{
	time_t until = time(NULL) + BOUND;
	long spins = 0;

	while (!__atomic_load_n(go, __ATOMIC_ACQUIRE)) {
		relax(++spins);
		if (time(NULL) > until)
			_exit(EXIT_BOUND);
	}
	for (int page = 0; page < PAGES; page++)
		if (*word(region, page) != stamp(page, 8))
			_exit(1);
	_exit(0);
}

static void step_fork(char *region)
{
	uint32_t *go = pages(PAGE, MAP_SHARED);
	int status;
	pid_t child;

	step("fork");
	map(region, PAGES * PAGE);
	fill(region, 8);
	follower_reads(region, 8);
	child = fork();
	if (child < 0)
		end(EXIT_USAGE, "fork: %s", strerror(errno));
	if (child == 0)
		child_looks(region, go);
	/* Pages that are now copied: by the leader, by the follower, by both in turn. */
	for (int page = 0; page < PAGES; page++) {
		uint64_t value = stamp(page, 9);

		if (page % 3 == 0) {
			*word(region, page) = value;
			give(READ, word(region, page), value);
		} else if (page % 3 == 1) {
			give(WRITE, word(region, page), value);
			look(word(region, page), value);
		} else {
			give(READ, word(region, page), stamp(page, 8));
			*word(region, page) = value;
			give(READ, word(region, page), value);
			give(WRITE, word(region, page), value + ((uint64_t)1 << 60));
			look(word(region, page), value + ((uint64_t)1 << 60));
		}
	}
	__atomic_store_n(go, 1, __ATOMIC_RELEASE);
	step("fork, the child");
	if (waitpid(child, &status, 0) != child)
		end(EXIT_USAGE, "waitpid: %s", strerror(errno));
	if (status)
		mismatch("the child %s (status %#x)",
			 WIFEXITED(status) && WEXITSTATUS(status) == 1
				 ? "saw writes of its parent" : "did not end well", status);
	unmap(region, PAGES * PAGE);
	munmap(go, PAGE);
	progress.forks++;
}

static void lead(void)
{
	char *regions[REGIONS];
	/* Sometimes within one directory, sometimes each in its own. */
	size_t apart = progress.round % 3 ? DIRECTORY : TABLE;
	/* A move of two megabytes takes the table along, instead of its entries. */
	size_t length = progress.round % 4 < 2 ? PAGES * PAGE : TABLE;
	char *data = space + (REGIONS + 1) * DIRECTORY;

	for (int i = 0; i < REGIONS; i++)
		regions[i] = space + (size_t)i * apart;
	step_map(regions[0]);
	if (length == TABLE)
		map(regions[0] + PAGES * PAGE, TABLE - PAGES * PAGE);
	step_move(regions[0], regions[1], length);
	step_protect(regions[0]);
	step_share(regions);
	step_reuse(regions, data);
	if (progress.round % FORK_EVERY == 0)
		step_fork(regions[progress.round / FORK_EVERY % REGIONS]);
	step("end");
	give(ROUND_ENDS, NULL, 0);
}

/* --- Threads -------------------------------------------------------------- */

/* The round that both are in; the leader of the one before begins it. */
static uint64_t turn;

static void *take_turns(void *argument)
{
	int self = argument != NULL;

	pin(cpus.cpu[self]);
	for (long round = 0; round < rounds; round++) {
		if (round % 2 == self) {
			progress.round = round;
			lead();
			if (__atomic_load_n(&progress.stop, __ATOMIC_RELAXED) ||
			    round + 1 == rounds)
				progress.rounds_done = round + 1;
			__atomic_store_n(&turn, (uint64_t)round + 1, __ATOMIC_RELEASE);
		} else {
			follow();
			await(&turn, (uint64_t)round + 1);
		}
		if (progress.rounds_done)
			break;
	}
	return NULL;
}

/* --- The watchdog --------------------------------------------------------- */

static void claim_space(void)
{
	size_t length = (REGIONS + 2) * DIRECTORY;
	char *got = mmap(space, length, PROT_NONE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);

	if (got != space)
		end(EXIT_USAGE, "the addresses from %p are not free", (void *)space);
	unmap(space, length);
}

/* Until the threads have ended. Says now and then how far they are. */
static void watch(pthread_t thread, double seconds_most)
{
	double start = seconds(), moved = start, said = start;
	long steps = -1;

	while (!join_within(thread, 1)) {
		long now = __atomic_load_n(&progress.steps, __ATOMIC_RELAXED);
		double time = seconds();

		if (now != steps)
			moved = time;
		steps = now;
		if (time > moved + BOUND)
			end(EXIT_BOUND, "nothing moved for %d s in round %ld, step %s: %s at %p is %s",
			    BOUND, progress.round, progress.step, ORDER_NAMES[post.order],
			    (void *)post.at, post.given == post.done ? "done" : "awaited");
		if (time > said + PROGRESS_EVERY) {
			said = time;
			printf("tables: round %ld of %ld, mismatches %ld, %.0f s\n",
			       progress.round, rounds, progress.mismatches, time - start);
		}
		if (time > start + seconds_most)
			__atomic_store_n(&progress.stop, 1, __ATOMIC_RELAXED);
	}
}

int main(int argc, char **argv)
{
	static const char USAGE[] = "usage: tables [-c CPU,CPU] ROUNDS [SECONDS]";
	double start = seconds(), seconds_most;
	pthread_t threads[2];
	int option;

	cpus = cpus_allowed();
	while ((option = getopt(argc, argv, "c:")) != -1) {
		if (option != 'c')
			end(EXIT_USAGE, "%s", USAGE);
		cpus = cpus_named(optarg);
	}
	if (argc - optind < 1 || argc - optind > 2)
		end(EXIT_USAGE, "%s", USAGE);
	rounds = number("ROUNDS", argv[optind], 1, 1000000000);
	seconds_most = argc - optind == 2
		? (double)number("SECONDS", argv[optind + 1], 1, 1000000) : 1e9;
	if (cpus.count < 2)
		end(EXIT_USAGE, "it takes two processors: there is %d", cpus.count);
	setvbuf(stdout, NULL, _IOLBF, 0);
	/* A page of two megabytes has no table. Kernels without them say no. */
	prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
	claim_space();
	catch_faults();
	progress.step = "start";
	threads[0] = start_thread(take_turns, NULL);
	threads[1] = start_thread(take_turns, &turn);
	watch(threads[0], seconds_most);
	watch(threads[1], seconds_most);
	printf("tables: rounds %ld mismatches %ld (faults %ld, moves %ld, forks %ld), %.3f s\n",
	       progress.rounds_done, progress.mismatches, progress.faults, progress.moves,
	       progress.forks, seconds() - start);
	return progress.mismatches != 0;
}
