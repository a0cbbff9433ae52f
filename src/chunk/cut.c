/* The cut of arenas into chunks: the choice of the chunk size, the tables that depend on it, and a change of the size
 * ("a new cut") once the access order is known. SPDX-License-Identifier: Apache-2.0
 *
 * All tables that depend on the chunk size are in gmi_cut_t. A cut is prepared as a whole, which may fail and changes
 * nothing, and is then installed, which cannot fail. Everything runs under the manager's lock on the caller's
 * thread. */
#include "chunk/cut.h"
#include "base/space.h"
#include "chunk/arena.h"
#include "chunk/files.h"
#include "chunk/heap.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/speculate.h"
#include "core/workers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "policy/policy.h"

#define CHUNK_MIN UINT64_C(65536)
#define BLOCK_UNIT UINT64_C(4096) /* the largest alignment that direct I/O asks for */

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

/* ---- the sizes */
gmi_sizes_padding_t gmi_sizes_padding;

static bool is_power_of_2(uint64_t value) { return value && !(value & (value - 1)); }

/* What must hold between the sizes today, and what relies on it:
 * - a chunk is a power of two: addresses are cut by shifts;
 * - a frame is mapped over its chunk's whole span, so it is as large, and a power of two (page_of());
 * - a slot holds all bytes of its chunk, because a chunk's host addresses are those of its slot (gmi_chunk_host()).
 *   With larger slots, chunks in slots side by side leave gaps: gmi_host_run() refuses several, and gmi_recut() is not
 *   possible;
 * - a slot is a power of two, so that none lies in two parts that are page-locked each on its own;
 * - a block holds all that a slot does, and is a multiple of what direct I/O needs.
 * A sharded arena (chunk/shard.h) keeps to this: its whole chunks have no slots, and its slices are packed into chunks
 * of an ordinary arena. */
static void gmi_cut_check(const gmi_sizes_t *s) {
  GMI_ASSERT(is_power_of_2(s->chunk_bytes));
  GMI_ASSERT(s->frame_bytes == s->chunk_bytes);
  GMI_ASSERT(is_power_of_2(s->slot_bytes) && s->slot_bytes >= s->frame_bytes);
  GMI_ASSERT(s->block_bytes % BLOCK_UNIT == 0 && s->block_bytes >= s->slot_bytes);
  GMI_ASSERT(gmi_sizes_copy_bytes(s, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST) == s->chunk_bytes);
}

gmi_sizes_t gmi_sizes_of(const gmi_manager_t *m, uint64_t chunk_bytes) {
  gmi_sizes_t s = { .chunk_bytes = chunk_bytes, .frame_bytes = chunk_bytes };
  s.slot_bytes = s.frame_bytes << m->cut.padding.slot_shift;
  s.block_bytes = round_up(s.slot_bytes, BLOCK_UNIT) + m->cut.padding.block_bytes;
  gmi_cut_check(&s);
  return s;
}

uint64_t gmi_chunk_min(gmi_manager_t *m) {
  if (m->config.chunk_bytes) return m->config.chunk_bytes;
  uint64_t least = m->device.granularity > CHUNK_MIN ? m->device.granularity : CHUNK_MIN;
  const uint64_t slices = gmi_slices_chunk_min(m);
  while (least < slices) least *= 2;
  return least;
}

uint64_t gmi_chunk_search(gmi_manager_t *m, const gmi_chunk_use_t *uses, uint64_t count, uint64_t nonmodel,
                          uint64_t bytes_per_s) {
  gmi_chunk_search_t search = { .uses = uses,
                                .use_count = count,
                                .min_bytes = gmi_chunk_min(m),
                                .device_bytes = m->config.device_bytes - m->config.device_margin_bytes,
                                .overhead_ns = m->device.ops->chunk_overhead_ns,
                                .bytes_per_s = bytes_per_s ? bytes_per_s : m->device.ops->link_bytes_per_s };
  search.max_bytes = search.min_bytes;
  while (search.max_bytes < GMI_CHUNK_MAX && search.max_bytes * 2 <= search.device_bytes / 16) search.max_bytes *= 2;
  search.nonmodel_bytes = nonmodel < search.device_bytes ? nonmodel : 0;
  return count ? gmi_chunk_size_search(&search) : search.min_bytes;
}

