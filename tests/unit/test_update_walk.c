/* The walk over a table of ranges against a plain loop over elements, wherever spans are cut and computed; and what it
 * refuses. SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdbool.h>

#include "check.h"
#include "handles.h"
#include "update/update.h"
#include "update_driver.h"

enum { F32 = GEMINI_DTYPE_F32, BF16 = GEMINI_DTYPE_BF16, F16 = GEMINI_DTYPE_F16 };
enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ROLES };
enum { HOST, GPU, SIMULATED, PLACES };
enum { CAPACITY = 3000, RULES = 3, RANGES = 40, ARENAS = 8 };

/* Arenas of at most 4 bytes an element; those that the update has beside the five stay as they are. */
typedef struct model {
  uint32_t arenas[ARENAS][CAPACITY];
} model_t;
static model_t start, expected, actual;

typedef struct table {
  gemini_adamw_t adamws[RULES];
  gemini_sgd_t sgds[RULES];
  bool sgd; /* these are used */
  gemini_update_range_t ranges[RANGES];
  uint64_t range_count;
  uint32_t index[ROLES];
  uint32_t bytes[ARENAS]; /* of an element */
} table_t;

static void *element(model_t *m, const table_t *t, uint32_t arena, uint64_t i) {
  return (char *)m->arenas[arena] + i * t->bytes[arena];
}

static void fill(model_t *m, const table_t *t, uint64_t *random) {
  for (uint32_t a = 0; a < ARENAS; a++) {
    for (uint64_t i = 0; i < CAPACITY; i++) {
      float value = (float)(int32_t)(check_random(random) >> 32) / 4294967296.0f;
      if (t->index[VARIANCE] == a) value = fabsf(value);
      uint32_t bits;
      memcpy(&bits, &value, sizeof bits);
      if (t->bytes[a] == 2)
        bits &= t->index[VARIANCE] == a ? 0x3bff3bff : 0xbbffbbff; /* halves, none infinite or NaN */
      m->arenas[a][i] = bits;
    }
  }
}

/* Roles in any arenas; of SGD also without momentum; in_place: the gradient in its parameter's bytes; alone: no parameter beside master. */
static table_t random_table(uint64_t *random, uint64_t elements, bool sgd, bool in_place, bool alone) {
  table_t t = { .sgd = sgd };
  const bool momentum = check_random(random) % 4;
  const uint32_t low[2] = { check_random(random) % 3 ? 2 : 4, check_random(random) % 3 ? 2 : 4 };
  const uint64_t narrow = sgd ? 0 : check_random(random) % 8;
  const bool split = narrow & 4 && !in_place && !alone && low[0] == 2;
  uint32_t order[ARENAS];
  for (uint32_t i = 0; i < ARENAS; i++) {
    uint32_t k = (uint32_t)(check_random(random) % (i + 1));
    order[i] = order[k], order[k] = i, t.bytes[i] = 4;
  }
  memcpy(t.index, order, sizeof t.index);
  t.bytes[t.index[PARAM]] = low[0];
  t.bytes[t.index[GRAD]] = low[in_place ? 0 : 1];
  if (narrow & 1) t.bytes[t.index[MOMENTUM]] = 2;
  if (narrow & 2) t.bytes[t.index[VARIANCE]] = 2;
  if (split) t.bytes[t.index[MASTER]] = 2;
  for (uint32_t r = 0; r < RULES; r++) {
    gemini_adamw_t a = GEMINI_ADAMW_INIT;
    const uint32_t half[2] = { check_random(random) % 2 ? BF16 : F16, check_random(random) % 2 ? BF16 : F16 };
    a.param_dtype = t.bytes[t.index[PARAM]] == 4 ? F32 : half[0];
    a.grad_dtype = t.bytes[t.index[GRAD]] == 4 ? F32 : half[1];
    a.flags = (r == 1 ? GEMINI_ADAMW_L2 : 0) | (split ? GEMINI_ADAMW_SPLIT : 0);
    if (split) a.param_dtype = BF16;
    a.momentum_dtype = narrow & 1 ? BF16 : F32, a.variance_dtype = narrow & 2 ? BF16 : F32;
    a.seed = r, a.first_element = 1000 * r;
    a.step = 1 + r * 5;
    a.lr = 1e-3 * (r + 1);
    a.weight_decay = 0.1 * r;
    a.grad_scale = 0.5 + r;
    t.adamws[r] = a;
    gemini_sgd_t s = GEMINI_SGD_INIT;
    s.param_dtype = a.param_dtype, s.grad_dtype = a.grad_dtype;
    s.step = 1 + r % 2;
    s.lr = a.lr, s.momentum = momentum ? 0.25 * r : 0, s.weight_decay = 0.1 * r, s.grad_scale = a.grad_scale;
    t.sgds[r] = s;
  }
  for (uint64_t at = 0; at < elements; t.range_count++) {
    uint64_t most = 2 * elements / RANGES, n = 1 + check_random(random) % (check_random(random) % 4 ? most : 3);
    at = t.range_count == RANGES - 1 || n > elements - at ? elements : at + n;
    uint64_t rule = check_random(random) % (in_place ? RULES : RULES + 1);
    t.ranges[t.range_count] = (gemini_update_range_t){ at, rule == RULES ? GEMINI_UPDATE_SKIP : rule };
  }
  if (check_random(random) % 2) t.ranges[t.range_count - 1].end_element = UINT64_MAX;
  if (alone) t.index[PARAM] = GEMINI_INDEX_NONE;
  if (t.sgd && !momentum) t.index[MOMENTUM] = GEMINI_INDEX_NONE;
  return t;
}

