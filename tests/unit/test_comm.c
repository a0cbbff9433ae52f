/* Communicators over shared memory: what they compute, and what happens when a rank does other than the others.
 * SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "comm/comm.h"
#include "comm_world.h"
#include "process.h"
#include "system.h"

/* ---- reductions against a reference: tables of all values of the 16-bit types */
static double f16_value(uint16_t half) { /* by the definition of IEEE 754 */
  int exponent = half >> 10 & 31;
  double fraction = half & 1023, value = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  if (exponent == 31) value = fraction != 0 ? NAN : INFINITY;
  return half & 0x8000 ? -value : value;
}
static double bf16_value(uint16_t half) {
  int exponent = half >> 7 & 255;
  double fraction = half & 127, value = exponent ? ldexp(128 + fraction, exponent - 134) : ldexp(fraction, -133);
  if (exponent == 255) value = fraction != 0 ? NAN : INFINITY;
  return half & 0x8000 ? -value : value;
}
static double half_value(uint32_t dtype, uint16_t half) {
  return dtype == GEMINI_DTYPE_F16 ? f16_value(half) : bf16_value(half);
}
/* The nearest value, ties to the even one, found by bisection among the positive values in their order. Beyond the
 * largest, infinity stands for the next power of two. */
static uint16_t half_nearest(uint32_t dtype, double value) {
  const uint16_t infinity = dtype == GEMINI_DTYPE_F16 ? 0x7C00 : 0x7F80;
  const double beyond = dtype == GEMINI_DTYPE_F16 ? 65536.0 : 0x1p128;
  uint16_t sign = signbit(value) ? 0x8000 : 0, low = 0, high = infinity;
  value = fabs(value);
  if (value >= beyond) return sign | infinity;
  while (high - low > 1) {
    uint16_t middle = (uint16_t)((low + high) / 2);
    if (half_value(dtype, middle) <= value) low = middle;
    else high = middle;
  }
  double below = value - half_value(dtype, low);
  double above = (high == infinity ? beyond : half_value(dtype, high)) - value;
  bool up = above < below || (above == below && low & 1);
  return sign | (up ? high : low);
}

static void test_one_value_stays_what_it_is(void) {
  static uint16_t in[65536], out[65536];
  for (uint32_t i = 0; i < 65536; i++) in[i] = (uint16_t)i;
  for (uint32_t dtype = GEMINI_DTYPE_BF16; dtype <= GEMINI_DTYPE_F16; dtype++) {
    const void *from[] = { in };
    gmi_reduce(dtype, GMI_REDUCE_SUM, 1, from, out, 65536);
    for (uint32_t i = 0; i < 65536; i++) {
      if (isnan(half_value(dtype, (uint16_t)i))) CHECK(isnan(half_value(dtype, out[i])));
      else CHECK_EQ(out[i], i);
    }
  }
}

static void test_sums_of_halves_are_rounded_to_nearest(void) {
  enum { COUNT = 40000, RANKS = 3 };
  static uint16_t in[RANKS][COUNT], once[COUNT], each[COUNT];
  uint64_t state = 7;
  for (uint32_t dtype = GEMINI_DTYPE_BF16; dtype <= GEMINI_DTYPE_F16; dtype++) {
    for (uint32_t i = 0; i < COUNT; i++) {
      uint16_t first = (uint16_t)(check_random(&state) >> 48);
      for (uint32_t r = 0; r < RANKS; r++) { /* of similar magnitude, so that roundings and ties occur */
        int32_t near = first + (int32_t)(check_random(&state) % 4096) - 2048;
        in[r][i] = r ? (uint16_t)(near ^ (int32_t)(check_random(&state) & 0x8000)) : first;
      }
    }
    const void *from[] = { in[0], in[1], in[2] };
    gmi_reduce(dtype, GMI_REDUCE_SUM, RANKS, from, once, COUNT);
    gmi_reduce(dtype, GMI_REDUCE_SUM_ROUNDED, RANKS, from, each, COUNT);
    uint32_t differ = 0;
    for (uint32_t i = 0; i < COUNT; i++) {
      double a = half_value(dtype, in[0][i]), b = half_value(dtype, in[1][i]), c = half_value(dtype, in[2][i]);
      float exact_once = (float)a + (float)b;
      exact_once += (float)c;
      if (isnan(exact_once)) {
        CHECK(isnan(half_value(dtype, once[i])));
        continue;
      }
      CHECK_EQ(once[i], half_nearest(dtype, (double)exact_once));
      float step = (float)half_value(dtype, half_nearest(dtype, (double)((float)a + (float)b)));
      step += (float)c;
      if (!isnan(step)) CHECK_EQ(each[i], half_nearest(dtype, (double)step));
      differ += once[i] != each[i];
    }
    CHECK(differ > COUNT / 100); /* the two ways are two ways */
  }
}

