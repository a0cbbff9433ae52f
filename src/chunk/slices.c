/* Slices of a chunk: how its elements are divided, and copies between its frame and the arena of slices.
 * SPDX-License-Identifier: Apache-2.0 */
#include "chunk/slices.h"

#include <stdio.h>
#include <string.h>

#include "chunk/content.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "core/streams.h"

/* ---- slicing */
enum { SLICE_ALIGN = 256 /* elements */ };

gmi_slicing_t gmi_slicing_of(uint64_t chunk_bytes, uint32_t element_bytes, uint32_t rank, uint32_t ranks) {
  gmi_slicing_t s = { .chunk = chunk_bytes / element_bytes };
  s.slice = s.chunk / ranks / SLICE_ALIGN * SLICE_ALIGN;
  s.rest = s.chunk - s.slice * ranks;
  s.stride = s.slice + s.rest;
  s.start = rank * s.slice;
  s.own = rank + 1 == ranks ? s.stride : s.slice;
  return s;
}

/* The arena whose elements say how all that follow it are divided. */
static gmi_arena_t *root_of(gmi_manager_t *m, const gmi_arena_t *a) {
  if (a->shard.whole != GMI_NONE) a = gmi_arena_at(m, a->shard.whole);
  return gmi_arena_at(m, a->like);
}

static gmi_slicing_t slicing_for(gmi_manager_t *m, const gmi_arena_t *a, uint64_t chunk_bytes) {
  const gmi_group_t *g = gmi_group_at(m, a->shard.group);
  return gmi_slicing_of(chunk_bytes, root_of(m, a)->element_bytes, g->gather.rank, g->gather.ranks);
}
gmi_slicing_t gmi_slicing(gmi_manager_t *m, const gmi_arena_t *a) {
  return slicing_for(m, a, atomic_load(&m->cut.chunk_bytes));
}

bool gmi_slice_find(const gmi_slicing_t *s, uint64_t from, uint64_t end, gmi_slice_t *slice_out) {
  uint64_t chunk = from / s->chunk;
  if (from % s->chunk >= s->start + s->own) chunk++;
  uint64_t begin = chunk * s->chunk + s->start, stop = begin + s->own;
  if (stop > end) stop = end;
  uint64_t first = begin > from ? begin : from;
  if (first >= stop) return false;
  *slice_out = (gmi_slice_t){ first, chunk * s->stride + (first - begin), stop - first };
  return true;
}

uint64_t gmi_slices_end(const gmi_slicing_t *s, uint64_t end) {
  uint64_t in_chunk = end % s->chunk, own = in_chunk > s->start ? in_chunk - s->start : 0;
  return end / s->chunk * s->stride + (own < s->own ? own : s->own);
}

uint32_t *gmi_parts_updated(gmi_manager_t *m, const gmi_arena_t *a) { return &root_of(m, a)->shard.updated; }

/* ---- sizes of the arenas of slices */
static uint64_t slices_bytes(const gmi_arena_t *a, const gmi_slicing_t *s) {
  uint64_t elements = atomic_load(&a->size) / a->element_bytes;
  return (elements + s->chunk - 1) / s->chunk * s->stride * a->element_bytes;
}

gemini_status_t gmi_slices_resize(gmi_manager_t *m, uint64_t chunk_bytes) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_is_sharded(a)) continue;
    gmi_slicing_t s = slicing_for(m, a, chunk_bytes);
    if (!s.slice)
      return gmi_fail(GEMINI_ERR_INVALID, 0,
                      "chunk_bytes is %llu: arena %s, sharded over %u ranks, needs chunks of at least %llu",
                      (unsigned long long)chunk_bytes, a->name, gmi_group_at(m, a->shard.group)->gather.ranks,
                      (unsigned long long)gmi_slices_chunk_min(m));
    gmi_arena_t *slices = gmi_arena_slices(m, a);
    const uint64_t bytes = slices_bytes(a, &s);
    if (slices->store == slices->index) m->stats.model_bytes += bytes - atomic_load(&slices->size);
    atomic_store_explicit(&slices->size, bytes, memory_order_release);
  }
  return GEMINI_OK;
}

uint64_t gmi_slices_chunk_min(gmi_manager_t *m) {
  uint64_t least = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_is_sharded(a)) continue;
    uint64_t ranks = gmi_group_at(m, a->shard.group)->gather.ranks;
    uint64_t need = ranks * SLICE_ALIGN * root_of(m, a)->element_bytes;
    if (least < need) least = need;
  }
  return least;
}

static void find_gradient(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m;
  if (atomic_load(&t->word) & GMI_TENSOR_GRADIENT) *(bool *)user = true;
}

