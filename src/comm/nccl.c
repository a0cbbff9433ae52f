/* A communicator over NCCL, whose collectives run on the streams of a GPU. SPDX-License-Identifier: Apache-2.0
 *
 * NCCL communicators made here are non-blocking: their functions return at once, NCCL queues the work from a thread of
 * its own, and ncclCommGetAsyncError() says when it has. A collective waits for that, as whatever the caller queues
 * next must be behind it, but no longer than the deadline. So no call blocks in NCCL, whatever other ranks do.
 *
 * Work that is queued may wait on the GPU for ever: a kernel of NCCL does not notice that a rank of the same machine
 * has ended. So an event is recorded before and one behind each collective. look() fails the communicator once the
 * first has been reached for a deadline and the second has not; poll() and every collective call it.
 *
 * Failures. The first one is kept, and every later call returns it. A thread of its own, the ender, then calls
 * ncclCommAbort(), which makes the kernels end, frees NCCL's communicator and may take long. close() starts the same
 * thread to finalize a communicator that has not failed, and waits for it a bounded time. What work that may still run
 * could use is then left allocated: memory lost is better than memory written by others' work.
 *
 * Locks. `turn` is held from the queueing of a collective until NCCL has queued it, as a communicator takes one call at
 * a time. `lock` is held during each call of NCCL and guards the handle, which the ender takes away, and the watched
 * collectives. `ender_lock` guards the ender. In this order; the ender takes lock alone. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "comm/nccl.h"
#include "device/rank_sum.h"

enum { BLOCKS = 1024 /* of a launch, at most */, PACK_BYTES = 16 };

/* ---- failures */
/* Fails the communicator, unless it has failed before. The listener hears of it before the ender makes kernels end. */
__attribute__((format(printf, 3, 4))) static gemini_status_t fail(nccl_t *n, int64_t code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  if (gmi_first_failure_set(&n->failure, code, format, args)) gmi_nccl_ender_start(n);
  va_end(args);
  return gmi_first_failure(&n->failure);
}

/* "ncclAllGather in all-gather of 8 bytes (call 3): invalid usage; NCCL says: ..." */
static gemini_status_t nccl_failed(nccl_t *n, nccl_result_t result, const char *function, const char *what) {
  const char *name = n->library->error_string(result),
             *more = n->library->last_error ? n->library->last_error(NULL) : 0;
  bool words = more && *more;
  return fail(n, result, "%s in %s: %s%s%.120s", function, what, name ? name : "unknown error",
              words ? "; NCCL says: " : "", words ? more : "");
}
static gemini_status_t driver_failed(nccl_t *n, cu_result_t result, const char *function, const char *what) {
  return fail(n, result, "%s in %s: %s", function, what, gmi_cuda_error_name(n->driver, result));
}
static gemini_status_t waited(nccl_t *n, const char *function, const char *what) {
  return fail(n, 0, "%s: waited %.3g s for the other ranks (%s)", what, (double)n->deadline_ns / 1e9, function);
}

/* ---- calls of NCCL */

/* Takes `lock` if NCCL may be called; every call of it is between here and nccl_end(). */
static gemini_status_t nccl_begin(nccl_t *n) {
  pthread_mutex_lock(&n->lock);
  gemini_status_t status = gmi_first_failure(&n->failure);
  if (status) pthread_mutex_unlock(&n->lock);
  return status;
}
static void nccl_end(nccl_t *n) { pthread_mutex_unlock(&n->lock); }

/* What NCCL is doing or has met: IN_PROGRESS, SUCCESS or an error. With lock. */
static nccl_result_t async_result(nccl_t *n) {
  nccl_result_t state = NCCL_SUCCESS, result = n->library->async_error(n->comm, &state);
  return result != NCCL_SUCCESS ? result : state;
}

gemini_status_t gmi_nccl_ready(nccl_t *n, nccl_result_t result, const char *function, const char *what) {
  for (uint64_t begin = gmi_now_ns(); result == NCCL_IN_PROGRESS;) {
    if (gmi_now_ns() - begin >= n->deadline_ns) return waited(n, function, what);
    gmi_nccl_wait(begin);
    gemini_status_t status = nccl_begin(n);
    if (status) return status;
    result = async_result(n);
    nccl_end(n);
  }
  return result == NCCL_SUCCESS ? gmi_first_failure(&n->failure) : nccl_failed(n, result, function, what);
}

