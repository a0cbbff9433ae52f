/* The tracer's internal records, and the functions that its files call of each other. Included by tracer.c, ops.c,
 * record.c, follow.c and trial.c only.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_VARIANTS_H
#define GMI_VARIANTS_H

#include "base/check.h"
#include "base/nvtx.h"
#include "chunk/cut.h"
#include "chunk/graph.h"
#include "chunk/heap.h"
#include "chunk/nonmodel.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "core/streams.h"
#include "tracer/gathers.h"
#include "tracer/history.h"
#include "tracer/timeline.h"
#include "tracer/tracer.h"

/* NAME_LIMIT: bytes of an op's name. STALLS_LIMIT: timed stalls per iteration; later ones are not counted.
 * SETTLE_RUNS: planned iterations after which the plan is made again. */
enum { NAME_LIMIT = 127, STALLS_LIMIT = 4096, SETTLE_RUNS = GMI_SETTLE_RUNS };
_Static_assert((int)GMI_VARIANTS <= (int)GMI_HISTORY_KINDS, "a variant's number is one of the history");
enum { PAUSE_NS = 50000 }; /* a shorter pause is not worth two marks */
/* The part of the device budget by which the peaks of iterations that only read, or whose plan moves nothing, may
 * differ and be one variant, and that a plan leaves free where they grow in those that only read. */
enum { SLACK_SHARE = 64 };
/* Iterations without growth after which a plan leaves nothing free for it any more. Each time that growth comes
 * nevertheless, twice as many are waited for. */
enum { STEADY_RUNS = 16 };
/* Iterations that take over nothing that was computed ahead, before the plan counts on it no more; and how often the
 * number of those that do is doubled, before it does again. */
enum { AHEAD_PATIENCE = 4, AHEAD_DOUBTS = 6 };
/* Settled steps under a new plan after which it is compared with the plan before, and the difference that counts: more
 * than this share of the shorter step, and more than these nanoseconds, of which steps of small models may differ
 * anyway. TRIAL_RUNS: after 4, 8, ... planned iterations, up to these, a plan is sought that is better by so much. */
enum { TRIAL_STEPS = 3, TRIAL_SHARE = 32, TRIAL_NS = 1000000, TRIAL_RUNS = 64 };

/* Steps under a plan, by step_t.took. Settled are those from the third on. */
typedef struct {
  uint64_t ns[2][TRIAL_STEPS]; /* of the newest settled ones; the i-th is at i % TRIAL_STEPS. 0: none yet */
  uint32_t count[2];           /* of settled ones */
  uint64_t opening[2];         /* of the first two, the longer one; 0: unknown */
} steps_t;

/* A plan that gave way to another one. */
typedef struct {
  gmi_plan_bundle_t bundle;
  uint64_t number; /* as gmi_tracer_t.plans.count counts them */
  steps_t steps;
} former_plan_t;

/* A variant: a kind of iteration. Invariants: used is false if and only if the record is zeroed; bundle.made and
 * refused exclude each other; the plan was made from trace. */
typedef struct {
  gmi_trace_t trace;
  gmi_plan_bundle_t bundle; /* bundle.made: the variant has a plan */
  bool used;
  bool refused; /* no plan exists for the current budgets */
  /* nothing is written in it but arenas that grow: its ops are matched by their accesses, see gmi_tracer_same_op() */
  bool reads_only;
  /* its plan moves nothing and has frames for all chunks beside each op: what ops allocate may vary, as that of a
   * caching allocator does for some iterations, until it has found which blocks it uses again */
  bool still;
  bool chosen_grew;      /* a chosen op was larger than those for which its plan leaves frames */
  bool any_label;        /* it came from a file: the first iteration that follows it to its end gives it a label */
  uint64_t label;        /* of its iterations, gemini_iteration_begin_with() */
  uint64_t runs;         /* iterations of this kind so far */
  uint64_t planned_runs; /* of them, those that followed the plan to their end */
  uint64_t last_used;    /* number of the last such iteration */
  uint64_t grown_run;    /* runs when an op last needed more pages than in all iterations before */
  uint32_t growths;      /* how often its peaks outgrew a plan that left nothing free for growth, once there was some */
  struct {               /* results computed ahead; see learn_ahead() */
    uint32_t taken, missed; /* iterations in a row in which they were taken over, or could have been and were not */
    uint32_t doubt;         /* how often they were expected in vain */
    bool planned;           /* trace.ahead when its plan was made or came back */
  } ahead;
  uint64_t plan;          /* the number of its plan, as gmi_tracer_t.plans.count counts them; 0: none */
  uint64_t plan_runs;     /* iterations that followed this plan to their end */
  bool trial_lost;        /* a plan before has come back: no other one is tried */
  struct {                /* the plan and the one before it, compared; see trial.c */
    former_plan_t before; /* before.bundle.made: it may come back */
    steps_t steps;        /* under this plan */
  } trial;
} variant_t;

/* What is known of an iteration for trial.c. */
typedef struct {
  uint64_t first_ns; /* when its first op began; 0: unknown */
  uint64_t plan;     /* the number of the plan that it followed to its end; 0: of none */
  uint32_t variant;  /* whose plan */
  bool took;         /* it took over results computed ahead */
  uint64_t nth;      /* iterations that had followed that plan before */
} step_t;

