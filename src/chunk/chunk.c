/* A chunk's record: every change of it. SPDX-License-Identifier: Apache-2.0 */
#include "chunk/chunk.h"

#include <string.h>

#include "chunk/arena.h"

/* ---- invariants */
/* What holds between any two changes. */
static bool sound(gmi_manager_t *m, const gmi_window_t *w) {
  uint32_t word = atomic_load(&w->word_);
  bool resident = w->frame_ != GMI_NONE;
  if (!w->valid_ || ((word & GMI_WINDOW_RESIDENT) && !resident)) return false;
  if (resident && m->frames[w->frame_].window != w) return false;
  if (!resident && ((w->valid_ & GMI_VALID_DEVICE) || (word & GMI_WINDOW_SETTLED))) return false;
  if ((word & GMI_WINDOW_RESIDENT) && ((word & GMI_WINDOW_DIRTY) != 0) != (w->valid_ == GMI_VALID_DEVICE)) return false;
  if (((w->valid_ & GMI_VALID_HOST) || w->io_) && w->slot_ == GMI_NONE) return false;
  if (w->slot_ != GMI_NONE && m->host.slots[w->slot_].window != w) return false;
  if (((w->valid_ & GMI_VALID_FILE) != 0) != (w->block_ != GMI_NONE)) return false;
  return w->host_writers_ <= w->host_users_ && w->graph_held_ <= w->host_writers_ && w->left_ <= w->deferred_ &&
         w->batch_users_ <= w->host_users_;
}

bool gmi_window_invariant(gmi_manager_t *m, const gmi_window_t *w) {
  uint32_t word = atomic_load(&w->word_);
  bool resident = w->frame_ != GMI_NONE;
  if (!sound(m, w) || ((word & GMI_WINDOW_RESIDENT) != 0) != resident) return false;
  if (!resident && (word & (GMI_WINDOW_PINS | GMI_WINDOW_WRITERS))) return false;
  if (((word & GMI_WINDOW_DIRTY) != 0) != (w->valid_ == GMI_VALID_DEVICE)) return false;
  return !(w->host_writers_ && resident) && !w->batch_users_ && !w->batch_placed_;
}

#ifdef GEMINI_CHECK
/* The record has changed: it is sound, and all its invariants are looked at when the lock is let go. */
static void changed(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  GMI_ASSERT(sound(m, w));
  for (uint32_t i = 0; i < m->changed_count && i < GMI_CHANGED; i++)
    if (m->changed[i] == w) return;
  if (m->changed_count < GMI_CHANGED) m->changed[m->changed_count] = w;
  m->changed_count++;
}
#else
static void changed(gmi_manager_t *m, gmi_window_t *w) { (void)m, (void)w; }
#endif

void gmi_windows_check(gmi_manager_t *m) {
  GMI_ASSERT(m->frame_used + m->free_size == m->frame_made);
  GMI_ASSERT(m->io_count ||
             (uint64_t)m->blocks_held << m->window_shift == m->file_used); /* else some are in transfers */
  if (m->changed_count <= GMI_CHANGED) {
    for (uint32_t i = 0; i < m->changed_count; i++) GMI_ASSERT(gmi_window_invariant(m, m->changed[i]));
  } else {
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *a = gmi_arena_at(m, i);
      for (uint32_t k = 0; a && a->windows && k < atomic_load(&a->window_count); k++)
        GMI_ASSERT(gmi_window_invariant(m, &a->windows[k]));
    }
  }
  m->changed_count = 0;
}
void gmi_windows_forget_checks(gmi_manager_t *m) { m->changed_count = 0; }

#ifdef GEMINI_CHECK
void gmi_balance_check(gmi_manager_t *m) {
  uint32_t frames = 0, slots = 0, free_slots = 0, blocks = 0, used_frames = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && a->windows && k < atomic_load(&a->window_count); k++) {
      const gmi_window_t *w = &a->windows[k];
      GMI_ASSERT(!gmi_window_device_users(w) && !w->host_users_ && !w->graphs_);
      if (w->io_) continue; /* its last transfer has not been noted, and never will be */
      GMI_ASSERT(gmi_window_invariant(m, w));
      frames += w->frame_ != GMI_NONE;
      slots += w->slot_ != GMI_NONE;
      blocks += w->block_ != GMI_NONE;
    }
  }
  for (uint32_t i = 0; i < m->frame_capacity; i++) used_frames += m->frames[i].window != NULL;
  GMI_ASSERT(frames == used_frames);
  GMI_ASSERT(frames == m->resident);
  for (uint32_t s = 0; s < m->host.slot_count; s++) free_slots += m->host.free_map[s >> 6] >> (s & 63) & 1;
  GMI_ASSERT(free_slots == m->host.free_count);
  if (!m->io_count) GMI_ASSERT((uint64_t)slots << m->window_shift == m->host_used);
  if (!m->io_count) GMI_ASSERT((uint64_t)blocks << m->window_shift == m->file_used);
}
#else
void gmi_balance_check(gmi_manager_t *m) { (void)m; }
#endif

