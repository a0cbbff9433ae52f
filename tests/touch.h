/* Tests whether an address can be read or written, by trying it in this process. SPDX-License-Identifier: Apache-2.0
 *
 * One thread at a time may do this. No other thread may use the memory it touches. */
#ifndef TOUCH_H
#define TOUCH_H

#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>

#include "check.h"

static sigjmp_buf touch_back;
static inline void touch_signal(int number) { siglongjmp(touch_back, number); }

/* Not instrumented by the thread sanitizer: the test reads memory after its end of life on purpose, which no
 * synchronization orders after earlier users. */
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread"), noinline))
#endif
static int
touch_byte(volatile unsigned char *at, bool writes) {
  unsigned char byte = *at;
  if (writes) *at = byte;
  return byte;
}

/* The signal that reading the byte raises, or with writes, reading it and writing it back; 0: none. */
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
