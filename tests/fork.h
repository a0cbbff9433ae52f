/* Forking child processes in tests. SPDX-License-Identifier: Apache-2.0 */
#ifndef FORK_H
#define FORK_H

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* Options for the thread sanitizer. A fork takes more locks at once (all of jemalloc's) than its deadlock detector can
 * hold, and in a child it reports the parent's other threads as leaked. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "detect_deadlocks=0:report_thread_leaks=0"; }

/* fork(): returns 0 in the child, which is killed after ten minutes if it hangs. */
static inline pid_t fork_child(void) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) alarm(600);
  return child;
}
/* Waits for the child and checks that it exits with status 0. */
static inline void fork_expect_end(pid_t child) {
  int end = 0;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK_EQ(end, 0);
}

#endif
