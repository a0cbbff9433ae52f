/* The time of an iteration outside its operators, with times set by the test. SPDX-License-Identifier: Apache-2.0 */
#include "../integration/world.h"
#include "core/manager.h"
#include "core/streams.h"
#include "tracer/variants.h"

static void test_pieces_behind_the_last_op_are_not_outside(void) {
  world_t w = world_open(world_config(8, 64, 0));
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  gmi_tracer_t *t = m->trace.tracer;
  const uint32_t device = m->config.device;
  gmi_lock(m, "test");
  gmi_fence_t fence;
  CHECK_OK(gmi_fence_now(m, m->update.stream, &fence));
  CHECK_OK(gmi_fence_sync(m, fence));
  m->update.end = fence;
  uint64_t end;
  CHECK_OK(m->device.ops->stream.mark_time(m->device.self, m->update.stream, gmi_fence_mark(fence), &end));
  m->config.device = GEMINI_DEVICE_CUDA; /* where updates take turns with operators */
  /* From 1000 before the pieces' end to 500 behind it; the ops took 600 and ended 300 before it. */
  const uint64_t begin = end - 1000, now = end + 500;
  t->in_ops_ns = 600, t->now.ended_ns = end - 300, t->now.pieces_ns = 0;
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 900);
  t->now.pieces_ns = end - 200;
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 700);
  CHECK_EQ(gmi_tracer_outside(m, begin, end - 50), 200); /* they outlast the iteration */
  t->now.pieces_ns = end - 400;                          /* queued while ops ran */
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 600);
  t->in_ops_ns = 1400;
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 1); /* nothing but pieces, as far as is known */
  t->in_ops_ns = 1500;
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 0);
  t->in_ops_ns = UINT64_MAX;
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 0);
  m->config.device = GEMINI_DEVICE_SIMULATED; /* where they run apart, and plans have no stages for them */
  t->in_ops_ns = 600;
  CHECK_EQ(gmi_tracer_outside(m, begin, now), 900);
  m->config.device = device;
  gmi_unlock(m);
  world_close(&w);
}

static void nothing(void *user, const gemini_update_span_t *span) { (void)user, (void)span; }
/* Only pieces that are queued since the last op of an iteration began count. */
static void test_first_piece_since_the_last_op_began_is_noted(void) {
  gemini_config_t c = world_config(64, 64, 0);
  c.placement = GEMINI_PLACEMENT_CUDA;
  world_t w = world_open(c);
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  gmi_tracer_t *t = m->trace.tracer;
  const gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 4, NULL, NULL, NULL);
  uint64_t at;
  CHECK_OK(gemini_arena_take(w.mgr, params, WORLD_CHUNK, &at));
  gemini_access_t use = world_part(params, 0, WORLD_CHUNK, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE);
  gemini_arena_t arenas[] = { params };
  uint32_t modes[] = { GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = arenas, u.modes = modes, u.arena_count = 1;
  u.stream = w.stream;
  u.fn = nothing;
  for (int step = 0; step < 6; step++) {
    const bool planned = step > 3;
    CHECK_OK(gemini_iteration_begin(w.mgr));
    CHECK_EQ(t->now.pieces_ns, 0);
    for (int op = 0; op < 2; op++) {
      CHECK_OK(gemini_op_begin_with(w.mgr, "op", w.stream, &use, 1));
      CHECK_EQ(t->now.pieces_ns, 0); /* the piece behind the first one does not count any more */
      CHECK_OK(gemini_op_end(w.mgr));
      CHECK_OK(gemini_update(w.mgr, &u));
      if (planned) CHECK(t->now.pieces_ns > 0);
    }
    CHECK_OK(gemini_iteration_end(w.mgr));
  }
  world_close(&w);
}

int main(void) {
  RUN(test_pieces_behind_the_last_op_are_not_outside);
  RUN(test_first_piece_since_the_last_op_began_is_noted);
  return check_done();
}
