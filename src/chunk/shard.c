/* Sharded arenas: their slices, gathering chunks, adding gradients. SPDX-License-Identifier: Apache-2.0
 *
 * Collectives are queued on two streams of the group, one for gathers and one for sums. All ranks queue the same ones
 * in the same order, because what they queue follows from the callers' calls alone: an acquire gathers the chunks that
 * are not on the device, in the order in which it names them, and which are on the device follows from earlier acquires
 * and from the ends of operators (gmi_gathered_leave()), never from local memory. Chunks that were gathered are
 * therefore never evicted for room. Gradients are added in the order of descending chunks.
 *
 * A rank that waits for others holds frames, and slots of slices, that its own later work may wait for. This cannot end
 * in a ring of ranks that wait for each other as long as all ranks queue gathers and sums at the same points of their
 * programs. Where they do not, the deadline ends it.
 *
 * Threads: any thread that holds the manager's lock. The ranks' callers must not depend on an order of threads: calls
 * for one group come from one thread at a time. */
#include "chunk/shard.h"

#include <errno.h>
#include <stdlib.h>

#include "base/hash.h"
#include "chunk/accesses.h"
#include "chunk/content.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/nonmodel.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/streams.h"
#include "core/workers.h"
#include "gemini/group.h"

/* ---- slicing */
enum { SLICE_ALIGN = 256 /* elements */, PARTS = GMI_SLICE_PARTS };

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
    if (gmi_chunk_in_use(&slices->chunks[i]) || gmi_chunk_is_loading(&slices->chunks[i]))
      return gmi_fail(GEMINI_ERR_BUSY, 0, "a slice of arena %s is acquired", a->name);
  return GEMINI_OK;
}

/* ---- the part of the slices that belongs to one chunk */
typedef struct {
  gmi_chunk_t *chunk;
  uint64_t in_chunk; /* bytes */
  uint64_t in_slice;
  uint64_t bytes;
} part_t;
typedef struct {
  gmi_arena_t *whole;
  gmi_group_t *group;
  gmi_slicing_t slicing;
  uint64_t begin, bytes; /* of the slice in its chunk */
  uint32_t count;
  part_t parts[PARTS];
} parts_t;

/* A slice is at most as long as a chunk, so it lies in at most two chunks of the arena of slices. */
static parts_t parts_of(gmi_manager_t *m, const gmi_chunk_t *c) {
  gmi_arena_t *whole = gmi_chunk_arena(m, c), *slices = gmi_arena_at(m, gmi_arena_slices(m, whole)->store);
  parts_t p = { .whole = whole, .group = gmi_group_at(m, whole->shard.group), .slicing = gmi_slicing(m, whole) };
  p.begin = p.slicing.start * whole->element_bytes;
  p.bytes = p.slicing.own * whole->element_bytes;
  uint64_t at = c->index * p.slicing.stride * whole->element_bytes, done = 0, chunk_bytes = gmi_chunk_bytes(m);
  while (done < p.bytes) {
    uint64_t in_chunk = (at + done) & (chunk_bytes - 1);
    uint64_t bytes = chunk_bytes - in_chunk < p.bytes - done ? chunk_bytes - in_chunk : p.bytes - done;
    GMI_ASSERT(p.count < PARTS);
    p.parts[p.count++] = (part_t){ &slices->chunks[(at + done) >> m->cut.chunk_shift], in_chunk, done, bytes };
    done += bytes;
  }
  return p;
}

uint32_t gmi_slice_parts(gmi_manager_t *m, const gmi_chunk_t *c, gmi_slice_part_t *parts_out) {
  parts_t p = parts_of(m, c);
  for (uint32_t i = 0; i < p.count; i++) parts_out[i] = (gmi_slice_part_t){ p.parts[i].chunk, p.parts[i].bytes };
  return p.count;
}

/* BUSY: something uses a part, so that it cannot be read now, or changed. Of parts to be changed, acquires take the
 * slow path from now on. */
static gemini_status_t parts_check(const parts_t *p, bool change) {
  for (uint32_t i = 0; i < p->count; i++) {
    gmi_chunk_t *c = p->parts[i].chunk;
    const char *why = change ? gmi_chunk_unsettle_to_change(c) : gmi_chunk_busy(c, GMI_TO_FETCH);
    if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a slice of arena %s is %s", p->whole->name, why);
  }
  return GEMINI_OK;
}
static void hold_parts(gmi_manager_t *m, const parts_t *p) {
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_hold_host(m, p->parts[i].chunk, false);
}
static void unhold_parts(gmi_manager_t *m, const parts_t *p) {
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_unhold_host(m, p->parts[i].chunk, false);
}

/* Makes each part's bytes valid on the host, unless they are on the device or, to be read only, zero. The parts are
 * held: making room for one does not take another's slot. */
