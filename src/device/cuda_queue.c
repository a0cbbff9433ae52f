/* The CUDA device: waits for flags, copies, sums, and copies captured into graphs. SPDX-License-Identifier: Apache-2.0
 *
 * Every operation locks its stream, enters the context, queues, and leaves (gmi_cuda_queue_begin() to _end()). All runs
 * on the caller's thread; queueing blocks only where the driver's queue is full. */
#include <stdlib.h>

#include "base/dtype.h"
#include "device/cuda.h"
#include "device/rank_sum.h"

enum {
  ADD_PACK_BYTES = 16, /* what a thread takes at a time */
  ADD_BLOCKS = 128     /* of a launch, at most: enough bytes on their way for the link to the host, and multiprocessors
                        * stay free for the caller's kernels */
};

/* --- flags --- */

/* Lets the stream that waits for a gate continue, and returns the gate to the free ones. The release store makes what
 * the host wrote before the flag visible to the GPU before the gate opens. Called with flags.lock held. */
static void gate_open(cuda_t *cuda, uint32_t gate) {
  uint64_t number = atomic_load_explicit(&cuda->flags.gates[gate], memory_order_relaxed);
  atomic_store_explicit(&cuda->flags.gates[gate], number + 1, memory_order_release);
  cuda->flags.free_gates[cuda->flags.free_gate_count++] = gate;
}

/* Opens the gates of all waiters whose flags have their values. Takes flags.lock only when there are waiters. */
void gmi_cuda_flag_wake(void *self) {
  cuda_t *cuda = self;
  /* Pairs with the atomic_fetch_add() in gmi_cuda_wait_flag(). Both are read-modify-writes of one word, so one comes
   * first. If the waiter's increment does, this one sees it and looks at the waiters. If this one does, the waiter's
   * increment synchronises with it, and the waiter's next load of the flag sees the value stored before this call. A
   * plain load would allow neither to see the other. */
  if (!atomic_fetch_add(&cuda->flags.waiting, 0)) return;
  pthread_mutex_lock(&cuda->flags.lock);
  for (uint32_t i = 0; i < cuda->flags.waiter_count;) {
    waiter_t *waiter = &cuda->flags.waiters[i];
    if (atomic_load_explicit(waiter->flag, memory_order_acquire) < waiter->value) {
      i++;
      continue;
    }
    gate_open(cuda, waiter->gate); /* the flag must not be read from here on: its owner may free it */
    *waiter = cuda->flags.waiters[--cuda->flags.waiter_count];
    atomic_fetch_sub(&cuda->flags.waiting, 1);
  }
  pthread_mutex_unlock(&cuda->flags.lock);
}

/* Nothing is queued when the flag has its value already. Otherwise: take a gate, queue the wait for it, then register
 * as a waiter and look at the flag once more, as it may have been stored between the two looks; if so, open the gate
 * here. The waiter is registered after the wait has been queued, since the driver may refuse that; flags.lock is not
 * held meanwhile, as queueing may block and flag_wake() must not. */
