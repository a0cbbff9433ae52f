/* The CUDA device: streams, their marks, and the times of marks. SPDX-License-Identifier: Apache-2.0
 *
 * Marks. Mark m of a stream is an event in entry m % capacity of the stream's ring of points. `recorded` is the last
 * mark that was recorded, `reached` the last that is known to be reached; both only grow. A mark not above `reached`
 * needs no event any more: its entry may have been reused, and nothing but the number is looked at.
 *
 * Threads. Any thread may call any operation. A thread that queues work holds stream.lock, possibly for long (the
 * driver's queue may be full). Threads that look at marks take points_lock only; its holders query events, but neither
 * queue anything nor create events, which can block, too. `recorded` and `reached` are atomic, so that the most
 * frequent question, "is this mark reached?", is mostly answered without a lock. "No" is the answer for ASK_AGAIN_NS.
 *
 * Distrust. Once queued work may end without being done (gmi_cuda_distrust()), `reached` grows no more. Events are
 * still looked at, so that waits end with the work and points are reused.
 *
 * Failures. A failed driver call leaves the stream's records as they were. An error that loses the context is stored
 * for the device (gmi_cuda_note()). */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "device/cuda.h"

/* --- marks --- */

/* The point that holds this mark, or did, or will. Called with points_lock held, as event_of() and note_reached(). */
static point_t *point_of(stream_t *stream, uint64_t mark) { return &stream->points[mark & (stream->capacity - 1)]; }

static cu_event_t event_of(stream_t *stream, uint64_t mark) {
  const point_t *point = point_of(stream, mark);
  return point->events[point->kind];
}

/* Raises `reached`, after the mark was seen reached. The load is relaxed: only holders of points_lock write it. The
 * store releases what the driver made visible to this thread (the results of finished work); it pairs with the acquire
 * loads in gmi_cuda_reached() and gmi_cuda_sync(). */
static void note_reached(const cuda_t *cuda, stream_t *stream, uint64_t mark) {
  if (atomic_load_explicit(&stream->reached, memory_order_relaxed) >= mark) return;
  if (atomic_load_explicit(&cuda->distrusted, memory_order_acquire)) return;
  stream->noted_ns = gmi_now_ns();
  atomic_store_explicit(&stream->reached, mark, memory_order_release);
}

/* Was this mark, or an earlier one, not reached a moment ago? Marks are reached in their order. A question costs a call
 * of the driver with locks that the thread that launches kernels needs, too, and an operator asks about hundreds. */
static bool was_just_unreached(const stream_t *stream, uint64_t mark) {
  return mark >= atomic_load_explicit(&stream->unreached, memory_order_relaxed) &&
         gmi_now_ns() < atomic_load_explicit(&stream->unreached_until_ns, memory_order_relaxed);
}

/* Queries a recorded mark: CU_SUCCESS (reached), CU_NOT_READY, or a failure. Called with points_lock held, in the
 * context. */
static cu_result_t look(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  if (atomic_load_explicit(&stream->reached, memory_order_relaxed) >= mark) return CU_SUCCESS;
  cu_result_t result = cuda->driver->event_query(event_of(stream, mark));
  if (result == CU_SUCCESS) note_reached(cuda, stream, mark);
  if (result == CU_NOT_READY) {
    atomic_store_explicit(&stream->unreached, mark, memory_order_relaxed);
    atomic_store_explicit(&stream->unreached_until_ns, gmi_now_ns() + ASK_AGAIN_NS, memory_order_relaxed);
  }
  gmi_cuda_note(cuda, result);
  return result;
}

/* May this mark's point be reused? No thread is queueing a wait for its event (users), and MARK_TIMES later marks have
 * been reached, so that mark_time() refuses it anyway. Called with both locks held, in the context; `recorded` and
 * `reached` are written under these locks, so relaxed loads suffice. */
