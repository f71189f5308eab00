/* What CR4 gives programs and keeps from them, under a Linux that uses it: the
 * bases of FS and GS as registers (FSGSBASE), kept over system calls and context
 * switches; no look at descriptor tables (UMIP). Needs no privilege. Says
 * "protections: well". */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 2000 };

/* What Linux answers for SGDT where UMIP refuses it. */
static const uint64_t DUMMY_TABLE = 0xfffffffffffe0000;

static void expect(const char *what, uint64_t found, uint64_t wanted)
{
	if (found == wanted)
		return;
	printf("protections: %s: %#lx, not %#lx\n", what, found, wanted);
	exit(1);
}

static uint64_t gs_base(void)
{
	uint64_t base;
	__asm__ volatile("rdgsbase %0" : "=r"(base));
	return base;
}

static void bases(uint64_t mine)
{
	uint64_t fs, asked;
	const uint64_t enabled = 1 << 1;
	expect("HWCAP2_FSGSBASE", getauxval(AT_HWCAP2) & enabled, enabled);
	__asm__ volatile("rdfsbase %0" : "=r"(fs));
	syscall(SYS_arch_prctl, ARCH_GET_FS, &asked);
	expect("FS", fs, asked);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		uint64_t base = mine + round;
		__asm__ volatile("wrgsbase %0" : : "r"(base) : "memory");
		sched_yield();
		expect("GS", gs_base(), base);
	}
	syscall(SYS_arch_prctl, ARCH_GET_GS, &asked);
	expect("GS as the kernel sees it", asked, mine + ROUNDS - 1);
}

static void tables(void)
{
	struct __attribute__((packed)) {
		uint16_t limit;
		uint64_t base;
	} table = {0};
	__asm__ volatile("sgdt %0" : "=m"(table));
	expect("the table's base", table.base, DUMMY_TABLE);
	expect("the table's limit", table.limit, 0);
}

int main(void)
{
	int status;
	pid_t child = fork();
	bases(child == 0 ? 0x100000000 : 0x7f0000000000);
	if (child == 0)
		_exit(0);
	waitpid(child, &status, 0);
	expect("the child's status", (uint64_t)status, 0);
	tables();
	puts("protections: well");
	return 0;
}
