/* Adding gradients over the ranks. SPDX-License-Identifier: Apache-2.0
 *
 * Gradients that reuse their parameters' bytes are added once between two updates: `reduced` counts up to the number of
 * chunks, and the update sets it back. Others are added in rounds: the last chunk of a round sets it back.
 *
 * Chunks are added from the last one down, a *bucket* of them at a time: those whose numbers, divided by the number of
 * chunks of a bucket, are equal. To queue the sum of one chunk over NCCL takes the calling thread, and the kernel that
 * waits for other ranks on the GPU, about as long as to queue a bucket as one of NCCL's groups. All ranks must make the
 * same groups, whichever way their gradients become ready: so buckets follow from the numbers of chunks alone, and
 * updates of parts may not cut them (gmi_bucket_chunks()). */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/hash.h"
#include "chunk/cut.h"
#include "chunk/deferred.h"
#include "chunk/residency.h"
#include "chunk/slices.h"
#include "chunk/update.h"
#include "core/streams.h"

uint32_t gmi_bucket_chunks(gmi_manager_t *m, const gmi_group_t *g) {
  const uint64_t chunks = g->bucket_bytes / gmi_chunk_bytes(m);
  if (chunks <= 1 || g->reduce.ranks == 1) return 1;
  return chunks < GMI_BUCKET_CHUNKS ? (uint32_t)chunks : GMI_BUCKET_CHUNKS;
}

/* The chunks that are added next, the last one first. */
typedef struct {
  uint32_t count;
  gmi_chunk_t *chunks[GMI_BUCKET_CHUNKS];
  gmi_own_slice_t own[GMI_BUCKET_CHUNKS];
} bucket_t;
/* Fills in chunks and their number; 0: all chunks have been added. */
static void bucket_next(gmi_manager_t *m, const gmi_arena_t *whole, bucket_t *bucket_out) {
  bucket_out->count = 0;
  if (whole->shard.reduced >= whole->chunk_count) return;
  const uint32_t last = whole->chunk_count - 1 - whole->shard.reduced;
  bucket_out->count = last % gmi_bucket_chunks(m, gmi_group_at(m, whole->shard.group)) + 1;
  for (uint32_t i = 0; i < bucket_out->count; i++) bucket_out->chunks[i] = &whole->chunks[last - i];
}

/* ---- gradients that are ready */
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
bool gmi_reduce_next_is_ready(gmi_manager_t *m, const gmi_arena_t *whole) {
  bucket_t b;
  bucket_next(m, whole, &b);
  readiness_t r = { whole->index, b.count > 0 };
  for (uint32_t i = b.count; r.ready && i-- > 0;) /* the first chunk is mostly the last to be ready */
    gmi_arena_each(m, gmi_arena_at(m, whole->like), (uint64_t)b.chunks[i]->index << m->cut.chunk_shift,
                   gmi_chunk_bytes(m), look_at_gradient, &r);
  return r.ready;
}

/* ---- adding a bucket */
/* May the chunk be added now, and go to this rank's slice? */
static gemini_status_t reduce_check(gmi_manager_t *m, gmi_chunk_t *c, const gmi_own_slice_t *own) {
  gemini_status_t status = GEMINI_OK;
  if (!gmi_chunk_unsettle(c, GMI_CHUNK_USERS))
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", own->whole->name);
  if (!status && !gmi_arena_has_sums(own->whole)) {
    /* The sums take the bytes of the parameters' slices, so a gathered copy of these is outdated. */
    gmi_arena_t *params = gmi_arena_at(m, own->whole->store);
    status = gmi_gathered_evict(m, &params->chunks[c->index]);
    if (!status && gmi_chunk_is_resident(&params->chunks[c->index]))
      status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", params->name);
  }
  return status ? status : gmi_own_slice_check(own, true);
}
/* Gives the chunk a frame, with zeros if nothing was written, and its slice a place, and holds the chunk. */
static gemini_status_t reduce_bring(gmi_manager_t *m, gmi_chunk_t *c, const gmi_own_slice_t *own) {
  gemini_status_t status = gmi_chunk_fetch(m, c, false, GEMINI_REASON_CALLER, GMI_TAKE_EVICT);
  if (!status) status = gmi_own_slice_bring(m, own, true);
  const char *why = status ? NULL : gmi_chunk_hold_device(m, c, GEMINI_READ);
  return why ? gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", own->whole->name, why) : status;
}
static void unhold(gmi_manager_t *m, const bucket_t *b, uint32_t brought) {
  for (uint32_t i = 0; i < brought; i++) gmi_chunk_unhold_device(b->chunks[i], GEMINI_READ);
  for (uint32_t i = 0; i < b->count; i++) gmi_own_slice_unhold(m, &b->own[i]);
}
/* Everything that can fail for want of room comes before the collective: then this rank has not taken its turn yet, and
 * can take it later. The chunks and their slices are held afterwards. */
