/* CUDA graphs that fetch chunks during replay. The caller holds the manager's lock, unless a comment says otherwise.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_GRAPH_H
#define GMI_GRAPH_H

#include "core/manager.h"

/* Any thread, no lock: a test on the path of every acquire and release. Relaxed, as the bit only selects the path under
 * the lock, which looks again; a thread that captures a stream has set its bit itself, or has synchronized with the one
 * that did. */
static inline bool gmi_graph_begun(gmi_manager_t *m, uint32_t stream) {
  return stream != GMI_CALLER && atomic_load_explicit(&m->graphs.streams, memory_order_relaxed) >> stream & 1;
}
/* Is the stream being captured for a graph that was begun on it? Then the next two take the place of acquire and
 * release on it: the copies they need become nodes of the graph, and nothing executes until replay. */
gemini_status_t gmi_graph_captures(gmi_manager_t *m, uint32_t stream, bool *captures_out);
gemini_status_t gmi_graph_acquire(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream);
gemini_status_t gmi_graph_release(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, uint32_t stream);
gemini_status_t gmi_graph_op_begin(gmi_manager_t *m, uint32_t stream, const char *name); /* in such a capture */
bool gmi_graph_op_end(gmi_manager_t *m);                             /* false: no operator is open in a capture */
bool gmi_graph_uses_stream(const gmi_manager_t *m, uint32_t stream); /* a graph is begun or entered on the stream */
bool gmi_graphs_busy(const gmi_manager_t *m);                        /* a graph is begun and not ended, or entered */
void gmi_graphs_free(gmi_manager_t *m);

#endif
