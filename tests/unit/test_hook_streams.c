/* Streams that frameworks name in calls of their allocators, over a fake driver: what is adopted, forgotten, handed out
 * again, and that ordinary allocations call the driver never. SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>
#include <unistd.h>

#include "../check.h"
#include "device/cuda_driver.h"
#include "fake_cuda.h"
#include "figures.h"
#include "gemini.h"
#include "gemini/hook.h"

#define MIB (UINT64_C(1) << 20)
#define W (2 * MIB)

static const gmi_cuda_driver_t *driver;
static cu_context_t context;

static gemini_manager_t start_with(uint64_t chunks, const char *lacking_symbol) {
  fake_cuda_reset();
  fake_cuda.lacking_symbol = lacking_symbol;
  gmi_cuda_driver_replace(fake_cuda_symbol);
  CHECK(driver = gmi_cuda_driver());
  CHECK_EQ(driver->init(0), CU_SUCCESS);
  CHECK_EQ(driver->primary_retain(&context, 0), CU_SUCCESS);
  CHECK_EQ(driver->current_set(context), CU_SUCCESS);
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = chunks * W;
  c.host_bytes = 8 * W;
  c.update_threads = 1;
  gemini_manager_t mgr;
  CHECK_EQ(gemini_manager_open(&c, &mgr), GEMINI_OK);
  CHECK_EQ(gemini_hook_set(mgr, 0), GEMINI_OK);
  return mgr;
}
static gemini_manager_t start(uint64_t chunks) { return start_with(chunks, NULL); }
static void finish(gemini_manager_t mgr, const cu_stream_t *streams, int count) { /* streams: to be destroyed */
  CHECK_EQ(gemini_manager_close(mgr), GEMINI_OK);
  for (int i = 0; i < count; i++) CHECK_EQ(driver->stream_destroy(streams[i]), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(0), CU_SUCCESS);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}
static cu_stream_t native_new(void) {
  cu_stream_t stream;
  CHECK_EQ(driver->stream_create(&stream, CU_STREAM_NON_BLOCKING_FLAG), CU_SUCCESS);
  return stream;
}
static void *get(uint64_t size, cu_stream_t stream) { return gemini_torch_malloc((ptrdiff_t)size, 0, stream); }
static void put(void *ptr, cu_stream_t stream) { gemini_torch_free(ptr, 0, 0, stream); }
static uint64_t live_bytes(gemini_manager_t mgr) {
  figures_t s = { 0 };
  CHECK_EQ(figures_read(mgr, &s), GEMINI_OK);
  return s.nonmodel_bytes;
}

static _Atomic bool gate, passed;
static void wait_for_gate(void *user) {
  (void)user;
  while (!gate) usleep(100);
}
static void note_passed(void *user) {
  (void)user;
  passed = true;
}

static void test_hook_pairs_on_one_stream_do_not_call_the_driver(void) {
  gemini_manager_t mgr = start(64);
  const uint64_t sizes[] = { 512, MIB, 32 * MIB };
  void *blocks[3];
  for (int round = 0; round < 100; round++) {
    uint64_t calls = fake_cuda_calls();
    for (int i = 0; i < 3; i++) {
      put(get(sizes[i], NULL), NULL);
      CHECK(blocks[i] = get(sizes[i], NULL));
    }
    for (int i = 0; i < 3; i++) put(blocks[(i + round) % 3], NULL);
    if (round) CHECK_EQ(fake_cuda_calls(), calls); /* the first one maps */
  }
  finish(mgr, NULL, 0);
}

/* Frees on many streams, all behind work that is not done, of blocks that are neighbours. */
static void test_hook_frees_on_known_streams_queue_nothing(void) {
  gemini_manager_t mgr = start(64);
  cu_stream_t streams[3];
  void *blocks[30];
  gate = false;
  for (int i = 0; i < 3; i++) {
    streams[i] = native_new();
    put(get(512, streams[i]), streams[i]);
  }
  for (int i = 0; i < 30; i++) CHECK(blocks[i] = get(MIB, NULL));
  CHECK_EQ(driver->host_call(streams[0], wait_for_gate, NULL), CU_SUCCESS);
  fake_cuda_fail_function("cuEventRecord", CU_INVALID_VALUE); /* closing would tell of it */
  for (int i = 0; i < 30; i++) put(blocks[i], streams[i % 3]);
  fake_cuda_fail_function(NULL, 0);
  CHECK_EQ(live_bytes(mgr), 0);
  gate = true;
  finish(mgr, streams, 3);
}

static void test_hook_streams_beyond_the_limit_take_the_oldest_ones_place(void) {
  gemini_manager_t mgr = start(8);
  cu_stream_t streams[60];
  void *blocks[60];
  gemini_stream_t own[40];
  for (int i = 0; i < 40; i++) CHECK_EQ(gemini_stream_create(mgr, &own[i]), GEMINI_OK);
  for (int i = 0; i < 60; i++) {
    streams[i] = native_new();
    CHECK(blocks[i] = get(512, streams[i])); /* 8 places */
  }
  CHECK_EQ(live_bytes(mgr), 60 * 512);
  put(blocks[59], streams[59]); /* known */
  CHECK_EQ(live_bytes(mgr), 59 * 512);
  gate = false;
  for (int i = 52; i < 59; i++) CHECK_EQ(driver->host_call(streams[i], wait_for_gate, NULL), CU_SUCCESS);
  for (int i = 0; i < 20; i++) put(blocks[i], streams[i]); /* unknown: put aside, as nobody waits for a place here */
  CHECK_EQ(live_bytes(mgr), 59 * 512);
  gate = true;
  CHECK(blocks[0] = get(512, NULL)); /* who allocates may wait */
  CHECK_EQ(live_bytes(mgr), 40 * 512);
  put(blocks[0], NULL);
  for (int i = 20; i < 59; i++) put(blocks[i], streams[i]);
  CHECK(blocks[0] = get(1024, NULL));
  CHECK_EQ(live_bytes(mgr), 1024);
  finish(mgr, streams, 60);
}

