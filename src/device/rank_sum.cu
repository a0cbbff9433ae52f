/* Sums and maxima over ranks, or of two arrays, on a GPU, with the bits of gmi_reduce() in sum.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The build does not compile this file: it embeds rank_sum.ptx, which cmake/ptx.py makes from it.
 *
 * Conversions are those of sum.c, operation by operation. Only the payload of a NaN that an addition makes may differ,
 * as processors differ there, too. Where addresses allow it, a thread takes 16 bytes of each rank at a time. */
#include <stdint.h>

/* As gmi_rank_sum_t of rank_sum.h. */
struct args {
  unsigned char *own;
  const unsigned char *others;
  uint64_t slot_bytes, count;
  uint32_t rank, ranks, dtype, reduce;
};
enum { F32 = 0, BF16 = 1, F16 = 2, F64 = 3 };  /* as GEMINI_DTYPE_* */
enum { SUM = 0, SUM_ROUNDED = 1, MAXIMUM = 2 }; /* as gmi_reduce_t */

__device__ __forceinline__ float of_bf16(uint16_t half) { return __uint_as_float((uint32_t)half << 16); }
__device__ __forceinline__ uint16_t to_bf16(float value) {
  uint32_t bits = __float_as_uint(value);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
__device__ __forceinline__ float of_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  if (magnitude < 0x0400u) return __uint_as_float(__float_as_uint(__fmul_rn((float)magnitude, 0x1p-24f)) | sign);
  return __uint_as_float(sign | ((magnitude << 13) + ((magnitude < 0x7C00u ? 112u : 224u) << 23)));
}
__device__ __forceinline__ uint16_t to_f16(float value) {
  uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (value != value) return (uint16_t)(sign | 0x7E00u | (magnitude >> 13 & 0x1FFu));
  if (magnitude >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);
  if (magnitude < 0x38800000u)
    return (uint16_t)(sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - __float_as_uint(0.5f)));
  return (uint16_t)(sign | ((magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13));
}

/* A type of values: as they are stored (raw), and as they are added (wide). */
template <uint32_t DTYPE> struct type_of;
template <> struct type_of<F32> {
  typedef float raw, wide;
  static __device__ __forceinline__ float widen(float value) { return value; }
  static __device__ __forceinline__ float narrow(float value) { return value; }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
};
template <> struct type_of<F64> {
  typedef double raw, wide;
  static __device__ __forceinline__ double widen(double value) { return value; }
  static __device__ __forceinline__ double narrow(double value) { return value; }
  static __device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
};
template <> struct type_of<BF16> {
  typedef uint16_t raw;
  typedef float wide;
  static __device__ __forceinline__ float widen(uint16_t value) { return of_bf16(value); }
  static __device__ __forceinline__ uint16_t narrow(float value) { return to_bf16(value); }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
};
template <> struct type_of<F16> {
  typedef uint16_t raw;
  typedef float wide;
  static __device__ __forceinline__ float widen(uint16_t value) { return of_f16(value); }
  static __device__ __forceinline__ uint16_t narrow(float value) { return to_f16(value); }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
};

/* LOAD: what a thread loads of a rank at a time, one value or several. */
template <uint32_t DTYPE, typename LOAD>
__device__ __forceinline__ void combine(const args &a, uint64_t at /* bytes */) {
  typedef type_of<DTYPE> type;
  typedef typename type::raw raw;
  const uint32_t each = sizeof(LOAD) / sizeof(raw);
  union {
    LOAD load;
    raw values[each];
  } now;
  typename type::wide sums[each];
  const unsigned char *other = a.others + at;
#pragma unroll 1
  for (uint32_t r = 0; r < a.ranks; r++) {
    if (r == a.rank) {
      now.load = *(const LOAD *)(a.own + at);
    } else {
      now.load = *(const LOAD *)other;
      other += a.slot_bytes;
    }
#pragma unroll
    for (uint32_t i = 0; i < each; i++) {
      typename type::wide more = type::widen(now.values[i]);
      if (r == 0) {
        sums[i] = more;
      } else if (a.reduce == MAXIMUM) {
        if (more != more || sums[i] < more) sums[i] = more;
      } else {
        sums[i] = type::add(sums[i], more);
        if (a.reduce == SUM_ROUNDED) sums[i] = type::widen(type::narrow(sums[i]));
      }
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < each; i++) now.values[i] = type::narrow(sums[i]);
  *(LOAD *)(a.own + at) = now.load;
}

template <uint32_t DTYPE> __device__ __forceinline__ void combine_all(const args &a) {
  typedef typename type_of<DTYPE>::raw raw;
  const uint64_t bytes = a.count * sizeof(raw), whole = (uint64_t)a.own % 16 ? 0 : bytes / 16 * 16;
  const uint64_t thread = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (uint64_t)gridDim.x * blockDim.x;
#pragma unroll 1
  for (uint64_t at = thread * 16; at < whole; at += threads * 16) combine<DTYPE, uint4>(a, at);
#pragma unroll 1
  for (uint64_t at = whole + thread * sizeof(raw); at < bytes; at += threads * sizeof(raw)) combine<DTYPE, raw>(a, at);
}

extern "C" __global__ void gmi_rank_sum(args a) {
  switch (a.dtype) {
  case F32: return combine_all<F32>(a);
  case BF16: return combine_all<BF16>(a);
  case F16: return combine_all<F16>(a);
  default: return combine_all<F64>(a);
  }
}
