/* What the two paths of an acquire share: users of a tensor, and checks of an access.
 * SPDX-License-Identifier: Apache-2.0
 *
 * access.c holds the public calls and what they do without the manager's lock; acquire.c holds the path under it.
 * Threads: any, no lock, unless said otherwise. */
#ifndef GMI_ACQUIRE_H
#define GMI_ACQUIRE_H

#include "chunk/arena.h"
#include "chunk/host.h"
#include "core/manager.h"

/* ---- a tensor's users
 *
 * Each acquire is counted in one field of the tensor's word: that of its mode if the word alone counts it, else OTHERS.
 * A field is named by its index in gmi_tensor_fields. All updates are acquire-release: the release of the last user
 * pairs with tensor_kill() (tensor.c) and tensors_freeze() (cut.c), which free or replace records once they have seen a
 * word without users. */

/* Adds a user. Returns false if the tensor is being unregistered, is frozen, or the field is full. */
static inline bool gmi_tensor_hold(gmi_tensor_t *t, uint32_t field) {
  uint64_t word = atomic_load_explicit(&t->word, memory_order_relaxed);
  const gmi_field_t f = gmi_tensor_fields[field];
  do {
    if ((word & (GMI_TENSOR_DEAD | GMI_TENSOR_FROZEN)) || (word & f.mask) == f.mask) return false;
  } while (!atomic_compare_exchange_weak_explicit(&t->word, &word, word + f.unit, memory_order_acq_rel,
                                                  memory_order_relaxed));
  return true;
}
/* Removes the user of a failed acquire, without a change of the tensor's state. */
static inline void gmi_tensor_unhold(gmi_tensor_t *t, uint32_t field) {
  atomic_fetch_sub_explicit(&t->word, gmi_tensor_fields[field].unit, memory_order_acq_rel);
}
/* Moves one user from a field to another, so that the tensor is in use throughout. Returns false if the field from is
 * empty or the field to is full. */
static inline bool gmi_tensor_rehold(gmi_tensor_t *t, uint32_t from, uint32_t to) {
  uint64_t word = atomic_load_explicit(&t->word, memory_order_relaxed);
  const gmi_field_t f = gmi_tensor_fields[from], g = gmi_tensor_fields[to];
  do {
    if (!(word & f.mask) || (word & g.mask) == g.mask) return false;
  } while (!atomic_compare_exchange_weak_explicit(&t->word, &word, word - f.unit + g.unit, memory_order_acq_rel,
                                                  memory_order_relaxed));
  return true;
}
/* Removes a user and sets the state that the phase calls for, in one step. The state shows only once there are no
 * users: that of the last release remains. Returns false if the field is empty: the range was not acquired in this
 * way. */
static inline bool gmi_tensor_release(gmi_tensor_t *t, uint32_t field, uint32_t phase) {
  static const uint32_t after[] = { GEMINI_STATE_HOLD, GEMINI_STATE_HOLD_AFTER_FWD, GEMINI_STATE_HOLD_AFTER_BWD,
                                    GEMINI_STATE_HOLD };
  uint64_t word = atomic_load_explicit(&t->word, memory_order_relaxed);
  const gmi_field_t f = gmi_tensor_fields[field];
  do {
    if (!(word & f.mask)) return false;
  } while (!atomic_compare_exchange_weak_explicit(&t->word, &word, gmi_tensor_word(word - f.unit, after[phase]),
                                                  memory_order_acq_rel, memory_order_relaxed));
  return true;
}

/* Is the acquire counted in the tensor's word alone, without a lease? */
static inline bool gmi_access_is_whole(const gemini_access_t *access, const gmi_tensor_t *t, uint64_t size) {
  return t && access->tier == GEMINI_TIER_DEVICE && size == t->size;
}

/* Reports a touch to the tracer, once per operator for each whole tensor and mode. Relaxed: a race between two threads
 * only reports a touch twice, which the tracer merges. */
static inline void gmi_trace_tensor(gmi_manager_t *m, gmi_tensor_t *t, gmi_arena_t *a, uint64_t offset, uint64_t size,
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

gemini_status_t gmi_access_check(const gemini_access_t *access); /* are mode and tier ones that exist? */
void gmi_count_hits(gmi_manager_t *m, uint64_t hits);            /* chunks that an acquire found on the device */
static inline void *gmi_range_pointer(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  if (access->tier == GEMINI_TIER_DEVICE) return r->store->base + r->at;
  return r->size ? gmi_range_host(m, r->store, r->at) : NULL;
}

/* Acquires a batch, all or nothing. Lock held; it is given away while callbacks of updates run. */
gemini_status_t gmi_acquire_slow(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream);

#endif
