/* What can be seen while calls wait: statistics and the dump, which never do, and the watchdog. Whatever they were
 * waiting for here would never end: a call that did would hang the test. SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "../fork.h"
#include "gemini/group.h"
#include "world.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, BOTH = GEMINI_READ_WRITE };

/* ---- a log that is remembered */
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[65536];
static void remember(void *user, int32_t level, const char *message) {
  (void)user;
  pthread_mutex_lock(&log_lock);
  size_t length = strlen(log_text);
  snprintf(log_text + length, sizeof log_text - length, "%d %s\n", level, message);
  pthread_mutex_unlock(&log_lock);
}
static void forget_log(void) {
  pthread_mutex_lock(&log_lock);
  *log_text = 0;
  pthread_mutex_unlock(&log_lock);
}

static void pause_ms(long ms) { nanosleep(&(struct timespec){ ms / 1000, ms % 1000 * 1000000 }, NULL); }

/* Lines of text that have all parts, which are separated by '|'. */
static int lines_with(const char *text, const char *parts) {
  int lines = 0;
  for (const char *at = text; *at;) {
    char line[1024], copy[256], *rest = copy;
    size_t length = strcspn(at, "\n");
    snprintf(line, sizeof line, "%.*s", (int)length, at);
    snprintf(copy, sizeof copy, "%s", parts);
    bool all = true;
    for (char *part; all && (part = strsep(&rest, "|"));) all = strstr(line, part) != NULL;
    lines += all;
    at += length + (at[length] == '\n');
  }
  return lines;
}
static int logged(const char *parts) {
  pthread_mutex_lock(&log_lock);
  int lines = lines_with(log_text, parts);
  pthread_mutex_unlock(&log_lock);
  return lines;
}

static char dump_text[65536];
static const char *dump(const world_t *w) {
  uint64_t length;
  CHECK_OK(gemini_manager_dump(w->mgr, sizeof dump_text, dump_text, &length));
  CHECK_EQ(length, strlen(dump_text));
  return dump_text;
}

/* Waits until the dump has such a line, as the thread that it is about may not have come so far. */
static void expect_line(const world_t *w, const char *parts) {
  for (int tries = 0; tries < 3000; tries++) {
    if (lines_with(dump(w), parts) == 1) return;
    pause_ms(10);
  }
  fprintf(stderr, "no line, or several, with \"%s\" in:\n%s", parts, dump_text);
  exit(1);
}
static void expect_log(const char *parts, int lines) {
  for (int tries = 0; tries < 3000; tries++) {
    if (logged(parts) >= lines) return;
    pause_ms(10);
  }
  fprintf(stderr, "the log has not %d lines with \"%s\":\n%s", lines, parts, log_text);
  exit(1);
}

/* ---- calls that wait until the gate opens */
typedef struct {
  sem_t opened, reached;
} gate_t;
static void gate_init(gate_t *g) { CHECK(!sem_init(&g->opened, 0, 0) && !sem_init(&g->reached, 0, 0)); }
static void gate_pass(void *user) {
  gate_t *g = user;
  CHECK(!sem_post(&g->reached));
  while (sem_wait(&g->opened)) continue;
}
static void gate_span(void *user, const gemini_update_span_t *span) {
  (void)span;
  gate_pass(user);
}

typedef struct {
  world_t w;
  gemini_tensor_t t[2];
  gemini_arena_t arena;
  gate_t gate;
} scene_t;
static void scene_open(scene_t *s, uint64_t watchdog_ns) {
  gemini_config_t c = world_config(4, 8, 0);
  c.log_fn = remember;
  c.watchdog_ns = watchdog_ns;
  forget_log();
  s->w = world_open(c);
  s->arena = world_arena(&s->w, GEMINI_KIND_OTHER, 1, "main", 0, 0);
  s->t[0] = world_tensor(&s->w, s->arena, "first", W);
  s->t[1] = world_tensor(&s->w, s->arena, "second", W);
  for (int i = 0; i < 2; i++) world_fill(&s->w, s->t[i], 0, W, DEVICE, 1 + (uint64_t)i);
  gate_init(&s->gate);
}
static void scene_close(scene_t *s) {
  for (int i = 0; i < 2; i++) CHECK(world_holds(&s->w, s->t[i], 0, W, 1 + (uint64_t)i));
  world_close(&s->w);
}

/* The first tensor's bytes wait for the gate, on the stream; this thread may go on. */
static void hold_first(scene_t *s) {
  gemini_access_t a = world_whole(s->t[0], BOTH, DEVICE);
  CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, s->w.stream));
  CHECK_OK(gemini_stream_call(s->w.mgr, s->w.stream, gate_pass, &s->gate));
  CHECK_OK(gemini_release(s->w.mgr, &a, 1, s->w.stream));
}