static gemini_status_t bring_parts(gmi_manager_t *m, const parts_t *p, bool write) {
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < p->count; i++) {
    gmi_chunk_t *c = p->parts[i].chunk;
    if (gmi_chunk_is_resident(c) || (!write && gmi_chunk_has(c, GMI_VALID_ZERO))) continue;
    const uint64_t end = p->parts[i].in_chunk + p->parts[i].bytes; /* parts come in descending order */
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

/* Makes the stream wait for the users of a part's bytes, which it is to use in its frame or its slot. */
static gemini_status_t part_wait(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode) {
  return gmi_chunk_is_resident(c) ? gmi_chunk_wait(m, stream, c, mode) : gmi_chunk_wait_slot(m, stream, c);
}
/* It uses them now, also if the device has said no. */
static gemini_status_t part_used(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode, gemini_status_t no) {
  gmi_slot_t *slot = gmi_chunk_is_resident(c) ? NULL : &m->host.slots[gmi_chunk_slot(c)];
  gemini_status_t used = slot ? gmi_fence_now(m, stream, &slot->fence) : gmi_chunk_use(m, c, mode, stream, true);
  if (slot && used) slot->fence = gmi_fence_later(m, stream);
  return no ? no : used;
}

/* Queues copies of the own slice into the chunk's frame. */
static gemini_status_t copy_in(gmi_manager_t *m, const parts_t *p, uint8_t *frame, uint32_t stream) {
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < p->count; i++) {
    const part_t *part = &p->parts[i];
    gmi_chunk_t *c = part->chunk;
    GMI_ASSERT(!gmi_chunk_deferred(c));
    uint8_t *to = frame + p->begin + part->in_slice;
    const bool zero = gmi_chunk_has(c, GMI_VALID_ZERO), resident = gmi_chunk_is_resident(c);
    status = zero ? gmi_device_zero(m, stream, to, part->bytes) : part_wait(m, stream, c, GEMINI_READ);
    if (status || zero) continue;
    const uint8_t *from = resident ? gmi_chunk_device(m, c) : gmi_chunk_host(m, c);
    status = copy(m, stream, to, from + part->in_chunk, part->bytes, resident ? GMI_COPY_D2D : GMI_COPY_H2D);
    status = part_used(m, stream, c, GEMINI_READ, status);
    if (!resident) p->group->fetched_bytes += part->bytes;
  }
  return status;
}

/* A part of the frame goes to its place in the arena of slices, or is added to what is there: to the sums of the rounds
 * before. */
static gemini_status_t put(gmi_manager_t *m, uint32_t stream, const parts_t *p, uint64_t bytes, void *to,
                           const void *from, uint32_t kind) {
  const gmi_arena_t *whole = p->whole;
  if (!whole->shard.summed) return copy(m, stream, to, from, bytes, kind);
  gemini_status_t status =
      m->device.ops->queue.add(m->device.self, stream, to, from, whole->shard.dtype, bytes / whole->element_bytes);
  return status ? gmi_fail_device(status, "the device could not queue a sum of %llu bytes", (unsigned long long)bytes)
                : GEMINI_OK;
}

/* Queues copies of the own slice from the chunk's frame, which is complete behind after, into the arena of slices,
 * or adds it to what is there. Its parts were brought for writing. *end_out: behind all of them. What fails here is the
 * device. */
static gemini_status_t copy_out(gmi_manager_t *m, const parts_t *p, const uint8_t *frame, gmi_fence_t after,
                                gmi_fence_t *end_out) {
  const uint32_t stream = gmi_link_out(m)->stream;
  gemini_status_t status = gmi_fence_wait(m, stream, after);
  for (uint32_t i = 0; !status && i < p->count; i++) {
    const part_t *part = &p->parts[i];
    gmi_chunk_t *c = part->chunk;
    GMI_ASSERT(!gmi_chunk_deferred(c));
    const uint8_t *from = frame + p->begin + part->in_slice;
    const bool resident = gmi_chunk_is_resident(c);
    if ((status = part_wait(m, stream, c, GEMINI_READ_WRITE))) break;
    const uint64_t lazy = gmi_chunk_lazy_zeros(c); /* up to the part's end, or none */
    uint8_t *to = resident ? gmi_chunk_device(m, c) : gmi_slot_address(m, gmi_chunk_slot(c));
    status = put(m, stream, p, part->bytes, to + part->in_chunk, from, resident ? GMI_COPY_D2D : GMI_COPY_D2H);
    if (resident) gmi_chunk_wrote(m, c);
    status = part_used(m, stream, c, GEMINI_WRITE, status);
    if (!resident) gmi_chunk_host_wrote(m, c);
    if (!resident && lazy) gmi_chunk_lazy_zeros_set(m, c, status ? lazy : part->in_chunk);
    p->group->stored_bytes += part->bytes;
  }
  if (!status) status = gmi_fence_now(m, stream, end_out);
  return status;
}

