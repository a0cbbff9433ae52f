/* Operators: opens and closes them, records what they do, and implements gemini_op_*(). Those of the plan are compared
 * with the variants; *chosen* ones, which the caller has chosen at run time, are not.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A chosen op is an op of the record while it is open, so that what it acquires is noted and errors can name it. When
 * it ends it leaves the record: iterations that choose other ones are of the same kind, and no plan knows their chunks.
 * What is kept of it are its ranges (gmi_trace_t.chosen), for which a plan leaves frames, and a note in each of its
 * chunks, which policies of the cache read (policy/cache.h). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "gemini/chosen.h"
#include "tracer/variants.h"

/* Takes the last op out of the record. */
static void op_drop(gmi_tracer_t *t) {
  pthread_mutex_lock(&t->touch_lock);
  t->op_open = false;
  const gmi_trace_op_t *op = &t->record.ops[--t->record.op_count];
  t->record.use_count = op->use_first;
  pthread_mutex_unlock(&t->touch_lock);
  /* Another thread's updates may have come while it was open: they come after the op before it now. */
  for (uint32_t i = t->record.update_count; i-- > 0 && t->record.updates[i].after_op > t->record.op_count;)
    t->record.updates[i].after_op = t->record.op_count;
  if (!t->record.op_count && t->record.update_count) t->record_lost = true; /* there is no such op */
  t->now.chosen = false;
  gmi_op_name_drop(t->names, op->name);
}

/* The tracer is as if the op had not begun. */
static void op_take_back(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  const comparison_t *before = &t->now.before_op;
  atomic_store(&m->bracket.op_serial, 0);
  op_drop(t);
  memcpy(t->agrees, before->agrees, sizeof t->agrees);
  t->departed = before->departed;
  t->active = before->active;
  m->stats.departures = before->departures;
  for (uint32_t i = before->updates; !t->record_lost && i < t->record.update_count; i++)
    gmi_tracer_compare_update(m, i);
  gmi_nvtx_pop();
}

/* Begins the record of an op: checks what can be refused, takes the name, notes when the op begins. A stream under
 * capture for a graph bypasses the tracer: its op only names what is captured in errors, and *op_out is NULL then. */