static void test_sums_of_floats_are_in_the_order_of_ranks(void) {
  enum { COUNT = 1000, RANKS = 4 };
  static float in[RANKS][COUNT], out[COUNT];
  static double wide[RANKS][COUNT], wide_out[COUNT];
  uint64_t state = 11;
  uint32_t order_matters = 0;
  for (uint32_t i = 0; i < COUNT; i++)
    for (uint32_t r = 0; r < RANKS; r++)
      wide[r][i] = in[r][i] = (float)(int32_t)check_random(&state) * (r % 2 ? 1e-3f : 1);
  const void *from[] = { in[0], in[1], in[2], in[3] }, *from_wide[] = { wide[0], wide[1], wide[2], wide[3] };
  gmi_reduce(GEMINI_DTYPE_F32, GMI_REDUCE_SUM, RANKS, from, out, COUNT);
  gmi_reduce(GEMINI_DTYPE_F64, GMI_REDUCE_SUM, RANKS, from_wide, wide_out, COUNT);
  for (uint32_t i = 0; i < COUNT; i++) {
    float sum = in[0][i] + in[1][i], other = in[3][i] + in[2][i];
    sum += in[2][i], other += in[1][i];
    sum += in[3][i], other += in[0][i];
    CHECK(out[i] == sum);
    CHECK(wide_out[i] == wide[0][i] + wide[1][i] + wide[2][i] + wide[3][i]);
    order_matters += sum != other;
  }
  CHECK(order_matters > 0);
  in[1][0] = NAN, in[2][1] = INFINITY;
  gmi_reduce(GEMINI_DTYPE_F32, GMI_REDUCE_MAX, RANKS, from, in[0], COUNT); /* in place */
  CHECK(isnan(in[0][0]) && isinf(in[0][1]));
  for (uint32_t i = 2; i < COUNT; i++) CHECK(in[0][i] >= in[1][i] && in[0][i] >= in[2][i] && in[0][i] >= in[3][i]);
}

/* ---- collectives. Byte i of the slice of a rank in round n. */
static uint8_t pattern(uint32_t rank, uint64_t i, uint32_t n) {
  return (uint8_t)(i * 7 + rank * 101 + n * 13 + i / 251);
}

static void gathers(gmi_comm_t *c, void *user) { /* user: not NULL: collectives only */
  const uint64_t sizes[] = { 0, 1, 3, 4096, 262144, 262145, 1000003 };
  uint8_t *all = malloc(c->ranks * sizes[6]), *mine = malloc(sizes[6]);
  for (uint32_t n = 0; n < 3 * 7; n++) {
    uint64_t size = sizes[n % 7];
    for (uint64_t i = 0; i < size; i++) all[c->rank * size + i] = mine[i] = pattern(c->rank, i, n);
    if (n % 2 || user) {
      CHECK_EQ(c->ops->all_gather(c->self, all, size, NULL, "a"), GEMINI_OK);
    } else {
      memset(all, 0, c->ranks * size);
      CHECK_EQ(c->ops->exchange(c->self, mine, size, all, "e"), GEMINI_OK);
    }
    for (uint32_t r = 0; r < c->ranks; r++)
      for (uint64_t i = 0; i < size; i++) CHECK_EQ(all[r * size + i], pattern(r, i, n));
  }
  free(all);
  free(mine);
}
static void test_gathers_and_exchanges(void) {
  comm_world_threads(1, gathers, NULL); /* the first thread of a process may bring one of a sanitizer's */
  process_t before = process_now();
  for (uint32_t ranks = 2; ranks <= 4; ranks++) comm_world_threads(ranks, gathers, NULL);
  process_check(before);
}

