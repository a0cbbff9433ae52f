/* Host and files that together lack room for all bytes: what they do not hold has its only copy on the device. Only
 * public headers. SPDX-License-Identifier: Apache-2.0 */
#include "../process.h"
#include "world.h"

#define DEVICE GEMINI_TIER_DEVICE
#define HOST GEMINI_TIER_HOST
#define ANY GEMINI_STREAM_CALLER

/* Layers of one chunk of parameters, whose gradients reuse the bytes, and two of states: 36 chunks. */
enum { LAYERS = 12, CHUNK_VALUES = WORLD_CHUNK / 4, STEPS = 6, STATES = 2, CHUNKS = LAYERS * (1 + STATES) };
typedef struct {
  world_t w;
  gemini_arena_t params, grads, states[STATES];
  gemini_tensor_t param[LAYERS], grad[LAYERS], state[STATES][LAYERS];
} model_t;

static void write_values(const model_t *k, gemini_tensor_t t, uint32_t tier, float value) {
  gemini_access_t use = world_whole(t, GEMINI_WRITE, tier);
  CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, ANY));
  for (uint32_t i = 0; i < CHUNK_VALUES; i++) ((float *)use.ptr)[i] = value + (float)(i % 7);
  CHECK_OK(gemini_release(k->w.mgr, &use, 1, ANY));
}
static void check_values(const model_t *k, gemini_tensor_t t, uint32_t tier, float value) {
  gemini_access_t use = world_whole(t, GEMINI_READ, tier);
  uint32_t wrong = 0;
  CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, ANY));
  for (uint32_t i = 0; i < CHUNK_VALUES; i++) wrong += ((float *)use.ptr)[i] != value + (float)(i % 7);
  CHECK_OK(gemini_release(k->w.mgr, &use, 1, ANY));
  CHECK_EQ(wrong, 0);
}

static model_t model_open(gemini_config_t c) {
  model_t k = { .w = world_open(c) };
  k.params = world_arena(&k.w, GEMINI_KIND_PARAM, 4, "params", 0, 0);
  k.grads = world_arena(&k.w, GEMINI_KIND_GRAD, 4, "grads", 0, k.params);
  for (uint32_t s = 0; s < STATES; s++) {
    k.states[s] = world_arena(&k.w, GEMINI_KIND_MASTER + s, 4, s ? "momentum" : "master", k.params, 0);
  }
  for (uint32_t n = 0; n < LAYERS; n++) {
    char name[16];
    snprintf(name, sizeof name, "layer %u", n);
    k.param[n] = world_tensor(&k.w, k.params, name, WORLD_CHUNK);
    CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.param[n], k.grads, &k.grad[n]));
    for (uint32_t s = 0; s < STATES; s++)
      CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.param[n], k.states[s], &k.state[s][n]));
    write_values(&k, k.param[n], HOST, (float)n);
  }
  return k;
}

/* The parameter becomes its gradient and 1 more, the master what it was and the gradient, the momentum 1 more. */
static void compute(void *user) {
  const gemini_update_span_t *span = user;
  float *param = span->ptr[0], *master = span->ptr[2], *momentum = span->ptr[3];
  const float *grad = span->ptr[1];
  for (uint64_t i = 0; i < span->element_count; i++) {
    master[i] += grad[i];
    momentum[i] += 1;
    param[i] = grad[i] + 1;
  }
}
static void compute_queued(void *user) {
  compute(user);
  free(user);
}
static void step_span(void *user, const gemini_update_span_t *span) {
  const model_t *k = user;
  gemini_update_span_t *copy = malloc(sizeof *copy);
  *copy = *span;
  if (span->tier == HOST) compute_queued(copy);
  else CHECK_OK(gemini_stream_call(k->w.mgr, span->stream, compute_queued, copy));
}
static gemini_status_t step(model_t *k, uint32_t number) {
  const gemini_arena_t arenas[] = { k->params, k->grads, k->states[0], k->states[1] };
  const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  for (uint32_t n = 0; n < LAYERS; n++) {
    CHECK_OK(gemini_op_begin(k->w.mgr, "forward", k->w.stream));
    check_values(k, k->param[n], DEVICE, (float)n + (float)number);
    CHECK_OK(gemini_op_end(k->w.mgr));
  }
  for (uint32_t n = LAYERS; n-- > 0;) {
    CHECK_OK(gemini_op_begin(k->w.mgr, "backward", k->w.stream));
    write_values(k, k->grad[n], DEVICE, (float)n + (float)number);
    CHECK_OK(gemini_op_end(k->w.mgr));
  }
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 4;
  u.stream = k->w.stream;
  u.fn = step_span;
  u.user = k;
  gemini_status_t status = gemini_update(k->w.mgr, &u);
  if (status) return status;
  CHECK_OK(gemini_update_wait(k->w.mgr));
  CHECK_OK(gemini_iteration_end(k->w.mgr));
  return GEMINI_OK;
}
/* After `steps` steps: the master of layer n has added n, n + 1, ... */
static void check_states(const model_t *k, uint32_t steps) {
  for (uint32_t n = 0; n < LAYERS; n++) {
    gemini_access_t master = world_whole(k->state[0][n], GEMINI_READ, HOST), momentum = master;
    momentum.object.tensor = k->state[1][n];
    uint32_t wrong = 0;
    const float sum = (float)(steps * n + steps * (steps - 1) / 2);
    CHECK_OK(gemini_acquire(k->w.mgr, &master, 1, ANY));
    for (uint32_t i = 0; i < CHUNK_VALUES; i++)
      wrong += ((float *)master.ptr)[i] != sum + (float)steps * (float)(i % 7);
    CHECK_OK(gemini_release(k->w.mgr, &master, 1, ANY));
    CHECK_OK(gemini_acquire(k->w.mgr, &momentum, 1, ANY));
    for (uint32_t i = 0; i < CHUNK_VALUES; i++) wrong += ((float *)momentum.ptr)[i] != (float)steps;
    CHECK_OK(gemini_release(k->w.mgr, &momentum, 1, ANY));
    CHECK_EQ(wrong, 0);
  }
}

