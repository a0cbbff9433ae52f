/* Plans the gathers of sharded arenas. SPDX-License-Identifier: Apache-2.0
 *
 * A walk over the ops. At each op, chunks leave until the op has no more than its frames; then the chunks that it uses
 * are gathered, as far as they are missing; then those of the next ops, in their order, while each op until then has a
 * free frame, or a frame of a chunk that is needed later than the one that is gathered, and not too many wait for their
 * use or are gathered at once. Too few at once are taken back. */
#include <stdlib.h>
#include <string.h>

#include "policy/policy.h"

enum { NEVER = UINT32_MAX };

typedef struct {
  const gmi_gather_input_t *in;
  gmi_gather_plan_t plan;
  uint32_t event_count, event_capacity;
  bool lost;          /* no memory for an event */
  uint32_t *use_of;   /* [uses] ops that use each chunk, ascending; those of chunk c begin at of_first[c] */
  uint32_t *of_first; /* [chunk_count + 1] */
  uint32_t *next;     /* [chunk_count] index in use_of of the first op that is not over */
  uint32_t *gathered; /* [chunk_count] the gathered chunks, in no order */
  uint32_t *place;    /* [chunk_count] where a chunk is in gathered; NEVER: it is not gathered */
  bool *waits;        /* [chunk_count] gathered, and not used since */
  uint32_t gathered_count, waiting;
  uint32_t waiting_before; /* at the op's begin, behind its own gathers */
  uint32_t next_op;        /* the next op behind it that uses any chunk */
} walk_t;

/* The first op from `op` on that uses the chunk. */
static uint32_t next_use(walk_t *w, uint32_t chunk, uint32_t op) {
  uint32_t *at = &w->next[chunk];
  while (*at < w->of_first[chunk + 1] && w->use_of[*at] < op) ++*at;
  return *at < w->of_first[chunk + 1] ? w->use_of[*at] : NEVER;
}

static void add_event(walk_t *w, uint32_t chunk, bool leaves) {
  if (w->event_count == w->event_capacity) {
    uint32_t capacity = w->event_capacity ? 2 * w->event_capacity : 64;
    gmi_gather_event_t *events = realloc(w->plan.events, capacity * sizeof *events);
    if (!events) {
      w->lost = true;
      return;
    }
    w->plan.events = events;
    w->event_capacity = capacity;
  }
  w->plan.events[w->event_count++] = (gmi_gather_event_t){ chunk, leaves };
}

static void set_waits(walk_t *w, uint32_t chunk, bool waits) {
  w->waiting += waits;
  w->waiting -= w->waits[chunk];
  w->waits[chunk] = waits;
}
static void remove_chunk(walk_t *w, uint32_t chunk) {
  set_waits(w, chunk, false);
  uint32_t last = w->gathered[--w->gathered_count];
  w->gathered[w->place[chunk]] = last;
  w->place[last] = w->place[chunk];
  w->place[chunk] = NEVER;
}
static void add_chunk(walk_t *w, uint32_t chunk) {
  w->place[chunk] = w->gathered_count;
  w->gathered[w->gathered_count++] = chunk;
}

/* The chunk that is needed last, if it is not needed by the ops from `op` to `until`, leaves. False: each is. Of chunks
 * that are needed equally late, the one with the lowest number leaves. */
static bool one_leaves(walk_t *w, uint32_t op, uint32_t until) {
  uint32_t best = NEVER, furthest = until;
  for (uint32_t i = 0; !w->in->stays && i < w->gathered_count; i++) {
    uint32_t chunk = w->gathered[i], next = next_use(w, chunk, op);
    if (next <= until || (best != NEVER && (next < furthest || (next == furthest && chunk > best)))) continue;
    best = chunk;
    furthest = next;
  }
  if (best == NEVER) return false;
  remove_chunk(w, best);
  add_event(w, best, true);
  return true;
}

/* May one more chunk be gathered ahead, for op `of`? */
static bool may_wait(const walk_t *w, uint32_t of) {
  const gmi_gather_input_t *in = w->in;
  if (in->ahead && w->waiting >= in->ahead) return false;
  return of == w->next_op || !in->burst || w->waiting - w->waiting_before < in->burst;
}

/* Gathers what op `of` uses, at the begin of op. frames: those that each op has from `op` to the one before `of`.
 * False: there is no room for all of it. An op's own chunks always have room: those that it does not use have left, or
 * stay as they would without a plan. */
static bool gather(walk_t *w, uint32_t op, uint32_t of, uint32_t frames) {
  if (w->plan.on_demand[of]) return false;
  for (uint32_t k = w->in->use_first[of]; k < w->in->use_first[of + 1]; k++) {
    uint32_t chunk = w->in->uses[k];
    if (w->place[chunk] != NEVER) continue;
    if (op != of && !may_wait(w, of)) return false;
    while (w->gathered_count >= frames)
      if (!one_leaves(w, op, of)) break;
    if (op != of && w->gathered_count >= frames) return false;
    add_chunk(w, chunk);
    set_waits(w, chunk, op != of);
    add_event(w, chunk, false);
  }
  return true;
}

/* Are these events, from `first` on, not worth a call of their own yet? The first that gathers does so for the nearest
 * op. */
