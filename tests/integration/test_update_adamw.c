/* AdamW over arenas by gemini_update_walk(), in spans of gemini_update(): the bits of one call for each range, wherever the
 * spans run, and several steps under way at once. SPDX-License-Identifier: Apache-2.0 */
#include "update/gemini_update.h"
#include "world.h"

enum { ELEMENTS = 5 * 32768 + 100, STEPS = 6, RULES = 2, RANGES = 7 }; /* more than five chunks of bf16 */
enum { HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE };
enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ARENAS };

/* Where gradients and parameters are. */
typedef enum layout {
  IN_PLACE, /* gradients in their parameters' bytes, bf16 */
  APART,    /* in arenas of their own, bf16; some elements are skipped */
  ALONE     /* fp32 parameters, which are their own master; some elements are skipped */
} layout_t;

/* A step's update: what is borrowed until it is done. */
typedef struct step {
  gemini_adamw_t adamws[RULES];
  gemini_update_walk_t walk;
  _Atomic uint32_t spans[GEMINI_TIER_COUNT];
} step_t;
static void count_span(void *user, const gemini_update_span_t *span) {
  step_t *s = user;
  s->spans[span->tier]++;
  gemini_update_walk(&s->walk, span);
}

/* Ends in the middle of chunks and at one, the last beyond all. */
static const uint64_t ends[RANGES] = { 1, 777, 32768, 70001, 70002, 140000, UINT64_MAX };
static void ranges_of(layout_t layout, gemini_update_range_t *ranges) {
  for (uint64_t r = 0; r < RANGES; r++)
    ranges[r] = (gemini_update_range_t){ ends[r], layout != IN_PLACE && r % 3 == 1 ? GEMINI_UPDATE_SKIP : r % RULES };
}

static struct {
  uint32_t param[ELEMENTS]; /* bf16, but for ALONE */
  float master[ELEMENTS], momentum[ELEMENTS], variance[ELEMENTS];
} plain;
static void update_plain(const step_t *s, layout_t layout, const void *grad) {
  uint64_t begin = 0;
  for (uint64_t r = 0; r < RANGES; begin = ends[r++]) {
    const gemini_update_range_t *range = &s->walk.ranges[r];
    uint64_t end = ends[r] < ELEMENTS ? ends[r] : ELEMENTS;
    if (range->rule == GEMINI_UPDATE_SKIP) continue;
    void *param = layout == ALONE ? NULL : (uint16_t *)plain.param + begin;
    CHECK_EQ(gemini_adamw_host(&s->adamws[range->rule], end - begin, param, (const uint16_t *)grad + begin,
                               plain.master + begin, plain.momentum + begin, plain.variance + begin, NULL),
             GEMINI_OK);
  }
}

static void begin_step(step_t *s, layout_t layout, uint64_t step, gemini_manager_t mgr,
                       const gemini_update_range_t *ranges) {
  for (uint32_t r = 0; r < RULES; r++) {
    s->adamws[r] = (gemini_adamw_t)GEMINI_ADAMW_INIT;
    s->adamws[r].step = step;
    s->adamws[r].lr = 1e-3 * (double)(r + step);
    s->adamws[r].weight_decay = 0.1 * r;
    s->adamws[r].grad_scale = 0.5;
  }
  s->walk = (gemini_update_walk_t)GEMINI_UPDATE_WALK_INIT;
  s->walk.adamws = s->adamws;
  s->walk.rule_count = RULES;
  s->walk.ranges = ranges;
  s->walk.range_count = RANGES;
  s->walk.mgr = mgr;
  s->walk.stream_native = gemini_stream_native;
  s->walk.stream_call = gemini_stream_call;
  if (layout != ALONE) return; /* the arenas are grad, master, momentum, variance */
  s->walk.param_index = GEMINI_INDEX_NONE;
  s->walk.grad_index = 0, s->walk.master_index = 1, s->walk.momentum_index = 2, s->walk.variance_index = 3;
}

static void check_equal(const world_t *w, gemini_arena_t arena, const void *want, uint64_t bytes) {
  gemini_access_t a = world_part(arena, 0, bytes, GEMINI_READ, HOST);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(!memcmp(a.ptr, want, bytes));
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}

