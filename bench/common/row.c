/* The result line of a bench: `ROW ` and one JSON object.
 * SPDX-License-Identifier: Apache-2.0 */
#include "row.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __attribute__((format(printf, 2, 3))) void append(row_t *row, const char *format, ...) {
  if (row->text == NULL) return;
  char piece[64];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(piece, sizeof piece, format, arguments);
  va_end(arguments);
  size_t bytes = length < 0 ? 0 : (size_t)length < sizeof piece ? (size_t)length : sizeof piece - 1;
  if (row->used_bytes + bytes + 1 > row->capacity_bytes) {
    size_t capacity_bytes = 2 * row->capacity_bytes + bytes;
    char *text = realloc(row->text, capacity_bytes);
    if (text == NULL) {
      free(row->text);
      row->text = NULL;
      return;
    }
    row->text = text;
    row->capacity_bytes = capacity_bytes;
  }
  memcpy(row->text + row->used_bytes, piece, bytes + 1);
  row->used_bytes += bytes;
}

static void append_quoted(row_t *row, const char *text) {
  append(row, "\"");
  for (const char *c = text; *c != 0; c++) {
    if (*c == '"' || *c == '\\') {
      append(row, "\\%c", *c);
    } else if ((unsigned char)*c < 0x20) {
      append(row, "\\u%04x", (unsigned)(unsigned char)*c);
    } else {
      append(row, "%c", *c);
    }
  }
  append(row, "\"");
}

static void append_number(row_t *row, double value, int digits) {
  if (isfinite(value)) {
    append(row, "%.*g", digits, value);
  } else {
    append(row, "null");
  }
}

static void append_name(row_t *row, const char *name) {
  append(row, ", ");
  append_quoted(row, name);
  append(row, ": ");
}

void row_begin(row_t *row, const char *bench, const char *name_of_case) {
  row->capacity_bytes = 1024;
  row->used_bytes = 0;
  row->text = malloc(row->capacity_bytes);
  append(row, "ROW {\"bench\": ");
  append_quoted(row, bench);
  row_text(row, "case", name_of_case);
}

void row_value(row_t *row, double value, const char *unit) {
  row_f64(row, "value", value);
  row_text(row, "unit", unit);
}

void row_ratio(row_t *row, double ratio, const char *against) {
  row_f64(row, "ratio", ratio);
  row_text(row, "against", against);
}

void row_text(row_t *row, const char *name, const char *value) {
  append_name(row, name);
  if (value == NULL) {
    append(row, "null");
  } else {
    append_quoted(row, value);
  }
}

void row_u64(row_t *row, const char *name, uint64_t value) {
  append_name(row, name);
  append(row, "%" PRIu64, value);
}

void row_f64(row_t *row, const char *name, double value) {
  append_name(row, name);
  append_number(row, value, 17);
}

void row_f64_list(row_t *row, const char *name, const double *values, size_t count) {
  append_name(row, name);
  append(row, "[");
  for (size_t i = 0; i < count; i++) {
    if (i > 0) append(row, ", ");
    append_number(row, values[i], 9);
  }
  append(row, "]");
}

bool row_end(row_t *row) {
  append(row, "}");
  bool printed = row->text != NULL && puts(row->text) >= 0 && fflush(stdout) == 0;
  free(row->text);
  row->text = NULL;
  return printed;
}
