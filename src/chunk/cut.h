/* The cut of arenas into chunks. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_CUT_H
#define GMI_CUT_H

#include "chunk/heap.h"
#include "core/manager.h"

/* The tables that depend on the size of chunks, not in use yet. */
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
  gmi_chunk_t *chunks[GMI_ARENAS]; /* of arenas that store their bytes */
  uint64_t chunk_map_bytes[GMI_ARENAS];
} gmi_cut_t;

/* Each makes its tables of cut (OOM_SYSTEM; frames: OOM_DEVICE, where not even one chunk fits), then takes them into
 * use, which cannot fail. The manager's own such tables are empty by then, or freed by the install. Lock held. */
gemini_status_t gmi_frames_prepare(gmi_manager_t *m, gmi_cut_t *cut);
void gmi_frames_install(gmi_manager_t *m, gmi_cut_t *cut);
gemini_status_t gmi_heap_prepare(gmi_manager_t *m, gmi_cut_t *cut);
void gmi_heap_install(gmi_manager_t *m, gmi_cut_t *cut);
gemini_status_t gmi_host_prepare(gmi_manager_t *m, gmi_cut_t *cut);
void gmi_host_install(gmi_manager_t *m, gmi_cut_t *cut); /* no chunk has a slot, no block is live */

extern gmi_sizes_padding_t gmi_sizes_padding; /* of managers opened from now on; for tests */
/* The sizes of places that chunks of a size have. What must hold between them is asserted here (gmi_cut_check). */
gmi_sizes_t gmi_sizes_of(const gmi_manager_t *m, uint64_t chunk_bytes);

#define GMI_CHUNK_MAX (UINT64_C(64) << 20) /* bytes, of those that are searched */
/* The chunk size that fits the uses best, the smallest when there are none; bytes_per_s: of the links, 0 = as to be
 * expected of the device. */
uint64_t gmi_chunk_search(gmi_manager_t *m, const struct gmi_chunk_use *uses, uint64_t count, uint64_t nonmodel,
                          uint64_t bytes_per_s);
gemini_status_t gmi_cut(gmi_manager_t *m); /* chooses the chunk size if that is still to be done */
/* Cuts anew where that is possible: nothing in use, every byte fits on the host, no file tier, slots as large as
 * chunks, and the caller did not choose the size. Otherwise, and when it is that size already, nothing changes. After
 * it no record of a chunk is where it was: nobody may keep one, and plans do. OOM_SYSTEM, or what moving bytes to the
 * host fails with: nothing changed. */
bool gmi_recut_possible(gmi_manager_t *m, uint64_t chunk_bytes);
gemini_status_t gmi_recut(gmi_manager_t *m, uint64_t chunk_bytes);

#endif
