/* Where bytes are and that they survive it, through the public interface: addresses, moves between tiers, what is
 * refused when memory ends, budgets, pins, hints, zero, files, norms, stale accesses, leaks.
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../touch.h"
#define WORLD_MORE      \
  gemini_arena_t arena; \
  gemini_tensor_t t[64]; /* an arena of byte elements, tensors of whole chunks */
#include "world.h"

#define OK(call) CHECK_OK(call)
#define CHUNK WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };

static world_t world_with_arena(gemini_config_t c) {
  world_t w = world_open(c);
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  a.kind = GEMINI_KIND_OTHER;
  a.capacity_bytes = UINT64_C(1) << 30;
  OK(gemini_arena_create(w.mgr, &a, &w.arena));
  return w;
}

static gemini_tensor_t tensor_at(world_t *w, const char *name, uint64_t size, uint64_t offset) {
  gemini_tensor_t t;
  OK(gemini_tensor_register(w->mgr, w->arena, name, size, offset, &t));
  return t;
}

/* count tensors of size bytes each: world->t[0..count). */
static world_t world_of(gemini_config_t c, int count, uint64_t size) {
  world_t w = world_with_arena(c);
  for (int i = 0; i < count; i++) {
    char name[32];
    snprintf(name, sizeof name, "t.%d", i);
    w.t[i] = tensor_at(&w, name, size, GEMINI_OFFSET_NEXT);
  }
  return w;
}

/* The message of this thread's last failure names this quantity. */
static bool says(const char *text) {
  gemini_error_info_t info = world_error();
  if (strstr(info.message, text)) return true;
  fprintf(stderr, "message: %s\n", info.message);
  return false;
}
static bool says_bytes(const char *before, uint64_t bytes) {
  char text[128];
  snprintf(text, sizeof text, "%s%" PRIu64, before, bytes);
  return says(text);
}

static uint64_t used(const world_t *w, uint32_t tier) { return world_stats(w).used_bytes[tier]; }

static uint64_t bytes_in(const world_t *w, gemini_tensor_t t, uint32_t tier) { return world_tier_bytes(w, t, tier); }

static bool is_zero(const void *at, uint64_t size) {
  const uint8_t *bytes = at;
  for (uint64_t i = 0; i < size; i++)
    if (bytes[i]) return false;
  return true;
}

