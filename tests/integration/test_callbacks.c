/* Calls of other threads while an update's callback for the device runs, in the middle of a call: they see what the update makes,
 * and the call that it runs in finds what it has looked at as it was. Only gemini.h. SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "world.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FRAMES = 8 };
enum { READ = GEMINI_READ, BOTH = GEMINI_READ_WRITE };

/* "main" is pinned, so that its pieces run on the device, and "state" is like it. While the crowd has all other frames, an update
 * is accepted and waits. The first callback of update number meet from element meet_at on starts other() in a thread, and goes on
 * when that waits, or has come to its end. */
typedef struct {
  world_t w;
  gemini_arena_t arenas[2], extra;
  gemini_tensor_t main, state, crowd;
  gemini_access_t pin, held;
  void (*other)(void *scene);
  pthread_t thread;
  atomic_bool started, ended;
  bool joined;
  gemini_status_t status; /* of other()'s call */
  int meet, seen;
  uint64_t meet_at;
} scene_t;

static void *run_other(void *user) {
  scene_t *s = user;
  s->other(s);
  atomic_store(&s->ended, true);
  return NULL;
}
static bool somebody_waits(scene_t *s) {
  static char text[65536];
  CHECK_OK(gemini_manager_dump(s->w.mgr, sizeof text, text, NULL));
  for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
    if (!strncmp(line, "waits: ", 7) && strstr(line, "for the caller's update callback")) s->seen++;
  return s->seen > 1; /* the caller itself is in its callback, too */
}
static void add_one(void *bytes) {
  for (uint64_t i = 0; i < W; i++) ((uint8_t *)bytes)[i]++;
}
typedef struct {
  scene_t *s;
  int number;
} mark_t;
static void span(void *user, const gemini_update_span_t *span) {
  mark_t *mark = user;
  scene_t *s = mark->s;
  if (mark->number == s->meet && span->first_element == s->meet_at && !atomic_exchange(&s->started, true)) {
    CHECK_EQ(pthread_create(&s->thread, NULL, run_other, s), 0);
    for (s->seen = 0; !somebody_waits(s) && !atomic_load(&s->ended); s->seen = 0)
      nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
  }
  if (span->tier == HOST) add_one(span->ptr[0]);
  else CHECK_OK(gemini_stream_call(s->w.mgr, span->stream, add_one, span->ptr[0]));
}
static void update(scene_t *s, mark_t *mark, uint32_t flags) {
  const uint32_t modes[] = { BOTH, READ };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = flags;
  u.arenas = s->arenas, u.modes = modes, u.arena_count = 2;
  u.fn = span, u.user = mark;
  CHECK_OK(gemini_update(s->w.mgr, &u));
}

