/* What became of a call of the library. SPDX-License-Identifier: Apache-2.0 */
#include "call.h"
#include "cli.h"

bool call_ok(const char *program, gemini_status_t status, const char *what) {
  if (status == GEMINI_OK) return true;
  gemini_error_info_t error = GEMINI_ERROR_INFO_INIT;
  (void)gemini_last_error(&error);
  cli_error(program, "%s: %s", what, error.message);
  return false;
}
