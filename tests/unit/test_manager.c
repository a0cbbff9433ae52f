/* Managers' handles, with the library's internals. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <sched.h>

#include "../integration/world.h"
#include "chunk/chunk.h"
#include "chunk/hook.h"
#include "core/manager.h"
#include "core/streams.h"
#include "gemini/hook.h"

enum { SERIALS = 4096 /* as many managers later, handles of objects name the manager alike */ };

typedef struct {
  world_t w;
  gemini_arena_t arena;
  gemini_tensor_t tensor, second;
} objects_t;

static objects_t objects_open(void) {
  objects_t o = { .w = world_open(world_config(2, 2, 0)) };
  o.arena = world_arena(&o.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  for (int i = 0; i < 3; i++) { /* the second lies in a place that has been used before */
    if (i) CHECK_OK(gemini_tensor_unregister(o.w.mgr, o.second));
    CHECK_OK(gemini_tensor_register(o.w.mgr, o.arena, "second", 64, GEMINI_OFFSET_NEXT, &o.second));
  }
  o.tensor = world_tensor(&o.w, o.arena, "first", 64);
  return o;
}

static void check_dead(const objects_t *o, gemini_manager_t mgr) {
  gemini_arena_info_t arena = GEMINI_ARENA_INFO_INIT;
  gemini_tensor_info_t tensor = GEMINI_TENSOR_INFO_INIT;
  CHECK_EQ(gemini_arena_info(mgr, o->arena, &arena), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_tensor_info(mgr, o->tensor, &tensor), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_tensor_info(mgr, o->second, &tensor), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_stream_synchronize(mgr, o->w.stream), GEMINI_ERR_HANDLE);
}

/* Handles have twelve bits for the number of their manager; a manager that has them in common with an earlier one knows
 * none of its objects. */
static void test_handles_of_closed_managers_stay_dead(void) {
  enum { MANAGERS = 4 };
  objects_t gone[MANAGERS];
  for (int i = 0; i < MANAGERS; i++) {
    gone[i] = objects_open();
    CHECK_EQ(handle_id(gone[i].w.mgr) >> 42, handle_id(gone[0].w.mgr) >> 42); /* what is tested */
    for (int k = 0; k < i; k++) {
      CHECK(gone[i].w.mgr != gone[k].w.mgr);
      check_dead(&gone[k], gone[i].w.mgr);
    }
    world_close(&gone[i].w);
    gmi_manager_serial += SERIALS - 1;
  }
}

/* Each tensor's place has so many generations; a manager that used them up leaves none for a later one of the same
 * number. */
static void test_numbers_whose_generations_are_used_up_are_not_given_again(void) {
  world_t w = world_open(world_config(2, 2, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(w.mgr, arena, 64, &offset));
  gemini_tensor_t tensor;
  for (uint32_t i = 0; i < GMI_TENSOR_GENERATIONS; i++) {
    CHECK_OK(gemini_tensor_register(w.mgr, arena, "again", 64, 0, &tensor));
    CHECK_OK(gemini_tensor_unregister(w.mgr, tensor));
  }
  const uint64_t used_up = handle_id(w.mgr) >> 42;
  world_close(&w);
  gmi_manager_serial += SERIALS - 1;
  w = world_open(world_config(2, 2, 0));
  CHECK(handle_id(w.mgr) >> 42 != used_up);
  world_close(&w);
}

/* ---- tensors while arenas are cut anew */
typedef struct {
  world_t w;
  gemini_access_t access;
  _Atomic bool acquired;
} frozen_t;
static void *acquire_frozen(void *user) {
  frozen_t *f = user;
  CHECK_OK(gemini_acquire(f->w.mgr, &f->access, 1, f->w.stream));
  atomic_store(&f->acquired, true);
  return NULL;
}
/* Who cuts arenas holds the lock and freezes tensors: an acquire that needs no lock otherwise waits for it. */
static void test_an_acquire_waits_for_the_lock_while_its_tensor_is_frozen(void) {
  static char text[8192];
  frozen_t f = { .w = world_open(world_config(4, 8, 0)) };
  gemini_arena_t arena = world_arena(&f.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_tensor_t t = world_tensor(&f.w, arena, "t", WORLD_CHUNK);
  for (int part = 0; part < 2; part++) {
    f.access = world_part(t, 0, part ? 64 : WORLD_CHUNK, GEMINI_READ, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_acquire(f.w.mgr, &f.access, 1, f.w.stream)); /* its chunk comes, and stays */
    CHECK_OK(gemini_release(f.w.mgr, &f.access, 1, f.w.stream));
    gmi_manager_t *m = gmi_manager_get(f.w.mgr);
    gmi_tensor_t *record = &m->tensors.at[handle_id(t) & (GMI_TENSORS - 1)];
    atomic_store(&f.acquired, false);
    gmi_lock(m, "the_cut");
    CHECK(!(atomic_fetch_or(&record->word, GMI_TENSOR_FROZEN) & GMI_TENSOR_USERS));
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, acquire_frozen, &f), 0);
    do { /* until it waits */
      CHECK(!atomic_load(&f.acquired));
      CHECK_OK(gemini_manager_dump(f.w.mgr, sizeof text, text, NULL));
    } while (!strstr(text, "in gemini_acquire() for the manager's lock, which the_cut()"));
    CHECK(!(atomic_load(&record->word) & GMI_TENSOR_USERS));
    atomic_fetch_and(&record->word, ~GMI_TENSOR_FROZEN);
    gmi_unlock(m);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_OK(gemini_release(f.w.mgr, &f.access, 1, f.w.stream));
  }
  world_close(&f.w);
}

/* ---- an arena that is destroyed while a tensor is released */
static struct {
  const gmi_device_ops_t *real;
  world_t w;
  gemini_access_t access;
  uint64_t look_ns;            /* time that destroy takes for its look at all chunks */
  _Atomic int round, finished; /* begun; ended by the other thread */
  _Atomic bool over, stop;     /* over: destroy has returned */
  _Atomic bool acquired;       /* in this round */
} race;
static _Thread_local bool race_releases;
static bool race_reached(void *self, uint32_t stream, uint64_t mark) {
  while (race_releases && !atomic_load(&race.over)) sched_yield(); /* the tensor's user has gone, the chunk's has not */
  return race.real->stream.reached(self, stream, mark);
}
static void *race_thread(void *user) {
  uint64_t random = 7;
  (void)user;
  for (int round = 1;; round++) {
    while (atomic_load(&race.round) < round && !atomic_load(&race.stop)) {
    }
    if (atomic_load(&race.stop)) return NULL;
    uint64_t wait_ns = (check_random(&random) >> 11) % race.look_ns, begin = now_ns();
    while (now_ns() - begin < wait_ns) {
    }
    gemini_access_t a = race.access;
    if (gemini_acquire(race.w.mgr, &a, 1, race.w.stream)) {
      CHECK_EQ(world_error().status, GEMINI_ERR_HANDLE); /* destroy came first */
    } else {
      atomic_store(&race.acquired, true);
      race_releases = true;
      CHECK_OK(gemini_release(race.w.mgr, &a, 1, race.w.stream));
      race_releases = false;
    }
    atomic_store(&race.finished, round);
  }
}
static void test_an_arena_is_not_destroyed_in_the_middle_of_a_release(void) {
  enum { ROUNDS = 30, CHUNKS = 65536 }; /* so many that a look at all takes a while */
  gemini_stream_t other;
  gemini_arena_t arena = NULL;
  gemini_tensor_t t = NULL;
  race.w = world_open(world_config(4, 8, 0));
  CHECK_OK(gemini_stream_create(race.w.mgr, &other));
  gmi_manager_t *m = gmi_manager_get(race.w.mgr);
  gmi_device_ops_t ops = *m->device.ops;
  race.real = m->device.ops;
  ops.stream.reached = race_reached;
  m->device.ops = &ops;
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, race_thread, NULL), 0);
  for (int round = 1; round <= ROUNDS; round++) {
    if (!arena) {
      gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
      c.name = "main";
      c.capacity_bytes = CHUNKS * WORLD_CHUNK;
      CHECK_OK(gemini_arena_create(race.w.mgr, &c, &arena));
      t = world_tensor(&race.w, arena, "t", 64);
      uint64_t offset;
      CHECK_OK(gemini_arena_take(race.w.mgr, arena, CHUNKS * WORLD_CHUNK - 4096, &offset));
      race.access = world_whole(t, GEMINI_READ, GEMINI_TIER_DEVICE);
    }
    if (round == 1) {
      gemini_access_t last = world_part(arena, (CHUNKS - 1) * WORLD_CHUNK, 64, 0, GEMINI_TIER_DEVICE);
      CHECK_OK(gemini_pin(race.w.mgr, &last));
      uint64_t begin = now_ns();
      CHECK_STATUS(gemini_arena_destroy(race.w.mgr, arena), GEMINI_ERR_BUSY);
      race.look_ns = now_ns() - begin;
      CHECK_OK(gemini_unpin(race.w.mgr, &last));
    }
    /* A use on another stream: a release looks whether it has been reached. */
    CHECK_OK(gemini_acquire(race.w.mgr, &race.access, 1, other));
    CHECK_OK(gemini_release(race.w.mgr, &race.access, 1, other));
    atomic_store(&race.over, false);
    atomic_store(&race.acquired, false);
    atomic_store(&race.round, round);
    gemini_status_t status = gemini_arena_destroy(race.w.mgr, arena);
    atomic_store(&race.over, true);
    while (atomic_load(&race.finished) < round) sched_yield();
    if (status) CHECK_EQ(status, GEMINI_ERR_BUSY);
    else CHECK(!atomic_load(&race.acquired)); /* it could not have been released before */
    if (!status) arena = NULL;
  }
  atomic_store(&race.stop, true);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  m->device.ops = race.real;
  world_close(&race.w);
}

