/* What tests need of the system: directories to work in, time. SPDX-License-Identifier: Apache-2.0 */
#ifndef SYSTEM_H
#define SYSTEM_H

#include <errno.h>
#include <time.h>

#include "check.h"

/* A new directory in TMPDIR, or /tmp; TMPDIR may be on a disk, of which tests then show more. */
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
/* Not shorter, also when signals come. */
static inline void sleep_us(uint64_t us) {
  struct timespec t = { (time_t)(us / 1000000), (long)(us % 1000000) * 1000 };
  while (nanosleep(&t, &t) && errno == EINTR) continue;
}
static inline void sleep_ms(long ms) { sleep_us((uint64_t)ms * 1000); }

#endif
