/* The tracer's brackets of iterations and phases. Records and compares iterations, chooses the variant to follow,
 * decides when to plan, and implements the public functions gemini_iteration_*(), gemini_phase_set(), gemini_trace_*()
 * and gemini_plan_explain(). Ops are in ops.c. Lower modules call it through the tables at the end of this file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An iteration: iteration_begin() predicts the variant and establishes its resident set. op_begin() records the op
 * and issues the plan's fetches; op_end() compares the op with all variants that agree so far and issues the plan's
 * evictions. iteration_end() stores the record as a new variant or updates the times of a known one, and makes
 * plans. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/host.h"
#include "core/workers.h"
#include "gemini/hook.h"
#include "tracer/variants.h"

variant_t *gmi_tracer_active_variant(gmi_tracer_t *t) { return t->active == GMI_NONE ? NULL : &t->variants[t->active]; }

gmi_op_names_t *gmi_tracer_names(gmi_manager_t *m) { return m->trace.tracer->names; }

/* ---- open, close */
gemini_status_t gmi_tracer_open(gmi_manager_t *m) {
  gmi_tracer_t *t = calloc(1, sizeof *t);
  if (t) t->names = gmi_op_names_new();
  if (!t || !t->names || gmi_gathers_open(&t->gathers)) {
    if (t && t->names) gmi_op_names_free(t->names);
    free(t);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the tracer");
  }
  t->record.names = t->names;
  pthread_mutex_init(&t->touch_lock, NULL);
  t->active = t->previous = t->entered = t->now.due.variant = GMI_NONE;
  m->trace.tracer = t;
  return GEMINI_OK;
}

static void variant_clear(variant_t *v) {
  gmi_trace_free(&v->trace);
  gmi_plan_bundle_free(&v->bundle);
  gmi_tracer_trial_drop(v);
  memset(v, 0, sizeof *v);
}

void gmi_tracer_close(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!t) return;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) variant_clear(&t->variants[i]);
  gmi_trace_free(&t->record);
  free(t->timings);
  free(t->durations);
  free(t->uses.list);
  gmi_op_names_free(t->names);
  gmi_gathers_close(t->gathers);
  pthread_mutex_destroy(&t->touch_lock);
  free(t);
  m->trace.tracer = NULL;
}

void gmi_tracer_forget(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!t) return;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) variant_clear(&t->variants[i]);
  pthread_mutex_lock(&t->touch_lock); /* an op may be open */
  gmi_gathers_forget(t->gathers);
  pthread_mutex_unlock(&t->touch_lock);
  t->active = t->previous = t->entered = t->now.due.variant = GMI_NONE;
  t->history.count = 0;
  t->record_lost = m->bracket.iteration_open;
  memset(t->agrees, 0, sizeof t->agrees);
}

/* ---- brackets */
uint64_t gmi_times_median(const uint64_t *ns, uint32_t count) {
  uint64_t sorted[GMI_TIMES];
  for (uint32_t i = 0; i < count; i++) {
    uint32_t at = i;
    for (; at > 0 && sorted[at - 1] > ns[i]; at--) sorted[at] = sorted[at - 1];
    sorted[at] = ns[i];
  }
  return count ? sorted[(count - 1) / 2] : 0;
}
uint64_t gmi_times_add(gmi_times_t *times, uint64_t ns) {
  times->ns[times->count++ % GMI_TIMES] = ns;
  return gmi_times_median(times->ns, times->count < GMI_TIMES ? times->count : GMI_TIMES);
}

/* Learns the times of the last iteration's ops that have not been learned yet. The times of warm-up, which include
 * first touches and other waits, are dropped with the first planned iteration. */
static void learn_times(gmi_tracer_t *t, variant_t *v) {
  for (; t->now.learned < t->resolved && t->now.learned < v->trace.op_count; t->now.learned++) {
    const uint64_t duration = t->durations[t->now.learned];
    gmi_trace_op_t *op = &v->trace.ops[t->now.learned];
    if (duration == UINT64_MAX) continue;
    if (t->now.first_planned) op->times.count = 0;
    op->compute_ns = gmi_times_add(&op->times, duration);
  }
}

