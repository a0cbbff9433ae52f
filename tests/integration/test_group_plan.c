/* Plans of managers with sharded arenas. Only public headers. SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "../fork.h"
#include "../process.h"
#include "../system.h"
#include "gemini/group.h"
#include "world.h"

#define DEVICE GEMINI_TIER_DEVICE
#define HOST GEMINI_TIER_HOST
enum { CHUNKS = 8, ELEMENTS = CHUNKS * WORLD_CHUNK / 4 };

/* ---- a rank with parameters of eight chunks, and what follows them */
typedef struct {
  world_t w;
  gemini_group_t group;
  gemini_arena_t params;
  gemini_tensor_t param;
  uint32_t rank, ranks;
} rank_t;

typedef struct {
  uint32_t ranks, stage;
  uint64_t device_chunks;
  uint32_t bucket, bucket_more; /* chunks whose gradients are added together, on rank 0, and on rank 1 so many more */
} shape_t;

static rank_t rank_open(const shape_t *shape, uint32_t rank, const gemini_group_id_t *id) {
  rank_t k = { .rank = rank, .ranks = shape->ranks };
  k.w = world_open(world_config(shape->device_chunks, 4 * CHUNKS, 0));
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  group.id = id;
  group.rank = rank;
  group.ranks = shape->ranks;
  group.deadline_ns = UINT64_C(60000000000);
  group.bucket_bytes = (shape->bucket + (rank == 1 ? shape->bucket_more : 0)) * WORLD_CHUNK;
  CHECK_OK(gemini_group_open(k.w.mgr, &group, &k.group));
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.element_bytes = 4;
  c.group = k.group;
  c.zero_stage = shape->stage;
  CHECK_OK(gemini_arena_create(k.w.mgr, &c, &k.params));
  k.param = world_tensor(&k.w, k.params, "parameters", ELEMENTS * 4);
  gemini_access_t all = world_whole(k.param, GEMINI_WRITE, HOST);
  uint64_t offset, size;
  for (uint64_t next = 0;; next = offset + size) {
    CHECK_OK(gemini_slice_next(k.w.mgr, &all, next, &offset, &size));
    if (!size) return k;
    world_fill(&k.w, k.param, offset, size, HOST, 7);
  }
}

/* Runs fn on all ranks, each a process. */
static void run(const shape_t *shape, void (*fn)(rank_t *k)) {
  gemini_group_id_t id;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, shape->ranks, &id));
  pid_t pids[8];
  for (uint32_t r = 1; r <= shape->ranks; r++) {
    const bool child = r < shape->ranks;
    if (child) pids[r] = fork_child();
    if (child && pids[r]) continue;
    rank_t k = rank_open(shape, child ? r : 0, &id);
    fn(&k);
    world_close(&k.w);
    if (child) exit(0);
  }
  for (uint32_t r = 1; r < shape->ranks; r++) fork_expect_end(pids[r]);
}

static uint64_t gathered(const rank_t *k) {
  gemini_group_stats_t s = GEMINI_GROUP_STATS_INIT;
  CHECK_OK(gemini_group_stats(k->w.mgr, k->group, &s));
  return s.gathered_chunks;
}

/* An operator that allocates so many chunks, frees them, and reads the first chunks of the parameters before or after
 * that. */
typedef enum { BEFORE, INSIDE, AFTER } when_t;
static void op(rank_t *k, const char *name, uint64_t memory, uint64_t chunks, when_t reads) {
  gemini_access_t use = world_part(k->param, 0, chunks * WORLD_CHUNK, GEMINI_READ, DEVICE);
  void *ptr = NULL;
  CHECK_OK(gemini_op_begin(k->w.mgr, name, k->w.stream));
  for (when_t when = BEFORE; when <= AFTER; when++) {
    if (memory && when == INSIDE) CHECK_OK(gemini_alloc(k->w.mgr, memory * WORLD_CHUNK, k->w.stream, &ptr));
    if (chunks && when == reads) {
      CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      CHECK(world_reads(use.ptr, 0, chunks * WORLD_CHUNK, 7));
      CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    }
    if (memory && when == INSIDE) CHECK_OK(gemini_free(k->w.mgr, ptr, k->w.stream));
  }
  CHECK_OK(gemini_op_end(k->w.mgr));
}

/* ---- budgets that are enough without a plan are enough with one */
enum { ITERATIONS = 6 };
static void iterate(rank_t *k, void (*ops)(rank_t *k)) {
  for (int i = 0; i < ITERATIONS; i++) {
    CHECK_OK(gemini_iteration_begin(k->w.mgr));
    ops(k);
    CHECK_OK(gemini_iteration_end(k->w.mgr));
  }
  CHECK(world_stats(&k->w).planned_iterations >= ITERATIONS - 2);
  CHECK_EQ(world_stats(&k->w).departures, 0);
}

/* 8 chunks of memory and 1 of parameters, then 8 of parameters. */
static void two_peaks(rank_t *k) {
  op(k, "much memory", 8, 1, INSIDE);
  op(k, "many parameters", 0, CHUNKS, INSIDE);
  op(k, "memory alone", 5, 0, INSIDE);
}
static void trains_two_peaks(rank_t *k) {
  iterate(k, two_peaks);
  CHECK_EQ(gathered(k), CHUNKS * ITERATIONS + 1); /* the first iteration gathers a chunk twice */
}
static void trains_two_peaks_on_demand(rank_t *k) {
  iterate(k, two_peaks);
  CHECK_EQ(gathered(k), (CHUNKS + 1) * ITERATIONS);
}
static void test_peaks_at_different_times_do_not_add_up(void) {
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 14 }, trains_two_peaks);
  /* Not enough for what is gathered to stay beside the memory of the last operator. */
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 10 }, trains_two_peaks_on_demand);
}

