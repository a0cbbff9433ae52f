/* The path of an acquire under the manager's lock. SPDX-License-Identifier: Apache-2.0
 *
 * It serves what the fast path (access.c) cannot: bytes that must come or be waited for, the host, ranges of arenas,
 * and whatever is refused, which gets its error here. Runs on the caller's thread. */
#include "chunk/acquire.h"

#include <errno.h>
#include <stdlib.h>

#include "chunk/accesses.h"
#include "chunk/content.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/streams.h"
#include "core/workers.h"

gemini_status_t gmi_access_check(const gemini_access_t *access) {
  if (access->mode < GEMINI_READ || access->mode > GEMINI_READ_WRITE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "mode is %u, must be 1 to 3", access->mode);
  if (access->tier > GEMINI_TIER_HOST)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, must be GEMINI_TIER_DEVICE or GEMINI_TIER_HOST", access->tier);
  return GEMINI_OK;
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
  uint32_t field; /* the field of the tensor's word that counts it, if counted */
  bool counted, leased;
} prepared_t;

/* Counts the acquire in its tensor's word, if it names a tensor, and by a lease unless the word alone is enough. Of an
 * arena without bytes nothing is acquired: when the release comes, it may have some. */
static gemini_status_t count_acquire(gmi_manager_t *m, const gemini_access_t *access, prepared_t *p) {
  const gmi_range_t *r = &p->range;
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  bool whole = gmi_access_is_whole(access, r->tensor, r->size);
  p->field = whole ? access->mode : GMI_TENSOR_OTHERS;
  if (r->tensor && !gmi_tensor_hold(r->tensor, p->field)) /* full: under the lock it is neither dead nor frozen */
    return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s has %llu unreleased acquires of this kind, which is the limit",
                    gmi_range_name(m, r), (unsigned long long)gmi_tensor_field_users(UINT64_MAX, p->field));
  p->counted = r->tensor != NULL;
  const bool leases = !whole && r->size;
  gemini_status_t status = leases ? gmi_lease_add(&m->leases, &key) : GEMINI_OK;
  p->leased = leases && !status;
  return status;
}

static void uncount_acquire(gmi_manager_t *m, const gemini_access_t *access, const prepared_t *p) {
  gmi_lease_key_t key = gmi_range_key(m, access, &p->range);
  if (p->leased && gmi_lease_claim(&m->leases, &key)) gmi_lease_end(&m->leases, &key);
  if (p->counted) gmi_tensor_unhold(p->range.tensor, p->field);
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
static gemini_status_t bring_chunk(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r, uint32_t i,
                                   bool fresh) {
  gmi_chunk_t *c = &r->store->chunks[i];
  if (access->tier == GEMINI_TIER_DEVICE) {
    if (gmi_chunk_is_resident(c)) {
      gmi_count_hits(m, 1);
      return GEMINI_OK;
    }
    m->stats.acquire_misses += !fresh; /* a fresh chunk fetches nothing */
    /* The frame that a fresh one had before may be that of the op before, whose copy to the host it would wait for. */
    return gmi_chunk_fetch(m, c, fresh, GEMINI_REASON_DEMAND, GMI_TAKE_EVICT | (fresh ? GMI_TAKE_READY : 0));
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

/* Fresh chunks come last: where another access of the batch reads their bytes, it has brought them by then. */
static gemini_status_t bring_chunks(gmi_manager_t *m, const gemini_access_t *accesses, const prepared_t *p,
                                    uint64_t count) {
  gemini_status_t status = GEMINI_OK;
  for (int fresh = 0; fresh < 2; fresh++)
    for (uint64_t k = 0; !status && k < count; k++)
      for (uint64_t i = p[k].range.first; !status && i <= p[k].range.last; i++)
        if ((accesses[k].mode == GEMINI_WRITE && covers(m, &p[k].range, (uint32_t)i)) == fresh)
          status = bring_chunk(m, &accesses[k], &p[k].range, (uint32_t)i, fresh);
  return status;
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
    if (device) gmi_trace_tensor(m, r->tensor, r->arena, r->offset, r->size, access->mode);
  } else if (device && r->size && atomic_load(&m->bracket.op_serial)) {
    m->trace.observer->touched(m, r->store->index, r->offset, r->size, access->mode);
  }
  access->ptr = gmi_range_pointer(m, access, r);
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
    status = gmi_access_check(&accesses[k]);
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

/* In an operator, a batch that gathers chunks on demand may show that the iteration departs from the recorded order;
 * what was gathered ahead leaves then, but for chunks in use. Ranks that leave others go on to gather others. Of this
 * batch, the fast path may have served some chunks on one rank and none on another: so all of them are held by now. */
static gemini_status_t batch_meets(gmi_manager_t *m, const gemini_access_t *accesses, const prepared_t *p,
                                   uint64_t count) {
  if (!atomic_load(&m->bracket.op_serial)) return GEMINI_OK;
  for (uint64_t k = 0; k < count; k++)
    if (accesses[k].tier == GEMINI_TIER_DEVICE && gmi_range_gathers(&p[k].range))
      return m->trace.advice->gathers_meet(m);
  return GEMINI_OK;
}

gemini_status_t gmi_acquire_slow(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream) {
  prepared_t small[GMI_SMALL_BATCH], *p = small;
  gemini_status_t status = GEMINI_OK;
  /* An invalid batch must not choose the chunk size: gmi_cut() comes after all checks. */
  for (uint64_t k = 0; !status && k < count && !atomic_load(&m->cut.chunk_bytes); k++) {
    status = gmi_access_check(&accesses[k]);
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
  if (!status) status = batch_meets(m, accesses, p, count);
  gmi_gather_batch_begin(m);
  if (!status) status = bring_chunks(m, accesses, p, count);
  status = gmi_gather_batch_end(m, status, !atomic_load(&m->bracket.op_serial)); /* see before_gathers() */
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