static gemini_status_t op_record(gmi_manager_t *m, const char *name, gemini_stream_t stream, bool chosen,
                                 gmi_trace_op_t **op_out) {
  gmi_tracer_t *t = m->trace.tracer;
  uint32_t s;
  bool captures = false;
  gemini_status_t status = GEMINI_OK;
  *op_out = NULL;
  if (atomic_load(&m->graphs.streams)) {
    status = gmi_stream_resolve(m, stream, &s);
    if (!status) status = gmi_graph_captures(m, s, &captures);
    if (status || captures) return status ? status : gmi_graph_op_begin(m, s, name);
  }
  if (!m->bracket.iteration_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no iteration is open");
  if (t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "operator %s is open already", gmi_tracer_op_name(m));
  if (!name) return gmi_fail(GEMINI_ERR_INVALID, 0, "name is NULL");
  size_t length = strnlen(name, NAME_LIMIT + 1);
  if (!length || length > NAME_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "an operator's name must have 1 to %d bytes", NAME_LIMIT);
  status = gmi_stream_resolve(m, stream, &s);
  if (!status) status = gmi_gathers_may_go_on(t->gathers);
  if (!status) status = gmi_gathered_leave(m, false);
  if (status) return status;
  t->now.before_op = (comparison_t){
    .departed = t->departed, .active = t->active, .departures = m->stats.departures, .updates = t->record.update_count
  };
  memcpy(t->now.before_op.agrees, t->agrees, sizeof t->agrees);
  const variant_t *v = chosen ? NULL : gmi_tracer_active_variant(t);
  const char *expected = v && t->op_index < v->trace.op_count ? v->trace.ops[t->op_index].name : NULL;
  const char *kept =
      expected && !strcmp(name, expected) ? gmi_op_name_again(expected) : gmi_op_name_take(t->names, name);
  /* gmi_trace_add_op() may move the array that gmi_tracer_touch() writes to, hence touch_lock. */
  pthread_mutex_lock(&t->touch_lock);
  gmi_trace_op_t *op = NULL;
  if (kept && gmi_tracer_timings_reserve(t, t->record.op_count + 1)) op = gmi_trace_add_op(&t->record);
  pthread_mutex_unlock(&t->touch_lock);
  if (!op) {
    if (kept) gmi_op_name_drop(t->names, kept);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to record operator %s", name);
  }
  t->op_index = t->record.op_count - 1;
  op->name = kept;
  op->phase = atomic_load(&m->bracket.phase);
  timing_t *k = &t->timings[t->op_index];
  memset(k, 0, sizeof *k);
  if (s == GMI_CALLER) k->begin_ns = m->device.ops->now(m->device.self);
  else status = gmi_fence_now(m, s, &k->begin);
  if (status) {
    op_drop(t);
    return status;
  }
  t->op_stream = s;
  t->now.chosen = chosen;
  t->now.pieces_ns = 0;
  *op_out = op;
  return GEMINI_OK;
}

/* Opens the op that was recorded last: from now on it is told what is acquired and allocated. */
static void op_opened(gmi_manager_t *m, const char *name) {
  gmi_tracer_t *t = m->trace.tracer;
  m->nonmodel.peak_op = m->nonmodel.heap ? gmi_heap_bytes_used(m->nonmodel.heap) : 0;
  m->nonmodel.pages_peak_op = m->groups.peak_op = 0;
  gmi_nonmodel_peak(m);
  pthread_mutex_lock(&t->touch_lock);
  t->op_open = true;
  pthread_mutex_unlock(&t->touch_lock);
  /* A new serial makes each tensor's `seen` word stale, so the fast path of acquire reports its first access in this
   * op (gmi_tensor_t). Relaxed loads in chunk/acquire.h read it: it publishes no other data, since gmi_tracer_touch()
   * takes touch_lock. */
  atomic_store(&m->bracket.op_serial, ++m->bracket.op_serial_next);
  gmi_reap(m);
  gmi_nvtx_push(name);
}

/* Opens an op. It is compared with the active variant by name and phase now, so that the right plan's fetches are
 * issued, and in full by op_end(). */
static gemini_status_t op_begin(gmi_manager_t *m, const char *name, gemini_stream_t stream) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_trace_op_t *op;
  gemini_status_t status = op_record(m, name, stream, false, &op);
  if (status || !op) return status;
  variant_t *v = gmi_tracer_active_variant(t);
  if (v && (t->op_index >= v->trace.op_count || v->trace.ops[t->op_index].name != op->name ||
            v->trace.ops[t->op_index].phase != op->phase)) {
    t->agrees[t->active] = false;
    gmi_tracer_choose_active(m, op);
    v = gmi_tracer_active_variant(t);
  }
  t->peak.expected = v && v->bundle.made ? gmi_tracer_expected_peak(v, t->op_index) : UINT64_MAX;
  t->peak.at_most = v && gmi_tracer_peaks_vary(v);
  op_opened(m, name);
  if (v && v->bundle.made) gmi_tracer_plan_op(m, v);
  status = gmi_gathers_op_begin(m, t->gathers, op->name, op->phase);
  if (status) op_take_back(m);
  return status;
}

/* A chosen op: what is acquired until its end is chosen at run time, and no variant knows of it. */
static gemini_status_t op_begin_chosen(gmi_manager_t *m, const char *name, gemini_stream_t stream) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_trace_op_t *op;
  for (uint32_t i = 0; i < GMI_GROUPS; i++) /* ranks agree on what they gather, from the record */
    if (gmi_group_at(m, i) && gmi_group_at(m, i)->arenas)
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "the manager has sharded arenas, which chosen operators cannot use");
  gemini_status_t status = op_record(m, name, stream, true, &op);
  if (status || !op) return status;
  t->peak.expected = UINT64_MAX;
  /* Releases of this op are later than those of ops before it, also where nothing arrives in between. */
  atomic_fetch_add_explicit(&m->frames.clock, 1, memory_order_relaxed);
  op_opened(m, name);
  gmi_tracer_plan_more(m);
  return GEMINI_OK;
}

/* Where the iteration is, for the policy of the cache. */
static gmi_cache_now_t cache_now(const gmi_manager_t *m) {
  const gmi_tracer_t *t = m->trace.tracer;
  return (gmi_cache_now_t){ .pass = t->iteration, .position = t->op_index, .policy = m->config.cache_policy };
}
uint64_t gmi_tracer_cache_rank(gmi_manager_t *m, const gmi_chunk_t *c) {
  const gmi_cache_now_t now = cache_now(m);
  return gmi_cache_rank(gmi_chunk_note(c), &now);
}

uint64_t gmi_tracer_cache_pass(gmi_manager_t *m) {
  const gmi_tracer_t *t = m->trace.tracer;
  const variant_t *v = m->bracket.iteration_open && t->active != GMI_NONE ? &t->variants[t->active] : NULL;
  return v && v->bundle.made && v->trace.chosen.count ? t->iteration : 0;
}

