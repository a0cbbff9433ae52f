/* CUDA graphs that fetch chunks during replay, into a ring of frames that the graph owns.
 * SPDX-License-Identifier: Apache-2.0
 *
 * During capture, an acquire assigns each chunk it reads one ring frame for the life of the graph: among those without
 * an acquired chunk, the least recently used one. A copy from the chunk's slot into the frame becomes a node of the
 * graph, behind the last use of the frame's previous chunk. Several chunks take turns in one ring frame, in the order
 * of the capture; the order repeats in every replay. A replay begins with empty ring frames and copies everything it
 * reads, so it sees what host memory holds then.
 *
 * The graph's nodes contain addresses, on the device and on the host, which must stay valid. So its chunks keep their
 * host slots while it exists (gmi_chunk_graphs_add()), and gemini_graph_enter() maps ring frames at their device
 * addresses again where something else was mapped since. Between enter and leave the chunks are held as if written on
 * the host, so no other call can use them on the device.
 *
 * Threads: any thread that holds the manager's lock. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "chunk/arena.h"
#include "chunk/content.h"
#include "chunk/cut.h"
#include "chunk/graph.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/streams.h"
#include "gemini/graph.h"

enum { NAME_LIMIT = 127 };
/* OPEN: from begin to end, READY: between end and destroy, ENTERED: between enter and leave of a replay. */
enum { GRAPH_OPEN, GRAPH_READY, GRAPH_ENTERED };

/* A chunk that a graph uses. Either kept, or assigned to a ring frame by its first acquire in the capture. */
typedef struct {
  gmi_chunk_t *chunk;
  uint32_t ring_index;       /* its ring frame; GMI_NONE: none yet, or kept */
  uint32_t readers, writers; /* acquires inside the capture, not yet released */
  bool kept;                 /* acquired before the capture: it stays in its own frame and has no ring frame */
  bool written;              /* kept, and acquired for writing inside the capture */
  bool reserved[2];
} part_t;
typedef struct {
  uint32_t frame, part; /* part: index of the chunk in it at this point of the capture; GMI_NONE: none yet */
  uint64_t used;        /* when it was released last, on the graph's clock */
} ring_frame_t;
/* A tensor whose bytes may hold its parameter or its gradient (arenas that reuse). A replay must find the one that the
 * capture found. */
typedef struct {
  uint32_t index, life;
  bool gradient;
  bool reserved[3];
} content_t;

typedef struct gmi_graph {
  uint64_t generation;
  uint32_t index, state, stream, reserved; /* stream: of the capture, then of the last replay */
  void *capture;                           /* the device's record of the capture, until the graph has ended */
  gemini_status_t failure;                 /* of the capture; the graph can then only be destroyed */
  uint32_t ring_count, part_count, part_capacity, content_count, content_capacity;
  ring_frame_t *ring;
  part_t *parts;
  content_t *contents;
  uint64_t clock, copies; /* clock: releases so far, for the least recently used ring frame; copies: nodes per replay */
  gmi_fence_t left;       /* behind the last replay: guards ring frames and slots */
  char op[NAME_LIMIT + 1]; /* the operator that is open in its capture, while graphs.op_of is this graph */
} gmi_graph_t;

static const char *name_of(gmi_manager_t *m, const gmi_chunk_t *c) { return gmi_chunk_arena(m, c)->name; }

static gmi_graph_t *graph_get(gmi_manager_t *m, gemini_graph_t handle) {
  uint32_t index;
  uint64_t generation;
  if (!gmi_handle_open(m, handle, GMI_HANDLE_GRAPH, &index, &generation)) return NULL;
  gmi_graph_t *g = m->graphs.at[index];
  if (g && g->generation == generation) return g;
  gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is a destroyed graph", (unsigned long long)handle);
  return NULL;
}

/* The graph that is begun on the stream and not ended, or NULL. */
static gmi_graph_t *graph_on(gmi_manager_t *m, uint32_t stream) {
  for (uint32_t i = 0; i < GMI_GRAPHS; i++)
    if (m->graphs.at[i] && m->graphs.at[i]->state == GRAPH_OPEN && m->graphs.at[i]->stream == stream)
      return m->graphs.at[i];
  return NULL;
}

