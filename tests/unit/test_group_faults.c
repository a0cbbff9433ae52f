/* Groups, and updates on the host, on a device that refuses a call: nothing is added twice, forgotten or taken for done,
 * and other ranks hear of what cannot be made good. SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <pthread.h>
#include <time.h>

#include "../fork.h"
#include "../integration/world.h"
#include "core/manager.h"
#include "gemini/group.h"

#define DEVICE GEMINI_TIER_DEVICE
#define HOST GEMINI_TIER_HOST
enum { CHUNKS = 3, ELEMENTS = CHUNKS * WORLD_CHUNK / 4 };

/* ---- a device that refuses a call: the one behind `countdown` others of its kind */
typedef enum { COPY, ADD, MARK, WAIT, KINDS } kind_t;
static const gmi_device_ops_t *real;
static gmi_device_ops_t faulty;
static _Atomic kind_t fault;
static _Atomic int64_t countdown = -1; /* negative: none is refused */
static _Atomic bool refused;

static bool refuses(kind_t kind) {
  if (kind != fault || countdown < 0 || countdown-- > 0) return false;
  refused = true;
  return true;
}
static gemini_status_t refusal(void) { return gmi_fail(GEMINI_ERR_DEVICE, 0, "the test's device refuses"); }
static gemini_status_t copy(void *self, uint32_t stream, void *to, const void *from, uint64_t size, uint32_t kind) {
  return refuses(COPY) ? refusal() : real->queue.copy(self, stream, to, from, size, kind);
}
static gemini_status_t add(void *self, uint32_t stream, void *to, const void *from, uint32_t dtype, uint64_t count) {
  return refuses(ADD) ? refusal() : real->queue.add(self, stream, to, from, dtype, count);
}
static gemini_status_t mark(void *self, uint32_t stream, uint64_t *mark_out) {
  return refuses(MARK) ? refusal() : real->stream.mark(self, stream, mark_out);
}
static gemini_status_t await(void *self, uint32_t stream, uint32_t other, uint64_t at) {
  return refuses(WAIT) ? refusal() : real->stream.wait(self, stream, other, at);
}
/* Puts the functions above in the place of the device's. No thread of the manager has work that would call them yet. */
static void interpose(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!real) {
    real = m->device.ops;
    faulty = *real;
    faulty.queue.copy = copy;
    faulty.queue.add = add;
    faulty.stream.mark = faulty.stream.mark_untimed = mark;
    faulty.stream.wait = await;
  }
  m->device.ops = &faulty;
}
static void refuse(kind_t kind, int64_t after) {
  refused = false;
  fault = kind;
  countdown = after;
}
static bool refused_one(void) {
  countdown = -1;
  return refused;
}

/* ---- a rank: parameters, and gradients with sums of their own */
typedef struct {
  world_t w;
  gemini_arena_t params, grads;
  gemini_tensor_t param, grad;
} rank_t;

static rank_t rank_open(const gemini_group_id_t *id, uint32_t rank, uint32_t ranks) {
  rank_t k = { .w = world_open(world_config(16, 16, 0)) };
  gemini_group_config_t g = GEMINI_GROUP_CONFIG_INIT;
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  interpose(k.w.mgr);
  g.id = id;
  g.rank = rank;
  g.ranks = ranks;
  g.deadline_ns = UINT64_C(60000000000);
  CHECK_OK(gemini_group_open(k.w.mgr, &g, &a.group));
  a.element_bytes = 4;
  a.zero_stage = GEMINI_ZERO_PARAMS;
  CHECK_OK(gemini_arena_create(k.w.mgr, &a, &k.params));
  a.group = NULL;
  a.zero_stage = 0;
  a.kind = GEMINI_KIND_GRAD;
  a.like = k.params;
  a.dtype = GEMINI_DTYPE_F32;
  CHECK_OK(gemini_arena_create(k.w.mgr, &a, &k.grads));
  k.param = world_tensor(&k.w, k.params, "parameters", ELEMENTS * 4);
  CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.param, k.grads, &k.grad));
  return k;
}
static gemini_group_id_t id_of(uint32_t ranks) {
  gemini_group_id_t id;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, ranks, &id));
  return id;
}
static void rank_close(rank_t *k) { /* a failed group's streams have failed, too */
  gemini_status_t status = gemini_manager_close(k->w.mgr);
  if (status && status != GEMINI_ERR_PEER && status != GEMINI_ERR_DEVICE) CHECK_OK(status);
}