/* The same within an operator: its chunks cannot be gathered before it. */
static void two_peaks_in_one(rank_t *k) {
  op(k, "begins", 0, 2, INSIDE);
  op(k, "both", 8, CHUNKS, AFTER);
  op(k, "ends", 8, 0, INSIDE);
}
static void trains_two_peaks_in_one(rank_t *k) {
  iterate(k, two_peaks_in_one);
  CHECK_EQ(gathered(k), (2 + CHUNKS) * ITERATIONS);
}
static void test_peaks_at_different_times_of_an_operator_do_not_add_up(void) {
  for (uint64_t chunks = CHUNKS; chunks <= CHUNKS + 2; chunks++)
    run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .device_chunks = chunks }, trains_two_peaks_in_one);
}

/* ZeRO 1 and 2 keep what they have gathered: the memory comes before. */
static void grows(rank_t *k) {
  op(k, "much memory", 8, 1, INSIDE);
  op(k, "some memory", 4, 4, INSIDE);
  op(k, "many parameters", 0, CHUNKS, INSIDE);
}
static void trains_and_grows(rank_t *k) {
  iterate(k, grows);
  CHECK_EQ(gathered(k), CHUNKS * ITERATIONS);
}
static void test_what_stays_is_not_gathered_before_its_room_is_free(void) {
  for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_GRADIENTS; stage++)
    run(&(shape_t){ .ranks = 3, .stage = stage, .device_chunks = 9 }, trains_and_grows);
}

/* A rank alone has more memory in use: all ranks gather as it must. */
static void uneven_peaks(rank_t *k) {
  op(k, "uneven memory", k->rank == 1 ? 8 : 1, 1, INSIDE);
  op(k, "many parameters", 0, CHUNKS, INSIDE);
}
static void trains_uneven_peaks(rank_t *k) { iterate(k, uneven_peaks); }
static void test_ranks_agree_on_the_frames_of_each_operator(void) {
  run(&(shape_t){ .ranks = 3, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 9 }, trains_uneven_peaks);
}

/* ---- ZERO_AUTO */
/* Each chunk is used on the way there and on the way back. */
static void there_and_back(rank_t *k) {
  for (uint32_t i = 0; i < 2 * CHUNKS; i++) {
    char name[16];
    const uint64_t chunk = i < CHUNKS ? i : 2 * CHUNKS - 1 - i;
    gemini_access_t use = world_part(k->param, chunk * WORLD_CHUNK, WORLD_CHUNK, GEMINI_READ, DEVICE);
    snprintf(name, sizeof name, "op %u", i);
    CHECK_OK(gemini_op_begin(k->w.mgr, name, k->w.stream));
    CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    CHECK(world_reads(use.ptr, chunk * WORLD_CHUNK, WORLD_CHUNK, 7));
    CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_op_end(k->w.mgr));
  }
}
/* With 9 frames, one for the operator: half of the other 8 keep 5 chunks. */
static void trains_there_and_back(rank_t *k) {
  iterate(k, there_and_back);
  CHECK_EQ(gathered(k), 2 * CHUNKS + (ITERATIONS - 1) * (CHUNKS + 3));
}
static void trains_on_stage_1(rank_t *k) {
  iterate(k, there_and_back);
  CHECK_EQ(gathered(k), ITERATIONS * CHUNKS);
}
static void trains_with_choice(rank_t *k) {
  iterate(k, there_and_back);
  CHECK_EQ(gathered(k), 2 * CHUNKS + (ITERATIONS - 1) * CHUNKS);
}
static void trains_with_choice_of_one(rank_t *k) {
  void *ptr;
  if (k->rank == 1) CHECK_OK(gemini_alloc(k->w.mgr, 6 * WORLD_CHUNK, k->w.stream, &ptr));
  iterate(k, there_and_back);
  CHECK_EQ(gathered(k), 2 * CHUNKS + (ITERATIONS - 1) * (CHUNKS + CHUNKS - 3)); /* 3 frames on all ranks */
  if (k->rank == 1) CHECK_OK(gemini_free(k->w.mgr, ptr, k->w.stream));
}
/* Nothing else wants the frames, so keeping all is the shortest step: the traffic of ZeRO 1 in the storage of ZeRO 3. */
static void test_auto_gathers_as_seldom_as_the_best_stage(void) {
  for (uint32_t ranks = 2; ranks <= 4; ranks++) {
    run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_STATES, .device_chunks = 9 }, trains_on_stage_1);
    run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 9 }, trains_there_and_back);
    run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_AUTO, .device_chunks = 9 }, trains_with_choice);
    run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_AUTO, .device_chunks = 9 }, trains_with_choice_of_one);
  }
}

/* ---- a training step: what the plan says of bytes is what the group moves */
typedef struct {
  rank_t *k;
  gemini_arena_t grads, masters;
} trainer_t;
static void halve(void *user, const gemini_update_span_t *span) {
  float *param = span->ptr[0], *grad = span->ptr[1], *master = span->ptr[2];
  (void)user;
  for (uint64_t i = 0; i < span->element_count; i++) param[i] = master[i] = master[i] - grad[i] / 2;
}
static void touch(void *user) { (void)user; }
static void halve_anywhere(void *user, const gemini_update_span_t *span) {
  if (span->tier == DEVICE) CHECK_OK(gemini_stream_synchronize(((trainer_t *)user)->k->w.mgr, span->stream));
  halve(user, span);
}