/* ---- watched collectives */

/* Forgets those that have ended, and fails if the oldest one has run for too long. With lock. */
static gemini_status_t look(nccl_t *n) {
  while (n->first != n->next) {
    watched_t *w = &n->ring[n->first % GMI_NCCL_WATCHED];
    cu_result_t result = n->driver->event_query(w->end);
    if (result == CU_SUCCESS) {
      n->first++;
      continue;
    }
    if (result == CU_NOT_READY && !w->begun_ns) {
      result = n->driver->event_query(w->begin);
      if (result == CU_SUCCESS) w->begun_ns = gmi_now_ns();
    } else if (result == CU_NOT_READY && gmi_now_ns() - w->begun_ns >= n->deadline_ns) {
      return waited(n, "running on the GPU", w->what);
    }
    if (result == CU_SUCCESS || result == CU_NOT_READY) break;
    return driver_failed(n, result, "cuEventQuery", w->what);
  }
  return GEMINI_OK;
}

/* Asks NCCL and looks at the GPU. With lock. */
static gemini_status_t check(nccl_t *n, const char *what) {
  nccl_result_t result = async_result(n);
  if (result != NCCL_SUCCESS && result != NCCL_IN_PROGRESS)
    return nccl_failed(n, result, "ncclCommGetAsyncError", what);
  return look(n);
}

/* A collective that this thread is queueing: it has the turn. */
typedef struct running {
  cu_stream_t stream;
  watched_t *watched; /* NULL: not watched, as the stream is being captured */
  entry_t had;
  char what[GMI_NCCL_WHAT_BYTES];
} running_t;

__attribute__((format(printf, 4, 5))) static void say(nccl_t *n, char *what_out, const char *label, const char *format,
                                                      ...) {
  va_list args;
  va_start(args, format);
  int length = vsnprintf(what_out, GMI_NCCL_WHAT_BYTES, format, args);
  va_end(args);
  if (length < GMI_NCCL_WHAT_BYTES)
    snprintf(what_out + length, GMI_NCCL_WHAT_BYTES - (size_t)length, "%s%.*s (call %" PRIu64 ")",
             label && *label ? " for " : "", GMI_COMM_LABEL_BYTES - 1, label ? label : "", n->number);
}

/* Waits until one more collective can be watched; fails if an earlier one has failed or takes too long. */
static gemini_status_t room(nccl_t *n, const char *what) {
  for (uint64_t begin = gmi_now_ns();;) {
    gemini_status_t status = nccl_begin(n);
    if (status) return status;
    status = look(n);
    bool full = n->next - n->first == GMI_NCCL_WATCHED;
    if (!status && full) status = check(n, what);
    nccl_end(n);
    if (status || !full) return status;
    gmi_nccl_wait(begin);
  }
}

static gemini_status_t watch_begin(nccl_t *n, running_t *running) {
  watched_t *w = &n->ring[n->next % GMI_NCCL_WATCHED];
  const gmi_cuda_driver_t *driver = n->driver;
  const char *function = NULL;
  cu_result_t result = CU_SUCCESS;
  int capturing = CU_CAPTURE_NONE;
  GMI_NCCL_DO(driver->stream_capturing(running->stream, &capturing), "cuStreamIsCapturing");
  if (capturing != CU_CAPTURE_NONE) return GEMINI_OK;
  if (!w->begin) GMI_NCCL_DO(driver->event_create(&w->begin, CU_EVENT_NO_TIME), "cuEventCreate");
  if (!w->end) GMI_NCCL_DO(driver->event_create(&w->end, CU_EVENT_NO_TIME), "cuEventCreate");
  GMI_NCCL_DO(driver->event_record(w->begin, running->stream), "cuEventRecord");
  if (result != CU_SUCCESS) return driver_failed(n, result, function, running->what);
  running->watched = w;
  return GEMINI_OK;
}

