/* Turns hits into moves: decides when each fetch and each eviction is issued. Called by plan.c for every candidate,
 * before it is simulated.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An eviction is issued when the chunk's last use before it has ended. A fetch may be issued early, but only into
 * frames that nothing else needs until the fetched chunk is used, so the number of fetches does not change.
 *
 * All fetches share one link, so they are issued in order of need. The target of a fetch is the latest stage at whose
 * begin the link, if idle before, has enough time for this fetch and for all fetches behind it, with SLACK_FETCHES
 * to spare (find_targets()). From its use, the fetch is moved back towards the target as long as a frame is free
 * (issue_stages()). LOOKBACK_STAGES bounds the work. */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

#define LOOKBACK_STAGES 1024
#define SLACK_FETCHES 2

/* From the stage's begin to that of the next one, if nothing waits. */
static uint64_t stage_ns(const gmi_model_t *model, uint32_t stage) {
  const gmi_plan_input_t *input = model->facts->input;
  const uint32_t piece = model->stage_piece[stage];
  const uint64_t behind_ns = stage + 1 == model->stage_count ? input->outside_ns : 0;
  return behind_ns +
         (piece == GMI_NO_PIECE ? input->ops[model->stage_op[stage]].compute_ns : input->pieces[piece].device_ns);
}

/* is_fetch: the access misses and needs the chunk's bytes. is_kept: the chunk stays resident after this access until
 * its next one. */
static bool is_fetch(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t access) {
  return !gmi_hits_at(hits, access) && (model->access[access] & GMI_MODEL_FRESH) == 0;
}
static bool is_kept(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t access) {
  return (model->next[access] & GMI_MODEL_LEAVE) == 0 && gmi_hits_at(hits, model->next[access]);
}

/* Fills room: the frames that stay free in each stage if every fetch is issued at its use. */
static void find_room(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t *room) {
  /* Starts with the chunks that stay resident over the end of the iteration: kept accesses whose successor is not
   * behind them. Within a stage, an access that misses adds one chunk; after it, an access that is not kept takes one
   * away. */
  int64_t resident = 0;
  for (uint32_t x = 0; x < model->access_count; x++)
    resident += is_kept(model, hits, x) && (model->next[x] & GMI_MODEL_INDEX) <= x;
  for (uint32_t j = 0; j < model->stage_count; j++) {
    uint32_t first = model->stage_first[j], end = model->stage_first[j + 1];
    for (uint32_t x = first; x < end; x++) resident += !gmi_hits_at(hits, x);
    room[j] = (uint32_t)(gmi_model_room(model, j) - resident);
    for (uint32_t x = first; x < end; x++) resident -= !is_kept(model, hits, x);
  }
}

/* Fills issue with each fetch's target: the stage in which the fetch is issued if frames allow. A negative stage is in
 * the iteration before. Walks the fetches backwards from the last; latest_ns is the latest time at which the link
 * must start the fetch at hand. */
static void find_targets(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t fetch_count, int32_t *issue) {
  const gmi_plan_input_t *input = model->facts->input;
  int64_t stages = model->stage_count, iteration_ns = 0, slack_ns = SLACK_FETCHES * (int64_t)input->fetch_ns;
  for (uint32_t j = 0; j < model->stage_count; j++) iteration_ns += (int64_t)stage_ns(model, j);
  uint64_t slice_ns;
  int64_t latest_ns = INT64_MAX / 4; /* when the link must be free for the fetches behind; starts as no limit */
  for (uint32_t round = 0; round < 2; round++) {
    /* The first round only finds how far the next iteration's fetches reach back into this one: it leaves latest_ns
     * for the second. */
    int64_t begin_ns = iteration_ns, back_ns = iteration_ns, back = stages;
    uint32_t f = fetch_count, gather = input->groups.gather_count;
    for (uint32_t j = model->stage_count; j-- > 0;) {
      begin_ns -= (int64_t)stage_ns(model, j);
      /* slices for gathers take the link, too */
      for (slice_ns = 0; gather > 0 && input->groups.gathers[gather - 1].use_op >= model->stage_op[j]; gather--)
        for (uint32_t k = 0; k < input->groups.gathers[gather - 1].part_count; k++)
          slice_ns += gmi_plan_part_ns(input, input->fetch_ns, input->groups.gathers[gather - 1].part_bytes[k]);
      if (slice_ns > 0) latest_ns = (latest_ns < begin_ns ? latest_ns : begin_ns) - (int64_t)slice_ns;
      for (uint32_t x = model->stage_first[j + 1]; x-- > model->stage_first[j];) {
        if (!is_fetch(model, hits, x)) continue;
        f--;
        latest_ns = (latest_ns < begin_ns ? latest_ns : begin_ns) - (int64_t)input->fetch_ns;
        if (round == 0) continue;
        if (back > j) back = j, back_ns = begin_ns;
        while (back_ns > latest_ns - slack_ns && back > (int64_t)j - LOOKBACK_STAGES &&
               back > (int64_t)j - stages + 1) {
          back--;
          back_ns -= (int64_t)stage_ns(model, (uint32_t)(back < 0 ? back + stages : back));
        }
        issue[f] = (int32_t)back;
      }
    }
    if (latest_ns < INT64_MAX / 8) {
      latest_ns += iteration_ns;
      /* If the link cannot keep up, latest_ns falls without bound from round to round; two iterations back suffice. */
      if (latest_ns < -iteration_ns) latest_ns = -iteration_ns;
    }
  }
}