/* Keeps of a chosen op that ends what plans and the policy of the cache need: its ranges and a note in its chunks. */
static void keep_chosen(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  const gmi_trace_op_t *op = &t->record.ops[t->op_index];
  const timing_t *k = &t->timings[t->op_index];
  const gmi_cache_now_t now = cache_now(m);
  m->stats.stall_ns += k->stall_ns + k->unforeseen_ns;
  for (uint32_t s = op->use_first; s < op->use_first + op->use_count; s++) {
    const gmi_trace_use_t *use = &t->record.uses[s];
    const gmi_arena_t *a = gmi_arena_at(m, use->arena);
    const uint64_t last = (use->offset + use->size - 1) >> m->cut.chunk_shift;
    if (!a || last >= atomic_load(&a->chunk_count)) continue; /* the arena went while the op was open */
    for (uint64_t i = use->offset >> m->cut.chunk_shift; i <= last; i++) gmi_chunk_note_use(&a->chunks[i], &now);
    gmi_trace_chosen_t *chosen = gmi_trace_add_chosen(&t->record);
    if (!chosen) t->record_lost = true;
    else *chosen = (gmi_trace_chosen_t){ *use, t->now.chosen_ops, 0 };
  }
  t->now.chosen_ops++;
}

/* Bytes of the chosen op with the most of them. */
static uint64_t most_chosen(const gmi_trace_t *trace) {
  uint64_t most = 0, bytes = 0;
  for (uint32_t i = 0; i < trace->chosen.count; i++) {
    const gmi_trace_chosen_t *now = &trace->chosen.uses[i];
    bytes = (i && now->op == now[-1].op ? bytes : 0) + now->use.size;
    if (bytes > most) most = bytes;
  }
  return most;
}

void gmi_tracer_learn_chosen(gmi_tracer_t *t, variant_t *v) {
  if (most_chosen(&t->record) <= most_chosen(&v->trace)) return;
  const gmi_trace_list_t before = v->trace.chosen;
  v->trace.chosen = t->record.chosen;
  t->record.chosen = before;
  v->chosen_grew = true;
}

/* Compares an op that ends with every variant that agreed so far, and issues the plan's evictions after it. */
static void compare_op(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_trace_op_t *op = &t->record.ops[t->op_index];
  op->nonmodel_peak = op->nonmodel_least = m->nonmodel.peak_op;
  op->heap_pages = m->nonmodel.pages_peak_op;
  op->all_pages = m->groups.peak_op;
  if (t->peak.expected != UINT64_MAX) {
    const bool less = op->nonmodel_peak < t->peak.expected;
    const uint64_t error = !less             ? op->nonmodel_peak - t->peak.expected
                           : t->peak.at_most ? 0
                                             : t->peak.expected - op->nonmodel_peak;
    if (error > m->stats.op_peak_error_bytes) m->stats.op_peak_error_bytes = error;
  }
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    const variant_t *other = &t->variants[i];
    if (t->agrees[i]) t->agrees[i] = t->op_index < other->trace.op_count && gmi_tracer_same_op(m, other, t->op_index);
  }
  if (t->active != GMI_NONE && !t->agrees[t->active]) gmi_tracer_choose_active(m, NULL);
  variant_t *v = gmi_tracer_active_variant(t);
  if (v && v->bundle.made) gmi_tracer_plan_after_op(m, v, t->op_index);
}

/* Closes the op: its uses become canonical; it is compared, or leaves the record. */
static gemini_status_t op_end(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  if (gmi_graph_op_end(m)) return GEMINI_OK;
  if (!t->op_open) return gmi_fail(GEMINI_ERR_STATE, 0, "no operator is open");
  timing_t *k = &t->timings[t->op_index];
  const bool chosen = t->now.chosen;
  if (!chosen) {
    pthread_mutex_lock(&t->touch_lock);
    gmi_gathers_op_end(m, t->gathers, t->op_index);
    pthread_mutex_unlock(&t->touch_lock);
  }
  gemini_status_t status = gmi_gathered_leave(m, false);
  if (status) return status;
  if (t->op_stream == GMI_CALLER) k->end_ns = m->device.ops->now(m->device.self);
  else status = gmi_fence_now(m, t->op_stream, &k->end);
  if (status) return status;
  atomic_store(&m->bracket.op_serial, 0);
  pthread_mutex_lock(&t->touch_lock);
  t->op_open = false;
  gmi_tracer_canonical(&t->record);
  pthread_mutex_unlock(&t->touch_lock);
  if (chosen) keep_chosen(m);
  else compare_op(m);
  const char *name = t->record.ops[t->op_index].name;
  if (k->end) gmi_timeline_slice(m, "op", name, k->begin, k->end);
  else gmi_timeline_slice_ns(m, "op", name, k->begin_ns, k->end_ns);
  gmi_nvtx_pop();
  if (chosen) op_drop(t);
  else t->op_index++;
  gmi_tracer_resolve_few(m);
  gmi_timeline_poll(m);
  gmi_tracer_plan_more(m);
  return GEMINI_OK;
}

