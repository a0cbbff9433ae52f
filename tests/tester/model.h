/* The reference model: what a program's arenas, tensors and acquires are, by include/gemini.h and docs/, in the simplest
 * form there is. Every arena that stores bytes has a plain array of them. SPDX-License-Identifier: Apache-2.0
 *
 * Objects have slots, so that an operation names the same object whatever is left out before it. What a thread owns is
 * its part; a manager has a part for each thread. Slots are -1 where there is none. */
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
  int root;  /* arena whose layout it follows; itself */
  int store; /* arena that stores its bytes; itself */
  uint64_t base;
  uint8_t *bytes;        /* [capacity], where it is its own store */
  bool unknown;          /* a call failed that may have changed a part, and it could not be seen which */
  uint16_t pins[CHUNKS]; /* by chunk, likewise */
} arena_t;

typedef struct tensor {
  bool live;
  gemini_tensor_t handle;
  char name[32];
  int arena;
  int base; /* the registered tensor of which it is a counterpart; itself */
  uint64_t offset, size;
  uint32_t users;
  uint32_t states; /* when nobody has it acquired: bit of each state that is possible */
  bool gradient;   /* of registered tensors: a gradient has taken its bytes */
} tensor_t;

/* A range acquired and not yet released. */
typedef struct hold {
  bool live, is_arena;
  int slot;              /* of the object */
  uint64_t offset, size; /* in the object; never 0 for the whole */
  uint32_t mode, tier;
  void *ptr;
  int stream;  /* on which its writes may be pending; -1: none are */
  int store;   /* arena with its bytes, */
  uint64_t at; /* and where there */
} hold_t;

typedef struct stream {
  bool live;
  gemini_stream_t handle;
} stream_t;
typedef struct alloc {
  bool live, hooked;
  uint8_t *ptr;
  uint64_t size, seed;
  int stream; /* that wrote it; -1: the caller */
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
  bool touched; /* arenas may hold bytes, zeros at least */
} part_t;

typedef struct manager {
  bool open;
  gemini_manager_t handle;
  gemini_config_t config;   /* with the budgets of now */
  gemini_config_t opened;   /* as it was opened */
  uint64_t host_bytes_most; /* the largest host budget so far */
  bool iteration, op;
  int op_stream; /* of the first thread's; -1: the caller */
  uint32_t phase;
  uint64_t iterations, begun_iterations;
  uint32_t ops;                        /* in the open iteration */
  _Atomic bool traced, perhaps_traced; /* there is a trace to save, or may be */
  _Atomic bool record_lost;            /* the open iteration may not become one: arenas came or went */
  bool timeline, hooked;
  bool resumed; /* a checkpoint was made or taken up */
  bool has_files;
  bool cannot_grow; /* perhaps: it was opened while a call of the system failed, and may have few host addresses */
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
enum { ERR_PENDING = -15 }; /* GEMINI_ERR_PENDING, which 0.1 before it does not have */
#define PENDING ONE(ERR_PENDING)
#define NO_ROOM (OOM_DEVICE | OOM_HOST | OOM_FILE)

/* ---- bytes: 8 of them at a time are a function of a seed and the place; seed 0: zeros. As numbers of any dtype they
 * are finite. */
void pattern_fill(uint8_t *to, uint64_t at, uint64_t size, uint64_t seed);

/* ---- ranges */
/* A range of an object as gemini_access_t names it: where it is, or why it is none. */
typedef struct range {
  bool live;        /* there is such an object */
  statuses_t wrong; /* what a call says of it; 0: it is one */
  bool is_arena;
  int slot, arena, store;
  uint64_t offset, size; /* in the object; size 0: an arena's range without bytes */
  uint64_t at;           /* in the store */
  gemini_object_t object;
  bool whole;
} range_t;
range_t range_of(const part_t *p, bool is_arena, int slot, uint64_t offset, uint64_t size);

/* Uses of one chunk of a store. */
typedef struct use {
  uint32_t device, device_writers, host, host_writers, pins;
} use_t;
use_t chunk_use(const part_t *p, int store, uint64_t chunk, uint64_t chunk_bytes);
/* All chunks of a range: the largest of each count. */
use_t range_use(const part_t *p, const range_t *r, uint64_t chunk_bytes);
uint64_t first_chunk(const range_t *r, uint64_t chunk_bytes);
uint64_t end_chunk(const range_t *r, uint64_t chunk_bytes);

/* ---- gradients in their parameters' bytes */
int reused_by(const part_t *p, int arena); /* the arena that reuses it, or -1 */
enum { CONTENT_FINE, CONTENT_FLIPS, CONTENT_WRONG };
/* Of a tensor's range: are its bytes what the tensor is? write: all of the range will be overwritten. */
int content_of(const part_t *p, const range_t *r, bool overwritten);
/* All bytes of a range of an arena have been written: tensors that lie in it whole hold what the arena is for. */
void content_written(part_t *p, int arena, uint64_t at, uint64_t size);

/* ---- states */
bool state_legal(uint32_t from, uint32_t to);
uint32_t state_after_release(uint32_t phase);

uint32_t dtype_bytes(uint32_t dtype);
/* The norm of size bytes at a place that is `at` in its arena, in the order of additions that gemini_norm() promises. */
double norm_of(const uint8_t *bytes, uint64_t at, uint64_t size, uint32_t dtype);

#endif
