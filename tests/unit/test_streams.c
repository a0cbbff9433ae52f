/* A stream that is destroyed while calls of other threads use it: they take effect before, or are refused; none reaches a stream that
 * gets the index later. The device holds calls back, and the manager's lock does. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <semaphore.h>
#include <time.h>

#include "../integration/world.h"
#include "chunk/arena.h"
#include "chunk/chunk.h"
#include "core/manager.h"
#include "core/streams.h"

#define W WORLD_CHUNK
enum { HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE, READ = GEMINI_READ, BOTH = GEMINI_READ_WRITE };

static world_t w;
static gmi_manager_t *m;
static gemini_tensor_t tensor;
static void start(void) {
  w = world_open(world_config(4, 8, 0));
  m = gmi_manager_get(w.mgr);
  tensor = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0), "t", 2 * W);
  world_fill(&w, tensor, 0, 2 * W, HOST, 1);
}

static uint32_t index_of(gemini_stream_t stream) {
  uint32_t index;
  CHECK_OK(gmi_stream_resolve(m, stream, &index));
  return index;
}
/* Is a line of the list of waits about this function and this? */
static bool waits(const char *function, const char *what) {
  static char text[16384];
  bool found = false;
  CHECK_OK(gemini_manager_dump(w.mgr, sizeof text, text, NULL));
  for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
    found |= !strncmp(line, "waits: ", 7) && strstr(line, function) && strstr(line, what);
  return found;
}
static void nap(void) { nanosleep(&(struct timespec){ 0, 1000000 }, NULL); }

/* ---- calls that are in the device when the stream is to be destroyed */
static const gmi_device_ops_t *real;
static gmi_device_ops_t held;
static sem_t go;
static atomic_bool inside, destroyed, ran;
static _Thread_local bool is_user;
static void hold_back(void) {
  if (!is_user) return;
  atomic_store(&inside, true);
  while (sem_wait(&go)) continue;
}
static gemini_status_t held_call(void *self, uint32_t stream, void (*fn)(void *user), void *user) {
  hold_back();
  return real->queue.call(self, stream, fn, user);
}
static gemini_status_t held_sync(void *self, uint32_t stream, uint64_t mark) {
  hold_back();
  return real->stream.sync(self, stream, mark);
}

static void run(void *user) {
  (void)user;
  atomic_store(&ran, true);
}
static void run_nothing(void *user) { (void)user; }
static void *call_thread(void *user) {
  is_user = true;
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, run, NULL));
  return user;
}
static void *synchronize_thread(void *user) {
  is_user = true;
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  return user;
}
static void *destroy_thread(void *user) {
  CHECK_OK(gemini_stream_destroy(w.mgr, w.stream));
  atomic_store(&destroyed, true);
  return user;
}
static void test_destroy_waits_for_calls_that_use_the_stream(void) {
  for (int calls = 0; calls < 2; calls++) {
    start();
    CHECK_EQ(sem_init(&go, 0, 0), 0);
    real = m->device.ops;
    held = *real;
    held.queue.call = held_call;
    held.stream.sync = held_sync;
    m->device.ops = &held;
    atomic_store(&inside, false);
    atomic_store(&destroyed, false);
    atomic_store(&ran, false);
    pthread_t user, destroyer;
    CHECK_EQ(pthread_create(&user, NULL, calls ? call_thread : synchronize_thread, NULL), 0);
    while (!atomic_load(&inside)) nap();
    CHECK_EQ(pthread_create(&destroyer, NULL, destroy_thread, NULL), 0);
    while (!waits("gemini_stream_destroy", "queued on stream") && !atomic_load(&destroyed)) nap();
    for (int i = 0; i < 20; i++) nap(); /* a wait for the stream's work, which is done, would end */
    CHECK(!atomic_load(&destroyed));
    gemini_status_t refused = GEMINI_OK; /* not yet while it waits for work of before, with the same words */
    for (int i = 0; !refused && i < 1000; i++, nap()) refused = gemini_stream_call(w.mgr, w.stream, run_nothing, NULL);
    CHECK_STATUS(refused, GEMINI_ERR_HANDLE);
    CHECK_EQ(sem_post(&go), 0);
    CHECK_EQ(pthread_join(user, NULL), 0);
    CHECK_EQ(pthread_join(destroyer, NULL), 0);
    CHECK_EQ(atomic_load(&ran), calls); /* what was queued is done once the stream is destroyed */
    CHECK_EQ(sem_destroy(&go), 0);
    m->device.ops = real;
    world_close(&w);
  }
}

