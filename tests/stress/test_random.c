/* Random programs compared with a model that keeps all bytes in one array. SPDX-License-Identifier: Apache-2.0
 *
 * A program opens a manager with random settings and runs random steps on 1 to 4 threads. The model is the array
 * `bytes`: every arena has a place in it, and each call that changes bytes changes them there when it is made, whenever
 * the library does it. Work queued on a stream carries a copy of what it must find. Statuses are predicted: for one
 * thread exactly (which chunks are held, how many frames that leaves), for several as far as a thread can know. A call
 * that failed must have changed nothing, which what is checked later shows.
 *
 * GEMINI_STRESS_STEPS  steps in all, 2000 by default; whole programs are run until that many have been, at least one of
 *                      each number of threads.
 * GEMINI_STRESS_SEED   seed of the first program, otherwise from the clock; the following ones count up from it, and
 *                      the number of threads is 1 + seed % 4. A failure prints its program's seed: with that one here,
 *                      it is the first to run.
 * GEMINI_STRESS_LOG    not empty: every step is printed when it has been done.
 *
 * Arithmetic: each arena has a dtype, and patterns are made so that every element is a number of that dtype with
 * magnitude from 0.5 to 1, or zero: so norms can be compared, and updates are exact integer arithmetic on them.
 *
 * Sizes: in half of the programs blocks are larger than slots, in a quarter slots are twice as large as frames, so that
 * a place that takes one size for another is wrong about bytes, or about room. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "../handles.h"
#include "../seed.h"
#include "../system.h"
#include "chunk/cut.h"
#include "figures.h"
#include "gemini.h"

enum {
  THREADS = 4,
  SLOTS = 40,            /* arenas at once in a program */
  SLOT_BYTES = 2 << 20,  /* of the model, an arena */
  CHUNKS = 32,           /* in a slot, with the smallest chunks */
  SET_ELEMENTS = 160000, /* capacity of arenas that have others like them */
  ARENAS = 14,           /* of a thread, shared ones included */
  TENSORS = 40,
  OPENS = 12,
  PINS = 6,
  ALLOCS = 10,
  STREAMS = 3,
  UPDATES = 512,
  LOG_LINES = 40,
  DISCARDS = 4,
  PROGRAM_SECONDS = 540 /* then it hangs */
};
#define BIG_BYTES (UINT64_C(1) << 30) /* more than a program can use */
#define BIT(status) (1u << -(status))
#define OK BIT(GEMINI_OK)
#define ANY_HOLD 100u /* a state after release while another thread changes the phase */

typedef struct {
  gemini_arena_t handle;
  uint32_t slot, element_bytes, dtype, kind;
  uint64_t size, capacity; /* bytes; size is not known of shared arenas */
  uint8_t *base;
  int like;  /* index of the arena it follows, or -1 */
  int reuse; /* index of the arena whose bytes it takes, or -1 */
  bool alive, followed, reused, shared, read_only;
} arena_t;

typedef struct {
  gemini_tensor_t handle;
  char name[32];
  int arena, base; /* base: the registered tensor, or itself */
  uint64_t offset, size;
  uint32_t state, users;
  bool alive, gradient; /* gradient: of registered tensors, their bytes are the gradient's */
} tensor_t;

typedef struct {
  gemini_access_t access;
  gemini_stream_t stream;
  int arena, tensor; /* tensor: or -1 */
  uint32_t slot;
  uint64_t offset, size; /* in the slot */
  bool later;            /* its bytes are written when it is released */
} open_t;

typedef struct {
  uint8_t *ptr;
  uint64_t size, seed;
  gemini_stream_t stream;
} alloc_t;

struct program;
typedef struct {
  struct program *p;
  int id;
  uint64_t rng, step;
  uint64_t chunk; /* as of this step; 0 = not cut */
  arena_t arenas[ARENAS];
  tensor_t tensors[TENSORS];
  open_t opens[OPENS];
  int open_count;
  open_t pins[PINS];
  int pin_count;
  alloc_t allocs[ALLOCS];
  int alloc_count;
  gemini_stream_t streams[STREAMS];
  int fd; /* scratch file */
  uint32_t names;
  struct update *updates[UPDATES];
  int update_count;
  open_t discards[DISCARDS]; /* ranges whose chunks may be zeros by now, until settle() has looked */
  int discard_count;
  char log[LOG_LINES][700];
  /* thread 0 */
  bool iteration, op, refused, trace_saved, arenas_changed, timeline;
  uint32_t phase;
  uint64_t iterations;
  uint64_t script_seed;
  int script_ops, script_at;
} thread_t;

typedef struct update { /* what an update's function is given; lives until the manager is closed */
  struct program *p;
  uint64_t seed;
  uint32_t count, modes[8], element_bytes[8], dtypes[8];
  uint64_t step;
  _Atomic uint64_t done; /* elements */
  uint64_t wanted;
} update_t;

typedef struct program {
  gemini_manager_t mgr;
  gemini_config_t config;
  uint64_t seed;
  int threads;
  bool exact;                  /* one thread: statuses can be told exactly */
  bool host_tight, file_tight; /* several threads: budgets that may not hold all bytes */
  gmi_sizes_padding_t padding; /* of slots and blocks */
  _Atomic uint64_t budget[GEMINI_TIER_COUNT], highest[GEMINI_TIER_COUNT];
  uint8_t *bytes; /* the model: SLOTS * SLOT_BYTES */
  pthread_mutex_t lock;
  bool slots[SLOTS];                   /* Guarded by lock, as the rest */
  alloc_t allocated[THREADS * ALLOCS]; /* by all threads */
  int allocated_count;
  char dir[64], path[96];
  thread_t thread[THREADS];
} program_t;

static uint64_t total_steps;
static bool print_steps;
static volatile sig_atomic_t running_threads;
static volatile uint64_t running_seed;

