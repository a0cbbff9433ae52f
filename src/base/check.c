/* Assertions that a build with GEMINI_CHECK makes. SPDX-License-Identifier: Apache-2.0 */
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

/* Builds without GEMINI_CHECK never call it. It is compiled in all builds, as ISO C forbids an empty source file. */
_Noreturn void gmi_assert_failed(const char *file, int line, const char *function, const char *condition);
void gmi_assert_failed(const char *file, int line, const char *function, const char *condition) {
  fprintf(stderr, "libgemini: %s:%d: %s: assertion failed: %s\n", file, line, function, condition);
  abort();
}
