/* The CUDA device, over the CUDA driver opened at run time: open, close, the context and errors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Context. Everything lives in the GPU's primary context, which other users of the process (a framework, the CUDA
 * runtime) share: it is retained, never configured and never reset. Each operation reads the thread's current context
 * (a few nanoseconds); if that is another one, it sets ours and restores the other one afterwards.
 *
 * Marks are events: mark m of a stream is an event in entry m % capacity of the stream's ring. An event is reused once
 * MARK_TIMES marks after its own have been reached; if the stream lags further behind than that, the ring grows. A mark
 * that has left the ring is therefore always known to be reached. An event that records the time costs the GPU one
 * microsecond and the host another; one that does not costs next to nothing. So there are two kinds of marks.
 *
 * Waiting. A thread that waits polls, with sleeps in between. The driver's own ways are worse: it spins, or, for events
 * made for blocking, costs 20 us an event and accepts no more than 55 of them on a held stream; and a thread that waits
 * in the driver may wait for other threads that are blocked in it.
 *
 * Flags. A GPU cannot wait for an arbitrary word of host memory. The stream waits for a *gate* instead, a word in this
 * device's page-locked memory, which wait_flag() or flag_wake() opens when the flag that it stands for has its value.
 * None of this runs on the driver's callback thread, which serves all streams and must not wait. Streams share the
 * GPU's few hardware queues, so a stream held by a gate may hold others behind it. That cannot become a deadlock as
 * long as the code that stores a flag waits only for device work queued before the wait for that flag: then everything
 * waits only for work queued before it, in whatever hardware queue that is.
 *
 * Sums of squares are collected per stream and run in one kernel when anything else is queued on the stream; a host
 * function queued behind the kernel delivers the results.
 *
 * Queues. The driver holds about a thousand copies, kernels and timed events per stream (of calls, waits and untimed
 * events any number). A thread that queues more blocks until the GPU has caught up, and meanwhile threads that create
 * events or lock host memory block behind it. Copies from or to host memory that is not page-locked block as well. A
 * stream's lock may therefore be held for long; looking at marks, waiting for them and waking flags does not take it.
 *
 * Failures. An error in a kernel, the user's included, loses the context: all streams fail from then on, until the
 * process ends. The error is stored for the device (lost), and every sync() returns it.
 *
 * Lock order: streams_lock, stream.lock, stream.points_lock; clock.renew_lock before clock.lock, and clock.lock may be
 * taken in points_lock. The locks of memory, host, flags, sums and adds are innermost. A host function of the user
 * takes none of these. */
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "device/cuda.h"

static uint64_t cuda_now(void *self) {
  (void)self;
  return gmi_now_ns();
}

/* The pause between two polls of something that has been waited for since begin_ns: none at first, then an eighth of
 * the time waited so far, so that polling neither delays short waits nor burns the processor in long ones. */
void gmi_cuda_wait_a_little(uint64_t begin_ns) {
  uint64_t waited_ns = gmi_now_ns() - begin_ns, ns = waited_ns / 8;
  if (waited_ns < WAIT_SPIN_NS) return;
  if (ns < WAIT_SLEEP_MIN_NS) ns = WAIT_SLEEP_MIN_NS;
  if (ns > WAIT_SLEEP_MAX_NS) ns = WAIT_SLEEP_MAX_NS;
  nanosleep(&(struct timespec){ 0, (long)ns }, NULL);
}

/* --- errors and the context --- */

/* Does this error lose the context, so that every later call of the process fails with it? */
static bool loses_context(cu_result_t result) {
  switch (result) {
  case CU_DEINITIALIZED:
  case CU_ECC_UNCORRECTABLE:
  case CU_NVLINK_UNCORRECTABLE:
  case CU_CONTAINED:
  case CU_ILLEGAL_ADDRESS:
  case CU_LAUNCH_TIMEOUT:
  case CU_CONTEXT_IS_DESTROYED:
  case CU_ASSERT:
  case CU_TENSOR_MEMORY_LEAK:
  case CU_MPS_CLIENT_TERMINATED:
  case CU_EXTERNAL_DEVICE: return true;
  default: return result >= CU_HARDWARE_STACK_ERROR && result <= CU_LAUNCH_FAILED;
  }
}

/* Stores an error that lost the context. compare_exchange keeps the first one: it is the cause, later ones follow from
 * it. The value stands alone, so no order with other memory is needed anywhere that `lost` is read. */
void gmi_cuda_note(cuda_t *cuda, cu_result_t result) {
  int none = CU_SUCCESS;
  if (loses_context(result)) atomic_compare_exchange_strong(&cuda->lost, &none, result);
}

