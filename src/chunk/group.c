/* Groups of ranks: joining and leaving, their streams and communicators. SPDX-License-Identifier: Apache-2.0
 *
 * A communicator that does not queue its calls on a device's stream blocks until all ranks have made the call. Such a
 * call runs as a function on one of the group's streams, so the calling thread never waits for other ranks, except in
 * gemini_group_open() and in exchanges. If the call fails, the stream fails with it, and what depends on the stream is
 * never reported complete; gmi_groups_failure() says why.
 *
 * A communicator that queues is called with the manager's lock, and the stream goes on after a failure, with bytes that
 * nobody has written. So the device is told before that can happen (distrust()), and what it is not known to have done
 * by then is never reported complete either.
 *
 * But over shared memory, a thread polls the communicators: one that is not polled does not notice that a deadline has
 * passed, and whoever waits for its work would wait for ever. When one has failed, the thread aborts the others. */
#include "chunk/group.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "base/clock.h"
#include "base/thread.h"
#include "chunk/group_check.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "comm/nccl_library.h"
#include "core/streams.h"
#include "gemini/group.h"

/* ---- what a gemini_group_id_t holds */
typedef struct names {
  uint32_t transport;
  uint32_t ranks; /* over NCCL; ids of shared memory have them themselves */
  gmi_comm_id_t gather, reduce, exchange;
} names_t;
_Static_assert(sizeof(names_t) <= GEMINI_GROUP_ID_BYTES, "an id holds it");
_Static_assert((int)GMI_COMM_RANKS == (int)GEMINI_GROUP_RANKS, "one limit");

static gemini_status_t id_make(uint32_t transport, uint32_t ranks, gemini_group_id_t *id_out) {
  if (!id_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "id_out is NULL");
  if (transport > GEMINI_TRANSPORT_NCCL)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "transport is %u, must be 0 to %d", transport, GEMINI_TRANSPORT_NCCL);
  if (!ranks || ranks > GEMINI_GROUP_RANKS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranks is %u, must be 1 to %d", ranks, GEMINI_GROUP_RANKS);
  names_t names = { .transport = transport };
  gemini_status_t status;
  if (transport == GEMINI_TRANSPORT_NCCL) {
    names.ranks = ranks;
    status = gmi_comm_nccl_id(&names.gather);
    if (!status) status = gmi_comm_nccl_id(&names.reduce);
    if (!status) status = gmi_comm_nccl_id(&names.exchange);
  } else {
    status = gmi_comm_shared_id(ranks, &names.gather);
    if (!status) status = gmi_comm_shared_id(ranks, &names.reduce);
  }
  if (status) return status;
  memset(id_out, 0, sizeof *id_out);
  memcpy(id_out, &names, sizeof names);
  return GEMINI_OK;
}
gemini_status_t gemini_group_id_make(uint32_t transport, uint32_t ranks, gemini_group_id_t *id_out) {
  API_RETURN(id_make(transport, ranks, id_out));
}

/* ---- handles */
gmi_group_t *gmi_group_get(gmi_manager_t *m, gemini_group_t handle) {
  uint32_t index;
  uint64_t generation;
  if (!gmi_handle_open(m, handle, GMI_HANDLE_GROUP, &index, &generation)) return NULL;
  gmi_group_t *g = m->groups.at[index];
  if (g && g->generation == generation) return g;
  gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is a closed group", (unsigned long long)gmi_id(handle));
  return NULL;
}

