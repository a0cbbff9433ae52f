/* The tasks on a GPU. SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "common/cli.h"
#include "model/device.h"
#include "model/task.h"

enum {
  KERNEL_EMBED,
  KERNEL_EMBED_GRADIENT,
  KERNEL_NORM,
  KERNEL_NORM_GRADIENT,
  KERNEL_NORM_WEIGHT,
  KERNEL_NORM_WEIGHT_SUM,
  KERNEL_GATE,
  KERNEL_GATE_GRADIENT,
  KERNEL_LOSS,
  KERNEL_LOSS_MEAN,
  KERNEL_FILL,
  KERNEL_HASH
};
static const char *const kernel_names[TASK_KERNELS] = {
  "stack_embed",       "stack_embed_gradient",  "stack_norm", "stack_norm_gradient",
  "stack_norm_weight", "stack_norm_weight_sum", "stack_gate", "stack_gate_gradient",
  "stack_loss",        "stack_loss_mean",       "stack_fill", "stack_hash"
};

static void *kernels[TASK_KERNELS];

bool task_gpu_open(void) {
  return gpu_load(device_cuda_state.gpu, stack_kernels_ptx, kernel_names, kernels, TASK_KERNELS);
}

enum { THREADS = 256, COLUMN_THREADS = 64, HASH_BLOCKS = 2048 };

/* Arguments by address, of variables. */
#define LAUNCH(kernel, grid_x, grid_y, threads, ...) \
  gpu_launch(device_cuda_state.gpu, kernels[kernel], grid_x, grid_y, threads, stream, (void *[]){ __VA_ARGS__ })

static uint32_t blocks_of(uint64_t count, uint32_t threads) { return (uint32_t)((count + threads - 1) / threads); }

static bool adamw(const task_t *t, void *stream) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (gemini_adamw_cuda(&t->with.adamw, t->count, t->out[0], t->out[0], t->out[1], t->out[2], t->out[3], stream,
                        NULL) == GEMINI_OK) {
    return true;
  }
  if (gemini_last_error(&info) == GEMINI_OK) cli_error("bench_stack", "%s: %s", info.operation, info.message);
  return false;
}

static bool queue_task(void *stream, const void *task) {
  gpu_t *gpu = device_cuda_state.gpu;
  task_t t = *(const task_t *)task; /* the driver takes addresses that are not const */
  uint32_t rows = (uint32_t)t.rows, width = (uint32_t)t.width, units = width / TASK_UNIT;
  switch (t.kind) {
  case TASK_GEMM: return gpu_gemm(gpu, &t.gemm, stream);
  case TASK_COPY: return gpu_copy(gpu, t.out[0], t.in[0], t.count, stream);
  case TASK_EMBED: return LAUNCH(KERNEL_EMBED, rows, 1, THREADS, &t.in[0], &t.in[1], &t.out[0], &units);
  case TASK_EMBED_GRADIENT:
    return LAUNCH(KERNEL_EMBED_GRADIENT, rows, 1, THREADS, &t.in[0], &t.in[1], &t.in[2], &t.out[0], &units);
  case TASK_NORM: return LAUNCH(KERNEL_NORM, rows, 1, THREADS, &t.in[0], &t.in[1], &t.out[0], &units);
  case TASK_NORM_GRADIENT:
    return LAUNCH(KERNEL_NORM_GRADIENT, rows, 1, THREADS, &t.in[0], &t.in[1], &t.in[2], &t.in[3], &t.out[0], &t.out[1],
                  &units);
  case TASK_NORM_WEIGHT: {
    uint32_t part_rows = TASK_NORM_ROWS, parts = blocks_of(rows, part_rows);
    return LAUNCH(KERNEL_NORM_WEIGHT, blocks_of(units, COLUMN_THREADS), parts, COLUMN_THREADS, &t.in[0], &t.in[1],
                  &t.in[2], &t.out[1], &units, &rows, &part_rows) &&
           LAUNCH(KERNEL_NORM_WEIGHT_SUM, blocks_of(width, COLUMN_THREADS), 1, COLUMN_THREADS, &t.out[1], &t.out[0],
                  &width, &parts);
  }
  case TASK_GATE: {
    uint64_t all = t.count / TASK_UNIT;
    return LAUNCH(KERNEL_GATE, blocks_of(all, THREADS), 1, THREADS, &t.in[0], &t.in[1], &t.in[2], &t.out[0], &all);
  }
  case TASK_GATE_GRADIENT: {
    uint64_t all = t.count / TASK_UNIT;
    return LAUNCH(KERNEL_GATE_GRADIENT, blocks_of(all, THREADS), 1, THREADS, &t.in[0], &t.out[0], &t.out[1], &all);
  }
  case TASK_LOSS: {
    float share = 1.0f / (float)t.rows;
    return LAUNCH(KERNEL_LOSS, rows, 1, 2 * THREADS, &t.out[0], &t.in[0], &t.out[1], &units, &share);
  }
  case TASK_LOSS_MEAN: return LAUNCH(KERNEL_LOSS_MEAN, 1, 1, THREADS, &t.in[0], &t.out[0], &rows);
  case TASK_ADAMW: return adamw(&t, stream);
  case TASK_FILL: {
    task_fill_t *f = &t.with.fill;
    uint64_t first = t.first - f->origin;
    return LAUNCH(KERNEL_FILL, blocks_of(t.count, THREADS), 1, THREADS, &t.out[0], &t.out[1], &t.count, &f->seed,
                  &first, &f->scale, &f->offset);
  }
  default: {
    uint32_t blocks = blocks_of(t.count, THREADS);
    if (blocks > HASH_BLOCKS) blocks = HASH_BLOCKS;
    return LAUNCH(KERNEL_HASH, blocks, 1, THREADS, &t.in[0], &t.count, &t.first, &t.out[0]);
  }
  }
}

bool task_on_gpu(void *stream, const void *task) {
  bool queued = queue_task(stream, task);
  device_cuda_done(queued);
  return queued;
}
