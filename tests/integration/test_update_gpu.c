/* The fused updates on a GPU against those on the host, to the bit. Skipped where there is no GPU.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "../update_values.h"
#include "device/cuda_driver.h"
#include "update/gemini_update.h"
#include "world.h"

enum { CAPACITY = 300 * 1024 };
static const gmi_cuda_driver_t *driver;
static cu_stream_t stream;

enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ARRAYS };
typedef struct state {
  uint32_t *arrays[ARRAYS];
  double *sums;
} state_t;

static float *at(const state_t *s, int array, uint64_t i) { return (float *)s->arrays[array] + i; }
static void *low(const state_t *s, int array, uint32_t dtype, uint64_t i) {
  return element_at(s->arrays[array], dtype, i);
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

static void fill(state_t *s, uint64_t count, uint64_t seed) {
  uint64_t random = seed * 2 + 1;
  for (int array = 0; array < ARRAYS; array++) {
    for (uint64_t i = 0; i < count; i++) {
      const uint32_t bits = bits_of(random_float(&random, array == VARIANCE ? 1e-3f : 0.5f, true));
      s->arrays[array][i] = array == VARIANCE ? bits & 0x7fffffff : bits;
    }
  }
}
static void copy(state_t *to, const state_t *from, uint64_t count) {
  for (int array = 0; array < ARRAYS; array++) memcpy(to->arrays[array], from->arrays[array], count * 4);
}
static void check_same(const state_t *a, const state_t *b, uint64_t count, uint32_t param_dtype) {
  for (int array = 0; array < ARRAYS; array++) {
    if (!memcmp(a->arrays[array], b->arrays[array], count * 4)) continue;
    CHECK(array != GRAD && (array != PARAM || param_dtype == GEMINI_DTYPE_F32));
    for (uint64_t i = 0; i < count; i++) CHECK(same_float(*at(a, array, i), *at(b, array, i)));
  }
  CHECK(same_double(a->sums[0], b->sums[0]));
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
    bool reused = i % 5 == 0 && width_of(c.param_dtype) == width_of(c.grad_dtype), alone = i % 7 == 0;
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
      CHECK_EQ(on_gpu ? gemini_adamw_cuda(&c, count, param, grad, p, m, v, stream, s->sums)
                      : gemini_adamw_host(&c, count, param, grad, p, m, v, s->sums),
               GEMINI_OK);
    }
    synchronize();
    if (reused && !alone) { /* compared as parameters, whose NaNs may differ */
      memcpy(host.arrays[PARAM], host.arrays[GRAD], (first + count) * width_of(c.grad_dtype));
      memcpy(gpu.arrays[PARAM], gpu.arrays[GRAD], (first + count) * width_of(c.grad_dtype));
      memcpy(gpu.arrays[GRAD], host.arrays[GRAD], (first + count) * width_of(c.grad_dtype));
    }
    CHECK(count < 1000 || memcmp(host.arrays[MASTER], start.arrays[MASTER], CAPACITY * 4) != 0);
    check_same(&gpu, &host, CAPACITY, c.param_dtype);
  }
  state_close(&start);
  state_close(&host);
  state_close(&gpu);
}

/* Momentum and variance in bf16, and in blocks, split masters, in all combinations; NaNs of narrow states have one
 * pattern. */
