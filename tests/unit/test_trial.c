/* Plans compared by the steps under them, with the times of steps set by the test. SPDX-License-Identifier: Apache-2.0 */
#include "../integration/world.h"
#include "core/manager.h"
#include "tracer/variants.h"

enum { LAYERS = 8, CHUNK = WORLD_CHUNK };
#define SHORT UINT64_C(1) /* ns: shorter and longer than any step and any prediction */
#define LONG UINT64_C(1000000000000)

/* A loop whose updates on the host take host_us for each chunk. */
typedef struct {
  world_t w;
  gmi_manager_t *m;
  gemini_arena_t params, grads;
  _Atomic unsigned host_us; /* Atomic: changed while updates of the step before may run */
  char said[400];           /* the newest line of the log of a trial */
} loop_t;

static void slow_update(void *user, const gemini_update_span_t *span) {
  if (span->tier == GEMINI_TIER_HOST) usleep(((loop_t *)user)->host_us);
}
static void work(void *user) {
  (void)user;
  usleep(500);
}
static void note(void *user, int32_t level, const char *message) {
  loop_t *l = user;
  if (level == GEMINI_LOG_INFO && (strstr(message, "comes back") || strstr(message, "is tried")))
    snprintf(l->said, sizeof l->said, "%s", message);
}
static loop_t *loop_open(void) {
  gemini_config_t c = world_config(8, 256, 0);
  loop_t *l = calloc(1, sizeof *l);
  uint64_t at;
  CHECK(l);
  c.update_threads = 1;
  c.log_fn = note, c.log_user = l, c.log_level = GEMINI_LOG_INFO;
  l->w = world_open(c);
  l->m = gmi_manager_get(l->w.mgr);
  l->params = world_arena(&l->w, GEMINI_KIND_PARAM, 4, NULL, NULL, NULL);
  l->grads = world_arena(&l->w, GEMINI_KIND_GRAD, 4, NULL, l->params, NULL);
  CHECK_OK(gemini_arena_take(l->w.mgr, l->params, 2 * LAYERS * CHUNK, &at));
  return l;
}
static void loop_close(loop_t *l) {
  world_close(&l->w);
  free(l);
}
static void step(loop_t *l, unsigned host_us) {
  l->host_us = host_us;
  CHECK_OK(gemini_iteration_begin(l->w.mgr));
  for (int i = 0; i < 2 * LAYERS; i++) {
    const uint64_t offset = 2 * (uint64_t)CHUNK * (uint64_t)(i < LAYERS ? i : 2 * LAYERS - 1 - i);
    gemini_access_t use[2] = { world_part(l->params, offset, 2 * CHUNK, GEMINI_READ, GEMINI_TIER_DEVICE),
                               world_part(l->grads, offset, 2 * CHUNK, GEMINI_WRITE, GEMINI_TIER_DEVICE) };
    CHECK_OK(gemini_op_begin_with(l->w.mgr, i < LAYERS ? "forward" : "backward", l->w.stream, use, i < LAYERS ? 1 : 2));
    CHECK_OK(gemini_stream_call(l->w.mgr, l->w.stream, work, NULL));
    CHECK_OK(gemini_op_end(l->w.mgr));
  }
  gemini_arena_t arenas[] = { l->params, l->grads };
  uint32_t modes[] = { GEMINI_READ_WRITE, GEMINI_READ };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = arenas, u.modes = modes, u.arena_count = 2;
  u.stream = l->w.stream;
  u.fn = slow_update, u.user = l;
  CHECK_OK(gemini_update(l->w.mgr, &u));
  CHECK_OK(gemini_iteration_end(l->w.mgr));
  CHECK_OK(gemini_stream_synchronize(l->w.mgr, l->w.stream));
}
static variant_t *variant(const loop_t *l) { return &l->m->trace.tracer->variants[0]; }
static void set(steps_t *steps, uint64_t ns) {
  for (int i = 0; i < TRIAL_STEPS; i++) steps->ns[0][i] = steps->ns[1][i] = ns;
}
/* Steps until the second plan is compared with the first, and all steps under the first are known. */
static loop_t *loop_in_trial(void) {
  loop_t *l = loop_open();
  for (int i = 0; i < 10 && !variant(l)->trial.before.bundle.made; i++) step(l, 2000);
  for (int i = 0; i < 2; i++) step(l, 2000); /* a step is known when the iteration behind the next one begins */
  CHECK(variant(l)->trial.before.bundle.made);
  CHECK_EQ(variant(l)->plan, 2);
  return l;
}
/* Steps until there is an end of the trial. Those under the newest plan but the last one are said to have taken ns. */
static void end_trial(loop_t *l, uint64_t ns) {
  const uint64_t plan = variant(l)->plan;
  for (int i = 0; i < 10 && variant(l)->plan == plan && variant(l)->trial.before.bundle.made; i++) {
    step(l, 2000);
    if (variant(l)->plan == plan) set(&variant(l)->trial.steps, ns);
  }
}

