/* Streams and budgets on a GPU whose driver refuses. SPDX-License-Identifier: Apache-2.0 */
#include "../integration/world.h"
#include "device/cuda_driver.h"
#include "fake_cuda.h"

#define W (UINT64_C(2) << 20)
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST };

typedef struct {
  world_t w;
  gemini_stream_t stream;
  gemini_tensor_t t;
} gpu_t;

static uint32_t flags; /* of the managers */
static gpu_t start(void) {
  fake_cuda_reset();
  gmi_cuda_driver_replace(fake_cuda_symbol);
  gemini_config_t c = world_config(1, 1, 0);
  c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = 4 * W;
  c.host_bytes = 8 * W;
  c.flags = flags;
  gpu_t g = { .w = world_open(c) };
  g.t = world_tensor(&g.w, world_arena(&g.w, GEMINI_KIND_OTHER, 1, "a", 0, 0), "t", 4 * W);
  CHECK_OK(gemini_stream_create(g.w.mgr, &g.stream));
  return g;
}
static void finish(gpu_t *g) {
  world_close(&g->w);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}

/* Reads and writes chunks on the stream, so that they wait for it when they are used elsewhere. */
static void use_stream(gpu_t *g) {
  gemini_access_t a = world_whole(g->t, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(g->w.mgr, &a, 1, g->stream));
  CHECK_OK(gemini_release(g->w.mgr, &a, 1, g->stream));
}
static void use_elsewhere(gpu_t *g) {
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    gemini_access_t a = world_whole(g->t, GEMINI_READ_WRITE, tier);
    CHECK_OK(gemini_acquire(g->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_release(g->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
}

/* Whatever the library was doing: the error has the driver's code, and its name for it. The code is not always the one
 * that was planted: where a context could not be made current, the next function says so. */
static bool error_is_the_drivers(void) {
  gemini_error_info_t e = world_error();
  if (e.native_code && strstr(e.message, "cu") && strstr(e.message, ": CUDA_ERROR_")) return true;
  fprintf(stderr, "    error is: %s (%lld)\n", e.message, (long long)e.native_code);
  return false;
}

static void test_stream_that_could_not_be_destroyed_stays(void) {
  bool reached = true;
  uint64_t failed = 0;
  for (uint64_t n = 0; reached; n += check_stride()) {
    gpu_t g = start();
    use_stream(&g);
    uint64_t first = fake_cuda_calls() + 1 + n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    gemini_status_t status = gemini_stream_destroy(g.w.mgr, g.stream);
    reached = fake_cuda_calls() >= first;
    fake_cuda_fail(0, 0, 0);
    if (status) {
      failed++;
      CHECK_EQ(status, GEMINI_ERR_DEVICE);
      CHECK(error_is_the_drivers());
      use_stream(&g);
      CHECK_OK(gemini_stream_synchronize(g.w.mgr, g.stream));
      CHECK_OK(gemini_stream_destroy(g.w.mgr, g.stream));
    }
    CHECK_STATUS(gemini_stream_synchronize(g.w.mgr, g.stream), GEMINI_ERR_HANDLE);
    use_elsewhere(&g);
    finish(&g);
  }
  CHECK(failed > 0);
}

static void test_device_budget_that_could_not_be_changed_stays(void) {
  bool reached = true;
  uint64_t failed = 0;
  for (uint64_t n = 0; reached; n += check_stride()) {
    gpu_t g = start();
    use_stream(&g);
    uint64_t first = fake_cuda_calls() + 1 + n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    gemini_status_t status = gemini_budget_set(g.w.mgr, GEMINI_TIER_DEVICE, 2 * W);
    reached = fake_cuda_calls() >= first;
    fake_cuda_fail(0, 0, 0);
    CHECK_EQ(world_stats(&g.w).budget_bytes[DEVICE], status ? 4 * W : 2 * W);
    if (status) {
      failed++;
      CHECK_EQ(world_error().status, status);
      CHECK_EQ(status, GEMINI_ERR_DEVICE);
      CHECK(error_is_the_drivers());
      CHECK_OK(gemini_budget_set(g.w.mgr, GEMINI_TIER_DEVICE, 2 * W));
    }
    CHECK(world_stats(&g.w).used_bytes[DEVICE] <= 2 * W);
    CHECK_OK(gemini_budget_set(g.w.mgr, GEMINI_TIER_DEVICE, 4 * W));
    use_stream(&g);
    use_elsewhere(&g);
    finish(&g);
  }
  CHECK(failed > 0);
}

/* Chunks that go to the device and back, more than fit there: frames, mappings, copies, marks and waits. */
static void test_every_failure_of_the_driver_is_named(void) {
  bool reached = true;
  uint64_t failed = 0;
  for (uint64_t n = 0; reached; n += check_stride()) {
    gpu_t g = start();
    gemini_stream_t other;
    CHECK_OK(gemini_stream_create(g.w.mgr, &other));
    CHECK_OK(gemini_budget_set(g.w.mgr, GEMINI_TIER_DEVICE, 2 * W));
    uint64_t first = fake_cuda_calls() + 1 + n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    for (uint64_t i = 0; i < 8; i++) {
      gemini_access_t a = gemini_tensor_access(g.t, i % 4 * W, W, GEMINI_READ_WRITE, i < 6 ? DEVICE : HOST);
      gemini_stream_t stream = i < 6 ? i % 2 ? other : g.stream : GEMINI_STREAM_CALLER;
      gemini_status_t status = gemini_acquire(g.w.mgr, &a, 1, stream);
      if (!status) status = gemini_release(g.w.mgr, &a, 1, stream);
      if (!status) continue;
      failed++;
      CHECK_EQ(status, GEMINI_ERR_DEVICE);
      CHECK(error_is_the_drivers());
    }
    reached = fake_cuda_calls() >= first;
    fake_cuda_fail(0, 0, 0);
    gemini_status_t closed = gemini_manager_close(g.w.mgr);
    CHECK(closed == GEMINI_OK || (closed == GEMINI_ERR_DEVICE && error_is_the_drivers()));
  }
  CHECK(failed > 0);
}

/* A range on the host that could not be released as it should is released; what the stream does there is waited for all
 * the same. */
typedef struct {
  uint8_t *at;
  uint64_t size, seed;
} write_t;
static void write_later(void *user) {
  const write_t *write = user;
  usleep(50000);
  world_write(write->at, 0, write->size, write->seed);
}
static void test_host_release_that_the_driver_refuses_keeps_its_work(void) {
  bool reached = true;
  uint64_t failed = 0;
  for (uint64_t n = 0; reached; n += check_stride()) {
    gpu_t g = start();
    for (uint64_t i = 0; i < 2; i++) { /* the second one: slots with work of another stream */
      gemini_access_t a = world_part(g.t, 0, W, GEMINI_READ_WRITE, HOST);
      CHECK_OK(gemini_acquire(g.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      write_t write = { a.ptr, 4096, n * 2 + i + 1 };
      CHECK_OK(gemini_stream_call(g.w.mgr, i ? g.stream : g.w.stream, write_later, &write));
      uint64_t first = fake_cuda_calls() + 1 + n;
      fake_cuda_fail(first, first + 1, CU_UNKNOWN);
      gemini_status_t status = gemini_release(g.w.mgr, &a, 1, i ? g.stream : g.w.stream);
      reached = fake_cuda_calls() >= first;
      fake_cuda_fail(0, 0, 0);
      CHECK(!status || status == GEMINI_ERR_DEVICE);
      failed += status != GEMINI_OK;
      CHECK_STATUS(gemini_release(g.w.mgr, &a, 1, g.stream), GEMINI_ERR_STATE);
      CHECK(world_holds(&g.w, g.t, 0, 4096, write.seed));
      gemini_stream_t streams[] = { g.stream, g.w.stream };
      for (int k = 0; k < 2; k++) CHECK_OK(gemini_stream_synchronize(g.w.mgr, streams[k]));
    }
    finish(&g);
  }
  CHECK(failed > 0);
}

/* With GEMINI_CONFIG_STRICT a chunk that leaves is unmapped at once, but not under work that could not be waited for. */
typedef struct {
  const uint8_t *at;
  bool right;
} read_t;
static void read_later(void *user) {
  read_t *read = user;
  usleep(20000);
  read->right = world_reads(read->at, 0, 4096, 7);
}
static void test_strict_leaves_work_its_mapping_where_waiting_fails(void) {
  bool reached = true;
  flags = GEMINI_CONFIG_STRICT;
  for (uint64_t n = 0; reached; n += check_stride()) {
    gpu_t g = start();
    world_fill(&g.w, g.t, 0, 4096, HOST, 7);
    gemini_access_t a = world_part(g.t, 0, W, GEMINI_READ, DEVICE), down = world_part(g.t, 0, W, 0, HOST);
    CHECK_OK(gemini_acquire(g.w.mgr, &a, 1, g.stream));
    read_t read = { a.ptr, false };
    CHECK_OK(gemini_stream_call(g.w.mgr, g.stream, read_later, &read));
    CHECK_OK(gemini_release(g.w.mgr, &a, 1, g.stream));
    uint64_t first = fake_cuda_calls() + 1 + n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    gemini_status_t status = gemini_move(g.w.mgr, &down, 1);
    reached = fake_cuda_calls() >= first;
    fake_cuda_fail(0, 0, 0);
    CHECK(!status || status == GEMINI_ERR_DEVICE);
    CHECK_OK(gemini_stream_synchronize(g.w.mgr, g.stream));
    CHECK(read.right);
    use_elsewhere(&g);
    status = gemini_manager_close(g.w.mgr);
    CHECK(!status || status == GEMINI_ERR_DEVICE);
    CHECK_EQ(fake_cuda_violations(), 0);
  }
  flags = 0;
}

/* A chunk remembers the reads of two streams; a third one waits for one of them. Where the driver refuses that wait, the
 * read is not forgotten. */
static void test_third_reader_that_cannot_wait_is_waited_for(void) {
  enum { READERS = 3 };
  bool reached = true;
  for (uint64_t n = 0; reached; n += check_stride()) {
    gpu_t g = start();
    gemini_stream_t streams[READERS] = { g.stream, g.w.stream };
    CHECK_OK(gemini_stream_create(g.w.mgr, &streams[2]));
    world_fill(&g.w, g.t, 0, 4096, HOST, 7);
    read_t reads[READERS];
    for (int i = 0; i < READERS; i++) {
      gemini_access_t a = world_part(g.t, 0, W, GEMINI_READ, DEVICE);
      CHECK_OK(gemini_acquire(g.w.mgr, &a, 1, streams[i]));
      reads[i] = (read_t){ a.ptr, false };
      CHECK_OK(gemini_stream_call(g.w.mgr, streams[i], read_later, &reads[i]));
      uint64_t first = fake_cuda_calls() + 1 + n;
      if (i == 2) fake_cuda_fail(first, first, CU_UNKNOWN);
      gemini_status_t status = gemini_release(g.w.mgr, &a, 1, streams[i]);
      if (i == 2) reached = fake_cuda_calls() >= first;
      fake_cuda_fail(0, 0, 0);
      CHECK(!status || status == GEMINI_ERR_DEVICE);
    }
    gemini_access_t a = world_part(g.t, 0, W, GEMINI_READ_WRITE, DEVICE);
    CHECK_OK(gemini_acquire(g.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    world_write(a.ptr, 0, 4096, 8);
    CHECK_OK(gemini_release(g.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (int i = 0; i < READERS; i++) CHECK_OK(gemini_stream_synchronize(g.w.mgr, streams[i]));
    for (int i = 0; i < READERS; i++) CHECK(reads[i].right);
    finish(&g);
  }
}

int main(void) {
  RUN(test_every_failure_of_the_driver_is_named);
  RUN(test_host_release_that_the_driver_refuses_keeps_its_work);
  RUN(test_strict_leaves_work_its_mapping_where_waiting_fails);
  RUN(test_third_reader_that_cannot_wait_is_waited_for);
  RUN(test_stream_that_could_not_be_destroyed_stays);
  RUN(test_device_budget_that_could_not_be_changed_stays);
  fake_cuda_reset();
  return check_done();
}
