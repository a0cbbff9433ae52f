/* All changes of a chunk's record. SPDX-License-Identifier: Apache-2.0
 *
 * The functions only keep records consistent (chunk, frame, slot); they move no bytes and free nothing, which is the
 * task of residency.c, host.c and files.c. All run under the manager's lock, on the thread of the caller, except where
 * chunk.h says otherwise. Changes of word_ are atomic, as acquires without the lock change its counts meanwhile. */
#include "chunk/chunk.h"

#include <string.h>

#include "chunk/arena.h"
#include "io/borrowed.h"

/* ---- invariants */
/* Invariants that hold after every single change, also within a call. */
static bool sound(gmi_manager_t *m, const gmi_chunk_t *c) {
  uint32_t word = atomic_load(&c->word_);
  bool resident = c->frame_ != GMI_NONE;
  if (!c->valid_ || ((word & GMI_CHUNK_RESIDENT) && !resident)) return false;
  if (resident && m->frames.at[c->frame_].chunk != c) return false;
  if (!resident && ((c->valid_ & GMI_VALID_DEVICE) || (word & GMI_CHUNK_SETTLED))) return false;
  if ((word & GMI_CHUNK_RESIDENT) && ((word & GMI_CHUNK_DIRTY) != 0) != (c->valid_ == GMI_VALID_DEVICE)) return false;
  if (((c->valid_ & GMI_VALID_HOST) || c->io_) && c->slot_ == GMI_NONE) return false;
  if (c->slot_ != GMI_NONE && m->host.slots[c->slot_].chunk != c) return false;
  if (((c->valid_ & GMI_VALID_FILE) != 0) != (c->block_ != GMI_NONE)) return false;
  if (c->lazy_zeros_ && !(c->valid_ & GMI_VALID_HOST)) return false;
  if (c->loading_ && (word & (GMI_CHUNK_SETTLED | GMI_CHUNK_USERS) || c->deferred_)) return false;
  if (c->spec_ && (word & (GMI_CHUNK_SETTLED | GMI_CHUNK_WRITERS) || c->host_writers_ || c->loading_)) return false;
  if (c->discarded_ && word & GMI_CHUNK_SETTLED) return false;
  return c->host_writers_ <= c->host_users_ && c->graph_held_ <= c->host_writers_ && c->left_ <= c->deferred_ &&
         c->batch_users_ <= c->host_users_;
}

/* Invariants that hold whenever the lock is free. Within a call some are violated for a time: a chunk that departs has
 * a frame without RESIDENT. */
bool gmi_chunk_invariant(gmi_manager_t *m, const gmi_chunk_t *c) {
  uint32_t word = atomic_load(&c->word_);
  bool resident = c->frame_ != GMI_NONE;
  if (!sound(m, c) || ((word & GMI_CHUNK_RESIDENT) != 0) != resident) return false;
  if (!resident && (word & (GMI_CHUNK_USERS | GMI_CHUNK_WRITERS))) return false;
  if (((word & GMI_CHUNK_DIRTY) != 0) != (c->valid_ == GMI_VALID_DEVICE)) return false;
  return !(c->host_writers_ && resident) && !c->batch_users_ && !c->batch_joined_;
}

#ifdef GEMINI_CHECK
/* Called after each change: asserts that the record is sound, and lists it for a full check at the next unlock. */
static void changed(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  GMI_ASSERT(sound(m, c));
  for (uint32_t i = 0; i < m->check.changed_count && i < GMI_CHANGED; i++)
    if (m->check.changed[i] == c) return;
  if (m->check.changed_count < GMI_CHANGED) m->check.changed[m->check.changed_count] = c;
  m->check.changed_count++;
}
#else
static void changed(gmi_manager_t *m, gmi_chunk_t *c) { (void)m, (void)c; }
#endif

