/* Where a training loop's memory comes from: a device's plain memory, or libgemini.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "memory.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpt.h"

enum { ALIGN_ELEMENTS = 256, NORM_BLOCK_BYTES = 65536 };

static const uint32_t element_bytes[MEMORY_KINDS] = { 2, 2, 4, 4, 4 };

/* ---- Failures ---- */

const char *memory_error(const memory_t *memory) { return memory->failed ? memory->error : NULL; }

static void fail(memory_t *memory, const char *message) {
  if (memory->failed) return;
  memory->failed = true;
  snprintf(memory->error, sizeof memory->error, "%s", message);
}

bool memory_check(memory_t *memory, gemini_status_t status) {
  if (status == GEMINI_OK || memory->failed) return status == GEMINI_OK;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  memory->failed = true;
  if (gemini_last_error(&info) == GEMINI_OK && info.status == status) {
    snprintf(memory->error, sizeof memory->error, "%s: %s", info.operation, info.message);
  } else {
    snprintf(memory->error, sizeof memory->error, "libgemini: %s", gemini_status_string(status));
  }
  return false;
}

/* ---- Opening, tensors, closing ---- */

uint64_t memory_model_bytes(uint64_t elements) {
  return elements * (element_bytes[GEMINI_KIND_PARAM] + element_bytes[GEMINI_KIND_MASTER] +
                     element_bytes[GEMINI_KIND_MOMENTUM] + element_bytes[GEMINI_KIND_VARIANCE]);
}

/* A GPU's operators have printed what failed when it did. */
static void check_device(memory_t *memory) {
  if (memory->device->failed()) fail(memory, "the GPU failed, as said above");
}

void memory_open(memory_t *memory, const gpt_device_t *device, const gemini_config_t *config) {
  memset(memory, 0, sizeof *memory);
  memory->device = device;
  if (config == NULL) {
    device->stream_use(NULL);
    check_device(memory);
    return;
  }
  memory->managed = true;
  if (!memory_check(memory, gemini_manager_open(config, &memory->manager))) return;
  if (!memory_check(memory, gemini_stream_create(memory->manager, &memory->stream))) return;
  if (device->is_gpu) {
    void *native;
    if (!memory_check(memory, gemini_stream_native(memory->manager, memory->stream, &native))) return;
    device->stream_use(native);
    check_device(memory);
  }

  static const char *const names[MEMORY_KINDS] = { "param", "grad", "master", "momentum", "variance" };
  for (uint32_t kind = 0; kind < MEMORY_KINDS; kind++) {
    gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
    arena.kind = kind;
    arena.element_bytes = element_bytes[kind];
    arena.name = names[kind];
    if (kind == GEMINI_KIND_GRAD) {
      arena.reuse = memory->arenas[GEMINI_KIND_PARAM];
    } else if (kind != GEMINI_KIND_PARAM) {
      arena.like = memory->arenas[GEMINI_KIND_PARAM];
    }
    if (!memory_check(memory, gemini_arena_create(memory->manager, &arena, &memory->arenas[kind]))) return;
  }
}

int memory_register(memory_t *memory, const char *name, uint64_t elements) {
  if (memory->failed) return 0;
  if (memory->tensor_count == memory->tensor_capacity) {
    int capacity = 2 * memory->tensor_capacity + 32;
    memory_tensor_t *tensors = realloc(memory->tensors, (size_t)capacity * sizeof *tensors);
    if (tensors == NULL) {
      fail(memory, "out of memory for the list of tensors");
      return 0;
    }
    memory->tensors = tensors;
    memory->tensor_capacity = capacity;
  }
  memory_tensor_t *tensor = &memory->tensors[memory->tensor_count];
  memset(tensor, 0, sizeof *tensor);
  tensor->first_element = (memory->elements + ALIGN_ELEMENTS - 1) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
  tensor->elements = elements;
  memory->elements = tensor->first_element + elements;
  memory->tensor_elements += elements;
  if (memory->managed) {
    /* The counterparts in the other four arenas come into being with the tensor. */
    if (!memory_check(memory, gemini_tensor_register(memory->manager, memory->arenas[GEMINI_KIND_PARAM], name,
                                                     elements * element_bytes[GEMINI_KIND_PARAM], GEMINI_OFFSET_NEXT,
                                                     &tensor->handles[GEMINI_KIND_PARAM]))) {
      return 0;
    }
    for (uint32_t kind = GEMINI_KIND_GRAD; kind < MEMORY_KINDS; kind++) {
      if (!memory_check(memory, gemini_tensor_counterpart(memory->manager, tensor->handles[GEMINI_KIND_PARAM],
                                                          memory->arenas[kind], &tensor->handles[kind]))) {
        return 0;
      }
    }
  }
  return memory->tensor_count++;
}

