/* Gathers ahead of use. SPDX-License-Identifier: Apache-2.0
 *
 * The record of an iteration lists its operators that use sharded parameters, each as a hash of its name and phase and
 * its chunks. A complete record becomes a *kind*, with a plan of gathers for each group (policy/gathers.c). An
 * iteration follows the kind that is expected by the order of the last ones until an operator's chunks differ; then
 * another kind that agrees so far, or none. */
#include "tracer/gathers.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/hash.h"
#include "chunk/arena.h"
#include "chunk/group.h"
#include "chunk/group_check.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "tracer/gathers_kinds.h"

gemini_status_t gmi_gathers_open(gmi_gathers_t **gathers_out) {
  gmi_gathers_t *g = calloc(1, sizeof *g);
  if (!g) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the record of gathers");
  g->active = g->ended = GMI_NONE;
  *gathers_out = g;
  return GEMINI_OK;
}

static void record_free(record_t *r) {
  free(r->ops);
  free(r->uses);
  *r = (record_t){ 0 };
}
static void kind_clear(kind_t *kind) {
  record_free(&kind->record);
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    free(kind->groups[i].chunks);
    gmi_journal_drop(kind->groups[i].journal);
    gmi_gather_plan_free(&kind->groups[i].plan);
  }
  *kind = (kind_t){ 0 };
}
static void record_clear(gmi_gathers_t *g) {
  g->record.op_count = g->record.use_count = g->use_mark = 0;
  g->lost = false;
  free(g->ending.agreed);
  g->ending = (ending_t){ 0 };
}

void gmi_gathers_forget(gmi_gathers_t *g) {
  for (uint32_t i = 0; i < KINDS; i++) kind_clear(&g->kinds[i]);
  g->active = g->ended = GMI_NONE;
  g->history.count = 0;
  record_clear(g);
}
void gmi_gathers_close(gmi_gathers_t *g) {
  if (!g) return;
  gmi_gathers_forget(g);
  record_free(&g->record);
  free(g);
}

gemini_status_t gmi_gathers_may_go_on(const gmi_gathers_t *g) {
  if (!g->ending.posted && !g->ending.done) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_STATE, 0, "the iteration has begun to end: call gemini_iteration_end() again");
}
bool gmi_gathers_follow(const gmi_gathers_t *g, uint32_t group) {
  return g->active != GMI_NONE && !(g->on_demand >> group & 1);
}

/* ---- recording */
static bool use_add(record_t *r, uint64_t use) {
  uint64_t *uses = gmi_array_room(r->uses, r->use_count, &r->use_capacity, sizeof *uses);
  if (!uses) return false;
  r->uses = uses;
  r->uses[r->use_count++] = use;
  return true;
}
static bool op_add(record_t *r, op_t op) {
  op_t *ops = gmi_array_room(r->ops, r->op_count, &r->op_capacity, sizeof *ops);
  if (!ops) return false;
  r->ops = ops;
  r->ops[r->op_count++] = op;
  return true;
}

void gmi_gathers_touch(gmi_manager_t *m, gmi_gathers_t *g, uint32_t arena, uint64_t offset, uint64_t size) {
  const gmi_arena_t *a = gmi_arena_at(m, arena);
  if (gmi_arena_is_gradients(a) || !size) return; /* they are not gathered for operators */
  for (uint64_t i = offset >> m->cut.chunk_shift; i <= (offset + size - 1) >> m->cut.chunk_shift; i++)
    if (!use_add(&g->record, (uint64_t)arena << 32 | i)) g->lost = true;
}

int gmi_gathers_by_use(const void *a, const void *b) {
  const uint64_t *x = a, *y = b;
  return *x < *y ? -1 : *x > *y;
}

