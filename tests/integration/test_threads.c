/* Several threads and streams in one manager: nothing is lost, nothing is mixed up, errors stay with their thread. Meant
 * for the thread sanitizer as much as for its own checks. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 6, OWN = 4, SHARED = 4 };
#define WORLD_MORE                                                \
  gemini_arena_t arena; /* of byte elements */                    \
  gemini_tensor_t shared[SHARED];                                 \
  gemini_tensor_t own[THREADS][OWN]; /* a chunk each */           \
  gemini_arena_t arenas[THREADS];    /* in the test of updates */ \
  pthread_mutex_t lock;                                           \
  _Atomic bool stop;
#include "world.h"

#define OK(call) CHECK_OK(call)
#define CHUNK WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };

static gemini_config_t config_of(uint64_t device_chunks, uint64_t host_chunks, uint64_t file_chunks) {
  gemini_config_t c = world_config(device_chunks, host_chunks, file_chunks);
  c.update_threads = 2;
  return c;
}

static gemini_arena_t arena_of(gemini_manager_t mgr, gemini_arena_t like, const char *name) {
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t arena;
  a.kind = GEMINI_KIND_OTHER;
  a.capacity_bytes = 512 * CHUNK;
  a.like = like;
  a.name = name;
  OK(gemini_arena_create(mgr, &a, &arena));
  return arena;
}
static gemini_tensor_t tensor_of(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size, const char *kind, int a,
                                 int b) {
  char name[64];
  gemini_tensor_t t;
  snprintf(name, sizeof name, "%s.%d.%d", kind, a, b);
  OK(gemini_tensor_register(mgr, arena, name, size, GEMINI_OFFSET_NEXT, &t));
  return t;
}

static void threads_open(world_t *w, gemini_config_t c) {
  *w = world_open(c);
  CHECK_EQ(pthread_mutex_init(&w->lock, NULL), 0);
  w->arena = arena_of(w->mgr, 0, "main");
}
static void threads_close(world_t *w) {
  world_close(w);
  pthread_mutex_destroy(&w->lock);
}

