/* Sum of squares in double, left to right. SPDX-License-Identifier: Apache-2.0
 *
 * Squares of F32, BF16 and F16 values are exact in double, so only the order of the additions decides the result. For
 * F64 the square is rounded first: this file must be compiled without contraction to fused multiply-add
 * (-ffp-contract=off). */
#include <string.h>

#include "device/device.h"

static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static float float_of_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3FFu;
  if (exponent == 31) return float_of_bits(sign | 0x7F800000u | fraction << 13);
  if (exponent == 0) { /* zero or subnormal: fraction * 2^-24, exact */
    float magnitude = (float)fraction * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return float_of_bits(sign | (exponent + 112u) << 23 | fraction << 13);
}

double gmi_sum_squares(const void *src, uint32_t dtype, uint64_t count) {
  const unsigned char *bytes = src; /* may be unaligned */
  double sum = 0.0;
  switch (dtype) {
  case GEMINI_DTYPE_F32:
    for (uint64_t i = 0; i < count; i++) {
      float value;
      memcpy(&value, bytes + i * sizeof value, sizeof value);
      sum += (double)value * (double)value;
    }
    break;
  case GEMINI_DTYPE_BF16:
    for (uint64_t i = 0; i < count; i++) {
      uint16_t bits;
      memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
      double value = (double)float_of_bits((uint32_t)bits << 16);
      sum += value * value;
    }
    break;
  case GEMINI_DTYPE_F16:
    for (uint64_t i = 0; i < count; i++) {
      uint16_t bits;
      memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
      double value = (double)float_of_f16(bits);
      sum += value * value;
    }
    break;
  case GEMINI_DTYPE_F64:
    for (uint64_t i = 0; i < count; i++) {
      double value;
      memcpy(&value, bytes + i * sizeof value, sizeof value);
      sum += value * value;
    }
    break;
  default: break;
  }
  return sum;
}
