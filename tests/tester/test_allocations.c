/* Makes one allocation of a call fail, first the first, then the second and so on: each time the call returns
 * GEMINI_ERR_OOM_SYSTEM, records it for gemini_last_error(), and has changed nothing.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "../fork.h"
#include "../integration/world.h"
#include "faults.h"
#include "gemini/group.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE };

/* Makes `count` allocations of the call fail, from number `skip` on. False: the call made no such allocation. */
#define WITH_FAILURES(skip, count, status, call) \
  (faults_arm(FAULT_MEMORY, (skip), (count), 0, false), (status) = (call), faults_disarm() > 0)
#define WITH_FAILURE(skip, status, call) WITH_FAILURES(skip, 1, status, call)

static void check_refused(const char *function, gemini_status_t status) {
  CHECK_EQ(status, GEMINI_ERR_OOM_SYSTEM);
  CHECK_EQ(world_error().status, GEMINI_ERR_OOM_SYSTEM);
  CHECK(!strcmp(world_error().operation, function));
}

static void test_register_without_memory_takes_nothing_of_the_arena(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_tensor_t t = 0, other;
  gemini_status_t status;
  uint64_t failed = 0;
  for (; WITH_FAILURE(failed, status, gemini_tensor_register(w.mgr, arena, "t", W, GEMINI_OFFSET_NEXT, &t)); failed++) {
    check_refused("gemini_tensor_register", status);
    CHECK_EQ(t, 0);
    CHECK_EQ(world_arena_info(&w, arena).size_bytes, 0);
    CHECK_EQ(world_arena_info(&w, arena).tensor_count, 0);
    CHECK_EQ(world_stats(&w).model_bytes, 0);
    CHECK_STATUS(gemini_tensor_find(w.mgr, "t", &other), GEMINI_ERR_NOT_FOUND);
  }
  CHECK_EQ(status, GEMINI_OK);
  CHECK(failed >= 2); /* for its name and its record */
  CHECK_EQ(world_tensor_info(&w, t).offset_bytes, 0);
  world_close(&w);
}

/* jemalloc forgets an extent for which it finds no memory for its own records. It needs some for each GiB of addresses in
 * which it gets an extent: hence several managers, with more than a GiB each. */
static void test_host_alloc_without_memory_takes_no_slots(void) {
  enum { MANY = 4 };
  world_t w[MANY];
  uint64_t refused = 0;
  for (int i = 0; i < MANY; i++) {
    w[i] = world_open(world_config(4, 40000, 0));
    void *ptr = NULL;
    gemini_status_t status;
    CHECK_OK(gemini_host_alloc(w[i].mgr, 1 << 17, 4096, &ptr)); /* makes the heap; this block is none of jemalloc's */
    CHECK_OK(gemini_host_free(w[i].mgr, ptr));
    ptr = NULL;
    (void)WITH_FAILURE(0, status, gemini_host_alloc(w[i].mgr, 20079, 2048, &ptr));
    if (status) {
      check_refused("gemini_host_alloc", status);
      CHECK(!ptr);
      CHECK_EQ(world_stats(&w[i]).used_bytes[GEMINI_TIER_HOST], 0);
      CHECK_OK(gemini_host_alloc(w[i].mgr, 20079, 2048, &ptr));
      refused++;
    }
    CHECK_OK(gemini_host_free(w[i].mgr, ptr));
    CHECK_EQ(world_stats(&w[i]).used_bytes[GEMINI_TIER_HOST], 0);
  }
  CHECK(refused > 0);
  for (int i = 0; i < MANY; i++) world_close(&w[i]);
}

