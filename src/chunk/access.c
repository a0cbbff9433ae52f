/* Acquire and release. SPDX-License-Identifier: Apache-2.0
 *
 * Everything here runs on the caller's thread. Acquire has two paths. The fast path serves tensors on the device whose
 * chunks are resident and settled: it takes no lock (for a part of a tensor one lease table's, for a moment) and adds a
 * user to the tensor's word and to each chunk's word. It never reports an error: whatever it cannot serve, invalid
 * arguments included, goes to the slow path (acquire.c), which works under the manager's lock and records the error.
 *
 * A user in the tensor's word keeps the tensor and its arena alive, and is therefore added first and removed last
 * (except in release_whole()). A user in a chunk's word keeps the chunk's frame. An acquire succeeds for the whole
 * batch or changes nothing: both paths undo their users on failure, and states and bytes change only after nothing can
 * fail any more.
 *
 * The words are updated in compare-and-swap loops, as a plain fetch_add could overflow a field or add a user to a
 * tensor that is being unregistered. */
#include "chunk/acquire.h"

#include "chunk/accesses.h"
#include "chunk/graph.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/streams.h"

/* The thread's counter of hits, + 1. */
static __attribute__((noinline)) uint32_t choose_stripe(void) {
  static _Atomic uint32_t owned, shared; /* owned is not counted on for ever, as it must not overflow */
  const uint32_t own = atomic_load(&owned) < GMI_HIT_OWNED ? atomic_fetch_add(&owned, 1) : GMI_HIT_OWNED;
  if (own < GMI_HIT_OWNED) return own + 1;
  return GMI_HIT_OWNED + atomic_fetch_add(&shared, 1) % (GMI_HIT_STRIPES - GMI_HIT_OWNED) + 1;
}

/* A counter of the thread's own needs no atomic addition, which costs as much as one of the users' words. */
static inline void count_hits(gmi_manager_t *m, uint64_t hits) {
  static _Thread_local uint32_t mine; /* its number + 1; one lookup of the variable in a call */
  uint32_t *at = &mine, stripe = *at;
  if (__builtin_expect(!stripe, 0)) *at = stripe = choose_stripe();
  _Atomic uint64_t *counter = &m->stripes[stripe - 1].hits;
  if (stripe > GMI_HIT_OWNED) atomic_fetch_add_explicit(counter, hits, memory_order_relaxed);
  else atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + hits, memory_order_relaxed);
}

void gmi_count_hits(gmi_manager_t *m, uint64_t hits) { count_hits(m, hits); }

/* Do bytes that a parameter and its gradient share hold what the tensor is? Relaxed: the flag changes under the lock,
 * and a thread that relies on a write of another thread has synchronised with it. */
static inline bool holds_own(gmi_manager_t *m, const gmi_arena_t *a, gmi_tensor_t *t) {
  bool holds_gradient = atomic_load_explicit(&gmi_tensor_base(m, t)->word, memory_order_relaxed) & GMI_TENSOR_GRADIENT;
  return holds_gradient == (a->store != a->index);
}

/* The functions of the fast path are inlined wherever they are called, so that the record of an access that they hand
 * on stays in registers. */
#define FAST static inline __attribute__((always_inline))

/* One access on the fast path. */
typedef struct {
  gmi_tensor_t *tensor;
  gmi_arena_t *arena, *store;
  uint64_t offset, size, first, last; /* bytes of the arena; chunks */
  uint64_t end;                       /* behind the last chunk that is held; first: none is */
  uint32_t field;                     /* the field of the tensor's word that counts it */
  uint32_t mode;                      /* of the access, which is read once */
  bool leased;
} fast_t;

/* Finds the record that the handle of an access names, and the handle's generation: whether the record is still that
 * tensor's, only life says. False: it is no access to a tensor of this manager on the device, in a mode that exists. */
FAST bool fast_record(gmi_manager_t *m, const gemini_access_t *access, fast_t *f, uint32_t *generation_out) {
  uint64_t object = gmi_object_id(access);
  f->mode = access->mode;
  f->tensor = &m->tensors.at[(uint32_t)object & (GMI_TENSORS - 1)];
  *generation_out = (uint32_t)(object >> GMI_TENSOR_INDEX_BITS) & GMI_TENSOR_GENERATIONS;
  return gmi_handle_is(m, object, GMI_HANDLE_TENSOR) && access->tier == GEMINI_TIER_DEVICE && f->mode - 1 <= 2 &&
         *generation_out;
}

