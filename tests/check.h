/* The whole test framework: a check that says where and what, and a runner of named functions.
 *
 *   static void test_heap_free_twice_is_refused(void) { CHECK(!gmi_heap_free(h, 0, tag)); }
 *   int main(int argc, char **argv) { RUN(test_heap_free_twice_is_refused); return check_done(); }
 *
 * A failed CHECK ends the process with status 1 after naming file, line, expression and values. Exit 77: skipped. */
#ifndef CHECK_H
#define CHECK_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static int check_run_count;
#define RUN(test)                     \
  do {                                \
    fprintf(stderr, "  %s\n", #test); \
    test();                           \
    check_run_count++;                \
  } while (0)
/* Exit status: a program that ran no test has failed. */
static inline int check_done(void) { return check_run_count > 0 ? 0 : 1; }

/* xorshift64*: seeded, the same everywhere. */
static inline uint64_t check_random(uint64_t *state) {
  uint64_t x = *state;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  *state = x;
  return x * UINT64_C(2685821657736338717);
}
#endif