static void *low_param(model_t *m, const table_t *t, bool in_place, uint64_t i) {
  if (t->index[PARAM] == GEMINI_INDEX_NONE) return NULL;
  return element(m, t, t->index[in_place ? GRAD : PARAM], i);
}

/* Element for element, each with the range that a search from the front finds. */
static void plain_loop(model_t *m, const table_t *t, bool in_place, uint64_t first, uint64_t count) {
  for (uint64_t i = first; i < first + count; i++) {
    uint64_t r = 0;
    while (t->ranges[r].end_element <= i) r++;
    const uint64_t rule = t->ranges[r].rule;
    if (rule == GEMINI_UPDATE_SKIP) continue;
    void *param = low_param(m, t, in_place, i), *grad = element(m, t, t->index[GRAD], i);
    void *master = element(m, t, t->index[MASTER], i), *momentum = NULL;
    gemini_adamw_t adamw = t->adamws[rule];
    adamw.first_element += i;
    if (t->index[MOMENTUM] != GEMINI_INDEX_NONE) momentum = element(m, t, t->index[MOMENTUM], i);
    CHECK_EQ(t->sgd ? gemini_sgd_host(&t->sgds[rule], 1, param, grad, master, momentum, NULL)
                    : gemini_adamw_host(&adamw, 1, param, grad, master, momentum, element(m, t, t->index[VARIANCE], i),
                                        NULL),
             GEMINI_OK);
  }
}

/* --- the manager: what a walk calls of it, and calls that wait for their turn --- */

enum { MGR = 77, STREAM = 78, CALLS_WAITING = 4096 };
static struct {
  gemini_status_t native_status, call_status;
  uint32_t waiting;
  struct {
    gemini_call_fn fn;
    void *user;
  } calls[CALLS_WAITING];
} manager;

static gemini_status_t stream_native(gemini_manager_t mgr, gemini_stream_t stream, void **native_out) {
  CHECK(handle_id(mgr) == MGR && handle_id(stream) == STREAM);
  if (!manager.native_status) *native_out = contexts[1];
  return manager.native_status;
}
static gemini_status_t stream_call(gemini_manager_t mgr, gemini_stream_t stream, gemini_call_fn fn, void *user) {
  CHECK(handle_id(mgr) == MGR && handle_id(stream) == STREAM && manager.waiting < CALLS_WAITING);
  if (manager.call_status) return manager.call_status;
  manager.calls[manager.waiting].fn = fn;
  manager.calls[manager.waiting++].user = user;
  return GEMINI_OK;
}
static void run_waiting(void) {
  for (uint32_t i = 0; i < manager.waiting; i++) manager.calls[i].fn(manager.calls[i].user);
  manager.waiting = 0;
}
static void manager_start(int place) {
  manager.native_status = place == SIMULATED ? GEMINI_ERR_UNSUPPORTED : GEMINI_OK;
  manager.call_status = GEMINI_OK;
  fake_start();
}

static gemini_update_walk_t walk_of(const table_t *t) {
  gemini_update_walk_t w = GEMINI_UPDATE_WALK_INIT;
  if (t->sgd) w.sgds = t->sgds;
  else w.adamws = t->adamws;
  w.rule_count = RULES;
  w.ranges = t->ranges;
  w.range_count = t->range_count;
  w.param_index = t->index[PARAM];
  w.grad_index = t->index[GRAD];
  w.master_index = t->index[MASTER];
  w.momentum_index = t->index[MOMENTUM];
  w.variance_index = t->sgd ? 99 : t->index[VARIANCE]; /* ignored */
  w.mgr = handle_of(MGR);
  w.stream_native = stream_native;
  w.stream_call = stream_call;
  return w;
}
static void run_span(gemini_update_walk_t *w, const table_t *t, bool in_place, uint64_t first, uint64_t count,
                     int place) {
  gemini_update_span_t span = { .struct_size = sizeof span,
                                .tier = place == HOST ? GEMINI_TIER_HOST : GEMINI_TIER_DEVICE,
                                .first_element = first,
                                .element_count = count,
                                .stream = place == HOST ? NULL : handle_of(STREAM),
                                .arena_count = ARENAS };
  for (uint32_t a = 0; a < ARENAS; a++) span.ptr[a] = element(&actual, t, a, first);
  if (t->index[PARAM] != GEMINI_INDEX_NONE) span.ptr[t->index[PARAM]] = low_param(&actual, t, in_place, first);
  gemini_update_walk(w, &span);
  memset(&span, 0xee, sizeof span); /* borrowed until return only */
  fake.call_count = 0;
}
static void check_same(void) {
  for (uint32_t a = 0; a < ARENAS; a++) {
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(actual.arenas[a][i], expected.arenas[a][i]);
  }
}

