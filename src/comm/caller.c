/* A communicator over a table of functions of the caller (gemini_comm_t). SPDX-License-Identifier: Apache-2.0
 *
 * The functions are the caller's, so what they return is checked: the first failure, whatever its status, is kept with
 * the function's name, and returned by every later call, which no function hears of any more. */
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "comm/failure.h"

typedef struct caller {
  gemini_comm_t table; /* a copy; Constant, as the next five */
  char name[32];
  uint32_t rank, ranks;        /* in the replica */
  uint32_t place, all;         /* among all ranks of all replicas */
  gmi_first_failure_t failure; /* its code came with a function's own message */
} caller_t;

/* ---- failures */
/* Fails the communicator, unless it has failed before. The listener hears of it before abort() ends queued work. */
__attribute__((format(printf, 3, 4))) static gemini_status_t fail(caller_t *c, int64_t code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const bool first = gmi_first_failure_set(&c->failure, code, format, args);
  va_end(args);
  if (first && c->table.abort) c->table.abort(c->table.user, c->failure.why);
  return gmi_first_failure(&c->failure);
}

/* A call of a function: what it returned, and whether it recorded a message of its own. */
typedef struct call {
  char before[440]; /* this thread's last message */
} call_t;
static call_t call_begin(void) {
  call_t call;
  snprintf(call.before, sizeof call.before, "%s", gmi_fail_message());
  return call;
}
/* The message that the function has recorded; "": none. */
static const char *call_says(const call_t *call) {
  const char *says = gmi_fail_message();
  return strcmp(says, call->before) ? says : "";
}
static gemini_status_t call_end(caller_t *c, const call_t *call, gemini_status_t status, const char *function,
                                const char *label) {
  if (!status) return gmi_first_failure(&c->failure); /* another thread's, meanwhile */
  const char *says = call_says(call);
  return fail(c, *says ? gmi_fail_code() : 0, "%s() of %s%s%s returned %d (%s)%s%s", function, c->name,
              *label ? " for " : "", label, status, gemini_status_string(status), *says ? ": " : "", says);
}
/* The body of an operation: nothing to do, or a call of the function. */
#define CALL(nothing, function, label, ...)                \
  caller_t *c = self;                                      \
  gemini_status_t status = gmi_first_failure(&c->failure); \
  if (status || (nothing)) return status;                  \
  const char *what = (label) ? (label) : "";               \
  call_t call = call_begin();                              \
  return call_end(c, &call, c->table.function(c->table.user, __VA_ARGS__, what), #function, what)

/* ---- operations */
static gemini_status_t all_gather(void *self, void *buffer, uint64_t slice_bytes, void *stream, const char *label) {
  CALL(c->ranks == 1 || !slice_bytes, all_gather, label, buffer, slice_bytes, stream);
}
/* Its failure is no failure of the communicator. */
static gemini_status_t register_memory(void *self, void *memory, uint64_t bytes, void **handle_out) {
  caller_t *c = self;
  gemini_status_t status = gmi_first_failure(&c->failure);
  if (status) return status;
  call_t call = call_begin();
  status = c->table.register_memory(c->table.user, memory, bytes, handle_out);
  if (!status) return GEMINI_OK;
  char words[sizeof call.before];
  snprintf(words, sizeof words, "%s", call_says(&call)); /* which the next line writes over */
  return gmi_fail(status, 0, "register_memory() of %s returned %d (%s)%s%s", c->name, status,
                  gemini_status_string(status), *words ? ": " : "", words);
}
static void unregister_memory(void *self, void *handle) {
  caller_t *c = self;
  if (!gmi_has_failed(&c->failure)) c->table.unregister_memory(c->table.user, handle);
}
static gemini_status_t broadcast(void *self, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                                 const char *label) {
  const caller_t *own = self;
  if (root >= own->ranks) return gmi_fail(GEMINI_ERR_INVALID, 0, "root is %u, must be below %u", root, own->ranks);
  CALL(c->ranks == 1 || !bytes, broadcast, label, buffer, bytes, root, stream);
}
static gemini_status_t check_sum(uint32_t dtype, gmi_reduce_t reduce) {
  if (reduce != GMI_REDUCE_SUM)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "the caller's functions add, reduction %d is another", (int)reduce);
  return gmi_reduce_check(dtype, reduce);
}
static gemini_status_t reduce_scatter(void *self, void *buffer, uint64_t slice_count, uint32_t dtype,
                                      gmi_reduce_t reduce, void *stream, const char *label) {
  gemini_status_t checked = check_sum(dtype, reduce);
  if (checked) return checked;
  CALL(c->all == 1 || !slice_count, reduce_scatter, label, buffer, slice_count, dtype, stream);
}
static gemini_status_t all_reduce(void *self, void *buffer, uint64_t count, uint32_t dtype, gmi_reduce_t reduce,
                                  void *stream, const char *label) {
  gemini_status_t checked = check_sum(dtype, reduce);
  if (checked) return checked;
  CALL(c->all == 1 || !count, all_reduce, label, buffer, count, dtype, stream);
}
static gemini_status_t call_exchange(void *self, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  CALL(c->all == 1, exchange, label, mine, bytes, all_out);
}
/* A function that ends without a status, such as one of an interpreter whose user interrupts it, may seem to return
 * GEMINI_OK, and what was in all_out before would be taken for what other ranks have said. So this rank's place gets
 * other bytes than its own before. On the simulated device only this function runs on the caller's threads, where
 * interrupts come. */
