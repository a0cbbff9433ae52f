/* Following a plan: what comes and leaves between operators, and what the plan answers.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "tracer/variants.h"

/* ---- questions */
uint32_t gmi_tracer_op_stream(gmi_manager_t *m) {
  return m->trace.tracer && m->trace.tracer->op_open ? m->trace.tracer->op_stream : GMI_CALLER;
}
const char *gmi_tracer_op_name(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  return t && t->op_open ? t->record.ops[t->op_index].name : NULL;
}
uint64_t gmi_tracer_next_use(gmi_manager_t *m, const gmi_chunk_t *c) {
  uint64_t now = m->trace.tracer->iteration << 32 | m->trace.tracer->op_index;
  return gmi_chunk_next_use(c) < now ? UINT64_MAX : gmi_chunk_next_use(c);
}

/* ---- plans */
void gmi_tracer_publish_plan(gmi_manager_t *m, const variant_t *v) {
  const gmi_plan_t *p = &v->bundle.plan;
  uint64_t link_bytes = v->bundle.input.link_bytes;
  m->stats.predicted_step_ns = v->bundle.made ? p->predicted_ns : 0;
  m->stats.planned_fetch_bytes = v->bundle.made ? p->fetch_count * link_bytes : 0;
  m->stats.planned_evict_bytes = v->bundle.made ? p->evict_dirty_count * link_bytes : 0;
}

/* The chunk size again, now that the access order is known. */
static uint64_t search_chunk(gmi_manager_t *m, const gmi_trace_t *trace) {
  uint64_t nonmodel = 0, count = 0, old = atomic_load(&m->cut.chunk_bytes);
  gmi_chunk_use_t *uses = calloc((size_t)trace->use_count + 1, sizeof *uses);
  if (!uses) return old; /* the size there is will do */
  for (uint32_t i = 0; i < trace->op_count; i++) {
    const gmi_trace_op_t *op = &trace->ops[i];
    if (op->nonmodel_peak > nonmodel) nonmodel = op->nonmodel_peak;
    for (uint32_t s = op->use_first; s < op->use_first + op->use_count; s++)
      uses[count++] = (gmi_chunk_use_t){ ((uint64_t)trace->uses[s].arena << 46) + trace->uses[s].offset,
                                         trace->uses[s].size, i, 0 };
  }
  uint64_t rate = trace->link_bytes_per_s[0];
  if (trace->link_bytes_per_s[1] && trace->link_bytes_per_s[1] < rate) rate = trace->link_bytes_per_s[1];
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_PLAN, 0);
  uint64_t chunk_bytes = count ? gmi_chunk_search(m, uses, count, nonmodel, rate) : old;
  gmi_wait_end(m, &wait);
  free(uses);
  return chunk_bytes;
}

/* Cuts arenas into chunks of another size together with the first plan, which is made before anything is changed.
 * Plans name records of chunks, which a new cut replaces: so only while there has been none. False: that is not
 * possible, or there is no such plan; nothing has changed. */
bool gmi_tracer_plan_with_chunk(gmi_manager_t *m, gmi_trace_t *trace, uint64_t chunk_bytes,
                                gmi_plan_bundle_t *bundle_out) {
  gmi_tracer_t *t = m->trace.tracer;
  uint32_t old_shift = m->cut.chunk_shift, shift = (uint32_t)__builtin_ctzll(chunk_bytes);
  uint64_t old_frame = gmi_frame_bytes(m);
  if (shift == old_shift || t->planned || !gmi_recut_possible(m, chunk_bytes) ||
      gmi_plan_bundle_make(m, trace, shift, bundle_out))
    return false;
  gemini_status_t status = gmi_recut(m, chunk_bytes);
  if (status || m->cut.chunk_shift != shift) {
    if (status) gmi_log(m, GEMINI_LOG_WARNING, "chunks stay as they are: %s", gmi_fail_message());
    gmi_plan_bundle_free(bundle_out);
    return false;
  }
  gmi_plan_bundle_bind(m, bundle_out);
  for (uint32_t k = 0; k <= GMI_VARIANTS; k++) {
    gmi_trace_t *other = k < GMI_VARIANTS ? &t->variants[k].trace : trace;
    if (k < GMI_VARIANTS && other == trace) continue;
    for (uint32_t i = 0; i < other->op_count; i++)
      other->ops[i].heap_pages = gmi_trace_pages(other->ops[i].heap_pages, old_frame, gmi_frame_bytes(m));
  }
  return true;
}

