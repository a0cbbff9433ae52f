/* The update kernels of the host, written once for all instruction sets. SPDX-License-Identifier: Apache-2.0
 *
 * A source file defines the following for its instruction set, then includes this:
 *   KERNEL(update)              the name of an update's function
 *   WIDTH, vec_t                elements in a vector, and the vector type, which has + - * /
 *   vec_all(x), vec_root(v)     a vector with x in all elements; the square roots
 *   vec_least(v, w)             the smaller of each two; neither is NaN
 *   vec_load, vec_load_bf16, vec_load_f16 (src), vec_store and so on (dst, v): WIDTH elements at any address
 *   vec_stream, vec_stream_bf16, vec_stream_f16 (dst, v): the same past the caches, at a multiple of their size; only
 *                               with KERNEL_BESIDE, and stream_end()
 *   bits_t                      a vector of WIDTH uint32_t, which has ^ >> * + & |
 *   bits_all(x), bits_lanes()   x in all elements; 0, 1, 2 and so on
 *   bits_of_vec(v), vec_of_bits(b)  the same bits
 *   bits_where_nan(v, a, b)     a where v is NaN, otherwise b
 *   bits_load16(src), bits_store16(dst, b)  WIDTH uint16_t at any address; of b, which is below 2^16
 *   bits_load8(src), bits_store8(dst, b)    WIDTH uint8_t at any address; of b, which is below 2^8
 *   bits_max(a, b), bits_less(v, w)  of numbers below 2^31; all ones where v < w, otherwise 0
 *   bits_of_number(v), vec_of_number(b)  rounded towards 0; of numbers below 2^24, exact
 *   vec_pick(table, b)          table[b] of 8 floats
 *   sums_t, sums_load(lanes), sums_store(lanes, &sums)
 *   sums_add(&sums, i, v)       adds the squares of v to lanes i, i + 1, ...
 *
 * All instruction sets and the GPU must give bit-equal results. These follow from the order of operations, each rounded
 * once: do not reorder them, and compile without fusing (-ffp-contract=off). */
#include <stdbool.h>
#include <string.h>

#include "update/beside.h"
#include "update/update.h"

static inline __attribute__((always_inline)) vec_t load_any(const void *base, uint64_t i, uint32_t dtype) {
  if (dtype == GEMINI_DTYPE_BF16) return vec_load_bf16((const uint16_t *)base + i);
  if (dtype == GEMINI_DTYPE_F16) return vec_load_f16((const uint16_t *)base + i);
  return vec_load((const float *)base + i);
}
static inline __attribute__((always_inline)) void store_any(void *base, uint64_t i, uint32_t dtype, vec_t v) {
  if (dtype == GMI_DTYPE_NONE) return;
  if (dtype == GEMINI_DTYPE_BF16) {
    vec_store_bf16((uint16_t *)base + i, v);
  } else if (dtype == GEMINI_DTYPE_F16) {
    vec_store_f16((uint16_t *)base + i, v);
  } else {
    vec_store((float *)base + i, v);
  }
}

#ifdef KERNEL_BESIDE
static inline __attribute__((always_inline)) void stream_any(void *base, uint64_t i, uint32_t dtype, vec_t v) {
  if (dtype == GMI_DTYPE_NONE) return;
  if (dtype == GEMINI_DTYPE_BF16) {
    vec_stream_bf16((uint16_t *)base + i, v);
  } else if (dtype == GEMINI_DTYPE_F16) {
    vec_stream_f16((uint16_t *)base + i, v);
  } else {
    vec_stream((float *)base + i, v);
  }
}
#endif

/* Elements to prefetch ahead. The arithmetic, above all the divider, fills the processor's out-of-order window with few
 * loads in it, so that the hardware prefetches late. This distance raises AdamW from 0.8 to 0.95 of the speed of a
 * plain pass over the arrays. */
#define AHEAD 512u
static inline __attribute__((always_inline)) void prefetch(const void *base, uint64_t i, uint32_t dtype, bool write) {
  /* The address may lie beyond the array's end. Prefetching there has no effect, but pointer arithmetic beyond the end
   * would be undefined: hence integers. */
  const void *at = (const void *)((uintptr_t)base + (i + AHEAD) * (dtype == GEMINI_DTYPE_F32 ? 4 : 2));
  if (write) __builtin_prefetch(at, 1);
  else __builtin_prefetch(at, 0);
}

