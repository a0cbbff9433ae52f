/* Sums of squares on a GPU, by gmi_sum_squares()'s order of additions. SPDX-License-Identifier: Apache-2.0
 *
 * The build does not compile this file: it embeds sum_squares.ptx, which cmake/ptx.py makes from it.
 *
 * One block of 32 threads does one item. All of them load, convert and square; the first one alone adds, from left to
 * right: additions of one item cannot be shared out without changing the result, so the speed comes from many items at
 * once. Squares of F32, BF16 and F16 are exact in double; that of F64 is rounded, then added: never fused. */
#include <stdint.h>

#define THREADS 32u
#define EACH 8u
#define TILE (THREADS * EACH)
#define AHEAD 16u /* squares on their way from shared memory while others are added */

/* As gmi_cuda_sum_t of cuda_driver.h. */
struct item {
  const unsigned char *src;
  uint64_t count;
  double sum; /* the result */
  uint32_t dtype;
  uint32_t reserved;
};
enum { F32 = 0, BF16 = 1, F16 = 2, F64 = 3 }; /* as GEMINI_DTYPE_* */

__device__ __forceinline__ double double_of_f16(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return (double)value;
}

template <typename BITS> __device__ __forceinline__ void load(uint64_t bits[EACH], const BITS *src, uint64_t first,
                                                             uint64_t count) {
#pragma unroll
  for (uint32_t k = 0; k < EACH; k++) {
    uint64_t i = first + k * THREADS;
    bits[k] = i < count ? src[i] : 0;
  }
}

/* This thread's share of a tile: values first, first + THREADS, ...; 0 beyond the end. */
__device__ __forceinline__ void load_tile(double squares[EACH], const unsigned char *src, uint32_t dtype,
                                          uint64_t first, uint64_t count) {
  const uint32_t width = dtype == F64 ? 8 : dtype == F32 ? 4 : 2;
  uint64_t bits[EACH];
  if ((uint64_t)src % width) { /* slow, but right */
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
      uint64_t i = first + k * THREADS;
      bits[k] = 0;
#pragma unroll 1
      for (uint32_t b = 0; i < count && b < width; b++) bits[k] |= (uint64_t)src[i * width + b] << (8 * b);
    }
  } else if (width == 8) {
    load(bits, (const unsigned long long *)src, first, count);
  } else if (width == 4) {
    load(bits, (const uint32_t *)src, first, count);
  } else {
    load(bits, (const uint16_t *)src, first, count);
  }
#pragma unroll
  for (uint32_t k = 0; k < EACH; k++) {
    double value;
    if (dtype == F64) {
      value = __longlong_as_double((long long)bits[k]);
    } else if (dtype == F16) {
      value = double_of_f16((uint16_t)bits[k]);
    } else {
      value = (double)__uint_as_float((uint32_t)bits[k] << (dtype == BF16 ? 16 : 0));
    }
    squares[k] = __dmul_rn(value, value);
  }
}

extern "C" __global__ void gmi_sum_squares(item *items) {
  __shared__ double squares[TILE];
  item *it = &items[blockIdx.x];
  const unsigned char *src = it->src;
  const uint64_t count = it->count;
  const uint32_t dtype = it->dtype, thread = threadIdx.x;
  double sum = 0.0, mine[EACH];
  load_tile(mine, src, dtype, thread, count);
#pragma unroll 1
  for (uint64_t at = 0; at < count; at += TILE) {
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) squares[k * THREADS + thread] = mine[k];
    __syncwarp();
    /* The next tile is on its way while this one is added up. */
    load_tile(mine, src, dtype, at + TILE + thread, count);
    if (thread == 0) {
      if (count - at >= TILE) {
        double ahead[AHEAD];
#pragma unroll
        for (uint32_t k = 0; k < AHEAD; k++) ahead[k] = squares[k];
#pragma unroll 2
        for (uint32_t i = 0; i < TILE; i += AHEAD) {
          double now[AHEAD];
#pragma unroll
          for (uint32_t k = 0; k < AHEAD; k++) {
            now[k] = ahead[k];
            ahead[k] = squares[(i + AHEAD + k) % TILE];
          }
#pragma unroll
          for (uint32_t k = 0; k < AHEAD; k++) sum = __dadd_rn(sum, now[k]);
        }
      } else {
#pragma unroll 1
        for (uint32_t i = 0; i < (uint32_t)(count - at); i++) sum = __dadd_rn(sum, squares[i]);
      }
    }
    __syncwarp();
  }
  if (thread == 0) it->sum = sum;
}