void gmi_chunks_check(gmi_manager_t *m) {
  GMI_ASSERT(m->frames.used + m->frames.free.count == m->frames.made);
  GMI_ASSERT(m->io.count ||
             m->check.blocks_held * gmi_block_bytes(m) == m->file.used); /* else transfers own blocks too */
  if (m->check.changed_count <= GMI_CHANGED) {
    for (uint32_t i = 0; i < m->check.changed_count; i++) GMI_ASSERT(gmi_chunk_invariant(m, m->check.changed[i]));
  } else {
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *a = gmi_arena_at(m, i);
      for (uint32_t k = 0; a && a->chunks && k < atomic_load(&a->chunk_count); k++)
        GMI_ASSERT(gmi_chunk_invariant(m, &a->chunks[k]));
    }
  }
  m->check.changed_count = 0;
}
void gmi_chunks_forget_checks(gmi_manager_t *m) { m->check.changed_count = 0; }

#ifdef GEMINI_CHECK
void gmi_balance_check(gmi_manager_t *m) {
  uint32_t frames = 0, gathered = 0, slots = 0, free_slots = 0, blocks = 0, used_frames = 0, due = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && a->chunks && k < atomic_load(&a->chunk_count); k++) {
      const gmi_chunk_t *c = &a->chunks[k];
      GMI_ASSERT(!gmi_chunk_device_users(c) && !c->host_users_ && !c->graphs_);
      if (c->io_) continue; /* the result of its last transfer was not processed: its record is not final */
      GMI_ASSERT(gmi_chunk_invariant(m, c));
      frames += c->frame_ != GMI_NONE;
      gathered += c->frame_ != GMI_NONE && gmi_arena_is_sharded(a);
      slots += c->slot_ != GMI_NONE;
      blocks += c->block_ != GMI_NONE && !gmi_block_is_borrowed(c->block_);
    }
  }
  for (uint32_t i = 0; i < m->frames.capacity; i++) {
    used_frames += m->frames.at[i].chunk != NULL;
    due += m->frames.at[i].due;
    GMI_ASSERT(!m->frames.at[i].due || m->frames.at[i].chunk);
  }
  GMI_ASSERT(frames == used_frames && due == m->frames.due.count);
  GMI_ASSERT(frames == m->frames.resident && gathered == m->groups.frames);
  for (uint32_t s = 0; s < m->host.slot_count; s++) free_slots += (m->host.free_map[s >> 6] & 1ull << (s & 63)) != 0;
  GMI_ASSERT(free_slots == m->host.free_count);
  if (!m->io.count) GMI_ASSERT(slots * gmi_slot_bytes(m) == m->host.used);
  if (!m->io.count) GMI_ASSERT(blocks * gmi_block_bytes(m) == m->file.used);
}
#else
void gmi_balance_check(gmi_manager_t *m) { (void)m; }
#endif

/* Sets valid_, and DIRTY accordingly: the fast path cannot read valid_, which the lock guards, so it reads the flag.
 * The load before the clear saves an atomic write in the usual case. With DIRTY the fast path lets streams write, and
 * it does not look at copied_out_: SETTLED goes first while that copy is under way. */
static void set_valid(gmi_manager_t *m, gmi_chunk_t *c, uint32_t valid) {
  c->valid_ = (uint8_t)valid;
  if (!(valid & GMI_VALID_HOST)) c->lazy_zeros_ = 0;
  if (valid == GMI_VALID_DEVICE) {
    if (!gmi_fence_reached(m, c->copied_out_)) atomic_fetch_and(&c->word_, ~GMI_CHUNK_SETTLED);
    atomic_fetch_or(&c->word_, GMI_CHUNK_DIRTY);
  } else if (atomic_load(&c->word_) & GMI_CHUNK_DIRTY) {
    atomic_fetch_and(&c->word_, ~GMI_CHUNK_DIRTY);
  }
}

void gmi_chunk_init(gmi_chunk_t *c, uint32_t arena, uint32_t index, bool in_slices) {
  memset(c, 0, sizeof *c);
  c->frame_ = c->slot_ = c->block_ = GMI_NONE;
  c->arena = arena;
  c->index = index;
  c->valid_ = in_slices ? GMI_VALID_SLICES : GMI_VALID_ZERO;
}
void gmi_chunk_slices_valid(gmi_manager_t *m, gmi_chunk_t *c) {
  set_valid(m, c, c->valid_ | GMI_VALID_SLICES);
  changed(m, c);
}

