/* Jobs of the workers that write new values beside the old ones, and updates of the host in two passes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An update reads and writes all states, but an operator only waits for the parameters. So a job may have two passes.
 * The first one writes the results, which are the arenas that the update only writes, and the job's slots of results
 * are done with it. The second one writes the states, when the workers have nothing urgent to do: all other slots are
 * done then, so whoever uses them next waits for it. Both read the gradients. Where these have the bytes of the
 * parameters, which is what reusing arenas do, the parameters get a spare slot, and the gradients' is free behind the
 * second pass. */
#include <stdlib.h>

#include "chunk/arena.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/speculate.h"
#include "core/streams.h"
#include "core/workers.h"

bool gmi_piece_is_unit(const gmi_walk_t *k, const gmi_piece_t *p) {
  if (p->begin % k->unit) return false;
  bool last = true;
  for (uint32_t i = 0; i < k->u.arena_count; i++)
    last &= p->end == atomic_load(&k->arenas[i]->size) / k->arenas[i]->element_bytes;
  return (p->end % k->unit == 0 || last) && !gmi_piece_has_gaps(k, p);
}

gmi_job_t *gmi_job_beside(gmi_walk_t *k, const gmi_piece_t *p, const uint32_t *slots) {
  gmi_manager_t *m = k->m;
  uint32_t chunks = 0, written = 0, first, count;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_piece_range(k, p, i, &first, &count);
    chunks += count;
  }
  for (uint32_t i = 0; i < p->count; i++) written += slots[i] != GMI_NONE;
  const uint32_t used = p->count + written;
  gmi_job_t *job =
      calloc(1, sizeof *job + (used + 1) * sizeof(gmi_fence_t) + used * (sizeof(gmi_slot_t *) + sizeof(uint64_t)) +
                    2 * chunks * sizeof(uint8_t *) + chunks * sizeof *job->zeros);
  if (!job) return NULL;
  uint8_t *at = (uint8_t *)(job + 1);
  job->zeros = (void *)at;
  at += chunks * sizeof *job->zeros;
  job->fences = (void *)at;
  at += (used + 1) * sizeof *job->fences;
  job->slots = (void *)at;
  at += used * sizeof *job->slots;
  job->after = (void *)at;
  at += used * sizeof *job->after;
  uint8_t **addresses = (void *)at;
  job->fn = k->u.fn;
  job->try_fn = k->u.try_fn;
  job->user = k->u.user;
  job->span = (gemini_update_span_t){ .struct_size = sizeof(gemini_update_span_t),
                                      .tier = GEMINI_TIER_HOST,
                                      .first_element = p->begin,
                                      .element_count = p->end - p->begin,
                                      .arena_count = k->u.arena_count };
  if (k->user) {
    atomic_fetch_add(&k->user->refs, 1);
    job->user_refs = &k->user->refs;
  }
  for (uint32_t i = 0; k->u.flags & GEMINI_UPDATE_PASSES && i < k->u.arena_count; i++) {
    job->passes.writes[0] |= (uint32_t)(k->modes[i] == GEMINI_WRITE) << i;
    job->passes.writes[1] |= (uint32_t)(k->modes[i] == GEMINI_READ_WRITE) << i;
  }
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    const gmi_arena_t *a = k->arenas[i], *store = gmi_arena_at(m, a->store);
    gmi_piece_range(k, p, i, &first, &count);
    uint8_t **outs = addresses, **ins = k->modes[i] == GEMINI_WRITE ? outs : outs + count;
    job->element_bytes[i] = a->element_bytes;
    job->chunks[i] = ins;
    job->outs[i] = k->modes[i] & GEMINI_WRITE ? outs : NULL;
    addresses = outs + 2 * (uint64_t)count;
    for (uint32_t c = 0; c < count; c++) {
      gmi_chunk_t *chunk = &store->chunks[first + c];
      uint32_t n = 0;
      while (p->chunks[n] != chunk) n++;
      if (k->modes[i] != GEMINI_WRITE) ins[c] = gmi_chunk_host(m, chunk);
      if (!(k->modes[i] & GEMINI_WRITE)) continue;
      outs[c] = slots[n] == GMI_NONE ? gmi_chunk_host(m, chunk) : gmi_slot_address(m, slots[n]);
      if (slots[n] == GMI_NONE) continue;
      /* Behind the arena's last element its chunk has zeros, which an arena that grows later shows. */
      const uint64_t begin = (uint64_t)(first + c) << m->cut.chunk_shift, end = p->end * a->element_bytes;
      if (end - begin >= gmi_chunk_bytes(m)) continue;
      job->zeros[job->zero_count].address = outs[c] + (end - begin);
      job->zeros[job->zero_count++].bytes = gmi_chunk_bytes(m) - (end - begin);
    }
  }
  return job;
}