static _Atomic long waiter_number;
static void *acquire_first(void *user) {
  scene_t *s = user;
  atomic_store(&waiter_number, syscall(SYS_gettid));
  CHECK(world_holds(&s->w, s->t[0], 0, W, 1));
  return NULL;
}
static void *allocate(void *user) {
  scene_t *s = user;
  void *p;
  CHECK_OK(gemini_alloc(s->w.mgr, 1000, GEMINI_STREAM_CALLER, &p));
  CHECK_OK(gemini_free(s->w.mgr, p, GEMINI_STREAM_CALLER));
  return NULL;
}
static void *synchronize(void *user) {
  scene_t *s = user;
  CHECK_OK(gemini_stream_synchronize(s->w.mgr, s->w.stream));
  return NULL;
}
static void *wait_for_updates(void *user) {
  scene_t *s = user;
  CHECK_OK(gemini_update_wait(s->w.mgr));
  return NULL;
}
static pthread_t start(void *(*fn)(void *), scene_t *s) {
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, fn, s), 0);
  return thread;
}
static void join(pthread_t thread) { CHECK_EQ(pthread_join(thread, NULL), 0); }

/* ---- tests */
static void test_nothing_waits_and_the_dump_says_what_is_where(void) {
  scene_t s;
  scene_open(&s, 0);
  expect_line(&s.w, "waits: none");
  expect_line(&s.w, "manager 0x1|simulated");
  expect_line(&s.w, "device: 131072 of 262144 bytes used");
  expect_line(&s.w, "chunks: 2 on the device, of 2 of these the only copy; 0 on the host; 0 in files");
  CHECK_EQ(lines_with(dump(&s.w), "acquired: tensor"), 0);
  gemini_access_t a[3] = { world_whole(s.t[1], READ, DEVICE), world_whole(s.t[1], READ, DEVICE),
                           world_part(s.t[1], 0, 64, READ, DEVICE) };
  CHECK_OK(gemini_iteration_begin(s.w.mgr));
  CHECK_OK(gemini_op_begin(s.w.mgr, "h.3.mlp", s.w.stream));
  CHECK_OK(gemini_acquire(s.w.mgr, a, 3, s.w.stream));
  expect_line(&s.w, "acquired: tensor second of arena main, 3 times, 2 of them as a whole on the device, read");
  expect_line(&s.w, "operator: h.3.mlp; an iteration is open");
  CHECK_OK(gemini_release(s.w.mgr, a, 3, s.w.stream));
  CHECK_OK(gemini_op_end(s.w.mgr));
  CHECK_OK(gemini_iteration_end(s.w.mgr));
  expect_line(&s.w, "operator: none; no iteration is open");
  expect_line(&s.w, "iterations: 1 ended");
  char few[8];
  uint64_t length = 0;
  CHECK_OK(gemini_manager_dump(s.w.mgr, sizeof few, few, &length));
  CHECK(length > sizeof few && strlen(few) == sizeof few - 1);
  CHECK_OK(gemini_manager_dump(s.w.mgr, 0, NULL, &length));
  CHECK_OK(gemini_manager_dump(s.w.mgr, 0, NULL, NULL));
  scene_close(&s);
}

static void test_a_call_that_waits_with_the_lock_hides_nothing(void) {
  scene_t s;
  scene_open(&s, 0);
  hold_first(&s);
  figures_t before = world_stats(&s.w);
  pthread_t waiter = start(acquire_first, &s);
  expect_line(&s.w, "waits: thread|in gemini_acquire(), with the manager's lock, for the work queued on stream");
  char number[32];
  snprintf(number, sizeof number, "waits: thread %ld (", atomic_load(&waiter_number));
  expect_line(&s.w, number);
  snprintf(number, sizeof number, "stream %u: has work", 3u); /* behind the library's three */
  expect_line(&s.w, number);
  expect_line(&s.w, "stream 1: has work that has not ended; it copies from the device");
  figures_t stats = world_stats(&s.w);
  CHECK(stats.used_bytes[DEVICE] == 2 * W && stats.model_bytes == 2 * W && stats.chunk_bytes == W);
  CHECK_EQ(stats.budget_bytes[HOST], before.budget_bytes[HOST]);
  expect_line(&s.w, "chunks: 2 on the device");
  expect_line(&s.w, "acquired: tensor first of arena main, 1 times");
  pthread_t other = start(allocate, &s);
  snprintf(number, sizeof number, "of thread %ld (", atomic_load(&waiter_number));
  expect_line(&s.w, "waits: thread|in gemini_alloc() for the manager's lock, which gemini_acquire() of thread");
  expect_line(&s.w, number);
  CHECK(!sem_post(&s.gate.opened));
  join(waiter);
  join(other);
  expect_line(&s.w, "waits: none");
  scene_close(&s);
}

