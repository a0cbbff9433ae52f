/* Carries out a plan: issues its fetches and evictions between ops, establishes the resident set at the begin of an
 * iteration, and answers questions about the plan (next uses, side of a piece). Also makes the plan of a variant.
 * Called by tracer.c and, through gmi_observer_t and gmi_advice_t, by src/chunk.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A plan is advice. A planned move that is impossible at the moment (no free frame, a chunk still acquired) is left
 * out, and the chunk is fetched or evicted on demand. So a wrong plan costs time, never correctness.
 *
 * Next uses are stored in chunks as iteration << 32 | op, so that they can be compared across iterations, and a
 * value below the present position is recognised as outdated. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/host.h"
#include "chunk/update.h"
#include "tracer/variants.h"

/* ---- queries */
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
/* Copies the figures of the variant's plan into the statistics. */
void gmi_tracer_publish_plan(gmi_manager_t *m, const variant_t *v) {
  const gmi_plan_t *p = &v->bundle.plan;
  uint64_t link_bytes = v->bundle.input.link_bytes;
  m->stats.predicted_step_ns = v->bundle.made ? p->predicted_ns : 0;
  m->stats.planned_fetch_bytes = v->bundle.made ? p->fetch_count * link_bytes : 0;
  m->stats.planned_evict_bytes = v->bundle.made ? p->evict_dirty_count * link_bytes : 0;
  for (uint32_t i = 0; v->bundle.made && i < v->bundle.input.groups.group_count; i++) {
    gmi_group_t *g = gmi_group_at(m, v->bundle.group_of[i]);
    if (!g) continue;
    g->planned.gathered = p->traffic[i].gathered;
    g->planned.reduced = p->traffic[i].summed;
    g->planned.fetched = p->traffic[i].fetched;
  }
}

/* Searches the chunk size with the recorded ops as uses; without memory, returns the current size. Each arena gets
 * 2^46 bytes of the search's address space, more than the largest arena. */
