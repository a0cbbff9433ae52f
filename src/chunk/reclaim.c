/* Reclaim: taking slots from chunks, in levels of rising cost. SPDX-License-Identifier: Apache-2.0
 *
 * STALE: the host copy is not valid. CLEAN: another tier has a valid copy, or the bytes are zero. Both free a slot at
 * once. The levels from STATES on need a write to a file, and exist with a file tier, or as below: optimizer states;
 * then states of deferred pieces, which are needed soon; then parameters and gradients (ANY).
 *
 * Where host and files have no room for all bytes (gmi_home_is_short()), states go to free frames of the device, if
 * there are any, before they go to files. Without a file tier all chunks do.
 *
 * State chunks are used cyclically, once an iteration, so the one updated last has the furthest next use: evict it
 * first (Belady). LRU would evict each chunk just before its use. What is not evicted stays resident over iterations
 * and needs no transfers. */
#include "chunk/arena.h"
#include "chunk/files.h"
#include "chunk/heap.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "core/workers.h"

uint64_t gmi_home_slots(const gmi_manager_t *m) {
  return m->host.slot_count + m->config.file_bytes / gmi_block_bytes(m);
}
bool gmi_home_is_short(const gmi_manager_t *m) {
  const uint64_t slots = gmi_home_slots(m);
  const uint64_t bytes = atomic_load(&m->stats.model_bytes), chunk_bytes = gmi_chunk_bytes(m);
  return m->config.placement == GEMINI_PLACEMENT_AUTO && !m->file.borrowed && bytes > slots * chunk_bytes &&
         bytes <= (slots + m->frames.count) * chunk_bytes;
}

/* Places that a chunk takes in memory, on the host or on the device, besides one in a file. will: it is going to have
 * bytes of its own. */
static uint64_t places(const gmi_chunk_t *c, bool will) {
  const bool here =
      gmi_chunk_has(c, GMI_VALID_HOST | GMI_VALID_DEVICE) && !gmi_chunk_has(c, GMI_VALID_ZERO | GMI_VALID_FILE);
  const bool both = gmi_chunk_is_resident(c) && (gmi_chunk_device_users(c) || gmi_chunk_is_pinned(c));
  return (uint64_t)(will || here) + both;
}
gemini_status_t gmi_home_fits(gmi_manager_t *m, const char *what, uint64_t spare,
                              bool (*inside)(const void *user, const gmi_chunk_t *c), const void *user) {
  uint64_t taken = m->graphs.frames + m->groups.frames + spare;
  if (m->nonmodel.heap) taken += gmi_heap_pages_used(m->nonmodel.heap);
  for (uint32_t s = 0; s < m->host.slot_most; s++) taken += m->host.slots[s].block != 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_has_tiers(a) || !a->chunks) continue;
    for (uint32_t k = 0; k < atomic_load(&a->chunk_count); k++)
      taken += places(&a->chunks[k], inside(user, &a->chunks[k]));
  }
  if (taken <= m->host.slot_count + m->frames.count) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "%s needs %llu more bytes of host memory, or of the device", what,
                  (unsigned long long)((taken - m->host.slot_count - m->frames.count) * gmi_slot_bytes(m)));
}

enum { RECLAIM_STALE, RECLAIM_CLEAN, RECLAIM_STATES, RECLAIM_DEFERRED, RECLAIM_ANY, RECLAIM_LEVELS };
enum { CLEAN_LOOK = 256 }; /* slots that one choice compares: bounds its cost */

void gmi_host_updated(gmi_manager_t *m, gmi_chunk_t *c) {
  gmi_host_t *h = &m->host;
  h->updated[h->updated_end++ % GMI_UPDATED] = c; /* a ring buffer that overwrites its oldest entry */
  if (h->updated_end - h->updated_first > GMI_UPDATED) h->updated_first++;
}
void gmi_host_forget(gmi_manager_t *m) { m->host.updated_first = m->host.updated_end; }

/* Can the chunk's slot be reclaimed, and is level its level? Never while a caller, a graph, a transfer, an update or a
 * worker uses the slot. */
