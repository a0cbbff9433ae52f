/* Groups of managers on GPUs, over stand-ins for NCCL and for the CUDA driver: each rank is a thread with a manager.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <time.h>

#include "../integration/group_world.h"
#include "base/clock.h"
#include "base/status.h"
#include "chunk/group.h"
#include "comm/comm.h"
#include "comm/nccl_library.h"
#include "core/manager.h"
#include "fake_cuda.h"
#include "fake_nccl.h"
#include "process.h"

enum { GPUS = 2, SCALE = 32 /* chunks of 2 MiB, the least on a GPU */, LAYERS_SCALE = 8 };
#define LONG_NS UINT64_C(60000000000) /* no test waits for it */
/* Waited out. What must succeed within it is slow under sanitizers on a machine that does other things, too. */
#define SHORT_NS (SANITIZED ? UINT64_C(4500000000) : UINT64_C(1500000000))
#define SHORT_WORDS (SANITIZED ? "waited 4.5 s" : "waited 1.5 s")
#define THIRD_WORDS (SANITIZED ? "rank 0 of 2: joining: waited 1.5 s" : "rank 0 of 2: joining: waited 0.5 s")
#define MARGIN_NS UINT64_C(8000000000) /* what a wait that ends at a deadline may take longer on a loaded machine */

/* ---- ranks, each a thread */
typedef struct rank_thread rank_thread_t;
typedef void (*rank_fn)(rank_thread_t *t);
struct rank_thread {
  rank_fn fn;
  shape_t shape;
  uint32_t rank;
  gemini_group_config_t group; /* without ranks */
  int fd;
};
static pthread_barrier_t barrier; /* of all ranks of a world */

static void *thread_main(void *user) {
  rank_thread_t *t = user;
  t->fn(t);
  return NULL;
}
/* Runs fn as each rank. Options of the stand-ins are set between fakes_begin() and this. */
static void run(shape_t shape, gemini_group_config_t group, rank_fn fn) {
  pthread_t threads[RANKS_MOST];
  rank_thread_t all[RANKS_MOST];
  int fd = memfd_create("stored", MFD_CLOEXEC);
  CHECK(!pthread_barrier_init(&barrier, NULL, shape.ranks));
  for (uint32_t r = 0; r < shape.ranks; r++) {
    all[r] = (rank_thread_t){ .fn = fn, .shape = shape, .rank = r, .group = group, .fd = fd };
    all[r].shape.device = GEMINI_DEVICE_CUDA;
    all[r].shape.ordinal = r % GPUS;
    all[r].shape.scale = SCALE;
    all[r].shape.layers = LAYERS_SCALE;
    CHECK(!pthread_create(&threads[r], NULL, thread_main, &all[r]));
  }
  for (uint32_t r = 0; r < shape.ranks; r++) CHECK(!pthread_join(threads[r], NULL));
  CHECK(!pthread_barrier_destroy(&barrier));
  close(fd);
}
/* With an id of NCCL. */
static void run_over_nccl(shape_t shape, uint32_t flags, uint64_t deadline_ns, rank_fn fn) {
  gemini_group_id_t id;
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_NCCL, shape.ranks, &id));
  group.id = &id;
  group.flags = flags;
  group.deadline_ns = deadline_ns;
  run(shape, group, fn);
}
static shape_t shape_of(uint32_t ranks, uint32_t stage, uint32_t element_bytes) {
  return (shape_t){
    .ranks = ranks, .stage = stage, .element_bytes = element_bytes, .device_chunks = 40, .host_chunks = 64
  };
}

/* ---- training. Sanitizers take ten times as long: they see a part of the shapes. */
static void trains(rank_thread_t *t) { train_rank(&t->shape, t->rank, t->group, t->fd); }

/* NCCL's sums of two ranks are the only rounded ones; of more they are not in the order of ranks. */
static void test_training_over_nccl_has_the_bits_of_the_model(void) {
  for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
    if (SANITIZED && stage == GEMINI_ZERO_STATES) continue;
    fakes_begin();
    shape_t shape = shape_of(2, stage, stage == GEMINI_ZERO_GRADIENTS ? 2 : 4);
    shape.unused = stage == GEMINI_ZERO_PARAMS;
    shape.bucket = stage == GEMINI_ZERO_STATES ? 0 : stage + 1;
    run_over_nccl(shape, 0, LONG_NS, trains);
    CHECK(fake_nccl_calls("ncclReduceScatter") > 0);
    CHECK_EQ(fake_nccl_calls("ncclSend"), 0);
    CHECK(fake_nccl_calls("ncclGroupStart") > 0); /* gathers */
    CHECK(fake_nccl_max_ctas("ncclReduceScatter") > 0);
    CHECK(fake_nccl_max_ctas("ncclAllGather") > 0);
    fakes_end();
  }
}
static void test_sums_in_the_order_of_ranks_have_the_bits_of_the_model(void) {
  for (uint32_t element_bytes = 2; element_bytes <= (SANITIZED ? 2 : 4); element_bytes += 2) {
    fakes_begin();
    shape_t shape = shape_of(3, GEMINI_ZERO_PARAMS, element_bytes);
    shape.wait = true;
    run_over_nccl(shape, GEMINI_GROUP_RANK_ORDER, LONG_NS, trains);
    CHECK_EQ(fake_nccl_calls("ncclReduceScatter"), 0);
    CHECK(fake_nccl_calls("ncclSend") > 0);
    fakes_end();
  }
}
static void test_one_rank_trains_alone(void) {
  fakes_begin();
  run_over_nccl(shape_of(1, GEMINI_ZERO_PARAMS, 4), 0, LONG_NS, trains);
  fakes_end();
}

