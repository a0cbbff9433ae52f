/* The tracer: iterations, phases and operators; recording, comparing, and carrying out the plan.
 * SPDX-License-Identifier: Apache-2.0 */
#include "tracer/tracer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/nvtx.h"
#include "tracer/timeline.h"

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
  bool planned;              /* a plan was made: the size of windows stays from then on */
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

static variant_t *active_variant(gmi_tracer_t *t) { return t->active == GMI_NONE ? NULL : &t->variants[t->active]; }

gmi_op_names_t *gmi_tracer_names(gmi_manager_t *m) { return m->tracer->names; }

/* ---- open, close */
gemini_status_t gmi_tracer_open(gmi_manager_t *m) {
  gmi_tracer_t *t = calloc(1, sizeof *t);
  if (t) t->names = gmi_op_names_new();
  if (!t || !t->names) {
    free(t);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the tracer");
  }
  t->record.names = t->names;
  pthread_mutex_init(&t->touch_lock, NULL);
  t->active = t->previous = t->entered = GMI_NONE;
  m->tracer = t;
  return GEMINI_OK;
}

static void variant_clear(variant_t *v) {
  gmi_trace_free(&v->trace);
  gmi_plan_bundle_free(&v->bundle);
  memset(v, 0, sizeof *v);
}

void gmi_tracer_close(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  if (!t) return;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) variant_clear(&t->variants[i]);
  gmi_trace_free(&t->record);
  free(t->timings);
  free(t->durations);
  gmi_op_names_free(t->names);
  pthread_mutex_destroy(&t->touch_lock);
  free(t);
  m->tracer = NULL;
}

void gmi_tracer_forget(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  if (!t) return;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) variant_clear(&t->variants[i]);
  t->active = t->previous = t->entered = GMI_NONE;
  t->history_size = 0;
  t->record_lost = m->iteration_open;
  memset(t->agrees, 0, sizeof t->agrees);
}

/* ---- questions */
uint32_t gmi_tracer_op_stream(gmi_manager_t *m) {
  return m->tracer && m->tracer->op_open ? m->tracer->op_stream : GMI_CALLER;
}
const char *gmi_tracer_op_name(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  return t && t->op_open ? t->record.ops[t->op_index].name : NULL;
}
uint64_t gmi_tracer_next_use(gmi_manager_t *m, const gmi_window_t *w) {
  uint64_t now = m->tracer->iteration << 32 | m->tracer->op_index;
  return w->next_use < now ? UINT64_MAX : w->next_use;
}

/* ---- plans */
static void publish_plan(gmi_manager_t *m, const variant_t *v) {
  const gmi_plan_t *p = &v->bundle.plan;
  uint64_t window = v->bundle.input.window_bytes;
  m->stats.predicted_step_ns = v->bundle.made ? p->predicted_ns : 0;
  m->stats.planned_fetch_bytes = v->bundle.made ? p->fetch_count * window : 0;
  m->stats.planned_evict_bytes = v->bundle.made ? p->evict_dirty_count * window : 0;
}

/* The window size again, now that the access order is known. */
static uint64_t search_window(gmi_manager_t *m, const gmi_trace_t *trace) {
  uint64_t nonmodel = 0, count = 0, old = atomic_load(&m->window_bytes);
  gmi_window_use_t *uses = calloc((size_t)trace->span_count + 1, sizeof *uses);
  if (!uses) return old; /* the size there is will do */
  for (uint32_t i = 0; i < trace->op_count; i++) {
    const gmi_trace_op_t *op = &trace->ops[i];
    if (op->nonmodel_peak > nonmodel) nonmodel = op->nonmodel_peak;
    for (uint32_t s = op->span_first; s < op->span_first + op->span_count; s++)
      uses[count++] = (gmi_window_use_t){ ((uint64_t)trace->spans[s].arena << 46) + trace->spans[s].offset,
                                          trace->spans[s].size, i, 0 };
  }
  uint64_t rate = trace->link_bytes_per_s[0];
  if (trace->link_bytes_per_s[1] && trace->link_bytes_per_s[1] < rate) rate = trace->link_bytes_per_s[1];
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_PLAN, 0);
  uint64_t window = count ? gmi_window_search(m, uses, count, nonmodel, rate) : old;
  gmi_wait_end(m, &wait);
  free(uses);
  return window;
}

/* Cuts arenas into windows of another size together with the first plan, which is made before anything is changed.
 * Plans name records of windows, which a new cut replaces: so only while there has been none. False: that is not
 * possible, or there is no such plan; nothing has changed. */
static bool plan_with_window(gmi_manager_t *m, gmi_trace_t *trace, uint64_t window, gmi_plan_bundle_t *bundle_out) {
  gmi_tracer_t *t = m->tracer;
  uint32_t old_shift = m->window_shift, shift = (uint32_t)__builtin_ctzll(window);
  if (shift == old_shift || t->planned || !gmi_recut_possible(m, window) ||
      gmi_plan_bundle_make(m, trace, shift, bundle_out))
    return false;
  gemini_status_t status = gmi_recut(m, window);
  if (status || m->window_shift != shift) {
    if (status) gmi_log(m, GEMINI_LOG_WARNING, "windows stay as they are: %s", gmi_fail_message());
    gmi_plan_bundle_free(bundle_out);
    return false;
  }
  gmi_plan_bundle_bind(m, bundle_out);
  for (uint32_t k = 0; k <= GMI_VARIANTS; k++) {
    gmi_trace_t *other = k < GMI_VARIANTS ? &t->variants[k].trace : trace;
    if (k < GMI_VARIANTS && other == trace) continue;
    for (uint32_t i = 0; i < other->op_count; i++)
      other->ops[i].heap_pages = gmi_trace_pages(other->ops[i].heap_pages, old_shift, shift);
  }
  return true;
}