static void reductions(gmi_comm_t *c, void *user) {
  (void)user;
  enum { MOST = 70001 };
  const uint64_t counts[] = { 0, 1, 5, 16384, MOST };
  float *values = malloc(c->ranks * MOST * sizeof *values), *in = malloc(MOST * sizeof *in);
  const void *from[COMM_WORLD_RANKS];
  float *ranks_in[COMM_WORLD_RANKS], *expected = malloc(MOST * sizeof *expected);
  for (uint32_t r = 0; r < c->ranks; r++) from[r] = ranks_in[r] = malloc(c->ranks * MOST * sizeof(float));
  for (uint32_t n = 0; n < 10; n++) {
    uint64_t count = counts[n % 5], state = n + 1;
    gmi_reduce_t how = n % 3 == 2 ? GMI_REDUCE_MAX : GMI_REDUCE_SUM;
    for (uint32_t r = 0; r < c->ranks; r++)
      for (uint64_t i = 0; i < c->ranks * count; i++)
        ranks_in[r][i] = (float)(int32_t)(check_random(&state) >> 32) * (i % 2 ? 1e-4f : 1);
    memcpy(values, ranks_in[c->rank], c->ranks * count * sizeof *values);
    CHECK_EQ(c->ops->reduce_scatter(c->self, values, count, GEMINI_DTYPE_F32, how, NULL, "r"), GEMINI_OK);
    const void *slices[COMM_WORLD_RANKS];
    for (uint32_t r = 0; r < c->ranks; r++) slices[r] = ranks_in[r] + c->rank * count;
    gmi_reduce(GEMINI_DTYPE_F32, how, c->ranks, slices, expected, count);
    CHECK(!memcmp(values + c->rank * count, expected, count * sizeof *values));
    memcpy(in, ranks_in[c->rank], count * sizeof *in);
    CHECK_EQ(c->ops->all_reduce(c->self, in, count, GEMINI_DTYPE_F32, how, NULL, "r"), GEMINI_OK);
    gmi_reduce(GEMINI_DTYPE_F32, how, c->ranks, from, expected, count);
    CHECK(!memcmp(in, expected, count * sizeof *in));
  }
  for (uint32_t r = 0; r < c->ranks; r++) free(ranks_in[r]);
  free(values);
  free(in);
  free(expected);
}
static void test_reductions(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) comm_world_threads(ranks, reductions, NULL);
}

/* ---- replicas. Each rank is a thread that knows its number among all. */
typedef struct {
  gmi_comm_id_t id;
  gmi_comm_config_t config;
  gmi_comm_t comm;
  void *user;
} member_t;
static void run_replicas(uint32_t ranks, uint32_t shard_ranks, uint64_t deadline_ns, void *(*fn)(void *), void *user) {
  pthread_t threads[COMM_WORLD_RANKS];
  member_t members[COMM_WORLD_RANKS];
  gmi_comm_id_t id = comm_world_id(ranks);
  for (uint32_t r = 0; r < ranks; r++) {
    members[r] = (member_t){ .id = id, .config = { r, ranks, deadline_ns, shard_ranks }, .user = user };
    CHECK(!pthread_create(&threads[r], NULL, fn, &members[r]));
  }
  for (uint32_t r = 0; r < ranks; r++) CHECK(!pthread_join(threads[r], NULL));
}
static gmi_comm_t *join_replica(member_t *m) {
  CHECK_EQ(gmi_comm_shared_join(&m->id, &m->config, &m->comm), GEMINI_OK);
  CHECK_EQ(m->comm.rank, m->config.rank % m->config.shard_ranks);
  CHECK_EQ(m->comm.ranks, m->config.shard_ranks);
  return &m->comm;
}