/* Takes a frame in each stage before `at`, the nearest first, until one has none or the stage is lowest. Returns the
 * stage reached. room: [stages]; stages below 0 are those of the iteration before. */
static int32_t take_frames(uint32_t *room, int32_t stages, int32_t at, int32_t lowest) {
  while (at > lowest) {
    const int32_t end = at > 0 ? at : at + stages, span = at - lowest < end ? at - lowest : end;
    int32_t taken = 0;
    /* Most of the time of a plan goes here: eight stages at once, which compilers turn into vectors. */
    for (; span - taken >= 8; taken += 8) {
      uint32_t *part = &room[end - taken - 8], lacking = 0;
      for (int i = 0; i < 8; i++) lacking |= part[i] == 0;
      if (lacking) break;
      for (int i = 0; i < 8; i++) part[i]--;
    }
    while (taken < span && room[end - taken - 1] > 0) room[end - ++taken]--;
    at -= taken;
    if (taken < span) break;
  }
  return at;
}

/* Replaces each target in issue by the stage in which the fetch is issued, in order of need: starting at the use,
 * goes back one stage at a time while that stage has a free frame, takes the frame, and stops at the target, at the
 * fetch before it, or at the first stage in which the chunk may be fetched again. */
static gemini_status_t issue_stages(const gmi_model_t *model, const gmi_hits_t *hits, uint32_t fetch_count,
                                    uint32_t *room, int32_t *issue) {
  const gmi_plan_input_t *input = model->facts->input;
  const gmi_facts_t *facts = model->facts;
  int32_t stages = (int32_t)model->stage_count;
  /* ready[chunk]: the first stage in which the chunk may be fetched again, after its last use and after its host
   * pieces were submitted. The first round only fills it with the stages of the iteration before. */
  int32_t *ready = malloc((size_t)input->chunk_count * sizeof *ready + 1);
  if (ready == NULL) return GEMINI_ERR_OOM_SYSTEM;
  memset(ready, 0, input->chunk_count * sizeof *ready);
  uint32_t f = 0;
  int32_t before = INT32_MIN; /* stage in which the fetch before this one is issued */
  for (int32_t round = 0; round < 2; round++) {
    int32_t base = round == 0 ? -stages : 0;
    for (int32_t j = 0; j < stages; j++) {
      uint32_t first = model->stage_first[j], end = model->stage_first[j + 1], op = model->stage_op[j];
      for (uint32_t x = first; x < end; x++) {
        if (round == 0 || !is_fetch(model, hits, x)) continue;
        int32_t lowest = ready[model->access[x] & GMI_MODEL_CHUNK];
        if (lowest < issue[f]) lowest = issue[f];
        if (lowest < before) lowest = before;
        issue[f++] = before = take_frames(room, stages, j, lowest);
      }
      for (uint32_t x = first; x < end; x++) ready[model->access[x] & GMI_MODEL_CHUNK] = base + j + 1;
      if (j + 1 < stages && model->stage_op[j + 1] == op) continue;
      for (uint32_t i = facts->op_piece_first[op]; i < facts->op_piece_first[op + 1]; i++) {
        uint32_t piece = facts->op_pieces[i];
        if (model->on_device[piece]) continue;
        for (uint32_t c = input->pieces[piece].chunk_first; c < gmi_plan_piece_end(input, piece); c++)
          ready[input->piece_chunks[c]] = base + j + 1;
      }
    }
  }
  free(ready);
  /* The order of need also holds across the end of the iteration: no fetch is issued before the last fetch of the
   * iteration before it. */
  for (f = 0; f < fetch_count && issue[f] < before - stages; f++) issue[f] = before - stages;
  return GEMINI_OK;
}

