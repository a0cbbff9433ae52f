/* Updates through the public interface: every span once, every result that of a plain loop, to the bit and wherever the
 * chunks are; late ones done before the next use; gradients that reuse their parameters; what is refused.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 8 };
#define WORLD_MORE                                                          \
  /* arenas of one layout, each with a plain copy of what it should hold */ \
  uint32_t count;                                                           \
  uint64_t elements;                                                        \
  gemini_arena_t arena[MOST];                                               \
  uint32_t bytes[MOST]; /* of an element */                                 \
  uint8_t *plain[MOST];                                                     \
  uint64_t base[MOST]; /* device addresses */
#include "world.h"

#define OK(call) CHECK_OK(call)
#define CHUNK WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };

static gemini_config_t config_of(uint64_t device_chunks, uint64_t host_chunks, uint64_t file_chunks) {
  gemini_config_t c = world_config(device_chunks, host_chunks, file_chunks);
  c.update_threads = 2;
  return c;
}

static void arenas_close(world_t *w) {
  world_close(w);
  for (uint32_t i = 0; i < w->count; i++) free(w->plain[i]);
}

OWN_MEMORY static inline uint64_t mix(uint64_t x) {
  x *= UINT64_C(0x9e3779b97f4a7c15);
  return x ^ x >> 31;
}

