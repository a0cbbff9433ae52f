/* Updates of the host in two passes, which the advice of the tracer is made to ask for: parameters first, states later, to
 * the bit what one pass leaves. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "../integration/world.h"
#include "chunk/arena.h"
#include "chunk/chunk.h"
#include "chunk/host.h"
#include "core/manager.h"
#include "core/observer.h"
#include "core/workers.h"

#define OK(call) CHECK_OK(call)
enum { HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE };
enum { LATE = GEMINI_UPDATE_LATE, PASSES = GEMINI_UPDATE_PASSES };
enum { BOTH = GEMINI_PASS_BOTH, RESULTS = GEMINI_PASS_RESULTS, STATES = GEMINI_PASS_STATES };
enum { UNIT = WORLD_CHUNK / 4, TENSORS = 4, LAST = 5000, WORKERS = 2 * TENSORS + 1, ELEMENTS = 3 * UNIT + LAST };
/* The last tensor is short. A worker is left when second passes of all units, of two slices each, wait for the
 * gate. */

/* ---- the model: sums += gradient, parameter = the low half of the sum */
typedef struct {
  world_t w;
  gemini_arena_t params, grads, sums;
  gemini_tensor_t param[TENSORS], grad[TENSORS], sum[TENSORS];
  uint32_t grad_is[ELEMENTS];
  uint64_t sum_is[ELEMENTS];
} model_t;
static model_t model;

static gmi_advice_t advice;
static bool asks;
static bool two_passes(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  (void)m, (void)index, (void)piece;
  return asks;
}

static bool results_ahead; /* else all of a unit is computed ahead */
static bool unit_ahead(gmi_manager_t *m, uint32_t arena, uint64_t element, uint64_t unit, bool *results_out) {
  (void)m, (void)arena, (void)element, (void)unit;
  *results_out = results_ahead;
  return true;
}

static uint64_t piece_use(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  (void)m, (void)index;
  return piece;
}

static uint64_t length_of(int tensor) { return tensor == TENSORS - 1 ? LAST : UNIT; }

