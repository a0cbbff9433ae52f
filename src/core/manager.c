/* Opening and closing managers, handles, streams, fences, logs, budgets, statistics.
 * SPDX-License-Identifier: Apache-2.0 */
#include "core/manager.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/nvtx.h"
#include "tracer/timeline.h"
#include "tracer/tracer.h"

/* ---- live managers: a slot's handle is 0 while it is free, so that a handle of a closed manager never matches */
static struct {
  _Atomic uint64_t handle;
  gmi_manager_t *manager;
  pid_t opener; /* the process that opened it */
} live[GMI_MANAGERS];
static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;
uint64_t gmi_manager_serial; /* Guarded by live_lock. */

/* Handles of objects name their manager by its slot and the last bits of its serial number. Two managers may have both
 * in common; then the objects of the later one have generations above all those of the earlier one, so that a handle of
 * a closed manager's object never matches. By slot and last bits: the highest generation that any object has had.
 * Guarded by live_lock. */
enum { SERIALS = 1 << 12 };
static uint32_t generations_given[GMI_MANAGERS][SERIALS];
static uint32_t *generations_of(const gmi_manager_t *m) {
  return &generations_given[m->slot][m->handle & (SERIALS - 1)];
}

static uint32_t generations_highest(const gmi_manager_t *m) {
  uint64_t highest = m->generation_before;
  for (uint32_t i = 0; i < GMI_ARENAS; i++)
    if (m->arena_generations[i] > highest) highest = m->arena_generations[i];
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++)
    if (m->streams[i].generation > highest) highest = m->streams[i].generation;
  for (uint32_t i = 0; i < GMI_GRAPHS; i++)
    if (m->graph_generations[i] > highest) highest = m->graph_generations[i];
  for (uint32_t i = 0; i < m->tensor_high; i++)
    if (m->tensors[i].generation > highest) highest = m->tensors[i].generation;
  return highest < GMI_TENSOR_GENERATIONS ? (uint32_t)highest : GMI_TENSOR_GENERATIONS;
}

/* The generations of all objects, which nobody has a handle of yet, go on from before. */
static void generations_begin(gmi_manager_t *m, uint32_t before) {
  m->generation_before = before;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) m->arena_generations[i] = before;
  for (uint32_t i = 0; i < GMI_GRAPHS; i++) m->graph_generations[i] = before;
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    gmi_stream_t *s = &m->streams[i];
    s->generation += before;
    if (atomic_load(&s->life)) atomic_store(&s->life, s->generation);
  }
}

/* ---- fork: a child has no manager of its parent's, and says so */
static struct {
  uint64_t handle; /* of the manager that another process had in this slot; 0: none */
  pid_t opener;    /* that process */
} forked[GMI_MANAGERS];

static void fork_prepare(void) { pthread_mutex_lock(&live_lock); }
static void fork_parent(void) { pthread_mutex_unlock(&live_lock); }
static void fork_child(void) {
  pthread_mutex_init(&live_lock, NULL);
  gmi_watch_forked();
  for (uint32_t slot = 0; slot < GMI_MANAGERS; slot++) {
    uint64_t handle = atomic_exchange(&live[slot].handle, 0);
    if (handle) {
      forked[slot].handle = handle;
      forked[slot].opener = live[slot].opener;
      generations_given[slot][handle & (SERIALS - 1)] = GMI_TENSOR_GENERATIONS; /* the parent goes on giving them */
    }
    live[slot].manager = NULL;
  }
}
static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

/* Is it a handle of a manager, or of its objects, that this process has by a fork? Then the error is recorded. */
static bool is_forked(uint64_t handle) {
  uint32_t slot = (uint32_t)(handle >> 54) & 63;
  uint64_t of = forked[slot].handle;
  if (!of || ((of ^ handle) & GMI_HANDLE_MANAGER_MASK)) return false;
  gmi_fail(GEMINI_ERR_HANDLE, 0,
           "%#llx belongs to a manager of process %ld, from which this process was forked: only that one can use it",
           (unsigned long long)handle, (long)forked[slot].opener);
  return true;
}

static const uint8_t index_bits[] = { [GMI_HANDLE_ARENA] = GMI_ARENA_INDEX_BITS,
                                      [GMI_HANDLE_TENSOR] = GMI_TENSOR_INDEX_BITS,
                                      [GMI_HANDLE_STREAM] = GMI_STREAM_INDEX_BITS,
                                      [GMI_HANDLE_GRAPH] = GMI_GRAPH_INDEX_BITS };
_Static_assert(GMI_DEVICE_MAX_STREAMS <= 1u << GMI_STREAM_INDEX_BITS && GMI_ARENAS <= 1u << GMI_ARENA_INDEX_BITS &&
                   GMI_TENSORS <= 1u << GMI_TENSOR_INDEX_BITS && GMI_GRAPHS <= 1u << GMI_GRAPH_INDEX_BITS,
               "a handle has room for each index");

uint64_t gmi_handle(const gmi_manager_t *m, uint32_t type, uint64_t generation, uint32_t index) {
  return (uint64_t)type << 60 | (m->handle & GMI_HANDLE_MANAGER_MASK) | generation << index_bits[type] | index;
}

