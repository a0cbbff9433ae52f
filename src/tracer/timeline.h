/* The timeline: records ops, copies, transfers, waits, updates and counters, and writes them as Chrome trace events.
 * Called by the tracer and, through gmi_observer_t, by src/chunk. All functions need the manager's lock, except
 * gmi_timeline_finish(), and return at once if no timeline is being recorded.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_TIMELINE_H
#define GMI_TIMELINE_H

#include "core/manager.h"

/* Append a slice: a copy or transfer of a chunk, or kind (its category) and name. Times are fences, or nanoseconds
 * of the device's clock. */
void gmi_timeline_copy(gmi_manager_t *m, const gmi_chunk_t *c, const gmi_link_t *link, uint32_t reason,
                       gmi_fence_t begin, gmi_fence_t end);
void gmi_timeline_transfer(gmi_manager_t *m, const gmi_chunk_t *c, bool write, uint64_t begin_ns, uint64_t end_ns);
void gmi_timeline_slice(gmi_manager_t *m, const char *kind, const char *name, gmi_fence_t begin, gmi_fence_t end);
void gmi_timeline_slice_ns(gmi_manager_t *m, const char *kind, const char *name, uint64_t begin_ns, uint64_t end_ns);
/* a call that has held the manager's lock for a while, by its function */
void gmi_timeline_held(gmi_manager_t *m, const char *function, uint64_t begin_ns, uint64_t end_ns);
/* appends the bytes by tier at this moment */
void gmi_timeline_counters(gmi_manager_t *m);
void gmi_timeline_poll(gmi_manager_t *m); /* reads the times of slices whose end has been reached */
/* takes the lock itself; waits for updates and copies, writes the file, frees the timeline */
gemini_status_t gmi_timeline_finish(gmi_manager_t *m);
void gmi_timeline_close(gmi_manager_t *m); /* frees the timeline without writing it */

#endif
