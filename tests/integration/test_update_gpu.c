/* The fused updates on a GPU against those on the host, to the bit. Skipped where there is no GPU.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>

#include "check.h"
#include "device/cuda_driver.h"
#include "update/gemini_update.h"

enum { CAPACITY = 300 * 1024 };
static const uint32_t dtypes[] = { GEMINI_DTYPE_F32, GEMINI_DTYPE_BF16, GEMINI_DTYPE_F16 };
static const gmi_cuda_driver_t *driver;
static cu_stream_t stream;

enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ARRAYS };
typedef struct state {
  uint32_t *arrays[ARRAYS];
  double *sums;
} state_t;

static uint64_t width(uint32_t dtype) { return dtype == GEMINI_DTYPE_F32 ? 4 : 2; }
static float *at(const state_t *s, int array, uint64_t i) { return (float *)s->arrays[array] + i; }
static void *low(const state_t *s, int array, uint32_t dtype, uint64_t i) {
  return (char *)s->arrays[array] + i * width(dtype);
}
/* Page-locked, so that both sides reach it under one address. */
static state_t state_open(uint64_t count) {
  state_t s;
  for (int i = 0; i <= ARRAYS; i++) {
    void *host;
    CHECK_EQ(driver->host_alloc(&host, i == ARRAYS ? gemini_update_sums(count) * 8 : count * 4, CU_HOST_PORTABLE),
             CU_SUCCESS);
    if (i == ARRAYS) {
      s.sums = host;
    } else {
      s.arrays[i] = host;
    }
  }
  return s;
}
static void state_close(state_t *s) {
  for (int i = 0; i < ARRAYS; i++) CHECK_EQ(driver->host_free(s->arrays[i]), CU_SUCCESS);
  CHECK_EQ(driver->host_free(s->sums), CU_SUCCESS);
}
static void synchronize(void) {
  cu_event_t event;
  cu_result_t result;
  CHECK_EQ(driver->event_create(&event, CU_EVENT_NO_TIME), CU_SUCCESS);
  CHECK_EQ(driver->event_record(event, stream), CU_SUCCESS);
  while ((result = driver->event_query(event)) == CU_NOT_READY) {
  }
  CHECK_EQ(result, CU_SUCCESS);
  CHECK_EQ(driver->event_destroy(event), CU_SUCCESS);
}

/* Of the size that training has; one of 8 is any bits at all: subnormal, infinite, NaN. */
static void fill(state_t *s, uint64_t count, uint64_t seed) {
  uint64_t random = seed * 2 + 1;
  for (int array = 0; array < ARRAYS; array++) {
    for (uint64_t i = 0; i < count; i++) {
      uint64_t r = check_random(&random);
      float value = (array == VARIANCE ? 1e-3f : 0.5f) * (float)(int32_t)(r >> 32) / 2147483648.0f;
      uint32_t bits = (uint32_t)(r >> 32);
      if (r % 8) memcpy(&bits, &value, sizeof bits);
      s->arrays[array][i] = array == VARIANCE ? bits & 0x7fffffff : bits;
    }
  }
}
static void copy(state_t *to, const state_t *from, uint64_t count) {
  for (int array = 0; array < ARRAYS; array++) memcpy(to->arrays[array], from->arrays[array], count * 4);
}
static bool same(const void *a, const void *b, size_t bytes, bool nan) { return memcmp(a, b, bytes) == 0 || nan; }
static void check_same(const state_t *a, const state_t *b, uint64_t count, uint32_t param_dtype) {
  for (int array = 0; array < ARRAYS; array++) {
    if (!memcmp(a->arrays[array], b->arrays[array], count * 4)) continue;
    CHECK(array != GRAD && (array != PARAM || param_dtype == GEMINI_DTYPE_F32));
    for (uint64_t i = 0; i < count; i++) {
      float x = *at(a, array, i), y = *at(b, array, i);
      CHECK(same(&x, &y, sizeof x, x != x && y != y));
    }
  }
  CHECK(same(a->sums, b->sums, sizeof(double), a->sums[0] != a->sums[0] && b->sums[0] != b->sums[0]));
}

