/* Whether an address can be read, or written, found by trying in this process. SPDX-License-Identifier: Apache-2.0
 *
 * For one thread at a time. What it touches must be memory of nobody's but the test's. */
#ifndef TOUCH_H
#define TOUCH_H

#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>

#include "check.h"

static sigjmp_buf touch_back;
static inline void touch_signal(int number) { siglongjmp(touch_back, number); }

/* Without the thread sanitizer's look: a byte that must not be there any more has had other users, whom nothing orders
 * before a read that is an error. */
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread"), noinline))
#endif
static int
touch_byte(volatile unsigned char *at, bool writes) {
  unsigned char byte = *at;
  if (writes) *at = byte;
  return byte;
}

/* The signal that reading the byte, or adding 0 to it, raises; 0: none. */
static inline int touch(volatile unsigned char *at, bool writes) {
  struct sigaction action = { .sa_handler = touch_signal }, segv, bus;
  sigemptyset(&action.sa_mask);
  CHECK(!sigaction(SIGSEGV, &action, &segv) && !sigaction(SIGBUS, &action, &bus));
  int number = sigsetjmp(touch_back, 1);
  if (!number) touch_byte(at, writes);
  CHECK(!sigaction(SIGSEGV, &segv, NULL) && !sigaction(SIGBUS, &bus, NULL));
  return number;
}
static inline bool touch_reads(const void *at) { return !touch((unsigned char *)at, false); }
static inline bool touch_faults(const void *at) { return touch((unsigned char *)at, false) == SIGSEGV; }

#endif