bool gmi_handle_open(const gmi_manager_t *m, uint64_t handle, uint32_t type, uint32_t *index_out,
                     uint64_t *generation_out) {
  static const char *const names[] = { "", "manager", "arena", "tensor", "stream", "graph" };
  if (handle >> 60 != type || ((handle ^ m->handle) & GMI_HANDLE_MANAGER_MASK)) {
    gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is no %s of this manager", (unsigned long long)handle, names[type]);
    return false;
  }
  uint64_t object = handle & ((UINT64_C(1) << GMI_HANDLE_OBJECT_BITS) - 1);
  *index_out = (uint32_t)(object & ((1u << index_bits[type]) - 1));
  *generation_out = object >> index_bits[type];
  return true;
}

gmi_manager_t *gmi_manager_get(gemini_manager_t handle) {
  uint32_t slot = (uint32_t)(handle >> 54) & 63;
  if (handle && atomic_load_explicit(&live[slot].handle, memory_order_acquire) == handle) return live[slot].manager;
  if (!is_forked(handle)) gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is no open manager", (unsigned long long)handle);
  return NULL;
}

gmi_manager_t *gmi_manager_of(uint64_t handle) {
  uint32_t slot = (uint32_t)(handle >> 54) & 63;
  uint64_t of = atomic_load_explicit(&live[slot].handle, memory_order_acquire);
  if (of && !((of ^ handle) & GMI_HANDLE_MANAGER_MASK)) return live[slot].manager;
  if (!is_forked(handle))
    gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is no object of an open manager", (unsigned long long)handle);
  return NULL;
}

void gmi_lock_beside(gmi_manager_t *m, const char *function) {
  if (pthread_mutex_trylock(&m->lock)) {
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, function, GMI_WAIT_LOCK, 0);
    pthread_mutex_lock(&m->lock);
    gmi_wait_end(m, &wait);
  }
  gmi_watch_locked(m, function);
  if (atomic_load_explicit(&m->hook_waiting, memory_order_relaxed)) gmi_hook_drain(m);
}

void gmi_callbacks_wait(gmi_manager_t *m, const char *function) {
  if (!m->callbacks || pthread_equal(m->callback_thread, pthread_self())) return;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, function, GMI_WAIT_CALLBACK, 0);
  while (m->callbacks) pthread_cond_wait(&m->callback_ended, &m->lock);
  gmi_wait_end(m, &wait);
  gmi_watch_locked(m, function);
}

void gmi_lock(gmi_manager_t *m, const char *function) {
  gmi_lock_beside(m, function);
  gmi_callbacks_wait(m, function);
}

void gmi_callback_begin(gmi_manager_t *m) {
  m->callback_thread = pthread_self();
  m->callbacks++;
  pthread_mutex_unlock(&m->lock);
}

void gmi_callback_end(gmi_manager_t *m, const char *function) {
  gmi_lock_beside(m, function);
  if (!--m->callbacks) pthread_cond_broadcast(&m->callback_ended);
}

void gmi_unlock(gmi_manager_t *m) {
  uint32_t count = m->log_count;
  if (!count) {
    pthread_mutex_unlock(&m->lock);
    return;
  }
  int32_t levels[GMI_LOG_QUEUE];
  char texts[GMI_LOG_QUEUE][sizeof m->logs[0].text];
  for (uint32_t i = 0; i < count; i++) {
    levels[i] = m->logs[i].level;
    memcpy(texts[i], m->logs[i].text, sizeof texts[i]);
  }
  m->log_count = 0;
  pthread_mutex_unlock(&m->lock);
  for (uint32_t i = 0; i < count; i++) m->config.log_fn(m->config.log_user, levels[i], texts[i]);
}

void gmi_log(gmi_manager_t *m, int32_t level, const char *format, ...) {
  if (!m->config.log_fn || level > (int32_t)m->config.log_level || m->log_count == GMI_LOG_QUEUE) return;
  va_list args;
  va_start(args, format);
  vsnprintf(m->logs[m->log_count].text, sizeof m->logs[0].text, format, args);
  va_end(args);
  m->logs[m->log_count++].level = level;
}

void *gmi_space(uint64_t bytes) {
  void *space = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return space == MAP_FAILED ? NULL : space;
}
void gmi_space_free(void *space, uint64_t bytes) {
  if (space) munmap(space, bytes);
}

/* ---- fences */
static gemini_status_t fence_now(gmi_manager_t *m, uint32_t stream, bool timed, gmi_fence_t *fence_out) {
  /* Claim first: a release that reads the old number names a mark that is placed after its own work. */
  uint64_t mark = atomic_load_explicit(&m->streams[stream].placed, memory_order_relaxed) + 1;
  atomic_store_explicit(&m->streams[stream].placed, mark, memory_order_seq_cst);
  uint64_t got = 0;
  gemini_status_t status = (timed ? m->dev->mark : m->dev->mark_untimed)(m->dev_self, stream, &got);
  if (status) { /* whoever named a later one meanwhile gets it placed when it is needed */
    atomic_store_explicit(&m->streams[stream].placed, mark - 1, memory_order_seq_cst);
    if (status == GEMINI_ERR_STATE) return status; /* it is being captured, as the message says */
    return gmi_fail(status, 0, "device %s could not mark stream %u", m->dev->name, stream);
  }
  atomic_store_explicit(&m->streams[stream].placed, got, memory_order_seq_cst);
  *fence_out = gmi_fence(stream, got);
  return GEMINI_OK;
}

