/* Training over a group of ranks, each a process with a manager of its own. Only public headers.
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>

#include "../fork.h"
#include "../process.h"
#include "../system.h"
#include "group_world.h"

/* Ranks wait it out for one that stops or leaves the order; for one that is killed they must not. */
#define DEADLINE_NS UINT64_C(6000000000)
/* After a rank has failed, all others have an error within this time; sanitizers make the rest of the step longer. */
#define LATEST_NS (SANITIZED ? UINT64_C(30000000000) : UINT64_C(10000000000))

/* ---- tests */
/* The process becomes all ranks; each makes its configuration of the group by config_of(user, rank). */
typedef gemini_group_config_t (*config_fn)(void *user, uint32_t rank);
typedef void (*rank_fn)(const shape_t *shape, uint32_t rank, gemini_group_config_t group, int fd);
static void train_as(const shape_t *shape, config_fn config_of, void *user, rank_fn run_rank) {
  int fd = memfd_create("stored", MFD_CLOEXEC);
  pid_t pids[RANKS_MOST];
  for (uint32_t r = 1; r < shape->ranks; r++) {
    pids[r] = fork_child();
    if (pids[r]) continue;
    run_rank(shape, r, config_of(user, r), fd);
    exit(0);
  }
  run_rank(shape, 0, config_of(user, 0), fd);
  for (uint32_t r = 1; r < shape->ranks; r++) fork_expect_end(pids[r]);
  close(fd);
}
static void train_over(const shape_t *shape, config_fn config_of, void *user) {
  train_as(shape, config_of, user, train_rank);
}
static gemini_group_config_t config_of_id(void *user, uint32_t rank) {
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  (void)rank;
  c.id = user;
  c.deadline_ns = 10 * DEADLINE_NS;
  return c;
}
static void train(const shape_t *shape) {
  gemini_group_id_t id;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, shape->ranks, &id));
  train_over(shape, config_of_id, &id);
}

/* 251,721 elements: 16 chunks of 64 KiB as float, 8 as bfloat16; states are twice the former. */
/* Under sanitizers each further shape runs little code that the others do not. */
enum { ALL_SHAPES = !SANITIZED };

static void test_training_has_the_bits_of_the_model(void) {
  process_t before = process_now();
  for (uint32_t ranks = 1; ranks <= RANKS_MOST; ranks++) {
    for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
      shape_t shape = { .ranks = ranks, .stage = stage, .element_bytes = 4, .device_chunks = 64, .host_chunks = 64 };
      if (ALL_SHAPES) train(&shape);
      shape.element_bytes = 2;
      shape.unused = true;
      shape.bucket = (ranks + stage) % 2 ? 3 : 0;
      train(&shape);
    }
  }
  process_check(before);
}

static void test_training_in_little_memory_has_the_same_bits(void) {
  for (uint32_t ranks = 2; ranks <= RANKS_MOST; ranks++) {
    shape_t shape = { .ranks = ranks,
                      .stage = GEMINI_ZERO_PARAMS,
                      .element_bytes = 4,
                      .device_chunks = 24,
                      .host_chunks = 80 / ranks,
                      .unused = ranks & 1,
                      .wait = true,
                      .bucket = 4 };
    train(&shape);
    shape.host_chunks = 16;
    shape.file_chunks = 100;
    shape.element_bytes = 2;
    train(&shape);
  }
}

static void test_gradients_of_micro_batches_are_added_in_their_order(void) {
  process_t before = process_now();
  for (uint32_t ranks = 1; ranks <= RANKS_MOST; ranks += SANITIZED ? 2 : 1) {
    for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
      shape_t shape = { .ranks = ranks, .stage = stage, .device_chunks = 64, .host_chunks = 96 };
      shape.element_bytes = (ranks + stage) & 1 ? 2 : 4;
      shape.micro_batches = 1 + (ranks + stage) % 3;
      if (ALL_SHAPES) train(&shape);
      shape.element_bytes ^= 6;
      shape.micro_batches = 1 + (ranks + stage + 1) % 3;
      shape.unused = true;
      shape.bucket = 2 + (ranks + stage) % 4 * 5;
      train(&shape);
    }
  }
  process_check(before);
}

static void test_sums_of_micro_batches_in_little_memory(void) {
  for (uint32_t ranks = 2; ranks <= RANKS_MOST; ranks++) {
    shape_t shape = { .ranks = ranks,
                      .stage = ranks == 2 ? GEMINI_ZERO_GRADIENTS : GEMINI_ZERO_PARAMS,
                      .element_bytes = 2,
                      .device_chunks = 24,
                      .host_chunks = 16,
                      .file_chunks = 100,
                      .unused = true,
                      .micro_batches = 3,
                      .bucket = ranks };
    train(&shape);
  }
}

/* Updates of parts, each rank others, at other points of the backward pass. */
static void test_parts_are_updated_in_the_backward_pass(void) {
  process_t before = process_now();
  for (uint32_t ranks = 1; ranks <= RANKS_MOST; ranks++) {
    shape_t shape = { .ranks = ranks,
                      .stage = 1 + ranks % 3, /* GEMINI_ZERO_* */
                      .element_bytes = 4,
                      .device_chunks = 64,
                      .host_chunks = 96,
                      .micro_batches = 1,
                      .wait = ranks == 2,
                      .parts = true };
    if (ALL_SHAPES) train(&shape);
    shape.bucket = 2; /* a rank alone has none */
    shape.stage = 1 + (ranks + 1) % 3;
    shape.element_bytes = 2;
    shape.device_chunks = 24;
    shape.host_chunks = 16;
    shape.file_chunks = 100;
    shape.unused = true;
    train(&shape);
  }
  process_check(before);
}