gemini_status_t gemini_op_begin(gemini_manager_t mgr, const char *name, gemini_stream_t stream) {
  API_LOCKED(op_begin(m, name, stream));
}
gemini_status_t gemini_op_begin_chosen(gemini_manager_t mgr, const char *name, gemini_stream_t stream) {
  API_LOCKED(op_begin_chosen(m, name, stream));
}

/* ---- an op with its accesses
 *
 * Acquire and release take the lock themselves and may run callbacks, so the op is open while its batch is acquired. A
 * batch that fails takes the op back: the tracer then is as if the op had not begun. */
static void op_cancel(gmi_manager_t *m) {
  if (!gmi_graph_op_end(m) && m->trace.tracer->op_open) op_take_back(m);
}

/* Copies the batch to the list. A whole arena gets the size that it has now: it may grow before the release. An address
 * becomes its place in the arena: when gradients reuse that later, the address does not say any more what is meant. */
static gemini_status_t uses_take(gmi_manager_t *m, const gemini_access_t *accesses, uint64_t count) {
  gmi_tracer_t *t = m->trace.tracer;
  if (count > t->uses.capacity) {
    gemini_access_t *list = realloc(t->uses.list, count * sizeof *list);
    if (!list)
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the list of %llu accesses",
                      (unsigned long long)count);
    t->uses.list = list;
    t->uses.capacity = count;
  }
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = 0; !status && i < count; i++) {
    gmi_range_t r;
    t->uses.list[i] = accesses[i];
    status = gmi_range_bytes(m, &accesses[i], &r);
    if (status) break;
    t->uses.list[i].size_bytes = r.size;
    if (gmi_object_id(&accesses[i])) continue;
    t->uses.list[i].object.arena = gmi_handle(m, GMI_HANDLE_ARENA, r.arena->generation, r.arena->index);
    t->uses.list[i].offset_bytes = r.offset;
  }
  return status;
}

/* What the end of the operator has to release: of an arena that had no bytes nothing was acquired, and size_bytes 0
 * would name those that it has by then. */
static uint64_t uses_keep(gemini_access_t *list, uint64_t count) {
  uint64_t kept = 0;
  for (uint64_t i = 0; i < count; i++)
    if (list[i].size_bytes) list[kept++] = list[i];
  return kept;
}

static gemini_status_t op_begin_with(gmi_manager_t *m, gemini_manager_t mgr, const char *name, gemini_stream_t stream,
                                     gemini_access_t *theirs, const gemini_access_t *accesses, uint64_t count) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_lock(m, "gemini_op_begin_with");
  bool open = t->op_open || m->graphs.op_of;
  gemini_status_t status = op_begin(m, name, stream);
  bool begun = !open && (t->op_open || m->graphs.op_of);
  if (!status) status = uses_take(m, accesses, count);
  gmi_unlock(m);
  if (!status) status = gemini_acquire(mgr, t->uses.list, count, stream);
  if (!begun) return status;
  gmi_lock(m, "gemini_op_begin_with");
  if (status) {
    op_cancel(m);
  } else {
    gmi_accesses_out(t->uses.list, theirs, count);
    t->uses.count = uses_keep(t->uses.list, count);
    t->uses.stream = stream;
  }
  gmi_unlock(m);
  return status;
}
gemini_status_t gemini_op_begin_with(gemini_manager_t mgr, const char *name, gemini_stream_t stream,
                                     gemini_access_t *accesses, uint64_t count) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gmi_accesses_t batch;
  gemini_status_t status = gmi_accesses_in(&batch, accesses, count);
  if (status) API_RETURN(status);
  status = op_begin_with(m, mgr, name, stream, accesses, batch.list, count);
  gmi_accesses_free(&batch);
  API_RETURN(status);
}

/* Ends the op and releases what gemini_op_begin_with() acquired, for which the lock is let go. A refusal of the release
 * (STATE) has changed nothing; after any other error everything is released, and the op has ended. */
static gemini_status_t op_end_with(gmi_manager_t *m, gemini_manager_t mgr) {
  gmi_tracer_t *t = m->trace.tracer;
  gmi_failure_t released = { 0 };
  if (t->uses.count) {
    const uint64_t count = t->uses.count;
    gmi_unlock(m);
    gmi_fail_keep(gemini_release(mgr, t->uses.list, count, t->uses.stream), &released);
    gmi_lock(m, "gemini_op_end");
    if (released.status == GEMINI_ERR_STATE || released.status == GEMINI_ERR_HANDLE) return gmi_fail_again(&released);
    t->uses.count = 0;
  }
  gemini_status_t status = op_end(m);
  return released.status ? gmi_fail_again(&released) : status;
}
gemini_status_t gemini_op_end(gemini_manager_t mgr) { API_LOCKED(op_end_with(m, mgr)); }
