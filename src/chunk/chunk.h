/* A chunk's record: where its bytes are, who uses them, and what is queued on them. SPDX-License-Identifier: Apache-2.0
 *
 * chunk.c and the inline functions below own the record. Nothing else reads or writes its fields, whose names end in _
 * (tests/layers.py fails on any other use). In builds with GEMINI_CHECK each transition asserts the invariants of the
 * record (gmi_chunk_invariant()), and so does the end of each call that held the manager's lock, for all records that
 * the call changed.
 *
 * Threads: the manager's lock is held in every call, unless said otherwise. */
#ifndef GMI_CHUNK_H
#define GMI_CHUNK_H

#include "base/check.h"
#include "core/manager.h"
#include "core/streams.h"

#define GMI_CHUNK_RESIDENT (1u << 31) /* has a frame that holds, or will hold once arrive_ is reached, its bytes */
#define GMI_CHUNK_SETTLED (1u << 30)  /* arrive_ has been reached, and no update waits */
#define GMI_CHUNK_DIRTY (1u << 29)    /* the device copy is the only valid one */
#define GMI_CHUNK_WRITERS 0x1fff0000u /* of the users, those that may write */
#define GMI_CHUNK_WRITER 0x00010000u
#define GMI_CHUNK_PINS 0x0000ffffu /* device acquires that have not been released */
enum { GMI_VALID_DEVICE = 1, GMI_VALID_HOST = 2, GMI_VALID_FILE = 4, GMI_VALID_ZERO = 8 };

/* Invariants: valid_ != 0; RESIDENT <=> frame_ != GMI_NONE; DIRTY <=> valid_ == GMI_VALID_DEVICE; VALID_HOST => a slot;
 * VALID_FILE <=> block_ != GMI_NONE; io_ => a slot; host_writers_ => not RESIDENT; host_writers_ <= host_users_;
 * graph_held_ => one of the host_writers_; left_ <= deferred_. */
struct gmi_chunk {
  /* Atomic: GMI_CHUNK_* flags and counts. The flags change under the lock only. The counts change without it: an
   * acquire's compare-and-swap (acquire-release) pairs with the compare-and-swap by which an eviction clears the word,
   * so an acquire either sees the flags gone, or the eviction sees the acquire's count. */
  _Atomic uint32_t word_;
  uint32_t frame_;            /* or GMI_NONE */
  gmi_mapping_t mapping_;     /* of its address */
  gmi_fence_t arrive_;        /* what fills the device copy */
  gmi_uses_t reads_, writes_; /* Atomic: of the device copy, since it was filled */
  _Atomic uint64_t touched_;  /* Atomic: the manager's clock at its last release */
  gmi_fence_t copied_out_;    /* queued copies out of the frame */
  uint64_t next_use_;         /* position of the next use as far as known: iteration * 2^32 + op; 0 = unknown */
  gmi_io_t *io_;              /* its transfer from or to a file that has not been noted, or NULL */
  gmi_io_t *failed_read_;     /* its last transfer, a read that failed and that no caller has been told of */
  uint32_t slot_;             /* on the host, or GMI_NONE */
  uint32_t block_;            /* in the files, or GMI_NONE */
  uint32_t arena;             /* Constant: index of the arena that stores it */
  uint32_t index;             /* Constant: in that arena */
  uint32_t host_users_;       /* acquires on the host, and calls that need its slot */
  uint32_t host_writers_;     /* of these, those for writing */
  uint16_t user_pins_;        /* gemini_pin() */
  uint8_t valid_;             /* GMI_VALID_* */
  bool graph_held_;           /* a graph uses it now: it is none of the callers' host_users_ and host_writers_ */
  uint16_t graphs_;           /* that know the address of its slot, which stays its own */
  uint16_t deferred_;         /* pieces of accepted updates of it that have not been queued yet */
  uint16_t left_;             /* of these, those that no call under way is about to queue */
  uint32_t batch_users_;      /* of host_users_, those of the acquire under way: until it is done the chunk may move */
  bool batch_joined_;         /* but for one that has got its place beside its neighbours */
};