static gemini_status_t poll_comm(const gmi_comm_t *comm) { return comm->ops ? comm->ops->poll(comm->self) : GEMINI_OK; }
gemini_status_t gmi_group_failure(const gmi_group_t *g) {
  gemini_status_t status = poll_comm(&g->gather);
  if (!status) status = poll_comm(&g->reduce);
  return status ? status : poll_comm(&g->exchange);
}
void gmi_group_give_up(const gmi_group_t *g, const char *why) {
  const gmi_comm_t *const comms[] = { &g->gather, &g->reduce, &g->exchange };
  for (int i = 0; i < 3; i++)
    if (comms[i]->ops) comms[i]->ops->abort(comms[i]->self, why);
}
gemini_status_t gmi_group_breaks_off(const gmi_group_t *g, gemini_status_t status) {
  gmi_failure_t why;
  gmi_fail_keep(status, &why);
  gmi_group_give_up(g, why.message);
  return gmi_fail_again(&why);
}
gemini_status_t gmi_group_spread_failure(const gmi_group_t *g) {
  gmi_failure_t first;
  gmi_fail_keep(gmi_group_failure(g), &first);
  if (first.status) gmi_group_give_up(g, first.message);
  return gmi_fail_again(&first);
}
gemini_status_t gmi_groups_failure(gmi_manager_t *m) {
  gemini_status_t status = GEMINI_OK;
  if (!m->groups.gather_streams) return GEMINI_OK; /* no group is open */
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++)
    if (m->groups.at[i]) status = gmi_group_spread_failure(m->groups.at[i]);
  return status;
}

gemini_status_t gmi_groups_known(gmi_manager_t *m) {
  for (uint32_t i = 0; m->groups.gather_streams && i < GMI_GROUPS; i++) {
    const gmi_group_t *g = m->groups.at[i];
    const gmi_comm_t *const comms[] = { g ? &g->gather : NULL, g ? &g->reduce : NULL, g ? &g->exchange : NULL };
    for (int k = 0; g && k < 3; k++)
      if (comms[k]->ops && comms[k]->ops->known(comms[k]->self)) return gmi_group_spread_failure(g);
  }
  return GEMINI_OK;
}

/* ---- open and close */
enum { WATCH_NS = 50000000 /* between two polls */ };
static void *watch_main(void *user) {
  gmi_group_t *g = user;
  bool failed = false;
  pthread_mutex_lock(&g->watch.lock);
  while (!g->watch.ends) {
    const uint64_t until_ns = gmi_now_ns() + WATCH_NS;
    const struct timespec until = { (time_t)(until_ns / 1000000000), (long)(until_ns % 1000000000) };
    if (!pthread_cond_timedwait(&g->watch.ended, &g->watch.lock, &until)) continue;
    pthread_mutex_unlock(&g->watch.lock);
    failed = failed || gmi_group_spread_failure(g);
    pthread_mutex_lock(&g->watch.lock);
  }
  pthread_mutex_unlock(&g->watch.lock);
  if (!failed) (void)gmi_group_spread_failure(g);
  return NULL;
}

/* Not for shared memory, whose communicators notice by themselves what happens. */
static gemini_status_t watch_start(gmi_group_t *g) {
  if (!g->exchange.ops) return GEMINI_OK;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&g->watch.ended, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&g->watch.lock, NULL);
  int error = gmi_thread_start(&g->watch.thread, watch_main, g);
  if (!error) {
    g->watch.runs = true;
    return GEMINI_OK;
  }
  pthread_cond_destroy(&g->watch.ended);
  pthread_mutex_destroy(&g->watch.lock);
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "no thread to watch a group");
}

static void watch_stop(gmi_group_t *g) {
  if (!g->watch.runs) return;
  pthread_mutex_lock(&g->watch.lock);
  g->watch.ends = true;
  pthread_cond_signal(&g->watch.ended);
  pthread_mutex_unlock(&g->watch.lock);
  pthread_join(g->watch.thread, NULL);
  pthread_cond_destroy(&g->watch.ended);
  pthread_mutex_destroy(&g->watch.lock);
}

static void group_free(gmi_group_t *g) {
  const gmi_comm_t *const comms[] = { &g->gather, &g->reduce, &g->exchange };
  gmi_group_check_close(g);
  watch_stop(g);
  gmi_registered_end(g);
  for (int i = 0; i < 3; i++)
    if (comms[i]->ops) comms[i]->ops->close(comms[i]->self);
  free(g->reports);
  free(g);
}

/* Urgent: a collective's kernel that is begun late on one rank keeps those of the others waiting on their GPUs, where
 * they take room from the operators. */
static gemini_status_t streams_open(gmi_manager_t *m, gmi_group_t *g) {
  gemini_status_t status = gmi_stream_open(m, GMI_STREAM_URGENT, NULL, &g->gather_stream);
  if (status) return status;
  status = gmi_stream_open(m, GMI_STREAM_URGENT, NULL, &g->reduce_stream);
  if (status) {
    (void)gmi_stream_end(m, g->gather_stream);
    return status;
  }
  m->groups.gather_streams |= UINT64_C(1) << g->gather_stream;
  m->groups.reduce_streams |= UINT64_C(1) << g->reduce_stream;
  return GEMINI_OK;
}

