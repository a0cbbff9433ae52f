/* The memory of a training program: model data and activations under libgemini, or in plain memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * memory.c has one function for each thing that a training program asks of libgemini, in the order in which it needs
 * them. Most of them are one call of the library:
 *
 *   once           memory_open(), memory_register() for each tensor, memory_ready()
 *   an iteration   memory_iteration_begin(), memory_phase(), operators, memory_update(), memory_iteration_end()
 *   an operator    memory_op_begin(), memory_acquire(), memory_alloc(), memory_queue(), memory_free(), memory_release(),
 *                  memory_op_end()
 *   at the end     memory_update_wait(), memory_close()
 *
 * Model data are five arenas of one layout: parameter and gradient (bf16), master, momentum and variance (fp32). A
 * tensor that is registered once has its place in each of them. The gradient takes the bytes of its parameter, so a
 * parameter has 14 bytes in all.
 *
 * The same program runs without libgemini, in plain memory of its device (plain.c). That is the reference: libgemini
 * must not change a bit of the results.
 *
 * Failure: the first failed call is remembered. From then on every call does nothing and returns NULL or 0, so that a
 * program may check memory_error() once a step. One thread makes all calls. */
#ifndef EXAMPLES_MEMORY_H
#define EXAMPLES_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "model/device.h"

enum { MEMORY_KINDS = 5, MEMORY_BATCH_MAX = 32 }; /* GEMINI_KIND_PARAM .. GEMINI_KIND_VARIANCE */
extern const uint32_t memory_element_bytes[MEMORY_KINDS];

typedef struct memory_tensor {
  uint64_t first_element, elements;      /* in every arena */
  gemini_tensor_t handles[MEMORY_KINDS]; /* under libgemini */

  /* In plain memory. */
  bool gradient_written;             /* in this iteration */
  void *staged[MEMORY_KINDS];        /* on a GPU: the host's copy of what the host has acquired */
  bool staged_written[MEMORY_KINDS]; /* the copy goes back */
} memory_tensor_t;

typedef struct memory_block {
  void *ptr;
  uint64_t bytes;
} memory_block_t;

typedef struct memory {
  const device_t *device;
  bool managed; /* under libgemini */
  bool failed;
  char error[640];
  memory_tensor_t *tensors; /* tensor_count of tensor_capacity */
  int tensor_count, tensor_capacity;
  uint64_t elements;        /* of an arena, gaps included: each tensor starts at a multiple of 256 */
  uint64_t tensor_elements; /* gaps not included */

  /* Under libgemini. */
  gemini_manager_t manager;
  gemini_stream_t stream; /* of the operators; the calling thread only queues work on it */
  void *native_stream;    /* on a GPU: the driver's name of it */
  gemini_arena_t arenas[MEMORY_KINDS];
  gemini_access_t held[2 * MEMORY_BATCH_MAX]; /* acquired and not yet released */
  uint64_t held_count;
  bool op_open;

  /* In plain memory. */
  void *plain[MEMORY_KINDS];
  bool own_gradients; /* gradients have bytes of their own */

  /* Allocations that live, and what an operator needs at once. */
  memory_block_t *blocks; /* block_count of block_capacity */
  uint64_t block_count, block_capacity;
  void *host_blocks[2];
  int host_block_count;
  uint64_t nonmodel_bytes, nonmodel_peak_bytes;
  uint64_t acquired_bytes;     /* on the device, now */
  uint64_t working_peak_bytes; /* the largest sum of acquired and non-model bytes in an operator */
  char op[64], working_peak_op[64];
} memory_t;

/* Bytes of all arenas under libgemini, for tensors of these many elements with their gaps. */
uint64_t memory_model_bytes(uint64_t elements);

/* For gemini_config_t.log_fn: the library never prints, so this prints what it logs, to standard error. */
void memory_print_log(void *user, int32_t level, const char *message);
/* Bytes that moved from tier to tier for a reason (GEMINI_REASON_*, GEMINI_REASON_ALL), of a memory under libgemini. */
uint64_t memory_moved_bytes(memory_t *memory, uint32_t from_tier, uint32_t to_tier, uint32_t reason);
/* Statistics of a tier, likewise; zeros after a failure. */
gemini_tier_stats_t memory_tier(memory_t *memory, uint32_t tier);
/* Bytes of all tensors of a kind that are in a tier, likewise. */
uint64_t memory_tier_bytes(memory_t *memory, int kind, uint32_t tier);
/* Prints the plan of the next iterations in words. False when that failed. */
bool memory_print_plan(memory_t *memory);