static void fill(void *at, uint64_t words, uint64_t seed) {
  for (uint64_t i = 0; i < words; i++) ((uint64_t *)at)[i] = seed * 1000003 + i;
}
static bool filled(const void *at, uint64_t words, uint64_t seed) {
  for (uint64_t i = 0; i < words; i++)
    if (((const uint64_t *)at)[i] != seed * 1000003 + i) return false;
  return true;
}
static void put(world_t *w, gemini_tensor_t t, uint32_t tier, uint64_t seed) {
  gemini_access_t a = world_whole(t, GEMINI_WRITE, tier);
  OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  fill(a.ptr, CHUNK / 8, seed);
  OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static void expect(world_t *w, gemini_tensor_t t, uint32_t tier, uint64_t seed) {
  gemini_access_t a = world_whole(t, GEMINI_READ, tier);
  OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(filled(a.ptr, CHUNK / 8, seed));
  OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}

/* ---- threads: each a number and its world */
typedef struct {
  world_t *w;
  int number;
  gemini_stream_t stream;
  pthread_t thread;
} member_t;
static void run_threads(world_t *w, int count, void *(*body)(void *)) {
  member_t m[THREADS + 2];
  for (int i = 0; i < count; i++) {
    m[i] = (member_t){ .w = w, .number = i };
    OK(gemini_stream_create(w->mgr, &m[i].stream));
  }
  for (int i = 0; i < count; i++) CHECK_EQ(pthread_create(&m[i].thread, NULL, body, &m[i]), 0);
  for (int i = 0; i < count; i++) CHECK_EQ(pthread_join(m[i].thread, NULL), 0);
  for (int i = 0; i < count; i++) OK(gemini_stream_destroy(w->mgr, m[i].stream));
}

/* The thread's last failure is its own: it names what only this thread asked for. */
static void fail_and_look(member_t *m, int round) {
  char name[64];
  gemini_tensor_t none;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  snprintf(name, sizeof name, "nobody.%d.%d", m->number, round);
  CHECK_EQ(gemini_tensor_find(m->w->mgr, name, &none), GEMINI_ERR_NOT_FOUND);
  OK(gemini_last_error(&info));
  CHECK(strstr(info.message, name) && info.status == GEMINI_ERR_NOT_FOUND);
  CHECK(!strcmp(info.operation, "gemini_tensor_find"));
}

typedef struct {
  void *at;
  uint64_t words, seed;
  bool right;
} work_t;
static void work_fill(void *user) {
  work_t *k = user;
  fill(k->at, k->words, k->seed);
}
static void work_check(void *user) {
  work_t *k = user;
  k->right = filled(k->at, k->words, k->seed);
}

/* ---- everything at once: own tensors are written and checked, shared ones read, memory is tight */
static void *body_mixed(void *user) {
  member_t *m = user;
  world_t *w = m->w;
  uint64_t random = 100 + (uint64_t)m->number, seed[OWN] = { 0 };
  for (int round = 0; round < 150; round++) {
    int i = (int)(check_random(&random) % OWN), k = (int)(check_random(&random) % SHARED);
    gemini_tensor_t own = w->own[m->number][i];
    uint64_t fresh = (uint64_t)m->number * 1000 + (uint64_t)round + 1;
    switch (check_random(&random) % 10) {
    case 0:
    case 1: { /* on the stream: write, then check what was there before */
      work_t check = { .words = CHUNK / 8, .seed = seed[i] }, write = { .words = CHUNK / 8, .seed = fresh };
      gemini_access_t a[2] = { world_whole(own, GEMINI_READ_WRITE, DEVICE),
                               world_whole(w->shared[k], GEMINI_READ, DEVICE) };
      OK(gemini_acquire(w->mgr, a, 2, m->stream));
      check.at = write.at = a[0].ptr;
      work_t shared = { .at = a[1].ptr, .words = CHUNK / 8, .seed = 7 + (uint64_t)k };
      OK(gemini_stream_call(w->mgr, m->stream, work_check, &check));
      OK(gemini_stream_call(w->mgr, m->stream, work_fill, &write));
      OK(gemini_stream_call(w->mgr, m->stream, work_check, &shared));
      OK(gemini_release(w->mgr, a, 2, m->stream));
      OK(gemini_stream_synchronize(w->mgr, m->stream));
      CHECK((check.right || !seed[i]) && shared.right);
      seed[i] = fresh;
      break;
    }
    case 2: put(w, own, round % 2 ? DEVICE : HOST, seed[i] = fresh); break;
    case 3: expect(w, w->shared[k], round % 2 ? DEVICE : HOST, 7 + (uint64_t)k); break;
    case 4:
      if (seed[i]) expect(w, own, round % 2 ? DEVICE : HOST, seed[i]);
      break;
    case 5: {
      gemini_access_t a = world_whole(own, 0, (uint32_t)(check_random(&random) % 3));
      OK(gemini_move(w->mgr, &a, 1));
      break;
    }
    case 6: {
      gemini_access_t a[2] = { world_whole(w->shared[k], 0, (uint32_t)(check_random(&random) % 3)),
                               world_whole(own, 0, DEVICE) };
      OK(gemini_hint(w->mgr, a, 2));
      break;
    }
    case 7: {
      void *block;
      OK(gemini_alloc(w->mgr, 8 * (1 + check_random(&random) % 5000), m->stream, &block));
      work_t write = { block, 1, fresh, false }, check = write;
      OK(gemini_stream_call(w->mgr, m->stream, work_fill, &write));
      OK(gemini_stream_call(w->mgr, m->stream, work_check, &check));
      OK(gemini_free(w->mgr, block, m->stream));
      OK(gemini_stream_synchronize(w->mgr, m->stream));
      CHECK(check.right);
      break;
    }
    case 8: {
      figures_t s = { 0 };
      OK(figures_read(w->mgr, &s));
      CHECK(s.used_bytes[DEVICE] <= s.budget_bytes[DEVICE] && s.peak_bytes[DEVICE] <= s.budget_bytes[DEVICE]);
      CHECK(s.used_bytes[HOST] <= s.budget_bytes[HOST] && s.used_bytes[FILES] <= s.budget_bytes[FILES]);
      char text[2000];
      uint64_t length = 0;
      OK(gemini_plan_explain(w->mgr, sizeof text, text, &length));
      CHECK(strnlen(text, sizeof text) < sizeof text);
      gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
      OK(gemini_arena_info(w->mgr, w->arena, &info));
      break;
    }
    default: fail_and_look(m, round); break;
    }
  }
  for (int i = 0; i < OWN; i++)
    if (seed[i]) expect(w, w->own[m->number][i], DEVICE, seed[i]);
  return NULL;
}
static void test_threads_mixed_calls_lose_nothing(void) {
  for (int tight = 0; tight < 2; tight++) {
    world_t w;
    threads_open(&w, config_of(19, tight ? 16 : 48, 64)); /* at most two chunks and a block for each thread */
    for (int k = 0; k < SHARED; k++) {
      w.shared[k] = tensor_of(w.mgr, w.arena, CHUNK, "shared", k, 0);
      put(&w, w.shared[k], HOST, 7 + (uint64_t)k);
    }
    for (int t = 0; t < THREADS; t++)
      for (int i = 0; i < OWN; i++) w.own[t][i] = tensor_of(w.mgr, w.arena, CHUNK, "own", t, i);
    run_threads(&w, THREADS, body_mixed);
    for (int k = 0; k < SHARED; k++) expect(&w, w.shared[k], DEVICE, 7 + (uint64_t)k);
    threads_close(&w);
  }
}

/* ---- neighbours in one cache line, counted up by a thread each, while others push the chunk out */
enum { COUNTERS = 4, COUNTS = 2000 };
static void *body_count(void *user) {
  member_t *m = user;
  world_t *w = m->w;
  if (m->number >= COUNTERS) { /* pushes chunks out */
    for (uint64_t round = 0; round < COUNTS; round++) put(w, w->own[0][round % OWN], DEVICE, round);
    return NULL;
  }
  for (int round = 0; round < COUNTS; round++) {
    gemini_access_t a = world_part(w->shared[0], 8 * (uint64_t)m->number, 8, GEMINI_READ_WRITE, DEVICE);
    OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
    ++*(uint64_t *)a.ptr;
    OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  return NULL;
}
static void test_threads_neighbours_in_a_cache_line_are_apart(void) {
  world_t w;
  threads_open(&w, config_of(3, 16, 0));
  w.shared[0] = tensor_of(w.mgr, w.arena, 64, "line", 0, 0);
  for (int i = 0; i < OWN; i++) w.own[0][i] = tensor_of(w.mgr, w.arena, CHUNK, "own", 0, i);
  run_threads(&w, COUNTERS + 1, body_count);
  gemini_access_t a = world_whole(w.shared[0], GEMINI_READ, HOST);
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (int i = 0; i < COUNTERS; i++) CHECK_EQ(((uint64_t *)a.ptr)[i], COUNTS);
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  threads_close(&w);
}

/* ---- one tensor, a stream for each thread: what one stream writes the next one sees */
static void increment(void *user) { ++*(uint64_t *)user; }
static void *body_order(void *user) {
  member_t *m = user;
  world_t *w = m->w;
  for (int round = 0; round < 100; round++) {
    gemini_access_t a = world_part(w->shared[0], 0, 8, GEMINI_READ_WRITE, DEVICE), spoil;
    pthread_mutex_lock(&w->lock); /* the order is the callers' to make; the streams' work runs later */
    OK(gemini_acquire(w->mgr, &a, 1, m->stream));
    OK(gemini_stream_call(w->mgr, m->stream, increment, a.ptr));
    OK(gemini_release(w->mgr, &a, 1, m->stream));
    pthread_mutex_unlock(&w->lock);
    spoil = world_whole(w->own[m->number][round % OWN], GEMINI_WRITE, DEVICE);
    OK(gemini_acquire(w->mgr, &spoil, 1, m->stream));
    OK(gemini_release(w->mgr, &spoil, 1, m->stream));
  }
  return NULL;
}
static void test_threads_streams_take_turns_on_one_tensor(void) {
  for (int room = 0; room < 2; room++) { /* it stays, or is pushed out between turns */
    world_t w;
    threads_open(&w, config_of(room ? 40 : THREADS + 2, 64, 0));
    w.shared[0] = tensor_of(w.mgr, w.arena, CHUNK, "count", 0, 0);
    for (int t = 0; t < THREADS; t++)
      for (int i = 0; i < OWN; i++) w.own[t][i] = tensor_of(w.mgr, w.arena, CHUNK, "own", t, i);
    run_threads(&w, THREADS, body_order);
    gemini_access_t a = world_part(w.shared[0], 0, 8, GEMINI_READ, DEVICE);
    OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_EQ(*(uint64_t *)a.ptr, THREADS * 100);
    OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    threads_close(&w);
  }
}

/* ---- readers on the host and on the device at once */
static void *body_read(void *user) {
  member_t *m = user;
  for (int round = 0; round < 300; round++) {
    gemini_access_t a = world_whole(m->w->shared[round % SHARED], GEMINI_READ, m->number % 3 ? HOST : DEVICE);
    OK(gemini_acquire(m->w->mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK(filled(a.ptr, 64, 7 + (uint64_t)(round % SHARED)));
    OK(gemini_release(m->w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  return NULL;
}
static void test_threads_readers_of_one_tensor_on_host_and_device(void) {
  world_t w;
  threads_open(&w, config_of(3, 8, 0));
  for (int k = 0; k < SHARED; k++) {
    w.shared[k] = tensor_of(w.mgr, w.arena, CHUNK, "shared", k, 0);
    put(&w, w.shared[k], DEVICE, 7 + (uint64_t)k);
  }
  run_threads(&w, THREADS, body_read);
  for (int k = 0; k < SHARED; k++) {
    gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
    OK(gemini_tensor_info(w.mgr, w.shared[k], &info));
    CHECK_EQ(info.users, 0);
    CHECK_EQ(info.state, GEMINI_STATE_HOLD);
  }
  threads_close(&w);
}

/* ---- names, arenas, streams come and go beside acquires */
static void *body_register(void *user) {
  member_t *m = user;
  world_t *w = m->w;
  for (int round = 0; round < 40; round++) {
    char name[64];
    snprintf(name, sizeof name, "brief.%d", m->number);
    switch (m->number % 3) {
    case 0: {
      gemini_arena_t arena = arena_of(w->mgr, 0, name);
      gemini_tensor_t t = tensor_of(w->mgr, arena, CHUNK, "brief", m->number, round), found;
      put(w, t, round % 2 ? DEVICE : HOST, 5);
      snprintf(name, sizeof name, "brief.%d.%d", m->number, round);
      OK(gemini_tensor_find(w->mgr, name, &found));
      CHECK_EQ(found, t);
      OK(gemini_arena_destroy(w->mgr, arena));
      gemini_access_t a = world_whole(t, GEMINI_READ, DEVICE);
      CHECK_EQ(gemini_acquire(w->mgr, &a, 1, m->stream), GEMINI_ERR_HANDLE);
      break;
    }
    case 1: {
      gemini_stream_t stream;
      OK(gemini_stream_create(w->mgr, &stream));
      gemini_access_t a = world_whole(w->shared[0], GEMINI_READ, DEVICE);
      OK(gemini_acquire(w->mgr, &a, 1, stream));
      work_t check = { a.ptr, CHUNK / 8, 7, false };
      OK(gemini_stream_call(w->mgr, stream, work_check, &check));
      OK(gemini_release(w->mgr, &a, 1, stream));
      OK(gemini_stream_destroy(w->mgr, stream)); /* waits for its work */
      CHECK(check.right);
      break;
    }
    default: {
      gemini_tensor_t t = tensor_of(w->mgr, w->arena, CHUNK, "loose", m->number, round);
      put(w, t, DEVICE, (uint64_t)round);
      expect(w, t, HOST, (uint64_t)round);
      expect(w, w->shared[0], DEVICE, 7);
      OK(gemini_tensor_state_set(w->mgr, t, GEMINI_STATE_FREE));
      OK(gemini_tensor_unregister(w->mgr, t));
      break;
    }
    }
    fail_and_look(m, round);
  }
  return NULL;
}
static void test_threads_objects_come_and_go(void) {
  world_t w;
  threads_open(&w, config_of(12, 64, 0));
  w.shared[0] = tensor_of(w.mgr, w.arena, CHUNK, "shared", 0, 0);
  put(&w, w.shared[0], DEVICE, 7);
  run_threads(&w, THREADS, body_register);
  expect(&w, w.shared[0], DEVICE, 7);
  threads_close(&w);
}

/* ---- training on one thread, everybody else asks and hints */
static void *body_train(void *user) {
  member_t *m = user;
  world_t *w = m->w;
  if (m->number == 0) {
    for (int step = 0; step < 8; step++) {
      OK(gemini_iteration_begin(w->mgr));
      OK(gemini_phase_set(w->mgr, GEMINI_PHASE_FORWARD));
      for (int t = 1; t < THREADS; t++) {
        char name[32];
        snprintf(name, sizeof name, "op.%d", t);
        OK(gemini_op_begin(w->mgr, name, m->stream));
        gemini_access_t a[OWN];
        for (int i = 0; i < OWN; i++) a[i] = world_whole(w->own[t][i], step ? GEMINI_READ_WRITE : GEMINI_WRITE, DEVICE);
        OK(gemini_acquire(w->mgr, a, OWN, m->stream));
        for (int i = 0; i < OWN; i++)
          if (step) OK(gemini_stream_call(w->mgr, m->stream, increment, a[i].ptr));
        void *block;
        OK(gemini_alloc(w->mgr, 3000, m->stream, &block));
        OK(gemini_free(w->mgr, block, m->stream));
        OK(gemini_release(w->mgr, a, OWN, m->stream));
        OK(gemini_op_end(w->mgr));
        OK(gemini_stream_synchronize(w->mgr, m->stream));
        if (!step)
          for (int i = 0; i < OWN; i++) put(w, w->own[t][i], HOST, 0);
      }
      OK(gemini_phase_set(w->mgr, GEMINI_PHASE_NONE));
      OK(gemini_iteration_end(w->mgr));
    }
    atomic_store(&w->stop, true);
    return NULL;
  }
  while (!atomic_load(&w->stop)) {
    figures_t s = { 0 };
    OK(figures_read(w->mgr, &s));
    CHECK(s.used_bytes[DEVICE] <= s.budget_bytes[DEVICE]);
    uint64_t length = 0;
    char text[512];
    OK(gemini_plan_explain(w->mgr, sizeof text, text, &length));
    gemini_access_t a = world_whole(w->own[m->number][0], 0, m->number % 2 ? DEVICE : HOST);
    OK(gemini_hint(w->mgr, &a, 1));
    gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
    OK(gemini_tensor_info(w->mgr, w->own[m->number][1], &info));
    void *block;
    if (m->number == 1 && gemini_alloc(w->mgr, 2000, m->stream, &block) == GEMINI_OK)
      OK(gemini_free(w->mgr, block, m->stream));
    if (m->number == 2) expect(w, w->shared[0], HOST, 7);
    sleep_ms(1);
  }
  return NULL;
}
static void test_threads_ask_while_one_trains(void) {
  world_t w;
  threads_open(&w, config_of(OWN + 4, 64, 0));
  w.shared[0] = tensor_of(w.mgr, w.arena, CHUNK, "shared", 0, 0);
  put(&w, w.shared[0], HOST, 7);
  for (int t = 0; t < THREADS; t++)
    for (int i = 0; i < OWN; i++) w.own[t][i] = tensor_of(w.mgr, w.arena, CHUNK, "own", t, i);
  run_threads(&w, THREADS, body_train);
  for (int t = 1; t < THREADS; t++)
    for (int i = 0; i < OWN; i++) {
      gemini_access_t a = world_whole(w.own[t][i], GEMINI_READ, HOST);
      OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK_EQ(*(uint64_t *)a.ptr, 7); /* incremented in steps 1 to 7 */
      CHECK_EQ(((uint64_t *)a.ptr)[CHUNK / 8 - 1], CHUNK / 8 - 1);
      OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  figures_t s = { 0 };
  OK(figures_read(w.mgr, &s));
  CHECK_EQ(s.iterations, 8);
  threads_close(&w);
}

/* ---- late updates from some threads, uses from others, files and budgets from more */
enum { UPDATES = 30 };
static void add_one(void *user, const gemini_update_span_t *span) {
  (void)user;
  for (uint64_t e = 0; e < span->element_count; e++) ((uint8_t *)span->ptr[0])[e]++;
}
static void *body_update(void *user) {
  member_t *m = user;
  world_t *w = m->w;
  uint64_t expected = 0;
  for (int round = 0; round < UPDATES; round++) {
    if (m->number < 3) { /* each over its own arena */
      gemini_arena_t arena = w->arenas[m->number];
      uint32_t mode = GEMINI_READ_WRITE;
      gemini_update_t u = GEMINI_UPDATE_INIT;
      u.arenas = &arena;
      u.modes = &mode;
      u.arena_count = 1;
      u.flags = round % 3 ? GEMINI_UPDATE_LATE : 0;
      u.stream = m->stream;
      u.fn = add_one;
      OK(gemini_update(w->mgr, &u));
      expected++;
      if (round % 4 == 0) OK(gemini_update_wait(w->mgr));
      if (round % 5 == 0) {
        gemini_access_t a = world_part(arena, CHUNK - 4, 8, GEMINI_READ, round % 2 ? HOST : DEVICE);
        OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
        for (int i = 0; i < 8; i++) CHECK_EQ(((uint8_t *)a.ptr)[i], expected);
        OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
      }
    } else if (m->number == 3) { /* files */
      int fd = memfd_create("test", MFD_CLOEXEC);
      CHECK(fd >= 0);
      gemini_access_t a = world_whole(w->shared[0], 0, 0), b = world_whole(w->shared[1], 0, 0);
      OK(gemini_store(w->mgr, &a, fd, 0));
      OK(gemini_load(w->mgr, &b, fd, 0));
      expect(w, w->shared[1], DEVICE, 7);
      close(fd);
    } else if (m->number == 4) {
      OK(gemini_budget_set(w->mgr, DEVICE, (uint64_t)(round % 2 ? 8 : 20) * CHUNK));
      OK(gemini_budget_set(w->mgr, HOST, (uint64_t)(round % 2 ? 40 : 24) * CHUNK));
    } else {
      double norm = -1;
      gemini_access_t a = world_whole(w->shared[2], 0, 0);
      OK(gemini_norm(w->mgr, &a, GEMINI_DTYPE_F32, m->stream, &norm));
      CHECK(norm == 0);
      gemini_access_t pin = world_whole(w->shared[0], 0, DEVICE);
      OK(gemini_pin(w->mgr, &pin));
      OK(gemini_unpin(w->mgr, &pin));
      OK(gemini_zero(w->mgr, &a));
    }
  }
  return NULL;
}
static void test_threads_update_load_and_resize(void) {
  world_t w;
  threads_open(&w, config_of(20, 40, 64));
  for (int k = 0; k < 3; k++) w.shared[k] = tensor_of(w.mgr, w.arena, CHUNK, "shared", k, 0);
  put(&w, w.shared[0], HOST, 7);
  for (int t = 0; t < 3; t++) {
    char name[32];
    snprintf(name, sizeof name, "update.%d", t);
    w.arenas[t] = arena_of(w.mgr, 0, name);
    uint64_t at;
    OK(gemini_arena_take(w.mgr, w.arenas[t], 3 * CHUNK, &at));
  }
  run_threads(&w, THREADS, body_update);
  OK(gemini_update_wait(w.mgr));
  for (int t = 0; t < 3; t++) {
    gemini_access_t a = world_whole(w.arenas[t], GEMINI_READ, HOST);
    OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < 3 * CHUNK; i++) CHECK_EQ(((uint8_t *)a.ptr)[i], UPDATES);
    OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  threads_close(&w);
}

/* ---- managers of their own */
static void *body_manager(void *user) {
  member_t *m = user;
  for (int round = 0; round < 6; round++) {
    world_t w;
    threads_open(&w, config_of(2, 16, 8));
    for (int i = 0; i < OWN; i++) w.own[0][i] = tensor_of(w.mgr, w.arena, CHUNK, "own", m->number, i);
    for (int i = 0; i < OWN; i++) put(&w, w.own[0][i], DEVICE, (uint64_t)(10 * m->number + i));
    for (int i = 0; i < OWN; i++) expect(&w, w.own[0][i], DEVICE, (uint64_t)(10 * m->number + i));
    gemini_access_t a = world_whole(w.own[0][0], GEMINI_READ, DEVICE);
    CHECK_EQ(gemini_acquire(m->w->mgr, &a, 1, m->stream), GEMINI_ERR_HANDLE); /* of another manager */
    threads_close(&w);
    CHECK_EQ(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_HANDLE);
    fail_and_look(m, round);
  }
  return NULL;
}

/* ---- arenas that are cut anew beside threads that acquire without the lock */
enum { RECUT_ROUNDS = 40, RECUT_TRIES = 200, RECUT_THREADS = 20 };
static _Atomic int recut_ready; /* threads that have acquired once */
static void *body_recut(void *user) {
  member_t *m = user;
  gemini_tensor_t t = m->w->own[m->number % THREADS][m->number % OWN];
  for (bool first = true; first || !atomic_load(&m->w->stop); first = false) {
    gemini_access_t a = world_whole(t, GEMINI_READ, DEVICE);
    OK(gemini_acquire(m->w->mgr, &a, 1, m->stream));
    OK(gemini_release(m->w->mgr, &a, 1, m->stream));
    if (first) atomic_fetch_add(&recut_ready, 1);
    nanosleep(&(struct timespec){ 0, 1000 * (m->number + 1) }, NULL); /* mostly, nothing is in use */
  }
  return NULL;
}
/* Loading a trace of larger chunks cuts arenas anew, where nothing is in use: with two threads, and with so many that
 * whatever is counted for each of them is shared, after a reset of the statistics, too. */
static void test_threads_acquire_while_arenas_are_cut_anew(void) {
  char path[] = "/tmp/gemini-test.XXXXXX";
  int fd = mkstemp(path), cut = 0;
  CHECK(fd >= 0);
  CHECK(dprintf(
            fd,
            "gemini-trace 1\nbudget 131072 6291456\narena 0 5 1 0 0 %d main\nop 0 1000 0 0 op\nuse 0 0 65536 1\nend\n",
            THREADS * OWN * 65536) > 0);
  CHECK(!close(fd));
  for (int round = 0; round < RECUT_ROUNDS; round++) {
    world_t w;
    gemini_config_t c = config_of(96, 512, 0);
    c.chunk_bytes = 0;
    threads_open(&w, c);
    for (int i = 0; i < THREADS; i++)
      for (int k = 0; k < OWN; k++) put(&w, w.own[i][k] = tensor_of(w.mgr, w.arena, CHUNK, "own", i, k), DEVICE, 7);
    int count = round % 2 ? RECUT_THREADS : 1;
    member_t m[RECUT_THREADS];
    atomic_store(&recut_ready, 0);
    for (int i = 0; i < count; i++) {
      m[i] = (member_t){ .w = &w, .number = round % 2 ? i : i + THREADS };
      OK(gemini_stream_create(w.mgr, &m[i].stream));
      CHECK_EQ(pthread_create(&m[i].thread, NULL, body_recut, &m[i]), 0);
    }
    while (atomic_load(&recut_ready) < count) sched_yield();
    OK(gemini_stats_reset(w.mgr));
    figures_t s = { 0 };
    OK(figures_read(w.mgr, &s));
    const uint64_t before = s.chunk_bytes;
    CHECK(before != 131072);
    for (int tries = 0; tries < RECUT_TRIES && s.chunk_bytes == before; tries++) { /* until nothing is in use */
      OK(gemini_trace_load(w.mgr, path));
      OK(figures_read(w.mgr, &s));
    }
    CHECK(s.chunk_bytes == before || s.chunk_bytes == 131072);
    cut += s.chunk_bytes != before;
    atomic_store(&w.stop, true);
    for (int i = 0; i < count; i++) CHECK_EQ(pthread_join(m[i].thread, NULL), 0);
    for (int i = 0; i < THREADS; i++)
      for (int k = 0; k < OWN; k++) expect(&w, w.own[i][k], k % 2 ? HOST : DEVICE, 7);
    for (int i = 0; i < count; i++) OK(gemini_stream_destroy(w.mgr, m[i].stream));
    threads_close(&w);
  }
  fprintf(stderr, "    cut anew %d times of %d\n", cut, RECUT_ROUNDS);
  CHECK(cut > 0);
  CHECK(!unlink(path));
}

static void test_threads_each_with_a_manager(void) {
  world_t w;
  threads_open(&w, config_of(2, 4, 0));
  run_threads(&w, THREADS, body_manager);
  threads_close(&w);
}

/* ---- errors */
static pthread_barrier_t barrier;
static void *body_errors(void *user) {
  member_t *m = user;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  OK(gemini_last_error(&info));
  CHECK_EQ(info.status, GEMINI_OK); /* a new thread has had none, whatever the others had */
  CHECK(!*info.message && !*info.operation && !info.native_code);
  pthread_barrier_wait(&barrier);
  gemini_access_t a = world_whole(m->w->shared[0], GEMINI_READ, DEVICE);
  if (m->number == 0) { /* only here: a dup() of another thread would open the number again */
    int closed = dup(0);
    close(closed);
    CHECK_EQ(gemini_store(m->w->mgr, &a, closed, 0), GEMINI_ERR_IO);
  }
  pthread_barrier_wait(&barrier);
  if (m->number == 1) CHECK_EQ(gemini_release(m->w->mgr, &a, 1, m->stream), GEMINI_ERR_STATE);
  pthread_barrier_wait(&barrier);
  OK(gemini_acquire(m->w->mgr, &a, 1, m->stream)); /* a success clears nothing */
  OK(gemini_release(m->w->mgr, &a, 1, m->stream));
  OK(gemini_last_error(&info));
  static const gemini_status_t status[] = { GEMINI_ERR_IO, GEMINI_ERR_STATE, GEMINI_OK };
  static const char *const operation[] = { "gemini_store", "gemini_release", "" };
  CHECK_EQ(info.status, status[m->number]);
  CHECK(!strcmp(info.operation, operation[m->number]));
  CHECK_EQ(info.native_code, m->number ? 0 : EBADF);
  return NULL;
}
static void test_last_error_is_the_threads_own(void) {
  world_t w;
  threads_open(&w, config_of(4, 8, 0));
  w.shared[0] = tensor_of(w.mgr, w.arena, CHUNK, "shared", 0, 0);
  put(&w, w.shared[0], HOST, 1);
  gemini_tensor_t none;
  CHECK_EQ(gemini_tensor_find(w.mgr, "nobody", &none), GEMINI_ERR_NOT_FOUND);
  CHECK_EQ(pthread_barrier_init(&barrier, NULL, 3), 0);
  run_threads(&w, 3, body_errors);
  pthread_barrier_destroy(&barrier);
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  OK(gemini_last_error(&info));
  CHECK_EQ(info.status, GEMINI_ERR_NOT_FOUND);
  threads_close(&w);
}

/* ---- a batch for writing on the host that meets a reader on the device half way is refused whole */
typedef struct {
  world_t *w;
  gemini_status_t status;
} batch_t;
static void slow_span(void *user, const gemini_update_span_t *span) {
  (void)user;
  (void)span;
  sleep_ms(200);
}
static void *body_batch(void *user) {
  batch_t *b = user;
  gemini_access_t a[2] = { world_whole(b->w->shared[0], GEMINI_WRITE, HOST),
                           world_whole(b->w->shared[1], GEMINI_READ_WRITE, HOST) };
  b->status = gemini_acquire(b->w->mgr, a, 2, GEMINI_STREAM_CALLER);
  if (!b->status) OK(gemini_release(b->w->mgr, a, 2, GEMINI_STREAM_CALLER));
  return NULL;
}
static void test_host_batch_against_a_device_reader_is_whole_or_nothing(void) {
  world_t w;
  threads_open(&w, config_of(4, 16, 0));
  for (int k = 0; k < 2; k++) {
    w.shared[k] = tensor_of(w.mgr, w.arena, CHUNK, "shared", k, 0);
    put(&w, w.shared[k], HOST, 7 + (uint64_t)k);
  }
  gemini_access_t second = world_whole(w.shared[1], GEMINI_READ, DEVICE);
  for (int i = 0; i < 3; i++) { /* it stays, and is known to have arrived */
    OK(gemini_acquire(w.mgr, &second, 1, GEMINI_STREAM_CALLER));
    OK(gemini_release(w.mgr, &second, 1, GEMINI_STREAM_CALLER));
  }
  uint32_t mode = GEMINI_READ_WRITE;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &w.arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.element_count = CHUNK; /* the first tensor */
  u.flags = GEMINI_UPDATE_LATE;
  u.fn = slow_span;
  OK(gemini_update(w.mgr, &u));
  batch_t b = { .w = &w };
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, body_batch, &b), 0);
  sleep_ms(60); /* the batch waits for the update of its first tensor */
  gemini_status_t status = gemini_acquire(w.mgr, &second, 1, GEMINI_STREAM_CALLER);
  CHECK(status == GEMINI_OK || status == GEMINI_ERR_BUSY);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK(b.status == GEMINI_OK || b.status == GEMINI_ERR_BUSY);
  if (!status) {
    CHECK(filled(second.ptr, CHUNK / 8, 8));
    OK(gemini_release(w.mgr, &second, 1, GEMINI_STREAM_CALLER));
  }
  for (int k = 0; k < 2; k++) {
    gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
    OK(gemini_tensor_info(w.mgr, w.shared[k], &info));
    CHECK_EQ(info.users, 0); /* of a refused batch nothing is acquired */
    CHECK_EQ(info.state, GEMINI_STATE_HOLD);
  }
  expect(&w, w.shared[0], DEVICE, 7);
  threads_close(&w);
}

/* ---- hits are counted for each thread, and none is lost, also after a reset */
enum { COUNTING = 20, TIMES = 100000 };
static pthread_barrier_t all_there;
static void *hit(void *user) {
  world_t *w = user;
  pthread_barrier_wait(&all_there);
  for (int i = 0; i < TIMES; i++) {
    gemini_access_t read = ACCESS(w->shared[0], 0, 0, GEMINI_READ, DEVICE);
    OK(gemini_acquire(w->mgr, &read, 1, GEMINI_STREAM_CALLER));
    OK(gemini_release(w->mgr, &read, 1, GEMINI_STREAM_CALLER));
  }
  return NULL;
}
static void test_threads_hits_are_all_counted(void) {
  world_t w;
  threads_open(&w, config_of(4, 4, 0));
  w.shared[0] = tensor_of(w.mgr, w.arena, CHUNK / 2, "shared", 0, 0);
  gemini_access_t bring = ACCESS(w.shared[0], 0, 0, GEMINI_READ, DEVICE);
  OK(gemini_acquire(w.mgr, &bring, 1, GEMINI_STREAM_CALLER));
  OK(gemini_release(w.mgr, &bring, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(pthread_barrier_init(&all_there, NULL, COUNTING), 0);
  for (int round = 0; round < 2; round++) {
    pthread_t threads[COUNTING];
    gemini_stats_t s = GEMINI_STATS_INIT;
    OK(gemini_stats_reset(w.mgr));
    OK(gemini_stats(w.mgr, &s));
    CHECK_EQ(s.acquire_hits, 0);
    for (int i = 0; i < COUNTING; i++) CHECK_EQ(pthread_create(&threads[i], NULL, hit, &w), 0);
    for (int i = 0; i < COUNTING; i++) pthread_join(threads[i], NULL);
    OK(gemini_stats(w.mgr, &s));
    CHECK_EQ(s.acquire_hits, COUNTING * TIMES);
  }
  pthread_barrier_destroy(&all_there);
  threads_close(&w);
}

int main(void) {
  RUN(test_last_error_is_the_threads_own);
  RUN(test_threads_neighbours_in_a_cache_line_are_apart);
  RUN(test_threads_streams_take_turns_on_one_tensor);
  RUN(test_threads_objects_come_and_go);
  RUN(test_threads_acquire_while_arenas_are_cut_anew);
  RUN(test_threads_each_with_a_manager);
  RUN(test_threads_hits_are_all_counted);
  RUN(test_threads_ask_while_one_trains);
  RUN(test_threads_update_load_and_resize);
  RUN(test_threads_mixed_calls_lose_nothing);
  RUN(test_threads_readers_of_one_tensor_on_host_and_device);
  RUN(test_host_batch_against_a_device_reader_is_whole_or_nothing);
  return check_done();
}
