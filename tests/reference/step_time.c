/* Events of a plan's iterations: a graph of all that is done, run by a clock.
 * SPDX-License-Identifier: Apache-2.0 */
#include "step_time.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

#define NONE UINT32_MAX
#define LATER (UINT32_MAX - 1)

enum { WAITS, RUNS, DONE };
typedef struct node {
  uint64_t ns, end_ns, use;
  uint32_t piece;  /* of a host piece; else NONE */
  uint32_t first;  /* of what it waits for, up to the next node's */
  uint32_t before; /* the same piece's node of the iteration before, and the stage behind which this one is submitted */
  uint32_t behind;
  uint32_t urgent; /* the stage from whose end on use counts; NONE: from the start */
  /* the piece's second pass, whose use is set when this one, the first, has begun and the second one's gate is done; or
   * NONE */
  uint32_t second;
  uint32_t gate; /* of a second pass whose first one is ahead: the stage behind which it comes; LATER: not known yet */
  uint8_t state;
} node_t;

typedef struct graph {
  node_t *nodes;
  uint32_t *waits;
  uint32_t node_count, node_room, wait_count, wait_room;
  uint32_t *frames; /* what gives them, in the order in which they are given; NONE: free from the start */
  uint32_t frame_first, frame_end;
} graph_t;

static uint32_t add_node(graph_t *g, uint64_t ns, uint32_t piece) {
  CHECK(g->node_count < g->node_room);
  g->nodes[g->node_count] = (node_t){
    .ns = ns, .piece = piece, .first = g->wait_count, .before = NONE, .urgent = NONE, .second = NONE, .gate = NONE
  };
  g->nodes[g->node_count + 1].first = g->wait_count;
  return g->node_count++;
}
/* The node added last waits for that one. */
static void add_wait(graph_t *g, uint32_t node) {
  if (node == NONE) return;
  CHECK(g->wait_count < g->wait_room);
  g->waits[g->wait_count++] = node;
  g->nodes[g->node_count].first = g->wait_count;
}
static void give(graph_t *g, uint32_t node, uint32_t count) {
  while (count-- > 0) g->frames[g->frame_end++] = node;
}
static void wait_for_frames(graph_t *g, uint32_t count) {
  while (count-- > 0) {
    CHECK(g->frame_first < g->frame_end);
    add_wait(g, g->frames[g->frame_first++]);
  }
}

static bool gate_is_open(const graph_t *g, uint32_t node) {
  const uint32_t gate = g->nodes[node].gate;
  return gate == NONE || (gate != LATER && g->nodes[gate].state == DONE);
}
static bool can_start(const graph_t *g, uint32_t node) {
  if (g->nodes[node].state != WAITS || !gate_is_open(g, node)) return false;
  for (uint32_t i = g->nodes[node].first; i < g->nodes[node + 1].first; i++)
    if (g->nodes[g->waits[i]].state != DONE) return false;
  return true;
}

/* Does piece a go before b? Those computed ahead go last until their own op has ended, in the order of submission; of
 * equals the lowest index goes first. */
static bool goes_before(const graph_t *g, uint32_t a, uint32_t b) {
  const node_t *x = &g->nodes[a], *y = &g->nodes[b];
  const bool last = x->urgent != NONE && g->nodes[x->urgent].state != DONE;
  if (last != (y->urgent != NONE && g->nodes[y->urgent].state != DONE)) return !last;
  if (last) return a < b;
  return x->use != y->use ? x->use < y->use : x->piece < y->piece;
}

/* Sets the uses of the second passes behind a gate that is open, whose first one has begun: in order of piece. */
static void set_uses(graph_t *g, uint64_t *seconds) {
  for (;;) {
    const node_t *first = NULL;
    for (uint32_t n = 0; n < g->node_count; n++) {
      const node_t *node = &g->nodes[n];
      if (node->second == NONE || node->state == WAITS || (first && first->piece <= node->piece)) continue;
      const node_t *second = &g->nodes[node->second];
      if (!second->use && second->gate != NONE && gate_is_open(g, node->second)) first = node;
    }
    if (!first) return;
    g->nodes[first->second].use = (*seconds)--;
  }
}