enum { REPLICA_VALUES = 40001 };
static void values_of(uint32_t rank, uint32_t n, uint16_t *out, uint64_t count) { /* bf16, near 1 or -1 */
  uint64_t state = 1000 * n + rank + 1;
  for (uint64_t i = 0; i < count; i++) {
    const uint64_t random = check_random(&state) >> 40;
    out[i] = (uint16_t)((random & 1 ? 0x8000 : 0) | (0x3F00 + (random >> 1 & 0xFF)));
  }
}
/* In each replica first, rounded, and then over the replicas. */
static void expect_replicas(const gmi_comm_config_t *c, uint16_t *const *in, gmi_reduce_t how, uint64_t from,
                            uint64_t count, uint16_t *out) {
  uint16_t *inside[COMM_WORLD_RANKS];
  const void *parts[COMM_WORLD_RANKS], *sums[COMM_WORLD_RANKS] = { 0 };
  const uint32_t replicas = c->ranks / c->shard_ranks;
  for (uint32_t p = 0; p < replicas; p++) {
    sums[p] = inside[p] = malloc(count * 2 + 1);
    for (uint32_t r = 0; r < c->shard_ranks; r++) parts[r] = in[p * c->shard_ranks + r] + from;
    gmi_reduce(GEMINI_DTYPE_BF16, how, c->shard_ranks, parts, inside[p], count);
  }
  gmi_reduce(GEMINI_DTYPE_BF16, how, replicas, sums, out, count);
  for (uint32_t p = 0; p < replicas; p++) free(inside[p]);
}
static void *replica_works(void *user) {
  member_t *m = user;
  const gmi_comm_t *c = join_replica(m);
  const uint32_t ranks = m->config.ranks, shard = m->config.shard_ranks, first = m->config.rank - c->rank;
  static const uint64_t counts[] = { 0, 3, 8192, REPLICA_VALUES };
  uint16_t *in[COMM_WORLD_RANKS], *mine = malloc(shard * REPLICA_VALUES * 2), *expected = malloc(REPLICA_VALUES * 2);
  for (uint32_t r = 0; r < ranks; r++) in[r] = malloc(shard * REPLICA_VALUES * 2);
  for (uint32_t n = 0; n < 8; n++) {
    const uint64_t count = counts[n % 4];
    const gmi_reduce_t how = n % 3 == 2 ? GMI_REDUCE_MAX : GMI_REDUCE_SUM;
    for (uint32_t r = 0; r < ranks; r++) values_of(r, n, in[r], shard * count);
    memcpy(mine, in[m->config.rank], shard * count * 2);
    CHECK_EQ(c->ops->reduce_scatter(c->self, mine, count, GEMINI_DTYPE_BF16, how, NULL, "r"), GEMINI_OK);
    expect_replicas(&m->config, in, how, c->rank * count, count, expected);
    CHECK(!memcmp(mine + c->rank * count, expected, count * 2));
    memcpy(mine, in[m->config.rank], count * 2);
    CHECK_EQ(c->ops->all_reduce(c->self, mine, count, GEMINI_DTYPE_BF16, how, NULL, "r"), GEMINI_OK);
    expect_replicas(&m->config, in, how, 0, count, expected);
    CHECK(!memcmp(mine, expected, count * 2));
    memcpy(mine + c->rank * count, in[m->config.rank], count * 2);
    CHECK_EQ(c->ops->all_gather(c->self, mine, count * 2, NULL, "g"), GEMINI_OK);
    for (uint32_t r = 0; r < shard; r++) CHECK(!memcmp(mine + r * count, in[first + r], count * 2));
    memcpy(mine, in[m->config.rank], count * 2);
    CHECK_EQ(c->ops->broadcast(c->self, mine, count * 2, shard - 1, NULL, "b"), GEMINI_OK);
    CHECK(!memcmp(mine, in[first + shard - 1], count * 2));
    uint32_t number = n * 100 + m->config.rank, all[COMM_WORLD_RANKS];
    CHECK_EQ(c->ops->exchange(c->self, &number, sizeof number, all, "e"), GEMINI_OK);
    for (uint32_t r = 0; r < ranks; r++) CHECK_EQ(all[r], n * 100 + r);
  }
  for (uint32_t r = 0; r < ranks; r++) free(in[r]);
  free(mine);
  free(expected);
  c->ops->close(c->self);
  return NULL;
}
static void test_replicas_gather_inside_and_reduce_over_all(void) {
  run_replicas(4, 2, COMM_WORLD_DEADLINE_NS, replica_works, NULL);
  run_replicas(6, 3, COMM_WORLD_DEADLINE_NS, replica_works, NULL);
  run_replicas(6, 2, COMM_WORLD_DEADLINE_NS, replica_works, NULL);
  run_replicas(3, 1, COMM_WORLD_DEADLINE_NS, replica_works, NULL);
  run_replicas(3, 3, COMM_WORLD_DEADLINE_NS, replica_works, NULL);
}