/* Sets the bytes that an access names of a tensor. Returns false if they are none, or not all in the tensor. */
FAST bool fast_bytes(uint64_t offset, uint64_t size, fast_t *f) {
  const gmi_tensor_t *t = f->tensor;
  if (!(size | offset)) size = t->size;
  f->offset = t->offset + offset;
  f->size = size;
  return size && offset <= t->size && size <= t->size - offset;
}

/* Sets the arenas of these bytes; sharded gradients have chunks of their own. */
FAST void fast_arenas(gmi_manager_t *m, fast_t *f) {
  gmi_arena_t *a = f->arena = gmi_arena_at(m, f->tensor->arena);
  f->store = a->chunks ? a : gmi_arena_at(m, a->store);
}
/* Sets the chunks of these bytes, of which the tensor or a chunk must be held: else the chunk size may change. */
FAST void fast_span(gmi_manager_t *m, fast_t *f) {
  f->first = f->end = f->offset >> m->cut.chunk_shift;
  f->last = (f->offset + f->size - 1) >> m->cut.chunk_shift;
}

/* Do the bytes of a held tensor hold what it is, and are all chunks records? alone: the batch has no other access.
 * Otherwise a write of a tensor that shares its bytes with a gradient takes the slow path, which checks that one batch
 * does not write both. The acquire load pairs with the store in gmi_arena_grow(): records below the count are
 * initialised. */
FAST bool fast_fits(gmi_manager_t *m, bool alone, const fast_t *f) {
  const gmi_arena_t *a = f->arena;
  bool shares = a->store != a->index || a->reused;
  if (shares && (!holds_own(m, a, f->tensor) || (!alone && f->mode & GEMINI_WRITE))) return false;
  return f->last < atomic_load_explicit(&f->store->chunk_count, memory_order_acquire);
}

/* Holds the chunks of a held tensor. Returns false if it cannot be done without the lock; f says what is held then. */
static bool fast_chunks(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream, bool alone, fast_t *f) {
  if (!fast_bytes(access->offset_bytes, access->size_bytes, f)) return false;
  fast_arenas(m, f);
  fast_span(m, f);
  if (!fast_fits(m, alone, f)) return false;
  bool whole = f->size == f->tensor->size;
  uint32_t field = whole ? f->mode : GMI_TENSOR_OTHERS;
  if (field != f->field) {
    if (!gmi_tensor_rehold(f->tensor, f->field, field)) return false;
    f->field = field;
  }
  for (; f->end <= f->last; f->end++)
    if (!gmi_chunk_hold_fast(m, &f->store->chunks[f->end], f->mode, stream)) return false;
  if (whole) return true;
  gmi_lease_key_t key = gmi_lease_key(access, f->size); /* last: it takes a lock, for nothing if a chunk is not held */
  return f->leased = gmi_lease_add(&m->leases, &key) == GEMINI_OK;
}

/* Undoes the lease, the users of chunks, and the tensor's user, in this order: the tensor goes last. */
static void fast_undo(gmi_manager_t *m, const gemini_access_t *access, const fast_t *f) {
  if (f->leased) {
    gmi_lease_key_t key = gmi_lease_key(access, f->size);
    if (gmi_lease_claim(&m->leases, &key)) gmi_lease_end(&m->leases, &key);
  }
  for (uint64_t i = f->first; i < f->end; i++) gmi_chunk_unhold_device(&f->store->chunks[i], f->mode);
  gmi_tensor_unhold(f->tensor, f->field);
}

/* Adds a user to the tensor, and returns true if it is the one of the handle. Otherwise nothing has changed.
 *
 * The acquire load of chunk_bytes pairs with the store in cut_install(): chunk_shift and the tables are set. The record
 * of an unregistered tensor may serve a new one at any time, so life is checked twice. The first check keeps stale
 * handles from disturbing other tensors. The second one decides: once the user is in the word, the tensor cannot be
 * dropped, so if the generation is still the handle's, it stays so. If not, another tensor had one user too many for a
 * moment; code that changes words under the lock must therefore not assume that they are stable. */
FAST bool fast_tensor(gmi_manager_t *m, uint32_t generation, uint32_t field, fast_t *f) {
  gmi_tensor_t *t = f->tensor;
  if (!atomic_load_explicit(&m->cut.chunk_bytes, memory_order_acquire) ||
      atomic_load_explicit(&t->life, memory_order_acquire) != generation || !gmi_tensor_hold(t, field))
    return false;
  f->field = field;
  if (atomic_load_explicit(&t->life, memory_order_acquire) == generation) return true;
  gmi_tensor_unhold(t, field); /* the tensor was unregistered, and the record serves another one */
  return false;
}

