/* Host memory that is committed ahead of its use: which parts, what they contain, what becomes of them when the budget
 * changes, when memory or its lock is refused, and at the end. SPDX-License-Identifier: Apache-2.0 */
#include "chunk/cut.h"
#include "chunk/host.h"
#include "chunk/host_ahead.h"
#include "core/manager.h"
#include "host/reserve.h"
#include "tracer/variants.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "../seed.h"
#include "tiers_world.h"

#define MIB (UINT64_C(1) << 20)
#define PART MIB /* with this budget, in small pages */
#define BUDGET (64 * PART)
#define SECTION 64 /* parts that the reserve makes accessible at once */

/* The simulated device, which counts what it locks, and refuses to when told to. */
static atomic_llong locked_bytes;
static atomic_int locks_left; /* so many more succeed; negative: all */
static gemini_status_t counted_lock(void *self, void *base, uint64_t size_bytes) {
  if (locks_left >= 0 && atomic_fetch_sub(&locks_left, 1) <= 0) {
    atomic_store(&locks_left, 0);
    return GEMINI_ERR_OOM_SYSTEM;
  }
  atomic_fetch_add(&locked_bytes, (long long)size_bytes);
  return gmi_device_sim.memory.host_lock(self, base, size_bytes);
}
static gemini_status_t counted_unlock(void *self, void *base, uint64_t size_bytes) {
  atomic_fetch_sub(&locked_bytes, (long long)size_bytes);
  return gmi_device_sim.memory.host_unlock(self, base, size_bytes);
}
static gmi_device_ops_t counting;

/* The thread reads the system's limits before it commits a part. */
static pthread_t main_thread;
static uint8_t *_Atomic watched; /* the host tier's range */
static atomic_bool gated, in_order;
static bool is_resident(uint64_t part) {
  unsigned char there = 0;
  return !mincore(atomic_load(&watched) + part * PART, 1, &there) && there & 1;
}
int open(const char *path, int flags, ...) {
  if (atomic_load(&watched) && !pthread_equal(pthread_self(), main_thread)) {
    while (atomic_load(&gated)) sleep_us(100);
    if ((is_resident(1) && !is_resident(61)) || (is_resident(49) && !is_resident(48))) atomic_store(&in_order, false);
  }
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0600);
}

static gemini_arena_t arena;

/* A manager of small chunks, and an arena whose chunks have the first home_bytes of the budget as their homes. */
static gemini_manager_t world_of(uint64_t host_bytes, uint64_t home_bytes, gmi_manager_t **m_out) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  gemini_manager_t mgr;
  uint64_t offset, begin, end;
  c.device_bytes = 4 * MIB, c.host_bytes = host_bytes, c.chunk_bytes = 65536;
  CHECK_OK(gemini_manager_open(&c, &mgr));
  gmi_manager_t *m = *m_out = gmi_manager_get(mgr);
  counting = gmi_device_sim;
  counting.memory.host_lock = counted_lock;
  counting.memory.host_unlock = counted_unlock;
  m->device.ops = &counting;
  locked_bytes = 0;
  locks_left = -1;
  CHECK_EQ(m->host.part_bytes, PART);
  config.name = "all", config.kind = GEMINI_KIND_OTHER;
  CHECK_OK(gemini_arena_create(mgr, &config, &arena));
  CHECK_OK(gemini_arena_take(mgr, arena, home_bytes, &offset));
  gmi_lock(m, "test");
  CHECK_OK(gmi_cut(m));
  gmi_host_home_range(m, gmi_arena_at(m, 0), &begin, &end);
  gmi_unlock(m);
  CHECK_EQ(begin, 0);
  CHECK_EQ(end, home_bytes);
  return mgr;
}
/* Each lock ends. */
static void end_of(gemini_manager_t mgr) {
  CHECK_OK(gemini_manager_close(mgr));
  CHECK_EQ(locked_bytes, 0);
}
static gemini_status_t use(gmi_manager_t *m, uint64_t part) {
  gmi_lock(m, "test");
  gemini_status_t status = gmi_host_commit(m, part * PART + 5, 1);
  if (!status) CHECK_EQ(m->host.committed[part], PART);
  gmi_unlock(m);
  return status;
}
static uint64_t ahead(gmi_manager_t *m) {
  gmi_lock(m, "test");
  uint64_t bytes = gmi_ahead_idle(m);
  gmi_unlock(m);
  return bytes / PART;
}
static uint64_t in_use(const gmi_manager_t *m) {
  uint64_t count = 0;
  for (uint64_t i = 0; i < m->host.part_count; i++) count += m->host.committed[i] / PART;
  return count;
}
/* What the system has given is what is in use and what is ahead; what is in use is locked. */
static void check_memory(gmi_manager_t *m) {
  gmi_reserve_figures_t figures;
  const uint64_t parts = ahead(m) + in_use(m);
  CHECK_OK(gmi_reserve_figures(m->host.reserve, &figures));
  CHECK_EQ(figures.committed_bytes, parts * PART);
  CHECK_EQ((uint64_t)locked_bytes, in_use(m) * PART);
}

