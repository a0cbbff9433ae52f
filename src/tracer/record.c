/* Records what an op accesses and how long it takes, and compares ops and updates of traces. Called by tracer.c;
 * gmi_tracer_touch(), gmi_tracer_wait(), gmi_tracer_pause() and gmi_tracer_resume() are called by src/chunk and
 * src/core through gmi_observer_t.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The time of an op is the time between two marks in its stream minus its stalls, or the calling thread's time if
 * the op runs there. A stall is the time in which the op's stream waits for a chunk: either for a fence
 * (gmi_tracer_wait()), or because the calling thread had to wait before it could queue work (gmi_tracer_pause()).
 * Marks are read later, when they have been reached (gmi_tracer_resolve()). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/group.h"
#include "tracer/variants.h"

/* ---- recording */
/* Order of uses: arena, offset, size, mode. */
static int by_range(const void *a, const void *b) {
  const gmi_trace_use_t *x = a, *y = b;
  if (x->arena != y->arena) return x->arena < y->arena ? -1 : 1;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  if (x->size != y->size) return x->size < y->size ? -1 : 1;
  return x->mode < y->mode ? -1 : x->mode > y->mode;
}

/* Appends a use to the open op. A range that is acquired several times within one op is appended several times;
 * gmi_tracer_canonical() merges them. */
void gmi_tracer_touch(gmi_manager_t *m, uint32_t store, uint64_t offset, uint64_t size, uint32_t mode) {
  gmi_tracer_t *t = m->trace.tracer;
  const bool sharded = gmi_arena_is_sharded(gmi_arena_at(m, store)); /* what is gathered is not the plan's */
  pthread_mutex_lock(&t->touch_lock);
  if (sharded) {
    if (t->op_open && !t->now.chosen) gmi_gathers_touch(m, t->gathers, store, offset, size);
  } else if (t->op_open && !t->record_lost) {
    gmi_trace_use_t *use = gmi_trace_add_use(&t->record);
    if (use) *use = (gmi_trace_use_t){ store, mode, offset, size };
    else t->record_lost = true;
  }
  pthread_mutex_unlock(&t->touch_lock);
}

void gmi_tracer_summed(gmi_manager_t *m, const gmi_chunk_t *c) {
  gmi_tracer_t *t = m->trace.tracer;
  if (!m->bracket.iteration_open || !gmi_tracer_ops(t)) return;
  const uint32_t op = gmi_tracer_ops(t) - 1;
  gmi_trace_collective_t *sum = gmi_trace_add_sum(&t->record);
  if (sum) *sum = (gmi_trace_collective_t){ op, op, GMI_NO_OP, gmi_chunk_arena(m, c)->index, c->index };
  else t->record_lost = true;
}

/* The index of the first sum that is queued in op or later. They are in the order of ops. */
static uint32_t first_sum(const gmi_trace_t *trace, uint32_t op) {
  uint32_t low = 0, high = trace->sum_count;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (trace->sums[middle].op < op) low = middle + 1;
    else high = middle;
  }
  return low;
}
uint32_t gmi_trace_sums_near(const gmi_trace_t *trace, uint32_t op) {
  return first_sum(trace, op + 1) - first_sum(trace, op ? op - 1 : 0);
}

/* Sorts the last op's uses and merges uses of the same range into one with all their modes, so that ops can be
 * compared with memcmp() whatever the order of their acquires. A range that separate acquires read and write counts
 * as read before it is written, since the order is not recorded. */
void gmi_tracer_canonical(gmi_trace_t *trace) {
  gmi_trace_op_t *op = &trace->ops[trace->op_count - 1];
  gmi_trace_use_t *uses = trace->uses + op->use_first;
  if (op->use_count > 1) qsort(uses, op->use_count, sizeof *uses, by_range);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < op->use_count; i++) {
    gmi_trace_use_t *last = kept ? &uses[kept - 1] : NULL;
    if (last && last->arena == uses[i].arena && last->offset == uses[i].offset && last->size == uses[i].size)
      last->mode |= uses[i].mode;
    else uses[kept++] = uses[i];
  }
  op->use_count = kept;
  trace->use_count = op->use_first + kept;
}

