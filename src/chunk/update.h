/* Updates: running a caller's function over spans of parallel arenas, on the device and on the host.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_UPDATE_H
#define GMI_UPDATE_H

#include "chunk/chunk.h"
#include "core/manager.h"

/* Elements in one piece of an update over these arenas: one chunk of the arena with the smallest elements. */
uint64_t gmi_piece_elements(gmi_manager_t *m, const uint32_t *arenas, uint32_t arena_count, uint64_t chunk_bytes);
/* How many deferred pieces, of so many chunks each, may be in flight (read, updated, written) at once. */
uint32_t gmi_updates_ahead(const gmi_manager_t *m, uint32_t chunks);
gemini_status_t gmi_updates_finish(gmi_manager_t *m, const char *function); /* waits for all updates; without lock */
/* Lock held. Queues all unqueued pieces that contain the chunk, and those before them in the list; NULL: all pieces.
 * Blocks until there is room. A failure leaves the pieces that could not be queued in the list. */
gemini_status_t gmi_updates_queue(gmi_manager_t *m, const gmi_chunk_t *c);
/* The same for the chunks first to last. *queued_out becomes true if there were any, in which case the lock may have
 * been given away for callbacks. A call that holds several chunks queues the updates of all before it holds the first:
 * other threads must not see a part of its holds. */
gemini_status_t gmi_updates_queue_range(gmi_manager_t *m, const gmi_arena_t *store, uint32_t first, uint32_t last,
                                        bool *queued_out);
/* Queues deferred pieces that run on the device while the links are not full. Returns whether some are left. May give
 * the lock away for callbacks. */
bool gmi_updates_more(gmi_manager_t *m);
static inline bool gmi_links_are_full(gmi_manager_t *m) {
  return gmi_link_is_full(m, gmi_link_in(m)) || gmi_link_is_full(m, gmi_link_out(m));
}
uint64_t gmi_updates_deferred(const gmi_manager_t *m); /* pieces of accepted updates not queued yet */
void gmi_updates_room(gmi_manager_t *m); /* slots may have become free: wakes the thread that queues pieces */
gemini_status_t gmi_updates_open(gmi_manager_t *m);
void gmi_updates_close(gmi_manager_t *m);
/* Frees the copies of callers' data that no update uses any more, or all of them. */
void gmi_update_users_free(gmi_manager_t *m, bool all);

#endif
