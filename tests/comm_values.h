/* Values of ranks for tests of reductions. SPDX-License-Identifier: Apache-2.0 */
#ifndef COMM_VALUES_H
#define COMM_VALUES_H

#include "base/dtype.h"
#include "check.h"

/* The bytes of a rank: random, but for half of the ranks and values near rank 0's, so that sums round. NaN come rarely
 * in the 32-bit and 64-bit types; where there is one it must be one, whatever its payload. */
OWN_MEMORY static inline void comm_values_fill(unsigned char *to, uint32_t rank, uint64_t count, uint32_t dtype,
                                               uint32_t seed) {
  const uint32_t width = gmi_dtype_bytes(dtype);
  for (uint64_t i = 0; i < count; i++) {
    uint64_t state = (seed * UINT64_C(1000003) + i + 1) * UINT64_C(0x9E3779B97F4A7C15), bits = check_random(&state);
    for (uint32_t r = 0; r < rank; r++) bits = r % 2 ? check_random(&state) : bits ^ (check_random(&state) % 64);
    const unsigned char *from = (const unsigned char *)&bits;
    for (uint32_t b = 0; b < width; b++) to[i * width + b] = from[b];
  }
}
static inline bool comm_values_is_nan(const unsigned char *at, uint32_t dtype) {
  uint64_t bits = 0;
  memcpy(&bits, at, gmi_dtype_bytes(dtype));
  switch (dtype) {
  case GEMINI_DTYPE_F32: return (bits & 0x7FFFFFFF) > 0x7F800000;
  case GEMINI_DTYPE_BF16: return (bits & 0x7FFF) > 0x7F80;
  case GEMINI_DTYPE_F16: return (bits & 0x7FFF) > 0x7C00;
  default: return (bits & INT64_MAX) > UINT64_C(0x7FF0000000000000);
  }
}
/* The same bits, except for the payload of a NaN. */
static inline void comm_values_check(const unsigned char *actual, const unsigned char *expected, uint64_t count,
                                     uint32_t dtype) {
  const uint32_t width = gmi_dtype_bytes(dtype);
  if (!memcmp(actual, expected, count * width)) return;
  for (uint64_t i = 0; i < count; i++) {
    if (!memcmp(actual + i * width, expected + i * width, width)) continue;
    if (!comm_values_is_nan(actual + i * width, dtype) || !comm_values_is_nan(expected + i * width, dtype))
      fprintf(stderr, "value %" PRIu64 " of %" PRIu64 ", dtype %u\n", i, count, dtype);
    CHECK(comm_values_is_nan(actual + i * width, dtype) && comm_values_is_nan(expected + i * width, dtype));
  }
}

#endif
