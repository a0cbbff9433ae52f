/* Communicators over NCCL, against stand-ins for NCCL and for the CUDA driver. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/status.h"
#include "check.h"
#include "comm/comm.h"
#include "comm/nccl_library.h"
#include "comm_values.h"
#include "fake_cuda.h"
#include "fake_nccl.h"
#include "process.h"

enum { RANKS = 4, DEVICES = 2 };
#define MIB (UINT64_C(1) << 20)
#define LONG_NS UINT64_C(60000000000) /* no test waits for it */
#define SHORT_NS UINT64_C(1000000000) /* waited out; what must succeed within it may be slow */

/* ---- a world of ranks, each a thread */
typedef struct rank rank_t;
typedef void (*rank_fn)(rank_t *r, void *user);
struct rank {
  gmi_comm_id_t id;
  gmi_comm_nccl_config_t config;
  rank_fn fn;
  void *user;
  const gmi_cuda_driver_t *driver;
  cu_context_t context; /* retained; not current */
  cu_stream_t stream;
  unsigned char *memory; /* that the device can reach */
  uint64_t memory_bytes;
  gmi_comm_t comm;
};
static pthread_barrier_t barrier; /* of all ranks of the world */

/* What the rank needs of its device. Between two calls the thread has no context, as a caller may. */
static void rank_open(rank_t *r, uint64_t memory_bytes) {
  void *memory;
  cu_device_t device;
  r->driver = gmi_cuda_driver();
  CHECK(r->driver);
  r->memory_bytes = memory_bytes;
  CHECK_EQ(r->driver->init(0), 0);
  CHECK_EQ(r->driver->device_get(&device, r->config.device), 0);
  CHECK_EQ(r->driver->primary_retain(&r->context, device), 0);
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(r->driver->stream_create(&r->stream, 1), 0);
  CHECK_EQ(r->driver->host_alloc(&memory, memory_bytes, 0), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
  r->memory = memory;
}
static void rank_close(rank_t *r) {
  cu_context_t current;
  CHECK_EQ(r->driver->current_get(&current), 0);
  CHECK(!current); /* each call has put back what it found */
  CHECK_EQ(fake_cuda_capture_mode(), 0);
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(r->driver->stream_destroy(r->stream), 0);
  CHECK_EQ(r->driver->host_free(r->memory), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
  CHECK_EQ(r->driver->primary_release(r->config.device), 0);
}
/* Waits until the stream has done everything. */
static void settle(rank_t *r, cu_stream_t stream) {
  cu_event_t event;
  cu_result_t result;
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(r->driver->event_create(&event, 2), 0);
  CHECK_EQ(r->driver->event_record(event, stream), 0);
  while ((result = r->driver->event_query(event)) == CU_NOT_READY) nanosleep(&(struct timespec){ 0, 20000 }, NULL);
  CHECK_EQ(result, 0);
  CHECK_EQ(r->driver->event_destroy(event), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
}

static void *rank_main(void *user) {
  rank_t *r = user;
  rank_open(r, 12 * MIB);
  CHECK_EQ(gmi_comm_nccl_join(&r->id, &r->config, &r->comm), GEMINI_OK);
  CHECK_EQ(r->comm.rank, r->config.rank);
  CHECK_EQ(r->comm.ranks, r->config.ranks);
  CHECK(r->comm.ops->queues);
  r->fn(r, r->user);
  r->comm.ops->close(r->comm.self);
  pthread_barrier_wait(&barrier); /* the streams of all have ended before the first one's goes */
  rank_close(r);
  return NULL;
}
/* Runs fn as each rank; options of the fakes are set between fakes_begin() and this. */
static void run(uint32_t ranks, gmi_comm_nccl_config_t config, rank_fn fn, void *user) {
  pthread_t threads[RANKS];
  rank_t all[RANKS];
  gmi_comm_id_t id;
  CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_OK);
  CHECK(!pthread_barrier_init(&barrier, NULL, ranks));
  for (uint32_t r = 0; r < ranks; r++) {
    config.rank = r;
    config.ranks = ranks;
    config.device = (int32_t)(r % DEVICES);
    if (!config.deadline_ns) config.deadline_ns = LONG_NS;
    all[r] = (rank_t){ .id = id, .config = config, .fn = fn, .user = user };
    CHECK(!pthread_create(&threads[r], NULL, rank_main, &all[r]));
  }
  for (uint32_t r = 0; r < ranks; r++) CHECK(!pthread_join(threads[r], NULL));
  pthread_barrier_destroy(&barrier);
}
static void world(uint32_t ranks, gmi_comm_nccl_config_t config, rank_fn fn, void *user) {
  fakes_begin();
  run(ranks, config, fn, user);
  fakes_end();
}
static const gmi_comm_nccl_config_t by_nccl = { 0 }, in_order = { .rank_order = true };

static gemini_status_t gather(rank_t *r, uint64_t bytes, const char *label) {
  return r->comm.ops->all_gather(r->comm.self, r->memory, bytes, r->stream, label);
}
/* Polls until the communicator fails. */
static void poll_until_failed(rank_t *r) {
  while (!r->comm.ops->poll(r->comm.self)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_ERR_PEER);
}
/* Every call fails, with one message. */
static void check_failed(rank_t *r, const char *words) {
  const gmi_comm_ops_t *ops = r->comm.ops;
  void *self = r->comm.self;
  uint32_t all[RANKS];
  CHECK_EQ(ops->poll(self), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), words);
  char first[512];
  snprintf(first, sizeof first, "%s", gmi_fail_message());
  for (int i = 0; i < 5; i++) {
    gmi_fail(GEMINI_ERR_IO, 0, "another");
    if (i == 0) CHECK_EQ(gather(r, 8, "later"), GEMINI_ERR_PEER);
    if (i == 1) CHECK_EQ(ops->reduce_scatter(self, r->memory, 8, 0, 0, r->stream, "later"), GEMINI_ERR_PEER);
    if (i == 2) CHECK_EQ(ops->all_reduce(self, r->memory, 8, 0, GMI_REDUCE_MAX, r->stream, "later"), GEMINI_ERR_PEER);
    if (i == 3) CHECK_EQ(ops->exchange(self, &all[3], 4, all, "later"), GEMINI_ERR_PEER);
    if (i == 4) CHECK_EQ(ops->broadcast(self, r->memory, 8, 0, r->stream, "later"), GEMINI_ERR_PEER);
    CHECK_EQ(strcmp(gmi_fail_message(), first), 0);
  }
}

/* ---- what is computed */
OWN_MEMORY static uint8_t pattern(uint32_t rank, uint64_t i, uint32_t n) {
  return (uint8_t)(i * 7 + rank * 101 + n * 13 + i / 251);
}
OWN_MEMORY static void pattern_fill(unsigned char *to, uint32_t rank, uint64_t size, uint32_t n) {
  for (uint64_t i = 0; i < size; i++) to[i] = pattern(rank, i, n);
}
OWN_MEMORY static uint64_t pattern_wrong(const unsigned char *bytes, uint32_t rank, uint64_t size, uint32_t n) {
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < size; i++) wrong += bytes[i] != pattern(rank, i, n);
  return wrong;
}
/* What a rank has on a device is read by memcpy(), so that ThreadSanitizer finds reads that come too early. */
static void pattern_check(const unsigned char *bytes, uint32_t rank, uint64_t size, uint32_t n) {
  unsigned char *copy = malloc(size + 1);
  memcpy(copy, bytes, size);
  CHECK_EQ(pattern_wrong(copy, rank, size, n), 0);
  free(copy);
}
static void gathers(rank_t *r, void *user) {
  const uint64_t sizes[] = { 0, 1, 3, 4096, 1000003 };
  (void)user;
  for (uint32_t n = 0; n < 10; n++) {
    uint64_t size = sizes[n % 5];
    pattern_fill(r->memory + r->comm.rank * size, r->comm.rank, size, n);
    CHECK_EQ(gather(r, size, "a"), GEMINI_OK);
    settle(r, r->stream);
    for (uint32_t p = 0; p < r->comm.ranks; p++) pattern_check(r->memory + p * size, p, size, n);
  }
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
}
static void test_gathers_are_in_place_and_queued(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) world(ranks, by_nccl, gathers, NULL);
}