static bool are_few(walk_t *w, uint32_t op, uint32_t first) {
  const uint32_t count = w->waiting - w->waiting_before;
  if (w->lost || !count || count >= w->in->batch || 2 * count >= w->waiting) return false;
  while (w->plan.events[first].leaves) first++;
  return next_use(w, w->plan.events[first].chunk, op + 1) != w->next_op;
}

/* Gathers what the ops behind op use. frames: those of op. What leaves for it waits for no op before those. */
static void gather_ahead(walk_t *w, uint32_t op, uint32_t frames) {
  const gmi_gather_input_t *in = w->in;
  const uint32_t first = w->event_count;
  w->waiting_before = w->waiting;
  w->next_op = op + 1;
  while (w->next_op < in->op_count && in->use_first[w->next_op] == in->use_first[w->next_op + 1]) w->next_op++;
  for (uint32_t ahead = op + 1; ahead < in->op_count && w->gathered_count < in->chunk_count; ahead++) {
    if (!gather(w, op, ahead, frames)) break;
    if (in->frames[ahead] < frames) frames = in->frames[ahead];
  }
  if (!are_few(w, op, first)) return;
  while (w->event_count > first) {
    const gmi_gather_event_t *e = &w->plan.events[--w->event_count];
    if (e->leaves) add_chunk(w, e->chunk);
    else remove_chunk(w, e->chunk);
  }
}

/* An op that acquires its chunks by itself, and has no frame for others meanwhile. Only what stays is there behind
 * it. */
static void op_on_demand(walk_t *w, uint32_t op) {
  const gmi_gather_input_t *in = w->in;
  while (!in->stays && w->gathered_count) {
    add_event(w, w->gathered[0], true);
    remove_chunk(w, w->gathered[0]);
  }
  w->plan.gathered[op] = w->gathered_count;
  for (uint32_t k = in->use_first[op]; in->stays && k < in->use_first[op + 1]; k++)
    if (w->place[in->uses[k]] == NEVER) add_chunk(w, in->uses[k]);
}

static gemini_status_t walk(walk_t *w) {
  const gmi_gather_input_t *in = w->in;
  for (uint32_t k = 0; k < in->use_first[in->op_count]; k++) w->of_first[in->uses[k] + 1]++;
  for (uint32_t c = 0; c < in->chunk_count; c++) w->of_first[c + 1] += w->of_first[c];
  memcpy(w->next, w->of_first, in->chunk_count * sizeof *w->next);
  for (uint32_t op = 0; op < in->op_count; op++)
    for (uint32_t k = in->use_first[op]; k < in->use_first[op + 1]; k++) w->use_of[w->next[in->uses[k]]++] = op;
  memcpy(w->next, w->of_first, in->chunk_count * sizeof *w->next);
  memset(w->place, 0xff, in->chunk_count * sizeof *w->place);
  for (uint32_t op = 0; op < in->op_count; op++)
    w->plan.on_demand[op] = in->use_first[op + 1] - in->use_first[op] > in->frames[op];
  for (uint32_t op = 0; op < in->op_count; op++) {
    w->plan.event_first[op] = w->event_count;
    for (uint32_t k = in->use_first[op]; k < in->use_first[op + 1]; k++) set_waits(w, in->uses[k], false);
    if (w->plan.on_demand[op]) {
      op_on_demand(w, op);
      continue;
    }
    while (w->gathered_count > in->frames[op] && one_leaves(w, op, op)) continue;
    (void)gather(w, op, op, in->frames[op]);
    gather_ahead(w, op, in->frames[op]);
    w->plan.gathered[op] = w->gathered_count;
  }
  w->plan.event_first[in->op_count] = w->event_count;
  return w->lost ? GEMINI_ERR_OOM_SYSTEM : GEMINI_OK;
}

gemini_status_t gmi_gather_plan_make(const gmi_gather_input_t *input, gmi_gather_plan_t *plan_out) {
  const uint32_t uses = input->use_first[input->op_count];
  walk_t w = { .in = input };
  w.plan.event_first = calloc((size_t)input->op_count + 1, sizeof *w.plan.event_first);
  w.use_of = calloc((size_t)uses + 1, sizeof *w.use_of);
  w.of_first = calloc((size_t)input->chunk_count + 1, sizeof *w.of_first);
  w.next = calloc((size_t)input->chunk_count + 1, sizeof *w.next);
  w.place = calloc((size_t)input->chunk_count + 1, sizeof *w.place);
  w.gathered = calloc((size_t)input->chunk_count + 1, sizeof *w.gathered);
  w.waits = calloc((size_t)input->chunk_count + 1, sizeof *w.waits);
  w.plan.gathered = calloc((size_t)input->op_count + 1, sizeof *w.plan.gathered);
  w.plan.on_demand = calloc((size_t)input->op_count + 1, sizeof *w.plan.on_demand);
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  if (w.plan.event_first && w.plan.gathered && w.plan.on_demand && w.use_of && w.of_first && w.next && w.place &&
      w.gathered && w.waits)
    status = walk(&w);
  free(w.use_of);
  free(w.of_first);
  free(w.next);
  free(w.place);
  free(w.gathered);
  free(w.waits);
  if (status) gmi_gather_plan_free(&w.plan);
  else *plan_out = w.plan;
  return status;
}

void gmi_gather_plan_free(gmi_gather_plan_t *plan) {
  free(plan->event_first);
  free(plan->events);
  free(plan->gathered);
  free(plan->on_demand);
  *plan = (gmi_gather_plan_t){ 0 };
}