/* What the plan expects of an operator's peak; one that moves nothing expects no more than that there is room. */
uint64_t gmi_tracer_expected_peak(const variant_t *v, uint32_t op) {
  const gmi_plan_input_t *input = &v->bundle.input;
  const uint64_t peak = v->trace.ops[op].nonmodel_peak;
  if (!v->still || v->reads_only) return peak;
  const uint64_t room = (uint64_t)(input->frame_count - input->chunk_count) * input->frame_bytes;
  return room > peak ? room : peak;
}

bool gmi_tracer_peaks_vary(const variant_t *v) { return v->reads_only || v->still; }

/* Is a peak one that the variant's op may have? What a variant that only reads allocates often grows from one iteration
 * to the next, as a cache of keys and values does: its peaks lie between the lowest and the highest one so far, or
 * beyond them by at most the slack. So do those of a variant whose plan moves nothing. A larger difference is another
 * variant, whose plan has other frames to use, or which takes another time. */
static bool peak_fits(const gmi_tracer_t *t, const variant_t *v, uint64_t peak, const gmi_trace_op_t *op) {
  if (!gmi_tracer_peaks_vary(v)) return peak == op->nonmodel_peak;
  return peak <= op->nonmodel_peak + t->peak.slack && peak + t->peak.slack >= op->nonmodel_least;
}

/* Does an iteration write nothing, as a forward pass without gradients does, or nothing but arenas that grow? With
 * sharded arenas, which ranks have to agree on, none counts as such. */
bool gmi_tracer_only_reads(gmi_manager_t *m, const gmi_trace_t *trace) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++)
    if (gmi_group_at(m, i) && gmi_group_at(m, i)->arenas) return false;
  for (uint32_t i = 0; i < trace->use_count; i++)
    if (trace->uses[i].mode != GEMINI_READ && !gmi_arena_at(m, trace->uses[i].arena)->grows) return false;
  for (uint32_t i = 0; i < trace->chosen.count; i++)
    if (trace->chosen.uses[i].use.mode != GEMINI_READ) return false;
  return !trace->update_count;
}

/* Are the uses of an op of this iteration those of a variant's op? Both lists are canonical. Ranges of arenas that grow
 * may differ, in a variant that writes nothing else. */
static bool same_uses(gmi_manager_t *m, const variant_t *v, const gmi_trace_op_t *x, const gmi_trace_op_t *y) {
  if (x->use_count != y->use_count) return false;
  const gmi_trace_use_t *a = m->trace.tracer->record.uses + x->use_first, *b = v->trace.uses + y->use_first;
  if (!x->use_count || !memcmp(a, b, x->use_count * sizeof *a)) return true;
  bool same = v->reads_only;
  for (uint32_t i = 0; same && i < x->use_count; i++)
    same = !memcmp(a + i, b + i, sizeof *a) ||
           (a[i].arena == b[i].arena && a[i].mode == b[i].mode && gmi_arena_at(m, a[i].arena)->grows);
  return same;
}

/* Returns whether op i of this iteration is that of a variant: name (equal names have equal addresses), phase,
 * non-model peak and uses. Times do not count. */
bool gmi_tracer_same_op(gmi_manager_t *m, const variant_t *v, uint32_t i) {
  const gmi_tracer_t *t = m->trace.tracer;
  const gmi_trace_op_t *x = &t->record.ops[i], *y = &v->trace.ops[i];
  return x->name == y->name && x->phase == y->phase && peak_fits(t, v, x->nonmodel_peak, y) && same_uses(m, v, x, y);
}

bool gmi_tracer_take_ranges(gmi_manager_t *m, variant_t *v) {
  const gmi_trace_t *now = &m->trace.tracer->record;
  const uint32_t shift = m->cut.chunk_shift;
  bool others = false;
  GMI_ASSERT(now->use_count == v->trace.use_count);
  for (uint32_t i = 0; v->reads_only && i < v->trace.use_count; i++) {
    gmi_trace_use_t *was = &v->trace.uses[i];
    const gmi_trace_use_t *is = &now->uses[i];
    others |= is->offset >> shift != was->offset >> shift ||
              (is->offset + is->size - 1) >> shift != (was->offset + was->size - 1) >> shift;
    *was = *is;
  }
  return others;
}