void memory_ready(memory_t *memory) {
  if (memory->failed || memory->managed) return;
  uint64_t all_bytes = memory_model_bytes(memory->elements) + memory->elements * element_bytes[GEMINI_KIND_GRAD];
  for (int kind = 0; kind < MEMORY_KINDS; kind++) {
    uint64_t bytes = memory->elements * element_bytes[kind];
    memory->plain[kind] = memory->device->alloc(bytes);
    if (memory->plain[kind] == NULL) {
      char message[160];
      snprintf(message, sizeof message,
               "out of plain memory of the device %s for model data: %" PRIu64 " bytes of %" PRIu64,
               memory->device->name, bytes, all_bytes);
      fail(memory, message);
      return;
    }
    memory->device->zero(&(gpt_zero_t){ memory->plain[kind], bytes });
  }
  memory->device->synchronize();
  check_device(memory);
}

void memory_close(memory_t *memory) {
  if (memory->manager != 0) {
    gemini_status_t status = GEMINI_OK;
    if (memory->held_count > 0) { /* after a failure only */
      status = gemini_release(memory->manager, memory->held, memory->held_count, memory->stream);
    }
    if (status == GEMINI_OK && memory->op_open) status = gemini_op_end(memory->manager); /* likewise */
    if (status == GEMINI_OK) status = gemini_stream_destroy(memory->stream);
    if (status == GEMINI_OK) status = gemini_manager_close(memory->manager); /* the rest goes with it */
    memory_check(memory, status);
  }
  for (uint64_t i = 0; !memory->managed && i < memory->block_count; i++) memory->device->free(memory->blocks[i].ptr);
  for (int kind = 0; kind < MEMORY_KINDS; kind++) {
    if (memory->plain[kind] != NULL) memory->device->free(memory->plain[kind]);
    for (int i = 0; i < memory->tensor_count; i++) free(memory->tensors[i].staged[kind]);
  }
  free(memory->blocks);
  free(memory->tensors);
  memory->manager = 0;
  memory->held_count = memory->block_count = 0;
  memset(memory->plain, 0, sizeof memory->plain);
  memory->blocks = NULL;
  memory->tensors = NULL;
}

/* ---- Iterations and operators ---- */

void memory_iteration_begin(memory_t *memory) {
  if (memory->failed) return;
  for (int i = 0; i < memory->tensor_count; i++) memory->tensors[i].gradient_written = false;
  if (memory->managed) memory_check(memory, gemini_iteration_begin(memory->manager));
}

void memory_iteration_end(memory_t *memory) {
  if (!memory->failed && memory->managed) memory_check(memory, gemini_iteration_end(memory->manager));
}

void memory_phase(memory_t *memory, uint32_t phase) {
  if (!memory->failed && memory->managed) memory_check(memory, gemini_phase_set(memory->manager, phase));
}

static void note_working_set(memory_t *memory) {
  if (memory->nonmodel_bytes > memory->nonmodel_peak_bytes) memory->nonmodel_peak_bytes = memory->nonmodel_bytes;
  if (memory->acquired_bytes + memory->nonmodel_bytes <= memory->working_peak_bytes) return;
  memory->working_peak_bytes = memory->acquired_bytes + memory->nonmodel_bytes;
  memcpy(memory->working_peak_op, memory->op, sizeof memory->op);
}