static void test_each_kind_of_wait_says_what_for(void) {
  scene_t s;
  scene_open(&s, 0);
  hold_first(&s);
  pthread_t thread = start(synchronize, &s);
  expect_line(&s.w, "waits: thread|in gemini_stream_synchronize() for the work queued on stream");
  CHECK(!sem_post(&s.gate.opened));
  join(thread);

  uint32_t mode = READ;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &s.arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.fn = gate_span;
  u.user = &s.gate;
  u.flags = GEMINI_UPDATE_LATE;
  u.element_count = W;
  CHECK_OK(gemini_update(s.w.mgr, &u));
  thread = start(wait_for_updates, &s);
  expect_line(&s.w, "waits: thread|in gemini_update_wait() for the workers to finish 1 submitted parts of updates");
  CHECK_EQ(world_stats(&s.w).pending_updates, 1);
  pthread_t other = start(acquire_first, &s);
  expect_line(&s.w, "waits: thread|in gemini_acquire(), with the manager's lock, for an update, a norm");
  CHECK(!sem_post(&s.gate.opened));
  join(thread);
  join(other);
  CHECK_EQ(world_stats(&s.w).pending_updates, 0);
  scene_close(&s);
}

/* ---- the system: calls of it that last */
static gate_t *slow_pwrite, *slow_pread, *slow_fallocate; /* where the next one stays */
static void pass_once(gate_t **gate) {
  gate_t *g = *gate;
  *gate = NULL;
  if (g) gate_pass(g);
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
  pass_once(&slow_pwrite);
  CHECK_EQ(lseek(fd, offset, SEEK_SET), offset);
  return write(fd, bytes, size);
}
ssize_t pread(int fd, void *bytes, size_t size, off_t offset) {
  pass_once(&slow_pread);
  CHECK_EQ(lseek(fd, offset, SEEK_SET), offset);
  return read(fd, bytes, size);
}
int fallocate(int fd, int mode, off_t offset, off_t size) {
  (void)mode;
  pass_once(&slow_fallocate);
  int error = posix_fallocate(fd, offset, size);
  if (error) errno = error;
  return error ? -1 : 0;
}

static int target;
static void *store_second(void *user) {
  scene_t *s = user;
  gemini_access_t a = world_whole(s->t[1], 0, 0);
  CHECK_OK(gemini_store(s->w.mgr, &a, target, 0));
  return NULL;
}
/* Chunks without bytes are written without the lock, as others are. */
static void test_a_store_of_zeros_is_a_wait_without_the_lock(void) {
  scene_t s;
  scene_open(&s, 0);
  FILE *file = tmpfile();
  CHECK(file);
  target = fileno(file);
  gemini_access_t a = world_whole(s.t[1], 0, 0);
  CHECK_OK(gemini_zero(s.w.mgr, &a));
  slow_pwrite = &s.gate;
  pthread_t thread = start(store_second, &s);
  expect_line(&s.w, "waits: thread|in gemini_store() for the caller's file, descriptor");
  allocate(&s); /* others go on */
  CHECK(world_holds(&s.w, s.t[1], 0, W, 0));
  a.mode = WRITE;
  CHECK_STATUS(gemini_acquire(s.w.mgr, &a, 1, s.w.stream), GEMINI_ERR_BUSY); /* what is being written stays */
  CHECK_STATUS(gemini_zero(s.w.mgr, &a), GEMINI_ERR_BUSY);
  CHECK(!sem_post(&s.gate.opened));
  join(thread);
  static uint8_t bytes[W];
  CHECK_EQ(pread(target, bytes, W, 0), W);
  for (uint64_t i = 0; i < W; i++) CHECK(!bytes[i]);
  fclose(file);
  world_fill(&s.w, s.t[1], 0, W, DEVICE, 2);
  scene_close(&s);
}

/* What is being stored or loaded cannot move while the host's budget shrinks; it does at the end, with its new bytes. */
static const uint8_t *host_address(const world_t *w, gemini_tensor_t tensor) {
  gemini_access_t a = world_whole(tensor, READ, HOST);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, w->stream));
  CHECK_OK(gemini_release(w->mgr, &a, 1, w->stream));
  return a.ptr;
}
static void *load_second(void *user) {
  scene_t *s = user;
  gemini_access_t a = world_whole(s->t[1], 0, 0);
  CHECK_OK(gemini_load(s->w.mgr, &a, target, 0));
  return NULL;
}
static void test_stores_and_loads_end_within_a_smaller_budget(void) {
  for (int loads = 0; loads < 2; loads++) {
    scene_t s;
    s.w = world_open(world_config(4, 32, 0));
    for (int i = 0; i < 2; i++) {
      const char *name = i ? "second" : "first";
      s.t[i] = world_tensor(&s.w, world_arena(&s.w, GEMINI_KIND_OTHER, 1, name, 0, 0), name, W);
      world_fill(&s.w, s.t[i], 0, W, HOST, 1 + (uint64_t)i);
    }
    gate_init(&s.gate);
    const uint8_t *first = host_address(&s.w, s.t[0]), *above = host_address(&s.w, s.t[1]);
    CHECK(above >= first + 2 * W); /* arenas lie apart */
    FILE *file = tmpfile();
    CHECK(file);
    target = fileno(file);
    if (loads) {
      store_second(&s);
      gemini_access_t a = world_whole(s.t[1], 0, 0);
      CHECK_OK(gemini_zero(s.w.mgr, &a)); /* without bytes, until they are read */
    }
    *(loads ? &slow_pread : &slow_pwrite) = &s.gate;
    pthread_t thread = start(loads ? load_second : store_second, &s);
    while (sem_wait(&s.gate.reached)) continue;
    CHECK_OK(gemini_budget_set(s.w.mgr, HOST, 2 * W));
    CHECK(!sem_post(&s.gate.opened));
    join(thread);
    CHECK(host_address(&s.w, s.t[1]) == first + W);
    fclose(file);
    scene_close(&s); /* compares the bytes */
  }
}

