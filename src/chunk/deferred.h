/* Records of updates, shared by update.c, which cuts updates into pieces and queues pieces, and deferred.c, which keeps
 * those that cannot be queued yet. The caller holds the manager's lock. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_DEFERRED_H
#define GMI_DEFERRED_H

#include <pthread.h>

#include "chunk/chunk.h"
#include "core/manager.h"

enum { PIECE_CHUNKS = GMI_UPDATE_ARENAS * 32 }; /* bound: arenas times largest ratio of element sizes, plus one each */

typedef struct {
  uint64_t begin, end; /* elements whose gradient was not written: it counts as zero */
} gap_t;

/* Consecutive pieces of an update that have not been queued. Each piece is counted in deferred_ of its chunks. */
typedef struct rest {
  struct rest *next, *previous;
  struct walk *walk;
  uint64_t begin, end; /* elements, begin at a piece's begin; a rest that becomes empty leaves the list and is freed */
  uint64_t next_use;   /* as piece_use() of gmi_advice_t */
  bool left; /* its call has given it up to later callers (counted in left_ too); else the call will queue it */
  bool reserved[7];
} rest_t;

/* One gemini_update(): its checked arguments, kept until its last piece is queued. */
typedef struct walk {
  uint32_t refs; /* one of the call, one of each of its rests */
  gmi_manager_t *m;
  gemini_update_t u;
  gmi_arena_t *arenas[GMI_UPDATE_ARENAS];
  uint32_t modes[GMI_UPDATE_ARENAS];
  uint64_t unit;     /* elements of a piece; pieces begin at multiples of it, the first one where the update begins */
  gmi_fence_t after; /* the caller's stream, at the call */
  gap_t *gaps;
  uint64_t gap_count, gap_capacity;
  bool gaps_lost;     /* out of memory while collecting gaps */
  uint32_t gap_arena; /* index in arenas of gradients that reuse their parameters' bytes; GMI_NONE */
  rest_t *tail;       /* the pieces that the call itself has still to queue; NULL: none */
} walk_t;

typedef struct {
  uint64_t begin, end; /* elements */
  uint64_t next_use;   /* as piece_use() of gmi_advice_t */
  uint32_t count;
  gmi_chunk_t *chunks[PIECE_CHUNKS];
  uint32_t modes[PIECE_CHUNKS];
} piece_t;

typedef struct gmi_deferred {
  rest_t *first, *last; /* guarded by the manager's lock, as all that is not Atomic */
  pthread_cond_t more;  /* used with the manager's lock: something for the thread to queue, or stop */
  pthread_t thread;
  _Atomic uint64_t count; /* Atomic: pieces in the list; written under the lock */
  bool started, stop;
  bool told; /* the failure of the first piece has been logged; it is retried without another log line */
} gmi_deferred_t;

/* ---- update.c */
/* The piece that begins at an element, up to end at most; lists each chunk once, with its joint mode. */
void gmi_piece_at(const walk_t *k, uint64_t begin, uint64_t end, piece_t *p);
bool gmi_piece_is_pinned(const piece_t *p); /* a chunk that it writes is */
/* Both queue a piece; a failure leaves it unqueued. On the device it is also removed from its rest, and the lock is
 * released for the callback; on the host the caller removes it. deferred: counted by gmi_workers_deferred(). */
gemini_status_t gmi_piece_on_device(walk_t *k, piece_t *p, rest_t *rest);
gemini_status_t gmi_piece_on_host(walk_t *k, piece_t *p, bool deferred);
void gmi_walk_unref(walk_t *k);

/* ---- deferred.c */
void gmi_rest_insert(gmi_deferred_t *d, rest_t *rest, rest_t *before);   /* before NULL: appends */
void gmi_rest_queued(gmi_deferred_t *d, rest_t *rest, const piece_t *p); /* removes its first piece, which was queued */
/* Defers the first piece of the call's tail, as a rest of its own before the tail. False: no memory for its record. */
bool gmi_tail_leave_one(gmi_deferred_t *d, walk_t *k, const piece_t *p);
void gmi_tail_leave(walk_t *k); /* defers all pieces of the tail */
/* Queues the pieces of earlier updates that contain one of p's chunks: they must run first. */
gemini_status_t gmi_updates_queue_left(gmi_manager_t *m, const piece_t *p);

#endif