static trainer_t trainer_open(rank_t *k) {
  trainer_t t = { .k = k };
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.kind = GEMINI_KIND_GRAD;
  c.element_bytes = 4;
  c.reuse = k->params;
  c.dtype = GEMINI_DTYPE_F32;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &t.grads));
  c.kind = GEMINI_KIND_MASTER;
  c.reuse = NULL;
  c.dtype = 0;
  c.like = k->params;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &t.masters));
  return t;
}

/* A layer for each chunk of the parameters. */
static void register_layers(rank_t *k, gemini_tensor_t layers[CHUNKS]) {
  for (uint32_t i = 0; i < CHUNKS; i++) {
    char name[16];
    snprintf(name, sizeof name, "layer %u", i);
    CHECK_OK(gemini_tensor_register(k->w.mgr, k->params, name, WORLD_CHUNK, i * WORLD_CHUNK, &layers[i]));
  }
}

/* An operator for each layer of so many bytes, forward and back, where it writes the gradient and makes it ready. */
static void layer_op(trainer_t *t, gemini_tensor_t param, uint64_t bytes, uint32_t layer, bool back) {
  char name[32];
  gemini_tensor_t grad;
  gemini_manager_t mgr = t->k->w.mgr;
  snprintf(name, sizeof name, "%s %u", back ? "backward" : "forward", layer);
  CHECK_OK(gemini_tensor_counterpart(mgr, param, t->grads, &grad));
  CHECK_OK(gemini_op_begin(mgr, name, t->k->w.stream));
  gemini_access_t use = world_whole(param, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_acquire(mgr, &use, 1, t->k->w.stream));
  CHECK_OK(gemini_stream_call(mgr, t->k->w.stream, touch, NULL));
  CHECK_OK(gemini_release(mgr, &use, 1, t->k->w.stream));
  if (back) {
    use = world_whole(grad, GEMINI_WRITE, DEVICE);
    CHECK_OK(gemini_acquire(mgr, &use, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < bytes / 4; i++) ((float *)use.ptr)[i] = 1;
    CHECK_OK(gemini_release(mgr, &use, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_tensor_state_set(mgr, grad, GEMINI_STATE_READY_FOR_REDUCE));
  }
  CHECK_OK(gemini_op_end(mgr));
}

static void update(trainer_t *t, gemini_update_fn fn) {
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = (const gemini_arena_t[]){ t->k->params, t->grads, t->masters };
  u.modes = (const uint32_t[]){ GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE };
  u.arena_count = 3;
  u.stream = t->k->w.stream;
  u.fn = fn;
  u.user = t;
  CHECK_OK(gemini_update(t->k->w.mgr, &u));
}

/* Every iteration from the third one on follows a plan to its end. Its traffic is the plan's, to the byte. */
static void trains_by_plan(rank_t *k) {
  gemini_manager_t mgr = k->w.mgr;
  gemini_tensor_t layers[CHUNKS];
  CHECK_OK(gemini_tensor_unregister(mgr, k->param));
  for (uint32_t i = 0; i < CHUNKS; i++) {
    char name[16];
    snprintf(name, sizeof name, "layer %u", i);
    layers[i] = world_tensor(&k->w, k->params, name, 2 * WORLD_CHUNK);
  }
  trainer_t t = trainer_open(k);
  for (uint32_t i = 0; i < CHUNKS; i++) world_fill(&k->w, layers[i], 0, 2 * WORLD_CHUNK, DEVICE, 1);
  gemini_group_stats_t before = GEMINI_GROUP_STATS_INIT, after = GEMINI_GROUP_STATS_INIT,
                       plan = GEMINI_GROUP_STATS_INIT;
  uint64_t gathered_by_plan = 0;
  for (uint32_t n = 0; n < 8; n++) {
    const uint64_t planned = world_stats(&k->w).planned_iterations;
    CHECK_OK(gemini_iteration_begin(mgr));
    CHECK_OK(gemini_group_stats(mgr, k->group, &plan));
    CHECK_OK(gemini_group_stats(mgr, k->group, &before));
    for (uint32_t i = 0; i < CHUNKS; i++) layer_op(&t, layers[i], 2 * WORLD_CHUNK, i, false);
    for (uint32_t i = CHUNKS; i-- > 0;) layer_op(&t, layers[i], 2 * WORLD_CHUNK, i, true);
    update(&t, halve_anywhere);
    CHECK_OK(gemini_group_stats(mgr, k->group, &after));
    CHECK_OK(gemini_iteration_end(mgr));
    if (world_stats(&k->w).planned_iterations == planned) continue;
    CHECK_EQ(after.gathered_bytes - before.gathered_bytes, plan.planned_gathered_bytes);
    CHECK_EQ(after.reduced_bytes - before.reduced_bytes, plan.planned_reduced_bytes);
    CHECK_EQ(after.fetched_bytes - before.fetched_bytes, plan.planned_fetched_bytes);
    gathered_by_plan += after.gathered_chunks - before.gathered_chunks;
  }
  CHECK(world_stats(&k->w).planned_iterations >= 5);
  CHECK(gathered_by_plan >= 5 * 2 * CHUNKS);
  CHECK(plan.planned_gathered_bytes && plan.planned_reduced_bytes);
  char text[4096];
  uint64_t length;
  CHECK_OK(gemini_plan_explain(mgr, sizeof text, text, &length));
  CHECK_SAYS(text, "group 0: ");
  CHECK_SAYS(text, "busy: gathers ");
}
/* Updates that are far slower on the host than on the device are worth frames for states: then not all frames that are
 * free hold what is gathered. */
static void slow_on_host(void *user, const gemini_update_span_t *span) {
  if (span->tier == HOST) nanosleep(&(struct timespec){ 0, 30000000 }, NULL);
  else halve_anywhere(user, span);
}
static void trains_with_slow_host(rank_t *k) {
  gemini_manager_t mgr = k->w.mgr;
  gemini_tensor_t layers[CHUNKS];
  CHECK_OK(gemini_tensor_unregister(mgr, k->param));
  trainer_t t = trainer_open(k);
  register_layers(k, layers);
  for (uint32_t n = 0; n < 6; n++) {
    CHECK_OK(gemini_iteration_begin(mgr));
    for (uint32_t i = 0; i < CHUNKS; i++) layer_op(&t, layers[i], WORLD_CHUNK, i, false);
    for (uint32_t i = CHUNKS; i-- > 0;) layer_op(&t, layers[i], WORLD_CHUNK, i, true);
    update(&t, slow_on_host);
    CHECK_OK(gemini_iteration_end(mgr));
  }
  gemini_group_stats_t s = GEMINI_GROUP_STATS_INIT;
  char text[4096];
  uint64_t length;
  CHECK_OK(gemini_group_stats(mgr, k->group, &s));
  CHECK_OK(gemini_plan_explain(mgr, sizeof text, text, &length));
  CHECK(!strstr(text, "updates: 0 pieces on the device"));
  CHECK(s.planned_gathered_bytes > s.planned_reduced_bytes); /* some chunks are gathered twice */
}
static void test_auto_leaves_frames_to_states_that_are_worth_more(void) {
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_AUTO, .device_chunks = 11 }, trains_with_slow_host);
}