/* ---- limits of a chunk's users */
static void test_the_last_user_that_a_chunk_can_have_is_its_last(void) {
  gmi_chunk_t c;
  gmi_chunk_init(&c, 0, 0, false);
  atomic_store(&c.word_, GMI_CHUNK_USERS - 1);
  CHECK(!gmi_chunk_hold_device(NULL, &c, GEMINI_READ));
  CHECK_EQ(atomic_load(&c.word_), GMI_CHUNK_USERS);
  CHECK_SAYS(gmi_chunk_hold_device(NULL, &c, GEMINI_READ), "acquired 65535 times");
  CHECK_EQ(atomic_load(&c.word_), GMI_CHUNK_USERS); /* the next field is the writers' */
  atomic_store(&c.word_, GMI_CHUNK_WRITERS - GMI_CHUNK_WRITER + 1);
  CHECK(!gmi_chunk_hold_device(NULL, &c, GEMINI_READ_WRITE));
  CHECK_SAYS(gmi_chunk_hold_device(NULL, &c, GEMINI_WRITE), "for writing 8191 times");
  CHECK_EQ(atomic_load(&c.word_), GMI_CHUNK_WRITERS + 2);
}

/* ---- a block of a hook that is freed while its manager closes */
static struct {
  void (*drain)(gmi_manager_t *m);
  void *block;
} late;
static void free_late(gmi_manager_t *m) {
  gemini_torch_free(late.block, 512, 0, NULL); /* close has taken the manager from the table */
  late.drain(m);
}
static void test_a_free_while_the_manager_closes_is_counted(void) {
  world_t w = world_open(world_config(4, 8, 0));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  void *aside = gemini_torch_malloc(512, 0, NULL), *base = m->nonmodel.base;
  CHECK(aside && (late.block = gemini_torch_malloc(512, 0, NULL)));
  uint64_t range = m->nonmodel.range;
  gmi_lock(m, __func__);
  gemini_torch_free(aside, 512, 0, NULL); /* put aside, so that the next lock has something to do */
  late.drain = m->hook.when_locked;
  m->hook.when_locked = free_late;
  gmi_unlock(m);
  gmi_hook_close(m);
  CHECK(!gmi_hook_left(base, range)); /* all is freed: a later manager may have these addresses */
  world_close(&w);
}