/* ---- functions of the caller's, over memory that the processes share; simple, and blocking */
typedef struct {
  _Atomic uint64_t arrived[RANKS_MOST]; /* Atomic: the meetings of each rank so far; stored (release) behind bytes */
  _Atomic bool claimed;                 /* Atomic: set by the rank that gave up first, which then writes why */
  _Atomic bool over;                    /* Atomic: set behind why */
  char why[200];
  _Alignas(64) unsigned char bytes[RANKS_MOST][WORLD_CHUNK];
} area_t;
typedef struct {
  area_t *area;
  uint32_t rank, ranks;   /* of those that meet */
  uint32_t slice, slices; /* of a chunk: this rank's, and how many */
  uint64_t meetings, calls;
  uint64_t fail_at;                               /* the call that fails with IO; 0: none does */
  bool wrong;                                     /* adds another value than the other ranks */
  uint32_t registered, in_registered, refused_at; /* memories now; gathers in one; the call that fails, 0: none does */
  struct {
    const unsigned char *memory;
    uint64_t bytes;
  } memories[64]; /* with handles from 1; NULL: not registered */
} table_user_t;

static gemini_status_t table_failure(const char *text) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  info.status = GEMINI_ERR_PEER;
  snprintf(info.message, sizeof info.message, "%s", text);
  CHECK_OK(gemini_error_set(&info));
  return GEMINI_ERR_PEER;
}
/* Waits for all ranks. */
static gemini_status_t meet(table_user_t *u) {
  atomic_store_explicit(&u->area->arrived[u->rank], ++u->meetings, memory_order_release);
  for (uint32_t r = 0; r < u->ranks; r++)
    while (atomic_load_explicit(&u->area->arrived[r], memory_order_acquire) < u->meetings) {
      if (atomic_load_explicit(&u->area->over, memory_order_acquire)) return table_failure(u->area->why);
      nanosleep(&(struct timespec){ 0, 20000 }, NULL);
    }
  return GEMINI_OK;
}
/* After it, area->bytes holds what all ranks have brought, until the next one. */
static gemini_status_t bring(table_user_t *u, const void *mine, uint64_t bytes) {
  if (++u->calls == u->fail_at) return GEMINI_ERR_IO;
  gemini_status_t status = meet(u); /* all have read what was there */
  CHECK(bytes <= WORLD_CHUNK);
  if (!status && bytes) memcpy(u->area->bytes[u->rank], mine, bytes);
  return status ? status : meet(u);
}
/* The caller's thread registers while the thread of a stream gathers. */
static pthread_mutex_t memories_lock = PTHREAD_MUTEX_INITIALIZER;
static gemini_status_t table_register(void *user, void *memory, uint64_t bytes, void **handle_out) {
  table_user_t *u = user;
  if (u->registered + 1 == u->refused_at) return GEMINI_ERR_IO;
  CHECK(!pthread_mutex_lock(&memories_lock));
  uint32_t i = 0;
  while (i < 64 && u->memories[i].memory) i++;
  CHECK(i < 64 && memory && bytes == WORLD_CHUNK);
  u->memories[i].memory = memory;
  u->memories[i].bytes = bytes;
  u->registered++;
  CHECK(!pthread_mutex_unlock(&memories_lock));
  *handle_out = (void *)(uintptr_t)(i + 1);
  return GEMINI_OK;
}
static void table_unregister(void *user, void *handle) {
  table_user_t *u = user;
  const uintptr_t i = (uintptr_t)handle - 1;
  CHECK(!pthread_mutex_lock(&memories_lock));
  CHECK(i < 64 && u->memories[i].memory);
  (void)*(const volatile unsigned char *)u->memories[i].memory; /* it is there still */
  u->memories[i].memory = NULL;
  u->registered--;
  CHECK(!pthread_mutex_unlock(&memories_lock));
}
static void look_up(table_user_t *u, const unsigned char *buffer) {
  CHECK(!pthread_mutex_lock(&memories_lock));
  for (uint32_t i = 0; i < 64; i++)
    u->in_registered += u->memories[i].memory && buffer - u->memories[i].memory >= 0 &&
                        buffer - u->memories[i].memory < (int64_t)u->memories[i].bytes;
  CHECK(!pthread_mutex_unlock(&memories_lock));
}
static gemini_status_t table_gather(void *user, void *buffer, uint64_t bytes, void *stream, const char *label) {
  table_user_t *u = user;
  CHECK(!stream && strstr(label, "of arena"));
  look_up(u, buffer);
  gemini_status_t status = bring(u, (unsigned char *)buffer + u->rank * bytes, bytes);
  for (uint32_t r = 0; r < u->ranks && !status; r++)
    memcpy((unsigned char *)buffer + r * bytes, u->area->bytes[r], bytes);
  return status;
}
static gemini_status_t table_broadcast(void *user, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                                       const char *label) {
  table_user_t *u = user;
  CHECK(!stream && strstr(label, "of arena"));
  look_up(u, buffer);
  gemini_status_t status = bring(u, buffer, bytes);
  if (!status) memcpy(buffer, u->area->bytes[root], bytes);
  return status;
}
/* Adds count values from value `first` of all ranks, in the order of ranks; of replicas, inside them first. */
static void add_all(const table_user_t *u, void *to, uint64_t first, uint64_t count, uint32_t dtype) {
  const uint32_t width = dtype == GEMINI_DTYPE_BF16 ? 2 : 4;
  for (uint64_t i = 0; i < count; i++) {
    float sum = 0, replica = 0, all = 0;
    for (uint32_t r = 0; r < u->ranks; r++) {
      const float value = get_value(u->area->bytes[r], first + i, width);
      sum = r % u->slices ? sum + value : value;
      if ((r + 1) % u->slices) continue;
      put_value(&replica, 0, width, sum);
      all = r < u->slices ? get_value(&replica, 0, width) : all + get_value(&replica, 0, width);
    }
    put_value(to, i, width, all);
  }
}
static gemini_status_t table_scatter(void *user, void *buffer, uint64_t count, uint32_t dtype, void *stream,
                                     const char *label) {
  table_user_t *u = user;
  const uint64_t width = dtype == GEMINI_DTYPE_BF16 ? 2 : 4;
  CHECK(!stream && strstr(label, "of arena"));
  gemini_status_t status = bring(u, buffer, count * width * u->slices);
  unsigned char *own = (unsigned char *)buffer + u->slice * count * width;
  if (!status) add_all(u, own, u->slice * count, count, dtype);
  if (!status && u->wrong) put_value(own, 0, (uint32_t)width, 1 + get_value(own, 0, (uint32_t)width));
  return status;
}
static gemini_status_t table_reduce(void *user, void *buffer, uint64_t count, uint32_t dtype, void *stream,
                                    const char *label) {
  table_user_t *u = user;
  CHECK(!stream && strstr(label, "of arena"));
  gemini_status_t status = bring(u, buffer, count * (dtype == GEMINI_DTYPE_BF16 ? 2 : 4));
  if (!status) add_all(u, buffer, 0, count, dtype);
  return status;
}
static gemini_status_t table_exchange(void *user, const void *mine, uint64_t bytes, void *all, const char *label) {
  table_user_t *u = user;
  (void)label;
  gemini_status_t status = bring(u, mine, bytes);
  for (uint32_t r = 0; r < u->ranks && !status && bytes; r++)
    memcpy((unsigned char *)all + r * bytes, u->area->bytes[r], bytes);
  return status;
}
static void table_abort(void *user, const char *why) {
  table_user_t *u = user;
  if (atomic_exchange(&u->area->claimed, true)) return;
  snprintf(u->area->why, sizeof u->area->why, "a rank gave up: %s", why);
  atomic_store_explicit(&u->area->over, true, memory_order_release);
}

