/*
 * What writing to the same page from several processors costs.
 *
 *   sharing [OPTION...] true             increments of one word by all
 *   sharing [OPTION...] false            of words on one page, in lines of their own
 *   sharing [OPTION...] none             of words on pages of their own
 *   sharing [OPTION...] all              none, false and true, and their ratios
 *   sharing [OPTION...] groups N,N,...   the first N threads on one page, the next N
 *                                        on another: 2,2 or 3,1, for four threads
 *   sharing [OPTION...] writes PERCENT   this part of writes to a page of all, in lines
 *                                        of their own, the others to an own page
 *   sharing [OPTION...] read             the first thread writes a word, the others
 *                                        read it
 *   sharing [-c CPUS] [-n ROUNDS] bounce two threads hand one word back and forth
 *
 *   -t N     threads; else one for each processor
 *   -c CPUS  the processors for them, as in 0,2-3; else all, in order
 *   -s S     seconds that each thread works; 2
 *   -n N     instead: operations of each thread, within an hour; or round trips (1000)
 *   -l       locked increments, where else a load and a store
 *
 * One line for each mode, or for each of the roles:
 *
 *   sharing MODE threads N: X ns/op (MIN..MAX), total S s
 *   sharing bounce rounds N: MIN MEDIAN P99 MAX us, pages moved M, total S s
 *
 * X is the time of all threads through the operations of all threads, so that
 * with twice the time for each the throughput of two is that of one; MIN and
 * MAX are those of single threads. An operation is one increment or one read; a
 * round trip moves the page at least twice.
 *
 * Ends with 1 when a count at the end is not what was written.
 *
 * The modes are those of FragVisor (EuroSys 2023), section 7.1, figures 4 and
 * 5; low, moderate and max sharing there are `groups 2,2`, `3,1` and `4`.
 */

#include "team.h"

enum {
	THREADS_MAX = 64,
	LINES_PER_PAGE = PAGE / LINE,
	/* Operations between two looks at the clock. */
	BATCH = 256,
	ROUNDS_MAX = 10000000,
	/* Seconds without any progress. */
	BOUND = 60,
};

_Static_assert(THREADS_MAX <= LINES_PER_PAGE, "threads of one page have a line each");

struct page {
	_Alignas(PAGE) struct {
		_Alignas(LINE) volatile uint64_t word;
	} line[LINES_PER_PAGE];
};

/* What a thread does, and what came of it. A page each: only its thread writes. */
struct worker {
	_Alignas(PAGE) int index;
	int cpu;
	/* The word for `percent` of 100 writes, and the one for the others. */
	volatile uint64_t *shared, *own;
	long percent;
	int reads;
	/* What it did: ticks, operations, and how many of them on `shared`. */
	uint64_t ticks;
	uint64_t operations, on_shared;
	/* What a reader read last, and whether it ever went back. */
	uint64_t last;
	int wrong;
};

struct options {
	long threads;
	struct cpus cpus;
	double seconds;
	/* Operations of each thread; 0: as many as the seconds allow. */
	long operations;
	int locked;
};

static struct options options;
static struct gate gate;
static double rate;

/* --- Increments ----------------------------------------------------------- */

static inline void increment(volatile uint64_t *word)
{
	if (options.locked)
		__asm__ volatile("lock incq %0" : "+m"(*word) :: "memory", "cc");
	else
		/* Two instructions: between them another processor may write. */
		*word = *word + 1;
}

/* Increments `count` times; every 100 of them `percent` times the shared word. */
static void write_batch(struct worker *worker, uint64_t count)
{
	volatile uint64_t *shared = worker->shared, *own = worker->own;
	long due = (long)(worker->operations * (uint64_t)worker->percent % 100);
	long percent = worker->percent;
	uint64_t on_shared = 0;

	if (percent == 100) {
		for (uint64_t i = 0; i < count; i++)
			increment(shared);
		on_shared = count;
	} else {
		for (uint64_t i = 0; i < count; i++) {
			due += percent;
			if (due >= 100) {
				due -= 100;
				increment(shared);
				on_shared++;
			} else {
				increment(own);
			}
		}
	}
	worker->operations += count;
	worker->on_shared += on_shared;
}

/* Reads a word that somebody else counts up: it never goes back. */
static void read_batch(struct worker *worker, uint64_t count)
{
	uint64_t last = worker->last;

	for (uint64_t i = 0; i < count; i++) {
		uint64_t now = *worker->shared;

		worker->wrong |= now < last;
		last = now;
	}
	worker->last = last;
	worker->operations += count;
}

