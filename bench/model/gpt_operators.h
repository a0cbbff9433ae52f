/* The operators of gpt.h as a table: the CPU's, which compute when they are called, and a GPU's, which queue kernels
 * and matrix products. SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_GPT_OPERATORS_H
#define BENCH_GPT_OPERATORS_H

#include <stdbool.h>
#include <stdint.h>

#include "model/device.h"
#include "model/gpt.h"

/* A range of elements for AdamW; what gpt_adamw_range() takes. */
typedef struct gpt_adamw_span {
  gpt_adamw_factors_t factors;
  uint64_t count;
  const uint16_t *gradient;
  uint16_t *parameter;
  float *master, *momentum, *variance;
} gpt_adamw_span_t;

typedef struct gpt_operators {
  const device_t *device; /* on which they compute */

  /* Each takes its gpt_*_t; what gpt.h calls host memory is of the device's host_alloc(). adamw takes a
   * gpt_adamw_span_t. */
  device_work_fn copy, zero, store, embed_forward, embed_backward, norm_forward, norm_backward, linear_forward,
      linear_backward_x, linear_backward_weight, attention_forward, attention_backward, gelu_forward, gelu_backward,
      loss, adamw;
  /* Sums of squares of count bf16 values, block by block: sums of block_elements each, in double, left to right, added
   * up likewise. Blocks. Negative when memory for it ran out. */
  double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements);

  /* What workspaces must hold, in floats; 0: none is needed. Of panel: any linear of a block of this width, and the
   * head. Of attention: forwards; backwards twice as many. */
  uint64_t (*panel_floats)(int width);
  uint64_t (*attention_floats)(int context, int heads);
  uint64_t (*norm_floats)(int rows);
  uint64_t (*loss_floats)(int rows);
} gpt_operators_t;

extern const gpt_operators_t gpt_cpu;
/* Needs device_cuda_open(), then gpt_cuda_open(), which loads the kernels; false after printing why. */
extern const gpt_operators_t gpt_cuda;
bool gpt_cuda_open(void);

#endif