/* The flag that acquires for writing look at follows what is valid. */
static void set_valid(gmi_window_t *w, uint32_t valid) {
  w->valid_ = (uint8_t)valid;
  if (valid == GMI_VALID_DEVICE) atomic_fetch_or(&w->word_, GMI_WINDOW_DIRTY);
  else if (atomic_load(&w->word_) & GMI_WINDOW_DIRTY) atomic_fetch_and(&w->word_, ~GMI_WINDOW_DIRTY);
}

void gmi_window_init(gmi_window_t *w, uint32_t arena, uint32_t index) {
  memset(w, 0, sizeof *w);
  w->frame_ = w->slot_ = w->block_ = GMI_NONE;
  w->arena = arena;
  w->index = index;
  w->valid_ = GMI_VALID_ZERO;
}

/* ---- users */
static const char *why_host_writers(const gmi_window_t *w) {
  return w->graph_held_ ? "in use by a graph" : w->host_writers_ ? "acquired on the host for writing" : NULL;
}
static const char *why_full(const gmi_window_t *w, uint32_t word) {
  return (word & GMI_WINDOW_PINS) == GMI_WINDOW_PINS         ? "acquired 65535 times, the limit"
         : (word & GMI_WINDOW_WRITERS) == GMI_WINDOW_WRITERS ? "acquired for writing 8191 times, the limit"
         : w->host_users_ >= UINT16_MAX                      ? "acquired on the host 65535 times, the limit"
                                                             : NULL;
}
const char *gmi_window_busy(const gmi_window_t *w, gmi_purpose_t purpose) {
  uint32_t word = atomic_load(&w->word_);
  const char *why = NULL;
  switch (purpose) {
  case GMI_TO_FETCH: return why_host_writers(w);
  case GMI_TO_READ_ON_DEVICE: why = why_host_writers(w); break;
  case GMI_TO_WRITE_ON_DEVICE:
    why = why_host_writers(w);
    if (!why && w->host_users_) why = "acquired on the host";
    break;
  case GMI_TO_READ_ON_HOST: why = word & GMI_WINDOW_WRITERS ? "acquired on the device" : NULL; break;
  case GMI_TO_WRITE_ON_HOST:
    why = word & GMI_WINDOW_PINS ? "acquired on the device"
          : w->user_pins_        ? "pinned to the device"
          : w->graph_held_       ? "in use by a graph"
                                 : NULL;
    break;
  case GMI_TO_EVICT: return w->user_pins_ ? "pinned" : word & GMI_WINDOW_PINS ? "acquired" : NULL;
  case GMI_TO_LEAVE_HOST:
    return w->graph_held_   ? "in use by a graph"
           : w->host_users_ ? "acquired on the host"
           : w->graphs_     ? "read by a graph that lives, for which it stays on the host"
                            : NULL;
  case GMI_TO_CHANGE: return w->host_users_ || word & GMI_WINDOW_PINS ? "acquired" : NULL;
  case GMI_TO_LOAD:
    if (w->user_pins_) return "pinned to the device"; /* fallthrough */
  case GMI_TO_STORE: return w->host_writers_ || word & GMI_WINDOW_WRITERS ? "acquired for writing" : NULL;
  case GMI_TO_USE_IN_GRAPH:
    why = w->graph_held_           ? "in use by another graph"
          : w->user_pins_          ? "pinned to the device"
          : word & GMI_WINDOW_PINS ? "acquired on the device"
                                   : why_host_writers(w);
    break;
  }
  return why ? why : why_full(w, word);
}

const char *gmi_window_hold(gmi_manager_t *m, gmi_window_t *w, uint32_t tier, uint32_t mode) {
  bool write = mode & GEMINI_WRITE;
  if (tier == GEMINI_TIER_DEVICE) {
    const char *why = gmi_window_busy(w, write ? GMI_TO_WRITE_ON_DEVICE : GMI_TO_READ_ON_DEVICE);
    if (!why) gmi_window_hold_device(m, w, mode);
    return why;
  }
  const char *why = gmi_window_busy(w, write ? GMI_TO_WRITE_ON_HOST : GMI_TO_READ_ON_HOST);
  if (why) return why;
  /* An acquire on the device may have come meanwhile, without the lock. */
  if (!gmi_window_unsettle(w, write ? GMI_WINDOW_PINS : GMI_WINDOW_WRITERS)) return "acquired on the device";
  w->host_users_++;
  w->batch_users_++;
  w->host_writers_ += write;
  changed(m, w);
  return NULL;
}

