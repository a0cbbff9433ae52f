/* The functions that PyTorch and CuPy call: what they count, evict and refuse, from any thread and stream, before and after
 * a manager's life. Only gemini.h. GEMINI_TEST_DEVICE=cuda runs it on a GPU (skipped where there is none), where bytes of
 * blocks are not looked at. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "gemini/hook.h"
#include "world.h"

static bool on_gpu;
static uint64_t W; /* bytes of a chunk */
static const uint32_t HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE;

static gemini_config_t hook_config(uint64_t device_chunks, uint64_t host_chunks) {
  gemini_config_t c = world_config(1, 1, 0);
  if (on_gpu) c.device = GEMINI_DEVICE_CUDA;
  c.chunk_bytes = W;
  c.device_bytes = device_chunks * W;
  c.host_bytes = host_chunks * W;
  return c;
}
/* A stream of the manager's as hooks take it. */
static void *as_argument(const world_t *w, gemini_stream_t stream) {
  void *native = (void *)(uintptr_t)stream;
  if (on_gpu) CHECK_OK(gemini_stream_native(w->mgr, stream, &native));
  return native;
}
static void through_device(const world_t *w, gemini_object_t object, uint64_t offset) {
  gemini_access_t a = world_part(object, offset, W, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
}
#define through_device(w, object, offset) through_device(w, OBJECT(object), offset)
/* An arena of so many chunks with bytes of their own, each on the device as far as they fit. */
static gemini_arena_t filled(const world_t *w, uint64_t chunks) {
  gemini_arena_t arena = world_arena(w, GEMINI_KIND_OTHER, 16, "a", 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(w->mgr, arena, chunks * W, &offset));
  for (uint64_t i = 0; i < chunks; i++) world_fill(w, arena, i * W, W, HOST, i + 1);
  for (uint64_t i = 0; i < chunks; i++) through_device(w, arena, i * W);
  return arena;
}
static void holds_all(const world_t *w, gemini_arena_t arena, uint64_t chunks) {
  for (uint64_t i = 0; i < chunks; i++) CHECK(world_holds(w, arena, i * W, W, i + 1));
}
static void check_error(const char *operation, gemini_status_t status, const char *says) {
  gemini_error_info_t e = world_error();
  CHECK_EQ(e.status, status);
  if (strcmp(e.operation, operation) || !strstr(e.message, says)) fprintf(stderr, "%s: %s\n", e.operation, e.message);
  CHECK(!strcmp(e.operation, operation) && strstr(e.message, says));
}
static uint64_t evicted(const world_t *w) {
  figures_t s = world_stats(w);
  return s.moved_bytes[LINK_D2H][GEMINI_REASON_PRESSURE];
}

/* ---- shapes */
static void test_hook_functions_have_the_shapes_that_frameworks_call(void) {
  void *(*torch_malloc)(ptrdiff_t, int, void *) = gemini_torch_malloc;
  void (*torch_free)(void *, ptrdiff_t, int, void *) = gemini_torch_free;
  void *(*cupy_malloc)(void *, size_t, int) = gemini_cupy_malloc;
  void (*cupy_free)(void *, void *, int) = gemini_cupy_free;
  world_t w = world_open(hook_config(8, 8));
  void *stream = as_argument(&w, w.stream);
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  uint8_t *a = torch_malloc(1000, 0, stream), *b = cupy_malloc(stream, 1000, 0), *c = torch_malloc(1, 0, NULL);
  CHECK(a && b && c && (uintptr_t)a % 512 == 0 && (uintptr_t)b % 512 == 0 && (uintptr_t)c % 512 == 0);
  CHECK(a + 1000 <= b || b + 1000 <= a);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 1024 + 1024 + 512);
  torch_free(a, 1000, 0, stream);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 1024 + 512);
  cupy_free(stream, b, 0);
  torch_free(c, 1, 0, NULL);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 0);
  CHECK(a = torch_malloc(100, 0, stream));
  CHECK_OK(gemini_free(w.mgr, a, w.stream)); /* takes it, too */
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 0);
  world_close(&w);
}

