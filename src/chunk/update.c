/* Updates: cut parallel arenas into pieces, and queue each on the device or for the host's workers, where its chunks
 * are.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Threads: any with the manager's lock. Callbacks of device pieces run on it, without the lock; others on workers. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "base/array.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/deferred.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/speculate.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/streams.h"
#include "core/workers.h"

void gmi_piece_at(const gmi_walk_t *k, uint64_t begin, uint64_t end, gmi_piece_t *p) {
  p->begin = begin;
  p->end = (begin / k->unit + 1) * k->unit < end ? (begin / k->unit + 1) * k->unit : end;
  p->count = 0;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_arena_t *a = k->arenas[i], *store = gmi_arena_at(k->m, a->store);
    uint64_t first = p->begin * a->element_bytes >> k->m->cut.chunk_shift;
    uint64_t last = (p->end * a->element_bytes - 1) >> k->m->cut.chunk_shift;
    for (uint64_t c = first; c <= last; c++) {
      uint32_t n = 0;
      while (n < p->count && p->chunks[n] != &store->chunks[c]) n++;
      if (n == p->count) {
        p->modes[p->count] = 0;
        p->chunks[p->count++] = &store->chunks[c];
      }
      p->modes[n] |= k->modes[i];
    }
  }
}

/* The piece's span without ptr, which the caller sets. A piece of sharded arenas is one slice: what equal slices leave
 * over is the last rank's alone. */
static gemini_update_span_t piece_span(const gmi_walk_t *k, const gmi_piece_t *p, uint32_t tier) {
  uint64_t count = p->end - p->begin;
  if (k->slicing.chunk && count > k->slicing.own) count = k->slicing.own;
  return (gemini_update_span_t){ .struct_size = sizeof(gemini_update_span_t),
                                 .tier = tier,
                                 .first_element = p->begin,
                                 .element_count = count,
                                 .arena_count = k->u.arena_count };
}

/* From elements of the slices to those of the caller's arenas. */
static uint64_t named_shift(const gmi_walk_t *k, const gmi_piece_t *p) {
  const gmi_slicing_t *s = &k->slicing;
  return s->chunk ? p->begin / s->stride * (s->chunk - s->stride) + s->start : 0;
}

/* The gaps that overlap a piece: returns the first one's index, and their count. Gaps are sorted and disjoint. */
static uint64_t piece_gaps(const gmi_walk_t *k, const gmi_piece_t *p, uint64_t *count_out) {
  uint64_t low = 0, high = k->gap_count;
  while (low < high) {
    uint64_t mid = (low + high) / 2;
    if (k->gaps[mid].end <= p->begin) low = mid + 1;
    else high = mid;
  }
  uint64_t n = 0;
  while (low + n < k->gap_count && k->gaps[low + n].begin < p->end) n++;
  *count_out = n;
  return low;
}

static void gap_in_piece(const gmi_walk_t *k, const gmi_piece_t *p, uint64_t gap, uint64_t *begin_out,
                         uint64_t *count_out) {
  *begin_out = k->gaps[gap].begin > p->begin ? k->gaps[gap].begin : p->begin;
  uint64_t end = k->gaps[gap].end < p->end ? k->gaps[gap].end : p->end;
  *count_out = end - *begin_out;
}

bool gmi_piece_has_gaps(const gmi_walk_t *k, const gmi_piece_t *p) {
  uint64_t gaps;
  (void)piece_gaps(k, p, &gaps);
  return gaps;
}

void gmi_piece_range(const gmi_walk_t *k, const gmi_piece_t *p, uint32_t i, uint32_t *first_out, uint32_t *count_out) {
  uint32_t bytes = k->arenas[i]->element_bytes;
  *first_out = (uint32_t)(p->begin * bytes >> k->m->cut.chunk_shift);
  *count_out = (uint32_t)((p->end * bytes - 1) >> k->m->cut.chunk_shift) - *first_out + 1;
}

gemini_status_t gmi_piece_to_host(gmi_walk_t *k, gmi_piece_t *p) {
  gmi_manager_t *m = k->m;
  uint32_t missing = 0;
  for (uint32_t i = 0; i < p->count; i++) {
    gmi_chunk_hold_host(m, p->chunks[i], false); /* getting slots for the others must not reclaim this one's */
    missing += !gmi_chunk_has_slot(p->chunks[i]);
  }
  gemini_status_t status = gmi_host_room(m, missing);    /* for all, so that their reads overlap */
  if (status == GEMINI_ERR_OOM_FILE) status = GEMINI_OK; /* then one by one: each read frees a block for a write */
  for (uint32_t i = 0; !status && i < p->count; i++)
    status = gmi_chunk_to_host(m, p->chunks[i], p->modes[i] & GEMINI_WRITE, GEMINI_REASON_UPDATE);
  for (uint32_t i = 0; !status && i < p->count; i++) /* a failed read leaves the piece unqueued */
    if (!gmi_chunk_has(p->chunks[i], GMI_VALID_HOST)) status = gmi_files_reap(m, p->chunks[i]);
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_unhold_host(m, p->chunks[i], false);
  return status;
}

