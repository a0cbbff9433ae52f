/* The tracer: records what an iteration does, op by op, compares it with the iterations seen before, and carries out
 * plans.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The tracer keeps up to GMI_VARIANTS *variants*: kinds of iterations seen so far (a training step, an evaluation, a
 * longer sequence), each with its plan. A running iteration is compared with all of them. The active variant is the one
 * whose plan is being carried out. When the iteration departs from it, another variant that agrees so far becomes
 * active. If none agrees, the rest of the iteration is served on demand, and its record becomes a new variant with a
 * plan of its own.
 *
 * Files: tracer.c brackets iterations and phases and learns times; ops.c brackets ops; record.c records uses and stalls
 * and compares ops; follow.c carries out plans and answers questions about them; plan_input.c translates a trace for
 * the policy; trace_file.c stores traces in memory and in files; timeline.c records events for gemini_timeline_start();
 * op_names.c keeps the names of ops.
 *
 * Threads: the manager's lock is held in every call, unless the comment at a function says otherwise. Lower modules
 * reach the tracer through gmi_tracer_observer and gmi_tracer_advice only (core/observer.h). */
#ifndef GMI_TRACER_H
#define GMI_TRACER_H

#include "core/manager.h"
#include "policy/policy.h"
#include "tracer/op_names.h"

enum { GMI_VARIANTS = 16 };

/* The last times of something. Their median counts, the lower one of two: what happens once, such as that memory is
 * committed, says nothing of the times to come. */
enum { GMI_TIMES = 5 };
typedef struct gmi_times {
  uint64_t ns[GMI_TIMES];
  uint32_t count, reserved; /* ever added */
} gmi_times_t;
uint64_t gmi_times_add(gmi_times_t *times, uint64_t ns); /* returns the median */
/* Of at most GMI_TIMES times, the lower one of two; 0: there is none. */
uint64_t gmi_times_median(const uint64_t *ns, uint32_t count);

typedef struct gmi_trace_use { /* a use: bytes that an op accesses, in the arena that stores them */
  uint32_t arena, mode;
  uint64_t offset, size;
} gmi_trace_use_t;

/* A gather that is planned, or a sum that was made, of a chunk of a sharded arena; as gmi_plan_collective_t. */
typedef struct gmi_trace_collective {
  uint32_t op, use_op, frame_op;
  uint32_t arena, chunk;
} gmi_trace_collective_t;

/* A use of a chosen op (ops.c): op, its number among those of the iteration. */
typedef struct gmi_trace_chosen {
  gmi_trace_use_t use;
  uint32_t op, reserved;
} gmi_trace_chosen_t;
typedef struct gmi_trace_list {
  gmi_trace_chosen_t *uses;
  uint32_t count, capacity;
} gmi_trace_list_t;

/* An op of a trace. Its uses are use_count adjacent elements of gmi_trace_t.uses, sorted and unique once the op has
 * ended. */
typedef struct gmi_trace_op {
  const char *name;        /* a name of gmi_trace_t.names, of which this op holds a reference; NULL: not set yet */
  uint64_t nonmodel_peak;  /* peak of live non-model bytes while the op was open; of a variant that only reads, the
                             highest of all its iterations */
  uint64_t nonmodel_least; /* of a variant that only reads: the lowest such peak */
  uint64_t compute_ns;     /* median of times; 0: not measured yet */
  gmi_times_t times;
  uint32_t phase;
  /* peak of heap pages under live non-model memory and of gradients of sharded arenas, together; a page is as large as
   * a chunk */
  uint32_t heap_pages;
  uint32_t use_first, use_count;
  uint32_t all_pages; /* the same peak with gathered parameters */
  uint32_t gathered;  /* pages that gathered parameters take beside heap_pages when their gathers are planned */
  uint32_t reserved;
} gmi_trace_op_t;