static void turn_end(nccl_t *n, const running_t *running) {
  gmi_nccl_leave(n, running->had);
  pthread_mutex_unlock(&n->turn);
}
/* Takes the turn. running_out->what begins as the format and the label say. */
#define BEGIN(n, running_out, stream_, label, ...)   \
  do {                                               \
    turn_begin(n, running_out, stream_);             \
    say(n, (running_out)->what, label, __VA_ARGS__); \
  } while (0)
static void turn_begin(nccl_t *n, running_t *running_out, void *stream) {
  pthread_mutex_lock(&n->turn);
  n->number++;
  *running_out = (running_t){ .stream = stream, .had = gmi_nccl_enter(n) };
}
static gemini_status_t collective_begin(nccl_t *n, running_t *running) {
  gemini_status_t status = room(n, running->what);
  return status ? status : watch_begin(n, running);
}
static gemini_status_t collective_end(nccl_t *n, running_t *running, gemini_status_t status) {
  watched_t *w = running->watched;
  if (!status && w) {
    cu_result_t result = n->driver->event_record(w->end, running->stream);
    if (result == CU_SUCCESS) {
      memcpy(w->what, running->what, sizeof w->what);
      w->begun_ns = 0;
      pthread_mutex_lock(&n->lock);
      n->next++;
      pthread_mutex_unlock(&n->lock);
    } else {
      status = driver_failed(n, result, "cuEventRecord", running->what);
    }
  }
  turn_end(n, running);
  return status;
}

/* ---- gathers */

/* Ends a group of NCCL's that has begun, also after a failure in it: NCCL counts groups for each thread. Returns the
 * first failure, and in *function which function it is of. */
static nccl_result_t group_end(const nccl_t *n, nccl_result_t result, const char **function) {
  nccl_result_t end = n->library->group_end();
  if (result != NCCL_SUCCESS) return result;
  *function = "ncclGroupEnd";
  return end;
}

/* Several in a group of NCCL's, which takes not much longer to queue than one gather. */
static gemini_status_t gather(nccl_t *n, const running_t *running, void *const *buffers, uint32_t count,
                              uint64_t bytes) {
  const char *function = "ncclGroupStart";
  gemini_status_t status = nccl_begin(n);
  if (status) return status;
  nccl_result_t result = count > 1 ? n->library->group_start() : NCCL_SUCCESS;
  const bool grouped = count > 1 && result == NCCL_SUCCESS;
  for (uint32_t i = 0; i < count && result == NCCL_SUCCESS; i++) {
    unsigned char *buffer = buffers[i];
    function = "ncclAllGather";
    result = n->library->all_gather(buffer + n->rank * bytes, buffer, bytes, NCCL_INT8, n->comm, running->stream);
  }
  if (grouped) result = group_end(n, result, &function);
  nccl_end(n);
  return gmi_nccl_ready(n, result, function, running->what);
}

static gemini_status_t all_gathers(void *self, void *const *buffers, uint32_t count, uint64_t slice_bytes, void *stream,
                                   const char *label) {
  nccl_t *n = self;
  running_t running;
  if (n->ranks == 1 || !count || !slice_bytes) return gmi_first_failure(&n->failure);
  if (count == 1) BEGIN(n, &running, stream, label, "all-gather of %" PRIu64 " bytes", slice_bytes);
  else BEGIN(n, &running, stream, label, "%u all-gathers of %" PRIu64 " bytes", count, slice_bytes);
  gemini_status_t status = collective_begin(n, &running);
  if (!status) status = gather(n, &running, buffers, count, slice_bytes);
  return collective_end(n, &running, status);
}
static gemini_status_t all_gather(void *self, void *buffer, uint64_t slice_bytes, void *stream, const char *label) {
  return all_gathers(self, &buffer, 1, slice_bytes, stream, label);
}