bool gmi_tracer_same_update(const gmi_trace_update_t *a, const gmi_trace_update_t *b) {
  return !memcmp(a, b, sizeof *a);
}

/* Says in the log how an iteration came to differ from the variant that it was expected to repeat. */
static void log_departure(gmi_manager_t *m, const variant_t *v) {
  gmi_tracer_t *t = m->trace.tracer;
  const gmi_trace_t *expected = &v->trace;
  /* Behind the last operator so far, or within one: other threads may be adding to its uses, without the lock. */
  const bool between = t->op_index >= t->record.op_count, update = between || t->op_open;
  const uint32_t i = t->op_index - (between ? 1 : 0);
  const gmi_trace_op_t *op = &t->record.ops[i], *other = i < expected->op_count ? &expected->ops[i] : NULL;
  char why[160];
  if (update) snprintf(why, sizeof why, "an update behind it was not expected");
  else if (!other) snprintf(why, sizeof why, "%u operators were expected", expected->op_count);
  else if (op->name != other->name || op->phase != other->phase)
    snprintf(why, sizeof why, "%.100s was expected", other->name);
  else if (!same_uses(m, v, op, other)) snprintf(why, sizeof why, "its accesses are others than expected");
  else
    snprintf(why, sizeof why, "its non-model peak is %llu bytes, %llu were expected",
             (unsigned long long)op->nonmodel_peak, (unsigned long long)other->nonmodel_peak);
  gmi_log(m, GEMINI_LOG_INFO, "iteration %llu departs from what was expected at operator %u, %.100s: %s",
          (unsigned long long)t->iteration, i, op->name, why);
}

/* The active variant no longer agrees with this iteration: makes the most recently used variant that agrees so far
 * active, or none. wants_op: the variant's next op must also have this op's name and phase. The caller has cleared
 * the old variant's agrees. entered is reset, because the resident set now belongs to no plan. */
void gmi_tracer_choose_active(gmi_manager_t *m, const gmi_trace_op_t *wants_op) {
  gmi_tracer_t *t = m->trace.tracer;
  uint32_t best = GMI_NONE;
  for (uint32_t i = 0; i < GMI_VARIANTS; i++) {
    variant_t *v = &t->variants[i];
    if (!v->used || !t->agrees[i]) continue;
    if (wants_op) {
      if (t->op_index >= v->trace.op_count) continue;
      const gmi_trace_op_t *op = &v->trace.ops[t->op_index];
      if (op->name != wants_op->name || op->phase != wants_op->phase) continue;
    }
    if (best == GMI_NONE || v->last_used > t->variants[best].last_used) best = i;
  }
  if (t->active != GMI_NONE && !t->departed) {
    t->departed = true;
    m->stats.departures++;
    log_departure(m, &t->variants[t->active]);
  }
  t->active = best;
  t->entered = GMI_NONE;
}

/* Makes room for the times of count ops; false: no memory. Both arrays grow before the capacity does, so a failure
 * in between leaves them usable. */
bool gmi_tracer_timings_reserve(gmi_tracer_t *t, uint32_t count) {
  if (count <= t->timing_capacity) return true;
  uint32_t capacity = t->timing_capacity ? t->timing_capacity * 2 : 256;
  timing_t *timings = realloc(t->timings, capacity * sizeof *timings);
  if (timings) t->timings = timings;
  uint64_t *durations = realloc(t->durations, capacity * sizeof *durations);
  if (durations) t->durations = durations;
  if (!timings || !durations) return false;
  t->timing_capacity = capacity;
  return true;
}

/* Reads the time of a mark; false if the device no longer has it. */
static bool time_of(gmi_manager_t *m, gmi_fence_t fence, uint64_t *ns_out) {
  return m->device.ops->stream.mark_time(m->device.self, gmi_fence_stream(fence), gmi_fence_mark(fence), ns_out) ==
         GEMINI_OK;
}