/* Gradients of several micro-batches: a kernel adds them to the sums, on the host and on the GPU. */
static void test_sums_of_micro_batches_have_the_bits_of_the_model(void) {
  for (uint32_t stage = SANITIZED ? GEMINI_ZERO_PARAMS : GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
    fakes_begin();
    shape_t shape = shape_of(stage == GEMINI_ZERO_GRADIENTS ? 1 : 2, stage, stage == GEMINI_ZERO_PARAMS ? 2 : 4);
    shape.micro_batches = stage == GEMINI_ZERO_GRADIENTS ? 3 : 2;
    shape.bucket = 3;
    run_over_nccl(shape, 0, LONG_NS, trains);
    fakes_end();
  }
}

/* Two replicas of two ranks: each of their two sums has two values, so that NCCL's has the bits of the model, too. Their
 * GPUs have a queue for each stream: ranks that share one would wait for each other in it, which no two GPUs do. */
static shape_t shape_of_replicas(uint32_t stage, uint32_t element_bytes) {
  shape_t shape = shape_of(4, stage, element_bytes);
  fake_cuda.channels = 63;
  shape.replicas = 2;
  return shape;
}
static void test_replicas_have_the_bits_of_the_model(void) {
  /* Under sanitizers four ranks train in the next test only. */
  for (int order = 0; order < (SANITIZED ? 0 : 2); order++) {
    fakes_begin();
    shape_t shape = shape_of_replicas(order ? GEMINI_ZERO_PARAMS : GEMINI_ZERO_GRADIENTS, order ? 2 : 4);
    shape.unused = order;
    shape.bucket = 2;
    if (!order) shape.micro_batches = 2;
    run_over_nccl(shape, order ? GEMINI_GROUP_RANK_ORDER : 0, LONG_NS, trains);
    CHECK_EQ(fake_nccl_calls("ncclCommInitRankConfig"), 4 * GEMINI_GROUP_HYBRID_COMMS);
    CHECK(order || (fake_nccl_calls("ncclReduceScatter") > 0 && fake_nccl_calls("ncclAllReduce") > 0));
    CHECK_EQ(fake_nccl_calls("ncclReduceScatter") == 0, order);
    fakes_end();
  }
  fakes_begin();
  shape_t copies = shape_of(2, GEMINI_ZERO_STATES, 4); /* replicas of one rank */
  copies.replicas = 2;
  run_over_nccl(copies, 0, LONG_NS, trains);
  CHECK_EQ(fake_nccl_calls("ncclBroadcast") + fake_nccl_calls("ncclReduceScatter"), 0);
  fakes_end();
}

/* ---- the caller's communicators */
static nccl_id_t ids[2 * GEMINI_GROUP_HYBRID_COMMS]; /* of a second replica, and place in it, behind the others */
static void ids_make(void) {
  for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) CHECK_EQ(gmi_nccl_library()->unique_id(&ids[i]), 0);
}
/* A context that is current for as long as the rank makes and ends communicators, as in a framework's thread. */
static void context_begin(const rank_thread_t *t) {
  const gmi_cuda_driver_t *driver = gmi_cuda_driver();
  cu_context_t context;
  cu_device_t device;
  CHECK(driver && driver->init(0) == 0);
  CHECK_EQ(driver->device_get(&device, (int)t->shape.ordinal), 0);
  CHECK_EQ(driver->primary_retain(&context, device), 0);
  CHECK_EQ(driver->current_set(context), 0);
}
static void context_end(const rank_thread_t *t) {
  CHECK_EQ(gmi_cuda_driver()->current_set(NULL), 0);
  CHECK_EQ(gmi_cuda_driver()->primary_release((cu_device_t)t->shape.ordinal), 0);
}
static void comms_make(const rank_thread_t *t, void **comms) {
  nccl_config_t settings = NCCL_CONFIG_NON_BLOCKING;
  settings.blocking = 1;
  context_begin(t);
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) {
    nccl_comm_t comm;
    CHECK_EQ(gmi_nccl_library()->init_rank_config(&comm, (int)t->shape.ranks, ids[i], (int)t->rank, &settings), 0);
    comms[i] = comm;
  }
}
static void comms_end(const rank_thread_t *t, void **comms) {
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) {
    CHECK_EQ(gmi_nccl_library()->finalize(comms[i]), 0);
    CHECK_EQ(gmi_nccl_library()->destroy(comms[i]), 0);
  }
  context_end(t);
}
static void trains_over_adopted(rank_thread_t *t) {
  void *comms[GEMINI_GROUP_COMMS];
  comms_make(t, comms);
  t->group.nccl_comms = comms;
  train_rank(&t->shape, t->rank, t->group, t->fd);
  CHECK_EQ(fake_nccl_calls("ncclCommAbort"), 0);
  comms_end(t, comms);
}
static void replicas_over_adopted(rank_thread_t *t) {
  void *comms[GEMINI_GROUP_HYBRID_COMMS];
  const uint32_t replica = t->rank / 2, place = t->rank % 2;
  nccl_config_t settings = NCCL_CONFIG_NON_BLOCKING;
  settings.blocking = 1;
  context_begin(t);
  for (uint32_t i = 0; i < GEMINI_GROUP_HYBRID_COMMS; i++) {
    const uint32_t rank = i == 2 ? t->rank : i == 3 ? replica : place, other = i == 2 ? 0 : i == 3 ? place : replica;
    nccl_comm_t comm;
    CHECK_EQ(gmi_nccl_library()->init_rank_config(&comm, i == 2 ? 4 : 2, ids[i + GEMINI_GROUP_HYBRID_COMMS * other],
                                                  (int)rank, &settings),
             0);
    comms[i] = comm;
  }
  t->group.nccl_comms = comms;
  train_rank(&t->shape, t->rank, t->group, t->fd);
  for (int i = 0; i < GEMINI_GROUP_HYBRID_COMMS; i++) {
    CHECK_EQ(gmi_nccl_library()->finalize(comms[i]), 0);
    CHECK_EQ(gmi_nccl_library()->destroy(comms[i]), 0);
  }
  context_end(t);
}
static void test_replicas_over_the_callers_communicators(void) {
  fakes_begin();
  ids_make();
  const gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  run(shape_of_replicas(GEMINI_ZERO_PARAMS, 4), group, replicas_over_adopted);
  CHECK_EQ(fake_nccl_calls("ncclCommDestroy"), 4 * GEMINI_GROUP_HYBRID_COMMS);
  fakes_end();
}
static void test_training_over_the_callers_communicators(void) {
  fakes_begin();
  ids_make();
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  const uint32_t ranks = SANITIZED ? 2 : 3;
  group.flags = GEMINI_GROUP_RANK_ORDER;
  run(shape_of(ranks, GEMINI_ZERO_GRADIENTS, 4), group, trains_over_adopted);
  CHECK_EQ(fake_nccl_calls("ncclCommDestroy"), ranks * GEMINI_GROUP_COMMS);
  fakes_end();
}

