/* The update kernels with AVX2 and F16C; built with -mavx2 -mf16c. SPDX-License-Identifier: Apache-2.0
 *
 * Empty where it is compiled without these flags. Conversions give the bits of plain.c. */
#ifdef __AVX2__
#include <immintrin.h>

#include "update/update.h"

#define KERNEL(update) gmi_##update##_avx2
#define WIDTH 8u
typedef __m256 vec_t;
typedef struct sums {
  __m256d lanes[4];
} sums_t;

static inline __m256 vec_all(float x) { return _mm256_set1_ps(x); }
static inline __m256 vec_root(__m256 v) { return _mm256_sqrt_ps(v); }
static inline __m256 vec_least(__m256 v, __m256 w) { return _mm256_min_ps(v, w); }
static inline __m256 vec_load(const float *src) { return _mm256_loadu_ps(src); }
static inline void vec_store(float *dst, __m256 v) { _mm256_storeu_ps(dst, v); }

static inline __m128i load_half(const uint16_t *src) { return _mm_loadu_si128((const __m128i *)src); }
static inline void store_half(uint16_t *dst, __m128i v) { _mm_storeu_si128((__m128i *)dst, v); }
/* The low 16 bits of each element. packus saturates; elements are at most 65535 here, so it does not change them. */
static inline __m128i narrow(__m256i v) {
  return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
static inline __m256 is_nan(__m256 v) { return _mm256_cmp_ps(v, v, _CMP_UNORD_Q); }

static inline __m256 vec_load_bf16(const uint16_t *src) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(src)), 16));
}
static inline __m128i to_bf16(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  bits = _mm256_blendv_epi8(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(is_nan(v)));
  return narrow(bits);
}
static inline void vec_store_bf16(uint16_t *dst, __m256 v) { store_half(dst, to_bf16(v)); }
static inline __m256 vec_load_f16(const uint16_t *src) { return _mm256_cvtph_ps(load_half(src)); }
static inline __m128i to_f16(__m256 v) {
  __m256i nan = _mm256_castps_si256(is_nan(v));
  __m128i narrow_nan = _mm_packs_epi32(_mm256_castsi256_si128(nan), _mm256_extracti128_si256(nan, 1));
  __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), narrow_nan);
}
static inline void vec_store_f16(uint16_t *dst, __m256 v) { store_half(dst, to_f16(v)); }

typedef uint32_t bits_t __attribute__((vector_size(32)));
static inline bits_t bits_all(uint32_t x) { return (bits_t)_mm256_set1_epi32((int)x); }
static inline bits_t bits_lanes(void) { return (bits_t){ 0, 1, 2, 3, 4, 5, 6, 7 }; }
static inline bits_t bits_of_vec(__m256 v) { return (bits_t)_mm256_castps_si256(v); }
static inline __m256 vec_of_bits(bits_t b) { return _mm256_castsi256_ps((__m256i)b); }
static inline bits_t bits_where_nan(__m256 v, bits_t a, bits_t b) {
  return (bits_t)_mm256_blendv_epi8((__m256i)b, (__m256i)a, _mm256_castps_si256(is_nan(v)));
}
static inline bits_t bits_load16(const uint16_t *src) { return (bits_t)_mm256_cvtepu16_epi32(load_half(src)); }
static inline void bits_store16(uint16_t *dst, bits_t b) { store_half(dst, narrow((__m256i)b)); }
static inline bits_t bits_load8(const uint8_t *src) {
  return (bits_t)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)src));
}
static inline void bits_store8(uint8_t *dst, bits_t b) {
  const __m128i half = narrow((__m256i)b);
  _mm_storel_epi64((__m128i *)dst, _mm_packus_epi16(half, half));
}
static inline bits_t bits_max(bits_t a, bits_t b) { return (bits_t)_mm256_max_epi32((__m256i)a, (__m256i)b); }
static inline bits_t bits_less(__m256 v, __m256 w) {
  return (bits_t)_mm256_castps_si256(_mm256_cmp_ps(v, w, _CMP_LT_OQ));
}
static inline bits_t bits_of_number(__m256 v) { return (bits_t)_mm256_cvttps_epi32(v); }
static inline __m256 vec_of_number(bits_t b) { return _mm256_cvtepi32_ps((__m256i)b); }
static inline __m256 vec_pick(const float *table, bits_t b) {
  return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)b);
}

#define KERNEL_BESIDE
static inline void vec_stream(float *dst, __m256 v) { _mm256_stream_ps(dst, v); }
static inline void vec_stream_bf16(uint16_t *dst, __m256 v) { _mm_stream_si128((__m128i *)dst, to_bf16(v)); }
static inline void vec_stream_f16(uint16_t *dst, __m256 v) { _mm_stream_si128((__m128i *)dst, to_f16(v)); }
static inline void stream_end(void) { _mm_sfence(); }

static inline sums_t sums_load(const double *lanes) {
  sums_t s;
  for (int i = 0; i < 4; i++) s.lanes[i] = _mm256_loadu_pd(lanes + 4 * i);
  return s;
}
static inline void sums_store(double *lanes, const sums_t *s) {
  for (int i = 0; i < 4; i++) _mm256_storeu_pd(lanes + 4 * i, s->lanes[i]);
}
static inline void sums_add(sums_t *s, uint32_t i, __m256 v) {
  __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
  s->lanes[i / 4] += low * low;
  s->lanes[i / 4 + 1] += high * high;
}

#include "update/kernel.h"
#endif
