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

static net_t net_open(uint32_t frames, uint32_t policy, uint64_t seed) {
  net_t n = { .seed = seed };
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device_bytes = (uint64_t)frames * CHUNK;
  c.host_bytes = 16 << 20;
  c.chunk_bytes = CHUNK;
  c.cache_policy = policy;
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

/* ---- the model of a cache of so many chunks under a policy */
typedef struct {
  uint32_t policy, capacity;
  uint64_t clock, pass, misses;
  bool there[ALL];
  uint64_t last[ALL], pass_of[ALL];
  uint32_t position[ALL], frequency[ALL];
} model_t;

static uint32_t aged(uint32_t value, uint64_t passes) {
  for (; passes >= 16; passes -= 16) value /= 2;
  return value - (uint32_t)((uint64_t)value * passes / 32);
}

/* Does a leave before b? */
static bool before(const model_t *k, uint32_t a, uint32_t b, uint32_t position) {
  const uint32_t of[] = { a, b };
  uint64_t rank[2] = { 0, 0 };
  for (int i = 0; i < 2; i++) {
    const uint32_t e = of[i];
    const bool ahead = k->position[e] >= position, now = k->pass_of[e] == k->pass;
    if (k->policy == GEMINI_CACHE_FREQUENT) rank[i] = UINT32_MAX - aged(k->frequency[e], k->pass - k->pass_of[e]);
    if (k->policy == GEMINI_CACHE_LEAST_STALE) rank[i] = (ahead ? 0 : now ? 1000 : 2000) + k->position[e];
  }
  return rank[0] != rank[1] ? rank[0] > rank[1] : k->last[a] < k->last[b];
}

static void model_use(model_t *k, uint32_t expert, uint32_t position) {
  uint32_t count = 0, victim = ALL;
  for (uint32_t e = 0; e < ALL; e++) {
    if (!k->there[e]) continue;
    count++;
    if (victim == ALL || before(k, e, victim, position)) victim = e;
  }
  k->misses += !k->there[expert];
  if (!k->there[expert] && count == k->capacity) k->there[victim] = false;
  k->there[expert] = true;
  if (k->pass_of[expert] != k->pass)
    k->frequency[expert] = aged(k->frequency[expert], k->pass - k->pass_of[expert]) + 65536;
  k->last[expert] = ++k->clock;
  k->pass_of[expert] = k->pass;
  k->position[expert] = position;
}
static void model_pass_of(model_t *k, const net_t *n, bool backwards) {
  k->pass++;
  for (uint32_t l = 0; l < LAYERS; l++)
    for (uint32_t i = 0; i < 2; i++) model_use(k, n->chosen[backwards ? LAYERS - 1 - l : l][i], l);
}
/* The model has what the device has, and counts from now on. */
static void model_begin(model_t *k, const net_t *n) {
  for (uint32_t e = 0; e < ALL; e++) {
    gemini_access_t on = ACCESS(n->expert[e], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
    uint64_t bytes;
    OK(gemini_tier_bytes(n->mgr, &on, &bytes));
    k->there[e] = bytes != 0;
  }
  OK(gemini_stats_reset(n->mgr));
  k->misses = 0;
}

static void random_router(uint32_t policy) {
  static const uint32_t caches[] = { 4, 14, 30 };
  const uint32_t passes = check_repetitions(200);
  for (uint32_t i = 0; i < sizeof caches / sizeof *caches; i++) {
    net_t n = net_open(LAYERS + caches[i], policy, 7 + i);
    model_t model = { .policy = policy, .capacity = caches[i] };
    for (int k = 0; k < 20; k++) {
      pass(&n);
      model_pass_of(&model, &n, false);
    }
    const uint64_t plans = figures_of(n.mgr).plans;
    model_begin(&model, &n);
    for (uint32_t k = 0; k < passes; k++) {
      pass(&n);
      model_pass_of(&model, &n, false);
    }
    const figures_t f = figures_of(n.mgr);
    CHECK_EQ(f.departures, 0);
    CHECK(plans <= 2);
    CHECK_EQ(f.plans, plans);
    CHECK_EQ(f.planned_iterations, 19 + passes);
    const bool hits = policy != GEMINI_CACHE_LRU || caches[i] > 4; /* a pass chooses twelve */
    CHECK(model.misses > passes / 2 && (model.misses < (uint64_t)passes * LAYERS * 2) == hits);
    CHECK_EQ(f.acquire_misses, model.misses);
    CHECK_EQ(f.moved_bytes[LINK_H2D][GEMINI_REASON_DEMAND], model.misses * CHUNK);
    CHECK_EQ(f.moved_bytes[LINK_H2D][GEMINI_REASON_PLAN], 0);
    CHECK_EQ(f.moved_bytes[LINK_D2H][GEMINI_REASON_PRESSURE], 0);
    OK(gemini_manager_close(n.mgr));
  }
}
static void test_random_router_fetches_misses_of_lru(void) { random_router(GEMINI_CACHE_LRU); }
static void test_random_router_fetches_misses_of_frequent(void) { random_router(GEMINI_CACHE_FREQUENT); }
static void test_random_router_fetches_misses_of_least_stale(void) { random_router(GEMINI_CACHE_LEAST_STALE); }

/* Two kinds of passes, in an order that cannot be foreseen: what the cache has stays when the plan changes, and so do
 * the chunks that both plans keep. */
static void test_cache_stays_when_another_plan_begins(void) {
  enum { CACHE = 16 };
  net_t n = net_open(LAYERS + CACHE, GEMINI_CACHE_LRU, 21);
  model_t model = { .capacity = CACHE };
  for (int k = 0; k < 240; k++) {
    const bool backwards = draw(&n, 3) == 0;
    if (k == 60) model_begin(&model, &n);
    pass_of(&n, backwards, backwards);
    model_pass_of(&model, &n, backwards);
  }
  const figures_t f = figures_of(n.mgr);
  CHECK_EQ(f.departures, 0);
  CHECK(model.misses > 100);
  CHECK_EQ(f.acquire_misses, model.misses);
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
    net_t n = net_open(LAYERS, GEMINI_CACHE_LRU, 3);
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
  net_t n = net_open(LAYERS + 10, GEMINI_CACHE_LRU, 5);
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

/* The caller knows what the router will choose: no operator finds its chunk missing, and nothing departs. Hints that are
 * wrong push out no chunk of the plan, and none that was hinted rightly. */
static void test_hints_are_fetched_ahead(void) {
  enum { CACHE = 8 };
  net_t n = net_open(LAYERS + CACHE, GEMINI_CACHE_LRU, 31);
  for (int k = 0; k < 5; k++) pass(&n);
  for (int wrong = 0; wrong < 2; wrong++) {
    OK(gemini_stats_reset(n.mgr));
    for (int k = 0; k < 30; k++) {
      OK(gemini_iteration_begin(n.mgr));
      for (uint32_t l = 0; l < LAYERS; l++) {
        uint32_t chosen[2] = { l * EXPERTS + draw(&n, 4), l * EXPERTS + 4 + draw(&n, 4) };
        gemini_access_t hints[2];
        for (int i = 0; i < 2; i++) {
          const uint32_t e = wrong ? l * EXPERTS + (chosen[i] + 1) % EXPERTS : chosen[i];
          hints[i] = (gemini_access_t)ACCESS(n.expert[e], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
        }
        OK(gemini_hint(n.mgr, hints, 2));
        char name[32];
        snprintf(name, sizeof name, "dense %u", l);
        op(&n, name, false, n.dense[l], l);
        for (int i = 0; i < 2; i++) op(&n, "expert", true, n.expert[chosen[i]], LAYERS + chosen[i]);
      }
      OK(gemini_iteration_end(n.mgr));
    }
    const figures_t f = figures_of(n.mgr);
    CHECK_EQ(f.departures, 0);
    CHECK_EQ(f.moved_bytes[LINK_H2D][GEMINI_REASON_PLAN], 0);
    CHECK(f.moved_chunks[LINK_H2D][GEMINI_REASON_CALLER] > 100);
    CHECK(f.moved_chunks[LINK_H2D][GEMINI_REASON_CALLER] <= 30 * LAYERS * 2);
    if (!wrong) CHECK_EQ(f.acquire_misses, 0);
    else CHECK(f.acquire_misses > 100 && f.acquire_misses <= 30 * LAYERS * 2);
  }
  OK(gemini_manager_close(n.mgr));
}

/* A policy of the caller's: the first two experts of each layer are to stay. */
static void test_priorities_decide_before_the_policy(void) {
  net_t n = net_open(LAYERS + 2 * LAYERS + 2, GEMINI_CACHE_LRU, 33);
  for (uint32_t l = 0; l < LAYERS; l++)
    for (uint32_t e = 0; e < 2; e++) {
      gemini_access_t all = ACCESS(n.expert[l * EXPERTS + e], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
      OK(gemini_priority_set(n.mgr, &all, 1, 7));
    }
  for (int k = 0; k < 40; k++) pass(&n); /* each of them was chosen once at least */
  OK(gemini_stats_reset(n.mgr));
  uint64_t others = 0;
  for (int k = 0; k < 50; k++) {
    pass(&n);
    for (uint32_t l = 0; l < LAYERS; l++)
      for (int i = 0; i < 2; i++) others += n.chosen[l][i] % EXPERTS >= 2;
  }
  const figures_t f = figures_of(n.mgr);
  CHECK(f.acquire_misses > 50 && f.acquire_misses <= others);
  for (uint32_t l = 0; l < LAYERS; l++)
    for (uint32_t e = 0; e < 2; e++) {
      gemini_access_t on = ACCESS(n.expert[l * EXPERTS + e], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
      uint64_t bytes;
      OK(gemini_tier_bytes(n.mgr, &on, &bytes));
      CHECK_EQ(bytes, CHUNK);
    }
  OK(gemini_manager_close(n.mgr));
}

/* What a chosen operator writes is kept, wherever the chunk goes. */
static void test_chosen_op_that_writes_keeps_the_bytes(void) {
  net_t n = net_open(LAYERS + 3, GEMINI_CACHE_LRU, 9);
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
  net_t n = net_open(3, GEMINI_CACHE_LRU, 1);
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
  RUN(test_random_router_fetches_misses_of_frequent);
  RUN(test_random_router_fetches_misses_of_least_stale);
  RUN(test_cache_stays_when_another_plan_begins);
  RUN(test_plan_that_moves_leaves_frames_for_chosen_ops);
  RUN(test_other_numbers_of_chosen_ops_are_no_departure);
  RUN(test_hints_are_fetched_ahead);
  RUN(test_priorities_decide_before_the_policy);
  RUN(test_chosen_op_that_writes_keeps_the_bytes);
  RUN(test_lack_of_room_names_the_chosen_op);
  return check_done();
}