/* Arenas with these element sizes, count of them, filled with random bytes chunk by chunk. */
static world_t world_of(gemini_config_t c, const uint32_t *sizes, uint32_t count, uint64_t elements) {
  world_t w = world_open(c);
  w.count = count;
  w.elements = elements;
  for (uint32_t i = 0; i < count; i++) {
    gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
    char name[32];
    snprintf(name, sizeof name, "arena.%d", (int)i);
    a.name = name;
    a.kind = GEMINI_KIND_OTHER;
    a.element_bytes = w.bytes[i] = sizes[i];
    a.like = i ? w.arena[0] : 0;
    a.capacity_bytes = (elements + 4096) * sizes[i];
    OK(gemini_arena_create(w.mgr, &a, &w.arena[i]));
  }
  uint64_t at;
  OK(gemini_arena_take(w.mgr, w.arena[0], elements * sizes[0], &at));
  CHECK_EQ(at, 0);
  uint64_t random = 99;
  for (uint32_t i = 0; i < count; i++) {
    gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
    OK(gemini_arena_info(w.mgr, w.arena[i], &info));
    w.base[i] = info.base;
    uint64_t size = elements * sizes[i];
    CHECK_EQ(info.size_bytes, size);
    w.plain[i] = malloc(size + 8);
    CHECK(w.plain[i]);
    for (uint64_t k = 0; k < size; k += 8) {
      uint64_t x = check_random(&random);
      memcpy(w.plain[i] + k, &x, 8);
    }
    for (uint64_t k = 0; k < size; k += CHUNK) {
      gemini_access_t a = world_part(w.arena[i], k, k + CHUNK < size ? CHUNK : size - k, GEMINI_WRITE, HOST);
      OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      memcpy(a.ptr, w.plain[i] + k, a.size_bytes);
      OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  }
  return w;
}

static void expect_arena(world_t *w, uint32_t i, uint32_t tier) {
  uint64_t size = w->elements * w->bytes[i];
  for (uint64_t k = 0; k < size; k += CHUNK) {
    gemini_access_t a = world_part(w->arena[i], k, k + CHUNK < size ? CHUNK : size - k, GEMINI_READ, tier);
    OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
    if (memcmp(a.ptr, w->plain[i] + k, a.size_bytes)) {
      uint64_t at = 0;
      while (((uint8_t *)a.ptr)[at] == w->plain[i][k + at]) at++;
      fprintf(stderr, "arena %u differs from byte %" PRIu64 " on\n", i, k + at);
      CHECK(false);
    }
    OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
}
static void expect_all(world_t *w, uint32_t tier) {
  for (uint32_t i = 0; i < w->count; i++) expect_arena(w, i, tier);
}

/* ---- the update: what is read decides, element by element, what is written */
typedef struct {
  world_t *w;
  uint32_t count;
  uint32_t index[MOST]; /* of the world's arenas */
  uint32_t mode[MOST];
  uint64_t salt;
  long delay_ms;
  uint8_t *seen; /* elements, or NULL: how often each was in a span */
  uint64_t smallest;
  _Atomic uint64_t spans, device_spans, done, wrong;
} rule_t;

/* In memory of the caller's own. Bytes are copied by loops: sanitizers check memcpy() wherever it is called. */
OWN_MEMORY static void rule_elements(const rule_t *r, uint8_t *const *ptr, uint64_t first, uint64_t count) {
  for (uint64_t e = 0; e < count; e++) {
    uint64_t x = mix(r->salt + first + e);
    for (uint32_t i = 0; i < r->count; i++) {
      uint32_t bytes = r->w->bytes[r->index[i]];
      uint64_t part[2] = { 0, 0 };
      if (!(r->mode[i] & GEMINI_READ)) continue;
      for (uint32_t b = 0; b < bytes; b++) ((uint8_t *)part)[b] = ptr[i][e * bytes + b];
      x = mix(x ^ part[0]) + part[1];
    }
    for (uint32_t i = 0; i < r->count; i++) {
      uint32_t bytes = r->w->bytes[r->index[i]];
      uint64_t part[2] = { mix(x + i), mix(x - i - 1) };
      for (uint32_t b = 0; r->mode[i] & GEMINI_WRITE && b < bytes; b++)
        ptr[i][e * bytes + b] = ((const uint8_t *)part)[b];
    }
  }
}

typedef struct {
  rule_t *rule;
  gemini_update_span_t span;
} queued_t;
static void span_run(void *user) {
  queued_t *q = user;
  if (q->rule->delay_ms) sleep_ms(q->rule->delay_ms);
  const rule_t *r = q->rule;
  uint8_t *own[MOST];
  for (uint32_t i = 0; i < r->count; i++) {
    const uint64_t size = q->span.element_count * r->w->bytes[r->index[i]];
    own[i] = malloc(size);
    CHECK(own[i]);
    if (r->mode[i] & GEMINI_READ) memcpy(own[i], q->span.ptr[i], size);
  }
  rule_elements(r, own, q->span.first_element, q->span.element_count);
  for (uint32_t i = 0; i < r->count; i++) {
    if (r->mode[i] & GEMINI_WRITE) memcpy(q->span.ptr[i], own[i], q->span.element_count * r->w->bytes[r->index[i]]);
    free(own[i]);
  }
  atomic_fetch_add(&q->rule->done, 1);
}
static void span_run_and_free(void *user) {
  span_run(user);
  free(user);
}
static void rule_span(void *user, const gemini_update_span_t *span) {
  rule_t *r = user;
  uint64_t end = span->first_element + span->element_count, unit = CHUNK / r->smallest;
  bool right = span->struct_size == sizeof *span && span->arena_count == r->count && !span->pass &&
               span->element_count && end <= r->w->elements &&
               span->first_element / unit == (end - 1) / unit; /* in one chunk of the smallest elements */
  if (!right) {
    atomic_fetch_add(&r->wrong, 1);
    return;
  }
  for (uint64_t e = span->first_element; r->seen && e < end; e++) r->seen[e]++;
  atomic_fetch_add(&r->spans, 1);
  if (span->tier == DEVICE) {
    atomic_fetch_add(&r->device_spans, 1);
    for (uint32_t i = 0; i < r->count; i++)
      if ((uintptr_t)span->ptr[i] != r->w->base[r->index[i]] + span->first_element * r->w->bytes[r->index[i]])
        atomic_fetch_add(&r->wrong, 1);
    queued_t *q = malloc(sizeof *q);
    if (q) *q = (queued_t){ r, *span };
    if (!q || gemini_stream_call(r->w->mgr, span->stream, span_run_and_free, q)) atomic_fetch_add(&r->wrong, 1);
  } else {
    if (span->tier != HOST) atomic_fetch_add(&r->wrong, 1);
    queued_t q = { r, *span };
    span_run(&q);
  }
}

static rule_t rule_of(world_t *w, uint64_t salt) {
  rule_t r = { .w = w, .count = w->count, .salt = salt, .smallest = 16 };
  for (uint32_t i = 0; i < w->count; i++) {
    r.index[i] = i;
    r.mode[i] = GEMINI_READ_WRITE;
    if (w->bytes[i] < r.smallest) r.smallest = w->bytes[i];
  }
  return r;
}

static gemini_status_t rule_submit(rule_t *r, uint64_t first, uint64_t count, uint32_t flags, gemini_stream_t stream) {
  gemini_arena_t arenas[MOST];
  for (uint32_t i = 0; i < r->count; i++) arenas[i] = r->w->arena[r->index[i]];
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = flags;
  u.arenas = arenas;
  u.modes = r->mode;
  u.arena_count = r->count;
  u.first_element = first;
  u.element_count = count;
  u.stream = stream;
  u.fn = rule_span;
  u.user = r;
  return gemini_update(r->w->mgr, &u); /* arenas and modes are borrowed until it returns only */
}
/* The same on the plain copies. */
static void rule_plain(const rule_t *r, uint64_t first, uint64_t count) {
  uint8_t *ptr[MOST];
  if (!first && !count) count = r->w->elements;
  for (uint32_t i = 0; i < r->count; i++) ptr[i] = r->w->plain[r->index[i]] + first * r->w->bytes[r->index[i]];
  rule_elements(r, ptr, first, count);
}
static void expect_seen(const rule_t *r, uint64_t first, uint64_t count) {
  for (uint64_t e = 0; e < r->w->elements; e++) CHECK_EQ(r->seen[e], e >= first && e < first + count);
}

/* ---- equal to a plain loop */
static void place_randomly(world_t *w, uint64_t *random) {
  for (uint32_t i = 0; i < w->count; i++) {
    uint64_t size = w->elements * w->bytes[i];
    for (uint64_t k = 0; k < size; k += CHUNK) {
      gemini_access_t a = world_part(w->arena[i], k, k + CHUNK < size ? CHUNK : size - k, GEMINI_READ, 0);
      a.tier = (uint32_t)(check_random(random) % (*w->dir ? 3 : 2));
      OK(gemini_move(w->mgr, &a, 1));
    }
  }
}

static void test_update_of_any_arenas_equals_a_plain_loop(void) {
  static const uint32_t sizes[][MOST] = { { 4 },
                                          { 2, 4 },
                                          { 1, 16, 2 },
                                          { 4, 4, 4, 8 },
                                          { 2, 4, 4, 4, 4 },
                                          { 16, 8, 4, 2, 1, 1 },
                                          { 8, 8, 4, 2, 2, 1, 16 },
                                          { 1, 2, 4, 8, 16, 1, 2, 4 } };
  uint64_t random = 5;
  for (uint32_t count = 1; count <= MOST; count++) {
    world_t w = world_of(config_of(40, 120, 120), sizes[count - 1], count, 70000 + 1237 * count);
    w.elements = 70000 + 1237 * count;
    for (uint64_t round = 0; round < 4; round++) {
      rule_t r = rule_of(&w, check_random(&random));
      r.seen = calloc(w.elements, 1);
      CHECK(r.seen);
      for (uint32_t i = 0; i < count; i++) { /* every mode, any order of arenas */
        r.mode[i] = i == round % count ? GEMINI_READ_WRITE : 1 + (uint32_t)(check_random(&random) % 3);
        uint32_t other = (uint32_t)(check_random(&random) % (i + 1)), index = r.index[i];
        r.index[i] = r.index[other], r.index[other] = index;
      }
      place_randomly(&w, &random);
      uint64_t first = 0, elements = 0;
      if (round) { /* a part of it, at no border */
        first = check_random(&random) % w.elements;
        elements = 1 + check_random(&random) % (w.elements - first);
      }
      OK(rule_submit(&r, first, elements, round % 2 ? GEMINI_UPDATE_LATE : 0, w.stream));
      if (round % 2) OK(gemini_update_wait(w.mgr));
      CHECK_EQ(atomic_load(&r.done), atomic_load(&r.spans));
      CHECK_EQ(atomic_load(&r.wrong), 0);
      rule_plain(&r, first, elements);
      expect_seen(&r, first, elements ? elements : w.elements);
      free(r.seen);
      expect_all(&w, round % 2 ? HOST : DEVICE);
    }
    figures_t s = world_stats(&w);
    for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK(s.peak_bytes[tier] <= s.budget_bytes[tier]);
    arenas_close(&w);
  }
}

/* Spans with a pinned chunk run on the device, those beside it on the host: the results do not tell. */
static void test_update_on_the_device_equals_the_host(void) {
  static const uint32_t sizes[] = { 2, 4, 4 };
  for (int late = 0; late < 2; late++) {
    world_t w = world_of(config_of(24, 64, 0), sizes, 3, 4 * 32768 + 100);
    gemini_access_t pin = world_part(w.arena[0], CHUNK, 2 * CHUNK, 0, DEVICE); /* elements 32768 to 98304 */
    gemini_access_t there = pin;
    there.mode = GEMINI_READ_WRITE;
    OK(gemini_acquire(w.mgr, &there, 1, GEMINI_STREAM_CALLER));
    OK(gemini_release(w.mgr, &there, 1, GEMINI_STREAM_CALLER));
    OK(gemini_discard(w.mgr, &pin)); /* bytes that the update writes before they leave */
    OK(gemini_pin(w.mgr, &pin));
    rule_t r = rule_of(&w, 3);
    r.seen = calloc(w.elements, 1);
    CHECK(r.seen);
    r.mode[1] = GEMINI_READ;
    OK(rule_submit(&r, 0, 0, late ? GEMINI_UPDATE_LATE : 0, w.stream));
    rule_plain(&r, 0, 0);
    if (late) OK(gemini_update_wait(w.mgr));
    CHECK_EQ(atomic_load(&r.wrong), 0);
    CHECK_EQ(atomic_load(&r.device_spans), 2);
    CHECK_EQ(atomic_load(&r.spans), 2 + 2 * 2 + 1); /* on the host, none goes beyond a chunk of any arena */
    CHECK_EQ(atomic_load(&r.done), 7);
    expect_seen(&r, 0, w.elements);
    free(r.seen);
    OK(gemini_unpin(w.mgr, &pin));
    pin.tier = HOST;
    OK(gemini_move(w.mgr, &pin, 1));
    expect_all(&w, DEVICE);
    expect_all(&w, HOST);
    arenas_close(&w);
  }
}

/* States far larger than device and host together. */
static void test_update_through_files_equals_a_plain_loop(void) {
  static const uint32_t sizes[] = { 2, 4, 4, 4 };
  world_t w = world_of(config_of(4, 12, 160), sizes, 4, 16 * 32768 + 5);
  for (uint64_t round = 0; round < 3; round++) {
    rule_t r = rule_of(&w, round);
    OK(rule_submit(&r, 0, 0, round % 2 ? GEMINI_UPDATE_LATE : 0, w.stream));
    OK(gemini_update_wait(w.mgr));
    CHECK_EQ(atomic_load(&r.wrong), 0);
    CHECK_EQ(atomic_load(&r.spans), 16 * 2 + 1);
    rule_plain(&r, 0, 0);
  }
  expect_all(&w, HOST);
  expect_all(&w, DEVICE);
  figures_t s = world_stats(&w);
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK(s.peak_bytes[tier] <= s.budget_bytes[tier]);
  CHECK(s.moved_bytes[LINK_F2H][GEMINI_REASON_UPDATE] > 60 * CHUNK);
  arenas_close(&w);
}

/* Host and files together have hardly more room than there are bytes: what goes to a file waits for what comes from one. */
static void test_update_where_files_are_almost_full(void) {
  static const uint32_t sizes[] = { 2, 4, 4, 4 };
  enum { PIECES = 16, CHUNKS = 7 * PIECES, ON_HOST = 16, SPARE = 1 };
  world_t w = world_of(config_of(4, ON_HOST, CHUNKS - ON_HOST + SPARE), sizes, 4, PIECES * 32768);
  for (uint64_t round = 0; round < check_repetitions(20); round++) {
    rule_t r = rule_of(&w, round);
    OK(rule_submit(&r, 0, 0, GEMINI_UPDATE_LATE, w.stream));
    gemini_access_t one = world_part(w.arena[0], round % PIECES * CHUNK, CHUNK, GEMINI_READ, DEVICE);
    OK(gemini_acquire(w.mgr, &one, 1, w.stream));
    OK(gemini_release(w.mgr, &one, 1, w.stream));
    OK(gemini_update_wait(w.mgr));
    CHECK_EQ(atomic_load(&r.wrong), 0);
    rule_plain(&r, 0, 0);
  }
  expect_all(&w, HOST);
  arenas_close(&w);
}

/* ---- late */
static void check_on_stream(void *user) {
  world_t *w = user;
  if (memcmp((void *)(uintptr_t)w->base[0], w->plain[0], CHUNK)) w->elements = 0; /* read after the stream is done */
}

static void test_late_update_is_done_before_the_next_use(void) {
  static const uint32_t sizes[] = { 4, 4 };
  for (int use = 0; use < 10; use++) {
    gemini_config_t c = config_of(12, 32, 16);
    c.update_threads = 1;
    world_t w = world_of(c, sizes, 2, 4 * 16384);
    rule_t r = rule_of(&w, 70 + (uint64_t)use);
    r.delay_ms = 15;
    OK(rule_submit(&r, 0, 0, GEMINI_UPDATE_LATE, w.stream));
    CHECK(atomic_load(&r.done) < 4); /* it returned at once */
    CHECK(world_stats(&w).pending_updates > 0);
    rule_plain(&r, 0, 0);
    gemini_access_t first = world_part(w.arena[0], 0, CHUNK, GEMINI_READ, DEVICE), all = world_whole(w.arena[0], 0, 0);
    gemini_stream_t other;
    int fd = memfd_create("test", MFD_CLOEXEC);
    CHECK(fd >= 0);
    double norm = 0;
    uint8_t *copy = malloc(4 * CHUNK);
    CHECK(copy);
    OK(gemini_stream_create(w.mgr, &other));
    switch (use) {
    case 0: /* a stream that knows nothing of the update */
      OK(gemini_acquire(w.mgr, &first, 1, other));
      OK(gemini_stream_call(w.mgr, other, check_on_stream, &w));
      OK(gemini_release(w.mgr, &first, 1, other));
      OK(gemini_stream_synchronize(w.mgr, other));
      CHECK(w.elements);
      break;
    case 1: expect_arena(&w, 0, DEVICE); break; /* the caller */
    case 2: expect_arena(&w, 0, HOST); break;
    case 3:
      OK(gemini_store(w.mgr, &all, fd, 0));
      CHECK_EQ(pread(fd, copy, 4 * CHUNK, 0), 4 * CHUNK);
      CHECK(!memcmp(copy, w.plain[0], 4 * CHUNK));
      break;
    case 4: {
      OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F16, GEMINI_STREAM_CALLER, &norm));
      double now = 0;
      OK(gemini_update_wait(w.mgr));
      OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F16, GEMINI_STREAM_CALLER, &now));
      CHECK(!memcmp(&norm, &now, sizeof now));
      break;
    }
    case 5: /* a part written over it comes after it */
      first = world_part(w.arena[0], 3 * CHUNK, 8, GEMINI_WRITE, HOST);
      OK(gemini_acquire(w.mgr, &first, 1, GEMINI_STREAM_CALLER));
      memset(first.ptr, 0x11, 8), memset(w.plain[0] + 3 * CHUNK, 0x11, 8);
      OK(gemini_release(w.mgr, &first, 1, GEMINI_STREAM_CALLER));
      break;
    case 6:
      first = world_part(w.arena[0], 2 * CHUNK + 40, CHUNK, 0, 0);
      OK(gemini_zero(w.mgr, &first));
      memset(w.plain[0] + 2 * CHUNK + 40, 0, CHUNK);
      all = world_whole(w.arena[1], 0, 0);
      OK(gemini_zero(w.mgr, &all));
      memset(w.plain[1], 0, 4 * CHUNK);
      break;
    case 7:
      all.tier = FILES;
      OK(gemini_move(w.mgr, &all, 1));
      break;
    case 8:
      all = world_part(w.arena[0], 100, 3 * CHUNK, 0, 0);
      CHECK_EQ(pwrite(fd, w.plain[1], 3 * CHUNK, 0), 3 * CHUNK);
      OK(gemini_load(w.mgr, &all, fd, 0));
      memcpy(w.plain[0] + 100, w.plain[1], 3 * CHUNK);
      break;
    default: /* a smaller budget pushes chunks with updates pending out */
      OK(gemini_budget_set(w.mgr, HOST, 3 * CHUNK));
      break;
    }
    expect_all(&w, use % 2 ? HOST : DEVICE);
    CHECK_EQ(atomic_load(&r.done), 4);
    CHECK_EQ(atomic_load(&r.wrong), 0);
    close(fd);
    free(copy);
    arenas_close(&w);
  }
}