/* The tables of one group in a rank. */
typedef struct {
  table_user_t users[GEMINI_GROUP_COMMS];
  gemini_comm_t tables[GEMINI_GROUP_COMMS];
  const gemini_comm_t *comms[GEMINI_GROUP_COMMS];
} tables_of_t;
/* Makes the tables, and returns what a rank gives to gemini_group_open(); areas: shared by the ranks. */
static gemini_group_config_t config_over(tables_of_t *t, area_t *areas, uint32_t rank, uint32_t ranks, uint32_t table,
                                         uint64_t fail_at) {
  for (uint32_t i = 0; i < GEMINI_GROUP_COMMS; i++) {
    t->users[i] = (table_user_t){ .area = &areas[i], .rank = rank, .ranks = ranks, .slice = rank, .slices = ranks };
    if (i == table) t->users[i].fail_at = fail_at;
    t->tables[i] = (gemini_comm_t)GEMINI_COMM_INIT;
    t->tables[i].user = &t->users[i];
    if (i == 0) t->tables[i].all_gather = table_gather, t->tables[i].broadcast = table_broadcast;
    if (i == 1) t->tables[i].reduce_scatter = table_scatter, t->tables[i].all_reduce = table_reduce;
    if (i == 2) t->tables[i].exchange = table_exchange;
    t->tables[i].abort = table_abort;
    t->comms[i] = &t->tables[i];
  }
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  c.rank = rank;
  c.ranks = ranks;
  c.comms = t->comms;
  return c;
}
static tables_of_t own_tables;
static gemini_group_config_t config_of_tables(area_t *areas, uint32_t rank, uint32_t ranks, uint32_t table,
                                              uint64_t fail_at) {
  return config_over(&own_tables, areas, rank, ranks, table, fail_at);
}
enum { AREAS = 2 * GEMINI_GROUP_COMMS }; /* of two groups at most */
static area_t *areas_make(void) {
  void *areas = mmap(NULL, AREAS * sizeof(area_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(areas != MAP_FAILED);
  return areas;
}
static void areas_end(area_t *areas) { CHECK(!munmap(areas, AREAS * sizeof(area_t))); }

typedef struct {
  area_t *areas;
  uint32_t ranks;
} tables_t;
static gemini_group_config_t config_of_areas(void *user, uint32_t rank) {
  tables_t *t = user;
  return config_of_tables(t->areas, rank, t->ranks, 0, 0);
}
static void test_training_over_functions_of_the_caller(void) {
  process_t before = process_now();
  for (uint32_t ranks = 1; ranks <= RANKS_MOST; ranks++) {
    shape_t shape = {
      .ranks = ranks, .stage = GEMINI_ZERO_PARAMS, .element_bytes = 4, .device_chunks = 64, .host_chunks = 64
    };
    if (ranks % 2) shape.element_bytes = 2, shape.unused = true, shape.device_chunks = 24;
    if (ranks == 2) shape.stage = GEMINI_ZERO_STATES;
    tables_t t = { areas_make(), ranks };
    train_over(&shape, config_of_areas, &t);
    areas_end(t.areas);
  }
  process_check(before);
}

/* Gathers into frames that the caller's table has been told of, all or some of them. */
static gemini_group_config_t config_of_registering(void *user, uint32_t rank) {
  tables_t *t = user;
  gemini_group_config_t c = config_of_tables(t->areas, rank, t->ranks, 0, 0);
  own_tables.tables[0].register_memory = table_register;
  own_tables.tables[0].unregister_memory = table_unregister;
  if (t->ranks == 3 && rank == 1) own_tables.users[0].refused_at = 4;
  c.flags = GEMINI_GROUP_REGISTER;
  return c;
}
static void registering_rank(const shape_t *shape, uint32_t rank, gemini_group_config_t group, int fd) {
  train_rank(shape, rank, group, fd);
  const table_user_t *u = &own_tables.users[0];
  if (shape->ranks == 3 && rank == 1) CHECK(u->in_registered > 0 && u->in_registered < u->calls);
  else CHECK_EQ(u->in_registered, u->calls);
  CHECK_EQ(u->registered, 0);
}
static void test_training_in_memory_that_the_callers_table_knows(void) {
  process_t before = process_now();
  for (uint32_t ranks = 2; ranks <= 3; ranks++) {
    shape_t shape = {
      .ranks = ranks, .stage = GEMINI_ZERO_PARAMS, .element_bytes = 4, .device_chunks = 40, .host_chunks = 64
    };
    tables_t t = { areas_make(), ranks };
    train_as(&shape, config_of_registering, &t, registering_rank);
    areas_end(t.areas);
  }
  process_check(before);
}

/* ---- hybrid sharding: two replicas of two ranks */
static void test_replicas_train_over_shared_memory(void) {
  process_t before = process_now();
  for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
    shape_t shape = { .ranks = 4, .replicas = 2, .stage = stage, .device_chunks = 64, .host_chunks = 96 };
    shape.element_bytes = stage == GEMINI_ZERO_GRADIENTS ? 4 : 2;
    shape.unused = stage == GEMINI_ZERO_PARAMS;
    if (stage == GEMINI_ZERO_STATES) shape.micro_batches = 2;
    if (stage == GEMINI_ZERO_GRADIENTS) shape.micro_batches = 1, shape.parts = true;
    if (stage == GEMINI_ZERO_PARAMS) shape.device_chunks = 24, shape.host_chunks = 16, shape.file_chunks = 100;
    train(&shape);
  }
  shape_t copies = { .ranks = 3, .replicas = 3, .stage = GEMINI_ZERO_PARAMS, .device_chunks = 64, .host_chunks = 96 };
  copies.element_bytes = 4; /* replicas of one rank: nothing is gathered */
  train(&copies);
  process_check(before);
}

static gemini_group_config_t config_of_replicas(void *user, uint32_t rank) {
  area_t *areas = user;
  gemini_group_config_t c = config_of_tables(areas, rank, 4, 0, 0);
  own_tables.users[0] = (table_user_t){ .area = &areas[rank / 2 * 3], .rank = rank % 2, .ranks = 2 };
  own_tables.users[1].slice = rank % 2;
  own_tables.users[1].slices = 2;
  return c;
}
static void test_replicas_train_over_functions_of_the_caller(void) {
  process_t before = process_now();
  for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
    shape_t shape = { .ranks = 4, .replicas = 2, .stage = stage, .device_chunks = 64, .host_chunks = 64 };
    shape.element_bytes = stage == GEMINI_ZERO_GRADIENTS ? 2 : 4;
    shape.unused = stage != GEMINI_ZERO_STATES;
    area_t *areas = areas_make();
    train_over(&shape, config_of_replicas, areas);
    areas_end(areas);
  }
  process_check(before);
}

