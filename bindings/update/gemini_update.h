/* libgemini_update: the fused optimizer updates that libgemini's bindings share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * This is a library of its own, built on libgemini's public functions. Its words and conventions are those of gemini.h;
 * gemini_last_error() has its failures, too.
 *
 * Results have the same bits on every processor and on the GPU (docs/update.md has the order of operations), if the
 * calling thread rounds to nearest and does not flush subnormal numbers to zero. A NaN is a NaN everywhere; its sign
 * and payload in fp32 are unspecified.
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
  GEMINI_ADAMW_L2 = 1,   /* classic Adam: the gradient gets weight_decay times the parameter added */
  GEMINI_ADAMW_SPLIT = 2 /* masters are split: the bf16 parameter is the upper half of the fp32 master, rounded to
                            nearest, ties away from zero, and master has the lower 16 bits of each element alone.
                            Together they are the bits of the fp32 master. param is read and written, so gradients
                            cannot reuse its bytes */
};
/** A type of states, in the rule's momentum_dtype and variance_dtype alone: 8-bit codes in blocks of 256 elements, each
 *  with a scale of its own (Dettmers, Lewis, Shleifer & Zettlemoyer, 8-bit Optimizers via Block-wise Quantization, ICLR
 *  2022, section 2). An element takes a byte; the scale, rounded up to bf16, is in the lowest bits of a block's first
 *  16 codes (docs/update.md). Momenta become the nearest code, variances one of the two around them, stochastically, so
 *  that they are right on average; no variance above 0 becomes 0. Bytes of zeros are zeros. Blocks begin at multiples of 256 elements, and updates have whole
 *  blocks only. */
#define GEMINI_DTYPE_BLOCK8 16u

/** AdamW (Loshchilov & Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2), with the learning rate
 *  multiplied into the decay, as in torch.optim.AdamW. Coefficients are computed in double and rounded once. */
typedef struct gemini_adamw {
  uint32_t struct_size;    /* bytes; set by GEMINI_ADAMW_INIT */
  uint32_t flags;          /* GEMINI_ADAMW_*; unknown bits: GEMINI_ERR_INVALID */
  uint32_t param_dtype;    /* GEMINI_DTYPE_F32, _BF16, _F16; ignored without param */
  uint32_t grad_dtype;     /* GEMINI_DTYPE_F32, _BF16, _F16 */
  uint64_t step;           /* number of this update, from 1: bias corrections are 1 - beta^step */
  double lr;               /* learning rate, at least 0 */
  double beta1;            /* 0 <= beta1 < 1 */
  double beta2;            /* 0 <= beta2 < 1 */
  double eps;              /* added to the corrected square root, at least 0 */
  double weight_decay;     /* at least 0 */
  double grad_scale;       /* multiplied into each gradient: 1 / loss scale, clipping */
  uint32_t momentum_dtype; /* GEMINI_DTYPE_F32; _BF16: half the bytes, each new value rounded stochastically, up or
                              down with the probabilities that make it right on average; or _BLOCK8: a fourth */
  uint32_t variance_dtype; /* likewise */
  uint64_t seed;           /* of stochastic rounding: it depends on seed, step, and an element's number, modulo 2^32 */
  uint64_t first_element;  /* number of the arrays' first element there. Updates of arenas count elements in the arena,
                              and add this */
} gemini_adamw_t;
/** torch.optim.AdamW's defaults, bf16 parameters and gradients, fp32 states, step 1. */
#define GEMINI_ADAMW_INIT \
  { sizeof(gemini_adamw_t), 0, GEMINI_DTYPE_BF16, GEMINI_DTYPE_BF16, 1, 1e-3, 0.9, 0.999, 1e-8, 1e-2, 1.0, 0, 0, 0, 0 }

/** Updates a span on the host in one pass: momentum, variance and master, and from master the low-precision parameter.
 *  All arrays have count elements and are aligned to their element. No two may overlap, except that param may be grad
 *  itself if their elements have one size (gradients that reuse their parameters' bytes), without GEMINI_ADAMW_SPLIT.
 *  @param param  param_dtype, written: rounded to nearest even; NaN is kept; what is beyond the range becomes infinity.
 *           NULL: master is the parameter
 *  @param grad  grad_dtype, read
 *  @param master  read and written; so are momentum and variance. fp32, unless the rule says otherwise
 *  @param grad_sum_squares_out  the sum of the squares of grad as it is, before grad_scale, in double, in an order that
 *           only depends on count. NULL: not wanted
 *  @retval GEMINI_ERR_INVALID  a value is out of range: the message names it; nothing changed
 *  Threads: any. The call runs on the calling thread alone, so that many spans can be updated at once, as
 *  gemini_update()'s workers do. All arrays are borrowed until return. Since: 0.1 */
