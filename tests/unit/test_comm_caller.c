/* The communicator over a table of the caller's functions: what it passes on, and what it makes of what they return.
 * SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdatomic.h>

#include "base/status.h"
#include "check.h"
#include "comm/comm.h"

enum { ALL_GATHER, BROADCAST, REDUCE_SCATTER, ALL_REDUCE, EXCHANGE, POLL, FUNCTIONS };
static const char *const names[] = { "all_gather", "broadcast", "reduce_scatter", "all_reduce", "exchange", "poll" };

/* ---- a table that notes how it is called */
typedef struct {
  gemini_status_t returns[FUNCTIONS];
  const char *says; /* recorded by a function that fails; NULL: nothing */
  uint32_t rank;    /* whose bytes an exchange brings to their place */
  bool brings_nothing;
  int calls[FUNCTIONS], aborts, listened;
  int aborts_when_listened; /* how many there had been */
  char why[400];
  const void *buffer, *mine;
  void *stream, *all;
  uint64_t size;
  uint32_t number; /* root or dtype */
  char label[GMI_COMM_LABEL_BYTES];
} table_t;

static gemini_status_t called(table_t *t, int function) {
  t->calls[function]++;
  gemini_status_t status = t->returns[function];
  if (!status || !t->says) return status;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  info.status = GEMINI_ERR_PEER;
  info.native_code = 77;
  snprintf(info.message, sizeof info.message, "%s", t->says);
  CHECK_EQ(gemini_error_set(&info), GEMINI_OK);
  return status;
}
static void note(table_t *t, const void *buffer, uint64_t size, uint32_t number, void *stream, const char *label) {
  t->buffer = buffer;
  t->size = size;
  t->number = number;
  t->stream = stream;
  snprintf(t->label, sizeof t->label, "%s", label);
}
static gemini_status_t gather_fn(void *user, void *buffer, uint64_t size, void *stream, const char *label) {
  note(user, buffer, size, 0, stream, label);
  return called(user, ALL_GATHER);
}
static gemini_status_t broadcast_fn(void *user, void *buffer, uint64_t size, uint32_t root, void *stream,
                                    const char *label) {
  note(user, buffer, size, root, stream, label);
  return called(user, BROADCAST);
}
static gemini_status_t scatter_fn(void *user, void *buffer, uint64_t count, uint32_t dtype, void *stream,
                                  const char *label) {
  note(user, buffer, count, dtype, stream, label);
  return called(user, REDUCE_SCATTER);
}
static gemini_status_t reduce_fn(void *user, void *buffer, uint64_t count, uint32_t dtype, void *stream,
                                 const char *label) {
  note(user, buffer, count, dtype, stream, label);
  return called(user, ALL_REDUCE);
}
static gemini_status_t exchange_fn(void *user, const void *mine, uint64_t size, void *all, const char *label) {
  table_t *t = user;
  note(t, NULL, size, 0, NULL, label);
  t->mine = mine;
  t->all = all;
  if (size && !t->brings_nothing) memcpy((char *)all + t->rank * size, mine, size);
  return called(t, EXCHANGE);
}
static gemini_status_t poll_fn(void *user) { return called(user, POLL); }
static void abort_fn(void *user, const char *why) {
  table_t *t = user;
  t->aborts++;
  snprintf(t->why, sizeof t->why, "%s", why);
}
static void listen_fn(void *user) {
  table_t *t = user;
  t->listened++;
  t->aborts_when_listened = t->aborts;
}