static inline __attribute__((always_inline)) void adamw_compute(const gmi_adamw_t *k, vec_t grad, vec_t *p, vec_t *m,
                                                                vec_t *v) {
  vec_t g = grad * vec_all(k->grad_scale) + vec_all(k->l2) * *p;
  *m = vec_all(k->beta1) * *m + vec_all(k->one_minus_beta1) * g;
  *v = vec_all(k->beta2) * *v + (vec_all(k->one_minus_beta2) * g) * g;
  vec_t ratio = *m / (vec_root(*v) * vec_all(k->root_scale) + vec_all(k->eps));
  *p = *p - (vec_all(k->step_size) * ratio + vec_all(k->decay) * *p);
}

/* One step of WIDTH elements: reads the old values at `at`, and leaves the new ones in the pointers. */
static inline __attribute__((always_inline)) void adamw_step(const gmi_adamw_t *k, const gmi_arrays_t *at, uint64_t i,
                                                             vec_t grad, vec_t *p_out, vec_t *m_out, vec_t *v_out) {
  *p_out = vec_load((const float *)at->master + i);
  *m_out = vec_load((const float *)at->momentum + i);
  *v_out = vec_load((const float *)at->variance + i);
  adamw_compute(k, grad, p_out, m_out, v_out);
}

void KERNEL(adamw)(const void *update, const gmi_arrays_t *a, uint64_t first, uint64_t count, double lanes[GMI_LANES]) {
  const gmi_adamw_t k = *(const gmi_adamw_t *)update;
  const gmi_arrays_t at = *a;
  sums_t sums = sums_load(lanes);
  for (uint64_t done = 0; done < count; done += GMI_LANES) {
    prefetch(at.master, first + done, GEMINI_DTYPE_F32, true);
    prefetch(at.momentum, first + done, GEMINI_DTYPE_F32, true);
    prefetch(at.variance, first + done, GEMINI_DTYPE_F32, true);
    prefetch(at.grad, first + done, k.grad_dtype, true);
#pragma GCC unroll 16
    for (uint32_t lane = 0; lane < GMI_LANES; lane += WIDTH) {
      if (WIDTH == 1 && done + lane == count) break;
      const uint64_t i = first + done + lane;
      vec_t g = load_any(at.grad, i, k.grad_dtype), p, m, v;
      sums_add(&sums, lane, g);
      adamw_step(&k, &at, i, g, &p, &m, &v);
      vec_store((float *)at.momentum + i, m);
      vec_store((float *)at.variance + i, v);
      vec_store((float *)at.master + i, p);
      store_any(at.param, i, k.param_dtype, p);
    }
  }
  sums_store(lanes, &sums);
}

/* The random bits of WIDTH elements from i on. */
static inline __attribute__((always_inline)) bits_t random_bits(const gmi_adamw_t *k, uint64_t i) {
  bits_t x = bits_all(k->first + (uint32_t)i) + bits_lanes();
  GMI_RANDOM(x, bits_all(k->keys[0]), bits_all(k->keys[1]));
  return x;
}
/* random: below 2^16. Adding it to the bits that are cut off carries into those that stay as often as it should. An
 * infinity stays one. */
static inline __attribute__((always_inline)) void store_state(void *base, uint64_t i, uint32_t dtype, vec_t v,
                                                              bits_t random) {
  if (dtype == GEMINI_DTYPE_F32) {
    vec_store((float *)base + i, v);
  } else {
    bits_t bits = (bits_of_vec(v) + random) >> 16;
    bits_store16((uint16_t *)base + i, bits_where_nan(v, bits_all(0x7fc0), bits));
  }
}
/* A split master: the parameter is the upper half, rounded up if the lower one, which has a sign, is negative. */
static inline __attribute__((always_inline)) vec_t load_split(const void *param, const void *rest, uint64_t i) {
  const bits_t sign = bits_all(0x8000);
  bits_t upper = bits_load16((const uint16_t *)param + i) << 16, lower = bits_load16((const uint16_t *)rest + i);
  return vec_of_bits(upper + (lower ^ sign) - sign);
}
static inline __attribute__((always_inline)) void store_split(void *param, void *rest, uint64_t i, vec_t v) {
  const bits_t bits = bits_of_vec(v), upper = (bits + bits_all(0x8000)) >> 16, lower = bits & bits_all(0xffff);
  bits_store16((uint16_t *)param + i, bits_where_nan(v, bits_all(0x7fc0), upper));
  bits_store16((uint16_t *)rest + i, bits_where_nan(v, bits_all(0), lower));
}