/* ---- counters */
enum { OPS = 6 };
/* Some pattern of allocations in each of some operators, by the hook or not; peaks_out: of live bytes, by operator. */
static void run_ops(const world_t *w, void *stream, bool hook, uint64_t *peaks_out) {
  void *kept[OPS] = { 0 };
  uint64_t random = 9, live = 0, kept_bytes[OPS] = { 0 };
  CHECK_OK(gemini_iteration_begin(w->mgr));
  for (int op = 0; op < OPS; op++) {
    char name[16];
    snprintf(name, sizeof name, "op%d", op);
    CHECK_OK(gemini_op_begin(w->mgr, name, w->stream));
    peaks_out[op] = live;
    void *blocks[20];
    uint64_t sizes[20];
    for (int i = 0; i < 20; i++) {
      sizes[i] = 1 + check_random(&random) % (W / 8);
      if (hook) CHECK(blocks[i] = gemini_torch_malloc((ptrdiff_t)sizes[i], 0, stream));
      else CHECK_OK(gemini_alloc(w->mgr, sizes[i], w->stream, &blocks[i]));
      sizes[i] = (sizes[i] + 511) / 512 * 512;
      live += sizes[i];
      if (live > peaks_out[op]) peaks_out[op] = live;
      if (i % 3) continue;
      if (hook) gemini_torch_free(blocks[i], 0, 0, stream);
      else CHECK_OK(gemini_free(w->mgr, blocks[i], w->stream));
      live -= sizes[i];
    }
    for (int i = 0; i < 20; i++) {
      if (i % 3 == 0) continue;
      if (i == 1) { /* to be freed by a later operator */
        kept[op] = blocks[i];
        kept_bytes[op] = sizes[i];
        continue;
      }
      if (hook) gemini_torch_free(blocks[i], 0, 0, stream);
      else CHECK_OK(gemini_free(w->mgr, blocks[i], w->stream));
      live -= sizes[i];
    }
    CHECK_EQ(world_stats(w).nonmodel_bytes, live);
    CHECK_OK(gemini_op_end(w->mgr));
  }
  for (int op = 0; op < OPS; op++) {
    if (hook) gemini_torch_free(kept[op], 0, 0, stream);
    else CHECK_OK(gemini_free(w->mgr, kept[op], w->stream));
    live -= kept_bytes[op];
  }
  CHECK_EQ(live, 0);
  CHECK_OK(gemini_iteration_end(w->mgr));
}
/* Peaks and heap bytes of the operators, as the trace has them. */
static void trace_ops(const world_t *w, uint64_t values_out[OPS][2]) {
  char path[64] = "/tmp/gemini.hook.XXXXXX", line[512];
  int fd = mkstemp(path), count = 0;
  CHECK(fd >= 0);
  CHECK_OK(gemini_trace_save(w->mgr, path));
  FILE *file = fdopen(fd, "r");
  CHECK(file);
  while (fgets(line, sizeof line, file)) {
    unsigned long long peak, heap;
    if (sscanf(line, "op %*u %*u %llu %llu", &peak, &heap) != 2) continue;
    CHECK(count < OPS);
    values_out[count][0] = peak;
    values_out[count++][1] = heap;
  }
  CHECK_EQ(count, OPS);
  fclose(file);
  unlink(path);
}
static void test_hook_counts_each_operators_peak_to_the_byte(void) {
  uint64_t peaks[2][OPS], traced[2][OPS][2];
  for (int hook = 0; hook < 2; hook++) {
    world_t w = world_open(hook_config(40, 8));
    if (hook) CHECK_OK(gemini_hook_set(w.mgr, 0));
    for (int i = 0; i < 4; i++) run_ops(&w, as_argument(&w, w.stream), hook, peaks[hook]);
    trace_ops(&w, traced[hook]);
    figures_t s = world_stats(&w);
    CHECK_EQ(s.op_peak_error_bytes, 0);
    CHECK(s.planned_iterations > 0);
    world_close(&w);
  }
  for (int op = 0; op < OPS; op++) {
    CHECK_EQ(traced[1][op][0], peaks[1][op]);
    CHECK_EQ(traced[1][op][0], traced[0][op][0]);
    CHECK_EQ(traced[1][op][1], traced[0][op][1]);
  }
}