gemini_status_t gmi_cuda_failed(cuda_t *cuda, cu_result_t result, const char *function) {
  gmi_cuda_note(cuda, result);
  return gmi_fail(GEMINI_ERR_DEVICE, result, "%s: %s", function, gmi_cuda_error_name(cuda->driver, result));
}
gemini_status_t gmi_cuda_done(cuda_t *cuda, cu_result_t result, const char *function) {
  return result == CU_SUCCESS ? GEMINI_OK : gmi_cuda_failed(cuda, result, function);
}
/* As gmi_cuda_failed(), but CU_OUT_OF_MEMORY becomes the status `full`. */
gemini_status_t gmi_cuda_failed_or_full(cuda_t *cuda, cu_result_t result, const char *function, gemini_status_t full) {
  gemini_status_t status = gmi_cuda_failed(cuda, result, function);
  if (result != CU_OUT_OF_MEMORY) return status;
  return gmi_fail(full, result, "%s: %s", function, gmi_cuda_error_name(cuda->driver, result));
}

bool gmi_cuda_is_lost(const cuda_t *cuda) {
  return atomic_load_explicit(&cuda->lost, memory_order_relaxed) != CU_SUCCESS;
}
void gmi_cuda_distrust(void *self) {
  cuda_t *cuda = self;
  atomic_store(&cuda->distrusted, true);
}
gemini_status_t gmi_cuda_stored_failure(cuda_t *cuda) {
  int lost = atomic_load(&cuda->lost);
  if (lost == CU_SUCCESS) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_DEVICE, lost, "the GPU's context was lost in an earlier failure, %s",
                  gmi_cuda_error_name(cuda->driver, lost));
}

/* Makes our context current for the thread, and sets its capture mode to relaxed: in the other modes some driver calls
 * would invalidate a capture that another thread has begun. Returns what gmi_cuda_leave() restores. A failure here is
 * not reported: the driver call that follows fails, too. */
entry_t gmi_cuda_enter(cuda_t *cuda) {
  entry_t had = { NULL, CU_CAPTURE_MODE_RELAXED };
  cuda->driver->current_get(&had.context);
  if (had.context != cuda->context) cuda->driver->current_set(cuda->context);
  cuda->driver->capture_mode(&had.capture_mode);
  return had;
}
void gmi_cuda_leave(cuda_t *cuda, entry_t had) {
  cuda->driver->capture_mode(&had.capture_mode);
  if (had.context != cuda->context) cuda->driver->current_set(had.context);
}

gemini_status_t gmi_cuda_event_wait(cuda_t *cuda, cu_event_t event) {
  cu_result_t result;
  for (uint64_t begin = gmi_now_ns(); (result = cuda->driver->event_query(event)) == CU_NOT_READY;)
    gmi_cuda_wait_a_little(begin);
  return gmi_cuda_done(cuda, result, "cuEventQuery");
}

/* --- the device --- */