void gmi_window_hold_device(gmi_manager_t *m, gmi_window_t *w, uint32_t mode) {
  (void)m;
  atomic_fetch_add(&w->word_, mode & GEMINI_WRITE ? 1 + GMI_WINDOW_WRITER : 1);
}

const char *gmi_window_pin(gmi_manager_t *m, gmi_window_t *w) {
  if (w->user_pins_ == UINT16_MAX) return "pinned 65535 times, the limit";
  w->user_pins_++;
  changed(m, w);
  return NULL;
}
void gmi_window_unpin(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(w->user_pins_);
  w->user_pins_--;
  changed(m, w);
}

void gmi_window_keep_slot(gmi_manager_t *m, gmi_window_t *w, bool writes) {
  w->host_users_++;
  w->host_writers_ += writes;
  changed(m, w);
}
void gmi_window_let_slot(gmi_manager_t *m, gmi_window_t *w, bool writes) {
  GMI_ASSERT(w->host_users_ && w->host_writers_ >= writes);
  w->host_users_--;
  w->host_writers_ -= writes;
  changed(m, w);
}

bool gmi_window_unsettle(gmi_window_t *w, uint32_t unless) {
  uint32_t word = atomic_load(&w->word_);
  do {
    if (word & unless) return false;
  } while (!atomic_compare_exchange_weak(&w->word_, &word, word & ~GMI_WINDOW_SETTLED));
  return true;
}

void gmi_window_graph_hold(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(!w->graph_held_);
  w->graph_held_ = true;
  gmi_window_keep_slot(m, w, true);
}
void gmi_window_graph_unhold(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(w->graph_held_);
  w->graph_held_ = false;
  gmi_window_let_slot(m, w, true);
}
void gmi_window_graphs_add(gmi_window_t *w) { w->graphs_++; }
void gmi_window_graphs_sub(gmi_window_t *w) {
  GMI_ASSERT(w->graphs_);
  w->graphs_--;
}

void gmi_window_piece_accepted(gmi_window_t *w) {
  GMI_ASSERT(w->deferred_ < UINT16_MAX);
  w->deferred_++;
}
void gmi_window_piece_queued(gmi_window_t *w, bool left) {
  GMI_ASSERT(w->deferred_ && w->left_ >= left);
  w->deferred_--;
  w->left_ = (uint16_t)(w->left_ - left);
}
void gmi_window_piece_left(gmi_window_t *w) {
  GMI_ASSERT(w->left_ < w->deferred_);
  w->left_++;
}

/* ---- queued work on the device copy */
static void uses_clear(gmi_uses_t *uses) {
  for (int i = 0; i < GMI_USES; i++) atomic_store(&uses->fence[i], 0);
}

/* Every place holds a use of another stream that has not ended: the stream waits for the first of them. */
gemini_status_t gmi_window_use_full(gmi_manager_t *m, uint32_t stream, gmi_fence_t first, bool locked) {
  if (!locked) gmi_lock(m, "gemini_release");
  gemini_status_t status = gmi_fence_wait(m, stream, first);
  if (!locked) gmi_unlock(m);
  return status;
}

uint32_t gmi_window_fences(const gmi_window_t *w, uint32_t mode, gmi_fence_t fences_out[GMI_WINDOW_FENCES]) {
  uint32_t count = 0;
  fences_out[count++] = w->arrive_;
  for (int i = 0; i < GMI_USES; i++) fences_out[count++] = atomic_load(&w->writes_.fence[i]);
  if (!(mode & GEMINI_WRITE)) return count;
  for (int i = 0; i < GMI_USES; i++) fences_out[count++] = atomic_load(&w->reads_.fence[i]);
  fences_out[count++] = w->copied_out_;
  return count;
}

gemini_status_t gmi_window_wait(gmi_manager_t *m, uint32_t stream, gmi_window_t *w, uint32_t mode) {
  gmi_fence_t fences[GMI_WINDOW_FENCES];
  uint32_t count = gmi_window_fences(w, mode, fences);
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < count; i++) status = gmi_fence_wait(m, stream, fences[i]);
  return status;
}

