/* Logging by the environment variable GEMINI_LOG, for programs that set no log function.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_LOG_H
#define GMI_LOG_H

#include "gemini.h"

/* If config has no log_fn and GEMINI_LOG is error, warning, info or debug, makes messages up to that level go to
 * stderr, one line each. INVALID: the variable has another value. An empty value counts as unset. */
gemini_status_t gmi_log_environment(gemini_config_t *config);

#endif
