/* The host tier: slots for chunks in one range of page-locked memory, and reclaiming them when the budget is used up.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A chunk may lie in any slot. Each chunk has a home slot; homes follow the order of chunks in their arenas, so chunks
 * at home form runs (adjacent slots in arena order), which one host pointer covers. Where the budget is too small for
 * homes, gmi_host_run() moves the chunks of one range together.
 *
 * Queued work on a slot's bytes is recorded in the slot, not in the chunk: copies as a fence, updates and transfers as
 * the counts work_queued and work_done. The next owner of the slot therefore waits for the work of the previous one.
 *
 * Threads: any thread that holds the manager's lock. Workers and the I/O engine finish work on slots without the lock
 * (gmi_workers_work_done()); they only advance work_done and set failure. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/space.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/host_ahead.h"
#include "chunk/residency.h"
#include "chunk/speculate.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/streams.h"
#include "core/workers.h"
#include "host/host_heap.h"
#include "host/limits.h"
#include "host/reserve.h"

/* ---- slots */
uint8_t *gmi_slot_address(const gmi_manager_t *m, uint32_t slot) { return m->host.base + slot * gmi_slot_bytes(m); }
uint8_t *gmi_chunk_host(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint8_t *slot = gmi_chunk_has_slot(c) ? gmi_slot_address(m, gmi_chunk_slot(c)) : NULL;
  if (gmi_chunk_lazy_zeros(c)) gmi_chunk_lazy_zeros_write(m, c, slot);
  return slot;
}
static gmi_slot_t *slot_of(const gmi_manager_t *m, const gmi_chunk_t *c) { return &m->host.slots[gmi_chunk_slot(c)]; }

static uint32_t budget_slots(const gmi_manager_t *m, uint64_t bytes) {
  uint64_t count = bytes / gmi_slot_bytes(m);
  return count < GMI_NONE ? (uint32_t)count : GMI_NONE - 1;
}

/* One bit per slot; set: neither a chunk nor a block uses it. */
static bool is_free(const gmi_manager_t *m, uint32_t slot) { return m->host.free_map[slot >> 6] >> (slot & 63) & 1; }
/* After the budget shrinks (gmi_host_resize), slots at or above slot_count are never marked free, even when empty. */
static void set_free(gmi_manager_t *m, uint32_t slot, bool free) {
  if (slot >= m->host.slot_count) return;
  GMI_ASSERT(is_free(m, slot) != free);
  if (free) m->host.free_map[slot >> 6] |= UINT64_C(1) << (slot & 63);
  else m->host.free_map[slot >> 6] &= ~(UINT64_C(1) << (slot & 63));
  m->host.free_count += free ? 1 : -1u;
}

/* Sets slot_count to what a budget allows. Slots above a smaller budget keep their chunks until these can move, which
 * is why slot_most, the bound for scans, never shrinks. */
static void use_slots(gmi_manager_t *m, uint64_t bytes) {
  uint32_t count = budget_slots(m, bytes), most = (uint32_t)(gmi_reserve_size(m->host.reserve) / gmi_slot_bytes(m));
  if (count > most) count = most;
  uint32_t before = m->host.slot_count;
  for (uint32_t s = count; s < before; s++)
    if (is_free(m, s)) set_free(m, s, false);
  m->host.slot_count = count;
  if (count > m->host.slot_most) m->host.slot_most = count;
  for (uint32_t s = before; s < count; s++)
    if (!m->host.slots[s].chunk && !m->host.slots[s].block && !m->host.slots[s].spare) set_free(m, s, true);
}

/* How many chunks can get a slot without a reclaim. While the budget shrinks, fewer than the free slots: chunks above
 * slot_count still count in used. */
uint32_t gmi_host_free(const gmi_manager_t *m) {
  uint64_t used = m->host.used ? m->host.used / gmi_slot_bytes(m) : 0,
           left = m->host.slot_count > used ? m->host.slot_count - used : 0;
  return left < m->host.free_count ? (uint32_t)left : m->host.free_count;
}

gemini_status_t gmi_host_prepare(gmi_manager_t *m, gmi_cut_t *cut) {
  uint64_t most = gmi_reserve_size(m->host.reserve) / cut->sizes.slot_bytes;
  cut->slot_map_bytes = (most + 1) * sizeof(gmi_slot_t);
  cut->free_map_bytes = (most / 64 + 1) * sizeof(uint64_t);
  cut->slots = gmi_space(cut->slot_map_bytes);
  cut->free_map = gmi_space(cut->free_map_bytes);
  if (cut->slots && cut->free_map) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address space for the records of %llu host slots",
                  (unsigned long long)most);
}

void gmi_host_install(gmi_manager_t *m, gmi_cut_t *cut) {
  gmi_host_heap_end(m); /* no block is live */
  gmi_space_free(m->host.slots, m->host.slot_map_bytes);
  gmi_space_free(m->host.free_map, m->host.free_map_bytes);
  m->host.slots = cut->slots;
  m->host.slot_map_bytes = cut->slot_map_bytes;
  m->host.free_map = cut->free_map;
  m->host.free_map_bytes = cut->free_map_bytes;
  cut->slots = NULL;
  cut->free_map = NULL;
  m->host.slot_count = m->host.slot_most = m->host.free_count = m->host.hand = 0;
  m->host.used = 0;
  use_slots(m, m->config.host_bytes);
  gmi_host_homes(m, &cut->sizes);
}

