/* What became of a call of the library. SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_CALL_H
#define BENCH_CALL_H

#include <stdbool.h>

#include "gemini.h"

/* Whether status is GEMINI_OK; if not, prints what failed and the calling thread's last error (cli_error()). */
bool call_ok(const char *program, gemini_status_t status, const char *what);

#endif
