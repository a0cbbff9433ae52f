/* The fused updates: every instruction set against plain C to the bit, and plain C against double precision.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "update/beside.h"
#include "update/update.h"
#include "update_driver.h"
#include "update_values.h"

enum { CAPACITY = 5000 };

typedef struct state {
  uint32_t param[CAPACITY], grad[CAPACITY]; /* of any dtype */
  float master[CAPACITY], momentum[CAPACITY], variance[CAPACITY];
  double sum;
} state_t;
static state_t start, expected, actual;

static void fill(state_t *s, uint64_t seed, uint32_t grad_dtype, bool any) {
  uint64_t random = seed * 2 + 1;
  for (uint64_t i = 0; i < CAPACITY; i++) {
    uint32_t bits = bits_of(random_float(&random, 0.5f, any));
    uint16_t half = (uint16_t)(bits >> 16); /* every half has as many bits set as a random float */
    if (grad_dtype == F16 && !any) half = (uint16_t)(0x2000 + check_random(&random) % 0x1800);
    memcpy(element_at(s->grad, grad_dtype, i), grad_dtype == F32 ? (void *)&bits : &half, grad_dtype == F32 ? 4 : 2);
    s->master[i] = random_float(&random, 2.0f, any);
    s->momentum[i] = random_float(&random, 0.1f, any);
    s->variance[i] = fabsf(random_float(&random, 0.01f, any));
  }
  memset(s->param, 0x5a, sizeof s->param);
  s->sum = -1;
}
static void update(state_t *s, const gemini_adamw_t *adamw, uint64_t first, uint64_t count, bool alias) {
  void *grad = element_at(s->grad, adamw->grad_dtype, first);
  void *param = alias ? grad : element_at(s->param, adamw->param_dtype, first);
  gemini_status_t status = gemini_adamw_host(adamw, count, param, grad, s->master + first, s->momentum + first,
                                             s->variance + first, &s->sum);
  CHECK_EQ(status, GEMINI_OK);
}
static gemini_adamw_t config_of(uint32_t param_dtype, uint32_t grad_dtype) {
  gemini_adamw_t a = GEMINI_ADAMW_INIT;
  a.param_dtype = param_dtype;
  a.grad_dtype = grad_dtype;
  a.step = 7;
  a.grad_scale = 0.73;
  return a;
}
static void check_same(const state_t *a, const state_t *b, uint32_t param_dtype) {
  for (uint64_t i = 0; i < CAPACITY; i++) {
    CHECK(same_float(a->master[i], b->master[i]));
    CHECK(same_float(a->momentum[i], b->momentum[i]));
    CHECK(same_float(a->variance[i], b->variance[i]));
    if (param_dtype == F32) CHECK(same_float(float_of(a->param[i]), float_of(b->param[i])));
  }
  if (param_dtype != F32) CHECK(memcmp(a->param, b->param, sizeof a->param) == 0);
  CHECK(same_double(a->sum, b->sum));
}

