/* Updates that are speculated: to the bit what the update alone leaves, whatever happens between the two, and nothing to
 * be seen before it. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "world.h"

#define OK(call) CHECK_OK(call)
#define CHUNK WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST };
enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ARENAS };
enum { UNIT = 32768, UNITS = 4, ELEMENTS = 3 * UNIT + 5120 }; /* the last unit is short */
static const uint32_t sizes[ARENAS] = { 2, 2, 4, 4, 4 };
static const uint32_t kinds[ARENAS] = { GEMINI_KIND_PARAM, GEMINI_KIND_GRAD, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM,
                                        GEMINI_KIND_VARIANCE };
static const uint32_t modes[ARENAS] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                        GEMINI_READ_WRITE };
/* Slots of all chunks, and of the new values of all units. */
enum { OWN = UNITS * 2 + 3 * (UNITS * 2 - 1), NEW = OWN - UNITS };

typedef struct {
  world_t w;
  gemini_arena_t arena[ARENAS];
  uint8_t *plain[ARENAS]; /* what the arenas should hold */
} model_t;

OWN_MEMORY static inline uint64_t mix(uint64_t x) {
  x *= UINT64_C(0x9e3779b97f4a7c15);
  return x ^ x >> 31;
}
/* In memory of the caller's own. Bytes are copied by loops: sanitizers check memcpy() wherever it is called. */
OWN_MEMORY static void element(uint64_t salt, uint64_t e, const uint8_t *const *in, uint8_t *const *out, uint64_t i,
                               uint64_t o) {
  uint64_t x = mix(salt + e);
  for (int k = GRAD; k < ARENAS; k++) {
    uint64_t part = 0;
    for (uint32_t b = 0; b < sizes[k]; b++) ((uint8_t *)&part)[b] = in[k][i * sizes[k] + b];
    x = mix(x ^ part);
  }
  for (int k = 0; k < ARENAS; k++) {
    if (k == GRAD) continue;
    const uint64_t part = mix(x + (uint64_t)k);
    for (uint32_t b = 0; b < sizes[k]; b++) out[k][o * sizes[k] + b] = ((const uint8_t *)&part)[b];
  }
}
OWN_MEMORY static void elements(uint64_t salt, uint64_t first, uint64_t count, const uint8_t *const *in,
                                uint8_t *const *out, uint64_t at) {
  for (uint64_t i = 0; i < count; i++) element(salt, first + i, in, out, at + i, at + i);
}

/* ---- the function of the updates */
typedef struct {
  gemini_manager_t mgr;
  uint64_t salt;
  uint32_t delay_us, host_us; /* of a span, and more of one on the host */
  bool fills;                 /* parameters become the salt and states stay, which takes no time */
  bool fails;
} rule_t;
static _Atomic uint64_t elements_run, spans_begun, spans_on_device;
static _Atomic bool gate; /* spans with a salt of 13 wait until it is open */

static void run_span(const rule_t *r, const gemini_update_span_t *s) {
  const uint8_t *in[ARENAS];
  uint8_t *out[ARENAS];
  CHECK(s->struct_size == sizeof *s);
  if (r->fills) {
    memset(s->out[PARAM], (int)r->salt, s->element_count * sizes[PARAM]);
    return;
  }
  for (int k = 0; k < ARENAS; k++) {
    in[k] = out[k] = malloc(s->element_count * sizes[k]);
    CHECK(out[k]);
    if (k >= GRAD) memcpy(out[k], s->ptr[k], s->element_count * sizes[k]);
  }
  elements(r->salt, s->first_element, s->element_count, in, out, 0);
  for (int k = 0; k < ARENAS; k++) {
    if (k != GRAD) memcpy(s->out[k], out[k], s->element_count * sizes[k]);
    free(out[k]);
  }
  atomic_fetch_add(&elements_run, s->element_count);
}
typedef struct {
  rule_t rule;
  gemini_update_span_t span;
} queued_t;
static void run_queued(void *user) {
  queued_t *q = user;
  run_span(&q->rule, &q->span);
  free(q);
}
static gemini_status_t fn(void *user, const gemini_update_span_t *s) {
  const rule_t *r = user;
  while (r->salt == 13 && !atomic_load(&gate)) usleep(100);
  if (r->delay_us) usleep(r->delay_us);
  if (r->host_us && s->tier == HOST) usleep(r->host_us);
  atomic_fetch_add(&spans_begun, 1);
  if (r->fails) return GEMINI_ERR_NOT_FOUND;
  if (s->tier == HOST) {
    run_span(r, s);
    return GEMINI_OK;
  }
  atomic_fetch_add(&spans_on_device, 1);
  queued_t *q = malloc(sizeof *q);
  CHECK(q);
  *q = (queued_t){ *r, *s };
  return gemini_stream_call(r->mgr, s->stream, run_queued, q);
}
static gemini_status_t update(model_t *t, uint32_t flags, rule_t rule, uint64_t first, uint64_t count) {
  gemini_update_t u = GEMINI_UPDATE_INIT;
  rule.mgr = t->w.mgr;
  u.flags = flags;
  u.arenas = t->arena;
  u.modes = modes;
  u.arena_count = ARENAS;
  u.first_element = first;
  u.element_count = count;
  u.stream = t->w.stream;
  u.try_fn = fn;
  u.user = &rule;
  u.user_bytes = sizeof rule;
  return gemini_update(t->w.mgr, &u);
}
static void plain_update(model_t *t, uint64_t salt, uint64_t first, uint64_t count) {
  const uint8_t *in[ARENAS];
  for (int k = 0; k < ARENAS; k++) in[k] = t->plain[k];
  elements(salt, first, count, in, t->plain, first);
}
enum { SPECULATE = GEMINI_UPDATE_SPECULATE, COMMIT = GEMINI_UPDATE_COMMIT, LATE = GEMINI_UPDATE_LATE };

