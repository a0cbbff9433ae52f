/* Assertions that a build with GEMINI_CHECK makes. SPDX-License-Identifier: Apache-2.0 */
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

/* Without GEMINI_CHECK nothing calls it; it is there so that no build has an empty file. */
_Noreturn void gmi_assert_failed(const char *file, int line, const char *function, const char *condition);
void gmi_assert_failed(const char *file, int line, const char *function, const char *condition) {
  fprintf(stderr, "libgemini: %s:%d: %s: assertion failed: %s\n", file, line, function, condition);
  abort();
}
