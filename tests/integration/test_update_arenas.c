/* Updates that leave the caller nothing to keep: data that the library copies, functions that can fail, and AdamW and SGD
 * over whole arenas in one call. SPDX-License-Identifier: Apache-2.0 */
#include <stdatomic.h>
#include <stdlib.h>

#include "../fork.h"
#include "../process.h"
#include "gemini/group.h"
#include "update/gemini_update.h"
#include "world.h"

#define W WORLD_CHUNK
enum { HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE, BOTH = GEMINI_READ_WRITE };
enum { ELEMENTS = 5 * 32768 + 100, STEPS = 4, BLOCKS = 10 * 32768 + 256 }; /* more than five chunks of bf16, of bytes */

/* ---- copies of the caller's data, and failures */
typedef struct {
  gemini_manager_t mgr;
  uint64_t fails_at; /* the span that begins with this element fails; UINT64_MAX: none */
  int32_t returns;
  bool tells;
  uint8_t adds;
} order_t;
typedef struct {
  const order_t *order; /* the library's copy */
  uint8_t *bytes;
  uint64_t count;
} queued_t;
static void add(void *user) {
  queued_t *q = user;
  for (uint64_t i = 0; i < q->count; i++) q->bytes[i] = (uint8_t)(q->bytes[i] + q->order->adds);
  free(q);
}
static gemini_status_t add_span(void *user, const gemini_update_span_t *span) {
  const order_t *order = user;
  CHECK_EQ((uintptr_t)user % 16, 0);
  if (span->first_element == order->fails_at) {
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    info.status = order->returns < 0 ? order->returns : GEMINI_ERR_IO;
    info.native_code = 77;
    snprintf(info.message, sizeof info.message, "the rule has no number");
    if (order->tells) CHECK_OK(gemini_error_set(&info));
    return order->returns;
  }
  queued_t *q = malloc(sizeof *q);
  CHECK(q);
  *q = (queued_t){ order, span->ptr[0], span->element_count };
  if (span->tier == DEVICE) CHECK_OK(gemini_stream_call(order->mgr, span->stream, add, q));
  else add(q);
  return GEMINI_OK;
}