/* A pass over the layers, without the first ones. */
static void pass(trainer_t *t, const gemini_tensor_t layers[CHUNKS], uint32_t first) {
  CHECK_OK(gemini_iteration_begin(t->k->w.mgr));
  for (uint32_t i = first; i < CHUNKS; i++) layer_op(t, layers[i], WORLD_CHUNK, i, false);
  CHECK_OK(gemini_iteration_end(t->k->w.mgr));
}
static uint32_t plan_changes(const rank_t *k) {
  gemini_group_stats_t s = GEMINI_GROUP_STATS_INIT;
  CHECK_OK(gemini_group_stats(k->w.mgr, k->group, &s));
  return s.plan_changes;
}
static void alternates(rank_t *k) {
  gemini_tensor_t layers[CHUNKS];
  register_layers(k, layers);
  trainer_t t = trainer_open(k);
  pass(&t, layers, 0);
  for (uint32_t n = 0; n < 3; n++) pass(&t, layers, 0);
  CHECK_EQ(plan_changes(k), 0);
  pass(&t, layers, 2); /* not known yet: it leaves the plan of the others for none */
  CHECK_EQ(plan_changes(k), 1);
  pass(&t, layers, 0); /* the interrupted kind goes on */
  CHECK_EQ(plan_changes(k), 1);
  pass(&t, layers, 2); /* known, and not expected so soon */
  CHECK_EQ(plan_changes(k), 2);
  for (uint32_t n = 0; n < 6; n++) pass(&t, layers, n & 1 ? 2 : 0);
  const uint32_t so_far = plan_changes(k);
  for (uint32_t n = 0; n < 6; n++) pass(&t, layers, n & 1 ? 2 : 0);
  CHECK_EQ(plan_changes(k), so_far); /* by now the order is known */
}
static void test_kinds_of_iterations_are_expected_in_their_order(void) {
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 20 }, alternates);
}

static void test_bytes_by_plan_are_those_that_a_group_moves(void) {
  const uint64_t step = SANITIZED ? 60 : 20;
  for (uint32_t ranks = 2; ranks <= (SANITIZED ? 3 : 4); ranks++)
    for (uint32_t stage = GEMINI_ZERO_AUTO; stage <= GEMINI_ZERO_PARAMS; stage++)
      for (uint64_t chunks = 20; chunks <= 80; chunks += step)
        if (chunks > 20 || stage == GEMINI_ZERO_PARAMS || stage == GEMINI_ZERO_AUTO)
          run(&(shape_t){ .ranks = ranks, .stage = stage, .device_chunks = chunks }, trains_by_plan);
}

/* ---- arenas over different groups: one that all ranks have, and an expert, of which each pair of ranks has another */
typedef struct {
  rank_t k; /* params and group: of this part */
  trainer_t t;
  gemini_tensor_t param;
  uint32_t rank, first, step; /* of all ranks; the first one of this part, and the distance of its ranks */
  float values[3];            /* that parameter i must have: values[i % 3] */
} part_t;
/* Small whole numbers, so that sums are exact. No token of rank 3 goes to its expert in every second step. */
static float gradient_of(uint32_t rank, uint32_t n, uint64_t i) {
  return (float)(rank + 1) + (float)n * (float)(i % 3);
}
static bool has_gradient(const part_t *p, uint32_t rank, uint32_t n) { return p->step == 1 || rank != 3 || n % 2; }

