/* Structs of callers of other versions: what is copied, zeroed, refused. SPDX-License-Identifier: Apache-2.0 */
#include <stddef.h>

#include "../check.h"
#include "../handles.h"
#include "base/abi.h"
#include "base/status.h"
#include "chunk/accesses.h"

enum { V1 = 16, OURS = 32, LONGER = 48 };
typedef struct {
  uint32_t struct_size, words[11];
} record_t;

static record_t record_of(uint32_t size) {
  record_t r;
  memset(&r, 0x77, sizeof r);
  r.struct_size = size;
  return r;
}
static bool all_are(const void *from, size_t begin, size_t end, uint8_t value) {
  const uint8_t *bytes = from;
  while (begin < end && bytes[begin] == value) begin++;
  return begin == end;
}

static void test_shorter_input_is_copied_and_the_rest_is_zero(void) {
  for (uint32_t size = V1; size <= OURS; size++) {
    record_t theirs = record_of(size), ours;
    memset(&ours, 0xaa, sizeof ours);
    CHECK_EQ(gmi_struct_in(&ours, OURS, &theirs, V1, "record"), GEMINI_OK);
    CHECK_EQ(ours.struct_size, OURS);
    CHECK(all_are(&ours, 4, size, 0x77) && all_are(&ours, size, OURS, 0));
    CHECK(all_are(&ours, OURS, sizeof ours, 0xaa));
  }
}

static void test_longer_input_is_taken_while_the_rest_is_zero(void) {
  record_t theirs = record_of(LONGER), ours = { 0 };
  memset((char *)&theirs + OURS, 0, LONGER - OURS);
  CHECK_EQ(gmi_struct_in(&ours, OURS, &theirs, V1, "record"), GEMINI_OK);
  CHECK(ours.struct_size == OURS && all_are(&ours, 4, OURS, 0x77));
  for (int at = OURS; at < LONGER; at++) {
    char says[64];
    ((char *)&theirs)[at] = 1;
    memset(&ours, 0xaa, sizeof ours);
    CHECK_EQ(gmi_struct_in(&ours, OURS, &theirs, V1, "record"), GEMINI_ERR_INVALID);
    snprintf(says, sizeof says, "record: byte %d of %d is not 0, but this library", at, LONGER);
    CHECK_SAYS(gmi_fail_message(), says);
    CHECK_SAYS(gmi_fail_message(), "knows the first 32 only");
    CHECK(all_are(&ours, 0, sizeof ours, 0xaa));
    ((char *)&theirs)[at] = 0;
  }
}

static void test_input_below_version_1_or_above_4_kib_is_refused(void) {
  const uint32_t sizes[] = { 0, 1, 4, V1 - 1, 4097, UINT32_MAX };
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    record_t theirs = record_of(sizes[i]), ours;
    CHECK_EQ(gmi_struct_in(&ours, OURS, &theirs, V1, "record"), GEMINI_ERR_INVALID);
    CHECK_SAYS(gmi_fail_message(), "must be 16 to 4096");
    CHECK_EQ(gmi_struct_out(&theirs, &ours, OURS, V1, "record"), GEMINI_ERR_INVALID);
    CHECK_EQ(theirs.struct_size, sizes[i]);
  }
}

static void test_output_is_filled_to_what_both_know(void) {
  for (uint32_t size = V1; size <= LONGER; size++) {
    record_t theirs = record_of(size), ours;
    memset(&ours, 0xbb, sizeof ours);
    const uint32_t both = size < OURS ? size : OURS;
    CHECK_EQ(gmi_struct_out(&theirs, &ours, OURS, V1, "record"), GEMINI_OK);
    CHECK_EQ(theirs.struct_size, both);
    CHECK(all_are(&theirs, 4, both, 0xbb) && all_are(&theirs, both, sizeof theirs, 0x77));
  }
}

/* A caller whose accesses are longer: the stride is theirs, and ptr goes back to where it is in each. */
typedef struct {
  gemini_access_t known;
  uint64_t later[2];
} later_t;
static void test_accesses_of_another_size_are_copied_and_their_pointers_come_back(void) {
  enum { COUNT = 2 * GMI_SMALL_BATCH + 1 };
  static later_t theirs[COUNT + 1];
  for (uint64_t count = 1; count <= COUNT; count++) {
    gmi_accesses_t batch;
    memset(&batch, 0xaa, sizeof batch);
    for (uint64_t i = 0; i <= COUNT; i++) {
      theirs[i] = (later_t){ ACCESS(handle_of(100 + i), i, 2 * i, GEMINI_READ, GEMINI_TIER_HOST), { 0, 0 } };
      theirs[i].known.struct_size = sizeof(later_t);
    }
    CHECK(!gmi_accesses_are_ours(&theirs[0].known, count));
    CHECK_EQ(gmi_accesses_in(&batch, &theirs[0].known, count), GEMINI_OK);
    CHECK(batch.list == batch.copies && gmi_accesses_are_ours(batch.list, count));
    for (uint64_t i = 0; i < count; i++) {
      CHECK(handle_id(batch.list[i].object.tensor) == 100 + i && batch.list[i].offset_bytes == i &&
            batch.list[i].size_bytes == 2 * i);
      batch.copies[i].ptr = &theirs[i];
    }
    gmi_accesses_out(batch.copies, &theirs[0].known, count);
    for (uint64_t i = 0; i <= COUNT; i++) CHECK(theirs[i].known.ptr == (i < count ? &theirs[i] : NULL));
    for (uint64_t i = 0; i <= COUNT; i++) CHECK(!theirs[i].later[0] && !theirs[i].later[1]);
    gmi_accesses_free(&batch);
    theirs[count - 1].later[1] = 1;
    CHECK_EQ(gmi_accesses_in(&batch, &theirs[0].known, count), GEMINI_ERR_INVALID);
    char says[64];
    snprintf(says, sizeof says, "accesses[%d]: byte 56 of 64 is not 0", (int)count - 1);
    CHECK_SAYS(gmi_fail_message(), says);
  }
}

static void test_accesses_of_our_size_are_used_where_they_are(void) {
  gemini_access_t accesses[] = { GEMINI_ACCESS_INIT, GEMINI_ACCESS_INIT };
  gmi_accesses_t batch;
  CHECK_EQ(gmi_accesses_in(&batch, accesses, 2), GEMINI_OK);
  CHECK(batch.list == accesses && !batch.copies);
  gmi_accesses_free(&batch);
  CHECK_EQ(gmi_accesses_in(&batch, NULL, 0), GEMINI_OK);
  gmi_accesses_free(&batch);
}

int main(void) {
  RUN(test_shorter_input_is_copied_and_the_rest_is_zero);
  RUN(test_longer_input_is_taken_while_the_rest_is_zero);
  RUN(test_input_below_version_1_or_above_4_kib_is_refused);
  RUN(test_output_is_filled_to_what_both_know);
  RUN(test_accesses_of_another_size_are_copied_and_their_pointers_come_back);
  RUN(test_accesses_of_our_size_are_used_where_they_are);
  return check_done();
}
