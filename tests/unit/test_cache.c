/* The policies of the cache, one by one (policy/cache.h). SPDX-License-Identifier: Apache-2.0 */
#include "../check.h"
#include "policy/cache.h"

enum { LRU = GEMINI_CACHE_LRU, FREQUENT = GEMINI_CACHE_FREQUENT, LEAST_STALE = GEMINI_CACHE_LEAST_STALE };

static gmi_cache_now_t at(uint32_t policy, uint64_t pass, uint32_t position) {
  return (gmi_cache_now_t){ .pass = pass, .position = position, .policy = policy };
}
static gmi_cache_note_t used_in(uint64_t first, uint64_t last, uint64_t step, uint32_t position) {
  gmi_cache_note_t note = { 0 };
  for (uint64_t pass = first; pass <= last; pass += step) {
    const gmi_cache_now_t now = at(LRU, pass, position);
    for (int twice = 0; twice < 2; twice++) gmi_cache_use(&note, &now); /* in one pass counts once */
  }
  return note;
}
static uint64_t rank_of(gmi_cache_note_t note, uint32_t policy, uint64_t pass, uint32_t position) {
  const gmi_cache_now_t now = at(policy, pass, position);
  return gmi_cache_rank(&note, &now);
}

static void test_lru_leaves_all_to_the_order_of_uses(void) {
  CHECK_EQ(rank_of(used_in(1, 50, 1, 3), LRU, 60, 5), rank_of(used_in(59, 59, 1, 9), LRU, 60, 5));
}

static void test_frequent_counts_passes_and_forgets(void) {
  const gmi_cache_note_t often = used_in(1, 100, 2, 3), seldom = used_in(4, 100, 8, 3), once = used_in(101, 101, 1, 3);
  CHECK(rank_of(often, FREQUENT, 102, 9) < rank_of(seldom, FREQUENT, 102, 9));
  CHECK(rank_of(seldom, FREQUENT, 102, 9) < rank_of(once, FREQUENT, 102, 9));
  /* What was used often, long ago, counts less than what was used once now. */
  CHECK(rank_of(often, FREQUENT, 100 + 16 * 5, 9) >
        rank_of(used_in(100 + 16 * 5, 100 + 16 * 5, 1, 3), FREQUENT, 100 + 16 * 5, 9));
  /* It never counts more for having waited, and nothing at last. */
  for (uint64_t pass = 100; pass < 1000; pass++)
    CHECK(rank_of(often, FREQUENT, pass, 9) <= rank_of(often, FREQUENT, pass + 1, 9));
  CHECK_EQ(rank_of(often, FREQUENT, 1000, 9), rank_of((gmi_cache_note_t){ 0 }, FREQUENT, 1000, 9));
  /* Half after 16 passes. */
  const gmi_cache_note_t one = used_in(1, 1, 1, 3), two = used_in(1, 2, 1, 3);
  CHECK_EQ(one.frequency, 65536);
  CHECK_EQ(rank_of(one, FREQUENT, 17, 9) - rank_of(one, FREQUENT, 1, 9), 32768);
  CHECK(two.frequency < 2 * 65536 && two.frequency > 65536 + 65536 * 9 / 10);
}

static void test_least_stale_knows_what_comes_next(void) {
  const uint32_t position = 10;
  const gmi_cache_note_t none = { 0 };
  const gmi_cache_note_t order[] = {
    none,                 /* no one knows when it comes */
    used_in(6, 6, 1, 9),  /* the layer before: not chosen in this pass, comes last */
    used_in(2, 2, 1, 4),  /* an earlier layer, which comes sooner */
    used_in(7, 7, 1, 9),  /* likewise, chosen in this pass */
    used_in(7, 7, 1, 4),  /* an earlier one */
    used_in(6, 6, 1, 30), /* ahead: the layer that comes last */
    used_in(6, 6, 1, 11), /* the next layer */
    used_in(6, 6, 1, 10), /* this layer: may be chosen at any time */
  };
  for (uint32_t i = 0; i + 1 < sizeof order / sizeof *order; i++)
    CHECK(rank_of(order[i], LEAST_STALE, 7, position) > rank_of(order[i + 1], LEAST_STALE, 7, position));
}

static void test_hinted_and_wanted_chunks_leave_last(void) {
  for (uint32_t policy = LRU; policy <= LEAST_STALE; policy++) {
    gmi_cache_note_t note = used_in(1, 3, 1, 2), other = used_in(1, 30, 1, 40);
    CHECK(rank_of(note, policy, 31, 20) >= rank_of(other, policy, 31, 20));
    note.priority = 1;
    CHECK(rank_of(note, policy, 31, 20) < rank_of(other, policy, 31, 20));
    other.priority = GMI_CACHE_PRIORITY_MOST;
    CHECK(rank_of(note, policy, 31, 20) > rank_of(other, policy, 31, 20));
    note.hinted = 31;
    CHECK_EQ(rank_of(note, policy, 31, 20), 0);
    CHECK(rank_of(other, policy, 31, 20) > 0);
    CHECK(rank_of(note, policy, 32, 20) > 0); /* the pass has ended */
    const gmi_cache_now_t now = at(policy, 31, 21);
    gmi_cache_use(&note, &now);
    CHECK(rank_of(note, policy, 31, 22) > 0); /* it was used */
    CHECK_EQ(note.priority, 1);
  }
}

int main(void) {
  RUN(test_lru_leaves_all_to_the_order_of_uses);
  RUN(test_frequent_counts_passes_and_forgets);
  RUN(test_least_stale_knows_what_comes_next);
  RUN(test_hinted_and_wanted_chunks_leave_last);
  return check_done();
}
