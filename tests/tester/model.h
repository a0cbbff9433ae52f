/* The reference model: what include/gemini.h and docs/ promise of a program's arenas, tensors and acquires, in the
 * simplest form. Every arena that stores bytes has a plain array of them. SPDX-License-Identifier: Apache-2.0
 *
 * Operations name objects by their entries in the model's tables, so that an operation names the same object even if
 * operations before it are left out. The objects that a thread owns are its part; a manager has a part for each thread.
 * The entry -1 stands for no object. */
#ifndef MODEL_H
#define MODEL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "../handles.h"
#include "gemini.h"

enum {
  THREADS = 32,
  MANAGERS = 2,
  ARENAS = 8,
  TENSORS = 24,
  STREAMS = 2,
  HOLDS = 40,
  ALLOCS = 8,
  BLOCKS = 6,
  CHUNKS = 256, /* of an arena, at most */
  TRACES = 4
};

typedef struct arena {
  bool live;
  gemini_arena_t handle;
  char name[64];
  uint32_t kind, element_bytes;
  uint64_t size, capacity;
  int root;  /* arena whose layout this one follows; its own entry if it follows none */
  int store; /* arena that stores its bytes; its own entry if it reuses none */
  uint64_t base;
  uint8_t *bytes;        /* [capacity], where it is its own store */
  bool unknown;          /* a failed call may have changed some bytes, and the tester could not find out which */
  uint16_t pins[CHUNKS]; /* by chunk, where the arena is its own store */
} arena_t;

typedef struct tensor {
  bool live;
  gemini_tensor_t handle;
  char name[32];
  int arena;
  int base; /* the registered tensor of which it is a counterpart; its own entry if it is registered */
  uint64_t offset, size;
  uint32_t users;
  uint32_t states; /* while it is not acquired: a bit for each state that is possible */
  bool gradient;   /* of registered tensors: a gradient has taken its bytes */
} tensor_t;

/* A range acquired and not yet released. */
typedef struct hold {
  bool live, is_arena;
  int entry;             /* of the object */
  uint64_t offset, size; /* in the object; size is never 0 for the whole object */
  uint32_t mode, tier;
  void *ptr;
  int stream;  /* stream on which writes of it may be pending; -1: none */
  int store;   /* arena that stores its bytes */
  uint64_t at; /* offset in that arena */
} hold_t;

typedef struct stream {
  bool live;
  gemini_stream_t handle;
} stream_t;
typedef struct alloc {
  bool live, hooked;
  uint8_t *ptr;
  uint64_t size, seed;
  int stream; /* stream that wrote it; -1: the caller */
} alloc_t;
typedef struct block {
  bool live;
  uint8_t *ptr;
  uint64_t size, seed;
} block_t;

typedef struct part {
  arena_t arenas[ARENAS];
  tensor_t tensors[TENSORS];
  hold_t holds[HOLDS];
  stream_t streams[STREAMS];
  alloc_t allocs[ALLOCS];
  block_t blocks[BLOCKS];
  bool touched; /* arenas may hold bytes, possibly zeros */
} part_t;

typedef struct manager {
  bool open;
  gemini_manager_t handle;
  gemini_config_t config;   /* with the present budgets */
  gemini_config_t opened;   /* as it was opened */
  uint64_t host_bytes_most; /* the largest host budget so far */
  bool iteration, op;
  int op_stream; /* stream of the open operator, an entry of the first thread's part; -1: the caller */
  uint32_t phase;
  uint64_t iterations, begun_iterations;
  uint32_t ops;                        /* in the open iteration */
  _Atomic bool traced, perhaps_traced; /* there is a trace to save; there may be one */
  _Atomic bool record_lost;            /* arenas came or went: the open iteration may not become a trace */
  bool timeline, hooked;
  bool resumed; /* a checkpoint was made or resumed */
  bool has_files;
  bool cannot_grow; /* perhaps: a system call failed while it was opened, so it may have reserved few host addresses */
  part_t parts[THREADS];
} manager_t;

