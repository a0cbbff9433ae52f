/* Sums and maxima over ranks, in the order of ranks. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_SUM_H
#define GMI_SUM_H

#include <stdint.h>

#include "base/dtype.h"
#include "base/status.h"

/* How values of all ranks become one. The order is always rank 0, rank 1, and so on, so a result has the same bits on
 * every rank and in every run. */
typedef enum {
  GMI_REDUCE_SUM,         /* added in float (F64: in double) and rounded to the type once, at the end */
  GMI_REDUCE_SUM_ROUNDED, /* rounded to the type after each addition, as a process that adds in this type does */
  GMI_REDUCE_MAX          /* NaN if any value is */
} gmi_reduce_t;

/* INVALID: dtype or reduce is none. */
static inline gemini_status_t gmi_reduce_check(uint32_t dtype, gmi_reduce_t reduce) {
  if (!gmi_dtype_bytes(dtype)) return gmi_fail(GEMINI_ERR_INVALID, 0, "dtype is %u, which is no GEMINI_DTYPE_*", dtype);
  if (reduce > GMI_REDUCE_MAX) return gmi_fail(GEMINI_ERR_INVALID, 0, "reduce is %d, must be 0 to 2", (int)reduce);
  return GEMINI_OK;
}

/* Values are of type GEMINI_DTYPE_*: to[i] = from[0][i] + from[1][i] + ... for i below count. to may be one of the
 * arrays; arrays may be unaligned. Pure function: any thread. */
void gmi_reduce(uint32_t dtype, gmi_reduce_t reduce, uint32_t ranks, const void *const *from, void *to, uint64_t count);

#endif
