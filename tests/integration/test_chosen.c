/* Operators chosen at run time, as the experts of a mixture: a random router over many iterations departs from no plan,
 * and what is fetched are the misses of a cache that a model here, which knows nothing of the library, counts.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>
#include <string.h>

#include "../check.h"
#include "../handles.h"
#include "figures.h"
#include "gemini.h"
#include "gemini/chosen.h"

#define OK(call) CHECK_EQ(call, GEMINI_OK)
enum { LAYERS = 6, EXPERTS = 8, CHUNK = 65536, WORDS = CHUNK / 4, ALL = LAYERS * EXPERTS };

/* ---- a mixture in miniature: in each layer a dense operator, then those of the experts chosen, two of eight */
typedef struct {
  gemini_manager_t mgr;
  gemini_arena_t arena;
  gemini_tensor_t dense[LAYERS], expert[ALL];
  uint64_t seed;
  uint32_t chosen[LAYERS][2]; /* of the last pass */
} net_t;

static uint32_t draw(net_t *n, uint32_t below) {
  n->seed = n->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)(n->seed >> 33) % below;
}

static void fill(net_t *n, gemini_tensor_t tensor, uint32_t value) {
  gemini_access_t w = ACCESS(tensor, 0, 0, GEMINI_WRITE, GEMINI_TIER_HOST);
  OK(gemini_acquire(n->mgr, &w, 1, GEMINI_STREAM_CALLER));
  for (uint32_t k = 0; k < WORDS; k++) ((uint32_t *)w.ptr)[k] = value << 16 | k;
  OK(gemini_release(n->mgr, &w, 1, GEMINI_STREAM_CALLER));
}

static figures_t figures_of(gemini_manager_t mgr) {
  figures_t f;
  OK(figures_read(mgr, &f));
  return f;
}

static net_t net_open(uint32_t frames, uint64_t seed) {
  net_t n = { .seed = seed };
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device_bytes = (uint64_t)frames * CHUNK;
  c.host_bytes = 16 << 20;
  c.chunk_bytes = CHUNK;
  OK(gemini_manager_open(&c, &n.mgr));
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  a.element_bytes = 4;
  a.capacity_bytes = (LAYERS + ALL) * CHUNK;
  OK(gemini_arena_create(n.mgr, &a, &n.arena));
  for (uint32_t i = 0; i < LAYERS + ALL; i++) {
    char name[32];
    gemini_tensor_t *tensor = i < LAYERS ? &n.dense[i] : &n.expert[i - LAYERS];
    snprintf(name, sizeof name, "%s %u", i < LAYERS ? "dense" : "expert", i);
    OK(gemini_tensor_register(n.mgr, n.arena, name, CHUNK, GEMINI_OFFSET_NEXT, tensor));
    fill(&n, *tensor, i);
  }
  return n;
}

