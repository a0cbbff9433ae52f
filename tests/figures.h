/* All statistics of a manager in one record, by tier, link and reason. SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTS_FIGURES_H
#define TESTS_FIGURES_H

#include "gemini.h"

enum { LINK_H2D, LINK_D2H, LINK_H2F, LINK_F2H, LINKS };

/* The fields of gemini_stats_t. */
#define FIGURES(X)       \
  X(model_bytes)         \
  X(nonmodel_bytes)      \
  X(nonmodel_peak_bytes) \
  X(chunk_bytes)         \
  X(acquire_hits)        \
  X(acquire_misses)      \
  X(stall_ns)            \
  X(iterations)          \
  X(planned_iterations)  \
  X(departures)          \
  X(plans)               \
  X(predicted_step_ns)   \
  X(measured_step_ns)    \
  X(planned_fetch_bytes) \
  X(planned_evict_bytes) \
  X(op_peak_error_bytes) \
  X(pending_updates)     \
  X(host_alloc_bytes)    \
  X(speculated_elements) \
  X(committed_elements)  \
  X(dropped_elements)    \
  X(file_engine)

typedef struct figures {
  uint64_t budget_bytes[GEMINI_TIER_COUNT], used_bytes[GEMINI_TIER_COUNT], peak_bytes[GEMINI_TIER_COUNT];
  uint64_t moved_bytes[LINKS][GEMINI_REASON_COUNT], moved_chunks[LINKS][GEMINI_REASON_COUNT];
#define FIELD(name) uint64_t name;
  FIGURES(FIELD)
#undef FIELD
} figures_t;

static inline gemini_status_t figures_of_link(gemini_manager_t mgr, uint32_t index, figures_t *f) {
  gemini_link_stats_t s = GEMINI_LINK_STATS_INIT;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t reason = 0; !status && reason < GEMINI_REASON_COUNT; reason++) {
    status = gemini_link_stats(mgr, index, reason, &s);
    const int link = s.to_tier == GEMINI_TIER_DEVICE     ? LINK_H2D
                     : s.from_tier == GEMINI_TIER_DEVICE ? LINK_D2H
                     : s.to_tier == GEMINI_TIER_FILE     ? LINK_H2F
                                                         : LINK_F2H;
    f->moved_bytes[link][reason] += s.moved_bytes;
    f->moved_chunks[link][reason] += s.moved_chunks;
  }
  return status;
}

static inline gemini_status_t figures_read(gemini_manager_t mgr, figures_t *figures_out) {
  gemini_stats_t s = GEMINI_STATS_INIT;
  figures_t f = { { 0 }, { 0 }, { 0 }, { { 0 } }, { { 0 } }, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                  0,     0,     0,     0,         0,         0, 0, 0, 0, 0, 0, 0, 0 };
  uint32_t links = 0;
  gemini_status_t status = gemini_stats(mgr, &s);
#define COPY(name) f.name = s.name;
  FIGURES(COPY)
#undef COPY
  for (uint32_t tier = 0; !status && tier < GEMINI_TIER_COUNT; tier++) {
    gemini_tier_stats_t t = GEMINI_TIER_STATS_INIT;
    status = gemini_tier_stats(mgr, tier, &t);
    f.budget_bytes[tier] = t.budget_bytes;
    f.used_bytes[tier] = t.used_bytes;
    f.peak_bytes[tier] = t.peak_bytes;
  }
  if (!status) status = gemini_link_count(mgr, &links);
  for (uint32_t i = 0; !status && i < links; i++) status = figures_of_link(mgr, i, &f);
  if (!status) *figures_out = f;
  return status;
}

#endif