/* A recorded iteration. Invariants: uses and updates are in the order of ops; every op's name comes from names. The
 * arrays outlive gmi_trace_clear(), so that recording an iteration seldom allocates. */
typedef struct gmi_trace {
  gmi_op_names_t *names; /* the tracer's; shared by all its traces, so equal names have equal addresses */
  gmi_trace_op_t *ops;
  gmi_trace_use_t *uses;
  gmi_trace_update_t *updates;
  gmi_trace_collective_t *gathers, *sums; /* not in files */
  uint32_t op_count, op_capacity, use_count, use_capacity, update_count, update_capacity;
  uint32_t gather_count, gather_capacity, sum_count, sum_capacity;
  /* Rates for the plan; 0: not measured yet. */
  uint64_t link_bytes_per_s[2]; /* to the device, from it; of whole chunks, including the overhead of a copy */
  uint64_t file_bytes_per_s[2]; /* read, written; both directions share the bandwidth of the files */
  uint64_t host_update_ps, device_update_ps; /* picoseconds per element; host: of one worker */
  uint64_t pass_ps[2];                       /* of one worker: in the first pass of two, and in the second */
  uint64_t chunk_bytes; /* of a trace read from a file: the chunk size with which it was recorded */
  uint32_t headroom;    /* heap pages that a plan leaves free beyond the peaks, as these have grown */
  /* time of an iteration, from begin to begin, outside its ops and their stages: the caller's own work, norms, reads of
   * results (gmi_tracer_outside()) */
  uint64_t outside_ns;
  gmi_times_t outside;
  /* Updates ahead of the step; not in files. ahead_ops: [ahead_count] by piece of the plan, the op in which it was
   * asked whether to compute it ahead, GMI_NONE: in none; ahead: results are expected to be taken over. */
  uint32_t *ahead_ops;
  uint32_t ahead_count;
  bool ahead;
  /* Uses of chosen ops in one iteration, in the order of ops: of a variant, in the one that had the largest such op.
   * Not in files. */
  gmi_trace_list_t chosen;
  bool zeroed[GMI_ARENAS]; /* of a trace read from a file: the arena reads as zero until an iteration writes to it */
} gmi_trace_t;

extern const gmi_observer_t gmi_tracer_observer;
extern const gmi_advice_t gmi_tracer_advice;

gemini_status_t gmi_tracer_open(gmi_manager_t *m);
void gmi_tracer_close(gmi_manager_t *m);
/* the arenas changed: drops all variants, because traces and plans name arenas and chunks */
void gmi_tracer_forget(gmi_manager_t *m);
gemini_status_t gmi_tracer_replan(gmi_manager_t *m); /* the budgets changed: makes all plans again */

/* Lock held, as in all functions of this header unless noted. */
uint32_t gmi_tracer_op_stream(gmi_manager_t *m);  /* GMI_CALLER if no op is open or the op runs on the calling thread */
const char *gmi_tracer_op_name(gmi_manager_t *m); /* NULL if no op is open */
uint64_t gmi_tracer_next_use(gmi_manager_t *m, const gmi_chunk_t *c);   /* larger = later; UINT64_MAX = unknown */
uint64_t gmi_tracer_cache_rank(gmi_manager_t *m, const gmi_chunk_t *c); /* as of gmi_advice_t, like the next one */
uint64_t gmi_tracer_cache_pass(gmi_manager_t *m);
void gmi_tracer_update(gmi_manager_t *m, const gmi_trace_update_t *update, uint32_t *index_out);
/* undoes the last gmi_tracer_update(): the update was refused */
void gmi_tracer_update_refused(gmi_manager_t *m, uint32_t index);
/* Returns whether piece number piece of update number index is to run on the device, by the plan or, without one, for
 * want of room below. */