gemini_status_t gmi_gathered_queue(gmi_manager_t *m, gmi_chunk_t *c, bool *queued_out) {
  gemini_status_t status = GEMINI_OK;
  parts_t p = parts_of(m, c);
  for (uint32_t i = 0; !status && i < p.count; i++) {
    *queued_out |= gmi_chunk_deferred(p.parts[i].chunk) > 0;
    status = gmi_updates_queue(m, p.parts[i].chunk);
  }
  return status;
}

/* ---- gather */
/* Queues the gather of a frame whose own slice is complete behind ready, or holds it back for others. */
static gemini_status_t gather(gmi_manager_t *m, const gmi_chunk_t *c, const parts_t *p, gmi_fence_t ready,
                              gmi_fence_t *arrive_out) {
  gmi_group_t *g = p->group;
  const uint64_t element = p->whole->element_bytes, slice = p->slicing.slice * element,
                 rest = p->slicing.rest * element;
  gemini_status_t status = gmi_fence_wait(m, g->gather_stream, ready);
  if (!status)
    status = gmi_group_gather(m, g, gmi_chunk_device(m, c), slice, rest, p->whole->name, c->index, arrive_out);
  if (status) return status;
  g->queued.gathers = gmi_hash(gmi_hash(g->queued.gathers + 1, p->whole->index), c->index);
  g->gathered_chunks++;
  g->gathered_bytes += gmi_chunk_bytes(m) - p->bytes;
  return GEMINI_OK;
}

gemini_status_t gmi_gathered_fetch(gmi_manager_t *m, gmi_chunk_t *c, bool fresh, uint32_t reason, uint32_t flags) {
  parts_t p = parts_of(m, c);
  const bool gathers = !fresh && gmi_chunk_has(c, GMI_VALID_SLICES);
  gemini_status_t status = gmi_groups_known(m);
  if (!status && gathers) status = parts_check(&p, false);
  if (status) return status;
  uint32_t frame;
  hold_parts(m, &p); /* the eviction that frees a frame must not take their slots */
  status = gmi_frame_take(m, gmi_chunk_mapping(c), reason == GEMINI_REASON_DEMAND ? GEMINI_REASON_PRESSURE : reason,
                          flags, &frame);
  if (!status && gathers) {
    status = bring_parts(m, &p, false);
    if (status) gmi_frame_give(m, frame, m->frames.at[frame].ready);
  }
  unhold_parts(m, &p);
  if (status) return status;
  const uint32_t stream = gmi_link_in(m)->stream;
  gmi_fence_t ready = m->frames.at[frame].ready, arrive = ready;
  status = gmi_map(m, gmi_chunk_device(m, c), frame, gmi_chunk_mapping(c));
  bool mapped = !status;
  if (!status && !fresh) {
    status = gmi_fence_wait(m, stream, ready); /* the frame's previous user */
    if (!status && gathers) status = copy_in(m, &p, gmi_chunk_device(m, c), stream);
    else if (!status) status = gmi_device_zero(m, stream, gmi_chunk_device(m, c), gmi_frame_bytes(m));
    if (!status) status = gmi_fence_now(m, stream, &arrive);
    if (!status && !gathers) gmi_group_sum_delays(m, p.group, ready, arrive);
    if (!status && gathers) status = gather(m, c, &p, arrive, &arrive);
  }
  if (status) {
    status = gmi_gather_batch_fails(m, p.group, status); /* before marks would queue what is held back */
    /* What was queued may still run: the frame is reusable after it. */
    ready = gmi_fence_join(m, ready, gmi_fence_later(m, stream));
    ready = gmi_fence_join(m, ready, gmi_fence_later(m, p.group->gather_stream));
    gmi_frame_give(m, frame, ready);
    if (mapped) gmi_map_leave(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c), ready);
    return status;
  }
  gmi_chunk_arrived(m, c, frame, arrive, fresh);
  gmi_gathered_unsettle(m, c);
  gmi_gathered_count(m, c, 1);
  gmi_counters_change(m);
  return GEMINI_OK;
}

void gmi_gathered_count(gmi_manager_t *m, const gmi_chunk_t *c, uint32_t frames) {
  const bool gradients = gmi_arena_is_gradients(gmi_chunk_arena(m, c));
  m->groups.frames += frames;
  if (gradients) m->groups.gradient_frames += frames;
  gmi_nonmodel_peak(m);
}

void gmi_gathered_unsettle(gmi_manager_t *m, gmi_chunk_t *c) {
  if (!atomic_load(&m->bracket.op_serial) || gmi_arena_has_sums(gmi_chunk_arena(m, c))) (void)gmi_chunk_unsettle(c, 0);
}

