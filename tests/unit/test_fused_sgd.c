/* The fused SGD: every instruction set against plain C to the bit, and plain C against PyTorch's algorithm in double
 * precision. SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "update/beside.h"
#include "update/update.h"
#include "update_driver.h"
#include "update_values.h"

enum { CAPACITY = 5000 };

typedef struct state {
  uint32_t param[CAPACITY], grad[CAPACITY]; /* of any dtype */
  float master[CAPACITY], momentum[CAPACITY];
  double sum;
} state_t;
static state_t start, expected, actual;

static void fill(state_t *s, uint64_t seed, bool any) {
  uint64_t random = seed * 2 + 1;
  for (uint64_t i = 0; i < CAPACITY; i++) {
    s->grad[i] = bits_of(random_float(&random, 0.5f, any));
    s->master[i] = random_float(&random, 2.0f, any);
    s->momentum[i] = random_float(&random, 0.5f, any);
  }
  memset(s->param, 0x5a, sizeof s->param);
  s->sum = -1;
}

enum { NONE, FIRST, LATER, DAMPENED, NESTEROV_FIRST, NESTEROV, MODES };
static gemini_sgd_t config_of(int mode, uint32_t param_dtype, uint32_t grad_dtype) {
  gemini_sgd_t c = GEMINI_SGD_INIT;
  c.param_dtype = param_dtype;
  c.grad_dtype = grad_dtype;
  c.flags = mode >= NESTEROV_FIRST ? GEMINI_SGD_NESTEROV : 0;
  c.step = mode == FIRST || mode == NESTEROV_FIRST ? 1 : 2;
  c.lr = 3e-3;
  c.momentum = mode == NONE ? 0 : 0.9;
  c.dampening = mode == DAMPENED || mode == FIRST ? 0.3 : 0;
  c.weight_decay = 0.1;
  c.grad_scale = 0.73;
  return c;
}
static void update(state_t *s, const gemini_sgd_t *c, uint64_t first, uint64_t count, bool in_place) {
  void *grad = element_at(s->grad, c->grad_dtype, first);
  CHECK_EQ(gemini_sgd_host(c, count, in_place ? grad : element_at(s->param, c->param_dtype, first), grad,
                           s->master + first, s->momentum + first, &s->sum),
           GEMINI_OK);
}
static void check_same(const state_t *a, const state_t *b, uint32_t param_dtype) {
  for (uint64_t i = 0; i < CAPACITY; i++) {
    CHECK(same_float(a->master[i], b->master[i]) && same_float(a->momentum[i], b->momentum[i]));
    CHECK(a->param[i] == b->param[i] ||
          (param_dtype == F32 && same_float(float_of(a->param[i]), float_of(b->param[i]))));
  }
  CHECK(same_double(a->sum, b->sum));
}