static uint64_t search_chunk(gmi_manager_t *m, const gmi_trace_t *trace) {
  uint64_t nonmodel = 0, count = 0, old = atomic_load(&m->cut.chunk_bytes);
  gmi_chunk_use_t *uses = calloc((size_t)trace->use_count + trace->chosen.count + 1, sizeof *uses);
  if (!uses) return old; /* the current size works, too */
  for (uint32_t i = 0; i < trace->op_count; i++) {
    const gmi_trace_op_t *op = &trace->ops[i];
    if (op->nonmodel_peak > nonmodel) nonmodel = op->nonmodel_peak;
    for (uint32_t s = op->use_first; s < op->use_first + op->use_count; s++)
      uses[count++] = (gmi_chunk_use_t){ ((uint64_t)trace->uses[s].arena << 46) + trace->uses[s].offset,
                                         trace->uses[s].size, i, 0 };
  }
  for (uint32_t s = 0; s < trace->chosen.count; s++) {
    const gmi_trace_use_t *use = &trace->chosen.uses[s].use;
    uses[count++] = (gmi_chunk_use_t){ ((uint64_t)use->arena << 46) + use->offset, use->size,
                                       trace->op_count + trace->chosen.uses[s].op, 0 };
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

/* Makes the first plan for chunks of another size and then cuts the arenas to that size. The plan is made first, so
 * that nothing has changed if it fails. Possible only before any other plan exists: plans refer to chunk records,
 * which a new cut replaces. Returns false if the size is the current one, if the cut or the plan is impossible;
 * nothing has changed then. Heap pages have the size of chunks, so the page counts in all traces are converted. */
bool gmi_tracer_plan_with_chunk(gmi_manager_t *m, gmi_trace_t *trace, uint64_t chunk_bytes,
                                gmi_plan_bundle_t *bundle_out) {
  gmi_tracer_t *t = m->trace.tracer;
  uint32_t old_shift = m->cut.chunk_shift, shift = (uint32_t)__builtin_ctzll(chunk_bytes);
  uint64_t old_frame = gmi_frame_bytes(m);
  if (shift == old_shift || t->plans.count || !gmi_recut_possible(m, chunk_bytes) ||
      gmi_plan_bundle_make(m, trace, shift, bundle_out))
    return false;
  gemini_status_t status = gmi_recut(m, chunk_bytes);
  if (status || m->cut.chunk_shift != shift) {
    if (status) gmi_log(m, GEMINI_LOG_WARNING, "the chunk size stays as it is: %s", gmi_fail_message());
    gmi_plan_bundle_free(bundle_out);
    return false;
  }
  gmi_plan_bundle_bind(m, bundle_out);
  for (uint32_t k = 0; k <= GMI_VARIANTS; k++) {
    gmi_trace_t *other = k < GMI_VARIANTS ? &t->variants[k].trace : trace;
    if (k < GMI_VARIANTS && other == trace) continue;
    for (uint32_t i = 0; i < other->op_count; i++)
      other->ops[i].heap_pages =
          gmi_trace_pages(other->ops[i].heap_pages + other->ops[i].gathered, old_frame, gmi_frame_bytes(m)),
      other->ops[i].gathered = other->ops[i].all_pages = 0;
  }
  return true;
}

/* Does a plan move nothing, with room for all chunks beside each op? With collectives none counts as such, as the ranks
 * have to agree on variants. */
static bool is_still(const gmi_plan_bundle_t *bundle) {
  const gmi_plan_input_t *input = &bundle->input;
  bool fits = !input->groups.gather_count && !input->groups.sum_count;
  for (uint32_t i = 0; fits && i < input->op_count; i++)
    fits = (uint64_t)input->chunk_count + input->ops[i].heap_frames <= input->frame_count;
  return fits && !bundle->plan.fetch_count && !bundle->plan.evict_first[input->op_count];
}

/* Makes bundle the variant's plan; the variant owns it from then on. The caller has freed an earlier plan. */
void gmi_tracer_take_plan(gmi_manager_t *m, variant_t *v, const gmi_plan_bundle_t *bundle) {
  v->bundle = *bundle;
  v->still = is_still(bundle);
  v->plan = ++m->trace.tracer->plans.count;
  v->plan_runs = 0;
  v->ahead.planned = v->trace.ahead;
  m->trace.tracer->now.due.variant = GMI_NONE;
  m->stats.plans++;
  gmi_tracer_publish_plan(m, v);
  uint64_t slots = 0;
  for (uint32_t p = 0; p < v->bundle.plan.piece_count; p++) {
    const gmi_plan_piece_t *piece = &v->bundle.input.pieces[p];
    slots += v->bundle.plan.piece_ahead[p] == GMI_AHEAD_ALL ? piece->ahead_slots
             : v->bundle.plan.piece_passes[p]               ? piece->pass_slots
                                                            : 0;
  }
  gmi_host_spare_expect(m, slots);
}

/* Makes the variant's plan (again) with the newest rates. The first plan also chooses the chunk size, unless the
 * caller configured it. On failure the variant has no plan and is refused until budgets change. */
gemini_status_t gmi_tracer_variant_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t bundle;
  gemini_status_t status = gmi_cut(m);
  gmi_trace_measure(m, &v->trace);
  bool made = !status && !m->config.chunk_bytes && !m->trace.tracer->plans.count &&
              gmi_tracer_plan_with_chunk(m, &v->trace, search_chunk(m, &v->trace), &bundle);
  if (!status && !made) status = gmi_plan_bundle_make(m, &v->trace, m->cut.chunk_shift, &bundle);
  gmi_plan_bundle_free(&v->bundle);
  gmi_tracer_trial_drop(v);
  v->plan = 0;
  v->still = v->chosen_grew = false;
  v->refused = status != GEMINI_OK;
  if (m->trace.tracer->entered == (uint32_t)(v - m->trace.tracer->variants)) m->trace.tracer->entered = GMI_NONE;
  if (status) return status;
  gmi_tracer_take_plan(m, v, &bundle);
  gmi_log(m, GEMINI_LOG_INFO, "plan %llu: %u ops, %llu chunks fetched a step, predicted step %.6f s",
          (unsigned long long)m->stats.plans, v->trace.op_count, (unsigned long long)bundle.plan.fetch_count,
          (double)bundle.plan.predicted_ns * 1e-9);
  return GEMINI_OK;
}

/* Makes all plans again after a change of budgets. Fails if the variant of the last iteration has no plan under the
 * new budgets; any other variant is refused when it comes. Every variant is tried, hence the copy of the first
 * relevant error. */
gemini_status_t gmi_tracer_replan(gmi_manager_t *m) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  gmi_tracer_t *t = m->trace.tracer;
  bool inside = m->bracket.iteration_open;
  gmi_failure_t failure = { 0 };
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    variant_t *v = &t->variants[i];
    if (!v->used || !(v->bundle.made || v->refused)) continue;
    gemini_status_t made = gmi_tracer_variant_plan(m, v);
    /* only a failure of the last iteration's variant is reported */
    if (!made || (i != t->previous && t->previous != GMI_NONE)) continue;
    gmi_fail_keep(made, &failure);
  }
  if (inside && t->active != GMI_NONE && !t->variants[t->active].bundle.made) t->active = GMI_NONE;
  /* restores the error that a later variant's failure replaced */
  return gmi_fail_again(&failure);
}

