/* Turns hits into moves: when each fetch and each eviction is issued.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An eviction is issued when the last use before it has ended. A fetch may be issued early into frames that nothing
 * else needs until its use, so that the number of fetches stays what it was. Fetches share one link, so they are
 * issued in order of need; each goes back until the link, were it idle before, would be done in time for this fetch
 * and all behind it, with SLACK_FETCHES to spare, or by LOOKBACK_STEPS, which bounds the work. */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

#define LOOKBACK_STEPS 1024
#define SLACK_FETCHES 2

static uint64_t step_ns(const gmi_model_t *model, uint32_t step) {
  const gmi_plan_input_t *input = model->facts->input;
  uint32_t piece = model->step_piece[step];
  return piece == GMI_NO_PIECE ? input->ops[model->step_op[step]].compute_ns : input->pieces[piece].device_ns;
}

static bool is_fetch(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t access) {
  return !gmi_hits_at(hits, access) && (model->access[access] & GMI_MODEL_FRESH) == 0;
}
static bool is_kept(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t access) {
  return (model->next[access] & GMI_MODEL_LEAVE) == 0 && gmi_hits_at(hits, model->next[access]);
}

/* Frames that stay free in each step, were every fetch issued at its use. Returns how many chunks are resident when
 * the iteration begins. */
static void find_room(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t *room) {
  /* Kept over the iteration's end: hits whose predecessor is not before them. Counted as those resident behind the
   * last step: every access adds one unless it hits, and takes one away unless it is kept. */
  int64_t resident = 0;
  for (uint32_t x = 0; x < model->access_count; x++)
    resident += is_kept(model, hits, x) && (model->next[x] & GMI_MODEL_INDEX) <= x;
  for (uint32_t j = 0; j < model->step_count; j++) {
    uint32_t first = model->step_first[j], end = model->step_first[j + 1];
    for (uint32_t x = first; x < end; x++) resident += !gmi_hits_at(hits, x);
    room[j] = (uint32_t)(gmi_model_room(model, j) - resident);
    for (uint32_t x = first; x < end; x++) resident -= !is_kept(model, hits, x);
  }
}

/* The step, perhaps before 0 (in the iteration before), in which each fetch ought to be issued, were there room. */
static void find_targets(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t fetch_count, int32_t *issue) {
  const gmi_plan_input_t *input = model->facts->input;
  int64_t steps = model->step_count, iteration_ns = 0, slack_ns = SLACK_FETCHES * (int64_t)input->fetch_ns;
  for (uint32_t j = 0; j < model->step_count; j++) iteration_ns += (int64_t)step_ns(model, j);
  int64_t latest_ns = INT64_MAX / 4; /* by when the link must be free for the fetches behind */
  for (uint32_t round = 0; round < 2; round++) {
    /* The first round only finds how far the next iteration's fetches reach back into this one. */
    int64_t begin_ns = iteration_ns, back_ns = iteration_ns, back = steps;
    uint32_t f = fetch_count;
    for (uint32_t j = model->step_count; j-- > 0;) {
      begin_ns -= (int64_t)step_ns(model, j);
      for (uint32_t x = model->step_first[j + 1]; x-- > model->step_first[j];) {
        if (!is_fetch(model, hits, x)) continue;
        f--;
        latest_ns = (latest_ns < begin_ns ? latest_ns : begin_ns) - (int64_t)input->fetch_ns;
        if (round == 0) continue;
        if (back > j) back = j, back_ns = begin_ns;
        while (back_ns > latest_ns - slack_ns && back > (int64_t)j - LOOKBACK_STEPS && back > (int64_t)j - steps + 1) {
          back--;
          back_ns -= (int64_t)step_ns(model, (uint32_t)(back < 0 ? back + steps : back));
        }
        issue[f] = (int32_t)back;
      }
    }
    if (latest_ns < INT64_MAX / 8) {
      latest_ns += iteration_ns;
      /* A link that cannot keep up falls behind without bound; two iterations behind is far enough. */
      if (latest_ns < -iteration_ns) latest_ns = -iteration_ns;
    }
  }
}

