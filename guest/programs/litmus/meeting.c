/*
 * Where the threads of a test wait for each other: the last to come opens the
 * gate for all. What the first thread has to say is on the same page as the
 * gate, so that it comes along.
 */

#include "litmus.h"

static struct {
	_Alignas(PAGE) int waiting;
	unsigned int gate;
	int members;
	/* Ticks when the gate was opened. */
	uint64_t opened;
	struct batch batch;
} meeting;

void meeting_begins(int members)
{
	meeting.waiting = 0;
	meeting.members = members;
}

uint64_t meet(void)
{
	unsigned int now = __atomic_load_n(&meeting.gate, __ATOMIC_ACQUIRE);
	long spins = 0;

	if (__atomic_add_fetch(&meeting.waiting, 1, __ATOMIC_SEQ_CST) == meeting.members) {
		uint64_t opened = ticks();

		meeting.waiting = 0;
		meeting.opened = opened;
		__atomic_store_n(&meeting.gate, now + 1, __ATOMIC_SEQ_CST);
		return opened;
	}
	/* The watchdog ends what takes too long. */
	while (__atomic_load_n(&meeting.gate, __ATOMIC_ACQUIRE) == now)
		relax(++spins);
	return meeting.opened;
}

void announce(const struct batch *batch)
{
	meeting.batch = *batch;
}

struct batch announced(void)
{
	return meeting.batch;
}
