/* Accesses as callers hand them over: of this version's size, or of another's. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_ACCESSES_H
#define GMI_ACCESSES_H

#include "core/manager.h"

enum { GMI_BATCH_LIMIT = 1 << 20 /* accesses in one call */, GMI_SMALL_BATCH = 16 };

/* Accesses of this version's size: the caller's own, or copies of them. */
typedef struct gmi_accesses {
  const gemini_access_t *list;
  gemini_access_t *copies; /* where list is; NULL: list is the caller's own */
  gemini_access_t small[GMI_SMALL_BATCH];
} gmi_accesses_t;

/* Copies one access, whatever version it is of; name: what messages call it. */
gemini_status_t gmi_access_in(gemini_access_t *ours, const gemini_access_t *theirs, const char *name);

/* Are all of them of this version's size, so that they can be used where they are? The hot path of acquire asks. */
static inline bool gmi_accesses_are_ours(const gemini_access_t *accesses, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) /* the first of another size ends it: behind that, the stride is another */
    if ((accesses[i].struct_size ^ sizeof(gemini_access_t)) | accesses[i].reserved) return false;
  return true;
}

/* Checks a batch, whose stride is the first one's struct_size, and copies it where that is not ours. On success it is
 * ended by gmi_accesses_free(). */
gemini_status_t gmi_accesses_in(gmi_accesses_t *batch, const gemini_access_t *accesses, uint64_t count);
/* Tells the caller where the ranges are. */
void gmi_accesses_out(const gmi_accesses_t *batch, gemini_access_t *accesses, uint64_t count);
void gmi_accesses_free(gmi_accesses_t *batch);

#endif
