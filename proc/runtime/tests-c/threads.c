// Threads: mutexes, conditions, cancellation, joins, robust mutexes, thread-local
// storage, signals to threads, forks among threads.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static long total, whose;
static __thread long mine;
static void check(int ok, const char *what) { printf("%s: %s\n", what, ok ? "ok" : "WRONG"); }

static void *add(void *a) {
  for (int i = 0; i < 20000; i++) {
    pthread_mutex_lock(&lock);
    total++;
    mine++;
    pthread_mutex_unlock(&lock);
  }
  return (void *)(mine + (long)a);
}
static void *ping(void *a) {
  long me = (long)a;
  for (int i = 0; i < 500; i++) {
    pthread_mutex_lock(&lock);
    while (whose != me) pthread_cond_wait(&turn, &lock);
    whose = !me;
    pthread_cond_signal(&turn);
    pthread_mutex_unlock(&lock);
  }
  return 0;
}
static volatile int cleaned;
static void cleanup(void *a) { cleaned++; (void)a; }
static void *sleeper(void *a) {
  pthread_cleanup_push(cleanup, 0);
  for (;;) sleep(100);
  pthread_cleanup_pop(0);
  return a;
}
static void *reader(void *a) {
  char c;
  pthread_cleanup_push(cleanup, 0);
  read(*(int *)a, &c, 1);
  pthread_cleanup_pop(0);
  return 0;
}
static volatile pid_t hit;
static void on_usr1(int s) { hit = syscall(SYS_gettid); (void)s; }
static volatile pid_t spinner_id;
static volatile int stop;
static void *spinner(void *a) {
  spinner_id = syscall(SYS_gettid);
  while (!stop) {}
  return a;
}
static pthread_mutex_t robust;
static void *dies(void *a) { pthread_mutex_lock(&robust); return a; }
static void *forker(void *a) {
  long good = 0;
  for (int i = 0; i < 15; i++) {
    pid_t p = fork();
    if (!p) { char *m = malloc(1000); m[0] = 1; free(m); _exit(i); }
    int s;
    if (waitpid(p, &s, 0) == p && WIFEXITED(s) && WEXITSTATUS(s) == i) good++;
  }
  return (void *)good;
}
static void *nothing(void *a) { return a; }
static void count(int s) { (void)s; }

int main(void) {
  pthread_t t[8];
  void *r;
  long sum = 0;
  for (long i = 0; i < 8; i++) pthread_create(&t[i], 0, add, (void *)i);
  for (int i = 0; i < 8; i++) { pthread_join(t[i], &r); sum += (long)r; }
  check(total == 160000 && sum == 160028, "mutex and thread-local storage");
  for (long i = 0; i < 2; i++) pthread_create(&t[i], 0, ping, (void *)i);
  for (int i = 0; i < 2; i++) pthread_join(t[i], 0);
  check(1, "condition variables");
  int ok = 1;
  for (int i = 0; i < 2000; i++) {
    ok = ok && !pthread_create(&t[0], 0, nothing, (void *)(long)i) && !pthread_join(t[0], &r) && (long)r == i;
  }
  check(ok, "two thousand threads, one after the other");
  pthread_create(&t[0], 0, sleeper, 0);
  usleep(2000);
  pthread_cancel(t[0]);
  pthread_join(t[0], &r);
  check(r == PTHREAD_CANCELED && cleaned == 1, "cancel a sleeper");
  int p[2];
  pipe(p);
  pthread_create(&t[0], 0, reader, p);
  usleep(2000);
  pthread_cancel(t[0]);
  pthread_join(t[0], &r);
  check(r == PTHREAD_CANCELED && cleaned == 2, "cancel a reader");
  signal(SIGUSR1, on_usr1);
  pthread_create(&t[0], 0, spinner, 0);
  while (!spinner_id) {}
  pthread_kill(t[0], SIGUSR1);
  for (int i = 0; i < 1000 && !hit; i++) usleep(1000);
  check(hit == spinner_id, "a signal to a computing thread");
  stop = 1;
  pthread_join(t[0], 0);
  pthread_mutexattr_t at;
  pthread_mutexattr_init(&at);
  pthread_mutexattr_setrobust(&at, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&robust, &at);
  pthread_create(&t[0], 0, dies, 0);
  pthread_join(t[0], 0);
  int e = pthread_mutex_lock(&robust);
  check(e == EOWNERDEAD, "a robust mutex tells of its owner's death");
  struct sigaction sa = {.sa_handler = count, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &sa, 0);
  struct itimerval v = {{0, 300}, {0, 300}};
  setitimer(ITIMER_REAL, &v, 0);
  total = 0;
  for (long i = 0; i < 4; i++) pthread_create(&t[i], 0, i < 2 ? forker : add, (void *)0);
  long good = 0;
  for (int i = 0; i < 4; i++) { pthread_join(t[i], &r); if (i < 2) good += (long)r; }
  v.it_value.tv_usec = v.it_interval.tv_usec = 0;
  setitimer(ITIMER_REAL, &v, 0);
  check(good == 30 && total == 40000, "forks among threads in a storm of alarms");
  fflush(stdout);
  pid_t c = fork();
  if (!c) {
    pthread_create(&t[0], 0, nothing, 0);
    pthread_detach(t[0]);
    pthread_exit(0);
  }
  int s;
  waitpid(c, &s, 0);
  check(WIFEXITED(s) && WEXITSTATUS(s) == 0, "the main thread may end first");
  return 0;
}