/* ---- functions of the caller's that queue, which are here NCCL's again */
typedef struct {
  gmi_comm_t comm;
  _Atomic uint32_t calls, polls, aborts, wrong_streams; /* Atomic: counts, of several threads */
  uint32_t fail_at;                                     /* the call that fails; 0: none does */
} queueing_t;
static gemini_status_t call_begin(queueing_t *q, const void *stream) {
  if (!stream) atomic_fetch_add(&q->wrong_streams, 1);
  return atomic_fetch_add(&q->calls, 1) + 1 == q->fail_at ? GEMINI_ERR_IO : GEMINI_OK;
}
static gemini_status_t q_all_gather(void *user, void *buffer, uint64_t bytes, void *stream, const char *label) {
  queueing_t *q = user;
  gemini_status_t status = call_begin(q, stream);
  return status ? status : q->comm.ops->all_gather(q->comm.self, buffer, bytes, stream, label);
}
static gemini_status_t q_broadcast(void *user, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                                   const char *label) {
  queueing_t *q = user;
  gemini_status_t status = call_begin(q, stream);
  return status ? status : q->comm.ops->broadcast(q->comm.self, buffer, bytes, root, stream, label);
}
static gemini_status_t q_reduce_scatter(void *user, void *buffer, uint64_t count, uint32_t dtype, void *stream,
                                        const char *label) {
  queueing_t *q = user;
  gemini_status_t status = call_begin(q, stream);
  return status ? status
                : q->comm.ops->reduce_scatter(q->comm.self, buffer, count, dtype, GMI_REDUCE_SUM, stream, label);
}
static gemini_status_t q_all_reduce(void *user, void *buffer, uint64_t count, uint32_t dtype, void *stream,
                                    const char *label) {
  queueing_t *q = user;
  gemini_status_t status = call_begin(q, stream);
  return status ? status : q->comm.ops->all_reduce(q->comm.self, buffer, count, dtype, GMI_REDUCE_SUM, stream, label);
}
static gemini_status_t q_exchange(void *user, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  queueing_t *q = user;
  return q->comm.ops->exchange(q->comm.self, mine, bytes, all_out, label);
}
static gemini_status_t q_poll(void *user) {
  queueing_t *q = user;
  atomic_fetch_add(&q->polls, 1);
  return q->comm.ops->poll(q->comm.self);
}
static void q_abort(void *user, const char *why) {
  queueing_t *q = user;
  atomic_fetch_add(&q->aborts, 1);
  q->comm.ops->abort(q->comm.self, why);
}
static void queueing_open(const rank_thread_t *t, queueing_t *qs, gemini_comm_t *tables, uint64_t deadline_ns) {
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) {
    const gmi_comm_nccl_config_t config = { .rank = t->rank,
                                            .ranks = t->shape.ranks,
                                            .deadline_ns = deadline_ns,
                                            .device = (int32_t)t->shape.ordinal,
                                            .rank_order = i == 1 };
    gmi_comm_id_t id;
    memcpy(&id, &ids[i], sizeof id);
    memset(&qs[i], 0, sizeof qs[i]);
    CHECK_EQ(gmi_comm_nccl_join(&id, &config, &qs[i].comm), GEMINI_OK);
    tables[i] =
        (gemini_comm_t){ sizeof tables[i], GEMINI_COMM_QUEUES, &qs[i], q_all_gather, q_broadcast, q_reduce_scatter,
                         q_all_reduce,     q_exchange,         q_poll, q_abort,      NULL,        NULL };
  }
}
static void trains_over_functions(rank_thread_t *t) {
  queueing_t qs[GEMINI_GROUP_COMMS];
  gemini_comm_t tables[GEMINI_GROUP_COMMS];
  const gemini_comm_t *const comms[] = { &tables[0], &tables[1], &tables[2] };
  const uint64_t begin_ns = gmi_now_ns();
  queueing_open(t, qs, tables, LONG_NS);
  t->group.comms = comms;
  train_rank(&t->shape, t->rank, t->group, t->fd);
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) {
    /* The thread that watches a group polls 20 times a second, and exchanges do; gathers, sums and operators do not,
     * which would be 400 times. */
    CHECK(atomic_load(&qs[i].polls) > 0);
    CHECK(atomic_load(&qs[i].polls) <= (gmi_now_ns() - begin_ns) / 50000000 + 120);
    CHECK_EQ(atomic_load(&qs[i].aborts), 0);
    CHECK_EQ(atomic_load(&qs[i].wrong_streams), 0);
    CHECK(i == 2 || atomic_load(&qs[i].calls) > 0);
    qs[i].comm.ops->close(qs[i].comm.self);
  }
}
static void test_training_over_functions_that_queue(void) {
  fakes_begin();
  ids_make();
  const gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  run(shape_of(SANITIZED ? 2 : 3, GEMINI_ZERO_PARAMS, 4), group, trains_over_functions);
  fakes_end();
}

