/* What all benches share: options, sizes, error lines, and the result line in JSON.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <unistd.h>

#include "../../bench/common/cli.h"
#include "../../bench/common/row.h"
#include "check.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* What is printed to a file descriptor between capture() and captured(); one at a time. */
static struct {
  int fd, kept;
  FILE *file;
  char text[65536];
} printed;
static void capture(int fd) {
  fflush(NULL);
  printed.fd = fd;
  printed.kept = dup(fd);
  printed.file = tmpfile();
  CHECK(printed.kept >= 0 && printed.file && dup2(fileno(printed.file), fd) == fd);
}
static const char *captured(void) {
  fflush(NULL);
  CHECK_EQ(dup2(printed.kept, printed.fd), printed.fd);
  rewind(printed.file);
  size_t bytes = fread(printed.text, 1, sizeof printed.text - 1, printed.file);
  CHECK(bytes < sizeof printed.text - 1);
  printed.text[bytes] = 0;
  CHECK(!fclose(printed.file) && !close(printed.kept));
  return printed.text;
}
static void check_text(const char *actual, const char *expected) {
  if (!strcmp(actual, expected)) return;
  fprintf(stderr, "it is:\n%s\nand not:\n%s\n", actual, expected);
  exit(1);
}

/* ---- sizes */
enum { REFUSED = 77 }; /* a result that was left untouched */

static void test_sizes_and_shares_are_bytes(void) {
  static const struct {
    const char *text;
    uint64_t bytes; /* of a whole of 1000 */
  } cases[] = {
    { "0", 0 },
    { "9007199254740993", UINT64_C(9007199254740993) }, /* 2^53 + 1: not by way of a double */
    { "9223372036854775807", INT64_MAX },
    { "1.9B", 1 },
    { "64KiB", UINT64_C(64) << 10 },
    { "64K", UINT64_C(64) << 10 },
    { "1.5GiB", UINT64_C(3) << 29 },
    { "12GiB", UINT64_C(12) << 30 },
    { "2T", UINT64_C(2) << 40 },
    { "3kB", 3000 },
    { "16MB", 16000000 },
    { ".5K", 512 },
    { "30%", 300 },
    { "12.55%", 125 },
    { "150%", 1500 },
    { "0%", 0 },
    { "", REFUSED },
    { "K", REFUSED },
    { "-1", REFUSED },
    { " 1", REFUSED },
    { "1 MiB", REFUSED },
    { "1.5", REFUSED },
    { "1kib", REFUSED },
    { "1e3K", REFUSED },
    { "0x10", REFUSED },
    { "inf", REFUSED },
    { "1.2.3K", REFUSED },
    { "12monkeys", REFUSED },
    { "9223372036854775808", REFUSED },
    { "8388608TiB", REFUSED },
    { "99999999999999999999", REFUSED },
    { "0000000000000000000000000000000000000000000000000000000000000000000000001K", REFUSED },
    { "%", REFUSED },
    { "-5%", REFUSED },
    { "5%%", REFUSED },
    { "5K%", REFUSED },
    { "nan%", REFUSED },
    { "1e300%", REFUSED },
    { "0000000000000000000000000000000000000000000000000000000000000000000000050%", REFUSED },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    uint64_t bytes = REFUSED, share = REFUSED;
    bool taken = cli_parse_share(cases[i].text, 1000, &share);
    if (share != cases[i].bytes || taken != (cases[i].bytes != REFUSED)) {
      fprintf(stderr, "'%s' is %" PRIu64 "\n", cases[i].text, share), exit(1);
    }
    if (strchr(cases[i].text, '%')) taken = false, share = REFUSED; /* a share is no size */
    CHECK(cli_parse_size(cases[i].text, &bytes) == taken && bytes == share);
  }
  uint64_t bytes = REFUSED;
  CHECK(!cli_parse_share("200%", UINT64_C(1) << 62, &bytes) && bytes == REFUSED); /* 2^63 */
}