/* Gives each arena a range of home slots, in the order of their indices. The first pass counts chunks and arenas; the
 * second places the arenas, with about half of the spare slots as gaps, so that arenas can grow in place. */
void gmi_host_homes(gmi_manager_t *m, const gmi_sizes_t *sizes) {
  uint64_t chunks = 0, arenas = 0, slots = m->config.host_bytes / sizes->slot_bytes, home = 0;
  for (int pass = 0; pass < 2; pass++) {
    uint64_t gap = slots > chunks ? (slots - chunks) / (2 * arenas + 2) : 0;
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *a = gmi_arena_at(m, i);
      if (!a || !gmi_arena_has_tiers(a)) continue;
      uint64_t count = (atomic_load(&a->size) + sizes->chunk_bytes - 1) / sizes->chunk_bytes;
      chunks += count;
      arenas++;
      a->home = (uint32_t)home;
      a->home_count = (uint32_t)(count + gap);
      home += pass ? a->home_count : 0;
    }
  }
  m->host.home_end = home;
}

/* Gives an arena that is new, or has outgrown its range, a range of homes behind all others. When that would end above
 * the budget, all ranges are computed anew from the arenas' sizes. No chunk moves here: gmi_host_run() moves those
 * that must be adjacent. */
static void home_extend(gmi_manager_t *m, gmi_arena_t *a) {
  uint64_t count = atomic_load(&a->chunk_count), end = m->host.home_end;
  if (end + count > m->host.slot_count) {
    gmi_sizes_t sizes = gmi_sizes(m);
    gmi_host_homes(m, &sizes);
    if (count <= a->home_count) return;
    end = m->host.home_end;
  }
  uint64_t gap = m->host.slot_count > end + count ? (m->host.slot_count - end - count) / 4 : 0;
  a->home = (uint32_t)end;
  a->home_count = (uint32_t)(count + gap);
  m->host.home_end = end + a->home_count;
}

/* Homes wrap around in a budget that is too small for all; then several chunks share one. */
static uint32_t home_of(gmi_manager_t *m, const gmi_chunk_t *c) {
  gmi_arena_t *a = gmi_chunk_arena(m, c);
  if (c->index >= a->home_count) home_extend(m, a);
  return m->host.slot_count ? (uint32_t)(((uint64_t)a->home + c->index) % m->host.slot_count) : GMI_NONE;
}

void gmi_host_home_range(const gmi_manager_t *m, const gmi_arena_t *store, uint64_t *begin_out, uint64_t *end_out) {
  const uint32_t count = atomic_load(&store->chunk_count);
  *begin_out = (uint64_t)store->home * gmi_slot_bytes(m);
  *end_out = *begin_out + (count < store->home_count ? count : store->home_count) * gmi_slot_bytes(m);
}

void gmi_host_expect(gmi_manager_t *m, const gmi_chunk_t *c) {
  const uint32_t home = home_of(m, c);
  if (home != GMI_NONE) gmi_ahead_expect(m, home * gmi_slot_bytes(m) / m->host.part_bytes);
}

/* Finds count adjacent free slots, searching from hint to the end and then from the start; returns the first of them,
 * or GMI_NONE. Skips 64 slots at a time where a word of the map is 0. */
static uint32_t free_run(const gmi_manager_t *m, uint32_t hint, uint32_t count) {
  for (int pass = 0; pass < 2; pass++) {
    uint32_t begin = pass == 0 ? hint : 0, end = pass == 0 ? m->host.slot_count : hint + count - 1, have = 0;
    if (end > m->host.slot_count) end = m->host.slot_count;
    for (uint32_t s = begin; s < end; s++) {
      if (!(s & 63) && !have && !m->host.free_map[s >> 6]) {
        s += 63;
        continue;
      }
      have = is_free(m, s) ? have + 1 : 0;
      if (have == count) return s - count + 1;
    }
  }
  return GMI_NONE;
}

/* Is work of jobs or transfers queued on the slot, for whomever it may have been? Its next owner waits for it. */
bool gmi_slot_is_busy(const gmi_manager_t *m, uint32_t slot) {
  const gmi_slot_t *s = &m->host.slots[slot];
  return atomic_load_explicit(&s->work_done, memory_order_relaxed) < s->work_queued;
}
static bool slot_is_committed(const gmi_manager_t *m, uint32_t slot) {
  const uint64_t begin = slot * gmi_slot_bytes(m), part = begin / m->host.part_bytes;
  return m->host.committed[part] >= begin + gmi_slot_bytes(m) - part * m->host.part_bytes;
}
/* The free slots, from the word of the map that has the newest spare slot on, all round. Begins as { 0 }. */
typedef struct {
  uint32_t words, word;
  uint64_t bits;
} walk_t;
static bool walk_free(const gmi_manager_t *m, walk_t *w, uint32_t *slot_out) {
  const uint32_t words = m->host.slot_count / 64 + 1, first = m->host.spare_hand / 64;
  for (; !w->bits; w->bits = m->host.free_map[w->word]) {
    if (w->words == words) return false;
    w->word = (first + w->words++) % words;
  }
  *slot_out = w->word * 64 + (uint32_t)__builtin_ctzll(w->bits);
  w->bits &= w->bits - 1;
  return true;
}
/* Prefers memory that is committed, as to commit more takes long, and of that what no job uses any more. */
static uint32_t spare_choose(const gmi_manager_t *m, bool quiet) {
  uint32_t best = GMI_NONE, slot;
  int least = 4;
  for (walk_t w = { 0 }; least && walk_free(m, &w, &slot);) {
    const bool busy = gmi_slot_is_busy(m, slot);
    const int cost = 2 * !slot_is_committed(m, slot) + busy;
    if (cost < least && !(quiet && busy)) best = slot, least = cost;
  }
  return best;
}