static void part_open(part_t *p, const rank_t *k, gemini_group_t group, uint32_t step) {
  *p = (part_t){ .k = *k, .rank = k->rank, .first = k->rank % step, .step = step };
  p->k.group = group;
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.element_bytes = 4;
  c.group = group;
  c.zero_stage = step == 1 ? GEMINI_ZERO_PARAMS : GEMINI_ZERO_GRADIENTS;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &p->k.params));
  p->t = trainer_open(&p->k);
  p->param = world_tensor(&p->k.w, p->k.params, step == 1 ? "dense" : "expert", ELEMENTS * 4);
}
static void part_op(part_t *p, uint32_t n, bool back) {
  gemini_manager_t mgr = p->k.w.mgr;
  gemini_tensor_t grad;
  char name[32];
  snprintf(name, sizeof name, "%s %s", p->step == 1 ? "dense" : "expert", back ? "backward" : "forward");
  CHECK_OK(gemini_tensor_counterpart(mgr, p->param, p->t.grads, &grad));
  CHECK_OK(gemini_op_begin(mgr, name, p->k.w.stream));
  gemini_access_t use = world_whole(p->param, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_acquire(mgr, &use, 1, GEMINI_STREAM_CALLER));
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < ELEMENTS; i++) wrong += ((const float *)use.ptr)[i] != p->values[i % 3];
  CHECK_EQ(wrong, 0);
  CHECK_OK(gemini_release(mgr, &use, 1, GEMINI_STREAM_CALLER));
  if (back && has_gradient(p, p->rank, n)) {
    use = world_whole(grad, GEMINI_WRITE, DEVICE);
    CHECK_OK(gemini_acquire(mgr, &use, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < ELEMENTS; i++) ((float *)use.ptr)[i] = gradient_of(p->rank, n, i);
    CHECK_OK(gemini_release(mgr, &use, 1, GEMINI_STREAM_CALLER));
  }
  if (back && world_tensor_info(&p->k.w, grad).state == GEMINI_STATE_FREE)
    CHECK_OK(gemini_tensor_state_set(mgr, grad, GEMINI_STATE_HOLD));
  if (back) CHECK_OK(gemini_tensor_state_set(mgr, grad, GEMINI_STATE_READY_FOR_REDUCE));
  CHECK_OK(gemini_op_end(mgr));
}
/* The norm of the gradients, and an update by them. */
static void part_update(part_t *p, uint32_t n) {
  float sums[3] = { 0 };
  double squares = 0, norm;
  for (uint64_t i = 0; i < ELEMENTS; i++) {
    float sum = 0;
    for (uint32_t r = p->first; r < p->k.ranks; r += p->step)
      if (has_gradient(p, r, n)) sum += gradient_of(r, n, i);
    sums[i % 3] = sum;
    squares += (double)sum * sum;
  }
  gemini_access_t all = world_whole(p->t.grads, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_norm(p->k.w.mgr, &all, GEMINI_DTYPE_F32, p->k.w.stream, &norm));
  CHECK(norm * norm > squares * (1 - 1e-12) && norm * norm < squares * (1 + 1e-12));
  update(&p->t, halve_anywhere);
  for (int i = 0; i < 3; i++) p->values[i] -= sums[i] / 2;
}
static void trains_experts(rank_t *k) {
  gemini_group_id_t mine = { { 0 } }, ids[4];
  const uint32_t pairs = k->ranks / 2;
  if (k->rank < pairs) CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 2, &mine));
  CHECK_OK(gemini_group_exchange(k->w.mgr, k->group, &mine, sizeof mine, ids));
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  c.id = &ids[k->rank % pairs];
  c.rank = k->rank / pairs;
  c.ranks = 2;
  c.deadline_ns = UINT64_C(60000000000);
  gemini_group_t pair;
  CHECK_OK(gemini_group_open(k->w.mgr, &c, &pair));
  part_t dense, expert;
  part_open(&dense, k, k->group, 1);
  part_open(&expert, k, pair, pairs);
  for (uint32_t n = 0; n < ITERATIONS; n++) {
    CHECK_OK(gemini_iteration_begin(k->w.mgr));
    part_op(&dense, n, false);
    part_op(&expert, n, false);
    part_op(&expert, n, true);
    part_op(&dense, n, true);
    part_update(&dense, n);
    part_update(&expert, n);
    CHECK_OK(gemini_iteration_end(k->w.mgr));
  }
  CHECK(world_stats(&k->w).planned_iterations >= ITERATIONS - 2);
  for (int i = 0; i < 2; i++) {
    gemini_group_stats_t s = GEMINI_GROUP_STATS_INIT;
    CHECK_OK(gemini_group_stats(k->w.mgr, i ? pair : k->group, &s));
    CHECK_EQ(s.ranks, i ? 2 : k->ranks);
    CHECK_EQ(s.reduced_chunks, ITERATIONS * CHUNKS);
    CHECK_EQ(s.reduced_bytes, s.reduced_chunks * WORLD_CHUNK * (s.ranks - 1) / s.ranks);
  }
}
static void test_experts_are_divided_among_their_own_ranks(void) {
  for (uint64_t chunks = 20; chunks <= 48; chunks += 28)
    run(&(shape_t){ .ranks = 4, .stage = GEMINI_ZERO_PARAMS, .device_chunks = chunks }, trains_experts);
}

