/* The memory of a training program: model data and activations under libgemini, or in plain memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * memory.c has one function for each step in which a training program calls libgemini, in the order of use. Most of
 * them are one call of the library:
 *
 * once           memory_open(), memory_register() for each tensor, memory_ready() an iteration
 * memory_iteration_begin(), memory_phase(), operators, memory_update(), memory_iteration_end() an operator
 * memory_op_begin(), memory_acquire(), memory_alloc(), memory_queue(), memory_free(), memory_release(), memory_op_end()
 * at the end     memory_update_wait(), memory_close()
 *
 * Model data are five arenas of one layout: parameter and gradient (bf16), master, momentum and variance (fp32). A
 * tensor is registered once and exists in all of them. A gradient takes the bytes of its parameter, so each parameter
 * needs 14 bytes in total.
 *
 * The same program also runs without libgemini, in plain device memory (plain.c). That is the reference: with libgemini
 * the results must be the same, to the last bit.
 *
 * Failures: the first failed call is recorded. Every later call does nothing and returns NULL or 0, so a program may
 * check memory_error() once a step. One thread makes all calls. */
#ifndef EXAMPLES_MEMORY_H
#define EXAMPLES_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "gemini/group.h"
#include "model/device.h"

enum { MEMORY_KINDS = 5, MEMORY_BATCH_MAX = 32 }; /* GEMINI_KIND_PARAM .. GEMINI_KIND_VARIANCE */
extern const uint32_t memory_element_bytes[MEMORY_KINDS];

typedef struct memory_tensor {
  uint64_t first_element, elements;      /* in every arena */
  gemini_tensor_t handles[MEMORY_KINDS]; /* under libgemini */

  /* In plain memory. */
  bool gradient_written;             /* in this iteration */
  void *staged[MEMORY_KINDS];        /* on a GPU: a host copy, while the tensor is acquired on the host */
  bool staged_written[MEMORY_KINDS]; /* the copy is written back at release */
} memory_tensor_t;

/* The ranks that share the model data, and which of them this process is. */
typedef struct memory_ranks {
  gemini_group_id_t id;
  uint32_t rank, ranks, zero_stage; /* GEMINI_ZERO_* */
} memory_ranks_t;

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
  uint64_t tensor_elements; /* without gaps */

  /* Under libgemini. */
  gemini_manager_t manager;
  gemini_stream_t stream; /* of the operators; the calling thread only queues work on it */
  void *native_stream;    /* on a GPU: the driver's handle of that stream */
  gemini_arena_t arenas[MEMORY_KINDS];
  gemini_group_t group;                       /* NULL: this process has all of the model */
  gemini_access_t held[2 * MEMORY_BATCH_MAX]; /* acquired and not yet released */
  uint64_t held_count;
  bool op_open;

  /* In plain memory. */
  void *plain[MEMORY_KINDS];
  bool own_gradients; /* gradients do not share their parameters' bytes */
  float *sums;        /* of the gradients of several micro-batches */

  /* Live allocations, and the peak of what an operator uses at once. */
  memory_block_t *blocks; /* block_count of block_capacity */
  uint64_t block_count, block_capacity;
  void *host_blocks[2];
  int host_block_count;
  uint64_t nonmodel_bytes, nonmodel_peak_bytes;
  uint64_t acquired_bytes;     /* on the device, now */
  uint64_t working_peak_bytes; /* the largest sum of acquired and non-model bytes in an operator */
  char op[64], working_peak_op[64];
} memory_t;

/* Bytes of all arenas under libgemini, for tensors with so many elements, gaps included. */
uint64_t memory_model_bytes(uint64_t elements);

/* For gemini_config_t.log_fn: prints log lines to standard error; the library itself never prints. */
void memory_print_log(void *user, int32_t level, const char *message);
/* Bytes that libgemini has moved from one tier to another for a reason (GEMINI_REASON_*, GEMINI_REASON_ALL). Only under
 * libgemini, as the next two. */
uint64_t memory_moved_bytes(memory_t *memory, uint32_t from_tier, uint32_t to_tier, uint32_t reason);
/* Statistics of a tier; zeros after a failure. */
gemini_tier_stats_t memory_tier(memory_t *memory, uint32_t tier);
/* Bytes of all tensors of a kind that are in a tier. */
uint64_t memory_tier_bytes(memory_t *memory, int kind, uint32_t tier);
/* Prints a description of the plan for the next iterations. False when that failed. */
bool memory_print_plan(memory_t *memory);

/* @param device        runs the operators @param config        of libgemini, for the same device; NULL: plain memory
 * @param own_gradients in plain memory, gradients do not share their parameters' bytes. An operator that writes a
 * gradient before its parameter's last read then computes another result than under libgemini, so that comparing the
 * two finds the mistake. */
void memory_open(memory_t *memory, const device_t *device, const gemini_config_t *config, bool own_gradients);
/* The same under libgemini, in a group: this process keeps its slices of the model data only. Blocks until all ranks have
 * joined. */
void memory_open_ranks(memory_t *memory, const device_t *device, const gemini_config_t *config,
                       const memory_ranks_t *ranks);
