/* Derives the planner's tables from its input: facts (gmi_facts_make(), once per input) and the model of a candidate
 * (gmi_model_make(): stages, their accesses, and each access's successor). Called by plan.c.
 * SPDX-License-Identifier: Apache-2.0 */
#include "policy/model.h"

#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

static int compare_key(const void *a, const void *b) {
  const uint64_t *x = a, *y = b;
  if (x[0] != y[0]) return x[0] < y[0] ? -1 : 1;
  /* the piece's index makes the order total, so qsort() gives the same result everywhere */
  return x[1] < y[1] ? -1 : x[1] > y[1];
}

void gmi_facts_free(gmi_facts_t *facts) {
  free(facts->op_piece_first);
  free(facts->op_pieces);
  free(facts->op_pieces_by_use);
  free(facts->op_ahead_first);
  free(facts->op_ahead);
  free(facts->can_ahead);
  free(facts->piece_use);
  free(facts->pieces_by_gap);
  memset(facts, 0, sizeof *facts);
}

/* Fills piece_use by walking the iteration backwards twice, with next_op[chunk] holding the next op that accesses
 * the chunk, or waits for a gather of a slice in it. The first round only establishes the state at the end of the
 * iteration: what the next iteration accesses first. */
static void find_uses(const gmi_facts_t *facts, uint32_t *next_op) {
  const gmi_plan_input_t *input = facts->input;
  memset(next_op, 0xff, input->chunk_count * sizeof *next_op);
  for (uint32_t round = 0; round < 2; round++) {
    uint32_t base = round == 0 ? input->op_count : 0, gather = input->groups.gather_count;
    for (uint32_t op = input->op_count; op-- > 0;) {
      for (uint32_t i = facts->op_piece_first[op]; round == 1 && i < facts->op_piece_first[op + 1]; i++) {
        uint32_t piece = facts->op_pieces[i], soonest = NONE;
        for (uint32_t c = 0; c < input->pieces[piece].shared_count; c++) {
          uint32_t next = next_op[input->piece_chunks[input->pieces[piece].chunk_first + c]];
          if (next < soonest) soonest = next;
        }
        facts->piece_use[piece] = soonest;
      }
      for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++)
        next_op[input->accesses[x].chunk] = op + base;
      for (; gather > 0 && input->groups.gathers[gather - 1].use_op == op; gather--)
        for (uint32_t k = 0; k < input->groups.gathers[gather - 1].part_count; k++)
          next_op[input->groups.gathers[gather - 1].parts[k]] = op + base;
    }
  }
}

/* Fills can_ahead. last: [chunk_count] the op that uses a chunk last, + 1; NONE: a group does, or several pieces.
 * pieces: [chunk_count] how many. */
static void find_ahead(const gmi_facts_t *facts, uint32_t *last, uint32_t *pieces) {
  const gmi_plan_input_t *input = facts->input;
  const gmi_plan_groups_t *groups = &input->groups;
  memset(last, 0, input->chunk_count * sizeof *last);
  memset(pieces, 0, input->chunk_count * sizeof *pieces);
  for (uint32_t op = 0; op < input->op_count; op++)
    for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++)
      last[input->accesses[x].chunk] = op + 1;
  for (uint32_t n = 0; n < groups->gather_count; n++)
    for (uint32_t k = 0; k < groups->gathers[n].part_count; k++) last[groups->gathers[n].parts[k]] = NONE;
  for (uint32_t n = 0; n < groups->sum_count; n++)
    for (uint32_t k = 0; k < groups->sums[n].part_count; k++) last[groups->sums[n].parts[k]] = NONE;
  const uint32_t piece_chunks = input->piece_count > 0 ? gmi_plan_piece_end(input, input->piece_count - 1) : 0;
  for (uint32_t i = 0; i < piece_chunks; i++)
    if (pieces[input->piece_chunks[i]]++ > 0) last[input->piece_chunks[i]] = NONE;
  for (uint32_t p = 0; p < input->piece_count; p++) {
    facts->can_ahead[p] = input->pieces[p].ahead_slots > 0;
    for (uint32_t i = input->pieces[p].chunk_first; i < gmi_plan_piece_end(input, p); i++)
      facts->can_ahead[p] &= last[input->piece_chunks[i]] <= input->pieces[p].ahead_op + 1;
  }
}

