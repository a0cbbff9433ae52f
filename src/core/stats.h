/* Statistics: figures that any thread may read at any time. SPDX-License-Identifier: Apache-2.0
 *
 * Each is a word that is written under the manager's lock and read without it: true, but read while a call is under
 * way, they may not all be of one moment. */
#ifndef GMI_STATS_H
#define GMI_STATS_H

#include <stdatomic.h>
#include <stdint.h>

#include "gemini.h"

/* As those of gemini_stats_t and gemini_tier_stats_t, whose other figures are kept by their modules (frames, host
 * slots, files); those of links are in their records (gmi_link_t). */
typedef struct gmi_stats {
  _Atomic uint64_t budget_bytes[GEMINI_TIER_COUNT], peak_bytes[GEMINI_TIER_COUNT];
  _Atomic uint64_t model_bytes, nonmodel_bytes, host_alloc_bytes;
  _Atomic uint64_t acquire_misses, stall_ns, op_peak_error_bytes;
  _Atomic uint64_t iterations, planned_iterations, departures, plans;
  _Atomic uint64_t predicted_step_ns, measured_step_ns, planned_fetch_bytes, planned_evict_bytes;
} gmi_stats_t;

/* Sets a figure that one thread at a time writes: cheaper than an assignment, which orders other memory. */
static inline void gmi_stat_set(_Atomic uint64_t *figure, uint64_t value) {
  atomic_store_explicit(figure, value, memory_order_relaxed);
}

struct gmi_manager;
/* Any thread, lock held or not; they never wait. */
void gmi_stats_read(struct gmi_manager *m, gemini_stats_t *stats_out);
void gmi_tier_stats_read(struct gmi_manager *m, uint32_t tier, gemini_tier_stats_t *stats_out);

#endif
