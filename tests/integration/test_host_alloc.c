/* Blocks of host memory out of the host budget: their places, what makes room for them, and what is refused.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "world.h"

#define W WORLD_CHUNK
static const uint64_t mib = 1 << 20;

typedef struct {
  uint8_t *ptr;
  uint64_t size, seed;
} block_t;
static block_t block_new(const world_t *w, uint64_t size, uint64_t alignment, uint64_t seed) {
  block_t b = { NULL, size, seed };
  void *ptr = NULL;
  CHECK_OK(gemini_host_alloc(w->mgr, size, alignment, &ptr));
  CHECK(ptr && (uintptr_t)ptr % (alignment ? alignment : 16) == 0);
  b.ptr = ptr;
  for (uint64_t i = 0; i < size; i++) b.ptr[i] = world_byte(seed, i);
  return b;
}
static bool block_holds(block_t b) {
  for (uint64_t i = 0; i < b.size; i++)
    if (b.ptr[i] != world_byte(b.seed, i)) return false;
  return true;
}
static void block_free(const world_t *w, block_t b) {
  CHECK(block_holds(b));
  CHECK_OK(gemini_host_free(w->mgr, b.ptr));
}
static gemini_arena_t arena_of(world_t *w, const char *name, uint64_t chunks) {
  gemini_arena_t arena = world_arena(w, GEMINI_KIND_OTHER, 1, name, 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(w->mgr, arena, chunks * W, &offset));
  return arena;
}

/* ---- sizes and places */
static void test_blocks_of_all_sizes_and_alignments_have_their_own_bytes(void) {
  world_t w = world_open(world_config(4, 256, 0));
  static const uint64_t sizes[] = { 1,    15,   16,    17,    255, 256,   257,   1000,  4095,
                                    4096, 4097, 60000, W - 1, W,   W + 1, 3 * W, 20 * W };
  enum { SIZES = sizeof sizes / sizeof *sizes };
  for (int round = 0; round < 2; round++) {
    block_t blocks[SIZES + 22];
    uint64_t sum = 0;
    int n = 0;
    for (int i = 0; i < SIZES; i++, n++) blocks[n] = block_new(&w, sizes[i], 0, (uint64_t)n + 1);
    for (uint64_t a = 0; a <= 21; a++, n++) {
      figures_t s = world_stats(&w);
      if (s.budget_bytes[GEMINI_TIER_HOST] - s.used_bytes[GEMINI_TIER_HOST] < (UINT64_C(2) << a)) break;
      blocks[n] = block_new(&w, 100 + a, UINT64_C(1) << a, (uint64_t)n + 1);
    }
    CHECK(n > SIZES + 18);
    for (int i = 0; i < n; i++) {
      CHECK(block_holds(blocks[i])); /* nobody wrote into another's */
      sum += blocks[i].size;
    }
    figures_t s = world_stats(&w);
    CHECK(s.host_alloc_bytes >= sum);
    CHECK(s.used_bytes[GEMINI_TIER_HOST] >= s.host_alloc_bytes);
    CHECK(s.used_bytes[GEMINI_TIER_HOST] <= s.budget_bytes[GEMINI_TIER_HOST]);
    CHECK(s.peak_bytes[GEMINI_TIER_HOST] >= s.used_bytes[GEMINI_TIER_HOST]);
    for (int i = 0; i < n; i += 2) block_free(&w, blocks[i]);
    for (int i = 1; i < n; i += 2) block_free(&w, blocks[i]);
    s = world_stats(&w);
    CHECK_EQ(s.host_alloc_bytes, 0);
    CHECK_EQ(s.used_bytes[GEMINI_TIER_HOST], 0);
  }
  CHECK_OK(gemini_host_free(w.mgr, NULL));
  world_close(&w);
}