/* ---- users */
static const char *why_host_writers(const gmi_chunk_t *c) {
  return c->graph_held_ ? "in use by a graph" : c->host_writers_ ? "acquired on the host for writing" : NULL;
}
/* The counts' widths are the limits: one more user would carry into the next field of the word. */
static const char *why_full(const gmi_chunk_t *c, uint32_t word) {
  return (word & GMI_CHUNK_USERS) == GMI_CHUNK_USERS       ? "acquired 65535 times, the limit"
         : (word & GMI_CHUNK_WRITERS) == GMI_CHUNK_WRITERS ? "acquired for writing 8191 times, the limit"
         : c->host_users_ >= UINT16_MAX                    ? "acquired on the host 65535 times, the limit"
                                                           : NULL;
}
const char *gmi_chunk_busy(const gmi_chunk_t *c, gmi_purpose_t purpose) {
  uint32_t word = atomic_load(&c->word_);
  const char *why = NULL;
  if (c->loading_ && purpose != GMI_TO_EVICT && purpose != GMI_TO_LEAVE_HOST) return "being loaded";
  switch (purpose) {
  case GMI_TO_FETCH: return why_host_writers(c);
  case GMI_TO_READ_ON_DEVICE: why = why_host_writers(c); break;
  case GMI_TO_WRITE_ON_DEVICE:
    why = why_host_writers(c);
    if (!why && c->host_users_) why = "acquired on the host";
    break;
  case GMI_TO_READ_ON_HOST: why = word & GMI_CHUNK_WRITERS ? "acquired on the device" : NULL; break;
  case GMI_TO_WRITE_ON_HOST:
    why = word & GMI_CHUNK_USERS ? "acquired on the device"
          : c->user_pins_        ? "pinned to the device"
          : c->graph_held_       ? "in use by a graph"
                                 : NULL;
    break;
  case GMI_TO_EVICT: return c->user_pins_ ? "pinned" : word & GMI_CHUNK_USERS ? "acquired" : NULL;
  case GMI_TO_LEAVE_HOST:
    return c->graph_held_   ? "in use by a graph"
           : c->host_users_ ? "acquired on the host"
           : c->graphs_     ? "read by a graph and stays on the host until the graph is destroyed"
                            : NULL;
  case GMI_TO_CHANGE: return c->host_users_ || word & GMI_CHUNK_USERS ? "acquired" : NULL;
  case GMI_TO_LOAD:
    if (c->user_pins_) return "pinned to the device"; /* fallthrough */
  case GMI_TO_STORE: return c->host_writers_ || word & GMI_CHUNK_WRITERS ? "acquired for writing" : NULL;
  case GMI_TO_USE_IN_GRAPH:
    why = c->graph_held_           ? "in use by another graph"
          : c->user_pins_          ? "pinned to the device"
          : word & GMI_CHUNK_USERS ? "acquired on the device"
                                   : why_host_writers(c);
    break;
  }
  return why ? why : why_full(c, word);
}

const char *gmi_chunk_hold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode) {
  bool write = mode & GEMINI_WRITE;
  if (write) gmi_chunk_unspeculate(m, c);
  gmi_chunk_keep(c);
  if (tier == GEMINI_TIER_DEVICE) {
    const char *why = gmi_chunk_busy(c, write ? GMI_TO_WRITE_ON_DEVICE : GMI_TO_READ_ON_DEVICE);
    return why ? why : gmi_chunk_hold_device(m, c, mode);
  }
  const char *why = gmi_chunk_busy(c, write ? GMI_TO_WRITE_ON_HOST : GMI_TO_READ_ON_HOST);
  if (why) return why;
  /* A device acquire without the lock may have come since gmi_chunk_busy() looked: this checks again and excludes
   * further ones in one step. Readers on both tiers may coexist: with a valid host copy the chunk is not DIRTY, and the
   * fast path refuses writes of it. */
  if (!gmi_chunk_unsettle(c, write ? GMI_CHUNK_USERS : GMI_CHUNK_WRITERS)) return "acquired on the device";
  c->host_users_++;
  c->batch_users_++;
  c->host_writers_ += write;
  changed(m, c);
  return NULL;
}