/* ---- calls that wait for the lock while the stream is destroyed and its index gets a new one */
static gemini_status_t late_status;
static gemini_access_t late;
static void *acquire_thread(void *user) {
  late_status = gemini_acquire(w.mgr, &late, 1, w.stream);
  CHECK_EQ(world_error().status, late_status);
  return user;
}
static void *release_thread(void *user) {
  late_status = gemini_release(w.mgr, &late, 1, w.stream);
  return user;
}
static void *late_synchronize_thread(void *user) {
  late_status = gemini_stream_synchronize(w.mgr, w.stream);
  return user;
}
static void test_late_calls_do_not_reach_the_next_stream(void) {
  static const struct {
    const char *function;
    void *(*thread)(void *);
  } cases[] = { { "gemini_acquire", acquire_thread },
                { "gemini_release", release_thread },
                { "gemini_stream_synchronize", late_synchronize_thread } };
  for (int i = 0; i < 6; i++) {
    start();
    gemini_arena_t arena = world_tensor_info(&w, tensor).arena;
    late = world_part(arena, 0, W, READ, DEVICE); /* of an arena: its release takes the lock */
    bool acquired = !strcmp(cases[i % 3].function, "gemini_release");
    if (acquired) CHECK_OK(gemini_acquire(w.mgr, &late, 1, w.stream));
    uint32_t index = index_of(w.stream), next = index;
    gmi_lock(m, "test");
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, cases[i % 3].thread, NULL), 0);
    while (!waits(cases[i % 3].function, "lock")) nap();
    CHECK_OK(gmi_stream_end(m, index));
    if (i < 3) CHECK_OK(gmi_stream_open(m, false, NULL, &next));
    CHECK_EQ(next, index);
    uint64_t recorded = atomic_load(&m->streams[index].recorded);
    gmi_unlock(m);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(late_status, GEMINI_ERR_HANDLE);
    CHECK_EQ(atomic_load(&m->streams[index].recorded), recorded);
    if (acquired) CHECK_OK(gemini_release(w.mgr, &late, 1, GEMINI_STREAM_CALLER)); /* the refusal changed nothing */
    world_close(&w);
  }
}

/* ---- releases without the lock, which can be anywhere while their stream is destroyed */
static gmi_chunk_t *chunk_held(gemini_access_t *access) {
  *access = world_part(tensor, 0, W, BOTH, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, access, 1, GEMINI_STREAM_CALLER));
  gmi_range_t r;
  gmi_lock(m, "test");
  CHECK_OK(gmi_range_resolve(m, access, &r));
  gmi_unlock(m);
  return &r.store->chunks[r.first];
}
static void test_a_release_after_the_end_leaves_the_chunk_usable(void) {
  for (int reopened = 0; reopened < 2; reopened++) {
    start();
    gemini_stream_t other, next;
    CHECK_OK(gemini_stream_create(w.mgr, &other));
    uint32_t index = index_of(w.stream);
    gemini_access_t access;
    gmi_chunk_t *c = chunk_held(&access);
    CHECK_OK(gemini_stream_destroy(w.mgr, w.stream));
    CHECK_OK(gmi_chunk_use(m, c, BOTH, index, false)); /* as a release that looked its stream up before */
    CHECK_OK(gemini_release(w.mgr, &access, 1, GEMINI_STREAM_CALLER));
    if (reopened) CHECK_OK(gemini_stream_create(w.mgr, &next));
    CHECK_OK(gemini_acquire(w.mgr, &access, 1, other));
    CHECK_OK(gemini_release(w.mgr, &access, 1, other));
    CHECK(world_holds(&w, tensor, 0, 2 * W, 1)); /* on the host: the chunk could leave the device */
    world_close(&w);
  }
}

static void wait_for_go(void *user) {
  (void)user;
  while (sem_wait(&go)) continue;
}
/* Two streams that are at work have the chunk's places for fences, and the third user's stream is gone. */
static void test_a_release_after_the_end_forgets_no_work(void) {
  start();
  CHECK_EQ(sem_init(&go, 0, 0), 0);
  gemini_stream_t busy[2];
  uint32_t index = index_of(w.stream), indexes[2];
  gmi_fence_t before[GMI_CHUNK_FENCES], after[GMI_CHUNK_FENCES];
  gemini_access_t access;
  gmi_chunk_t *c = chunk_held(&access);
  for (int i = 0; i < 2; i++) {
    CHECK_OK(gemini_stream_create(w.mgr, &busy[i]));
    CHECK_OK(gemini_stream_call(w.mgr, busy[i], wait_for_go, NULL));
    indexes[i] = index_of(busy[i]);
    CHECK_OK(gmi_chunk_use(m, c, BOTH, indexes[i], false));
  }
  CHECK_OK(gemini_stream_destroy(w.mgr, w.stream));
  uint32_t count = gmi_chunk_fences(c, BOTH, before);
  CHECK_OK(gmi_chunk_use(m, c, BOTH, index, false));
  CHECK_EQ(gmi_chunk_fences(c, BOTH, after), count);
  uint32_t found = 0;
  for (uint32_t i = 0; i < count; i++) {
    CHECK_EQ(after[i], before[i]);
    for (int k = 0; k < 2; k++) found += before[i] && gmi_fence_stream(before[i]) == indexes[k];
  }
  CHECK_EQ(found, 2);
  for (int i = 0; i < 2; i++) CHECK_EQ(sem_post(&go), 0);
  CHECK_OK(gemini_release(w.mgr, &access, 1, GEMINI_STREAM_CALLER));
  CHECK(world_holds(&w, tensor, 0, 2 * W, 1));
  world_close(&w);
  CHECK_EQ(sem_destroy(&go), 0);
}