static void test_one_block_may_have_the_whole_budget_and_no_more(void) {
  world_t w = world_open(world_config(4, 32, 0));
  block_t all = block_new(&w, 32 * W, 0, 1);
  CHECK_EQ(world_stats(&w).used_bytes[GEMINI_TIER_HOST], 32 * W);
  void *ptr = &w;
  CHECK_STATUS(gemini_host_alloc(w.mgr, 1, 0, &ptr), GEMINI_ERR_OOM_HOST);
  CHECK_STATUS(gemini_host_alloc(w.mgr, 32 * W + 1, 0, &ptr), GEMINI_ERR_OOM_HOST);
  CHECK_SAYS(world_error().message, "2097153");
  CHECK_SAYS(world_error().message, "2097152");
  CHECK_STATUS(gemini_host_alloc(w.mgr, UINT64_MAX, 0, &ptr), GEMINI_ERR_OOM_HOST);
  CHECK_STATUS(gemini_host_alloc(w.mgr, UINT64_MAX - 5, 4096, &ptr), GEMINI_ERR_OOM_HOST);
  CHECK(ptr == &w);
  block_free(&w, all);
  all = block_new(&w, 30 * W, 4096, 2); /* small blocks come in slabs of two chunks of this size */
  block_t rest = block_new(&w, 100, 0, 3);
  block_free(&w, all);
  block_free(&w, rest);
  CHECK_EQ(world_stats(&w).used_bytes[GEMINI_TIER_HOST], 0);
  world_close(&w);
  /* A budget that holds no chunk. */
  gemini_config_t c = world_config(4, 1, 0);
  c.host_bytes = W - 4096;
  w = world_open(c);
  CHECK_STATUS(gemini_host_alloc(w.mgr, 100, 0, &ptr), GEMINI_ERR_OOM_HOST);
  world_close(&w);
}

/* ---- chunks make room */
static void test_chunks_make_room_and_keep_their_bytes(void) {
  for (uint64_t files = 0; files <= 64; files += 64) {
    world_t w = world_open(world_config(6, 32, files));
    gemini_arena_t a = arena_of(&w, "a", 30);
    for (uint64_t i = 0; i < 30; i++) world_fill(&w, a, i * W, W, GEMINI_TIER_HOST, 7);
    block_t first = block_new(&w, 2 * W, 0, 1);
    void *ptr = &w;
    if (!files) {
      CHECK_STATUS(gemini_host_alloc(w.mgr, W, 0, &ptr), GEMINI_ERR_OOM_HOST);
      CHECK(ptr == &w);
      CHECK_EQ(world_stats(&w).host_alloc_bytes, 2 * W);
      /* A chunk whose bytes are on the device as well can do without its place. */
      gemini_access_t x = world_part(a, 0, 4 * W, GEMINI_READ, GEMINI_TIER_DEVICE);
      CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      block_t second = block_new(&w, 3 * W, 0, 2);
      CHECK(block_holds(first));
      block_free(&w, second);
    } else {
      block_t second = block_new(&w, 20 * W, W, 2), third = block_new(&w, 700, 0, 3);
      figures_t s = world_stats(&w);
      CHECK(s.used_bytes[GEMINI_TIER_FILE] >= 20 * W);
      CHECK(s.used_bytes[GEMINI_TIER_HOST] <= 32 * W);
      CHECK(s.host_alloc_bytes >= 22 * W + 700);
      for (uint64_t i = 0; i < 29; i++) CHECK(world_holds(&w, a, i * W, 2 * W, 7)); /* in what is left */
      CHECK(block_holds(second) && block_holds(third));
      CHECK_STATUS(gemini_host_alloc(w.mgr, 12 * W, 0, &ptr), GEMINI_ERR_OOM_HOST);
      block_free(&w, third);
      block_free(&w, second);
    }
    block_free(&w, first);
    CHECK_EQ(world_stats(&w).host_alloc_bytes, 0);
    for (uint64_t i = 0; i < 30; i++) CHECK(world_holds(&w, a, i * W, W, 7));
    world_close(&w);
  }
}

/* A chunk that somebody has the address of does not move; the block lies beside it, or is refused. */
static void test_acquired_chunks_stay_where_they_are(void) {
  world_t w = world_open(world_config(4, 16, 64));
  gemini_arena_t a = arena_of(&w, "a", 16);
  for (uint64_t i = 0; i < 16; i++) world_fill(&w, a, i * W, W, GEMINI_TIER_HOST, 7);
  for (uint64_t held = 0; held < 16; held++) {
    gemini_access_t x = world_part(a, held * W, W, GEMINI_READ, GEMINI_TIER_HOST);
    CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    block_t small = block_new(&w, 1000, 0, 2); /* whatever is held, one slot can be had */
    void *ptr;
    gemini_status_t status = gemini_host_alloc(w.mgr, 10 * W, 0, &ptr);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
    if (!status) {
      memset(ptr, 0xee, 10 * W);
      CHECK_OK(gemini_host_free(w.mgr, ptr));
    }
    for (uint64_t i = 0; i < W; i++) CHECK_EQ(((uint8_t *)x.ptr)[i], world_byte(7, held * W + i));
    CHECK_STATUS(gemini_host_alloc(w.mgr, 16 * W, 0, &ptr), GEMINI_ERR_OOM_HOST);
    CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    block_free(&w, small);
    CHECK(world_holds(&w, a, held * W, W, 7));
  }
  CHECK(world_holds(&w, a, 0, 16 * W, 7));
  world_close(&w);
}

