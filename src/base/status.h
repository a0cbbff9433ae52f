/* Errors: the record of a thread's last failure, and checks of callers' structs.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_STATUS_H
#define GMI_STATUS_H

#include <stdbool.h>

#include "gemini.h"

/* Records status, native code and message for this thread and returns status. The internal function that detects a
 * failure calls gmi_fail(), as it knows the details; the public function adds its own name with API_RETURN. */
gemini_status_t gmi_fail(gemini_status_t status, int64_t native_code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* As gmi_fail(), for a device operation that returned status. Of GEMINI_ERR_DEVICE, GEMINI_ERR_STATE and
 * GEMINI_ERR_OOM_SYSTEM, the device has recorded the cause: its message follows the formatted one, and its native code
 * is kept. */
gemini_status_t gmi_fail_device(gemini_status_t status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prefixes the recorded message with context ("op h.3.fwd: "). */
void gmi_fail_prefix(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Sets the recorded name of the public function. */
void gmi_fail_operation(const char *operation);
/* The recorded message and native code, for logs and for failures that are stored to be returned later. The message is
 * valid until this thread's next failure. */
const char *gmi_fail_message(void);
int64_t gmi_fail_code(void);
/* The recorded status, and how many failures this thread has recorded. */
gemini_status_t gmi_fail_status(void);
uint64_t gmi_fail_count(void);

/* A failure that was recorded, kept for a caller that cleans up first: what it calls meanwhile may record others. */
typedef struct gmi_failure {
  gemini_status_t status;
  int64_t native_code;
  char message[440];
} gmi_failure_t;
void gmi_fail_keep(gemini_status_t status, gmi_failure_t *failure_out); /* GEMINI_OK: keeps none */
/* Records the failure again and returns its status; without one it does nothing and returns GEMINI_OK. */
gemini_status_t gmi_fail_again(const gmi_failure_t *failure);

static inline bool gmi_is_oom(gemini_status_t status) { /* a tier is full */
  return status == GEMINI_ERR_OOM_DEVICE || status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_OOM_FILE;
}

/* Returns a public function's status; a failure gets the function's name. */
#define API_RETURN(expression)                                 \
  do {                                                         \
    gemini_status_t api_status = (expression);                 \
    if (api_status != GEMINI_OK) gmi_fail_operation(__func__); \
    return api_status;                                         \
  } while (0)

/* Copies in the struct of a caller compiled against another version of the header: min(theirs, ours) bytes, the rest
 * zeroed. INVALID: its struct_size is below v1_size or above 4 KiB, or a byte past ours is not zero, which would be a
 * setting that this version does not know. name: for the message. */
gemini_status_t gmi_struct_in(void *ours, size_t our_size, const void *theirs, size_t v1_size, const char *name);
/* Copies a result out: min(theirs, ours) bytes; theirs->struct_size becomes the number of bytes filled. */
gemini_status_t gmi_struct_out(void *theirs, void *ours, size_t our_size, size_t v1_size, const char *name);

#endif