enum { ALL = GMI_COMM_NEEDS_GATHERS | GMI_COMM_NEEDS_SUMS | GMI_COMM_NEEDS_EXCHANGES };
static gemini_comm_t functions(table_t *t) {
  return (gemini_comm_t){ sizeof(gemini_comm_t),
                          GEMINI_COMM_QUEUES,
                          t,
                          gather_fn,
                          broadcast_fn,
                          scatter_fn,
                          reduce_fn,
                          exchange_fn,
                          poll_fn,
                          abort_fn,
                          NULL,
                          NULL };
}
static gmi_comm_t open_comm(table_t *t, uint32_t rank, uint32_t ranks) {
  gmi_comm_t comm;
  gemini_comm_t table = functions(t);
  t->rank = rank;
  const gmi_comm_listener_t listener = { listen_fn, t };
  const gmi_comm_config_t config = { rank, ranks, 0, 0 };
  CHECK_EQ(gmi_comm_caller_open(&table, ALL, "comms[9]", &config, listener, &comm), GEMINI_OK);
  memset(&table, 0xEE, sizeof table); /* it is borrowed until return */
  CHECK_EQ(comm.rank, rank);
  CHECK_EQ(comm.ranks, ranks);
  CHECK(comm.ops->queues);
  return comm;
}
static void close_comm(gmi_comm_t *comm) { comm->ops->close(comm->self); }
static int calls_of(const table_t *t) {
  int sum = 0;
  for (int i = 0; i < FUNCTIONS; i++) sum += t->calls[i];
  return sum;
}
/* Calls the operation with sizes that are not 0. */
static gemini_status_t call(const gmi_comm_t *c, int function, void *buffer, const char *label) {
  void *stream = (void *)(uintptr_t)0x5000;
  switch (function) {
  case ALL_GATHER: return c->ops->all_gather(c->self, buffer, 100, stream, label);
  case BROADCAST: return c->ops->broadcast(c->self, buffer, 101, 2, stream, label);
  case REDUCE_SCATTER:
    return c->ops->reduce_scatter(c->self, buffer, 102, GEMINI_DTYPE_BF16, GMI_REDUCE_SUM, stream, label);
  case ALL_REDUCE: return c->ops->all_reduce(c->self, buffer, 103, GEMINI_DTYPE_F64, GMI_REDUCE_SUM, stream, label);
  case EXCHANGE: return c->ops->exchange(c->self, "mine", 4, buffer, label);
  default: return c->ops->poll(c->self);
  }
}

/* ---- tests */
static void test_arguments_arrive(void) {
  static const uint64_t sizes[] = { 100, 101, 102, 103, 4 };
  static const uint32_t numbers[] = { 0, 2, GEMINI_DTYPE_BF16, GEMINI_DTYPE_F64, 0 };
  table_t t = { 0 };
  gmi_comm_t comm = open_comm(&t, 1, 3);
  unsigned char buffer[16];
  for (int f = 0; f < POLL; f++) {
    for (int labelled = 0; labelled < 2; labelled++) {
      CHECK_EQ(call(&comm, f, buffer, labelled ? "chunk 5" : NULL), GEMINI_OK);
      CHECK_EQ(t.calls[f], 1 + labelled);
      CHECK_EQ(t.size, sizes[f]);
      CHECK_EQ(t.number, numbers[f]);
      CHECK(!strcmp(t.label, labelled ? "chunk 5" : ""));
      if (f == EXCHANGE) CHECK(!memcmp(t.mine, "mine", 4) && t.all == buffer);
      else CHECK(t.buffer == buffer && t.stream == (void *)(uintptr_t)0x5000);
    }
  }
  CHECK_EQ(comm.ops->poll(comm.self), GEMINI_OK);
  CHECK_EQ(t.calls[POLL], 1);
  CHECK_EQ(calls_of(&t), 11);
  close_comm(&comm);
  CHECK_EQ(t.aborts + t.listened, 0);
}

/* Ranks meet in an exchange of nothing; else what has nothing to do is not called. */
static void test_nothing_to_do_is_not_called(void) {
  table_t t = { 0 };
  unsigned char buffer[4] = { 0 };
  gmi_comm_t alone = open_comm(&t, 0, 1);
  for (int f = 0; f < POLL; f++)
    if (f != BROADCAST) CHECK_EQ(call(&alone, f, buffer, ""), GEMINI_OK);
  CHECK_EQ(alone.ops->broadcast(alone.self, buffer, 4, 0, NULL, ""), GEMINI_OK);
  CHECK(!memcmp(buffer, "mine", 4));
  close_comm(&alone);
  gmi_comm_t comm = open_comm(&t, 0, 2);
  CHECK_EQ(comm.ops->all_gather(comm.self, buffer, 0, NULL, ""), GEMINI_OK);
  CHECK_EQ(comm.ops->broadcast(comm.self, buffer, 0, 1, NULL, ""), GEMINI_OK);
  CHECK_EQ(comm.ops->reduce_scatter(comm.self, buffer, 0, 0, GMI_REDUCE_SUM, NULL, ""), GEMINI_OK);
  CHECK_EQ(comm.ops->all_reduce(comm.self, buffer, 0, 0, GMI_REDUCE_SUM, NULL, ""), GEMINI_OK);
  CHECK_EQ(calls_of(&t), 0);
  CHECK_EQ(comm.ops->exchange(comm.self, NULL, 0, NULL, ""), GEMINI_OK);
  CHECK_EQ(t.calls[EXCHANGE], 1);
  close_comm(&comm);
}