bool gmi_tracer_piece_on_device(gmi_manager_t *m, uint32_t index, uint32_t piece);
/* Returns whether the plan of the running iteration has the chunk stay on the device for good. */
bool gmi_tracer_stays(gmi_manager_t *m, const gmi_chunk_t *c);
/* Returns whether to compute ahead, on the host, the piece that begins at element of arena, which an update of it names
 * first. unit: elements of a piece. A plan that was made for it says so; without one, what the plan runs on the host
 * is. *results_out: its results alone are to be computed, as the first of two passes. */
bool gmi_tracer_unit_ahead(gmi_manager_t *m, uint32_t arena, uint64_t element, uint64_t unit, bool *results_out);
/* The next use of one of the chunks that the piece shares with ops, in the encoding of gmi_chunk_t's next_use;
 * UINT64_MAX: unknown. */
uint64_t gmi_tracer_piece_use(gmi_manager_t *m, uint32_t index, uint32_t piece);
bool gmi_tracer_two_passes(gmi_manager_t *m, uint32_t index, uint32_t piece);
/* Called before and after a piece is queued on the device; carry out the plan's moves that belong to it. */
void gmi_tracer_piece_begin(gmi_manager_t *m, uint32_t index, uint32_t piece);
void gmi_tracer_piece_end(gmi_manager_t *m, uint32_t index, uint32_t piece);
/* Reads the times of ops whose work has ended; block: waits for all. few: of some of them, where there may be many. */
void gmi_tracer_resolve(gmi_manager_t *m, bool block);
void gmi_tracer_resolve_few(gmi_manager_t *m);
/* Makes stream wait for fence and counts the wait as a stall of the open op if the op runs on stream. */
gemini_status_t gmi_tracer_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence);

/* Bracket a wait of the calling thread that may keep it from queueing the work of an op. If the open op runs on
 * stream, the time during which stream has no other work is counted as a stall and shown in the timeline. foreseen:
 * the planner's model contains this wait (the wait for room that an update needs); any other wait remains part of
 * the op's compute time for the planner. */
void gmi_tracer_pause(gmi_manager_t *m, uint32_t stream, bool foreseen, gmi_pause_t *pause_out);
void gmi_tracer_resume(gmi_manager_t *m, uint32_t stream, const gmi_pause_t *pause);

/* Records that the open op accesses a range. Any thread, with or without the lock. */
void gmi_tracer_touch(gmi_manager_t *m, uint32_t store, uint64_t offset, uint64_t size, uint32_t mode);

/* trace_file.c */
gemini_status_t gmi_trace_write(gmi_manager_t *m, const gmi_trace_t *trace, const char *path);
/* Reads a file. Once all of it has been accepted, chooses the chunk size if that is still to be done. */
gemini_status_t gmi_trace_read(gmi_manager_t *m, gmi_trace_t *trace_out, const char *path);
void gmi_trace_clear(gmi_trace_t *trace); /* empties the trace; keeps its allocations for the next iteration */
void gmi_trace_free(gmi_trace_t *trace);
gmi_op_names_t *gmi_tracer_names(gmi_manager_t *m);
gmi_trace_op_t *gmi_trace_add_op(gmi_trace_t *trace);   /* appends; NULL: no memory */
gmi_trace_use_t *gmi_trace_add_use(gmi_trace_t *trace); /* appends a use of the last op */
gmi_trace_update_t *gmi_trace_add_update(gmi_trace_t *trace);
gmi_trace_chosen_t *gmi_trace_add_chosen(gmi_trace_t *trace);
gmi_trace_collective_t *gmi_trace_add_gather(gmi_trace_t *trace);
gmi_trace_collective_t *gmi_trace_add_sum(gmi_trace_t *trace);
/* Sums that are queued in an op and in the one before it: so many frames may be on their way back while the op runs. */
uint32_t gmi_trace_sums_near(const gmi_trace_t *trace, uint32_t op);
/* Of the free frames, those that a plan leaves for sums, so that gradients need not wait for the frames of earlier
 * ones: at most half. */
static inline uint64_t gmi_frames_for_sums(uint64_t sums, uint64_t free) { return sums < free / 2 ? sums : free / 2; }

