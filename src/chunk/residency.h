/* The device tier: frames, mapping them, fetching and evicting chunks. The caller holds the manager's lock, unless a
 * comment says otherwise.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_RESIDENCY_H
#define GMI_RESIDENCY_H

#include "chunk/chunk.h"
#include "chunk/host.h"
#include "core/manager.h"

enum { GMI_MOVE_NAME_BYTES = 128 };
/* Writes the name of a chunk's move for timelines and Nsight Systems: "ARENA INDEX (REASON)". */
void gmi_move_name(gmi_manager_t *m, const gmi_chunk_t *c, uint32_t reason, char name_out[GMI_MOVE_NAME_BYTES]);
enum {
  GMI_TAKE_EVICT = 1,  /* evict a chunk when no frame is free */
  GMI_TAKE_CACHED = 2, /* evict one of which no next use is known and which needs no copy to leave, if there is one */
  GMI_TAKE_READY = 4,  /* rather map another frame than wait longer for the one that is mapped */
  GMI_TAKE_SOON = 8    /* likewise, if that is much longer */
};
/* Is there a frame that can be taken without an eviction? */
bool gmi_frames_left(const gmi_manager_t *m);
/* Takes a frame, to be used behind its `ready` fence. mapping: of the address the frame is for, or NULL; the frame
 * mapped there is preferred if it is free. reason: GEMINI_REASON_*, of evictions that this causes. Without
 * GMI_TAKE_EVICT, OOM_DEVICE comes without an error record. */
gemini_status_t gmi_frame_take(gmi_manager_t *m, const gmi_mapping_t *mapping, uint32_t reason, uint32_t flags,
                               uint32_t *frame_out);
/* Returns a frame to the pool; its bytes may be overwritten after ready. */
void gmi_frame_give(gmi_manager_t *m, uint32_t frame, gmi_fence_t ready);
/* Gives the chunk a frame and queues the copy of its bytes; does nothing when it is resident. Blocks only for bytes
 * that come from a file and for room. fresh: the caller will overwrite all bytes, so none are copied; it must then call
 * gmi_chunk_wrote(), or gmi_chunk_evict() when its batch fails. A failure leaves the chunk without a frame. */
gemini_status_t gmi_chunk_fetch(gmi_manager_t *m, gmi_chunk_t *c, bool fresh, uint32_t reason, uint32_t flags);
/* Takes the chunk's frame, after queueing a copy to the host when the device copy is the only one. BUSY when the chunk
 * is pinned or acquired. */
gemini_status_t gmi_chunk_evict(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
/* Of a chunk that may leave, and whose frame nobody needs at once: it leaves when its frame, or any, is asked for, or
 * when the link to the host has little to do at gmi_due_chunks_leave(); not if it is fetched again before. */
void gmi_chunk_leaves_late(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_due_chunks_leave(gmi_manager_t *m);
/* Of a chunk whose bytes are only in a file: starts to read them, where a slot can be had without waiting and without
 * bytes that are wanted earlier leaving theirs. False: it is not being read now, and might be later. */
bool gmi_chunk_read_soon(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
/* Makes the host copy valid; its bytes are there once the slot is quiet (gmi_chunk_settle_host()). drop: evicts the
 * device copy as well. BUSY when the device copy is acquired for writing, or with drop, when it is acquired or
 * pinned. */
gemini_status_t gmi_chunk_to_host(gmi_manager_t *m, gmi_chunk_t *c, bool drop, uint32_t reason);
/* Likewise, where bytes up to `end` will be overwritten, and then those in front of them. If the chunk is only known to
 * be zero, all these are written to the slot when somebody asks for its address (gmi_chunk_host()), if they are still
 * zero then: to clear them takes the calling thread longer than the copies take that overwrite them. May be called
 * again, with a lower end, before the bytes behind that are overwritten. */
gemini_status_t gmi_chunk_to_host_to_overwrite(gmi_manager_t *m, gmi_chunk_t *c, uint64_t end);
/* After gmi_chunk_departs(): the frame goes back to the pool. becomes, fence: as of gmi_chunk_departed(). */
void gmi_chunk_leave_frame(gmi_manager_t *m, gmi_chunk_t *c, uint32_t becomes, gmi_fence_t fence);
/* Takes the frame without writing back. The bytes must be valid in another tier, and the chunk must have no users on
 * the device. */
void gmi_chunk_drop_device(gmi_manager_t *m, gmi_chunk_t *c);
/* Leaves the chunk with a valid copy in a file, or as zeros, and without frame and slot. Blocks until it is written. */
gemini_status_t gmi_chunk_to_file(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
/* The chunk's bytes become zero, without frame, slot or block. It must not be pinned or have updates pending. */
void gmi_chunk_forget(gmi_manager_t *m, gmi_chunk_t *c);
/* The device copy, or the host copy, has been or is about to be written: the other copies become invalid. */
void gmi_chunk_wrote(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_chunk_host_wrote(gmi_manager_t *m, gmi_chunk_t *c);
/* Makes stream wait until the chunk's slot, which it has, can be read and written. */
gemini_status_t gmi_chunk_wait_slot(gmi_manager_t *m, uint32_t stream, const gmi_chunk_t *c);
/* What the stream has queued so far may use the slots of the chunks first to last (first > last: none), which they
 * have: later users wait for it, also if this fails. */
gemini_status_t gmi_slots_use(gmi_manager_t *m, const gmi_chunk_t *chunks, uint32_t first, uint32_t last,
                              uint32_t stream);
gemini_status_t gmi_slots_may_be_used(gmi_manager_t *m, uint32_t stream); /* STATE: the stream is being captured */
uint8_t *gmi_chunk_device(gmi_manager_t *m, const gmi_chunk_t *c);
/* Maps a frame at the address of a chunk or of a heap page. Blocks until queued work has left the frame mapped there
 * before; returns at once when it is the same frame. */
gemini_status_t gmi_map(gmi_manager_t *m, void *address, uint32_t frame, gmi_mapping_t *mapping);
/* The address has lost its frame; queued work may use it until fence is reached. GEMINI_CONFIG_STRICT: unmaps it. */
void gmi_map_leave(gmi_manager_t *m, void *address, gmi_mapping_t *mapping, gmi_fence_t fence);
/* Wait for queued work, then unmap all chunks of an arena, or everything that is mapped. */
void gmi_arena_unmap(gmi_manager_t *m, const gmi_arena_t *store);
void gmi_unmap_all(gmi_manager_t *m);
void gmi_reap(gmi_manager_t *m); /* measures finished copies and device updates, for the rates of links and updates */
/* Has gmi_reap() measure queued work, unless its table is full. Of a group that ends: forgets the collectives that have
 * not been measured. */
void gmi_time_work(gmi_manager_t *m, gmi_timed_t work);
void gmi_forget_collectives(gmi_manager_t *m, const struct gmi_group *g);
uint32_t gmi_frames_of(const gmi_manager_t *m, uint64_t frame_bytes); /* how many of this size the budget allows */
/* Changes how many frames there may be, and what the device gives for them: all that the budget allows, as frames of
 * another size may be cut later. After a failure there are fewer frames, but as many as before are allowed. */
gemini_status_t gmi_frames_resize(gmi_manager_t *m, uint32_t frame_count, uint64_t memory_bytes);
void gmi_frames_free(gmi_manager_t *m);
/* Records the error of a lack of need_bytes, with what holds the device's memory; returns GEMINI_ERR_OOM_DEVICE. */
gemini_status_t gmi_oom_device(gmi_manager_t *m, uint64_t need_bytes);
void gmi_rate_add(gmi_rate_t *rate, double ns);

#endif