static void run_graph(graph_t *g) {
  uint64_t now_ns = 0;
  uint32_t working = NONE;           /* the host piece that runs */
  uint64_t seconds = UINT64_MAX - 1; /* use of the next second pass: the last one begun goes first */
  for (;;) {
    bool changed = true;
    while (changed) {
      changed = false;
      for (uint32_t n = 0; n < g->node_count; n++) {
        node_t *node = &g->nodes[n];
        if (node->piece == NONE && can_start(g, n)) {
          node->state = RUNS;
          node->end_ns = now_ns + node->ns;
        }
        if (node->state != RUNS || node->end_ns > now_ns) continue;
        node->state = DONE;
        if (working == n) working = NONE;
        changed = true;
      }
      if (!changed) set_uses(g, &seconds);
      if (changed || working != NONE) continue;
      for (uint32_t n = 0; n < g->node_count; n++) {
        if (g->nodes[n].piece == NONE || !can_start(g, n)) continue;
        if (working == NONE || goes_before(g, n, working)) working = n;
      }
      if (working == NONE) continue;
      g->nodes[working].state = RUNS;
      const uint32_t second = g->nodes[working].second;
      if (second != NONE && gate_is_open(g, second)) g->nodes[second].use = seconds--;
      g->nodes[working].end_ns = now_ns + g->nodes[working].ns;
      changed = true;
    }
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t n = 0; n < g->node_count; n++)
      if (g->nodes[n].state == RUNS && g->nodes[n].end_ns < next_ns) next_ns = g->nodes[n].end_ns;
    if (next_ns == UINT64_MAX) break;
    now_ns = next_ns;
  }
  for (uint32_t n = 0; n < g->node_count; n++) CHECK_EQ(g->nodes[n].state, DONE);
}

/* Ops from the piece to the next op that uses a shared chunk of it, or a gather from one; NONE if there is none. */
static uint32_t ops_until_use(const gmi_plan_input_t *in, uint32_t piece) {
  for (uint32_t ahead = 1; ahead <= in->op_count; ahead++) {
    uint32_t op = (in->pieces[piece].after_op + ahead) % in->op_count;
    for (uint32_t x = in->ops[op].access_first; x < in->ops[op + 1].access_first; x++)
      for (uint32_t i = 0; i < in->pieces[piece].shared_count; i++)
        if (in->piece_chunks[in->pieces[piece].chunk_first + i] == in->accesses[x].chunk) return ahead;
    for (uint32_t n = 0; n < in->groups.gather_count; n++)
      for (uint32_t k = 0; in->groups.gathers[n].use_op == op && k < in->groups.gathers[n].part_count; k++)
        for (uint32_t i = 0; i < in->pieces[piece].shared_count; i++)
          if (in->piece_chunks[in->pieces[piece].chunk_first + i] == in->groups.gathers[n].parts[k]) return ahead;
  }
  return NONE;
}

/* What is known of the machine at a place of the program: the node that was last in each respect, or NONE. */
typedef struct program {
  const gmi_plan_input_t *in;
  const gmi_plan_t *plan;
  graph_t g;
  uint32_t stage, fetch, evict, begin;
  uint32_t *arrival;           /* [op_count + piece_count] */
  uint32_t *written, *updated; /* [chunk_count] back to the host, there by a piece */
  uint32_t *before;            /* [piece_count] */
  uint32_t *ahead;             /* [piece_count] the node, from the op from which it is computed ahead to its own */
  uint32_t fetch_at, evict_at; /* in the plan */
  uint8_t *resident;
  /* of groups: the last gather of each for each op; the last sum of each into, and fetch of, each chunk; each group's last
   * gather and sum; the stage of each op in this iteration */
  uint32_t *gathered, *summed, *came, *gather, *sum, *op_stage;
} program_t;

static void add_fetches(program_t *s, uint32_t op, uint32_t piece) {
  for (; s->fetch_at < s->plan->fetch_first[op + 1] && s->plan->fetches[s->fetch_at].piece == piece; s->fetch_at++) {
    const gmi_plan_move_t *move = &s->plan->fetches[s->fetch_at];
    uint32_t node = add_node(&s->g, s->in->fetch_ns, NONE);
    add_wait(&s->g, s->fetch);
    add_wait(&s->g, s->begin);
    add_wait(&s->g, s->written[move->chunk]);
    add_wait(&s->g, s->updated[move->chunk]);
    wait_for_frames(&s->g, 1);
    s->arrival[move->use_piece == GMI_NO_PIECE ? move->use_op : s->in->op_count + move->use_piece] = s->fetch = node;
    s->came[move->chunk] = node;
    s->resident[move->chunk] = 1;
  }
}

