/* Runs a test: its threads, what they found, and the watchdog. */

#include "litmus.h"

enum {
	/* Seconds between lines of progress, and without any progress at most. */
	PROGRESS_EVERY = 10,
	BOUND = 60,
	/* Forbidden outcomes of a test that are printed. */
	PRINTED_MAX = 3,
	/* The largest head start, in empty steps. */
	STEPS = 32,
};

/* What a thread did in a round: what it read, and when it was at it, in ticks. */
struct note {
	uint64_t read[READS_MAX];
	uint64_t begun, ended;
};

/* Each thread's notes of a batch, on pages of their own. */
static struct notes {
	/* Ticks from the opening of the gate until it went on. */
	uint64_t late;
	struct note rounds[BATCH_MAX];
} *notes[THREADS_MAX];

static struct run run;
static long seen_forbidden, seen_weak;
/* The rounds begun, and whether the watchdog asks for the end. */
static struct {
	_Alignas(PAGE) long begun;
	int stop;
} watched;

void prepare_runs(void)
{
	for (int t = 0; t < THREADS_MAX; t++)
		notes[t] = pages(sizeof(struct notes), MAP_SHARED);
}

/* --- Judging -------------------------------------------------------------- */

/* Whether two threads were at it at the same time. */
static int raced(int index)
{
	for (int a = 0; a < run.test->threads; a++) {
		for (int b = a + 1; b < run.test->threads; b++) {
			const struct note *one = &notes[a]->rounds[index];
			const struct note *two = &notes[b]->rounds[index];

			if (one->begun < two->ended && two->begun < one->ended)
				return 1;
		}
	}
	return 0;
}

static void print_forbidden(const struct batch *batch, const struct outcome *outcome)
{
	static const char *const LAYOUT_NAMES[LAYOUTS] = {"together", "apart", "strided"};
	char text[128] = "";

	write_parts(run.test, outcome, text, sizeof(text));
	printf("litmus %s FORBIDDEN in round %ld: %s; variables x %#x y %#x, %d of %d, %s\n",
	       run.test->name, outcome->round->number, text, outcome->x, outcome->y,
	       outcome->round->index + 1, batch->size, LAYOUT_NAMES[batch->layout]);
}

static void judge(const struct batch *batch)
{
	for (int i = 0; i < batch->size; i++) {
		struct round round = round_at(batch, i);
		struct outcome outcome = {.round = &round, .x = *round.x, .y = *round.y};

		for (int t = 0; t < run.test->threads; t++)
			memcpy(outcome.read[t], notes[t]->rounds[i].read, sizeof(outcome.read[t]));
		if (run.test->forbidden && run.test->forbidden(&outcome)) {
			if (seen_forbidden++ < PRINTED_MAX)
				print_forbidden(batch, &outcome);
		}
		if (run.test->weak && run.test->weak(&outcome))
			seen_weak++;
		count_outcome(run.test, size_class(batch->size), &outcome, raced(i));
	}
}

/* How late a thread goes on that is not the last at a meeting, as seen lately. */
static void follow_lateness(void)
{
	uint64_t most = 0, before = run.pattern.late;

	for (int t = 0; t < run.test->threads; t++)
		if (notes[t]->late > most)
			most = notes[t]->late;
	/* A thread that had to wait for its turn to run says nothing. */
	if (most > 4 * before + run.pattern.microsecond)
		most = 4 * before + run.pattern.microsecond;
	run.pattern.late = (7 * before + most) / 8;
}

/* --- Threads -------------------------------------------------------------- */

/* Chooses the next batch and makes it ready. */
static void prepare(long *done, uint32_t *random)
{
	struct batch batch = {0};

	if (!__atomic_load_n(&watched.stop, __ATOMIC_RELAXED) && *done < run.rounds) {
		batch = next_batch(&run.pattern, *done, run.rounds, random);
		clear_variables(&batch);
		for (int i = 0; run.test->reset && i < batch.size; i++) {
			struct round round = round_at(&batch, i);

			run.test->reset(&round);
		}
		*done += batch.size;
	}
	__atomic_store_n(&watched.begun, *done, __ATOMIC_RELAXED);
	announce(&batch);
}

