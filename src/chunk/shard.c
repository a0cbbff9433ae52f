/* Sharded arenas: gathering chunks, and ranges of slices. SPDX-License-Identifier: Apache-2.0
 *
 * Collectives are queued on two streams of the group, one for gathers and one for sums. All ranks queue the same ones
 * in the same order, because what they queue follows from the callers' calls alone: an acquire gathers the chunks that
 * are not on the device, in the order in which it names them, and which are on the device follows from earlier acquires
 * and from the ends of operators (gmi_gathered_leave()), never from local memory. Chunks that were gathered are
 * therefore never evicted for room. Gradients are added in the order of descending chunks (sums.c).
 *
 * A rank that waits for others holds frames, and slots of slices, that its own later work may wait for. This cannot end
 * in a ring of ranks that wait for each other as long as all ranks queue gathers and sums at the same points of their
 * programs. Where they do not, the deadline ends it.
 *
 * Threads: any thread that holds the manager's lock. The ranks' callers must not depend on an order of threads: calls
 * for one group come from one thread at a time. */
#include "chunk/slices.h"

#include "base/hash.h"
#include "chunk/accesses.h"
#include "chunk/cut.h"
#include "chunk/nonmodel.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/streams.h"
#include "gemini/group.h"

gemini_status_t gmi_gathered_queue(gmi_manager_t *m, gmi_chunk_t *c, bool *queued_out) {
  gemini_status_t status = GEMINI_OK;
  gmi_own_slice_t p = gmi_own_slice_of(m, c);
  for (uint32_t i = 0; !status && i < p.count; i++) {
    *queued_out |= gmi_chunk_deferred(p.parts[i].chunk) > 0;
    status = gmi_updates_queue(m, p.parts[i].chunk);
  }
  return status;
}

/* ---- gather */
/* Queues the gather of a frame whose own slice is complete behind ready, or holds it back for others. */
static gemini_status_t gather(gmi_manager_t *m, const gmi_chunk_t *c, uint32_t frame, const gmi_own_slice_t *p,
                              gmi_fence_t ready, gmi_fence_t *arrive_out) {
  gmi_group_t *g = p->group;
  const uint64_t element = p->whole->element_bytes, slice = p->slicing.slice * element,
                 rest = p->slicing.rest * element;
  gemini_status_t status = gmi_fence_wait(m, g->gather_stream, ready);
  void *registered = status ? NULL : gmi_registered_address(m, g, frame);
  if (!status)
    status = gmi_group_gather(m, g, registered ? registered : gmi_chunk_device(m, c), slice, rest, p->whole->name,
                              c->index, arrive_out);
  if (status) return status;
  g->queued.gathers = gmi_hash(gmi_hash(g->queued.gathers + 1, p->whole->index), c->index);
  g->gathered_chunks++;
  g->gathered_bytes += gmi_chunk_bytes(m) - p->bytes;
  return GEMINI_OK;
}

gemini_status_t gmi_gathered_fetch(gmi_manager_t *m, gmi_chunk_t *c, bool fresh, uint32_t reason, uint32_t flags) {
  gmi_own_slice_t p = gmi_own_slice_of(m, c);
  const bool gathers = !fresh && gmi_chunk_has(c, GMI_VALID_SLICES);
  gemini_status_t status = gmi_groups_known(m);
  if (!status && gathers) status = gmi_own_slice_check(&p, false);
  if (status) return status;
  uint32_t frame;
  gmi_own_slice_hold(m, &p); /* the eviction that frees a frame must not take their slots */
  status = gmi_frame_take(m, gmi_chunk_mapping(c), reason == GEMINI_REASON_DEMAND ? GEMINI_REASON_PRESSURE : reason,
                          flags | GMI_TAKE_READY, &frame); /* sums have frames that others would wait for */
  if (!status && gathers) {
    status = gmi_own_slice_bring(m, &p, false);
    if (status) gmi_frame_give(m, frame, m->frames.at[frame].ready);
  }
  gmi_own_slice_unhold(m, &p);
  if (status) return status;
  const uint32_t stream = gmi_link_in(m)->stream;
  gmi_fence_t ready = m->frames.at[frame].ready, arrive = ready;
  status = gmi_map(m, gmi_chunk_device(m, c), frame, gmi_chunk_mapping(c));
  bool mapped = !status;
  if (!status && !fresh) {
    status = gmi_fence_wait(m, stream, ready); /* the frame's previous user */
    if (!status && gathers) status = gmi_own_slice_copy_in(m, &p, gmi_chunk_device(m, c), stream);
    else if (!status) status = gmi_device_zero(m, stream, gmi_chunk_device(m, c), gmi_frame_bytes(m));
    if (!status) status = gmi_fence_now(m, stream, &arrive);
    if (!status && !gathers) gmi_group_sum_delays(m, p.group, ready, arrive);
    if (!status && gathers) status = gather(m, c, frame, &p, arrive, &arrive);
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
  gmi_own_slice_t p = gmi_own_slice_of(m, c);
  gmi_fence_t end;
  gemini_status_t status = gmi_own_slice_check(&p, true);
  if (status) return status;
  gmi_own_slice_hold(m, &p);
  status = gmi_own_slice_bring(m, &p, true);
  gmi_own_slice_unhold(m, &p);
  if (!status) status = gmi_chunk_wait(m, gmi_link_out(m)->stream, c, GEMINI_READ);
  if (!status) status = gmi_own_slice_copy_out(m, &p, gmi_chunk_device(m, c), 0, &end);
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
 * copy then: outside operators every acquire gathers anew (before_gathers()). */
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

/* Before a range of a sharded arena is acquired on the device. Outside operators, what earlier acquires have gathered
 * leaves. */
static gemini_status_t before_gathers(gmi_manager_t *m) {
  return atomic_load(&m->bracket.op_serial) ? GEMINI_OK : gmi_gathered_leave(m, !m->bracket.iteration_open);
}

bool gmi_range_gathers(const gmi_range_t *r) {
  if (!gmi_arena_is_sharded(r->arena) || gmi_arena_is_gradients(r->arena)) return false;
  for (uint64_t i = r->first; i <= r->last; i++)
    if (!gmi_chunk_is_resident(&r->store->chunks[i])) return true;
  return false;
}

/* ---- places of gradients and parameters on the device */
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
  if (whole->shard.due && whole->shard.stage != GEMINI_ZERO_STATES && gmi_reduce_next_is_ready(m, whole))
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
    return status ? status : before_gathers(m);
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