/* ---- failing */
static void fail_at(const program_t *p, const thread_t *t, uint64_t step, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6), noreturn));
static void fail_at(const program_t *p, const thread_t *t, uint64_t step, int line, const char *format, ...) {
  char text[1000];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (t) {
    uint64_t from = t->step >= LOG_LINES ? t->step - LOG_LINES + 1 : 1;
    for (uint64_t i = from; i <= t->step; i++) fprintf(stderr, "  %s\n", t->log[i % LOG_LINES]);
  }
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (gemini_last_error(&info) == GEMINI_OK && info.status)
    fprintf(stderr, "  last error of this thread: %s: %s: %s\n", info.operation, gemini_status_string(info.status),
            info.message);
  fprintf(stderr,
          "%s:%d: program of seed %" PRIu64 ", %d threads, thread %d, step %" PRIu64 " (%" PRIu64
          " steps of all programs): %s\n",
          __FILE__, line, p->seed, p->threads, t ? t->id : -1, step, total_steps, text);
  seed_print(p->seed);
  fflush(stderr);
  _exit(1);
}
#define FAIL(t, ...) fail_at((t)->p, t, (t)->step, __LINE__, __VA_ARGS__)
#define NEED(t, condition)                                 \
  do {                                                     \
    if (!(condition)) FAIL(t, "not true: %s", #condition); \
  } while (0)

static void expect_at(const thread_t *t, int line, const char *what, gemini_status_t status, uint32_t allowed) {
  if (status <= 0 && status > -32 && (allowed & BIT(status))) return;
  char names[400] = "";
  for (int i = 0; i < 15; i++)
    if (allowed & (1u << i))
      snprintf(names + strlen(names), sizeof names - strlen(names), " [%s]", gemini_status_string(-i));
  fail_at(t->p, t, t->step, line, "%s returned %d (%s), the model allows%s", what, status, gemini_status_string(status),
          names);
}
#define EXPECT(t, status, allowed, what) expect_at(t, __LINE__, what, status, allowed)
#define MUST(t, call) expect_at(t, __LINE__, #call, call, OK)

static void hangs(int signal) {
  (void)signal;
  char text[sizeof seed_rest + 160];
  size_t n = (size_t)snprintf(text, 100, "test_random: seed %" PRIu64 ", %d threads: no end after %d s\n", running_seed,
                              (int)running_threads, PROGRAM_SECONDS);
  n += seed_line(text + n, sizeof text - n, running_seed);
  if (write(STDERR_FILENO, text, n) < 0) _exit(2);
  _exit(1);
}

/* A fault names the program too. Sanitizers keep faults to themselves: under them each program is named as it begins. */
static void faults(int number) {
  char text[sizeof seed_rest + 160];
  size_t n = (size_t)snprintf(text, 100, "test_random: fault in the program of seed %" PRIu64 "\n", running_seed);
  n += seed_line(text + n, sizeof text - n, running_seed);
  if (write(STDERR_FILENO, text, n) < 0) _exit(2);
  signal(number, SIG_DFL);
  raise(number);
}

/* What the step does, for the log of a failure. */
static void note(thread_t *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void note(thread_t *t, const char *format, ...) {
  char *line = t->log[t->step % LOG_LINES];
  size_t used = strlen(line);
  va_list args;
  va_start(args, format);
  vsnprintf(line + used, sizeof t->log[0] - used, format, args);
  va_end(args);
}

/* ---- random choices */
static uint64_t mix(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
  return (x ^ x >> 31) | 1; /* a state of check_random(), never 0 */
}
static uint64_t below(uint64_t *r, uint64_t limit) { return limit ? (check_random(r) >> 11) % limit : 0; }
static bool chance(uint64_t *r, uint64_t one_in) { return below(r, one_in) == 0; }

/* ---- patterns */
static const uint32_t dtype_bytes[] = { 4, 2, 2, 8 };
/* Keeps sign and mantissa, sets the exponent: magnitudes from 0.5 to 1. Arenas of single bytes have no dtype. */
enum { NO_DTYPE = 9 };
static uint64_t number(uint64_t word, uint32_t dtype) {
  switch (dtype) {
  case GEMINI_DTYPE_F32: return (word & UINT64_C(0x807fffff807fffff)) | UINT64_C(0x3f0000003f000000);
  case GEMINI_DTYPE_BF16: return (word & UINT64_C(0x807f807f807f807f)) | UINT64_C(0x3f003f003f003f00);
  case GEMINI_DTYPE_F16: return (word & UINT64_C(0x83ff83ff83ff83ff)) | UINT64_C(0x3800380038003800);
  case GEMINI_DTYPE_F64: return (word & UINT64_C(0x800fffffffffffff)) | UINT64_C(0x3fe0000000000000);
  default: return word;
  }
}
static void fill(uint8_t *to, uint64_t size, uint64_t seed, uint32_t dtype) {
  uint64_t word = mix(seed);
  for (uint64_t i = 0; i < size; i += 8) {
    word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint64_t value = number(word ^ word >> 29, dtype);
    memcpy(to + i, &value, size - i < 8 ? size - i : 8);
  }
}
static double decode(const uint8_t *at, uint32_t dtype) {
  uint16_t half;
  uint32_t bits;
  float single;
  double value;
  switch (dtype) {
  case GEMINI_DTYPE_F32: memcpy(&single, at, 4); return single;
  case GEMINI_DTYPE_F64: memcpy(&value, at, 8); return value;
  case GEMINI_DTYPE_BF16:
    memcpy(&half, at, 2);
    bits = (uint32_t)half << 16;
    memcpy(&single, &bits, 4);
    return single;
  default:
    memcpy(&half, at, 2);
    value = half & 0x7c00 ? ldexp(1.0 + (half & 1023) / 1024.0, (half >> 10 & 31) - 15) : ldexp(half & 1023, -24);
    return half & 0x8000 ? -value : value;
  }
}

/* ---- the model */
static uint8_t *model(const program_t *p, uint32_t slot, uint64_t offset) {
  return p->bytes + (uint64_t)slot * SLOT_BYTES + offset;
}
static arena_t *store_of(thread_t *t, int arena) {
  arena_t *a = &t->arenas[arena];
  return a->reuse >= 0 ? &t->arenas[a->reuse] : a;
}
static bool overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size) {
  return a < b + b_size && b < a + a_size;
}
static tensor_t *base_of(thread_t *t, tensor_t *x) { return &t->tensors[x->base]; }

static void compare(const thread_t *t, uint64_t step, const char *what, const uint8_t *got, const uint8_t *want,
                    uint64_t size) {
  if (!memcmp(got, want, size)) return;
  uint64_t first = 0, differ = 0, last = 0;
  for (uint64_t i = 0; i < size; i++) {
    if (got[i] == want[i]) continue;
    if (!differ++) first = i;
    last = i;
  }
  uint64_t g = 0, w = 0;
  memcpy(&g, got + first, size - first < 8 ? size - first : 8);
  memcpy(&w, want + first, size - first < 8 ? size - first : 8);
  fail_at(t->p, t, step, __LINE__,
          "%s (made in step %" PRIu64 "): %" PRIu64 " of %" PRIu64 " bytes are wrong, from %" PRIu64 " (%p) to %" PRIu64
          "; at the first is %016" PRIx64 ", expected %016" PRIx64,
          what, step, differ, size, first, (const void *)(got + first), last, g, w);
}

/* A piece of device work: checks the bytes, then writes new ones. Owns itself. */
typedef struct {
  const thread_t *t;
  uint8_t *ptr;
  uint64_t size, seed, step;
  uint32_t dtype;
  bool check, write;
  uint8_t expected[];
} job_t;
static void job_run(void *user) {
  job_t *j = user;
  if (j->check) compare(j->t, j->step, "work on a stream", j->ptr, j->expected, j->size);
  if (j->write) fill(j->ptr, j->size, j->seed, j->dtype);
  free(j);
}
/* Queues work on a range of the model, and does to the model what it will do. */
static void job_queue(thread_t *t, gemini_stream_t stream, void *ptr, uint8_t *in_model, uint64_t size, uint32_t dtype,
                      uint32_t mode) {
  bool check = mode & GEMINI_READ;
  job_t *j = malloc(sizeof *j + (check ? size : 0));
  NEED(t, j);
  *j = (job_t){ .t = t, .ptr = ptr, .size = size, .step = t->step, .dtype = dtype, .check = check };
  j->write = mode & GEMINI_WRITE;
  j->seed = check_random(&t->rng);
  if (check) memcpy(j->expected, in_model, size);
  if (j->write) fill(in_model, size, j->seed, dtype);
  MUST(t, gemini_stream_call(t->p->mgr, stream, job_run, j));
}

/* ---- what is held, by chunks */
typedef struct {
  uint16_t readers, writers, host_users, pins;
  bool host_writer;
} held_t;
typedef struct {
  held_t of[SLOTS][CHUNKS];
} holds_t;

static void hold_add(const thread_t *t, holds_t *h, const open_t *o, bool pin) {
  uint64_t first = o->offset / t->chunk, last = (o->offset + o->size - 1) / t->chunk;
  for (uint64_t i = first; i <= last; i++) {
    held_t *x = &h->of[o->slot][i];
    if (pin) {
      x->pins++;
    } else if (o->access.tier == GEMINI_TIER_DEVICE) {
      if (o->access.mode & GEMINI_WRITE) x->writers++;
      else x->readers++;
    } else {
      x->host_users++;
      x->host_writer |= o->access.mode & GEMINI_WRITE;
    }
  }
}
static void holds_get(const thread_t *t, holds_t *h) {
  memset(h, 0, sizeof *h);
  for (int i = 0; i < t->open_count; i++) hold_add(t, h, &t->opens[i], false);
  for (int i = 0; i < t->pin_count; i++) hold_add(t, h, &t->pins[i], true);
}
enum { FREE_TO, MAY_BE_BUSY, IS_BUSY };
/* May this access be held beside the others? Two on the host of which one writes: the library may refuse where they
 * share a chunk, must where they share a byte. */
static int hold_check(const thread_t *t, const holds_t *h, const open_t *o) {
  int result = t->arenas[o->arena].shared ? MAY_BE_BUSY : FREE_TO;
  uint64_t first = o->offset / t->chunk, last = (o->offset + o->size - 1) / t->chunk;
  bool write = o->access.mode & GEMINI_WRITE;
  for (uint64_t i = first; i <= last; i++) {
    const held_t *x = &h->of[o->slot][i];
    if (o->access.tier == GEMINI_TIER_DEVICE) {
      if (x->host_writer || (write && x->host_users)) return IS_BUSY;
    } else {
      if (x->writers || (write && (x->readers || x->pins))) return IS_BUSY;
      if (x->host_writer || (write && x->host_users)) result = MAY_BE_BUSY;
    }
  }
  return result;
}
/* Is anything held in the chunks of a range? device: only what is held there, pins included. */
static int range_check(thread_t *t, int arena, uint64_t offset, uint64_t size, bool (*busy)(const held_t *)) {
  int result = t->arenas[arena].shared ? MAY_BE_BUSY : FREE_TO;
  if (!t->chunk || !size) return result;
  holds_t h;
  holds_get(t, &h);
  for (uint64_t i = offset / t->chunk; i <= (offset + size - 1) / t->chunk; i++)
    if (busy(&h.of[store_of(t, arena)->slot][i])) return IS_BUSY;
  return result;
}
static bool is_acquired(const held_t *x) { return x->readers || x->writers || x->host_users; }
static bool is_acquired_or_pinned(const held_t *x) { return is_acquired(x) || x->pins; }
static bool is_written(const held_t *x) { return x->writers || x->host_writer; }
static bool is_on_device(const held_t *x) { return x->readers || x->writers || x->pins; }
static bool is_device_held_or_host(const held_t *x) { return is_acquired(x) || x->pins; }
static bool is_host_written(const held_t *x) { return x->host_writer; }

static uint64_t frames_held(const thread_t *t, const holds_t *h) {
  uint64_t count = 0;
  for (int s = 0; s < SLOTS; s++)
    for (int i = 0; i < CHUNKS; i++) count += is_on_device(&h->of[s][i]);
  uint64_t pages[ALLOCS * 16], n = 0; /* of live allocations */
  for (int i = 0; i < t->alloc_count; i++) {
    uint64_t first = (uintptr_t)t->allocs[i].ptr / t->chunk;
    uint64_t last = ((uintptr_t)t->allocs[i].ptr + t->allocs[i].size - 1) / t->chunk;
    for (uint64_t page = first; page <= last; page++) {
      uint64_t k = 0;
      while (k < n && pages[k] != page) k++;
      if (k == n && n < sizeof pages / sizeof *pages) pages[n++] = page;
    }
  }
  return count + n;
}
static uint64_t frames(const thread_t *t) {
  uint64_t usable = atomic_load(&t->p->budget[GEMINI_TIER_DEVICE]) - t->p->config.device_margin_bytes;
  return t->chunk ? usable / t->chunk : 0;
}
/* What a chunk takes of the tiers below. */
static uint64_t slot_of(const thread_t *t) { return t->chunk << t->p->padding.slot_shift; }
static uint64_t block_of(const thread_t *t) { return slot_of(t) + t->p->padding.block_bytes; }
/* Statuses of a call that may need room below the device, for `need` chunks at once. */
static uint32_t below_mask(const thread_t *t, uint64_t need) {
  const uint32_t full = BIT(GEMINI_ERR_OOM_HOST) | BIT(GEMINI_ERR_OOM_FILE);
  const program_t *p = t->p;
  if (!p->exact) return p->host_tight ? full : 0;
  if (!t->chunk) return full;
  uint64_t total = 0, held = 0;
  for (int i = 0; i < ARENAS; i++) {
    const arena_t *a = &t->arenas[i];
    if (a->alive && a->reuse < 0) total += (a->size + t->chunk - 1) / t->chunk;
  }
  if (atomic_load(&p->budget[GEMINI_TIER_HOST]) / slot_of(t) >= total) return 0;
  if (atomic_load(&p->budget[GEMINI_TIER_FILE]) / block_of(t) < total) return full;
  holds_t h;
  holds_get(t, &h);
  for (int s = 0; s < SLOTS; s++)
    for (int i = 0; i < CHUNKS; i++) held += h.of[s][i].host_users > 0;
  return atomic_load(&p->budget[GEMINI_TIER_HOST]) / slot_of(t) >= held + need + 2 ? 0 : full;
}
/* Updates that are pending are queued first, and may find no room below the device before anyone asks who is busy. */
static uint32_t pending_mask(const thread_t *t) {
  figures_t s = { 0 };
  MUST(t, figures_read(t->p->mgr, &s));
  return !t->p->exact || s.pending_updates ? below_mask(t, 0) : 0;
}
static uint32_t busy_mask(const thread_t *t, int busy, uint32_t others) {
  if (busy == IS_BUSY) return BIT(GEMINI_ERR_BUSY) | pending_mask(t);
  return busy == MAY_BE_BUSY ? others | BIT(GEMINI_ERR_BUSY) : others;
}
/* Waits for all updates; false where one found no room below the device: what came after it may have taken that. */
static bool updates_wait(const thread_t *t) {
  gemini_status_t status = gemini_update_wait(t->p->mgr);
  EXPECT(t, status, OK | below_mask(t, 10), "gemini_update_wait");
  return !status;
}
/* May it be impossible to lay the chunks of a host range side by side? Chunks that are acquired on the host stay where
 * they are: those of the range itself may lie apart, those of others may leave no gap that is long enough. */
static bool may_lie_apart(const thread_t *t, const holds_t *h, const open_t *o) {
  uint64_t first = o->offset / t->chunk, last = (o->offset + o->size - 1) / t->chunk, held = 0;
  if (o->access.tier != GEMINI_TIER_HOST || first == last) return false;
  if (t->arenas[o->arena].shared) return true; /* other threads may have acquired some */
  for (uint64_t i = first; i <= last; i++)
    if (h->of[o->slot][i].host_users) return true;
  for (int s = 0; s < SLOTS; s++)
    for (int i = 0; i < CHUNKS; i++) held += h->of[s][i].host_users > 0;
  uint64_t slots = atomic_load(&t->p->budget[GEMINI_TIER_HOST]) / slot_of(t);
  return slots < held || (slots - held) / (held + 1) < last - first + 1;
}
/* A call that needs `need` frames beside those held. */
static uint32_t device_mask(const thread_t *t, uint64_t held_then) {
  if (!t->p->exact || !t->chunk) return OK | BIT(GEMINI_ERR_OOM_DEVICE);
  return held_then <= frames(t) ? OK : BIT(GEMINI_ERR_OOM_DEVICE);
}

/* ---- picking */
static gemini_stream_t pick_stream(thread_t *t, uint64_t *r) {
  int i = (int)below(r, STREAMS + 1);
  return i < STREAMS ? t->streams[i] : GEMINI_STREAM_CALLER;
}
static int pick_tensor(thread_t *t, uint64_t *r) {
  int alive[TENSORS], count = 0;
  for (int i = 0; i < TENSORS; i++)
    if (t->tensors[i].alive) alive[count++] = i;
  return count ? alive[below(r, (uint64_t)count)] : -1;
}
/* Arenas of a set with reused bytes are used by tensors only: what lies between these stays zero, and which bytes are a
 * gradient's is known for tensors only. */
static bool in_reusing_set(const thread_t *t, int arena) {
  int root = t->arenas[arena].like >= 0 ? t->arenas[arena].like : arena;
  return t->arenas[root].reused;
}
static int pick_arena(thread_t *t, uint64_t *r) {
  int mine[ARENAS], count = 0;
  for (int i = 0; i < ARENAS; i++)
    if (t->arenas[i].alive && !t->arenas[i].shared && t->arenas[i].size) mine[count++] = i;
  return count ? mine[below(r, (uint64_t)count)] : -1;
}
/* An object and a range of it. whole: all of it. */
static bool pick_range(thread_t *t, uint64_t *r, bool whole, open_t *o) {
  memset(o, 0, sizeof *o);
  o->access = (gemini_access_t)GEMINI_ACCESS_INIT;
  o->tensor = -1;
  uint64_t start = 0, limit;
  int arena = chance(r, 7) ? pick_arena(t, r) : -1;
  if (arena >= 0 && in_reusing_set(t, arena)) arena = -1;
  if (arena >= 0) {
    o->access.object.arena = t->arenas[arena].handle;
    limit = t->arenas[arena].size;
  } else {
    o->tensor = pick_tensor(t, r);
    if (o->tensor < 0) return false;
    const tensor_t *x = &t->tensors[o->tensor];
    arena = x->arena;
    o->access.object.tensor = x->handle;
    start = x->offset;
    limit = x->size;
  }
  const arena_t *a = &t->arenas[arena];
  uint64_t elements = limit / a->element_bytes, first = 0, count = elements;
  if (!whole && elements > 1 && chance(r, 2)) {
    first = below(r, elements);
    count = 1 + below(r, elements - first);
  }
  /* Now and then to the edge of a chunk, or an element beyond it or before it. */
  if (!whole && t->chunk && elements > 2 && chance(r, 4)) {
    uint64_t edges = (start + limit) / t->chunk, edge = edges ? (1 + below(r, edges)) * t->chunk : 0;
    uint64_t at = edge > start ? (edge - start) / a->element_bytes + below(r, 3) : 0;
    at = at ? at - 1 : 0;
    if (at && at < elements && chance(r, 2)) {
      first = at;
      count = 1 + below(r, elements - first);
    } else if (at && at <= elements) {
      first = chance(r, 2) && start + limit > t->chunk ? below(r, at) : 0;
      if (chance(r, 3) && edge - t->chunk >= start) first = (edge - t->chunk - start) / a->element_bytes;
      count = at > first ? at - first : 1;
    }
  }
  o->arena = arena;
  o->slot = store_of(t, arena)->slot;
  o->offset = start + first * a->element_bytes;
  o->size = count * a->element_bytes;
  o->access.offset_bytes = first * a->element_bytes;
  o->access.size_bytes = o->size;
  /* All, in short; of an arena that would be another range once it has grown. */
  if (!first && count == elements && o->tensor >= 0 && chance(r, 2)) o->access.size_bytes = 0;
  o->access.tier = (uint32_t)below(r, 2);
  o->access.mode = GEMINI_READ;
  return true;
}
/* Does a range share bytes with what this thread has open? write: counting opens that only read, too. */
static bool opens_overlap(const thread_t *t, const open_t *o, bool write) {
  for (int i = 0; i < t->open_count; i++) {
    const open_t *x = &t->opens[i];
    if (x->slot == o->slot && overlap(x->offset, x->size, o->offset, o->size) &&
        (write || (x->access.mode & GEMINI_WRITE)))
      return true;
  }
  return false;
}

/* ---- checks */
/* Other threads move chunks between the calls: then each tier has at most all bytes, but not all tiers together. Late
 * updates do so, too: what looks wrong is read again without them. */
static void check_tiers(thread_t *t, gemini_object_t object, uint64_t size, uint64_t bytes_out[GEMINI_TIER_COUNT]) {
  for (bool waited = false;; waited = true) {
    uint64_t sum = 0, most = 0;
    for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) {
      gemini_access_t all = ACCESS(object, 0, 0, 0, tier);
      MUST(t, gemini_tier_bytes(t->p->mgr, &all, &bytes_out[tier]));
      sum = t->p->exact ? sum + bytes_out[tier] : bytes_out[tier];
      if (most < sum) most = sum;
    }
    if (most <= size) return;
    if (waited) FAIL(t, "%" PRIu64 " of %" PRIu64 " bytes are in tiers", most, size);
    if (!updates_wait(t)) return;
  }
}

static void check_tensor(thread_t *t, int index) {
  const tensor_t *x = &t->tensors[index];
  const arena_t *a = &t->arenas[x->arena];
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  MUST(t, gemini_tensor_info(t->p->mgr, x->handle, &info));
  if (info.address != (uintptr_t)a->base + x->offset || info.size_bytes != x->size || info.offset_bytes != x->offset ||
      info.arena != a->handle || strcmp(info.name, base_of(t, (tensor_t *)x)->name))
    FAIL(t, "tensor %s is not what was registered", x->name);
  if (a->read_only) return; /* used by all threads */
  if (info.users != x->users) FAIL(t, "tensor %s has %" PRIu64 " users, not %u", x->name, info.users, x->users);
  bool any = x->state == ANY_HOLD && info.state >= GEMINI_STATE_HOLD && info.state <= GEMINI_STATE_HOLD_AFTER_BWD;
  if (info.state != x->state && !any)
    FAIL(t, "tensor %s is in state %u, the model says %u", x->name, info.state, x->state);
  uint64_t bytes[GEMINI_TIER_COUNT];
  check_tiers(t, OBJECT(x->handle), x->size, bytes);
}