static gemini_status_t register_memory(void *self, void *memory, uint64_t bytes, void **handle_out) {
  nccl_t *n = self;
  if (!n->library->register_memory) return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "this NCCL has no ncclCommRegister");
  entry_t had = gmi_nccl_enter(n);
  gemini_status_t status = nccl_begin(n);
  if (!status) {
    nccl_result_t result = n->library->register_memory(n->comm, memory, bytes, handle_out);
    nccl_end(n);
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS)
      status = gmi_nccl_ready(n, result, "ncclCommRegister", "registering memory");
    else
      status = gmi_fail(GEMINI_ERR_DEVICE, result, "ncclCommRegister of %" PRIu64 " bytes: %s", bytes,
                        n->library->error_string(result));
  }
  gmi_nccl_leave(n, had);
  return status;
}
/* An aborted communicator has forgotten it already. */
static void unregister_memory(void *self, void *handle) {
  nccl_t *n = self;
  if (gmi_has_failed(&n->failure)) return;
  entry_t had = gmi_nccl_enter(n);
  if (!nccl_begin(n)) {
    (void)n->library->unregister_memory(n->comm, handle);
    nccl_end(n);
  }
  gmi_nccl_leave(n, had);
}

static gemini_status_t broadcast(void *self, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                                 const char *label) {
  nccl_t *n = self;
  running_t running;
  if (root >= n->ranks) return gmi_fail(GEMINI_ERR_INVALID, 0, "root is %u, must be below %u", root, n->ranks);
  if (n->ranks == 1 || !bytes) return gmi_first_failure(&n->failure);
  BEGIN(n, &running, stream, label, "broadcast of %" PRIu64 " bytes", bytes);
  gemini_status_t status = collective_begin(n, &running);
  if (!status) status = nccl_begin(n);
  if (!status) {
    nccl_result_t result = n->library->broadcast(buffer, buffer, bytes, NCCL_INT8, (int)root, n->comm, running.stream);
    nccl_end(n);
    status = gmi_nccl_ready(n, result, "ncclBroadcast", running.what);
  }
  return collective_end(n, &running, status);
}

/* ---- reductions in the order of ranks */

/* One value for each rank to reduce, or several: rank p's slice of a piece begins at value first + p * stride of the
 * buffer. It has `most` values, unless the piece ends before that. */
typedef struct piece {
  unsigned char *buffer;
  uint64_t first, stride, most, whole;
  uint32_t dtype, width;
} piece_t;

static uint64_t slice_count(const piece_t *piece, uint32_t rank) {
  uint64_t begin = rank * piece->stride, left = piece->whole > begin ? piece->whole - begin : 0;
  return left < piece->most ? left : piece->most;
}
static unsigned char *slice(const piece_t *piece, uint32_t rank) {
  return piece->buffer + (piece->first + rank * piece->stride) * piece->width;
}
static cu_address_t scratch_base(const nccl_t *n) { return n->scratch.base + GMI_NCCL_EXCHANGE_BYTES; }
/* The room for one other rank's values. */
static uint64_t slot_bytes(const nccl_t *n) {
  return (n->scratch.mapped_bytes - GMI_NCCL_EXCHANGE_BYTES) / (n->ranks - 1) / PACK_BYTES * PACK_BYTES;
}

/* Every rank gets its slice from all others, in its slots; or, results: every rank gets all others' slices. */
static gemini_status_t swap(nccl_t *n, const running_t *running, const piece_t *piece, bool results) {
  const gmi_nccl_library_t *library = n->library;
  const char *function = "ncclGroupStart";
  cu_address_t slot = scratch_base(n);
  gemini_status_t status = nccl_begin(n);
  if (status) return status;
  nccl_result_t result = library->group_start();
  const bool grouped = result == NCCL_SUCCESS;
  for (uint32_t p = 0; p < n->ranks && result == NCCL_SUCCESS; p++) {
    if (p == n->rank) continue;
    uint32_t from = results ? n->rank : p, to = results ? p : n->rank; /* whose slice goes, and whose comes */
    uint64_t out = slice_count(piece, from) * piece->width, in = slice_count(piece, to) * piece->width;
    function = "ncclSend";
    if (out) result = library->send(slice(piece, from), out, NCCL_INT8, (int)p, n->comm, running->stream);
    if (result == NCCL_SUCCESS && in) {
      void *at = results ? (void *)slice(piece, to) : (void *)(uintptr_t)slot; // NOLINT(*-int-to-ptr)
      function = "ncclRecv";
      result = library->recv(at, in, NCCL_INT8, (int)p, n->comm, running->stream);
    }
    slot += slot_bytes(n);
  }
  if (grouped) result = group_end(n, result, &function);
  nccl_end(n);
  return gmi_nccl_ready(n, result, function, running->what);
}

