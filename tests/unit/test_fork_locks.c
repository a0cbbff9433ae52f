/* Locks of static storage, at a fork while another thread holds them. SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <time.h>

#include "../fork.h"
#include "base/fork.h"
#include "device/cuda_driver.h"
#include "io/blockfile.h"
#include "update/update.h"

/* A thread that looks a symbol up holds the lock. A fork waits for that; one that does not, is over while the thread is
 * still here: it stays for a second, and then as long as a child could be that inherited the lock. */
static atomic_bool looking_up, forked, ended;
static void *no_symbol(const char *name) {
  (void)name;
  if (atomic_exchange(&looking_up, true)) return NULL;
  for (int i = 0; i < 100 && !atomic_load(&forked); i++) nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
  while (atomic_load(&forked) && !atomic_load(&ended)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  return NULL;
}
/* Runs behind the library's handlers, as it was registered before them. */
static void fork_goes_on(void) { atomic_store(&forked, true); }

static void *load_driver(void *user) {
  CHECK(!gmi_cuda_driver()); /* symbols are missing */
  return user;
}
static void *load_update_driver(void *user) {
  gemini_sgd_t sgd = GEMINI_SGD_INIT;
  sgd.lr = 1;
  float x = 0;
  CHECK_EQ(gemini_sgd_cuda(&sgd, 0, &x, &x, &x, NULL, NULL, NULL), GEMINI_ERR_UNSUPPORTED);
  return user;
}

static void fork_while(void *(*load)(void *)) {
  pthread_t thread;
  atomic_store(&looking_up, false);
  atomic_store(&forked, false);
  atomic_store(&ended, false);
  CHECK_EQ(pthread_create(&thread, NULL, load, NULL), 0);
  while (!atomic_load(&looking_up)) sched_yield();
  pid_t child = fork_child();
  if (!child) {
    alarm(300);
    load(NULL);
    _exit(0);
  }
  int end;
  CHECK_EQ(waitpid(child, &end, 0), child);
  atomic_store(&ended, true);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK_EQ(end, 0); /* not of the alarm */
}

static void test_a_child_can_look_for_the_driver(void) {
  gmi_cuda_driver_replace(no_symbol);
  fork_while(load_driver);
  gmi_cuda_driver_replace(NULL);
}
static void test_a_child_can_look_for_the_updates_driver(void) {
  gmi_update_cuda_replace(no_symbol);
  fork_while(load_update_driver);
  gmi_update_cuda_replace(NULL);
}

/* ---- descriptors: a thread forks while another one is between a system call and the note of what it did */
typedef struct {
  pthread_t thread;
  int fd;
  bool started, found; /* found: by the child: the descriptor is open */
  atomic_bool over;
} forker_t;
static void *fork_and_look(void *user) {
  forker_t *f = user;
  pid_t child = fork_child();
  if (!child) _exit(fcntl(f->fd, F_GETFD) >= 0);
  int end;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK(WIFEXITED(end));
  f->found = WEXITSTATUS(end);
  atomic_store(&f->over, true);
  return NULL;
}
static void no_more(void) {}
static const gmi_fork_ops_t nothing = { no_more, no_more, no_more };
static forker_t at_open, at_close;
static void start_forker(forker_t *f, int fd) { /* it has a second, which a fork that does not wait needs not */
  if (f->started) return;
  f->started = true;
  f->fd = fd;
  CHECK_EQ(pthread_create(&f->thread, NULL, fork_and_look, f), 0);
  for (int i = 0; i < 100 && !atomic_load(&f->over); i++) nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
}
static int slow_open(const char *path, int flags, mode_t mode) {
  int fd = gmi_sys_real.open(path, flags, mode);
  if (fd >= 0) start_forker(&at_open, fd);
  return fd;
}
static int slow_close(int fd) {
  start_forker(&at_close, fd);
  return gmi_sys_real.close(fd);
}
static void test_a_child_never_has_a_file_of_chunks(void) {
  gmi_sys_t sys = gmi_sys_real;
  gmi_blockfile_t file;
  gmi_note_t note = { "" };
  gmi_fork_watch(&nothing);
  sys.open = slow_open;
  CHECK_EQ(gmi_blockfile_open(&file, &sys, "/tmp", 4, NULL, 0, 65536, &note), GEMINI_OK);
  if (at_open.started) CHECK_EQ(pthread_join(at_open.thread, NULL), 0); /* else the file was made by mkostemp() */
  CHECK(!at_open.found);
  sys.close = slow_close;
  gmi_blockfile_close(&file);
  CHECK(at_close.started);
  CHECK_EQ(pthread_join(at_close.thread, NULL), 0);
  CHECK(!at_close.found);
}

/* ---- watchers */
static int late_prepared, late_parent, late_child;
static void late_prepare(void) { late_prepared++; }
static void late_in_parent(void) { late_parent++; }
static void late_in_child(void) { late_child++; }
static const gmi_fork_ops_t late = { late_prepare, late_in_parent, late_in_child };
static void register_late(void) { gmi_fork_watch(&late); }
static const gmi_fork_ops_t early = { register_late, no_more, no_more };

static void test_a_watcher_registered_during_a_fork_is_prepared(void) {
  gmi_fork_watch(&early);
  pid_t child = fork_child();
  if (!child) _exit(late_prepared == 1 && late_child == 1 && !late_parent ? 0 : 1);
  CHECK(late_prepared == 1 && late_parent == 1 && !late_child);
  fork_expect_end(child);
}

#ifdef GEMINI_CHECK
/* In a process of its own, whose message goes nowhere. */
static void test_a_watcher_too_many_is_refused(void) {
  pid_t child = fork_child();
  if (!child) {
    static const gmi_fork_ops_t more[8] = { { no_more, no_more, no_more }, { no_more, no_more, no_more },
                                            { no_more, no_more, no_more }, { no_more, no_more, no_more },
                                            { no_more, no_more, no_more }, { no_more, no_more, no_more },
                                            { no_more, no_more, no_more }, { no_more, no_more, no_more } };
    setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
    signal(SIGABRT, SIG_DFL);
    (void)!freopen("/dev/null", "w", stderr);
    for (int i = 0; i < 8; i++) gmi_fork_watch(&more[i]);
    _exit(0);
  }
  int end;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK(WIFSIGNALED(end) && WTERMSIG(end) == SIGABRT);
}
#endif

int main(void) {
  pthread_atfork(fork_goes_on, NULL, NULL);
  RUN(test_a_child_can_look_for_the_driver);
  RUN(test_a_child_can_look_for_the_updates_driver);
  RUN(test_a_child_never_has_a_file_of_chunks);
  RUN(test_a_watcher_registered_during_a_fork_is_prepared);
#ifdef GEMINI_CHECK
  RUN(test_a_watcher_too_many_is_refused);
#endif
  return check_done();
}