gemini_status_t gmi_fence_now(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out) {
  return fence_now(m, stream, true, fence_out);
}

gmi_fence_t gmi_fence_later(gmi_manager_t *m, uint32_t stream) {
  if (stream == GMI_CALLER) return 0;
  return gmi_fence(stream, atomic_load_explicit(&m->streams[stream].placed, memory_order_seq_cst) + 1);
}

static gemini_status_t fence_place(gmi_manager_t *m, gmi_fence_t fence) {
  uint32_t stream = gmi_fence_stream(fence);
  gemini_status_t status = GEMINI_OK;
  gmi_fence_t placed;
  while (!status && atomic_load_explicit(&m->streams[stream].placed, memory_order_relaxed) < gmi_fence_mark(fence))
    status = fence_now(m, stream, false, &placed);
  return status;
}

bool gmi_fence_reached(gmi_manager_t *m, gmi_fence_t fence) {
  return !fence || m->dev->reached(m->dev_self, gmi_fence_stream(fence), gmi_fence_mark(fence));
}

gemini_status_t gmi_fence_sync(gmi_manager_t *m, gmi_fence_t fence) {
  if (gmi_fence_reached(m, fence)) return GEMINI_OK;
  gemini_status_t status = fence_place(m, fence);
  if (status) return status;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_STREAM, gmi_fence_stream(fence));
  status = m->dev->sync(m->dev_self, gmi_fence_stream(fence), gmi_fence_mark(fence));
  gmi_wait_end(m, &wait);
  return status ? gmi_fail(status, 0, "work on stream %u of device %s failed", gmi_fence_stream(fence), m->dev->name)
                : GEMINI_OK;
}

gemini_status_t gmi_fence_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence) {
  if (!fence || gmi_fence_stream(fence) == stream || gmi_fence_reached(m, fence)) return GEMINI_OK;
  if (stream == GMI_CALLER) return gmi_fence_sync(m, fence);
  gemini_status_t status = fence_place(m, fence);
  if (status) return status;
  status = m->dev->wait(m->dev_self, stream, gmi_fence_stream(fence), gmi_fence_mark(fence));
  return status ? gmi_fail(status, 0, "device %s could not make stream %u wait for stream %u", m->dev->name, stream,
                           gmi_fence_stream(fence))
                : GEMINI_OK;
}

gmi_fence_t gmi_fence_join(gmi_manager_t *m, gmi_fence_t a, gmi_fence_t b) {
  if (a && b && gmi_fence_stream(a) == gmi_fence_stream(b)) return gmi_fence_mark(a) > gmi_fence_mark(b) ? a : b;
  if (gmi_fence_reached(m, a)) return b;
  if (gmi_fence_reached(m, b)) return a;
  gmi_fence_t joined = b;
  if (gmi_fence_wait(m, gmi_fence_stream(b), a) || fence_now(m, gmi_fence_stream(b), false, &joined)) {
    m->async_status = GEMINI_ERR_DEVICE; /* then both are waited for, by the caller */
    snprintf(m->async_message, sizeof m->async_message, "%s", gmi_fail_message());
    gmi_fence_sync(m, a);
    gmi_fence_sync(m, b);
    return 0;
  }
  return joined;
}

void gmi_leave_over(gmi_manager_t *m, gmi_leftover_t *memory) {
  memory->next = m->leftovers;
  m->leftovers = memory;
}

gemini_status_t gmi_device_resize(gmi_manager_t *m, uint64_t memory_bytes) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_DRIVER, 0);
  gemini_status_t status = m->dev->resize(m->dev_self, memory_bytes);
  gmi_wait_end(m, &wait);
  return status;
}

gemini_status_t gmi_device_zero(gmi_manager_t *m, uint32_t stream, void *address, uint64_t bytes) {
  gemini_status_t status = m->dev->zero(m->dev_self, stream, address, bytes);
  return status ? gmi_fail(status, 0, "device %s could not zero %llu bytes", m->dev->name, (unsigned long long)bytes)
                : GEMINI_OK;
}

/* ---- streams */
gemini_status_t gmi_stream_resolve(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out) {
  if (stream == GEMINI_STREAM_CALLER) {
    *index_out = GMI_CALLER;
    return GEMINI_OK;
  }
  uint32_t index;
  uint64_t generation;
  if (!gmi_handle_open(m, stream, GMI_HANDLE_STREAM, &index, &generation)) return GEMINI_ERR_HANDLE;
  if (!generation || index >= GMI_DEVICE_MAX_STREAMS || atomic_load(&m->streams[index].life) != generation)
    return gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is a destroyed stream", (unsigned long long)stream);
  *index_out = index;
  return GEMINI_OK;
}

enum { STREAMS_LIMIT = 48 }; /* without the library's own */