GEMINI_API gemini_status_t gemini_adamw_host(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                             void *master, void *momentum, void *variance, double *grad_sum_squares_out)
    GEMINI_MUST_CHECK;

/** Returns how many doubles gemini_adamw_cuda() and gemini_sgd_cuda() need for the sum of squares of count gradients.
 *  Since: 0.1 */
GEMINI_API uint64_t gemini_update_sums(uint64_t count);
/** Queues the work of gemini_adamw_host(), with the same results, on a CUDA stream. The arrays are as there, in memory
 *  that the GPU reaches, and borrowed until the work is done.
 *  @param stream  a CUstream. NULL: the default stream of the current context or, if there is none, of GPU 0's primary
 *           context, which is then retained until the process ends
 *  @param sums_out  gemini_update_sums(count) doubles in memory that the GPU reaches: the first receives the sum of
 *           squares, the others are scratch. NULL: not wanted
 *  @retval GEMINI_ERR_UNSUPPORTED  there is no CUDA driver, or it is too old
 *  @retval GEMINI_ERR_DEVICE  the driver failed; native_code is its code
 *  @retval GEMINI_ERR_INVALID  a value is out of range: the message names it; nothing was queued
 *  @retval GEMINI_ERR_OOM_SYSTEM  there is no memory for the record of a context
 *  Threads: any. The call never waits for the stream. The first call in a context loads the kernels, which takes some
 *  milliseconds and may wait for the GPU; a call with count 0 and no sums does only that. A context that was used must
 *  live as long as the library. Since: 0.1 */
GEMINI_API gemini_status_t gemini_adamw_cuda(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                             void *master, void *momentum, void *variance, void *stream,
                                             double *sums_out) GEMINI_MUST_CHECK;

enum {
  GEMINI_SGD_NESTEROV = 1 /* Nesterov momentum; needs momentum, and no dampening */
};
/** Stochastic gradient descent with momentum (Sutskever, Martens, Dahl & Hinton, On the importance of initialization
 *  and momentum in deep learning, ICML 2013), as in torch.optim.SGD: the decay is added to the gradient, and the
 *  learning rate is not part of the momentum. */
typedef struct gemini_sgd {
  uint32_t struct_size; /* bytes; set by GEMINI_SGD_INIT */
  uint32_t flags;       /* GEMINI_SGD_*; unknown bits: GEMINI_ERR_INVALID */
  uint32_t param_dtype; /* GEMINI_DTYPE_F32, _BF16, _F16; ignored without param */
  uint32_t grad_dtype;  /* GEMINI_DTYPE_F32, _BF16, _F16 */
  uint64_t step;    /* number of this update, from 1; the first sets the momentum to the gradient without reading it */
  double lr;        /* learning rate, at least 0 */
  double momentum;  /* at least 0; 0: no momentum, and no array of it */
  double dampening; /* 1 - dampening is multiplied into what is added to the momentum */
  double weight_decay; /* at least 0 */
  double grad_scale;   /* multiplied into each gradient: 1 / loss scale, clipping */
} gemini_sgd_t;
/** torch.optim.SGD's defaults, bf16 parameters and gradients, step 1. */
#define GEMINI_SGD_INIT { sizeof(gemini_sgd_t), 0, GEMINI_DTYPE_BF16, GEMINI_DTYPE_BF16, 1, 1e-3, 0.0, 0.0, 0.0, 1.0 }

/** Updates a span on the host with SGD, as gemini_adamw_host() does with AdamW.
 *  @param momentum  written, and read except at step 1; ignored if the rule has no momentum
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_sgd_host(const gemini_sgd_t *sgd, uint64_t count, void *param, const void *grad,
                                           float *master, float *momentum, double *grad_sum_squares_out)
    GEMINI_MUST_CHECK;
/** Queues the work of gemini_sgd_host(), as gemini_adamw_cuda() does for AdamW. Since: 0.1 */
GEMINI_API gemini_status_t gemini_sgd_cuda(const gemini_sgd_t *sgd, uint64_t count, void *param, const void *grad,
                                           float *master, float *momentum, void *stream, double *sums_out)
    GEMINI_MUST_CHECK;

/** Returns what the host's updates are computed with: "avx512", "avx2" or "plain"; static storage. Since: 0.1 */
GEMINI_API const char *gemini_update_isa(void);
/** Computes with this instruction set from now on, in all threads; for tests. NULL: with the best of this machine, as
 *  at the start.
 *  @retval GEMINI_ERR_INVALID  there is no instruction set of this name
 *  @retval GEMINI_ERR_UNSUPPORTED  this machine does not have it
 *  Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_force_isa(const char *name) GEMINI_MUST_CHECK;

/** @} */