/* ---- kinds of iterations */
static bool same_op(const record_t *a, const record_t *b, uint32_t i) {
  const op_t *x = &a->ops[i], *y = &b->ops[i];
  return x->hash == y->hash && x->use_count == y->use_count &&
         !memcmp(a->uses + x->use_first, b->uses + y->use_first, x->use_count * sizeof *a->uses);
}
static bool agrees(const record_t *record, const kind_t *kind) {
  if (!kind->used || record->op_count > kind->record.op_count) return false;
  for (uint32_t i = 0; i < record->op_count; i++)
    if (!same_op(record, &kind->record, i)) return false;
  return true;
}
/* Does the kind have the open operator here, by its name? Operators that gather nothing are not in it. */
static bool has_here(const gmi_gathers_t *g, const kind_t *kind) {
  return g->record.op_count < kind->record.op_count && kind->record.ops[g->record.op_count].hash == g->op_hash;
}
/* The kind used last among those that agree with the record so far, and, with open, with the open operator's name. */
static uint32_t agreeing(const gmi_gathers_t *g, bool open) {
  uint32_t best = GMI_NONE;
  for (uint32_t i = 0; i < KINDS; i++)
    if (agrees(&g->record, &g->kinds[i]) && (!open || has_here(g, &g->kinds[i])) &&
        (best == GMI_NONE || g->kinds[i].last_used > g->kinds[best].last_used))
      best = i;
  return best;
}

/* Other ranks' messages say it if they wait for this one in vain. */
static void note(gmi_manager_t *m, const char *text) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    gmi_group_t *group = gmi_group_at(m, i);
    if (group && group->gather.ops->note) group->gather.ops->note(group->gather.self, text);
    if (group && group->reduce.ops->note) group->reduce.ops->note(group->reduce.self, text);
  }
}

/* The kind of the next iteration, by the order of the last ones. If that says nothing, the one before the newest: after
 * a first interruption, by an evaluation, say, the interrupted kind is expected to continue. All ranks expect the same:
 * their iterations are of the same kinds. */
static uint32_t expected_kind(const gmi_gathers_t *g) {
  const gmi_history_t *h = &g->history;
  const uint32_t next = gmi_history_next(h->past, h->count);
  if (next != GMI_NONE || !h->count) return next;
  return h->past[h->count - (h->count > 1 ? 2 : 1)];
}

void gmi_gathers_begin(gmi_manager_t *m, gmi_gathers_t *g) {
  record_clear(g);
  g->on_demand = 0;
  g->active = expected_kind(g);
  if (g->noted) note(m, "");
  g->noted = g->changed = false;
}

static void count_change(gmi_manager_t *m, const kind_t *left) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    gmi_group_t *group = gmi_group_at(m, i);
    if (group && left->groups[i].plan.event_first) group->planned.changes++;
  }
}

/* The operator, open or the last one that has ended, is not the one that the kind has here. */
static void depart(gmi_manager_t *m, gmi_gathers_t *g, bool open) {
  char text[GMI_COMM_LABEL_BYTES];
  const char *op = m->trace.advice->op_name(m);
  snprintf(text, sizeof text, "left the recorded order of operators in %s", op ? op : "?");
  if (!g->noted) {
    note(m, text);
    count_change(m, &g->kinds[g->active]);
  }
  g->noted = true;
  g->active = agreeing(g, open);
  g->changed = g->active != GMI_NONE;
}

/* Without its record this rank cannot do what the others do next: they hear of it now, not when a deadline ends. */
static void lose(gmi_manager_t *m, gmi_gathers_t *g) {
  g->active = GMI_NONE;
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    const gmi_group_t *group = gmi_group_at(m, i);
    if (group && group->arenas && group->ranks > 1)
      gmi_group_give_up(group, "no memory to record the gathers of an iteration");
  }
}

void gmi_gathers_op_end(gmi_manager_t *m, gmi_gathers_t *g, uint32_t index) {
  record_t *r = &g->record;
  /* An end that failed behind this is made again: what came in between belongs to the same operator. */
  if (r->op_count && r->ops[r->op_count - 1].op == index) g->use_mark = r->ops[--r->op_count].use_first;
  uint32_t first = g->use_mark, kept = first;
  if (g->lost) lose(m, g);
  if (r->use_count == first || g->lost) return;
  qsort(r->uses + first, r->use_count - first, sizeof *r->uses, gmi_gathers_by_use);
  for (uint32_t i = first; i < r->use_count; i++)
    if (kept == first || r->uses[kept - 1] != r->uses[i]) r->uses[kept++] = r->uses[i];
  r->use_count = g->use_mark = kept;
  g->lost = !op_add(r, (op_t){ g->op_hash, first, kept - first, index, 0 });
  if (g->lost) lose(m, g);
  else if (g->active != GMI_NONE && !agrees(r, &g->kinds[g->active])) depart(m, g, false);
}