/* ---- a caching allocator that compacts its segments */
enum { COMPACT_CHUNKS = 8, COMPACT_FRAMES = 12 };
typedef enum { KEEP, COMPACT, COMPACT_AND_TELL } compact_t;
/* One of its iterations: each op reads a chunk. In the first one, two ops take the segments. */
static void caching_iteration(const world_t *w, gemini_arena_t arena, void *stream, void *segments[2], bool first) {
  CHECK_OK(gemini_iteration_begin(w->mgr));
  for (uint64_t i = 0; i < COMPACT_CHUNKS; i++) {
    char name[16];
    snprintf(name, sizeof name, "op%d", (int)i);
    CHECK_OK(gemini_op_begin(w->mgr, name, w->stream));
    through_device(w, arena, i * W);
    if (first && i % 4 == 2) CHECK(segments[i / 4] = gemini_torch_malloc((ptrdiff_t)((i == 2 ? 3 : 4) * W), 0, stream));
    CHECK_OK(gemini_op_end(w->mgr));
  }
}
/* Exchanges its segments for one of so many chunks. */
static void compact(const world_t *w, void *stream, void *segments[2], uint64_t chunks, bool tell) {
  for (int i = 0; i < 2; i++) gemini_torch_free(segments[i], 0, 0, stream);
  CHECK(segments[0] = gemini_torch_malloc((ptrdiff_t)(chunks * W), 0, stream));
  segments[1] = NULL;
  if (tell) CHECK_OK(gemini_hook_compacted(w->mgr));
}
/* Returns the chunks that the plan fetches at last. again: it compacts in the fourth iteration, too. */
static uint64_t fetched_by_caching(compact_t kind, bool again, figures_t *stats_out) {
  world_t w = world_open(hook_config(COMPACT_FRAMES, COMPACT_CHUNKS + 2));
  void *stream = as_argument(&w, w.stream), *segments[2];
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  gemini_arena_t arena = filled(&w, COMPACT_CHUNKS);
  for (int i = 0; i < 6; i++) {
    caching_iteration(&w, arena, stream, segments, !i);
    if (!i && kind != KEEP) compact(&w, stream, segments, 6, kind == COMPACT_AND_TELL);
    if (i == 3 && again) compact(&w, stream, segments, 5, kind == COMPACT_AND_TELL);
    CHECK_OK(gemini_iteration_end(w.mgr));
  }
  *stats_out = world_stats(&w);
  holds_all(&w, arena, COMPACT_CHUNKS);
  world_close(&w);
  return stats_out->planned_fetch_bytes / W;
}
static void test_plans_count_on_what_an_allocator_holds_that_has_compacted(void) {
  figures_t kept, told, twice, untold;
  /* With f frames for c chunks that are read in turn, f - 1 stay and the others are fetched through the last one. */
  CHECK_EQ(fetched_by_caching(KEEP, false, &kept), COMPACT_CHUNKS - (COMPACT_FRAMES - 7 - 1));
  CHECK_EQ(fetched_by_caching(COMPACT_AND_TELL, false, &told), COMPACT_CHUNKS - (COMPACT_FRAMES - 6 - 1));
  CHECK_EQ(fetched_by_caching(COMPACT_AND_TELL, true, &twice), COMPACT_CHUNKS - (COMPACT_FRAMES - 5 - 1));
  CHECK_EQ(kept.departures + told.departures + twice.departures, 0);
  CHECK_EQ(kept.op_peak_error_bytes + told.op_peak_error_bytes + twice.op_peak_error_bytes, 0);
  CHECK(told.plans == kept.plans && twice.plans == told.plans + 1);
  CHECK_EQ(told.planned_iterations, 5);
  CHECK_EQ(twice.planned_iterations, 5);
  fetched_by_caching(COMPACT, false, &untold);
  CHECK(untold.departures > 0 && untold.op_peak_error_bytes == W);
}

/* ---- eviction */
static void test_hook_alloc_evicts_when_the_budget_is_full(void) {
  world_t w = world_open(hook_config(8, 16));
  gemini_arena_t arena = filled(&w, 8);
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *stream = as_argument(&w, w.stream), *block = gemini_torch_malloc((ptrdiff_t)(3 * W), 0, stream);
  CHECK(block);
  CHECK_EQ(evicted(&w), 3 * W);
  CHECK(world_stats(&w).peak_bytes[DEVICE] <= 8 * W);
  CHECK(!gemini_torch_malloc((ptrdiff_t)(9 * W), 0, stream)); /* more than there is */
  check_error("gemini_torch_malloc", GEMINI_ERR_OOM_DEVICE, "budget");
  gemini_torch_free(block, 0, 0, stream);
  holds_all(&w, arena, 8);
  world_close(&w);
}

static _Atomic int log_count;
static char log_text[240];
static void log_line(void *user, int32_t level, const char *message) {
  (void)user, (void)level;
  snprintf(log_text, sizeof log_text, "%s", message);
  log_count++;
}
/* What a torch.cuda.MemPool does: it asks once for each segment (up to torch 2.11; a NULL is an OutOfMemoryError), keeps the
 * segments when their tensors are gone, whoever else needs room, and frees them all at its end. */