static void take_plan(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle) {
  v->bundle = *bundle;
  m->tracer->planned = true;
  m->stats.plans++;
  publish_plan(m, v);
}

static gemini_status_t variant_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t bundle;
  gemini_status_t status = gmi_cut(m);
  gmi_trace_measure(m, &v->trace);
  bool made = !status && !m->config.window_bytes && !m->tracer->planned &&
              plan_with_window(m, &v->trace, search_window(m, &v->trace), &bundle);
  if (!status && !made) status = gmi_plan_bundle_make(m, &v->trace, m->window_shift, &bundle);
  gmi_plan_bundle_free(&v->bundle);
  v->refused = status != GEMINI_OK;
  if (m->tracer->entered == (uint32_t)(v - m->tracer->variants)) m->tracer->entered = GMI_NONE;
  if (status) return status;
  take_plan(m, v, &bundle);
  gmi_log(m, GEMINI_LOG_INFO, "plan %llu: %u ops, %llu chunks fetched a step, predicted step %.6f s",
          (unsigned long long)m->stats.plans, v->trace.op_count, (unsigned long long)bundle.plan.fetch_count,
          (double)bundle.plan.predicted_ns * 1e-9);
  return GEMINI_OK;
}

gemini_status_t gmi_tracer_replan(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  gemini_status_t status = GEMINI_OK;
  bool inside = m->iteration_open;
  char message[440] = "";
  int64_t code = 0;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    variant_t *v = &t->variants[i];
    if (!v->used || !(v->bundle.made || v->refused)) continue;
    gemini_status_t made = variant_plan(m, v);
    /* What must work is the step that was run last; another one is refused when it comes. */
    if (!made || (i != t->previous && t->previous != GMI_NONE)) continue;
    status = made;
    code = gmi_fail_code();
    snprintf(message, sizeof message, "%s", gmi_fail_message());
  }
  if (inside && t->active != GMI_NONE && !t->variants[t->active].bundle.made) t->active = GMI_NONE;
  return status ? gmi_fail(status, code, "%s", message) : status; /* not of another one, which failed later */
}

/* An update that has not been queued yet comes before, or a graph's replay: then it is fetched on demand. */
static gemini_status_t fetch_ahead(gmi_manager_t *m, gmi_window_t *w) {
  return w->deferred || w->graph_held ? GEMINI_OK : gmi_window_fetch(m, w, false, GEMINI_REASON_PLAN, 0);
}

/* Brings the device to where the plan's iteration begins: what the plan does not expect leaves, what it expects comes
 * into the free frames, in the order of use. */
static void enter_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t *b = &v->bundle;
  for (uint32_t i = 0; i < b->input.window_count; i++) {
    gmi_window_t *w = b->window_of[i];
    uint32_t word = atomic_load(&w->word);
    if (b->plan.resident_at_start[i] || !(word & GMI_WINDOW_RESIDENT) || (word & GMI_WINDOW_PINS) || w->user_pins)
      continue;
    if (gmi_window_evict(m, w, GEMINI_REASON_PLAN)) gmi_log(m, GEMINI_LOG_WARNING, "plan: %s", gmi_fail_message());
  }
  uint32_t accesses = b->input.ops[b->input.op_count].access_first;
  for (uint32_t k = 0; k < accesses; k++) {
    uint32_t i = b->input.accesses[k].window;
    if (!b->plan.resident_at_start[i]) continue;
    if (fetch_ahead(m, b->window_of[i])) return;
  }
  for (uint32_t i = 0; i < b->input.window_count; i++)
    if (b->plan.resident_at_start[i] && fetch_ahead(m, b->window_of[i])) return;
}

/* The first of an op's moves that belong to the op itself (GMI_NO_PIECE: they come first) or to one of its pieces. */
static uint32_t first_move(const gmi_plan_move_t *moves, uint32_t low, uint32_t high, uint32_t piece) {
  uint64_t wanted = piece == GMI_NO_PIECE ? 0 : (uint64_t)piece + 1;
  while (low < high) {
    uint32_t mid = low + (high - low) / 2;
    uint64_t key = moves[mid].piece == GMI_NO_PIECE ? 0 : (uint64_t)moves[mid].piece + 1;
    if (key < wanted) low = mid + 1;
    else high = mid;
  }
  return low;
}

/* piece: GMI_NO_PIECE for the op itself. */
static void plan_fetch(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece) {
  gmi_plan_bundle_t *b = &v->bundle;
  uint32_t end = b->plan.fetch_first[op + 1];
  for (uint32_t i = first_move(b->plan.fetches, b->plan.fetch_first[op], end, piece); i < end; i++) {
    const gmi_plan_move_t *move = &b->plan.fetches[i];
    if (move->piece != piece) break;
    gemini_status_t status = fetch_ahead(m, b->window_of[move->window]);
    if (status == GEMINI_ERR_OOM_DEVICE) break; /* no frame is free yet: the acquire will fetch it */
    if (status) gmi_log(m, GEMINI_LOG_WARNING, "planned fetch: %s", gmi_fail_message());
  }
}

