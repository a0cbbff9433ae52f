/* Acquire and release. SPDX-License-Identifier: Apache-2.0
 *
 * Everything here runs on the caller's thread. Acquire has two paths. The fast path serves tensors on the device whose
 * chunks are resident and settled: it takes no lock (for a part of a tensor one lease table's, for a moment) and adds a
 * user to the tensor's word and to each chunk's word. It never reports an error: whatever it cannot serve, invalid
 * arguments included, goes to the slow path, which works under the manager's lock and records the error.
 *
 * A user in the tensor's word keeps the tensor and its arena alive, and is therefore added first and removed last
 * (except in release_whole()). A user in a chunk's word keeps the chunk's frame. An acquire succeeds for the whole
 * batch or changes nothing: both paths undo their users on failure, and states and bytes change only after nothing can
 * fail any more.
 *
 * The words are updated in compare-and-swap loops, as a plain fetch_add could overflow a field or add a user to a
 * tensor that is being unregistered. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/content.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/graph.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/streams.h"
#include "core/workers.h"

/* The thread's counter of hits, + 1. */
static uint32_t choose_stripe(void) {
  static _Atomic uint32_t owned, shared; /* owned is not counted on for ever, as it must not overflow */
  const uint32_t own = atomic_load(&owned) < GMI_HIT_OWNED ? atomic_fetch_add(&owned, 1) : GMI_HIT_OWNED;
  if (own < GMI_HIT_OWNED) return own + 1;
  return GMI_HIT_OWNED + atomic_fetch_add(&shared, 1) % (GMI_HIT_STRIPES - GMI_HIT_OWNED) + 1;
}

/* A counter of the thread's own needs no atomic addition, which costs as much as one of the users' words. */
static void count_hits(gmi_manager_t *m, uint64_t hits) {
  static _Thread_local uint32_t stripe;
  if (!stripe) stripe = choose_stripe();
  _Atomic uint64_t *counter = &m->stripes[stripe - 1].hits;
  if (stripe > GMI_HIT_OWNED) atomic_fetch_add_explicit(counter, hits, memory_order_relaxed);
  else atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + hits, memory_order_relaxed);
}

/* Do the bytes hold what the tensor is, a parameter or its gradient? Relaxed: the flag changes under the lock, and a
 * thread that relies on a write of another thread has synchronised with it. */
static inline bool holds_own(gmi_manager_t *m, const gmi_arena_t *a, gmi_tensor_t *t) {
  if (a->store == a->index && !a->reused) return true;
  bool holds_gradient = atomic_load_explicit(&gmi_tensor_base(m, t)->word, memory_order_relaxed) & GMI_TENSOR_GRADIENT;
  return holds_gradient == (a->store != a->index);
}

/* ---- a tensor's users
 *
 * Each acquire is counted in one field of the tensor's word. unit is a count of 1 in that field, mask selects the
 * field. All updates are acquire-release: the release of the last user pairs with tensor_kill() (arena.c) and
 * tensors_freeze() (cut.c), which free or replace records once they have seen a word without users. */
typedef struct {
  uint64_t unit, mask;
} field_t;
static inline field_t field_whole(uint32_t mode) {
  return (field_t){ UINT64_C(1) << gmi_tensor_mode_shift(mode), gmi_tensor_mode_mask(mode) };
}
static inline field_t field_others(void) {
  return (field_t){ UINT64_C(1) << GMI_TENSOR_OTHERS_SHIFT, GMI_TENSOR_OTHERS_MASK };
}

/* Adds a user. Returns false if the tensor is being unregistered, is frozen, or the field is full. */
static inline bool tensor_hold(gmi_tensor_t *t, field_t field) {
  uint64_t word = atomic_load_explicit(&t->word, memory_order_relaxed);
  do {
    if ((word & (GMI_TENSOR_DEAD | GMI_TENSOR_FROZEN)) || (word & field.mask) == field.mask) return false;
  } while (!atomic_compare_exchange_weak_explicit(&t->word, &word, word + field.unit, memory_order_acq_rel,
                                                  memory_order_relaxed));
  return true;
}
/* Removes the user of a failed acquire, without a change of the tensor's state. */
static inline void tensor_unhold(gmi_tensor_t *t, field_t field) {
  atomic_fetch_sub_explicit(&t->word, field.unit, memory_order_acq_rel);
}
/* Moves one user from a field to another, so that the tensor is in use throughout. Returns false if the field from is
 * empty or the field to is full. */
static inline bool tensor_rehold(gmi_tensor_t *t, field_t from, field_t to) {
  uint64_t word = atomic_load_explicit(&t->word, memory_order_relaxed);
  do {
    if (!(word & from.mask) || (word & to.mask) == to.mask) return false;
  } while (!atomic_compare_exchange_weak_explicit(&t->word, &word, word - from.unit + to.unit, memory_order_acq_rel,
                                                  memory_order_relaxed));
  return true;
}
/* Removes a user and sets the state that the phase calls for, in one step. The state shows only once there are no
 * users: that of the last release remains. Returns false if the field is empty: the range was not acquired in this
 * way. */