/* Holds the tensor and its chunks. Returns false for any reason, without an error; nothing has changed then. */
static bool fast_hold(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream, bool alone, fast_t *f) {
  uint32_t generation;
  /* The record cannot be read before it is held, so whether size_bytes is the whole tensor is a guess here;
   * fast_chunks() moves the user to the right field. */
  if (!fast_record(m, access, f, &generation) ||
      !fast_tensor(m, generation, access->size_bytes ? GMI_TENSOR_OTHERS : f->mode, f))
    return false;
  f->first = f->end = 0;
  f->leased = false;
  if (fast_chunks(m, access, stream, alone, f)) return true;
  fast_undo(m, access, f);
  return false;
}

/* The same for what is frequent, of the same parts, but straight: one access to all of a tensor (its size_bytes is 0)
 * that lies in one chunk, which can be held at once. Whatever is otherwise is left to fast_hold(). */
FAST bool straight_hold(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream, fast_t *f) {
  uint32_t generation;
  if (!fast_record(m, access, f, &generation) || (access->size_bytes | access->offset_bytes) ||
      !fast_tensor(m, generation, f->mode, f))
    return false;
  if (fast_bytes(0, 0, f)) {
    fast_arenas(m, f);
    fast_span(m, f);
    if (f->first == f->last && fast_fits(m, true, f) &&
        gmi_chunk_hold_now(&f->store->chunks[f->first], f->mode, stream))
      return true;
  }
  gmi_tensor_unhold(f->tensor, f->field);
  return false;
}

FAST void fast_commit(gmi_manager_t *m, gemini_access_t *access, const fast_t *f) {
  access->ptr = f->arena->base + f->offset;
  gmi_trace_tensor(m, f->tensor, f->arena, f->offset, f->size, f->mode);
  count_hits(m, f->last - f->first + 1);
}

/* The fast path takes accesses from the front until one fails; the slow path takes the rest. The slow path never waits
 * for users of chunks to go, so holding the first part while it takes the lock cannot deadlock; it can only find these
 * chunks busy, as with those of any other caller. A batch larger than GMI_SMALL_BATCH is cut there to bound the stack.
 *
 * Until this thread has the lock, another one may destroy the stream, and its index may get a new stream: the slow path
 * resolves the handle again. The fast path need not. At worst it takes the new stream's fences for earlier work of its
 * own stream and does not wait for them, but no work can be queued on that one any more. */
static gemini_status_t acquire(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, gemini_stream_t stream) {
  uint32_t s;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  if (status) return status;
  if (gmi_graph_begun(m, s)) {
    bool captures = false;
    gmi_lock(m, "gemini_acquire");
    status = gmi_stream_resolve(m, stream, &s);
    if (!status) status = gmi_graph_captures(m, s, &captures);
    if (!status && captures) status = gmi_graph_acquire(m, accesses, count, s);
    gmi_unlock(m);
    if (status || captures) return status;
  }
  fast_t fast[GMI_SMALL_BATCH];
  uint64_t n = 0;
  while (n < count && n < GMI_SMALL_BATCH && fast_hold(m, &accesses[n], s, count == 1, &fast[n])) n++;
  if (n < count) {
    gmi_lock(m, "gemini_acquire");
    status = gmi_stream_resolve(m, stream, &s);
    if (!status) status = gmi_acquire_slow(m, accesses + n, count - n, s);
    gmi_unlock(m);
  }
  for (uint64_t i = 0; i < n; i++) {
    if (status) fast_undo(m, &accesses[i], &fast[i]);
    else fast_commit(m, &accesses[i], &fast[i]);
  }
  return status;
}

/* Accesses of another version's size are copied first. */
static __attribute__((noinline)) gemini_status_t acquire_any(gmi_manager_t *m, gemini_access_t *theirs, uint64_t count,
                                                             gemini_stream_t stream) {
  gmi_accesses_t accesses;
  gemini_status_t status = gmi_accesses_in(&accesses, theirs, count);
  if (status) return status;
  status = acquire(m, accesses.copies ? accesses.copies : theirs, count, stream);
  if (!status && accesses.copies) gmi_accesses_out(accesses.copies, theirs, count);
  gmi_accesses_free(&accesses);
  return status;
}
gemini_status_t gemini_acquire(gemini_manager_t mgr, gemini_access_t *accesses, uint64_t count,
                               gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  uint32_t s;
  fast_t f;
  if (count != 1 || !accesses || !gmi_accesses_are_ours(accesses, 1) || !gmi_stream_find(m, stream, &s) ||
      gmi_graph_begun(m, s) || !straight_hold(m, accesses, s, &f))
    API_RETURN(acquire_any(m, accesses, count, stream));
  fast_commit(m, accesses, &f);
  return GEMINI_OK;
}