static void test_hook_serves_a_pool_that_asks_once_and_keeps_its_segments(void) {
  enum { CHUNKS = 126, SEGMENTS = 20 };
  gemini_config_t c = hook_config(128, CHUNKS + 8);
  c.log_fn = log_line;
  log_count = 0;
  world_t w = world_open(c);
  gemini_arena_t arena = filled(&w, CHUNKS);
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *stream = as_argument(&w, w.stream), *segments[SEGMENTS];
  const ptrdiff_t size = (ptrdiff_t)(5 * W);
  for (int i = 0; i < SEGMENTS; i++) CHECK(segments[i] = gemini_torch_malloc(size, 0, stream));
  CHECK_EQ(evicted(&w), (SEGMENTS * 5 - 2) * W);                          /* two chunks were free */
  for (uint64_t i = 0; i < CHUNKS; i++) through_device(&w, arena, i * W); /* through what the pool leaves them */
  CHECK_EQ(world_stats(&w).nonmodel_bytes, SEGMENTS * 5 * W);
  CHECK_EQ(log_count, 0);
  for (int i = 0; i < 2; i++) { /* from torch 2.13 on it asks again, having freed nothing here */
    CHECK(!gemini_torch_malloc(size * 6, 0, stream));
    check_error("gemini_torch_malloc", GEMINI_ERR_OOM_DEVICE, "");
  }
  CHECK_EQ(world_stats(&w).nonmodel_bytes, SEGMENTS * 5 * W);
  void *last = gemini_torch_malloc(size * 5, 0, stream); /* less is there */
  CHECK(last);
  gemini_torch_free(last, size * 5, 0, stream);
  for (int i = 0; i < SEGMENTS; i++) gemini_torch_free(segments[i], size, 0, stream);
  figures_t s = world_stats(&w);
  CHECK_EQ(s.nonmodel_bytes, 0);
  CHECK(s.peak_bytes[DEVICE] <= s.budget_bytes[DEVICE]);
  CHECK_EQ(log_count, 1);
  holds_all(&w, arena, CHUNKS);
  world_close(&w);
}

/* ---- a storm: allocations, frees by other threads and on other streams, and chunks that are in the way */
enum { STORM_THREADS = 4, STORM_STEPS = 300, STORM_RING = 4 };
typedef struct {
  uint8_t *at;
  uint64_t size, seed;
} block_t;
typedef struct {
  const world_t *w;
  gemini_stream_t stream;
  void *argument;
  pthread_mutex_t lock;
  block_t ring[STORM_RING]; /* for this thread to free; Guarded by lock */
  uint32_t count, index;
  _Atomic uint64_t wrong;
  _Atomic bool done;
} storm_t;
static storm_t storms[STORM_THREADS];
typedef struct {
  block_t block;
  storm_t *storm;
} work_t;
static void fill_block(void *user) {
  work_t *k = user;
  for (uint64_t i = 0; i < k->block.size; i += 61) k->block.at[i] = world_byte(k->block.seed, i);
  free(k);
}
static void check_block(void *user) {
  work_t *k = user;
  if (k->block.seed % 16 == 0) usleep(300); /* so that who frees is ahead */
  for (uint64_t i = 0; i < k->block.size; i += 61) k->storm->wrong += k->block.at[i] != world_byte(k->block.seed, i);
  free(k);
}
static void queue_work(storm_t *s, block_t block, gemini_call_fn fn) {
  work_t *k = malloc(sizeof *k);
  CHECK(k);
  *k = (work_t){ block, s };
  if (on_gpu) free(k);
  else CHECK_OK(gemini_stream_call(s->w->mgr, s->stream, fn, k));
}
static bool free_given(storm_t *s) {
  block_t block = { 0 };
  pthread_mutex_lock(&s->lock);
  if (s->count) block = s->ring[--s->count];
  pthread_mutex_unlock(&s->lock);
  if (!block.at) return false;
  queue_work(s, block, check_block);
  gemini_torch_free(block.at, (ptrdiff_t)block.size, 0, s->argument); /* behind that check */
  return true;
}
static void *storm(void *user) {
  storm_t *s = user;
  uint64_t random = 100 + s->index;
  for (uint64_t step = 0; step < check_repetitions(STORM_STEPS); step++) {
    block_t block = { NULL, 1 + check_random(&random) % (W / 2), (step + 1) * STORM_THREADS + s->index };
    block.at = gemini_torch_malloc((ptrdiff_t)block.size, 0, s->argument);
    if (!block.at) fprintf(stderr, "step %" PRIu64 ": %s\n", step, world_error().message);
    CHECK(block.at);
    queue_work(s, block, fill_block);
    CHECK_OK(gemini_stream_synchronize(s->w->mgr, s->stream)); /* before another stream has it */
    storm_t *to = &storms[check_random(&random) % STORM_THREADS];
    for (bool given = false; !given;) {
      pthread_mutex_lock(&to->lock);
      given = to->count < STORM_RING;
      if (given) to->ring[to->count++] = block;
      pthread_mutex_unlock(&to->lock);
      if (!given) free_given(s); /* its own, for the other one to get on */
      if (!given && to->done) to = s;
    }
    if (step % 2) free_given(s);
  }
  while (free_given(s)) continue;
  s->done = true;
  return NULL;
}
static void test_hook_storm_beyond_the_budget_never_fails(void) {
  /* Live at most: a ring and one block in hand for each thread, of half a chunk, on two chunks each at the worst. */
  enum { CHUNKS = 60, LIVE = STORM_THREADS * (STORM_RING + 1) };
  world_t w = world_open(hook_config(LIVE * 2 + 2, CHUNKS + 4));
  gemini_arena_t arena = filled(&w, CHUNKS);
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  pthread_t threads[STORM_THREADS];
  for (uint32_t i = 0; i < STORM_THREADS; i++) {
    storm_t *s = &storms[i];
    memset(s, 0, sizeof *s);
    s->w = &w;
    s->index = i;
    pthread_mutex_init(&s->lock, NULL);
    CHECK_OK(gemini_stream_create(w.mgr, &s->stream));
    s->argument = as_argument(&w, s->stream);
  }
  for (uint32_t i = 0; i < STORM_THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, storm, &storms[i]), 0);
  uint64_t random = 5;
  for (bool busy = true; busy;) {
    busy = false;
    for (int i = 0; i < STORM_THREADS; i++) busy |= !storms[i].done;
    through_device(&w, arena, check_random(&random) % CHUNKS * W);
  }
  for (int i = 0; i < STORM_THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  for (int i = 0; i < STORM_THREADS; i++) {
    while (free_given(&storms[i])) continue; /* given to a thread that was done */
    CHECK_OK(gemini_stream_synchronize(w.mgr, storms[i].stream));
    CHECK_EQ(storms[i].wrong, 0);
    pthread_mutex_destroy(&storms[i].lock);
  }
  figures_t s = world_stats(&w);
  CHECK_EQ(s.nonmodel_bytes, 0);
  CHECK(s.peak_bytes[DEVICE] <= s.budget_bytes[DEVICE]);
  CHECK(evicted(&w) > 0);
  holds_all(&w, arena, CHUNKS);
  world_close(&w);
}

