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
 *               head starts of up to so long, and a random choice of the processor
 *               that has read or written the variables' pages last: for processors on
 *               several nodes, where a page takes longer than a whole round
 *   -b SIZE     rounds between two meetings of the threads, up to 512; else a
 *               mix of 1, 16 and 512
 *
 * Each thread is pinned to a processor of its own. A batch of rounds has shared
 * variables for each of them, in one of several layouts (place.c). They are set
 * to zero, all threads go at once, each through all rounds of the batch, and
 * when all have ended it is looked at what they read and left behind. Lines of
 * a test:
 *
 *   litmus NAME batches of 1: ROUNDS, raced SHARE%; OUTCOME:TIMES ...
 *   litmus NAME batches up to 16: ...
 *   litmus NAME batches up to 512: ...
 *   litmus NAME took SECONDS s
 *   litmus NAME rounds N weak W forbidden F
 *
 * A round raced when two threads were at it at the same time. An OUTCOME is
 * what the test's table says (`parts`): what threads read, by thread, then what
 * was left. `weak` counts outcomes that the model allows but an interleaving
 * does not explain (a store still in its processor's buffer); `forbidden` those
 * that the model rules out. Ends with 1 when one was seen. A test with more
 * threads than processors is left out, and named. A test that takes long says
 * every ten seconds how far it is; when nothing moves for a minute, the program
 * ends with 3 and says in which test and round.
 *
 * The tests whose names begin with `planted-` have forbidden outcomes, by
 * intent: they run only where they are named.
 */

#include "litmus.h"

/* Whether `test` is among the words, or there are none. */
static int wanted(const struct test *test, char **words)
{
	if (!*words)
		return !test->planted;
	for (; *words; words++)
		if (test_named(*words) == test)
			return 1;
	return 0;
}

static void check_names(char **words)
{
	for (; *words; words++)
		if (!test_named(*words))
			end(EXIT_USAGE, "there is no test %s", *words);
}

/* Reads the options into `run`; returns the names of tests that follow. */
static char **read_options(int argc, char **argv, struct run *run)
{
	int option;

	while ((option = getopt(argc, argv, "r:c:s:d:b:")) != -1) {
		switch (option) {
		case 'r':
			run->rounds = number("-r", optarg, 1, INT64_MAX);
			break;
		case 'c':
			run->cpus = cpus_named(optarg);
			break;
		case 's':
			run->until = seconds() + (double)number("-s", optarg, 1, 1000000);
			break;
		case 'd':
			run->pattern.spread = run->pattern.microsecond *
				(uint64_t)number("-d", optarg, 1, SPREAD_MAX_US);
			break;
		case 'b':
			run->pattern.size = (int)number("-b", optarg, 1, BATCH_MAX);
			break;
		default:
			end(EXIT_USAGE, "usage: litmus [-r ROUNDS] [-c CPUS] [-s SECONDS] "
			    "[-d MICROSECONDS] [-b SIZE] [TEST...]");
		}
	}
	if (optind < argc && argv[optind][0] >= '0' && argv[optind][0] <= '9' &&
	    !test_named(argv[optind]))
		run->rounds = number("ROUNDS", argv[optind++], 1, INT64_MAX);
	return argv + optind;
}

/* Says why a test cannot run here, if that is so. */
static int left_out(const struct test *test, const struct cpus *cpus)
{
	if (test->threads > cpus->count) {
		printf("litmus %s skipped: needs %d processors\n", test->name, test->threads);
		return 1;
	}
	if (test->possible && !test->possible()) {
		printf("litmus %s skipped: no such instruction\n", test->name);
		return 1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct run run = {.rounds = 100000, .until = 1e18};
	char **words;
	long bad = 0, left = 0;
	double until;

	run.cpus = cpus_allowed();
	run.pattern.microsecond = (uint64_t)(ticks_per_second() * 1e-6) + 1;
	words = read_options(argc, argv, &run);
	check_names(words);
	setvbuf(stdout, NULL, _IOLBF, 0);
	prepare_places();
	prepare_locked_tests();
	prepare_code_tests();
	prepare_runs();
	until = run.until;
	for (int i = 0; test_at(i); i++)
		left += wanted(test_at(i), words);
	for (int i = 0; (run.test = test_at(i)); i++) {
		double now = seconds();

		if (!wanted(run.test, words))
			continue;
		/* An equal share of what is left, for it and for those after it. */
		run.until = now + (until > now ? until - now : 0) / (double)left--;
		if (!left_out(run.test, &run.cpus))
			bad += run_test(&run);
	}
	if (bad)
		printf("litmus: %ld forbidden outcomes\n", bad);
	return bad != 0;
}
