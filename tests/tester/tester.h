/* What runs a program: managers and their models, threads, and calls with the statuses that each may return. A
 * difference between library and model ends the process. SPDX-License-Identifier: Apache-2.0 */
#ifndef TESTER_H
#define TESTER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "faults.h"
#include "gemini.h"
#include "gemini/chosen.h"
#include "gemini/plan.h"
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
      more[OP_COUNT];    /* operations left out; run without faults; chosen ten times as often */
  uint32_t features_off; /* bit i: the i-th of FEATURES is off */
  uint32_t hang_s, tries;
  uint32_t all_every; /* a thread checks everything that it owns after this many of its operations */
  bool keep_going;    /* do not stop at the first seed that fails */
  bool verbose;       /* print each call of the library when it ends */
  /* The ways in which the library makes system calls: ignored, recorded, or the first call that comes one way fails. */
  enum { SITES_OFF, SITES_NOTE, SITES_FAIL } sites;
  fault_kind_t site_kind;
  uint64_t site_path;
} options_t;

/* What operations sometimes do; each can be turned off. */
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
  bool site_failed;    /* SITES_FAIL: the call has failed */
  uint32_t site_count; /* SITES_NOTE: ways recorded */
  fault_site_t site[SITES_MOST];
  options_t options; /* for the process that runs a program */
  char directory[PATHS];
  bool replays, quiet;
  uint64_t replay_count;
  _Atomic uint64_t steps; /* operations done by all threads */
  _Atomic int failed;     /* a thread is writing the message, or has written it */
  char message[4096];
  _Atomic uint64_t statuses[OP_COUNT][16]; /* by operation and status: calls */
  _Atomic uint64_t faults_hit[FAULT_KINDS], bytes_checked, unread;
  _Atomic uint64_t recuts[2]; /* changes of the chunk size: while one thread ran; while several ran */
  struct {
    _Atomic uint64_t count; /* operations begun */
    _Atomic uint32_t calls; /* calls begun */
    last_call_t last[LAST_CALLS];
  } threads[THREADS];
  uint64_t log_capacity;
  op_t ops[]; /* for each thread, log_capacity operations that it ran; then log_capacity operations to run */
} shared_t;
static inline op_t *shared_log(shared_t *s, uint32_t thread) { return s->ops + thread * s->log_capacity; }
static inline op_t *shared_program(shared_t *s) { return s->ops + s->options.threads * s->log_capacity; }

/* ---- what a resume finds */
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

/* ---- updates: the function of elements that the library's callback and the model both apply */
enum { UPDATE_ARENAS = 8 };
typedef struct update {
  struct update *next;
  struct actor *actor;
  uint32_t count, modes[UPDATE_ARENAS], element_bytes[UPDATE_ARENAS];
  uint64_t salt, first, elements;
  part_t *part;
  int arenas[UPDATE_ARENAS]; /* their entries in the part */
  bool accepted;             /* gemini_update() returned OK, or PENDING */
  bool commits;              /* takes over what was speculated, of which its function sees nothing */
  bool pending;              /* accepted, and perhaps not done when the call returned */
  _Atomic uint64_t seen;     /* elements in spans so far */
  gemini_manager_t mgr;
} update_t;
/* Updates elements first to first + count of each arena; ptr: the address of element first in each. */
void update_apply(const update_t *u, uint64_t first, uint64_t count, void *const *ptr);

typedef struct world world_t;
enum { QUEUE = 256, GONE = 64, BORROWED = 2, BORROWED_BYTES = 4 << 20 };
typedef struct actor {
  world_t *w;
  uint32_t index;
  uint64_t random;
  /* Operations to come, of a sequence that belongs together. */
  op_t queue[QUEUE];
  uint32_t queue_first, queue_end;
  const op_t *op; /* the operation that is running */
  bool fault_used, own_call, armed;
  gemini_status_t own_status; /* status of the operation's own call */
  bool site_failed;           /* SITES_FAIL: a system call failed in the operation */
  uint64_t fired;             /* calls that a fault made fail during the operation's own call */
  bool refused;               /* a call of the operation failed for lack of a resource, or by a system error */
  void *gone[GONE];           /* handles that were destroyed, of every kind */
  uint32_t gone_count;
  int fd; /* memory file for load and store */
  uint8_t *file;
  int borrowed[BORROWED]; /* memory files that do not change; 0: not made yet */
  uint64_t names;         /* names given so far */
  update_t *updates;
  pthread_t thread;
  bool active;
} actor_t;

