/* What the parts of libgemini_update share. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_UPDATE_H
#define GMI_UPDATE_H

#include "update/gemini_update.h"

/* Sums of squares: an array is cut into tiles; in a tile, element i is added to sum i % LANES, from left to right, and
 * these are added from the first to the last. Tile t is added to sum t % TILE_LANES in the same way. Squares of all
 * dtypes are exact in double. */
#define GMI_TILE 1024u
#define GMI_LANES 16u
#define GMI_TILE_LANES 256u

#define GMI_DTYPE_NONE UINT32_MAX

/* Updates as the kernels take them, on the host and, by value, on the GPU: coefficients rounded to fp32. */
typedef struct gmi_adamw {
  float grad_scale, l2;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float root_scale; /* 1 / sqrt(1 - beta2^step) */
  float eps;
  float step_size; /* lr / (1 - beta1^step) */
  float decay;     /* lr * weight_decay */
  uint32_t param_dtype, grad_dtype;
} gmi_adamw_t;
enum { GMI_SGD_MOMENTUM = 1 /* there is one */, GMI_SGD_BEGINS = 2 /* but nothing in it yet */, GMI_SGD_NESTEROV = 4 };
typedef struct gmi_sgd {
  float grad_scale, l2;
  float momentum, one_minus_dampening;
  float lr;
  uint32_t flags; /* GMI_SGD_* */
  uint32_t param_dtype, grad_dtype;
} gmi_sgd_t;
typedef struct gmi_arrays {
  void *param; /* NULL with GMI_DTYPE_NONE */
  const void *grad;
  float *master, *momentum, *variance; /* the last two NULL where the update has none */
} gmi_arrays_t;

/* Updates count elements from first on; vector kernels: a multiple of GMI_LANES. Element first goes to lanes[0].
 * k: a gmi_adamw_t, or a gmi_sgd_t. */
typedef void gmi_kernel_fn(const void *k, const gmi_arrays_t *a, uint64_t first, uint64_t count,
                           double lanes[GMI_LANES]);
gmi_kernel_fn gmi_adamw_plain, gmi_adamw_avx2, gmi_adamw_avx512, gmi_sgd_plain, gmi_sgd_avx2, gmi_sgd_avx512;

/* Check a call's values and round them for the kernels. */
gemini_status_t gmi_adamw_prepare(const char *operation, const gemini_adamw_t *adamw, uint64_t count,
                                  const gmi_arrays_t *a, gmi_adamw_t *k_out);
gemini_status_t gmi_sgd_prepare(const char *operation, const gemini_sgd_t *sgd, uint64_t count, const gmi_arrays_t *a,
                                gmi_sgd_t *k_out);

/* Records a failure of this thread in operation and returns status. */
gemini_status_t gmi_update_fail(const char *operation, gemini_status_t status, int64_t native_code, const char *format,
                                ...) __attribute__((format(printf, 4, 5)));

/* Puts words before the message of this thread's last failure, which becomes operation's; returns its status. */
gemini_status_t gmi_update_fail_in(const char *operation, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Is what a caller allocated of a size that can be, at least v1_size (GMI_V1_*), with nothing set that this version does
 * not know? Then ours, unless it is NULL, becomes a copy of our_size bytes, with zeros for what theirs lacks. */
gemini_status_t gmi_update_struct(const char *operation, const char *name, const void *theirs, size_t v1_size,
                                  void *ours, size_t our_size);

/* Of a dtype that updates know. */
static inline uint64_t gmi_dtype_bytes(uint32_t dtype) { return dtype == GEMINI_DTYPE_F32 ? 4 : 2; }

/* The PTX of kernels.cu, which the build embeds. */
extern const char gmi_update_ptx[];

/* For tests: where the CUDA driver's functions are found by name, instead of libcuda.so.1; NULL = there again. Forgets
 * all contexts. */
void gmi_update_cuda_replace(void *(*symbol)(const char *name));

#endif