/* Rank 1 does not come. Rank 0 waits for it inside, rank 3 across, and rank 2 for rank 0, across. */
static void *one_is_missing(void *user) {
  member_t *m = user;
  const gmi_comm_t *c = join_replica(m);
  float values[2] = { 0 };
  if (m->config.rank == 1) {
    while (!c->ops->poll(c->self)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  } else { /* rank 2 comes long before the others, so it fails first */
    if (m->config.rank == 0) nanosleep(&(struct timespec){ 0, 300000000 }, NULL);
    CHECK_EQ(c->ops->reduce_scatter(c->self, values, 1, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, NULL, "c"), GEMINI_ERR_PEER);
  }
  CHECK_SAYS(gmi_fail_message(), " waited 1 s for rank 1");
  if (strstr(gmi_fail_message(), "rank 2 waited"))
    CHECK_SAYS(gmi_fail_message(), "rank 1, which rank 0 waits for, in ");
  c->ops->close(c->self);
  return NULL;
}
static void test_who_is_waited_for_in_the_end_is_named(void) {
  run_replicas(4, 2, UINT64_C(1000000000), one_is_missing, NULL);
}

static void *one_gives_up(void *user) {
  member_t *m = user;
  const gmi_comm_t *c = join_replica(m);
  float values[2] = { 0 };
  if (m->config.rank == 3) c->ops->abort(c->self, "its disk is full");
  CHECK_EQ(c->ops->all_reduce(c->self, values, 1, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, NULL, "c"), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 3 gave up: its disk is full");
  c->ops->close(c->self);
  return NULL;
}
static void *one_sums_another(void *user) {
  member_t *m = user;
  const gmi_comm_t *c = join_replica(m);
  float values[4] = { 0 };
  CHECK_EQ(c->ops->reduce_scatter(c->self, values, 1, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, NULL,
                                  m->config.rank < 2 ? "chunk 4" : "chunk 5"),
           GEMINI_ERR_PEER); /* each replica agrees with itself */
  CHECK_SAYS(gmi_fail_message(), "ranks differ: rank ");
  CHECK_SAYS(gmi_fail_message(), "all-reduce of 4 bytes for chunk 5 (call 1)");
  CHECK_SAYS(gmi_fail_message(), "all-reduce of 4 bytes for chunk 4 (call 1)");
  c->ops->close(c->self);
  return NULL;
}
static void *joins_another_way(void *user) {
  member_t *m = user;
  if (m->config.rank == 2) m->config.shard_ranks = 4;
  CHECK_EQ(gmi_comm_shared_join(&m->id, &m->config, &m->comm), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "ranks differ: rank ");
  CHECK_SAYS(gmi_fail_message(), "with shard_ranks ");
  return NULL;
}
static void test_replicas_that_differ_fail(void) {
  run_replicas(4, 2, COMM_WORLD_DEADLINE_NS, one_gives_up, NULL);
  run_replicas(4, 2, COMM_WORLD_DEADLINE_NS, one_sums_another, NULL);
  run_replicas(4, 2, COMM_WORLD_DEADLINE_NS, joins_another_way, NULL);
}

/* A host thread exchanges while another one gathers: their calls are numbered apart. */
static void *exchange_often(void *user) {
  gmi_comm_t *c = user;
  uint32_t all[COMM_WORLD_RANKS];
  for (uint32_t n = 0; n < 300; n++) {
    uint32_t mine = n * 10 + c->rank;
    CHECK_EQ(c->ops->exchange(c->self, &mine, sizeof mine, all, NULL), GEMINI_OK);
    for (uint32_t r = 0; r < c->ranks; r++) CHECK_EQ(all[r], n * 10 + r);
  }
  return NULL;
}
static void both_ways(gmi_comm_t *c, void *user) {
  (void)user;
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, exchange_often, c));
  gathers(c, c);
  CHECK(!pthread_join(thread, NULL));
}
static void test_exchanges_beside_collectives(void) { comm_world_threads(3, both_ways, NULL); }

/* ---- ranks that differ */
typedef struct {
  int what; /* in what rank 1 differs */
} differ_t;
static void differ(gmi_comm_t *c, void *user) {
  float data[64] = { 0 };
  int what = c->rank == 1 ? ((differ_t *)user)->what : -1;
  gemini_status_t status = c->ops->all_gather(c->self, data, 16, NULL, "op 1, chunk 4");
  CHECK_EQ(status, GEMINI_OK);
  if (what == 0) status = c->ops->all_gather(c->self, data, 16, NULL, "op 2, chunk 6");
  else if (what == 1) status = c->ops->all_gather(c->self, data, 20, NULL, "op 2, chunk 5");
  else if (what == 2) status = c->ops->reduce_scatter(c->self, data, 4, GEMINI_DTYPE_F32, 0, NULL, "op 2, chunk 5");
  else status = c->ops->all_gather(c->self, data, 16, NULL, "op 2, chunk 5");
  CHECK_EQ(status, GEMINI_ERR_PEER);
  const char *text = gmi_fail_message();
  CHECK_SAYS(text, "ranks differ: rank ");
  CHECK_SAYS(text, "all-gather of 16 bytes for op 2, chunk 5 (call 2)");
  CHECK_SAYS(text, ((differ_t *)user)->what == 0 ? "rank 1 calls all-gather of 16 bytes for op 2, chunk 6 (call 2)"
                   : ((differ_t *)user)->what == 1
                       ? "rank 1 calls all-gather of 20 bytes for op 2, chunk 5 (call 2)"
                       : "rank 1 calls reduce-scatter of 16 bytes for op 2, chunk 5 (call 2)");
  CHECK_EQ(c->ops->poll(c->self), GEMINI_ERR_PEER);
  uint32_t mine = 0, all[COMM_WORLD_RANKS];
  CHECK_EQ(c->ops->exchange(c->self, &mine, 4, all, NULL), GEMINI_ERR_PEER);
}
static void test_calls_that_differ_name_both_sides(void) {
  for (differ_t d = { 0 }; d.what < 3; d.what++) {
    comm_world_threads(2, differ, &d);
    comm_world_threads(4, differ, &d);
  }
}