static void test_walk_over_random_tables_equals_a_plain_loop(void) {
  uint64_t random = 1, parts = 0, skipped = 0;
  for (uint32_t round = 0; round < 240; round++) {
    const bool in_place = round % 4 == 1, alone = round % 4 == 2;
    const int place = (int)(round / 4 % PLACES);
    const table_t t = random_table(&random, CAPACITY, round / 12 % 2, in_place, alone);
    const uint64_t first = check_random(&random) % 100, end = CAPACITY - check_random(&random) % 100;
    gemini_update_walk_t w = walk_of(&t);
    manager_start(place);
    fill(&start, &t, &random);
    expected = actual = start;
    plain_loop(&expected, &t, in_place, first, end - first);
    for (uint64_t at = first, n; at < end; at += n) {
      n = 1 + check_random(&random) % (round % 2 ? 64 : 1024);
      if (n > end - at) n = end - at;
      run_span(&w, &t, in_place, at, n, place);
    }
    CHECK((manager.waiting > 0) == (place == SIMULATED) && (fake.loads > 0) == (place == GPU));
    if (place == SIMULATED) CHECK(!memcmp(&actual, &start, sizeof actual));
    run_waiting();
    CHECK_EQ(gemini_update_walk_status(&w), GEMINI_OK);
    check_same();
    CHECK(memcmp(&actual, &start, sizeof actual) != 0);
    for (uint64_t r = 0; r < t.range_count; r++) skipped += t.ranges[r].rule == GEMINI_UPDATE_SKIP;
    parts += t.range_count;
  }
  CHECK(skipped > parts / 10 && skipped < parts / 2); /* of RULES + 1 rules one, in three rounds of four */
}

/* The first pass writes parameters alone, to wherever they go, the second one the states alone, in place or elsewhere. */
static void test_two_passes_of_a_walk_are_one(void) {
  static model_t first, second;
  uint64_t random = 9, sgds = 0, narrow = 0;
  for (uint32_t round = 0; round < 80; round++) {
    const bool in_place = round % 4 == 1, beside = round % 3 == 0;
    table_t t = random_table(&random, CAPACITY, round / 12 % 2, in_place, false);
    if (t.bytes[t.index[MASTER]] == 2) continue; /* such parameters are states */
    for (uint64_t r = 0; r < t.range_count; r++)
      if (t.ranges[r].rule == GEMINI_UPDATE_SKIP) t.ranges[r].rule = 0;
    const gemini_update_walk_t fresh = walk_of(&t);
    manager_start(HOST);
    fill(&start, &t, &random);
    expected = actual = start;
    memset(&first, 0x5a, sizeof first);
    second = first;
    for (uint32_t pass = GEMINI_PASS_RESULTS; pass <= GEMINI_PASS_STATES; pass++) {
      gemini_update_walk_t w = fresh;
      gemini_update_span_t span = { .struct_size = sizeof span,
                                    .tier = GEMINI_TIER_HOST,
                                    .element_count = CAPACITY,
                                    .arena_count = ARENAS,
                                    .pass = pass };
      for (uint32_t a = 0; a < ARENAS; a++) span.ptr[a] = span.out[a] = element(&actual, &t, a, 0);
      for (uint32_t role = MASTER; role < ROLES; role++) {
        const uint32_t a = t.index[role];
        if (a == GEMINI_INDEX_NONE) continue;
        if (beside) span.out[a] = element(&second, &t, a, 0);
        if (pass == GEMINI_PASS_RESULTS) span.out[a] = NULL;
      }
      span.ptr[t.index[PARAM]] = span.out[t.index[PARAM]] =
          pass == GEMINI_PASS_RESULTS ? element(&first, &t, t.index[PARAM], 0) : NULL;
      gemini_update_walk(&w, &span);
      CHECK_EQ(gemini_update_walk_status(&w), GEMINI_OK);
      if (pass == GEMINI_PASS_RESULTS || beside) CHECK(!memcmp(&actual, &start, sizeof actual));
    }
    const model_t *states = beside ? &second : &actual;
    plain_loop(&expected, &t, in_place, 0, CAPACITY);
    const uint32_t p = t.index[PARAM];
    CHECK(!memcmp(first.arenas[p], expected.arenas[in_place ? t.index[GRAD] : p], (size_t)CAPACITY * t.bytes[p]));
    for (uint32_t role = MASTER; role < ROLES; role++) {
      const uint32_t a = t.index[role];
      if (a == GEMINI_INDEX_NONE || (t.sgd && role == VARIANCE)) continue;
      CHECK(!memcmp(states->arenas[a], expected.arenas[a], (size_t)CAPACITY * t.bytes[a]));
    }
    CHECK(!memcmp(actual.arenas[t.index[GRAD]], start.arenas[t.index[GRAD]], sizeof start.arenas[0]));
    sgds += t.sgd;
    narrow += t.bytes[t.index[VARIANCE]] == 2;
  }
  CHECK(sgds > 10 && narrow > 5);
}