gemini_status_t gmi_slices_unused(gmi_manager_t *m, gmi_arena_t *a) {
  bool gradients = false;
  if (a->store != a->index)
    gmi_arena_each(m, gmi_arena_at(m, a->store), 0, atomic_load(&a->size), find_gradient, &gradients);
  if (gradients)
    return gmi_fail(GEMINI_ERR_BUSY, 0, "gradients of arena %s hold their parameters' bytes: update first", a->name);
  const gmi_arena_t *slices = gmi_arena_slices(m, a);
  for (uint32_t i = 0; slices->store == slices->index && i < atomic_load(&slices->chunk_count); i++)
    if (gmi_chunk_in_use(&slices->chunks[i]) || gmi_chunk_is_loading(&slices->chunks[i]) ||
        gmi_chunk_is_pinned(&slices->chunks[i]))
      return gmi_fail(GEMINI_ERR_BUSY, 0, "a slice of arena %s is acquired or pinned", a->name);
  return GEMINI_OK;
}

/* ---- this rank's slice of a chunk */
/* A slice is at most as long as a chunk, so it lies in at most two chunks of the arena of slices. */
gmi_own_slice_t gmi_own_slice_of(gmi_manager_t *m, const gmi_chunk_t *c) {
  gmi_arena_t *whole = gmi_chunk_arena(m, c), *slices = gmi_arena_at(m, gmi_arena_slices(m, whole)->store);
  gmi_own_slice_t p = { .whole = whole,
                        .group = gmi_group_at(m, whole->shard.group),
                        .slicing = gmi_slicing(m, whole) };
  p.begin = p.slicing.start * whole->element_bytes;
  p.bytes = p.slicing.own * whole->element_bytes;
  uint64_t at = c->index * p.slicing.stride * whole->element_bytes, done = 0, chunk_bytes = gmi_chunk_bytes(m);
  while (done < p.bytes) {
    uint64_t in_chunk = (at + done) & (chunk_bytes - 1);
    uint64_t bytes = chunk_bytes - in_chunk < p.bytes - done ? chunk_bytes - in_chunk : p.bytes - done;
    GMI_ASSERT(p.count < GMI_SLICE_PARTS);
    p.parts[p.count++] = (gmi_own_part_t){ &slices->chunks[(at + done) >> m->cut.chunk_shift], in_chunk, done, bytes };
    done += bytes;
  }
  return p;
}

uint32_t gmi_slice_parts(gmi_manager_t *m, const gmi_chunk_t *c, gmi_slice_part_t *parts_out) {
  gmi_own_slice_t p = gmi_own_slice_of(m, c);
  for (uint32_t i = 0; i < p.count; i++) parts_out[i] = (gmi_slice_part_t){ p.parts[i].chunk, p.parts[i].bytes };
  return p.count;
}

gemini_status_t gmi_own_slice_check(const gmi_own_slice_t *p, bool change) {
  for (uint32_t i = 0; i < p->count; i++) {
    gmi_chunk_t *c = p->parts[i].chunk;
    const char *why = change ? gmi_chunk_unsettle_to_change(c) : gmi_chunk_busy(c, GMI_TO_FETCH);
    if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a slice of arena %s is %s", p->whole->name, why);
  }
  return GEMINI_OK;
}
void gmi_own_slice_hold(gmi_manager_t *m, const gmi_own_slice_t *p) {
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_hold_host(m, p->parts[i].chunk, false);
}
void gmi_own_slice_unhold(gmi_manager_t *m, const gmi_own_slice_t *p) {
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_unhold_host(m, p->parts[i].chunk, false);
}

gemini_status_t gmi_own_slice_bring(gmi_manager_t *m, const gmi_own_slice_t *p, bool write) {
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < p->count; i++) {
    gmi_chunk_t *c = p->parts[i].chunk;
    if (gmi_chunk_is_resident(c) || (!write && gmi_chunk_has(c, GMI_VALID_ZERO))) continue;
    const uint64_t end = p->parts[i].in_chunk + p->parts[i].bytes; /* chunks come in descending order */
    status = write && !p->whole->shard.summed ? gmi_chunk_to_host_to_overwrite(m, c, end)
                                              : gmi_chunk_to_host(m, c, false, GEMINI_REASON_DEMAND);
    /* a read from a file must have succeeded before a copy of its bytes is queued */
    if (!status && gmi_chunk_io(c)) status = gmi_chunk_settle_host(m, c);
  }
  return status;
}

static gemini_status_t copy(gmi_manager_t *m, uint32_t stream, void *to, const void *from, uint64_t bytes,
                            uint32_t kind) {
  gemini_status_t status = m->device.ops->queue.copy(m->device.self, stream, to, from, bytes, kind);
  return status ? gmi_fail_device(status, "the device could not queue a copy of %llu bytes", (unsigned long long)bytes)
                : GEMINI_OK;
}

/* A copy of a part between its frame and its slot, for the timeline. *begin_out: 0 if none is being recorded. */
static void span_begin(gmi_manager_t *m, uint32_t stream, gmi_fence_t *begin_out) {
  *begin_out = 0;
  if (m->trace.timeline && gmi_fence_now(m, stream, begin_out)) *begin_out = 0;
}
static void span_end(gmi_manager_t *m, const char *kind, const gmi_chunk_t *c, gmi_fence_t begin, gmi_fence_t end) {
  char name[GMI_MOVE_NAME_BYTES];
  if (!begin) return;
  snprintf(name, sizeof name, "%s %u (slice)", gmi_chunk_arena(m, c)->name, c->index);
  m->trace.observer->span_queued(m, kind, name, begin, end);
}