/* Lists the bytes that the worker is to clear before fn runs: the gaps in the piece, chunk by chunk. */
static void gap_zeros(const gmi_walk_t *k, const gmi_piece_t *p, uint64_t first_gap, uint64_t gaps, gmi_job_t *job) {
  gmi_manager_t *m = k->m;
  uint64_t chunk_bytes = UINT64_C(1) << m->cut.chunk_shift;
  for (uint64_t i = 0; i < gaps; i++) {
    uint64_t begin, count;
    gap_in_piece(k, p, first_gap + i, &begin, &count);
    gmi_arena_t *a = k->arenas[k->gap_arena];
    uint64_t at = begin * a->element_bytes, end = at + count * a->element_bytes, stop;
    for (; at < end; at = stop) {
      stop = (at / chunk_bytes + 1) * chunk_bytes < end ? (at / chunk_bytes + 1) * chunk_bytes : end;
      job->zeros[job->zero_count].address = gmi_range_host(m, gmi_arena_at(m, a->store), at);
      job->zeros[job->zero_count++].bytes = stop - at;
    }
  }
}

/* Hands a piece to the workers. All that can fail comes before the first slot's count changes. */
gemini_status_t gmi_piece_on_host(gmi_walk_t *k, gmi_piece_t *p, bool deferred) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = gmi_piece_to_host(k, p);
  for (uint32_t i = 0; !status && i < p->count; i++)
    status = gmi_fence_place(m, m->host.slots[gmi_chunk_slot(p->chunks[i])].fence);
  if (status) return status;
  uint64_t gaps, first_gap = piece_gaps(k, p, &gaps);
  uint32_t first, count, chunks = 0;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_piece_range(k, p, i, &first, &count);
    chunks += count;
  }
  uint64_t zeros = gaps ? gaps + chunks : 0; /* bound: each gap, and once more where a chunk's end divides one */
  size_t bytes = sizeof(gmi_job_t) + p->count * (sizeof(gmi_fence_t) + sizeof(gmi_slot_t *) + sizeof(uint64_t)) +
                 chunks * sizeof(uint8_t *) + zeros * sizeof *((gmi_job_t *)0)->zeros + sizeof(gmi_fence_t);
  gmi_job_t *job = calloc(1, bytes);
  if (!job) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
  uint8_t *at = (uint8_t *)(job + 1);
  job->zeros = (void *)at;
  at += zeros * sizeof *job->zeros;
  job->fences = (void *)at;
  at += (p->count + 1) * sizeof *job->fences;
  job->slots = (void *)at;
  at += p->count * sizeof *job->slots;
  job->after = (void *)at;
  at += p->count * sizeof *job->after;
  uint8_t **addresses = (void *)at;
  job->fn = k->u.fn;
  job->try_fn = k->u.try_fn;
  job->user = k->u.user;
  if (k->user) {
    atomic_fetch_add(&k->user->refs, 1);
    job->user_refs = &k->user->refs;
  }
  job->deferred = deferred;
  job->span = piece_span(k, p, GEMINI_TIER_HOST);
  job->named_shift = named_shift(k, p);
  job->next_use = p->next_use;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    const gmi_arena_t *store = gmi_arena_at(m, k->arenas[i]->store);
    job->element_bytes[i] = k->arenas[i]->element_bytes;
    job->chunks[i] = addresses;
    gmi_piece_range(k, p, i, &first, &count);
    for (uint32_t c = first; c < first + count; c++) *addresses++ = gmi_chunk_host(m, &store->chunks[c]);
  }
  gap_zeros(k, p, first_gap, gaps, job);
  if (!gmi_fence_reached(m, k->after)) job->fences[job->fence_count++] = k->after;
  for (uint32_t i = 0; i < p->count; i++) {
    gmi_chunk_t *c = p->chunks[i];
    gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
    if (!gmi_fence_reached(m, slot->fence)) job->fences[job->fence_count++] = slot->fence;
    job->after[job->slot_count] = slot->work_queued++;
    job->slots[job->slot_count++] = slot;
    if (!(p->modes[i] & GEMINI_WRITE)) continue;
    gmi_chunk_host_wrote(m, c);
    uint32_t kind = gmi_chunk_arena(m, c)->kind;
    if (m->file.store && kind != GEMINI_KIND_PARAM && kind != GEMINI_KIND_GRAD) gmi_host_updated(m, c);
  }
  gmi_workers_push(m, job);
  return GEMINI_OK;
}

/* Can the piece be queued on the host now, without waiting for free slots, a file, or earlier pieces of its chunks? */
static bool piece_is_ready(const gmi_walk_t *k, const gmi_piece_t *p) {
  uint32_t missing = 0;
  if (!k->m->file.store) return true;
  for (uint32_t i = 0; i < p->count; i++) {
    const gmi_chunk_t *c = p->chunks[i];
    if (gmi_chunk_left(c) || gmi_chunk_has_only(c, GMI_VALID_FILE)) return false;
    missing += !gmi_chunk_has_slot(c);
  }
  return missing <= gmi_host_free(k->m);
}

