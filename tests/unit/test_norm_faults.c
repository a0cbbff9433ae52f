/* Norms on a GPU whose driver refuses: a later call of the driver must not write what an earlier norm has asked for.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <unistd.h>

#include "../integration/world.h"
#include "core/manager.h"
#include "core/streams.h"
#include "device/cuda_driver.h"
#include "fake_cuda.h"

#define W (UINT64_C(2) << 20)
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST };
enum { CHUNKS = 4, BLOCKS = CHUNKS * (2 << 20) / 65536, GUARDS = 64 };

static const gmi_cuda_driver_t *driver;
static cu_context_t context;
static gemini_tensor_t tensor;

static world_t start(void) {
  fake_cuda_reset();
  gmi_cuda_driver_replace(fake_cuda_symbol);
  CHECK(driver = gmi_cuda_driver());
  CHECK_EQ(driver->init(0), CU_SUCCESS);
  CHECK_EQ(driver->primary_retain(&context, 0), CU_SUCCESS);
  CHECK_EQ(driver->current_set(context), CU_SUCCESS);
  gemini_config_t c = world_config(1, 1, 0);
  c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = CHUNKS * W;
  c.host_bytes = 2 * CHUNKS * W;
  world_t w = world_open(c);
  tensor = world_tensor(&w, world_arena(&w, GEMINI_KIND_PARAM, 4, "a", 0, 0), "t", CHUNKS * W);
  gemini_access_t a = world_whole(tensor, GEMINI_WRITE, HOST);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < CHUNKS * W / 4; i++) ((float *)a.ptr)[i] = (float)(i % 5);
  CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  gemini_access_t up = world_whole(tensor, 0, DEVICE);
  CHECK_OK(gemini_move(w.mgr, &up, 1));
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  return w;
}
static void finish(world_t *w) {
  world_close(w);
  CHECK_EQ(driver->primary_release(0), CU_SUCCESS);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}

static gemini_status_t norm(world_t *w, double *norm_out) {
  gemini_access_t all = world_whole(tensor, 0, 0);
  return gemini_norm(w->mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, norm_out);
}
static double expected(void) {
  double sum = 0;
  for (uint64_t i = 0; i < CHUNKS * W / 4; i++) sum += (double)((i % 5) * (i % 5));
  return sqrt(sum);
}

/* A norm that failed gave its memory back, or left it over. Blocks of the same sizes may take its place, and must stay
 * as they are. */
static void check_after_failure(world_t *w) {
  uint8_t *guards[GUARDS];
  for (int i = 0; i < GUARDS; i++) {
    guards[i] = malloc(BLOCKS * sizeof(double) + (i % 2 ? 16 : 0));
    CHECK(guards[i]);
    memset(guards[i], 0xC3, BLOCKS * sizeof(double));
  }
  double found = -1;
  fake_cuda_fail(0, 0, 0);
  fake_cuda_fail_function(NULL, 0);
  CHECK_OK(norm(w, &found));
  CHECK(found == expected());
  for (int i = 0; i < GUARDS; i++) {
    for (uint64_t k = 0; k < BLOCKS * sizeof(double); k++) CHECK_EQ(guards[i][k], 0xC3);
    free(guards[i]);
  }
}

static void test_norm_after_a_kernel_or_its_answer_could_not_be_queued(void) {
  static const char *const functions[] = { "cuLaunchKernel", "cuLaunchHostFunc", "cuStreamWriteValue64_v2" };
  for (size_t f = 0; f < sizeof functions / sizeof *functions; f++) {
    world_t w = start();
    double found = -1;
    fake_cuda_fail_function(functions[f], CU_UNKNOWN);
    gemini_status_t status = norm(&w, &found);
    if (status) CHECK(found == -1);
    else CHECK(found == expected()); /* the function is not needed for it */
    CHECK(status || f == 2);
    check_after_failure(&w);
    finish(&w);
  }
}

static void test_norm_with_each_driver_call_failing_once(void) {
  bool reached = true;
  uint64_t failed = 0;
  for (uint64_t n = 0; reached; n += check_stride()) {
    world_t w = start();
    double found = -1;
    uint64_t first = fake_cuda_calls() + 1 + n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    gemini_status_t status = norm(&w, &found);
    if (status) CHECK(found == -1);
    else CHECK(found == expected());
    failed += status != GEMINI_OK;
    reached = fake_cuda_calls() >= first;
    check_after_failure(&w);
    finish(&w);
  }
  CHECK(failed > 0);
}

/* Memory that the device may still write to, as it could not be waited for, is not given back. */
static gemini_status_t no_sync(void *self, uint32_t stream, uint64_t mark) {
  (void)self, (void)stream, (void)mark;
  return gmi_fail(GEMINI_ERR_DEVICE, 0, "it does not answer");
}
static bool not_reached(void *self, uint32_t stream, uint64_t mark) {
  (void)self, (void)stream, (void)mark;
  return false;
}
static void test_norm_that_could_not_be_waited_for_leaves_its_memory_over(void) {
  world_t w = start();
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  const gmi_device_ops_t *real = m->device.ops;
  gmi_device_ops_t mute = *real;
  mute.stream.sync = no_sync;
  mute.stream.reached = not_reached;
  double found = -1;
  CHECK_OK(norm(&w, &found));
  CHECK(!m->device.leftovers); /* it was waited for */
  m->device.ops = &mute;
  CHECK_EQ(norm(&w, &found), GEMINI_ERR_DEVICE);
  m->device.ops = real;
  CHECK(m->device.leftovers && !m->device.leftovers->next);
  CHECK_OK(norm(&w, &found));
  CHECK(found == expected());
  finish(&w);
}

int main(void) {
  RUN(test_norm_after_a_kernel_or_its_answer_could_not_be_queued);
  RUN(test_norm_with_each_driver_call_failing_once);
  RUN(test_norm_that_could_not_be_waited_for_leaves_its_memory_over);
  fake_cuda_reset();
  return check_done();
}