static void test_as_many_parts_are_ahead_as_were_used_in_a_row(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  const struct {
    uint64_t part, ahead; /* after its use */
  } steps[] = {
    { 10, 0 },                                    /* who knows where it goes */
    { 11, 2 },                                    /* 12 and 13 */
    { 12, 3 },                                    /* 13 to 15 */
    { 12, 3 },                                    /* it has its memory */
    { 30, 3 },  { 29, 5 },                        /* downwards: 28 and 27 */
    { 28, 6 },                                    /* 27 to 25 */
    { 9, 10 },                                    /* below 10 to 12: 8 to 5 */
    { 60, 10 }, { 61, 12 },                       /* 62 and 63, the last ones */
    { 62, 11 }, { 63, 10 }, { 0, 10 }, { 1, 12 }, /* 2 and 3 */
    { 3, 11 },  { 2, 10 },                        /* 3 follows 2 already */
  };
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    CHECK_OK(use(m, steps[i].part));
    if (ahead(m) != steps[i].ahead) printf("step %zu\n", i);
    CHECK_EQ(ahead(m), steps[i].ahead);
    check_memory(m);
  }
  end_of(mgr);
}

/* A part that is taken reads as zeros, and its slots are known to. */
static void test_what_is_ahead_is_blank(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  void *block; /* the records of slots are made */
  CHECK_OK(gemini_host_alloc(mgr, 4096, 64, &block));
  for (uint64_t part = 0; part < 20; part++) {
    if (part >= 2) CHECK(ahead(m) > 0);
    CHECK_OK(use(m, part));
    for (uint64_t s = part * PART / 65536; s < (part + 1) * PART / 65536; s++) CHECK(m->host.slots[s].blank);
    uint8_t *at = m->host.base + part * PART;
    for (uint64_t i = 0; i < PART; i++)
      if (at[i]) CHECK_EQ(at[i], 0);
    memset(at, 7, PART);
  }
  CHECK_EQ(ahead(m), GMI_AHEAD_MOST); /* not 20 */
  CHECK_OK(gemini_host_free(mgr, block));
  end_of(mgr);
}

/* What is needed now comes before what may be needed soon. */
static void test_what_is_needed_now_comes_next(void) {
  int before = 0;
  for (int round = 0; round < 10; round++) {
    gmi_manager_t *m;
    gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
    gmi_reserve_figures_t figures;
    for (uint64_t part = 0; part < 16; part++) CHECK_OK(use(m, part)); /* 16 more are wanted */
    CHECK_OK(use(m, 60));
    CHECK_OK(gmi_reserve_figures(m->host.reserve, &figures));
    before += figures.committed_bytes < 33 * PART;
    CHECK_EQ(ahead(m), 16);
    check_memory(m);
    end_of(mgr);
  }
  CHECK(before);
}

