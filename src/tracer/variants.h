/* Inside the tracer: variants of iterations, and what its files call of each other.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_VARIANTS_H
#define GMI_VARIANTS_H

#include "base/check.h"
#include "base/nvtx.h"
#include "chunk/cut.h"
#include "chunk/graph.h"
#include "chunk/heap.h"
#include "chunk/residency.h"
#include "core/streams.h"
#include "tracer/timeline.h"
#include "tracer/tracer.h"

enum { NAME_LIMIT = 127, STALLS_LIMIT = 4096, SETTLE_RUNS = 2, HISTORY = 128, NO_VARIANT = 255 };
enum { PAUSE_NS = 50000 }; /* a pause that is shorter is not worth two marks */

typedef struct {
  gmi_trace_t trace;
  gmi_plan_bundle_t bundle; /* bundle.made: there is a plan */
  bool used;
  bool refused;  /* no plan is possible with the budgets there are */
  uint64_t runs; /* iterations that did this */
  uint64_t planned_runs;
  uint64_t last_used; /* iteration number */
} variant_t;

typedef struct { /* an op whose times are still to be read */
  gmi_fence_t begin, end;
  uint64_t begin_ns, end_ns; /* on the caller's thread instead of fences */
  uint64_t stall_ns, unforeseen_ns;
  uint32_t stall_first, stall_count; /* in stalls */
} timing_t;
typedef struct {
  gmi_fence_t before, after;
  bool unforeseen; /* gmi_tracer_pause() */
} stall_t;

typedef struct gmi_tracer {
  pthread_mutex_t touch_lock; /* guards the open op's spans; after the manager's lock */
  gmi_op_names_t *names;

  variant_t variants[GMI_VARIANTS];
  uint32_t active;          /* variant that this iteration follows so far, or GMI_NONE */
  uint32_t entered;         /* variant whose resident set was put in place last */
  uint32_t previous;        /* variant of the last complete iteration */
  uint8_t history[HISTORY]; /* variants of the last iterations, the newest last; NO_VARIANT for one since forgotten */
  uint32_t history_size;
  bool planned;              /* a plan was made: the size of chunks stays from then on */
  bool agrees[GMI_VARIANTS]; /* with this iteration so far */
  bool agreed[GMI_VARIANTS]; /* before the last update was recorded */
  bool departed;
  uint64_t iteration; /* begun so far */
  uint64_t begun_ns;

  gmi_trace_t record;  /* this iteration */
  timing_t *timings;   /* [record.op_capacity] */
  uint64_t *durations; /* [record.op_capacity] compute_ns, UINT64_MAX when not known */
  uint32_t timing_capacity, resolved;
  uint64_t in_ops_ns; /* of the resolved ops, stalls included; UINT64_MAX when one is not known */
  stall_t stalls[STALLS_LIMIT];
  uint32_t stall_count;
  uint32_t updates_checked; /* updates of this iteration */

  bool op_open;
  uint32_t op_stream;
  uint32_t op_index;
  uint64_t predicted_peak;  /* of the open op; UINT64_MAX when none was predicted */
  _Atomic bool record_lost; /* Atomic: memory ran out: this iteration cannot become a variant */
} gmi_tracer_t;

/* tracer/tracer.c */
variant_t *gmi_tracer_active_variant(gmi_tracer_t *t);

/* tracer/follow.c */
void gmi_tracer_publish_plan(gmi_manager_t *m, const variant_t *v);
bool gmi_tracer_plan_with_chunk(gmi_manager_t *m, gmi_trace_t *trace, uint64_t chunk_bytes,
                                gmi_plan_bundle_t *bundle_out);
void gmi_tracer_take_plan(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle);
gemini_status_t gmi_tracer_variant_plan(gmi_manager_t *m, variant_t *v);
void gmi_tracer_enter_plan(gmi_manager_t *m, variant_t *v);
void gmi_tracer_plan_fetch(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece);
void gmi_tracer_plan_after_op(gmi_manager_t *m, variant_t *v, uint32_t op);

/* tracer/record.c */
void gmi_tracer_canonical(gmi_trace_t *trace);
bool gmi_tracer_same_op(const gmi_trace_t *a, const gmi_trace_t *b, uint32_t i);
bool gmi_tracer_same_update(const gmi_trace_update_t *a, const gmi_trace_update_t *b);
void gmi_tracer_choose_active(gmi_manager_t *m, const gmi_trace_op_t *wants_op);
bool gmi_tracer_timings_reserve(gmi_tracer_t *t, uint32_t count);

#endif