/* Of the first plan, the longer one of its first two steps is known. If even that was shorter than the steps under the
 * second plan, the first is tried again; and then either one can win. */
static void test_first_plan_has_to_prove_itself_again(void) {
  for (int wins = 0; wins < 2; wins++) {
    loop_t *l = loop_in_trial();
    variant_t *v = variant(l);
    v->trial.before.steps = (steps_t){ .opening = { SHORT, SHORT } };
    end_trial(l, LONG);
    CHECK_SAYS(l->said, "plan 1 is tried again: its first steps took 0.000000 s, those of plan 2 take ");
    CHECK_EQ(v->plan, 3);
    CHECK_EQ(v->trial.before.number, 2);
    CHECK(!v->trial_lost);
    *l->said = 0;
    set(&v->trial.before.steps, wins ? LONG : SHORT);
    end_trial(l, wins ? SHORT : LONG);
    CHECK(!v->trial.before.bundle.made);
    if (wins) CHECK_EQ(*l->said, 0);
    else CHECK_SAYS(l->said, "plan 2 comes back: its steps took 0.000000 s, those of plan 3 take ");
    CHECK_EQ(v->plan, wins ? 3 : 4);
    CHECK_EQ(v->trial_lost, !wins);
    loop_close(l);
  }
}
static void test_second_plan_stays_if_one_of_the_first_steps_was_long(void) {
  loop_t *l = loop_in_trial();
  variant_t *v = variant(l);
  v->trial.before.steps = (steps_t){ .opening = { LONG, LONG } };
  end_trial(l, SHORT);
  CHECK(!v->trial.before.bundle.made);
  CHECK_EQ(v->plan, 2);
  CHECK_EQ(*l->said, 0);
  loop_close(l);
}

/* The first two steps under a plan are kept apart from those that follow. */
static void test_longer_one_of_the_first_two_steps_is_known(void) {
  for (int longer = 0; longer < 2; longer++) { /* step 1 + longer waits for slow updates of the step before it */
    loop_t *l = loop_open();
    for (int i = 0; i < 3; i++) step(l, i == 1 + longer ? 60000 : 2000); /* four pieces on the host suffice */
    variant_t *v = variant(l);
    CHECK_EQ(v->plan, 2);
    CHECK_EQ(v->trial.before.number, 1);
    const steps_t *first = &v->trial.before.steps;
    step(l, 2000);
    const uint64_t before = first->opening[0]; /* of the first step */
    CHECK(longer ? before > 0 : before > 200000000);
    step(l, 2000); /* and of the second */
    CHECK(longer ? first->opening[0] > before && first->opening[0] > 200000000 : first->opening[0] == before);
    CHECK_EQ(first->count[0], 0);
    for (int i = 0; i < 3; i++) {
      CHECK_EQ(v->trial.steps.count[0], 0);
      step(l, 2000);
    }
    CHECK_EQ(v->plan, 2);
    CHECK_EQ(v->trial.steps.count[0], 1); /* the third step under it */
    loop_close(l);
  }
}

