/* Ops and moves as NVTX ranges, seen by a stand-in for NVTX's library. SPDX-License-Identifier: Apache-2.0 */
#include "world.h"

extern char fake_nvtx_log[16384];

static void test_ops_and_moves_are_ranges(void) {
  world_t w = world_open(world_config(2, 16, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 4, "weights", 0, 0);
  gemini_tensor_t t[3];
  for (int i = 0; i < 3; i++) {
    t[i] = world_tensor(&w, arena, (const char *[]){ "a", "b", "c" }[i], WORLD_CHUNK);
    world_fill(&w, t[i], 0, WORLD_CHUNK, GEMINI_TIER_HOST, 1 + (uint64_t)i);
  }
  CHECK(!*fake_nvtx_log); /* nothing was copied yet */
  CHECK_OK(gemini_iteration_begin(w.mgr));
  for (int i = 0; i < 3; i++) {
    gemini_access_t a = world_whole(t[i], GEMINI_READ_WRITE, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_op_begin(w.mgr, (const char *[]){ "first", "second", "third" }[i], w.stream));
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
    CHECK_OK(gemini_op_end(w.mgr));
  }
  CHECK_STATUS(gemini_op_end(w.mgr), GEMINI_ERR_STATE); /* no range is ended twice */
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  fprintf(stderr, "    %s\n", fake_nvtx_log);
  CHECK(!strcmp(fake_nvtx_log, "<first<fetch weights 0 (demand)>><second<fetch weights 1 (demand)>>"
                               "<third<evict weights 0 (pressure)><fetch weights 2 (demand)>>"));
  CHECK_OK(gemini_iteration_end(w.mgr));
  world_close(&w);
}

int main(void) {
  RUN(test_ops_and_moves_are_ranges);
  return check_done();
}
