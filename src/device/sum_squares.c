/* Sums of squares in double, added from left to right. SPDX-License-Identifier: Apache-2.0
 *
 * Squares of F32, BF16 and F16 values are exact in double, so only the order of additions determines the result, and
 * sums are bit-equal on host and GPU. For F64 the square is rounded first: this file must be compiled without
 * contraction to fused multiply-add (-ffp-contract=off).
 *
 * Each addition depends on the one before it, with a latency of some four cycles, so a single sum runs at a fraction of
 * the memory's bandwidth. Several blocks are therefore summed in an interleaved loop, each in its own order. Pure
 * functions: any thread. */
#include <string.h>

#include "base/dtype.h"
#include "base/race.h"
#include "device/device.h"

enum { TOGETHER = 8 /* blocks */, TILE = 64 /* values of each that are squared before they are added */ };

GMI_UNTOLD static float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* The absolute value: the square needs no sign. Without branches, so that the compiler can convert several at once. */
GMI_UNTOLD static float magnitude_of_f16(uint16_t half) {
  uint32_t magnitude = half & 0x7FFFu, is_tiny = magnitude < 0x0400u ? UINT32_MAX : 0, tiny;
  uint32_t normal = (magnitude << 13) + ((magnitude < 0x7C00u ? 112u : 224u) << 23); /* normal, infinite or NaN */
  float small = (float)(int32_t)magnitude * 0x1p-24f;                                /* zero or subnormal: exact */
  memcpy(&tiny, &small, sizeof tiny);
  return float_of_bits((tiny & is_tiny) | (normal & ~is_tiny));
}

GMI_UNTOLD static void squares(const unsigned char *bytes, uint32_t dtype, uint32_t count,
                               double *restrict squares_out) {
  switch (dtype) {
  case GEMINI_DTYPE_F32:
    for (uint32_t i = 0; i < count; i++) {
      float value;
      memcpy(&value, bytes + i * sizeof value, sizeof value); /* may be unaligned */
      squares_out[i] = (double)value * (double)value;
    }
    break;
  case GEMINI_DTYPE_BF16:
    for (uint32_t i = 0; i < count; i++) {
      uint16_t bits;
      memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
      double value = (double)float_of_bits((uint32_t)bits << 16);
      squares_out[i] = value * value;
    }
    break;
  case GEMINI_DTYPE_F16:
    for (uint32_t i = 0; i < count; i++) {
      uint16_t bits;
      memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
      double value = (double)magnitude_of_f16(bits);
      squares_out[i] = value * value;
    }
    break;
  default: /* F64 */
    for (uint32_t i = 0; i < count; i++) {
      double value;
      memcpy(&value, bytes + i * sizeof value, sizeof value);
      squares_out[i] = value * value;
    }
    break;
  }
}

/* Sums `blocks` blocks side by side. Values are squared a tile at a time, which the compiler can vectorise; the
 * additions cannot be reordered. blocks is a constant in every call, so its loops are unrolled. */
GMI_UNTOLD static inline void sum_blocks(const unsigned char *bytes, uint32_t dtype, uint64_t count,
                                         const uint32_t blocks, double *sums_out) {
  double tile[TOGETHER][TILE], sums[TOGETHER] = { 0 };
  for (uint64_t at = 0; at < count; at += TILE) {
    uint32_t size = count - at < TILE ? (uint32_t)(count - at) : TILE;
    for (uint32_t b = 0; b < blocks; b++)
      squares(bytes + (b * count + at) * gmi_dtype_bytes(dtype), dtype, size, tile[b]);
    for (uint32_t i = 0; i < size; i++)
      for (uint32_t b = 0; b < blocks; b++) sums[b] += tile[b][i];
  }
  for (uint32_t b = 0; b < blocks; b++) sums_out[b] = sums[b];
}

double gmi_sum_squares(const void *src, uint32_t dtype, uint64_t count) {
  double sum;
  gmi_reads(src, count * gmi_dtype_bytes(dtype));
  sum_blocks(src, dtype, count, 1, &sum);
  return sum;
}

void gmi_sum_squares_each(const void *src, uint32_t dtype, uint64_t count, uint64_t blocks, double *sums_out) {
  const unsigned char *bytes = src;
  uint64_t b = 0, block_bytes = count * gmi_dtype_bytes(dtype);
  gmi_reads(src, blocks * block_bytes);
  for (; blocks - b >= TOGETHER; b += TOGETHER)
    sum_blocks(bytes + b * block_bytes, dtype, count, TOGETHER, sums_out + b);
  for (; b < blocks; b++) sum_blocks(bytes + b * block_bytes, dtype, count, 1, sums_out + b);
}