static void put(world_t *w, gemini_tensor_t t, uint32_t tier, uint64_t seed) {
  world_fill(w, t, 0, world_tensor_info(w, t).size_bytes, tier, seed);
}
static void expect_part(world_t *w, gemini_object_t object, uint64_t offset, uint64_t size, uint32_t tier,
                        uint64_t seed) {
  CHECK(world_holds_on(w, object, offset, size, tier, seed));
}
#define expect_part(w, object, ...) expect_part(w, OBJECT(object), __VA_ARGS__)
static void expect(world_t *w, gemini_tensor_t t, uint32_t tier, uint64_t seed) {
  expect_part(w, t, 0, world_tensor_info(w, t).size_bytes, tier, seed);
}
static void expect_zero(world_t *w, gemini_tensor_t t, uint32_t tier) {
  gemini_access_t a = world_whole(t, GEMINI_READ, tier);
  OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(is_zero(a.ptr, world_tensor_info(w, t).size_bytes));
  OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static gemini_status_t move(world_t *w, gemini_object_t object, uint32_t tier) {
  gemini_access_t a = world_whole(object, GEMINI_READ, tier);
  return gemini_move(w->mgr, &a, 1);
}
#define move(w, object, tier) move(w, OBJECT(object), tier)

/* ---- work on streams */
typedef struct {
  void *at;
  uint64_t size, seed;
  long delay_ms;
  bool right; /* out: of a check */
} work_t;
static void work_fill(void *user) {
  work_t *k = user;
  sleep_ms(k->delay_ms);
  world_write(k->at, 0, k->size, k->seed);
}
static void work_check(void *user) {
  work_t *k = user;
  sleep_ms(k->delay_ms);
  k->right = world_reads(k->at, 0, k->size, k->seed);
}
typedef struct {
  const void *at, *bytes;
  uint64_t size;
  uint32_t delay_ms;
  bool right;
} compare_t;
static void work_compare(void *user) {
  compare_t *c = user;
  sleep_ms(c->delay_ms);
  c->right = !memcmp(c->at, c->bytes, c->size);
}

/* ---- addresses and contents */
static void test_addresses_across_evictions_stay(void) {
  world_t w = world_of(world_config(4, 12, 16), 16, CHUNK);
  uint64_t address[16], seed[16] = { 0 }, random = 7;
  for (int i = 0; i < 16; i++) {
    address[i] = world_tensor_info(&w, w.t[i]).address;
    CHECK_EQ(address[i], address[0] + (uint64_t)i * CHUNK);
  }
  for (int round = 0; round < 400; round++) {
    int i = (int)(check_random(&random) % 16);
    uint64_t choice = check_random(&random) % 8;
    if (choice < 2) {
      OK(move(&w, w.t[i], choice ? FILES : HOST));
    } else {
      bool write = choice < 5 || !seed[i];
      gemini_access_t a = world_whole(w.t[i], write ? GEMINI_WRITE : GEMINI_READ, DEVICE);
      OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK_EQ((uintptr_t)a.ptr, address[i]);
      if (write) world_write(a.ptr, 0, CHUNK, seed[i] = (uint64_t)round + 1);
      else CHECK(world_reads(a.ptr, 0, CHUNK, seed[i]));
      OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    CHECK_EQ(world_tensor_info(&w, w.t[i]).address, address[i]);
  }
  figures_t s = world_stats(&w);
  CHECK(s.moved_chunks[LINK_D2H][GEMINI_REASON_PRESSURE] > 50); /* it did evict */
  for (int i = 0; i < 16; i++)
    if (seed[i]) expect(&w, w.t[i], i % 2 ? HOST : DEVICE, seed[i]);
  world_close(&w);
}

static void test_contents_down_to_files_and_back_survive(void) {
  world_t w = world_of(world_config(4, 4, 4), 1, 3 * CHUNK - 100);
  uint64_t size = 3 * CHUNK - 100;
  put(&w, w.t[0], DEVICE, 5);
  static const uint32_t way[] = { HOST, FILES, HOST, DEVICE, FILES, DEVICE, HOST, DEVICE };
  for (size_t k = 0; k < sizeof way / sizeof *way; k++) {
    OK(move(&w, w.t[0], way[k]));
    for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++)
      CHECK_EQ(bytes_in(&w, w.t[0], tier), tier == way[k] ? size : 0);
    if (way[k] != HOST) CHECK_EQ(used(&w, way[k]), 3 * CHUNK);
    if (way[k] == FILES) CHECK_EQ(used(&w, DEVICE) + used(&w, HOST), 0);
    if (k % 3 == 2) expect(&w, w.t[0], way[k] == DEVICE ? DEVICE : HOST, 5 + k / 3);
    if (k % 3 == 2) put(&w, w.t[0], way[k] == DEVICE ? DEVICE : HOST, 6 + k / 3);
  }
  expect(&w, w.t[0], DEVICE, 7);
  expect(&w, w.t[0], HOST, 7);
  figures_t s = world_stats(&w);
  CHECK(s.moved_bytes[LINK_H2F][GEMINI_REASON_CALLER] >= 6 * CHUNK);
  CHECK(s.moved_bytes[LINK_F2H][GEMINI_REASON_CALLER] >= 6 * CHUNK);
  world_close(&w);
}

/* A stale lower copy must never come back: written on the device after it was stored below. */
static void test_contents_rewritten_above_an_older_copy_are_the_newer(void) {
  world_t w = world_of(world_config(2, 4, 8), 3, CHUNK);
  for (uint64_t round = 1; round <= 6; round++) {
    put(&w, w.t[0], DEVICE, round);
    OK(move(&w, w.t[0], round % 2 ? FILES : HOST));
    OK(move(&w, w.t[0], DEVICE)); /* now a clean copy lies below */
    gemini_access_t a = world_part(w.t[0], 100, 50, GEMINI_READ_WRITE, DEVICE);
    OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK(world_reads(a.ptr, 100, 50, round));
    world_write(a.ptr, 100, 50, round + 100);
    OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    put(&w, w.t[1], DEVICE, 50), put(&w, w.t[2], DEVICE, 51); /* push it out */
    CHECK_EQ(bytes_in(&w, w.t[0], DEVICE), 0);
    expect_part(&w, w.t[0], 100, 50, HOST, round + 100);
    expect_part(&w, w.t[0], 0, 100, DEVICE, round);
    expect_part(&w, w.t[0], 150, CHUNK - 150, DEVICE, round);
  }
  world_close(&w);
}

/* Leaving the device comes after the queued work that writes it, whoever asks for it. */
static void test_eviction_behind_queued_work_keeps_what_it_writes(void) {
  world_t w = world_of(world_config(2, 8, 8), 4, CHUNK);
  for (int how = 0; how < 4; how++) {
    gemini_access_t a = world_whole(w.t[0], GEMINI_WRITE, DEVICE);
    OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    work_t work = { .at = a.ptr, .size = CHUNK, .seed = 40 + (uint64_t)how, .delay_ms = 30 };
    OK(gemini_stream_call(w.mgr, w.stream, work_fill, &work));
    OK(gemini_release(w.mgr, &a, 1, w.stream));
    if (how == 0) OK(move(&w, w.t[0], HOST));
    if (how == 1) OK(move(&w, w.t[0], FILES));
    if (how == 2) put(&w, w.t[1], DEVICE, 1), put(&w, w.t[2], DEVICE, 2), put(&w, w.t[3], DEVICE, 3);
    expect(&w, w.t[0], HOST, 40 + (uint64_t)how);
    expect(&w, w.t[0], DEVICE, 40 + (uint64_t)how);
    OK(gemini_stream_synchronize(w.mgr, w.stream));
  }
  world_close(&w);
}

/* An acquire on one stream waits for what another stream was told to do with the bytes. */
static void test_acquire_on_another_stream_sees_the_first_ones_writes(void) {
  world_t w = world_of(world_config(4, 8, 0), 2, CHUNK);
  gemini_stream_t other;
  OK(gemini_stream_create(w.mgr, &other));
  for (uint64_t round = 1; round <= 6; round++) {
    gemini_access_t write = world_whole(w.t[0], GEMINI_WRITE, DEVICE), read = world_whole(w.t[0], GEMINI_READ, DEVICE);
    OK(gemini_acquire(w.mgr, &write, 1, w.stream));
    work_t fills = { .at = write.ptr, .size = CHUNK, .seed = round, .delay_ms = 20 };
    OK(gemini_stream_call(w.mgr, w.stream, work_fill, &fills));
    OK(gemini_release(w.mgr, &write, 1, w.stream));
    OK(gemini_acquire(w.mgr, &read, 1, other));
    work_t checks = { .at = read.ptr, .size = CHUNK, .seed = round };
    OK(gemini_stream_call(w.mgr, other, work_check, &checks));
    OK(gemini_release(w.mgr, &read, 1, other));
    if (round % 2) OK(gemini_stream_synchronize(w.mgr, other));
    else expect(&w, w.t[0], DEVICE, round); /* on the caller */
    OK(gemini_stream_synchronize(w.mgr, other));
    CHECK(checks.right);
  }
  OK(gemini_stream_destroy(w.mgr, other));
  world_close(&w);
}

static void test_never_written_reads_zero_in_used_frames(void) {
  world_t w = world_of(world_config(2, 4, 4), 8, CHUNK);
  put(&w, w.t[0], DEVICE, 1), put(&w, w.t[1], DEVICE, 2); /* frames and host slots get dirty */
  OK(move(&w, w.t[0], FILES));
  OK(move(&w, w.t[1], HOST));
  for (int i = 2; i < 8; i++) expect_zero(&w, w.t[i], i % 2 ? DEVICE : HOST);
  world_fill(&w, w.t[7], 10, 20, DEVICE, 3); /* a partial write leaves the rest zero */
  expect_part(&w, w.t[7], 10, 20, HOST, 3);
  gemini_access_t rest = world_part(w.t[7], 30, CHUNK - 30, GEMINI_READ, HOST);
  OK(gemini_acquire(w.mgr, &rest, 1, GEMINI_STREAM_CALLER));
  CHECK(is_zero(rest.ptr, CHUNK - 30));
  OK(gemini_release(w.mgr, &rest, 1, GEMINI_STREAM_CALLER));
  world_close(&w);
}

/* ---- out of memory means evict */
static void test_acquires_beyond_the_device_evict(void) {
  world_t w = world_of(world_config(5, 24, 0), 24, CHUNK);
  uint64_t random = 3, seed[24] = { 0 };
  for (int round = 0; round < 300; round++) {
    gemini_access_t batch[5];
    uint64_t count = 1 + check_random(&random) % 5, used_bits = 0, k = 0;
    while (k < count) {
      uint64_t i = check_random(&random) % 24;
      if (used_bits >> i & 1) continue;
      used_bits |= UINT64_C(1) << i;
      uint32_t mode = seed[i] && check_random(&random) % 2 ? GEMINI_READ : GEMINI_WRITE;
      batch[k++] = world_whole(w.t[i], mode, DEVICE);
    }
    OK(gemini_acquire(w.mgr, batch, count, GEMINI_STREAM_CALLER));
    for (k = 0; k < count; k++) {
      int i = 0;
      while (w.t[i] != batch[k].object.tensor) i++;
      if (batch[k].mode == GEMINI_WRITE) world_write(batch[k].ptr, 0, CHUNK, seed[i] = (uint64_t)round + 9);
      else CHECK(world_reads(batch[k].ptr, 0, CHUNK, seed[i]));
    }
    OK(gemini_release(w.mgr, batch, count, GEMINI_STREAM_CALLER));
    CHECK(used(&w, DEVICE) <= 5 * CHUNK);
  }
  CHECK_EQ(world_stats(&w).peak_bytes[DEVICE], 5 * CHUNK);
  world_close(&w);
}

static void test_acquire_with_nothing_evictable_says_what_holds_the_memory(void) {
  world_t w = world_of(world_config(6, 16, 0), 10, CHUNK);
  for (int i = 0; i < 10; i++) put(&w, w.t[i], HOST, 10 + (uint64_t)i);
  void *block;
  OK(gemini_alloc(w.mgr, CHUNK, GEMINI_STREAM_CALLER, &block));
  gemini_access_t pinned = world_whole(w.t[0], GEMINI_READ, DEVICE);
  OK(gemini_pin(w.mgr, &pinned));
  gemini_access_t held[3] = { world_whole(w.t[1], GEMINI_READ, DEVICE), world_whole(w.t[2], GEMINI_READ_WRITE, DEVICE),
                              world_whole(w.t[3], GEMINI_READ, DEVICE) };
  OK(gemini_acquire(w.mgr, held, 3, GEMINI_STREAM_CALLER));
  gemini_access_t batch[2] = { world_whole(w.t[4], GEMINI_READ, DEVICE),
                               world_whole(w.t[5], GEMINI_READ_WRITE, DEVICE) };
  batch[0].ptr = batch[1].ptr = &w;
  gemini_access_t four[5];
  for (int i = 0; i < 4; i++) four[i] = world_whole(w.t[4 + i], GEMINI_READ, DEVICE);
  four[4] = four[3];
  CHECK_EQ(gemini_acquire(w.mgr, four, 5, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
  CHECK_SAYS(world_error().message, "196608 more bytes of device memory are needed"); /* three chunks: one has come */
  CHECK_EQ(gemini_acquire(w.mgr, batch, 2, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
  CHECK_SAYS(world_error().message, "65536 more bytes of device memory are needed");
  CHECK(says_bytes("acquired hold ", 4 * CHUNK)); /* the batch's own first chunk counts */
  CHECK(says_bytes("pinned ", CHUNK) && says_bytes("non-model memory ", CHUNK) && says_bytes("budget ", 6 * CHUNK));
  CHECK(!strcmp(world_error().operation, "gemini_acquire"));
  CHECK(batch[0].ptr == &w && batch[1].ptr == &w);
  for (int i = 4; i < 6; i++) {
    CHECK_EQ(world_tensor_info(&w, w.t[i]).users, 0);
    CHECK_EQ(world_tensor_info(&w, w.t[i]).state, GEMINI_STATE_HOLD);
  }
  void *more = &w;
  CHECK_EQ(gemini_release(w.mgr, batch, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
  OK(gemini_acquire(w.mgr, batch, 1, GEMINI_STREAM_CALLER)); /* one more does fit */
  CHECK_EQ(gemini_alloc(w.mgr, CHUNK, GEMINI_STREAM_CALLER, &more), GEMINI_ERR_OOM_DEVICE);
  CHECK(says_bytes("acquired hold ", 4 * CHUNK) && more == &w);
  OK(gemini_release(w.mgr, batch, 1, GEMINI_STREAM_CALLER));
  OK(gemini_alloc(w.mgr, CHUNK, GEMINI_STREAM_CALLER, &more)); /* evicts what was released */
  CHECK(world_reads(held[0].ptr, 0, CHUNK, 11) && world_reads(held[1].ptr, 0, CHUNK, 12));
  OK(gemini_release(w.mgr, held, 3, GEMINI_STREAM_CALLER));
  OK(gemini_free(w.mgr, more, GEMINI_STREAM_CALLER));
  OK(gemini_free(w.mgr, block, GEMINI_STREAM_CALLER));
  OK(gemini_unpin(w.mgr, &pinned));
  for (int i = 0; i < 10; i++) expect(&w, w.t[i], DEVICE, 10 + (uint64_t)i);
  world_close(&w);
}

/* A failed batch that was to overwrite everything must not have spoilt anything. */
static void test_acquire_write_batch_refused_keeps_old_bytes(void) {
  world_t w = world_of(world_config(3, 16, 0), 6, CHUNK);
  for (int i = 0; i < 6; i++) put(&w, w.t[i], HOST, 20 + (uint64_t)i);
  OK(move(&w, w.t[5], DEVICE));
  gemini_access_t batch[4];
  for (int i = 0; i < 4; i++) batch[i] = world_whole(w.t[i], GEMINI_WRITE, DEVICE);
  CHECK_EQ(gemini_acquire(w.mgr, batch, 4, w.stream), GEMINI_ERR_OOM_DEVICE);
  for (int i = 0; i < 6; i++) expect(&w, w.t[i], i % 2 ? DEVICE : HOST, 20 + (uint64_t)i);
  OK(gemini_acquire(w.mgr, batch, 3, w.stream));
  OK(gemini_release(w.mgr, batch, 3, w.stream));
  world_close(&w);
}

static void test_allocation_storm_takes_all_but_what_is_held(void) {
  enum { BLOCK = 10000, ROUNDED = 10240 };
  world_t w = world_of(world_config(8, 16, 0), 8, CHUNK);
  for (int i = 0; i < 8; i++) put(&w, w.t[i], DEVICE, 30 + (uint64_t)i);
  gemini_access_t held = world_whole(w.t[3], GEMINI_READ, DEVICE);
  OK(gemini_acquire(w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  static void *block[8 * CHUNK / BLOCK + 1];
  uint64_t count = 0;
  gemini_status_t status;
  while (!(status = gemini_alloc(w.mgr, BLOCK, GEMINI_STREAM_CALLER, &block[count]))) {
    CHECK_EQ((uintptr_t)block[count] % 512, 0);
    world_write(block[count], 0, BLOCK, 100 + count);
    count++;
  }
  CHECK_EQ(status, GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(count, 7 * CHUNK / ROUNDED); /* blocks lie in one piece across frames: nothing is lost but the end */
  CHECK(says_bytes("non-model memory ", 7 * CHUNK) && says_bytes("acquired hold ", CHUNK));
  figures_t s = world_stats(&w);
  CHECK_EQ(s.nonmodel_bytes, count * ROUNDED);
  CHECK_EQ(s.used_bytes[DEVICE], 8 * CHUNK);
  CHECK_EQ(s.peak_bytes[DEVICE], 8 * CHUNK);
  for (uint64_t k = 0; k < count; k++) CHECK(world_reads(block[k], 0, BLOCK, 100 + k));
  CHECK(world_reads(held.ptr, 0, CHUNK, 33));
  for (uint64_t k = 0; k < count; k++) OK(gemini_free(w.mgr, block[k], GEMINI_STREAM_CALLER));
  CHECK_EQ(world_stats(&w).nonmodel_bytes, 0);
  OK(gemini_release(w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  gemini_access_t all[8]; /* idle heap pages give way to chunks */
  for (int i = 0; i < 8; i++) all[i] = world_whole(w.t[i], GEMINI_READ, DEVICE);
  OK(gemini_acquire(w.mgr, all, 8, GEMINI_STREAM_CALLER));
  for (int i = 0; i < 8; i++) CHECK(world_reads(all[i].ptr, 0, CHUNK, 30 + (uint64_t)i));
  OK(gemini_release(w.mgr, all, 8, GEMINI_STREAM_CALLER));
  world_close(&w);
}

static void test_allocations_and_acquires_mixed_never_pass_the_budget(void) {
  gemini_config_t c = world_config(0, 32, 0);
  c.device_bytes = 7 * CHUNK + 1000;
  c.device_margin_bytes = CHUNK + 500; /* leaves 6 chunks and 500 bytes: 6 frames */
  world_t w = world_of(c, 16, CHUNK);
  uint64_t random = 11, seed[16] = { 0 };
  struct {
    void *at;
    uint64_t size, seed;
  } block[12] = { { 0 } };
  for (int round = 0; round < 600; round++) {
    if (round % 100 == 0) OK(gemini_iteration_begin(w.mgr)); /* warm-up and what comes after it */
    uint64_t choice = check_random(&random) % 3, k = check_random(&random) % 12, i = check_random(&random) % 16;
    if (choice == 0 && block[k].at) {
      CHECK(world_reads(block[k].at, 0, block[k].size, block[k].seed));
      OK(gemini_free(w.mgr, block[k].at, GEMINI_STREAM_CALLER));
      block[k].at = NULL;
    } else if (choice == 1 && !block[k].at) {
      block[k].size = 1 + check_random(&random) % 40000;
      gemini_status_t status = gemini_alloc(w.mgr, block[k].size, GEMINI_STREAM_CALLER, &block[k].at);
      if (status) { /* then and only then: no chunk is left on the device */
        CHECK_EQ(status, GEMINI_ERR_OOM_DEVICE);
        CHECK_EQ(world_tier_bytes(&w, w.arena, DEVICE), 0);
        block[k].at = NULL;
      } else {
        world_write(block[k].at, 0, block[k].size, block[k].seed = (uint64_t)round);
      }
    } else {
      bool write = !seed[i] || choice == 2;
      gemini_access_t a = world_whole(w.t[i], write ? GEMINI_WRITE : GEMINI_READ, DEVICE);
      gemini_status_t status = gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER);
      if (status) {
        CHECK_EQ(status, GEMINI_ERR_OOM_DEVICE);
        CHECK(says_bytes("non-model memory ", 6 * CHUNK));
      } else {
        if (write) world_write(a.ptr, 0, CHUNK, seed[i] = (uint64_t)round + 1);
        else CHECK(world_reads(a.ptr, 0, CHUNK, seed[i]));
        OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      }
    }
    figures_t s = world_stats(&w);
    CHECK(s.used_bytes[DEVICE] <= 6 * CHUNK && s.peak_bytes[DEVICE] <= 6 * CHUNK);
    if (round % 100 == 99) OK(gemini_iteration_end(w.mgr));
  }
  CHECK_EQ(world_stats(&w).peak_bytes[DEVICE], 6 * CHUNK); /* and it used what it may */
  for (int k = 0; k < 12; k++) OK(gemini_free(w.mgr, block[k].at, GEMINI_STREAM_CALLER));
  for (int i = 0; i < 16; i++)
    if (seed[i]) expect(&w, w.t[i], DEVICE, seed[i]);
  world_close(&w);
}

/* The margin is honoured in an op of warm-up, whose memory nobody has planned. */
static void test_margin_in_warmup_is_left_alone(void) {
  gemini_config_t c = world_config(6, 32, 0);
  c.device_margin_bytes = 1; /* one byte less: one frame less */
  world_t w = world_of(c, 8, CHUNK);
  OK(gemini_iteration_begin(w.mgr));
  OK(gemini_phase_set(w.mgr, GEMINI_PHASE_FORWARD));
  for (int i = 0; i < 8; i++) {
    OK(gemini_op_begin(w.mgr, "op", w.stream));
    gemini_access_t a = world_whole(w.t[i], GEMINI_WRITE, DEVICE);
    void *block;
    OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    OK(gemini_alloc(w.mgr, 3 * CHUNK, w.stream, &block));
    CHECK(used(&w, DEVICE) <= 5 * CHUNK);
    OK(gemini_free(w.mgr, block, w.stream));
    OK(gemini_release(w.mgr, &a, 1, w.stream));
    OK(gemini_op_end(w.mgr));
  }
  OK(gemini_op_begin(w.mgr, "too much", w.stream));
  gemini_access_t a = world_whole(w.t[0], GEMINI_READ, DEVICE);
  void *block = NULL;
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK_EQ(gemini_alloc(w.mgr, 4 * CHUNK + 512, w.stream, &block), GEMINI_ERR_OOM_DEVICE);
  CHECK(says("too much") && says_bytes("margin ", 1));
  OK(gemini_alloc(w.mgr, 4 * CHUNK, w.stream, &block));
  OK(gemini_free(w.mgr, block, w.stream));
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  OK(gemini_op_end(w.mgr));
  OK(gemini_iteration_end(w.mgr));
  CHECK_EQ(world_stats(&w).peak_bytes[DEVICE], 5 * CHUNK);
  world_close(&w);
}

static void test_host_full_without_files_is_oom_host(void) {
  world_t w = world_of(world_config(2, 3, 0), 8, CHUNK);
  for (int i = 0; i < 5; i++) put(&w, w.t[i], DEVICE, 60 + (uint64_t)i); /* 2 up, 3 down: full */
  CHECK_EQ(used(&w, DEVICE), 2 * CHUNK);
  CHECK_EQ(used(&w, HOST), 3 * CHUNK);
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    gemini_access_t a = world_whole(w.t[5], GEMINI_WRITE, tier);
    CHECK_EQ(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_HOST);
    CHECK(says_bytes("", 3 * CHUNK) && says_bytes("a slot of ", CHUNK) && says("no file tier"));
    CHECK_SAYS(world_error().message,
               tier == HOST ? "the batch needs 65536 more bytes of host memory: "
                            : "the batch needs 65536 more bytes of device memory, for which other chunks must leave: ");
    CHECK_EQ(world_tensor_info(&w, w.t[5]).state, GEMINI_STATE_FREE);
    CHECK_EQ(world_tensor_info(&w, w.t[5]).users, 0);
  }
  void *block;
  CHECK_EQ(gemini_alloc(w.mgr, 100, GEMINI_STREAM_CALLER, &block), GEMINI_ERR_OOM_HOST);
  CHECK_EQ(used(&w, DEVICE), 2 * CHUNK);
  for (int i = 0; i < 5; i++) expect(&w, w.t[i], bytes_in(&w, w.t[i], DEVICE) ? DEVICE : HOST, 60 + (uint64_t)i);
  OK(gemini_tensor_state_set(w.mgr, w.t[0], GEMINI_STATE_FREE)); /* room for one, and it is found */
  put(&w, w.t[5], DEVICE, 65);
  for (int i = 1; i < 6; i++) expect(&w, w.t[i], bytes_in(&w, w.t[i], DEVICE) ? DEVICE : HOST, 60 + (uint64_t)i);
  world_close(&w);
}

static void test_all_tiers_full_is_oom_file(void) {
  world_t w = world_of(world_config(2, 2, 2), 8, CHUNK);
  for (int i = 0; i < 6; i++) put(&w, w.t[i], DEVICE, 70 + (uint64_t)i);
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK_EQ(used(&w, tier), 2 * CHUNK);
  gemini_access_t a = world_whole(w.t[6], GEMINI_WRITE, DEVICE);
  CHECK_EQ(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_FILE);
  CHECK(says_bytes("", 2 * CHUNK) && says_bytes("budget ", 2 * CHUNK));
  CHECK_EQ(world_tensor_info(&w, w.t[6]).users, 0);
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) {
    CHECK_EQ(used(&w, tier), 2 * CHUNK);
    CHECK(world_stats(&w).peak_bytes[tier] <= 2 * CHUNK);
  }
  OK(gemini_budget_set(w.mgr, FILES, 7 * CHUNK));
  put(&w, w.t[6], DEVICE, 76);
  for (int i = 0; i < 7; i++) expect(&w, w.t[i], i % 2 ? HOST : DEVICE, 70 + (uint64_t)i);
  world_close(&w);
}

/* A chunk that can leave for nothing makes room although those before it in the order cannot leave. */
static void test_clean_chunk_is_evicted_where_dirty_ones_cannot_be(void) {
  for (int order = 0; order < 2; order++) {
    world_t w = world_of(world_config(2, 1, 0), 5, CHUNK);
    put(&w, w.t[0], HOST, 1); /* fills the host */
    if (order) expect_zero(&w, w.t[2], DEVICE);
    put(&w, w.t[1], DEVICE, 2);                  /* dirty: cannot go down */
    if (!order) expect_zero(&w, w.t[2], DEVICE); /* clean: never written */
    put(&w, w.t[3], DEVICE, 3);
    expect(&w, w.t[0], HOST, 1), expect(&w, w.t[1], DEVICE, 2), expect(&w, w.t[3], DEVICE, 3);
    world_close(&w);
  }
}

/* A block in the file tier that only repeats what is above it gives way. */
static void test_redundant_file_copies_give_way(void) {
  world_t w = world_of(world_config(2, 3, 1), 3, CHUNK);
  for (int i = 0; i < 3; i++) put(&w, w.t[i], HOST, 1 + (uint64_t)i);
  OK(move(&w, w.t[0], FILES));
  OK(move(&w, w.t[0], HOST)); /* its copy in the file may stay, but nobody needs it */
  CHECK_EQ(bytes_in(&w, w.t[0], HOST), CHUNK);
  OK(move(&w, w.t[1], FILES));
  CHECK_EQ(bytes_in(&w, w.t[1], FILES), CHUNK);
  for (int i = 0; i < 3; i++) expect(&w, w.t[i], DEVICE, 1 + (uint64_t)i);
  OK(move(&w, w.arena, HOST));
  OK(gemini_budget_set(w.mgr, FILES, 0)); /* nothing has to be there */
  for (int i = 0; i < 3; i++) expect(&w, w.t[i], HOST, 1 + (uint64_t)i);
  world_close(&w);
}

/* A file that cannot be written fails the call that needed it, and nothing else. */
static void test_failing_file_changes_nothing(void) {
  world_t w = world_of(world_config(2, 2, 8), 6, CHUNK);
  for (int i = 0; i < 4; i++) put(&w, w.t[i], DEVICE, 40 + (uint64_t)i); /* device and host are full */
  struct rlimit before, none;
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  none = before;
  none.rlim_cur = 0;
  for (int round = 0; round < 3; round++) {
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
    gemini_access_t a = world_whole(w.t[4], GEMINI_WRITE, round == 1 ? HOST : DEVICE);
    gemini_status_t acquired = gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER);
    gemini_error_info_t error = world_error();
    gemini_status_t budget = gemini_budget_set(w.mgr, HOST, CHUNK);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    CHECK_EQ(acquired, GEMINI_ERR_OOM_FILE);
    CHECK_EQ(error.native_code, EFBIG);
    CHECK(strstr(error.message, w.dir));
    CHECK_EQ(budget, GEMINI_ERR_OOM_FILE);
    CHECK_EQ(world_tensor_info(&w, w.t[4]).users, 0);
    CHECK_EQ(world_tensor_info(&w, w.t[4]).state, GEMINI_STATE_FREE);
    CHECK_EQ(used(&w, FILES), 0);
    CHECK_EQ(world_stats(&w).budget_bytes[HOST], 2 * CHUNK);
    for (int i = 0; i < 4; i++) expect(&w, w.t[i], bytes_in(&w, w.t[i], DEVICE) ? DEVICE : HOST, 40 + (uint64_t)i);
  }
  put(&w, w.t[4], DEVICE, 44);
  for (int i = 0; i < 5; i++) expect(&w, w.t[i], i % 2 ? HOST : DEVICE, 40 + (uint64_t)i);
  world_close(&w);
}

/* A limit on the size of files fails calls that would pass it, and does not end the process. */
static void test_limit_on_files_fails_calls_only(void) {
  struct rlimit before, small;
  char path[] = "/tmp/gemini-test.XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0);
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  small = before;
  small.rlim_cur = 4 * CHUNK;
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  gemini_config_t c = world_config(2, 8, 64);
  c.file_dir = "/tmp";
  gemini_manager_t mgr;
  CHECK_EQ(gemini_manager_open(&c, &mgr), GEMINI_ERR_OOM_FILE);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);

  world_t w = world_of(world_config(2, 8, 0), 2, 2 * CHUNK);
  put(&w, w.t[0], DEVICE, 40);
  OK(gemini_iteration_begin(w.mgr));
  OK(gemini_op_begin(w.mgr, "op", GEMINI_STREAM_CALLER));
  OK(gemini_op_end(w.mgr));
  OK(gemini_iteration_end(w.mgr));
  char timeline[] = "/tmp/gemini-test.XXXXXX";
  CHECK(mkdtemp(timeline));
  CHECK_EQ(rmdir(timeline), 0);
  OK(gemini_timeline_start(w.mgr, timeline));
  small.rlim_cur = 16;
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  gemini_access_t a = world_whole(w.t[0], 0, 0);
  gemini_status_t stored = gemini_store(w.mgr, &a, fd, 0);
  gemini_error_info_t stored_error = world_error();
  gemini_status_t beyond = gemini_store(w.mgr, &a, fd, 100);
  gemini_status_t traced = gemini_trace_save(w.mgr, path), ended = gemini_timeline_stop(w.mgr);
  sigset_t pending;
  CHECK(!sigpending(&pending) && !sigismember(&pending, SIGXFSZ));
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  CHECK_EQ(stored, GEMINI_ERR_OOM_FILE);
  CHECK_EQ(beyond, GEMINI_ERR_OOM_FILE);
  CHECK_EQ(stored_error.native_code, EFBIG);
  CHECK_EQ(traced, GEMINI_ERR_OOM_FILE);
  CHECK_EQ(ended, GEMINI_ERR_OOM_FILE);
  OK(gemini_store(w.mgr, &a, fd, 100));
  expect(&w, w.t[0], HOST, 40);
  world_close(&w);
  CHECK(!close(fd) && !unlink(path) && !unlink(timeline));
}

/* ---- sizes and overlaps */
static void test_tiny_tensors_in_one_cache_line_are_apart(void) {
  world_t w = world_with_arena(world_config(2, 4, 4));
  uint64_t at;
  OK(gemini_arena_take(w.mgr, w.arena, 64, &at));
  char name[32];
  for (uint64_t i = 0; i < 16; i++) {
    snprintf(name, sizeof name, "tiny.%d", (int)i);
    w.t[i] = tensor_at(&w, name, i == 15 ? 1 : 4, at + 4 * i);
  }
  gemini_tensor_t next = tensor_at(&w, "next", 3, GEMINI_OFFSET_NEXT);
  CHECK_EQ(world_tensor_info(&w, next).offset_bytes, at + 256);
  for (uint64_t i = 0; i < 16; i++) put(&w, w.t[i], i % 3 ? DEVICE : HOST, 1 + i);
  put(&w, next, DEVICE, 99);
  OK(move(&w, w.t[2], FILES));
  for (uint64_t i = 0; i < 16; i++) expect(&w, w.t[i], i % 2 ? DEVICE : HOST, 1 + i);
  gemini_access_t a = world_part(w.t[4], 1, 2, GEMINI_WRITE, DEVICE); /* a part of 4 bytes */
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  world_write(a.ptr, 1, 2, 77);
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  expect_part(&w, w.t[4], 0, 1, HOST, 5), expect_part(&w, w.t[4], 1, 2, HOST, 77),
      expect_part(&w, w.t[4], 3, 1, HOST, 5);
  expect(&w, w.t[3], HOST, 4), expect(&w, w.t[5], HOST, 6), expect(&w, next, HOST, 99);
  world_close(&w);
}

/* Neighbours on the host: different bytes are different, whatever chunk they share. */
static void test_neighbours_on_the_host_can_be_written_together(void) {
  world_t w = world_of(world_config(2, 4, 0), 2, 64);
  gemini_access_t both[2] = { world_whole(w.t[0], GEMINI_WRITE, HOST), world_whole(w.t[1], GEMINI_WRITE, HOST) };
  OK(gemini_acquire(w.mgr, both, 2, GEMINI_STREAM_CALLER));
  world_write(both[0].ptr, 0, 64, 1), world_write(both[1].ptr, 0, 64, 2);
  OK(gemini_release(w.mgr, both, 2, GEMINI_STREAM_CALLER));
  expect(&w, w.t[0], DEVICE, 1), expect(&w, w.t[1], DEVICE, 2);
  gemini_access_t mixed[2] = { world_whole(w.t[0], GEMINI_READ, HOST), world_whole(w.t[1], GEMINI_WRITE, HOST) };
  OK(gemini_acquire(w.mgr, mixed, 2, GEMINI_STREAM_CALLER));
  OK(gemini_release(w.mgr, mixed, 2, GEMINI_STREAM_CALLER));
  world_close(&w);
}

/* Work that a stream was told to do with host memory, as a kernel does that reads page-locked memory, is waited for by
 * whoever gets the memory next: a writer on the host, a copy from the device, another chunk, and another stream's work. */
static void test_work_on_host_memory_is_waited_for(void) {
  world_t w = world_of(world_config(4, 4, 8), 6, 2 * CHUNK);
  gemini_stream_t other;
  OK(gemini_stream_create(w.mgr, &other));
  put(&w, w.t[0], HOST, 1);
  for (uint64_t how = 0; how < 4; how++) {
    gemini_access_t a = world_whole(w.t[0], GEMINI_READ, HOST);
    OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    work_t works[2] = { { .at = a.ptr, .size = 2 * CHUNK, .seed = how + 1, .delay_ms = 30 } };
    works[1] = works[0];
    OK(gemini_stream_call(w.mgr, w.stream, work_check, &works[0]));
    OK(gemini_release(w.mgr, &a, 1, w.stream));
    if (how == 3) { /* the stream that is done first is released last */
      gemini_access_t b = world_whole(w.t[0], GEMINI_READ, HOST);
      works[1].delay_ms = 0;
      OK(gemini_acquire(w.mgr, &b, 1, other));
      OK(gemini_stream_call(w.mgr, other, work_check, &works[1]));
      OK(gemini_release(w.mgr, &b, 1, other));
    }
    if (how == 1 || how == 2)
      put(&w, w.t[0], DEVICE, how + 2); /* the slots are free, or hold what is no longer valid */
    if (how == 1) OK(move(&w, w.t[0], HOST));
    if (how == 2)
      for (int i = 1; i < 4; i++) put(&w, w.t[i], HOST, 50);
    if (how == 0 || how == 3) put(&w, w.t[0], HOST, how + 2);
    OK(gemini_stream_synchronize(w.mgr, w.stream));
    OK(gemini_stream_synchronize(w.mgr, other));
    CHECK(works[0].right && (how < 3 || works[1].right));
    expect(&w, w.t[0], HOST, how + 2);
  }
  OK(gemini_stream_destroy(w.mgr, other));
  world_close(&w);
}

/* A smaller budget gives memory back once queued work no longer uses it. */
static void test_budget_host_down_waits_for_work_on_host_memory(void) {
  enum { CHUNKS = 30, OF = 20 }; /* beyond the first MiB, which is locked as one */
  world_t w = world_of(world_config(32, 32, 0), 1, CHUNKS * CHUNK);
  put(&w, w.t[0], DEVICE, 3);
  expect(&w, w.t[0], HOST, 3); /* so each chunk has two copies, and can leave the host at once */
  gemini_access_t a = world_part(w.t[0], OF * CHUNK, CHUNK, GEMINI_READ, HOST);
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  uint8_t bytes[64];
  memcpy(bytes, a.ptr, sizeof bytes);
  compare_t compare = { .at = a.ptr, .bytes = bytes, .size = sizeof bytes, .delay_ms = 100 };
  OK(gemini_stream_call(w.mgr, w.stream, work_compare, &compare));
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  OK(gemini_budget_set(w.mgr, HOST, 8 * CHUNK));
  OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK(compare.right);
  expect(&w, w.t[0], DEVICE, 3);
  world_close(&w);
}

static void test_tensor_larger_than_the_device_is_used_by_ranges(void) {
  world_t w = world_of(world_config(3, 4, 16), 1, 11 * CHUNK + 5000);
  uint64_t size = 11 * CHUNK + 5000, step = 100000; /* no multiple of anything */
  gemini_access_t all = world_whole(w.t[0], GEMINI_READ, DEVICE);
  CHECK_EQ(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
  CHECK(says_bytes("budget ", 3 * CHUNK) && says_bytes("acquired hold ", 3 * CHUNK));
  all.tier = HOST;
  CHECK_EQ(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_HOST);
  CHECK_SAYS(world_error().message, "the batch needs 786432 more bytes of host memory: ");
  for (uint64_t at = 0; at < size; at += step)
    world_fill(&w, w.t[0], at, at + step < size ? step : size - at, at / step % 3 ? DEVICE : HOST, 8);
  CHECK(bytes_in(&w, w.t[0], FILES) > 4 * CHUNK);
  for (uint64_t at = 0; at < size; at += step)
    expect_part(&w, w.t[0], at, at + step < size ? step : size - at, at / step % 2 ? DEVICE : HOST, 8);
  CHECK_EQ(bytes_in(&w, w.t[0], DEVICE) + bytes_in(&w, w.t[0], HOST) + bytes_in(&w, w.t[0], FILES), size);
  figures_t s = world_stats(&w);
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK(s.peak_bytes[tier] <= s.budget_bytes[tier]);
  world_close(&w);
}

static void test_tied_tensors_share_their_bytes(void) {
  world_t w = world_of(world_config(4, 8, 8), 2, 2 * CHUNK);
  uint64_t at = world_tensor_info(&w, w.t[0]).offset_bytes;
  gemini_tensor_t tied = tensor_at(&w, "tied", 2 * CHUNK, at);
  gemini_tensor_t across = tensor_at(&w, "across", 2 * CHUNK, at + CHUNK); /* half of t.0, half of t.1 */
  CHECK_EQ(world_tensor_info(&w, tied).address, world_tensor_info(&w, w.t[0]).address);
  put(&w, w.t[0], DEVICE, 1);
  put(&w, w.t[1], HOST, 2);
  expect(&w, tied, DEVICE, 1);
  put(&w, across, DEVICE, 3);
  expect_part(&w, tied, 0, CHUNK, HOST, 1);
  gemini_access_t a = world_part(w.t[1], 0, CHUNK, GEMINI_READ, HOST);
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(world_reads(a.ptr, CHUNK, CHUNK, 3)); /* the second half of across */
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  /* All three at once, one of them twice: 4 chunks hold them. */
  gemini_access_t all[4] = { world_whole(w.t[0], GEMINI_READ_WRITE, DEVICE), world_whole(tied, GEMINI_READ, DEVICE),
                             world_whole(across, GEMINI_READ, DEVICE), world_whole(tied, GEMINI_READ_WRITE, DEVICE) };
  OK(gemini_acquire(w.mgr, all, 4, w.stream));
  CHECK(all[0].ptr == all[1].ptr && (uint8_t *)all[2].ptr == (uint8_t *)all[0].ptr + CHUNK);
  CHECK_EQ(world_tensor_info(&w, tied).users, 2);
  CHECK_EQ(world_tensor_info(&w, w.t[0]).users, 1);
  OK(gemini_release(w.mgr, &all[1], 1, w.stream));
  CHECK_EQ(world_tensor_info(&w, tied).state, GEMINI_STATE_COMPUTE);
  CHECK_EQ(move(&w, tied, HOST), GEMINI_ERR_BUSY);
  OK(gemini_release(w.mgr, &all[2], 2, w.stream));
  CHECK_EQ(world_tensor_info(&w, tied).state, GEMINI_STATE_HOLD);
  CHECK_EQ(move(&w, tied, HOST), GEMINI_ERR_BUSY); /* t.0 still holds the chunks */
  OK(gemini_release(w.mgr, all, 1, w.stream));
  OK(move(&w, tied, FILES));
  OK(gemini_tensor_unregister(w.mgr, tied));
  expect_part(&w, w.t[0], 0, CHUNK, DEVICE, 1);
  expect(&w, across, DEVICE, 3);
  world_close(&w);
}

/* ---- stale accesses fault */
static void test_strict_stale_accesses_fault(void) {
  gemini_config_t c = world_config(2, 8, 8);
  c.flags = GEMINI_CONFIG_STRICT;
  world_t w = world_of(c, 4, CHUNK);
  uint8_t *address = (uint8_t *)(uintptr_t)world_tensor_info(&w, w.t[0]).address;
  CHECK(touch_faults(address)); /* never resident */
  put(&w, w.t[0], HOST, 1);
  CHECK(touch_faults(address)); /* has bytes, but below the device */
  gemini_access_t a = world_whole(w.t[0], GEMINI_READ_WRITE, DEVICE);
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  CHECK(a.ptr == address);
  OK(gemini_stream_synchronize(w.mgr, w.stream));
  CHECK(touch_reads(address) && touch_reads(address + CHUNK - 1));
  CHECK(touch_faults(address + CHUNK)); /* its neighbour is not there */
  work_t work = { .at = a.ptr, .size = CHUNK, .seed = 2, .delay_ms = 30 };
  OK(gemini_stream_call(w.mgr, w.stream, work_fill, &work));
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  gemini_access_t both[2] = { world_whole(w.t[1], GEMINI_WRITE, DEVICE), world_whole(w.t[2], GEMINI_WRITE, DEVICE) };
  OK(gemini_acquire(w.mgr, both, 2, w.stream)); /* all of the device: t.0 leaves, behind its queued user */
  OK(gemini_release(w.mgr, both, 2, w.stream));
  CHECK(touch_faults(address) && touch_faults(address + CHUNK - 1));
  CHECK(touch_reads(address + CHUNK));
  expect(&w, w.t[0], DEVICE, 2);
  CHECK(touch_reads(address));
  OK(move(&w, w.t[0], HOST));
  CHECK(touch_faults(address));
  OK(move(&w, w.t[0], DEVICE));
  gemini_access_t range = world_whole(w.t[0], GEMINI_READ, 0);
  OK(gemini_zero(w.mgr, &range)); /* holds nothing any more */
  CHECK(touch_faults(address));
  OK(move(&w, w.t[1], DEVICE));
  OK(move(&w, w.t[2], DEVICE));
  OK(gemini_budget_set(w.mgr, DEVICE, CHUNK));
  CHECK(touch_faults(address + CHUNK) != touch_faults(address + 2 * CHUNK));
  world_close(&w);
}

/* ---- budgets */
/* Before the first use there are no chunks yet; the budget must hold one of the configured size all the same. */
static void test_budget_below_the_configured_chunk_before_first_use_is_refused(void) {
  gemini_config_t c = world_config(8, 16, 0);
  c.chunk_bytes = 4 * CHUNK;
  world_t w = world_of(c, 1, 4 * CHUNK);
  CHECK_EQ(gemini_budget_set(w.mgr, DEVICE, 4 * CHUNK - 1), GEMINI_ERR_INVALID);
  CHECK(says_bytes("less than one chunk, ", 4 * CHUNK));
  CHECK_EQ(world_stats(&w).budget_bytes[DEVICE], 8 * CHUNK);
  OK(gemini_budget_set(w.mgr, DEVICE, 4 * CHUNK));
  put(&w, w.t[0], DEVICE, 1);
  expect(&w, w.t[0], DEVICE, 1);
  world_close(&w);
}
static void test_budget_device_down_and_up_moves_what_must(void) {
  world_t w = world_of(world_config(6, 16, 0), 8, CHUNK);
  for (int i = 0; i < 6; i++) put(&w, w.t[i], DEVICE, 80 + (uint64_t)i);
  CHECK_EQ(used(&w, DEVICE), 6 * CHUNK);
  OK(gemini_budget_set(w.mgr, DEVICE, 2 * CHUNK + 4000));
  figures_t s = world_stats(&w);
  CHECK_EQ(s.used_bytes[DEVICE], 2 * CHUNK);
  CHECK_EQ(s.budget_bytes[DEVICE], 2 * CHUNK + 4000);
  CHECK_EQ(s.moved_chunks[LINK_D2H][GEMINI_REASON_CALLER], 4);
  OK(gemini_stats_reset(w.mgr));
  for (int i = 0; i < 6; i++) expect(&w, w.t[i], DEVICE, 80 + (uint64_t)i);
  CHECK_EQ(world_stats(&w).peak_bytes[DEVICE], 2 * CHUNK);
  gemini_access_t three[3] = { world_whole(w.t[0], GEMINI_READ, DEVICE), world_whole(w.t[1], GEMINI_READ, DEVICE),
                               world_whole(w.t[2], GEMINI_READ, DEVICE) };
  CHECK_EQ(gemini_acquire(w.mgr, three, 3, w.stream), GEMINI_ERR_OOM_DEVICE);
  OK(gemini_budget_set(w.mgr, DEVICE, 9 * CHUNK));
  OK(gemini_acquire(w.mgr, three, 3, w.stream));
  void *block;
  OK(gemini_alloc(w.mgr, CHUNK, w.stream, &block));
  /* 3 acquired and 1 of non-model memory do not fit in 3. */
  CHECK_EQ(gemini_budget_set(w.mgr, DEVICE, 3 * CHUNK), GEMINI_ERR_OOM_DEVICE);
  CHECK(says_bytes("acquired hold ", 3 * CHUNK) && says_bytes("non-model memory ", CHUNK));
  CHECK_EQ(world_stats(&w).budget_bytes[DEVICE], 9 * CHUNK);
  gemini_access_t rest[5];
  for (int i = 0; i < 5; i++) rest[i] = world_whole(w.t[3 + i], GEMINI_READ, DEVICE);
  OK(gemini_acquire(w.mgr, rest, 5, w.stream)); /* the old budget still is all there: 3 + 1 + 5 */
  CHECK_EQ(used(&w, DEVICE), 9 * CHUNK);
  OK(gemini_release(w.mgr, rest, 5, w.stream));
  OK(gemini_budget_set(w.mgr, DEVICE, 4 * CHUNK));
  CHECK_EQ(used(&w, DEVICE), 4 * CHUNK);
  OK(gemini_free(w.mgr, block, w.stream));
  OK(gemini_budget_set(w.mgr, DEVICE, 3 * CHUNK));
  OK(gemini_stream_synchronize(w.mgr, w.stream));
  for (int i = 0; i < 3; i++) CHECK(world_reads(three[i].ptr, 0, CHUNK, 80 + (uint64_t)i));
  OK(gemini_release(w.mgr, three, 3, w.stream));
  for (int i = 0; i < 6; i++) expect(&w, w.t[i], HOST, 80 + (uint64_t)i);
  world_close(&w);
}

static void test_budget_host_down_goes_to_files_or_is_refused(void) {
  world_t w = world_of(world_config(1, 6, 4), 8, CHUNK);
  for (int i = 0; i < 6; i++) put(&w, w.t[i], HOST, 90 + (uint64_t)i);
  gemini_access_t held[2] = { world_whole(w.t[0], GEMINI_READ, HOST), world_whole(w.t[5], GEMINI_READ, HOST) };
  OK(gemini_acquire(w.mgr, held, 2, GEMINI_STREAM_CALLER));
  OK(gemini_budget_set(w.mgr, HOST, 3 * CHUNK));
  CHECK_EQ(used(&w, HOST), 3 * CHUNK);
  CHECK_EQ(used(&w, FILES), 3 * CHUNK);
  CHECK(world_reads(held[0].ptr, 0, CHUNK, 90) && world_reads(held[1].ptr, 0, CHUNK, 95));
  CHECK_EQ(gemini_budget_set(w.mgr, HOST, CHUNK), GEMINI_ERR_OOM_HOST);
  CHECK(says_bytes("", 2 * CHUNK) && says_bytes("budget, ", CHUNK));
  CHECK_EQ(world_stats(&w).budget_bytes[HOST], 3 * CHUNK);
  OK(gemini_release(w.mgr, held, 2, GEMINI_STREAM_CALLER));
  OK(gemini_budget_set(w.mgr, HOST, 8 * CHUNK));
  for (int i = 0; i < 6; i++) expect(&w, w.t[i], HOST, 90 + (uint64_t)i);
  world_close(&w);

  w = world_of(world_config(1, 4, 0), 4, CHUNK); /* no files: nothing can go */
  for (int i = 0; i < 4; i++) put(&w, w.t[i], HOST, 80 + (uint64_t)i);
  CHECK_EQ(gemini_budget_set(w.mgr, HOST, 3 * CHUNK), GEMINI_ERR_OOM_HOST);
  CHECK(says_bytes("", 4 * CHUNK) && says_bytes("", 3 * CHUNK));
  for (int i = 0; i < 4; i++) expect(&w, w.t[i], HOST, 80 + (uint64_t)i);
  OK(gemini_tensor_state_set(w.mgr, w.t[2], GEMINI_STATE_FREE));
  OK(gemini_budget_set(w.mgr, HOST, 3 * CHUNK));
  CHECK_EQ(gemini_budget_set(w.mgr, FILES, CHUNK), GEMINI_ERR_STATE); /* opened without files */
  world_close(&w);
}

static void test_budget_file_down_is_refused_while_needed(void) {
  world_t w = world_of(world_config(1, 2, 6), 5, CHUNK);
  for (int i = 0; i < 5; i++) put(&w, w.t[i], DEVICE, 60 + (uint64_t)i);
  for (int i = 0; i < 5; i++) OK(move(&w, w.t[i], FILES));
  CHECK_EQ(used(&w, FILES), 5 * CHUNK);
  CHECK_EQ(gemini_budget_set(w.mgr, FILES, CHUNK), GEMINI_ERR_OOM_FILE);
  CHECK(says_bytes("budget, ", CHUNK));
  CHECK_EQ(world_stats(&w).budget_bytes[FILES], 6 * CHUNK);
  OK(gemini_budget_set(w.mgr, FILES, 5 * CHUNK));
  for (int i = 0; i < 5; i++) expect(&w, w.t[i], DEVICE, 60 + (uint64_t)i);
  OK(gemini_tensor_state_set(w.mgr, w.t[0], GEMINI_STATE_FREE));
  for (int i = 1; i < 5; i++) put(&w, w.t[i], DEVICE, 70 + (uint64_t)i); /* what lies in files is stale now */
  CHECK(used(&w, FILES) <= 2 * CHUNK);
  OK(gemini_budget_set(w.mgr, FILES, 2 * CHUNK));
  for (int i = 1; i < 5; i++) expect(&w, w.t[i], HOST, 70 + (uint64_t)i);
  world_close(&w);
}

/* Bytes of the simulated device's memory that exist: pages of its memory file. */
static uint64_t device_pages_bytes(void) {
  uint64_t bytes = 0;
  for (int fd = 0; fd < 256; fd++) {
    char path[32], target[64] = "";
    struct stat st;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof target - 1) > 0 && strstr(target, "memfd:gemini") && fstat(fd, &st) == 0)
      bytes += (uint64_t)st.st_blocks * 512;
  }
  return bytes;
}

static void test_memory_in_existence_stays_in_the_budget(void) {
  world_t w = world_of(world_config(5, 64, 0), 12, CHUNK);
  for (int round = 0; round < 12; round++) {
    uint64_t chunks = (uint64_t)(round % 3 ? 2 + round % 4 : 7);
    OK(gemini_budget_set(w.mgr, DEVICE, chunks * CHUNK));
    CHECK(device_pages_bytes() <= chunks * CHUNK);
    for (int i = 0; i < 12; i++) put(&w, w.t[i], DEVICE, (uint64_t)(1 + round + i));
    CHECK_EQ(device_pages_bytes(), chunks * CHUNK); /* all of it is used, and no more */
  }
  world_close(&w);
}

/* ---- pin, hint, move */
static void test_pinned_stays_until_the_last_unpin(void) {
  world_t w = world_of(world_config(3, 16, 4), 8, CHUNK);
  put(&w, w.t[0], HOST, 1);
  gemini_access_t pin = world_part(w.t[0], 10, 20, GEMINI_READ, DEVICE),
                  other = world_whole(w.t[7], GEMINI_READ, DEVICE);
  OK(gemini_pin(w.mgr, &pin));
  CHECK_EQ(bytes_in(&w, w.t[0], DEVICE), CHUNK);
  OK(gemini_pin(w.mgr, &pin));
  for (int round = 0; round < 3; round++) {
    for (int i = 1; i < 7; i++) put(&w, w.t[i], DEVICE, (uint64_t)(10 * round + i));
    CHECK_EQ(bytes_in(&w, w.t[0], DEVICE), round < 2 ? CHUNK : 0);
    if (round < 2) {
      CHECK_EQ(move(&w, w.t[0], HOST), GEMINI_ERR_BUSY);
      CHECK_EQ(move(&w, w.t[0], FILES), GEMINI_ERR_BUSY);
      gemini_access_t write = world_whole(w.t[0], GEMINI_WRITE, HOST);
      CHECK_EQ(gemini_acquire(w.mgr, &write, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_BUSY);
      CHECK_EQ(gemini_arena_destroy(w.mgr, w.arena), GEMINI_ERR_BUSY);
      expect(&w, w.t[0], HOST, 1); /* reading below is no harm */
      OK(gemini_unpin(w.mgr, &pin));
    }
  }
  CHECK_EQ(gemini_unpin(w.mgr, &pin), GEMINI_ERR_STATE);
  CHECK_EQ(gemini_unpin(w.mgr, &other), GEMINI_ERR_STATE);
  /* More than fits beside what is held: nothing of it stays pinned. */
  gemini_access_t held = world_whole(w.t[1], GEMINI_READ, DEVICE),
                  large = world_part(w.arena, 2 * CHUNK, 3 * CHUNK, 0, DEVICE);
  OK(gemini_acquire(w.mgr, &held, 1, w.stream));
  CHECK_EQ(gemini_pin(w.mgr, &large), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(gemini_unpin(w.mgr, &large), GEMINI_ERR_STATE);
  gemini_access_t two[2] = { world_whole(w.t[5], GEMINI_READ, DEVICE), world_whole(w.t[6], GEMINI_READ, DEVICE) };
  OK(gemini_acquire(w.mgr, two, 2, w.stream));
  OK(gemini_release(w.mgr, two, 2, w.stream));
  OK(gemini_release(w.mgr, &held, 1, w.stream));
  expect(&w, w.t[0], DEVICE, 1);
  world_close(&w);
}

static void test_hint_takes_free_memory_only(void) {
  world_t w = world_of(world_config(3, 6, 6), 8, CHUNK);
  for (int i = 0; i < 6; i++) put(&w, w.t[i], HOST, (uint64_t)i + 1);
  OK(move(&w, w.t[0], DEVICE));
  OK(gemini_stats_reset(w.mgr));
  gemini_access_t hints[4];
  for (int i = 0; i < 4; i++) hints[i] = world_whole(w.t[1 + i], 0, DEVICE);
  OK(gemini_hint(w.mgr, hints, 4)); /* room for two of the four */
  CHECK_EQ(bytes_in(&w, w.t[0], DEVICE) + bytes_in(&w, w.t[1], DEVICE) + bytes_in(&w, w.t[2], DEVICE), 3 * CHUNK);
  CHECK_EQ(bytes_in(&w, w.t[3], DEVICE) + bytes_in(&w, w.t[4], DEVICE), 0);
  figures_t s = world_stats(&w);
  CHECK_EQ(s.moved_chunks[LINK_H2D][GEMINI_REASON_CALLER], 2);
  for (int r = 0; r < GEMINI_REASON_COUNT; r++) CHECK_EQ(s.moved_chunks[LINK_D2H][r], 0);
  expect(&w, w.t[1], DEVICE, 2);
  CHECK_EQ(world_stats(&w).acquire_misses, 0); /* it was there */
  /* The host is full as well: a hint brings nothing up from a file, and throws nothing out. */
  OK(move(&w, w.t[5], FILES));
  put(&w, w.t[6], HOST, 7);
  for (int i = 0; i < 3; i++) put(&w, w.t[i], DEVICE, (uint64_t)i + 1);
  OK(gemini_budget_set(w.mgr, HOST, 3 * CHUNK)); /* t.3, t.4, t.6 */
  uint64_t host = used(&w, HOST), files = used(&w, FILES);
  CHECK_EQ(host, 3 * CHUNK);
  gemini_access_t up = world_whole(w.t[5], 0, HOST);
  OK(gemini_hint(w.mgr, &up, 1));
  CHECK_EQ(bytes_in(&w, w.t[5], FILES), CHUNK);
  CHECK_EQ(used(&w, HOST), host);
  CHECK_EQ(used(&w, FILES), files);
  OK(gemini_budget_set(w.mgr, HOST, 8 * CHUNK));
  OK(gemini_hint(w.mgr, &up, 1));
  CHECK_EQ(bytes_in(&w, w.t[5], HOST), CHUNK);
  expect(&w, w.t[5], DEVICE, 6);
  world_close(&w);
}

static void test_hint_to_files_brings_there(void) {
  world_t w = world_of(world_config(3, 6, 1), 2, CHUNK);
  put(&w, w.t[0], HOST, 1), put(&w, w.t[1], HOST, 2);
  gemini_access_t down[2] = { world_whole(w.t[0], 0, FILES), world_whole(w.t[1], 0, FILES) };
  OK(gemini_hint(w.mgr, down, 2)); /* room for one */
  CHECK_EQ(used(&w, FILES), CHUNK);
  expect(&w, w.t[0], DEVICE, 1), expect(&w, w.t[1], DEVICE, 2);
  world_close(&w);
}

/* What was moved in one call is all there after it, whoever had to leave for it. */
static void test_move_of_many_does_not_evict_its_own(void) {
  world_t w = world_of(world_config(4, 16, 0), 8, CHUNK);
  for (int i = 0; i < 8; i++) put(&w, w.t[i], DEVICE, 1 + (uint64_t)i);
  gemini_access_t three[3] = { world_whole(w.t[0], 0, DEVICE), world_whole(w.t[1], 0, DEVICE),
                               world_whole(w.t[2], 0, DEVICE) };
  OK(gemini_move(w.mgr, three, 3));
  for (int i = 0; i < 3; i++) CHECK_EQ(bytes_in(&w, w.t[i], DEVICE), CHUNK);
  for (int i = 0; i < 8; i++) expect(&w, w.t[i], DEVICE, 1 + (uint64_t)i);
  gemini_access_t four = world_part(w.arena, 2 * CHUNK, 4 * CHUNK, 0, DEVICE);
  OK(gemini_move(w.mgr, &four, 1));
  for (int i = 2; i < 6; i++) CHECK_EQ(bytes_in(&w, w.t[i], DEVICE), CHUNK);
  gemini_access_t five = world_part(w.arena, 0, 5 * CHUNK, 0, DEVICE); /* never all there at once */
  CHECK_EQ(gemini_move(w.mgr, &five, 1), GEMINI_ERR_OOM_DEVICE);
  for (int i = 0; i < 8; i++) expect(&w, w.t[i], DEVICE, 1 + (uint64_t)i);
  world_close(&w);
}

/* ---- zero */
static void test_zero_whole_chunks_cost_nothing(void) {
  world_t w = world_of(world_config(4, 4, 4), 1, 300 * CHUNK); /* far more than there is memory */
  uint64_t size = 300 * CHUNK;
  gemini_access_t all = world_whole(w.t[0], 0, 0);
  OK(gemini_zero(w.mgr, &all));
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK_EQ(used(&w, tier), 0);
  for (uint64_t i = 0; i < 12; i++) world_fill(&w, w.t[0], i * 20 * CHUNK, CHUNK, DEVICE, 1 + i);
  CHECK_EQ(used(&w, DEVICE) + used(&w, HOST) + used(&w, FILES), 12 * CHUNK);
  double norm = -1;
  OK(gemini_zero(w.mgr, &all));
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) {
    CHECK_EQ(used(&w, tier), 0);
    CHECK_EQ(bytes_in(&w, w.t[0], tier), 0);
  }
  OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm));
  CHECK(norm == 0);
  CHECK_EQ(used(&w, DEVICE) + used(&w, HOST), 0);
  for (uint64_t i = 0; i < 300; i += 17) {
    gemini_access_t a = world_part(w.t[0], i * CHUNK, CHUNK, GEMINI_READ, i % 2 ? HOST : DEVICE);
    OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK(is_zero(a.ptr, CHUNK));
    OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  /* A state set to FREE holds nothing either. */
  world_fill(&w, w.t[0], 0, 2 * CHUNK, HOST, 4);
  OK(gemini_tensor_state_set(w.mgr, w.t[0], GEMINI_STATE_FREE));
  CHECK_EQ(bytes_in(&w, w.t[0], DEVICE) + bytes_in(&w, w.t[0], HOST) + bytes_in(&w, w.t[0], FILES), 0);
  gemini_access_t end = world_part(w.t[0], size - 8, 8, GEMINI_READ, DEVICE);
  OK(gemini_acquire(w.mgr, &end, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(gemini_zero(w.mgr, &all), GEMINI_ERR_BUSY);
  CHECK_EQ(gemini_tensor_state_set(w.mgr, w.t[0], GEMINI_STATE_FREE), GEMINI_ERR_STATE);
  OK(gemini_release(w.mgr, &end, 1, GEMINI_STREAM_CALLER));
  world_close(&w);
}

/* Looking at zeros on the host takes room only as long as there is some. */
static void test_zeros_read_on_the_host_give_way(void) {
  for (int files = 0; files < 2; files++) {
    world_t w = world_of(world_config(2, 3, files ? 4 : 0), 20, CHUNK);
    put(&w, w.t[0], HOST, 1);
    for (int i = 1; i < 20; i++) expect_zero(&w, w.t[i], HOST);
    CHECK(used(&w, HOST) <= 3 * CHUNK);
    CHECK_EQ(used(&w, FILES), 0); /* nobody writes zeros to files */
    expect(&w, w.t[0], HOST, 1);
    world_close(&w);
  }
}

/* Parts of chunks are zeroed where they are, and nothing beside them. */
static void test_zero_parts_in_every_tier_spares_neighbours(void) {
  static const uint32_t tiers[] = { DEVICE, HOST, FILES };
  for (int k = 0; k < 5; k++) {
    world_t w = world_of(world_config(4, 8, 8), 1, 3 * CHUNK);
    put(&w, w.t[0], DEVICE, 9);
    gemini_access_t pin = world_whole(w.t[0], 0, DEVICE);
    if (k < 3) OK(move(&w, w.t[0], tiers[k]));
    if (k == 3) OK(gemini_pin(w.mgr, &pin)); /* zeroed without leaving */
    if (k == 4) {                            /* behind queued work */
      gemini_access_t a = world_whole(w.t[0], GEMINI_WRITE, DEVICE);
      OK(gemini_acquire(w.mgr, &a, 1, w.stream));
      work_t work = { .at = a.ptr, .size = 3 * CHUNK, .seed = 9, .delay_ms = 20 };
      OK(gemini_stream_call(w.mgr, w.stream, work_fill, &work));
      OK(gemini_release(w.mgr, &a, 1, w.stream));
      gemini_access_t part = world_part(w.t[0], 1000, 2 * CHUNK, 0, 0);
      OK(gemini_zero(w.mgr, &part));
      OK(gemini_stream_synchronize(w.mgr, w.stream));
    } else {
      gemini_access_t part = world_part(w.t[0], 1000, 2 * CHUNK, 0, 0); /* two ends and a whole chunk */
      OK(gemini_zero(w.mgr, &part));
    }
    if (k == 3) CHECK_EQ(bytes_in(&w, w.t[0], DEVICE), 3 * CHUNK);
    for (int where = 0; where < 2; where++) {
      gemini_access_t a = world_whole(w.t[0], GEMINI_READ, where ? HOST : DEVICE);
      OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(world_reads(a.ptr, 0, 1000, 9));
      CHECK(is_zero((uint8_t *)a.ptr + 1000, 2 * CHUNK));
      CHECK(world_reads((uint8_t *)a.ptr + 1000 + 2 * CHUNK, 1000 + 2 * CHUNK, CHUNK - 1000, 9));
      OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    if (k == 3) OK(gemini_unpin(w.mgr, &pin));
    world_close(&w);
  }
}

static uint64_t copied_out(const world_t *w) {
  uint64_t sum = 0;
  for (int reason = 0; reason < GEMINI_REASON_COUNT; reason++) sum += world_stats(w).moved_chunks[LINK_D2H][reason];
  return sum;
}
/* What nobody wants leaves the device without a copy: whole chunks, as long as nothing acquires or writes them. */
static void test_discarded_chunks_leave_without_a_copy(void) {
  enum { KEPT, WHOLE, IN_PART, WRITTEN, READ, IN_USE, PINNED, HOWS };
  for (int how = KEPT; how < HOWS; how++) {
    world_t w = world_of(world_config(4, 8, 0), 3, 2 * CHUNK);
    put(&w, w.t[0], DEVICE, 9);
    gemini_access_t all = world_whole(w.t[0], GEMINI_READ, DEVICE);
    const gemini_access_t part = world_part(w.t[0], 1, 2 * CHUNK - 2, 0, 0);
    if (how == IN_USE) OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    if (how == PINNED) OK(gemini_pin(w.mgr, &all));
    if (how != KEPT) OK(gemini_discard(w.mgr, how == IN_PART ? &part : &all));
    if (how == IN_USE) OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    if (how == PINNED) OK(gemini_unpin(w.mgr, &all));
    if (how == WRITTEN) put(&w, w.t[0], DEVICE, 9);
    if (how == READ) expect(&w, w.t[0], DEVICE, 9);
    put(&w, w.t[1], DEVICE, 3), put(&w, w.t[2], DEVICE, 4); /* takes the frames */
    CHECK_EQ(bytes_in(&w, w.t[0], DEVICE), 0);
    CHECK_EQ(copied_out(&w), how == WHOLE ? 0 : 2);
    if (how == WHOLE) expect_zero(&w, w.t[0], DEVICE);
    else expect(&w, w.t[0], DEVICE, 9);
    put(&w, w.t[0], DEVICE, 5);
    OK(move(&w, w.t[0], HOST));
    expect(&w, w.t[0], HOST, 5);
    expect(&w, w.t[1], HOST, 3), expect(&w, w.t[2], HOST, 4);
    world_close(&w);
  }
}
/* A parameter's arena may hold gradients. */
static void test_discarded_parameters_keep_the_gradients_in_their_bytes(void) {
  for (int which = 0; which < 2; which++) {
    world_t w = world_open(world_config(4, 8, 0));
    gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 4, "params", 0, 0);
    gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 4, "grads", 0, params);
    gemini_tensor_t t = world_tensor(&w, params, "t", 2 * CHUNK), gradient;
    OK(gemini_tensor_counterpart(w.mgr, t, grads, &gradient));
    put(&w, gradient, DEVICE, 7);
    const gemini_access_t a = world_whole(which ? grads : params, 0, 0);
    OK(gemini_discard(w.mgr, &a));
    OK(move(&w, grads, HOST));
    expect(&w, gradient, DEVICE, 7);
    world_close(&w);
  }
}

/* One batch reads bytes and overwrites them: the reader sees them, whichever is named first, and wherever they are. */
static void test_batch_that_reads_what_it_overwrites_sees_it(void) {
  for (int k = 0; k < 24; k++) {
    const bool writes_first = k & 1, reuses = k & 2, in_part = k & 4 && !reuses;
    const uint32_t tier = k / 8 == 2 ? HOST : DEVICE, from = k / 8 == 1 ? DEVICE : HOST;
    world_t w = world_open(world_config(4, 8, 0));
    gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 4, "params", 0, 0);
    gemini_tensor_t t = world_tensor(&w, params, "t", CHUNK), read = t;
    if (reuses)
      OK(gemini_tensor_counterpart(w.mgr, t, world_arena(&w, GEMINI_KIND_GRAD, 4, "grads", 0, params), &read));
    put(&w, read, from, 7);
    gemini_access_t a[2];
    a[!writes_first] = world_whole(t, GEMINI_WRITE, tier);
    a[writes_first] = world_part(read, 0, in_part ? 64 : CHUNK, GEMINI_READ, tier);
    OK(gemini_acquire(w.mgr, a, 2, GEMINI_STREAM_CALLER));
    CHECK(world_reads(a[writes_first].ptr, 0, a[writes_first].size_bytes, 7));
    OK(gemini_release(w.mgr, a, 2, GEMINI_STREAM_CALLER));
    world_close(&w);
  }
}

/* An arena without bytes gets some between an acquire of all of it and the release. */
static void test_empty_arena_that_grows_while_it_is_used(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "cache", 0, 0);
  for (int with = 0; with < 2; with++) {
    gemini_access_t all = world_whole(arena, GEMINI_READ, DEVICE);
    OK(gemini_iteration_begin(w.mgr));
    if (with) OK(gemini_op_begin_with(w.mgr, "op", GEMINI_STREAM_CALLER, &all, 1));
    else OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    gemini_tensor_t t = world_tensor(&w, arena, "t", 1000);
    if (with) OK(gemini_op_end(w.mgr));
    OK(gemini_iteration_end(w.mgr));
    put(&w, t, DEVICE, 3);
    expect(&w, t, HOST, 3);
    OK(gemini_arena_destroy(w.mgr, arena)); /* nothing uses it */
    arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "cache", 0, 0);
  }
  gemini_access_t all = world_whole(arena, GEMINI_READ, HOST);
  OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  world_close(&w);
}

/* ---- load and store */
static int temporary(uint64_t size, uint64_t seed) {
  int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
  if (!size) return fd;
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(at != MAP_FAILED);
  world_write(at, 0, size, seed);
  munmap(at, size);
  return fd;
}
static void expect_file(int fd, uint64_t at, uint64_t offset, uint64_t size, uint64_t seed) {
  uint8_t *bytes = malloc(size);
  CHECK(bytes);
  CHECK_EQ(pread(fd, bytes, size, (off_t)at), size);
  CHECK(world_reads(bytes, offset, size, seed));
  free(bytes);
}

static void test_load_and_store_pass_through_every_tier(void) {
  world_t w = world_of(world_config(2, 3, 16), 1, 12 * CHUNK + 300); /* larger than device and host together */
  uint64_t size = 12 * CHUNK + 300;
  int in = temporary(size + 1000, 3), out = temporary(0, 0);
  gemini_access_t all = world_whole(w.t[0], 0, 0);
  OK(gemini_load(w.mgr, &all, in, 1000));
  CHECK_EQ(used(&w, DEVICE), 0);
  CHECK_EQ(bytes_in(&w, w.t[0], HOST) + bytes_in(&w, w.t[0], FILES), size);
  gemini_access_t some = world_part(w.t[0], 5 * CHUNK, 2 * CHUNK, GEMINI_READ_WRITE, DEVICE);
  OK(gemini_acquire(w.mgr, &some, 1, w.stream)); /* newest bytes on the device, still being written */
  CHECK_EQ(lseek(in, 0, SEEK_CUR), 0);
  OK(gemini_stream_synchronize(w.mgr, w.stream));
  for (uint64_t i = 0; i < 2 * CHUNK; i++) CHECK_EQ(((uint8_t *)some.ptr)[i], world_byte(3, 1000 + 5 * CHUNK + i));
  work_t work = { .at = some.ptr, .size = 2 * CHUNK, .seed = 8, .delay_ms = 30 };
  OK(gemini_stream_call(w.mgr, w.stream, work_fill, &work));
  OK(gemini_release(w.mgr, &some, 1, w.stream));
  OK(gemini_store(w.mgr, &all, out, 500));
  CHECK_EQ(lseek(out, 0, SEEK_END), size + 500);
  expect_file(out, 500, 1000, 5 * CHUNK, 3);
  expect_file(out, 500 + 5 * CHUNK, 0, 2 * CHUNK, 8);
  expect_file(out, 500 + 7 * CHUNK, 1000 + 7 * CHUNK, size - 7 * CHUNK, 3);
  /* A part, not at chunk borders, over bytes that are in use nowhere else. */
  gemini_access_t part = world_part(w.t[0], CHUNK - 50, CHUNK + 100, 0, 0);
  OK(gemini_load(w.mgr, &part, in, 0));
  gemini_access_t a = world_part(w.t[0], CHUNK - 100, CHUNK + 200, GEMINI_READ, HOST);
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(((uint8_t *)a.ptr)[49], world_byte(3, 1000 + CHUNK - 51));
  CHECK(world_reads((uint8_t *)a.ptr + 50, 0, CHUNK + 100, 3));
  CHECK_EQ(((uint8_t *)a.ptr)[CHUNK + 150], world_byte(3, 1000 + 2 * CHUNK + 50));
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  figures_t s = world_stats(&w);
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK(s.peak_bytes[tier] <= s.budget_bytes[tier]);
  close(in), close(out);
  world_close(&w);
}

static void test_load_and_store_failures_say_why(void) {
  world_t w = world_of(world_config(2, 8, 0), 3, 2 * CHUNK);
  put(&w, w.t[0], DEVICE, 1), put(&w, w.t[1], HOST, 2);
  int in = temporary(CHUNK + 10, 5);
  gemini_access_t all = world_whole(w.t[0], 0, 0);
  CHECK_EQ(gemini_load(w.mgr, &all, in, 0), GEMINI_ERR_FORMAT);
  CHECK_EQ(world_error().native_code, 0);
  CHECK(!strcmp(world_error().operation, "gemini_load"));
  CHECK(says_bytes("", CHUNK - 10));                 /* how many are missing */
  expect_part(&w, w.t[0], 0, CHUNK + 10, DEVICE, 5); /* what was read is there, the rest is as it was */
  expect_part(&w, w.t[0], CHUNK + 10, CHUNK - 10, DEVICE, 1);
  const int appending = temporary(0, 0); /* writes go to the end of the file, whatever the offset */
  CHECK_EQ(fcntl(appending, F_SETFL, O_APPEND), 0);
  CHECK_EQ(gemini_store(w.mgr, &all, appending, 4096), GEMINI_ERR_INVALID);
  CHECK(strstr(world_error().message, "O_APPEND"));
  CHECK_EQ(lseek(appending, 0, SEEK_END), 0);
  close(appending);
  int closed = dup(in);
  close(closed);
  all = world_whole(w.t[1], 0, 0);
  CHECK_EQ(gemini_load(w.mgr, &all, closed, 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, EBADF);
  CHECK_EQ(gemini_store(w.mgr, &all, closed, 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, EBADF);
  CHECK(!strcmp(world_error().operation, "gemini_store"));
  int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  if (full >= 0) {
    CHECK_EQ(gemini_store(w.mgr, &all, full, 0), GEMINI_ERR_OOM_FILE);
    CHECK_EQ(world_error().native_code, ENOSPC);
    gemini_access_t empty = world_whole(w.t[2], 0, 0); /* zeros that are nowhere */
    CHECK_EQ(gemini_store(w.mgr, &empty, full, 0), GEMINI_ERR_OOM_FILE);
    CHECK_EQ(world_error().native_code, ENOSPC);
    close(full);
  }
  int pipes[2];
  CHECK_EQ(pipe(pipes), 0); /* not seekable */
  CHECK_EQ(gemini_load(w.mgr, &all, pipes[0], 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, ESPIPE);
  close(pipes[0]), close(pipes[1]);
  expect(&w, w.t[1], DEVICE, 2);
  gemini_access_t held = world_part(w.t[1], 0, 8, GEMINI_READ, DEVICE);
  OK(gemini_acquire(w.mgr, &held, 1, w.stream));
  CHECK_EQ(gemini_load(w.mgr, &all, in, 0), GEMINI_ERR_BUSY);
  int out = temporary(0, 0);
  OK(gemini_store(w.mgr, &all, out, 0)); /* a reader is no harm */
  expect_file(out, 0, 0, 2 * CHUNK, 2);
  OK(gemini_release(w.mgr, &held, 1, w.stream));
  all = world_whole(w.t[2], 0, 0);
  OK(gemini_store(w.mgr, &all, out, 3)); /* never written: zeros */
  uint8_t zeros[100];
  CHECK_EQ(pread(out, zeros, 100, 2 * CHUNK + 3 - 100), 100);
  CHECK(is_zero(zeros, 100));
  close(in), close(out);
  world_close(&w);
}

/* ---- norm */
static double value_of(uint64_t i) { return ldexp((double)(i * 2654435761u % 4001) - 2000, (int)(i % 21) - 10); }

static void test_norm_is_the_same_to_the_bit_wherever_chunks_are(void) {
  enum { ELEMENTS = 5 * 65536 / 8 + 77 };
  world_t w = world_of(world_config(7, 8, 8), 2, ELEMENTS * 8);
  gemini_access_t a = world_whole(w.t[0], GEMINI_WRITE, HOST);
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  double sum64 = 0, sum32 = 0;
  for (uint64_t i = 0; i < ELEMENTS; i++) {
    double x = value_of(i);
    ((double *)a.ptr)[i] = x;
    sum64 += x * x;
  }
  const float *floats = a.ptr; /* the same bytes read as floats, up to a border that is no chunk's */
  uint64_t float_first = 6, float_count = 3 * 16384 + 11;
  for (uint64_t i = 0; i < 2 * ELEMENTS; i++) ((uint32_t *)a.ptr)[i] &= 0x3fffffffu; /* no huge floats, no NaN */
  sum64 = 0;
  for (uint64_t i = 0; i < ELEMENTS; i++) sum64 += ((double *)a.ptr)[i] * ((double *)a.ptr)[i];
  for (uint64_t i = 0; i < float_count; i++) sum32 += (double)floats[float_first + i] * floats[float_first + i];
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(sum64 > 0 && sum32 > 0 && isfinite(sum64) && isfinite(sum32));
  double first64 = 0, first32 = 0;
  uint64_t random = 17;
  for (int round = 0; round < 12; round++) {
    for (uint64_t i = 0; i < 6 && round; i++) { /* round 0: all on the host */
      uint64_t begin = i * CHUNK, size = i < 5 ? CHUNK : ELEMENTS * 8 - 5 * CHUNK;
      uint32_t tier = round < 4 ? (uint32_t)round - 1 : (uint32_t)(check_random(&random) % 3);
      gemini_access_t one = world_part(w.t[0], begin, size, 0, tier);
      OK(gemini_move(w.mgr, &one, 1));
    }
    gemini_stream_t stream = round % 2 ? w.stream : GEMINI_STREAM_CALLER;
    double norm64 = -1, norm32 = -1;
    gemini_access_t all = world_whole(w.t[0], 0, 0), part = world_part(w.t[0], 4 * float_first, 4 * float_count, 0, 0);
    OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F64, stream, &norm64));
    OK(gemini_norm(w.mgr, &part, GEMINI_DTYPE_F32, stream, &norm32));
    if (!round) first64 = norm64, first32 = norm32;
    CHECK(norm64 == first64 && norm32 == first32);
    CHECK(fabs(norm64 - sqrt(sum64)) <= 1e-13 * sqrt(sum64));
    CHECK(fabs(norm32 - sqrt(sum32)) <= 1e-13 * sqrt(sum32));
  }
  world_close(&w);
}

static void test_norm_of_short_types_and_refusals(void) {
  world_t w = world_of(world_config(4, 8, 0), 1, 2 * CHUNK);
  gemini_access_t a = world_part(w.t[0], 0, 16, GEMINI_WRITE, HOST);
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  static const uint16_t halves[] = { 0x4200, 0xC400, 0x3C00, 0x0001 }; /* 3, -4, 1, 2^-24 */
  static const uint16_t brains[] = { 0x4040, 0xC080, 0x3F80, 0x0000 }; /* 3, -4, 1, 0 */
  memcpy(a.ptr, halves, 8), memcpy((uint8_t *)a.ptr + 8, brains, 8);
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    OK(move(&w, w.t[0], tier));
    double norm = -1;
    gemini_access_t part = world_part(w.t[0], 0, 4, 0, 0);
    OK(gemini_norm(w.mgr, &part, GEMINI_DTYPE_F16, w.stream, &norm));
    CHECK(norm == 5);
    part = world_part(w.t[0], 6, 2, 0, 0);
    OK(gemini_norm(w.mgr, &part, GEMINI_DTYPE_F16, w.stream, &norm));
    CHECK(norm == 0x1p-24);
    part = world_part(w.t[0], 8, 8, 0, 0);
    OK(gemini_norm(w.mgr, &part, GEMINI_DTYPE_BF16, w.stream, &norm));
    CHECK(fabs(norm - sqrt(26)) < 1e-15);
    part = world_part(w.t[0], 0, 6, 0, 0); /* no multiple of 4 */
    norm = -7;
    CHECK_EQ(gemini_norm(w.mgr, &part, GEMINI_DTYPE_F32, w.stream, &norm), GEMINI_ERR_INVALID);
    CHECK(norm == -7);
  }
  world_close(&w);
}

static void test_norm_after_queued_work_counts_it(void) {
  world_t w = world_of(world_config(2, 8, 0), 3, CHUNK);
  for (int round = 0; round < 3; round++) {
    gemini_access_t a = world_whole(w.t[0], GEMINI_WRITE, DEVICE);
    OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    work_t work = { .at = a.ptr, .size = CHUNK, .seed = 4 + (uint64_t)round, .delay_ms = 20 };
    OK(gemini_stream_call(w.mgr, w.stream, work_fill, &work));
    OK(gemini_release(w.mgr, &a, 1, w.stream));
    if (round == 1) OK(move(&w, w.t[0], HOST));
    double sum = 0, norm = -1;
    for (uint64_t i = 0; i < CHUNK; i += 2) {
      uint16_t bits = (uint16_t)(world_byte(4 + (uint64_t)round, i) | world_byte(4 + (uint64_t)round, i + 1) << 8);
      uint32_t wide = (uint32_t)bits << 16;
      float x;
      memcpy(&x, &wide, 4);
      sum += (double)x * x;
    }
    gemini_access_t all = world_whole(w.t[0], 0, 0);
    OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_BF16, round == 2 ? GEMINI_STREAM_CALLER : w.stream, &norm));
    CHECK((isnan(norm) && isnan(sum)) || norm == sqrt(sum));
  }
  world_close(&w);
}

/* ---- non-model memory */
static void test_freed_memory_is_reused_after_its_last_use(void) {
  world_t w = world_of(world_config(2, 8, 0), 1, CHUNK);
  gemini_stream_t other;
  OK(gemini_stream_create(w.mgr, &other));
  for (uint64_t round = 0; round < 4; round++) {
    void *first, *second;
    OK(gemini_alloc(w.mgr, CHUNK + 1000, w.stream, &first));
    work_t fills = { .at = first, .size = CHUNK + 1000, .seed = 1 + round };
    work_t checks = { .at = first, .size = CHUNK + 1000, .seed = 1 + round, .delay_ms = 30 };
    OK(gemini_stream_call(w.mgr, w.stream, work_fill, &fills));
    OK(gemini_stream_call(w.mgr, w.stream, work_check, &checks));
    OK(gemini_free(w.mgr, first, w.stream));
    /* All of the device is needed for the next user, which must wait for the check. */
    if (round == 3) {
      put(&w, w.t[0], DEVICE, 9); /* on the caller: blocks */
    } else {
      gemini_stream_t stream = round == 2 ? GEMINI_STREAM_CALLER : other;
      OK(gemini_alloc(w.mgr, 2 * CHUNK, stream, &second));
      work_t again = { .at = second, .size = 2 * CHUNK, .seed = 50 };
      OK(gemini_stream_call(w.mgr, stream, work_fill, &again));
      OK(gemini_stream_synchronize(w.mgr, other));
      OK(gemini_free(w.mgr, second, stream));
    }
    OK(gemini_stream_synchronize(w.mgr, w.stream));
    CHECK(checks.right);
  }
  expect(&w, w.t[0], DEVICE, 9);
  int on_stack;
  CHECK_EQ(gemini_free(w.mgr, &on_stack, w.stream), GEMINI_ERR_INVALID);
  void *block;
  OK(gemini_alloc(w.mgr, 1024, w.stream, &block));
  CHECK_EQ(gemini_free(w.mgr, (uint8_t *)block + 512, w.stream), GEMINI_ERR_INVALID);
  OK(gemini_free(w.mgr, block, w.stream));
  CHECK_EQ(gemini_free(w.mgr, block, w.stream), GEMINI_ERR_INVALID);
  OK(gemini_free(w.mgr, NULL, w.stream));
  CHECK_EQ(gemini_alloc(w.mgr, 2 * CHUNK + 1, w.stream, &block), GEMINI_ERR_OOM_DEVICE);
  CHECK(says_bytes("", 2 * CHUNK));
  OK(gemini_stream_destroy(w.mgr, other));
  world_close(&w);
}

/* Two blocks share a frame that an evicted chunk has left behind, with work still to run on it. */
static void test_second_block_in_a_frame_waits_for_it(void) {
  world_t w = world_of(world_config(1, 8, 0), 1, CHUNK);
  gemini_stream_t second, third;
  OK(gemini_stream_create(w.mgr, &second));
  OK(gemini_stream_create(w.mgr, &third));
  gemini_access_t a = world_whole(w.t[0], GEMINI_WRITE, DEVICE);
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  work_t write = { .at = a.ptr, .size = CHUNK, .seed = 1, .delay_ms = 50 };
  OK(gemini_stream_call(w.mgr, w.stream, work_fill, &write));
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  void *block[2];
  OK(gemini_alloc(w.mgr, 4096, second, &block[0]));
  OK(gemini_alloc(w.mgr, 4096, third, &block[1]));
  work_t fills[2] = { { .at = block[0], .size = 4096, .seed = 2 }, { .at = block[1], .size = 4096, .seed = 3 } };
  OK(gemini_stream_call(w.mgr, second, work_fill, &fills[0]));
  OK(gemini_stream_call(w.mgr, third, work_fill, &fills[1]));
  expect(&w, w.t[0], HOST, 1);
  OK(gemini_stream_synchronize(w.mgr, second));
  OK(gemini_stream_synchronize(w.mgr, third));
  CHECK(world_reads(block[0], 0, 4096, 2) && world_reads(block[1], 0, 4096, 3));
  for (int i = 0; i < 2; i++) OK(gemini_free(w.mgr, block[i], third));
  OK(gemini_stream_destroy(w.mgr, second));
  OK(gemini_stream_destroy(w.mgr, third));
  world_close(&w);
}

/* An allocation that fails half way has taken a frame from a chunk whose work still runs. */
static void test_frame_of_a_failed_allocation_is_waited_for(void) {
  world_t w = world_of(world_config(2, 8, 0), 3, CHUNK);
  gemini_stream_t second;
  OK(gemini_stream_create(w.mgr, &second));
  gemini_access_t held = world_whole(w.t[1], GEMINI_WRITE, DEVICE), a = world_whole(w.t[0], GEMINI_WRITE, DEVICE);
  OK(gemini_acquire(w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  work_t write = { .at = a.ptr, .size = CHUNK, .seed = 1, .delay_ms = 50 };
  OK(gemini_stream_call(w.mgr, w.stream, work_fill, &write));
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  void *block;
  CHECK_EQ(gemini_alloc(w.mgr, 2 * CHUNK, second, &block), GEMINI_ERR_OOM_DEVICE);
  put(&w, w.t[2], DEVICE, 3);
  expect(&w, w.t[0], HOST, 1);
  expect(&w, w.t[2], DEVICE, 3);
  OK(gemini_release(w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  OK(gemini_stream_destroy(w.mgr, second));
  world_close(&w);
}

/* ---- nothing is left behind */
static uint64_t count_entries(const char *path) {
  DIR *dir = opendir(path);
  CHECK(dir);
  uint64_t count = 0;
  for (struct dirent *e; (e = readdir(dir));) count += e->d_name[0] != '.';
  closedir(dir);
  return count;
}
/* Mappings in all, those of device memory, and their bytes of address space. */
static uint64_t count_maps(uint64_t *device_out, uint64_t *bytes_out) {
  FILE *maps = fopen("/proc/self/maps", "r");
  CHECK(maps);
  uint64_t count = 0;
  *device_out = *bytes_out = 0;
  char line[1024];
  while (fgets(line, sizeof line, maps)) {
    uint64_t begin, end;
    CHECK_EQ(sscanf(line, "%" SCNx64 "-%" SCNx64, &begin, &end), 2);
    if (!strstr(line, "---p")) *bytes_out += end - begin;
    *device_out += strstr(line, "gemini") != NULL && strstr(line, "memfd") != NULL;
    count++;
  }
  fclose(maps);
  return count;
}

static void use_everything(void) {
  world_t w = world_of(world_config(4, 6, 32), 12, 2 * CHUNK);
  for (int i = 0; i < 12; i++) put(&w, w.t[i], DEVICE, 1 + (uint64_t)i);
  CHECK_EQ(count_entries(w.dir), 0); /* the file vanishes with the process, however it ends */
  gemini_arena_t follower;
  gemini_arena_config_t like = GEMINI_ARENA_CONFIG_INIT;
  like.like = w.arena;
  like.kind = GEMINI_KIND_MOMENTUM;
  OK(gemini_arena_create(w.mgr, &like, &follower));
  gemini_tensor_t counterpart;
  OK(gemini_tensor_counterpart(w.mgr, w.t[3], follower, &counterpart));
  put(&w, counterpart, HOST, 5);
  void *block;
  OK(gemini_alloc(w.mgr, CHUNK, w.stream, &block)); /* never freed: closing does */
  gemini_access_t pin = world_whole(w.t[0], 0, DEVICE);
  OK(gemini_pin(w.mgr, &pin));
  OK(gemini_budget_set(w.mgr, DEVICE, 6 * CHUNK));
  expect(&w, w.t[5], DEVICE, 6);
  world_close(&w);
}

/* Sanitizers map memory of their own as they go. Without them, twelve leaks of one mapping would show. */
enum { OWN_MAPS = SANITIZED ? 10000 : 6 };

static void test_close_leaves_nothing(void) {
  uint64_t device, bytes, bytes_after;
  for (int i = 0; i < 4; i++) use_everything(); /* thread stacks and malloc arenas come to rest */
  uint64_t fds = count_entries("/proc/self/fd"), maps = count_maps(&device, &bytes);
  CHECK_EQ(device, 0);
  for (int i = 0; i < 12; i++) use_everything();
  CHECK_EQ(count_entries("/proc/self/fd"), fds);
  CHECK(count_maps(&device, &bytes_after) <= maps + OWN_MAPS);
  CHECK_EQ(device, 0);
  if (OWN_MAPS == 6) CHECK(bytes_after <= bytes + (UINT64_C(256) << 20)); /* the host mirror of one arena is 1 GiB */
}

static void test_arena_destroy_gives_everything_back(void) {
  world_t w = world_of(world_config(4, 6, 16), 8, CHUNK);
  uint64_t device, bytes, seen = 0;
  for (int i = 0; i < 8; i++) put(&w, w.t[i], DEVICE, 1 + (uint64_t)i);
  for (int round = 0; round < 10; round++) {
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
    c.kind = GEMINI_KIND_OTHER;
    c.name = "short-lived";
    gemini_arena_t arena;
    OK(gemini_arena_create(w.mgr, &c, &arena));
    gemini_tensor_t t;
    OK(gemini_tensor_register(w.mgr, arena, "there and gone", 3 * CHUNK, GEMINI_OFFSET_NEXT, &t));
    put(&w, t, round % 2 ? DEVICE : HOST, 4);
    if (round % 3 == 0) OK(move(&w, t, FILES));
    figures_t before = world_stats(&w);
    uint64_t on_device = world_tier_bytes(&w, arena, DEVICE), in_files = world_tier_bytes(&w, arena, FILES);
    OK(gemini_arena_destroy(w.mgr, arena));
    figures_t after = world_stats(&w);
    CHECK_EQ(after.used_bytes[DEVICE], before.used_bytes[DEVICE] - on_device);
    CHECK(after.used_bytes[FILES] <= before.used_bytes[FILES] - in_files);
    CHECK_EQ(gemini_tensor_find(w.mgr, "there and gone", &t), GEMINI_ERR_NOT_FOUND);
    uint64_t maps = count_maps(&device, &bytes);
    if (round == 2) seen = maps;
    if (round > 2) CHECK(maps <= seen + OWN_MAPS);
    for (int i = 0; i < 8; i++) expect(&w, w.t[i], i % 2 ? DEVICE : HOST, 1 + (uint64_t)i);
  }
  world_close(&w);
}

int main(void) {
  RUN(test_addresses_across_evictions_stay);
  RUN(test_contents_down_to_files_and_back_survive);
  RUN(test_contents_rewritten_above_an_older_copy_are_the_newer);
  RUN(test_eviction_behind_queued_work_keeps_what_it_writes);
  RUN(test_acquire_on_another_stream_sees_the_first_ones_writes);
  RUN(test_never_written_reads_zero_in_used_frames);
  RUN(test_acquires_beyond_the_device_evict);
  RUN(test_acquire_with_nothing_evictable_says_what_holds_the_memory);
  RUN(test_acquire_write_batch_refused_keeps_old_bytes);
  RUN(test_allocation_storm_takes_all_but_what_is_held);
  RUN(test_allocations_and_acquires_mixed_never_pass_the_budget);
  RUN(test_margin_in_warmup_is_left_alone);
  RUN(test_host_full_without_files_is_oom_host);
  RUN(test_all_tiers_full_is_oom_file);
  RUN(test_failing_file_changes_nothing);
  RUN(test_limit_on_files_fails_calls_only);
  RUN(test_tiny_tensors_in_one_cache_line_are_apart);
  RUN(test_tensor_larger_than_the_device_is_used_by_ranges);
  RUN(test_tied_tensors_share_their_bytes);
  RUN(test_strict_stale_accesses_fault);
  RUN(test_budget_below_the_configured_chunk_before_first_use_is_refused);
  RUN(test_budget_device_down_and_up_moves_what_must);
  RUN(test_budget_host_down_goes_to_files_or_is_refused);
  RUN(test_budget_file_down_is_refused_while_needed);
  RUN(test_memory_in_existence_stays_in_the_budget);
  RUN(test_pinned_stays_until_the_last_unpin);
  RUN(test_hint_takes_free_memory_only);
  RUN(test_zeros_read_on_the_host_give_way);
  RUN(test_zero_parts_in_every_tier_spares_neighbours);
  RUN(test_load_and_store_pass_through_every_tier);
  RUN(test_load_and_store_failures_say_why);
  RUN(test_norm_is_the_same_to_the_bit_wherever_chunks_are);
  RUN(test_norm_of_short_types_and_refusals);
  RUN(test_norm_after_queued_work_counts_it);
  RUN(test_freed_memory_is_reused_after_its_last_use);
  RUN(test_close_leaves_nothing);
  RUN(test_arena_destroy_gives_everything_back);
  RUN(test_clean_chunk_is_evicted_where_dirty_ones_cannot_be);
  RUN(test_redundant_file_copies_give_way);
  RUN(test_neighbours_on_the_host_can_be_written_together);
  RUN(test_work_on_host_memory_is_waited_for);
  RUN(test_budget_host_down_waits_for_work_on_host_memory);
  RUN(test_hint_to_files_brings_there);
  RUN(test_move_of_many_does_not_evict_its_own);
  RUN(test_zero_whole_chunks_cost_nothing);
  RUN(test_discarded_chunks_leave_without_a_copy);
  RUN(test_discarded_parameters_keep_the_gradients_in_their_bytes);
  RUN(test_batch_that_reads_what_it_overwrites_sees_it);
  RUN(test_empty_arena_that_grows_while_it_is_used);
  RUN(test_second_block_in_a_frame_waits_for_it);
  RUN(test_frame_of_a_failed_allocation_is_waited_for);
  return check_done();
}
