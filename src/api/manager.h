/* Managers without handles: gemini_manager_open() gives one a handle, gemini_plan_forecast() uses one and frees it.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_API_MANAGER_H
#define GMI_API_MANAGER_H

#include <stdbool.h>

#include "core/manager.h"

/* Makes a manager that no handle names.
 * plans_only: it reads one trace and plans (m->trace.plans_only). It has no GPU and no files, whatever the
 * configuration names; the budgets are not compared with what the machine has, and no memory of theirs is taken. */
gemini_status_t gmi_manager_make(const gemini_config_t *config, bool plans_only, gmi_manager_t **manager_out);
void gmi_manager_free(gmi_manager_t *m); /* also of one that was made in part */

#endif