static void train(layout_t layout, gemini_config_t config, uint32_t flags, bool pinned) {
  static step_t steps[STEPS];
  config.update_threads = 3;
  world_t w = world_open(config);
  gemini_arena_t arenas[ARENAS] = { 0 };
  const uint32_t param_bytes = layout == ALONE ? 4 : 2, first = layout == ALONE ? GRAD : PARAM;
  arenas[PARAM] = world_arena(&w, layout == ALONE ? GEMINI_KIND_MASTER : GEMINI_KIND_PARAM, param_bytes, "param", 0, 0);
  arenas[GRAD] = world_arena(&w, GEMINI_KIND_GRAD, 2, "grad", layout == IN_PLACE ? 0 : arenas[PARAM],
                             layout == IN_PLACE ? arenas[PARAM] : 0);
  for (uint32_t i = MASTER; i <= VARIANCE; i++)
    arenas[i] = i == MASTER && layout == ALONE
                    ? arenas[PARAM]
                    : world_arena(&w, GEMINI_KIND_MASTER + i - MASTER, 4, NULL, arenas[PARAM], 0);
  gemini_tensor_t tensor = world_tensor(&w, arenas[PARAM], "all", ELEMENTS * param_bytes), grad;
  CHECK_OK(gemini_tensor_counterpart(w.mgr, tensor, arenas[GRAD], &grad));
  if (pinned) {
    gemini_access_t pin = world_part(arenas[PARAM], 0, 2 * WORLD_CHUNK, 0, DEVICE);
    CHECK_OK(gemini_pin(w.mgr, &pin));
  }
  memset(&plain, 0, sizeof plain);
  memset(steps, 0, sizeof steps);
  gemini_update_range_t ranges[RANGES];
  ranges_of(layout, ranges);
  const uint32_t modes[ARENAS] = { layout == APART ? GEMINI_READ_WRITE : GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE,
                                   GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  for (uint64_t step = 1; step <= STEPS; step++) {
    step_t *s = &steps[step - 1];
    uint64_t random = step;
    uint32_t tier = step % 2 || config.device_bytes > 20 * WORLD_CHUNK ? DEVICE : HOST;
    begin_step(s, layout, step, w.mgr, ranges);
    gemini_access_t a = world_whole(grad, GEMINI_WRITE, tier);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < ELEMENTS; i++)
      ((uint16_t *)a.ptr)[i] = (uint16_t)(0x3c00 + (check_random(&random) & 0x80ff)); /* of either sign */
    update_plain(s, layout, a.ptr);
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = arenas + first;
    u.modes = modes + first;
    u.arena_count = ARENAS - first;
    u.flags = flags;
    u.fn = gemini_update_walk;
    u.user = &s->walk;
    u.stream = w.stream;
    CHECK_EQ(gemini_update_walk_check(&u), GEMINI_OK);
    u.fn = count_span, u.user = s;
    CHECK_OK(gemini_update(w.mgr, &u));
  }
  CHECK_OK(gemini_update_wait(w.mgr));
  uint32_t spans[GEMINI_TIER_COUNT] = { 0 };
  for (uint32_t step = 0; step < STEPS; step++) {
    CHECK_EQ(gemini_update_walk_status(&steps[step].walk), GEMINI_OK);
    for (int tier = 0; tier < GEMINI_TIER_COUNT; tier++) spans[tier] += steps[step].spans[tier];
  }
  CHECK((spans[DEVICE] > 0) == pinned && spans[HOST] > 0);
  if (layout != ALONE) check_equal(&w, arenas[PARAM], plain.param, ELEMENTS * 2);
  check_equal(&w, arenas[MASTER], plain.master, sizeof plain.master);
  check_equal(&w, arenas[MOMENTUM], plain.momentum, sizeof plain.momentum);
  check_equal(&w, arenas[VARIANCE], plain.variance, sizeof plain.variance);
  world_close(&w);
}

static void test_adamw_in_spans_equals_one_call_for_each_range(void) {
  /* On the host; in part on the device, where two chunks of parameters stay; the same late; from files, late. */
  for (layout_t layout = IN_PLACE; layout <= ALONE; layout++) {
    train(layout, world_config(12, 90, 0), 0, false);
    train(layout, world_config(90, 90, 0), 0, true);
    train(layout, world_config(90, 90, 0), GEMINI_UPDATE_LATE, true);
    train(layout, world_config(12, 20, 120), GEMINI_UPDATE_LATE, false);
  }
}

static void test_adamw_in_spans_fails_on_both_tiers_and_is_told(void) {
  world_t w = world_open(world_config(80, 80, 0));
  gemini_arena_t arenas[ARENAS];
  arenas[PARAM] = world_arena(&w, GEMINI_KIND_PARAM, 2, "param", 0, 0);
  for (uint32_t i = GRAD; i <= VARIANCE; i++)
    arenas[i] = world_arena(&w, GEMINI_KIND_PARAM + i, i == GRAD ? 2 : 4, NULL, arenas[PARAM], 0);
  world_tensor(&w, arenas[PARAM], "all", ELEMENTS * 2);
  const uint32_t modes[ARENAS] = { GEMINI_READ_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                   GEMINI_READ_WRITE };
  for (int on_device = 0; on_device < 2; on_device++) {
    const gemini_update_range_t ranges[] = { { ELEMENTS / 2, 0 } };
    step_t step = { .spans = { 0 } };
    begin_step(&step, APART, 1, w.mgr, ranges);
    step.walk.range_count = 1;
    gemini_access_t pin = world_part(arenas[MASTER], 0, ELEMENTS * 4, 0, DEVICE);
    if (on_device) CHECK_OK(gemini_pin(w.mgr, &pin));
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = arenas, u.modes = modes, u.arena_count = ARENAS;
    u.fn = count_span, u.user = &step;
    CHECK_OK(gemini_update(w.mgr, &u));
    CHECK((step.spans[DEVICE] > 0) == on_device);
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    CHECK_EQ(gemini_update_walk_status(&step.walk), GEMINI_ERR_INVALID);
    CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
    CHECK_SAYS(info.message, "no range of the walk covers them");
    if (on_device) CHECK_OK(gemini_unpin(w.mgr, &pin));
  }
  world_close(&w);
}

/* The header promises that gemini_last_error() tells of every call that fails, whichever of the two libraries it is in. */
static void test_errors_of_both_libraries_are_one_record(void) {
  gemini_update_t u = GEMINI_UPDATE_INIT;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_phase_set(handle_of(0xdeadbeef), 0), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_update_walk_check(&u), GEMINI_ERR_INVALID);
  CHECK_OK(gemini_last_error(&info));
  CHECK_SAYS(info.operation, "gemini_update_walk_check");
  CHECK_EQ(info.status, GEMINI_ERR_INVALID);
  CHECK(info.message[0]);
  CHECK_EQ(gemini_phase_set(handle_of(0xdeadbeef), 0), GEMINI_ERR_HANDLE);
  CHECK_OK(gemini_last_error(&info));
  CHECK_SAYS(info.operation, "gemini_phase_set");
}

int main(void) {
  RUN(test_errors_of_both_libraries_are_one_record);
  RUN(test_adamw_in_spans_equals_one_call_for_each_range);
  RUN(test_adamw_in_spans_fails_on_both_tiers_and_is_told);
  return check_done();
}
