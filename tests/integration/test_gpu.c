/* A manager on a GPU: bytes go down and up through every tier and come back right. Only gemini.h; but for graphs no kernel
 * is needed: who acquires a range on the device for reading and writing, and changes nothing, makes the device copy the
 * only one.
 * Skipped where there is no GPU. SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

#include "gemini/graph.h"
#include "gemini/hook.h"
#include "world.h"

#define W (UINT64_C(2) << 20)
enum { CHUNKS = 40 };
static const uint32_t HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE, FILES = GEMINI_TIER_FILE;

static gemini_config_t gpu_config(uint64_t device_chunks, uint64_t host_chunks, uint64_t file_chunks) {
  gemini_config_t c = world_config(1, 1, 0);
  c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = device_chunks * W;
  c.host_bytes = host_chunks * W;
  c.file_bytes = file_chunks * W;
  c.update_threads = 3;
  return c;
}
static void through_device(const world_t *w, gemini_object_t object, uint64_t offset, uint64_t size) {
  gemini_access_t a = world_part(object, offset, size, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
}
#define through_device(w, object, ...) through_device(w, OBJECT(object), __VA_ARGS__)

static void test_gpu_bytes_come_back_through_every_tier(void) {
  for (uint64_t files = 0; files <= 60; files += 60) {
    world_t w = world_open(gpu_config(8, files ? 12 : CHUNKS + 2, files));
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
    uint64_t offset, random = 77;
    CHECK_OK(gemini_arena_take(w.mgr, arena, CHUNKS / 2 * W, &offset));
    uint64_t seed[CHUNKS / 2];
    for (uint64_t i = 0; i < CHUNKS / 2; i++) world_fill(&w, arena, i * W, W, HOST, seed[i] = i + 1);
    for (int step = 0; step < 200; step++) {
      uint64_t i = check_random(&random) % (CHUNKS / 2);
      switch (check_random(&random) % 5) {
      case 0:
      case 1: through_device(&w, arena, i * W, W); break;
      case 2: CHECK(world_holds(&w, arena, i * W, W, seed[i])); break;
      case 3: {
        gemini_access_t move = world_part(arena, i * W, W, 0, files ? FILES : HOST);
        CHECK_OK(gemini_move(w.mgr, &move, 1));
        break;
      }
      default: {
        gemini_access_t hint = world_part(arena, i * W, W, 0, DEVICE);
        CHECK_OK(gemini_hint(w.mgr, &hint, 1));
      }
      }
    }
    for (uint64_t i = 0; i < CHUNKS / 2; i++) {
      gemini_access_t a = world_part(arena, i * W, W, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      for (uint64_t k = 0; k < W; k += 997) CHECK_EQ(((uint8_t *)a.ptr)[k], world_byte(seed[i], i * W + k));
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    figures_t s = world_stats(&w);
    CHECK(s.peak_bytes[DEVICE] <= s.budget_bytes[DEVICE] && s.peak_bytes[HOST] <= s.budget_bytes[HOST]);
    world_close(&w);
  }
}

/* ---- updates, late, on the host, with gradients that come from the device */
static void add_gradient(void *user, const gemini_update_span_t *span) {
  float *master = span->ptr[1];
  const float *gradient = span->ptr[0];
  (void)user;
  CHECK_EQ(span->tier, GEMINI_TIER_HOST);
  for (uint64_t i = 0; i < span->element_count; i++) master[i] += gradient[i];
}
static void test_gpu_late_updates_follow_the_device(void) {
  world_t w = world_open(gpu_config(6, 10, 60));
  gemini_arena_t p = world_arena(&w, GEMINI_KIND_PARAM, 4, "p", 0, 0);
  gemini_arena_t m = world_arena(&w, GEMINI_KIND_MASTER, 4, "m", p, 0);
  uint64_t offset, count = 8 * W / 4;
  CHECK_OK(gemini_arena_take(w.mgr, p, 8 * W, &offset));
  for (uint64_t i = 0; i < 8; i++) {
    gemini_access_t a = world_part(p, i * W, W, GEMINI_WRITE, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t k = 0; k < W / 4; k++) ((float *)a.ptr)[k] = (float)(i * 1000 + k % 1000);
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  gemini_arena_t arenas[] = { p, m };
  uint32_t modes[] = { GEMINI_READ, GEMINI_READ_WRITE };
  for (int step = 0; step < 5; step++) {
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = arenas;
    u.modes = modes;
    u.arena_count = 2;
    u.flags = GEMINI_UPDATE_LATE;
    u.fn = add_gradient;
    u.stream = w.stream;
    for (uint64_t i = 0; i < 8; i++) through_device(&w, p, i * W, W);
    CHECK_OK(gemini_update(w.mgr, &u));
  }
  for (uint64_t i = 0; i < 8; i++) through_device(&w, m, i * W, W); /* behind the pending updates */
  for (uint64_t i = 0; i < 8; i++) {
    gemini_access_t a = world_part(m, i * W, W, GEMINI_READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    for (uint64_t k = 0; k < W / 4; k += 7) CHECK(((float *)a.ptr)[k] == 5 * (float)(i * 1000 + k % 1000));
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  double there, here;
  gemini_access_t all = world_whole(m, GEMINI_READ, HOST);
  CHECK_OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &here));
  for (uint64_t i = 0; i < 4; i++) through_device(&w, m, i * W, W);
  CHECK_OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F32, w.stream, &there));
  CHECK(here == there && here > 0); /* to the bit, wherever the chunks are */
  CHECK(count > 0);
  world_close(&w);
}

