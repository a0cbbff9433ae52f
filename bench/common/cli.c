/* Options, sizes and error lines that all benches share.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "cli.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void cli_error(const char *program, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fflush(stdout); /* so that the error stands behind what was printed before it */
  fprintf(stderr, "%s: ", program);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

uint64_t cli_now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
void cli_sort(double *values, size_t count) { qsort(values, count, sizeof *values, compare); }

static bool parse_f64(const char *text, double *value_out) {
  char *end;
  if (!isdigit((unsigned char)text[0]) && text[0] != '.') return false; /* no sign, blank, inf or nan */
  errno = 0;
  double value = strtod(text, &end);
  if (end == text || *end != 0 || errno == ERANGE || !isfinite(value)) return false;
  *value_out = value;
  return true;
}

static bool parse_u64(const char *text, uint64_t *value_out) {
  char *end;
  if (!isdigit((unsigned char)text[0])) return false;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  if (*end != 0 || errno == ERANGE) return false;
  *value_out = value;
  return true;
}

bool cli_parse_size(const char *text, uint64_t *bytes_out) {
  static const struct {
    const char *suffix;
    double factor;
  } suffixes[] = {
    { "B", 1.0 },    { "K", 0x1p10 },   { "KiB", 0x1p10 }, { "kB", 1e3 },   { "KB", 1e3 },
    { "M", 0x1p20 }, { "MiB", 0x1p20 }, { "MB", 1e6 },     { "G", 0x1p30 }, { "GiB", 0x1p30 },
    { "GB", 1e9 },   { "T", 0x1p40 },   { "TiB", 0x1p40 }, { "TB", 1e12 },
  };
  uint64_t bytes;
  if (parse_u64(text, &bytes)) { /* exact above 2^53 too */
    if (bytes > INT64_MAX) return false;
    *bytes_out = bytes;
    return true;
  }
  size_t digits = strspn(text, "0123456789.");
  char number[64];
  if (digits == 0 || digits >= sizeof number) return false;
  memcpy(number, text, digits);
  number[digits] = 0;
  double value;
  if (!parse_f64(number, &value)) return false;
  for (size_t i = 0; i < sizeof suffixes / sizeof suffixes[0]; i++) {
    if (strcmp(text + digits, suffixes[i].suffix) != 0) continue;
    if (value * suffixes[i].factor >= 0x1p63) return false;
    *bytes_out = (uint64_t)(value * suffixes[i].factor);
    return true;
  }
  return false;
}

bool cli_parse_share(const char *text, uint64_t whole_bytes, uint64_t *bytes_out) {
  size_t length = strlen(text);
  if (length == 0 || text[length - 1] != '%') return cli_parse_size(text, bytes_out);
  char number[64];
  double percent;
  if (length > sizeof number) return false;
  memcpy(number, text, length - 1);
  number[length - 1] = 0;
  if (!parse_f64(number, &percent) || percent / 100 * (double)whole_bytes >= 0x1p63) return false;
  *bytes_out = (uint64_t)(percent / 100 * (double)whole_bytes);
  return true;
}

const char *cli_format_size(uint64_t bytes, char *buffer, size_t buffer_bytes) {
  static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB" };
  double value = (double)bytes;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < sizeof units / sizeof units[0]) value /= 1024, unit++;
  snprintf(buffer, buffer_bytes, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return buffer;
}

static void print_default(const cli_option_t *option) {
  char size[32];
  switch (option->kind) {
  case CLI_U64: printf(" [%" PRIu64 "]", *(const uint64_t *)option->value); break;
  case CLI_SIZE:
    if (*(const uint64_t *)option->value == 0) break;
    printf(" [%s]", cli_format_size(*(const uint64_t *)option->value, size, sizeof size));
    break;
  case CLI_F64: printf(" [%g]", *(const double *)option->value); break;
  case CLI_STRING:
    if (*(const char *const *)option->value != NULL) printf(" [%s]", *(const char *const *)option->value);
    break;
  case CLI_CHOICE: printf(" [%s]", option->choices[*(const uint32_t *)option->value]); break;
  default: break;
  }
}

