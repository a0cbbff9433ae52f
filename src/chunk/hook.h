/* The allocator in the shapes that frameworks call.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_HOOK_H
#define GMI_HOOK_H

#include "core/manager.h"

void gmi_hook_drain(gmi_manager_t *m); /* frees what waits for the lock, which is held */
void gmi_hook_close(gmi_manager_t *m); /* no hook call uses the manager any more, nor will; without lock */
bool gmi_hook_left(const void *base,
                   uint64_t range); /* may frees of a closed manager's, or the parent's, pointers name it? */

#endif