static gemini_status_t check_config(const gemini_group_config_t *c) {
  const int given = !!c->id + !!c->nccl_comms + !!c->comms;
  const uint32_t unknown = c->flags & ~(uint32_t)(GEMINI_GROUP_RANK_ORDER | GEMINI_GROUP_REGISTER);
  if (unknown) return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", unknown);
  if (c->shard_ranks && c->ranks % c->shard_ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "shard_ranks is %u, must divide ranks, %u", c->shard_ranks, c->ranks);
  if (c->shard_ranks && c->rank >= c->ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "rank is %u, must be below ranks, %u", c->rank, c->ranks);
  if (!given) return gmi_fail(GEMINI_ERR_INVALID, 0, "id is NULL, and so are nccl_comms and comms");
  if (given > 1)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s and %s are given: a group has one sort of communicators",
                    c->id ? "id" : "nccl_comms", c->comms ? "comms" : "nccl_comms");
  return GEMINI_OK;
}

static gemini_status_t shared_join(gmi_manager_t *m, const gemini_group_config_t *c, const names_t *names,
                                   gmi_group_t *g) {
  const gmi_comm_config_t config = { c->rank, c->ranks, c->deadline_ns, c->shard_ranks };
  if (!m->device.ops->queue.run)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "groups over shared memory need the simulated device, not device %s, which GEMINI_TRANSPORT_NCCL "
                    "serves",
                    m->device.ops->name);
  if (c->flags & GEMINI_GROUP_REGISTER)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "flags has GEMINI_GROUP_REGISTER: groups over shared memory register nothing");
  gemini_status_t status = gmi_comm_shared_join(&names->gather, &config, &g->gather);
  if (!status) return gmi_comm_shared_join(&names->reduce, &config, &g->reduce);
  if (status == GEMINI_ERR_PEER && !c->rank) gmi_comm_shared_id_end(&names->reduce); /* the group is over */
  return status;
}

/* Queued work is about to end without being done. While the group is being formed there is none. */
static void distrust(void *user) {
  gmi_group_t *g = user;
  gmi_manager_t *m = atomic_load(&g->tells);
  if (m) m->device.ops->stream.distrust(m->device.self);
}

/* The communicators of NCCL that a group needs, in the order of nccl_comms. */
enum { OF_GATHERS, OF_SUMS, OF_EXCHANGES, OF_SUMS_ACROSS };
_Static_assert(OF_SUMS_ACROSS + 1 == GEMINI_GROUP_HYBRID_COMMS, "and all of them");
static bool has_replicas(const gemini_group_config_t *c) { return c->shard_ranks && c->shard_ranks < c->ranks; }

/* Thread blocks of a collective's kernel. While it runs, and waits for other ranks, these take multiprocessors from the
 * operators, of which a matrix product needs all at once. NCCL would take 24 on an H100, for a rate that a step needs
 * for small parts of its time only; measured in bench/results/2026-11-26-ranks-h100.md. */
enum { GATHER_BLOCKS = 8, SUM_BLOCKS = 4 };

/* Joins one of them, or adopts the caller's. */
static gemini_status_t nccl_open(gmi_manager_t *m, const gemini_group_config_t *c, const gmi_comm_id_t *id, int which,
                                 gmi_group_t *g, gmi_comm_t *comm_out) {
  const uint32_t shard = has_replicas(c) ? c->shard_ranks : 0;
  gmi_comm_nccl_config_t config = { .rank = c->rank,
                                    .ranks = c->ranks,
                                    .deadline_ns = c->deadline_ns,
                                    .device = (int32_t)m->config.device_ordinal,
                                    .named = c->rank,
                                    .named_of = c->ranks,
                                    .listener = { distrust, g } };
  if (shard && which != OF_EXCHANGES) config.rank = c->rank % shard, config.ranks = shard;
  if (which == OF_SUMS_ACROSS) config.rank = c->rank / shard, config.ranks = c->ranks / shard;
  const bool sums = which == OF_SUMS || which == OF_SUMS_ACROSS;
  config.most_blocks = sums ? SUM_BLOCKS : GATHER_BLOCKS;
  config.rank_order = sums && c->flags & GEMINI_GROUP_RANK_ORDER;
  if (id) return gmi_comm_nccl_join(id, &config, comm_out);
  gemini_status_t status = gmi_comm_nccl_adopt(c->nccl_comms[which], &config, comm_out);
  if (status) gmi_fail_prefix("nccl_comms[%d]: ", which);
  return status;
}