void memory_op_begin(memory_t *memory, const char *name) {
  if (memory->failed) return;
  snprintf(memory->op, sizeof memory->op, "%s", name);
  if (memory->managed) memory->op_open = memory_check(memory, gemini_op_begin(memory->manager, name, memory->stream));
}

void memory_op_end(memory_t *memory) {
  if (memory->failed || !memory->managed) return;
  memory->op_open = false;
  memory_check(memory, gemini_op_end(memory->manager));
}

/* ---- Acquire and release ---- */

static void *plain_address(const memory_t *memory, uint32_t kind, int tensor) {
  return (char *)memory->plain[kind] + memory->tensors[tensor].first_element * element_bytes[kind];
}

/* Plain memory of a GPU as the host uses it: a copy, there while it is acquired. */
static void *stage(memory_t *memory, uint32_t kind, uint32_t mode, int tensor) {
  uint64_t bytes = memory->tensors[tensor].elements * element_bytes[kind];
  void *copy = malloc(bytes);
  if (copy == NULL) {
    fail(memory, "out of memory for the host's copy of a tensor");
    return NULL;
  }
  if (mode & GEMINI_READ) memory->device->move(copy, plain_address(memory, kind, tensor), bytes);
  memory->tensors[tensor].staged[kind] = copy;
  memory->tensors[tensor].staged_written[kind] = (mode & GEMINI_WRITE) != 0;
  check_device(memory);
  return copy;
}

static void unstage(memory_t *memory, uint32_t kind, int tensor) {
  memory_tensor_t *t = &memory->tensors[tensor];
  if (t->staged[kind] == NULL) return;
  if (t->staged_written[kind]) {
    memory->device->move(plain_address(memory, kind, tensor), t->staged[kind], t->elements * element_bytes[kind]);
  }
  free(t->staged[kind]);
  t->staged[kind] = NULL;
  check_device(memory);
}

static void acquire(memory_t *memory, uint32_t tier, uint32_t kind, uint32_t mode, int first, int count,
                    void **ptrs_out) {
  for (int i = 0; i < count; i++) ptrs_out[i] = NULL;
  if (memory->failed) return;
  if (count > MEMORY_BATCH_MAX || memory->held_count + (uint64_t)count > sizeof memory->held / sizeof memory->held[0]) {
    fail(memory, "too many tensors acquired at once");
    return;
  }
  gemini_access_t *accesses = memory->held + memory->held_count;
  for (int i = 0; i < count; i++) {
    accesses[i] = (gemini_access_t){ .object = memory->tensors[first + i].handles[kind], .mode = mode, .tier = tier };
  }
  if (memory->managed) {
    gemini_stream_t stream = tier == GEMINI_TIER_DEVICE ? memory->stream : GEMINI_STREAM_CALLER;
    if (!memory_check(memory, gemini_acquire(memory->manager, accesses, (uint64_t)count, stream))) return;
    memory->held_count += (uint64_t)count;
  }
  for (int i = 0; i < count; i++) {
    memory_tensor_t *tensor = &memory->tensors[first + i];
    if (memory->managed) {
      ptrs_out[i] = accesses[i].ptr;
    } else if (tier == GEMINI_TIER_HOST && memory->device->is_gpu) {
      ptrs_out[i] = stage(memory, kind, mode, first + i);
    } else {
      ptrs_out[i] = plain_address(memory, kind, first + i);
    }
    if (tier == GEMINI_TIER_DEVICE) memory->acquired_bytes += tensor->elements * element_bytes[kind];
    if (kind == GEMINI_KIND_GRAD) tensor->gradient_written = true;
  }
  note_working_set(memory);
}

