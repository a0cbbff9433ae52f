/* Batches of accesses, in this version's size or in that of another version. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_ACCESSES_H
#define GMI_ACCESSES_H

#include "core/manager.h"

enum { GMI_BATCH_LIMIT = 1 << 20 /* accesses in one call */, GMI_SMALL_BATCH = 16 };

/* A batch in this version's size: the caller's own array, or copies of it. Not movable: copies may point to small. */
typedef struct gmi_accesses {
  const gemini_access_t *list;
  gemini_access_t *copies; /* the same array as list; NULL: list is the caller's own */
  gemini_access_t small[GMI_SMALL_BATCH];
} gmi_accesses_t;

/* Checks and copies one access of any version. name: its name in messages. */
gemini_status_t gmi_access_in(gemini_access_t *ours, const gemini_access_t *theirs, const char *name);

/* Do all accesses have this version's size, so that they can be used in place? Inline: on the hot path of acquire. */
static inline bool gmi_accesses_are_ours(const gemini_access_t *accesses, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) /* stops at the first other size, behind which the stride is unknown */
    if ((accesses[i].struct_size ^ sizeof(gemini_access_t)) | accesses[i].reserved) return false;
  return true;
}

/* Checks a batch, whose stride is struct_size of the first access, and copies it if that is not this version's size. On
 * success the caller ends it with gmi_accesses_free(). */
gemini_status_t gmi_accesses_in(gmi_accesses_t *batch, const gemini_access_t *accesses, uint64_t count);
/* Copies the resulting pointers of a list in this version's size to the caller's array. */
void gmi_accesses_out(const gemini_access_t *list, gemini_access_t *accesses, uint64_t count);
void gmi_accesses_free(gmi_accesses_t *batch);

#endif