/* Encodes an op of the plan as iteration << 32 | op, counted from the current iteration; op + op_count is an op of
 * the next one. */
static uint64_t position(const gmi_manager_t *m, const variant_t *v, uint32_t op) {
  uint32_t ops = v->bundle.input.op_count;
  return op < ops ? m->trace.tracer->iteration << 32 | op : (m->trace.tracer->iteration + 1) << 32 | (op - ops);
}

/* States from which new ones are being computed ahead. They would come for nothing, and only when that is done, before
 * which no other chunk could come. */
static bool is_speculated(gmi_manager_t *m, const gmi_chunk_t *c) {
  return gmi_chunk_spec(c) && gmi_chunk_arena(m, c)->kind != GEMINI_KIND_PARAM;
}

/* A chunk with a deferred update piece, held by a graph's replay, or claimed by a load is left to be fetched on demand:
 * what precedes it is not queued yet. */
bool gmi_tracer_comes_later(gmi_manager_t *m, const gmi_chunk_t *c) {
  return gmi_chunk_deferred(c) || gmi_chunk_graph_held(c) || gmi_chunk_is_loading(c) || is_speculated(m, c);
}

/* Fetches a chunk ahead of its use. Where ops are chosen, chunks that the plan does not know make room. */
static gemini_status_t fetch_ahead(gmi_manager_t *m, const variant_t *v, gmi_chunk_t *c) {
  if (gmi_tracer_comes_later(m, c)) return GEMINI_OK;
  return gmi_chunk_fetch(m, c, false, GEMINI_REASON_PLAN, v->trace.chosen.count ? GMI_TAKE_CACHED : 0);
}

/* Establishes the resident set with which the plan's iteration begins: evicts chunks that the plan does not expect,
 * then fetches expected ones in the order of use until frames run out. Where ops are chosen, chunks that the plan does
 * not know stay until their frames are needed. */
