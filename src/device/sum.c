/* Sums and maxima over ranks, in tiles of values that are converted to float, combined and converted back.
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/sum.h"

#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/dtype.h"
#include "base/race.h"

enum { TILE = 256 /* values */ };

GMI_UNTOLD static uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
GMI_UNTOLD static float of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

GMI_UNTOLD static float of_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }
/* Rounds to nearest, ties to even. A NaN keeps its sign and upper bits and becomes quiet: rounding could make it
 * infinite. */
GMI_UNTOLD static uint16_t to_bf16(float value) {
  uint32_t bits = bits_of(value);
  if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

GMI_UNTOLD static float of_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  if (magnitude < 0x0400u) return copysignf((float)magnitude * 0x1p-24f, of_bits(sign)); /* zero or subnormal: exact */
  uint32_t exponent = magnitude < 0x7C00u ? 112u : 224u;                                 /* of infinity and NaN: 255 */
  return of_bits(sign | ((magnitude << 13) + (exponent << 23)));
}
/* Rounds to nearest, ties to even, also in the range of subnormals, where float adds and rounds by itself. */
GMI_UNTOLD static uint16_t to_f16(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (isnan(value)) return (uint16_t)(sign | 0x7E00u | (magnitude >> 13 & 0x1FFu));
  if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u); /* 65520 and more round to infinity */
  if (magnitude < 0x38800000u) /* below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the lowest bits */
    return (uint16_t)(sign | (bits_of(of_bits(magnitude) + 0.5f) - bits_of(0.5f)));
  return (uint16_t)(sign | ((magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13));
}

/* ---- tiles. dtype is not F64. */
GMI_UNTOLD static void load(uint32_t dtype, const unsigned char *from, uint32_t count, float *values_out) {
  uint16_t half;
  for (uint32_t i = 0; i < count; i++) {
    if (dtype == GEMINI_DTYPE_F32) {
      memcpy(&values_out[i], from + 4 * i, 4);
    } else {
      memcpy(&half, from + 2 * i, 2);
      values_out[i] = dtype == GEMINI_DTYPE_BF16 ? of_bf16(half) : of_f16(half);
    }
  }
}
GMI_UNTOLD static void store(uint32_t dtype, const float *values, uint32_t count, unsigned char *to) {
  for (uint32_t i = 0; i < count; i++) {
    if (dtype == GEMINI_DTYPE_F32) {
      memcpy(to + 4 * i, &values[i], 4);
    } else {
      uint16_t half = dtype == GEMINI_DTYPE_BF16 ? to_bf16(values[i]) : to_f16(values[i]);
      memcpy(to + 2 * i, &half, 2);
    }
  }
}
GMI_UNTOLD static void combine(uint32_t dtype, gmi_reduce_t reduce, float *values, const float *more, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    if (reduce != GMI_REDUCE_MAX) values[i] += more[i];
    else if (isnan(more[i]) || values[i] < more[i]) values[i] = more[i];
    if (reduce == GMI_REDUCE_SUM_ROUNDED && dtype == GEMINI_DTYPE_BF16) values[i] = of_bf16(to_bf16(values[i]));
    if (reduce == GMI_REDUCE_SUM_ROUNDED && dtype == GEMINI_DTYPE_F16) values[i] = of_f16(to_f16(values[i]));
  }
}

GMI_UNTOLD static void reduce_tile(uint32_t dtype, gmi_reduce_t reduce, uint32_t ranks, const void *const *from,
                                   void *to, uint64_t first, uint32_t count) {
  uint64_t at = first * gmi_dtype_bytes(dtype);
  if (dtype == GEMINI_DTYPE_F64) {
    double values[TILE], more[TILE];
    memcpy(values, (const unsigned char *)from[0] + at, count * sizeof *values);
    for (uint32_t r = 1; r < ranks; r++) {
      memcpy(more, (const unsigned char *)from[r] + at, count * sizeof *more);
      for (uint32_t i = 0; i < count; i++) {
        if (reduce != GMI_REDUCE_MAX) values[i] += more[i];
        else if (isnan(more[i]) || values[i] < more[i]) values[i] = more[i];
      }
    }
    memcpy((unsigned char *)to + at, values, count * sizeof *values);
    return;
  }
  float values[TILE], more[TILE];
  load(dtype, (const unsigned char *)from[0] + at, count, values);
  for (uint32_t r = 1; r < ranks; r++) {
    load(dtype, (const unsigned char *)from[r] + at, count, more);
    combine(dtype, reduce, values, more, count);
  }
  store(dtype, values, count, (unsigned char *)to + at);
}

void gmi_reduce(uint32_t dtype, gmi_reduce_t reduce, uint32_t ranks, const void *const *from, void *to,
                uint64_t count) {
  GMI_ASSERT(gmi_dtype_bytes(dtype) && ranks);
  for (uint32_t r = 0; r < ranks; r++) gmi_reads(from[r], count * gmi_dtype_bytes(dtype));
  gmi_writes(to, count * gmi_dtype_bytes(dtype));
  for (uint64_t first = 0; first < count; first += TILE) {
    uint64_t left = count - first;
    reduce_tile(dtype, reduce, ranks, from, to, first, left < TILE ? (uint32_t)left : TILE);
  }
}