/* @param device        what computes
 * @param config        of libgemini, for the same device; NULL: plain memory
 * @param own_gradients in plain memory, gradients have bytes of their own. Then an operator that writes a gradient
 *                      before its parameter's last read gives another result than under libgemini, which shows it. */
void memory_open(memory_t *memory, const device_t *device, const gemini_config_t *config, bool own_gradients);
/* Also after a failure. */
void memory_close(memory_t *memory);
/* NULL while nothing has failed. */
const char *memory_error(const memory_t *memory);
/* Notes a failed call of libgemini. True when status is GEMINI_OK. */
bool memory_check(memory_t *memory, gemini_status_t status);
/* Notes another failure; the first one counts. Returns false. */
bool memory_fail(memory_t *memory, const char *message);

/* Tensors get the indices 0, 1, 2, ... and lie in this order. */
int memory_register(memory_t *memory, const char *name, uint64_t elements);
/* After the last registration. All bytes read as zero. */
void memory_ready(memory_t *memory);

void memory_iteration_begin(memory_t *memory);
void memory_iteration_end(memory_t *memory);
void memory_phase(memory_t *memory, uint32_t phase); /* GEMINI_PHASE_* */
void memory_op_begin(memory_t *memory, const char *name);
void memory_op_end(memory_t *memory);

/* Makes tensors first .. first + count - 1 of a kind usable by work that is queued from now on, and gives their
 * addresses. A gradient takes the place of its parameter: once it is acquired for writing, the parameter cannot be read
 * any more in this iteration. */
void memory_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int first, int count, void **ptrs_out);
/* The work queued so far was the last to use them. Any part of what was acquired. */
void memory_release(memory_t *memory, uint32_t kind, int first, int count);
/* The same for the calling thread itself, one tensor. Blocks. */
void *memory_host_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int tensor);
void memory_host_release(memory_t *memory, uint32_t kind, int tensor);

/* Activations and workspace, for work that is queued from now on. Contents are undefined. */
void *memory_alloc(memory_t *memory, uint64_t bytes);
/* The work queued so far was the last to use it. NULL is accepted. */
void memory_free(memory_t *memory, void *ptr);
/* Page-locked memory of the host, until memory_close(); at most 2. */
void *memory_host_alloc(memory_t *memory, uint64_t bytes);

/* Runs an operator behind the work queued before it; args are copied. */
void memory_queue(memory_t *memory, device_work_fn fn, const void *args, uint64_t args_bytes);
/* The same on another stream of libgemini's, such as that of a span of an update. May run on any thread. False when it
 * could not be queued. */
bool memory_queue_on(memory_t *memory, gemini_stream_t stream, device_work_fn fn, const void *args,
                     uint64_t args_bytes);
/* Blocks until the work queued so far is done. */
void memory_synchronize(memory_t *memory);

/* The norm of all gradients; one that was not written in this iteration counts as zero. Blocks. In plain memory
 * squares() adds up the squares of bf16 values in blocks, as libgemini does. */
double memory_gradient_norm(memory_t *memory,
                            double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements));

/* What an update uses: arenas by their kind, and how. */
typedef struct memory_arrays {
  uint32_t count;
  uint32_t kinds[MEMORY_KINDS], modes[MEMORY_KINDS];
} memory_arrays_t;
/* Of an optimizer: gradient, parameter, master, momentum, variance. */
extern const memory_arrays_t memory_optimizer;
/* Runs fn on spans that cover elements first .. first + count - 1 of these arenas; count 0: all elements. Late: a chunk
 * is updated when this does not delay the operators, but before its next use. fn and user must stay valid until
 * memory_update_wait(). A span on the device is queued (memory_queue_on()), one on the host is computed by fn. In plain
 * memory there is one span, on the device. */
void memory_update(memory_t *memory, const memory_arrays_t *arrays, uint64_t first, uint64_t count, gemini_update_fn fn,
                   void *user);
void memory_update_wait(memory_t *memory);

#endif