/* Functions that give another replica other bits: the first norm finds that, on all ranks. */
static void parting_rank(const shape_t *shape, uint32_t rank, area_t *areas) {
  static rank_t k;
  rank_open(&k, shape, rank, config_of_replicas(areas, rank));
  own_tables.users[1].wrong = rank == 3;
  CHECK_OK(gemini_iteration_begin(k.w.mgr));
  CHECK_OK(micro_batch(&k, 0));
  double norm;
  gemini_access_t all = world_whole(k.grads, GEMINI_READ, DEVICE);
  CHECK_STATUS(gemini_norm(k.w.mgr, &all, GEMINI_DTYPE_F32, k.w.stream, &norm), GEMINI_ERR_PEER);
  CHECK_SAYS(world_error().message, "replicas differ: ranks 1 and 3 have the same slices of grad, but other bytes");
  uint8_t byte = 0, bytes[RANKS_MOST]; /* what they have would go on to differ */
  CHECK_STATUS(gemini_group_exchange(k.w.mgr, k.group, &byte, 1, bytes), GEMINI_ERR_PEER);
  gemini_status_t closed = gemini_manager_close(k.w.mgr);
  if (closed && closed != GEMINI_ERR_PEER && closed != GEMINI_ERR_DEVICE) CHECK_OK(closed);
  model_free(&k);
}
static void test_replicas_that_part_are_noticed(void) {
  const shape_t shape = {
    .ranks = 4, .replicas = 2, .stage = GEMINI_ZERO_PARAMS, .element_bytes = 4, .device_chunks = 64, .host_chunks = 64
  };
  area_t *areas = areas_make();
  pid_t pids[RANKS_MOST];
  for (uint32_t r = 1; r < shape.ranks; r++) {
    pids[r] = fork_child();
    if (pids[r]) continue;
    parting_rank(&shape, r, areas);
    exit(0);
  }
  parting_rank(&shape, 0, areas);
  for (uint32_t r = 1; r < shape.ranks; r++) fork_expect_end(pids[r]);
  areas_end(areas);
}

/* ---- ranks that fail, or do other than the others */
typedef enum {
  KILLED_IN_FORWARD,
  KILLED_IN_BACKWARD,
  KILLED_BEFORE_THE_NORM,
  SKIPS_AN_OPERATOR,
  NAMES_AN_OPERATOR_DIFFERENTLY,
  STOPS,
  FAILURES
} failure_t;
static const char *const failure_words[FAILURES] = {
  "has ended",
  "has ended",
  "has ended",
  "rank 1 left the recorded order of operators in forward 5",
  "rank 1 left the recorded order of operators in another name",
  "waited",
};

