/* Graphs with fetches in them, over a fake driver that captures and replays: a launch runs its nodes in whatever order
 * their dependencies allow, so that an order that the library forgot to ask for shows as wrong bytes.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <unistd.h>

#include "../integration/world.h"
#include "chunk/cut.h"
#include "device/cuda_driver.h"
#include "fake_cuda.h"
#include "gemini/graph.h"

#define W (UINT64_C(2) << 20)
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, READ_WRITE = GEMINI_READ_WRITE };

static const gmi_cuda_driver_t *driver;
static cu_context_t context;
static struct cu_stream *native; /* of the world's stream */
static gemini_arena_t arena;
static const char *lacking;  /* of the driver's functions */
static uint32_t queue_limit; /* of the driver's queues; 0: the default */

static world_t start_with(gemini_config_t c, uint64_t chunks) {
  fake_cuda_reset();
  fake_cuda.lacking_symbol = lacking;
  if (queue_limit) fake_cuda.queue_limit = queue_limit;
  gmi_cuda_driver_replace(fake_cuda_symbol);
  CHECK(driver = gmi_cuda_driver());
  CHECK_EQ(driver->init(0), CU_SUCCESS);
  CHECK_EQ(driver->primary_retain(&context, 0), CU_SUCCESS);
  CHECK_EQ(driver->current_set(context), CU_SUCCESS);
  world_t w = world_open(c);
  void *stream;
  CHECK_OK(gemini_stream_native(w.mgr, w.stream, &stream));
  native = stream;
  arena = world_arena(&w, GEMINI_KIND_PARAM, 2, "a", 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(w.mgr, arena, chunks * W, &offset));
  return w;
}
static gemini_config_t config(uint64_t device_chunks, uint64_t host_chunks, uint64_t file_chunks) {
  gemini_config_t c = world_config(1, 1, 0);
  c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = device_chunks * W;
  c.host_bytes = host_chunks * W << gmi_sizes_padding.slot_shift;
  c.file_bytes = file_chunks * W;
  return c;
}
static world_t start(uint64_t device_chunks, uint64_t chunks) {
  return start_with(config(device_chunks, chunks + 4, 0), chunks);
}
static void finish(world_t *w) {
  figures_t s = world_stats(w);
  for (int link = LINK_H2D; link <= LINK_D2H; link++) /* frames' bytes, however large a slot is */
    for (int r = 0; r < GEMINI_REASON_COUNT; r++) CHECK_EQ(s.moved_bytes[link][r], s.moved_chunks[link][r] * W);
  world_close(w);
  CHECK_EQ(driver->primary_release(0), CU_SUCCESS);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}

