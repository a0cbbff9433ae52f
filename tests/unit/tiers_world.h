/* What tests of the host and file tiers share, at the manager's level: system calls of the file tier that fail when told
 * to, whichever engine makes them; an optimizer over three arenas beside plain arrays; a look for what was left behind.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef TIERS_WORLD_H
#define TIERS_WORLD_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <time.h>

#include "../integration/world.h"
#include "../process.h"
#include "chunk/arena.h"
#include "chunk/files.h"
#include "chunk/residency.h"
#include "core/manager.h"
#include "io/store.h"

static inline uint64_t below(uint64_t *r, uint64_t limit) { return (check_random(r) >> 11) % limit; }

/* ---- the file tier's system calls, and what they are to do wrong; of transfers of at least a page */
static struct {
  atomic_int error[2];        /* of reads, of writes: errno, or 0 */
  atomic_int after[2];        /* so many more go well before the first fails */
  atomic_int left[2];         /* so many fail; negative: all */
  atomic_llong only_at[2];    /* if not 0: of transfers at this offset, plus 1, in their file */
  atomic_int interrupted;     /* so many end with EINTR, and EAGAIN, in turns */
  atomic_int shortened;       /* so many are halved */
  atomic_int delay_us[2];     /* before each */
  atomic_int count[2];        /* transfers so far */
  atomic_int fallocate_error; /* errno, or 0 */
  atomic_int ring_error;      /* of io_uring_setup */
} faults;

static inline bool counted_down(atomic_int *left) {
  int now = atomic_load(left);
  while (now > 0)
    if (atomic_compare_exchange_weak(left, &now, now - 1)) return true;
  return false;
}
/* What becomes of a transfer: 0, or an errno; *size_io may get less. */
static inline int fault_of(bool write, long long offset, uint64_t *size_io) {
  atomic_fetch_add(&faults.count[write], 1);
  if (faults.delay_us[write]) sleep_us((uint64_t)faults.delay_us[write]);
  int error = atomic_load(&faults.error[write]);
  if (faults.only_at[write] && faults.only_at[write] != offset + 1) error = 0;
  if (error && !counted_down(&faults.after[write]) &&
      (atomic_load(&faults.left[write]) < 0 || counted_down(&faults.left[write])))
    return error;
  if (counted_down(&faults.interrupted)) return atomic_load(&faults.interrupted) & 1 ? EINTR : EAGAIN;
  if (*size_io > 4096 && counted_down(&faults.shortened)) *size_io = *size_io / 2 / 4096 * 4096;
  return 0;
}
static inline ssize_t fault_pread(int fd, void *buffer, size_t size, off_t offset) {
  uint64_t part = size;
  int error = fault_of(false, offset, &part);
  if (error) return errno = error, -1;
  return gmi_sys_real.pread(fd, buffer, part, offset);
}
static inline ssize_t fault_pwrite(int fd, const void *buffer, size_t size, off_t offset) {
  uint64_t part = size;
  int error = fault_of(true, offset, &part);
  if (error) return errno = error, -1;
  return gmi_sys_real.pwrite(fd, buffer, part, offset);
}
static inline int fault_fallocate(int fd, int mode, off_t offset, off_t size) {
  int error = faults.fallocate_error;
  return error ? (errno = error, -1) : gmi_sys_real.fallocate(fd, mode, offset, size);
}
static inline int fault_ring_init(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  return faults.ring_error ? -faults.ring_error : gmi_sys_real.ring_init(entries, ring, params);
}
/* What is about to be submitted is looked at here: a transfer that is to fail becomes nothing, and its result is put in
 * when it is over. On the thread of its ring; slots of several rings share a place only in tests that inject nothing. */
