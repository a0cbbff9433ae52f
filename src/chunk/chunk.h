/* A chunk's record: where its bytes are, what uses them, and what is queued on them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A chunk is a fixed-size part of an arena, the unit that moves between tiers. chunk.c and the inline functions below
 * own the record: no other file reads or writes the fields, whose names end in _ (tests/layers.py fails on any other
 * use). In builds with GEMINI_CHECK each transition asserts that the record is sound, and each unlock asserts all
 * invariants (gmi_chunk_invariant()) of the records that changed under the lock.
 *
 * Threads: the manager's lock is held in every call, unless said otherwise.
 *
 * Acquire and release of a resident chunk take no lock; they change the counts in word_. The holder of the lock
 * excludes such acquires in one of two ways, each a compare-and-swap on word_ that fails while unwanted users are
 * counted:
 *   - gmi_chunk_departs() clears all flags before the frame goes;
 *   - gmi_chunk_unsettle() clears SETTLED before the bytes change, or are read, by other means.
 * gmi_chunk_hold_fast() requires RESIDENT and SETTLED; it checks them and adds its count in one compare-and-swap.
 * Either the acquire comes first and the lock's holder sees its count, or the flag is cleared first and the acquire
 * takes the slow path, which takes the lock. */
#ifndef GMI_CHUNK_H
#define GMI_CHUNK_H

#include "base/check.h"
#include "core/manager.h"
#include "core/streams.h"
#include "policy/cache.h"

#define GMI_CHUNK_RESIDENT (1u << 31) /* the chunk has a frame, which holds its bytes once arrive_ is reached */
/* SETTLED: acquires may skip the lock. arrive_ is reached, and if DIRTY, copied_out_ is, too; no update is left to
 * queue; more in may_settle(). */
#define GMI_CHUNK_SETTLED (1u << 30)
#define GMI_CHUNK_DIRTY (1u << 29)    /* the device copy is the only valid copy */
#define GMI_CHUNK_WRITERS 0x1fff0000u /* count of the users that may write */
#define GMI_CHUNK_WRITER 0x00010000u  /* one such user */
#define GMI_CHUNK_USERS 0x0000ffffu   /* count of users: device acquires that have not been released */
enum {
  GMI_VALID_DEVICE = 1,
  GMI_VALID_HOST = 2,
  GMI_VALID_FILE = 4,
  GMI_VALID_ZERO = 8,
  GMI_VALID_SLICES = 16 /* of a sharded arena: the ranks' slices */
};

/* Invariants: valid_ != 0; RESIDENT <=> frame_ != GMI_NONE; DIRTY <=> valid_ == GMI_VALID_DEVICE; VALID_HOST => a slot;
 * VALID_FILE <=> block_ != GMI_NONE; io_ => a slot; host_writers_ => not RESIDENT; host_writers_ <= host_users_;
 * graph_held_ => one of the host_writers_; left_ <= deferred_; loading_ => neither SETTLED, nor device users, nor
 * deferred_; lazy_zeros_ => VALID_HOST; spec_ => neither SETTLED, nor a writer; discarded_ => not SETTLED. */
