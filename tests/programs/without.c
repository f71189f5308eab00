/* Runs a command under a kernel that seems to lack something.
 *
 *     without userfaultfd COMMAND...    userfaultfd: ENOSYS
 *     without dispatch COMMAND...       prctl(PR_SET_SYSCALL_USER_DISPATCH): EINVAL
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SYSCALL_USER_DISPATCH 59
#define NEW_USERFAULTFD 0xaa00 /* _IO(0xAA, 0) on /dev/userfaultfd */

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define SKIP_UNLESS(value, count) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, (count))
#define ANSWER(value) BPF_STMT(BPF_RET | BPF_K, (value))

static struct sock_filter userfaultfd[] = {
	LOAD(nr),
	SKIP_UNLESS(SYS_userfaultfd, 1),
	ANSWER(SECCOMP_RET_ERRNO | ENOSYS),
	SKIP_UNLESS(SYS_ioctl, 3),
	LOAD(args[1]),
	SKIP_UNLESS(NEW_USERFAULTFD, 1),
	ANSWER(SECCOMP_RET_ERRNO | EPERM),
	ANSWER(SECCOMP_RET_ALLOW),
};

static struct sock_filter dispatch[] = {
	LOAD(nr),
	SKIP_UNLESS(SYS_prctl, 3),
	LOAD(args[0]),
	SKIP_UNLESS(SYSCALL_USER_DISPATCH, 1),
	ANSWER(SECCOMP_RET_ERRNO | EINVAL),
	ANSWER(SECCOMP_RET_ALLOW),
};

int main(int argc, char **argv)
{
	struct sock_fprog program;

	if (argc < 3) {
		fprintf(stderr, "usage: without userfaultfd|dispatch COMMAND...\n");
		return 2;
	}
	if (strcmp(argv[1], "userfaultfd") == 0) {
		program.filter = userfaultfd;
		program.len = sizeof(userfaultfd) / sizeof(userfaultfd[0]);
	} else {
		program.filter = dispatch;
		program.len = sizeof(dispatch) / sizeof(dispatch[0]);
	}
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
		perror("seccomp");
		return 2;
	}
	execvp(argv[2], argv + 2);
	perror(argv[2]);
	return 2;
}