/* Moves each issue from its target to where there is room, taking that room, in order of need. */
static gemini_status_t place(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t fetch_count, uint32_t *room,
                             int32_t *issue) {
  const gmi_plan_input_t *input = model->facts->input;
  const gmi_facts_t *facts = model->facts;
  int32_t steps = (int32_t)model->step_count;
  /* First step in which a chunk may be fetched again: behind its last use and its host pieces. */
  int32_t *ready = malloc((size_t)input->chunk_count * sizeof *ready + 1);
  if (ready == NULL) return GEMINI_ERR_OOM_SYSTEM;
  memset(ready, 0, input->chunk_count * sizeof *ready);
  uint32_t f = 0;
  int32_t before = INT32_MIN; /* issue of the fetch before */
  for (int32_t round = 0; round < 2; round++) {
    int32_t base = round == 0 ? -steps : 0;
    for (int32_t j = 0; j < steps; j++) {
      uint32_t first = model->step_first[j], end = model->step_first[j + 1], op = model->step_op[j];
      for (uint32_t x = first; x < end; x++) {
        if (round == 0 || !is_fetch(model, hits, x)) continue;
        int32_t lowest = ready[model->access[x] & GMI_MODEL_CHUNK], at = j;
        if (lowest < issue[f]) lowest = issue[f];
        if (lowest < before) lowest = before;
        for (; at > lowest; at--) {
          uint32_t *step_room = &room[at > 0 ? at - 1 : at - 1 + steps];
          if (*step_room == 0) break;
          --*step_room;
        }
        issue[f++] = before = at;
      }
      for (uint32_t x = first; x < end; x++) ready[model->access[x] & GMI_MODEL_CHUNK] = base + j + 1;
      if (j + 1 < steps && model->step_op[j + 1] == op) continue;
      for (uint32_t i = facts->op_piece_first[op]; i < facts->op_piece_first[op + 1]; i++) {
        uint32_t piece = facts->op_pieces[i];
        if (model->on_device[piece]) continue;
        for (uint32_t c = input->pieces[piece].chunk_first; c < gmi_plan_piece_end(input, piece); c++)
          ready[input->piece_chunks[c]] = base + j + 1;
      }
    }
  }
  free(ready);
  /* The next iteration's first fetches come behind this one's last in order of need too. */
  for (f = 0; f < fetch_count && issue[f] < before - steps; f++) issue[f] = before - steps;
  return GEMINI_OK;
}

static void write_move(const gmi_model_t *model, gmi_plan_move_t *move, uint32_t chunk, uint32_t step) {
  move->chunk = chunk;
  move->op = model->step_op[step];
  move->piece = model->step_piece[step];
  move->use_op = 0;
  move->use_piece = GMI_NO_PIECE;
  move->flags = 0;
}

static void write_fetches(const gmi_model_t *model, const gmi_hits_t *hits, const int32_t *issue, gmi_plan_t *plan) {
  uint32_t count = (uint32_t)plan->fetch_count, wrapped = 0, f = 0;
  while (wrapped < count && issue[wrapped] < 0) wrapped++; /* issued in the iteration before its use: these come last */
  for (uint32_t j = 0; j < model->step_count; j++) {
    for (uint32_t x = model->step_first[j]; x < model->step_first[j + 1]; x++) {
      if (!is_fetch(model, hits, x)) continue;
      uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
      uint32_t at = f < wrapped ? count - wrapped + f : f - wrapped;
      gmi_plan_move_t *move = &plan->fetches[at];
      write_move(model, move, chunk, (uint32_t)(issue[f] < 0 ? issue[f] + (int32_t)model->step_count : issue[f]));
      move->use_op = model->step_op[j];
      move->use_piece = model->step_piece[j];
      if (f < wrapped) plan->resident_at_start[chunk] = 1;
      plan->fetch_first[move->op + 1]++;
      f++;
    }
  }
  for (uint32_t op = 0; op < model->facts->input->op_count; op++) plan->fetch_first[op + 1] += plan->fetch_first[op];
}

