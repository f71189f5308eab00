/*
 * Kernels after the NAS Parallel Benchmarks, on chosen processors.
 *
 *   npb list                           what there is
 *   npb [OPTION...] KERNEL SIZE        KERNEL may be `all`
 *
 *   -p N    N processes, each by itself: one instance on each processor
 *   -t N    N threads that share one instance's memory
 *   -c CPUS the processors for them, as in 0,2-3; else all, in order
 *   -r N    runs, one line each
 *   -b S    seconds that a run may take; 600
 *
 * A run is one line: `npb KERNEL SIZE processes|threads N: SECONDS s, verified,
 * setup SECONDS s`. The first figure is from the start of the first process to
 * the last result, without the judging; the second is the part of it until the
 * slowest had made its inputs. Ends with 1 when a result is wrong, with 3 when
 * a run took too long.
 */

#include "npb.h"

#include <signal.h>
#include <sys/wait.h>

static const struct kernel *const KERNELS[] = {&EP, &IS, &CG, &MG, &FT};
static const char SIZE_NAMES[SIZES + 1] = "QTS";

enum { KERNEL_COUNT = sizeof(KERNELS) / sizeof(KERNELS[0]) };

struct options {
	/* One of them is 1, which one `threaded` says. */
	long processes, threads;
	int threaded;
	struct cpus cpus;
	long runs;
	double bound;
};

/* --- One instance --------------------------------------------------------- */

struct start {
	struct member member;
	const struct kernel *kernel;
	int size, cpu;
};

static void *run_member(void *argument)
{
	struct start *start = argument;

	pin(start->cpu);
	start->kernel->run(&start->member, start->size);
	return NULL;
}

/* In a process of its own, which has nothing else to do. */
static void run_instance(const struct kernel *kernel, int size, const struct options *options,
			 int first_cpu, struct outcome *outcome)
{
	struct team *team = pages(sizeof(*team), MAP_PRIVATE);
	struct start *starts = pages(MEMBERS_MAX * sizeof(*starts), MAP_PRIVATE);
	pthread_t threads[MEMBERS_MAX];

	team->members = (int)options->threads;
	team->bound = options->bound;
	team->outcome = outcome;
	for (int i = team->members - 1; i >= 0; i--) {
		int cpu = options->cpus.cpu[(first_cpu + i) % options->cpus.count];

		starts[i] = (struct start){{team, i, 0}, kernel, size, cpu};
		if (i > 0)
			threads[i] = start_thread(run_member, &starts[i]);
	}
	run_member(&starts[0]);
	for (int i = 1; i < team->members; i++)
		if (!join_within(threads[i], options->bound))
			end(EXIT_BOUND, "thread %d did not end", i);
	outcome->ended = 1;
}

/* --- A run ---------------------------------------------------------------- */

/* Waits for all; those that are still there after the bound are killed. */
static int await(pid_t *children, long count, double until)
{
	struct timespec nap = {.tv_nsec = 100000000};
	sigset_t ends;
	int late = 0;

	sigemptyset(&ends);
	sigaddset(&ends, SIGCHLD);
	for (long left = count; left > 0;) {
		pid_t child = waitpid(-1, NULL, left == count || !late ? WNOHANG : 0);

		if (child > 0) {
			for (long i = 0; i < count; i++)
				if (children[i] == child)
					children[i] = 0;
			left--;
		} else if (child < 0) {
			break;
		} else if (!late && seconds() > until) {
			late = 1;
			for (long i = 0; i < count; i++)
				if (children[i])
					kill(children[i], SIGKILL);
		} else {
			sigtimedwait(&ends, NULL, &nap);
		}
	}
	return late;
}