/* ---- order: memory that a stream freed is another's when the first one's work is done */
static _Atomic bool gate;
static void wait_for_gate(void *user) {
  (void)user;
  while (!gate) usleep(100);
}
static void set_flag(void *user) { atomic_store((_Atomic bool *)user, true); }
static void test_hook_free_on_another_stream_holds_back_who_gets_the_memory(void) {
  if (on_gpu) return; /* gates are host functions, which one GPU's streams may share a thread for */
  world_t w = world_open(hook_config(2, 4));
  gemini_stream_t second;
  CHECK_OK(gemini_stream_create(w.mgr, &second));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *one = as_argument(&w, w.stream), *two = as_argument(&w, second);
  gate = false;
  void *block = gemini_torch_malloc((ptrdiff_t)(2 * W), 0, one); /* all there is */
  CHECK(block);
  CHECK_OK(gemini_stream_call(w.mgr, second, wait_for_gate, NULL));
  gemini_torch_free(block, 0, 0, two);
  _Atomic bool own = false, other = false;
  CHECK_EQ(gemini_torch_malloc((ptrdiff_t)W, 0, two) != NULL, true); /* its own: without waiting */
  CHECK_OK(gemini_stream_call(w.mgr, second, set_flag, &own));
  CHECK(gemini_torch_malloc((ptrdiff_t)W, 0, one));
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, set_flag, &other));
  usleep(20000);
  CHECK(!other && !own);
  gate = true;
  CHECK_OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK_OK(gemini_stream_synchronize(w.mgr, second));
  CHECK(other && own);
  world_close(&w);
}

static void test_hook_alloc_takes_memory_that_its_own_stream_freed(void) {
  world_t w = world_open(hook_config(4, 4));
  gemini_stream_t second;
  CHECK_OK(gemini_stream_create(w.mgr, &second));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *streams[2] = { as_argument(&w, w.stream), as_argument(&w, second) }, *blocks[2], *between[2];
  for (int i = 0; i < 2; i++) {
    CHECK(blocks[i] = gemini_torch_malloc(20000, 0, streams[i]));
    CHECK(between[i] = gemini_torch_malloc(512, 0, streams[i]));
  }
  for (int round = 0; round < 4; round++) { /* whichever was freed last */
    for (int i = 0; i < 2; i++) gemini_torch_free(blocks[i ^ (round & 1)], 20000, 0, streams[i ^ (round & 1)]);
    for (int i = 0; i < 2; i++)
      CHECK(blocks[i ^ (round >> 1)] == gemini_torch_malloc(20000, 0, streams[i ^ (round >> 1)]));
  }
  world_close(&w);
}