struct gmi_chunk {
  /* Atomic: GMI_CHUNK_* flags and counts. Flags change under the lock only, counts also without it. The increment of an
   * acquire and the decrement of a release are acquire-release operations: a thread that sees a release's decrement
   * also sees the fence that the release stored before it, and an acquire sees all fields as they were when the flags
   * were set. What the fast path needs comes first, in less than a cache line, where a record begins. */
  _Alignas(64) _Atomic uint32_t word_;
  uint32_t frame_;            /* index of the chunk's frame, or GMI_NONE */
  gmi_fence_t arrive_;        /* behind the copy, or the zeroing, that fills the device copy */
  gmi_uses_t reads_, writes_; /* Atomic: latest uses of the device copy since it arrived; see gmi_uses_t */
  _Atomic uint64_t touched_;  /* Atomic: frames.clock at the last release; relaxed, a hint for choosing victims */
  gmi_mapping_t mapping_;     /* of the chunk's device address */
  gmi_fence_t copied_out_;    /* behind the last queued copy out of the frame */
  uint64_t next_use_;         /* position of the next use, if known: iteration * 2^32 + op; 0 = unknown */
  gmi_io_t *io_;              /* transfer from or to a file whose result is not processed yet, or NULL */
  gmi_io_t *failed_read_;     /* a failed read that no caller has been told of, if it was the last transfer; or NULL */
  uint32_t slot_;             /* index of the chunk's host slot, or GMI_NONE */
  uint32_t block_;            /* index of the chunk's block in the files, or GMI_NONE */
  uint32_t arena;             /* Constant: index of the arena that owns the chunk */
  uint32_t index;             /* Constant: of the chunk in that arena */
  uint32_t host_users_;       /* acquires on the host, and calls that need the slot to stay */
  uint32_t host_writers_;     /* the writers among the host_users_ */
  uint16_t user_pins_;        /* number of gemini_pin() without gemini_unpin() */
  uint8_t valid_;             /* GMI_VALID_*: the tiers that hold the current bytes */
  bool graph_held_;           /* a graph uses the chunk now; it counts as one host user and writer, none of a caller */
  uint16_t graphs_;           /* graphs that contain the slot's address: the chunk must keep this slot */
  uint16_t deferred_;         /* pieces of accepted updates of the chunk that are not queued yet */
  uint16_t left_;             /* those among deferred_ that no running call is about to queue */
  uint32_t batch_users_;      /* host_users_ of the acquire under way: no caller has their addresses, so the chunk may
                               * still move to another slot */
  bool batch_joined_;         /* that acquire has placed the chunk beside its neighbours: it may not move any more */
  bool loading_;              /* a load will write or has written it, and goes on: nothing else may use it */
  bool discarded_;            /* nobody wants its bytes once no update is deferred: gemini_discard() */
  gmi_cache_note_t note_;     /* of its uses by operators that are chosen at run time */
  uint64_t lazy_zeros_;       /* of a valid host copy: its first so many bytes are zeros that gmi_chunk_host() writes */
  struct gmi_spec *spec_;     /* the unit of speculate.c that reads it or is to write it; or NULL */
};

/* ---- queries. The first four read only atomics and need no lock; without it the answer may be outdated at once. */
static inline bool gmi_chunk_is_resident(const gmi_chunk_t *c) { return atomic_load(&c->word_) & GMI_CHUNK_RESIDENT; }
static inline uint32_t gmi_chunk_device_users(const gmi_chunk_t *c) { return atomic_load(&c->word_) & GMI_CHUNK_USERS; }
static inline bool gmi_chunk_has_writers(const gmi_chunk_t *c) { return atomic_load(&c->word_) & GMI_CHUNK_WRITERS; }
static inline uint64_t gmi_chunk_touched(const gmi_chunk_t *c) { /* relaxed: only ranks victims */
  return atomic_load_explicit(&c->touched_, memory_order_relaxed);
}
static inline bool gmi_chunk_has(const gmi_chunk_t *c, uint32_t valid) { return c->valid_ & valid; } /* any */
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
static inline const gmi_cache_note_t *gmi_chunk_note(const gmi_chunk_t *c) { return &c->note_; }
static inline gmi_fence_t gmi_chunk_arrive(const gmi_chunk_t *c) { return c->arrive_; }
static inline gmi_fence_t gmi_chunk_copied_out(const gmi_chunk_t *c) { return c->copied_out_; }
static inline bool gmi_chunk_is_discarded(const gmi_chunk_t *c) { return c->discarded_ && !c->deferred_; }
static inline bool gmi_chunk_is_loading(const gmi_chunk_t *c) { return c->loading_; }
static inline uint64_t gmi_chunk_lazy_zeros(const gmi_chunk_t *c) { return c->lazy_zeros_; }
static inline struct gmi_spec *gmi_chunk_spec(const gmi_chunk_t *c) { return c->spec_; }
/* The chunk is about to be written: what is speculated from it is dropped. */
void gmi_spec_drop(gmi_manager_t *m, struct gmi_spec *spec);
static inline void gmi_chunk_unspeculate(gmi_manager_t *m, gmi_chunk_t *c) {
  if (__builtin_expect(c->spec_ != NULL, 0)) gmi_spec_drop(m, c->spec_);
}
/* Is it acquired on the device or on the host, or in use by a call or a graph? */
static inline bool gmi_chunk_in_use(const gmi_chunk_t *c) { return gmi_chunk_device_users(c) || c->host_users_; }
/* May its bytes move to another slot? Not while a caller or a graph has their host address. */
static inline bool gmi_chunk_may_move(const gmi_chunk_t *c) {
  return c->host_users_ == c->batch_users_ && !c->batch_joined_ && !c->graphs_;
}
/* Do all invariants hold, including those with the records of frames and slots? */
bool gmi_chunk_invariant(gmi_manager_t *m, const gmi_chunk_t *c);
/* GEMINI_CHECK: asserts the invariants of the records that changed since the last call. */
void gmi_chunks_check(gmi_manager_t *m);
void gmi_chunks_forget_checks(gmi_manager_t *m); /* called before records are freed: does not look at them again */
/* GEMINI_CHECK, when a manager closes: asserts that nothing is in use, and that frames, slots and blocks add up. No
 * lock. */
