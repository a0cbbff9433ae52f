/* Assertions, in builds with GEMINI_CHECK only. SPDX-License-Identifier: Apache-2.0
 *
 * GMI_ASSERT states a condition that is false only if the library itself has a bug; it never depends on what a caller
 * does. A failed assertion prints file, line, function and condition to stderr and aborts. The condition must have no
 * side effects: other builds do not evaluate it. */
#ifndef GMI_CHECK_H
#define GMI_CHECK_H

#ifdef GEMINI_CHECK
_Noreturn void gmi_assert_failed(const char *file, int line, const char *function, const char *condition);
#define GMI_ASSERT(condition) ((condition) ? (void)0 : gmi_assert_failed(__FILE__, __LINE__, __func__, #condition))
#else
#define GMI_ASSERT(condition) ((void)sizeof(!(condition)))
#endif

#endif
