/* Writing beside a limit on the size of files (RLIMIT_FSIZE). SPDX-License-Identifier: Apache-2.0
 *
 * A write or reservation past the limit fails with EFBIG, and sends SIGXFSZ to the thread, which ends the process
 * unless the program expects it. Between the two calls the thread does not get it. */
#ifndef GMI_FILE_LIMIT_H
#define GMI_FILE_LIMIT_H

#include <signal.h>
#include <stdbool.h>

#include "gemini.h"

typedef struct gmi_file_limit {
  sigset_t mask;    /* of the thread before */
  bool was_pending; /* SIGXFSZ, before: then it is the program's, and stays */
} gmi_file_limit_t;

gmi_file_limit_t gmi_file_limit_begin(void);
void gmi_file_limit_end(const gmi_file_limit_t *limit); /* errno stays as it is */
/* The status of a system call on a file that failed with this errno: OOM_FILE where the disk is full, or a quota or the
 * limit is reached; else IO. */
gemini_status_t gmi_file_status(int error);

#endif