enum { RING_SLOTS = 4096 };
static struct {
  struct io_uring *ring;
  unsigned seen;
  int error[RING_SLOTS];
} rings[2];
static inline int fault_ring_submit(struct io_uring *ring, unsigned completions) {
  int r = rings[0].ring == ring ? 0 : rings[1].ring == ring ? 1 : rings[0].ring ? 1 : 0;
  if (rings[r].ring != ring) {
    rings[r].ring = ring;
    rings[r].seen = *ring->sq.khead;
    memset(rings[r].error, 0, sizeof rings[r].error);
  }
  for (; rings[r].seen != ring->sq.sqe_tail; rings[r].seen++) {
    struct io_uring_sqe *sqe = &ring->sq.sqes[rings[r].seen & *ring->sq.kring_mask];
    bool write = sqe->opcode == IORING_OP_WRITE || sqe->opcode == IORING_OP_WRITE_FIXED;
    bool read = sqe->opcode == IORING_OP_READ || sqe->opcode == IORING_OP_READ_FIXED;
    uint64_t slot = sqe->user_data, size = sqe->len;
    if ((!read && !write) || slot >= RING_SLOTS || size < 4096) continue;
    rings[r].error[slot] = fault_of(write, (long long)sqe->off, &size);
    sqe->len = (unsigned)size;
    if (!rings[r].error[slot]) continue;
    memset(sqe, 0, sizeof *sqe);
    io_uring_prep_nop(sqe);
    sqe->user_data = slot;
  }
  int n = gmi_sys_real.ring_submit_and_wait(ring, completions);
  struct io_uring_cqe *cqe;
  unsigned head;
  io_uring_for_each_cqe(ring, head, cqe) {
    if (cqe->user_data >= RING_SLOTS || !rings[r].error[cqe->user_data]) continue;
    cqe->res = -rings[r].error[cqe->user_data];
    rings[r].error[cqe->user_data] = 0;
  }
  return n;
}
static inline void fault_ring_exit(struct io_uring *ring) {
  for (int r = 0; r < 2; r++)
    if (rings[r].ring == ring) rings[r].ring = NULL;
  gmi_sys_real.ring_exit(ring);
}

static gmi_sys_t fault_sys;
static inline void faults_reset(void) {
  memset(&faults, 0, sizeof faults);
  memset(rings, 0, sizeof rings);
  fault_sys = gmi_sys_real;
  fault_sys.pread = fault_pread;
  fault_sys.pwrite = fault_pwrite;
  fault_sys.fallocate = fault_fallocate;
  fault_sys.ring_init = fault_ring_init;
  fault_sys.ring_exit = fault_ring_exit;
  fault_sys.ring_submit_and_wait = fault_ring_submit;
  gmi_files_sys = &fault_sys;
}
static inline void break_files(bool write, int error, int after, int left) {
  faults.after[write] = after;
  faults.left[write] = left;
  faults.error[write] = error;
}
static inline void mend_files(void) { faults.error[0] = faults.error[1] = 0; }

/* ---- which engine a test runs with, and whether there is one */
static uint32_t engine = GEMINI_FILE_ENGINE_THREADS;
static inline bool has_uring(void) {
#ifdef __SANITIZE_THREAD__ /* which does not see what the kernel does */
  return false;
#endif
  gmi_store_config_t config = {
    .directories = "/tmp", .block_bytes = 65536, .block_count = 1, .engine_kind = GMI_ENGINE_URING
  };
  gmi_store_t *store;
  if (gmi_store_open(&config, &store)) return false;
  gmi_store_close(store);
  return true;
}
static inline gemini_config_t tiers_config(uint64_t device_chunks, uint64_t host_chunks, uint64_t file_chunks) {
  gemini_config_t c = world_config(device_chunks, host_chunks, file_chunks);
  c.file_engine = engine;
  return c;
}