static void print_help(const char *program, const char *purpose, const cli_option_t *options) {
  static const char *const kinds[] = { "", " N", " SIZE", " X", " TEXT", " ONE" };
  printf("Usage: %s [OPTIONS]\n%s\n\n", program, purpose);
  for (const cli_option_t *option = options; option->name != NULL; option++) {
    char left[64];
    snprintf(left, sizeof left, "--%s%s", option->name, kinds[option->kind]);
    printf("  %-24s %s", left, option->help);
    if (option->kind == CLI_CHOICE) {
      for (size_t i = 0; option->choices[i] != NULL; i++) printf("%s%s", i == 0 ? ": " : ", ", option->choices[i]);
    }
    print_default(option);
    if (option->kind == CLI_U64 && option->max != 0) printf(" (%" PRIu64 " to %" PRIu64 ")", option->min, option->max);
    putchar('\n');
  }
  printf("  %-24s %s\n", "--help", "print this and exit");
}

/* Takes text as the option's value. Returns NULL, or what was expected instead; limit is a buffer for that. */
static const char *parse_value(const cli_option_t *option, const char *text, char *limit, size_t limit_bytes) {
  uint64_t value;
  switch (option->kind) {
  case CLI_FLAG: *(bool *)option->value = true; return NULL;
  case CLI_U64:
  case CLI_SIZE:
    if (option->kind == CLI_U64 && !parse_u64(text, &value)) return "a whole number";
    if (option->kind == CLI_SIZE && !cli_parse_size(text, &value)) return "a size such as 512MiB or 24GiB";
    if (value >= option->min && (option->max == 0 || value <= option->max)) {
      *(uint64_t *)option->value = value;
      return NULL;
    }
    snprintf(limit, limit_bytes, option->max ? "%" PRIu64 " to %" PRIu64 : "at least %" PRIu64, option->min,
             option->max);
    return limit;
  case CLI_F64: return parse_f64(text, option->value) ? NULL : "a number that is not negative";
  case CLI_STRING: *(const char **)option->value = text; return NULL;
  default:
    limit[0] = 0;
    for (uint32_t i = 0; option->choices[i] != NULL; i++) {
      if (strcmp(option->choices[i], text) == 0) {
        *(uint32_t *)option->value = i;
        return NULL;
      }
      size_t used = strlen(limit);
      snprintf(limit + used, limit_bytes - used, "%s%s", i == 0 ? "" : ", ", option->choices[i]);
    }
    return limit;
  }
}

int cli_parse(const char *program, const char *purpose, const cli_option_t *options, int argc, char **argv) {
  enum { HELP = 256, FIRST }; /* what getopt_long() returns; FIRST + i for option i */
  struct option names[CLI_OPTIONS_MAX + 2] = { { "help", no_argument, NULL, HELP } };
  for (int i = 0; options[i].name != NULL; i++) {
    if (i == CLI_OPTIONS_MAX) {
      cli_error(program, "too many options in the program's table: the limit is %d", CLI_OPTIONS_MAX);
      return CLI_EXIT_FAILURE;
    }
    names[i + 1] = (struct option){ options[i].name, options[i].kind != CLI_FLAG, NULL, FIRST + i };
  }
  optind = 0; /* glibc: from the start */
  opterr = 0;
  for (;;) {
    /* "+": stop at the first argument that is no option; ":": tell a missing value from an unknown option. */
    int found = getopt_long(argc, argv, "+:", names, NULL);
    if (found == -1) break;
    if (found == HELP) {
      print_help(program, purpose, options);
      return CLI_EXIT_OK;
    }
    if (found == ':') {
      cli_error(program, "option lacks its value: --%s", options[optopt - FIRST].name);
      return CLI_EXIT_USAGE;
    }
    if (found == '?') {
      if (optopt >= HELP) {
        cli_error(program, "option takes no value: %s", argv[optind - 1]);
      } else if (optopt != 0) {
        cli_error(program, "unknown option: -%c; see --help", optopt);
      } else {
        cli_error(program, "unknown or ambiguous option: %s; see --help", argv[optind - 1]);
      }
      return CLI_EXIT_USAGE;
    }
    const cli_option_t *option = &options[found - FIRST];
    char limit[256];
    const char *expected = parse_value(option, optarg, limit, sizeof limit);
    if (expected != NULL) {
      cli_error(program, "bad value of --%s: %s, expected %s", option->name, optarg, expected);
      return CLI_EXIT_USAGE;
    }
  }
  if (optind < argc) {
    cli_error(program, "unexpected argument: %s; options begin with --, see --help", argv[optind]);
    return CLI_EXIT_USAGE;
  }
  return -1;
}