/* ---- leaving the device */
/* Copies written parameters to the slices. Each rank takes its own: where ranks have written different values, that of
 * the slice's owner counts. */
static gemini_status_t write_back(gmi_manager_t *m, gmi_chunk_t *c) {
  parts_t p = parts_of(m, c);
  gmi_fence_t end;
  gemini_status_t status = parts_check(&p, true);
  if (status) return status;
  hold_parts(m, &p);
  status = bring_parts(m, &p, true);
  unhold_parts(m, &p);
  if (!status) status = gmi_chunk_wait(m, gmi_link_out(m)->stream, c, GEMINI_READ);
  if (!status) status = copy_out(m, &p, gmi_chunk_device(m, c), 0, &end);
  if (status) return status;
  gmi_chunk_copied(c, end);
  gmi_chunk_slices_valid(m, c);
  return GEMINI_OK;
}

/* A chunk that nobody uses leaves, unless it holds gradients that have not been added. keep: it stays if it has not
 * been written: a written one may differ from what other ranks have written to their slices. */
static gemini_status_t leave(gmi_manager_t *m, gmi_chunk_t *c, bool keep) {
  gemini_status_t status = GEMINI_OK;
  uint32_t word;
  if (!gmi_chunk_is_resident(c) || gmi_chunk_device_users(c)) return GEMINI_OK;
  if (gmi_chunk_has_only(c, GMI_VALID_DEVICE)) {
    if (gmi_arena_is_gradients(gmi_chunk_arena(m, c))) return GEMINI_OK;
    if (!gmi_chunk_unsettle(c, GMI_CHUNK_USERS)) return GEMINI_OK; /* acquired meanwhile */
    status = write_back(m, c);
    keep = false;
  }
  if (status || keep || !gmi_chunk_departs(c, &word)) return status;
  gmi_chunk_leave_frame(m, c, 0, gmi_chunk_used(m, c));
  return GEMINI_OK;
}

gemini_status_t gmi_gathered_evict(gmi_manager_t *m, gmi_chunk_t *c) { return leave(m, c, false); }

/* May chunks of the arena stay gathered from one operator to the next? */
static bool stays(gmi_manager_t *m, const gmi_arena_t *whole) {
  return m->bracket.iteration_open &&
         (gmi_gathered_stays(whole) || m->trace.advice->gathers_follow(m, whole->shard.group));
}

gemini_status_t gmi_gathered_leave(gmi_manager_t *m, bool all) {
  gemini_status_t status = gmi_groups_known(m);
  for (uint32_t i = 0; !status && m->groups.frames && i < m->frames.capacity; i++) {
    gmi_chunk_t *c = m->frames.at[i].chunk;
    if (c && gmi_chunk_is_gathered(m, c)) status = leave(m, c, !all && stays(m, gmi_chunk_arena(m, c)));
  }
  return status;
}

/* Slices are changed by each rank on its own, and not by all ranks at the same moment. So no rank may have a gathered
 * copy then: outside operators every acquire gathers anew (gmi_gathered_acquire()). */
gemini_status_t gmi_gathered_settle(gmi_manager_t *m, const gmi_range_t *r, bool change) {
  gmi_arena_t *whole = r->arena;
  gemini_status_t status = GEMINI_OK;
  if (!r->size || !whole->chunks) return GEMINI_OK; /* an arena of states has no chunks to gather */
  const bool kept = stays(m, whole);
  if (change && !gmi_arena_is_gradients(whole) && (kept || atomic_load(&m->bracket.op_serial)))
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "slices of arena %s cannot be changed while an %s is open: other ranks may use "
                    "what they have gathered",
                    whole->name, kept ? "iteration" : "operator");
  uint64_t last = (r->offset + r->size - 1) >> m->cut.chunk_shift;
  for (uint64_t i = r->offset >> m->cut.chunk_shift; !status && i <= last; i++) {
    gmi_chunk_t *c = &whole->chunks[i];
    status = leave(m, c, !change);
    if (status || !gmi_chunk_is_resident(c) || (!change && gmi_chunk_has(c, GMI_VALID_SLICES))) continue;
    if (!change && gmi_arena_has_sums(whole) && gmi_chunk_has(c, GMI_VALID_ZERO)) continue; /* nothing to be added */
    status = gmi_chunk_device_users(c)
                 ? gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", whole->name)
                 : gmi_fail(GEMINI_ERR_STATE, 0,
                            "chunk %u of arena %s holds gradients that have not been added over the ranks", c->index,
                            whole->name);
  }
  return status;
}

gemini_status_t gmi_gathered_acquire(gmi_manager_t *m) {
  return atomic_load(&m->bracket.op_serial) ? GEMINI_OK : gmi_gathered_leave(m, !m->bracket.iteration_open);
}