/* What ranks of replicas tell each other before they make further communicators. */
typedef struct {
  uint32_t shard_ranks;
  int32_t status; /* of the ids that this rank makes */
  gmi_comm_id_t gathers, sums, across;
} offer_t;
/* The first rank of a replica names its communicators, each rank of the first replica one of those across replicas.
 * Those of the first replica have been named by whoever made the group's id. */
static gemini_status_t make_offer(const gemini_group_config_t *c, const names_t *names, offer_t *offer) {
  gemini_status_t status = GEMINI_OK;
  *offer = (offer_t){ .shard_ranks = c->shard_ranks, .gathers = names->gather, .sums = names->reduce };
  if (c->rank && c->rank % c->shard_ranks == 0) {
    status = gmi_comm_nccl_id(&offer->gathers);
    if (!status) status = gmi_comm_nccl_id(&offer->sums);
  }
  if (!status && c->rank < c->shard_ranks) status = gmi_comm_nccl_id(&offer->across);
  offer->status = status;
  return status;
}
/* Over the communicator of exchanges, which all ranks have joined. names becomes those of this rank's communicators. */
static gemini_status_t names_meet(const gemini_group_config_t *c, const gmi_group_t *g, names_t *names,
                                  gmi_comm_id_t *across_out) {
  offer_t mine, *all = calloc(c->ranks, sizeof *all);
  if (!all) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the names of %u ranks", c->ranks);
  gmi_failure_t own;
  gmi_fail_keep(make_offer(c, names, &mine), &own);
  gemini_status_t status = g->exchange.ops->exchange(g->exchange.self, &mine, sizeof mine, all, "gemini_group_open");
  if (own.status) status = gmi_fail_again(&own);
  for (uint32_t r = 0; !status && r < c->ranks; r++) {
    if (all[r].shard_ranks != c->shard_ranks)
      status = gmi_fail(GEMINI_ERR_PEER, 0, "ranks differ: rank %u joins with shard_ranks %u, rank %u with %u", c->rank,
                        c->shard_ranks, r, all[r].shard_ranks);
    else if (all[r].status)
      status = gmi_fail(GEMINI_ERR_PEER, 0, "rank %u could not name a communicator of NCCL: %s", r,
                        gemini_status_string(all[r].status));
  }
  if (!status) {
    const offer_t *first = &all[c->rank / c->shard_ranks * c->shard_ranks];
    names->gather = first->gathers;
    names->reduce = first->sums;
    *across_out = all[c->rank % c->shard_ranks].across;
  }
  free(all);
  return status;
}