/* native: NULL, or where a stream of the caller's own is, to be adopted. */
static gemini_status_t stream_open(gmi_manager_t *m, bool internal, void *const *native, uint32_t *index_out) {
  uint32_t open = 0;
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) open += m->streams[i].life && !m->streams[i].internal;
  if (!internal && open >= STREAMS_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u streams exist, the limit is %d", open, STREAMS_LIMIT);
  uint32_t index;
  gemini_status_t status =
      native ? m->dev->stream_adopt(m->dev_self, *native, &index) : m->dev->stream_create(m->dev_self, &index);
  if (status && native) return gmi_fail(status, 0, "device %s could not adopt the stream %p", m->dev->name, *native);
  if (status) return gmi_fail(status, 0, "device %s could not create a stream", m->dev->name);
  gmi_stream_t *s = &m->streams[index];
  s->internal = internal;
  s->named = native != NULL;
  s->hooked = false;
  s->native = native ? *native : NULL;
  atomic_store(&s->life, ++s->generation);
  gmi_fence_t first;
  status = fence_now(m, index, false, &first); /* learns where the stream's numbers stand */
  if (status) {
    atomic_store(&s->life, 0);
    m->dev->stream_destroy(m->dev_self, index);
    return status;
  }
  *index_out = index;
  return GEMINI_OK;
}

/* Two names of a stream would be two streams that wait for each other: one that the caller adopted or got serves,
 * too. */
static bool is_native(const gmi_stream_t *s, const void *native) {
  return atomic_load_explicit(&s->life, memory_order_relaxed) && s->named && s->native == native;
}

static gemini_status_t stream_create(gmi_manager_t *m, void *const *native, gemini_stream_t *stream_out) {
  if (!stream_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "stream_out is NULL");
  gmi_lock_beside(m, "gemini_stream_create");
  uint32_t index = GMI_DEVICE_MAX_STREAMS;
  gemini_status_t status = GEMINI_OK;
  if (native) /* what a hook has adopted becomes the caller's */
    for (index = 0; index < GMI_DEVICE_MAX_STREAMS; index++)
      if (m->streams[index].hooked && is_native(&m->streams[index], *native)) break;
  if (index == GMI_DEVICE_MAX_STREAMS) status = stream_open(m, false, native, &index);
  else m->streams[index].hooked = false;
  if (!status) *stream_out = gmi_handle(m, GMI_HANDLE_STREAM, m->streams[index].generation, index);
  gmi_unlock(m);
  return status;
}
gemini_status_t gemini_stream_create(gemini_manager_t mgr, gemini_stream_t *stream_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_create(m, NULL, stream_out) : GEMINI_ERR_HANDLE);
}
gemini_status_t gemini_stream_adopt(gemini_manager_t mgr, void *native, gemini_stream_t *stream_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_create(m, &native, stream_out) : GEMINI_ERR_HANDLE);
}

static gemini_status_t stream_native(gmi_manager_t *m, gemini_stream_t stream, void **native_out) {
  uint32_t index;
  if (!native_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "native_out is NULL");
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (status) return status;
  if (index == GMI_CALLER) return gmi_fail(GEMINI_ERR_INVALID, 0, "GEMINI_STREAM_CALLER is no stream of the device's");
  void *native;
  status = m->dev->stream_native(m->dev_self, index, &native);
  if (status == GEMINI_ERR_UNSUPPORTED) return gmi_fail(status, 0, "device %s has no streams of an API", m->dev->name);
  if (status) return status;
  gmi_lock_beside(m, "gemini_stream_native");
  m->streams[index].native = *native_out = native;
  m->streams[index].named = true;
  gmi_unlock(m);
  return GEMINI_OK;
}
gemini_status_t gemini_stream_native(gemini_manager_t mgr, gemini_stream_t stream, void **native_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_native(m, stream, native_out) : GEMINI_ERR_HANDLE);
}

static gemini_status_t native_destroy(gmi_manager_t *m, uint32_t index) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_DRIVER, 0);
  gemini_status_t status = m->dev->stream_destroy(m->dev_self, index);
  gmi_wait_end(m, &wait);
  return status;
}
static gemini_status_t native_renew(gmi_manager_t *m, uint32_t index, bool may_block) {
  gmi_wait_t wait;
  if (may_block) gmi_wait_begin(m, &wait, NULL, GMI_WAIT_DRIVER, 0);
  gemini_status_t status = m->dev->stream_renew(m->dev_self, index, may_block);
  if (may_block) gmi_wait_end(m, &wait);
  return status;
}

gemini_status_t gmi_stream_end(gmi_manager_t *m, uint32_t index) {
  /* Fences of this stream may still lie in windows: everything they could name gets placed and reached here. */
  gmi_fence_t end = 0;
  gemini_status_t status = fence_now(m, index, false, &end);
  if (!status) status = gmi_fence_sync(m, end);
  if (status) return status;
  gmi_tracer_resolve(m, true);
  status = native_destroy(m, index);
  if (status) return gmi_fail(status, 0, "device %s could not destroy stream %u", m->dev->name, index);
  atomic_store(&m->streams[index].life, 0);
  return GEMINI_OK;
}