static void test_update_every_isa_equals_plain(void) {
  uint32_t tried = 0;
  for (size_t isa = 1; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    tried++;
    for (uint32_t pair = 0; pair < 18; pair++) {
      gemini_adamw_t a = config_of(dtypes[pair % 3], dtypes[pair / 3 % 3]);
      if (pair >= 9) a.flags = GEMINI_ADAMW_L2;
      for (uint64_t count = 0; count < 133; count++) {
        uint64_t first = count * 7 % 17, n = count == 130 ? 2047 : count == 131 ? 2048 : count == 132 ? 4111 : count;
        fill(&start, count + 200 * pair, a.grad_dtype, true);
        expected = actual = start;
        CHECK_EQ(gemini_update_force_isa("plain"), GEMINI_OK);
        update(&expected, &a, first, n, false);
        CHECK_EQ(gemini_update_force_isa(isas[isa]), GEMINI_OK);
        CHECK(strcmp(gemini_update_isa(), isas[isa]) == 0);
        update(&actual, &a, first, n, false);
        check_same(&actual, &expected, a.param_dtype);
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
  CHECK((tried == 0) == (strcmp(gemini_update_isa(), "plain") == 0));
}

/* --- against double precision --- */

/* What a slow and obvious conversion of a half says. */
static float float_of_half(uint16_t half, uint32_t dtype) {
  if (dtype == BF16) return float_of((uint32_t)half << 16);
  int exponent = half >> 10 & 31, fraction = half & 1023;
  double magnitude = exponent == 31 ? (fraction ? (double)NAN : (double)INFINITY)
                     : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                    : ldexp(fraction, -24);
  return (float)(half >> 15 ? -magnitude : magnitude);
}
static float float_of_grad(const state_t *s, uint32_t dtype, uint64_t i) {
  return dtype == F32 ? float_of(s->grad[i]) : float_of_half(((const uint16_t *)s->grad)[i], dtype);
}
/* x rounded to dtype, as a float: to the nearest multiple of its last digit, the even one of two. */
static double nearest(double x, uint32_t dtype) {
  if (dtype == F32 || x == 0 || isinf(x) || isnan(x)) return x;
  int digits = dtype == BF16 ? 8 : 11, least = dtype == BF16 ? -133 : -24, exponent;
  frexp(x, &exponent);
  int last = exponent - digits > least ? exponent - digits : least;
  double result = ldexp(rint(ldexp(x, -last)), last); /* the default rounding is to even */
  return fabs(result) > (dtype == BF16 ? 0x1.fep127 : 65504.0) ? copysign(INFINITY, x) : result;
}

/* One element in double, and how far fp32 may be from it. U is the most that rounding changes a number by, relatively:
 * each operation adds U of its result, each coefficient U of its product; terms of U * U are left to the factor 1.0001.
 * Numbers are chosen so that nothing is subnormal. */
#define U 0x1p-24
typedef struct reference {
  double p, m, v, p_error, m_error, v_error;
} reference_t;
static reference_t reference_of(const gemini_adamw_t *c, double grad, double p, double m, double v) {
  const bool l2 = c->flags & GEMINI_ADAMW_L2;
  const double root_scale = (double)(1 / sqrtl(1 - powl((long double)c->beta2, (long double)c->step)));
  const double step_size = (double)(c->lr / (1 - powl((long double)c->beta1, (long double)c->step)));
  const double added = l2 ? c->weight_decay * p : 0, decayed = l2 ? 0 : c->lr * c->weight_decay * p;
  const double g = grad * c->grad_scale + added;
  const double g_error = 2 * U * fabs(grad * c->grad_scale) + 2 * U * fabs(added) + U * fabs(g);
  reference_t r;
  const double old_m = c->beta1 * m, new_m = (1 - c->beta1) * g;
  r.m = old_m + new_m;
  r.m_error = 2 * U * fabs(old_m) + 2 * U * fabs(new_m) + (1 - c->beta1) * g_error + U * fabs(r.m);
  const double old_v = c->beta2 * v, new_v = (1 - c->beta2) * g * g;
  r.v = old_v + new_v;
  r.v_error = 2 * U * old_v + 3 * U * new_v + (1 - c->beta2) * 2 * fabs(g) * g_error + U * r.v;
  const double root = sqrt(r.v), root_error = r.v_error / (2 * root) + U * root;
  const double below = root * root_scale + c->eps;
  const double below_error = root_scale * (root_error + 2 * U * root) + U * c->eps + U * below;
  const double moved = step_size * r.m / below;
  const double moved_error = step_size * r.m_error / below + fabs(moved) * below_error / below + 3 * U * fabs(moved);
  const double change = moved + decayed;
  r.p = p - change;
  r.p_error = moved_error + 2 * U * fabs(decayed) + U * fabs(change) + U * fabs(r.p);
  r.p_error *= 1.0001, r.m_error *= 1.0001, r.v_error *= 1.0001;
  return r;
}

static void test_update_is_near_double_precision(void) {
  const uint64_t steps[] = { 1, 2, 1000, 1000000, UINT64_C(1) << 60 }, first = 3, count = 1100;
  for (uint32_t pair = 0; pair < 90; pair++) {
    gemini_adamw_t c = config_of(dtypes[pair % 3], dtypes[pair / 3 % 3]);
    c.flags = pair / 9 % 2 ? GEMINI_ADAMW_L2 : 0;
    c.step = steps[pair / 18];
    c.lr = 3e-3;
    c.weight_decay = 0.1;
    fill(&start, pair, c.grad_dtype, false);
    actual = start;
    update(&actual, &c, first, count, false);
    for (uint64_t i = 0; i < CAPACITY; i++) {
      double was = start.master[i];
      if (i < first || i >= first + count) {
        CHECK(actual.master[i] == start.master[i] && actual.momentum[i] == start.momentum[i]);
        CHECK(actual.variance[i] == start.variance[i]);
        CHECK(!memcmp(element_at(actual.param, c.param_dtype, i), element_at(start.param, c.param_dtype, i), 2));
        continue;
      }
      reference_t r =
          reference_of(&c, float_of_grad(&start, c.grad_dtype, i), was, start.momentum[i], start.variance[i]);
      CHECK(fabs(actual.momentum[i] - r.m) <= r.m_error);
      CHECK(fabs(actual.variance[i] - r.v) <= r.v_error);
      CHECK(fabs(actual.master[i] - r.p) <= r.p_error);
      double low = c.param_dtype == F32 ? float_of(actual.param[i])
                                        : float_of_half(((uint16_t *)actual.param)[i], c.param_dtype);
      CHECK(low == nearest(actual.master[i], c.param_dtype));
    }
  }
}

/* The operations of docs/update.md one by one, each rounded to fp32. */
static void test_update_does_the_written_operations(void) {
  const float beta1 = 0.9f, beta2 = 0.95f, lr = 0.01f;
  for (uint32_t l2 = 0; l2 < 2; l2++) {
    gemini_adamw_t c = config_of(F32, F32);
    c.flags = l2 ? GEMINI_ADAMW_L2 : 0;
    c.step = 2;
    c.lr = lr, c.beta1 = beta1, c.beta2 = beta2, c.eps = 1e-3, c.weight_decay = 0.1, c.grad_scale = 3;
    const float c1 = (float)(1 - c.beta1), c2 = (float)(1 - c.beta2), eps = 1e-3f, scale = 3;
    const float root_scale = (float)(1 / sqrt(1 - c.beta2 * c.beta2)), added = l2 ? 0.1f : 0;
    const float step_size = (float)(c.lr / (1 - c.beta1 * c.beta1)), decay = l2 ? 0 : (float)(c.lr * 0.1);
    fill(&start, l2, F32, false);
    actual = start;
    update(&actual, &c, 0, CAPACITY, false);
    for (uint64_t i = 0; i < CAPACITY; i++) {
      volatile float g = float_of(start.grad[i]), p = start.master[i], m = start.momentum[i], v = start.variance[i];
      volatile float a = g * scale, b = added * p;
      g = a + b;
      a = beta1 * m, b = c1 * g;
      m = a + b;
      a = beta2 * v, b = c2 * g, b = b * g;
      v = a + b;
      a = sqrtf(v), a = a * root_scale, a = a + eps;
      a = m / a, a = step_size * a, b = decay * p;
      a = a + b;
      p = p - a;
      CHECK(actual.momentum[i] == m && actual.variance[i] == v && actual.master[i] == p);
    }
  }
}

/* --- conversions: every half there is, and every place where rounding turns --- */

static void test_update_reads_every_half(void) {
  for (size_t isa = 0; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    for (uint32_t dtype = BF16; dtype <= F16; dtype++) {
      gemini_adamw_t c = config_of(F32, dtype);
      c.beta1 = 0, c.grad_scale = 1; /* momentum becomes the gradient */
      for (uint32_t base = 0; base < 65536; base += 4096) {
        memset(&actual, 0, sizeof actual);
        for (uint32_t i = 0; i < 4096; i++) ((uint16_t *)actual.grad)[i] = (uint16_t)(base + i);
        update(&actual, &c, 0, 4096, false);
        for (uint32_t i = 0; i < 4096; i++)
          CHECK(same_float(actual.momentum[i], float_of_half((uint16_t)(base + i), dtype)) ||
                (base + i == 0x8000 && actual.momentum[i] == 0)); /* -0 + 0 is 0 */
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

static void test_update_rounds_halves_to_nearest_even(void) {
  for (size_t isa = 0; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    for (uint32_t dtype = BF16; dtype <= F16; dtype++) {
      gemini_adamw_t c = config_of(dtype, dtype);
      c.lr = 0; /* master stays */
      for (uint32_t base = 0; base < 65536; base += 512) {
        memset(&actual, 0, sizeof actual);
        for (uint32_t i = 0; i < 4096; i++) {
          uint16_t half = (uint16_t)(base + i / 8), exponent = dtype == BF16 ? 0x7f80 : 0x7c00;
          float value = float_of_half(half, dtype), next = float_of_half((uint16_t)(half + 1), dtype);
          if ((half & exponent) == exponent) value = NAN;
          if (!isnan(value) && isinf(next)) next = copysignf(dtype == BF16 ? 0 : 65536, value);
          /* The value, what lies around the middle to the next one, and, for the largest, beyond it. */
          float middle = (value + next) / 2;
          if (!isnan(value) && next == 0) middle = float_of(bits_of(value) + 0x8000);
          const float around[] = { value,
                                   middle,
                                   nextafterf(middle, value),
                                   nextafterf(middle, 4 * middle),
                                   nextafterf(value, middle),
                                   -middle,
                                   value * 1.25f,
                                   value * 0.75f };
          actual.master[i] = around[i % 8];
          if (isinf(actual.master[i])) actual.master[i] = 0;
        }
        start = actual;
        update(&actual, &c, 0, 4096, false);
        for (uint32_t i = 0; i < 4096; i++) {
          uint16_t half = ((uint16_t *)actual.param)[i];
          if (isnan(start.master[i])) {
            CHECK_EQ(half, dtype == BF16 ? 0x7fc0 : 0x7e00);
          } else {
            CHECK(same_float(actual.master[i], start.master[i]));
            CHECK((double)float_of_half(half, dtype) == nearest(start.master[i], dtype));
            CHECK_EQ(half >> 15, bits_of(start.master[i]) >> 31);
          }
        }
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

/* --- the rest of the contract --- */

static void test_update_sums_squares_in_the_written_order(void) {
  static float grad[300 * 1024], zero[3][300 * 1024];
  const uint64_t tiles = 1024, counts[] = { 0,   1,    15,   16,   17,   255 * tiles, 256 * tiles, 257 * tiles,
                                            100, 1023, 1024, 1025, 2050, 280 * tiles, 290 * tiles, 300 * tiles - 5 };
  uint64_t random = 9;
  for (size_t i = 0; i < sizeof grad / sizeof *grad; i++)
    grad[i] = ldexpf(random_float(&random, 100, false), (int)(check_random(&random) % 24)); /* so that order tells */
  for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
    gemini_adamw_t adamw = config_of(F32, F32);
    double sum, want = 0, outer[256] = { 0 }, exact = 0;
    CHECK_EQ(gemini_adamw_host(&adamw, counts[c], NULL, grad, zero[0], zero[1], zero[2], &sum), GEMINI_OK);
    for (uint64_t tile = 0; tile * 1024 < counts[c]; tile++) {
      double inner[16] = { 0 }, of_tile = 0;
      for (uint64_t i = tile * 1024; i < counts[c] && i < (tile + 1) * 1024; i++) {
        inner[i % 16] += (double)grad[i] * grad[i];
        exact += (double)grad[i] * grad[i];
      }
      for (int i = 0; i < 16; i++) of_tile += inner[i];
      outer[tile % 256] += of_tile;
    }
    for (int i = 0; i < 256; i++) want += outer[i];
    CHECK(same_double(sum, want));
    /* All terms are positive: each of the additions of either order loses at most half a digit. */
    CHECK(fabs(sum - exact) <= 2 * (double)counts[c] * 0x1p-53 * exact);
  }
}

static void test_update_of_a_parameter_in_its_gradients_bytes_is_the_same(void) {
  for (size_t isa = 0; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    for (int d = 0; d < 6; d++) {
      /* BF16 from F16 and the other way round, too: only the size counts. */
      uint32_t to = d < 3 ? dtypes[d] : d == 3 ? BF16 : F16, from = d < 3 ? dtypes[d] : d == 3 ? F16 : BF16;
      gemini_adamw_t c = config_of(to, from);
      fill(&start, (uint64_t)d, from, true);
      expected = actual = start;
      update(&expected, &c, 5, 1500, false);
      update(&actual, &c, 5, 1500, true);
      CHECK(!memcmp(element_at(actual.grad, to, 0), element_at(start.grad, to, 0), to == F32 ? 20 : 10));
      memcpy(element_at(actual.param, to, 5), element_at(actual.grad, to, 5), 1500 * (to == F32 ? 4 : 2));
      check_same(&actual, &expected, to);
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

static void test_update_without_parameter_or_sum_is_the_same(void) {
  gemini_adamw_t c = config_of(BF16, BF16);
  fill(&start, 3, BF16, true);
  expected = actual = start;
  update(&expected, &c, 0, 777, false);
  c.param_dtype = 99; /* ignored */
  CHECK_EQ(gemini_adamw_host(&c, 777, NULL, actual.grad, actual.master, actual.momentum, actual.variance, NULL),
           GEMINI_OK);
  memcpy(actual.param, expected.param, sizeof actual.param);
  actual.sum = expected.sum;
  check_same(&actual, &expected, BF16);
}

static void test_update_in_spans_is_the_same(void) {
  gemini_adamw_t c = config_of(F16, BF16);
  fill(&start, 4, BF16, true);
  expected = actual = start;
  update(&expected, &c, 0, 4000, false);
  for (uint64_t first = 0, n = 1; first < 4000; first += n, n = n * 3 % 1000) {
    if (n > 4000 - first) n = 4000 - first;
    update(&actual, &c, first, n, false);
  }
  actual.sum = expected.sum;
  check_same(&actual, &expected, F16);
}

/* New values beside the old ones: the bits of the update in place, and the old ones stay. Aligned arrays are written
 * past the caches. */
static void test_update_beside_the_old_values_is_the_same(void) {
  static _Alignas(64) state_t to;
  for (uint64_t seed = 0; seed < 24; seed++) {
    const uint64_t shift = seed % 3 ? 0 : 1 + seed % 5, first = 512 * (seed % 2), count = 3 + seed * 173;
    const gemini_adamw_t c = config_of(dtypes[seed % 3], dtypes[seed / 3 % 3]);
    fill(&start, seed, c.grad_dtype, true);
    expected = actual = start;
    CHECK_EQ(gemini_update_force_isa("plain"), GEMINI_OK);
    update(&expected, &c, first, count, false);
    for (int i = 0; i < 3; i++) {
      if (gemini_update_force_isa(isas[i])) continue;
      memset(&to, 0x5a, sizeof to);
      const bool has_param = seed % 4 != 3;
      const gmi_arrays_t a = { NULL, element_at(actual.grad, c.grad_dtype, first), actual.master + first,
                               actual.momentum + first, actual.variance + first };
      float *const master = (float *)(((uintptr_t)to.master + 63) / 64 * 64) + shift;
      float *const momentum = (float *)(((uintptr_t)to.momentum + 63) / 64 * 64) + shift;
      float *const variance = (float *)(((uintptr_t)to.variance + 63) / 64 * 64) + shift;
      void *const param = element_at((void *)(((uintptr_t)to.param + 63) / 64 * 64), c.param_dtype, shift);
      const gmi_arrays_t out = { has_param ? param : NULL, NULL, master, momentum, variance };
      CHECK_EQ(gmi_adamw_beside("test", &c, 0, count, &a, &out), GEMINI_OK);
      CHECK(!memcmp(&actual, &start, sizeof start));
      for (uint64_t k = 0; k < count; k++) {
        CHECK(same_float(master[k], expected.master[first + k]) &&
              same_float(momentum[k], expected.momentum[first + k]) &&
              same_float(variance[k], expected.variance[first + k]));
        const void *is = element_at(param, c.param_dtype, k),
                   *want = element_at(expected.param, c.param_dtype, first + k);
        if (has_param && c.param_dtype != F32) CHECK(!memcmp(is, want, 2));
        if (has_param && c.param_dtype == F32) CHECK(same_float(*(const float *)is, *(const float *)want));
      }
      CHECK_EQ(bits_of(master[count]), 0x5a5a5a5a); /* and nothing behind */
      CHECK_EQ(bits_of(variance[count]), 0x5a5a5a5a);
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
  /* The same checks as in place, of the old and the new arrays. */
  const gemini_adamw_t c = config_of(F32, F32);
  const gmi_arrays_t a = { NULL, actual.grad, actual.master, actual.momentum, actual.variance };
  const gmi_arrays_t overlap = { NULL, NULL, to.master, to.master + 8, to.variance }, none = { 0 };
  CHECK_EQ(gmi_adamw_beside("test", &c, 0, 100, &a, &overlap), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_adamw_beside("test", &c, 0, 100, &a, &none), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_adamw_beside("test", &c, 0, 100, &none, &a), GEMINI_ERR_INVALID);
}

static const char *message(void) {
  static gemini_error_info_t info;
  info = (gemini_error_info_t)GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  return info.message;
}
static void refused(const gemini_adamw_t *c, const char *words) {
  actual = start;
  CHECK_EQ(gemini_adamw_host(c, 100, actual.param, actual.grad, actual.master, actual.momentum, actual.variance,
                             &actual.sum),
           GEMINI_ERR_INVALID);
  if (!strstr(message(), words)) fprintf(stderr, "'%s' does not say '%s'\n", message(), words);
  CHECK(strstr(message(), words));
  CHECK(!memcmp(&actual, &start, sizeof start));
}
static void refused_arrays(uint64_t count, void *param, const void *grad, float *master, float *momentum,
                           const char *words) {
  gemini_adamw_t c = config_of(BF16, BF16);
  CHECK_EQ(gemini_adamw_host(&c, count, param, grad, master, momentum, actual.variance, NULL), GEMINI_ERR_INVALID);
  if (!strstr(message(), words)) fprintf(stderr, "'%s' does not say '%s'\n", message(), words);
  CHECK(strstr(message(), words));
  CHECK(!memcmp(&actual, &start, sizeof start));
}
static void test_update_bad_values_are_refused_by_name(void) {
  const gemini_adamw_t good = config_of(BF16, BF16);
  gemini_adamw_t c;
  fill(&start, 1, BF16, false);
#define BAD(field, value, words) c = good, c.field = value, refused(&c, words)
  refused(NULL, "adamw is NULL");
  BAD(struct_size, 8, "struct_size is 8");
  BAD(struct_size, 5000, "struct_size is 5000");
  BAD(flags, 12, "flags has unknown bits: 0xc");
  BAD(param_dtype, GEMINI_DTYPE_F64, "param_dtype is 3");
  BAD(grad_dtype, 77, "grad_dtype is 77");
  BAD(step, 0, "step is 0");
  BAD(lr, -1, "lr is -1");
  BAD(lr, NAN, "lr is");
  BAD(lr, 1e39, "lr / (1 - beta1^step)");
  BAD(beta1, 1, "beta1 is 1");
  BAD(beta1, -0.5, "beta1 is -0.5");
  BAD(beta2, 1.5, "beta2 is 1.5");
  BAD(beta2, NAN, "beta2 is");
  BAD(eps, -1e-8, "eps is -1e-08");
  BAD(eps, INFINITY, "eps is not finite");
  BAD(weight_decay, -0.1, "weight_decay is -0.1");
  BAD(weight_decay, 1e300, "lr * weight_decay");
  BAD(grad_scale, NAN, "grad_scale is not finite");
  BAD(grad_scale, 1e39, "grad_scale is not finite");
#undef BAD
  /* A struct of a later version is taken as long as what is new in it is zero. */
  struct {
    gemini_adamw_t known;
    uint64_t later;
  } longer = { good, 0 };
  longer.known.struct_size = sizeof longer;
  actual = start;
  CHECK_EQ(
      gemini_adamw_host(&longer.known, 1, NULL, actual.grad, actual.master, actual.momentum, actual.variance, NULL),
      GEMINI_OK);
  longer.later = 1;
  refused(&longer.known,
          "adamw: byte 96 of 104 is not 0, but this library (" GEMINI_VERSION_STRING ") knows the first 96");

  actual = start;
  state_t *a = &actual;
  refused_arrays(1, a->param, NULL, a->master, a->momentum, "grad is NULL");
  refused_arrays(1, a->param, a->grad, NULL, a->momentum, "master is NULL");
  refused_arrays(1, a->param, a->grad, a->master, NULL, "momentum is NULL");
  refused_arrays(1, (char *)a->param + 1, a->grad, a->master, a->momentum, "param is 0x");
  refused_arrays(1, a->param, a->grad, (float *)((char *)a->master + 2), a->momentum, "master is 0x");
  refused_arrays(100, (char *)a->grad + 2, a->grad, a->master, a->momentum, "param at 0x");
  refused_arrays(100, a->param, a->grad, a->master, a->master + 99, "overlap over 100 elements");
  refused_arrays(100, a->master, a->grad, a->master, a->momentum, "overlap over 100 elements");
  c = config_of(F32, BF16);
  CHECK_EQ(gemini_adamw_host(&c, 2, a->grad, a->grad, a->master, a->momentum, a->variance, NULL), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "param at 0x") && strstr(message(), "overlap over 2 elements"));
  refused_arrays(UINT64_C(1) << 41, a->param, a->grad, a->master, a->momentum, "count is 2199023255552");
  CHECK_EQ(gemini_adamw_host(&good, 99, a->param, a->grad, a->master, a->master + 99, a->variance, NULL), GEMINI_OK);

  CHECK_EQ(gemini_update_force_isa("sse"), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "name is 'sse'"));
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  CHECK(strcmp(info.operation, "gemini_update_force_isa") == 0 && info.status == GEMINI_ERR_INVALID);
  info.struct_size = 4;
  CHECK_EQ(gemini_last_error(&info), GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_last_error(NULL), GEMINI_ERR_INVALID);
}

/* --- on the GPU, as far as a machine without one can tell: which functions are called with what --- */

static gemini_status_t update_cuda(state_t *s, const gemini_adamw_t *c, uint64_t count, double *sums, void *stream) {
  return gemini_adamw_cuda(c, count, s->param, s->grad, s->master, s->momentum, s->variance, stream, sums);
}

static void test_update_cuda_gives_the_kernels_what_the_host_computes_with(void) {
  const uint64_t counts[] = { 1, 1024, 1025, 4999 };
  fake_start();
  for (uint32_t i = 0; i < 36; i++) {
    gemini_adamw_t c = config_of(dtypes[i % 3], dtypes[i / 3 % 3]);
    uint64_t count = counts[i / 9];
    double sums[6] = { 7, 7, 7, 7, 7, 7 };
    CHECK_EQ(gemini_update_sums(count), 1 + (count + 1023) / 1024);
    fill(&start, i, c.grad_dtype, true);
    expected = actual = start;
    update(&expected, &c, 0, count, false);
    fake.call_count = 0;
    CHECK_EQ(update_cuda(&actual, &c, count, sums, NULL), GEMINI_OK);
    actual.sum = sums[0];
    check_same(&actual, &expected, c.param_dtype);
    CHECK(count == 4999 || sums[5] == 7);
  }
  CHECK_EQ(gemini_update_sums(0), 1);
  CHECK_EQ(gemini_update_sums(1024), 2);
  gmi_update_cuda_replace(NULL);
}

static void test_update_cuda_works_in_the_streams_context_and_loads_once(void) {
  gemini_adamw_t c = config_of(BF16, BF16);
  double sums[2];
  fill(&actual, 1, BF16, false);
  fake_start();
  /* No context, no stream: GPU 0's primary one, for this call only. */
  CHECK_EQ(update_cuda(&actual, &c, 9, NULL, NULL), GEMINI_OK);
  CALLED("cuInit", "cuCtxGetCurrent", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuModuleLoadData",
         "cuModuleGetFunction", "cuModuleGetFunction", "cuModuleGetFunction", "cuModuleGetFunction",
         "cuModuleGetFunction", "gmi_adamw", "cuCtxSetCurrent");
  CHECK(!fake.current);
  CHECK_EQ(update_cuda(&actual, &c, 9, sums, NULL), GEMINI_OK);
  CALLED("cuCtxGetCurrent", "cuCtxSetCurrent", "gmi_adamw", "gmi_update_sum", "cuCtxSetCurrent");
  /* The thread's own context, for it and for the stream names that stand for it. */
  fake.current = context_at(1);
  CHECK_EQ(update_cuda(&actual, &c, 0, NULL, NULL), GEMINI_OK);
  CALLED("cuCtxGetCurrent", "cuModuleLoadData", "cuModuleGetFunction", "cuModuleGetFunction", "cuModuleGetFunction",
         "cuModuleGetFunction", "cuModuleGetFunction");
  for (uintptr_t stream = 0; stream < 3; stream++) {
    CHECK_EQ(update_cuda(&actual, &c, 9, NULL, (void *)stream), GEMINI_OK);
    CHECK(fake.launched_on[1] == (cu_stream_t)stream);
    CALLED("cuCtxGetCurrent", "gmi_adamw");
  }
  /* A stream of another context: that one, and the thread's own afterwards. */
  CHECK_EQ(update_cuda(&actual, &c, 9, NULL, contexts[2]), GEMINI_OK);
  CHECK(fake.launched_on[9] == (cu_stream_t)(void *)contexts[2]);
  CALLED("cuCtxGetCurrent", "cuStreamGetCtx", "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction",
         "cuModuleGetFunction", "cuModuleGetFunction", "cuModuleGetFunction", "cuModuleGetFunction", "gmi_adamw",
         "cuCtxSetCurrent");
  CHECK(fake.current == context_at(1));
  CHECK_EQ(update_cuda(&actual, &c, 0, sums, contexts[2]), GEMINI_OK);
  CALLED("cuCtxGetCurrent", "cuStreamGetCtx", "cuCtxSetCurrent", "gmi_update_sum", "cuCtxSetCurrent");
  CHECK_EQ(fake.loads, 3);
  CHECK(sums[0] == 0);
  gmi_update_cuda_replace(NULL);
}

static void test_update_cuda_failures_are_told_and_leave_nothing(void) {
  static const char *const functions[] = {
    "cuInit",          "cuCtxGetCurrent",  "cuDeviceGet",        "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction"
  };
  gemini_adamw_t c = config_of(BF16, BF16);
  fill(&actual, 1, BF16, false);
  fill(&start, 1, BF16, false);
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    fake_start();
    fake.failing = functions[i];
    CHECK_EQ(update_cuda(&actual, &c, 9, NULL, NULL), GEMINI_ERR_DEVICE);
    CHECK(strstr(message(), functions[i]) && strstr(message(), "CUDA_ERROR_UNKNOWN"));
    CHECK_EQ(fake.unloads, i == 6);
    fake.failing = NULL;
    CHECK(!fake.current);
    CHECK(!memcmp(&actual, &start, sizeof start));
    CHECK_EQ(update_cuda(&actual, &c, 0, NULL, NULL), GEMINI_OK); /* the next call finds it all in order */
    CHECK(!fake.current);
  }
  fake_start();
  fake.failing = "cuStreamGetCtx";
  CHECK_EQ(update_cuda(&actual, &c, 9, NULL, contexts[1]), GEMINI_ERR_DEVICE);
  CHECK(strstr(message(), "cuStreamGetCtx"));
  fake.failing = "gmi_adamw";
  CHECK_EQ(update_cuda(&actual, &c, 9, NULL, NULL), GEMINI_ERR_DEVICE);
  CHECK(strstr(message(), "cuLaunchKernel") && !fake.current);
  fake_start();
  fake.lacking = "cuStreamGetCtx";
  CHECK_EQ(update_cuda(&actual, &c, 9, NULL, NULL), GEMINI_ERR_UNSUPPORTED);
  CHECK(strstr(message(), "has no cuStreamGetCtx"));
  fake_start();
  c.step = 0;
  CHECK_EQ(update_cuda(&actual, &c, 9, NULL, NULL), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "step is 0"));
  c.step = 1;
  CHECK_EQ(update_cuda(&actual, &c, 9, (double *)4, NULL), GEMINI_ERR_INVALID);
  CHECK(strstr(message(), "sums is 0x4"));
  CHECK_EQ(fake.call_count, 0);
  gmi_update_cuda_replace(NULL);
}

/* Nothing that rounds otherwise than the host: no fused operation, no approximation, no flushing to zero. */
static void test_update_ptx_rounds_as_the_host(void) {
  static const char *const never[] = { "fma", ".approx", ".ftz", "mad.f", "mul.f", "add.f", "sub.f" };
  for (size_t i = 0; i < sizeof never / sizeof *never; i++) CHECK(!strstr(gmi_update_ptx, never[i]));
  CHECK(strstr(gmi_update_ptx, "div.rn.f32") && strstr(gmi_update_ptx, "sqrt.rn.f32") &&
        strstr(gmi_update_ptx, "mul.rn.f64"));
}

int main(void) {
  RUN(test_update_every_isa_equals_plain);
  RUN(test_update_is_near_double_precision);
  RUN(test_update_does_the_written_operations);
  RUN(test_update_reads_every_half);
  RUN(test_update_rounds_halves_to_nearest_even);
  RUN(test_update_sums_squares_in_the_written_order);
  RUN(test_update_of_a_parameter_in_its_gradients_bytes_is_the_same);
  RUN(test_update_without_parameter_or_sum_is_the_same);
  RUN(test_update_in_spans_is_the_same);
  RUN(test_update_beside_the_old_values_is_the_same);
  RUN(test_update_bad_values_are_refused_by_name);
  RUN(test_update_cuda_gives_the_kernels_what_the_host_computes_with);
  RUN(test_update_cuda_works_in_the_streams_context_and_loads_once);
  RUN(test_update_cuda_failures_are_told_and_leave_nothing);
  RUN(test_update_ptx_rounds_as_the_host);
  return check_done();
}
