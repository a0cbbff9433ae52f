/* The record of a communicator over NCCL, and what its files call of each other. SPDX-License-Identifier: Apache-2.0
 *
 * nccl.c says how it works. nccl_open.c makes communicators and ends them. */
#ifndef GMI_NCCL_H
#define GMI_NCCL_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "base/clock.h"
#include "comm/failure.h"
#include "comm/nccl_library.h"

#define GMI_NCCL_EXCHANGE_BYTES (UINT64_C(2) << 20) /* for one piece of all ranks */
/* Polling: the processor is offered to others for SPIN_NS, then the thread sleeps. */
#define GMI_NCCL_SPIN_NS UINT64_C(200000)
/* WATCHED: collectives that have not ended, at most: so few that they do not fill the driver's queue, of some 1000. */
enum { GMI_NCCL_SLEEP_NS = 50000, GMI_NCCL_WHAT_BYTES = 192, GMI_NCCL_WATCHED = 256 };

/* A collective that is queued. */
typedef struct watched {
  cu_event_t begin, end; /* made at first use */
  uint64_t begun_ns;     /* when begin was first seen reached; 0: not yet */
  char what[GMI_NCCL_WHAT_BYTES];
} watched_t;

typedef enum { ENDER_NONE, ENDER_RUNS } ender_t;

typedef struct nccl {
  const gmi_nccl_library_t *library;
  const gmi_cuda_driver_t *driver;
  cu_context_t context; /* NULL: not retained yet */
  cu_device_t device;
  uint32_t rank, ranks;
  uint64_t deadline_ns;
  bool adopted, rank_order;
  bool in_use;            /* nobody knows when the GPU is done with what this record holds. Guarded by turn */
  struct nccl *next_left; /* the next record that could not be freed */

  pthread_mutex_t turn, lock;
  nccl_comm_t comm;     /* NULL once the ender has taken it. Guarded by lock */
  uint64_t number;      /* of the last collective or exchange. Guarded by turn */
  watched_t *ring;      /* [GMI_NCCL_WATCHED]; an entry that is not watched is the property of the holder of turn */
  uint64_t first, next; /* watched are those from first to before next, modulo GMI_NCCL_WATCHED. Guarded by lock */

  gmi_first_failure_t failure;

  pthread_mutex_t ender_lock;
  struct { /* guarded by ender_lock, except `ended` */
    ender_t state;
    pthread_t thread;
    _Atomic bool ended; /* Atomic: stored (release) as the last thing that the ender does with this record */
  } ender;

  struct { /* device memory: for an exchange, then for reductions in the order of ranks */
    cu_address_t base;
    cu_memory_t memory;
    uint64_t reserved_bytes, created_bytes, mapped_bytes; /* 0: not done */
    cu_module_t module;
    cu_function_t kernel;
    cu_event_t free; /* recorded behind the last kernel that reads it. Guarded by turn, as the next */
    bool used;       /* free has been recorded */
  } scratch;
  struct {
    unsigned char *host; /* page-locked, GMI_NCCL_EXCHANGE_BYTES */
    cu_stream_t stream;
    cu_event_t done;
  } exchange;
} nccl_t;

/* ---- the driver's context */
typedef struct entry {
  cu_context_t context;
  int capture_mode;
} entry_t;

/* Makes the GPU's context current, in which NCCL looks for its device, and keeps calls from invalidating a capture of
 * another thread. A failure shows in the call that follows. */
static inline entry_t gmi_nccl_enter(const nccl_t *n) {
  entry_t had = { NULL, CU_CAPTURE_MODE_RELAXED };
  n->driver->current_get(&had.context);
  if (had.context != n->context) n->driver->current_set(n->context);
  n->driver->capture_mode(&had.capture_mode);
  return had;
}
static inline void gmi_nccl_leave(const nccl_t *n, entry_t had) {
  n->driver->capture_mode(&had.capture_mode);
  if (had.context != n->context) n->driver->current_set(had.context);
}

static inline void gmi_nccl_wait(uint64_t begin_ns) {
  if (gmi_now_ns() - begin_ns < GMI_NCCL_SPIN_NS) sched_yield();
  else nanosleep(&(struct timespec){ 0, GMI_NCCL_SLEEP_NS }, NULL);
}

/* ---- nccl.c */
extern const gmi_comm_ops_t gmi_nccl_ops;
/* The end of a function of NCCL that returned result: waits until NCCL has done what it left to its thread. */
gemini_status_t gmi_nccl_ready(nccl_t *n, nccl_result_t result, const char *function, const char *what);

/* ---- nccl_open.c */
/* Starts the ender, unless it runs or the communicator is the caller's. Without a thread, close() does the work. */
void gmi_nccl_ender_start(nccl_t *n);
void gmi_nccl_close(void *self);

/* Calls a function of the driver, unless one has failed before. `result` and `function` say what failed. */
#define GMI_NCCL_DO(call, symbol) \
  do {                            \
    if (result == CU_SUCCESS) {   \
      function = (symbol);        \
      result = (call);            \
    }                             \
  } while (0)

#endif