gemini_status_t gmi_stream_of_native(gmi_manager_t *m, void *native, bool may_block, uint32_t *index_out) {
  if (m->config.device == GEMINI_DEVICE_SIMULATED) return gmi_stream_resolve(m, (uintptr_t)native, index_out);
  uint32_t index = m->hook_stream, open = 0, oldest = GMI_NONE;
  if (!is_native(&m->streams[index], native)) {
    for (index = 0; index < GMI_DEVICE_MAX_STREAMS && !is_native(&m->streams[index], native); index++) {
      const gmi_stream_t *s = &m->streams[index];
      open += s->life && !s->internal;
      if (s->life && s->hooked && (oldest == GMI_NONE || s->used < m->streams[oldest].used)) oldest = index;
    }
    if (index < GMI_DEVICE_MAX_STREAMS) m->streams[index].used = ++m->hook_clock;
  }
  gemini_status_t status = GEMINI_OK;
  if (index < GMI_DEVICE_MAX_STREAMS) {
    status = native ? native_renew(m, index, may_block) : GEMINI_OK;
  } else {
    if (open >= STREAMS_LIMIT && oldest != GMI_NONE) {
      if (!may_block) return GEMINI_ERR_BUSY;
      status = gmi_stream_end(m, oldest);
    }
    if (!status) status = stream_open(m, false, &native, &index);
    if (!status) m->streams[index].hooked = true, m->streams[index].used = ++m->hook_clock;
  }
  if (status) return status;
  *index_out = m->hook_stream = index;
  return GEMINI_OK;
}

static gemini_status_t stream_destroy(gemini_stream_t stream) {
  if (!stream) return GEMINI_OK;
  gmi_manager_t *m = gmi_manager_of(stream);
  if (!m) return GEMINI_ERR_HANDLE;
  gmi_lock(m, "gemini_stream_destroy");
  uint32_t index;
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (!status && m->streams[index].internal)
    status = gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is a stream of the library's own", (unsigned long long)stream);
  if (!status && gmi_tracer_op_stream(m) == index)
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "the open operator runs on this stream");
  if (!status && gmi_graph_uses_stream(m, index))
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "a graph was begun on this stream and has not ended, or is entered on it");
  if (!status) status = gmi_stream_end(m, index);
  gmi_unlock(m);
  return status;
}
gemini_status_t gemini_stream_destroy(gemini_stream_t stream) { API_RETURN(stream_destroy(stream)); }

static gemini_status_t stream_call(gmi_manager_t *m, gemini_stream_t stream, gemini_call_fn fn, void *user) {
  uint32_t index = 0;
  if (!fn) return gmi_fail(GEMINI_ERR_INVALID, 0, "fn is NULL");
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (status) return status;
  if (index == GMI_CALLER) {
    fn(user);
    return GEMINI_OK;
  }
  status = m->dev->call(m->dev_self, index, fn, user);
  return status ? gmi_fail(status, 0, "the device could not queue the call") : GEMINI_OK;
}
gemini_status_t gemini_stream_call(gemini_manager_t mgr, gemini_stream_t stream, gemini_call_fn fn, void *user) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_call(m, stream, fn, user) : GEMINI_ERR_HANDLE);
}

static gemini_status_t stream_synchronize(gmi_manager_t *m, gemini_stream_t stream) {
  uint32_t index = 0;
  gemini_status_t status = gmi_stream_resolve(m, stream, &index);
  if (status || index == GMI_CALLER) return status;
  gmi_lock_beside(m, "gemini_stream_synchronize");
  gmi_fence_t end;
  status = fence_now(m, index, false, &end);
  gmi_unlock(m);
  if (status) return status;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, "gemini_stream_synchronize", GMI_WAIT_STREAM, index);
  status = m->dev->sync(m->dev_self, index, gmi_fence_mark(end)); /* others go on meanwhile */
  gmi_wait_end(m, &wait);
  return status;
}
gemini_status_t gemini_stream_synchronize(gemini_manager_t mgr, gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? stream_synchronize(m, stream) : GEMINI_ERR_HANDLE);
}

/* ---- open and close */
static gemini_status_t check_fraction(const char *name, double value) {
  if (value >= 0.0 && value <= 1.0) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is %g, must be 0 to 1", name, value);
}