/* Chooses a chunk's slot, so that runs form by themselves: its home; else next to a neighbour of its arena; else the
 * first of two free slots, where the next chunk can join it; else any free one. At least one slot must be free. */
static uint32_t choose_slot(gmi_manager_t *m, const gmi_chunk_t *c) {
  gmi_arena_t *a = gmi_chunk_arena(m, c);
  uint32_t home = home_of(m, c), quiet = GMI_NONE,
           below = c->index ? gmi_chunk_slot(&a->chunks[c->index - 1]) : GMI_NONE;
  uint32_t above = c->index + 1 < atomic_load(&a->chunk_count) ? gmi_chunk_slot(&a->chunks[c->index + 1]) : GMI_NONE;
  if (is_free(m, home) && gmi_slot_is_busy(m, home)) quiet = spare_choose(m, true);
  if (quiet != GMI_NONE && slot_is_committed(m, quiet)) return quiet; /* rather than wait for a second pass, say */
  if (is_free(m, home)) return home;
  if (below != GMI_NONE && below + 1 < m->host.slot_count && is_free(m, below + 1)) return below + 1;
  if (above != GMI_NONE && above && is_free(m, above - 1)) return above - 1;
  uint32_t pair = free_run(m, home, 2);
  return pair != GMI_NONE ? pair : free_run(m, home, 1);
}

static void decommit_from(gmi_manager_t *m, uint64_t budget);
static void count_used(gmi_manager_t *m, uint32_t slots) {
  m->host.used += slots * gmi_slot_bytes(m);
  if (m->host.used > m->stats.peak_bytes[GEMINI_TIER_HOST]) m->stats.peak_bytes[GEMINI_TIER_HOST] = m->host.used;
  uint64_t own = m->host.used - m->host.spare_count * gmi_slot_bytes(m);
  if (own > m->host.own_peak[0]) m->host.own_peak[0] = own;
}

void gmi_host_slot_bind(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot) {
  set_free(m, slot, false);
  m->host.slots[slot].failure = GEMINI_OK;
  m->host.slots[slot].blank = false;
  gmi_chunk_slot_set(m, c, slot);
  count_used(m, 1);
}

void gmi_host_slot_drop(gmi_manager_t *m, gmi_chunk_t *c) {
  if (!gmi_chunk_has_slot(c) || gmi_chunk_in_graphs(c)) return; /* a graph's copies name the slot's address */
  uint32_t slot = gmi_chunk_slot(c);
  gmi_file_forgive(c);
  gmi_chunk_slot_set(m, c, GMI_NONE);
  set_free(m, slot, true);
  m->host.used -= gmi_slot_bytes(m);
  if (slot >= m->host.slot_count) decommit_from(m, m->config.host_bytes);
}

/* Blocks until no queued work uses a slot. Fails when a copy failed; a failed read stays in the chunk's record, and is
 * reported to the next caller that needs the chunk. The acquire load pairs with the release increment of work_done by
 * workers and transfers, so what they wrote into the slot is visible after it. */
static gemini_status_t slot_quiet(gmi_manager_t *m, gmi_slot_t *s) {
  if (atomic_load_explicit(&s->work_done, memory_order_acquire) < s->work_queued)
    gmi_workers_wait_slot(m, s, s->work_queued);
  gemini_status_t status = gmi_fence_sync(m, s->fence);
  if (!status) s->fence = 0;
  gmi_files_poll(m);
  return status;
}

void gmi_chunk_refilled(gmi_manager_t *m, gmi_chunk_t *c) {
  /* Wait for a read that is under way: its failure would otherwise be set after the reset below, for bytes that nobody
   * needs any more, and fail later users of the slot. */
  if (gmi_chunk_io(c)) (void)slot_quiet(m, &m->host.slots[gmi_chunk_slot(c)]);
  m->host.slots[gmi_chunk_slot(c)].failure = GEMINI_OK;
  gmi_file_forgive(c);
}

bool gmi_chunk_work_pending(const gmi_manager_t *m, const gmi_chunk_t *c) {
  if (!gmi_chunk_has_slot(c)) return false;
  const gmi_slot_t *s = slot_of(m, c);
  /* Acquire: as in slot_quiet(); the caller may use the bytes when this is false. */
  return atomic_load_explicit(&s->work_done, memory_order_acquire) < s->work_queued;
}

void gmi_chunk_copies_end(gmi_manager_t *m, gmi_chunk_t *c) {
  if (!gmi_chunk_has_slot(c)) return;
  const bool goes = gmi_chunk_slot(c) >= m->host.slot_count;      /* the memory, too: the slot is above the budget */
  if (goes || gmi_chunk_io(c)) (void)gmi_chunk_settle_host(m, c); /* a failure does not matter, nor does the copy's */
  else if (!gmi_fence_sync(m, slot_of(m, c)->fence)) slot_of(m, c)->fence = 0;
}