/* names: of communicators to join; NULL: the caller's are adopted. */
static gemini_status_t nccl_join(gmi_manager_t *m, const gemini_group_config_t *c, names_t *names, gmi_group_t *g) {
  const bool hybrid = has_replicas(c);
  if (m->config.device != GEMINI_DEVICE_CUDA)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "groups over NCCL need a GPU, not device %s, which GEMINI_TRANSPORT_SHARED serves",
                    m->device.ops->name);
  if (names && names->ranks != c->ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranks is %u, but id was made for %u", c->ranks, names->ranks);
  const gmi_nccl_library_t *library = gmi_nccl_library();
  if (!library) return GEMINI_ERR_UNSUPPORTED;
  if (c->flags & GEMINI_GROUP_REGISTER && !library->register_memory)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "flags has GEMINI_GROUP_REGISTER, which needs NCCL 2.19 or later");
  for (int i = 0; !names && i < GEMINI_GROUP_COMMS + hybrid; i++)
    for (int k = 0; k < i; k++)
      if (c->nccl_comms[i] == c->nccl_comms[k])
        return gmi_fail(GEMINI_ERR_INVALID, 0, "nccl_comms[%d] and nccl_comms[%d] are the same communicator", k, i);
  gmi_comm_id_t across_id;
  gmi_comm_t across;
  gemini_status_t status = GEMINI_OK;
  if (hybrid && names) { /* exchanges come first, as the others' names are brought over them */
    status = nccl_open(m, c, &names->exchange, OF_EXCHANGES, g, &g->exchange);
    if (!status) status = names_meet(c, g, names, &across_id);
  }
  if (!status) status = nccl_open(m, c, names ? &names->gather : NULL, OF_GATHERS, g, &g->gather);
  if (!status) status = nccl_open(m, c, names ? &names->reduce : NULL, OF_SUMS, g, &g->reduce);
  if (!status && !g->exchange.ops)
    status = nccl_open(m, c, names ? &names->exchange : NULL, OF_EXCHANGES, g, &g->exchange);
  if (status || !hybrid) return status;
  status = nccl_open(m, c, names ? &across_id : NULL, OF_SUMS_ACROSS, g, &across);
  if (status) return status;
  const gmi_comm_t inside = g->reduce;
  g->reduce.ops = NULL; /* the new one owns it */
  return gmi_comm_hybrid_open(inside, across, &g->reduce);
}

/* Do the tables' ranks agree on who they are? */
static gemini_status_t callers_meet(const gemini_group_config_t *c, const gmi_group_t *g) {
  typedef struct {
    uint32_t rank, ranks;
  } who_t;
  const who_t mine = { c->rank, c->ranks };
  who_t *all = calloc(c->ranks, sizeof *all);
  if (!all) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the values of %u ranks", c->ranks);
  gemini_status_t status = g->exchange.ops->exchange(g->exchange.self, &mine, sizeof mine, all, "gemini_group_open");
  for (uint32_t r = 0; !status && r < c->ranks; r++)
    if (all[r].rank != r || all[r].ranks != c->ranks)
      status = gmi_fail(GEMINI_ERR_INVALID, 0, "comms[2]: exchange() gives rank %u of %u in the place of rank %u of %u",
                        all[r].rank, all[r].ranks, r, c->ranks);
  free(all);
  return status;
}

static gemini_status_t callers_join(gmi_manager_t *m, const gemini_group_config_t *c, gmi_group_t *g) {
  static const uint32_t needs[] = { GMI_COMM_NEEDS_GATHERS, GMI_COMM_NEEDS_SUMS, GMI_COMM_NEEDS_EXCHANGES };
  gmi_comm_t *const comms[] = { &g->gather, &g->reduce, &g->exchange };
  const bool gpu = m->config.device == GEMINI_DEVICE_CUDA;
  if (c->flags & GEMINI_GROUP_RANK_ORDER)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "flags is %#x: the functions of comms choose the order of sums", c->flags);
  if (c->deadline_ns)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "deadline_ns is %llu, must be 0: the functions of comms end their waits themselves",
                    (unsigned long long)c->deadline_ns);
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) {
    char name[24];
    snprintf(name, sizeof name, "comms[%d]", i);
    const gmi_comm_listener_t listener = { distrust, g };
    const gmi_comm_config_t config = { c->rank, c->ranks, 0, i == OF_EXCHANGES ? 0 : c->shard_ranks };
    const uint32_t memory = i == OF_GATHERS && c->flags & GEMINI_GROUP_REGISTER ? GMI_COMM_NEEDS_MEMORY : 0;
    gemini_status_t status = gmi_comm_caller_open(c->comms[i], needs[i] | memory, name, &config, listener, comms[i]);
    if (status) return status;
    if (comms[i]->ops->queues && !gpu)
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                      "%s has the flag GEMINI_COMM_QUEUES, but device %s has no native streams to queue on", name,
                      m->device.ops->name);
    if (!comms[i]->ops->queues && comms[i] != &g->exchange && !m->device.ops->queue.run)
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                      "%s lacks the flag GEMINI_COMM_QUEUES: device %s needs functions that queue on its streams", name,
                      m->device.ops->name);
  }
  return callers_meet(c, g);
}

