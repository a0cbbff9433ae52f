/* Compares a plan with the one before it, by the steps that followed them. SPDX-License-Identifier: Apache-2.0
 *
 * A plan is the best one of a model, which does not know all that a machine does. A variant's second plan, which is
 * made with times measured under the first one, is expected to be better, and so is one that later times suggest. If it
 * proves slower, the one before comes back, and no other is tried.
 *
 * A step is measured from the begin of its first op to that of the next iteration's, on the stream of the ops. What
 * else lies in between (the making of a plan, an evaluation, the caller's own work) makes it longer, and a step that is
 * shorter than others has left work to the next one; so the medians of the newest steps are compared. A step waits
 * for updates that the one before has left to it. So the first two under a plan say little of it: the first waits for
 * those of another plan, or for none, and as it moves what that plan has left elsewhere, it may leave fewer to the
 * second than any later one does. A plan of which only these are known does not come back for good, but to be compared
 * with the one that took its place; and only if it seems to be better by the longer of them. */
#include <string.h>

#include "tracer/variants.h"

static void drop_former(variant_t *v) {
  gmi_plan_bundle_free(&v->trial.before.bundle);
  memset(&v->trial.before, 0, sizeof v->trial.before);
}
void gmi_tracer_trial_drop(variant_t *v) {
  drop_former(v);
  memset(&v->trial, 0, sizeof v->trial);
}

/* Do two plans of one trace move the same chunks at the same ops, and run the same pieces at the same places? */
static bool same_moves(const gmi_plan_move_t *a, const gmi_plan_move_t *b, const uint32_t *a_first,
                       const uint32_t *b_first, uint32_t op_count) {
  if (memcmp(a_first, b_first, (op_count + UINT64_C(1)) * sizeof *a_first)) return false;
  for (uint32_t i = 0; i < a_first[op_count]; i++)
    if (a[i].chunk != b[i].chunk || a[i].piece != b[i].piece) return false;
  return true;
}
static bool same_plan(const gmi_plan_t *a, const gmi_plan_t *b) {
  return a->op_count == b->op_count && a->chunk_count == b->chunk_count && a->piece_count == b->piece_count &&
         !memcmp(a->resident_at_start, b->resident_at_start, a->chunk_count) &&
         !memcmp(a->piece_on_device, b->piece_on_device, a->piece_count) &&
         !memcmp(a->piece_ahead, b->piece_ahead, a->piece_count) &&
         !memcmp(a->piece_passes, b->piece_passes, a->piece_count) &&
         same_moves(a->fetches, b->fetches, a->fetch_first, b->fetch_first, a->op_count) &&
         same_moves(a->evicts, b->evicts, a->evict_first, b->evict_first, a->op_count);
}

/* Ranks make their plans together: none is tried by itself. */
static bool has_collectives(const gmi_plan_bundle_t *bundle) {
  return bundle->input.groups.gather_count || bundle->input.groups.sum_count;
}

/* The variant's plan, taken from it. Another one follows, against which it is compared. */
static former_plan_t take_former(variant_t *v) {
  former_plan_t former = { .bundle = v->bundle, .number = v->plan, .steps = v->trial.steps };
  v->bundle = (gmi_plan_bundle_t){ 0 };
  return former;
}

gemini_status_t gmi_tracer_trial_plan(gmi_manager_t *m, variant_t *v) {
  former_plan_t former = take_former(v);
  gemini_status_t status = gmi_tracer_variant_plan(m, v);
  if (!status && !has_collectives(&former.bundle) && !same_plan(&former.bundle.plan, &v->bundle.plan))
    v->trial.before = former;
  else gmi_plan_bundle_free(&former.bundle);
  return status;
}

static bool is_slower(uint64_t ns, uint64_t before_ns) {
  return before_ns && ns > before_ns && ns - before_ns > TRIAL_NS && ns - before_ns > before_ns / TRIAL_SHARE;
}

static void add_step(steps_t *steps, const step_t *step, uint64_t ns) {
  if (step->nth < 2 && ns > steps->opening[step->took]) steps->opening[step->took] = ns;
  if (step->nth >= 2) steps->ns[step->took][steps->count[step->took]++ % TRIAL_STEPS] = ns;
}
/* The median of the newest steps; 0: none is known. */
static uint64_t median_step(const steps_t *steps, bool took) {
  const uint32_t count = steps->count[took];
  return gmi_times_median(steps->ns[took], count < TRIAL_STEPS ? count : TRIAL_STEPS);
}

