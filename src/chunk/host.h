/* The host tier: slots of chunks, and heap blocks beside them. The caller holds the manager's lock, unless a comment
 * says otherwise.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_HOST_H
#define GMI_HOST_H

#include <sched.h>

#include "chunk/chunk.h"
#include "chunk/residency.h"
#include "core/manager.h"

gemini_status_t gmi_host_open(gmi_manager_t *m);
/* The cores of the process that are next to the memory's node, which is the GPU's. False: the machine has one node, or
 * it is not known which is the nearest. */
bool gmi_host_cores(const gmi_manager_t *m, cpu_set_t *cores_out);
/* Ends all heap blocks. Called while arenas exist, because returning the heap's slots reads the chunks' records. */
void gmi_host_heap_end(gmi_manager_t *m);
void gmi_host_close(gmi_manager_t *m); /* call when no queued work uses the memory any more */
/* Sets the budget. Chunks above a smaller one move, or go to files. OOM_HOST: too much must stay; nothing changed but
 * the places of chunks. */
gemini_status_t gmi_host_resize(gmi_manager_t *m, uint64_t bytes);
/* Without a file tier: do need_bytes of certain chunks fit on the host, beside heap blocks and the other chunks that
 * must stay there? inside() says whether a chunk is one of the certain ones. OOM_HOST otherwise; what is their name in
 * the message ("the update"). With a file tier: always OK. */
gemini_status_t gmi_host_fits(gmi_manager_t *m, const char *what, uint64_t need_bytes,
                              bool (*inside)(const void *user, const gmi_chunk_t *c), const void *user);
/* Gives the chunk a slot if it has none; blocks for room. */
gemini_status_t gmi_host_slot_take(gmi_manager_t *m, gmi_chunk_t *c);
/* The same without waiting, or false: a free slot, or one that gmi_host_clean_leave() frees for a use at this position
 * of the plan. */
bool gmi_host_slot_take_now(gmi_manager_t *m, gmi_chunk_t *c, uint64_t use);
/* The same as gmi_host_slot_take(); blank: the slot was taken now, and its memory reads as zeros. */
gemini_status_t gmi_host_slot_take_blank(gmi_manager_t *m, gmi_chunk_t *c, bool *blank_out);
void gmi_host_slot_bind(gmi_manager_t *m, gmi_chunk_t *c, uint32_t slot); /* slot: free, and its memory committed */
/* Frees the chunk's slot, unless a graph knows its address. */
void gmi_host_slot_drop(gmi_manager_t *m, gmi_chunk_t *c);
/* Makes count slots free, writing chunks to files if needed. Blocks until they are. */
gemini_status_t gmi_host_room(gmi_manager_t *m, uint32_t count);
/* Frees one slot (*freed_out), or starts a transfer after which one can be freed (*started_out); neither: nothing can
 * be reclaimed now. */
gemini_status_t gmi_host_reclaim(gmi_manager_t *m, bool *freed_out, bool *started_out);
/* Frees a slot whose bytes are on the device, too, or in a file and wanted on the host at this position of the plan or
 * later; of these, the latest. False: there is none that nothing uses. Bytes of which no use is known stay: they may
 * just have been read. Does not block. */
bool gmi_host_clean_leave(gmi_manager_t *m, uint64_t use);
/* Frees the chunk's slot if its bytes are in a file, too, and nothing uses it. False: it may be freed soon, a copy or a
 * transfer still uses it. Does not block. */
bool gmi_host_file_drop(gmi_manager_t *m, gmi_chunk_t *c);
uint64_t gmi_home_slots(const gmi_manager_t *m); /* chunks that fit on the host and in files together */
/* With placement auto: do host and files lack room for the bytes of all arenas, and with the device they have it? Then
 * some states have their only copy on the device. False if bytes are borrowed, which need no room. The chunk size has
 * been chosen. */
bool gmi_home_is_short(const gmi_manager_t *m);
/* Without a file tier, if gmi_home_is_short(): do certain chunks fit on the host and the device together, beside all
 * else that must stay there, and so many spare places? inside, what: as of gmi_host_fits(). OOM_HOST otherwise. */
gemini_status_t gmi_home_fits(gmi_manager_t *m, const char *what, uint64_t spare,
                              bool (*inside)(const void *user, const gmi_chunk_t *c), const void *user);
/* Frees slots and starts writes until ahead slots (at least count) are free or will be once the writes end. Does not
 * block, and may leave fewer free than count. */
gemini_status_t gmi_host_room_soon(gmi_manager_t *m, uint32_t count, uint32_t ahead);
/* An update of the state chunk is queued: its next use is an iteration away, so reclaim prefers it. */
void gmi_host_updated(gmi_manager_t *m, gmi_chunk_t *c);
uint64_t gmi_host_allocs(gmi_manager_t *m); /* bytes in live heap blocks */
/* A host acquire or a graph has ended: a chunk above a smaller budget can move now. */
void gmi_host_released(gmi_manager_t *m, gmi_chunk_t *c);
bool gmi_slot_is_busy(const gmi_manager_t *m, uint32_t slot); /* is there work on it that is not done? */
/* Spare slots, for values that are speculated (chunk/speculate.h). How many may be taken now: those that are free and
 * that nothing has used in this iteration and the one before. */