/* ---- copies of the caller's data; they stay until device work that a callback may have queued on them is done */
static gemini_status_t user_copy(gmi_walk_t *k) {
  enum { USER_BYTES_MAX = 1 << 20 };
  gemini_update_t *u = &k->u;
  if (!u->user_bytes) return GEMINI_OK;
  if (!u->user || u->user_bytes > USER_BYTES_MAX)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "user_bytes is %llu%s, must be at most %d",
                    (unsigned long long)u->user_bytes, u->user ? "" : " and user is NULL", USER_BYTES_MAX);
  k->user = aligned_alloc(16, sizeof *k->user + (u->user_bytes + 15) / 16 * 16);
  if (!k->user)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for %llu bytes of user",
                    (unsigned long long)u->user_bytes);
  *k->user = (gmi_update_user_t){ .next = k->m->update.users, .refs = 1 };
  k->m->update.users = k->user;
  memcpy(k->user->bytes, u->user, u->user_bytes);
  u->user = k->user->bytes;
  return GEMINI_OK;
}
void gmi_update_users_free(gmi_manager_t *m, bool all) {
  gmi_update_user_t **link = &m->update.users;
  while (*link) {
    gmi_update_user_t *user = *link;
    if (all || (!atomic_load(&user->refs) && gmi_fence_reached(m, user->end))) {
      *link = user->next;
      free(user);
    } else {
      link = &user->next;
    }
  }
}

void gmi_walk_unref(gmi_walk_t *k) {
  if (--k->refs) return;
  if (k->user) atomic_fetch_sub(&k->user->refs, 1);
  free(k->gaps);
  free(k);
}

/* Work that a callback queued cannot be withdrawn: a failure after it is recorded as one of asynchronous work, to be
 * reported by a later call, and work that no fence could be placed behind is waited for here. */
static void after_callback(gmi_manager_t *m, gemini_status_t status, gmi_fence_t fence) {
  if (!status) return;
  if (!m->failure.status) gmi_fail_keep(status, &m->failure);
  (void)gmi_fence_sync(m, fence);
}

/* Queues a piece on the device. All that can fail comes before the callback, so a failure leaves the piece unqueued.
 * The callback runs without the lock; other threads' calls that look at chunks wait until it has returned
 * (gmi_lock()). */
gemini_status_t gmi_piece_on_device(gmi_walk_t *k, gmi_piece_t *p, gmi_rest_t *rest) {
  gmi_manager_t *m = k->m;
  uint32_t stream = m->update.stream, held = 0;
  gemini_status_t status = GEMINI_OK;
  for (; !status && held < p->count; held += !status) {
    const char *why = gmi_chunk_hold_device(m, p->chunks[held], p->modes[held]);
    if (why)
      status =
          gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", gmi_chunk_arena(m, p->chunks[held])->name, why);
  }
  for (uint32_t i = 0; !status && i < p->count; i++)
    status = gmi_chunk_fetch(m, p->chunks[i], false, GEMINI_REASON_UPDATE, GMI_TAKE_EVICT | GMI_TAKE_SOON);
  if (!status) status = gmi_fence_wait(m, stream, k->after);
  for (uint32_t i = 0; !status && i < p->count; i++) status = gmi_chunk_wait(m, stream, p->chunks[i], p->modes[i]);
  gmi_fence_t begin = 0;
  if (!status) status = gmi_fence_now(m, stream, &begin);
  uint64_t gaps, first_gap = piece_gaps(k, p, &gaps);
  for (uint64_t i = 0; !status && i < gaps; i++) { /* idempotent: after a failure the piece is queued again */
    uint64_t from, count;
    gap_in_piece(k, p, first_gap + i, &from, &count);
    gmi_arena_t *a = k->arenas[k->gap_arena];
    status = gmi_device_zero(m, stream, a->base + from * a->element_bytes, count * a->element_bytes);
  }
  if (!status) {
    gemini_update_span_t span = piece_span(k, p, GEMINI_TIER_DEVICE);
    span.first_element += named_shift(k, p);
    span.stream = gmi_handle(m, GMI_HANDLE_STREAM, m->streams[m->update.stream].generation, m->update.stream);
    for (uint32_t i = 0; i < k->u.arena_count; i++)
      span.ptr[i] = span.out[i] = k->arenas[i]->base + p->begin * k->arenas[i]->element_bytes;
    for (uint32_t i = 0; i < p->count; i++)
      if (p->modes[i] & GEMINI_WRITE) gmi_chunk_wrote(m, p->chunks[i]);
    k->refs++;
    gmi_rest_queued(m->update.deferred, rest, p);
    const char *function = atomic_load_explicit(&m->watch.holder, memory_order_relaxed);
    gmi_callback_begin(m); /* drops the lock; the chunks stay, because they are held */
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, function, GMI_WAIT_CALLBACK, 0);
    gmi_span_run(m, k->u.fn, k->u.try_fn, k->u.user, &span, NULL);
    gmi_wait_end(m, &wait);
    gmi_callback_end(m, function);
    gmi_fence_t end = gmi_fence_later(m, stream);
    if (k->user) k->user->end = end; /* one stream, in order: behind all spans so far */
    gmi_walk_unref(k);
    for (uint32_t i = 0; i < p->count; i++)
      after_callback(m, gmi_chunk_use(m, p->chunks[i], p->modes[i], stream, true), end);
    after_callback(m, gmi_fence_now(m, stream, &end), end);
    m->update.end = end;
    m->trace.observer->span_queued(m, "update", "update on the device", begin, end);
    gmi_time_work(m, (gmi_timed_t){ .begin = begin, .end = end, .elements = p->end - p->begin });
  }
  for (uint32_t i = 0; i < held; i++) gmi_chunk_unhold_device(p->chunks[i], p->modes[i]);
  return status;
}