gemini_status_t gmi_facts_make(const gmi_plan_input_t *input, gmi_facts_t *facts_out) {
  gmi_facts_t facts = { .input = input };
  uint32_t ops = input->op_count, pieces = input->piece_count;
  uint32_t *next_op = malloc((size_t)input->chunk_count * sizeof *next_op + 1);
  uint32_t *piece_counts = malloc((size_t)input->chunk_count * sizeof *piece_counts + 1);
  uint64_t *begin_ns = malloc(((size_t)ops + 1) * sizeof *begin_ns);
  uint64_t(*keys)[2] = malloc((size_t)pieces * sizeof *keys + 1);
  facts.op_piece_first = calloc((size_t)ops + 2, sizeof(uint32_t));
  facts.op_pieces = malloc((size_t)pieces * sizeof(uint32_t) + 1);
  facts.op_pieces_by_use = malloc((size_t)pieces * sizeof(uint32_t) + 1);
  facts.op_ahead_first = calloc((size_t)ops + 2, sizeof(uint32_t));
  facts.op_ahead = malloc((size_t)pieces * sizeof(uint32_t) + 1);
  facts.can_ahead = malloc((size_t)pieces + 1);
  facts.piece_use = malloc((size_t)pieces * sizeof(uint32_t) + 1);
  facts.pieces_by_gap = malloc((size_t)pieces * sizeof(uint32_t) + 1);
  bool done = next_op != NULL && piece_counts != NULL && begin_ns != NULL && keys != NULL &&
              facts.op_piece_first != NULL && facts.op_pieces != NULL && facts.op_pieces_by_use != NULL &&
              facts.op_ahead_first != NULL && facts.op_ahead != NULL && facts.can_ahead != NULL &&
              facts.piece_use != NULL && facts.pieces_by_gap != NULL;
  if (!done) goto end;

  /* Counting sort by after_op. While the list is filled, op_piece_first[op + 1] is the next free position of op; in
   * the end it has become the begin of op + 1. */
  for (uint32_t p = 0; p < pieces; p++) facts.op_piece_first[input->pieces[p].after_op + 2]++;
  for (uint32_t op = 1; op <= ops; op++) facts.op_piece_first[op + 1] += facts.op_piece_first[op];
  for (uint32_t p = 0; p < pieces; p++) facts.op_pieces[facts.op_piece_first[input->pieces[p].after_op + 1]++] = p;
  find_ahead(&facts, next_op, piece_counts);
  for (uint32_t p = 0; p < pieces; p++)
    if (facts.can_ahead[p]) facts.op_ahead_first[input->pieces[p].ahead_op + 2]++;
  for (uint32_t op = 1; op <= ops; op++) facts.op_ahead_first[op + 1] += facts.op_ahead_first[op];
  for (uint32_t p = 0; p < pieces; p++)
    if (facts.can_ahead[p]) facts.op_ahead[facts.op_ahead_first[input->pieces[p].ahead_op + 1]++] = p;

  find_uses(&facts, next_op);
  for (uint32_t op = 0; op < ops; op++) {
    uint32_t first = facts.op_piece_first[op], count = facts.op_piece_first[op + 1] - first;
    for (uint32_t i = 0; i < count; i++) {
      uint32_t piece = facts.op_pieces[first + i];
      keys[i][0] = facts.piece_use[piece], keys[i][1] = piece;
    }
    if (count > 1) qsort(keys, count, sizeof *keys, compare_key);
    for (uint32_t i = 0; i < count; i++) facts.op_pieces_by_use[first + i] = (uint32_t)keys[i][1];
  }

  /* Sorts pieces by compute time until the next use of their shared chunks. The sums start at the end of the op
   * after which the piece runs; a use in the next iteration (use >= ops) adds the rest of this one. */
  begin_ns[0] = 0;
  for (uint32_t op = 0; op < ops; op++) begin_ns[op + 1] = begin_ns[op] + input->ops[op].compute_ns;
  for (uint32_t p = 0; p < pieces; p++) {
    uint32_t after = input->pieces[p].after_op, use = facts.piece_use[p];
    keys[p][1] = p;
    if (use == NONE) keys[p][0] = UINT64_MAX;
    else if (use < ops) keys[p][0] = begin_ns[use] - begin_ns[after + 1];
    else keys[p][0] = begin_ns[ops] - begin_ns[after + 1] + input->outside_ns + begin_ns[use - ops];
  }
  if (pieces > 1) qsort(keys, pieces, sizeof *keys, compare_key);
  for (uint32_t i = 0; i < pieces; i++) facts.pieces_by_gap[i] = (uint32_t)keys[i][1];

end:
  free(next_op);
  free(piece_counts);
  free(begin_ns);
  free(keys);
  if (!done) {
    gmi_facts_free(&facts);
    return GEMINI_ERR_OOM_SYSTEM;
  }
  *facts_out = facts;
  return GEMINI_OK;
}