static void test_every_failure_of_a_function_is_kept(void) {
  static const gemini_status_t statuses[] = { GEMINI_ERR_PEER, GEMINI_ERR_IO, GEMINI_ERR_INVALID, -999, 7 };
  for (int f = 0; f < FUNCTIONS; f++) {
    for (int s = 0; s < 5; s++) {
      for (int says = 0; says < 2; says++) {
        table_t t = { .says = says ? "rank 2 has gone home" : NULL };
        unsigned char buffer[16];
        char words[64];
        gmi_comm_t comm = open_comm(&t, 1, 3);
        gmi_fail(GEMINI_ERR_INVALID, 5, "an older failure");
        t.returns[f] = statuses[s];
        CHECK_EQ(call(&comm, f, buffer, "chunk 5"), GEMINI_ERR_PEER);
        snprintf(words, sizeof words, "rank 1 of 3: %s() of comms[9]%s returned %d", names[f],
                 f == POLL ? "" : " for chunk 5", statuses[s]);
        CHECK_SAYS(gmi_fail_message(), words);
        CHECK(!!strstr(gmi_fail_message(), "rank 2 has gone home") == says);
        CHECK(!strstr(gmi_fail_message(), "older"));
        CHECK_EQ(gmi_fail_code(), says ? 77 : 0);
        CHECK_EQ(t.aborts, 1);
        CHECK_SAYS(t.why, words);
        CHECK_EQ(t.listened, 1);
        CHECK_EQ(t.aborts_when_listened, 0); /* it hears of it before queued work ends */
        /* No function hears of any later call. */
        t.returns[f] = GEMINI_OK;
        int before = calls_of(&t);
        for (int later = 0; later < FUNCTIONS; later++) {
          gmi_fail(GEMINI_ERR_INVALID, 5, "an older failure");
          CHECK_EQ(call(&comm, later, buffer, "later"), GEMINI_ERR_PEER);
          CHECK_SAYS(gmi_fail_message(), words);
        }
        comm.ops->abort(comm.self, "again");
        CHECK_EQ(calls_of(&t), before);
        CHECK_EQ(t.aborts, 1);
        CHECK_EQ(t.listened, 1);
        close_comm(&comm);
      }
    }
  }
}

/* Such as a callback of Python that an interrupt has ended: its status is by chance. */
static void test_an_exchange_that_did_nothing_is_noticed(void) {
  static const char words[] = "rank 1 of 3: exchange() of comms[9] returned 0 (success), but has brought nothing";
  for (int in_place = 0; in_place < 2; in_place++) {
    table_t t = { 0 };
    gmi_comm_t comm = open_comm(&t, 1, 3);
    unsigned char all[12] = "mineminemin";
    CHECK_EQ(comm.ops->exchange(comm.self, in_place ? (void *)(all + 4) : "mine", 4, all, ""), GEMINI_OK);
    CHECK(!memcmp(all, "mineminemin", 12));
    t.brings_nothing = true;
    CHECK_EQ(comm.ops->exchange(comm.self, NULL, 0, NULL, ""), GEMINI_OK);
    if (!in_place) {
      CHECK_EQ(comm.ops->exchange(comm.self, "mine", 4, all, ""), GEMINI_ERR_PEER);
      CHECK_SAYS(gmi_fail_message(), words);
      CHECK_EQ(t.aborts, 1);
      CHECK_EQ(call(&comm, ALL_GATHER, all, ""), GEMINI_ERR_PEER);
    }
    close_comm(&comm);
  }
}

static void test_success_leaves_the_last_error(void) {
  table_t t = { 0 };
  unsigned char buffer[16];
  gmi_comm_t comm = open_comm(&t, 0, 3);
  gmi_fail(GEMINI_ERR_IO, 5, "an older failure");
  for (int f = 0; f < FUNCTIONS; f++) CHECK_EQ(call(&comm, f, buffer, ""), GEMINI_OK);
  CHECK_SAYS(gmi_fail_message(), "an older failure");
  CHECK_EQ(gmi_fail_code(), 5);
  close_comm(&comm);
}

static void test_abort_fails_every_later_call(void) {
  for (int has = 0; has < 2; has++) {
    table_t t = { 0 };
    unsigned char buffer[16];
    gmi_comm_t comm;
    gemini_comm_t table = functions(&t);
    if (!has) table.abort = NULL, table.poll = NULL;
    CHECK_EQ(gmi_comm_caller_open(&table, ALL, "comms[9]", &(gmi_comm_config_t){ 1, 3, 0, 0 },
                                  (gmi_comm_listener_t){ 0 }, &comm),
             GEMINI_OK);
    CHECK_EQ(comm.ops->poll(comm.self), GEMINI_OK);
    comm.ops->abort(comm.self, "no room");
    CHECK_EQ(t.aborts, has);
    for (int f = 0; f < FUNCTIONS; f++) {
      CHECK_EQ(call(&comm, f, buffer, ""), GEMINI_ERR_PEER);
      CHECK_SAYS(gmi_fail_message(), "rank 1 of 3: gave up: no room");
    }
    CHECK_EQ(calls_of(&t), has); /* the poll before */
    close_comm(&comm);
  }
}