/** @defgroup arenas_update Updates of whole arenas
 *  One rule for all elements, in one call: gemini_update() with a function of this library, which updates each chunk
 *  where it is. Programs with several rules have gemini_update_walk().
 *
 *      gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
 *      adamw.step = step, adamw.grad_dtype = adamw.param_dtype = GEMINI_DTYPE_F32;
 *      gemini_update_arenas_t arenas = GEMINI_UPDATE_ARENAS_INIT;
 *      arenas.grad = grads, arenas.master = params, arenas.momentum = momentum, arenas.variance = variance;
 *      if (gemini_adamw_arenas(mgr, &adamw, &arenas)) fprintf(stderr, "%s\n", gemini_error_text());
 *  @{ */
/** Arenas of one layout (gemini_arena_config_t.like), by what they hold. */
typedef struct gemini_update_arenas {
  uint32_t struct_size;    /* bytes; set by GEMINI_UPDATE_ARENAS_INIT */
  uint32_t flags;          /* GEMINI_UPDATE_LATE, or 0 */
  gemini_arena_t param;    /* written, in the rule's param_dtype. NULL: master is the parameter */
  gemini_arena_t grad;     /* read, in the rule's grad_dtype. It may reuse the bytes of param */
  gemini_arena_t master;   /* fp32 or, as the rule says, 2 bytes an element; read and written; so are the next two */
  gemini_arena_t momentum; /* ignored by SGD without momentum */
  gemini_arena_t variance; /* ignored by SGD */
  uint64_t first_element;
  uint64_t element_count; /* 0 with first_element 0: all elements used so far */
  gemini_stream_t stream; /* the update comes after this stream's work queued so far */
} gemini_update_arenas_t;
#define GEMINI_UPDATE_ARENAS_INIT { sizeof(gemini_update_arenas_t), 0, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL }

/** Updates all elements of arenas with AdamW, with the results of gemini_adamw_host(), wherever the chunks are. With
 *  GEMINI_UPDATE_LATE it returns at once, and each chunk is updated before its next use.
 *  @param adamw, arenas  copied: borrowed until return, of late updates, too
 *  @retval GEMINI_ERR_INVALID  a value is out of range, an arena is missing, or its element_bytes are not those of its
 *           type: the message names it; nothing changed
 *  @retval other  as gemini_update() has them, GEMINI_ERR_PENDING included: gemini_update_wait() waits for late
 *           updates, and returns the failure of a span
 *  Threads: any. Since: 0.1 */
GEMINI_API gemini_status_t gemini_adamw_arenas(gemini_manager_t mgr, const gemini_adamw_t *adamw,
                                               const gemini_update_arenas_t *arenas) GEMINI_MUST_CHECK;
/** Updates all elements of arenas with SGD, otherwise as gemini_adamw_arenas(). Since: 0.1 */
GEMINI_API gemini_status_t gemini_sgd_arenas(gemini_manager_t mgr, const gemini_sgd_t *sgd,
                                             const gemini_update_arenas_t *arenas) GEMINI_MUST_CHECK;
/** @} */

/** @defgroup walk Updates of arenas by a table
 *  A ready-made gemini_update_fn. A table says which elements are updated with which rule, as the groups of parameters
 *  in a framework do, and gemini_update() finds the spans.
 *
 *      gemini_update_walk_t walk = GEMINI_UPDATE_WALK_INIT;
 *      walk.adamws = groups, walk.rule_count = 2, walk.ranges = ranges, walk.range_count = 3;
 *      walk.mgr = mgr, walk.stream_native = gemini_stream_native, walk.stream_call = gemini_stream_call;
 *      update.fn = gemini_update_walk, update.user = &walk;
 *      gemini_update_walk_check(&update), gemini_update(mgr, &update), gemini_update_wait(mgr);
 *      gemini_update_walk_status(&walk);
 *  @{ */
/** The rule of elements that are not updated. */
#define GEMINI_UPDATE_SKIP UINT64_MAX
/** Two words for good: this struct does not grow. */
typedef struct gemini_update_range {
  uint64_t end_element; /* in the arenas; ascending. A range begins where the one before it ends, the first at 0 */
  uint64_t rule;        /* index in the walk's table, or GEMINI_UPDATE_SKIP */
} gemini_update_range_t;

/** The type of gemini_stream_native(). */
typedef gemini_status_t (*gemini_stream_native_fn)(gemini_manager_t mgr, gemini_stream_t stream, void **native_out);
/** The type of gemini_stream_call(). */
typedef gemini_status_t (*gemini_stream_call_fn)(gemini_manager_t mgr, gemini_stream_t stream, gemini_call_fn fn,
                                                 void *user);

