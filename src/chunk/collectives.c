/* Collectives of groups: gathers of chunks and sums of gradients, queued on the groups' streams.
 * SPDX-License-Identifier: Apache-2.0
 *
 * src/chunk/group.c says how communicators that block, and those that queue, are called. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/group.h"
#include "chunk/residency.h"
#include "core/streams.h"

typedef enum { GATHER, GATHER_REST, GATHERS, REDUCE, REDUCE_REST } kind_t;
typedef struct {
  gmi_manager_t *manager;
  gmi_group_t *group;
  kind_t kind;
  uint32_t dtype;
  void *buffers[GMI_BUCKET_CHUNKS]; /* one; of GATHERS and REDUCE one or several */
  uint32_t buffer_count;
  uint64_t count; /* bytes, or values of dtype, of each buffer */
  char label[GMI_COMM_LABEL_BYTES];
} collective_t;

static bool is_gather(const collective_t *c) { return c->kind <= GATHERS; }
static const gmi_comm_t *comm_of(const collective_t *c) { return is_gather(c) ? &c->group->gather : &c->group->reduce; }

static gemini_status_t reduce(const collective_t *c, void *stream) {
  const gmi_comm_t *comm = comm_of(c);
  const gmi_comm_ops_t *ops = comm->ops;
  gemini_status_t status = GEMINI_OK;
  if (ops->reduce_scatters && c->buffer_count > 1)
    return ops->reduce_scatters(comm->self, c->buffers, c->buffer_count, c->count, c->dtype, GMI_REDUCE_SUM, stream,
                                c->label);
  for (uint32_t i = 0; !status && i < c->buffer_count; i++)
    status = ops->reduce_scatter(comm->self, c->buffers[i], c->count, c->dtype, GMI_REDUCE_SUM, stream, c->label);
  return status;
}
static gemini_status_t carry_out(const collective_t *c, void *stream) {
  const gmi_comm_t *comm = comm_of(c);
  const gmi_comm_ops_t *ops = comm->ops;
  switch (c->kind) {
  case GATHER: return ops->all_gather(comm->self, c->buffers[0], c->count, stream, c->label);
  case GATHER_REST: return ops->broadcast(comm->self, c->buffers[0], c->count, comm->ranks - 1, stream, c->label);
  case GATHERS: return ops->all_gathers(comm->self, c->buffers, c->buffer_count, c->count, stream, c->label);
  case REDUCE: return reduce(c, stream);
  case REDUCE_REST:
    return ops->all_reduce(comm->self, c->buffers[0], c->count, c->dtype, GMI_REDUCE_SUM, stream, c->label);
  }
  return GEMINI_OK;
}
/* The thread waits for other ranks in the communicator until it returns. function: as in gmi_wait_begin(). */
static gemini_status_t carry_out_watched(const collective_t *c, void *stream, const char *function) {
  gmi_wait_t wait;
  const char *what = is_gather(c) ? "a gather" : "a sum";
  gmi_wait_for_ranks(c->manager, &wait, function, c->group->rank, what, c->label);
  gemini_status_t status = carry_out(c, stream);
  gmi_wait_end(c->manager, &wait);
  return status;
}
static gemini_status_t run_collective(void *user) {
  collective_t *c = user;
  gemini_status_t status = carry_out_watched(c, NULL, "work of a stream");
  if (status) (void)gmi_group_spread_failure(c->group);
  free(c);
  return status;
}

/* On the stream of the device that has this index. The call may block until the communicator has queued its work. */
static gemini_status_t queue_natively(gmi_manager_t *m, uint32_t stream, const collective_t *c) {
  void *native = NULL;
  gemini_status_t status = m->device.ops->stream.native(m->device.self, stream, &native);
  if (status) return gmi_fail_device(status, "device %s does not name a group's stream", m->device.ops->name);
  return carry_out_watched(c, native, NULL);
}

static void label(gmi_manager_t *m, collective_t *c, const char *name, uint32_t chunk) {
  /* The same on all ranks, so without the operator where it depends on a rank's own progress when a sum is queued. */
  const char *op = is_gather(c) ? m->trace.advice->op_name(m) : NULL;
  snprintf(c->label, sizeof c->label, "%s%schunk %u of arena %s", op ? op : "", op ? ", " : "", chunk, name);
}