/* Of this library, not of the table: the communicator goes on. */
static void test_wrong_arguments_are_refused(void) {
  table_t t = { 0 };
  gmi_comm_t comm = open_comm(&t, 0, 2);
  void *self = comm.self;
  unsigned char buffer[16];
  CHECK_EQ(comm.ops->broadcast(self, buffer, 1, 2, NULL, ""), GEMINI_ERR_INVALID);
  CHECK_EQ(comm.ops->all_reduce(self, buffer, 1, 4, GMI_REDUCE_SUM, NULL, ""), GEMINI_ERR_INVALID);
  CHECK_EQ(comm.ops->reduce_scatter(self, buffer, 1, 0, GMI_REDUCE_MAX, NULL, ""), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(comm.ops->all_reduce(self, buffer, 1, 0, GMI_REDUCE_SUM_ROUNDED, NULL, ""), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(calls_of(&t), 0);
  CHECK_EQ(comm.ops->poll(self), GEMINI_OK);
  close_comm(&comm);
}

/* A table lacks what it is not needed for, and says itself whether it queues. */
static void test_a_table_may_lack_what_is_not_needed(void) {
  table_t t = { 0 };
  static const uint32_t needs[] = { GMI_COMM_NEEDS_GATHERS, GMI_COMM_NEEDS_SUMS, GMI_COMM_NEEDS_EXCHANGES };
  for (int i = 0; i < 3; i++) {
    gemini_comm_t table = GEMINI_COMM_INIT, all = functions(&t);
    gmi_comm_t comm;
    if (i == 0) table.all_gather = all.all_gather, table.broadcast = all.broadcast;
    if (i == 1) table.reduce_scatter = all.reduce_scatter, table.all_reduce = all.all_reduce;
    if (i == 2) table.exchange = all.exchange;
    for (int k = 0; k < 3; k++) {
      gemini_status_t status = gmi_comm_caller_open(&table, needs[k], "comms[9]", &(gmi_comm_config_t){ 0, 2, 0, 0 },
                                                    (gmi_comm_listener_t){ 0 }, &comm);
      CHECK_EQ(status, i == k ? GEMINI_OK : GEMINI_ERR_INVALID);
      if (status) continue;
      CHECK(!comm.ops->queues);
      close_comm(&comm);
    }
  }
}

/* A rank that is all of its replica gathers nothing, but sums and exchanges with the others. */
static void test_replicas_of_one_rank_sum(void) {
  table_t t = { 0 };
  gemini_comm_t table = functions(&t);
  gmi_comm_t comm;
  t.rank = 2;
  unsigned char buffer[16];
  const gmi_comm_config_t config = { .rank = 2, .ranks = 4, .shard_ranks = 1 };
  CHECK_EQ(gmi_comm_caller_open(&table, ALL, "comms[9]", &config, (gmi_comm_listener_t){ 0 }, &comm), GEMINI_OK);
  CHECK_EQ(comm.rank, 0);
  CHECK_EQ(comm.ranks, 1);
  CHECK_EQ(comm.ops->broadcast(comm.self, buffer, 1, 0, NULL, "a"), GEMINI_OK);
  CHECK_EQ(call(&comm, ALL_GATHER, buffer, "a"), GEMINI_OK);
  CHECK_EQ(calls_of(&t), 0);
  for (int f = REDUCE_SCATTER; f <= EXCHANGE; f++) {
    CHECK_EQ(call(&comm, f, buffer, "a"), GEMINI_OK);
    CHECK_EQ(t.calls[f], 1);
  }
  comm.ops->abort(comm.self, "no more");
  CHECK_EQ(comm.ops->known(comm.self), GEMINI_ERR_PEER);
  CHECK_SAYS(gmi_fail_message(), "rank 2 of 4: gave up: no more");
  close_comm(&comm);
}

int main(void) {
  RUN(test_arguments_arrive);
  RUN(test_nothing_to_do_is_not_called);
  RUN(test_every_failure_of_a_function_is_kept);
  RUN(test_an_exchange_that_did_nothing_is_noticed);
  RUN(test_success_leaves_the_last_error);
  RUN(test_abort_fails_every_later_call);
  RUN(test_wrong_arguments_are_refused);
  RUN(test_replicas_of_one_rank_sum);
  RUN(test_a_table_may_lack_what_is_not_needed);
  return check_done();
}
