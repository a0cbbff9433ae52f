/* The first failure of a communicator, which every later call returns. SPDX-License-Identifier: Apache-2.0
 * Threads: any, except gmi_first_failure_open() and _close(). */
#ifndef GMI_COMM_FAILURE_H
#define GMI_COMM_FAILURE_H

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/status.h"
#include "comm/comm.h"

typedef struct gmi_first_failure {
  uint32_t rank, ranks;
  gmi_comm_listener_t listener;
  pthread_mutex_t lock;
  _Atomic bool failed; /* Atomic: stored (release) behind why and code; loaded (acquire) before they are read */
  char why[400];
  int64_t code; /* NCCL's, the driver's or the caller's; 0: none */
} gmi_first_failure_t;

static inline void gmi_first_failure_open(gmi_first_failure_t *f, uint32_t rank, uint32_t ranks,
                                          gmi_comm_listener_t listener) {
  f->rank = rank;
  f->ranks = ranks;
  f->listener = listener;
  pthread_mutex_init(&f->lock, NULL);
}
static inline void gmi_first_failure_close(gmi_first_failure_t *f) { pthread_mutex_destroy(&f->lock); }

static inline bool gmi_has_failed(gmi_first_failure_t *f) {
  return atomic_load_explicit(&f->failed, memory_order_acquire);
}
/* The failure, recorded for this thread. */
static inline gemini_status_t gmi_first_failure(gmi_first_failure_t *f) {
  return gmi_has_failed(f) ? gmi_fail(GEMINI_ERR_PEER, f->code, "%s", f->why) : GEMINI_OK;
}

/* Keeps "rank 1 of 4: " and the text, and tells the listener; false: the communicator has failed before. */
static inline bool gmi_first_failure_set(gmi_first_failure_t *f, int64_t code, const char *format, va_list args) {
  pthread_mutex_lock(&f->lock);
  const bool first = !atomic_load_explicit(&f->failed, memory_order_relaxed);
  if (first) {
    int length = snprintf(f->why, sizeof f->why, "rank %u of %u: ", f->rank, f->ranks);
    vsnprintf(f->why + length, sizeof f->why - (size_t)length, format, args);
    f->code = code;
    atomic_store_explicit(&f->failed, true, memory_order_release);
    if (f->listener.failed) f->listener.failed(f->listener.user);
  }
  pthread_mutex_unlock(&f->lock);
  return first;
}

#endif
