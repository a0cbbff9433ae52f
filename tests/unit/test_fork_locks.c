/* Locks of static storage, at a fork while another thread holds them. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "../fork.h"
#include "device/cuda_driver.h"
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
    alarm(10);
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

int main(void) {
  pthread_atfork(fork_goes_on, NULL, NULL);
  RUN(test_a_child_can_look_for_the_driver);
  RUN(test_a_child_can_look_for_the_updates_driver);
  return check_done();
}
