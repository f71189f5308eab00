// Signals as a program sees them: every line printed is the same natively and
// under the runtime. Exit status 0.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

static volatile sig_atomic_t alarms, last_code;
static volatile int *null;
static sigjmp_buf back;

static void check(int ok, const char *what) {
  printf("%s: %s\n", what, ok ? "ok" : "WRONG");
  if (!ok) printf("  errno %d (%s)\n", errno, strerror(errno));
}
static void count(int s) { alarms++; (void)s; }
static void set(int s, void (*f)(int), int flags) {
  struct sigaction a = {.sa_handler = f, .sa_flags = flags};
  sigaction(s, &a, 0);
}
static void every(long us) {
  struct itimerval t = {{us / 1000000, us % 1000000}, {us / 1000000, us % 1000000}};
  setitimer(ITIMER_REAL, &t, 0);
}
// A storm while computing, with live SSE state that a handler also uses.
static volatile double shared = 1.0;
static void storm_handler(int s) {
  alarms++;
  double x = s;
  for (int i = 0; i < 20; i++) x = x * 1.0001 + i;
  shared = x;
}
static void storm(void) {
  set(SIGALRM, storm_handler, SA_RESTART);
  alarms = 0;
  every(100);
  double sum = 0, want = 0;
  for (int round = 0; round < 200; round++) {
    sum = 0;
    for (int i = 1; i <= 100000; i++) sum += 1.0 / i;
    if (round == 0) want = sum;
    if (sum != want) break;
  }
  every(0);
  check(sum == want && alarms > 10, "storm in a compute loop");
  alarms = 0;
  every(50);
  long bad = 0;
  for (int i = 0; i < 100000; i++) bad += getppid() <= 0;
  every(0);
  check(!bad && alarms > 10, "storm in a loop of system calls");
}
static void reads(void) {
  int p[2];
  char c;
  pipe(p);
  set(SIGALRM, count, 0);
  alarms = 0;
  every(2000);
  int r = read(p[0], &c, 1), e = errno;
  every(0);
  check(r == -1 && e == EINTR && alarms >= 1, "read without SA_RESTART fails with EINTR");
  set(SIGALRM, count, SA_RESTART);
  alarms = 0;
  if (fork() == 0) {
    usleep(60000);
    write(p[1], "x", 1);
    _exit(0);
  }
  every(500);
  r = read(p[0], &c, 1);
  every(0);
  check(r == 1 && c == 'x' && alarms > 5, "read with SA_RESTART goes on");
  while (wait(0) < 0 && errno == EINTR) {}
  alarms = 0;
  every(3000);
  struct timespec t = {2, 0}, rest;
  r = nanosleep(&t, &rest), e = errno;
  every(0);
  check(r == -1 && e == EINTR && rest.tv_sec == 1, "nanosleep is not restarted");
  every(3000);
  r = poll(0, 0, 2000), e = errno;
  every(0);
  check(r == -1 && e == EINTR, "poll is not restarted");
  struct timeval v = {2, 0};
  every(3000);
  r = select(0, 0, 0, 0, &v), e = errno;
  every(0);
  check(r == -1 && e == EINTR, "select is not restarted");
  every(3000);
  r = pause(), e = errno;
  every(0);
  check(r == -1 && e == EINTR, "pause returns");
  // A storm in blocking reads: a byte now and then, none lost.
  int got = 0;
  if (fork() == 0) {
    for (int i = 0; i < 200; i++) { write(p[1], "y", 1); usleep(300); }
    _exit(0);
  }
  every(70);
  for (int i = 0; i < 200; i++) got += read(p[0], &c, 1) == 1;
  every(0);
  check(got == 200, "storm in blocking reads");
  while (wait(0) < 0 && errno == EINTR) {}
  close(p[0]); close(p[1]);
}
static void masks(void) {
  sigset_t s, old, pend;
  set(SIGUSR1, count, 0);
  set(SIGUSR2, count, 0);
  sigemptyset(&s);
  sigaddset(&s, SIGUSR1);
  sigprocmask(SIG_BLOCK, &s, &old);
  alarms = 0;
  raise(SIGUSR1);
  sigpending(&pend);
  check(alarms == 0 && sigismember(&pend, SIGUSR1), "blocked signal is pending");
  sigset_t none;
  sigemptyset(&none);
  int r = sigsuspend(&none), e = errno;
  check(r == -1 && e == EINTR && alarms == 1, "sigsuspend lets it in");
  sigset_t now;
  sigprocmask(SIG_BLOCK, 0, &now);
  check(sigismember(&now, SIGUSR1) == 1, "the mask is back after sigsuspend");
  raise(SIGUSR1);
  struct timespec t = {1, 0};
  r = ppoll(0, 0, &t, &none), e = errno;
  check(r == -1 && e == EINTR && alarms == 2, "ppoll lets it in");
  raise(SIGUSR1);
  r = pselect(0, 0, 0, 0, &t, &none), e = errno;
  check(r == -1 && e == EINTR && alarms == 3, "pselect lets it in");
  int ep = epoll_create1(0);
  struct epoll_event ev;
  raise(SIGUSR1);
  r = epoll_pwait(ep, &ev, 1, 1000, &none), e = errno;
  check(r == -1 && e == EINTR && alarms == 4, "epoll_pwait lets it in");
  close(ep);
  raise(SIGUSR1);
  siginfo_t info;
  r = sigtimedwait(&s, &info, &t);
  check(r == SIGUSR1 && info.si_pid == getpid(), "sigtimedwait takes it");
  raise(SIGUSR1);
  int fd = signalfd(-1, &s, 0);
  struct signalfd_siginfo si;
  r = read(fd, &si, sizeof si);
  check(r == sizeof si && si.ssi_signo == SIGUSR1, "signalfd takes it");
  close(fd);
  sigprocmask(SIG_SETMASK, &old, 0);
  sigfillset(&s);
  sigprocmask(SIG_SETMASK, &s, &old);
  sigprocmask(SIG_SETMASK, &old, &now);
  check(sigismember(&now, SIGSEGV) == 1 && sigismember(&now, SIGKILL) == 0, "a full mask reads back");
}
static volatile int order[64], orders;
static void note(int s, siginfo_t *i, void *u) {
  order[orders++] = i->si_value.sival_int;
  (void)s; (void)u;
}
static void realtime(void) {
  struct sigaction a = {.sa_sigaction = note, .sa_flags = SA_SIGINFO};
  sigaction(SIGRTMIN + 3, &a, 0);
  sigset_t s;
  sigemptyset(&s);
  sigaddset(&s, SIGRTMIN + 3);
  sigprocmask(SIG_BLOCK, &s, 0);
  for (int i = 0; i < 20; i++) sigqueue(getpid(), SIGRTMIN + 3, (union sigval){.sival_int = i});
  sigprocmask(SIG_UNBLOCK, &s, 0);
  int ok = orders == 20;
  for (int i = 0; i < orders; i++) ok = ok && order[i] == i;
  check(ok, "real-time signals queue in order");
  orders = 0;
  for (int i = 0; i < 20; i++) sigqueue(getpid(), SIGRTMIN + 3, (union sigval){.sival_int = i});
  ok = orders == 20;
  check(ok, "real-time signals to oneself arrive at once");
}
static void segv(int s, siginfo_t *i, void *u) {
  last_code = i->si_code;
  ucontext_t *c = u;
  if (c->uc_mcontext.gregs[REG_RIP] == 0) _exit(9);
  siglongjmp(back, s);
}
static int deep(int n) {
  volatile char a[4096];
  a[0] = n;
  return deep(n + 1) + a[0];
}
static void faults(void) {
  static char alt[65536];
  stack_t st = {.ss_sp = alt, .ss_size = sizeof alt};
  sigaltstack(&st, 0);
  struct sigaction a = {.sa_sigaction = segv, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  sigaction(SIGSEGV, &a, 0);
  sigaction(SIGFPE, &a, 0);
  sigaction(SIGILL, &a, 0);
  sigaction(SIGBUS, &a, 0);
  for (int i = 0; i < 3; i++) {
    int r = sigsetjmp(back, 1);
    if (!r) *null = 1;
    check(r == SIGSEGV && last_code == SEGV_MAPERR, "null pointer");
  }
  int r = sigsetjmp(back, 1);
  if (!r) deep(0);
  check(r == SIGSEGV, "stack overflow on the alternate stack");
  r = sigsetjmp(back, 1);
  static volatile int zero, one = 1;
  if (!r) zero = one / zero;
  check(r == SIGFPE && last_code == FPE_INTDIV, "division by zero");
  r = sigsetjmp(back, 1);
  if (!r) __asm__("ud2");
  check(r == SIGILL, "illegal instruction");
  r = write(1, (void *)8, 4);
  check(r == -1 && errno == EFAULT, "write from a bad address");
  r = syscall(SYS_rt_sigprocmask, SIG_BLOCK, 8, 0, 8);
  check(r == -1 && errno == EFAULT, "sigprocmask from a bad address");
  st.ss_flags = SS_DISABLE;
  sigaltstack(&st, &st);
  check(st.ss_size == sizeof alt && st.ss_sp == alt, "the alternate stack reads back");
}
static void deaths(void) {
  int signals[] = {SIGSEGV, SIGBUS, SIGABRT, SIGTERM, SIGKILL, SIGFPE, SIGSYS, SIGUSR1};
  for (unsigned i = 0; i < sizeof signals / sizeof *signals; i++) {
    int status;
    fflush(stdout);
    pid_t p = fork();
    if (!p) {
      struct rlimit none = {0, 0};
      setrlimit(RLIMIT_CORE, &none);
      signal(signals[i], SIG_DFL);
      raise(signals[i]);
      _exit(1);
    }
    waitpid(p, &status, 0);
    printf("signal %d: signaled %d by %d\n", signals[i], WIFSIGNALED(status), WTERMSIG(status));
  }
  int status;
  fflush(stdout);
  pid_t p = fork();
  if (!p) {
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    signal(SIGSEGV, SIG_DFL);
    *null = 1;
    _exit(1);
  }
  waitpid(p, &status, 0);
  printf("null: signaled %d by %d\n", WIFSIGNALED(status), WTERMSIG(status));
  fflush(stdout);
  p = fork();
  if (!p) {
    signal(SIGSEGV, SIG_IGN);
    raise(SIGSEGV);
    _exit(7);
  }
  waitpid(p, &status, 0);
  printf("ignored: exited %d with %d\n", WIFEXITED(status), WEXITSTATUS(status));
}
static void job_control(void) {
  int status;
  fflush(stdout);
  pid_t p = fork();
  if (!p) {
    raise(SIGSTOP);
    _exit(5);
  }
  waitpid(p, &status, WUNTRACED);
  check(WIFSTOPPED(status) && WSTOPSIG(status) == SIGSTOP, "a child stops");
  kill(p, SIGCONT);
  waitpid(p, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 5, "and continues");
  signal(SIGCHLD, SIG_IGN);
  fflush(stdout);
  if (!fork()) _exit(0);
  int r = wait(&status);
  check(r == -1 && errno == ECHILD, "SIGCHLD ignored reaps");
  signal(SIGCHLD, SIG_DFL);
  set(SIGUSR1, count, SA_RESETHAND);
  alarms = 0;
  raise(SIGUSR1);
  struct sigaction a;
  sigaction(SIGUSR1, 0, &a);
  check(alarms == 1 && a.sa_handler == SIG_DFL, "SA_RESETHAND");
}
static volatile int depth, deepest, raised;
static void nest(int s) {
  depth++;
  if (depth > deepest) deepest = depth;
  if (raised++ < 2) raise(s);
  depth--;
}
static void nesting(void) {
  set(SIGUSR1, nest, SA_NODEFER);
  raise(SIGUSR1);
  check(deepest == 3, "SA_NODEFER nests");
  deepest = raised = 0;
  set(SIGUSR1, nest, 0);
  raise(SIGUSR1);
  check(deepest == 1, "without it it does not");
}
int main(void) {
  storm(); reads(); masks(); realtime(); faults(); nesting(); deaths(); job_control();
  return 0;
}