/* Spans whose new values go elsewhere: the arenas stay, and what is written is that of the walk in place. */
static void test_walk_beside_the_old_values_is_the_same(void) {
  static model_t beside;
  uint64_t random = 5;
  for (uint32_t round = 0; round < 60; round++) {
    const bool in_place = round % 4 == 1, alone = round % 4 == 2;
    table_t t = random_table(&random, CAPACITY, round / 12 % 2, in_place, alone);
    const gemini_update_walk_t fresh = walk_of(&t);
    gemini_update_walk_t w = fresh;
    manager_start(HOST);
    fill(&start, &t, &random);
    expected = actual = start;
    memset(&beside, 0x5a, sizeof beside);
    for (int skips = 1; skips >= 0; skips--) {
      gemini_update_span_t span = {
        .struct_size = sizeof span, .tier = GEMINI_TIER_HOST, .element_count = CAPACITY, .arena_count = ARENAS
      };
      bool skipped = false;
      for (uint64_t r = 0; r < t.range_count; r++) {
        if (!skips && t.ranges[r].rule == GEMINI_UPDATE_SKIP) t.ranges[r].rule = 0;
        skipped |= t.ranges[r].rule == GEMINI_UPDATE_SKIP && (r ? t.ranges[r - 1].end_element : 0) < CAPACITY;
      }
      if (skips && !skipped) continue;
      for (uint32_t a = 0; a < ARENAS; a++) {
        span.ptr[a] = element(&actual, &t, a, 0);
        span.out[a] = element(&beside, &t, a, 0);
      }
      span.out[t.index[GRAD]] = span.ptr[t.index[GRAD]];
      if (t.index[PARAM] != GEMINI_INDEX_NONE) span.ptr[t.index[PARAM]] = low_param(&actual, &t, in_place, 0);
      w = fresh;
      gemini_update_walk(&w, &span);
      CHECK_EQ(gemini_update_walk_status(&w), skips ? GEMINI_ERR_INVALID : GEMINI_OK);
    }
    CHECK(!memcmp(&actual, &start, sizeof actual));
    plain_loop(&expected, &t, in_place, 0, CAPACITY);
    for (uint32_t role = 0; role < ROLES; role++) {
      const uint32_t a = t.index[role];
      if (role == GRAD || a == GEMINI_INDEX_NONE || (role == VARIANCE && t.sgd)) continue;
      const void *want = role == PARAM ? low_param(&expected, &t, in_place, 0) : element(&expected, &t, a, 0);
      CHECK(!memcmp(element(&beside, &t, a, 0), want, (size_t)CAPACITY * t.bytes[a]));
    }
  }
}

static void test_walk_cut_at_every_place_is_the_same(void) {
  const uint64_t elements = 90;
  uint64_t random = 5;
  for (int i = 0; i < 2 * PLACES; i++) {
    const int place = i % PLACES;
    const table_t t = random_table(&random, elements, i >= PLACES, false, false);
    CHECK(t.range_count > 10);
    fill(&start, &t, &random);
    expected = start;
    plain_loop(&expected, &t, false, 0, elements);
    for (uint64_t cut = 0; cut < elements; cut++) { /* also three spans, so that one lies inside a range */
      gemini_update_walk_t w = walk_of(&t);
      manager_start(place);
      actual = start;
      if (cut) run_span(&w, &t, false, 0, cut, place);
      run_span(&w, &t, false, cut, 1, place);
      if (cut + 1 < elements) run_span(&w, &t, false, cut + 1, elements - cut - 1, place);
      run_waiting();
      CHECK_EQ(gemini_update_walk_status(&w), GEMINI_OK);
      check_same();
    }
  }
}

static table_t ordinary(void) {
  const gemini_update_range_t two[] = { { 100, 0 }, { 200, 1 } };
  uint64_t random = 3;
  table_t t = random_table(&random, 200, false, false, false);
  memcpy(t.ranges, two, sizeof two);
  t.range_count = 2;
  for (uint32_t i = 0; i < ROLES; i++) t.index[i] = i;
  for (uint32_t a = 0; a < ARENAS; a++) t.bytes[a] = a < 2 ? 2 : 4;
  for (uint32_t r = 0; r < RULES; r++) {
    t.adamws[r].param_dtype = t.adamws[r].grad_dtype = BF16;
    t.adamws[r].momentum_dtype = t.adamws[r].variance_dtype = F32;
    t.adamws[r].first_element = 0;
    t.adamws[r].flags &= ~(uint32_t)GEMINI_ADAMW_SPLIT;
    t.sgds[r].param_dtype = t.sgds[r].grad_dtype = BF16;
    t.sgds[r].momentum = 0;
  }
  fill(&start, &t, &random);
  return t;
}

