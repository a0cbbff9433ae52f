/* Two tables of functions through which src/core and src/chunk use the tracer: the observer receives reports of events,
 * the advice answers questions about the future. SPDX-License-Identifier: Apache-2.0
 *
 * The tracer implements both tables (gmi_manager_t.trace), which exist as long as the manager. They keep the dependency
 * one way: no module below the tracer includes its headers. The manager's lock is held in every call, unless said
 * otherwise. */
#ifndef GMI_OBSERVER_H
#define GMI_OBSERVER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/fence.h"
#include "gemini.h"

struct gmi_manager;
struct gmi_link;
struct gmi_chunk;

enum { GMI_UPDATE_ARENAS = 8 };

/* An update that gemini_update_submit() accepts, as the tracer records it. */
typedef struct gmi_trace_update {
  uint32_t after_op; /* number of operators begun before it; set by the tracer */
  uint32_t arena_count;
  uint32_t arenas[GMI_UPDATE_ARENAS], modes[GMI_UPDATE_ARENAS];
  uint64_t first_element, element_count;
  uint64_t passes; /* 1: GEMINI_UPDATE_PASSES. As wide as what precedes it: updates are compared byte by byte. */
} gmi_trace_update_t;

/* A wait of the calling thread that may delay the queueing of an operator's work. */
typedef struct gmi_pause {
  gmi_fence_t before;
  uint64_t begin_ns; /* 0: the wait is not counted */
  bool foreseen;     /* the planner's model includes this wait, as it includes waits for updates; otherwise the wait
                      * remains a part of the operator's time */
} gmi_pause_t;

/* Can an update of arenas with these modes have two passes? It has results, which it only writes, and states, which it
 * reads as well. */
static inline bool gmi_modes_have_passes(const uint32_t *modes, uint32_t count) {
  bool results = false, states = false;
  for (uint32_t i = 0; i < count; i++) {
    results |= modes[i] == GEMINI_WRITE;
    states |= modes[i] == GEMINI_READ_WRITE;
  }
  return results && states;
}

typedef struct gmi_observer {
  /* An operator touches a range; store: index of the arena that owns its chunks. Any thread, with or without the
   * lock. */
  void (*touched)(struct gmi_manager *m, uint32_t store, uint64_t offset, uint64_t size, uint32_t mode);
  /* Begin and end of a wait of the calling thread, before it queues work on stream. If the open operator runs on that
   * stream, the part of the wait in which the stream is idle counts as a stall. */
  void (*pause_begins)(struct gmi_manager *m, uint32_t stream, bool foreseen, gmi_pause_t *pause_out);
  void (*pause_ends)(struct gmi_manager *m, uint32_t stream, const gmi_pause_t *pause);
  /* Makes stream wait for fence, and counts the wait as a stall of the open operator. */
  gemini_status_t (*stream_waits)(struct gmi_manager *m, uint32_t stream, gmi_fence_t fence);
  void (*stream_ends)(
      struct gmi_manager *m); /* a stream is about to end: the times of its fences are read now or lost */
  void (*arenas_change)(struct gmi_manager *m); /* arenas came or went: recorded traces no longer apply */
  gemini_status_t (*budgets_change)(struct gmi_manager *m);
  void (*chunk_copied)(struct gmi_manager *m, const struct gmi_chunk *c, const struct gmi_link *link, uint32_t reason,
                       gmi_fence_t begin, gmi_fence_t end);
  void (*chunk_transferred)(struct gmi_manager *m, const struct gmi_chunk *c, bool write, uint64_t begin_ns,
                            uint64_t end_ns);
  void (*span_queued)(struct gmi_manager *m, const char *kind, const char *name, gmi_fence_t begin, gmi_fence_t end);
  void (*chunk_summed)(struct gmi_manager *m, const struct gmi_chunk *c); /* its gradients, over a group's ranks */
  void (*counters_change)(struct gmi_manager *m);                         /* call gmi_counters_change() */
  /* While a timeline is recorded: a call has held the manager's lock, and is about to give it away. */
  void (*lock_held)(struct gmi_manager *m, const char *function, uint64_t begin_ns, uint64_t end_ns);
  /* An update is about to be accepted. *index_out: its number in this iteration, for the calls below. */
  void (*update_comes)(struct gmi_manager *m, const gmi_trace_update_t *update, uint32_t *index_out);
  void (*update_refused)(struct gmi_manager *m, uint32_t index); /* forgets the latest update, which was not accepted */
  /* Before and after a piece of the update is queued on the device. */
  void (*piece_begins)(struct gmi_manager *m, uint32_t index, uint32_t piece);
  void (*piece_ends)(struct gmi_manager *m, uint32_t index, uint32_t piece);
} gmi_observer_t;

typedef struct gmi_advice {
  const char *(*op_name)(struct gmi_manager *m); /* NULL when no operator is open */
  /* Position of the chunk's next use: larger = later; UINT64_MAX = unknown. */
  uint64_t (*next_use)(struct gmi_manager *m, const struct gmi_chunk *c);
  /* Of two chunks with unknown next uses, the one with the larger rank is to leave first; of equal ones, the one used
   * longest ago. */
  uint64_t (*cache_rank)(struct gmi_manager *m, const struct gmi_chunk *c);
  /* The number of the running iteration if its plan leaves frames to chunks of chosen operators; otherwise 0. */
  uint64_t (*cache_pass)(struct gmi_manager *m);
  /* Is this piece of the update to run on the device, by the plan or, without one, for want of room below? Position of
   * the first next use of the piece's chunks. */
  bool (*piece_on_device)(struct gmi_manager *m, uint32_t index, uint32_t piece);
  uint64_t (*piece_use)(struct gmi_manager *m, uint32_t index, uint32_t piece);
  /* Is this piece, if it runs on the host, to have two passes? */
  bool (*two_passes)(struct gmi_manager *m, uint32_t index, uint32_t piece);
  /* Does the plan of the running iteration have the chunk stay on the device for good? */
  bool (*stays)(struct gmi_manager *m, const struct gmi_chunk *c);
  /* Is it worth computing ahead, on the host, what begins at this element of the arena, in an update that this
   * iteration has yet to make? unit: elements of a piece. *results_out: its results alone, as the first of two
   * passes. */
  bool (*unit_ahead)(struct gmi_manager *m, uint32_t arena, uint64_t element, uint64_t unit, bool *results_out);
  /* Do gathered chunks stay when their operator ends, because it is known which ones will leave for others? The same on
   * all ranks. */
  bool (*gathers_follow)(struct gmi_manager *m, uint32_t group);
  /* The open operator is about to gather chunks on demand: what was gathered ahead for another one may leave now. */
  gemini_status_t (*gathers_meet)(struct gmi_manager *m);
} gmi_advice_t;

#endif