static void scene_open(scene_t *s, uint32_t pieces, void (*other)(void *scene), int meet) {
  memset(s, 0, sizeof *s);
  s->other = other;
  s->meet = meet;
  s->w = world_open(world_config(FRAMES, 2 * FRAMES, 0));
  s->arenas[0] = world_arena(&s->w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  s->arenas[1] = world_arena(&s->w, GEMINI_KIND_OTHER, 1, "state", s->arenas[0], 0);
  s->main = world_tensor(&s->w, s->arenas[0], "main", pieces * W);
  CHECK_OK(gemini_tensor_counterpart(s->w.mgr, s->main, s->arenas[1], &s->state));
  s->crowd =
      world_tensor(&s->w, world_arena(&s->w, GEMINI_KIND_OTHER, 1, "crowd", 0, 0), "crowd", (FRAMES - pieces) * W);
  s->pin = world_whole(s->main, 0, DEVICE);
  CHECK_OK(gemini_pin(s->w.mgr, &s->pin));
}
static void crowd_comes(scene_t *s) {
  s->held = world_whole(s->crowd, READ, DEVICE);
  CHECK_OK(gemini_acquire(s->w.mgr, &s->held, 1, GEMINI_STREAM_CALLER));
}
static void crowd_goes(scene_t *s) { CHECK_OK(gemini_release(s->w.mgr, &s->held, 1, GEMINI_STREAM_CALLER)); }
static uint8_t byte_at(scene_t *s, gemini_tensor_t t, uint64_t at, uint32_t tier) {
  gemini_access_t a = world_part(t, at, 1, READ, tier);
  CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  uint8_t byte = *(const uint8_t *)a.ptr;
  CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  return byte;
}
static void other_ends(scene_t *s) {
  CHECK(atomic_load(&s->started)); /* or the test has looked at nothing */
  if (!s->joined) CHECK_EQ(pthread_join(s->thread, NULL), 0);
  s->joined = true;
}
static void scene_close(scene_t *s, uint32_t pieces, uint8_t want) {
  other_ends(s);
  CHECK_OK(gemini_update_wait(s->w.mgr));
  CHECK_EQ(world_stats(&s->w).pending_updates, 0);
  CHECK_OK(gemini_unpin(s->w.mgr, &s->pin));
  for (uint32_t i = 0; i < pieces; i++) CHECK_EQ(byte_at(s, s->main, i * W, DEVICE), want);
  gemini_access_t down = world_whole(s->main, 0, HOST);
  CHECK_OK(gemini_move(s->w.mgr, &down, 1)); /* a copy that is not known to be written would go without a copy of it */
  for (uint32_t i = 0; i < pieces; i++) CHECK_EQ(byte_at(s, s->main, i * W, HOST), want);
  world_close(&s->w);
}

static void read_on_host(void *scene) {
  scene_t *s = scene;
  CHECK_EQ(byte_at(s, s->main, 0, HOST), 1);
}
static void read_on_device(void *scene) {
  scene_t *s = scene;
  CHECK_EQ(byte_at(s, s->main, 0, DEVICE), 1);
}
static void test_a_reader_sees_the_update_whose_callback_runs(void) {
  void (*const readers[])(void *) = { read_on_host, read_on_device };
  for (int i = 0; i < 2; i++) {
    scene_t s;
    mark_t mark = { &s, 1 };
    scene_open(&s, 1, readers[i], 1);
    update(&s, &mark, 0);
    scene_close(&s, 1, 1);
  }
}

static void wait_for_updates(void *scene) {
  scene_t *s = scene;
  CHECK_OK(gemini_update_wait(s->w.mgr));
  CHECK(byte_at(s, s->main, 0, DEVICE) >= 1); /* of two updates, the one whose callback ran is done */
}
/* An update is left; the next one's call, or a read, runs it first, and is in its callback when another thread comes. */
static void test_a_piece_runs_once_whoever_comes_in_its_callback(void) {
  for (uint32_t pieces = 1; pieces <= 3; pieces++) {
    for (int by_read = 0; by_read < 2; by_read++) {
      scene_t s;
      mark_t first = { &s, 1 }, second = { &s, 2 };
      scene_open(&s, pieces, wait_for_updates, 1);
      crowd_comes(&s);
      update(&s, &first, GEMINI_UPDATE_LATE);
      CHECK_EQ(world_stats(&s.w).pending_updates, pieces);
      crowd_goes(&s);
      if (by_read) CHECK_EQ(byte_at(&s, s.main, 0, DEVICE), 1);
      else update(&s, &second, GEMINI_UPDATE_LATE);
      scene_close(&s, pieces, by_read ? 1 : 2);
    }
  }
}

static void write_state(void *scene) {
  scene_t *s = scene;
  gemini_access_t a = world_part(s->state, W, W, BOTH, DEVICE);
  CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  memset(a.ptr, 9, W);
  CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static void test_zero_forgets_nothing_that_came_in_a_callback(void) {
  scene_t s;
  mark_t mark = { &s, 1 };
  scene_open(&s, 2, write_state, 1);
  crowd_comes(&s);
  update(&s, &mark, GEMINI_UPDATE_LATE);
  crowd_goes(&s);
  gemini_access_t zero = world_part(s.state, W, W, 0, DEVICE);
  CHECK_OK(gemini_zero(s.w.mgr, &zero));
  other_ends(&s);
  CHECK_EQ(byte_at(&s, s.state, W, DEVICE), 9); /* the write waited for the callback, and with it for the call */
  scene_close(&s, 2, 1);
}

/* A callback that does what it must not, and acquires: the call that it runs in refuses, and the bytes stay. */
static void acquiring_span(void *user, const gemini_update_span_t *span) {
  scene_t *s = user;
  CHECK_EQ(span->tier, DEVICE);
  s->held = world_part(s->state, W, W, BOTH, DEVICE);
  CHECK_OK(gemini_acquire(s->w.mgr, &s->held, 1, GEMINI_STREAM_CALLER));
  memset(s->held.ptr, 9, W);
}
static void test_zero_refuses_what_its_own_callback_acquired(void) {
  scene_t s;
  scene_open(&s, 2, NULL, 0);
  crowd_comes(&s);
  const uint32_t modes[] = { BOTH, READ };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = s.arenas, u.modes = modes, u.arena_count = 2;
  u.element_count = W; /* the second chunk is in no piece */
  u.fn = acquiring_span, u.user = &s;
  CHECK_OK(gemini_update(s.w.mgr, &u));
  CHECK_EQ(world_stats(&s.w).pending_updates, 1);
  crowd_goes(&s);
  gemini_access_t zero = world_whole(s.state, 0, DEVICE);
  CHECK_STATUS(gemini_zero(s.w.mgr, &zero), GEMINI_ERR_BUSY);
  crowd_goes(&s); /* what the callback acquired */
  CHECK_EQ(byte_at(&s, s.state, W, DEVICE), 9);
  CHECK_OK(gemini_zero(s.w.mgr, &zero));
  CHECK_EQ(byte_at(&s, s.state, W, DEVICE), 0);
  CHECK_OK(gemini_unpin(s.w.mgr, &s.pin));
  world_close(&s.w);
}

/* A call that names several chunks, with an update left on each: in the callback for the second chunk, the call must not have begun
 * with the first. Builds with GEMINI_CHECK look at all records whenever the lock is given away. */
static void test_a_batch_begins_after_its_callbacks(void) {
  static const uint32_t tiers[] = { DEVICE, HOST }, modes[] = { READ, BOTH };
  for (int i = 0; i < 8; i++) {
    scene_t s;
    mark_t mark = { &s, 1 };
    scene_open(&s, 2, read_on_host, 1);
    s.meet_at = W;
    crowd_comes(&s);
    update(&s, &mark, GEMINI_UPDATE_LATE);
    CHECK_EQ(world_stats(&s.w).pending_updates, 2);
    crowd_goes(&s);
    uint32_t tier = tiers[i & 1], mode = modes[i >> 1 & 1];
    gemini_access_t parts[2] = { world_whole(s.state, mode, tier), world_part(s.state, W, W, mode, tier) };
    if (i & 4) parts[0] = world_part(s.state, 0, W, mode, tier); /* two accesses in place of one */
    CHECK_OK(gemini_acquire(s.w.mgr, parts, i & 4 ? 2 : 1, GEMINI_STREAM_CALLER));
    for (uint64_t at = 0; at < W; at++) CHECK_EQ(((uint8_t *)parts[0].ptr)[at], 0);
    if (mode == BOTH) memset(parts[0].ptr, 7, W);
    CHECK_OK(gemini_release(s.w.mgr, parts, i & 4 ? 2 : 1, GEMINI_STREAM_CALLER));
    CHECK_EQ(byte_at(&s, s.state, W - 1, tiers[i >> 1 & 1]), mode == BOTH ? 7 : 0);
    scene_close(&s, 2, 1);
  }
}

static void take_five_frames(void *scene) {
  scene_t *s = scene;
  void *ptr;
  CHECK_OK(gemini_alloc(s->w.mgr, 5 * W, GEMINI_STREAM_CALLER, &ptr)); /* all but 2 pinned, and 1 of the piece */
  CHECK_OK(gemini_free(s->w.mgr, ptr, GEMINI_STREAM_CALLER));
}
static void test_moves_and_pins_begin_after_their_callbacks(void) {
  for (int pins = 0; pins < 2; pins++) {
    scene_t s;
    mark_t mark = { &s, 1 };
    scene_open(&s, 2, take_five_frames, 1);
    s.meet_at = W;
    crowd_comes(&s);
    update(&s, &mark, GEMINI_UPDATE_LATE);
    crowd_goes(&s);
    gemini_access_t all = world_whole(s.state, 0, DEVICE);
    if (pins) CHECK_OK(gemini_pin(s.w.mgr, &all));
    else CHECK_OK(gemini_move(s.w.mgr, &all, 1));
    CHECK_EQ(world_tier_bytes(&s.w, s.state, DEVICE), 2 * W);
    if (pins) CHECK_OK(gemini_unpin(s.w.mgr, &all));
    scene_close(&s, 2, 1);
  }
}

static void destroy_extra(void *scene) {
  scene_t *s = scene;
  s->status = gemini_arena_destroy(s->w.mgr, s->extra);
}
static void test_an_arena_is_destroyed_once(void) {
  scene_t s;
  mark_t mark = { &s, 1 };
  scene_open(&s, 2, destroy_extra, 1);
  crowd_comes(&s);
  update(&s, &mark, GEMINI_UPDATE_LATE);
  crowd_goes(&s);
  s.extra = world_arena(&s.w, GEMINI_KIND_OTHER, 1, "extra", 0, 0);
  world_tensor(&s.w, s.extra, "extra", W);
  uint64_t before = world_stats(&s.w).model_bytes;
  CHECK_OK(gemini_arena_destroy(s.w.mgr, s.extra));
  other_ends(&s);
  CHECK_EQ(s.status, GEMINI_ERR_HANDLE);
  CHECK_EQ(world_stats(&s.w).model_bytes, before - W);
  scene_close(&s, 2, 1);
}

int main(void) {
  RUN(test_a_reader_sees_the_update_whose_callback_runs);
  RUN(test_a_piece_runs_once_whoever_comes_in_its_callback);
  RUN(test_zero_forgets_nothing_that_came_in_a_callback);
  RUN(test_zero_refuses_what_its_own_callback_acquired);
  RUN(test_a_batch_begins_after_its_callbacks);
  RUN(test_moves_and_pins_begin_after_their_callbacks);
  RUN(test_an_arena_is_destroyed_once);
  return check_done();
}