/* The gradient is written by queued work, and the update of it is submitted at once. */
typedef struct {
  uint8_t *to;
  const uint8_t *from;
  uint64_t size;
  long delay_ms;
} write_t;
static void write_late(void *user) {
  write_t *k = user;
  sleep_ms(k->delay_ms);
  memcpy(k->to, k->from, k->size);
}
static void test_update_comes_after_its_streams_work(void) {
  static const uint32_t sizes[] = { 4, 4 };
  for (int how = 0; how < 4; how++) { /* late or not; the written arena stays or is evicted before */
    world_t w = world_of(config_of(4, 32, 0), sizes, 2, 2 * 16384);
    gemini_access_t a = world_whole(w.arena[1], GEMINI_WRITE, DEVICE);
    OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    for (uint64_t k = 0; k < 2 * CHUNK; k++) w.plain[1][k] = (uint8_t)(k * 7 + k / 256);
    write_t write = { a.ptr, w.plain[1], 2 * CHUNK, 25 };
    uint8_t *kept = malloc(2 * CHUNK);
    CHECK(kept);
    memcpy(kept, w.plain[1], 2 * CHUNK);
    write.from = kept;
    OK(gemini_stream_call(w.mgr, w.stream, write_late, &write));
    OK(gemini_release(w.mgr, &a, 1, w.stream));
    if (how & 2) {
      a.tier = HOST;
      OK(gemini_move(w.mgr, &a, 1));
    }
    rule_t r = rule_of(&w, 1);
    r.mode[1] = GEMINI_READ;
    OK(rule_submit(&r, 0, 0, how & 1 ? GEMINI_UPDATE_LATE : 0, w.stream));
    rule_plain(&r, 0, 0);
    expect_all(&w, how & 1 ? DEVICE : HOST);
    arenas_close(&w);
    free(kept);
  }
}

static void first_to_second(void *user, const gemini_update_span_t *span) {
  (void)user;
  CHECK_EQ(span->tier, HOST);
  memcpy(span->ptr[1], span->ptr[0], span->element_count * 4);
}
/* Two tensors of one chunk, two streams: the update copies the chunk to the host for its worker. The stream that writes
 * one tensor waits for that copy; one that writes the other tensor meanwhile must wait, too. with_read: it reads
 * before. The link is busy with another chunk until the first write has ended, and half as long again.
 * Returns false if the caller came too late to see streams wait for each other. */