static bool point_is_free(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  if (point_of(stream, mark)->users) return false;
  uint64_t needed = mark + MARK_TIMES;
  uint64_t recorded = atomic_load_explicit(&stream->recorded, memory_order_relaxed);
  if (atomic_load_explicit(&stream->reached, memory_order_relaxed) >= needed) return true;
  /* A mark halfway to the newest one is queried first: if it is reached, the next many calls are answered above without
   * a driver call. */
  return look(cuda, stream, needed + (recorded - needed) / 2) == CU_SUCCESS || look(cuda, stream, needed) == CU_SUCCESS;
}

/* Doubles the ring. Called with both locks held. */
static gemini_status_t points_grow(stream_t *stream) {
  uint64_t capacity = stream->capacity ? stream->capacity * 2 : POINTS_FIRST;
  point_t *points = capacity <= POINTS_MAX ? calloc(capacity, sizeof *points) : NULL;
  if (!points) return gmi_cuda_no_memory("marks");
  uint64_t recorded = atomic_load_explicit(&stream->recorded, memory_order_relaxed);
  /* The ring grows only when it is full or does not exist yet, so its entries are those of the last `capacity`
   * marks. */
  for (uint64_t i = 0; i < stream->capacity; i++)
    points[(recorded - i) & (capacity - 1)] = *point_of(stream, recorded - i);
  free(stream->points);
  stream->points = points;
  stream->capacity = capacity;
  return GEMINI_OK;
}

/* Gives the mark a free point, growing the ring if need be. Called with both locks held, in the context. */
static gemini_status_t point_prepare(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  gemini_status_t status = GEMINI_OK;
  if (!stream->capacity || (mark > stream->capacity && !point_is_free(cuda, stream, mark - stream->capacity)))
    status = points_grow(stream);
  return status;
}

/* --- streams --- */

/* The stream of that index if it was ever created, or NULL. The acquire load pairs with the release store in
 * stream_add(): a thread that sees `made` sees the record initialised. Whether the stream is live now is its state,
 * under its lock. */
stream_t *gmi_cuda_stream_of(cuda_t *cuda, uint32_t index) {
  if (index >= GMI_DEVICE_MAX_STREAMS) return NULL;
  return atomic_load_explicit(&cuda->streams[index].made, memory_order_acquire) ? &cuda->streams[index] : NULL;
}
/* The acquire load pairs with the release store in mark_record(): the mark's event has been recorded and its point is
 * filled in. */
static bool mark_recorded(const stream_t *stream, uint64_t mark) {
  return mark <= atomic_load_explicit(&stream->recorded, memory_order_acquire);
}

/* Host function behind a batch of sums: copies the results to where they were requested, and returns the batch to the
 * free list. Runs on the driver's callback thread, which must not call the driver. Taking sums.lock there is safe: no
 * holder of it calls the driver. */
static void sums_deliver(void *user) {
  sum_batch_t *batch = user;
  cuda_t *cuda = batch->cuda;
  for (uint32_t i = 0; i < batch->count; i++) *batch->sums[i] = batch->items[i].sum;
  pthread_mutex_lock(&cuda->sums.lock);
  batch->next = cuda->sums.free;
  cuda->sums.free = batch;
  pthread_mutex_unlock(&cuda->sums.lock);
}

/* Queues the collected sums: one kernel for all, and the host function that delivers them. After a failure the batch
 * stays with the stream and the next call queues it, possibly running the kernel a second time with the same results.
 * Called with the stream's lock held, in the context. */
gemini_status_t gmi_cuda_sums_flush(cuda_t *cuda, stream_t *stream) {
  sum_batch_t *batch = stream->sums;
  if (!batch) return GEMINI_OK;
  void *parameters[] = { &batch->address };
  gemini_status_t status = gmi_cuda_done(cuda,
                                         cuda->driver->launch(cuda->sums.kernel, batch->count, 1, 1, SUM_THREADS, 1, 1,
                                                              0, stream->native, parameters, NULL),
                                         "cuLaunchKernel");
  if (status) return status;
  stream->sums = NULL; /* before the call: the callback thread may free and reuse the batch before it returns */
  status = gmi_cuda_done(cuda, cuda->driver->host_call(stream->native, sums_deliver, batch), "cuLaunchHostFunc");
  if (status) stream->sums = batch;
  return status;
}