static inline bool tensor_release(gmi_tensor_t *t, field_t field, uint32_t phase) {
  static const uint32_t after[] = { GEMINI_STATE_HOLD, GEMINI_STATE_HOLD_AFTER_FWD, GEMINI_STATE_HOLD_AFTER_BWD,
                                    GEMINI_STATE_HOLD };
  uint64_t word = atomic_load_explicit(&t->word, memory_order_relaxed);
  do {
    if (!(word & field.mask)) return false;
  } while (!atomic_compare_exchange_weak_explicit(&t->word, &word, gmi_tensor_word(word - field.unit, after[phase]),
                                                  memory_order_acq_rel, memory_order_relaxed));
  return true;
}

/* Is the acquire counted in the tensor's word alone, without a lease? */
static inline bool is_whole(const gemini_access_t *access, const gmi_tensor_t *t, uint64_t size) {
  return t && access->tier == GEMINI_TIER_DEVICE && size == t->size;
}

/* Reports a touch to the tracer, once per operator for each whole tensor and mode. Relaxed: a race between two threads
 * only reports a touch twice, which the tracer merges. */
static inline void trace_tensor(gmi_manager_t *m, gmi_tensor_t *t, gmi_arena_t *a, uint64_t offset, uint64_t size,
                                uint32_t mode) {
  uint64_t serial = atomic_load_explicit(&m->bracket.op_serial, memory_order_relaxed);
  if (!serial) return;
  bool whole = size == t->size;
  if (whole) {
    uint64_t seen = atomic_load_explicit(&t->seen, memory_order_relaxed);
    uint64_t modes = seen >> 2 == serial ? seen & 3 : 0;
    if ((modes & mode) == mode) return;
    atomic_store_explicit(&t->seen, serial << 2 | modes | mode, memory_order_relaxed);
  }
  m->trace.observer->touched(m, a->chunks ? a->index : a->store, offset, size, mode);
}

/* One access on the fast path. */
typedef struct {
  gmi_tensor_t *tensor;
  gmi_arena_t *arena, *store;
  uint64_t offset, size, first, last; /* bytes of the arena; chunks */
  field_t field;                      /* the field of the tensor's word that counts it */
  bool leased;
} fast_t;

/* Undoes the lease, the users of chunks before end, and the tensor's user, in this order: the tensor goes last. */
static void fast_undo(gmi_manager_t *m, const fast_t *f, const gemini_access_t *access, uint64_t end) {
  if (f->leased) {
    gmi_lease_key_t key = gmi_lease_key(access, f->size);
    if (gmi_lease_claim(&m->leases, &key)) gmi_lease_end(&m->leases, &key);
  }
  for (uint64_t i = f->first; i < end; i++) gmi_chunk_unhold_device(&f->store->chunks[i], access->mode);
  tensor_unhold(f->tensor, f->field);
}

/* Holds the chunks of a held tensor. Returns false with everything undone, the tensor included. alone: the batch has no
 * other access. Otherwise a write of a tensor that shares its bytes with a gradient takes the slow path, which checks
 * that one batch does not write both. */
static bool fast_chunks(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream, bool alone, fast_t *f) {
  gmi_tensor_t *t = f->tensor;
  gmi_arena_t *a = f->arena = gmi_arena_at(m, t->arena);
  f->first = 0;
  f->leased = false;
  f->size = access->size_bytes;
  if (!f->size && !access->offset_bytes) f->size = t->size;
  bool fine = f->size && access->offset_bytes <= t->size && f->size <= t->size - access->offset_bytes &&
              holds_own(m, a, t) && (alone || !(access->mode & GEMINI_WRITE) || (a->store == a->index && !a->reused));
  bool whole = f->size == t->size;
  field_t field = whole ? field_whole(access->mode) : field_others();
  if (fine && field.mask != f->field.mask) {
    fine = tensor_rehold(t, f->field, field);
    if (fine) f->field = field;
  }
  uint64_t i = 0;
  if (fine) {
    f->store = a->chunks ? a : gmi_arena_at(m, a->store); /* sharded gradients have chunks of their own */
    f->offset = t->offset + access->offset_bytes;
    i = f->first = f->offset >> m->cut.chunk_shift;
    f->last = (f->offset + f->size - 1) >> m->cut.chunk_shift;
    /* The acquire load pairs with the store in gmi_arena_grow(): records below the count are initialised. */
    if (f->last < atomic_load_explicit(&f->store->chunk_count, memory_order_acquire))
      while (i <= f->last && gmi_chunk_hold_fast(m, &f->store->chunks[i], access->mode, stream)) i++;
    if (i > f->last && !whole) { /* last, because it takes a lock, for nothing if a chunk cannot be held */
      gmi_lease_key_t key = gmi_lease_key(access, f->size);
      f->leased = gmi_lease_add(&m->leases, &key) == GEMINI_OK;
    }
    if (i > f->last && (whole || f->leased)) return true;
  }
  fast_undo(m, f, access, i);
  return false;
}