/* Learns what the last iteration's end was too early for, as the next one begins: the times of ops that the device had
 * not ended then, as the caller's thread was ahead of it; and the time outside the ops. What that was before there was
 * a plan does not count any more. */
static void learn_late(gmi_manager_t *m, uint64_t now_ns) {
  gmi_tracer_t *t = m->trace.tracer;
  variant_t *v = t->previous == GMI_NONE ? NULL : &t->variants[t->previous];
  gmi_tracer_resolve(m, false);
  if (!v || v->last_used != t->iteration) return;
  if (t->record.op_count == v->trace.op_count) learn_times(t, v);
  if (!t->resolved || t->resolved != v->trace.op_count) return;
  const uint64_t outside_ns = gmi_tracer_outside(m, t->begun_ns, now_ns);
  if (!outside_ns) return;
  if (v->planned_runs == 1) v->trace.outside.count = 0;
  v->trace.outside_ns = gmi_times_add(&v->trace.outside, outside_ns);
}

/* May an iteration with this label follow the variant? */
static bool has_label(const variant_t *v, uint64_t label) { return v->used && (v->any_label || v->label == label); }

/* The variant with this label that was used last, or GMI_NONE. */
static uint32_t last_used(const gmi_tracer_t *t, uint64_t label) {
  uint32_t last = GMI_NONE;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++)
    if (has_label(&t->variants[i], label) &&
        (last == GMI_NONE || t->variants[i].last_used > t->variants[last].last_used))
      last = i;
  return last;
}

/* Predicts the variant of the next iteration, which has this label, from the iterations of that label. If their history
 * says nothing, returns the variant before the newest one: after a first interruption (an evaluation, say) the
 * interrupted kind is expected to continue. Variants that only read do not interrupt each other: another batch, say, is
 * expected to come again. */
static uint32_t expected_variant(const gmi_tracer_t *t, uint64_t label) {
  uint32_t n = 0;
  uint8_t past[GMI_HISTORY];
  for (uint32_t i = 0; i < t->history.count; i++)
    if (has_label(&t->variants[t->history.past[i]], label)) past[n++] = t->history.past[i];
  const uint32_t next = gmi_history_next(past, n);
  if (next != GMI_NONE) return next;
  if (n < 2) return last_used(t, label);
  const bool both_read = t->variants[past[n - 1]].reads_only && t->variants[past[n - 2]].reads_only;
  return past[n - (both_read ? 1 : 2)];
}

static gemini_status_t iteration_begin(gmi_manager_t *m, uint64_t label) {
  gmi_tracer_t *t = m->trace.tracer;
  if (m->bracket.iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "an iteration is open already");
  gemini_status_t status = gmi_cut(m);
  if (!status) status = gmi_gathered_leave(m, true);
  if (status) return status;
  uint64_t now = m->device.ops->now(m->device.self);
  if (t->begun_ns) {
    m->stats.measured_step_ns = now - t->begun_ns;
    learn_late(m, now);
  }
  gmi_tracer_trial_measure(m);
  t->begun_ns = now;
  m->bracket.iteration_open = true;
  if (atomic_load(&m->cut.chunk_bytes)) gmi_host_iteration(m);
  gmi_workers_iteration(m);
  t->iteration++;
  gmi_trace_clear(&t->record);
  t->resolved = t->stall_count = t->op_index = 0;
  t->now.committed = m->stats.committed_elements;
  t->now.learned = t->now.chosen_ops = t->now.stalls_read = 0;
  t->now.first_planned = t->now.regrown = t->now.compacted = false;
  t->in_ops_ns = t->now.ended_ns = t->now.pieces_ns = 0;
  gmi_gathers_begin(m, t->gathers);
  t->record_lost = t->departed = false;
  t->now.label = label;
  t->peak.slack = (uint64_t)gmi_frames_of(m, gmi_frame_bytes(m)) * gmi_frame_bytes(m) / SLACK_SHARE;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) t->agrees[i] = has_label(&t->variants[i], label);
  t->active = expected_variant(t, label);
  variant_t *v = gmi_tracer_active_variant(t);
  if (v && v->bundle.made) {
    gmi_tracer_publish_plan(m, v);
    gmi_tracer_plan_begin(m, v);
    if (t->entered != t->active) gmi_tracer_enter_plan(m, v);
    t->entered = t->active;
  }
  return GEMINI_OK;
}