gemini_status_t gmi_chunk_settle_host(gmi_manager_t *m, gmi_chunk_t *c) {
  if (!gmi_chunk_has_slot(c)) return GEMINI_OK;
  gemini_status_t status = slot_quiet(m, slot_of(m, c));
  if (status || !gmi_chunk_failed_read(c) || !gmi_chunk_has(c, GMI_VALID_FILE))
    return status ? status : gmi_files_reap(m, c);
  /* Read again: the attempt that failed may be long past, for another caller or a read-ahead. Callers see only errors
   * of their own attempts. */
  status = gmi_file_read(m, c, GEMINI_REASON_DEMAND);
  if (!status) status = slot_quiet(m, slot_of(m, c));
  return status ? status : gmi_files_reap(m, c);
}

/* ---- spare slots, for speculate.c */
void gmi_host_iteration(gmi_manager_t *m) {
  m->host.own_peak[1] = m->host.own_peak[0];
  m->host.own_peak[0] = m->host.used - m->host.spare_count * gmi_slot_bytes(m);
  m->host.spare_looked = false;
  gmi_ahead_iteration(m);
}
void gmi_host_forget_peak(gmi_manager_t *m, uint64_t bytes) {
  const uint64_t own = m->host.used - m->host.spare_count * gmi_slot_bytes(m);
  for (int i = 0; i < 2; i++) {
    uint64_t *peak = &m->host.own_peak[i];
    if (*peak > own) *peak -= bytes < *peak - own ? bytes : *peak - own;
  }
}
uint32_t gmi_host_spare(const gmi_manager_t *m) {
  const uint64_t *peak = m->host.own_peak, own = peak[0] > peak[1] ? peak[0] : peak[1];
  uint64_t taken = own / gmi_slot_bytes(m) + m->host.spare_count;
  uint64_t left = m->host.slot_count > taken ? m->host.slot_count - taken : 0;
  return left < gmi_host_free(m) ? (uint32_t)left : gmi_host_free(m);
}
bool gmi_host_spare_is_committed(const gmi_manager_t *m, uint32_t count) {
  uint32_t slot;
  for (walk_t w = { 0 }; count && walk_free(m, &w, &slot);) count -= slot_is_committed(m, slot);
  return !count;
}
void gmi_host_spare_expect(gmi_manager_t *m, uint64_t count) {
  uint32_t slot;
  if (count > gmi_host_spare(m)) count = gmi_host_spare(m);
  for (walk_t w = { 0 }; count && walk_free(m, &w, &slot);) count -= slot_is_committed(m, slot);
  for (walk_t w = { 0 }; count && walk_free(m, &w, &slot);) {
    if (slot_is_committed(m, slot)) continue;
    gmi_ahead_expect(m, slot * gmi_slot_bytes(m) / m->host.part_bytes);
    count--;
  }
}
bool gmi_host_spare_take(gmi_manager_t *m, bool quiet, uint32_t *slot_out) {
  uint32_t slot = gmi_host_free(m) ? spare_choose(m, quiet) : GMI_NONE;
  if (slot == GMI_NONE || gmi_host_commit(m, slot * gmi_slot_bytes(m), gmi_slot_bytes(m))) return false;
  m->host.spare_hand = slot;
  m->host.spare_count++;
  m->host.slots[slot].spare = true;
  m->host.slots[slot].blank = false;
  m->host.slots[slot].failure = GEMINI_OK;
  set_free(m, slot, false);
  count_used(m, 1);
  *slot_out = slot;
  return true;
}
void gmi_host_spare_give(gmi_manager_t *m, uint32_t slot) {
  m->host.slots[slot].spare = false;
  m->host.spare_count--;
  m->host.used -= gmi_slot_bytes(m);
  set_free(m, slot, true);
}
void gmi_host_spare_bind(gmi_manager_t *m, uint32_t slot, gmi_chunk_t *c) {
  m->host.slots[slot].spare = false;
  m->host.spare_count--;
  uint32_t before = gmi_chunk_slot_change(m, c, slot);
  if (before != GMI_NONE) {
    m->host.used -= gmi_slot_bytes(m);
    set_free(m, before, true);
  }
  count_used(m, 0);
}

gemini_status_t gmi_host_room_soon(gmi_manager_t *m, uint32_t count, uint32_t ahead) {
  if (ahead < count) ahead = count;
  while (gmi_host_free(m) + m->io.writes < ahead) {
    bool freed, started;
    gemini_status_t status = gmi_host_reclaim(m, &freed, &started);
    if (status == GEMINI_ERR_OOM_FILE) break; /* reported by gmi_host_room(), when the slots are needed */
    if (status) return status;
    if (!freed && !started) break;
  }
  return GEMINI_OK;
}

/* Repeats: start as many writes as slots are missing, then wait until one job or transfer ends, and look again. The
 * count of ended work is read before the scan and compared after it, so that work which ends during the scan is not
 * missed. OOM_FILE is no error while work is under way: a chunk read from a file leaves a block free, with which the
 * next write succeeds, so one spare block is enough. The wait keeps the manager's lock, which workers and the I/O
 * engine do not need. */