/* A chunk is dirty when its stay, from the access that brought it to this one, has written it. The first round learns
 * the state in which the iteration begins. Marks in stays chunks that some access drops, by clearing. */
static void write_evicts(const gmi_model_t *model, const gmi_hits_t *hits, uint8_t *dirty, gmi_plan_t *plan) {
  uint32_t count = 0;
  for (uint32_t round = 0; round < 2; round++) {
    for (uint32_t j = 0; j < model->step_count; j++) {
      for (uint32_t x = model->step_first[j]; x < model->step_first[j + 1]; x++) {
        uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
        if (!gmi_hits_at(hits, x)) dirty[chunk] = 0;
        dirty[chunk] |= (model->access[x] & GMI_MODEL_WRITE) != 0;
        if (round == 0 || is_kept(model, hits, x)) continue;
        gmi_plan_move_t *move = &plan->evicts[count++];
        write_move(model, move, chunk, j);
        if (dirty[chunk]) move->flags |= GMI_EVICT_DIRTY, plan->evict_dirty_count++;
        if ((model->next[x] & GMI_MODEL_LEAVE) != 0) move->flags |= GMI_EVICT_FOR_UPDATE;
        plan->stays[chunk] = 0;
      }
      if (round == 1) plan->evict_first[model->step_op[j] + 1] = count;
    }
  }
}

gemini_status_t gmi_schedule_make(const gmi_model_t *model, const gmi_hits_t *hits, gmi_plan_t *plan) {
  const gmi_plan_input_t *input = model->facts->input;
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  uint64_t evicts = 0, fetches = hits->fetch_count;
  for (uint32_t x = 0; x < model->access_count; x++) evicts += !is_kept(model, hits, x);
  plan->op_count = input->op_count;
  plan->chunk_count = input->chunk_count;
  plan->piece_count = input->piece_count;
  plan->fetch_count = fetches;
  plan->fetches = malloc(fetches * sizeof *plan->fetches + 1);
  plan->fetch_first = calloc((size_t)input->op_count + 1, sizeof(uint32_t));
  plan->evicts = malloc(evicts * sizeof *plan->evicts + 1);
  plan->evict_first = calloc((size_t)input->op_count + 1, sizeof(uint32_t));
  plan->piece_on_device = malloc((size_t)input->piece_count + 1);
  plan->resident_at_start = malloc((size_t)input->chunk_count + 1);
  plan->stays = malloc((size_t)input->chunk_count + 1);
  uint32_t *room = malloc((size_t)model->step_count * sizeof *room);
  int32_t *issue = malloc(fetches * sizeof *issue + 1);
  uint8_t *dirty = calloc((size_t)input->chunk_count + 1, 1);
  if (plan->fetches == NULL || plan->fetch_first == NULL || plan->evicts == NULL || plan->evict_first == NULL ||
      plan->piece_on_device == NULL || plan->resident_at_start == NULL || plan->stays == NULL || room == NULL ||
      issue == NULL || dirty == NULL)
    goto end;
  memcpy(plan->piece_on_device, model->on_device, input->piece_count);
  for (uint32_t p = 0; p < input->piece_count; p++) plan->device_piece_count += model->on_device[p] != 0;
  for (uint32_t c = 0; c < input->chunk_count; c++) plan->resident_at_start[c] = plan->stays[c] = model->held[c] != 0;
  for (uint32_t x = 0; x < model->access_count; x++) {
    uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
    plan->stays[chunk] = 1; /* until write_evicts() finds otherwise */
    if (is_kept(model, hits, x) && (model->next[x] & GMI_MODEL_INDEX) <= x) plan->resident_at_start[chunk] = 1;
  }
  find_room(model, hits, room);
  find_targets(model, hits, (uint32_t)fetches, issue);
  status = place(model, hits, (uint32_t)fetches, room, issue);
  if (status != GEMINI_OK) goto end;
  write_fetches(model, hits, issue, plan);
  write_evicts(model, hits, dirty, plan);
end:
  free(room);
  free(issue);
  free(dirty);
  return status;
}