/* Files of traces and timelines may be anything that has a name: one that nobody reads, or writes, is waited for. */
static char fifo[80];
static void *save_trace(void *user) {
  scene_t *s = user;
  CHECK_OK(gemini_trace_save(s->w.mgr, fifo));
  return NULL;
}
static void *load_trace(void *user) {
  scene_t *s = user;
  CHECK_STATUS(gemini_trace_load(s->w.mgr, fifo), GEMINI_ERR_FORMAT);
  CHECK_SAYS(world_error().message, "the file is empty");
  return NULL;
}
static void *start_timeline(void *user) {
  scene_t *s = user;
  CHECK_OK(gemini_timeline_start(s->w.mgr, fifo));
  return NULL;
}
static void *stop_timeline(void *user) {
  scene_t *s = user;
  CHECK_OK(gemini_timeline_stop(s->w.mgr));
  return NULL;
}
static void test_files_of_traces_and_timelines_are_waits(void) {
  const struct {
    void *(*call)(void *);
    const char *says;
  } calls[] = { { save_trace, "in gemini_trace_save(), with the manager's lock, for the file of a trace" },
                { load_trace, "in gemini_trace_load(), with the manager's lock, for the file of a trace" },
                { start_timeline, "in gemini_timeline_start(), with the manager's lock, for the file of a trace or a" },
                { stop_timeline, "in gemini_timeline_stop(), with the manager's lock, for the file of a trace or a" } };
  scene_t s;
  scene_open(&s, 0);
  snprintf(fifo, sizeof fifo, "%s", "/tmp/gemini.XXXXXX");
  CHECK(mkdtemp(fifo));
  strcat(fifo, "/fifo");
  CHECK_EQ(mkfifo(fifo, 0600), 0);
  gemini_access_t a = world_whole(s.t[0], READ, DEVICE);
  CHECK_OK(gemini_iteration_begin(s.w.mgr));
  CHECK_OK(gemini_op_begin(s.w.mgr, "op", s.w.stream));
  CHECK_OK(gemini_acquire(s.w.mgr, &a, 1, s.w.stream));
  CHECK_OK(gemini_release(s.w.mgr, &a, 1, s.w.stream));
  CHECK_OK(gemini_op_end(s.w.mgr));
  CHECK_OK(gemini_iteration_end(s.w.mgr));
  for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
    pthread_t thread = start(calls[i].call, &s);
    expect_line(&s.w, calls[i].says);
    expect_line(&s.w, "chunks: 2 on the device"); /* the records can be read */
    int fd = open(fifo, (calls[i].call == load_trace ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
    CHECK(fd >= 0);
    char bytes[4096];
    while (calls[i].call != load_trace && read(fd, bytes, sizeof bytes) > 0) continue;
    CHECK_EQ(close(fd), 0);
    join(thread);
  }
  CHECK_EQ(unlink(fifo), 0);
  *strrchr(fifo, '/') = 0;
  CHECK_EQ(rmdir(fifo), 0);
  scene_close(&s);
}

static void *grow_files(void *user) {
  world_t *w = user;
  CHECK_OK(gemini_budget_set(w->mgr, GEMINI_TIER_FILE, 8 * W));
  return NULL;
}
static void test_space_in_files_is_a_wait(void) {
  gate_t gate;
  gate_init(&gate);
  world_t w = world_open(world_config(4, 8, 4));
  gemini_tensor_t t = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "main", 0, 0), "t", W);
  world_fill(&w, t, 0, W, HOST, 1);
  slow_fallocate = &gate;
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, grow_files, &w), 0);
  expect_line(&w, "in gemini_budget_set(), with the manager's lock, for space in files");
  CHECK(!sem_post(&gate.opened));
  join(thread);
  world_close(&w);
}