gemini_status_t gmi_graph_captures(gmi_manager_t *m, uint32_t stream, bool *captures_out) {
  gmi_graph_t *g = gmi_graph_begun(m, stream) ? graph_on(m, stream) : NULL;
  *captures_out = false;
  return g ? m->device.ops->capture.active(m->device.self, g->capture, captures_out) : GEMINI_OK;
}

bool gmi_graph_uses_stream(const gmi_manager_t *m, uint32_t stream) {
  for (uint32_t i = 0; i < GMI_GRAPHS; i++)
    if (m->graphs.at[i] && m->graphs.at[i]->state != GRAPH_READY && m->graphs.at[i]->stream == stream) return true;
  return false;
}
bool gmi_graphs_busy(const gmi_manager_t *m) {
  for (uint32_t i = 0; i < GMI_GRAPHS; i++)
    if (m->graphs.at[i] && m->graphs.at[i]->state != GRAPH_READY) return true;
  return false;
}

static gemini_status_t free_for_graph(gmi_manager_t *m, const gmi_chunk_t *c) {
  const char *why = gmi_chunk_busy(c, GMI_TO_USE_IN_GRAPH);
  return why ? gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", name_of(m, c), why) : GEMINI_OK;
}

/* ---- begin, end, destroy */
static void graph_free(gmi_manager_t *m, gmi_graph_t *g) {
  if (g->capture) m->device.ops->capture.close(m->device.self, g->capture);
  for (uint32_t i = 0; i < g->ring_count; i++) gmi_frame_give(m, g->ring[i].frame, g->left);
  m->graphs.frames -= g->ring_count;
  for (uint32_t i = 0; i < g->part_count; i++) gmi_chunk_graphs_sub(g->parts[i].chunk);
  if (g->state == GRAPH_OPEN) atomic_fetch_and(&m->graphs.streams, ~(UINT64_C(1) << g->stream));
  gmi_lease_drop_graph(&m->leases, g->index + 1);
  m->graphs.at[g->index] = NULL;
  if (m->graphs.op_of == g) m->graphs.op_of = NULL;
  m->graphs.count--;
  free(g->ring);
  free(g->parts);
  free(g->contents);
  free(g);
}

void gmi_graphs_free(gmi_manager_t *m) {
  for (uint32_t i = 0; i < GMI_GRAPHS; i++)
    if (m->graphs.at[i]) graph_free(m, m->graphs.at[i]);
}

static gemini_status_t graph_begin(gmi_manager_t *m, gemini_stream_t stream, uint64_t device_bytes,
                                   gemini_graph_t *graph_out) {
  uint32_t s, index = 0;
  if (!graph_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "graph_out is NULL");
  if (!m->device.ops->capture.open)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "device %s has no graphs", m->device.ops->name);
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  if (status) return status;
  if (s == GMI_CALLER) return gmi_fail(GEMINI_ERR_INVALID, 0, "GEMINI_STREAM_CALLER cannot be captured");
  if (graph_on(m, s)) return gmi_fail(GEMINI_ERR_STATE, 0, "another graph was begun on this stream and has not ended");
  while (index < GMI_GRAPHS && m->graphs.at[index]) index++;
  if (index == GMI_GRAPHS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u graphs exist, the limit is %u", GMI_GRAPHS, GMI_GRAPHS);
  status = gmi_cut(m);
  if (status) return status;
  uint64_t count = device_bytes / gmi_frame_bytes(m);
  if (!count)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device_bytes is %llu, less than a chunk, %llu",
                    (unsigned long long)device_bytes, (unsigned long long)gmi_frame_bytes(m));
  if (count > m->frames.count) return gmi_oom_device(m, device_bytes);
  /* Place a mark now: none can be placed during the capture, and a fence of this stream that other calls wait for then
   * needs one. This also detects a capture that has begun already. */
  gmi_fence_t end;
  status = gmi_fence_now(m, s, &end);
  if (status == GEMINI_ERR_STATE)
    return gmi_fail(status, 0, "the stream is being captured: a graph begins before its capture");
  if (status) return status;
  gmi_graph_t *g = calloc(1, sizeof *g);
  ring_frame_t *ring = calloc(count, sizeof *ring);
  if (!g || !ring) {
    free(g);
    free(ring);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a graph's record");
  }
  g->index = index;
  g->generation = ++m->graphs.generations[index];
  g->ring = ring;
  g->stream = s;
  m->graphs.at[index] = g;
  m->graphs.count++;
  atomic_fetch_or(&m->graphs.streams, UINT64_C(1) << s);
  status = m->device.ops->capture.open(m->device.self, s, (uint32_t)count, &g->capture);
  for (; !status && g->ring_count < count; g->ring_count += !status) {
    ring_frame_t *p = &ring[g->ring_count];
    p->part = GMI_NONE;
    status = gmi_frame_take(m, NULL, GEMINI_REASON_CALLER, GMI_TAKE_EVICT, &p->frame);
    m->graphs.frames += !status;
  }
  bool taken = !status;
  if (taken) status = m->trace.observer->budgets_change(m); /* plans must do without the ring frames */
  if (status) {
    char message[440];
    int64_t native_code = gmi_fail_code();
    memcpy(message, gmi_fail_message(), sizeof message);
    graph_free(m, g);
    if (taken) (void)m->trace.observer->budgets_change(m);
    return gmi_fail(status, native_code, "%s", message);
  }
  *graph_out = gmi_handle(m, GMI_HANDLE_GRAPH, g->generation, g->index);
  return GEMINI_OK;
}
gemini_status_t gemini_graph_begin(gemini_manager_t mgr, gemini_stream_t stream, uint64_t device_bytes,
                                   gemini_graph_t *graph_out) {
  API_LOCKED(graph_begin(m, stream, device_bytes, graph_out));
}

