/* Statistics. SPDX-License-Identifier: Apache-2.0 */
#include "core/stats.h"
#include "chunk/files.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/streams.h"
#include "core/workers.h"

#include "core/manager.h"
#include "tracer/tracer.h"

static void copy_figures(const _Atomic uint64_t *figures, uint64_t *out, size_t count) {
  for (size_t i = 0; i < count; i++) out[i] = atomic_load_explicit(&figures[i], memory_order_relaxed);
}

void gmi_stats_read(gmi_manager_t *m, gemini_stats_t *stats_out) {
  const gmi_stats_t *from = &m->stats;
  gemini_stats_t s = GEMINI_STATS_INIT;
  uint64_t chunk_bytes = atomic_load(&m->cut.chunk_bytes);
  copy_figures(from->budget_bytes, s.budget_bytes, GEMINI_TIER_COUNT);
  copy_figures(from->peak_bytes, s.peak_bytes, GEMINI_TIER_COUNT);
  copy_figures(from->moved_bytes[0], s.moved_bytes[0], GEMINI_LINK_COUNT * GEMINI_REASON_COUNT);
  copy_figures(from->moved_chunks[0], s.moved_chunks[0], GEMINI_LINK_COUNT * GEMINI_REASON_COUNT);
  s.used_bytes[GEMINI_TIER_DEVICE] = atomic_load(&m->frames.used) * gmi_frame_bytes(m);
  s.used_bytes[GEMINI_TIER_HOST] = atomic_load(&m->host.used);
  s.used_bytes[GEMINI_TIER_FILE] = atomic_load(&m->file.used);
  for (int i = 0; i < GEMINI_TIER_COUNT;
       i++) /* a chunk may have come since the peak was read, or its peak not be noted */
    if (s.peak_bytes[i] < s.used_bytes[i]) s.peak_bytes[i] = s.used_bytes[i];
  s.model_bytes = atomic_load(&from->model_bytes);
  s.nonmodel_bytes = atomic_load(&from->nonmodel_bytes);
  s.nonmodel_peak_bytes = atomic_load(&m->nonmodel.peak);
  s.chunk_bytes = chunk_bytes;
  for (int i = 0; i < GMI_HIT_STRIPES; i++)
    s.acquire_hits += atomic_load_explicit(&m->stripes[i].hits, memory_order_relaxed);
  s.acquire_misses = atomic_load(&from->acquire_misses);
  s.stall_ns = atomic_load(&from->stall_ns);
  s.iterations = atomic_load(&from->iterations);
  s.planned_iterations = atomic_load(&from->planned_iterations);
  s.departures = atomic_load(&from->departures);
  s.plans = atomic_load(&from->plans);
  s.predicted_step_ns = atomic_load(&from->predicted_step_ns);
  s.measured_step_ns = atomic_load(&from->measured_step_ns);
  s.planned_fetch_bytes = atomic_load(&from->planned_fetch_bytes);
  s.planned_evict_bytes = atomic_load(&from->planned_evict_bytes);
  s.op_peak_error_bytes = atomic_load(&from->op_peak_error_bytes);
  s.pending_updates = gmi_workers_pending(m) + gmi_updates_deferred(m) + atomic_load(&m->callback.depth) +
                      !gmi_fence_reached(m, atomic_load(&m->update.end));
  s.file_engine = gmi_files_engine(m);
  s.host_alloc_bytes = atomic_load(&from->host_alloc_bytes);
  *stats_out = s;
}

static gemini_status_t stats_get(gmi_manager_t *m, gemini_stats_t *stats_out) {
  gemini_stats_t s;
  bool locked = gmi_lock_try(m);
  if (locked) { /* what has been done meanwhile is counted first */
    gmi_reap(m);
    gmi_tracer_resolve(m, false);
  }
  gmi_stats_read(m, &s);
  if (locked) gmi_unlock(m);
  return gmi_struct_out(stats_out, &s, sizeof s, sizeof s, "stats_out");
}
gemini_status_t gemini_stats(gemini_manager_t mgr, gemini_stats_t *stats_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stats_get(m, stats_out) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_stats_reset(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gmi_lock(m, __func__);
  gmi_stats_t *s = &m->stats;
  for (int link = 0; link < GEMINI_LINK_COUNT; link++)
    for (int reason = 0; reason < GEMINI_REASON_COUNT; reason++)
      s->moved_bytes[link][reason] = s->moved_chunks[link][reason] = 0;
  s->acquire_misses = s->stall_ns = s->departures = s->op_peak_error_bytes = 0;
  for (int i = 0; i < GMI_HIT_STRIPES; i++) atomic_store_explicit(&m->stripes[i].hits, 0, memory_order_relaxed);
  s->peak_bytes[GEMINI_TIER_DEVICE] = m->frames.used * gmi_frame_bytes(m);
  s->peak_bytes[GEMINI_TIER_HOST] = m->host.used;
  s->peak_bytes[GEMINI_TIER_FILE] = m->file.used;
  m->nonmodel.peak = s->nonmodel_bytes;
  gmi_unlock(m);
  return GEMINI_OK;
}
