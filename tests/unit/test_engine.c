/* One conformance suite for both engines of the file tier, over O_DIRECT and buffered files, with faults injected at
 * the table of system calls. SPDX-License-Identifier: Apache-2.0
 *
 * Under io_uring, transfers are no system calls: there the hook of io_uring_enter changes what lies in the submission
 * queue before the kernel sees it, and what lies in the completion queue before the engine does. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/status.h"
#include "check.h"
#include "io/engine.h"
#include "process.h"

enum { PAGE = 4096, PART = 64 << 10, LOG_LIMIT = 1 << 14, SLOT_LIMIT = 4096 };

static uint32_t kind;
static bool direct;

/* --- faults --- */

enum { GO, FAIL, SHORTEN, END, PRETEND, HOLD };
typedef struct op {
  bool write;
  uint64_t offset, size;
  uint32_t tries; /* at this offset before, in this direction */
} op_t;
typedef struct action {
  int what;      /* GO: as the kernel does it; END: as if the file ended; PRETEND: as if done; HOLD: once gate opens */
  int error;     /* FAIL */
  uint64_t size; /* SHORTEN: to so many bytes */
} action_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static action_t (*plan)(const op_t *op); /* NULL: GO. Called with lock held */
static op_t op_log[LOG_LIMIT];           /* transfers as they were handed to the kernel; guarded by lock */
static uint32_t op_count;
static int gate = -1; /* an eventfd, readable when held transfers may go on */
static int file_fd = -1;
static uint32_t file_id;

static action_t decide(bool write, uint64_t offset, uint64_t size) {
  pthread_mutex_lock(&lock);
  op_t op = { .write = write, .offset = offset, .size = size };
  for (uint32_t i = 0; plan && i < op_count; i++) op.tries += op_log[i].offset == offset && op_log[i].write == write;
  CHECK(op_count < LOG_LIMIT);
  op_log[op_count++] = op;
  action_t action = plan ? plan(&op) : (action_t){ GO, 0, 0 };
  pthread_mutex_unlock(&lock);
  return action;
}
static uint32_t op_total(void) {
  pthread_mutex_lock(&lock);
  uint32_t count = op_count;
  pthread_mutex_unlock(&lock);
  return count;
}

static void gate_wait(void) {
  struct pollfd fd = { gate, POLLIN, 0 };
  while (poll(&fd, 1, -1) != 1) {
  }
}
static void gate_open(void) {
  uint64_t one = 1;
  CHECK(write(gate, &one, sizeof one) == sizeof one);
}

/* What a direct file takes; the result says the rest. */
static uint64_t shortened(uint64_t size) { return direct ? (size + PAGE - 1) / PAGE * PAGE : size; }

static ssize_t transfer(bool write, int fd, void *buffer, size_t size, off_t offset) {
  action_t action = decide(write, (uint64_t)offset, size);
  ssize_t n;
  switch (action.what) {
  case FAIL: errno = action.error; return -1;
  case END: return 0;
  case PRETEND: return (ssize_t)size;
  case HOLD: gate_wait(); break;
  case SHORTEN:
    n = write ? pwrite(fd, buffer, shortened(action.size), offset) : pread(fd, buffer, shortened(action.size), offset);
    return n > (ssize_t)action.size ? (ssize_t)action.size : n;
  }
  return write ? pwrite(fd, buffer, size, offset) : pread(fd, buffer, size, offset);
}
static ssize_t hook_pread(int fd, void *buffer, size_t size, off_t offset) {
  return transfer(false, fd, buffer, size, offset);
}
static ssize_t hook_pwrite(int fd, const void *buffer, size_t size, off_t offset) {
  return transfer(true, fd, (void *)(uintptr_t)buffer, size, offset);
}

/* By slot, what becomes of its result; of the one ring that a test has, so that its thread alone uses it. */
static struct {
  action_t action;
  bool write;
  void *buffer;
  uint64_t offset, size;
} held[SLOT_LIMIT];
static unsigned seen; /* position in the submission queue up to which decide() has been asked */
static int (*submit_fault)(struct io_uring *ring); /* 0, or what io_uring_enter is to return without being called */
static bool overflowed;

static int hook_submit(struct io_uring *ring, unsigned completions) {
  int n = submit_fault ? submit_fault(ring) : 0;
  if (n) return n;
  for (; seen != ring->sq.sqe_tail; seen++) {
    struct io_uring_sqe *sqe = &ring->sq.sqes[seen & *ring->sq.kring_mask];
    bool write = sqe->opcode == IORING_OP_WRITE || sqe->opcode == IORING_OP_WRITE_FIXED;
    bool read = sqe->opcode == IORING_OP_READ || sqe->opcode == IORING_OP_READ_FIXED;
    if ((!read && !write) || sqe->user_data == UINT64_MAX) continue;
    uint64_t slot = sqe->user_data;
    CHECK(slot < SLOT_LIMIT);
    held[slot].action = decide(write, sqe->off, sqe->len);
    held[slot].write = write;
    held[slot].buffer = (void *)(uintptr_t)sqe->addr;
    held[slot].offset = sqe->off;
    held[slot].size = sqe->len;
    switch (held[slot].action.what) {
    case GO: break;
    case SHORTEN: sqe->len = (unsigned)shortened(held[slot].action.size); break;
    case HOLD:
      memset(sqe, 0, sizeof *sqe);
      io_uring_prep_poll_add(sqe, gate, POLLIN);
      sqe->user_data = slot;
      break;
    default:
      memset(sqe, 0, sizeof *sqe);
      io_uring_prep_nop(sqe);
      sqe->user_data = slot;
    }
  }
  n = gmi_sys_real.ring_submit_and_wait(ring, completions);
  overflowed |= (*ring->sq.kflags & IORING_SQ_CQ_OVERFLOW) != 0;
  struct io_uring_cqe *cqe;
  unsigned head;
  io_uring_for_each_cqe(ring, head, cqe) {
    if (cqe->user_data >= SLOT_LIMIT) continue;
    uint64_t slot = cqe->user_data;
    action_t *action = &held[slot].action;
    switch (action->what) {
    case FAIL: cqe->res = -action->error; break;
    case END: cqe->res = 0; break;
    case PRETEND: cqe->res = (int)held[slot].size; break;
    case SHORTEN:
      if (cqe->res > (int)action->size) cqe->res = (int)action->size;
      break;
    case HOLD:
      if (held[slot].write)
        cqe->res = (int)pwrite(file_fd, held[slot].buffer, held[slot].size, (off_t)held[slot].offset);
      else cqe->res = (int)pread(file_fd, held[slot].buffer, held[slot].size, (off_t)held[slot].offset);
      break;
    }
    action->what = GO;
  }
  return n;
}
static int hook_init(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  seen = 0;
  return gmi_sys_real.ring_init(entries, ring, params);
}