void gmi_tracer_enter_plan(gmi_manager_t *m, variant_t *v) {
  gmi_plan_bundle_t *b = &v->bundle;
  const bool keeps = v->trace.chosen.count;
  uint32_t accesses = b->input.ops[b->input.op_count].access_first;
  /* Sets the next uses of the plan's chunks, each of which ends as the first one: all others are the cache. */
  for (uint32_t op = b->input.op_count; keeps && op-- > 0;)
    for (uint32_t k = b->input.ops[op].access_first; k < b->input.ops[op + 1].access_first; k++)
      gmi_chunk_set_next_use(b->chunk_of[b->input.accesses[k].chunk], position(m, v, op));
  for (uint32_t i = 0; i < b->input.chunk_count; i++) {
    gmi_chunk_t *c = b->chunk_of[i];
    if (keeps && gmi_tracer_next_use(m, c) == UINT64_MAX) continue;
    if (b->plan.resident_at_start[i] || !gmi_chunk_is_resident(c) || gmi_chunk_busy(c, GMI_TO_EVICT)) continue;
    if (gmi_chunk_evict(m, c, GEMINI_REASON_PLAN)) gmi_log(m, GEMINI_LOG_WARNING, "plan: %s", gmi_fail_message());
  }
  for (uint32_t k = 0; k < accesses; k++) {
    uint32_t i = b->input.accesses[k].chunk;
    if (!b->plan.resident_at_start[i]) continue;
    if (fetch_ahead(m, v, b->chunk_of[i])) return;
  }
  for (uint32_t i = 0; i < b->input.chunk_count; i++)
    if (b->plan.resident_at_start[i] && fetch_ahead(m, v, b->chunk_of[i])) return;
}

/* Returns the first of an op's moves in [low, high) that belong to piece (GMI_NO_PIECE: to the op itself). The moves
 * of an op are sorted: first the op's own, then those of its pieces in order of index. */
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

/* Issues the plan's fetches at the begin of a device piece. */
static void plan_fetch(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece) {
  gmi_plan_bundle_t *b = &v->bundle;
  uint32_t end = b->plan.fetch_first[op + 1];
  for (uint32_t i = first_move(b->plan.fetches, b->plan.fetch_first[op], end, piece); i < end; i++) {
    const gmi_plan_move_t *move = &b->plan.fetches[i];
    if (move->piece != piece) break;
    gemini_status_t status = fetch_ahead(m, v, b->chunk_of[move->chunk]);
    /* no frame is free yet: the acquire fetches this chunk and the later ones */
    if (status == GEMINI_ERR_OOM_DEVICE) break;
    if (status) gmi_log(m, GEMINI_LOG_WARNING, "planned fetch: %s", gmi_fail_message());
  }
}

/* Has the op that needs the chunk of a due fetch ended? Then it has been fetched on demand. */
static bool is_too_late(const gmi_tracer_t *t, const gmi_plan_move_t *move, bool of_this_iteration) {
  const bool for_next = move->use_op < move->op;
  if (for_next == of_this_iteration) return !for_next; /* it ended with the last iteration, or is in the next one */
  return t->op_index > move->use_op;
}

void gmi_tracer_plan_more(gmi_manager_t *m) {
  gmi_tracer_t *t = m->trace.tracer;
  const bool left = gmi_updates_more(m); /* their chunks come first */
  const variant_t *v = gmi_tracer_active_variant(t);
  if (left || !v || !v->bundle.made || t->now.due.variant != t->active) return;
  for (uint32_t k = 0; k < 2; k++) {
    while (t->now.due.next[k] < t->now.due.end[k]) {
      const gmi_plan_move_t *move = &v->bundle.plan.fetches[t->now.due.next[k]];
      gmi_chunk_t *c = v->bundle.chunk_of[move->chunk];
      if (move->piece == GMI_NO_PIECE && !is_too_late(t, move, k)) {
        if (gmi_chunk_work_pending(m, c) && (gmi_chunk_io(c) || gmi_link_is_full(m, gmi_link_in(m)))) return;
        gemini_status_t status = fetch_ahead(m, v, c);
        if (status == GEMINI_ERR_OOM_DEVICE) { /* no frame is free yet: the acquire fetches this chunk and later ones */
          t->now.due.next[k] = t->now.due.end[k];
          break;
        }
        if (status) gmi_log(m, GEMINI_LOG_WARNING, "planned fetch: %s", gmi_fail_message());
      }
      t->now.due.next[k]++;
    }
  }
}