/* Checks the limits in the word that is replaced: acquires without the lock may add users at any time. */
const char *gmi_chunk_hold_device(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode) {
  uint32_t word = atomic_load(&c->word_), add = mode & GEMINI_WRITE ? 1 + GMI_CHUNK_WRITER : 1;
  const char *why;
  if (mode & GEMINI_WRITE) gmi_chunk_unspeculate(m, c);
  do why = why_full(c, word);
  while (!why && !atomic_compare_exchange_weak(&c->word_, &word, word + add));
  return why;
}

const char *gmi_chunk_pin(gmi_manager_t *m, gmi_chunk_t *c) {
  if (c->loading_) return "being loaded";
  if (c->user_pins_ == UINT16_MAX) return "pinned 65535 times, the limit";
  c->user_pins_++;
  changed(m, c);
  return NULL;
}
void gmi_chunk_unpin(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(c->user_pins_);
  c->user_pins_--;
  changed(m, c);
}

void gmi_chunk_hold_host(gmi_manager_t *m, gmi_chunk_t *c, bool writes) {
  if (writes) gmi_chunk_unspeculate(m, c);
  c->host_users_++;
  c->host_writers_ += writes;
  changed(m, c);
}
void gmi_chunk_unhold_host(gmi_manager_t *m, gmi_chunk_t *c, bool writes) {
  GMI_ASSERT(c->host_users_ && c->host_writers_ >= writes);
  c->host_users_--;
  c->host_writers_ -= writes;
  changed(m, c);
}

/* Pairs with the compare-and-swap in gmi_chunk_hold_fast(): see the top of chunk.h. */
bool gmi_chunk_unsettle(gmi_chunk_t *c, uint32_t unless) {
  uint32_t word = atomic_load(&c->word_);
  do {
    if (word & unless) return false;
  } while (!atomic_compare_exchange_weak(&c->word_, &word, word & ~GMI_CHUNK_SETTLED));
  return true;
}

const char *gmi_chunk_unsettle_to_change(gmi_chunk_t *c) {
  const char *why = gmi_chunk_busy(c, GMI_TO_CHANGE);
  if (!why && !gmi_chunk_unsettle(c, GMI_CHUNK_USERS)) why = "acquired"; /* without the lock, after that look */
  return why;
}

const char *gmi_chunk_load_begin(gmi_manager_t *m, gmi_chunk_t *c) {
  const char *why = gmi_chunk_busy(c, GMI_TO_LOAD);
  if (!why) why = gmi_chunk_unsettle_to_change(c);
  if (why) return why;
  gmi_chunk_unspeculate(m, c);
  c->loading_ = true;
  changed(m, c);
  return NULL;
}
void gmi_chunk_load_end(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(c->loading_);
  c->loading_ = false;
  changed(m, c);
}

void gmi_chunk_graph_hold(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(!c->graph_held_);
  gmi_chunk_unspeculate(m, c);
  c->graph_held_ = true;
  gmi_chunk_hold_host(m, c, true);
}
void gmi_chunk_graph_unhold(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(c->graph_held_);
  c->graph_held_ = false;
  gmi_chunk_unhold_host(m, c, true);
}
void gmi_chunk_graphs_add(gmi_chunk_t *c) { c->graphs_++; }
void gmi_chunk_graphs_sub(gmi_chunk_t *c) {
  GMI_ASSERT(c->graphs_);
  c->graphs_--;
}

void gmi_chunk_piece_accepted(gmi_chunk_t *c) {
  GMI_ASSERT(c->deferred_ < UINT16_MAX);
  c->deferred_++;
}
void gmi_chunk_piece_queued(gmi_chunk_t *c, bool left) {
  GMI_ASSERT(c->deferred_ && c->left_ >= left);
  c->deferred_--;
  c->left_ = (uint16_t)(c->left_ - left);
}
void gmi_chunk_piece_left(gmi_chunk_t *c) {
  GMI_ASSERT(c->left_ < c->deferred_);
  c->left_++;
}