static void test_walk_queues_neighbours_with_one_rule_as_one(void) {
  const gemini_update_range_t ranges[] = { { 10, 0 }, { 20, 0 },  { 30, 1 }, { 31, GEMINI_UPDATE_SKIP },
                                           { 40, 1 }, { 100, 0 }, { 110, 0 } };
  const table_t t = ordinary();
  uint64_t random = 2;
  gemini_update_walk_t w = walk_of(&t);
  w.ranges = ranges, w.range_count = 7;
  manager_start(GPU);
  fill(&actual, &t, &random);
  run_span(&w, &t, false, 0, 1, GPU); /* loads the kernels */
  gemini_update_span_t span = { .tier = GEMINI_TIER_DEVICE, .first_element = 5, .element_count = 98 };
  span.stream = handle_of(STREAM), span.arena_count = ARENAS;
  for (uint32_t a = 0; a < ARENAS; a++) span.ptr[a] = element(&actual, &t, a, 5);
  gemini_update_walk(&w, &span);
#define PART "cuCtxGetCurrent", "cuStreamGetCtx", "cuCtxSetCurrent", "gmi_adamw", "cuCtxSetCurrent"
  for (int i = 0; i < 4; i++) CHECK(fake.launched_on[5 * i + 3] == (cu_stream_t)(void *)contexts[1]);
  CALLED(PART, PART, PART, PART);
  CHECK_EQ(gemini_update_walk_status(&w), GEMINI_OK);
}

/* A table of a later version, whose structs are longer, is taken as long as what is new in it is zero. */
static void test_walk_takes_longer_rules(void) {
  struct {
    gemini_adamw_t known;
    uint64_t later;
  } longer[RULES] = { 0 };
  uint64_t random = 4;
  const table_t t = random_table(&random, CAPACITY, false, false, false);
  gemini_update_walk_t w = walk_of(&t);
  w.adamws = &longer[0].known;
  for (uint32_t r = 0; r < RULES; r++) {
    longer[r].known = t.adamws[r];
    longer[r].known.struct_size = sizeof longer[r];
  }
  fill(&start, &t, &random);
  expected = actual = start;
  plain_loop(&expected, &t, false, 0, CAPACITY);
  run_span(&w, &t, false, 0, CAPACITY, HOST);
  CHECK_EQ(gemini_update_walk_status(&w), GEMINI_OK);
  check_same();
}

/* --- failures --- */

static const char *message(void) {
  static gemini_error_info_t info;
  info = (gemini_error_info_t)GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  return info.message;
}

static void check_told(const gemini_update_walk_t *w, gemini_status_t status, const char *words) {
  CHECK_EQ(w->status, status);
  CHECK_SAYS(w->message, words);
  CHECK_EQ(gemini_update_force_isa("sse"), GEMINI_ERR_INVALID); /* another failure of this thread */
  CHECK_EQ(gemini_update_walk_status(w), status);
  CHECK_SAYS(message(), words);
}

/* A span over elements 50 to 150 fails and says words; those up to done are updated, by rule 0. */
static void failing(gemini_update_walk_t w, const table_t *t, int place, uint64_t done, gemini_status_t status,
                    const char *words) {
  expected = actual = start;
  plain_loop(&expected, t, false, 50, done - 50);
  run_span(&w, t, false, 50, 100, place);
  run_waiting();
  check_told(&w, status, words);
  check_same();
}

static void test_walk_that_fails_says_where_and_leaves_the_rest(void) {
  const table_t t = ordinary();
  for (int place = 0; place < PLACES; place++) {
    gemini_update_walk_t w;
    table_t bad;
#define FAILS(change, done, words)                                                              \
  manager_start(place), bad = t, w = walk_of(&t), w.adamws = bad.adamws, w.ranges = bad.ranges; \
  change, failing(w, &t, place, done, GEMINI_ERR_INVALID, words)
    FAILS(w.range_count = 1, 100, "elements 100 to 150: no range of the walk covers them");
    FAILS(w.rule_count = 1, 100, "elements 100 to 150: rule 1 is not among the 1 there are");
    FAILS(w.rule_count = 0, 50, "elements 50 to 150: rule 0 is not among the 0 there are");
    FAILS((bad.ranges[0].end_element = 60, bad.ranges[1].end_element = 55), 60,
          "elements 60 to 150: range 1 ends at 55, before it begins");
    FAILS(w.param_index = 8, 50, "elements 50 to 150: param_index is 8, the update has 8 arenas");
    FAILS(w.variance_index = GEMINI_INDEX_NONE, 50, "variance_index is 4294967295, the update has 8 arenas");
    FAILS(w.variance_index = w.master_index, 50, "overlap over 50 elements");
    FAILS(bad.adamws[1].step = 0, 100, "elements 100 to 150: step is 0");
    FAILS(bad.adamws[0].struct_size = 3, 50, "elements 50 to 150: adamw: struct_size is 3");
    /* Skipped where the gradient has taken the parameter's bytes. */
    FAILS((bad.ranges[0].end_element = 50, bad.ranges[1].rule = GEMINI_UPDATE_SKIP, w.param_index = w.grad_index), 50,
          "elements 50 to 150: the gradient has taken the parameter's bytes");
#undef FAILS
  }
  gmi_update_cuda_replace(NULL);
}