/* Holds the tensor and its chunks. Returns false for any reason, without an error; nothing has changed then.
 *
 * The acquire load of chunk_bytes pairs with the store in cut_install(): chunk_shift and the tables are set. The record
 * of an unregistered tensor may serve a new one at any time, so life is checked twice. The first check keeps stale
 * handles from disturbing other tensors. The second one decides: once the user is in the word, the tensor cannot be
 * dropped, so if the generation is still the handle's, it stays so. If not, another tensor had one user too many for a
 * moment; code that changes words under the lock must therefore not assume that they are stable. */
static bool fast_hold(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream, bool alone, fast_t *f) {
  uint64_t object = gmi_object_id(access);
  uint32_t index = (uint32_t)object & (GMI_TENSORS - 1);
  uint32_t generation = (uint32_t)(object >> GMI_TENSOR_INDEX_BITS) & GMI_TENSOR_GENERATIONS;
  if (access->tier != GEMINI_TIER_DEVICE || access->mode - 1 > 2 || object >> 60 != GMI_HANDLE_TENSOR ||
      ((object ^ m->identity.id) & GMI_HANDLE_MANAGER_MASK) || !generation ||
      !atomic_load_explicit(&m->cut.chunk_bytes, memory_order_acquire))
    return false;
  gmi_tensor_t *t = f->tensor = &m->tensors.at[index];
  /* The record cannot be read before it is held, so whether size_bytes is the whole tensor is a guess here;
   * fast_chunks() moves the user to the right field. */
  f->field = access->size_bytes ? field_others() : field_whole(access->mode);
  if (atomic_load_explicit(&t->life, memory_order_acquire) != generation || !tensor_hold(t, f->field)) return false;
  if (atomic_load_explicit(&t->life, memory_order_acquire) == generation)
    return fast_chunks(m, access, stream, alone, f);
  tensor_unhold(t, f->field); /* the tensor was unregistered, and the record serves another one */
  return false;
}

static void fast_commit(gmi_manager_t *m, gemini_access_t *access, const fast_t *f) {
  trace_tensor(m, f->tensor, f->arena, f->offset, f->size, access->mode);
  count_hits(m, f->last - f->first + 1);
  access->ptr = f->arena->base + f->offset;
}

static gemini_status_t access_check(const gemini_access_t *access) {
  if (access->mode < GEMINI_READ || access->mode > GEMINI_READ_WRITE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "mode is %u, must be 1 to 3", access->mode);
  if (access->tier > GEMINI_TIER_HOST)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, must be GEMINI_TIER_DEVICE or GEMINI_TIER_HOST", access->tier);
  return GEMINI_OK;
}

static void *range_pointer(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  if (access->tier == GEMINI_TIER_DEVICE) return r->store->base + r->at;
  return r->size ? gmi_range_host(m, r->store, r->at) : NULL;
}

/* Does the range overwrite the whole chunk, so that its old bytes need not be brought? */
static bool covers(gmi_manager_t *m, const gmi_range_t *r, uint32_t chunk) {
  uint64_t begin = (uint64_t)chunk << m->cut.chunk_shift, end = begin + atomic_load(&m->cut.chunk_bytes);
  return r->at <= begin && r->at + r->size >= end; /* also behind the arena's end: it may grow, into zeros */
}

/* ---- slow acquire, under the manager's lock, in steps: check the batch; queue the updates of its chunks, as it must
 * see their results; hold every chunk, so that bringing one does not evict another; place host ranges; bring the bytes;
 * make the stream wait; commit. Every step before the commit can fail and is undone. Queueing updates may run
 * callbacks, which give the lock away; from the first hold on, the batch keeps the lock. */
typedef struct {
  gmi_range_t range;
  gmi_content_t content;
  field_t field; /* the field of the tensor's word that counts it, if counted */
  bool counted, leased;
} prepared_t;

/* Counts the acquire in its tensor's word, if it names a tensor, and by a lease unless the word alone is enough. */
static gemini_status_t count_acquire(gmi_manager_t *m, const gemini_access_t *access, prepared_t *p) {
  const gmi_range_t *r = &p->range;
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  bool whole = is_whole(access, r->tensor, r->size);
  p->field = whole ? field_whole(access->mode) : field_others();
  if (r->tensor && !tensor_hold(r->tensor, p->field)) /* full: under the lock it is neither dead nor frozen */
    return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s has %llu unreleased acquires of this kind, which is the limit",
                    gmi_range_name(m, r), (unsigned long long)(p->field.mask / p->field.unit));
  p->counted = r->tensor != NULL;
  gemini_status_t status = whole ? GEMINI_OK : gmi_lease_add(&m->leases, &key);
  p->leased = !whole && !status;
  return status;
}

