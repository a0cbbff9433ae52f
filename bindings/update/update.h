/* Declarations that the files of libgemini_update share. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_UPDATE_H
#define GMI_UPDATE_H

#include "update/gemini_update.h"

/* The order of additions in sums of squares, which all implementations keep, so that their results are bit-equal: an
 * array is cut into tiles of GMI_TILE elements. In a tile, element i is added to lane i % GMI_LANES, from left to
 * right, then the lanes are added from the first to the last. The sum of tile t is added to tile lane t %
 * GMI_TILE_LANES, and in the end these are added from the first to the last. Squares of all dtypes here are exact in
 * double. */
#define GMI_TILE 1024u
#define GMI_LANES 16u
#define GMI_TILE_LANES 256u

#define GMI_DTYPE_NONE UINT32_MAX /* param_dtype of an update without a parameter array */

/* Arguments of the kernels, coefficients rounded to fp32. The kernels of the GPU take them by value, so kernels.ptx has
 * this layout. */
typedef struct gmi_adamw {
  float grad_scale, l2;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float root_scale; /* 1 / sqrt(1 - beta2^step) */
  float eps;
  float step_size; /* lr / (1 - beta1^step) */
  float decay;     /* lr * weight_decay */
  uint32_t param_dtype, grad_dtype;
  /* For the kernels of narrow states alone: */
  uint32_t momentum_dtype, variance_dtype; /* F32, BF16 or BLOCK8 */
  uint32_t split;                          /* 1: GEMINI_ADAMW_SPLIT */
  uint32_t keys[2], first; /* of the random bits of an element: of seed and step; the number of element 0 */
} gmi_adamw_t;
/* Whether an update is for the kernels of narrow states. The others, which are the default, do not pay for these. */
static inline uint32_t gmi_is_narrow(const gmi_adamw_t *k) { return k->split | k->momentum_dtype | k->variance_dtype; }
/* Whether it is for those of blocks, which are narrow, too. */
static inline uint32_t gmi_has_blocks(const gmi_adamw_t *k) {
  return k->momentum_dtype == GEMINI_DTYPE_BLOCK8 || k->variance_dtype == GEMINI_DTYPE_BLOCK8;
}

/* A block has a scale and a code for each element. The codes are those of Dettmers' dynamic tree, as numbers: with n =
 * 2^e, codes n to 2 n - 1 are the middles of n equal parts of the decade from 10^(e - top - 1) to 10^(e - top), times
 * the scale; 0 is 0. Momenta have top 6 and a sign in the highest bit, 0x80 is 1. Variances have top 7, and 1 is
 * nothing. The first GMI_SCALE_BITS codes of a block are coarse: they lack their lowest bit, which has a bit of the scale
 * (bf16, the lowest first), and stand for the middle of the two: those of variances are, halved, the codes of top 6 of
 * 64 in the highest decade, and so on. A block with a magnitude above GMI_MOST (in bits), infinite or NaN, has a NaN for
 * a scale, and is NaN.
 *
 * A momentum becomes the nearest code, found by comparing with the middles between neighbours; the scale is the largest,
 * rounded up to bf16. A variance becomes one of the two codes around it, by random bits, so that it is right on average.
 * Therefore the scale is such that the largest is not above the highest code. But of variances only 0 gets code 0, as 0
 * beside a momentum makes a step of momentum / eps: all others get 2 at least, the lowest code above 0. */
#define GMI_BLOCK 256u
#define GMI_SCALE_BITS 16u
#define GMI_MOST 0x7f7f0000u
/* By exponent e: 10^(e - top); of momenta, of variances. */
#define GMI_POWERS_OF_CODES \
  { 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f, 0.0f }, { 0.0f, 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1.0f }
#define GMI_POWERS 1.0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f
#define GMI_WIDENED 1.1111112f /* 1 / 0.9 */
/* Of momenta, between a decade's lowest code and the highest of the one below; between 0 and the lowest; the highest and
 * 1. */
#define GMI_EDGES_OF_MOMENTA 1.028125e-01f, 1.05625e-02f, 1.1125e-03f, 1.225e-04f, 1.45e-05f, 1.9e-06f
#define GMI_ZERO_OF_MOMENTA 2.75e-07f
#define GMI_ONE_OF_MOMENTA 9.964844e-01f
/* Of variances, the lowest code of each decade, and of coarse ones. Up to the lowest of the next decade the code is a
 * linear function of the value: n - 1 steps of one length and one of three times that. */
#define GMI_LOWEST_OF_VARIANCES                                                                \
  { 1.03515625e-01f, 1.0703125e-02f, 1.140625e-03f, 1.28125e-04f, 1.5625e-05f, 2.125e-06f }, { \
    1.0703125e-01f, 1.140625e-02f, 1.28125e-03f, 1.5625e-04f, 2.125e-05f, 3.25e-06f            \
  }
/* 1 / the highest code, and that code / the highest coarse one. */
#define GMI_ABOVE_VARIANCES 1.003528f
#define GMI_ABOVE_COARSE 1.0035405f