/* ---- queued work on the device copy */
static void uses_clear(gmi_uses_t *uses) {
  for (int i = 0; i < GMI_USES; i++) atomic_store(&uses->fence[i], 0);
}

/* Every entry holds unfinished work of another stream: makes stream wait for the first. This is the only part of a
 * release without the lock that may take the lock, as a wait may have to place a mark. *ended_out: the stream was
 * destroyed since the caller named it. Its work is done, so its use needs no entry, and must not replace one. (If its
 * index has a new stream, that one waits in its place, which is more than needed, and right.) */
static gemini_status_t use_full(gmi_manager_t *m, uint32_t stream, gmi_fence_t first, bool locked, bool *ended_out) {
  if (!locked) gmi_lock(m, "gemini_release");
  *ended_out = !atomic_load(&m->streams[stream].life);
  gemini_status_t status = *ended_out ? GEMINI_OK : gmi_fence_wait(m, stream, first);
  if (status && !gmi_fence_sync(m, first)) status = GEMINI_OK; /* the calling thread waits instead */
  if (!locked) gmi_unlock(m);
  return status;
}

/* Stores the fence in an entry that is empty, that belongs to the same stream, or whose work is done. If there is none,
 * stream waits for the work of the first entry and replaces it. Several releases may run at the same time: the exchange
 * fails if another one has changed the entry since it was examined, and the search starts again. */
gemini_status_t gmi_chunk_use(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream, bool locked) {
  gmi_uses_t *uses = mode & GEMINI_WRITE ? &c->writes_ : &c->reads_;
  gmi_chunk_touch(m, c);
  while (stream != GMI_CALLER) {
    gmi_fence_t seen[GMI_USES];
    int place = GMI_USES;
    for (int i = GMI_USES; i-- > 0;) {
      seen[i] = atomic_load_explicit(&uses->fence[i], memory_order_relaxed);
      if (!seen[i] || gmi_fence_stream(seen[i]) == stream || gmi_fence_reached(m, seen[i])) place = i;
    }
    if (place == GMI_USES) {
      bool ended;
      place = 0;
      gemini_status_t status = use_full(m, stream, seen[place], locked, &ended);
      if (status || ended) return status;
    }
    gmi_fence_t now = gmi_fence_later(m, stream);
    /* The fence becomes visible through the decrement of word_ that follows in gmi_chunk_unhold_device(). */
    if (atomic_compare_exchange_strong(&uses->fence[place], &seen[place], now)) break;
  }
  return GEMINI_OK;
}

/* Is all work in uses ahead of the next work of stream without a wait: on the same stream, or done? */
static bool uses_allow(gmi_manager_t *m, const gmi_uses_t *uses, uint32_t stream) {
  for (int i = 0; i < GMI_USES; i++) {
    gmi_fence_t f = atomic_load_explicit(&uses->fence[i], memory_order_relaxed);
    if (f && gmi_fence_stream(f) != stream && !gmi_fence_reached(m, f)) return false;
  }
  return true;
}

/* As gmi_chunk_hold_now(), but a failed exchange repeats the checks. */
bool gmi_chunk_hold_fast(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream) {
  uint32_t word = atomic_load_explicit(&c->word_, memory_order_acquire);
  do {
    if (!gmi_chunk_word_allows(word, mode) || !uses_allow(m, &c->writes_, stream) ||
        (mode & GEMINI_WRITE && !uses_allow(m, &c->reads_, stream)))
      return false;
  } while (!atomic_compare_exchange_weak_explicit(&c->word_, &word, word + gmi_chunk_word_user(mode),
                                                  memory_order_acq_rel, memory_order_acquire));
  return true;
}

