/* What a model computes on, without libgemini's part in it: a stream of work, and plain memory. The CPU, where work is
 * done when it is asked for, or a GPU, where it is queued on a stream. SPDX-License-Identifier: Apache-2.0
 *
 * Only the thread that opened the GPU calls the functions of the table. */
#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/gpu.h"

/* A piece of work: done now on the CPU, which has no streams, or queued on a stream of the GPU, a CUstream. args are read
 * before it returns. False when it could not be queued, after printing why. */
typedef bool (*device_work_fn)(void *stream, const void *args);

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

  /* The device's own stream, on which plain memory is given out and taken back; NULL on the CPU. */
  void *(*stream)(void);
  /* Prepares a stream for matrix products. */
  bool (*stream_prepare)(void *stream);
  /* Blocks until the work on the device's own stream is done. */
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

/* For work on the GPU. gpu NULL: not open. */
typedef struct device_cuda_state {
  gpu_t *gpu;
  void *stream;       /* the device's own */
  void *prepared;     /* the last stream that was prepared */
  atomic_bool failed; /* spans of updates are queued on any thread */
} device_cuda_state_t;
extern device_cuda_state_t device_cuda_state;
/* Notes a failure. */
void device_cuda_done(bool worked);

#endif
