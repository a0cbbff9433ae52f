/* What the source of the GPU's kernels of AdamW computes, against plain C, to the bit: the source is compiled for the host.
 * What a GPU makes of it is for test_update_gpu. SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "kernels_on_host.h"
#include "update/update.h"
#include "update_values.h"

enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ARRAYS };
enum { CAPACITY = 5 * 1024 };
typedef struct state {
  _Alignas(16) uint32_t arrays[ARRAYS][CAPACITY];
  double sum;
} state_t;
static state_t expected, actual;

static void *element(state_t *s, int array, uint32_t dtype, uint64_t i) {
  return element_at(s->arrays[array], dtype, i);
}
/* Gradients up to most, of so many decades, or 0; one in `odd` is any bits at all: subnormal, infinite, NaN. */
static void fill(state_t *s, uint32_t grad_dtype, uint64_t seed, double most, double decades, uint64_t odd) {
  uint64_t random = seed * 2 + 1;
  for (uint64_t i = 0; i < CAPACITY; i++) {
    const uint64_t r = check_random(&random);
    const float value = r % 9 ? (r & 64 ? 1 : -1) * (float)(most * pow(10, -decades * (double)(r >> 11) * 0x1p-53)) : 0;
    const uint32_t bits = odd && r / 128 % odd == 0 ? (uint32_t)(r >> 32) : bits_of(value);
    if (grad_dtype == F32) s->arrays[GRAD][i] = bits;
    else memcpy(element(s, GRAD, BF16, i), (const char *)&bits + 2, 2);
  }
}
static void check_same(const gemini_adamw_t *c) {
  for (int array = 0; array < ARRAYS; array++) {
    if (!memcmp(actual.arrays[array], expected.arrays[array], sizeof actual.arrays[array])) continue;
    CHECK(array != PARAM || c->param_dtype == F32); /* NaNs may differ in fp32 */
    CHECK(array != MASTER || !(c->flags & GEMINI_ADAMW_SPLIT));
    CHECK(array != MOMENTUM || c->momentum_dtype == F32);
    CHECK(array != VARIANCE || c->variance_dtype == F32);
    for (uint64_t i = 0; i < CAPACITY; i++)
      CHECK(same_float(float_of(actual.arrays[array][i]), float_of(expected.arrays[array][i])));
  }
  CHECK(same_double(actual.sum, expected.sum));
}
/* A step of both, of count elements from first on. */
static void step(const gemini_adamw_t *c, uint64_t first, uint64_t count) {
  const uint32_t master_dtype = c->flags & GEMINI_ADAMW_SPLIT ? BF16 : F32; /* of half a master's width */
  gmi_arrays_t at[2];
  for (int i = 0; i < 2; i++) {
    state_t *s = i ? &actual : &expected;
    at[i] = (gmi_arrays_t){ element(s, PARAM, c->param_dtype, first), element(s, GRAD, c->grad_dtype, first),
                            element(s, MASTER, master_dtype, first), element(s, MOMENTUM, c->momentum_dtype, first),
                            element(s, VARIANCE, c->variance_dtype, first) };
  }
  CHECK_EQ(
      gemini_adamw_host(c, count, at[0].param, at[0].grad, at[0].master, at[0].momentum, at[0].variance, &expected.sum),
      GEMINI_OK);
  double *sums = malloc(gemini_update_sums(count) * sizeof *sums);
  gmi_adamw_t k;
  CHECK_EQ(gmi_adamw_prepare("test", c, 0, count, &at[1], &k), GEMINI_OK);
  kernel_on_host(gmi_has_blocks(&k)  ? "gmi_blocks"
                 : gmi_is_narrow(&k) ? "gmi_narrow"
                                     : "gmi_adamw",
                 &k, &at[1], count, sums);
  actual.sum = sums[0];
  free(sums);
}
static void start_with(const gemini_adamw_t *c, uint64_t seed) {
  uint64_t random = seed * 2 + 1;
  memset(&expected, 0, sizeof expected);
  for (uint64_t i = 0; i < CAPACITY; i++) { /* parameters of about 1 */
    expected.arrays[MASTER][i] = (uint32_t)(check_random(&random) >> 32 & 0x807fffff) | 0x3f000000;
    if (c->flags & GEMINI_ADAMW_SPLIT)
      expected.arrays[PARAM][i] = (uint32_t)(check_random(&random) >> 32 & 0x807f807f) | 0x3f003f00;
  }
  actual = expected;
}

