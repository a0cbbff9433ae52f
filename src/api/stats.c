/* Reads and resets statistics: gemini_stats(), gemini_stats_reset(). Called by users and by dump.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * gmi_stats_read() takes no lock, so that statistics can be read during a hang. Each figure is one atomic word and
 * correct by itself; figures read while another call runs may belong to different moments. No figure publishes other
 * data, so relaxed order suffices; the single loads keep the default order because they are rare. */
#include "core/stats.h"

#include <inttypes.h>
#include <stdio.h>

#include "api/text.h"
#include "base/abi.h"
#include "chunk/files.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/streams.h"
#include "core/workers.h"

#include "core/manager.h"
#include "tracer/tracer.h"

void gmi_tier_stats_read(gmi_manager_t *m, uint32_t tier, gemini_tier_stats_t *stats_out) {
  gemini_tier_stats_t s = GEMINI_TIER_STATS_INIT;
  s.tier = tier;
  s.budget_bytes = atomic_load(&m->stats.budget_bytes[tier]);
  s.peak_bytes = atomic_load(&m->stats.peak_bytes[tier]);
  s.used_bytes = tier == GEMINI_TIER_DEVICE ? atomic_load(&m->frames.used) * gmi_frame_bytes(m)
                 : tier == GEMINI_TIER_HOST ? atomic_load(&m->host.used)
                                            : atomic_load(&m->file.used);
  /* A chunk may have arrived since the peak was read, or the peak may not have been raised for it yet. */
  if (s.peak_bytes < s.used_bytes) s.peak_bytes = s.used_bytes;
  *stats_out = s;
}

static uint64_t hits(gmi_manager_t *m) {
  uint64_t sum = 0;
  for (int i = 0; i < GMI_HIT_STRIPES; i++) sum += atomic_load_explicit(&m->stripes[i].hits, memory_order_relaxed);
  return sum;
}

void gmi_stats_read(gmi_manager_t *m, gemini_stats_t *stats_out) {
  const gmi_stats_t *from = &m->stats;
  gemini_stats_t s = GEMINI_STATS_INIT;
  s.model_bytes = atomic_load(&from->model_bytes);
  s.nonmodel_bytes = atomic_load(&from->nonmodel_bytes);
  s.nonmodel_peak_bytes = atomic_load(&m->nonmodel.peak);
  s.chunk_bytes = atomic_load(&m->cut.chunk_bytes);
  const uint64_t before = atomic_load(&from->hits_before); /* first, as the sum only grows */
  s.acquire_hits = hits(m) - before;
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
  s.speculated_elements = atomic_load(&from->speculated_elements);
  s.committed_elements = atomic_load(&from->committed_elements);
  s.dropped_elements = atomic_load(&from->dropped_elements);
  *stats_out = s;
}

/* Takes the lock if it is free, and counts the copies and ops that have ended since. Returns false if another call has
 * the lock: the figures then are as of the last call that counted, because statistics never wait. */
static bool begin(gmi_manager_t *m) {
  if (!gmi_lock_try(m)) return false;
  gmi_reap(m);
  gmi_tracer_resolve(m, false);
  return true;
}
static void end(gmi_manager_t *m, bool locked) {
  if (locked) gmi_unlock(m);
}

gemini_status_t gemini_stats(gemini_manager_t mgr, gemini_stats_t *stats_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gemini_stats_t s;
  bool locked = begin(m);
  gmi_stats_read(m, &s);
  end(m, locked);
  API_RETURN(gmi_struct_out(stats_out, &s, sizeof s, GMI_V1_STATS, "stats_out"));
}

static gemini_status_t tier_stats(gmi_manager_t *m, uint32_t tier, gemini_tier_stats_t *stats_out) {
  gemini_tier_stats_t s;
  if (tier >= GEMINI_TIER_COUNT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, must be 0 to %d", tier, GEMINI_TIER_COUNT - 1);
  bool locked = begin(m);
  gmi_tier_stats_read(m, tier, &s);
  end(m, locked);
  return gmi_struct_out(stats_out, &s, sizeof s, GMI_V1_TIER_STATS, "stats_out");
}
gemini_status_t gemini_tier_stats(gemini_manager_t mgr, uint32_t tier, gemini_tier_stats_t *stats_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? tier_stats(m, tier, stats_out) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_link_count(gemini_manager_t mgr, uint32_t *count_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!count_out) API_RETURN(gmi_fail(GEMINI_ERR_INVALID, 0, "count_out is NULL"));
  *count_out = GMI_LINKS;
  return GEMINI_OK;
}

static gemini_status_t link_stats(gmi_manager_t *m, uint32_t index, uint32_t reason, gemini_link_stats_t *stats_out) {
  gemini_link_stats_t s = GEMINI_LINK_STATS_INIT;
  if (index >= GMI_LINKS) return gmi_fail(GEMINI_ERR_INVALID, 0, "link is %u, there are %d", index, GMI_LINKS);
  if (reason >= GEMINI_REASON_COUNT && reason != GEMINI_REASON_ALL)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "reason is %u, must be 0 to %d", reason, GEMINI_REASON_COUNT - 1);
  bool locked = begin(m);
  const gmi_link_t *link = &m->links[index];
  s.reason = reason;
  s.from_tier = link->from_tier;
  s.to_tier = link->to_tier;
  s.from_ordinal = link->from_ordinal;
  s.to_ordinal = link->to_ordinal;
  s.bw_bytes_per_s = atomic_load_explicit(&link->bw_bytes_per_s, memory_order_relaxed);
  for (uint32_t r = 0; r < GEMINI_REASON_COUNT; r++) {
    if (reason != GEMINI_REASON_ALL && reason != r) continue;
    s.moved_bytes += atomic_load_explicit(&link->moved_bytes[r], memory_order_relaxed);
    s.moved_chunks += atomic_load_explicit(&link->moved_chunks[r], memory_order_relaxed);
  }
  end(m, locked);
  return gmi_struct_out(stats_out, &s, sizeof s, GMI_V1_LINK_STATS, "stats_out");
}
gemini_status_t gemini_link_stats(gemini_manager_t mgr, uint32_t link, uint32_t reason,
                                  gemini_link_stats_t *stats_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? link_stats(m, link, reason, stats_out) : GEMINI_ERR_HANDLE);
}