static void *work(void *argument)
{
	struct worker *result = argument, local = *result, *worker = &local;
	uint64_t start, until;

	pin(worker->cpu);
	/* The page's first touch is not what is measured. */
	if (!worker->reads)
		*(worker->own ? worker->own : worker->shared) = 0;
	gate_meet(&gate, (uint32_t)options.threads, BOUND);
	start = ticks();
	until = start + (uint64_t)(options.seconds * rate);
	do {
		uint64_t count = BATCH;

		if (options.operations && (uint64_t)options.operations - worker->operations < BATCH)
			count = (uint64_t)options.operations - worker->operations;
		if (worker->reads)
			read_batch(worker, count);
		else
			write_batch(worker, count);
	} while (options.operations ? worker->operations < (uint64_t)options.operations
				    : ticks() < until);
	worker->ticks = ticks() - start;
	*result = *worker;
	return NULL;
}

/* --- A mode --------------------------------------------------------------- */

/* Lets all threads do their work; the whole takes a bounded time. */
static void run(struct worker *workers)
{
	pthread_t threads[THREADS_MAX];
	double start = seconds(), bound = options.operations ? 3600 : options.seconds + BOUND;

	for (long i = 0; i < options.threads; i++) {
		workers[i].index = (int)i;
		workers[i].cpu = options.cpus.cpu[i % options.cpus.count];
		threads[i] = start_thread(work, &workers[i]);
	}
	for (long i = 0; i < options.threads; i++) {
		double left = start + bound - seconds();

		if (!join_within(threads[i], left > 0.1 ? left : 0.1))
			end(EXIT_BOUND, "the thread on processor %d did not end within %.0f s",
			    workers[i].cpu, bound);
	}
}

static double nanoseconds(const struct worker *worker)
{
	return (double)worker->ticks / rate * 1e9 / (double)worker->operations;
}

/* Prints the line of `count` workers; returns the time of an operation, ns. */
static double report(const char *mode, const struct worker *workers, long count)
{
	double least = nanoseconds(workers), most = least, longest = 0, operations = 0, time = 0;

	for (long i = 0; i < count; i++) {
		double one = nanoseconds(&workers[i]), took = (double)workers[i].ticks / rate;

		least = one < least ? one : least;
		most = one > most ? one : most;
		longest = took > longest ? took : longest;
		time += took;
		operations += (double)workers[i].operations;
	}
	printf("sharing %s%s threads %ld: %.2f ns/op (%.2f..%.2f), total %.3f s\n", mode,
	       options.locked ? " locked" : "", count, time / operations * 1e9, least, most,
	       longest);
	return time / operations * 1e9;
}

/*
 * Whether each word holds what its writers counted. Plain increments of one
 * word by many may be lost, but never come from nowhere.
 */
static int check(const char *mode, const struct worker *workers)
{
	int wrong = 0;

	for (long i = 0; i < options.threads; i++) {
		uint64_t written = 0, writers = 0;

		if (workers[i].wrong) {
			printf("sharing %s: WRONG, thread %ld read a count that went back\n",
			       mode, i);
			wrong = 1;
		}
		if (workers[i].reads)
			continue;
		for (long k = 0; k < options.threads; k++)
			if (!workers[k].reads && workers[k].shared == workers[i].shared) {
				written += workers[k].on_shared;
				writers++;
			}
		if (writers == 1 || options.locked ? *workers[i].shared != written
						   : *workers[i].shared > written) {
			printf("sharing %s: WRONG, thread %ld's word is %llu after %llu increments\n",
			       mode, i, (unsigned long long)*workers[i].shared,
			       (unsigned long long)written);
			wrong = 1;
		}
		if (workers[i].own &&
		    *workers[i].own != workers[i].operations - workers[i].on_shared) {
			printf("sharing %s: WRONG, thread %ld's own word is %llu\n", mode, i,
			       (unsigned long long)*workers[i].own);
			wrong = 1;
		}
	}
	return wrong;
}

/* Pages and workers of one mode; the caller says who writes where. */
struct setting {
	struct page *pages;
	struct worker *workers;
};

static struct setting new_setting(void)
{
	struct setting setting = {
		pages((THREADS_MAX + 1) * sizeof(struct page), MAP_PRIVATE),
		pages(THREADS_MAX * sizeof(struct worker), MAP_PRIVATE),
	};

