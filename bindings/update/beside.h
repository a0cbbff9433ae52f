/* Updates beside the old values, for what is speculated (GEMINI_UPDATE_SPECULATE), and the first of two passes
 * (GEMINI_UPDATE_PASSES). SPDX-License-Identifier: Apache-2.0
 *
 * Apart from update.h, which the kernels of the GPU are made from. */
#ifndef GMI_BESIDE_H
#define GMI_BESIDE_H

#include <stddef.h>

#include "update/update.h"

/* As gmi_kernel_fn, beside the old values, which are those of a: writes the arrays of to, past the caches, and adds up
 * nothing. Of to, grad is not used. fp32 arrays of to are aligned to 64 bytes, others to 32; first and count are
 * multiples of GMI_LANES. */
typedef void gmi_beside_fn(const void *k, const gmi_arrays_t *a, const gmi_arrays_t *to, uint64_t first,
                           uint64_t count);
gmi_beside_fn gmi_adamw_beside_avx2, gmi_adamw_beside_avx512;
gmi_beside_fn gmi_adamw_results_avx2, gmi_adamw_results_avx512; /* of to, param alone is used */

/* gemini_adamw_host() and gemini_sgd_host() beside the old values: read grad, master and so on of a, and write those of
 * to, with the bits that the calls would leave in place. The arrays of to overlap none of a. Any alignment; 64 bytes of
 * all is fast. first: as of gmi_adamw_prepare(). */
gemini_status_t gmi_adamw_beside(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                                 const gmi_arrays_t *a, const gmi_arrays_t *to);
gemini_status_t gmi_sgd_beside(const char *operation, const gemini_sgd_t *sgd, uint64_t count, const gmi_arrays_t *a,
                               const gmi_arrays_t *to);
/* The parameters alone that these calls would write, of a, in which param is where they go. Nothing else is written. */
gemini_status_t gmi_adamw_results(const char *operation, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                                  const gmi_arrays_t *a);
gemini_status_t gmi_sgd_results(const char *operation, const gemini_sgd_t *sgd, uint64_t count, const gmi_arrays_t *a);

/* Where the new values of an arena of a span go: in place in spans of a library before GEMINI_UPDATE_SPECULATE, and of
 * programs that make spans themselves and leave out at 0. NULL: not in this pass. */
static inline void *gmi_span_out(const gemini_update_span_t *span, uint32_t arena) {
  if (span->pass) return span->out[arena];
  const size_t needs = offsetof(gemini_update_span_t, out) + sizeof span->out;
  return span->struct_size >= needs && span->out[arena] ? span->out[arena] : span->ptr[arena];
}

#endif