static void test_gpu_memory_storm_evicts(void) {
  world_t w = world_open(gpu_config(10, CHUNKS, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  uint64_t offset, random = 5;
  CHECK_OK(gemini_arena_take(w.mgr, arena, 20 * W, &offset));
  for (uint64_t i = 0; i < 20; i++) world_fill(&w, arena, i * W, W, HOST, i + 1);
  void *blocks[6] = { 0 };
  for (int step = 0; step < 400; step++) {
    uint64_t i = check_random(&random) % 6;
    if (blocks[i]) {
      CHECK_OK(gemini_free(w.mgr, blocks[i], w.stream));
      blocks[i] = NULL;
    } else {
      CHECK_OK(gemini_alloc(w.mgr, 1 + check_random(&random) % W, w.stream, &blocks[i]));
    }
    through_device(&w, arena, check_random(&random) % 20 * W, W);
  }
  for (int i = 0; i < 6; i++) CHECK_OK(gemini_free(w.mgr, blocks[i], w.stream));
  for (uint64_t i = 0; i < 20; i++) CHECK(world_holds(&w, arena, i * W, W, i + 1));
  world_close(&w);
}

static void test_gpu_streams_of_the_caller_are_adopted(void) {
  world_t w = world_open(gpu_config(6, 10, 0));
  gemini_stream_t adopted, own;
  void *native, *same;
  CHECK_OK(gemini_stream_create(w.mgr, &own));
  CHECK_OK(gemini_stream_native(w.mgr, own, &native));
  CHECK_OK(gemini_stream_adopt(w.mgr, native, &adopted));
  CHECK_OK(gemini_stream_native(w.mgr, adopted, &same));
  CHECK(native == same);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", W);
  world_fill(&w, t, 0, W, HOST, 3);
  gemini_access_t a = world_whole(t, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, adopted));
  CHECK_OK(gemini_release(w.mgr, &a, 1, adopted));
  CHECK(world_holds(&w, t, 0, W, 3));
  CHECK_OK(gemini_stream_destroy(w.mgr, adopted));
  CHECK_OK(gemini_stream_destroy(w.mgr, own));
  world_close(&w);
}

/* ---- graphs: captured once, replayed while the chunks they use come and go */
static void *cuda(const char *symbol) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(library);
  void *found = dlsym(library, symbol);
  if (!found) fprintf(stderr, "no %s\n", symbol);
  CHECK(found);
  return found;
}
#define CUDA(symbol, types, ...) CHECK_EQ(((int(*) types)(uintptr_t)cuda(symbol))(__VA_ARGS__), 0)

static void move_all(const world_t *w, gemini_arena_t arena, uint32_t chunks, uint32_t tier) {
  for (uint64_t i = 0; i < chunks; i++) {
    gemini_access_t a = world_part(arena, i * W, W, 0, tier);
    CHECK_OK(gemini_move(w->mgr, &a, 1));
  }
}
static double remap_us(const world_t *w, gemini_arena_t arena) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int i = 0; i < 20; i++) {
    through_device(w, arena, 0, 4 * W);
    move_all(w, arena, 4, HOST);
  }
  CHECK_OK(gemini_stream_synchronize(w->mgr, w->stream));
  clock_gettime(CLOCK_MONOTONIC, &end);
  return ((double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-3) / 80;
}