static void uncount_acquire(gmi_manager_t *m, const gemini_access_t *access, const prepared_t *p) {
  gmi_lease_key_t key = gmi_range_key(m, access, &p->range);
  if (p->leased && gmi_lease_claim(&m->leases, &key)) gmi_lease_end(&m->leases, &key);
  if (p->counted) tensor_unhold(p->range.tensor, p->field);
}

static gemini_status_t hold_chunk(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r,
                                  gmi_chunk_t *c) {
  GMI_ASSERT(
      !gmi_chunk_deferred(c)); /* queueing its updates here would give the lock away in the middle of the batch */
  const char *why = gmi_chunk_hold(m, c, access->tier, access->mode);
  return why ? gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of %s is %s", gmi_range_name(m, r), why) : GEMINI_OK;
}

/* Brings one chunk's bytes to the access's tier. fresh: the access overwrites all of them, so none are copied, and the
 * old copies remain valid until commit(), in case the batch fails. */
static gemini_status_t bring_chunk(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r, uint32_t i) {
  gmi_chunk_t *c = &r->store->chunks[i];
  bool fresh = access->mode == GEMINI_WRITE && covers(m, r, i);
  if (access->tier == GEMINI_TIER_DEVICE) {
    if (gmi_chunk_is_resident(c)) {
      count_hits(m, 1);
      return GEMINI_OK;
    }
    m->stats.acquire_misses += !fresh; /* a fresh chunk fetches nothing */
    return gmi_chunk_fetch(m, c, fresh, GEMINI_REASON_DEMAND, GMI_TAKE_EVICT);
  }
  if (fresh) {
    if (gmi_chunk_io(c)) { /* a read whose bytes will be overwritten still writes into the slot */
      gmi_workers_wait_slot(m, &m->host.slots[gmi_chunk_slot(c)], m->host.slots[gmi_chunk_slot(c)].work_queued);
      gmi_files_poll(m);
    }
    gmi_file_forgive(c);
    return gmi_host_slot_take(m, c); /* commit() drops the other copies */
  }
  return gmi_chunk_to_host(m, c, false, GEMINI_REASON_DEMAND);
}

/* Fences to wait for, reduced to one per stream: a mark implies all earlier marks of its stream, and each wait is a
 * call of the device. */
typedef struct {
  uint64_t mark[GMI_DEVICE_MAX_STREAMS];
  uint64_t set; /* bit per stream */
} waits_t;
static void await(gmi_manager_t *m, waits_t *waits, gmi_fence_t fence) {
  if (gmi_fence_reached(m, fence)) return;
  uint32_t s = gmi_fence_stream(fence);
  if (!(waits->set >> s & 1) || waits->mark[s] < gmi_fence_mark(fence)) waits->mark[s] = gmi_fence_mark(fence);
  waits->set |= UINT64_C(1) << s;
}

static gemini_status_t wait_chunks(gmi_manager_t *m, const gemini_access_t *accesses, const prepared_t *p,
                                   uint64_t count, uint32_t stream) {
  waits_t waits;
  waits.set = 0;
  for (uint64_t k = 0; k < count; k++) {
    const gmi_range_t *r = &p[k].range;
    for (uint64_t i = r->first; i <= r->last; i++) {
      gmi_chunk_t *c = &r->store->chunks[i];
      if (accesses[k].tier == GEMINI_TIER_HOST) {
        gemini_status_t status = gmi_chunk_settle_host(m, c);
        if (!status && (accesses[k].mode & GEMINI_WRITE)) status = gmi_fence_sync(m, gmi_chunk_arrive(c));
        if (status) return status;
        continue;
      }
      gmi_chunk_settle(m, c);
      if (gmi_arena_is_sharded(r->store)) gmi_gathered_unsettle(m, c);
      gmi_fence_t fences[GMI_CHUNK_FENCES];
      uint32_t fence_count = gmi_chunk_fences(c, accesses[k].mode, fences);
      for (uint32_t n = 0; n < fence_count; n++) await(m, &waits, fences[n]);
    }
  }
  for (uint32_t s = 0; waits.set; s++, waits.set >>= 1) {
    gemini_status_t status =
        waits.set & 1 ? m->trace.observer->stream_waits(m, stream, gmi_fence(s, waits.mark[s])) : GEMINI_OK;
    if (status) return status;
  }
  return GEMINI_OK;
}

/* Before a write on the host commits, the device copy must go. This is the last step that can fail. */
static gemini_status_t leave_device(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  if (access->tier == GEMINI_TIER_DEVICE || !(access->mode & GEMINI_WRITE)) return GEMINI_OK;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = r->first; !status && i <= r->last; i++) {
    gmi_chunk_t *c = &r->store->chunks[i];
    /* A copy whose bytes will all be overwritten stays until the batch has succeeded; commit() drops it without a
     * copy. */
    if (!(access->mode == GEMINI_WRITE && covers(m, r, (uint32_t)i)))
      status = gmi_chunk_to_host(m, c, true, GEMINI_REASON_DEMAND);
  }
  return status;
}