/* ---- the model */
static void write_part(model_t *t, int k, uint64_t first, uint64_t count, uint64_t seed, uint32_t tier) {
  uint8_t *to = t->plain[k] + first * sizes[k];
  world_pattern(to, 0, count * sizes[k], seed);
  for (uint64_t at = first * sizes[k], end = at + count * sizes[k], stop; at < end; at = stop) {
    stop = (at / CHUNK + 1) * CHUNK < end ? (at / CHUNK + 1) * CHUNK : end;
    gemini_access_t a = world_part(t->arena[k], at, stop - at, GEMINI_READ_WRITE, tier);
    OK(gemini_acquire(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    memcpy(a.ptr, t->plain[k] + at, stop - at);
    OK(gemini_release(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
}
static model_t model_with(gemini_config_t c) {
  model_t t = { .w = world_open(c) };
  for (int k = 0; k < ARENAS; k++) {
    t.arena[k] = world_arena(&t.w, kinds[k], sizes[k], NULL, k ? t.arena[0] : NULL, NULL);
    t.plain[k] = calloc(1, (size_t)ELEMENTS * sizes[k]);
    CHECK(t.plain[k]);
  }
  uint64_t at;
  OK(gemini_arena_take(t.w.mgr, t.arena[0], ELEMENTS * sizes[0], &at));
  for (int k = 0; k < ARENAS; k++) write_part(&t, k, 0, ELEMENTS, (uint64_t)k + 1, HOST);
  return t;
}
static model_t model_of(uint64_t device_chunks, uint64_t host_chunks, uint32_t threads) {
  gemini_config_t c = world_config(device_chunks, host_chunks, 0);
  c.update_threads = threads;
  return model_with(c);
}
static void model_expect(model_t *t, uint32_t tier) {
  for (int k = 0; k < ARENAS; k++) {
    for (uint64_t at = 0, end = ELEMENTS * sizes[k]; at < end; at += CHUNK) {
      const uint64_t size = at + CHUNK < end ? CHUNK : end - at;
      gemini_access_t a = world_part(t->arena[k], at, size, GEMINI_READ, tier);
      OK(gemini_acquire(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      if (memcmp(a.ptr, t->plain[k] + at, size)) {
        fprintf(stderr, "arena %d differs in chunk %d\n", k, (int)(at / CHUNK));
        CHECK(false);
      }
      OK(gemini_release(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  }
}
static void model_close(model_t *t) {
  world_close(&t->w);
  for (int k = 0; k < ARENAS; k++) free(t->plain[k]);
}
static void counted(model_t *t, uint64_t speculated, uint64_t committed, uint64_t dropped) {
  const figures_t f = world_stats(&t->w);
  CHECK_EQ(f.speculated_elements, speculated);
  CHECK_EQ(f.committed_elements, committed);
  CHECK_EQ(f.dropped_elements, dropped);
}

/* ---- tests */
static void test_speculate_changes_nothing_until_the_commit(void) {
  for (int late = 0; late < 2; late++) {
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) { /* where the gradients are */
      model_t t = model_of(8, OWN + NEW, 2);
      write_part(&t, GRAD, 0, ELEMENTS, 77, tier);
      const uint64_t used = world_stats(&t.w).used_bytes[HOST];
      atomic_store(&elements_run, 0);
      OK(update(&t, SPECULATE, (rule_t){ .salt = 5, .delay_us = 500 }, 0, 0));
      counted(&t, ELEMENTS, 0, 0);
      CHECK(world_stats(&t.w).used_bytes[HOST] >= used + NEW * CHUNK);
      model_expect(&t, DEVICE);
      model_expect(&t, HOST);
      const gemini_access_t norm = world_whole(t.arena[GRAD], 0, 0);
      double value;
      OK(gemini_norm(t.w.mgr, &norm, GEMINI_DTYPE_BF16, t.w.stream, &value));
      OK(update(&t, COMMIT | (late ? LATE : 0), (rule_t){ .salt = 5 }, 0, 0));
      plain_update(&t, 5, 0, ELEMENTS);
      counted(&t, ELEMENTS, ELEMENTS, 0);
      model_expect(&t, late ? HOST : DEVICE);
      CHECK_EQ(atomic_load(&elements_run), ELEMENTS); /* each once */
      CHECK(world_stats(&t.w).used_bytes[HOST] <= used + UNITS * CHUNK);
      model_close(&t);
    }
  }
}

/* Only as many units as there is room for, and the last of them go when somebody else needs room. */
static void test_speculate_takes_and_gives_back_spare_memory(void) {
  for (uint64_t spare = NEW % check_stride(); spare <= NEW; spare += check_stride()) {
    model_t t = model_of(8, OWN + spare, 1);
    OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0));
    const uint64_t units = spare / 7 < 3 ? spare / 7 : 3, end = units * UNIT + (spare == NEW ? 5120 : 0);
    counted(&t, end, 0, 0);
    CHECK_EQ(world_stats(&t.w).peak_bytes[HOST] / CHUNK, OWN + 7 * units + (spare == NEW ? 4 : 0));
    uint64_t dropped = 0;
    if (units) { /* a block that needs one slot more than is free */
      void *block;
      const uint64_t left = OWN + spare - world_stats(&t.w).used_bytes[HOST] / CHUNK;
      OK(gemini_host_alloc(t.w.mgr, (left + 1) * CHUNK - 4096, 0, &block));
      dropped = world_stats(&t.w).dropped_elements;
      CHECK(dropped > 0);
      OK(gemini_host_free(t.w.mgr, block));
    }
    OK(update(&t, COMMIT, (rule_t){ .salt = 5 }, 0, 0));
    plain_update(&t, 5, 0, ELEMENTS);
    counted(&t, end, end - dropped, dropped);
    model_expect(&t, HOST);
    model_close(&t);
  }
}

static int file_of(const model_t *t, int k) {
  int fd = memfd_create("test", 0);
  CHECK(fd >= 0);
  CHECK_EQ(write(fd, t->plain[k], 512), 512);
  return fd;
}
/* Each way to write one of the arenas drops the units of the chunk, and no other. */
static void test_speculate_is_dropped_by_every_write(void) {
  enum { ON_DEVICE, ON_HOST, ZERO, LOAD, UPDATE, WHOLE_ON_DEVICE, WAYS };
  const int stride = (int)check_stride();
  for (int way = 0; way < WAYS; way++) {
    for (int k = way % stride; k < ARENAS; k += stride) {
      model_t t = model_of(12, OWN + NEW + 2, 2);
      write_part(&t, GRAD, 0, ELEMENTS, 77, DEVICE);
      if (way % 2) { /* the parameters' only bytes are on the device, where acquires need no lock */
        write_part(&t, PARAM, 0, 2 * UNIT, 78, DEVICE);
        write_part(&t, PARAM, 0, 2 * UNIT, 79, DEVICE);
      }
      OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0));
      counted(&t, ELEMENTS, 0, 0);
      const uint64_t first = UNIT + 64, count = 256;
      gemini_access_t part = world_part(t.arena[k], first * sizes[k], count * sizes[k], 0, 0);
      if (way == ON_DEVICE) write_part(&t, k, first, count, 99, DEVICE);
      if (way == WHOLE_ON_DEVICE) write_part(&t, k, UNIT, UNIT, 98, DEVICE);
      if (way == ON_HOST) write_part(&t, k, first, count, 99, HOST);
      if (way == ZERO) {
        OK(gemini_zero(t.w.mgr, &part));
        memset(t.plain[k] + first * sizes[k], 0, count * sizes[k]);
      }
      if (way == LOAD) {
        int fd = file_of(&t, k);
        part.size_bytes = 512;
        OK(gemini_load(t.w.mgr, &part, fd, 0));
        memcpy(t.plain[k] + first * sizes[k], t.plain[k], 512);
        close(fd);
      }
      if (way == UPDATE) {
        OK(update(&t, LATE, (rule_t){ .salt = 6 }, UNIT, UNIT));
        plain_update(&t, 6, UNIT, UNIT);
      }
      counted(&t, ELEMENTS, 0, UNIT);
      OK(update(&t, COMMIT, (rule_t){ .salt = 5 }, 0, 0));
      plain_update(&t, 5, 0, ELEMENTS);
      counted(&t, ELEMENTS, ELEMENTS - UNIT, UNIT);
      model_expect(&t, HOST);
      model_close(&t);
    }
  }
}

/* Failures and drops: of a function while it is only speculated, then after it was taken over. */
static void test_speculate_failures_are_the_updates_only_if_it_was_taken_over(void) {
  model_t t = model_of(8, OWN + NEW, 2);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5, .fails = true }, 0, 0));
  OK(gemini_update_wait(t.w.mgr));
  counted(&t, ELEMENTS, 0, 0);
  OK(update(&t, COMMIT, (rule_t){ .salt = 5 }, 0, 0));
  plain_update(&t, 5, 0, ELEMENTS);
  counted(&t, ELEMENTS, 0, ELEMENTS);
  model_expect(&t, HOST);
  /* Dropped before it runs: but for one span of each worker it never does, and its memory is free at once. */
  const uint64_t used = world_stats(&t.w).used_bytes[HOST];
  atomic_store(&gate, false);
  atomic_store(&spans_begun, 0);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 13, .fails = true }, 0, 0));
  OK(gemini_update_drop(t.w.mgr));
  CHECK_EQ(world_stats(&t.w).used_bytes[HOST], used);
  atomic_store(&gate, true);
  OK(gemini_update_wait(t.w.mgr));
  CHECK(atomic_load(&spans_begun) <= 2);
  counted(&t, 2 * ELEMENTS, 0, 2 * ELEMENTS);
  model_expect(&t, HOST);
  /* Another update drops it, without COMMIT and with other bounds. */
  OK(update(&t, SPECULATE, (rule_t){ .salt = 6 }, 0, 0));
  OK(update(&t, 0, (rule_t){ .salt = 7 }, 0, 0));
  plain_update(&t, 7, 0, ELEMENTS);
  counted(&t, 3 * ELEMENTS, 0, 3 * ELEMENTS);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 6 }, 0, 0));
  OK(update(&t, COMMIT, (rule_t){ .salt = 6 }, 256, 2 * UNIT));
  plain_update(&t, 6, 256, 2 * UNIT);
  OK(update(&t, COMMIT, (rule_t){ .salt = 6 }, 3 * UNIT, 5120));
  plain_update(&t, 6, 3 * UNIT, 5120);
  counted(&t, 4 * ELEMENTS, UNIT + 5120, 3 * ELEMENTS + 2 * UNIT);
  model_expect(&t, DEVICE);
  /* Parts of units are not speculated, and a second speculation takes the place of the first one. */
  OK(update(&t, SPECULATE, (rule_t){ .salt = 6 }, 256, 2 * UNIT));
  counted(&t, 4 * ELEMENTS + UNIT, UNIT + 5120, 3 * ELEMENTS + 2 * UNIT);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 8 }, 0, 0));
  OK(update(&t, COMMIT, (rule_t){ .salt = 8 }, 0, 0));
  plain_update(&t, 8, 0, ELEMENTS);
  counted(&t, 5 * ELEMENTS + UNIT, ELEMENTS + UNIT + 5120, 3 * ELEMENTS + 3 * UNIT);
  model_expect(&t, HOST);
  /* A pinned chunk is written on the device. */
  const gemini_access_t pin = world_part(t.arena[PARAM], 0, 4, 0, DEVICE);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 9 }, 0, 0));
  OK(gemini_pin(t.w.mgr, &pin));
  OK(update(&t, COMMIT, (rule_t){ .salt = 9 }, 0, 0));
  plain_update(&t, 9, 0, ELEMENTS);
  OK(gemini_unpin(t.w.mgr, &pin));
  counted(&t, 6 * ELEMENTS + UNIT, 2 * ELEMENTS + 5120, 3 * ELEMENTS + 4 * UNIT);
  model_expect(&t, HOST);
  /* Taken over while it runs: the failure is one of the update. */
  atomic_store(&gate, false);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 13, .fails = true }, 0, 0));
  OK(update(&t, COMMIT | LATE, (rule_t){ .salt = 13 }, 0, 0));
  atomic_store(&gate, true);
  CHECK_STATUS(gemini_update_wait(t.w.mgr), GEMINI_ERR_NOT_FOUND);
  CHECK_STATUS(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0), GEMINI_ERR_NOT_FOUND);
  CHECK_STATUS(gemini_manager_close(t.w.mgr), GEMINI_ERR_NOT_FOUND);
  for (int k = 0; k < ARENAS; k++) free(t.plain[k]);
}