void gmi_tracer_take_plan(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle) {
  v->bundle = *bundle;
  m->trace.tracer->planned = true;
  m->stats.plans++;
  gmi_tracer_publish_plan(m, v);
}

gemini_status_t gmi_tracer_variant_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t bundle;
  gemini_status_t status = gmi_cut(m);
  gmi_trace_measure(m, &v->trace);
  bool made = !status && !m->config.chunk_bytes && !m->trace.tracer->planned &&
              gmi_tracer_plan_with_chunk(m, &v->trace, search_chunk(m, &v->trace), &bundle);
  if (!status && !made) status = gmi_plan_bundle_make(m, &v->trace, m->cut.chunk_shift, &bundle);
  gmi_plan_bundle_free(&v->bundle);
  v->refused = status != GEMINI_OK;
  if (m->trace.tracer->entered == (uint32_t)(v - m->trace.tracer->variants)) m->trace.tracer->entered = GMI_NONE;
  if (status) return status;
  gmi_tracer_take_plan(m, v, &bundle);
  gmi_log(m, GEMINI_LOG_INFO, "plan %llu: %u ops, %llu chunks fetched a step, predicted step %.6f s",
          (unsigned long long)m->stats.plans, v->trace.op_count, (unsigned long long)bundle.plan.fetch_count,
          (double)bundle.plan.predicted_ns * 1e-9);
  return GEMINI_OK;
}

gemini_status_t gmi_tracer_replan(gmi_manager_t *m) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  gmi_tracer_t *t = m->trace.tracer;
  gemini_status_t status = GEMINI_OK;
  bool inside = m->bracket.iteration_open;
  char message[440] = "";
  int64_t code = 0;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    variant_t *v = &t->variants[i];
    if (!v->used || !(v->bundle.made || v->refused)) continue;
    gemini_status_t made = gmi_tracer_variant_plan(m, v);
    /* What must work is the step that was run last; another one is refused when it comes. */
    if (!made || (i != t->previous && t->previous != GMI_NONE)) continue;
    status = made;
    code = gmi_fail_code();
    snprintf(message, sizeof message, "%s", gmi_fail_message());
  }
  if (inside && t->active != GMI_NONE && !t->variants[t->active].bundle.made) t->active = GMI_NONE;
  return status ? gmi_fail(status, code, "%s", message) : status; /* not of another one, which failed later */
}

/* An update that has not been queued yet comes before, or a graph's replay: then it is fetched on demand. */
static gemini_status_t fetch_ahead(gmi_manager_t *m, gmi_chunk_t *c) {
  return gmi_chunk_deferred(c) || gmi_chunk_graph_held(c) ? GEMINI_OK
                                                          : gmi_chunk_fetch(m, c, false, GEMINI_REASON_PLAN, 0);
}

/* Brings the device to where the plan's iteration begins: what the plan does not expect leaves, what it expects comes
 * into the free frames, in the order of use. */
void gmi_tracer_enter_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t *b = &v->bundle;
  for (uint32_t i = 0; i < b->input.chunk_count; i++) {
    gmi_chunk_t *c = b->chunk_of[i];
    if (b->plan.resident_at_start[i] || !gmi_chunk_is_resident(c) || gmi_chunk_busy(c, GMI_TO_EVICT)) continue;
    if (gmi_chunk_evict(m, c, GEMINI_REASON_PLAN)) gmi_log(m, GEMINI_LOG_WARNING, "plan: %s", gmi_fail_message());
  }
  uint32_t accesses = b->input.ops[b->input.op_count].access_first;
  for (uint32_t k = 0; k < accesses; k++) {
    uint32_t i = b->input.accesses[k].chunk;
    if (!b->plan.resident_at_start[i]) continue;
    if (fetch_ahead(m, b->chunk_of[i])) return;
  }
  for (uint32_t i = 0; i < b->input.chunk_count; i++)
    if (b->plan.resident_at_start[i] && fetch_ahead(m, b->chunk_of[i])) return;
}

