/* The cut of arenas into chunks: the chunk size and all tables that depend on it.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_CUT_H
#define GMI_CUT_H

#include "chunk/heap.h"
#include "core/manager.h"

/* Tables for a chunk size, prepared but not in use yet. */
typedef struct gmi_cut {
  gmi_sizes_t sizes;
  uint32_t shift; /* log2 of sizes.chunk_bytes */
  uint32_t frame_count;
  gmi_frame_t *frames;
  uint32_t *unmade;
  gmi_heap_t *heap;
  gmi_page_t *pages;
  gmi_slot_t *slots;
  uint64_t *free_map;
  uint64_t page_map_bytes, slot_map_bytes, free_map_bytes;
  gmi_chunk_t *chunks[GMI_ARENAS]; /* for arenas that own their chunks */
  uint64_t chunk_map_bytes[GMI_ARENAS];
} gmi_cut_t;

/* Each module has a pair. prepare allocates its tables in cut (OOM_SYSTEM; frames: OOM_DEVICE if not even one chunk
 * fits). install moves them into the manager, frees the manager's previous tables, and cannot fail. Lock held. */
gemini_status_t gmi_frames_prepare(gmi_manager_t *m, gmi_cut_t *cut);
void gmi_frames_install(gmi_manager_t *m, gmi_cut_t *cut);
gemini_status_t gmi_heap_prepare(gmi_manager_t *m, gmi_cut_t *cut);
void gmi_heap_install(gmi_manager_t *m, gmi_cut_t *cut);
gemini_status_t gmi_host_prepare(gmi_manager_t *m, gmi_cut_t *cut);
void gmi_host_install(gmi_manager_t *m, gmi_cut_t *cut); /* no chunk has a slot, no heap block is live */

extern gmi_sizes_padding_t gmi_sizes_padding; /* of managers opened from now on; for tests */
/* The sizes in each tier of chunks of a given size. gmi_cut_check() asserts what must hold between them. */
gmi_sizes_t gmi_sizes_of(const gmi_manager_t *m, uint64_t chunk_bytes);

/* Bytes of the smallest chunk that the manager can choose: the configured size, if there is one. */
uint64_t gmi_chunk_min(gmi_manager_t *m);
#define GMI_CHUNK_MAX (UINT64_C(64) << 20) /* bytes: the largest chunk size that a search considers */
/* Returns the best chunk size for the uses, or the smallest one if there are none. nonmodel: bytes of device memory for
 * other uses. bytes_per_s: rate of the link; 0 = the device's usual rate. */
uint64_t gmi_chunk_search(gmi_manager_t *m, const struct gmi_chunk_use *uses, uint64_t count, uint64_t nonmodel,
                          uint64_t bytes_per_s);
gemini_status_t gmi_cut(gmi_manager_t *m); /* chooses the chunk size, unless it has been chosen */
/* gmi_recut() changes the chunk size if that is possible: nothing is in use, every byte fits on the host, there is no
 * file tier, slots are as large as chunks, no arena is sharded, and the caller did not configure the size. Otherwise,
 * or if the size is the current one, it changes nothing and returns GEMINI_OK. All chunk records move: pointers to
 * them, such as plans hold, are invalid afterwards. On failure (OOM_SYSTEM, or an error of moving bytes to the host)
 * the size and all records are unchanged. */
bool gmi_recut_possible(gmi_manager_t *m, uint64_t chunk_bytes);
gemini_status_t gmi_recut(gmi_manager_t *m, uint64_t chunk_bytes);

#endif