/* Compares the arenas with the model; returns how many bytes they have in all, and how many in each tier. */
static uint64_t check_arenas(thread_t *t, uint64_t used_out[GEMINI_TIER_COUNT]) {
  uint64_t sizes = 0;
  for (int k = 0; k < GEMINI_TIER_COUNT; k++) used_out[k] = 0;
  for (int i = 0; i < ARENAS; i++) {
    const arena_t *a = &t->arenas[i];
    if (!a->alive || a->shared || a->reuse >= 0) continue;
    gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
    MUST(t, gemini_arena_info(t->p->mgr, a->handle, &info));
    if (info.size_bytes != a->size || info.base != (uintptr_t)a->base || info.capacity_bytes != a->capacity ||
        info.kind != a->kind)
      FAIL(t, "arena %d is not what the model knows: %" PRIu64 " bytes, not %" PRIu64, i, info.size_bytes, a->size);
    uint64_t bytes[GEMINI_TIER_COUNT];
    check_tiers(t, OBJECT(a->handle), a->size, bytes);
    for (int k = 0; k < GEMINI_TIER_COUNT; k++) used_out[k] += bytes[k];
    sizes += a->size;
  }
  return sizes;
}
/* Which tier uses fewer bytes than the arenas have there; -1 if none does. */
static int tier_exceeded(const uint64_t used[GEMINI_TIER_COUNT], const figures_t *s) {
  for (int k = 0; k < GEMINI_TIER_COUNT; k++)
    if (used[k] > s->used_bytes[k]) return k;
  return -1;
}

static void check_stats(thread_t *t) {
  program_t *p = t->p;
  figures_t s = { 0 };
  uint64_t highest[GEMINI_TIER_COUNT];
  MUST(t, figures_read(p->mgr, &s));
  for (int i = 0; i < GEMINI_TIER_COUNT; i++) highest[i] = atomic_load(&p->highest[i]);
  t->chunk = s.chunk_bytes;
  for (int i = 0; i < GEMINI_TIER_COUNT; i++) {
    uint64_t margin = i == GEMINI_TIER_DEVICE ? p->config.device_margin_bytes : 0;
    uint64_t budget = p->exact ? s.budget_bytes[i] : highest[i]; /* another thread may have set it in between */
    if (s.used_bytes[i] > budget - margin)
      FAIL(t, "tier %d uses %" PRIu64 " of %" PRIu64, i, s.used_bytes[i], budget - margin);
    if (s.peak_bytes[i] > highest[i] - margin)
      FAIL(t, "tier %d peaked at %" PRIu64 ", its highest budget was %" PRIu64, i, s.peak_bytes[i], highest[i]);
    if (s.used_bytes[i] > s.peak_bytes[i])
      FAIL(t, "tier %d uses %" PRIu64 ", its peak was %" PRIu64, i, s.used_bytes[i], s.peak_bytes[i]);
    if (p->exact && s.budget_bytes[i] != atomic_load(&p->budget[i]))
      FAIL(t, "tier %d has the budget %" PRIu64 ", not %" PRIu64, i, s.budget_bytes[i], atomic_load(&p->budget[i]));
  }
  uint64_t used[GEMINI_TIER_COUNT], sizes = check_arenas(t, used), live = 0;
  if (!p->exact) return;
  for (int i = 0; i < t->alloc_count; i++) live += t->allocs[i].size;
  if (tier_exceeded(used, &s) >= 0) { /* a late update may have brought chunks since the figures were read */
    if (!updates_wait(t)) return;
    MUST(t, figures_read(p->mgr, &s));
    check_arenas(t, used);
  }
  int k = tier_exceeded(used, &s);
  if (k >= 0) FAIL(t, "arenas have %" PRIu64 " bytes in tier %d, which uses %" PRIu64, used[k], k, s.used_bytes[k]);
  if (s.model_bytes != sizes) FAIL(t, "model_bytes is %" PRIu64 ", not %" PRIu64, s.model_bytes, sizes);
  if (s.nonmodel_bytes < live || s.nonmodel_bytes > live + 512u * (unsigned)t->alloc_count)
    FAIL(t, "nonmodel_bytes is %" PRIu64 ", of %d allocations with %" PRIu64, s.nonmodel_bytes, t->alloc_count, live);
  if (s.nonmodel_bytes > s.used_bytes[GEMINI_TIER_DEVICE])
    FAIL(t, "%" PRIu64 " bytes of allocations, but the device has %" PRIu64 " in use", s.nonmodel_bytes,
         s.used_bytes[GEMINI_TIER_DEVICE]);
  if (s.iterations != t->iterations) FAIL(t, "%" PRIu64 " iterations, not %" PRIu64, s.iterations, t->iterations);
}

/* Whose bytes are these? Those of another one can be written whole, but not read. */
static bool content_other(thread_t *t, const open_t *o) {
  if (o->tensor < 0) return false;
  tensor_t *x = &t->tensors[o->tensor];
  const arena_t *a = &t->arenas[x->arena];
  if (a->reuse < 0 && !a->reused) return false;
  return (a->reuse >= 0) != base_of(t, x)->gradient;
}
static bool content_wrong(thread_t *t, const open_t *o) {
  return content_other(t, o) && !(o->access.mode == GEMINI_WRITE && o->size == t->tensors[o->tensor].size);
}
/* Compares a range by writing it to the scratch file; false when that was not possible. */
static bool check_by_store(thread_t *t, const open_t *o) {
  uint64_t at = below(&t->rng, 10000);
  int busy = range_check(t, o->arena, o->offset, o->size, is_written);
  if (busy == IS_BUSY && below_mask(t, 1)) busy = MAY_BE_BUSY; /* no memory before it came to that chunk */
  uint32_t allowed = content_other(t, o) ? BIT(GEMINI_ERR_STATE) : busy_mask(t, busy, OK | below_mask(t, 1));
  gemini_status_t status = gemini_store(t->p->mgr, &o->access, t->fd, at);
  EXPECT(t, status, allowed, "gemini_store");
  if (status) return false;
  if (opens_overlap(t, o, false)) return true;
  uint8_t *got = malloc(o->size);
  NEED(t, got);
  NEED(t, pread(t->fd, got, o->size, (off_t)at) == (ssize_t)o->size);
  compare(t, t->step, "what was stored in a file", got, model(t->p, o->slot, o->offset), o->size);
  free(got);
  return true;
}

/* ---- acquire and release */

/* The bytes of an open: now, where they are. */
static void use_open(thread_t *t, open_t *o, uint32_t mode) {
  const arena_t *a = &t->arenas[o->arena];
  uint8_t *want = model(t->p, o->slot, o->offset), *ptr = o->access.ptr;
  if (o->access.tier == GEMINI_TIER_DEVICE && o->stream) {
    job_queue(t, o->stream, ptr, want, o->size, a->dtype, mode);
    return;
  }
  if (mode & GEMINI_READ) compare(t, t->step, "an acquired range", ptr, want, o->size);
  if (mode & GEMINI_WRITE) {
    uint64_t seed = check_random(&t->rng);
    fill(want, o->size, seed, a->dtype);
    fill(ptr, o->size, seed, a->dtype);
  }
}

/* One batch, with what the model says of it. r chooses what; the bytes are the thread's own choice. op: NULL, or the name
 * of an operator that begins with the batch, unless that is empty. */
static gemini_status_t acquire_batch(thread_t *t, uint64_t *r, int most, gemini_stream_t stream, bool device_only,
                                     const char *op) {
  open_t batch[OPENS];
  int count = 0, want = 1 + (int)below(r, (uint64_t)most);
  bool wrong = false, apart = false;
  int busy = FREE_TO;
  holds_t h;
  if (t->chunk) holds_get(t, &h);
  uint32_t tier = device_only || below(r, 10) < 7 ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST;
  for (int i = 0; i < want; i++) {
    open_t *o = &batch[count];
    if (!pick_range(t, r, false, o)) break;
    o->access.mode = 1 + (uint32_t)below(r, 3);
    o->access.tier = !device_only && chance(r, 8) ? GEMINI_TIER_COUNT - 2 - tier : tier;
    o->later = o->access.mode & GEMINI_WRITE && chance(r, 5);
    o->stream = stream;
    if (t->arenas[o->arena].read_only) o->access.mode = GEMINI_READ, o->later = false;
    if (t->open_count + count >= OPENS) break;
    /* The same bytes twice in a batch, as a parameter and as a gradient: nobody could say which are meant. */
    bool twice = false;
    for (int k = 0; k < count; k++)
      twice |= batch[k].slot == o->slot && overlap(batch[k].offset, batch[k].size, o->offset, o->size) &&
               (batch[k].arena != o->arena || batch[k].later || o->later);
    if (twice) continue;
    bool is_wrong = content_wrong(t, o);
    int is_busy = MAY_BE_BUSY; /* inside the batch */
    if (t->chunk) {
      is_busy = hold_check(t, &h, o);
      apart |= may_lie_apart(t, &h, o);
      hold_add(t, &h, o, false);
    }
    wrong |= is_wrong;
    if (is_busy > busy) busy = is_busy;
    count++;
  }
  if (!count) return GEMINI_OK;
  /* Bytes that are in use already: two readers, or the same stream one after the other. */
  if (!wrong && busy != IS_BUSY) {
    for (int i = 0; i < count; i++) {
      for (int k = 0; k < t->open_count; k++) {
        const open_t *x = &t->opens[k];
        if (x->slot != batch[i].slot || !overlap(x->offset, x->size, batch[i].offset, batch[i].size)) continue;
        if (!((x->access.mode | batch[i].access.mode) & GEMINI_WRITE)) continue;
        if (x->access.tier == GEMINI_TIER_DEVICE && batch[i].access.tier == GEMINI_TIER_DEVICE && x->stream == stream &&
            !x->later && !batch[i].later)
          continue;
        return GEMINI_OK;
      }
    }
  }
  gemini_access_t accesses[OPENS];
  uint64_t host_chunks = 0;
  bool run = false; /* of slots side by side, which must have no gaps */
  for (int i = 0; i < count; i++) {
    const open_t *o = &batch[i];
    accesses[i] = o->access;
    run |= t->p->padding.slot_shift && o->access.tier == GEMINI_TIER_HOST &&
           (!t->chunk || o->offset / t->chunk != (o->offset + o->size - 1) / t->chunk);
    note(t, " %s%s%d+%" PRIu64 "+%" PRIu64 ":%u%s%s", o->access.tier ? "host:" : "", o->tensor < 0 ? "arena " : "t",
         o->tensor < 0 ? o->arena : o->tensor, o->access.offset_bytes, o->size, o->access.mode, o->later ? "later" : "",
         t->arenas[o->arena].reuse >= 0 ? "g" : "");
    if (t->chunk && o->access.tier == GEMINI_TIER_HOST) host_chunks += o->size / t->chunk + 2;
  }
  uint32_t allowed = OK | BIT(GEMINI_ERR_OOM_DEVICE) | below_mask(t, host_chunks);
  if (wrong) {
    allowed = BIT(GEMINI_ERR_STATE);
  } else {
    if (t->p->exact && t->chunk) allowed = device_mask(t, frames_held(t, &h)) | below_mask(t, host_chunks);
    if (run && t->p->exact && t->chunk) allowed = BIT(GEMINI_ERR_UNSUPPORTED) | below_mask(t, host_chunks);
    else if (run) allowed |= BIT(GEMINI_ERR_UNSUPPORTED);
    if (apart) allowed |= BIT(GEMINI_ERR_OOM_HOST);
    allowed = busy_mask(t, busy, allowed);
  }
  gemini_status_t status = op ? gemini_op_begin_with(t->p->mgr, op, stream, accesses, (uint64_t)count)
                              : gemini_acquire(t->p->mgr, accesses, (uint64_t)count, stream);
  note(t, " -> %d", status);
  EXPECT(t, status, allowed, op ? "gemini_op_begin_with" : "gemini_acquire");
  /* Acquired by the caller, used by a stream: the bytes are there already. */
  bool by_stream = !stream && !op && chance(&t->rng, 6);
  for (int i = 0; i < count; i++) /* not what the caller has as well: the stream is not waited for */
    by_stream &= !opens_overlap(t, &batch[i], batch[i].access.mode & GEMINI_WRITE);
  if (by_stream) stream = t->streams[below(&t->rng, STREAMS)];
  for (int i = 0; i < count; i++) {
    open_t *o = &batch[i];
    if (!status) {
      o->access.ptr = accesses[i].ptr;
      if (o->access.tier == GEMINI_TIER_DEVICE)
        NEED(t, (uint8_t *)o->access.ptr == store_of(t, o->arena)->base + o->offset);
      if (o->tensor >= 0) {
        tensor_t *x = &t->tensors[o->tensor];
        x->state = GEMINI_STATE_COMPUTE;
        x->users++;
        if (t->arenas[x->arena].reused || t->arenas[x->arena].reuse >= 0)
          base_of(t, x)->gradient = t->arenas[x->arena].reuse >= 0;
      }
      if (o->access.tier == GEMINI_TIER_DEVICE) o->stream = stream;
      if (!o->later) use_open(t, o, o->access.mode);
      t->opens[t->open_count++] = *o;
    } else if (o->tensor >= 0) {
      check_tensor(t, o->tensor);
      if (chance(&t->rng, 4)) check_by_store(t, o);
    }
  }
  return status;
}

static void was_released(thread_t *t, const open_t *o) {
  tensor_t *x = o->tensor < 0 ? NULL : &t->tensors[o->tensor];
  if (!x || --x->users) return;
  static const uint32_t after[] = { GEMINI_STATE_HOLD, GEMINI_STATE_HOLD_AFTER_FWD, GEMINI_STATE_HOLD_AFTER_BWD,
                                    GEMINI_STATE_HOLD };
  x->state = t->id == 0 ? after[t->phase] : ANY_HOLD;
}
static void release_batch(thread_t *t, uint64_t *r, int most) {
  if (!t->open_count) return;
  gemini_access_t accesses[OPENS] = { 0 };
  open_t gone[OPENS];
  int count = 0, first = (int)below(r, (uint64_t)t->open_count), want = 1 + (int)below(r, (uint64_t)most);
  gemini_stream_t stream = t->opens[first].stream;
  for (int i = first; i < t->open_count && count < want;) {
    open_t *o = &t->opens[i];
    if (o->stream != stream) {
      i++;
      continue;
    }
    if (o->later) use_open(t, o, o->access.mode);
    note(t, " %s%d", o->tensor < 0 ? "arena " : "t", o->tensor < 0 ? o->arena : o->tensor);
    accesses[count] = o->access;
    if (o->access.tier == GEMINI_TIER_DEVICE && chance(r, 2)) accesses[count].ptr = NULL; /* is ignored */
    gone[count++] = *o;
    t->opens[i] = t->opens[--t->open_count];
  }
  if (stream && chance(r, 10)) { /* done by then: released without the stream */
    MUST(t, gemini_stream_synchronize(t->p->mgr, stream));
    stream = GEMINI_STREAM_CALLER;
  }
  MUST(t, gemini_release(t->p->mgr, accesses, (uint64_t)count, stream));
  for (int i = 0; i < count; i++) was_released(t, &gone[i]);
}
static void release_all(thread_t *t) {
  while (t->open_count) release_batch(t, &t->rng, OPENS);
}