uint32_t gmi_chunk_fences(const gmi_chunk_t *c, uint32_t mode, gmi_fence_t fences_out[GMI_CHUNK_FENCES]) {
  uint32_t count = 0;
  fences_out[count++] = c->arrive_;
  for (int i = 0; i < GMI_USES; i++) fences_out[count++] = atomic_load(&c->writes_.fence[i]);
  if (!(mode & GEMINI_WRITE)) return count;
  for (int i = 0; i < GMI_USES; i++) fences_out[count++] = atomic_load(&c->reads_.fence[i]);
  fences_out[count++] = c->copied_out_;
  return count;
}

gemini_status_t gmi_chunk_wait(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode) {
  gmi_fence_t fences[GMI_CHUNK_FENCES];
  uint32_t count = gmi_chunk_fences(c, mode, fences);
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < count; i++) status = gmi_fence_wait(m, stream, fences[i]);
  return status;
}

gmi_fence_t gmi_chunk_used(gmi_manager_t *m, gmi_chunk_t *c) {
  gmi_fence_t fences[GMI_CHUNK_FENCES], all = 0;
  uint32_t count = gmi_chunk_fences(c, GEMINI_READ_WRITE, fences);
  for (uint32_t i = 0; i < count; i++) all = gmi_fence_join(m, all, fences[i]);
  return all;
}

/* May acquires skip the lock? They look only at the flags. So they must not find SETTLED while updates of the chunk are
 * left to queue, which an acquire does first; while it is speculated from, which a write ends; while its bytes are
 * discarded, which an acquire ends; and while a copy is under way behind which a write comes, as set_valid() says. */
static bool may_settle(gmi_manager_t *m, const gmi_chunk_t *c) {
  return !c->deferred_ && !c->spec_ && !c->discarded_ && gmi_fence_reached(m, c->arrive_) &&
         (!(atomic_load(&c->word_) & GMI_CHUNK_DIRTY) || gmi_fence_reached(m, c->copied_out_));
}
/* The read-modify-write makes what precedes it visible to the acquire load in gmi_chunk_hold_fast(). */
void gmi_chunk_settle(gmi_manager_t *m, gmi_chunk_t *c) {
  if (may_settle(m, c)) atomic_fetch_or(&c->word_, GMI_CHUNK_SETTLED);
}
void gmi_chunk_discard(gmi_manager_t *m, gmi_chunk_t *c) {
  c->discarded_ = true;
  changed(m, c);
}
void gmi_chunk_copied(gmi_chunk_t *c, gmi_fence_t fence) { c->copied_out_ = fence; }
void gmi_chunk_fills(gmi_chunk_t *c, gmi_fence_t fence) {
  c->arrive_ = fence;
  atomic_fetch_and(&c->word_, ~GMI_CHUNK_SETTLED);
}

/* ---- where its bytes are */
void gmi_chunk_arrived(gmi_manager_t *m, gmi_chunk_t *c, uint32_t frame, gmi_fence_t arrive, bool fresh) {
  GMI_ASSERT(c->frame_ == GMI_NONE && !m->frames.at[frame].chunk && !m->frames.at[frame].free);
  c->frame_ = frame;
  m->frames.at[frame].chunk = c;
  m->frames.resident++;
  c->arrive_ = arrive;
  c->copied_out_ = 0;
  uses_clear(&c->reads_);
  uses_clear(&c->writes_);
  atomic_store_explicit(&c->touched_, atomic_fetch_add_explicit(&m->frames.clock, 1, memory_order_relaxed) + 1,
                        memory_order_relaxed);
  if (!fresh) set_valid(m, c, c->valid_ | GMI_VALID_DEVICE);
  const uint32_t word = GMI_CHUNK_RESIDENT | (may_settle(m, c) ? GMI_CHUNK_SETTLED : 0);
  atomic_fetch_or(&c->word_, word); /* last: publishes the fields above to acquires without the lock */
  changed(m, c);
}

/* Seeing no users in the word that is replaced makes the fences of all their releases visible, so that the eviction can
 * wait for them. */
bool gmi_chunk_departs(gmi_chunk_t *c, uint32_t *word_out) {
  uint32_t word = atomic_load(&c->word_);
  do {
    if (word & GMI_CHUNK_USERS) return false;
  } while (!atomic_compare_exchange_weak(&c->word_, &word, 0));
  *word_out = word;
  return true;
}
void gmi_chunk_departs_not(gmi_chunk_t *c, uint32_t word) { atomic_fetch_or(&c->word_, word); }

