/* Which kind of iteration is expected next. SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "check.h"
#include "core/manager.h"
#include "tracer/history.h"

/* The kind that is expected behind these, a digit each. */
static uint32_t next_of(const char *digits) {
  gmi_history_t h = { .count = 0 };
  for (const char *c = digits; *c; c++) gmi_history_add(&h, (uint32_t)(*c - '0'));
  return gmi_history_next(h.past, h.count);
}

static void test_longest_suffix_that_came_twice_decides(void) {
  CHECK_EQ(next_of(""), GMI_NONE);
  CHECK_EQ(next_of("0"), GMI_NONE);
  CHECK_EQ(next_of("00"), GMI_NONE); /* once is not enough */
  CHECK_EQ(next_of("000"), 0);
  CHECK_EQ(next_of("01"), GMI_NONE);
  CHECK_EQ(next_of("01010"), 1);
  CHECK_EQ(next_of("010101"), 0);
  CHECK_EQ(next_of("0001000100"), 0); /* behind 100 came 0, once; behind 00 came 0 and 1, twice each; the lower one */
  CHECK_EQ(next_of("00010001000"), 1);
  CHECK_EQ(next_of("000100010001000"), 1);
  CHECK_EQ(next_of("0001000100010001"), 0);
  CHECK_EQ(next_of("0000000002"), GMI_NONE); /* new */
}

static void test_oldest_iterations_are_dropped(void) {
  gmi_history_t h = { .count = 0 };
  for (uint32_t i = 0; i < GMI_HISTORY; i++) gmi_history_add(&h, 1);
  CHECK_EQ(h.count, GMI_HISTORY);
  for (uint32_t i = 0; i < 3; i++) gmi_history_add(&h, 2 + i);
  CHECK_EQ(h.count, GMI_HISTORY);
  CHECK_EQ(h.past[0], 1);
  CHECK_EQ(h.past[GMI_HISTORY - 4], 1);
  for (uint32_t i = 0; i < 3; i++) CHECK_EQ(h.past[GMI_HISTORY - 3 + i], 2 + i);
}

static void test_forgotten_kinds_leave_no_gap(void) {
  gmi_history_t h = { .count = 0 };
  for (const char *c = "0120120"; *c; c++) gmi_history_add(&h, (uint32_t)(*c - '0'));
  gmi_history_forget(&h, 2);
  CHECK_EQ(h.count, 5);
  CHECK(!memcmp(h.past, (uint8_t[]){ 0, 1, 0, 1, 0 }, 5));
  CHECK_EQ(gmi_history_next(h.past, h.count), 1);
}

int main(void) {
  RUN(test_longest_suffix_that_came_twice_decides);
  RUN(test_oldest_iterations_are_dropped);
  RUN(test_forgotten_kinds_leave_no_gap);
  return check_done();
}
