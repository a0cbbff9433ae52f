/* What addresses are mapped to over a chunk's comings and goings, over a fake driver. SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>
#include <unistd.h>

#include "../check.h"
#include "../integration/world.h"
#include "chunk/arena.h"
#include "chunk/residency.h"
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

static void leave(const world_t *w, gemini_arena_t arena, uint64_t i, uint64_t chunk_bytes) {
  gemini_access_t a = world_part(arena, i * chunk_bytes, chunk_bytes, 0, GEMINI_TIER_HOST);
  CHECK_OK(gemini_move(w->mgr, &a, 1));
}

static gmi_chunk_t *chunk(gmi_manager_t *m, uint64_t i) { return &gmi_arena_at(m, 0)->chunks[i]; }
static void make_due(const world_t *w, uint64_t i) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  gmi_lock(m, __func__);
  gmi_chunk_leaves_late(m, chunk(m, i));
  gmi_chunk_leaves_late(m, chunk(m, i)); /* twice is once */
  gmi_unlock(m);
}
static gemini_status_t fetch(const world_t *w, uint64_t i) { /* with a frame that is left */
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  gmi_lock(m, __func__);
  gemini_status_t status = gmi_chunk_fetch(m, chunk(m, i), false, GEMINI_REASON_PLAN, 0);
  gmi_unlock(m);
  return status;
}
static bool is_there(const world_t *w, uint64_t i) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  gmi_lock(m, __func__);
  bool there = gmi_chunk_is_resident(chunk(m, i));
  gmi_unlock(m);
  return there;
}
static uint32_t dues_left(const world_t *w) { /* once those have left for which the link has time */
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  gmi_lock(m, __func__);
  gmi_due_chunks_leave(m);
  uint32_t count = m->frames.due.count;
  gmi_unlock(m);
  return count;
}

static void test_who_is_due_to_leave_makes_room(void) {
  gemini_arena_t arena;
  world_t w = start(&arena);
  for (uint64_t i = 0; i < FRAMES; i++) through_device(&w, arena, i);
  CHECK_EQ(fetch(&w, FRAMES), GEMINI_ERR_OOM_DEVICE);
  make_due(&w, 2);
  make_due(&w, 1);
  CHECK_OK(fetch(&w, FRAMES));
  CHECK(!is_there(&w, 2) && is_there(&w, 1)); /* the one that has been due for longer */
  CHECK_OK(fetch(&w, FRAMES + 1));
  CHECK(!is_there(&w, 1));
  CHECK_EQ(fetch(&w, FRAMES + 2), GEMINI_ERR_OOM_DEVICE);
  make_due(&w, 0);
  CHECK_OK(fetch(&w, 0)); /* needed again */
  CHECK_EQ(dues_left(&w), 0);
  CHECK(is_there(&w, 0));
  make_due(&w, 0);
  gemini_access_t a = world_part(arena, 0, W, GEMINI_READ, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK_EQ(dues_left(&w), 0); /* it stays, as it is in use */
  CHECK(is_there(&w, 0));
  CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  make_due(&w, 0);
  CHECK_EQ(dues_left(&w), 0);
  CHECK(!is_there(&w, 0));
  make_due(&w, 3);
  for (uint64_t i = 0; i < CHUNKS; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  make_due(&w, FRAMES);
  CHECK_OK(gemini_arena_destroy(w.mgr, arena));
  finish(&w);
}

static void test_who_is_due_to_leave_gives_its_frame_to_who_had_it(void) {
  gemini_arena_t arena;
  world_t w = start(&arena);
  for (uint64_t i = 0; i < FRAMES; i++) through_device(&w, arena, i);
  leave(&w, arena, 0, W);
  through_device(&w, arena, FRAMES); /* in the frame of the first one */
  leave(&w, arena, 1, W);
  make_due(&w, FRAMES);
  fake_cuda_fail_function("cuMemMap", CU_OUT_OF_MEMORY);
  CHECK_OK(fetch(&w, 0)); /* the other one's would have to be mapped */
  fake_cuda_fail_function(NULL, 0);
  CHECK(!is_there(&w, FRAMES) && is_there(&w, 0));
  for (uint64_t i = 0; i < CHUNKS; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  finish(&w);
}

/* 80 copies of 4 ms each: some are queued, the others when these have ended. */
static void test_who_is_due_leaves_while_the_link_is_idle(void) {
  enum { MANY = 80, SMALL = 65536 };
  gemini_config_t c = world_config(1, 1, 0);
  c.chunk_bytes = SMALL;
  c.device_bytes = MANY * SMALL;
  c.host_bytes = (MANY + 2) * SMALL;
  c.sim_d2h_bytes_per_s = SMALL * 250;
  world_t w = world_open(c);
  uint64_t offset;
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  CHECK_OK(gemini_arena_take(w.mgr, arena, MANY * SMALL, &offset));
  world_fill(&w, arena, 0, MANY * SMALL, GEMINI_TIER_DEVICE, 1);
  for (uint64_t i = 0; i < MANY; i++) make_due(&w, i);
  const uint32_t left = dues_left(&w);
  CHECK(left > 0 && left < MANY);
  CHECK(!is_there(&w, 0) && is_there(&w, MANY - 1));
  for (int look = 0; look < 5000 && dues_left(&w); look++) usleep(1000);
  CHECK(!is_there(&w, MANY - 1));
  CHECK(world_holds(&w, arena, 0, MANY * SMALL, 1));
  world_close(&w);
}

/* Until somebody opens, or, so that a test which waits for it fails, for some seconds. */
static void stand_still(void *user) {
  _Atomic bool *open = user;
  for (int i = 0; i < 50000 && !atomic_load(open); i++) usleep(100);
  atomic_store(open, true);
}
/* The frame that an arena's first chunk would get. */
static uint32_t frame_for(const world_t *w, uint32_t flags, uint32_t *former_out) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  uint32_t frame;
  gmi_lock(m, __func__);
  gmi_chunk_t *c = chunk(m, 0);
  *former_out = gmi_chunk_mapping(c)->frame_1 - 1;
  CHECK_OK(gmi_frame_take(m, gmi_chunk_mapping(c), GEMINI_REASON_PRESSURE, flags, &frame));
  gmi_frame_give(m, frame, m->frames.at[frame].ready);
  gmi_unlock(m);
  return frame;
}
/* All chunks have left. The first one's former frame is in use by queued work of the last one, until open is true; others
 * have been free for longer. */
static world_t with_a_frame_in_use(gemini_arena_t *arena_out, _Atomic bool *open) {
  gemini_config_t c = world_config(1, 1, 0);
  c.chunk_bytes = W;
  c.device_bytes = FRAMES * W;
  c.host_bytes = (FRAMES + 2) * W;
  world_t w = world_open(c);
  uint64_t offset;
  const gemini_arena_t arena = *arena_out = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  CHECK_OK(gemini_arena_take(w.mgr, arena, (FRAMES + 1) * W, &offset));
  for (uint64_t i = 0; i <= FRAMES; i++) world_fill(&w, arena, i * W, W, GEMINI_TIER_HOST, i + 1);
  for (uint64_t i = 0; i < FRAMES; i++) through_device(&w, arena, i);
  leave(&w, arena, 0, W);
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, stand_still, open));
  gemini_access_t last = world_part(arena, FRAMES * W, W, GEMINI_READ, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &last, 1, w.stream));
  CHECK_OK(gemini_release(w.mgr, &last, 1, w.stream));
  for (uint64_t i = 1; i <= FRAMES; i++) leave(&w, arena, i, W);
  return w;
}
static void test_who_must_not_wait_gets_another_frame(void) {
  uint32_t former;
  _Atomic bool open = false;
  gemini_arena_t arena;
  world_t w = with_a_frame_in_use(&arena, &open);
  CHECK_EQ(frame_for(&w, GMI_TAKE_READY, &former) == former, false);
  CHECK_EQ(frame_for(&w, 0, &former), former);
  atomic_store(&open, true);
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK_EQ(frame_for(&w, GMI_TAKE_READY, &former), former);
  for (uint64_t i = 0; i <= FRAMES; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  world_close(&w);
}

/* Who writes all of the chunk need not wait for the work either: it gets its bytes while that stands still. */
static void test_who_is_written_anew_gets_another_frame(void) {
  _Atomic bool open = false;
  gemini_arena_t arena;
  world_t w = with_a_frame_in_use(&arena, &open);
  gemini_access_t fresh = world_part(arena, 0, W, GEMINI_WRITE, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &fresh, 1, GEMINI_STREAM_CALLER));
  CHECK(!atomic_load(&open));
  world_pattern(fresh.ptr, 0, W, 77);
  CHECK_OK(gemini_release(w.mgr, &fresh, 1, GEMINI_STREAM_CALLER));
  atomic_store(&open, true);
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  for (uint64_t i = 0; i <= FRAMES; i++) CHECK(world_holds(&w, arena, i * W, W, i ? i + 1 : 77));
  world_close(&w);
}