/* ---- release, in two passes. In the first, each access claims one acquire; if one has none to claim, all claims are
 * given up and nothing has changed. In the second, all claimed acquires end, even if the stream of one cannot be made
 * to wait. */
static gemini_status_t not_acquired(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  return gmi_fail(GEMINI_ERR_STATE, 0,
                  "%llu bytes at offset %llu of %s were not acquired with this mode and tier, or are released already: "
                  "a release names ranges as their acquires did",
                  (unsigned long long)r->size, (unsigned long long)gmi_range_key(m, access, r).offset,
                  gmi_range_name(m, r));
}

/* Claims the acquire that the access names. A claimed acquire still counts as a use, so the tensor and the chunks stay
 * until the second pass. In the tensor's word a claim moves the use to the field OTHERS, where no other release of the
 * whole tensor finds it. */
static gemini_status_t claim(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r) {
  gemini_status_t status = gmi_access_check(access);
  if (!status) status = gmi_range_bytes(m, access, r);
  if (status) return status;
  if (gmi_access_is_whole(access, r->tensor, r->size)) {
    if (!gmi_tensor_rehold(r->tensor, access->mode, GMI_TENSOR_OTHERS)) return not_acquired(m, access, r);
    gmi_range_chunks(m, r);
    return GEMINI_OK;
  }
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  if (r->size && !gmi_lease_claim(&m->leases, &key)) return not_acquired(m, access, r);
  gmi_range_chunks(m, r);
  gmi_range_placed(m, access, r);
  void *ptr = gmi_range_pointer(m, access, r);
  if (access->tier == GEMINI_TIER_DEVICE || access->ptr == ptr || !r->size) return GEMINI_OK;
  gmi_lease_unclaim(&m->leases, &key);
  return gmi_fail(GEMINI_ERR_STATE, 0, "ptr of %s is %p, must be %p, which the acquire returned", gmi_range_name(m, r),
                  access->ptr, ptr);
}

static void unclaim(gmi_manager_t *m, const gemini_access_t *access) {
  gmi_range_t r;
  if (gmi_range_bytes(m, access, &r)) return; /* never: the claim keeps the object */
  gmi_lease_key_t key = gmi_range_key(m, access, &r);
  if (!r.size) return;
  if (!gmi_access_is_whole(access, r.tensor, r.size)) gmi_lease_unclaim(&m->leases, &key);
  else (void)gmi_tensor_rehold(r.tensor, GMI_TENSOR_OTHERS, access->mode);
}

/* Ends a use of each chunk from first to last on the device. Stores the stream's fence before it drops the count: a
 * thread that sees the new count must see the fence. If the stream cannot be made to wait for another use (all entries
 * are taken), it returns the error, and the chunks are released all the same. */
static gemini_status_t release_device(gmi_manager_t *m, gmi_arena_t *store, uint64_t first, uint64_t last,
                                      uint32_t mode, uint32_t stream, bool locked) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = first; i <= last; i++) {
    const gemini_status_t used = gmi_chunk_use(m, &store->chunks[i], mode, stream, locked);
    if (used) status = used;
    gmi_chunk_unhold_device(&store->chunks[i], mode);
  }
  return status;
}

/* The same on the host, under the lock. */
static gemini_status_t release_host(gmi_manager_t *m, const gmi_range_t *r, uint32_t mode, uint32_t stream) {
  gemini_status_t status = gmi_slots_use(m, r->store->chunks, r->first, r->last, stream);
  for (uint64_t i = r->first; i <= r->last; i++) {
    gmi_chunk_unhold_host(m, &r->store->chunks[i], mode & GEMINI_WRITE);
    gmi_host_released(m, &r->store->chunks[i]);
  }
  return status;
}

/* Ends a claimed acquire: chunks first, the tensor's user last, as it keeps the records alive. */
static gemini_status_t end(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r, uint32_t stream,
                           bool locked, uint32_t phase) {
  gemini_status_t status = access->tier == GEMINI_TIER_DEVICE
                               ? release_device(m, r->store, r->first, r->last, access->mode, stream, locked)
                               : release_host(m, r, access->mode, stream);
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  if (r->size && !gmi_access_is_whole(access, r->tensor, r->size)) gmi_lease_end(&m->leases, &key);
  if (r->tensor) (void)gmi_tensor_release(r->tensor, GMI_TENSOR_OTHERS, phase);
  return status;
}