/* An empty batch: a delivered one, or a new one. Batches are reused, and freed only when the device is closed. */
gemini_status_t gmi_cuda_sums_new(cuda_t *cuda, sum_batch_t **batch_out) {
  pthread_mutex_lock(&cuda->sums.lock);
  sum_batch_t *batch = cuda->sums.free;
  if (batch) cuda->sums.free = batch->next;
  pthread_mutex_unlock(&cuda->sums.lock);
  if (!batch) {
    void *items = NULL;
    batch = calloc(1, sizeof *batch);
    if (!batch) return gmi_cuda_no_memory("sums of squares");
    cu_result_t result =
        cuda->driver->host_alloc(&items, SUMS * sizeof *batch->items, CU_HOST_PORTABLE | CU_HOST_MAPPED);
    if (result == CU_SUCCESS) {
      result = cuda->driver->host_address(&batch->address, items, 0);
      if (result != CU_SUCCESS) cuda->driver->host_free(items);
    }
    if (result != CU_SUCCESS) {
      free(batch);
      return gmi_cuda_failed_or_full(cuda, result, "cuMemHostAlloc", GEMINI_ERR_OOM_SYSTEM);
    }
    batch->items = items;
    batch->cuda = cuda;
    pthread_mutex_lock(&cuda->sums.lock);
    batch->next_of_all = cuda->sums.all;
    cuda->sums.all = batch;
    pthread_mutex_unlock(&cuda->sums.lock);
  }
  batch->count = 0;
  *batch_out = batch;
  return GEMINI_OK;
}

void gmi_cuda_queue_end(cuda_t *cuda, queue_t *queue) {
  gmi_cuda_leave(cuda, queue->had);
  pthread_mutex_unlock(&queue->stream->lock);
}

/* Locks a live stream and enters the context, without queueing the collected sums: they go before whatever is queued
 * next. STATE: a stream that others may capture is being captured. On success end with gmi_cuda_queue_end(). */
gemini_status_t gmi_cuda_queue_begin_sum(cuda_t *cuda, uint32_t index, queue_t *queue) {
  stream_t *stream = gmi_cuda_stream_of(cuda, index);
  if (!stream) return GEMINI_ERR_INVALID;
  pthread_mutex_lock(&stream->lock);
  if (stream->state != STREAM_LIVE) {
    pthread_mutex_unlock(&stream->lock);
    return GEMINI_ERR_INVALID;
  }
  *queue = (queue_t){ stream, gmi_cuda_enter(cuda) };
  /* Work queued during a capture becomes part of the graph: it would run with every replay, and marks would never be
   * reached outside of one. IMPLICIT: the legacy default stream cannot be asked while another stream is captured. */
  int capturing = CU_CAPTURE_NONE;
  cu_result_t result = stream->shared ? cuda->driver->stream_capturing(stream->native, &capturing) : CU_SUCCESS;
  if (capturing == CU_CAPTURE_NONE && result != CU_STREAM_CAPTURE_IMPLICIT) return GEMINI_OK;
  gmi_cuda_queue_end(cuda, queue);
  return gmi_fail(GEMINI_ERR_STATE, 0, "the stream is being captured: acquire before the capture, release after it");
}

gemini_status_t gmi_cuda_queue_begin(cuda_t *cuda, uint32_t index, queue_t *queue) {
  gemini_status_t status = gmi_cuda_queue_begin_sum(cuda, index, queue);
  if (status) return status;
  status = gmi_cuda_sums_flush(cuda, queue->stream);
  if (status) gmi_cuda_queue_end(cuda, queue);
  return status;
}

/* The driver's id of a stream, which no later stream gets again; 0: unknown (default stream, driver before CUDA 12). */
static unsigned long long id_of(const cuda_t *cuda, cu_stream_t native) {
  unsigned long long id = 0;
  if (!native || !cuda->driver->stream_id || cuda->driver->stream_id(native, &id) != CU_SUCCESS) id = 0;
  return id;
}