/* ---- budgets */
static void test_budgets_change_with_blocks_alive(void) {
  world_t w = world_open(world_config(4, 64, 200));
  gemini_arena_t a = arena_of(&w, "a", 40);
  for (uint64_t i = 0; i < 40; i++) world_fill(&w, a, i * W, W, GEMINI_TIER_HOST, 7);
  block_t small = block_new(&w, 300, 0, 1), large = block_new(&w, 10 * W, 0, 2);
  CHECK_STATUS(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 9 * W), GEMINI_ERR_OOM_HOST);
  CHECK_EQ(world_stats(&w).budget_bytes[GEMINI_TIER_HOST], 64 * W);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 24 * W)); /* both lie behind it */
  CHECK(block_holds(small) && block_holds(large));
  CHECK(world_stats(&w).used_bytes[GEMINI_TIER_HOST] <= 24 * W);
  for (uint64_t i = 0; i < 39; i++) CHECK(world_holds(&w, a, i * W, 2 * W, 7));
  CHECK(world_stats(&w).used_bytes[GEMINI_TIER_HOST] <= 24 * W);
  block_t more = block_new(&w, 3 * W, 0, 3); /* there is room, only not where the first ones lie */
  CHECK(world_stats(&w).used_bytes[GEMINI_TIER_HOST] <= 24 * W);
  block_t slab = block_new(&w, 5000, 0, 4);
  void *ptr;
  CHECK_STATUS(gemini_host_alloc(w.mgr, 20 * W, 0, &ptr), GEMINI_ERR_OOM_HOST);
  block_free(&w, large);
  block_free(&w, small);
  block_free(&w, slab);
  block_free(&w, more);
  CHECK_EQ(world_stats(&w).host_alloc_bytes, 0);
  more = block_new(&w, 24 * W, 0, 5); /* all of the smaller budget */
  block_free(&w, more);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 100 * W)); /* all of a larger one */
  more = block_new(&w, 100 * W, 0, 6);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 120 * W));
  for (uint64_t i = 0; i < 39; i++) CHECK(world_holds(&w, a, i * W, 2 * W, 7));
  block_free(&w, more);
  for (uint64_t i = 0; i < 40; i++) CHECK(world_holds(&w, a, i * W, W, 7));
  world_close(&w);
}

/* Blocks that a smaller budget has left behind end with the manager, beside chunks that lie where they do. */
static void test_close_with_blocks_behind_a_smaller_budget(void) {
  for (uint64_t budget = 54; budget <= 60; budget++) {
    world_t w = world_open(world_config(4, 64, 0));
    gemini_arena_t a = arena_of(&w, "a", 50);
    for (uint64_t i = 0; i < 50; i++) world_fill(&w, a, i * W, W, GEMINI_TIER_HOST, 7);
    (void)block_new(&w, 300, 0, 1);
    (void)block_new(&w, 2 * W, 0, 2);
    CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, budget * W));
    world_close(&w);
  }
}

static uint64_t process_bytes(void) {
  unsigned long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%*u %lu", &pages) == 1);
  fclose(file);
  return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}
static bool instrumented(void) {
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ /* memory has its shadow */
  return true;
#else
  return getenv("GEMINI_VALGRIND") != NULL;
#endif
}
static void test_memory_of_blocks_comes_back(void) {
  uint64_t before = process_bytes(), little = 3 * mib;
  world_t w = world_open(world_config(4, 512, 0));
  block_t all = block_new(&w, 512 * W, 0, 1); /* 32 MiB */
  if (!instrumented()) CHECK(process_bytes() - before >= 32 * mib && process_bytes() - before < 33 * mib + little);
  block_free(&w, all);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 64 * W));
  if (!instrumented()) CHECK(process_bytes() - before < 4 * mib + little);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 512 * W));
  all = block_new(&w, 256 * W, 0, 2);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 256 * W));
  block_free(&w, all); /* it lay behind the budget, and its memory is nobody's now */
  if (!instrumented()) CHECK(process_bytes() - before < 17 * mib + little);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 16 * W));
  if (!instrumented()) CHECK(process_bytes() - before < mib + little);
  world_close(&w);
}