static void test_hook_stream_that_the_caller_adopts_too_is_one_stream(void) {
  gemini_manager_t mgr = start(8);
  cu_stream_t first = native_new(), second = native_new();
  gemini_stream_t handle, other;
  void *native;
  CHECK_EQ(gemini_stream_adopt(mgr, first, &handle), GEMINI_OK);
  put(get(512, first), first);
  CHECK_EQ(gemini_hook_forget(mgr, first), GEMINI_ERR_NOT_FOUND); /* the caller's */
  put(get(512, second), second);
  CHECK_EQ(gemini_stream_adopt(mgr, second, &other), GEMINI_OK); /* from the hook */
  CHECK_EQ(gemini_hook_forget(mgr, second), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(gemini_stream_native(mgr, other, &native), GEMINI_OK);
  CHECK(native == second);
  gemini_stream_t rest[46]; /* two of the 48 are taken, no more */
  for (int i = 0; i < 46; i++) CHECK_EQ(gemini_stream_create(mgr, &rest[i]), GEMINI_OK);
  CHECK_EQ(gemini_stream_create(mgr, &handle), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_stream_destroy(mgr, other), GEMINI_OK);
  put(get(512, second), second); /* the hook's again */
  CHECK_EQ(gemini_hook_forget(mgr, second), GEMINI_OK);
  CHECK_EQ(gemini_hook_forget(mgr, second), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(driver->stream_destroy(second), CU_SUCCESS);
  finish(mgr, &first, 1);
}

/* A stream is destroyed while its work goes on, and the next one gets its handle: who then allocates there must not get
 * what the old one still uses. */
static void test_hook_stream_handle_that_is_given_again_is_noticed(void) {
  gemini_manager_t mgr = start(2);
  fake_cuda.reuse_streams = true;
  cu_stream_t old = native_new();
  void *block = get(2 * W, old), *half; /* all there is */
  CHECK(block);
  gate = passed = false;
  CHECK_EQ(driver->host_call(old, wait_for_gate, NULL), CU_SUCCESS);
  CHECK_EQ(driver->host_call(old, note_passed, NULL), CU_SUCCESS);
  put(block, old);
  CHECK_EQ(driver->stream_destroy(old), CU_SUCCESS);
  cu_stream_t renewed = native_new();
  CHECK(renewed == old);
  put(block, renewed); /* not live: put aside, as that would wait, and refused later */
  gate = true;
  CHECK(half = get(W, renewed));
  CHECK(passed); /* it waited */
  put(half, renewed);
  uint64_t calls = fake_cuda_calls();
  put(get(W, renewed), renewed);
  CHECK(fake_cuda_calls() - calls <= 10); /* looks who it is, no more */
  CHECK_EQ(gemini_hook_forget(mgr, renewed), GEMINI_OK);
  finish(mgr, &renewed, 1);
}

/* Drivers before CUDA 12 do not number streams. */
static void test_hook_works_with_a_driver_that_numbers_no_streams(void) {
  gemini_manager_t mgr = start_with(8, "cuStreamGetId");
  cu_stream_t stream = native_new();
  for (int i = 0; i < 10; i++) put(get(MIB, stream), stream);
  CHECK_EQ(live_bytes(mgr), 0);
  finish(mgr, &stream, 1);
}

static void test_hook_streams_that_cannot_be_adopted_are_refused(void) {
  gemini_manager_t mgr = start(4);
  void *block = get(512, NULL);
  CHECK(block);
  CHECK(!get(512, (cu_stream_t)CU_STREAM_PER_THREAD_HANDLE));
  put(block, (cu_stream_t)CU_STREAM_PER_THREAD_HANDLE);
  CHECK_EQ(live_bytes(mgr), 512); /* it stays */
  put(block, NULL);
  CHECK_EQ(live_bytes(mgr), 0);
  finish(mgr, NULL, 0);
}

static void test_hook_streams_of_the_managers_own_are_known(void) {
  gemini_manager_t mgr = start(64);
  gemini_stream_t own, alias;
  void *native, *ptr;
  CHECK_EQ(gemini_stream_create(mgr, &own), GEMINI_OK);
  CHECK_EQ(gemini_stream_native(mgr, own, &native), GEMINI_OK);
  CHECK(ptr = get(MIB, native));
  put(ptr, native);
  CHECK_EQ(gemini_hook_forget(mgr, native), GEMINI_ERR_NOT_FOUND); /* nothing was adopted */
  CHECK_EQ(gemini_stream_adopt(mgr, native, &alias), GEMINI_OK);   /* but whoever asks for a second name gets one */
  CHECK_EQ(gemini_stream_synchronize(mgr, alias), GEMINI_OK);
  finish(mgr, NULL, 0); /* with both */
}

int main(void) {
  RUN(test_hook_pairs_on_one_stream_do_not_call_the_driver);
  RUN(test_hook_frees_on_known_streams_queue_nothing);
  RUN(test_hook_streams_beyond_the_limit_take_the_oldest_ones_place);
  RUN(test_hook_stream_that_the_caller_adopts_too_is_one_stream);
  RUN(test_hook_stream_handle_that_is_given_again_is_noticed);
  RUN(test_hook_works_with_a_driver_that_numbers_no_streams);
  RUN(test_hook_streams_that_cannot_be_adopted_are_refused);
  RUN(test_hook_streams_of_the_managers_own_are_known);
  fake_cuda_reset();
  return check_done();
}