/* ---- gradients that are ready */
/* Are the gradients of all tensors of the chunk READY_FOR_REDUCE? One that was not written is zero. */
typedef struct {
  uint32_t gradients; /* the arena of gradients */
  bool ready;
} readiness_t;
static void look_at_gradient(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  readiness_t *r = user;
  const gmi_tensor_t *gradient = t;
  while (gradient->arena != r->gradients && gradient->next != GMI_NONE) gradient = &m->tensors.at[gradient->next];
  r->ready = r->ready && gradient->arena == r->gradients &&
             gmi_tensor_state(atomic_load(&gradient->word)) == GEMINI_STATE_READY_FOR_REDUCE;
}
static bool is_ready(gmi_manager_t *m, const gmi_arena_t *whole, uint32_t chunk) {
  readiness_t r = { whole->index, true };
  gmi_arena_each(m, gmi_arena_at(m, whole->like), (uint64_t)chunk << m->cut.chunk_shift, gmi_chunk_bytes(m),
                 look_at_gradient, &r);
  return r.ready;
}
/* The same for the chunk whose turn it is, if there is one. */
static bool next_is_ready(gmi_manager_t *m, const gmi_arena_t *whole) {
  return whole->shard.reduced < whole->chunk_count && is_ready(m, whole, whole->chunk_count - 1 - whole->shard.reduced);
}

static void find_ready(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m;
  if (gmi_tensor_state(atomic_load(&t->word)) == GEMINI_STATE_READY_FOR_REDUCE) *(const gmi_tensor_t **)user = t;
}
/* Has an update of a part taken chunks of the range, while other parts are still to be updated? */
static bool is_updated(gmi_manager_t *m, const gmi_range_t *r) {
  const uint32_t updated = *gmi_parts_updated(m, r->arena);
  return updated && r->last + updated >= r->arena->chunk_count;
}

/* Refuses an acquire of gradients on the device that would lose some, or give zeros in place of sums. */
static gemini_status_t gradient_place(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  const gmi_arena_t *whole = r->arena;
  const char *name = gmi_range_name(m, r);
  const bool sums = gmi_arena_has_sums(whole), write = access->mode & GEMINI_WRITE;
  if (write && is_updated(m, r))
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "gradient of %s has been taken by an update of a part: it cannot be written again before the other "
                    "parts are updated, too",
                    name);
  if (write && r->last + whole->shard.reduced >= whole->chunk_count)
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "gradient of %s has been added over the ranks: it cannot be written again before the %s", name,
                    sums ? "others have been added, too" : "update");
  for (uint32_t i = r->first; sums && !write && i <= r->last; i++)
    if (!gmi_chunk_has_only(&whole->chunks[i], GMI_VALID_DEVICE))
      return gmi_fail(GEMINI_ERR_STATE, 0,
                      "gradient of %s has not been written since it was added over the ranks: its sum is in slices, "
                      "which can be acquired on the host",
                      name);
  if (!sums || !write) return GEMINI_OK;
  if (whole->shard.due && whole->shard.stage != GEMINI_ZERO_STATES && next_is_ready(m, whole))
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "gradients of arena %s are READY_FOR_REDUCE, but could not be added, as a warning in the log says: "
                    "set one HOLD and READY_FOR_REDUCE again",
                    whole->name);
  const gmi_tensor_t *ready = NULL;
  if (access->mode == GEMINI_WRITE) gmi_arena_each(m, r->arena, r->offset, r->size, find_ready, &ready);
  if (!ready) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_STATE, 0,
                  "gradient of %s is READY_FOR_REDUCE and has not been added: read and write it to add to it, or set "
                  "it HOLD to give it up",
                  m->tensors.at[ready->base].name);
}

/* Other ranks may not have updated the part yet: what would be gathered now would be old in some slices. */
static gemini_status_t updated_place(gmi_manager_t *m, const gmi_range_t *r) {
  if (!is_updated(m, r)) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_STATE, 0,
                  "%s is used after an update of its part, and before the other parts of arena %s are updated",
                  gmi_range_name(m, r), r->arena->name);
}

/* ---- ranges */
/* Finds the slice that a range lies in. False: it lies in no one slice of this rank. */
static bool slice_of(gmi_manager_t *m, const gmi_range_t *r, gmi_slice_t *slice_out) {
  gmi_slicing_t s = gmi_slicing(m, r->arena);
  uint64_t element = r->arena->element_bytes, first = r->offset / element,
           end = (r->offset + r->size + element - 1) / element;
  return gmi_slice_find(&s, first, end, slice_out) && slice_out->whole == first && slice_out->count == end - first;
}

void gmi_range_placed(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r) {
  gmi_slice_t slice;
  if (access->tier == GEMINI_TIER_DEVICE || !gmi_arena_is_sharded(r->arena) || !r->size || !slice_of(m, r, &slice))
    return;
  uint64_t element = r->arena->element_bytes;
  r->store = gmi_arena_at(m, gmi_arena_slices(m, r->arena)->store);
  r->at = slice.slices * element + r->offset % element;
  gmi_range_chunks(m, r);
}

