/* Blocks SIGXFSZ around writes of files, and discards one that the writes raised. SPDX-License-Identifier: Apache-2.0
 *
 * Works on the calling thread's signal mask only, so it needs no lock and does not affect the program's handlers. */
#include "base/file_limit.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

gemini_status_t gmi_file_status(int error) {
  return error == ENOSPC || error == EDQUOT || error == EFBIG ? GEMINI_ERR_OOM_FILE : GEMINI_ERR_IO;
}

static bool is_pending(void) {
  sigset_t pending;
  return !sigpending(&pending) && sigismember(&pending, SIGXFSZ) == 1;
}

gmi_file_limit_t gmi_file_limit_begin(void) {
  gmi_file_limit_t limit = { .was_pending = is_pending() };
  sigset_t own;
  sigemptyset(&own);
  sigaddset(&own, SIGXFSZ);
  pthread_sigmask(SIG_BLOCK, &own, &limit.mask);
  return limit;
}

void gmi_file_limit_end(const gmi_file_limit_t *limit) {
  int error = errno;
  if (!limit->was_pending && is_pending()) {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, SIGXFSZ);
    /* Removes the pending signal without delivering it, and without waiting. */
    while (sigtimedwait(&own, NULL, &(struct timespec){ 0, 0 }) < 0 && errno == EINTR) continue;
  }
  pthread_sigmask(SIG_SETMASK, &limit->mask, NULL);
  errno = error;
}