/* ---- what it is. The first four read the word alone and need no lock. */
static inline bool gmi_chunk_is_resident(const gmi_chunk_t *c) { return atomic_load(&c->word_) & GMI_CHUNK_RESIDENT; }
static inline uint32_t gmi_chunk_device_users(const gmi_chunk_t *c) { return atomic_load(&c->word_) & GMI_CHUNK_PINS; }
static inline bool gmi_chunk_has_writers(const gmi_chunk_t *c) { return atomic_load(&c->word_) & GMI_CHUNK_WRITERS; }
static inline uint64_t gmi_chunk_touched(const gmi_chunk_t *c) { /* relaxed: a hint for choosing victims */
  return atomic_load_explicit(&c->touched_, memory_order_relaxed);
}
static inline bool gmi_chunk_has(const gmi_chunk_t *c, uint32_t valid) { return c->valid_ & valid; } /* one of them */
static inline bool gmi_chunk_has_only(const gmi_chunk_t *c, uint32_t valid) { return c->valid_ == valid; }
static inline uint32_t gmi_chunk_frame(const gmi_chunk_t *c) { return c->frame_; }
static inline uint32_t gmi_chunk_slot(const gmi_chunk_t *c) { return c->slot_; }
static inline bool gmi_chunk_has_slot(const gmi_chunk_t *c) { return c->slot_ != GMI_NONE; }
static inline uint32_t gmi_chunk_block(const gmi_chunk_t *c) { return c->block_; }
static inline gmi_io_t *gmi_chunk_io(const gmi_chunk_t *c) { return c->io_; }
static inline gmi_io_t *gmi_chunk_failed_read(const gmi_chunk_t *c) { return c->failed_read_; }
static inline bool gmi_chunk_is_pinned(const gmi_chunk_t *c) { return c->user_pins_; }
static inline uint32_t gmi_chunk_host_users(const gmi_chunk_t *c) { return c->host_users_; }
static inline uint32_t gmi_chunk_host_writers(const gmi_chunk_t *c) { return c->host_writers_; }
static inline bool gmi_chunk_graph_held(const gmi_chunk_t *c) { return c->graph_held_; }
static inline bool gmi_chunk_in_graphs(const gmi_chunk_t *c) { return c->graphs_; }
static inline uint32_t gmi_chunk_deferred(const gmi_chunk_t *c) { return c->deferred_; }
static inline uint32_t gmi_chunk_left(const gmi_chunk_t *c) { return c->left_; }
static inline uint64_t gmi_chunk_next_use(const gmi_chunk_t *c) { return c->next_use_; }
static inline gmi_fence_t gmi_chunk_arrive(const gmi_chunk_t *c) { return c->arrive_; }
static inline gmi_fence_t gmi_chunk_copied_out(const gmi_chunk_t *c) { return c->copied_out_; }
/* Acquired by callers, on the device or on the host, or in use by a call or a graph. */
static inline bool gmi_chunk_in_use(const gmi_chunk_t *c) { return gmi_chunk_device_users(c) || c->host_users_; }
/* May its bytes go to another slot? Not while a caller or a graph has their address. */
static inline bool gmi_chunk_may_move(const gmi_chunk_t *c) {
  return c->host_users_ == c->batch_users_ && !c->batch_joined_ && !c->graphs_;
}
/* All invariants, those with the records of frames and slots included. */
bool gmi_chunk_invariant(gmi_manager_t *m, const gmi_chunk_t *c);
/* GEMINI_CHECK: asserts the invariants of what has changed since the last call. */
void gmi_chunks_check(gmi_manager_t *m);
void gmi_chunks_forget_checks(gmi_manager_t *m); /* the records are about to go */
/* GEMINI_CHECK, when a manager is closed: nothing is in use, and frames, slots and blocks add up. No lock. */
void gmi_balance_check(gmi_manager_t *m);