bool gmi_piece_is_pinned(const gmi_piece_t *p) {
  bool pinned = false;
  for (uint32_t i = 0; i < p->count; i++) pinned |= gmi_chunk_is_pinned(p->chunks[i]) && (p->modes[i] & GEMINI_WRITE);
  return pinned;
}

static void add_gap(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  gmi_walk_t *k = user;
  (void)m;
  if (atomic_load(&t->word) & GMI_TENSOR_GRADIENT) return;
  gmi_gap_t *gaps = gmi_array_room(k->gaps, k->gap_count, &k->gap_capacity, sizeof *gaps);
  if (!gaps) {
    k->gaps_lost = true;
    return;
  }
  k->gaps = gaps;
  uint32_t bytes = k->arenas[k->gap_arena]->element_bytes;
  gmi_gap_t gap = { t->offset / bytes, (t->offset + t->size) / bytes };
  gmi_gap_t *last = k->gap_count ? &k->gaps[k->gap_count - 1] : NULL;
  if (last && gap.begin < last->end) { /* tied tensors overlap */
    if (gap.end > last->end) last->end = gap.end;
  } else {
    k->gaps[k->gap_count++] = gap;
  }
}

/* Tensors of a reused arena that make an update of a range impossible. */
typedef struct {
  uint64_t begin, end; /* the range, bytes */
  gmi_tensor_t *cut;   /* holds a gradient, partly in the range: writing half of it would leave half a gradient */
  gmi_tensor_t *taken; /* holds a gradient */
} taken_t;
static void find_taken(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  taken_t *f = user;
  (void)m;
  if (!(atomic_load(&t->word) & GMI_TENSOR_GRADIENT)) return;
  f->taken = t;
  if (t->offset < f->begin || t->offset + t->size > f->end) f->cut = t;
}

static gemini_status_t check_taken(gmi_walk_t *k) {
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_arena_t *a = k->named[i];
    if (!a->reused) continue;
    taken_t f = { .begin = k->u.first_element * a->element_bytes };
    f.end = f.begin + k->u.element_count * a->element_bytes;
    gmi_arena_each(k->m, a, f.begin, f.end - f.begin, find_taken, &f);
    if (f.taken && k->modes[i] & GEMINI_READ)
      return gmi_fail(GEMINI_ERR_STATE, 0, "parameter %s cannot be read: its gradient has taken its bytes",
                      f.taken->name);
    if (f.cut && k->modes[i] & GEMINI_WRITE)
      return gmi_fail(
          GEMINI_ERR_INVALID, 0,
          "first_element %llu + element_count %llu cuts tensor %s, whose bytes hold its gradient: update all of it",
          (unsigned long long)k->u.first_element, (unsigned long long)k->u.element_count, f.cut->name);
  }
  return GEMINI_OK;
}

static void after_update(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m;
  (void)user;
  uint64_t word = atomic_load(&t->word);
  while (
      !atomic_compare_exchange_weak(&t->word, &word, gmi_tensor_word(word & ~GMI_TENSOR_GRADIENT, GEMINI_STATE_HOLD))) {
  }
}

