/* The CPU as a model's device: plain memory is the C library's. SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "model/device.h"

enum { ALIGN_BYTES = 512 };

static void *alloc(uint64_t bytes) {
  return aligned_alloc(ALIGN_BYTES, (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES);
}
static void *model_alloc(uint64_t bytes) {
  void *ptr = alloc(bytes);
  return ptr != NULL ? memset(ptr, 0, bytes) : NULL;
}
static void *host_alloc(uint64_t bytes) { return calloc(1, bytes); }
static void move(void *to, const void *from, uint64_t bytes) { memcpy(to, from, bytes); }
static void zero(void *to, uint64_t bytes) { memset(to, 0, bytes); }

static void *stream(void) { return NULL; }
static bool stream_prepare(void *which) {
  (void)which;
  return true;
}
static void synchronize(void) {}
static bool failed(void) { return false; }

const device_t device_cpu = {
  .name = "cpu",
  .alloc = alloc,
  .free = free,
  .model_alloc = model_alloc,
  .model_free = free,
  .host_alloc = host_alloc,
  .host_free = free,
  .move = move,
  .zero = zero,
  .stream = stream,
  .stream_prepare = stream_prepare,
  .synchronize = synchronize,
  .failed = failed,
};
