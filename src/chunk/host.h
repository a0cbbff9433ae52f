/* Chunks on the host: slots, and blocks of host memory beside them. All but what says otherwise: the lock is held.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_HOST_H
#define GMI_HOST_H

#include "chunk/chunk.h"
#include "chunk/residency.h"
#include "core/manager.h"

gemini_status_t gmi_host_open(gmi_manager_t *m);
void gmi_host_heap_end(
    gmi_manager_t *m);                 /* ends all blocks; arenas still exist, as slots that come back look at them */
void gmi_host_close(gmi_manager_t *m); /* nothing uses the memory any more */
gemini_status_t gmi_host_resize(gmi_manager_t *m, uint64_t bytes); /* what lies behind a smaller budget moves */
/* Without a file tier: is there room on the host for need_bytes of chunks, beside blocks and beside those other chunks
 * that must stay there? inside: is the chunk one of those? OOM_HOST: what names them in the message ("the update"). */
gemini_status_t gmi_host_fits(gmi_manager_t *m, const char *what, uint64_t need_bytes,
                              bool (*inside)(const void *user, const gmi_chunk_t *c), const void *user);
gemini_status_t gmi_host_slot_take(gmi_manager_t *m, gmi_chunk_t *c);
void gmi_host_slot_bind(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot); /* a free one, whose memory exists */
void gmi_host_slot_drop(gmi_manager_t *m, gmi_chunk_t *c);
/* Makes so many slots free, writing to files if need be. Blocks for that. */
gemini_status_t gmi_host_room(gmi_manager_t *m, uint32_t count);
/* The same without blocking: what there is free may be less. Writes go on until ahead slots, not fewer, will be
 * free. */
gemini_status_t gmi_host_room_soon(gmi_manager_t *m, uint32_t count, uint32_t ahead);
void gmi_host_updated(gmi_manager_t *m, gmi_chunk_t *c);         /* its states will not be wanted for an iteration */
uint64_t gmi_host_allocs(gmi_manager_t *m);                      /* bytes in live blocks */
void gmi_host_released(gmi_manager_t *m, gmi_chunk_t *c);        /* nobody has its address any more */
void gmi_host_forget(gmi_manager_t *m);                          /* chunks are about to go */
uint32_t gmi_host_free(const gmi_manager_t *m);                  /* slots that chunks may get with none leaving */
void gmi_host_homes(gmi_manager_t *m, const gmi_sizes_t *sizes); /* says where arenas lie when all fits */
gemini_status_t gmi_host_commit(gmi_manager_t *m, uint64_t begin, uint64_t size); /* makes bytes of it exist */
/* Gives chunks slots side by side; their bytes, and others' in the way, move. Blocks until these are quiet.
 * OOM_HOST: no room, or chunks that are acquired lie in the way. UNSUPPORTED: slots are larger than chunks. */
gemini_status_t gmi_host_run(gmi_manager_t *m, gmi_arena_t *store, uint32_t first, uint32_t count);
uint8_t *gmi_slot_address(const gmi_manager_t *m, uint32_t slot);
uint8_t *gmi_chunk_host(gmi_manager_t *m, const gmi_chunk_t *c); /* NULL: it has no slot */
/* Where a range lies on the host, whose chunks are side by side there. */
static inline uint8_t *gmi_range_host(gmi_manager_t *m, const gmi_arena_t *store, uint64_t offset) {
  uint8_t *chunk = gmi_chunk_host(m, &store->chunks[offset >> m->cut.chunk_shift]);
  return chunk ? chunk + (offset & ((UINT64_C(1) << m->cut.chunk_shift) - 1)) : NULL;
}
void gmi_chunk_refilled(gmi_manager_t *m, gmi_chunk_t *c); /* its slot gets other bytes than the last read's */
bool gmi_chunk_work_pending(const gmi_manager_t *m, const gmi_chunk_t *c);
/* Blocks until its slot is quiet. Fails when what filled it failed: device work, or a read from its file. */
gemini_status_t gmi_chunk_settle_host(gmi_manager_t *m, gmi_chunk_t *c);

/* chunk/host_memory.c. Pages are had in grains, of which the last may pass the budget. */
uint64_t gmi_host_grains(const gmi_manager_t *m, uint64_t bytes);
/* Makes the first want bytes of a part exist, page-locked, and no others. */
gemini_status_t gmi_host_part_set(gmi_manager_t *m, uint64_t part, uint64_t want);

#endif
