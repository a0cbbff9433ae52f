/* Gradients that reuse their parameters' bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_DATA_H
#define GMI_DATA_H

#include "core/manager.h"

/* Zeros the bytes that hold gradients of the reusing arena a, which then hold their parameters again. BUSY: some of the
 * chunks are acquired. Lock held. */
gemini_status_t gmi_gradients_drop(gmi_manager_t *m, gmi_arena_t *a);

/* For gmi_arena_each(): a tensor that gets bytes from a file, even in part, goes from FREE to HOLD, as after an
 * update. */
void gmi_tensor_not_free(gmi_manager_t *m, gmi_tensor_t *t, void *user);

#endif