static void test_kernels_of_ordinary_and_narrow_states_equal_plain(void) {
  static const uint64_t counts[] = { 1, 3, 1024, 2500 };
  for (uint32_t i = 0; i < 8 * 8; i++) {
    gemini_adamw_t c = GEMINI_ADAMW_INIT;
    c.flags = i & 4 ? GEMINI_ADAMW_SPLIT : 0;
    c.param_dtype = i & 4 || i & 8 ? BF16 : F32;
    c.grad_dtype = i & 16 ? BF16 : F32;
    c.momentum_dtype = i & 1 ? BF16 : F32;
    c.variance_dtype = i & 2 ? BF16 : F32;
    c.seed = i;
    start_with(&c, i);
    for (c.step = 1; c.step <= 3; c.step++) {
      fill(&expected, c.grad_dtype, 4 * i + c.step, 1, 10, 9);
      memcpy(actual.arrays[GRAD], expected.arrays[GRAD], sizeof actual.arrays[GRAD]);
      step(&c, i & 32 ? 4 : c.step, counts[(i + c.step) % 4]);
      check_same(&c);
    }
  }
}

/* Most variances are below the lowest code of their block, and in some rounds a block has a NaN or an infinity. */
static void test_kernels_of_blocks_equal_plain(void) {
  static const uint32_t states[] = { BLOCK8, F32, BF16 };
  for (uint32_t i = 0; i < 40; i++) {
    gemini_adamw_t c = GEMINI_ADAMW_INIT;
    c.flags = i & 1 ? GEMINI_ADAMW_SPLIT : 0;
    c.param_dtype = BF16;
    c.grad_dtype = i & 2 ? BF16 : F32;
    c.momentum_dtype = states[i % 4 ? 0 : i / 4 % 3], c.variance_dtype = states[i % 4 != 1 ? 0 : i / 4 % 3];
    c.beta2 = i % 5 ? 0.999 : 0;
    c.seed = i;
    start_with(&c, i);
    uint32_t lowest = 0, zero = 0;
    for (c.step = 1; c.step <= 3; c.step++) {
      const bool wide = i % 7 == 3; /* beside the largest some are 0 */
      const uint64_t blocks = i % 3 ? 2 : 5;
      fill(&expected, c.grad_dtype, 4 * i + c.step, wide ? 1e18 : 1, wide ? 40 : 10, i % 6 == 5 ? 2000 : 0);
      memcpy(actual.arrays[GRAD], expected.arrays[GRAD], sizeof actual.arrays[GRAD]);
      step(&c, 256, 256 * blocks);
      check_same(&c);
      for (uint64_t e = 0; e < 256 * blocks; e++) {
        const uint8_t code = ((uint8_t *)expected.arrays[VARIANCE])[256 + e];
        if (e % 256 >= 16) lowest += code == 2, zero += code == 0;
      }
    }
    CHECK(c.variance_dtype != BLOCK8 || (lowest > 100 && zero > 0));
  }
}

/* States of any bits: scales below 0 among them, infinite ones and NaN. */
static void test_kernels_of_states_of_any_bits_equal_plain(void) {
  static const uint32_t states[] = { BLOCK8, F32, BF16 };
  uint64_t random = 5;
  uint32_t below = 0;
  for (uint32_t i = 0; i < 9 * 8; i++) {
    gemini_adamw_t c = GEMINI_ADAMW_INIT;
    c.flags = i / 9 & 1 ? GEMINI_ADAMW_SPLIT : 0;
    c.param_dtype = BF16;
    c.grad_dtype = i / 9 & 2 ? BF16 : F32;
    c.momentum_dtype = states[i % 3], c.variance_dtype = states[i / 3 % 3];
    c.seed = i;
    start_with(&c, i);
    for (int array = MOMENTUM; array <= VARIANCE; array++)
      for (uint64_t e = 0; e < CAPACITY; e++) {
        const uint32_t bits = bits_of(random_float(&random, 0.5f, true));
        expected.arrays[array][e] = array == VARIANCE && i / 36 ? bits & 0x7f7f7f7f : bits;
      }
    actual = expected;
    for (uint32_t block = 1; block < 3; block++) below += ((uint8_t *)expected.arrays[VARIANCE])[256 * block + 15] & 1;
    fill(&expected, c.grad_dtype, i, 1, 10, 2000);
    memcpy(actual.arrays[GRAD], expected.arrays[GRAD], sizeof actual.arrays[GRAD]);
    step(&c, 256, 256 * 2);
    check_same(&c);
  }
  CHECK(below > 10);
}

int main(void) {
  CHECK_EQ(gemini_update_force_isa("plain"), GEMINI_OK);
  RUN(test_kernels_of_ordinary_and_narrow_states_equal_plain);
  RUN(test_kernels_of_blocks_equal_plain);
  RUN(test_kernels_of_states_of_any_bits_equal_plain);
  return check_done();
}
