/* The log of a manager without a log_fn: GEMINI_LOG in the environment. SPDX-License-Identifier: Apache-2.0 */
#include <sys/mman.h>

#include "gemini/hook.h"
#include "world.h"

/* What a manager writes to stderr that opens, cuts its arenas into chunks (information) and refuses a block for a
 * framework (a warning). */
static char text[4096];
static void remember(void *user, int32_t level, const char *message) {
  snprintf((char *)user + strlen(user), 200, "%d %s\n", level, message);
}
static const char *written(const char *setting, gemini_log_fn log_fn, void *log_user) {
  CHECK(!(setting ? setenv("GEMINI_LOG", setting, 1) : unsetenv("GEMINI_LOG")));
  int fd = memfd_create("stderr", MFD_CLOEXEC), kept = dup(STDERR_FILENO);
  CHECK(fd >= 0 && kept >= 0 && dup2(fd, STDERR_FILENO) >= 0);
  gemini_config_t c = world_config(4, 4, 0);
  c.log_fn = log_fn;
  c.log_user = log_user;
  world_t w = world_open(c);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, NULL, 0, 0);
  world_fill(&w, world_tensor(&w, arena, "t", 100), 0, 100, GEMINI_TIER_HOST, 1);
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  CHECK(!gemini_torch_malloc(-1, 0, NULL));
  CHECK_OK(gemini_hook_clear(w.mgr));
  world_close(&w);
  CHECK(dup2(kept, STDERR_FILENO) >= 0);
  ssize_t size = pread(fd, text, sizeof text - 1, 0);
  CHECK(size >= 0);
  text[size] = 0;
  CHECK(!close(fd) && !close(kept) && !unsetenv("GEMINI_LOG"));
  return text;
}

static void test_log_without_a_setting_is_silent(void) {
  CHECK(!*written(NULL, NULL, NULL));
  CHECK(!*written("", NULL, NULL));
}

static void test_log_in_the_environment_goes_to_stderr(void) {
  CHECK(!*written("error", NULL, NULL));
  CHECK_SAYS(written("warning", NULL, NULL), "libgemini: warning: hook: ");
  CHECK(!strstr(text, "info"));
  for (int i = 0; i < 2; i++) {
    CHECK_SAYS(written(i ? "debug" : "info", NULL, NULL), "libgemini: info: chunks of 65536 bytes, 4 device frames\n");
    CHECK_SAYS(text, "libgemini: warning: hook: ");
  }
}

static void test_log_of_the_callers_own_comes_first(void) {
  char own[1000] = "";
  CHECK(!*written("info", remember, own));
  CHECK_SAYS(own, "2 hook: ");
  CHECK(!strstr(own, "chunks of")); /* the level is the configuration's, too */
  CHECK(!*written("nonsense", remember, own));
}

static void test_log_of_an_unknown_level_is_refused(void) {
  static const char *const words[] = { "warn", "Info", "3", " info", "info " };
  gemini_config_t c = world_config(4, 4, 0);
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    gemini_manager_t mgr = 0;
    CHECK(!setenv("GEMINI_LOG", words[i], 1));
    CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().message, "want error, warning, info or debug");
    CHECK_SAYS(world_error().message, words[i]);
    CHECK(!mgr);
  }
  CHECK(!unsetenv("GEMINI_LOG"));
}

/* The watchdog needs a log; this is one. */
static void test_log_in_the_environment_serves_the_watchdog(void) {
  gemini_config_t c = world_config(4, 4, 0);
  gemini_manager_t mgr;
  c.watchdog_ns = UINT64_C(1000000000);
  CHECK(!setenv("GEMINI_LOG", "warning", 1));
  CHECK_OK(gemini_manager_open(&c, &mgr));
  CHECK_OK(gemini_manager_close(mgr));
  CHECK(!setenv("GEMINI_LOG", "error", 1));
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  CHECK(!unsetenv("GEMINI_LOG"));
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
}

int main(void) {
  RUN(test_log_without_a_setting_is_silent);
  RUN(test_log_in_the_environment_goes_to_stderr);
  RUN(test_log_of_the_callers_own_comes_first);
  RUN(test_log_of_an_unknown_level_is_refused);
  RUN(test_log_in_the_environment_serves_the_watchdog);
  return check_done();
}
