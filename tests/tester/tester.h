/* What runs a program: managers and their models, threads, calls with the statuses they may have. A difference between
 * library and model ends the process. SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTER_H
#define TESTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "faults.h"
#include "gemini.h"
#include "model.h"
#include "program.h"

typedef struct options {
  uint64_t seed;
  uint64_t steps;   /* operations of a program */
  uint32_t threads; /* 1 to THREADS */
  uint32_t faults;  /* per cent of operations with a fault */
  bool cuda;        /* the CUDA device over the fake driver */
  bool files;       /* managers may have a file tier */
  bool without[OP_COUNT], spared[OP_COUNT],
      more[OP_COUNT];    /* operations left out; without faults; ten times as often */
  uint32_t features_off; /* bits of the next */
  uint32_t hang_s, tries;
  uint32_t all_every; /* operations of a thread after which everything that it owns is checked */
  bool keep_going;    /* do not stop at the first seed that fails */
  bool verbose;       /* tell each call of the library as it ends */
  /* The ways in which the library calls the system: noted, or the first call that comes one way fails. */
  enum { SITES_OFF, SITES_NOTE, SITES_FAIL } sites;
  fault_kind_t site_kind;
  uint64_t site_path;
} options_t;

/* What operations do now and then, and can be told not to. */
#define FEATURES(X)                                               \
  X(empty, "ranges of size 0 at an offset")                       \
  X(same_names, "arenas with a name that is taken, or with none") \
  X(reuse_read, "updates that read a parameter and its gradient in it")
enum {
#define X(name, words) FEATURE_##name,
  FEATURES(X)
#undef X
      FEATURE_COUNT
};

/* ---- shared with the process that watches */
enum { LAST_CALLS = 8, PATHS = 128 };
typedef struct last_call {
  char name[32];
  _Atomic uint64_t begin_ns, end_ns; /* 0: it has not ended */
} last_call_t;
enum { SITES_MOST = 8192 };
typedef struct shared {
  bool site_failed;    /* SITES_FAIL: it has */
  uint32_t site_count; /* SITES_NOTE: so many ways */
  fault_site_t site[SITES_MOST];
  options_t options; /* what the process that runs a program is told */
  char directory[PATHS];
  bool replays, quiet;
  uint64_t replay_count;
  _Atomic uint64_t steps; /* operations done by all threads */
  _Atomic int failed;     /* somebody is writing the message, or has */
  char message[4096];
  _Atomic uint64_t statuses[OP_COUNT][16]; /* calls of an operation by status */
  _Atomic uint64_t faults_hit[FAULT_KINDS], bytes_checked, unread;
  _Atomic uint64_t recuts[2]; /* changes of the size of chunks: alone, while other threads ran */
  struct {
    _Atomic uint64_t count; /* operations begun */
    _Atomic uint32_t calls; /* calls begun */
    last_call_t last[LAST_CALLS];
  } threads[THREADS];
  uint64_t log_capacity;
  op_t ops[]; /* log_capacity of each thread, that is run; then log_capacity to run */
} shared_t;
static inline op_t *shared_log(shared_t *s, uint32_t thread) { return s->ops + thread * s->log_capacity; }
static inline op_t *shared_program(shared_t *s) { return s->ops + s->options.threads * s->log_capacity; }

/* ---- what is found by a resume */
typedef struct kept_arena {
  char name[64];
  uint32_t kind, element_bytes;
  uint64_t size;
  bool reuses, unknown;
  uint8_t *bytes;
} kept_arena_t;
typedef struct kept_tensor {
  char name[32];
  int arena; /* in kept_t */
  bool registered, gradient;
  uint64_t offset, size;
  uint32_t states;
} kept_tensor_t;
typedef struct kept {
  kept_arena_t *arenas;
  kept_tensor_t *tensors;
  uint32_t arena_count, tensor_count;
  uint64_t chunk_bytes;
} kept_t;

/* ---- updates: what is done with elements, for the library's callback and for the model */
enum { UPDATE_ARENAS = 8 };
typedef struct update {
  struct update *next;
  struct actor *actor;
  uint32_t count, modes[UPDATE_ARENAS], element_bytes[UPDATE_ARENAS];
  uint64_t salt, first, elements;
  part_t *part;
  int arenas[UPDATE_ARENAS]; /* slots there */
  bool accepted;             /* gemini_update() returned OK, or PENDING */
  _Atomic uint64_t seen;     /* elements in spans so far */
  gemini_manager_t mgr;
} update_t;
/* Elements first to first + count of each arena, at ptr. */
void update_apply(const update_t *u, uint64_t first, uint64_t count, void *const *ptr);