/* A set of statuses. */
typedef uint32_t statuses_t;
#define ONE(status) (UINT32_C(1) << -(status))
#define OK ONE(GEMINI_OK)
#define INVALID ONE(GEMINI_ERR_INVALID)
#define HANDLE ONE(GEMINI_ERR_HANDLE)
#define STATE ONE(GEMINI_ERR_STATE)
#define BUSY ONE(GEMINI_ERR_BUSY)
#define OOM_DEVICE ONE(GEMINI_ERR_OOM_DEVICE)
#define OOM_HOST ONE(GEMINI_ERR_OOM_HOST)
#define OOM_FILE ONE(GEMINI_ERR_OOM_FILE)
#define OOM_SYSTEM ONE(GEMINI_ERR_OOM_SYSTEM)
#define IO ONE(GEMINI_ERR_IO)
#define FORMAT ONE(GEMINI_ERR_FORMAT)
#define NOT_FOUND ONE(GEMINI_ERR_NOT_FOUND)
#define EXISTS ONE(GEMINI_ERR_EXISTS)
#define UNSUPPORTED ONE(GEMINI_ERR_UNSUPPORTED)
#define DEVICE ONE(GEMINI_ERR_DEVICE)
enum { ERR_PENDING = -15 }; /* GEMINI_ERR_PENDING, which earlier states of 0.1 lack */
#define PENDING ONE(ERR_PENDING)
#define NO_ROOM (OOM_DEVICE | OOM_HOST | OOM_FILE)

/* ---- bytes: each group of 8 is a function of a seed and its offset; seed 0 gives zeros. As numbers of any dtype they
 * are finite. */
void pattern_fill(uint8_t *to, uint64_t at, uint64_t size, uint64_t seed);

/* ---- ranges */
/* A range of an object as gemini_access_t names it: where it is, or why calls refuse it. */
typedef struct range {
  bool live;        /* the object exists */
  statuses_t wrong; /* the statuses with which calls refuse it; 0: it is valid */
  bool is_arena;
  int entry, arena, store;
  uint64_t offset, size; /* in the object; size 0: an arena's range without bytes */
  uint64_t at;           /* in the store */
  gemini_object_t object;
  bool whole;
} range_t;
range_t range_of(const part_t *p, bool is_arena, int entry, uint64_t offset, uint64_t size);

/* Uses of one chunk of a store. */
typedef struct use {
  uint32_t device, device_writers, host, host_writers, pins;
} use_t;
use_t chunk_use(const part_t *p, int store, uint64_t chunk, uint64_t chunk_bytes);
/* The largest of each count over all chunks of a range. */
use_t range_use(const part_t *p, const range_t *r, uint64_t chunk_bytes);
uint64_t first_chunk(const range_t *r, uint64_t chunk_bytes);
uint64_t end_chunk(const range_t *r, uint64_t chunk_bytes);

/* ---- gradients in their parameters' bytes */
int reused_by(const part_t *p, int arena); /* the arena that reuses this one, or -1 */
enum { CONTENT_FINE, CONTENT_FLIPS, CONTENT_WRONG };
/* Is it a registered tensor that the range overlaps? */
bool range_touches(const part_t *p, const range_t *r, int tensor);
/* Do the bytes of the range's tensors hold what they are named as, parameter or gradient? overwritten: all of the range
 * will be overwritten. */
int content_of(const part_t *p, const range_t *r, bool overwritten);
/* All bytes of a range of an arena have been written: tensors that lie completely in it now hold what the arena holds,
 * parameters or gradients. */
void content_written(part_t *p, int arena, uint64_t at, uint64_t size);

/* ---- states */
bool state_legal(uint32_t from, uint32_t to);
uint32_t state_after_release(uint32_t phase);

uint32_t dtype_bytes(uint32_t dtype);
/* The norm of size bytes that begin at offset `at` of their arena, in the order of additions that gemini_norm()
 * promises. */
double norm_of(const uint8_t *bytes, uint64_t at, uint64_t size, uint32_t dtype);

#endif
