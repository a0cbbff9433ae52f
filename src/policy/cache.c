/* The policies of the cache. SPDX-License-Identifier: Apache-2.0 */
#include "policy/cache.h"

/* The count of a chunk that is not used falls by half in so many passes. */
enum { HALF_LIFE = 16, ONE_PASS = 65536 };

/* Halves value once for each HALF_LIFE passes; in between it falls in a straight line. */
static uint32_t aged(uint32_t value, uint64_t passes) {
  if (passes >= UINT64_C(32) * HALF_LIFE) return 0;
  value >>= passes / HALF_LIFE;
  return value - (uint32_t)((uint64_t)value * (passes % HALF_LIFE) / (2 * HALF_LIFE));
}

void gmi_cache_use(gmi_cache_note_t *note, const gmi_cache_now_t *now) {
  /* Several uses within a pass count once: neighbours in a chunk, or several texts, say nothing of the next pass. */
  if (note->pass != now->pass) note->frequency = aged(note->frequency, now->pass - note->pass) + ONE_PASS;
  note->pass = now->pass;
  note->position = now->position;
  note->hinted = 0;
}

/* Least stale (after D. Hoang et al., "SpecMD", 2026, arXiv:2602.03921): layers come in the same order, so a
 * chunk behind the present position is not used again before the next pass, and one ahead may be in this one. Those
 * behind leave first, before them such as this pass did not use; of each class, those furthest from their next turn. */
static uint64_t least_stale(const gmi_cache_note_t *note, const gmi_cache_now_t *now) {
  enum { AHEAD, BEHIND, STALE, NEVER_USED };
  const uint64_t class = !note->pass                       ? NEVER_USED
                         : note->position >= now->position ? AHEAD
                         : note->pass == now->pass         ? BEHIND
                                                           : STALE;
  return class << 32 | note->position;
}

/* By the policy alone; less than 2^35. */
static uint64_t rank_by_policy(const gmi_cache_note_t *note, const gmi_cache_now_t *now) {
  switch (now->policy) {
  case GEMINI_CACHE_FREQUENT: /* the smallest count first */
    return UINT32_MAX - (note->pass ? aged(note->frequency, now->pass - note->pass) : 0);
  case GEMINI_CACHE_LEAST_STALE: return least_stale(note, now);
  default: return 0; /* the order of last uses decides */
  }
}

uint64_t gmi_cache_rank(const gmi_cache_note_t *note, const gmi_cache_now_t *now) {
  if (note->hinted && note->hinted == now->pass) return 0;
  return 1 + ((uint64_t)(GMI_CACHE_PRIORITY_MOST - note->priority) << 40) + rank_by_policy(note, now);
}