void gmi_model_free(gmi_model_t *model) {
  free(model->stage_op);
  free(model->stage_piece);
  free(model->stage_first);
  free(model->access);
  free(model->next);
  memset(model, 0, sizeof *model);
}

/* Appends a stage and its accesses. A device piece writes all its chunks; none is FRESH, because an update reads what
 * it writes. */
static void add_stage(gmi_model_t *model, uint32_t op, uint32_t piece) {
  const gmi_plan_input_t *input = model->facts->input;
  model->stage_op[model->stage_count] = op;
  model->stage_piece[model->stage_count] = piece;
  model->stage_first[model->stage_count++] = model->access_count;
  if (piece == GMI_NO_PIECE) {
    for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++) {
      uint32_t chunk = input->accesses[x].chunk, mode = input->accesses[x].mode;
      if (model->held[chunk]) continue;
      if ((mode & (GMI_ACCESS_WRITE | GMI_ACCESS_FRESH)) != 0) chunk |= GMI_MODEL_WRITE;
      if ((mode & GMI_ACCESS_FRESH) != 0) chunk |= GMI_MODEL_FRESH;
      model->access[model->access_count++] = chunk;
    }
  } else {
    for (uint32_t i = input->pieces[piece].chunk_first; i < gmi_plan_piece_end(input, piece); i++) {
      if (model->held[input->piece_chunks[i]]) continue;
      model->access[model->access_count++] = input->piece_chunks[i] | GMI_MODEL_WRITE;
    }
  }
}

/* Links each access to the same chunk's next one by walking the stages backwards twice; ahead[chunk] is the next
 * access. The first round only establishes what the next iteration accesses first. A host piece after an op sets
 * GMI_MODEL_LEAVE in ahead of its chunks; the flag ends up in next of the last access before the piece. */
static void link_accesses(gmi_model_t *model, uint32_t *ahead) {
  const gmi_plan_input_t *input = model->facts->input;
  const gmi_facts_t *facts = model->facts;
  memset(ahead, 0xff, input->chunk_count * sizeof *ahead);
  for (uint32_t round = 0; round < 2; round++) {
    uint32_t stage = model->stage_count;
    for (uint32_t op = input->op_count; op-- > 0;) {
      for (uint32_t i = facts->op_piece_first[op]; i < facts->op_piece_first[op + 1]; i++) {
        uint32_t piece = facts->op_pieces[i];
        if (model->on_device[piece]) continue;
        for (uint32_t j = input->pieces[piece].chunk_first; j < gmi_plan_piece_end(input, piece); j++)
          /* NONE has the bit set already, so a chunk without accesses stays NONE */
          ahead[input->piece_chunks[j]] |= GMI_MODEL_LEAVE;
      }
      for (; stage > 0 && model->stage_op[stage - 1] == op; stage--) {
        for (uint32_t x = model->stage_first[stage - 1]; x < model->stage_first[stage]; x++) {
          uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
          model->next[x] = ahead[chunk];
          ahead[chunk] = x;
        }
      }
    }
  }
}