/* AdamW with narrow states. What is computed is the same; what differs is how it is kept. */
void KERNEL(narrow)(const void *update, const gmi_arrays_t *a, uint64_t first, uint64_t count,
                    double lanes[GMI_LANES]) {
  const gmi_adamw_t k = *(const gmi_adamw_t *)update;
  const gmi_arrays_t at = *a;
  sums_t sums = sums_load(lanes);
  for (uint64_t done = 0; done < count; done += GMI_LANES) {
    prefetch(at.master, first + done, k.split ? GEMINI_DTYPE_BF16 : GEMINI_DTYPE_F32, true);
    prefetch(at.momentum, first + done, k.momentum_dtype, true);
    prefetch(at.variance, first + done, k.variance_dtype, true);
    prefetch(at.grad, first + done, k.grad_dtype, true);
    if (k.split) prefetch(at.param, first + done, k.param_dtype, true);
#pragma GCC unroll 16
    for (uint32_t lane = 0; lane < GMI_LANES; lane += WIDTH) {
      if (WIDTH == 1 && done + lane == count) break;
      const uint64_t i = first + done + lane;
      const bits_t random = random_bits(&k, i);
      vec_t g = load_any(at.grad, i, k.grad_dtype);
      vec_t p = k.split ? load_split(at.param, at.master, i) : vec_load((const float *)at.master + i);
      vec_t m = load_any(at.momentum, i, k.momentum_dtype), v = load_any(at.variance, i, k.variance_dtype);
      sums_add(&sums, lane, g);
      adamw_compute(&k, g, &p, &m, &v);
      store_state(at.momentum, i, k.momentum_dtype, m, random & bits_all(0xffff));
      store_state(at.variance, i, k.variance_dtype, v, random >> 16);
      if (k.split) {
        store_split(at.param, at.master, i, p);
      } else {
        vec_store((float *)at.master + i, p);
        store_any(at.param, i, k.param_dtype, p);
      }
    }
  }
  sums_store(lanes, &sums);
}

/* --- blocks of 8-bit codes: see update.h --- */

static inline __attribute__((always_inline)) bits_t bits_pick(bits_t mask, bits_t a, bits_t b) {
  return (mask & a) | (~mask & b);
}
static inline float block_scale(const uint8_t *codes) {
  uint32_t bits = 0;
  for (uint32_t i = 0; i < GMI_SCALE_BITS; i++) bits |= (uint32_t)(codes[i] & 1) << (16 + i);
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}
/* The scale that a block gets, from the bits of its largest magnitude (of variances that of coarse codes counts as more,
 * see keep()): that, or what makes it the highest code, rounded up to bf16. */
static inline float scale_of_most(uint32_t most, uint32_t top) {
  if (top == 7) {
    float above;
    memcpy(&above, &most, sizeof above);
    above *= GMI_ABOVE_VARIANCES;
    memcpy(&most, &above, sizeof most);
    most &= 0x7fffffff;
  }
  const uint32_t bits = most > GMI_MOST ? 0x7fc00000 : (most + 0xffff) & 0xffff0000;
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return scale;
}
/* WIDTH codes as numbers. top: 6 of momenta, which have a sign, 7 of variances. coarse: the codes lack their lowest
 * bit, and stand for the middle of two. */
