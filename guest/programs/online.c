/*
 * Brings up processors that the kernel left out at boot (`maxcpus=`), in order.
 *
 *   online LIST     LIST as the kernel writes them (1-3,5), or `all` that are present
 *
 * Prints `weft-guest: online N` for each that came up. Mounts /sys if nobody has. What
 * RCU does for a processor is done there a second later and from then on.
 * A program and not a part of init's script: the boot of a machine over several
 * nodes waits for this, and each command of a script costs milliseconds there.
 */

#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define PROCESSORS "/sys/devices/system/cpu"
#define EXPEDITED "/sys/kernel/rcu_expedited"

static void fail(const char *format, ...)
{
	va_list values;

	fputs("weft-guest: error: online: ", stdout);
	va_start(values, format);
	vprintf(format, values);
	va_end(values);
	putchar('\n');
	exit(1);
}

/* The first line of a file, without its end. False if it cannot be read. */
static int read_line(const char *path, char *line, size_t size)
{
	int file = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t length = file < 0 ? -1 : read(file, line, size - 1);

	if (file >= 0)
		close(file);
	if (length < 0)
		return 0;
	line[length] = 0;
	line[strcspn(line, "\n")] = 0;
	return 1;
}

static int write_line(const char *path, const char *line)
{
	int file = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t written = file < 0 ? -1 : write(file, line, strlen(line));
	int error = errno;

	if (file >= 0)
		close(file);
	errno = error;
	return written >= 0;
}

static void bring_up(long number)
{
	char path[128], line[16];
	struct stat found;

	snprintf(path, sizeof(path), PROCESSORS "/cpu%ld", number);
	if (stat(path, &found))
		fail("there is no processor %ld", number);
	snprintf(path, sizeof(path), PROCESSORS "/cpu%ld/online", number);
	/* The first one is always there, and may have no such file. */
	if (!read_line(path, line, sizeof(line)) || strcmp(line, "0"))
		return;
	if (!write_line(path, "1"))
		fail("processor %ld does not come up: %s", number, strerror(errno));
	printf("weft-guest: online %ld\n", number);
	fflush(stdout);
}

static void bring_up_all(const char *list)
{
	const char *at = list;
	char *end;
	long first, last;

	do {
		first = strtol(at, &end, 10);
		if (end == at || first < 0)
			fail("%s: not a list of processors", list);
		last = first;
		at = end;
		if (*at == '-') {
			last = strtol(at + 1, &end, 10);
			if (end == at + 1)
				fail("%s: not a list of processors", list);
			at = end;
		}
		for (; first <= last; first++)
			bring_up(first);
	} while (*at++ == ',');
	if (at[-1])
		fail("%s: not a list of processors", list);
}

/*
 * `nohz_full=` has the first processors free what the others no longer use, a page of
 * which each has to travel then between nodes. So each does it by itself, and the
 * thread that ends grace periods may run where it is woken.
 */
static void settle_rcu(void)
{
	DIR *processes = opendir("/proc");
	struct dirent *entry;

	while (processes && (entry = readdir(processes))) {
		char path[300], name[32];
		int processor, all;
		cpu_set_t set;

		snprintf(path, sizeof(path), "/proc/%s/comm", entry->d_name);
		if (!isdigit((unsigned char)*entry->d_name) || !read_line(path, name, sizeof(name)))
			continue;
		all = !strcmp(name, "rcu_sched") || !strcmp(name, "rcu_preempt");
		if (!all && sscanf(name, "rcuo%*[gps]/%d", &processor) != 1)
			continue;
		CPU_ZERO(&set);
		if (all)
			memset(&set, 0xff, sizeof(set));
		else
			CPU_SET(processor, &set);
		/* Where the kernel does not let it move it stays, and is only slower. */
		sched_setaffinity(atoi(entry->d_name), sizeof(set), &set);
	}
	if (processes)
		closedir(processes);
}

int main(int count, char **words)
{
	char present[256], expedited[16];
	const char *list;
	int urgent;
	pid_t child;

	if (count != 2)
		fail("it is used so: online LIST, or online all");
	if (access(PROCESSORS, F_OK) && mount("sysfs", "/sys", "sysfs", 0, NULL))
		fail("cannot mount /sys: %s", strerror(errno));
	list = words[1];
	if (!strcmp(list, "all")) {
		if (!read_line(PROCESSORS "/present", present, sizeof(present)))
			fail("the kernel does not say which processors there are");
		list = present;
	}
	/*
	 * The kernel waits for grace periods on the way, of some ticks each unless it is
	 * told that they are urgent.
	 */
	urgent = read_line(EXPEDITED, expedited, sizeof(expedited)) && write_line(EXPEDITED, "1");
	bring_up_all(list);
	if (urgent)
		write_line(EXPEDITED, expedited);
	/* Each thread that moves stops processors for a moment: not while a boot waits. */
	child = fork();
	if (child == 0)
		sleep(1);
	if (child <= 0)
		settle_rcu();
	return 0;
}