/* Fails with refusal while the graph's stream is being captured, for this graph or another. */
static gemini_status_t not_capturing(gmi_manager_t *m, const gmi_graph_t *g, gemini_status_t refusal) {
  bool active = false;
  gemini_status_t status = m->device.ops->capture.active(m->device.self, g->capture, &active);
  return active || status == GEMINI_ERR_STATE
             ? gmi_fail(refusal, 0, "the graph's stream is still being captured: end the capture first")
             : status;
}

static gemini_status_t graph_end(gmi_manager_t *m, gemini_graph_t handle) {
  gmi_graph_t *g = graph_get(m, handle);
  if (!g) return GEMINI_ERR_HANDLE;
  if (g->state != GRAPH_OPEN) return gmi_fail(GEMINI_ERR_STATE, 0, "the graph has ended already");
  if (g->failure)
    return gmi_fail(GEMINI_ERR_STATE, 0, "the device refused a part of the capture: the graph can only be destroyed");
  gemini_status_t status = not_capturing(m, g, GEMINI_ERR_STATE);
  if (status) return status;
  m->device.ops->capture.close(m->device.self, g->capture);
  g->capture = NULL;
  g->state = GRAPH_READY;
  atomic_fetch_and(&m->graphs.streams, ~(UINT64_C(1) << g->stream));
  if (m->graphs.op_of == g) m->graphs.op_of = NULL;
  gmi_lease_drop_graph(&m->leases, g->index + 1); /* acquires that the capture did not release end here */
  for (uint32_t i = 0; i < g->part_count; i++) {
    part_t *p = &g->parts[i];
    if (p->readers && !p->kept) gmi_chunk_graph_unhold(m, p->chunk);
    p->readers = p->writers = 0;
    /* As after a replay: the address still maps the ring frame, but the chunk does not own it. Nothing has run, so
     * there is no fence. */
    if (p->ring_index != GMI_NONE && gmi_chunk_mapping(p->chunk)->frame_1 == g->ring[p->ring_index].frame + 1)
      gmi_map_leave(m, gmi_chunk_device(m, p->chunk), gmi_chunk_mapping(p->chunk), 0);
  }
  return GEMINI_OK;
}
gemini_status_t gemini_graph_end(gemini_manager_t mgr, gemini_graph_t graph) { API_LOCKED(graph_end(m, graph)); }

