/* The elements of fused updates, for tests: dtypes, bits, random values, and when two are the same.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef UPDATE_VALUES_H
#define UPDATE_VALUES_H

#include <stdbool.h>

#include "check.h"
#include "update/gemini_update.h"

enum { F32 = GEMINI_DTYPE_F32, BF16 = GEMINI_DTYPE_BF16, F16 = GEMINI_DTYPE_F16, BLOCK8 = GEMINI_DTYPE_BLOCK8 };
static const uint32_t dtypes[] = { F32, BF16, F16 };             /* of parameters and gradients */
static const char *const isas[] = { "plain", "avx2", "avx512" }; /* of gemini_update_force_isa() */

static inline uint64_t width_of(uint32_t dtype) { return dtype == F32 ? 4 : dtype == BLOCK8 ? 1 : 2; }
static inline void *element_at(void *base, uint32_t dtype, uint64_t i) { return (char *)base + i * width_of(dtype); }

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* To the bit; but NaNs may differ. */
static inline bool same_float(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }
static inline bool same_double(double a, double b) { return !memcmp(&a, &b, sizeof a) || (a != a && b != b); }

/* Of the size that training has; with any, one of 8 is any float at all: subnormal, infinite, NaN. */
static inline float random_float(uint64_t *random, float scale, bool any) {
  uint64_t r = check_random(random);
  if (any && r % 8 == 0) return float_of((uint32_t)(r >> 32));
  return scale * ((float)(int32_t)(r >> 32) / 2147483648.0f);
}

#endif
