/* The update kernels of the GPU. SPDX-License-Identifier: Apache-2.0
 *
 * The build does not compile this file: it embeds kernels.ptx, which cmake/ptx.py makes from it.
 *
 * Operations and their order are those of kernel.h, each rounded to nearest by name, so that nothing is fused. A block
 * does a tile of GMI_TILE elements; its squares go through shared memory to GMI_LANES threads, which add them up in
 * the order that update.h tells. Each of these adds up 64 squares, less time than the tile's bytes take. */
#include "update/update.h"

#define THREADS 256u
#define EACH 4u
static_assert(THREADS * EACH == GMI_TILE, "a block does a tile");

__device__ __forceinline__ float float_of_half(uint32_t half, uint32_t dtype) {
  float value;
  if (dtype == GEMINI_DTYPE_BF16) return __uint_as_float(half << 16);
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)half));
  return value;
}
__device__ __forceinline__ uint32_t half_of_float(float value, uint32_t dtype) {
  uint16_t half;
  uint32_t bits = __float_as_uint(value);
  if (dtype == GEMINI_DTYPE_BF16) return value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return value != value ? 0x7e00 : half;
}

/* An update of one element, and which arrays beside master it has: what it does not have it does not touch. */
__device__ __forceinline__ void step(const gmi_adamw_t &k, float grad, float *p, float *m, float *v) {
  float g = __fadd_rn(__fmul_rn(grad, k.grad_scale), __fmul_rn(k.l2, *p));
  *m = __fadd_rn(__fmul_rn(k.beta1, *m), __fmul_rn(k.one_minus_beta1, g));
  *v = __fadd_rn(__fmul_rn(k.beta2, *v), __fmul_rn(__fmul_rn(k.one_minus_beta2, g), g));
  float ratio = __fdiv_rn(*m, __fadd_rn(__fmul_rn(__fsqrt_rn(*v), k.root_scale), k.eps));
  *p = __fsub_rn(*p, __fadd_rn(__fmul_rn(k.step_size, ratio), __fmul_rn(k.decay, *p)));
}
__device__ __forceinline__ bool has_momentum(const gmi_adamw_t &) { return true; }
__device__ __forceinline__ bool has_variance(const gmi_adamw_t &) { return true; }

/* AdamW with narrow states: the same step. */
struct narrow_t {
  gmi_adamw_t k;
  uint32_t param_dtype, grad_dtype;
};
__device__ __forceinline__ void step(const narrow_t &k, float grad, float *p, float *m, float *v) {
  step(k.k, grad, p, m, v);
}
__device__ __forceinline__ bool has_momentum(const narrow_t &) { return true; }
__device__ __forceinline__ bool has_variance(const narrow_t &) { return true; }

__device__ __forceinline__ void step(const gmi_sgd_t &k, float grad, float *p, float *m, float *) {
  float g = __fadd_rn(__fmul_rn(grad, k.grad_scale), __fmul_rn(k.l2, *p));
  if (k.flags & GMI_SGD_MOMENTUM) {
    *m = k.flags & GMI_SGD_BEGINS ? g : __fadd_rn(__fmul_rn(k.momentum, *m), __fmul_rn(k.one_minus_dampening, g));
    g = k.flags & GMI_SGD_NESTEROV ? __fadd_rn(g, __fmul_rn(k.momentum, *m)) : *m;
  }
  *p = __fsub_rn(*p, __fmul_rn(k.lr, g));
}
__device__ __forceinline__ bool has_momentum(const gmi_sgd_t &k) { return k.flags & GMI_SGD_MOMENTUM; }
__device__ __forceinline__ bool has_variance(const gmi_sgd_t &) { return false; }

