/* Sharded arenas: their slices, gathering chunks, adding gradients. The caller holds the manager's lock.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A sharded arena is two: the *whole* one, which the caller knows, and an arena of *slices* behind it. The whole one
 * has the addresses on the device. Its chunks are on the device, gathered from all ranks, or nowhere but in the slices
 * (GMI_VALID_SLICES); they have no host slots and no blocks. The arena of slices is an ordinary one, which no caller
 * has a handle of: it holds this rank's slices of all chunks one after another, moves between all tiers, and is what
 * updates, norms, loads and stores work on. Parameters and gradients have whole arenas with chunks; states exist in
 * slices alone.
 *
 * Slices of gradients take the bytes of their parameters' slices. On the device, the two lie beside each other, in
 * chunks of their own: ranks may write different gradients (of a layer that one rank does not use), while what they
 * gather must not depend on it. A gradient chunk reads as zeros until it is written; then it stays until it has been
 * added. Gradients that do not reuse their parameters' bytes (gmi_arena_has_sums()) have slices of their own, which
 * hold sums of several micro-batches; a chunk of them that has been added reads as zeros again. */
#ifndef GMI_SHARD_H
#define GMI_SHARD_H

#include "chunk/arena.h"
#include "chunk/group.h"

/* How the elements of a chunk are divided, for one rank. In elements, and by the element size of the arena that is
 * followed, so that a rank has the same elements of all arenas of one layout. */
typedef struct gmi_slicing {
  uint64_t chunk;  /* elements of a whole chunk */
  uint64_t slice;  /* elements of a slice, a multiple of 256 */
  uint64_t rest;   /* elements at the end of a chunk that equal slices leave over; the last rank keeps them, too */
  uint64_t stride; /* slice + rest: elements in the arena of slices for each chunk, on every rank */
  uint64_t start;  /* the first element of a chunk that this rank keeps */
  uint64_t own;    /* how many it keeps: slice, on the last rank stride */
} gmi_slicing_t;
/* Pure function. slice is 0 if the chunk is too small for so many ranks. */
gmi_slicing_t gmi_slicing_of(uint64_t chunk_bytes, uint32_t element_bytes, uint32_t rank, uint32_t ranks);
/* Of a sharded arena, or of its arena of slices; the chunk size has been chosen. */
gmi_slicing_t gmi_slicing(gmi_manager_t *m, const gmi_arena_t *a);

/* A part of a whole arena that this rank keeps, in elements. */
typedef struct gmi_slice {
  uint64_t whole;  /* the first one, in the whole arena */
  uint64_t slices; /* the same one in the arena of slices */
  uint64_t count;
} gmi_slice_t;
/* The first part in [from, end) of the whole arena. False: there is none. */
bool gmi_slice_find(const gmi_slicing_t *s, uint64_t from, uint64_t end, gmi_slice_t *slice_out);
/* Where elements [0, end) of the whole arena end in the arena of slices. */
uint64_t gmi_slices_end(const gmi_slicing_t *s, uint64_t end);

static inline gmi_arena_t *gmi_arena_slices(gmi_manager_t *m, const gmi_arena_t *a) {
  return gmi_arena_at(m, a->shard.slices);
}
/* Is the chunk one of a sharded arena, which is gathered? */
static inline bool gmi_chunk_is_gathered(gmi_manager_t *m, const gmi_chunk_t *c) {
  return gmi_arena_is_sharded(gmi_chunk_arena(m, c));
}
/* Sets the sizes of all arenas of slices for a chunk size. INVALID: it is too small for the ranks of a group. */
gemini_status_t gmi_slices_resize(gmi_manager_t *m, uint64_t chunk_bytes);
/* Fails with BUSY if something uses the slices of a sharded arena that is to be destroyed, or if its gradients have
 * taken parameters' bytes. */
gemini_status_t gmi_slices_unused(gmi_manager_t *m, gmi_arena_t *a);
/* The smallest chunk that has a slice for each rank; 0: there is no sharded arena. */
uint64_t gmi_slices_chunk_min(gmi_manager_t *m);

/* Do chunks of the arena stay gathered until the iteration ends, or their slices change? */
static inline bool gmi_gathered_stays(const gmi_arena_t *a) {
  return a->shard.stage == GEMINI_ZERO_STATES || a->shard.stage == GEMINI_ZERO_GRADIENTS;
}
/* A slice is part of at most so many chunks of the arena of slices. Lists them, with the bytes of each that belong to
 * the slice of the gathered chunk; returns their number. */
enum { GMI_SLICE_PARTS = 2 };
typedef struct gmi_slice_part {
  gmi_chunk_t *chunk;
  uint64_t bytes;
} gmi_slice_part_t;
uint32_t gmi_slice_parts(gmi_manager_t *m, const gmi_chunk_t *c, gmi_slice_part_t *parts_out);