/* ---- what a chunk holds: one number, in many places */
enum { STAMPS = 16 };
static const uint64_t TORN = UINT64_MAX;
static void stamp(void *chunk, uint64_t value) {
  for (uint64_t i = 0; i < STAMPS; i++) *(uint64_t *)((uint8_t *)chunk + i * (W / STAMPS)) = value ? value + i : 0;
}
static uint64_t stamped(const void *chunk) {
  uint64_t value = *(const uint64_t *)chunk;
  for (uint64_t i = 1; i < STAMPS; i++)
    if (*(const uint64_t *)((const uint8_t *)chunk + i * (W / STAMPS)) != (value ? value + i : 0)) return TORN;
  return value;
}
static gemini_access_t chunk_of(gemini_arena_t of, uint64_t i, uint64_t count, uint32_t mode, uint32_t tier) {
  return world_part(of, i * W, count * W, mode, tier);
}
static void set_on_host(const world_t *w, uint64_t i, uint64_t value) {
  gemini_access_t a = chunk_of(arena, i, 1, WRITE, HOST);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  stamp(a.ptr, value);
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
typedef struct {
  void *chunk;
  uint64_t value;
} set_t;
static void set_now(void *user) {
  set_t *set = user;
  stamp(set->chunk, set->value);
}
static void set_on_device(const world_t *w, uint64_t i, uint64_t value) {
  gemini_access_t a = chunk_of(arena, i, 1, READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  set_t set = { a.ptr, value };
  CHECK_OK(gemini_stream_call(w->mgr, w->stream, set_now, &set));
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_stream_synchronize(w->mgr, w->stream));
}

/* ---- kernels: what they see is compared when they have run */
typedef struct {
  const void *chunk;
  uint64_t index, seen;
} kernel_t;
typedef struct {
  kernel_t *kernels;
  uint32_t count, capacity;
  gemini_graph_t handle;
  struct cu_graph *exec;
} graph_t;

static void look(void *user) {
  kernel_t *k = user;
  k->seen = stamped(k->chunk);
}
static void launch_kernel(graph_t *g, uint64_t index, const void *chunk) {
  CHECK(g->count < g->capacity);
  kernel_t *k = &g->kernels[g->count++];
  *k = (kernel_t){ chunk, index, 0 };
  CHECK_EQ(driver->host_call(native, look, k), CU_SUCCESS);
}
static void graph_begin(const world_t *w, graph_t *g, uint64_t chunks, uint32_t capacity) {
  *g = (graph_t){ .kernels = calloc(capacity, sizeof *g->kernels), .capacity = capacity };
  CHECK(g->kernels);
  CHECK_OK(gemini_graph_begin(w->mgr, w->stream, chunks * W, &g->handle));
  CHECK_EQ(cuStreamBeginCapture_v2(native, 0), CU_SUCCESS);
}
static void graph_end(const world_t *w, graph_t *g) {
  struct cu_graph *graph;
  CHECK_EQ(cuStreamEndCapture(native, &graph), CU_SUCCESS);
  CHECK_OK(gemini_graph_end(w->mgr, g->handle));
  CHECK_EQ(cuGraphInstantiateWithFlags(&g->exec, graph, 0), CU_SUCCESS);
  CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
}
static void graph_destroy(const world_t *w, graph_t *g) { /* its last replay may still run */
  CHECK_EQ(cuGraphExecDestroy(g->exec), CU_SUCCESS);
  CHECK_OK(gemini_graph_destroy(w->mgr, g->handle));
  CHECK_OK(gemini_stream_synchronize(w->mgr, w->stream));
  free(g->kernels);
}
/* An operator of chunks side by side. */
static void capture_op(const world_t *w, graph_t *g, uint64_t first, uint64_t count) {
  gemini_access_t a = chunk_of(arena, first, count, READ, DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  for (uint64_t i = 0; i < count; i++) launch_kernel(g, first + i, (uint8_t *)a.ptr + i * W);
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
}
static void replay(const world_t *w, graph_t *g) {
  CHECK_OK(gemini_graph_enter(w->mgr, g->handle, w->stream));
  CHECK_EQ(cuGraphLaunch(g->exec, native), CU_SUCCESS);
  CHECK_OK(gemini_graph_leave(w->mgr, g->handle));
}
static void check_seen(const world_t *w, const graph_t *g, const uint64_t *values) {
  CHECK_OK(gemini_stream_synchronize(w->mgr, w->stream));
  for (uint32_t i = 0; i < g->count; i++) CHECK_EQ(g->kernels[i].seen, values[g->kernels[i].index]);
}

static void larger_than_its_frames(void) {
  enum { CHUNKS = 12, FRAMES = 3 };
  world_t w = start(FRAMES + 1, CHUNKS);
  uint64_t values[CHUNKS];
  for (uint64_t i = 0; i < CHUNKS; i++) set_on_host(&w, i, values[i] = 1000 * (i + 1));
  set_on_device(&w, 5, values[5] = 77);
  graph_t g;
  graph_begin(&w, &g, FRAMES, 2 * CHUNKS);
  for (uint64_t i = 0; i < CHUNKS; i++) capture_op(&w, &g, i, 1);
  for (uint64_t i = CHUNKS; i-- > 0;) capture_op(&w, &g, i, 1); /* and backward */
  graph_end(&w, &g);
  uint64_t moved = world_stats(&w).moved_chunks[LINK_H2D][GEMINI_REASON_PLAN];
  for (uint64_t step = 0; step < 9; step++) {
    replay(&w, &g);
    check_seen(&w, &g, values);
    set_on_host(&w, step, values[step] = 5000 + step * 100);
    if (step % 2) set_on_device(&w, 3, values[3] = 9000 + step);
    if (step % 3 == 2) {
      gemini_access_t zero = chunk_of(arena, 7, 1, WRITE, HOST);
      CHECK_OK(gemini_zero(w.mgr, &zero));
      values[7] = 0;
    }
  }
  /* Each way but for what is still there at the turn. */
  CHECK_EQ(world_stats(&w).moved_chunks[LINK_H2D][GEMINI_REASON_PLAN] - moved, 9 * (2 * CHUNKS - FRAMES));
  graph_destroy(&w, &g);
  for (uint64_t i = 0; i < CHUNKS; i++) { /* the frames serve others again */
    gemini_access_t a = chunk_of(arena, i, 1, READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_EQ(stamped(a.ptr), values[i]);
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  gemini_access_t all = chunk_of(arena, 0, FRAMES + 1, READ, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &all, 1, w.stream));
  CHECK_OK(gemini_release(w.mgr, &all, 1, w.stream));
  finish(&w);
}

static void test_graph_larger_than_its_frames_reads_the_newest_bytes(void) {
  larger_than_its_frames();
  lacking = "cuStreamGetCaptureInfo_v2"; /* it only tells captures apart */
  larger_than_its_frames();
  lacking = NULL;
}

/* A copy need not wait for the operator captured before it, when there is a frame besides that one's. */
static void test_graph_copies_run_beside_kernels(void) {
  enum { CHUNKS = 8 };
  for (uint64_t frames = 1; frames <= 3; frames++) {
    world_t w = start(4, CHUNKS);
    graph_t g;
    uint32_t copies, beside;
    graph_begin(&w, &g, frames, CHUNKS);
    for (uint64_t i = 0; i < CHUNKS; i++) capture_op(&w, &g, i, 1);
    graph_end(&w, &g);
    fake_cuda_graph_nodes(g.exec, &copies, &beside);
    CHECK_EQ(copies, CHUNKS);
    CHECK_EQ(beside, frames == 1 ? 0 : CHUNKS - 1);
    graph_destroy(&w, &g);
    finish(&w);
  }
}

/* ---- random graphs against a model: what a chunk holds, and what can be beside what */
typedef struct {
  uint64_t first, count;
} held_t;
enum { RANDOM_CHUNKS = 14, RANDOM_HELD = 3 };

static uint64_t distinct(const held_t *held, uint32_t count) {
  uint64_t set = 0;
  for (uint32_t i = 0; i < count; i++) set |= ((UINT64_C(1) << held[i].count) - 1) << held[i].first;
  return set;
}

static void random_capture(const world_t *w, graph_t *g, uint64_t frames, uint64_t *random) {
  held_t held[RANDOM_HELD + 1];
  uint32_t count = 0;
  uint64_t known = 0; /* chunks that have a frame */
  for (int step = 0; step < 40; step++) {
    if (count == RANDOM_HELD || (count && check_random(random) % 2)) {
      uint32_t i = (uint32_t)(check_random(random) % count);
      gemini_access_t a = chunk_of(arena, held[i].first, held[i].count, READ, DEVICE);
      CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
      held[i] = held[--count];
      continue;
    }
    held_t op = { check_random(random) % RANDOM_CHUNKS, 1 + check_random(random) % 2 };
    if (op.first + op.count > RANDOM_CHUNKS) op.count = 1;
    held[count] = op;
    uint64_t set = distinct(held, count + 1);
    bool fits = (uint64_t)__builtin_popcountll(set) <= frames;
    gemini_access_t a = chunk_of(arena, op.first, op.count, READ, DEVICE);
    gemini_status_t status = gemini_acquire(w->mgr, &a, 1, w->stream);
    if (!fits) {
      CHECK_EQ(status, GEMINI_ERR_OOM_DEVICE);
    } else if (status) { /* chunks that share a ring frame: never the new ones alone */
      CHECK_EQ(status, GEMINI_ERR_OOM_DEVICE);
      CHECK_SAYS(world_error().message, "share one frame");
      CHECK(__builtin_popcountll(set & known) >= 2);
    }
    known |= set; /* also of one that failed for another's sake */
    if (status) continue;
    count++;
    for (uint32_t h = 0; h < count; h++) /* a kernel sees all that is acquired */
      for (uint64_t i = 0; i < held[h].count && g->count < g->capacity; i++) {
        gemini_access_t again = chunk_of(arena, held[h].first + i, 1, READ, DEVICE);
        CHECK_OK(gemini_acquire(w->mgr, &again, 1, w->stream));
        launch_kernel(g, held[h].first + i, again.ptr);
        CHECK_OK(gemini_release(w->mgr, &again, 1, w->stream));
      }
  }
  for (uint32_t i = 0; i + 1 < count; i++) { /* the last one is left to gemini_graph_end() */
    gemini_access_t a = chunk_of(arena, held[i].first, held[i].count, READ, DEVICE);
    CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
  }
}

/* A span is a part of a chunk, of whole stamps. */
static void add_one(void *user, const gemini_update_span_t *span) {
  (void)user;
  for (uint64_t at = 0; at < span->element_count * 2; at += W / STAMPS) ++*(uint64_t *)((uint8_t *)span->ptr[0] + at);
}

static void random_change(const world_t *w, uint64_t *values, uint64_t *random) {
  uint64_t i = check_random(random) % RANDOM_CHUNKS, value = 1 + (check_random(random) >> 8);
  switch (check_random(random) % 7) {
  case 0: set_on_device(w, i, values[i] = value); break;
  case 1: {
    gemini_access_t move = chunk_of(arena, i, 1, READ, DEVICE);
    gemini_status_t status = gemini_hint(w->mgr, &move, 1);
    CHECK_OK(status);
    break;
  }
  case 2: {
    gemini_access_t zero = chunk_of(arena, i, 1, READ, DEVICE);
    CHECK_OK(gemini_zero(w->mgr, &zero));
    values[i] = 0;
    break;
  }
  case 3:
  case 4: { /* late: the replay is behind it */
    uint32_t mode = READ_WRITE;
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = &arena;
    u.modes = &mode;
    u.arena_count = 1;
    u.first_element = i * (W / 2);
    u.element_count = W / 2;
    u.flags = GEMINI_UPDATE_LATE;
    u.fn = add_one;
    u.stream = w->stream;
    if (!values[i]) break; /* zeros have no stamps */
    CHECK_OK(gemini_update(w->mgr, &u));
    values[i]++;
    break;
  }
  default: set_on_host(w, i, values[i] = value);
  }
}

static void test_graph_random_replays_are_right(void) {
  const uint64_t first = check_is_slow() ? 2 : 1, last = check_is_slow() ? 4 : 8; /* of each kind one at least */
  for (uint64_t seed = first; seed <= last; seed++) {
    uint64_t random = seed * 77, frames = 2 + seed % 4, values[RANDOM_CHUNKS];
    bool files = seed % 3 == 0;
    gemini_config_t c = config(12, files ? RANDOM_CHUNKS + 1 : RANDOM_CHUNKS + 2, files ? 30 : 0);
    if (seed % 4 == 0) c.flags = GEMINI_CONFIG_STRICT;
    world_t w = start_with(c, RANDOM_CHUNKS);
    for (uint64_t i = 0; i < RANDOM_CHUNKS; i++) set_on_host(&w, i, values[i] = 1 + (check_random(&random) >> 8));
    if (files)
      for (uint64_t i = 0; i < RANDOM_CHUNKS; i += 2) {
        gemini_access_t a = chunk_of(arena, i, 1, READ, FILES);
        CHECK_OK(gemini_move(w.mgr, &a, 1));
      }
    graph_t g[2];
    for (int k = 0; k < 2; k++) {
      graph_begin(&w, &g[k], frames, 300);
      random_capture(&w, &g[k], frames, &random);
      graph_end(&w, &g[k]);
    }
    for (int step = 0; step < 16; step++) {
      for (uint64_t n = check_random(&random) % 4; n > 0; n--) random_change(&w, values, &random);
      graph_t *one = &g[check_random(&random) % 2];
      replay(&w, one);
      if (check_random(&random) % 4 == 0) continue; /* what comes next comes behind it all the same */
      check_seen(&w, one, values);
    }
    for (int k = 0; k < 2; k++) graph_destroy(&w, &g[k]);
    CHECK_OK(gemini_update_wait(w.mgr));
    for (uint64_t i = 0; i < RANDOM_CHUNKS; i++) {
      gemini_access_t a = chunk_of(arena, i, 1, READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK_EQ(stamped(a.ptr), values[i]);
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    finish(&w);
  }
}

/* ---- a replay that is still running keeps writers off what it reads */
static _Atomic bool gate;
static void wait_for_gate(void *user) {
  (void)user;
  while (!gate) usleep(100);
}
typedef struct {
  const world_t *w;
  _Atomic bool done;
} writer_t;
static void *write_chunk(void *user) {
  writer_t *writer = user;
  set_on_host(writer->w, 0, 2);
  writer->done = true;
  return NULL;
}
static void test_graph_running_replay_keeps_writers_waiting(void) {
  world_t w = start(3, 4);
  const uint64_t values[4] = { 1, 1, 1, 1 };
  for (uint64_t i = 0; i < 4; i++) set_on_host(&w, i, 1);
  graph_t g;
  graph_begin(&w, &g, 1, 8);
  for (uint64_t i = 0; i < 4; i++) capture_op(&w, &g, i, 1);
  capture_op(&w, &g, 0, 1);
  graph_end(&w, &g);
  gate = false;
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, wait_for_gate, NULL));
  replay(&w, &g);
  writer_t writer = { &w, false };
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, write_chunk, &writer), 0);
  usleep(30000);
  CHECK(!writer.done);
  gate = true;
  CHECK_EQ(pthread_join(thread, NULL), 0);
  check_seen(&w, &g, values);
  graph_destroy(&w, &g);
  finish(&w);
}

/* Late updates hold the stream, not the thread that enters. */
static void slow_update(void *user, const gemini_update_span_t *span) {
  wait_for_gate(user);
  add_one(user, span);
}
static void test_graph_enter_waits_on_the_stream_for_updates(void) {
  world_t w = start(3, 2);
  const uint64_t values[2] = { 2, 1 };
  for (uint64_t i = 0; i < 2; i++) set_on_host(&w, i, 1);
  graph_t g;
  graph_begin(&w, &g, 1, 4);
  for (uint64_t i = 0; i < 2; i++) capture_op(&w, &g, i, 1);
  graph_end(&w, &g);
  uint32_t mode = READ_WRITE;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.element_count = W / 2;
  u.flags = GEMINI_UPDATE_LATE;
  u.fn = slow_update;
  gate = false;
  CHECK_OK(gemini_update(w.mgr, &u));
  replay(&w, &g); /* returns, though the update has not run */
  gate = true;
  check_seen(&w, &g, values);
  graph_destroy(&w, &g);
  finish(&w);
}

/* ---- other streams: what had the frames before, replays elsewhere, and who has the frames after */
static _Atomic uint64_t *word; /* that streams wait for: host functions are run one at a time, and must not */
static void hold_stream(void *stream) {
  cu_address_t address;
  void *memory;
  if (!word) {
    CHECK_EQ(driver->host_alloc(&memory, sizeof *word, CU_HOST_MAPPED), CU_SUCCESS);
    word = memory;
  }
  *word = 0;
  CHECK_EQ(driver->host_address(&address, (void *)word, 0), CU_SUCCESS);
  CHECK_EQ(driver->stream_wait_value(stream, address, 1, CU_WAIT_VALUE_GEQ), CU_SUCCESS);
}
static void let_go(void) { /* after a while in which what does not wait has run */
  usleep(30000);
  *word = 1;
}

static void test_graph_replays_keep_their_order_with_other_streams(void) {
  world_t w = start(3, 6);
  const uint64_t values[6] = { 1, 2, 3, 4, 5, 6 };
  gemini_stream_t second;
  void *second_native;
  CHECK_OK(gemini_stream_create(w.mgr, &second));
  CHECK_OK(gemini_stream_native(w.mgr, second, &second_native));
  for (uint64_t i = 0; i < 6; i++) set_on_host(&w, i, values[i]);
  kernel_t before[3], after[2]; /* three chunks fill the device, and are being read when they leave */
  gemini_access_t a = chunk_of(arena, 3, 3, READ, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, second));
  hold_stream(second_native);
  for (uint64_t i = 0; i < 3; i++) {
    before[i] = (kernel_t){ (uint8_t *)a.ptr + i * W, 3 + i, 0 };
    CHECK_EQ(driver->host_call(second_native, look, &before[i]), CU_SUCCESS);
  }
  CHECK_OK(gemini_release(w.mgr, &a, 1, second));
  graph_t g;
  graph_begin(&w, &g, 2, 4);
  for (uint64_t i = 0; i < 3; i++) capture_op(&w, &g, i, 1);
  graph_end(&w, &g);
  replay(&w, &g);
  let_go();
  check_seen(&w, &g, values);
  CHECK_OK(gemini_stream_synchronize(w.mgr, second));
  for (int i = 0; i < 3; i++) CHECK_EQ(before[i].seen, values[before[i].index]);

  for (uint32_t i = 0; i < g.count; i++) g.kernels[i].seen = 0;
  hold_stream(native);
  CHECK_OK(gemini_graph_enter(w.mgr, g.handle, w.stream));
  CHECK_OK(gemini_graph_leave(w.mgr, g.handle)); /* as if it were launched there */
  CHECK_OK(gemini_graph_enter(w.mgr, g.handle, second));
  CHECK_EQ(cuGraphLaunch(g.exec, second_native), CU_SUCCESS);
  CHECK_OK(gemini_graph_leave(w.mgr, g.handle));
  usleep(30000);
  for (uint32_t i = 0; i < g.count; i++) CHECK_EQ(g.kernels[i].seen, 0);
  let_go();
  CHECK_OK(gemini_stream_synchronize(w.mgr, second));
  check_seen(&w, &g, values);

  hold_stream(native);
  replay(&w, &g);
  CHECK_EQ(cuGraphExecDestroy(g.exec), CU_SUCCESS);
  CHECK_OK(gemini_graph_destroy(w.mgr, g.handle));
  a = chunk_of(arena, 3, 2, READ, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, second)); /* in the frames of a replay that has not run */
  let_go();
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  for (uint64_t i = 0; i < 2; i++) {
    after[i] = (kernel_t){ (uint8_t *)a.ptr + i * W, 3 + i, 0 };
    CHECK_EQ(driver->host_call(second_native, look, &after[i]), CU_SUCCESS);
  }
  CHECK_OK(gemini_stream_synchronize(w.mgr, second));
  for (int i = 0; i < 2; i++) CHECK_EQ(after[i].seen, values[after[i].index]);
  check_seen(&w, &g, values);
  CHECK_OK(gemini_release(w.mgr, &a, 1, second));
  free(g.kernels);
  CHECK_EQ(driver->host_free((void *)word), CU_SUCCESS);
  word = NULL;
  finish(&w);
}