void gmi_tracer_compare_update(gmi_manager_t *m, uint32_t index) {
  gmi_tracer_t *t = m->trace.tracer;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    const gmi_trace_t *other = &t->variants[i].trace;
    if (t->agrees[i])
      t->agrees[i] =
          index < other->update_count && gmi_tracer_same_update(&t->record.updates[index], &other->updates[index]);
  }
  if (t->active != GMI_NONE && !t->agrees[t->active]) gmi_tracer_choose_active(m, NULL);
}

/* Records an update that is about to be accepted, and compares it like an op. agreed keeps the state before, for
 * gmi_tracer_update_refused(). */
void gmi_tracer_update(gmi_manager_t *m, const gmi_trace_update_t *update, uint32_t *index_out) {
  gmi_tracer_t *t = m->trace.tracer;
  *index_out = GMI_NONE;
  if (!m->bracket.iteration_open || !gmi_tracer_ops(t)) return;
  gmi_trace_update_t *record = gmi_trace_add_update(&t->record);
  if (!record) {
    t->record_lost = true;
    return;
  }
  *record = *update;
  record->after_op = gmi_tracer_ops(t);
  uint32_t index = t->record.update_count - 1;
  memcpy(t->agreed, t->agrees, sizeof t->agreed);
  gmi_tracer_compare_update(m, index);
  *index_out = index;
}

void gmi_tracer_update_refused(gmi_manager_t *m, uint32_t index) {
  gmi_tracer_t *t = m->trace.tracer;
  if (index == GMI_NONE) return;
  t->record.update_count--;
  /* a variant that became active through the refused update stays active: it agreed before it, too */
  memcpy(t->agrees, t->agreed, sizeof t->agrees);
}

/* Updates the variant's frames with those of this iteration: the peaks, and what the gathers of its kind take; the
 * ranges of arenas that grow; and the times of its ops, as far as they are known. The label is this iteration's. */
static void learn_iteration(gmi_manager_t *m, variant_t *v) {
  gmi_tracer_t *t = m->trace.tracer;
  t->now.first_planned = v->bundle.made && !v->planned_runs;
  v->label = t->now.label;
  v->any_label = false;
  for (uint32_t i = 0; i < v->trace.op_count && i < t->record.op_count; i++) {
    gmi_trace_op_t *op = &v->trace.ops[i];
    const gmi_trace_op_t *now = &t->record.ops[i];
    op->gathered = now->gathered;
    if (t->now.compacted) {
      op->nonmodel_peak = op->nonmodel_least = now->nonmodel_peak;
      op->heap_pages = now->heap_pages, op->all_pages = now->all_pages;
      continue;
    }
    if (now->heap_pages > op->heap_pages) op->heap_pages = now->heap_pages, v->grown_run = v->runs;
    if (!gmi_tracer_peaks_vary(v)) continue;
    if (now->nonmodel_peak > op->nonmodel_peak) op->nonmodel_peak = now->nonmodel_peak;
    if (now->nonmodel_least < op->nonmodel_least) op->nonmodel_least = now->nonmodel_least;
  }
  t->now.regrown = gmi_tracer_take_ranges(m, v);
  learn_times(t, v);
  gmi_tracer_learn_chosen(t, v);
}

/* Learns whether steps take over what was computed ahead. A plan for it is made after an iteration that did, and
 * another one after several that did not, though they could have. Each time that this happens, it takes longer until
 * plans are made for it again. */
static void learn_ahead(gmi_manager_t *m, variant_t *v) {
  const gmi_tracer_t *t = m->trace.tracer;
  if (m->stats.committed_elements > t->now.committed) {
    v->ahead.taken++;
    v->ahead.missed = 0;
    if (v->ahead.taken >= UINT32_C(1) << v->ahead.doubt) v->trace.ahead = true;
  } else if (!v->bundle.ahead || v->bundle.plans_ahead) {
    v->ahead.taken = 0;
    if (++v->ahead.missed < AHEAD_PATIENCE || !v->trace.ahead) return;
    v->trace.ahead = false;
    if (v->ahead.doubt < AHEAD_DOUBTS) v->ahead.doubt++;
  }
}