/* The name of a required feature that the device lacks, or NULL. */
static const char *device_lacks(const gmi_cuda_driver_t *driver, cu_device_t device) {
  static const struct {
    int attribute;
    const char *name;
  } needed[] = {
    { CU_ATTRIBUTE_UNIFIED_ADDRESSING, "unified addressing" },
    { CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management" },
    { CU_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit memory operations in streams" },
    { CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED, "page-locking of host memory" },
    { CU_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, "host addresses for page-locked memory" },
  };
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
    int value = 0;
    if (driver->device_attribute(&value, needed[i].attribute, device) != CU_SUCCESS || !value) return needed[i].name;
  }
  return NULL;
}

static void stream_free(cuda_t *cuda, stream_t *stream) {
  if (stream->state != STREAM_NONE && !stream->adopted) cuda->driver->stream_destroy(stream->native);
  if (stream->idle) cuda->driver->event_destroy(stream->idle);
  for (uint64_t i = 0; i < stream->capacity; i++)
    for (int kind = 0; kind < POINT_KINDS; kind++)
      if (stream->points[i].events[kind]) cuda->driver->event_destroy(stream->points[i].events[kind]);
  free(stream->points);
}

/* Also closes a device whose open() failed halfway: what was not made is NULL or 0. */
static void cuda_close(void *self) {
  cuda_t *cuda = self;
  if (!cuda) return;
  const gmi_cuda_driver_t *driver = cuda->driver;
  if (cuda->context) {
    entry_t had = gmi_cuda_enter(cuda);
    /* The order does not matter for streams that wait for one another, as destroying one only waits for its own work.
     * But an adopted stream may be one of ours under another index: adopted ones go first, while the handle is
     * valid. */
    for (int ours = 0; ours < 2; ours++)
      for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++)
        if (ours || cuda->streams[i].adopted) (void)gmi_cuda_stream_destroy(cuda, i);
    for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) stream_free(cuda, &cuda->streams[i]);
    while (cuda->memory.range_count) {
      range_t *range = &cuda->memory.ranges[--cuda->memory.range_count];
      uint64_t pages = range->size_bytes / cuda->granule;
      for (uint64_t at = 0; at < pages; at++) {
        if (!range->pages[at].frame) continue;
        uint64_t size_bytes = gmi_cuda_frame_named(cuda, range->pages[at].frame)->size_bytes;
        driver->memory_unmap(range->base + at * cuda->granule, size_bytes);
        at += size_bytes / cuda->granule - 1;
      }
      driver->address_free(range->base, range->size_bytes);
      free(range->pages);
    }
    for (size_t i = 0; i < cuda->memory.frame_count; i++)
      if (cuda->memory.frames[i].size_bytes) driver->memory_release(cuda->memory.frames[i].memory);
    for (size_t i = 0; i < cuda->host.count; i++) driver->host_unregister((void *)(uintptr_t)cuda->host.ranges[i].base);
    for (sum_batch_t *batch = cuda->sums.all, *next; batch; batch = next) {
      next = batch->next_of_all;
      driver->host_free(batch->items);
      free(batch);
    }
    if (cuda->flags.gates) driver->host_free((void *)cuda->flags.gates);
    if (cuda->sums.module) driver->module_unload(cuda->sums.module);
    if (cuda->adds.module) driver->module_unload(cuda->adds.module);
    for (int i = 0; i < 2; i++)
      if (cuda->clock.bases[i]) driver->event_destroy(cuda->clock.bases[i]);
    if (cuda->clock.stream) driver->stream_destroy(cuda->clock.stream);
    gmi_cuda_leave(cuda, had);
    driver->primary_release(cuda->device);
  }
  pthread_mutex_destroy(&cuda->memory.lock);
  pthread_mutex_destroy(&cuda->host.lock);
  pthread_mutex_destroy(&cuda->flags.lock);
  pthread_mutex_destroy(&cuda->sums.lock);
  pthread_mutex_destroy(&cuda->adds.lock);
  pthread_mutex_destroy(&cuda->clock.renew_lock);
  pthread_mutex_destroy(&cuda->clock.lock);
  pthread_mutex_destroy(&cuda->streams_lock);
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    pthread_mutex_destroy(&cuda->streams[i].lock);
    pthread_mutex_destroy(&cuda->streams[i].points_lock);
  }
  free(cuda->memory.ranges);
  free(cuda->memory.frames);
  free(cuda->host.ranges);
  free(cuda);
}

static gemini_status_t gates_open(cuda_t *cuda) {
  void *gates = NULL;
  cu_result_t result =
      cuda->driver->host_alloc(&gates, GATES * sizeof *cuda->flags.gates, CU_HOST_PORTABLE | CU_HOST_MAPPED);
  if (result != CU_SUCCESS) return gmi_cuda_failed_or_full(cuda, result, "cuMemHostAlloc", GEMINI_ERR_OOM_SYSTEM);
  cuda->flags.gates = gates;
  for (uint32_t i = 0; i < GATES; i++) {
    atomic_init(&cuda->flags.gates[i], 0);
    cuda->flags.free_gates[i] = GATES - 1 - i;
  }
  cuda->flags.free_gate_count = GATES;
  return gmi_cuda_done(cuda, cuda->driver->host_address(&cuda->flags.gates_address, gates, 0),
                       "cuMemHostGetDevicePointer");
}

/* The part of open() that needs the context. Called in it. */
static gemini_status_t context_open(cuda_t *cuda) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  gemini_status_t status = gates_open(cuda);
  if (!status)
    status = gmi_cuda_done(cuda, driver->module_load(&cuda->sums.module, gmi_sum_squares_ptx), "cuModuleLoadData");
  if (!status)
    status = gmi_cuda_done(cuda, driver->module_function(&cuda->sums.kernel, cuda->sums.module, "gmi_sum_squares"),
                           "cuModuleGetFunction");
  if (!status) status = gmi_cuda_base_open(cuda);
  return status;
}