static void plan_evict(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece) {
  gmi_plan_bundle_t *b = &v->bundle;
  uint32_t end = b->plan.evict_first[op + 1];
  for (uint32_t i = first_move(b->plan.evicts, b->plan.evict_first[op], end, piece); i < end; i++) {
    if (b->plan.evicts[i].piece != piece) break;
    gmi_window_t *w = b->window_of[b->plan.evicts[i].window];
    if ((atomic_load(&w->word) & GMI_WINDOW_PINS) || w->user_pins) continue; /* released later: pressure will find it */
    if (gmi_window_evict(m, w, GEMINI_REASON_PLAN))
      gmi_log(m, GEMINI_LOG_WARNING, "planned eviction: %s", gmi_fail_message());
  }
}

/* Iteration and op, of an op of the plan that runs now; + op_count: of the iteration after it. */
static uint64_t position(const gmi_manager_t *m, const variant_t *v, uint32_t op) {
  uint32_t ops = v->bundle.input.op_count;
  return op < ops ? m->tracer->iteration << 32 | op : (m->tracer->iteration + 1) << 32 | (op - ops);
}

static variant_t *planned_piece(gmi_manager_t *m, uint32_t index, uint32_t *piece) {
  variant_t *v = active_variant(m->tracer);
  if (!v || !v->bundle.made || index >= v->trace.update_count) return NULL;
  *piece += v->bundle.piece_first[index];
  return *piece < v->bundle.piece_first[index + 1] ? v : NULL;
}
void gmi_tracer_piece_begin(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  if (v) plan_fetch(m, v, v->bundle.input.pieces[piece].after_op, piece);
}
void gmi_tracer_piece_end(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  if (v) plan_evict(m, v, v->bundle.input.pieces[piece].after_op, piece);
}
bool gmi_tracer_piece_on_device(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  return v && v->bundle.plan.piece_on_device[piece];
}
uint64_t gmi_tracer_piece_use(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  return v && v->bundle.plan.piece_use[piece] != UINT32_MAX ? position(m, v, v->bundle.plan.piece_use[piece])
                                                            : UINT64_MAX;
}

static void plan_after_op(gmi_manager_t *m, variant_t *v, uint32_t op) {
  gmi_plan_bundle_t *b = &v->bundle;
  for (uint32_t k = b->input.ops[op].access_first; k < b->input.ops[op + 1].access_first; k++) {
    uint32_t next = b->plan.next_use[k];
    b->window_of[b->input.accesses[k].window]->next_use = next == UINT32_MAX ? 0 : position(m, v, next);
  }
  plan_evict(m, v, op, GMI_NO_PIECE);
}

/* ---- recording */
static int by_place(const void *a, const void *b) {
  const gmi_trace_span_t *x = a, *y = b;
  if (x->arena != y->arena) return x->arena < y->arena ? -1 : 1;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  if (x->size != y->size) return x->size < y->size ? -1 : 1;
  return x->mode < y->mode ? -1 : x->mode > y->mode;
}

void gmi_tracer_touch(gmi_manager_t *m, uint32_t store, uint64_t offset, uint64_t size, uint32_t mode) {
  gmi_tracer_t *t = m->tracer;
  pthread_mutex_lock(&t->touch_lock);
  if (t->op_open && !t->record_lost) {
    gmi_trace_span_t *span = gmi_trace_add_span(&t->record);
    if (span) *span = (gmi_trace_span_t){ store, mode, offset, size };
    else t->record_lost = true;
  }
  pthread_mutex_unlock(&t->touch_lock);
}

/* One canonical list: sorted, each range once with all its modes. A range both read and written in one op by separate
 * acquires is read first as far as anybody knows. */
static void canonical(gmi_trace_t *trace) {
  gmi_trace_op_t *op = &trace->ops[trace->op_count - 1];
  gmi_trace_span_t *spans = trace->spans + op->span_first;
  if (op->span_count > 1) qsort(spans, op->span_count, sizeof *spans, by_place);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < op->span_count; i++) {
    gmi_trace_span_t *last = kept ? &spans[kept - 1] : NULL;
    if (last && last->arena == spans[i].arena && last->offset == spans[i].offset && last->size == spans[i].size)
      last->mode |= spans[i].mode;
    else spans[kept++] = spans[i];
  }
  op->span_count = kept;
  trace->span_count = op->span_first + kept;
}

static bool same_op(const gmi_trace_t *a, const gmi_trace_t *b, uint32_t i) {
  const gmi_trace_op_t *x = &a->ops[i], *y = &b->ops[i];
  return x->name == y->name && x->phase == y->phase && x->nonmodel_peak == y->nonmodel_peak &&
         x->span_count == y->span_count &&
         (!x->span_count ||
          !memcmp(a->spans + x->span_first, b->spans + y->span_first, x->span_count * sizeof *a->spans));
}

static bool same_update(const gmi_trace_update_t *a, const gmi_trace_update_t *b) { return !memcmp(a, b, sizeof *a); }

/* The active variant no longer fits: the first other one that agrees so far takes over. wants_op: and whose next op
 * has this name and phase. */