/* Updates become slow on the host when plans have settled, so another plan promises a shorter step than the present one
 * is predicted to take. It is tried only if it also promises a shorter step than those under the present one. */
static void test_plan_that_promises_more_than_steps_take_is_not_tried(void) {
  for (int tried = 0; tried < 2; tried++) {
    loop_t *l = loop_open();
    variant_t *v = variant(l);
    for (int i = 0; i < 12; i++) { /* 8 is past */
      step(l, 0);
      set(&v->trial.steps, SHORT);
      if (v->trial.before.bundle.made) set(&v->trial.before.steps, LONG); /* what is on trial stays */
    }
    CHECK(!v->trial.before.bundle.made);
    const uint64_t plan = v->plan;
    *l->said = 0;
    while (v->planned_runs < 32 && v->plan == plan) {
      set(&v->trial.steps, tried ? LONG : SHORT);
      step(l, 5000);
    }
    CHECK_EQ(v->plan, plan + (uint64_t)tried);
    if (tried) CHECK_SAYS(l->said, " is tried: with the newest times it predicts a step of ");
    else CHECK_EQ(*l->said, 0);
    loop_close(l);
  }
}

static void test_plan_knows_which_chunks_have_slots_of_the_host(void) {
  loop_t *l = loop_open();
  for (int i = 0; i < 4; i++) step(l, 100);
  gemini_access_t a = world_part(l->params, 0, 2 * CHUNK, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_update_wait(l->w.mgr));
  CHECK_OK(gemini_acquire(l->w.mgr, &a, 1, GEMINI_STREAM_CALLER)); /* what is on the host is not needed any more */
  CHECK_OK(gemini_release(l->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  gmi_lock(l->m, "test");
  gmi_host_slot_drop(l->m, &gmi_arena_get(l->m, l->params)->chunks[1]);
  CHECK_OK(gmi_tracer_variant_plan(l->m, variant(l)));
  const gmi_plan_bundle_t *b = &variant(l)->bundle;
  uint32_t have = 0;
  for (uint32_t i = 0; i < b->input.chunk_count; i++) {
    CHECK_EQ(b->input.chunk_has_slot[i], gmi_chunk_has_slot(b->chunk_of[i]));
    have += b->input.chunk_has_slot[i];
  }
  CHECK_EQ(have, b->input.chunk_count - 1);
  gmi_unlock(l->m);
  loop_close(l);
}
static void test_prediction_follows_the_times(void) {
  loop_t *l = loop_open();
  variant_t *v = variant(l);
  uint64_t updated = 0;
  while (v->planned_runs < 26) {
    step(l, 0);
    set(&v->trial.steps, SHORT); /* no other plan is tried */
    if (v->planned_runs > 3 && v->bundle.plan.predicted_ns != LONG) {
      updated |= UINT64_C(1) << v->planned_runs;
      CHECK_EQ(world_stats(&l->w).predicted_step_ns, v->bundle.plan.predicted_ns);
    }
    v->bundle.plan.predicted_ns = LONG;
  }
  CHECK_EQ(updated, 1 << 4 | 1 << 6 | 1 << 8 | 1 << 12 | 1 << 16 | 1 << 24);
  loop_close(l);
}

int main(void) {
  RUN(test_first_plan_has_to_prove_itself_again);
  RUN(test_second_plan_stays_if_one_of_the_first_steps_was_long);
  RUN(test_longer_one_of_the_first_two_steps_is_known);
  RUN(test_plan_that_promises_more_than_steps_take_is_not_tried);
  RUN(test_prediction_follows_the_times);
  RUN(test_plan_knows_which_chunks_have_slots_of_the_host);
  return check_done();
}
