/* The result line of a bench: `ROW ` and one JSON object, on one line of standard output. json-c writes it.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   row_t row;
 *   row_begin(&row, "bench_hot", "resident");
 *   row_value(&row, 1.2e-7, "s");
 *   row_u64(&row, "tensors", 1024);
 *   if (!row_end(&row)) return CLI_EXIT_FAILURE;
 *
 * Sizes are bytes, times seconds. Numbers that JSON cannot hold (infinities, NaN) become null. */
#ifndef BENCH_ROW_H
#define BENCH_ROW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct row {
  struct json_object *object; /* owned, until row_end() */
  bool failed;                /* memory has run out */
} row_t;

void row_begin(row_t *row, const char *bench, const char *name_of_case);
void row_value(row_t *row, double value, const char *unit);
/* A comparison: ratio above 1 means that we are better. */
void row_ratio(row_t *row, double ratio, const char *against);
void row_text(row_t *row, const char *name, const char *value); /* NULL: null */
void row_u64(row_t *row, const char *name, uint64_t value);
void row_f64(row_t *row, const char *name, double value); /* 17 digits: reads back as the same double */
void row_rounded(row_t *row, const char *name, double value, int decimals);
void row_f64_list(row_t *row, const char *name, const double *values, size_t count); /* 9 digits: enough for a float */
/* Prints and frees. False when memory ran out or standard output failed; then nothing useful was printed. */
bool row_end(row_t *row);

#endif