static gemini_status_t walk_check(gmi_walk_t *k, const gemini_update_t *theirs, uint32_t *stream_out) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = gmi_struct_in(&k->u, sizeof k->u, theirs, GMI_V1_UPDATE, "update");
  if (!status) status = gmi_workers_failure(m); /* an earlier update did not run: further ones would hide wrong bytes */
  if (status) return status;
  gemini_update_t *u = &k->u;
  const uint32_t known =
      GEMINI_UPDATE_LATE | GEMINI_UPDATE_SPECULATE | GEMINI_UPDATE_COMMIT | GEMINI_UPDATE_PART | GEMINI_UPDATE_PASSES;
  if (u->flags & ~known) return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", u->flags & ~known);
  if (u->flags & GEMINI_UPDATE_SPECULATE &&
      (u->flags | GEMINI_UPDATE_PASSES) != (GEMINI_UPDATE_SPECULATE | GEMINI_UPDATE_PASSES))
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "flags is %#x: GEMINI_UPDATE_SPECULATE goes with no other flag but GEMINI_UPDATE_PASSES", u->flags);
  if (u->flags & GEMINI_UPDATE_PART && u->flags & GEMINI_UPDATE_COMMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "flags is %#x: GEMINI_UPDATE_PART does not go with GEMINI_UPDATE_COMMIT",
                    u->flags);
  if (u->reserved) return gmi_fail(GEMINI_ERR_INVALID, 0, "reserved is %u, must be 0", u->reserved);
  if (!u->arenas || !u->modes || (!u->fn && !u->try_fn))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "arenas, modes or fn is NULL");
  if (u->fn && u->try_fn) return gmi_fail(GEMINI_ERR_INVALID, 0, "fn and try_fn are both set: an update has one");
  if (!u->arena_count || u->arena_count > GMI_UPDATE_ARENAS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "arena_count is %u, must be 1 to %d", u->arena_count, GMI_UPDATE_ARENAS);
  status = gmi_stream_resolve(m, u->stream, stream_out);
  if (status) return status;
  k->gap_arena = GMI_NONE;
  uint64_t elements = UINT64_MAX;
  for (uint32_t i = 0; i < u->arena_count; i++) {
    gmi_arena_t *a = k->named[i] = k->arenas[i] = gmi_arena_get(m, u->arenas[i]);
    if (!a) return GEMINI_ERR_HANDLE;
    k->modes[i] = u->modes[i];
    if (u->modes[i] < GEMINI_READ || u->modes[i] > GEMINI_READ_WRITE)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "modes[%u] is %u, must be 1 to 3", i, u->modes[i]);
    if (a->like != k->arenas[0]->like)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s is not laid out like arena %s", a->name, k->arenas[0]->name);
    for (uint32_t j = 0; j < i; j++)
      if (k->arenas[j] == a) return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s is named twice", a->name);
    if (a->store != a->index) {
      if (u->modes[i] & GEMINI_WRITE)
        return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s reuses its parameters' bytes: an update can only read it",
                        a->name);
      k->gap_arena = i;
    }
    uint64_t has = atomic_load(&a->size) / a->element_bytes;
    if (has < elements) elements = has;
  }
  if (!u->element_count && u->first_element)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "element_count is 0, first_element %llu",
                    (unsigned long long)u->first_element);
  if (!u->element_count) u->element_count = elements;
  if (u->first_element > elements || u->element_count > elements - u->first_element)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "first_element + element_count is %llu + %llu, more than the %llu elements of the arenas",
                    (unsigned long long)u->first_element, (unsigned long long)u->element_count,
                    (unsigned long long)elements);
  if (u->flags & GEMINI_UPDATE_PART && !gmi_arena_is_sharded(k->named[0]))
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "flags is %#x: GEMINI_UPDATE_PART is for sharded arenas, and arena %s is not", u->flags,
                    k->named[0]->name);
  if (gmi_arena_is_sharded(k->named[0]) && u->element_count != elements && !(u->flags & GEMINI_UPDATE_PART))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "first_element + element_count is %llu + %llu: an update of sharded arenas takes all of their %llu "
                    "elements, unless it has GEMINI_UPDATE_PART",
                    (unsigned long long)u->first_element, (unsigned long long)u->element_count,
                    (unsigned long long)elements);
  return GEMINI_OK;
}

static bool in_walk(const void *user, const gmi_chunk_t *c) {
  const gmi_walk_t *k = user;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    const gmi_arena_t *a = k->arenas[i];
    uint64_t begin = k->u.first_element * a->element_bytes, end = begin + k->u.element_count * a->element_bytes;
    if (a->store == c->arena && c->index >= begin >> k->m->cut.chunk_shift &&
        c->index <= (end - 1) >> k->m->cut.chunk_shift)
      return true;
  }
  return false;
}

/* Refuses an update with a chunk in use, with a piece above the host budget, or, without a file tier, with more
 * chunks than fit on the host, or, where host and files have no room for all bytes, on host and device together. index:
 * of the update, for advice; NULL: assumes that no piece runs on the device. */
static gemini_status_t walk_room(gmi_walk_t *k, const uint32_t *index) {
  gmi_manager_t *m = k->m;
  uint64_t need = 0, slot_bytes = gmi_slot_bytes(m), number = 0, largest = 0;
  gmi_piece_t pieces[2] = { 0 }; /* a piece and the one before it */
  for (uint64_t at = k->u.first_element, end = at + k->u.element_count; at < end;
       at = pieces[number & 1].end, number++) {
    gmi_piece_t *p = &pieces[number & 1];
    const gmi_piece_t *before = &pieces[~number & 1];
    gmi_piece_at(k, at, end, p);
    if (p->count > largest) largest = p->count;
    if (m->file.store && p->count > m->host.slot_count)
      return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "the update needs %llu bytes of host memory at once, the budget is %llu",
                      (unsigned long long)p->count * slot_bytes, (unsigned long long)m->config.host_bytes);
    bool on_device = index && m->trace.advice->piece_on_device(m, *index, (uint32_t)number);
    for (uint32_t i = 0; i < p->count; i++) {
      gmi_chunk_t *c = p->chunks[i];
      const char *why = gmi_chunk_unsettle_to_change(c);
      bool counted = false; /* pieces of slices share chunks */
      for (uint32_t n = 0; n < before->count; n++) counted |= before->chunks[n] == c;
      if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", gmi_chunk_arena(m, c)->name, why);
      if (gmi_chunk_deferred(c) + k->chunk_pieces >= UINT16_MAX) {
        gemini_status_t status = gmi_updates_queue(m, c);
        if (status) return status;
      }
      if (counted) continue;
      need += gmi_chunk_has_slot(c) || !(on_device || gmi_chunk_is_pinned(c)) ? slot_bytes : 0;
    }
  }
  if (index && !m->file.store && gmi_home_is_short(m)) return gmi_home_fits(m, "the update", 2 * largest, in_walk, k);
  return gmi_host_fits(m, "the update", need, in_walk, k);
}