/* The random bits of element x, which is its number modulo 2^32 before the call: the low 16 for a momentum in bf16, the
 * others for the variance. The multipliers are those of Wellons' lowbias32 (https://nullprogram.com/blog/2018/07/31/),
 * which avalanches; the second key enters between its rounds, so that no two steps have the same bits in another order.
 * For integers and vectors of integers; key0 and key1 are of x's type. */
#define GMI_RANDOM(x, key0, key1) \
  do {                            \
    x ^= key0;                    \
    x ^= x >> 16;                 \
    x *= 0x7feb352du;             \
    x += key1;                    \
    x ^= x >> 15;                 \
    x *= 0x846ca68bu;             \
    x ^= x >> 16;                 \
  } while (0)
enum {
  GMI_SGD_MOMENTUM = 1, /* the update has a momentum array */
  GMI_SGD_BEGINS = 2,   /* the first step: the array's contents are undefined and not read */
  GMI_SGD_NESTEROV = 4
};
typedef struct gmi_sgd {
  float grad_scale, l2;
  float momentum, one_minus_dampening;
  float lr;
  uint32_t flags; /* GMI_SGD_* */
  uint32_t param_dtype, grad_dtype;
} gmi_sgd_t;
typedef struct gmi_arrays {
  void *param; /* NULL: the master is the parameter (GMI_DTYPE_NONE) */
  const void *grad;
  void *master, *momentum, *variance; /* fp32, unless states are narrow; the last two NULL where the update has none */
} gmi_arrays_t;

/* Updates count elements from element first on, and adds the gradient's squares to lanes; that of element first goes to
 * lanes[0]. Vector kernels take a count that is a multiple of GMI_LANES, the plain ones any. k: a gmi_adamw_t or
 * gmi_sgd_t. */
typedef void gmi_kernel_fn(const void *k, const gmi_arrays_t *a, uint64_t first, uint64_t count,
                           double lanes[GMI_LANES]);
gmi_kernel_fn gmi_adamw_plain, gmi_adamw_avx2, gmi_adamw_avx512, gmi_sgd_plain, gmi_sgd_avx2, gmi_sgd_avx512;
gmi_kernel_fn gmi_narrow_plain, gmi_narrow_avx2, gmi_narrow_avx512; /* AdamW of which gmi_is_narrow() */
gmi_kernel_fn gmi_blocks_plain, gmi_blocks_avx2, gmi_blocks_avx512; /* and gmi_has_blocks(): whole blocks */

/* Check the arguments of a call and round its coefficients for the kernels. Failures are recorded in operation. With
 * count 0 the arrays are not checked. first: number of the first element; the rule's first_element is added to it. */
gemini_status_t gmi_adamw_prepare(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                                  const gmi_arrays_t *a, gmi_adamw_t *k_out);
gemini_status_t gmi_sgd_prepare(const char *operation, const gemini_sgd_t *sgd, uint64_t count, const gmi_arrays_t *a,
                                gmi_sgd_t *k_out);

/* gemini_adamw_host() and gemini_adamw_cuda(), with the number of the first element as above. */
gemini_status_t gmi_adamw_host(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                               const gmi_arrays_t *a, double *grad_sum_squares_out);
gemini_status_t gmi_adamw_cuda(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                               const gmi_arrays_t *a, void *stream, double *sums_out);

/* Bytes of an element of master, momentum and variance. */
typedef struct gmi_widths {
  uint32_t master, momentum, variance;
} gmi_widths_t;
gmi_widths_t gmi_adamw_widths(const gemini_adamw_t *adamw); /* fields that an older struct lacks count as 0 */

/* Records a failure for this thread, with operation as the name of the public function; returns status. */
gemini_status_t gmi_update_fail(const char *operation, gemini_status_t status, int64_t native_code, const char *format,
                                ...) __attribute__((format(printf, 4, 5)));

/* Prefixes the message of this thread's last failure with context, and makes operation its public function; returns the
 * failure's status. */
gemini_status_t gmi_update_fail_in(const char *operation, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Checks a caller's struct: its struct_size is at least v1_size (GMI_V1_*) and plausible, and bytes that this version does
 * not know are zero. Then copies our_size bytes of it to ours, unless that is NULL, with zeros for what theirs lacks. */
gemini_status_t gmi_update_struct(const char *operation, const char *name, const void *theirs, size_t v1_size,
                                  void *ours, size_t our_size);

/* Bytes of an element; dtype is F32, BF16, F16 or BLOCK8. */
static inline uint64_t gmi_dtype_bytes(uint32_t dtype) {
  return dtype == GEMINI_DTYPE_F32 ? 4 : dtype == GEMINI_DTYPE_BLOCK8 ? 1 : 2;
}

/* The PTX of kernels.cu, which the build embeds. */
extern const char gmi_update_ptx[];

/* For tests: the CUDA driver's functions are looked up by symbol() instead of in libcuda.so.1; NULL returns to
 * libcuda.so.1. Forgets all contexts; no other call may run. */
void gmi_update_cuda_replace(void *(*symbol)(const char *name));

#endif