/* Makes the writer's copies the only valid ones, sets what the bytes hold, and returns the address. Cannot fail. The
 * gradient flag is changed by read-modify-write, as acquires change the counts in the same word meanwhile. */
static void commit(gmi_manager_t *m, gemini_access_t *access, const prepared_t *p) {
  const gmi_range_t *r = &p->range;
  bool write = access->mode & GEMINI_WRITE, device = access->tier == GEMINI_TIER_DEVICE;
  for (uint64_t i = r->first; write && i <= r->last; i++) {
    gmi_chunk_t *c = &r->store->chunks[i];
    if (device) {
      gmi_chunk_wrote(m, c);
    } else {
      gmi_chunk_refilled(m, c);
      gmi_chunk_host_wrote(m, c);
    }
  }
  if (p->content == GMI_CONTENT_FLIPS) gmi_range_flip(m, r);
  if (r->tensor) {
    if (device) trace_tensor(m, r->tensor, r->arena, r->offset, r->size, access->mode);
  } else if (device && atomic_load(&m->bracket.op_serial)) {
    m->trace.observer->touched(m, r->store->index, r->offset, r->size, access->mode);
  }
  access->ptr = range_pointer(m, access, r);
}

/* A host range of several chunks needs adjacent slots, as the caller gets one pointer. Ranges of the batch that overlap
 * share chunks, so their union gets one run; otherwise placing the second range would tear the first apart. */
static gemini_status_t place_hosts(gmi_manager_t *m, const gemini_access_t *accesses, const prepared_t *p,
                                   uint64_t count) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t k = 0; !status && k < count; k++) {
    const gmi_range_t *r = &p[k].range;
    if (accesses[k].tier != GEMINI_TIER_HOST || r->first >= r->last) continue;
    uint32_t first = r->first, last = r->last;
    for (bool grown = true; grown;) {
      grown = false;
      for (uint64_t j = 0; j < count; j++) {
        const gmi_range_t *o = &p[j].range;
        if (accesses[j].tier != GEMINI_TIER_HOST || o->store != r->store || o->first > last || o->last < first ||
            o->first > o->last)
          continue;
        grown |= o->first < first || o->last > last;
        if (o->first < first) first = o->first;
        if (o->last > last) last = o->last;
      }
    }
    status = gmi_host_run(m, r->store, first, last - first + 1);
    for (uint32_t i = first; i <= last; i++) gmi_chunk_batch_join(&r->store->chunks[i], true);
  }
  return status;
}

static void batch_forget(const gemini_access_t *accesses, const prepared_t *p, uint64_t count) {
  for (uint64_t k = 0; k < count; k++) {
    const gmi_range_t *r = &p[k].range;
    for (uint64_t i = r->first; accesses[k].tier == GEMINI_TIER_HOST && i <= r->last; i++)
      gmi_chunk_batch_end(&r->store->chunks[i]);
  }
}

/* May this batch make the caller wait, for bytes that must come or for updates that are not queued yet? */
static bool may_wait(const gemini_access_t *accesses, const prepared_t *p, uint64_t count, bool *for_updates_out) {
  bool may = *for_updates_out = false;
  for (uint64_t k = 0; k < count; k++) {
    const gmi_range_t *r = &p[k].range;
    for (uint64_t i = r->first; accesses[k].tier == GEMINI_TIER_DEVICE && i <= r->last; i++) {
      const gmi_chunk_t *c = &r->store->chunks[i];
      if (gmi_chunk_deferred(c)) return *for_updates_out = true;
      may |= !gmi_chunk_is_resident(c);
    }
  }
  return may;
}

/* A parameter and the gradient that reuses its bytes cannot be written in one batch. Marks in the words of the
 * registered tensors which of both the batch writes. Returns a tensor of which it writes both, or NULL. */
typedef struct {
  uint64_t mine;
  const gmi_tensor_t *both;
} mark_t;
static void tensor_mark(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  mark_t *mark = user;
  uint64_t both = GMI_TENSOR_BATCH_GRADIENT | GMI_TENSOR_BATCH_PARAMETER;
  (void)m;
  if (((atomic_fetch_or(&t->word, mark->mine) | mark->mine) & both) == both) mark->both = t;
}
static const gmi_tensor_t *batch_mark(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  if (!(access->mode & GEMINI_WRITE) || !gmi_range_shares(r)) return NULL;
  mark_t mark = { r->arena->store != r->arena->index ? GMI_TENSOR_BATCH_GRADIENT : GMI_TENSOR_BATCH_PARAMETER, NULL };
  gmi_range_each(m, r, tensor_mark, &mark);
  return mark.both;
}
static void tensor_unmark(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m, (void)user;
  atomic_fetch_and(&t->word, ~(GMI_TENSOR_BATCH_GRADIENT | GMI_TENSOR_BATCH_PARAMETER));
}
static void batch_unmark(gmi_manager_t *m, const gmi_range_t *r) {
  if (gmi_range_shares(r)) gmi_range_each(m, r, tensor_unmark, NULL);
}