/* A callback on the device runs on the caller's thread: what hangs in it is the caller's. */
static void *update_on_device(void *user) {
  scene_t *s = user;
  uint32_t mode = BOTH;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &s->arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.fn = gate_span;
  u.user = &s->gate;
  u.element_count = W;
  CHECK_OK(gemini_update(s->w.mgr, &u));
  return NULL;
}
static void test_a_callback_that_hangs_is_named(void) {
  scene_t s;
  scene_open(&s, 0);
  gemini_access_t a = world_whole(s.t[0], READ, DEVICE);
  CHECK_OK(gemini_pin(s.w.mgr, &a));
  pthread_t thread = start(update_on_device, &s);
  expect_line(&s.w, "waits: thread|in gemini_update() for the caller's update callback");
  allocate(&s); /* others go on */
  CHECK(!sem_post(&s.gate.opened));
  join(thread);
  CHECK_OK(gemini_unpin(s.w.mgr, &a));
  scene_close(&s);
}

static void test_the_watchdog_reports_who_waits_for_what(void) {
  const uint64_t ms = 1000000;
  scene_t s;
  scene_open(&s, 50 * ms);
  hold_first(&s);
  pthread_t waiter = start(acquire_first, &s);
  expect_line(&s.w, "waits: thread|in gemini_acquire(), with the manager's lock, for the work queued on stream");
  expect_log("2 watchdog: thread|in gemini_acquire(), with the manager's lock, for the work queued on stream", 1);
  pthread_t other = start(allocate, &s);
  expect_log("2 watchdog: thread|in gemini_alloc() for the manager's lock, which gemini_acquire() of thread", 1);
  char mine[64];
  snprintf(mine, sizeof mine, "2 watchdog: thread %ld (|for the work queued on stream", atomic_load(&waiter_number));
  expect_log(mine, 4);
  double last_s = 0.025; /* each report comes after twice the time of the one before, but for the rounding to 1 ms */
  int reports = 0;
  pthread_mutex_lock(&log_lock);
  for (const char *at = log_text; (at = strstr(at, "watchdog: thread ")); at++) {
    double s_waited;
    long thread;
    char function[32];
    CHECK_EQ(sscanf(at, "watchdog: thread %ld (%*[^)]) has waited %lf s in %31[a-z_]", &thread, &s_waited, function),
             3);
    char line[256];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
    /* On a slow machine other waits are reported, too. */
    if (thread != atomic_load(&waiter_number) || !strstr(line, "for the work queued on stream")) continue;
    CHECK(!strcmp(function, "gemini_acquire"));
    CHECK(s_waited + 0.0005 >= 2 * (last_s - 0.0005) - 1e-9);
    last_s = s_waited;
    reports++;
  }
  CHECK(reports >= 4);
  pthread_mutex_unlock(&log_lock);
  CHECK(!sem_post(&s.gate.opened));
  join(waiter);
  join(other);
  scene_close(&s);
}

/* The state is logged as the dump has it, with the first report of a wait and with no other. */
static void test_the_watchdog_says_what_is_where(void) {
  scene_t s;
  scene_open(&s, 50000000);
  hold_first(&s);
  atomic_store(&waiter_number, 0);
  pthread_t waiter = start(acquire_first, &s);
  expect_line(&s.w, "waits: thread|in gemini_acquire(), with the manager's lock, for the work queued on stream");
  char mine[64];
  snprintf(mine, sizeof mine, "2 watchdog: thread %ld (|for the work queued on stream", atomic_load(&waiter_number));
  expect_log(mine, 3);
  /* On a slow machine other waits, as those of scene_open(), are reported, too, each with a state at most. */
  const int held = logged("2 watchdog: state: stream 1: has work that has not ended; it copies from the device");
  const int states = logged("2 watchdog: state: manager|simulated");
  CHECK(held >= 1 && held <= states);
  CHECK(states <= logged("2 watchdog: thread") - 2); /* not with later reports */
  CHECK(logged("2 watchdog: state: device: 131072 of 262144 bytes used"));
  CHECK(logged("2 watchdog: state: chunks: 2 on the device"));
  CHECK(logged("2 watchdog: state: acquired: tensor first of arena main, 1 times"));
  CHECK(logged("2 watchdog: state: waits: thread|in gemini_acquire(), with the manager's lock, for the work"));
  CHECK_EQ(logged("group"), 0);
  CHECK(!sem_post(&s.gate.opened));
  join(waiter);
  scene_close(&s);
}

