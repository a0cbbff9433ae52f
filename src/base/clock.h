/* The clock of all waits and measurements. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_CLOCK_H
#define GMI_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Nanoseconds, monotonic. Threads: any. */
static inline uint64_t gmi_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

#endif