static void release(memory_t *memory, uint32_t tier, uint32_t kind, int first, int count) {
  if (memory->failed) return;
  gemini_access_t accesses[MEMORY_BATCH_MAX];
  if (count > MEMORY_BATCH_MAX) {
    fail(memory, "too many tensors released at once");
    return;
  }
  for (int i = 0; i < count; i++) {
    const memory_tensor_t *tensor = &memory->tensors[first + i];
    if (tier == GEMINI_TIER_DEVICE) memory->acquired_bytes -= tensor->elements * element_bytes[kind];
    if (!memory->managed) {
      unstage(memory, kind, first + i);
      continue;
    }
    uint64_t at = 0;
    while (at < memory->held_count &&
           (memory->held[at].object != tensor->handles[kind] || memory->held[at].tier != tier)) {
      at++;
    }
    if (at == memory->held_count) {
      fail(memory, "a tensor is released that was not acquired");
      return;
    }
    accesses[i] = memory->held[at];
    memory->held[at] = memory->held[--memory->held_count];
  }
  if (!memory->managed) return;
  gemini_stream_t stream = tier == GEMINI_TIER_DEVICE ? memory->stream : GEMINI_STREAM_CALLER;
  memory_check(memory, gemini_release(memory->manager, accesses, (uint64_t)count, stream));
}

void memory_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int first, int count, void **ptrs_out) {
  acquire(memory, GEMINI_TIER_DEVICE, kind, mode, first, count, ptrs_out);
}

void memory_release(memory_t *memory, uint32_t kind, int first, int count) {
  release(memory, GEMINI_TIER_DEVICE, kind, first, count);
}

void *memory_host_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int tensor) {
  void *ptr = NULL;
  acquire(memory, GEMINI_TIER_HOST, kind, mode, tensor, 1, &ptr);
  return ptr;
}

void memory_host_release(memory_t *memory, uint32_t kind, int tensor) {
  release(memory, GEMINI_TIER_HOST, kind, tensor, 1);
}

/* ---- Activations and workspace ---- */

void *memory_alloc(memory_t *memory, uint64_t bytes) {
  if (memory->failed) return NULL;
  if (memory->block_count == memory->block_capacity) {
    uint64_t capacity = 2 * memory->block_capacity + 64;
    memory_block_t *blocks = realloc(memory->blocks, capacity * sizeof *blocks);
    if (blocks == NULL) {
      fail(memory, "out of memory for the list of allocations");
      return NULL;
    }
    memory->blocks = blocks;
    memory->block_capacity = capacity;
  }
  void *ptr = NULL;
  if (memory->managed) {
    if (!memory_check(memory, gemini_alloc(memory->manager, bytes, memory->stream, &ptr))) return NULL;
  } else {
    ptr = memory->device->alloc(bytes);
    if (ptr == NULL) {
      fail(memory, "out of memory for activations");
      return NULL;
    }
  }
  memory->blocks[memory->block_count++] = (memory_block_t){ ptr, bytes };
  memory->nonmodel_bytes += bytes;
  note_working_set(memory);
  return ptr;
}

void memory_free(memory_t *memory, void *ptr) {
  if (memory->failed || ptr == NULL) return;
  uint64_t at = memory->block_count;
  while (at > 0 && memory->blocks[at - 1].ptr != ptr) at--; /* from the newest: most are freed in reverse */
  if (at == 0) {
    fail(memory, "memory is freed that was not allocated");
    return;
  }
  memory->nonmodel_bytes -= memory->blocks[at - 1].bytes;
  memory->blocks[at - 1] = memory->blocks[--memory->block_count];
  if (memory->managed) {
    memory_check(memory, gemini_free(memory->manager, ptr, memory->stream));
  } else {
    memory->device->free(ptr);
  }
}

/* ---- Calls ---- */

typedef struct job {
  gpt_operator_t fn;
  max_align_t args[]; /* a copy, as the caller's struct is gone when the stream gets here */
} job_t;