void gmi_tracer_plan_begin(gmi_manager_t *m, variant_t *v) {
  gmi_tracer_t *t = m->trace.tracer;
  const bool goes_on = t->now.due.variant == t->active && t->entered == t->active;
  t->now.due.next[0] = goes_on ? t->now.due.next[1] : 0;
  t->now.due.end[0] = goes_on ? v->bundle.plan.fetch_first[v->bundle.input.op_count] : 0;
  t->now.due.next[1] = t->now.due.end[1] = 0;
  t->now.due.variant = t->active;
  gmi_tracer_reads_begin(m, v, goes_on);
}

void gmi_tracer_plan_op(gmi_manager_t *m, variant_t *v) {
  gmi_tracer_t *t = m->trace.tracer;
  if (t->now.due.variant != t->active) {
    t->now.due.next[0] = t->now.due.end[0] = 0;
    t->now.due.next[1] = v->bundle.plan.fetch_first[t->op_index];
    t->now.due.variant = t->active;
  }
  t->now.due.end[1] = v->bundle.plan.fetch_first[t->op_index + 1];
  gmi_tracer_reads_op(m, v);
  gmi_tracer_plan_more(m);
}

/* A chunk that is to be copied to the host, which has room for all. Not with groups: what is late may be fetched again
 * before it has left, and so not be fetched, but what ranks move is what their plans say. */
static bool may_be_late(gmi_manager_t *m, const gmi_plan_bundle_t *b, const gmi_chunk_t *c) {
  return gmi_chunk_is_resident(c) && gmi_chunk_has_only(c, GMI_VALID_DEVICE) && !b->input.groups.group_count &&
         !m->file.store && !gmi_home_is_short(m);
}

/* Issues the plan's evictions at the end of op, or of one of its device pieces. */
static void plan_evict(gmi_manager_t *m, variant_t *v, uint32_t op, uint32_t piece) {
  gmi_plan_bundle_t *b = &v->bundle;
  uint32_t end = b->plan.evict_first[op + 1];
  for (uint32_t i = first_move(b->plan.evicts, b->plan.evict_first[op], end, piece); i < end; i++) {
    if (b->plan.evicts[i].piece != piece) break;
    gmi_chunk_t *c = b->chunk_of[b->plan.evicts[i].chunk];
    /* still in use: it is evicted when its frame is needed */
    if (gmi_chunk_device_users(c) || gmi_chunk_is_pinned(c)) continue;
    /* The copy of an op's chunk waits for the op; behind it, those of states would, whose frames pieces wait for. */
    if ((piece != GMI_NO_PIECE || gmi_updates_deferred(m)) && may_be_late(m, b, c)) gmi_chunk_leaves_late(m, c);
    else if (gmi_chunk_evict(m, c, GEMINI_REASON_PLAN))
      gmi_log(m, GEMINI_LOG_WARNING, "planned eviction: %s", gmi_fail_message());
  }
}

/* Returns the active variant if it has a plan for this piece, and turns *piece from an index within update number
 * index into an index of input.pieces; otherwise NULL. piece is out of range if this update was cut differently. */
static variant_t *planned_piece(gmi_manager_t *m, uint32_t index, uint32_t *piece) {
  variant_t *v = gmi_tracer_active_variant(m->trace.tracer);
  if (!v || !v->bundle.made || index >= v->trace.update_count) return NULL;
  *piece += v->bundle.piece_first[index];
  return *piece < v->bundle.piece_first[index + 1] ? v : NULL;
}
void gmi_tracer_piece_begin(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  gmi_tracer_t *t = m->trace.tracer;
  variant_t *v = planned_piece(m, index, &piece);
  if (!t->now.pieces_ns) t->now.pieces_ns = m->device.ops->now(m->device.self);
  if (v) plan_fetch(m, v, v->bundle.input.pieces[piece].after_op, piece);
}
void gmi_tracer_piece_end(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  if (v) plan_evict(m, v, v->bundle.input.pieces[piece].after_op, piece);
}
/* Without a plan pieces run on the host, as the device's memory may be needed for operators that are not known yet. But
 * if host and files have no room for all bytes, they run on the device, where states then stay until their frames are
 * needed: what they leave free on the host is the room into which they are evicted. */