/* A free must come back while somebody has the manager's lock and waits for the device. */
typedef struct {
  const world_t *w;
  gemini_arena_t arena;
  _Atomic bool done;
} holder_t;
static void *hold_lock(void *user) {
  holder_t *h = user;
  gemini_access_t a = world_part(h->arena, 0, W, GEMINI_READ, HOST); /* waits for the copy, with the lock */
  CHECK_OK(gemini_acquire(h->w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  h->done = true;
  CHECK_OK(gemini_release(h->w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  return NULL;
}
static void test_hook_free_does_not_wait_for_the_lock(void) {
  world_t w = world_open(hook_config(8, 8));
  gemini_arena_t arena = filled(&w, 2);
  gemini_stream_t second;
  CHECK_OK(gemini_stream_create(w.mgr, &second));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *stream = as_argument(&w, second), *blocks[300];
  for (int i = 0; i < 300; i++) CHECK(blocks[i] = gemini_torch_malloc(700, 0, stream));
  gate = false;
  gemini_access_t a = world_part(arena, 0, W, GEMINI_READ_WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK_OK(gemini_stream_call(w.mgr, w.stream, wait_for_gate, NULL));
  CHECK_OK(gemini_release(w.mgr, &a, 1, w.stream));
  holder_t holder = { &w, arena, false };
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, hold_lock, &holder), 0);
  usleep(50000);
  for (int i = 0; i < 300; i++) gemini_torch_free(blocks[i], 700, 0, stream);
  CHECK(!holder.done); /* it had the lock all the time */
  gate = true;
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 0);
  for (int i = 0; i < 300; i++) CHECK(blocks[i] = gemini_torch_malloc(700, 0, stream));
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 300 * 1024);
  world_close(&w);
}

/* ---- lives of managers */
static void test_hook_frees_after_close_are_ignored(void) {
  world_t w = world_open(hook_config(8, 8));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *stream = as_argument(&w, w.stream), *old[2];
  for (int i = 0; i < 2; i++) CHECK(old[i] = gemini_torch_malloc(4096, 0, stream));
  world_close(&w);
  CHECK(!gemini_torch_malloc(4096, 0, stream));
  check_error("gemini_torch_malloc", GEMINI_ERR_STATE, "no manager serves device 0");

  w = world_open(hook_config(8, 8));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  stream = as_argument(&w, w.stream);
  void *now[2];
  for (int i = 0; i < 2; i++) CHECK(now[i] = gemini_torch_malloc(4096, 0, stream));
  for (int i = 0; i < 20; i++) { /* more managers that leave something behind, all for the same addresses */
    world_t x = world_open(hook_config(4, 4));
    CHECK_OK(gemini_hook_clear(w.mgr));
    CHECK_OK(gemini_hook_set(x.mgr, 0));
    CHECK(gemini_torch_malloc(512, 0, as_argument(&x, x.stream)));
    world_close(&x);
    CHECK_OK(gemini_hook_set(w.mgr, 0));
  }
  gemini_torch_free(old[0], 4096, 0, stream); /* nobody's: it must not be taken for one of now */
  gemini_cupy_free(stream, old[1], 0);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 8192);
  gemini_torch_free(old[1], 4096, 0, stream); /* once more than it was allocated: a failure, and nothing else */
  check_error("gemini_torch_free", GEMINI_ERR_INVALID, "does not point to memory");
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 8192);
  for (int i = 0; i < 2; i++) gemini_torch_free(now[i], 4096, 0, stream);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 0);
  world_close(&w);
}

typedef struct {
  void *blocks[64], *stream;
} late_t;
static void *free_late(void *user) {
  late_t *l = user;
  for (int i = 0; i < 64; i++) {
    gemini_torch_free(l->blocks[i], 512, 0, l->stream);
    if (i % 8 == 0) usleep(200);
  }
  return NULL;
}
static void test_hook_frees_while_the_manager_closes_are_no_harm(void) {
  for (int round = 0; round < 20; round++) {
    world_t w = world_open(hook_config(4, 4));
    CHECK_OK(gemini_hook_set(w.mgr, 0));
    late_t l = { { NULL }, NULL }; /* the stream must outlive the frees: the default one, or the caller */
    for (int i = 0; i < 64; i++) CHECK(l.blocks[i] = gemini_torch_malloc(512, 0, l.stream));
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, free_late, &l), 0);
    usleep(100 * (unsigned)round);
    world_close(&w);
    CHECK_EQ(pthread_join(thread, NULL), 0);
  }
}

