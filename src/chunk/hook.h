/* The non-model allocator behind the functions that frameworks call.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_HOOK_H
#define GMI_HOOK_H

#include "core/manager.h"

/* Carries out frees that were put aside while another thread held the manager's lock. Lock held. */
void gmi_hook_drain(gmi_manager_t *m);
/* Stops serving and waits until no hook call uses the manager. Without the lock. */
void gmi_hook_close(gmi_manager_t *m);
/* Does the range overlap one in which the framework may still free pointers of a closed manager, or of the parent
 * process? No lock. */
bool gmi_hook_left(const void *base, uint64_t range);

#endif
