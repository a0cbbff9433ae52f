/* The log of those who set none: GEMINI_LOG in the environment. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_LOG_H
#define GMI_LOG_H

#include "gemini.h"

/* When the configuration has no log_fn and GEMINI_LOG is error, warning, info or debug, messages up to that level go to
 * stderr, a line each. Any other word is refused with GEMINI_ERR_INVALID; an empty one counts as none. */
gemini_status_t gmi_log_environment(gemini_config_t *config);

#endif