typedef struct {
  world_t w;
  gemini_arena_t arena;
  gemini_tensor_t tensor;
} bytes_t;
static bytes_t bytes_open(bool pinned) {
  bytes_t b = { .w = world_open(world_config(6, 16, 0)) };
  b.arena = world_arena(&b.w, GEMINI_KIND_OTHER, 1, "bytes", 0, 0);
  b.tensor = world_tensor(&b.w, b.arena, "bytes", 4 * W);
  gemini_access_t pin = world_whole(b.tensor, BOTH, DEVICE);
  if (pinned) CHECK_OK(gemini_pin(b.w.mgr, &pin)); /* its pieces run on the device */
  return b;
}
static gemini_status_t run(const bytes_t *b, const order_t *order, uint32_t flags) {
  const uint32_t mode = BOTH;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = flags;
  u.arenas = &b->arena, u.modes = &mode, u.arena_count = 1;
  u.try_fn = add_span;
  order_t mine = *order; /* goes with this call */
  mine.mgr = b->w.mgr;
  u.user = &mine, u.user_bytes = sizeof mine;
  gemini_status_t status = gemini_update(b->w.mgr, &u);
  memset(&mine, 0xa5, sizeof mine);
  return status;
}
static void check_bytes(const bytes_t *b, uint64_t chunk, uint8_t want) {
  gemini_access_t a = world_part(b->tensor, chunk * W, W, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_acquire(b->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < W; i++) CHECK_EQ(((uint8_t *)a.ptr)[i], want);
  CHECK_OK(gemini_release(b->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
}

static void test_late_updates_use_copies_of_what_the_caller_has_overwritten(void) {
  for (int pinned = 0; pinned < 2; pinned++) {
    bytes_t b = bytes_open(pinned);
    for (uint8_t i = 1; i <= 5; i++)
      CHECK_OK(run(&b, &(order_t){ .fails_at = UINT64_MAX, .adds = i }, GEMINI_UPDATE_LATE));
    CHECK_OK(gemini_update_wait(b.w.mgr));
    for (uint64_t chunk = 0; chunk < 4; chunk++) check_bytes(&b, chunk, 15);
    CHECK_OK(run(&b, &(order_t){ .fails_at = UINT64_MAX, .adds = 2 }, GEMINI_UPDATE_LATE));
    for (uint64_t chunk = 0; chunk < 4; chunk++) check_bytes(&b, chunk, 17); /* each use comes after its update */
    world_close(&b.w);
  }
}

static void test_an_update_whose_function_fails_says_so_for_good(void) {
  const struct {
    int32_t returns;
    bool tells;
    gemini_status_t status;
    const char *says;
  } fails[] = {
    { GEMINI_ERR_IO, true, GEMINI_ERR_IO,
      "the function of an update failed for elements 65536 to 131072: the rule has no number" },
    { GEMINI_ERR_UNSUPPORTED, false, GEMINI_ERR_UNSUPPORTED,
      "the function of an update failed for elements 65536 to 131072: not supported here" },
    { GEMINI_ERR_DEVICE, true, GEMINI_ERR_DEVICE, "the rule has no number" },
    { 5, true, GEMINI_ERR_INVALID, "returned 5, which is no status, for elements 65536 to 131072" },
  };
  for (size_t i = 0; i < 2 * sizeof fails / sizeof *fails; i++) {
    bytes_t b = bytes_open(i % 2);
    const int32_t returns = fails[i / 2].returns;
    order_t order = { .fails_at = W, .returns = returns, .tells = fails[i / 2].tells, .adds = 1 };
    if (i % 4 < 2) { /* reported by the update, or by the wait for a late one */
      CHECK_STATUS(run(&b, &order, 0), GEMINI_ERR_PENDING);
      CHECK_SAYS(world_error().message, fails[i / 2].says);
    } else {
      CHECK_OK(run(&b, &order, GEMINI_UPDATE_LATE));
    }
    CHECK_STATUS(gemini_update_wait(b.w.mgr), fails[i / 2].status);
    CHECK_SAYS(world_error().message, fails[i / 2].says);
    CHECK_EQ(world_error().native_code, fails[i / 2].tells && returns < 0 ? 77 : 0);
    CHECK_STATUS(run(&b, &(order_t){ .fails_at = UINT64_MAX, .adds = 1 }, 0), fails[i / 2].status);
    for (uint64_t chunk = 0; chunk < 4; chunk++) check_bytes(&b, chunk, chunk != 1); /* the others ran, once */
    CHECK_STATUS(gemini_manager_close(b.w.mgr), fails[i / 2].status);
    CHECK_SAYS(world_error().message, fails[i / 2].says);
  }
}

static void test_wrong_callbacks_and_copies_are_refused(void) {
  bytes_t b = bytes_open(false);
  const uint32_t mode = BOTH;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &b.arena, u.modes = &mode, u.arena_count = 1;
  CHECK_STATUS(gemini_update(b.w.mgr, &u), GEMINI_ERR_INVALID);
  u.fn = gemini_update_walk, u.try_fn = add_span;
  CHECK_STATUS(gemini_update(b.w.mgr, &u), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "fn and try_fn are both set");
  u.fn = NULL, u.user_bytes = 8;
  CHECK_STATUS(gemini_update(b.w.mgr, &u), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "user_bytes is 8 and user is NULL");
  u.user = &u, u.user_bytes = (1 << 20) + 1;
  CHECK_STATUS(gemini_update(b.w.mgr, &u), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "user_bytes is 1048577, must be at most 1048576");
  CHECK_EQ(world_stats(&b.w).pending_updates, 0);
  world_close(&b.w);
}

/* ---- 8-bit states: chunks of them have four times as many elements as those of fp32 masters */
static void in_blocks(uint32_t flags) {
  static uint16_t grad[BLOCKS];
  static float master[BLOCKS];
  static uint8_t momentum[BLOCKS], variance[BLOCKS];
  world_t w = world_open(world_config(8, 80, 0));
  gemini_arena_t arenas[4];
  gemini_tensor_t tensors[4];
  static const uint32_t bytes[] = { 4, 2, 1, 1 };
  const void *const want[] = { master, grad, momentum, variance };
  for (uint32_t i = 0; i < 4; i++) {
    arenas[i] =
        world_arena(&w, i ? GEMINI_KIND_MASTER + i - 1 : GEMINI_KIND_PARAM, bytes[i], NULL, i ? arenas[0] : NULL, NULL);
    if (!i) tensors[0] = world_tensor(&w, arenas[0], "all", BLOCKS * 4);
    else CHECK_OK(gemini_tensor_counterpart(w.mgr, tensors[0], arenas[i], &tensors[i]));
  }
  memset(master, 0, sizeof master), memset(momentum, 0, sizeof momentum), memset(variance, 0, sizeof variance);
  for (uint64_t step = 1; step <= 3; step++) {
    gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
    adamw.step = step, adamw.momentum_dtype = adamw.variance_dtype = GEMINI_DTYPE_BLOCK8;
    for (uint64_t i = 0; i < BLOCKS; i++) grad[i] = (uint16_t)(0x3c00 + (i * 37 + step * 101) % 512);
    gemini_access_t a = world_whole(tensors[1], GEMINI_WRITE, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    memcpy(a.ptr, grad, sizeof grad);
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    gemini_update_arenas_t all = GEMINI_UPDATE_ARENAS_INIT;
    all.master = arenas[0], all.grad = arenas[1], all.momentum = arenas[2], all.variance = arenas[3];
    all.element_count = 100;
    CHECK_STATUS(gemini_adamw_arenas(w.mgr, &adamw, &all), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().message, "the update has elements 0 + 100, 8-bit states want multiples of 256");
    all.element_count = 0, all.flags = GEMINI_UPDATE_SPECULATE;
    CHECK_OK(gemini_adamw_arenas(w.mgr, &adamw, &all));
    all.flags = flags | GEMINI_UPDATE_COMMIT;
    CHECK_OK(gemini_adamw_arenas(w.mgr, &adamw, &all));
    CHECK_OK(gemini_update_wait(w.mgr));
    CHECK_OK(gemini_adamw_host(&adamw, BLOCKS, NULL, grad, master, momentum, variance, NULL));
  }
  CHECK(world_stats(&w).committed_elements > 0);
  for (uint32_t i = 0; i < 4; i++) {
    gemini_access_t a = world_whole(tensors[i], GEMINI_READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK(!memcmp(a.ptr, want[i], (size_t)BLOCKS * bytes[i]));
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  world_close(&w);
}
static void test_one_call_updates_arenas_with_states_in_blocks_to_the_bit(void) {
  in_blocks(0);
  in_blocks(GEMINI_UPDATE_LATE);
}

/* ---- 8-bit states of sharded arenas: several ranks and one process have the same bits, as random bits are those of an
 * element's number in the whole arena */
enum { SHARED = 5 * 16384 + 512, RANKS = 3 };
static float shared_gradient(uint64_t i, uint64_t step) { return (float)((i * 37 + step * 101) % 1021) * 0x1p-12f; }
static void rank_in_blocks(uint32_t rank, uint32_t ranks, const gemini_group_id_t *id) {
  static float grad[SHARED], master[SHARED];
  static uint8_t momentum[SHARED], variance[SHARED];
  static const uint32_t kinds[] = { GEMINI_KIND_PARAM, GEMINI_KIND_GRAD, GEMINI_KIND_MOMENTUM, GEMINI_KIND_VARIANCE };
  const void *const want[] = { master, NULL, momentum, variance };
  memset(master, 0, sizeof master), memset(momentum, 0, sizeof momentum), memset(variance, 0, sizeof variance);
  world_t w = world_open(world_config(24, 80, 0));
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  group.id = id, group.rank = rank, group.ranks = ranks, group.deadline_ns = UINT64_C(60000000000);
  gemini_group_t handle;
  CHECK_OK(gemini_group_open(w.mgr, &group, &handle));
  gemini_arena_t arenas[4];
  gemini_tensor_t tensors[4];
  for (uint32_t i = 0; i < 4; i++) {
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
    c.kind = kinds[i];
    c.element_bytes = i < 2 ? 4 : 1;
    c.group = i ? NULL : handle, c.like = i ? arenas[0] : NULL, c.dtype = i == 1 ? GEMINI_DTYPE_F32 : 0;
    CHECK_OK(gemini_arena_create(w.mgr, &c, &arenas[i]));
    if (!i) tensors[0] = world_tensor(&w, arenas[0], "all", SHARED * 4);
    else CHECK_OK(gemini_tensor_counterpart(w.mgr, tensors[0], arenas[i], &tensors[i]));
  }
  for (uint64_t step = 1; step <= 3; step++) {
    CHECK_OK(gemini_iteration_begin(w.mgr));
    CHECK_OK(gemini_op_begin(w.mgr, "backward", w.stream));
    gemini_access_t a = world_whole(tensors[1], GEMINI_WRITE, DEVICE);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < SHARED; i++) { /* the sum over ranks is exact */
      grad[i] = shared_gradient(i, step);
      ((float *)a.ptr)[i] = rank ? grad[i] : grad[i] * (float)(2 - (int)ranks);
    }
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_tensor_state_set(w.mgr, tensors[1], GEMINI_STATE_READY_FOR_REDUCE));
    CHECK_OK(gemini_op_end(w.mgr));
    gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
    adamw.step = step, adamw.seed = 5, adamw.grad_dtype = GEMINI_DTYPE_F32;
    adamw.momentum_dtype = adamw.variance_dtype = GEMINI_DTYPE_BLOCK8;
    gemini_update_arenas_t all = GEMINI_UPDATE_ARENAS_INIT;
    all.master = arenas[0], all.grad = arenas[1], all.momentum = arenas[2], all.variance = arenas[3];
    CHECK_OK(gemini_adamw_arenas(w.mgr, &adamw, &all));
    CHECK_OK(gemini_iteration_end(w.mgr));
    CHECK_OK(gemini_adamw_host(&adamw, SHARED, NULL, grad, master, momentum, variance, NULL));
  }
  uint64_t offset, size, bytes = 0;
  for (uint32_t i = 0; i < 4; i++) {
    const gemini_access_t whole = world_whole(tensors[i], GEMINI_READ, HOST);
    for (uint64_t next = 0; want[i]; next = offset + size) {
      CHECK_OK(gemini_slice_next(w.mgr, &whole, next, &offset, &size));
      if (!size) break;
      gemini_access_t a = world_part(tensors[i], offset, size, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(!memcmp(a.ptr, (const char *)want[i] + offset, size));
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      bytes += size;
    }
  }
  uint64_t sums[RANKS], sum = 0;
  CHECK_OK(gemini_group_exchange(w.mgr, handle, &bytes, sizeof bytes, sums));
  for (uint32_t r = 0; r < ranks; r++) sum += sums[r];
  CHECK_EQ(sum, SHARED * 6);
  world_close(&w);
}
static void test_ranks_have_the_states_in_blocks_of_one_process(void) {
  for (uint32_t ranks = 1; ranks <= RANKS; ranks++) {
    gemini_group_id_t id;
    CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, ranks, &id));
    pid_t pids[RANKS];
    for (uint32_t r = 1; r < ranks; r++) {
      pids[r] = fork_child();
      if (pids[r]) continue;
      rank_in_blocks(r, ranks, &id);
      exit(0);
    }
    rank_in_blocks(0, ranks, &id);
    for (uint32_t r = 1; r < ranks; r++) fork_expect_end(pids[r]);
  }
}

/* ---- whole arenas */
enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ARENAS };
typedef struct {
  world_t w;
  gemini_arena_t arenas[ARENAS];
  gemini_tensor_t tensors[ARENAS];
} model_t;
/* narrow: split masters, momentum and variance in bf16. */
static model_t model_open(uint64_t device_chunks, bool narrow) {
  static const uint32_t kinds[] = { GEMINI_KIND_PARAM, GEMINI_KIND_GRAD, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM,
                                    GEMINI_KIND_VARIANCE };
  static const char *const names[] = { "param", "grad", "master", "momentum", "variance" };
  model_t m = { .w = world_open(world_config(device_chunks, 80, 0)) };
  for (int i = 0; i < ARENAS; i++) {
    const uint32_t bytes = i < MASTER || narrow ? 2 : 4;
    m.arenas[i] = world_arena(&m.w, kinds[i], bytes, names[i], i ? m.arenas[0] : NULL, NULL);
    if (!i) m.tensors[0] = world_tensor(&m.w, m.arenas[0], "all", ELEMENTS * bytes);
    else CHECK_OK(gemini_tensor_counterpart(m.w.mgr, m.tensors[0], m.arenas[i], &m.tensors[i]));
  }
  return m;
}
static struct {
  uint16_t param[ELEMENTS], grad[ELEMENTS];
  float master[ELEMENTS], momentum[ELEMENTS], variance[ELEMENTS];
} plain;
static void put(const model_t *m, int role, const void *bytes, uint64_t size) {
  gemini_access_t a = world_whole(m->tensors[role], GEMINI_WRITE, HOST);
  CHECK_OK(gemini_acquire(m->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  memcpy(a.ptr, bytes, size);
  CHECK_OK(gemini_release(m->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static void check_role(const model_t *m, int role, const void *want, uint64_t size) {
  gemini_access_t a = world_whole(m->tensors[role], GEMINI_READ, HOST);
  CHECK_OK(gemini_acquire(m->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(!memcmp(a.ptr, want, size));
  CHECK_OK(gemini_release(m->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static void make_gradients(int step) {
  for (uint64_t i = 0; i < ELEMENTS; i++) plain.grad[i] = (uint16_t)(0x3c00 + (i * 37 + (uint64_t)step * 101) % 512);
}
/* Updates of all steps, late or not, with everything on the host or everything pinned to the device; the bits of one
 * call over plain arrays. */
static void train(bool sgd, bool low, bool on_device, uint32_t flags, bool narrow) {
  model_t m = model_open(on_device ? 70 : 8, narrow);
  const uint64_t state_bytes = narrow ? sizeof plain.master / 2 : sizeof plain.master;
  memset(&plain, 0, sizeof plain);
  for (uint64_t i = 0; i < ELEMENTS; i++) plain.master[i] = (float)(i % 1000) * 1e-3f;
  for (uint64_t i = 0; i < ELEMENTS; i++) plain.param[i] = (uint16_t)(narrow ? 0x3c00 + i % 500 : 0);
  put(&m, PARAM, plain.param, sizeof plain.param);
  put(&m, MASTER, plain.master, state_bytes); /* any bits are the lower halves of some masters */
  for (int i = 0; on_device && i < ARENAS; i++) {
    gemini_access_t pin = world_whole(m.tensors[i], BOTH, DEVICE);
    CHECK_OK(gemini_pin(m.w.mgr, &pin));
  }
  for (int step = 1; step <= STEPS; step++) {
    gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
    gemini_sgd_t rule = GEMINI_SGD_INIT;
    adamw.step = rule.step = (uint64_t)step;
    rule.momentum = 0.9;
    if (narrow) {
      adamw.flags = GEMINI_ADAMW_SPLIT, adamw.seed = 5;
      adamw.momentum_dtype = adamw.variance_dtype = GEMINI_DTYPE_BF16;
    }
    make_gradients(step);
    gemini_access_t a = world_whole(m.tensors[GRAD], GEMINI_WRITE, DEVICE);
    CHECK_OK(gemini_acquire(m.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    memcpy(a.ptr, plain.grad, sizeof plain.grad);
    CHECK_OK(gemini_release(m.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    gemini_update_arenas_t arenas = GEMINI_UPDATE_ARENAS_INIT;
    arenas.flags = flags;
    arenas.param = low ? m.arenas[PARAM] : NULL;
    arenas.grad = m.arenas[GRAD], arenas.master = m.arenas[MASTER], arenas.momentum = m.arenas[MOMENTUM];
    arenas.variance = sgd ? NULL : m.arenas[VARIANCE];
    for (int ahead = step % 2; ahead >= 0; ahead--) { /* every other step is speculated, where there is room */
      arenas.flags = ahead ? GEMINI_UPDATE_SPECULATE : flags | GEMINI_UPDATE_COMMIT;
      CHECK_OK(sgd ? gemini_sgd_arenas(m.w.mgr, &rule, &arenas) : gemini_adamw_arenas(m.w.mgr, &adamw, &arenas));
    }
    uint16_t *param = low ? plain.param : NULL;
    CHECK_OK(sgd ? gemini_sgd_host(&rule, ELEMENTS, param, plain.grad, plain.master, plain.momentum, NULL)
                 : gemini_adamw_host(&adamw, ELEMENTS, param, plain.grad, plain.master, plain.momentum, plain.variance,
                                     NULL));
    gemini_access_t all = world_whole(m.tensors[GRAD], 0, 0); /* after the update, which may have yet to run */
    if (!on_device) CHECK_OK(gemini_zero(m.w.mgr, &all));
    memset(&adamw, 0xa5, sizeof adamw), memset(&rule, 0xa5, sizeof rule), memset(&arenas, 0xa5, sizeof arenas);
  }
  CHECK_OK(gemini_update_wait(m.w.mgr));
  CHECK(on_device || world_stats(&m.w).committed_elements >= 4 * 32768); /* once there are states on the host */
  for (int i = 0; on_device && i < ARENAS; i++) {
    gemini_access_t pin = world_whole(m.tensors[i], BOTH, DEVICE);
    CHECK_OK(gemini_unpin(m.w.mgr, &pin));
  }
  check_role(&m, PARAM, plain.param, sizeof plain.param);
  check_role(&m, MASTER, plain.master, state_bytes);
  check_role(&m, MOMENTUM, plain.momentum, state_bytes);
  check_role(&m, VARIANCE, plain.variance, state_bytes);
  world_close(&m.w);
}
static void test_one_call_updates_whole_arenas_to_the_bit(void) {
  for (int i = 0; i < 16; i++) train(i & 1, i & 2, i & 4, i & 8 ? GEMINI_UPDATE_LATE : 0, false);
}
static void test_one_call_updates_arenas_with_narrow_states_to_the_bit(void) {
  for (int i = 0; i < 4; i++) train(false, true, i & 1, i & 2 ? GEMINI_UPDATE_LATE : 0, true);
}

static void test_arenas_that_do_not_fit_the_rule_are_refused(void) {
  model_t m = model_open(8, false);
  gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
  gemini_sgd_t sgd = GEMINI_SGD_INIT;
  gemini_update_arenas_t good = GEMINI_UPDATE_ARENAS_INIT, bad;
  good.param = m.arenas[PARAM], good.grad = m.arenas[GRAD], good.master = m.arenas[MASTER];
  good.momentum = m.arenas[MOMENTUM], good.variance = m.arenas[VARIANCE];
#define REFUSED(expected, says)                                         \
  do {                                                                  \
    CHECK_STATUS(gemini_adamw_arenas(m.w.mgr, &adamw, &bad), expected); \
    CHECK(!strcmp(world_error().operation, "gemini_adamw_arenas"));     \
    CHECK_SAYS(world_error().message, says);                            \
    bad = good;                                                         \
  } while (0)
  bad = good, bad.grad = NULL;
  REFUSED(GEMINI_ERR_INVALID, "grad is NULL");
  bad.variance = NULL;
  REFUSED(GEMINI_ERR_INVALID, "variance is NULL");
  bad.grad = m.arenas[MASTER], bad.master = m.arenas[GRAD];
  REFUSED(GEMINI_ERR_INVALID, "grad: the arena has elements of 4 bytes, the update of 2");
  bad.struct_size = 8;
  REFUSED(GEMINI_ERR_INVALID, "arenas: struct_size is 8, want 72 to 4096");
  bad.flags = 32;
  REFUSED(GEMINI_ERR_INVALID, "flags has unknown bits 0x20");
  bad.momentum = bad.variance;
  REFUSED(GEMINI_ERR_INVALID, "arena variance is named twice");
  bad.master = (gemini_arena_t)handle_of(3);
  REFUSED(GEMINI_ERR_HANDLE, "master: 0x3 is no arena");
  bad.first_element = ELEMENTS, bad.element_count = 1;
  REFUSED(GEMINI_ERR_INVALID, "more than the 163940 elements");
  adamw.grad_dtype = GEMINI_DTYPE_F32; /* the default is bf16: fp32 gradients would be read as twice as many */
  REFUSED(GEMINI_ERR_INVALID, "grad: the arena has elements of 2 bytes, the update of 4");
  adamw = (gemini_adamw_t)GEMINI_ADAMW_INIT, adamw.momentum_dtype = GEMINI_DTYPE_BF16;
  REFUSED(GEMINI_ERR_INVALID, "momentum: the arena has elements of 4 bytes, the update of 2");
  adamw = (gemini_adamw_t)GEMINI_ADAMW_INIT, adamw.flags = GEMINI_ADAMW_SPLIT;
  REFUSED(GEMINI_ERR_INVALID, "master: the arena has elements of 4 bytes, the update of 2");
  bad.param = NULL;
  REFUSED(GEMINI_ERR_INVALID, "there is no param, which is half of each master");
  adamw = (gemini_adamw_t)GEMINI_ADAMW_INIT, adamw.beta1 = 1;
  REFUSED(GEMINI_ERR_INVALID, "beta1 is 1");
  CHECK_STATUS(gemini_adamw_arenas(m.w.mgr, NULL, &good), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_adamw_arenas(m.w.mgr, &adamw, NULL), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_adamw_arenas(NULL, &(gemini_adamw_t)GEMINI_ADAMW_INIT, &good), GEMINI_ERR_HANDLE);
  CHECK_STATUS(gemini_sgd_arenas(m.w.mgr, NULL, &good), GEMINI_ERR_INVALID);
  sgd.momentum = 0.5;
  good.momentum = NULL;
  CHECK_STATUS(gemini_sgd_arenas(m.w.mgr, &sgd, &good), GEMINI_ERR_INVALID);
  CHECK_SAYS(gemini_error_text(), "gemini_sgd_arenas: invalid argument: momentum is NULL");
  sgd.momentum = 0;
  CHECK_OK(gemini_sgd_arenas(m.w.mgr, &sgd, &good)); /* without momentum it needs none */
  world_close(&m.w);
}

int main(void) {
  process_begin();
  RUN(test_late_updates_use_copies_of_what_the_caller_has_overwritten);
  RUN(test_an_update_whose_function_fails_says_so_for_good);
  RUN(test_wrong_callbacks_and_copies_are_refused);
  RUN(test_one_call_updates_whole_arenas_to_the_bit);
  RUN(test_one_call_updates_arenas_with_narrow_states_to_the_bit);
  RUN(test_one_call_updates_arenas_with_states_in_blocks_to_the_bit);
  RUN(test_ranks_have_the_states_in_blocks_of_one_process);
  RUN(test_arenas_that_do_not_fit_the_rule_are_refused);
  return check_done();
}