/* ---- why it cannot be used so now: words for "a chunk of arena x is ...", or NULL */
typedef enum {
  GMI_TO_READ_ON_DEVICE,
  GMI_TO_WRITE_ON_DEVICE,
  GMI_TO_READ_ON_HOST,
  GMI_TO_WRITE_ON_HOST,
  GMI_TO_FETCH,      /* bring its bytes to the device */
  GMI_TO_EVICT,      /* take its frame */
  GMI_TO_LEAVE_HOST, /* take its slot, for a file */
  GMI_TO_CHANGE,     /* outside any acquire: an update, zeros, a load, a resume */
  GMI_TO_LOAD,       /* from a caller's file */
  GMI_TO_STORE,      /* to a caller's file, or in a checkpoint */
  GMI_TO_USE_IN_GRAPH
} gmi_purpose_t;
const char *gmi_chunk_busy(const gmi_chunk_t *c, gmi_purpose_t purpose);

/* ---- users. Functions that return words return NULL when done; else the words say why not ("a chunk of x is ..."),
 * and nothing has changed. */
const char *gmi_chunk_hold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode);
static inline void gmi_chunk_unhold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode);
/* The same on the device for a chunk that is there and whose earlier uses stream need not wait for; false: the lock is
 * needed. Any thread, no lock. */