	for (int i = 0; i < THREADS_MAX; i++)
		setting.workers[i].percent = 100;
	return setting;
}

static void end_setting(struct setting setting)
{
	munmap(setting.pages, (THREADS_MAX + 1) * sizeof(struct page));
	munmap(setting.workers, THREADS_MAX * sizeof(struct worker));
}

/* `true`, `false` or `none`; the time of an operation goes to `cost`. */
static int simple(const char *mode, double *cost)
{
	struct setting setting = new_setting();
	int wrong;

	for (int i = 0; i < options.threads; i++) {
		int page = !strcmp(mode, "none") ? i : 0;
		int line = !strcmp(mode, "false") ? i : 0;

		setting.workers[i].shared = &setting.pages[page].line[line].word;
	}
	run(setting.workers);
	*cost = report(mode, setting.workers, options.threads);
	wrong = check(mode, setting.workers);
	end_setting(setting);
	return wrong;
}

static int all(void)
{
	double none, cost_false, cost_true;
	int wrong = simple("none", &none) | simple("false", &cost_false) |
		    simple("true", &cost_true);

	printf("sharing ratios threads %ld: false/none %.2f, true/none %.2f\n",
	       options.threads, cost_false / none, cost_true / none);
	return wrong;
}

static int groups(const char *sizes)
{
	struct setting setting = new_setting();
	char mode[80], copy[64], *left = copy, *word;
	int thread = 0, wrong;
	double cost;

	if (strlen(sizes) >= sizeof(copy))
		end(EXIT_USAGE, "the list of groups is too long");
	strcpy(copy, sizes);
	for (int page = 0; (word = strsep(&left, ",")); page++) {
		long members = number("a group", word, 1, THREADS_MAX - thread);

		for (long i = 0; i < members; i++, thread++)
			setting.workers[thread].shared = &setting.pages[page].line[i].word;
	}
	options.threads = thread;
	snprintf(mode, sizeof(mode), "groups %s", sizes);
	run(setting.workers);
	cost = report(mode, setting.workers, options.threads);
	wrong = check(mode, setting.workers);
	printf("sharing %s rate: %.0f op/s\n", mode, (double)options.threads * 1e9 / cost);
	end_setting(setting);
	return wrong;
}

static int writes(long percent)
{
	struct setting setting = new_setting();
	char mode[32];
	int wrong;

	for (int i = 0; i < options.threads; i++) {
		setting.workers[i].shared = &setting.pages[0].line[i].word;
		setting.workers[i].own = &setting.pages[i + 1].line[0].word;
		setting.workers[i].percent = percent;
	}
	snprintf(mode, sizeof(mode), "writes %ld", percent);
	run(setting.workers);
	report(mode, setting.workers, options.threads);
	wrong = check(mode, setting.workers);
	end_setting(setting);
	return wrong;
}

static int readers(void)
{
	struct setting setting = new_setting();
	int wrong;

	if (options.threads < 2)
		end(EXIT_USAGE, "read takes two threads: there is one processor, or say -t 2");
	for (int i = 0; i < options.threads; i++) {
		setting.workers[i].shared = &setting.pages[0].line[0].word;
		setting.workers[i].reads = i > 0;
	}
	run(setting.workers);
	report("read writer", setting.workers, 1);
	report("read readers", setting.workers + 1, options.threads - 1);
	wrong = check("read", setting.workers);
	end_setting(setting);
	return wrong;
}

/* --- Back and forth ------------------------------------------------------- */

/* The word counts the hand-overs: even ones are the first thread's turn. */
static volatile uint64_t *ball;
static uint64_t *trips;

/* Until the word is `value`; each look costs the page when the other has it. */
static void await(uint64_t value)
{
	uint64_t until = ticks() + (uint64_t)(BOUND * rate), now;
	long spins = 0;

	while ((now = __atomic_load_n(ball, __ATOMIC_ACQUIRE)) != value) {
		relax(++spins);
		if (now > value)
			end(1, "WRONG, the word is %llu where %llu is the most it can be",
			    (unsigned long long)now, (unsigned long long)value);
		if (ticks() > until)
			end(EXIT_BOUND, "round %llu: processor %d waited %d s for the word to "
			    "be %llu: it is %llu", (unsigned long long)(value / 2),
			    sched_getcpu(), BOUND, (unsigned long long)value,
			    (unsigned long long)now);
	}
}