/* ---- groups */
static gemini_group_t join_group(const world_t *w, const gemini_group_id_t *id, uint32_t rank, uint32_t ranks) {
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  gemini_group_t group;
  c.id = id;
  c.rank = rank;
  c.ranks = ranks;
  c.deadline_ns = UINT64_C(300000000000);
  CHECK_OK(gemini_group_open(w->mgr, &c, &group));
  return group;
}
/* Two chunks, each half on either rank, and gradients that reuse their bytes. */
typedef struct {
  world_t w;
  gemini_tensor_t param, grad;
} shard_t;
static shard_t shard_open(const gemini_group_id_t *id, uint32_t rank, uint64_t watchdog_ns) {
  gemini_config_t c = world_config(8, 8, 0);
  c.log_fn = remember;
  c.watchdog_ns = watchdog_ns;
  forget_log();
  shard_t s = { .w = world_open(c) };
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t params, grads;
  a.element_bytes = 4;
  a.name = "weights";
  a.group = join_group(&s.w, id, rank, 2);
  a.zero_stage = GEMINI_ZERO_PARAMS;
  CHECK_OK(gemini_arena_create(s.w.mgr, &a, &params));
  a.name = "gradients";
  a.group = NULL;
  a.zero_stage = 0;
  a.kind = GEMINI_KIND_GRAD;
  a.reuse = params;
  a.dtype = GEMINI_DTYPE_F32;
  CHECK_OK(gemini_arena_create(s.w.mgr, &a, &grads));
  s.param = world_tensor(&s.w, params, "t", 2 * W);
  CHECK_OK(gemini_tensor_counterpart(s.w.mgr, s.param, grads, &s.grad));
  gemini_access_t all = world_whole(s.param, 0, 0);
  CHECK_OK(gemini_zero(s.w.mgr, &all));
  return s;
}
/* One chunk is gathered, and the norm adds the gradients of both. */
static void *shard_use(void *user) {
  shard_t *s = user;
  gemini_access_t a = world_part(s->param, 0, W, READ, DEVICE);
  double norm = 1;
  CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(world_reads(a.ptr, 0, W, 0));
  CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  a = world_whole(s->grad, 0, 0);
  CHECK_OK(gemini_norm(s->w.mgr, &a, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm));
  CHECK(norm == 0);
  return NULL;
}
static void expect_stop(pid_t child) {
  int status = 0;
  CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
  CHECK(WIFSTOPPED(status));
}
static void test_a_wait_for_a_rank_that_has_stopped_says_where_its_group_is(void) {
  gemini_group_id_t id;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 2, &id));
  pid_t child = fork_child();
  if (!child) {
    CHECK(!prctl(PR_SET_PDEATHSIG, SIGKILL)); /* a stopped process has no alarm */
    shard_t s = shard_open(&id, 1, 0);
    CHECK(!raise(SIGSTOP));
    shard_use(&s);
    world_close(&s.w);
    exit(0);
  }
  shard_t s = shard_open(&id, 0, 50000000);
  expect_stop(child);
  forget_log();
  pthread_t user;
  CHECK_EQ(pthread_create(&user, NULL, shard_use, &s), 0);
  expect_log("2 watchdog: thread|in gemini_acquire(), with the manager's lock, for the work queued|gathers chunks", 1);
  const char *gather = "has waited 0.|in work of a stream for the other ranks of its group, as rank 0, in a gather for "
                       "chunk 0 of arena weights";
  expect_log(gather, 2); /* a report, and a line of the state */
  expect_log("2 watchdog: state: group 0: rank 0 of 2, in 1 replica of 2 ranks", 1);
  expect_log("2 watchdog: state: group 0: gathers of 1 chunks queued so far; 1 calls, of 1 chunks, have not ended, the "
             "first for chunk 0 of arena weights",
             1);
  expect_log("2 watchdog: state: group 0: sums of 0 chunks queued so far, all have ended", 1);
  expect_log(
      "2 watchdog: state: group 0: arena weights: of 2 chunks 1 gathered, of these 1 have not arrived, 1 acquired; "
      "this rank's slices are 1 chunks, ",
      1);
  expect_log(
      "2 watchdog: state: group 0: arena gradients: of 2 chunks of gradients 0 added since the last update, 0 on "
      "the device, 0 acquired; this rank's slices lie in those of arena weights",
      1);
  CHECK_EQ(logged("cannot be told"), 0);
  CHECK(!kill(child, SIGCONT));
  join(user);
  fork_expect_end(child);
  expect_line(&s.w, "group 0: gathers of 1 chunks queued so far, all have ended");
  expect_line(&s.w, "group 0: sums of 2 chunks queued so far, all have ended");
  expect_line(&s.w, "arena gradients: of 2 chunks of gradients 2 added since the last update");
  world_close(&s.w);
}