/* Counts a wait for a gather or a sum. group, what: as in stall_t. */
static void count_wait(gmi_manager_t *m, uint8_t group, uint8_t what, uint64_t ns) {
  gmi_group_t *g = group ? gmi_group_at(m, group - 1u) : NULL;
  if (g) *(what == GMI_WAITS_GATHER ? &g->waits.gather_ns : &g->waits.sum_ns) += ns;
}

/* Counts the stalls of chosen ops, as far as they have ended. Their ops' times are not kept. */
static void resolve_chosen(gmi_manager_t *m, bool block) {
  gmi_tracer_t *t = m->trace.tracer;
  for (; t->now.stalls_read < t->stall_count; t->now.stalls_read++) {
    const stall_t *stall = &t->stalls[t->now.stalls_read];
    uint64_t before, after;
    if (!stall->chosen) continue;
    if (!gmi_fence_reached(m, stall->after)) {
      if (!block) return;
      gmi_fence_sync(m, stall->after);
    }
    if (time_of(m, stall->before, &before) && time_of(m, stall->after, &after)) m->stats.stall_ns += after - before;
  }
}

/* Reads the times of ended ops whose end has been reached, in order. A time is unknown (UINT64_MAX) if a mark is
 * too old to be read. Foreseen stalls are subtracted from the op's time; unforeseen ones remain part of it, because
 * the planner's model lacks them. Both count in gemini_stats_t.stall_ns. */
static void resolve_ops(gmi_manager_t *m, bool block, uint32_t most) {
  gmi_tracer_t *t = m->trace.tracer;
  resolve_chosen(m, block);
  uint32_t ended = t->record.op_count - (t->op_open && t->record.op_count ? 1 : 0);
  if ((uint64_t)t->resolved + most < ended) ended = t->resolved + most;
  for (; t->resolved < ended; t->resolved++) {
    timing_t *k = &t->timings[t->resolved];
    if (k->end && !gmi_fence_reached(m, k->end)) {
      if (!block) return;
      gmi_fence_sync(m, k->end);
    }
    uint64_t begin = k->begin_ns, end = k->end_ns, stall = k->stall_ns, unforeseen = k->unforeseen_ns;
    bool known = !k->end || (time_of(m, k->begin, &begin) && time_of(m, k->end, &end));
    for (uint32_t s = k->stall_first; known && s < k->stall_first + k->stall_count; s++) {
      uint64_t before, after;
      known = time_of(m, t->stalls[s].before, &before) && time_of(m, t->stalls[s].after, &after);
      if (known) *(t->stalls[s].unforeseen ? &unforeseen : &stall) += after - before;
      if (known) count_wait(m, t->stalls[s].group, t->stalls[s].what, after - before);
    }
    if (known && !t->resolved) t->now.step.first_ns = begin;
    t->durations[t->resolved] = known ? (end - begin > stall ? end - begin - stall : 1) : UINT64_MAX;
    if (known) m->stats.stall_ns += stall + unforeseen;
    if (!known) t->in_ops_ns = UINT64_MAX;
    else if (t->in_ops_ns != UINT64_MAX) t->in_ops_ns += end - begin, t->now.ended_ns = end;
  }
}
void gmi_tracer_resolve(gmi_manager_t *m, bool block) { resolve_ops(m, block, UINT32_MAX); }
uint64_t gmi_tracer_outside(gmi_manager_t *m, uint64_t begin_ns, uint64_t now_ns) {
  const gmi_tracer_t *t = m->trace.tracer;
  if (t->in_ops_ns >= now_ns - begin_ns) return 0;
  const uint64_t outside_ns = now_ns - begin_ns - t->in_ops_ns;
  if (!t->now.pieces_ns || m->config.device == GEMINI_DEVICE_SIMULATED) return outside_ns;
  const uint64_t from_ns = t->now.ended_ns > t->now.pieces_ns ? t->now.ended_ns : t->now.pieces_ns;
  uint64_t end_ns = now_ns;
  if (gmi_fence_reached(m, m->update.end) && (!time_of(m, m->update.end, &end_ns) || end_ns > now_ns)) end_ns = now_ns;
  const uint64_t pieces_ns = end_ns > from_ns ? end_ns - from_ns : 0;
  return pieces_ns < outside_ns ? outside_ns - pieces_ns : 1;
}
/* For the end of each op: the times of one op take about 10 microseconds to read on a GPU. Where the caller has waited
 * for the device, those of many ops are there at once, while the device waits for the caller. */
