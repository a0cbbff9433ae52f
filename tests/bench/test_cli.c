/* What all benches share: options, sizes, error lines, and the result line in JSON.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "../../bench/common/cli.h"
#include "../../bench/common/row.h"
#include "check.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define TIB (UINT64_C(1) << 40)
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- what is printed between capture() and captured() */
typedef struct {
  int kept[3];
  FILE *file[3];
  char text[3][65536]; /* of 1, standard output, and 2, standard error */
} capture_t;

static capture_t *capture(bool together) {
  capture_t *c = calloc(1, sizeof *c);
  CHECK(c);
  fflush(NULL);
  for (int fd = 1; fd <= 2; fd++) {
    c->kept[fd] = dup(fd);
    c->file[fd] = tmpfile();
    CHECK(c->kept[fd] >= 0 && c->file[fd]);
  }
  for (int fd = 1; fd <= 2; fd++) CHECK_EQ(dup2(fileno(c->file[together ? 1 : fd]), fd), fd);
  return c;
}
static void captured(capture_t *c) {
  fflush(NULL);
  for (int fd = 1; fd <= 2; fd++) CHECK_EQ(dup2(c->kept[fd], fd), fd);
  for (int fd = 1; fd <= 2; fd++) {
    rewind(c->file[fd]);
    size_t n = fread(c->text[fd], 1, sizeof c->text[fd] - 1, c->file[fd]);
    CHECK(n < sizeof c->text[fd] - 1);
    CHECK(!fclose(c->file[fd]) && !close(c->kept[fd]));
  }
}
static void check_text(const char *actual, const char *expected) {
  if (!strcmp(actual, expected)) return;
  fprintf(stderr, "it is:\n%s\nand not:\n%s\n", actual, expected);
  exit(1);
}

/* ---- sizes */
static void test_size_with_suffixes_is_bytes(void) {
  static const struct {
    const char *text;
    uint64_t bytes;
  } cases[] = {
    { "0", 0 },
    { "512", 512 },
    { "9007199254740993", UINT64_C(9007199254740993) }, /* 2^53 + 1: not by way of a double */
    { "9223372036854775807", INT64_MAX },
    { "1B", 1 },
    { "1.9B", 1 },
    { "64KiB", 64 * KIB },
    { "64K", 64 * KIB },
    { "16MiB", 16 * MIB },
    { "16M", 16 * MIB },
    { "1.5GiB", GIB + GIB / 2 },
    { "1.5G", GIB + GIB / 2 },
    { "2TiB", 2 * TIB },
    { "2T", 2 * TIB },
    { "3kB", 3000 },
    { "3KB", 3000 },
    { "16MB", 16000000 },
    { "24GB", UINT64_C(24000000000) },
    { "1TB", UINT64_C(1000000000000) },
    { ".5K", 512 },
    { "1.K", KIB },
    { "007K", 7 * KIB },
    { "0.0009KiB", 0 },
    { "8388607TiB", 8388607 * TIB },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    uint64_t bytes = 77, share = 77;
    if (!cli_parse_size(cases[i].text, &bytes)) fprintf(stderr, "refused: %s\n", cases[i].text), exit(1);
    if (bytes != cases[i].bytes) fprintf(stderr, "%s is %" PRIu64 "\n", cases[i].text, bytes), exit(1);
    CHECK(cli_parse_share(cases[i].text, 12345, &share)); /* a size is one of any whole */
    CHECK_EQ(share, cases[i].bytes);
  }
}

static void test_size_that_is_none_is_refused(void) {
  static const char *const cases[] = {
    "",
    " ",
    ".",
    "K",
    "KiB",
    "-1",
    "+1",
    " 1",
    "1 ",
    "1 MiB",
    "1.5",
    "1k",
    "1kib",
    "1KIB",
    "1mb",
    "1KiBs",
    "1Kib",
    "1PiB",
    "1e3",
    "1e3K",
    "0x10",
    "inf",
    "nan",
    "infK",
    "1.2.3K",
    "1,5K",
    "12monkeys",
    "8388608TiB",
    "1e30",
    "99999999999999999999",
    "9223372036854775808B",
    "10000000TB",
    "00000000000000000000000000000000000000000000000000000000000000000000000000000001K", /* 80 digits */
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    uint64_t bytes = 77;
    if (cli_parse_size(cases[i], &bytes) || cli_parse_share(cases[i], 1000, &bytes))
      fprintf(stderr, "'%s' is %" PRIu64 "\n", cases[i], bytes), exit(1);
    CHECK_EQ(bytes, 77);
  }
}

