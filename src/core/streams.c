/* Streams and fences. SPDX-License-Identifier: Apache-2.0
 *
 * A fence names a stream and a mark, and need not have a mark on the device yet. Placing a mark is a device call, so a
 * release does not place one: it names the next mark of the stream (gmi_fence_later()), and the mark is placed only if
 * another stream or thread has to wait for it. Most releases are followed by more work on the same stream, and nothing
 * ever waits for them.
 *
 * Nor need the work itself be on the device yet: gathers of ranks are held back for a moment, to be queued together.
 * They are queued when a mark is placed on their stream, if not before.
 *
 * Threads: marks are placed under the manager's lock; gmi_fence_later() and gmi_fence_reached() run on any thread. */
#include <stdio.h>
#include <time.h>

#include "base/check.h"
#include "core/manager.h"
#include "core/streams.h"

/* ---- fences */
/* Claims the next mark number, then places the mark. The order matters because gmi_fence_later() runs without the lock:
 * it queues nothing, reads recorded and names recorded + 1. If it reads the old number, its load precedes the claim in
 * the order of seq_cst operations, so its stream's work was queued before the mark is placed, and the named mark is the
 * one placed here. If it reads the claimed number, it names a later mark, which is placed when it is needed. Claiming
 * after placing would let it name a mark that lies before its own work. The load may be relaxed: only the holder of the
 * lock writes recorded. */
static gemini_status_t fence_now(gmi_manager_t *m, uint32_t stream, bool timed, gmi_fence_t *fence_out) {
  if (m->groups.held_streams >> stream & 1) { /* a mark is behind all work that the stream has been given */
    gemini_status_t held = m->groups.queue_held(m, stream);
    if (held) return held;
  }
  uint64_t mark = atomic_load_explicit(&m->streams[stream].recorded, memory_order_relaxed) + 1;
  atomic_store_explicit(&m->streams[stream].recorded, mark, memory_order_seq_cst);
  uint64_t got = 0;
  gemini_status_t status =
      (timed ? m->device.ops->stream.mark : m->device.ops->stream.mark_untimed)(m->device.self, stream, &got);
  if (status) { /* a later mark that was named meanwhile is placed by fence_record() when it is needed */
    atomic_store_explicit(&m->streams[stream].recorded, mark - 1, memory_order_seq_cst);
    if (status == GEMINI_ERR_STATE) return status; /* the stream is being captured; the device has set the message */
    return gmi_fail_device(status, "device %s could not mark stream %u", m->device.ops->name, stream);
  }
  atomic_store_explicit(&m->streams[stream].recorded, got, memory_order_seq_cst);
  *fence_out = gmi_fence(stream, got);
  return GEMINI_OK;
}

gemini_status_t gmi_fence_now(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  return fence_now(m, stream, true, fence_out);
}

gemini_status_t gmi_fence_now_untimed(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out) {
  return fence_now(m, stream, false, fence_out);
}

/* Places marks until the fence's mark exists. At most a few: a fence names at most one mark beyond the last claim, and
 * the loop only repeats when a failed claim was taken back. */
static gemini_status_t fence_record(gmi_manager_t *m, gmi_fence_t fence) {
  uint32_t stream = gmi_fence_stream(fence);
  gemini_status_t status = GEMINI_OK;
  gmi_fence_t recorded;
  while (!status && atomic_load_explicit(&m->streams[stream].recorded, memory_order_relaxed) < gmi_fence_mark(fence))
    status = fence_now(m, stream, false, &recorded);
  return status;
}

/* A release that runs while its stream is destroyed can name a mark that will never be placed (gmi_fence_later()). All
 * that was ever queued on such a stream has ended before its life became 0 (acquire: pairs with that store). */
static bool fence_is_over(gmi_manager_t *m, gmi_fence_t fence) {
  const gmi_stream_t *s = &m->streams[gmi_fence_stream(fence)];
  return !atomic_load_explicit(&s->life, memory_order_acquire) && atomic_load(&s->recorded) < gmi_fence_mark(fence);
}
bool gmi_fence_reached(gmi_manager_t *m, gmi_fence_t fence) {
  return !fence || m->device.ops->stream.reached(m->device.self, gmi_fence_stream(fence), gmi_fence_mark(fence)) ||
         fence_is_over(m, fence);
}

gemini_status_t gmi_fence_place(gmi_manager_t *m, gmi_fence_t fence) {
  return gmi_fence_reached(m, fence) ? GEMINI_OK : fence_record(m, fence);
}

gemini_status_t gmi_fence_sync(gmi_manager_t *m, gmi_fence_t fence) {
  if (gmi_fence_reached(m, fence)) return GEMINI_OK;
  gemini_status_t status = fence_record(m, fence);
  if (status) return status;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_STREAM, gmi_fence_stream(fence));
  status = m->device.ops->stream.sync(m->device.self, gmi_fence_stream(fence), gmi_fence_mark(fence));
  gmi_wait_end(m, &wait);
  if (status == GEMINI_ERR_PEER && m->groups.failure(m)) return status; /* it has named the rank */
  return status ? gmi_fail_device(status, "work on stream %u of device %s failed", gmi_fence_stream(fence),
                                  m->device.ops->name)
                : GEMINI_OK;
}

