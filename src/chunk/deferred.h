/* Records of updates, shared by update.c, which cuts updates into pieces and queues pieces, and deferred.c, which keeps
 * those that cannot be queued yet. The caller holds the manager's lock. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_DEFERRED_H
#define GMI_DEFERRED_H

#include <pthread.h>

#include "chunk/chunk.h"
#include "chunk/shard.h"
#include "core/manager.h"

enum {
  GMI_PIECE_CHUNKS = GMI_UPDATE_ARENAS * 32
}; /* bound: arenas times largest ratio of element sizes, plus one each */

typedef struct {
  uint64_t begin, end; /* elements whose gradient was not written: it counts as zero */
} gmi_gap_t;

/* Consecutive pieces of an update that have not been queued. Each piece is counted in deferred_ of its chunks. */
typedef struct gmi_rest {
  struct gmi_rest *next, *previous;
  struct gmi_walk *walk;
  uint64_t begin, end; /* elements, begin at a piece's begin; a rest that becomes empty leaves the list and is freed */
  uint64_t next_use;   /* as piece_use() of gmi_advice_t */
  uint32_t update, number; /* on_device: of the update in its iteration, and of the piece in the update */
  bool left;      /* its call has given it up to later callers (counted in left_ too); else the call will queue it */
  bool on_device; /* one piece, which the plan has run on the device */
  bool reserved[6];
} gmi_rest_t;

/* A copy of the caller's data for an update (user_bytes). It is in the manager's list until nothing uses it. */
typedef struct gmi_update_user {
  struct gmi_update_user *next;
  _Atomic uint32_t refs; /* Atomic: one of the gmi_walk_t, one of each job of the workers */
  gmi_fence_t end;       /* behind the device work of its spans so far */
  _Alignas(16) uint8_t bytes[];
} gmi_update_user_t;

/* One gemini_update(): its checked arguments, kept until its last piece is queued. */
typedef struct gmi_walk {
  uint32_t refs; /* one of the call, one of each of its rests */
  gmi_manager_t *m;
  gemini_update_t u;
  gmi_update_user_t *user;                /* the copy that u.user points to, or NULL */
  gmi_arena_t *named[GMI_UPDATE_ARENAS];  /* the caller's arenas */
  gmi_arena_t *arenas[GMI_UPDATE_ARENAS]; /* the same, or of sharded ones those of their slices: u.first_element and
                                           * u.element_count are of these */
  gmi_slicing_t slicing;                  /* of sharded ones; else chunk is 0 */
  uint32_t modes[GMI_UPDATE_ARENAS];
  uint64_t unit; /* elements of a piece; pieces begin at multiples of it, the first one where the update begins */
  uint64_t chunk_pieces; /* the most pieces that contain the same chunk */
  gmi_fence_t after;     /* the caller's stream, at the call */
  gmi_gap_t *gaps;
  uint64_t gap_count;
  uint32_t gap_capacity;
  bool gaps_lost;     /* out of memory while collecting gaps */
  uint32_t gap_arena; /* index in arenas of gradients that reuse their parameters' bytes; GMI_NONE */
  gmi_rest_t *tail;   /* the pieces that the call itself has still to queue; NULL: none */
} gmi_walk_t;

typedef struct {
  uint64_t begin, end; /* elements */
  uint64_t next_use;   /* as piece_use() of gmi_advice_t */
  bool two_passes;     /* likewise */
  uint32_t count;
  gmi_chunk_t *chunks[GMI_PIECE_CHUNKS];
  uint32_t modes[GMI_PIECE_CHUNKS];
} gmi_piece_t;

typedef struct gmi_deferred {
  gmi_rest_t *first, *last; /* guarded by the manager's lock, as all that is not Atomic */
  pthread_cond_t more;      /* used with the manager's lock: something for the thread to queue, or stop */
  pthread_t thread;
  _Atomic uint64_t count; /* Atomic: pieces in the list; written under the lock */
  bool started, stop;
  bool warned; /* the failure of the first piece has been logged; it is retried without another log line */
} gmi_deferred_t;

/* ---- update.c */
/* The piece that begins at an element, up to end at most; lists each chunk once, with its joint mode. */
void gmi_piece_at(const gmi_walk_t *k, uint64_t begin, uint64_t end, gmi_piece_t *p);
/* Of sharded arenas: may the update take these elements? (chunk/sums.c) */
gemini_status_t gmi_part_check(const gmi_walk_t *k);
/* The chunks of arenas[i] in a piece. */
void gmi_piece_range(const gmi_walk_t *k, const gmi_piece_t *p, uint32_t i, uint32_t *first_out, uint32_t *count_out);
bool gmi_piece_has_gaps(const gmi_walk_t *k, const gmi_piece_t *p); /* gradients in it were not written */
bool gmi_piece_is_pinned(const gmi_piece_t *p);                     /* a chunk that it writes is */
/* Both queue a piece; a failure leaves it unqueued. On the device it is also removed from its rest, and the lock is
 * released for the callback; on the host the caller removes it. deferred: counted by gmi_workers_deferred(). */
gemini_status_t gmi_piece_on_device(gmi_walk_t *k, gmi_piece_t *p, gmi_rest_t *rest);
gemini_status_t gmi_piece_on_host(gmi_walk_t *k, gmi_piece_t *p, bool deferred);
/* Brings the chunks' bytes to the host, each to any slot: a worker's slice lies within one chunk of each arena. */
gemini_status_t gmi_piece_to_host(gmi_walk_t *k, gmi_piece_t *p);
void gmi_walk_unref(gmi_walk_t *k);

/* ---- deferred.c */
void gmi_rest_insert(gmi_deferred_t *d, gmi_rest_t *rest, gmi_rest_t *before); /* before NULL: appends */
void gmi_rest_queued(gmi_deferred_t *d, gmi_rest_t *rest,
                     const gmi_piece_t *p); /* removes its first piece, which was queued */
/* Defers the first piece of the call's tail, as a rest of its own before the tail, which is returned. NULL: no memory
 * for its record. */
gmi_rest_t *gmi_tail_leave_one(gmi_deferred_t *d, gmi_walk_t *k, const gmi_piece_t *p);
void gmi_tail_leave(gmi_walk_t *k); /* defers all pieces of the tail */
/* Queues the pieces of earlier updates that contain one of p's chunks: they must run first. */
gemini_status_t gmi_updates_queue_left(gmi_manager_t *m, const gmi_piece_t *p);

#endif