static gemini_status_t join(gmi_manager_t *m, const gemini_group_config_t *c, gmi_group_t *g) {
  names_t names;
  if (c->nccl_comms) return nccl_join(m, c, NULL, g);
  if (c->comms) return callers_join(m, c, g);
  memcpy(&names, c->id, sizeof names);
  if (names.transport == GEMINI_TRANSPORT_SHARED) return shared_join(m, c, &names, g);
  if (names.transport == GEMINI_TRANSPORT_NCCL && names.ranks) return nccl_join(m, c, &names, g);
  return gmi_fail(GEMINI_ERR_INVALID, 0, "id was not made by gemini_group_id_make()");
}

/* Joins without the lock, as it waits for other processes, and enters the group into the manager's table with it. */
static gemini_status_t group_open(gmi_manager_t *m, const gemini_group_config_t *theirs, gemini_group_t *group_out) {
  gemini_group_config_t c;
  if (!group_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "group_out is NULL");
  gemini_status_t status = gmi_struct_in(&c, sizeof c, theirs, GMI_V1_GROUP_CONFIG, "config");
  if (!status) status = check_config(&c);
  if (status) return status;
  gmi_group_t *g = calloc(1, sizeof *g);
  if (!g) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a group's record");
  g->rank = c.rank;
  g->ranks = c.ranks;
  g->bucket_bytes = c.bucket_bytes;
  g->registered.wanted = c.flags & GEMINI_GROUP_REGISTER;
  gmi_wait_t wait;
  gmi_wait_for_ranks(m, &wait, "gemini_group_open", c.rank, NULL, NULL);
  status = join(m, &c, g);
  gmi_wait_end(m, &wait);
  if (!status && !(g->reports = calloc(g->ranks, sizeof *g->reports)))
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the reports of %u ranks", g->ranks);
  if (m->device.ops->stream.distrust) atomic_store(&g->tells, m);
  if (!status) status = watch_start(g);
  if (!status) status = gmi_group_check_open(g);
  gmi_lock(m, "gemini_group_open");
  while (!status && g->index < GMI_GROUPS && m->groups.at[g->index]) g->index++;
  if (!status && g->index == GMI_GROUPS)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "%u groups are open, the limit is %u", GMI_GROUPS, GMI_GROUPS);
  if (!status) status = streams_open(m, g);
  if (!status) {
    if (!m->groups.generations[g->index]) m->groups.generations[g->index] = m->identity.generation_before;
    g->generation = ++m->groups.generations[g->index];
    m->groups.at[g->index] = g;
    atomic_store(&m->groups.who[g->index], g->rank | (uint64_t)g->ranks << 16 | (uint64_t)g->gather.ranks << 32);
    *group_out = gmi_handle(m, GMI_HANDLE_GROUP, g->generation, g->index);
  }
  gmi_unlock(m);
  if (!status) return GEMINI_OK;
  /* The others may have opened theirs: else they would hear that this rank has left, and not why. */
  if (c.id) status = gmi_group_breaks_off(g, status);
  gmi_failure_t first;
  gmi_fail_keep(status, &first);
  group_free(g);
  return gmi_fail_again(&first);
}
gemini_status_t gemini_group_open(gemini_manager_t mgr, const gemini_group_config_t *config,
                                  gemini_group_t *group_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? group_open(m, config, group_out) : GEMINI_ERR_HANDLE);
}

/* A stream whose collective failed is idle, too: its failure does not keep the group open. */
static gemini_status_t group_close(gmi_manager_t *m, gemini_group_t handle) {
  gmi_group_t *g = gmi_group_get(m, handle);
  if (!g) return GEMINI_ERR_HANDLE;
  if (g->arenas)
    return gmi_fail(GEMINI_ERR_BUSY, 0, "%u arenas are sharded over the group: destroy them first", g->arenas);
  if (g->exchanging) return gmi_fail(GEMINI_ERR_BUSY, 0, "an exchange of the group is under way");
  gmi_forget_collectives(m, g);
  m->groups.at[g->index] = NULL;
  atomic_store(&m->groups.who[g->index], 0);
  (void)gmi_stream_end(m, g->gather_stream);
  (void)gmi_stream_end(m, g->reduce_stream);
  m->groups.gather_streams &= ~(UINT64_C(1) << g->gather_stream);
  m->groups.reduce_streams &= ~(UINT64_C(1) << g->reduce_stream);
  group_free(g);
  return GEMINI_OK;
}
gemini_status_t gemini_group_close(gemini_manager_t mgr, gemini_group_t group) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!group) return GEMINI_OK;
  gmi_lock(m, __func__);
  gemini_status_t status = group_close(m, group);
  gmi_unlock(m);
  API_RETURN(status);
}