/* Buffers of several gathers, in any order; others beside them stay as they are. One call is one group of NCCL's. */
static void gathers_together(rank_t *r, void *user) {
  enum { MOST = 5 };
  const uint64_t size = 1000, apart = size * RANKS + 16;
  (void)user;
  for (uint32_t count = 0; count <= MOST; count++) {
    void *buffers[MOST];
    for (uint32_t b = 0; b < MOST; b++) {
      unsigned char *buffer = r->memory + (MOST - 1 - b) * apart;
      memset(buffer, 0xA5, apart);
      for (uint64_t i = 0; i < size; i++) buffer[r->comm.rank * size + i] = pattern(r->comm.rank, i, b);
      buffers[b] = buffer;
    }
    pthread_barrier_wait(&barrier);
    const uint32_t groups = fake_nccl_calls("ncclGroupStart");
    pthread_barrier_wait(&barrier);
    CHECK_EQ(r->comm.ops->all_gathers(r->comm.self, buffers, count, size, r->stream, "a"), GEMINI_OK);
    settle(r, r->stream);
    pthread_barrier_wait(&barrier);
    CHECK_EQ(fake_nccl_calls("ncclGroupStart") - groups, count > 1 && r->comm.ranks > 1 ? r->comm.ranks : 0);
    for (uint32_t b = 0; b < MOST; b++) {
      const unsigned char *buffer = buffers[b];
      for (uint32_t p = 0; p < r->comm.ranks; p++)
        for (uint64_t i = 0; i < size; i++)
          CHECK_EQ(buffer[p * size + i], b < count || p == r->comm.rank ? pattern(p, i, b) : 0xA5);
      CHECK_EQ(buffer[r->comm.ranks * size], 0xA5);
    }
    pthread_barrier_wait(&barrier);
  }
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
}
static void test_gathers_are_queued_together(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) world(ranks, by_nccl, gathers_together, NULL);
}

static void takes_blocks(rank_t *r, void *user) {
  const uint32_t most = *(const uint32_t *)user;
  CHECK_EQ(gather(r, 64, "a"), GEMINI_OK);
  settle(r, r->stream);
  CHECK_EQ(fake_nccl_max_ctas("ncclAllGather"), most);
}
static void test_kernels_take_so_many_blocks(void) {
  for (uint32_t most = 0; most < 3; most++)
    world(2, (gmi_comm_nccl_config_t){ .most_blocks = most }, takes_blocks, &most);
}

static void broadcasts(rank_t *r, void *user) {
  const uint64_t sizes[] = { 0, 1, 1024, 1000003 };
  (void)user;
  for (uint32_t n = 0; n < 12; n++) {
    uint64_t size = sizes[n % 4];
    uint32_t root = n % r->comm.ranks;
    pattern_fill(r->memory, r->comm.rank, size, n);
    r->memory[size] = 0xA5;
    CHECK_EQ(r->comm.ops->broadcast(r->comm.self, r->memory, size, root, r->stream, "b"), GEMINI_OK);
    settle(r, r->stream);
    pattern_check(r->memory, root, size, n);
    CHECK_EQ(r->memory[size], 0xA5);
  }
  CHECK_EQ(r->comm.ops->broadcast(r->comm.self, r->memory, 8, r->comm.ranks, r->stream, "b"), GEMINI_ERR_INVALID);
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
}
static void test_broadcasts_bring_the_roots_bytes(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) world(ranks, by_nccl, broadcasts, NULL);
}

/* A reduction of count values, or of slices of that many, against the ranks' values added on the host: from the first to
 * the last rank, or as the fake NCCL adds them. */