static void iterations_pass(model_t *t) {
  for (int i = 0; i < 2; i++) {
    OK(gemini_iteration_begin(t->w.mgr));
    OK(gemini_iteration_end(t->w.mgr));
  }
}
/* All that is free of the host's memory, filled. */
static void *block_of_the_rest(model_t *t) {
  const figures_t f = world_stats(&t->w);
  void *block;
  OK(gemini_host_alloc(t->w.mgr, f.budget_bytes[HOST] - f.used_bytes[HOST], 0, &block));
  memset(block, 0x5a, f.budget_bytes[HOST] - f.used_bytes[HOST]);
  return block;
}

/* Slots change hands while functions still read the old values, or write new ones that nobody wants any more. */
static void test_speculate_memory_is_not_reused_too_early(void) {
  model_t t = model_of(8, OWN + NEW, 8);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5, .delay_us = 30000 }, 0, 0));
  OK(update(&t, COMMIT | LATE, (rule_t){ .salt = 5 }, 0, 0));
  plain_update(&t, 5, 0, ELEMENTS);
  uint8_t *block = block_of_the_rest(&t);
  model_expect(&t, HOST);
  OK(gemini_host_free(t.w.mgr, block));
  OK(update(&t, SPECULATE, (rule_t){ .salt = 6, .delay_us = 30000 }, 0, 0));
  usleep(5000); /* the workers have begun */
  OK(gemini_update_drop(t.w.mgr));
  void *ptr; /* one slot: for more, chunks would have to move, which waits for all */
  OK(gemini_host_alloc(t.w.mgr, CHUNK / 2, 0, &ptr));
  block = memset(ptr, 0x5a, CHUNK / 2);
  OK(gemini_update_wait(t.w.mgr));
  for (uint64_t i = 0; i < CHUNK / 2; i++) CHECK_EQ(block[i], 0x5a);
  OK(gemini_host_free(t.w.mgr, block));
  model_expect(&t, HOST);
  model_close(&t);
}

/* A chunk that must come to the host gets the room. */
static void test_speculate_makes_room_for_chunks(void) {
  model_t t = model_of(8, OWN + 7, 2);
  const gemini_arena_t more = world_arena(&t.w, GEMINI_KIND_OTHER, 1, "more", NULL, NULL);
  const gemini_tensor_t tensor = world_tensor(&t.w, more, "tensor", 2 * CHUNK);
  world_fill(&t.w, tensor, 0, 2 * CHUNK, DEVICE, 3);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0));
  counted(&t, UNIT, 0, 0);
  const gemini_access_t move = world_whole(tensor, 0, HOST);
  OK(gemini_move(t.w.mgr, &move, 1));
  counted(&t, UNIT, 0, UNIT);
  CHECK(world_holds(&t.w, tensor, 0, 2 * CHUNK, 3));
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0)); /* there is too little now */
  counted(&t, UNIT, 0, UNIT);
  OK(gemini_zero(t.w.mgr, &move));
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0)); /* and since it was used lately */
  counted(&t, UNIT, 0, UNIT);
  iterations_pass(&t); /* not in the last iteration */
  OK(gemini_iteration_begin(t.w.mgr));
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0));
  counted(&t, 2 * UNIT, 0, UNIT);
  OK(update(&t, COMMIT, (rule_t){ .salt = 5 }, 0, 0));
  OK(gemini_iteration_end(t.w.mgr));
  plain_update(&t, 5, 0, ELEMENTS);
  counted(&t, 2 * UNIT, UNIT, UNIT);
  model_expect(&t, HOST);
  model_close(&t);
}