static uint32_t leave_frame(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t frame = c->frame_;
  GMI_ASSERT(m->frames.at[frame].chunk == c);
  m->frames.at[frame].chunk = NULL;
  m->frames.resident--;
  c->frame_ = GMI_NONE;
  c->arrive_ = 0;
  uses_clear(&c->reads_);
  uses_clear(&c->writes_);
  return frame;
}

/* Has all work that was queued on the device copy ended? */
static bool is_quiet(gmi_manager_t *m, const gmi_chunk_t *c) {
  gmi_fence_t fences[GMI_CHUNK_FENCES];
  uint32_t count = gmi_chunk_fences(c, GEMINI_READ_WRITE, fences);
  bool quiet = true;
  for (uint32_t i = 0; i < count; i++) quiet = quiet && gmi_fence_reached(m, fences[i]);
  return quiet;
}

uint32_t gmi_chunk_departed(gmi_manager_t *m, gmi_chunk_t *c, uint32_t becomes, gmi_fence_t fence) {
  GMI_ASSERT(fence || is_quiet(m, c));
  (void)fence;
  GMI_ASSERT(c->frame_ != GMI_NONE && !(atomic_load(&c->word_) & GMI_CHUNK_USERS));
  uint32_t frame = leave_frame(m, c);
  set_valid(m, c, becomes ? becomes : c->valid_ & ~(uint32_t)GMI_VALID_DEVICE);
  changed(m, c);
  return frame;
}

static void block_set(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block) {
  GMI_ASSERT(c->block_ == GMI_NONE);
  c->block_ = block;
  m->check.blocks_held += !gmi_block_is_borrowed(block);
}
static uint32_t block_take(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t block = c->block_;
  c->block_ = GMI_NONE;
  m->check.blocks_held -= block != GMI_NONE && !gmi_block_is_borrowed(block);
  return block;
}
uint32_t gmi_chunk_wrote_device(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(c->frame_ != GMI_NONE && !c->spec_);
  uint32_t block = block_take(m, c);
  set_valid(m, c, GMI_VALID_DEVICE);
  changed(m, c);
  return block;
}
/* Makes valid the only copy, and takes frame and block from the chunk. A plain store of the word loses no count:
 * callers have excluded acquires without the lock (SETTLED is clear, or no tensor of the arena can be acquired), and
 * there are no device users. */