static void test_open_without_memory_says_what_failed_now(void) {
  gemini_config_t c = world_config(4, 8, 0);
  gemini_manager_t mgr = 0;
  gemini_status_t status;
  uint64_t failed = 0, refused = 0;
  for (;; failed++) {
    CHECK_STATUS(gemini_manager_close(handle_of(12345)),
                 GEMINI_ERR_HANDLE); /* an earlier failure, which the next call must not report */
    if (!WITH_FAILURE(failed, status, gemini_manager_open(&c, &mgr))) break;
    if (!status) { /* the call works without that memory */
      CHECK_OK(gemini_manager_close(mgr));
      mgr = 0;
      continue;
    }
    refused++;
    check_refused("gemini_manager_open", status);
    CHECK_EQ(mgr, 0);
    CHECK(!strstr(world_error().message, "no open manager"));
  }
  CHECK_OK(status);
  CHECK(refused >= 8);
  CHECK_OK(gemini_manager_close(mgr));
}

/* A world with a plan of two operators, whose trace is saved to path. */
static world_t planned(gemini_arena_t *arena_out, const char *path) {
  world_t w = world_open(world_config(4, 8, 0));
  *arena_out = world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_tensor_t t = world_tensor(&w, *arena_out, "t", 6 * W);
  for (int round = 0; round < 2; round++) {
    CHECK_OK(gemini_iteration_begin(w.mgr));
    for (int k = 0; k < 2; k++) {
      gemini_access_t half = world_part(t, (uint64_t)k * 3 * W, 3 * W, GEMINI_READ_WRITE, DEVICE);
      CHECK_OK(gemini_op_begin(w.mgr, k ? "second" : "first", GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_acquire(w.mgr, &half, 1, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_release(w.mgr, &half, 1, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_op_end(w.mgr));
    }
    CHECK_OK(gemini_iteration_end(w.mgr));
  }
  CHECK_OK(gemini_trace_save(w.mgr, path));
  return w;
}

static void test_trace_load_and_explain_without_memory_change_nothing(void) {
  char path[] = "/tmp/gemini-test.XXXXXX", text[4096], again[4096];
  int fd = mkstemp(path);
  CHECK(fd >= 0);
  gemini_arena_t arena;
  world_t w = planned(&arena, path);
  gemini_status_t status;
  uint64_t failed = 0, length = 0;
  CHECK_OK(gemini_plan_explain(w.mgr, sizeof text, text, &length));
  CHECK(length < sizeof text);
  uint64_t plans = world_stats(&w).plans;
  for (; WITH_FAILURE(failed, status, gemini_trace_load(w.mgr, path)); failed++) {
    check_refused("gemini_trace_load", status);
    CHECK_EQ(world_stats(&w).plans, plans);
    CHECK_OK(gemini_plan_explain(w.mgr, sizeof again, again, NULL));
    CHECK(!strcmp(text, again));
  }
  CHECK_OK(status);
  CHECK(failed >= 20);
  CHECK_OK(gemini_plan_explain(w.mgr, sizeof text, text, &length));
  for (failed = 0;; failed++) { /* the whole text, or an error */
    uint64_t needs = UINT64_MAX;
    if (!WITH_FAILURE(failed, status, gemini_plan_explain(w.mgr, sizeof again, again, &needs))) break;
    check_refused("gemini_plan_explain", status);
    CHECK_EQ(needs, UINT64_MAX);
  }
  CHECK_OK(status);
  CHECK(!strcmp(text, again));
  CHECK(failed >= 1);
  world_close(&w);
  CHECK(!close(fd) && !unlink(path));
}

/* An iteration with one operator, which needs `chunks` chunks. */
static void iterate(const world_t *w, gemini_tensor_t t, uint64_t chunks) {
  gemini_access_t part = world_part(t, 0, chunks * W, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_iteration_begin(w->mgr));
  CHECK_OK(gemini_op_begin(w->mgr, chunks > 1 ? "large" : "small", GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_acquire(w->mgr, &part, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_release(w->mgr, &part, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_op_end(w->mgr));
  CHECK_OK(gemini_iteration_end(w->mgr));
}

/* Two variants have plans. The new budget has no plan for the last variant, and memory for the plan of the other runs
 * out: the call reports the error of the last variant, with its message. */
static void test_budget_that_two_plans_refuse_tells_of_one(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_tensor_t t = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0), "t", 4 * W);
  gemini_status_t status;
  uint64_t failed = 0, full = 0;
  for (int round = 0; round < 4; round++) iterate(&w, t, 3);
  for (int round = 0; round < 4; round++) iterate(&w, t, 1);
  iterate(&w, t, 3);
  for (; WITH_FAILURES(failed, 1000, status, gemini_budget_set(w.mgr, DEVICE, 2 * W)); failed++) {
    CHECK(status == GEMINI_ERR_OOM_SYSTEM || status == GEMINI_ERR_OOM_DEVICE);
    CHECK_EQ(world_error().status, status);
    full += status == GEMINI_ERR_OOM_DEVICE;
    CHECK_EQ(world_stats(&w).budget_bytes[DEVICE], 4 * W);
    CHECK_OK(gemini_budget_set(w.mgr, DEVICE, 4 * W));
  }
  CHECK_STATUS(status, GEMINI_ERR_OOM_DEVICE);
  CHECK(full > 0);
  world_close(&w);
}

/* A slice whose name finds no memory is counted as lost; it does not appear under the name of another slice. */
static void test_timeline_without_memory_for_a_name_counts_the_slice_as_lost(void) {
  char path[] = "/tmp/gemini-test.XXXXXX", text[4096] = "";
  int fd = mkstemp(path);
  CHECK(fd >= 0);
  world_t w = world_open(world_config(4, 8, 0));
  CHECK_OK(gemini_timeline_start(w.mgr, path));
  CHECK_OK(gemini_iteration_begin(w.mgr));
  for (int k = 0; k < 2; k++) {
    gemini_status_t status;
    CHECK_OK(gemini_op_begin(w.mgr, k ? "second" : "first", GEMINI_STREAM_CALLER));
    bool failed = WITH_FAILURE(0, status, gemini_op_end(w.mgr));
    CHECK_OK(status);
    CHECK_EQ(failed, true); /* the first slice's text failed, so the second one allocates, too */
  }
  CHECK_OK(gemini_op_begin(w.mgr, "third", GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_op_end(w.mgr));
  CHECK_OK(gemini_iteration_end(w.mgr));
  CHECK_OK(gemini_timeline_stop(w.mgr));
  CHECK(read(fd, text, sizeof text - 1) > 0);
  CHECK(strstr(text, "\"lost_events\":\"2\""));
  CHECK(!strstr(text, "first") && !strstr(text, "second"));
  char *third = strstr(text, "\"third\"");
  CHECK(third && !strstr(third + 1, "\"third\""));
  world_close(&w);
  CHECK(!close(fd) && !unlink(path));
}

/* If fstat() of a checkpoint file fails, the error is IO, not that the file was exchanged. */
static void test_open_of_checkpoint_files_that_fail_is_io(void) {
  char dir[64], path[128];
  dir_make(dir);
  gemini_config_t c = world_config(4, 8, 16);
  c.file_dir = dir;
  c.checkpoint_name = "run";
  gemini_manager_t mgr = 0;
  gemini_status_t status;
  uint64_t failed = 0, refused = 0;
  CHECK_OK(gemini_manager_open(&c, &mgr));
  CHECK_OK(gemini_manager_close(mgr));
  for (bool hit = true; hit; failed++) {
    faults_arm(FAULT_FILE, failed, 1, EIO, false);
    status = gemini_manager_open(&c, &mgr);
    hit = faults_disarm() > 0;
    refused += status != GEMINI_OK;
    if (!status) CHECK_OK(gemini_manager_close(mgr));
    else if (status != GEMINI_ERR_UNSUPPORTED)
      CHECK_STATUS(status, GEMINI_ERR_IO); /* UNSUPPORTED: a system without files */
  }
  CHECK(refused > 0);
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/%s", dir, i ? "run.index" : "run.0.chunks");
    unlink(path); /* without a checkpoint they may be gone */
  }
  CHECK_EQ(rmdir(dir), 0);
}

/* A rank with two groups, each with parameters of its own. */
enum { GROUPS = 2 };
typedef struct {
  world_t w;
  gemini_group_t group[GROUPS];
  gemini_tensor_t param[GROUPS];
} rank_t;
static rank_t rank_open(const gemini_group_id_t ids[GROUPS], uint32_t rank, uint32_t ranks) {
  rank_t k = { .w = world_open(world_config(16, 64, 0)) };
  for (uint32_t g = 0; g < GROUPS; g++) {
    gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
    group.id = &ids[g];
    group.rank = rank;
    group.ranks = ranks;
    group.deadline_ns = UINT64_C(60000000000);
    CHECK_OK(gemini_group_open(k.w.mgr, &group, &k.group[g]));
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
    gemini_arena_t arena;
    c.element_bytes = 4;
    c.group = k.group[g];
    c.zero_stage = GEMINI_ZERO_AUTO;
    CHECK_OK(gemini_arena_create(k.w.mgr, &c, &arena));
    k.param[g] = world_tensor(&k.w, arena, g ? "second" : "first", 2 * W);
  }
  return k;
}
/* An iteration with an operator for each group. Its end lacks the memory of allocation `skip`, if that is not NEVER, and
 * is repeated unless the iteration has ended all the same. Returns whether memory lacked. */
#define NEVER UINT64_MAX
static bool rank_iterate(const rank_t *k, uint64_t kind, uint64_t skip) {
  char name[32];
  snprintf(name, sizeof name, "operator of kind %d", (int)kind);
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  for (int g = 0; g < GROUPS; g++) {
    gemini_access_t use = world_whole(k->param[g], GEMINI_READ, DEVICE);
    CHECK_OK(gemini_op_begin(k->w.mgr, name, k->w.stream));
    CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_op_end(k->w.mgr));
  }
  const uint64_t before = world_stats(&k->w).iterations;
  gemini_status_t status;
  const bool failed = WITH_FAILURE(skip, status, gemini_iteration_end(k->w.mgr));
  if (!status) return failed;
  check_refused("gemini_iteration_end", status);
  if (world_stats(&k->w).iterations == before) CHECK_OK(gemini_iteration_end(k->w.mgr));
  CHECK_EQ(world_stats(&k->w).iterations, before + 1);
  return true;
}
/* Whatever memory the end of an iteration lacks on one rank, it can be repeated, and the ranks stay in step: in the
 * first iteration of a kind, for which they agree on frames, and in those in which they agree on times and on ZERO_AUTO.
 * Otherwise the ranks find different calls, or wait for each other until the deadline. */
static void test_end_of_iteration_without_memory_can_be_repeated(void) {
  gemini_group_id_t ids[GROUPS];
  for (int g = 0; g < GROUPS; g++) CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 2, &ids[g]));
  pid_t child = fork_child();
  rank_t k = rank_open(ids, !child, 2);
  uint64_t kind = 0, skip = 0;
  for (uint8_t goes_on = 1, all[2]; goes_on; kind++) { /* plans make thousands of allocations: some of those */
    goes_on = 0;
    for (int i = 0; i < 4; i++) goes_on |= rank_iterate(&k, kind, child ? skip : NEVER);
    skip += 1 + skip / 32;
    CHECK_OK(gemini_group_exchange(k.w.mgr, k.group[0], &goes_on, 1, all));
    goes_on = all[0];
  }
  CHECK(kind > 100);
  world_close(&k.w);
  if (!child) exit(0);
  fork_expect_end(child);
}

/* Gathers of an iteration cannot be recorded: it ends all the same, and other ranks hear at once that this one cannot do
 * what they plan. Acquires all that operator g uses; of the first one allocation `skip` of the acquire fails, or of the
 * end. Returns whether one did. */
static bool rank_gathers(const rank_t *k, bool in_acquire, uint64_t skip) {
  gemini_status_t acquired = GEMINI_OK, ended = GEMINI_OK;
  bool failed = false;
  for (int g = 0; g < GROUPS; g++) {
    gemini_access_t use = world_whole(k->param[g], GEMINI_READ, DEVICE);
    CHECK_OK(gemini_op_begin(k->w.mgr, g ? "second" : "first", k->w.stream));
    const uint64_t in_end = g || in_acquire ? NEVER : skip;
    failed |= WITH_FAILURE(g || !in_acquire ? NEVER : skip, acquired, gemini_acquire(k->w.mgr, &use, 1, k->w.stream));
    if (acquired == GEMINI_ERR_OOM_SYSTEM) CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, k->w.stream));
    else CHECK_OK(acquired);
    CHECK_OK(gemini_release(k->w.mgr, &use, 1, k->w.stream));
    failed |= WITH_FAILURE(in_end, ended, gemini_op_end(k->w.mgr));
    CHECK_OK(ended);
  }
  return failed;
}
static void test_an_iteration_whose_gathers_cannot_be_recorded_ends(void) {
  for (int in_acquire = 0; in_acquire < 2; in_acquire++) {
    uint64_t skip = 0;
    for (bool failed = true; failed; skip++) {
      gemini_group_id_t ids[GROUPS];
      for (int g = 0; g < GROUPS; g++) CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 1, &ids[g]));
      rank_t k = rank_open(ids, 0, 1);
      for (uint64_t i = 0; i < 4; i++) {
        CHECK_OK(gemini_iteration_begin(k.w.mgr));
        const bool now = rank_gathers(&k, in_acquire, i ? NEVER : skip);
        if (!i) failed = now;
        CHECK_OK(gemini_iteration_end(k.w.mgr));
        CHECK_EQ(world_stats(&k.w).iterations, i + 1);
      }
      world_close(&k.w);
    }
    CHECK(skip > 1);
  }
}
static void test_ranks_hear_of_one_that_cannot_record_its_gathers(void) {
  gemini_group_id_t ids[GROUPS];
  for (int g = 0; g < GROUPS; g++) CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 2, &ids[g]));
  pid_t child = fork_child();
  rank_t k = rank_open(ids, !child, 2);
  gemini_access_t use = world_whole(k.param[0], GEMINI_READ, DEVICE);
  gemini_status_t status;
  CHECK_OK(gemini_iteration_begin(k.w.mgr));
  CHECK_OK(gemini_op_begin(k.w.mgr, "gathers", k.w.stream));
  CHECK_OK(gemini_acquire(k.w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_release(k.w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(WITH_FAILURE(child ? NEVER : 0, status, gemini_op_end(k.w.mgr)), !child);
  if (child) { /* it waits in the end for what rank 1 has, unless it has heard before */
    if (!status) status = gemini_iteration_end(k.w.mgr);
    CHECK_SAYS(world_error().message, "rank 1 gave up: no memory to record the gathers");
  }
  CHECK_EQ(status, GEMINI_ERR_PEER);
  status = gemini_manager_close(k.w.mgr);
  if (status && status != GEMINI_ERR_PEER && status != GEMINI_ERR_DEVICE) CHECK_OK(status);
  if (!child) exit(0);
  fork_expect_end(child);
}

int main(void) {
  RUN(test_register_without_memory_takes_nothing_of_the_arena);
  RUN(test_host_alloc_without_memory_takes_no_slots);
  RUN(test_open_without_memory_says_what_failed_now);
  RUN(test_trace_load_and_explain_without_memory_change_nothing);
  RUN(test_budget_that_two_plans_refuse_tells_of_one);
  RUN(test_timeline_without_memory_for_a_name_counts_the_slice_as_lost);
  RUN(test_open_of_checkpoint_files_that_fail_is_io);
  RUN(test_end_of_iteration_without_memory_can_be_repeated);
  RUN(test_an_iteration_whose_gathers_cannot_be_recorded_ends);
  RUN(test_ranks_hear_of_one_that_cannot_record_its_gathers);
  return check_done();
}