/* Four elements from i on, which lie at a multiple of their size. */
__device__ __forceinline__ void load4(float out[EACH], const void *base, uint64_t i, uint32_t dtype) {
  if (dtype == GEMINI_DTYPE_F32) {
    float4 four = *(const float4 *)((const float *)base + i);
    out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
  } else {
    uint2 four = *(const uint2 *)((const uint16_t *)base + i);
    out[0] = float_of_half(four.x & 0xffff, dtype), out[1] = float_of_half(four.x >> 16, dtype);
    out[2] = float_of_half(four.y & 0xffff, dtype), out[3] = float_of_half(four.y >> 16, dtype);
  }
}
__device__ __forceinline__ void store4(void *base, uint64_t i, uint32_t dtype, const float in[EACH]) {
  if (dtype == GMI_DTYPE_NONE) return;
  if (dtype == GEMINI_DTYPE_F32) {
    *(float4 *)((float *)base + i) = make_float4(in[0], in[1], in[2], in[3]);
  } else {
    *(uint2 *)((uint16_t *)base + i) = make_uint2(half_of_float(in[0], dtype) | half_of_float(in[1], dtype) << 16,
                                                  half_of_float(in[2], dtype) | half_of_float(in[3], dtype) << 16);
  }
}
__device__ __forceinline__ float load1(const void *base, uint64_t i, uint32_t dtype) {
  return dtype == GEMINI_DTYPE_F32 ? ((const float *)base)[i] : float_of_half(((const uint16_t *)base)[i], dtype);
}
__device__ __forceinline__ void store1(void *base, uint64_t i, uint32_t dtype, float in) {
  if (dtype == GMI_DTYPE_NONE) return;
  if (dtype == GEMINI_DTYPE_F32) {
    ((float *)base)[i] = in;
  } else {
    ((uint16_t *)base)[i] = (uint16_t)half_of_float(in, dtype);
  }
}
__device__ __forceinline__ bool is_aligned(const void *base, uint32_t dtype) {
  return (uint64_t)base % (dtype == GEMINI_DTYPE_F32 ? 16 : 8) == 0;
}

/* How states are kept: fp32, and masters beside parameters; or narrow, as kernel.h has it. */
template <typename update_t> constexpr bool is_narrow = false;
template <> constexpr bool is_narrow<narrow_t> = true;
template <typename update_t> __device__ __forceinline__ uint32_t momentum_dtype(const update_t &) {
  return GEMINI_DTYPE_F32;
}
template <typename update_t> __device__ __forceinline__ uint32_t variance_dtype(const update_t &) {
  return GEMINI_DTYPE_F32;
}
template <typename update_t> __device__ __forceinline__ bool is_split(const update_t &) { return false; }
template <typename update_t> __device__ __forceinline__ uint32_t random_bits(const update_t &, uint64_t) { return 0; }
__device__ __forceinline__ uint32_t momentum_dtype(const narrow_t &k) { return k.k.momentum_dtype; }
__device__ __forceinline__ uint32_t variance_dtype(const narrow_t &k) { return k.k.variance_dtype; }
__device__ __forceinline__ bool is_split(const narrow_t &k) { return k.k.split; }
__device__ __forceinline__ uint32_t random_bits(const narrow_t &k, uint64_t i) {
  uint32_t x = k.k.first + (uint32_t)i;
  GMI_RANDOM(x, k.k.keys[0], k.k.keys[1]);
  return x;
}
__device__ __forceinline__ uint32_t state_of_float(float value, uint32_t random) {
  return value != value ? 0x7fc0 : (__float_as_uint(value) + random) >> 16;
}
__device__ __forceinline__ float float_of_split(uint32_t upper, uint32_t lower) {
  return __uint_as_float((upper << 16) + (lower ^ 0x8000) - 0x8000);
}
__device__ __forceinline__ uint32_t upper_of_float(float value) {
  return value != value ? 0x7fc0 : (__float_as_uint(value) + 0x8000) >> 16;
}
__device__ __forceinline__ uint32_t lower_of_float(float value) {
  return value != value ? 0 : __float_as_uint(value) & 0xffff;
}
__device__ __forceinline__ void store_state4(void *base, uint64_t i, uint32_t dtype, const float in[EACH],
                                             const uint32_t random[EACH]) {
  if (dtype == GEMINI_DTYPE_F32) {
    store4(base, i, dtype, in);
  } else {
    *(uint2 *)((uint16_t *)base + i) =
        make_uint2(state_of_float(in[0], random[0]) | state_of_float(in[1], random[1]) << 16,
                   state_of_float(in[2], random[2]) | state_of_float(in[3], random[3]) << 16);
  }
}
__device__ __forceinline__ void store_state1(void *base, uint64_t i, uint32_t dtype, float in, uint32_t random) {
  if (dtype == GEMINI_DTYPE_F32) {
    ((float *)base)[i] = in;
  } else {
    ((uint16_t *)base)[i] = (uint16_t)state_of_float(in, random);
  }
}
__device__ __forceinline__ void load_split4(float out[EACH], const gmi_arrays_t &a, uint64_t i) {
  uint2 upper = *(const uint2 *)((const uint16_t *)a.param + i);
  uint2 lower = *(const uint2 *)((const uint16_t *)a.master + i);
  out[0] = float_of_split(upper.x & 0xffff, lower.x & 0xffff), out[1] = float_of_split(upper.x >> 16, lower.x >> 16);
  out[2] = float_of_split(upper.y & 0xffff, lower.y & 0xffff), out[3] = float_of_split(upper.y >> 16, lower.y >> 16);
}
__device__ __forceinline__ void store_split4(const gmi_arrays_t &a, uint64_t i, const float in[EACH]) {
  *(uint2 *)((uint16_t *)a.param + i) = make_uint2(upper_of_float(in[0]) | upper_of_float(in[1]) << 16,
                                                   upper_of_float(in[2]) | upper_of_float(in[3]) << 16);
  *(uint2 *)((uint16_t *)a.master + i) = make_uint2(lower_of_float(in[0]) | lower_of_float(in[1]) << 16,
                                                    lower_of_float(in[2]) | lower_of_float(in[3]) << 16);
}