static bool reclaimable(gmi_manager_t *m, const gmi_chunk_t *c, int level) {
  if (!c || gmi_chunk_host_users(c) || gmi_chunk_in_graphs(c) || gmi_chunk_io(c) || gmi_chunk_work_pending(m, c))
    return false;
  if (!gmi_chunk_has(c, GMI_VALID_HOST)) return level == RECLAIM_STALE;
  if (gmi_chunk_has(c, GMI_VALID_DEVICE | GMI_VALID_FILE | GMI_VALID_ZERO)) return level == RECLAIM_CLEAN;
  uint32_t kind = gmi_chunk_arena(m, c)->kind;
  if (kind == GEMINI_KIND_PARAM || kind == GEMINI_KIND_GRAD) return level == RECLAIM_ANY;
  return level == (gmi_chunk_deferred(c) ? RECLAIM_DEFERRED : RECLAIM_STATES);
}

/* Frees a slot whose bytes are valid in another tier, too. */
static void leave_slot(gmi_manager_t *m, gmi_chunk_t *c) {
  gmi_chunk_host_lost(m, c);
  gmi_host_slot_drop(m, c);
}

/* When the bytes of a slot are wanted on the host, as a position of the plan. Those that are on the device, too, are
 * wanted there; of others the plan may know no use. */
static uint64_t wanted_at(gmi_manager_t *m, const gmi_chunk_t *c) {
  return gmi_chunk_is_resident(c) ? UINT64_MAX : m->trace.advice->next_use(m, c);
}

/* Returns the chunk with the latest use of the first CLEAN_LOOK that can leave their slots at once, from the hand of
 * the clock on; *wanted_out is its use. Chunks that are read in turn, again and again, so keep as many of their slots
 * as there are: the one used last leaves (Belady), not the one used longest ago, which is needed next. */
static gmi_chunk_t *clean_latest(gmi_manager_t *m, uint64_t *wanted_out) {
  gmi_chunk_t *latest = NULL;
  for (uint32_t step = 0, looked = 0; step < m->host.slot_most && looked < CLEAN_LOOK; step++) {
    uint32_t slot = (uint32_t)(((uint64_t)m->host.hand + step) % m->host.slot_most);
    gmi_chunk_t *c = m->host.slots[slot].chunk;
    if (!reclaimable(m, c, RECLAIM_CLEAN) || !gmi_fence_reached(m, m->host.slots[slot].fence)) continue;
    const uint64_t wanted = wanted_at(m, c);
    looked++;
    if (latest && wanted <= *wanted_out) continue;
    latest = c;
    *wanted_out = wanted;
    if (wanted == UINT64_MAX) break;
  }
  return latest;
}
static void leave_clean(gmi_manager_t *m, gmi_chunk_t *c) {
  m->host.hand = gmi_chunk_slot(c) + 1;
  leave_slot(m, c);
}

bool gmi_host_clean_leave(gmi_manager_t *m, uint64_t use) {
  uint64_t wanted = 0;
  gmi_chunk_t *c = clean_latest(m, &wanted);
  if (!c || (!gmi_chunk_is_resident(c) && (wanted < use || wanted == UINT64_MAX))) return false;
  leave_clean(m, c);
  return true;
}

bool gmi_host_file_drop(gmi_manager_t *m, gmi_chunk_t *c) {
  if (!gmi_chunk_has_slot(c)) return true;
  if (gmi_chunk_io(c) || !gmi_fence_reached(m, m->host.slots[gmi_chunk_slot(c)].fence)) return false;
  if (gmi_chunk_has(c, GMI_VALID_FILE) && reclaimable(m, c, RECLAIM_CLEAN)) leave_slot(m, c);
  return true;
}

/* Returns the reclaimable state chunk that was updated last. *busy_out: the best choice is a chunk that is still being
 * updated; the caller should wait for it rather than evict one with an earlier next use. */
static gmi_chunk_t *updated_last(gmi_manager_t *m, bool *busy_out) {
  gmi_host_t *h = &m->host;
  *busy_out = false;
  for (uint64_t i = h->updated_end; i-- > h->updated_first;) {
    gmi_chunk_t *c = h->updated[i % GMI_UPDATED];
    bool state = reclaimable(m, c, RECLAIM_STATES);
    if (!state && i + 1 == h->updated_end && !gmi_chunk_has_slot(c)) h->updated_end--; /* evicted already: pop it */
    if (state) return c;
    if (gmi_chunk_io(c) || gmi_chunk_deferred(c) || !gmi_chunk_work_pending(m, c)) continue;
    *busy_out = true;
    return NULL;
  }
  return NULL;
}