/* What the rank that fails does in step 2. True: it goes on with the operator. */
static bool fail_here(rank_t *k, failure_t how, uint32_t step, uint32_t layer, bool back) {
  if (step != 2 || k->rank != 1) return true;
  if ((how == KILLED_IN_FORWARD && !back && layer == 4) || (how == KILLED_IN_BACKWARD && back && layer == 2)) {
    kill(getpid(), SIGKILL);
  }
  if (how == STOPS && back && layer == 2) pause(); /* until it is killed */
  if (how == NAMES_AN_OPERATOR_DIFFERENTLY && !back && layer == 4) {
    CHECK_OK(gemini_op_begin(k->w.mgr, "another name", k->w.stream));
    gemini_access_t use = world_whole(k->param[layer], GEMINI_READ, DEVICE);
    if (!gemini_acquire(k->w.mgr, &use, 1, k->w.stream)) CHECK_OK(gemini_release(k->w.mgr, &use, 1, k->w.stream));
    gemini_status_t ended = gemini_op_end(k->w.mgr); /* the failure may be noticed by now */
    CHECK(ended == GEMINI_OK || ended == GEMINI_ERR_PEER);
    return false;
  }
  return !(how == SKIPS_AN_OPERATOR && !back && layer == 4);
}

static void keep_span(void *user, const gemini_update_span_t *span) { (void)user, (void)span; }
/* As step(), for ranks of which one fails. */
static gemini_status_t failing_step(rank_t *k, failure_t how, uint32_t n) {
  gemini_status_t status = gemini_iteration_begin(k->w.mgr);
  for (uint32_t layer = 0; !status && layer < LAYERS; layer++)
    if (fail_here(k, how, n, layer, false)) status = op(k, n, layer, false);
  for (uint32_t layer = LAYERS; !status && layer-- > 0;)
    if (fail_here(k, how, n, layer, true)) status = op(k, n, layer, true);
  if (!status) status = gemini_stream_synchronize(k->w.mgr, k->w.stream);
  if (!status && how == KILLED_BEFORE_THE_NORM && n == 2 && k->rank == 1) kill(getpid(), SIGKILL);
  double norm;
  gemini_access_t all = world_whole(k->grads, GEMINI_READ, DEVICE);
  if (!status) status = gemini_norm(k->w.mgr, &all, GEMINI_DTYPE_F32, k->w.stream, &norm);
  if (!status) status = update(k, 2, keep_span);
  return status ? status : gemini_iteration_end(k->w.mgr);
}

enum { FAILING_STEPS = 6 }; /* within these a failure comes */
static void failing_rank(const shape_t *shape, uint32_t rank, const gemini_group_id_t *id, failure_t how) {
  static rank_t k;
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  group.id = id;
  group.deadline_ns = how >= SKIPS_AN_OPERATOR ? DEADLINE_NS : 10 * DEADLINE_NS;
  rank_open(&k, shape, rank, group);
  gemini_status_t status = GEMINI_OK;
  uint64_t begin_ns = 0;
  for (uint32_t n = 0; n < FAILING_STEPS && !status; n++) {
    begin_ns = now_ns();
    status = failing_step(&k, how, n);
  }
  CHECK_EQ(status, GEMINI_ERR_PEER);
  CHECK(now_ns() - begin_ns < LATEST_NS);
  gemini_error_info_t first = world_error();
  if (!strstr(first.message, failure_words[how]) || (!strstr(first.message, "ank 1") && rank != 1))
    fprintf(stderr, "rank %u: %s: %s\n", rank, first.operation, first.message);
  CHECK(strstr(first.message, failure_words[how]));
  CHECK(strstr(first.message, "ank 1") || rank == 1);
  /* The group stays failed; what the host has stays readable. */
  uint8_t byte = 0, bytes[RANKS_MOST];
  CHECK_STATUS(gemini_group_exchange(k.w.mgr, k.group, &byte, 1, bytes), GEMINI_ERR_PEER);
  gemini_tensor_t master;
  CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.param[0], k.masters, &master));
  gemini_access_t all = world_whole(master, GEMINI_READ, HOST);
  uint64_t offset, size;
  CHECK_OK(gemini_slice_next(k.w.mgr, &all, 0, &offset, &size));
  gemini_access_t slice = world_part(master, offset, size, GEMINI_READ, HOST);
  CHECK_OK(gemini_acquire(k.w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
  CHECK(!memcmp(slice.ptr, k.model.master + k.model.first[0] + offset / 4, size));
  CHECK_OK(gemini_release(k.w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
  gemini_status_t closed = gemini_manager_close(k.w.mgr);
  if (closed && closed != GEMINI_ERR_PEER && closed != GEMINI_ERR_DEVICE) CHECK_OK(closed);
  model_free(&k);
}

static void fail_in(const shape_t *shape, failure_t how) {
  gemini_group_id_t id;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, shape->ranks, &id));
  pid_t pids[RANKS_MOST];
  for (uint32_t r = 1; r < shape->ranks; r++) {
    pids[r] = fork_child();
    if (pids[r]) continue;
    failing_rank(shape, r, &id, how);
    exit(0);
  }
  failing_rank(shape, 0, &id, how);
  for (uint32_t r = 1; r < shape->ranks; r++) {
    int end;
    if (r == 1 && how == STOPS) CHECK(!kill(pids[r], SIGKILL));
    CHECK_EQ(waitpid(pids[r], &end, 0), pids[r]);
    bool killed = r == 1 && (how <= KILLED_BEFORE_THE_NORM || how == STOPS);
    CHECK(killed ? WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL : end == 0);
  }
}
static void test_failing_ranks_are_named_by_all_others(void) {
  process_t before = process_now();
  shape_t shape = {
    .ranks = 3, .stage = GEMINI_ZERO_PARAMS, .element_bytes = 4, .device_chunks = 64, .host_chunks = 64
  };
  for (failure_t how = 0; how < FAILURES; how++) fail_in(&shape, how);
  shape.ranks = 4;
  shape.replicas = 2; /* of which one alone can notice what happens in a gather */
  fail_in(&shape, KILLED_IN_FORWARD);
  fail_in(&shape, KILLED_IN_BACKWARD);
  fail_in(&shape, NAMES_AN_OPERATOR_DIFFERENTLY);
  process_check(before);
}

/* ---- a rank that is missing when a group is opened */
typedef enum { STAYS_AWAY, ENDS_BEFORE_IT_COMES, KILLED_WHILE_IT_WAITS, ABSENCES } absence_t;
enum { OPENERS = 3 };
typedef struct {
  gemini_group_id_t id;
  _Atomic uint32_t made, opens, gone; /* the id; the victim is about to open the group; it has gone, or never comes */
  _Atomic uint64_t killed_ns;
  pid_t pids[OPENERS];
} opening_t;
static void await(const _Atomic uint32_t *what) {
  while (!atomic_load(what)) sleep_us(1000);
}

static void open_without(opening_t *o, uint32_t rank, uint32_t victim, absence_t how) {
  process_t before = process_now();
  world_t w = world_open(world_config(8, 8, 0));
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  gemini_group_t group;
  if (rank == 0) {
    CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, OPENERS, &o->id)); /* of the process that becomes rank 0 */
    atomic_store(&o->made, 1);
  }
  await(&o->made);
  c.id = &o->id;
  c.rank = rank;
  c.ranks = OPENERS;
  /* One who was there and is killed is noticed at once; one who does not come, at the deadline. */
  c.deadline_ns = how == KILLED_WHILE_IT_WAITS ? 10 * DEADLINE_NS : UINT64_C(1000000000);
  if (rank == victim) {
    if (how == STAYS_AWAY) pause();
    if (how == KILLED_WHILE_IT_WAITS) {
      atomic_store(&o->opens, 1);
      (void)!gemini_group_open(w.mgr, &c, &group);
    }
    kill(getpid(), SIGKILL);
  }
  if (how != KILLED_WHILE_IT_WAITS || rank != (victim + 1) % OPENERS) await(&o->gone); /* else it waits for this one */
  uint64_t begin_ns = now_ns();
  CHECK_STATUS(gemini_group_open(w.mgr, &c, &group), GEMINI_ERR_PEER);
  if (how == KILLED_WHILE_IT_WAITS) begin_ns = atomic_load(&o->killed_ns);
  CHECK(now_ns() < begin_ns + LATEST_NS);
  char words[80];
  snprintf(words, sizeof words, "process %d", o->pids[victim]);
  /* Who comes when rank 0 has failed, too, finds the id gone. */
  const bool gone = how == KILLED_WHILE_IT_WAITS && strstr(world_error().message, "its rank 0 has joined already");
  if (how == KILLED_WHILE_IT_WAITS || (how == ENDS_BEFORE_IT_COMES && !victim)) {
    if (!gone) CHECK_SAYS(world_error().message, words);
    CHECK_SAYS(world_error().message, "has ended");
  } else {
    snprintf(words, sizeof words, "of %d ranks these are missing: %u", OPENERS, victim);
    CHECK_SAYS(world_error().message, words);
  }
  world_close(&w);
  process_check(before); /* what the id takes has been given back, too */
}

