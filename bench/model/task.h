/* The operators of bench_stack: tasks, each done by the CPU at once or queued on a GPU's stream.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Matrices are row-major and bf16 unless stated; sums are fp32. Addresses are the device's: on the simulated device,
 * and without a GPU, plain memory. The same task on the same device gives the same bits, wherever its memory lies;
 * ADAMW, FILL and HASH give the same bits on both, as libgemini decides where each chunk's update runs. */
#ifndef BENCH_TASK_H
#define BENCH_TASK_H

#include <stdbool.h>
#include <stdint.h>

#include "common/gpu.h"
#include "gemini_update.h"

enum {
  TASK_GEMM,           /* gemm, of one product of bf16 */
  TASK_COPY,           /* in[0] -> out[0], count bytes; also between host and device */
  TASK_EMBED,          /* in: table (any, width), tokens (rows) int32 -> out: (rows, width) */
  TASK_EMBED_GRADIENT, /* in: dy (any, width), first (rows + 1) int32, where (first[rows]) int32 -> out: dtable (rows,
                          width); row r sums dy's rows where[first[r]] .. where[first[r + 1] - 1], in this order */
  TASK_NORM,           /* RMS norm. in: x (rows, width), weight (width) -> out: y (rows, width) */
  TASK_NORM_GRADIENT, /* in: x, weight, dy, dresidual (rows, width) or NULL -> out: dx + dresidual, scales (rows) fp32 */
  TASK_NORM_WEIGHT,   /* in: x, dy, scales (rows) fp32 -> out: dweight (width), workspace of task_norm_floats() */
  TASK_GATE,          /* in: g, u, v (count each), v or NULL -> out: y = silu(g) u + v, which may be any of them */
  TASK_GATE_GRADIENT, /* in: dy (count), out: g -> dg, u -> du, in place; dv is dy */
  TASK_LOSS,          /* in: targets (rows) int32, out: logits (rows, width) -> their gradient, losses (rows) fp32 */
  TASK_LOSS_MEAN,     /* in: losses (rows) fp32 -> out: their mean, double */
  TASK_ADAMW,         /* adamw; out: parameter (count), whose bytes hold the gradient, master, momentum, variance */
  TASK_FILL,          /* fill; out: parameter, master (count) */
  TASK_HASH           /* in: master (count) -> adds to out: uint64 */
};

/* Element origin + i of the model is offset + scale * a number drawn from [-1, 1) by seed and i. */
typedef struct task_fill {
  uint64_t seed, origin;
  float scale, offset;
} task_fill_t;

typedef struct task {
  int kind; /* TASK_* */
  int rows, width;
  uint64_t count, first; /* FILL, HASH: number of the first element in the model */
  const void *in[4];
  void *out[4];
  gpu_gemm_t gemm;
  union {
    gemini_adamw_t adamw; /* bf16 parameters and gradients */
    task_fill_t fill;
  } with;
} task_t;

enum { TASK_NORM_ROWS = 64, TASK_UNIT = 8 }; /* widths, and counts of gates, are multiples of TASK_UNIT */
/* Of NORM_WEIGHT's workspace. */
static inline uint64_t task_norm_floats(int rows, int width) {
  return (uint64_t)((rows + TASK_NORM_ROWS - 1) / TASK_NORM_ROWS) * (uint64_t)width;
}

/* Does it now, on this thread. */
void task_run(const task_t *task);

/* A task as a device's work: done now, or queued on a stream of the GPU, which must be prepared for GEMM. */
bool task_on_cpu(void *stream, const void *task);
bool task_on_gpu(void *stream, const void *task);

/* The PTX of task_kernels.cu, which the build embeds. */
extern const char stack_kernels_ptx[];

enum { TASK_KERNELS = 12 };
/* Loads them. Needs device_cuda_open() before. */
bool task_gpu_open(void);

#endif