static gemini_status_t reduce_prepare(gmi_manager_t *m, const bucket_t *b) {
  gemini_status_t status = gmi_groups_known(m);
  uint32_t brought = 0;
  for (uint32_t i = 0; !status && i < b->count; i++) status = reduce_check(m, b->chunks[i], &b->own[i]);
  if (status) return status;
  for (uint32_t i = 0; i < b->count; i++) gmi_own_slice_hold(m, &b->own[i]);
  for (; brought < b->count; brought++)
    if ((status = reduce_bring(m, b->chunks[brought], &b->own[brought]))) break;
  if (status) unhold(m, b, brought);
  return status;
}

/* Queues the sums of what the chunks' frames hold. *end_out: behind them. *queued_out: other ranks wait for them, or
 * have them. */
static gemini_status_t queue_sums(gmi_manager_t *m, const bucket_t *b, gmi_fence_t *end_out, bool *queued_out) {
  gmi_group_t *g = b->own->group;
  const gmi_arena_t *whole = b->own->whole;
  const uint64_t slice = b->own->slicing.slice, rest = b->own->slicing.rest;
  void *frames[GMI_BUCKET_CHUNKS];
  gmi_fence_t begin = 0;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; i < b->count && !status; i++) {
    frames[i] = gmi_chunk_device(m, b->chunks[i]);
    status = gmi_chunk_wait(m, g->reduce_stream, b->chunks[i], GEMINI_READ_WRITE);
    gmi_chunk_wrote(m, b->chunks[i]);
  }
  if (!status) status = gmi_fence_now(m, g->reduce_stream, &begin);
  if (!status)
    status = gmi_group_reduce(m, g, frames, b->count, slice, whole->shard.dtype, whole->name, b->chunks[0]->index);
  if (status) return status;
  *queued_out = true;
  for (uint32_t i = 0; rest && i < b->count && !status; i++)
    status = gmi_group_reduce_rest(m, g, (uint8_t *)frames[i] + slice * g->reduce.ranks * whole->element_bytes, rest,
                                   whole->shard.dtype, whole->name, b->chunks[i]->index);
  if (!status) status = gmi_fence_now(m, g->reduce_stream, end_out);
  if (!status) {
    char label[GMI_COMM_LABEL_BYTES];
    snprintf(label, sizeof label, "chunk %u of arena %s", b->chunks[0]->index, whole->name);
    gmi_queued_add(&g->latest.sums, label, b->count, *end_out);
    m->trace.observer->span_queued(m, "sum", label, begin, *end_out);
  }
  if (!status) gmi_time_work(m, (gmi_timed_t){ begin, *end_out, b->count, NULL, &g->sums.shortest_ns });
  return status;
}

/* The chunk's sum is complete behind `end`, and in this rank's slice. */
static void was_added(gmi_manager_t *m, gmi_chunk_t *c, const gmi_own_slice_t *own, gmi_fence_t end) {
  gmi_group_t *g = own->group;
  const bool sums = gmi_arena_has_sums(own->whole);
  m->trace.observer->chunk_summed(m, c);
  gmi_group_sum_ends(g, end);
  if (!sums) g->queued.sums = gmi_hash(gmi_hash(g->queued.sums + 1, own->whole->index), c->index);
  g->reduced_chunks++;
  g->reduced_bytes += gmi_chunk_bytes(m) - own->bytes;
  uint32_t word;
  bool departs = gmi_chunk_departs(c, &word); /* it is not SETTLED: nobody can have acquired it */
  GMI_ASSERT(departs);
  (void)departs;
  gmi_chunk_leave_frame(m, c, sums ? GMI_VALID_ZERO : GMI_VALID_SLICES, end);
}

/* A collective that was queued cannot be queued again: if what belongs behind it fails, so does the group, unless there
 * is one rank, which loses nothing by adding again what it has not added to other sums. */
