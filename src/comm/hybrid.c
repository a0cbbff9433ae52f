/* One of several replicas, over two communicators that queue. SPDX-License-Identifier: Apache-2.0
 *
 * A reduction is two calls on one stream: the second one begins, on the stream, when this replica's result is there. */
#include <errno.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/dtype.h"
#include "base/status.h"
#include "comm/comm.h"

typedef struct hybrid {
  gmi_comm_t inside, across;
} hybrid_t;

static gemini_status_t all_gather(void *self, void *buffer, uint64_t slice_bytes, void *stream, const char *label) {
  const gmi_comm_t *c = &((hybrid_t *)self)->inside;
  return c->ops->all_gather(c->self, buffer, slice_bytes, stream, label);
}
static gemini_status_t all_gathers(void *self, void *const *buffers, uint32_t count, uint64_t slice_bytes, void *stream,
                                   const char *label) {
  const gmi_comm_t *c = &((hybrid_t *)self)->inside;
  gemini_status_t status = GEMINI_OK;
  if (c->ops->all_gathers) return c->ops->all_gathers(c->self, buffers, count, slice_bytes, stream, label);
  for (uint32_t i = 0; !status && i < count; i++)
    status = c->ops->all_gather(c->self, buffers[i], slice_bytes, stream, label);
  return status;
}
static gemini_status_t broadcast(void *self, void *buffer, uint64_t bytes, uint32_t root, void *stream,
                                 const char *label) {
  const gmi_comm_t *c = &((hybrid_t *)self)->inside;
  return c->ops->broadcast(c->self, buffer, bytes, root, stream, label);
}
/* Adds this rank's slice, which has been added within the replica, over the replicas. */
static gemini_status_t reduce_across(const hybrid_t *h, void *buffer, uint64_t slice_count, uint32_t dtype,
                                     gmi_reduce_t how, void *stream, const char *label) {
  unsigned char *own = (unsigned char *)buffer + h->inside.rank * slice_count * gmi_dtype_bytes(dtype);
  return h->across.ops->all_reduce(h->across.self, own, slice_count, dtype, how, stream, label);
}
static gemini_status_t reduce_scatter(void *self, void *buffer, uint64_t slice_count, uint32_t dtype, gmi_reduce_t how,
                                      void *stream, const char *label) {
  const gmi_comm_t *c = &((hybrid_t *)self)->inside;
  gemini_status_t status = c->ops->reduce_scatter(c->self, buffer, slice_count, dtype, how, stream, label);
  return status ? status : reduce_across(self, buffer, slice_count, dtype, how, stream, label);
}
static gemini_status_t reduce_scatters(void *self, void *const *buffers, uint32_t count, uint64_t slice_count,
                                       uint32_t dtype, gmi_reduce_t how, void *stream, const char *label) {
  const gmi_comm_t *c = &((hybrid_t *)self)->inside;
  gemini_status_t status = c->ops->reduce_scatters(c->self, buffers, count, slice_count, dtype, how, stream, label);
  for (uint32_t i = 0; !status && i < count; i++)
    status = reduce_across(self, buffers[i], slice_count, dtype, how, stream, label);
  return status;
}
static gemini_status_t all_reduce(void *self, void *buffer, uint64_t count, uint32_t dtype, gmi_reduce_t how,
                                  void *stream, const char *label) {
  const hybrid_t *h = self;
  gemini_status_t status = h->inside.ops->all_reduce(h->inside.self, buffer, count, dtype, how, stream, label);
  return status ? status : h->across.ops->all_reduce(h->across.self, buffer, count, dtype, how, stream, label);
}
static gemini_status_t exchange(void *self, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  const hybrid_t *h = self;
  unsigned char *replica = malloc(h->inside.ranks * bytes + 1);
  if (!replica)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an exchange of %u ranks", h->inside.ranks);
  gemini_status_t status = h->inside.ops->exchange(h->inside.self, mine, bytes, replica, label);
  if (!status) status = h->across.ops->exchange(h->across.self, replica, h->inside.ranks * bytes, all_out, label);
  free(replica);
  return status;
}

static gemini_status_t poll_failure(void *self) {
  const hybrid_t *h = self;
  gemini_status_t status = h->inside.ops->poll(h->inside.self);
  return status ? status : h->across.ops->poll(h->across.self);
}
static gemini_status_t known_failure(void *self) {
  const hybrid_t *h = self;
  gemini_status_t status = h->inside.ops->known(h->inside.self);
  return status ? status : h->across.ops->known(h->across.self);
}
static void abort_both(void *self, const char *why) {
  const hybrid_t *h = self;
  h->inside.ops->abort(h->inside.self, why);
  h->across.ops->abort(h->across.self, why);
}
static void hybrid_close(void *self) {
  hybrid_t *h = self;
  if (!h) return;
  h->inside.ops->close(h->inside.self);
  h->across.ops->close(h->across.self);
  free(h);
}

static const gmi_comm_ops_t hybrid_ops = {
  .name = "replicas",
  .queues = true,
  .all_gather = all_gather,
  .all_gathers = all_gathers,
  .broadcast = broadcast,
  .reduce_scatter = reduce_scatter,
  .reduce_scatters = reduce_scatters,
  .all_reduce = all_reduce,
  .exchange = exchange,
  .poll = poll_failure,
  .known = known_failure,
  .abort = abort_both,
  .close = hybrid_close,
};

gemini_status_t gmi_comm_hybrid_open(gmi_comm_t inside, gmi_comm_t across, gmi_comm_t *comm_out) {
  hybrid_t *h = malloc(sizeof *h);
  GMI_ASSERT(inside.ops->queues && across.ops->queues);
  if (!h) {
    inside.ops->close(inside.self);
    across.ops->close(across.self);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a communicator");
  }
  *h = (hybrid_t){ inside, across };
  *comm_out = (gmi_comm_t){ &hybrid_ops, h, inside.rank, inside.ranks };
  return GEMINI_OK;
}
