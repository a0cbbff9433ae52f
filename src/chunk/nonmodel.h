/* Non-model memory: device memory that callers allocate outside arenas. The caller holds the manager's lock.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_NONMODEL_H
#define GMI_NONMODEL_H

#include "core/manager.h"

void gmi_heap_close(gmi_manager_t *m);
/* Takes the frame of a page without live blocks, for another use; it stays counted in frames.used. False: none. */
bool gmi_heap_reclaim(gmi_manager_t *m, uint32_t *frame_out);
/* stream: an index, or GMI_CALLER. The memory may be used by work queued on stream from now on. */
gemini_status_t gmi_nonmodel_alloc(gmi_manager_t *m, uint64_t size, uint32_t stream, void **ptr_out);
/* Work queued on stream so far may still use the memory. False: ptr is no live block; the error is recorded. */
bool gmi_nonmodel_free(gmi_manager_t *m, void *ptr, uint32_t stream);
/* Notes the frames and pages in use for the peaks of the open op; called when heap or groups have taken some. */
void gmi_nonmodel_peak(gmi_manager_t *m);

#endif