/* Returns an unused variant, or forgets the one used least recently. */
static uint32_t free_variant(gmi_tracer_t *t) {
  uint32_t oldest = 0;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    if (!t->variants[i].used) return i;
    if (t->variants[i].last_used < t->variants[oldest].last_used) oldest = i;
  }
  gmi_history_forget(&t->history, oldest);
  if (t->entered == oldest) t->entered = GMI_NONE;
  if (t->previous == oldest) t->previous = GMI_NONE;
  variant_clear(&t->variants[oldest]);
  return oldest;
}

/* Do the newest peaks of a variant whose peaks vary need more pages than its plan leaves them? If it only reads, and
 * they grow: more than half of the room that the plan left for that? */
static bool has_outgrown_plan(const variant_t *v) {
  const gmi_plan_input_t *input = &v->bundle.input;
  const uint32_t ahead = (v->trace.headroom + 1) / 2;
  for (uint32_t i = 0; gmi_tracer_peaks_vary(v) && v->bundle.made && i < v->trace.op_count; i++) {
    const uint64_t pages = v->trace.ops[i].heap_pages;
    if (!v->reads_only ? pages + input->chunk_count > input->frame_count : pages + ahead > input->ops[i].heap_frames)
      return true;
  }
  return false;
}

/* Has a plan left frames free for peaks that no longer grow? */
static bool has_stopped_growing(const variant_t *v) {
  const uint32_t shift = v->growths < 16 ? v->growths : 16;
  return v->bundle.made && v->trace.headroom && v->runs - v->grown_run >= (uint64_t)STEADY_RUNS << shift;
}

/* Plans a variant anew whose peaks have grown beyond its plan. As they are expected to go on, the plan leaves some
 * frames free for that, so that plans are made once for many iterations. */
static gemini_status_t plan_with_headroom(gmi_manager_t *m, variant_t *v) {
  const uint32_t share = gmi_frames_of(m, gmi_frame_bytes(m)) / SLACK_SHARE;
  v->growths += !v->trace.headroom && v->planned_runs > STEADY_RUNS;
  v->trace.headroom = share ? share : 1;
  gemini_status_t status = gmi_tracer_variant_plan(m, v);
  if (status != GEMINI_ERR_OOM_DEVICE) return status;
  v->trace.headroom = 0;
  return gmi_tracer_variant_plan(m, v);
}

/* Turns the record of this iteration into a new variant. Its ops have the times of this iteration; 1 ns stands for
 * an unknown one. */
static void add_variant(gmi_manager_t *m, uint32_t *index_out) {
  gmi_tracer_t *t = m->trace.tracer;
  uint32_t index = free_variant(t);
  variant_t *v = &t->variants[index];
  variant_clear(v);
  v->used = true;
  v->trace = t->record;
  v->label = t->now.label;
  v->reads_only = gmi_tracer_only_reads(m, &v->trace);
  t->record = (gmi_trace_t){ .names = t->names };
  /* the trace has the ops of the record, to which resolved and durations belong */
  for (uint32_t i = 0; i < v->trace.op_count; i++) {
    const bool known = i < t->resolved && t->durations[i] != UINT64_MAX;
    v->trace.ops[i].compute_ns = known ? gmi_times_add(&v->trace.ops[i].times, t->durations[i]) : 1;
  }
  *index_out = index;
}

/* Gives the record the times that a plan of it needs: the variant's if the iteration followed it to the end, else its
 * own; 1 ns stands for an unknown one. */
static void time_record(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  const variant_t *v = gmi_tracer_active_variant(t);
  const bool whole = v && t->record.op_count == v->trace.op_count && t->record.update_count == v->trace.update_count;
  gmi_tracer_resolve(m, true);
  for (uint32_t i = 0; i < t->record.op_count; i++) {
    const bool known = i < t->resolved && t->durations[i] != UINT64_MAX;
    t->record.ops[i].compute_ns = whole ? v->trace.ops[i].compute_ns : known ? t->durations[i] : 1;
  }
  t->record.outside_ns = whole ? v->trace.outside_ns : 0;
  gmi_trace_measure(m, &t->record);
}