static void choose_active(gmi_manager_t *m, const gmi_trace_op_t *wants_op) {
  gmi_tracer_t *t = m->tracer;
  uint32_t best = GMI_NONE;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    variant_t *v = &t->variants[i];
    if (!v->used || !t->agrees[i]) continue;
    if (wants_op) {
      if (t->op_index >= v->trace.op_count) continue;
      const gmi_trace_op_t *op = &v->trace.ops[t->op_index];
      if (op->name != wants_op->name || op->phase != wants_op->phase) continue;
    }
    if (best == GMI_NONE || v->last_used > t->variants[best].last_used) best = i;
  }
  if (t->active != GMI_NONE && !t->departed) {
    t->departed = true;
    m->stats.departures++;
  }
  t->active = best;
  t->entered = GMI_NONE;
}

static bool timings_reserve(gmi_tracer_t *t, uint32_t count) {
  if (count <= t->timing_capacity) return true;
  uint32_t capacity = t->timing_capacity ? t->timing_capacity * 2 : 256;
  timing_t *timings = realloc(t->timings, capacity * sizeof *timings);
  if (timings) t->timings = timings;
  uint64_t *durations = realloc(t->durations, capacity * sizeof *durations);
  if (durations) t->durations = durations;
  if (!timings || !durations) return false;
  t->timing_capacity = capacity;
  return true;
}

static bool time_of(gmi_manager_t *m, gmi_fence_t fence, uint64_t *ns_out) {
  return m->dev->mark_time(m->dev_self, gmi_fence_stream(fence), gmi_fence_mark(fence), ns_out) == GEMINI_OK;
}

void gmi_tracer_resolve(gmi_manager_t *m, bool block) {
  gmi_tracer_t *t = m->tracer;
  uint32_t ended = t->record.op_count - (t->op_open && t->record.op_count ? 1 : 0);
  for (; t->resolved < ended; t->resolved++) {
    timing_t *k = &t->timings[t->resolved];
    if (k->end && !gmi_fence_reached(m, k->end)) {
      if (!block) return;
      gmi_fence_sync(m, k->end);
    }
    uint64_t begin = k->begin_ns, end = k->end_ns, stall = k->stall_ns, unforeseen = k->unforeseen_ns;
    bool known = !k->end || (time_of(m, k->begin, &begin) && time_of(m, k->end, &end));
    for (uint32_t s = k->stall_first; known && s < k->stall_first + k->stall_count; s++) {
      uint64_t before, after;
      known = time_of(m, t->stalls[s].before, &before) && time_of(m, t->stalls[s].after, &after);
      if (known) *(t->stalls[s].unforeseen ? &unforeseen : &stall) += after - before;
    }
    t->durations[t->resolved] = known ? (end - begin > stall ? end - begin - stall : 1) : UINT64_MAX;
    if (known) m->stats.stall_ns += stall + unforeseen;
    if (!known) t->in_ops_ns = UINT64_MAX;
    else if (t->in_ops_ns != UINT64_MAX) t->in_ops_ns += end - begin;
  }
}

/* Is what stream waits for a stall of the open op? */
static bool is_stall(const gmi_tracer_t *t, uint32_t stream) {
  return t->op_open && t->op_stream == stream && !t->record_lost;
}

static void count_stall(gmi_manager_t *m, stall_t stall) {
  gmi_tracer_t *t = m->tracer;
  timing_t *k = &t->timings[t->op_index];
  if (!k->stall_count++) k->stall_first = t->stall_count;
  t->stalls[t->stall_count++] = stall;
  gmi_timeline_span(m, "wait", "wait for chunk", stall.before, stall.after);
}

gemini_status_t gmi_tracer_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence) {
  gmi_tracer_t *t = m->tracer;
  if (gmi_fence_reached(m, fence) || (stream != GMI_CALLER && gmi_fence_stream(fence) == stream)) return GEMINI_OK;
  bool count = is_stall(t, stream);
  timing_t *k = count ? &t->timings[t->op_index] : NULL;
  if (count && stream == GMI_CALLER) {
    uint64_t begin = m->dev->now(m->dev_self);
    gemini_status_t status = gmi_fence_sync(m, fence);
    k->stall_ns += m->dev->now(m->dev_self) - begin;
    return status;
  }
  stall_t stall = { 0 };
  count = count && t->stall_count < STALLS_LIMIT;
  gemini_status_t status = count ? gmi_fence_now(m, stream, &stall.before) : GEMINI_OK;
  if (!status) status = gmi_fence_wait(m, stream, fence);
  if (!status && count) status = gmi_fence_now(m, stream, &stall.after);
  if (!status && count) count_stall(m, stall);
  return status;
}

void gmi_tracer_pause(gmi_manager_t *m, uint32_t stream, bool foreseen, gmi_pause_t *pause_out) {
  gmi_tracer_t *t = m->tracer;
  *pause_out = (gmi_pause_t){ .foreseen = foreseen };
  if (!is_stall(t, stream) || t->stall_count == STALLS_LIMIT) return;
  if (stream != GMI_CALLER && gmi_fence_now(m, stream, &pause_out->before)) return; /* then it is not counted */
  pause_out->begin_ns = m->dev->now(m->dev_self);
}