static void stays_away(gmi_comm_t *c, void *user) {
  uint8_t all[COMM_WORLD_RANKS * 8] = { 0 };
  CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "first"), GEMINI_OK);
  if (c->rank != 2) CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "second"), GEMINI_ERR_PEER);
  else
    while (!c->ops->poll(c->self)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  CHECK_EQ(c->ops->poll(c->self), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(),
             "s for rank 2 in all-gather of 8 bytes for second (call 2); the latest call of rank 2 is "
             "all-gather of 8 bytes for first (call 1)");
  (void)user;
}
static void expect_children(const pid_t *pids, uint32_t ranks) {
  for (uint32_t r = 1; r < ranks; r++) fork_expect_end(pids[r]);
}
static void test_a_rank_that_stays_away_is_named_at_the_deadline(void) {
  pid_t pids[3];
  comm_world_processes(3, 3 * UINT64_C(1000000000), stays_away, NULL, pids);
  expect_children(pids, 3);
}

static void leaves(gmi_comm_t *c, void *user) {
  uint8_t all[COMM_WORLD_RANKS * 8] = { 0 };
  CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "first"), GEMINI_OK);
  if (c->rank == 1) return;
  CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "second"), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 1 has left the group");
  (void)user;
}
static void gives_up(gmi_comm_t *c, void *user) {
  uint8_t all[COMM_WORLD_RANKS * 8] = { 0 };
  CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "first"), GEMINI_OK);
  if (c->rank == 1) c->ops->abort(c->self, "its disk is full");
  CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "second"), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 1 gave up: its disk is full");
  (void)user;
}
static void test_ranks_that_leave_or_give_up_are_named(void) {
  comm_world_threads(3, leaves, NULL);
  comm_world_threads(3, gives_up, NULL);
}

/* ---- ranks that end right after their last piece, while another one looks whether they run */
static void (*before_open)(const char *path); /* called before any file is opened */
int open(const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  const int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, int) : 0;
  va_end(args);
  if (before_open) before_open(path);
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

