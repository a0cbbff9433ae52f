/* Device memory that is no tensor of an arena: what callers allocate. All but what says otherwise: the lock is held.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_NONMODEL_H
#define GMI_NONMODEL_H

#include "core/manager.h"

void gmi_heap_close(gmi_manager_t *m);
bool gmi_heap_reclaim(gmi_manager_t *m, uint32_t *frame_out); /* an idle page's frame */
/* stream: an index, or GMI_CALLER */
gemini_status_t gmi_nonmodel_alloc(gmi_manager_t *m, uint64_t size, uint32_t stream, void **ptr_out);
bool gmi_nonmodel_free(gmi_manager_t *m, void *ptr, uint32_t stream); /* false, with the error recorded */

#endif