static void test_update_on_the_gpu_equals_the_host(void) {
  /* Several tiles, ends of all kinds, more than 256 tiles; at addresses that vectors fit and do not. */
  const uint64_t counts[] = { 1, 3, 1024, 5000, 65536, CAPACITY - 4 }, firsts[] = { 0, 1, 2, 4 };
  state_t start = state_open(CAPACITY), host = state_open(CAPACITY), gpu = state_open(CAPACITY);
  for (uint32_t i = 0; i < 2 * 9 * 6 * 4; i++) {
    gemini_adamw_t c = GEMINI_ADAMW_INIT;
    c.flags = i % 2 ? GEMINI_ADAMW_L2 : 0;
    c.param_dtype = dtypes[i / 2 % 3];
    c.grad_dtype = dtypes[i / 6 % 3];
    c.step = 1 + i * i;
    c.grad_scale = 0.37;
    uint64_t count = counts[i / 18 % 6], first = firsts[i / 108];
    bool reused = i % 5 == 0 && width(c.param_dtype) == width(c.grad_dtype), alone = i % 7 == 0;
    fill(&start, CAPACITY, i);
    copy(&host, &start, CAPACITY);
    copy(&gpu, &start, CAPACITY);
    for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
      state_t *s = on_gpu ? &gpu : &host;
      void *grad = low(s, GRAD, c.grad_dtype, first), *param = low(s, PARAM, c.param_dtype, first);
      if (reused) param = grad;
      if (alone) param = NULL;
      float *p = at(s, MASTER, first), *m = at(s, MOMENTUM, first), *v = at(s, VARIANCE, first);
      s->sums[0] = -1;
      CHECK_EQ(on_gpu ? gemini_adamw_cuda(&c, count, param, grad, p, m, v, s->sums, stream)
                      : gemini_adamw_host(&c, count, param, grad, p, m, v, s->sums),
               GEMINI_OK);
    }
    synchronize();
    if (reused && !alone) { /* compared as parameters, whose NaNs may differ */
      memcpy(host.arrays[PARAM], host.arrays[GRAD], (first + count) * width(c.grad_dtype));
      memcpy(gpu.arrays[PARAM], gpu.arrays[GRAD], (first + count) * width(c.grad_dtype));
      memcpy(gpu.arrays[GRAD], host.arrays[GRAD], (first + count) * width(c.grad_dtype));
    }
    CHECK(count < 1000 || memcmp(host.arrays[MASTER], start.arrays[MASTER], CAPACITY * 4) != 0);
    check_same(&gpu, &host, CAPACITY, c.param_dtype);
  }
  state_close(&start);
  state_close(&host);
  state_close(&gpu);
}

static void test_update_on_the_gpu_needs_no_context_and_no_sum(void) {
  cu_context_t had, now;
  state_t host = state_open(4096), gpu = state_open(4096);
  gemini_adamw_t c = GEMINI_ADAMW_INIT;
  fill(&host, 4096, 1);
  copy(&gpu, &host, 4096);
  host.sums[0] = gpu.sums[0] = 5;
  CHECK_EQ(driver->current_get(&had), CU_SUCCESS);
  CHECK_EQ(driver->current_set(NULL), CU_SUCCESS);
  for (int i = 0; i < 2; i++) { /* by the stream's context, and by GPU 0's */
    cu_stream_t on = i ? NULL : stream;
    CHECK_EQ(gemini_adamw_cuda(&c, 4096, gpu.arrays[PARAM], gpu.arrays[GRAD], at(&gpu, MASTER, 0),
                               at(&gpu, MOMENTUM, 0), at(&gpu, VARIANCE, 0), NULL, on),
             GEMINI_OK);
    CHECK_EQ(driver->current_get(&now), CU_SUCCESS);
    CHECK(!now);
    CHECK_EQ(driver->current_set(had), CU_SUCCESS);
    cu_stream_t real = stream;
    stream = on;
    synchronize();
    stream = real;
    CHECK_EQ(driver->current_set(NULL), CU_SUCCESS);
    CHECK_EQ(gemini_adamw_host(&c, 4096, host.arrays[PARAM], host.arrays[GRAD], at(&host, MASTER, 0),
                               at(&host, MOMENTUM, 0), at(&host, VARIANCE, 0), NULL),
             GEMINI_OK);
    check_same(&gpu, &host, 4096, c.param_dtype);
  }
  CHECK_EQ(driver->current_set(had), CU_SUCCESS);
  state_close(&host);
  state_close(&gpu);
}

int main(void) {
  cu_device_t device;
  cu_context_t context;
  driver = gmi_cuda_driver();
  if (!driver || driver->init(0) != CU_SUCCESS || driver->device_get(&device, 0) != CU_SUCCESS) {
    fprintf(stderr, "skipped: there is no GPU\n");
    return 77;
  }
  CHECK_EQ(driver->primary_retain(&context, device), CU_SUCCESS);
  CHECK_EQ(driver->current_set(context), CU_SUCCESS);
  CHECK_EQ(driver->stream_create(&stream, CU_STREAM_NON_BLOCKING_FLAG), CU_SUCCESS);
  RUN(test_update_on_the_gpu_equals_the_host);
  RUN(test_update_on_the_gpu_needs_no_context_and_no_sum);
  CHECK_EQ(driver->stream_destroy(stream), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(device), CU_SUCCESS);
  return check_done();
}