typedef struct { /* the times of an op, read when its end has been reached (gmi_tracer_resolve()) */
  gmi_fence_t begin, end;
  uint64_t begin_ns, end_ns;         /* of an op on the calling thread; the fences are 0 then */
  uint64_t stall_ns, unforeseen_ns;  /* stalls measured on the calling thread, by gmi_pause_t.foreseen */
  uint32_t stall_first, stall_count; /* index into gmi_tracer_t.stalls */
} timing_t;
/* A stall of a stream: the time between two marks. */
typedef struct {
  gmi_fence_t before, after;
  bool unforeseen; /* see gmi_tracer_pause(): the planner's model lacks this wait */
  bool chosen;     /* of a chosen op, which has left the record when its marks are read */
  uint8_t group;   /* 1 + the index of the group whose gather or sum was waited for; 0: none */
  uint8_t what;    /* gmi_group_wait_t */
} stall_t;

/* How an iteration compares with the variants. */
typedef struct {
  bool agrees[GMI_VARIANTS], departed;
  uint32_t active;
  uint64_t departures;
  uint32_t updates; /* of the record, which were compared */
} comparison_t;

/* State of the tracer. Guarded by the manager's lock; op_open and the arrays of record are also written under
 * touch_lock, because gmi_tracer_touch() runs on any thread without the manager's lock. Invariants: active, entered
 * and previous are GMI_NONE or the index of a used variant; during an iteration agrees[i] implies variants[i].used;
 * op_index is the open op or, between ops, the number of ops recorded; now.chosen implies that the open op is chosen:
 * it is the last op of the record, which it leaves when it ends. */
typedef struct gmi_tracer {
  pthread_mutex_t touch_lock; /* guards the open op's uses; taken after the manager's lock */
  gmi_op_names_t *names;
  struct gmi_gathers *gathers; /* its record of the open op is guarded by touch_lock, too */

  variant_t variants[GMI_VARIANTS];
  uint32_t active; /* the variant that this iteration follows so far, or GMI_NONE */
  /* the variant whose resident set was established last, so that its next iteration need not do so again; or
   * GMI_NONE */
  uint32_t entered;
  uint32_t previous;     /* the variant of the last complete iteration, or GMI_NONE */
  gmi_history_t history; /* variants of the last iterations */
  struct {
    uint64_t count; /* made so far; if there is one, the chunk size is final, because plans refer to chunk records */
    step_t last;    /* the iteration before the one in now.step */
  } plans;
  bool agrees[GMI_VARIANTS]; /* the variant equals this iteration so far */
  bool agreed[GMI_VARIANTS]; /* agrees before the last update was recorded, to undo it if the update is refused */
  bool departed;             /* this iteration departed from a variant; counted once per iteration */
  uint64_t iteration;        /* iterations begun so far; the number of this one */
  uint64_t begun_ns;
  struct { /* of this iteration */
    uint64_t label;
    uint32_t learned;       /* ops whose times its variant has learned */
    uint32_t chosen_ops;    /* chosen ops so far */
    uint32_t stalls_read;   /* of stalls: those before it are read, as far as they are of chosen ops */
    bool chosen;            /* the open op is a chosen one */
    bool first_planned;     /* it is the first one under its variant's plan */
    bool compacted;         /* gemini_hook_compacted() was called: what is live at its end is all that the next need */
    bool regrown;           /* its ranges of arenas that grow lie in other chunks than its variant's did */
    uint64_t committed;     /* stats.committed_elements at its begin */
    uint64_t ended_ns;      /* when the last of the resolved ops ended */
    uint64_t pieces_ns;     /* when the first device piece since the last op began was queued; 0: none was */
    step_t step;            /* what is known of it so far */
    comparison_t before_op; /* before the open op began, to undo that */
    /* Fetches of the plan that are due and not issued yet, as indexes: left by the iteration before, and its own.
     * variant: whose plan; GMI_NONE: none. */
    struct {
      uint32_t variant, next[2], end[2];
    } due;
  } now;

  gmi_trace_t record;  /* the trace of this iteration */
  timing_t *timings;   /* [timing_capacity] by op */
  uint64_t *durations; /* [timing_capacity] by op: its compute time in this iteration; UINT64_MAX: unknown */
  uint32_t timing_capacity, resolved; /* resolved: ops whose times have been read */
  uint64_t in_ops_ns;                 /* duration of the resolved ops, including stalls; UINT64_MAX if one is unknown */
  stall_t stalls[STALLS_LIMIT];
  uint32_t stall_count;

  bool op_open;
  struct { /* what gemini_op_begin_with() has acquired for the open op */
    gemini_access_t *list;
    uint64_t count, capacity;
    gemini_stream_t stream;
  } uses;
  uint32_t op_stream;
  uint32_t op_index;
  struct {             /* non-model peaks */
    uint64_t expected; /* what the plan expects of the open op; UINT64_MAX: no prediction */
    bool at_most;      /* that is an upper bound: less is no error */
    uint64_t slack;    /* by how much they may differ where gmi_tracer_peaks_vary() */
  } peak;
  /* Atomic: memory for a record ran out, or the arenas changed: this iteration cannot become a variant. Set from any
   * thread, reset by the begin of an iteration; it orders no other memory. */
  _Atomic bool record_lost;
} gmi_tracer_t;