/** What gemini_update_walk() updates arenas with; it is gemini_update_t.user. The walk and its tables are borrowed as
 *  long as that is. Late updates of several steps that are pending at once need a walk and a table each. */
typedef struct gemini_update_walk_s {
  uint32_t struct_size;         /* bytes; set by GEMINI_UPDATE_WALK_INIT */
  uint32_t flags;               /* 0 */
  const gemini_adamw_t *adamws; /* the table: rule_count rules, all with the first's struct_size; or NULL, and: */
  const gemini_sgd_t *sgds;     /* the table, likewise; or NULL, and adamws */
  uint64_t rule_count;          /* dtypes must have the size of their arena's elements */
  const gemini_update_range_t *ranges; /* range_count; they reach to the last element of the update at least */
  uint64_t range_count;
  uint32_t param_index; /* in gemini_update_t.arenas, as the others. GEMINI_INDEX_NONE: master is the parameter */
  uint32_t grad_index;
  uint32_t master_index;
  uint32_t momentum_index;               /* SGD without momentum: GEMINI_INDEX_NONE */
  uint32_t variance_index;               /* SGD: ignored */
  uint32_t failing;                      /* for the library; 0 at the start */
  gemini_manager_t mgr;                  /* the arenas' manager, for these two functions: */
  gemini_stream_native_fn stream_native; /* gemini_stream_native, or NULL if no span is on a device */
  gemini_stream_call_fn stream_call;     /* gemini_stream_call, or NULL if none is on the simulated device */
  gemini_status_t status;                /* out: of the first span that failed; atomic. gemini_update_walk_status() */
  uint32_t reserved;                     /* 0 */
  int64_t native_code;                   /* out: the device's code, or 0 */
  char message[440];                     /* out: which elements, and what happened */
} gemini_update_walk_t;
#define GEMINI_UPDATE_WALK_INIT \
  { sizeof(gemini_update_walk_t), 0, NULL, NULL, 0, NULL, 0, 0, 1, 2, 3, 4, 0, 0, NULL, NULL, GEMINI_OK, 0, 0, "" }

/** Updates a span: a gemini_update_fn. If a range lies in the span in part, that part is updated. On the host it works
 *  as gemini_adamw_host() or gemini_sgd_host() do. On a GPU it queues gemini_adamw_cuda() or gemini_sgd_cuda(), and on
 *  the simulated device a call on the span's stream. Results depend neither on where spans are cut nor on where they
 *  are.
 *  @param walk  a gemini_update_walk_t that gemini_update_walk_check() accepts; the caller's, not a copy (user_bytes 0)
 *  @param span  borrowed until return
 *  A failure is stored in the walk, for gemini_update_walk_status(). The elements of that span that it names are as
 *  they were; other spans are updated. Threads: any. Since: 0.1 */
GEMINI_API void gemini_update_walk(void *walk, const gemini_update_span_t *span);
/** Checks an update before it is submitted, so that no span of it fails for a wrong argument: the walk in its user,
 *  every rule and range, and the update's arena_count, modes and elements against them. It only reads. Skipped elements
 *  keep their parameters only if the update reads the parameters, too (GEMINI_READ_WRITE). Gradients that have taken
 *  their parameters' bytes cannot be skipped: leave them out of the update's elements.
 *  With GEMINI_UPDATE_SPECULATE nothing can be skipped, and each arena with GEMINI_WRITE must be one that the walk
 *  writes.
 *  @param update  borrowed until return. With element_count 0, ranges must reach as far as the arenas do; this function
 *           cannot check that
 *  @retval GEMINI_ERR_INVALID  a value is out of range: the message names the rule or range, the value and the limit
 *  Threads: any. Takes some nanoseconds for each range. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_walk_check(const gemini_update_t *update) GEMINI_MUST_CHECK;
/** Returns the status of the first span that failed, and makes its failure this thread's gemini_last_error().
 *  GEMINI_OK: no span has failed so far; after gemini_update_wait(), none at all. A walk that failed must be
 *  initialised again before it is used.
 *  @retval GEMINI_ERR_INVALID  walk is NULL, or gemini_update_walk_check() would refuse it
 *  @retval GEMINI_ERR_OOM_SYSTEM  others, too: of the updates on a GPU, and of the walk's two functions
 *  Threads: any. Since: 0.1 */
GEMINI_API gemini_status_t gemini_update_walk_status(const gemini_update_walk_t *walk) GEMINI_MUST_CHECK;
/** @} */

#ifdef __cplusplus
}
#endif
#endif