/* A round of gradients: ones. */
static void write_gradients(rank_t *k) {
  gemini_access_t use = world_whole(k->grad, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < ELEMENTS; i++) ((float *)use.ptr)[i] += 1;
  CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
}
static gemini_status_t norm(rank_t *k, double *norm_out) {
  gemini_access_t all = world_whole(k->grads, 0, 0);
  return gemini_norm(k->w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, norm_out);
}

/* The second round is added to the first; it may be refused anywhere. Then the sums are right once the call is made
 * again, or the group says that it gave up. */
static void test_sums_that_the_device_refuses_are_never_added_twice(void) {
  uint64_t again = 0, gave_up = 0;
  for (kind_t kind = COPY; kind < KINDS; kind++) {
    bool more = true;
    for (int64_t after = 0; more; after++) {
      gemini_group_id_t id = id_of(1);
      rank_t k = rank_open(&id, 0, 1);
      double found = 0;
      write_gradients(&k);
      CHECK_OK(norm(&k, &found));
      CHECK(found == sqrt(ELEMENTS));
      write_gradients(&k);
      refuse(kind, after);
      gemini_status_t status = norm(&k, &found);
      more = refused_one();
      if (status) {
        CHECK_STATUS(status, GEMINI_ERR_DEVICE);
        status = norm(&k, &found);
        again += !status;
        gave_up += status != GEMINI_OK;
        if (status) CHECK_SAYS(world_error().message, "gave up: ");
      }
      if (!status) CHECK(found == sqrt(4.0 * ELEMENTS));
      rank_close(&k);
    }
  }
  CHECK(again && gave_up);
}

/* Rank 1 has gathered a chunk with the others, and cannot say when it has come: it cannot gather it again. */
static void test_ranks_hear_of_a_gather_that_one_cannot_go_on_with(void) {
  gemini_group_id_t id = id_of(2);
  pid_t child = fork_child();
  rank_t k = rank_open(&id, !child, 2);
  gemini_access_t all = world_whole(k.param, GEMINI_WRITE, HOST);
  uint64_t offset, size;
  CHECK_OK(gemini_slice_next(k.w.mgr, &all, 0, &offset, &size));
  world_fill(&k.w, k.param, offset, size, HOST, 3);
  gemini_access_t use = world_whole(k.param, GEMINI_READ, DEVICE);
  gemini_status_t status = GEMINI_OK;
  bool gave_up = false;
  for (int64_t after = 0; !gave_up && after < 40; after++) { /* marks from before the collective to behind it */
    if (!child) refuse(MARK, after);
    for (int tries = 0; tries < 2; tries++) {
      status = gemini_acquire(k.w.mgr, &use, 1, k.w.stream);
      if (status != GEMINI_ERR_DEVICE) break;
    }
    if (!child) (void)refused_one();
    if (!status) status = gemini_release(k.w.mgr, &use, 1, k.w.stream);
    if (!status) status = gemini_stream_synchronize(k.w.mgr, k.w.stream);
    gave_up = status;
  }
  CHECK(gave_up);
  if (status == GEMINI_ERR_DEVICE) status = gemini_acquire(k.w.mgr, &use, 1, k.w.stream); /* its stream has failed */
  CHECK_STATUS(status, GEMINI_ERR_PEER);
  CHECK_SAYS(world_error().message, "rank 1 gave up: ");
  CHECK_SAYS(world_error().message, "the test's device refuses");
  rank_close(&k);
  if (!child) exit(0);
  fork_expect_end(child);
}

/* ---- work on slots */
typedef struct {
  _Atomic bool open;
} gate_t;
static void pass(void *user) {
  gate_t *gate = user;
  while (!atomic_load(&gate->open)) nanosleep(&(struct timespec){ 0, 100000 }, NULL);
}
static void *open_later(void *user) {
  nanosleep(&(struct timespec){ 0, 100000000 }, NULL);
  atomic_store(&((gate_t *)user)->open, true);
  return NULL;
}
static void fill(void *user) { world_write(user, 0, WORLD_CHUNK, 9); }