/* ---- following a kind */
static gmi_chunk_t *chunk_of(gmi_manager_t *m, uint64_t use) {
  return &gmi_arena_at(m, (uint32_t)(use >> 32))->chunks[(uint32_t)use];
}

/* What depends on this rank alone comes first: all ranks queue the same gathers in the same batches. */
static gemini_status_t prepare_gathers(gmi_manager_t *m, const group_plan_t *p, uint32_t op) {
  gemini_status_t status = GEMINI_OK;
  if (!p->plan.event_first) return GEMINI_OK;
  for (uint32_t e = p->plan.event_first[op]; !status && e < p->plan.event_first[op + 1]; e++) {
    gmi_chunk_t *c = chunk_of(m, p->chunks[p->plan.events[e].chunk]);
    bool queued = false;
    if (p->plan.events[e].leaves) status = gmi_gathered_evict(m, c);
    else if (!gmi_chunk_is_resident(c)) status = gmi_gathered_queue(m, c, &queued);
  }
  return status;
}
static gemini_status_t queue_gathers(gmi_manager_t *m, const group_plan_t *p, uint32_t op) {
  gemini_status_t status = GEMINI_OK;
  if (!p->plan.event_first) return GEMINI_OK;
  for (uint32_t e = p->plan.event_first[op]; !status && e < p->plan.event_first[op + 1]; e++)
    if (!p->plan.events[e].leaves)
      status = gmi_chunk_fetch(m, chunk_of(m, p->chunks[p->plan.events[e].chunk]), false, GEMINI_REASON_PLAN,
                               GMI_TAKE_EVICT);
  return status;
}

/* What another kind's plan has gathered, and this one does not have in front of operator op, leaves: no event of this
 * plan would free its frames, which may be more than this kind of iteration can spare. */
static gemini_status_t drop_unplanned(gmi_manager_t *m, const kind_t *kind, uint32_t group, uint32_t op) {
  const group_plan_t *p = &kind->groups[group];
  gemini_status_t status = GEMINI_OK;
  if (!p->plan.event_first) return GEMINI_OK;
  bool *has = calloc((size_t)p->chunk_count + 1, sizeof *has);
  if (!has) return no_memory(&kind->record);
  for (uint32_t e = 0; e < p->plan.event_first[op]; e++) has[p->plan.events[e].chunk] = !p->plan.events[e].leaves;
  for (uint32_t i = 0; !status && i < m->frames.capacity; i++) {
    gmi_chunk_t *c = m->frames.at[i].chunk;
    if (!c || !gmi_chunk_is_gathered(m, c)) continue;
    const gmi_arena_t *a = gmi_chunk_arena(m, c);
    if (a->shard.group != group || gmi_arena_is_gradients(a) || gmi_gathered_stays(a)) continue;
    const uint64_t *found = find_use(p->chunks, p->chunk_count, (uint64_t)a->index << 32 | c->index);
    if (!found || !has[found - p->chunks]) status = gmi_gathered_evict(m, c);
  }
  free(has);
  return status;
}

/* Queues the gathers of the open operator, the next one of the active kind. */
static gemini_status_t follow(gmi_manager_t *m, gmi_gathers_t *g) {
  gemini_status_t status = GEMINI_OK;
  const kind_t *kind = &g->kinds[g->active];
  const uint32_t op = g->record.op_count;
  for (uint32_t i = 0; i < GMI_GROUPS; i++)
    if (kind->groups[i].plan.event_first) g->on_demand |= (uint32_t)kind->groups[i].plan.on_demand[op] << i;
  for (uint32_t i = 0; !status && g->changed && i < GMI_GROUPS; i++) status = drop_unplanned(m, kind, i, op);
  g->changed &= status != GEMINI_OK;
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++) status = prepare_gathers(m, &kind->groups[i], op);
  gmi_gather_batch_begin(m);
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++) status = queue_gathers(m, &kind->groups[i], op);
  return gmi_gather_batch_end(m, status, false);
}

gemini_status_t gmi_gathers_op_begin(gmi_manager_t *m, gmi_gathers_t *g, const char *name, uint32_t phase) {
  g->op_hash = gmi_hash_text(gmi_hash(GMI_HASH_NOTHING, phase), name);
  g->on_demand = 0;
  return g->active != GMI_NONE && has_here(g, &g->kinds[g->active]) ? follow(m, g) : GEMINI_OK;
}