/* ---- what operators wait for */
/* An operator on a stream that uses a tensor. Rank 1 comes late to it. */
static void late_op(rank_t *k, gemini_tensor_t tensor, uint32_t mode, uint32_t number) {
  char name[24];
  gemini_access_t use = world_whole(tensor, mode, DEVICE);
  snprintf(name, sizeof name, "%s %u", mode == GEMINI_READ ? "reads" : "writes", number);
  if (k->rank == 1) nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
  CHECK_OK(gemini_op_begin(k->w.mgr, name, k->w.stream));
  CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, k->w.stream));
  CHECK_OK(gemini_release(k->w.mgr, &use, 1, k->w.stream));
  if (mode == GEMINI_WRITE) CHECK_OK(gemini_tensor_state_set(k->w.mgr, tensor, GEMINI_STATE_READY_FOR_REDUCE));
  CHECK_OK(gemini_op_end(k->w.mgr));
}
static gemini_group_stats_t stats_of(rank_t *k) {
  gemini_group_stats_t s = GEMINI_GROUP_STATS_INIT;
  CHECK_OK(gemini_group_stats(k->w.mgr, k->group, &s));
  return s;
}
/* Rank 0 waits for gathers, in which rank 1 takes part late; then for frames that sums have left. */
static void waits_for_others(rank_t *k) {
  gemini_tensor_t layers[CHUNKS], grad;
  CHECK_OK(gemini_tensor_unregister(k->w.mgr, k->param));
  trainer_t t = trainer_open(k);
  register_layers(k, layers);
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  for (uint32_t i = 0; i < CHUNKS; i++) late_op(k, layers[i], GEMINI_READ, i);
  CHECK_OK(gemini_iteration_end(k->w.mgr));
  const gemini_group_stats_t reads = stats_of(k);
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  for (uint32_t i = CHUNKS; i-- > 0;) {
    CHECK_OK(gemini_tensor_counterpart(k->w.mgr, layers[i], t.grads, &grad));
    late_op(k, grad, GEMINI_WRITE, i);
  }
  update(&t, halve_anywhere);
  CHECK_OK(gemini_iteration_end(k->w.mgr));
  const gemini_group_stats_t writes = stats_of(k);
  CHECK_EQ(reads.sum_wait_ns, 0);
  CHECK_EQ(writes.gather_wait_ns, reads.gather_wait_ns);
  CHECK(reads.gather_wait_ns + writes.sum_wait_ns <= world_stats(&k->w).stall_ns);
  if (k->rank) return;
  CHECK(reads.gather_wait_ns > 8000000 * (CHUNKS / 2));
  CHECK(writes.sum_wait_ns > 8000000);
}
static void test_waits_for_gathers_and_sums_are_counted_apart(void) {
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 4 }, waits_for_others);
}

/* ---- timelines show what a group does */
/* Events of a category whose names have these words. */
static uint64_t drawn(const char *text, const char *category, const char *words) {
  char event[64];
  uint64_t n = 0;
  snprintf(event, sizeof event, "\"cat\":\"%s\"", category);
  for (const char *at = text; (at = strstr(at, event)); at++) {
    const char *name = strstr(at, "\"name\":\""), *end = name ? strchr(name, '}') : NULL, *found = strstr(at, words);
    n += end && found && found < end;
  }
  return n;
}
static void is_drawn(rank_t *k) {
  char path[] = "/tmp/gemini-test.XXXXXX", *text = NULL;
  size_t size = 0;
  gemini_tensor_t layers[CHUNKS];
  gemini_group_stats_t before = GEMINI_GROUP_STATS_INIT, after = GEMINI_GROUP_STATS_INIT;
  CHECK_OK(gemini_tensor_unregister(k->w.mgr, k->param));
  trainer_t t = trainer_open(k);
  register_layers(k, layers);
  const int fd = mkstemp(path);
  CHECK(fd >= 0 && !close(fd));
  CHECK_OK(gemini_group_stats(k->w.mgr, k->group, &before));
  CHECK_OK(gemini_timeline_start(k->w.mgr, path));
  /* The first iteration has no plan, so no slices stay on the device: each is copied to it and back. */
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  for (uint32_t i = 0; i < CHUNKS; i++) layer_op(&t, layers[i], WORLD_CHUNK, i, false);
  for (uint32_t i = CHUNKS; i-- > 0;) layer_op(&t, layers[i], WORLD_CHUNK, i, true);
  update(&t, halve_anywhere);
  CHECK_OK(gemini_iteration_end(k->w.mgr));
  CHECK_OK(gemini_update_wait(k->w.mgr));
  CHECK_OK(gemini_group_stats(k->w.mgr, k->group, &after));
  CHECK_OK(gemini_timeline_stop(k->w.mgr));
  FILE *file = fopen(path, "r");
  CHECK(file && getdelim(&text, &size, 0, file) > 0 && !fclose(file) && !unlink(path));
  const uint64_t slice = WORLD_CHUNK / k->ranks;
  const uint64_t gathers = count_of(text, "\"cat\":\"gather\""),
                 gathered_chunks = after.gathered_chunks - before.gathered_chunks;
  CHECK(gathers && gathers <= gathered_chunks && gathered_chunks >= CHUNKS);
  CHECK_EQ(drawn(text, "gather", "of arena "), gathers);
  CHECK_EQ(count_of(text, "\"cat\":\"sum\""), after.reduced_chunks - before.reduced_chunks);
  CHECK_EQ(drawn(text, "sum", "of arena "), after.reduced_chunks - before.reduced_chunks);
  CHECK_EQ(drawn(text, "fetch", "(slice)"), (after.fetched_bytes - before.fetched_bytes) / slice);
  CHECK_EQ(drawn(text, "evict", "(slice)"), (after.stored_bytes - before.stored_bytes) / slice);
  CHECK(count_of(text, "gathers of group 0") && count_of(text, "sums of group 0"));
  free(text);
}
static void test_timelines_have_gathers_sums_and_copies_of_slices(void) {
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 6, .bucket = 1 }, is_drawn);
}

