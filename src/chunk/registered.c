/* Frames at addresses that a communicator knows (GEMINI_GROUP_REGISTER). SPDX-License-Identifier: Apache-2.0
 *
 * A chunk is gathered where it is mapped, and that address has another frame today than it had yesterday. What a
 * communicator registers, such as NCCL, is the memory that is behind an address when it is registered, with all ranks:
 * mapping other memory there would have it write into the frame of before. So a frame of such a group has an address of
 * its own beside those of chunks, which maps it as long as it exists. Gathers run there, and what they leave is read at
 * the chunk's address by work behind them: the device makes writes of finished work visible at all addresses.
 *
 * A frame is registered at its first gather and until it is destroyed or the group ends. Where that fails, gathers run
 * at the chunks' addresses, as without the flag: it costs time, not bytes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/group.h"
#include "core/streams.h"

typedef struct gmi_registration {
  void *handle; /* of the communicator */
  bool made;
} registration_t;

/* Gives the frame its address. It keeps it also if no communicator can register it. */
static gemini_status_t address_make(gmi_manager_t *m, gmi_frame_t *f) {
  const gmi_device_ops_t *ops = m->device.ops;
  const uint64_t bytes = gmi_frame_bytes(m);
  void *own;
  gemini_status_t status = f->own ? GEMINI_OK : ops->memory.reserve(m->device.self, bytes, &own);
  if (f->own || status) return status;
  status = ops->memory.map(m->device.self, own, f->handle, bytes);
  if (status) (void)ops->memory.unreserve(m->device.self, own, bytes);
  else f->own = own;
  return status;
}

static gemini_status_t room_make(gmi_manager_t *m, gmi_group_t *g) {
  if (g->registered.capacity >= m->frames.capacity) return GEMINI_OK;
  registration_t *at = realloc(g->registered.at, m->frames.capacity * sizeof *at);
  if (!at) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for records of registered frames");
  memset(at + g->registered.capacity, 0, (m->frames.capacity - g->registered.capacity) * sizeof *at);
  g->registered.at = at;
  g->registered.capacity = m->frames.capacity;
  return GEMINI_OK;
}

static gemini_status_t register_frame(gmi_manager_t *m, gmi_group_t *g, uint32_t frame) {
  gemini_status_t status = address_make(m, &m->frames.at[frame]);
  if (status) return gmi_fail_device(status, "device %s could not map a frame once more", m->device.ops->name);
  status = room_make(m, g);
  if (status) return status;
  registration_t *r = &g->registered.at[frame];
  if (!r->made)
    status = g->gather.ops->register_memory(g->gather.self, m->frames.at[frame].own, gmi_frame_bytes(m), &r->handle);
  r->made = !status;
  return status;
}

void *gmi_registered_address(gmi_manager_t *m, gmi_group_t *g, uint32_t frame) {
  if (!g->registered.wanted) return NULL;
  if (!register_frame(m, g, frame)) return m->frames.at[frame].own;
  g->registered.wanted = false;
  if (!gmi_group_failure(g))
    gmi_log(m, GEMINI_LOG_WARNING, "group %u registers no more frames: %s", g->index, gmi_fail_message());
  return NULL;
}

static void forget(const gmi_group_t *g, registration_t *r) {
  if (r->made) g->gather.ops->unregister_memory(g->gather.self, r->handle);
  *r = (registration_t){ NULL, false };
}

void gmi_registered_leave(gmi_manager_t *m, uint32_t frame) {
  gmi_frame_t *f = &m->frames.at[frame];
  if (!f->own) return;
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    const gmi_group_t *g = m->groups.at[i];
    if (g && frame < g->registered.capacity) forget(g, &g->registered.at[frame]);
  }
  if (m->device.ops->memory.unreserve(m->device.self, f->own, gmi_frame_bytes(m))) return; /* it stays mapped there */
  f->own = NULL;
}

void gmi_registered_end(gmi_group_t *g) {
  for (uint32_t i = 0; i < g->registered.capacity; i++) forget(g, &g->registered.at[i]);
  free(g->registered.at);
  g->registered.at = NULL;
  g->registered.capacity = 0;
}