static void only(gmi_manager_t *m, gmi_chunk_t *c, uint32_t valid, uint32_t *frame_out, uint32_t *block_out) {
  GMI_ASSERT(!(atomic_load(&c->word_) & GMI_CHUNK_USERS) && !c->spec_);
  atomic_store(&c->word_, 0);
  *frame_out = c->frame_ != GMI_NONE ? leave_frame(m, c) : GMI_NONE;
  *block_out = block_take(m, c);
  gmi_chunk_keep(c);
  set_valid(m, c, valid);
  changed(m, c);
}
void gmi_chunk_wrote_host(gmi_manager_t *m, gmi_chunk_t *c, uint32_t *frame_out, uint32_t *block_out) {
  c->lazy_zeros_ = 0;
  only(m, c, GMI_VALID_HOST, frame_out, block_out);
}
void gmi_chunk_zeroed(gmi_manager_t *m, gmi_chunk_t *c, uint32_t *frame_out, uint32_t *block_out) {
  only(m, c, GMI_VALID_ZERO, frame_out, block_out);
}
void gmi_chunk_host_valid(gmi_manager_t *m, gmi_chunk_t *c) {
  set_valid(m, c, c->valid_ | GMI_VALID_HOST);
  changed(m, c);
}
void gmi_chunk_lazy_zeros_write(gmi_manager_t *m, gmi_chunk_t *c, uint8_t *slot) {
  memset(slot, 0, c->lazy_zeros_);
  gmi_chunk_lazy_zeros_set(m, c, 0);
}
void gmi_chunk_lazy_zeros_set(gmi_manager_t *m, gmi_chunk_t *c, uint64_t bytes) {
  c->lazy_zeros_ = bytes;
  changed(m, c);
}
void gmi_chunk_host_lost(gmi_manager_t *m, gmi_chunk_t *c) {
  set_valid(m, c, c->valid_ & ~(uint32_t)GMI_VALID_HOST);
  changed(m, c);
}
void gmi_chunk_read_failed(gmi_manager_t *m, gmi_chunk_t *c, gmi_io_t *io, uint32_t block) {
  if (block != GMI_NONE) block_set(m, c, block);
  uint32_t valid = c->valid_ & ~(uint32_t)GMI_VALID_HOST;
  set_valid(m, c, c->block_ != GMI_NONE ? valid | GMI_VALID_FILE : valid);
  c->failed_read_ = io;
  changed(m, c);
}
void gmi_chunk_block_valid(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block) {
  block_set(m, c, block);
  set_valid(m, c, c->valid_ | GMI_VALID_FILE);
  changed(m, c);
}
uint32_t gmi_chunk_block_lost(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t block = block_take(m, c);
  set_valid(m, c, c->valid_ & ~(uint32_t)GMI_VALID_FILE);
  changed(m, c);
  return block;
}
void gmi_chunk_below_host(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(c->frame_ == GMI_NONE);
  set_valid(m, c, c->valid_ & (GMI_VALID_FILE | GMI_VALID_ZERO));
  changed(m, c);
}
bool gmi_chunk_block_claim(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block) {
  if (c->block_ != GMI_NONE) return false;
  block_set(m, c, block);
  return true;
}
void gmi_chunk_block_unclaim(gmi_manager_t *m, gmi_chunk_t *c) { (void)block_take(m, c); }
void gmi_chunk_resumed(gmi_manager_t *m, gmi_chunk_t *c) {
  GMI_ASSERT(c->block_ != GMI_NONE && !c->spec_);
  set_valid(m, c, GMI_VALID_FILE);
  changed(m, c);
}

void gmi_chunk_slot_set(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot) {
  GMI_ASSERT((c->slot_ == GMI_NONE) != (slot == GMI_NONE));
  GMI_ASSERT(slot == GMI_NONE || (!m->host.slots[slot].chunk && !m->host.slots[slot].block));
  m->host.slots[slot == GMI_NONE ? c->slot_ : slot].chunk = slot == GMI_NONE ? NULL : c;
  c->slot_ = slot;
  changed(m, c);
}
uint32_t gmi_chunk_slot_change(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot) {
  uint32_t before = c->slot_;
  GMI_ASSERT(!m->host.slots[slot].chunk && !m->host.slots[slot].block && !m->host.slots[slot].spare);
  if (before != GMI_NONE) m->host.slots[before].chunk = NULL;
  m->host.slots[slot].chunk = c;
  c->slot_ = slot;
  changed(m, c);
  return before;
}
void gmi_chunk_spec_set(gmi_manager_t *m, gmi_chunk_t *c, struct gmi_spec *spec) {
  GMI_ASSERT(!c->spec_ || !spec);
  c->spec_ = spec;
  changed(m, c);
}
void gmi_chunk_slots_exchange(gmi_manager_t *m, uint32_t a, uint32_t b) {
  gmi_chunk_t *wa = m->host.slots[a].chunk, *wb = m->host.slots[b].chunk;
  m->host.slots[a].chunk = wb;
  m->host.slots[b].chunk = wa;
  if (wa) wa->slot_ = b;
  if (wb) wb->slot_ = a;
  if (wa) changed(m, wa);
  if (wb) changed(m, wb);
}
void gmi_chunk_io_set(gmi_manager_t *m, gmi_chunk_t *c, gmi_io_t *io) {
  GMI_ASSERT(!c->io_ != !io);
  c->io_ = io;
  changed(m, c);
}
gmi_io_t *gmi_chunk_failed_read_take(gmi_chunk_t *c) {
  gmi_io_t *io = c->failed_read_;
  c->failed_read_ = NULL;
  return io;
}