/* What is live at the end of an iteration is live in the next one, too: an allocator above the library, such as
 * PyTorch's, keeps what it got in the first iteration. The peaks of the first operators would not know of it. If it has
 * compacted what it has, all peaks are what is live now. */
static void keep_live(gmi_manager_t *m) {
  gmi_trace_t *record = &m->trace.tracer->record;
  const bool compacted = m->trace.tracer->now.compacted;
  const gmi_heap_t *heap = m->nonmodel.heap;
  if (!heap) return;
  const uint64_t bytes = gmi_heap_bytes_used(heap);
  const uint32_t pages = (uint32_t)gmi_heap_pages_used(heap);
  for (uint32_t i = 0; i < record->op_count; i++) {
    gmi_trace_op_t *op = &record->ops[i];
    if (compacted) op->nonmodel_least = bytes;
    if (compacted || op->nonmodel_peak < bytes) op->nonmodel_peak = bytes;
    if (!compacted && op->heap_pages >= pages) continue;
    op->all_pages = op->all_pages - op->heap_pages + pages; /* the former holds the latter at least */
    op->heap_pages = pages;
  }
}

static bool is_power_of_two(uint64_t n) { return n && !(n & (n - 1)); }

/* Closes the iteration. If it followed the active variant to its end, that variant's times are updated. Otherwise it
 * was a known, shorter variant or becomes a new one. Then, after warm-up, makes the variant's plan if it has none,
 * makes it again once its times under a plan are known, and later only updates the prediction. */