/* Call it after a failure, too. */
void memory_close(memory_t *memory);
/* NULL while nothing has failed. */
const char *memory_error(const memory_t *memory);
/* Records the error if a call of libgemini failed. True when status is GEMINI_OK. */
bool memory_check(memory_t *memory, gemini_status_t status);
/* Records a failure of another kind, unless one is recorded already. Returns false. */
bool memory_fail(memory_t *memory, const char *message);

/* Returns the tensor's index: 0, 1, 2, ... Tensors are placed in the order of registration. */
int memory_register(memory_t *memory, const char *name, uint64_t elements);
/* Call after the last registration. All bytes then read as zero. */
void memory_ready(memory_t *memory);

void memory_iteration_begin(memory_t *memory);
void memory_iteration_end(memory_t *memory);
void memory_phase(memory_t *memory, uint32_t phase); /* GEMINI_PHASE_* */
void memory_op_begin(memory_t *memory, const char *name);
void memory_op_end(memory_t *memory);

/* Makes tensors first .. first + count - 1 of a kind available to work that is queued from now on, and returns their
 * addresses. A gradient takes the bytes of its parameter: once it is acquired for writing, the parameter cannot be read
 * again in this iteration. */
void memory_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int first, int count, void **ptrs_out);
/* Releases tensors, any subset of those acquired: work queued from now on must not use them. */
void memory_release(memory_t *memory, uint32_t kind, int first, int count);
/* Acquires one tensor on the host, for the calling thread to use. Blocks. */
void *memory_host_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int tensor);
void memory_host_release(memory_t *memory, uint32_t kind, int tensor);

/* The next elements of a tensor, from element `from` on, that this process keeps: all of them, unless other ranks keep
 * some. They are the same ones of each kind. False: there are none left, or something has failed. */
bool memory_part_next(memory_t *memory, int tensor, uint64_t from, uint64_t *first_out, uint64_t *count_out);
/* Acquires such a part on the host; memory_host_release() releases it. */
void *memory_host_acquire_part(memory_t *memory, uint32_t kind, uint32_t mode, int tensor, uint64_t first,
                               uint64_t count);

/* Ranks only; without a group, mine is copied and the others do nothing. */
/* Brings a few bytes of each rank to all ranks, in the order of ranks. Blocks until all ranks have called it. */
void memory_exchange(memory_t *memory, const void *mine, uint64_t bytes, void *all_out);
/* The gradients of these tensors are complete, also those that were not written: they are added over the ranks while the
 * backward phase goes on. They must not be acquired. */
void memory_gradients_ready(memory_t *memory, int first, int count);
/* Writes what this process keeps of a kind to its places in a file; when all ranks have, the file holds the whole. */
void memory_store(memory_t *memory, uint32_t kind, int fd);

/* Plain memory only: adds the gradients of micro-batch `index` of `count` to those of the ones before, as libgemini adds
 * gradients over ranks: in float, in the order of micro-batches, rounded once. With the last one, the gradients are the
 * sums. */
void memory_gradients_add(memory_t *memory, int index, int count);

/* Allocates activations or workspace for work that is queued from now on. The contents are undefined. */
void *memory_alloc(memory_t *memory, uint64_t bytes);
/* Frees an allocation: work queued from now on must not use it. NULL is accepted. */
void memory_free(memory_t *memory, void *ptr);
/* Allocates page-locked host memory, which lives until memory_close(); at most 2 allocations. */
void *memory_host_alloc(memory_t *memory, uint64_t bytes);

/* Queues an operator behind the work queued before it; args are copied. */
void memory_queue(memory_t *memory, device_work_fn fn, const void *args, uint64_t args_bytes);
/* The same on another stream of libgemini, such as the one in an update's span. May be called on any thread. False when
 * the work could not be queued. */
bool memory_queue_on(memory_t *memory, gemini_stream_t stream, device_work_fn fn, const void *args,
                     uint64_t args_bytes);
/* Blocks until the work queued so far is done. */
void memory_synchronize(memory_t *memory);

/* Computes the norm of all gradients; one that was not written in this iteration counts as zero. Blocks. In plain
 * memory squares() adds up the squares of bf16 values in blocks, in the same order as libgemini. */
double memory_gradient_norm(memory_t *memory,
                            double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements));

/* The arenas that an update uses, by kind, and the mode of each. */
typedef struct memory_arrays {
  uint32_t count;
  uint32_t kinds[MEMORY_KINDS], modes[MEMORY_KINDS];
} memory_arrays_t;
/* The arenas of an optimizer's update: gradient, parameter, master, momentum, variance. */
extern const memory_arrays_t memory_optimizer;
/* Runs fn on spans that cover elements first .. first + count - 1 of these arenas; count 0: all elements. Updates may
 * run late: at a time that does not delay the operators, but before the chunk's next use. fn and user must stay valid
 * until memory_update_wait(). For a span on the device, fn queues the work (memory_queue_on()); for one on the host, it
 * computes the result itself. In plain memory there is one span, on the device. */
void memory_update(memory_t *memory, const memory_arrays_t *arrays, uint64_t first, uint64_t count, gemini_update_fn fn,
                   void *user);
void memory_update_wait(memory_t *memory);

#endif