/* After an iteration in which no part has come into use, and when an arena goes. */
static void test_what_is_not_used_is_given_back(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t other;
  CHECK_OK(use(m, 0));
  CHECK_OK(use(m, 1));
  CHECK_EQ(ahead(m), 2);
  for (int i = 0; i < 3; i++) {
    CHECK_OK(gemini_iteration_begin(mgr));
    CHECK_EQ(ahead(m), i == 0 ? 2 : i == 1 ? 3 : 0);
    check_memory(m);
    if (i == 0) CHECK_OK(use(m, 2)); /* behind it are 3 to 5 */
    CHECK_OK(gemini_iteration_end(mgr));
  }
  CHECK_OK(use(m, 3));
  CHECK_EQ(ahead(m), 4);
  config.name = "other", config.kind = GEMINI_KIND_OTHER;
  CHECK_OK(gemini_arena_create(mgr, &config, &other));
  CHECK_OK(gemini_arena_destroy(mgr, other));
  CHECK_EQ(ahead(m), 0);
  check_memory(m);
  end_of(mgr);
}

/* Behind the homes of an arena there is nothing that is likely to be used. */
static void test_only_homes_are_ahead(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, 12 * PART - 65536, &m);
  for (uint64_t part = 4; part < 8; part++) CHECK_OK(use(m, part));
  CHECK_EQ(ahead(m), 4); /* to 11 */
  for (uint64_t part = 8; part < 20; part++) {
    CHECK_OK(use(m, part));
    CHECK_EQ(ahead(m), part < 12 ? 11 - part : 0);
  }
  check_memory(m);
  end_of(mgr);
}

static void hint(gemini_manager_t mgr, uint64_t first, uint64_t parts) {
  gemini_access_t a = gemini_arena_access(arena, first * PART, parts * PART, GEMINI_READ, GEMINI_TIER_HOST);
  CHECK_OK(gemini_hint(mgr, &a, 1));
}

/* What a caller says will get contents is ahead, without taking a slot, until an iteration does not need it. */
static void test_what_is_expected_is_ahead(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  hint(mgr, 20, 30);
  CHECK_EQ(m->host.used, 0);
  CHECK_EQ(ahead(m), 30);
  hint(mgr, 20, 30);
  CHECK_OK(use(m, 25));
  CHECK_OK(use(m, 49));
  hint(mgr, 25, 1); /* in use */
  CHECK_EQ(ahead(m), 28);
  check_memory(m);
  for (int i = 0; i < 3; i++) {
    CHECK_OK(gemini_iteration_begin(mgr));
    CHECK_EQ(ahead(m), i < 2 ? 28 - i : 0);
    if (i == 0) CHECK_OK(use(m, 30));
    CHECK_OK(gemini_iteration_end(mgr));
  }
  hint(mgr, 0, 2); /* before an iteration begins, which uses none, and once more in it */
  CHECK_EQ(ahead(m), 2);
  for (int i = 0; i < 2; i++) {
    CHECK_OK(gemini_iteration_begin(mgr));
    CHECK_EQ(ahead(m), i ? 0 : 2);
    if (!i) hint(mgr, 0, 2);
    CHECK_OK(gemini_iteration_end(mgr));
  }
  check_memory(m);
  end_of(mgr);
}