gemini_status_t gmi_range_may_flip(gmi_manager_t *m, const gmi_range_t *r) {
  if (!gmi_arena_is_sharded(r->arena) || gmi_arena_is_gradients(r->arena)) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_STATE, 0,
                  "parameter %s cannot be written: it has a gradient, which an update must take first",
                  gmi_range_name(m, r));
}

gemini_status_t gmi_range_place(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r) {
  gmi_arena_t *whole = r->arena;
  if (!gmi_arena_is_sharded(whole)) return GEMINI_OK;
  if (access->tier == GEMINI_TIER_DEVICE) {
    if (gmi_arena_is_sliced_only(whole))
      return gmi_fail(
          GEMINI_ERR_UNSUPPORTED, 0,
          "arena %s is sharded and follows arena %s: it exists in slices only, which can be acquired on the "
          "host",
          whole->name, gmi_arena_at(m, whole->like)->name);
    gemini_status_t status = GEMINI_OK;
    if (r->size) status = gmi_arena_is_gradients(whole) ? gradient_place(m, access, r) : updated_place(m, r);
    return status ? status : gmi_gathered_acquire(m);
  }
  gmi_slice_t slice;
  if (!r->size) return GEMINI_OK;
  if (!slice_of(m, r, &slice))
    return gmi_fail(
        GEMINI_ERR_INVALID, 0,
        "%llu bytes at offset %llu of %s are not in one slice of this rank: gemini_slice_next() finds those",
        (unsigned long long)r->size, (unsigned long long)access->offset_bytes, gmi_range_name(m, r));
  gemini_status_t status = gmi_gathered_settle(m, r, access->mode & GEMINI_WRITE);
  if (!status) gmi_range_placed(m, access, r);
  return status;
}

void gmi_range_slices(gmi_manager_t *m, const gmi_range_t *r, gmi_range_t *slices_out) {
  gmi_arena_t *slices = gmi_arena_slices(m, r->arena);
  gmi_slicing_t s = gmi_slicing(m, r->arena);
  const uint64_t element = r->arena->element_bytes;
  uint64_t first = gmi_slices_end(&s, r->offset / element) * element;
  uint64_t end = gmi_slices_end(&s, (r->offset + r->size) / element) * element;
  *slices_out = (gmi_range_t){ .arena = slices,
                               .store = gmi_arena_at(m, slices->store),
                               .offset = first,
                               .at = first,
                               .size = end > first ? end - first : 0,
                               .first = 1 };
  gmi_range_chunks(m, slices_out);
}

static gemini_status_t slice_next(gmi_manager_t *m, const gemini_access_t *theirs, uint64_t from_bytes,
                                  uint64_t *offset_out, uint64_t *size_out) {
  gemini_access_t range;
  gmi_range_t r;
  if (!offset_out || !size_out)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", offset_out ? "size_out" : "offset_out");
  gemini_status_t status = gmi_access_in(&range, theirs, "range");
  if (!status) status = gmi_range_ready_any(m, &range, &r);
  if (status) return status;
  uint64_t object = r.tensor ? r.tensor->offset : 0, end = r.offset + r.size;
  uint64_t from = from_bytes > end - object ? end : object + from_bytes;
  if (from < r.offset) from = r.offset;
  gmi_slice_t slice = { from, 0, from < end ? end - from : 0 };
  if (gmi_arena_is_sharded(r.arena)) {
    gmi_slicing_t s = gmi_slicing(m, r.arena);
    uint64_t element = r.arena->element_bytes;
    if (from < end && gmi_slice_find(&s, from / element, (end + element - 1) / element, &slice)) {
      uint64_t begin = slice.whole * element, stop = begin + slice.count * element;
      if (begin < from) begin = from;
      if (stop > end) stop = end;
      slice = (gmi_slice_t){ begin, 0, stop - begin };
    } else {
      slice = (gmi_slice_t){ end, 0, 0 };
    }
  }
  *offset_out = (slice.count ? slice.whole : end) - object;
  *size_out = slice.count;
  return GEMINI_OK;
}
gemini_status_t gemini_slice_next(gemini_manager_t mgr, const gemini_access_t *range, uint64_t from_bytes,
                                  uint64_t *offset_out, uint64_t *size_out) {
  API_LOCKED(slice_next(m, range, from_bytes, offset_out, size_out));
}

/* ---- adding gradients
 *
 * Gradients that reuse their parameters' bytes are added once between two updates: `reduced` counts up to the number of
 * chunks, and the update sets it back. Others are added in rounds: the last chunk of a round sets it back. */
/* Everything that can fail for want of room comes before the collective: then this rank has not taken its turn yet, and
 * can take it later. */