gemini_status_t gmi_fence_wait_across(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence) {
  if (gmi_fence_reached(m, fence)) return GEMINI_OK;
  if (stream == GMI_CALLER) return gmi_fence_sync(m, fence);
  gemini_status_t status = fence_record(m, fence);
  if (status) return status;
  status = m->device.ops->stream.wait(m->device.self, stream, gmi_fence_stream(fence), gmi_fence_mark(fence));
  return status ? gmi_fail_device(status, "device %s could not make stream %u wait for stream %u", m->device.ops->name,
                                  stream, gmi_fence_stream(fence))
                : GEMINI_OK;
}

gmi_fence_t gmi_fence_join(gmi_manager_t *m, gmi_fence_t a, gmi_fence_t b) {
  if (a && b && gmi_fence_stream(a) == gmi_fence_stream(b)) return gmi_fence_mark(a) > gmi_fence_mark(b) ? a : b;
  if (gmi_fence_reached(m, a)) return b;
  if (gmi_fence_reached(m, b)) return a;
  gmi_fence_t joined = b;
  if (gmi_fence_wait(m, gmi_fence_stream(b), a) || fence_now(m, gmi_fence_stream(b), false, &joined)) {
    /* No fence covers both: the calling thread waits for both instead. The first failure is kept, as its cause. */
    if (!m->failure.status) gmi_fail_keep(GEMINI_ERR_DEVICE, &m->failure);
    gmi_fence_sync(m, a);
    gmi_fence_sync(m, b);
    return 0;
  }
  return joined;
}

void gmi_leave_over(gmi_manager_t *m, gmi_leftover_t *memory) {
  memory->next = m->device.leftovers;
  m->device.leftovers = memory;
}

gemini_status_t gmi_device_resize(gmi_manager_t *m, uint64_t memory_bytes) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_DRIVER, 0);
  gemini_status_t status = m->device.ops->memory.resize(m->device.self, memory_bytes);
  gmi_wait_end(m, &wait);
  return status;
}

gemini_status_t gmi_device_zero(gmi_manager_t *m, uint32_t stream, void *address, uint64_t bytes) {
  gemini_status_t status = m->device.ops->queue.zero(m->device.self, stream, address, bytes);
  return status ? gmi_fail_device(status, "device %s could not zero %llu bytes", m->device.ops->name,
                                  (unsigned long long)bytes)
                : GEMINI_OK;
}

/* ---- streams */
gemini_status_t gmi_stream_resolve(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out) {
  if (gmi_stream_find(m, stream, index_out)) return GEMINI_OK;
  if (!gmi_handle_is(m, gmi_id(stream), GMI_HANDLE_STREAM)) gmi_handle_wrong(gmi_id(stream), GMI_HANDLE_STREAM);
  else gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is a destroyed stream", (unsigned long long)stream);
  return GEMINI_ERR_HANDLE;
}

/* The count comes before the second look at life, and gmi_stream_end() changes life before it looks at the count, all
 * seq_cst: one of the two sees the other. */
gemini_status_t gmi_stream_enter(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out) {
  gemini_status_t status = gmi_stream_resolve(m, stream, index_out);
  if (status || *index_out == GMI_CALLER) return status;
  atomic_fetch_add(&m->streams[*index_out].users, 1);
  status = gmi_stream_resolve(m, stream, index_out);
  if (status) gmi_stream_leave(m, *index_out);
  return status;
}
/* Release order: what the call queued comes before the stream's last mark. */
void gmi_stream_leave(gmi_manager_t *m, uint32_t index) {
  if (index != GMI_CALLER) atomic_fetch_sub_explicit(&m->streams[index].users, 1, memory_order_release);
}

/* native: address of the caller's own stream, which is adopted; NULL creates a new stream. */
gemini_status_t gmi_stream_open(gmi_manager_t *m, gmi_stream_kind_t kind, void *const *native, uint32_t *index_out) {
  const bool internal = kind != GMI_STREAM_CALLERS;
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint32_t open = 0;
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) open += m->streams[i].life && !m->streams[i].internal;
  if (!internal && open >= GMI_STREAMS_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u streams exist, the limit is %d", open, GMI_STREAMS_LIMIT);
  uint32_t index;
  gemini_status_t status = native ? m->device.ops->stream.adopt(m->device.self, *native, &index)
                                  : m->device.ops->stream.create(m->device.self, kind == GMI_STREAM_URGENT, &index);
  if (status && native)
    return gmi_fail_device(status, "device %s could not adopt the stream %p", m->device.ops->name, *native);
  if (status) return gmi_fail_device(status, "device %s could not create a stream", m->device.ops->name);
  gmi_stream_t *s = &m->streams[index];
  s->internal = internal;
  s->named = native != NULL;
  s->hooked = false;
  s->native = native ? *native : NULL;
  atomic_store(&s->life, ++s->generation);
  gmi_fence_t first;
  status = fence_now(m, index, false, &first); /* sets recorded: a device index that is reused continues its numbers */
  if (status) {
    atomic_store(&s->life, 0);
    m->device.ops->stream.destroy(m->device.self, index);
    return status;
  }
  *index_out = index;
  return GEMINI_OK;
}