/* Whether the first thread of a process sleeps. */
static bool is_asleep(pid_t pid) {
  char path[64], state = 0;
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE *file = fopen(path, "r");
  CHECK(file);
  CHECK_EQ(fscanf(file, "%*d (%*[^)]) %c", &state), 1);
  fclose(file);
  return state == 'S';
}
static void open_without_one(opening_t *o, uint32_t victim, absence_t how) {
  int end;
  memset(o, 0, sizeof *o);
  for (uint32_t r = 0; r < OPENERS; r++) {
    const pid_t pid = fork_child();
    if (!pid) {
      open_without(o, r, victim, how);
      exit(0);
    }
    o->pids[r] = pid;
  }
  if (how == KILLED_WHILE_IT_WAITS) {
    await(&o->opens);
    for (int times = 0; times < 5; times = is_asleep(o->pids[victim]) ? times + 1 : 0) sleep_us(10000);
    atomic_store(&o->killed_ns, now_ns());
    CHECK_EQ(kill(o->pids[victim], SIGKILL), 0);
  }
  if (how != STAYS_AWAY) CHECK_EQ(waitpid(o->pids[victim], &end, 0), o->pids[victim]);
  atomic_store(&o->gone, 1);
  for (uint32_t r = 0; r < OPENERS; r++)
    if (r != victim) fork_expect_end(o->pids[r]);
  if (how != STAYS_AWAY) return;
  CHECK_EQ(kill(o->pids[victim], SIGKILL), 0);
  CHECK_EQ(waitpid(o->pids[victim], &end, 0), o->pids[victim]);
}
static void test_a_rank_that_is_missing_at_the_start_is_named_in_time(void) {
  opening_t *o = mmap(NULL, sizeof *o, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(o != MAP_FAILED);
  for (uint32_t victim = 0; victim < OPENERS; victim++)
    for (absence_t how = 0; how < ABSENCES; how++) open_without_one(o, victim, how);
  munmap(o, sizeof *o);
}

/* The descriptor of an id belongs to whoever has its number next. */
static void test_an_id_that_is_used_again_closes_nobodys_file(void) {
  gemini_group_id_t id;
  gemini_group_t group;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 1, &id));
  world_t w = world_open(world_config(8, 8, 0));
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  c.id = &id;
  c.ranks = 1;
  CHECK_OK(gemini_group_open(w.mgr, &c, &group));
  int files[16];
  for (int i = 0; i < 16; i++) CHECK((files[i] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0);
  CHECK_STATUS(gemini_group_open(w.mgr, &c, &group), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "its rank 0 has joined already");
  for (int i = 0; i < 16; i++) CHECK_EQ(close(files[i]), 0);
  world_close(&w);
}