/* Makes the stream wait for the users of a part's bytes, which it is to use in its frame or its slot. */
static gemini_status_t part_wait(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode) {
  return gmi_chunk_is_resident(c) ? gmi_chunk_wait(m, stream, c, mode) : gmi_chunk_wait_slot(m, stream, c);
}
/* It uses them now, also if the device has said no. *end_out: behind that; timed while a timeline is recorded. */
static gemini_status_t part_used(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode, gemini_status_t no,
                                 gmi_fence_t *end_out) {
  gmi_slot_t *slot = gmi_chunk_is_resident(c) ? NULL : &m->host.slots[gmi_chunk_slot(c)];
  gemini_status_t used;
  if (!slot) used = gmi_chunk_use(m, c, mode, stream, true);
  else if (m->trace.timeline) used = gmi_fence_now(m, stream, &slot->fence);
  else used = gmi_fence_now_untimed(m, stream, &slot->fence);
  if (slot && used) slot->fence = gmi_fence_later(m, stream);
  *end_out = slot ? slot->fence : gmi_fence_later(m, stream);
  return no ? no : used;
}

gemini_status_t gmi_own_slice_copy_in(gmi_manager_t *m, const gmi_own_slice_t *p, uint8_t *frame, uint32_t stream) {
  gemini_status_t status = GEMINI_OK;
  gmi_fence_t begin, end;
  for (uint32_t i = 0; !status && i < p->count; i++) {
    const gmi_own_part_t *part = &p->parts[i];
    gmi_chunk_t *c = part->chunk;
    GMI_ASSERT(!gmi_chunk_deferred(c));
    uint8_t *to = frame + p->begin + part->in_slice;
    const bool zero = gmi_chunk_has(c, GMI_VALID_ZERO), resident = gmi_chunk_is_resident(c);
    status = zero ? gmi_device_zero(m, stream, to, part->bytes) : part_wait(m, stream, c, GEMINI_READ);
    if (status || zero) continue;
    const uint8_t *from = resident ? gmi_chunk_device(m, c) : gmi_chunk_host(m, c);
    span_begin(m, stream, &begin);
    status = copy(m, stream, to, from + part->in_chunk, part->bytes, resident ? GMI_COPY_D2D : GMI_COPY_H2D);
    status = part_used(m, stream, c, GEMINI_READ, status, &end);
    if (resident) continue;
    p->group->fetched_bytes += part->bytes;
    span_end(m, "fetch", c, begin, end);
  }
  return status;
}

/* A part of the frame goes to its place in the arena of slices, or is added to what is there: to the sums of the rounds
 * before. */
static gemini_status_t put(gmi_manager_t *m, uint32_t stream, const gmi_own_slice_t *p, uint64_t bytes, void *to,
                           const void *from, uint32_t kind) {
  const gmi_arena_t *whole = p->whole;
  if (!whole->shard.summed) return copy(m, stream, to, from, bytes, kind);
  gemini_status_t status =
      m->device.ops->queue.add(m->device.self, stream, to, from, whole->shard.dtype, bytes / whole->element_bytes);
  return status ? gmi_fail_device(status, "the device could not queue a sum of %llu bytes", (unsigned long long)bytes)
                : GEMINI_OK;
}

gemini_status_t gmi_own_slice_copy_out(gmi_manager_t *m, const gmi_own_slice_t *p, const uint8_t *frame,
                                       gmi_fence_t after, gmi_fence_t *end_out) {
  const uint32_t stream = gmi_link_out(m)->stream;
  gemini_status_t status = gmi_fence_wait(m, stream, after);
  gmi_fence_t begin;
  for (uint32_t i = 0; !status && i < p->count; i++) {
    const gmi_own_part_t *part = &p->parts[i];
    gmi_chunk_t *c = part->chunk;
    GMI_ASSERT(!gmi_chunk_deferred(c));
    const uint8_t *from = frame + p->begin + part->in_slice;
    const bool resident = gmi_chunk_is_resident(c);
    if ((status = part_wait(m, stream, c, GEMINI_READ_WRITE))) break;
    const uint64_t lazy = resident ? 0 : gmi_chunk_lazy_zeros(c), end = part->in_chunk + part->bytes;
    uint8_t *to = resident ? gmi_chunk_device(m, c) : gmi_slot_address(m, gmi_chunk_slot(c));
    if (lazy > end) memset(to + end, 0, lazy - end); /* bytes of no rank, between this slice and the one before */
    span_begin(m, stream, &begin);
    status = put(m, stream, p, part->bytes, to + part->in_chunk, from, resident ? GMI_COPY_D2D : GMI_COPY_D2H);
    if (resident) gmi_chunk_wrote(m, c);
    status = part_used(m, stream, c, GEMINI_WRITE, status, end_out);
    if (!resident) {
      gmi_chunk_host_wrote(m, c);
      span_end(m, "evict", c, begin, *end_out);
    }
    if (lazy) gmi_chunk_lazy_zeros_set(m, c, status ? lazy : part->in_chunk);
    p->group->stored_bytes += part->bytes;
  }
  return status;
}
