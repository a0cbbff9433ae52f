/* AdamW with narrow states: momentum and variance in bf16 and in blocks of 8-bit codes, and split masters. Every instruction set against plain C to
 * the bit, and plain C against what the header and docs/update.md say. SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "update/beside.h"
#include "update/update.h"
#include "update_driver.h"
#include "update_values.h"

enum { SPLIT = GEMINI_ADAMW_SPLIT };
enum { CAPACITY = 3000 };

typedef struct state {
  uint32_t param[CAPACITY], grad[CAPACITY], master[CAPACITY], momentum[CAPACITY], variance[CAPACITY];
  double sum;
} state_t;
static state_t start, expected, actual;

/* Half a master is 16 bits, as BF16 is. */
static uint32_t master_dtype(const gemini_adamw_t *c) { return c->flags & SPLIT ? BF16 : F32; }
static uint16_t half(const void *base, uint64_t i) {
  uint16_t bits;
  memcpy(&bits, (const char *)base + 2 * i, sizeof bits);
  return bits;
}
static void set_half(void *base, uint64_t i, uint32_t bits) {
  const uint16_t low = (uint16_t)bits;
  memcpy((char *)base + 2 * i, &low, sizeof low);
}
static uint32_t state_bits(const uint32_t *base, uint32_t dtype, uint64_t i) {
  return dtype == F32 ? base[i] : (uint32_t)half(base, i) << 16;
}

/* All ways that states can be narrow in: bit 0 the momentum, 1 the variance, 2 the master; 0 is the ordinary update. */
enum { WAYS = 8 };
static gemini_adamw_t config_of(uint32_t way, uint32_t param_dtype, uint32_t grad_dtype) {
  gemini_adamw_t a = GEMINI_ADAMW_INIT;
  a.flags = way & 4 ? SPLIT : 0;
  a.param_dtype = way & 4 ? BF16 : param_dtype;
  a.grad_dtype = grad_dtype;
  a.momentum_dtype = way & 1 ? BF16 : F32;
  a.variance_dtype = way & 2 ? BF16 : F32;
  a.step = 7;
  a.lr = 3e-3;
  a.weight_decay = 0.1;
  a.grad_scale = 0.73;
  a.seed = 11;
  return a;
}

/* Bits that are neither NaN nor infinite as fp32 or halves, unless `any`. Variances are not negative. */
static void fill(state_t *s, uint64_t seed, bool any) {
  uint64_t random = seed * 2 + 1;
  uint32_t *const arrays[] = { s->param, s->grad, s->master, s->momentum, s->variance };
  for (int array = 0; array < 5; array++) {
    for (uint64_t i = 0; i < CAPACITY; i++) {
      const uint64_t r = check_random(&random);
      uint32_t bits = (uint32_t)(r >> 32);
      if (!any || r % 8) bits = (bits & 0x80ff80ff) | 0x3c003c00 | (bits & 0x01000100);
      arrays[array][i] = array == 4 ? bits & 0x7fff7fff : bits;
    }
  }
  s->sum = -1;
}
static void update(state_t *s, const gemini_adamw_t *c, uint64_t first, uint64_t count) {
  CHECK_EQ(gemini_adamw_host(c, count, element_at(s->param, c->param_dtype, first),
                             element_at(s->grad, c->grad_dtype, first), element_at(s->master, master_dtype(c), first),
                             element_at(s->momentum, c->momentum_dtype, first),
                             element_at(s->variance, c->variance_dtype, first), &s->sum),
           GEMINI_OK);
}
/* NaNs in fp32 may differ; narrow ones are 0x7fc0. */
static void check_array(const uint32_t *a, const uint32_t *b, bool is_f32) {
  for (uint64_t i = 0; i < CAPACITY; i++) CHECK(a[i] == b[i] || (is_f32 && same_float(float_of(a[i]), float_of(b[i]))));
}
static void check_same(const state_t *a, const state_t *b, const gemini_adamw_t *c) {
  check_array(a->param, b->param, c->param_dtype == F32);
  check_array(a->master, b->master, !(c->flags & SPLIT));
  check_array(a->momentum, b->momentum, c->momentum_dtype == F32);
  check_array(a->variance, b->variance, c->variance_dtype == F32);
  CHECK(same_double(a->sum, b->sum));
}

