/* Random programs in which one call of the device, or the file tier, fails. SPDX-License-Identifier: Apache-2.0
 *
 * The device's table is replaced by one whose nth call of a kind fails, once. Whatever public call meets the failure may
 * return it, or do without; no byte may be lost by it, nothing may hang, and afterwards everything works again. The
 * model is one array, as in test_random.c. Needs the library's internals, so it is linked with its objects.
 *
 * GEMINI_STRESS_STEPS  steps in all, 2000 by default; programs have 40
 * GEMINI_STRESS_SEED   seed of the first program, otherwise the time; the following ones count up from it */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "../handles.h"
#include "../seed.h"
#include "../system.h"
#include "chunk/files.h"
#include "core/manager.h"
#include "figures.h"
#include "gemini.h"
#include "io/sys.h"

enum { CHUNK = 65536, CHUNKS = 10, SIZE = CHUNKS * CHUNK - 1000, STEPS = 40 };
enum {
  FAULT_COPY,
  FAULT_MAP,
  FAULT_HOST_LOCK,
  FAULT_MARK,
  FAULT_ZERO,
  FAULT_WAIT,
  FAULT_FRAME,
  FAULT_WRITE,
  FAULT_READ,
  FAULTS
};
static const char *const fault_names[] = { "copy", "map",   "host_lock",  "mark",     "zero",
                                           "wait", "frame", "file write", "file read" };

static const gmi_device_ops_t *real;
static uint32_t fault;
static int64_t countdown; /* calls until the failing one; negative: none */
static bool failed;
static uint64_t seed;
static int step;

static bool fails(uint32_t kind) {
  if (kind != fault || countdown < 0 || countdown-- > 0) return false;
  failed = true;
  return true;
}
static gemini_status_t copy(void *self, uint32_t stream, void *dst, const void *src, uint64_t size, uint32_t kind) {
  return fails(FAULT_COPY) ? GEMINI_ERR_DEVICE : real->queue.copy(self, stream, dst, src, size, kind);
}
static gemini_status_t map(void *self, void *va, uint64_t frame, uint64_t size) {
  return fails(FAULT_MAP) ? GEMINI_ERR_DEVICE : real->memory.map(self, va, frame, size);
}
static gemini_status_t host_lock(void *self, void *base, uint64_t size) {
  return fails(FAULT_HOST_LOCK) ? GEMINI_ERR_OOM_SYSTEM : real->memory.host_lock(self, base, size);
}
static gemini_status_t mark(void *self, uint32_t stream, uint64_t *mark_out) {
  return fails(FAULT_MARK) ? GEMINI_ERR_DEVICE : real->stream.mark(self, stream, mark_out);
}
static gemini_status_t zero(void *self, uint32_t stream, void *dst, uint64_t size) {
  return fails(FAULT_ZERO) ? GEMINI_ERR_DEVICE : real->queue.zero(self, stream, dst, size);
}
static gemini_status_t wait(void *self, uint32_t stream, uint32_t other, uint64_t at) {
  return fails(FAULT_WAIT) ? GEMINI_ERR_DEVICE : real->stream.wait(self, stream, other, at);
}
static gemini_status_t frame_create(void *self, uint64_t size, uint64_t *frame_out) {
  return fails(FAULT_FRAME) ? GEMINI_ERR_OOM_SYSTEM : real->memory.frame_create(self, size, frame_out);
}

/* The manager's device gets them; faulty lives as long as it. The countdown begins when the caller sets it. */
static void inject(gemini_manager_t mgr, gmi_device_ops_t *faulty, uint32_t kind) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  real = m->device.ops;
  *faulty = *real;
  faulty->queue.copy = copy;
  faulty->memory.map = map;
  faulty->memory.host_lock = host_lock;
  faulty->stream.mark = mark;
  faulty->queue.zero = zero;
  faulty->stream.wait = wait;
  faulty->memory.frame_create = frame_create;
  m->device.ops = faulty;
  fault = kind;
  failed = false;
  countdown = -1;
}