/* The first choice, before any access order is recorded: assumes that each tensor is one operator, in the order of
 * registration. */
static gemini_status_t first_chunk(gmi_manager_t *m, uint64_t *chunk_out) {
  gmi_chunk_use_t *uses = calloc(m->tensors.alive ? m->tensors.alive : 1, sizeof *uses);
  if (!uses) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to choose the chunk size");
  uint64_t count = 0;
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    gmi_tensor_t *t = &m->tensors.at[i];
    if (!gmi_tensor_alive(t) || t->base != i) continue;
    uses[count] = (gmi_chunk_use_t){ ((uint64_t)t->arena << 46) + t->offset, t->size, (uint32_t)count, 0 };
    count++;
  }
  uint64_t usable = m->config.device_bytes - m->config.device_margin_bytes;
  *chunk_out = gmi_chunk_search(m, uses, count, usable / 4, m->config.sim_d2h_bytes_per_s);
  free(uses);
  return GEMINI_OK;
}

/* ---- tables */
static void cut_discard(gmi_cut_t *cut) {
  if (!cut) return;
  free(cut->frames);
  free(cut->unmade);
  gmi_heap_destroy(cut->heap);
  gmi_space_free(cut->pages, cut->page_map_bytes);
  gmi_space_free(cut->slots, cut->slot_map_bytes);
  gmi_space_free(cut->free_map, cut->free_map_bytes);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) gmi_space_free(cut->chunks[i], cut->chunk_map_bytes[i]);
  free(cut);
}

static gemini_status_t chunks_prepare(gmi_manager_t *m, gmi_cut_t *cut) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_has_chunks(a)) continue;
    cut->chunk_map_bytes[i] = (a->capacity >> cut->shift) * sizeof(gmi_chunk_t);
    cut->chunks[i] = gmi_space(cut->chunk_map_bytes[i]);
    if (!cut->chunks[i])
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address space for the %llu chunks of arena %s",
                      (unsigned long long)(a->capacity >> cut->shift), a->name);
  }
  return GEMINI_OK;
}

static gemini_status_t cut_prepare(gmi_manager_t *m, uint64_t chunk_bytes, gmi_cut_t **cut_out) {
  gmi_cut_t *cut = calloc(1, sizeof *cut);
  if (!cut) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the chunk tables");
  cut->sizes = gmi_sizes_of(m, chunk_bytes);
  cut->shift = (uint32_t)__builtin_ctzll(chunk_bytes);
  gemini_status_t status = gmi_frames_prepare(m, cut);
  if (!status) status = gmi_heap_prepare(m, cut);
  if (!status) status = gmi_host_prepare(m, cut);
  if (!status) status = chunks_prepare(m, cut);
  if (status) cut_discard(cut);
  else *cut_out = cut;
  return status;
}

/* Installs the tables of cut, and frees cut. All chunks read as zeros afterwards. chunk_bytes is stored (release)
 * behind all tables: the fast path of acquire loads it (acquire) before it uses them. */
static void cut_install(gmi_manager_t *m, gmi_cut_t *cut) {
  m->cut.chunk_shift = cut->shift;
  m->cut.chunk_count = 0;
  atomic_store(&m->cut.frame_bytes, cut->sizes.frame_bytes);
  m->cut.frame_shift = (uint32_t)__builtin_ctzll(cut->sizes.frame_bytes);
  m->cut.slot_bytes = cut->sizes.slot_bytes;
  m->cut.block_bytes = cut->sizes.block_bytes;
  gmi_frames_install(m, cut);
  gmi_heap_install(m, cut);
  gmi_host_install(m, cut);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_has_chunks(a)) continue;
    a->chunks = cut->chunks[i];
    a->chunk_map_bytes = cut->chunk_map_bytes[i];
    atomic_store(&a->chunk_count, 0);
    cut->chunks[i] = NULL;
  }
  atomic_store_explicit(&m->cut.chunk_bytes, cut->sizes.chunk_bytes, memory_order_release);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a) (void)gmi_arena_grow(m, a); /* cannot fail: the records have their space */
  }
  cut_discard(cut);
}