struct world {
  options_t options;
  shared_t *shared;
  char directory[PATHS];
  uint64_t unit; /* smallest chunk */
  bool uring;    /* io_uring works on this machine */
  bool parallel; /* all threads run at once */
  /* Rounds to come in which threads do little but acquire, release, and load the trace calm_file and the next one. */
  uint32_t calm, calm_file;
  manager_t managers[MANAGERS];
  kept_t kept[MANAGERS][2]; /* [0]: the last checkpoint; [1]: the files may hold this one instead */
  uint32_t kept_count[MANAGERS];
  kept_t traces[TRACES];              /* the arenas of saved traces; arenas NULL: no trace */
  _Atomic uint64_t told[FAULT_KINDS]; /* faults that a call has reported, or that no call will report */
  _Atomic uint64_t driver_faults;
  _Atomic bool
      update_failed; /* an update failed for good: a read of it failed after a worker had been given its piece */
  uint64_t driver_first, driver_last; /* numbers of the first and last driver call that fail; 0: none */
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
/* As differs(), on a thread of the library. */
void differs_in_callback(const world_t *w, const char *message);

/* Faults that a later call may still report. */
uint64_t faults_untold(const world_t *w, fault_kind_t kind);
void faults_all_told(world_t *w);
/* What updates, waits for them and closing return once device work has failed, or once a worker had been given a piece
 * whose bytes then could not be read: such a piece never runs. */
static inline statuses_t updates_failed(const actor_t *a) {
  return (atomic_load(&a->w->driver_faults) ? DEVICE : 0) | (atomic_load(&a->w->update_failed) ? IO : 0);
}
/* pause true: driver calls do not fail, because the tester itself makes them, until this is called with false. */
void driver_pause(const world_t *w, bool pause);

/* ---- calls: CALL(actor, allowed, function, arguments) makes the operation's own call, which its fault applies to;
 * QUIET makes a call without a fault. Both return the status and check that it is one of those allowed. */
void call_begin(actor_t *a, const char *function, bool with_fault);
gemini_status_t call_end(actor_t *a, const char *function, statuses_t allowed, gemini_status_t status);
#define CALL(a, allowed, function, ...) \
  call_end(a, #function, allowed, (call_begin(a, #function, true), function(__VA_ARGS__)))
#define QUIET(a, allowed, function, ...) \
  call_end(a, #function, allowed, (call_begin(a, #function, false), function(__VA_ARGS__)))

static inline manager_t *manager_of(actor_t *a, const op_t *op) { return &a->w->managers[op->manager % MANAGERS]; }
static inline part_t *part_of(actor_t *a, manager_t *m) { return &m->parts[a->index]; }
uint64_t chunk_bytes(actor_t *a, manager_t *m); /* 0: not chosen yet */
void gone(actor_t *a, void *handle);            /* the handle must be refused from now on */

/* ---- room: can a call fail because a tier is full? */
/* The OOM statuses that a call may return if it needs this many chunks on the device at once. */
statuses_t no_room(actor_t *a, manager_t *m, uint64_t device_chunks);
/* Chunks that are held on the device or pinned there. */
uint64_t held_chunks(actor_t *a, const manager_t *m, uint64_t chunk);
bool any_pin(const actor_t *a, const manager_t *m);

/* ---- streams and the work on them */
/* The handle of the stream in an entry; GEMINI_STREAM_CALLER for -1 and for an entry without a stream. */
gemini_stream_t stream_handle(actor_t *a, manager_t *m, int entry);
/* Queues work on a stream that compares bytes with expected ones and writes a pattern. at: the offset that the pattern
 * depends on. */
void use_bytes(actor_t *a, manager_t *m, int stream, void *ptr, uint64_t at, uint64_t size, const uint8_t *expected,
               bool write, uint64_t seed, const char *what);
/* Waits for the streams that may still write to acquired ranges which overlap these bytes. */
void sync_holds(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, bool writers_only);

/* ---- checks */
/* Reads bytes of a store and disturbs the manager as little as possible. Returns false if there is no room to read
 * them. */
bool read_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, uint8_t *to);
/* As read_bytes(), but enlarges the host budget during the call if there is no room. Returns false if other threads
 * take that room; the bytes then count as unknown. */
bool read_surely(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, uint8_t *to);
/* After a call that may have changed some of the bytes: checks that each byte has its old value or the wanted one, and
 * copies the bytes to the model. */
void look_at_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, const uint8_t *wanted,
                   const char *what);
/* Compares bytes with the model's. Returns false if they cannot be read now. */
bool check_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size);
void check_tensor(actor_t *a, manager_t *m, int entry);
void check_arena(actor_t *a, manager_t *m, int entry);
void check_stats(actor_t *a, manager_t *m);
/* Checks everything that a thread owns. */
void check_part(actor_t *a, manager_t *m);
/* Checks a small part, after each operation. */
void check_some(actor_t *a, manager_t *m, uint64_t step);