gemini_status_t gmi_host_room(gmi_manager_t *m, uint32_t count) {
  gmi_specs_room(m, count);
  if (gmi_host_free(m) >= count) return GEMINI_OK;
  /* Failures of earlier writes are logged, not returned: the writes that this call starts may succeed. */
  if (gmi_files_reap(m, NULL)) gmi_log(m, GEMINI_LOG_WARNING, "%s", gmi_fail_message());
  while (gmi_host_free(m) < count) {
    bool freed, started;
    uint64_t events = gmi_workers_finished(m);
    gemini_status_t status = gmi_host_reclaim(m, &freed, &started);
    if (status && status != GEMINI_ERR_OOM_FILE) return status;
    if (!status && (freed || (started && m->io.writes < count - gmi_host_free(m)))) continue;
    bool busy = gmi_workers_pending(m) || m->io.count; /* read before the count below, which the last end changes */
    if (gmi_workers_finished(m) != events) continue;
    if (!busy) {
      if (status) return status;
      return gmi_fail(
          GEMINI_ERR_OOM_HOST, 0, "%s %llu bytes %s not fit in host memory: %llu of the budget %llu are in use%s",
          count > 1 ? "slots that take" : "a slot of", (unsigned long long)(count * gmi_slot_bytes(m)),
          count > 1 ? "do" : "does", (unsigned long long)m->host.used, (unsigned long long)m->config.host_bytes,
          m->file.store ? " by chunks that are acquired, and by gemini_host_alloc()" : " and there is no file tier");
    }
    gmi_workers_wait(m, events, GMI_WAIT_ROOM, 0); /* until an update or a transfer ends: reclaim can use its slots */
  }
  return GEMINI_OK;
}

/* Adds up what cannot leave the host: blocks, chunks whose only copy is there, and chunks whose slot is in use. */
gemini_status_t gmi_host_fits(gmi_manager_t *m, const char *what, uint64_t need_bytes,
                              bool (*inside)(const void *user, const gmi_chunk_t *c), const void *user) {
  uint64_t taken = 0;
  if (m->file.store) return GEMINI_OK;
  for (uint32_t s = 0; s < m->host.slot_most; s++) {
    const gmi_chunk_t *c = m->host.slots[s].chunk;
    if (m->host.slots[s].block) taken += gmi_slot_bytes(m);
    if (!c || inside(user, c)) continue;
    bool clean =
        !gmi_chunk_has(c, GMI_VALID_HOST) || gmi_chunk_has(c, GMI_VALID_DEVICE | GMI_VALID_ZERO | GMI_VALID_FILE);
    if (!clean || gmi_chunk_host_users(c) || gmi_chunk_in_graphs(c)) taken += gmi_slot_bytes(m);
  }
  if (taken + need_bytes <= m->config.host_bytes) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                  "%s needs %llu bytes of host memory, but of the budget %llu, other chunks and blocks hold %llu", what,
                  (unsigned long long)need_bytes, (unsigned long long)m->config.host_bytes, (unsigned long long)taken);
}

/* blank: the slot's memory reads as zeros. */
static gemini_status_t slot_assign(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot, bool *blank_out) {
  gemini_status_t status = gmi_host_commit(m, slot * gmi_slot_bytes(m), gmi_slot_bytes(m));
  if (status) return status;
  *blank_out = m->host.slots[slot].blank;
  gmi_host_slot_bind(m, c, slot);
  return GEMINI_OK;
}

gemini_status_t gmi_host_slot_take_blank(gmi_manager_t *m, gmi_chunk_t *c, bool *blank_out) {
  *blank_out = false;
  if (gmi_chunk_has_slot(c)) return GEMINI_OK;
  gemini_status_t status = gmi_host_room(m, 1);
  return status ? status : slot_assign(m, c, choose_slot(m, c), blank_out);
}
gemini_status_t gmi_host_slot_take(gmi_manager_t *m, gmi_chunk_t *c) {
  bool blank;
  return gmi_host_slot_take_blank(m, c, &blank);
}

bool gmi_host_slot_take_now(gmi_manager_t *m, gmi_chunk_t *c, uint64_t use) {
  bool blank;
  if (gmi_chunk_has_slot(c)) return true;
  if (!gmi_host_free(m) && !gmi_host_clean_leave(m, use)) return false;
  return gmi_host_free(m) && !slot_assign(m, c, choose_slot(m, c), &blank);
}

/* ---- runs: chunks of one range in adjacent slots, in arena order */
static bool together(const gmi_arena_t *store, uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (!gmi_chunk_has_slot(&store->chunks[first + i]) ||
        gmi_chunk_slot(&store->chunks[first + i]) != gmi_chunk_slot(&store->chunks[first]) + i)
      return false;
  return true;
}

/* Can a slot's content move? An empty slot can. */
static bool movable(const gmi_chunk_t *c) { return !c || gmi_chunk_may_move(c); }

/* The cost of placing the run at slot, in moves of a chunk's bytes; UINT32_MAX: impossible. A chunk of the run that has
 * another slot costs one move. A chunk that is in the way costs three: it moves, and having lost its neighbours it is
 * likely to move back later, with another exchange. */
static uint32_t run_cost(const gmi_manager_t *m, const gmi_arena_t *store, uint32_t first, uint32_t count,
                         uint32_t slot) {
  if (slot > m->host.slot_count || count > m->host.slot_count - slot) return UINT32_MAX;
  uint32_t cost = 0;
  for (uint32_t i = 0; i < count; i++) {
    const gmi_chunk_t *want = &store->chunks[first + i], *is = m->host.slots[slot + i].chunk;
    if (is == want) continue;
    if (m->host.slots[slot + i].block || m->host.slots[slot + i].spare || !movable(is) || !movable(want))
      return UINT32_MAX;
    cost += (gmi_chunk_has_slot(want) ? 1U : 0U) + (is ? 3U : 0U);
  }
  return cost;
}