static void put(gemini_tensor_t tensor, int number, uint32_t width, uint32_t tier, const void *from) {
  gemini_access_t a = world_whole(tensor, GEMINI_WRITE, tier);
  OK(gemini_acquire(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  memcpy(a.ptr, (const char *)from + (uint64_t)number * UNIT * width, length_of(number) * width);
  OK(gemini_release(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static void gradients_put(uint32_t seed, uint32_t tier) {
  for (uint32_t e = 0; e < ELEMENTS; e++) model.grad_is[e] = seed * 2654435761u + e * e;
  for (int i = 0; i < TENSORS; i++) put(model.grad[i], i, 4, tier, model.grad_is);
}

static void model_open(bool reuse, uint32_t threads, uint64_t host_chunks) {
  gemini_config_t c = world_config(16, host_chunks, 0);
  c.update_threads = threads;
  model.w = world_open(c);
  gmi_manager_t *m = gmi_manager_get(model.w.mgr);
  advice = *m->trace.advice;
  advice.two_passes = two_passes;
  advice.piece_use = piece_use;
  advice.unit_ahead = unit_ahead;
  m->trace.advice = &advice;
  asks = true, results_ahead = false;
  model.params = world_arena(&model.w, GEMINI_KIND_PARAM, 4, NULL, NULL, NULL);
  model.grads =
      world_arena(&model.w, GEMINI_KIND_GRAD, 4, NULL, reuse ? NULL : model.params, reuse ? model.params : NULL);
  model.sums = world_arena(&model.w, GEMINI_KIND_MASTER, 8, NULL, model.params, NULL);
  for (int i = 0; i < TENSORS; i++) {
    char name[32];
    snprintf(name, sizeof name, "p.%d", i);
    model.param[i] = world_tensor(&model.w, model.params, name, length_of(i) * 4);
    OK(gemini_tensor_counterpart(model.w.mgr, model.param[i], model.grads, &model.grad[i]));
    OK(gemini_tensor_counterpart(model.w.mgr, model.param[i], model.sums, &model.sum[i]));
  }
  for (uint64_t e = 0; e < ELEMENTS; e++) model.sum_is[e] = e << 30 | 7;
  for (int i = 0; i < TENSORS; i++) put(model.sum[i], i, 8, HOST, model.sum_is);
}

/* ---- the function of the updates */
/* Second passes wait until the gate is open, others while it holds; fails: in this pass. */
static _Atomic bool gate, holds, held; /* held: a pass has come so far as to wait for holds */
static _Atomic uint32_t fails;
static _Atomic uint64_t elements_of[STATES + 1];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t first_done[ELEMENTS];       /* passes of results behind which there was none of states */
static uint64_t states_order[2 * TENSORS]; /* units, as second passes begin and come back to them */
static _Atomic uint32_t states_begun;

static gemini_status_t sum_up(void *user, const gemini_update_span_t *s) {
  const uint32_t *grad = s->ptr[0];
  const uint64_t *sum = s->ptr[1];
  uint64_t *sum_out = s->out[1];
  uint32_t *param_out = s->out[2];
  CHECK(!user && s->tier == HOST && s->pass <= STATES);
  CHECK(s->out[0] == s->ptr[0] && (s->pass == RESULTS) == !sum_out && (s->pass == STATES) == !param_out);
  CHECK(s->ptr[2] == s->out[2]);
  const uint64_t unit = s->first_element / UNIT;
  pthread_mutex_lock(&lock);
  if (s->pass == STATES && states_begun < 2 * TENSORS && (!states_begun || states_order[states_begun - 1] != unit))
    states_order[states_begun++] = unit;
  pthread_mutex_unlock(&lock);
  while (s->pass == STATES ? !atomic_load(&gate) : atomic_load(&holds)) {
    if (s->pass != STATES) atomic_store(&held, true);
    usleep(100);
  }
  atomic_fetch_add(&elements_of[s->pass], s->element_count);
  pthread_mutex_lock(&lock);
  for (uint64_t e = 0; e < s->element_count; e++) {
    if (s->pass == RESULTS) CHECK_EQ(first_done[s->first_element + e]++, 0);
    if (s->pass == STATES) CHECK_EQ(first_done[s->first_element + e]--, 1);
  }
  pthread_mutex_unlock(&lock);
  if (s->pass != BOTH && s->pass == atomic_load(&fails)) return GEMINI_ERR_NOT_FOUND;
  for (uint64_t e = 0; e < s->element_count; e++) {
    const uint64_t value = sum[e] + grad[e];
    if (param_out) param_out[e] = (uint32_t)value;
    if (sum_out) sum_out[e] = value;
  }
  return GEMINI_OK;
}
static void update(uint32_t flags) {
  const gemini_arena_t arenas[] = { model.grads, model.sums, model.params };
  const uint32_t modes[] = { GEMINI_READ, GEMINI_READ_WRITE, GEMINI_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = flags;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 3;
  u.stream = model.w.stream;
  u.try_fn = sum_up;
  OK(gemini_update(model.w.mgr, &u));
  if (!(flags & GEMINI_UPDATE_SPECULATE))
    for (uint64_t e = 0; e < ELEMENTS; e++) model.sum_is[e] += model.grad_is[e];
}
static void counts_begin(bool open) {
  for (int i = 0; i <= STATES; i++) atomic_store(&elements_of[i], 0);
  states_begun = 0;
  atomic_store(&held, false);
  atomic_store(&gate, open);
}
static void counted(uint64_t both, uint64_t results, uint64_t states) {
  CHECK_EQ(atomic_load(&elements_of[BOTH]), both);
  CHECK_EQ(atomic_load(&elements_of[RESULTS]), results);
  CHECK_EQ(atomic_load(&elements_of[STATES]), states);
}
static void params_right(uint32_t tier) {
  for (int i = 0; i < TENSORS; i++) {
    gemini_access_t a = world_whole(model.param[i], GEMINI_READ, tier);
    OK(gemini_acquire(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t e = 0; e < length_of(i); e++)
      CHECK_EQ(((const uint32_t *)a.ptr)[e], (uint32_t)model.sum_is[(uint64_t)i * UNIT + e]);
    OK(gemini_release(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
}
static void sums_right(uint32_t tier) {
  for (int i = 0; i < TENSORS; i++) {
    gemini_access_t a = world_whole(model.sum[i], GEMINI_READ, tier);
    OK(gemini_acquire(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK(!memcmp(a.ptr, model.sum_is + (uint64_t)i * UNIT, length_of(i) * 8));
    OK(gemini_release(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
}

/* ---- tests */
/* An update whose second passes wait for the gate. */
static void update_begin(bool reuse, uint32_t tier) {
  model_open(reuse, WORKERS, 64);
  gradients_put(3, tier);
  counts_begin(false);
  update(LATE | PASSES);
}
static void test_parameters_are_there_before_states_are(void) {
  for (int reuse = 0; reuse < 2; reuse++) {
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
      update_begin(reuse, tier);
      params_right(tier);
      CHECK(atomic_load(&elements_of[RESULTS]) == ELEMENTS && !atomic_load(&elements_of[STATES]));
      CHECK(world_stats(&model.w).pending_updates > 0);
      atomic_store(&gate, true);
      OK(gemini_update_wait(model.w.mgr));
      counted(0, ELEMENTS, ELEMENTS);
      sums_right(HOST);
      params_right(HOST);
      world_close(&model.w);
    }
  }
}

static void test_one_pass_where_two_are_not_said_or_not_asked_for(void) {
  const uint32_t flags[] = { LATE, LATE | PASSES, LATE | PASSES, PASSES }; /* not asked for, no room, not late */
  for (int how = 0; how < 4; how++) {
    model_open(true, WORKERS, how == 2 ? 12 : 64); /* 11 chunks, and room for one more */
    gradients_put(3, HOST);
    counts_begin(false);
    asks = how != 1;
    update(flags[how]);
    atomic_store(&gate, true);
    OK(gemini_update_wait(model.w.mgr));
    const uint64_t two = how == 2 ? UNIT : 0;
    counted(ELEMENTS - two, two, two);
    sums_right(HOST);
    params_right(DEVICE);
    world_close(&model.w);
  }
}

/* The second passes read what the gradients were, whatever becomes of these meanwhile, and whoever is to write the states
 * next waits for them. */
static void *open_soon(void *user) {
  usleep(20000);
  atomic_store(&holds, false);
  atomic_store(&gate, true);
  return user;
}
static void test_gradients_and_states_are_written_again_meanwhile(void) {
  for (int reuse = 0; reuse < 2; reuse++) {
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
      update_begin(reuse, tier);
      if (!reuse) {
        const gemini_access_t all = world_whole(model.grads, 0, 0);
        OK(gemini_zero(model.w.mgr, &all)); /* does not wait for the gate */
        CHECK_EQ(atomic_load(&elements_of[STATES]), 0);
      }
      params_right(DEVICE);
      if (reuse || tier == DEVICE) gradients_put(4, tier); /* likewise: they come to other memory */
      CHECK_EQ(atomic_load(&elements_of[STATES]), 0);
      pthread_t thread;
      CHECK(!pthread_create(&thread, NULL, open_soon, NULL));
      if (!reuse && tier == HOST) gradients_put(4, tier);
      update(LATE | PASSES);
      params_right(HOST);
      OK(gemini_update_wait(model.w.mgr));
      CHECK(!pthread_join(thread, NULL));
      counted(0, 2 * ELEMENTS, 2 * ELEMENTS);
      sums_right(HOST);
      world_close(&model.w);
    }
  }
}

/* The only worker is in the last unit's second pass, behind which the others' follow from the end. Unit 0 comes next if
 * a thread waits for its states, and before all others if it did so before the first pass had ended. */
static void *first_sums(void *user) {
  gemini_access_t a = world_whole(model.sum[0], GEMINI_READ, HOST);
  OK(gemini_acquire(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(!memcmp(a.ptr, model.sum_is, UNIT * 8));
  OK(gemini_release(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  return user;
}
static void await_chunk(void) {
  static char text[65536];
  uint64_t length;
  do {
    usleep(1000);
    OK(gemini_manager_dump(model.w.mgr, sizeof text, text, &length));
  } while (!strstr(text, "in gemini_acquire()"));
}
static void test_states_that_a_thread_waits_for_come_next(void) {
  enum { NOBODY, SECOND, FIRST };
  const uint64_t orders[][TENSORS] = { [NOBODY] = { 3, 2, 1, 0 }, [SECOND] = { 3, 0, 2, 1 }, [FIRST] = { 0, 3, 2, 1 } };
  for (int waits = NOBODY; waits <= FIRST; waits++) {
    model_open(true, 1, 64);
    gradients_put(3, HOST);
    counts_begin(false);
    atomic_store(&holds, true); /* until all units are queued */
    update(LATE | PASSES);
    atomic_store(&holds, waits == FIRST);
    while (waits != FIRST && !atomic_load(&states_begun)) usleep(100);
    if (waits != FIRST) params_right(HOST);
    pthread_t thread;
    if (waits) {
      CHECK(!pthread_create(&thread, NULL, first_sums, NULL));
      await_chunk();
    }
    atomic_store(&holds, false);
    atomic_store(&gate, true);
    if (waits) CHECK(!pthread_join(thread, NULL));
    OK(gemini_update_wait(model.w.mgr));
    CHECK_EQ(states_begun, TENSORS);
    for (int i = 0; i < TENSORS; i++) CHECK_EQ(states_order[i], orders[waits][i]);
    sums_right(HOST);
    world_close(&model.w);
  }
}

/* Zeroed chunks have left the memory that second passes read; the arena's end waits for these all the same. */
static void test_an_arena_ends_behind_the_updates_that_read_it(void) {
  for (int zeroed = 0; zeroed < 2; zeroed++) {
    update_begin(false, HOST);
    params_right(HOST);
    const gemini_access_t all = world_whole(model.grads, 0, 0);
    if (zeroed) OK(gemini_zero(model.w.mgr, &all));
    CHECK_EQ(atomic_load(&elements_of[STATES]), 0);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, open_soon, NULL));
    OK(gemini_arena_destroy(model.w.mgr, model.grads));
    counted(0, ELEMENTS, ELEMENTS);
    CHECK(!pthread_join(thread, NULL));
    OK(gemini_update_wait(model.w.mgr));
    sums_right(HOST);
    world_close(&model.w);
  }
}

/* A chunk that cannot move while the host's budget shrinks keeps its slot above it, whose memory leaves with the chunk:
 * behind the updates that read it. */
static void test_memory_above_the_budget_ends_behind_the_updates_that_read_it(void) {
  for (int two = 0; two < 2; two++) {
    model_open(false, WORKERS, 128); /* the gradients' slots are far above what is needed */
    gmi_manager_t *m = gmi_manager_get(model.w.mgr);
    gradients_put(3, HOST);
    gmi_chunk_t *chunk = &gmi_arena_get(m, model.grads)->chunks[TENSORS - 1];
    const uint32_t slot = gmi_chunk_slot(chunk);
    gmi_lock(m, "test");
    gmi_chunk_hold_host(m, chunk, false);
    gmi_unlock(m);
    OK(gemini_budget_set(model.w.mgr, HOST, (uint64_t)slot * WORLD_CHUNK));
    gmi_lock(m, "test");
    gmi_chunk_unhold_host(m, chunk, false);
    gmi_unlock(m);
    CHECK(gmi_chunk_slot(chunk) == slot && slot >= m->host.slot_count);
    asks = two;
    counts_begin(false);
    atomic_store(&holds, !two);
    update(LATE | PASSES);
    if (two) params_right(HOST);
    else
      while (!atomic_load(&held)) usleep(100);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, open_soon, NULL));
    const gemini_access_t all = world_whole(model.grads, 0, 0);
    OK(gemini_zero(model.w.mgr, &all));
    CHECK(!pthread_join(thread, NULL));
    OK(gemini_update_wait(model.w.mgr));
    sums_right(HOST);
    world_close(&model.w);
  }
}

/* Speculates results, and waits until the workers have them. */
static void results_begin(bool reuse, uint32_t tier) {
  model_open(reuse, WORKERS, 64);
  results_ahead = true;
  gradients_put(3, tier);
  counts_begin(false);
  memset(first_done, 0, sizeof first_done);
  update(GEMINI_UPDATE_SPECULATE | PASSES);
  while (world_stats(&model.w).pending_updates) usleep(100);
  CHECK_EQ(world_stats(&model.w).speculated_elements, ELEMENTS);
}
/* Parameters have one spare slot a unit, states none; nothing is seen until the update, which runs the second passes
 * alone. */
static void test_results_are_taken_over_and_states_follow(void) {
  for (int how = 0; how < 8; how++) {
    const bool late = how & 1;
    results_begin(how & 2, how & 4 ? HOST : DEVICE);
    CHECK_EQ(gmi_manager_get(model.w.mgr)->host.spare_count, TENSORS);
    sums_right(DEVICE); /* and leaves copies there */
    counted(0, ELEMENTS, 0);
    atomic_store(&gate, !late);
    update((late ? LATE : 0) | PASSES | GEMINI_UPDATE_COMMIT);
    CHECK_EQ(world_stats(&model.w).committed_elements, ELEMENTS);
    CHECK_EQ(gmi_manager_get(model.w.mgr)->host.spare_count, 0);
    params_right(DEVICE);
    counted(0, ELEMENTS, late ? 0 : ELEMENTS);
    const gemini_access_t all = world_whole(model.grads, 0, 0);
    OK(gemini_zero(model.w.mgr, &all)); /* the second passes have the gradients as they were */
    atomic_store(&gate, true);
    OK(gemini_update_wait(model.w.mgr));
    counted(0, ELEMENTS, ELEMENTS);
    sums_right(DEVICE);
    params_right(HOST);
    gradients_put(4, how & 4 ? HOST : DEVICE);
    update(GEMINI_UPDATE_SPECULATE | PASSES);
    update(LATE | PASSES | GEMINI_UPDATE_COMMIT);
    OK(gemini_update_wait(model.w.mgr));
    counted(0, 2 * ELEMENTS, 2 * ELEMENTS);
    sums_right(HOST);
    params_right(HOST);
    world_close(&model.w);
  }
}

/* A gradient, a state or a parameter that is written drops the results of its unit, the first one; as does an update
 * without passes, all of them. */
static void test_results_of_what_has_changed_are_dropped(void) {
  for (int how = 0; how < 8; how++) {
    const bool reuse = how & 1, other = how >= 6;
    results_begin(reuse, HOST);
    CHECK_EQ(world_stats(&model.w).dropped_elements, 0);
    if (how >> 1 == 0) put(model.grad[0], 0, 4, HOST, model.grad_is);
    if (how >> 1 == 1) put(model.sum[0], 0, 8, HOST, model.sum_is);
    if (how >> 1 == 2 && !reuse) put(model.param[0], 0, 4, HOST, model.grad_is);
    if (how >> 1 == 2 && reuse) OK(gemini_update_drop(model.w.mgr));
    const uint64_t dropped = how >> 1 == 2 && reuse ? ELEMENTS : UNIT;
    if (!other) CHECK_EQ(world_stats(&model.w).dropped_elements, dropped);
    memset(first_done, 0, sizeof first_done);
    counts_begin(true);
    for (uint64_t e = other ? ELEMENTS : dropped; e < ELEMENTS; e++) first_done[e] = 1;
    update(LATE | GEMINI_UPDATE_COMMIT | (other ? 0 : PASSES));
    OK(gemini_update_wait(model.w.mgr));
    if (other) counted(ELEMENTS, 0, 0);
    else counted(0, dropped, ELEMENTS);
    sums_right(HOST);
    params_right(DEVICE);
    world_close(&model.w);
  }
}

/* States that have left the host since are not there for a second pass. */
static void test_results_without_their_states_are_dropped(void) {
  results_begin(true, HOST);
  gmi_manager_t *m = gmi_manager_get(model.w.mgr);
  gemini_access_t a = world_whole(model.sum[0], GEMINI_READ, DEVICE);
  OK(gemini_acquire(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  OK(gemini_release(model.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(world_stats(&model.w).dropped_elements, 0);
  const gmi_chunk_t *chunks = gmi_arena_get(m, model.sums)->chunks;
  gmi_lock(m, "test");
  for (bool freed = true, started; freed && gmi_chunk_has_slot(&chunks[0]) && gmi_chunk_has_slot(&chunks[1]);)
    OK(gmi_host_reclaim(m, &freed, &started));
  CHECK(!gmi_chunk_has_slot(&chunks[0]) || !gmi_chunk_has_slot(&chunks[1]));
  gmi_unlock(m);
  memset(first_done, 0, sizeof first_done);
  for (uint64_t e = UNIT; e < ELEMENTS; e++) first_done[e] = 1;
  counts_begin(true);
  update(LATE | PASSES | GEMINI_UPDATE_COMMIT);
  CHECK_EQ(world_stats(&model.w).dropped_elements, UNIT);
  OK(gemini_update_wait(model.w.mgr));
  counted(0, UNIT, ELEMENTS);
  sums_right(HOST);
  params_right(HOST);
  world_close(&model.w);
}

static void test_results_whose_pass_failed_are_computed_again(void) {
  model_open(true, WORKERS, 64);
  results_ahead = true;
  gradients_put(3, HOST);
  counts_begin(true);
  atomic_store(&fails, RESULTS);
  update(GEMINI_UPDATE_SPECULATE | PASSES);
  while (world_stats(&model.w).pending_updates) usleep(100);
  atomic_store(&fails, BOTH);
  memset(first_done, 0, sizeof first_done);
  counts_begin(true);
  update(LATE | PASSES | GEMINI_UPDATE_COMMIT);
  OK(gemini_update_wait(model.w.mgr));
  CHECK_EQ(world_stats(&model.w).committed_elements, 0);
  counted(0, ELEMENTS, ELEMENTS);
  sums_right(HOST);
  params_right(DEVICE);
  world_close(&model.w);
}

/* What is taken over before it has begun has two passes as well. The only worker is in the first unit's: the first one of
 * two where results alone were speculated, else the one that computes all. */
static void test_what_was_speculated_and_has_not_begun_has_two_passes(void) {
  for (int how = 0; how < 4; how++) {
    model_open(how & 1, 1, 64);
    results_ahead = how & 2;
    const uint64_t both = results_ahead ? 0 : UNIT;
    gradients_put(3, HOST);
    counts_begin(false);
    memset(first_done, 0, sizeof first_done);
    atomic_store(&holds, true);
    update(GEMINI_UPDATE_SPECULATE | PASSES);
    while (!atomic_load(&held)) usleep(100);
    update(LATE | PASSES | GEMINI_UPDATE_COMMIT);
    CHECK_EQ(world_stats(&model.w).committed_elements, ELEMENTS);
    atomic_store(&holds, false);
    params_right(DEVICE);
    counted(both, ELEMENTS - both, 0);
    atomic_store(&gate, true);
    OK(gemini_update_wait(model.w.mgr));
    counted(both, ELEMENTS - both, ELEMENTS - both);
    sums_right(HOST);
    world_close(&model.w);
  }
}

static void test_a_failure_of_the_second_pass_is_one_of_the_update(void) {
  model_open(true, WORKERS, 64);
  gradients_put(3, HOST);
  counts_begin(true);
  atomic_store(&fails, STATES);
  update(LATE | PASSES);
  CHECK_EQ(gemini_update_wait(model.w.mgr), GEMINI_ERR_NOT_FOUND);
  CHECK_SAYS(world_error().message, "the function of an update failed for elements");
  atomic_store(&fails, BOTH);
  CHECK_EQ(gemini_manager_close(model.w.mgr), GEMINI_ERR_NOT_FOUND);
}

/* The rates of passes are their own: a plan is made with each. */
static void test_passes_have_rates_of_their_own(void) {
  model_open(true, WORKERS, 64);
  gmi_manager_t *m = gmi_manager_get(model.w.mgr);
  counts_begin(true);
  for (int iteration = 0; iteration < 4; iteration++) {
    gmi_workers_iteration(m);
    CHECK(gmi_workers_ns_per_element(m, RESULTS) == 0 && gmi_workers_ns_per_element(m, STATES) == 0); /* of the first */
    gradients_put(3, HOST);
    update(LATE | PASSES);
    OK(gemini_update_wait(model.w.mgr));
  }
  CHECK(gmi_workers_ns_per_element(m, BOTH) == 0);
  CHECK(gmi_workers_ns_per_element(m, RESULTS) > 0 && gmi_workers_ns_per_element(m, STATES) > 0);
  world_close(&model.w);
}

int main(void) {
  RUN(test_parameters_are_there_before_states_are);
  RUN(test_one_pass_where_two_are_not_said_or_not_asked_for);
  RUN(test_gradients_and_states_are_written_again_meanwhile);
  RUN(test_states_that_a_thread_waits_for_come_next);
  RUN(test_an_arena_ends_behind_the_updates_that_read_it);
  RUN(test_memory_above_the_budget_ends_behind_the_updates_that_read_it);
  RUN(test_what_was_speculated_and_has_not_begun_has_two_passes);
  RUN(test_results_are_taken_over_and_states_follow);
  RUN(test_results_of_what_has_changed_are_dropped);
  RUN(test_results_without_their_states_are_dropped);
  RUN(test_results_whose_pass_failed_are_computed_again);
  RUN(test_a_failure_of_the_second_pass_is_one_of_the_update);
  RUN(test_passes_have_rates_of_their_own);
  return 0;
}