static gemini_status_t refuse(void *self, uint32_t stream) {
  (void)self, (void)stream;
  return gmi_fail(GEMINI_ERR_DEVICE, 7, "planted");
}
static void test_a_stream_that_cannot_be_destroyed_is_used_on(void) {
  start();
  gmi_device_ops_t broken = *m->device.ops;
  real = m->device.ops;
  broken.stream.destroy = refuse;
  m->device.ops = &broken;
  CHECK_STATUS(gemini_stream_destroy(w.mgr, w.stream), GEMINI_ERR_DEVICE);
  m->device.ops = real;
  atomic_store(&ran, false);
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, run, NULL));
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK(atomic_load(&ran));
  CHECK_OK(gemini_stream_destroy(w.mgr, w.stream));
  CHECK_STATUS(gemini_stream_call(w.mgr, w.stream, run, NULL), GEMINI_ERR_HANDLE);
  world_close(&w);
}

/* ---- creation */
static void test_a_stream_without_a_thread_says_why(void) {
  start();
  pthread_attr_t before, large;
  gemini_stream_t stream;
  CHECK_EQ(pthread_getattr_default_np(&before), 0);
  CHECK_EQ(pthread_attr_init(&large), 0);
  CHECK_EQ(pthread_attr_setstacksize(&large, (size_t)1 << 50), 0); /* more than there are addresses */
  CHECK_EQ(pthread_setattr_default_np(&large), 0);
  gemini_status_t status = gemini_stream_create(w.mgr, &stream);
  CHECK_EQ(pthread_setattr_default_np(&before), 0);
  CHECK_EQ(status, GEMINI_ERR_OOM_SYSTEM);
  CHECK_SAYS(world_error().message, "device simulated could not create a stream: could not start a thread: ");
  CHECK(world_error().native_code == EAGAIN || world_error().native_code == EINVAL); /* EINVAL: under Valgrind */
  CHECK_EQ(pthread_attr_destroy(&large), 0);
  CHECK_OK(gemini_stream_create(w.mgr, &stream));
  world_close(&w);
}

/* ---- threads that race */
enum { USERS = 3, ROUNDS = 300 };
static _Atomic(gemini_stream_t) current;
static atomic_bool stop;
static void *race_thread(void *user) {
  uint64_t refused = 0, taken = 0, tries = (uint64_t)(uintptr_t)user;
  gemini_access_t a = world_part(tensor, (tries & 1) * W, W, tries & 2 ? BOTH : READ, DEVICE);
  for (; !atomic_load(&stop); tries++) {
    gemini_stream_t stream = atomic_load(&current);
    gemini_status_t status = tries % 3 == 0   ? gemini_stream_call(w.mgr, stream, run, NULL)
                             : tries % 3 == 1 ? gemini_stream_synchronize(w.mgr, stream)
                                              : gemini_acquire(w.mgr, &a, 1, stream);
    if (tries % 3 == 2 && !status && gemini_release(w.mgr, &a, 1, stream)) {
      CHECK_EQ(world_error().status, GEMINI_ERR_HANDLE);
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    if (status) CHECK_STATUS(status, GEMINI_ERR_HANDLE);
    refused += status != GEMINI_OK;
    taken += status == GEMINI_OK;
  }
  CHECK(refused + taken);
  return NULL;
}
static void test_calls_race_with_destroy_and_create(void) {
  start();
  gemini_stream_t stream = w.stream;
  atomic_store(&current, stream);
  atomic_store(&stop, false);
  pthread_t threads[USERS];
  for (uintptr_t i = 0; i < USERS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, race_thread, (void *)i), 0);
  for (int i = 0; i < ROUNDS; i++) {
    CHECK_OK(gemini_stream_destroy(w.mgr, stream));
    CHECK_OK(gemini_stream_create(w.mgr, &stream));
    atomic_store(&current, stream);
    nanosleep(&(struct timespec){ 0, 100000 }, NULL);
  }
  atomic_store(&stop, true);
  for (int i = 0; i < USERS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  CHECK(world_holds(&w, tensor, 0, 2 * W, 1));
  world_close(&w);
}

int main(void) {
  RUN(test_destroy_waits_for_calls_that_use_the_stream);
  RUN(test_late_calls_do_not_reach_the_next_stream);
  RUN(test_a_release_after_the_end_leaves_the_chunk_usable);
  RUN(test_a_release_after_the_end_forgets_no_work);
  RUN(test_a_stream_that_cannot_be_destroyed_is_used_on);
  RUN(test_a_stream_without_a_thread_says_why);
  RUN(test_calls_race_with_destroy_and_create);
  return check_done();
}
