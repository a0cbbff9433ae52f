/* Names of operators: kept once, and no longer than a trace has them. SPDX-License-Identifier: Apache-2.0 */
#include "../integration/world.h"
#include "tracer/op_names.h"
#include "tracer/tracer.h"

static void test_name_lives_as_long_as_it_is_taken(void) {
  gmi_op_names_t *names = gmi_op_names_new();
  CHECK(names);
  const char *a = gmi_op_name_take(names, "a"), *b = gmi_op_name_take(names, "b");
  CHECK(a && b && a != b && !strcmp(a, "a") && !strcmp(b, "b"));
  CHECK(gmi_op_name_take(names, "a") == a);
  CHECK(gmi_op_name_again(a) == a);
  CHECK_EQ(gmi_op_names_count(names), 2);
  gmi_op_name_drop(names, a);
  gmi_op_name_drop(names, b);
  CHECK_EQ(gmi_op_names_count(names), 1);
  gmi_op_name_drop(names, a);
  CHECK(gmi_op_name_take(names, "a") == a);
  gmi_op_name_drop(names, a);
  gmi_op_name_drop(names, a);
  CHECK_EQ(gmi_op_names_count(names), 0);
  gmi_op_names_free(names);
}

static void test_many_names_are_told_apart(void) {
  enum { COUNT = 5000 };
  gmi_op_names_t *names = gmi_op_names_new();
  static const char *kept[COUNT];
  char text[32];
  for (int i = 0; i < COUNT; i++) {
    snprintf(text, sizeof text, "layer.%d", i);
    CHECK(kept[i] = gmi_op_name_take(names, text));
  }
  for (int i = 0; i < COUNT; i += 2) gmi_op_name_drop(names, kept[i]);
  for (int i = 1; i < COUNT; i += 2) {
    snprintf(text, sizeof text, "layer.%d", i);
    CHECK(gmi_op_name_take(names, text) == kept[i]);
  }
  CHECK_EQ(gmi_op_names_count(names), COUNT / 2);
  gmi_op_names_free(names);
}

/* A loop that names its operators after the step, as some do, must not grow for ever. */
static void test_names_of_steps_that_are_over_go(void) {
  world_t w = world_open(world_config(4, 4, 0));
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  for (int step = 0; step < 300; step++) {
    CHECK_OK(gemini_iteration_begin(w.mgr));
    for (int op = 0; op < 5; op++) {
      char name[32];
      snprintf(name, sizeof name, op ? "op.%d.%d" : "op", step, op);
      CHECK_OK(gemini_op_begin(w.mgr, name, w.stream));
      CHECK_OK(gemini_op_end(w.mgr));
    }
    CHECK_OK(gemini_iteration_end(w.mgr));
  }
  CHECK(gmi_op_names_count(gmi_tracer_names(m)) <= 5 * (GMI_VARIANTS + 1));
  world_close(&w);
}

int main(void) {
  RUN(test_name_lives_as_long_as_it_is_taken);
  RUN(test_many_names_are_told_apart);
  RUN(test_names_of_steps_that_are_over_go);
  return check_done();
}