void gmi_tracer_resume(gmi_manager_t *m, uint32_t stream, const gmi_pause_t *pause) {
  gmi_tracer_t *t = m->tracer;
  uint64_t now = pause->begin_ns ? m->dev->now(m->dev_self) : 0;
  if (!now || now - pause->begin_ns < PAUSE_NS) return;
  timing_t *k = &t->timings[t->op_index];
  stall_t stall = { .before = pause->before, .unforeseen = !pause->foreseen };
  if (stream == GMI_CALLER) *(pause->foreseen ? &k->stall_ns : &k->unforeseen_ns) += now - pause->begin_ns;
  else if (!gmi_fence_now(m, stream, &stall.after)) count_stall(m, stall);
}

/* ---- brackets */
/* The step that ended took this long from begin to begin; what was not in its ops was outside. */
static void learn_outside(gmi_manager_t *m, uint64_t step_ns) {
  gmi_tracer_t *t = m->tracer;
  variant_t *v = t->previous == GMI_NONE ? NULL : &t->variants[t->previous];
  gmi_tracer_resolve(m, false);
  if (!v || v->last_used != t->iteration || !t->resolved || t->resolved != v->trace.op_count || t->in_ops_ns >= step_ns)
    return;
  uint64_t seen = v->planned_runs ? v->planned_runs : v->runs;
  int64_t weight = seen < 8 ? (int64_t)seen : 8;
  int64_t error = (int64_t)(step_ns - t->in_ops_ns) - (int64_t)v->trace.outside_ns;
  v->trace.outside_ns = (uint64_t)((int64_t)v->trace.outside_ns + error / weight);
}

static void remember(gmi_tracer_t *t, uint32_t index) {
  if (t->history_size == HISTORY) memmove(t->history, t->history + 1, --t->history_size);
  t->history[t->history_size++] = (uint8_t)index;
}

/* The variant to expect: what most often came after iterations like the newest ones, as many of them as possible, if it
 * did so twice at least. Else the one before the newest: what a first interruption interrupted. */
static uint32_t expected_variant(const gmi_tracer_t *t) {
  uint32_t n = t->history_size, alike[HISTORY], longest = 0;
  const uint8_t *history = t->history;
  for (uint32_t p = 1; p < n; p++) { /* newest iterations that are those before p */
    for (alike[p] = 0; alike[p] < p && history[p - 1 - alike[p]] == history[n - 1 - alike[p]]; alike[p]++) {
    }
    if (alike[p] > longest) longest = alike[p];
  }
  for (; longest > 0; longest--) {
    uint32_t counts[GMI_VARIANTS] = { 0 }, best = GMI_NONE;
    for (uint32_t p = 1; p < n; p++)
      if (alike[p] >= longest && history[p] != NO_VARIANT) counts[history[p]]++;
    for (uint32_t i = 0; i < GMI_VARIANTS; i++)
      if (counts[i] > 1 && (best == GMI_NONE || counts[i] > counts[best])) best = i;
    if (best != GMI_NONE) return best;
  }
  return n > 1 && history[n - 2] != NO_VARIANT ? history[n - 2] : t->previous;
}

static gemini_status_t iteration_begin(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  if (m->iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "an iteration is open already");
  gemini_status_t status = gmi_cut(m);
  if (status) return status;
  uint64_t now = m->dev->now(m->dev_self);
  if (t->begun_ns) {
    m->stats.measured_step_ns = now - t->begun_ns;
    learn_outside(m, now - t->begun_ns);
  }
  t->begun_ns = now;
  m->iteration_open = true;
  t->iteration++;
  gmi_trace_clear(&t->record);
  t->resolved = t->stall_count = t->op_index = 0;
  t->in_ops_ns = 0;
  t->record_lost = t->departed = false;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) t->agrees[i] = t->variants[i].used;
  t->active = expected_variant(t);
  variant_t *v = active_variant(t);
  if (v && v->bundle.made) {
    publish_plan(m, v);
    if (t->entered != t->active) enter_plan(m, v);
    t->entered = t->active;
  }
  return GEMINI_OK;
}

