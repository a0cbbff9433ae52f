/* Where bench_stack's memory is, and where its tasks run: all on the device, or under libgemini; on a GPU, or on the
 * simulated device. The same loop runs over all four. SPDX-License-Identifier: Apache-2.0
 *
 * Model data are arenas of one layout: parameter (bf16), whose bytes its gradient takes, master, momentum and variance
 * (fp32): 14 bytes a parameter. Without libgemini the same, each in one allocation of the device's.
 *
 * Failure: the first failed call is remembered, and from then on every call does nothing and gives NULL or 0;
 * place_error() tells. One thread makes all calls. */
#ifndef BENCH_PLACE_H
#define BENCH_PLACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "task.h"

enum { PLACE_KINDS = 5, PLACE_HELD_MAX = 16 }; /* GEMINI_KIND_PARAM .. GEMINI_KIND_VARIANCE */

typedef struct place_tensor {
  uint64_t first, elements;
  gemini_tensor_t handles[2]; /* parameter, gradient; under libgemini */
} place_tensor_t;

typedef struct place_block {
  void *ptr;
  uint64_t bytes;
} place_block_t;

typedef struct place {
  bool managed; /* under libgemini */
  bool failed;
  char error[640];
  task_gpu_t *gpu;  /* borrowed; NULL: the simulated device */
  void *gpu_stream; /* borrowed; of the tasks */
  place_tensor_t *tensors;
  int tensor_count, tensor_capacity;
  uint64_t elements;        /* of an arena, gaps included: each tensor starts at a multiple of 256 */
  uint64_t tensor_elements; /* gaps not included */

  gemini_manager_t manager;
  gemini_stream_t stream;
  gemini_arena_t arenas[PLACE_KINDS];
  gemini_access_t held[PLACE_HELD_MAX];
  uint64_t held_count;
  bool op_open;

  void *plain[PLACE_KINDS];
  place_block_t *blocks; /* plain: allocations that live */
  uint64_t block_count, block_capacity;
  uint64_t nonmodel_bytes, nonmodel_peak_bytes;
  uint64_t hash; /* of place_hash(), on its way */
  void *host_blocks[2];
  int host_block_count;
} place_t;

/* A walk over elements of the model: ADAMW, FILL or HASH. It may still be under way when later tasks run, so it must
 * stay until place_wait(). */
typedef struct place_walk {
  place_t *place;
  task_t task;                    /* kind, and with */
  void *device_hash;              /* HASH */
  _Atomic uint64_t host_hash;     /* HASH */
  _Atomic uint64_t host_elements; /* how many were walked on the host */
  atomic_bool failed;             /* a part could not be queued */
} place_walk_t;

/* @param config NULL: without libgemini
 * @param gpu    NULL: the simulated device. Else kernels, and a stream that gpu_blas_stream() knows; both borrowed */
void place_open(place_t *place, const gemini_config_t *config, task_gpu_t *gpu, void *gpu_stream);
/* Also after a failure. */
void place_close(place_t *place);
/* NULL while nothing has failed. */
const char *place_error(const place_t *place);
/* Notes a failed call of libgemini. True when status is GEMINI_OK. */
bool place_check(place_t *place, gemini_status_t status);

/* Tensors get indices 0, 1, 2 ... and lie in this order. */
int place_register(place_t *place, const char *name, uint64_t elements);
/* After the last registration. All bytes read as zero. */
void place_ready(place_t *place);

void place_iteration_begin(place_t *place);
void place_iteration_end(place_t *place);
void place_phase(place_t *place, uint32_t phase); /* GEMINI_PHASE_* */
void place_op_begin(place_t *place, const char *name);
void place_op_end(place_t *place);

/* Makes tensors first .. first + count - 1 usable by tasks queued from now on: GEMINI_KIND_PARAM to read, or
 * GEMINI_KIND_GRAD to write whole, which takes the place of the parameter. One such range at a time. */
void place_acquire(place_t *place, uint32_t kind, int first, int count, void **ptrs_out);
/* The tasks queued so far were the last to use it. */
void place_release(place_t *place);

/* Device memory for tasks queued from now on; contents undefined. */
void *place_alloc(place_t *place, uint64_t bytes);
/* The tasks queued so far were the last to use it. NULL is accepted. */
void place_free(place_t *place, void *ptr);
/* Page-locked host memory, until place_close(); at most 2. */
void *place_host_alloc(place_t *place, uint64_t bytes);

/* Queues a task; it is copied. */
void place_queue(place_t *place, const task_t *task);
/* Walks elements first .. first + count - 1, wherever they are, behind the tasks queued so far, and returns at once; a
 * chunk is walked before its next use. */
void place_walk(place_t *place, place_walk_t *walk, uint64_t first, uint64_t count);
/* Blocks until the tasks queued so far are done. */
void place_synchronize(place_t *place);
/* Blocks until all walks and tasks are done. */
void place_wait(place_t *place);
/* Over all masters. Blocks. */
uint64_t place_hash(place_t *place);

#endif