static inline void tiers_hang(int number) {
  (void)number;
  static const char text[] = "no end\n";
  (void)!write(2, text, sizeof text - 1);
  _exit(1);
}
static inline void tiers_begin(void) {
  signal(SIGALRM, tiers_hang);
  process_begin();
}
/* Each test ends, or the program does. */
#define RUN_TIMED(test)               \
  do {                                \
    if (!check_wants(#test)) break;   \
    alarm(600);                       \
    faults_reset();                   \
    process_t before = process_now(); \
    RUN(test);                        \
    process_check(before);            \
    alarm(0);                         \
  } while (0)

/* ---- inside a manager */
static inline gmi_chunk_t *chunk_of(const world_t *w, gemini_arena_t arena, uint64_t offset) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  return &gmi_arena_get(m, arena)->chunks[offset / WORLD_CHUNK];
}
static inline bool chunks_right(const world_t *w) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  uint64_t slots = 0, blocks = 0;
  gmi_lock(m, __func__);
  gmi_files_poll(m);
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && a->chunks && k < atomic_load(&a->chunk_count); k++) {
      if (!gmi_chunk_invariant(m, &a->chunks[k])) {
        fprintf(stderr, "chunk %u of arena %s: valid %#x, word %#x\n", k, a->name, a->chunks[k].valid_,
                atomic_load(&a->chunks[k].word_));
        return false;
      }
      slots += a->chunks[k].slot_ != GMI_NONE;
      blocks += a->chunks[k].block_ != GMI_NONE;
    }
  }
  uint64_t free = 0, used = 0;
  for (uint32_t s = 0; s < m->host.slot_count; s++) {
    bool taken = m->host.slots[s].chunk || m->host.slots[s].block;
    used += m->host.slots[s].block;
    free += !taken;
    if (taken == (m->host.free_map[s / 64] >> s % 64 & 1)) {
      fprintf(stderr, "slot %u is %s, the map says otherwise\n", s, taken ? "taken" : "free");
      return false;
    }
  }
  bool right = free == m->host.free_count && (m->io.count || blocks * gmi_block_bytes(m) == m->file.used) &&
               m->host.used >= (slots + used) * gmi_slot_bytes(m);
  if (!right)
    fprintf(stderr, "%" PRIu64 " slots are free, counted %u; host_used %" PRIu64 " of %" PRIu64 " chunks\n", free,
            m->host.free_count, m->host.used, slots);
  gmi_unlock(m);
  return right;
}

/* ---- an optimizer: parameters of 2 bytes, two states of 4 bytes each, and what all of them should be */
enum { PARAMS, MASTER, MOMENTUM, OPT_ARENAS };
static const uint32_t opt_bytes[OPT_ARENAS] = { 2, 4, 4 };
enum { OPT_STEPS = 4096 };
typedef struct {
  world_t w;
  gemini_arena_t arenas[OPT_ARENAS];
  uint64_t n; /* elements */
  uint8_t *model[OPT_ARENAS];
  uint32_t steps[OPT_STEPS], step_count; /* users of updates */
} opt_t;

OWN_MEMORY static inline void opt_compute(uint32_t step, uint16_t *params, uint32_t *master, uint32_t *momentum,
                                          uint64_t n) {
  for (uint64_t i = 0; i < n; i++) {
    momentum[i] = momentum[i] * 3 + params[i] + step;
    master[i] = master[i] * 5 + momentum[i];
    params[i] = (uint16_t)(master[i] >> 16);
  }
}
typedef struct {
  uint32_t step;
  gemini_update_span_t span;
} opt_call_t;
static inline void opt_call(void *user) {
  opt_call_t *c = user;
  const uint64_t n = c->span.element_count;
  void *own[OPT_ARENAS];
  for (int a = 0; a < OPT_ARENAS; a++) {
    own[a] = malloc(n * opt_bytes[a]);
    CHECK(own[a]);
    memcpy(own[a], c->span.ptr[a], n * opt_bytes[a]);
  }
  opt_compute(c->step, own[0], own[1], own[2], n);
  for (int a = 0; a < OPT_ARENAS; a++) {
    memcpy(c->span.ptr[a], own[a], n * opt_bytes[a]);
    free(own[a]);
  }
  free(c);
}
static gemini_manager_t opt_mgr; /* of device spans */
static inline void opt_span(void *user, const gemini_update_span_t *span) {
  opt_call_t *c = malloc(sizeof *c);
  CHECK(c);
  *c = (opt_call_t){ *(uint32_t *)user, *span };
  if (span->tier == GEMINI_TIER_HOST) opt_call(c);
  else CHECK_OK(gemini_stream_call(opt_mgr, span->stream, opt_call, c));
}