/* ---- what is acquired before the capture stays, and may be written */
static void copy_stamp(void *user) {
  void **chunks = user;
  stamp(chunks[1], stamped(chunks[0]));
}
static void test_graph_writes_what_was_acquired_before(void) {
  world_t w = start(4, 6);
  for (uint64_t i = 0; i < 6; i++) set_on_host(&w, i, 10 * (i + 1));
  gemini_access_t out = chunk_of(arena, 5, 1, READ_WRITE, DEVICE), in;
  CHECK_OK(gemini_acquire(w.mgr, &out, 1, w.stream));
  graph_t g;
  void *chunks[5][2];
  graph_begin(&w, &g, 2, 4);
  for (uint64_t i = 0; i < 5; i++) {
    in = chunk_of(arena, i, 1, READ, DEVICE);
    gemini_access_t again = chunk_of(arena, 5, 1, READ_WRITE, DEVICE), wrong = chunk_of(arena, i, 1, WRITE, DEVICE);
    CHECK_OK(gemini_op_begin(w.mgr, "layer", w.stream));
    CHECK_STATUS(gemini_acquire(w.mgr, &wrong, 1, w.stream), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, "layer: a chunk of arena a is written in a graph: acquire it for writing before");
    CHECK_OK(gemini_acquire(w.mgr, &in, 1, w.stream));
    CHECK_OK(gemini_acquire(w.mgr, &again, 1, w.stream));
    CHECK(again.ptr == out.ptr);
    chunks[i][0] = in.ptr;
    chunks[i][1] = again.ptr;
    CHECK_EQ(driver->host_call(native, copy_stamp, chunks[i]), CU_SUCCESS);
    CHECK_OK(gemini_release(w.mgr, &in, 1, w.stream));
    CHECK_OK(gemini_release(w.mgr, &again, 1, w.stream));
    CHECK_STATUS(gemini_release(w.mgr, &again, 1, w.stream), GEMINI_ERR_STATE);
    CHECK_OK(gemini_op_end(w.mgr));
  }
  CHECK_STATUS(gemini_op_end(w.mgr), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_release(w.mgr, &out, 1, w.stream), GEMINI_ERR_STATE); /* not inside */
  CHECK_SAYS(world_error().message, "must be released after it");
  graph_end(&w, &g);
  CHECK_OK(gemini_release(w.mgr, &out, 1, w.stream));
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "a chunk of arena a must be acquired for writing during replays");
  for (uint64_t step = 0; step < 3; step++) {
    set_on_host(&w, 4, 500 + step);
    CHECK_OK(gemini_acquire(w.mgr, &out, 1, w.stream));
    replay(&w, &g);
    CHECK_OK(gemini_release(w.mgr, &out, 1, w.stream));
    in = chunk_of(arena, 5, 1, READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &in, 1, GEMINI_STREAM_CALLER));
    CHECK_EQ(stamped(in.ptr), 500 + step);
    CHECK_OK(gemini_release(w.mgr, &in, 1, GEMINI_STREAM_CALLER));
  }
  graph_destroy(&w, &g);
  finish(&w);
}