static void test_walk_on_the_device_tells_what_the_manager_and_the_driver_refuse(void) {
  const table_t t = ordinary();
  gemini_update_walk_t w;
#define FAILS(place, change, status, words) \
  manager_start(place), w = walk_of(&t), change, failing(w, &t, place, 50, status, words)
  FAILS(GPU, w.stream_native = NULL, GEMINI_ERR_INVALID,
        "elements 50 to 150: they are on the device, and stream_native");
  FAILS(SIMULATED, w.stream_native = NULL, GEMINI_ERR_INVALID, "stream_native is NULL");
  FAILS(GPU, manager.native_status = GEMINI_ERR_HANDLE, GEMINI_ERR_HANDLE,
        "elements 50 to 150: stream_native failed with -2");
  FAILS(SIMULATED, w.stream_call = NULL, GEMINI_ERR_INVALID,
        "elements 50 to 150: they are on the simulated device, and");
  FAILS(SIMULATED, manager.call_status = GEMINI_ERR_OOM_SYSTEM, GEMINI_ERR_OOM_SYSTEM, "stream_call failed with -8");
  FAILS(GPU, fake.lacking = "cuStreamGetCtx", GEMINI_ERR_UNSUPPORTED, "elements 50 to 150: the CUDA driver is too old");
  FAILS(GPU, fake.failing = "cuModuleLoadData", GEMINI_ERR_DEVICE,
        "elements 50 to 150: cuModuleLoadData: CUDA_ERROR_UNK");
#undef FAILS
  manager_start(GPU);
  fake.failing = "cuStreamGetCtx";
  w = walk_of(&t);
  run_span(&w, &t, false, 0, 9, GPU);
  CHECK_EQ(w.native_code, CU_UNKNOWN);
  gmi_update_cuda_replace(NULL);
}

static void test_walk_tells_the_first_failure_and_does_the_other_spans(void) {
  const table_t t = ordinary();
  gemini_update_walk_t w = walk_of(&t);
  manager_start(SIMULATED);
  expected = actual = start;
  CHECK_EQ(gemini_update_walk_status(&w), GEMINI_OK);
  run_span(&w, &t, false, 190, 20, HOST); /* ten of them have no range */
  run_span(&w, &t, false, 0, 90, HOST);
  manager.native_status = GEMINI_ERR_HANDLE;
  run_span(&w, &t, false, 90, 5, SIMULATED);
  manager.native_status = GEMINI_ERR_UNSUPPORTED;
  run_span(&w, &t, false, 95, 95, SIMULATED);
  run_waiting();
  plain_loop(&expected, &t, false, 0, 90);
  plain_loop(&expected, &t, false, 95, 105);
  check_told(&w, GEMINI_ERR_INVALID, "elements 200 to 210: no range of the walk covers them");
  check_same();
  CHECK_EQ(gemini_update_walk_status(NULL), GEMINI_ERR_INVALID);
  CHECK_SAYS(message(), "walk is NULL");
  gmi_update_cuda_replace(NULL);
}

/* --- checks --- */