/* ---- the end */
static bool mapped(void) { /* is there a host tier in this process? */
  char line[512];
  bool found = false;
  FILE *file = fopen("/proc/self/maps", "r");
  CHECK(file);
  while (fgets(line, sizeof line, file)) found |= strstr(line, "gemini host") != NULL;
  fclose(file);
  return found;
}
static void test_blocks_end_with_their_manager(void) {
  uint64_t before = 0; /* after four rounds: the first ones bring 7 MiB that stay, and no later ones bring any */
  for (int round = 0; round < 8; round++) {
    world_t w = world_open(world_config(4, 256, round % 2 ? 64 : 0));
    gemini_arena_t a = arena_of(&w, "a", 20);
    for (uint64_t i = 0; i < 20; i++) world_fill(&w, a, i * W, W, GEMINI_TIER_HOST, 7);
    for (uint64_t i = 0; i < 40; i++) block_new(&w, 1 + i * 3001, UINT64_C(1) << i % 13, i + 1);
    block_new(&w, 20 * W, 0, 90);
    if (round % 4 > 1) CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 120 * W)); /* some of them lie behind it */
    world_close(&w);
    CHECK(!mapped());
    if (round == 3) before = process_bytes();
    if (round > 3 && !instrumented()) CHECK(process_bytes() < before + 4 * mib);
  }
}

/* ---- misuse */
static void test_what_is_no_live_block_is_refused(void) {
  world_t w = world_open(world_config(4, 64, 0)), other = world_open(world_config(4, 64, 0));
  block_t small = block_new(&w, 300, 0, 1), large = block_new(&w, 4 * W, 0, 2), theirs = block_new(&other, 300, 0, 3);
  gemini_arena_t a = arena_of(&w, "a", 2);
  gemini_access_t x = world_part(a, 0, 2 * W, GEMINI_READ_WRITE, GEMINI_TIER_HOST);
  CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  block_t gone = block_new(&w, 700, 0, 4), gone_large = block_new(&w, 2 * W, 0, 5);
  block_free(&w, gone);
  block_free(&w, gone_large);
  void *heap = malloc(100), *device;
  CHECK(heap);
  CHECK_OK(gemini_alloc(w.mgr, 1000, GEMINI_STREAM_CALLER, &device));
  void *const wrong[] = { gone.ptr,      gone_large.ptr,  small.ptr + 1, small.ptr + 256,
                          large.ptr + W, large.ptr - 256, theirs.ptr,    heap,
                          &heap,         (void *)16,      x.ptr,         device,
                          (void *)wrong, (void *)-1,      small.ptr - 1, (void *)UINT64_C(0x7fff00000000) };
  figures_t before = world_stats(&w);
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    CHECK_STATUS(gemini_host_free(w.mgr, wrong[i]), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().operation, "gemini_host_free");
    CHECK(world_error().message[0]);
  }
  CHECK_EQ(world_stats(&w).host_alloc_bytes, before.host_alloc_bytes);
  CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_free(w.mgr, device, GEMINI_STREAM_CALLER));
  free(heap);
  block_free(&other, theirs);
  block_free(&w, small);
  CHECK_STATUS(gemini_host_free(w.mgr, small.ptr), GEMINI_ERR_INVALID);
  block_free(&w, large);
  CHECK_STATUS(gemini_host_free(w.mgr, large.ptr), GEMINI_ERR_INVALID);
  void *ptr = &w;
  CHECK_STATUS(gemini_host_alloc(w.mgr, 0, 0, &ptr), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_host_alloc(w.mgr, 100, 3, &ptr), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_host_alloc(w.mgr, 100, 4 * mib, &ptr), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_host_alloc(w.mgr, 100, 0, NULL), GEMINI_ERR_INVALID);
  CHECK(ptr == &w);
  world_close(&other);
  world_close(&w);
}