static void reduce_once(rank_t *r, uint64_t count, uint32_t dtype, gmi_reduce_t how, bool scatter, bool backwards) {
  const gmi_comm_ops_t *ops = r->comm.ops;
  const uint32_t ranks = r->comm.ranks, seed = (uint32_t)(count * 4 + dtype);
  const uint64_t width = gmi_dtype_bytes(dtype), whole = scatter ? count * ranks : count;
  const uint64_t at = scatter ? r->comm.rank * count * width : 0;
  unsigned char *in[RANKS], *expected = malloc(count * width + 1);
  const void *from[RANKS];
  for (uint32_t p = 0; p < ranks; p++) {
    in[p] = malloc(whole * width + 1);
    comm_values_fill(in[p], p, whole, dtype, seed);
    from[backwards ? ranks - 1 - p : p] = in[p] + at;
  }
  gmi_reduce(dtype, backwards ? GMI_REDUCE_SUM_ROUNDED : how, ranks, from, expected, count);
  CHECK(whole * width + 16 <= r->memory_bytes);
  memcpy(r->memory, in[r->comm.rank], whole * width);
  memset(r->memory + whole * width, 0xA5, 16);
  if (scatter) CHECK_EQ(ops->reduce_scatter(r->comm.self, r->memory, count, dtype, how, r->stream, "s"), GEMINI_OK);
  else CHECK_EQ(ops->all_reduce(r->comm.self, r->memory, count, dtype, how, r->stream, "s"), GEMINI_OK);
  settle(r, r->stream);
  comm_values_check(r->memory + at, expected, count, dtype);
  for (int i = 0; i < 16; i++) CHECK_EQ(r->memory[whole * width + (uint64_t)i], 0xA5);
  for (uint32_t p = 0; p < ranks; p++) free(in[p]);
  free(expected);
}
static void reduce_all_ways(rank_t *r, void *user) {
  const uint64_t counts[] = { 0, 1, 2, 5, 4099 };
  const bool ordered = r->config.rank_order;
  (void)user;
  for (uint32_t dtype = 0; dtype < 4; dtype++)
    for (int how = 0; how < 3; how++)
      for (int i = 0; i < 10; i++)
        reduce_once(r, counts[i / 2], dtype, (gmi_reduce_t)how, i % 2, !ordered && how != GMI_REDUCE_MAX);
}
/* Sums of several buffers, in any order. One call is one group of NCCL's, or, in the order of ranks, two for each. */
static void sums_together(rank_t *r, void *user) {
  enum { MOST = 5, COUNT = 100 };
  const uint32_t ranks = r->comm.ranks;
  const uint64_t apart = COUNT * ranks * sizeof(float) + 16;
  (void)user;
  for (uint32_t count = 0; count <= MOST; count++) {
    void *buffers[MOST];
    for (uint32_t b = 0; b < MOST; b++) {
      buffers[b] = r->memory + (MOST - 1 - b) * apart;
      comm_values_fill(buffers[b], r->comm.rank, COUNT * ranks, GEMINI_DTYPE_F32, b);
      memset((unsigned char *)buffers[b] + apart - 16, 0xA5, 16);
    }
    pthread_barrier_wait(&barrier);
    const uint32_t groups = fake_nccl_calls("ncclGroupStart");
    pthread_barrier_wait(&barrier);
    CHECK_EQ(r->comm.ops->reduce_scatters(r->comm.self, buffers, count, COUNT, GEMINI_DTYPE_F32, GMI_REDUCE_SUM,
                                          r->stream, "s"),
             GEMINI_OK);
    settle(r, r->stream);
    pthread_barrier_wait(&barrier);
    const uint32_t calls = fake_nccl_calls("ncclGroupStart") - groups;
    if (!r->config.rank_order) CHECK_EQ(calls, count > 1 && ranks > 1 ? ranks : 0);
    for (uint32_t b = 0; b < MOST; b++) {
      unsigned char in[RANKS][COUNT * RANKS * sizeof(float)], expected[COUNT * sizeof(float)], *mine = buffers[b];
      const void *from[RANKS];
      const uint64_t own = r->comm.rank * COUNT * sizeof(float);
      for (uint32_t p = 0; p < ranks; p++) {
        comm_values_fill(in[p], p, COUNT * ranks, GEMINI_DTYPE_F32, b);
        from[r->config.rank_order ? p : ranks - 1 - p] = in[p] + own;
      }
      gmi_reduce(GEMINI_DTYPE_F32, GMI_REDUCE_SUM, ranks, from, expected, COUNT);
      comm_values_check(mine + own, b < count ? expected : in[r->comm.rank] + own, COUNT, GEMINI_DTYPE_F32);
      for (int i = 0; i < 16; i++) CHECK_EQ(mine[apart - 16 + (uint64_t)i], 0xA5);
    }
    pthread_barrier_wait(&barrier);
  }
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
}
static void test_sums_are_queued_together(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) world(ranks, by_nccl, sums_together, NULL);
  for (uint32_t ranks = 2; ranks <= 4; ranks++) world(ranks, in_order, sums_together, NULL);
}
static void test_sums_in_the_order_of_ranks(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) world(ranks, in_order, reduce_all_ways, NULL);
}
static void test_sums_of_nccl_and_maxima_in_order(void) {
  for (uint32_t ranks = 2; ranks <= 4; ranks++) world(ranks, by_nccl, reduce_all_ways, NULL);
  fakes_begin();
  run(2, by_nccl, reduce_all_ways, NULL);
  CHECK(fake_nccl_calls("ncclAllReduce") > 0 && fake_nccl_calls("ncclReduceScatter") > 0);
  fakes_end();
}

static void reduce_in_pieces(rank_t *r, void *user) {
  (void)user;
  reduce_once(r, 300000, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, true, false);           /* two pieces of 1 MiB a rank */
  reduce_once(r, 900001, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, false, false);          /* two pieces of 3 MiB */
  reduce_once(r, 1048577, GEMINI_DTYPE_BF16, GMI_REDUCE_SUM_ROUNDED, true, false); /* three, the last of one value */
}
static void test_large_reductions_go_in_pieces(void) {
  gmi_comm_nccl_config_t config = in_order;
  config.scratch_bytes = 1; /* is rounded up to 2 MiB */
  world(3, config, reduce_in_pieces, NULL);
}