/* The lock's holder is in no wait that the library knows: in a function of the caller's, which must not wait. */
static gate_t *slow_poll;
static _Atomic long poller;
static gemini_status_t poll_here(void *user) {
  (void)user;
  if (atomic_load(&poller) == syscall(SYS_gettid)) pass_once(&slow_poll);
  return GEMINI_OK;
}
static gemini_status_t never_gather(void *user, void *buffer, uint64_t bytes, void *stream, const char *label) {
  (void)user, (void)buffer, (void)bytes, (void)stream, (void)label;
  return GEMINI_ERR_PEER;
}
static gemini_status_t never_rooted(void *user, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                                    const char *label) {
  (void)root;
  return never_gather(user, buffer, bytes, stream, label);
}
static gemini_status_t exchange_alone(void *user, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  (void)user, (void)label;
  memcpy(all_out, mine, bytes);
  return GEMINI_OK;
}
typedef struct {
  scene_t s;
  gemini_group_t group;
} polled_t;
static void *exchange_polled(void *user) {
  polled_t *p = user;
  char mine = 1, all = 0;
  atomic_store(&poller, syscall(SYS_gettid));
  CHECK_OK(gemini_group_exchange(p->s.w.mgr, p->group, &mine, 1, &all));
  return NULL;
}
static void test_a_lock_that_nobody_gives_back_hides_the_records_only(void) {
  polled_t p;
  scene_open(&p.s, 50000000);
  gemini_comm_t table = GEMINI_COMM_INIT;
  table.all_gather = never_gather;
  table.broadcast = never_rooted;
  table.reduce_scatter = table.all_reduce = never_rooted;
  table.exchange = exchange_alone;
  table.poll = poll_here;
  const gemini_comm_t *comms[GEMINI_GROUP_COMMS] = { &table, &table, &table };
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  c.ranks = 1;
  c.comms = comms;
  CHECK_OK(gemini_group_open(p.s.w.mgr, &c, &p.group));
  slow_poll = &p.s.gate;
  pthread_t holder, other;
  CHECK_EQ(pthread_create(&holder, NULL, exchange_polled, &p), 0);
  while (sem_wait(&p.s.gate.reached)) continue;
  other = start(allocate, &p.s);
  expect_log("2 watchdog: thread|in gemini_alloc() for the manager's lock, which gemini_group_exchange() of thread", 2);
  char line[160];
  snprintf(line, sizeof line,
           "2 watchdog: state: chunks, acquired tensors and groups: cannot be told now, as gemini_group_exchange() of "
           "thread %ld (| holds the manager's lock",
           atomic_load(&poller));
  expect_log(line, 1);
  expect_log("2 watchdog: state: device: 131072 of 262144 bytes used", 1);
  expect_log("2 watchdog: state: group 0: rank 0 of 1, in 1 replica of 1 ranks", 1);
  expect_log("2 watchdog: state: waits: thread|in gemini_alloc() for the manager's lock", 1);
  CHECK_EQ(logged("state: chunks: "), 0);
  CHECK_EQ(logged("state: group 0: gathers"), 0);
  CHECK(!sem_post(&p.s.gate.opened));
  join(holder);
  join(other);
  CHECK_OK(gemini_group_close(p.s.w.mgr, p.group));
  CHECK_EQ(lines_with(dump(&p.s.w), "group"), 0);
  scene_close(&p.s);
}

/* No wait is reported before its time, however many there are; and this thread's own clock says how long they were. */
static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
static void test_the_watchdog_leaves_out_short_waits(void) {
  const double limit_s = 0.25;
  scene_t s;
  scene_open(&s, (uint64_t)(limit_s * 1e9));
  double longest_s = 0;
  for (int i = 0; i < 100; i++) { /* half a second: the watchdog looks several times */
    double begin_s = now_s();
    hold_first(&s);
    CHECK(!sem_post(&s.gate.opened));
    CHECK_OK(gemini_stream_synchronize(s.w.mgr, s.w.stream));
    if (now_s() - begin_s > longest_s) longest_s = now_s() - begin_s;
    pause_ms(5);
  }
  if (longest_s < limit_s) CHECK_EQ(logged("watchdog"), 0);
  else fprintf(stderr, "    not tested: a wait that should be short took %.3f s\n", longest_s);
  scene_close(&s);
}

static void test_a_watchdog_needs_a_log(void) {
  gemini_config_t c = world_config(2, 2, 0);
  gemini_manager_t mgr;
  c.watchdog_ns = 5;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "log_fn is NULL");
  c.log_fn = remember;
  c.log_level = GEMINI_LOG_ERROR;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "log_level");
  for (c.log_level = GEMINI_LOG_WARNING, c.watchdog_ns = 1; c.watchdog_ns; c.watchdog_ns *= 2) { /* any time is one */
    CHECK_OK(gemini_manager_open(&c, &mgr));
    CHECK_OK(gemini_manager_close(mgr));
  }
}

/* The program's signals come to its own threads. A thread that is starting has all blocked: each is looked at when it
 * waits for something. */
