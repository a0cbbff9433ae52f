/* Errors: a thread's last failure, and how functions report one.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_STATUS_H
#define GMI_STATUS_H

#include <stdbool.h>

#include "gemini.h"

/* Records status, native code and message for this thread and returns status. Internal functions call it where they
 * know most; the public function adds its name with API_RETURN. */
gemini_status_t gmi_fail(gemini_status_t status, int64_t native_code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Puts more words before the recorded message ("op h.3.fwd: "). */
void gmi_fail_prefix(const char *format, ...) __attribute__((format(printf, 1, 2)));
void gmi_fail_operation(const char *operation);
/* The recorded message, for logs and for failures that are stored to be returned later. */
const char *gmi_fail_message(void);
int64_t gmi_fail_code(void); /* its native code */

static inline bool gmi_is_oom(gemini_status_t status) { /* a tier is full */
  return status == GEMINI_ERR_OOM_DEVICE || status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_OOM_FILE;
}

#define API_RETURN(expression)                                 \
  do {                                                         \
    gemini_status_t api_status = (expression);                 \
    if (api_status != GEMINI_OK) gmi_fail_operation(__func__); \
    return api_status;                                         \
  } while (0)

/* Copies min(theirs, ours) of a caller's struct, zeroes the rest, and sets ours->struct_size to our_size; refuses sizes
 * below v1_size (GMI_V1_*) or above 4 KiB, and bytes past ours that are not zero. */
gemini_status_t gmi_struct_in(void *ours, size_t our_size, const void *theirs, size_t v1_size, const char *name);
/* Copies min(theirs, ours) out; theirs->struct_size receives the bytes filled. */
gemini_status_t gmi_struct_out(void *theirs, void *ours, size_t our_size, size_t v1_size, const char *name);

#endif