static void swap_bytes(uint8_t *a, uint8_t *b, uint64_t bytes) {
  uint8_t held[4096];
  for (uint64_t at = 0; at < bytes; at += sizeof held) {
    memcpy(held, a + at, sizeof held);
    memcpy(a + at, b + at, sizeof held);
    memcpy(b + at, held, sizeof held);
  }
}

/* Exchanges the contents of two slots, one of which may be empty. Blocks until both are quiet, so fences and work
 * counts, which belong to the slots, need no exchange; the failure of a read belongs to the bytes and moves with them.
 * A failure leaves both as they were. */
static gemini_status_t exchange(gmi_manager_t *m, uint32_t a, uint32_t b) {
  gemini_status_t status = slot_quiet(m, &m->host.slots[a]);
  if (!status) status = slot_quiet(m, &m->host.slots[b]);
  gmi_chunk_t *wa = m->host.slots[a].chunk, *wb = m->host.slots[b].chunk;
  for (int i = 0; i < 2 && !status; i++) /* an empty slot may have no memory yet */
    status = gmi_host_commit(m, (i ? b : a) * gmi_slot_bytes(m), gmi_slot_bytes(m));
  if (status) return status;
  bool bytes_a = wa && gmi_chunk_has(wa, GMI_VALID_HOST), bytes_b = wb && gmi_chunk_has(wb, GMI_VALID_HOST);
  uint8_t *pa = gmi_slot_address(m, a), *pb = gmi_slot_address(m, b);
  if (bytes_a && bytes_b) swap_bytes(pa, pb, gmi_slot_bytes(m));
  else if (bytes_a) memcpy(pb, pa, gmi_slot_bytes(m));
  else if (bytes_b) memcpy(pa, pb, gmi_slot_bytes(m));
  gemini_status_t failure = m->host.slots[a].failure;
  char *failure_text = m->host.slots[a].failure_text;
  m->host.slots[a].failure = m->host.slots[b].failure;
  m->host.slots[a].failure_text = m->host.slots[b].failure_text;
  m->host.slots[b].failure = failure;
  m->host.slots[b].failure_text = failure_text;
  m->host.slots[a].blank = m->host.slots[b].blank = false;
  gmi_chunk_slots_exchange(m, a, b);
  if (!wa != !wb) {
    set_free(m, a, !wb);
    set_free(m, b, !wa);
  }
  return GEMINI_OK;
}

/* Chooses where the run is to lie, then moves its chunks there one by one. A failure between two moves leaves every
 * chunk with valid bytes in some slot, so nothing is undone. */
gemini_status_t gmi_host_run(gmi_manager_t *m, gmi_arena_t *store, uint32_t first, uint32_t count) {
  if (count > 1 && gmi_slot_bytes(m) != gmi_chunk_bytes(m)) /* side by side, there are gaps between them */
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "%u chunks of arena %s have no common range of host memory: a slot has %llu bytes, a chunk %llu",
                    count, store->name, (unsigned long long)gmi_slot_bytes(m), (unsigned long long)gmi_chunk_bytes(m));
  if (together(store, first, count)) return GEMINI_OK;
  gmi_specs_drop(m); /* they must be in nobody's way */
  uint32_t missing = 0;
  for (uint32_t i = 0; i < count; i++) {
    gmi_chunk_t *c = &store->chunks[first + i];
    missing += !gmi_chunk_has_slot(c);
    gmi_chunk_hold_host(m, c, false); /* making room for the others must not reclaim this one's slot */
  }
  gemini_status_t status = gmi_host_room(m, missing);
  for (uint32_t i = 0; i < count; i++) gmi_chunk_unhold_host(m, &store->chunks[first + i], false);
  if (status) return status;
  uint32_t best = GMI_NONE, least = UINT32_MAX, home = home_of(m, &store->chunks[first]);
  /* When the budget has a home slot for every chunk, moving runs home converges: after a few calls nothing moves. */
  if (m->host.home_end <= m->host.slot_count && run_cost(m, store, first, count, home) != UINT32_MAX) best = home;
  /* Otherwise the cheapest of a few candidates: where one of the chunks can stay in its slot, home, the first free run.
   * If all are impossible, any position. */
  for (uint32_t i = 0; best == GMI_NONE && i < count + 2; i++) {
    uint32_t slot = i == count       ? home
                    : i == count + 1 ? free_run(m, home, count)
                                     : gmi_chunk_slot(&store->chunks[first + i]);
    if (i < count && (slot == GMI_NONE || slot < i)) continue;
    if (i < count) slot -= i;
    uint32_t cost = slot == GMI_NONE ? UINT32_MAX : run_cost(m, store, first, count, slot);
    if (cost < least) least = cost, best = slot;
  }
  for (uint32_t slot = 0; best == GMI_NONE && slot < m->host.slot_count; slot++) {
    uint32_t cost = run_cost(m, store, first, count, slot);
    if (cost < least) least = cost, best = slot;
  }
  if (best == GMI_NONE)
    return gmi_fail(
        GEMINI_ERR_OOM_HOST, 0,
        "%u chunks of arena %s cannot be adjacent in host memory: chunks that are acquired lie between them, in "
        "a budget of %llu bytes",
        count, store->name, (unsigned long long)m->config.host_bytes);
  for (uint32_t i = 0; i < count && !status; i++) {
    gmi_chunk_t *c = &store->chunks[first + i];
    uint32_t slot = best + i;
    if (gmi_chunk_slot(c) == slot) continue;
    if (gmi_chunk_has_slot(c)) {
      status = exchange(m, gmi_chunk_slot(c), slot);
      continue;
    }
    if (!is_free(m, slot)) {
      /* Move the occupant to a free slot outside the run. One exists: room was made for each chunk without a slot. */
      uint32_t other = free_run(m, best + count < m->host.slot_count ? best + count : 0, 1);
      if (other >= best && other < best + count) other = free_run(m, 0, 1);
      status = exchange(m, slot, other);
    }
    bool blank;
    if (!status) status = slot_assign(m, c, slot, &blank);
  }
  return status;
}