/* A tensor that acquires find on the device without the lock is the graph's business all the same. */
static void test_graph_captures_tensors_that_are_resident(void) {
  world_t w = start(4, 1);
  gemini_tensor_t t = world_tensor(&w, world_arena(&w, GEMINI_KIND_PARAM, 2, "p", 0, 0), "t", W);
  gemini_access_t out = world_whole(t, READ, DEVICE), in = out;
  for (int i = 0; i < 2; i++) { /* the second finds it settled */
    CHECK_OK(gemini_acquire(w.mgr, &out, 1, w.stream));
    CHECK_OK(gemini_release(w.mgr, &out, 1, w.stream));
    CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  }
  CHECK_OK(gemini_acquire(w.mgr, &out, 1, w.stream));
  graph_t g;
  graph_begin(&w, &g, 1, 4);
  CHECK_OK(gemini_acquire(w.mgr, &in, 1, w.stream));
  CHECK_EQ(world_tensor_info(&w, t).users, 1); /* not the capture's, which has a lease */
  CHECK_OK(gemini_release(w.mgr, &in, 1, w.stream));
  CHECK_STATUS(gemini_release(w.mgr, &out, 1, w.stream), GEMINI_ERR_STATE); /* not inside */
  CHECK_SAYS(world_error().message, "must be released after it");
  graph_end(&w, &g);
  CHECK_OK(gemini_release(w.mgr, &out, 1, w.stream));
  graph_destroy(&w, &g);
  finish(&w);
}

/* ---- gradients in their parameters' bytes */
static void check_parameters_in_graph(bool ranges) { /* of the arenas, or their tensors */
  world_t w = start(4, 1);
  gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, "p", 0, 0),
                 grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "g", 0, params);
  gemini_tensor_t p = world_tensor(&w, params, "t", W), grad;
  CHECK_OK(gemini_tensor_counterpart(w.mgr, p, grads, &grad));
  world_fill(&w, p, 0, W, HOST, 1);
  graph_t g;
  graph_begin(&w, &g, 1, 4);
  gemini_access_t a = ranges ? world_part(params, 0, W, READ, DEVICE) : world_whole(p, READ, DEVICE);
  gemini_access_t b = ranges ? world_part(grads, 0, W, READ, DEVICE) : world_whole(grad, READ, DEVICE);
  CHECK_STATUS(gemini_acquire(w.mgr, &b, 1, w.stream), GEMINI_ERR_STATE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  graph_end(&w, &g);
  replay(&w, &g);
  world_fill(&w, grad, 0, W, HOST, 2);
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "parameter t cannot be used");
  world_fill(&w, p, 0, W, HOST, 3);
  replay(&w, &g);
  graph_destroy(&w, &g);
  finish(&w);
}

static void test_graph_reads_parameters_only_where_there_are_any(void) {
  check_parameters_in_graph(false);
  check_parameters_in_graph(true);
}

/* ---- refusals */
static void test_graph_that_is_too_small_names_operator_and_bytes(void) {
  world_t w = start(6, 8);
  graph_t g;
  char says[200];
  graph_begin(&w, &g, 2, 16);
  gemini_access_t a = chunk_of(arena, 2, 3, READ, DEVICE); /* 4 is known from now on, and has no frame yet */
  CHECK_OK(gemini_op_begin(w.mgr, "attention", w.stream));
  CHECK_STATUS(gemini_op_begin(w.mgr, "mlp", w.stream), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_OOM_DEVICE);
  snprintf(says, sizeof says, "attention: the chunks acquired at once need %llu bytes, the graph was begun with %llu",
           (unsigned long long)(3 * W), (unsigned long long)(2 * W));
  CHECK_SAYS(world_error().message, says);
  CHECK_OK(gemini_op_end(w.mgr));
  for (uint64_t i = 0; i < 4; i++) capture_op(&w, &g, i, 1); /* 0 and 2 in one frame, 1 and 3 in the other */
  gemini_access_t both[] = { chunk_of(arena, 1, 1, READ, DEVICE), chunk_of(arena, 3, 1, READ, DEVICE) };
  CHECK_STATUS(gemini_acquire(w.mgr, both, 2, w.stream), GEMINI_ERR_OOM_DEVICE);
  CHECK_SAYS(world_error().message, "a captured operator: chunks of arena a at ");
  capture_op(&w, &g, 1, 2);                                  /* it is as it was */
  for (uint64_t i = 5; i < 8; i++) capture_op(&w, &g, i, 1); /* 5 and 7 in one frame, 7 there last, but before 6 */
  capture_op(&w, &g, 6, 1);
  gemini_access_t late[] = { chunk_of(arena, 4, 1, READ, DEVICE), chunk_of(arena, 5, 1, READ, DEVICE) };
  CHECK_OK(gemini_acquire(w.mgr, late, 2, w.stream)); /* 4 gets its frame after 5 has its own */
  launch_kernel(&g, 5, late[1].ptr);
  CHECK_OK(gemini_release(w.mgr, late, 2, w.stream));
  graph_end(&w, &g);
  const uint64_t zeros[8] = { 0 };
  replay(&w, &g);
  check_seen(&w, &g, zeros);
  graph_destroy(&w, &g);
  finish(&w);
}