static gemini_status_t graph_destroy(gmi_manager_t *m, gemini_graph_t handle) {
  if (!handle) return GEMINI_OK;
  gmi_graph_t *g = graph_get(m, handle);
  if (!g) return GEMINI_ERR_HANDLE;
  if (g->state == GRAPH_ENTERED) return gmi_fail(GEMINI_ERR_BUSY, 0, "the graph is entered");
  gemini_status_t status = g->state == GRAPH_OPEN ? not_capturing(m, g, GEMINI_ERR_BUSY) : GEMINI_OK;
  if (status) return status;
  for (uint32_t i = 0; i < g->part_count; i++) {
    gmi_chunk_t *c = g->parts[i].chunk;
    if (g->parts[i].readers && !g->parts[i].kept) gmi_chunk_graph_unhold(m, c);
    gmi_chunk_graphs_sub(c);
    gmi_host_released(m, c);
  }
  g->part_count = 0;
  graph_free(m, g);
  gmi_updates_room(m);
  if (m->trace.observer->budgets_change(m))
    gmi_log(m, GEMINI_LOG_WARNING, "after a graph was destroyed: %s", gmi_fail_message());
  return GEMINI_OK;
}
gemini_status_t gemini_graph_destroy(gemini_manager_t mgr, gemini_graph_t graph) {
  API_LOCKED(graph_destroy(m, graph));
}

/* ---- inside a capture: acquires and releases that add nodes to the graph */
static const char *op_name(gmi_manager_t *m, const gmi_graph_t *g) {
  const char *op = m->graphs.op_of == g ? g->op : m->trace.advice->op_name(m);
  return op ? op : "a captured operator";
}

gemini_status_t gmi_graph_op_begin(gmi_manager_t *m, uint32_t stream, const char *name) {
  gmi_graph_t *g = graph_on(m, stream);
  size_t length = name ? strnlen(name, NAME_LIMIT + 1) : 0;
  if (!length || length > NAME_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "an operator's name must have 1 to %d bytes", NAME_LIMIT);
  if (m->graphs.op_of) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open already", m->graphs.op_of->op);
  memcpy(g->op, name, length + 1);
  m->graphs.op_of = g;
  return GEMINI_OK;
}
bool gmi_graph_op_end(gmi_manager_t *m) {
  bool open = m->graphs.op_of;
  m->graphs.op_of = NULL;
  return open;
}

static part_t *part_find(const gmi_graph_t *g, const gmi_chunk_t *c) {
  for (uint32_t i = 0; i < g->part_count; i++)
    if (g->parts[i].chunk == c) return &g->parts[i];
  return NULL;
}

static gemini_status_t no_memory(void) {
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a graph's record");
}

/* Finds the graph's part_t of a chunk, or adds one. */
static gemini_status_t part_take(gmi_graph_t *g, gmi_chunk_t *c, part_t **part_out) {
  *part_out = part_find(g, c);
  if (*part_out) return GEMINI_OK;
  part_t *parts = gmi_array_room(g->parts, g->part_count, &g->part_capacity, sizeof *parts);
  if (!parts) return no_memory();
  g->parts = parts;
  gmi_chunk_graphs_add(c);
  *part_out = &g->parts[g->part_count++];
  **part_out = (part_t){ .chunk = c, .ring_index = GMI_NONE, .kept = gmi_chunk_device_users(c) };
  return GEMINI_OK;
}

static bool still_acquired(const part_t *p, bool write) {
  return write ? gmi_chunk_has_writers(p->chunk) : gmi_chunk_device_users(p->chunk) > 0;
}

/* Counts an acquire of a chunk inside the capture. The first one of a chunk that is not kept evicts it, because the
 * graph needs only its addresses (a ring frame on the device, a slot on the host), and nothing reads its bytes now. */
static gemini_status_t part_hold(gmi_manager_t *m, gmi_graph_t *g, const gemini_access_t *access, gmi_chunk_t *c) {
  part_t *p;
  bool write = access->mode & GEMINI_WRITE;
  gemini_status_t status = part_take(g, c, &p);
  if (status) return status;
  if (write && !(p->kept && still_acquired(p, true)))
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "%s: a chunk of arena %s is written in a graph: acquire it for writing before the capture begins",
                    op_name(m, g), name_of(m, c));
  if (p->kept && !still_acquired(p, false))
    return gmi_fail(GEMINI_ERR_STATE, 0, "a chunk of arena %s was released in the middle of the capture",
                    name_of(m, c));
  if (!p->kept && !p->readers) {
    status = free_for_graph(m, c);
    if (!status) status = gmi_chunk_evict(m, c, GEMINI_REASON_DEMAND);
    if (!status) status = gmi_host_slot_take(m, c);
    if (status) return status;
    gmi_chunk_graph_hold(m, c);
  }
  p->readers += !write;
  p->writers += write;
  p->written |= write;
  return GEMINI_OK;
}