uint32_t gmi_host_spare(const gmi_manager_t *m);
/* May make more spare: takes the slots of states whose bytes are on the device. Those of states that stay there, by the
 * plan, are spare at once, others in later iterations. Works once an iteration. */
void gmi_host_spare_reclaim(gmi_manager_t *m);
/* Slots of so many bytes have been dropped that no chunk needs any more: that they were used does not count. */
void gmi_host_forget_peak(gmi_manager_t *m, uint64_t bytes);
bool gmi_host_spare_is_committed(const gmi_manager_t *m, uint32_t count); /* is the memory of the next ones? */
/* So many will be taken: as far as there are so many spare ones, the memory of the next ones is committed ahead. */
void gmi_host_spare_expect(gmi_manager_t *m, uint64_t count);
/* quiet: one that no job uses any more. False: there is none, or the system has no memory for it. */
bool gmi_host_spare_take(gmi_manager_t *m, bool quiet, uint32_t *slot_out);
void gmi_host_spare_give(gmi_manager_t *m, uint32_t slot);
/* The slot becomes the chunk's, whose own is free then. */
void gmi_host_spare_bind(gmi_manager_t *m, uint32_t slot, gmi_chunk_t *c);
void gmi_host_iteration(gmi_manager_t *m);      /* an iteration begins */
void gmi_host_forget(gmi_manager_t *m);         /* chunks' records are about to go: empties the list of updated ones */
uint32_t gmi_host_free(const gmi_manager_t *m); /* slots that chunks can get without a reclaim */
/* Assigns each arena its home slots, for chunks of these sizes. */
void gmi_host_homes(gmi_manager_t *m, const gmi_sizes_t *sizes);
/* Where the home slots of an arena's chunks are, as far as they have any, in bytes of the range; beyond the budget they
 * wrap around. */
void gmi_host_home_range(const gmi_manager_t *m, const gmi_arena_t *store, uint64_t *begin_out, uint64_t *end_out);
/* The chunk, which has no contents, will get some: the memory of its home is committed ahead. Chooses the home. */
void gmi_host_expect(gmi_manager_t *m, const gmi_chunk_t *c);
/* Commits and page-locks bytes of the range: the parts that contain them. */
gemini_status_t gmi_host_commit(gmi_manager_t *m, uint64_t begin, uint64_t size);
/* Puts chunks into adjacent slots, moving their bytes and those of chunks in the way. Blocks until the slots involved
 * are quiet. OOM_HOST: no room, or acquired chunks are in the way. UNSUPPORTED: slots are larger
 * than chunks. */
gemini_status_t gmi_host_run(gmi_manager_t *m, gmi_arena_t *store, uint32_t first, uint32_t count);
uint8_t *gmi_slot_address(const gmi_manager_t *m, uint32_t slot);
/* Address of the chunk's slot, with all bytes of a valid copy there; NULL: it has none. */
uint8_t *gmi_chunk_host(gmi_manager_t *m, gmi_chunk_t *c);
/* The host address of a byte of an arena. Valid for a range of several chunks only when they form a run. NULL: the
 * byte's chunk has no slot. */
static inline uint8_t *gmi_range_host(gmi_manager_t *m, const gmi_arena_t *store, uint64_t offset) {
  uint8_t *chunk = gmi_chunk_host(m, &store->chunks[offset >> m->cut.chunk_shift]);
  return chunk ? chunk + (offset & ((UINT64_C(1) << m->cut.chunk_shift) - 1)) : NULL;
}
/* The slot is about to get new bytes, so the outcome of an earlier read does not matter any more; waits for that
 * read. */
void gmi_chunk_refilled(gmi_manager_t *m, gmi_chunk_t *c);
bool gmi_chunk_work_pending(const gmi_manager_t *m, const gmi_chunk_t *c); /* updates or transfers use its slot */
/* Blocks until no queued work uses the chunk's slot. Fails when what filled it failed: device work, or a read from a
 * file, which is tried once more first. */
gemini_status_t gmi_chunk_settle_host(gmi_manager_t *m, gmi_chunk_t *c);
/* Blocks until no copy and no transfer uses the chunk's slot, which it is about to lose with bytes that nobody needs
 * any more. Jobs may still: whoever gets the slot next waits for them, and gmi_host_resize() does. Slots above the
 * budget nobody gets, so these are waited for here. */
void gmi_chunk_copies_end(gmi_manager_t *m, gmi_chunk_t *c);

/* chunk/host_memory.c */
/* Bytes rounded up to the grain (the page size in use), but not above the reservation. */
uint64_t gmi_host_grains(const gmi_manager_t *m, uint64_t bytes);
/* Commits and page-locks exactly the first want bytes of a part. ready: they are committed. */
gemini_status_t gmi_host_part_set(gmi_manager_t *m, uint64_t part, uint64_t want, bool ready);

#endif