static gemini_status_t native_create(cuda_t *cuda, bool urgent, cu_stream_t *native_out) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  const unsigned flags = CU_STREAM_NON_BLOCKING_FLAG;
  if (!urgent) return gmi_cuda_done(cuda, driver->stream_create(native_out, flags), "cuStreamCreate");
  return gmi_cuda_done(cuda, driver->stream_create_priority(native_out, flags, CU_STREAM_HIGHEST_PRIORITY),
                       "cuStreamCreateWithPriority");
}

/* Gives the native stream, or a newly created one, a free index. The index's marks continue from where its previous
 * stream left off, so that an old mark never seems unreached. Takes streams_lock, then stream.lock. */
static gemini_status_t stream_add(cuda_t *cuda, bool adopted, cu_stream_t native, bool urgent, uint32_t *stream_out) {
  gemini_status_t status = GEMINI_OK;
  bool unused = false;
  entry_t had = gmi_cuda_enter(cuda);
  pthread_mutex_lock(&cuda->streams_lock);
  for (uint32_t index = 0; !unused && index < GMI_DEVICE_MAX_STREAMS; index++) {
    stream_t *stream = &cuda->streams[index];
    pthread_mutex_lock(&stream->lock);
    unused = stream->state == STREAM_NONE;
    if (unused) {
      if (!stream->idle)
        status = gmi_cuda_done(cuda, cuda->driver->event_create(&stream->idle, CU_EVENT_NO_TIME), "cuEventCreate");
      if (!status && !adopted) status = native_create(cuda, urgent, &native);
      if (!status) {
        stream->native = native;
        stream->adopted = adopted;
        stream->shared = adopted;
        stream->id = adopted ? id_of(cuda, native) : 0;
        stream->state = STREAM_LIVE;
        atomic_store_explicit(&stream->made, true, memory_order_release);
        *stream_out = index;
      }
    }
    pthread_mutex_unlock(&stream->lock);
  }
  pthread_mutex_unlock(&cuda->streams_lock);
  gmi_cuda_leave(cuda, had);
  if (!unused)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, 0, "%u streams exist, which is the limit", GMI_DEVICE_MAX_STREAMS);
  return status;
}

gemini_status_t gmi_cuda_stream_create(void *self, bool urgent, uint32_t *stream_out) {
  return stream_out ? stream_add(self, false, NULL, urgent, stream_out) : GEMINI_ERR_INVALID;
}

gemini_status_t gmi_cuda_stream_adopt(void *self, void *native, uint32_t *stream_out) {
  cuda_t *cuda = self;
  if (!stream_out) return GEMINI_ERR_INVALID;
  if ((uintptr_t)native == CU_STREAM_PER_THREAD_HANDLE)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "the per-thread default stream cannot be adopted: it is another stream in each thread");
  cu_context_t context = NULL;
  entry_t had = gmi_cuda_enter(cuda);
  cu_result_t result = cuda->driver->stream_context(native, &context);
  gmi_cuda_leave(cuda, had);
  if (result != CU_SUCCESS && result != CU_INVALID_HANDLE && result != CU_INVALID_CONTEXT)
    return gmi_cuda_failed(cuda, result, "cuStreamGetCtx");
  if (result != CU_SUCCESS || context != cuda->context)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "the stream belongs to another GPU, or not to its primary context");
  return stream_add(cuda, true, native, false, stream_out);
}