static gemini_status_t config_check(gemini_config_t *c) {
  if (c->flags & ~(uint32_t)GEMINI_CONFIG_STRICT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", c->flags & ~(uint32_t)GEMINI_CONFIG_STRICT);
  if (c->placement > GEMINI_PLACEMENT_STATIC)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "placement is %u, the last one is %d", c->placement,
                    GEMINI_PLACEMENT_STATIC);
  if (c->device > GEMINI_DEVICE_CUDA)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device is %u, the last one is %d", c->device, GEMINI_DEVICE_CUDA);
  if (c->device_ordinal && c->device == GEMINI_DEVICE_SIMULATED)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device_ordinal is %u, the simulated device has only 0", c->device_ordinal);
  if (c->warmup_iterations > 1000)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "warmup_iterations is %u, at most 1000", c->warmup_iterations);
  if (c->update_threads > 256)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "update_threads is %u, at most 256", c->update_threads);
  if (c->log_level > GEMINI_LOG_DEBUG)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "log_level is %u, at most %d", c->log_level, GEMINI_LOG_DEBUG);
  const uint64_t limit = UINT64_C(1) << 46;
  const struct {
    const char *name;
    uint64_t value;
  } sizes[] = { { "device_bytes", c->device_bytes }, { "host_bytes", c->host_bytes }, { "file_bytes", c->file_bytes } };
  for (int i = 0; i < 3; i++)
    if (sizes[i].value > limit)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is %llu, at most %llu", sizes[i].name,
                      (unsigned long long)sizes[i].value, (unsigned long long)limit);
  if (!c->device_bytes) return gmi_fail(GEMINI_ERR_INVALID, 0, "device_bytes is 0, a device budget is required");
  if (c->device_margin_bytes >= c->device_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device_margin_bytes is %llu, must be less than device_bytes, %llu",
                    (unsigned long long)c->device_margin_bytes, (unsigned long long)c->device_bytes);
  if (c->keep_name && (!*c->keep_name || !c->file_bytes || !c->window_bytes))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "keep_name is \"%.60s\": it must not be empty, and needs %s", c->keep_name,
                    c->file_bytes ? "window_bytes" : "a file tier");
  if (c->watchdog_ns && (!c->log_fn || c->log_level == GEMINI_LOG_ERROR))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "watchdog_ns is %llu, but %s", (unsigned long long)c->watchdog_ns,
                    c->log_fn ? "log_level leaves out warnings, with which it reports"
                              : "log_fn, to which it reports, is NULL");
  if (c->reserved) return gmi_fail(GEMINI_ERR_INVALID, 0, "reserved is %u, must be 0", c->reserved);
  if (c->file_engine > GEMINI_FILE_ENGINE_THREADS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file_engine is %u, the last one is %d", c->file_engine,
                    GEMINI_FILE_ENGINE_THREADS);
  if (c->file_bytes && (!c->file_dir || !*c->file_dir))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file_bytes is %llu but file_dir is not set",
                    (unsigned long long)c->file_bytes);
  gemini_status_t status = check_fraction("static_param_fraction", c->static_param_fraction);
  if (!status) status = check_fraction("static_optim_fraction", c->static_optim_fraction);
  if (!c->warmup_iterations) c->warmup_iterations = 1;
  if (!c->log_level) c->log_level = GEMINI_LOG_WARNING;
  return status;
}

/* Queued copies and calls use frames, host slots and addresses: nothing of these goes before they are done. */
static void streams_drain(gmi_manager_t *m) {
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    gmi_fence_t end;
    if (m->streams[i].life && fence_now(m, i, false, &end) == GEMINI_OK) gmi_fence_sync(m, end);
  }
}

static void manager_free(gmi_manager_t *m) {
  gmi_updates_close(m);
  if (m->lane) gmi_lane_drain(m, "gemini_manager_close");
  gmi_files_close(m); /* its transfers tell the lane */
  gmi_lane_close(m);
  if (m->dev_self) streams_drain(m);
  gmi_timeline_close(m);
  if (m->dev_self) {
    gmi_tracer_close(m);
    gmi_graphs_free(m);
    gmi_heap_close(m);
    gmi_host_blocks_close(m);
    gmi_arena_free_all(m);
    gmi_frames_free(m);
    gmi_host_close(m);
    m->dev->close(m->dev_self);
  }
  for (gmi_leftover_t *l = m->leftovers, *next; l; l = next) {
    next = l->next;
    free(l);
  }
  gmi_space_free(m->tensors, (uint64_t)GMI_TENSORS * sizeof *m->tensors);
  free(m->name_buckets);
  free(m->hook_frees);
  free(m->file_dir);
  free(m->keep_name);
  gmi_leases_free(&m->leases);
  pthread_mutex_destroy(&m->hook_lock);
  pthread_cond_destroy(&m->callback_ended);
  gmi_watchdog_stop(m);
  gmi_watch_destroy(m);
  pthread_mutex_destroy(&m->lock);
  free(m);
}

/* Finds a slot and a serial number whose generations are not used up, and gives both to the manager. False: there is
 * none. Called with live_lock held. */
static bool place_take(gmi_manager_t *m) {
  for (uint32_t slot = 0; slot < GMI_MANAGERS; slot++) {
    for (uint32_t i = 1; i <= SERIALS && !atomic_load(&live[slot].handle); i++) {
      uint64_t serial = gmi_manager_serial + i, end = serial & (SERIALS - 1);
      if (generations_given[slot][end] >= GMI_TENSOR_GENERATIONS) continue;
      gmi_manager_serial = serial;
      m->slot = slot;
      m->handle = (uint64_t)GMI_HANDLE_MANAGER << 60 | (uint64_t)slot << 54 | end << 42 | serial;
      generations_begin(m, *generations_of(m));
      return true;
    }
  }
  return false;
}
static uint32_t managers_open(void) {
  uint32_t open = 0;
  for (uint32_t slot = 0; slot < GMI_MANAGERS; slot++) open += atomic_load(&live[slot].handle) != 0;
  return open;
}