gemini_status_t gmi_cut(gmi_manager_t *m) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  if (atomic_load(&m->cut.chunk_bytes)) return GEMINI_OK;
  uint64_t chunk_bytes = m->config.chunk_bytes;
  gmi_cut_t *cut;
  gemini_status_t status = chunk_bytes ? GEMINI_OK : first_chunk(m, &chunk_bytes);
  if (!status) status = gmi_slices_resize(m, chunk_bytes);
  if (!status) status = cut_prepare(m, chunk_bytes, &cut);
  if (status) return status;
  status = gmi_files_cut(m, cut->sizes.block_bytes);
  if (status) {
    cut_discard(cut);
    return status;
  }
  cut_install(m, cut);
  gmi_log(m, GEMINI_LOG_INFO, "chunks of %llu bytes, %u device frames", (unsigned long long)chunk_bytes,
          m->frames.count);
  return GEMINI_OK;
}

/* ---- a new cut */

/* An acquire without the lock uses chunks only after it has added a user to a tensor's word. While all tensors are
 * frozen and have no users, only the lock's holder uses chunks; a new acquire finds FROZEN, takes the slow path and
 * waits for the lock. fetch_or sets the bit and returns the users in one step, so no acquire can come in between. (A
 * release may still have users in chunks' words: recut_possible() looks at these too.) tensors_freeze() returns false,
 * with no tensor frozen, if a tensor has users. */
static void tensors_thaw(gmi_manager_t *m, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) atomic_fetch_and(&m->tensors.at[i].word, ~GMI_TENSOR_FROZEN);
}
static bool tensors_freeze(gmi_manager_t *m) {
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    if (!(atomic_fetch_or(&m->tensors.at[i].word, GMI_TENSOR_FROZEN) & GMI_TENSOR_USERS)) continue;
    tensors_thaw(m, i + 1);
    return false;
  }
  return true;
}

/* The bytes are moved to their new places through the host tier as one range, so all of them must fit there, slots must
 * leave no gaps, and nothing may be in use. */
static bool recut_possible(gmi_manager_t *m, uint64_t chunk_bytes) {
  gmi_sizes_t new = gmi_sizes_of(m, chunk_bytes);
  uint64_t need = 0;
  if (new.slot_bytes != chunk_bytes || gmi_slot_bytes(m) != gmi_chunk_bytes(m)) return false;
  if (m->config.chunk_bytes || m->file.store || m->file.borrowed || m->graphs.count || gmi_host_allocs(m) ||
      (m->nonmodel.heap && gmi_heap_blocks_used(m->nonmodel.heap)))
    return false;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_is_sharded(a)) return false;
    for (uint32_t k = 0; a && a->chunks && k < atomic_load(&a->chunk_count); k++) {
      gmi_chunk_t *c = &a->chunks[k];
      if (gmi_chunk_device_users(c) || gmi_chunk_host_users(c) || gmi_chunk_is_loading(c) || gmi_chunk_is_pinned(c) ||
          gmi_chunk_deferred(c))
        return false;
      if (gmi_chunk_has_slot(c) && gmi_chunk_slot(c) >= m->host.slot_count) return false;
    }
    if (a && a->store == i) {
      need += round_up(atomic_load(&a->size), chunk_bytes) / chunk_bytes * new.slot_bytes;
      if (a->capacity % chunk_bytes) return false;
    }
  }
  return need <= m->config.host_bytes && m->config.device_bytes - m->config.device_margin_bytes >= new.frame_bytes;
}

bool gmi_recut_possible(gmi_manager_t *m, uint64_t chunk_bytes) {
  if (!atomic_load(&m->cut.chunk_bytes) || !tensors_freeze(m)) return false;
  bool possible = recut_possible(m, chunk_bytes);
  tensors_thaw(m, m->tensors.high);
  return possible;
}

