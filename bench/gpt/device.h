/* What a GPT computes on: the operators of gpt.h, and plain memory for them, as a table for the CPU and one for a GPU.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The CPU's operators compute when they are called. A GPU's queue kernels and matrix products on the stream that
 * stream_use() names, and only the thread that opened the GPU may call them. */
#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/gpu.h"
#include "gpt.h"

typedef void (*gpt_operator_t)(const void *args);

typedef struct gpt_device {
  const char *name;
  bool is_gpu;

  /* Each takes its gpt_*_t; what gpt.h calls host memory is page-locked for a GPU, as of host_alloc(). */
  gpt_operator_t copy, zero, store, embed_forward, embed_backward, norm_forward, norm_backward, linear_forward,
      linear_backward_x, linear_backward_weight, attention_forward, attention_backward, gelu_forward, gelu_backward,
      loss;
  /* gpt_adamw_range() on a stream, NULL: stream_use()'s. */
  void (*adamw)(void *stream, const gpt_adamw_factors_t *adamw, uint64_t count, const uint16_t *gradient,
                uint16_t *parameter, float *master, float *momentum, float *variance);

  /* What workspaces must hold, in floats; 0: none is needed. Of panel: any linear of a block of this width, and the
   * head. Of attention: forwards; backwards twice as many. */
  uint64_t (*panel_floats)(int width);
  uint64_t (*attention_floats)(int context, int heads);
  uint64_t (*norm_floats)(int rows);
  uint64_t (*loss_floats)(int rows);

  /* Plain memory for operators, aligned to 256 bytes at least; NULL: none is left. Freed once what is queued is done. */
  void *(*alloc)(uint64_t bytes);
  void (*free)(void *ptr);
  /* Bytes between plain memory and the caller's own, either way. Blocks. */
  void (*move)(void *to, const void *from, uint64_t bytes);
  /* Sums of squares of count bf16 values, block by block: sums of block_elements each, in double, left to right, added
   * up likewise. Blocks. Negative when memory for it ran out. */
  double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements);
  /* Host memory of zeros, for what operators copy from and to. NULL: none is left. */
  void *(*host_alloc)(uint64_t bytes);
  void (*host_free)(void *ptr);

  /* Names the stream for operators from now on, a CUstream; NULL: the device's own. */
  bool (*stream_use)(void *stream);
  void (*synchronize)(void);
  /* True from the first failure on, which has been printed. Operators then do nothing. */
  bool (*failed)(void);
} gpt_device_t;

extern const gpt_device_t gpt_device_cpu;
/* Needs gpt_cuda_open() before. */
extern const gpt_device_t gpt_device_cuda;

/* One GPU a process. gpu is borrowed until gpt_cuda_close(). False after printing why. */
bool gpt_cuda_open(gpu_t *gpu);
void gpt_cuda_close(void);

#endif
