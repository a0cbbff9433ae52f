/* The test framework itself: which tests its arguments choose, when that has failed, and seeds.
 * SPDX-License-Identifier: Apache-2.0 */
#include "../seed.h"

#include <sys/wait.h>

/* This program runs itself with arguments; these tests are there to be chosen. */
static void test_sample_red(void) { printf("red ran\n"); }
static void test_sample_green(void) { printf("green ran\n"); }

/* A random test, which fails where this program is run by the test of seeds. */
static void test_sample_random(void) {
  if (!getenv("GEMINI_CHECK_SAMPLE")) return;
  uint64_t random = seed_begin(__func__);
  printf("drew %" PRIu64 "\n", check_random(&random));
  CHECK(false);
}

typedef struct {
  int status;
  char text[4096]; /* stdout and stderr */
} run_t;
static run_t run_command(const char *words) {
  char command[CHECK_WORDS + 600];
  run_t result = { 0 };
  snprintf(command, sizeof command, "%s 2>&1", words);
  fflush(NULL);
  FILE *pipe = popen(command, "r");
  CHECK(pipe);
  CHECK(fread(result.text, 1, sizeof result.text - 1, pipe) < sizeof result.text - 1);
  int end = pclose(pipe);
  CHECK(WIFEXITED(end));
  result.status = WEXITSTATUS(end);
  return result;
}
static run_t run(const char *arguments) {
  char command[CHECK_WORDS + 100];
  snprintf(command, sizeof command, "'%s' %s", check_run.words, arguments);
  return run_command(command);
}
static uint32_t lines(const char *text) {
  uint32_t count = 0;
  while ((text = strchr(text, '\n'))) text++, count++;
  return count;
}

static void test_a_word_chooses_the_tests_that_have_it_in_their_names(void) {
  run_t r = run("sample_red");
  CHECK_EQ(r.status, 0);
  CHECK_SAYS(r.text, "red ran\n");
  CHECK(!strstr(r.text, "green ran"));
  CHECK_EQ(lines(r.text), 2); /* its name, once, and what it says */
  r = run("test_sample");
  CHECK_EQ(r.status, 0);
  CHECK_SAYS(r.text, "red ran\n");
  CHECK_SAYS(r.text, "green ran\n");
  CHECK_EQ(lines(r.text), 7);
  r = run("_green sample_red");
  CHECK_EQ(r.status, 0);
  CHECK_EQ(lines(r.text), 6);
}

static void test_a_word_that_no_name_has_fails(void) {
  run_t r = run("sample_blue");
  CHECK_EQ(r.status, 1);
  CHECK_SAYS(r.text, "no test here has 'sample_blue' in its name; --list prints the names\n");
  CHECK_EQ(lines(r.text), 1);
  r = run("sample_red sample_blue sample_brown"); /* what is there runs, and the program has failed all the same */
  CHECK_EQ(r.status, 1);
  CHECK_SAYS(r.text, "red ran\n");
  CHECK_SAYS(r.text, "'sample_blue'");
  CHECK_SAYS(r.text, "'sample_brown'");
}

static void test_list_prints_each_name_once_and_runs_nothing(void) {
  run_t r = run("--list");
  CHECK_EQ(r.status, 0);
  CHECK(!strstr(r.text, " ran"));
  CHECK_SAYS(r.text, "test_sample_red\n");
  CHECK_SAYS(r.text, "test_list_prints_each_name_once_and_runs_nothing\n");
  CHECK_EQ(lines(r.text), 8);
}

static void test_other_options_are_refused(void) {
  static const char *const options[] = { "-x", "--lis", "sample_red --run", "--list -l", "''" };
  for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
    run_t r = run(options[i]);
    CHECK_EQ(r.status, 2);
    CHECK_SAYS(r.text, "want --list, or parts of the names of the tests to run\n");
    CHECK_EQ(lines(r.text), 1);
  }
}

static void test_a_random_test_prints_the_command_that_runs_it_again(void) {
  CHECK(!setenv("GEMINI_CHECK_SAMPLE", "1", 1) && !unsetenv("GEMINI_STRESS_SEED"));
  run_t first = run("sample_random");
  CHECK_EQ(first.status, 1);
  char *command = strstr(first.text, "again: "), *drew = strstr(first.text, "drew ");
  CHECK(command && drew);
  *strchr(drew, '\n') = 0;
  command += strlen("again: ");
  *strchr(command, '\n') = 0;
  run_t again = run_command(command);
  CHECK_EQ(again.status, 1);
  CHECK_SAYS(again.text, drew);
  CHECK_SAYS(again.text, command);
  CHECK(!strstr(again.text, "green ran"));
  CHECK(!setenv("GEMINI_STRESS_SEED", "12x", 1));
  CHECK_SAYS(run("sample_random").text, "GEMINI_STRESS_SEED is \"12x\", not a number\n");
  CHECK(!unsetenv("GEMINI_STRESS_SEED") && !unsetenv("GEMINI_CHECK_SAMPLE"));
}

int main(void) {
  RUN(test_sample_red);
  for (int i = 0; i < 2; i++) RUN(test_sample_green); /* as programs do that run their tests in several ways */
  RUN(test_list_prints_each_name_once_and_runs_nothing);
  RUN(test_a_word_chooses_the_tests_that_have_it_in_their_names);
  RUN(test_a_word_that_no_name_has_fails);
  RUN(test_other_options_are_refused);
  RUN(test_sample_random);
  RUN(test_a_random_test_prints_the_command_that_runs_it_again);
  return check_done();
}
