/* What a model computes on, without libgemini's part in it: a stream of work, and plain memory. The CPU, where work is
 * done when it is asked for, or a GPU, where it is queued on a stream. SPDX-License-Identifier: Apache-2.0
 *
 * Only the thread that opened the GPU calls these functions. */
#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/gpu.h"

typedef struct device {
  const char *name;
  bool is_gpu;

  /* Plain memory for activations, aligned to 256 bytes at least. Contents are undefined. NULL: none is left. It may be
   * freed while queued work still uses it: it is given out again behind that work. */
  void *(*alloc)(uint64_t bytes);
  void (*free)(void *ptr);
  /* Plain memory for model data; zeros. NULL: none is left. */
  void *(*model_alloc)(uint64_t bytes);
  void (*model_free)(void *ptr);
  /* Memory of the host that the device copies from and to; zeros. NULL: none is left. */
  void *(*host_alloc)(uint64_t bytes);
  void (*host_free)(void *ptr);

  /* Bytes between plain memory and the caller's own, either way. Blocks. */
  void (*move)(void *to, const void *from, uint64_t bytes);
  /* Queues zeros. */
  void (*zero)(void *to, uint64_t bytes);

  /* Queues the work from now on to this stream, a CUstream; NULL: the device's own. */
  bool (*stream_use)(void *stream);
  /* Blocks until all work is done. */
  void (*synchronize)(void);
  /* True from the first failure on, which has been printed. Work is no longer queued then. */
  bool (*failed)(void);
} device_t;

extern const device_t device_cpu;
/* Needs device_cuda_open() before. */
extern const device_t device_cuda;

/* One GPU a process. gpu is borrowed until device_cuda_close(). False after printing why. */
bool device_cuda_open(gpu_t *gpu);
void device_cuda_close(void);

/* For what queues its work itself: where it goes now. NULL gpu: not open. */
typedef struct device_cuda_state {
  gpu_t *gpu;
  void *own_stream, *stream; /* stream: where work is queued */
  void *blas_stream;         /* the last one that products got a workspace for */
  bool failed;
} device_cuda_state_t;
extern device_cuda_state_t device_cuda_state;
/* Notes a failure. */
void device_cuda_done(bool worked);

#endif
