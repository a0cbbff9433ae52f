/* Forking child processes in tests. SPDX-License-Identifier: Apache-2.0 */
#ifndef FORK_H
#define FORK_H

#include <dirent.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

/* Options for the thread sanitizer. A fork takes more locks at once (all of jemalloc's) than its deadlock detector can
 * hold, and in a child it reports the parent's other threads as leaked. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "detect_deadlocks=0:report_thread_leaks=0"; }

/* Whether a thread of this process other than the calling one runs, or is about to. */
static inline bool fork_others_run(void) {
  DIR *tasks = opendir("/proc/self/task");
  CHECK(tasks);
  int running = 0;
  for (struct dirent *entry; (entry = readdir(tasks));) {
    char path[300], state = 0;
    snprintf(path, sizeof path, "/proc/self/task/%s/stat", entry->d_name);
    FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "r");
    if (!file) continue; /* or it has ended */
    if (fscanf(file, "%*d (%*[^)]) %c", &state) == 1) running += state == 'R';
    fclose(file);
  }
  closedir(tasks);
  return running > 1;
}

/* fork(): returns 0 in the child, which is killed after ten minutes if it hangs. */
static inline pid_t fork_child(void) {
  fflush(NULL);
#ifdef __SANITIZE_ADDRESS__
  /* The sanitizer's own allocator knows no fork(): what another thread has locked in it, such as one that has just begun,
   * stays locked in the child. So all others are to sleep. Those that run on purpose are waited for 100 ms at most. */
  for (int ms = 0; ms < 100 && fork_others_run(); ms++) usleep(1000);
#endif
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