/* Reductions on two streams share the scratch memory: the second one waits, though its stream is idle. */
static void two_streams(rank_t *r, void *user) {
  enum { COUNT = 20000 };
  cu_stream_t other;
  (void)user;
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(r->driver->stream_create(&other, 1), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
  float *values = (float *)(void *)r->memory;
  const int each = COUNT * (int)r->comm.ranks, own = COUNT * (int)r->comm.rank;
  for (int i = 0; i < 40 * each; i++) values[i] = (float)(r->comm.rank + 1) * (float)(i / each + 1);
  for (int i = 0; i < 40; i++)
    CHECK_EQ(r->comm.ops->reduce_scatter(r->comm.self, values + i * each, COUNT, GEMINI_DTYPE_F32, GMI_REDUCE_SUM,
                                         i % 2 ? other : r->stream, "t"),
             GEMINI_OK);
  settle(r, r->stream);
  settle(r, other);
  for (int i = 0; i < 40; i++)
    for (int k = 0; k < COUNT; k++) CHECK(values[i * each + own + k] == 6 * (float)(i + 1));
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(r->driver->stream_destroy(other), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
}
static void test_reductions_on_two_streams_share_scratch_memory(void) {
  fakes_begin();
  fake_cuda.sum_delay_ns = 1000000;
  run(3, in_order, two_streams, NULL);
  fakes_end();
}

static void exchanges(rank_t *r, void *user) {
  const uint64_t sizes[] = { 0, 1, 8, 699051, 3000001 };
  const uint32_t ranks = r->comm.ranks;
  unsigned char *all = malloc(ranks * sizes[4] + 1), *mine = malloc(sizes[4] + 1);
  (void)user;
  for (uint32_t n = 0; n < 10; n++) {
    uint64_t size = sizes[n % 5];
    memset(all, 0xEE, ranks * size + 1);
    pattern_fill(mine, r->comm.rank, size, n);
    CHECK_EQ(r->comm.ops->exchange(r->comm.self, mine, size, all, "e"), GEMINI_OK);
    for (uint32_t p = 0; p < ranks; p++) pattern_check(all + p * size, p, size, n);
    CHECK_EQ(all[ranks * size], 0xEE);
  }
  free(all);
  free(mine);
}
static void test_exchanges_of_host_memory(void) {
  for (uint32_t ranks = 1; ranks <= 4; ranks++) world(ranks, by_nccl, exchanges, NULL);
}

static void empty_exchange(rank_t *r, void *user) {
  _Atomic uint32_t *arrived = user;
  uint8_t none[1];
  if (r->comm.rank == 1) nanosleep(&(struct timespec){ 0, 30000000 }, NULL);
  atomic_fetch_add(arrived, 1);
  CHECK_EQ(r->comm.ops->exchange(r->comm.self, NULL, 0, none, "meet"), GEMINI_OK);
  CHECK_EQ(atomic_load(arrived), r->comm.ranks);
}
static void test_ranks_meet_in_an_exchange_of_nothing(void) {
  _Atomic uint32_t arrived = 0;
  world(3, by_nccl, empty_exchange, &arrived);
}

/* One communicator, polled all the time by another thread. */
static void *poll_often(void *user) {
  rank_t *r = user;
  while (atomic_load((_Atomic bool *)r->user)) CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
  return NULL;
}
static void polled(rank_t *r, void *user) {
  _Atomic bool goes_on = true;
  pthread_t thread;
  (void)user;
  r->user = &goes_on;
  CHECK(!pthread_create(&thread, NULL, poll_often, r));
  gathers(r, NULL);
  for (uint32_t dtype = 0; dtype < 4; dtype++) reduce_once(r, 1000, dtype, GMI_REDUCE_SUM, dtype % 2, false);
  exchanges(r, NULL);
  atomic_store(&goes_on, false);
  CHECK(!pthread_join(thread, NULL));
}
static void test_calls_beside_polls(void) { world(2, in_order, polled, NULL); }

static void wrong_arguments(rank_t *r, void *user) {
  const gmi_comm_ops_t *ops = r->comm.ops;
  void *self = r->comm.self;
  (void)user;
  CHECK_EQ(ops->all_reduce(self, r->memory, 1, 4, 0, r->stream, ""), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "dtype is 4");
  CHECK_EQ(ops->all_reduce(self, r->memory, 1, 0, (gmi_reduce_t)3, r->stream, ""), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "reduce is 3");
  CHECK_EQ(ops->reduce_scatter(self, r->memory + 1, 1, GEMINI_DTYPE_F32, 0, r->stream, ""), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "must be a multiple of a value's 4 bytes");
  fake_cuda_capture(r->stream, true);
  CHECK_EQ(ops->all_reduce(self, r->memory, 1, 0, GMI_REDUCE_MAX, r->stream, "m"), GEMINI_ERR_UNSUPPORTED);
  CHECK_SAYS(gmi_fail_message(), "all-reduce of 4 bytes for m (call 1): the stream is being captured");
  fake_cuda_capture(r->stream, false);
  pthread_barrier_wait(&barrier);
  gathers(r, NULL);
}
static void test_wrong_arguments_change_nothing(void) { world(2, by_nccl, wrong_arguments, NULL); }

/* ---- joining */
static gemini_status_t join_alone(gmi_comm_nccl_config_t config, gmi_comm_t *comm_out) {
  gmi_comm_id_t id = { { 1 } };
  if (!config.ranks) config.ranks = 1;
  return gmi_comm_nccl_join(&id, &config, comm_out);
}
static void test_configurations_that_do_not_fit_are_refused(void) {
  const struct {
    gmi_comm_nccl_config_t config;
    const char *words;
  } wrong[] = { { { .ranks = 1025 }, "ranks is 1025, must be 1 to 1024" },
                { { .rank = 2, .ranks = 2 }, "rank is 2, must be below ranks, 2" },
                { { .scratch_bytes = UINT64_MAX }, "scratch_bytes is 18446744073709551615, must be at most 2^40" },
                { { .device = 2 }, "device 2: cuDeviceGet: " },
                { { .device = -1 }, "device -1: cuDeviceGet: " } };
  fakes_begin();
  gmi_comm_t comm = { 0 };
  gmi_comm_id_t id = { { 0 } };
  CHECK_EQ(gmi_comm_nccl_join(&id, &by_nccl, &comm), GEMINI_ERR_INVALID);
  CHECK_SAYS(gmi_fail_message(), "ranks is 0");
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    CHECK_EQ(join_alone(wrong[i].config, &comm), GEMINI_ERR_INVALID);
    CHECK_SAYS(gmi_fail_message(), wrong[i].words);
  }
  CHECK(!comm.ops);
  CHECK_EQ(gmi_comm_nccl_adopt(NULL, &by_nccl, &comm), GEMINI_ERR_INVALID);
  fakes_end();
}

static void *no_symbol(const char *name) {
  (void)name;
  return NULL;
}
/* Before NCCL is opened for the first time. */
static void test_the_environment_names_the_folder_of_nccl(void) {
  CHECK(!setenv("GEMINI_NCCL", "/no/folder", 1));
  CHECK(!gmi_nccl_library());
  CHECK_SAYS(gmi_fail_message(), "no NCCL on this machine: GEMINI_NCCL: /no/folder/libnccl.so.2");
  CHECK(!unsetenv("GEMINI_NCCL"));
}

static void test_an_nccl_that_cannot_be_used_is_refused(void) {
  static const struct {
    int version;
    const char *words;
  } old[] = { { 21706, "NCCL is too old: libnccl.so.2 is version 2.17.6, must be 2.18" },
              { 2804, "libnccl.so.2 is version 2.8.4" },
              { 0, "libnccl.so.2 is version 0.0.0" } };
  static const char *const needed[] = { "ncclGetErrorString", "ncclCommInitRankConfig", "ncclGroupEnd" };
  gmi_comm_id_t id;
  gmi_comm_t comm;
  fakes_begin();
  gmi_nccl_library_replace(no_symbol);
  CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_ERR_UNSUPPORTED);
  for (size_t i = 0; i < sizeof old / sizeof *old; i++) {
    gmi_nccl_library_replace(fake_nccl_symbol);
    fake_nccl.version = old[i].version;
    CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_ERR_UNSUPPORTED);
    CHECK_SAYS(gmi_fail_message(), old[i].words);
    CHECK_EQ(join_alone(by_nccl, &comm), GEMINI_ERR_UNSUPPORTED);
  }
  fake_nccl.version = 21800;
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
    fake_nccl_lacking = needed[i];
    gmi_nccl_library_replace(fake_nccl_symbol);
    CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_ERR_UNSUPPORTED);
    CHECK_SAYS(gmi_fail_message(), needed[i]);
  }
  fake_nccl_lacking = "ncclGetLastError"; /* does without */
  gmi_nccl_library_replace(fake_nccl_symbol);
  fake_nccl_fail("ncclGetUniqueId", 0, 2);
  CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_ERR_DEVICE);
  CHECK_SAYS(gmi_fail_message(), "ncclGetUniqueId: unhandled system error");
  fake_nccl_fail("ncclCommInitRankConfig", 0, 3);
  CHECK_EQ(join_alone(by_nccl, &comm), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 0 of 1: ncclCommInitRankConfig in joining: internal error");
  CHECK(!strstr(gmi_fail_message(), "NCCL says"));
  CHECK_EQ(gmi_comm_nccl_id(&id), GEMINI_OK);
  fake_nccl_lacking = NULL;
  gmi_nccl_library_replace(NULL);
  gmi_cuda_driver_replace(no_symbol);
  CHECK_EQ(join_alone(by_nccl, &comm), GEMINI_ERR_UNSUPPORTED);
  CHECK_SAYS(gmi_fail_message(), "CUDA driver");
  gmi_cuda_driver_replace(fake_cuda_symbol);
  fakes_end();
}