/* ---- threads */
enum { THREADS = 4, OWN = 12 };
typedef struct {
  const world_t *w;
  gemini_arena_t arena;
  uint64_t seed, refused, made;
} worker_t;
static void *allocate(void *user) {
  worker_t *me = user;
  block_t own[OWN] = { { 0 } };
  uint64_t r = me->seed * 2 + 1;
  for (int step = 0; step < 400; step++) {
    uint64_t i = (check_random(&r) >> 20) % OWN, kind = (check_random(&r) >> 20) % 8;
    if (own[i].ptr) {
      block_free(me->w, own[i]);
      own[i].ptr = NULL;
      continue;
    }
    uint64_t most = kind ? 3000 : 4 * W, size = 1 + (check_random(&r) >> 20) % most;
    void *ptr;
    gemini_status_t status = gemini_host_alloc(me->w->mgr, size, UINT64_C(1) << (check_random(&r) >> 20) % 13, &ptr);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
    me->refused += status != GEMINI_OK;
    me->made += status == GEMINI_OK;
    if (status) continue;
    own[i] = (block_t){ ptr, size, me->seed * 1000 + (uint64_t)step + 1 };
    for (uint64_t k = 0; k < size; k++) own[i].ptr[k] = world_byte(own[i].seed, k);
  }
  for (int i = 0; i < OWN; i++)
    if (own[i].ptr) block_free(me->w, own[i]);
  return NULL;
}
static void *use_chunks(void *user) {
  worker_t *me = user;
  uint64_t r = me->seed * 2 + 1;
  for (int step = 0; step < 300; step++) {
    uint64_t at = (check_random(&r) >> 20) % 38;
    gemini_access_t x = world_part(me->arena, at * W, 2 * W, GEMINI_READ, GEMINI_TIER_HOST);
    gemini_status_t status = gemini_acquire(me->w->mgr, &x, 1, GEMINI_STREAM_CALLER);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
    if (status) continue;
    for (uint64_t k = 0; k < 2 * W; k += 509) CHECK_EQ(((uint8_t *)x.ptr)[k], world_byte(7, at * W + k));
    CHECK_OK(gemini_release(me->w->mgr, &x, 1, GEMINI_STREAM_CALLER));
  }
  return NULL;
}
static void test_threads_allocate_beside_those_who_use_chunks(void) {
  world_t w = world_open(world_config(4, 48, 100));
  gemini_arena_t a = arena_of(&w, "a", 40);
  for (uint64_t i = 0; i < 40; i++) world_fill(&w, a, i * W, W, GEMINI_TIER_HOST, 7);
  pthread_t threads[THREADS + 1];
  worker_t workers[THREADS + 1];
  uint64_t made = 0;
  for (uint64_t i = 0; i <= THREADS; i++) {
    workers[i] = (worker_t){ .w = &w, .arena = a, .seed = i + 1 };
    CHECK_EQ(pthread_create(&threads[i], NULL, i < THREADS ? allocate : use_chunks, &workers[i]), 0);
  }
  for (int i = 0; i <= THREADS; i++) {
    CHECK_EQ(pthread_join(threads[i], NULL), 0);
    made += workers[i].made;
  }
  CHECK(made > 200);
  CHECK_EQ(world_stats(&w).host_alloc_bytes, 0);
  for (uint64_t i = 0; i < 40; i++) CHECK(world_holds(&w, a, i * W, W, 7));
  world_close(&w);
}

static void hangs(int number) {
  (void)number;
  static const char text[] = "no end\n";
  (void)!write(2, text, sizeof text - 1);
  _exit(1);
}
int main(void) {
  signal(SIGALRM, hangs);
  alarm(540);
  RUN(test_blocks_of_all_sizes_and_alignments_have_their_own_bytes);
  RUN(test_one_block_may_have_the_whole_budget_and_no_more);
  RUN(test_chunks_make_room_and_keep_their_bytes);
  RUN(test_acquired_chunks_stay_where_they_are);
  RUN(test_budgets_change_with_blocks_alive);
  RUN(test_close_with_blocks_behind_a_smaller_budget);
  RUN(test_memory_of_blocks_comes_back);
  RUN(test_blocks_end_with_their_manager);
  RUN(test_what_is_no_live_block_is_refused);
  RUN(test_threads_allocate_beside_those_who_use_chunks);
  return check_done();
}