void gmi_groups_close(gmi_manager_t *m) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    if (m->groups.at[i]) group_free(m->groups.at[i]);
    m->groups.at[i] = NULL;
  }
}

/* ---- exchanges */
static gemini_status_t group_exchange(gmi_manager_t *m, gemini_group_t handle, const void *mine, uint64_t size_bytes,
                                      void *all_out) {
  if ((!mine || !all_out) && size_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL but size_bytes is %llu", mine ? "all_out" : "mine",
                    (unsigned long long)size_bytes);
  gmi_lock(m, "gemini_group_exchange");
  gmi_group_t *g = gmi_group_get(m, handle);
  gemini_status_t status = g ? GEMINI_OK : GEMINI_ERR_HANDLE;
  if (g) status = gmi_group_failure(g);
  if (!status && size_bytes > INT64_MAX / g->ranks)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is %llu, must be at most %llu for %u ranks",
                      (unsigned long long)size_bytes, (unsigned long long)INT64_MAX / g->ranks, g->ranks);
  if (!status && g->exchanging)
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "another thread's exchange of the group is under way");
  if (!status) g->exchanging = true;
  gmi_unlock(m);
  if (status) return status;
  gmi_wait_t wait;
  gmi_wait_for_ranks(m, &wait, "gemini_group_exchange", g->rank, "an exchange", NULL);
  const gmi_comm_t *comm = g->exchange.ops ? &g->exchange : &g->gather;
  if (g->exchange.ops) status = gmi_group_check_settle(g); /* it has the same communicator */
  if (!status) status = comm->ops->exchange(comm->self, mine, size_bytes, all_out, "gemini_group_exchange");
  gmi_wait_end(m, &wait);
  gmi_failure_t first;
  gmi_fail_keep(status, &first);
  gmi_lock(m, "gemini_group_exchange");
  g->exchanging = false;
  gmi_unlock(m);
  return gmi_fail_again(&first);
}
gemini_status_t gemini_group_exchange(gemini_manager_t mgr, gemini_group_t group, const void *mine, uint64_t size_bytes,
                                      void *all_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? group_exchange(m, group, mine, size_bytes, all_out) : GEMINI_ERR_HANDLE);
}

/* Without a third communicator it is the reduce communicator's, so that it may overlap a gemini_group_exchange() of
 * another thread. With one it must not: other ranks might have the two in the other order. */
gemini_status_t gmi_group_exchange_locked(gmi_manager_t *m, gmi_group_t *g, const void *mine, uint64_t size_bytes,
                                          void *all_out, const char *label) {
  gmi_wait_t wait;
  const gmi_comm_t *comm = g->exchange.ops ? &g->exchange : &g->reduce;
  if (g->exchanging && comm == &g->exchange)
    return gmi_fail(GEMINI_ERR_BUSY, 0, "another thread's exchange of the group is under way");
  gmi_wait_for_ranks(m, &wait, NULL, g->rank, "an exchange", label);
  gemini_status_t status = gmi_group_check_settle(g);
  if (!status) status = comm->ops->exchange(comm->self, mine, size_bytes, all_out, label);
  gmi_wait_end(m, &wait);
  return status;
}