static void step_acquire(thread_t *t) {
  uint64_t *r = &t->rng;
  if (chance(r, 3) || t->open_count > OPENS - 4) release_batch(t, r, 4);
  acquire_batch(t, r, chance(r, 8) ? 8 : 3, pick_stream(t, r), false, NULL);
}
static void step_release(thread_t *t) {
  if (!t->open_count && chance(&t->rng, 2)) { /* not acquired */
    open_t o;
    if (!pick_range(t, &t->rng, false, &o) || o.access.tier != GEMINI_TIER_DEVICE || o.tensor < 0) return;
    if (t->arenas[o.arena].read_only) return; /* others have it acquired */
    EXPECT(t, gemini_release(t->p->mgr, &o.access, 1, GEMINI_STREAM_CALLER), BIT(GEMINI_ERR_STATE), "gemini_release");
    return;
  }
  release_batch(t, &t->rng, 5);
}
static void step_use(thread_t *t) {
  if (!t->open_count) return;
  open_t *o = &t->opens[below(&t->rng, (uint64_t)t->open_count)];
  if (o->later) return;
  for (int i = 0; i < t->open_count; i++) /* written by another stream's or the caller's work in between? */
    if (&t->opens[i] != o && t->opens[i].slot == o->slot &&
        overlap(t->opens[i].offset, t->opens[i].size, o->offset, o->size) &&
        (t->opens[i].stream != o->stream || t->opens[i].later) &&
        ((o->access.mode | t->opens[i].access.mode) & GEMINI_WRITE))
      return;
  /* What was written may be read then, on the device as well as on the host. */
  uint32_t mode = o->access.mode & GEMINI_WRITE ? 1 + (uint32_t)below(&t->rng, 3) : GEMINI_READ;
  if (in_reusing_set(t, o->arena) && mode & GEMINI_WRITE && o->tensor >= 0 &&
      base_of(t, &t->tensors[o->tensor])->gradient != (t->arenas[o->arena].reuse >= 0))
    return;
  note(t, " t%d:%u", o->tensor, mode);
  use_open(t, o, mode);
}

/* ---- moving */
static void step_move(thread_t *t) {
  gemini_access_t accesses[4];
  open_t o;
  uint64_t *r = &t->rng, count = 1 + below(r, 4), n = 0;
  int busy = FREE_TO;
  uint32_t allowed = OK;
  bool device = false, leaving = false;
  holds_t h;
  if (t->chunk) holds_get(t, &h);
  for (uint64_t i = 0; i < count; i++) {
    if (!pick_range(t, r, false, &o)) return;
    o.access.tier = (uint32_t)below(r, 3);
    o.access.mode = (uint32_t)below(r, 9); /* ignored */
    leaving |= o.access.tier != GEMINI_TIER_DEVICE;
    if (t->chunk && o.access.tier == GEMINI_TIER_DEVICE) hold_add(t, &h, &o, true);
    accesses[n++] = o.access;
    note(t, " t%d+%" PRIu64 "->%u", o.tensor, o.size, o.access.tier);
    bool (*const when[])(const held_t *) = { is_host_written, is_on_device, is_device_held_or_host };
    int is_busy = range_check(t, o.arena, o.offset, o.size, when[o.access.tier]);
    if (is_busy == IS_BUSY && o.access.tier == GEMINI_TIER_FILE) is_busy = MAY_BE_BUSY; /* zeros leave no trace */
    if (is_busy == IS_BUSY && n > 1) is_busy = MAY_BE_BUSY; /* something else before it came to that one */
    if (is_busy > busy) busy = is_busy;
    device |= o.access.tier == GEMINI_TIER_DEVICE;
    if (o.access.tier == GEMINI_TIER_FILE && (t->p->exact ? atomic_load(&t->p->budget[2]) < BIG_BYTES : true))
      allowed |= BIT(GEMINI_ERR_OOM_FILE);
  }
  allowed |= below_mask(t, 2);
  if (device && (!t->p->exact || !t->chunk || frames_held(t, &h) > frames(t))) allowed |= BIT(GEMINI_ERR_OOM_DEVICE);
  if (busy == IS_BUSY && allowed != OK) busy = MAY_BE_BUSY;
  if (device && leaving && !busy) busy = MAY_BE_BUSY; /* one chunk to two places */
  EXPECT(t, gemini_move(t->p->mgr, accesses, n), busy_mask(t, busy, allowed), "gemini_move");
}
static void step_hint(thread_t *t) {
  gemini_access_t accesses[4];
  open_t o;
  uint64_t *r = &t->rng, count = 1 + below(r, 4);
  for (uint64_t i = 0; i < count; i++) {
    if (!pick_range(t, r, false, &o)) return;
    o.access.tier = (uint32_t)below(r, 3);
    accesses[i] = o.access;
    note(t, " t%d+%" PRIu64 "->%u", o.tensor, o.size, o.access.tier);
  }
  MUST(t, gemini_hint(t->p->mgr, accesses, count));
}
static void step_pin(thread_t *t) {
  open_t o;
  if (t->pin_count == PINS || !pick_range(t, &t->rng, false, &o)) return;
  note(t, " t%d+%" PRIu64, o.tensor, o.size);
  uint32_t allowed = OK | BIT(GEMINI_ERR_OOM_DEVICE);
  if (t->p->exact && t->chunk) {
    holds_t h;
    holds_get(t, &h);
    hold_add(t, &h, &o, true);
    allowed = device_mask(t, frames_held(t, &h));
  }
  int busy = range_check(t, o.arena, o.offset, o.size, is_host_written);
  if (busy == IS_BUSY && allowed != OK) busy = MAY_BE_BUSY; /* whichever comes first */
  gemini_status_t status = gemini_pin(t->p->mgr, &o.access);
  note(t, " -> %d", status);
  EXPECT(t, status, busy_mask(t, busy, allowed | below_mask(t, 2)), "gemini_pin");
  if (!status) t->pins[t->pin_count++] = o;
}
static void unpin(thread_t *t, int index) {
  MUST(t, gemini_unpin(t->p->mgr, &t->pins[index].access));
  t->pins[index] = t->pins[--t->pin_count];
}
static void step_unpin(thread_t *t) {
  if (t->pin_count) {
    unpin(t, (int)below(&t->rng, (uint64_t)t->pin_count));
    return;
  }
  open_t o;
  if (!t->p->exact || !pick_range(t, &t->rng, false, &o)) return;
  EXPECT(t, gemini_unpin(t->p->mgr, &o.access), BIT(GEMINI_ERR_STATE), "gemini_unpin");
}

/* ---- non-model memory */
static void allocated_add(thread_t *t, const alloc_t *a) {
  program_t *p = t->p;
  pthread_mutex_lock(&p->lock);
  for (int i = 0; i < p->allocated_count; i++)
    if (overlap((uintptr_t)p->allocated[i].ptr, p->allocated[i].size, (uintptr_t)a->ptr, a->size))
      FAIL(t, "gemini_alloc gave %p + %" PRIu64 ", which overlaps %p + %" PRIu64, (void *)a->ptr, a->size,
           (void *)p->allocated[i].ptr, p->allocated[i].size);
  p->allocated[p->allocated_count++] = *a;
  pthread_mutex_unlock(&p->lock);
}
static void allocated_remove(thread_t *t, const alloc_t *a) { /* before the library may give it to another thread */
  program_t *p = t->p;
  pthread_mutex_lock(&p->lock);
  for (int i = 0; i < p->allocated_count; i++) {
    if (p->allocated[i].ptr != a->ptr) continue;
    p->allocated[i] = p->allocated[--p->allocated_count];
    break;
  }
  pthread_mutex_unlock(&p->lock);
}
/* Checks the canary, and writes another one. */
static void alloc_use(thread_t *t, alloc_t *a, gemini_stream_t stream, bool check, bool write) {
  job_t *j = malloc(sizeof *j + (check ? a->size : 0));
  NEED(t, j);
  *j = (job_t){ .t = t, .ptr = a->ptr, .size = a->size, .step = t->step, .dtype = NO_DTYPE, .check = check };
  j->write = write;
  if (check) fill(j->expected, a->size, a->seed, NO_DTYPE);
  if (write) a->seed = j->seed = check_random(&t->rng);
  MUST(t, gemini_stream_call(t->p->mgr, stream, job_run, j));
}
static void alloc_one(thread_t *t, uint64_t *r, gemini_stream_t stream) {
  if (t->alloc_count == ALLOCS) return;
  static const uint64_t limits[] = { 600, 5000, 70000, 300000 };
  uint64_t size = 1 + below(r, limits[below(r, 4)]);
  if (chance(r, 30)) size = atomic_load(&t->p->budget[GEMINI_TIER_DEVICE]) + below(r, 100000);
  note(t, " %" PRIu64, size);
  uint64_t usable = atomic_load(&t->p->budget[GEMINI_TIER_DEVICE]) - t->p->config.device_margin_bytes;
  uint32_t allowed = OK | BIT(GEMINI_ERR_OOM_DEVICE);
  if (t->p->exact && t->chunk) {
    holds_t h;
    holds_get(t, &h);
    uint64_t held = frames_held(t, &h);
    if (held + (size + t->chunk - 1) / t->chunk + 1 <= frames(t)) allowed = OK;
    else if (size > 2 * t->chunk && held + size / t->chunk - 2 > frames(t)) allowed = BIT(GEMINI_ERR_OOM_DEVICE);
  }
  if (t->p->exact && size > usable) allowed = BIT(GEMINI_ERR_OOM_DEVICE);
  void *ptr = NULL;
  gemini_status_t status = gemini_alloc(t->p->mgr, size, stream, &ptr);
  note(t, " -> %d", status);
  EXPECT(t, status, allowed | below_mask(t, 1), "gemini_alloc");
  if (status) return;
  NEED(t, (uintptr_t)ptr % 512 == 0);
  alloc_t a = { ptr, size, 0, stream };
  allocated_add(t, &a);
  alloc_use(t, &a, stream, false, true);
  t->allocs[t->alloc_count++] = a;
}
static void free_one(thread_t *t, int index) {
  alloc_t a = t->allocs[index];
  t->allocs[index] = t->allocs[--t->alloc_count];
  alloc_use(t, &a, a.stream, true, false);
  if (a.stream && chance(&t->rng, 6)) {
    MUST(t, gemini_stream_synchronize(t->p->mgr, a.stream));
    a.stream = pick_stream(t, &t->rng);
  }
  allocated_remove(t, &a);
  MUST(t, gemini_free(t->p->mgr, a.ptr, a.stream));
}
static void step_alloc(thread_t *t) { alloc_one(t, &t->rng, pick_stream(t, &t->rng)); }
static void step_free(thread_t *t) {
  if (t->alloc_count) free_one(t, (int)below(&t->rng, (uint64_t)t->alloc_count));
}
static void step_use_alloc(thread_t *t) {
  if (!t->alloc_count) return;
  alloc_t *a = &t->allocs[below(&t->rng, (uint64_t)t->alloc_count)];
  alloc_use(t, a, a->stream, true, true);
}