/* locked: the manager's lock is held, because an access names an arena or the host tier. */
static gemini_status_t release_batch(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, uint32_t stream,
                                     bool locked) {
  uint32_t phase = atomic_load_explicit(&m->bracket.phase, memory_order_relaxed);
  gemini_status_t status = GEMINI_OK;
  gmi_range_t small[GMI_SMALL_BATCH], one; /* ranges of the first accesses; those of others are resolved again */
  uint64_t claimed = 0;
  for (; !status && claimed < count; claimed += !status)
    status = claim(m, &accesses[claimed], claimed < GMI_SMALL_BATCH ? &small[claimed] : &one);
  if (status) {
    while (claimed-- > 0) unclaim(m, &accesses[claimed]);
    return status;
  }
  for (uint64_t k = 0; k < count; k++) {
    gmi_range_t *r = k < GMI_SMALL_BATCH ? &small[k] : &one;
    if (k >= GMI_SMALL_BATCH) {
      if (gmi_range_resolve_any(m, &accesses[k], r)) continue; /* never: the claim keeps the object */
      gmi_range_placed(m, &accesses[k], r);
    }
    gemini_status_t ended = end(m, &accesses[k], r, stream, locked, phase);
    if (ended) status = ended;
  }
  return status;
}

/* Releases one whole tensor on the device, the frequent case, in one step instead of two passes. The tensor's user goes
 * first here, as finding it is the check; from then on the users in the chunks' words keep the arena and the records:
 * the code that frees these excludes new users of the tensors first and checks the chunks second (arena.c, cut.c).
 * Returns false, with nothing changed, if it is another case or was not acquired. */
FAST bool release_whole(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream, gemini_status_t *status_out) {
  fast_t f;
  uint32_t generation;
  if (!fast_record(m, access, &f, &generation) ||
      atomic_load_explicit(&f.tensor->life, memory_order_acquire) != generation ||
      !fast_bytes(access->offset_bytes, access->size_bytes, &f) || f.size != f.tensor->size)
    return false;
  fast_arenas(m, &f); /* now, as the tensor and its record may go once it is released */
  uint32_t phase = atomic_load_explicit(&m->bracket.phase, memory_order_relaxed);
  if (!gmi_tensor_release(f.tensor, f.mode, phase)) return false;
  fast_span(m, &f);
  gmi_chunk_t *c = &f.store->chunks[f.first];
  if (f.first == f.last && gmi_chunk_use_now(m, c, f.mode, stream)) {
    gmi_chunk_unhold_device(c, f.mode);
    *status_out = GEMINI_OK;
  } else {
    *status_out = release_device(m, f.store, f.first, f.last, f.mode, stream, false);
  }
  return true;
}

/* A release without the lock may name the index of a stream that is destroyed meanwhile: see gmi_fence_reached() and
 * gmi_uses_enter(). */
static gemini_status_t release(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count,
                               gemini_stream_t stream) {
  uint32_t s;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  if (status) return status;
  if (gmi_graph_begun(m, s)) {
    bool captures = false;
    gmi_lock(m, "gemini_release");
    status = gmi_stream_resolve(m, stream, &s);
    if (!status) status = gmi_graph_captures(m, s, &captures);
    if (!status && captures) status = gmi_graph_release(m, accesses, count, s);
    gmi_unlock(m);
    if (status || captures) return status;
  }
  bool locked = false, host = false;
  for (uint64_t k = 0; k < count; k++) {
    host |= accesses[k].tier != GEMINI_TIER_DEVICE;
    locked |= host || gmi_object_id(&accesses[k]) >> 60 != GMI_HANDLE_TENSOR;
  }
  if (locked) {
    gmi_lock(m, "gemini_release");
    status = gmi_stream_resolve(m, stream, &s);
    if (!status && host) status = gmi_slots_may_be_used(m, s);
  }
  if (!status) status = release_batch(m, accesses, count, s, locked);
  if (host) gmi_updates_room(m);
  if (locked) gmi_unlock(m);
  return status;
}

static __attribute__((noinline)) gemini_status_t release_any(gmi_manager_t *m, const gemini_access_t *theirs,
                                                             uint64_t count, gemini_stream_t stream) {
  gmi_accesses_t accesses;
  gemini_status_t status = gmi_accesses_in(&accesses, theirs, count);
  if (status) return status;
  status = release(m, accesses.list, count, stream);
  gmi_accesses_free(&accesses);
  return status;
}
gemini_status_t gemini_release(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count,
                               gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  uint32_t s;
  gemini_status_t status;
  if (count != 1 || !accesses || !gmi_accesses_are_ours(accesses, 1) || !gmi_stream_find(m, stream, &s) ||
      gmi_graph_begun(m, s) || !release_whole(m, accesses, s, &status))
    API_RETURN(release_any(m, accesses, count, stream));
  API_RETURN(status);
}