static void test_sgd_every_isa_equals_plain(void) {
  uint32_t tried = 0;
  for (size_t isa = 1; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    tried++;
    for (uint32_t i = 0; i < 9 * MODES; i++) {
      const gemini_sgd_t c = config_of((int)i / 9, dtypes[i % 3], dtypes[i / 3 % 3]);
      const uint64_t counts[] = { 0, 1, 15, 16, 17, 31, 100, 1023, 1024, 1040, 2047, 4111 };
      for (uint64_t k = 0; k < sizeof counts / sizeof *counts; k++) {
        fill(&start, k + 20 * i, true);
        expected = actual = start;
        CHECK_EQ(gemini_update_force_isa("plain"), GEMINI_OK);
        update(&expected, &c, k * 7 % 17, counts[k], false);
        CHECK_EQ(gemini_update_force_isa(isas[isa]), GEMINI_OK);
        update(&actual, &c, k * 7 % 17, counts[k], false);
        check_same(&actual, &expected, c.param_dtype);
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
  CHECK((tried == 0) == (strcmp(gemini_update_isa(), "plain") == 0));
}

/* New values beside the old ones: the bits of the update in place, and the old ones stay. */
static void test_sgd_beside_the_old_values_is_the_same(void) {
  static state_t to;
  for (uint32_t i = 0; i < 9 * MODES; i++) {
    const gemini_sgd_t c = config_of((int)i / 9, dtypes[i % 3], dtypes[i / 3 % 3]);
    const uint64_t count = 5 + i * 71 % 4000;
    fill(&start, i, true);
    expected = actual = start;
    memset(&to, 0x5a, sizeof to);
    update(&expected, &c, 0, count, false);
    const gmi_arrays_t a = { NULL, actual.grad, actual.master, c.momentum != 0 ? actual.momentum : NULL, NULL };
    const gmi_arrays_t out = { to.param, NULL, to.master, c.momentum != 0 ? to.momentum : NULL, NULL };
    CHECK_EQ(gmi_sgd_beside("test", &c, count, &a, &out), GEMINI_OK);
    CHECK(!memcmp(&actual, &start, sizeof start));
    for (uint64_t k = 0; k < count; k++) {
      float x, y;
      memcpy(&x, element_at(to.param, c.param_dtype, k), c.param_dtype == F32 ? 4 : 2);
      CHECK(same_float(to.master[k], expected.master[k]));
      if (c.momentum != 0) CHECK(same_float(to.momentum[k], expected.momentum[k]));
      if (c.param_dtype != F32) {
        CHECK(!memcmp(element_at(to.param, c.param_dtype, k), element_at(expected.param, c.param_dtype, k), 2));
        continue;
      }
      memcpy(&y, &expected.param[k], 4);
      CHECK(same_float(x, y));
    }
    CHECK(!memcmp(&to.master[count], &(uint32_t){ 0x5a5a5a5a }, 4));
  }
}

/* One element as torch.optim.SGD's _single_tensor_sgd() updates it, in double, and how far fp32 may be from it. U is the most
 * that rounding changes a number by, relatively: each operation adds U of its result, each coefficient U of its product;
 * terms of U * U are left to the factor 1.0001. */
#define U 0x1p-24
typedef struct reference {
  double p, m, p_error, m_error;
} reference_t;
static reference_t reference_of(const gemini_sgd_t *c, double grad, double param, double buf, bool has_buf) {
  const double scaled = grad * c->grad_scale, decay = c->weight_decay * param;
  double g = scaled + decay;
  double g_error = 2 * U * fabs(scaled) + 2 * U * fabs(decay) + U * fabs(g);
  reference_t r = { .m = buf };
  if (c->momentum != 0) {
    if (!has_buf) {
      r.m = g, r.m_error = g_error;
    } else {
      const double kept = buf * c->momentum, added = (1 - c->dampening) * g;
      r.m = kept + added;
      r.m_error = 2 * U * fabs(kept) + 2 * U * fabs(added) + fabs(1 - c->dampening) * g_error + U * fabs(r.m);
    }
    if (c->flags & GEMINI_SGD_NESTEROV) {
      const double ahead = c->momentum * r.m;
      g += ahead;
      g_error += 2 * U * fabs(ahead) + c->momentum * r.m_error + U * fabs(g);
    } else {
      g = r.m, g_error = r.m_error;
    }
  }
  const double moved = c->lr * g;
  r.p = param - moved;
  r.p_error = c->lr * g_error + 2 * U * fabs(moved) + U * fabs(r.p);
  r.p_error *= 1.0001, r.m_error *= 1.0001;
  return r;
}

static void test_sgd_is_near_pytorchs_in_double_precision(void) {
  const uint64_t first = 3, count = 1100;
  for (int mode = 0; mode < MODES; mode++) {
    const gemini_sgd_t c = config_of(mode, F32, F32);
    fill(&start, (uint64_t)mode, false);
    /* What lies in the momentum before the first step is nothing. */
    for (uint64_t i = 0; c.step == 1 && i < CAPACITY; i++) start.momentum[i] = NAN;
    actual = start;
    update(&actual, &c, first, count, false);
    for (uint64_t i = 0; i < CAPACITY; i++) {
      float grad;
      memcpy(&grad, &start.grad[i], sizeof grad);
      if (i < first || i >= first + count) {
        CHECK(actual.master[i] == start.master[i] && actual.param[i] == start.param[i]);
        CHECK(same_float(actual.momentum[i], start.momentum[i]));
        continue;
      }
      reference_t r = reference_of(&c, grad, start.master[i], start.momentum[i], c.step > 1);
      CHECK(fabs(actual.momentum[i] - r.m) <= r.m_error); /* without one, none is touched: an error of 0 */
      CHECK(fabs(actual.master[i] - r.p) <= r.p_error);
      CHECK(!memcmp(&actual.param[i], &actual.master[i], 4));
    }
  }
}

/* The operations of docs/update.md one by one, each rounded to fp32. */
static void test_sgd_does_the_written_operations(void) {
  for (int mode = 0; mode < MODES; mode++) {
    gemini_sgd_t c = config_of(mode, F32, F32);
    const float scale = 0.73f, l2 = 0.1f, mu = 0.9f, damped = (float)(1 - c.dampening), lr = 3e-3f;
    fill(&start, (uint64_t)mode, false);
    actual = start;
    update(&actual, &c, 0, CAPACITY, false);
    for (uint64_t i = 0; i < CAPACITY; i++) {
      float grad;
      memcpy(&grad, &start.grad[i], sizeof grad);
      volatile float p = start.master[i], m = start.momentum[i], a = grad * scale, b = l2 * p, g = a + b;
      if (mode != NONE) {
        a = mu * m, b = damped * g;
        m = c.step == 1 ? g : a + b;
        a = mu * m;
        g = mode >= NESTEROV_FIRST ? g + a : m;
      }
      a = lr * g;
      p = p - a;
      CHECK(actual.momentum[i] == m && actual.master[i] == p);
    }
  }
}

/* The fused AdamW with a learning rate of 0 writes the parameter and sums squares as it is tested to. */
static void test_sgd_reads_rounds_and_sums_as_adamw(void) {
  static float states[2][CAPACITY];
  for (size_t isa = 0; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    for (uint32_t i = 0; i < 9; i++) {
      const gemini_sgd_t c = config_of(NONE, dtypes[i % 3], dtypes[i / 3]);
      gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
      adamw.param_dtype = c.param_dtype, adamw.grad_dtype = c.grad_dtype, adamw.lr = 0;
      fill(&start, i, false);
      actual = start;
      update(&actual, &c, 0, CAPACITY, false);
      expected = actual;
      memset(expected.param, 0x5a, sizeof expected.param);
      memset(states, 0, sizeof states);
      CHECK_EQ(gemini_adamw_host(&adamw, CAPACITY, expected.param, expected.grad, expected.master, states[0], states[1],
                                 &expected.sum),
               GEMINI_OK);
      check_same(&actual, &expected, c.param_dtype);
      /* The gradient as it was read: what the first step makes the momentum. */
      gemini_sgd_t copying = config_of(FIRST, c.param_dtype, c.grad_dtype);
      copying.weight_decay = 0, copying.grad_scale = 1;
      adamw.beta1 = 0, adamw.weight_decay = 0;
      update(&start, &copying, 0, CAPACITY, false);
      CHECK_EQ(gemini_adamw_host(&adamw, CAPACITY, NULL, start.grad, start.master, states[0], states[1], NULL),
               GEMINI_OK);
      for (uint64_t k = 0; k < CAPACITY; k++)
        CHECK(same_float(start.momentum[k], states[0][k]) ||
              start.momentum[k] == states[0][k]); /* a zero has any sign */
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

static void test_sgd_in_its_gradients_bytes_without_parameter_or_sum_is_the_same(void) {
  const gemini_sgd_t c = config_of(NESTEROV, BF16, F16), none = config_of(NONE, F32, F16);
  fill(&start, 1, true);
  expected = actual = start;
  update(&expected, &c, 5, 1500, false);
  update(&actual, &c, 5, 1500, true);
  CHECK(!memcmp(element_at(actual.grad, BF16, 5), element_at(expected.param, BF16, 5), 1500 * 2));
  CHECK(!memcmp(element_at(actual.grad, BF16, 1505), element_at(start.grad, BF16, 1505), 100));
  memcpy(actual.param, expected.param, sizeof actual.param);
  check_same(&actual, &expected, BF16);

  expected = actual = start;
  update(&expected, &none, 0, 777, false);
  CHECK_EQ(gemini_sgd_host(&none, 777, NULL, actual.grad, actual.master, NULL, NULL), GEMINI_OK);
  memcpy(actual.param, expected.param, sizeof actual.param);
  actual.sum = expected.sum;
  check_same(&actual, &expected, F32);
}

static const char *message(void) {
  static gemini_error_info_t info;
  info = (gemini_error_info_t)GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  return info.message;
}
static void test_sgd_bad_values_are_refused_by_name(void) {
  const gemini_sgd_t good = config_of(LATER, BF16, BF16), nesterov = config_of(NESTEROV, BF16, BF16);
  gemini_sgd_t c;
  fill(&start, 1, false);
#define REFUSED(given, count, param, momentum, words)                                                             \
  actual = start;                                                                                                 \
  CHECK_EQ(gemini_sgd_host(given, count, param, actual.grad, actual.master, momentum, NULL), GEMINI_ERR_INVALID); \
  CHECK_SAYS(message(), words);                                                                                   \
  CHECK(!memcmp(&actual, &start, sizeof start))
#define BAD(base, field, value, words) \
  c = base, c.field = value;           \
  REFUSED(&c, 100, actual.param, actual.momentum, words)
  REFUSED(NULL, 100, actual.param, actual.momentum, "sgd is NULL");
  BAD(good, struct_size, 8, "sgd: struct_size is 8");
  BAD(good, flags, 2, "flags has unknown bits: 0x2");
  BAD(good, param_dtype, GEMINI_DTYPE_F64, "param_dtype is 3");
  BAD(good, grad_dtype, 77, "grad_dtype is 77");
  BAD(good, step, 0, "step is 0");
  BAD(good, lr, -1, "lr is -1");
  BAD(good, lr, NAN, "lr is");
  BAD(good, lr, 1e39, "lr is not finite");
  BAD(good, momentum, -0.5, "momentum is -0.5");
  BAD(good, momentum, INFINITY, "momentum is not finite");
  BAD(good, dampening, 1e39, "1 - dampening is not finite");
  BAD(good, weight_decay, -0.1, "weight_decay is -0.1");
  BAD(good, weight_decay, 1e39, "weight_decay is not finite");
  BAD(good, grad_scale, NAN, "grad_scale is not finite");
  BAD(nesterov, momentum, 0, "momentum is 0, GEMINI_SGD_NESTEROV wants more than 0");
  BAD(nesterov, dampening, 0.5, "dampening is 0.5, GEMINI_SGD_NESTEROV wants 0");
  REFUSED(&good, 100, actual.param, NULL, "momentum is NULL");
  REFUSED(&good, 100, actual.param, actual.master + 99, "overlap over 100 elements");
  REFUSED(&good, UINT64_C(1) << 41, actual.param, actual.momentum, "count is 2199023255552");
#undef BAD
#undef REFUSED
}

static void test_sgd_cuda_gives_the_kernels_what_the_host_computes_with(void) {
  const uint64_t counts[] = { 1, 1024, 1025, 4999 };
  fake_start();
  for (uint32_t i = 0; i < 9 * MODES; i++) {
    const gemini_sgd_t c = config_of((int)i / 9, dtypes[i % 3], dtypes[i / 3 % 3]);
    uint64_t count = counts[i % 4];
    double sums[6];
    fill(&start, i, true);
    expected = actual = start;
    update(&expected, &c, 0, count, false);
    fake.call_count = 0;
    CHECK_EQ(gemini_sgd_cuda(&c, count, actual.param, actual.grad, actual.master, actual.momentum, NULL, sums),
             GEMINI_OK);
    actual.sum = sums[0];
    check_same(&actual, &expected, c.param_dtype);
  }
  CHECK_EQ(fake.loads, 1);
  fake.call_count = 0;
  const gemini_sgd_t c = config_of(LATER, BF16, BF16);
  CHECK_EQ(gemini_sgd_cuda(&c, 9, actual.param, actual.grad, actual.master, actual.momentum, contexts[0], NULL),
           GEMINI_OK);
  CALLED("cuCtxGetCurrent", "cuStreamGetCtx", "cuCtxSetCurrent", "gmi_sgd", "cuCtxSetCurrent");
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  fake.failing = "gmi_sgd";
  CHECK_EQ(gemini_sgd_cuda(&c, 9, actual.param, actual.grad, actual.master, actual.momentum, NULL, NULL),
           GEMINI_ERR_DEVICE);
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  CHECK_SAYS(info.operation, "gemini_sgd_cuda");
  CHECK_SAYS(info.message, "cuLaunchKernel");
  gmi_update_cuda_replace(NULL);
}

int main(void) {
  RUN(test_sgd_every_isa_equals_plain);
  RUN(test_sgd_beside_the_old_values_is_the_same);
  RUN(test_sgd_is_near_pytorchs_in_double_precision);
  RUN(test_sgd_does_the_written_operations);
  RUN(test_sgd_reads_rounds_and_sums_as_adamw);
  RUN(test_sgd_in_its_gradients_bytes_without_parameter_or_sum_is_the_same);
  RUN(test_sgd_bad_values_are_refused_by_name);
  RUN(test_sgd_cuda_gives_the_kernels_what_the_host_computes_with);
  return check_done();
}