static void add_evicts(program_t *s, uint32_t op, uint32_t piece) {
  for (; s->evict_at < s->plan->evict_first[op + 1] && s->plan->evicts[s->evict_at].piece == piece; s->evict_at++) {
    const gmi_plan_move_t *move = &s->plan->evicts[s->evict_at];
    s->resident[move->chunk] = 0;
    if ((move->flags & GMI_EVICT_DIRTY) != 0) {
      uint32_t node = add_node(&s->g, s->in->evict_ns, NONE);
      add_wait(&s->g, s->evict);
      add_wait(&s->g, s->stage);
      s->written[move->chunk] = s->evict = node;
      give(&s->g, node, 1);
    } else {
      give(&s->g, s->stage, 1);
    }
  }
}

static uint64_t part_ns(const gmi_plan_input_t *in, uint64_t chunk_ns, uint64_t bytes) {
  return (uint64_t)((double)chunk_ns * (double)bytes / (double)in->link_bytes);
}

static void add_gathers(program_t *s, uint32_t op) {
  for (uint32_t n = 0; n < s->in->groups.gather_count; n++) {
    const gmi_plan_collective_t *c = &s->in->groups.gathers[n];
    if (c->op != op) continue;
    uint32_t frame = c->frame_op == GMI_NO_OP ? s->stage : s->op_stage[c->frame_op], own = frame;
    for (uint32_t k = 0; k < c->part_count; k++) {
      if (s->resident[c->parts[k]]) continue;
      uint32_t node = add_node(&s->g, part_ns(s->in, s->in->fetch_ns, c->part_bytes[k]), NONE);
      add_wait(&s->g, s->fetch);
      add_wait(&s->g, s->begin);
      add_wait(&s->g, frame);
      add_wait(&s->g, s->written[c->parts[k]]);
      add_wait(&s->g, s->updated[c->parts[k]]);
      s->fetch = own = node;
    }
    uint32_t node = add_node(&s->g, s->in->groups.links[c->group].gather_ns, NONE);
    add_wait(&s->g, s->gather[c->group]);
    add_wait(&s->g, s->begin);
    add_wait(&s->g, own);
    for (uint32_t k = 0; k < c->part_count; k++)
      if (s->resident[c->parts[k]]) add_wait(&s->g, s->came[c->parts[k]]);
    s->gathered[c->use_op * s->in->groups.group_count + c->group] = s->gather[c->group] = node;
  }
}

static void add_sums(program_t *s, uint32_t op) {
  for (uint32_t n = 0; n < s->in->groups.sum_count; n++) {
    const gmi_plan_collective_t *c = &s->in->groups.sums[n];
    if (c->op != op) continue;
    uint32_t sum = add_node(&s->g, s->in->groups.links[c->group].sum_ns, NONE);
    add_wait(&s->g, s->sum[c->group]);
    add_wait(&s->g, s->stage);
    s->sum[c->group] = sum;
    for (uint32_t k = 0; k < c->part_count; k++) {
      s->summed[c->parts[k] * s->in->groups.group_count + c->group] = sum;
      if (s->resident[c->parts[k]]) continue;
      uint32_t node = add_node(&s->g, part_ns(s->in, s->in->evict_ns, c->part_bytes[k]), NONE);
      add_wait(&s->g, s->evict);
      add_wait(&s->g, sum);
      s->written[c->parts[k]] = s->evict = node;
    }
  }
}

static void add_stage(program_t *s, uint64_t ns, uint32_t arrival, uint32_t frames) {
  uint32_t node = add_node(&s->g, ns, NONE);
  if (arrival < s->in->op_count) {
    for (uint32_t group = 0; group < s->in->groups.group_count; group++)
      add_wait(&s->g, s->gathered[arrival * s->in->groups.group_count + group]);
  } else {
    const uint32_t p = arrival - s->in->op_count;
    for (uint32_t i = s->in->pieces[p].chunk_first; i < s->in->pieces[p + 1].chunk_first; i++)
      for (uint32_t group = 0; group < s->in->groups.group_count; group++)
        add_wait(&s->g, s->summed[s->in->piece_chunks[i] * s->in->groups.group_count + group]);
  }
  add_wait(&s->g, s->stage);
  add_wait(&s->g, s->arrival[arrival]);
  wait_for_frames(&s->g, frames);
  s->stage = node;
}