/* ---- a rank that departs from the others in an iteration of a known kind */
typedef struct {
  const char *ops; /* one letter each; of which 'b' uses the second chunk, all others the first one */
  const char *first, *second;
} departure_t;
static departure_t departure;
enum { KNOWN = 4 };

static gemini_status_t one_op(rank_t *k, char name) {
  const char text[] = { name, 0 };
  gemini_access_t use = world_part(k->param, name == 'b' ? WORLD_CHUNK : 0, WORLD_CHUNK, GEMINI_READ, DEVICE);
  gemini_status_t status = gemini_op_begin(k->w.mgr, text, k->w.stream);
  if (!status) status = gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER);
  if (!status) status = gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER);
  return status ? status : gemini_op_end(k->w.mgr);
}
static gemini_status_t one_iteration(rank_t *k, const char *ops) {
  gemini_status_t status = gemini_iteration_begin(k->w.mgr);
  for (; !status && *ops; ops++) status = one_op(k, *ops);
  return status ? status : gemini_iteration_end(k->w.mgr);
}
/* What is gathered is the same, so nothing but the comparison can notice it, long before the deadline of 60 s. */
static void departs(rank_t *k) {
  for (int i = 0; i < KNOWN; i++) CHECK_OK(one_iteration(k, "abcd"));
  const uint64_t begin_ns = now_ns();
  gemini_status_t status = one_iteration(k, k->rank == 1 ? departure.ops : "abcd");
  for (int i = 0; !status && i < 2; i++) status = one_iteration(k, "abcd");
  CHECK_EQ(status, GEMINI_ERR_PEER);
  CHECK(now_ns() - begin_ns < UINT64_C(10000000000));
  CHECK_SAYS(world_error().message, "ranks differ in an iteration: after ");
  CHECK_SAYS(world_error().message, departure.first);
  CHECK_SAYS(world_error().message, departure.second);
}
static void test_ranks_that_differ_in_a_known_iteration_are_told_where(void) {
  static const departure_t departures[] = {
    { "abd", "after 2 operators rank 0 has operator c, chunk 0 of arena ", "rank 1 has operator d, chunk 0 of arena " },
    { "abxd", "after 2 operators rank 0 has operator c, chunk 0", "rank 1 has operator x, chunk 0 of arena " },
    { "abbd", "after 2 operators rank 0 has operator c, chunk 0", "rank 1 has operator b, chunk 1 of arena " },
    { "abc", "after 3 operators rank 0 has operator d, chunk 0 of arena ", "rank 1 has the end of the iteration" },
    { "abcdc", "after 4 operators rank 0 has the end of the iteration", "rank 1 has operator c, chunk 0 of arena " },
  };
  for (uint32_t ranks = 2; ranks <= 3; ranks++)
    for (size_t i = 0; i < sizeof departures / sizeof *departures; i++) {
      departure = departures[i];
      run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_STATES, .device_chunks = 12 }, departs);
    }
}

/* ---- buckets of gradients */
static void differs_in_buckets(rank_t *k) {
  gemini_status_t status = GEMINI_OK;
  for (int i = 0; !status && i < 3; i++) status = one_iteration(k, "abcd");
  CHECK_EQ(status, GEMINI_ERR_PEER);
  CHECK_SAYS(world_error().message, "ranks differ: rank 0 and rank 1 ");
  CHECK_SAYS(world_error().message, "other chunks in a bucket of gradients (bucket_bytes)");
}
static void test_ranks_with_other_buckets_are_told(void) {
  run(&(shape_t){ .ranks = 2, .stage = GEMINI_ZERO_STATES, .device_chunks = 12, .bucket = 2, .bucket_more = 1 },
      differs_in_buckets);
}