static void test_narrow_states_on_the_gpu_equal_the_host(void) {
  static const uint32_t states[] = { GEMINI_DTYPE_F32, GEMINI_DTYPE_BF16, GEMINI_DTYPE_BLOCK8 };
  const uint64_t counts[] = { 1, 3, 1024, 5000, CAPACITY - 4 }, firsts[] = { 0, 1, 2, 4 };
  state_t start = state_open(CAPACITY), host = state_open(CAPACITY), gpu = state_open(CAPACITY);
  for (uint32_t i = 0; i < 17 * 3 * 5 * 4; i++) {
    const uint32_t way = 1 + i % 17, step = i / 17;
    gemini_adamw_t c = GEMINI_ADAMW_INIT;
    const bool split = way >= 9, blocks = states[way % 3] == GEMINI_DTYPE_BLOCK8 || states[way / 3 % 3] == states[2];
    c.flags = split ? GEMINI_ADAMW_SPLIT : 0;
    c.param_dtype = split ? GEMINI_DTYPE_BF16 : dtypes[step % 3];
    c.grad_dtype = dtypes[(step + i) % 3];
    c.momentum_dtype = states[way % 3], c.variance_dtype = states[way / 3 % 3];
    c.step = 1 + i, c.seed = i, c.first_element = UINT64_C(0xffffff00) + (blocks ? 0 : i);
    c.grad_scale = 0.37;
    const uint64_t count = blocks ? (counts[step % 5] + 255) / 256 * 256 : counts[step % 5];
    const uint64_t first = blocks ? 256 * (step / 15 % 2) : firsts[step / 15];
    fill(&start, CAPACITY, i);
    copy(&host, &start, CAPACITY);
    copy(&gpu, &start, CAPACITY);
    for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
      state_t *s = on_gpu ? &gpu : &host;
      void *grad = low(s, GRAD, c.grad_dtype, first), *param = low(s, PARAM, c.param_dtype, first);
      void *p = low(s, MASTER, split ? GEMINI_DTYPE_BF16 : GEMINI_DTYPE_F32, first);
      void *m = low(s, MOMENTUM, c.momentum_dtype, first), *v = low(s, VARIANCE, c.variance_dtype, first);
      s->sums[0] = -1;
      CHECK_EQ(on_gpu ? gemini_adamw_cuda(&c, count, param, grad, p, m, v, stream, s->sums)
                      : gemini_adamw_host(&c, count, param, grad, p, m, v, s->sums),
               GEMINI_OK);
    }
    synchronize();
    CHECK(count < 1000 || memcmp(host.arrays[MOMENTUM], start.arrays[MOMENTUM], CAPACITY * 4) != 0);
    check_same(&gpu, &host, CAPACITY, c.param_dtype);
  }
  state_close(&start);
  state_close(&host);
  state_close(&gpu);
}

/* Variances of all magnitudes beside the largest of their block, down to those whose quotient with it is 0: none above 0
 * becomes 0. In fill(), nearly every block of variances has one that is infinite. */
static void test_small_variances_on_the_gpu_equal_the_host(void) {
  static const uint32_t states[] = { GEMINI_DTYPE_BLOCK8, GEMINI_DTYPE_F32, GEMINI_DTYPE_BF16 };
  const uint64_t count = CAPACITY / 256 * 256;
  state_t host = state_open(CAPACITY), gpu = state_open(CAPACITY);
  for (uint32_t i = 0; i < 12; i++) {
    gemini_adamw_t c = GEMINI_ADAMW_INIT;
    c.grad_dtype = GEMINI_DTYPE_F32;
    c.momentum_dtype = states[i % 3];
    c.variance_dtype = GEMINI_DTYPE_BLOCK8;
    c.beta2 = i % 2 ? 0.999 : 0;
    for (int array = 0; array < ARRAYS; array++) memset(host.arrays[array], 0, CAPACITY * 4);
    copy(&gpu, &host, CAPACITY);
    uint64_t random = 2 * i + 1, lowest = 0, zero = 0;
    for (c.step = 1; c.step <= 3; c.step++) {
      for (uint64_t e = 0; e < count; e++) {
        const uint64_t r = check_random(&random),
                       seldom = e / 256 % 5; /* of 5 blocks one with zeros for the most part */
        const double u = (double)(r >> 11) * 0x1p-53, most = e / 256 % 3 ? 1 : 1e18, decades = e / 256 % 3 ? 10 : 40;
        *at(&host, GRAD, e) = r % (seldom ? 9 : 2) ? (float)((r & 64 ? 1 : -1) * most * pow(10, -decades * u)) : 0;
      }
      memcpy(gpu.arrays[GRAD], host.arrays[GRAD], count * 4);
      for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
        state_t *s = on_gpu ? &gpu : &host;
        void *grad = s->arrays[GRAD], *p = s->arrays[MASTER], *m = s->arrays[MOMENTUM], *v = s->arrays[VARIANCE];
        CHECK_EQ(on_gpu ? gemini_adamw_cuda(&c, count, s->arrays[PARAM], grad, p, m, v, stream, s->sums)
                        : gemini_adamw_host(&c, count, s->arrays[PARAM], grad, p, m, v, s->sums),
                 GEMINI_OK);
      }
      synchronize();
      check_same(&gpu, &host, CAPACITY, c.param_dtype);
    }
    for (uint64_t e = 0; e < count; e++) {
      const uint8_t code = ((uint8_t *)gpu.arrays[VARIANCE])[e];
      if (e % 256 >= 16) lowest += code == 2, zero += code == 0;
      if (e % 256 >= 16 && i % 2 == 0) CHECK((code != 0) == (*at(&gpu, GRAD, e) * *at(&gpu, GRAD, e) > 0));
    }
    CHECK(lowest > count / 10 && zero > 100);
  }
  state_close(&host);
  state_close(&gpu);
}