static inline __attribute__((always_inline)) vec_t decode(bits_t code, float scale, uint32_t top, bool coarse) {
  static const float powers[2][8] = { GMI_POWERS_OF_CODES };
  const bits_t all = bits_all(top == 6 ? 0x7f : 0xff), ones = bits_all(0x3f800000);
  if (coarse) code = code & bits_all(0xfe);
  const bits_t magnitude = code & all, bits = bits_of_vec(vec_of_number(magnitude));
  const bits_t exponent = bits >> 23;
  const vec_t fraction = vec_of_bits((bits & bits_all(0x7fffff)) | ones) - vec_all(1.0f);
  /* 2^-(exponent + 1), half a step between codes; of coarse ones a whole step */
  const vec_t middle = vec_of_bits((bits_all(coarse ? 254 : 253) - exponent) << 23);
  const bits_t picked = (exponent - bits_all(127)) & bits_all(7);
  vec_t value = (vec_all(0.1f) + vec_all(0.9f) * (fraction + middle)) * vec_pick(powers[top - 6], picked);
  bits_t result = bits_of_vec(value);
  result = result & ~bits_less(vec_of_number(magnitude), vec_all(0.5f)); /* 0 */
  if (top == 7) return vec_of_bits(result) * vec_all(scale);
  const bits_t one = bits_less(vec_of_number(code ^ bits_all(0x80)), vec_all(0.5f)); /* has the sign's bit alone */
  if (!coarse) result = bits_pick(one, ones, result);
  value = vec_of_bits(result) * vec_all(scale);
  return vec_of_bits(bits_of_vec(value) ^ (((code & bits_all(0x80)) << 24) & ~one));
}
static inline __attribute__((always_inline)) bits_t encode_momentum(vec_t value, float scale, bool coarse) {
  static const float edges[6] = { GMI_EDGES_OF_MOMENTA }, powers[8] = { GMI_POWERS };
  const bits_t sign = (bits_of_vec(value) >> 31) << 7;
  const vec_t x = vec_of_bits(bits_of_vec(value) & bits_all(0x7fffffff)) / vec_all(scale);
  bits_t decade = bits_all(0);
  for (int i = 0; i < 6; i++) decade = decade - bits_less(x, vec_all(edges[i]));
  const vec_t count = vec_of_bits((bits_all(127 + 6) - decade) << 23); /* of codes in the decade */
  const vec_t fraction = (x * vec_pick(powers, decade) - vec_all(0.1f)) * vec_all(GMI_WIDENED);
  const bits_t least = bits_of_number(count), most = least - bits_all(1);
  const vec_t place = fraction * count;
  bits_t code = least + bits_pick(bits_less(place, count), bits_of_number(place), most);
  if (coarse) code = code & bits_all(0xfe);
  code = code & ~bits_less(x, vec_all(GMI_ZERO_OF_MOMENTA));
  code = code | (sign & ~bits_less(vec_of_number(code), vec_all(0.5f)));
  if (coarse) return code;
  const bits_t below = bits_less(x, vec_all(GMI_ONE_OF_MOMENTA));
  return bits_pick(below | (bits_all(0) - (sign >> 7)), code, bits_all(0x80));
}
/* random: below 2^16. The code as a number with 16 bits behind the point, rounded; adding random bits to these carries
 * into the code as often as it should. */
static inline __attribute__((always_inline)) bits_t encode_variance(vec_t value, float scale, bits_t random,
                                                                    bool coarse) {
  static const float lowest[2][6] = { GMI_LOWEST_OF_VARIANCES }, powers[8] = { GMI_POWERS };
  const vec_t x = value / vec_all(scale);
  bits_t decade = bits_all(0);
  for (int i = 0; i < 6; i++) decade = decade - bits_less(x, vec_all(lowest[coarse][i]));
  const vec_t count = vec_of_bits((bits_all(coarse ? 127 + 6 : 127 + 7) - decade) << 23); /* of codes in the decade */
  const vec_t fraction = (x * vec_pick(powers, decade) - vec_all(0.1f)) * vec_all(GMI_WIDENED);
  vec_t place = fraction * count + (count - vec_all(0.5f));
  /* Behind the decade's highest code, which is 2 count - 1, a step is three times as long. */
  place = vec_least(place, (place + (vec_all(4.0f) * count - vec_all(2.0f))) * vec_all(1.0f / 3));
  place = vec_least(place, vec_all(coarse ? 127.0f : 255.0f));
  bits_t code = (bits_of_number(place * vec_all(65536.0f) + vec_all(0.5f)) + random) >> 16;
  code = bits_max(code, bits_all(coarse ? 1 : 2));
  if (coarse) code = code << 1;
  /* A variance is 0 only if it was: x does not tell, as a quotient may underflow. */
  return code & ~bits_less(value, vec_of_bits(bits_all(1)));
}