/* The chunks of a whole arena that the update takes, the last one exclusive. */
static uint32_t first_chunk(const gmi_walk_t *k) { return (uint32_t)(k->u.first_element / k->slicing.chunk); }
static uint32_t end_chunk(const gmi_walk_t *k) {
  return (uint32_t)((k->u.first_element + k->u.element_count + k->slicing.chunk - 1) / k->slicing.chunk);
}

/* Sharded arenas: adds the gradients that the update names and that have not been added yet, of which none is a gap any
 * more, and takes gathered parameters that it will outdate from the device. */
static gemini_status_t walk_gathered(gmi_walk_t *k) {
  k->slicing = gmi_slicing(k->m, k->named[0]);
  gemini_status_t status = gmi_part_check(k);
  const bool part = k->u.flags & GEMINI_UPDATE_PART;
  for (uint32_t i = 0; !status && i < k->u.arena_count; i++) {
    if (!gmi_arena_is_gradients(k->named[i])) continue;
    status = part ? gmi_reduce_part(k->m, k->named[i], first_chunk(k)) : gmi_reduce_all(k->m, k->named[i]);
  }
  for (uint32_t i = 0; !status && i < k->u.arena_count; i++)
    if (k->modes[i] & GEMINI_WRITE) status = gmi_gathered_drop(k->m, k->named[i], first_chunk(k), end_chunk(k));
  k->gap_arena = GMI_NONE;
  return status;
}
/* Turns from the caller's sharded arenas to those of the slices. */
static void walk_slices(gmi_walk_t *k) {
  for (uint32_t i = 0; i < k->u.arena_count; i++) k->arenas[i] = gmi_arena_slices(k->m, k->named[i]);
  const uint64_t end = gmi_slices_end(&k->slicing, k->u.first_element + k->u.element_count);
  k->u.first_element = gmi_slices_end(&k->slicing, k->u.first_element);
  k->u.element_count = end - k->u.first_element;
}

/* After the update the caller's tensors hold parameters. */
static void walk_tensors(gmi_walk_t *k, uint64_t first_element, uint64_t element_count) {
  const bool last = !(k->u.flags & GEMINI_UPDATE_PART) || !first_element; /* all elements are updated now */
  if (k->slicing.chunk) {
    uint32_t *updated = gmi_parts_updated(k->m, k->named[0]);
    *updated = last ? 0 : *updated + (uint32_t)((element_count + k->slicing.chunk - 1) / k->slicing.chunk);
  }
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_arena_t *a = k->named[i];
    if (gmi_arena_has_sums(a) && last) a->shard.summed = false; /* the next round is of the next step */
    if (!(k->modes[i] & GEMINI_WRITE)) continue;
    gmi_arena_each(k->m, a, first_element * a->element_bytes, element_count * a->element_bytes, after_update, NULL);
    if (gmi_arena_is_sharded(a)) gmi_gradients_taken(k->m, a);
  }
}

/* Accepts the update, which cannot fail: its tensors hold parameters, and every piece is in the list and counted in its
 * chunks, so a use of a chunk by any thread queues the chunk's pieces first. */
static void walk_accept(gmi_walk_t *k, uint64_t named_first, uint64_t named_count) {
  gmi_manager_t *m = k->m;
  gmi_piece_t p;
  k->tail->walk = k;
  k->tail->begin = k->u.first_element;
  k->tail->end = k->u.first_element + k->u.element_count;
  gmi_rest_insert(m->update.deferred, k->tail, NULL);
  for (uint64_t at = k->tail->begin; at < k->tail->end; at = p.end, m->update.deferred->count++) {
    gmi_piece_at(k, at, k->tail->end, &p);
    for (uint32_t i = 0; i < p.count; i++) {
      if (p.modes[i] & GEMINI_WRITE && !(k->u.flags & GEMINI_UPDATE_COMMIT)) gmi_chunk_unspeculate(m, p.chunks[i]);
      gmi_chunk_piece_accepted(p.chunks[i]);
    }
  }
  walk_tensors(k, named_first, named_count);
}

/* Queues the first piece of the tail, or defers it if it would have to wait for room or a file. */
static gemini_status_t tail_queue_one(gmi_walk_t *k, gmi_piece_t *p, bool device) {
  gmi_manager_t *m = k->m;
  bool pinned = gmi_piece_is_pinned(p);
  gemini_status_t status = GEMINI_OK;
  if (device || pinned || !m->file.store) status = gmi_updates_queue_left(m, p);
  if (status || !k->tail || k->tail->begin != p->begin) return status; /* a nested call in a callback queued it */
  status = device || pinned ? gmi_piece_on_device(k, p, k->tail) : GEMINI_ERR_OOM_DEVICE;
  if (pinned || !gmi_is_oom(status)) return status;
  if (!piece_is_ready(k, p))
    return gmi_tail_leave_one(m->update.deferred, k, p)
               ? GEMINI_OK
               : gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
  status = p->two_passes && gmi_piece_in_passes(k, p) ? GEMINI_OK : gmi_piece_on_host(k, p, false);
  if (!status) gmi_rest_queued(m->update.deferred, k->tail, p);
  return status;
}

