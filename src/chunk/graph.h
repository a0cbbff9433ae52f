/* CUDA graphs whose operators fetch chunks. All but what says otherwise: the lock is held.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_GRAPH_H
#define GMI_GRAPH_H

#include "core/manager.h"

static inline bool gmi_graph_begun(gmi_manager_t *m, uint32_t stream) { /* any thread, no lock */
  return stream != GMI_CALLER && atomic_load_explicit(&m->graphs.streams, memory_order_relaxed) >> stream & 1;
}
/* Is the stream being captured for a graph that was begun on it? Then acquires and releases on it are these: */
gemini_status_t gmi_graph_captures(gmi_manager_t *m, uint32_t stream, bool *captures_out);
gemini_status_t gmi_graph_acquire(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream);
gemini_status_t gmi_graph_release(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, uint32_t stream);
gemini_status_t gmi_graph_op_begin(gmi_manager_t *m, const char *name);
bool gmi_graph_op_end(gmi_manager_t *m);                             /* false: none is open in a capture */
bool gmi_graph_uses_stream(const gmi_manager_t *m, uint32_t stream); /* begun, or entered, on it */
bool gmi_graphs_busy(const gmi_manager_t *m);                        /* one is begun and not ended, or entered */
void gmi_graphs_free(gmi_manager_t *m);

#endif
