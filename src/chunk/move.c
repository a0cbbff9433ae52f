/* Hints, moves and pins: calls that move ranges between tiers. SPDX-License-Identifier: Apache-2.0
 *
 * All run on the caller's thread under the manager's lock. A move does what was asked or fails; a hint does what is
 * possible without pushing other data out, and conflicts or a lack of room are no errors. */
#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "gemini/chosen.h"

/* ---- hint, move, pin */
/* Of a sharded arena, all calls are for this rank's slices. They gather nothing, and leave what was gathered where it
 * is: that is the same on all ranks (chunk/shard.c), while these calls may differ between them. A range in which the
 * rank has no slice, or for which no chunk size is chosen yet, is empty. */
static gemini_status_t resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r) {
  gmi_range_t named;
  gemini_status_t status = gmi_range_resolve_any(m, access, &named);
  if (status) return status;
  *r = named;
  if (!gmi_arena_is_sharded(named.arena)) return GEMINI_OK;
  const uint64_t element = named.arena->element_bytes, end = named.offset + named.size + element - 1;
  named.offset -= named.offset % element;
  named.size = end - end % element - named.offset;
  r->first = 1, r->last = 0;
  if (r->size && atomic_load(&m->cut.chunk_bytes)) gmi_range_slices(m, &named, r);
  return GEMINI_OK;
}
static gemini_status_t ready(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r) {
  gemini_status_t status = resolve(m, access, r); /* first: a range that is refused does not choose the chunk size */
  if (!status) status = gmi_cut(m);
  return status ? status : resolve(m, access, r);
}

typedef gemini_status_t (*chunk_fn)(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier);

/* Checks all accesses before the first chunk moves. moves: the caller is gemini_move(), for which a chunk that cannot
 * leave its tier is an error; for a hint it is not. */
static gemini_status_t each_check(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, bool moves) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t k = 0; !status && k < count; k++) {
    gmi_range_t r;
    uint32_t tier = accesses[k].tier;
    if (tier >= GEMINI_TIER_COUNT)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, must be 0 to %d", tier, GEMINI_TIER_FILE);
    status = resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; !status && moves && tier != GEMINI_TIER_DEVICE && i <= r.last; i++) {
      gmi_chunk_t *c = &r.store->chunks[i];
      const char *why = gmi_chunk_is_resident(c) ? gmi_chunk_busy(c, GMI_TO_EVICT) : NULL;
      if (!why && tier == GEMINI_TIER_FILE && gmi_chunk_host_users(c)) why = "acquired";
      if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, &r), why);
    }
  }
  return status;
}

/* Calls fn for every chunk. hold: for a move; chunks that came to the device are held until all have come, so that a
 * later one does not evict an earlier one. */
static gemini_status_t each_chunk(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, chunk_fn fn,
                                  bool hold) {
  gemini_status_t status = each_check(m, accesses, count, hold);
  if (!status) status = gmi_cut(m);
  gmi_range_t r;
  bool queued = false;
  for (uint64_t k = 0; !status && hold && k < count; k++) {
    status = resolve(m, &accesses[k], &r);
    if (!status) status = gmi_updates_queue_range(m, r.store, r.first, r.last, &queued);
  }
  if (!status && queued) status = each_check(m, accesses, count, hold); /* again, as callbacks ran without the lock */
  if (status) return status;
  uint64_t held = 0;
  for (uint64_t k = 0; !status && k < count; k++) {
    resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; !status && i <= r.last; i++) {
      gmi_chunk_t *c = &r.store->chunks[i];
      if (!hold && gmi_chunk_deferred(c)) continue;
      status = fn(m, c, accesses[k].tier);
      if (status || !hold || accesses[k].tier != GEMINI_TIER_DEVICE) continue;
      const char *why = gmi_chunk_hold(m, c, GEMINI_TIER_DEVICE, GEMINI_READ);
      if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, &r), why);
      if (status) break;
      held++;
    }
  }
  for (uint64_t k = 0; !status && hold && k < count; k++) { /* waits for reads from files */
    resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; !status && accesses[k].tier == GEMINI_TIER_HOST && i <= r.last; i++)
      if (gmi_chunk_io(&r.store->chunks[i]) || gmi_chunk_failed_read(&r.store->chunks[i]))
        status = gmi_chunk_settle_host(m, &r.store->chunks[i]);
  }
  for (uint64_t k = 0; held && k < count; k++) {
    if (accesses[k].tier != GEMINI_TIER_DEVICE) continue;
    resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; held && i <= r.last; i++, held--)
      gmi_chunk_unhold_device(&r.store->chunks[i], GEMINI_READ);
  }
  return status;
}