/* Bytes of the batch's chunks that have no frame, or no slot, in a tier. A chunk named by several accesses counts
 * once. */
static uint64_t batch_lacks(const gmi_manager_t *m, const gemini_access_t *accesses, const prepared_t *p,
                            uint64_t count, uint32_t tier) {
  uint64_t lacking = 0;
  for (int pass = 0; pass < 2; pass++) { /* batch_joined marks counted chunks; the second pass clears it */
    for (uint64_t k = 0; k < count; k++) {
      const gmi_range_t *r = &p[k].range;
      for (uint64_t i = r->first; accesses[k].tier == tier && i <= r->last; i++) {
        gmi_chunk_t *c = &r->store->chunks[i];
        bool placed = tier == GEMINI_TIER_DEVICE ? gmi_chunk_frame(c) != GMI_NONE : gmi_chunk_has_slot(c);
        lacking += !pass && !placed && !gmi_chunk_batch_joined(c);
        gmi_chunk_batch_join(c, !pass);
      }
    }
  }
  return lacking * gmi_tier_unit_bytes(m, tier);
}

/* The tiers report that one more chunk does not fit. Prefixes the message with what the whole batch lacks. Called
 * before the batch is undone. */
static void batch_tell_lack(gmi_manager_t *m, const gemini_access_t *accesses, const prepared_t *p, uint64_t count,
                            gemini_status_t status) {
  uint64_t device = batch_lacks(m, accesses, p, count, GEMINI_TIER_DEVICE);
  uint64_t host = batch_lacks(m, accesses, p, count, GEMINI_TIER_HOST);
  if (status == GEMINI_ERR_OOM_DEVICE && m->frames.made < m->frames.count) /* the device has less than the budget */
    gmi_fail_prefix("the batch needs %llu more bytes of device memory: ", (unsigned long long)device);
  else if (status == GEMINI_ERR_OOM_DEVICE) gmi_oom_device(m, device);
  else if (host) gmi_fail_prefix("the batch needs %llu more bytes of host memory: ", (unsigned long long)host);
  else
    gmi_fail_prefix("the batch needs %llu more bytes of device memory, for which other chunks must leave: ",
                    (unsigned long long)device);
}

/* Resolves the ranges of the batch, and checks that their bytes are what the accesses name. Changes nothing. */
static gemini_status_t batch_check(gmi_manager_t *m, const gemini_access_t *accesses, prepared_t *p, uint64_t count) {
  gemini_status_t status = GEMINI_OK;
  uint64_t marked = 0;
  for (uint64_t k = 0; !status && k < count; k++) {
    status = access_check(&accesses[k]);
    if (!status) status = gmi_range_resolve_any(m, &accesses[k], &p[k].range);
    if (status) break;
    gmi_range_t *r = &p[k].range;
    marked = k + 1;
    const gmi_tensor_t *both = batch_mark(m, &accesses[k], r);
    if (both)
      status = gmi_fail(GEMINI_ERR_STATE, 0, "one batch writes parameter %s and its gradient, which share their bytes",
                        both->name);
    if (status) break;
    p[k].counted = p[k].leased = false;
    p[k].content = gmi_range_content(m, r, accesses[k].mode == GEMINI_WRITE);
    if (p[k].content == GMI_CONTENT_WRONG) status = GEMINI_ERR_STATE;
    if (p[k].content == GMI_CONTENT_FLIPS) status = gmi_range_may_flip(m, r);
  }
  for (uint64_t k = 0; k < marked; k++) batch_unmark(m, &p[k].range);
  for (uint64_t k = 0; !status && k < count; k++) status = gmi_range_place(m, &accesses[k], &p[k].range);
  return status;
}