/* Without momentum, the first step, a later one, dampened, Nesterov's; momentum that is not read may be anything. */
static void test_sgd_on_the_gpu_equals_the_host(void) {
  const uint64_t counts[] = { 1, 3, 1024, 5000, 65536, CAPACITY - 4 }, firsts[] = { 0, 1, 2, 4 };
  state_t start = state_open(CAPACITY), host = state_open(CAPACITY), gpu = state_open(CAPACITY);
  for (uint32_t i = 0; i < 6 * 9 * 8; i++) {
    const uint32_t mode = i / 9 % 6;
    gemini_sgd_t c = GEMINI_SGD_INIT;
    c.flags = mode >= 4 ? GEMINI_SGD_NESTEROV : 0;
    c.param_dtype = dtypes[i % 3];
    c.grad_dtype = dtypes[i / 3 % 3];
    c.step = mode == 1 || mode == 4 ? 1 : 2;
    c.momentum = mode ? 0.9 : 0;
    c.dampening = mode == 3 ? 0.25 : 0;
    c.weight_decay = 0.1;
    c.grad_scale = 0.37;
    const uint64_t count = counts[i % 6], first = firsts[i / 54 % 4];
    const bool alone = i % 7 == 0, summed = i % 4 > 0;
    fill(&start, CAPACITY, i);
    copy(&host, &start, CAPACITY);
    copy(&gpu, &start, CAPACITY);
    for (int on_gpu = 0; on_gpu < 2; on_gpu++) {
      state_t *s = on_gpu ? &gpu : &host;
      void *grad = low(s, GRAD, c.grad_dtype, first), *param = alone ? NULL : low(s, PARAM, c.param_dtype, first);
      float *p = at(s, MASTER, first), *m = mode ? at(s, MOMENTUM, first) : NULL;
      s->sums[0] = -1;
      CHECK_EQ(on_gpu ? gemini_sgd_cuda(&c, count, param, grad, p, m, stream, summed ? s->sums : NULL)
                      : gemini_sgd_host(&c, count, param, grad, p, m, summed ? s->sums : NULL),
               GEMINI_OK);
    }
    synchronize();
    CHECK(count < 1000 || memcmp(host.arrays[MASTER], start.arrays[MASTER], CAPACITY * 4) != 0);
    check_same(&gpu, &host, CAPACITY, c.param_dtype);
  }
  state_close(&start);
  state_close(&host);
  state_close(&gpu);
}

