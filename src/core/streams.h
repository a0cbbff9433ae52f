/* Streams, and fences: marks of streams in one word.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_STREAMS_H
#define GMI_STREAMS_H

#include "core/manager.h"

/* Index of a user's stream, or GMI_CALLER. */
gemini_status_t gmi_stream_resolve(gmi_manager_t *m, gemini_stream_t stream, uint32_t *index_out);
enum { GMI_STREAMS_LIMIT = 48 }; /* open at once, without the library's own */
/* native: NULL, or where a stream of the caller's own is, to be adopted. Lock held. */
gemini_status_t gmi_stream_open(gmi_manager_t *m, bool internal, void *const *native, uint32_t *index_out);
/* Is it the stream that the GPU's API calls native, adopted or told to the caller? Two names of a stream would be two
 * streams that wait for each other. */
bool gmi_stream_is_native(const gmi_stream_t *s, const void *native);
void gmi_streams_drain(gmi_manager_t *m); /* waits for all work of all streams */

/* The index under which the caller's own stream is known, which adopts it at first; lock held. BUSY: that would wait
 * for the device, which may_block allows. On the simulated device native is a gemini_stream_t. */
gemini_status_t gmi_stream_of_native(gmi_manager_t *m, void *native, bool may_block, uint32_t *index_out);
/* Waits for a stream's work and lets go of it; lock held. A failure leaves the stream as it is. */
gemini_status_t gmi_stream_end(gmi_manager_t *m, uint32_t index);

/* Memory that queued work may still write to, as the device could not be waited for: it goes when the device has been
 * closed. What is kept lies behind this header, in the same allocation. Lock held. */
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
gemini_status_t gmi_fence_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence); /* GMI_CALLER: blocks */
gemini_status_t gmi_fence_sync(gmi_manager_t *m, gmi_fence_t fence);                  /* blocks; keeps the lock */
bool gmi_fence_reached(gmi_manager_t *m, gmi_fence_t fence);                          /* any thread, no lock */
/* A fence after both; may make one stream wait for the other. */
gmi_fence_t gmi_fence_join(gmi_manager_t *m, gmi_fence_t a, gmi_fence_t b);
/* Fence behind what has been queued on stream so far; its mark is recorded when it is first needed. 0 for the caller.
 * No lock. */
gmi_fence_t gmi_fence_later(gmi_manager_t *m, uint32_t stream);

#endif