__device__ __forceinline__ double square(float value) { return __dmul_rn((double)value, (double)value); }

/* Adds up the squares of a tile, in the order that update.h tells. */
__device__ __forceinline__ void add_up(const double squares[GMI_TILE], double lanes[GMI_LANES], double *sums) {
  const uint32_t thread = threadIdx.x;
  __syncthreads();
  if (thread < GMI_LANES) {
    double sum = 0.0;
#pragma unroll 8
    for (uint32_t j = thread; j < GMI_TILE; j += GMI_LANES) sum = __dadd_rn(sum, squares[j]);
    lanes[thread] = sum;
  }
  __syncthreads();
  if (thread == 0) {
    double sum = lanes[0];
#pragma unroll
    for (uint32_t j = 1; j < GMI_LANES; j++) sum = __dadd_rn(sum, lanes[j]);
    sums[1 + blockIdx.x] = sum;
  }
}

template <typename update_t>
__device__ __forceinline__ void update(const update_t &k, const gmi_arrays_t &a, uint64_t count, double *sums) {
  __shared__ double squares[GMI_TILE], lanes[GMI_LANES];
  const uint64_t first = (uint64_t)blockIdx.x * GMI_TILE;
  const uint32_t thread = threadIdx.x;
  const bool momentum = has_momentum(k), variance = has_variance(k);
  const bool aligned = is_aligned(a.param, k.param_dtype) && is_aligned(a.grad, k.grad_dtype) &&
                       is_aligned(a.master, is_split(k) ? GEMINI_DTYPE_BF16 : GEMINI_DTYPE_F32) &&
                       (!momentum || is_aligned(a.momentum, momentum_dtype(k))) &&
                       (!variance || is_aligned(a.variance, variance_dtype(k)));
  if (aligned && count - first >= GMI_TILE) {
    const uint64_t i = first + thread * EACH;
    float g[EACH], p[EACH], m[EACH] = { 0 }, v[EACH] = { 0 };
    uint32_t low[EACH], high[EACH]; /* random bits, of momentum and variance */
    load4(g, a.grad, i, k.grad_dtype);
    if (is_split(k)) {
      load_split4(p, a, i);
    } else {
      load4(p, a.master, i, GEMINI_DTYPE_F32);
    }
    if (momentum) load4(m, a.momentum, i, momentum_dtype(k));
    if (variance) load4(v, a.variance, i, variance_dtype(k));
#pragma unroll
    for (uint32_t j = 0; j < EACH; j++) {
      if (sums) squares[thread * EACH + j] = square(g[j]);
      step(k, g[j], &p[j], &m[j], &v[j]);
      const uint32_t random = random_bits(k, i + j);
      low[j] = random & 0xffff, high[j] = random >> 16;
    }
    if (momentum) store_state4(a.momentum, i, momentum_dtype(k), m, low);
    if (variance) store_state4(a.variance, i, variance_dtype(k), v, high);
    if (is_split(k)) {
      store_split4(a, i, p);
    } else {
      store4(a.master, i, GEMINI_DTYPE_F32, p);
      store4(a.param, i, k.param_dtype, p);
    }
  } else {
#pragma unroll 1
    for (uint32_t j = thread; j < GMI_TILE; j += THREADS) {
      const uint64_t i = first + j;
      squares[j] = 0.0; /* adding it changes no sum of squares */
      if (i >= count) continue;
      float g = load1(a.grad, i, k.grad_dtype);
      squares[j] = square(g);
      if constexpr (is_narrow<update_t>) {
        float p = is_split(k) ? float_of_split(((const uint16_t *)a.param)[i], ((const uint16_t *)a.master)[i])
                              : ((const float *)a.master)[i];
        float m = load1(a.momentum, i, momentum_dtype(k)), v = load1(a.variance, i, variance_dtype(k));
        const uint32_t random = random_bits(k, i);
        step(k, g, &p, &m, &v);
        store_state1(a.momentum, i, momentum_dtype(k), m, random & 0xffff);
        store_state1(a.variance, i, variance_dtype(k), v, random >> 16);
        if (is_split(k)) {
          ((uint16_t *)a.param)[i] = (uint16_t)upper_of_float(p);
          ((uint16_t *)a.master)[i] = (uint16_t)lower_of_float(p);
        } else {
          ((float *)a.master)[i] = p;
          store1(a.param, i, k.param_dtype, p);
        }
      } else {
        float *master = (float *)a.master;
        step(k, g, master + i, (float *)a.momentum + i, (float *)a.variance + i);
        store1(a.param, i, k.param_dtype, master[i]);
      }
    }
  }
  if (sums) add_up(squares, lanes, sums);
}