/* Each of the driver's functions fails once. */
static void test_drivers_that_fail_while_joining(void) {
  process_t before = process_now();
  bool joined = false;
  uint64_t failed = 0;
  for (uint64_t n = 0; !joined; n++) {
    fakes_begin();
    gmi_comm_t comm = { 0 };
    int code = n % 2 ? CU_OUT_OF_MEMORY : CU_UNKNOWN;
    fake_cuda_fail(n + 1, n + 1, code);
    gemini_status_t status = join_alone(in_order, &comm);
    joined = !status && fake_cuda_calls() < n + 1;
    fake_cuda_fail(0, 0, 0);
    if (status) {
      failed++;
      CHECK(!comm.ops);
      CHECK(status == GEMINI_ERR_DEVICE || status == GEMINI_ERR_OOM_DEVICE || status == GEMINI_ERR_OOM_HOST);
      CHECK(strstr(gmi_fail_message(), ": CUDA_ERROR_") ||
            strstr(gmi_fail_message(), "context cannot be made current"));
      if (strstr(gmi_fail_message(), "CUDA_ERROR_OUT_OF_MEMORY")) CHECK_EQ(gmi_fail_code(), CU_OUT_OF_MEMORY);
    } else {
      comm.ops->close(comm.self);
    }
    CHECK_EQ(fake_nccl_live(), 0);
    CHECK_EQ(fake_nccl_violations(), 0);
    CHECK_EQ(fake_cuda_live(true), 0);
    /* The library could not, if that was what failed. */
    if (fake_cuda_calls() > 1) CHECK_EQ(gmi_cuda_driver()->current_set(NULL), 0);
  }
  CHECK(failed >= 12);
  fake_cuda_reset();
  process_check(before);
}

static void test_ranks_that_do_not_join_are_waited_for_until_the_deadline(void) {
  fakes_begin();
  process_t before = process_now();
  gmi_comm_t comm = { 0 };
  uint64_t begin = gmi_now_ns();
  CHECK_EQ(join_alone((gmi_comm_nccl_config_t){ .rank = 1, .ranks = 3, .deadline_ns = SHORT_NS }, &comm),
           GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 1 of 3: joining: waited 1 s for the other ranks (ncclCommInitRankConfig)");
  CHECK(gmi_now_ns() - begin >= SHORT_NS);
  CHECK(!comm.ops);
  CHECK_EQ(fake_nccl_calls("ncclCommAbort"), 1);
  fakes_end();
  process_check(before);
}

/* ---- failures. Only rank 0 makes the call that fails; the other one has done nothing wrong. */
typedef struct {
  const char *function, *words;
  int what;
  uint32_t call;
} fails_t;
static gemini_status_t call_of(rank_t *r, int what) {
  const gmi_comm_ops_t *ops = r->comm.ops;
  uint64_t all[RANKS] = { 0 };
  void *buffers[] = { r->memory, r->memory + 64 * RANKS, r->memory + 128 * RANKS };
  switch (what) {
  case 0: return gather(r, 64, "op 3");
  case 1: return ops->reduce_scatter(r->comm.self, r->memory, 64, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, r->stream, "op 3");
  case 2: return ops->all_reduce(r->comm.self, r->memory, 64, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, r->stream, "op 3");
  case 3: return ops->all_reduce(r->comm.self, r->memory, 64, GEMINI_DTYPE_F32, GMI_REDUCE_MAX, r->stream, "op 3");
  case 4: return ops->exchange(r->comm.self, &all[1], 8, all, "op 3");
  case 5: return ops->all_gathers(r->comm.self, buffers, 3, 64, r->stream, "op 3");
  default:
    return ops->reduce_scatters(r->comm.self, buffers, 3, 16, GEMINI_DTYPE_F32, GMI_REDUCE_SUM, r->stream, "op 3");
  }
}
static void nccl_fails(rank_t *r, void *user) {
  const fails_t *f = user;
  pthread_barrier_wait(&barrier);
  if (r->comm.rank == 0) {
    fake_nccl.words = "socket closed by remote peer";
    fake_nccl_fail(f->function, f->call, 6);
    CHECK_EQ(call_of(r, f->what), GEMINI_ERR_PEER);
    CHECK_EQ(fake_nccl_depth(), 0);
    CHECK_EQ(gmi_fail_code(), 6);
    check_failed(r, f->words);
    CHECK_SAYS(gmi_fail_message(), ": remote process exited or there was a network error; NCCL says: socket closed");
  }
  pthread_barrier_wait(&barrier);
  r->comm.ops->close(r->comm.self);
  r->comm.self = NULL; /* closes nothing again */
  pthread_barrier_wait(&barrier);
  CHECK_EQ(fake_nccl_calls("ncclCommAbort"), 1);
  CHECK_EQ(fake_nccl_calls("ncclCommDestroy"), 1);
}
static void test_functions_of_nccl_that_fail(void) {
  static const fails_t cases[] = {
    { "ncclAllGather", "rank 0 of 2: ncclAllGather in all-gather of 64 bytes for op 3 (call 1)", 0, 0 },
    { "ncclReduceScatter", "rank 0 of 2: ncclReduceScatter in reduce-scatter of 256 bytes for op 3 (call 1)", 1, 0 },
    { "ncclAllReduce", "rank 0 of 2: ncclAllReduce in all-reduce of 256 bytes for op 3 (call 1)", 2, 0 },
    { "ncclGroupStart", "rank 0 of 2: ncclGroupStart in all-reduce of 256 bytes for op 3 (call 1)", 3, 0 },
    { "ncclSend", "rank 0 of 2: ncclSend in all-reduce", 3, 0 },
    { "ncclRecv", "rank 0 of 2: ncclRecv in all-reduce", 3, 0 },
    { "ncclGroupEnd", "rank 0 of 2: ncclGroupEnd in all-reduce", 3, 0 },
    { "ncclSend", "rank 0 of 2: ncclSend in all-reduce", 3, 1 }, /* of the results */
    { "ncclGroupEnd", "rank 0 of 2: ncclGroupEnd in all-reduce", 3, 1 },
    { "ncclAllGather", "rank 0 of 2: ncclAllGather in exchange of 8 bytes for op 3 (call 1)", 4, 0 },
    { "ncclCommGetAsyncError", "rank 0 of 2: ncclAllGather in all-gather", 0, 0 },
    { "ncclCommGetAsyncError", "rank 0 of 2: ncclGroupEnd in all-reduce", 3, 0 },
    { "ncclGroupStart", "rank 0 of 2: ncclGroupStart in 3 all-gathers of 64 bytes for op 3 (call 1)", 5, 0 },
    { "ncclAllGather", "rank 0 of 2: ncclAllGather in 3 all-gathers of 64 bytes for op 3 (call 1)", 5, 1 },
    { "ncclGroupEnd", "rank 0 of 2: ncclGroupEnd in 3 all-gathers of 64 bytes for op 3 (call 1)", 5, 0 },
    { "ncclGroupStart", "rank 0 of 2: ncclGroupStart in 3 reduce-scatters of 64 bytes for op 3 (call 1)", 6, 0 },
    { "ncclReduceScatter", "rank 0 of 2: ncclReduceScatter in 3 reduce-scatters of 64 bytes for op 3 (call 1)", 6, 1 },
    { "ncclGroupEnd", "rank 0 of 2: ncclGroupEnd in 3 reduce-scatters of 64 bytes for op 3 (call 1)", 6, 0 },
  };
  process_t before = process_now();
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    fails_t f = cases[i];
    world(2, by_nccl, nccl_fails, &f);
  }
  process_check(before);
}

