/* Gradients that share their parameters' bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_DATA_H
#define GMI_DATA_H

#include "core/manager.h"

/* Lock held: gradients in reusing arena a become zeros that are their parameters'. BUSY: some are acquired. */
gemini_status_t gmi_gradients_drop(gmi_manager_t *m, gmi_arena_t *a);

#endif
