/* Assertions that a build with GEMINI_CHECK makes, and no other. SPDX-License-Identifier: Apache-2.0
 *
 * GMI_ASSERT states what is always true unless the library itself is wrong; it never depends on what a caller does. A
 * failed one names file, line and condition on stderr and aborts. Its condition has no side effects. */
#ifndef GMI_CHECK_H
#define GMI_CHECK_H

#ifdef GEMINI_CHECK
_Noreturn void gmi_assert_failed(const char *file, int line, const char *function, const char *condition);
#define GMI_ASSERT(condition) ((condition) ? (void)0 : gmi_assert_failed(__FILE__, __LINE__, __func__, #condition))
#else
#define GMI_ASSERT(condition) ((void)sizeof(!(condition)))
#endif

#endif