/* Reads the whole tensor in an operator, and looks whether its bytes are right. */
static void op(net_t *n, const char *name, bool chosen, gemini_tensor_t tensor, uint32_t value) {
  gemini_access_t use = ACCESS(tensor, 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
  if (chosen) OK(gemini_op_begin_chosen(n->mgr, name, GEMINI_STREAM_CALLER));
  else OK(gemini_op_begin(n->mgr, name, GEMINI_STREAM_CALLER));
  OK(gemini_acquire(n->mgr, &use, 1, GEMINI_STREAM_CALLER));
  bool right = true;
  for (uint32_t k = 0; k < WORDS; k++) right &= ((uint32_t *)use.ptr)[k] == (value << 16 | k);
  CHECK(right);
  OK(gemini_release(n->mgr, &use, 1, GEMINI_STREAM_CALLER));
  OK(gemini_op_end(n->mgr));
}

/* One pass. The router prefers low numbers. */
static void pass_of(net_t *n, uint64_t label, bool backwards) {
  char name[32];
  OK(gemini_iteration_begin_with(n->mgr, label));
  for (uint32_t i = 0; i < LAYERS; i++) {
    const uint32_t l = backwards ? LAYERS - 1 - i : i;
    snprintf(name, sizeof name, "dense %u", l);
    op(n, name, false, n->dense[l], l);
    uint32_t first = draw(n, 1 + draw(n, EXPERTS)), second = draw(n, EXPERTS - 1);
    second += second >= first;
    n->chosen[l][0] = l * EXPERTS + (first < second ? first : second);
    n->chosen[l][1] = l * EXPERTS + (first < second ? second : first);
    for (uint32_t k = 0; k < 2; k++) {
      snprintf(name, sizeof name, "expert %u", n->chosen[l][k]);
      op(n, name, true, n->expert[n->chosen[l][k]], LAYERS + n->chosen[l][k]);
    }
  }
  OK(gemini_iteration_end(n->mgr));
}

static void pass(net_t *n) { pass_of(n, 0, false); }

/* ---- the model: recency[0] was used last */
typedef struct {
  uint32_t recency[ALL], count;
  uint64_t uses, misses;
} lru_t;
static void lru_use(lru_t *lru, uint32_t expert, uint32_t capacity) {
  uint32_t at = 0;
  while (at < lru->count && lru->recency[at] != expert) at++;
  lru->uses++;
  lru->misses += at >= capacity || at == lru->count;
  if (at == lru->count) lru->count++;
  memmove(lru->recency + 1, lru->recency, at * sizeof *lru->recency);
  lru->recency[0] = expert;
}
static void lru_pass_of(lru_t *lru, const net_t *n, uint32_t capacity, bool backwards) {
  for (uint32_t l = 0; l < LAYERS; l++)
    for (uint32_t k = 0; k < 2; k++) lru_use(lru, n->chosen[backwards ? LAYERS - 1 - l : l][k], capacity);
}
static void lru_pass(lru_t *lru, const net_t *n, uint32_t capacity) { lru_pass_of(lru, n, capacity, false); }

static void test_random_router_fetches_misses_of_lru(void) {
  static const uint32_t caches[] = { 4, 14, 30 };
  for (uint32_t i = 0; i < sizeof caches / sizeof *caches; i++) {
    net_t n = net_open(LAYERS + caches[i], 7 + i);
    lru_t lru = { 0 };
    for (int k = 0; k < 40; k++) pass(&n), lru_pass(&lru, &n, caches[i]);
    const uint64_t plans = figures_of(n.mgr).plans;
    OK(gemini_stats_reset(n.mgr));
    lru.uses = lru.misses = 0;
    for (int k = 0; k < 200; k++) pass(&n), lru_pass(&lru, &n, caches[i]);
    const figures_t f = figures_of(n.mgr);
    CHECK_EQ(f.departures, 0);
    CHECK(plans <= 2);
    CHECK_EQ(f.plans, plans);
    CHECK_EQ(f.planned_iterations, 239);
    CHECK_EQ(lru.uses, 200 * LAYERS * 2);
    CHECK(lru.misses > 100 && (lru.misses < lru.uses) == (caches[i] > 4)); /* a pass chooses twelve */
    CHECK_EQ(f.acquire_misses, lru.misses);
    CHECK_EQ(f.moved_bytes[LINK_H2D][GEMINI_REASON_DEMAND], lru.misses * CHUNK);
    CHECK_EQ(f.moved_bytes[LINK_H2D][GEMINI_REASON_PLAN], 0);
    CHECK_EQ(f.moved_bytes[LINK_D2H][GEMINI_REASON_PRESSURE], 0);
    OK(gemini_manager_close(n.mgr));
  }
}

/* Two kinds of passes, in an order that cannot be foreseen: what the cache has stays when the plan changes, and so do
 * the chunks that both plans keep. */
static void test_cache_stays_when_another_plan_begins(void) {
  enum { CACHE = 16 };
  net_t n = net_open(LAYERS + CACHE, 21);
  lru_t lru = { 0 };
  for (int k = 0; k < 240; k++) {
    const bool backwards = draw(&n, 3) == 0;
    if (k == 60) {
      OK(gemini_stats_reset(n.mgr));
      lru.misses = 0;
    }
    pass_of(&n, backwards, backwards);
    lru_pass_of(&lru, &n, CACHE, backwards);
  }
  const figures_t f = figures_of(n.mgr);
  CHECK_EQ(f.departures, 0);
  CHECK(lru.misses > 100);
  CHECK_EQ(f.acquire_misses, lru.misses);
  CHECK_EQ(f.moved_bytes[LINK_H2D][GEMINI_REASON_PLAN], 0);
  OK(gemini_manager_close(n.mgr));
}

/* A pass of one kind that chooses none. */
static void dense_pass(net_t *n) {
  char name[32];
  OK(gemini_iteration_begin(n->mgr));
  for (uint32_t l = 0; l < LAYERS; l++) {
    snprintf(name, sizeof name, "dense %u", l);
    op(n, name, false, n->dense[l], l);
  }
  OK(gemini_iteration_end(n->mgr));
}

/* Not all dense chunks fit: the plan moves them, and two frames are left for chosen operators, also where those come
 * later than the first plan. */
static void test_plan_that_moves_leaves_frames_for_chosen_ops(void) {
  for (int dense = 0; dense < 10; dense += 5) {
    net_t n = net_open(LAYERS, 3);
    for (int k = 0; k < dense; k++) dense_pass(&n);
    for (int k = 0; k < 10; k++) pass(&n);
    OK(gemini_stats_reset(n.mgr));
    for (int k = 0; k < 50; k++) pass(&n);
    const figures_t f = figures_of(n.mgr);
    CHECK_EQ(f.departures, 0);
    CHECK(f.plans <= 3);
    CHECK_EQ(f.planned_iterations, 59 + dense);
    /* All but four of the dense chunks are fetched in each pass, by the plan, and never more than twice as many. */
    const uint64_t planned = f.moved_chunks[LINK_H2D][GEMINI_REASON_PLAN];
    CHECK(planned >= 50 * 2 && planned <= 50 * 4);
    CHECK(f.moved_chunks[LINK_H2D][GEMINI_REASON_DEMAND] <= 50 * LAYERS * 2);
    CHECK_EQ(f.moved_bytes[LINK_D2H][GEMINI_REASON_PRESSURE], 0);
    OK(gemini_manager_close(n.mgr));
  }
}

/* A pass of dense operators alone is of the same kind, and so is one that chooses all. */
static void test_other_numbers_of_chosen_ops_are_no_departure(void) {
  net_t n = net_open(LAYERS + 10, 5);
  for (int k = 0; k < 5; k++) pass(&n);
  for (uint32_t from = 0; from < 4; from++) {
    OK(gemini_iteration_begin(n.mgr));
    for (uint32_t l = 0; l < LAYERS; l++) {
      char name[32];
      snprintf(name, sizeof name, "dense %u", l);
      op(&n, name, false, n.dense[l], l);
      for (uint32_t e = from & 1 ? 0 : EXPERTS; e < EXPERTS; e++)
        op(&n, "any name", true, n.expert[l * EXPERTS + e], LAYERS + l * EXPERTS + e);
    }
    OK(gemini_iteration_end(n.mgr));
  }
  CHECK_EQ(figures_of(n.mgr).departures, 0);
  CHECK_EQ(figures_of(n.mgr).planned_iterations, 8);
  OK(gemini_manager_close(n.mgr));
}

/* What a chosen operator writes is kept, wherever the chunk goes. */
static void test_chosen_op_that_writes_keeps_the_bytes(void) {
  net_t n = net_open(LAYERS + 3, 9);
  for (uint32_t round = 1; round <= 4; round++) {
    pass(&n);
    OK(gemini_iteration_begin(n.mgr));
    for (uint32_t e = 0; e < ALL; e++) {
      gemini_access_t use = ACCESS(n.expert[e], 0, 0, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE);
      OK(gemini_op_begin_chosen(n.mgr, "write", GEMINI_STREAM_CALLER));
      OK(gemini_acquire(n.mgr, &use, 1, GEMINI_STREAM_CALLER));
      for (uint32_t k = 0; k < WORDS; k++) ((uint32_t *)use.ptr)[k] ^= round << 28; /* pass() wants the old bytes */
      OK(gemini_release(n.mgr, &use, 1, GEMINI_STREAM_CALLER));
      OK(gemini_op_end(n.mgr));
    }
    for (uint32_t e = 0; e < ALL; e++) {
      gemini_access_t use = ACCESS(n.expert[e], 0, 0, GEMINI_READ_WRITE, GEMINI_TIER_HOST);
      OK(gemini_acquire(n.mgr, &use, 1, GEMINI_STREAM_CALLER));
      for (uint32_t k = 0; k < WORDS; k++) {
        CHECK_EQ(((uint32_t *)use.ptr)[k], ((LAYERS + e) << 16 | k) ^ round << 28);
        ((uint32_t *)use.ptr)[k] ^= round << 28;
      }
      OK(gemini_release(n.mgr, &use, 1, GEMINI_STREAM_CALLER));
    }
    OK(gemini_iteration_end(n.mgr));
  }
  OK(gemini_manager_close(n.mgr));
}

static void test_lack_of_room_names_the_chosen_op(void) {
  net_t n = net_open(3, 1);
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  gemini_access_t use[4];
  for (uint32_t e = 0; e < 4; e++) use[e] = (gemini_access_t)ACCESS(n.expert[e], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
  OK(gemini_iteration_begin(n.mgr));
  OK(gemini_op_begin_chosen(n.mgr, "four experts", GEMINI_STREAM_CALLER));
  CHECK_EQ(gemini_acquire(n.mgr, use, 4, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
  OK(gemini_last_error(&info));
  CHECK(strstr(info.message, "four experts"));
  OK(gemini_acquire(n.mgr, use, 3, GEMINI_STREAM_CALLER));
  OK(gemini_release(n.mgr, use, 3, GEMINI_STREAM_CALLER));
  OK(gemini_op_end(n.mgr));
  OK(gemini_iteration_end(n.mgr));
  OK(gemini_manager_close(n.mgr));
}

int main(void) {
  RUN(test_random_router_fetches_misses_of_lru);
  RUN(test_cache_stays_when_another_plan_begins);
  RUN(test_plan_that_moves_leaves_frames_for_chosen_ops);
  RUN(test_other_numbers_of_chosen_ops_are_no_departure);
  RUN(test_chosen_op_that_writes_keeps_the_bytes);
  RUN(test_lack_of_room_names_the_chosen_op);
  return check_done();
}