/* Bytes of arenas, through the host. */
static void put(const world_t *w, gemini_access_t a, const void *bytes) {
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  memcpy(a.ptr, bytes, a.size_bytes);
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static void check_holds(const world_t *w, gemini_access_t a, const void *bytes) {
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(!memcmp(a.ptr, bytes, a.size_bytes));
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}

/* Arenas that stay on the GPU, updated by a table late, two steps one after the other. */
enum { CHUNK = 2 << 20, ELEMENTS = (5 << 19) + 100, RANGES = 6 };
static void walk_over_arenas(uint32_t device, bool sgd) {
  static uint16_t param[ELEMENTS], grad[ELEMENTS];
  static float states[3][ELEMENTS]; /* master, momentum, variance */
  const void *const arrays[] = { param, grad, states[0], states[1], states[2] };
  static const uint64_t ends[RANGES] = { 1, 777, CHUNK / 2, 2200001, 2200002, UINT64_MAX };
  const uint32_t count = sgd ? 4 : 5, modes[] = { GEMINI_READ_WRITE, GEMINI_READ, 3, 3, 3 };
  gemini_config_t config = world_config(0, 0, 0);
  config.device = device;
  config.chunk_bytes = CHUNK; /* the least that a GPU maps */
  config.device_bytes = config.host_bytes = UINT64_C(40) * CHUNK;
  world_t w = world_open(config);
  gemini_arena_t arenas[5];
  for (uint32_t i = 0; i < count; i++)
    arenas[i] = world_arena(&w, GEMINI_KIND_PARAM + i, i < 2 ? 2 : 4, NULL, i ? arenas[0] : 0, 0);
  world_tensor(&w, arenas[0], "all", ELEMENTS * 2);
  uint64_t random = 1;
  for (uint64_t i = 0; i < ELEMENTS; i++) grad[i] = (uint16_t)(0x3c00 + (check_random(&random) & 0x80ff));
  memset(param, 0, sizeof param), memset(states, 0, sizeof states);
  for (uint32_t i = 0; i < count; i++) {
    gemini_access_t a = world_part(arenas[i], 0, ELEMENTS * (i < 2 ? 2 : 4), GEMINI_WRITE, GEMINI_TIER_HOST);
    put(&w, a, arrays[i]);
    a = world_part(arenas[i], 0, a.size_bytes, 0, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_pin(w.mgr, &a));
  }
  gemini_update_range_t ranges[RANGES];
  for (uint64_t r = 0; r < RANGES; r++)
    ranges[r] = (gemini_update_range_t){ ends[r], r % 3 == 1 ? GEMINI_UPDATE_SKIP : r % 2 };
  gemini_update_walk_t walks[2];
  gemini_adamw_t adamws[2][2];
  gemini_sgd_t sgds[2][2];
  for (uint32_t step = 0; step < 2; step++) {
    for (uint32_t r = 0; r < 2; r++) {
      adamws[step][r] = (gemini_adamw_t)GEMINI_ADAMW_INIT, sgds[step][r] = (gemini_sgd_t)GEMINI_SGD_INIT;
      adamws[step][r].step = sgds[step][r].step = step + 1;
      adamws[step][r].weight_decay = sgds[step][r].weight_decay = 0.1 * r;
      sgds[step][r].momentum = 0.9;
    }
    gemini_update_walk_t *walk = &walks[step];
    *walk = (gemini_update_walk_t)GEMINI_UPDATE_WALK_INIT;
    if (sgd) walk->sgds = sgds[step];
    else walk->adamws = adamws[step];
    walk->rule_count = 2, walk->ranges = ranges, walk->range_count = RANGES;
    walk->mgr = w.mgr, walk->stream_native = gemini_stream_native, walk->stream_call = gemini_stream_call;
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.flags = GEMINI_UPDATE_LATE;
    u.arenas = arenas, u.modes = modes, u.arena_count = count, u.stream = w.stream;
    u.fn = gemini_update_walk, u.user = walk;
    CHECK_EQ(gemini_update_walk_check(&u), GEMINI_OK);
    CHECK_OK(gemini_update(w.mgr, &u));
    for (uint64_t r = 0, begin = 0; r < RANGES; begin = ends[r++]) {
      const uint64_t n = (ends[r] < ELEMENTS ? ends[r] : ELEMENTS) - begin, rule = ranges[r].rule;
      if (rule == GEMINI_UPDATE_SKIP) continue;
      CHECK_EQ(sgd ? gemini_sgd_host(&sgds[step][rule], n, param + begin, grad + begin, states[0] + begin,
                                     states[1] + begin, NULL)
                   : gemini_adamw_host(&adamws[step][rule], n, param + begin, grad + begin, states[0] + begin,
                                       states[1] + begin, states[2] + begin, NULL),
               GEMINI_OK);
    }
  }
  CHECK_OK(gemini_update_wait(w.mgr));
  for (uint32_t i = 0; i < count; i++) {
    if (i < 2) CHECK_EQ(gemini_update_walk_status(&walks[i]), GEMINI_OK);
    CHECK_EQ(world_tier_bytes(&w, arenas[i], GEMINI_TIER_DEVICE), ELEMENTS * (i < 2 ? 2u : 4u));
    gemini_access_t a = world_part(arenas[i], 0, ELEMENTS * (i < 2 ? 2 : 4), 0, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_unpin(w.mgr, &a));
    a.mode = GEMINI_READ, a.tier = GEMINI_TIER_HOST;
    check_holds(&w, a, arrays[i]);
  }
  CHECK(param[ELEMENTS - 1] != 0 && param[1] == 0); /* the second range is skipped */
  world_close(&w);
}
static void test_walk_over_arenas_on_the_gpu_equals_the_host(void) {
  walk_over_arenas(GEMINI_DEVICE_CUDA, false);
  walk_over_arenas(GEMINI_DEVICE_CUDA, true);
}

/* One rule for whole arenas in one call, which is late and borrows nothing: the first chunk stays on the GPU, and the
 * others are updated where they are. The weights are then read on the device, by their address. */
static void whole_arenas(uint32_t device, bool sgd) {
  static float grad[ELEMENTS], states[3][ELEMENTS]; /* master, momentum, variance */
  const uint32_t count = sgd ? 3 : 4;               /* arenas: gradient, master, momentum, variance */
  gemini_config_t config = world_config(0, 0, 0);
  config.device = device;
  config.chunk_bytes = CHUNK;
  config.device_bytes = UINT64_C(20) * CHUNK;
  config.host_bytes = UINT64_C(40) * CHUNK;
  world_t w = world_open(config);
  gemini_arena_t arenas[4];
  for (uint32_t i = 0; i < count; i++) arenas[i] = world_arena(&w, GEMINI_KIND_GRAD + i, 4, NULL, i ? arenas[0] : 0, 0);
  void *first;
  CHECK_OK(gemini_arena_take_pointer(w.mgr, arenas[0], sizeof grad, &first));
  uint64_t random = 1;
  for (uint64_t i = 0; i < ELEMENTS; i++) grad[i] = (float)(check_random(&random) % 1000) - 500;
  memset(states, 0, sizeof states);
  gemini_access_t a = gemini_address_access(first, sizeof grad, GEMINI_WRITE, GEMINI_TIER_HOST);
  put(&w, a, grad);
  for (uint32_t i = 0; i < count; i++) {
    a = world_part(arenas[i], 0, CHUNK, 0, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_pin(w.mgr, &a));
  }
  for (uint64_t step = 1; step <= 3; step++) {
    gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
    gemini_sgd_t rule = GEMINI_SGD_INIT;
    adamw.step = rule.step = step;
    adamw.grad_dtype = rule.grad_dtype = GEMINI_DTYPE_F32;
    rule.momentum = 0.9;
    gemini_update_arenas_t of = GEMINI_UPDATE_ARENAS_INIT;
    of.flags = GEMINI_UPDATE_LATE;
    of.grad = arenas[0], of.master = arenas[1], of.momentum = arenas[2], of.variance = sgd ? NULL : arenas[3];
    of.stream = w.stream;
    CHECK_OK(sgd ? gemini_sgd_arenas(w.mgr, &rule, &of) : gemini_adamw_arenas(w.mgr, &adamw, &of));
    CHECK_OK(sgd ? gemini_sgd_host(&rule, ELEMENTS, NULL, grad, states[0], states[1], NULL)
                 : gemini_adamw_host(&adamw, ELEMENTS, NULL, grad, states[0], states[1], states[2], NULL));
    memset(&adamw, 0xa5, sizeof adamw), memset(&rule, 0xa5, sizeof rule);
  }
  CHECK_OK(gemini_update_wait(w.mgr));
  for (uint32_t i = 1; i < count; i++) {
    a = world_part(arenas[i], 0, CHUNK, 0, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_unpin(w.mgr, &a));
    a = world_part(arenas[i], 0, sizeof grad, GEMINI_READ, GEMINI_TIER_HOST);
    check_holds(&w, a, states[i - 1]);
  }
  world_close(&w);
}
static void test_whole_arenas_on_the_gpu_equal_the_host(void) {
  whole_arenas(GEMINI_DEVICE_CUDA, false);
  whole_arenas(GEMINI_DEVICE_CUDA, true);
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
                               at(&gpu, MOMENTUM, 0), at(&gpu, VARIANCE, 0), on, NULL),
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
  RUN(test_narrow_states_on_the_gpu_equal_the_host);
  RUN(test_small_variances_on_the_gpu_equal_the_host);
  RUN(test_sgd_on_the_gpu_equals_the_host);
  RUN(test_update_on_the_gpu_needs_no_context_and_no_sum);
  RUN(test_walk_over_arenas_on_the_gpu_equals_the_host);
  RUN(test_whole_arenas_on_the_gpu_equal_the_host);
  CHECK_EQ(driver->stream_destroy(stream), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(device), CU_SUCCESS);
  return check_done();
}