gemini_status_t gmi_gathers_meet(gmi_manager_t *m, gmi_gathers_t *g, uint32_t index) {
  const bool ended = g->record.op_count && g->record.ops[g->record.op_count - 1].op == index; /* its end failed */
  if (g->active == GMI_NONE || ended || has_here(g, &g->kinds[g->active])) return GEMINI_OK;
  depart(m, g, true);
  return g->active == GMI_NONE ? gmi_gathered_leave(m, false) : follow(m, g);
}

/* ---- what the ranks compare */
static bool is_of(gmi_manager_t *m, uint64_t use, uint32_t group) {
  return gmi_arena_at(m, (uint32_t)(use >> 32))->shard.group == group;
}
static uint64_t mixed(uint64_t h, uint64_t number) {
  h = gmi_hash(h, number);
  return h ^ h >> 29;
}

/* Of the arenas that are sharded over a group. */
static uint64_t layout_of(gmi_manager_t *m, uint32_t group) {
  uint64_t h = mixed(GMI_HASH_NOTHING, gmi_chunk_bytes(m));
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_is_sharded(a) || a->shard.group != group) continue;
    const uint64_t fields[] = { i, a->kind, atomic_load(&a->size), a->element_bytes, a->shard.stage, a->shard.dtype };
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++) h = mixed(h, fields[k]);
  }
  return h;
}

/* "operator h.0.up, chunk 3 of arena weights": what a message says of an operator, by its first chunk of the group. */
static void say_op(gmi_manager_t *m, const gmi_trace_t *trace, const op_t *op, uint64_t use, uint32_t count,
                   char *text_out) {
  const gmi_arena_t *a = gmi_arena_at(m, (uint32_t)(use >> 32));
  const char *name = op->op < trace->op_count ? trace->ops[op->op].name : NULL;
  char more[24] = "";
  if (count > 1) snprintf(more, sizeof more, " and %u more", count - 1);
  snprintf(text_out, GMI_JOURNAL_TEXT_BYTES, "operator %.56s, chunk %u%s of arena %.16s", name ? name : "?",
           (uint32_t)use, more, a->name);
}

/* Of an iteration with this record and trace; NULL: no memory. */
static gmi_journal_t *journal_make(gmi_manager_t *m, const record_t *r, const gmi_trace_t *trace, uint32_t group) {
  gmi_journal_t *j = gmi_journal_new(r->op_count, (uint64_t)r->op_count * GMI_JOURNAL_TEXT_BYTES);
  if (!j) return NULL;
  j->layout = layout_of(m, group);
  j->operators = GMI_HASH_NOTHING;
  uint64_t at = 0;
  for (uint32_t i = 0; i < r->op_count; i++) {
    const op_t *op = &r->ops[i];
    uint64_t h = GMI_HASH_NOTHING, first = 0;
    uint32_t count = 0;
    for (uint32_t k = op->use_first; k < op->use_first + op->use_count; k++) {
      if (!is_of(m, r->uses[k], group)) continue;
      if (!count++) first = r->uses[k];
      h = mixed(h, r->uses[k]);
    }
    if (!count) continue;
    j->operators = mixed(j->operators, h);
    j->ops[j->op_count++] = (gmi_journal_op_t){ h, op->hash, at };
    say_op(m, trace, op, first, count, j->texts + at);
    at += strlen(j->texts + at) + 1;
  }
  return j;
}

static uint64_t plan_digest(const group_plan_t *p, uint32_t op_count) {
  uint64_t h = GMI_HASH_NOTHING;
  for (uint32_t op = 0; p->plan.event_first && op < op_count; op++) {
    h = mixed(h, p->plan.on_demand[op]);
    for (uint32_t e = p->plan.event_first[op]; e < p->plan.event_first[op + 1]; e++)
      h = mixed(h, (uint64_t)p->plan.events[e].chunk << 1 | p->plan.events[e].leaves);
  }
  return h | 1;
}

/* Tells the other ranks of each group what the iteration has done. kind: that it followed to its end; or NULL, then
 * the groups of `fresh` get their journals. */
