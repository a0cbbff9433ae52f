/* Groups of ranks for tests, as threads or as processes. SPDX-License-Identifier: Apache-2.0 */
#ifndef COMM_WORLD_H
#define COMM_WORLD_H

#include <pthread.h>
#include <time.h>

#include "base/status.h"
#include "comm/comm.h"
#include "fork.h"

enum { COMM_WORLD_RANKS = 8 };
#define COMM_WORLD_DEADLINE_NS UINT64_C(60000000000) /* no test waits for it, unless it sets a shorter one */

typedef void (*comm_rank_fn)(gmi_comm_t *comm, void *user);

typedef struct comm_rank {
  gmi_comm_id_t id;
  gmi_comm_config_t config;
  comm_rank_fn fn;
  void *user;
} comm_rank_t;

static inline void *comm_world_rank(void *user) {
  comm_rank_t *r = user;
  gmi_comm_t comm;
  CHECK_EQ(gmi_comm_shared_join(&r->id, &r->config, &comm), GEMINI_OK);
  const uint32_t shard = gmi_comm_shard_ranks(r->config.ranks, r->config.shard_ranks);
  CHECK_EQ(comm.rank, r->config.rank % shard);
  CHECK_EQ(comm.ranks, shard);
  r->fn(&comm, r->user);
  comm.ops->close(comm.self);
  return NULL;
}

static inline gmi_comm_id_t comm_world_id(uint32_t ranks) {
  gmi_comm_id_t id;
  CHECK_EQ(gmi_comm_shared_id(ranks, &id), GEMINI_OK);
  return id;
}

/* Runs fn as each rank of a group, in a thread each. */
static inline void comm_world_threads(uint32_t ranks, comm_rank_fn fn, void *user) {
  pthread_t threads[COMM_WORLD_RANKS];
  comm_rank_t rank[COMM_WORLD_RANKS];
  gmi_comm_id_t id = comm_world_id(ranks);
  for (uint32_t r = 0; r < ranks; r++) {
    rank[r] = (comm_rank_t){ id, { r, ranks, COMM_WORLD_DEADLINE_NS, 0 }, fn, user };
    CHECK(!pthread_create(&threads[r], NULL, comm_world_rank, &rank[r]));
  }
  for (uint32_t r = 0; r < ranks; r++) CHECK(!pthread_join(threads[r], NULL));
}

/* The same in a process each, whose numbers are stored at pids_out; rank 0 is this process, which returns when its fn
 * has. The caller waits for the children. */
static inline void comm_world_processes(uint32_t ranks, uint64_t deadline_ns, comm_rank_fn fn, void *user,
                                        pid_t *pids_out) {
  gmi_comm_id_t id = comm_world_id(ranks);
  pids_out[0] = getpid();
  for (uint32_t r = 1; r < ranks; r++) {
    pids_out[r] = fork_child();
    if (pids_out[r]) continue;
    comm_rank_t child = { id, { r, ranks, deadline_ns, 0 }, fn, user };
    comm_world_rank(&child);
    exit(0);
  }
  comm_rank_t first = { id, { 0, ranks, deadline_ns, 0 }, fn, user };
  comm_world_rank(&first);
}

#endif