static gemini_status_t batch(gmi_manager_t *m, const gemini_access_t *theirs, uint64_t count, chunk_fn fn, bool hold) {
  gmi_accesses_t accesses;
  gemini_status_t status = gmi_accesses_in(&accesses, theirs, count);
  if (status) return status;
  status = each_chunk(m, accesses.list, count, fn, hold);
  gmi_accesses_free(&accesses);
  return status;
}

static gemini_status_t hint_chunk(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier) {
  uint64_t room = m->config.host_bytes > m->host.used ? m->config.host_bytes - m->host.used : 0;
  gemini_status_t status = GEMINI_OK;
  bool acquired = gmi_chunk_device_users(c) || gmi_chunk_host_users(c);
  if (tier == GEMINI_TIER_DEVICE && !gmi_chunk_host_writers(c)) {
    if (!gmi_chunk_has(c, GMI_VALID_HOST | GMI_VALID_ZERO) && !gmi_chunk_has_slot(c) && room < gmi_slot_bytes(m))
      return GEMINI_OK;
    /* Where operators are chosen at run time, the caller may predict them: others of the cache make room. */
    const uint64_t pass = m->trace.advice->cache_pass(m);
    if (pass) gmi_chunk_note_hint(c, pass);
    status = gmi_chunk_fetch(m, c, false, GEMINI_REASON_CALLER, pass ? GMI_TAKE_CACHED : 0);
    if (status == GEMINI_ERR_OOM_DEVICE) status = GEMINI_OK;
  } else if (tier == GEMINI_TIER_HOST && (gmi_chunk_has_slot(c) || room >= gmi_slot_bytes(m)) &&
             !gmi_chunk_has_writers(c)) {
    if (gmi_chunk_has(c, GMI_VALID_ZERO)) gmi_host_expect(m, c);
    else status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_CALLER);
  } else if (tier == GEMINI_TIER_FILE && m->file.store && !acquired && !gmi_chunk_is_pinned(c) &&
             (gmi_chunk_has_slot(c) || room >= gmi_slot_bytes(m) || !gmi_chunk_has_only(c, GMI_VALID_DEVICE))) {
    status = gmi_chunk_to_file(m, c, GEMINI_REASON_CALLER);
    if (status == GEMINI_ERR_OOM_FILE) status = GEMINI_OK;
  }
  if (status == GEMINI_ERR_BUSY) status = GEMINI_OK; /* another thread acquired it meanwhile */
  return status;
}
gemini_status_t gemini_hint(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count) {
  API_LOCKED(batch(m, accesses, count, hint_chunk, false));
}

static gemini_status_t priority_set(gmi_manager_t *m, const gemini_access_t *theirs, uint64_t count,
                                    uint32_t priority) {
  if (priority > GMI_CACHE_PRIORITY_MOST)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "priority is %u, must be 0 to %d", priority, GMI_CACHE_PRIORITY_MOST);
  gmi_accesses_t accesses;
  gmi_range_t r;
  gemini_status_t status = gmi_accesses_in(&accesses, theirs, count);
  if (status) return status;
  for (uint64_t k = 0; !status && k < count; k++) status = resolve(m, &accesses.list[k], &r);
  if (!status) status = gmi_cut(m);
  for (uint64_t k = 0; !status && k < count; k++) {
    status = resolve(m, &accesses.list[k], &r);
    for (uint64_t i = r.first; !status && i <= r.last; i++) gmi_chunk_note_priority(&r.store->chunks[i], priority);
  }
  gmi_accesses_free(&accesses);
  return status;
}
gemini_status_t gemini_priority_set(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count,
                                    uint32_t priority) {
  API_LOCKED(priority_set(m, accesses, count, priority));
}