/* Codes of blocks, as kernel.h computes them. */
__constant__ const float powers_of_codes[2][8] = { GMI_POWERS_OF_CODES }, powers[8] = { GMI_POWERS };
__constant__ const float edges_of_momenta[6] = { GMI_EDGES_OF_MOMENTA };
__constant__ const float lowest_of_variances[2][6] = { GMI_LOWEST_OF_VARIANCES };

__device__ __forceinline__ float decode(uint32_t code, float scale, uint32_t top, bool coarse) {
  if (coarse) code &= 0xfe;
  const uint32_t magnitude = code & (top == 6 ? 0x7f : 0xff);
  const uint32_t bits = __float_as_uint(__uint2float_rn(magnitude)), exponent = bits >> 23;
  const float fraction = __fsub_rn(__uint_as_float((bits & 0x7fffff) | 0x3f800000), 1.0f);
  const float middle = __uint_as_float(((coarse ? 254 : 253) - exponent) << 23);
  float value = __fmul_rn(__fadd_rn(0.1f, __fmul_rn(0.9f, __fadd_rn(fraction, middle))),
                          powers_of_codes[top - 6][(exponent - 127) & 7]);
  const bool one = top == 6 && !coarse && code == 0x80;
  if (magnitude == 0) value = 0.0f;
  if (one) value = 1.0f;
  value = __fmul_rn(value, scale);
  return top == 6 && !one && code & 0x80 ? __uint_as_float(__float_as_uint(value) ^ 0x80000000) : value;
}
__device__ __forceinline__ uint32_t encode_momentum(float value, float scale, bool coarse) {
  const uint32_t sign = __float_as_uint(value) >> 31;
  const float x = __fdiv_rn(__uint_as_float(__float_as_uint(value) & 0x7fffffff), scale);
  uint32_t decade = 0;
#pragma unroll
  for (uint32_t i = 0; i < 6; i++) decade += x < edges_of_momenta[i];
  const uint32_t count = 1u << (6 - decade);
  const float fraction = __fmul_rn(__fsub_rn(__fmul_rn(x, powers[decade]), 0.1f), GMI_WIDENED);
  const float place = __fmul_rn(fraction, __uint2float_rn(count));
  const uint32_t index = place < __uint2float_rn(count) ? (uint32_t)__float2int_rz(place) : count - 1;
  uint32_t code = count + index;
  if (coarse) code &= 0xfe;
  if (x < GMI_ZERO_OF_MOMENTA) code = 0;
  if (code) code |= sign << 7;
  return coarse || sign || x < GMI_ONE_OF_MOMENTA ? code : 0x80;
}
__device__ __forceinline__ float least(float v, float w) { return v < w ? v : w; }
__device__ __forceinline__ uint32_t encode_variance(float value, float scale, uint32_t random, bool coarse) {
  const float x = __fdiv_rn(value, scale);
  uint32_t decade = 0;
#pragma unroll
  for (uint32_t i = 0; i < 6; i++) decade += x < lowest_of_variances[coarse][i];
  const float count = __uint2float_rn(1u << ((coarse ? 6 : 7) - decade));
  const float fraction = __fmul_rn(__fsub_rn(__fmul_rn(x, powers[decade]), 0.1f), GMI_WIDENED);
  float place = __fadd_rn(__fmul_rn(fraction, count), __fsub_rn(count, 0.5f));
  place = least(place, __fmul_rn(__fadd_rn(place, __fsub_rn(__fmul_rn(4.0f, count), 2.0f)), 1.0f / 3));
  place = least(place, coarse ? 127.0f : 255.0f);
  uint32_t code = ((uint32_t)__float2int_rz(__fadd_rn(__fmul_rn(place, 65536.0f), 0.5f)) + random) >> 16;
  if (code < (coarse ? 1 : 2)) code = coarse ? 1 : 2;
  if (coarse) code <<= 1;
  return value > 0 ? code : 0;
}
/* The scale of a block, from the codes that its threads have; all of them call this. */
__device__ __forceinline__ float scale_of_codes(uint32_t code, uint32_t *shared) {
  const uint32_t bits = __ballot_sync(0xffffffff, code & 1);
  if (threadIdx.x == 0) *shared = bits & 0xffff;
  __syncthreads();
  const float scale = __uint_as_float(*shared << 16);
  __syncthreads();
  return scale;
}
/* The code that a value gets in its block, with the bit of the new scale; all threads of the block call this. */
__device__ __forceinline__ uint32_t code_in_block(float value, uint32_t random, uint32_t top, uint32_t *shared) {
  const bool coarse = threadIdx.x < GMI_SCALE_BITS;
  const float weighed = top == 7 && coarse ? __fmul_rn(value, GMI_ABOVE_COARSE) : value;
  uint32_t most = __float_as_uint(weighed) & 0x7fffffff;
#pragma unroll
  for (uint32_t i = 16; i; i /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, most, i);
    most = other > most ? other : most;
  }
  if (threadIdx.x == 0) *shared = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicMax(shared, most);
  __syncthreads();
  most = *shared;
  __syncthreads();
  if (top == 7) most = __float_as_uint(__fmul_rn(__uint_as_float(most), GMI_ABOVE_VARIANCES)) & 0x7fffffff;
  const uint32_t bits = most > GMI_MOST ? 0x7fc00000 : (most + 0xffff) & 0xffff0000;
  uint32_t code = 0;
  if (bits && most <= GMI_MOST)
    code = top == 6 ? encode_momentum(value, __uint_as_float(bits), coarse)
                    : encode_variance(value, __uint_as_float(bits), random, coarse);
  return coarse ? code | (bits >> (16 + threadIdx.x) & 1) : code;
}
__device__ __forceinline__ float load_coded(const void *base, uint64_t i, uint32_t dtype, uint32_t top,
                                            uint32_t *shared) {
  if (dtype != GEMINI_DTYPE_BLOCK8) return load1(base, i, dtype);
  const uint32_t code = ((const uint8_t *)base)[i];
  return decode(code, scale_of_codes(code, shared), top, threadIdx.x < GMI_SCALE_BITS);
}
__device__ __forceinline__ void store_coded(void *base, uint64_t i, uint32_t dtype, float value, uint32_t random,
                                            uint32_t top, uint32_t *shared) {
  if (dtype == GEMINI_DTYPE_BLOCK8) {
    ((uint8_t *)base)[i] = (uint8_t)code_in_block(value, random, top, shared);
  } else {
    store_state1(base, i, dtype, value, random);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gmi_adamw(const gmi_adamw_t k, const gmi_arrays_t a,
                                                               uint64_t count, double *sums) {
  update(k, a, count, sums);
}
extern "C" __global__ void __launch_bounds__(THREADS) gmi_narrow(const gmi_adamw_t k, const gmi_arrays_t a,
                                                                uint64_t count, double *sums) {
  update(narrow_t{ k, k.param_dtype, k.grad_dtype }, a, count, sums);
}
static_assert(THREADS == GMI_BLOCK, "a thread does an element of each block of a tile");
extern "C" __global__ void __launch_bounds__(THREADS) gmi_blocks(const gmi_adamw_t adamw, const gmi_arrays_t a,
                                                                uint64_t count, double *sums) {
  __shared__ double squares[GMI_TILE], lanes[GMI_LANES];
  __shared__ uint32_t shared;
  const narrow_t k = { adamw, adamw.param_dtype, adamw.grad_dtype };
#pragma unroll 1
  for (uint32_t begin = 0; begin < GMI_TILE; begin += GMI_BLOCK) {
    const uint64_t i = (uint64_t)blockIdx.x * GMI_TILE + begin + threadIdx.x;
    squares[begin + threadIdx.x] = 0.0;
    if (i >= count) continue; /* of all threads at once: count is of whole blocks */
    const float g = load1(a.grad, i, k.grad_dtype);
    float p = is_split(k) ? float_of_split(((const uint16_t *)a.param)[i], ((const uint16_t *)a.master)[i])
                          : ((const float *)a.master)[i];
    float m = load_coded(a.momentum, i, momentum_dtype(k), 6, &shared);
    float v = load_coded(a.variance, i, variance_dtype(k), 7, &shared);
    const uint32_t random = random_bits(k, i);
    squares[begin + threadIdx.x] = square(g);
    step(k, g, &p, &m, &v);
    store_coded(a.momentum, i, momentum_dtype(k), m, random & 0xffff, 6, &shared);
    store_coded(a.variance, i, variance_dtype(k), v, random >> 16, 7, &shared);
    if (is_split(k)) {
      ((uint16_t *)a.param)[i] = (uint16_t)upper_of_float(p);
      ((uint16_t *)a.master)[i] = (uint16_t)lower_of_float(p);
    } else {
      ((float *)a.master)[i] = p;
      store1(a.param, i, k.param_dtype, p);
    }
  }
  if (sums) add_up(squares, lanes, sums);
}
extern "C" __global__ void __launch_bounds__(THREADS) gmi_sgd(const gmi_sgd_t k, const gmi_arrays_t a, uint64_t count,
                                                             double *sums) {
  update(k, a, count, sums);
}

/* One block of GMI_TILE_LANES threads: adds up what an update left behind sums[0]. */
extern "C" __global__ void __launch_bounds__(GMI_TILE_LANES) gmi_update_sum(uint64_t tiles, double *sums) {
  __shared__ double lanes[GMI_TILE_LANES];
  const uint32_t thread = threadIdx.x;
  double sum = 0.0;
#pragma unroll 8
  for (uint64_t t = thread; t < tiles; t += GMI_TILE_LANES) sum = __dadd_rn(sum, sums[1 + t]);
  lanes[thread] = sum;
  __syncthreads();
  if (thread != 0) return;
#pragma unroll 8
  for (uint32_t j = 1; j < GMI_TILE_LANES; j++) sum = __dadd_rn(sum, lanes[j]);
  sums[0] = sum;
}
