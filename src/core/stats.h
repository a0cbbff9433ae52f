/* Statistics: figures that any thread may read at any time. SPDX-License-Identifier: Apache-2.0
 *
 * Each figure is an atomic word, written under the manager's lock and read without it. Each value is correct by itself;
 * while a call runs, several values may belong to different moments. */
#ifndef GMI_STATS_H
#define GMI_STATS_H

#include <stdatomic.h>
#include <stdint.h>

#include "gemini.h"

/* The fields mean the same as those of gemini_stats_t and gemini_tier_stats_t. Other figures of these structs are kept
 * where they change: in frames, host slots, files, and links (gmi_link_t). */
typedef struct gmi_stats {
  _Atomic uint64_t budget_bytes[GEMINI_TIER_COUNT], peak_bytes[GEMINI_TIER_COUNT];
  _Atomic uint64_t model_bytes, nonmodel_bytes, host_alloc_bytes;
  _Atomic uint64_t
      hits_before; /* hits until the last reset: the counters are their threads', which do not wait for it */
  _Atomic uint64_t acquire_misses, stall_ns, op_peak_error_bytes;
  _Atomic uint64_t iterations, planned_iterations, departures, plans;
  _Atomic uint64_t speculated_elements, committed_elements, dropped_elements;
  _Atomic uint64_t predicted_step_ns, measured_step_ns, planned_fetch_bytes, planned_evict_bytes;
} gmi_stats_t;

/* Sets a figure. Only the lock's holder writes it, so a relaxed store is enough; an assignment would be seq_cst, a full
 * fence. */
static inline void gmi_stat_set(_Atomic uint64_t *figure, uint64_t value) {
  atomic_store_explicit(figure, value, memory_order_relaxed);
}

/* Of a move, GEMINI_REASON_*. */
static inline const char *gmi_reason_name(uint32_t reason) {
  static const char *const names[GEMINI_REASON_COUNT] = { "demand", "plan", "pressure", "caller", "update" };
  return names[reason];
}

struct gmi_manager;
/* Any thread, with or without the lock. They never block on the manager's lock. */
void gmi_stats_read(struct gmi_manager *m, gemini_stats_t *stats_out);
void gmi_tier_stats_read(struct gmi_manager *m, uint32_t tier, gemini_tier_stats_t *stats_out);

#endif