static gemini_status_t manager_open(const gemini_config_t *theirs, gemini_manager_t *mgr_out) {
  if (!mgr_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "mgr_out is NULL");
  gemini_config_t config;
  gemini_status_t status = gmi_struct_in(&config, sizeof config, theirs, sizeof config, "config");
  if (!status) status = config_check(&config);
  if (status) return status;
  gmi_fork_watch(&fork_ops);
  gmi_manager_t *m = aligned_alloc(_Alignof(gmi_manager_t), sizeof *m);
  if (!m) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a manager (%zu bytes)", sizeof *m);
  memset(m, 0, sizeof *m);
  pthread_mutex_init(&m->lock, NULL);
  pthread_mutex_init(&m->hook_lock, NULL);
  pthread_cond_init(&m->callback_ended, NULL);
  gmi_leases_init(&m->leases);
  gmi_watch_init(m);
  m->config = config;
  m->stats.budget_bytes[GEMINI_TIER_DEVICE] = config.device_bytes;
  m->stats.budget_bytes[GEMINI_TIER_FILE] = config.file_bytes;
  m->config.file_dir = m->config.keep_name = NULL;
  m->file_sys = gmi_files_sys;
  m->dev = config.device == GEMINI_DEVICE_CUDA ? &gmi_device_cuda : &gmi_device_sim;
  m->tensor_free = GMI_NONE;
  m->tensors = gmi_space((uint64_t)GMI_TENSORS * sizeof *m->tensors);
  m->name_bucket_count = 1024;
  m->name_buckets = malloc(m->name_bucket_count * sizeof *m->name_buckets);
  if (config.file_bytes) m->file_dir = strdup(config.file_dir);
  if (config.keep_name) m->keep_name = strdup(config.keep_name);
  if (!m->tensors || !m->name_buckets || (config.file_bytes && !m->file_dir) || (config.keep_name && !m->keep_name)) {
    manager_free(m);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a manager's tables");
  }
  memset(m->name_buckets, 0xff, m->name_bucket_count * sizeof *m->name_buckets);
  gmi_device_config_t device = { .ordinal = config.device_ordinal,
                                 .memory_bytes = config.device_bytes,
                                 .h2d_bytes_per_s = config.sim_h2d_bytes_per_s,
                                 .d2h_bytes_per_s = config.sim_d2h_bytes_per_s };
  const uint64_t unit = config.device == GEMINI_DEVICE_CUDA ? GMI_DEVICE_CUDA_UNIT : 4096;
  device.memory_bytes -= device.memory_bytes % unit;
  if (!device.memory_bytes) device.memory_bytes = unit;
  gmi_nvtx_open();
  status = m->dev->open(&device, &m->dev_self);
  if (status) {
    m->dev_self = NULL;
    gmi_fail_prefix("device %s could not be opened with %llu bytes: ", m->dev->name,
                    (unsigned long long)device.memory_bytes);
    manager_free(m);
    return status;
  }
  m->granularity = m->dev->granularity(m->dev_self);
  uint64_t w = config.window_bytes;
  if (w && ((w & (w - 1)) || w < 65536 || w < m->granularity || w > (UINT64_C(1) << 30))) {
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "window_bytes is %llu, must be a power of two from %llu to 1 GiB",
                      (unsigned long long)w, (unsigned long long)(m->granularity > 65536 ? m->granularity : 65536));
  } else if (w > config.device_bytes - config.device_margin_bytes) {
    status =
        gmi_fail(GEMINI_ERR_INVALID, 0, "window_bytes is %llu, more than the device budget without its margin, %llu",
                 (unsigned long long)w, (unsigned long long)(config.device_bytes - config.device_margin_bytes));
  } else if (config.device_bytes - config.device_margin_bytes < 65536) {
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "device_bytes without its margin is %llu, at least 65536",
                      (unsigned long long)(config.device_bytes - config.device_margin_bytes));
  }
  if (!status) status = stream_open(m, true, NULL, &m->copy_in);
  if (!status) status = stream_open(m, true, NULL, &m->copy_out);
  if (!status) status = stream_open(m, true, NULL, &m->update_stream);
  if (!status) status = gmi_host_open(m);
  if (!status) status = gmi_files_open(m);
  if (!status) status = gmi_tracer_open(m);
  if (!status) status = gmi_lane_open(m, config.update_threads);
  if (!status) status = gmi_updates_open(m);
  if (!status) status = gmi_watchdog_start(m);
  if (status) {
    manager_free(m);
    return status;
  }
  pthread_mutex_lock(&live_lock);
  bool placed = place_take(m);
  if (placed) {
    live[m->slot].manager = m;
    live[m->slot].opener = getpid();
    *mgr_out = m->handle;
    atomic_store_explicit(&live[m->slot].handle, m->handle, memory_order_release);
  }
  pthread_mutex_unlock(&live_lock);
  if (placed) return GEMINI_OK;
  manager_free(m);
  return gmi_fail(GEMINI_ERR_INVALID, 0,
                  "%u managers are open, the limit, or the handles of the other places are used up", managers_open());
}
gemini_status_t gemini_manager_open(const gemini_config_t *config, gemini_manager_t *mgr_out) {
  API_RETURN(manager_open(config, mgr_out));
}