static bool writes_behind_copies(bool with_read) {
  enum { SIZE = WORLD_CHUNK / 2, DELAY_MS = 100 };
  gemini_config_t c = config_of(8, 8, 0);
  c.placement = GEMINI_PLACEMENT_CPU; /* the update runs on the host */
  c.sim_d2h_bytes_per_s = WORLD_CHUNK * 1000 / (DELAY_MS + DELAY_MS / 2);
  world_t w = world_open(c);
  gemini_stream_t other;
  OK(gemini_stream_create(w.mgr, &other));
  const gemini_arena_t from = world_arena(&w, GEMINI_KIND_OTHER, 4, "from", 0, 0);
  const gemini_arena_t to = world_arena(&w, GEMINI_KIND_OTHER, 4, "to", from, 0);
  const gemini_tensor_t front = world_tensor(&w, from, "front", WORLD_CHUNK);
  const gemini_tensor_t x = world_tensor(&w, from, "x", SIZE), y = world_tensor(&w, from, "y", SIZE);
  world_fill(&w, front, 0, WORLD_CHUNK, DEVICE, 3);
  gemini_access_t first = world_whole(x, GEMINI_WRITE, DEVICE), again = first;
  gemini_access_t held = world_whole(y, GEMINI_WRITE, DEVICE);
  const uint64_t begin_ns = now_ns();
  OK(gemini_acquire(w.mgr, &first, 1, w.stream));
  uint8_t bytes[2][SIZE];
  for (uint64_t i = 0; i < 2; i++) world_pattern(bytes[i], 0, SIZE, 1 + i);
  write_t writes[] = { { first.ptr, bytes[0], SIZE, DELAY_MS }, { first.ptr, bytes[1], SIZE, 0 } };
  OK(gemini_stream_call(w.mgr, w.stream, write_late, &writes[0]));
  OK(gemini_release(w.mgr, &first, 1, w.stream));
  const uint32_t modes[] = { GEMINI_READ, GEMINI_WRITE };
  const gemini_arena_t arenas[] = { from, to };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 2;
  u.stream = w.stream;
  u.fn = first_to_second;
  OK(gemini_update(w.mgr, &u));
  gemini_access_t reads[] = { world_whole(front, GEMINI_READ, DEVICE), world_whole(x, GEMINI_READ, DEVICE) };
  OK(gemini_acquire(w.mgr, &reads[0], 1, other)); /* for which it is copied first */
  OK(gemini_release(w.mgr, &reads[0], 1, other));
  OK(gemini_acquire(w.mgr, &held, 1, other));
  if (with_read) {
    OK(gemini_acquire(w.mgr, &reads[1], 1, w.stream));
    OK(gemini_release(w.mgr, &reads[1], 1, w.stream));
  }
  OK(gemini_acquire(w.mgr, &again, 1, w.stream));
  OK(gemini_stream_call(w.mgr, w.stream, write_late, &writes[1]));
  const bool early = now_ns() - begin_ns < DELAY_MS * UINT64_C(1000000);
  OK(gemini_release(w.mgr, &again, 1, w.stream));
  OK(gemini_release(w.mgr, &held, 1, other));
  OK(gemini_update_wait(w.mgr));
  gemini_tensor_t copy;
  OK(gemini_tensor_counterpart(w.mgr, x, to, &copy));
  CHECK(world_holds(&w, copy, 0, SIZE, 1));
  CHECK(world_holds(&w, x, 0, SIZE, 2));
  world_close(&w);
  return early;
}
static void test_copies_for_updates_precede_writes_of_all_streams(void) {
  for (int with_read = 0; with_read < 2; with_read++) {
    bool early = false;
    for (int tries = 0; !early && tries < 6; tries++) early = writes_behind_copies(with_read);
    CHECK(early);
  }
}

/* Also work that touches none of its chunks. */
static void salt_late(void *user) {
  rule_t *r = user;
  sleep_ms(25);
  r->salt = 9;
}
static void test_update_comes_after_unrelated_work_of_its_stream(void) {
  static const uint32_t sizes[] = { 4 };
  for (int how = 0; how < 4; how++) { /* late or not, on the device or the host */
    world_t w = world_of(config_of(4, 32, 0), sizes, 1, 2 * 16384);
    rule_t r = rule_of(&w, 1);
    gemini_access_t pin = world_whole(w.arena[0], 0, DEVICE);
    if (how & 2) OK(gemini_pin(w.mgr, &pin));
    OK(gemini_stream_call(w.mgr, w.stream, salt_late, &r));
    OK(rule_submit(&r, 0, 0, how & 1 ? GEMINI_UPDATE_LATE : 0, w.stream));
    if (how & 1) OK(gemini_update_wait(w.mgr));
    CHECK_EQ(r.salt, 9);
    rule_plain(&r, 0, 0);
    CHECK_EQ(atomic_load(&r.device_spans), how & 2 ? 2 : 0);
    expect_all(&w, DEVICE);
    arenas_close(&w);
  }
}

static void test_late_updates_in_flight_keep_their_order(void) {
  static const uint32_t sizes[] = { 2, 4, 8 };
  uint64_t random = 21;
  for (int files = 0; files < 2; files++) {
    gemini_config_t c = config_of(6, files ? 24 : 80, files ? 120 : 0);
    c.update_threads = 4;
    world_t w = world_of(c, sizes, 3, 5 * 32768 + 777);
    enum { FLIGHT = 12 };
    static rule_t r[FLIGHT];
    memset(r, 0, sizeof r);
    uint64_t submitted = 0;
    for (int k = 0; k < FLIGHT; k++) {
      r[k] = rule_of(&w, (uint64_t)k);
      r[k].delay_ms = k % 3;
      if (k % 4 == 1) r[k].mode[2] = GEMINI_READ;
      if (k % 4 == 2) r[k].mode[0] = GEMINI_WRITE;
      uint64_t first = check_random(&random) % (w.elements / 2), count = w.elements / 2;
      if (k % 5 == 0) first = count = 0;
      OK(rule_submit(&r[k], first, count, GEMINI_UPDATE_LATE, k % 2 ? w.stream : GEMINI_STREAM_CALLER));
      rule_plain(&r[k], first, count);
      if (k == 6) expect_arena(&w, 1, HOST); /* a use in the middle */
    }
    OK(gemini_update_wait(w.mgr));
    for (int k = 0; k < FLIGHT; k++) {
      CHECK_EQ(atomic_load(&r[k].done), atomic_load(&r[k].spans));
      CHECK_EQ(atomic_load(&r[k].wrong), 0);
      submitted += atomic_load(&r[k].spans);
    }
    CHECK(submitted >= FLIGHT * 3);
    CHECK_EQ(world_stats(&w).pending_updates, 0);
    expect_all(&w, DEVICE);
    arenas_close(&w);
  }
}

/* What the trace has as the time of its first op. */
static uint64_t first_op_ns(gemini_manager_t mgr, const char *path) {
  OK(gemini_trace_save(mgr, path));
  FILE *file = fopen(path, "r");
  CHECK(file);
  char line[4096];
  uint64_t ns = 0;
  while (!ns && fgets(line, sizeof line, file)) sscanf(line, "op %*u %" SCNu64, &ns);
  fclose(file);
  unlink(path);
  CHECK(ns > 0);
  return ns;
}

/* The last of many updates that wait for room on the host is wanted: nothing else can be queued meanwhile. That is not
 * the operator's work, and the planner, which foresees such waits itself, must not be told so. */
static void test_waiting_for_updates_that_are_not_queued_is_a_stall(void) {
  static const uint32_t sizes[] = { 4, 4 };
  for (int on_caller = 0; on_caller < 2; on_caller++) {
    gemini_config_t c = config_of(6, 12, 80);
    c.update_threads = 1;
    world_t w = world_of(c, sizes, 2, 32 * 16384);
    rule_t r = rule_of(&w, 3);
    r.delay_ms = 5;
    gemini_stream_t stream = on_caller ? GEMINI_STREAM_CALLER : w.stream;
    OK(gemini_iteration_begin(w.mgr));
    OK(rule_submit(&r, 0, 0, GEMINI_UPDATE_LATE, stream));
    rule_plain(&r, 0, 0);
    gemini_access_t last = world_part(w.arena[0], 31 * CHUNK, CHUNK, GEMINI_READ, DEVICE);
    OK(gemini_op_begin(w.mgr, "op", stream));
    uint64_t begin_ns = now_ns();
    OK(gemini_acquire(w.mgr, &last, 1, stream));
    uint64_t waited_ns = now_ns() - begin_ns, before_ns = world_stats(&w).stall_ns;
    OK(gemini_release(w.mgr, &last, 1, stream));
    OK(gemini_op_end(w.mgr));
    OK(gemini_stream_synchronize(w.mgr, w.stream));
    OK(gemini_iteration_end(w.mgr));
    CHECK(waited_ns > 50 * 1000000u); /* 20 pieces and more ended meanwhile */
    CHECK(world_stats(&w).stall_ns - before_ns > waited_ns / 10 * 9);
    char path[sizeof w.dir + 8];
    snprintf(path, sizeof path, "%s/trace", w.dir);
    CHECK(first_op_ns(w.mgr, path) < waited_ns / 2);
    OK(gemini_update_wait(w.mgr));
    expect_all(&w, HOST);
    arenas_close(&w);
  }
}