/*
 * Until it is time for a round; a different head start each. Without `pause`,
 * for which a monitor may give the processor to somebody else.
 */
static void await_start(uint64_t start, uint64_t pace, uint32_t random)
{
	if (pace) {
		start += (random >> 8) % pace;
		while (ticks() < start)
			__asm__ volatile("");
	}
	for (uint32_t k = random % STEPS; k > 0; k--)
		__asm__ volatile("");
}

static uint32_t run_batch(int t, const struct batch *batch, uint64_t opened, uint32_t random)
{
	uint64_t start = opened + batch->lead;

	notes[t]->late = ticks() - opened;
	for (int i = 0; i < batch->size; i++) {
		struct round round = round_at(batch, i);
		struct note note = {0};

		random = next_random(random);
		await_start(start, batch->pace, random);
		start += batch->pace;
		note.begun = ticks();
		run.test->body(t, &round, note.read);
		note.ended = ticks();
		notes[t]->rounds[i] = note;
	}
	return random;
}

static void *run_thread(void *argument)
{
	int t = (int)(intptr_t)argument;
	uint32_t random = 2463534242u + (uint32_t)t, choices = 362436069u;
	long done = 0;

	pin(run.cpus.cpu[t]);
	for (;;) {
		struct batch batch;
		uint64_t opened;

		if (t == 0)
			prepare(&done, &choices);
		opened = meet();
		batch = announced();
		if (!batch.size)
			return NULL;
		if (run.pattern.spread) {
			random = next_random(random);
			touch_variables(&batch, random);
			opened = meet();
		}
		random = run_batch(t, &batch, opened, random);
		meet();
		if (t == 0) {
			judge(&batch);
			follow_lateness();
		}
	}
}

/* --- The watchdog --------------------------------------------------------- */

/* Until the threads of the test have ended. */
static void watch(const pthread_t *threads)
{
	double start = seconds(), moved = start, said = start;
	long before = -1;

	for (int t = 0; t < run.test->threads;) {
		double now, left = run.until - seconds();

		if (join_within(threads[t], left < 0.01 ? 0.01 : left < 1 ? left : 1)) {
			t++;
			continue;
		}
		now = seconds();
		if (__atomic_load_n(&watched.begun, __ATOMIC_RELAXED) != before)
			moved = now;
		before = __atomic_load_n(&watched.begun, __ATOMIC_RELAXED);
		if (now > moved + BOUND)
			end(EXIT_BOUND, "%s: nothing moved for %d s before round %ld",
			    run.test->name, BOUND, before);
		if (now > said + PROGRESS_EVERY) {
			said = now;
			printf("litmus %s round %ld of %ld, %.0f s\n", run.test->name, before,
			       run.rounds, now - start);
		}
		if (now >= run.until)
			__atomic_store_n(&watched.stop, 1, __ATOMIC_RELAXED);
	}
}

long run_test(const struct run *wanted)
{
	pthread_t threads[THREADS_MAX];
	double start = seconds();

	run = *wanted;
	seen_forbidden = seen_weak = watched.begun = watched.stop = 0;
	outcomes_begin();
	meeting_begins(run.test->threads);
	for (int t = 0; t < run.test->threads; t++)
		threads[t] = start_thread(run_thread, (void *)(intptr_t)t);
	watch(threads);
	print_outcomes(run.test);
	printf("litmus %s took %.3f s\n", run.test->name, seconds() - start);
	printf("litmus %s rounds %ld weak %ld forbidden %ld\n", run.test->name,
	       watched.begun, seen_weak, seen_forbidden);
	return seen_forbidden;
}