static gmi_sys_t sys;
static gmi_engine_t *engine;

/* --- a world: hooks, an engine, a file --- */

static void faults_reset(void) {
  sys = gmi_sys_real;
  sys.pread = hook_pread;
  sys.pwrite = hook_pwrite;
  sys.ring_init = hook_init;
  sys.ring_submit_and_wait = hook_submit;
  plan = NULL;
  submit_fault = NULL;
  overflowed = false;
  op_count = 0;
  memset(held, 0, sizeof held);
}

static int file_make(bool as_direct) {
  int flags = O_RDWR | O_CLOEXEC | (as_direct ? O_DIRECT : 0);
  int fd = open(".", O_TMPFILE | flags, 0600);
  if (fd < 0 && errno != EINVAL) {
    char path[] = "test_engine.XXXXXX";
    fd = mkostemp(path, flags & ~O_RDWR);
    if (fd >= 0) unlink(path);
  }
  return fd;
}

static void engine_make(uint32_t depth, uint32_t part_bytes) {
  gmi_engine_config_t config = { .kind = kind, .depth = depth, .part_bytes = part_bytes, .sys = &sys };
  CHECK_EQ(gmi_engine_open(&config, &engine), GEMINI_OK);
  CHECK((gate = eventfd(0, EFD_CLOEXEC)) >= 0);
  CHECK((file_fd = file_make(direct)) >= 0);
  CHECK_EQ(gmi_engine_file_add(engine, file_fd, direct, &file_id), GEMINI_OK);
}
static void world_begin(uint32_t depth) {
  faults_reset();
  engine_make(depth, PART);
}
static void world_end(void) {
  gmi_engine_close(engine);
  engine = NULL;
  CHECK_EQ(close(file_fd), 0);
  CHECK_EQ(close(gate), 0);
  file_fd = gate = -1;
}

static uint8_t *pages(uint64_t size) {
  uint8_t *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  return memory;
}
static void fill(uint8_t *bytes, uint64_t size, uint64_t seed) {
  for (uint64_t i = 0; i + 8 <= size; i += 8) {
    uint64_t value = (seed + i) * UINT64_C(0x9e3779b97f4a7c15);
    memcpy(bytes + i, &value, 8);
  }
}

/* --- requests --- */

static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static uint32_t done_count; /* guarded by lock */
static gmi_request_t *done_order[4096];