/* What has contents comes to the host itself, as far as its bytes are not there. */
static void test_what_has_contents_is_not_expected(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  gemini_access_t a = gemini_arena_access(arena, 7 * PART, 100, GEMINI_WRITE, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(m->host.used, 0);
  hint(mgr, 7, 1);
  CHECK_EQ(ahead(m), 0);
  CHECK_EQ(m->host.committed[7], PART);
  CHECK_EQ(m->host.used, 65536);
  end_of(mgr);
}

/* What follows what is in use comes before what is expected. */
static void test_what_is_expected_comes_last(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  atomic_store(&gated, true);
  atomic_store(&in_order, true);
  main_thread = pthread_self();
  atomic_store(&watched, m->host.base);
  hint(mgr, 0, 50); /* the thread has taken the first part, or will */
  CHECK_OK(use(m, 58));
  CHECK_OK(use(m, 59)); /* 60 and 61 are wanted */
  atomic_store(&gated, false);
  CHECK_EQ(ahead(m), 52);
  atomic_store(&watched, NULL);
  CHECK(atomic_load(&in_order));
  end_of(mgr);
}

/* A plan comes into use, with a piece that is computed ahead and one that has two passes, which take so many slots together,
 * and one that is neither. */
static void expect_spare(gmi_manager_t *m, uint32_t slots) {
  static variant_t v;
  uint8_t ahead[] = { 1, 0, 0 }, passes[] = { 1, 0, 1 };
  uint32_t none[] = { 0 };
  const gmi_plan_piece_t pieces[] = { { .ahead_slots = slots - 1, .pass_slots = 200 },
                                      { .ahead_slots = 100, .pass_slots = 300 },
                                      { .pass_slots = 1 },
                                      { 0 } };
  const gmi_plan_bundle_t bundle = {
    .input = { .piece_count = 3, .pieces = pieces },
    .plan = { .piece_count = 3,
              .piece_ahead = ahead,
              .piece_passes = passes,
              .fetch_first = none,
              .evict_first = none },
    .made = true,
  };
  gmi_lock(m, "test");
  gmi_tracer_take_plan(m, &v, &bundle);
  gmi_unlock(m);
}
/* The memory of spare slots that a plan will take, behind what free slots have, and no more than is spare. */
static void test_what_spare_slots_will_take_is_ahead(void) {
  enum { SLOTS = PART / 65536, TAKEN = 5 * SLOTS / 2 };
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, PART, &m);
  CHECK_OK(use(m, 0));
  expect_spare(m, SLOTS); /* they have memory */
  CHECK_EQ(ahead(m), 0);
  expect_spare(m, TAKEN);
  CHECK_EQ(ahead(m), 2);
  expect_spare(m, TAKEN);
  CHECK_EQ(ahead(m), 2);
  check_memory(m);
  gmi_lock(m, "test");
  uint32_t slots[TAKEN];
  for (int i = 0; i < TAKEN; i++) CHECK(gmi_host_spare_take(m, false, &slots[i]));
  CHECK_EQ(gmi_ahead_idle(m), 0);
  CHECK_EQ(in_use(m), 3);
  m->host.own_peak[0] = BUDGET - 4 * PART; /* bytes of chunks: of what is left, half a part has memory */
  gmi_unlock(m);
  expect_spare(m, 1000);
  CHECK_EQ(ahead(m), 1);
  for (int i = 0; i < 2; i++) {
    CHECK_OK(gemini_iteration_begin(mgr));
    CHECK_EQ(ahead(m), i ? 0 : 1);
    CHECK_OK(gemini_iteration_end(mgr));
  }
  check_memory(m);
  gmi_lock(m, "test");
  for (int i = 0; i < TAKEN; i++) gmi_host_spare_give(m, slots[i]);
  gmi_unlock(m);
  end_of(mgr);
}

static void test_nothing_is_ahead_of_another_budget(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  void *block; /* the records of slots are made */
  CHECK_OK(gemini_host_alloc(mgr, 4096, 64, &block));
  CHECK_OK(gemini_host_free(mgr, block));
  for (int round = 0; round < 20; round++) {
    for (uint64_t part = 0; part < 6; part++) CHECK_OK(use(m, part));
    if (round & 1) CHECK_EQ(ahead(m), 6); /* else the budget changes while the thread is at work */
    CHECK_OK(gemini_budget_set(mgr, GEMINI_TIER_HOST, 2 * PART));
    CHECK_EQ(ahead(m), 0);
    CHECK_EQ(in_use(m), 2);
    check_memory(m);
    CHECK_OK(gemini_budget_set(mgr, GEMINI_TIER_HOST, BUDGET));
    check_memory(m);
  }
  end_of(mgr);
}