/* ---- zero, load, store, norm */
static void model_zero(thread_t *t, const open_t *o) {
  if (in_reusing_set(t, o->arena) && o->tensor >= 0) {
    tensor_t *x = &t->tensors[o->tensor], *base = base_of(t, x);
    if (t->arenas[o->arena].reuse >= 0 && !base->gradient) return; /* no gradient: nothing to make zero */
    if (t->arenas[o->arena].reused) base->gradient = false;
  }
  memset(model(t->p, o->slot, o->offset), 0, o->size);
}
static void step_zero(thread_t *t) {
  open_t o;
  if (!pick_range(t, &t->rng, false, &o) || t->arenas[o.arena].read_only) return;
  if (in_reusing_set(t, o.arena)) { /* whole tensors only */
    o.offset = t->tensors[o.tensor].offset;
    o.size = t->tensors[o.tensor].size;
    o.access.offset_bytes = o.access.size_bytes = 0;
  }
  note(t, " %s%d+%" PRIu64, o.tensor < 0 ? "arena " : "t", o.tensor < 0 ? o.arena : o.tensor, o.size);
  uint32_t allowed = busy_mask(t, range_check(t, o.arena, o.offset, o.size, is_acquired), OK | below_mask(t, 1));
  /* Chunk after chunk: where one may not get room on the host, only one. */
  if (below_mask(t, 1) && t->chunk && o.offset / t->chunk != (o.offset + o.size - 1) / t->chunk) return;
  gemini_status_t status = gemini_zero(t->p->mgr, &o.access);
  note(t, " -> %d", status);
  EXPECT(t, status, allowed, "gemini_zero");
  if (!status) model_zero(t, &o);
  else if (o.tensor >= 0) check_tensor(t, o.tensor);
}
static void step_load(thread_t *t) {
  open_t o;
  uint64_t *r = &t->rng;
  if (!pick_range(t, r, false, &o) || t->arenas[o.arena].read_only) return;
  if (in_reusing_set(t, o.arena)) { /* whole tensors only */
    o.offset = t->tensors[o.tensor].offset;
    o.size = t->tensors[o.tensor].size;
    o.access.offset_bytes = o.access.size_bytes = 0;
  }
  /* Chunk after chunk: where one may not get room on the host, only one. */
  if (below_mask(t, 1) && (!t->chunk || o.offset / t->chunk != (o.offset + o.size - 1) / t->chunk)) return;
  if (t->arenas[o.arena].shared && o.size > 60000) return; /* a chunk of it may be busy, after others were read */
  if (t->arenas[o.arena].shared && t->chunk && o.offset / t->chunk != (o.offset + o.size - 1) / t->chunk) return;
  uint64_t at = below(r, 5000), has = o.size;
  if (!in_reusing_set(t, o.arena) && chance(r, 8)) has = below(r, o.size);
  uint8_t *content = malloc(o.size + 1);
  NEED(t, content);
  fill(content, o.size, check_random(r), t->arenas[o.arena].dtype);
  NEED(t, ftruncate(t->fd, 0) == 0 && ftruncate(t->fd, (off_t)at) == 0);
  NEED(t, pwrite(t->fd, content, has, (off_t)at) == (ssize_t)has);
  note(t, " %s%d+%" PRIu64 " %" PRIu64, o.tensor < 0 ? "arena " : "t", o.tensor < 0 ? o.arena : o.tensor, o.size, has);
  uint32_t allowed = has == o.size ? OK : BIT(GEMINI_ERR_FORMAT);
  allowed = busy_mask(t, range_check(t, o.arena, o.offset, o.size, is_acquired), allowed | below_mask(t, 1));
  /* Pinned to the device: cannot be read into the host. */
  int pinned = range_check(t, o.arena, o.offset, o.size, is_acquired_or_pinned);
  if (pinned == IS_BUSY && allowed != BIT(GEMINI_ERR_BUSY)) {
    if (!t->chunk || o.offset / t->chunk != (o.offset + o.size - 1) / t->chunk) goto done;
    allowed |= BIT(GEMINI_ERR_BUSY);
  }
  gemini_status_t status = gemini_load(t->p->mgr, &o.access, t->fd, at);
  note(t, " -> %d", status);
  EXPECT(t, status, allowed, "gemini_load");
  if (status == GEMINI_OK || status == GEMINI_ERR_FORMAT) {
    memcpy(model(t->p, o.slot, o.offset), content, has);
    for (int k = 0; k < TENSORS; k++) {
      tensor_t *x = &t->tensors[k];
      if (has && x->alive && x->arena == o.arena && x->state == GEMINI_STATE_FREE &&
          overlap(x->offset, x->size, o.offset, has))
        x->state = GEMINI_STATE_HOLD;
    }
  }
  if (status == GEMINI_OK && o.tensor >= 0 && in_reusing_set(t, o.arena)) {
    const arena_t *a = &t->arenas[o.arena];
    if (a->reuse >= 0 || a->reused) base_of(t, &t->tensors[o.tensor])->gradient = a->reuse >= 0;
  }
done:
  free(content);
}
static void step_store(thread_t *t) {
  open_t o;
  if (!pick_range(t, &t->rng, false, &o)) return;
  note(t, " %s%d+%" PRIu64, o.tensor < 0 ? "arena " : "t", o.tensor < 0 ? o.arena : o.tensor, o.size);
  check_by_store(t, &o);
}
static double sum_squares(const uint8_t *at, uint64_t size, uint32_t dtype) {
  double sum = 0;
  for (uint64_t i = 0; i < size; i += dtype_bytes[dtype]) {
    double value = decode(at + i, dtype);
    sum += value * value;
  }
  return sum;
}
/* Of gradients in their parameters' bytes, those that were written; between tensors there are zeros. */
static double model_norm(thread_t *t, const open_t *o, uint32_t dtype) {
  const arena_t *a = &t->arenas[o->arena];
  const uint8_t *at = model(t->p, o->slot, o->offset);
  double sum = 0;
  if (a->reuse < 0) return sqrt(sum_squares(at, o->size, dtype));
  if (o->tensor >= 0) return base_of(t, &t->tensors[o->tensor])->gradient ? sqrt(sum_squares(at, o->size, dtype)) : 0;
  for (int k = 0; k < TENSORS; k++) {
    const tensor_t *x = &t->tensors[k];
    if (x->alive && x->base == k && x->arena == a->reuse && x->gradient)
      sum += sum_squares(at + x->offset, x->size, dtype);
  }
  return sqrt(sum);
}
static void step_norm(thread_t *t) {
  open_t o;
  if (!pick_range(t, &t->rng, false, &o) || t->arenas[o.arena].dtype == NO_DTYPE || opens_overlap(t, &o, false)) return;
  uint32_t dtype = t->arenas[o.arena].dtype;
  int all = (int)below(&t->rng, ARENAS);
  if (chance(&t->rng, 2) && t->arenas[all].alive && t->arenas[all].reuse >= 0 && t->arenas[all].size) {
    /* All gradients at once. */
    memset(&o, 0, sizeof o);
    o.access = (gemini_access_t)GEMINI_ACCESS_INIT;
    o.access.object.arena = t->arenas[all].handle;
    o.arena = all;
    o.tensor = -1;
    o.slot = store_of(t, all)->slot;
    o.size = t->arenas[all].size;
    dtype = t->arenas[all].dtype;
    if (opens_overlap(t, &o, false)) return;
  }
  note(t, " %s%d+%" PRIu64, o.tensor < 0 ? "arena " : "t", o.tensor < 0 ? o.arena : o.tensor, o.size);
  double want = model_norm(t, &o, dtype), got = -1, again = -1;
  uint32_t room = below_mask(t, 1);
  bool taken = t->arenas[o.arena].reused && content_other(t, &o);
  gemini_status_t status = gemini_norm(t->p->mgr, &o.access, dtype, pick_stream(t, &t->rng), &got);
  EXPECT(t, status, taken ? BIT(GEMINI_ERR_STATE) : OK | room, "gemini_norm");
  if (status) return;
  if (!(fabs(got - want) <= 1e-12 * want)) FAIL(t, "norm is %.17g, the model's %.17g", got, want);
  if (!chance(&t->rng, 2)) return;
  /* Elsewhere, the same bits. */
  o.access.tier = (uint32_t)below(&t->rng, 2);
  MUST(t, gemini_hint(t->p->mgr, &o.access, 1));
  status = gemini_norm(t->p->mgr, &o.access, dtype, GEMINI_STREAM_CALLER, &again);
  EXPECT(t, status, OK | room, "gemini_norm");
  if (!status && memcmp(&got, &again, sizeof got)) FAIL(t, "norm is %.17g, then %.17g", got, again);
}

/* ---- discarding */
/* Where nobody has any of its chunks, each whole one may become zeros from now on; late updates still read what was
 * there. */