static struct {
  _Atomic uint32_t asked; /* in memory of both processes */
  pid_t rank_1;
} *parting;
static void let_rank_1_end(const char *path) {
  char stat[32];
  snprintf(stat, sizeof stat, "/proc/%d/stat", (int)parting->rank_1);
  if (strcmp(path, stat)) return;
  siginfo_t end;
  atomic_store(&parting->asked, 1);
  CHECK(!waitid(P_PID, (id_t)parting->rank_1, &end, WEXITED | WNOWAIT)); /* its end is read by the caller */
}
static void ends_after_its_last_piece(gmi_comm_t *c, void *user) {
  uint8_t all[2 * 8] = { 0 };
  if (c->rank) {
    parting->rank_1 = getpid();
    CHECK_EQ(c->ops->exchange(c->self, "", 1, all, "who"), GEMINI_OK);
    while (!atomic_load(&parting->asked)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  } else {
    CHECK_EQ(c->ops->exchange(c->self, "", 1, all, "who"), GEMINI_OK);
    before_open = let_rank_1_end;
  }
  memset(all + 8 * (int)c->rank, (int)c->rank + 1, 8);
  CHECK_EQ(c->ops->all_gather(c->self, all, 8, NULL, "last"), GEMINI_OK);
  before_open = NULL;
  for (int i = 0; i < 16; i++) CHECK_EQ(all[i], 1 + i / 8);
  if (c->rank && user) _exit(0); /* as if killed */
  CHECK(c->rank || atomic_load(&parting->asked));
}
static void test_a_rank_that_ends_after_its_part_fails_nobody(void) {
  parting = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(parting != MAP_FAILED);
  for (int killed = 0; killed < 2; killed++) {
    pid_t pids[2];
    memset(parting, 0, sizeof *parting);
    comm_world_processes(2, COMM_WORLD_DEADLINE_NS, ends_after_its_last_piece, killed ? parting : NULL, pids);
    expect_children(pids, 2);
  }
  munmap(parting, 4096);
}

/* ---- ranks that are killed. The victim works until it is killed; the others must fail in time, and name it. */
#define LATEST_NS (SANITIZED ? UINT64_C(30000000000) : UINT64_C(10000000000))
typedef struct {
  int what;
  uint32_t victim;
  struct {
    _Atomic uint64_t killed_ns; /* when the victim was killed */
    _Atomic uint32_t calls;     /* that the victim has done */
    pid_t pids[4];              /* of all ranks */
  } *shared;                    /* by all processes */
} killed_t;
static void work_until_killed(gmi_comm_t *c, void *user) {
  killed_t *k = user;
  enum { BYTES = 600000 };
  uint8_t *data = calloc(c->ranks, BYTES);
  k->shared->pids[c->rank] = getpid();
  gemini_status_t status = GEMINI_OK;
  for (uint32_t n = 0; !status; n++) {
    if (k->what == 0) status = c->ops->all_gather(c->self, data, BYTES, NULL, "a");
    else if (k->what == 1) status = c->ops->reduce_scatter(c->self, data, BYTES / 4, GEMINI_DTYPE_F32, 0, NULL, "r");
    else if (k->what == 2) status = c->ops->all_reduce(c->self, data, BYTES / 2, GEMINI_DTYPE_BF16, 0, NULL, "r");
    else status = c->ops->exchange(c->self, data, 8, data + 8, "e");
    if (c->rank == k->victim) atomic_fetch_add(&k->shared->calls, 1);
  }
  CHECK_EQ(status, GEMINI_ERR_PEER);
  CHECK(now_ns() < atomic_load(&k->shared->killed_ns) + LATEST_NS);
  char expected[64];
  snprintf(expected, sizeof expected, "rank %u (process %d) has ended", k->victim, k->shared->pids[k->victim]);
  CHECK_SAYS(gmi_fail_message(), expected);
  free(data);
}
static void test_a_killed_rank_is_named_by_all_others(void) {
  process_t before = process_now();
  void *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  for (int what = 0; what < 4; what++) {
    killed_t k = { what, 2, shared };
    memset(shared, 0, 4096);
    pid_t pids[4], killer;
    if (!(killer = fork_child())) { /* kills the victim after some calls, in the middle of one */
      while (atomic_load(&k.shared->calls) < 5) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
      nanosleep(&(struct timespec){ 0, 100000 * (what + 1) }, NULL);
      atomic_store(&k.shared->killed_ns, now_ns());
      kill(k.shared->pids[k.victim], SIGKILL);
      _exit(0);
    }
    comm_world_processes(4, COMM_WORLD_DEADLINE_NS, work_until_killed, &k, pids);
    fork_expect_end(killer);
    for (uint32_t r = 1; r < 4; r++) {
      int end;
      CHECK_EQ(waitpid(pids[r], &end, 0), pids[r]);
      if (r == k.victim) CHECK(WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL);
      else CHECK_EQ(end, 0);
    }
  }
  munmap(shared, 4096);
  process_check(before);
}

/* ---- joining */
static void test_ids_and_ranks_that_do_not_fit_are_refused(void) {
  process_t before = process_now();
  gmi_comm_id_t id, other = { { 0 } };
  gmi_comm_t comm = { 0 };
  CHECK_EQ(gmi_comm_shared_id(0, &id), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_comm_shared_id(1025, &id), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "ranks is 1025, must be 1 to 1024");
  CHECK_EQ(gmi_comm_shared_join(&other, &(gmi_comm_config_t){ 0, 1, 0, 0 }, &comm), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "not one of a group");
  id = comm_world_id(2);
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 0, 3, 0, 0 }, &comm), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "ranks is 3, the id is of a group of 2");
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 2, 2, 0, 0 }, &comm), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "rank is 2, must be below ranks, 2");
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 1, 2, 0, 4 }, &comm), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "shard_ranks is 4, must divide ranks, 2");
  uint64_t begin = (uint64_t)time(NULL);
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 0, 2, 50000000, 0 }, &comm), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 0 waited 0.05 s for ranks to join: of 2 ranks these are missing: 1");
  CHECK((uint64_t)time(NULL) - begin < 60);
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 1, 2, 0, 0 }, &comm), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "or its rank 0 has joined already");
  CHECK(!comm.ops);
  process_check(before);
}