static void add_host_piece(program_t *s, uint32_t piece, uint64_t use) {
  const bool results = s->plan->piece_ahead[piece] == GMI_AHEAD_RESULTS;
  const bool two = s->plan->piece_passes[piece] && (results || !s->plan->piece_ahead[piece]) && use != UINT64_MAX;
  uint32_t node = add_node(&s->g, two ? s->in->pieces[piece].result_ns : s->in->pieces[piece].host_ns, piece);
  s->g.nodes[node].use = use;
  s->g.nodes[node].before = s->before[piece];
  s->g.nodes[node].behind = s->stage;
  add_wait(&s->g, s->before[piece]);
  add_wait(&s->g, s->stage);
  s->before[piece] = node;
  for (uint32_t i = s->in->pieces[piece].chunk_first; i < s->in->pieces[piece + 1].chunk_first; i++) {
    uint32_t chunk = s->in->piece_chunks[i];
    add_wait(&s->g, s->written[chunk]);
    add_wait(&s->g, s->updated[chunk]);
    s->updated[chunk] = node;
  }
  if (!two) return;
  const uint32_t second = add_node(&s->g, s->in->pieces[piece].state_ns, piece);
  add_wait(&s->g, node);
  s->g.nodes[node].second = second;
  s->g.nodes[second].behind = s->stage;
  s->before[piece] = second;
  for (uint32_t i = s->in->pieces[piece].chunk_first + s->in->pieces[piece].shared_count;
       i < s->in->pieces[piece + 1].chunk_first; i++)
    s->updated[s->in->piece_chunks[i]] = second;
}

static void add_op(program_t *s, uint32_t iteration, uint32_t op, uint32_t flags) {
  const gmi_plan_input_t *in = s->in;
  uint32_t heap = in->ops[op].heap_frames, before = in->ops[op > 0 ? op - 1 : in->op_count - 1].heap_frames;
  uint32_t frames = heap > before ? heap - before : 0;
  if (heap < before) give(&s->g, s->stage, before - heap);
  add_fetches(s, op, GMI_NO_PIECE);
  add_gathers(s, op);
  for (uint32_t x = in->ops[op].access_first; x < in->ops[op + 1].access_first; x++) {
    frames += !s->resident[in->accesses[x].chunk];
    s->resident[in->accesses[x].chunk] = 1;
  }
  add_stage(s, in->ops[op].compute_ns, op, frames);
  s->op_stage[op] = s->stage;
  add_sums(s, op);
  add_evicts(s, op, GMI_NO_PIECE);
  for (uint32_t p = 0; p < in->piece_count; p++) {
    if (in->pieces[p].after_op != op || !s->plan->piece_on_device[p]) continue;
    add_fetches(s, op, p);
    add_stage(s, in->pieces[p].device_ns, in->op_count + p, 0);
    add_evicts(s, op, p);
  }
  if (op + 1 == in->op_count) { /* outside ops */
    const uint32_t node = add_node(&s->g, in->outside_ns, NONE);
    add_wait(&s->g, s->stage);
    s->stage = node;
  }
  for (uint32_t ahead = 1; ahead <= in->op_count + 1; ahead++) { /* in order of next use */
    for (uint32_t p = 0; p < in->piece_count; p++) {
      if (in->pieces[p].after_op != op || s->plan->piece_on_device[p]) continue;
      uint32_t until = ops_until_use(in, p);
      if (until != (ahead <= in->op_count ? ahead : NONE)) continue;
      uint64_t use = until == NONE ? UINT64_MAX : (uint64_t)iteration * in->op_count + op + until;
      if ((flags & STEP_TIME_FIRST_IN_FIRST_OUT) != 0) use = s->g.node_count;
      if (s->plan->piece_ahead[p] && (flags & STEP_TIME_NONE_AHEAD) == 0) {
        s->g.nodes[s->ahead[p]].use = use;
        s->g.nodes[s->ahead[p]].urgent = s->stage;
        if (s->plan->piece_ahead[p] == GMI_AHEAD_RESULTS) s->g.nodes[s->g.nodes[s->ahead[p]].second].gate = s->stage;
      } else {
        add_host_piece(s, p, use);
      }
    }
  }
  for (uint32_t p = 0; p < in->piece_count; p++) {
    if (!s->plan->piece_ahead[p] || in->pieces[p].ahead_op != op || (flags & STEP_TIME_NONE_AHEAD) != 0) continue;
    s->ahead[p] = s->g.node_count;
    add_host_piece(s, p, 0);
    if (s->plan->piece_ahead[p] == GMI_AHEAD_RESULTS) s->g.nodes[s->g.nodes[s->ahead[p]].second].gate = LATER;
  }
}