gmi_fence_t gmi_window_used(gmi_manager_t *m, gmi_window_t *w) {
  gmi_fence_t fences[GMI_WINDOW_FENCES], all = 0;
  uint32_t count = gmi_window_fences(w, GEMINI_READ_WRITE, fences);
  for (uint32_t i = 0; i < count; i++) all = gmi_fence_join(m, all, fences[i]);
  return all;
}

void gmi_window_settle(gmi_manager_t *m, gmi_window_t *w) {
  if (gmi_fence_reached(m, w->arrive_)) atomic_fetch_or(&w->word_, GMI_WINDOW_SETTLED);
}
void gmi_window_copied(gmi_window_t *w, gmi_fence_t fence) { w->copied_out_ = fence; }
void gmi_window_fills(gmi_window_t *w, gmi_fence_t fence) {
  w->arrive_ = fence;
  atomic_fetch_and(&w->word_, ~GMI_WINDOW_SETTLED);
}

/* ---- where its bytes are */
void gmi_window_arrived(gmi_manager_t *m, gmi_window_t *w, uint32_t frame, gmi_fence_t arrive, bool fresh) {
  GMI_ASSERT(w->frame_ == GMI_NONE && !m->frames[frame].window && !m->frames[frame].free);
  w->frame_ = frame;
  m->frames[frame].window = w;
  m->resident++;
  w->arrive_ = arrive;
  w->copied_out_ = 0;
  uses_clear(&w->reads_);
  uses_clear(&w->writes_);
  atomic_store_explicit(&w->touched_, atomic_fetch_add_explicit(&m->clock, 1, memory_order_relaxed) + 1,
                        memory_order_relaxed);
  if (!fresh) set_valid(w, w->valid_ | GMI_VALID_DEVICE);
  uint32_t word = GMI_WINDOW_RESIDENT;
  /* The fast path of an acquire looks at nothing else: updates of the chunk that wait are done first. */
  if (!w->deferred_ && gmi_fence_reached(m, arrive)) word |= GMI_WINDOW_SETTLED;
  atomic_fetch_or(&w->word_, word);
  changed(m, w);
}

bool gmi_window_departs(gmi_window_t *w, uint32_t *word_out) {
  uint32_t word = atomic_load(&w->word_);
  do {
    if (word & GMI_WINDOW_PINS) return false;
  } while (!atomic_compare_exchange_weak(&w->word_, &word, 0));
  *word_out = word;
  return true;
}
void gmi_window_departs_not(gmi_window_t *w, uint32_t word) { atomic_fetch_or(&w->word_, word); }

static uint32_t leave_frame(gmi_manager_t *m, gmi_window_t *w) {
  uint32_t frame = w->frame_;
  GMI_ASSERT(m->frames[frame].window == w);
  m->frames[frame].window = NULL;
  m->resident--;
  w->frame_ = GMI_NONE;
  w->arrive_ = 0;
  uses_clear(&w->reads_);
  uses_clear(&w->writes_);
  return frame;
}

/* Has nothing been queued on the device copy that has not ended? */
static bool is_quiet(gmi_manager_t *m, const gmi_window_t *w) {
  gmi_fence_t fences[GMI_WINDOW_FENCES];
  uint32_t count = gmi_window_fences(w, GEMINI_READ_WRITE, fences);
  bool quiet = true;
  for (uint32_t i = 0; i < count; i++) quiet = quiet && gmi_fence_reached(m, fences[i]);
  return quiet;
}

uint32_t gmi_window_departed(gmi_manager_t *m, gmi_window_t *w, uint32_t becomes, gmi_fence_t fence) {
  GMI_ASSERT(fence || is_quiet(m, w));
  (void)fence;
  GMI_ASSERT(w->frame_ != GMI_NONE && !(atomic_load(&w->word_) & GMI_WINDOW_PINS));
  uint32_t frame = leave_frame(m, w);
  set_valid(w, becomes ? becomes : w->valid_ & ~(uint32_t)GMI_VALID_DEVICE);
  changed(m, w);
  return frame;
}