static void test_narrow_every_isa_equals_plain(void) {
  uint32_t tried = 0;
  for (size_t isa = 1; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    tried++;
    for (uint32_t i = 0; i < WAYS * 9; i++) {
      gemini_adamw_t c = config_of(i % WAYS, dtypes[i / WAYS % 3], dtypes[i / WAYS / 3]);
      for (uint64_t n = 0; n < 40; n++) {
        const uint64_t first = n * 7 % 17, count = n == 38 ? 2047 : n == 39 ? 2900 : n;
        c.first_element = n % 2 ? n : UINT64_C(0x4fffffffa); /* also where the number's lower half begins anew */
        fill(&start, n + 200 * i, true);
        expected = actual = start;
        CHECK_EQ(gemini_update_force_isa("plain"), GEMINI_OK);
        update(&expected, &c, first, count);
        CHECK_EQ(gemini_update_force_isa(isas[isa]), GEMINI_OK);
        update(&actual, &c, first, count);
        check_same(&actual, &expected, &c);
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
  CHECK((tried == 0) == (strcmp(gemini_update_isa(), "plain") == 0));
}

/* --- split masters --- */

static uint32_t master_of(uint16_t upper, uint16_t lower) { /* the obvious way: a number with a sign is added */
  return (uint32_t)(((int64_t)upper << 16) + (int16_t)lower);
}
static void split(state_t *s, const uint32_t *masters) {
  for (uint64_t i = 0; i < CAPACITY; i++) {
    uint32_t upper = masters[i] >> 16, lower = masters[i] & 0xffff;
    if (lower >= 0x8000) upper++;
    set_half(s->param, i, upper);
    set_half(s->master, i, lower);
  }
}

/* 200 steps of both: all bits of the fp32 masters are in the halves, and parameters differ at ties alone. */
static void test_split_masters_are_the_fp32_masters(void) {
  const gemini_adamw_t whole = config_of(0, BF16, BF16), halves = config_of(4, BF16, BF16);
  fill(&start, 3, false);
  expected = actual = start;
  split(&actual, expected.master);
  uint64_t ties = 0;
  for (uint64_t step = 1; step <= 200; step++) {
    gemini_adamw_t c = whole, d = halves;
    c.step = d.step = step;
    fill(&start, 1000 + step, false);
    memcpy(expected.grad, start.grad, sizeof start.grad);
    memcpy(actual.grad, start.grad, sizeof start.grad);
    update(&expected, &c, 0, CAPACITY);
    update(&actual, &d, 0, CAPACITY);
    CHECK(!memcmp(actual.momentum, expected.momentum, sizeof actual.momentum));
    CHECK(!memcmp(actual.variance, expected.variance, sizeof actual.variance));
    CHECK(actual.sum == expected.sum);
    for (uint64_t i = 0; i < CAPACITY; i++) {
      const uint16_t upper = half(actual.param, i), lower = half(actual.master, i);
      CHECK_EQ(master_of(upper, lower), expected.master[i]);
      const bool tie = lower == 0x8000;
      ties += tie;
      CHECK(upper == half(expected.param, i) || (tie && upper == half(expected.param, i) + 1));
    }
  }
  CHECK(ties > 0); /* of 600,000: about 9 */
}

/* Every lower half, at uppers of all kinds: what a step without movement stores is what it has read. */
static void test_split_masters_keep_every_value(void) {
  static const uint32_t uppers[] = { 0x0000, 0x8000, 0x0001, 0x007f, 0x0080, 0x3f80, 0xbf81, 0x4100, 0x7f7f, 0xff7f };
  gemini_adamw_t c = config_of(4, BF16, BF16);
  c.lr = 0, c.weight_decay = 0, c.eps = 1;
  for (size_t isa = 0; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    for (size_t u = 0; u < sizeof uppers / sizeof *uppers; u++) {
      for (uint32_t base = 0; base < 65536; base += 2048) {
        memset(&actual, 0, sizeof actual);
        for (uint64_t i = 0; i < CAPACITY; i++) expected.master[i] = uppers[u] << 16 | ((base + i) & 0xffff);
        split(&actual, expected.master);
        start = actual;
        update(&actual, &c, 0, CAPACITY);
        CHECK(!memcmp(&actual.param, &start.param, sizeof start.param));
        CHECK(!memcmp(&actual.master, &start.master, sizeof start.master));
      }
    }
    /* What is infinite becomes NaN, as in the ordinary update, with a remainder of 0. */
    memset(&actual, 0, sizeof actual);
    for (uint64_t i = 0; i < CAPACITY; i++) set_half(actual.param, i, i % 2 ? 0x7f80 : 0xffff);
    update(&actual, &c, 0, CAPACITY);
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK(half(actual.param, i) == 0x7fc0 && !half(actual.master, i));
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

/* --- states in bf16 --- */

static uint64_t mixed(uint64_t x) { /* splitmix64 */
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
  return x ^ x >> 31;
}
static uint32_t random_of(uint64_t seed, uint64_t step, uint64_t number) { /* as docs/update.md has it */
  const uint64_t key = mixed(mixed(seed) ^ step);
  uint32_t x = (uint32_t)number ^ (uint32_t)key;
  x ^= x >> 16, x *= 0x7feb352d;
  x += (uint32_t)(key >> 32);
  x ^= x >> 15, x *= 0x846ca68b;
  return x ^ x >> 16;
}

static void test_states_in_bf16_are_rounded_as_written(void) {
  for (uint32_t way = 1; way < WAYS; way++) {
    gemini_adamw_t c = config_of(way, F32, F32), wide = c;
    c.first_element = 123456789, c.seed = way;
    wide.momentum_dtype = wide.variance_dtype = F32;
    fill(&start, way, false);
    expected = actual = start;
    for (uint64_t i = 0; i < CAPACITY; i++) { /* the same old values */
      expected.momentum[i] = state_bits(actual.momentum, c.momentum_dtype, i);
      expected.variance[i] = state_bits(actual.variance, c.variance_dtype, i);
    }
    update(&expected, &wide, 0, CAPACITY);
    update(&actual, &c, 0, CAPACITY);
    CHECK(!memcmp(actual.master, expected.master, sizeof actual.master)); /* the step has the values before rounding */
    CHECK(!memcmp(actual.param, expected.param, sizeof actual.param));
    for (uint64_t i = 0; i < CAPACITY; i++) {
      const uint32_t random = random_of(c.seed, c.step, c.first_element + i);
      uint32_t m = expected.momentum[i], v = expected.variance[i];
      if (way & 1) m = (m + (random & 0xffff)) & 0xffff0000;
      if (way & 2) v = (v + (random >> 16)) & 0xffff0000;
      CHECK_EQ(state_bits(actual.momentum, c.momentum_dtype, i), m);
      CHECK_EQ(state_bits(actual.variance, c.variance_dtype, i), v);
    }
  }
}

/* A variance that moves by a thousandth in each step stands still if it is rounded to nearest; and errors of one
 * element over many steps, or of many elements in a step, are those of independent coins. */
static void test_states_in_bf16_are_right_on_average(void) {
  gemini_adamw_t c = config_of(3, F32, F32);
  c.beta1 = 0.9, c.beta2 = 0.999, c.grad_scale = 1, c.lr = 0;
  memset(&actual, 0, sizeof actual);
  for (uint64_t i = 0; i < CAPACITY; i++) {
    actual.grad[i] = bits_of(0.3f);
    set_half(actual.momentum, i, bits_of(0.1f) >> 16);
    set_half(actual.variance, i, bits_of(1.0f) >> 16);
  }
  double m = (double)float_of((uint32_t)half(actual.momentum, 0) << 16), v = 1;
  for (uint64_t step = 1; step <= 700; step++) {
    c.step = step;
    update(&actual, &c, 0, CAPACITY);
    m = 0.9 * m + 0.1 * (double)0.3f, v = 0.999 * v + 0.001 * (double)0.3f * (double)0.3f;
    if (step != 20 && step != 700) continue;
    double m_sum = 0, v_sum = 0;
    for (uint64_t i = 0; i < CAPACITY; i++) {
      m_sum += (double)float_of((uint32_t)half(actual.momentum, i) << 16);
      v_sum += (double)float_of((uint32_t)half(actual.variance, i) << 16);
    }
    /* One rounding errs by at most 2^-8 of the value, with a deviation of half that; the momentum remembers 5 of them,
     * the variance all. The mean of 3000 elements deviates by a 55th of one's; four of these are allowed. */
    const double one = 0x1p-9 * sqrt((double)step) / sqrt(CAPACITY);
    CHECK(fabs(m_sum / CAPACITY - m) < 4 * m * 0x1p-9 * sqrt(6.0) / sqrt(CAPACITY));
    CHECK(fabs(v_sum / CAPACITY - v) < 4 * one);
  }
  CHECK(v < 0.6); /* to nearest, no element would have left 1 */
}

static void test_narrow_random_bits_are_of_the_element_the_step_and_the_seed(void) {
  gemini_adamw_t c = config_of(7, BF16, BF16), d;
  fill(&start, 5, false);
  expected = start;
  update(&expected, &c, 0, CAPACITY);
  actual = start; /* in pieces, backwards */
  for (uint64_t end = CAPACITY, n = 1; end; end -= n, n = n * 3 % 700 + 1) {
    if (n > end) n = end;
    c.first_element = end - n;
    update(&actual, &c, end - n, n);
  }
  actual.sum = expected.sum;
  check_same(&actual, &expected, &c);
  for (int i = 0; i < 3; i++) {
    d = config_of(3, F32, BF16);
    expected = actual = start;
    d.lr = 0;
    update(&expected, &d, 0, CAPACITY);
    if (i == 0) d.seed++;
    if (i == 1) d.first_element++;
    if (i == 2) d.step++;
    update(&actual, &d, 0, CAPACITY);
    uint64_t differs = 0;
    for (uint64_t k = 0; k < CAPACITY; k++) differs += half(actual.momentum, k) != half(expected.momentum, k);
    CHECK(differs > CAPACITY / 10 && differs < CAPACITY); /* a third, where all roundings are independent */
  }
}

/* --- states in blocks --- */

/* What Dettmers' create_dynamic_map() has, in double, with other numbers for the codes, and no 1 among variances. */
static double code_of(uint32_t code, bool is_signed, bool coarse) {
  const int top = is_signed ? 6 : 7;
  uint32_t magnitude = is_signed ? code & 0x7f : code;
  if (coarse) magnitude &= 0xfe;
  if (!magnitude && !(is_signed && !coarse && code == 0x80)) return 0;
  if (!coarse && is_signed && code == 0x80) return 1;
  if (!is_signed && code == 1) return 0;
  int e = 0;
  while (magnitude >> (e + 1)) e++;
  const double n = ldexp(1, e), begin = (magnitude - n) / n, step = (coarse ? 2 : 1) / n;
  const double value = pow(10, e - top) * (0.1 + 0.9 * (begin + step / 2));
  return is_signed && code & 0x80 ? -value : value;
}
static float scale_of(const uint8_t *codes) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; i++) bits |= (uint32_t)(codes[i] & 1) << i;
  return float_of(bits << 16);
}
static void set_scale(uint8_t *codes, float scale) {
  for (int i = 0; i < 16; i++) codes[i] = (uint8_t)((codes[i] & 0xfe) | (bits_of(scale) >> (16 + i) & 1));
}
static gemini_adamw_t in_blocks(uint32_t momentum_dtype, uint32_t variance_dtype) {
  gemini_adamw_t c = config_of(0, F32, F32);
  c.momentum_dtype = momentum_dtype, c.variance_dtype = variance_dtype;
  c.weight_decay = 0, c.lr = 1, c.grad_scale = 1, c.step = UINT64_C(1) << 40; /* corrections are 1 */
  return c;
}

static void test_blocks_every_isa_equals_plain(void) {
  static const uint32_t states[] = { F32, BF16, BLOCK8 };
  for (size_t isa = 1; isa < 3; isa++) {
    if (gemini_update_force_isa(isas[isa]) != GEMINI_OK) continue;
    for (uint32_t i = 0; i < 200; i++) {
      gemini_adamw_t c = config_of(i % 3 ? 0 : 4, BF16, i % 2 ? BF16 : F32);
      c.momentum_dtype = i % 4 ? BLOCK8 : states[i / 4 % 3], c.variance_dtype = i % 4 ? states[i / 4 % 3] : BLOCK8;
      c.first_element = 256 * i;
      fill(&start, i, i % 5 == 0); /* of codes any, and any scale, NaN, too */
      if (i % 5 == 1) memset(start.momentum, 0, sizeof start.momentum), memset(start.grad, 0, 1024);
      expected = actual = start;
      CHECK_EQ(gemini_update_force_isa("plain"), GEMINI_OK);
      update(&expected, &c, 0, i % 7 ? 2816 : 256);
      CHECK_EQ(gemini_update_force_isa(isas[isa]), GEMINI_OK);
      update(&actual, &c, 0, i % 7 ? 2816 : 256);
      check_same(&actual, &expected, &c);
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

/* Every code is read as what it stands for: half of it is the step of a master that was 0. */
static void test_blocks_read_every_code(void) {
  for (uint32_t shift = 0; shift < 256; shift += 16) {
    gemini_adamw_t c = in_blocks(BLOCK8, F32);
    c.beta1 = 0.5, c.eps = 1;
    memset(&actual, 0, sizeof actual);
    uint8_t *codes = (uint8_t *)actual.momentum, before[256];
    for (uint32_t i = 0; i < 256; i++) codes[i] = (uint8_t)(i + shift); /* each is one of the first 16 once */
    set_scale(codes, 2.5f);
    memcpy(before, codes, sizeof before);
    update(&actual, &c, 0, 256);
    for (uint32_t i = 0; i < 256; i++) {
      const double want = -0.5 * 2.5 * code_of(before[i], true, i < 16), is = (double)float_of(actual.master[i]);
      CHECK(fabs(is - want) <= 1e-6 * fabs(want));
    }
    c = in_blocks(F32, BLOCK8);
    c.beta1 = c.beta2 = 0.5, c.eps = 1;
    memset(&actual, 0, sizeof actual);
    codes = (uint8_t *)actual.variance;
    for (uint32_t i = 0; i < 256; i++) codes[i] = (uint8_t)(i + shift), actual.momentum[i] = bits_of(2.0f);
    set_scale(codes, 2.5f);
    memcpy(before, codes, sizeof before);
    update(&actual, &c, 0, 256);
    for (uint32_t i = 0; i < 256; i++) {
      const double want = -1 / (sqrt(0.5 * 2.5 * code_of(before[i], false, i < 16)) + 1);
      CHECK(fabs((double)float_of(actual.master[i]) - want) <= 1e-6);
    }
  }
}

/* A momentum becomes the nearest code, of the block's own scale. */
static void test_blocks_store_the_nearest_code_of_a_momentum(void) {
  uint64_t random = 7;
  for (uint32_t round = 0; round < 30; round++) {
    gemini_adamw_t c = in_blocks(BLOCK8, F32);
    c.beta1 = 0; /* the momentum becomes the gradient */
    memset(&actual, 0, sizeof actual);
    float most = 0;
    for (uint32_t i = 0; i < 256; i++) {
      const double u = (double)(check_random(&random) >> 11) * 0x1p-53;
      float value = (float)((check_random(&random) & 1 ? 1 : -1) * 0.37 * (round % 3 ? pow(10, -8 * u) : u));
      if (i == 9 && round % 2) value = 0;
      actual.grad[i] = bits_of(value);
      most = fmaxf(most, fabsf(value));
    }
    update(&actual, &c, 0, 256);
    const uint8_t *codes = (const uint8_t *)actual.momentum;
    const float scale = scale_of(codes);
    CHECK(scale >= most && scale <= most * 1.0079f);
    for (uint32_t i = 0; i < 256; i++) {
      const double value = (double)float_of(actual.grad[i]);
      /* Without its lowest bit, if it is one of the first 16; of two that are as near, either. */
      double best = INFINITY;
      bool found = false;
      for (uint32_t code = 0; code < 256; code++)
        if (i >= 16 || code != 0x80) best = fmin(best, fabs((double)scale * code_of(code, true, false) - value));
      for (uint32_t code = 0; code < 256 && !found; code++) {
        if (i < 16 && code == 0x80) continue;
        if (fabs((double)scale * code_of(code, true, false) - value) > best + 1e-5 * fabs(value)) continue;
        found = i < 16 ? code_of(codes[i], true, true) == code_of(code, true, true) : codes[i] == code;
      }
      CHECK(found);
    }
  }
}

/* The codes of variances above 0 in their order: fine ones from 2 to 255, and coarse ones, halved, from 1 to 127. */
static double levels[2][256];
static uint32_t lowest_of(bool coarse) { return coarse ? 1 : 2; }
static uint32_t highest_of(bool coarse) { return coarse ? 127 : 255; }
static void levels_make(void) {
  for (uint32_t i = 2; i < 256; i++) levels[0][i] = code_of(i, false, false);
  for (uint32_t i = 1; i < 128; i++) levels[1][i] = code_of(2 * i, false, true);
}
/* The level below x, or at it, which is not the highest; the lowest if there is none. */
static uint32_t level_below(double x, bool coarse) {
  uint32_t low = lowest_of(coarse), high = highest_of(coarse);
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (levels[coarse][middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}

/* A variance becomes one of the two codes around it, by the random bits that docs/update.md names: of 2^16 such bits the
 * upper one gets its share. */
static void test_blocks_store_a_code_beside_a_variance(void) {
  uint64_t random = 7, upper = 0;
  levels_make();
  for (uint32_t round = 0; round < 60; round++) {
    gemini_adamw_t c = in_blocks(F32, BLOCK8);
    c.beta2 = 0; /* the variance becomes the gradient's square */
    c.seed = round, c.step += round, c.first_element = 256 * round;
    memset(&actual, 0, sizeof actual);
    double needed = 0;
    for (uint32_t i = 0; i < 256; i++) {
      const double u = (double)(check_random(&random) >> 11) * 0x1p-53;
      float value = (float)(0.37 * (round % 3 ? pow(10, -4 * u) : u));
      if (i == 3 && round % 4 == 1) value = 0.371f; /* the largest, with a coarse code */
      if (i == 9 && round % 4 == 3) value = 0;
      actual.grad[i] = bits_of(value);
      needed = fmax(needed, (double)(value * value) / levels[i < 16][highest_of(i < 16)]);
    }
    update(&actual, &c, 0, 256);
    const uint8_t *codes = (const uint8_t *)actual.variance;
    const double scale = (double)scale_of(codes);
    CHECK(scale >= needed * (1 - 1e-6) && scale <= needed * 1.0079);
    for (uint32_t i = 0; i < 256; i++) {
      const bool coarse = i < 16;
      const float g = float_of(actual.grad[i]), value = g * g;
      if (value == 0) {
        CHECK((codes[i] & (coarse ? 0xfe : 0xff)) == 0);
        continue;
      }
      const double x = (double)value / scale;
      const uint32_t low = level_below(x, coarse), level = coarse ? codes[i] >> 1 : codes[i];
      const double share = (x - levels[coarse][low]) / (levels[coarse][low + 1] - levels[coarse][low]);
      const double sum = fmax(share, 0) * 65536 + (random_of(c.seed, c.step, c.first_element + i) >> 16);
      CHECK(level == low + (sum >= 65536) || (fabs(sum - 65536) < 4 && level == low) ||
            (fabs(sum - 65536) < 4 && level == low + 1) || (sum < 4 && level == low - 1));
      upper += level == low + 1;
    }
  }
  CHECK(upper > 256 * 60 / 3 && upper < 256 * 60 * 2 / 3);
}

/* All variances are right on average, in relation to their fp32 counterparts, when gradients have become ten times
 * smaller; to the nearest code they would all have stayed where they were, at 2.7 times that. What rounding adds to a
 * variance is a martingale: of a step it has the variance (x - lower code) * (upper code - x), whatever was before, and
 * beta2 of it remains in the next step. So the sum over elements deviates as the sum of these does, and the test fails
 * by chance as often as a normal number is beyond five deviations. The largest of a block and coarse codes count apart,
 * as a scale that cuts the largest off makes these alone fall. */
static void test_blocks_variances_fall_with_the_gradients(void) {
  enum { BLOCKS = 8, FINE = 0, COARSE, LARGEST, KINDS };
  static double spread[BLOCKS * 256];
  static uint8_t before[BLOCKS * 256];
  gemini_adamw_t fp32 = in_blocks(F32, F32), coded = in_blocks(F32, BLOCK8);
  uint64_t random = 3;
  levels_make();
  memset(&expected, 0, sizeof expected), memset(spread, 0, sizeof spread);
  for (uint32_t i = 0; i < BLOCKS * 256; i++) {
    const double u = (double)(check_random(&random) >> 11) * 0x1p-53;
    expected.grad[i] = bits_of((float)(i % 256 == i / 512 * 40 ? 1.05 : pow(10, -2 * u)));
  }
  fp32.lr = coded.lr = 0;
  actual = expected;
  for (uint64_t step = 1; step <= 1000; step++) {
    const double beta2 = step == 1 ? 0 : 0.999; /* the first step makes variances of gradients */
    fp32.step = coded.step = step, fp32.beta2 = coded.beta2 = beta2;
    uint8_t *const codes = (uint8_t *)actual.variance;
    memcpy(before, codes, sizeof before);
    update(&expected, &fp32, 0, BLOCKS * 256);
    update(&actual, &coded, 0, BLOCKS * 256);
    for (uint32_t i = 0; i < BLOCKS * 256; i++) {
      const bool coarse = i % 256 < 16;
      const double scale = (double)scale_of(codes + i / 256 * 256), old = (double)scale_of(before + i / 256 * 256);
      const double g = (double)float_of(actual.grad[i]);
      const double was = step == 1 ? 0 : old * levels[coarse][coarse ? before[i] >> 1 : before[i]];
      const double x = (beta2 * was + (1 - beta2) * g * g) / scale;
      const uint32_t low = level_below(x, coarse);
      const double lower = levels[coarse][low], higher = levels[coarse][low + 1];
      CHECK(x >= lower * (1 - 1e-6) && x <= higher * (1 + 1e-6));
      spread[i] = beta2 * beta2 * spread[i] + scale * scale * fmax((x - lower) * (higher - x), 0);
    }
    for (uint32_t i = 0; step == 1 && i < BLOCKS * 256; i++)
      actual.grad[i] = expected.grad[i] = bits_of(float_of(actual.grad[i]) * 0.1f);
  }
  double errors[KINDS] = { 0 }, squares[KINDS] = { 0 };
  uint32_t counts[KINDS] = { 0 };
  for (uint32_t i = 0; i < BLOCKS * 256; i++) {
    const bool coarse = i % 256 < 16;
    const uint8_t *const codes = (const uint8_t *)actual.variance;
    const double right = (double)float_of(expected.variance[i]);
    const double is = (double)scale_of(codes + i / 256 * 256) * levels[coarse][coarse ? codes[i] >> 1 : codes[i]];
    const int kind = i % 256 == i / 512 * 40 ? LARGEST : coarse ? COARSE : FINE;
    errors[kind] += is / right - 1, squares[kind] += spread[i] / (right * right), counts[kind]++;
  }
  for (int kind = 0; kind < KINDS; kind++) {
    CHECK(fabs(errors[kind]) < 5 * sqrt(squares[kind]));
    CHECK(5 * sqrt(squares[kind]) < 0.3 * counts[kind]); /* far from 1.7, which is what nearest codes have */
  }
}

static void test_blocks_random_bits_are_of_the_element_the_step_and_the_seed(void) {
  fill(&start, 6, false);
  memset(start.momentum, 0, sizeof start.momentum), memset(start.variance, 0, sizeof start.variance);
  for (int i = 0; i < 4; i++) {
    gemini_adamw_t c = in_blocks(BLOCK8, BLOCK8);
    expected = actual = start;
    update(&expected, &c, 0, 2816);
    if (i == 1) c.seed++;
    if (i == 2) c.first_element += 256;
    if (i == 3) c.step++;
    update(&actual, &c, 0, 2816);
    uint64_t differ = 0;
    for (uint64_t k = 0; k < 2816; k++) differ += ((uint8_t *)actual.variance)[k] != ((uint8_t *)expected.variance)[k];
    CHECK(i ? differ > 2816 / 10 && differ < 2816 / 2 : differ == 0); /* a third, where roundings are independent */
    CHECK(!memcmp(actual.momentum, expected.momentum, 2816));         /* these are to the nearest */
  }
}

/* Of all instruction sets: a variance above 0 becomes a code above 0, whatever it is beside the block's largest, and 0
 * stays 0. Rounded, none is below 0.364 of what it was (0.169, of the first 16), so a next step without a gradient, which
 * has nothing but the states, is at most 1.66 (2.44) times the step with fp32 states, where 0 would make it 1e8 times. */
static void test_blocks_keep_variances_above_zero(void) {
  static const float scales[] = { 1e-18f, 1e-9f, 1.0f, 1e15f, 1.8e19f }; /* of gradients, whose squares fit */
  static uint8_t plain[512];
  for (uint32_t round = 0; round < 60 * 3; round++) {
    if (gemini_update_force_isa(isas[round % 3]) != GEMINI_OK) continue;
    uint64_t random = round / 3 * 2 + 1;
    const float scale = scales[round / 3 % 5];
    gemini_adamw_t fp32 = in_blocks(F32, F32), coded = in_blocks(F32, BLOCK8);
    fp32.beta2 = coded.beta2 = 0, fp32.eps = coded.eps = 1e-30; /* variances become the gradients' squares */
    memset(&start, 0, sizeof start);
    for (uint32_t i = 0; i < 512; i++) {
      const double u = (double)(check_random(&random) >> 11) * 0x1p-53;
      const float part = i % 256 == 200 ? 1 : (float)pow(10, -(i % 7 ? 5 : 40) * u);
      start.grad[i] = bits_of(i % 9 == 4 ? 0 : scale * part);
    }
    expected = actual = start;
    update(&expected, &fp32, 0, 512);
    update(&actual, &coded, 0, 512);
    const uint8_t *codes = (const uint8_t *)actual.variance;
    if (round % 3 == 0) memcpy(plain, codes, sizeof plain);
    CHECK(!memcmp(codes, plain, sizeof plain));
    uint32_t lowest = 0;
    for (uint32_t i = 0; i < 512; i++) {
      const bool coarse = i % 256 < 16;
      const uint32_t code = codes[i] & (coarse ? 0xfe : 0xff);
      const double value = (double)float_of(expected.variance[i]);
      const double kept = (double)scale_of(codes + i / 256 * 256) * code_of(code, false, coarse);
      CHECK((code != 0) == (value > 0) && kept >= value * (coarse ? 0.169 : 0.364));
      lowest += code == 2;
    }
    CHECK(lowest > 10);
    fp32.beta2 = coded.beta2 = 0.999;
    memset(expected.grad, 0, sizeof expected.grad), memset(expected.master, 0, sizeof expected.master);
    memset(actual.grad, 0, sizeof actual.grad), memset(actual.master, 0, sizeof actual.master);
    update(&expected, &fp32, 0, 512);
    update(&actual, &coded, 0, 512);
    for (uint32_t i = 0; i < 512; i++) {
      const double step = fabs((double)float_of(actual.master[i])), right = fabs((double)float_of(expected.master[i]));
      CHECK(step <= right * (i % 256 < 16 ? 2.44 : 1.66));
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

/* Of all instruction sets: where the scale is subnormal, rounding can leave it so small that the largest is above the
 * highest code, which then is that of the largest, and not the one after it, whatever the random bits. */
static void test_blocks_with_a_subnormal_scale_keep_their_largest(void) {
  levels_make();
  for (uint32_t round = 0; round < 2 * 3; round++) {
    if (gemini_update_force_isa(isas[round % 3]) != GEMINI_OK) continue;
    const bool coarse = round / 3;
    const double part = levels[coarse][highest_of(coarse)]; /* the scale of such a largest is 0x10000, the lowest */
    for (uint32_t largest = (uint32_t)(part * 65536) - 2; largest < part * 65536 + 2; largest++) {
      gemini_adamw_t c = in_blocks(F32, BLOCK8);
      c.beta2 = 0;
      memset(&start, 0, sizeof start);
      for (uint32_t i = 0; i < 2816; i++)
        if ((i % 256 < 16) == coarse) start.grad[i] = bits_of(sqrtf(float_of(largest)));
      for (c.seed = 0; c.seed < 60; c.seed++) {
        actual = start;
        update(&actual, &c, 0, 2816);
        for (uint32_t i = 0; i < 2816; i++) {
          const uint8_t *codes = (const uint8_t *)actual.variance, code = codes[i];
          const uint32_t level = coarse ? code >> 1 : code, highest = highest_of(coarse);
          const bool higher = bits_of(scale_of(codes + i / 256 * 256)) > 0x10000; /* the next scale, twice as high */
          if ((i % 256 < 16) == coarse && !higher) CHECK(level == highest || level == highest - 1);
        }
      }
    }
  }
  CHECK_EQ(gemini_update_force_isa(NULL), GEMINI_OK);
}

/* An embedding of 16 rows, all of them in one block, learns a vector for each of 16 tokens. In a batch of 1024, row 0
 * comes 500 times, with noise that does not end, and row r once in r + 1 batches or so: too seldom for variances beside
 * that of row 0 to be more than 0 to the nearest code. */
static void test_blocks_train_what_is_seldom_used(void) {
  gemini_adamw_t fp32 = in_blocks(F32, F32), blocks = in_blocks(BLOCK8, BLOCK8);
  float wanted[256], share = 0; /* of the batch */
  uint64_t random = 3;
  double most = 0, left = 0; /* the largest distance from fp32; the mean one from what is wanted, at the end */
  fp32.lr = blocks.lr = 0.01;
  memset(&expected, 0, sizeof expected);
  actual = expected;
  for (uint32_t i = 0; i < 256; i++) wanted[i] = check_random(&random) & 1 ? 0.5f : -0.5f;
  for (uint64_t step = 1; step <= 400; step++) {
    for (uint32_t i = 0; i < 256; i++) {
      const uint32_t row = i / 16;
      if (i % 16 == 0) share = row == 0 ? 500.0f / 1024 : check_random(&random) % (row + 1) ? 0 : 1.0f / 1024;
      const float noise = row ? 0 : check_random(&random) & 1 ? 1.0f : -1.0f;
      expected.grad[i] = bits_of(share * (float_of(expected.master[i]) - wanted[i] + noise));
      actual.grad[i] = bits_of(share * (float_of(actual.master[i]) - wanted[i] + noise));
    }
    fp32.step = blocks.step = step;
    update(&expected, &fp32, 0, 256);
    update(&actual, &blocks, 0, 256);
    for (uint32_t i = 0; i < 256; i++) {
      const double right = (double)float_of(expected.master[i]), is = (double)float_of(actual.master[i]);
      most = fmax(most, fabs(is - right));
      if (step == 400) left += fabs(is - (double)wanted[i]) / 256;
    }
  }
  CHECK(most < 0.25 && left < 0.05); /* 0.166 and 0.046; with variances of 0 it was 667 */
}

static void test_blocks_of_zeros_and_of_no_numbers(void) {
  gemini_adamw_t c = in_blocks(BLOCK8, BLOCK8);
  memset(&actual, 0, sizeof actual);
  update(&actual, &c, 0, 1024);
  for (uint64_t i = 0; i < CAPACITY; i++) CHECK(!actual.momentum[i] && !actual.variance[i] && !actual.master[i]);
  actual.grad[300] = bits_of(NAN); /* takes its block with it, and no other */
  update(&actual, &c, 0, 1024);
  const uint8_t *codes = (const uint8_t *)actual.momentum;
  CHECK(isnan(scale_of(codes + 256)) && scale_of(codes) == 0 && scale_of(codes + 512) == 0);
  actual.grad[300] = 0;
  update(&actual, &c, 0, 1024);
  for (uint64_t i = 0; i < 1024; i++) CHECK(!isnan(float_of(actual.master[i])) == (i / 256 != 1));
}

static void test_blocks_beside_in_pieces_and_on_the_gpu_are_the_same(void) {
  static state_t to;
  gemini_adamw_t c = config_of(4, BF16, BF16);
  c.momentum_dtype = c.variance_dtype = BLOCK8;
  fill(&start, 4, false);
  expected = actual = start;
  update(&expected, &c, 0, 2816);
  for (uint64_t at = 0; at < 2816; at += 256) c.first_element = at, update(&actual, &c, at, 256);
  actual.sum = expected.sum;
  check_same(&actual, &expected, &c);
  actual = start, c.first_element = 0;
  const gmi_arrays_t a = { actual.param, actual.grad, actual.master, actual.momentum, actual.variance };
  const gmi_arrays_t out = { to.param, NULL, to.master, to.momentum, to.variance };
  memset(&to, 0x5a, sizeof to);
  CHECK_EQ(gmi_adamw_beside("test", &c, 0, 2816, &a, &out), GEMINI_OK);
  CHECK(!memcmp(&actual, &start, sizeof start) && !memcmp(to.momentum, expected.momentum, 2816));
  CHECK(!memcmp(to.variance, expected.variance, 2816) && ((uint8_t *)to.variance)[2816] == 0x5a);
  CHECK(!memcmp(to.param, expected.param, 2816 * 2) && !memcmp(to.master, expected.master, 2816 * 2));
  double sums[4];
  fake_start();
  CHECK_EQ(gemini_adamw_cuda(&c, 2816, actual.param, actual.grad, actual.master, actual.momentum, actual.variance, NULL,
                             sums),
           GEMINI_OK);
  actual.sum = sums[0];
  check_same(&actual, &expected, &c);
  CHECK(!strcmp(fake.calls[fake.call_count - 3], "gmi_blocks"));
  gmi_update_cuda_replace(NULL);
}

/* --- beside the old values, on the GPU, and what is refused --- */

static void test_narrow_beside_the_old_values_is_the_same(void) {
  static state_t to;
  for (uint32_t way = 0; way < WAYS; way++) {
    gemini_adamw_t c = config_of(way, BF16, BF16);
    fill(&start, way, false);
    expected = actual = start;
    c.first_element = 77;
    update(&expected, &c, 0, 2500);
    memset(&to, 0x5a, sizeof to);
    const gmi_arrays_t a = { actual.param, actual.grad, actual.master, actual.momentum, actual.variance };
    const gmi_arrays_t out = { to.param, NULL, to.master, to.momentum, to.variance };
    c.first_element = 70;
    CHECK_EQ(gmi_adamw_beside("test", &c, 7, 2500, &a, &out), GEMINI_OK);
    CHECK(!memcmp(&actual, &start, sizeof start));
    CHECK(!memcmp(to.param, expected.param, 2500 * 2));
    CHECK(!memcmp(to.master, expected.master, 2500 * width_of(master_dtype(&c))));
    CHECK(!memcmp(to.momentum, expected.momentum, 2500 * width_of(c.momentum_dtype)));
    CHECK(!memcmp(to.variance, expected.variance, 2500 * width_of(c.variance_dtype)));
    CHECK_EQ(half(to.param, 2500), 0x5a5a); /* and nothing behind */
    CHECK_EQ(half(element_at(to.master, master_dtype(&c), 2500), 0), 0x5a5a);
  }
  gemini_adamw_t c = config_of(4, BF16, BF16);
  const gmi_arrays_t reused = { actual.grad, actual.grad, actual.master, actual.momentum, actual.variance };
  const gmi_arrays_t out = { to.param, NULL, to.master, to.momentum, to.variance };
  CHECK_EQ(gmi_adamw_beside("test", &c, 0, 100, &reused, &out), GEMINI_ERR_INVALID);
}

static void test_narrow_cuda_gives_its_kernel_what_the_host_computes_with(void) {
  fake_start();
  for (uint32_t way = 0; way < WAYS; way++) {
    gemini_adamw_t c = config_of(way, BF16, BF16);
    double sums[4];
    fill(&start, way, true);
    expected = actual = start;
    update(&expected, &c, 0, 2900);
    fake.call_count = 0;
    CHECK_EQ(gemini_adamw_cuda(&c, 2900, actual.param, actual.grad, actual.master, actual.momentum, actual.variance,
                               NULL, sums),
             GEMINI_OK);
    uint32_t launched = 0;
    while (strncmp(fake.calls[launched], "gmi_", 4) != 0) launched++;
    CHECK(!strcmp(fake.calls[launched], way ? "gmi_narrow" : "gmi_adamw"));
    actual.sum = sums[0];
    check_same(&actual, &expected, &c);
  }
  gmi_update_cuda_replace(NULL);
}

static void refused(const gemini_adamw_t *c, void *param, void *master, const char *words) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  actual = start;
  CHECK_EQ(gemini_adamw_host(c, 100, param, actual.grad, master, actual.momentum, actual.variance, NULL),
           GEMINI_ERR_INVALID);
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  if (!strstr(info.message, words)) fprintf(stderr, "'%s' does not say '%s'\n", info.message, words);
  CHECK(strstr(info.message, words) && !memcmp(&actual, &start, sizeof start));
}
static void test_narrow_what_does_not_fit_is_refused_by_name(void) {
  gemini_adamw_t c = config_of(0, BF16, BF16);
  fill(&start, 1, false);
  c.momentum_dtype = F16, refused(&c, actual.param, actual.master, "momentum_dtype is 2, want F32, BF16 or BLOCK8");
  c.momentum_dtype = F32, c.variance_dtype = GEMINI_DTYPE_F64;
  refused(&c, actual.param, actual.master, "variance_dtype is 3, want F32, BF16 or BLOCK8");
  c.variance_dtype = BF16, c.flags = SPLIT, c.param_dtype = F16;
  refused(&c, actual.param, actual.master, "param_dtype is 2, GEMINI_ADAMW_SPLIT wants BF16");
  c.param_dtype = BF16;
  refused(&c, NULL, actual.master, "there is no param");
  refused(&c, actual.grad, actual.master, "param at 0x"); /* gradients in the bytes of half a master */
  refused(&c, actual.param, (char *)actual.master + 1, "master is 0x");
  CHECK_EQ(gemini_adamw_host(&c, 100, actual.param, actual.grad, (char *)actual.master + 2, actual.momentum,
                             actual.variance, NULL),
           GEMINI_OK);
  c.variance_dtype = BLOCK8;
  refused(&c, actual.param, actual.master, "elements 0 to 100 are not whole blocks of 256, which 8-bit states have");
  c.first_element = 156, refused(&c, actual.param, actual.master, "elements 156 to 256 are not whole blocks");
  c.flags = 0; /* a struct of before there were narrow states */
  c.struct_size = 72, c.momentum_dtype = 99, c.variance_dtype = 99;
  start.sum = -1, actual = expected = start;
  update(&actual,
         &(gemini_adamw_t){ .struct_size = 96,
                            .param_dtype = BF16,
                            .grad_dtype = BF16,
                            .step = 7,
                            .lr = c.lr,
                            .beta1 = c.beta1,
                            .beta2 = c.beta2,
                            .eps = c.eps,
                            .grad_scale = c.grad_scale,
                            .weight_decay = c.weight_decay },
         0, CAPACITY);
  CHECK_EQ(gemini_adamw_host(&c, CAPACITY, expected.param, expected.grad, expected.master, expected.momentum,
                             expected.variance, &expected.sum),
           GEMINI_OK);
  CHECK(!memcmp(&actual, &expected, sizeof actual));
}

int main(void) {
  RUN(test_narrow_every_isa_equals_plain);
  RUN(test_split_masters_are_the_fp32_masters);
  RUN(test_split_masters_keep_every_value);
  RUN(test_states_in_bf16_are_rounded_as_written);
  RUN(test_states_in_bf16_are_right_on_average);
  RUN(test_narrow_random_bits_are_of_the_element_the_step_and_the_seed);
  RUN(test_blocks_every_isa_equals_plain);
  RUN(test_blocks_read_every_code);
  RUN(test_blocks_store_the_nearest_code_of_a_momentum);
  RUN(test_blocks_store_a_code_beside_a_variance);
  RUN(test_blocks_variances_fall_with_the_gradients);
  RUN(test_blocks_random_bits_are_of_the_element_the_step_and_the_seed);
  RUN(test_blocks_keep_variances_above_zero);
  RUN(test_blocks_with_a_subnormal_scale_keep_their_largest);
  RUN(test_blocks_train_what_is_seldom_used);
  RUN(test_blocks_of_zeros_and_of_no_numbers);
  RUN(test_blocks_beside_in_pieces_and_on_the_gpu_are_the_same);
  RUN(test_narrow_beside_the_old_values_is_the_same);
  RUN(test_narrow_cuda_gives_its_kernel_what_the_host_computes_with);
  RUN(test_narrow_what_does_not_fit_is_refused_by_name);
  return check_done();
}