/* Ops of the record that stay: without an open chosen op. */
static inline uint32_t gmi_tracer_ops(const gmi_tracer_t *t) { return t->record.op_count - t->now.chosen; }

/* tracer/tracer.c */
variant_t *gmi_tracer_active_variant(gmi_tracer_t *t);
/* Compares an update of the record with those of the variants. */
void gmi_tracer_compare_update(gmi_manager_t *m, uint32_t index);

/* tracer/ops.c */
/* At the end of an iteration: has the variant know the chosen ops, if one was larger than all before. */
void gmi_tracer_learn_chosen(gmi_tracer_t *t, variant_t *v);

/* tracer/follow.c */
void gmi_tracer_publish_plan(gmi_manager_t *m, const variant_t *v);
bool gmi_tracer_plan_with_chunk(gmi_manager_t *m, gmi_trace_t *trace, uint64_t chunk_bytes,
                                gmi_plan_bundle_t *bundle_out);
void gmi_tracer_take_plan(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle);
gemini_status_t gmi_tracer_variant_plan(gmi_manager_t *m, variant_t *v);
void gmi_tracer_enter_plan(gmi_manager_t *m, variant_t *v);
/* Note which fetches of the plan are due, at the begin of an iteration and of an op. */
void gmi_tracer_plan_begin(gmi_manager_t *m, variant_t *v);
void gmi_tracer_plan_op(gmi_manager_t *m, variant_t *v);
/* Issues fetches that are due, in their order. One whose bytes are on their way from a file stays due, and with it
 * those behind it: the calling thread goes on. So does one that would wait for a worker while the link is full. May
 * give the lock away for callbacks of updates. */
void gmi_tracer_plan_more(gmi_manager_t *m);
void gmi_tracer_plan_after_op(gmi_manager_t *m, variant_t *v, uint32_t op);
/* A chunk with a deferred update piece, held by a graph's replay, or claimed by a load is left to be fetched on demand:
 * what precedes it is not queued yet. */
bool gmi_tracer_comes_later(gmi_manager_t *m, const gmi_chunk_t *c);

/* tracer/reads.c */
/* At the begin of an iteration: which of the chunks that the plan fetches stay on the host, and which ones are read in
 * each pass. goes_on: the iteration before followed the same plan. */
void gmi_tracer_reads_begin(gmi_manager_t *m, variant_t *v, bool goes_on);
/* At the begin of an op: starts to read what the plan fetches next, and is only in files. */
void gmi_tracer_reads_op(gmi_manager_t *m, variant_t *v);

/* tracer/trial.c */
/* Makes the variant's plan again, with the times measured under it, and has the new one prove itself. */
gemini_status_t gmi_tracer_trial_plan(gmi_manager_t *m, variant_t *v);
/* Has the plan predict its step with the newest times. False: it could not, and predicts what it did before. */
bool gmi_tracer_trial_predict(gmi_manager_t *m, variant_t *v);
/* The same. Where another one is predicted to be better by as much as counts
 * in a trial, it takes its place and has to prove itself; failures leave the plan as it is. */
void gmi_tracer_trial_again(gmi_manager_t *m, variant_t *v);
void gmi_tracer_trial_drop(variant_t *v); /* its plan goes, or the one before it is none any more */
/* At the begin of an iteration, when now.step still is the last one's: measures the one before that. The plan before
 * may come back. */
void gmi_tracer_trial_measure(gmi_manager_t *m);

/* tracer/record.c */
void gmi_tracer_canonical(gmi_trace_t *trace);
uint64_t gmi_tracer_expected_peak(const variant_t *v, uint32_t op);
bool gmi_tracer_peaks_vary(const variant_t *v);
bool gmi_tracer_same_op(gmi_manager_t *m, const variant_t *v, uint32_t i);
bool gmi_tracer_only_reads(gmi_manager_t *m, const gmi_trace_t *trace);
/* Takes over an iteration's ranges of arenas that grow, for a variant that it equals. Are they in other chunks? */
bool gmi_tracer_take_ranges(gmi_manager_t *m, variant_t *v);
bool gmi_tracer_same_update(const gmi_trace_update_t *a, const gmi_trace_update_t *b);
void gmi_tracer_choose_active(gmi_manager_t *m, const gmi_trace_op_t *wants_op);
void gmi_tracer_summed(gmi_manager_t *m, const gmi_chunk_t *c);
bool gmi_tracer_timings_reserve(gmi_tracer_t *t, uint32_t count);
/* The time outside the ops of an iteration whose ops are resolved and known, from its begin until now, where the next
 * one begins; 0: not known. Without the device pieces behind the last op and their waits for chunks, where plans have
 * them as stages of the ops' stream. */
uint64_t gmi_tracer_outside(gmi_manager_t *m, uint64_t begin_ns, uint64_t now_ns);

#endif