static gemini_status_t close_check(gmi_manager_t *m) {
  if (gmi_graphs_busy(m)) return gmi_fail(GEMINI_ERR_BUSY, 0, "a graph was begun and has not ended, or is entered");
  for (uint32_t i = 0; i < m->tensor_high; i++) {
    uint64_t users = gmi_tensor_users(atomic_load(&m->tensors[i].word));
    if (gmi_tensor_alive(&m->tensors[i]) && users)
      return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s is acquired %llu times", gmi_tensor_base(m, &m->tensors[i])->name,
                      (unsigned long long)users);
  }
  gmi_lease_t lease;
  if (gmi_lease_find(&m->leases, 0, &lease)) /* of an arena: tensors' are among their users */
    return gmi_fail(GEMINI_ERR_BUSY, 0, "%llu bytes at offset %llu of arena %s are acquired",
                    (unsigned long long)lease.key.size, (unsigned long long)lease.key.offset,
                    gmi_arena_get(m, lease.key.object)->name);
  for (uint32_t a = 0; a < GMI_ARENAS; a++) {
    gmi_arena_t *arena = gmi_arena_at(m, a);
    for (uint32_t i = 0; arena && arena->windows && i < atomic_load(&arena->window_count); i++)
      if (atomic_load(&arena->windows[i].word) & GMI_WINDOW_PINS)
        return gmi_fail(GEMINI_ERR_BUSY, 0, "a range of arena %s is acquired", arena->name);
  }
  return GEMINI_OK;
}

static gemini_status_t manager_close(gemini_manager_t mgr) {
  if (!mgr) return GEMINI_OK;
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) return GEMINI_ERR_HANDLE;
  gmi_lock(m, "gemini_manager_close");
  gemini_status_t status = close_check(m);
  gmi_unlock(m);
  if (status) return status;
  gmi_updates_finish(m, "gemini_manager_close");
  gemini_status_t timeline = m->timeline ? gmi_timeline_finish(m) : GEMINI_OK;
  gmi_hook_close(m);
  pthread_mutex_lock(&live_lock);
  *generations_of(m) = generations_highest(m);
  atomic_store_explicit(&live[m->slot].handle, 0, memory_order_release);
  live[m->slot].manager = NULL;
  pthread_mutex_unlock(&live_lock);
  status = m->async_status;
  if (status) gmi_fail(status, 0, "an earlier asynchronous failure: %s", m->async_message);
  else status = gmi_updates_finish(m, "gemini_manager_close"); /* its failure, if any, is the one to report */
  manager_free(m);
  return status ? status : timeline;
}
gemini_status_t gemini_manager_close(gemini_manager_t mgr) { API_RETURN(manager_close(mgr)); }

/* ---- budgets */
static gemini_status_t budget_device(gmi_manager_t *m, uint64_t bytes) {
  uint64_t margin = m->config.device_margin_bytes;
  uint64_t window = atomic_load(&m->window_bytes) ? atomic_load(&m->window_bytes) : 65536;
  if (bytes <= margin || bytes - margin < window)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device budget %llu without its margin %llu is less than one window, %llu",
                    (unsigned long long)bytes, (unsigned long long)margin, (unsigned long long)window);
  gemini_status_t status = GEMINI_OK;
  uint64_t old = m->config.device_bytes;
  if (atomic_load(&m->window_bytes)) {
    uint64_t frames = (bytes - margin) / window;
    if (frames > UINT32_MAX - 1) frames = UINT32_MAX - 1;
    status = gmi_frames_resize(m, (uint32_t)frames);
  } else {
    uint64_t memory = bytes - bytes % m->granularity;
    status = gmi_device_resize(m, memory);
    if (status) gmi_fail(status, 0, "device %s refused to change its memory", m->dev->name);
  }
  if (status == GEMINI_ERR_OOM_DEVICE) gmi_fail_prefix("a device budget of %llu: ", (unsigned long long)bytes);
  if (status) return status;
  m->config.device_bytes = bytes;
  status = gmi_tracer_replan(m);
  if (!status) return GEMINI_OK;
  /* The plan cannot be made: the budget stays as it was. Growing back, or shrinking what was not yet used, works. */
  char message[440];
  int64_t code = gmi_fail_code();
  snprintf(message, sizeof message, "%s", gmi_fail_message());
  m->config.device_bytes = old;
  if (atomic_load(&m->window_bytes) && gmi_frames_resize(m, (uint32_t)((old - margin) / window)) == GEMINI_OK)
    (void)gmi_tracer_replan(m);
  return gmi_fail(status, code, "%s", message);
}

static gemini_status_t budget_set(gmi_manager_t *m, uint32_t tier, uint64_t bytes) {
  if (tier >= GEMINI_TIER_COUNT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, the last one is %d", tier, GEMINI_TIER_FILE);
  if (bytes > (UINT64_C(1) << 46))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "budget is %llu, at most %llu", (unsigned long long)bytes, 1ull << 46);
  gmi_lock(m, "gemini_budget_set");
  gemini_status_t status = GEMINI_OK;
  if (tier == GEMINI_TIER_DEVICE) {
    status = budget_device(m, bytes);
  } else if (tier == GEMINI_TIER_HOST) {
    if (!bytes) status = gmi_fail(GEMINI_ERR_INVALID, 0, "the host budget cannot be 0");
    else status = gmi_host_resize(m, bytes);
    if (!status) m->config.host_bytes = bytes;
    gmi_updates_room(m);
  } else {
    status = gmi_files_resize(m, bytes);
    if (!status) m->config.file_bytes = bytes;
  }
  if (!status) gmi_stat_set(&m->stats.budget_bytes[tier], bytes);
  gmi_unlock(m);
  return status;
}
gemini_status_t gemini_budget_set(gemini_manager_t mgr, uint32_t tier, uint64_t bytes) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? budget_set(m, tier, bytes) : GEMINI_ERR_HANDLE);
}