/* The first of an op's moves that belong to the op itself (GMI_NO_PIECE: they come first) or to one of its pieces. */
static uint32_t first_move(const gmi_plan_move_t *moves, uint32_t low, uint32_t high, uint32_t piece) {
  uint64_t wanted = piece == GMI_NO_PIECE ? 0 : (uint64_t)piece + 1;
  while (low < high) {
    uint32_t mid = low + (high - low) / 2;
    uint64_t key = moves[mid].piece == GMI_NO_PIECE ? 0 : (uint64_t)moves[mid].piece + 1;
    if (key < wanted) low = mid + 1;
    else high = mid;
  }
  return low;
}

/* piece: GMI_NO_PIECE for the op itself. */
void gmi_tracer_plan_fetch(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece) {
  gmi_plan_bundle_t *b = &v->bundle;
  uint32_t end = b->plan.fetch_first[op + 1];
  for (uint32_t i = first_move(b->plan.fetches, b->plan.fetch_first[op], end, piece); i < end; i++) {
    const gmi_plan_move_t *move = &b->plan.fetches[i];
    if (move->piece != piece) break;
    gemini_status_t status = fetch_ahead(m, b->chunk_of[move->chunk]);
    if (status == GEMINI_ERR_OOM_DEVICE) break; /* no frame is free yet: the acquire will fetch it */
    if (status) gmi_log(m, GEMINI_LOG_WARNING, "planned fetch: %s", gmi_fail_message());
  }
}

static void plan_evict(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece) {
  gmi_plan_bundle_t *b = &v->bundle;
  uint32_t end = b->plan.evict_first[op + 1];
  for (uint32_t i = first_move(b->plan.evicts, b->plan.evict_first[op], end, piece); i < end; i++) {
    if (b->plan.evicts[i].piece != piece) break;
    gmi_chunk_t *c = b->chunk_of[b->plan.evicts[i].chunk];
    if (gmi_chunk_device_users(c) || gmi_chunk_is_pinned(c)) continue; /* released later: pressure will find it */
    if (gmi_chunk_evict(m, c, GEMINI_REASON_PLAN))
      gmi_log(m, GEMINI_LOG_WARNING, "planned eviction: %s", gmi_fail_message());
  }
}

/* Iteration and op, of an op of the plan that runs now; + op_count: of the iteration after it. */
static uint64_t position(const gmi_manager_t *m, const variant_t *v, uint32_t op) {
  uint32_t ops = v->bundle.input.op_count;
  return op < ops ? m->trace.tracer->iteration << 32 | op : (m->trace.tracer->iteration + 1) << 32 | (op - ops);
}

static variant_t *planned_piece(gmi_manager_t *m, uint32_t index, uint32_t *piece) {
  variant_t *v = gmi_tracer_active_variant(m->trace.tracer);
  if (!v || !v->bundle.made || index >= v->trace.update_count) return NULL;
  *piece += v->bundle.piece_first[index];
  return *piece < v->bundle.piece_first[index + 1] ? v : NULL;
}
void gmi_tracer_piece_begin(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  if (v) gmi_tracer_plan_fetch(m, v, v->bundle.input.pieces[piece].after_op, piece);
}
void gmi_tracer_piece_end(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  if (v) plan_evict(m, v, v->bundle.input.pieces[piece].after_op, piece);
}
bool gmi_tracer_piece_on_device(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  return v && v->bundle.plan.piece_on_device[piece];
}
uint64_t gmi_tracer_piece_use(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  return v && v->bundle.plan.piece_use[piece] != UINT32_MAX ? position(m, v, v->bundle.plan.piece_use[piece])
                                                            : UINT64_MAX;
}

void gmi_tracer_plan_after_op(gmi_manager_t *m, variant_t *v, uint32_t op) {
  gmi_plan_bundle_t *b = &v->bundle;
  for (uint32_t k = b->input.ops[op].access_first; k < b->input.ops[op + 1].access_first; k++) {
    uint32_t next = b->plan.next_use[k];
    gmi_chunk_set_next_use(b->chunk_of[b->input.accesses[k].chunk], next == UINT32_MAX ? 0 : position(m, v, next));
  }
  plan_evict(m, v, op, GMI_NO_PIECE);
}