typedef struct {
  gmi_comm_id_t id;
  _Atomic int refused, joined;
} twice_t;
static void *join_as_1(void *user) {
  twice_t *t = user;
  gmi_comm_t comm = { 0 };
  gemini_status_t status = gmi_comm_shared_join(&t->id, &(gmi_comm_config_t){ 1, 2, COMM_WORLD_DEADLINE_NS, 0 }, &comm);
  if (status == GEMINI_ERR_EXISTS) {
    CHECK_SAYS(gmi_fail_message(), "rank 1 has joined already, in process ");
    t->refused++;
    return NULL;
  }
  CHECK_EQ(status, GEMINI_OK);
  comm.ops->close(comm.self);
  t->joined++;
  return NULL;
}
static void test_a_rank_joins_once(void) {
  twice_t t = { .id = comm_world_id(2) };
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) CHECK(!pthread_create(&threads[i], NULL, join_as_1, &t));
  while (!t.refused) nanosleep(&(struct timespec){ 0, 1000000 }, NULL); /* the other one waits for rank 0 */
  gmi_comm_t comm = { 0 };
  CHECK_EQ(gmi_comm_shared_join(&t.id, &(gmi_comm_config_t){ 0, 2, COMM_WORLD_DEADLINE_NS, 0 }, &comm), GEMINI_OK);
  for (int i = 0; i < 2; i++) CHECK(!pthread_join(threads[i], NULL));
  CHECK_EQ(t.refused, 1);
  CHECK_EQ(t.joined, 1);
  comm.ops->close(comm.self);
}

static void test_a_rank_killed_before_all_have_joined_is_named(void) {
  process_t before = process_now();
  gmi_comm_id_t id = comm_world_id(3);
  gmi_comm_t comm = { 0 };
  pid_t child = fork_child();
  if (!child) {
    (void)gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 1, 3, COMM_WORLD_DEADLINE_NS, 0 }, &comm);
    _exit(1);
  }
  nanosleep(&(struct timespec){ 0, 20000000 }, NULL);
  kill(child, SIGKILL);
  int end;
  CHECK_EQ(waitpid(child, &end, 0), child);
  const uint64_t begin_ns = now_ns();
  /* It was killed before or after it joined: it is missing, or it has ended. */
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 0, 3, 500000000, 0 }, &comm), GEMINI_ERR_PEER);
  CHECK(now_ns() < begin_ns + LATEST_NS);
  CHECK(strstr(gmi_fail_message(), "rank 1 (process ") || strstr(gmi_fail_message(), "are missing: 1, 2"));
  process_check(before);
}

static void test_the_id_of_a_process_that_has_ended(void) {
  int ends[2];
  gmi_comm_id_t id;
  CHECK(!pipe(ends));
  pid_t child = fork_child();
  if (!child) {
    id = comm_world_id(2);
    CHECK_EQ(write(ends[1], &id, sizeof id), sizeof id);
    _exit(0);
  }
  fork_expect_end(child);
  CHECK_EQ(read(ends[0], &id, sizeof id), sizeof id);
  close(ends[0]);
  close(ends[1]);
  gmi_comm_t comm = { 0 };
  CHECK_EQ(gmi_comm_shared_join(&id, &(gmi_comm_config_t){ 1, 2, 0, 0 }, &comm), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "which made the id, has ended");
}

/* Most machines that build the library have no NCCL. */
static void test_without_nccl_its_communicators_are_refused(void) {
  void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  gmi_comm_id_t id;
  if (library) return;
  CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_ERR_UNSUPPORTED);
  CHECK_SAYS(gmi_fail_message(), "no NCCL on this machine: libnccl.so.2");
}

int main(void) {
  RUN(test_one_value_stays_what_it_is);
  RUN(test_sums_of_halves_are_rounded_to_nearest);
  RUN(test_sums_of_floats_are_in_the_order_of_ranks);
  RUN(test_gathers_and_exchanges);
  RUN(test_reductions);
  RUN(test_replicas_gather_inside_and_reduce_over_all);
  RUN(test_who_is_waited_for_in_the_end_is_named);
  RUN(test_replicas_that_differ_fail);
  RUN(test_exchanges_beside_collectives);
  RUN(test_calls_that_differ_name_both_sides);
  RUN(test_a_rank_that_stays_away_is_named_at_the_deadline);
  RUN(test_ranks_that_leave_or_give_up_are_named);
  RUN(test_a_rank_that_ends_after_its_part_fails_nobody);
  RUN(test_a_killed_rank_is_named_by_all_others);
  RUN(test_ids_and_ranks_that_do_not_fit_are_refused);
  RUN(test_a_rank_joins_once);
  RUN(test_a_rank_killed_before_all_have_joined_is_named);
  RUN(test_the_id_of_a_process_that_has_ended);
  RUN(test_without_nccl_its_communicators_are_refused);
  return check_done();
}