/* ---- frames that are registered with the communicator of gathers */
static void test_gathers_into_registered_frames_have_the_bits_of_the_model(void) {
  fakes_begin();
  shape_t shape =
      shape_of(3, GEMINI_ZERO_PARAMS, 2); /* of three: equal slices leave values over, which are broadcast */
  run_over_nccl(shape, GEMINI_GROUP_REGISTER | GEMINI_GROUP_RANK_ORDER, LONG_NS, trains);
  CHECK(fake_nccl_in_registered() > 0 && fake_nccl_calls("ncclBroadcast") > 0);
  CHECK_EQ(fake_nccl_beside_registered(), 0);
  CHECK_EQ(fake_nccl_calls("ncclCommRegister"), fake_nccl_calls("ncclCommDeregister"));
  CHECK(fake_nccl_calls("ncclCommRegister") <= shape.ranks * shape.device_chunks); /* once for each frame */
  fakes_end();
}

/* Frames that are destroyed are not registered any more, and frames made later are. */
static void gives_frames_back(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  const uint64_t chunk = chunk_of(&t->shape);
  CHECK(k);
  rank_open(k, &t->shape, t->rank, t->group);
  for (uint32_t n = 0; n < 2; n++) CHECK_OK(step(k, n, true));
  CHECK_OK(gemini_stream_synchronize(k->w.mgr, k->w.stream));
  pthread_barrier_wait(&barrier);
  const uint32_t all = fake_nccl_registered(), gathers = fake_nccl_in_registered();
  pthread_barrier_wait(&barrier);
  CHECK(all > 0);
  CHECK_OK(gemini_budget_set(k->w.mgr, GEMINI_TIER_DEVICE, 10 * chunk));
  pthread_barrier_wait(&barrier);
  const uint32_t fewer = fake_nccl_registered();
  CHECK(fewer < all);
  CHECK_OK(gemini_budget_set(k->w.mgr, GEMINI_TIER_DEVICE, t->shape.device_chunks * chunk));
  pthread_barrier_wait(&barrier);
  for (uint32_t n = 2; n < 5; n++) CHECK_OK(step(k, n, true));
  CHECK_OK(gemini_stream_synchronize(k->w.mgr, k->w.stream));
  pthread_barrier_wait(&barrier);
  CHECK(fake_nccl_registered() > fewer && fake_nccl_in_registered() > gathers);
  CHECK_EQ(atomic_load(&k->wrong), 0);
  pthread_barrier_wait(&barrier);
  rank_close(k);
  free(k);
}
static void test_frames_that_are_given_back_are_not_registered(void) {
  fakes_begin();
  run_over_nccl(shape_of(2, GEMINI_ZERO_PARAMS, 4), GEMINI_GROUP_REGISTER, LONG_NS, gives_frames_back);
  CHECK_EQ(fake_nccl_beside_registered(), 0);
  fakes_end();
}

/* One rank cannot register its fourth frame: its later gathers run at the chunks' addresses. */
static void test_a_frame_that_cannot_be_registered_costs_no_bits(void) {
  fakes_begin();
  fake_nccl_fail("ncclCommRegister", 3, 2);
  run_over_nccl(shape_of(2, GEMINI_ZERO_PARAMS, 4), GEMINI_GROUP_REGISTER, LONG_NS, trains);
  CHECK(fake_nccl_in_registered() > 0);
  CHECK(fake_nccl_beside_registered() > 0);
  CHECK_EQ(fake_nccl_calls("ncclCommDeregister"), fake_nccl_calls("ncclCommRegister") - 1);
  fakes_end();
}

/* ---- failures */

/* What may be read after a failure is right: the masters of the last update that was done. */
static void check_masters(rank_t *k) {
  uint32_t read = 0;
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    gemini_tensor_t master;
    CHECK_OK(gemini_tensor_counterpart(k->w.mgr, k->param[layer], k->masters, &master));
    gemini_access_t all = world_whole(master, GEMINI_READ, HOST);
    uint64_t offset, size;
    CHECK_OK(gemini_slice_next(k->w.mgr, &all, 0, &offset, &size));
    if (!size) continue;
    gemini_access_t slice = world_part(master, offset, size, GEMINI_READ, HOST);
    gemini_status_t status = gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER);
    if (status) {
      CHECK_EQ(status, GEMINI_ERR_PEER);
      continue;
    }
    CHECK(!memcmp(slice.ptr, k->model.master + k->model.first[layer] + offset / 4, size));
    CHECK_OK(gemini_release(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
    read++;
  }
  CHECK(read > 0);
}
/* Sums that were not made are not read. */
static void check_gradients(rank_t *k) {
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    gemini_access_t all = world_whole(k->grad[layer], GEMINI_READ, HOST);
    uint64_t offset, size;
    CHECK_OK(gemini_slice_next(k->w.mgr, &all, 0, &offset, &size));
    if (!size) continue;
    gemini_access_t slice = world_part(k->grad[layer], offset, size, GEMINI_READ, HOST);
    CHECK(gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER) != GEMINI_OK);
  }
}
static void failed_close(rank_t *k) {
  gemini_status_t closed = gemini_manager_close(k->w.mgr);
  if (closed && closed != GEMINI_ERR_PEER && closed != GEMINI_ERR_DEVICE) CHECK_OK(closed);
  model_free(k);
  free(k);
}