gemini_status_t gmi_cuda_stream_renew(void *self, uint32_t index, bool may_block) {
  cuda_t *cuda = self;
  queue_t queue;
  gemini_status_t status = gmi_cuda_queue_begin_sum(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  unsigned long long id = stream->id ? id_of(cuda, stream->native) : 0;
  if (id && id != stream->id) {
    if (!may_block) status = GEMINI_ERR_BUSY;
    /* Work on the old stream can still run, but there is no handle left to wait for it: only waiting for the whole
     * context covers it. */
    if (!status) status = gmi_cuda_done(cuda, cuda->driver->context_wait(), "cuCtxSynchronize");
    if (!status) stream->id = id;
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

gemini_status_t gmi_cuda_stream_native(void *self, uint32_t index, void **native_out) {
  queue_t queue;
  if (!native_out) return GEMINI_ERR_INVALID;
  gemini_status_t status =
      gmi_cuda_queue_begin(self, index, &queue); /* queues our sums: work that others queue later comes after them */
  if (status) return status;
  queue.stream->shared = true;
  *native_out = queue.stream->native;
  gmi_cuda_queue_end(self, &queue);
  return GEMINI_OK;
}

gemini_status_t gmi_cuda_pci(void *self, char address_out[GMI_DEVICE_PCI_BYTES]) {
  cuda_t *cuda = self;
  char address[GMI_DEVICE_PCI_BYTES];
  gemini_status_t status =
      gmi_cuda_done(cuda, cuda->driver->device_pci(address, sizeof address, cuda->device), "cuDeviceGetPCIBusId");
  if (!status) memcpy(address_out, address, sizeof address);
  return status;
}

uint64_t gmi_cuda_memory_bytes_per_s(void *self) {
  cuda_t *cuda = self;
  int clock_khz = 0, bus_bits = 0;
  entry_t had = gmi_cuda_enter(cuda);
  cu_result_t result = cuda->driver->device_attribute(&clock_khz, CU_ATTRIBUTE_MEMORY_CLOCK_RATE, cuda->device);
  if (result == CU_SUCCESS)
    result = cuda->driver->device_attribute(&bus_bits, CU_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, cuda->device);
  gmi_cuda_leave(cuda, had);
  if (result != CU_SUCCESS || clock_khz <= 0 || bus_bits <= 0) return 0;
  return 2000 * (uint64_t)clock_khz * ((uint64_t)bus_bits / 8); /* two transfers per clock */
}

/* Records the `idle` event at the stream's end and waits for it without the lock. CLOSING keeps others from queueing
 * meanwhile; looking at marks goes on. A failure makes the stream live again. On a lost context nothing runs any more
 * and every wait would fail, so the stream is given up at once and `reached` stays as it is. */
gemini_status_t gmi_cuda_stream_destroy(void *self, uint32_t index) {
  cuda_t *cuda = self;
  queue_t queue;
  gemini_status_t status = gmi_cuda_queue_begin_sum(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  status = gmi_cuda_sums_flush(cuda, stream);
  if (!status) status = gmi_cuda_done(cuda, cuda->driver->event_record(stream->idle, stream->native), "cuEventRecord");
  if (gmi_cuda_is_lost(cuda)) status = GEMINI_OK;
  if (!status) stream->state = STREAM_CLOSING;
  pthread_mutex_unlock(&stream->lock);
  if (!status) {
    if (!gmi_cuda_is_lost(cuda)) status = gmi_cuda_event_wait(cuda, stream->idle);
    if (!status && !stream->adopted)
      status = gmi_cuda_done(cuda, cuda->driver->stream_destroy(stream->native), "cuStreamDestroy");
    if (gmi_cuda_is_lost(cuda)) status = GEMINI_OK;
    pthread_mutex_lock(&stream->lock);
    if (!status) {
      stream->state = STREAM_NONE;
      stream->native = NULL;
      stream->sums = NULL; /* on a lost device a batch may be left; closing the device frees it */
      pthread_mutex_lock(&stream->points_lock);
      if (!gmi_cuda_is_lost(cuda)) note_reached(cuda, stream, atomic_load(&stream->recorded));
      pthread_mutex_unlock(&stream->points_lock);
    } else {
      stream->state = STREAM_LIVE;
    }
    pthread_mutex_unlock(&stream->lock);
  }
  gmi_cuda_leave(cuda, queue.had);
  return status;
}

/* Prepares the point under points_lock, creates and records the event without it (the driver may block), and only then
 * publishes the mark by raising `recorded`: until then no other thread looks at the point. Events are created at first
 * use and kept. stream.lock is held throughout, so marks are recorded in order and the point stays this mark's. */
static gemini_status_t mark_record(cuda_t *cuda, uint32_t index, uint32_t kind, uint64_t *mark_out) {
  queue_t queue;
  if (!mark_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  uint64_t mark = atomic_load_explicit(&stream->recorded, memory_order_relaxed) + 1;
  cu_event_t event = NULL;
  pthread_mutex_lock(&stream->points_lock);
  status = point_prepare(cuda, stream, mark);
  if (!status) event = point_of(stream, mark)->events[kind];
  pthread_mutex_unlock(&stream->points_lock);
  if (!status && !event)
    status =
        gmi_cuda_done(cuda, cuda->driver->event_create(&event, kind == TIMED ? 0 : CU_EVENT_NO_TIME), "cuEventCreate");
  if (!status) {
    pthread_mutex_lock(&stream->points_lock);
    point_t *point = point_of(stream, mark);
    point->events[kind] = event;
    point->kind = kind;
    point->recorded_ns = gmi_now_ns();
    pthread_mutex_unlock(&stream->points_lock);
  }
  if (!status) status = gmi_cuda_done(cuda, cuda->driver->event_record(event, stream->native), "cuEventRecord");
  if (!status) {
    atomic_store_explicit(&stream->recorded, mark, memory_order_release);
    *mark_out = mark;
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}
gemini_status_t gmi_cuda_mark(void *self, uint32_t index, uint64_t *mark_out) {
  return mark_record(self, index, TIMED, mark_out);
}
gemini_status_t gmi_cuda_mark_untimed(void *self, uint32_t index, uint64_t *mark_out) {
  return mark_record(self, index, UNTIMED, mark_out);
}

/* A recorded mark's event, which is not reused before point_drop(); NULL: the mark is reached. `users` replaces holding
 * points_lock while the wait is queued, which may block. Called in the context. */
static cu_event_t point_take(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  cu_event_t event = NULL;
  pthread_mutex_lock(&stream->points_lock);
  const bool reached = atomic_load_explicit(&stream->reached, memory_order_relaxed) >= mark;
  if (!reached && (was_just_unreached(stream, mark) || look(cuda, stream, mark) != CU_SUCCESS)) {
    event = event_of(stream, mark);
    point_of(stream, mark)->users++;
  }
  pthread_mutex_unlock(&stream->points_lock);
  return event;
}
static void point_drop(stream_t *stream, uint64_t mark) {
  pthread_mutex_lock(&stream->points_lock);
  point_of(stream, mark)->users--; /* looked up again: the ring may have grown, which keeps points with users */
  pthread_mutex_unlock(&stream->points_lock);
}

gemini_status_t gmi_cuda_wait(void *self, uint32_t index, uint32_t other_index, uint64_t mark) {
  cuda_t *cuda = self;
  queue_t queue;
  stream_t *other = gmi_cuda_stream_of(cuda, other_index);
  if (!other || !mark_recorded(other, mark)) return GEMINI_ERR_INVALID;
  gemini_status_t status = gmi_cuda_queue_begin(cuda, index, &queue);
  if (status) return status;
  /* A stream's own marks need no wait: it is in order. Only stream.lock of `index` is held, never that of other. */
  cu_event_t event = other == queue.stream ? NULL : point_take(cuda, other, mark);
  if (event) {
    status = gmi_cuda_done(cuda, cuda->driver->stream_wait(queue.stream->native, event, 0), "cuStreamWaitEvent");
    point_drop(other, mark);
  }
  gmi_cuda_queue_end(cuda, &queue);
  return status;
}

/* False on a lost device even for marks that were reached before, so that nothing on it is taken for done. Mark 0 stays
 * reached. The acquire load pairs with note_reached(). */
bool gmi_cuda_reached(void *self, uint32_t index, uint64_t mark) {
  cuda_t *cuda = self;
  stream_t *stream = gmi_cuda_stream_of(cuda, index);
  if (!stream) return false;
  if (atomic_load_explicit(&stream->reached, memory_order_acquire) >= mark) return !mark || !gmi_cuda_is_lost(cuda);
  if (!mark_recorded(stream, mark) || was_just_unreached(stream, mark)) return false;
  entry_t had = gmi_cuda_enter(cuda);
  pthread_mutex_lock(&stream->points_lock);
  (void)look(cuda, stream, mark);
  bool reached = atomic_load_explicit(&stream->reached, memory_order_relaxed) >= mark; /* written under the lock */
  pthread_mutex_unlock(&stream->points_lock);
  gmi_cuda_leave(cuda, had);
  return reached && !gmi_cuda_is_lost(cuda);
}

/* Polls (see cuda.c, Waiting). points_lock is released between two looks, so that other threads can look and record. */
gemini_status_t gmi_cuda_sync(void *self, uint32_t index, uint64_t mark) {
  cuda_t *cuda = self;
  stream_t *stream = gmi_cuda_stream_of(cuda, index);
  if (!stream || !mark_recorded(stream, mark)) return GEMINI_ERR_INVALID;
  cu_result_t result = CU_SUCCESS;
  if (atomic_load_explicit(&stream->reached, memory_order_acquire) < mark && !gmi_cuda_is_lost(cuda)) {
    entry_t had = gmi_cuda_enter(cuda);
    for (uint64_t begin = gmi_now_ns();; gmi_cuda_wait_a_little(begin)) {
      pthread_mutex_lock(&stream->points_lock);
      result = look(cuda, stream, mark);
      pthread_mutex_unlock(&stream->points_lock);
      if (result != CU_NOT_READY) break;
    }
    gmi_cuda_leave(cuda, had);
  }
  gemini_status_t status = gmi_cuda_done(cuda, result, "cuEventQuery");
  if (!status) status = gmi_cuda_stored_failure(cuda);
  if (!status && atomic_load_explicit(&stream->reached, memory_order_acquire) < mark)
    status = gmi_fail(GEMINI_ERR_PEER, 0, "a group failed: the work may have ended without being done");
  return status;
}

/* --- times ---
 *
 * The driver tells only the time between two events. Two base events, recorded on a stream of the clock's own, are used
 * in turn: the current one's time on the host's clock is known, and marks are counted from it. */

static uint64_t ns_of(uint64_t base_ns, float ms) {
  double ns = (double)ms * 1e6;
  return ns < 0 ? base_ns - (uint64_t)(-ns + 0.5) : base_ns + (uint64_t)(ns + 0.5);
}

/* Takes a new base when the current one is older than BASE_LIFE_NS: distances are floats, which get coarser as they
 * grow. The new base's time is the old one's plus the GPU's distance, clamped to the host times before and after the
 * recording, because the two clocks drift apart.
 *
 * Only one thread renews; others do not wait for it (trylock) but count from the current base. due_ns is relaxed: it
 * only decides when to try, the bases themselves are guarded by clock.lock. Called in the context, without locks. */
static void base_renew(cuda_t *cuda) {
  uint64_t before = gmi_now_ns(), after = before;
  if (before < atomic_load_explicit(&cuda->clock.due_ns, memory_order_relaxed)) return;
  if (pthread_mutex_trylock(&cuda->clock.renew_lock)) return;
  cu_event_t old = cuda->clock.bases[cuda->clock.base],
             event = cuda->clock.bases[1 - cuda->clock.base]; /* base is written with renew_lock and lock held */
  float ms = 0;
  cu_result_t result = cuda->driver->event_record(event, cuda->clock.stream);
  while (result == CU_SUCCESS || result == CU_NOT_READY) {
    result = cuda->driver->event_query(event);
    after = gmi_now_ns();
    if (result != CU_NOT_READY || after - before > BASE_WAIT_NS) break;
  }
  if (result == CU_SUCCESS) result = cuda->driver->event_elapsed(&ms, old, event);
  if (result == CU_SUCCESS) {
    pthread_mutex_lock(&cuda->clock.lock);
    uint64_t ns = ns_of(cuda->clock.base_ns, ms);
    cuda->clock.base_ns = ns < before ? before : ns > after ? after : ns;
    cuda->clock.base = 1 - cuda->clock.base;
    pthread_mutex_unlock(&cuda->clock.lock);
  }
  /* The base's event may be stuck behind a stream that waits for a gate, as streams share hardware queues. Then the old
   * base stays in use, and the next try comes after BASE_RETRY_NS. */
  atomic_store_explicit(&cuda->clock.due_ns, after + (result == CU_SUCCESS ? BASE_LIFE_NS : BASE_RETRY_NS),
                        memory_order_relaxed);
  pthread_mutex_unlock(&cuda->clock.renew_lock);
}

/* The first base: of five tries, the one with the shortest time between recording and completion, which bounds the
 * error of its host time. Called in the context, before other threads know the device. */
gemini_status_t gmi_cuda_base_open(cuda_t *cuda) {
  gemini_status_t status = gmi_cuda_done(
      cuda, cuda->driver->stream_create(&cuda->clock.stream, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate");
  for (int i = 0; !status && i < 2; i++)
    status = gmi_cuda_done(cuda, cuda->driver->event_create(&cuda->clock.bases[i], 0), "cuEventCreate");
  uint64_t best_ns = UINT64_MAX;
  for (int i = 0; !status && i < 5; i++) {
    uint64_t before = gmi_now_ns();
    status = gmi_cuda_done(
        cuda, cuda->driver->event_record(cuda->clock.bases[1 - cuda->clock.base], cuda->clock.stream), "cuEventRecord");
    if (!status) status = gmi_cuda_event_wait(cuda, cuda->clock.bases[1 - cuda->clock.base]);
    uint64_t after = gmi_now_ns();
    if (status || after - before >= best_ns) continue;
    best_ns = after - before;
    cuda->clock.base = 1 - cuda->clock.base;
    cuda->clock.base_ns = before + best_ns / 2;
    atomic_store_explicit(&cuda->clock.due_ns, after + BASE_LIFE_NS, memory_order_relaxed);
  }
  return status;
}

/* Takes points_lock, then clock.lock. */
gemini_status_t gmi_cuda_mark_time(void *self, uint32_t index, uint64_t mark, uint64_t *ns_out) {
  cuda_t *cuda = self;
  stream_t *stream = gmi_cuda_stream_of(cuda, index);
  if (!stream || !ns_out || !mark || !mark_recorded(stream, mark)) return GEMINI_ERR_INVALID;
  gemini_status_t status = GEMINI_ERR_INVALID;
  float ms = 0;
  entry_t had = gmi_cuda_enter(cuda);
  base_renew(cuda);
  pthread_mutex_lock(&stream->points_lock);
  if (look(cuda, stream, mark) == CU_SUCCESS && point_of(stream, mark)->kind == TIMED &&
      atomic_load_explicit(&stream->reached, memory_order_relaxed) - mark < MARK_TIMES) {
    point_t *point = point_of(stream, mark);
    pthread_mutex_lock(&cuda->clock.lock);
    status =
        gmi_cuda_done(cuda, cuda->driver->event_elapsed(&ms, cuda->clock.bases[cuda->clock.base], point->events[TIMED]),
                      "cuEventElapsedTime");
    uint64_t ns = ns_of(cuda->clock.base_ns, ms);
    pthread_mutex_unlock(&cuda->clock.lock);
    if (!status) {
      /* Bounds that are certain override the estimate: a mark is not reached before it was recorded, not after it was
       * seen to be reached, and not before an earlier mark whose time was told. */
      if (ns < point->recorded_ns) ns = point->recorded_ns;
      if (ns > stream->noted_ns) ns = stream->noted_ns;
      if (mark < stream->timed_mark) {
        if (ns > stream->timed_ns) ns = stream->timed_ns;
      } else {
        if (ns < stream->timed_ns) ns = stream->timed_ns;
        stream->timed_mark = mark;
        stream->timed_ns = ns;
      }
      *ns_out = ns;
    }
  }
  pthread_mutex_unlock(&stream->points_lock);
  gmi_cuda_leave(cuda, had);
  return status;
}