static void block_set(gmi_manager_t *m, gmi_window_t *w, uint32_t block) {
  GMI_ASSERT(w->block_ == GMI_NONE);
  w->block_ = block;
  m->blocks_held++;
}
static uint32_t block_take(gmi_manager_t *m, gmi_window_t *w) {
  uint32_t block = w->block_;
  w->block_ = GMI_NONE;
  m->blocks_held -= block != GMI_NONE;
  return block;
}
uint32_t gmi_window_wrote_device(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(w->frame_ != GMI_NONE);
  uint32_t block = block_take(m, w);
  set_valid(w, GMI_VALID_DEVICE);
  changed(m, w);
  return block;
}
/* Nobody has it on the device, and its bytes are in one place only. */
static void only(gmi_manager_t *m, gmi_window_t *w, uint32_t valid, uint32_t *frame_out, uint32_t *block_out) {
  GMI_ASSERT(!(atomic_load(&w->word_) & GMI_WINDOW_PINS));
  atomic_store(&w->word_, 0);
  *frame_out = w->frame_ != GMI_NONE ? leave_frame(m, w) : GMI_NONE;
  *block_out = block_take(m, w);
  set_valid(w, valid);
  changed(m, w);
}
void gmi_window_wrote_host(gmi_manager_t *m, gmi_window_t *w, uint32_t *frame_out, uint32_t *block_out) {
  only(m, w, GMI_VALID_HOST, frame_out, block_out);
}
void gmi_window_zeroed(gmi_manager_t *m, gmi_window_t *w, uint32_t *frame_out, uint32_t *block_out) {
  only(m, w, GMI_VALID_ZERO, frame_out, block_out);
}
void gmi_window_host_valid(gmi_manager_t *m, gmi_window_t *w) {
  set_valid(w, w->valid_ | GMI_VALID_HOST);
  changed(m, w);
}
void gmi_window_host_lost(gmi_manager_t *m, gmi_window_t *w) {
  set_valid(w, w->valid_ & ~(uint32_t)GMI_VALID_HOST);
  changed(m, w);
}
void gmi_window_read_failed(gmi_manager_t *m, gmi_window_t *w, gmi_io_t *io, uint32_t block) {
  if (block != GMI_NONE) block_set(m, w, block);
  uint32_t valid = w->valid_ & ~(uint32_t)GMI_VALID_HOST;
  set_valid(w, w->block_ != GMI_NONE ? valid | GMI_VALID_FILE : valid);
  w->failed_read_ = io;
  changed(m, w);
}
void gmi_window_block_valid(gmi_manager_t *m, gmi_window_t *w, uint32_t block) {
  block_set(m, w, block);
  set_valid(w, w->valid_ | GMI_VALID_FILE);
  changed(m, w);
}
uint32_t gmi_window_block_lost(gmi_manager_t *m, gmi_window_t *w) {
  uint32_t block = block_take(m, w);
  set_valid(w, w->valid_ & ~(uint32_t)GMI_VALID_FILE);
  changed(m, w);
  return block;
}
void gmi_window_below_host(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(w->frame_ == GMI_NONE);
  set_valid(w, w->valid_ & (GMI_VALID_FILE | GMI_VALID_ZERO));
  changed(m, w);
}
bool gmi_window_block_claim(gmi_manager_t *m, gmi_window_t *w, uint32_t block) {
  if (w->block_ != GMI_NONE) return false;
  block_set(m, w, block);
  return true;
}
void gmi_window_block_unclaim(gmi_manager_t *m, gmi_window_t *w) { (void)block_take(m, w); }
void gmi_window_resumed(gmi_manager_t *m, gmi_window_t *w) {
  GMI_ASSERT(w->frame_ == GMI_NONE && w->block_ != GMI_NONE);
  set_valid(w, GMI_VALID_FILE);
  changed(m, w);
}

void gmi_window_slot_set(gmi_manager_t *m, gmi_window_t *w, uint32_t slot) {
  GMI_ASSERT((w->slot_ == GMI_NONE) != (slot == GMI_NONE));
  GMI_ASSERT(slot == GMI_NONE || (!m->host.slots[slot].window && !m->host.slots[slot].block));
  m->host.slots[slot == GMI_NONE ? w->slot_ : slot].window = slot == GMI_NONE ? NULL : w;
  w->slot_ = slot;
  changed(m, w);
}
void gmi_window_slots_exchange(gmi_manager_t *m, uint32_t a, uint32_t b) {
  gmi_window_t *wa = m->host.slots[a].window, *wb = m->host.slots[b].window;
  m->host.slots[a].window = wb;
  m->host.slots[b].window = wa;
  if (wa) wa->slot_ = b;
  if (wb) wb->slot_ = a;
  if (wa) changed(m, wa);
  if (wb) changed(m, wb);
}
void gmi_window_io_set(gmi_manager_t *m, gmi_window_t *w, gmi_io_t *io) {
  GMI_ASSERT(!w->io_ != !io);
  w->io_ = io;
  changed(m, w);
}
gmi_io_t *gmi_window_failed_read_take(gmi_window_t *w) {
  gmi_io_t *io = w->failed_read_;
  w->failed_read_ = NULL;
  return io;
}
