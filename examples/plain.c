/* memory.c's functions without libgemini: every arena is one allocation in device memory.
 * SPDX-License-Identifier: Apache-2.0 */
#include "plain.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/scalar.h"

/* libgemini adds up squares in blocks of this size, which determines the last bits of the sum. */
enum { NORM_BLOCK_BYTES = 65536 };

static void *address(const memory_t *memory, uint32_t kind, uint64_t element) {
  if (kind == GEMINI_KIND_GRAD && !memory->own_gradients) kind = GEMINI_KIND_PARAM;
  return (char *)memory->plain[kind] + element * memory_element_bytes[kind];
}

void plain_ready(memory_t *memory) {
  uint64_t all_bytes = 0;
  for (uint32_t kind = 0; kind < MEMORY_KINDS; kind++) {
    if (kind == GEMINI_KIND_GRAD && !memory->own_gradients) continue;
    all_bytes += memory->elements * memory_element_bytes[kind];
  }
  for (uint32_t kind = 0; kind < MEMORY_KINDS; kind++) {
    if (kind == GEMINI_KIND_GRAD && !memory->own_gradients) continue;
    uint64_t bytes = memory->elements * memory_element_bytes[kind];
    memory->plain[kind] = memory->device->model_alloc(bytes);
    if (memory->plain[kind] == NULL) {
      char message[160];
      snprintf(message, sizeof message,
               "out of plain memory of the device %s for model data: %" PRIu64 " bytes of %" PRIu64,
               memory->device->name, bytes, all_bytes);
      memory_fail(memory, message);
      return;
    }
  }
  memory->device->synchronize();
}

void plain_close(memory_t *memory) {
  const device_t *device = memory->device;
  device->synchronize();
  free(memory->sums);
  memory->sums = NULL;
  for (uint64_t i = 0; i < memory->block_count; i++) device->free(memory->blocks[i].ptr);
  for (int i = 0; i < memory->host_block_count; i++) device->host_free(memory->host_blocks[i]);
  for (int kind = 0; kind < MEMORY_KINDS; kind++) {
    if (memory->plain[kind] != NULL) device->model_free(memory->plain[kind]);
    memory->plain[kind] = NULL;
    for (int i = 0; i < memory->tensor_count; i++) free(memory->tensors[i].staged[kind]);
  }
}

/* ---- Acquire and release ---- */

/* The host cannot access a GPU's memory: it gets a copy, which exists while the tensor is acquired. */
static void *stage(memory_t *memory, uint32_t kind, uint32_t mode, int tensor) {
  memory_tensor_t *t = &memory->tensors[tensor];
  uint64_t bytes = t->elements * memory_element_bytes[kind];
  void *copy = malloc(bytes);
  if (copy == NULL) {
    memory_fail(memory, "out of memory for the host's copy of a tensor");
    return NULL;
  }
  if (mode & GEMINI_READ) memory->device->move(copy, address(memory, kind, t->first_element), bytes);
  t->staged[kind] = copy;
  t->staged_written[kind] = (mode & GEMINI_WRITE) != 0;
  return copy;
}

void *plain_acquire(memory_t *memory, bool host, uint32_t kind, uint32_t mode, int tensor) {
  if (kind == GEMINI_KIND_GRAD) memory->tensors[tensor].gradient_written = true;
  if (host && memory->device->is_gpu) return stage(memory, kind, mode, tensor);
  return address(memory, kind, memory->tensors[tensor].first_element);
}

void plain_release(memory_t *memory, uint32_t kind, int tensor) {
  memory_tensor_t *t = &memory->tensors[tensor];
  if (t->staged[kind] == NULL) return;
  if (t->staged_written[kind]) {
    memory->device->move(address(memory, kind, t->first_element), t->staged[kind],
                         t->elements * memory_element_bytes[kind]);
  }
  free(t->staged[kind]);
  t->staged[kind] = NULL;
}

/* ---- Norm and update ---- */

/* A gradient that was not written in this iteration still holds the bytes of the last one, and must count as zero. With
 * shared bytes there is nothing to clear: they hold the parameter. */
static void zero_unwritten_gradients(memory_t *memory) {
  for (int i = 0; memory->own_gradients && i < memory->tensor_count; i++) {
    memory_tensor_t *tensor = &memory->tensors[i];
    if (tensor->gradient_written) continue;
    memory->device->zero(address(memory, GEMINI_KIND_GRAD, tensor->first_element),
                         tensor->elements * memory_element_bytes[GEMINI_KIND_GRAD]);
    tensor->gradient_written = true;
  }
}

void plain_gradients_add(memory_t *memory, int index, int count) {
  if (memory->sums == NULL) memory->sums = malloc(memory->elements * sizeof *memory->sums);
  if (memory->sums == NULL || memory->device->is_gpu) {
    memory_fail(memory, memory->sums == NULL ? "out of memory for the sums of gradients"
                                             : "the sums of gradients need a device whose memory the host can use");
    return;
  }
  zero_unwritten_gradients(memory);
  uint16_t *gradient = address(memory, GEMINI_KIND_GRAD, 0);
  for (uint64_t i = 0; i < memory->elements; i++) {
    float value = gpt_f32_from_bf16(gradient[i]);
    memory->sums[i] = index == 0 ? value : memory->sums[i] + value;
    if (index + 1 == count) gradient[i] = gpt_bf16_from_f32(memory->sums[i]);
  }
  for (int i = 0; i < memory->tensor_count && index + 1 < count; i++) memory->tensors[i].gradient_written = false;
}

double plain_gradient_norm(memory_t *memory,
                           double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements)) {
  zero_unwritten_gradients(memory);
  double sum = squares(address(memory, GEMINI_KIND_GRAD, 0), memory->elements,
                       NORM_BLOCK_BYTES / memory_element_bytes[GEMINI_KIND_GRAD]);
  if (sum < 0) memory_fail(memory, "out of memory for the norm's sums");
  return sum < 0 ? 0 : sqrt(sum);
}

void plain_update(memory_t *memory, const memory_arrays_t *arrays, uint64_t first, uint64_t count, gemini_update_fn fn,
                  void *user) {
  zero_unwritten_gradients(memory);
  gemini_update_span_t span = {
    .struct_size = sizeof span,
    .tier = GEMINI_TIER_DEVICE,
    .first_element = first,
    .element_count = count > 0 ? count : memory->elements,
    .arena_count = arrays->count,
  };
  for (uint32_t i = 0; i < arrays->count; i++) span.ptr[i] = address(memory, arrays->kinds[i], first);
  fn(user, &span);
}