static void test_a_lock_that_is_refused_is_tried_again(void) {
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
  CHECK_OK(use(m, 0));
  CHECK_OK(use(m, 1));
  CHECK_EQ(ahead(m), 2);
  locks_left = 0;
  for (uint64_t part = 2; part <= 40; part += 38) { /* one that is ahead, one that is not */
    CHECK_EQ(use(m, part), GEMINI_ERR_OOM_SYSTEM);
    CHECK_EQ(m->host.committed[part], 0);
    CHECK_EQ(ahead(m), 1);
    check_memory(m);
  }
  locks_left = -1;
  CHECK_OK(use(m, 2));
  CHECK_EQ(ahead(m), 3);
  check_memory(m);
  end_of(mgr);
}

/* Memory that the system refuses ahead of time is nobody's error; who needs it asks for it himself. */
static void test_memory_that_is_refused_is_asked_for_ahead_again_in_the_next_iteration(void) {
  if (check_is_slow()) return; /* sanitizers cannot do without memory meanwhile */
  gmi_manager_t *m;
  gemini_manager_t mgr = world_of(3 * SECTION * PART, 3 * SECTION * PART, &m);
  struct rlimit was, none = { .rlim_cur = 4096 }; /* 0 is none */
  CHECK_OK(use(m, 10));
  CHECK_OK(use(m, 11)); /* starts the thread */
  CHECK_OK(use(m, SECTION - 2));
  CHECK_EQ(ahead(m), 2);
  CHECK_EQ(getrlimit(RLIMIT_DATA, &was), 0);
  none.rlim_max = was.rlim_max;
  CHECK_EQ(setrlimit(RLIMIT_DATA, &none), 0);
  const gemini_status_t status = use(m, SECTION - 1); /* the next two are in the next section */
  const uint64_t got = ahead(m);
  CHECK_EQ(setrlimit(RLIMIT_DATA, &was), 0);
  CHECK_OK(status);
  CHECK_EQ(got, 2);
  check_memory(m);
  CHECK_OK(use(m, SECTION));
  CHECK_OK(use(m, SECTION + 1));
  CHECK_EQ(ahead(m), 2);
  check_memory(m);
  CHECK_OK(gemini_iteration_begin(mgr));
  CHECK_OK(use(m, SECTION + 2));
  CHECK_EQ(ahead(m), 7);
  check_memory(m);
  end_of(mgr);
}

/* Used and closed while the thread is at work, in any order: nothing is lost, and each lock ends. */
static void test_any_order_at_any_moment(void) {
  uint64_t random = seed_begin(__func__);
  for (int round = 0; round < 60; round++) {
    gmi_manager_t *m;
    gemini_manager_t mgr = world_of(BUDGET, BUDGET, &m);
    const uint64_t uses = below(&random, 40);
    for (uint64_t i = 0, part = below(&random, 64); i < uses; i++) {
      CHECK_OK(use(m, part));
      part = below(&random, 4) ? (part + 1) % 64 : below(&random, 64);
      if (!below(&random, 12)) check_memory(m);
      if (!below(&random, 16))
        CHECK_OK(gemini_budget_set(mgr, GEMINI_TIER_HOST, BUDGET)); /* as it is; what is ahead goes */
    }
    if (below(&random, 2)) check_memory(m);
    end_of(mgr);
  }
}

int main(void) {
  RUN(test_as_many_parts_are_ahead_as_were_used_in_a_row);
  RUN(test_what_is_ahead_is_blank);
  RUN(test_what_is_needed_now_comes_next);
  RUN(test_only_homes_are_ahead);
  RUN(test_what_is_not_used_is_given_back);
  RUN(test_what_is_expected_is_ahead);
  RUN(test_what_has_contents_is_not_expected);
  RUN(test_what_is_expected_comes_last);
  RUN(test_what_spare_slots_will_take_is_ahead);
  RUN(test_nothing_is_ahead_of_another_budget);
  RUN(test_a_lock_that_is_refused_is_tried_again);
  RUN(test_memory_that_is_refused_is_asked_for_ahead_again_in_the_next_iteration);
  RUN(test_any_order_at_any_moment);
  return check_done();
}