static gemini_status_t post(gmi_manager_t *m, gmi_gathers_t *g, const gmi_trace_t *trace, const kind_t *kind,
                            kind_t *fresh) {
  const record_t *r = &g->record;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++) {
    gmi_group_t *group = gmi_group_at(m, i);
    if (!group || !group->arenas || group->ranks == 1) continue;
    gmi_journal_t *j = kind ? kind->groups[i].journal : journal_make(m, r, trace, i);
    if (!j) return no_memory(r);
    if (!kind) fresh->groups[i].journal = j;
    if (g->ending.posted >> i & 1) continue;
    if (j->op_count || group->queued.gathers)
      status = gmi_group_check_post(m, group, j, kind ? plan_digest(&kind->groups[i], r->op_count) : 0);
    if (!status) g->ending.posted |= 1U << i;
  }
  return status;
}

/* ---- a new kind */
/* Each value becomes the least of all ranks', or with most the largest. An earlier call of the same end that agreed on
 * these values gives its results. */
static gemini_status_t agree(gmi_manager_t *m, gmi_gathers_t *g, uint32_t group, uint64_t *values, uint32_t count,
                             bool most, const char *label) {
  gmi_group_t *ranks = gmi_group_at(m, group);
  ending_t *e = &g->ending;
  if (e->next == e->count) {
    uint64_t *all = calloc(ranks->ranks, (count + 1) * sizeof *all);
    uint64_t *agreed = realloc(e->agreed, (e->count + count + 1) * sizeof *agreed);
    if (agreed) e->agreed = agreed;
    gemini_status_t status = all && agreed ? GEMINI_OK : no_memory(record_of(g));
    if (!status) status = gmi_group_exchange_locked(m, ranks, values, count * sizeof *values, all, label);
    for (uint64_t i = 0; !status && i < (uint64_t)ranks->ranks * count; i++)
      if (most ? all[i] > values[i % count] : all[i] < values[i % count]) values[i % count] = all[i];
    free(all);
    if (status) return status;
    memcpy(e->agreed + e->count, values, count * sizeof *values);
    e->count += count;
  }
  memcpy(values, e->agreed + e->next, count * sizeof *values);
  e->next += count;
  return GEMINI_OK;
}

/* The uses of one group's chunks, numbered from 0, as the policy wants them. */
typedef struct {
  gmi_gather_input_t input;
  uint32_t *use_first, *uses, *frames;
  uint32_t *own; /* [op_count] chunks that are gathered in the op at least: its own, or with stays all so far */
  uint64_t *chunks;
} numbered_t;
static void numbered_free(numbered_t *n) {
  free(n->use_first);
  free(n->uses);
  free(n->frames);
  free(n->own);
  free(n->chunks);
}

/* Lists the group's chunks, ascending. Returns their number. */
static uint32_t number_chunks(gmi_manager_t *m, const record_t *r, uint32_t group, numbered_t *n) {
  uint32_t count = 0, chunks = 0;
  for (uint32_t i = 0; i < r->use_count; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, (uint32_t)(r->uses[i] >> 32));
    if (a->shard.group != group) continue;
    n->chunks[count++] = r->uses[i];
    n->input.stays |= gmi_gathered_stays(a);
  }
  if (count) qsort(n->chunks, count, sizeof *n->chunks, gmi_gathers_by_use);
  for (uint32_t i = 0; i < count; i++)
    if (!i || n->chunks[i] != n->chunks[chunks - 1]) n->chunks[chunks++] = n->chunks[i];
  return chunks;
}
static gemini_status_t number(gmi_manager_t *m, const record_t *r, uint32_t group, numbered_t *n) {
  *n = (numbered_t){ 0 };
  n->use_first = calloc((size_t)r->op_count + 1, sizeof *n->use_first);
  n->frames = calloc((size_t)r->op_count + 1, sizeof *n->frames);
  n->own = calloc((size_t)r->op_count + 1, sizeof *n->own);
  n->uses = calloc((size_t)r->use_count + 1, sizeof *n->uses);
  n->chunks = calloc((size_t)r->use_count + 1, sizeof *n->chunks);
  bool *seen = calloc((size_t)r->use_count + 1, sizeof *seen);
  if (!n->use_first || !n->frames || !n->own || !n->uses || !n->chunks || !seen) {
    free(seen);
    return no_memory(r);
  }
  uint32_t count = 0, so_far = 0, chunks = number_chunks(m, r, group, n);
  for (uint32_t op = 0; op < r->op_count; op++) {
    n->use_first[op] = count;
    for (uint32_t k = 0; k < r->ops[op].use_count; k++) {
      const uint64_t *found = find_use(n->chunks, chunks, r->uses[r->ops[op].use_first + k]);
      if (!found) continue;
      n->uses[count] = (uint32_t)(found - n->chunks);
      so_far += !seen[n->uses[count]];
      seen[n->uses[count++]] = true;
    }
    n->own[op] = n->input.stays ? so_far : count - n->use_first[op];
  }
  free(seen);
  n->use_first[r->op_count] = count;
  _Static_assert((int)GMI_GATHERS_BATCH == (int)GMI_GATHERS_HELD, "what is planned together is queued together");
  n->input.ahead = GMI_GATHERS_AHEAD;
  n->input.burst = GMI_GATHERS_BURST;
  n->input.batch = GMI_GATHERS_BATCH;
  n->input.op_count = r->op_count;
  n->input.chunk_count = chunks;
  n->input.frames = n->frames;
  n->input.use_first = n->use_first;
  n->input.uses = n->uses;
  return GEMINI_OK;
}