/* Records behind what a call has queued, also if it failed halfway, when memory of the communicator is free again. */
static gemini_status_t used_until(nccl_t *n, cu_event_t event, const running_t *running, gemini_status_t status) {
  cu_result_t result = n->driver->event_record(event, running->stream);
  if (result == CU_SUCCESS) return status;
  n->in_use = true;
  return driver_failed(n, result, "cuEventRecord", running->what);
}

static gemini_status_t add(nccl_t *n, const running_t *running, const piece_t *piece, gmi_reduce_t how) {
  gmi_rank_sum_t args = { .own = (uintptr_t)slice(piece, n->rank),
                          .others = scratch_base(n),
                          .slot_bytes = slot_bytes(n),
                          .count = slice_count(piece, n->rank),
                          .rank = n->rank,
                          .ranks = n->ranks,
                          .dtype = piece->dtype,
                          .reduce = (uint32_t)how };
  void *parameters[] = { &args };
  uint64_t packs = (args.count * piece->width + PACK_BYTES - 1) / PACK_BYTES;
  uint64_t blocks = (packs + GMI_RANK_SUM_THREADS - 1) / GMI_RANK_SUM_THREADS;
  if (!args.count) return GEMINI_OK;
  cu_result_t result = n->driver->launch(n->scratch.kernel, blocks < BLOCKS ? (unsigned)blocks : BLOCKS, 1, 1,
                                         GMI_RANK_SUM_THREADS, 1, 1, 0, running->stream, parameters, NULL);
  return result == CU_SUCCESS ? GEMINI_OK : driver_failed(n, result, "cuLaunchKernel", running->what);
}

/* Slices of `count` values, of which each rank gets one reduced (scatter), or `count` values that all get. */
static gemini_status_t reduce_pieces(nccl_t *n, const running_t *running, void *buffer, uint64_t count, uint32_t dtype,
                                     gmi_reduce_t how, bool scatter) {
  const uint32_t width = gmi_dtype_bytes(dtype);
  const uint64_t slot = slot_bytes(n) / width, most = scatter ? slot : slot * n->ranks;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t at = 0, now; at < count && !status; at += now) {
    now = count - at < most ? count - at : most;
    piece_t piece = { .buffer = buffer, .first = at, .dtype = dtype, .width = width };
    piece.stride = scatter ? count : (now + n->ranks - 1) / n->ranks;
    piece.most = scatter ? now : piece.stride;
    piece.whole = scatter ? count * n->ranks : now;
    status = swap(n, running, &piece, false);
    if (!status) status = add(n, running, &piece, how);
    if (!status && !scatter) status = swap(n, running, &piece, true);
  }
  return status;
}
/* The scratch memory's users run one after the other, also on different streams. */
static gemini_status_t reduce_in_order(nccl_t *n, const running_t *running, void *buffer, uint64_t count,
                                       uint32_t dtype, gmi_reduce_t how, bool scatter) {
  cu_result_t result = n->scratch.used ? n->driver->stream_wait(running->stream, n->scratch.free, 0) : CU_SUCCESS;
  if (result != CU_SUCCESS) return driver_failed(n, result, "cuStreamWaitEvent", running->what);
  gemini_status_t status = reduce_pieces(n, running, buffer, count, dtype, how, scatter);
  n->scratch.used = true;
  return used_until(n, n->scratch.free, running, status);
}

/* ---- reductions */
static int nccl_type(uint32_t dtype) {
  switch (dtype) {
  case GEMINI_DTYPE_F32: return NCCL_FLOAT32;
  case GEMINI_DTYPE_BF16: return NCCL_BFLOAT16;
  case GEMINI_DTYPE_F16: return NCCL_FLOAT16;
  default: return NCCL_FLOAT64;
  }
}