static void write_move(const gmi_model_t *model, gmi_plan_move_t *move, uint32_t chunk, uint32_t stage) {
  move->chunk = chunk;
  move->op = model->stage_op[stage];
  move->piece = model->stage_piece[stage];
  move->use_op = 0;
  move->use_piece = GMI_NO_PIECE;
  move->flags = 0;
}

/* Writes plan->fetches and fetch_first. The plan is one iteration that repeats, so a fetch issued in the iteration
 * before its use becomes one of the last fetches of the list, and its chunk counts as resident (arriving) at the
 * start. */
static void write_fetches(const gmi_model_t *model, const gmi_hits_t *hits, const int32_t *issue, gmi_plan_t *plan) {
  uint32_t count = (uint32_t)plan->fetch_count, wrapped = 0, f = 0;
  /* fetches issued in the iteration before their use come last */
  while (wrapped < count && issue[wrapped] < 0) wrapped++;
  for (uint32_t j = 0; j < model->stage_count; j++) {
    for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++) {
      if (!is_fetch(model, hits, x)) continue;
      uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
      uint32_t at = f < wrapped ? count - wrapped + f : f - wrapped;
      gmi_plan_move_t *move = &plan->fetches[at];
      write_move(model, move, chunk, (uint32_t)(issue[f] < 0 ? issue[f] + (int32_t)model->stage_count : issue[f]));
      move->use_op = model->stage_op[j];
      move->use_piece = model->stage_piece[j];
      if (f < wrapped) plan->resident_at_start[chunk] = 1;
      plan->fetch_first[move->op + 1]++;
      f++;
    }
  }
  for (uint32_t op = 0; op < model->facts->input->op_count; op++) plan->fetch_first[op + 1] += plan->fetch_first[op];
}

/* Writes plan->evicts and evict_first: an eviction follows every access that does not keep its chunk. The eviction
 * is dirty if an access wrote the chunk since it was fetched. The first round only establishes which chunks are
 * dirty when the iteration begins. Clears stays for every chunk that is evicted. */
static void write_evicts(const gmi_model_t *model, const gmi_hits_t *hits, uint8_t *dirty, gmi_plan_t *plan) {
  uint32_t count = 0;
  for (uint32_t round = 0; round < 2; round++) {
    for (uint32_t j = 0; j < model->stage_count; j++) {
      for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++) {
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
      if (round == 1) plan->evict_first[model->stage_op[j] + 1] = count;
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
  plan->piece_ahead = calloc((size_t)input->piece_count + 1, 1); /* plan.c chooses */
  plan->piece_passes = calloc((size_t)input->piece_count + 1, 1);
  plan->resident_at_start = malloc((size_t)input->chunk_count + 1);
  plan->stays = malloc((size_t)input->chunk_count + 1);
  uint32_t *room = malloc((size_t)model->stage_count * sizeof *room);
  int32_t *issue = malloc(fetches * sizeof *issue + 1);
  uint8_t *dirty = calloc((size_t)input->chunk_count + 1, 1);
  if (plan->fetches == NULL || plan->fetch_first == NULL || plan->evicts == NULL || plan->evict_first == NULL ||
      plan->piece_on_device == NULL || plan->piece_ahead == NULL || plan->piece_passes == NULL ||
      plan->resident_at_start == NULL || plan->stays == NULL || room == NULL || issue == NULL || dirty == NULL)
    goto end;
  memcpy(plan->piece_on_device, model->on_device, input->piece_count);
  for (uint32_t p = 0; p < input->piece_count; p++) plan->device_piece_count += model->on_device[p] != 0;
  for (uint32_t c = 0; c < input->chunk_count; c++) plan->resident_at_start[c] = plan->stays[c] = model->held[c] != 0;
  for (uint32_t x = 0; x < model->access_count; x++) {
    uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
    plan->stays[chunk] = 1; /* write_evicts() clears it if the chunk is ever evicted */
    if (is_kept(model, hits, x) && (model->next[x] & GMI_MODEL_INDEX) <= x) plan->resident_at_start[chunk] = 1;
  }
  find_room(model, hits, room);
  find_targets(model, hits, (uint32_t)fetches, issue);
  status = issue_stages(model, hits, (uint32_t)fetches, room, issue);
  if (status != GEMINI_OK) goto end;
  write_fetches(model, hits, issue, plan);
  write_evicts(model, hits, dirty, plan);
end:
  free(room);
  free(issue);
  free(dirty);
  return status;
}