bool gmi_tracer_piece_on_device(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  return v ? v->bundle.plan.piece_on_device[piece] : gmi_home_is_short(m);
}
bool gmi_tracer_stays(gmi_manager_t *m, const gmi_chunk_t *c) {
  const variant_t *v = gmi_tracer_active_variant(m->trace.tracer);
  uint64_t index = c->index;
  for (uint32_t i = 0; i < gmi_chunk_arena(m, c)->index; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_has_tiers(a)) index += atomic_load(&a->chunk_count);
  }
  return v && v->bundle.made && index < v->bundle.input.chunk_count && v->bundle.chunk_of[index] == c &&
         v->bundle.plan.stays[index];
}
/* Notes in which op a piece could have been computed ahead. Without memory the plan knows less. */
static void note_ahead(gmi_tracer_t *t, variant_t *v, uint32_t piece) {
  gmi_trace_t *trace = &v->trace;
  if (trace->ahead_count != v->bundle.input.piece_count) {
    uint32_t *ops = realloc(trace->ahead_ops, v->bundle.input.piece_count * sizeof *ops);
    if (!ops) return;
    trace->ahead_ops = ops;
    trace->ahead_count = v->bundle.input.piece_count;
    memset(ops, 0xff, trace->ahead_count * sizeof *ops);
  }
  trace->ahead_ops[piece] = gmi_tracer_ops(t) - 1;
}

bool gmi_tracer_unit_ahead(gmi_manager_t *m, uint32_t arena, uint64_t element, uint64_t unit, bool *results_out) {
  gmi_tracer_t *t = m->trace.tracer;
  *results_out = false;
  variant_t *v = gmi_tracer_active_variant(t);
  for (uint32_t u = 0; v && v->bundle.made && u < v->trace.update_count; u++) {
    const gmi_trace_update_t *update = &v->trace.updates[u];
    if (update->arenas[0] != arena || element < update->first_element ||
        element - update->first_element >= update->element_count)
      continue;
    uint32_t piece = (uint32_t)(element / unit - update->first_element / unit);
    if (!gmi_tracer_ops(t) || !planned_piece(m, u, &piece)) return true;
    note_ahead(t, v, piece);
    *results_out = v->bundle.ahead && v->bundle.plan.piece_ahead[piece] == GMI_AHEAD_RESULTS;
    return v->bundle.ahead ? v->bundle.plan.piece_ahead[piece] : !v->bundle.plan.piece_on_device[piece];
  }
  return true;
}
uint64_t gmi_tracer_piece_use(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  variant_t *v = planned_piece(m, index, &piece);
  return v && v->bundle.plan.piece_use[piece] != UINT32_MAX ? position(m, v, v->bundle.plan.piece_use[piece])
                                                            : UINT64_MAX;
}
bool gmi_tracer_two_passes(gmi_manager_t *m, uint32_t index, uint32_t piece) {
  const variant_t *v = planned_piece(m, index, &piece);
  return v && v->bundle.plan.piece_passes[piece];
}

/* After op: stores the next use of each chunk that it accessed, for the choice of victims (0, i.e. outdated, if the
 * chunk must leave first), and issues the planned evictions. */
void gmi_tracer_plan_after_op(gmi_manager_t *m, variant_t *v, uint32_t op) {
  gmi_plan_bundle_t *b = &v->bundle;
  for (uint32_t k = b->input.ops[op].access_first; k < b->input.ops[op + 1].access_first; k++) {
    uint32_t next = b->plan.next_use[k];
    gmi_chunk_set_next_use(b->chunk_of[b->input.accesses[k].chunk], next == UINT32_MAX ? 0 : position(m, v, next));
  }
  plan_evict(m, v, op, GMI_NO_PIECE);
  gmi_due_chunks_leave(m);
}