/* ---- budgets */
/* Returns memory above the budget to the system, except parts that still hold chunks or blocks above slot_count. */
static void decommit_from(gmi_manager_t *m, uint64_t budget) {
  budget = gmi_host_grains(m, budget);
  for (uint64_t part = budget / m->host.part_bytes; part < m->host.part_count; part++) {
    uint64_t base = part * m->host.part_bytes, keep = budget > base ? budget - base : 0, end = base;
    if (m->host.committed[part] <= keep) continue;
    end += m->host.committed[part];
    bool used = false;
    for (uint64_t s = (base + keep) / gmi_slot_bytes(m); s * gmi_slot_bytes(m) < end; s++)
      used |= s >= m->host.slot_count && (m->host.slots[s].chunk || m->host.slots[s].block);
    if (!used) gmi_host_part_set(m, part, keep, false); /* a failure keeps the memory committed, which does no harm */
  }
}

/* Shrinking: reclaims until the chunks fit, forbids slots above the budget, moves the chunks that lie there, and
 * returns the memory. A chunk whose address a caller or a graph has cannot move; gmi_host_released() moves it later. */
gemini_status_t gmi_host_resize(gmi_manager_t *m, uint64_t bytes) {
  if (bytes > gmi_reserve_size(m->host.reserve))
    return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                    "a host budget of %llu bytes is more than %llu, the limit set when the manager was opened",
                    (unsigned long long)bytes, (unsigned long long)gmi_reserve_size(m->host.reserve));
  if (bytes > m->config.host_bytes) {
    gmi_limits_t limits;
    gemini_status_t status = gmi_limits_read("", &limits);
    if (!status)
      status = gmi_limits_check(&limits, "the growth of the host budget", bytes - m->config.host_bytes, false);
    if (status) return status;
  }
  if (!atomic_load(&m->cut.chunk_bytes)) return GEMINI_OK;
  uint32_t count = budget_slots(m, bytes);
  if (count < m->host.slot_count) {
    /* Queue deferred updates first: one of their pieces may need more slots at once than the smaller budget has. */
    gemini_status_t status = gmi_updates_queue(m, NULL);
    if (status) return status;
    gmi_specs_drop(m);
    gmi_workers_drain(m, NULL); /* their jobs still use memory that is about to go */
  }
  while (m->host.used > count * gmi_slot_bytes(m)) {
    gemini_status_t status = gmi_host_room(m, gmi_host_free(m) + 1);
    if (status == GEMINI_ERR_OOM_HOST)
      return gmi_fail(status, 0, "%llu bytes must stay in host memory, more than the new budget, %llu",
                      (unsigned long long)m->host.used, (unsigned long long)bytes);
    if (status) return status;
  }
  use_slots(m, bytes);
  for (uint32_t s = m->host.slot_count; s < m->host.slot_most; s++) {
    gmi_chunk_t *c = m->host.slots[s].chunk;
    uint32_t inside = c && movable(c) ? free_run(m, 0, 1) : GMI_NONE;
    gemini_status_t status = inside != GMI_NONE ? exchange(m, s, inside) : GEMINI_OK;
    if (status) {
      use_slots(m, m->config.host_bytes);
      return status;
    }
  }
  decommit_from(m, bytes);
  return GEMINI_OK;
}

void gmi_host_released(gmi_manager_t *m, gmi_chunk_t *c) {
  if (gmi_chunk_has_slot(c) && gmi_chunk_slot(c) >= m->host.slot_count && movable(c)) {
    uint32_t behind = gmi_chunk_slot(c), inside = free_run(m, 0, 1);
    if (inside != GMI_NONE && exchange(m, behind, inside) == GEMINI_OK) decommit_from(m, m->config.host_bytes);
  }
}

/* ---- heap blocks (gemini_host_alloc): a heap that takes whole slots, from the top of the budget downwards
 *
 * The two functions below are its callbacks, called under the manager's lock from host_alloc() and host_free(). */

/* Takes the slots of [offset, offset + size) for the heap: moves chunks out, waits for copies queued on the slots, and
 * commits their memory. A failure gives back the slots taken so far. */