static void test_hook_frees_find_their_manager(void) {
  world_t a = world_open(hook_config(8, 8)), b = world_open(hook_config(8, 8));
  CHECK_OK(gemini_hook_set(a.mgr, 0));
  CHECK_STATUS(gemini_hook_set(b.mgr, 0), GEMINI_ERR_EXISTS);
  void *of_a = gemini_torch_malloc(512, 0, NULL);
  CHECK(of_a);
  CHECK_OK(gemini_hook_clear(a.mgr));
  CHECK(!gemini_torch_malloc(512, 0, NULL));
  CHECK_OK(gemini_hook_set(b.mgr, 0));
  void *of_b = gemini_torch_malloc(1024, 0, NULL);
  CHECK(of_b);
  CHECK_EQ(world_stats(&a).nonmodel_bytes, 512);
  CHECK_EQ(world_stats(&b).nonmodel_bytes, 1024);
  gemini_torch_free(of_a, 512, 0, NULL);
  gemini_torch_free(of_b, 1024, 7, NULL); /* whatever device is said */
  CHECK_EQ(world_stats(&a).nonmodel_bytes, 0);
  CHECK_EQ(world_stats(&b).nonmodel_bytes, 0);
  world_close(&a);
  world_close(&b);
}

/* ---- misuse */
static void test_hook_misuse_is_refused_and_logged_once(void) {
  gemini_config_t c = hook_config(8, 8);
  c.log_fn = log_line;
  log_count = 0;
  world_t w = world_open(c);
  CHECK_STATUS(gemini_hook_clear(w.mgr), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_hook_set(w.mgr, 1), GEMINI_ERR_INVALID);
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  CHECK_OK(gemini_hook_set(w.mgr, 0));
  void *stream = as_argument(&w, w.stream), *block = gemini_torch_malloc(512, 0, stream);
  CHECK(block);
  const int devices[] = { -1, 1, 63, 64, INT32_MAX, INT32_MIN };
  for (int i = 0; i < 6; i++) {
    CHECK(!gemini_torch_malloc(512, devices[i], stream));
    check_error("gemini_torch_malloc", GEMINI_ERR_STATE, "serves device");
    CHECK(!gemini_cupy_malloc(stream, 512, devices[i]));
    check_error("gemini_cupy_malloc", GEMINI_ERR_STATE, "serves device");
  }
  CHECK(!gemini_torch_malloc(0, 0, stream) && !gemini_cupy_malloc(stream, 0, 0));
  check_error("gemini_cupy_malloc", GEMINI_ERR_STATE, "serves device"); /* the one before: 0 bytes are no failure */
  CHECK_EQ(log_count, 0);
  CHECK(!gemini_torch_malloc(-1, 0, stream));
  check_error("gemini_torch_malloc", GEMINI_ERR_INVALID, "negative");
  CHECK(!gemini_torch_malloc(PTRDIFF_MIN, 0, stream));
  CHECK(!gemini_torch_malloc(PTRDIFF_MAX, 0, stream));
  check_error("gemini_torch_malloc", GEMINI_ERR_OOM_DEVICE, "budget");
  CHECK(!gemini_cupy_malloc(stream, SIZE_MAX, 0));
  check_error("gemini_cupy_malloc", GEMINI_ERR_OOM_DEVICE, "budget");
  CHECK_EQ(log_count, 0); /* not while a framework may hold its locks */
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 512);
  CHECK_EQ(log_count, 1);
  CHECK(strstr(log_text, "negative"));

  int on_stack;
  gemini_torch_free(NULL, 512, 0, stream);
  gemini_cupy_free(stream, NULL, 0);
  gemini_torch_free(&on_stack, 512, 0, stream);
  check_error("gemini_torch_free", GEMINI_ERR_INVALID, "does not point to memory");
  gemini_torch_free((uint8_t *)block + 512, 512, 0, stream);
  check_error("gemini_torch_free", GEMINI_ERR_INVALID, "live allocation");
  if (!on_gpu) { /* a handle that is no stream */
    CHECK(!gemini_torch_malloc(512, 0, (void *)(uintptr_t)w.mgr));
    check_error("gemini_torch_malloc", GEMINI_ERR_HANDLE, "");
    gemini_torch_free(block, 512, 0, (void *)(uintptr_t)w.mgr);
    check_error("gemini_torch_free", GEMINI_ERR_HANDLE, "");
  }
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 512);
  gemini_cupy_free(stream, block, 0);
  gemini_cupy_free(stream, block, 0);
  check_error("gemini_cupy_free", GEMINI_ERR_INVALID, "live allocation");
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 0);
  CHECK_EQ(log_count, 1);
  CHECK_STATUS(gemini_hook_forget(w.mgr, &on_stack), GEMINI_ERR_NOT_FOUND);
  CHECK_OK(gemini_hook_clear(w.mgr));
  CHECK_STATUS(gemini_hook_clear(w.mgr), GEMINI_ERR_STATE);
  world_close(&w);
}

