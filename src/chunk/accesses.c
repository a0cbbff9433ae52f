/* Batches of accesses from callers of any version. SPDX-License-Identifier: Apache-2.0
 *
 * A caller's gemini_access_t may be shorter or longer than this version's: struct_size says which, and is the stride of
 * the caller's array. Accesses of this version's size are used in place; others are copied, and the one output field,
 * ptr, is copied back. Runs on the caller's thread without locks. */
#include "chunk/accesses.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"

gemini_status_t gmi_access_in(gemini_access_t *ours, const gemini_access_t *theirs, const char *name) {
  gemini_status_t status = gmi_struct_in(ours, sizeof *ours, theirs, GMI_V1_ACCESS, name);
  if (!status && ours->reserved)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "%s: reserved is %u, must be 0", name, ours->reserved);
  return status;
}

static gemini_status_t access_at_in(gemini_access_t *ours, const gemini_access_t *theirs, uint64_t index,
                                    uint32_t stride) {
  char name[40];
  uint32_t size; /* copied: with another stride the struct may be misaligned */
  memcpy(&size, theirs, sizeof size);
  snprintf(name, sizeof name, "accesses[%llu]", (unsigned long long)index);
  if (index && size != stride)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s: struct_size is %u, that of accesses[0] is %u: all must be the same",
                    name, size, stride);
  return gmi_access_in(ours, theirs, name);
}

gemini_status_t gmi_accesses_in(gmi_accesses_t *batch, const gemini_access_t *accesses, uint64_t count) {
  batch->list = accesses;
  batch->copies = NULL;
  if (!accesses && count)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "accesses is NULL but count is %llu", (unsigned long long)count);
  if (count > GMI_BATCH_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "count is %llu, must be at most %d", (unsigned long long)count,
                    GMI_BATCH_LIMIT);
  if (gmi_accesses_are_ours(accesses, count)) return GEMINI_OK;
  gemini_access_t *copies = count > GMI_SMALL_BATCH ? malloc(count * sizeof *copies) : batch->small;
  if (!copies)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a batch of %llu accesses", (unsigned long long)count);
  uint32_t stride = accesses->struct_size;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = 0; !status && i < count; i++)
    status = access_at_in(&copies[i], (const void *)((const char *)accesses + i * stride), i, stride);
  batch->list = batch->copies = copies;
  if (status) gmi_accesses_free(batch);
  return status;
}

void gmi_accesses_out(const gemini_access_t *list, gemini_access_t *accesses, uint64_t count) {
  uint32_t stride = count ? accesses->struct_size : 0;
  for (uint64_t i = 0; i < count; i++)
    memcpy((char *)accesses + i * stride + offsetof(gemini_access_t, ptr), &list[i].ptr, sizeof(void *));
}

void gmi_accesses_free(gmi_accesses_t *batch) {
  if (batch->copies != batch->small) free(batch->copies);
}
