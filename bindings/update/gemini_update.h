/* libgemini_update: the fused optimizer updates that libgemini's bindings share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A library of its own: it uses the types of gemini.h and calls nothing of libgemini. Conventions are those of gemini.h,
 * but what went wrong is told by gemini_update_last_error().
 *
 * Results are the same to the bit on every processor and on the GPU (docs/update.md has the order of operations), as
 * long as the calling thread rounds to nearest and does not flush subnormal numbers to zero; a NaN is a NaN everywhere,
 * with sign and payload unspecified in fp32.
 */
#ifndef GEMINI_UPDATE_H
#define GEMINI_UPDATE_H

#include "gemini.h"

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup fused Fused updates
 *  @{ */
enum {
  GEMINI_ADAMW_L2 = 1 /* classic Adam: weight_decay times the parameter is added to the gradient */
};
/** AdamW (Loshchilov & Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2), with the learning rate
 *  multiplied into the decay, as torch.optim.AdamW does. Coefficients are computed in double and rounded once. */
typedef struct gemini_adamw {
  uint32_t struct_size; /* bytes; set by GEMINI_ADAMW_INIT */
  uint32_t flags;       /* GEMINI_ADAMW_*; unknown bits: GEMINI_ERR_INVALID */
  uint32_t param_dtype; /* GEMINI_DTYPE_F32, _BF16, _F16; ignored without param */
  uint32_t grad_dtype;  /* GEMINI_DTYPE_F32, _BF16, _F16 */
  uint64_t step;        /* number of this update, from 1: bias corrections are 1 - beta^step */
  double lr;            /* learning rate, at least 0 */
  double beta1;         /* 0 <= beta1 < 1 */
  double beta2;         /* 0 <= beta2 < 1 */
  double eps;           /* added to the corrected square root, at least 0 */
  double weight_decay;  /* at least 0 */
  double grad_scale;    /* multiplied into each gradient: 1 / loss scale, clipping */
} gemini_adamw_t;
/** torch.optim.AdamW's defaults, bf16 parameters and gradients, step 1. */
#define GEMINI_ADAMW_INIT \
  { sizeof(gemini_adamw_t), 0, GEMINI_DTYPE_BF16, GEMINI_DTYPE_BF16, 1, 1e-3, 0.9, 0.999, 1e-8, 1e-2, 1.0 }

/** Updates a span on the host, in one pass: momentum, variance and master, and the low-precision parameter from master.
 *  All arrays have count elements and are aligned to their element. No two may overlap, except that param may be grad
 *  itself when their elements have one size (gradients that reuse their parameters' bytes).
 *  @param param    param_dtype, written, nearest even, NaN kept, beyond the range: infinity. NULL: master is the parameter
 *  @param grad     grad_dtype, read
 *  @param master   read and written, as momentum and variance
 *  @param grad_sum_squares_out  sum of the squares of grad as it is, before grad_scale, in double, in an order that only
 *                  depends on count. NULL: not wanted
 *  @retval GEMINI_ERR_INVALID  a value is out of range: the message names it; nothing changed
 *  Threads: any; runs on the calling thread alone, so that many spans can be updated at once (as by gemini_update()'s
 *  workers). All arrays are borrowed until return. Since: 0.1 */
GEMINI_API gemini_status_t gemini_adamw_host(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                             float *master, float *momentum, float *variance,
                                             double *grad_sum_squares_out) GEMINI_MUST_CHECK;

/** Doubles that gemini_adamw_cuda() needs for the sum of squares of count gradients. Since: 0.1 */
GEMINI_API uint64_t gemini_update_sums(uint64_t count);
/** Queues gemini_adamw_host()'s work, with its results, on a CUDA stream. Arrays as there, in memory that the GPU
 *  reaches, borrowed until the work is done.
 *  @param sums    gemini_update_sums(count) doubles in memory that the GPU reaches: the first receives the sum of squares,
 *                 the others are scratch. NULL: not wanted
 *  @param stream  a CUstream; NULL: the default stream of the current context, or, where there is none, of GPU 0's primary
 *                 context, which is then retained until the process ends
 *  @retval GEMINI_ERR_UNSUPPORTED  there is no CUDA driver, or it is too old
 *  @retval GEMINI_ERR_DEVICE       the driver failed; native_code is its code
 *  @retval GEMINI_ERR_INVALID      a value is out of range: the message names it; nothing was queued
 *  @retval GEMINI_ERR_OOM_SYSTEM   no memory for the record of a context
 *  Threads: any. Never waits for the stream; but the first call in a context loads the kernels, some milliseconds in
 *  which the driver may wait for the GPU. A call with count 0 and no sums does that and nothing else. A context that was used must
 *  live as long as the library. Since: 0.1 */
GEMINI_API gemini_status_t gemini_adamw_cuda(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                             float *master, float *momentum, float *variance, double *sums,
                                             void *stream) GEMINI_MUST_CHECK;

/** What the host's updates are computed with: "avx512", "avx2" or "plain"; static storage. Since: 0.1 */
GEMINI_API const char *gemini_update_isa(void);
/** For tests: computes with that from now on, in all threads. NULL: with the best of this machine, as at the start.
 *  @retval GEMINI_ERR_INVALID      there is no such name
 *  @retval GEMINI_ERR_UNSUPPORTED  this machine cannot. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_force_isa(const char *name) GEMINI_MUST_CHECK;

/** As gemini_last_error(), for the functions of this header. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_last_error(gemini_error_info_t *info_out);
/** @} */

#ifdef __cplusplus
}
#endif
#endif