/* Queues the updates of the chunk's own slice. *queued_out becomes true if there were any. */
gemini_status_t gmi_gathered_queue(gmi_manager_t *m, gmi_chunk_t *c, bool *queued_out);
/* As gmi_chunk_fetch(), for a chunk of a sharded arena: copies the own slice into the frame and queues the gather. All
 * ranks do this for the same chunks in the same order. */
gemini_status_t gmi_gathered_fetch(gmi_manager_t *m, gmi_chunk_t *c, bool fresh, uint32_t reason, uint32_t flags);
/* An operator, or an iteration (all), begins or ends: chunks that nobody uses leave the device, with all false only
 * those of ZERO_PARAMS and written ones. Written parameters go to the slices first. What leaves follows from the calls
 * for sharded arenas alone, so it is the same on all ranks. Fails if a group has failed. */
gemini_status_t gmi_gathered_leave(gmi_manager_t *m, bool all);
/* Before an update changes the slices of chunks [first, end) of parameters on all ranks: what was gathered of them
 * leaves the device. BUSY: one of them, or of their gradients, is acquired. */
gemini_status_t gmi_gathered_drop(gmi_manager_t *m, gmi_arena_t *params, uint32_t first, uint32_t end);
/* Such an update was accepted: their gradients, added or not, are zeros again. */
void gmi_gradients_taken(gmi_manager_t *m, gmi_arena_t *params);
/* A gathered chunk leaves unless it is in use. */
gemini_status_t gmi_gathered_evict(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_gathered_count(gmi_manager_t *m, const gmi_chunk_t *c,
                        uint32_t frames); /* gets a frame (1) or loses it (-1) */
/* Outside operators, acquires of a gathered chunk must not skip that: they take the lock. */
void gmi_gathered_unsettle(gmi_manager_t *m, gmi_chunk_t *c);
/* Makes a range of a sharded arena free to be read, or changed, in the slices. To be changed, its gathered chunks leave
 * the device. BUSY: one is acquired. STATE: one holds gradients that have not been added, or an operator is open. */
gemini_status_t gmi_gathered_settle(gmi_manager_t *m, const gmi_range_t *r, bool change);
/* Turns a range of a sharded arena into that of its slices, for an access on the host, which must lie in one slice. On
 * the device: only checks that the arena can be gathered, and that a gradient to be written has not been added. */
gemini_status_t gmi_range_place(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r);
/* Is a chunk of the range about to be gathered, for an acquire of parameters on the device? The same on all ranks. */
bool gmi_range_gathers(const gmi_range_t *r);
/* Before an acquire makes the bytes of tensors parameters again: refused, if the arena is sharded (STATE). */
gemini_status_t gmi_range_may_flip(gmi_manager_t *m, const gmi_range_t *r);
/* The same for an access that gmi_range_place() has allowed, without a check. */
void gmi_range_placed(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r);
/* The range of all slices of a range, for norms and zeroing. Between two slices there can be bytes of no rank, which
 * are zero. */
void gmi_range_slices(gmi_manager_t *m, const gmi_range_t *r, gmi_range_t *slices_out);

/* Gradients of a chunk are added over all ranks once (with sums, once in each round), in the order of descending
 * chunks, so that all ranks add in the same order whatever the order in which their gradients come. ready: adds
 * those whose turn it is and whose tensors are all READY_FOR_REDUCE. all: adds the others, too; gradients that were
 * not written count as zero, and every tensor holds a gradient afterwards; with sums it ends the round, or adds one
 * if any rank has written. whole: the sharded arena of gradients. */
gemini_status_t gmi_reduce_ready(gmi_manager_t *m, gmi_arena_t *whole);
gemini_status_t gmi_reduce_all(gmi_manager_t *m, gmi_arena_t *whole);
/* Would gmi_reduce_ready() add some? */
bool gmi_reduce_next_is_ready(gmi_manager_t *m, const gmi_arena_t *whole);
/* How many chunks of an arena are added together: those whose numbers, divided by it, are equal. The same on all ranks.
 * The chunk size has been chosen. */
uint32_t gmi_bucket_chunks(gmi_manager_t *m, const gmi_group_t *g);
/* Gradients with sums: adds those of this round down to chunk first, the first one of a bucket, whatever is
 * READY_FOR_REDUCE. Ranks need not call it at the same points of their programs: it exchanges nothing, so a round must
 * have begun, or have ended with all that was written (STATE). */
gemini_status_t gmi_reduce_part(gmi_manager_t *m, gmi_arena_t *whole, uint32_t first);
/* How many chunks, from the last one down, updates of parts have taken of the arenas laid out like a sharded one. */
uint32_t *gmi_parts_updated(gmi_manager_t *m, const gmi_arena_t *a);

#endif