/* Replicas that differ go on to differ: the group fails. */
static gemini_status_t replicas_differ(const gmi_group_t *g, uint32_t rank, const double *all, const char *label) {
  const uint32_t other = rank % g->reduce.ranks;
  char why[GMI_GROUP_WHY_BYTES];
  snprintf(
      why, sizeof why,
      "replicas differ: ranks %u and %u have the same slices of %.96s, but other bytes in them: their squares add up "
      "to %.17g and %.17g",
      other, rank, label, all[other], all[rank]);
  gmi_group_give_up(g, why);
  return gmi_fail(GEMINI_ERR_PEER, 0, "%s", why);
}
gemini_status_t gmi_group_sum(gmi_manager_t *m, gmi_group_t *g, const char *label, double *sum) {
  const uint32_t shard = g->reduce.ranks;
  double *all = calloc(g->ranks, sizeof *all);
  if (!all) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the values of %u ranks", g->ranks);
  gemini_status_t status = gmi_group_exchange_locked(m, g, sum, sizeof *sum, all, label);
  if (!status) *sum = 0;
  for (uint32_t r = 0; !status && r < g->ranks; r++) {
    if (r < shard) *sum += all[r];
    else if (all[r] != all[r % shard] && !(isnan(all[r]) && isnan(all[r % shard])))
      status = replicas_differ(g, r, all, label);
  }
  free(all);
  return status;
}

static gemini_status_t group_stats(gmi_manager_t *m, gemini_group_t handle, gemini_group_stats_t *stats_out) {
  const gmi_group_t *g = gmi_group_get(m, handle);
  if (!g) return GEMINI_ERR_HANDLE;
  gemini_group_stats_t stats = { .struct_size = sizeof stats,
                                 .rank = g->rank,
                                 .ranks = g->ranks,
                                 .shard_ranks = g->gather.ranks,
                                 .gathered_chunks = g->gathered_chunks,
                                 .gathered_bytes = g->gathered_bytes,
                                 .reduced_chunks = g->reduced_chunks,
                                 .fetched_bytes = g->fetched_bytes,
                                 .stored_bytes = g->stored_bytes,
                                 .reduced_bytes = g->reduced_bytes,
                                 .planned_gathered_bytes = g->planned.gathered,
                                 .planned_reduced_bytes = g->planned.reduced,
                                 .planned_fetched_bytes = g->planned.fetched,
                                 .gather_wait_ns = g->waits.gather_ns,
                                 .sum_wait_ns = g->waits.sum_ns,
                                 .bucket_chunks = atomic_load(&m->cut.chunk_bytes) ? gmi_bucket_chunks(m, g) : 0,
                                 .plan_changes = g->planned.changes };
  return gmi_struct_out(stats_out, &stats, sizeof stats, GMI_V1_GROUP_STATS, "stats_out");
}
gemini_status_t gemini_group_stats(gemini_manager_t mgr, gemini_group_t group, gemini_group_stats_t *stats_out) {
  API_LOCKED(group_stats(m, group, stats_out));
}

/* ---- what is waited for */
void gmi_group_sum_ends(gmi_group_t *g, gmi_fence_t fence) {
  const uint32_t count = sizeof g->waits.sum_ends / sizeof *g->waits.sum_ends;
  g->waits.sum_ends[g->waits.sum_next++ % count] = fence;
}

static bool is_behind_sum(gmi_manager_t *m, const gmi_group_t *g, gmi_fence_t fence) {
  for (size_t i = 0; i < sizeof g->waits.sum_ends / sizeof *g->waits.sum_ends; i++) {
    const gmi_fence_t sum = g->waits.sum_ends[i];
    if (sum && gmi_fence_stream(sum) == gmi_fence_stream(fence) && gmi_fence_mark(sum) <= gmi_fence_mark(fence) &&
        !gmi_fence_reached(m, sum))
      return true;
  }
  return false;
}

void gmi_group_sum_delays(gmi_manager_t *m, gmi_group_t *g, gmi_fence_t other, gmi_fence_t fence) {
  if (is_behind_sum(m, g, other)) gmi_group_sum_ends(g, fence);
}

gmi_group_t *gmi_group_waited(gmi_manager_t *m, gmi_fence_t fence, gmi_group_wait_t *what_out) {
  const uint32_t stream = gmi_fence_stream(fence);
  for (uint32_t i = 0; m->groups.gather_streams && i < GMI_GROUPS; i++) {
    gmi_group_t *g = m->groups.at[i];
    if (!g) continue;
    *what_out = g->gather_stream == stream ? GMI_WAITS_GATHER : GMI_WAITS_SUM;
    if (g->gather_stream == stream || g->reduce_stream == stream || is_behind_sum(m, g, fence)) return g;
  }
  return NULL;
}