/* Counts a release; true when it was the last one of a chunk with a ring frame. */
static bool part_drop(gmi_manager_t *m, part_t *p, uint32_t mode) {
  if (mode & GEMINI_WRITE) p->writers--;
  else p->readers--;
  if (p->kept || p->readers) return false;
  gmi_chunk_graph_unhold(m, p->chunk);
  return true;
}

static bool ring_frame_is_used(const gmi_graph_t *g, const ring_frame_t *taken) {
  return taken->part != GMI_NONE && g->parts[taken->part].readers;
}

static gemini_status_t too_small(gmi_manager_t *m, const gmi_graph_t *g) {
  uint64_t need = 0;
  for (uint32_t i = 0; i < g->part_count; i++) need += !g->parts[i].kept && g->parts[i].readers;
  return gmi_fail(GEMINI_ERR_OOM_DEVICE, 0,
                  "%s: the chunks acquired at once need %llu bytes, the graph was begun with %llu", op_name(m, g),
                  (unsigned long long)(need * gmi_frame_bytes(m)),
                  (unsigned long long)(g->ring_count * gmi_frame_bytes(m)));
}

/* Assigns the chunk a ring frame if it has none, and adds the copy into it to the capture. What comes later in the
 * capture is not known, so the least recently used frame is chosen, which is as good as knowing the future for
 * operators that run in order, or in order and back. The assignment cannot change, so a chunk whose ring frame holds
 * another acquired chunk is refused. */
static gemini_status_t part_fetch(gmi_manager_t *m, gmi_graph_t *g, uint32_t part) {
  part_t *p = &g->parts[part];
  gmi_chunk_t *c = p->chunk;
  uint32_t at = p->ring_index;
  for (uint32_t i = 0; p->ring_index == GMI_NONE && i < g->ring_count; i++)
    if (!ring_frame_is_used(g, &g->ring[i]) && (at == GMI_NONE || g->ring[i].used < g->ring[at].used)) at = i;
  if (at == GMI_NONE) return too_small(m, g);
  ring_frame_t *taken = &g->ring[at];
  if (ring_frame_is_used(g, taken)) {
    const gmi_chunk_t *other = g->parts[taken->part].chunk;
    return gmi_fail(GEMINI_ERR_OOM_DEVICE, 0,
                    "%s: chunks of arena %s at %llu and of %s at %llu share one frame of the graph, and are acquired "
                    "at once: begin the graph with more than %llu bytes",
                    op_name(m, g), name_of(m, c), (unsigned long long)c->index << m->cut.chunk_shift, name_of(m, other),
                    (unsigned long long)other->index << m->cut.chunk_shift,
                    (unsigned long long)(g->ring_count * gmi_frame_bytes(m)));
  }
  gemini_status_t status = gmi_map(m, gmi_chunk_device(m, c), taken->frame, gmi_chunk_mapping(c));
  if (status) return status;
  status = m->device.ops->capture.fetch(m->device.self, g->capture, at, gmi_chunk_device(m, c), gmi_chunk_host(m, c),
                                        gmi_copy_bytes(m, GEMINI_TIER_HOST, GEMINI_TIER_DEVICE));
  if (status && status != GEMINI_ERR_STATE) g->failure = status; /* the capture may contain part of the copy */
  if (status) return status;
  p->ring_index = at;
  taken->part = part;
  g->copies++;
  return GEMINI_OK;
}

static gemini_status_t usable(const gmi_graph_t *g) {
  return g->failure ? gmi_fail(GEMINI_ERR_STATE, 0,
                               "the device refused an earlier part of this capture: end it and destroy the graph")
                    : GEMINI_OK;
}

/* Checks the mode and tier of an access inside a capture, and resolves its range. */
static gemini_status_t resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *r) {
  if (access->mode < GEMINI_READ || access->mode > GEMINI_READ_WRITE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "mode is %u, must be 1 to 3", access->mode);
  if (access->tier != GEMINI_TIER_DEVICE)
    return gmi_fail(GEMINI_ERR_STATE, 0, "tier is %u, must be GEMINI_TIER_DEVICE inside a capture", access->tier);
  return gmi_range_resolve(m, access, r);
}