static gemini_status_t acquire_slow(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream) {
  prepared_t small[GMI_SMALL_BATCH], *p = small;
  gemini_status_t status = GEMINI_OK;
  /* An invalid batch must not choose the chunk size: gmi_cut() comes after all checks. */
  for (uint64_t k = 0; !status && k < count && !atomic_load(&m->cut.chunk_bytes); k++) {
    status = access_check(&accesses[k]);
    if (!status) status = gmi_range_resolve_any(m, &accesses[k], &small[0].range);
  }
  if (!status) status = gmi_cut(m);
  if (status) return status;
  if (count > GMI_SMALL_BATCH && !(p = malloc(count * sizeof *p)))
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a batch of %llu accesses", (unsigned long long)count);
  status = batch_check(m, accesses, p, count);
  gmi_pause_t pause = { 0 };
  bool for_updates, queued = true;
  if (!status && may_wait(accesses, p, count, &for_updates))
    m->trace.observer->pause_begins(m, stream, for_updates, &pause);
  while (!status && queued) {
    queued = false;
    for (uint64_t k = 0; !status && k < count; k++)
      status = gmi_updates_queue_range(m, p[k].range.store, p[k].range.first, p[k].range.last, &queued);
    if (!status && queued) status = batch_check(m, accesses, p, count); /* again, as callbacks ran without the lock */
  }
  uint64_t held = 0, held_chunks = 0, touched = 0; /* accesses held; chunks held of the access that failed; both */
  for (; !status && held < count; held += !status) {
    gmi_range_t *r = &p[held].range;
    touched = held + 1;
    held_chunks = 0;
    status = count_acquire(m, &accesses[held], &p[held]);
    for (uint64_t i = r->first; !status && i <= r->last; i++) {
      status = hold_chunk(m, &accesses[held], r, &r->store->chunks[i]);
      held_chunks += !status;
    }
  }
  if (!status) status = place_hosts(m, accesses, p, count);
  batch_forget(accesses, p, touched);
  for (uint64_t k = 0; !status && k < count; k++)
    for (uint64_t i = p[k].range.first; !status && i <= p[k].range.last; i++)
      status = bring_chunk(m, &accesses[k], &p[k].range, (uint32_t)i);
  if (held == count && gmi_is_oom(status)) batch_tell_lack(m, accesses, p, count, status);
  if (!status) m->trace.observer->pause_ends(m, stream, &pause);
  if (!status) status = wait_chunks(m, accesses, p, count, stream);
  for (uint64_t k = 0; !status && k < count; k++) status = leave_device(m, &accesses[k], &p[k].range);
  for (uint64_t k = 0; !status && k < count; k++) commit(m, &accesses[k], &p[k]);
  if (status) {
    for (uint64_t k = 0; k < touched; k++) {
      gmi_range_t *r = &p[k].range;
      uncount_acquire(m, &accesses[k], &p[k]);
      uint64_t n = k < held ? (r->first <= r->last ? (uint64_t)r->last - r->first + 1 : 0) : held_chunks;
      for (uint64_t i = 0; i < n; i++) {
        gmi_chunk_t *c = &r->store->chunks[r->first + i];
        gmi_chunk_unhold(m, c, accesses[k].tier, accesses[k].mode);
        /* A frame that was taken for a fresh write holds no bytes: it goes, and the first error stays. */
        if (gmi_chunk_frame(c) != GMI_NONE && !gmi_chunk_has(c, GMI_VALID_DEVICE) && !gmi_chunk_device_users(c)) {
          gmi_failure_t first;
          gmi_fail_keep(status, &first);
          gmi_chunk_evict(m, c, GEMINI_REASON_DEMAND);
          (void)gmi_fail_again(&first);
        }
      }
    }
  }
  if (p != small) free(p);
  return status;
}

/* The fast path takes accesses from the front until one fails; the slow path takes the rest. The slow path never waits
 * for users of chunks to go, so holding the first part while it takes the lock cannot deadlock; it can only find these
 * chunks busy, as with those of any other caller. A batch larger than GMI_SMALL_BATCH is cut there to bound the stack.
 *
 * Until this thread has the lock, another one may destroy the stream, and its index may get a new stream: the slow path
 * resolves the handle again. The fast path need not. At worst it takes the new stream's fences for earlier work of its
 * own stream and does not wait for them, but no work can be queued on that one any more. */
static gemini_status_t acquire(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, gemini_stream_t stream,
                               uint32_t s) {
  gemini_status_t status = GEMINI_OK;
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
    if (!status) status = acquire_slow(m, accesses + n, count - n, s);
    gmi_unlock(m);
  }
  for (uint64_t i = 0; i < n; i++) {
    if (status) fast_undo(m, &fast[i], &accesses[i], fast[i].last + 1);
    else fast_commit(m, &accesses[i], &fast[i]);
  }
  return status;
}

/* Accesses of another version's size are copied first. A function of its own, so that the hot path needs no large stack
 * frame. */
static __attribute__((noinline)) gemini_status_t acquire_copies(gemini_manager_t mgr, gemini_access_t *theirs,
                                                                uint64_t count, gemini_stream_t stream) {
  gmi_accesses_t accesses;
  gemini_status_t status = gmi_accesses_in(&accesses, theirs, count);
  if (status) return status;
  status = gemini_acquire(mgr, accesses.copies, count, stream);
  if (!status) gmi_accesses_out(accesses.copies, theirs, count);
  gmi_accesses_free(&accesses);
  return status;
}
gemini_status_t gemini_acquire(gemini_manager_t mgr, gemini_access_t *accesses, uint64_t count,
                               gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if ((!accesses && count) || count > GMI_BATCH_LIMIT || !gmi_accesses_are_ours(accesses, count))
    API_RETURN(acquire_copies(mgr, accesses, count, stream));
  uint32_t s;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  API_RETURN(status ? status : acquire(m, accesses, count, stream, s));
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
  gemini_status_t status = access_check(access);
  if (!status) status = gmi_range_bytes(m, access, r);
  if (status) return status;
  if (is_whole(access, r->tensor, r->size)) {
    if (!tensor_rehold(r->tensor, field_whole(access->mode), field_others())) return not_acquired(m, access, r);
    gmi_range_chunks(m, r);
    return GEMINI_OK;
  }
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  if (!gmi_lease_claim(&m->leases, &key)) return not_acquired(m, access, r);
  gmi_range_chunks(m, r);
  gmi_range_placed(m, access, r);
  void *ptr = range_pointer(m, access, r);
  if (access->tier == GEMINI_TIER_DEVICE || access->ptr == ptr) return GEMINI_OK;
  gmi_lease_unclaim(&m->leases, &key);
  return gmi_fail(GEMINI_ERR_STATE, 0, "ptr of %s is %p, must be %p, which the acquire returned", gmi_range_name(m, r),
                  access->ptr, ptr);
}