static gemini_status_t move_chunk(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier) {
  if (tier == GEMINI_TIER_DEVICE) {
    return gmi_chunk_fetch(m, c, false, GEMINI_REASON_CALLER, GMI_TAKE_EVICT);
  }
  if (tier == GEMINI_TIER_FILE) return gmi_chunk_to_file(m, c, GEMINI_REASON_CALLER);
  gemini_status_t status = gmi_chunk_evict(m, c, GEMINI_REASON_CALLER);
  if (!status && !gmi_chunk_has(c, GMI_VALID_HOST | GMI_VALID_ZERO))
    status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_CALLER);
  return status;
}
gemini_status_t gemini_move(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count) {
  API_LOCKED(batch(m, accesses, count, move_chunk, true));
}

/* Only chunks on the device whose bytes are nowhere else: others leave the device without a copy anyway. Slices of
 * ranks stay as they are, and so do bytes that parameters and gradients share, and chunks in use. */
static gemini_status_t discard_range(gmi_manager_t *m, const gemini_access_t *theirs) {
  gemini_access_t access;
  gmi_range_t r;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (!status) status = gmi_range_resolve_any(m, &access, &r);
  if (status || !r.size || !atomic_load(&m->cut.chunk_bytes)) return status;
  if (gmi_arena_is_sharded(r.arena) || r.arena->store != r.arena->index || r.arena->reused) return GEMINI_OK;
  const uint64_t used = atomic_load(&r.store->size);
  for (uint64_t i = r.first; i <= r.last; i++) {
    gmi_chunk_t *c = &r.store->chunks[i];
    const uint64_t begin = i << m->cut.chunk_shift, end = begin + (UINT64_C(1) << m->cut.chunk_shift);
    const bool whole = r.offset <= begin && r.offset + r.size >= (end < used ? end : used);
    if (whole && gmi_chunk_has_only(c, GMI_VALID_DEVICE) && !gmi_chunk_spec(c) && !gmi_chunk_in_graphs(c) &&
        !gmi_chunk_is_pinned(c) && !gmi_chunk_unsettle_to_change(c))
      gmi_chunk_discard(m, c);
  }
  return GEMINI_OK;
}
gemini_status_t gemini_discard(gemini_manager_t mgr, const gemini_access_t *access) {
  API_LOCKED(discard_range(m, access));
}

static gemini_status_t pin(gmi_manager_t *m, const gemini_access_t *theirs) {
  gemini_access_t access;
  gmi_range_t r;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (!status) status = ready(m, &access, &r);
  if (status) return status;
  uint64_t pinned = 0;
  bool queued = false;
  status = gmi_updates_queue_range(m, r.store, r.first, r.last, &queued);
  if (!status && queued) status = resolve(m, &access, &r); /* again, as callbacks ran without the lock */
  for (uint64_t i = r.first; !status && i <= r.last; i++) {
    gmi_chunk_t *c = &r.store->chunks[i];
    status = move_chunk(m, c, GEMINI_TIER_DEVICE);
    const char *why = status ? NULL : gmi_chunk_pin(m, c);
    if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, &r), why);
    if (status) break;
    pinned++;
  }
  if (status)
    for (uint64_t i = 0; i < pinned; i++) gmi_chunk_unpin(m, &r.store->chunks[r.first + i]);
  return status;
}
gemini_status_t gemini_pin(gemini_manager_t mgr, const gemini_access_t *access) { API_LOCKED(pin(m, access)); }

static gemini_status_t unpin(gmi_manager_t *m, const gemini_access_t *theirs) {
  gemini_access_t access;
  gmi_range_t r;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (!status) status = ready(m, &access, &r);
  if (status) return status;
  for (uint64_t i = r.first; i <= r.last; i++)
    if (!gmi_chunk_is_pinned(&r.store->chunks[i]))
      return gmi_fail(GEMINI_ERR_STATE, 0, "a chunk of %s is not pinned", gmi_range_name(m, &r));
  for (uint64_t i = r.first; i <= r.last; i++) gmi_chunk_unpin(m, &r.store->chunks[i]);
  return GEMINI_OK;
}
gemini_status_t gemini_unpin(gemini_manager_t mgr, const gemini_access_t *access) { API_LOCKED(unpin(m, access)); }