static void test_share_of_a_whole_is_bytes(void) {
  static const struct {
    const char *text;
    uint64_t whole, bytes;
  } cases[] = {
    { "50%", 1000, 500 },        { "12.5%", 1000, 125 }, { "100%", 3, 3 },
    { "0%", 1000, 0 },           { "39%", 10, 3 },       { "150%", 10, 15 },
    { ".5%", 1000, 5 },          { "50%", 0, 0 },        { "25%", 8 * GIB, 2 * GIB },
    { "0.1%", 1000 * TIB, TIB },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    uint64_t bytes = 77;
    CHECK(cli_parse_share(cases[i].text, cases[i].whole, &bytes));
    CHECK_EQ(bytes, cases[i].bytes);
  }
  static const char *const wrong[] = {
    "%",   "-5%", "+5%",  "5%%",  "5 %", " 5%",
    "5%K", "5K%", "nan%", "inf%", "x%",  "0000000000000000000000000000000000000000000000000000000000000050%",
  };
  for (size_t i = 0; i < COUNT(wrong); i++) {
    uint64_t bytes = 77;
    if (cli_parse_share(wrong[i], 1000, &bytes)) fprintf(stderr, "'%s' is %" PRIu64 "\n", wrong[i], bytes), exit(1);
    CHECK_EQ(bytes, 77);
  }
  uint64_t bytes = 77;
  CHECK(!cli_parse_share("200%", UINT64_C(1) << 62, &bytes)); /* 2^63 */
  CHECK(!cli_parse_share("1e300%", 1000, &bytes));
  CHECK_EQ(bytes, 77);
}

static void test_size_is_printed_in_its_unit(void) {
  static const struct {
    uint64_t bytes;
    const char *text;
  } cases[] = {
    { 0, "0 B" },
    { 1023, "1023 B" },
    { KIB, "1.0 KiB" },
    { KIB + KIB / 2, "1.5 KiB" },
    { MIB - 1024, "1023.0 KiB" },
    { 12 * MIB + 300 * KIB, "12.3 MiB" },
    { 24 * GIB, "24.0 GiB" },
    { 5 * TIB, "5.0 TiB" },
    { 2048 * TIB, "2048.0 TiB" },
    { UINT64_MAX, "16777216.0 TiB" },
  };
  char buffer[32];
  for (size_t i = 0; i < COUNT(cases); i++) {
    const char *text = cli_format_size(cases[i].bytes, buffer, sizeof buffer);
    CHECK(text == buffer);
    check_text(text, cases[i].text);
  }
  check_text(cli_format_size(24 * GIB, buffer, 5), "24.0"); /* as much as fits */
}