void gmi_balance_check(gmi_manager_t *m);

/* ---- gmi_chunk_busy() returns NULL if the chunk can be used for the purpose now, otherwise the reason, in words that
 * complete "a chunk of arena x is ..." */
typedef enum {
  GMI_TO_READ_ON_DEVICE,
  GMI_TO_WRITE_ON_DEVICE,
  GMI_TO_READ_ON_HOST,
  GMI_TO_WRITE_ON_HOST,
  GMI_TO_FETCH,      /* bring its bytes to the device */
  GMI_TO_EVICT,      /* take its frame */
  GMI_TO_LEAVE_HOST, /* move it to a file and take its slot */
  GMI_TO_CHANGE,     /* change its bytes outside an acquire: an update, zeros, a load, a resume */
  GMI_TO_LOAD,       /* from a caller's file */
  GMI_TO_STORE,      /* to a caller's file, or in a checkpoint */
  GMI_TO_USE_IN_GRAPH
} gmi_purpose_t;
const char *gmi_chunk_busy(const gmi_chunk_t *c, gmi_purpose_t purpose);

/* ---- users. Functions that return a string return NULL on success; otherwise nothing has changed, and the string is a
 * reason as of gmi_chunk_busy(). */
const char *gmi_chunk_hold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode);
static inline void gmi_chunk_unhold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode);
/* Holds a chunk on the device without the lock, if it is resident and settled and stream need not wait for earlier
 * uses. Returns false otherwise: the caller takes the slow path. Any thread, no lock. */