static void split_all(table_t *t) {
  for (uint32_t r = 0; r < RULES; r++) t->adamws[r].flags |= GEMINI_ADAMW_SPLIT;
}
static void blocks_all(table_t *t) {
  for (uint32_t r = 0; r < RULES; r++) t->adamws[r].variance_dtype = GEMINI_DTYPE_BLOCK8;
}
static void test_walk_check_refuses_by_name_what_is_wrong(void) {
  const table_t t = ordinary();
  const uint32_t good_modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  table_t bad;
  uint32_t modes[5];
  gemini_update_walk_t w;
  gemini_update_t u;
#define CHECKED(change)                                                                      \
  bad = t, memcpy(modes, good_modes, sizeof modes), u = (gemini_update_t)GEMINI_UPDATE_INIT; \
  w = walk_of(&t), w.adamws = bad.adamws, w.ranges = bad.ranges, u.user = &w, u.modes = modes, u.arena_count = 5, change
#define ACCEPTED(change) \
  CHECKED(change);       \
  CHECK_EQ(gemini_update_walk_check(&u), GEMINI_OK)
#define REFUSED(change, words)                                \
  CHECKED(change);                                            \
  CHECK_EQ(gemini_update_walk_check(&u), GEMINI_ERR_INVALID); \
  CHECK_SAYS(message(), words);                               \
  CHECK_EQ(w.failing, 0)
  ACCEPTED(w.stream_native = NULL);
  ACCEPTED((u.first_element = 150, u.element_count = 50));
  ACCEPTED(bad.ranges[1].end_element = UINT64_MAX);
  ACCEPTED((u.arena_count = 4, w.param_index = GEMINI_INDEX_NONE, w.grad_index = 1, w.master_index = 0, modes[0] = 3,
            w.momentum_index = 2, w.variance_index = 3));
  ACCEPTED(modes[0] = GEMINI_READ_WRITE);
  ACCEPTED((bad.adamws[0].param_dtype = F16, bad.adamws[2].grad_dtype = F16));
  ACCEPTED((bad.adamws[0].param_dtype = 99, bad.adamws[1].param_dtype = F32, bad.adamws[2].param_dtype = F16,
            w.param_index = GEMINI_INDEX_NONE));

  CHECK_EQ(gemini_update_walk_check(NULL), GEMINI_ERR_INVALID);
  CHECK_SAYS(message(), "update is NULL");
  REFUSED(u.struct_size = 8, "update: struct_size is 8");
  REFUSED(u.user = NULL, "walk is NULL");
  REFUSED(w.struct_size = 12, "walk: struct_size is 12");
  REFUSED(w.struct_size = 4097, "walk: struct_size is 4097");
  REFUSED(w.flags = 2, "walk: flags has unknown bits: 0x2");
  REFUSED(w.reserved = 1, "walk: reserved is 1");
  CHECKED(w.failing = 1);
  CHECK_EQ(gemini_update_walk_check(&u), GEMINI_ERR_INVALID);
  CHECK_SAYS(message(), "walk has failed before");

  REFUSED(w.adamws = NULL, "want exactly one of adamws and sgds");
  REFUSED(w.sgds = bad.sgds, "want exactly one of adamws and sgds");
  REFUSED(w.rule_count = 0, "rule_count is 0");
  REFUSED(bad.adamws[1].lr = -1, "adamws[1]: lr is -1");
  REFUSED(bad.adamws[2].step = 0, "adamws[2]: step is 0");
  REFUSED(bad.adamws[0].struct_size = 0, "adamws[0]: adamw: struct_size is 0");
  REFUSED(bad.adamws[2].param_dtype = GEMINI_DTYPE_F64, "adamws[2]: param_dtype is 3");
  REFUSED(bad.adamws[1].param_dtype = F32, "adamws[1]: param_dtype is 0, in adamws[0] 1, which has another size");
  REFUSED(bad.adamws[2].grad_dtype = F32, "adamws[2]: grad_dtype is 0, in adamws[0] 1, which has another size");

  REFUSED(w.ranges = NULL, "ranges is NULL");
  REFUSED(w.range_count = 0, "range_count 0");
  REFUSED(bad.ranges[0].end_element = 0, "ranges[0] ends at 0, want more than 0");
  REFUSED(bad.ranges[1].end_element = 100, "ranges[1] ends at 100, want more than 100");
  REFUSED(bad.ranges[1].end_element = 99, "ranges[1] ends at 99, want more than 100");
  REFUSED(bad.ranges[0].rule = 3, "ranges[0]: rule 3 is not among the 3 there are");

  REFUSED(w.param_index = 5, "param_index is 5, the update has 5 arenas");
  REFUSED(w.grad_index = GEMINI_INDEX_NONE, "grad_index is 4294967295");
  REFUSED(w.master_index = 5, "master_index is 5");
  REFUSED(w.momentum_index = 5, "momentum_index is 5");
  REFUSED(w.variance_index = 5, "variance_index is 5");
  REFUSED(w.momentum_index = 2, "master_index and momentum_index both are 2");
  REFUSED(u.modes = NULL, "modes is NULL");
  REFUSED(bad.adamws[2].variance_dtype = BF16,
          "adamws[2]: its states have 4, 4 and 2 bytes (master, momentum, variance), in adamws[0] 4, 4 and 4");
  REFUSED(bad.adamws[1].flags |= GEMINI_ADAMW_SPLIT, "adamws[1]: its states have 2, 4 and 4 bytes");
  REFUSED(split_all(&bad), "param_index: modes[0] is 2, want READ_WRITE"); /* the parameter is half of the master */
  ACCEPTED((split_all(&bad), modes[0] = GEMINI_READ_WRITE));
  REFUSED((blocks_all(&bad), u.first_element = 100), "elements 100 + 0, 8-bit states want multiples of 256");
  REFUSED((blocks_all(&bad), u.element_count = 100), "elements 0 + 100, 8-bit states want multiples of 256");
  REFUSED(blocks_all(&bad), "ranges[0] ends at 100, 8-bit states want a multiple of 256");
  ACCEPTED((blocks_all(&bad), bad.ranges[0].end_element = 256, bad.ranges[1].end_element = UINT64_MAX,
            u.element_count = 512));
  REFUSED(modes[0] = GEMINI_READ, "param_index: modes[0] is 1, want WRITE");
  REFUSED(modes[1] = GEMINI_WRITE, "grad_index: modes[1] is 2, want READ");
  REFUSED(modes[2] = GEMINI_READ, "master_index: modes[2] is 1, want READ_WRITE");
  REFUSED(modes[3] = GEMINI_WRITE, "momentum_index: modes[3] is 2, want READ_WRITE");
  REFUSED(modes[4] = GEMINI_READ, "variance_index: modes[4] is 1, want READ_WRITE");

  REFUSED(u.element_count = 201, "the update has elements 0 + 201, the last range ends at 200");
  REFUSED((u.first_element = 150, u.element_count = 51), "elements 150 + 51");
  REFUSED((u.first_element = 150, u.element_count = UINT64_MAX - 100), "elements 150 + 18446744073709551515");
  /* Parameters that are not read are lost where they are skipped, but only in the update's elements. */
  REFUSED(bad.ranges[1].rule = GEMINI_UPDATE_SKIP,
          "ranges[1] is skipped, but its parameters would be lost: modes[0] is 2");
  REFUSED((bad.ranges[1].rule = GEMINI_UPDATE_SKIP, u.element_count = 101), "ranges[1] is skipped");
  ACCEPTED((bad.ranges[1].rule = GEMINI_UPDATE_SKIP, u.element_count = 100));
  ACCEPTED((bad.ranges[0].rule = GEMINI_UPDATE_SKIP, u.first_element = 100, u.element_count = 100));
  REFUSED((bad.ranges[0].rule = GEMINI_UPDATE_SKIP, u.first_element = 99, u.element_count = 100),
          "ranges[0] is skipped");
  ACCEPTED((bad.ranges[1].rule = GEMINI_UPDATE_SKIP, modes[0] = GEMINI_READ_WRITE));
  /* Beside old values, what is skipped would not be written at all. */
  REFUSED((bad.ranges[1].rule = GEMINI_UPDATE_SKIP, modes[0] = GEMINI_READ_WRITE, u.flags = GEMINI_UPDATE_SPECULATE),
          "ranges[1] is skipped, which an update with GEMINI_UPDATE_SPECULATE cannot do");
  ACCEPTED((bad.ranges[0].rule = GEMINI_UPDATE_SKIP, u.first_element = 100, u.element_count = 100,
            u.flags = GEMINI_UPDATE_SPECULATE));
  ACCEPTED((bad.ranges[1].rule = GEMINI_UPDATE_SKIP, w.param_index = GEMINI_INDEX_NONE));
  /* Nor would an arena that the walk has no use for. */
  ACCEPTED(modes[1] = GEMINI_READ_WRITE);
  REFUSED((modes[1] = GEMINI_READ_WRITE, u.flags = GEMINI_UPDATE_SPECULATE),
          "modes[1] is 3, but the walk does not write that arena");
  ACCEPTED((w.param_index = GEMINI_INDEX_NONE, modes[0] = GEMINI_READ_WRITE));
  REFUSED((w.param_index = GEMINI_INDEX_NONE, modes[0] = GEMINI_READ_WRITE, u.flags = GEMINI_UPDATE_SPECULATE),
          "modes[0] is 3, but the walk does not write that arena");
  ACCEPTED((w.param_index = GEMINI_INDEX_NONE, modes[0] = GEMINI_READ, u.flags = GEMINI_UPDATE_SPECULATE));

#define OF_SGD(change) (w.adamws = NULL, w.sgds = bad.sgds, w.variance_index = 99, change)
  ACCEPTED(OF_SGD(u.arena_count = 4));
  ACCEPTED(OF_SGD(bad.sgds[1].momentum = 0.5));
  ACCEPTED(OF_SGD((w.momentum_index = GEMINI_INDEX_NONE, u.arena_count = 3)));
  ACCEPTED(OF_SGD((w.momentum_index = w.param_index = GEMINI_INDEX_NONE, w.grad_index = 0, w.master_index = 1,
                   modes[0] = GEMINI_READ, modes[1] = GEMINI_READ_WRITE, u.arena_count = 2)));
  ACCEPTED(OF_SGD(u.flags = GEMINI_UPDATE_COMMIT));
  REFUSED(OF_SGD(u.flags = GEMINI_UPDATE_SPECULATE), "modes[4] is 3, but the walk does not write that arena");
  REFUSED(OF_SGD((bad.sgds[1].momentum = 0.5, w.momentum_index = GEMINI_INDEX_NONE)),
          "sgds[1]: momentum is 0.5, and momentum_index names no arena");
  REFUSED(OF_SGD(u.arena_count = 3), "momentum_index is 3, the update has 3 arenas");
  REFUSED(OF_SGD(modes[3] = GEMINI_WRITE), "momentum_index: modes[3] is 2, want READ_WRITE");
  REFUSED(OF_SGD(bad.sgds[2].lr = -1), "sgds[2]: lr is -1");
  REFUSED(OF_SGD(bad.sgds[2].grad_dtype = F32), "sgds[2]: grad_dtype is 0, in sgds[0] 1, which has another size");
  REFUSED(OF_SGD(w.master_index = GEMINI_INDEX_NONE), "master_index is 4294967295");
  REFUSED(w.momentum_index = GEMINI_INDEX_NONE, "momentum_index is 4294967295");
#undef OF_SGD
#undef REFUSED
#undef ACCEPTED
#undef CHECKED
}

int main(void) {
  RUN(test_walk_over_random_tables_equals_a_plain_loop);
  RUN(test_walk_beside_the_old_values_is_the_same);
  RUN(test_two_passes_of_a_walk_are_one);
  RUN(test_walk_cut_at_every_place_is_the_same);
  RUN(test_walk_queues_neighbours_with_one_rule_as_one);
  RUN(test_walk_takes_longer_rules);
  RUN(test_walk_that_fails_says_where_and_leaves_the_rest);
  RUN(test_walk_on_the_device_tells_what_the_manager_and_the_driver_refuse);
  RUN(test_walk_tells_the_first_failure_and_does_the_other_spans);
  RUN(test_walk_check_refuses_by_name_what_is_wrong);
  return check_done();
}