/* ---- failures of asynchronous work */
static bool never_reached(void *self, uint32_t stream, uint64_t mark) {
  (void)self, (void)stream, (void)mark;
  return false;
}
static gemini_status_t no_wait(void *self, uint32_t stream, uint32_t on, uint64_t mark) {
  (void)self, (void)stream, (void)on, (void)mark;
  return gmi_fail(GEMINI_ERR_DEVICE, 2, "the second");
}
static void test_the_first_failure_of_asynchronous_work_is_reported(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  const gmi_device_ops_t *real = m->device.ops;
  gmi_device_ops_t broken = *real;
  broken.stream.reached = never_reached;
  broken.stream.wait = no_wait;
  gmi_lock(m, __func__);
  m->failure.status = GEMINI_ERR_IO;
  snprintf(m->failure.message, sizeof m->failure.message, "the first");
  gmi_fence_t a, b;
  CHECK_OK(gmi_fence_now(m, gmi_link_in(m)->stream, &a));
  CHECK_OK(gmi_fence_now(m, gmi_link_out(m)->stream, &b));
  m->device.ops = &broken;
  CHECK_EQ(gmi_fence_join(m, a, b), 0);
  m->device.ops = real;
  gmi_unlock(m);
  CHECK_STATUS(gemini_manager_close(w.mgr), GEMINI_ERR_IO);
  CHECK_SAYS(world_error().message, "the first");
}

