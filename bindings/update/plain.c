/* The update kernels in plain C, one element at a time: for processors without AVX2, and everywhere for the last
 * elements of a span, which do not fill a vector. SPDX-License-Identifier: Apache-2.0
 *
 * They define the results: the vector kernels must be bit-equal, including the conversions from and to bf16 and f16
 * (round to nearest even; every NaN becomes 0x7fc0 or 0x7e00). */
#include <float.h>
#include <math.h>
#include <string.h>

#include "update/update.h"

_Static_assert(FLT_EVAL_METHOD == 0, "fp32 operations must be rounded to fp32");

#define KERNEL(update) gmi_##update##_plain
#define WIDTH 1u
typedef float vec_t;
typedef struct sums {
  double lanes[GMI_LANES];
} sums_t;

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

static float vec_all(float x) { return x; }
static float vec_root(float x) { return sqrtf(x); }
static float vec_least(float v, float w) { return v < w ? v : w; }
static float vec_load(const float *src) { return *src; }
static void vec_store(float *dst, float v) { *dst = v; }

static float vec_load_bf16(const uint16_t *src) { return float_of((uint32_t)*src << 16); }
static void vec_store_bf16(uint16_t *dst, float v) {
  uint32_t bits = bits_of(v);
  *dst = v != v ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* A half's bits shifted into a float give an exponent that is 112 too low, and a subnormal half gives a subnormal
 * float. Multiplying by 2^112 corrects both, exactly. */
static float vec_load_f16(const uint16_t *src) {
  uint32_t half = *src, sign = (half & 0x8000) << 16;
  uint32_t bits = bits_of(float_of((half & 0x7fff) << 13) * 0x1p112f);
  if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000; /* infinity and NaN keep the highest exponent */
  return float_of(bits | sign);
}
static void vec_store_f16(uint16_t *dst, float v) {
  uint32_t bits = bits_of(v) & 0x7fffffff, sign = bits_of(v) >> 16 & 0x8000, half;
  if (v != v) {
    half = 0x7e00, sign = 0;
  } else if (bits >= 0x47800000) { /* at least 2^16: infinity */
    half = 0x7c00;
  } else if (bits < 0x38800000) { /* below 2^-14: subnormal. Adding 0.5 rounds to a multiple of 2^-24, the least half */
    half = bits_of(float_of(bits) + 0.5f) - bits_of(0.5f);
  } else { /* subtracts 112 from the exponent and rounds to even; a carry into the exponent is right, up to infinity */
    half = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  *dst = (uint16_t)(half | sign);
}

typedef uint32_t bits_t;
static bits_t bits_all(uint32_t x) { return x; }
static bits_t bits_lanes(void) { return 0; }
static bits_t bits_of_vec(float v) { return bits_of(v); }
static float vec_of_bits(bits_t b) { return float_of(b); }
static bits_t bits_where_nan(float v, bits_t a, bits_t b) { return v != v ? a : b; }
static bits_t bits_load16(const uint16_t *src) { return *src; }
static void bits_store16(uint16_t *dst, bits_t b) { *dst = (uint16_t)b; }
static bits_t bits_load8(const uint8_t *src) { return *src; }
static void bits_store8(uint8_t *dst, bits_t b) { *dst = (uint8_t)b; }
static bits_t bits_max(bits_t a, bits_t b) { return a > b ? a : b; }
static bits_t bits_less(float v, float w) { return v < w ? UINT32_MAX : 0; }
static bits_t bits_of_number(float v) { return (uint32_t)(int32_t)v; }
static float vec_of_number(bits_t b) { return (float)b; }
static float vec_pick(const float *table, bits_t b) { return table[b & 7]; }

static sums_t sums_load(const double *lanes) {
  sums_t s;
  memcpy(s.lanes, lanes, sizeof s.lanes);
  return s;
}
static void sums_store(double *lanes, const sums_t *s) { memcpy(lanes, s->lanes, sizeof s->lanes); }
static void sums_add(sums_t *s, uint32_t i, float v) { s->lanes[i] += (double)v * (double)v; }

#include "update/kernel.h"