/* ---- frames */
/* The operator of the trace at which what is gathered changes next after operator op of the record. */
static uint32_t until(const record_t *r, uint32_t op, const gmi_trace_t *trace) {
  return op + 1 < r->op_count ? r->ops[op + 1].op : trace->op_count;
}

/* Of the frames that are free beside an op's own chunks and all else that it needs, 0 to SHARES - 1 equal parts are for
 * chunks gathered ahead of use or kept after it; the rest is the plan's. */
enum { SHARES = 5, HALF = 2 };

/* How many frames a group's gathered chunks may take in an op: a share of what is free beside the op's own chunks and
 * all else that it, and the ops behind it that gather nothing, need at the same time, beside those that sums are to
 * give back, and beside the states that have no room below (home). Where that does not fit, the iteration has shown
 * that it fits on demand: no frames. */
static uint64_t frames_of(gmi_manager_t *m, const record_t *r, const gmi_trace_t *trace, const numbered_t *groups,
                          uint32_t group, uint32_t op, uint32_t share, uint64_t home) {
  uint64_t need = 0, count = 0, sums = 0;
  for (uint32_t i = r->ops[op].op; i < until(r, op, trace); i++) {
    const uint64_t others = trace->ops[i].heap_pages + (uint64_t)gmi_trace_other_chunks(m, trace, &trace->ops[i]);
    const uint64_t leaving = gmi_trace_sums_near(trace, i);
    if (others > need) need = others;
    if (leaving > sums) sums = leaving;
  }
  for (uint32_t i = 0; i < GMI_GROUPS; i++) {
    if (!groups[i].own) continue;
    need += groups[i].own[op];
    count++;
  }
  need += home;
  if (need > m->frames.count) return 0;
  const uint64_t beside = m->frames.count - need, free = beside - gmi_frames_for_sums(sums, beside);
  const uint64_t frames = groups[group].own[op] + free * share / (SHARES - 1) / count;
  return frames < groups[group].input.chunk_count ? frames : groups[group].input.chunk_count;
}

/* Makes the group's plan for a share, of which all ranks have as many frames. */
static gemini_status_t plan_share(gmi_manager_t *m, gmi_gathers_t *g, const gmi_trace_t *trace, numbered_t *groups,
                                  uint32_t group, uint32_t share, gmi_gather_plan_t *plan_out) {
  const record_t *r = record_of(g);
  numbered_t *n = &groups[group];
  uint64_t *frames = calloc((uint64_t)r->op_count + 1, sizeof *frames);
  if (!frames) return no_memory(r);
  const uint64_t home = gmi_trace_home_frames(m, trace);
  for (uint32_t op = 0; op < r->op_count; op++) frames[op] = frames_of(m, r, trace, groups, group, op, share, home);
  gemini_status_t status = agree(m, g, group, frames, r->op_count, false, "frames for gathers");
  for (uint32_t op = 0; op < r->op_count; op++) n->frames[op] = (uint32_t)frames[op];
  free(frames);
  if (!status && gmi_gather_plan_make(&n->input, plan_out)) status = no_memory(r);
  return status;
}

