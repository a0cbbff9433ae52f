/* Compares a plan with the one before it, by the steps that followed them. SPDX-License-Identifier: Apache-2.0
 *
 * A plan is the best one of a model, which does not know all that a machine does. A variant's second plan, which is
 * made with times measured under the first one, is expected to be better. If it proves slower, the first one comes
 * back.
 *
 * A step is measured from the begin of its first op to that of the next iteration's, on the stream of the ops. What
 * else lies in between (the making of a plan, an evaluation, the caller's own work) makes it longer, never shorter; so
 * the shortest steps are compared. */
#include <string.h>

#include "tracer/variants.h"

void gmi_tracer_trial_drop(variant_t *v) {
  gmi_plan_bundle_free(&v->trial.before);
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
         same_moves(a->fetches, b->fetches, a->fetch_first, b->fetch_first, a->op_count) &&
         same_moves(a->evicts, b->evicts, a->evict_first, b->evict_first, a->op_count);
}

gemini_status_t gmi_tracer_trial_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t before = v->bundle;
  const uint64_t number = v->plan;
  const uint64_t shortest[2] = { v->trial.ns[0], v->trial.ns[1] };
  v->bundle = (gmi_plan_bundle_t){ 0 };
  gemini_status_t status = gmi_tracer_variant_plan(m, v);
  const gmi_plan_groups_t *groups = &before.input.groups;
  if (status || groups->gather_count || groups->sum_count || same_plan(&before.plan, &v->bundle.plan)) {
    gmi_plan_bundle_free(&before);
    return status;
  }
  v->trial.before = before;
  v->trial.before_plan = number;
  memcpy(v->trial.shortest_ns, shortest, sizeof shortest);
  return GEMINI_OK;
}

/* The plan before comes back, with the newest times. */
static void return_to_before(gmi_manager_t *m, variant_t *v, bool took) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_plan_bundle_t bundle = v->trial.before;
  const uint64_t plan = v->plan;
  gmi_log(m, GEMINI_LOG_INFO, "plan %llu comes back: its steps took %.6f s, those of plan %llu take %.6f s",
          (unsigned long long)v->trial.before_plan, (double)v->trial.shortest_ns[took] * 1e-9, (unsigned long long)plan,
          (double)v->trial.ns[took] * 1e-9);
  v->trial.before = (gmi_plan_bundle_t){ 0 };
  gmi_tracer_trial_drop(v);
  gmi_plan_bundle_free(&v->bundle);
  gmi_trace_measure(m, &v->trace);
  gmi_plan_bundle_times(m, &v->trace, &bundle);
  (void)gmi_plan_simulate(&bundle.input, &bundle.plan); /* if it fails, the plan predicts what it did before */
  if (t->entered == (uint32_t)(v - t->variants)) t->entered = GMI_NONE;
  gmi_tracer_take_plan(m, v, &bundle);
}

static bool is_slower(uint64_t ns, uint64_t before_ns) {
  return before_ns && ns > before_ns && ns - before_ns > TRIAL_NS && ns - before_ns > before_ns / TRIAL_SHARE;
}

static void keep_shortest(uint64_t *shortest, uint64_t ns) {
  if (!*shortest || ns < *shortest) *shortest = ns;
}

void gmi_tracer_trial_measure(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  const step_t step = t->plans.last, next = t->now.step;
  t->plans.last = next;
  t->now.step = (step_t){ 0 };
  if (!step.plan || !step.first_ns || next.first_ns <= step.first_ns) return;
  variant_t *v = &t->variants[step.variant];
  const uint64_t ns = next.first_ns - step.first_ns;
  if (step.plan == v->trial.before_plan) keep_shortest(&v->trial.shortest_ns[step.took], ns);
  if (step.plan != v->plan) return;
  keep_shortest(&v->trial.ns[step.took], ns);
  if (!v->trial.before.made || ++v->trial.steps[step.took] < TRIAL_STEPS) return;
  if (is_slower(v->trial.ns[step.took], v->trial.shortest_ns[step.took])) return_to_before(m, v, step.took);
  else gmi_tracer_trial_drop(v);
}