static void test_size_is_printed_in_its_unit(void) {
  static const struct {
    uint64_t bytes;
    const char *text;
  } cases[] = {
    { 1023, "1023 B" },
    { 1024, "1.0 KiB" },
    { (12 << 20) + (300 << 10), "12.3 MiB" },
    { UINT64_MAX, "16777216.0 TiB" },
  };
  char buffer[32];
  for (size_t i = 0; i < COUNT(cases); i++) {
    check_text(cli_format_size(cases[i].bytes, buffer, sizeof buffer), cases[i].text);
  }
}

/* ---- options */
static const char *const colours[] = { "red", "green", "blue", NULL };
static bool verbose;
static uint64_t count, any, size;
static double rate;
static const char *name;
static uint32_t colour;
static const cli_option_t options[] = {
  { "verbose", CLI_FLAG, &verbose, "says more", 0, 0, NULL },
  { "count", CLI_U64, &count, "how often", 2, 10, NULL },
  { "any", CLI_U64, &any, "how many", 4, 0, NULL },
  { "size", CLI_SIZE, &size, "how large", 0, 4 << 20, NULL },
  { "rate", CLI_F64, &rate, "how fast", 0, 0, NULL },
  { "name", CLI_STRING, &name, "whose", 0, 0, NULL },
  { "colour", CLI_CHOICE, &colour, "which", 0, 0, colours },
  { NULL, 0, NULL, NULL, 0, 0, NULL },
};
/* Parses words, from the defaults; what it prints to fd is in *text_out. */
static int parse(const char *const words[6], int fd, const char **text_out) {
  char *argv[8] = { (char *)"program" };
  int argc = 1;
  for (; argc < 7 && words[argc - 1]; argc++) argv[argc] = (char *)words[argc - 1];
  verbose = false, count = 3, any = 5, size = 0, rate = 0.5, name = "somebody", colour = 1;
  capture(fd);
  int status = cli_parse("bench", "Does something.", options, argc, argv);
  *text_out = captured();
  return status;
}

static void test_options_are_taken_or_keep_their_defaults(void) {
  const char *text;
  CHECK_EQ(parse((const char *[6]){ NULL }, 2, &text), -1);
  CHECK(!verbose && count == 3 && any == 5 && size == 0 && rate == 0.5 && !strcmp(name, "somebody") && colour == 1);
  CHECK_EQ(parse((const char *[6]){ "--verbose", "--count", "10", "--any=18446744073709551615", "--name=--verbose" }, 2,
                 &text),
           -1);
  CHECK(verbose && count == 10 && any == UINT64_MAX && !strcmp(name, "--verbose"));
  CHECK_EQ(parse((const char *[6]){ "--colour", "blue", "--size=2MiB", "--rate=1.25e-3", "--count=7", "--count=2" }, 2,
                 &text),
           -1);
  CHECK(!verbose && colour == 2 && size == 2 << 20 && rate == 1.25e-3 && count == 2 && !*text);
}

static void test_wrong_usage_is_one_line_with_option_value_and_limit(void) {
  static const struct {
    const char *words[6], *error;
  } cases[] = {
    { { "word" }, "unexpected argument: word; options begin with --, see --help" },
    { { "--verbose", "word", "--help" }, "unexpected argument: word; options begin with --, see --help" },
    { { "-v" }, "unknown option: -v; see --help" },
    { { "--counts=3" }, "unknown or ambiguous option: --counts=3; see --help" },
    { { "--verbose=yes" }, "option takes no value: --verbose=yes" },
    { { "--help=me" }, "option takes no value: --help=me" },
    { { "--count" }, "option lacks its value: --count" },
    { { "--count", "1" }, "bad value of --count: 1, expected 2 to 10" },
    { { "--count=11" }, "bad value of --count: 11, expected 2 to 10" },
    { { "--any=3" }, "bad value of --any: 3, expected at least 4" },
    { { "--count=" }, "bad value of --count: , expected a whole number" },
    { { "--count=3.0" }, "bad value of --count: 3.0, expected a whole number" },
    { { "--any", "-3" }, "bad value of --any: -3, expected a whole number" },
    { { "--any=18446744073709551616" }, "bad value of --any: 18446744073709551616, expected a whole number" },
    { { "--size", "50%" }, "bad value of --size: 50%, expected a size such as 512MiB or 24GiB" },
    { { "--size=5M" }, "bad value of --size: 5M, expected 0 to 4194304" },
    { { "--rate", "-0.5" }, "bad value of --rate: -0.5, expected a number that is not negative" },
    { { "--rate=nan" }, "bad value of --rate: nan, expected a number that is not negative" },
    { { "--rate=1e999" }, "bad value of --rate: 1e999, expected a number that is not negative" },
    { { "--colour", "re" }, "bad value of --colour: re, expected red, green, blue" },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    char want[256];
    const char *text;
    snprintf(want, sizeof want, "bench: %s\n", cases[i].error);
    CHECK_EQ(parse(cases[i].words, 2, &text), CLI_EXIT_USAGE);
    check_text(text, want);
    CHECK(count == 3 && any == 5 && size == 0 && rate == 0.5 && colour == 1);
  }
}

