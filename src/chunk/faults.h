/* Says which arena a faulting access was to (GEMINI_CONFIG_EXPLAIN_FAULTS). SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_FAULTS_H
#define GMI_FAULTS_H

#include "core/manager.h"

/* For managers with the flag: open and close install and remove the process's handler; the arenas between are those it
 * knows. Without the flag they do nothing. Any thread; arenas: the manager's lock is held. */
gemini_status_t gmi_faults_open(gmi_manager_t *m);
void gmi_faults_close(gmi_manager_t *m);
void gmi_faults_arena_add(gmi_manager_t *m, gmi_arena_t *a);
void gmi_faults_arena_remove(gmi_manager_t *m, const gmi_arena_t *a);

#endif