/* A native stream must have one index only: two would be treated as two streams that wait for each other. Therefore
 * streams that the caller adopted, or whose native pointer was told to the caller, match too. Relaxed: life changes
 * under the lock, which the caller holds. */
bool gmi_stream_is_native(const gmi_stream_t *s, const void *native) {
  return atomic_load_explicit(&s->life, memory_order_relaxed) && s->named && s->native == native;
}

static gemini_status_t native_destroy(gmi_manager_t *m, uint32_t index) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_DRIVER, 0);
  gemini_status_t status = m->device.ops->stream.destroy(m->device.self, index);
  gmi_wait_end(m, &wait);
  return status;
}

static gemini_status_t native_renew(gmi_manager_t *m, uint32_t index, bool may_block) {
  gmi_wait_t wait;
  if (may_block) gmi_wait_begin(m, &wait, NULL, GMI_WAIT_DRIVER, 0);
  gemini_status_t status = m->device.ops->stream.renew(m->device.self, index, may_block);
  if (may_block) gmi_wait_end(m, &wait);
  return status;
}

/* Waits for all work queued on the stream so far. */
static gemini_status_t stream_drain(gmi_manager_t *m, uint32_t index) {
  gmi_fence_t end = 0;
  gemini_status_t status = fence_now(m, index, false, &end);
  return status ? status : gmi_fence_sync(m, end);
}

/* Waits until the calls that use the stream have ended. They need no lock, and there is nothing left for them to wait
 * for but a driver call and work of this stream: polling is good enough. */
static void stream_wait_users(gmi_manager_t *m, uint32_t index) {
  if (!atomic_load(&m->streams[index].users)) return;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_STREAM, index);
  while (atomic_load(&m->streams[index].users)) nanosleep(&(struct timespec){ 0, 20000 }, NULL);
  gmi_wait_end(m, &wait);
}

gemini_status_t gmi_stream_end(gmi_manager_t *m, uint32_t index) {
  gmi_stream_t *s = &m->streams[index];
  /* The long wait, and the failures that can be expected, come while the stream is still open. */
  gemini_status_t status = stream_drain(m, index);
  if (status) return status;
  atomic_store(&s->life, s->generation | GMI_STREAM_ENDING); /* seq_cst: pairs with gmi_stream_enter() */
  stream_wait_users(m, index);
  /* Again, for what these calls have queued. Chunks may still hold fences of this stream: this mark covers every mark
   * that they can name, but those that fence_is_over() finds. */
  status = stream_drain(m, index);
  if (!status) {
    m->trace.observer->stream_ends(m);
    status = native_destroy(m, index);
    if (status) gmi_fail_device(status, "device %s could not destroy stream %u", m->device.ops->name, index);
  }
  atomic_store(&s->life, status ? s->generation : 0);
  return status;
}

gemini_status_t gmi_stream_of_native(gmi_manager_t *m, void *native, bool may_block, uint32_t *index_out) {
  if (m->config.device == GEMINI_DEVICE_SIMULATED) return gmi_stream_resolve(m, native, index_out);
  uint32_t index = m->hook.stream, open = 0, oldest = GMI_NONE;
  if (!gmi_stream_is_native(&m->streams[index], native)) {
    for (index = 0; index < GMI_DEVICE_MAX_STREAMS && !gmi_stream_is_native(&m->streams[index], native); index++) {
      const gmi_stream_t *s = &m->streams[index];
      open += s->life && !s->internal;
      if (s->life && s->hooked && (oldest == GMI_NONE || s->used < m->streams[oldest].used)) oldest = index;
    }
    if (index < GMI_DEVICE_MAX_STREAMS) m->streams[index].used = ++m->hook.clock;
  }
  gemini_status_t status = GEMINI_OK;
  if (index < GMI_DEVICE_MAX_STREAMS) {
    status = native ? native_renew(m, index, may_block) : GEMINI_OK;
  } else {
    if (open >= GMI_STREAMS_LIMIT && oldest != GMI_NONE) {
      if (!may_block) return GEMINI_ERR_BUSY;
      status = gmi_stream_end(m, oldest);
    }
    if (!status) status = gmi_stream_open(m, GMI_STREAM_CALLERS, &native, &index);
    if (!status) m->streams[index].hooked = true, m->streams[index].used = ++m->hook.clock;
  }
  if (status) return status;
  *index_out = m->hook.stream = index;
  return GEMINI_OK;
}

/* Called before memory is freed: queued copies and callbacks use frames, host slots and addresses. */
void gmi_streams_drain(gmi_manager_t *m) {
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    gmi_fence_t end;
    if (m->streams[i].life && fence_now(m, i, false, &end) == GEMINI_OK) gmi_fence_sync(m, end);
  }
}