/* ---- a device that has less than the budget */
static gemini_status_t no_frame(void *self, uint64_t size_bytes, uint64_t *frame_out) {
  (void)self, (void)size_bytes, (void)frame_out;
  return gmi_fail(GEMINI_ERR_OOM_DEVICE, 2, "it is full");
}
static void test_a_batch_that_the_device_refuses_does_not_blame_the_budget(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 2 * WORLD_CHUNK);
  gemini_access_t a = world_whole(t, GEMINI_READ, GEMINI_TIER_DEVICE);
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  const gmi_device_ops_t *real = m->device.ops;
  gmi_device_ops_t full = *real;
  full.memory.frame_create = no_frame;
  m->device.ops = &full;
  CHECK_EQ(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_OOM_DEVICE);
  m->device.ops = real;
  CHECK_SAYS(world_error().message,
             "the batch needs 131072 more bytes of device memory: the device could not create a");
  CHECK(!strstr(world_error().message, "budget"));
  world_close(&w);
}

/* ---- the end of all handles: of the one place that is free, every number has had all generations */
static void test_manager_without_a_handle_left_is_told_from_too_many(void) {
  enum { TAKEN = GMI_MANAGERS - 1 };
  gmi_manager_t *taken[TAKEN + 1];
  gemini_config_t c = world_config(2, 2, 0);
  gemini_manager_t mgr = NULL;
  bool full = true;
  for (int i = 0; i <= TAKEN; i++) { /* managers that are nothing but handles */
    CHECK((taken[i] = calloc(1, sizeof *taken[i])));
    if (i < TAKEN) CHECK(gmi_manager_enter(taken[i], &full));
  }
  uint32_t given = 0;
  for (; gmi_manager_enter(taken[TAKEN], &full); given++) {
    taken[TAKEN]->identity.generation_before = GMI_TENSOR_GENERATIONS;
    gmi_manager_leave(taken[TAKEN]);
  }
  CHECK(!full && given >= SERIALS - 8); /* earlier tests have used some up */
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "this process has used all handles");
  CHECK(!mgr);
  for (int i = 0; i < TAKEN; i++) gmi_manager_leave(taken[i]);
  for (int i = 0; i <= TAKEN; i++) free(taken[i]);
  world_t w = world_open(c);
  world_close(&w);
}

/* A GPU's copy must lie within one part of host memory: gemini_host_alloc() says how a caller keeps to that. */
static void test_parts_of_host_memory_begin_where_the_header_says(void) {
  const uint64_t mib = UINT64_C(1) << 20, chunks[] = { 65536, 2 * mib };
  for (int i = 0; i < 2; i++)
    for (uint64_t host_bytes = 8 * mib; host_bytes <= 512 * mib; host_bytes *= 8) { /* small pages, huge ones */
      gemini_config_t c = GEMINI_CONFIG_INIT;
      gemini_manager_t mgr;
      c.device_bytes = 8 * mib, c.host_bytes = host_bytes, c.chunk_bytes = chunks[i];
      CHECK_OK(gemini_manager_open(&c, &mgr));
      const gmi_manager_t *m = gmi_manager_get(mgr);
      CHECK_EQ((uintptr_t)m->host.base % mib, 0);
      CHECK_EQ(m->host.part_bytes % mib, 0);
      for (uint64_t size = 4096; size <= mib; size *= 2) {
        void *block;
        CHECK_OK(gemini_host_alloc(mgr, size - 5, size, &block));
        const uint64_t at = (uint64_t)((uint8_t *)block - m->host.base);
        CHECK_EQ(at / m->host.part_bytes, (at + size - 6) / m->host.part_bytes);
      }
      CHECK_OK(gemini_manager_close(mgr));
    }
}

int main(void) {
  RUN(test_handles_of_closed_managers_stay_dead);
  RUN(test_numbers_whose_generations_are_used_up_are_not_given_again);
  RUN(test_an_acquire_waits_for_the_lock_while_its_tensor_is_frozen);
  RUN(test_an_arena_is_not_destroyed_in_the_middle_of_a_release);
  RUN(test_the_last_user_that_a_chunk_can_have_is_its_last);
  RUN(test_a_free_while_the_manager_closes_is_counted);
  RUN(test_the_first_failure_of_asynchronous_work_is_reported);
  RUN(test_a_batch_that_the_device_refuses_does_not_blame_the_budget);
  RUN(test_manager_without_a_handle_left_is_told_from_too_many);
  RUN(test_parts_of_host_memory_begin_where_the_header_says);
  return check_done();
}