static bool takes(const char *thread, int signal) {
  char path[300], line[256], state = 0;
  unsigned long long blocked = 0;
  snprintf(path, sizeof path, "/proc/self/task/%s/status", thread);
  while (state != 'S') {
    FILE *file = fopen(path, "re");
    if (!file) return false; /* it has ended */
    while (fgets(line, sizeof line, file) && sscanf(line, "SigBlk: %llx", &blocked) != 1)
      (void)sscanf(line, "State: %c", &state);
    fclose(file);
    if (atol(thread) == syscall(SYS_gettid)) state = 'S';
    if (state != 'S') pause_ms(1);
  }
  return !(blocked >> (signal - 1) & 1);
}
static int threads_that_take(int signal) {
  DIR *d = opendir("/proc/self/task");
  CHECK(d);
  int count = 0;
  for (struct dirent *e; (e = readdir(d));) count += *e->d_name != '.' && takes(e->d_name, signal);
  closedir(d);
  return count;
}
static void test_watchdog_and_workers_leave_signals_to_the_program(void) {
  int takers[2];
  for (int more = 0; more < 2; more++) { /* with them there are no more such threads */
    gemini_config_t c = world_config(4, 8, 0);
    c.log_fn = remember;
    c.update_threads = more ? 4 : 1;
    c.watchdog_ns = more ? UINT64_C(1000000000) : 0;
    world_t w = world_open(c);
    takers[more] = threads_that_take(SIGTERM);
    world_close(&w);
  }
  CHECK(takers[0] >= 1);
  CHECK_EQ(takers[1], takers[0]);
}

/* Beside threads that work, and wait for each other all the time. */
static atomic_bool stop;
static void *work(void *user) {
  scene_t *s = user;
  gemini_stream_t stream;
  CHECK_OK(gemini_stream_create(s->w.mgr, &stream));
  for (uint64_t i = 0; !atomic_load(&stop); i++) {
    gemini_access_t a = world_whole(s->t[i % 2], READ, i % 3 ? DEVICE : HOST);
    CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, i % 5 ? stream : GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_release(s->w.mgr, &a, 1, i % 5 ? stream : GEMINI_STREAM_CALLER));
    if (i % 4 == 0) {
      a = world_whole(s->t[i % 2], READ, HOST);
      gemini_status_t status = gemini_move(s->w.mgr, &a, 1);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_BUSY);
    }
    if (i % 64 == 0) {
      gemini_arena_t arena = world_arena(&s->w, GEMINI_KIND_OTHER, 1, NULL, 0, 0);
      CHECK_OK(gemini_arena_destroy(s->w.mgr, arena));
    }
  }
  CHECK_OK(gemini_stream_destroy(s->w.mgr, stream));
  return NULL;
}
/* Groups come and go. */
static void *gather(void *user) {
  scene_t *s = user;
  for (uint64_t i = 0; !atomic_load(&stop); i++) {
    gemini_group_id_t id;
    gemini_arena_t arena;
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
    CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 1, &id));
    c.element_bytes = 4;
    c.name = "gathered";
    c.group = join_group(&s->w, &id, 0, 1);
    c.zero_stage = GEMINI_ZERO_PARAMS;
    CHECK_OK(gemini_arena_create(s->w.mgr, &c, &arena));
    gemini_tensor_t t = world_tensor(&s->w, arena, "t", W);
    for (int k = 0; k < 16; k++) {
      gemini_access_t a = world_whole(t, k ? READ : WRITE, DEVICE);
      CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      if (!k) memset(a.ptr, 0, W);
      CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    CHECK_OK(gemini_arena_destroy(s->w.mgr, arena));
    CHECK_OK(gemini_group_close(s->w.mgr, c.group));
  }
  return NULL;
}
static void test_looks_at_any_moment_of_other_threads(void) {
  scene_t s;
  scene_open(&s, 1);
  atomic_store(&stop, false);
  pthread_t threads[5];
  for (int i = 0; i < 4; i++) threads[i] = start(work, &s);
  threads[4] = start(gather, &s);
  for (int i = 0; i < 400; i++) {
    CHECK(strstr(dump(&s.w), "waits: "));
    figures_t stats = world_stats(&s.w);
    CHECK(stats.model_bytes >= 2 * W && stats.model_bytes <= 4 * W && stats.used_bytes[DEVICE] <= 4 * W &&
          stats.used_bytes[HOST] <= 8 * W);
  }
  atomic_store(&stop, true);
  for (int i = 0; i < 5; i++) join(threads[i]);
  scene_close(&s);
}

int main(void) {
  RUN(test_nothing_waits_and_the_dump_says_what_is_where);
  RUN(test_a_call_that_waits_with_the_lock_hides_nothing);
  RUN(test_each_kind_of_wait_says_what_for);
  RUN(test_a_store_of_zeros_is_a_wait_without_the_lock);
  RUN(test_stores_and_loads_end_within_a_smaller_budget);
  RUN(test_files_of_traces_and_timelines_are_waits);
  RUN(test_space_in_files_is_a_wait);
  RUN(test_a_callback_that_hangs_is_named);
  RUN(test_the_watchdog_reports_who_waits_for_what);
  RUN(test_the_watchdog_says_what_is_where);
  RUN(test_a_wait_for_a_rank_that_has_stopped_says_where_its_group_is);
  RUN(test_a_lock_that_nobody_gives_back_hides_the_records_only);
  RUN(test_the_watchdog_leaves_out_short_waits);
  RUN(test_a_watchdog_needs_a_log);
  RUN(test_watchdog_and_workers_leave_signals_to_the_program);
  RUN(test_looks_at_any_moment_of_other_threads);
  return check_done();
}