/* Prints the line; returns the exit code. */
static int report(const struct kernel *kernel, int size, const struct options *options,
		  const struct outcome *outcomes, double start, int late)
{
	const char *mode = options->threaded ? "threads" : "processes";
	long count = options->threaded ? options->threads : options->processes;
	double ready = start, done = start;

	printf("npb %s %c %s %ld: ", kernel->name, SIZE_NAMES[size], mode, count);
	for (long i = 0; i < options->processes; i++) {
		const struct outcome *outcome = &outcomes[i];

		if (late && !outcome->ended) {
			printf("no result within %.0f s\n", options->bound);
			return EXIT_BOUND;
		}
		if (outcome->wrong[0] || !outcome->ended) {
			printf("WRONG, process %ld: %s\n", i,
			       outcome->wrong[0] ? outcome->wrong : "died");
			return 1;
		}
		ready = fmax(ready, outcome->ready);
		done = fmax(done, outcome->done);
	}
	printf("%.3f s, verified, setup %.3f s\n", done - start, ready - start);
	return 0;
}

static int run(const struct kernel *kernel, int size, const struct options *options)
{
	struct outcome *outcomes = pages(MEMBERS_MAX * sizeof(*outcomes), MAP_SHARED);
	pid_t children[MEMBERS_MAX] = {0};
	double start = seconds();
	int late, code;

	for (long i = 0; i < options->processes; i++) {
		children[i] = fork();
		if (children[i] < 0)
			end(EXIT_USAGE, "fork: %s", strerror(errno));
		if (children[i] == 0) {
			run_instance(kernel, size, options, (int)i, &outcomes[i]);
			fflush(stdout);
			_exit(0);
		}
	}
	late = await(children, options->processes, start + options->bound);
	code = report(kernel, size, options, outcomes, start, late);
	munmap(outcomes, MEMBERS_MAX * sizeof(*outcomes));
	return code;
}

/* --- Command line --------------------------------------------------------- */

static int list(void)
{
	for (int i = 0; i < KERNEL_COUNT; i++) {
		printf("%s  %s\n", KERNELS[i]->name, KERNELS[i]->what);
		for (int size = 0; size < SIZES; size++)
			printf("    %c  %s\n", SIZE_NAMES[size], KERNELS[i]->sizes[size]);
	}
	return 0;
}

static struct options read_options(int argc, char **argv)
{
	struct options options = {1, 1, 0, cpus_allowed(), 1, 600};
	int counted = 0;
	int option;

	while ((option = getopt(argc, argv, "p:t:c:r:b:")) != -1) {
		switch (option) {
		case 'p':
			options.processes = number("-p", optarg, 1, MEMBERS_MAX);
			counted++;
			break;
		case 't':
			options.threads = number("-t", optarg, 1, MEMBERS_MAX);
			options.threaded = 1;
			counted++;
			break;
		case 'c':
			options.cpus = cpus_named(optarg);
			break;
		case 'r':
			options.runs = number("-r", optarg, 1, 1000000);
			break;
		case 'b':
			options.bound = (double)number("-b", optarg, 1, 1000000);
			break;
		default:
			exit(EXIT_USAGE);
		}
	}
	if (counted > 1)
		end(EXIT_USAGE, "-p and -t exclude each other");
	return options;
}

int main(int argc, char **argv)
{
	struct options options;
	const char *name, *size;
	sigset_t ends;
	int code = 0, known = 0;

	if (argc == 2 && !strcmp(argv[1], "list"))
		return list();
	options = read_options(argc, argv);
	if (argc - optind != 2)
		end(EXIT_USAGE, "usage: npb [-p N | -t N] [-c CPUS] [-r RUNS] [-b SECONDS] "
		    "KERNEL SIZE, or npb list");
	name = argv[optind];
	size = strchr(SIZE_NAMES, argv[optind + 1][0]);
	if (!argv[optind + 1][0] || argv[optind + 1][1] || !size)
		end(EXIT_USAGE, "there is no size %s: Q, T, S", argv[optind + 1]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	/* So that it waits for sigtimedwait. */
	sigemptyset(&ends);
	sigaddset(&ends, SIGCHLD);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	for (int i = 0; i < KERNEL_COUNT; i++) {
		if (strcmp(name, "all") && strcmp(name, KERNELS[i]->name))
			continue;
		known = 1;
		for (long round = 0; round < options.runs; round++) {
			int now = run(KERNELS[i], (int)(size - SIZE_NAMES), &options);

			code = now > code ? now : code;
		}
	}
	if (!known)
		end(EXIT_USAGE, "there is no kernel %s: npb list names them", name);
	return code;
}