/* New values of a block's momentum or variance, until the largest of them is known. */
typedef struct block {
  float values[GMI_BLOCK];
  bits_t most; /* the largest bits of magnitudes in each lane */
} block_t;
static inline __attribute__((always_inline)) vec_t load_coded(const void *base, uint64_t i, uint32_t dtype, float scale,
                                                              uint32_t top, bool coarse) {
  if (dtype != GEMINI_DTYPE_BLOCK8) return load_any(base, i, dtype);
  return decode(bits_load8((const uint8_t *)base + i), scale, top, coarse);
}
/* weight: what the largest counts for, GMI_ABOVE_COARSE of coarse variances and 1 of others. */
static inline __attribute__((always_inline)) void keep(block_t *block, uint64_t i, vec_t v, float weight) {
  vec_store(block->values + i, v);
  block->most = bits_max(block->most, bits_of_vec(v * vec_all(weight)) & bits_all(0x7fffffff));
}
/* Codes of WIDTH elements, of which i is the first one's. */
static inline __attribute__((always_inline)) void store_codes(const gmi_adamw_t *k, uint8_t *codes, uint64_t i,
                                                              vec_t value, float scale, uint32_t top, bool coarse) {
  bits_store8(codes, top == 6 ? encode_momentum(value, scale, coarse)
                              : encode_variance(value, scale, random_bits(k, i) >> 16, coarse));
}
static inline __attribute__((always_inline)) void store_block(const gmi_adamw_t *k, uint8_t *codes, uint64_t first,
                                                              const block_t *block, uint32_t top) {
  uint32_t lanes[WIDTH], most = 0;
  memcpy(lanes, &block->most, sizeof lanes);
  for (uint32_t i = 0; i < WIDTH; i++) most = lanes[i] > most ? lanes[i] : most;
  const float scale = scale_of_most(most, top);
  uint32_t bits;
  memcpy(&bits, &scale, sizeof bits);
  if (!bits || scale != scale) { /* there is nothing to be divided by */
    memset(codes, 0, GMI_BLOCK);
  } else {
    for (uint32_t i = 0; i < GMI_SCALE_BITS; i += WIDTH)
      store_codes(k, codes + i, first + i, vec_load(block->values + i), scale, top, true);
    for (uint32_t i = GMI_SCALE_BITS; i < GMI_BLOCK; i += WIDTH)
      store_codes(k, codes + i, first + i, vec_load(block->values + i), scale, top, false);
  }
  for (uint32_t i = 0; i < GMI_SCALE_BITS; i++) codes[i] = (uint8_t)(codes[i] | (bits >> (16 + i) & 1));
}

/* AdamW of which a state is in blocks; first and count are multiples of GMI_BLOCK. */
void KERNEL(blocks)(const void *update, const gmi_arrays_t *a, uint64_t first, uint64_t count,
                    double lanes[GMI_LANES]) {
  const gmi_adamw_t k = *(const gmi_adamw_t *)update;
  const gmi_arrays_t at = *a;
  const bool coded_m = k.momentum_dtype == GEMINI_DTYPE_BLOCK8, coded_v = k.variance_dtype == GEMINI_DTYPE_BLOCK8;
  block_t new_m, new_v;
  sums_t sums = sums_load(lanes);
  for (uint64_t begin = first; begin < first + count; begin += GMI_BLOCK) {
    uint8_t *const m_codes = (uint8_t *)at.momentum + begin, *const v_codes = (uint8_t *)at.variance + begin;
    const float m_scale = coded_m ? block_scale(m_codes) : 0, v_scale = coded_v ? block_scale(v_codes) : 0;
    new_m.most = new_v.most = bits_all(0);
    for (uint32_t done = 0; done < GMI_BLOCK; done += GMI_LANES) {
#pragma GCC unroll 16
      for (uint32_t lane = 0; lane < GMI_LANES; lane += WIDTH) {
        const uint64_t i = begin + done + lane;
        const bool coarse = done == 0;
        vec_t g = load_any(at.grad, i, k.grad_dtype);
        vec_t p = k.split ? load_split(at.param, at.master, i) : vec_load((const float *)at.master + i);
        vec_t m = load_coded(at.momentum, i, k.momentum_dtype, m_scale, 6, coarse);
        vec_t v = load_coded(at.variance, i, k.variance_dtype, v_scale, 7, coarse);
        sums_add(&sums, lane, g);
        adamw_compute(&k, g, &p, &m, &v);
        if (coded_m) keep(&new_m, done + lane, m, 1.0f);
        else store_state(at.momentum, i, k.momentum_dtype, m, random_bits(&k, i) & bits_all(0xffff));
        if (coded_v) keep(&new_v, done + lane, v, coarse ? GMI_ABOVE_COARSE : 1.0f);
        else store_state(at.variance, i, k.variance_dtype, v, random_bits(&k, i) >> 16);
        if (k.split) {
          store_split(at.param, at.master, i, p);
        } else {
          vec_store((float *)at.master + i, p);
          store_any(at.param, i, k.param_dtype, p);
        }
      }
    }
    if (coded_m) store_block(&k, m_codes, begin, &new_m, 6);
    if (coded_v) store_block(&k, v_codes, begin, &new_v, 7);
  }
  sums_store(lanes, &sums);
}