gemini_status_t gmi_cuda_wait_flag(void *self, uint32_t index, const _Atomic uint64_t *flag, uint64_t value) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!flag) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  if (atomic_load_explicit(flag, memory_order_acquire) < value) {
    uint32_t gate = GATES;
    pthread_mutex_lock(&cuda->flags.lock);
    if (cuda->flags.free_gate_count) gate = cuda->flags.free_gates[--cuda->flags.free_gate_count];
    pthread_mutex_unlock(&cuda->flags.lock);
    if (gate == GATES) {
      status = gmi_cuda_no_memory("waits for flags");
    } else {
      /* Relaxed: the gate belongs to this call, and its last change happened under the lock just taken. */
      uint64_t open = atomic_load_explicit(&cuda->flags.gates[gate], memory_order_relaxed) + 1;
      status = gmi_cuda_done(cuda,
                             cuda->driver->stream_wait_value(
                                 queue.stream->native, cuda->flags.gates_address + gate * sizeof *cuda->flags.gates,
                                 open, CU_WAIT_VALUE_GEQ),
                             "cuStreamWaitValue64");
      pthread_mutex_lock(&cuda->flags.lock);
      if (status) {
        cuda->flags.free_gates[cuda->flags.free_gate_count++] = gate;
      } else {
        atomic_fetch_add(&cuda->flags.waiting, 1);
        if (atomic_load(flag) >= value) { /* stored since the first look */
          gate_open(cuda, gate);
          atomic_fetch_sub(&cuda->flags.waiting, 1);
        } else {
          cuda->flags.waiters[cuda->flags.waiter_count++] = (waiter_t){ flag, value, gate, 0 };
        }
      }
      pthread_mutex_unlock(&cuda->flags.lock);
    }
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

/* --- queued work --- */

gemini_status_t gmi_cuda_copy(void *self, uint32_t index, void *dst, const void *src, uint64_t size_bytes,
                              uint32_t kind) {
  cuda_t *cuda = self;
  queue_t queue;
  if (kind > GMI_COPY_D2D || ((!dst || !src) && size_bytes)) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  const gmi_cuda_driver_t *driver = cuda->driver;
  cu_stream_t stream = queue.stream->native;
  if (!size_bytes) {
  } else if (kind == GMI_COPY_H2D) {
    status = gmi_cuda_done(cuda, driver->copy_h2d((uintptr_t)dst, src, size_bytes, stream), "cuMemcpyHtoDAsync");
  } else if (kind == GMI_COPY_D2H) {
    status = gmi_cuda_done(cuda, driver->copy_d2h(dst, (uintptr_t)src, size_bytes, stream), "cuMemcpyDtoHAsync");
  } else {
    status =
        gmi_cuda_done(cuda, driver->copy_d2d((uintptr_t)dst, (uintptr_t)src, size_bytes, stream), "cuMemcpyDtoDAsync");
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

gemini_status_t gmi_cuda_zero(void *self, uint32_t index, void *dst, uint64_t size_bytes) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!dst && size_bytes) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  if (size_bytes)
    status = gmi_cuda_done(cuda, cuda->driver->set_bytes((uintptr_t)dst, 0, size_bytes, queue.stream->native),
                           "cuMemsetD8Async");
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

gemini_status_t gmi_cuda_call(void *self, uint32_t index, void (*fn)(void *user), void *user) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!fn) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  status = gmi_cuda_done(cuda, cuda->driver->host_call(queue.stream->native, fn, user), "cuLaunchHostFunc");
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

gemini_status_t gmi_cuda_sum_squares(void *self, uint32_t index, const void *src, uint32_t dtype, uint64_t count,
                                     double *sum) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!sum || (!src && count) || dtype > GEMINI_DTYPE_F64 || count > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin_sum(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  if (stream->sums && stream->sums->count == SUMS) status = gmi_cuda_sums_flush(cuda, stream);
  if (!status && !stream->sums) status = gmi_cuda_sums_new(cuda, &stream->sums);
  if (!status) {
    sum_batch_t *batch = stream->sums;
    batch->items[batch->count] = (gmi_cuda_sum_t){ .src = (uintptr_t)src, .count = count, .dtype = dtype };
    batch->sums[batch->count++] = sum;
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

/* The kernel of rank_sum.cu, of two arrays, is the addition. Compiling its PTX takes a while, so only devices that add
 * load it. Called in the context. */
static gemini_status_t adds_open(cuda_t *cuda) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  gemini_status_t status = GEMINI_OK;
  pthread_mutex_lock(&cuda->adds.lock);
  if (!cuda->adds.module) {
    cu_module_t module = NULL;
    status = gmi_cuda_done(cuda, driver->module_load(&module, gmi_rank_sum_ptx), "cuModuleLoadData");
    if (!status) {
      status = gmi_cuda_done(cuda, driver->module_function(&cuda->adds.kernel, module, "gmi_rank_sum"),
                             "cuModuleGetFunction");
      if (status) driver->module_unload(module);
      else cuda->adds.module = module;
    }
  }
  pthread_mutex_unlock(&cuda->adds.lock);
  return status;
}

/* dst may be page-locked host memory, whose addresses the GPU shares (device_lacks() of cuda.c). */
gemini_status_t gmi_cuda_add(void *self, uint32_t index, void *dst, const void *src, uint32_t dtype, uint64_t count) {
  cuda_t *cuda = self;
  queue_t queue;
  if (dtype > GEMINI_DTYPE_F64 || count > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  const uint64_t bytes = count * gmi_dtype_bytes(dtype), packs = (bytes + ADD_PACK_BYTES - 1) / ADD_PACK_BYTES;
  if (count && (!dst || !src || (uintptr_t)dst % gmi_dtype_bytes(dtype) || (uintptr_t)src % ADD_PACK_BYTES))
    return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  status = adds_open(cuda);
  if (!status && count) {
    gmi_rank_sum_t args = { .own = (uintptr_t)dst,
                            .others = (uintptr_t)src,
                            .slot_bytes = packs * ADD_PACK_BYTES,
                            .count = count,
                            .ranks = 2,
                            .dtype = dtype };
    void *parameters[] = { &args };
    const uint64_t blocks = (packs + GMI_RANK_SUM_THREADS - 1) / GMI_RANK_SUM_THREADS;
    status =
        gmi_cuda_done(cuda,
                      cuda->driver->launch(cuda->adds.kernel, blocks < ADD_BLOCKS ? (unsigned)blocks : ADD_BLOCKS, 1, 1,
                                           GMI_RANK_SUM_THREADS, 1, 1, 0, queue.stream->native, parameters, NULL),
                      "cuLaunchKernel");
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

/* --- graphs --- */

/* Copies that are added to a graph that the caller captures from a stream. They go to a side stream: a wait for `begin`
 * brings it into the capture, copies queued on it become nodes beside the captured kernels, and the captured stream
 * waits for `copied` after each of them. A copy into a frame first waits for that frame's `used` event, recorded behind
 * its last reader. Guarded by the stream's lock. */
typedef struct capture {
  stream_t *stream;
  cu_stream_t side;
  bool begun;  /* the side stream is in the capture */
  uint64_t id; /* the driver's id of that capture; 0 where the driver cannot tell it */
  uint32_t frames;
  uint32_t reserved;
  cu_event_t begin, copied;
  struct {
    cu_event_t event;
    bool recorded;
  } used[]; /* [frames] */
} capture_t;

static void capture_free(cuda_t *cuda, capture_t *capture) {
  if (capture->side) cuda->driver->stream_destroy(capture->side);
  if (capture->begin) cuda->driver->event_destroy(capture->begin);
  if (capture->copied) cuda->driver->event_destroy(capture->copied);
  for (uint32_t i = 0; i < capture->frames; i++)
    if (capture->used[i].event) cuda->driver->event_destroy(capture->used[i].event);
  free(capture);
}

void gmi_cuda_capture_close(void *self, void *opened) {
  if (!opened) return;
  entry_t had = gmi_cuda_enter(self);
  capture_free(self, opened);
  gmi_cuda_leave(self, had);
}

gemini_status_t gmi_cuda_capture_open(void *self, uint32_t index, uint32_t frames, void **capture_out) {
  cuda_t *cuda = self;
  stream_t *stream = gmi_cuda_stream_of(cuda, index);
  if (!stream || !frames || !capture_out) return GEMINI_ERR_INVALID;
  capture_t *capture = calloc(1, sizeof *capture + (size_t)frames * sizeof *capture->used);
  if (!capture) return gmi_cuda_no_memory("a capture");
  capture->stream = stream;
  capture->frames = frames;
  entry_t had = gmi_cuda_enter(cuda);
  const gmi_cuda_driver_t *driver = cuda->driver;
  gemini_status_t status =
      gmi_cuda_done(cuda, driver->stream_create(&capture->side, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate");
  if (status) capture->side = NULL;
  cu_result_t result = driver->event_create(&capture->begin, CU_EVENT_NO_TIME);
  if (result == CU_SUCCESS) result = driver->event_create(&capture->copied, CU_EVENT_NO_TIME);
  for (uint32_t i = 0; result == CU_SUCCESS && i < frames; i++)
    result = driver->event_create(&capture->used[i].event, CU_EVENT_NO_TIME);
  if (!status) status = gmi_cuda_done(cuda, result, "cuEventCreate");
  if (status) capture_free(cuda, capture);
  else *capture_out = capture;
  gmi_cuda_leave(cuda, had);
  return status;
}

/* Called with the stream's lock, in the context. */
static gemini_status_t capture_look(cuda_t *cuda, const capture_t *capture, bool *active_out, uint64_t *id_out) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  const stream_t *stream = capture->stream;
  int state = CU_CAPTURE_NONE;
  cu_result_t result = CU_SUCCESS;
  *id_out = 0;
  if (stream->state == STREAM_LIVE && stream->shared) /* others do not know a stream's handle: it cannot be captured */
    result = driver->capture_info ? driver->capture_info(stream->native, &state, id_out, NULL, NULL, NULL)
                                  : driver->stream_capturing(stream->native, &state);
  *active_out = state != CU_CAPTURE_NONE;
  if (state != CU_CAPTURE_NONE && capture->begun && capture->id != *id_out)
    return gmi_fail(GEMINI_ERR_STATE, 0, "the stream is being captured again, for another graph");
  return gmi_cuda_done(cuda, result == CU_STREAM_CAPTURE_IMPLICIT ? CU_SUCCESS : result, "cuStreamGetCaptureInfo");
}

gemini_status_t gmi_cuda_capture_active(void *self, void *opened, bool *active_out) {
  capture_t *capture = opened;
  uint64_t id;
  bool active = false;
  pthread_mutex_lock(&capture->stream->lock);
  entry_t had = gmi_cuda_enter(self);
  gemini_status_t status = capture_look(self, capture, &active, &id);
  gmi_cuda_leave(self, had);
  pthread_mutex_unlock(&capture->stream->lock);
  if (!status) *active_out = active;
  return status;
}

/* Locks the stream, enters the context, and brings the side stream into the capture the first time. End with
 * capture_end() also after a failure. STATE: the stream is not being captured, or is for another graph. */
static gemini_status_t capture_begin(cuda_t *cuda, capture_t *capture, entry_t *had_out) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  stream_t *stream = capture->stream;
  uint64_t id;
  bool active;
  pthread_mutex_lock(&stream->lock);
  *had_out = gmi_cuda_enter(cuda);
  gemini_status_t status = capture_look(cuda, capture, &active, &id);
  if (!status && !active) status = gmi_fail(GEMINI_ERR_STATE, 0, "the stream is not being captured");
  if (!status && !capture->begun) {
    status = gmi_cuda_done(cuda, driver->event_record(capture->begin, stream->native), "cuEventRecord");
    if (!status)
      status = gmi_cuda_done(cuda, driver->stream_wait(capture->side, capture->begin, 0), "cuStreamWaitEvent");
    capture->begun = !status;
    capture->id = id;
  }
  return status;
}
static void capture_end(cuda_t *cuda, capture_t *capture, entry_t had) {
  gmi_cuda_leave(cuda, had);
  pthread_mutex_unlock(&capture->stream->lock);
}

gemini_status_t gmi_cuda_capture_fetch(void *self, void *opened, uint32_t frame, void *dst, const void *src,
                                       uint64_t size_bytes) {
  cuda_t *cuda = self;
  capture_t *capture = opened;
  const gmi_cuda_driver_t *driver = cuda->driver;
  entry_t had;
  if (frame >= capture->frames) return GEMINI_ERR_INVALID;
  gemini_status_t status = capture_begin(cuda, capture, &had);
  if (!status && capture->used[frame].recorded)
    status =
        gmi_cuda_done(cuda, driver->stream_wait(capture->side, capture->used[frame].event, 0), "cuStreamWaitEvent");
  if (!status)
    status = gmi_cuda_done(cuda, driver->copy_h2d((uintptr_t)dst, src, size_bytes, capture->side), "cuMemcpyHtoDAsync");
  if (!status) status = gmi_cuda_done(cuda, driver->event_record(capture->copied, capture->side), "cuEventRecord");
  if (!status)
    status = gmi_cuda_done(cuda, driver->stream_wait(capture->stream->native, capture->copied, 0), "cuStreamWaitEvent");
  capture_end(cuda, capture, had);
  return status;
}

gemini_status_t gmi_cuda_capture_used(void *self, void *opened, uint32_t frame) {
  cuda_t *cuda = self;
  capture_t *capture = opened;
  entry_t had;
  if (frame >= capture->frames) return GEMINI_ERR_INVALID;
  gemini_status_t status = capture_begin(cuda, capture, &had);
  if (!status)
    status = gmi_cuda_done(cuda, cuda->driver->event_record(capture->used[frame].event, capture->stream->native),
                           "cuEventRecord");
  capture->used[frame].recorded |= !status;
  capture_end(cuda, capture, had);
  return status;
}
