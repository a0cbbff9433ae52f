/* Calls that fail in the middle of what they do: either nothing has changed, or the call was accepted and is done as a whole
 * later. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include "../check.h"
#include "gemini.h"
#include "world.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, BOTH = GEMINI_READ_WRITE };

/* ---- zero, and FREE */

/* A tensor of two chunks and a half in files, and a host on which every slot is acquired. */
typedef struct {
  world_t w;
  gemini_tensor_t t, next; /* next: what shares the third chunk */
  gemini_access_t held[4];
} crowded_t;
static crowded_t crowded_open(void) {
  crowded_t c = { .w = world_open(world_config(4, 4, 16)) };
  gemini_arena_t arena = world_arena(&c.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_arena_t other = world_arena(&c.w, GEMINI_KIND_OTHER, 1, "crowd", 0, 0);
  c.t = world_tensor(&c.w, arena, "t", 2 * W + W / 2);
  c.next = world_tensor(&c.w, arena, "next", W / 2);
  gemini_tensor_t crowd = world_tensor(&c.w, other, "crowd", 4 * W);
  for (uint64_t at = 0; at < 2 * W + W / 2; at += W / 2) world_fill(&c.w, c.t, at, W / 2, HOST, 5);
  world_fill(&c.w, c.next, 0, W / 2, HOST, 6);
  gemini_access_t down[2] = { world_whole(c.t, 0, FILES), world_whole(c.next, 0, FILES) };
  CHECK_OK(gemini_move(c.w.mgr, down, 2));
  for (int i = 0; i < 4; i++) c.held[i] = world_part(crowd, (uint64_t)i * W, W, BOTH, HOST);
  CHECK_OK(gemini_acquire(c.w.mgr, c.held, 4, GEMINI_STREAM_CALLER));
  return c;
}
static void crowded_close(crowded_t *c, uint64_t seed) {
  CHECK_OK(gemini_release(c->w.mgr, c->held, 4, GEMINI_STREAM_CALLER));
  CHECK(world_holds(&c->w, c->t, 0, 2 * W, seed));
  CHECK(world_holds(&c->w, c->t, 2 * W, W / 2, seed));
  CHECK(world_holds(&c->w, c->next, 0, W / 2, 6));
  world_close(&c->w);
}

static void test_zero_without_room_for_a_part_of_a_chunk_zeroes_nothing(void) {
  crowded_t c = crowded_open();
  gemini_access_t all = world_whole(c.t, 0, 0);
  CHECK_STATUS(gemini_zero(c.w.mgr, &all), GEMINI_ERR_OOM_HOST);
  crowded_close(&c, 5);
  c = crowded_open();
  CHECK_OK(gemini_release(c.w.mgr, &c.held[1], 1, GEMINI_STREAM_CALLER));
  all = world_whole(c.t, 0, 0);
  CHECK_OK(gemini_zero(c.w.mgr, &all)); /* one slot is enough */
  CHECK_OK(gemini_acquire(c.w.mgr, &c.held[1], 1, GEMINI_STREAM_CALLER));
  crowded_close(&c, 0);
}

static void test_free_without_room_for_a_part_of_a_chunk_frees_nothing(void) {
  crowded_t c = crowded_open();
  CHECK_STATUS(gemini_tensor_state_set(c.w.mgr, c.t, GEMINI_STATE_FREE), GEMINI_ERR_OOM_HOST);
  CHECK_EQ(world_tensor_info(&c.w, c.t).state, GEMINI_STATE_HOLD);
  crowded_close(&c, 5);
}

/* Gradients are zeroed tensor by tensor, and the arena that reuses goes only when all of them could be. */
static void test_gradients_that_cannot_all_be_zeroed_stay(void) {
  world_t w = world_open(world_config(4, 4, 16));
  gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "grads", 0, params);
  gemini_arena_t other = world_arena(&w, GEMINI_KIND_OTHER, 1, "crowd", 0, 0);
  gemini_tensor_t crowd = world_tensor(&w, other, "crowd", 4 * W), p[3], g[3];
  const uint64_t sizes[] = { 2 * W, W / 2, W + W / 2 };
  for (int i = 0; i < 3; i++) {
    char name[16];
    snprintf(name, sizeof name, "p%d", i);
    p[i] = world_tensor(&w, params, name, sizes[i]);
    CHECK_OK(gemini_tensor_counterpart(w.mgr, p[i], grads, &g[i]));
    world_fill(&w, i == 1 ? p[i] : g[i], 0, sizes[i], HOST, 10 + (uint64_t)i); /* p1 stays a parameter */
    gemini_access_t down = world_whole(i == 1 ? p[i] : g[i], 0, FILES);
    CHECK_OK(gemini_move(w.mgr, &down, 1));
  }
  gemini_access_t held[4], all = world_whole(grads, 0, 0);
  for (int i = 0; i < 4; i++) held[i] = world_part(crowd, (uint64_t)i * W, W, BOTH, HOST);
  CHECK_OK(gemini_acquire(w.mgr, held, 4, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_zero(w.mgr, &all), GEMINI_ERR_OOM_HOST);
  CHECK_STATUS(gemini_arena_destroy(w.mgr, grads), GEMINI_ERR_OOM_HOST);
  CHECK_OK(gemini_release(w.mgr, held, 4, GEMINI_STREAM_CALLER));
  for (int i = 0; i < 3; i++)
    for (uint64_t at = 0; at < sizes[i]; at += W / 2)
      CHECK(world_holds(&w, i == 1 ? p[i] : g[i], at, W / 2, 10 + (uint64_t)i));
  CHECK_OK(gemini_zero(w.mgr, &all));
  CHECK(world_holds(&w, p[1], 0, sizes[1], 11));
  CHECK(world_holds(&w, g[0], 0, W, 0) && world_holds(&w, g[2], W, W / 2, 0));
  CHECK_OK(gemini_arena_destroy(w.mgr, grads));
  CHECK(world_holds(&w, p[1], 0, sizes[1], 11));
  world_close(&w);
}

/* ---- updates */

/* Parameters of three chunks that are pinned to the device, their gradients in the same bytes, and fp32 states. The device
 * has room for the parameters and for the states of one piece, two chunks, which make room for the next piece's by going to
 * the host. */
enum { PARAM_BYTES = 3 * 65536, COUNT = PARAM_BYTES / 2 };
typedef struct {
  world_t w;
  gemini_arena_t params, grads, master;
  gemini_tensor_t p, g;
  gemini_access_t crowd[4]; /* takes what the host has free, while the first piece is queued */
  int calls;
} pinned_t;

static void step(void *user) { /* master += gradient, param = master */
  gemini_update_span_t *s = user;
  const uint16_t *g = s->ptr[0];
  uint16_t *p = s->ptr[1];
  uint32_t *m = s->ptr[2];
  for (uint64_t i = 0; i < s->element_count; i++) {
    m[i] += g[i];
    p[i] = (uint16_t)m[i];
  }
  free(s);
}
static void span(void *user, const gemini_update_span_t *span) {
  pinned_t *x = user;
  gemini_update_span_t *copy = malloc(sizeof *copy);
  CHECK(copy);
  *copy = *span;
  if (span->tier == HOST) step(copy);
  else CHECK_OK(gemini_stream_call(x->w.mgr, span->stream, step, copy));
  if (x->calls++ == 0) CHECK_OK(gemini_acquire(x->w.mgr, x->crowd, 4, GEMINI_STREAM_CALLER));
}

static uint32_t master_at(uint64_t i) { return (uint32_t)(i * 7 + 3); }
static uint16_t grad_at(uint64_t i) { return (uint16_t)(i % 251); }

static gemini_status_t update(pinned_t *x, uint32_t flags) {
  gemini_arena_t arenas[] = { x->grads, x->params, x->master };
  const uint32_t modes[] = { READ, WRITE, BOTH };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = flags;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 3;
  u.fn = span;
  u.user = x;
  return gemini_update(x->w.mgr, &u);
}

/* Every element was updated once, and once only. */
static void check_updated(pinned_t *x) {
  gemini_access_t p = world_whole(x->p, READ, DEVICE);
  CHECK_OK(gemini_acquire(x->w.mgr, &p, 1, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < COUNT; i++) CHECK_EQ(((const uint16_t *)p.ptr)[i], (uint16_t)(master_at(i) + grad_at(i)));
  CHECK_OK(gemini_release(x->w.mgr, &p, 1, GEMINI_STREAM_CALLER));
  for (uint64_t at = 0; at < 2 * PARAM_BYTES; at += W) {
    gemini_access_t m = world_part(x->master, at, W, READ, HOST);
    CHECK_OK(gemini_acquire(x->w.mgr, &m, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < W / 4; i++)
      CHECK_EQ(((const uint32_t *)m.ptr)[i], master_at(at / 4 + i) + grad_at(at / 4 + i));
    CHECK_OK(gemini_release(x->w.mgr, &m, 1, GEMINI_STREAM_CALLER));
  }
}

/* There is no room for the second piece of a tensor of three. The update was accepted: nobody sees half of it, and it
 * goes on where it was. */
static void test_update_that_cannot_go_on_is_done_as_a_whole_later(void) {
  for (int late = 0; late < 2; late++) {
    pinned_t *x = calloc(1, sizeof *x);
    CHECK(x);
    x->w = world_open(world_config(5, 8, 0));
    x->params = world_arena(&x->w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
    x->grads = world_arena(&x->w, GEMINI_KIND_GRAD, 2, "grads", 0, x->params);
    x->master = world_arena(&x->w, GEMINI_KIND_MASTER, 4, "master", x->params, 0);
    x->p = world_tensor(&x->w, x->params, "p", PARAM_BYTES);
    CHECK_OK(gemini_tensor_counterpart(x->w.mgr, x->p, x->grads, &x->g));
    for (uint64_t at = 0; at < 2 * PARAM_BYTES; at += W) {
      gemini_access_t m = world_part(x->master, at, W, WRITE, HOST);
      CHECK_OK(gemini_acquire(x->w.mgr, &m, 1, GEMINI_STREAM_CALLER));
      for (uint64_t i = 0; i < W / 4; i++) ((uint32_t *)m.ptr)[i] = master_at(at / 4 + i);
      CHECK_OK(gemini_release(x->w.mgr, &m, 1, GEMINI_STREAM_CALLER));
    }
    gemini_access_t g = world_whole(x->g, WRITE, DEVICE), pin = world_whole(x->params, 0, DEVICE), p;
    CHECK_OK(gemini_acquire(x->w.mgr, &g, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < COUNT; i++) ((uint16_t *)g.ptr)[i] = grad_at(i);
    CHECK_OK(gemini_release(x->w.mgr, &g, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_pin(x->w.mgr, &pin));
    gemini_tensor_t crowd =
        world_tensor(&x->w, world_arena(&x->w, GEMINI_KIND_OTHER, 1, "crowd", 0, 0), "crowd", 4 * W);
    for (int i = 0; i < 4; i++) x->crowd[i] = world_part(crowd, (uint64_t)i * W, W, READ, HOST);

    CHECK_STATUS(update(x, late ? GEMINI_UPDATE_LATE : 0), late ? GEMINI_OK : GEMINI_ERR_PENDING);
    CHECK(world_stats(&x->w).pending_updates >= 2); /* the other two pieces */
    CHECK_EQ(x->calls, 1);
    CHECK_STATUS(gemini_update_wait(x->w.mgr), GEMINI_ERR_OOM_HOST);
    CHECK_SAYS(world_error().message, "2 parts of updates are pending");
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) { /* neither half a gradient nor half a parameter */
      p = world_whole(x->p, READ, tier);
      CHECK_STATUS(gemini_acquire(x->w.mgr, &p, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_HOST);
      p = world_whole(x->g, READ, tier);
      CHECK_STATUS(gemini_acquire(x->w.mgr, &p, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
    }
    CHECK_EQ(x->calls, 1);
    CHECK_OK(gemini_release(x->w.mgr, x->crowd, 4, GEMINI_STREAM_CALLER));
    if (late) check_updated(x); /* whoever wants it has it updated */
    CHECK_OK(gemini_update_wait(x->w.mgr));
    CHECK_EQ(world_stats(&x->w).pending_updates, 0);
    CHECK_EQ(x->calls, 3);
    check_updated(x);
    CHECK_OK(gemini_unpin(x->w.mgr, &pin));
    world_close(&x->w);
    free(x);
  }
}

/* One chunk of the update is pinned, so that it is done on the device, where its chunks do not all fit beside each other. The
 * first of them stay there when it cannot go on; they are used by nobody before it is done. They come again and again, as it
 * matters whether their copies have been done at once. */
static void count_span(void *user, const gemini_update_span_t *span) {
  (void)span;
  ++*(int *)user;
}
static void test_chunks_of_an_update_that_waits_are_not_used_before_it(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t wide = world_arena(&w, GEMINI_KIND_OTHER, 4, "wide", 0, 0);
  gemini_arena_t narrow = world_arena(&w, GEMINI_KIND_OTHER, 1, "narrow", wide, 0);
  gemini_tensor_t t = world_tensor(&w, wide, "t", 4 * W);
  gemini_tensor_t crowd = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "crowd", 0, 0), "crowd", 3 * W);
  gemini_access_t pin = world_part(t, 0, W, 0, DEVICE), second = world_part(t, W, W, READ, DEVICE);
  gemini_access_t evicts = world_whole(crowd, READ, DEVICE);
  CHECK_OK(gemini_pin(w.mgr, &pin));
  gemini_arena_t arenas[] = { wide, narrow };
  const uint32_t modes[] = { BOTH, READ };
  int calls = 0;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 2;
  u.fn = count_span;
  u.user = &calls;
  CHECK_OK(gemini_update(w.mgr, &u));
  CHECK_EQ(world_stats(&w).pending_updates, 1);
  for (int i = 0; i < 3000; i++) {
    CHECK_STATUS(gemini_acquire(w.mgr, &second, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
    CHECK_STATUS(gemini_acquire(w.mgr, &second, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
    CHECK_OK(gemini_acquire(w.mgr, &evicts, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_release(w.mgr, &evicts, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_EQ(calls, 0);
  CHECK_OK(gemini_unpin(w.mgr, &pin));
  CHECK_OK(gemini_acquire(w.mgr, &second, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(calls, 4); /* on the host: a span lies in one chunk of each arena */
  CHECK_OK(gemini_release(w.mgr, &second, 1, GEMINI_STREAM_CALLER));
  world_close(&w);
}

/* A thread is in the callback of an update on the device, and another one waits for all updates meanwhile, or zeroes the
 * chunk. */
typedef struct {
  world_t w;
  gemini_access_t chunk;
  bool zeroes;
  sem_t began, waited;
  atomic_bool ended;
} called_t;
static void slow_span(void *user, const gemini_update_span_t *span) {
  called_t *c = user;
  CHECK_EQ(span->tier, DEVICE);
  CHECK_EQ(sem_post(&c->began), 0);
  struct timespec end; /* time for the other one to be wrong in */
  CHECK_EQ(clock_gettime(CLOCK_REALTIME, &end), 0);
  end.tv_nsec += 200000000;
  end.tv_sec += end.tv_nsec / 1000000000;
  end.tv_nsec %= 1000000000;
  (void)sem_timedwait(&c->waited, &end);
  atomic_store(&c->ended, true);
}
static void *wait_for_updates(void *user) {
  called_t *c = user;
  CHECK_EQ(sem_wait(&c->began), 0);
  CHECK_OK(c->zeroes ? gemini_zero(c->w.mgr, &c->chunk) : gemini_update_wait(c->w.mgr));
  CHECK(atomic_load(&c->ended));
  if (!c->zeroes) CHECK_EQ(world_stats(&c->w).pending_updates, 0);
  CHECK_EQ(sem_post(&c->waited), 0);
  return NULL;
}
static void check_called(bool zeroes) {
  called_t c = { .w = world_open(world_config(4, 8, 0)), .zeroes = zeroes };
  CHECK(!sem_init(&c.began, 0, 0) && !sem_init(&c.waited, 0, 0));
  gemini_arena_t arena = world_arena(&c.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  c.chunk = world_whole(world_tensor(&c.w, arena, "t", W), 0, DEVICE);
  CHECK_OK(gemini_pin(c.w.mgr, &c.chunk));
  const uint32_t mode = BOTH;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.fn = slow_span;
  u.user = &c;
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, wait_for_updates, &c), 0);
  CHECK_OK(gemini_update(c.w.mgr, &u));
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK_OK(gemini_unpin(c.w.mgr, &c.chunk));
  world_close(&c.w);
  CHECK(!sem_destroy(&c.began) && !sem_destroy(&c.waited));
}
static void test_update_whose_callback_runs_is_not_done(void) { check_called(false); }
static void test_chunk_of_an_update_whose_callback_runs_is_not_acquired(void) { check_called(true); }

/* ---- contents */

/* A parameter and its gradient have the same bytes: one batch writes the one or the other, and an update that reads the
 * parameter cannot have a zero gradient in its place. */
static void test_parameter_and_gradient_are_not_used_at_once(void) {
  world_t w = world_open(world_config(6, 8, 0));
  gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "grads", 0, params);
  gemini_tensor_t p = world_tensor(&w, params, "p", 2 * W), g, q = world_tensor(&w, params, "q", W);
  CHECK_OK(gemini_tensor_counterpart(w.mgr, p, grads, &g));
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    world_fill(&w, p, 0, 2 * W, tier, 3);
    for (int order = 0; order < 2; order++) {
      gemini_access_t both[3] = { world_whole(order ? p : g, WRITE, tier), world_whole(q, WRITE, tier),
                                  world_whole(order ? g : p, WRITE, tier) };
      CHECK_STATUS(gemini_acquire(w.mgr, both, 3, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
      CHECK_SAYS(world_error().message, "share their bytes");
      CHECK(world_holds(&w, p, 0, 2 * W, 3));
      CHECK_OK(gemini_acquire(w.mgr, both, 1, GEMINI_STREAM_CALLER)); /* alone either can be written */
      memset(both[0].ptr, 0, 2 * W);
      CHECK_OK(gemini_release(w.mgr, both, 1, GEMINI_STREAM_CALLER));
      world_fill(&w, p, 0, 2 * W, tier, 3);
    }
  }
  gemini_arena_t arenas[] = { params, grads };
  for (uint32_t mode = READ; mode <= BOTH; mode += 2) {
    const uint32_t modes[] = { mode, READ };
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = arenas;
    u.modes = modes;
    u.arena_count = 2;
    u.fn = span;
    CHECK_STATUS(gemini_update(w.mgr, &u), GEMINI_ERR_STATE);
    CHECK(world_holds(&w, p, 0, 2 * W, 3));
  }
  world_close(&w);
}

/* ---- load */

/* The library reads callers' files by this pread() instead of libc's. Before read number middle_read of the file
 * middle_fd, counted from 0, it calls middle: other calls come in the middle of a load. */
static atomic_int middle_fd = -1;
static int middle_read, reads;
static void (*middle)(void);
ssize_t pread(int fd, void *bytes, size_t size, off_t offset) {
  if (fd == atomic_load(&middle_fd) && reads++ == middle_read) middle();
  return syscall(SYS_pread64, fd, bytes, size, offset);
}
static int file_of(uint64_t size, uint64_t seed) {
  int fd = memfd_create("test", MFD_CLOEXEC);
  uint8_t *bytes = malloc(size);
  CHECK(fd >= 0 && bytes);
  world_write(bytes, 0, size, seed);
  CHECK_EQ(write(fd, bytes, size), size);
  free(bytes);
  return fd;
}

/* A tensor larger than the host, and a small one that shares its last chunk: all calls that use that chunk, while the
 * load is elsewhere in its range. */
static struct {
  world_t w;
  gemini_arena_t arena;
  gemini_tensor_t t, next;
  uint32_t tier; /* where next is */
} beside;
static gemini_status_t beside_acquire(uint32_t mode, uint32_t tier) {
  gemini_access_t a = world_whole(beside.next, mode, tier);
  gemini_status_t status = gemini_acquire(beside.w.mgr, &a, 1, GEMINI_STREAM_CALLER);
  if (!status) CHECK_OK(gemini_release(beside.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  return status;
}
static void calls_beside(gemini_status_t expected) {
  gemini_access_t next = world_whole(beside.next, 0, DEVICE);
  for (uint32_t mode = READ; mode <= BOTH; mode++)
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) CHECK_STATUS(beside_acquire(mode, tier), expected);
  CHECK_STATUS(gemini_pin(beside.w.mgr, &next), expected);
  if (!expected) CHECK_OK(gemini_unpin(beside.w.mgr, &next));
  int fd = file_of(W / 2, 6);
  CHECK_STATUS(gemini_store(beside.w.mgr, &next, fd, 0), expected);
  CHECK_STATUS(gemini_load(beside.w.mgr, &next, fd, 0), expected);
  CHECK(!close(fd));
  if (!expected) return;
  const uint32_t mode = READ;
  int calls = 0;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &beside.arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.first_element = 9 * W + W / 2;
  u.element_count = W / 2;
  u.fn = count_span;
  u.user = &calls;
  CHECK_STATUS(gemini_update(beside.w.mgr, &u), expected);
  CHECK_EQ(calls, 0);
  CHECK_STATUS(gemini_zero(beside.w.mgr, &next), expected);
  CHECK_STATUS(gemini_tensor_state_set(beside.w.mgr, beside.next, GEMINI_STATE_FREE), expected);
  CHECK_STATUS(gemini_arena_destroy(beside.w.mgr, beside.arena), expected);
}
static void busy_beside(void) { calls_beside(GEMINI_ERR_BUSY); }
static void leave_beside(void) { /* nothing keeps the claimed chunk where it is */
  gemini_access_t next = world_whole(beside.next, 0, FILES);
  if (beside.tier == HOST) CHECK_OK(gemini_move(beside.w.mgr, &next, 1));
  calls_beside(GEMINI_ERR_BUSY);
}
static void test_load_is_not_busy_once_it_has_changed_a_byte(void) {
  int fd = file_of(10 * W, 8);
  for (int read = 0; read < 10; read += (int)check_stride()) {
    for (uint32_t tier = DEVICE; tier <= FILES; tier++) {
      beside.w = world_open(world_config(4, 6, 32));
      beside.tier = tier;
      beside.arena = world_arena(&beside.w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
      beside.t = world_tensor(&beside.w, beside.arena, "t", 9 * W + W / 2);
      beside.next = world_tensor(&beside.w, beside.arena, "next", W / 2);
      for (uint64_t at = 0; at < 9 * W + W / 2; at += W / 2) world_fill(&beside.w, beside.t, at, W / 2, HOST, 5);
      world_fill(&beside.w, beside.next, 0, W / 2, tier == DEVICE ? DEVICE : HOST, 6);
      gemini_access_t all = world_whole(beside.t, 0, 0), next = world_whole(beside.next, 0, FILES);
      if (tier == FILES) CHECK_OK(gemini_move(beside.w.mgr, &next, 1));
      reads = 0;
      middle_read = read;
      middle = read % 2 && read < 9 ? leave_beside : busy_beside;
      atomic_store(&middle_fd, fd);
      CHECK_OK(gemini_load(beside.w.mgr, &all, fd, 0));
      atomic_store(&middle_fd, -1);
      CHECK_EQ(reads, 10);
      for (uint64_t at = 0; at < 9 * W + W / 2; at += W / 2) CHECK(world_holds(&beside.w, beside.t, at, W / 2, 8));
      CHECK(world_holds(&beside.w, beside.next, 0, W / 2, 6));
      calls_beside(GEMINI_OK);
      world_close(&beside.w);
    }
  }
  CHECK(!close(fd));
}

/* The claims of a load that is refused, or whose reading fails, end with it. */
static void test_load_that_fails_leaves_its_range_usable(void) {
  world_t w = world_open(world_config(4, 6, 32));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 4 * W);
  world_fill(&w, t, 0, 4 * W, HOST, 5);
  gemini_access_t all = world_whole(t, 0, 0), last = world_part(t, 3 * W, W, READ, DEVICE);
  int fd = file_of(2 * W, 8);
  CHECK_OK(gemini_acquire(w.mgr, &last, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_load(w.mgr, &all, fd, 0), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_release(w.mgr, &last, 1, GEMINI_STREAM_CALLER));
  for (uint64_t at = 0; at < 4 * W; at += W) world_fill(&w, t, at, W, at % (2 * W) ? DEVICE : HOST, 5);
  CHECK_STATUS(gemini_load(w.mgr, &all, fd, 0), GEMINI_ERR_FORMAT); /* in the third chunk */
  CHECK(world_holds(&w, t, 0, 2 * W, 8) && world_holds(&w, t, 2 * W, 2 * W, 5));
  for (uint64_t at = 0; at < 4 * W; at += W) world_fill(&w, t, at, W, at % (2 * W) ? DEVICE : HOST, 5);
  CHECK(!close(fd));
  world_close(&w);
}

static void test_load_that_does_not_fit_loads_nothing(void) {
  char path[] = "/tmp/gemini-test.XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && !unlink(path));
  world_t w = world_open(world_config(4, 4, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 5 * W);
  for (uint64_t i = 0; i < 5 * W; i += 4) CHECK_EQ(pwrite(fd, &(uint32_t){ 7 }, 4, (off_t)i), 4);
  world_fill(&w, t, 0, W, DEVICE, 4);
  gemini_access_t all = world_whole(t, 0, 0), most = world_part(t, W, 4 * W, 0, 0);
  CHECK_STATUS(gemini_load(w.mgr, &all, fd, 0), GEMINI_ERR_OOM_HOST);
  CHECK(world_holds(&w, t, 0, W, 4) && world_holds(&w, t, W, W, 0));
  gemini_access_t up = world_part(t, 0, W, 0, DEVICE);
  CHECK_OK(gemini_move(w.mgr, &up, 1));
  CHECK_OK(gemini_load(w.mgr, &most, fd, 0));
  CHECK(!close(fd));
  world_close(&w);
}

/* The second chunk of the range waits for an update, which cannot be done: a chunk of it is pinned to the device, where the
 * others do not fit beside it. */
static void test_load_of_a_chunk_whose_update_waits_loads_nothing(void) {
  char path[] = "/tmp/gemini-test.XXXXXX";
  int fd = mkstemp(path);
  CHECK(fd >= 0 && !unlink(path));
  world_t w = world_open(world_config(3, 8, 0));
  gemini_arena_t wide = world_arena(&w, GEMINI_KIND_OTHER, 4, "wide", 0, 0);
  gemini_arena_t narrow = world_arena(&w, GEMINI_KIND_OTHER, 1, "narrow", wide, 0);
  gemini_tensor_t t = world_tensor(&w, wide, "t", 4 * W);
  for (uint64_t i = 0; i < 2 * W; i += 4) CHECK_EQ(pwrite(fd, &(uint32_t){ 7 }, 4, (off_t)i), 4);
  world_fill(&w, t, 0, W, HOST, 4);
  gemini_access_t pin = world_part(t, 3 * W, W, 0, DEVICE), range = world_part(t, 0, 2 * W, 0, 0);
  CHECK_OK(gemini_pin(w.mgr, &pin));
  gemini_arena_t arenas[] = { wide, narrow };
  const uint32_t modes[] = { BOTH, READ };
  int calls = 0;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 2;
  u.first_element = W / 4;
  u.element_count = 3 * W / 4;
  u.fn = count_span;
  u.user = &calls;
  CHECK_OK(gemini_update(w.mgr, &u));
  CHECK_STATUS(gemini_load(w.mgr, &range, fd, 0), GEMINI_ERR_OOM_DEVICE);
  CHECK(world_holds(&w, t, 0, W, 4));
  CHECK_OK(gemini_unpin(w.mgr, &pin));
  CHECK_OK(gemini_load(w.mgr, &range, fd, 0));
  CHECK_EQ(calls, 3); /* before the bytes of the file came */
  CHECK(!close(fd));
  world_close(&w);
}

/* ---- checkpoints */
static void test_checkpoint_without_room_is_oom_file(void) {
  char dir[64], path[128];
  dir_make(dir);
  gemini_config_t c = world_config(4, 8, 16);
  c.file_dir = dir;
  c.checkpoint_name = "run";
  world_t w = world_open(c);
  gemini_tensor_t t = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0), "t", 6 * W);
  world_fill(&w, t, 0, 6 * W, HOST, 4);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_FILE, 4 * W));
  gemini_access_t some = world_part(t, 0, 4 * W, 0, FILES);
  CHECK_OK(gemini_move(w.mgr, &some, 1));
  some.tier = HOST;
  CHECK_OK(gemini_move(w.mgr, &some, 1)); /* in both now: such blocks give way, but for a checkpoint */
  CHECK_STATUS(gemini_checkpoint(w.mgr), GEMINI_ERR_OOM_FILE);
  CHECK(world_holds(&w, t, 0, 6 * W, 4));
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_FILE, 6 * W));
  CHECK_OK(gemini_checkpoint(w.mgr));
  world_close(&w);
  for (int i = 0; i < 2; i++) {
    snprintf(path, sizeof path, "%s/%s", dir, i ? "run.index" : "run.0.chunks");
    CHECK_EQ(unlink(path), 0);
  }
  CHECK_EQ(rmdir(dir), 0);
}

/* ---- an operator that could not begin, while another thread's updates come */
static gemini_arena_t updated;
static _Atomic bool over; /* Atomic: tells the other thread to end */
static void nothing(void *user, const gemini_update_span_t *span) { (void)user, (void)span; }
static void *updates(void *user) {
  const uint32_t mode = BOTH;
  while (!atomic_load(&over)) {
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.arenas = &updated;
    u.modes = &mode;
    u.arena_count = 1;
    u.fn = nothing;
    u.flags = GEMINI_UPDATE_LATE;
    CHECK_OK(gemini_update(((world_t *)user)->mgr, &u));
    nanosleep(&(struct timespec){ 0, 20000 }, NULL);
  }
  return NULL;
}
static void test_an_operator_that_could_not_begin_leaves_updates_behind_the_one_before(void) {
  world_t w = world_open(world_config(4, 32, 0));
  gemini_tensor_t large = world_tensor(&w, world_arena(&w, GEMINI_KIND_PARAM, 4, "large", 0, 0), "large", 8 * W);
  updated = world_arena(&w, GEMINI_KIND_OTHER, 4, "updated", 0, 0);
  (void)world_tensor(&w, updated, "small", 1024);
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, updates, &w));
  const uint32_t iterations = check_repetitions(2000);
  for (uint32_t i = 0; i < iterations; i++) {
    CHECK_OK(gemini_iteration_begin(w.mgr));
    if (i % 2) {
      CHECK_OK(gemini_op_begin(w.mgr, "first", w.stream));
      CHECK_OK(gemini_op_end(w.mgr));
    }
    gemini_access_t all = world_whole(large, BOTH, DEVICE);
    CHECK_STATUS(gemini_op_begin_with(w.mgr, "second", w.stream, &all, 1), GEMINI_ERR_OOM_DEVICE);
    CHECK_OK(gemini_iteration_end(w.mgr));
  }
  atomic_store(&over, true);
  CHECK(!pthread_join(thread, NULL));
  CHECK_EQ(world_stats(&w).iterations, iterations);
  world_close(&w);
}

int main(void) {
  RUN(test_zero_without_room_for_a_part_of_a_chunk_zeroes_nothing);
  RUN(test_free_without_room_for_a_part_of_a_chunk_frees_nothing);
  RUN(test_gradients_that_cannot_all_be_zeroed_stay);
  RUN(test_update_that_cannot_go_on_is_done_as_a_whole_later);
  RUN(test_chunks_of_an_update_that_waits_are_not_used_before_it);
  RUN(test_update_whose_callback_runs_is_not_done);
  RUN(test_chunk_of_an_update_whose_callback_runs_is_not_acquired);
  RUN(test_parameter_and_gradient_are_not_used_at_once);
  RUN(test_load_is_not_busy_once_it_has_changed_a_byte);
  RUN(test_load_that_fails_leaves_its_range_usable);
  RUN(test_load_that_does_not_fit_loads_nothing);
  RUN(test_load_of_a_chunk_whose_update_waits_loads_nothing);
  RUN(test_checkpoint_without_room_is_oom_file);
  RUN(test_an_operator_that_could_not_begin_leaves_updates_behind_the_one_before);
  return check_done();
}