/* ---- as text */
static const char *const tier_names[GEMINI_TIER_COUNT] = { "device", "host", "file" };

static void write_totals(FILE *file, const gemini_stats_t *s) {
#define FIGURE(name) fprintf(file, #name ": %" PRIu64 "\n", s->name)
  FIGURE(model_bytes);
  FIGURE(nonmodel_bytes);
  FIGURE(nonmodel_peak_bytes);
  FIGURE(chunk_bytes);
  FIGURE(acquire_hits);
  FIGURE(acquire_misses);
  FIGURE(stall_ns);
  FIGURE(iterations);
  FIGURE(planned_iterations);
  FIGURE(departures);
  FIGURE(plans);
  FIGURE(predicted_step_ns);
  FIGURE(measured_step_ns);
  FIGURE(planned_fetch_bytes);
  FIGURE(planned_evict_bytes);
  FIGURE(op_peak_error_bytes);
  FIGURE(pending_updates);
  FIGURE(host_alloc_bytes);
  FIGURE(speculated_elements);
  FIGURE(committed_elements);
  FIGURE(dropped_elements);
#undef FIGURE
  static const char *const engines[] = { "none", "io_uring", "threads" };
  fprintf(file, "file_engine: %s\n", engines[s->file_engine]);
}

static void write_tier(FILE *file, const gemini_tier_stats_t *s) {
  const char *tier = tier_names[s->tier];
  fprintf(file, "%s budget_bytes: %" PRIu64 "\n%s used_bytes: %" PRIu64 "\n%s peak_bytes: %" PRIu64 "\n", tier,
          s->budget_bytes, tier, s->used_bytes, tier, s->peak_bytes);
}

static void write_link(FILE *file, const gmi_link_t *link) {
  char name[40];
  snprintf(name, sizeof name, "%s to %s", tier_names[link->from_tier], tier_names[link->to_tier]);
  fprintf(file, "%s bw_bytes_per_s: %" PRIu64 "\n", name,
          atomic_load_explicit(&link->bw_bytes_per_s, memory_order_relaxed));
  uint64_t bytes = 0, chunks = 0;
  for (uint32_t r = 0; r < GEMINI_REASON_COUNT; r++) {
    uint64_t moved = atomic_load_explicit(&link->moved_bytes[r], memory_order_relaxed);
    bytes += moved;
    chunks += atomic_load_explicit(&link->moved_chunks[r], memory_order_relaxed);
    if (moved) fprintf(file, "%s %s moved_bytes: %" PRIu64 "\n", name, gmi_reason_name(r), moved);
  }
  fprintf(file, "%s moved_bytes: %" PRIu64 "\n%s moved_chunks: %" PRIu64 "\n", name, bytes, name, chunks);
}

static void stats_write(gmi_manager_t *m, FILE *file, void *user) {
  (void)user;
  gemini_stats_t stats;
  bool locked = begin(m);
  gmi_stats_read(m, &stats);
  write_totals(file, &stats);
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) {
    gemini_tier_stats_t s;
    gmi_tier_stats_read(m, tier, &s);
    write_tier(file, &s);
  }
  for (uint32_t link = 0; link < GMI_LINKS; link++) write_link(file, &m->links[link]);
  end(m, locked);
}
gemini_status_t gemini_stats_text(gemini_manager_t mgr, uint64_t size_bytes, char *text_out, uint64_t *length_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? gmi_text_out(m, stats_write, NULL, size_bytes, text_out, length_out) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_stats_reset(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gmi_lock(m, __func__);
  gmi_stats_t *s = &m->stats;
  for (int link = 0; link < GMI_LINKS; link++)
    for (int reason = 0; reason < GEMINI_REASON_COUNT; reason++)
      m->links[link].moved_bytes[reason] = m->links[link].moved_chunks[reason] = 0;
  s->acquire_misses = s->stall_ns = s->departures = s->op_peak_error_bytes = 0;
  s->hits_before = hits(m);
  s->peak_bytes[GEMINI_TIER_DEVICE] = m->frames.used * gmi_frame_bytes(m);
  s->peak_bytes[GEMINI_TIER_HOST] = m->host.used;
  s->peak_bytes[GEMINI_TIER_FILE] = m->file.used;
  m->nonmodel.peak = s->nonmodel_bytes;
  gmi_unlock(m);
  return GEMINI_OK;
}