static gemini_status_t slots_to_blocks(void *user, uint64_t offset, uint64_t size) {
  gmi_manager_t *m = user;
  uint32_t first = (uint32_t)(offset / gmi_slot_bytes(m)), end = (uint32_t)((offset + size) / gmi_slot_bytes(m));
  gemini_status_t status = GEMINI_OK;
  uint32_t slot = first;
  gmi_specs_drop(m);
  for (; !status && slot < end; slot++) {
    if (slot >= m->host.slot_count)
      status = gmi_fail(
          GEMINI_ERR_BUSY, 0,
          "the host budget was reduced to %llu bytes while blocks of gemini_host_alloc() exist: free them first",
          (unsigned long long)m->config.host_bytes);
    if (!status) status = gmi_host_room(m, 1);
    if (!status && !is_free(m, slot)) {
      uint32_t other = free_run(m, 0, 1);
      if (!movable(m->host.slots[slot].chunk))
        status = gmi_fail(GEMINI_ERR_BUSY, 0,
                          "a chunk of arena %s, acquired or used by a graph, cannot make room for a block",
                          gmi_chunk_arena(m, m->host.slots[slot].chunk)->name);
      else status = exchange(m, slot, other);
    }
    if (!status) status = slot_quiet(m, &m->host.slots[slot]);
    if (!status) status = gmi_host_commit(m, slot * gmi_slot_bytes(m), gmi_slot_bytes(m));
    if (status) break;
    set_free(m, slot, false);
    m->host.slots[slot].block = true;
    m->host.slots[slot].blank = false;
    count_used(m, 1);
  }
  while (status && slot-- > first) {
    m->host.slots[slot].block = false;
    set_free(m, slot, true);
    m->host.used -= gmi_slot_bytes(m);
  }
  return status;
}

static void slots_from_blocks(void *user, uint64_t offset, uint64_t size) {
  gmi_manager_t *m = user;
  for (uint64_t slot = offset / gmi_slot_bytes(m); slot < (offset + size) / gmi_slot_bytes(m); slot++) {
    m->host.slots[slot].block = false;
    set_free(m, (uint32_t)slot, true);
    m->host.used -= gmi_slot_bytes(m);
  }
  if ((offset + size) / gmi_slot_bytes(m) > m->host.slot_count) decommit_from(m, m->config.host_bytes);
}

/* The number of live heap blocks, and their bytes. */
static gmi_host_heap_figures_t blocks_figures(const gmi_manager_t *m) {
  gmi_host_heap_figures_t figures = { 0 };
  if (m->host.heap) gmi_host_heap_figures(m->host.heap, &figures);
  return figures;
}
uint64_t gmi_host_allocs(gmi_manager_t *m) { return blocks_figures(m).block_bytes; }

static gemini_status_t host_alloc(gmi_manager_t *m, uint64_t size, uint64_t alignment, void **ptr_out) {
  if (!ptr_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "ptr_out is NULL");
  if (!size) return gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is 0");
  if (alignment & (alignment - 1) || alignment > (UINT64_C(1) << 21))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "alignment is %llu, must be a power of two up to 2 MiB",
                    (unsigned long long)alignment);
  if (size > m->config.host_bytes)
    return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "size_bytes is %llu, more than the host budget, %llu",
                    (unsigned long long)size, (unsigned long long)m->config.host_bytes);
  gemini_status_t status = gmi_cut(m);
  if (!status && !m->host.slot_count)
    status = gmi_fail(GEMINI_ERR_OOM_HOST, 0, "the host budget, %llu bytes, is less than one chunk takes there, %llu",
                      (unsigned long long)m->config.host_bytes, (unsigned long long)gmi_slot_bytes(m));
  if (!status && m->host.heap && !blocks_figures(m).block_count && m->host.block_slots != m->host.slot_count) {
    gmi_host_heap_end(m); /* the budget has changed: open a heap of the new size; an old one with live blocks stays */
  }
  if (!status && !m->host.heap) {
    m->host.block_slots = m->host.slot_count;
    gmi_host_heap_config_t config = { .base = m->host.base,
                                      .size_bytes = m->host.slot_count * gmi_slot_bytes(m),
                                      .grain_bytes = gmi_slot_bytes(m),
                                      .commit = slots_to_blocks,
                                      .decommit = slots_from_blocks,
                                      .user = m };
    status = gmi_host_heap_open(&config, &m->host.heap);
  }
  void *block = NULL;
  if (!status) status = gmi_host_heap_alloc(m->host.heap, size, alignment, &block);
  if (status == GEMINI_ERR_BUSY) status = gmi_fail(GEMINI_ERR_OOM_HOST, 0, "%s", gmi_fail_message());
  if (status) return status;
  gmi_stat_set(&m->stats.host_alloc_bytes, gmi_host_allocs(m));
  *ptr_out = block;
  return GEMINI_OK;
}
gemini_status_t gemini_host_alloc(gemini_manager_t mgr, uint64_t size_bytes, uint64_t alignment, void **ptr_out) {
  API_LOCKED(host_alloc(m, size_bytes, alignment, ptr_out));
}

static gemini_status_t host_free(gmi_manager_t *m, void *ptr) {
  if (!ptr) return GEMINI_OK;
  gemini_status_t status = m->host.heap ? gmi_host_heap_free(m->host.heap, ptr) : GEMINI_ERR_INVALID;
  if (status == GEMINI_ERR_INVALID)
    return gmi_fail(status, 0, "%p is not the start of a live block of this manager", ptr);
  gmi_stat_set(&m->stats.host_alloc_bytes, gmi_host_allocs(m));
  gmi_updates_room(m);
  return status;
}
gemini_status_t gemini_host_free(gemini_manager_t mgr, void *ptr) { API_LOCKED(host_free(m, ptr)); }