/* Of each buffer; several in one of NCCL's groups. */
static gemini_status_t reduce_by_nccl(nccl_t *n, const running_t *running, void *const *buffers, uint32_t buffer_count,
                                      uint64_t count, uint32_t dtype, bool scatter) {
  const gmi_nccl_library_t *library = n->library;
  const int type = nccl_type(dtype);
  const char *function = "ncclGroupStart";
  gemini_status_t status = nccl_begin(n);
  if (status) return status;
  nccl_result_t result = buffer_count > 1 ? library->group_start() : NCCL_SUCCESS;
  const bool grouped = buffer_count > 1 && result == NCCL_SUCCESS;
  for (uint32_t i = 0; i < buffer_count && result == NCCL_SUCCESS; i++) {
    unsigned char *buffer = buffers[i];
    function = scatter ? "ncclReduceScatter" : "ncclAllReduce";
    result = scatter ? library->reduce_scatter(buffer, buffer + n->rank * count * gmi_dtype_bytes(dtype), count, type,
                                               NCCL_SUM, n->comm, running->stream)
                     : library->all_reduce(buffer, buffer, count, type, NCCL_SUM, n->comm, running->stream);
  }
  if (grouped) result = group_end(n, result, &function);
  nccl_end(n);
  return gmi_nccl_ready(n, result, function, running->what);
}

static gemini_status_t reduce(nccl_t *n, void *const *buffers, uint32_t buffer_count, uint64_t count, uint32_t dtype,
                              gmi_reduce_t how, bool scatter, void *stream, const char *label) {
  running_t running;
  gemini_status_t status = gmi_reduce_check(dtype, how);
  if (status) return status;
  const uint32_t width = gmi_dtype_bytes(dtype);
  for (uint32_t i = 0; i < buffer_count; i++)
    if ((uintptr_t)buffers[i] % width)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "buffer is %p, must be a multiple of a value's %u bytes", buffers[i],
                      width);
  if (n->ranks == 1 || !count || !buffer_count) return gmi_first_failure(&n->failure);
  const char *name = scatter ? "reduce-scatter" : "all-reduce";
  if (buffer_count == 1) BEGIN(n, &running, stream, label, "%s of %" PRIu64 " bytes", name, count * width);
  else BEGIN(n, &running, stream, label, "%u %ss of %" PRIu64 " bytes", buffer_count, name, count * width);
  status = collective_begin(n, &running);
  bool ordered = n->rank_order || how == GMI_REDUCE_MAX; /* NCCL's own maximum drops NaN */
  if (!status && ordered && !running.watched) {
    turn_end(n, &running);
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "%s: the stream is being captured, and reductions in the order of ranks"
                    " cannot become part of a graph",
                    running.what);
  }
  for (uint32_t i = 0; i < buffer_count && !status && ordered; i++)
    status = reduce_in_order(n, &running, buffers[i], count, dtype, how, scatter);
  if (!status && !ordered) status = reduce_by_nccl(n, &running, buffers, buffer_count, count, dtype, scatter);
  return collective_end(n, &running, status);
}
static gemini_status_t reduce_scatter(void *self, void *buffer, uint64_t slice_count_, uint32_t dtype, gmi_reduce_t how,
                                      void *stream, const char *label) {
  return reduce(self, &buffer, 1, slice_count_, dtype, how, true, stream, label);
}
static gemini_status_t reduce_scatters(void *self, void *const *buffers, uint32_t buffer_count, uint64_t slice_count_,
                                       uint32_t dtype, gmi_reduce_t how, void *stream, const char *label) {
  return reduce(self, buffers, buffer_count, slice_count_, dtype, how, true, stream, label);
}
static gemini_status_t all_reduce(void *self, void *buffer, uint64_t count, uint32_t dtype, gmi_reduce_t how,
                                  void *stream, const char *label) {
  return reduce(self, &buffer, 1, count, dtype, how, false, stream, label);
}

/* ---- exchanges */