/* Leaves a piece of the device to later callers if its copies would not start soon: the calling thread goes on to what
 * does not wait for them. */
static bool leaves_to_others(gmi_walk_t *k, const gmi_piece_t *p, uint32_t update, uint32_t number) {
  gmi_manager_t *m = k->m;
  const gmi_rest_t *first = m->update.deferred->first;
  const bool behind = first != k->tail && first->on_device; /* the pieces keep their order */
  if (!(k->u.flags & GEMINI_UPDATE_LATE) || m->file.store || gmi_piece_is_pinned(p) ||
      !(behind || gmi_links_are_full(m)))
    return false;
  gmi_rest_t *rest = gmi_tail_leave_one(m->update.deferred, k, p);
  if (!rest) return false;
  rest->on_device = true;
  rest->update = update;
  rest->number = number;
  return true;
}

/* May its pieces run in two passes? An update that returns when it is done would only do more. */
static bool has_late_passes(const gmi_walk_t *k) {
  const uint32_t both = GEMINI_UPDATE_PASSES | GEMINI_UPDATE_LATE;
  return (k->u.flags & both) == both;
}

/* Queues what can be queued now, and defers the rest. No failure is returned: the update has been accepted. */
static void walk_run(gmi_walk_t *k, uint32_t index) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = GEMINI_OK;
  gmi_piece_t p;
  while (!status && k->tail) {
    gmi_piece_at(k, k->tail->begin, k->tail->end, &p);
    uint32_t number = (uint32_t)(p.begin / k->unit - k->u.first_element / k->unit);
    bool device = m->trace.advice->piece_on_device(m, index, number);
    p.next_use = m->trace.advice->piece_use(m, index, number);
    p.two_passes = has_late_passes(k) && m->trace.advice->two_passes(m, index, number);
    if (gmi_spec_take(k, &p, device)) {
      gmi_rest_queued(m->update.deferred, k->tail, &p);
      continue;
    }
    if (device && leaves_to_others(k, &p, index, number)) continue;
    if (device) m->trace.observer->piece_begins(m, index, number);
    status = tail_queue_one(k, &p, device);
    if (device) m->trace.observer->piece_ends(m, index, number);
  }
  if (status) gmi_log(m, GEMINI_LOG_WARNING, "an update is pending: %s", gmi_fail_message());
  if (k->tail) gmi_tail_leave(k);
  pthread_cond_signal(&m->update.deferred->more);
}

/* Elements in a chunk of the arena with the smallest elements. */
static uint64_t chunk_elements(gmi_manager_t *m, const uint32_t *arenas, uint32_t arena_count, uint64_t chunk_bytes) {
  uint32_t smallest = 16;
  for (uint32_t i = 0; i < arena_count; i++) {
    uint32_t bytes = gmi_arena_at(m, arenas[i])->element_bytes;
    if (bytes < smallest) smallest = bytes;
  }
  return chunk_bytes / smallest;
}

uint64_t gmi_piece_elements(gmi_manager_t *m, const uint32_t *arenas, uint32_t arena_count, uint64_t chunk_bytes) {
  for (uint32_t i = 0; i < arena_count; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, arenas[i]);
    if (a->shard.whole != GMI_NONE) return gmi_slicing(m, a).stride;
  }
  return chunk_elements(m, arenas, arena_count, chunk_bytes);
}

/* Sets the unit, and finds the gaps. */
static gemini_status_t walk_cut(gmi_walk_t *k) {
  gmi_manager_t *m = k->m;
  uint32_t indexes[GMI_UPDATE_ARENAS];
  for (uint32_t i = 0; i < k->u.arena_count; i++) indexes[i] = k->arenas[i]->index;
  k->unit = gmi_piece_elements(m, indexes, k->u.arena_count, gmi_chunk_bytes(m));
  k->chunk_pieces = (chunk_elements(m, indexes, k->u.arena_count, gmi_chunk_bytes(m)) + k->unit - 1) / k->unit + 1;
  if (k->gap_arena != GMI_NONE) {
    gmi_arena_t *store = gmi_arena_at(m, k->arenas[k->gap_arena]->store);
    gmi_arena_each(m, store, k->u.first_element * store->element_bytes, k->u.element_count * store->element_bytes,
                   add_gap, k);
    if (k->gaps_lost) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
    bool written = false; /* clearing a gap overwrites the parameter, so the update must write the parameter anew */
    for (uint32_t i = 0; k->gap_count && i < k->u.arena_count; i++) {
      if (k->arenas[i] != store) continue;
      written = k->modes[i] & GEMINI_WRITE;
      if (k->modes[i] & GEMINI_READ)
        return gmi_fail(GEMINI_ERR_STATE, 0,
                        "elements %llu to %llu of arena %s cannot be read: their gradient was not written, and a zero "
                        "gradient would take their bytes",
                        (unsigned long long)k->gaps[0].begin, (unsigned long long)k->gaps[0].end, store->name);
    }
    if (k->gap_count && !written)
      return gmi_fail(GEMINI_ERR_STATE, 0,
                      "elements %llu to %llu of arena %s hold no gradient, and the update does not write arena %s",
                      (unsigned long long)k->gaps[0].begin, (unsigned long long)k->gaps[0].end,
                      k->arenas[k->gap_arena]->name, store->name);
  }
  return GEMINI_OK;
}

