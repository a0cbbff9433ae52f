/* What addresses are mapped to over a chunk's comings and goings, over a fake driver. SPDX-License-Identifier: Apache-2.0 */
#include "../check.h"
#include "../integration/world.h"
#include "device/cuda_driver.h"
#include "fake_cuda.h"

#define W (UINT64_C(2) << 20)
enum { FRAMES = 4, CHUNKS = 8 };

static world_t start(gemini_arena_t *arena_out) {
  fake_cuda_reset();
  gmi_cuda_driver_replace(fake_cuda_symbol);
  gemini_config_t c = world_config(1, 1, 0);
  c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = FRAMES * W;
  c.host_bytes = (CHUNKS + 1) * W;
  world_t w = world_open(c);
  uint64_t offset;
  *arena_out = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  CHECK_OK(gemini_arena_take(w.mgr, *arena_out, CHUNKS * W, &offset));
  for (uint64_t i = 0; i < CHUNKS; i++) world_fill(&w, *arena_out, i * W, W, GEMINI_TIER_HOST, i + 1);
  return w;
}
/* Each chunk goes to the device and comes back changed, since who writes nothing leaves what was there. */
static void through_device(const world_t *w, gemini_arena_t arena, uint64_t i) {
  gemini_access_t a = world_part(arena, i * W, W, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
}
static void round_trip(const world_t *w, gemini_arena_t arena) {
  for (uint64_t i = 0; i < CHUNKS; i++) through_device(w, arena, i);
}
static void finish(world_t *w) {
  world_close(w);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}

static void test_who_comes_again_is_mapped_already(void) {
  gemini_arena_t arena;
  world_t w = start(&arena);
  for (uint64_t i = 0; i < FRAMES; i++) through_device(&w, arena, i);
  fake_cuda_fail_function("cuMemMap", CU_OUT_OF_MEMORY);
  for (int round = 0; round < 3; round++) { /* in one order they give their frames up, in the other they want them */
    for (uint64_t i = 0; i < FRAMES; i++) {
      gemini_access_t a = world_part(arena, i * W, W, 0, GEMINI_TIER_HOST);
      CHECK_OK(gemini_move(w.mgr, &a, 1));
    }
    for (uint64_t i = FRAMES; i-- > 0;) through_device(&w, arena, i);
  }
  fake_cuda_fail_function(NULL, 0);
  for (uint64_t i = 0; i < CHUNKS; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  finish(&w);
}

static void test_frames_that_end_leave_no_address_behind(void) {
  gemini_arena_t arena;
  world_t w = start(&arena);
  round_trip(&w, arena);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_DEVICE, 2 * W)); /* the driver refuses frames that are mapped */
  round_trip(&w, arena);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_DEVICE, FRAMES * W));
  round_trip(&w, arena);
  void *block;
  CHECK_OK(gemini_alloc(w.mgr, 2 * W, w.stream, &block)); /* other addresses get frames that chunks had */
  round_trip(&w, arena);
  CHECK_OK(gemini_free(w.mgr, block, w.stream));
  for (uint64_t i = 0; i < CHUNKS; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  CHECK_OK(gemini_arena_destroy(w.mgr, arena));
  finish(&w);
}

int main(void) {
  RUN(test_who_comes_again_is_mapped_already);
  RUN(test_frames_that_end_leave_no_address_behind);
  fake_cuda_reset();
  gmi_cuda_driver_replace(NULL);
  return check_done();
}