static void *bounce_thread(void *argument)
{
	int second = argument != NULL;

	pin(options.cpus.cpu[second % options.cpus.count]);
	if (!second)
		for (long i = 0; i < options.operations; i++)
			trips[i] = 0;
	gate_meet(&gate, 2, BOUND);
	for (long i = 0; i < options.operations; i++) {
		uint64_t start = ticks();

		if (second) {
			await(2 * (uint64_t)i + 1);
			__atomic_store_n(ball, 2 * (uint64_t)i + 2, __ATOMIC_RELEASE);
		} else {
			__atomic_store_n(ball, 2 * (uint64_t)i + 1, __ATOMIC_RELEASE);
			await(2 * (uint64_t)i + 2);
			trips[i] = ticks() - start;
		}
	}
	return NULL;
}

static int ascending(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static int bounce(void)
{
	struct page *page = pages(sizeof(*page), MAP_PRIVATE);
	double start, took;
	pthread_t threads[2];
	long rounds;

	if (!options.operations)
		options.operations = 1000;
	if (options.operations > ROUNDS_MAX)
		end(EXIT_USAGE, "bounce takes %d rounds at most", ROUNDS_MAX);
	rounds = options.operations;
	ball = &page->line[0].word;
	trips = pages((size_t)rounds * sizeof(*trips), MAP_PRIVATE);
	start = seconds();
	threads[0] = start_thread(bounce_thread, NULL);
	threads[1] = start_thread(bounce_thread, page);
	/* Each hand-over is bounded in the threads. */
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	took = seconds() - start;
	if (*ball != 2 * (uint64_t)rounds) {
		printf("sharing bounce: WRONG, the word is %llu after %ld rounds\n",
		       (unsigned long long)*ball, rounds);
		return 1;
	}
	qsort(trips, (size_t)rounds, sizeof(*trips), ascending);
	printf("sharing bounce rounds %ld: min %.2f median %.2f p99 %.2f max %.2f us, "
	       "pages moved %ld, total %.3f s\n", rounds, (double)trips[0] / rate * 1e6,
	       (double)trips[rounds / 2] / rate * 1e6,
	       (double)trips[rounds * 99 / 100] / rate * 1e6,
	       (double)trips[rounds - 1] / rate * 1e6, 2 * rounds, took);
	return 0;
}

/* --- Command line --------------------------------------------------------- */

static const char USAGE[] =
	"usage: sharing [-t THREADS] [-c CPUS] [-s SECONDS] [-n OPERATIONS] [-l] "
	"true|false|none|all|read|bounce|groups N,N|writes PERCENT";

static void read_options(int argc, char **argv)
{
	int option;

	options = (struct options){0, cpus_allowed(), 2, 0, 0};
	while ((option = getopt(argc, argv, "t:c:s:n:l")) != -1) {
		switch (option) {
		case 't':
			options.threads = number("-t", optarg, 1, THREADS_MAX);
			break;
		case 'c':
			options.cpus = cpus_named(optarg);
			break;
		case 's':
			options.seconds = (double)number("-s", optarg, 1, 86400);
			break;
		case 'n':
			options.operations = number("-n", optarg, 1, INT64_MAX);
			break;
		case 'l':
			options.locked = 1;
			break;
		default:
			end(EXIT_USAGE, "%s", USAGE);
		}
	}
	if (!options.threads)
		options.threads = options.cpus.count < THREADS_MAX ? options.cpus.count
								   : THREADS_MAX;
}

int main(int argc, char **argv)
{
	const char *mode, *value;
	double cost;
	int words;

	setvbuf(stdout, NULL, _IOLBF, 0);
	read_options(argc, argv);
	words = argc - optind;
	mode = words > 0 ? argv[optind] : "";
	value = words > 1 ? argv[optind + 1] : "";
	rate = ticks_per_second();
	if (words == 1 && (!strcmp(mode, "true") || !strcmp(mode, "false") || !strcmp(mode, "none")))
		return simple(mode, &cost);
	if (words == 1 && !strcmp(mode, "all"))
		return all();
	if (words == 1 && !strcmp(mode, "read"))
		return readers();
	if (words == 1 && !strcmp(mode, "bounce"))
		return bounce();
	if (words == 2 && !strcmp(mode, "groups"))
		return groups(value);
	if (words == 2 && !strcmp(mode, "writes"))
		return writes(number("the percentage", value, 0, 100));
	end(EXIT_USAGE, "%s", USAGE);
}
