/* Streams, and operations on fences (core/fence.h).
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_STREAMS_H
#define GMI_STREAMS_H

#include "core/manager.h"

/* Returns the index of the caller's stream, or GMI_CALLER. Any thread, no lock. With the lock held the index stays the
 * stream's until the lock is released. Without it, the stream may be destroyed at any time, and the index given to
 * another one: such a call may name the index in fences (gmi_fence_later(), gmi_fence_reached()), and nothing else. */
gemini_status_t gmi_stream_resolve(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out);
/* The same without an error: returns false, with nothing changed, if the handle is not that of an open stream. */
static inline bool gmi_stream_find(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out);
/* For a call that uses the stream without the lock: until gmi_stream_leave() the stream is not destroyed. The call must
 * not take the manager's lock meanwhile, because gmi_stream_end() holds it and waits for the call. Any thread. */
gemini_status_t gmi_stream_enter(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out);
void gmi_stream_leave(gmi_manager_t *m, uint32_t index);
enum { GMI_STREAMS_LIMIT = 48 }; /* streams open at once, not counting the library's own */
/* Whose a new stream is: a caller's, the library's, the library's with kernels that must not wait behind others'. */
typedef enum { GMI_STREAM_CALLERS, GMI_STREAM_INTERNAL, GMI_STREAM_URGENT } gmi_stream_kind_t;
/* native: address of the caller's own stream, which is adopted; NULL creates a new stream. Lock held. */
gemini_status_t gmi_stream_open(gmi_manager_t *m, gmi_stream_kind_t kind, void *const *native, uint32_t *index_out);
/* Is this the stream that the GPU's API calls native, and does the caller know it by that name? A native stream must
 * not get a second index: the two would wait for each other. */
bool gmi_stream_is_native(const gmi_stream_t *s, const void *native);
void gmi_streams_drain(gmi_manager_t *m); /* waits for all queued work of all streams */

/* Returns the index of the caller's own stream, and adopts the stream if it has none yet; lock held. BUSY: adopting it
 * would wait for the device, and may_block is false. On the simulated device native is a gemini_stream_t. */
gemini_status_t gmi_stream_of_native(gmi_manager_t *m, void *native, bool may_block, uint32_t *index_out);
/* Waits for a stream's work and for calls that use the stream, and destroys it; lock held. A failure leaves the stream
 * open. */
gemini_status_t gmi_stream_end(gmi_manager_t *m, uint32_t index);

/* Memory that queued work may still write because a wait for the device failed. It is freed after the device has been
 * closed. The memory follows this header in the same allocation. Lock held. */
typedef struct gmi_leftover {
  struct gmi_leftover *next;
  uint64_t reserved;
} gmi_leftover_t;
void gmi_leave_over(gmi_manager_t *m, gmi_leftover_t *memory);

gemini_status_t gmi_device_resize(gmi_manager_t *m, uint64_t memory_bytes); /* the device's budget; lock held */
/* Zeroes device memory in the stream's order; lock held. */
gemini_status_t gmi_device_zero(gmi_manager_t *m, uint32_t stream, void *address, uint64_t bytes);

/* fences; lock held */
gemini_status_t gmi_fence_now(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out);         /* places a mark */
gemini_status_t gmi_fence_now_untimed(gmi_manager_t *m, uint32_t stream, gmi_fence_t *fence_out); /* cheaper */
/* Makes the stream wait for the fence; GMI_CALLER: blocks. */
static inline gemini_status_t gmi_fence_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence);
gemini_status_t gmi_fence_wait_across(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence); /* of another stream */
gemini_status_t gmi_fence_sync(gmi_manager_t *m, gmi_fence_t fence); /* blocks; keeps the lock */
/* Places the fence's mark if that has been left (gmi_fence_later()): before a thread without the lock waits for it. */
gemini_status_t gmi_fence_place(gmi_manager_t *m, gmi_fence_t fence);
/* Any thread, no lock. Returns false after a stream failure too; call gmi_fence_sync() for the error. */
bool gmi_fence_reached(gmi_manager_t *m, gmi_fence_t fence);
/* Returns a fence behind both; may make one stream wait for the other. */
gmi_fence_t gmi_fence_join(gmi_manager_t *m, gmi_fence_t a, gmi_fence_t b);
/* Returns a fence behind all work queued on stream so far, without a device call: its mark is placed when it is first
 * waited for. Returns 0 for GMI_CALLER. Any thread, no lock. */
static inline gmi_fence_t gmi_fence_later(gmi_manager_t *m, uint32_t stream);

/* ---- inline, because every acquire and release runs them */
_Static_assert(GMI_DEVICE_MAX_STREAMS == 1u << GMI_STREAM_INDEX_BITS, "each index in a handle has a record");
static inline bool gmi_stream_find(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out) {
  uint64_t id = gmi_id(stream), object = id & ((UINT64_C(1) << GMI_HANDLE_OBJECT_BITS) - 1);
  uint32_t index = (uint32_t)id & (GMI_DEVICE_MAX_STREAMS - 1);
  uint64_t generation = object >> GMI_STREAM_INDEX_BITS;
  if (stream == GEMINI_STREAM_CALLER) index = GMI_CALLER;
  else if (!gmi_handle_is(m, id, GMI_HANDLE_STREAM) || !generation ||
           atomic_load(&m->streams[index].life) != generation)
    return false;
  *index_out = index;
  return true;
}
static inline gemini_status_t gmi_fence_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence) {
  if (!fence || gmi_fence_stream(fence) == stream) return GEMINI_OK;
  return gmi_fence_wait_across(m, stream, fence);
}

/* seq_cst: pairs with the claim in fence_now(). */
static inline gmi_fence_t gmi_fence_later(gmi_manager_t *m, uint32_t stream) {
  if (stream == GMI_CALLER) return 0;
  return gmi_fence(stream, atomic_load_explicit(&m->streams[stream].recorded, memory_order_seq_cst) + 1);
}

#endif