/* Of 80 frames the first chunk's former one is given back behind `before` others, and is the only one that work uses. */
static void case_of_many_frames(uint64_t before, bool waits) {
  enum { MANY = 80, SMALL = 65536 };
  gemini_config_t c = world_config(1, 1, 0);
  c.chunk_bytes = SMALL;
  c.device_bytes = MANY * SMALL;
  c.host_bytes = (MANY + 2) * SMALL;
  world_t w = world_open(c);
  uint64_t offset;
  uint32_t former;
  _Atomic bool open = false;
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  CHECK_OK(gemini_arena_take(w.mgr, arena, (MANY + 1) * SMALL, &offset));
  world_fill(&w, arena, 0, (MANY + 1) * SMALL, GEMINI_TIER_HOST, 1);
  for (uint64_t i = 0; i <= MANY; i++) {
    gemini_access_t a = world_part(arena, i * SMALL, SMALL, GEMINI_READ, GEMINI_TIER_DEVICE);
    if (i == MANY) {
      leave(&w, arena, 0, SMALL);
      CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
      CHECK_OK(gemini_stream_call(w.mgr, w.stream, stand_still, &open));
    }
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  }
  for (uint64_t i = 1; i <= MANY; i++) {
    leave(&w, arena, i <= before ? i : i == before + 1 ? MANY : i - 1, SMALL);
  }
  CHECK_EQ(frame_for(&w, GMI_TAKE_SOON, &former) == former, waits);
  CHECK_EQ(frame_for(&w, 0, &former), former);
  atomic_store(&open, true);
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK_EQ(frame_for(&w, GMI_TAKE_SOON, &former), former);
  world_close(&w);
}
static void test_who_would_wait_long_gets_another_frame(void) {
  case_of_many_frames(70, false);
  case_of_many_frames(10, true);
}

int main(void) {
  RUN(test_who_comes_again_is_mapped_already);
  RUN(test_frames_that_end_leave_no_address_behind);
  RUN(test_who_is_due_to_leave_makes_room);
  RUN(test_who_is_due_to_leave_gives_its_frame_to_who_had_it);
  fake_cuda_reset();
  gmi_cuda_driver_replace(NULL);
  RUN(test_who_must_not_wait_gets_another_frame);
  RUN(test_who_is_written_anew_gets_another_frame);
  RUN(test_who_would_wait_long_gets_another_frame);
  RUN(test_who_is_due_leaves_while_the_link_is_idle);
  return check_done();
}
