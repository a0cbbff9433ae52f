/* The seed of a random test, and the command that repeats the test with it. SPDX-License-Identifier: Apache-2.0
 *
 *   uint64_t seed = seed_begin(__func__); // GEMINI_STRESS_SEED, or from the clock; prints the command
 *
 * A test that runs several programs, each with its own seed, prints the command again for the one that fails. */
#ifndef SEED_H
#define SEED_H

#include <errno.h>
#include <sys/personality.h>
#include <time.h>

#include "check.h"

/* The number in an environment variable, or otherwise if it is unset; anything but a number ends the process. */
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

static char seed_rest[CHECK_WORDS + 512]; /* the command after the seed's assignment; set by seed_begin() */

/* Formats the line with the command that repeats the seed; returns its length. Signal handlers may call it after
 * seed_begin(). */
static inline size_t seed_line(char *line, size_t size, uint64_t seed) {
  int length = snprintf(line, size, "  again: GEMINI_STRESS_SEED=%" PRIu64 " %s\n", seed, seed_rest);
  return length < 0 ? 0 : (size_t)length < size ? (size_t)length : size - 1;
}
static inline void seed_print(uint64_t seed) {
  char line[sizeof seed_rest + 64];
  fwrite(line, 1, seed_line(line, sizeof line, seed), stderr);
}

/* Chooses and prints the seed. test: the function's name, with which the command runs this test alone. */
static inline uint64_t seed_begin(const char *test) {
  static const char *const settings[] = { "GEMINI_STRESS_STEPS", "GEMINI_KILLS", "GEMINI_FUZZ_SECONDS" };
  size_t used = 0;
  for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
    if (getenv(settings[i]))
      used +=
          (size_t)snprintf(seed_rest + used, sizeof seed_rest - used, "%s=%.40s ", settings[i], getenv(settings[i]));
  /* Under the thread sanitizer, tests/CMakeLists.txt starts programs by setarch -R: the command does the same. */
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