bool gmi_chunk_hold_fast(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream);
/* The same in one attempt that makes no call: false also if it takes a look at other streams, or a second attempt. */
static inline bool gmi_chunk_hold_now(gmi_chunk_t *c, uint32_t mode, uint32_t stream);
static inline void gmi_chunk_unhold_device(gmi_chunk_t *c, uint32_t mode); /* any thread, no lock */
/* Holds it on the device for the library's own use, without a check for conflicting users. */
const char *gmi_chunk_hold_device(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode);
const char *gmi_chunk_pin(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_unpin(gmi_manager_t *m, gmi_chunk_t *c);
/* Keeps its slot in place for a call. writes: the call changes the bytes there. */
void gmi_chunk_hold_host(gmi_manager_t *m, gmi_chunk_t *c, bool writes);
void gmi_chunk_unhold_host(gmi_manager_t *m, gmi_chunk_t *c, bool writes);
/* A load claims all its chunks before it changes the first, because it releases the lock in between. No call can use a
 * claimed chunk (gmi_chunk_busy()), but it may leave the device and the host: a range can be larger than the host.
 * begin: the chunk has no users, no pins and no deferred pieces; returns a reason as above. */
const char *gmi_chunk_load_begin(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_load_end(gmi_manager_t *m, gmi_chunk_t *c);
/* Clears SETTLED: from now on device acquires need the lock. Returns false, with nothing changed, if the word has any
 * of the bits in unless. Check and change are one compare-and-swap, so no acquire can slip in between. */
bool gmi_chunk_unsettle(gmi_chunk_t *c, uint32_t unless);
/* The same for a chunk that is about to change outside an acquire (GMI_TO_CHANGE); returns a reason as above. */
const char *gmi_chunk_unsettle_to_change(gmi_chunk_t *c);
void gmi_chunk_graph_hold(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_graph_unhold(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_graphs_add(gmi_chunk_t *c); /* one more graph contains its slot's address; at most GMI_GRAPHS do */
void gmi_chunk_graphs_sub(gmi_chunk_t *c);
/* batch_join: the acquire under way has placed the chunk beside its neighbours. batch_end: that acquire has placed all
 * its chunks. */
static inline bool gmi_chunk_batch_joined(const gmi_chunk_t *c) { return c->batch_joined_; }
static inline void gmi_chunk_batch_join(gmi_chunk_t *c, bool placed) { c->batch_joined_ = placed; }
static inline void gmi_chunk_batch_end(gmi_chunk_t *c) { c->batch_users_ = 0, c->batch_joined_ = false; }
/* A piece of an update of the chunk: is accepted; is queued (left: it was counted in left_); is left to later calls by
 * the call that accepted it. */
void gmi_chunk_piece_accepted(gmi_chunk_t *c);
void gmi_chunk_piece_queued(gmi_chunk_t *c, bool left);
void gmi_chunk_piece_left(gmi_chunk_t *c);
/* spec: NULL, or SETTLED is clear and there are no writers. */
void gmi_chunk_spec_set(gmi_manager_t *m, gmi_chunk_t *c, struct gmi_spec *spec);
static inline void gmi_chunk_set_next_use(gmi_chunk_t *c, uint64_t position) { c->next_use_ = position; }
static inline void gmi_chunk_note_hint(gmi_chunk_t *c, uint64_t pass) { c->note_.hinted = pass; }
static inline void gmi_chunk_note_priority(gmi_chunk_t *c, uint32_t priority) { c->note_.priority = priority; }
static inline void gmi_chunk_note_use(gmi_chunk_t *c, const gmi_cache_now_t *now) { gmi_cache_use(&c->note_, now); }

/* ---- queued work on the device copy */
/* Records a use by the work that stream has queued so far. Called before the user count is dropped. locked: the
 * manager's lock is held; otherwise any thread, no lock. */
gemini_status_t gmi_chunk_use(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream, bool locked);
/* The same if there is nothing to change: returns false, with nothing recorded, if gmi_chunk_use() has to be called. */
static inline bool gmi_chunk_use_now(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream);
/* Makes stream wait for all that must precede its use: the fill of the device copy and earlier writes; before a write
 * also earlier reads and copies out. */
gemini_status_t gmi_chunk_wait(gmi_manager_t *m, uint32_t stream, gmi_chunk_t *c, uint32_t mode);
/* Returns the fences of the same work, for a caller that waits by itself. */
enum { GMI_CHUNK_FENCES = 2 + 2 * GMI_USES };
uint32_t gmi_chunk_fences(const gmi_chunk_t *c, uint32_t mode, gmi_fence_t fences_out[GMI_CHUNK_FENCES]);
gmi_fence_t gmi_chunk_used(gmi_manager_t *m, gmi_chunk_t *c); /* one fence behind all of them; may make streams wait */
void gmi_chunk_settle(gmi_manager_t *m, gmi_chunk_t *c);      /* sets SETTLED if what it needs has been reached */
void gmi_chunk_copied(gmi_chunk_t *c, gmi_fence_t fence);     /* a copy out of the frame is queued before fence */
void gmi_chunk_fills(gmi_chunk_t *c, gmi_fence_t fence);      /* new contents of the frame are queued before fence */

/* Nobody wants the bytes any more, until they are acquired or written again. SETTLED is clear. */
void gmi_chunk_discard(gmi_manager_t *m, gmi_chunk_t *c);
static inline void gmi_chunk_keep(gmi_chunk_t *c) { c->discarded_ = false; }

/* ---- where its bytes are. The record is sound after each of these. */
/* The chunk has no copy: it reads as zeros, or (in_slices) its bytes are in the ranks' slices. */
void gmi_chunk_init(gmi_chunk_t *c, uint32_t arena, uint32_t index, bool in_slices);
void gmi_chunk_slices_valid(gmi_manager_t *m, gmi_chunk_t *c); /* its bytes were copied to the slices */
static inline gmi_mapping_t *gmi_chunk_mapping(gmi_chunk_t *c) { return &c->mapping_; }
/* The chunk gets a frame, whose bytes are complete behind arrive. fresh: the frame holds no bytes of the chunk, because
 * they will all be overwritten; copies elsewhere stay valid until gmi_chunk_wrote_device(). */
void gmi_chunk_arrived(gmi_manager_t *m, gmi_chunk_t *c, uint32_t frame, gmi_fence_t arrive, bool fresh);
/* Clears all flags, so that no acquire without the lock succeeds. Returns false, with nothing changed, if the chunk is
 * acquired. *word_out: the flags it had. */
bool gmi_chunk_departs(gmi_chunk_t *c, uint32_t *word_out);
void gmi_chunk_departs_not(gmi_chunk_t *c, uint32_t word); /* the eviction failed: sets the flags again */
/* After gmi_chunk_departs(): the chunk loses its frame, which is returned. becomes: the GMI_VALID_* that alone is valid
 * from now on; 0: the other copies that were valid. fence: no queued work behind it uses the frame. */
uint32_t gmi_chunk_departed(gmi_manager_t *m, gmi_chunk_t *c, uint32_t becomes, gmi_fence_t fence);
/* The device copy was written and is the only valid one. Returns the block that the chunk had, or GMI_NONE; the caller
 * frees it. */
uint32_t gmi_chunk_wrote_device(gmi_manager_t *m, gmi_chunk_t *c);
/* The host copy is the only valid one; the chunk reads as zeros. No device user may exist. The caller frees the frame
 * and the block that the chunk had (GMI_NONE: none). */
void gmi_chunk_wrote_host(gmi_manager_t *m, gmi_chunk_t *c, uint32_t *frame_out, uint32_t *block_out);
void gmi_chunk_zeroed(gmi_manager_t *m, gmi_chunk_t *c, uint32_t *frame_out, uint32_t *block_out);
void gmi_chunk_host_valid(gmi_manager_t *m, gmi_chunk_t *c); /* the host copy becomes valid, besides others */
/* The first so many bytes of the valid host copy are zeros, whatever the slot has there. Or: the slot has them now. */
void gmi_chunk_lazy_zeros_set(gmi_manager_t *m, gmi_chunk_t *c, uint64_t bytes);
void gmi_chunk_lazy_zeros_write(gmi_manager_t *m, gmi_chunk_t *c, uint8_t *slot);
void gmi_chunk_host_lost(gmi_manager_t *m, gmi_chunk_t *c); /* the host copy goes; another one must be valid */
/* A read from the files failed: the host copy is not valid. block: becomes the chunk's block; GMI_NONE: none. */
void gmi_chunk_read_failed(gmi_manager_t *m, gmi_chunk_t *c, gmi_io_t *io, uint32_t block);
void gmi_chunk_block_valid(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block); /* gets a valid block, besides others */
uint32_t gmi_chunk_block_lost(gmi_manager_t *m, gmi_chunk_t *c); /* the block, returned, goes; another copy is valid */
void gmi_chunk_below_host(gmi_manager_t *m, gmi_chunk_t *c);     /* only its block, or zeros, are valid from now on */
/* Resume: claims a block, gives the claim up, or makes the claimed block the only valid copy. */
bool gmi_chunk_block_claim(gmi_manager_t *m, gmi_chunk_t *c, uint32_t block); /* false: the chunk has a block already */
void gmi_chunk_block_unclaim(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_resumed(gmi_manager_t *m, gmi_chunk_t *c);
/* These set the chunk's slot and the slot's chunk together. */
void gmi_chunk_slot_set(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot); /* GMI_NONE: the chunk loses its slot */
void gmi_chunk_slots_exchange(gmi_manager_t *m, uint32_t a, uint32_t b);  /* either slot may be empty */
/* The chunk leaves its slot, if it has one, for an empty one. Returns the former slot or GMI_NONE. */
uint32_t gmi_chunk_slot_change(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot);
void gmi_chunk_io_set(gmi_manager_t *m, gmi_chunk_t *c, gmi_io_t *io); /* a transfer begins; NULL: it was processed */
gmi_io_t *gmi_chunk_failed_read_take(gmi_chunk_t *c);                  /* or NULL; the caller owns it */

/* ---- inline, because every acquire and release of a resident chunk runs them */
/* What gmi_chunk_hold_fast() requires of the word, and adds to it. A write requires DIRTY: a write of a chunk with
 * other valid copies must invalidate them under the lock. */
static inline bool gmi_chunk_word_allows(uint32_t word, uint32_t mode) {
  uint32_t needs = GMI_CHUNK_RESIDENT | GMI_CHUNK_SETTLED | (mode & GEMINI_WRITE ? GMI_CHUNK_DIRTY : 0);
  return (word & needs) == needs && (word & GMI_CHUNK_USERS) != GMI_CHUNK_USERS &&
         (word & GMI_CHUNK_WRITERS) != GMI_CHUNK_WRITERS;
}
static inline uint32_t gmi_chunk_word_user(uint32_t mode) { return mode & GEMINI_WRITE ? 1 + GMI_CHUNK_WRITER : 1; }
/* Is all work in uses work of this stream? No fence there is of GMI_CALLER. The relaxed loads are ordered behind the
 * acquire load of word_ in the callers. */
static inline bool gmi_uses_are_of(const gmi_uses_t *uses, uint32_t stream) {
  bool all = true;
  for (int i = 0; i < GMI_USES; i++) {
    gmi_fence_t f = atomic_load_explicit(&uses->fence[i], memory_order_relaxed);
    all = all && (!f || gmi_fence_stream(f) == stream);
  }
  return all;
}
/* The acquire load of word_ pairs with the decrement of a release (gmi_chunk_unhold_device()) and with the operation
 * that set the flags: it makes their fences visible. An exchange can succeed although another thread acquired, released
 * and restored the same word meanwhile; the two acquires then overlap in time, and the order of overlapping acquires is
 * the callers' business. The flags that were checked hold, as the word is equal. A write also waits for readers, which
 * a read does not. */
static inline bool gmi_chunk_hold_now(gmi_chunk_t *c, uint32_t mode, uint32_t stream) {
  uint32_t word = atomic_load_explicit(&c->word_, memory_order_acquire);
  return gmi_chunk_word_allows(word, mode) && gmi_uses_are_of(&c->writes_, stream) &&
         (!(mode & GEMINI_WRITE) || gmi_uses_are_of(&c->reads_, stream)) &&
         atomic_compare_exchange_strong_explicit(&c->word_, &word, word + gmi_chunk_word_user(mode),
                                                 memory_order_acq_rel, memory_order_relaxed);
}
/* Release order: the next user, or an eviction, that sees the count without this use also sees its fence. */
static inline void gmi_chunk_unhold_device(gmi_chunk_t *c, uint32_t mode) {
  uint32_t before = atomic_fetch_sub_explicit(&c->word_, gmi_chunk_word_user(mode), memory_order_acq_rel);
  GMI_ASSERT((before & GMI_CHUNK_USERS) >= 1 && (!(mode & GEMINI_WRITE) || before & GMI_CHUNK_WRITERS));
  (void)before;
}

static inline void gmi_chunk_unhold(gmi_manager_t *m, gmi_chunk_t *c, uint32_t tier, uint32_t mode) {
  if (tier == GEMINI_TIER_DEVICE) gmi_chunk_unhold_device(c, mode);
  else gmi_chunk_unhold_host(m, c, mode & GEMINI_WRITE);
}
static inline void gmi_chunk_touch(gmi_manager_t *m, gmi_chunk_t *c) {
  uint64_t clock = atomic_load_explicit(&m->frames.clock, memory_order_relaxed);
  atomic_store_explicit(&c->touched_, clock, memory_order_relaxed);
}
/* An entry that names the fence already stays as it is: its mark is not placed yet, so it will be behind this use, too.
 * Whoever replaces the entry meanwhile puts a fence there that is behind it. */
static inline bool gmi_chunk_use_now(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode, uint32_t stream) {
  const gmi_uses_t *uses = mode & GEMINI_WRITE ? &c->writes_ : &c->reads_;
  if (stream != GMI_CALLER && atomic_load_explicit(&uses->fence[0], memory_order_relaxed) != gmi_fence_later(m, stream))
    return false;
  gmi_chunk_touch(m, c);
  return true;
}

#endif