/* Arenas of so many parameter chunks, filled; states at first on the host or wherever they went from there. */
static inline opt_t *opt_in(const world_t *w, uint64_t param_chunks, const char *prefix) {
  opt_t *o = calloc(1, sizeof *o);
  CHECK(o);
  o->w = *w;
  opt_mgr = w->mgr;
  o->n = param_chunks * WORLD_CHUNK / 2 - 300; /* the last chunks are not full */
  static const uint32_t kinds[] = { GEMINI_KIND_PARAM, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM };
  static const char *const names[] = { "params", "master", "momentum" };
  for (int a = 0; a < OPT_ARENAS; a++) {
    char name[32];
    snprintf(name, sizeof name, "%s%s", prefix, names[a]);
    o->arenas[a] = world_arena(w, kinds[a], opt_bytes[a], name, a ? o->arenas[0] : 0, 0);
  }
  uint64_t offset;
  CHECK_OK(gemini_arena_take(w->mgr, o->arenas[0], o->n * 2, &offset));
  for (int a = 0; a < OPT_ARENAS; a++) {
    uint64_t size = o->n * opt_bytes[a];
    o->model[a] = malloc(size);
    CHECK(o->model[a]);
    world_pattern(o->model[a], 0, size, (uint64_t)a + 1);
    for (uint64_t at = 0; at < size; at += WORLD_CHUNK)
      world_fill(w, o->arenas[a], at, size - at < WORLD_CHUNK ? size - at : WORLD_CHUNK, GEMINI_TIER_HOST,
                 (uint64_t)a + 1);
  }
  return o;
}
static inline opt_t *opt_open(gemini_config_t c, uint64_t param_chunks) {
  world_t w = world_open(c);
  return opt_in(&w, param_chunks, "");
}
static inline void opt_free(opt_t *o) {
  for (int a = 0; a < OPT_ARENAS; a++) free(o->model[a]);
  free(o);
}
static inline void opt_close(opt_t *o) {
  world_close(&o->w);
  opt_free(o);
}
static inline gemini_update_t opt_describe(opt_t *o, uint32_t flags) {
  static const uint32_t modes[OPT_ARENAS] = { GEMINI_READ_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  CHECK(o->step_count < OPT_STEPS);
  o->steps[o->step_count] = o->step_count * 2654435761u + 7;
  u.flags = flags;
  u.arenas = o->arenas;
  u.modes = modes;
  u.arena_count = OPT_ARENAS;
  u.fn = opt_span;
  u.user = &o->steps[o->step_count++];
  return u;
}
static inline gemini_status_t opt_update(opt_t *o, uint32_t flags) {
  gemini_update_t u = opt_describe(o, flags);
  return gemini_update(o->w.mgr, &u);
}
static inline void opt_model(opt_t *o, uint64_t first, uint64_t count) { /* the newest step, or a part of it */
  opt_compute(o->steps[o->step_count - 1], (uint16_t *)o->model[0] + first, (uint32_t *)o->model[1] + first,
              (uint32_t *)o->model[2] + first, count);
}
/* Compares a range with the model. */
static inline void opt_check_range(opt_t *o, int a, uint64_t offset, uint64_t size, uint32_t tier) {
  gemini_access_t x = world_part(o->arenas[a], offset, size, GEMINI_READ, tier);
  CHECK_OK(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  if (memcmp(x.ptr, o->model[a] + offset, size)) {
    uint64_t i = 0;
    while (((uint8_t *)x.ptr)[i] == o->model[a][offset + i]) i++;
    fprintf(stderr, "arena %d: byte %" PRIu64 " is wrong on tier %u\n", a, offset + i, tier);
    exit(1);
  }
  CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
}
static inline void opt_check(opt_t *o) {
  for (int a = 0; a < OPT_ARENAS; a++) {
    uint64_t size = o->n * opt_bytes[a], part = 2 * WORLD_CHUNK;
    for (uint64_t at = 0; at < size; at += part)
      opt_check_range(o, a, at, size - at < part ? size - at : part, GEMINI_TIER_HOST);
  }
  CHECK(chunks_right(&o->w));
}
/* Puts all of an arena into files, chunk by chunk. */
static inline void opt_to_files(opt_t *o, int a) {
  uint64_t size = o->n * opt_bytes[a];
  for (uint64_t at = 0; at < size; at += WORLD_CHUNK) {
    gemini_access_t x =
        world_part(o->arenas[a], at, size - at < WORLD_CHUNK ? size - at : WORLD_CHUNK, 0, GEMINI_TIER_FILE);
    CHECK_OK(gemini_move(o->w.mgr, &x, 1));
  }
}
static inline uint64_t opt_waits(opt_t *o) { return world_stats(&o->w).pending_updates; }

#endif