static gemini_status_t op_begin(gmi_manager_t *m, const char *name, gemini_stream_t stream) {
  gmi_tracer_t *t = m->tracer;
  uint32_t s;
  bool captures = false;
  gemini_status_t status = GEMINI_OK;
  if (atomic_load(&m->graph_streams)) {
    status = gmi_stream_resolve(m, stream, &s);
    if (!status) status = gmi_graph_captures(m, s, &captures);
    if (status || captures) return status ? status : gmi_graph_op_begin(m, name);
  }
  if (!m->iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no iteration is open");
  if (t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open already", gmi_tracer_op_name(m));
  if (!name) return gmi_fail(GEMINI_ERR_INVALID, 0, "name is NULL");
  size_t length = strnlen(name, NAME_LIMIT + 1);
  if (!length || length > NAME_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "an operator's name must have 1 to %d bytes", NAME_LIMIT);
  status = gmi_stream_resolve(m, stream, &s);
  if (status) return status;
  variant_t *v = active_variant(t);
  const char *expected = v && t->op_index < v->trace.op_count ? v->trace.ops[t->op_index].name : NULL;
  const char *kept =
      expected && !strcmp(name, expected) ? gmi_op_name_again(expected) : gmi_op_name_take(t->names, name);
  pthread_mutex_lock(&t->touch_lock);
  gmi_trace_op_t *op = timings_reserve(t, t->record.op_count + 1) ? gmi_trace_add_op(&t->record) : NULL;
  pthread_mutex_unlock(&t->touch_lock);
  if (!op || !kept) {
    if (op) t->record.op_count--;
    if (kept) gmi_op_name_drop(t->names, kept);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to record operator %s", name);
  }
  t->op_index = t->record.op_count - 1;
  op->name = kept;
  op->phase = atomic_load(&m->phase);
  timing_t *k = &t->timings[t->op_index];
  memset(k, 0, sizeof *k);
  if (s == GMI_CALLER) k->begin_ns = m->dev->now(m->dev_self);
  else status = gmi_fence_now(m, s, &k->begin);
  if (status) {
    t->record.op_count--;
    gmi_op_name_drop(t->names, kept);
    return status;
  }
  if (v && (t->op_index >= v->trace.op_count || v->trace.ops[t->op_index].name != kept ||
            v->trace.ops[t->op_index].phase != op->phase)) {
    t->agrees[t->active] = false;
    choose_active(m, op);
    v = active_variant(t);
  }
  t->op_stream = s;
  m->nonmodel_peak_op = m->heap ? gmi_heap_bytes_used(m->heap) : 0;
  m->heap_pages_peak_op = m->heap ? (uint32_t)gmi_heap_pages_used(m->heap) : 0;
  t->predicted_peak = v && v->bundle.made ? v->trace.ops[t->op_index].nonmodel_peak : UINT64_MAX;
  pthread_mutex_lock(&t->touch_lock);
  t->op_open = true;
  pthread_mutex_unlock(&t->touch_lock);
  atomic_store(&m->op_serial, ++m->op_serial_next);
  gmi_reap(m);
  gmi_nvtx_push(name);
  if (v && v->bundle.made) plan_fetch(m, v, t->op_index, GMI_NO_PIECE);
  return GEMINI_OK;
}

static gemini_status_t op_end(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  if (gmi_graph_op_end(m)) return GEMINI_OK;
  if (!t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no operator is open");
  timing_t *k = &t->timings[t->op_index];
  gemini_status_t status = GEMINI_OK;
  if (t->op_stream == GMI_CALLER) k->end_ns = m->dev->now(m->dev_self);
  else status = gmi_fence_now(m, t->op_stream, &k->end);
  if (status) return status;
  atomic_store(&m->op_serial, 0);
  pthread_mutex_lock(&t->touch_lock);
  t->op_open = false;
  canonical(&t->record);
  pthread_mutex_unlock(&t->touch_lock);
  gmi_trace_op_t *op = &t->record.ops[t->op_index];
  op->nonmodel_peak = m->nonmodel_peak_op;
  op->heap_pages = m->heap_pages_peak_op;
  if (t->predicted_peak != UINT64_MAX) {
    uint64_t error = t->predicted_peak > op->nonmodel_peak ? t->predicted_peak - op->nonmodel_peak
                                                           : op->nonmodel_peak - t->predicted_peak;
    if (error > m->stats.op_peak_error_bytes) m->stats.op_peak_error_bytes = error;
  }
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    gmi_trace_t *other = &t->variants[i].trace;
    if (t->agrees[i]) t->agrees[i] = t->op_index < other->op_count && same_op(&t->record, other, t->op_index);
  }
  if (t->active != GMI_NONE && !t->agrees[t->active]) choose_active(m, NULL);
  variant_t *v = active_variant(t);
  if (v && v->bundle.made) plan_after_op(m, v, t->op_index);
  const char *name = op->name;
  if (k->end) gmi_timeline_span(m, "op", name, k->begin, k->end);
  else gmi_timeline_span_ns(m, "op", name, k->begin_ns, k->end_ns);
  gmi_nvtx_pop();
  t->op_index++;
  gmi_tracer_resolve(m, false);
  gmi_timeline_poll(m);
  return GEMINI_OK;
}

void gmi_tracer_update(gmi_manager_t *m, const gmi_trace_update_t *update, uint32_t *index_out) {
  gmi_tracer_t *t = m->tracer;
  *index_out = GMI_NONE;
  if (!m->iteration_open || !t->record.op_count) return;
  gmi_trace_update_t *record = gmi_trace_add_update(&t->record);
  if (!record) {
    t->record_lost = true;
    return;
  }
  *record = *update;
  record->after_op = t->record.op_count;
  uint32_t index = t->record.update_count - 1;
  memcpy(t->agreed, t->agrees, sizeof t->agreed);
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    gmi_trace_t *other = &t->variants[i].trace;
    if (t->agrees[i]) t->agrees[i] = index < other->update_count && same_update(record, &other->updates[index]);
  }
  if (t->active != GMI_NONE && !t->agrees[t->active]) choose_active(m, NULL);
  *index_out = index;
}

void gmi_tracer_update_refused(gmi_manager_t *m, uint32_t index) {
  gmi_tracer_t *t = m->tracer;
  if (index == GMI_NONE) return;
  t->record.update_count--;
  memcpy(t->agrees, t->agreed, sizeof t->agrees); /* what took over meanwhile stays active: it agreed, too */
}

/* Newest op times into the variant; the first iterations weigh as much as they are, later ones an eighth. Times of
 * warm-up, with its first touches and its waits in other places, are forgotten when the first planned iteration
 * ends. */
static void learn_times(gmi_tracer_t *t, variant_t *v) {
  if (v->bundle.made && !v->planned_runs && t->resolved == v->trace.op_count)
    for (uint32_t i = 0; i < v->trace.op_count; i++) v->trace.ops[i].samples = 0;
  for (uint32_t i = 0; i < t->resolved && i < v->trace.op_count; i++) {
    if (t->durations[i] == UINT64_MAX) continue;
    gmi_trace_op_t *op = &v->trace.ops[i];
    if (t->record.ops[i].heap_pages > op->heap_pages) op->heap_pages = t->record.ops[i].heap_pages;
    op->samples++;
    int64_t weight = op->samples < 8 ? op->samples : 8;
    op->compute_ns =
        (uint64_t)((int64_t)op->compute_ns + ((int64_t)t->durations[i] - (int64_t)op->compute_ns) / weight);
  }
}

static uint32_t free_variant(gmi_tracer_t *t) {
  uint32_t oldest = 0;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    if (!t->variants[i].used) return i;
    if (t->variants[i].last_used < t->variants[oldest].last_used) oldest = i;
  }
  for (uint32_t i = 0; i < t->history_size; i++)
    if (t->history[i] == oldest) t->history[i] = NO_VARIANT;
  if (t->entered == oldest) t->entered = GMI_NONE;
  if (t->previous == oldest) t->previous = GMI_NONE;
  variant_clear(&t->variants[oldest]);
  return oldest;
}