/* ---- the order of what piles up */
enum { BLOCKS = 80 };
typedef struct {
  _Atomic int held; /* whoever comes waits until it is 0 */
  int count, other;
  uint64_t blocks[BLOCKS];
} pile_t;
static void pile_span(void *user, const gemini_update_span_t *span) { /* one worker: one at a time */
  pile_t *p = user;
  if (span->tier != HOST || p->count == BLOCKS) p->other++;
  else p->blocks[p->count++] = span->first_element / (CHUNK / 4);
  while (atomic_load(&p->held)) sleep_ms(1);
}
/* Operators 0, 1, ... forward and ... 1, 0 backward, each of whose updates is submitted behind it. */
static void test_updates_that_pile_up_are_done_as_operators_want_them(void) {
  static const uint32_t kinds[] = { GEMINI_KIND_PARAM, GEMINI_KIND_MASTER },
                        modes[] = { GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  gemini_config_t c = config_of(12, 2 * BLOCKS + 8, 0);
  c.placement = GEMINI_PLACEMENT_CPU;
  c.update_threads = 1;
  world_t w = world_open(c);
  for (uint32_t i = 0; i < 2; i++) {
    gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
    a.kind = kinds[i];
    a.element_bytes = 4;
    a.like = i ? w.arena[0] : 0;
    a.capacity_bytes = (BLOCKS + 1) * CHUNK;
    OK(gemini_arena_create(w.mgr, &a, &w.arena[i]));
  }
  uint64_t at;
  OK(gemini_arena_take(w.mgr, w.arena[0], (BLOCKS + 1) * CHUNK, &at));
  for (int step = 0; step < 6; step++) {
    pile_t pile = { 0 };
    bool planned = world_stats(&w).planned_iterations > 0;
    atomic_store(&pile.held, planned);
    OK(gemini_iteration_begin(w.mgr));
    for (int i = 0; i < 2 * BLOCKS; i++) {
      bool backward = i >= BLOCKS;
      uint64_t block = (uint64_t)(backward ? 2 * BLOCKS - 1 - i : i);
      char name[32];
      snprintf(name, sizeof name, "block %d%s", (int)block, backward ? " backward" : "");
      gemini_access_t a =
          world_part(w.arena[0], block * CHUNK, CHUNK, backward ? GEMINI_READ_WRITE : GEMINI_READ, DEVICE);
      OK(gemini_op_begin(w.mgr, name, w.stream));
      OK(gemini_acquire(w.mgr, &a, 1, w.stream));
      OK(gemini_release(w.mgr, &a, 1, w.stream));
      OK(gemini_op_end(w.mgr));
      if (!backward) continue;
      gemini_update_t u = GEMINI_UPDATE_INIT;
      u.flags = GEMINI_UPDATE_LATE;
      u.arenas = w.arena;
      u.modes = modes;
      u.arena_count = 2;
      u.first_element = block * (CHUNK / 4);
      u.element_count = CHUNK / 4;
      u.stream = w.stream;
      u.fn = pile_span;
      u.user = &pile;
      OK(gemini_update(w.mgr, &u));
    }
    OK(gemini_iteration_end(w.mgr));
    gemini_access_t last = world_part(w.arena[0], BLOCKS * CHUNK, CHUNK, GEMINI_WRITE, DEVICE);
    OK(gemini_acquire(w.mgr, &last, 1, w.stream)); /* its copy to the host comes behind those that updates wait for */
    OK(gemini_release(w.mgr, &last, 1, w.stream));
    last = world_part(w.arena[0], BLOCKS * CHUNK, CHUNK, GEMINI_READ, HOST);
    OK(gemini_acquire(w.mgr, &last, 1, GEMINI_STREAM_CALLER));
    OK(gemini_release(w.mgr, &last, 1, GEMINI_STREAM_CALLER));
    sleep_ms(1); /* what came since the worker looked is seen a while later only */
    atomic_store(&pile.held, 0);
    OK(gemini_update_wait(w.mgr));
    CHECK_EQ(pile.count, BLOCKS);
    CHECK_EQ(pile.other, 0);
    if (!planned) continue;
    for (uint64_t i = 1; i < BLOCKS; i++) /* after the one that was held up */
      CHECK_EQ(pile.blocks[i], i - (i <= pile.blocks[0]));
  }
  CHECK(world_stats(&w).planned_iterations > 1);
  arenas_close(&w);
}

static void test_spans_on_the_device_are_pending_until_they_are_done(void) {
  static const uint32_t sizes[] = { 4 };
  world_t w = world_of(config_of(6, 16, 0), sizes, 1, 4 * 16384);
  rule_t r = rule_of(&w, 1);
  r.delay_ms = 20;
  gemini_access_t pin = world_whole(w.arena[0], 0, DEVICE);
  OK(gemini_pin(w.mgr, &pin));
  OK(rule_submit(&r, 0, 0, GEMINI_UPDATE_LATE, w.stream));
  CHECK_EQ(world_stats(&w).pending_updates, 1);
  OK(gemini_update_wait(w.mgr));
  CHECK_EQ(atomic_load(&r.device_spans), 4);
  CHECK_EQ(world_stats(&w).pending_updates, 0);
  arenas_close(&w);
}

static void test_update_wait_and_close_finish_what_is_pending(void) {
  static const uint32_t sizes[] = { 4 };
  for (int how = 0; how < 3; how++) {
    world_t w = world_of(config_of(4, 16, 0), sizes, 1, 4 * 16384);
    rule_t r = rule_of(&w, 1);
    r.delay_ms = 10;
    OK(gemini_update_wait(w.mgr)); /* nothing pending */
    gemini_access_t pin = world_part(w.arena[0], 0, CHUNK, 0, DEVICE);
    if (how == 2) OK(gemini_pin(w.mgr, &pin)); /* one span on the device */
    OK(rule_submit(&r, 0, 0, GEMINI_UPDATE_LATE, w.stream));
    if (how) {
      OK(gemini_update_wait(w.mgr));
      CHECK_EQ(atomic_load(&r.done), 4);
      CHECK_EQ(world_stats(&w).pending_updates, 0);
    }
    arenas_close(&w);
    CHECK_EQ(atomic_load(&r.done), 4);
    CHECK_EQ(atomic_load(&r.device_spans), how == 2);
  }
  world_t w = world_of(config_of(4, 16, 0), sizes, 1, 4 * 16384);
  rule_t r = rule_of(&w, 1);
  r.delay_ms = 10;
  OK(rule_submit(&r, 0, 0, GEMINI_UPDATE_LATE, w.stream));
  OK(gemini_arena_destroy(w.mgr, w.arena[0]));
  CHECK_EQ(atomic_load(&r.done), 4);
  arenas_close(&w);
}

/* ---- states */
static uint32_t state_of(world_t *w, gemini_tensor_t t) {
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  OK(gemini_tensor_info(w->mgr, t, &info));
  return info.state;
}

static void test_update_puts_written_tensors_to_hold(void) {
  static const uint32_t sizes[] = { 4, 4 };
  world_t w = world_of(config_of(8, 32, 0), sizes, 2, 3 * 16384);
  gemini_tensor_t t[3], other[3];
  for (int i = 0; i < 3; i++) {
    char name[32];
    snprintf(name, sizeof name, "t.%d", i);
    OK(gemini_tensor_register(w.mgr, w.arena[0], name, CHUNK, (uint64_t)i * CHUNK, &t[i]));
    OK(gemini_tensor_counterpart(w.mgr, t[i], w.arena[1], &other[i]));
  }
  OK(gemini_phase_set(w.mgr, GEMINI_PHASE_BACKWARD));
  for (int i = 0; i < 3; i++) {
    gemini_access_t both[2] = { world_whole(t[i], GEMINI_READ, DEVICE), world_whole(other[i], GEMINI_READ, DEVICE) };
    OK(gemini_acquire(w.mgr, both, 2, w.stream));
    OK(gemini_release(w.mgr, both, 2, w.stream));
    CHECK_EQ(state_of(&w, t[i]), GEMINI_STATE_HOLD_AFTER_BWD);
  }
  OK(gemini_phase_set(w.mgr, GEMINI_PHASE_NONE));
  OK(gemini_tensor_state_set(w.mgr, other[0], GEMINI_STATE_READY_FOR_REDUCE));
  OK(gemini_tensor_state_set(w.mgr, t[0], GEMINI_STATE_READY_FOR_REDUCE));
  rule_t r = rule_of(&w, 1);
  r.mode[1] = GEMINI_READ;
  OK(rule_submit(&r, 0, 2 * 16384, 0, w.stream)); /* not the third one */
  CHECK_EQ(state_of(&w, t[0]), GEMINI_STATE_HOLD);
  CHECK_EQ(state_of(&w, t[1]), GEMINI_STATE_HOLD);
  CHECK_EQ(state_of(&w, t[2]), GEMINI_STATE_HOLD_AFTER_BWD);
  CHECK_EQ(state_of(&w, other[0]), GEMINI_STATE_READY_FOR_REDUCE); /* only read */
  OK(rule_submit(&r, 2 * 16384 + 100, 10, 0, w.stream));           /* a part, from its middle on */
  CHECK_EQ(state_of(&w, t[2]), GEMINI_STATE_HOLD);
  arenas_close(&w);
}

/* ---- refusals change nothing */
static void test_update_of_a_range_in_use_is_busy(void) {
  static const uint32_t sizes[] = { 4, 8 };
  world_t w = world_of(config_of(8, 64, 0), sizes, 2, 6 * 16384);
  for (int how = 0; how < 4; how++) {
    gemini_access_t a = world_part(w.arena[1], 11 * CHUNK + 100, 8, how % 2 ? GEMINI_READ : GEMINI_READ_WRITE,
                                   how < 2 ? DEVICE : HOST); /* in the last span */
    OK(gemini_acquire(w.mgr, &a, 1, w.stream));
    OK(gemini_stream_synchronize(w.mgr, w.stream));
    rule_t r = rule_of(&w, 1);
    CHECK_EQ(rule_submit(&r, 0, 0, how % 2 ? GEMINI_UPDATE_LATE : 0, w.stream), GEMINI_ERR_BUSY);
    OK(gemini_update_wait(w.mgr));
    CHECK_EQ(atomic_load(&r.spans), 0);
    rule_t before = rule_of(&w, 2);
    OK(rule_submit(&before, 0, 5 * 16384, 0, w.stream)); /* beside it there is no harm */
    rule_plain(&before, 0, 5 * 16384);
    OK(gemini_release(w.mgr, &a, 1, w.stream));
    expect_all(&w, how % 2 ? HOST : DEVICE);
  }
  arenas_close(&w);
}

static void test_update_without_room_on_the_host_is_oom_host(void) {
  static const uint32_t sizes[] = { 4, 4 };
  gemini_config_t c = config_of(8, 8, 0);
  c.placement = GEMINI_PLACEMENT_CPU;           /* with auto the device counts, too: integration/test_home */
  world_t w = world_of(c, sizes, 2, 4 * 16384); /* eight chunks in all */
  gemini_access_t a = world_part(w.arena[0], 0, 4 * CHUNK, GEMINI_READ, DEVICE);
  OK(gemini_move(w.mgr, &a, 1));
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  a.mode = GEMINI_READ_WRITE;
  OK(gemini_acquire(w.mgr, &a, 1, w.stream)); /* written: the host copies are stale */
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  a.mode = GEMINI_READ;
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  OK(gemini_budget_set(w.mgr, HOST, 5 * CHUNK)); /* the four of the other arena, and one */
  for (int late = 0; late < 2; late++) {
    rule_t r = rule_of(&w, 1);
    CHECK_EQ(rule_submit(&r, 0, 0, late ? GEMINI_UPDATE_LATE : 0, w.stream), GEMINI_ERR_OOM_HOST);
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    OK(gemini_last_error(&info));
    CHECK(!strcmp(info.operation, "gemini_update") && strstr(info.message, "327680"));
    OK(gemini_update_wait(w.mgr));
    CHECK_EQ(atomic_load(&r.spans), 0);
  }
  expect_all(&w, DEVICE);
  OK(gemini_budget_set(w.mgr, HOST, 8 * CHUNK));
  rule_t r = rule_of(&w, 1);
  OK(rule_submit(&r, 0, 0, 0, w.stream));
  rule_plain(&r, 0, 0);
  expect_all(&w, DEVICE);
  arenas_close(&w);
}

/* A host copy that the update itself will need is no room for it. */
static void test_update_does_not_count_its_own_copies_as_room(void) {
  static const uint32_t sizes[] = { 4 };
  gemini_config_t c = config_of(4, 2, 0);
  c.placement = GEMINI_PLACEMENT_CPU;
  world_t w = world_of(c, sizes, 1, 2 * 16384);
  gemini_access_t second = world_part(w.arena[0], CHUNK, CHUNK, GEMINI_READ_WRITE, DEVICE);
  OK(gemini_acquire(w.mgr, &second, 1, w.stream)); /* only on the device */
  OK(gemini_release(w.mgr, &second, 1, w.stream));
  gemini_access_t first = world_part(w.arena[0], 0, CHUNK, 0, DEVICE);
  OK(gemini_move(w.mgr, &first, 1)); /* on both */
  OK(gemini_budget_set(w.mgr, HOST, CHUNK));
  rule_t r = rule_of(&w, 1);
  gemini_status_t status = rule_submit(&r, 0, 0, 0, w.stream);
  CHECK_EQ(status, GEMINI_ERR_OOM_HOST);
  CHECK_EQ(atomic_load(&r.spans), 0); /* nothing changed */
  expect_all(&w, DEVICE);
  arenas_close(&w);
}

static void test_update_bad_arguments_are_refused(void) {
  static const uint32_t sizes[] = { 4, 4 };
  world_t w = world_of(config_of(8, 64, 0), sizes, 2, 16384);
  world_t foreign = world_of(config_of(8, 64, 0), sizes, 2, 16384);
  rule_t r = rule_of(&w, 1);
  CHECK_EQ(rule_submit(&r, 0, 16385, 0, w.stream), GEMINI_ERR_INVALID);
  CHECK_EQ(rule_submit(&r, 16384, 1, 0, w.stream), GEMINI_ERR_INVALID);
  CHECK_EQ(rule_submit(&r, 1, UINT64_MAX, 0, w.stream), GEMINI_ERR_INVALID);
  CHECK_EQ(rule_submit(&r, 0, 0, 8, w.stream), GEMINI_ERR_INVALID);
  CHECK_EQ(rule_submit(&r, 0, 0, 0, foreign.stream), GEMINI_ERR_HANDLE);
  CHECK_EQ(rule_submit(&r, 16384, 0, 0, w.stream), GEMINI_ERR_INVALID);
  r.index[1] = 0;
  CHECK_EQ(rule_submit(&r, 0, 0, 0, w.stream), GEMINI_ERR_INVALID); /* named twice */
  r.index[1] = 1;
  r.mode[1] = 0;
  CHECK_EQ(rule_submit(&r, 0, 0, 0, w.stream), GEMINI_ERR_INVALID);
  r.mode[1] = 4;
  CHECK_EQ(rule_submit(&r, 0, 0, 0, w.stream), GEMINI_ERR_INVALID);
  r.mode[1] = 1;
  r.count = 0;
  CHECK_EQ(rule_submit(&r, 0, 0, 0, w.stream), GEMINI_ERR_INVALID);
  r.count = 2;
  gemini_arena_t kept = w.arena[1];
  w.arena[1] = foreign.arena[1];
  CHECK_EQ(rule_submit(&r, 0, 0, 0, w.stream), GEMINI_ERR_HANDLE);
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.element_bytes = 4;
  c.capacity_bytes = CHUNK;
  OK(gemini_arena_create(w.mgr, &c, &w.arena[1])); /* not like the first */
  CHECK_EQ(rule_submit(&r, 0, 0, 0, w.stream), GEMINI_ERR_INVALID);
  w.arena[1] = kept;
  CHECK_EQ(atomic_load(&r.spans), 0);
  expect_all(&w, HOST);
  arenas_close(&w);
  arenas_close(&foreign);
}

/* ---- gradients that reuse their parameters' bytes: parameter -= gradient, sums keep count */
typedef struct {
  gemini_manager_t mgr;
  gemini_stream_t stream;
  gemini_arena_t params, grads, sums; /* elements: 4 bytes, 4, 8 */
  gemini_tensor_t param[4], grad[4];
} model_t;
enum { MODEL_ELEMENTS = 20000 }; /* of each of four tensors */

static model_t model_open(uint64_t device_chunks) {
  model_t m;
  gemini_config_t c = config_of(device_chunks, 64, 0);
  OK(gemini_manager_open(&c, &m.mgr));
  OK(gemini_stream_create(m.mgr, &m.stream));
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  a.capacity_bytes = 1 << 20;
  a.element_bytes = 4;
  OK(gemini_arena_create(m.mgr, &a, &m.params));
  a.kind = GEMINI_KIND_GRAD;
  a.reuse = m.params;
  OK(gemini_arena_create(m.mgr, &a, &m.grads));
  a.kind = GEMINI_KIND_MASTER;
  a.reuse = 0;
  a.like = m.params;
  a.element_bytes = 8;
  a.capacity_bytes = 2 << 20;
  OK(gemini_arena_create(m.mgr, &a, &m.sums));
  for (int i = 0; i < 4; i++) {
    char name[32];
    snprintf(name, sizeof name, "p.%d", i);
    OK(gemini_tensor_register(m.mgr, m.params, name, MODEL_ELEMENTS * 4, GEMINI_OFFSET_NEXT, &m.param[i]));
    OK(gemini_tensor_counterpart(m.mgr, m.param[i], m.grads, &m.grad[i]));
  }
  return m;
}

static void tensor_put(model_t *m, gemini_tensor_t t, uint32_t tier, uint32_t value) {
  gemini_access_t a = world_whole(t, GEMINI_WRITE, tier);
  OK(gemini_acquire(m->mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint32_t e = 0; e < MODEL_ELEMENTS; e++) ((uint32_t *)a.ptr)[e] = value + e;
  OK(gemini_release(m->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
/* Every element is value + slope * its number. */
static void tensor_expect(model_t *m, gemini_tensor_t t, uint32_t tier, uint32_t value, uint32_t slope) {
  gemini_access_t a = world_whole(t, GEMINI_READ, tier);
  OK(gemini_acquire(m->mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint32_t e = 0; e < MODEL_ELEMENTS; e++) CHECK_EQ(((uint32_t *)a.ptr)[e], value + slope * e);
  OK(gemini_release(m->mgr, &a, 1, GEMINI_STREAM_CALLER));
}

/* sums += gradient; parameter = low half of sums. */
static void descend(const gemini_update_span_t *span) {
  const uint32_t *grad = span->ptr[0];
  uint64_t *sum = span->ptr[1];
  uint32_t *param = span->ptr[2];
  for (uint64_t e = 0; e < span->element_count; e++) {
    sum[e] += grad[e];
    if (span->arena_count > 2) param[e] = (uint32_t)sum[e];
  }
}
static void descend_queued(void *user) {
  descend(user);
  free(user);
}
static void descend_span(void *user, const gemini_update_span_t *span) {
  model_t *m = user;
  gemini_update_span_t *copy = malloc(sizeof *copy);
  if (!copy) return; /* the results tell */
  *copy = *span;
  if (span->tier == HOST) descend_queued(copy);
  else if (gemini_stream_call(m->mgr, span->stream, descend_queued, copy)) free(copy);
}
static gemini_status_t model_update(model_t *m, uint64_t first, uint64_t count, uint32_t arenas, uint32_t flags) {
  gemini_arena_t arena[3] = { m->grads, m->sums, m->params };
  uint32_t mode[3] = { GEMINI_READ, GEMINI_READ_WRITE, GEMINI_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = arena;
  u.modes = mode;
  u.arena_count = arenas;
  u.first_element = first;
  u.element_count = count;
  u.stream = m->stream;
  u.flags = flags;
  u.fn = descend_span;
  u.user = m;
  return gemini_update(m->mgr, &u);
}

static gemini_status_t tensor_read(model_t *m, gemini_tensor_t t, uint32_t tier) {
  gemini_access_t a = world_whole(t, GEMINI_READ, tier);
  gemini_status_t status = gemini_acquire(m->mgr, &a, 1, GEMINI_STREAM_CALLER);
  if (!status) OK(gemini_release(m->mgr, &a, 1, GEMINI_STREAM_CALLER));
  return status;
}

static void test_unwritten_gradients_count_as_zero(void) {
  for (int how = 0; how < 6; how++) { /* late or not; gradients on device, host; part of the work on the device */
    model_t m = model_open(how < 4 ? 8 : 24);
    uint32_t sum[4] = { 0 }, slope[4] = { 0 };
    gemini_access_t pin = world_part(m.params, 0, 2 * CHUNK, 0, DEVICE);
    if (how >= 4) OK(gemini_pin(m.mgr, &pin));
    for (uint32_t round = 0; round < 4; round++) {
      for (uint32_t i = 0; i < 4; i++) {
        if ((round + i) % 3 == 0) continue; /* nobody writes this one */
        tensor_put(&m, m.grad[i], how & 2 && how < 4 ? HOST : DEVICE, 1000 * round + i);
        sum[i] += 1000 * round + i, slope[i]++;
        CHECK_EQ(tensor_read(&m, m.param[i], DEVICE), GEMINI_ERR_STATE);
        CHECK_EQ(tensor_read(&m, m.param[i], HOST), GEMINI_ERR_STATE);
        CHECK_EQ(tensor_read(&m, m.grad[i], HOST), GEMINI_OK);
      }
      for (uint32_t i = 0; i < 4; i++)
        if ((round + i) % 3 == 0) CHECK_EQ(tensor_read(&m, m.grad[i], HOST), GEMINI_ERR_STATE);
      OK(model_update(&m, 0, 0, 3, how & 1 ? GEMINI_UPDATE_LATE : 0));
      for (uint32_t i = 0; i < 4; i++) {
        tensor_expect(&m, m.param[i], (round + i) % 2 ? DEVICE : how < 4 ? HOST : DEVICE, sum[i], slope[i]);
        CHECK_EQ(tensor_read(&m, m.grad[i], DEVICE), GEMINI_ERR_STATE);
      }
    }
    OK(gemini_manager_close(m.mgr));
  }
}

static void test_norm_of_unwritten_gradients_counts_zero(void) {
  model_t m = model_open(16);
  gemini_access_t all = world_whole(m.grads, 0, 0);
  double norm = -1;
  for (int i = 0; i < 4; i++) tensor_put(&m, m.param[i], DEVICE, 77);
  OK(gemini_norm(m.mgr, &all, GEMINI_DTYPE_F32, m.stream, &norm));
  CHECK(norm == 0);
  gemini_access_t a = world_whole(m.grad[2], GEMINI_WRITE, DEVICE);
  OK(gemini_acquire(m.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (int e = 0; e < MODEL_ELEMENTS; e++) ((float *)a.ptr)[e] = e < 2 ? 3.0f + (float)e : 0;
  OK(gemini_release(m.mgr, &a, 1, GEMINI_STREAM_CALLER));
  OK(gemini_norm(m.mgr, &all, GEMINI_DTYPE_F32, m.stream, &norm));
  CHECK(norm == 5);
  tensor_expect(&m, m.param[1], DEVICE, 77, 1); /* and nothing was changed by it */
  OK(gemini_manager_close(m.mgr));
}

/* A gradient zeroed by the caller is given up; the parameter comes back by being written only. */
static void test_zeroed_gradient_is_a_zero_gradient(void) {
  model_t m = model_open(16);
  for (uint32_t i = 0; i < 4; i++) tensor_put(&m, m.grad[i], DEVICE, 5 * i);
  OK(model_update(&m, 0, 0, 3, 0));
  tensor_put(&m, m.grad[1], DEVICE, 9);
  gemini_access_t all = world_whole(m.grads, 0, 0);
  OK(gemini_zero(m.mgr, &all)); /* zeroes what is a gradient, and no parameter */
  tensor_expect(&m, m.param[0], DEVICE, 0, 1);
  tensor_expect(&m, m.grad[1], DEVICE, 0, 0);
  OK(model_update(&m, 0, 0, 3, 0));
  for (uint32_t i = 0; i < 4; i++) tensor_expect(&m, m.param[i], HOST, 5 * i, 1);
  OK(gemini_manager_close(m.mgr));
}

static uint64_t element_of(model_t *m, int tensor) {
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  OK(gemini_tensor_info(m->mgr, m->param[tensor], &info));
  return info.offset_bytes / 4;
}

/* An update done in parts is the update, wherever the parts meet; where they may not meet it is refused. */
static void test_reusing_update_in_parts_equals_the_whole(void) {
  for (int inside = 0; inside < 2; inside++) {
    model_t m = model_open(16);
    for (uint32_t i = 0; i < 3; i++) tensor_put(&m, m.grad[i], DEVICE, 100 * i + 1); /* not the last */
    uint64_t end = element_of(&m, 3) + MODEL_ELEMENTS, cut = element_of(&m, 1) + (inside ? 7777 : 0);
    gemini_status_t status = model_update(&m, 0, cut, 3, 0);
    CHECK(!status || (inside && (status == GEMINI_ERR_STATE || status == GEMINI_ERR_INVALID)));
    if (status) {
      for (uint32_t i = 0; i < 3; i++) tensor_expect(&m, m.grad[i], HOST, 100 * i + 1, 1);
      OK(model_update(&m, 0, end, 3, 0));
    } else {
      OK(model_update(&m, cut, end - cut, 3, GEMINI_UPDATE_LATE));
    }
    for (uint32_t i = 0; i < 3; i++) tensor_expect(&m, m.param[i], DEVICE, 100 * i + 1, 1);
    tensor_expect(&m, m.param[3], DEVICE, 0, 0);
    OK(gemini_manager_close(m.mgr));
  }
}

/* An update that reads gradients and leaves the parameters alone leaves them alone: it is refused while a parameter
 * would have to give its bytes for a zero gradient. */
static void test_reading_gradients_only_keeps_parameters(void) {
  model_t m = model_open(16);
  for (uint32_t i = 0; i < 4; i++) tensor_put(&m, m.param[i], i % 2 ? HOST : DEVICE, 10 * i);
  tensor_put(&m, m.grad[2], DEVICE, 3);
  CHECK_EQ(model_update(&m, 0, 0, 2, 0), GEMINI_ERR_STATE);
  for (uint32_t i = 0; i < 4; i++)
    if (i != 2) tensor_expect(&m, m.param[i], DEVICE, 10 * i, 1);
  tensor_expect(&m, m.grad[2], HOST, 3, 1);
  gemini_access_t sums = world_whole(m.sums, 0, 0);
  double norm = -1;
  OK(gemini_norm(m.mgr, &sums, GEMINI_DTYPE_F64, m.stream, &norm));
  CHECK(norm == 0);                                              /* no span has run */
  OK(model_update(&m, element_of(&m, 2), MODEL_ELEMENTS, 2, 0)); /* where all gradients are written it may */
  tensor_expect(&m, m.grad[2], DEVICE, 3, 1);                    /* they stay gradients */
  CHECK_EQ(tensor_read(&m, m.param[2], DEVICE), GEMINI_ERR_STATE);
  OK(model_update(&m, 0, 0, 3, 0));
  tensor_expect(&m, m.param[2], DEVICE, 6, 2); /* counted twice */
  OK(gemini_manager_close(m.mgr));
}

/* Tensors that overlap hold the same: what one's gradient has taken is no parameter for another one, and an update does
 * not take it for a gradient that was not written. */
static void test_gradients_of_tied_tensors_are_those_of_all(void) {
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    model_t m = model_open(16);
    const uint64_t at = element_of(&m, 2) * 4, size = MODEL_ELEMENTS * 4;
    gemini_tensor_t tied, half, late, tied_grad, half_grad;
    OK(gemini_tensor_register(m.mgr, m.params, "tied", size, at, &tied));
    OK(gemini_tensor_register(m.mgr, m.params, "half", size / 2, at, &half));
    OK(gemini_tensor_counterpart(m.mgr, tied, m.grads, &tied_grad));
    OK(gemini_tensor_counterpart(m.mgr, half, m.grads, &half_grad));
    for (uint32_t i = 0; i < 4; i++) tensor_put(&m, m.param[i], DEVICE, 100 * i);
    CHECK_EQ(tensor_read(&m, tied, DEVICE), GEMINI_OK); /* what the fast path would find */
    tensor_put(&m, tied_grad, tier, 7);
    CHECK_EQ(tensor_read(&m, tied, tier), GEMINI_ERR_STATE);
    CHECK_EQ(tensor_read(&m, m.param[2], tier), GEMINI_ERR_STATE);
    CHECK_EQ(tensor_read(&m, half, tier), GEMINI_ERR_STATE);
    tensor_expect(&m, m.grad[2], DEVICE, 7, 1);
    CHECK_EQ(tensor_read(&m, half_grad, HOST), GEMINI_OK);
    /* A new tensor is what the bytes hold; there is none of half a gradient. */
    OK(gemini_tensor_register(m.mgr, m.params, "late", 512, at + 512, &late));
    CHECK_EQ(tensor_read(&m, late, DEVICE), GEMINI_ERR_STATE);
    CHECK_STATUS(gemini_tensor_register(m.mgr, m.params, "part", size, at + 1024, &late), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, "which its gradient has taken");
    OK(model_update(&m, 0, 0, 3, 0));
    tensor_expect(&m, m.param[2], tier, 7, 1);
    tensor_expect(&m, tied, tier, 7, 1);
    CHECK_EQ(tensor_read(&m, half, tier), GEMINI_OK);
    gemini_access_t part = world_whole(half_grad, GEMINI_WRITE, tier); /* the rest would stay a parameter */
    CHECK_STATUS(gemini_acquire(m.mgr, &part, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
    OK(gemini_manager_close(m.mgr));
  }
}

int main(void) {
  RUN(test_update_of_any_arenas_equals_a_plain_loop);
  RUN(test_update_on_the_device_equals_the_host);
  RUN(test_update_through_files_equals_a_plain_loop);
  RUN(test_update_where_files_are_almost_full);
  RUN(test_late_update_is_done_before_the_next_use);
  RUN(test_copies_for_updates_precede_writes_of_all_streams);
  RUN(test_update_comes_after_its_streams_work);
  RUN(test_update_comes_after_unrelated_work_of_its_stream);
  RUN(test_late_updates_in_flight_keep_their_order);
  RUN(test_waiting_for_updates_that_are_not_queued_is_a_stall);
  RUN(test_updates_that_pile_up_are_done_as_operators_want_them);
  RUN(test_spans_on_the_device_are_pending_until_they_are_done);
  RUN(test_update_wait_and_close_finish_what_is_pending);
  RUN(test_update_puts_written_tensors_to_hold);
  RUN(test_update_of_a_range_in_use_is_busy);
  RUN(test_update_without_room_on_the_host_is_oom_host);
  RUN(test_update_bad_arguments_are_refused);
  RUN(test_unwritten_gradients_count_as_zero);
  RUN(test_norm_of_unwritten_gradients_counts_zero);
  RUN(test_zeroed_gradient_is_a_zero_gradient);
  RUN(test_update_does_not_count_its_own_copies_as_room);
  RUN(test_reusing_update_in_parts_equals_the_whole);
  RUN(test_reading_gradients_only_keeps_parameters);
  RUN(test_gradients_of_tied_tensors_are_those_of_all);
  return check_done();
}