static gemini_status_t iteration_end(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!m->bracket.iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no iteration is open");
  if (t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open", gmi_tracer_op_name(m));
  keep_live(m);
  gemini_status_t left = gmi_gathered_leave(m, true);
  if (!left) left = gmi_gathers_end(m, t->gathers, &t->record);
  const bool chooses = !left && gmi_gathers_choice_due(m, t->gathers);
  if (chooses) {
    time_record(m);
    left = gmi_gathers_choose(m, t->gathers, &t->record);
  }
  if (left) return left;
  uint64_t ended = m->stats.iterations + 1;
  bool warm = ended >= m->config.warmup_iterations;
  gmi_tracer_resolve(m, ended <= m->config.warmup_iterations || t->active == GMI_NONE);
  gmi_reap(m);
  m->bracket.iteration_open = false;
  m->stats.iterations = ended;
  m->stats.measured_step_ns = m->device.ops->now(m->device.self) - t->begun_ns;
  atomic_store(&m->bracket.phase, GEMINI_PHASE_NONE);
  variant_t *v = gmi_tracer_active_variant(t);
  bool whole = v && t->record.op_count == v->trace.op_count && t->record.update_count == v->trace.update_count;
  uint32_t index = t->active;
  if (!whole) {
    if (v && !t->departed) m->stats.departures++;
    t->entered = GMI_NONE;
    index = GMI_NONE;
    for (uint32_t i = 0; i < GMI_VARIANTS; i++) { /* a known variant that is a prefix of the active one */
      gmi_trace_t *other = &t->variants[i].trace;
      if (t->variants[i].used && t->agrees[i] && other->op_count == t->record.op_count &&
          other->update_count == t->record.update_count)
        index = i;
    }
    if (index == GMI_NONE && (t->record_lost || !t->record.op_count)) return GEMINI_OK;
    if (index == GMI_NONE) add_variant(m, &index);
    else learn_iteration(m, &t->variants[index]);
    v = &t->variants[index];
  } else {
    learn_iteration(m, v);
    if (v->bundle.made && !t->departed) {
      m->stats.planned_iterations++;
      v->planned_runs++;
      t->now.step.plan = v->plan, t->now.step.variant = index;
      t->now.step.took = m->stats.committed_elements > t->now.committed;
      t->now.step.nth = v->plan_runs++;
      learn_ahead(m, v);
    }
  }
  v->runs++;
  v->last_used = t->iteration;
  gmi_history_add(&t->history, index);
  t->previous = index;
  if (!warm) return GEMINI_OK;
  /* Times measured under a plan differ from those of warm-up, so the plan is made again after SETTLE_RUNS planned
   * iterations. Later it is made again if steps begin or cease to take over what is computed ahead; otherwise, after 4,
   * 6, 8, 12, 16, 24, ... planned iterations, the prediction is updated, and after every other of these counts a plan
   * that is predicted to be better is tried. */
  if ((v->bundle.made && v->chosen_grew) || (t->now.compacted && (v->bundle.made || v->refused)))
    return gmi_tracer_variant_plan(m, v);
  if (has_outgrown_plan(v)) return v->reads_only ? plan_with_headroom(m, v) : gmi_tracer_variant_plan(m, v);
  if (has_stopped_growing(v) || (t->now.regrown && (v->bundle.made || v->refused))) {
    if (!t->now.regrown) v->trace.headroom = 0;
    return gmi_tracer_variant_plan(m, v);
  }
  const bool settles = v->bundle.made && whole && v->planned_runs == SETTLE_RUNS;
  const bool turns = whole && v->planned_runs > SETTLE_RUNS && v->trace.ahead != v->ahead.planned;
  if (v->bundle.made ? chooses || settles || turns : !v->refused) {
    left = gmi_gathers_list(m, t->gathers, &v->trace);
    if (!left) left = settles ? gmi_tracer_trial_plan(m, v) : gmi_tracer_variant_plan(m, v);
    return left;
  }
  if (v->bundle.made && whole && v->planned_runs > SETTLE_RUNS) {
    if (is_power_of_two(v->planned_runs)) gmi_tracer_trial_again(m, v);
    else if (v->planned_runs % 3 == 0 && is_power_of_two(v->planned_runs / 3)) (void)gmi_tracer_trial_predict(m, v);
  }
  return GEMINI_OK;
}

static gemini_status_t hook_compacted(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!m->bracket.iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no iteration is open");
  if (t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open", gmi_tracer_op_name(m));
  for (uint32_t i = 0; i < GMI_GROUPS; i++)
    if (gmi_group_at(m, i)) return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "the manager has a group");
  t->now.compacted = true;
  return GEMINI_OK;
}

static gemini_status_t phase_set(gmi_manager_t *m, uint32_t phase) {
  if (phase > GEMINI_PHASE_UPDATE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "phase is %u, must be 0 to %d", phase, GEMINI_PHASE_UPDATE);
  if (m->trace.tracer->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open", gmi_tracer_op_name(m));
  atomic_store(&m->bracket.phase, phase);
  return GEMINI_OK;
}

gemini_status_t gemini_iteration_begin(gemini_manager_t mgr) { API_LOCKED(iteration_begin(m, 0)); }
gemini_status_t gemini_iteration_begin_with(gemini_manager_t mgr, uint64_t label) {
  API_LOCKED(iteration_begin(m, label));
}
gemini_status_t gemini_iteration_end(gemini_manager_t mgr) { API_LOCKED(iteration_end(m)); }
gemini_status_t gemini_hook_compacted(gemini_manager_t mgr) { API_LOCKED(hook_compacted(m)); }
gemini_status_t gemini_phase_set(gemini_manager_t mgr, uint32_t phase) { API_LOCKED(phase_set(m, phase)); }

/* ---- trace files and the plan in words */
static gemini_status_t trace_save(gmi_manager_t *m, const char *path) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!path) return gmi_fail(GEMINI_ERR_INVALID, 0, "path is NULL");
  if (t->previous == GMI_NONE) return gmi_fail(GEMINI_ERR_STATE, 0, "no complete iteration has been recorded");
  return gmi_trace_write(m, &t->variants[t->previous].trace, path);
}
gemini_status_t gemini_trace_save(gemini_manager_t mgr, const char *path) { API_LOCKED(trace_save(m, path)); }

/* Loads a trace as a new variant with a plan, as if its iteration had been the last one. If no plan was made yet,
 * the arenas are cut to the trace's chunk size where that is possible. On failure all variants and plans stay as
 * they are. */
