/* The list of an iteration's gathers, for the plan of chunks: when each is queued, when its chunk is used, and whose
 * frame it takes. SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "chunk/arena.h"
#include "chunk/shard.h"
#include "tracer/gathers.h"
#include "tracer/gathers_kinds.h"
#include "tracer/tracer.h"

/* Makes a list of the gathers of a kind whose operators are those of record. Of each group: */
typedef struct {
  uint32_t *last_use; /* [chunk_count] index in the trace of the last op that used a gathered chunk */
  uint32_t *open;     /* [chunk_count] the chunk's gather in the list, from 1, that no op has used; 0: none */
  bool *gathered;     /* [chunk_count] */
  uint32_t *left;     /* [gathers of the group] ops whose ends have freed frames, in this order */
  uint32_t left_first, left_end;
} lister_t;

static void lister_free(lister_t *l) {
  free(l->last_use);
  free(l->open);
  free(l->gathered);
  free(l->left);
}
static bool lister_make(lister_t *l, const group_plan_t *p, uint64_t gathers) {
  l->last_use = calloc((size_t)p->chunk_count + 1, sizeof *l->last_use);
  l->open = calloc((size_t)p->chunk_count + 1, sizeof *l->open);
  l->gathered = calloc((size_t)p->chunk_count + 1, sizeof *l->gathered);
  l->left = calloc(gathers + 1, sizeof *l->left);
  return l->last_use && l->open && l->gathered && l->left;
}

static void leaves(lister_t *l, uint32_t chunk) {
  l->gathered[chunk] = false;
  l->left[l->left_end++] = l->last_use[chunk];
}
static bool gathers(lister_t *l, const group_plan_t *p, uint32_t chunk, uint32_t op, gmi_trace_t *trace) {
  gmi_trace_collective_t *gather = gmi_trace_add_gather(trace);
  if (!gather) return false;
  const uint32_t frame_op = l->left_first < l->left_end ? l->left[l->left_first++] : GMI_NO_OP;
  *gather =
      (gmi_trace_collective_t){ op, op, frame_op, (uint32_t)(p->chunks[chunk] >> 32), (uint32_t)p->chunks[chunk] };
  l->open[chunk] = trace->gather_count;
  l->gathered[chunk] = true;
  return true;
}

/* The gathers of one operator of the record. */
static bool list_op(lister_t *l, const group_plan_t *p, const record_t *r, uint32_t index, gmi_trace_t *trace) {
  const uint32_t op = r->ops[index].op;
  for (uint32_t e = p->plan.event_first[index]; e < p->plan.event_first[index + 1]; e++) {
    if (p->plan.events[e].leaves) leaves(l, p->plan.events[e].chunk);
    else if (!gathers(l, p, p->plan.events[e].chunk, op, trace)) return false;
  }
  for (uint32_t k = 0; k < r->ops[index].use_count; k++) {
    const uint64_t *found = find_use(p->chunks, p->chunk_count, r->uses[r->ops[index].use_first + k]);
    if (!found) continue;
    const uint32_t chunk = (uint32_t)(found - p->chunks);
    if (!l->gathered[chunk] && !gathers(l, p, chunk, op, trace)) return false; /* on demand */
    if (l->open[chunk]) trace->gathers[l->open[chunk] - 1].use_op = op;
    l->open[chunk] = 0;
    l->last_use[chunk] = op;
  }
  return true;
}

/* Of an operator on demand, what does not stay has left when it has ended. */
static void end_on_demand(gmi_manager_t *m, lister_t *l, const group_plan_t *p) {
  for (uint32_t chunk = 0; chunk < p->chunk_count; chunk++)
    if (l->gathered[chunk] && !gmi_gathered_stays(gmi_arena_at(m, (uint32_t)(p->chunks[chunk] >> 32))))
      leaves(l, chunk);
}

gemini_status_t gmi_gathers_list(gmi_manager_t *m, gmi_gathers_t *g, gmi_trace_t *trace) {
  if (g->ended == GMI_NONE) return GEMINI_OK;
  const kind_t *kind = &g->kinds[g->ended];
  const record_t *r = record_of(g);
  lister_t listers[GMI_GROUPS] = { 0 };
  bool listed = true;
  trace->gather_count = 0;
  for (uint32_t i = 0; listed && i < GMI_GROUPS; i++)
    if (kind->groups[i].plan.event_first)
      listed = lister_make(&listers[i], &kind->groups[i],
                           kind->groups[i].plan.event_first[r->op_count] + (uint64_t)r->use_count);
  for (uint32_t op = 0; listed && op < r->op_count; op++) {
    for (uint32_t i = 0; listed && i < GMI_GROUPS; i++) {
      const group_plan_t *p = &kind->groups[i];
      if (!p->plan.event_first) continue;
      listed = list_op(&listers[i], p, r, op, trace);
      if (listed && p->plan.on_demand[op]) end_on_demand(m, &listers[i], p);
    }
  }
  /* A gather that is queued behind another and needed sooner has the slice of the other before it on the link. */
  for (uint32_t i = trace->gather_count; i-- > 1;)
    if (trace->gathers[i - 1].use_op > trace->gathers[i].use_op)
      trace->gathers[i - 1].use_op = trace->gathers[i].use_op;
  for (uint32_t i = 0; i < GMI_GROUPS; i++) lister_free(&listers[i]);
  return listed ? GEMINI_OK : no_memory(r);
}