static gemini_status_t reduce_prepare(gmi_manager_t *m, gmi_chunk_t *c, const parts_t *p) {
  gemini_status_t status = gmi_groups_known(m);
  if (!status && !gmi_chunk_unsettle(c, GMI_CHUNK_USERS))
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", p->whole->name);
  if (!status && !gmi_arena_has_sums(p->whole)) {
    /* The sums take the bytes of the parameters' slices, so a gathered copy of these is outdated. */
    gmi_arena_t *params = gmi_arena_at(m, p->whole->store);
    status = leave(m, &params->chunks[c->index], false);
    if (!status && gmi_chunk_is_resident(&params->chunks[c->index]))
      status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", params->name);
  }
  if (!status) status = parts_check(p, true);
  if (status) return status;
  hold_parts(m, p);
  status = gmi_chunk_fetch(m, c, false, GEMINI_REASON_CALLER, GMI_TAKE_EVICT); /* zeros if nothing was written */
  if (!status) status = bring_parts(m, p, true);
  unhold_parts(m, p);
  return status;
}

static gemini_status_t reduce_queue(gmi_manager_t *m, gmi_chunk_t *c, parts_t *p) {
  gmi_group_t *g = p->group;
  const uint64_t slice = p->slicing.slice, rest = p->slicing.rest, element = p->whole->element_bytes;
  uint8_t *frame = gmi_chunk_device(m, c);
  gmi_fence_t begin = 0, sums = 0, end = 0;
  gemini_status_t status = gmi_chunk_wait(m, g->reduce_stream, c, GEMINI_READ_WRITE);
  gmi_chunk_wrote(m, c);
  if (!status) status = gmi_fence_now(m, g->reduce_stream, &begin);
  if (!status) status = gmi_group_reduce(m, g, frame, slice, p->whole->shard.dtype, p->whole->name, c->index);
  if (status) return status;
  if (rest)
    status = gmi_group_reduce_rest(m, g, frame + slice * g->reduce.ranks * element, rest, p->whole->shard.dtype,
                                   p->whole->name, c->index);
  if (!status) status = gmi_fence_now(m, g->reduce_stream, &sums);
  if (!status) status = copy_out(m, p, frame, sums, &end);
  if (status) return g->ranks > 1 || p->whole->shard.summed ? gmi_group_breaks_off(g, status) : status;
  gmi_time_work(m, (gmi_timed_t){ .begin = begin, .end = sums, .elements = 1, .shortest = &g->sums.shortest_ns });
  m->trace.observer->chunk_summed(m, c);
  gmi_group_sum_ends(g, end);
  if (!gmi_arena_has_sums(p->whole)) g->queued.sums = gmi_hash(gmi_hash(g->queued.sums + 1, p->whole->index), c->index);
  g->reduced_chunks++;
  g->reduced_bytes += gmi_chunk_bytes(m) - p->bytes;
  uint32_t word;
  bool departs = gmi_chunk_departs(c, &word); /* it is not SETTLED: nobody can have acquired it */
  GMI_ASSERT(departs);
  (void)departs;
  gmi_chunk_leave_frame(m, c, gmi_arena_has_sums(p->whole) ? GMI_VALID_ZERO : GMI_VALID_SLICES, end);
  return GEMINI_OK;
}

static void not_ready(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  uint64_t word = atomic_load(&t->word);
  (void)m, (void)user;
  while (word >> GMI_TENSOR_STATE_SHIFT == GEMINI_STATE_READY_FOR_REDUCE &&
         !atomic_compare_exchange_weak(&t->word, &word, gmi_tensor_word(word, GEMINI_STATE_HOLD))) {
  }
}
static void not_ready_from(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  if (t->offset >= *(const uint64_t *)user) not_ready(m, t, NULL);
}
/* After a chunk of a round: tensors that begin in it have been added whole, as later chunks were added before. */
static void round_goes_on(gmi_manager_t *m, gmi_arena_t *whole, const gmi_chunk_t *c) {
  uint64_t begin = (uint64_t)c->index << m->cut.chunk_shift;
  gmi_arena_each(m, whole, begin, gmi_chunk_bytes(m), not_ready_from, &begin);
  if (whole->shard.reduced < whole->chunk_count) return;
  whole->shard.reduced = 0;
  whole->shard.due = false;
  whole->shard.summed = true;
  whole->shard.since = m->bracket.op_serial_next - (atomic_load(&m->bracket.op_serial) != 0);
}