static void *filled(uint64_t count, size_t size) {
  void *items = malloc((count + 1) * size);
  CHECK(items != NULL);
  memset(items, 0xff, (count + 1) * size);
  return items;
}

bool step_time(const gmi_plan_input_t *input, const gmi_plan_t *plan, uint32_t iterations, uint32_t flags,
               uint64_t *length_ns_out) {
  program_t s = { .in = input, .plan = plan, .stage = NONE, .fetch = NONE, .evict = NONE, .begin = NONE };
  uint32_t fetches = plan->fetch_first[input->op_count], evicts = plan->evict_first[input->op_count];
  uint32_t piece_chunks = input->piece_count > 0 ? input->pieces[input->piece_count].chunk_first : 0;
  const uint32_t collectives = input->groups.gather_count + input->groups.sum_count;
  s.g.node_room = iterations * (1 + input->op_count + 2 * input->piece_count + fetches + evicts + 3 * collectives);
  s.g.wait_room = iterations * (5 * fetches + 2 * evicts + 4 * piece_chunks + 3 * input->piece_count +
                                15 * collectives + input->op_count * (4 + input->frame_count) + 1);
  s.g.nodes = filled(s.g.node_room, sizeof *s.g.nodes);
  s.g.waits = filled(s.g.wait_room, sizeof *s.g.waits);
  s.g.frames = filled(input->frame_count + (uint64_t)iterations * (evicts + input->op_count * input->frame_count),
                      sizeof *s.g.frames);
  s.arrival = filled((uint64_t)input->op_count + input->piece_count, sizeof *s.arrival);
  s.written = filled(input->chunk_count, sizeof *s.written);
  s.updated = filled(input->chunk_count, sizeof *s.updated);
  s.before = filled(input->piece_count, sizeof *s.before);
  s.ahead = filled(input->piece_count, sizeof *s.ahead);
  s.gathered = filled((uint64_t)input->op_count * input->groups.group_count, sizeof *s.gathered);
  s.came = filled(input->chunk_count, sizeof *s.came);
  s.op_stage = filled(input->op_count, sizeof *s.op_stage);
  s.summed = filled((uint64_t)input->chunk_count * input->groups.group_count, sizeof *s.summed);
  s.gather = filled(input->groups.group_count, sizeof *s.gather);
  s.sum = filled(input->groups.group_count, sizeof *s.sum);
  s.resident = filled(input->chunk_count, sizeof *s.resident);
  memcpy(s.resident, plan->resident_at_start, input->chunk_count);
  uint32_t held = input->ops[input->op_count - 1].heap_frames;
  for (uint32_t w = 0; w < input->chunk_count; w++) held += s.resident[w];
  give(&s.g, NONE, input->frame_count - held);
  uint32_t begin = NONE;
  for (uint32_t k = 0; k < iterations; k++) {
    begin = s.begin = s.stage;
    s.fetch_at = s.evict_at = 0;
    for (uint32_t op = 0; op < input->op_count; op++) add_op(&s, k, op, flags);
  }
  run_graph(&s.g);
  *length_ns_out = s.g.nodes[s.stage].end_ns - (begin == NONE ? 0 : s.g.nodes[begin].end_ns);
  bool apart = true;
  for (uint32_t n = 0; n < s.g.node_count; n++) {
    const node_t *node = &s.g.nodes[n];
    if (node->piece != NONE && node->before != NONE)
      apart &= s.g.nodes[node->before].end_ns <= s.g.nodes[node->behind].end_ns;
  }
  free(s.g.nodes);
  free(s.g.waits);
  free(s.g.frames);
  free(s.arrival);
  free(s.written);
  free(s.updated);
  free(s.before);
  free(s.ahead);
  free(s.resident);
  free(s.gathered);
  free(s.came);
  free(s.op_stage);
  free(s.summed);
  free(s.gather);
  free(s.sum);
  return apart;
}