static void discard(thread_t *t, open_t *o) {
  if (t->discard_count == DISCARDS || t->arenas[o->arena].shared || !t->chunk || !o->size || below_mask(t, 1)) return;
  if (range_check(t, o->arena, o->offset, o->size, is_acquired_or_pinned) != FREE_TO) return;
  for (int i = 0; i < t->discard_count; i++) /* each is looked at by itself */
    if (t->discards[i].slot == o->slot && overlap(t->discards[i].offset, t->discards[i].size, o->offset, o->size))
      return;
  note(t, " discards %s%d+%" PRIu64 "+%" PRIu64, o->tensor < 0 ? "arena " : "t", o->tensor < 0 ? o->arena : o->tensor,
       o->offset, o->size);
  MUST(t, gemini_discard(t->p->mgr, &o->access));
  const arena_t *a = &t->arenas[o->arena];
  if (a->reuse < 0 && !a->reused) t->discards[t->discard_count++] = *o; /* others stay as they are */
  o->access.tier = GEMINI_TIER_HOST;
  if (chance(&t->rng, 2)) MUST(t, gemini_move(t->p->mgr, &o->access, 1)); /* which drops what it has */
}
/* From a chunk on to the end. */
static void discard_arena(thread_t *t, int arena) {
  const uint64_t size = t->arenas[arena].size, chunks = t->chunk ? size / t->chunk : 0;
  open_t o = { .arena = arena, .tensor = -1, .slot = store_of(t, arena)->slot };
  o.offset = chunks && chance(&t->rng, 3) ? below(&t->rng, chunks) * t->chunk : 0;
  o.size = size - o.offset;
  o.access = (gemini_access_t)ACCESS(t->arenas[arena].handle, o.offset, o.size, 0, 0);
  discard(t, &o);
}
static void step_discard(thread_t *t) {
  open_t o;
  if (!pick_range(t, &t->rng, false, &o)) return;
  if (chance(&t->rng, 2) && !in_reusing_set(t, o.arena)) discard_arena(t, o.arena);
  else discard(t, &o);
}
/* Acquires what was discarded, which ends that: each chunk is what it was, or zeros, which the model then has, too. */
static void settle(thread_t *t) {
  while (t->discard_count) {
    const open_t *o = &t->discards[--t->discard_count];
    const uint64_t end = o->offset + o->size, last = t->arenas[o->arena].size;
    for (uint64_t at = o->offset, part; at < end; at += part) {
      const uint64_t edge = (at / t->chunk + 1) * t->chunk;
      part = (edge < end ? edge : end) - at;
      gemini_access_t a = ACCESS(t->arenas[o->arena].handle, at, part, GEMINI_READ, GEMINI_TIER_HOST); /* no tensor's */
      MUST(t, gemini_acquire(t->p->mgr, &a, 1, GEMINI_STREAM_CALLER));
      const uint8_t *got = a.ptr;
      uint8_t *want = model(t->p, o->slot, at);
      bool zeros = at % t->chunk == 0 && at + part == (edge < last ? edge : last);
      for (uint64_t k = 0; zeros && k < part; k++) zeros = !got[k];
      if (zeros) memset(want, 0, part);
      else compare(t, t->step, "what was discarded", got, want, part);
      MUST(t, gemini_release(t->p->mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  }
}

/* ---- updates */
/* Integer arithmetic on the elements' bits; all zero gives zero, so that what lies between tensors stays so. */
static void update_elements(const update_t *u, uint8_t *const *ptr, uint64_t first, uint64_t count) {
  for (uint64_t e = 0; e < count; e++) {
    uint64_t value[8] = { 0 }, sum = 0;
    for (uint32_t i = 0; i < u->count; i++) {
      if (!(u->modes[i] & GEMINI_READ)) continue;
      uint32_t n = u->element_bytes[i] < 8 ? u->element_bytes[i] : 8;
      memcpy(&value[i], ptr[i] + e * u->element_bytes[i], n);
      sum += value[i] * (2 * i + 3 + (u->seed & ~UINT64_C(1)));
    }
    uint64_t place = (first + e) * UINT64_C(0x9e3779b97f4a7c15);
    for (uint32_t i = 0; i < u->count; i++) {
      if (!(u->modes[i] & GEMINI_WRITE)) continue;
      uint64_t next = sum ? number(value[i] * 3 + (sum ^ sum >> (7 + i)) + place, u->dtypes[i]) : 0;
      for (uint32_t k = 0; k < u->element_bytes[i]; k += 8)
        memcpy(ptr[i] + e * u->element_bytes[i] + k, &next, u->element_bytes[i] < 8 ? u->element_bytes[i] : 8);
    }
  }
}
typedef struct {
  update_t *update;
  gemini_update_span_t span;
} span_job_t;
static void span_run(void *user) {
  span_job_t *j = user;
  update_elements(j->update, (uint8_t *const *)j->span.ptr, j->span.first_element, j->span.element_count);
  atomic_fetch_add(&j->update->done, j->span.element_count);
  free(j);
}
static void update_span(void *user, const gemini_update_span_t *span) {
  update_t *u = user;
  span_job_t *j = malloc(sizeof *j);
  if (!j || span->arena_count != u->count)
    fail_at(u->p, NULL, u->step, __LINE__, "a span of %u arenas", span->arena_count);
  *j = (span_job_t){ u, *span };
  if (span->tier == GEMINI_TIER_HOST) {
    span_run(j);
    return;
  }
  gemini_status_t status = gemini_stream_call(u->p->mgr, span->stream, span_run, j);
  if (status) fail_at(u->p, NULL, u->step, __LINE__, "gemini_stream_call in an update returned %d", status);
}

/* Arenas of one layout: members of the set whose root is given. */
static int set_members(thread_t *t, int root, int members[ARENAS]) {
  int n = 0;
  for (int i = 0; i < ARENAS; i++)
    if (t->arenas[i].alive && (i == root || t->arenas[i].like == root)) members[n++] = i;
  return n;
}
static void model_update(thread_t *t, update_t *u, const int *arenas, int root, uint64_t first, uint64_t count) {
  uint8_t *ptr[8], *gradient = NULL;
  for (uint32_t i = 0; i < u->count; i++) {
    const arena_t *a = &t->arenas[arenas[i]];
    ptr[i] = model(t->p, store_of(t, arenas[i])->slot, first * a->element_bytes);
    if (a->reuse < 0) continue;
    /* Tensors without a gradient count as zero, whatever their bytes are. */
    gradient = malloc(count * a->element_bytes);
    NEED(t, gradient);
    memcpy(gradient, ptr[i], count * a->element_bytes);
    uint64_t begin = first * a->element_bytes, end = begin + count * a->element_bytes;
    for (int k = 0; k < TENSORS; k++) {
      const tensor_t *x = &t->tensors[k];
      if (!x->alive || x->base != k || x->arena != root || x->gradient) continue;
      uint64_t from = x->offset > begin ? x->offset : begin, to = x->offset + x->size < end ? x->offset + x->size : end;
      if (from < to) memset(gradient + from - begin, 0, to - from);
    }
    ptr[i] = gradient;
  }
  update_elements(u, ptr, first, count);
  free(gradient);
  for (uint32_t i = 0; i < u->count; i++) {
    if (!(u->modes[i] & GEMINI_WRITE)) continue;
    for (int k = 0; k < TENSORS; k++) {
      tensor_t *x = &t->tensors[k];
      uint64_t bytes = t->arenas[arenas[i]].element_bytes;
      if (!x->alive || x->arena != arenas[i] || !overlap(x->offset, x->size, first * bytes, count * bytes)) continue;
      x->state = x->users ? GEMINI_STATE_COMPUTE : GEMINI_STATE_HOLD; /* acquired elsewhere, in other chunks */
      if (t->arenas[x->arena].reused) base_of(t, x)->gradient = false;
    }
  }
}
static void update_set(thread_t *t, uint64_t *r, int root, bool all) {
  int members[ARENAS], n = set_members(t, root, members), arenas[8], count = 0;
  uint64_t elements = t->arenas[root].size / t->arenas[root].element_bytes, first = 0, span = elements;
  if (!elements || t->update_count == UPDATES) return;
  settle(t);
  update_t *u = calloc(1, sizeof *u);
  NEED(t, u);
  bool param = false, gradient = false;
  for (int i = 0; i < n && count < 4; i++) {
    if (!all && chance(r, 4)) continue;
    const arena_t *a = &t->arenas[members[i]];
    u->element_bytes[count] = a->element_bytes;
    u->dtypes[count] = a->dtype;
    u->modes[count] = a->reuse >= 0 ? GEMINI_READ : 1 + (uint32_t)below(r, 3);
    if (a->reused) u->modes[count] = GEMINI_WRITE, param = true;
    gradient |= a->reuse >= 0;
    arenas[count++] = members[i];
  }
  u->count = (uint32_t)count;
  if (elements > 1 && chance(r, 3)) {
    first = below(r, elements);
    span = 1 + below(r, elements - first);
  }
  uint32_t refused = 0; /* what gradients in their parameters' bytes do not allow */
  for (int k = 0; k < TENSORS && in_reusing_set(t, root); k++) {
    const tensor_t *x = &t->tensors[k];
    uint64_t from = x->offset / t->arenas[root].element_bytes, size = x->size / t->arenas[root].element_bytes;
    if (!x->alive || x->base != k || x->arena != root || !overlap(from, size, first, span)) continue;
    if (!param && gradient && !x->gradient) refused |= BIT(GEMINI_ERR_STATE);
    if (param && x->gradient && (from < first || from + size > first + span)) refused |= BIT(GEMINI_ERR_INVALID);
  }
  gemini_arena_t handles[8];
  uint64_t chunks = 0;
  int busy = FREE_TO;
  for (int i = 0; i < count; i++) {
    const arena_t *a = &t->arenas[arenas[i]];
    handles[i] = a->handle;
    chunks += 10; /* of one piece, and of those that workers still hold */
    int is_busy = range_check(t, arenas[i], first * a->element_bytes, span * a->element_bytes, is_acquired);
    if (is_busy > busy) busy = is_busy;
    note(t, " a%d:%u", arenas[i], u->modes[i]);
  }
  /* What is pinned is updated on the device, and what goes with it must come there; if not, it fails in the middle. */
  bool pinned = false;
  for (int i = 0; i < count; i++)
    for (int k = 0; k < t->pin_count; k++) pinned |= t->pins[k].slot == store_of(t, arenas[i])->slot;
  if (pinned) {
    holds_t h;
    holds_get(t, &h);
    if (!t->p->exact || frames_held(t, &h) + chunks > frames(t) || below_mask(t, chunks)) count = 0;
  }
  uint32_t room = below_mask(t, chunks);
  /* With a file tier, or with others who take what was there, it could fail in the middle. */
  if (!count || (room && (!t->p->exact || t->p->config.file_bytes))) {
    free(u);
    return;
  }
  u->p = t->p;
  u->seed = check_random(&t->rng);
  u->step = t->step;
  u->wanted = span;
  t->updates[t->update_count++] = u;
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.flags = chance(r, 4) ? 0 : GEMINI_UPDATE_LATE;
  update.arenas = handles;
  update.modes = u->modes;
  update.arena_count = u->count;
  update.first_element = first;
  update.element_count = first == 0 && span == elements && chance(r, 2) ? 0 : span;
  update.stream = pick_stream(t, r);
  update.fn = update_span;
  update.user = u;
  note(t, " %" PRIu64 "+%" PRIu64 "%s", first, span, update.flags ? " late" : "");
  gemini_status_t status = gemini_update(t->p->mgr, &update);
  note(t, " -> %d", status);
  uint32_t full = room & BIT(GEMINI_ERR_OOM_HOST);
  if (full && !update.flags) full |= BIT(GEMINI_ERR_PENDING); /* what is pending before it took the room it had */
  uint32_t allowed = busy_mask(t, busy, OK | full);
  if (refused) allowed = refused | (allowed & BIT(GEMINI_ERR_BUSY));
  EXPECT(t, status, allowed, "gemini_update");
  if (status && status != GEMINI_ERR_PENDING) {
    u->wanted = 0;
    return;
  }
  model_update(t, u, arenas, root, first, span);
  for (int i = 0; i < count && update.flags && !in_reusing_set(t, root) && chance(r, 3); i++)
    if (u->modes[i] == GEMINI_READ) discard_arena(t, arenas[i]);
  if (!update.flags && !status) NEED(t, atomic_load(&u->done) == span);
}
static int pick_root(thread_t *t, uint64_t *r) {
  int roots[ARENAS], count = 0;
  for (int i = 0; i < ARENAS; i++) {
    const arena_t *a = &t->arenas[i];
    if (a->alive && !a->shared && a->like < 0 && a->size && (a->followed || chance(r, 6))) roots[count++] = i;
  }
  return count ? roots[below(r, (uint64_t)count)] : -1;
}
static void step_update(thread_t *t) {
  int root = pick_root(t, &t->rng);
  if (root < 0) return;
  if (chance(&t->rng, 2)) release_all(t);
  for (int more = chance(&t->rng, 2) ? 4 : 1; more; more--) update_set(t, &t->rng, root, chance(&t->rng, 2));
}
static void step_update_wait(thread_t *t) {
  if (!updates_wait(t)) return;
  for (int i = 0; i < t->update_count; i++)
    if (atomic_load(&t->updates[i]->done) != t->updates[i]->wanted)
      FAIL(t, "an update of step %" PRIu64 " did %" PRIu64 " elements, not %" PRIu64, t->updates[i]->step,
           atomic_load(&t->updates[i]->done), t->updates[i]->wanted);
}

/* ---- arenas and tensors */
static int free_arena(const thread_t *t) {
  for (int i = 0; i < ARENAS; i++)
    if (!t->arenas[i].alive) return i;
  return -1;
}
static int free_tensor(const thread_t *t) {
  for (int i = 0; i < TENSORS; i++)
    if (!t->tensors[i].alive) return i;
  return -1;
}
static bool slot_take(program_t *p, uint32_t *slot) {
  bool found = false;
  pthread_mutex_lock(&p->lock);
  for (uint32_t i = 0; i < SLOTS && !found; i++) {
    if (p->slots[i]) continue;
    found = p->slots[i] = true;
    *slot = i;
  }
  pthread_mutex_unlock(&p->lock);
  return found;
}
static int make_arena(thread_t *t, uint32_t kind, uint32_t element_bytes, uint64_t capacity, int like, int reuse) {
  uint64_t *r = &t->rng;
  int index = free_arena(t);
  arena_t a = { .kind = kind, .element_bytes = element_bytes, .capacity = capacity, .like = like, .reuse = reuse };
  if (index < 0 || (reuse < 0 && !slot_take(t->p, &a.slot))) return -1;
  static const uint32_t dtypes[] = { NO_DTYPE, GEMINI_DTYPE_BF16, GEMINI_DTYPE_F32, GEMINI_DTYPE_F64,
                                     GEMINI_DTYPE_F64 };
  a.dtype = dtypes[__builtin_ctz(element_bytes)];
  if (element_bytes == 2 && chance(r, 2)) a.dtype = GEMINI_DTYPE_F16;
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.kind = kind;
  c.element_bytes = element_bytes;
  c.capacity_bytes = capacity;
  if (like >= 0) c.like = t->arenas[like].handle;
  if (reuse >= 0) {
    if (chance(r, 2)) c.like = 0;
    c.reuse = t->arenas[reuse].handle;
    a.dtype = t->arenas[reuse].dtype;
  }
  note(t, " a%d: kind %u, %u B, %" PRIu64 ", like %d, reuse %d", index, kind, element_bytes, capacity, like, reuse);
  MUST(t, gemini_arena_create(t->p->mgr, &c, &a.handle));
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  MUST(t, gemini_arena_info(t->p->mgr, a.handle, &info));
  a.base = (uint8_t *)(uintptr_t)info.base; // NOLINT
  a.size = like >= 0 ? t->arenas[like].size / t->arenas[like].element_bytes * element_bytes : 0;
  a.alive = true;
  t->arenas[index] = a;
  if (like >= 0) t->arenas[like].followed = true;
  if (reuse >= 0) t->arenas[reuse].reused = true;
  t->arenas_changed = true;
  return index;
}
static int make_plain(thread_t *t) {
  uint32_t bytes = 1u << below(&t->rng, 5);
  uint64_t capacity = (below(&t->rng, SLOT_BYTES - 300000) + 300000) / 16 * 16;
  return make_arena(t, GEMINI_KIND_OTHER, bytes, capacity, -1, -1);
}
static void register_one(thread_t *t, uint64_t *r, int arena, bool first);
/* A parameter arena and what follows it; tensors are registered before, between or after. */
static void make_set(thread_t *t) {
  uint64_t *r = &t->rng;
  uint32_t bytes = chance(r, 3) ? 4 : 2;
  int root = make_arena(t, GEMINI_KIND_PARAM, bytes, (uint64_t)SET_ELEMENTS * bytes, -1, -1);
  if (root < 0) return;
  bool reuse = chance(r, 2);
  if (reuse) make_arena(t, GEMINI_KIND_GRAD, bytes, (uint64_t)SET_ELEMENTS * bytes, root, root);
  if (chance(r, 2)) register_one(t, r, root, true);
  static const uint32_t wide[] = { 4, 4, 8, 2 };
  uint32_t kinds[] = { GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM, GEMINI_KIND_VARIANCE };
  int more = 1 + (int)below(r, 3);
  for (int i = 0; i < more; i++) {
    uint32_t b = wide[below(r, 4)];
    make_arena(t, kinds[i], b, (uint64_t)SET_ELEMENTS * b, root, -1);
    if (chance(r, 2)) register_one(t, r, root, true);
  }
}
static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

static void register_one(thread_t *t, uint64_t *r, int arena, bool next) {
  arena_t *a = &t->arenas[arena];
  int index = free_tensor(t);
  if (index < 0) return;
  static const uint64_t limits[] = { 8, 2000, 30000, 130000, 350000 };
  uint64_t size = (1 + below(r, limits[below(r, 5)]) / a->element_bytes) * a->element_bytes;
  if (chance(r, 25)) size = a->capacity - (a->size < a->capacity ? a->size : 0); /* maybe all that is left */
  size = size / a->element_bytes * a->element_bytes;
  if (!size) return;
  if (a->shared && size > 130000) return;
  uint64_t offset = GEMINI_OFFSET_NEXT, want = round_up(a->size, 256u * a->element_bytes);
  if (!next && !a->shared && a->size && !in_reusing_set(t, arena)) {
    want = offset = below(r, a->size / a->element_bytes) * a->element_bytes;
    if (size > a->size - offset) size = a->size - offset;
  }
  tensor_t x = { .arena = arena, .base = index, .size = size };
  snprintf(x.name, sizeof x.name, "%d.%u", t->id, t->names++);
  uint32_t allowed = want + size <= a->capacity ? OK : BIT(GEMINI_ERR_INVALID);
  if (a->shared) allowed = OK | BIT(GEMINI_ERR_INVALID);
  note(t, " t%d %s in a%d, %" PRIu64 " at %" PRId64, index, x.name, arena, size, (int64_t)offset);
  gemini_status_t status = gemini_tensor_register(t->p->mgr, a->handle, x.name, size, offset, &x.handle);
  EXPECT(t, status, allowed, "gemini_tensor_register");
  if (status) return;
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  MUST(t, gemini_tensor_info(t->p->mgr, x.handle, &info));
  x.offset = info.offset_bytes;
  if (!a->shared && x.offset != want) FAIL(t, "tensor at %" PRIu64 ", not at %" PRIu64, x.offset, want);
  NEED(t, x.offset % ((offset == GEMINI_OFFSET_NEXT ? 256u : 1u) * a->element_bytes) == 0);
  NEED(t, x.offset + x.size <= SLOT_BYTES);
  x.alive = true;
  t->tensors[index] = x;
  if (offset == GEMINI_OFFSET_NEXT && !a->shared) {
    for (int i = 0; i < ARENAS; i++)
      if (t->arenas[i].alive && (i == arena || t->arenas[i].like == arena))
        t->arenas[i].size = (x.offset + size) / a->element_bytes * t->arenas[i].element_bytes;
  }
  check_tensor(t, index);
}
static void counterpart_one(thread_t *t, uint64_t *r) {
  int from = pick_tensor(t, r), index = free_tensor(t);
  if (from < 0 || index < 0) return;
  int base = t->tensors[from].base, members[ARENAS], n = set_members(t, t->tensors[base].arena, members);
  int arena = members[below(r, (uint64_t)n)];
  gemini_tensor_t handle = 0;
  note(t, " t%d of t%d in a%d", index, from, arena);
  MUST(t, gemini_tensor_counterpart(t->p->mgr, t->tensors[from].handle, t->arenas[arena].handle, &handle));
  for (int i = 0; i < TENSORS; i++) {
    if (!t->tensors[i].alive || t->tensors[i].base != base || t->tensors[i].arena != arena) continue;
    if (t->tensors[i].handle != handle) FAIL(t, "a second counterpart of t%d in a%d", from, arena);
    return;
  }
  tensor_t x = t->tensors[base];
  const arena_t *a = &t->arenas[arena], *b = &t->arenas[t->tensors[base].arena];
  x.handle = handle;
  x.arena = arena;
  x.base = base;
  x.offset = x.offset / b->element_bytes * a->element_bytes;
  x.size = x.size / b->element_bytes * a->element_bytes;
  x.state = GEMINI_STATE_FREE;
  x.users = 0;
  x.gradient = false;
  t->tensors[index] = x;
  check_tensor(t, index);
}
static void step_register(thread_t *t) {
  uint64_t *r = &t->rng;
  if (chance(r, 3)) {
    counterpart_one(t, r);
    return;
  }
  int arenas[ARENAS], count = 0;
  for (int i = 0; i < ARENAS; i++)
    if (t->arenas[i].alive && t->arenas[i].like < 0 && !t->arenas[i].read_only) arenas[count++] = i;
  if (count) register_one(t, r, arenas[below(r, (uint64_t)count)], !chance(r, 3));
}
static void step_unregister(thread_t *t) {
  int index = pick_tensor(t, &t->rng);
  if (index < 0 || in_reusing_set(t, t->tensors[index].arena)) return;
  if (t->arenas[t->tensors[index].arena].read_only) return;
  bool busy = false, base = t->tensors[index].base == index;
  for (int i = 0; i < TENSORS; i++)
    if (t->tensors[i].alive && (i == index || (base && t->tensors[i].base == index))) busy |= t->tensors[i].users > 0;
  for (int i = 0; i < t->pin_count; i++) /* the pin names it */
    for (int k = 0; k < TENSORS; k++)
      if (t->tensors[k].alive && (k == index || (base && t->tensors[k].base == index)) &&
          t->pins[i].access.object.tensor == t->tensors[k].handle)
        return;
  note(t, " t%d", index);
  gemini_status_t status = gemini_tensor_unregister(t->p->mgr, t->tensors[index].handle);
  EXPECT(t, status, busy ? BIT(GEMINI_ERR_BUSY) : OK, "gemini_tensor_unregister");
  if (status) return;
  for (int i = 0; i < TENSORS; i++)
    if (t->tensors[i].alive && (i == index || (base && t->tensors[i].base == index))) {
      gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
      EXPECT(t, gemini_tensor_info(t->p->mgr, t->tensors[i].handle, &info), BIT(GEMINI_ERR_HANDLE),
             "gemini_tensor_info of an unregistered tensor");
      t->tensors[i].alive = false;
    }
  gemini_tensor_t found;
  if (base)
    EXPECT(t, gemini_tensor_find(t->p->mgr, t->tensors[index].name, &found), BIT(GEMINI_ERR_NOT_FOUND),
           "gemini_tensor_find");
}
static void step_take(thread_t *t) {
  int i = pick_arena(t, &t->rng);
  if (i < 0 || in_reusing_set(t, i)) return;
  arena_t *a = &t->arenas[i];
  uint64_t size = (1 + below(&t->rng, 20000)) * a->element_bytes, offset = 1;
  uint64_t want = round_up(a->size, 256u * a->element_bytes);
  bool fits = a->like < 0 && want + size <= a->capacity;
  note(t, " a%d %" PRIu64, i, size);
  gemini_status_t status = gemini_arena_take(t->p->mgr, a->handle, size, &offset);
  EXPECT(t, status, fits ? OK : BIT(GEMINI_ERR_INVALID), "gemini_arena_take");
  NEED(t, offset == (status ? 1 : want));
  for (int k = 0; !status && k < ARENAS; k++)
    if (t->arenas[k].alive && (k == i || t->arenas[k].like == i))
      t->arenas[k].size = (want + size) / a->element_bytes * t->arenas[k].element_bytes;
}
static void destroy_arena(thread_t *t, int index) {
  arena_t *a = &t->arenas[index];
  bool busy = false, followed = false;
  for (int i = 0; i < ARENAS; i++) followed |= t->arenas[i].alive && t->arenas[i].like == index;
  for (int i = 0; i < TENSORS; i++) busy |= t->tensors[i].alive && t->tensors[i].arena == index && t->tensors[i].users;
  for (int i = 0; i < t->open_count; i++) busy |= a->reuse < 0 && t->opens[i].slot == a->slot;
  for (int i = 0; i < t->pin_count; i++) busy |= a->reuse < 0 && t->pins[i].slot == a->slot;
  for (int i = 0; i < t->pin_count; i++)
    if (t->pins[i].arena == index && !busy && !followed) return; /* it could not be unpinned by its name */
  note(t, " a%d", index);
  const uint32_t pending = pending_mask(t);
  gemini_status_t status = gemini_arena_destroy(t->p->mgr, a->handle);
  note(t, " -> %d", status);
  uint32_t allowed = (busy || followed ? BIT(GEMINI_ERR_BUSY) : OK) | pending;
  if (a->reuse >= 0 && !followed) allowed |= below_mask(t, 1); /* gradients become zeros, which may need room */
  EXPECT(t, status, allowed, "gemini_arena_destroy");
  if (status) return;
  for (int i = 0; i < TENSORS; i++)
    if (t->tensors[i].alive && t->tensors[i].arena == index) t->tensors[i].alive = false;
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  EXPECT(t, gemini_arena_info(t->p->mgr, a->handle, &info), BIT(GEMINI_ERR_HANDLE), "gemini_arena_info");
  if (a->reuse < 0) {
    memset(model(t->p, a->slot, 0), 0, SLOT_BYTES);
    pthread_mutex_lock(&t->p->lock);
    t->p->slots[a->slot] = false;
    pthread_mutex_unlock(&t->p->lock);
  } else {
    t->arenas[a->reuse].reused = false;
  }
  a->alive = false;
  t->arenas_changed = true;
  for (int i = 0; i < ARENAS; i++) {
    if (!t->arenas[i].alive || i != a->like) continue;
    t->arenas[i].followed = false;
    for (int k = 0; k < ARENAS; k++) t->arenas[i].followed |= t->arenas[k].alive && t->arenas[k].like == i;
  }
}
static void step_arena(thread_t *t) {
  uint64_t *r = &t->rng;
  int used = 0, index = pick_arena(t, r);
  for (int i = 0; i < ARENAS; i++) used += t->arenas[i].alive;
  if (used > ARENAS - 6 || (used > 3 && chance(r, 2))) {
    /* What the bytes of a parameter are once its gradient's arena is gone is not said: it goes with the set. */
    if (index < 0 || t->arenas[index].reuse >= 0) return;
    destroy_arena(t, index);
    return;
  }
  if (chance(r, 2)) {
    make_plain(t);
  } else {
    make_set(t);
  }
}
static void step_state(thread_t *t) {
  static const uint32_t legal[] = { 1u << 1, 1u << 0 | 1u << 5, 1u << 1, 1u << 1 | 1u << 5, 0, 1u << 1 };
  int index = pick_tensor(t, &t->rng);
  if (index < 0 || t->arenas[t->tensors[index].arena].read_only) return;
  tensor_t *x = &t->tensors[index];
  uint32_t state = (uint32_t)below(&t->rng, GEMINI_STATE_COUNT + 1);
  if (x->state == ANY_HOLD) return;
  uint32_t allowed = OK;
  if (state >= GEMINI_STATE_COUNT) {
    allowed = BIT(GEMINI_ERR_INVALID);
  } else if (!(legal[x->state] >> state & 1)) {
    allowed = BIT(GEMINI_ERR_STATE);
  } else if (state == GEMINI_STATE_FREE) {
    if (below_mask(t, 1) && t->chunk && x->offset / t->chunk != (x->offset + x->size - 1) / t->chunk) return;
    allowed = busy_mask(t, range_check(t, x->arena, x->offset, x->size, is_acquired), OK | below_mask(t, 1));
  }
  note(t, " t%d %u", index, state);
  gemini_status_t status = gemini_tensor_state_set(t->p->mgr, x->handle, state);
  EXPECT(t, status, allowed, "gemini_tensor_state_set");
  if (!status) x->state = state;
  if (!status && state == GEMINI_STATE_FREE) {
    open_t o = { .arena = x->arena, .tensor = index, .slot = store_of(t, x->arena)->slot };
    o.offset = x->offset;
    o.size = x->size;
    model_zero(t, &o);
  }
  check_tensor(t, index);
}
static void step_info(thread_t *t) {
  int index = pick_tensor(t, &t->rng);
  if (index < 0) return;
  check_tensor(t, index);
  gemini_tensor_t found = 0;
  MUST(t, gemini_tensor_find(t->p->mgr, t->tensors[index].name, &found));
  NEED(t, found == base_of(t, &t->tensors[index])->handle);
}

/* ---- streams */
static void step_stream(thread_t *t) {
  uint64_t *r = &t->rng;
  int i = (int)below(r, STREAMS);
  if (chance(r, 2)) {
    MUST(t, gemini_stream_synchronize(t->p->mgr, t->streams[i]));
    return;
  }
  gemini_stream_t old = t->streams[i];
  for (int k = 0; k < t->open_count; k++)
    if (t->opens[k].stream == old) return;
  for (int k = 0; k < t->alloc_count; k++)
    if (t->allocs[k].stream == old) t->allocs[k].stream = GEMINI_STREAM_CALLER; /* its work is done then */
  MUST(t, gemini_stream_destroy(t->p->mgr, old));
  EXPECT(t, gemini_stream_synchronize(t->p->mgr, old), BIT(GEMINI_ERR_HANDLE), "gemini_stream_synchronize");
  MUST(t, gemini_stream_create(t->p->mgr, &t->streams[i]));
}

/* ---- what concerns all threads: thread 0 only */
static void step_budget(thread_t *t) {
  program_t *p = t->p;
  uint64_t *r = &t->rng, old[GEMINI_TIER_COUNT];
  for (int i = 0; i < GEMINI_TIER_COUNT; i++) old[i] = atomic_load(&p->budget[i]);
  uint32_t tier = (uint32_t)below(r, 3), allowed = OK;
  uint64_t bytes;
  if (tier == GEMINI_TIER_DEVICE) {
    bytes = p->config.device_margin_bytes + ((uint64_t)(1 + below(r, 40)) << 16) + below(r, 65536);
    allowed |= BIT(GEMINI_ERR_OOM_DEVICE) | below_mask(t, 1); /* also when no plan is possible with it */
    uint64_t least = t->chunk ? t->chunk : p->config.chunk_bytes ? p->config.chunk_bytes : 65536;
    if (bytes - p->config.device_margin_bytes < least) allowed = BIT(GEMINI_ERR_INVALID);
    if (p->exact && t->chunk && !(allowed & BIT(GEMINI_ERR_INVALID))) {
      holds_t h;
      holds_get(t, &h);
      if (frames_held(t, &h) > (bytes - p->config.device_margin_bytes) / t->chunk)
        allowed = BIT(GEMINI_ERR_OOM_DEVICE) | below_mask(t, 1);
      else if (!t->iterations && !t->trace_saved) allowed = OK | below_mask(t, 1);
    }
  } else if (tier == GEMINI_TIER_HOST) {
    bytes = p->exact && chance(r, 2) ? below(r, 60) << 16 : BIG_BYTES + below(r, BIG_BYTES);
    if (!p->exact && p->host_tight) bytes = below(r, 60) << 16;
    if (!bytes) allowed = BIT(GEMINI_ERR_INVALID);
    else if (bytes < BIG_BYTES) allowed |= BIT(GEMINI_ERR_OOM_HOST) | BIT(GEMINI_ERR_OOM_FILE);
  } else {
    bytes = p->exact && chance(r, 2) ? below(r, 60) << 16 : BIG_BYTES + below(r, BIG_BYTES);
    if (!p->exact && p->file_tight) bytes = below(r, 60) << 16;
    if (bytes < BIG_BYTES) allowed |= BIT(GEMINI_ERR_OOM_FILE);
    if (!p->config.file_bytes && bytes) allowed = BIT(GEMINI_ERR_STATE);
  }
  /* Raised before the call, so that a thread that looks meanwhile sees a peak that is allowed. */
  if (bytes > atomic_load(&p->highest[tier])) atomic_store(&p->highest[tier], bytes);
  note(t, " tier %u: %" PRIu64 ", was %" PRIu64, tier, bytes, old[tier]);
  gemini_status_t status = gemini_budget_set(p->mgr, tier, bytes);
  note(t, " -> %d", status);
  EXPECT(t, status, allowed, "gemini_budget_set");
  if (!status) atomic_store(&p->budget[tier], bytes);
}
static void iteration_end(thread_t *t) {
  gemini_status_t status = gemini_iteration_end(t->p->mgr);
  note(t, " end -> %d", status);
  EXPECT(t, status, OK | BIT(GEMINI_ERR_OOM_DEVICE) | below_mask(t, 1), "gemini_iteration_end");
  t->iteration = false;
  t->phase = GEMINI_PHASE_NONE;
  t->iterations++;
}
/* One op of the script: the same choices in every iteration, but for a departure now and then. */
static void script_op(thread_t *t) {
  program_t *p = t->p;
  uint64_t choices = mix(t->script_seed + (uint64_t)t->script_at), *r = &choices;
  if (chance(&t->rng, 40)) r = &t->rng;
  uint32_t phase = t->script_at * 2 < t->script_ops ? GEMINI_PHASE_FORWARD : GEMINI_PHASE_BACKWARD;
  if (phase != t->phase) {
    MUST(t, gemini_phase_set(p->mgr, phase));
    t->phase = phase;
  }
  gemini_stream_t stream = t->streams[0];
  if (chance(r, 8)) stream = pick_stream(t, r);
  char name[32];
  snprintf(name, sizeof name, "op%d", t->script_at);
  note(t, " %s", name);
  /* With its accesses, which end with it; or without. */
  const int first = t->open_count;
  if (chance(r, 3)) acquire_batch(t, r, 4, stream, true, name);
  const int with = t->open_count - first;
  if (!with) MUST(t, gemini_op_begin(p->mgr, name, stream));
  if (stream && chance(&t->rng, 30))
    EXPECT(t, gemini_stream_destroy(p->mgr, stream), BIT(GEMINI_ERR_BUSY), "gemini_stream_destroy");
  int allocs = t->alloc_count;
  if (chance(r, 3)) alloc_one(t, r, stream);
  if (!with) acquire_batch(t, r, 4, stream, true, NULL);
  bool inside = !with && chance(r, 2);
  while (inside && t->open_count > first) release_batch(t, r, OPENS);
  if (t->alloc_count > allocs && chance(r, 2)) free_one(t, t->alloc_count - 1);
  for (int i = first; i < first + with; i++)
    if (t->opens[i].later) use_open(t, &t->opens[i], t->opens[i].access.mode);
  MUST(t, gemini_op_end(p->mgr));
  for (int i = first; i < first + with; i++) was_released(t, &t->opens[i]);
  t->open_count -= with;
  if (!inside) release_all(t);
  t->script_at++;
}
static void step_iteration(thread_t *t) {
  program_t *p = t->p;
  uint64_t *r = &t->rng;
  if (!t->iteration) {
    if (chance(r, 8)) {
      EXPECT(t, gemini_iteration_end(p->mgr), BIT(GEMINI_ERR_STATE), "gemini_iteration_end");
      EXPECT(t, gemini_op_begin(p->mgr, "x", GEMINI_STREAM_CALLER), BIT(GEMINI_ERR_STATE), "gemini_op_begin");
    }
    gemini_status_t status = gemini_iteration_begin(p->mgr);
    note(t, " begin -> %d", status);
    EXPECT(t, status, OK, "gemini_iteration_begin");
    t->iteration = true;
    t->script_at = 0;
    if (!t->script_ops || chance(r, 12)) {
      t->script_ops = 2 + (int)below(r, 10);
      t->script_seed = check_random(r);
    }
    return;
  }
  if (t->script_at < t->script_ops && !chance(r, 60)) {
    script_op(t);
    return;
  }
  if (chance(r, 8)) EXPECT(t, gemini_iteration_begin(p->mgr), BIT(GEMINI_ERR_STATE), "gemini_iteration_begin");
  if (chance(r, 4) || t->script_at < t->script_ops) {
    iteration_end(t);
    return;
  }
  uint64_t choices = mix(t->script_seed ^ 77);
  int root = pick_root(t, &choices);
  MUST(t, gemini_phase_set(p->mgr, GEMINI_PHASE_UPDATE));
  t->phase = GEMINI_PHASE_UPDATE;
  release_all(t);
  if (root >= 0) update_set(t, &choices, root, true);
  iteration_end(t);
}
static void step_insight(thread_t *t) {
  program_t *p = t->p;
  uint64_t *r = &t->rng, length = 0, again = 0;
  char *text;
  gemini_status_t status;
  switch (below(r, 5)) {
  case 0:
    MUST(t, gemini_plan_explain(p->mgr, 0, NULL, &length));
    text = malloc(length + 1);
    NEED(t, text);
    MUST(t, gemini_plan_explain(p->mgr, length + 1, text, &again));
    NEED(t, strlen(text) <= length && (!p->exact || (again == length && strlen(text) == length)));
    free(text);
    return;
  case 1:
    status = gemini_trace_save(p->mgr, p->path);
    EXPECT(t, status,
           p->exact && t->iterations == 0 && !t->trace_saved ? BIT(GEMINI_ERR_STATE) : OK | BIT(GEMINI_ERR_STATE),
           "gemini_trace_save");
    if (!status) t->trace_saved = true;
    if (!status) t->arenas_changed = false;
    return;
  case 2:
    if (!t->trace_saved) return;
    status = gemini_trace_load(p->mgr, p->path);
    note(t, " load -> %d", status);
    if (t->iteration) {
      EXPECT(t, status, BIT(GEMINI_ERR_STATE), "gemini_trace_load");
    } else {
      uint32_t allowed = OK | BIT(GEMINI_ERR_OOM_DEVICE);
      if (t->arenas_changed || !p->exact) allowed |= BIT(GEMINI_ERR_FORMAT);
      EXPECT(t, status, allowed | BIT(GEMINI_ERR_FORMAT), "gemini_trace_load");
    }
    return;
  case 3:
    atomic_store(&p->highest[0], BIG_BYTES * 4); /* others may look in between */
    atomic_store(&p->highest[1], BIG_BYTES * 4);
    atomic_store(&p->highest[2], BIG_BYTES * 4);
    MUST(t, gemini_stats_reset(p->mgr));
    for (int i = 0; i < GEMINI_TIER_COUNT; i++)
      atomic_store(&p->highest[i], p->exact ? atomic_load(&p->budget[i]) : BIG_BYTES * 4);
    return;
  default: {
    char path[128];
    snprintf(path, sizeof path, "%s/timeline", p->dir);
    status = t->timeline ? gemini_timeline_stop(p->mgr) : gemini_timeline_start(p->mgr, path);
    EXPECT(t, status, OK, "gemini_timeline_start or _stop");
    if (t->timeline) unlink(path);
    t->timeline = !t->timeline;
  }
  }
}

/* ---- programs */
typedef struct {
  const char *name;
  void (*run)(thread_t *t);
  uint32_t weight;
  bool first_only; /* by thread 0 */
  bool keeps;      /* reads and writes no bytes of arenas: what was discarded may stay so */
} step_t;
static const step_t steps[] = {
  { "acquire", step_acquire, 26, false, false },
  { "release", step_release, 16, false, false },
  { "use", step_use, 6, false, false },
  { "alloc", step_alloc, 6, false, true },
  { "free", step_free, 5, false, true },
  { "use_alloc", step_use_alloc, 3, false, true },
  { "zero", step_zero, 5, false, false },
  { "load", step_load, 4, false, false },
  { "store", step_store, 5, false, false },
  { "norm", step_norm, 4, false, false },
  { "move", step_move, 6, false, true },
  { "hint", step_hint, 4, false, true },
  { "pin", step_pin, 2, false, true },
  { "unpin", step_unpin, 3, false, true },
  { "discard", step_discard, 6, false, true },
  { "update", step_update, 6, false, false },
  { "update_wait", step_update_wait, 1, false, true },
  { "register", step_register, 6, false, false },
  { "unregister", step_unregister, 1, false, false },
  { "take", step_take, 1, false, false },
  { "arena", step_arena, 2, false, false },
  { "state", step_state, 3, false, false },
  { "info", step_info, 2, false, true },
  { "stream", step_stream, 2, false, true },
  { "budget", step_budget, 3, true, false },
  { "iteration", step_iteration, 14, true, false },
  { "insight", step_insight, 3, true, false },
};
enum { STEP_KINDS = sizeof steps / sizeof *steps };

static void check_all(thread_t *t) {
  for (int i = 0; i < ARENAS; i++) {
    const arena_t *a = &t->arenas[i];
    if (!a->alive || a->shared || !a->size || a->reuse >= 0) continue;
    uint64_t part = chance(&t->rng, 2) ? 65536 : 200000;
    for (uint64_t at = 0; at < a->size; at += part / 16 * 16) {
      uint64_t size = a->size - at < part / 16 * 16 ? a->size - at : part / 16 * 16;
      open_t o = { .access = ACCESS(a->handle, at, size, 0, 0), .arena = i, .tensor = -1 };
      o.slot = a->slot;
      o.offset = at;
      o.size = size;
      check_by_store(t, &o);
    }
  }
}

/* A script makes the steps of its iterations more frequent, so that plans are followed. */
static void *thread_run(void *user) {
  thread_t *t = user;
  program_t *p = t->p;
  uint64_t count = 40 + mix(p->seed) % 200 / (uint64_t)p->threads;
  bool training = mix(p->seed ^ 5) % 16 < 9;
  uint32_t total = 0;
  for (int i = 0; i < STEP_KINDS; i++) total += t->id == 0 || !steps[i].first_only ? steps[i].weight : 0;
  check_stats(t); /* the model needs the size of a chunk, which shared arenas may have brought already */
  for (uint64_t n = 0; n < count; n++) {
    t->step++;
    int kind = 0;
    for (uint32_t at = (uint32_t)below(&t->rng, total);; kind++) {
      if (steps[kind].first_only && t->id) continue;
      if (at < steps[kind].weight) break;
      at -= steps[kind].weight;
    }
    const step_t *step = &steps[kind];
    if (training && t->id == 0 && below(&t->rng, 4)) {
      for (kind = 0; steps[kind].run != step_iteration; kind++) {
      }
      step = &steps[kind];
    }
    snprintf(t->log[t->step % LOG_LINES], sizeof t->log[0], "%d.%" PRIu64 " %s", t->id, t->step, step->name);
    if (!step->keeps) settle(t);
    step->run(t);
    if (print_steps) fprintf(stderr, "%s\n", t->log[t->step % LOG_LINES]);
    check_stats(t);
  }
  t->step++;
  snprintf(t->log[t->step % LOG_LINES], sizeof t->log[0], "%d.%" PRIu64 " end", t->id, t->step);
  settle(t);
  if (t->iteration) iteration_end(t);
  release_all(t);
  while (t->pin_count) unpin(t, 0);
  while (t->alloc_count) free_one(t, 0);
  MUST(t, gemini_update_wait(p->mgr));
  check_all(t);
  for (int i = 0; i < TENSORS; i++)
    if (t->tensors[i].alive) check_tensor(t, i);
  check_stats(t);
  return NULL;
}

static uint64_t link_rate(uint64_t *r) {
  static const uint64_t rates[] = { 0, 0, 0, 4000000000, 1000000000, 300000000 };
  return rates[below(r, 6)];
}

static void program_open(program_t *p, uint64_t *r) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.flags = chance(r, 4) ? GEMINI_CONFIG_STRICT : 0;
  c.placement = (uint32_t)below(r, 4);
  c.warmup_iterations = (uint32_t)below(r, 3);
  c.update_threads = (uint32_t)below(r, 4);
  uint64_t frame_count = (uint64_t)p->threads * 2 + 1 + below(r, 40);
  if (chance(r, 3)) c.chunk_bytes = chance(r, 2) ? 131072 : 262144;
  else if (!chance(r, 3)) c.chunk_bytes = 65536;
  c.device_margin_bytes = chance(r, 3) ? below(r, 200000) : 0;
  c.device_bytes = c.device_margin_bytes + frame_count * (c.chunk_bytes ? c.chunk_bytes : 65536) + below(r, 60000);
  p->host_tight = chance(r, 3);
  p->file_tight = chance(r, 3);
  c.host_bytes = p->host_tight ? ((uint64_t)(4 + below(r, 40)) << 16) : BIG_BYTES;
  if (chance(r, 2)) c.file_bytes = p->file_tight ? ((uint64_t)(4 + below(r, 40)) << 16) : BIG_BYTES;
  c.static_param_fraction = (double)below(r, 5) / 4;
  c.static_optim_fraction = (double)below(r, 5) / 4;
  c.sim_h2d_bytes_per_s = link_rate(r);
  c.sim_d2h_bytes_per_s = link_rate(r);
  c.file_dir = p->dir;
  p->config = c;
  p->padding.slot_shift = chance(r, 4);
  p->padding.block_bytes = chance(r, 2) ? 4096 * (1 + (uint32_t)below(r, 16)) : 0;
  gmi_sizes_padding = p->padding;
  atomic_store(&p->budget[0], c.device_bytes);
  atomic_store(&p->budget[1], c.host_bytes);
  atomic_store(&p->budget[2], c.file_bytes);
  for (int i = 0; i < GEMINI_TIER_COUNT; i++) atomic_store(&p->highest[i], atomic_load(&p->budget[i]));
  MUST(&p->thread[0], gemini_manager_open(&c, &p->mgr));
}

/* Two arenas that threads share: one whose tensors belong to one thread each, though not its chunks, and one that
 * everybody reads. */
static void share(program_t *p) {
  thread_t *first = &p->thread[0];
  int mixed = make_arena(first, GEMINI_KIND_OTHER, 4, SLOT_BYTES, -1, -1);
  int constant = make_arena(first, GEMINI_KIND_OTHER, 2, SLOT_BYTES, -1, -1);
  NEED(first, mixed >= 0 && constant >= 0);
  for (int i = 0; i < 5; i++) register_one(first, &first->rng, constant, true);
  arena_t *c = &first->arenas[constant];
  if (c->size) {
    uint8_t *content = model(p, c->slot, 0);
    fill(content, c->size, check_random(&first->rng), c->dtype);
    NEED(first, pwrite(first->fd, content, c->size, 0) == (ssize_t)c->size);
    gemini_access_t all = ACCESS(c->handle, 0, 0, 0, 0);
    gemini_status_t status = gemini_load(p->mgr, &all, first->fd, 0);
    if (status) { /* no room: it stays zero, as far as it was not read */
      EXPECT(first, status, below_mask(first, 1), "gemini_load");
      MUST(first, gemini_zero(p->mgr, &all));
      memset(content, 0, c->size);
    }
  }
  first->arenas[mixed].shared = c->shared = c->read_only = true;
  for (int i = 1; i < p->threads; i++) {
    thread_t *t = &p->thread[i];
    t->arenas[mixed] = first->arenas[mixed];
    t->arenas[constant] = first->arenas[constant];
    for (int k = 0; k < TENSORS; k++) /* states and users of these are everybody's: named by ranges of the arena */
      if (first->tensors[k].alive && first->tensors[k].arena == constant) t->tensors[k] = first->tensors[k];
  }
}

static void program_run(uint64_t seed) {
  program_t *p = calloc(1, sizeof *p);
  CHECK(p);
  p->seed = seed;
  p->threads = 1 + (int)(seed % THREADS);
  p->exact = p->threads == 1;
  running_seed = seed;
  running_threads = p->threads;
  if (SANITIZED) seed_print(seed);
  alarm(PROGRAM_SECONDS);
  pthread_mutex_init(&p->lock, NULL);
  p->bytes = calloc(SLOTS, SLOT_BYTES);
  CHECK(p->bytes);
  dir_make(p->dir);
  snprintf(p->path, sizeof p->path, "%s/trace", p->dir);
  uint64_t rng = mix(seed);
  for (int i = 0; i < p->threads; i++) {
    thread_t *t = &p->thread[i];
    t->p = p;
    t->id = i;
    t->rng = mix(seed * 8 + (uint64_t)i);
    char path[96];
    snprintf(path, sizeof path, "%s/%d", p->dir, i);
    t->fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    CHECK(t->fd >= 0);
    unlink(path);
  }
  program_open(p, &rng);
  if (p->threads > 1) share(p);
  for (int i = 0; i < p->threads; i++) {
    thread_t *t = &p->thread[i];
    for (int k = 0; k < STREAMS; k++) MUST(t, gemini_stream_create(p->mgr, &t->streams[k]));
    make_plain(t);
    make_set(t);
    for (int k = 0; k < 8; k++) step_register(t);
    if (print_steps) fprintf(stderr, "%d.0%s\n", i, t->log[0]);
  }
  pthread_t threads[THREADS];
  for (int i = 1; i < p->threads; i++) CHECK(pthread_create(&threads[i], NULL, thread_run, &p->thread[i]) == 0);
  thread_run(&p->thread[0]);
  for (int i = 1; i < p->threads; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  /* Nothing may be left behind when all arenas are gone. */
  atomic_store(&p->budget[GEMINI_TIER_HOST], BIG_BYTES);
  MUST(&p->thread[0], gemini_budget_set(p->mgr, GEMINI_TIER_HOST, BIG_BYTES));
  for (int i = 0; i < p->threads; i++) {
    thread_t *t = &p->thread[i];
    total_steps += t->step;
    for (int k = 0; i == 0 && k < ARENAS; k++)
      if (t->arenas[k].shared) t->arenas[k].shared = false;
    for (int pass = 0; pass < 2; pass++)
      for (int k = 0; k < ARENAS; k++)
        if (t->arenas[k].alive && !t->arenas[k].shared && (pass || t->arenas[k].like >= 0)) destroy_arena(t, k);
  }
  thread_t *t = &p->thread[0];
  figures_t s = { 0 };
  MUST(t, figures_read(p->mgr, &s));
  if (s.used_bytes[1] || s.used_bytes[2] || s.model_bytes || s.nonmodel_bytes || s.pending_updates)
    FAIL(t,
         "left behind: %" PRIu64 " bytes on the host, %" PRIu64 " in files, %" PRIu64 " of arenas, %" PRIu64
         " allocated, %" PRIu64 " updates",
         s.used_bytes[1], s.used_bytes[2], s.model_bytes, s.nonmodel_bytes, s.pending_updates);
  MUST(t, gemini_manager_close(p->mgr));
  for (int i = 0; i < p->threads; i++) {
    t = &p->thread[i];
    for (int k = 0; k < t->update_count; k++) free(t->updates[k]);
    close(t->fd);
  }
  unlink(p->path);
  char path[96];
  snprintf(path, sizeof path, "%s/timeline", p->dir);
  unlink(path);
  CHECK(rmdir(p->dir) == 0);
  pthread_mutex_destroy(&p->lock);
  free(p->bytes);
  free(p);
}

static void test_random_programs_agree_with_one_array(void) {
  uint64_t wanted = seed_setting("GEMINI_STRESS_STEPS", 2000), seed = seed_begin(__func__);
  const char *log = getenv("GEMINI_STRESS_LOG");
  print_steps = log && *log;
  signal(SIGALRM, hangs);
  if (!SANITIZED) {
    signal(SIGSEGV, faults);
    signal(SIGBUS, faults);
  }
  uint64_t first = seed;
  while (total_steps < wanted || seed - first < THREADS) program_run(seed++);
  alarm(0);
  fprintf(stderr, "  %" PRIu64 " programs, %" PRIu64 " steps\n", seed - first, total_steps);
}

int main(void) {
  RUN(test_random_programs_agree_with_one_array);
  return check_done();
}
