/* The cost of a system call that does nothing: getppid in a loop.
 *
 *     syscalls [THOUSANDS [SEED]]
 *
 * The last lines on standard error are
 *
 *     123.4 ns per call
 *     set-up 0.000001 s, measured 0.1 s
 */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>

#include "elastic.h"

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "syscalls");
	size_t calls = bench.size_mib * 1000;
	long parent = syscall(SYS_getppid);
	uint64_t differing = 0;

	bench_measure(&bench);
	for (size_t i = 0; i < calls; i++)
		differing += syscall(SYS_getppid) != parent;
	fprintf(stderr, "%.1f ns per call\n",
		(now_s() - bench.measured_start_s) * 1e9 / (double)calls);
	return bench_finish(&bench, differing);
}