static gemini_status_t cuda_open(const gmi_device_config_t *config, void **self_out) {
  if (!config || !self_out || config->reserved) return GEMINI_ERR_INVALID;
  const gmi_cuda_driver_t *driver = gmi_cuda_driver();
  if (!driver) return GEMINI_ERR_UNSUPPORTED;
  int count = 0;
  cu_device_t device = 0;
  cu_result_t result = driver->init(0);
  if (result == CU_SUCCESS) result = driver->device_count(&count);
  if (result == CU_NO_DEVICE || (result == CU_SUCCESS && !count))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, result, "the CUDA driver finds no GPU on this machine");
  if (result != CU_SUCCESS)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "the CUDA driver does not start: %s",
                    gmi_cuda_error_name(driver, result));
  if (config->ordinal >= (uint32_t)count)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "device_ordinal is %u, this machine has %d GPUs", config->ordinal,
                    count);
  result = driver->device_get(&device, (int)config->ordinal);
  if (result != CU_SUCCESS)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "cuDeviceGet: %s", gmi_cuda_error_name(driver, result));
  const char *lacking = device_lacks(driver, device);
  if (lacking) return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "GPU %u has no %s", config->ordinal, lacking);
  cu_allocation_t allocation = gmi_cuda_allocation_of(driver, device);
  size_t granule = 0;
  result = driver->granularity(&granule, &allocation, CU_GRANULARITY_MINIMUM);
  if (result != CU_SUCCESS || !granule || BASE_ALIGN_BYTES % granule)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "cuMemGetAllocationGranularity: %s, %zu bytes",
                    gmi_cuda_error_name(driver, result), granule);
  if (config->memory_bytes % granule || config->memory_bytes > MEMORY_MAX_BYTES)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "memory_bytes is %llu, must be a multiple of %zu",
                    (unsigned long long)config->memory_bytes, granule);

  cuda_t *cuda = calloc(1, sizeof *cuda);
  if (!cuda) return gmi_cuda_no_memory("a device");
  cuda->driver = driver;
  cuda->device = device;
  cuda->granule = granule;
  cuda->allocation = allocation;
  cuda->memory.budget_bytes = config->memory_bytes;
  pthread_mutex_init(&cuda->memory.lock, NULL);
  pthread_mutex_init(&cuda->host.lock, NULL);
  pthread_mutex_init(&cuda->flags.lock, NULL);
  pthread_mutex_init(&cuda->sums.lock, NULL);
  pthread_mutex_init(&cuda->adds.lock, NULL);
  pthread_mutex_init(&cuda->clock.renew_lock, NULL);
  pthread_mutex_init(&cuda->clock.lock, NULL);
  pthread_mutex_init(&cuda->streams_lock, NULL);
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    pthread_mutex_init(&cuda->streams[i].lock, NULL);
    pthread_mutex_init(&cuda->streams[i].points_lock, NULL);
  }
  gemini_status_t status =
      gmi_cuda_done(cuda, driver->primary_retain(&cuda->context, device), "cuDevicePrimaryCtxRetain");
  if (!status) {
    entry_t had = gmi_cuda_enter(cuda);
    status = context_open(cuda);
    gmi_cuda_leave(cuda, had);
  } else {
    cuda->context = NULL;
  }
  if (status) {
    cuda_close(cuda);
    return status;
  }
  *self_out = cuda;
  return GEMINI_OK;
}

const gmi_device_ops_t gmi_device_cuda = {
  .name = "cuda",
  .chunk_overhead_ns = 100000,
  .link_bytes_per_s = UINT64_C(50000000000),
  .open = cuda_open,
  .close = cuda_close,
  .memory.granularity = gmi_cuda_granularity,
  .memory.resize = gmi_cuda_resize,
  .memory.reserve = gmi_cuda_reserve,
  .memory.unreserve = gmi_cuda_unreserve,
  .memory.frame_create = gmi_cuda_frame_create,
  .memory.frame_destroy = gmi_cuda_frame_destroy,
  .memory.map = gmi_cuda_map,
  .memory.unmap = gmi_cuda_unmap,
  .stream.create = gmi_cuda_stream_create,
  .stream.destroy = gmi_cuda_stream_destroy,
  .stream.mark = gmi_cuda_mark,
  .stream.wait = gmi_cuda_wait,
  .stream.wait_flag = gmi_cuda_wait_flag,
  .stream.flag_wake = gmi_cuda_flag_wake,
  .stream.reached = gmi_cuda_reached,
  .stream.sync = gmi_cuda_sync,
  .stream.mark_time = gmi_cuda_mark_time,
  .queue.copy = gmi_cuda_copy,
  .queue.zero = gmi_cuda_zero,
  .queue.call = gmi_cuda_call,
  .queue.sum_squares = gmi_cuda_sum_squares,
  .queue.add = gmi_cuda_add,
  .memory.host_lock = gmi_cuda_host_lock,
  .memory.host_unlock = gmi_cuda_host_unlock,
  .now = cuda_now,
  .stream.adopt = gmi_cuda_stream_adopt,
  .stream.native = gmi_cuda_stream_native,
  .stream.distrust = gmi_cuda_distrust,
  .pci = gmi_cuda_pci,
  .memory_bytes_per_s = gmi_cuda_memory_bytes_per_s,
  .stream.mark_untimed = gmi_cuda_mark_untimed,
  .stream.renew = gmi_cuda_stream_renew,
  .capture.open = gmi_cuda_capture_open,
  .capture.close = gmi_cuda_capture_close,
  .capture.active = gmi_cuda_capture_active,
  .capture.fetch = gmi_cuda_capture_fetch,
  .capture.used = gmi_cuda_capture_used,
};