static void add_variant(gmi_manager_t *m, uint32_t *index_out) {
  gmi_tracer_t *t = m->tracer;
  uint32_t index = free_variant(t);
  variant_t *v = &t->variants[index];
  variant_clear(v);
  v->used = true;
  v->trace = t->record;
  t->record = (gmi_trace_t){ .names = t->names };
  for (uint32_t i = 0; i < v->trace.op_count; i++) { /* same number of ops as resolved() saw */
    v->trace.ops[i].samples = i < t->resolved && t->durations[i] != UINT64_MAX;
    v->trace.ops[i].compute_ns = v->trace.ops[i].samples ? t->durations[i] : 1;
  }
  *index_out = index;
  (void)m;
}

static gemini_status_t iteration_end(gmi_manager_t *m) {
  gmi_tracer_t *t = m->tracer;
  if (!m->iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no iteration is open");
  if (t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open", gmi_tracer_op_name(m));
  uint64_t ended = m->stats.iterations + 1;
  bool warm = ended >= m->config.warmup_iterations;
  gmi_tracer_resolve(m, ended <= m->config.warmup_iterations || t->active == GMI_NONE);
  gmi_reap(m);
  m->iteration_open = false;
  m->stats.iterations = ended;
  m->stats.measured_step_ns = m->dev->now(m->dev_self) - t->begun_ns;
  atomic_store(&m->phase, GEMINI_PHASE_NONE);
  variant_t *v = active_variant(t);
  bool whole = v && t->record.op_count == v->trace.op_count && t->record.update_count == v->trace.update_count;
  uint32_t index = t->active;
  if (!whole) {
    if (v && !t->departed) m->stats.departures++;
    t->entered = GMI_NONE;
    index = GMI_NONE;
    for (uint32_t i = 0; i < GMI_VARIANTS; i++) { /* it may be a shorter one that was known */
      gmi_trace_t *other = &t->variants[i].trace;
      if (t->variants[i].used && t->agrees[i] && other->op_count == t->record.op_count &&
          other->update_count == t->record.update_count)
        index = i;
    }
    if (index == GMI_NONE && (t->record_lost || !t->record.op_count)) return GEMINI_OK;
    if (index == GMI_NONE) add_variant(m, &index);
    else learn_times(t, &t->variants[index]);
    v = &t->variants[index];
  } else {
    learn_times(t, v);
    if (v->bundle.made && !t->departed) {
      m->stats.planned_iterations++;
      v->planned_runs++;
    }
  }
  v->runs++;
  v->last_used = t->iteration;
  remember(t, index);
  t->previous = index;
  if (!warm) return GEMINI_OK;
  if (!v->bundle.made && !v->refused) return variant_plan(m, v);
  /* Times measured under a plan differ from those of warm-up: plan once more with them, then only predict anew. */
  if (v->bundle.made && whole && v->planned_runs == SETTLE_RUNS) return variant_plan(m, v);
  if (v->bundle.made && whole && v->planned_runs > SETTLE_RUNS && (v->planned_runs & (v->planned_runs - 1)) == 0) {
    gmi_trace_measure(m, &v->trace);
    gmi_plan_bundle_times(m, &v->trace, &v->bundle);
    if (gmi_plan_simulate(&v->bundle.input, &v->bundle.plan) == GEMINI_OK) publish_plan(m, v);
  }
  return GEMINI_OK;
}

static gemini_status_t phase_set(gmi_manager_t *m, uint32_t phase) {
  if (phase > GEMINI_PHASE_UPDATE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "phase is %u, the last one is %d", phase, GEMINI_PHASE_UPDATE);
  if (m->tracer->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open", gmi_tracer_op_name(m));
  atomic_store(&m->phase, phase);
  return GEMINI_OK;
}

gemini_status_t gemini_iteration_begin(gemini_manager_t mgr) { API_LOCKED(iteration_begin(m)); }
gemini_status_t gemini_iteration_end(gemini_manager_t mgr) { API_LOCKED(iteration_end(m)); }
gemini_status_t gemini_phase_set(gemini_manager_t mgr, uint32_t phase) { API_LOCKED(phase_set(m, phase)); }
gemini_status_t gemini_op_begin(gemini_manager_t mgr, const char *name, gemini_stream_t stream) {
  API_LOCKED(op_begin(m, name, stream));
}
gemini_status_t gemini_op_end(gemini_manager_t mgr) { API_LOCKED(op_end(m)); }

/* ---- trace files and the plan in words */
static gemini_status_t trace_save(gmi_manager_t *m, const char *path) {
  gmi_tracer_t *t = m->tracer;
  if (!path) return gmi_fail(GEMINI_ERR_INVALID, 0, "path is NULL");
  if (t->previous == GMI_NONE) return gmi_fail(GEMINI_ERR_STATE, 0, "no complete iteration has been recorded");
  return gmi_trace_write(m, &t->variants[t->previous].trace, path);
}
gemini_status_t gemini_trace_save(gemini_manager_t mgr, const char *path) { API_LOCKED(trace_save(m, path)); }

static gemini_status_t trace_load(gmi_manager_t *m, const char *path) {
  gmi_tracer_t *t = m->tracer;
  if (!path) return gmi_fail(GEMINI_ERR_INVALID, 0, "path is NULL");
  if (m->iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "an iteration is open");
  variant_t loaded = { .used = true };
  gemini_status_t status = gmi_cut(m);
  if (!status) status = gmi_trace_read(m, &loaded.trace, path);
  if (status) return status;
  uint64_t window = loaded.trace.window_bytes;
  if (!window || !plan_with_window(m, &loaded.trace, window, &loaded.bundle))
    status = gmi_plan_bundle_make(m, &loaded.trace, m->window_shift, &loaded.bundle);
  if (status == GEMINI_ERR_INVALID)
    status =
        gmi_fail(GEMINI_ERR_FORMAT, 0, "trace %s: no plan can be made of it: its times or counts are too large", path);
  if (status) {
    gmi_trace_free(&loaded.trace);
    return status;
  }
  uint32_t index = free_variant(t);
  variant_clear(&t->variants[index]);
  t->variants[index] = loaded;
  remember(t, index);
  t->previous = index;
  take_plan(m, &t->variants[index], &loaded.bundle);
  return GEMINI_OK;
}
gemini_status_t gemini_trace_load(gemini_manager_t mgr, const char *path) { API_LOCKED(trace_load(m, path)); }

static gemini_status_t plan_explain(gmi_manager_t *m, char *text_out, uint64_t size_bytes, uint64_t *length_out) {
  gmi_tracer_t *t = m->tracer;
  if (!text_out && size_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "text_out is NULL but size_bytes is %llu", (unsigned long long)size_bytes);
  variant_t *v = t->previous == GMI_NONE ? NULL : &t->variants[t->previous];
  uint64_t length;
  if (!v || !v->bundle.made) {
    const char *none = v && v->refused
                           ? "No plan: an operator's working set does not fit; everything is served on demand.\n"
                           : "No plan yet: everything is served on demand while the first iterations are recorded.\n";
    length = strlen(none);
    if (size_bytes) snprintf(text_out, size_bytes, "%s", none);
  } else {
    const char **names = calloc(v->trace.op_count + 1, sizeof *names);
    if (!names) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to explain the plan");
    for (uint32_t i = 0; i < v->trace.op_count; i++) names[i] = v->trace.ops[i].name;
    length = gmi_plan_explain(&v->bundle.input, &v->bundle.plan, names, text_out, size_bytes);
    free(names);
  }
  if (length_out) *length_out = length;
  return GEMINI_OK;
}
gemini_status_t gemini_plan_explain(gemini_manager_t mgr, char *text_out, uint64_t size_bytes, uint64_t *length_out) {
  API_LOCKED(plan_explain(m, text_out, size_bytes, length_out));
}

/* ---- what chunks and streams report and ask (core/events.h) */
static void stream_ends(gmi_manager_t *m) { gmi_tracer_resolve(m, true); }

const gmi_events_t gmi_tracer_events = {
  .touched = gmi_tracer_touch,
  .pause_begins = gmi_tracer_pause,
  .pause_ends = gmi_tracer_resume,
  .stream_waits = gmi_tracer_wait,
  .stream_ends = stream_ends,
  .arenas_change = gmi_tracer_forget,
  .budgets_change = gmi_tracer_replan,
  .chunk_copied = gmi_timeline_copy,
  .chunk_transferred = gmi_timeline_transfer,
  .span_queued = gmi_timeline_span,
  .counters_change = gmi_timeline_counters,
  .update_comes = gmi_tracer_update,
  .update_refused = gmi_tracer_update_refused,
  .piece_begins = gmi_tracer_piece_begin,
  .piece_ends = gmi_tracer_piece_end,
};
const gmi_advice_t gmi_tracer_advice = {
  .op_name = gmi_tracer_op_name,
  .next_use = gmi_tracer_next_use,
  .piece_on_device = gmi_tracer_piece_on_device,
  .piece_use = gmi_tracer_piece_use,
};