static gemini_status_t collective(gmi_manager_t *m, const collective_t *what) {
  const gmi_comm_t *comm = comm_of(what);
  const uint32_t stream = is_gather(what) ? what->group->gather_stream : what->group->reduce_stream;
  gemini_status_t status = comm->ops->known(comm->self); /* a failed group's calls would only be waited for */
  if (status) return status;
  if (comm->ops->queues) return queue_natively(m, stream, what);
  collective_t *c = malloc(sizeof *c);
  if (!c) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a collective's record");
  *c = *what;
  status = m->device.ops->queue.run(m->device.self, stream, run_collective, c);
  if (!status) return GEMINI_OK;
  free(c);
  return gmi_fail_device(status, "device %s could not queue a collective", m->device.ops->name);
}

void gmi_queued_add(gmi_queued_t *q, const char *label, uint32_t chunks, gmi_fence_t end) {
  const uint64_t i = q->calls++ % GMI_QUEUED;
  q->chunks += chunks;
  snprintf(q->at[i].label, sizeof q->at[i].label, "%s", label);
  q->at[i].chunks = chunks;
  q->at[i].end = end;
}

/* ---- gathers
 *
 * To queue one gather of NCCL's takes the calling thread about as long as to queue eight in a group of NCCL's. So
 * within a batch (gmi_gather_batch_begin()) gathers are held back until there are as many, or the batch ends, or a mark
 * is placed on their stream (core/streams.c). A chunk that is held back has arrived behind the mark that is placed
 * next. Should queueing fail, that mark is never reached, as the group has failed. */
static void drop_held(gmi_manager_t *m, gmi_group_t *g) {
  g->held.count = 0;
  m->groups.held_streams &= ~(UINT64_C(1) << g->gather_stream);
}
static gemini_status_t queue_held(gmi_manager_t *m, gmi_group_t *g) {
  gmi_fence_t end = 0;
  const uint32_t count = g->held.count;
  if (!count) return GEMINI_OK;
  drop_held(m, g); /* from the list */
  collective_t what = {
    .manager = m, .group = g, .kind = GATHERS, .buffer_count = count, .count = g->held.slice_bytes
  };
  memcpy(what.buffers, g->held.buffers, sizeof g->held.buffers);
  memcpy(what.label, g->held.label, sizeof what.label);
  gemini_status_t status = collective(m, &what);
  if (!status) status = gmi_fence_now(m, g->gather_stream, &end);
  if (status) return gmi_group_breaks_off(g, status);
  gmi_queued_add(&g->latest.gathers, what.label, count, end);
  m->trace.observer->span_queued(m, "gather", what.label, g->held.begin, end);
  gmi_time_work(m, (gmi_timed_t){ g->held.begin, end, count, NULL, &g->gathers.shortest_ns });
  return GEMINI_OK;
}
gemini_status_t gmi_group_queue_held(gmi_manager_t *m, uint32_t stream) {
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++)
    if (m->groups.at[i] && m->groups.at[i]->gather_stream == stream) status = queue_held(m, m->groups.at[i]);
  return status;
}

/* A batch that fails halfway: made again, the call would queue in two parts what other ranks queue together, or twice
 * what they queue once, and NCCL could mix up the bytes without a word. So no rank goes on. */
gemini_status_t gmi_gather_batch_fails(gmi_manager_t *m, gmi_group_t *g, gemini_status_t status) {
  if (!g->held.count) return status;
  drop_held(m, g);
  return gmi_group_breaks_off(g, status);
}

