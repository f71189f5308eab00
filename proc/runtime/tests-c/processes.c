// Processes: fork, vfork, posix_spawn, system, popen, exec, double fork, exec of
// the main process, descriptors.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static void check(int ok, const char *what) { printf("%s: %s\n", what, ok ? "ok" : "WRONG"); fflush(stdout); }

int main(int argc, char **argv) {
  int status;
  if (argc > 1 && !strcmp(argv[1], "again")) {
    char path[4096] = "";
    readlink("/proc/self/exe", path, sizeof path - 1);
    check(strstr(path, "processes") != 0, "exec of the main process keeps the name");
    check(!getenv("WEFT_CONTROL") && !getenv("WEFT_PROGRAM") && !getenv("WEFT_GENERATION"), "nothing of the runtime in the environment");
    sigset_t m;
    sigprocmask(0, 0, &m);
    check(sigismember(&m, SIGUSR2) == 1, "the mask survives exec");
    struct sigaction a;
    sigaction(SIGUSR1, 0, &a);
    check(a.sa_handler == SIG_IGN, "ignored signals survive exec");
    if (argc > 2 && strcmp(argv[2], "3")) {
      argv[2][0]++;
      execv("/proc/self/exe", argv);
    }
    return 0;
  }
  for (int i = 0; i < 50; i++) {
    pid_t p = vfork();
    if (!p) { execl("/bin/true", "true", (char *)0); _exit(1); }
    waitpid(p, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status)) { check(0, "vfork and exec"); break; }
  }
  check(1, "vfork and exec");
  volatile int shared = 0;
  pid_t p = vfork();
  if (!p) { shared = 7; _exit(3); }
  waitpid(p, &status, 0);
  check(shared == 7 && WEXITSTATUS(status) == 3, "vfork shares memory");
  p = vfork();
  if (!p) { signal(SIGUSR1, SIG_IGN); execl("/nowhere", "x", (char *)0); _exit(errno == ENOENT ? 4 : 5); }
  waitpid(p, &status, 0);
  struct sigaction a;
  sigaction(SIGUSR1, 0, &a);
  check(WEXITSTATUS(status) == 4 && a.sa_handler == SIG_DFL, "a vfork child has actions of its own");
  char *args[] = {"sh", "-c", "exit 6", 0};
  posix_spawn(&p, "/bin/sh", 0, 0, args, environ);
  waitpid(p, &status, 0);
  check(WEXITSTATUS(status) == 6, "posix_spawn");
  int e = posix_spawn(&p, "/nowhere", 0, 0, args, environ);
  check(e == ENOENT, "posix_spawn of nothing");
  check(WEXITSTATUS(system("exit 8")) == 8, "system");
  FILE *f = popen("echo piped", "r");
  char line[100] = "";
  fgets(line, sizeof line, f);
  check(!strcmp(line, "piped\n") && pclose(f) == 0, "popen");
  int pp[2];
  pipe(pp);
  if (!fork()) {
    setsid();
    if (!fork()) { usleep(1000); write(pp[1], "d", 1); _exit(0); }
    _exit(0);
  }
  wait(&status);
  char c = 0;
  read(pp[0], &c, 1);
  check(c == 'd', "double fork");
  p = fork();
  if (!p) { p = fork(); if (!p) { execl("/bin/sh", "sh", "-c", "exit 2", (char *)0); } waitpid(p, &status, 0); _exit(WEXITSTATUS(status)); }
  waitpid(p, &status, 0);
  check(WEXITSTATUS(status) == 2, "a child's child");
  check(close(900) == -1 && errno == EBADF, "no descriptor at 900");
  check(execl("/etc/passwd", "x", (char *)0) == -1 && errno == EACCES, "exec of a file without permission");
  check(execl("/nowhere", "x", (char *)0) == -1 && errno == ENOENT, "exec of nothing");
  check(execl("/tmp", "x", (char *)0) == -1 && errno == EACCES, "exec of a directory");
  char script[] = "/tmp/weft-script-XXXXXX";
  int fd = mkstemp(script);
  write(fd, "garbage\n", 8);
  fchmod(fd, 0755);
  close(fd);
  check(execl(script, "x", (char *)0) == -1 && errno == ENOEXEC, "exec of garbage");
  unlink(script);
  char name[17] = "";
  prctl(PR_GET_NAME, name);
  check(!strncmp(name, "processes", 9), "the process has the program's name");
  // Memory calls.
  char *m = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memset(m, 5, 1 << 20);
  m = mremap(m, 1 << 20, 64 << 20, MREMAP_MAYMOVE);
  check(m[0] == 5 && m[(1 << 20) - 1] == 5 && m[1 << 20] == 0, "mremap grows");
  m = mremap(m, 64 << 20, 4096, 0);
  check(m[4095] == 5, "mremap shrinks");
  madvise(m, 4096, MADV_DONTNEED);
  check(m[0] == 0, "MADV_DONTNEED zeroes");
  fd = open("/proc/self/exe", O_RDONLY);
  char *ro = mmap(0, 8192, PROT_READ, MAP_PRIVATE, fd, 0);
  check(ro[1] == 'E', "a file is mapped");
  check(mprotect(ro, 8192, PROT_READ | PROT_WRITE) == 0 && ro[1] == 'E', "and made writable");
  ro[1] = 'x';
  char *rw = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
  check(rw[1] == 'E' && rw != ro, "private writes stay private");
  check(mmap((void *)1, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED && errno == EINVAL, "a crooked fixed address");
  check(mmap(0, 0, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL, "an empty mapping");
  char *br = sbrk(100000);
  memset(br, 1, 100000);
  check(sbrk(0) == br + 100000 && sbrk(-100000) == br + 100000 && sbrk(0) == br, "brk up and down");
  sigset_t s;
  sigemptyset(&s);
  sigaddset(&s, SIGUSR2);
  sigprocmask(SIG_BLOCK, &s, 0);
  signal(SIGUSR1, SIG_IGN);
  fcntl(pp[0], F_SETFD, FD_CLOEXEC);
  char count[] = "1";
  execl("/proc/self/exe", "processes", "again", count, (char *)0);
  return 1;
}
