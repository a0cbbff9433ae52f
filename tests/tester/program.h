/* A program: a list of operations. Each has everything that decides what it does, so that a program can be written to a
 * file, run again, and run with operations left out. SPDX-License-Identifier: Apache-2.0 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "faults.h"

/* NAME, its weight in the random choice, and which threads may run it:
 *   OWN    any thread, on its own objects, while others run
 *   FIRST  the first thread only, while others run: it changes what all threads share and the model stores once
 *   ALONE  while no other thread runs */
#define OPERATIONS(X)           \
  X(open, 40, ALONE)            \
  X(close, 3, ALONE)            \
  X(reopen, 4, ALONE)           \
  X(budget, 30, FIRST)          \
  X(stream_create, 15, OWN)     \
  X(stream_destroy, 6, OWN)     \
  X(stream_sync, 20, OWN)       \
  X(stream_call, 10, OWN)       \
  X(stream_other, 2, OWN)       \
  X(arena_create, 40, OWN)      \
  X(arena_destroy, 12, OWN)     \
  X(arena_take, 8, OWN)         \
  X(tensor_register, 90, OWN)   \
  X(tensor_unregister, 30, OWN) \
  X(tensor_find, 5, OWN)        \
  X(counterpart, 50, OWN)       \
  X(state_set, 40, OWN)         \
  X(iteration_begin, 20, FIRST) \
  X(iteration_end, 20, FIRST)   \
  X(phase, 20, FIRST)           \
  X(compacted, 4, FIRST)        \
  X(op_begin, 40, FIRST)        \
  X(op_end, 40, FIRST)          \
  X(acquire, 300, OWN)          \
  X(release, 260, OWN)          \
  X(release_wrong, 12, OWN)     \
  X(hint, 30, OWN)              \
  X(move, 60, OWN)              \
  X(pin, 20, OWN)               \
  X(unpin, 25, OWN)             \
  X(zero, 60, OWN)              \
  X(load, 40, OWN)              \
  X(borrow, 25, OWN)            \
  X(store, 30, OWN)             \
  X(norm, 30, OWN)              \
  X(update, 60, OWN)            \
  X(update_wait, 15, OWN)       \
  X(update_drop, 8, OWN)        \
  X(alloc, 40, OWN)             \
  X(free, 35, OWN)              \
  X(host_alloc, 20, OWN)        \
  X(host_free, 18, OWN)         \
  X(hook, 6, ALONE)             \
  X(checkpoint, 8, ALONE)       \
  X(resume, 4, ALONE)           \
  X(trace_save, 6, ALONE)       \
  X(trace_rewrite, 5, ALONE)    \
  X(trace_load, 8, FIRST)       \
  X(forecast, 6, ALONE)         \
  X(explain, 8, OWN)            \
  X(timeline, 4, FIRST)         \
  X(stats_reset, 8, FIRST)      \
  X(read_all, 10, OWN)          \
  X(settle, 10, ALONE)          \
  X(dead, 25, OWN)              \
  X(bad, 15, OWN)               \
  X(churn, 1, OWN)

enum { OWN, FIRST, ALONE };
typedef enum {
#define X(name, weight, who) OP_##name,
  OPERATIONS(X)
#undef X
      OP_COUNT
} op_code_t;

enum { OP_ARGS = 64 };
typedef struct op {
  uint8_t code;    /* OP_* */
  uint8_t thread;  /* the thread that runs it */
  uint8_t manager; /* the manager that it uses */
  uint8_t fault;   /* fault_kind_t: the kind of calls that fail during it */
  uint16_t skip;   /* how many such calls succeed first */
  uint16_t run;    /* how many fail then */
  uint8_t errors;  /* index of the errno in errors_of */
  uint8_t count;   /* of arg */
  uint16_t round;  /* rounds come one after another; in odd ones all threads run at once */
  uint32_t check;  /* decides what is checked after it, whatever operations are left out before it */
  uint32_t arg[OP_ARGS];
} op_t;

const char *op_name(uint8_t code);
int op_code(const char *name); /* -1: none */
int op_who(uint8_t code);
uint32_t op_weight(uint8_t code);
const char *fault_name(fault_kind_t kind);

/* An operation as one line of text: "acquire t0 m0 r0 c3 memory:3:1:0 17 4096 0 ...". */
void op_write(FILE *file, const op_t *op);
bool op_read(const char *line, op_t *op);

/* xorshift64*: seeded, the same everywhere. */
uint64_t random_next(uint64_t *state);
/* 0 to below - 1. */
static inline uint32_t random_below(uint64_t *state, uint32_t below) {
  return below ? (uint32_t)((random_next(state) >> 16) % below) : 0;
}
static inline bool random_percent(uint64_t *state, uint32_t percent) { return random_below(state, 100) < percent; }
#endif
