/* The fused updates: every instruction set against plain C to the bit, and plain C against double precision.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdbool.h>

#include "check.h"
#include "update/update.h"

enum { F32 = GEMINI_DTYPE_F32, BF16 = GEMINI_DTYPE_BF16, F16 = GEMINI_DTYPE_F16 };
enum { CAPACITY = 5000 };
static const uint32_t dtypes[] = { F32, BF16, F16 };
static const char *const names[] = { "plain", "avx2", "avx512" };

typedef struct state {
  uint32_t param[CAPACITY], grad[CAPACITY]; /* of any dtype */
  float master[CAPACITY], momentum[CAPACITY], variance[CAPACITY];
  double sum;
} state_t;
static state_t start, expected, actual;

static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
static float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }
static bool same_double(double a, double b) { return memcmp(&a, &b, sizeof a) == 0 || (a != a && b != b); }
static void *element(void *base, uint32_t dtype, uint64_t i) { return (char *)base + i * (dtype == F32 ? 4 : 2); }

/* Of the size that training has; one of 8 is any float at all: subnormal, infinite, NaN. */
static float random_float(uint64_t *random, float scale, bool any) {
  uint64_t r = check_random(random);
  if (any && r % 8 == 0) return float_of((uint32_t)(r >> 32));
  return scale * ((float)(int32_t)(r >> 32) / 2147483648.0f);
}
static void fill(state_t *s, uint64_t seed, uint32_t grad_dtype, bool any) {
  uint64_t random = seed * 2 + 1;
  for (uint64_t i = 0; i < CAPACITY; i++) {
    uint32_t bits = bits_of(random_float(&random, 0.5f, any));
    uint16_t half = (uint16_t)(bits >> 16); /* every half has as many bits set as a random float */
    if (grad_dtype == F16 && !any) half = (uint16_t)(0x2000 + check_random(&random) % 0x1800);
    memcpy(element(s->grad, grad_dtype, i), grad_dtype == F32 ? (void *)&bits : &half, grad_dtype == F32 ? 4 : 2);
    s->master[i] = random_float(&random, 2.0f, any);
    s->momentum[i] = random_float(&random, 0.1f, any);
    s->variance[i] = fabsf(random_float(&random, 0.01f, any));
  }
  memset(s->param, 0x5a, sizeof s->param);
  s->sum = -1;
}
static void update(state_t *s, const gemini_adamw_t *adamw, uint64_t first, uint64_t count, bool alias) {
  void *grad = element(s->grad, adamw->grad_dtype, first);
  void *param = alias ? grad : element(s->param, adamw->param_dtype, first);
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
    CHECK(same(a->master[i], b->master[i]));
    CHECK(same(a->momentum[i], b->momentum[i]));
    CHECK(same(a->variance[i], b->variance[i]));
    if (param_dtype == F32) CHECK(same(float_of(a->param[i]), float_of(b->param[i])));
  }
  if (param_dtype != F32) CHECK(memcmp(a->param, b->param, sizeof a->param) == 0);
  CHECK(same_double(a->sum, b->sum));
}

static void test_update_every_isa_equals_plain(void) {
  uint32_t tried = 0;
  for (size_t isa = 1; isa < 3; isa++) {
    if (gemini_update_force_isa(names[isa]) != GEMINI_OK) continue;
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
        CHECK_EQ(gemini_update_force_isa(names[isa]), GEMINI_OK);
        CHECK(strcmp(gemini_update_isa(), names[isa]) == 0);
        update(&actual, &a, first, n, false);
        check_same(&actual, &expected, a.param_dtype);
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
  CHECK((tried == 0) == (strcmp(gemini_update_isa(), "plain") == 0));
}

int main(void) {
  RUN(test_update_every_isa_equals_plain);
  return check_done();
}
