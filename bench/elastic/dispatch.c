/* What the kernel takes for Syscall User Dispatch alone: getppid in a loop, each
 * brought to a handler that does nothing. Run natively, it is the floor under
 * what an intercepted call can cost.
 *
 *     dispatch [THOUSANDS [SEED]]
 *
 * Prints what `syscalls` does. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "elastic.h"

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#define PR_SYS_DISPATCH_ON 1
#endif

static volatile char selector;

/* The handler's own return is a system call, so dispatching ends here and the
 * loop begins it again. */
static void nothing(int number)
{
	(void)number;
	selector = 0;
}

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "dispatch");
	size_t calls = bench.size_mib * 1000;
	uint64_t differing = 0;

	signal(SIGSYS, nothing);
	if (prctl(PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, 0, 0, &selector) != 0) {
		perror("prctl");
		return 1;
	}
	bench_measure(&bench);
	for (size_t i = 0; i < calls; i++) {
		selector = 1;
		/* Not made: the handler leaves its number in place of a result. */
		differing += syscall(SYS_getppid) != SYS_getppid;
	}
	fprintf(stderr, "%.1f ns per call\n",
		(now_s() - bench.measured_start_s) * 1e9 / (double)calls);
	return bench_finish(&bench, differing);
}