/* A stream is to write a slice in host memory. A gather that the device refuses behind it must not make the next user of
 * the slice take it for written. */
static void test_a_gather_that_is_refused_leaves_work_on_its_slices_known(void) {
  for (kind_t kind = COPY; kind < KINDS; kind++)
    for (int64_t after = 0; after < 3; after++) {
      gemini_group_id_t id = id_of(1);
      rank_t k = rank_open(&id, 0, 1);
      gate_t gate = { false };
      gemini_access_t slice = world_part(k.param, 0, WORLD_CHUNK, GEMINI_WRITE, HOST);
      gemini_access_t use = world_whole(k.param, GEMINI_READ, DEVICE);
      pthread_t opener;
      world_fill(&k.w, k.param, 0, WORLD_CHUNK, HOST, 3);
      CHECK_OK(gemini_acquire(k.w.mgr, &slice, 1, k.w.stream));
      CHECK_OK(gemini_stream_call(k.w.mgr, k.w.stream, pass, &gate));
      CHECK_OK(gemini_stream_call(k.w.mgr, k.w.stream, fill, slice.ptr));
      CHECK_OK(gemini_release(k.w.mgr, &slice, 1, k.w.stream));
      refuse(kind, after);
      gemini_status_t status = gemini_acquire(k.w.mgr, &use, 1, k.w.stream);
      (void)refused_one();
      if (!status) CHECK_OK(gemini_release(k.w.mgr, &use, 1, k.w.stream));
      CHECK(!pthread_create(&opener, NULL, open_later, &gate));
      slice.mode = GEMINI_READ;
      CHECK_OK(gemini_acquire(k.w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
      CHECK(world_reads(slice.ptr, 0, WORLD_CHUNK, 9));
      CHECK_OK(gemini_release(k.w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
      CHECK(!pthread_join(opener, NULL));
      world_close(&k.w);
    }
}

static void add_one(void *user, const gemini_update_span_t *span) {
  (void)user;
  for (uint64_t i = 0; i < span->element_count; i++) ((float *)span->ptr[0])[i] += 1;
}
/* The copy to the device could not be queued, or its mark not be placed: that is made good before a worker, which cannot
 * place it, waits for the slot. */
static void test_an_update_runs_behind_a_fetch_that_was_refused(void) {
  for (kind_t kind = COPY; kind < KINDS; kind++)
    for (int64_t after = 0; after < 3; after++) {
      world_t w = world_open(world_config(8, 16, 0));
      interpose(w.mgr);
      gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
      gemini_tensor_t t = world_tensor(&w, arena, "t", WORLD_CHUNK);
      gemini_access_t use = world_whole(t, GEMINI_WRITE, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      memset(use.ptr, 0, WORLD_CHUNK);
      CHECK_OK(gemini_release(w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      use = world_whole(t, GEMINI_READ, DEVICE);
      refuse(kind, after);
      gemini_status_t status = gemini_acquire(w.mgr, &use, 1, w.stream);
      (void)refused_one();
      if (!status) CHECK_OK(gemini_release(w.mgr, &use, 1, w.stream));
      const uint32_t mode = GEMINI_READ_WRITE;
      gemini_update_t u = GEMINI_UPDATE_INIT;
      u.arenas = &arena;
      u.modes = &mode;
      u.arena_count = 1;
      u.fn = add_one;
      CHECK_OK(gemini_update(w.mgr, &u));
      use = world_whole(t, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      for (uint64_t i = 0; i < WORLD_CHUNK / 4; i++) CHECK(((float *)use.ptr)[i] == 1);
      CHECK_OK(gemini_release(w.mgr, &use, 1, GEMINI_STREAM_CALLER));
      world_close(&w);
    }
}

int main(void) {
  RUN(test_sums_that_the_device_refuses_are_never_added_twice);
  RUN(test_ranks_hear_of_a_gather_that_one_cannot_go_on_with);
  RUN(test_a_gather_that_is_refused_leaves_work_on_its_slices_known);
  RUN(test_an_update_runs_behind_a_fetch_that_was_refused);
  return check_done();
}