typedef struct world world_t;
enum { QUEUE = 256, GONE = 64 };
typedef struct actor {
  world_t *w;
  uint32_t index;
  uint64_t random;
  /* Operations to come, of a sequence that makes sense. */
  op_t queue[QUEUE];
  uint32_t queue_first, queue_end;
  const op_t *op; /* that is being run */
  bool fault_used, own_call, armed;
  gemini_status_t own_status; /* of its own call */
  bool site_failed;           /* a call of the system failed in it, by SITES_FAIL */
  uint64_t fired;             /* calls that failed during its call, by fault */
  bool refused;               /* a call of it failed for want of something, or by an error of the system */
  void *gone[GONE];           /* handles that were destroyed, of every kind */
  uint32_t gone_count;
  int fd; /* memory file for load and store */
  uint8_t *file;
  uint64_t names; /* given so far */
  update_t *updates;
  pthread_t thread;
  bool active;
} actor_t;

struct world {
  options_t options;
  shared_t *shared;
  char directory[PATHS];
  uint64_t unit; /* smallest chunk */
  bool uring;    /* io_uring can be had */
  bool parallel; /* all threads run at once */
  uint32_t
      calm; /* rounds to come in which threads do little else than acquire and release, and load this trace, and the next one: */
  uint32_t calm_file;
  manager_t managers[MANAGERS];
  kept_t kept[MANAGERS][2]; /* the last checkpoint; the second: it may be this one instead */
  uint32_t kept_count[MANAGERS];
  kept_t traces[TRACES];              /* the arenas of saved traces; arenas NULL: there is none */
  _Atomic uint64_t told[FAULT_KINDS]; /* faults that a call has told of, or that no call will */
  _Atomic uint64_t driver_faults;
  uint64_t driver_first, driver_last; /* calls of the driver that fail; 0: none */
  actor_t actors[THREADS];
  pthread_mutex_t budgets; /* guards the model's budgets while threads run */
  /* rounds */
  pthread_mutex_t lock;
  pthread_cond_t begin, done;
  uint64_t generation;
  uint32_t running;
  bool stop;
  uint16_t round;
  const op_t *replay;
  uint64_t replay_count;
};

/* ---- differences */
/* Ends the process. */
__attribute__((format(printf, 2, 3), noreturn)) void differs(actor_t *a, const char *format, ...);
/* As above, from a thread of the library's. */
void differs_in_callback(const world_t *w, const char *message);

/* Faults that a later call may tell of. */
uint64_t faults_untold(const world_t *w, fault_kind_t kind);
void faults_all_told(world_t *w);
/* What updates say again and again once the device has failed: DEVICE, or nothing. */
static inline statuses_t device_failed(const actor_t *a) { return atomic_load(&a->w->driver_faults) ? DEVICE : 0; }
/* Calls of the driver do not fail, as they are the tester's own, until it says false. */
void driver_pause(const world_t *w, bool pause);

/* ---- calls: CALL(actor, allowed, function, arguments): the operation's own call, which its fault goes to; QUIET: one
 * without a fault. Both return the status, which is one of those allowed. */
void call_begin(actor_t *a, const char *function, bool with_fault);
gemini_status_t call_end(actor_t *a, const char *function, statuses_t allowed, gemini_status_t status);
#define CALL(a, allowed, function, ...) \
  call_end(a, #function, allowed, (call_begin(a, #function, true), function(__VA_ARGS__)))
#define QUIET(a, allowed, function, ...) \
  call_end(a, #function, allowed, (call_begin(a, #function, false), function(__VA_ARGS__)))

static inline manager_t *manager_of(actor_t *a, const op_t *op) { return &a->w->managers[op->manager % MANAGERS]; }
static inline part_t *part_of(actor_t *a, manager_t *m) { return &m->parts[a->index]; }
uint64_t chunk_bytes(actor_t *a, manager_t *m); /* 0: not chosen yet */
void gone(actor_t *a, void *handle);            /* must be refused from now on */

/* ---- room: can a call fail because a tier is full? */
/* What may be said of a lack of room by a call that needs so many chunks on the device at once. */
statuses_t no_room(actor_t *a, manager_t *m, uint64_t device_chunks);
/* Chunks that are held on the device or pinned there. */
uint64_t held_chunks(actor_t *a, const manager_t *m, uint64_t chunk);

/* ---- streams and the work on them */
/* A stream's handle by slot; -1, and one that is none: the caller. */
gemini_stream_t stream_handle(actor_t *a, manager_t *m, int slot);
/* Compares bytes with expected ones and writes a pattern, as work on a stream. at: the place for the pattern. */
void use_bytes(actor_t *a, manager_t *m, int stream, void *ptr, uint64_t at, uint64_t size, const uint8_t *expected,
               bool write, uint64_t seed, const char *what);
/* Waits for streams on which writes of acquired ranges may be pending that overlap these bytes. */
void sync_holds(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, bool writers_only);

/* ---- checks */
/* Reads bytes of a store, with as little disturbance as can be. false: there is no room to. */
bool read_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, uint8_t *to);
/* Likewise; what lacks room gets it for as long. false: other threads take it, and the bytes are unknown from now on. */
bool read_surely(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, uint8_t *to);
/* After a call that may have changed a part of the bytes: each is what it was, or what it was to be. */
void look_at_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, const uint8_t *wanted,
                   const char *what);
