/*
 * The smallest user space that can say it is there: prints a line and powers
 * the machine off, or restarts it when the command line holds `weft.reboot`.
 *
 * Freestanding: a handful of system calls, one page of code, no library. What
 * a boot with it takes is the kernel's own time.
 */

#include <linux/reboot.h>
#include <sys/syscall.h>

static long system_call(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return result;
}

static int contains(const char *text, const char *word)
{
	for (; *text; text++) {
		const char *t = text, *w = word;

		while (*w && *t == *w) {
			t++;
			w++;
		}
		if (!*w)
			return 1;
	}
	return 0;
}

/* The kernel keeps names with a dot from init's arguments: /proc has them. */
static int restart_wanted(void)
{
	static char line[4096];
	long file, length;

	system_call(SYS_mount, (long)"proc", (long)"/proc", (long)"proc", 0, 0);
	file = system_call(SYS_open, (long)"/proc/cmdline", 0, 0, 0, 0);
	if (file < 0)
		return 0;
	length = system_call(SYS_read, file, (long)line, sizeof(line) - 1, 0, 0);
	if (length < 0)
		return 0;
	return contains(line, "weft.reboot");
}

void _start(void)
{
	static const char hello[] = "weft-guest: hello\n";
	long command = LINUX_REBOOT_CMD_POWER_OFF;

	system_call(SYS_write, 1, (long)hello, sizeof(hello) - 1, 0, 0);
	if (restart_wanted())
		command = LINUX_REBOOT_CMD_RESTART;
	system_call(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2,
		    command, 0, 0);
	/* Without a way to power off the kernel halts, or comes back here. */
	for (;;)
		system_call(SYS_pause, 0, 0, 0, 0, 0);
}
