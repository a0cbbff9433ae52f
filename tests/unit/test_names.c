/* Names in texts: those that are any bytes cannot break the lines of messages and dumps. SPDX-License-Identifier: Apache-2.0 */
#include "../integration/world.h"
#include "base/names.h"
#include "core/manager.h"

static void test_control_characters_are_escaped_and_nothing_else(void) {
  char out[16];
  gmi_text_escape(out, sizeof out, "a b%\xc3\xa4~");
  CHECK(!strcmp(out, "a b%\xc3\xa4~"));
  gmi_text_escape(out, sizeof out, "\x01\n\x1f \x7f");
  CHECK(!strcmp(out, "%01%0A%1F %7F"));
  gmi_text_escape(out, 6, "abc\ndef"); /* no part of an escape */
  CHECK(!strcmp(out, "abc"));
  gmi_text_escape(out, 7, "abc\ndef");
  CHECK(!strcmp(out, "abc%0A"));
  gmi_text_escape(out, 3, "abc");
  CHECK(!strcmp(out, "ab"));
}

static char logged[4096];
static void keep_log(void *user, int32_t level, const char *message) {
  (void)user, (void)level;
  snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s", message);
}

static void test_names_with_control_characters_do_not_break_messages_and_dumps(void) {
  static char text[8192];
  static const char name[] = "x\nfailed: no\x1b[2J", shown[] = "x%0Afailed: no%1B[2J";
  gemini_config_t c = world_config(4, 4, 0);
  c.log_fn = keep_log;
  c.log_level = GEMINI_LOG_DEBUG;
  world_t w = world_open(c);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "a\nb", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, name, WORLD_CHUNK), again;
  CHECK_STATUS(gemini_tensor_register(w.mgr, arena, name, 64, GEMINI_OFFSET_NEXT, &again), GEMINI_ERR_EXISTS);
  CHECK(!strchr(world_error().message, '\n') && !strchr(world_error().message, '\x1b'));
  CHECK_SAYS(world_error().message, shown);
  gemini_tensor_info_t info = world_tensor_info(&w, t);
  CHECK(!strcmp(info.name, name)); /* it is the caller's own */
  gemini_access_t a = world_whole(t, GEMINI_WRITE, GEMINI_TIER_HOST), zero = world_whole(t, 0, 0);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_zero(w.mgr, &zero), GEMINI_ERR_BUSY);
  CHECK_SAYS(world_error().message, "arena a%0Ab is");
  CHECK_OK(gemini_iteration_begin(w.mgr));
  CHECK_OK(gemini_op_begin(w.mgr, name, w.stream));
  CHECK_STATUS(gemini_op_begin(w.mgr, "other", w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, shown);
  CHECK_OK(gemini_manager_dump(w.mgr, sizeof text, text, NULL));
  CHECK(!strstr(text, "\nfailed: no") && !strchr(text, '\x1b'));
  CHECK_SAYS(text, "acquired: tensor x%0Afailed: no%1B[2J of arena a%0Ab, 1 times");
  CHECK_SAYS(text, "operator: x%0Afailed: no%1B[2J;");
  CHECK_OK(gemini_op_end(w.mgr));
  CHECK_OK(gemini_iteration_end(w.mgr));
  CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  gmi_lock(m, __func__);
  gmi_log(m, GEMINI_LOG_INFO, "a log of %s", name);
  gmi_unlock(m);
  CHECK_SAYS(logged, "a log of x%0Afailed: no%1B[2J");
  world_close(&w);
}

int main(void) {
  RUN(test_control_characters_are_escaped_and_nothing_else);
  RUN(test_names_with_control_characters_do_not_break_messages_and_dumps);
  return check_done();
}
