/* Writing files under a limit on their size (RLIMIT_FSIZE). SPDX-License-Identifier: Apache-2.0
 *
 * A write or reservation beyond the limit fails with EFBIG, and also sends SIGXFSZ to the calling thread, which ends
 * the process unless the program handles it. Between gmi_file_limit_begin() and gmi_file_limit_end(), on one thread,
 * the signal is blocked, and one that was raised is discarded: the library reports the error instead. */
#ifndef GMI_FILE_LIMIT_H
#define GMI_FILE_LIMIT_H

#include <signal.h>
#include <stdbool.h>

#include "gemini.h"

typedef struct gmi_file_limit {
  sigset_t mask;    /* the thread's signal mask before */
  bool was_pending; /* a SIGXFSZ was pending before: it is the program's and stays pending */
} gmi_file_limit_t;

gmi_file_limit_t gmi_file_limit_begin(void);
void gmi_file_limit_end(const gmi_file_limit_t *limit); /* preserves errno */
/* The status for a failed system call on a file: OOM_FILE when the disk is full or a quota or the size limit is
 * reached, else IO. */
gemini_status_t gmi_file_status(int error);

#endif
