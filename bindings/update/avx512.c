/* The update kernels with AVX-512 as Skylake servers have it; built with -mavx512f, bw, dq, vl.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Empty where it is compiled without these flags. Conversions give the bits of plain.c. */
#ifdef __AVX512F__
#include <immintrin.h>

#include "update/update.h"

#define KERNEL(update) gmi_##update##_avx512
#define WIDTH 16u
typedef __m512 vec_t;
typedef struct sums {
  __m512d low, high;
} sums_t;

static inline __m512 vec_all(float x) { return _mm512_set1_ps(x); }
static inline __m512 vec_root(__m512 v) { return _mm512_sqrt_ps(v); }
static inline __m512 vec_least(__m512 v, __m512 w) { return _mm512_min_ps(v, w); }
static inline __m512 vec_load(const float *src) { return _mm512_loadu_ps(src); }
static inline void vec_store(float *dst, __m512 v) { _mm512_storeu_ps(dst, v); }

static inline __m256i load_half(const uint16_t *src) { return _mm256_loadu_si256((const __m256i *)src); }
static inline void store_half(uint16_t *dst, __m256i v) { _mm256_storeu_si256((__m256i *)dst, v); }
static inline __mmask16 is_nan(__m512 v) { return _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q); }

static inline __m512 vec_load_bf16(const uint16_t *src) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(src)), 16));
}
static inline __m256i to_bf16(__m512 v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(bits, is_nan(v), _mm512_set1_epi32(0x7fc0)));
}
static inline void vec_store_bf16(uint16_t *dst, __m512 v) { store_half(dst, to_bf16(v)); }
static inline __m512 vec_load_f16(const uint16_t *src) { return _mm512_cvtph_ps(load_half(src)); }
static inline __m256i to_f16(__m512 v) {
  __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm256_mask_mov_epi16(half, is_nan(v), _mm256_set1_epi16(0x7e00));
}
static inline void vec_store_f16(uint16_t *dst, __m512 v) { store_half(dst, to_f16(v)); }

typedef uint32_t bits_t __attribute__((vector_size(64)));
static inline bits_t bits_all(uint32_t x) { return (bits_t)_mm512_set1_epi32((int)x); }
static inline bits_t bits_lanes(void) { return (bits_t){ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 }; }
static inline bits_t bits_of_vec(__m512 v) { return (bits_t)_mm512_castps_si512(v); }
static inline __m512 vec_of_bits(bits_t b) { return _mm512_castsi512_ps((__m512i)b); }
static inline bits_t bits_where_nan(__m512 v, bits_t a, bits_t b) {
  return (bits_t)_mm512_mask_mov_epi32((__m512i)b, is_nan(v), (__m512i)a);
}
static inline bits_t bits_load16(const uint16_t *src) { return (bits_t)_mm512_cvtepu16_epi32(load_half(src)); }
static inline void bits_store16(uint16_t *dst, bits_t b) { store_half(dst, _mm512_cvtepi32_epi16((__m512i)b)); }
static inline bits_t bits_load8(const uint8_t *src) {
  return (bits_t)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)src));
}
static inline void bits_store8(uint8_t *dst, bits_t b) {
  _mm_storeu_si128((__m128i *)dst, _mm512_cvtepi32_epi8((__m512i)b));
}
static inline bits_t bits_max(bits_t a, bits_t b) { return (bits_t)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static inline bits_t bits_less(__m512 v, __m512 w) {
  return (bits_t)_mm512_movm_epi32(_mm512_cmp_ps_mask(v, w, _CMP_LT_OQ));
}
static inline bits_t bits_of_number(__m512 v) { return (bits_t)_mm512_cvttps_epi32(v); }
static inline __m512 vec_of_number(bits_t b) { return _mm512_cvtepi32_ps((__m512i)b); }
static inline __m512 vec_pick(const float *table, bits_t b) {
  const __m512 twice = _mm512_castsi512_ps(_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)table)));
  return _mm512_permutexvar_ps((__m512i)(b & bits_all(7)), twice);
}

#define KERNEL_BESIDE
static inline void vec_stream(float *dst, __m512 v) { _mm512_stream_ps(dst, v); }
static inline void vec_stream_bf16(uint16_t *dst, __m512 v) { _mm256_stream_si256((__m256i *)dst, to_bf16(v)); }
static inline void vec_stream_f16(uint16_t *dst, __m512 v) { _mm256_stream_si256((__m256i *)dst, to_f16(v)); }
static inline void stream_end(void) { _mm_sfence(); }

static inline sums_t sums_load(const double *lanes) {
  return (sums_t){ _mm512_loadu_pd(lanes), _mm512_loadu_pd(lanes + 8) };
}
static inline void sums_store(double *lanes, const sums_t *s) {
  _mm512_storeu_pd(lanes, s->low);
  _mm512_storeu_pd(lanes + 8, s->high);
}
static inline void sums_add(sums_t *s, uint32_t i, __m512 v) {
  __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
  (void)i;
  s->low += low * low;
  s->high += high * high;
}

#include "update/kernel.h"
#endif