/* GEMINI_UPDATE_SPECULATE */
static gemini_status_t walk_speculate(gmi_walk_t *k, uint32_t stream) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = gmi_cut(m);
  if (status || !k->u.element_count) return status;
  if (gmi_arena_is_sharded(k->named[0]))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "arena %s is sharded: updates of it are not speculated",
                    k->named[0]->name);
  status = check_taken(k);
  if (!status) status = walk_cut(k);
  if (!status && stream != GMI_CALLER) status = gmi_fence_now(m, stream, &k->after);
  if (!status) gmi_speculate(k, stream);
  return status;
}

static gemini_status_t walk(gmi_walk_t *k, uint32_t stream) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = gmi_cut(m);
  if (status || !k->u.element_count) return status;
  const uint64_t named_first = k->u.first_element, named_count = k->u.element_count;
  const bool sharded = gmi_arena_is_sharded(k->named[0]);
  if (sharded) status = walk_gathered(k);
  if (!status) status = check_taken(k);
  if (status) return status;
  if (sharded) walk_slices(k);
  if (!k->u.element_count) { /* this rank has no slice of so few elements */
    walk_tensors(k, named_first, named_count);
    return GEMINI_OK;
  }
  k->tail = calloc(1, sizeof *k->tail);
  if (!k->tail) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
  gmi_reap(m);
  gmi_trace_update_t record = { .arena_count = k->u.arena_count,
                                .first_element = k->u.first_element,
                                .element_count = k->u.element_count,
                                .passes = has_late_passes(k) };
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    record.arenas[i] = k->arenas[i]->index;
    record.modes[i] = k->modes[i];
  }
  status = walk_cut(k);
  if (status) return status;
  status = walk_room(k, NULL);
  if (status && status != GEMINI_ERR_OOM_HOST) return status;
  gemini_status_t room = status;
  uint32_t index;
  m->trace.observer->update_comes(m, &record, &index);
  status = room ? walk_room(k, &index) : GEMINI_OK;
  if (!status && stream != GMI_CALLER) status = gmi_fence_now(m, stream, &k->after);
  if (status) {
    m->trace.observer->update_refused(m, index);
    return status;
  }
  walk_accept(k, named_first, named_count);
  walk_run(k, index);
  return GEMINI_OK;
}

gemini_status_t gmi_updates_finish(gmi_manager_t *m, const char *function) {
  gmi_lock(m, function);
  gemini_status_t queued = gmi_updates_queue(m, NULL);
  gmi_unlock(m);
  if (queued) return queued;
  gmi_workers_drain(m, function);
  gmi_lock(m, function);
  gmi_fence_t end;
  gemini_status_t status = gmi_fence_now(m, m->update.stream, &end);
  gmi_unlock(m);
  if (!status && !gmi_fence_reached(m, end)) {
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, function, GMI_WAIT_STREAM, m->update.stream);
    status = m->device.ops->stream.sync(m->device.self, m->update.stream, gmi_fence_mark(end));
    gmi_wait_end(m, &wait);
    if (status) gmi_fail_device(status, "an update on the device failed");
  }
  gmi_lock(m, function);
  if (!status) gmi_update_users_free(m, false);
  if (!status) status = gmi_workers_failure(m);
  else if (status == GEMINI_ERR_PEER) (void)m->groups.failure(m); /* the same status, and the rank's name */
  gmi_unlock(m);
  return status;
}

static gemini_status_t update(gmi_manager_t *m, const gemini_update_t *theirs) {
  gmi_walk_t *k = calloc(1, sizeof *k);
  if (!k) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
  k->m = m;
  k->refs = 1;
  uint32_t stream;
  gmi_lock(m, "gemini_update");
  gemini_status_t status = walk_check(k, theirs, &stream);
  gmi_update_users_free(m, false);
  if (!status) status = user_copy(k);
  if (!status) status = k->u.flags & GEMINI_UPDATE_SPECULATE ? walk_speculate(k, stream) : walk(k, stream);
  if (status) free(k->tail);
  bool late = k->u.flags & (GEMINI_UPDATE_LATE | GEMINI_UPDATE_SPECULATE);
  gmi_walk_unref(k);
  gmi_unlock(m);
  if (status || late) return status;
  status = gmi_updates_finish(m, "gemini_update");
  return status ? gmi_fail(GEMINI_ERR_PENDING, gmi_fail_code(), "%s", gmi_fail_message()) : GEMINI_OK;
}
gemini_status_t gemini_update(gemini_manager_t mgr, const gemini_update_t *update_in) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? update(m, update_in) : GEMINI_ERR_HANDLE);
}

gemini_status_t gemini_update_wait(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? gmi_updates_finish(m, __func__) : GEMINI_ERR_HANDLE);
}