/* The plan becomes the variant's, whose own is gone, and no plan can come back. */
static void take(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_tracer_trial_drop(v);
  if (t->entered == (uint32_t)(v - t->variants)) t->entered = GMI_NONE;
  gmi_tracer_take_plan(m, v, bundle);
}

/* The plan becomes the variant's, whose own may come back. Returns the number of that one. */
static uint64_t try_plan(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle) {
  const former_plan_t former = take_former(v);
  take(m, v, bundle);
  v->trial.before = former;
  return former.number;
}

bool gmi_tracer_trial_predict(gmi_manager_t *m, variant_t *v) {
  gmi_trace_measure(m, &v->trace);
  gmi_plan_bundle_times(m, &v->trace, &v->bundle);
  if (gmi_plan_simulate(&v->bundle.input, &v->bundle.plan)) return false;
  gmi_tracer_publish_plan(m, v);
  return true;
}

void gmi_tracer_trial_again(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t bundle;
  if (!gmi_tracer_trial_predict(m, v)) return;
  if (v->trial.before.bundle.made || v->trial_lost || v->reads_only || v->still || v->planned_runs > TRIAL_RUNS ||
      has_collectives(&v->bundle) || gmi_plan_bundle_make(m, &v->trace, m->cut.chunk_shift, &bundle))
    return;
  /* It has to promise a shorter step than the plan does, and than the plan's steps are: that the model takes these for
   * longer is no reason to leave it. */
  const uint64_t took_ns = median_step(&v->trial.steps, m->trace.tracer->now.step.took);
  if (!is_slower(v->bundle.plan.predicted_ns, bundle.plan.predicted_ns) ||
      (took_ns && !is_slower(took_ns, bundle.plan.predicted_ns))) {
    gmi_plan_bundle_free(&bundle);
    return;
  }
  const uint64_t before_ns = v->bundle.plan.predicted_ns, before = try_plan(m, v, &bundle);
  gmi_log(m, GEMINI_LOG_INFO,
          "plan %llu is tried: with the newest times it predicts a step of %.6f s, plan %llu %.6f s",
          (unsigned long long)v->plan, (double)bundle.plan.predicted_ns * 1e-9, (unsigned long long)before,
          (double)before_ns * 1e-9);
}

/* The plan before comes back, with the newest times; for good, unless only its first two steps are known. */
static void return_to_before(gmi_manager_t *m, variant_t *v, bool took, bool for_good) {
  former_plan_t *before = &v->trial.before;
  gmi_plan_bundle_t bundle = before->bundle;
  gmi_log(m, GEMINI_LOG_INFO, "plan %llu %s: its %s took %.6f s, those of plan %llu take %.6f s",
          (unsigned long long)before->number, for_good ? "comes back" : "is tried again",
          for_good ? "steps" : "first steps",
          (double)(for_good ? median_step(&before->steps, took) : before->steps.opening[took]) * 1e-9,
          (unsigned long long)v->plan, (double)median_step(&v->trial.steps, took) * 1e-9);
  before->bundle = (gmi_plan_bundle_t){ 0 };
  gmi_trace_measure(m, &v->trace);
  gmi_plan_bundle_times(m, &v->trace, &bundle);
  (void)gmi_plan_simulate(&bundle.input, &bundle.plan); /* if it fails, the plan predicts what it did before */
  if (for_good) {
    gmi_plan_bundle_free(&v->bundle);
    take(m, v, &bundle);
    v->trial_lost = true;
  } else {
    (void)try_plan(m, v, &bundle);
  }
}

void gmi_tracer_trial_measure(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  const step_t step = t->plans.last, next = t->now.step;
  t->plans.last = next;
  t->now.step = (step_t){ 0 };
  if (!step.plan || !step.first_ns || next.first_ns <= step.first_ns) return;
  variant_t *v = &t->variants[step.variant];
  const uint64_t ns = next.first_ns - step.first_ns;
  if (step.plan == v->trial.before.number) add_step(&v->trial.before.steps, &step, ns);
  if (step.plan != v->plan) return;
  const steps_t *before = &v->trial.before.steps, *now = &v->trial.steps;
  add_step(&v->trial.steps, &step, ns);
  if (!v->trial.before.bundle.made || now->count[step.took] < TRIAL_STEPS) return;
  const uint64_t settled_ns = median_step(before, step.took);
  if (is_slower(median_step(now, step.took), settled_ns ? settled_ns : before->opening[step.took]))
    return_to_before(m, v, step.took, settled_ns != 0);
  else drop_former(v);
}