static void test_help_names_every_option_its_default_and_its_limits(void) {
  const char *text;
  CHECK_EQ(parse((const char *[6]){ "--help" }, 1, &text), CLI_EXIT_OK);
  check_text(text, "Usage: bench [OPTIONS]\n"
                   "Does something.\n"
                   "\n"
                   "  --verbose                says more\n"
                   "  --count N                how often [3] (2 to 10)\n"
                   "  --any N                  how many [5]\n"
                   "  --size SIZE              how large\n"
                   "  --rate X                 how fast [0.5]\n"
                   "  --name TEXT              whose [somebody]\n"
                   "  --colour ONE             which: red, green, blue [green]\n"
                   "  --help                   print this and exit\n");
}

/* ---- rows */
static void test_row_is_one_line_of_json(void) {
  const double list[] = { 1, 0.1f, 3e-9, 1.0 / 3, NAN };
  row_t row;
  row_begin(&row, "bench_x", "the \"case\" \\ of/\n\xc3\xa9");
  row_value(&row, 1.5e-7, "s");
  row_ratio(&row, 2, "malloc");
  row_u64(&row, "most", UINT64_MAX);
  row_f64(&row, "negative", -0.25);
  row_f64(&row, "infinite", -INFINITY);
  row_rounded(&row, "rounded", 2.0 / 3, 3);
  row_text(&row, "null", NULL);
  row_f64_list(&row, "list", list, COUNT(list));
  row_f64_list(&row, "empty", NULL, 0);
  capture(1);
  CHECK(row_end(&row));
  check_text(captured(), "ROW {\"bench\": \"bench_x\", \"case\": \"the \\\"case\\\" \\\\ of/\\n\xc3\xa9\", "
                         "\"value\": 1.4999999999999999e-07, \"unit\": \"s\", \"ratio\": 2, \"against\": \"malloc\", "
                         "\"most\": 18446744073709551615, \"negative\": -0.25, \"infinite\": null, \"rounded\": 0.667, "
                         "\"null\": null, \"list\": [1, 0.100000001, 3e-09, 0.333333333, null], \"empty\": []}\n");
}

static void test_row_that_cannot_be_printed_is_a_failure(void) {
  int kept = dup(1);
  FILE *full = fopen("/dev/full", "w");
  CHECK(kept >= 0 && full);
  row_t row;
  row_begin(&row, "b", "c");
  fflush(stdout);
  CHECK_EQ(dup2(fileno(full), 1), 1);
  bool good = row_end(&row);
  CHECK_EQ(dup2(kept, 1), 1);
  CHECK(!good);
  close(kept);
  fclose(full);
  clearerr(stdout);
}

int main(void) {
  RUN(test_sizes_and_shares_are_bytes);
  RUN(test_size_is_printed_in_its_unit);
  RUN(test_options_are_taken_or_keep_their_defaults);
  RUN(test_wrong_usage_is_one_line_with_option_value_and_limit);
  RUN(test_help_names_every_option_its_default_and_its_limits);
  RUN(test_row_is_one_line_of_json);
  RUN(test_row_that_cannot_be_printed_is_a_failure);
  return check_done();
}
