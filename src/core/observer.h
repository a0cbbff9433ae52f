/* What chunks and streams report as it happens, and what they ask before they choose.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The tracer implements both tables (gmi_manager_t.trace), which live as long as the manager. No module below the
 * tracer calls it or includes its headers. The manager's lock is held in every call, unless said otherwise. */
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

/* An update that was accepted. */
typedef struct gmi_trace_update {
  uint32_t after_op; /* operators begun before it; the tracer's to set */
  uint32_t arena_count;
  uint32_t arenas[GMI_UPDATE_ARENAS], modes[GMI_UPDATE_ARENAS];
  uint64_t first_element, element_count;
} gmi_trace_update_t;

/* A wait that may keep the calling thread from queueing an operator's work, from its begin to its end. */
typedef struct gmi_pause {
  gmi_fence_t before;
  uint64_t begin_ns; /* 0: nothing is counted */
  bool foreseen;     /* the planner's model has it, as it has updates'; else it stays a part of the operator's time */
} gmi_pause_t;

typedef struct gmi_observer {
  /* An operator touches a range of the arena that stores it. Any thread, lock held or not. */
  void (*touched)(struct gmi_manager *m, uint32_t store, uint64_t offset, uint64_t size, uint32_t mode);
  /* The calling thread begins to wait, and goes on, for work that is to come on stream. Where the open operator runs on
   * it, the time in which that has nothing else to do is counted as a stall. */
  void (*pause_begins)(struct gmi_manager *m, uint32_t stream, bool foreseen, gmi_pause_t *pause_out);
  void (*pause_ends)(struct gmi_manager *m, uint32_t stream, const gmi_pause_t *pause);
  /* stream shall wait for fence: makes it, and counts the wait as a stall of the open operator. */
  gemini_status_t (*stream_waits)(struct gmi_manager *m, uint32_t stream, gmi_fence_t fence);
  void (*stream_ends)(struct gmi_manager *m); /* and its fences with it: whoever wants a time from them reads it now */
  void (*arenas_change)(struct gmi_manager *m); /* what is known of operators no longer fits */
  gemini_status_t (*budgets_change)(struct gmi_manager *m);
  void (*chunk_copied)(struct gmi_manager *m, const struct gmi_chunk *c, const struct gmi_link *link, uint32_t reason,
                       gmi_fence_t begin, gmi_fence_t end);
  void (*chunk_transferred)(struct gmi_manager *m, const struct gmi_chunk *c, bool write, uint64_t begin_ns,
                            uint64_t end_ns);
  void (*span_queued)(struct gmi_manager *m, const char *kind, const char *name, gmi_fence_t begin, gmi_fence_t end);
  void (*counters_change)(struct gmi_manager *m); /* bytes in use of a tier */
  /* An update is about to be accepted: *index_out is its number in this iteration, for the calls below. */
  void (*update_comes)(struct gmi_manager *m, const gmi_trace_update_t *update, uint32_t *index_out);
  void (*update_refused)(struct gmi_manager *m, uint32_t index); /* the last one: there was none */
  /* Before and after a span of it is queued on the device. */
  void (*piece_begins)(struct gmi_manager *m, uint32_t index, uint32_t piece);
  void (*piece_ends)(struct gmi_manager *m, uint32_t index, uint32_t piece);
} gmi_observer_t;

typedef struct gmi_advice {
  const char *(*op_name)(struct gmi_manager *m); /* NULL when no operator is open */
  /* When the chunk is used next: larger = later; UINT64_MAX = not known. */
  uint64_t (*next_use)(struct gmi_manager *m, const struct gmi_chunk *c);
  /* Shall span number piece of the update run on the device, and when is one of its chunks used next? */
  bool (*piece_on_device)(struct gmi_manager *m, uint32_t index, uint32_t piece);
  uint64_t (*piece_use)(struct gmi_manager *m, uint32_t index, uint32_t piece);
} gmi_advice_t;

#endif
