/* The test framework: checks that report file, line and values, and a runner of named test functions.
 *
 *   static void test_heap_free_twice_is_refused(void) { CHECK(!gmi_heap_free(h, 0, tag)); }
 *   int main(void) { RUN(test_heap_free_twice_is_refused); return check_done(); }
 *
 * `test_heap` runs all tests, `test_heap free_twice reset` those with "free_twice" or "reset" in their names, and
 * `test_heap --list` prints the names. A failed CHECK prints file, line, expression and values, and ends the process
 * with status 1. Exit status 77 means that the test was skipped. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* AddressSanitizer or ThreadSanitizer: all is several times slower, and memory has a shadow. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* Before functions that compute a test's reference in memory that no other thread uses meanwhile: sanitizers would find
 * nothing of the library's there and take most of a test's time. Bytes that threads of the library write are copied out
 * first, by memcpy(), which they check. */
#if defined(__SANITIZE_THREAD__)
#define OWN_MEMORY __attribute__((no_sanitize("thread")))
#elif defined(__SANITIZE_ADDRESS__)
#define OWN_MEMORY __attribute__((no_sanitize("address", "undefined")))
#else
#define OWN_MEMORY
#endif

/* Where everything takes many times as long, under sanitizers and Valgrind, a part of random or repeated work is done:
 * other lanes do all of it. Of repetitions a fifth, and of places that fail one after the other every third. */
static inline bool check_is_slow(void) { return SANITIZED || getenv("GEMINI_VALGRIND"); }
static inline uint32_t check_repetitions(uint32_t all) { return check_is_slow() ? (all + 4) / 5 : all; }
static inline uint32_t check_stride(void) { return check_is_slow() ? 3 : 1; }

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__, __func__, #condition); \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)
#define CHECK_EQ(actual, expected)                                                                               \
  do {                                                                                                           \
    int64_t check_a = (int64_t)(actual), check_b = (int64_t)(expected);                                          \
    if (check_a != check_b) {                                                                                    \
      fprintf(stderr, "%s:%d: %s: %s is %" PRId64 ", expected %s = %" PRId64 "\n", __FILE__, __LINE__, __func__, \
              #actual, check_a, #expected, check_b);                                                             \
      exit(1);                                                                                                   \
    }                                                                                                            \
  } while (0)
#define CHECK_SAYS(text, part)                                                                          \
  do {                                                                                                  \
    if (!strstr(text, part)) {                                                                          \
      fprintf(stderr, "%s:%d: %s: '%s' does not say '%s'\n", __FILE__, __LINE__, __func__, text, part); \
      exit(1);                                                                                          \
    }                                                                                                   \
  } while (0)

/* How often a text has a part. */
static inline uint64_t count_of(const char *text, const char *part) {
  uint64_t n = 0;
  for (; (text = strstr(text, part)); text++) n++;
  return n;
}

/* ---- which tests run: the program's arguments, read from /proc, so that main() need not pass them on */
enum { CHECK_WORDS = 4096, CHECK_TESTS = 512 };
static struct {
  char words[CHECK_WORDS]; /* the command line: the program, then its arguments, each with its terminating zero */
  size_t words_size;
  bool begun, list;
  const char *tests[CHECK_TESTS]; /* the names passed to RUN, each once */
  int test_count, run_count;
} check_run;

/* The word of the command line after this one; NULL after the last. */
static inline const char *check_next_word(const char *word) {
  word += strlen(word) + 1;
  return word < check_run.words + check_run.words_size ? word : NULL;
}
static inline void check_begin(void) {
  check_run.begun = true;
  FILE *file = fopen("/proc/self/cmdline", "r");
  if (file) check_run.words_size = fread(check_run.words, 1, sizeof check_run.words - 1, file);
  if (!check_run.words_size || check_run.words_size == sizeof check_run.words - 1) {
    fprintf(stderr, "/proc/self/cmdline cannot be read, or is longer than %d bytes\n", CHECK_WORDS - 2);
    exit(2);
  }
  fclose(file);
  for (const char *word = check_run.words; (word = check_next_word(word));) {
    if (!strcmp(word, "--list")) {
      check_run.list = true;
      continue;
    }
    if (*word && *word != '-') continue;
    fprintf(stderr, "%s: '%s': want --list, or parts of the names of the tests to run\n", check_run.words, word);
    exit(2);
  }
}
/* Shall this test run? Yes, unless the command line has words and the test's name contains none of them. */
static inline bool check_wants(const char *test) {
  if (!check_run.begun) check_begin();
  int i = 0;
  while (i < check_run.test_count && strcmp(check_run.tests[i], test) != 0) i++;
  if (i == check_run.test_count) {
    CHECK(i < CHECK_TESTS);
    check_run.tests[check_run.test_count++] = test;
    if (check_run.list) printf("%s\n", test);
  }
  if (check_run.list) return false;
  const char *word = check_next_word(check_run.words);
  if (!word) return true;
  while (word && !strstr(test, word)) word = check_next_word(word);
  return word != NULL;
}
static inline double check_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
#define RUN(test)                                                                    \
  do {                                                                               \
    if (check_wants(#test)) {                                                        \
      fprintf(stderr, "  %s\n", #test);                                              \
      const double check_start = check_seconds();                                    \
      test();                                                                        \
      const double check_took = check_seconds() - check_start;                       \
      if (check_took >= 1.0) fprintf(stderr, "    took %.1f seconds\n", check_took); \
      check_run.run_count++;                                                         \
    }                                                                                \
  } while (0)
/* The exit status. A program that ran no test has failed, and so has one with an argument that no test's name contains:
 * a misspelt name must not pass. */
static inline int check_done(void) {
  if (check_run.list) return 0;
  int status = check_run.run_count > 0 ? 0 : 1;
  for (const char *word = check_run.words; check_run.begun && (word = check_next_word(word));) {
    int i = 0;
    while (i < check_run.test_count && !strstr(check_run.tests[i], word)) i++;
    if (i < check_run.test_count) continue;
    fprintf(stderr, "%s: no test here has '%s' in its name; --list prints the names\n", check_run.words, word);
    status = 1;
  }
  return status;
}

/* xorshift64*: the same sequence for a seed on every machine. state must not be 0. */
static inline uint64_t check_random(uint64_t *state) {
  uint64_t x = *state;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  *state = x;
  return x * UINT64_C(2685821657736338717);
}
#endif
