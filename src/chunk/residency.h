/* Chunks on the device: frames, fetches, evictions. All but what says otherwise: the lock is held.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_RESIDENCY_H
#define GMI_RESIDENCY_H

#include "chunk/chunk.h"
#include "chunk/host.h"
#include "core/manager.h"

enum { GMI_MOVE_NAME_BYTES = 128 };
/* What a move is called, in timelines and in Nsight Systems. */
void gmi_move_name(gmi_manager_t *m, const gmi_chunk_t *c, uint32_t reason, char name_out[GMI_MOVE_NAME_BYTES]);
enum { GMI_TAKE_EVICT = 1 /* evict when nothing is free */ };
/* mapping: of the address that the frame is for, which gets the one it had if that is free; or NULL. */
gemini_status_t gmi_frame_take(gmi_manager_t *m, const gmi_mapping_t *mapping, uint32_t reason, uint32_t flags,
                               uint32_t *frame_out);
void gmi_frame_give(gmi_manager_t *m, uint32_t frame, gmi_fence_t ready);
/* Gives the chunk a frame and starts bringing its bytes; fresh: they will all be overwritten, nothing comes, and the
 * caller goes on to gmi_chunk_wrote(), or to gmi_chunk_evict() when its batch fails. */
gemini_status_t gmi_chunk_fetch(gmi_manager_t *m, gmi_chunk_t *c, bool fresh, uint32_t reason, uint32_t flags);
/* Takes the frame away, writing back first when the device copy is the only one. BUSY when pinned or acquired. */
gemini_status_t gmi_chunk_evict(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
/* Makes the host copy valid (once its slot is quiet: gmi_chunk_settle_host()); keeps the device copy unless drop. BUSY
 * when the device copy is acquired for writing, or where it must go, at all. */
gemini_status_t gmi_chunk_to_host(gmi_manager_t *m, gmi_chunk_t *c, bool drop, uint32_t reason);
/* The device copy goes without a copy of its bytes; nobody may hold it. Its bytes are elsewhere, too. */
void gmi_chunk_drop_device(gmi_manager_t *m, gmi_chunk_t *c);
gemini_status_t gmi_chunk_to_file(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason);
void gmi_chunk_forget(gmi_manager_t *m, gmi_chunk_t *c); /* its bytes become zero; not pinned, nothing pending */
void gmi_chunk_wrote(gmi_manager_t *m, gmi_chunk_t *c);  /* the device copy becomes the only valid one */
void gmi_chunk_host_wrote(gmi_manager_t *m, gmi_chunk_t *c);
uint8_t *gmi_chunk_device(gmi_manager_t *m, const gmi_chunk_t *c);
/* Maps an address of a chunk, or of the heap's page, to a frame. */
gemini_status_t gmi_map(gmi_manager_t *m, void *address, uint32_t frame, gmi_mapping_t *mapping);
/* It has lost its frame; queued work may use it until the fence is reached. */
void gmi_map_leave(gmi_manager_t *m, void *address, gmi_mapping_t *mapping, gmi_fence_t fence);
/* Waits for queued work, and takes away access: from all chunks of an arena, or from everything that is mapped. */
void gmi_arena_unmap(gmi_manager_t *m, const gmi_arena_t *store);
void gmi_unmap_all(gmi_manager_t *m);
void gmi_reap(gmi_manager_t *m);                                      /* reads the times of finished copies */
uint32_t gmi_frames_of(const gmi_manager_t *m, uint64_t frame_bytes); /* that the budget allows, of so many bytes */
gemini_status_t gmi_frames_resize(gmi_manager_t *m, uint32_t frame_count);
void gmi_frames_free(gmi_manager_t *m);
gemini_status_t gmi_oom_device(gmi_manager_t *m, uint64_t need_bytes);
void gmi_rate_add(gmi_rate_t *rate, double ns);
gmi_arena_t *gmi_chunk_arena(gmi_manager_t *m, const gmi_chunk_t *c);

#endif