static void fail(int line, const char *what, int64_t value) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (gemini_last_error(&info) == GEMINI_OK)
    fprintf(stderr, "  last error: %s: %s: %s\n", info.operation, gemini_status_string(info.status), info.message);
  fprintf(stderr, "%s:%d: seed %" PRIu64 ", step %d, fault %s, %s: %s: %" PRId64 "\n", __FILE__, line, seed, step,
          fault_names[fault], failed ? "has failed" : "to come", what, value);
  if (*seed_rest) seed_print(seed);
  _exit(1);
}
#define NEED(condition)                              \
  do {                                               \
    if (!(condition)) fail(__LINE__, #condition, 0); \
  } while (0)
#define MUST(call)                         \
  do {                                     \
    gemini_status_t must = (call);         \
    if (must) fail(__LINE__, #call, must); \
  } while (0)

/* The file tier's system calls, of the engine of threads. */
static _Atomic bool no_writes, no_reads;
static ssize_t sys_pwrite(int fd, const void *bytes, size_t size, off_t offset) {
  if (no_writes) return errno = ENOSPC, -1;
  return gmi_sys_real.pwrite(fd, bytes, size, offset);
}
static ssize_t sys_pread(int fd, void *bytes, size_t size, off_t offset) {
  if (no_reads) return errno = EIO, -1;
  return gmi_sys_real.pread(fd, bytes, size, offset);
}
static void file_break(bool write) { *(write ? &no_writes : &no_reads) = true; }
static void file_mend(void) { no_writes = no_reads = false; }

static uint8_t model[SIZE];
static uint64_t below(uint64_t *r, uint64_t limit) { return (check_random(r) >> 11) % limit; }

/* A status of a call while something may fail: the fault's own, or what a fault leaves no room for. */
static bool named(gemini_status_t status) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  MUST(gemini_last_error(&info));
  return info.status == status && info.message[0] && info.operation[0];
}
static bool before; /* failed when the call began */
static bool passes(gemini_status_t status) {
  if (!status) return true;
  if (!named(status)) fail(__LINE__, "an error without a message", status);
  bool of_fault = status == GEMINI_ERR_DEVICE || status == GEMINI_ERR_OOM_SYSTEM || status == GEMINI_ERR_IO ||
                  status == GEMINI_ERR_OOM_FILE;
  if (!of_fault || before == failed) fail(__LINE__, "a failure without a fault", status);
  return false;
}
#define CALL(call) (before = failed && !no_writes && !no_reads, passes(call))

typedef struct {
  uint8_t *ptr;
  uint64_t size, seed;
  uint8_t expected[];
} job_t;
static void pattern(uint8_t *to, uint64_t size, uint64_t from) {
  uint64_t r = from | 1;
  for (uint64_t i = 0; i < size; i += 8) {
    uint64_t value = check_random(&r);
    memcpy(to + i, &value, size - i < 8 ? size - i : 8);
  }
}
static void job(void *user) {
  job_t *j = user;
  if (memcmp(j->ptr, j->expected, j->size)) fail(__LINE__, "wrong bytes on a stream", 0);
  if (j->seed) pattern(j->ptr, j->size, j->seed);
  free(j);
}

static void use(gemini_manager_t mgr, gemini_arena_t arena, gemini_stream_t stream, uint64_t *r) {
  gemini_access_t a = ACCESS(arena, below(r, SIZE), 0, 0, 0);
  a.size_bytes = 1 + below(r, SIZE - a.offset_bytes);
  if (a.size_bytes > 2 * CHUNK) a.size_bytes = 2 * CHUNK;
  a.mode = below(r, 2) ? GEMINI_READ : GEMINI_READ_WRITE;
  a.tier = (uint32_t)below(r, 2);
  if (!CALL(gemini_acquire(mgr, &a, 1, stream))) return;
  uint64_t write = a.mode == GEMINI_READ ? 0 : check_random(r);
  job_t *j = malloc(sizeof *j + a.size_bytes);
  NEED(j);
  *j = (job_t){ a.ptr, a.size_bytes, write };
  memcpy(j->expected, model + a.offset_bytes, a.size_bytes);
  if (write) pattern(model + a.offset_bytes, a.size_bytes, write);
  if (a.tier == GEMINI_TIER_HOST) job(j);
  else MUST(gemini_stream_call(mgr, stream, job, j));
  if (!CALL(gemini_release(mgr, &a, 1, stream))) return; /* is released all the same */
}

static void program(const char *dir) {
  uint64_t state = seed * 2 + 1, *r = &state;
  for (int i = 0; i < 3; i++) check_random(r);
  fault = (uint32_t)below(r, FAULTS);
  failed = false;
  countdown = -1;
  step = 0;
  memset(model, 0, sizeof model);
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.chunk_bytes = CHUNK;
  c.device_bytes = (6 + below(r, 4)) * CHUNK;
  c.host_bytes = (5 + below(r, 8)) * CHUNK;
  c.file_bytes = 40 * CHUNK;
  c.file_dir = dir;
  c.flags = below(r, 3) ? 0 : GEMINI_CONFIG_STRICT;
  c.file_engine = GEMINI_FILE_ENGINE_THREADS;
  gmi_sys_t sys = gmi_sys_real;
  sys.pwrite = sys_pwrite;
  sys.pread = sys_pread;
  gmi_files_sys = &sys;
  gemini_manager_t mgr;
  gemini_arena_t arena;
  gemini_arena_config_t ac = GEMINI_ARENA_CONFIG_INIT;
  ac.kind = GEMINI_KIND_OTHER;
  uint64_t offset;
  gemini_stream_t streams[3] = { 0 };
  MUST(gemini_manager_open(&c, &mgr));
  MUST(gemini_arena_create(mgr, &ac, &arena));
  MUST(gemini_arena_take(mgr, arena, SIZE, &offset));
  for (int i = 0; i < 2; i++) MUST(gemini_stream_create(mgr, &streams[i]));
  gmi_device_ops_t faulty;
  inject(mgr, &faulty, fault);
  bool file = fault == FAULT_WRITE || fault == FAULT_READ;
  int break_at = (int)below(r, STEPS);
  if (!file) countdown = (int64_t)below(r, 60);
  void *block = NULL;
  for (step = 1; step <= STEPS; step++) {
    gemini_stream_t stream = streams[below(r, 3)];
    if (file && step == break_at) file_break(fault == FAULT_WRITE), failed = true;
    if (file && step == break_at + 4) file_mend();
    gemini_access_t a = ACCESS(arena, below(r, SIZE), 0, GEMINI_READ, 0);
    a.size_bytes = 1 + below(r, SIZE - a.offset_bytes);
    switch (below(r, 8)) {
    case 0:
      a.tier = (uint32_t)below(r, 3);
      if (a.size_bytes > 2 * CHUNK) a.size_bytes = 2 * CHUNK;
      (void)CALL(gemini_move(mgr, &a, 1));
      break;
    case 1:
      a.tier = (uint32_t)below(r, 3);
      (void)CALL(gemini_hint(mgr, &a, 1));
      break;
    case 2:
      if (block) {
        MUST(gemini_free(mgr, block, GEMINI_STREAM_CALLER));
        block = NULL;
      } else if (CALL(gemini_alloc(mgr, 1 + below(r, CHUNK), GEMINI_STREAM_CALLER, &block))) {
        memset(block, 0x5a, 1);
      }
      break;
    case 3:
      if (a.size_bytes > CHUNK) a.size_bytes = CHUNK;
      if (CALL(gemini_pin(mgr, &a))) MUST(gemini_unpin(mgr, &a));
      break;
    default: use(mgr, arena, stream, r);
    }
  }
  file_mend();
  countdown = -1;
  /* Everything works again, and nothing was lost. */
  if (block) MUST(gemini_free(mgr, block, GEMINI_STREAM_CALLER));
  for (uint64_t at = 0; at < SIZE; at += CHUNK) {
    gemini_access_t a = ACCESS(arena, at, 0, GEMINI_READ, 0);
    a.size_bytes = SIZE - at < CHUNK ? SIZE - at : CHUNK;
    a.tier = (uint32_t)below(r, 2);
    MUST(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
    if (memcmp(a.ptr, model + at, a.size_bytes)) fail(__LINE__, "wrong bytes in the end, at", (int64_t)at);
    MUST(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  MUST(gemini_arena_destroy(mgr, arena));
  figures_t s = { 0 };
  MUST(figures_read(mgr, &s));
  NEED(s.used_bytes[1] == 0 && s.used_bytes[2] == 0 && s.nonmodel_bytes == 0);
  gemini_status_t closed = gemini_manager_close(mgr);
  if (closed && !failed) fail(__LINE__, "gemini_manager_close", closed);
}

static void hangs(int number) {
  (void)number;
  fail(__LINE__, "no end", 0);
}
static void test_one_failing_call_loses_no_byte(void) {
  char dir[64];
  dir_make(dir);
  seed = seed_begin(__func__);
  signal(SIGALRM, hangs);
  /* Two in five programs meet their fault. Of the wanted programs too few may have met it by chance: others follow, up
   * to four times as many in all. Of 84 programs at least 6 meet theirs in all but one run of 10^9. */
  uint64_t count = seed_setting("GEMINI_STRESS_STEPS", 200 * STEPS) / STEPS + 1, met = 0, run = 0;
  for (; run < count || (met <= count / 4 && run < 4 * count); run++, seed++) {
    alarm(300);
    program(dir);
    met += failed;
  }
  alarm(0);
  fprintf(stderr, "  %" PRIu64 " programs, the fault was met in %" PRIu64 "\n", run, met);
  CHECK(count < 20 || met > count / 4);
  rmdir(dir);
}

/* ---- single failures, with the work before them still under way */
static void slow_job(void *user) {
  nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
  job(user);
}
static void queue(gemini_manager_t mgr, gemini_access_t a, uint64_t expected, uint64_t write, bool slow,
                  gemini_stream_t stream) {
  job_t *j = calloc(1, sizeof *j + CHUNK);
  NEED(j);
  *j = (job_t){ a.ptr, CHUNK, write };
  if (expected) pattern(j->expected, CHUNK, expected);
  if (stream) MUST(gemini_stream_call(mgr, stream, slow ? slow_job : job, j));
  else job(j);
  MUST(gemini_release(mgr, &a, 1, stream));
}
static gemini_arena_t small_world(uint64_t device, uint64_t host, uint64_t chunks, gemini_manager_t *mgr_out,
                                  gemini_stream_t streams_out[3]) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.chunk_bytes = CHUNK;
  c.device_bytes = device * CHUNK;
  c.host_bytes = host * CHUNK;
  gemini_arena_t arena;
  gemini_arena_config_t ac = GEMINI_ARENA_CONFIG_INIT;
  ac.capacity_bytes = chunks * CHUNK;
  uint64_t offset;
  MUST(gemini_manager_open(&c, mgr_out));
  MUST(gemini_arena_create(*mgr_out, &ac, &arena));
  MUST(gemini_arena_take(*mgr_out, arena, chunks * CHUNK, &offset));
  for (int i = 0; i < 3; i++) MUST(gemini_stream_create(*mgr_out, &streams_out[i]));
  return arena;
}
static gemini_status_t hold(gemini_manager_t mgr, gemini_access_t *a, uint64_t chunk, uint32_t mode, uint32_t tier,
                            gemini_stream_t stream) {
  a->offset_bytes = chunk * CHUNK;
  a->size_bytes = CHUNK;
  a->mode = mode;
  a->tier = tier;
  return gemini_acquire(mgr, a, 1, stream);
}
/* A chunk's bytes are still being read from its host slot when another chunk gets that, whose copy into it is not
 * queued at first. */
static void test_a_copy_that_is_not_queued_leaves_those_before_it_in_force(void) {
  uint32_t met = 0;
  for (int64_t n = 0; n < 6; n++) {
    gemini_manager_t mgr;
    gemini_stream_t streams[3];
    gemini_arena_t arena = small_world(2, 1, 4, &mgr, streams);
    gemini_access_t a = ACCESS(arena, 0, 0, 0, 0);
    MUST(hold(mgr, &a, 0, GEMINI_READ_WRITE, GEMINI_TIER_HOST, GEMINI_STREAM_CALLER));
    queue(mgr, a, 0, 77, false, GEMINI_STREAM_CALLER);
    MUST(hold(mgr, &a, 1, GEMINI_READ, GEMINI_TIER_DEVICE, streams[0]));
    queue(mgr, a, 0, 0, true, streams[0]); /* its frame is taken, and what comes into it waits */
    MUST(hold(mgr, &a, 2, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE, streams[1]));
    queue(mgr, a, 0, 88, false, streams[1]);
    MUST(hold(mgr, &a, 0, GEMINI_READ, GEMINI_TIER_DEVICE, streams[2]));
    queue(mgr, a, 77, 0, false, streams[2]);
    gmi_device_ops_t faulty;
    inject(mgr, &faulty, n % 2 ? FAULT_MARK : FAULT_WAIT);
    countdown = n / 2;
    gemini_status_t status = hold(mgr, &a, 3, GEMINI_READ, GEMINI_TIER_DEVICE, streams[1]); /* 2 goes to 0's slot */
    if (status) NEED(failed && named(status));
    met += status != GEMINI_OK;
    countdown = -1;
    if (status) MUST(hold(mgr, &a, 3, GEMINI_READ, GEMINI_TIER_DEVICE, streams[1]));
    MUST(gemini_release(mgr, &a, 1, streams[1]));
    MUST(gemini_stream_synchronize(mgr, streams[2]));
    MUST(hold(mgr, &a, 2, GEMINI_READ, GEMINI_TIER_HOST, GEMINI_STREAM_CALLER));
    queue(mgr, a, 88, 0, false, GEMINI_STREAM_CALLER);
    status = gemini_manager_close(mgr);
    NEED(!status || failed); /* it tells of what failed behind a call that went well */
  }
  CHECK(met > 1);
}

/* Half of a chunk is to become zero, behind what waits for a slow job, and the mark behind that fails. */
static void write_job(void *user) { pattern(user, CHUNK, 88); }
static void test_what_is_written_after_a_zero_that_failed_stays(void) {
  gemini_manager_t mgr;
  gemini_stream_t streams[3];
  gemini_arena_t arena = small_world(2, 4, 3, &mgr, streams);
  gemini_access_t a = ACCESS(arena, 0, 0, 0, 0);
  MUST(hold(mgr, &a, 0, GEMINI_READ, GEMINI_TIER_DEVICE, streams[0]));
  queue(mgr, a, 0, 0, true, streams[0]);
  MUST(hold(mgr, &a, 1, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE, streams[1]));
  queue(mgr, a, 0, 77, false, streams[1]);
  MUST(gemini_stream_synchronize(mgr, streams[1]));
  MUST(hold(mgr, &a, 2, GEMINI_READ, GEMINI_TIER_DEVICE, streams[0])); /* comes into the frame of 0 */
  MUST(gemini_release(mgr, &a, 1, streams[0]));
  gmi_device_ops_t faulty;
  inject(mgr, &faulty, FAULT_MARK);
  countdown = 0;
  gemini_access_t half = ACCESS(arena, CHUNK, CHUNK / 2, 0, 0);
  gemini_status_t status = gemini_zero(mgr, &half);
  NEED(status == GEMINI_ERR_DEVICE && failed && named(status));
  MUST(hold(mgr, &a, 1, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE, streams[1]));
  MUST(gemini_stream_call(mgr, streams[1], write_job, a.ptr));
  MUST(gemini_release(mgr, &a, 1, streams[1]));
  MUST(gemini_stream_synchronize(mgr, streams[0])); /* by now all that was queued has run */
  MUST(hold(mgr, &a, 1, GEMINI_READ, GEMINI_TIER_DEVICE, streams[1]));
  queue(mgr, a, 88, 0, true, streams[1]);
  MUST(gemini_stream_synchronize(mgr, streams[1]));
  MUST(gemini_manager_close(mgr));
}

int main(void) {
  RUN(test_a_copy_that_is_not_queued_leaves_those_before_it_in_force);
  RUN(test_what_is_written_after_a_zero_that_failed_stays);
  RUN(test_one_failing_call_loses_no_byte);
  return check_done();
}
