/* SPDX-License-Identifier: Apache-2.0 */
#include "tracer/history.h"

#include <string.h>

#include "base/check.h"
#include "core/manager.h"

void gmi_history_add(gmi_history_t *h, uint32_t kind) {
  GMI_ASSERT(kind < GMI_HISTORY_KINDS);
  if (h->count == GMI_HISTORY) memmove(h->past, h->past + 1, --h->count);
  h->past[h->count++] = (uint8_t)kind;
}

void gmi_history_forget(gmi_history_t *h, uint32_t kind) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < h->count; i++)
    if (h->past[i] != kind) h->past[kept++] = h->past[i];
  h->count = kept;
}

uint32_t gmi_history_next(const uint8_t *past, uint32_t count) {
  uint32_t alike[GMI_HISTORY], longest = 0;
  for (uint32_t p = 1; p < count; p++) { /* alike[p]: how many of the newest iterations equal those before p */
    for (alike[p] = 0; alike[p] < p && past[p - 1 - alike[p]] == past[count - 1 - alike[p]]; alike[p]++) {
    }
    if (alike[p] > longest) longest = alike[p];
  }
  for (; longest > 0; longest--) {
    uint32_t counts[GMI_HISTORY_KINDS] = { 0 }, best = GMI_NONE;
    for (uint32_t p = 1; p < count; p++)
      if (alike[p] >= longest) counts[past[p]]++;
    for (uint32_t i = 0; i < GMI_HISTORY_KINDS; i++)
      if (counts[i] > 1 && (best == GMI_NONE || counts[i] > counts[best])) best = i;
    if (best != GMI_NONE) return best;
  }
  return GMI_NONE;
}
