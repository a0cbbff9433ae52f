/* Temporary directories, time and sleeping for tests. SPDX-License-Identifier: Apache-2.0 */
#ifndef SYSTEM_H
#define SYSTEM_H

#include <errno.h>
#include <time.h>

#include "check.h"

/* Makes a directory in TMPDIR, or in /tmp. Set TMPDIR to a directory on a disk to test with real file I/O. */
static inline void dir_make(char dir[64]) {
  const char *tmp = getenv("TMPDIR");
  CHECK(snprintf(dir, 64, "%s/gemini.XXXXXX", tmp && *tmp ? tmp : "/tmp") < 64);
  CHECK(mkdtemp(dir));
}

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
/* Sleeps for at least us microseconds, even if signals interrupt it. */
static inline void sleep_us(uint64_t us) {
  struct timespec t = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };
  while (nanosleep(&t, &t) && errno == EINTR) continue;
}
static inline void sleep_ms(long ms) { sleep_us((uint64_t)ms * 1000); }

#endif