/* ---- options */
static const char *const colours[] = { "red", "green", "blue", NULL };
typedef struct {
  bool verbose;
  uint64_t count, any, size, zero;
  double rate;
  const char *name, *none;
  uint32_t colour;
  cli_option_t table[10];
} options_t;
static options_t *options(void) {
  options_t *o = calloc(1, sizeof *o);
  CHECK(o);
  o->count = 3, o->any = 5, o->size = 64 * KIB, o->rate = 0.5, o->name = "somebody", o->colour = 1;
  const cli_option_t table[] = {
    { "verbose", CLI_FLAG, &o->verbose, "says more", 0, 0, NULL },
    { "count", CLI_U64, &o->count, "how often", 2, 10, NULL },
    { "any", CLI_U64, &o->any, "how many", 4, 0, NULL },
    { "size", CLI_SIZE, &o->size, "how large", 0, 0, NULL },
    { "zero", CLI_SIZE, &o->zero, "chosen by the program", 0, 0, NULL },
    { "rate", CLI_F64, &o->rate, "how fast", 0, 0, NULL },
    { "name", CLI_STRING, &o->name, "whose", 0, 0, NULL },
    { "none", CLI_STRING, &o->none, "nobody's", 0, 0, NULL },
    { "colour", CLI_CHOICE, &o->colour, "which", 0, 0, colours },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  memcpy(o->table, table, sizeof table);
  return o;
}
/* Parses arguments that end with NULL. */
static int parse(options_t *o, char **arguments, capture_t **printed) {
  char *argv[16] = { (char *)"program" };
  int argc = 1;
  while (arguments[argc - 1]) argv[argc] = arguments[argc - 1], argc++;
  *printed = capture(false);
  int status = cli_parse("bench", "Does something.", o->table, argc, argv);
  captured(*printed);
  return status;
}
#define ARGUMENTS(...) ((char *[]){ __VA_ARGS__, NULL })
static bool as_before(const options_t *o) {
  return !o->verbose && o->count == 3 && o->any == 5 && o->size == 64 * KIB && !o->zero && o->rate == 0.5 &&
         !strcmp(o->name, "somebody") && !o->none && o->colour == 1;
}

static void test_options_not_given_keep_their_defaults(void) {
  options_t *o = options();
  capture_t *c;
  CHECK_EQ(parse(o, ARGUMENTS(NULL), &c), -1);
  CHECK(as_before(o));
  CHECK(!*c->text[1] && !*c->text[2]);
  free(c);
  free(o);
}

static void test_options_given_are_taken_in_both_spellings(void) {
  char *apart[] = { "--verbose", "--count",  "7",      "--any",   "18446744073709551615",
                    "--size",    "2MiB",     "--rate", "1.25e-3", "--name",
                    "--verbose", "--colour", "blue",   NULL };
  char *joined[] = { "--colour=blue",
                     "--name=--verbose",
                     "--rate=1.25e-3",
                     "--size=2MiB",
                     "--any=18446744073709551615",
                     "--count=7",
                     "--verbose",
                     NULL };
  for (int i = 0; i < 2; i++) {
    options_t *o = options();
    capture_t *c;
    CHECK_EQ(parse(o, i ? joined : apart, &c), -1);
    CHECK(o->verbose && o->count == 7 && o->any == UINT64_MAX && o->size == 2 * MIB && o->rate == 1.25e-3);
    CHECK(!strcmp(o->name, "--verbose") && o->colour == 2 && !o->none && !o->zero);
    CHECK(!*c->text[1] && !*c->text[2]);
    free(c);
    free(o);
  }
}

static void test_last_of_an_option_counts_and_limits_belong_to_it(void) {
  options_t *o = options();
  capture_t *c;
  CHECK_EQ(parse(o,
                 ARGUMENTS("--count", "2", "--count=10", "--any=4", "--name=", "--none=a=b", "--rate", "0", "--size=0",
                           "--colour=red", "--colour", "green"),
                 &c),
           -1);
  CHECK(o->count == 10 && o->any == 4 && !*o->name && !strcmp(o->none, "a=b") && o->rate == 0 && !o->size &&
        o->colour == 1);
  free(c);
  free(o);
}

static void test_wrong_usage_is_one_line_and_changes_nothing(void) {
  static const struct {
    const char *arguments[3], *error;
  } cases[] = {
    { { "word" }, "unexpected argument: word; options begin with --, see --help" },
    { { "" }, "unexpected argument: ; options begin with --, see --help" },
    { { "-v" }, "unexpected argument: -v; options begin with --, see --help" },
    { { "-" }, "unexpected argument: -; options begin with --, see --help" },
    { { "--" }, "unknown option: --; see --help" },
    { { "--=3" }, "unknown option: --; see --help" },
    { { "--cou", "3" }, "unknown option: --cou; see --help" },
    { { "--counts", "3" }, "unknown option: --counts; see --help" },
    { { "--counts=3" }, "unknown option: --counts; see --help" },
    { { "--Count", "3" }, "unknown option: --Count; see --help" },
    { { "--help=me" }, "unknown option: --help; see --help" },
    { { "--verbose=yes" }, "option takes no value: --verbose, given yes" },
    { { "--verbose=" }, "option takes no value: --verbose, given " },
    { { "--count" }, "option lacks its value: --count" },
    { { "--name" }, "option lacks its value: --name" },
    { { "--count", "1" }, "bad value of --count: 1, expected 2 to 10" },
    { { "--count", "11" }, "bad value of --count: 11, expected 2 to 10" },
    { { "--any=3" }, "bad value of --any: 3, expected at least 4" },
    { { "--count", "" }, "bad value of --count: , expected a whole number" },
    { { "--count=" }, "bad value of --count: , expected a whole number" },
    { { "--count", "3x" }, "bad value of --count: 3x, expected a whole number" },
    { { "--count", "3.0" }, "bad value of --count: 3.0, expected a whole number" },
    { { "--count", "+3" }, "bad value of --count: +3, expected a whole number" },
    { { "--count", " 3" }, "bad value of --count:  3, expected a whole number" },
    { { "--any", "-3" }, "bad value of --any: -3, expected a whole number" },
    { { "--any", "18446744073709551616" }, "bad value of --any: 18446744073709551616, expected a whole number" },
    { { "--any", "--verbose" }, "bad value of --any: --verbose, expected a whole number" },
    { { "--size", "12 MiB" }, "bad value of --size: 12 MiB, expected a size such as 512MiB or 24GiB" },
    { { "--size", "50%" }, "bad value of --size: 50%, expected a size such as 512MiB or 24GiB" },
    { { "--rate", "-0.5" }, "bad value of --rate: -0.5, expected a number that is not negative" },
    { { "--rate", "nan" }, "bad value of --rate: nan, expected a number that is not negative" },
    { { "--rate", "inf" }, "bad value of --rate: inf, expected a number that is not negative" },
    { { "--rate", "1e999" }, "bad value of --rate: 1e999, expected a number that is not negative" },
    { { "--rate", "0.5s" }, "bad value of --rate: 0.5s, expected a number that is not negative" },
    { { "--rate", "" }, "bad value of --rate: , expected a number that is not negative" },
    { { "--colour", "re" }, "bad value of --colour: re, expected red, green, blue" },
    { { "--colour", "Red" }, "bad value of --colour: Red, expected red, green, blue" },
    { { "--colour", "0" }, "bad value of --colour: 0, expected red, green, blue" },
  };
  for (size_t i = 0; i < COUNT(cases); i++) {
    /* What comes after it is not looked at. */
    char *arguments[5] = { 0 };
    int n = 0;
    for (; n < 3 && cases[i].arguments[n]; n++) arguments[n] = (char *)cases[i].arguments[n];
    bool lacks = strstr(cases[i].error, "lacks");
    if (!lacks) arguments[n++] = (char *)"--count=9", arguments[n] = (char *)"--help";
    options_t *o = options();
    capture_t *c;
    char want[256];
    snprintf(want, sizeof want, "bench: %s\n", cases[i].error);
    CHECK_EQ(parse(o, arguments, &c), CLI_EXIT_USAGE);
    check_text(c->text[2], want);
    CHECK(!*c->text[1]);
    CHECK(as_before(o));
    free(c);
    free(o);
  }
}

static void test_many_choices_are_named_as_far_as_there_is_room(void) {
  char names[40][32];
  const char *choices[41] = { 0 };
  for (int i = 0; i < 40; i++) {
    snprintf(names[i], sizeof names[i], "choice-no-%02d", i);
    choices[i] = names[i];
  }
  uint32_t chosen = 3;
  const cli_option_t table[] = { { "which", CLI_CHOICE, &chosen, "one of many", 0, 0, choices }, { .name = NULL } };
  char *good[] = { "program", "--which=choice-no-39" }, *bad[] = { "program", "--which=choice-no-40" };
  CHECK_EQ(cli_parse("bench", "", table, 2, good), -1);
  CHECK_EQ(chosen, 39);
  capture_t *c = capture(false);
  int status = cli_parse("bench", "", table, 2, bad);
  captured(c);
  CHECK_EQ(status, CLI_EXIT_USAGE);
  CHECK_EQ(chosen, 39);
  static const char begin[] = "bench: bad value of --which: choice-no-40, expected choice-no-00, choice-no-01, ";
  CHECK(!strncmp(c->text[2], begin, sizeof begin - 1));
  CHECK(strlen(c->text[2]) > 256 && strlen(c->text[2]) < 256 + sizeof begin);
  CHECK(strchr(c->text[2], '\n') == c->text[2] + strlen(c->text[2]) - 1);
  free(c);
}

static void test_help_names_every_option_and_its_default(void) {
  options_t *o = options();
  capture_t *c;
  CHECK_EQ(parse(o, ARGUMENTS("--verbose", "--count=4", "--help", "--nonsense"), &c), CLI_EXIT_OK);
  CHECK(!*c->text[2]);
  check_text(c->text[1], "Usage: bench [OPTIONS]\n"
                         "Does something.\n"
                         "\n"
                         "  --verbose                says more\n"
                         "  --count N                how often [4]\n"
                         "  --any N                  how many [5]\n"
                         "  --size SIZE              how large [64.0 KiB]\n"
                         "  --zero SIZE              chosen by the program\n"
                         "  --rate X                 how fast [0.5]\n"
                         "  --name TEXT              whose [somebody]\n"
                         "  --none TEXT              nobody's\n"
                         "  --colour ONE             which: red, green, blue [green]\n"
                         "  --help                   print this and exit\n");
  free(c);
  CHECK_EQ(parse(o, ARGUMENTS("--nonsense", "--help"), &c), CLI_EXIT_USAGE); /* in their order */
  free(c);
  free(o);
}

static void test_error_stands_behind_what_was_printed_before(void) {
  capture_t *c = capture(true);
  printf("first\n");
  cli_error("bench", "second: %s is %d", "it", 2);
  captured(c);
  check_text(c->text[1], "first\nbench: second: it is 2\n");
  free(c);
}

static void test_clock_counts_nanoseconds_onwards(void) {
  const struct timespec pause = { 0, 2000000 };
  uint64_t begin = cli_now_ns(), last = begin;
  for (int i = 0; i < 1000; i++) {
    uint64_t now = cli_now_ns();
    CHECK(now >= last);
    last = now;
  }
  nanosleep(&pause, NULL);
  uint64_t took = cli_now_ns() - last;
  CHECK(took >= 2000000 && took < UINT64_C(60000000000));
}

/* ---- rows */
static capture_t *row_printed(row_t *row) {
  capture_t *c = capture(false);
  bool good = row_end(row);
  captured(c);
  CHECK(good && !row->text);
  CHECK(!*c->text[2]);
  return c;
}

static void test_row_is_one_line_of_json(void) {
  const double list[] = { 1, 0.1f, 3e-9, 1.0 / 3 };
  row_t row;
  row_begin(&row, "bench_x", "the case");
  row_value(&row, 1.5e-7, "s");
  row_ratio(&row, 2, "malloc");
  row_u64(&row, "most", UINT64_MAX);
  row_u64(&row, "none", 0);
  row_f64(&row, "negative", -0.25);
  row_text(&row, "text", "");
  row_text(&row, "null", NULL);
  row_f64_list(&row, "list", list, COUNT(list));
  row_f64_list(&row, "one", list, 1);
  row_f64_list(&row, "empty", NULL, 0);
  capture_t *c = row_printed(&row);
  check_text(c->text[1], "ROW {\"bench\": \"bench_x\", \"case\": \"the case\", \"value\": 1.4999999999999999e-07, "
                         "\"unit\": \"s\", \"ratio\": 2, \"against\": \"malloc\", \"most\": 18446744073709551615, "
                         "\"none\": 0, \"negative\": -0.25, \"text\": \"\", \"null\": null, \"list\": [1, "
                         "0.100000001, 3e-09, 0.333333333], \"one\": [1], \"empty\": []}\n");
  free(c);
}

static void test_row_numbers_that_json_cannot_hold_are_null(void) {
  const double list[] = { 1, INFINITY, -INFINITY, NAN, 2 };
  row_t row;
  row_begin(&row, "b", "c");
  row_value(&row, INFINITY, "s");
  row_ratio(&row, NAN, NULL);
  row_f64(&row, "minus", -INFINITY);
  row_f64_list(&row, "list", list, COUNT(list));
  capture_t *c = row_printed(&row);
  check_text(c->text[1], "ROW {\"bench\": \"b\", \"case\": \"c\", \"value\": null, \"unit\": \"s\", \"ratio\": null, "
                         "\"against\": null, \"minus\": null, \"list\": [1, null, null, null, 2]}\n");
  free(c);
}

static void test_row_texts_are_escaped(void) {
  char all[256], want[2048], *at = want;
  for (int i = 1; i < 256; i++) all[i - 1] = (char)i;
  all[255] = 0;
  at += sprintf(at, "ROW {\"bench\": \"b\", \"case\": \"c\", \"\\\"name\\\\\\u000a\": \"");
  for (int i = 1; i < 256; i++) {
    if (i < 0x20) at += sprintf(at, "\\u%04x", i);
    else if (i == '"' || i == '\\') at += sprintf(at, "\\%c", i);
    else at += sprintf(at, "%c", i); /* UTF-8 goes through as it is */
  }
  sprintf(at, "\", \"unit\": \"%%s%%n\"}\n");
  row_t row;
  row_begin(&row, "b", "c");
  row_text(&row, "\"name\\\n", all);
  row_text(&row, "unit", "%s%n");
  capture_t *c = row_printed(&row);
  check_text(c->text[1], want);
  free(c);
}

static void test_row_doubles_read_back_as_they_were(void) {
  uint64_t random = 5;
  for (int i = 0; i < 200; i++) {
    double value;
    do {
      uint64_t bits = check_random(&random);
      memcpy(&value, &bits, sizeof value);
    } while (!isfinite(value));
    float of_list = (float)value;
    if (!isfinite(of_list)) of_list = 0.1f;
    double list[] = { of_list };
    row_t row;
    row_begin(&row, "b", "c");
    row_f64(&row, "x", value);
    row_f64_list(&row, "y", list, 1);
    capture_t *c = row_printed(&row);
    const char *x = strstr(c->text[1], "\"x\": "), *y = strstr(c->text[1], "\"y\": [");
    CHECK(x && y);
    CHECK(strtod(x + 5, NULL) == value);
    CHECK(strtof(y + 6, NULL) == of_list);
    free(c);
  }
}

static void test_row_grows_with_its_content(void) {
  enum { LONG = 20000 };
  char *text = malloc(LONG + 1);
  CHECK(text);
  memset(text, 'x', LONG);
  text[LONG] = 0;
  double list[500];
  for (size_t i = 0; i < COUNT(list); i++) list[i] = 0.125;
  row_t row;
  row_begin(&row, "b", "c");
  row_text(&row, "long", text);
  row_f64_list(&row, "list", list, COUNT(list));
  capture_t *c = row_printed(&row);
  CHECK_EQ(strlen(c->text[1]), strlen("ROW {\"bench\": \"b\", \"case\": \"c\", \"long\": \"\", \"list\": []}\n") +
                                   LONG + 5 * COUNT(list) + 2 * (COUNT(list) - 1));
  CHECK(strstr(c->text[1], text));
  static const char end[] = ", 0.125, 0.125]}\n";
  CHECK(!strcmp(c->text[1] + strlen(c->text[1]) - strlen(end), end));
  free(c);
  free(text);
}

static void test_row_that_cannot_be_printed_is_a_failure(void) {
  row_t row;
  row_begin(&row, "b", "c");
  free(row.text); /* as when memory has run out */
  row.text = NULL;
  row_text(&row, "name", "value");
  row_f64(&row, "x", 1);
  capture_t *c = capture(false);
  bool good = row_end(&row);
  captured(c);
  CHECK(!good && !*c->text[1]);
  free(c);

  int kept = dup(1);
  CHECK(kept >= 0);
  FILE *full = fopen("/dev/full", "w");
  CHECK(full);
  row_begin(&row, "b", "c");
  fflush(stdout);
  CHECK_EQ(dup2(fileno(full), 1), 1);
  good = row_end(&row);
  CHECK_EQ(dup2(kept, 1), 1);
  CHECK(!good && !row.text);
  close(kept);
  fclose(full);
  clearerr(stdout);
}

int main(void) {
  RUN(test_size_with_suffixes_is_bytes);
  RUN(test_size_that_is_none_is_refused);
  RUN(test_share_of_a_whole_is_bytes);
  RUN(test_size_is_printed_in_its_unit);
  RUN(test_options_not_given_keep_their_defaults);
  RUN(test_options_given_are_taken_in_both_spellings);
  RUN(test_last_of_an_option_counts_and_limits_belong_to_it);
  RUN(test_wrong_usage_is_one_line_and_changes_nothing);
  RUN(test_many_choices_are_named_as_far_as_there_is_room);
  RUN(test_help_names_every_option_and_its_default);
  RUN(test_error_stands_behind_what_was_printed_before);
  RUN(test_clock_counts_nanoseconds_onwards);
  RUN(test_row_is_one_line_of_json);
  RUN(test_row_numbers_that_json_cannot_hold_are_null);
  RUN(test_row_texts_are_escaped);
  RUN(test_row_doubles_read_back_as_they_were);
  RUN(test_row_grows_with_its_content);
  RUN(test_row_that_cannot_be_printed_is_a_failure);
  return check_done();
}