/* Waits for the stream of exchanges, and looks for what would make it wait for ever. */
static gemini_status_t exchange_wait(nccl_t *n, const char *what) {
  cu_result_t result;
  for (uint64_t begin = gmi_now_ns(); (result = n->driver->event_query(n->exchange.done)) == CU_NOT_READY;) {
    if (gmi_now_ns() - begin >= n->deadline_ns) return waited(n, "running on the GPU", what);
    gmi_nccl_wait(begin);
    gemini_status_t status = nccl_begin(n);
    if (status) return status;
    status = check(n, what);
    if (n->first != n->next) begin = gmi_now_ns(); /* behind collectives, which are watched themselves */
    nccl_end(n);
    if (status) return status;
  }
  /* A communicator that failed meanwhile may have ended the kernel before the bytes were there. */
  return result == CU_SUCCESS ? gmi_first_failure(&n->failure) : driver_failed(n, result, "cuEventQuery", what);
}

/* Brings `now` bytes to all ranks; they are then in exchange.host, in the order of ranks. */
static gemini_status_t exchange_piece(nccl_t *n, const running_t *running, const unsigned char *mine, uint64_t now) {
  const cu_address_t base = n->scratch.base;
  void *buffer = (void *)(uintptr_t)base; // NOLINT(*-int-to-ptr)
  memcpy(n->exchange.host, mine, now);
  cu_result_t result = n->driver->copy_h2d(base + n->rank * now, n->exchange.host, now, running->stream);
  if (result != CU_SUCCESS) return driver_failed(n, result, "cuMemcpyHtoDAsync", running->what);
  gemini_status_t status = gather(n, running, &buffer, 1, now);
  if (!status) {
    result = n->driver->copy_d2h(n->exchange.host, base, now * n->ranks, running->stream);
    if (result != CU_SUCCESS) status = driver_failed(n, result, "cuMemcpyDtoHAsync", running->what);
  }
  return used_until(n, n->exchange.done, running, status);
}

static gemini_status_t exchange(void *self, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  nccl_t *n = self;
  const uint64_t most = GMI_NCCL_EXCHANGE_BYTES / n->ranks;
  const unsigned char nothing = 0;
  uint64_t at = 0;
  gemini_status_t status = gmi_first_failure(&n->failure);
  if (n->ranks == 1) {
    if (!status && bytes) memmove(all_out, mine, bytes);
    return status;
  }
  /* Ranks meet even if they bring nothing. */
  do {
    uint64_t now = bytes - at < most ? bytes - at : most;
    running_t running;
    BEGIN(n, &running, n->exchange.stream, label, "exchange of %" PRIu64 " bytes", bytes);
    status = room(n, running.what);
    if (!status) status = exchange_piece(n, &running, now ? (const unsigned char *)mine + at : &nothing, now ? now : 1);
    pthread_mutex_unlock(&n->turn);
    if (!status) status = exchange_wait(n, running.what);
    gmi_nccl_leave(n, running.had);
    if (status) return status;
    for (uint32_t r = 0; r < n->ranks && now; r++)
      memcpy((unsigned char *)all_out + r * bytes + at, n->exchange.host + r * now, now);
    at += now;
  } while (at < bytes);
  return status;
}

/* ---- failures, from outside */
static gemini_status_t poll_failure(void *self) {
  nccl_t *n = self;
  gemini_status_t status = gmi_first_failure(&n->failure);
  /* Whoever has the lock is about to look itself. */
  if (status || pthread_mutex_trylock(&n->lock)) return status;
  entry_t had = gmi_nccl_enter(n);
  status = gmi_first_failure(&n->failure);
  if (!status) status = check(n, "poll");
  gmi_nccl_leave(n, had);
  pthread_mutex_unlock(&n->lock);
  return status;
}

static gemini_status_t known_failure(void *self) { return gmi_first_failure(&((nccl_t *)self)->failure); }

static void abort_here(void *self, const char *why) {
  (void)fail(self, 0, "gave up: %s", why ? why : "it does not say why");
}

const gmi_comm_ops_t gmi_nccl_ops = {
  .name = "NCCL",
  .queues = true,
  .all_gather = all_gather,
  .all_gathers = all_gathers,
  .register_memory = register_memory,
  .unregister_memory = unregister_memory,
  .broadcast = broadcast,
  .reduce_scatter = reduce_scatter,
  .reduce_scatters = reduce_scatters,
  .all_reduce = all_reduce,
  .exchange = exchange,
  .poll = poll_failure,
  .known = known_failure,
  .abort = abort_here,
  .close = gmi_nccl_close,
};
