/* The timeline: ops, copies, updates and counters as Chrome trace events. Lock held.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_TIMELINE_H
#define GMI_TIMELINE_H

#include "core/manager.h"

void gmi_timeline_copy(gmi_manager_t *m, const gmi_chunk_t *c, const gmi_link_t *link, uint32_t reason,
                       gmi_fence_t begin, gmi_fence_t end);
void gmi_timeline_transfer(gmi_manager_t *m, const gmi_chunk_t *c, bool write, uint64_t begin_ns, uint64_t end_ns);
void gmi_timeline_slice(gmi_manager_t *m, const char *kind, const char *name, gmi_fence_t begin, gmi_fence_t end);
void gmi_timeline_slice_ns(gmi_manager_t *m, const char *kind, const char *name, uint64_t begin_ns, uint64_t end_ns);
void gmi_timeline_counters(gmi_manager_t *m);
void gmi_timeline_poll(gmi_manager_t *m);              /* reads the times of what is done */
gemini_status_t gmi_timeline_finish(gmi_manager_t *m); /* takes the lock itself; writes the file */
void gmi_timeline_close(gmi_manager_t *m);             /* frees without writing */

#endif