static void test_device_host_and_files_add_up(void) {
  static const struct {
    uint64_t device, host, files;
  } budgets[] = { { 40, 30, 0 }, { 32, 24, 0 }, { 28, 16, 0 }, { 20, 26, 0 }, { 24, 12, 8 }, { 16, 16, 14 } };
  for (size_t b = 0; b < sizeof budgets / sizeof *budgets; b++) {
    process_t before = process_now();
    CHECK(budgets[b].host + budgets[b].files < CHUNKS);
    model_t k = model_open(world_config(budgets[b].device, budgets[b].host, budgets[b].files));
    for (uint32_t n = 0; n < STEPS; n++) {
      CHECK_OK(step(&k, n));
      if (n == 0 || n == 3) check_states(&k, n + 1); /* before a plan is made, and while one is followed */
    }
    check_states(&k, STEPS);
    const figures_t s = world_stats(&k.w);
    CHECK(s.planned_iterations >= STEPS - 2);
    CHECK(s.peak_bytes[HOST] <= budgets[b].host * WORLD_CHUNK);
    CHECK(s.peak_bytes[DEVICE] <= budgets[b].device * WORLD_CHUNK);
    world_close(&k.w);
    process_check(before);
  }
}

/* With eight places more than chunks, two pieces of an update, it does not matter how many of them are on the host. Before
 * the first plan all states come to the device, which may then have more, or fewer, than the plan keeps there. */
static void test_any_division_of_the_room_serves(void) {
  for (uint32_t host = 4; host < CHUNKS; host += 2) {
    model_t k = model_open(world_config(CHUNKS + 8 - host, host, 0));
    for (uint32_t n = 0; n < STEPS; n++) CHECK_OK(step(&k, n));
    check_states(&k, STEPS);
    world_close(&k.w);
  }
}

/* States that the caller writes on the host, more than it holds: they go up while there are free frames. */
static void test_what_is_written_on_the_host_goes_to_free_frames(void) {
  model_t k = model_open(world_config(30, 18, 0));
  for (uint32_t n = 0; n < LAYERS; n++)
    for (uint32_t s = 0; s < STATES; s++) write_values(&k, k.state[s][n], HOST, (float)(100 * s + n));
  for (uint32_t n = 0; n < LAYERS; n++) {
    check_values(&k, k.param[n], HOST, (float)n);
    for (uint32_t s = 0; s < STATES; s++) check_values(&k, k.state[s][n], HOST, (float)(100 * s + n));
  }
  CHECK(world_stats(&k.w).peak_bytes[HOST] <= 18 * WORLD_CHUNK);
  world_close(&k.w);
}

/* Other placements than auto keep states below the device. And what no tier has room for is refused, with words. */
static void test_what_has_no_room_is_refused(void) {
  gemini_config_t c = world_config(32, 24, 0);
  c.placement = GEMINI_PLACEMENT_CPU;
  model_t k = model_open(c);
  CHECK_STATUS(step(&k, 0), GEMINI_ERR_OOM_HOST);
  CHECK_SAYS(world_error().message, "bytes of host memory");
  world_close(&k.w);
  k = model_open(world_config(12, 18, 0));
  gemini_status_t status = GEMINI_OK;
  for (uint32_t n = 0; n < STEPS && !status; n++) status = step(&k, n);
  CHECK(status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_PENDING);
  CHECK_SAYS(world_error().message, "host memory");
  (void)gemini_manager_close(k.w.mgr);
}

int main(void) {
  process_begin();
  RUN(test_device_host_and_files_add_up);
  RUN(test_any_division_of_the_room_serves);
  RUN(test_what_is_written_on_the_host_goes_to_free_frames);
  RUN(test_what_has_no_room_is_refused);
  return check_done();
}