/* What the framework still holds is counted by what hooks have allocated and nobody has freed, whoever frees it. */
static void *block_of_a_new_manager(world_t *w, bool by_hook) {
  void *block;
  *w = world_open(hook_config(4, 4));
  CHECK_OK(gemini_hook_set(w->mgr, 0));
  if (by_hook) block = gemini_torch_malloc(1000, 0, NULL);
  else CHECK_OK(gemini_alloc(w->mgr, 1000, w->stream, &block));
  CHECK(block);
  return block;
}
static void test_frees_by_the_other_function_do_not_change_what_is_held(void) {
  world_t w;
  void *plain, *next;
  for (int i = 0; i < 2; i++) { /* until the system gives each manager the addresses of the one before */
    plain = block_of_a_new_manager(&w, false);
    CHECK_OK(gemini_free(w.mgr, plain, w.stream));
    world_close(&w);
  }
  /* a hook frees what it has not allocated: the framework holds `kept` still */
  void *kept = block_of_a_new_manager(&w, true);
  CHECK_OK(gemini_alloc(w.mgr, 1000, w.stream, &plain));
  gemini_torch_free(plain, 1000, 0, NULL);
  world_close(&w);
  next = block_of_a_new_manager(&w, true);
  CHECK(next != kept);
  const uint64_t live = world_stats(&w).nonmodel_bytes;
  gemini_torch_free(kept, 1000, 0, NULL);
  CHECK_EQ(world_stats(&w).nonmodel_bytes, live);
  gemini_torch_free(next, 1000, 0, NULL);
  world_close(&w);
  /* gemini_free() frees what a hook has allocated: the framework holds nothing, and the addresses are free again */
  plain = block_of_a_new_manager(&w, false);
  CHECK_OK(gemini_free(w.mgr, plain, w.stream));
  world_close(&w);
  for (int i = 0; i < 3; i++) {
    next = block_of_a_new_manager(&w, true);
    CHECK_OK(gemini_free(w.mgr, next, w.stream));
    world_close(&w);
    if (next == plain) continue;
    CHECK(i == 0); /* the system has chosen others, not the library: from here on it chooses these */
    plain = next;
  }
}

static void test_what_an_allocation_lacks_is_said_of_the_whole(void) {
  world_t w = world_open(hook_config(4, 4));
  void *first, *second;
  CHECK_OK(gemini_alloc(w.mgr, 3 * W, w.stream, &first));
  CHECK_EQ(gemini_alloc(w.mgr, 2 * W, w.stream, &second), GEMINI_ERR_OOM_DEVICE);
  char words[64];
  snprintf(words, sizeof words, "%llu more bytes", (unsigned long long)(2 * W));
  CHECK_SAYS(world_error().message, words);
  snprintf(words, sizeof words, "(%llu of it live)", (unsigned long long)(3 * W));
  CHECK_SAYS(world_error().message, words);
  CHECK_OK(gemini_free(w.mgr, first, w.stream));
  world_close(&w);
}

int main(void) {
  const char *device = getenv("GEMINI_TEST_DEVICE");
  on_gpu = device && !strcmp(device, "cuda");
  W = on_gpu ? UINT64_C(2) << 20 : WORLD_CHUNK;
  gemini_config_t c = hook_config(4, 4);
  gemini_manager_t mgr;
  gemini_status_t status = gemini_manager_open(&c, &mgr);
  if (on_gpu && status == GEMINI_ERR_UNSUPPORTED) {
    fprintf(stderr, "skipped: %s\n", world_error().message);
    return 77;
  }
  CHECK_OK(status);
  CHECK_OK(gemini_manager_close(mgr));
  RUN(test_hook_functions_have_the_shapes_that_frameworks_call);
  RUN(test_hook_counts_each_operators_peak_to_the_byte);
  RUN(test_plans_count_on_what_an_allocator_holds_that_has_compacted);
  RUN(test_hook_alloc_evicts_when_the_budget_is_full);
  RUN(test_hook_serves_a_pool_that_asks_once_and_keeps_its_segments);
  RUN(test_hook_storm_beyond_the_budget_never_fails);
  RUN(test_hook_free_on_another_stream_holds_back_who_gets_the_memory);
  RUN(test_hook_alloc_takes_memory_that_its_own_stream_freed);
  RUN(test_hook_free_does_not_wait_for_the_lock);
  RUN(test_hook_frees_after_close_are_ignored);
  RUN(test_hook_frees_while_the_manager_closes_are_no_harm);
  RUN(test_hook_frees_find_their_manager);
  RUN(test_hook_misuse_is_refused_and_logged_once);
  RUN(test_frees_by_the_other_function_do_not_change_what_is_held);
  RUN(test_what_an_allocation_lacks_is_said_of_the_whole);
  return check_done();
}