static void test_gpu_graphs_outlive_the_moves_of_their_chunks(void) {
  enum { GRAPHS = 100, COPIES = 200 };
  world_t w = world_open(gpu_config(6, 20, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 4, "a", 0, 0),
                 others = world_arena(&w, GEMINI_KIND_OTHER, 4, "b", 0, 0);
  uint64_t offset, random = 9;
  CHECK_OK(gemini_arena_take(w.mgr, arena, 2 * W, &offset));
  CHECK_OK(gemini_arena_take(w.mgr, others, 8 * W, &offset));
  for (uint64_t i = 0; i < 8; i++) world_fill(&w, others, i * W, W, HOST, 50 + i);
  void *stream, *context, *graph, *execs[GRAPHS];
  CHECK_OK(gemini_stream_native(w.mgr, w.stream, &stream));
  CUDA("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
  CUDA("cuCtxSetCurrent", (void *), context);
  double before = remap_us(&w, others);
  before = remap_us(&w, others);
  for (int i = 0; i < GRAPHS; i++) { /* the second chunk is made a copy of the first */
    gemini_access_t a[] = { world_part(arena, 0, W, GEMINI_READ, DEVICE),
                            world_part(arena, W, W, GEMINI_WRITE, DEVICE) };
    CHECK_OK(gemini_acquire(w.mgr, a, 2, w.stream));
    CUDA("cuStreamBeginCapture_v2", (void *, int), stream, 0);
    for (uint64_t k = 0; k < COPIES; k++)
      CUDA("cuMemcpyDtoDAsync_v2", (uintptr_t, uintptr_t, size_t, void *),
           (uintptr_t)a[1].ptr + k * (W / COPIES / 4 * 4), (uintptr_t)a[0].ptr + k * (W / COPIES / 4 * 4),
           k + 1 < COPIES ? W / COPIES / 4 * 4 : W - k * (W / COPIES / 4 * 4), stream);
    if (i == 0) { /* what would get into the graph is refused; who uses other streams may go on */
      CHECK_STATUS(gemini_iteration_begin(w.mgr), GEMINI_OK);
      CHECK_STATUS(gemini_op_begin(w.mgr, "op", w.stream), GEMINI_ERR_STATE);
      CHECK_SAYS(world_error().message, "captured");
      gemini_access_t far = world_part(others, 7 * W, W, 0, HOST);
      CHECK_OK(gemini_move(w.mgr, &far, 1));
    }
    CUDA("cuStreamEndCapture", (void *, void **), stream, &graph);
    if (i == 0) CHECK_OK(gemini_iteration_end(w.mgr));
    CUDA("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), &execs[i], graph, 0);
    CUDA("cuGraphDestroy", (void *), graph);
    CHECK_OK(gemini_release(w.mgr, a, 2, w.stream));
  }
  double with = remap_us(&w, others);
  fprintf(stderr, "    a chunk out and in: %.1f us without graphs, %.1f us beside %d of %d nodes\n", before, with,
          GRAPHS, COPIES);
  for (uint64_t step = 0; step < 100; step++) {
    move_all(&w, arena, 2, HOST); /* other frames next time */
    world_fill(&w, arena, 0, W, HOST, step + 1);
    for (int k = 0; k < 3; k++) through_device(&w, others, check_random(&random) % 8 * W, W);
    gemini_access_t a[] = { world_part(arena, 0, W, GEMINI_READ, DEVICE),
                            world_part(arena, W, W, GEMINI_WRITE, DEVICE) };
    CHECK_OK(gemini_acquire(w.mgr, a, 2, w.stream));
    CUDA("cuGraphLaunch", (void *, void *), execs[step], stream);
    CHECK_OK(gemini_release(w.mgr, a, 2, w.stream));
    gemini_access_t copy = world_part(arena, W, W, GEMINI_READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &copy, 1, GEMINI_STREAM_CALLER));
    for (uint64_t k = 0; k < W; k++) CHECK_EQ(((uint8_t *)copy.ptr)[k], world_byte(step + 1, k));
    CHECK_OK(gemini_release(w.mgr, &copy, 1, GEMINI_STREAM_CALLER));
  }
  for (int i = 0; i < GRAPHS; i++) CUDA("cuGraphExecDestroy", (void *), execs[i]);
  CUDA("cuDevicePrimaryCtxRelease_v2", (int), 0);
  world_close(&w);
}

/* ---- graphs with fetches in them */
/* add_words(words, count, rounds, sum): all of them, so many times over; one block's share is every grid-th of 256. */
static const char add_words_ptx[] =
    ".version 6.3\n.target sm_70\n.address_size 64\n"
    ".visible .entry add_words(.param .u64 words, .param .u64 count, .param .u32 rounds, .param .u64 sum)\n{\n"
    ".reg .pred %p;\n.reg .b32 %r<8>;\n.reg .b64 %d<10>;\n"
    "ld.param.u64 %d1, [words];\nld.param.u64 %d2, [count];\nld.param.u32 %r1, [rounds];\nld.param.u64 %d3, [sum];\n"
    "mov.u32 %r2, %ctaid.x;\nmov.u32 %r3, %ntid.x;\nmov.u32 %r4, %tid.x;\nmov.u32 %r5, %nctaid.x;\n"
    "mul.wide.u32 %d4, %r2, %r3;\ncvt.u64.u32 %d5, %r4;\nadd.u64 %d4, %d4, %d5;\n" /* first word */
    "mul.wide.u32 %d5, %r5, %r3;\nmov.u64 %d6, 0;\n"                               /* step, sum */
    "round:\nsetp.eq.u32 %p, %r1, 0;\n@%p bra done;\nsub.u32 %r1, %r1, 1;\nmov.u64 %d7, %d4;\n"
    "word:\nsetp.ge.u64 %p, %d7, %d2;\n@%p bra round;\n"
    "shl.b64 %d8, %d7, 2;\nadd.u64 %d8, %d1, %d8;\nld.volatile.global.u32 %r6, [%d8];\n"
    "cvt.u64.u32 %d9, %r6;\nadd.u64 %d6, %d6, %d9;\nadd.u64 %d7, %d7, %d5;\nbra word;\n"
    "done:\nred.global.add.u64 [%d3], %d6;\nret;\n}\n";

#define LARGE (UINT64_C(16) << 20)
enum { LARGE_CHUNKS = 64, LARGE_FRAMES = 16, ROUNDS = 40, REPLAYS = 20 };
typedef struct {
  world_t w;
  gemini_arena_t arena;
  void *stream, *kernel;
  uint64_t *sums; /* on the device, one a chunk */
  uint64_t seeds[LARGE_CHUNKS];
} large_t;

static uint32_t large_word(uint64_t seed, uint64_t i) { return (uint32_t)((i ^ seed) * 2654435761u >> 7); }
static void large_fill(large_t *l, uint64_t chunk, uint64_t seed) {
  gemini_access_t a = world_part(l->arena, chunk * LARGE, LARGE, GEMINI_WRITE, HOST);
  CHECK_OK(gemini_acquire(l->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < LARGE / 4; i++) ((uint32_t *)a.ptr)[i] = large_word(seed, i);
  CHECK_OK(gemini_release(l->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  l->seeds[chunk] = seed;
}
static void large_kernel(large_t *l, uint64_t chunk, const void *words, uint32_t rounds) {
  uint64_t count = LARGE / 4, sum = (uintptr_t)&l->sums[chunk];
  void *parameters[] = { &words, &count, &rounds, &sum };
  CUDA("cuLaunchKernel",
       (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
       l->kernel, 132, 1, 1, 256, 1, 1, 0, l->stream, parameters, NULL);
}
static void large_ops(large_t *l, uint32_t rounds, bool brackets) {
  if (brackets) CHECK_OK(gemini_iteration_begin(l->w.mgr));
  for (uint64_t i = 0; i < LARGE_CHUNKS; i++) {
    gemini_access_t a = world_part(l->arena, i * LARGE, LARGE, GEMINI_READ, DEVICE);
    if (brackets) CHECK_OK(gemini_op_begin(l->w.mgr, "op", l->w.stream));
    CHECK_OK(gemini_acquire(l->w.mgr, &a, 1, l->w.stream));
    large_kernel(l, i, a.ptr, rounds);
    CHECK_OK(gemini_release(l->w.mgr, &a, 1, l->w.stream));
    if (brackets) CHECK_OK(gemini_op_end(l->w.mgr));
  }
  if (brackets) CHECK_OK(gemini_iteration_end(l->w.mgr));
}
static void *large_capture(large_t *l, uint32_t rounds, gemini_graph_t *graph_out) {
  void *graph, *exec;
  CHECK_OK(gemini_graph_begin(l->w.mgr, l->w.stream, LARGE_FRAMES * LARGE, graph_out));
  CUDA("cuStreamBeginCapture_v2", (void *, int), l->stream, 0);
  large_ops(l, rounds, false);
  CUDA("cuStreamEndCapture", (void *, void **), l->stream, &graph);
  CHECK_OK(gemini_graph_end(l->w.mgr, *graph_out));
  CUDA("cuGraphInstantiateWithFlags", (void **, void *, unsigned long long), &exec, graph, 0);
  CUDA("cuGraphDestroy", (void *), graph);
  return exec;
}
static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}
static void large_clear(large_t *l) {
  CUDA("cuMemsetD8Async", (uintptr_t, unsigned char, size_t, void *), (uintptr_t)l->sums, 0,
       LARGE_CHUNKS * sizeof *l->sums, l->stream);
}
static void large_replay(large_t *l, gemini_graph_t graph, void *exec) {
  CHECK_OK(gemini_graph_enter(l->w.mgr, graph, l->w.stream));
  CUDA("cuGraphLaunch", (void *, void *), exec, l->stream);
  CHECK_OK(gemini_graph_leave(l->w.mgr, graph));
}
static void large_check(large_t *l, uint32_t rounds) {
  uint64_t sums[LARGE_CHUNKS];
  CHECK_OK(gemini_stream_synchronize(l->w.mgr, l->w.stream));
  CUDA("cuMemcpyDtoH_v2", (void *, uintptr_t, size_t), sums, (uintptr_t)l->sums, sizeof sums);
  for (uint64_t i = 0; i < LARGE_CHUNKS; i++) {
    uint64_t expected = 0;
    for (uint64_t k = 0; k < LARGE / 4; k++) expected += large_word(l->seeds[i], k);
    CHECK_EQ(sums[i], expected * rounds);
  }
}
/* Milliseconds a time, of so many at once. */
static double replays_ms(large_t *l, gemini_graph_t graph, void *exec, double *thread_ms_out) {
  double begin = now_ms();
  for (int i = 0; i < REPLAYS; i++) large_replay(l, graph, exec);
  *thread_ms_out = (now_ms() - begin) / (double)REPLAYS;
  CHECK_OK(gemini_stream_synchronize(l->w.mgr, l->w.stream));
  return (now_ms() - begin) / (double)REPLAYS;
}

static void test_gpu_graphs_fetch_what_does_not_fit(void) {
  gemini_config_t c = gpu_config(1, 1, 0);
  c.chunk_bytes = LARGE;
  c.device_bytes = (LARGE_FRAMES + 2) * LARGE;
  c.host_bytes = (LARGE_CHUNKS + 4) * LARGE;
  large_t l = { .w = world_open(c) };
  gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
  arena.capacity_bytes = LARGE_CHUNKS * LARGE;
  uint64_t offset;
  CHECK_OK(gemini_arena_create(l.w.mgr, &arena, &l.arena));
  CHECK_OK(gemini_arena_take(l.w.mgr, l.arena, LARGE_CHUNKS * LARGE, &offset));
  for (uint64_t i = 0; i < LARGE_CHUNKS; i++) large_fill(&l, i, i + 1);
  void *context, *module, *sums;
  CHECK_OK(gemini_stream_native(l.w.mgr, l.w.stream, &l.stream));
  CUDA("cuDevicePrimaryCtxRetain", (void **, int), &context, 0);
  CUDA("cuCtxSetCurrent", (void *), context);
  CUDA("cuModuleLoadData", (void **, const void *), &module, add_words_ptx);
  CUDA("cuModuleGetFunction", (void **, void *, const char *), &l.kernel, module, "add_words");
  CHECK_OK(gemini_alloc(l.w.mgr, LARGE_CHUNKS * sizeof *l.sums, l.w.stream, &sums));
  l.sums = sums;

  for (int i = 0; i < 5; i++) { /* without a graph, under a plan at last */
    large_clear(&l);
    large_ops(&l, ROUNDS, true);
    large_check(&l, ROUNDS);
  }
  double begin = now_ms();
  for (int i = 0; i < REPLAYS; i++) large_ops(&l, ROUNDS, true);
  double ops_thread_ms = (now_ms() - begin) / (double)REPLAYS;
  CHECK_OK(gemini_stream_synchronize(l.w.mgr, l.w.stream));
  double ops_ms = (now_ms() - begin) / (double)REPLAYS;
  gemini_access_t one = world_part(l.arena, 0, LARGE, GEMINI_READ, DEVICE);
  CHECK_OK(gemini_acquire(l.w.mgr, &one, 1, l.w.stream));
  CHECK_OK(gemini_stream_synchronize(l.w.mgr, l.w.stream));
  begin = now_ms();
  for (int i = 0; i < LARGE_CHUNKS; i++) large_kernel(&l, 0, one.ptr, ROUNDS);
  CHECK_OK(gemini_stream_synchronize(l.w.mgr, l.w.stream));
  double kernels_ms = now_ms() - begin;
  CHECK_OK(gemini_release(l.w.mgr, &one, 1, l.w.stream));

  gemini_graph_t graph;
  double thread_ms, copies_thread_ms;
  void *exec = large_capture(&l, 0, &graph); /* of which only the copies take time */
  large_replay(&l, graph, exec);
  double copies_ms = replays_ms(&l, graph, exec, &copies_thread_ms);
  CUDA("cuGraphExecDestroy", (void *), exec);
  CHECK_OK(gemini_graph_destroy(l.w.mgr, graph));

  exec = large_capture(&l, ROUNDS, &graph);
  uint64_t random = 11;
  for (uint64_t step = 0; step < REPLAYS; step++) {
    large_clear(&l);
    large_replay(&l, graph, exec);
    large_check(&l, ROUNDS);
    for (int k = 0; k < 3; k++) large_fill(&l, check_random(&random) % LARGE_CHUNKS, 1000 + step * 10 + (uint64_t)k);
    if (step % 3 == 0) /* to another frame and back: the copies in the graph follow the address */
      through_device(&l.w, l.arena, check_random(&random) % LARGE_CHUNKS * LARGE, LARGE);
  }
  large_replay(&l, graph, exec);
  double graph_ms = replays_ms(&l, graph, exec, &thread_ms);
  fprintf(stderr,
          "    %d ops over %" PRIu64 " MiB in %" PRIu64 " MiB: %.2f ms without a graph (thread %.2f), %.2f ms replayed "
          "(thread %.3f); its copies alone %.2f ms, its kernels alone %.2f ms\n",
          LARGE_CHUNKS, LARGE_CHUNKS * LARGE >> 20, LARGE_FRAMES * LARGE >> 20, ops_ms, ops_thread_ms, graph_ms,
          thread_ms, copies_ms, kernels_ms);
  const char *times =
      getenv("GEMINI_TEST_TIMES"); /* 0: under a tool that makes kernels and copies wait for each other */
  if (!times || *times != '0') CHECK(graph_ms < copies_ms + kernels_ms); /* they overlap */
  CUDA("cuGraphExecDestroy", (void *), exec);
  CHECK_OK(gemini_graph_destroy(l.w.mgr, graph));
  CHECK_OK(gemini_free(l.w.mgr, sums, l.w.stream));
  CUDA("cuModuleUnload", (void *), module);
  CUDA("cuDevicePrimaryCtxRelease_v2", (int), 0);
  world_close(&l.w);
}

int main(void) {
  gemini_config_t c = gpu_config(6, 10, 0);
  gemini_manager_t mgr;
  gemini_status_t status = gemini_manager_open(&c, &mgr);
  if (status == GEMINI_ERR_UNSUPPORTED) {
    fprintf(stderr, "skipped: %s\n", world_error().message);
    return 77;
  }
  CHECK_OK(status);
  CHECK_OK(gemini_manager_close(mgr));
  RUN(test_gpu_bytes_come_back_through_every_tier);
  RUN(test_gpu_late_updates_follow_the_device);
  RUN(test_gpu_memory_storm_evicts);
  RUN(test_gpu_streams_of_the_caller_are_adopted);
  RUN(test_gpu_graphs_outlive_the_moves_of_their_chunks);
  RUN(test_gpu_graphs_fetch_what_does_not_fit);
  return check_done();
}