static gemini_status_t trace_load(gmi_manager_t *m, const char *path) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!path) return gmi_fail(GEMINI_ERR_INVALID, 0, "path is NULL");
  if (m->bracket.iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "an iteration is open");
  variant_t loaded = { .used = true, .any_label = true };
  gemini_status_t status = gmi_trace_read(m, &loaded.trace, path);
  if (status) return status;
  loaded.reads_only = gmi_tracer_only_reads(m, &loaded.trace);
  uint64_t chunk_bytes = loaded.trace.chunk_bytes;
  if (!chunk_bytes || !gmi_tracer_plan_with_chunk(m, &loaded.trace, chunk_bytes, &loaded.bundle))
    status = gmi_plan_bundle_make(m, &loaded.trace, m->cut.chunk_shift, &loaded.bundle);
  if (status == GEMINI_ERR_INVALID)
    status = gmi_fail(GEMINI_ERR_FORMAT, 0, "trace %s: no plan can be made from it: its times or counts are too large",
                      path);
  if (status) {
    gmi_trace_free(&loaded.trace);
    return status;
  }
  uint32_t index = free_variant(t);
  variant_clear(&t->variants[index]);
  t->variants[index] = loaded;
  gmi_history_add(&t->history, index);
  t->previous = index;
  gmi_tracer_take_plan(m, &t->variants[index], &loaded.bundle);
  return GEMINI_OK;
}
gemini_status_t gemini_trace_load(gemini_manager_t mgr, const char *path) { API_LOCKED(trace_load(m, path)); }

static gemini_status_t plan_explain(gmi_manager_t *m, uint64_t size_bytes, char *text_out, uint64_t *length_out) {
  gmi_tracer_t *t = m->trace.tracer;
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
gemini_status_t gemini_plan_explain(gemini_manager_t mgr, uint64_t size_bytes, char *text_out, uint64_t *length_out) {
  API_LOCKED(plan_explain(m, size_bytes, text_out, length_out));
}

/* ---- tables for lower modules (core/observer.h) */
static void stream_ends(gmi_manager_t *m) { gmi_tracer_resolve(m, true); }
static bool gathers_follow(gmi_manager_t *m, uint32_t group) {
  return gmi_gathers_follow(m->trace.tracer->gathers, group);
}
static gemini_status_t gathers_meet(gmi_manager_t *m) {
  const gmi_tracer_t *t = m->trace.tracer;
  return t->op_open && !t->now.chosen ? gmi_gathers_meet(m, t->gathers, t->op_index) : GEMINI_OK;
}

const gmi_observer_t gmi_tracer_observer = {
  .touched = gmi_tracer_touch,
  .pause_begins = gmi_tracer_pause,
  .pause_ends = gmi_tracer_resume,
  .stream_waits = gmi_tracer_wait,
  .stream_ends = stream_ends,
  .arenas_change = gmi_tracer_forget,
  .budgets_change = gmi_tracer_replan,
  .chunk_copied = gmi_timeline_copy,
  .chunk_transferred = gmi_timeline_transfer,
  .span_queued = gmi_timeline_slice,
  .chunk_summed = gmi_tracer_summed,
  .counters_change = gmi_timeline_counters,
  .lock_held = gmi_timeline_held,
  .update_comes = gmi_tracer_update,
  .update_refused = gmi_tracer_update_refused,
  .piece_begins = gmi_tracer_piece_begin,
  .piece_ends = gmi_tracer_piece_end,
};
const gmi_advice_t gmi_tracer_advice = {
  .op_name = gmi_tracer_op_name,
  .next_use = gmi_tracer_next_use,
  .cache_rank = gmi_tracer_cache_rank,
  .cache_pass = gmi_tracer_cache_pass,
  .piece_on_device = gmi_tracer_piece_on_device,
  .piece_use = gmi_tracer_piece_use,
  .two_passes = gmi_tracer_two_passes,
  .stays = gmi_tracer_stays,
  .unit_ahead = gmi_tracer_unit_ahead,
  .gathers_follow = gathers_follow,
  .gathers_meet = gathers_meet,
};