static void unclaim(gmi_manager_t *m, const gemini_access_t *access) {
  gmi_range_t r;
  if (gmi_range_bytes(m, access, &r)) return; /* never: the claim keeps the object */
  gmi_lease_key_t key = gmi_range_key(m, access, &r);
  if (!is_whole(access, r.tensor, r.size)) gmi_lease_unclaim(&m->leases, &key);
  else (void)tensor_rehold(r.tensor, field_others(), field_whole(access->mode));
}

/* Ends the uses of the chunks. On the device it stores the stream's fence before it drops the count: a thread that sees
 * the new count must see the fence. If the stream cannot be made to wait for another use (all entries are taken), it
 * returns the error, and the chunks are released all the same. */
static gemini_status_t release_chunks(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r,
                                      uint32_t stream, bool locked) {
  const bool on_device = access->tier == GEMINI_TIER_DEVICE;
  gemini_status_t status = GEMINI_OK;
  if (!on_device) status = gmi_slots_use(m, r->store->chunks, r->first, r->last, stream);
  for (uint64_t i = r->first; i <= r->last; i++) {
    gmi_chunk_t *c = &r->store->chunks[i];
    const gemini_status_t used = on_device ? gmi_chunk_use(m, c, access->mode, stream, locked) : GEMINI_OK;
    if (used) status = used;
    gmi_chunk_unhold(m, c, access->tier, access->mode);
    if (!on_device) gmi_host_released(m, c);
  }
  return status;
}

/* Ends a claimed acquire: chunks first, the tensor's user last, as it keeps the records alive. */
static gemini_status_t end(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r, uint32_t stream,
                           bool locked, uint32_t phase) {
  gemini_status_t status = release_chunks(m, access, r, stream, locked);
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  if (!is_whole(access, r->tensor, r->size)) gmi_lease_end(&m->leases, &key);
  if (r->tensor) (void)tensor_release(r->tensor, field_others(), phase);
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
static bool release_whole(gmi_manager_t *m, const gemini_access_t *access, uint32_t stream,
                          gemini_status_t *status_out) {
  if (access->tier != GEMINI_TIER_DEVICE || access->mode - 1 > 2 || gmi_object_id(access) >> 60 != GMI_HANDLE_TENSOR)
    return false;
  gmi_range_t r;
  if (gmi_range_bytes(m, access, &r) || r.size != r.tensor->size) return false;
  uint32_t phase = atomic_load_explicit(&m->bracket.phase, memory_order_relaxed);
  if (!tensor_release(r.tensor, field_whole(access->mode), phase)) return false;
  gmi_range_chunks(m, &r);
  *status_out = release_chunks(m, access, &r, stream, false);
  return true;
}

/* A release without the lock may name the index of a stream that is destroyed meanwhile: see gmi_fence_reached() and
 * gmi_chunk_use_full(). */
static gemini_status_t release(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count,
                               gemini_stream_t stream, uint32_t s) {
  gemini_status_t status = GEMINI_OK;
  if (gmi_graph_begun(m, s)) {
    bool captures = false;
    gmi_lock(m, "gemini_release");
    status = gmi_stream_resolve(m, stream, &s);
    if (!status) status = gmi_graph_captures(m, s, &captures);
    if (!status && captures) status = gmi_graph_release(m, accesses, count, s);
    gmi_unlock(m);
    if (status || captures) return status;
  }
  if (count == 1 && release_whole(m, accesses, s, &status)) return status;
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

static __attribute__((noinline)) gemini_status_t release_copies(gemini_manager_t mgr, const gemini_access_t *theirs,
                                                                uint64_t count, gemini_stream_t stream) {
  gmi_accesses_t accesses;
  gemini_status_t status = gmi_accesses_in(&accesses, theirs, count);
  if (status) return status;
  status = gemini_release(mgr, accesses.list, count, stream);
  gmi_accesses_free(&accesses);
  return status;
}
gemini_status_t gemini_release(gemini_manager_t mgr, const gemini_access_t *accesses, uint64_t count,
                               gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if ((!accesses && count) || count > GMI_BATCH_LIMIT || !gmi_accesses_are_ours(accesses, count))
    API_RETURN(release_copies(mgr, accesses, count, stream));
  uint32_t s;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  API_RETURN(status ? status : release(m, accesses, count, stream, s));
}
