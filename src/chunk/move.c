/* Hints, moves and pins: what moves ranges at the caller's word. SPDX-License-Identifier: Apache-2.0 */
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/manager.h"

/* ---- hint, move, pin */
typedef gemini_status_t (*window_fn)(gmi_manager_t *m, gmi_window_t *w, uint32_t tier);

/* All are checked before the first moves. moves: as asked, or not at all. */
static gemini_status_t each_check(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, bool moves) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t k = 0; !status && k < count; k++) {
    gmi_range_t r;
    uint32_t tier = accesses[k].tier;
    if (tier >= GEMINI_TIER_COUNT)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, the last one is %d", tier, GEMINI_TIER_FILE);
    status = gmi_range_resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; !status && moves && tier != GEMINI_TIER_DEVICE && i <= r.last; i++) {
      gmi_window_t *w = &r.store->windows[i];
      const char *why = gmi_window_is_resident(w) ? gmi_window_busy(w, GMI_TO_EVICT) : NULL;
      if (!why && tier == GEMINI_TIER_FILE && gmi_window_host_users(w)) why = "acquired";
      if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, &r), why);
    }
  }
  return status;
}

/* hold: windows that came to the device stay there until all have come. */
static gemini_status_t each_window(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, window_fn fn,
                                   bool hold) {
  if (!accesses && count)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "accesses is NULL but count is %llu", (unsigned long long)count);
  if (count > GMI_BATCH_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "count is %llu, at most %d", (unsigned long long)count, GMI_BATCH_LIMIT);
  gemini_status_t status = each_check(m, accesses, count, hold);
  if (!status) status = gmi_cut(m);
  gmi_range_t r;
  if (status) return status;
  uint64_t held = 0;
  for (uint64_t k = 0; !status && k < count; k++) {
    gmi_range_resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; !status && i <= r.last; i++) {
      gmi_window_t *w = &r.store->windows[i];
      if (hold) status = gmi_updates_queue(m, w);
      else if (gmi_window_deferred(w)) continue;
      if (!status) status = fn(m, w, accesses[k].tier);
      if (status || !hold || accesses[k].tier != GEMINI_TIER_DEVICE) continue;
      const char *why = gmi_window_hold(m, w, GEMINI_TIER_DEVICE, GEMINI_READ);
      if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, &r), why);
      if (status) break;
      held++;
    }
  }
  for (uint64_t k = 0; !status && hold && k < count; k++) { /* what comes from files has come */
    gmi_range_resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; !status && accesses[k].tier == GEMINI_TIER_HOST && i <= r.last; i++)
      if (gmi_window_io(&r.store->windows[i]) || gmi_window_failed_read(&r.store->windows[i]))
        status = gmi_window_settle_host(m, &r.store->windows[i]);
  }
  for (uint64_t k = 0; held && k < count; k++) {
    if (accesses[k].tier != GEMINI_TIER_DEVICE) continue;
    gmi_range_resolve(m, &accesses[k], &r);
    for (uint64_t i = r.first; held && i <= r.last; i++, held--)
      gmi_window_unhold_device(&r.store->windows[i], GEMINI_READ);
  }
  return status;
}