static void test_graph_misuse_is_refused(void) {
  world_t w = start(6, 8);
  gemini_graph_t handle = handle_of(5), other = NULL;
  gemini_stream_t second;
  CHECK_OK(gemini_stream_create(w.mgr, &second));
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, W, NULL), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_graph_begin(w.mgr, GEMINI_STREAM_CALLER, W, &handle), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, W - 1, &handle), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, 7 * W, &handle), GEMINI_ERR_OOM_DEVICE);
  CHECK_STATUS(gemini_graph_begin(w.mgr, (void *)arena, W, &handle), GEMINI_ERR_HANDLE);
  CHECK_EQ(cuStreamBeginCapture_v2(native, 0), CU_SUCCESS);
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, W, &handle), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "begins before its capture");
  struct cu_graph *graph;
  CHECK_EQ(cuStreamEndCapture(native, &graph), CU_SUCCESS);
  CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
  CHECK_EQ(handle_id(handle), 5);

  graph_t g;
  graph_begin(&w, &g, 2, 16);
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, W, &handle), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_graph_end(w.mgr, g.handle), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "still being captured");
  CHECK_STATUS(gemini_graph_destroy(w.mgr, g.handle), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, second), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_graph_leave(w.mgr, g.handle), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_stream_destroy(w.mgr, w.stream), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_manager_close(w.mgr), GEMINI_ERR_BUSY);
  gemini_access_t a = chunk_of(arena, 0, 1, READ, HOST);
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_STATE);
  a.tier = DEVICE;
  CHECK_STATUS(gemini_release(w.mgr, &a, 1, w.stream), GEMINI_ERR_STATE);
  a.mode = 4;
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_INVALID);
  a.mode = READ;
  CHECK_STATUS(gemini_op_begin(w.mgr, "", w.stream), GEMINI_ERR_INVALID);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  gemini_access_t elsewhere = chunk_of(arena, 0, 1, READ, DEVICE);
  CHECK_STATUS(gemini_acquire(w.mgr, &elsewhere, 1, second), GEMINI_ERR_BUSY); /* while it is acquired in the capture */
  CHECK_SAYS(world_error().message, "in use by a graph");
  CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  CHECK_OK(gemini_acquire(w.mgr, &elsewhere, 1, second));
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_release(w.mgr, &elsewhere, 1, second));
  capture_op(&w, &g, 0, 2);
  graph_end(&w, &g);
  CHECK_STATUS(gemini_graph_end(w.mgr, g.handle), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, GEMINI_STREAM_CALLER), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_arena_destroy(w.mgr, arena), GEMINI_ERR_BUSY);
  CHECK_SAYS(world_error().message, "in a graph");

  /* Captured again with the same handle: the second would have no copies of what is there by then. */
  CHECK_OK(gemini_graph_begin(w.mgr, w.stream, W, &other));
  CHECK_EQ(cuStreamBeginCapture_v2(native, 0), CU_SUCCESS);
  a = chunk_of(arena, 4, 1, READ, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  CHECK_EQ(cuStreamEndCapture(native, &graph), CU_SUCCESS);
  CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
  CHECK_EQ(cuStreamBeginCapture_v2(native, 0), CU_SUCCESS);
  gemini_access_t next = chunk_of(arena, 5, 1, READ, DEVICE);
  CHECK_STATUS(gemini_acquire(w.mgr, &next, 1, w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "captured again");
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_STATE);
  CHECK_EQ(cuStreamEndCapture(native, &graph), CU_SUCCESS);
  CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
  CHECK_OK(gemini_graph_end(w.mgr, other));

  CHECK_OK(gemini_graph_enter(w.mgr, g.handle, w.stream));
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, w.stream), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_graph_destroy(w.mgr, g.handle), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_stream_destroy(w.mgr, w.stream), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_manager_close(w.mgr), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_acquire(w.mgr, &elsewhere, 1, second), GEMINI_ERR_BUSY);
  gemini_access_t host = chunk_of(arena, 0, 1, WRITE, HOST), reader = chunk_of(arena, 0, 1, READ, HOST);
  CHECK_STATUS(gemini_acquire(w.mgr, &host, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_release(w.mgr, &host, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
  CHECK_OK(gemini_acquire(w.mgr, &reader, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_release(w.mgr, &reader, 1, GEMINI_STREAM_CALLER));
  host.ptr = reader.ptr;
  CHECK_STATUS(gemini_release(w.mgr, &host, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE); /* the graph's, not ours */
  CHECK_STATUS(gemini_pin(w.mgr, &elsewhere), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_hint(w.mgr, &elsewhere, 1));
  CHECK_STATUS(gemini_zero(w.mgr, &host), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_graph_leave(w.mgr, g.handle));
  CHECK_STATUS(gemini_graph_leave(w.mgr, g.handle), GEMINI_ERR_STATE);
  CHECK_OK(gemini_pin(w.mgr, &elsewhere));
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, w.stream), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_unpin(w.mgr, &elsewhere));
  CHECK_OK(gemini_acquire(w.mgr, &host, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_graph_enter(w.mgr, g.handle, w.stream), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_release(w.mgr, &host, 1, GEMINI_STREAM_CALLER));

  gemini_graph_t gone = g.handle;
  graph_destroy(&w, &g);
  CHECK_STATUS(gemini_graph_destroy(w.mgr, gone), GEMINI_ERR_HANDLE);
  CHECK_STATUS(gemini_graph_enter(w.mgr, gone, w.stream), GEMINI_ERR_HANDLE);
  CHECK_STATUS(gemini_graph_leave(w.mgr, gone), GEMINI_ERR_HANDLE);
  CHECK_STATUS(gemini_graph_end(w.mgr, gone), GEMINI_ERR_HANDLE);
  CHECK_OK(gemini_graph_destroy(w.mgr, NULL));
  finish(&w); /* the other one goes with the manager */
}

static void test_graph_that_goes_takes_its_own_operator_along(void) {
  world_t w = start(6, 8);
  gemini_stream_t second;
  CHECK_OK(gemini_stream_create(w.mgr, &second));
  void *native_second;
  CHECK_OK(gemini_stream_native(w.mgr, second, &native_second));
  struct cu_graph *graph;
  for (int end = 0; end < 2; end++) {
    gemini_graph_t a, b;
    CHECK_OK(gemini_graph_begin(w.mgr, w.stream, W, &a));
    CHECK_OK(gemini_graph_begin(w.mgr, second, W, &b));
    CHECK_EQ(cuStreamBeginCapture_v2(native, 0), CU_SUCCESS);
    CHECK_EQ(cuStreamBeginCapture_v2(native_second, 0), CU_SUCCESS);
    CHECK_OK(gemini_op_begin(w.mgr, "of b", second));
    CHECK_STATUS(gemini_op_begin(w.mgr, "of a", w.stream), GEMINI_ERR_STATE); /* one at a time */
    CHECK_SAYS(world_error().message, "of b is open");
    gemini_access_t read = chunk_of(arena, 0, 2, READ, DEVICE); /* more than the graph's frame, outside of "of b" */
    CHECK_STATUS(gemini_acquire(w.mgr, &read, 1, w.stream), GEMINI_ERR_OOM_DEVICE);
    CHECK(!strstr(world_error().message, "of b"));
    CHECK_EQ(cuStreamEndCapture(native, &graph), CU_SUCCESS);
    CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
    if (end) CHECK_OK(gemini_graph_end(w.mgr, a));
    CHECK_OK(gemini_graph_destroy(w.mgr, a));
    CHECK_OK(gemini_op_end(w.mgr)); /* still open, as it is of the other one */
    CHECK_OK(gemini_op_begin(w.mgr, "of b again", second));
    CHECK_EQ(cuStreamEndCapture(native_second, &graph), CU_SUCCESS);
    CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
    if (end) CHECK_OK(gemini_graph_end(w.mgr, b));
    CHECK_OK(gemini_graph_destroy(w.mgr, b)); /* with its operator: the next round opens one */
  }
  finish(&w);
}

static void test_graph_is_refused_on_the_simulated_device(void) {
  world_t w = world_open(world_config(4, 4, 0));
  gemini_graph_t g = handle_of(5);
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, WORLD_CHUNK, &g), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(handle_id(g), 5);
  world_close(&w);
}

/* ---- memory: what graphs hold others cannot have */
static void test_graph_frames_and_slots_stay_the_graphs(void) {
  world_t w = start_with(config(6, 9, 12), 8);
  uint64_t values[8];
  for (uint64_t i = 0; i < 8; i++) set_on_host(&w, i, values[i] = i + 1);
  graph_t g;
  graph_begin(&w, &g, 3, 16);
  for (uint64_t i = 0; i < 4; i++) capture_op(&w, &g, i, 1);
  graph_end(&w, &g);
  CHECK_STATUS(gemini_budget_set(w.mgr, DEVICE, 2 * W), GEMINI_ERR_OOM_DEVICE);
  char says[64];
  snprintf(says, sizeof says, "graphs %llu", (unsigned long long)(3 * W));
  CHECK_SAYS(world_error().message, says);
  gemini_access_t a = chunk_of(arena, 4, 4, READ, DEVICE);
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_OOM_DEVICE); /* 3 frames are left */
  gemini_access_t file = chunk_of(arena, 0, 1, READ, FILES);
  CHECK_STATUS(gemini_move(w.mgr, &file, 1), GEMINI_ERR_BUSY);
  CHECK_SAYS(world_error().message, "stays on the host until");
  gemini_arena_t more = world_arena(&w, GEMINI_KIND_OTHER, 2, "b", 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(w.mgr, more, 8 * W, &offset));
  for (int round = 0; round < 2; round++)
    for (uint64_t i = 0; i < 8; i++) { /* others leave for files, these stay */
      gemini_access_t b = chunk_of(more, i, 1, WRITE, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &b, 1, GEMINI_STREAM_CALLER));
      stamp(b.ptr, 100 + i);
      CHECK_OK(gemini_release(w.mgr, &b, 1, GEMINI_STREAM_CALLER));
    }
  CHECK(world_stats(&w).moved_chunks[LINK_H2F][GEMINI_REASON_PRESSURE] > 0);
  gemini_access_t zero = chunk_of(arena, 0, 1, WRITE, HOST);
  CHECK_OK(gemini_zero(w.mgr, &zero));
  values[0] = 0;
  void *block;
  CHECK_STATUS(gemini_host_alloc(w.mgr, 7 * W, 0, &block), GEMINI_ERR_OOM_HOST); /* not through the graph's */
  for (uint64_t i = 0; i < 8; i++) {
    gemini_access_t b = chunk_of(more, i, 1, READ_WRITE, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &b, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_release(w.mgr, &b, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_STATUS(gemini_budget_set(w.mgr, HOST, 3 * W), GEMINI_ERR_OOM_HOST);
  CHECK_OK(gemini_budget_set(w.mgr, HOST, 5 * W));
  CHECK_OK(gemini_budget_set(w.mgr, HOST, 9 * W));
  replay(&w, &g);
  check_seen(&w, &g, values);
  graph_destroy(&w, &g);
  CHECK_OK(gemini_move(w.mgr, &file, 1));
  CHECK_OK(gemini_budget_set(w.mgr, DEVICE, 2 * W));
  finish(&w);
}

/* Memory that a graph copies from stays page-locked as it is, though the budget shrinks in the middle of its part. */
static void test_graph_memory_stays_locked_when_the_budget_shrinks(void) {
  world_t w = start_with(config(4, 512, 0), 4); /* parts of two chunks */
  uint64_t values[4];
  for (uint64_t i = 0; i < 4; i++) set_on_host(&w, i, values[i] = i + 1);
  graph_t g;
  graph_begin(&w, &g, 1, 4);
  for (uint64_t i = 0; i < 3; i++) capture_op(&w, &g, i, 1);
  graph_end(&w, &g);
  gemini_access_t last = chunk_of(arena, 3, 1, READ, DEVICE);
  CHECK_OK(gemini_move(w.mgr, &last, 1));
  fake_cuda_fail_function("cuMemHostRegister", CU_OUT_OF_MEMORY); /* what is unlocked stays so */
  CHECK_OK(gemini_budget_set(w.mgr, HOST, 3 * W));
  fake_cuda_fail_function(NULL, 0);
  replay(&w, &g);
  check_seen(&w, &g, values);
  graph_destroy(&w, &g);
  finish(&w);
}

/* A plan is made for what graphs leave. */
static void test_graph_leaves_less_to_plans(void) {
  world_t w = start(6, 8);
  for (uint64_t i = 0; i < 8; i++) set_on_host(&w, i, i + 1);
  for (int step = 0; step < 2; step++) {
    CHECK_OK(gemini_iteration_begin(w.mgr));
    for (uint64_t i = 0; i < 4; i++) {
      CHECK_OK(gemini_op_begin(w.mgr, "op", w.stream));
      gemini_access_t a = chunk_of(arena, i, 2, READ, DEVICE);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
      CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
      CHECK_OK(gemini_op_end(w.mgr));
    }
    CHECK_OK(gemini_iteration_end(w.mgr));
  }
  CHECK_EQ(world_stats(&w).planned_fetch_bytes, 0);
  gemini_graph_t g, none = handle_of(5);
  CHECK_STATUS(gemini_graph_begin(w.mgr, w.stream, 5 * W, &none), GEMINI_ERR_OOM_DEVICE);
  CHECK_SAYS(world_error().message, "op op: its chunks");
  CHECK_EQ(handle_id(none), 5);
  CHECK_EQ(world_stats(&w).planned_fetch_bytes, 0);
  CHECK_OK(gemini_graph_begin(w.mgr, w.stream, 3 * W, &g));
  CHECK(world_stats(&w).planned_fetch_bytes > 0);
  CHECK_OK(gemini_graph_destroy(w.mgr, g));
  CHECK_EQ(world_stats(&w).planned_fetch_bytes, 0);
  finish(&w);
}

/* ---- failures: each call of the driver fails once, in begin, capture, end and a replay */
static void test_graph_every_driver_call_may_fail_once(void) {
  bool reached = true;
  for (uint64_t n = 0; reached; n++) {
    world_t w = start(4, 6);
    const uint64_t zeros[6] = { 0 };
    gemini_graph_t g = 0;
    graph_t run = { .kernels = calloc(16, sizeof(kernel_t)), .capacity = 16 };
    struct cu_graph *graph = NULL;
    uint64_t first = fake_cuda_calls() + 1 + n;
    fake_cuda_fail(first, first, CU_UNKNOWN);
    gemini_status_t status = gemini_graph_begin(w.mgr, w.stream, 2 * W, &g);
    bool capturing = !status && cuStreamBeginCapture_v2(native, 0) == CU_SUCCESS;
    for (uint64_t i = 0; capturing && !status && i < 6; i++) {
      gemini_access_t a = chunk_of(arena, i, 1, READ, DEVICE);
      status = gemini_acquire(w.mgr, &a, 1, w.stream);
      if (status) break;
      kernel_t *k = &run.kernels[run.count++];
      *k = (kernel_t){ a.ptr, i, 7 };
      if (driver->host_call(native, look, k) != CU_SUCCESS) status = GEMINI_ERR_DEVICE;
      gemini_status_t released = gemini_release(w.mgr, &a, 1, w.stream);
      if (!status) status = released;
    }
    if (capturing && cuStreamEndCapture(native, &graph) != CU_SUCCESS) {
      CHECK(status || cuStreamEndCapture(native, &graph) == CU_SUCCESS); /* it was this call that failed */
      if (!graph) cuStreamEndCapture(native, &graph);
    }
    if (g) {
      gemini_status_t ended = gemini_graph_end(w.mgr, g);
      if (!status && capturing) {
        if (ended) ended = gemini_graph_end(w.mgr, g);
        CHECK_OK(ended);
        run.handle = g;
        while (cuGraphInstantiateWithFlags(&run.exec, graph, 0) != CU_SUCCESS) {
        }
        if (gemini_graph_enter(w.mgr, g, w.stream)) CHECK_OK(gemini_graph_enter(w.mgr, g, w.stream));
        while (cuGraphLaunch(run.exec, native) != CU_SUCCESS) {
        }
        if (gemini_graph_leave(w.mgr, g)) CHECK_OK(gemini_graph_leave(w.mgr, g));
        fake_cuda_fail(0, 0, 0);
        check_seen(&w, &run, zeros);
        CHECK_EQ(run.count, 6);
      }
    }
    reached = fake_cuda_calls() >= first;
    fake_cuda_fail(0, 0, 0);
    if (g) CHECK_OK(gemini_graph_destroy(w.mgr, g));
    if (graph) CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
    if (run.exec) CHECK_EQ(cuGraphExecDestroy(run.exec), CU_SUCCESS);
    free(run.kernels);
    CHECK_EQ(gemini_manager_close(w.mgr), GEMINI_OK);
    CHECK_EQ(driver->primary_release(0), CU_SUCCESS);
  }
}

/* ---- threads: replays beside others' work on other chunks, and on the same ones between them */
typedef struct {
  const world_t *w;
  gemini_stream_t stream;
  uint64_t seed;
} other_t;
static _Atomic bool stop;
static void *others_work(void *user) {
  other_t *o = user;
  uint64_t random = o->seed;
  while (!stop) {
    gemini_access_t a = chunk_of(arena, check_random(&random) % 8, 1, READ, check_random(&random) % 2 ? DEVICE : HOST);
    gemini_stream_t stream = a.tier == DEVICE ? o->stream : GEMINI_STREAM_CALLER;
    gemini_status_t status = gemini_acquire(o->w->mgr, &a, 1, stream);
    if (status != GEMINI_ERR_BUSY) { /* no replay has it */
      CHECK_OK(status);
      CHECK_OK(gemini_release(o->w->mgr, &a, 1, stream));
    }
    usleep(200); /* so that replays find a moment in which nothing is acquired */
  }
  return NULL;
}
static void test_graph_replays_beside_other_threads(void) {
  world_t w = start(6, 8);
  uint64_t values[8];
  for (uint64_t i = 0; i < 8; i++) set_on_host(&w, i, values[i] = i + 1);
  other_t others[2];
  pthread_t threads[2];
  stop = false;
  for (int i = 0; i < 2; i++) {
    others[i] = (other_t){ &w, 0, (uint64_t)i + 3 };
    CHECK_OK(gemini_stream_create(w.mgr, &others[i].stream));
  }
  graph_t g;
  graph_begin(&w, &g, 2, 16);
  for (uint64_t i = 0; i < 8; i++) capture_op(&w, &g, i, 1);
  graph_end(&w, &g);
  for (int i = 0; i < 2; i++) CHECK_EQ(pthread_create(&threads[i], NULL, others_work, &others[i]), 0);
  for (int step = 0; step < 40;) {
    gemini_status_t status = gemini_graph_enter(w.mgr, g.handle, w.stream);
    if (status == GEMINI_ERR_BUSY) continue;
    CHECK_OK(status);
    CHECK_EQ(cuGraphLaunch(g.exec, native), CU_SUCCESS);
    CHECK_OK(gemini_graph_leave(w.mgr, g.handle));
    if (++step % 4 == 0) check_seen(&w, &g, values);
  }
  stop = true;
  for (int i = 0; i < 2; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  check_seen(&w, &g, values);
  graph_destroy(&w, &g);
  finish(&w);
}

/* Work of another stream on host memory, which was released before a replay or during one. */
static void set_later(void *user) {
  usleep(100000);
  set_now(user);
}
/* Of a stream that is being captured nothing could be waited for. */
static void test_host_release_on_a_captured_stream_is_refused_whole(void) {
  world_t w = start(4, 4);
  set_on_host(&w, 0, 5);
  gemini_access_t a[2] = { chunk_of(arena, 0, 1, READ, HOST), chunk_of(arena, 1, 1, READ, DEVICE) };
  CHECK_OK(gemini_acquire(w.mgr, a, 2, w.stream));
  CHECK_EQ(cuStreamBeginCapture_v2(native, 0), CU_SUCCESS);
  for (int i = 0; i < 2; i++) CHECK_STATUS(gemini_release(w.mgr, a, 2, w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "the stream is being captured");
  struct cu_graph *graph;
  CHECK_EQ(cuStreamEndCapture(native, &graph), CU_SUCCESS);
  CHECK_EQ(cuGraphDestroy(graph), CU_SUCCESS);
  CHECK_OK(gemini_release(w.mgr, a, 2, w.stream));
  finish(&w);
}
static uint64_t read_later;
static void read_now(void *user) {
  usleep(100000);
  read_later = stamped(user);
}
static void test_graph_and_work_on_the_host_wait_for_each_other(void) {
  world_t w = start(4, 4);
  gemini_stream_t other;
  CHECK_OK(gemini_stream_create(w.mgr, &other));
  uint64_t values[4];
  for (uint64_t i = 0; i < 4; i++) set_on_host(&w, i, values[i] = 1000 * (i + 1));
  graph_t g;
  graph_begin(&w, &g, 2, 8);
  for (uint64_t i = 0; i < 4; i++) capture_op(&w, &g, i, 1);
  graph_end(&w, &g);
  gemini_access_t written = chunk_of(arena, 1, 1, WRITE, HOST);
  CHECK_OK(gemini_acquire(w.mgr, &written, 1, other));
  set_t set = { written.ptr, values[1] = 4242 };
  CHECK_OK(gemini_stream_call(w.mgr, other, set_later, &set));
  CHECK_OK(gemini_release(w.mgr, &written, 1, other));
  replay(&w, &g);
  check_seen(&w, &g, values);
  gemini_access_t read = chunk_of(arena, 2, 1, READ, HOST);
  CHECK_OK(gemini_acquire(w.mgr, &read, 1, other));
  CHECK_OK(gemini_graph_enter(w.mgr, g.handle, w.stream));
  CHECK_OK(gemini_stream_call(w.mgr, other, read_now, read.ptr));
  CHECK_OK(gemini_release(w.mgr, &read, 1, other));
  CHECK_OK(gemini_graph_leave(w.mgr, g.handle));
  set_on_host(&w, 2, 9);
  CHECK_OK(gemini_stream_synchronize(w.mgr, other));
  CHECK_EQ(read_later, values[2]);
  graph_destroy(&w, &g);
  CHECK_OK(gemini_stream_destroy(w.mgr, other));
  finish(&w);
}

/* ---- updates that were left to later callers, and are queued when a graph is entered */
enum { FIRST, UPDATED, FILL = UPDATED + 2, OTHERS, OTHER_COUNT = 6, LEFT_CHUNKS = OTHERS + OTHER_COUNT };
static gemini_arena_t masters;
static unsigned piece_us; /* of a piece on the device: as long as several copies, so that they are planned beside it */

static void add_slowly(void *user) {
  gemini_update_span_t *span = user;
  usleep(piece_us);
  add_one(NULL, span);
  free(span);
}
static void add_where_it_is(void *user, const gemini_update_span_t *span) {
  const world_t *w = user;
  if (span->tier == HOST) {
    add_one(NULL, span);
    return;
  }
  gemini_update_span_t *copy = malloc(sizeof *copy);
  *copy = *span;
  CHECK_OK(gemini_stream_call(w->mgr, span->stream, add_slowly, copy));
}
static void left_op(const world_t *w, const char *name, uint64_t first, uint64_t count, uint64_t memory) {
  gemini_access_t a = chunk_of(arena, first, count, READ, DEVICE);
  void *ptr = NULL;
  CHECK_OK(gemini_op_begin(w->mgr, name, w->stream));
  if (memory) CHECK_OK(gemini_alloc(w->mgr, memory * W, w->stream, &ptr));
  if (memory) CHECK_OK(gemini_free(w->mgr, ptr, w->stream));
  if (count) CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  if (count) CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_op_end(w->mgr));
}
/* Copies to the device that wait for a stream that is held: more than the library lets be behind each other. */
static void fill_link(const world_t *w, gemini_stream_t held) {
  for (int i = 0; i < 140; i++) {
    gemini_access_t a = chunk_of(arena, FILL, 1, READ, DEVICE), away = chunk_of(arena, FILL, 1, READ, HOST);
    CHECK_OK(gemini_acquire(w->mgr, &a, 1, held));
    CHECK_OK(gemini_release(w->mgr, &a, 1, held));
    CHECK_OK(gemini_move(w->mgr, &away, 1));
  }
}
/* The longest of some copies of a chunk to the device, however slow the machine is. */
static unsigned copy_us(const world_t *w) {
  uint64_t longest = 0;
  for (int i = 0; i < 8; i++) {
    gemini_access_t a = chunk_of(arena, FILL, 1, READ, DEVICE), away = chunk_of(arena, FILL, 1, READ, HOST);
    const uint64_t begin = now_ns();
    CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
    CHECK_OK(gemini_stream_synchronize(w->mgr, w->stream));
    const uint64_t took = now_ns() - begin;
    if (took > longest) longest = took;
    CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
    CHECK_OK(gemini_move(w->mgr, &away, 1));
  }
  return (unsigned)(longest / 1000);
}
/* While the memory of an operator lacks, the first operator's chunk is away. It comes back beside the update's pieces.
 * held: a stream for which the link waits when the update comes, or NULL. */
static void left_iteration(world_t *w, uint64_t *values, gemini_stream_t held) {
  const gemini_arena_t arenas[] = { arena, masters };
  const uint32_t modes[] = { READ_WRITE, READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 2;
  u.first_element = UPDATED * (W / 2);
  u.element_count = 2 * (W / 2);
  u.flags = GEMINI_UPDATE_LATE;
  u.fn = add_where_it_is;
  u.user = w;
  u.stream = w->stream;
  CHECK_OK(gemini_iteration_begin(w->mgr));
  left_op(w, "first", FIRST, 1, 0);
  left_op(w, "memory", 0, 0, 2);
  left_op(w, "second", UPDATED, 2, 0);
  if (held) fill_link(w, held);
  CHECK_OK(gemini_update(w->mgr, &u));
  if (!held) CHECK_OK(gemini_update_wait(w->mgr)); /* its time is known to the next plan */
  CHECK_OK(gemini_iteration_end(w->mgr));
  for (int i = 0; i < 2; i++) values[UPDATED + i]++;
}
static uint64_t on_device(const world_t *w, uint64_t i) {
  gemini_access_t a = chunk_of(arena, i, 1, READ, DEVICE);
  uint64_t bytes[GEMINI_TIER_COUNT];
  CHECK_OK(gemini_tier_bytes(w->mgr, &a, bytes));
  return bytes[DEVICE];
}
/* A piece that is queued there has the plan fetch another chunk of the graph, of which no update was left. Its address
 * must map its ring frame all the same: copies of the replay would go to whoever has the other frame then. */
static void test_graph_enter_queues_what_was_left_before_it_maps_frames(void) {
  gemini_config_t c = config(6 + 2, 2 * LEFT_CHUNKS + 4, 0);
  c.placement = GEMINI_PLACEMENT_CUDA;
  queue_limit = 1 << 14;
  world_t w = start_with(c, LEFT_CHUNKS);
  queue_limit = 0;
  masters = world_arena(&w, GEMINI_KIND_MASTER, 2, "m", arena, 0);
  uint64_t values[LEFT_CHUNKS];
  for (uint64_t i = 0; i < LEFT_CHUNKS; i++) set_on_host(&w, i, values[i] = 1000 * (i + 1));
  graph_t g;
  graph_begin(&w, &g, 2, 4);
  capture_op(&w, &g, FIRST, 1);
  capture_op(&w, &g, UPDATED, 2);
  graph_end(&w, &g);
  piece_us = 20000 + 4 * copy_us(&w);
  for (int i = 0; i < 5; i++) left_iteration(&w, values, NULL);
  CHECK_EQ(on_device(&w, FIRST), W); /* the plan has brought it beside a piece */
  gemini_stream_t held;
  void *held_native;
  CHECK_OK(gemini_stream_create(w.mgr, &held));
  CHECK_OK(gemini_stream_native(w.mgr, held, &held_native));
  hold_stream(held_native);
  left_iteration(&w, values, held);
  CHECK_EQ(on_device(&w, FIRST), 0);
  CHECK(world_stats(&w).pending_updates >= 2);
  *word = 1; /* from here on any call may queue what was left */
  CHECK_OK(gemini_graph_enter(w.mgr, g.handle, w.stream));
  CHECK_EQ(on_device(&w, FIRST), 0);
  gemini_access_t others = chunk_of(arena, OTHERS, OTHER_COUNT, READ, DEVICE); /* in all frames but the graph's */
  CHECK_OK(gemini_acquire(w.mgr, &others, 1, w.stream));
  CHECK_EQ(cuGraphLaunch(g.exec, native), CU_SUCCESS);
  CHECK_OK(gemini_graph_leave(w.mgr, g.handle));
  check_seen(&w, &g, values);
  kernel_t after[OTHER_COUNT];
  for (uint64_t i = 0; i < OTHER_COUNT; i++) {
    after[i] = (kernel_t){ (uint8_t *)others.ptr + i * W, OTHERS + i, 0 };
    CHECK_EQ(driver->host_call(native, look, &after[i]), CU_SUCCESS);
  }
  CHECK_OK(gemini_release(w.mgr, &others, 1, w.stream));
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  for (uint64_t i = 0; i < OTHER_COUNT; i++) CHECK_EQ(after[i].seen, values[OTHERS + i]);
  graph_destroy(&w, &g);
  CHECK_OK(gemini_stream_destroy(w.mgr, held));
  CHECK_EQ(driver->host_free((void *)word), CU_SUCCESS);
  word = NULL;
  finish(&w);
}

int main(void) {
  RUN(test_graph_larger_than_its_frames_reads_the_newest_bytes);
  RUN(test_graph_copies_run_beside_kernels);
  RUN(test_graph_and_work_on_the_host_wait_for_each_other);
  RUN(test_host_release_on_a_captured_stream_is_refused_whole);
  RUN(test_graph_random_replays_are_right);
  RUN(test_graph_running_replay_keeps_writers_waiting);
  RUN(test_graph_enter_waits_on_the_stream_for_updates);
  RUN(test_graph_enter_queues_what_was_left_before_it_maps_frames);
  RUN(test_graph_replays_keep_their_order_with_other_streams);
  RUN(test_graph_writes_what_was_acquired_before);
  RUN(test_graph_captures_tensors_that_are_resident);
  RUN(test_graph_reads_parameters_only_where_there_are_any);
  RUN(test_graph_that_is_too_small_names_operator_and_bytes);
  RUN(test_graph_misuse_is_refused);
  RUN(test_graph_that_goes_takes_its_own_operator_along);
  RUN(test_graph_is_refused_on_the_simulated_device);
  RUN(test_graph_frames_and_slots_stay_the_graphs);
  RUN(test_graph_memory_stays_locked_when_the_budget_shrinks);
  RUN(test_graph_leaves_less_to_plans);
  RUN(test_graph_every_driver_call_may_fail_once);
  RUN(test_graph_replays_beside_other_threads);
  gmi_sizes_padding.slot_shift = 1; /* slots larger than the frames that are copied to */
  RUN(test_graph_larger_than_its_frames_reads_the_newest_bytes);
  RUN(test_graph_random_replays_are_right);
  RUN(test_graph_that_is_too_small_names_operator_and_bytes);
  fake_cuda_reset();
  return check_done();
}