/* Adds the gradients of the next chunk. */
static gemini_status_t reduce_next(gmi_manager_t *m, gmi_arena_t *whole) {
  uint32_t reduced = whole->shard.reduced;
  gmi_chunk_t *c = &whole->chunks[whole->chunk_count - 1 - reduced];
  parts_t p = parts_of(m, c);
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < p.count; i++) status = gmi_updates_queue(m, p.parts[i].chunk);
  if (status || whole->shard.reduced != reduced) return status; /* a callback ran without the lock: it is done */
  status = reduce_prepare(m, c, &p);
  if (!status) status = reduce_queue(m, c, &p);
  if (status) return status;
  whole->shard.reduced++;
  if (gmi_arena_has_sums(whole)) round_goes_on(m, whole, c);
  return GEMINI_OK;
}

gemini_status_t gmi_reduce_ready(gmi_manager_t *m, gmi_arena_t *whole) {
  gemini_status_t status = GEMINI_OK;
  whole->shard.due = true;
  while (!status && whole->shard.due && whole->shard.stage != GEMINI_ZERO_STATES && next_is_ready(m, whole))
    status = reduce_next(m, whole);
  return status;
}

/* Must a round be added, or ended? All ranks find the same, as this follows from their READY_FOR_REDUCE and operators,
 * and where these leave it open, from what they tell each other. A call that fails later and is made again does not ask
 * again. */
static gemini_status_t round_is_due(gmi_manager_t *m, gmi_arena_t *whole) {
  gmi_group_t *g = gmi_group_at(m, whole->shard.group);
  bool written = false;
  for (uint32_t i = 0; !written && i < whole->chunk_count; i++)
    written = gmi_chunk_has_only(&whole->chunks[i], GMI_VALID_DEVICE);
  if (whole->shard.due || whole->shard.reduced || (!written && whole->shard.since == m->bracket.op_serial_next))
    return GEMINI_OK;
  bool *all = calloc(g->ranks, sizeof *all);
  if (!all) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the values of %u ranks", g->ranks);
  gemini_status_t status = gmi_group_exchange_locked(m, g, &written, sizeof written, all, whole->name);
  for (uint32_t r = 0; !status && r < g->ranks; r++) whole->shard.due |= all[r];
  if (!status) whole->shard.since = m->bracket.op_serial_next;
  free(all);
  return status;
}

static void take_gradient(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m, (void)user;
  atomic_fetch_or(&t->word, GMI_TENSOR_GRADIENT);
}
gemini_status_t gmi_reduce_all(gmi_manager_t *m, gmi_arena_t *whole) {
  gemini_status_t status = gmi_gathered_leave(m, false);
  if (gmi_arena_has_sums(whole)) {
    if (!status) status = round_is_due(m, whole);
    while (!status && whole->shard.due && whole->chunk_count) status = reduce_next(m, whole);
    return status;
  }
  while (!status && whole->shard.reduced < whole->chunk_count) status = reduce_next(m, whole);
  if (!status) gmi_arena_each(m, gmi_arena_at(m, whole->store), 0, atomic_load(&whole->size), take_gradient, NULL);
  return status;
}

/* None of the chunks may have been written since they were added, as the next round would add that, or a later one. */
gemini_status_t gmi_reduce_part(gmi_manager_t *m, gmi_arena_t *whole, uint32_t first) {
  gemini_status_t status = gmi_groups_known(m);
  const uint32_t count = whole->chunk_count;
  bool added = whole->shard.summed && !whole->shard.due && !whole->shard.reduced;
  for (uint32_t i = first; added && i < count; i++) added = !gmi_chunk_has_only(&whole->chunks[i], GMI_VALID_DEVICE);
  if (!added && !whole->shard.due && !whole->shard.reduced)
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "gradients of arena %s are not READY_FOR_REDUCE: an update of a part adds a round that one of them "
                    "has begun",
                    whole->name);
  while (!status && (whole->shard.due || whole->shard.reduced) && whole->shard.reduced < count - first)
    status = reduce_next(m, whole);
  return status;
}

gemini_status_t gmi_gathered_drop(gmi_manager_t *m, gmi_arena_t *params, uint32_t first, uint32_t end) {
  gmi_arena_t *const both[] = { params, gmi_arena_reuser(m, params) };
  gemini_status_t status = GEMINI_OK;
  for (int k = 0; k < 2; k++) {
    for (uint32_t i = first; !status && both[k] && both[k]->chunks && i < end; i++) {
      gmi_chunk_t *c = &both[k]->chunks[i];
      if (!k) status = leave(m, c, false);
      if (!status && !gmi_chunk_unsettle(c, GMI_CHUNK_USERS))
        status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", both[k]->name);
    }
  }
  return status;
}

void gmi_gradients_taken(gmi_manager_t *m, gmi_arena_t *params) {
  gmi_arena_t *whole = gmi_arena_reuser(m, params);
  if (!whole) return;
  whole->shard.reduced = 0;
  gmi_arena_each(m, whole, 0, atomic_load(&whole->size), not_ready, NULL);
  for (uint32_t i = 0; i < atomic_load(&whole->chunk_count); i++) gmi_chunk_forget(m, &whole->chunks[i]);
}