static gemini_status_t hint_window(gmi_manager_t *m, gmi_window_t *w, uint32_t tier) {
  uint64_t room = m->config.host_bytes > m->host_used ? m->config.host_bytes - m->host_used : 0;
  gemini_status_t status = GEMINI_OK;
  bool acquired = gmi_window_device_users(w) || gmi_window_host_users(w);
  if (tier == GEMINI_TIER_DEVICE && !gmi_window_host_writers(w)) {
    if (!gmi_window_has(w, GMI_VALID_HOST | GMI_VALID_ZERO) && !gmi_window_has_slot(w) &&
        room < atomic_load(&m->window_bytes))
      return GEMINI_OK;
    status = gmi_window_fetch(m, w, false, GEMINI_REASON_CALLER, 0);
    if (status == GEMINI_ERR_OOM_DEVICE) status = GEMINI_OK;
  } else if (tier == GEMINI_TIER_HOST && (gmi_window_has_slot(w) || room >= atomic_load(&m->window_bytes)) &&
             !gmi_window_has_writers(w) && !gmi_window_has(w, GMI_VALID_ZERO)) {
    status = gmi_window_to_host(m, w, false, GEMINI_REASON_CALLER);
  } else if (tier == GEMINI_TIER_FILE && m->files && !acquired && !gmi_window_is_pinned(w) &&
             (gmi_window_has_slot(w) || room >= atomic_load(&m->window_bytes) ||
              !gmi_window_has_only(w, GMI_VALID_DEVICE))) {
    status = gmi_window_to_file(m, w, GEMINI_REASON_CALLER);
    if (status == GEMINI_ERR_OOM_FILE) status = GEMINI_OK;
  }
  if (status == GEMINI_ERR_BUSY) status = GEMINI_OK; /* somebody acquired it meanwhile */
  return status;
}
gemini_status_t gemini_hint(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count) {
  API_LOCKED(each_window(m, accesses, count, hint_window, false));
}

static gemini_status_t move_window(gmi_manager_t *m, gmi_window_t *w, uint32_t tier) {
  if (tier == GEMINI_TIER_DEVICE) {
    return gmi_window_fetch(m, w, false, GEMINI_REASON_CALLER, GMI_TAKE_EVICT);
  }
  if (tier == GEMINI_TIER_FILE) return gmi_window_to_file(m, w, GEMINI_REASON_CALLER);
  gemini_status_t status = gmi_window_evict(m, w, GEMINI_REASON_CALLER);
  if (!status && !gmi_window_has(w, GMI_VALID_HOST | GMI_VALID_ZERO))
    status = gmi_window_to_host(m, w, false, GEMINI_REASON_CALLER);
  return status;
}
gemini_status_t gemini_move(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count) {
  API_LOCKED(each_window(m, accesses, count, move_window, true));
}

static gemini_status_t pin(gmi_manager_t *m, const gemini_access_t *access) {
  gmi_range_t r;
  if (!access) return gmi_fail(GEMINI_ERR_INVALID, 0, "access is NULL");
  gemini_status_t status = gmi_range_ready(m, access, &r);
  if (status) return status;
  uint64_t pinned = 0;
  for (uint64_t i = r.first; !status && i <= r.last; i++) {
    gmi_window_t *w = &r.store->windows[i];
    status = gmi_updates_queue(m, w);
    if (!status) status = move_window(m, w, GEMINI_TIER_DEVICE);
    const char *why = status ? NULL : gmi_window_pin(m, w);
    if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, &r), why);
    if (status) break;
    pinned++;
  }
  if (status)
    for (uint64_t i = 0; i < pinned; i++) gmi_window_unpin(m, &r.store->windows[r.first + i]);
  return status;
}
gemini_status_t gemini_pin(gemini_manager_t mgr, const gemini_access_t *access) { API_LOCKED(pin(m, access)); }

static gemini_status_t unpin(gmi_manager_t *m, const gemini_access_t *access) {
  gmi_range_t r;
  if (!access) return gmi_fail(GEMINI_ERR_INVALID, 0, "access is NULL");
  gemini_status_t status = gmi_range_ready(m, access, &r);
  if (status) return status;
  for (uint64_t i = r.first; i <= r.last; i++)
    if (!gmi_window_is_pinned(&r.store->windows[i]))
      return gmi_fail(GEMINI_ERR_STATE, 0, "a chunk of %s is not pinned", gmi_range_name(m, &r));
  for (uint64_t i = r.first; i <= r.last; i++) gmi_window_unpin(m, &r.store->windows[i]);
  return GEMINI_OK;
}
gemini_status_t gemini_unpin(gemini_manager_t mgr, const gemini_access_t *access) { API_LOCKED(unpin(m, access)); }