/* Where the bytes of a chunk go whose only copy is on the host: up, to the device, if there is a free frame and it may
 * be fetched, which a chunk that is being loaded may not; otherwise to a file. False: there is no such place. */
static bool has_place(const gmi_manager_t *m, const gmi_chunk_t *c, bool *up) {
  if (*up && gmi_chunk_busy(c, GMI_TO_FETCH)) *up = false;
  return *up || m->file.store;
}
/* Starts to bring them there. */
static gemini_status_t send_away(gmi_manager_t *m, gmi_chunk_t *c, bool up) {
  if (!up) return gmi_file_write(m, c, GEMINI_REASON_PRESSURE);
  return gmi_chunk_fetch(m, c, false, GEMINI_REASON_PRESSURE, 0);
}

/* Within a level, host.hand is the hand of a clock: each scan goes on where the last one ended, so that the choice
 * rotates over all chunks. */
gemini_status_t gmi_host_reclaim(gmi_manager_t *m, bool *freed_out, bool *started_out) {
  *freed_out = *started_out = false;
  gemini_status_t status = gmi_files_reap(m, NULL);
  if (status) return status;
  const bool up = gmi_home_is_short(m) && gmi_frames_left(m);
  for (int level = 0; level < (m->file.store || up ? RECLAIM_LEVELS : RECLAIM_STATES); level++) {
    /* The last levels hold chunks that are needed soon. While work is under way that may free other slots, let the
     * caller wait for it instead. */
    if (level > RECLAIM_STATES && (m->io.count || gmi_workers_pending(m))) break;
    bool busy = false;
    gmi_chunk_t *last = level == RECLAIM_STATES ? updated_last(m, &busy) : NULL;
    bool higher = up;
    if (last && has_place(m, last, &higher)) {
      *started_out = true;
      return send_away(m, last, higher);
    }
    if (busy) break;
    uint64_t wanted = 0; /* where copies of all clean slots are under way, the clock chooses one to be waited for */
    gmi_chunk_t *latest = level == RECLAIM_CLEAN ? clean_latest(m, &wanted) : NULL;
    if (latest) {
      leave_clean(m, latest);
      *freed_out = true;
      return GEMINI_OK;
    }
    for (uint32_t step = 0; step < m->host.slot_most; step++) {
      uint32_t slot = (uint32_t)(((uint64_t)m->host.hand + step) % m->host.slot_most);
      gmi_chunk_t *c = m->host.slots[slot].chunk;
      if (!reclaimable(m, c, level)) continue;
      higher = up && (level < RECLAIM_ANY || !m->file.store);
      if (level > RECLAIM_CLEAN && !has_place(m, c, &higher)) continue;
      m->host.hand = slot + 1;
      if (level <= RECLAIM_CLEAN) {
        if (level == RECLAIM_CLEAN) leave_slot(m, c);
        else gmi_host_slot_drop(m, c);
        *freed_out = true;
        return GEMINI_OK;
      }
      *started_out = true;
      return send_away(m, c, higher);
    }
  }
  return GEMINI_OK;
}

void gmi_host_spare_reclaim(gmi_manager_t *m) {
  uint64_t stay = 0;
  for (uint32_t s = 0; !m->host.spare_looked && s < m->host.slot_most; s++) {
    gmi_chunk_t *c = m->host.slots[s].chunk;
    uint32_t kind = c ? gmi_chunk_arena(m, c)->kind : GEMINI_KIND_OTHER;
    bool state = kind == GEMINI_KIND_MASTER || kind == GEMINI_KIND_MOMENTUM || kind == GEMINI_KIND_VARIANCE;
    if (!state || !reclaimable(m, c, RECLAIM_STALE)) continue;
    stay += m->trace.advice->stays(m, c);
    gmi_host_slot_drop(m, c);
  }
  gmi_host_forget_peak(m, stay * gmi_slot_bytes(m));
  m->host.spare_looked = true;
}
