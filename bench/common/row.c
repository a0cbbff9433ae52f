/* The result line of a bench: `ROW ` and one JSON object, written by json-c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "row.h"

#include <json.h>
#include <math.h>
#include <stdio.h>

/* Adds value, which is the row's from here on; NULL is JSON's null. */
static void add(row_t *row, const char *name, json_object *value) {
  if (row->object != NULL && json_object_object_add(row->object, name, value) == 0) return;
  json_object_put(value);
  row->failed = true;
}

/* Counts a value that could not be made as a failure: json-c would print it as null. */
static json_object *made(row_t *row, json_object *value) {
  if (value == NULL) row->failed = true;
  return value;
}

static json_object *number(row_t *row, double value, const char *format, int digits) {
  char text[400]; /* DBL_MAX has 309 digits before the point */
  if (!isfinite(value)) return NULL;
  snprintf(text, sizeof text, format, digits, value);
  return made(row, json_object_new_double_s(value, text));
}

void row_begin(row_t *row, const char *bench, const char *name_of_case) {
  *row = (row_t){ .object = json_object_new_object() };
  row_text(row, "bench", bench);
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
  add(row, name, value != NULL ? made(row, json_object_new_string(value)) : NULL);
}

void row_u64(row_t *row, const char *name, uint64_t value) { add(row, name, made(row, json_object_new_uint64(value))); }

void row_f64(row_t *row, const char *name, double value) { add(row, name, number(row, value, "%.*g", 17)); }

void row_rounded(row_t *row, const char *name, double value, int decimals) {
  add(row, name, number(row, value, "%.*f", decimals));
}

void row_f64_list(row_t *row, const char *name, const double *values, size_t count) {
  json_object *list = made(row, json_object_new_array());
  for (size_t i = 0; list != NULL && i < count; i++) {
    json_object *value = number(row, values[i], "%.*g", 9);
    if (json_object_array_add(list, value) == 0) continue;
    json_object_put(value);
    row->failed = true;
  }
  add(row, name, list);
}

/* With the blanks of Python's json.dumps(), as in the rows of scripts; those of json-c are inside the brackets too. */
static bool print(json_object *value) {
  bool printed = true;
  const char *separator = "";
  if (json_object_is_type(value, json_type_object)) {
    putchar('{');
    json_object_object_foreach(value, name, member) {
      printf("%s\"%s\": ", separator, name); /* names are the programs' own: nothing in them needs an escape */
      printed = print(member) && printed;
      separator = ", ";
    }
    putchar('}');
  } else if (json_object_is_type(value, json_type_array)) {
    putchar('[');
    for (size_t i = 0; i < json_object_array_length(value); i++) {
      fputs(separator, stdout);
      printed = print(json_object_array_get_idx(value, i)) && printed;
      separator = ", ";
    }
    putchar(']');
  } else {
    const char *text = json_object_to_json_string_ext(value, JSON_C_TO_STRING_NOSLASHESCAPE);
    printed = text != NULL && fputs(text, stdout) >= 0;
  }
  return printed;
}

bool row_end(row_t *row) {
  bool printed = !row->failed;
  if (printed) {
    fputs("ROW ", stdout);
    printed = print(row->object);
    putchar('\n');
    printed = fflush(stdout) == 0 && !ferror(stdout) && printed;
  }
  json_object_put(row->object);
  row->object = NULL;
  return printed;
}