static void job_run(void *user) {
  job_t *job = user;
  job->fn(job->args);
  free(job);
}

void memory_call(memory_t *memory, gpt_operator_t fn, const void *args, uint64_t args_bytes) {
  if (memory->failed) return;
  if (!memory->managed || memory->device->is_gpu) { /* a GPU's queue their work themselves */
    fn(args);
    return;
  }
  job_t *job = malloc(sizeof *job + args_bytes);
  if (job == NULL) {
    fail(memory, "out of memory for a queued call");
    return;
  }
  job->fn = fn;
  memcpy(job->args, args, args_bytes);
  if (!memory_check(memory, gemini_stream_call(memory->manager, memory->stream, job_run, job))) free(job);
}

void memory_synchronize(memory_t *memory) {
  if (memory->failed) return;
  if (memory->managed) {
    memory_check(memory, gemini_stream_synchronize(memory->manager, memory->stream));
  } else {
    memory->device->synchronize();
  }
  check_device(memory);
}

/* ---- Norm and update ---- */

/* A gradient that nobody wrote in this iteration still holds the last iteration's bytes. */
static void zero_unwritten_gradients(memory_t *memory) {
  for (int i = 0; i < memory->tensor_count; i++) {
    memory_tensor_t *tensor = &memory->tensors[i];
    if (tensor->gradient_written) continue;
    memory->device->zero(&(gpt_zero_t){ plain_address(memory, GEMINI_KIND_GRAD, i),
                                        tensor->elements * element_bytes[GEMINI_KIND_GRAD] });
    tensor->gradient_written = true;
  }
}

double memory_gradient_norm(memory_t *memory) {
  double norm = 0;
  if (memory->failed) return 0;
  if (memory->managed) {
    gemini_access_t all = { .object = memory->arenas[GEMINI_KIND_GRAD] };
    memory_check(memory, gemini_norm(memory->manager, &all, GEMINI_DTYPE_BF16, memory->stream, &norm));
    return norm;
  }
  /* libgemini's order of additions: left to right in a block, then the blocks left to right. */
  zero_unwritten_gradients(memory);
  norm = memory->device->squares(memory->plain[GEMINI_KIND_GRAD], memory->elements,
                                 NORM_BLOCK_BYTES / element_bytes[GEMINI_KIND_GRAD]);
  if (norm < 0) fail(memory, "out of memory for the norm's sums");
  check_device(memory);
  return sqrt(norm);
}

void memory_update(memory_t *memory, gemini_update_fn fn, void *user) {
  static const uint32_t kinds[] = { GEMINI_KIND_GRAD, GEMINI_KIND_PARAM, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM,
                                    GEMINI_KIND_VARIANCE };
  static const uint32_t modes[] = { GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                    GEMINI_READ_WRITE };
  if (memory->failed) return;
  if (memory->managed) {
    gemini_arena_t arenas[MEMORY_KINDS];
    for (int i = 0; i < MEMORY_KINDS; i++) arenas[i] = memory->arenas[kinds[i]];
    gemini_update_t update = GEMINI_UPDATE_INIT;
    update.flags = GEMINI_UPDATE_LATE;
    update.arenas = arenas;
    update.modes = modes;
    update.arena_count = MEMORY_KINDS;
    update.stream = memory->stream;
    update.fn = fn;
    update.user = user;
    memory_check(memory, gemini_update(memory->manager, &update));
    return;
  }
  zero_unwritten_gradients(memory);
  gemini_update_span_t span = {
    .struct_size = sizeof span,
    .tier = memory->device->is_gpu ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST,
    .element_count = memory->elements,
    .arena_count = MEMORY_KINDS,
  };
  for (int i = 0; i < MEMORY_KINDS; i++) span.ptr[i] = memory->plain[kinds[i]];
  fn(user, &span);
}

void memory_update_wait(memory_t *memory) {
  if (!memory->failed && memory->managed) memory_check(memory, gemini_update_wait(memory->manager));
  check_device(memory);
}