#ifdef KERNEL_BESIDE
/* New values go past the caches: with plain stores their lines would be read first, which costs half the rate. states:
 * writes these, too, not the parameters alone. */
static inline __attribute__((always_inline)) void adamw_stream(const void *update, const gmi_arrays_t *a,
                                                               const gmi_arrays_t *to, uint64_t first, uint64_t count,
                                                               bool states) {
  const gmi_adamw_t k = *(const gmi_adamw_t *)update;
  const gmi_arrays_t at = *a, out = *to;
  for (uint64_t done = 0; done < count; done += GMI_LANES) {
    prefetch(at.master, first + done, GEMINI_DTYPE_F32, false);
    prefetch(at.momentum, first + done, GEMINI_DTYPE_F32, false);
    prefetch(at.variance, first + done, GEMINI_DTYPE_F32, false);
    prefetch(at.grad, first + done, k.grad_dtype, false);
#pragma GCC unroll 16
    for (uint32_t lane = 0; lane < GMI_LANES; lane += WIDTH) {
      const uint64_t i = first + done + lane;
      vec_t p, m, v;
      adamw_step(&k, &at, i, load_any(at.grad, i, k.grad_dtype), &p, &m, &v);
      if (states) {
        vec_stream((float *)out.momentum + i, m);
        vec_stream((float *)out.variance + i, v);
        vec_stream((float *)out.master + i, p);
      }
      stream_any(out.param, i, k.param_dtype, p);
    }
  }
  stream_end();
}
void KERNEL(adamw_beside)(const void *update, const gmi_arrays_t *a, const gmi_arrays_t *to, uint64_t first,
                          uint64_t count) {
  adamw_stream(update, a, to, first, count, true);
}
void KERNEL(adamw_results)(const void *update, const gmi_arrays_t *a, const gmi_arrays_t *to, uint64_t first,
                           uint64_t count) {
  adamw_stream(update, a, to, first, count, false);
}
#endif

void KERNEL(sgd)(const void *update, const gmi_arrays_t *a, uint64_t first, uint64_t count, double lanes[GMI_LANES]) {
  const gmi_sgd_t *k = update;
  const vec_t grad_scale = vec_all(k->grad_scale), l2 = vec_all(k->l2), momentum = vec_all(k->momentum);
  const vec_t one_minus_dampening = vec_all(k->one_minus_dampening), lr = vec_all(k->lr);
  const uint32_t param_dtype = k->param_dtype, grad_dtype = k->grad_dtype, flags = k->flags;
  const gmi_arrays_t at = *a;
  sums_t sums = sums_load(lanes);
  for (uint64_t done = 0; done < count; done += GMI_LANES) {
    prefetch(at.master, first + done, GEMINI_DTYPE_F32, true);
    if (flags & GMI_SGD_MOMENTUM) prefetch(at.momentum, first + done, GEMINI_DTYPE_F32, true);
    prefetch(at.grad, first + done, grad_dtype, true);
#pragma GCC unroll 16
    for (uint32_t lane = 0; lane < GMI_LANES; lane += WIDTH) {
      if (WIDTH == 1 && done + lane == count) break;
      const uint64_t i = first + done + lane;
      vec_t g = load_any(at.grad, i, grad_dtype), p = vec_load((const float *)at.master + i);
      sums_add(&sums, lane, g);
      g = g * grad_scale + l2 * p;
      if (flags & GMI_SGD_MOMENTUM) {
        vec_t m = g;
        if (!(flags & GMI_SGD_BEGINS))
          m = momentum * vec_load((const float *)at.momentum + i) + one_minus_dampening * g;
        vec_store((float *)at.momentum + i, m);
        if (flags & GMI_SGD_NESTEROV) g = g + momentum * m;
        else g = m;
      }
      p = p - lr * g;
      vec_store((float *)at.master + i, p);
      store_any(at.param, i, param_dtype, p);
    }
  }
  sums_store(lanes, &sums);
}