static bool has_content(gmi_manager_t *m, const content_t *c) {
  gmi_tensor_t *t = &m->tensors.at[c->index];
  if (atomic_load(&t->life) != c->life) return true; /* unregistered since: nothing is known of its bytes */
  return !(atomic_load(&gmi_tensor_base(m, t)->word) & GMI_TENSOR_GRADIENT) == !c->gradient;
}
static gemini_status_t wrong_content(gmi_manager_t *m, const content_t *c) {
  const char *name = gmi_tensor_base(m, &m->tensors.at[c->index])->name;
  return gmi_fail(GEMINI_ERR_STATE, 0,
                  c->gradient ? "gradient of %s cannot be used: its parameter has been written since"
                              : "parameter %s cannot be used: its gradient has taken its bytes",
                  name);
}
/* Records whether a range that is read holds parameters or their gradients, so that each replay can check it. Fails if
 * the range does not hold what the access names. */
typedef struct {
  gmi_graph_t *graph;
  bool gradient;
  gemini_status_t status;
} content_add_t;
static void content_add_one(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  content_add_t *add = user;
  gmi_graph_t *g = add->graph;
  content_t c = { .index = (uint32_t)(t - m->tensors.at), .life = atomic_load(&t->life), .gradient = add->gradient };
  if (add->status) return;
  if (!has_content(m, &c)) {
    add->status = wrong_content(m, &c);
    return;
  }
  for (uint32_t i = 0; i < g->content_count; i++)
    if (g->contents[i].index == c.index && g->contents[i].life == c.life) return;
  content_t *contents = gmi_array_room(g->contents, g->content_count, &g->content_capacity, sizeof *contents);
  if (!contents) {
    add->status = no_memory();
    return;
  }
  g->contents = contents;
  contents[g->content_count++] = c;
}
static gemini_status_t content_add(gmi_manager_t *m, gmi_graph_t *g, const gmi_range_t *r) {
  content_add_t add = { .graph = g, .gradient = r->arena->store != r->arena->index };
  if (gmi_range_shares(r)) gmi_range_each(m, r, content_add_one, &add);
  return add.status;
}

static gmi_lease_key_t lease_of(gmi_manager_t *m, const gmi_graph_t *g, const gemini_access_t *access,
                                const gmi_range_t *r) {
  gmi_lease_key_t key = gmi_range_key(m, access, r);
  key.graph_1 = g->index + 1;
  return key;
}

/* Holds all chunks first, then assigns ring frames: first to chunks that have one already, so that chunks without do
 * not take it. A failure undoes the holds and the leases. */
gemini_status_t gmi_graph_acquire(gmi_manager_t *m, gemini_access_t *accesses, uint64_t count, uint32_t stream) {
  gmi_graph_t *g = graph_on(m, stream);
  gemini_status_t status = usable(g);
  gmi_range_t r = { 0 };
  uint64_t held = 0, leased = 0; /* chunks, in the order of the ranges; accesses */
  for (uint64_t k = 0; !status && k < count; k++) {
    status = resolve(m, &accesses[k], &r);
    if (!status && !(accesses[k].mode & GEMINI_WRITE)) status = content_add(m, g, &r);
    gmi_lease_key_t key = lease_of(m, g, &accesses[k], &r);
    if (!status) status = gmi_lease_add(&m->leases, &key);
    leased += !status;
    for (uint64_t i = r.first; !status && i <= r.last; i++) {
      status = part_hold(m, g, &accesses[k], &r.store->chunks[i]);
      held += !status;
    }
  }
  for (int pass = 0; pass < 2; pass++) { /* first the chunks that have a ring frame, then those that need one */
    for (uint32_t i = 0; !status && i < g->part_count; i++) {
      const part_t *p = &g->parts[i];
      bool there = p->ring_index != GMI_NONE && g->ring[p->ring_index].part == i;
      if (p->readers && !p->kept && !there && (pass || p->ring_index != GMI_NONE)) status = part_fetch(m, g, i);
    }
  }
  for (uint64_t k = 0; k < (status ? leased : count); k++) {
    if (gmi_range_resolve(m, &accesses[k], &r)) break; /* never: it has succeeded under the same lock */
    if (!status) accesses[k].ptr = r.store->base + r.offset;
    for (uint64_t i = r.first; status && held && i <= r.last; i++, held--)
      part_drop(m, part_find(g, &r.store->chunks[i]), accesses[k].mode);
    gmi_lease_key_t key = lease_of(m, g, &accesses[k], &r);
    if (status && gmi_lease_claim(&m->leases, &key)) gmi_lease_end(&m->leases, &key);
  }
  return status;
}

