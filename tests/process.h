/* Counts the file descriptors and threads of a test process, to detect leaks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The kernel may list a joined thread or a closed ring for a little longer, on a loaded machine for seconds, so checks
 * wait. The count taken before may include such a leftover, too, so checks accept fewer than before. */
#ifndef PROCESS_H
#define PROCESS_H

#include <dirent.h>
#include <pthread.h>
#include <time.h>

#include "check.h"

typedef struct {
  int fds, threads;
} process_t;

static inline int process_entries(const char *path) {
  DIR *dir = opendir(path);
  CHECK(dir);
  int count = 0;
  while (readdir(dir)) count++;
  closedir(dir);
  return count;
}

static inline process_t process_now(void) {
  return (process_t){ process_entries("/proc/self/fd"), process_entries("/proc/self/task") };
}

/* Waits until there are no more than before; what is still there after a minute is a leak. */
static inline void process_check(process_t before) {
  process_t now = process_now();
  for (int tries = 0; tries < 6000 && (now.fds > before.fds || now.threads > before.threads); tries++) {
    nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    now = process_now();
  }
  if (now.fds > before.fds) fprintf(stderr, "%d file descriptors are left, %d were open before\n", now.fds, before.fds);
  if (now.threads > before.threads)
    fprintf(stderr, "%d threads are left, %d ran before\n", now.threads, before.threads);
  CHECK(now.fds <= before.fds && now.threads <= before.threads);
}

static inline void *process_nothing(void *user) { return user; }
/* Call before the first test: a sanitizer starts a background thread together with the process's first thread. */
static inline void process_begin(void) {
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, process_nothing, NULL), 0);
  CHECK_EQ(pthread_join(thread, NULL), 0);
}

#endif
