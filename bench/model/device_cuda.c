/* A GPU as a model's device. SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "model/device.h"

device_cuda_state_t device_cuda_state;
static device_cuda_state_t *const cuda = &device_cuda_state;

void device_cuda_done(bool worked) {
  if (!worked) cuda->failed = true;
}

bool device_cuda_open(gpu_t *gpu) {
  *cuda = (device_cuda_state_t){ .gpu = gpu };
  return gpu_stream_create(gpu, &cuda->stream);
}

void device_cuda_close(void) {
  if (cuda->gpu != NULL && cuda->stream != NULL) gpu_stream_destroy(cuda->gpu, cuda->stream);
  *cuda = (device_cuda_state_t){ .gpu = NULL };
}

static void *stream(void) { return cuda->stream; }
static bool stream_prepare(void *which) {
  if (cuda->prepared == which) return true;
  cuda->prepared = which;
  device_cuda_done(gpu_blas_stream(cuda->gpu, which, 0));
  return !cuda->failed;
}
static void synchronize(void) {
  if (!cuda->failed) device_cuda_done(gpu_stream_synchronize(cuda->gpu, cuda->stream));
}
static bool failed(void) { return cuda->failed; }

/* What is too large leaves the GPU as it is: no failure of it. */
static void *alloc(uint64_t bytes) {
  void *ptr = NULL;
  return !cuda->failed && gpu_alloc_async(cuda->gpu, bytes, cuda->stream, &ptr) ? ptr : NULL;
}
static void free_plain(void *ptr) {
  if (!cuda->failed) device_cuda_done(gpu_free_async(cuda->gpu, ptr, cuda->stream));
}

static void zero(void *to, uint64_t bytes) {
  if (!cuda->failed) device_cuda_done(gpu_set(cuda->gpu, to, 0, bytes, cuda->stream));
}
/* Not of the pool that alloc() takes from: that would keep it when it is freed. */
static void *model_alloc(uint64_t bytes) {
  void *ptr = NULL;
  if (cuda->failed || !gpu_alloc(cuda->gpu, bytes, &ptr)) return NULL;
  zero(ptr, bytes);
  return ptr;
}
static void model_free(void *ptr) {
  if (!cuda->failed) device_cuda_done(gpu_free(cuda->gpu, ptr));
}

static void *host_alloc(uint64_t bytes) {
  void *ptr = NULL;
  return !cuda->failed && gpu_host_alloc(cuda->gpu, bytes, &ptr) ? ptr : NULL;
}
static void host_free(void *ptr) {
  if (cuda->gpu != NULL) gpu_host_free(cuda->gpu, ptr);
}
static void move(void *to, const void *from, uint64_t bytes) {
  if (cuda->failed) return;
  device_cuda_done(gpu_copy(cuda->gpu, to, from, bytes, cuda->stream));
  synchronize();
}

const device_t device_cuda = {
  .name = "cuda",
  .is_gpu = true,
  .alloc = alloc,
  .free = free_plain,
  .model_alloc = model_alloc,
  .model_free = model_free,
  .host_alloc = host_alloc,
  .host_free = host_free,
  .move = move,
  .zero = zero,
  .stream = stream,
  .stream_prepare = stream_prepare,
  .synchronize = synchronize,
  .failed = failed,
};