/* In two passes, as a release outside a capture: claims all acquires, or none, then ends them. The last release of a
 * chunk marks its ring frame as free from this point of the capture on. */
gemini_status_t gmi_graph_release(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count, uint32_t stream) {
  gmi_graph_t *g = graph_on(m, stream);
  gemini_status_t status = GEMINI_OK;
  gmi_range_t r = { 0 };
  uint64_t claimed = 0;
  for (; !status && claimed < count; claimed += !status) {
    status = resolve(m, &accesses[claimed], &r);
    if (status) break;
    gmi_lease_key_t key = lease_of(m, g, &accesses[claimed], &r);
    if (!gmi_lease_claim(&m->leases, &key))
      status = gmi_fail(GEMINI_ERR_STATE, 0,
                        "%llu bytes at offset %llu of arena %s were not acquired with this mode inside this capture; "
                        "ranges acquired before the capture must be released after it",
                        (unsigned long long)r.size, (unsigned long long)r.offset, r.arena->name);
  }
  while (status && claimed-- > 0) {
    if (gmi_range_resolve(m, &accesses[claimed], &r)) break; /* never, as above */
    gmi_lease_key_t key = lease_of(m, g, &accesses[claimed], &r);
    gmi_lease_unclaim(&m->leases, &key);
  }
  if (status) return status;
  for (uint64_t k = 0; k < count; k++) {
    if (gmi_range_resolve(m, &accesses[k], &r)) break; /* never, as above */
    gmi_lease_key_t key = lease_of(m, g, &accesses[k], &r);
    gmi_lease_end(&m->leases, &key);
    for (uint64_t i = r.first; i <= r.last; i++) {
      part_t *p = part_find(g, &r.store->chunks[i]);
      if (!part_drop(m, p, accesses[k].mode)) continue;
      g->ring[p->ring_index].used = ++g->clock;
      if (status) continue; /* a failed device call does not keep the other chunks from being released */
      status = m->device.ops->capture.used(m->device.self, g->capture, p->ring_index);
      if (status && status != GEMINI_ERR_STATE) g->failure = status;
    }
  }
  return status;
}

/* ---- replays */
/* Checks all conditions of a replay before anything changes: the tensors' contents, and that kept chunks are acquired
 * as in the capture and the others are not in use. */
static gemini_status_t enter_check(gmi_manager_t *m, const gmi_graph_t *g) {
  if (g->state == GRAPH_OPEN)
    return gmi_fail(GEMINI_ERR_STATE, 0, "the graph's capture has not ended: gemini_graph_end()");
  if (g->state == GRAPH_ENTERED) return gmi_fail(GEMINI_ERR_STATE, 0, "the graph is entered already");
  for (uint32_t i = 0; i < g->content_count; i++)
    if (!has_content(m, &g->contents[i])) return wrong_content(m, &g->contents[i]);
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < g->part_count; i++) {
    const part_t *p = &g->parts[i];
    if (!p->kept) status = free_for_graph(m, p->chunk);
    else if (!still_acquired(p, p->written))
      status = gmi_fail(GEMINI_ERR_STATE, 0,
                        "a chunk of arena %s must be acquired%s during replays, as it was during the capture",
                        name_of(m, p->chunk), p->written ? " for writing" : "");
  }
  return status;
}

/* Queues the updates of the graph's chunks that were left to later callers, before a ring frame is mapped: beside a
 * piece, a plan may fetch any chunk, also one of the graph's that no update is left of. Callbacks run without the lock
 * meanwhile, so the conditions are checked again. */
static gemini_status_t queue_updates(gmi_manager_t *m, const gmi_graph_t *g) {
  gemini_status_t status = GEMINI_OK;
  for (bool queued = true; !status && queued;) {
    queued = false;
    for (uint32_t i = 0; !status && i < g->part_count; i++) {
      if (g->parts[i].ring_index == GMI_NONE || !gmi_chunk_deferred(g->parts[i].chunk)) continue;
      queued = true;
      status = gmi_updates_queue(m, g->parts[i].chunk);
    }
    if (!status && queued) status = enter_check(m, g);
  }
  return status;
}

