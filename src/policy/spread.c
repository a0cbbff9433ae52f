/* Chooses what stays on the device in an iteration that uses each chunk about once, as a forward pass does. Called by
 * plan.c for some candidates.
 * SPDX-License-Identifier: Apache-2.0
 *
 * With chunks used in turn, any set of them may stay: fetches are as many whichever it is. MIN keeps those of the
 * first ops, since they are needed soonest. Then the link has nothing to do while those ops compute, as nothing leaves
 * the device, and afterwards it does all of its work in the rest of the iteration. Here, the same share of each stage's
 * chunks comes and goes, so that frames become free, and the link has work, all the time. */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

#define WHOLE (UINT64_C(1) << 32)   /* a share of 1 */
#define GOLDEN UINT32_C(2654435769) /* the golden ratio less 1, in the same unit */

/* What a chunk does. AGAIN: stages that do not follow each other use it, so it would come more than once; it stays. */
enum { UNUSED, AGAIN, STAYS, COMES };

/* Fills what with UNUSED and AGAIN. last: scratch, [chunk_count]. Returns the number of chunks that are used. */
static uint32_t mark_again(const gmi_model_t *model, uint32_t *last, uint8_t *what) {
  uint32_t used = 0;
  for (uint32_t c = 0; c < model->facts->input->chunk_count; c++) what[c] = UNUSED, last[c] = UINT32_MAX;
  for (uint32_t j = 0; j < model->stage_count; j++) {
    for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++) {
      const uint32_t c = model->access[x] & GMI_MODEL_CHUNK;
      used += last[c] == UINT32_MAX;
      if (last[c] != UINT32_MAX && last[c] + 1 != j) what[c] = AGAIN;
      last[c] = j;
    }
  }
  return used;
}

/* Of the frames for chunks that come and go, the most that the stage uses itself. The others are for fetches while it
 * computes, as many as the link can do, if that leaves it a quarter of the frames. */
static uint32_t own_frames(const gmi_model_t *model, uint32_t stage, uint32_t frames) {
  const gmi_plan_input_t *input = model->facts->input;
  const uint64_t ahead = input->ops[model->stage_op[stage]].compute_ns / (input->fetch_ns + 1) + 1;
  const uint32_t least = (frames + 3) / 4;
  return ahead < frames - least ? frames - (uint32_t)ahead : least;
}

/* Fills what, except for AGAIN. Of each stage's chunks the share comes and goes, as far as the stage has frames beside
 * those that stay, whose number is keep. Returns the number of chunks that come and go.
 *
 * Which ones, follows from their indices: multiples of the golden ratio, modulo 1, are spread evenly however many in a
 * row are taken (three-distance theorem), and those below a share are among those below a larger one. So plans for
 * other numbers of frames keep almost the same chunks, and to go over from one plan to another costs few fetches. */
static uint32_t mark(const gmi_model_t *model, uint32_t keep, uint64_t share, uint8_t *what) {
  uint32_t count = 0;
  for (uint32_t c = 0; c < model->facts->input->chunk_count; c++)
    if (what[c] != AGAIN) what[c] = UNUSED;
  for (uint32_t j = 0; j < model->stage_count; j++) {
    const uint32_t room = gmi_model_room(model, j), most = room > keep ? own_frames(model, j, room - keep) : 0;
    uint32_t here = 0;
    for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++)
      here += what[model->access[x] & GMI_MODEL_CHUNK] == COMES;
    for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++) {
      const uint32_t chunk = model->access[x] & GMI_MODEL_CHUNK;
      if (what[chunk] != UNUSED) continue;
      what[chunk] = here < most && chunk * GOLDEN < share ? COMES : STAYS;
      here += what[chunk] == COMES;
      count += what[chunk] == COMES;
    }
  }
  return count;
}

/* Does every stage have room for what stays and for its own chunks? */
static bool fits(const gmi_model_t *model, uint32_t stays, const uint8_t *what) {
  for (uint32_t j = 0; j < model->stage_count; j++) {
    uint64_t need = stays;
    for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++)
      need += what[model->access[x] & GMI_MODEL_CHUNK] == COMES;
    if (need > gmi_model_room(model, j)) return false;
  }
  return true;
}

gemini_status_t gmi_spread_make(const gmi_model_t *model, uint32_t ring, gmi_hits_t *hits_out, bool *fits_out) {
  const uint32_t chunks = model->facts->input->chunk_count;
  const uint64_t pass = (uint64_t)model->access_count + model->stage_count;
  uint8_t *what = malloc((size_t)chunks + 1);
  uint32_t *last = malloc((size_t)chunks * sizeof *last + 1), least = UINT32_MAX;
  uint64_t low = 0, high = WHOLE;
  uint64_t visits = 0;
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  *fits_out = false;
  if (what == NULL || last == NULL) goto end;
  for (uint32_t j = 0; j < model->stage_count; j++)
    if (gmi_model_room(model, j) < least) least = gmi_model_room(model, j);
  const uint32_t used = mark_again(model, last, what), keep = least > ring ? least - ring : 0;
  const uint32_t come = used > keep ? used - keep : 0;
  visits = 4 * pass;
  status = GEMINI_OK;
  if (mark(model, keep, high, what) < come) goto end;
  /* the smallest share of which so many come: marks of chunks change with differences above this one */
  while (high - low > WHOLE / 8 / (used + 1)) {
    const uint64_t middle = low + (high - low) / 2;
    visits += pass;
    if (mark(model, keep, middle, what) < come) low = middle;
    else high = middle;
  }
  if (come == 0) high = 0;
  if (!fits(model, used - mark(model, keep, high, what), what)) goto end;
  for (uint32_t c = 0; c < chunks; c++) what[c] = what[c] == STAYS || what[c] == AGAIN;
  status = gmi_visit_make(model, what, hits_out);
  *fits_out = status == GEMINI_OK;
end:
  hits_out->visits = visits;
  free(what);
  free(last);
  return status;
}