static gemini_status_t reduce_queue(gmi_manager_t *m, const bucket_t *b) {
  gmi_fence_t sums = 0, ends[GMI_BUCKET_CHUNKS] = { 0 };
  bool queued = false;
  gemini_status_t status = queue_sums(m, b, &sums, &queued);
  for (uint32_t i = 0; i < b->count && !status; i++)
    status = gmi_own_slice_copy_out(m, &b->own[i], gmi_chunk_device(m, b->chunks[i]), sums, &ends[i]);
  unhold(m, b, b->count);
  for (uint32_t i = 0; i < b->count && !status; i++) was_added(m, b->chunks[i], &b->own[i], ends[i]);
  if (!status || !queued || (b->own->group->ranks == 1 && !b->own->whole->shard.summed)) return status;
  return gmi_group_breaks_off(b->own->group, status);
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

/* Adds the gradients of the next bucket, if there is one. */
static gemini_status_t reduce_next(gmi_manager_t *m, gmi_arena_t *whole) {
  const uint32_t reduced = whole->shard.reduced;
  gemini_status_t status = GEMINI_OK;
  bucket_t b;
  bucket_next(m, whole, &b);
  for (uint32_t i = 0; !status && i < b.count; i++) {
    b.own[i] = gmi_own_slice_of(m, b.chunks[i]);
    for (uint32_t k = 0; !status && k < b.own[i].count; k++) status = gmi_updates_queue(m, b.own[i].parts[k].chunk);
  }
  if (status || !b.count || whole->shard.reduced != reduced) return status; /* a callback ran without the lock */
  status = reduce_prepare(m, &b);
  if (!status) status = reduce_queue(m, &b);
  if (status) return status;
  for (uint32_t i = 0; i < b.count; i++) {
    whole->shard.reduced++;
    if (gmi_arena_has_sums(whole)) round_goes_on(m, whole, b.chunks[i]);
  }
  return GEMINI_OK;
}

gemini_status_t gmi_reduce_ready(gmi_manager_t *m, gmi_arena_t *whole) {
  gemini_status_t status = GEMINI_OK;
  whole->shard.due = true;
  while (!status && whole->shard.due && whole->shard.stage != GEMINI_ZERO_STATES && gmi_reduce_next_is_ready(m, whole))
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

void gmi_gradients_taken(gmi_manager_t *m, gmi_arena_t *params) {
  gmi_arena_t *whole = gmi_arena_reuser(m, params);
  if (!whole) return;
  whole->shard.reduced = 0;
  gmi_arena_each(m, whole, 0, atomic_load(&whole->size), not_ready, NULL);
  for (uint32_t i = 0; i < atomic_load(&whole->chunk_count); i++) gmi_chunk_forget(m, &whole->chunks[i]);
}

gemini_status_t gmi_part_check(const gmi_walk_t *k) {
  const gemini_update_t *u = &k->u;
  const char *name = k->named[0]->name;
  const uint32_t updated = *gmi_parts_updated(k->m, k->named[0]);
  const uint64_t chunk = k->slicing.chunk, end = u->first_element + u->element_count;
  if (!(u->flags & GEMINI_UPDATE_PART) && !updated) return GEMINI_OK;
  if (!(u->flags & GEMINI_UPDATE_PART))
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "%u chunks of arena %s have been updated: the other parts come next, with GEMINI_UPDATE_PART",
                    updated, name);
  uint64_t elements = UINT64_MAX;
  bool sums = false;
  for (uint32_t i = 0; i < u->arena_count; i++) {
    uint64_t has = atomic_load(&k->named[i]->size) / k->named[i]->element_bytes;
    if (has < elements) elements = has;
    sums |= gmi_arena_has_sums(k->named[i]);
    if (k->named[i]->reused || k->named[i]->store != k->named[i]->index)
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "gradients take the bytes of arena %s: an update takes all of it",
                      gmi_arena_at(k->m, k->named[i]->store)->name);
  }
  if (!sums)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "an update of a part of arena %s names no arena of gradients", name);
  const uint64_t left = (elements + chunk - 1) / chunk - updated, last = updated ? left * chunk : elements;
  const uint64_t bucket = chunk * gmi_bucket_chunks(k->m, gmi_group_at(k->m, k->named[0]->shard.group));
  if (u->first_element % bucket || end != last)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "elements are %llu to %llu: a part of arena %s begins at a multiple of the %llu of a bucket of "
                    "gradients, and the next one ends at %llu",
                    (unsigned long long)u->first_element, (unsigned long long)end, name, (unsigned long long)bucket,
                    (unsigned long long)last);
  return GEMINI_OK;
}