gemini_status_t gmi_model_make(const gmi_facts_t *facts, const uint8_t *on_device, const uint8_t *held,
                               gmi_model_t *model_out) {
  const gmi_plan_input_t *input = facts->input;
  gmi_model_t model = { .facts = facts, .on_device = on_device, .held = held };
  size_t stages = input->op_count, accesses = input->ops[input->op_count].access_first;
  for (uint32_t p = 0; p < input->piece_count; p++) {
    if (!on_device[p]) continue;
    stages++;
    accesses += gmi_plan_piece_end(input, p) - input->pieces[p].chunk_first;
  }
  for (uint32_t c = 0; c < input->chunk_count; c++) model.held_count += held[c] != 0;
  model.stage_op = malloc(stages * sizeof(uint32_t));
  model.stage_piece = malloc(stages * sizeof(uint32_t));
  model.stage_first = malloc((stages + 1) * sizeof(uint32_t));
  model.access = malloc(accesses * sizeof(uint32_t) + 1);
  model.next = malloc(accesses * sizeof(uint32_t) + 1);
  uint32_t *ahead = malloc((size_t)input->chunk_count * sizeof *ahead + 1);
  if (model.stage_op == NULL || model.stage_piece == NULL || model.stage_first == NULL || model.access == NULL ||
      model.next == NULL || ahead == NULL) {
    free(ahead);
    gmi_model_free(&model);
    return GEMINI_ERR_OOM_SYSTEM;
  }
  for (uint32_t op = 0; op < input->op_count; op++) {
    add_stage(&model, op, GMI_NO_PIECE);
    for (uint32_t i = facts->op_piece_first[op]; i < facts->op_piece_first[op + 1]; i++)
      if (on_device[facts->op_pieces[i]]) add_stage(&model, op, facts->op_pieces[i]);
  }
  model.stage_first[model.stage_count] = model.access_count;
  link_accesses(&model, ahead);
  free(ahead);
  *model_out = model;
  return GEMINI_OK;
}

uint64_t gmi_links_busy_ns(const gmi_plan_input_t *input, const gmi_plan_collective_t *all, uint32_t count, bool sums) {
  uint64_t most_ns = 0;
  for (uint32_t group = 0; group < input->groups.group_count; group++) {
    uint64_t busy_ns = 0;
    for (uint32_t i = 0; i < count; i++)
      if (all[i].group == group)
        busy_ns += sums ? input->groups.links[group].sum_ns : input->groups.links[group].gather_ns;
    if (busy_ns > most_ns) most_ns = busy_ns;
  }
  return most_ns;
}

bool gmi_plan_fits(const gmi_plan_input_t *input, const gmi_plan_t *plan) {
  if (plan->op_count != input->op_count || plan->chunk_count != input->chunk_count ||
      plan->piece_count != input->piece_count)
    return false;
  for (uint32_t f = 0; f < plan->fetch_first[plan->op_count]; f++) {
    const gmi_plan_move_t *move = &plan->fetches[f];
    if (move->chunk >= plan->chunk_count || move->use_op >= plan->op_count ||
        (move->use_piece >= plan->piece_count && move->use_piece != GMI_NO_PIECE))
      return false;
  }
  for (uint32_t e = 0; e < plan->evict_first[plan->op_count]; e++)
    if (plan->evicts[e].chunk >= plan->chunk_count) return false;
  for (uint32_t p = 0; p < plan->piece_count; p++)
    if ((plan->piece_ahead[p] && (plan->piece_on_device[p] || input->pieces[p].ahead_slots == 0)) ||
        plan->piece_ahead[p] > (plan->piece_passes[p] ? GMI_AHEAD_RESULTS : GMI_AHEAD_ALL) ||
        (plan->piece_passes[p] && (plan->piece_on_device[p] || input->pieces[p].result_ns == 0)))
      return false;
  return true;
}