/* Rank 1 cannot open the group, as it has too many; rank 0, which has opened it, is told why. */
enum { GROUPS_MOST = 16 };
static void test_a_rank_that_cannot_open_the_group_says_why(void) {
  gemini_group_id_t id, own;
  gemini_group_t group;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 2, &id));
  const pid_t child = fork_child();
  world_t w = world_open(world_config(8, 8, 0));
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  if (!child) {
    c.id = &own;
    c.ranks = 1;
    for (int i = 0; i < GROUPS_MOST; i++) {
      CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 1, &own));
      CHECK_OK(gemini_group_open(w.mgr, &c, &group));
    }
  }
  c.id = &id;
  c.rank = !child;
  c.ranks = 2;
  if (child) {
    uint8_t byte = 0, bytes[2];
    CHECK_OK(gemini_group_open(w.mgr, &c, &group));
    CHECK_STATUS(gemini_group_exchange(w.mgr, group, &byte, 1, bytes), GEMINI_ERR_PEER);
    CHECK_SAYS(world_error().message, "rank 1 gave up: 16 groups are open, the limit is 16");
  } else {
    CHECK_STATUS(gemini_group_open(w.mgr, &c, &group), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().message, "16 groups are open, the limit is 16");
  }
  world_close(&w);
  if (!child) exit(0);
  fork_expect_end(child);
}

/* A function of rank 1 fails: the others hear of it through abort(). */
static void failing_table_rank(const shape_t *shape, uint32_t rank, area_t *areas, uint32_t table, uint64_t fail_at) {
  static const char *const functions[] = { "all_gather() of comms[0]", "reduce_scatter() of comms[1]",
                                           "exchange() of comms[2]" };
  static rank_t k;
  gemini_status_t status = GEMINI_OK;
  rank_open(&k, shape, rank, config_of_tables(areas, rank, shape->ranks, table, rank == 1 ? fail_at : 0));
  for (uint32_t n = 0; n < FAILING_STEPS && !status; n++) status = failing_step(&k, FAILURES, n);
  CHECK_EQ(status, GEMINI_ERR_PEER);
  gemini_error_info_t first = world_error();
  if (rank == 1) CHECK_SAYS(first.message, "rank 1 of 3: ");
  else CHECK_SAYS(first.message, "a rank gave up: rank 1 of 3: ");
  CHECK_SAYS(first.message, functions[table]);
  CHECK_SAYS(first.message, "returned -9 (input/output error)");
  uint8_t byte = 0, bytes[RANKS_MOST];
  CHECK_STATUS(gemini_group_exchange(k.w.mgr, k.group, &byte, 1, bytes), GEMINI_ERR_PEER);
  gemini_status_t closed = gemini_manager_close(k.w.mgr);
  if (closed && closed != GEMINI_ERR_PEER && closed != GEMINI_ERR_DEVICE) CHECK_OK(closed);
  model_free(&k);
}
static void test_failing_functions_of_the_caller_are_named_by_all_ranks(void) {
  process_t before = process_now();
  const shape_t shape = {
    .ranks = 3, .stage = GEMINI_ZERO_PARAMS, .element_bytes = 4, .device_chunks = 64, .host_chunks = 64
  };
  static const uint64_t fail_at[GEMINI_GROUP_COMMS] = { 41, 21, 3 };
  for (uint32_t table = 0; table < GEMINI_GROUP_COMMS; table++) {
    area_t *areas = areas_make();
    pid_t pids[RANKS_MOST];
    for (uint32_t r = 1; r < shape.ranks; r++) {
      pids[r] = fork_child();
      if (pids[r]) continue;
      failing_table_rank(&shape, r, areas, table, fail_at[table]);
      exit(0);
    }
    failing_table_rank(&shape, 0, areas, table, fail_at[table]);
    for (uint32_t r = 1; r < shape.ranks; r++) fork_expect_end(pids[r]);
    for (int i = 0; i < GEMINI_GROUP_COMMS; i++) CHECK(atomic_load(&areas[i].over)); /* nobody waits in the others */
    areas_end(areas);
  }
  process_check(before);
}

/* ---- exchanges of several threads */
typedef struct {
  gemini_manager_t mgr;
  gemini_group_t group;
} exchange_t;
static void *exchange_main(void *user) {
  exchange_t *x = user;
  uint8_t byte = 7, bytes[2];
  CHECK_OK(gemini_group_exchange(x->mgr, x->group, &byte, 1, bytes));
  CHECK(bytes[0] == 7 && bytes[1] == 9);
  return NULL;
}
/* The library's own exchange would be on the same communicator, in an order that other ranks need not have. */
static void test_the_librarys_exchange_does_not_overlap_the_callers(void) {
  const shape_t shape = {
    .ranks = 2, .stage = GEMINI_ZERO_PARAMS, .element_bytes = 4, .device_chunks = 64, .host_chunks = 64
  };
  static rank_t k;
  area_t *areas = areas_make();
  pid_t child = fork_child();
  const uint32_t rank = !child;
  rank_open(&k, &shape, rank, config_of_tables(areas, rank, 2, 0, 0));
  uint8_t none;
  CHECK_STATUS(gemini_group_exchange(k.w.mgr, k.group, &none, INT64_MAX / 2 + 1, &none), GEMINI_ERR_INVALID);
  CHECK_OK(step(&k, 0, true));
  double norm;
  gemini_access_t all = world_whole(k.masters, GEMINI_READ, HOST);
  if (child) {
    exchange_t x = { k.w.mgr, k.group };
    pthread_t thread;
    uint64_t meetings = atomic_load(&areas[2].arrived[0]);
    CHECK(!pthread_create(&thread, NULL, exchange_main, &x));
    while (atomic_load(&areas[2].arrived[0]) == meetings) sched_yield();
    CHECK_STATUS(gemini_norm(k.w.mgr, &all, GEMINI_DTYPE_F32, k.w.stream, &norm), GEMINI_ERR_BUSY);
    CHECK_SAYS(world_error().message, "another thread's exchange");
    atomic_store(&areas[1].over, true); /* tells rank 1, of which the sums are not needed any more */
    CHECK(!pthread_join(thread, NULL));
  } else {
    while (!atomic_load(&areas[1].over)) sched_yield();
    uint8_t byte = 9, bytes[2];
    CHECK_OK(gemini_group_exchange(k.w.mgr, k.group, &byte, 1, bytes));
  }
  CHECK_OK(gemini_norm(k.w.mgr, &all, GEMINI_DTYPE_F32, k.w.stream, &norm));
  rank_close(&k);
  if (!child) exit(0);
  fork_expect_end(child);
  areas_end(areas);
}