/* Memory goes back to the system while functions of dropped units run. */
static void test_speculate_under_smaller_budgets(void) {
  model_t t = model_of(8, OWN + NEW, 8);
  for (uint64_t salt = 20; salt < 26; salt++) {
    OK(update(&t, SPECULATE, (rule_t){ .salt = salt, .delay_us = 20000 }, 0, 0));
    usleep(3000);
    OK(gemini_budget_set(t.w.mgr, HOST, (OWN + salt % 3) * CHUNK));
    if (salt == 22) usleep(40000); /* while the functions write */
    OK(gemini_budget_set(t.w.mgr, HOST, (OWN + NEW) * CHUNK));
    OK(gemini_budget_set(t.w.mgr, DEVICE, (6 + salt % 3) * CHUNK));
    OK(update(&t, COMMIT, (rule_t){ .salt = salt }, 0, 0));
    plain_update(&t, salt, 0, ELEMENTS);
    model_expect(&t, HOST);
  }
  counted(&t, 6 * ELEMENTS, 0, 6 * ELEMENTS);
  /* An arena that grows shows zeros behind what was taken over. */
  uint64_t at;
  OK(gemini_host_free(t.w.mgr, block_of_the_rest(&t))); /* leaves other bytes there */
  iterations_pass(&t);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 30 }, 0, 0));
  OK(update(&t, COMMIT, (rule_t){ .salt = 30 }, 0, 0));
  plain_update(&t, 30, 0, ELEMENTS);
  OK(gemini_arena_take(t.w.mgr, t.arena[PARAM], 4096 * sizes[PARAM], &at));
  for (int k = 0; k < ARENAS; k++) CHECK(world_holds(&t.w, t.arena[k], ELEMENTS * sizes[k], 4096 * sizes[k], 0));
  model_expect(&t, HOST);
  /* Not the whole unit any more. */
  OK(update(&t, SPECULATE, (rule_t){ .salt = 31 }, 0, ELEMENTS));
  OK(update(&t, COMMIT, (rule_t){ .salt = 31 }, 0, ELEMENTS));
  plain_update(&t, 31, 0, ELEMENTS);
  counted(&t, 7 * ELEMENTS + 3 * UNIT, ELEMENTS + 3 * UNIT, 6 * ELEMENTS);
  model_expect(&t, HOST);
  /* The manager closes with units that were not taken over. */
  OK(update(&t, SPECULATE, (rule_t){ .salt = 32, .delay_us = 1000 }, 0, ELEMENTS));
  model_close(&t);
}