/* The host tier in parts of the smaller of the two chunk sizes, and the permutation that moves them to their new
 * places. */
typedef struct {
  uint64_t bytes, count;
  uint32_t *goes;   /* [count] index of the part's new place; GMI_NONE: the part holds nothing */
  uint8_t *scratch; /* [bytes] */
} parts_t;

/* Applies the permutation in place, cycle by cycle, with one part of scratch memory. */
static void parts_move(gmi_manager_t *m, parts_t *p) {
  for (uint64_t at = 0; at < p->count; at++) {
    while (p->goes[at] != GMI_NONE && p->goes[at] != at) { /* until the part that belongs here has come */
      uint32_t to = p->goes[at];
      uint8_t *a = m->host.base + at * p->bytes, *b = m->host.base + to * p->bytes;
      if (p->goes[to] != GMI_NONE) memcpy(p->scratch, b, p->bytes);
      memcpy(b, a, p->bytes);
      if (p->goes[to] != GMI_NONE) memcpy(a, p->scratch, p->bytes);
      p->goes[at] = p->goes[to];
      p->goes[to] = to;
    }
  }
}

typedef struct {
  gmi_chunk_t *chunks;
  uint64_t map_bytes;
  uint32_t count;
} old_cut_t;

/* Moves every valid host byte to the home slot that it has under the new cut. */
static void go_home(gmi_manager_t *m, const old_cut_t *old, uint32_t old_shift, parts_t *p) {
  uint64_t chunk_bytes = UINT64_C(1) << m->cut.chunk_shift, old_chunk = UINT64_C(1) << old_shift;
  memset(p->goes, 0xff, p->count * sizeof *p->goes);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; k < old[i].count; k++) {
      if (!gmi_chunk_has(&old[i].chunks[k], GMI_VALID_HOST)) continue;
      uint64_t from = (uint64_t)gmi_chunk_slot(&old[i].chunks[k]) << old_shift, offset = (uint64_t)k << old_shift;
      uint64_t to = a->home * gmi_slot_bytes(m) + offset, end = round_up(atomic_load(&a->size), chunk_bytes);
      for (uint64_t at = 0; at < old_chunk && offset + at < end; at += p->bytes)
        p->goes[(from + at) / p->bytes] = (uint32_t)((to + at) / p->bytes);
    }
  }
  parts_move(m, p);
}

/* Sets the new records of an arena, whose bytes are in their home slots. Old chunks that read as zeros are written as
 * zeros where they share a new chunk with other bytes. So is the part of the last new chunk that no old chunk covers,
 * as the arena may grow into it. */
static void recut_arena(gmi_manager_t *m, gmi_arena_t *a, const old_cut_t *old, uint32_t old_shift) {
  uint64_t chunk_bytes = UINT64_C(1) << m->cut.chunk_shift, old_chunk = UINT64_C(1) << old_shift;
  for (uint32_t k = 0; k < atomic_load(&a->chunk_count); k++) {
    uint64_t begin = k * chunk_bytes, end = begin + chunk_bytes;
    bool any = false;
    for (uint64_t o = begin >> old_shift; o < old->count && o * old_chunk < end; o++)
      any |= !gmi_chunk_has(&old->chunks[o], GMI_VALID_ZERO);
    if (!any) continue;
    gmi_host_slot_bind(m, &a->chunks[k], a->home + k);
    for (uint64_t o = begin >> old_shift; o < old->count && o * old_chunk < end; o++) {
      uint64_t from = o * old_chunk > begin ? o * old_chunk : begin;
      uint64_t to = (o + 1) * old_chunk < end ? (o + 1) * old_chunk : end;
      if (gmi_chunk_has(&old->chunks[o], GMI_VALID_ZERO)) memset(gmi_range_host(m, a, from), 0, to - from);
    }
    uint64_t covered = old->count * old_chunk;
    if (covered < end) memset(gmi_range_host(m, a, covered), 0, end - covered);
    gmi_chunk_host_wrote(m, &a->chunks[k]);
  }
}

/* Moves all bytes to the host and commits memory for their new home slots. After a failure fewer chunks are resident
 * than before; nothing else has changed. */