/* Rank 1 stops before the backward pass of step 2. */
static void stops_in_backward(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  gemini_status_t status = GEMINI_OK;
  rank_open(k, &t->shape, t->rank, t->group);
  for (uint32_t n = 0; n < 2; n++) CHECK_OK(step(k, n, true));
  CHECK_OK(gemini_iteration_begin(k->w.mgr));
  for (uint32_t layer = 0; layer < LAYERS; layer++) CHECK_OK(op(k, 2, layer, false));
  CHECK_OK(gemini_stream_synchronize(k->w.mgr, k->w.stream));
  pthread_barrier_wait(&barrier);
  uint64_t begin = gmi_now_ns();
  if (t->rank == 0) {
    for (uint32_t layer = LAYERS; !status && layer-- > 0;) status = op(k, 2, layer, true);
    double norm;
    gemini_access_t all = world_whole(k->grads, GEMINI_READ, DEVICE);
    if (!status) status = gemini_norm(k->w.mgr, &all, GEMINI_DTYPE_F32, k->w.stream, &norm);
    CHECK_EQ(status, GEMINI_ERR_PEER);
    CHECK_SAYS(world_error().message, "rank 0 of 2");
    CHECK_SAYS(world_error().message, SHORT_WORDS);
    CHECK(gmi_now_ns() - begin < SHORT_NS + MARGIN_NS);
    CHECK_STATUS(gemini_stream_synchronize(k->w.mgr, k->w.stream), GEMINI_ERR_PEER);
    uint8_t byte = 0, bytes[2];
    begin = gmi_now_ns(); /* the communicator of exchanges has not met a failure of its own */
    CHECK_STATUS(gemini_group_exchange(k->w.mgr, k->group, &byte, 1, bytes), GEMINI_ERR_PEER);
    CHECK(gmi_now_ns() - begin < SHORT_NS);
    const gemini_status_t ended = gemini_iteration_end(k->w.mgr); /* the operator that met the failure may be open */
    if (ended == GEMINI_ERR_STATE) CHECK_SAYS(world_error().message, "is open");
    else CHECK_EQ(ended, GEMINI_ERR_PEER);
    check_masters(k);
    check_gradients(k);
    CHECK_EQ(atomic_load(&k->wrong_on_host), 0);
  }
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_a_rank_that_stops_is_noticed_at_the_deadline(void) {
  fakes_begin();
  shape_t shape = shape_of(2, GEMINI_ZERO_PARAMS, 4);
  shape.placement = GEMINI_PLACEMENT_CPU; /* masters stay on the host, where check_masters() reads them */
  run_over_nccl(shape, 0, SHORT_NS, stops_in_backward);
  fakes_end();
}

/* Gathers that are queued together fail on one rank, whichever comes first, at their end or in the middle. */
static const char *fails_in;
static _Atomic uint32_t failed_together;
static void gathers_fail(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  gemini_status_t status = GEMINI_OK;
  rank_open(k, &t->shape, t->rank, t->group);
  for (uint32_t n = 0; n < 2; n++) CHECK_OK(step(k, n, true));
  pthread_barrier_wait(&barrier);
  if (t->rank == 0) fake_nccl_fail(fails_in, 1, 6);
  pthread_barrier_wait(&barrier);
  for (uint32_t n = 2; !status && n < 4; n++) status = step(k, n, true);
  CHECK_EQ(status, GEMINI_ERR_PEER);
  char words[64];
  snprintf(words, sizeof words, "rank %u of 2: ", t->rank);
  CHECK_SAYS(world_error().message, words);
  snprintf(words, sizeof words, "%s in ", fails_in);
  const bool here = strstr(world_error().message, words) != NULL;
  if (here) CHECK_SAYS(world_error().message, " all-gathers of ");
  failed_together += here;
  CHECK_STATUS(gemini_stream_synchronize(k->w.mgr, k->w.stream), GEMINI_ERR_PEER);
  check_masters(k);
  CHECK_EQ(atomic_load(&k->wrong_on_host), 0);
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_gathers_that_fail_together_fail_the_group(void) {
  static const char *const functions[] = { "ncclGroupStart", "ncclGroupEnd" };
  for (int i = SANITIZED; i < 2; i++) {
    fakes_begin();
    shape_t shape = shape_of(2, GEMINI_ZERO_PARAMS, 4);
    shape.placement = GEMINI_PLACEMENT_CPU; /* as above */
    fails_in = functions[i];
    failed_together = 0;
    run_over_nccl(shape, 0, SHORT_NS, gathers_fail);
    CHECK_EQ(failed_together, 1);
    fakes_end();
  }
}

/* An acquire that has room for some of its chunks only: made again it would gather the others in a group of their own,
 * where another rank may have gathered all in one. */
static void gathers_lack_room(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  rank_open(k, &t->shape, t->rank, t->group);
  CHECK_OK(step(k, 0, true));
  pthread_barrier_wait(&barrier);
  gemini_access_t all = world_whole(k->params, GEMINI_READ, DEVICE);
  void *last = NULL; /* all the room is taken, but for one chunk's */
  for (void *now; !gemini_alloc(k->w.mgr, chunk_of(&t->shape), k->w.stream, &now);) last = now;
  CHECK_OK(gemini_free(k->w.mgr, last, k->w.stream));
  CHECK_STATUS(gemini_acquire(k->w.mgr, &all, 1, k->w.stream), GEMINI_ERR_OOM_DEVICE);
  CHECK_STATUS(gemini_acquire(k->w.mgr, &all, 1, k->w.stream), GEMINI_ERR_PEER);
  CHECK_SAYS(world_error().message, "gave up: 2097152 more bytes of device memory are needed");
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_an_acquire_that_lacks_room_halfway_fails_the_group(void) {
  fakes_begin();
  shape_t shape = shape_of(2, GEMINI_ZERO_PARAMS, 4);
  shape.device_chunks = 12;
  run_over_nccl(shape, 0, SHORT_NS, gathers_lack_room);
  fakes_end();
}

/* The same, where the device refuses a mapping: marks behind what was queued must not queue what is held back. */
static void gathers_cannot_map(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  rank_open(k, &t->shape, t->rank, t->group);
  gemini_access_t two = world_part(k->params, 0, 2 * chunk_of(&t->shape), GEMINI_READ, DEVICE);
  gemini_access_t all = world_whole(k->params, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_acquire(k->w.mgr, &two, 1, k->w.stream)); /* maps them */
  CHECK_OK(gemini_release(k->w.mgr, &two, 1, k->w.stream));
  CHECK_OK(gemini_stream_synchronize(k->w.mgr, k->w.stream));
  pthread_barrier_wait(&barrier);
  if (t->rank == 0) {
    const uint32_t groups = fake_nccl_calls("ncclGroupStart");
    fake_cuda_fail_function("cuMemMap", CU_OUT_OF_MEMORY);
    CHECK_STATUS(gemini_acquire(k->w.mgr, &all, 1, k->w.stream), GEMINI_ERR_OOM_SYSTEM); /* the third chunk */
    fake_cuda_fail_function(NULL, 0);
    CHECK_EQ(fake_nccl_calls("ncclGroupStart"), groups);
    CHECK_STATUS(gemini_acquire(k->w.mgr, &all, 1, k->w.stream), GEMINI_ERR_PEER);
    CHECK_SAYS(world_error().message, "CUDA_ERROR_OUT_OF_MEMORY");
  }
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_an_acquire_that_cannot_map_halfway_fails_the_group(void) {
  fakes_begin();
  run_over_nccl(shape_of(2, GEMINI_ZERO_PARAMS, 4), 0, SHORT_NS, gathers_cannot_map);
  fakes_end();
}

/* Slices of three ranks leave something over, so that no gather is held back: those of an acquire that fails have been
 * queued, and outside of operators it would gather them again. */
static void gathers_twice(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  rank_open(k, &t->shape, t->rank, t->group);
  gemini_access_t all = world_whole(k->params, GEMINI_READ, DEVICE);
  CHECK(chunk_of(&t->shape) / t->shape.element_bytes % (3 * 256));
  pthread_barrier_wait(&barrier);
  if (t->rank == 0) {
    void *taken[2] = { 0 }; /* all the room is taken, but for two chunks' */
    for (void *now; !gemini_alloc(k->w.mgr, chunk_of(&t->shape), k->w.stream, &now);) {
      taken[0] = taken[1];
      taken[1] = now;
    }
    for (int i = 0; i < 2; i++) CHECK_OK(gemini_free(k->w.mgr, taken[i], k->w.stream));
    CHECK_STATUS(gemini_acquire(k->w.mgr, &all, 1, k->w.stream), GEMINI_ERR_OOM_DEVICE);
    const uint32_t gathers = fake_nccl_calls("ncclAllGather");
    CHECK(gathers > 0);
    CHECK_STATUS(gemini_acquire(k->w.mgr, &all, 1, k->w.stream), GEMINI_ERR_PEER);
    CHECK_SAYS(world_error().message, "more bytes of device memory are needed");
    CHECK_EQ(fake_nccl_calls("ncclAllGather"), gathers);
  }
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_an_acquire_that_would_gather_twice_fails_the_group(void) {
  fakes_begin();
  shape_t shape = shape_of(3, GEMINI_ZERO_PARAMS, 4);
  shape.device_chunks = 12;
  run_over_nccl(shape, 0, SHORT_NS, gathers_twice);
  fakes_end();
}

/* Rank 3 stops: its replica notices at the deadline, and the other one at its own. */
static void stops_in_a_replica(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  gemini_status_t status = GEMINI_OK;
  rank_open(k, &t->shape, t->rank, t->group);
  CHECK_OK(step(k, 0, true));
  pthread_barrier_wait(&barrier);
  const uint64_t begin = gmi_now_ns();
  if (t->rank != 3) {
    for (uint32_t n = 1; !status && n < 3; n++) status = step(k, n, true);
    CHECK_EQ(status, GEMINI_ERR_PEER);
    char words[32];
    snprintf(words, sizeof words, "rank %u of 4: ", t->rank);
    CHECK_SAYS(world_error().message, words);
    CHECK(gmi_now_ns() - begin < 2 * SHORT_NS + MARGIN_NS);
    CHECK_STATUS(gemini_stream_synchronize(k->w.mgr, k->w.stream), GEMINI_ERR_PEER);
    check_masters(k);
    CHECK_EQ(atomic_load(&k->wrong_on_host), 0);
  }
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_a_rank_that_stops_fails_all_replicas(void) {
  fakes_begin();
  shape_t shape = shape_of_replicas(GEMINI_ZERO_PARAMS, 4);
  shape.placement = GEMINI_PLACEMENT_CPU; /* as above */
  run_over_nccl(shape, 0, SHORT_NS, stops_in_a_replica);
  fakes_end();
}

/* A caller that waits for its stream by itself, as frameworks do, waits no longer than the deadline, either: nobody calls
 * the library meanwhile. */
static void waits_elsewhere(rank_thread_t *t) {
  rank_t *k = malloc(sizeof *k);
  void *stream;
  rank_open(k, &t->shape, t->rank, t->group);
  CHECK_OK(gemini_stream_native(k->w.mgr, k->w.stream, &stream));
  pthread_barrier_wait(&barrier);
  if (t->rank == 0) {
    const gmi_cuda_driver_t *driver = gmi_cuda_driver();
    gemini_access_t use = world_whole(k->param[0], GEMINI_READ, DEVICE);
    cu_event_t event;
    CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, k->w.stream)); /* rank 1 does not: its part never comes */
    static char text[1 << 16];
    CHECK_OK(gemini_manager_dump(k->w.mgr, sizeof text, text, NULL));
    CHECK_SAYS(text, "group 0: rank 0 of 2, in 1 replica of 2 ranks");
    CHECK_SAYS(text, " chunks, have not ended, the first for chunk 0 of arena ");
    CHECK_SAYS(text, "group 0: sums of 0 chunks queued so far, all have ended");
    context_begin(t);
    CHECK_EQ(driver->event_create(&event, CU_EVENT_NO_TIME), 0);
    CHECK_EQ(driver->event_record(event, stream), 0);
    uint64_t begin = gmi_now_ns();
    cu_result_t result;
    while ((result = driver->event_query(event)) == CU_NOT_READY) {
      CHECK(gmi_now_ns() - begin < SHORT_NS + MARGIN_NS);
      nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    }
    CHECK_EQ(result, 0);
    CHECK_EQ(driver->event_destroy(event), 0);
    context_end(t);
    CHECK_OK(gemini_release(k->w.mgr, &use, 1, k->w.stream));
    use = world_whole(k->param[1], GEMINI_READ, DEVICE);
    CHECK_STATUS(gemini_acquire(k->w.mgr, &use, 1, k->w.stream), GEMINI_ERR_PEER);
    CHECK_SAYS(world_error().message, SHORT_WORDS);
  }
  pthread_barrier_wait(&barrier);
  failed_close(k);
}
static void test_a_wait_outside_of_the_library_ends_at_the_deadline(void) {
  fakes_begin();
  run_over_nccl(shape_of(2, GEMINI_ZERO_PARAMS, 4), 0, SHORT_NS, waits_elsewhere);
  fakes_end();
}

/* A function that queues fails on rank 1; the others wait for their deadline. */
static void function_fails(rank_thread_t *t) {
  queueing_t qs[GEMINI_GROUP_COMMS];
  gemini_comm_t tables[GEMINI_GROUP_COMMS];
  const gemini_comm_t *const comms[] = { &tables[0], &tables[1], &tables[2] };
  rank_t *k = malloc(sizeof *k);
  gemini_status_t status = GEMINI_OK;
  queueing_open(t, qs, tables, SHORT_NS);
  t->group.comms = comms;
  rank_open(k, &t->shape, t->rank, t->group);
  CHECK_OK(step(k, 0, true));
  if (t->rank == 1) qs[1].fail_at = atomic_load(&qs[1].calls) + 2;
  for (uint32_t n = 1; !status && n < 4; n++) status = step(k, n, true);
  CHECK_EQ(status, GEMINI_ERR_PEER);
  char words[64];
  snprintf(words, sizeof words, "rank %u of 2", t->rank);
  CHECK_SAYS(world_error().message, words);
  if (t->rank == 1) CHECK_SAYS(world_error().message, "() of comms[1] for chunk");
  if (t->rank == 1) CHECK_SAYS(world_error().message, "returned -9 (input/output error)");
  CHECK_STATUS(gemini_stream_synchronize(k->w.mgr, k->w.stream), GEMINI_ERR_PEER);
  check_masters(k);
  CHECK_EQ(atomic_load(&k->wrong_on_host), 0);
  pthread_barrier_wait(&barrier);
  failed_close(k);
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) {
    CHECK_EQ(atomic_load(&qs[i].aborts), 1); /* of the others, too */
    qs[i].comm.ops->close(qs[i].comm.self);
  }
}
static void test_a_function_that_queues_and_fails(void) {
  fakes_begin();
  ids_make();
  const gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  shape_t shape = shape_of(2, GEMINI_ZERO_PARAMS, 4);
  shape.placement = GEMINI_PLACEMENT_CPU; /* as above */
  run(shape, group, function_fails);
  fakes_end();
}

/* ---- streams */
static int priority_of(gmi_manager_t *m, uint32_t stream) {
  void *native;
  CHECK_EQ(m->device.ops->stream.native(m->device.self, stream, &native), GEMINI_OK);
  return fake_cuda_stream_priority(native);
}
/* Operators' kernels must not keep a collective's waiting. */
static void check_urgent(gemini_manager_t mgr, gemini_group_t group) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  gmi_lock(m, "check_urgent");
  const gmi_group_t *g = gmi_group_get(m, group);
  CHECK(priority_of(m, g->gather_stream) < 0 && priority_of(m, g->reduce_stream) < 0);
  CHECK_EQ(priority_of(m, m->update.stream), 0);
  gmi_unlock(m);
}

/* ---- groups that cannot be opened */
#define REFUSED(expected, words)                                  \
  do {                                                            \
    CHECK_STATUS(gemini_group_open(w.mgr, &c, &group), expected); \
    CHECK_SAYS(world_error().message, words);                     \
    CHECK(!group);                                                \
  } while (0)
static void test_groups_that_do_not_fit_the_gpu_are_refused(void) {
  fakes_begin();
  gemini_config_t config = world_config(4 * SCALE, 4 * SCALE, 0);
  config.device = GEMINI_DEVICE_CUDA;
  config.device_ordinal = 1;
  config.chunk_bytes = SCALE * WORLD_CHUNK;
  world_t w = world_open(config);
  const uint64_t live = fake_cuda_live(false);
  gemini_group_id_t id, shared;
  gemini_group_t group = NULL;
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 1, &shared));
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_NCCL, 2, &id));
  c.ranks = 1;
  c.id = &shared;
  REFUSED(GEMINI_ERR_UNSUPPORTED,
          "shared memory need the simulated device, not device cuda, which GEMINI_TRANSPORT_NCCL");
  c.id = &id;
  REFUSED(GEMINI_ERR_INVALID, "ranks is 1, but id was made for 2");
  c.ranks = 2;
  c.rank = 2;
  REFUSED(GEMINI_ERR_INVALID, "rank is 2");
  c.rank = 0;
  c.flags = GEMINI_GROUP_REGISTER << 1 | GEMINI_GROUP_RANK_ORDER;
  REFUSED(GEMINI_ERR_INVALID, "flags has unknown bits 0x4");
  c.flags = GEMINI_GROUP_REGISTER;
  fake_nccl_lacking = "ncclCommRegister";
  gmi_nccl_library_replace(fake_nccl_symbol);
  REFUSED(GEMINI_ERR_UNSUPPORTED, "flags has GEMINI_GROUP_REGISTER, which needs NCCL 2.19 or later");
  fake_nccl_lacking = NULL;
  gmi_nccl_library_replace(NULL);
  c.flags = 0;
  c.deadline_ns = SHORT_NS / 3;
  REFUSED(GEMINI_ERR_PEER, THIRD_WORDS);
  CHECK_EQ(fake_cuda_live(false), live);

  /* communicators of the caller: of another rank, number of ranks and GPU */
  ids_make();
  rank_thread_t t = { .shape = { .ranks = 1, .ordinal = 1 } }, other = t;
  other.shape.ordinal = 0;
  void *comms[GEMINI_GROUP_COMMS], *others[GEMINI_GROUP_COMMS];
  comms_make(&t, comms);
  ids_make();
  comms_make(&other, others);
  CHECK_EQ(gmi_cuda_driver()->current_set(NULL), 0);
  const uint64_t made = fake_cuda_live(false);
  void *some[GEMINI_GROUP_COMMS] = { comms[0], comms[1], comms[2] };
  c.id = NULL;
  c.nccl_comms = some;
  REFUSED(GEMINI_ERR_INVALID, "nccl_comms[0]: ranks is 2, ncclCommCount says 1");
  c.ranks = 1;
  some[1] = NULL;
  REFUSED(GEMINI_ERR_INVALID, "nccl_comms[1]: the communicator to adopt is NULL");
  some[1] = others[1];
  REFUSED(GEMINI_ERR_INVALID, "nccl_comms[1]: device is 1, ncclCommCuDevice says 0");
  some[1] = comms[1];
  some[2] = comms[0];
  REFUSED(GEMINI_ERR_INVALID, "nccl_comms[0] and nccl_comms[2] are the same communicator");
  CHECK_EQ(fake_cuda_live(false), made);
  CHECK_EQ(fake_nccl_live(), 6);

  /* functions that block have no stream that waits for them; an exchange blocks in any case */
  queueing_t qs[GEMINI_GROUP_COMMS];
  gemini_comm_t tables[GEMINI_GROUP_COMMS];
  const gemini_comm_t *const pointers[] = { &tables[0], &tables[1], &tables[2] };
  ids_make();
  queueing_open(&t, qs, tables, LONG_NS);
  c.nccl_comms = NULL;
  c.comms = pointers;
  c.deadline_ns = 0;
  for (int i = 0; i < 2; i++) {
    tables[i].flags = 0;
    REFUSED(GEMINI_ERR_UNSUPPORTED, i ? "comms[1] lacks the flag GEMINI_COMM_QUEUES: device cuda"
                                      : "comms[0] lacks the flag GEMINI_COMM_QUEUES: device cuda");
    tables[i].flags = GEMINI_COMM_QUEUES;
  }
  tables[2].flags = 0;
  CHECK_OK(gemini_group_open(w.mgr, &c, &group));
  check_urgent(w.mgr, group);
  CHECK_OK(gemini_group_close(w.mgr, group));
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) qs[i].comm.ops->close(qs[i].comm.self);
  world_close(&w);
  context_begin(&other); /* of two GPUs in turn, which retains each once more */
  comms_end(&other, others);
  context_end(&other);
  context_begin(&t);
  comms_end(&t, comms);
  context_end(&t);
  CHECK_EQ(fake_nccl_live(), 0);
  CHECK_EQ(fake_nccl_violations(), 3); /* questions about the communicator of another GPU */
  fake_nccl_reset();
  fakes_end();
}

