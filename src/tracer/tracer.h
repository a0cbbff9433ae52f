/* The tracer: what an iteration did, op by op, and whether this one does the same.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It keeps a few *variants*: distinct iterations seen so far (a training step, an evaluation, a longer sequence), each
 * with its plan. While an iteration runs it is compared with all of them; the active one is the variant whose plan is
 * being carried out. When the iteration leaves it, another variant that agrees so far takes over; when none does, the
 * rest is served on demand, and what was recorded becomes a variant with a plan of its own. */
#ifndef GMI_TRACER_H
#define GMI_TRACER_H

#include "core/manager.h"
#include "policy/policy.h"
#include "tracer/op_names.h"

enum { GMI_VARIANTS = 8 };

typedef struct gmi_trace_use { /* what an op touches: bytes of the arena that stores them */
  uint32_t arena, mode;
  uint64_t offset, size;
} gmi_trace_use_t;

typedef struct gmi_trace_op {
  const char *name;       /* one of the trace's names, taken; NULL: it has none yet */
  uint64_t nonmodel_peak; /* bytes live at most while it was open */
  uint64_t compute_ns;    /* mean over the iterations seen; 0 = not measured yet */
  uint32_t phase;
  uint32_t heap_pages; /* most pages under live blocks */
  uint32_t samples;
  uint32_t use_first, use_count;
  uint32_t reserved;
} gmi_trace_op_t;

typedef struct gmi_trace {
  gmi_op_names_t *names; /* the tracer's */
  gmi_trace_op_t *ops;
  gmi_trace_use_t *uses;
  gmi_trace_update_t *updates;
  uint32_t op_count, op_capacity, use_count, use_capacity, update_count, update_capacity;
  /* Rates that the plan is made with; 0 = not measured yet. */
  uint64_t link_bytes_per_s[2];              /* GEMINI_LINK_H2D, D2H; whole chunks, their overhead included */
  uint64_t file_bytes_per_s[2];              /* read, written; both directions share what the files can do */
  uint64_t host_update_ps, device_update_ps; /* picoseconds an element; on the host of one worker */
  uint64_t chunk_bytes;                      /* of a trace read from a file: those that it was recorded with */
  uint64_t outside_ns; /* of a step, from begin to begin, outside its ops: the caller's own work, norms, read-backs */
} gmi_trace_t;

extern const gmi_observer_t gmi_tracer_events;
extern const gmi_advice_t gmi_tracer_advice;

gemini_status_t gmi_tracer_open(gmi_manager_t *m);
void gmi_tracer_close(gmi_manager_t *m);
void gmi_tracer_forget(gmi_manager_t *m);            /* arenas changed: what is known no longer fits */
gemini_status_t gmi_tracer_replan(gmi_manager_t *m); /* budgets changed */

/* Lock held. */
uint32_t gmi_tracer_op_stream(gmi_manager_t *m);  /* GMI_CALLER when no op is open, or it runs on the caller */
const char *gmi_tracer_op_name(gmi_manager_t *m); /* NULL when no op is open */
uint64_t gmi_tracer_next_use(gmi_manager_t *m, const gmi_chunk_t *c); /* larger = later; UINT64_MAX = not known */
void gmi_tracer_update(gmi_manager_t *m, const gmi_trace_update_t *update, uint32_t *index_out);
void gmi_tracer_update_refused(gmi_manager_t *m, uint32_t index); /* the last one: there was none */
/* Shall span number piece of the update number index run on the device? */
bool gmi_tracer_piece_on_device(gmi_manager_t *m, uint32_t index, uint32_t piece);
/* When one of the chunks that ops share with the span is used next: as gmi_chunk_t's next_use; UINT64_MAX = not
 * known */
uint64_t gmi_tracer_piece_use(gmi_manager_t *m, uint32_t index, uint32_t piece);
/* Before and after such a span is queued: the plan's moves that belong to it. */
void gmi_tracer_piece_begin(gmi_manager_t *m, uint32_t index, uint32_t piece);
void gmi_tracer_piece_end(gmi_manager_t *m, uint32_t index, uint32_t piece);
void gmi_tracer_resolve(gmi_manager_t *m, bool block); /* reads the times of ops that are done */
/* Makes stream wait for fence, and counts the wait as a stall of the open op. */
gemini_status_t gmi_tracer_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence);

/* Around what may make the calling thread wait before it can queue an op's work. Where the op is on stream, the time in
 * which that has nothing else to do is counted as a stall and is in the timeline. foreseen: the planner's model has
 * such a wait, as for updates; else it stays a part of what the op takes, to the planner. */
void gmi_tracer_pause(gmi_manager_t *m, uint32_t stream, bool foreseen, gmi_pause_t *pause_out);
void gmi_tracer_resume(gmi_manager_t *m, uint32_t stream, const gmi_pause_t *pause);

/* Any thread, lock held or not: an op touches a range. */
void gmi_tracer_touch(gmi_manager_t *m, uint32_t store, uint64_t offset, uint64_t size, uint32_t mode);

/* trace_file.c */
gemini_status_t gmi_trace_write(gmi_manager_t *m, const gmi_trace_t *trace, const char *path);
gemini_status_t gmi_trace_read(gmi_manager_t *m, gmi_trace_t *trace_out, const char *path);
void gmi_trace_clear(gmi_trace_t *trace); /* nothing is recorded any more; what it has allocated stays for what comes */
void gmi_trace_free(gmi_trace_t *trace);
gmi_op_names_t *gmi_tracer_names(gmi_manager_t *m);
gmi_trace_op_t *gmi_trace_add_op(gmi_trace_t *trace);   /* NULL: no memory */
gmi_trace_use_t *gmi_trace_add_use(gmi_trace_t *trace); /* to the last op */
gmi_trace_update_t *gmi_trace_add_update(gmi_trace_t *trace);

/* plan_input.c: a trace in the policy's terms */
typedef struct gmi_plan_bundle {
  gmi_plan_input_t input;
  gmi_plan_t plan;
  gmi_chunk_t **chunk_of; /* [input.chunk_count] */
  uint32_t *piece_first;  /* [update_count + 1] into pieces */
  bool made;
} gmi_plan_bundle_t;
/* shift: of the chunks that the plan is for. Where that is not the manager's, the plan is of no use before arenas have
 * been cut so, for which nothing may be pinned, and gmi_plan_bundle_bind() after it. */
gemini_status_t gmi_plan_bundle_make(gmi_manager_t *m, const gmi_trace_t *trace, uint32_t shift,
                                     gmi_plan_bundle_t *bundle_out);
void gmi_plan_bundle_bind(gmi_manager_t *m, gmi_plan_bundle_t *bundle);
/* Pages of non-model memory, which are frames, in frames of another length: as many bytes or a little more. */
static inline uint32_t gmi_trace_pages(uint32_t pages, uint64_t from_bytes, uint64_t to_bytes) {
  return (uint32_t)((pages * from_bytes + to_bytes - 1) / to_bytes);
}
/* The trace's times and rates into the input of a plan made before. */
void gmi_plan_bundle_times(gmi_manager_t *m, const gmi_trace_t *trace, gmi_plan_bundle_t *bundle);
void gmi_trace_measure(gmi_manager_t *m, gmi_trace_t *trace); /* the newest rates into the trace */
void gmi_plan_bundle_free(gmi_plan_bundle_t *bundle);
#endif