static void note(gmi_request_t *r) {
  pthread_mutex_lock(&lock);
  if (done_count < 4096) done_order[done_count] = r;
  done_count++;
  pthread_cond_broadcast(&finished);
  pthread_mutex_unlock(&lock);
}
static void submit(gmi_request_t *requests, uint32_t count) {
  gmi_request_t **list = calloc(count, sizeof *list);
  CHECK(list);
  for (uint32_t i = 0; i < count; i++) {
    list[i] = &requests[i];
    if (!requests[i].done) requests[i].done = note;
  }
  gmi_engine_submit(engine, list, count);
  free(list);
}
static void wait_done(uint32_t count) {
  pthread_mutex_lock(&lock);
  while (done_count < count) pthread_cond_wait(&finished, &lock);
  pthread_mutex_unlock(&lock);
}
static void wait_ops(uint32_t count) {
  while (op_total() < count) nanosleep(&(struct timespec){ 0, 100000 }, NULL);
}
static void run(gmi_request_t *requests, uint32_t count) {
  pthread_mutex_lock(&lock);
  done_count = 0;
  pthread_mutex_unlock(&lock);
  submit(requests, count);
  wait_done(count);
}
static gmi_request_t request(bool write, void *buffer, uint64_t size, uint64_t offset) {
  return (
      gmi_request_t){ .buffer = buffer, .size_bytes = size, .offset_bytes = offset, .file = file_id, .write = write };
}
static gmi_request_t run_one(bool write, void *buffer, uint64_t size, uint64_t offset) {
  gmi_request_t r = request(write, buffer, size, offset);
  run(&r, 1);
  return r;
}
static void check_ok(const gmi_request_t *r) {
  CHECK_EQ(r->native_code, 0);
  CHECK_EQ(r->status, GEMINI_OK);
  CHECK_EQ(r->done_bytes, r->size_bytes);
  CHECK(r->detail && !r->detail[0]);
}
static gmi_engine_figures_t figures(void) {
  gmi_engine_figures_t f;
  gmi_engine_figures(engine, &f);
  return f;
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
static double cpu_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- transfers --- */

/* Writes a file in pieces of many sizes, reads it back in others, with whatever faults the plan holds. */
static void round_trip(void) {
  enum { SIZE = 40 * PART };
  uint8_t *out = pages(SIZE), *in = pages(SIZE);
  gmi_request_t requests[256];
  uint64_t random = 7, unit = direct ? PAGE : 1;
  fill(out, SIZE, 1);
  for (int reading = 0; reading < 2; reading++) {
    uint32_t count = 0;
    for (uint64_t at = 0; at < SIZE; count++) {
      CHECK(count < 256);
      uint64_t size = (check_random(&random) % (3 * PART) + PAGE) / unit * unit;
      if (size > SIZE - at) size = SIZE - at;
      requests[count] = request(!reading, (reading ? in : out) + at, size, at);
      requests[count].urgent = check_random(&random) % 2;
      at += size;
    }
    run(requests, count);
    for (uint32_t i = 0; i < count; i++) check_ok(&requests[i]);
  }
  CHECK(!memcmp(in, out, SIZE));
  gmi_engine_figures_t f = figures();
  CHECK_EQ(f.read_bytes, SIZE);
  CHECK_EQ(f.written_bytes, SIZE);
  CHECK_EQ(f.in_flight, 0);
  munmap(out, SIZE);
  munmap(in, SIZE);
}
static void test_engine_round_trip_keeps_every_byte(void) {
  world_begin(8);
  round_trip();
  CHECK_EQ(figures().retries, 0);
  CHECK_EQ(figures().kind, kind);
  CHECK(strstr(figures().features, kind == GMI_ENGINE_URING ? "io_uring: " : "threads: "));
  world_end();
}

static action_t plan_short(const op_t *op) {
  /* Never less than a block, but not always whole ones. */
  uint64_t size = op->size > 2 * PAGE ? op->size / 3 + 4097 : op->size;
  return (action_t){ size < op->size ? SHORTEN : GO, 0, size };
}
static void test_engine_short_transfers_go_on(void) {
  world_begin(8);
  plan = plan_short;
  round_trip();
  CHECK(op_count > 4 * 40 + 100);
  world_end();
}

static action_t plan_eintr(const op_t *op) { return (action_t){ op->tries < 3 ? FAIL : GO, EINTR, 0 }; }
static void test_engine_eintr_is_tried_again(void) {
  world_begin(8);
  plan = plan_eintr;
  round_trip();
  gmi_engine_figures_t f = figures();
  CHECK_EQ(f.retries, 3 * f.parts);
  world_end();
}

/* More often than are tried at once, so that pauses come in. */
static action_t plan_eagain(const op_t *op) {
  return (action_t){ op->offset % (8 * PART) == 0 && op->tries < 12 ? FAIL : GO, EAGAIN, 0 };
}
static void test_engine_eagain_is_tried_again(void) {
  world_begin(8);
  plan = plan_eagain;
  uint8_t *bytes = pages(16 * PART), *back = pages(16 * PART);
  fill(bytes, 16 * PART, 3);
  gmi_request_t w = run_one(true, bytes, 16 * PART, 0), r = run_one(false, back, 16 * PART, 0);
  check_ok(&w);
  check_ok(&r);
  CHECK(!memcmp(bytes, back, 16 * PART));
  CHECK_EQ(figures().retries, 2 * 2 * 12);
  munmap(bytes, 16 * PART);
  munmap(back, 16 * PART);
  world_end();
}

static action_t plan_never(const op_t *op) { return (action_t){ op->offset == 2 * PART ? FAIL : GO, EAGAIN, 0 }; }
static void test_engine_eagain_for_ever_fails(void) {
  world_begin(8);
  plan = plan_never;
  uint8_t *bytes = pages(4 * PART);
  double begin = now_s();
  gmi_request_t w = run_one(true, bytes, 4 * PART, 0);
  CHECK_EQ(w.status, GEMINI_ERR_IO);
  CHECK_EQ(w.native_code, EAGAIN);
  CHECK_EQ(w.done_bytes, 2 * PART);
  CHECK(w.detail[0]);
  CHECK(now_s() - begin < 30);
  munmap(bytes, 4 * PART);
  world_end();
}

/* --- failures --- */

static int fail_code;
static action_t plan_fail(const op_t *op) { return (action_t){ op->offset == 2 * PART ? FAIL : GO, fail_code, 0 }; }
static void fail_case(bool write, int error, gemini_status_t status) {
  world_begin(8);
  uint8_t *bytes = pages(8 * PART), *back = pages(8 * PART);
  fill(bytes, 8 * PART, 5);
  gmi_request_t r = run_one(true, bytes, 8 * PART, 0);
  check_ok(&r);
  fail_code = error;
  plan = plan_fail;
  /* One in the middle of which it happens, with parts before and after; and one that it does not concern. */
  gmi_request_t two[2] = { request(write, write ? bytes : back, 5 * PART, 0),
                           request(write, (write ? bytes : back) + 5 * PART, 3 * PART, 5 * PART) };
  run(two, 2);
  CHECK_EQ(two[0].status, status);
  CHECK_EQ(two[0].native_code, error);
  CHECK_EQ(two[0].done_bytes, 2 * PART);
  check_ok(&two[1]);
  if (!write) CHECK(!memcmp(back, bytes, 2 * PART) && !memcmp(back + 5 * PART, bytes + 5 * PART, 3 * PART));
  plan = NULL; /* the engine goes on as if nothing had been */
  r = run_one(write, bytes, 5 * PART, 0);
  check_ok(&r);
  CHECK_EQ(figures().in_flight, 0);
  munmap(bytes, 8 * PART);
  munmap(back, 8 * PART);
  world_end();
}
static void test_engine_eio_on_read_fails_with_io(void) { fail_case(false, EIO, GEMINI_ERR_IO); }
static void test_engine_eio_on_write_fails_with_io(void) { fail_case(true, EIO, GEMINI_ERR_IO); }
static void test_engine_enospc_late_fails_with_oom_file(void) { fail_case(true, ENOSPC, GEMINI_ERR_OOM_FILE); }
static void test_engine_edquot_fails_with_oom_file(void) { fail_case(true, EDQUOT, GEMINI_ERR_OOM_FILE); }

/* Of several parts that fail, the lowest counts; what has not been handed over when one fails never is. */
static action_t plan_all_fail(const op_t *op) { return (action_t){ FAIL, op->offset == 0 ? ENXIO : EIO, 0 }; }
static void test_engine_failed_request_stops(void) {
  world_begin(4);
  plan = plan_all_fail;
  uint8_t *bytes = pages(64 * PART);
  gmi_request_t r = run_one(true, bytes, 64 * PART, 0);
  CHECK_EQ(r.status, GEMINI_ERR_IO);
  CHECK_EQ(r.native_code, ENXIO);
  CHECK_EQ(r.done_bytes, 0);
  CHECK(op_count < 16);
  munmap(bytes, 64 * PART);
  world_end();
}

static void test_engine_early_end_of_file_fails_with_io(void) {
  world_begin(8);
  enum { END_AT = 2 * PART + 10000 };
  uint8_t *bytes = pages(4 * PART), *back = pages(4 * PART);
  fill(bytes, 4 * PART, 9);
  gmi_request_t r = run_one(true, bytes, 4 * PART, 0);
  check_ok(&r);
  CHECK_EQ(ftruncate(file_fd, END_AT), 0);
  r = run_one(false, back, 4 * PART, 0);
  CHECK_EQ(r.status, GEMINI_ERR_IO);
  CHECK_EQ(r.native_code, 0);
  CHECK(!strcmp(r.detail, "the file ends early"));
  if (direct) CHECK(r.done_bytes <= END_AT && r.done_bytes >= 2 * PART);
  else CHECK_EQ(r.done_bytes, END_AT);
  CHECK(!memcmp(bytes, back, r.done_bytes));
  munmap(bytes, 4 * PART);
  munmap(back, 4 * PART);
  world_end();
}

static action_t plan_end(const op_t *op) { return (action_t){ op->offset == PART ? END : GO, 0, 0 }; }
static void test_engine_write_of_nothing_fails_with_io(void) {
  world_begin(8);
  plan = plan_end;
  uint8_t *bytes = pages(2 * PART);
  gmi_request_t r = run_one(true, bytes, 2 * PART, 0);
  CHECK_EQ(r.status, GEMINI_ERR_IO);
  CHECK_EQ(r.native_code, 0);
  CHECK_EQ(r.done_bytes, PART);
  CHECK(r.detail[0]);
  munmap(bytes, 2 * PART);
  world_end();
}

static void invalid_case(gmi_request_t r, const char *word) {
  run(&r, 1);
  CHECK_EQ(r.status, GEMINI_ERR_INVALID);
  CHECK_EQ(r.native_code, EINVAL);
  CHECK_EQ(r.done_bytes, 0);
  CHECK(strstr(r.detail, word));
  CHECK_EQ(op_total(), 0);
}
static void test_engine_bad_requests_are_refused(void) {
  world_begin(8);
  uint8_t *bytes = pages(2 * PAGE);
  for (int write = 0; write < 2; write++) {
    invalid_case(request(write, bytes, 0, 0), "size");
    invalid_case(request(write, NULL, PAGE, 0), "buffer");
    invalid_case(request(write, bytes, PAGE, (uint64_t)INT64_MAX / PAGE * PAGE), "offset");
    invalid_case(request(write, bytes, UINT64_MAX / PAGE * PAGE, PAGE), "offset");
    gmi_request_t r = request(write, bytes, PAGE, 0);
    r.file = file_id + 1;
    invalid_case(r, "file");
    if (!direct) continue;
    invalid_case(request(write, bytes, PAGE, 100), "offset");
    invalid_case(request(write, bytes, PAGE + 100, 0), "size");
    invalid_case(request(write, bytes + 1, PAGE, 0), "buffer");
  }
  CHECK_EQ(figures().in_flight, 0);
  munmap(bytes, 2 * PAGE);
  world_end();
}

/* --- large requests --- */

static action_t plan_pretend(const op_t *op) {
  return (action_t){ op->offset == 0 || op->offset + op->size == (UINT64_C(5) << 29) ? GO : PRETEND, 0, 0 };
}
/* The first part and the last are real, in a file with a hole; what lies between is never touched. */
static void large_case(uint32_t part_bytes) {
  faults_reset();
  engine_make(4, part_bytes);
  uint64_t size = UINT64_C(5) << 29, edge = 1 << 20; /* 2.5 GiB */
  uint8_t *bytes = pages(size);
  fill(bytes, PAGE, 1);
  fill(bytes + size - PAGE, PAGE, 2);
  plan = plan_pretend;
  gmi_request_t r = run_one(true, bytes, size, 0);
  check_ok(&r);
  madvise(bytes, size, MADV_DONTNEED);
  r = run_one(false, bytes, size, 0);
  check_ok(&r);
  uint8_t expected[PAGE];
  fill(expected, PAGE, 1);
  CHECK(!memcmp(bytes, expected, PAGE));
  fill(expected, PAGE, 2);
  CHECK(!memcmp(bytes + size - PAGE, expected, PAGE));
  CHECK_EQ(bytes[edge], 0);
  uint64_t covered[2] = { 0, 0 };
  for (uint32_t i = 0; i < op_count; i++) {
    CHECK(op_log[i].size <= part_bytes);
    covered[op_log[i].write] += op_log[i].size;
  }
  CHECK_EQ(covered[0], size);
  CHECK_EQ(covered[1], size);
  munmap(bytes, size);
  world_end();
}
static void test_engine_request_over_2_gib_is_whole(void) { large_case(4 << 20); }

/* As long as parts can be. */
static action_t plan_pretend_all(const op_t *op) {
  (void)op;
  return (action_t){ PRETEND, 0, 0 };
}
static void test_engine_longest_parts_over_2_gib(void) {
  faults_reset();
  engine_make(4, 1 << 30);
  plan = plan_pretend_all;
  uint64_t size = (UINT64_C(5) << 30) + PAGE;
  uint8_t *bytes = pages(size);
  gmi_request_t r = run_one(false, bytes, size, UINT64_C(1) << 40);
  check_ok(&r);
  CHECK_EQ(op_count, 6);
  CHECK_EQ(figures().read_bytes, size);
  munmap(bytes, size);
  world_end();
}

/* --- many at once, and their order --- */

enum { SUBMITTERS = 6, ROUNDS = 40 };
static uint8_t *shared_out, *shared_in;
typedef struct submitter {
  pthread_t thread;
  uint32_t index;
  pthread_mutex_t lock;
  pthread_cond_t cond;
  bool over;
} submitter_t;
static void submitter_done(gmi_request_t *r) {
  submitter_t *s = r->user;
  pthread_mutex_lock(&s->lock);
  s->over = true;
  pthread_cond_signal(&s->cond);
  pthread_mutex_unlock(&s->lock);
}
static void *submitter(void *user) {
  submitter_t *s = user;
  for (uint64_t k = 0; k < ROUNDS; k++) {
    uint64_t at = (s->index * ROUNDS + k) * 2 * PAGE;
    for (int write = 1; write >= 0; write--) {
      gmi_request_t r = request(write, (write ? shared_out : shared_in) + at, 2 * PAGE, at), *list = &r;
      r.urgent = k % 2;
      r.done = submitter_done;
      r.user = s;
      s->over = false;
      gmi_engine_submit(engine, &list, 1);
      pthread_mutex_lock(&s->lock);
      while (!s->over) pthread_cond_wait(&s->cond, &s->lock);
      pthread_mutex_unlock(&s->lock);
      check_ok(&r);
    }
  }
  return NULL;
}
static void test_engine_many_threads_submit_at_once(void) {
  enum { SIZE = SUBMITTERS * ROUNDS * 2 * PAGE };
  world_begin(4);
  shared_out = pages(SIZE);
  shared_in = pages(SIZE);
  fill(shared_out, SIZE, 11);
  static submitter_t s[SUBMITTERS];
  for (uint32_t i = 0; i < SUBMITTERS; i++) {
    s[i].index = i;
    pthread_mutex_init(&s[i].lock, NULL);
    pthread_cond_init(&s[i].cond, NULL);
    CHECK_EQ(pthread_create(&s[i].thread, NULL, submitter, &s[i]), 0);
  }
  for (uint32_t i = 0; i < SUBMITTERS; i++) {
    pthread_join(s[i].thread, NULL);
    pthread_mutex_destroy(&s[i].lock);
    pthread_cond_destroy(&s[i].cond);
  }
  CHECK(!memcmp(shared_in, shared_out, SIZE));
  CHECK_EQ(figures().requests, 2 * SUBMITTERS * ROUNDS);
  munmap(shared_out, SIZE);
  munmap(shared_in, SIZE);
  world_end();
}

/* Each done submits the next; the last one says so. */
static uint32_t chain_left; /* guarded by lock */
static void chain(gmi_request_t *r) {
  check_ok(r);
  pthread_mutex_lock(&lock);
  bool more = chain_left && --chain_left;
  pthread_mutex_unlock(&lock);
  if (!more) {
    note(r);
    return;
  }
  r->write = !r->write;
  gmi_engine_submit(engine, &r, 1);
}
static void test_engine_done_submits_more(void) {
  world_begin(2);
  uint8_t *bytes = pages(PAGE);
  chain_left = 500;
  gmi_request_t r = request(true, bytes, PAGE, 0);
  r.done = chain;
  run(&r, 1);
  CHECK_EQ(figures().requests, 500);
  munmap(bytes, PAGE);
  world_end();
}

static void test_engine_close_finishes_what_is_in_flight(void) {
  world_begin(4);
  enum { COUNT = 64 };
  uint8_t *bytes = pages(COUNT * PART);
  static gmi_request_t requests[COUNT + 1];
  for (uint32_t i = 0; i < COUNT; i++) {
    requests[i] = request(true, bytes + i * PART, PART, i * PART);
    requests[i].urgent = i % 3 == 0;
  }
  requests[COUNT] = request(true, bytes, PAGE, 0); /* and one that goes on submitting */
  requests[COUNT].done = chain;
  chain_left = 50;
  done_count = 0;
  submit(requests, COUNT + 1);
  world_end();
  CHECK_EQ(done_count, COUNT + 1);
  for (uint32_t i = 0; i < COUNT; i++) check_ok(&requests[i]);
  munmap(bytes, COUNT * PART);
}

static action_t plan_hold_first(const op_t *op) { return (action_t){ op->offset == 0 ? HOLD : GO, 0, 0 }; }
/* One part in the kernel at once, and that one held back: what follows it is in the order of urgency. */
static void test_engine_urgent_goes_ahead_of_the_rest(void) {
  world_begin(1);
  plan = plan_hold_first;
  uint8_t *bytes = pages(16 * PART);
  gmi_request_t others[2] = { request(true, bytes, 4 * PART, 0), request(true, bytes + 4 * PART, PART, 4 * PART) };
  gmi_request_t urgent[2] = { request(true, bytes + 8 * PART, 2 * PART, 8 * PART),
                              request(true, bytes + 10 * PART, PART, 10 * PART) };
  urgent[0].urgent = urgent[1].urgent = true;
  done_count = 0;
  submit(others, 2);
  wait_ops(1);
  submit(urgent, 2);
  gate_open();
  wait_done(4);
  static const uint64_t order[] = { 0, 8, 9, 10, 1, 2, 3, 4 };
  CHECK_EQ(op_count, 8);
  for (uint32_t i = 0; i < 8; i++) CHECK_EQ(op_log[i].offset, order[i] * PART);
  CHECK(done_order[0] == &urgent[0] && done_order[1] == &urgent[1]);
  CHECK(done_order[2] == &others[0] && done_order[3] == &others[1]);
  munmap(bytes, 16 * PART);
  world_end();
}

static action_t plan_hold_writes(const op_t *op) { return (action_t){ op->write ? HOLD : GO, 0, 0 }; }
/* However many write-backs wait, the kernel is given some of them, and room is left for urgent reads, which are done
 * while not one write-back is. */
static void bounded_case(uint32_t depth, uint32_t part_bytes, uint32_t bound) {
  faults_reset();
  engine_make(depth, part_bytes);
  enum { COUNT = 40 };
  uint8_t *bytes = pages((uint64_t)COUNT * part_bytes), *back = pages(PAGE);
  static gmi_request_t writes[COUNT];
  CHECK_EQ(ftruncate(file_fd, (off_t)COUNT * part_bytes), 0);
  plan = plan_hold_writes;
  for (uint32_t i = 0; i < COUNT; i++)
    writes[i] = request(true, bytes + (uint64_t)i * part_bytes, part_bytes, (uint64_t)i * part_bytes);
  done_count = 0;
  submit(writes, COUNT);
  wait_ops(bound);
  gmi_request_t read = request(false, back, PAGE, 0);
  read.urgent = true;
  submit(&read, 1);
  wait_done(1);
  check_ok(&read);
  CHECK(done_order[0] == &read);
  CHECK_EQ(op_total(), bound + 1);
  gate_open();
  wait_done(COUNT + 1);
  munmap(bytes, (uint64_t)COUNT * part_bytes);
  munmap(back, PAGE);
  world_end();
}
static void test_engine_write_backs_leave_room_for_urgent_ones(void) { bounded_case(8, PAGE, 6); }
static void test_engine_write_backs_in_the_kernel_are_bounded_in_bytes(void) { bounded_case(16, 4 << 20, 4); }

/* Two files: one whose write-backs are held up does not hold up the other's. */
static void test_engine_slow_file_does_not_stop_another(void) {
  faults_reset();
  engine_make(16, 4 << 20);
  int fd = file_make(direct);
  uint32_t other;
  CHECK(fd >= 0);
  CHECK_EQ(gmi_engine_file_add(engine, fd, direct, &other), GEMINI_OK);
  uint8_t *bytes = pages(8 << 20);
  static gmi_request_t slow[8];
  plan = plan_hold_first;
  for (uint32_t i = 0; i < 8; i++) slow[i] = request(true, bytes, 4 << 20, 0);
  done_count = 0;
  submit(slow, 8);
  wait_ops(4);
  gmi_request_t r = request(true, bytes, PAGE, PAGE);
  r.file = other;
  submit(&r, 1);
  wait_done(1);
  CHECK(done_order[0] == &r);
  check_ok(&r);
  gate_open();
  wait_done(9);
  munmap(bytes, 8 << 20);
  world_end();
  close(fd);
}

/* --- life --- */

static void test_engine_leaves_nothing_behind(void) {
  faults_reset();
  uint8_t *bytes = pages(8 * PART);
  process_t before = { 0, 0 };
  for (int i = 0; i < 12; i++) {
    /* The first round fills caches of the system's libraries. */
    if (i == 1) before = process_now();
    engine_make(4, PART);
    CHECK_EQ(gmi_engine_buffer_add(engine, bytes, 8 * PART), GEMINI_OK);
    gmi_request_t r = run_one(i % 2, bytes, PART, 0);
    CHECK(i % 2 ? r.status == GEMINI_OK : r.status == GEMINI_ERR_IO);
    world_end();
  }
  process_check(before);
  munmap(bytes, 8 * PART);
}

static void test_engine_idle_burns_no_processor_time(void) {
  world_begin(8);
  uint8_t *bytes = pages(PAGE);
  gmi_request_t r = run_one(true, bytes, PAGE, 0);
  check_ok(&r);
  double begin = cpu_s();
  nanosleep(&(struct timespec){ 0, 200000000 }, NULL);
  CHECK(cpu_s() - begin < 0.02);
  munmap(bytes, PAGE);
  world_end();
}

static void test_engine_config_out_of_range_is_refused(void) {
  gmi_engine_config_t bad[] = { { .kind = 3 },
                                { .kind = kind, .depth = 4097 },
                                { .kind = kind, .part_bytes = 100 },
                                { .kind = kind, .part_bytes = UINT64_C(1) << 40 } };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK_EQ(gmi_engine_open(&bad[i], &engine), GEMINI_ERR_INVALID);
  gmi_engine_close(NULL);
  world_begin(1);
  for (uint32_t i = 1; i < GMI_ENGINE_FILES_LIMIT; i++)
    CHECK_EQ(gmi_engine_file_add(engine, file_fd, direct, &file_id), GEMINI_OK);
  CHECK_EQ(gmi_engine_file_add(engine, file_fd, direct, &file_id), GEMINI_ERR_INVALID);
  round_trip(); /* through the last one */
  world_end();
}

/* --- buffers --- */

static void test_engine_buffers_grow_part_by_part(void) {
  world_begin(8);
  enum { COUNT = 40 };
  uint8_t *bytes = pages(COUNT * 2 * PAGE), *back = pages(COUNT * 2 * PAGE);
  fill(bytes, COUNT * 2 * PAGE, 21);
  gmi_request_t r = run_one(true, bytes, COUNT * 2 * PAGE, 0);
  check_ok(&r);
  for (uint32_t i = 0; i < COUNT; i++) { /* not in the order of their addresses; they touch each other */
    uint32_t at = i * 7 % COUNT;
    CHECK_EQ(gmi_engine_buffer_add(engine, back + at * 2 * PAGE, 2 * PAGE), GEMINI_OK);
    r = run_one(false, back + at * 2 * PAGE, 2 * PAGE, at * 2 * PAGE);
    check_ok(&r);
  }
  CHECK(!memcmp(bytes, back, COUNT * 2 * PAGE));
  memset(back, 0, COUNT * 2 * PAGE);
  r = run_one(false, back, COUNT * 2 * PAGE, 0); /* across all of them */
  check_ok(&r);
  CHECK(!memcmp(bytes, back, COUNT * 2 * PAGE));
  if (kind == GMI_ENGINE_URING) {
    CHECK(strstr(figures().features, "40 registered buffers"));
    CHECK_EQ(gmi_engine_buffer_add(engine, back + PAGE, COUNT * 2 * PAGE), GEMINI_ERR_INVALID);
    CHECK_EQ(gmi_engine_buffer_add(engine, back, PAGE), GEMINI_ERR_INVALID);
    CHECK(strstr(figures().features, "40 registered buffers"));
  }
  CHECK_EQ(gmi_engine_buffer_add(engine, NULL, PAGE), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_engine_buffer_add(engine, back, 0), GEMINI_ERR_INVALID);
  gmi_engine_buffer_remove(engine, back + PAGE, 2 * PAGE); /* touches two */
  if (kind == GMI_ENGINE_URING) CHECK(strstr(figures().features, "38 registered buffers"));
  memset(back, 0, COUNT * 2 * PAGE);
  r = run_one(false, back, COUNT * 2 * PAGE, 0);
  check_ok(&r);
  CHECK(!memcmp(bytes, back, COUNT * 2 * PAGE));
  gmi_engine_buffer_remove(engine, back, COUNT * 2 * PAGE);
  if (kind == GMI_ENGINE_URING) CHECK(strstr(figures().features, " 0 registered buffers"));
  munmap(bytes, COUNT * 2 * PAGE);
  munmap(back, COUNT * 2 * PAGE);
  world_end();
}

/* New pages at an address that was registered: once removed, transfers go to them. */
static void test_engine_removed_buffer_may_change_its_pages(void) {
  world_begin(8);
  uint8_t *bytes = pages(PART);
  fill(bytes, PART, 31);
  CHECK_EQ(gmi_engine_buffer_add(engine, bytes, PART), GEMINI_OK);
  gmi_request_t r = run_one(true, bytes, PART, 0);
  check_ok(&r);
  gmi_engine_buffer_remove(engine, bytes, PART);
  CHECK(mmap(bytes, PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == bytes);
  CHECK_EQ(bytes[8], 0);
  CHECK_EQ(gmi_engine_buffer_add(engine, bytes, PART), GEMINI_OK);
  r = run_one(false, bytes, PART, 0);
  check_ok(&r);
  uint8_t *expected = pages(PART);
  fill(expected, PART, 31);
  CHECK(!memcmp(bytes, expected, PART));
  munmap(bytes, PART);
  munmap(expected, PART);
  world_end();
}

/* --- io_uring only --- */

static int init_error;
static int init_refused(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  (void)entries, (void)ring, (void)params;
  return -init_error;
}
static int submit_refused(struct io_uring *ring, unsigned completions) {
  (void)ring, (void)completions;
  return -EPERM;
}
static int eventfd_refused(unsigned value, int flags) {
  (void)value, (void)flags;
  errno = EMFILE;
  return -1;
}
static void refused_case(const char *word) {
  process_t before = process_now();
  gmi_engine_config_t config = { .kind = GMI_ENGINE_URING, .sys = &sys };
  engine = NULL;
  CHECK_EQ(gmi_engine_open(&config, &engine), GEMINI_ERR_UNSUPPORTED);
  CHECK(!engine);
  CHECK(strstr(gmi_fail_message(), "io_uring") && strstr(gmi_fail_message(), word));
  process_check(before);
  uint32_t asked = kind;
  kind = GMI_ENGINE_AUTO;
  engine_make(0, PART);
  kind = asked;
  CHECK_EQ(figures().kind, GMI_ENGINE_THREADS);
  CHECK(strstr(figures().features, "threads: io_uring is unavailable") && strstr(figures().features, word));
  round_trip();
  world_end();
  process_check(before);
}
static void test_engine_io_uring_refused_leaves_threads(void) {
  static const int errors[] = { EPERM, ENOSYS, EACCES, ENOMEM, EINVAL };
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    faults_reset();
    init_error = errors[i];
    sys.ring_init = init_refused;
    refused_case(strerror(errors[i]));
  }
  faults_reset();
  sys.ring_submit_and_wait = submit_refused;
  refused_case("io_uring_enter: Operation not permitted");
  faults_reset();
  sys.eventfd = eventfd_refused;
  refused_case("eventfd: Too many open files");
}

static void test_engine_auto_takes_io_uring(void) {
  faults_reset();
  kind = GMI_ENGINE_AUTO;
  engine_make(0, 0);
  kind = GMI_ENGINE_URING;
  CHECK_EQ(figures().kind, GMI_ENGINE_URING);
  round_trip();
  world_end();
}

static int files_refused(struct io_uring *ring, const int *fds, unsigned count) {
  (void)ring, (void)fds, (void)count;
  return -EMFILE;
}
static int files_update_refused(struct io_uring *ring, unsigned first, const int *fds, unsigned count) {
  (void)ring, (void)first, (void)fds, (void)count;
  return -EINVAL;
}
static int buffers_refused(struct io_uring *ring, unsigned count) {
  (void)ring, (void)count;
  return -EINVAL;
}
static int buffers_update_refused(struct io_uring *ring, unsigned first, const struct iovec *buffers, unsigned count) {
  (void)ring, (void)first, (void)buffers, (void)count;
  return -ENOMEM;
}
static void registration_case(const char *words) {
  engine_make(8, PART);
  uint8_t *bytes = pages(8 * PART);
  CHECK_EQ(gmi_engine_buffer_add(engine, bytes, 8 * PART), GEMINI_OK);
  gmi_request_t r = run_one(true, bytes, 8 * PART, 0);
  check_ok(&r);
  r = run_one(false, bytes, 8 * PART, 0);
  check_ok(&r);
  if (!strstr(figures().features, words)) fprintf(stderr, "features: %s\n", figures().features);
  CHECK(strstr(figures().features, words));
  gmi_engine_buffer_remove(engine, bytes, 8 * PART);
  munmap(bytes, 8 * PART);
  world_end();
}
static void test_engine_registration_refused_goes_without(void) {
  faults_reset();
  registration_case("registered files, 1 registered buffers");
  faults_reset();
  sys.ring_register_files = files_refused;
  registration_case("no registered files (Too many open files), 1 registered buffers");
  faults_reset();
  sys.ring_register_files_update = files_update_refused;
  registration_case("no registered files (Invalid argument)");
  faults_reset();
  sys.ring_register_buffers_sparse = buffers_refused;
  registration_case("0 registered buffers (Invalid argument: 0 MiB without)");
  faults_reset();
  sys.ring_register_buffers_update = buffers_update_refused;
  registration_case("0 registered buffers (Cannot allocate memory");
}

static unsigned least_buffers;
static int buffers_few(struct io_uring *ring, unsigned count) {
  return count > least_buffers ? -ENOMEM : gmi_sys_real.ring_register_buffers_sparse(ring, count);
}
static void test_engine_more_buffers_than_the_kernel_takes(void) {
  faults_reset();
  least_buffers = 16;
  sys.ring_register_buffers_sparse = buffers_few;
  engine_make(8, PART);
  uint8_t *bytes = pages(20 * PAGE);
  for (int i = 0; i < 20; i++) CHECK_EQ(gmi_engine_buffer_add(engine, bytes + i * PAGE, PAGE), GEMINI_OK);
  CHECK(strstr(figures().features, "16 registered buffers (No space left"));
  gmi_request_t r = run_one(true, bytes, 20 * PAGE, 0);
  check_ok(&r);
  gmi_engine_buffer_remove(engine, bytes, PAGE); /* its place is free again */
  CHECK_EQ(gmi_engine_buffer_add(engine, bytes + 19 * PAGE, PAGE), GEMINI_OK);
  CHECK(strstr(figures().features, "16 registered buffers"));
  munmap(bytes, 20 * PAGE);
  world_end();
}

static uint64_t piece_bytes[8];
static uint32_t piece_count;
static int buffers_counted(struct io_uring *ring, unsigned first, const struct iovec *buffers, unsigned count) {
  (void)ring, (void)first;
  CHECK(count == 1 && piece_count < 8);
  piece_bytes[piece_count++] = buffers->iov_len;
  return 1;
}
static void test_engine_large_buffer_is_registered_in_pieces(void) {
  faults_reset();
  sys.ring_register_buffers_update = buffers_counted;
  engine_make(8, PART);
  uint64_t size = (UINT64_C(5) << 29) + PAGE;
  uint8_t *bytes = pages(size);
  piece_count = 0;
  CHECK_EQ(gmi_engine_buffer_add(engine, bytes, size), GEMINI_OK);
  CHECK_EQ(piece_count, 3);
  CHECK_EQ(piece_bytes[0], 1 << 30);
  CHECK_EQ(piece_bytes[1], 1 << 30);
  CHECK_EQ(piece_bytes[2], (1 << 29) + PAGE);
  munmap(bytes, size);
  world_end();
}

static uint32_t flags_known;
static int init_old_kernel(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  return params->flags & ~flags_known ? -EINVAL : hook_init(entries, ring, params);
}
static void test_engine_older_kernels_get_plainer_rings(void) {
  enum { COOPERATIVE = 1 << 8, SUBMIT_ALL = 1 << 7 };
  faults_reset();
  flags_known = IORING_SETUP_CLAMP | SUBMIT_ALL | COOPERATIVE;
  sys.ring_init = init_old_kernel;
  engine_make(8, PART);
  CHECK(strstr(figures().features, "io_uring: cooperative task running, "));
  round_trip();
  world_end();
  faults_reset();
  flags_known = IORING_SETUP_CLAMP;
  sys.ring_init = init_old_kernel;
  engine_make(8, PART);
  CHECK(strstr(figures().features, "io_uring: plain, "));
  round_trip();
  world_end();
}

static int init_tiny(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  (void)entries;
  params->flags |= IORING_SETUP_CQSIZE;
  params->cq_entries = 2;
  return hook_init(2, ring, params);
}
/* Queues far too short for what is in the kernel: results pile up there, and none is lost. */
static void test_engine_full_completion_queue_loses_nothing(void) {
  faults_reset();
  sys.ring_init = init_tiny;
  engine_make(64, PAGE);
  /* All held back, so that all results come at once. */
  enum { COUNT = 40 };
  uint8_t *bytes = pages(COUNT * PAGE);
  static gmi_request_t requests[COUNT];
  fill(bytes, COUNT * PAGE, 41);
  plan = plan_hold_writes;
  for (uint32_t i = 0; i < COUNT; i++) requests[i] = request(true, bytes + i * PAGE, PAGE, i * PAGE);
  done_count = 0;
  submit(requests, COUNT);
  wait_ops(COUNT);
  nanosleep(&(struct timespec){ 0, 20000000 }, NULL); /* the last of them has been logged, but not yet submitted */
  gate_open();
  wait_done(COUNT);
  for (uint32_t i = 0; i < COUNT; i++) check_ok(&requests[i]);
  plan = NULL;
  gmi_request_t r = run_one(false, bytes, COUNT * PAGE, 0);
  check_ok(&r);
  uint8_t *expected = pages(COUNT * PAGE);
  fill(expected, COUNT * PAGE, 41);
  CHECK(!memcmp(bytes, expected, COUNT * PAGE));
  world_end();
  CHECK(overflowed);
  munmap(bytes, COUNT * PAGE);
  munmap(expected, COUNT * PAGE);
}

static uint32_t submit_calls;
static int submit_moody(struct io_uring *ring) {
  static const int moods[] = { 0, -EAGAIN, 0, -EBUSY, -EINTR, 0, -ENOMEM, -EBUSY, -EAGAIN };
  (void)ring;
  return moods[submit_calls++ % (sizeof moods / sizeof *moods)];
}
static void test_engine_submission_refused_for_a_while_goes_on(void) {
  faults_reset();
  submit_calls = 0;
  submit_fault = submit_moody;
  engine_make(8, PART);
  round_trip();
  world_end();
  CHECK(submit_calls > 20);
}

static _Atomic int submit_error;
static int submit_broken(struct io_uring *ring) {
  /* Only calls that hand something over: others wait for what the kernel has. */
  return io_uring_sq_ready(ring) ? -atomic_load(&submit_error) : 0;
}
static void test_engine_submission_refused_for_ever_fails_parts(void) {
  faults_reset();
  submit_error = 0;
  submit_fault = submit_broken;
  engine_make(8, PART);
  uint8_t *bytes = pages(32 * PART);
  static const int errors[] = { EPERM, EINVAL, EAGAIN };
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    if (errors[i] == EAGAIN && direct) continue; /* takes a second: once is enough */
    atomic_store(&submit_error, errors[i]);
    gmi_request_t r[2] = { request(true, bytes, 4 * PART, 0), request(false, bytes, PART, 0) };
    run(r, 2);
    for (int k = 0; k < 2; k++) {
      CHECK_EQ(r[k].status, GEMINI_ERR_IO);
      CHECK_EQ(r[k].native_code, errors[i]);
      CHECK_EQ(r[k].done_bytes, 0);
      CHECK(!strcmp(r[k].detail, "io_uring_enter"));
    }
    CHECK_EQ(op_total(), 0);
  }
  atomic_store(&submit_error, 0);
  round_trip();
  munmap(bytes, 32 * PART);
  world_end();
}