/* ---- operations: run() carries one out, make() fills in random arguments. make() returns false if there is nothing
 * that the operation could use. */
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

/* For make(): appends an argument. */
static inline void op_add(op_t *op, uint64_t value) {
  if (op->count < OP_ARGS) op->arg[op->count++] = (uint32_t)value;
}
/* A random live entry, or -1. */
#define PICK(a, array, count) pick(a, &(array)[0].live, sizeof *(array), count)
int pick(actor_t *a, const bool *live, size_t stride, uint32_t count);
/* A free entry, or -1. */
#define PICK_FREE(array, count) pick_free(&(array)[0].live, sizeof *(array), count)
int pick_free(const bool *live, size_t stride, uint32_t count);
uint32_t rnd(actor_t *a, uint32_t below);
static inline bool feature(const actor_t *a, int feature) { return !(a->w->options.features_off >> feature & 1); }
bool chance(actor_t *a, uint32_t percent);
/* Appends an operation to those to come and returns it; NULL: no room. */
op_t *plan(actor_t *a, op_code_t code, uint8_t manager);
/* Appends a random operation of a kind. */
bool plan_made(actor_t *a, op_code_t code, uint8_t manager);

/* An access in three arguments. */
enum { ACCESS_ARGS = 3 };
typedef struct spec {
  bool is_arena;
  int entry, hold;
  uint32_t mode, tier;
  uint64_t offset, size;
} spec_t;
void spec_add(op_t *op, spec_t s);
spec_t spec_at(const op_t *op, uint32_t index);
/* A random range of a live object; mostly a valid one. */
bool spec_make(actor_t *a, manager_t *m, spec_t *out);

/* ---- shared between files */
void arena_forget(actor_t *a, manager_t *m, part_t *p, int entry); /* removes it from the model, with its tensors */
void manager_forget(actor_t *a, manager_t *m);                     /* likewise, with all its objects */
void manager_reset_file(world_t *w, uint32_t manager);             /* forgets its checkpoints */
void updates_done(actor_t *a, const manager_t *m);
void updates_free(actor_t *a, gemini_manager_t mgr);
/* The device has failed: updates that wait may never be done. */
void updates_lost(world_t *w, bool pending_only);
void kept_free(kept_t *k);
kept_t layout_of(actor_t *a, manager_t *m);                  /* the manager's arenas and tensors, without bytes */
bool layout_fits(actor_t *a, manager_t *m, const kept_t *k); /* the manager has all of these arenas */

/* ---- running */
void world_open(world_t *w, const options_t *options, shared_t *shared, const char *directory);
void world_run(world_t *w); /* makes a random program and runs it */
void world_replay(world_t *w, const op_t *ops, uint64_t count);
void world_close(world_t *w);
void run_op(actor_t *a, const op_t *op);
uint64_t now_ns(void);
#endif