/* forecast.c: plans a trace of which the manager knows nothing yet; for managers with trace.plans_only. *text_out: the
 * plan in words, which the caller frees. */
gemini_status_t gmi_trace_forecast(gmi_manager_t *m, const char *path, gemini_forecast_t *forecast_out,
                                   char **text_out);

/* plan_input.c: translates a trace for the policy */
/* What a plan's fetches have to read from files; see reads.c. Places are counted on from the plan's first fetch. */
typedef struct {
  bool *fetched;    /* [chunk_count] whether the plan fetches a chunk; NULL: not found out yet */
  uint64_t share;   /* of 2^64: fetched chunks that are read in each pass; 0: there is room for all */
  uint64_t at;      /* the next fetch */
  uint64_t read;    /* the end of what has been read ahead */
  uint64_t left;    /* the begin of what may still have a slot though it has been fetched */
  uint32_t waiting; /* reads ahead of fetches that have not come */
  uint32_t copied;  /* slots for chunks that pass while they are copied to the device */
  uint32_t passes;  /* that lacked slots to read ahead, since this plan was entered */
  bool missed;      /* a chunk of this pass was only in a file when its fetch came near */
  bool lacked;      /* slots lacked for more than half of those that were to be read ahead */
} gmi_reads_t;

/* A plan and the input it was made from. Owns the arrays of input and plan. Invariants: made says that plan is
 * valid; chunk_of maps the policy's chunk indices to records and is valid until arenas are cut anew. */
typedef struct gmi_plan_bundle {
  gmi_plan_input_t input;
  gmi_plan_t plan;
  gmi_chunk_t **chunk_of; /* [input.chunk_count] */
  uint32_t *piece_first;  /* [update_count + 1] an update's first piece in input.pieces */
  uint32_t *group_of;     /* [groups.group_count] the manager's index of each group of the plan */
  gmi_reads_t reads;
  bool made;
  bool ahead, plans_ahead; /* as trace.ahead when the plan was made; it has pieces that are computed ahead */
} gmi_plan_bundle_t;
/* Makes a plan for chunks of 1 << shift bytes. If the manager's chunks have another size, the plan cannot be used
 * before the arenas have been cut to that size and gmi_plan_bundle_bind() has been called; it then assumes that no
 * chunk is pinned. */
gemini_status_t gmi_plan_bundle_make(gmi_manager_t *m, const gmi_trace_t *trace, uint32_t shift,
                                     gmi_plan_bundle_t *bundle_out);
void gmi_plan_bundle_bind(gmi_manager_t *m, gmi_plan_bundle_t *bundle);
/* Frames for the states that stay on the device because host and files have no room for them (gmi_home_is_short()),
 * and for the pieces of updates that pass by, of this trace or of another variant; 0: there is room. */
uint64_t gmi_trace_home_frames(gmi_manager_t *m, const gmi_trace_t *trace);
/* The chunks of arenas that are not sharded that an op of the trace uses. Its uses are sorted. */
uint32_t gmi_trace_other_chunks(const gmi_manager_t *m, const gmi_trace_t *trace, const gmi_trace_op_t *op);
/* Converts a count of heap pages to pages of another size, rounded up. Heap pages are frames, so their number changes
 * with the frame size. */
static inline uint32_t gmi_trace_pages(uint32_t pages, uint64_t from_bytes, uint64_t to_bytes) {
  return (uint32_t)((pages * from_bytes + to_bytes - 1) / to_bytes);
}
/* Copies the trace's times and rates into the input of a plan made before. */
void gmi_plan_bundle_times(gmi_manager_t *m, const gmi_trace_t *trace, gmi_plan_bundle_t *bundle);
void gmi_trace_measure(gmi_manager_t *m, gmi_trace_t *trace); /* copies the manager's newest rates into the trace */
void gmi_plan_bundle_free(gmi_plan_bundle_t *bundle);
#endif