/* Three ranks leave bytes over between their slices, which belong to none and are zeros, whatever was in the slots. */
static void sums_in_used_slots(rank_t *k) {
  enum { USED = 4 * CHUNKS - 4 }; /* all slots but those of parameters */
  gemini_arena_t used = world_arena(&k->w, GEMINI_KIND_OTHER, 4, "used", 0, 0);
  gemini_tensor_t t = world_tensor(&k->w, used, "t", USED * WORLD_CHUNK);
  gemini_access_t all = world_whole(t, GEMINI_WRITE, HOST);
  CHECK_OK(gemini_acquire(k->w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  memset(all.ptr, 0xFF, USED * WORLD_CHUNK); /* not numbers */
  CHECK_OK(gemini_release(k->w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_tensor_unregister(k->w.mgr, t));
  CHECK_OK(gemini_arena_destroy(k->w.mgr, used));
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t grads;
  gemini_tensor_t grad;
  c.kind = GEMINI_KIND_GRAD;
  c.element_bytes = 4;
  c.like = k->params;
  c.dtype = GEMINI_DTYPE_F32;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &grads));
  CHECK_OK(gemini_tensor_counterpart(k->w.mgr, k->param, grads, &grad));
  gemini_access_t use = world_whole(grad, GEMINI_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < ELEMENTS; i++) ((float *)use.ptr)[i] = 1;
  CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  double norm = 0;
  all = world_whole(grads, 0, 0);
  CHECK_OK(gemini_norm(k->w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm));
  CHECK(norm == sqrt(ELEMENTS * 9.0));
}
static void test_bytes_between_slices_are_zeros_in_used_slots(void) {
  for (uint32_t bucket = 1; bucket <= 3; bucket++)
    run(&(shape_t){ .ranks = 3, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 12, .bucket = bucket },
        sums_in_used_slots);
}

/* ---- brackets that are refused and made again */
/* Each operator writes a chunk of its own, and in iteration `refused` an acquired slice keeps its end from writing that
 * back, a few times. */
enum { AGAIN = 30 };
static void refused_ends(rank_t *k) {
  for (int i = 0; i < ITERATIONS; i++) {
    CHECK_OK(gemini_iteration_begin(k->w.mgr));
    for (uint64_t chunk = 0; chunk < CHUNKS; chunk++) {
      gemini_access_t use = world_part(k->param, chunk * WORLD_CHUNK, WORLD_CHUNK, GEMINI_WRITE, DEVICE), all = use;
      gemini_access_t slice = world_part(k->param, 0, 0, GEMINI_READ, HOST);
      CHECK_OK(gemini_slice_next(k->w.mgr, &all, chunk * WORLD_CHUNK, &slice.offset_bytes, &slice.size_bytes));
      const bool refused = !i && chunk % 3 == 1;
      if (refused) CHECK_OK(gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_op_begin(k->w.mgr, chunk % 2 ? "odd" : "even", k->w.stream));
      CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      world_write(use.ptr, chunk * WORLD_CHUNK, WORLD_CHUNK, 7);
      CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      for (int n = 0; refused && n < AGAIN; n++) CHECK_STATUS(gemini_op_end(k->w.mgr), GEMINI_ERR_BUSY);
      if (refused) CHECK_OK(gemini_release(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
      if (refused && k->rank) { /* what a rank acquires in between is of the same operator */
        CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
        CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      }
      CHECK_OK(gemini_op_end(k->w.mgr));
    }
    CHECK_OK(gemini_iteration_end(k->w.mgr));
  }
  CHECK(world_stats(&k->w).planned_iterations >= ITERATIONS - 2);
  CHECK_EQ(world_stats(&k->w).departures, 0);
}
static void test_an_operators_end_that_was_refused_counts_once(void) {
  for (uint32_t ranks = 1; ranks <= 2; ranks++)
    run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 12 }, refused_ends);
}

/* Gathers that belong before an operator find no room, as memory is allocated that no iteration has shown. */
static void refused_begins(rank_t *k) {
  void *ptr;
  for (int i = 0; i < 2; i++) {
    CHECK_OK(gemini_iteration_begin(k->w.mgr));
    op(k, "reads", 0, CHUNKS, INSIDE);
    CHECK_OK(gemini_iteration_end(k->w.mgr));
  }
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  CHECK_OK(gemini_alloc(k->w.mgr, 4 * WORLD_CHUNK, k->w.stream, &ptr));
  for (int n = 0; n < 3; n++) CHECK_STATUS(gemini_op_begin(k->w.mgr, "reads", k->w.stream), GEMINI_ERR_OOM_DEVICE);
  CHECK_STATUS(gemini_op_end(k->w.mgr), GEMINI_ERR_STATE);
  CHECK_OK(gemini_free(k->w.mgr, ptr, k->w.stream));
  op(k, "reads", 0, CHUNKS, INSIDE);
  CHECK_OK(gemini_iteration_end(k->w.mgr));
  CHECK_EQ(world_stats(&k->w).departures, 0);
}
static void test_an_operator_whose_gathers_find_no_room_can_begin_later(void) {
  for (uint32_t ranks = 1; ranks <= 2; ranks++)
    run(&(shape_t){ .ranks = ranks, .stage = GEMINI_ZERO_PARAMS, .device_chunks = CHUNKS + 1 }, refused_begins);
}

int main(void) {
  process_begin();
  RUN(test_peaks_at_different_times_do_not_add_up);
  RUN(test_peaks_at_different_times_of_an_operator_do_not_add_up);
  RUN(test_what_stays_is_not_gathered_before_its_room_is_free);
  RUN(test_ranks_agree_on_the_frames_of_each_operator);
  RUN(test_auto_gathers_as_seldom_as_the_best_stage);
  RUN(test_auto_leaves_frames_to_states_that_are_worth_more);
  RUN(test_kinds_of_iterations_are_expected_in_their_order);
  RUN(test_bytes_by_plan_are_those_that_a_group_moves);
  RUN(test_experts_are_divided_among_their_own_ranks);
  RUN(test_waits_for_gathers_and_sums_are_counted_apart);
  RUN(test_timelines_have_gathers_sums_and_copies_of_slices);
  RUN(test_ranks_that_differ_in_a_known_iteration_are_told_where);
  RUN(test_ranks_with_other_buckets_are_told);
  RUN(test_bytes_between_slices_are_zeros_in_used_slots);
  RUN(test_an_operators_end_that_was_refused_counts_once);
  RUN(test_an_operator_whose_gathers_find_no_room_can_begin_later);
  return check_done();
}
