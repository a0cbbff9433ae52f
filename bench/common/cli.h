/* Options, sizes and error lines that all benches share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A bench fills a table of cli_option_t whose values already hold the defaults, and calls cli_parse(), which has
 * getopt_long() take the arguments apart: long options only, as `--name value` or `--name=value`, shortened where that
 * is unambiguous; `--help` prints the table. Exit statuses: 0 success, 1 failure, 2 bad usage. Errors are one line on
 * standard error: `PROGRAM: what happened: which value, which limit`. */
#ifndef BENCH_CLI_H
#define BENCH_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CLI_EXIT_OK = 0, CLI_EXIT_FAILURE = 1, CLI_EXIT_USAGE = 2 };

enum {
  CLI_FLAG,   /* bool *: present or not */
  CLI_U64,    /* uint64_t *: a count, between min and max */
  CLI_SIZE,   /* uint64_t *: bytes, with a suffix as in cli_parse_size(), between min and max */
  CLI_F64,    /* double *: finite and not negative */
  CLI_STRING, /* const char **: borrowed from argv */
  CLI_CHOICE  /* uint32_t *: index of the value in choices */
};
typedef struct cli_option {
  const char *name;           /* without the dashes; NULL ends the table */
  int kind;                   /* CLI_* */
  void *value;                /* of the kind's type; holds the default before and the choice after */
  const char *help;           /* one line */
  uint64_t min;               /* CLI_U64, CLI_SIZE */
  uint64_t max;               /* CLI_U64, CLI_SIZE; 0 = no limit */
  const char *const *choices; /* CLI_CHOICE only; NULL ends the list */
} cli_option_t;
enum { CLI_OPTIONS_MAX = 62 };

/* Takes argv apart. Returns -1 when the program should go on, else the status to exit with at once: --help was
 * asked for and printed, or the usage is bad and an error was printed. */
int cli_parse(const char *program, const char *purpose, const cli_option_t *options, int argc, char **argv);

/* "512", "64KiB", "1.5GiB", "16MB": bytes, rounded down. Suffixes KiB MiB GiB TiB (powers of 1024; K M G T alone mean
 * these too) and kB MB GB TB (powers of 1000). False, with *bytes_out untouched, when it is none or passes 2^63. */
bool cli_parse_size(const char *text, uint64_t *bytes_out);
/* "12.5%" of whole_bytes, or a size as above. */
bool cli_parse_share(const char *text, uint64_t whole_bytes, uint64_t *bytes_out);
/* "12.3 MiB" into buffer; returns buffer. */
const char *cli_format_size(uint64_t bytes, char *buffer, size_t buffer_bytes);

/* Prints `program: ` and the message to standard error, with a line end. */
void cli_error(const char *program, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Sorts upwards: a median is in the middle then. */
void cli_sort(double *values, size_t count);

/* Nanoseconds on the monotonic clock. */
uint64_t cli_now_ns(void);

#endif