static void test_ids_need_nccl(void) {
  fakes_begin();
  gemini_group_id_t id;
  fake_nccl_lacking = "ncclGetVersion";
  gmi_nccl_library_replace(fake_nccl_symbol);
  CHECK_STATUS(gemini_group_id_make(GEMINI_TRANSPORT_NCCL, 2, &id), GEMINI_ERR_UNSUPPORTED);
  fake_nccl_lacking = NULL;
  gmi_nccl_library_replace(NULL);
  for (uint32_t call = 0; call < GEMINI_GROUP_COMMS; call++) {
    memset(&id, 0xA5, sizeof id);
    fake_nccl_fail("ncclGetUniqueId", call, 2);
    CHECK_STATUS(gemini_group_id_make(GEMINI_TRANSPORT_NCCL, 2, &id), GEMINI_ERR_DEVICE);
    CHECK_SAYS(world_error().message, "ncclGetUniqueId");
    CHECK_EQ(id.bytes[0], 0xA5);
  }
  fake_nccl_fail(NULL, 0, 0);
  fakes_end();
}

int main(void) {
  process_begin();
  RUN(test_training_over_nccl_has_the_bits_of_the_model);
  RUN(test_sums_in_the_order_of_ranks_have_the_bits_of_the_model);
  RUN(test_one_rank_trains_alone);
  RUN(test_sums_of_micro_batches_have_the_bits_of_the_model);
  RUN(test_replicas_have_the_bits_of_the_model);
  RUN(test_replicas_over_the_callers_communicators);
  RUN(test_training_over_the_callers_communicators);
  RUN(test_training_over_functions_that_queue);
  RUN(test_gathers_into_registered_frames_have_the_bits_of_the_model);
  RUN(test_frames_that_are_given_back_are_not_registered);
  RUN(test_a_frame_that_cannot_be_registered_costs_no_bits);
  RUN(test_a_rank_that_stops_is_noticed_at_the_deadline);
  RUN(test_gathers_that_fail_together_fail_the_group);
  RUN(test_an_acquire_that_lacks_room_halfway_fails_the_group);
  RUN(test_an_acquire_that_cannot_map_halfway_fails_the_group);
  RUN(test_an_acquire_that_would_gather_twice_fails_the_group);
  RUN(test_a_rank_that_stops_fails_all_replicas);
  RUN(test_a_wait_outside_of_the_library_ends_at_the_deadline);
  RUN(test_a_function_that_queues_and_fails);
  RUN(test_groups_that_do_not_fit_the_gpu_are_refused);
  RUN(test_ids_need_nccl);
  return check_done();
}