/* Compares bytes with the model's. false: they could not be read now. */
bool check_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size);
void check_tensor(actor_t *a, manager_t *m, int slot);
void check_arena(actor_t *a, manager_t *m, int slot);
void check_stats(actor_t *a, manager_t *m);
/* Everything that a thread owns. */
void check_part(actor_t *a, manager_t *m);
/* A little, after each operation. */
void check_some(actor_t *a, manager_t *m, uint64_t step);

/* ---- operations: run does it, make invents one. make returns false when there is nothing to do it with. */
typedef struct operation {
  void (*run)(actor_t *a, const op_t *op);
  bool (*make)(actor_t *a, op_t *op);
} operation_t;
extern const operation_t operations[OP_COUNT];
#define X(name, weight, who)                   \
  void run_##name(actor_t *a, const op_t *op); \
  bool make_##name(actor_t *a, op_t *op);
OPERATIONS(X)
#undef X

/* Making: arguments one after another. */
static inline void op_add(op_t *op, uint64_t value) {
  if (op->count < OP_ARGS) op->arg[op->count++] = (uint32_t)value;
}
/* A live slot at random, or -1. */
#define PICK(a, array, count) pick(a, &(array)[0].live, sizeof *(array), count)
int pick(actor_t *a, const bool *live, size_t stride, uint32_t count);
/* A slot that is free, or -1. */
#define PICK_FREE(array, count) pick_free(&(array)[0].live, sizeof *(array), count)
int pick_free(const bool *live, size_t stride, uint32_t count);
uint32_t rnd(actor_t *a, uint32_t below);
static inline bool feature(const actor_t *a, int feature) { return !(a->w->options.features_off >> feature & 1); }
bool chance(actor_t *a, uint32_t percent);
/* An operation that comes next. NULL: no room. */
op_t *plan(actor_t *a, op_code_t code, uint8_t manager);
/* An operation of a kind, made at random. */
bool plan_made(actor_t *a, op_code_t code, uint8_t manager);

/* An access in three arguments. */
enum { ACCESS_ARGS = 3 };
typedef struct spec {
  bool is_arena;
  int slot, hold;
  uint32_t mode, tier;
  uint64_t offset, size;
} spec_t;
void spec_add(op_t *op, spec_t s);
spec_t spec_at(const op_t *op, uint32_t index);
/* A range of a live object; mostly one that there is. */
bool spec_make(actor_t *a, manager_t *m, spec_t *out);

/* ---- shared between files */
void arena_forget(actor_t *a, manager_t *m, part_t *p, int slot); /* in the model, with its tensors */
void manager_forget(actor_t *a, manager_t *m);                    /* likewise, with all that it has */
void manager_reset_file(world_t *w, uint32_t manager);            /* no checkpoint any more */
void updates_done(actor_t *a, const manager_t *m);
void updates_free(actor_t *a, gemini_manager_t mgr);
/* The device has failed: none of those that wait may ever be done. */
void updates_lost(world_t *w);
void kept_free(kept_t *k);
kept_t layout_of(actor_t *a, manager_t *m);                  /* arenas without their bytes */
bool layout_fits(actor_t *a, manager_t *m, const kept_t *k); /* the manager has all of these arenas */

/* ---- running */
void world_open(world_t *w, const options_t *options, shared_t *shared, const char *directory);
void world_run(world_t *w); /* a program made at random */
void world_replay(world_t *w, const op_t *ops, uint64_t count);
void world_close(world_t *w);
void run_op(actor_t *a, const op_t *op);
uint64_t now_ns(void);
#endif