void gmi_gather_batch_begin(gmi_manager_t *m) { m->groups.batches++; }
gemini_status_t gmi_gather_batch_end(gmi_manager_t *m, gemini_status_t status, bool anew) {
  gmi_failure_t first;
  GMI_ASSERT(m->groups.batches);
  const uint64_t twice = status && anew ? m->groups.batch_streams : 0;
  if (--m->groups.batches == 0) m->groups.batch_streams = 0;
  if (!m->groups.held_streams && !twice) return status;
  gmi_fail_keep(status, &first);
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    gmi_group_t *g = m->groups.at[i];
    gemini_status_t queued = GEMINI_OK;
    if (!g) continue;
    /* Communicators whose calls block notice ranks that call different things. */
    const bool twice_here = twice >> g->gather_stream & 1 && g->gather.ops->queues && g->gather.ranks > 1;
    if (status && (g->held.count || twice_here)) {
      drop_held(m, g);
      gmi_group_give_up(g, first.message);
    }
    if (!status) queued = queue_held(m, g);
    if (queued && !first.status) gmi_fail_keep(queued, &first);
  }
  return gmi_fail_again(&first);
}

static gemini_status_t hold_back(gmi_manager_t *m, const collective_t *what, gmi_fence_t *arrive_out) {
  gmi_group_t *g = what->group;
  gemini_status_t status = GEMINI_OK;
  if (g->held.slice_bytes != what->count) status = queue_held(m, g);
  if (!status && !g->held.count) {
    status = gmi_fence_now(m, g->gather_stream, &g->held.begin);
    g->held.slice_bytes = what->count;
    memcpy(g->held.label, what->label, sizeof g->held.label);
  }
  if (status) return status;
  g->held.buffers[g->held.count++] = what->buffers[0];
  m->groups.held_streams |= UINT64_C(1) << g->gather_stream;
  *arrive_out = gmi_fence_later(m, g->gather_stream);
  return g->held.count < GMI_GATHERS_HELD ? GEMINI_OK : queue_held(m, g);
}

gemini_status_t gmi_group_gather(gmi_manager_t *m, gmi_group_t *g, void *buffer, uint64_t slice_bytes,
                                 uint64_t rest_bytes, const char *name, uint32_t chunk, gmi_fence_t *arrive_out) {
  gmi_fence_t begin = 0;
  collective_t what = { .manager = m, .group = g, .kind = GATHER, .buffers = { buffer }, .count = slice_bytes };
  label(m, &what, name, chunk);
  if (m->groups.batches) m->groups.batch_streams |= UINT64_C(1) << g->gather_stream;
  if (m->groups.batches && g->gather.ops->all_gathers && g->gather.ranks > 1 && !rest_bytes)
    return hold_back(m, &what, arrive_out);
  gemini_status_t status = gmi_fence_now(m, g->gather_stream, &begin); /* behind those that are held back */
  if (!status) status = collective(m, &what);
  if (status) return status;
  what.kind = GATHER_REST;
  what.buffers[0] = (uint8_t *)buffer + slice_bytes * g->gather.ranks;
  what.count = rest_bytes;
  if (rest_bytes) status = collective(m, &what);
  if (!status) status = gmi_fence_now(m, g->gather_stream, arrive_out);
  if (status) return g->gather.ranks > 1 ? gmi_group_breaks_off(g, status) : status; /* one rank can gather again */
  gmi_queued_add(&g->latest.gathers, what.label, 1, *arrive_out);
  m->trace.observer->span_queued(m, "gather", what.label, begin, *arrive_out);
  gmi_time_work(m, (gmi_timed_t){ begin, *arrive_out, 1, NULL, &g->gathers.shortest_ns });
  return GEMINI_OK;
}

/* ---- sums */
gemini_status_t gmi_group_reduce(gmi_manager_t *m, gmi_group_t *g, void *const *buffers, uint32_t buffer_count,
                                 uint64_t slice_count, uint32_t dtype, const char *name, uint32_t chunk) {
  collective_t what = { .manager = m, .group = g, .kind = REDUCE, .dtype = dtype, .count = slice_count };
  for (; what.buffer_count < buffer_count; what.buffer_count++)
    what.buffers[what.buffer_count] = buffers[what.buffer_count];
  label(m, &what, name, chunk);
  return collective(m, &what);
}
gemini_status_t gmi_group_reduce_rest(gmi_manager_t *m, gmi_group_t *g, void *buffer, uint64_t count, uint32_t dtype,
                                      const char *name, uint32_t chunk) {
  collective_t what = {
    .manager = m, .group = g, .kind = REDUCE_REST, .dtype = dtype, .buffers = { buffer }, .count = count
  };
  label(m, &what, name, chunk);
  return collective(m, &what);
}
