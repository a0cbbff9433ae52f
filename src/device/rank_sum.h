/* The kernel of rank_sum.cu, which adds the values of ranks, or of two arrays, in their order.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_RANK_SUM_H
#define GMI_RANK_SUM_H

#include <stdint.h>

/* The PTX of rank_sum.cu, which the build embeds. */
extern const char gmi_rank_sum_ptx[];

enum { GMI_RANK_SUM_THREADS = 256 /* of a block */ };

/* The kernel's only argument, by value; rank_sum.cu declares the same layout as struct args. own becomes what
 * gmi_reduce() (sum.h) makes of the values of all ranks. */
typedef struct gmi_rank_sum {
  uint64_t own;        /* device address of this rank's values, and of the result; a multiple of a value's size */
  uint64_t others;     /* of the other ranks' values: a slot for each, in the order of ranks; a multiple of 16 */
  uint64_t slot_bytes; /* a multiple of 16 */
  uint64_t count;      /* values */
  uint32_t rank, ranks;
  uint32_t dtype, reduce; /* GEMINI_DTYPE_*, gmi_reduce_t */
} gmi_rank_sum_t;

#endif