static gemini_status_t exchange(void *self, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  caller_t *c = self;
  if (c->all == 1 && bytes && !gmi_has_failed(&c->failure)) memmove(all_out, mine, bytes);
  const unsigned char *own = mine;
  unsigned char *there = all_out;
  const uint64_t from = (uintptr_t)own, to = (uintptr_t)there;
  if (c->all == 1 || gmi_has_failed(&c->failure) || (from < to + bytes * c->all && to < from + bytes))
    return call_exchange(self, mine, bytes, all_out, label); /* in place it cannot be told */
  there += bytes * c->place;
  for (uint64_t i = 0; i < bytes; i++) there[i] = (unsigned char)~own[i];
  gemini_status_t status = call_exchange(self, mine, bytes, all_out, label);
  for (uint64_t i = 0; !status && i < bytes; i++)
    if (there[i] != (unsigned char)~own[i]) return GEMINI_OK;
  if (status || !bytes) return status;
  return fail(c, 0, "exchange() of %s returned 0 (%s), but has brought nothing", c->name, gemini_status_string(0));
}
static gemini_status_t poll_failure(void *self) {
  caller_t *c = self;
  gemini_status_t status = gmi_first_failure(&c->failure);
  if (status || !c->table.poll) return status;
  call_t call = call_begin();
  return call_end(c, &call, c->table.poll(c->table.user), "poll", "");
}
static gemini_status_t known_failure(void *self) { return gmi_first_failure(&((caller_t *)self)->failure); }
static void abort_here(void *self, const char *why) {
  (void)fail(self, 0, "gave up: %s", why ? why : "it does not say why");
}
static void caller_close(void *self) {
  caller_t *c = self;
  if (!c) return;
  gmi_first_failure_close(&c->failure);
  free(c);
}

#define OPS(queues_)                        \
  { .name = "the caller's functions",       \
    .queues = (queues_),                    \
    .all_gather = all_gather,               \
    .register_memory = register_memory,     \
    .unregister_memory = unregister_memory, \
    .broadcast = broadcast,                 \
    .reduce_scatter = reduce_scatter,       \
    .all_reduce = all_reduce,               \
    .exchange = exchange,                   \
    .poll = poll_failure,                   \
    .known = known_failure,                 \
    .abort = abort_here,                    \
    .close = caller_close }
static const gmi_comm_ops_t blocking = OPS(false), queueing = OPS(true);

/* ---- making */
static gemini_status_t check_table(const gemini_comm_t *t, uint32_t needs, const char *name) {
  const struct {
    uint32_t need;
    bool there;
    const char *function;
  } functions[] = { { GMI_COMM_NEEDS_GATHERS, t->all_gather, "all_gather" },
                    { GMI_COMM_NEEDS_GATHERS, t->broadcast, "broadcast" },
                    { GMI_COMM_NEEDS_SUMS, t->reduce_scatter, "reduce_scatter" },
                    { GMI_COMM_NEEDS_SUMS, t->all_reduce, "all_reduce" },
                    { GMI_COMM_NEEDS_EXCHANGES, t->exchange, "exchange" },
                    { GMI_COMM_NEEDS_MEMORY, t->register_memory, "register_memory" },
                    { GMI_COMM_NEEDS_MEMORY, t->unregister_memory, "unregister_memory" } };
  if (t->flags & ~(uint32_t)GEMINI_COMM_QUEUES)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s: flags has unknown bits %#x", name,
                    t->flags & ~(uint32_t)GEMINI_COMM_QUEUES);
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (needs & functions[i].need && !functions[i].there)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "%s: %s is NULL", name, functions[i].function);
  return GEMINI_OK;
}

gemini_status_t gmi_comm_caller_open(const gemini_comm_t *theirs, uint32_t needs, const char *name,
                                     const gmi_comm_config_t *config, gmi_comm_listener_t listener,
                                     gmi_comm_t *comm_out) {
  const uint32_t rank = config->rank, ranks = config->ranks, shard = gmi_comm_shard_ranks(ranks, config->shard_ranks);
  gemini_comm_t table;
  gemini_status_t status = gmi_struct_in(&table, sizeof table, theirs, GMI_V1_COMM, name);
  if (!status) status = check_table(&table, needs, name);
  if (status) return status;
  if (!ranks || ranks > GMI_COMM_RANKS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranks is %u, must be 1 to %d", ranks, GMI_COMM_RANKS);
  if (rank >= ranks) return gmi_fail(GEMINI_ERR_INVALID, 0, "rank is %u, must be below ranks, %u", rank, ranks);
  caller_t *c = calloc(1, sizeof *c);
  if (!c) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a communicator");
  c->table = table;
  c->rank = rank % shard;
  c->ranks = shard;
  c->place = rank;
  c->all = ranks;
  snprintf(c->name, sizeof c->name, "%s", name);
  gmi_first_failure_open(&c->failure, rank, ranks, listener);
  *comm_out = (gmi_comm_t){ table.flags & GEMINI_COMM_QUEUES ? &queueing : &blocking, c, c->rank, c->ranks };
  return GEMINI_OK;
}