static gemini_status_t recut_gather(gmi_manager_t *m, uint64_t chunk_bytes) {
  gemini_status_t status = GEMINI_OK;
  gmi_workers_drain(m, NULL);
  for (uint32_t i = 0; i < GMI_ARENAS && !status; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; !status && a && a->chunks && k < atomic_load(&a->chunk_count); k++) {
      status = gmi_chunk_evict(m, &a->chunks[k], GEMINI_REASON_PLAN);
      if (!status) status = gmi_chunk_settle_host(m, &a->chunks[k]);
    }
  }
  gmi_reap(m); /* reads the times of copies while their chunk size is the current one */
  gmi_sizes_t new = gmi_sizes_of(m, chunk_bytes);
  gmi_host_homes(m, &new);
  for (uint32_t i = 0; i < GMI_ARENAS && !status; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && a->store == i)
      status = gmi_host_commit(m, a->home * new.slot_bytes, round_up(atomic_load(&a->size), new.slot_bytes));
  }
  return status;
}

/* Cannot fail. Rates of the links are per chunk, and are scaled to the new size. */
static void recut_install(gmi_manager_t *m, gmi_cut_t *cut, parts_t *p, old_cut_t *old) {
  uint64_t old_chunk = atomic_load(&m->cut.chunk_bytes), chunk = UINT64_C(1) << cut->shift;
  uint32_t old_shift = m->cut.chunk_shift;
  double copy = (double)gmi_copy_bytes(m, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST);
  gmi_unmap_all(m);
  gmi_frames_free(m);
  const double ratio = (double)gmi_sizes_copy_bytes(&cut->sizes, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST) / copy;
  gmi_link_in(m)->chunk_ns.mean *= ratio;
  gmi_link_out(m)->chunk_ns.mean *= ratio;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && a->chunks) old[i] = (old_cut_t){ a->chunks, a->chunk_map_bytes, atomic_load(&a->chunk_count) };
  }
  gmi_chunks_check(m);
  gmi_chunks_forget_checks(m); /* the old records are freed below */
  cut_install(m, cut);
  go_home(m, old, old_shift, p);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    if (!old[i].chunks) continue;
    recut_arena(m, gmi_arena_at(m, i), &old[i], old_shift);
    gmi_space_free(old[i].chunks, old[i].map_bytes);
  }
  gmi_log(m, GEMINI_LOG_INFO, "chunks of %llu bytes instead of %llu, by the access order", (unsigned long long)chunk,
          (unsigned long long)old_chunk);
}

gemini_status_t gmi_recut(gmi_manager_t *m, uint64_t chunk_bytes) {
  uint64_t old_chunk = atomic_load(&m->cut.chunk_bytes);
  if (chunk_bytes == old_chunk || !tensors_freeze(m)) return GEMINI_OK;
  gmi_specs_drop(m); /* chunks' records are about to go */
  gmi_workers_drain(m, NULL);
  if (!recut_possible(m, chunk_bytes)) {
    tensors_thaw(m, m->tensors.high);
    return GEMINI_OK;
  }
  gmi_cut_t *cut = NULL;
  parts_t p = { .bytes = chunk_bytes < old_chunk ? chunk_bytes : old_chunk };
  p.count = m->config.host_bytes / p.bytes;
  p.goes = malloc(p.count * sizeof *p.goes);
  p.scratch = malloc(p.bytes);
  old_cut_t *old = calloc(GMI_ARENAS, sizeof *old);
  gemini_status_t status = GEMINI_OK;
  if (!p.goes || !p.scratch || !old)
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to change the chunk size");
  if (!status) status = cut_prepare(m, chunk_bytes, &cut);
  if (!status) status = recut_gather(m, chunk_bytes);
  if (!status) {
    recut_install(m, cut, &p, old);
  } else {
    cut_discard(cut);
    gmi_sizes_t sizes = gmi_sizes(m);
    gmi_host_homes(m, &sizes);
  }
  tensors_thaw(m, m->tensors.high);
  free(p.goes);
  free(p.scratch);
  free(old);
  return status;
}