/* Fills in what gathered parameters take in each op of the trace of an iteration with this record. */
static void fill_gathered(const kind_t *kind, const record_t *r, gmi_trace_t *trace) {
  for (uint32_t i = 0; i < trace->op_count; i++) trace->ops[i].gathered = 0;
  for (uint32_t op = 0; op < r->op_count; op++) {
    uint32_t frames = 0;
    bool on_demand = false;
    for (uint32_t k = 0; k < GMI_GROUPS; k++) {
      const gmi_gather_plan_t *plan = &kind->groups[k].plan;
      if (!plan->event_first) continue;
      frames += plan->gathered[op];
      on_demand |= plan->on_demand[op];
    }
    for (uint32_t i = r->ops[op].op; i < until(r, op, trace); i++) trace->ops[i].gathered = frames;
    gmi_trace_op_t *own = &trace->ops[r->ops[op].op];
    if (on_demand && own->all_pages > own->heap_pages + frames) own->gathered = own->all_pages - own->heap_pages;
  }
}

/* ---- a new kind, continued */
/* Numbers the chunks of all groups. The caller frees what was made, on failure, too. */
static gemini_status_t number_groups(gmi_manager_t *m, const record_t *r, numbered_t *n) {
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++)
    if (gmi_group_at(m, i) && gmi_group_at(m, i)->arenas) status = number(m, r, i, &n[i]);
  return status;
}
static void numbers_free(numbered_t *n) {
  for (uint32_t i = 0; i < GMI_GROUPS; i++) numbered_free(&n[i]);
}

static gemini_status_t plan_groups(gmi_manager_t *m, gmi_gathers_t *g, const gmi_trace_t *trace, kind_t *kind) {
  numbered_t n[GMI_GROUPS] = { 0 };
  gemini_status_t status = number_groups(m, record_of(g), n);
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++) {
    if (!n[i].own || !n[i].input.chunk_count) continue;
    status = plan_share(m, g, trace, n, i, HALF, &kind->groups[i].plan);
    kind->groups[i].chunks = n[i].chunks;
    kind->groups[i].chunk_count = n[i].input.chunk_count;
    n[i].chunks = NULL;
  }
  numbers_free(n);
  return status;
}

/* The ranks of each group agree on the times of a chunk's gather and sum. */
static gemini_status_t agree_on_links(gmi_manager_t *m, gmi_gathers_t *g) {
  gemini_status_t status = GEMINI_OK;
  gmi_reap(m);
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++) {
    gmi_group_t *group = gmi_group_at(m, i);
    if (!group || !group->arenas) continue;
    uint64_t times[2] = { group->gathers.shortest_ns, group->sums.shortest_ns };
    status = agree(m, g, i, times, 2, true, "times of gathers and sums");
    if (status) break;
    group->gathers.agreed_ns = times[0];
    group->sums.agreed_ns = times[1];
  }
  return status;
}

static gemini_status_t kind_make(gmi_manager_t *m, gmi_gathers_t *g, gmi_trace_t *trace) {
  uint32_t oldest = 0;
  for (uint32_t i = 1; i < KINDS; i++)
    if (g->kinds[oldest].used && (!g->kinds[i].used || g->kinds[i].last_used < g->kinds[oldest].last_used)) oldest = i;
  kind_t *kind = &g->kinds[oldest], made = { .used = true, .last_used = g->iterations, .runs = 1 };
  gemini_status_t status = post(m, g, trace, NULL, &made);
  if (!status) status = plan_groups(m, g, trace, &made); /* behind the comparison of what was posted */
  if (!status) status = agree_on_links(m, g);
  if (status) {
    kind_clear(&made);
    return status;
  }
  fill_gathered(&made, &g->record, trace);
  gmi_history_forget(&g->history, oldest);
  kind_clear(kind);
  made.record = g->record;
  g->record = (record_t){ 0 };
  *kind = made;
  g->ended = oldest;
  g->ended_new = true;
  return GEMINI_OK;
}

static gemini_status_t end(gmi_manager_t *m, gmi_gathers_t *g, gmi_trace_t *trace) {
  uint32_t index = agreeing(g, false);
  if (index == GMI_NONE || g->kinds[index].record.op_count != g->record.op_count) return kind_make(m, g, trace);
  kind_t *kind = &g->kinds[index];
  gemini_status_t status = post(m, g, trace, kind, NULL);
  /* Times of the first iteration include one-off costs, as those of copies do. */
  if (!status && kind->runs == GMI_SETTLE_RUNS) status = agree_on_links(m, g);
  if (status) return status;
  kind->runs++;
  kind->last_used = g->iterations;
  g->ended = index;
  g->ended_new = false;
  fill_gathered(kind, &g->record, trace);
  return GEMINI_OK;
}