/* ---- two groups */
/* A rank whose manager has two groups, each with parameters of its own that every operator gathers. */
enum { PAIR = 2, PAIR_CHUNKS = 4, PAIR_STEPS = 6 };
typedef struct {
  world_t w;
  tables_of_t tables[PAIR];
  gemini_group_t group[PAIR];
  gemini_tensor_t param[PAIR];
} pair_t;
static void pair_open(pair_t *p, area_t *const areas[PAIR], uint32_t rank) {
  p->w = world_open(world_config(16, 64, 0));
  for (uint32_t g = 0; g < PAIR; g++) {
    gemini_group_config_t config = config_over(&p->tables[g], areas[g], rank, 2, 0, 0);
    CHECK_OK(gemini_group_open(p->w.mgr, &config, &p->group[g]));
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
    gemini_arena_t arena;
    c.element_bytes = 4;
    c.group = p->group[g];
    c.zero_stage = g ? GEMINI_ZERO_AUTO : GEMINI_ZERO_PARAMS;
    CHECK_OK(gemini_arena_create(p->w.mgr, &c, &arena));
    p->param[g] = world_tensor(&p->w, arena, g ? "second" : "first", PAIR_CHUNKS * WORLD_CHUNK);
  }
}
static gemini_status_t pair_op(pair_t *p, const char *name) {
  gemini_status_t status = gemini_op_begin(p->w.mgr, name, p->w.stream);
  for (uint32_t g = 0; !status && g < PAIR; g++) {
    gemini_access_t use = world_whole(p->param[g], GEMINI_READ, DEVICE);
    status = gemini_acquire(p->w.mgr, &use, 1, GEMINI_STREAM_CALLER);
    if (!status) status = gemini_release(p->w.mgr, &use, 1, GEMINI_STREAM_CALLER);
  }
  return status ? status : gemini_op_end(p->w.mgr);
}
/* Ends the iteration while another thread's exchange of the second group is under way on rank 0. Rank 1 takes part in
 * that when rank 0 has been refused. */
static void pair_end(pair_t *p, area_t *area, uint32_t rank) {
  uint8_t byte = 9, bytes[2];
  if (rank) {
    while (!atomic_load(&area->over)) sched_yield();
    atomic_store(&area->over, false);
    CHECK_OK(gemini_group_exchange(p->w.mgr, p->group[1], &byte, 1, bytes));
    CHECK_OK(gemini_iteration_end(p->w.mgr));
    return;
  }
  exchange_t x = { p->w.mgr, p->group[1] };
  pthread_t thread;
  const table_user_t *exchanges = &p->tables[1].users[2];
  const uint64_t meetings = atomic_load(&exchanges->area->arrived[0]);
  CHECK(!pthread_create(&thread, NULL, exchange_main, &x));
  while (atomic_load(&exchanges->area->arrived[0]) == meetings) sched_yield();
  for (int i = 0; i < 2; i++) {
    CHECK_STATUS(gemini_iteration_end(p->w.mgr), GEMINI_ERR_BUSY);
    CHECK_SAYS(world_error().message, "another thread's exchange");
  }
  CHECK_STATUS(gemini_op_begin(p->w.mgr, "late", p->w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "has begun to end");
  atomic_store(&area->over, true);
  CHECK(!pthread_join(thread, NULL));
  CHECK_OK(gemini_iteration_end(p->w.mgr));
}
/* The first group has been told of the iteration by then. It must not be told again. */
static void test_an_end_that_one_of_two_groups_refuses_goes_on_where_it_stood(void) {
  static pair_t p;
  area_t *areas[PAIR] = { areas_make(), areas_make() }, *signal = areas_make();
  pid_t child = fork_child();
  const uint32_t rank = !child;
  pair_open(&p, areas, rank);
  for (int i = 0; i < PAIR_STEPS; i++) {
    CHECK_OK(gemini_iteration_begin(p.w.mgr));
    CHECK_OK(pair_op(&p, "forward"));
    CHECK_OK(pair_op(&p, i % 4 ? "backward" : "another")); /* of a new kind, and of a known one */
    pair_end(&p, signal, rank);
  }
  CHECK_EQ(world_stats(&p.w).iterations, PAIR_STEPS);
  world_close(&p.w);
  if (!child) exit(0);
  fork_expect_end(child);
  for (int g = 0; g < PAIR; g++) areas_end(areas[g]);
  areas_end(signal);
}

int main(void) {
  process_begin();
  RUN(test_training_has_the_bits_of_the_model);
  RUN(test_training_in_little_memory_has_the_same_bits);
  RUN(test_gradients_of_micro_batches_are_added_in_their_order);
  RUN(test_sums_of_micro_batches_in_little_memory);
  RUN(test_parts_are_updated_in_the_backward_pass);
  RUN(test_failing_ranks_are_named_by_all_others);
  RUN(test_a_rank_that_is_missing_at_the_start_is_named_in_time);
  RUN(test_training_over_functions_of_the_caller);
  RUN(test_training_in_memory_that_the_callers_table_knows);
  RUN(test_replicas_train_over_shared_memory);
  RUN(test_replicas_train_over_functions_of_the_caller);
  RUN(test_replicas_that_part_are_noticed);
  RUN(test_an_id_that_is_used_again_closes_nobodys_file);
  RUN(test_a_rank_that_cannot_open_the_group_says_why);
  RUN(test_failing_functions_of_the_caller_are_named_by_all_ranks);
  RUN(test_the_librarys_exchange_does_not_overlap_the_callers);
  RUN(test_an_end_that_one_of_two_groups_refuses_goes_on_where_it_stood);
  return check_done();
}
