/* Children of a test. SPDX-License-Identifier: Apache-2.0 */
#ifndef FORK_H
#define FORK_H

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* To the thread sanitizer: a fork takes more locks at once (all of jemalloc's) than the search for deadlocks has room for, and
 * in a child the parent's other threads look like threads that nobody has joined. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "detect_deadlocks=0:report_thread_leaks=0"; }

/* In the child, 0; one that hangs dies. */
static inline pid_t fork_child(void) {
  fflush(NULL);
  pid_t child = fork();
  CHECK(child >= 0);
  if (!child) alarm(120);
  return child;
}
/* That the child ends, with status 0. */
static inline void fork_expect_end(pid_t child) {
  int end = 0;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK_EQ(end, 0);
}

#endif