gemini_status_t gmi_gathers_end(gmi_manager_t *m, gmi_gathers_t *g, gmi_trace_t *trace) {
  if (g->ending.done) return GEMINI_OK;
  g->iterations++;
  g->ended = GMI_NONE;
  if (g->lost || !g->record.op_count) return GEMINI_OK;
  g->ending.next = 0;
  gemini_status_t status = end(m, g, trace);
  if (status) return status;
  gmi_history_add(&g->history, g->ended);
  g->ending.done = true;
  g->ending.count = 0;
  return GEMINI_OK;
}

/* ---- ZERO_AUTO */
static bool is_auto(gmi_manager_t *m, uint32_t group) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_is_sharded(a) && a->shard.group == group && a->shard.stage == GEMINI_ZERO_AUTO) return true;
  }
  return false;
}
bool gmi_gathers_choice_due(gmi_manager_t *m, const gmi_gathers_t *g) {
  if (g->ended == GMI_NONE || (!g->ended_new && g->kinds[g->ended].runs != GMI_SETTLE_RUNS + 1)) return false;
  for (uint32_t i = 0; i < GMI_GROUPS; i++)
    if (g->kinds[g->ended].groups[i].plan.event_first && is_auto(m, i)) return true;
  return false;
}

/* The predicted step if the group's gathers are so planned; UINT64_MAX: no plan can be made, or there is no memory. */
static uint64_t predict(gmi_manager_t *m, gmi_gathers_t *g, gmi_trace_t *trace) {
  gmi_plan_bundle_t bundle;
  fill_gathered(&g->kinds[g->ended], record_of(g), trace);
  if (gmi_gathers_list(m, g, trace) || gmi_plan_bundle_make(m, trace, m->cut.chunk_shift, &bundle)) return UINT64_MAX;
  const uint64_t predicted_ns = bundle.plan.predicted_ns;
  gmi_plan_bundle_free(&bundle);
  return predicted_ns;
}

/* Of the shares, takes the one with the shortest step on the rank where that is longest; of equals the largest, which
 * gathers least. Where no plan can be made, half. */
static gemini_status_t choose(gmi_manager_t *m, gmi_gathers_t *g, numbered_t *n, uint32_t group, gmi_trace_t *trace) {
  gmi_gather_plan_t plans[SHARES] = { 0 }, *plan = &g->kinds[g->ended].groups[group].plan, before = *plan;
  uint64_t predicted_ns[SHARES];
  uint32_t best = HALF;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t k = 0; !status && k < SHARES; k++) {
    status = plan_share(m, g, trace, n, group, k, &plans[k]);
    if (status) break;
    *plan = plans[k];
    predicted_ns[k] = predict(m, g, trace);
  }
  *plan = before;
  if (!status) status = agree(m, g, group, predicted_ns, SHARES, true, "predicted steps");
  for (uint32_t k = SHARES; !status && k-- > 0;)
    if (predicted_ns[k] < predicted_ns[best] ||
        (predicted_ns[k] == predicted_ns[best] && k > best && predicted_ns[k] != UINT64_MAX))
      best = k;
  if (!status) {
    gmi_log(m, GEMINI_LOG_INFO,
            "group %u: %u of %u parts of the free frames hold what is gathered, predicted step %.6f s", group, best,
            SHARES - 1, (double)predicted_ns[best] * 1e-9);
    *plan = plans[best];
    plans[best] = before;
  }
  for (uint32_t k = 0; k < SHARES; k++) gmi_gather_plan_free(&plans[k]);
  return status;
}

gemini_status_t gmi_gathers_choose(gmi_manager_t *m, gmi_gathers_t *g, gmi_trace_t *trace) {
  const record_t *r = record_of(g);
  numbered_t n[GMI_GROUPS] = { 0 };
  g->ending.next = 0;
  gemini_status_t status = number_groups(m, r, n);
  for (uint32_t i = 0; !status && i < GMI_GROUPS; i++)
    if (n[i].own && g->kinds[g->ended].groups[i].plan.event_first && is_auto(m, i)) status = choose(m, g, n, i, trace);
  numbers_free(n);
  fill_gathered(&g->kinds[g->ended], r, trace);
  return status;
}
