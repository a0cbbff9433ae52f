/* Where a training loop's memory comes from: a device's plain memory, or libgemini. The same loop runs over both.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Five arenas of one layout: parameter and gradient (bf16), master, momentum and variance (fp32). A tensor registered
 * once has its place in each. Under libgemini the gradient reuses the parameter's bytes: 14 bytes a parameter in all.
 *
 * Plain memory is the reference that libgemini is compared with. Its gradients have bytes of their own, so an operator
 * that wrote a gradient before its parameter had been read for the last time would show as a difference.
 *
 * Failure: the first failed call is remembered, and from then on every call does nothing and gives NULL or 0;
 * memory_error() tells. So a loop looks once a step. One thread makes all calls. */
#ifndef BENCH_MEMORY_H
#define BENCH_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "device.h"
#include "gemini.h"

enum { MEMORY_KINDS = 5, MEMORY_BATCH_MAX = 32 }; /* GEMINI_KIND_PARAM .. GEMINI_KIND_VARIANCE */

typedef struct memory_tensor {
  uint64_t first_element, elements;
  bool gradient_written;                 /* in this iteration */
  gemini_tensor_t handles[MEMORY_KINDS]; /* under libgemini */
  void *staged[MEMORY_KINDS];            /* plain, on a GPU: the host's copy of what the host has acquired */
  bool staged_written[MEMORY_KINDS];     /* it goes back */
} memory_tensor_t;

typedef struct memory_block {
  void *ptr;
  uint64_t bytes;
} memory_block_t;

typedef struct memory {
  const gpt_device_t *device;
  bool managed; /* libgemini */
  bool failed;
  char error[640];
  memory_tensor_t *tensors; /* tensor_count of tensor_capacity */
  int tensor_count, tensor_capacity;
  uint64_t elements;        /* of an arena, gaps included: each tensor starts at a multiple of 256 */
  uint64_t tensor_elements; /* gaps not included */

  /* Under libgemini. */
  gemini_manager_t manager;
  gemini_stream_t stream; /* computes; the calling thread only queues work */
  gemini_arena_t arenas[MEMORY_KINDS];
  gemini_access_t held[2 * MEMORY_BATCH_MAX]; /* acquired and not yet released */
  uint64_t held_count;
  bool op_open;

  /* Plain. */
  void *plain[MEMORY_KINDS];

  /* Allocations that live, and what an op needs at once. */
  memory_block_t *blocks; /* block_count of block_capacity */
  uint64_t block_count, block_capacity;
  uint64_t nonmodel_bytes, nonmodel_peak_bytes;
  uint64_t acquired_bytes;     /* on the device, now */
  uint64_t working_peak_bytes; /* largest sum of acquired and non-model bytes in an op */
  char op[64], working_peak_op[64];
} memory_t;

/* Bytes of all arenas as libgemini keeps them, for tensors of these many elements with their gaps. */
uint64_t memory_model_bytes(uint64_t elements);

/* @param device what calls compute on
 * @param config NULL: the device's plain memory; else of the same device */
void memory_open(memory_t *memory, const gpt_device_t *device, const gemini_config_t *config);
/* Also after a failure. */
void memory_close(memory_t *memory);
/* NULL while nothing has failed. */
const char *memory_error(const memory_t *memory);
/* Notes a failed call of libgemini; for callers that call it themselves. True when status is GEMINI_OK. */
bool memory_check(memory_t *memory, gemini_status_t status);

/* Tensors get indices 0, 1, 2 ... and lie in this order. */
int memory_register(memory_t *memory, const char *name, uint64_t elements);
/* After the last registration. All bytes read as zero. */
void memory_ready(memory_t *memory);

void memory_iteration_begin(memory_t *memory);
void memory_iteration_end(memory_t *memory);
void memory_phase(memory_t *memory, uint32_t phase); /* GEMINI_PHASE_* */
void memory_op_begin(memory_t *memory, const char *name);
void memory_op_end(memory_t *memory);

/* Makes tensors first .. first + count - 1 of a kind usable by calls queued from now on, and gives their addresses.
 * A gradient takes the place of its parameter: after writing it, the parameter cannot be read in this iteration. */
void memory_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int first, int count, void **ptrs_out);
/* The calls queued so far were the last to use them. Any part of what was acquired. */
void memory_release(memory_t *memory, uint32_t kind, int first, int count);
/* The same for the calling thread itself, one tensor. Blocks. */
void *memory_host_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int tensor);
void memory_host_release(memory_t *memory, uint32_t kind, int tensor);

/* Activations and workspace, for calls queued from now on; contents undefined. */
void *memory_alloc(memory_t *memory, uint64_t bytes);
/* The calls queued so far were the last to use it. NULL is accepted. */
void memory_free(memory_t *memory, void *ptr);

/* Runs an operator of the device behind those queued before it; args are copied. Plain on the CPU: at once. */
void memory_call(memory_t *memory, gpt_operator_t fn, const void *args, uint64_t args_bytes);
/* memory_call of the device's operator of that name, with the argument struct's fields written in place. */
#define MEMORY_CALL(memory, operator, type, ...) \
  memory_call((memory), (memory)->device->operator, &(type){ __VA_ARGS__ }, sizeof(type))
/* Blocks until the calls queued so far are done. */
void memory_synchronize(memory_t *memory);

/* Norm of all gradients; one that was not written in this iteration counts as zero. Blocks. */
double memory_gradient_norm(memory_t *memory);
/* Runs fn on spans of {gradient, parameter, master, momentum, variance} that cover all elements, late: a chunk's
 * update is done before its next use. Plain: now, one span. user must stay valid until memory_update_wait(). */
void memory_update(memory_t *memory, gemini_update_fn fn, void *user);
void memory_update_wait(memory_t *memory);

#endif
