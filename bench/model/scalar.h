/* The arithmetic of single numbers in a GPT, one text for the CPU's operators and the GPU's kernels, so that both give
 * the same bits: both compilers must keep products and sums apart (-ffp-contract=off, -fmad=false).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_SCALAR_H
#define BENCH_SCALAR_H

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define GPT_INLINE static __device__ __forceinline__
#else
#define GPT_INLINE static inline
#endif

typedef union gpt_bits {
  float f;
  uint32_t u;
} gpt_bits_t;

/* ---- bf16: the upper half of an fp32 ---- */

/* Round to nearest, ties to even. A NaN stays a NaN of the same sign. */
GPT_INLINE uint16_t gpt_bf16_from_f32(float value) {
  gpt_bits_t bits;
  bits.f = value;
  uint32_t rounded = (bits.u + 0x7fffu + ((bits.u >> 16) & 1u)) >> 16;
  uint32_t quiet_nan = (bits.u >> 16) | 0x40u; /* rounding could carry a NaN into an infinity or a zero */
  return (uint16_t)((bits.u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}
GPT_INLINE float gpt_f32_from_bf16(uint16_t value) {
  gpt_bits_t bits;
  bits.u = (uint32_t)value << 16;
  return bits.f;
}

/* ---- Functions ---- */

/* e^x within 2 units in the last place, and the same on every machine, as expf() is not. No branch and no comparison
 * of floats, so that loops over it use vectors. Beyond +-87 it gives e^+-87; a NaN or an infinity gives a NaN. */
GPT_INLINE float gpt_exponential(float x) {
  gpt_bits_t clamped, shifted, power;
  clamped.f = x;
  uint32_t sign = clamped.u & 0x80000000u, magnitude = clamped.u & 0x7fffffffu;
  clamped.u = sign | (magnitude > 0x42ae0000u ? 0x42ae0000u : magnitude); /* 87 */
  shifted.f = clamped.f * 1.44269504f + 12582912.0f;                      /* 1.5 * 2^23: n is left in the low bits */
  float n = shifted.f - 12582912.0f;
  float r = (clamped.f - n * 0.693359375f) - n * -2.12194440e-4f; /* ln 2 in two parts: |r| <= 0.35 */
  float p = 1.9875691500e-4f;                                     /* polynomial of Cephes expf */
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  power.u = (shifted.u << 23) + 0x3f800000u; /* 2^n */
  return p * power.f + 0.0f * x;             /* the last term brings a NaN back, which the clamp has lost */
}

GPT_INLINE float gpt_hyperbolic_tangent(float x) { return 1.0f - 2.0f / (gpt_exponential(2.0f * x) + 1.0f); }

#define GPT_GELU_SLOPE 0.79788456f /* sqrt(2 / pi) */
#define GPT_GELU_CUBIC 0.044715f

GPT_INLINE float gpt_gelu_of(float x) {
  float tangent = gpt_hyperbolic_tangent(GPT_GELU_SLOPE * (x + GPT_GELU_CUBIC * x * x * x));
  return 0.5f * x * (1.0f + tangent);
}
/* Its derivative. */
GPT_INLINE float gpt_gelu_slope(float x) {
  float tangent = gpt_hyperbolic_tangent(GPT_GELU_SLOPE * (x + GPT_GELU_CUBIC * x * x * x));
  float inner = GPT_GELU_SLOPE * (1.0f + 3.0f * GPT_GELU_CUBIC * x * x);
  return 0.5f * (1.0f + tangent) + 0.5f * x * (1.0f - tangent * tangent) * inner;
}

/* ---- AdamW ---- */

/* One step's constants; gpt_adamw_factors() makes them, on the host. */
typedef struct gpt_adamw_factors {
  float beta1, beta2, epsilon;
  float scale;     /* of the gradient */
  float step_size; /* learning rate / (1 - beta1^step) */
  float variance;  /* 1 / (1 - beta2^step) */
  float kept;      /* 1 - learning rate * weight decay */
} gpt_adamw_factors_t;

typedef struct gpt_adamw_element {
  float master, momentum, variance;
} gpt_adamw_element_t;

GPT_INLINE gpt_adamw_element_t gpt_adamw_of(gpt_adamw_factors_t f, uint16_t gradient, gpt_adamw_element_t e) {
  float g = gpt_f32_from_bf16(gradient) * f.scale;
  float m = f.beta1 * e.momentum + (1.0f - f.beta1) * g;
  float v = f.beta2 * e.variance + (1.0f - f.beta2) * g * g;
  e.master = f.kept * e.master - f.step_size * m / (sqrtf(v * f.variance) + f.epsilon);
  e.momentum = m;
  e.variance = v;
  return e;
}

#endif