static inline bool gmi_chunk_hold_fast(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream);
static inline void gmi_chunk_unhold_device(gmi_chunk_t *c, uint32_t mode); /* any thread, no lock */
/* A call of the library's own holds it on the device, whatever others do. */
void gmi_chunk_hold_device(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode);
const char *gmi_chunk_pin(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_unpin(gmi_manager_t *m, gmi_chunk_t *c);
/* A call needs its slot to stay; writes: and changes the bytes there. */
void gmi_chunk_hold_host(gmi_manager_t *m, gmi_chunk_t *c, bool writes);
void gmi_chunk_unhold_host(gmi_manager_t *m, gmi_chunk_t *c, bool writes);
/* From now on only callers with the lock can acquire it on the device. false, and nothing changed: the word has one of
 * the bits of unless. */
bool gmi_chunk_unsettle(gmi_chunk_t *c, uint32_t unless);
void gmi_chunk_graph_hold(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_graph_unhold(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_graphs_add(gmi_chunk_t *c); /* one more graph knows its slot's address; at most GMI_GRAPHS do */
void gmi_chunk_graphs_sub(gmi_chunk_t *c);
/* The acquire under way has placed it beside its neighbours; is done. */
static inline bool gmi_chunk_batch_joined(const gmi_chunk_t *c) { return c->batch_joined_; }
static inline void gmi_chunk_batch_join(gmi_chunk_t *c, bool placed) { c->batch_joined_ = placed; }
static inline void gmi_chunk_batch_end(gmi_chunk_t *c) { c->batch_users_ = 0, c->batch_joined_ = false; }
/* Pieces of accepted updates: one is accepted; is queued (left: it was counted as left); is left by its call. */
void gmi_chunk_piece_accepted(gmi_chunk_t *c);
void gmi_chunk_piece_queued(gmi_chunk_t *c, bool left);
void gmi_chunk_piece_left(gmi_chunk_t *c);
static inline void gmi_chunk_set_next_use(gmi_chunk_t *c, uint64_t position) { c->next_use_ = position; }

/* ---- queued work on the device copy */
/* Notes a use by what stream has queued so far. locked: the lock is held; else any thread. */
static inline gemini_status_t gmi_chunk_use(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream,
                                            bool locked);
gemini_status_t gmi_chunk_use_full(gmi_manager_t *m, uint32_t stream, gmi_fence_t first, bool locked); /* its part */
/* Makes stream wait for what must come before its use: what fills the device copy, earlier writes, and before a write
 * earlier reads and copies out, too. */
gemini_status_t gmi_chunk_wait(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode);
/* The same fences, for a caller that waits by itself. */
enum { GMI_CHUNK_FENCES = 2 + 2 * GMI_USES };
uint32_t gmi_chunk_fences(const gmi_chunk_t *c, uint32_t mode, gmi_fence_t fences_out[GMI_CHUNK_FENCES]);
gmi_fence_t gmi_chunk_used(gmi_manager_t *m, gmi_chunk_t *c); /* behind all of them; may make streams wait */
void gmi_chunk_settle(gmi_manager_t *m, gmi_chunk_t *c);      /* if what fills it has been reached */
void gmi_chunk_copied(gmi_chunk_t *c, gmi_fence_t fence);     /* a copy out is queued, done behind fence */
void gmi_chunk_fills(gmi_chunk_t *c, gmi_fence_t fence);      /* what fills it is queued, done behind fence */

/* ---- where its bytes are. After each of these the invariants hold. */
void gmi_chunk_init(gmi_chunk_t *c, uint32_t arena, uint32_t index); /* zeros, nowhere */
static inline gmi_mapping_t *gmi_chunk_mapping(gmi_chunk_t *c) { return &c->mapping_; }
/* It has a frame, whose bytes are there behind arrive. fresh: the frame holds nothing yet, and what is valid elsewhere
 * stays so until gmi_chunk_wrote_device(). */
void gmi_chunk_arrived(gmi_manager_t *m, gmi_chunk_t *c, uint32_t frame, gmi_fence_t arrive, bool fresh);
/* Clears its flags, so that no acquire without the lock succeeds. false: it is acquired, and nothing has changed. */
bool gmi_chunk_departs(gmi_chunk_t *c, uint32_t *word_out);
void gmi_chunk_departs_not(gmi_chunk_t *c, uint32_t word); /* it stays after all, with the flags that it had */
/* After gmi_chunk_departs(): it has no frame. becomes: GMI_VALID_*, where its bytes are alone; 0: where they are, too.
 * fence: behind
 * which nothing uses the frame any more. Returns the frame that it had. */
uint32_t gmi_chunk_departed(gmi_manager_t *m, gmi_chunk_t *c, uint32_t becomes, gmi_fence_t fence);
/* The copy on the device is the only one: it was written. Returns the block that it had, or GMI_NONE. */
uint32_t gmi_chunk_wrote_device(gmi_manager_t *m, gmi_chunk_t *c);
/* The copy on the host is the only one, or it is zeros; no caller has it on the device. What frame and block it had, or
 * GMI_NONE, is the caller's to give back. */
void gmi_chunk_wrote_host(gmi_manager_t *m, gmi_chunk_t *c, uint32_t *frame_out, uint32_t *block_out);
void gmi_chunk_zeroed(gmi_manager_t *m, gmi_chunk_t *c, uint32_t *frame_out, uint32_t *block_out);
void gmi_chunk_host_valid(gmi_manager_t *m, gmi_chunk_t *c); /* the host has a copy, too */
void gmi_chunk_host_lost(gmi_manager_t *m, gmi_chunk_t *c);  /* the host has none; others are */
void gmi_chunk_read_failed(gmi_manager_t *m, gmi_chunk_t *c, gmi_io_t *io,
                           uint32_t block);                                   /* block: now, or GMI_NONE */
void gmi_chunk_block_valid(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block); /* the files have a copy, too */
uint32_t gmi_chunk_block_lost(gmi_manager_t *m, gmi_chunk_t *c); /* they have none; others are. Returns the block. */
void gmi_chunk_below_host(gmi_manager_t *m, gmi_chunk_t *c);     /* only in its block, or zeros */
/* Resume: a block is claimed, or given up again; in the end it is the only copy. */
bool gmi_chunk_block_claim(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block); /* false: another one is */
void gmi_chunk_block_unclaim(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_resumed(gmi_manager_t *m, gmi_chunk_t *c);
/* Slots, in its record and in the slot's. */
void gmi_chunk_slot_set(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot); /* GMI_NONE: it has none any more */
void gmi_chunk_slots_exchange(gmi_manager_t *m, uint32_t a, uint32_t b);  /* either may be empty */
void gmi_chunk_io_set(gmi_manager_t *m, gmi_chunk_t *c, gmi_io_t *io);    /* a transfer begins; NULL: has been noted */
gmi_io_t *gmi_chunk_failed_read_take(gmi_chunk_t *c);                     /* the caller owns it; or NULL */

/* ---- inline, as acquires of what is resident run through these */
/* Is everything in uses before what stream will do next, without a wait? */
static inline bool gmi_uses_allow(gmi_manager_t *m, gmi_uses_t *uses, uint32_t stream) {
  for (int i = 0; i < GMI_USES; i++) {
    gmi_fence_t f = atomic_load_explicit(&uses->fence[i], memory_order_relaxed);
    if (f && (stream == GMI_CALLER || gmi_fence_stream(f) != stream) && !gmi_fence_reached(m, f)) return false;
  }
  return true;
}
static inline bool gmi_chunk_hold_fast(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream) {
  uint32_t word = atomic_load_explicit(&c->word_, memory_order_acquire);
  uint32_t needs = GMI_CHUNK_RESIDENT | GMI_CHUNK_SETTLED | (mode & GEMINI_WRITE ? GMI_CHUNK_DIRTY : 0);
  uint32_t add = mode & GEMINI_WRITE ? 1 + GMI_CHUNK_WRITER : 1;
  do {
    if ((word & needs) != needs || (word & GMI_CHUNK_PINS) == GMI_CHUNK_PINS ||
        (word & GMI_CHUNK_WRITERS) == GMI_CHUNK_WRITERS || !gmi_uses_allow(m, &c->writes_, stream) ||
        (mode & GEMINI_WRITE && !gmi_uses_allow(m, &c->reads_, stream)))
      return false;
  } while (
      !atomic_compare_exchange_weak_explicit(&c->word_, &word, word + add, memory_order_acq_rel, memory_order_acquire));
  return true;
}
static inline void gmi_chunk_unhold_device(gmi_chunk_t *c, uint32_t mode) {
  uint32_t sub = mode & GEMINI_WRITE ? 1 + GMI_CHUNK_WRITER : 1;
  uint32_t before = atomic_fetch_sub_explicit(&c->word_, sub, memory_order_acq_rel);
  GMI_ASSERT((before & GMI_CHUNK_PINS) >= 1 && (!(mode & GEMINI_WRITE) || before & GMI_CHUNK_WRITERS));
  (void)before;
}

static inline void gmi_chunk_unhold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode) {
  if (tier == GEMINI_TIER_DEVICE) gmi_chunk_unhold_device(c, mode);
  else gmi_chunk_unhold_host(m, c, mode & GEMINI_WRITE);
}
/* In a place that is the stream's own or no longer counts, else after waiting for one of the others. */
static inline gemini_status_t gmi_chunk_use(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream,
                                            bool locked) {
  atomic_store_explicit(&c->touched_, atomic_load_explicit(&m->frames.clock, memory_order_relaxed),
                        memory_order_relaxed);
  gmi_uses_t *uses = mode & GEMINI_WRITE ? &c->writes_ : &c->reads_;
  while (stream != GMI_CALLER) {
    gmi_fence_t seen[GMI_USES];
    int place = GMI_USES;
    for (int i = GMI_USES; i-- > 0;) {
      seen[i] = atomic_load_explicit(&uses->fence[i], memory_order_relaxed);
      if (!seen[i] || gmi_fence_stream(seen[i]) == stream || gmi_fence_reached(m, seen[i])) place = i;
    }
    if (place == GMI_USES) {
      place = 0;
      gemini_status_t status = gmi_chunk_use_full(m, stream, seen[place], locked);
      if (status) return status;
    }
    gmi_fence_t now = gmi_fence_later(m, stream);
    /* Pairs with the loads of whoever uses the chunk next: the release of the chunk's count comes after it. */
    if (atomic_compare_exchange_strong(&uses->fence[place], &seen[place], now)) break;
  }
  return GEMINI_OK;
}

#endif