/* Gradients in their parameters' bytes. */
static void test_speculate_with_gradients_in_their_parameters_bytes(void) {
  model_t t = { .w = world_open(world_config(12, 64, 0)) };
  gemini_tensor_t tensor[2][2];
  for (int k = 0; k < ARENAS; k++) {
    t.arena[k] =
        world_arena(&t.w, kinds[k], sizes[k], NULL, k && k != GRAD ? t.arena[0] : NULL, k == GRAD ? t.arena[0] : NULL);
    t.plain[k] = calloc(1, (size_t)ELEMENTS * sizes[k]);
    CHECK(t.plain[k]);
  }
  for (int i = 0; i < 2; i++) {
    tensor[i][0] = world_tensor(&t.w, t.arena[PARAM], i ? "b" : "a", (uint64_t)UNIT * sizes[PARAM]);
    OK(gemini_tensor_counterpart(t.w.mgr, tensor[i][0], t.arena[GRAD], &tensor[i][1]));
  }
  for (int k = MASTER; k < ARENAS; k++) write_part(&t, k, 0, 2 * UNIT, (uint64_t)k + 1, HOST);
  uint64_t speculated = 0;
  for (int round = 0; round < 4; round++) {
    const int written = round == 1 ? 1 : 2; /* a gradient that is missing counts as zero: not to be speculated */
    for (int i = 0; i < 2; i++) {
      uint8_t *plain = t.plain[GRAD] + (uint64_t)i * UNIT * sizes[GRAD];
      for (uint64_t b = 0; b < UNIT * sizes[GRAD]; b++) plain[b] = i < written ? world_byte(70, b) : 0;
      gemini_access_t a = world_whole(tensor[i][1], GEMINI_WRITE, DEVICE);
      if (i >= written) continue;
      OK(gemini_acquire(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      memcpy(a.ptr, plain, UNIT * sizes[GRAD]);
      OK(gemini_release(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    OK(update(&t, SPECULATE, (rule_t){ .salt = 40 }, 0, 0));
    speculated += (uint64_t)written * UNIT;
    gemini_access_t gradient = world_whole(tensor[0][1], GEMINI_READ, DEVICE);
    OK(gemini_acquire(t.w.mgr, &gradient, 1, GEMINI_STREAM_CALLER)); /* it is the gradient still */
    CHECK(!memcmp(gradient.ptr, t.plain[GRAD], UNIT * sizes[GRAD]));
    OK(gemini_release(t.w.mgr, &gradient, 1, GEMINI_STREAM_CALLER));
    OK(update(&t, COMMIT, (rule_t){ .salt = 40 }, 0, 0));
    plain_update(&t, 40, 0, 2 * UNIT);
    counted(&t, speculated, speculated, 0);
    for (int i = 0; i < 2; i++) {
      gemini_access_t a = world_whole(tensor[i][0], GEMINI_READ, HOST);
      OK(gemini_acquire(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(!memcmp(a.ptr, t.plain[PARAM] + (uint64_t)i * UNIT * sizes[PARAM], UNIT * sizes[PARAM]));
      OK(gemini_release(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  }
  OK(update(&t, SPECULATE, (rule_t){ .salt = 40 }, 0, 0)); /* no gradients */
  counted(&t, speculated, speculated, 0);
  model_close(&t);
}

/* A tensor that is registered in between has a gradient that was not written: zero. */
static void plus_gradient(void *user, const gemini_update_span_t *s) {
  (void)user;
  const uint32_t *gradient = s->ptr[1], *before = s->ptr[2];
  for (uint64_t i = 0; i < s->element_count; i++) {
    const uint32_t sum = before[i] + gradient[i];
    ((uint32_t *)s->out[0])[i] = 3 * gradient[i] + 7;
    ((uint32_t *)s->out[2])[i] = sum;
  }
}
static void registered_in_between(bool speculated, uint32_t found[2]) {
  static const uint32_t mode[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE };
  world_t w = world_open(world_config(8, 32, 0));
  gemini_arena_t a[3];
  a[0] = world_arena(&w, GEMINI_KIND_PARAM, 4, NULL, NULL, NULL);
  a[1] = world_arena(&w, GEMINI_KIND_GRAD, 4, NULL, NULL, a[0]);
  a[2] = world_arena(&w, GEMINI_KIND_MOMENTUM, 4, NULL, a[0], NULL);
  uint64_t at;
  OK(gemini_arena_take(w.mgr, a[0], CHUNK, &at));
  for (int k = 0; k < 3; k += 2) {
    gemini_access_t all = world_part(a[k], 0, CHUNK, GEMINI_READ_WRITE, HOST);
    OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    for (uint32_t i = 0; i < CHUNK / 4; i++) ((uint32_t *)all.ptr)[i] = i + 100;
    OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  }
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = a, u.modes = mode, u.arena_count = 3, u.stream = w.stream, u.fn = plus_gradient;
  u.flags = GEMINI_UPDATE_SPECULATE;
  if (speculated) OK(gemini_update(w.mgr, &u));
  CHECK_EQ(world_stats(&w).speculated_elements, speculated ? CHUNK / 4 : 0);
  gemini_tensor_t late;
  OK(gemini_tensor_register(w.mgr, a[0], "late", 4096, 0, &late));
  u.flags = GEMINI_UPDATE_COMMIT;
  OK(gemini_update(w.mgr, &u));
  for (int k = 0; k < 2; k++) {
    gemini_access_t all = world_part(a[2 * k], 0, CHUNK, GEMINI_READ, HOST);
    OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    found[k] = ((uint32_t *)all.ptr)[5];
    OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  }
  world_close(&w);
}
static void test_speculate_is_dropped_by_a_tensor_without_a_gradient(void) {
  uint32_t plain[2], speculated[2];
  registered_in_between(false, plain);
  registered_in_between(true, speculated);
  CHECK_EQ(plain[0], 7);
  CHECK_EQ(plain[1], 105);
  CHECK_EQ(speculated[0], plain[0]);
  CHECK_EQ(speculated[1], plain[1]);
}

static void test_speculate_bad_flags_are_refused(void) {
  model_t t = model_of(8, OWN + NEW, 1);
  CHECK_STATUS(update(&t, SPECULATE | LATE, (rule_t){ 0 }, 0, 0), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "flags is 0x3: GEMINI_UPDATE_SPECULATE goes with no other flag");
  CHECK_STATUS(update(&t, SPECULATE | COMMIT, (rule_t){ 0 }, 0, 0), GEMINI_ERR_INVALID);
  CHECK_STATUS(update(&t, SPECULATE, (rule_t){ 0 }, 0, ELEMENTS + 1), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_update_drop(NULL), GEMINI_ERR_HANDLE);
  OK(gemini_update_drop(t.w.mgr));
  counted(&t, 0, 0, 0);
  model_close(&t);
}

/* ---- any order of all of it, beside a thread that moves chunks and takes memory */
typedef struct {
  model_t *t;
  _Atomic bool stop;
  uint64_t random;
} other_t;
static void *other(void *user) {
  other_t *o = user;
  while (!atomic_load(&o->stop)) {
    const int k = (int)(check_random(&o->random) % ARENAS);
    const uint64_t chunks = (ELEMENTS * sizes[k] + CHUNK - 1) / CHUNK, at = check_random(&o->random) % chunks;
    gemini_access_t a = world_part(o->t->arena[k], at * CHUNK, 1024, GEMINI_READ, (uint32_t)at % 2 ? HOST : DEVICE);
    void *block;
    if (check_random(&o->random) % 3 == 0) {
      const gemini_status_t status = gemini_move(o->t->w.mgr, &a, 1);
      CHECK(!status || status == GEMINI_ERR_BUSY || status == GEMINI_ERR_OOM_DEVICE || status == GEMINI_ERR_OOM_HOST);
      OK(gemini_hint(o->t->w.mgr, &a, 1));
    } else if (!gemini_host_alloc(o->t->w.mgr, (check_random(&o->random) % 4 + 1) * CHUNK / 2, 0, &block)) {
      memset(block, 0x5a, CHUNK / 2);
      OK(gemini_host_free(o->t->w.mgr, block));
    }
    usleep(200);
  }
  return NULL;
}
static void random_program(uint64_t seed) {
  uint64_t random = seed * 2 + 1, salt = 100;
  model_t t = model_of(6 + seed % 9, OWN + 4 + check_random(&random) % (NEW + 4), (uint32_t)(1 + seed % 3));
  other_t o = { .t = &t, .random = seed };
  pthread_t thread;
  const bool threads = seed % 2;
  if (threads) CHECK(!pthread_create(&thread, NULL, other, &o));
  for (int i = 0; i < 60; i++) {
    const uint64_t r = check_random(&random), first = r % UNITS * UNIT, left = ELEMENTS - first;
    const uint64_t count = r / 8 % 3 == 0 ? left : left < UNIT ? left : UNIT;
    const int k = (int)(r / 64 % ARENAS);
    const uint64_t start = check_random(&random) % (ELEMENTS - 256);
    switch (check_random(&random) % 8) {
    case 0: write_part(&t, GRAD, 0, ELEMENTS, r, r % 2 ? DEVICE : HOST); break;
    case 1: write_part(&t, k, start, 1 + r % 255, r, r % 3 ? DEVICE : HOST); break;
    case 2:
    case 3: OK(update(&t, SPECULATE, (rule_t){ .salt = salt, .delay_us = r % 5 ? 0 : 700 }, first, count)); break;
    case 4:
      OK(update(&t, COMMIT | (r % 2 ? LATE : 0), (rule_t){ .salt = salt }, first, count));
      plain_update(&t, salt, first, count);
      break;
    case 5: /* other settings: what is speculated is not to be used */
      salt++;
      OK(gemini_update_drop(t.w.mgr));
      OK(update(&t, SPECULATE, (rule_t){ .salt = salt }, 0, 0));
      break;
    case 6:
      if (!threads) {
        const uint64_t bytes = world_stats(&t.w).budget_bytes[HOST];
        OK(gemini_budget_set(t.w.mgr, HOST, (OWN + 2) * CHUNK));
        OK(gemini_budget_set(t.w.mgr, HOST, bytes));
      } else {
        OK(update(&t, LATE, (rule_t){ .salt = salt + 1 }, first, count));
        plain_update(&t, salt + 1, first, count);
      }
      break;
    default: model_expect(&t, r % 2 ? DEVICE : HOST);
    }
  }
  atomic_store(&o.stop, true);
  if (threads) CHECK(!pthread_join(thread, NULL));
  model_expect(&t, HOST);
  OK(gemini_update_drop(t.w.mgr));
  const figures_t f = world_stats(&t.w);
  CHECK_EQ(f.speculated_elements, f.committed_elements + f.dropped_elements);
  model_close(&t);
}
static void test_speculate_random_programs_have_the_bits_of_plain_updates(void) {
  for (uint64_t seed = 0; seed < check_repetitions(24); seed++) random_program(seed);
}

/* ---- the plan */
static void op(model_t *t, int k, uint64_t unit, uint32_t mode, uint64_t seed, uint32_t us) {
  const uint64_t begin = unit * UNIT, count = begin + UNIT < ELEMENTS ? UNIT : ELEMENTS - begin;
  const uint64_t size = count * sizes[k];
  OK(gemini_op_begin(t->w.mgr, mode == GEMINI_READ ? "forward" : "backward", GEMINI_STREAM_CALLER));
  gemini_access_t a = world_part(t->arena[k], begin * sizes[k], size, mode, DEVICE);
  OK(gemini_acquire(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; mode != GEMINI_READ && i < size; i++)
    t->plain[k][begin * sizes[k] + i] = ((uint8_t *)a.ptr)[i] = world_byte(seed, i);
  usleep(us);
  OK(gemini_release(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  OK(gemini_op_end(t->w.mgr));
}
/* A step whose gradients are final one unit after the other. clipped: nothing is taken over, and the factor, here the
 * salt, is another one. */
static void train(model_t *t, uint64_t step, bool clipped) {
  enum { SPAN_US = 3000 };
  const rule_t ahead = { .salt = step, .delay_us = SPAN_US }, rule = { .salt = step + clipped, .delay_us = SPAN_US };
  OK(gemini_iteration_begin(t->w.mgr));
  for (uint64_t unit = 0; unit < UNITS; unit++) op(t, PARAM, unit, GEMINI_READ, 0, 2000);
  for (uint64_t unit = UNITS; unit-- > 0;) {
    op(t, GRAD, unit, GEMINI_WRITE, step * UNITS + unit, 8000);
    OK(update(t, SPECULATE, ahead, unit * UNIT, unit + 1 < UNITS ? UNIT : ELEMENTS - unit * UNIT));
  }
  if (clipped) OK(gemini_update_drop(t->w.mgr));
  OK(update(t, COMMIT | LATE, rule, 0, 0));
  const gemini_access_t gradients = world_whole(t->arena[GRAD], 0, 0);
  OK(gemini_discard(t->w.mgr, &gradients)); /* the update still reads them */
  plain_update(t, rule.salt, 0, ELEMENTS);
  OK(gemini_iteration_end(t->w.mgr));
}
static bool plan_says(const model_t *t, const char *words) {
  char text[4096];
  OK(gemini_plan_explain(t->w.mgr, sizeof text, text, NULL));
  return strstr(text, words);
}

/* A new plan is compared with the one before it by steps alike: those that took nothing over take longer under any. */
static void test_speculate_clipped_steps_are_no_reason_to_undo_a_plan(void) {
  gemini_config_t c = world_config(64, OWN + NEW + 8, 0);
  c.placement = GEMINI_PLACEMENT_CPU;
  model_t t = model_with(c);
  uint64_t step = 200;
  for (int i = 0; i < 3; i++) train(&t, step++, false); /* as below: then there is a second plan */
  const uint64_t plans = world_stats(&t.w).plans;
  for (int i = 0; i < 3; i++) train(&t, step++, true);
  for (int i = 0; i < 2; i++) train(&t, step++, false);
  CHECK_EQ(world_stats(&t.w).plans, plans);
  model_close(&t);
}

/* Once steps take results over, the plan is made for that; after several that do not, it is not. Returns how much longer
 * the steps that do not are predicted to take, ns. */
static int64_t predicted_longer(void) {
  gemini_config_t c = world_config(64, OWN + NEW + 8, 0);
  c.placement = GEMINI_PLACEMENT_CPU;
  model_t t = model_with(c);
  uint64_t step = 100;
  for (int i = 0; i < 3; i++) train(&t, step++, false); /* recorded, and two under the first plan */
  const uint64_t before = world_stats(&t.w).committed_elements;
  CHECK(before >= 2 * (uint64_t)ELEMENTS);
  CHECK(plan_says(&t, "0 pieces on the device, 4 on the host, 4 of these computed ahead"));
  for (int i = 0; i < 2; i++) train(&t, step++, false);
  CHECK_EQ(world_stats(&t.w).committed_elements, before + 2 * (uint64_t)ELEMENTS);
  const uint64_t ahead_ns = world_stats(&t.w).predicted_step_ns, plans = world_stats(&t.w).plans;
  for (int i = 0; i < 3; i++) train(&t, step++, true);
  CHECK(plan_says(&t, "computed ahead"));
  CHECK_EQ(world_stats(&t.w).plans, plans);
  train(&t, step++, true);
  CHECK(!plan_says(&t, "computed ahead"));
  CHECK_EQ(world_stats(&t.w).plans, plans + 1);
  const uint64_t without_ns = world_stats(&t.w).predicted_step_ns;
  train(&t, step++, false);
  CHECK(!plan_says(&t, "computed ahead")); /* it takes two now */
  train(&t, step++, false);
  CHECK(plan_says(&t, "computed ahead"));
  OK(gemini_update_wait(t.w.mgr));
  model_expect(&t, HOST);
  CHECK_EQ(world_stats(&t.w).departures, 0);
  model_close(&t);
  return (int64_t)(without_ns - ahead_ns);
}
static void test_speculate_is_planned_while_steps_take_it_over(void) {
  /* The forward pass takes 8 ms; 21 ms of updates were beside the backward pass, and then are not. What other programs
   * add to the times that the one prediction is made of, the other one does not have: then it is tried again. */
  enum { TRIES = 6, LEAST_NS = 5000000 };
  int64_t longer = predicted_longer();
  for (int i = 1; i < TRIES && longer <= LEAST_NS; i++) longer = predicted_longer();
  CHECK(longer > LEAST_NS);
}

/* What there is no spare memory for is not planned; what there is, is what the next step uses first. */
static void test_speculate_is_planned_as_memory_allows(void) {
  gemini_config_t c = world_config(64, OWN + 8, 0); /* a unit takes 7 */
  c.placement = GEMINI_PLACEMENT_CPU;
  model_t t = model_with(c);
  for (uint64_t step = 100; step < 104; step++) train(&t, step, false);
  CHECK(plan_says(&t, "4 on the host, 1 of these computed ahead"));
  const uint64_t speculated = world_stats(&t.w).speculated_elements;
  train(&t, 104, false);
  CHECK_EQ(world_stats(&t.w).speculated_elements, speculated + UNIT);
  OK(gemini_update_wait(t.w.mgr));
  model_expect(&t, HOST);
  model_close(&t);
}

/* States that stay on the device need no slots of the host: another unit is computed there, from the first step that has
 * too few. */
static void test_speculate_takes_the_slots_of_states_that_stay_on_the_device(void) {
  gemini_config_t c = world_config(64, OWN + 8, 0); /* a unit takes 7, the states of one have 6 */
  c.placement = GEMINI_PLACEMENT_STATIC;
  c.static_optim_fraction = 0.25;
  model_t t = model_with(c);
  for (uint64_t step = 100; step < 103; step++) train(&t, step, false);
  CHECK(plan_says(&t, "1 pieces on the device, 3 on the host, 2 of these computed ahead"));
  for (uint64_t step = 103; step < 108; step++) {
    const uint64_t speculated = world_stats(&t.w).speculated_elements;
    train(&t, step, false);
    CHECK_EQ(world_stats(&t.w).speculated_elements, speculated + 2 * UNIT);
  }
  CHECK_EQ(world_stats(&t.w).dropped_elements, 0);
  OK(gemini_update_wait(t.w.mgr));
  model_expect(&t, HOST);
  model_close(&t);
}

/* Slots of states that are on the device now, and that no plan keeps there, are spare only when two iterations have done
 * without them: else they are wanted back for the states. */
static void test_speculate_leaves_the_slots_of_states_that_may_come_back(void) {
  model_t t = model_of(64, OWN + 8, 1); /* a unit takes 7 */
  const rule_t rule = { .salt = 5 };
  for (int k = MASTER; k < ARENAS; k++)
    for (uint64_t chunk = 0; chunk < 2; chunk++) { /* of the first unit */
      gemini_access_t a = world_part(t.arena[k], chunk * CHUNK, CHUNK, GEMINI_READ_WRITE, DEVICE);
      OK(gemini_acquire(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      OK(gemini_release(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  for (int iteration = 0; iteration < 4; iteration++) {
    OK(gemini_iteration_begin(t.w.mgr));
    for (uint64_t unit = 1; unit < 3; unit++) OK(update(&t, SPECULATE, rule, unit * UNIT, UNIT));
    if (iteration < 2) counted(&t, (uint64_t)(iteration + 1) * UNIT, 0, (uint64_t)iteration * UNIT);
    if (iteration == 3) CHECK_EQ(world_stats(&t.w).speculated_elements - world_stats(&t.w).dropped_elements, 2 * UNIT);
    OK(gemini_update_drop(t.w.mgr));
    OK(gemini_iteration_end(t.w.mgr));
  }
  model_expect(&t, HOST);
  model_close(&t);
}

/* ---- updates on the device while the link has much to do */
static _Atomic bool link_gate;
static void wait_for_link_gate(void *user) {
  (void)user;
  while (!atomic_load(&link_gate)) usleep(100);
}
/* Queues copies to the device that wait until the gate is open, as for work that `other` has not done on their chunks.
 * The tensor is new on the host, and no plan knows of it, as it is used outside operators. */
static void fill_link(model_t *t, gemini_tensor_t tensor, uint64_t size, gemini_stream_t other) {
  gemini_access_t a = world_whole(tensor, GEMINI_READ_WRITE, HOST);
  world_fill(&t->w, tensor, 0, size, HOST, 1);
  atomic_store(&link_gate, false);
  OK(gemini_acquire(t->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  OK(gemini_stream_call(t->w.mgr, other, wait_for_link_gate, NULL));
  OK(gemini_release(t->w.mgr, &a, 1, other));
  a = world_whole(tensor, GEMINI_READ, DEVICE);
  OK(gemini_acquire(t->w.mgr, &a, 1, t->w.stream));
  OK(gemini_release(t->w.mgr, &a, 1, t->w.stream));
}
static void test_update_on_the_device_is_left_to_later_callers_while_the_link_is_full(void) {
  enum { MORE = 200, PLANNED = 4 };
  gemini_config_t c = world_config(OWN + MORE + 8, OWN + MORE + 8, 0);
  c.placement = GEMINI_PLACEMENT_STATIC;
  c.static_param_fraction = c.static_optim_fraction = 1;
  model_t t = model_with(c);
  const gemini_arena_t more = world_arena(&t.w, GEMINI_KIND_OTHER, 1, "more", NULL, NULL);
  const gemini_tensor_t tensor = world_tensor(&t.w, more, "more", MORE * CHUNK);
  gemini_stream_t other;
  OK(gemini_stream_create(t.w.mgr, &other));
  for (uint64_t step = 0; step < PLANNED + 2; step++) {
    OK(gemini_iteration_begin(t.w.mgr));
    for (uint64_t unit = 0; unit < UNITS; unit++) op(&t, PARAM, unit, GEMINI_READ, 0, 100);
    for (uint64_t unit = UNITS; unit-- > 0;) op(&t, GRAD, unit, GEMINI_WRITE, step * UNITS + unit, 100);
    if (step == PLANNED) { /* those before there was a plan ran on the host */
      OK(gemini_update_wait(t.w.mgr));
      atomic_store(&spans_begun, 0);
      atomic_store(&spans_on_device, 0);
    }
    if (step >= PLANNED) fill_link(&t, tensor, MORE * CHUNK, other);
    OK(update(&t, LATE, (rule_t){ .salt = step }, 0, 0));
    plain_update(&t, step, 0, ELEMENTS);
    if (step >= PLANNED) CHECK_EQ(atomic_load(&spans_begun), (step - PLANNED) * UNITS); /* all are left */
    atomic_store(&link_gate, true);
    OK(gemini_iteration_end(t.w.mgr)); /* the operators of the next one queue what is left */
  }
  OK(gemini_update_wait(t.w.mgr));
  CHECK_EQ(world_stats(&t.w).pending_updates, 0);
  CHECK_EQ(spans_on_device, 2 * UNITS);
  CHECK(plan_says(&t, "4 pieces on the device, 0 on the host"));
  model_expect(&t, DEVICE);
  model_expect(&t, HOST);
  CHECK_EQ(world_stats(&t.w).departures, 0);
  model_close(&t);
}

/* Gradients are discarded while the update that reads them is left, and all leave the device before it runs. */
static void test_discarded_gradients_are_there_for_an_update_that_is_left(void) {
  enum { MORE = 200, FRAMES = OWN + MORE + 8, STEPS = 6 };
  gemini_config_t c = world_config(FRAMES, FRAMES, 0);
  c.placement = GEMINI_PLACEMENT_STATIC;
  c.static_param_fraction = c.static_optim_fraction = 1;
  model_t t = model_with(c);
  const gemini_arena_t more = world_arena(&t.w, GEMINI_KIND_OTHER, 1, "more", NULL, NULL);
  const gemini_tensor_t tensor = world_tensor(&t.w, more, "more", MORE * CHUNK);
  const gemini_access_t gradients = world_whole(t.arena[GRAD], 0, DEVICE);
  gemini_stream_t other;
  OK(gemini_stream_create(t.w.mgr, &other));
  for (uint64_t step = 0; step < STEPS; step++) {
    OK(gemini_iteration_begin(t.w.mgr));
    for (uint64_t unit = 0; unit < UNITS; unit++) op(&t, PARAM, unit, GEMINI_READ, 0, 100);
    for (uint64_t unit = UNITS; unit-- > 0;) op(&t, GRAD, unit, GEMINI_WRITE, step * UNITS + unit, 100);
    OK(gemini_update_wait(t.w.mgr));
    atomic_store(&spans_begun, 0);
    if (step + 1 == STEPS) fill_link(&t, tensor, MORE * CHUNK, other);
    OK(update(&t, LATE, (rule_t){ .salt = step }, 0, 0));
    plain_update(&t, step, 0, ELEMENTS);
    OK(gemini_discard(t.w.mgr, &gradients));
    if (step + 1 < STEPS) OK(gemini_iteration_end(t.w.mgr));
  }
  CHECK(plan_says(&t, "4 pieces on the device, 0 on the host"));
  CHECK_EQ(atomic_load(&spans_begun), 0); /* all are left */
  atomic_store(&link_gate, true);
  void *block;
  uint64_t bytes;
  OK(gemini_alloc(t.w.mgr, (FRAMES - 16) * CHUNK, t.w.stream, &block));
  OK(gemini_tier_bytes(t.w.mgr, &gradients, &bytes));
  CHECK_EQ(bytes, 0);
  CHECK_EQ(atomic_load(&spans_begun), 0);
  OK(gemini_free(t.w.mgr, block, t.w.stream));
  OK(gemini_update_wait(t.w.mgr));
  OK(gemini_iteration_end(t.w.mgr));
  OK(gemini_zero(t.w.mgr, &gradients)); /* they may be zeros already */
  memset(t.plain[GRAD], 0, (size_t)ELEMENTS * sizes[GRAD]);
  model_expect(&t, DEVICE);
  model_expect(&t, HOST);
  model_close(&t);
}

static uint64_t plan_evicted(const model_t *t) { return world_stats(&t->w).moved_chunks[LINK_D2H][GEMINI_REASON_PLAN]; }
/* States that the plan sends away after their updates on the device leave when their frames are needed, or as operators
 * of the next iteration end and the link has little to do. So some are still there after the updates, and leave as the
 * first operator ends. */
static void test_update_on_the_device_leaves_states_until_frames_are_needed(void) {
  gemini_config_t c = world_config(16, OWN + 8, 0);
  c.placement = GEMINI_PLACEMENT_AUTO;
  model_t t = model_with(c);
  for (uint64_t step = 0, checked = 0; checked < 2; step++) {
    CHECK(step < 16);
    const bool planned = step && plan_says(&t, "4 pieces on the device, 0 on the host");
    OK(gemini_iteration_begin(t.w.mgr));
    const uint64_t left = plan_evicted(&t);
    op(&t, PARAM, 0, GEMINI_READ, 0, 1000);
    if (planned && checked) CHECK(plan_evicted(&t) > left); /* as the update before was planned, too */
    checked += planned;
    for (uint64_t unit = 1; unit < UNITS; unit++) op(&t, PARAM, unit, GEMINI_READ, 0, 1000);
    for (uint64_t unit = UNITS; unit-- > 0;) op(&t, GRAD, unit, GEMINI_WRITE, step * UNITS + unit, 1000);
    OK(update(&t, LATE, (rule_t){ .salt = step, .host_us = 100000, .fills = true }, 0, 0));
    memset(t.plain[PARAM], (int)step, (size_t)ELEMENTS * sizes[PARAM]);
    OK(gemini_update_wait(t.w.mgr));
    OK(gemini_iteration_end(t.w.mgr));
  }
  model_expect(&t, DEVICE);
  model_expect(&t, HOST);
  model_close(&t);
}

/* A refused call has changed nothing, so it drops nothing. */
static void test_speculate_is_kept_where_an_arena_cannot_be_destroyed(void) {
  model_t t = model_of(8, OWN + NEW + 1, 1); /* a slot for the other arena */
  gemini_arena_t other = world_arena(&t.w, GEMINI_KIND_OTHER, 1, "other", 0, 0);
  gemini_tensor_t v = world_tensor(&t.w, other, "v", CHUNK);
  OK(update(&t, SPECULATE, (rule_t){ .salt = 5 }, 0, 0));
  gemini_access_t a = world_whole(v, GEMINI_READ, HOST);
  OK(gemini_acquire(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_arena_destroy(t.w.mgr, other), GEMINI_ERR_BUSY);
  OK(gemini_release(t.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  gemini_access_t pinned = world_part(v, 0, 64, 0, 0);
  OK(gemini_pin(t.w.mgr, &pinned));
  CHECK_STATUS(gemini_arena_destroy(t.w.mgr, other), GEMINI_ERR_BUSY);
  OK(gemini_unpin(t.w.mgr, &pinned));
  counted(&t, ELEMENTS, 0, 0);
  OK(update(&t, COMMIT, (rule_t){ .salt = 5 }, 0, 0));
  plain_update(&t, 5, 0, ELEMENTS);
  counted(&t, ELEMENTS, ELEMENTS, 0);
  OK(gemini_arena_destroy(t.w.mgr, other));
  model_expect(&t, HOST);
  model_close(&t);
}

/* The parameters of an operator wait for it where they are while pieces are left: what is queued behind their copies
 * would wait, too. */
static void test_parameters_leave_behind_the_states_of_pieces_that_are_left(void) {
  enum { MORE = 200 };
  gemini_config_t c = world_config(OWN + MORE + 8, OWN + MORE + 8, 0);
  c.placement = GEMINI_PLACEMENT_STATIC;
  c.static_param_fraction = 0;
  c.static_optim_fraction = 1;
  c.sim_d2h_bytes_per_s = UINT64_C(25) << 20;
  model_t t = model_with(c);
  const gemini_arena_t more = world_arena(&t.w, GEMINI_KIND_OTHER, 1, "more", NULL, NULL);
  const gemini_tensor_t tensor = world_tensor(&t.w, more, "more", MORE * CHUNK);
  uint64_t there[2] = { 0, 0 };
  for (uint64_t step = 100; step < 106; step++) {
    OK(gemini_iteration_begin(t.w.mgr));
    for (uint64_t unit = 0; unit < UNITS; unit++) {
      op(&t, PARAM, unit, GEMINI_READ, 0, 100);
      const gemini_access_t part = world_part(t.arena[PARAM], unit * CHUNK, 512, 0, DEVICE);
      uint64_t bytes;
      OK(gemini_tier_bytes(t.w.mgr, &part, &bytes));
      if (step == 105) there[unit == UNITS - 1] += bytes;
    }
    for (uint64_t unit = UNITS; unit-- > 0;) op(&t, GRAD, unit, GEMINI_WRITE, step * UNITS + unit, 100);
    OK(gemini_op_begin(t.w.mgr, "more", t.w.stream));
    gemini_access_t a = world_whole(tensor, GEMINI_WRITE, DEVICE); /* leaves behind it, which takes 0.5 s */
    OK(gemini_acquire(t.w.mgr, &a, 1, t.w.stream));
    OK(gemini_release(t.w.mgr, &a, 1, t.w.stream));
    OK(gemini_op_end(t.w.mgr));
    OK(update(&t, LATE, (rule_t){ .salt = step }, 0, 0));
    plain_update(&t, step, 0, ELEMENTS);
    OK(gemini_iteration_end(t.w.mgr));
  }
  CHECK_EQ(there[0], (UNITS - 1) * 512);
  CHECK_EQ(there[1], 0); /* no piece is left behind the last one */
  OK(gemini_update_wait(t.w.mgr));
  CHECK(plan_says(&t, "4 pieces on the device, 0 on the host"));
  model_expect(&t, DEVICE);
  model_expect(&t, HOST);
  CHECK_EQ(world_stats(&t.w).departures, 0);
  model_close(&t);
}

int main(void) {
  RUN(test_speculate_changes_nothing_until_the_commit);
  RUN(test_speculate_takes_and_gives_back_spare_memory);
  RUN(test_speculate_is_dropped_by_every_write);
  RUN(test_speculate_failures_are_the_updates_only_if_it_was_taken_over);
  RUN(test_speculate_memory_is_not_reused_too_early);
  RUN(test_speculate_makes_room_for_chunks);
  RUN(test_speculate_under_smaller_budgets);
  RUN(test_speculate_with_gradients_in_their_parameters_bytes);
  RUN(test_speculate_is_dropped_by_a_tensor_without_a_gradient);
  RUN(test_speculate_bad_flags_are_refused);
  RUN(test_speculate_clipped_steps_are_no_reason_to_undo_a_plan);
  RUN(test_speculate_is_planned_while_steps_take_it_over);
  RUN(test_speculate_is_planned_as_memory_allows);
  RUN(test_speculate_takes_the_slots_of_states_that_stay_on_the_device);
  RUN(test_speculate_leaves_the_slots_of_states_that_may_come_back);
  RUN(test_update_on_the_device_is_left_to_later_callers_while_the_link_is_full);
  RUN(test_parameters_leave_behind_the_states_of_pieces_that_are_left);
  RUN(test_update_on_the_device_leaves_states_until_frames_are_needed);
  RUN(test_discarded_gradients_are_there_for_an_update_that_is_left);
  RUN(test_speculate_random_programs_have_the_bits_of_plain_updates);
  RUN(test_speculate_is_kept_where_an_arena_cannot_be_destroyed);
  return check_done();
}