static void use_slot(gmi_manager_t *m, gmi_job_t *job, uint32_t index) {
  gmi_slot_t *slot = &m->host.slots[index];
  if (!gmi_fence_reached(m, slot->fence)) job->fences[job->fence_count++] = slot->fence;
  job->after[job->slot_count] = slot->work_queued++;
  job->slots[job->slot_count++] = slot;
}
bool gmi_chunk_is_result(const gmi_walk_t *k, const gmi_chunk_t *c) {
  bool result = false;
  for (uint32_t i = 0; i < k->u.arena_count; i++)
    result |= k->modes[i] == GEMINI_WRITE && k->arenas[i]->store == c->arena;
  return result;
}
void gmi_job_use_slots(const gmi_walk_t *k, const gmi_piece_t *p, const uint32_t *slots, gmi_job_t *job) {
  gmi_manager_t *m = k->m;
  if (!gmi_fence_reached(m, k->after)) job->fences[job->fence_count++] = k->after;
  for (uint32_t i = 0; job->passes.now != GEMINI_PASS_STATES && i < p->count; i++) {
    if (!gmi_chunk_is_result(k, p->chunks[i])) continue;
    use_slot(m, job, slots[i] != GMI_NONE ? slots[i] : gmi_chunk_slot(p->chunks[i]));
  }
  job->passes.result_count = job->slot_count;
  for (uint32_t i = 0; i < p->count; i++) {
    const bool result = gmi_chunk_is_result(k, p->chunks[i]);
    if (slots[i] != GMI_NONE && !result) use_slot(m, job, slots[i]);
    if (slots[i] == GMI_NONE ? !result : p->modes[i] & GEMINI_READ) use_slot(m, job, gmi_chunk_slot(p->chunks[i]));
  }
}

bool gmi_unit_has_passes(const gmi_walk_t *k) {
  return k->u.flags & GEMINI_UPDATE_PASSES && !k->m->file.store && !k->slicing.chunk &&
         gmi_modes_have_passes(k->modes, k->u.arena_count);
}
/* Can the parameters leave the slots in which gradients are? */
static bool results_may_move(const gmi_walk_t *k, const gmi_piece_t *p) {
  bool may = true;
  for (uint32_t i = 0; i < p->count; i++)
    may &= !gmi_chunk_is_result(k, p->chunks[i]) || !(p->modes[i] & GEMINI_READ) ||
           (gmi_chunk_slot(p->chunks[i]) < k->m->host.slot_count && gmi_chunk_may_move(p->chunks[i]));
  return may;
}

/* Takes a spare slot for each chunk of parameters that holds gradients. False: there is none that no job uses any more,
 * and nothing has changed. */
static bool moves_take(const gmi_walk_t *k, const gmi_piece_t *p, uint32_t *slots) {
  gmi_manager_t *m = k->m;
  bool got = true;
  for (uint32_t i = 0; i < p->count; i++) {
    slots[i] = GMI_NONE;
    if (got && gmi_chunk_is_result(k, p->chunks[i]) && p->modes[i] & GEMINI_READ)
      got = gmi_host_spare(m) > 0 && gmi_host_spare_take(m, true, &slots[i]);
  }
  for (uint32_t i = 0; !got && i < p->count; i++)
    if (slots[i] != GMI_NONE) gmi_host_spare_give(m, slots[i]);
  return got;
}

gmi_job_t *gmi_job_of_states(gmi_walk_t *k, const gmi_piece_t *p, const uint32_t *slots) {
  gmi_manager_t *m = k->m;
  bool here = gmi_unit_has_passes(k) && results_may_move(k, p);
  for (uint32_t i = 0; here && i < p->count; i++) {
    const gmi_chunk_t *c = p->chunks[i];
    if (!(p->modes[i] & GEMINI_READ)) continue;
    here = gmi_chunk_has(c, GMI_VALID_HOST) && gmi_chunk_has_slot(c) && gmi_chunk_slot(c) < m->host.slot_count &&
           !gmi_fence_place(m, m->host.slots[gmi_chunk_slot(c)].fence);
  }
  gmi_job_t *job = here ? gmi_job_beside(k, p, slots) : NULL;
  if (!job) return NULL;
  job->passes.now = GEMINI_PASS_STATES;
  job->zero_count = 0; /* the first pass has cleared what is behind the results */
  return job;
}
void gmi_job_drop(gmi_job_t *job) {
  if (job && job->user_refs) atomic_fetch_sub(job->user_refs, 1);
  free(job);
}

bool gmi_piece_in_passes(gmi_walk_t *k, gmi_piece_t *p) {
  gmi_manager_t *m = k->m;
  uint32_t slots[GMI_PIECE_CHUNKS];
  if (gmi_piece_to_host(k, p) || !gmi_unit_has_passes(k) || !gmi_piece_is_unit(k, p) || !results_may_move(k, p) ||
      !moves_take(k, p, slots))
    return false;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < p->count; i++)
    status = gmi_fence_place(m, m->host.slots[gmi_chunk_slot(p->chunks[i])].fence);
  gmi_job_t *job = status ? NULL : gmi_job_beside(k, p, slots);
  if (!job) {
    for (uint32_t i = 0; i < p->count; i++)
      if (slots[i] != GMI_NONE) gmi_host_spare_give(m, slots[i]);
    return false;
  }
  gmi_job_use_slots(k, p, slots, job);
  job->next_use = p->next_use;
  job->passes.now = GEMINI_PASS_RESULTS;
  for (uint32_t i = 0; i < p->count; i++) {
    if (slots[i] != GMI_NONE) gmi_host_spare_bind(m, slots[i], p->chunks[i]);
    if (p->modes[i] & GEMINI_WRITE) gmi_chunk_host_wrote(m, p->chunks[i]);
  }
  gmi_workers_push(m, job);
  return true;
}
