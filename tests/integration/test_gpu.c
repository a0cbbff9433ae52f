/* A manager on a GPU: bytes go down and up through every tier and come back right. Only gemini.h; no kernel is needed: who
 * acquires a range on the device for reading and writing, and changes nothing, makes the device copy the only one.
 * Skipped where there is no GPU. SPDX-License-Identifier: Apache-2.0 */
#include <unistd.h>

#include "world.h"

#define W (UINT64_C(2) << 20)
enum { WINDOWS = 40 };
static const uint32_t HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE, FILES = GEMINI_TIER_FILE;

static gemini_config_t gpu_config(uint64_t device_windows, uint64_t host_windows, uint64_t file_windows) {
  gemini_config_t c = world_config(1, 1, 0);
  c.device = GEMINI_DEVICE_CUDA;
  c.window_bytes = W;
  c.device_bytes = device_windows * W;
  c.host_bytes = host_windows * W;
  c.file_bytes = file_windows * W;
  c.update_threads = 3;
  return c;
}
static void through_device(world_t *w, uint64_t object, uint64_t offset, uint64_t size) {
  gemini_access_t a = world_part(object, offset, size, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
}

static void test_gpu_bytes_come_back_through_every_tier(void) {
  for (uint64_t files = 0; files <= 60; files += 60) {
    world_t w = world_open(gpu_config(8, files ? 12 : WINDOWS + 2, files));
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
    uint64_t offset, random = 77;
    CHECK_OK(gemini_arena_take(w.mgr, arena, WINDOWS / 2 * W, &offset));
    uint64_t seed[WINDOWS / 2];
    for (uint64_t i = 0; i < WINDOWS / 2; i++) world_fill(&w, arena, i * W, W, HOST, seed[i] = i + 1);
    for (int step = 0; step < 200; step++) {
      uint64_t i = check_random(&random) % (WINDOWS / 2);
      switch (check_random(&random) % 5) {
      case 0:
      case 1: through_device(&w, arena, i * W, W); break;
      case 2: CHECK(world_holds(&w, arena, i * W, W, seed[i])); break;
      case 3: {
        gemini_access_t move = world_part(arena, i * W, W, 0, files ? FILES : HOST);
        CHECK_OK(gemini_move(w.mgr, &move, 1));
        break;
      }
      default: {
        gemini_access_t hint = world_part(arena, i * W, W, 0, DEVICE);
        CHECK_OK(gemini_hint(w.mgr, &hint, 1));
      }
      }
    }
    for (uint64_t i = 0; i < WINDOWS / 2; i++) {
      gemini_access_t a = world_part(arena, i * W, W, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      for (uint64_t k = 0; k < W; k += 997) CHECK_EQ(((uint8_t *)a.ptr)[k], world_byte(seed[i], i * W + k));
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    gemini_stats_t s = world_stats(&w);
    CHECK(s.peak_bytes[DEVICE] <= s.budget_bytes[DEVICE] && s.peak_bytes[HOST] <= s.budget_bytes[HOST]);
    world_close(&w);
  }
}

/* ---- updates, late, on the host, with gradients that come from the device */
static void add_gradient(void *user, const gemini_update_span_t *span) {
  float *master = span->ptr[1];
  const float *gradient = span->ptr[0];
  (void)user;
  CHECK_EQ(span->tier, GEMINI_TIER_HOST);
  for (uint64_t i = 0; i < span->element_count; i++) master[i] += gradient[i];
}
static void test_gpu_late_updates_follow_the_device(void) {
  world_t w = world_open(gpu_config(6, 10, 60));
  gemini_arena_t p = world_arena(&w, GEMINI_KIND_PARAM, 4, "p", 0, 0);
  gemini_arena_t m = world_arena(&w, GEMINI_KIND_MASTER, 4, "m", p, 0);
  uint64_t offset, count = 8 * W / 4;
  CHECK_OK(gemini_arena_take(w.mgr, p, 8 * W, &offset));
  for (uint64_t i = 0; i < 8; i++) {
    gemini_access_t a = world_part(p, i * W, W, GEMINI_WRITE, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t k = 0; k < W / 4; k++) ((float *)a.ptr)[k] = (float)(i * 1000 + k % 1000);
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  gemini_arena_t arenas[] = { p, m };
  uint32_t modes[] = { GEMINI_READ, GEMINI_READ_WRITE };
  for (int step = 0; step < 5; step++) {
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = arenas;
    u.modes = modes;
    u.arena_count = 2;
    u.flags = GEMINI_UPDATE_LATE;
    u.fn = add_gradient;
    u.stream = w.stream;
    for (uint64_t i = 0; i < 8; i++) through_device(&w, p, i * W, W);
    CHECK_OK(gemini_update(w.mgr, &u));
  }
  for (uint64_t i = 0; i < 8; i++) through_device(&w, m, i * W, W); /* behind the pending updates */
  for (uint64_t i = 0; i < 8; i++) {
    gemini_access_t a = world_part(m, i * W, W, GEMINI_READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t k = 0; k < W / 4; k += 7) CHECK(((float *)a.ptr)[k] == 5 * (float)(i * 1000 + k % 1000));
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  double there, here;
  gemini_access_t all = world_whole(m, GEMINI_READ, HOST);
  CHECK_OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &here));
  for (uint64_t i = 0; i < 4; i++) through_device(&w, m, i * W, W);
  CHECK_OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F32, w.stream, &there));
  CHECK(here == there && here > 0); /* to the bit, wherever the chunks are */
  CHECK(count > 0);
  world_close(&w);
}

static void test_gpu_memory_storm_evicts(void) {
  world_t w = world_open(gpu_config(10, WINDOWS, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  uint64_t offset, random = 5;
  CHECK_OK(gemini_arena_take(w.mgr, arena, 20 * W, &offset));
  for (uint64_t i = 0; i < 20; i++) world_fill(&w, arena, i * W, W, HOST, i + 1);
  void *blocks[6] = { 0 };
  for (int step = 0; step < 400; step++) {
    uint64_t i = check_random(&random) % 6;
    if (blocks[i]) {
      CHECK_OK(gemini_free(w.mgr, blocks[i], w.stream));
      blocks[i] = NULL;
    } else {
      CHECK_OK(gemini_alloc(w.mgr, 1 + check_random(&random) % W, w.stream, &blocks[i]));
    }
    through_device(&w, arena, check_random(&random) % 20 * W, W);
  }
  for (int i = 0; i < 6; i++) CHECK_OK(gemini_free(w.mgr, blocks[i], w.stream));
  for (uint64_t i = 0; i < 20; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  world_close(&w);
}

static void test_gpu_streams_of_the_caller_are_adopted(void) {
  world_t w = world_open(gpu_config(6, 10, 0));
  gemini_stream_t adopted, own;
  void *native, *same;
  CHECK_OK(gemini_stream_create(w.mgr, &own));
  CHECK_OK(gemini_stream_native(w.mgr, own, &native));
  CHECK_OK(gemini_stream_adopt(w.mgr, native, &adopted));
  CHECK_OK(gemini_stream_native(w.mgr, adopted, &same));
  CHECK(native == same);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", W);
  world_fill(&w, t, 0, W, HOST, 3);
  gemini_access_t a = world_whole(t, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, adopted));
  CHECK_OK(gemini_release(w.mgr, &a, 1, adopted));
  CHECK(world_holds(&w, t, 0, W, 3));
  CHECK_OK(gemini_stream_destroy(adopted));
  CHECK_OK(gemini_stream_destroy(own));
  world_close(&w);
}

int main(void) {
  gemini_config_t c = gpu_config(6, 10, 0);
  gemini_manager_t mgr;
  gemini_status_t status = gemini_manager_open(&c, &mgr);
  if (status == GEMINI_ERR_UNSUPPORTED) {
    fprintf(stderr, "skipped: %s\n", world_error().message);
    return 77;
  }
  CHECK_OK(status);
  CHECK_OK(gemini_manager_close(mgr));
  RUN(test_gpu_bytes_come_back_through_every_tier);
  RUN(test_gpu_late_updates_follow_the_device);
  RUN(test_gpu_memory_storm_evicts);
  RUN(test_gpu_streams_of_the_caller_are_adopted);
  return check_done();
}
