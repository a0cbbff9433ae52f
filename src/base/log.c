/* A log function that prints to stderr, for GEMINI_LOG. SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

static const char *const level_names[] = { [GEMINI_LOG_ERROR] = "error",
                                           [GEMINI_LOG_WARNING] = "warning",
                                           [GEMINI_LOG_INFO] = "info",
                                           [GEMINI_LOG_DEBUG] = "debug" };

static void to_stderr(void *user, int32_t level, const char *message) {
  (void)user;
  fprintf(stderr, "libgemini: %s: %s\n", level_names[level], message);
}

gemini_status_t gmi_log_environment(gemini_config_t *config) {
  const char *wanted = getenv("GEMINI_LOG");
  if (config->log_fn || !wanted || !*wanted) return GEMINI_OK;
  for (uint32_t level = GEMINI_LOG_ERROR; level <= GEMINI_LOG_DEBUG; level++) {
    if (strcmp(wanted, level_names[level]) != 0) continue;
    config->log_fn = to_stderr;
    config->log_level = level;
    return GEMINI_OK;
  }
  return gmi_fail(GEMINI_ERR_INVALID, 0,
                  "GEMINI_LOG is \"%.40s\" in the environment: want error, warning, info or debug", wanted);
}