/* Brings the chunk's newest bytes to its slot and maps its ring frame at its address, in time for what is queued on the
 * stream next. No update of it is left. */
static gemini_status_t part_ready(gmi_manager_t *m, const gmi_graph_t *g, const part_t *p, uint32_t stream) {
  gmi_chunk_t *c = p->chunk;
  gemini_status_t status = GEMINI_OK;
  if (!gmi_chunk_has(c, GMI_VALID_HOST) || gmi_chunk_is_resident(c) || gmi_chunk_io(c))
    status = gmi_chunk_to_host(m, c, true, GEMINI_REASON_DEMAND);
  /* Wait for a read from a file here, as gmi_chunk_fetch() does: the graph's copy cannot be withdrawn. */
  if (!status && (gmi_chunk_io(c) || gmi_chunk_failed_read(c))) status = gmi_chunk_settle_host(m, c);
  /* If the mapping changes, gmi_map() waits for work that uses the address, which includes copies between the chunk's
   * old frame and its slot. */
  if (!status) status = gmi_map(m, gmi_chunk_device(m, c), g->ring[p->ring_index].frame, gmi_chunk_mapping(c));
  /* The graph's copy reads the slot: after work on a device that was released on the host, and after workers. */
  return status ? status : gmi_chunk_wait_slot(m, stream, c);
}

static gemini_status_t graph_enter(gmi_manager_t *m, gemini_graph_t handle, gemini_stream_t stream) {
  uint32_t s;
  gmi_graph_t *g = graph_get(m, handle);
  if (!g) return GEMINI_ERR_HANDLE;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  if (!status && s == GMI_CALLER)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "a graph is launched on a stream, not on GEMINI_STREAM_CALLER");
  if (!status) status = enter_check(m, g);
  if (!status) status = queue_updates(m, g);
  for (uint32_t i = 0; !status && i < g->part_count; i++)
    if (g->parts[i].ring_index != GMI_NONE) status = part_ready(m, g, &g->parts[i], s);
  for (uint32_t i = 0; !status && i < g->ring_count; i++) /* the frames' owners before this graph */
    status = m->trace.observer->stream_waits(m, s, m->frames.at[g->ring[i].frame].ready);
  if (!status) status = m->trace.observer->stream_waits(m, s, g->left);
  if (status) return status;
  for (uint32_t i = 0; i < g->part_count; i++)
    if (g->parts[i].ring_index != GMI_NONE) gmi_chunk_graph_hold(m, g->parts[i].chunk);
  g->stream = s;
  g->state = GRAPH_ENTERED;
  return GEMINI_OK;
}
gemini_status_t gemini_graph_enter(gemini_manager_t mgr, gemini_graph_t graph, gemini_stream_t stream) {
  API_LOCKED(graph_enter(m, graph, stream));
}

static gemini_status_t graph_leave(gmi_manager_t *m, gemini_graph_t handle) {
  gmi_graph_t *g = graph_get(m, handle);
  if (!g) return GEMINI_ERR_HANDLE;
  if (g->state != GRAPH_ENTERED) return gmi_fail(GEMINI_ERR_STATE, 0, "the graph is not entered");
  /* A mark placed now, instead of one placed at first need: workers wait for a slot's fence without the manager's lock,
   * and could not place it. */
  gmi_fence_t left;
  gemini_status_t status = gmi_fence_now(m, g->stream, &left);
  if (status) return status;
  g->left = left;
  g->state = GRAPH_READY;
  for (uint32_t i = 0; i < g->part_count; i++) {
    gmi_chunk_t *c = g->parts[i].chunk;
    if (g->parts[i].ring_index == GMI_NONE) continue;
    gmi_chunk_graph_unhold(m, c);
    gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
    slot->fence =
        gmi_fence_join(m, slot->fence, left); /* the old one: readers on the host that were released meanwhile */
    gmi_map_leave(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c), left);
  }
  gmi_link_moved(m, gmi_link_in(m), GEMINI_REASON_PLAN, g->copies);
  gmi_updates_room(m);
  return GEMINI_OK;
}
gemini_status_t gemini_graph_leave(gemini_manager_t mgr, gemini_graph_t graph) { API_LOCKED(graph_leave(m, graph)); }
