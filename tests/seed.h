/* The seed of a random test, and the command that runs the test with it again. SPDX-License-Identifier: Apache-2.0
 *
 *   uint64_t seed = seed_begin(__func__); // GEMINI_STRESS_SEED, or from the clock; prints the command
 *
 * A test that runs several programs, with a seed each, prints the command once more for the one that fails. */
#ifndef SEED_H
#define SEED_H

#include <errno.h>
#include <sys/personality.h>
#include <time.h>

#include "check.h"

/* The number in an environment variable; what is no number is refused. */
static inline uint64_t seed_setting(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  if (!text || !*text) return otherwise;
  char *end;
  errno = 0;
  uint64_t value = strtoull(text, &end, 0);
  if (errno || *end) {
    fprintf(stderr, "%s is \"%s\", not a number\n", name, text);
    exit(1);
  }
  return value;
}

static char seed_rest[CHECK_WORDS + 512]; /* of the command, behind the seed */

/* The line that says how to run the seed again; returns its length. For signal handlers, too, once the test has begun. */
static inline size_t seed_line(char *line, size_t size, uint64_t seed) {
  int length = snprintf(line, size, "  again: GEMINI_STRESS_SEED=%" PRIu64 " %s\n", seed, seed_rest);
  return length < 0 ? 0 : (size_t)length < size ? (size_t)length : size - 1;
}
static inline void seed_print(uint64_t seed) {
  char line[sizeof seed_rest + 64];
  fwrite(line, 1, seed_line(line, sizeof line, seed), stderr);
}

/* test: the name of the function, by which the program runs it alone. */
static inline uint64_t seed_begin(const char *test) {
  static const char *const settings[] = { "GEMINI_STRESS_STEPS", "GEMINI_KILLS", "GEMINI_FUZZ_SECONDS" };
  size_t used = 0;
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
    if (getenv(settings[i]))
      used +=
          (size_t)snprintf(seed_rest + used, sizeof seed_rest - used, "%s=%.40s ", settings[i], getenv(settings[i]));
  /* As tests/CMakeLists.txt starts programs with the thread sanitizer. */
  int flags = personality(0xffffffff);
  snprintf(seed_rest + used, sizeof seed_rest - used, "%s%s %s",
           flags >= 0 && flags & ADDR_NO_RANDOMIZE ? "setarch -R " : "", check_run.words, test);
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  uint64_t seed = ((uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000) % 1000000000;
  seed = seed_setting("GEMINI_STRESS_SEED", seed);
  seed_print(seed);
  return seed;
}

#endif