/* --- */

static void suite(void) {
  fprintf(stderr, " %s, %s\n", kind == GMI_ENGINE_URING ? "io_uring" : "threads", direct ? "O_DIRECT" : "buffered");
  RUN(test_engine_round_trip_keeps_every_byte);
  RUN(test_engine_short_transfers_go_on);
  RUN(test_engine_eintr_is_tried_again);
  RUN(test_engine_eagain_is_tried_again);
  RUN(test_engine_eagain_for_ever_fails);
  RUN(test_engine_eio_on_read_fails_with_io);
  RUN(test_engine_eio_on_write_fails_with_io);
  RUN(test_engine_enospc_late_fails_with_oom_file);
  RUN(test_engine_edquot_fails_with_oom_file);
  RUN(test_engine_failed_request_stops);
  RUN(test_engine_early_end_of_file_fails_with_io);
  RUN(test_engine_write_of_nothing_fails_with_io);
  RUN(test_engine_bad_requests_are_refused);
  RUN(test_engine_request_over_2_gib_is_whole);
  RUN(test_engine_longest_parts_over_2_gib);
  RUN(test_engine_many_threads_submit_at_once);
  RUN(test_engine_done_submits_more);
  RUN(test_engine_close_finishes_what_is_in_flight);
  RUN(test_engine_urgent_goes_ahead_of_the_rest);
  RUN(test_engine_write_backs_leave_room_for_urgent_ones);
  RUN(test_engine_write_backs_in_the_kernel_are_bounded_in_bytes);
  RUN(test_engine_slow_file_does_not_stop_another);
  RUN(test_engine_leaves_nothing_behind);
  RUN(test_engine_idle_burns_no_processor_time);
  RUN(test_engine_config_out_of_range_is_refused);
  RUN(test_engine_buffers_grow_part_by_part);
  RUN(test_engine_removed_buffer_may_change_its_pages);
  if (kind != GMI_ENGINE_URING) return;
  RUN(test_engine_io_uring_refused_leaves_threads);
  RUN(test_engine_auto_takes_io_uring);
  RUN(test_engine_registration_refused_goes_without);
  RUN(test_engine_more_buffers_than_the_kernel_takes);
  RUN(test_engine_large_buffer_is_registered_in_pieces);
  RUN(test_engine_older_kernels_get_plainer_rings);
  RUN(test_engine_full_completion_queue_loses_nothing);
  RUN(test_engine_submission_refused_for_a_while_goes_on);
  RUN(test_engine_submission_refused_for_ever_fails_parts);
}

int main(void) {
  process_begin();
  static const uint32_t kinds[] = { GMI_ENGINE_THREADS, GMI_ENGINE_URING };
  for (int k = 0; k < 2; k++) {
    gmi_engine_config_t config = { .kind = kinds[k] };
    if (kinds[k] == GMI_ENGINE_URING) {
      if (gmi_engine_open(&config, &engine)) {
        fprintf(stderr, " io_uring: SKIPPED: %s\n", gmi_fail_message());
        continue;
      }
      gmi_engine_close(engine);
    }
    kind = kinds[k];
    for (int d = 0; d < 2; d++) {
      int fd = file_make(d);
      if (fd < 0) {
        fprintf(stderr, " O_DIRECT: SKIPPED: the current directory has none (%s)\n", strerror(errno));
        continue;
      }
      close(fd);
      direct = d;
      suite();
    }
  }
  return check_done();
}