void gmi_tracer_resolve_few(gmi_manager_t *m) { resolve_ops(m, false, 8); }

/* Returns whether a wait of stream counts as a stall of the open op. */
static bool is_stall(const gmi_tracer_t *t, uint32_t stream) {
  return t->op_open && t->op_stream == stream && !t->record_lost;
}

/* Appends a stall of the open op. The stalls of an op are adjacent, because one op is open at a time. */
static void count_stall(gmi_manager_t *m, stall_t stall) {
  gmi_tracer_t *t = m->trace.tracer;
  timing_t *k = &t->timings[t->op_index];
  if (!k->stall_count++) k->stall_first = t->stall_count;
  stall.chosen = t->now.chosen;
  t->stalls[t->stall_count++] = stall;
  const char *name = !stall.group                     ? "wait for chunk"
                     : stall.what == GMI_WAITS_GATHER ? "wait for gather"
                                                      : "wait for sum";
  gmi_timeline_slice(m, "wait", name, stall.before, stall.after);
}

/* Makes stream wait for fence. If the open op runs on stream, marks before and after the wait measure the stall; on
 * the calling thread the clock does. Without room for another stall the wait happens uncounted. */
gemini_status_t gmi_tracer_wait(gmi_manager_t *m, uint32_t stream, gmi_fence_t fence) {
  gmi_tracer_t *t = m->trace.tracer;
  if (gmi_fence_reached(m, fence) || (stream != GMI_CALLER && gmi_fence_stream(fence) == stream)) return GEMINI_OK;
  bool count = is_stall(t, stream);
  timing_t *k = count ? &t->timings[t->op_index] : NULL;
  gmi_group_wait_t what = GMI_WAITS_GATHER;
  const gmi_group_t *g = count ? gmi_group_waited(m, fence, &what) : NULL;
  stall_t stall = { .group = (uint8_t)(g ? g->index + 1 : 0), .what = (uint8_t)what };
  if (count && stream == GMI_CALLER) {
    uint64_t begin = m->device.ops->now(m->device.self);
    gemini_status_t status = gmi_fence_sync(m, fence);
    const uint64_t ns = m->device.ops->now(m->device.self) - begin;
    k->stall_ns += ns;
    count_wait(m, stall.group, stall.what, ns);
    return status;
  }
  count = count && t->stall_count < STALLS_LIMIT;
  gemini_status_t status = count ? gmi_fence_now(m, stream, &stall.before) : GEMINI_OK;
  if (!status) status = gmi_fence_wait(m, stream, fence);
  if (!status && count) status = gmi_fence_now(m, stream, &stall.after);
  if (!status && count) count_stall(m, stall);
  return status;
}

void gmi_tracer_pause(gmi_manager_t *m, uint32_t stream, bool foreseen, gmi_pause_t *pause_out) {
  gmi_tracer_t *t = m->trace.tracer;
  *pause_out = (gmi_pause_t){ .foreseen = foreseen };
  if (!is_stall(t, stream) || t->stall_count == STALLS_LIMIT) return;
  /* without a mark the pause is not counted */
  if (stream != GMI_CALLER && gmi_fence_now(m, stream, &pause_out->before)) return;
  pause_out->begin_ns = m->device.ops->now(m->device.self);
}

void gmi_tracer_resume(gmi_manager_t *m, uint32_t stream, const gmi_pause_t *pause) {
  gmi_tracer_t *t = m->trace.tracer;
  uint64_t now = pause->begin_ns ? m->device.ops->now(m->device.self) : 0;
  if (!now || now - pause->begin_ns < PAUSE_NS) return;
  timing_t *k = &t->timings[t->op_index];
  stall_t stall = { .before = pause->before, .unforeseen = !pause->foreseen };
  if (stream == GMI_CALLER) *(pause->foreseen ? &k->stall_ns : &k->unforeseen_ns) += now - pause->begin_ns;
  else if (!gmi_fence_now(m, stream, &stall.after)) count_stall(m, stall);
}