/* The driver's calls in rank 0's call fail, one in each world. Nobody else calls it meanwhile. */
typedef struct {
  int what;
  uint64_t n;
  bool reached, left; /* the call was; the end of the work is not known */
} each_t;
static void driver_fails(rank_t *r, void *user) {
  each_t *e = user;
  const gmi_comm_ops_t *ops = r->comm.ops;
  CHECK_EQ(ops->all_reduce(r->comm.self, r->memory, 8, 0, GMI_REDUCE_MAX, r->stream, "first"), GEMINI_OK);
  settle(r, r->stream);
  pthread_barrier_wait(&barrier);
  if (r->comm.rank == 0) {
    uint64_t first = fake_cuda_calls() + 1 + e->n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    gemini_status_t status = call_of(r, e->what);
    e->reached = fake_cuda_calls() >= first;
    fake_cuda_fail(0, 0, 0);
    if (status) {
      CHECK_EQ(status, GEMINI_ERR_PEER);
      e->left = strstr(gmi_fail_message(), "cuEventRecord") != NULL;
      if (strstr(gmi_fail_message(), "waited 1 s")) e->reached = false; /* the exchange had all it needs, but a peer */
      else CHECK(strstr(gmi_fail_message(), ": CUDA_ERROR_") || strstr(gmi_fail_message(), ": unhandled cuda"));
      check_failed(r, "rank 0 of 2: ");
    } else { /* putting back the context failed */
      CHECK(e->what != 4);
      ops->abort(r->comm.self, "the test is over");
    }
  }
  pthread_barrier_wait(&barrier);
  if (r->comm.rank == 1) ops->abort(r->comm.self, "the test is over");
  /* What close() leaves is used until here. */
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(r->driver->context_wait(), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
}
static void test_functions_of_the_driver_that_fail(void) {
  uint32_t left = 0;
  for (int what = 0; what < 5; what++) {
    each_t e = { .what = what, .reached = true };
    for (; e.reached; e.n++) {
      e.left = false;
      fakes_begin();
      gmi_comm_nccl_config_t config = { .deadline_ns = what == 4 ? SHORT_NS : LONG_NS };
      run(2, config, driver_fails, &e);
      CHECK_EQ(fake_nccl_live(), 0);
      CHECK_EQ(fake_nccl_violations(), 0);
      if (fake_cuda_live(!e.left)) CHECK(e.left);
      left += fake_cuda_live(false) > 0;
      fake_cuda_reset();
      fake_nccl_reset();
    }
    CHECK(e.n > 3);
  }
  CHECK_EQ(left, 2); /* after a reduction in the order of ranks, and after an exchange */
}

static void async_fails(rank_t *r, void *user) {
  (void)user;
  CHECK_EQ(gather(r, 64, "a"), GEMINI_OK);
  settle(r, r->stream);
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
  pthread_barrier_wait(&barrier);
  if (r->comm.rank == 1) return;
  fake_nccl_async(0, 6);
  check_failed(r, "rank 0 of 2: ncclCommGetAsyncError in poll: remote process exited");
}
static void test_failures_that_nccl_reports_later(void) { world(2, by_nccl, async_fails, NULL); }

static void *fail_soon(void *user) {
  (void)user;
  while (!fake_nccl_calls("ncclAllGather")) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  nanosleep(&(struct timespec){ 0, 50000000 }, NULL);
  fake_nccl_async(0, 6);
  return NULL;
}
static void async_in_exchange(rank_t *r, void *user) {
  uint32_t all[RANKS], mine = 0;
  pthread_t thread;
  (void)user;
  if (r->comm.rank == 1) return;
  CHECK(!pthread_create(&thread, NULL, fail_soon, NULL));
  CHECK_EQ(r->comm.ops->exchange(r->comm.self, &mine, 4, all, "e"), GEMINI_ERR_PEER);
  check_failed(
      r, " in exchange of 4 bytes for e (call 1): remote process"); /* seen while it is queued, or while it runs */
  CHECK(!pthread_join(thread, NULL));
}
static void test_an_exchange_ends_when_nccl_reports_a_failure(void) { world(2, by_nccl, async_in_exchange, NULL); }

/* ---- nothing hangs */
static void stalls(rank_t *r, void *user) {
  const fails_t *f = user;
  if (r->comm.rank == 1) return;
  uint64_t begin = gmi_now_ns();
  CHECK_EQ(call_of(r, f->what), GEMINI_ERR_PEER);
  CHECK(gmi_now_ns() - begin >= SHORT_NS);
  check_failed(r, f->words);
}
static void test_calls_that_nccl_does_not_queue_end_at_the_deadline(void) {
  static const fails_t cases[] = {
    { "ncclAllGather", "all-gather of 64 bytes for op 3 (call 1): waited 1 s for the other ranks (ncclAllGather)", 0,
      0 },
    { "ncclReduceScatter", "waited 1 s for the other ranks (ncclReduceScatter)", 1, 0 },
    { "ncclAllReduce", "waited 1 s for the other ranks (ncclAllReduce)", 2, 0 },
    { "ncclGroupEnd", "waited 1 s for the other ranks (ncclGroupEnd)", 3, 0 },
    { "ncclAllGather", "exchange of 8 bytes for op 3 (call 1): waited 1 s", 4, 0 },
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    fails_t f = cases[i];
    fakes_begin();
    fake_nccl.stalled = f.function;
    run(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, stalls, &f);
    fakes_end();
  }
}

static void alone(rank_t *r, void *user) {
  (void)user;
  if (r->comm.rank == 1) return;
  CHECK_EQ(gather(r, 64, "op 5"), GEMINI_OK);
  CHECK_EQ(gather(r, 32, "op 6"), GEMINI_OK);
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
  poll_until_failed(r);
  check_failed(r, "rank 0 of 2: all-gather of 64 bytes for op 5 (call 1): waited 1 s for the other ranks (running ");
  settle(r, r->stream); /* the kernels have been ended */
}
static void test_a_collective_whose_peers_do_not_come_fails_at_the_deadline(void) {
  world(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, alone, NULL);
}
static void alone_in_the_second(rank_t *r, void *user) {
  (void)user;
  if (r->comm.rank == 0) CHECK_EQ(gather(r, 64, "op 5"), GEMINI_OK);
  if (r->comm.rank == 0) CHECK_EQ(gather(r, 32, "op 6"), GEMINI_OK);
  pthread_barrier_wait(&barrier);
  if (r->comm.rank == 1) CHECK_EQ(gather(r, 64, "op 5"), GEMINI_OK);
  if (r->comm.rank == 1) return;
  poll_until_failed(r);
  check_failed(r, "rank 0 of 2: all-gather of 32 bytes for op 6 (call 2): waited 1 s for the other ranks");
}
static void test_every_collective_is_watched(void) {
  world(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, alone_in_the_second, NULL);
}
static void alone_in_exchange(rank_t *r, void *user) {
  uint32_t all[RANKS], mine = 0;
  (void)user;
  if (r->comm.rank == 1) return;
  CHECK_EQ(r->comm.ops->exchange(r->comm.self, &mine, 4, all, "e"), GEMINI_ERR_PEER);
  check_failed(r, "exchange of 4 bytes for e (call 1): waited 1 s for the other ranks (running on the GPU)");
}
static void test_an_exchange_whose_peers_do_not_come_fails_at_the_deadline(void) {
  world(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, alone_in_exchange, NULL);
}

/* What waits for the caller's own work is not late: neither a collective, nor an exchange behind it. */
static bool held(void *user) { return !atomic_load((_Atomic bool *)user); }
static void *let_go(void *user) {
  nanosleep(&(struct timespec){ 3 * SHORT_NS / 1000000000, 3 * SHORT_NS % 1000000000 }, NULL);
  atomic_store((_Atomic bool *)user, false);
  return NULL;
}
static void busy_stream(rank_t *r, void *user) {
  _Atomic bool holds = true;
  uint32_t all[RANKS], mine = r->comm.rank;
  pthread_t thread;
  (void)user;
  CHECK_EQ(r->driver->current_set(r->context), 0);
  CHECK_EQ(fake_cuda_kernel(r->stream, held, &holds), 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
  CHECK(!pthread_create(&thread, NULL, let_go, &holds));
  for (int i = 0; i < 3; i++) CHECK_EQ(gather(r, 64, "a"), GEMINI_OK);
  for (uint64_t begin = gmi_now_ns(); gmi_now_ns() - begin < SHORT_NS * 3 / 2;) {
    CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
    nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  }
  CHECK_EQ(r->comm.ops->exchange(r->comm.self, &mine, 4, all, "e"), GEMINI_OK);
  settle(r, r->stream);
  CHECK_EQ(r->comm.ops->poll(r->comm.self), GEMINI_OK);
  CHECK(!pthread_join(thread, NULL));
}
static void test_work_of_the_caller_does_not_count_as_waiting(void) {
  world(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, busy_stream, NULL);
}

/* More collectives than are watched: the call waits until the oldest has ended. */
static void many(rank_t *r, void *user) {
  enum { CALLS = 300 };
  _Atomic bool *other_goes = user;
  while (r->comm.rank == 1 && !atomic_load(other_goes)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  for (int i = 0; i < CALLS; i++) {
    if (i == 255) atomic_store(other_goes, true);
    CHECK_EQ(gather(r, 8, "m"), GEMINI_OK);
  }
  settle(r, r->stream);
}
static void test_more_collectives_than_are_watched(void) {
  _Atomic bool other_goes = false;
  world(2, by_nccl, many, &other_goes);
}
static void too_many(rank_t *r, void *user) {
  (void)user;
  if (r->comm.rank == 1) return;
  gemini_status_t status = GEMINI_OK;
  uint32_t calls = 0;
  while (!(status = gather(r, 8, "m"))) calls++;
  CHECK_EQ(status, GEMINI_ERR_PEER);
  CHECK(calls <= 256);
  check_failed(r, "for m (call 1): waited 1 s for the other ranks (running on the GPU)");
}
static void test_a_call_that_waits_for_room_ends_at_the_deadline(void) {
  world(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, too_many, NULL);
}

static _Atomic bool to_abort;
static void *abort_soon(void *user) {
  rank_t *r = user;
  while (!atomic_load(&to_abort)) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  nanosleep(&(struct timespec){ 0, 50000000 }, NULL);
  r->comm.ops->abort(r->comm.self, "its disk is full");
  r->comm.ops->abort(r->comm.self, "later words");
  return NULL;
}
static void aborted(rank_t *r, void *user) {
  const fails_t *f = user;
  pthread_t thread;
  if (r->comm.rank == 1) return;
  atomic_store(&to_abort, f->what >= 0); /* a call that waits, or that comes too late: it fails either way */
  CHECK(!pthread_create(&thread, NULL, abort_soon, r));
  if (f->what >= 0) CHECK_EQ(call_of(r, f->what), GEMINI_ERR_PEER);
  else {
    CHECK_EQ(gather(r, 8, "a"), GEMINI_OK);
    atomic_store(&to_abort, true);
    settle(r, r->stream);
  }
  CHECK(!pthread_join(thread, NULL));
  check_failed(r, "rank 0 of 2: gave up: its disk is full");
}
static void test_an_abort_ends_calls_that_wait(void) {
  static const fails_t cases[] = { { "", "", 4, 0 },              /* an exchange */
                                   { "", "", -1, 0 },             /* a stream that waits for a gather */
                                   { "ncclAllGather", "", 0, 0 }, /* a call that NCCL does not queue */
                                   { "ncclGroupEnd", "", 3, 0 } };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    fails_t f = cases[i];
    fakes_begin();
    fake_nccl.stalled = *f.function ? f.function : NULL;
    run(2, by_nccl, aborted, &f);
    fakes_end();
  }
}

/* ---- closing */
static void close_only(rank_t *r, void *user) {
  (void)user;
  if (r->comm.rank) return;
  CHECK_EQ(gather(r, 8, "a"), GEMINI_OK);
}
static void test_a_communicator_that_cannot_be_finalized_is_aborted(void) {
  static const char *const functions[] = { "ncclCommFinalize", "ncclCommGetAsyncError" };
  for (int i = 0; i < 3; i++) {
    fakes_begin();
    fake_nccl.stalled = i == 0 ? "ncclCommFinalize" : NULL;
    if (i == 1) fake_nccl_fail(functions[0], 0, 3);
    run(1, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS }, close_only, NULL);
    CHECK_EQ(fake_nccl_calls("ncclCommAbort"), i < 2);
    CHECK_EQ(fake_nccl_calls("ncclCommDestroy"), i == 2);
    fakes_end();
  }
}

typedef struct {
  bool abort_hangs;
} stuck_t;
static void stuck(rank_t *r, void *user) {
  const stuck_t *s = user;
  if (s->abort_hangs) fake_nccl.abort_hangs = true;
  else fake_nccl.kernels_stay = true;
  CHECK_EQ(r->comm.ops->all_reduce(r->comm.self, r->memory, 8, 0, GMI_REDUCE_MAX, r->stream, "m"), GEMINI_OK);
  r->comm.ops->abort(r->comm.self, "the test says so");
  uint64_t begin = gmi_now_ns();
  r->comm.ops->close(r->comm.self);
  CHECK(gmi_now_ns() - begin < 100 * SHORT_NS);
  r->comm.self = NULL;
  /* What the work on the stream may use is there, and is used. */
  pthread_barrier_wait(&barrier);
  fake_nccl.abort_hangs = false;
  fake_nccl.kernels_stay = false;
  settle(r, r->stream);
}
static void test_close_leaves_what_cannot_be_ended(void) {
  for (int i = 0; i < 2; i++) {
    stuck_t s = { i == 0 };
    fakes_begin();
    run(2, (gmi_comm_nccl_config_t){ .deadline_ns = SHORT_NS, .rank_order = true }, stuck, &s);
    for (int tries = 0; fake_nccl_live() && tries < 1000; tries++) nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
    CHECK_EQ(fake_nccl_live(), 0);
    CHECK_EQ(fake_nccl_violations(), 0);
    CHECK_EQ(fake_cuda_violations(), 0);
    CHECK(fake_cuda_live(false) > 0);
    nanosleep(&(struct timespec){ 0, 500000000 }, NULL); /* the threads that aborted end */
    fake_cuda_reset();
    fake_nccl_reset();
  }
}

/* ---- the caller's communicators */
nccl_result_t ncclCommInitRankConfig(nccl_comm_t *comm_out, int ranks, nccl_id_t id, int rank, nccl_config_t *config);
static gmi_comm_t adopted(rank_t *r, bool blocking, nccl_comm_t *theirs_out) {
  nccl_config_t settings = NCCL_CONFIG_NON_BLOCKING;
  nccl_id_t id;
  gmi_comm_t comm = { 0 };
  settings.blocking = blocking;
  memcpy(&id, &r->id, sizeof id);
  id.bytes[0] ^= 0x40; /* another group */
  CHECK_EQ(r->driver->current_set(r->context), 0);
  nccl_result_t result = ncclCommInitRankConfig(theirs_out, (int)r->comm.ranks, id, (int)r->comm.rank, &settings);
  const gmi_nccl_library_t *library = gmi_nccl_library();
  while (result == NCCL_IN_PROGRESS) CHECK_EQ(library->async_error(*theirs_out, &result), 0);
  CHECK_EQ(result, 0);
  CHECK_EQ(r->driver->current_set(NULL), 0);
  CHECK_EQ(gmi_comm_nccl_adopt(*theirs_out, &r->config, &comm), GEMINI_OK);
  return comm;
}
static void theirs_end(rank_t *r, nccl_comm_t theirs, bool fails) {
  const gmi_nccl_library_t *library = gmi_nccl_library();
  nccl_result_t result;
  CHECK_EQ(r->driver->current_set(r->context), 0);
  if (fails) CHECK_EQ(library->abort(theirs), 0);
  else {
    for (result = library->finalize(theirs); result == NCCL_IN_PROGRESS;)
      CHECK_EQ(library->async_error(theirs, &result), 0);
    CHECK_EQ(library->destroy(theirs), 0);
  }
  CHECK_EQ(r->driver->current_set(NULL), 0);
}
static void adopts(rank_t *r, void *user) {
  nccl_comm_t theirs;
  const gmi_nccl_library_t *library = gmi_nccl_library();
  (void)user;
  for (int blocking = 0; blocking < 2; blocking++) {
    gmi_comm_t own = r->comm, comm = adopted(r, blocking, &theirs), none = { 0 };
    for (int i = 0; i < 5; i++) {
      gmi_comm_nccl_config_t wrong = r->config;
      const char *words = i == 0   ? "ranks is 3, ncclCommCount says 2"
                          : i == 1 ? ", ncclCommUserRank says "
                          : i == 2 ? ", ncclCommCuDevice says "
                          : i == 3 ? "ncclCommCount: invalid usage"
                                   : "ncclCommGetAsyncError: remote process exited";
      if (i == 0) wrong.ranks = 3;
      if (i == 1) wrong.rank ^= 1;
      if (i == 2) wrong.device ^= 1;
      pthread_barrier_wait(&barrier);
      if (i == 3 && r->comm.rank == 0) fake_nccl_fail("ncclCommCount", 0, 5);
      if (i == 4) fake_nccl_async(r->comm.rank, 6);
      if (i == 3 && r->comm.rank == 1) continue;
      if (i == 2) continue; /* in another context, so that the fake objects */
      CHECK_EQ(gmi_comm_nccl_adopt(theirs, &wrong, &none), GEMINI_ERR_INVALID);
      CHECK_SAYS(gmi_fail_message(), words);
      fake_nccl_async(r->comm.rank, 0);
    }
    r->comm = comm;
    gathers(r, NULL);
    exchanges(r, NULL);
    for (uint32_t dtype = 0; dtype < 4; dtype++) reduce_once(r, 1000, dtype, GMI_REDUCE_SUM, dtype % 2, false);
    comm.ops->close(comm.self);
    /* It can be adopted again, and fail: nobody but its owner ends it. */
    CHECK_EQ(gmi_comm_nccl_adopt(theirs, &r->config, &comm), GEMINI_OK);
    r->comm = comm;
    comm.ops->abort(comm.self, "it has to");
    check_failed(r, "gave up: it has to");
    comm.ops->close(comm.self);
    r->comm = own;
    pthread_barrier_wait(&barrier);
    CHECK_EQ(fake_nccl_live(), 4);
    pthread_barrier_wait(&barrier);
    nccl_result_t state;
    CHECK_EQ(r->driver->current_set(r->context), 0);
    CHECK_EQ(library->async_error(theirs, &state), 0);
    CHECK_EQ(r->driver->current_set(NULL), 0);
    theirs_end(r, theirs, false);
    pthread_barrier_wait(&barrier);
    r->id.bytes[1]++;
  }
}
static void test_communicators_of_the_caller(void) { world(2, in_order, adopts, NULL); }

int main(void) {
  process_begin();
  RUN(test_the_environment_names_the_folder_of_nccl);
  RUN(test_gathers_are_in_place_and_queued);
  RUN(test_gathers_are_queued_together);
  RUN(test_kernels_take_so_many_blocks);
  RUN(test_broadcasts_bring_the_roots_bytes);
  RUN(test_sums_are_queued_together);
  RUN(test_sums_in_the_order_of_ranks);
  RUN(test_sums_of_nccl_and_maxima_in_order);
  RUN(test_large_reductions_go_in_pieces);
  RUN(test_reductions_on_two_streams_share_scratch_memory);
  RUN(test_exchanges_of_host_memory);
  RUN(test_ranks_meet_in_an_exchange_of_nothing);
  RUN(test_calls_beside_polls);
  RUN(test_wrong_arguments_change_nothing);
  RUN(test_configurations_that_do_not_fit_are_refused);
  RUN(test_an_nccl_that_cannot_be_used_is_refused);
  RUN(test_drivers_that_fail_while_joining);
  RUN(test_ranks_that_do_not_join_are_waited_for_until_the_deadline);
  RUN(test_functions_of_nccl_that_fail);
  RUN(test_functions_of_the_driver_that_fail);
  RUN(test_failures_that_nccl_reports_later);
  RUN(test_an_exchange_ends_when_nccl_reports_a_failure);
  RUN(test_calls_that_nccl_does_not_queue_end_at_the_deadline);
  RUN(test_a_collective_whose_peers_do_not_come_fails_at_the_deadline);
  RUN(test_every_collective_is_watched);
  RUN(test_an_exchange_whose_peers_do_not_come_fails_at_the_deadline);
  RUN(test_work_of_the_caller_does_not_count_as_waiting);
  RUN(test_more_collectives_than_are_watched);
  RUN(test_a_call_that_waits_for_room_ends_at_the_deadline);
  RUN(test_an_abort_ends_calls_that_wait);
  RUN(test_a_communicator_that_cannot_be_finalized_is_aborted);
  RUN(test_close_leaves_what_cannot_be_ended);
  RUN(test_communicators_of_the_caller);
  return check_done();
}
