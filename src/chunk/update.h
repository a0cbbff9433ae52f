/* Updates: spans of arenas, on the device and on the host.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_UPDATE_H
#define GMI_UPDATE_H

#include "chunk/chunk.h"
#include "core/manager.h"

/* Elements in one span of an update over these arenas: one chunk of the arena with the smallest elements. */
uint64_t gmi_piece_elements(gmi_manager_t *m, const uint32_t *arenas, uint32_t arena_count, uint64_t chunk_bytes);
/* Deferred pieces, of so many chunks each, that may be read, updated and written at once. */
uint32_t gmi_updates_ahead(const gmi_manager_t *m, uint32_t chunks);
gemini_status_t gmi_updates_finish(gmi_manager_t *m, const char *function); /* blocks; without lock */
/* Lock held. Queues what is left of updates of a chunk, and what is left before it, now; NULL: of all. Blocks until
 * there is room; fails when it cannot be queued, and it is left as it is. */
gemini_status_t gmi_updates_queue(gmi_manager_t *m, const gmi_chunk_t *c);
uint64_t gmi_updates_deferred(const gmi_manager_t *m); /* pieces that are left */
void gmi_updates_room(gmi_manager_t *m);               /* there may be room now for what is left */
gemini_status_t gmi_updates_open(gmi_manager_t *m);
void gmi_updates_close(gmi_manager_t *m);

#endif
