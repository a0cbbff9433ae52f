/* Updates that are speculated. SPDX-License-Identifier: Apache-2.0
 *
 * A unit is a piece of an update: one chunk of the arena with the smallest elements, and the whole chunks of the other
 * arenas that belong to it. Its record (gmi_spec_t) has a spare slot for each chunk that the update writes. A worker's
 * job reads the chunks' own slots and writes the spare ones. The record ends in one of two ways: an update takes it
 * over, by which the chunks change to the new slots; or it is dropped, by which the slots are free. Neither waits for
 * the job, as the work counts of slots make every later user of a slot, old or new, wait for it.
 *
 * What is speculated is true as long as nobody writes a chunk of the unit. So each chunk names its record (spec_), and
 * all that writes chunks drops it: gmi_chunk_hold() and the like, gmi_chunk_wrote(), gmi_chunk_host_wrote(),
 * gmi_chunk_forget(). SETTLED is clear meanwhile, so that no acquire without the lock comes past these. Moves between
 * the tiers change no bytes and need no care, except that memory must not be returned to the system while a job uses
 * it: gmi_host_resize() waits for the workers. Without a file tier each chunk that a job reads stays in its slot until
 * the job is done (reclaimable() in host.c).
 *
 * Spare slots are nobody's need: gmi_host_room() drops records before it looks for anything else. To speculate only
 * what will stay, gmi_host_spare() counts as spare what no iteration has used lately. */
#include <stdlib.h>
#include <string.h>

#include "chunk/arena.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/speculate.h"
#include "core/streams.h"
#include "core/workers.h"

typedef struct {
  gmi_chunk_t *chunk;
  uint32_t slot; /* for its new values; GMI_NONE: they are not computed, or the update only reads it */
} spec_chunk_t;
typedef struct gmi_spec {
  struct gmi_spec *next, *previous;
  gmi_attempt_t *attempt;
  uint64_t begin, end; /* elements */
  const gmi_arena_t *arenas[GMI_UPDATE_ARENAS];
  uint32_t modes[GMI_UPDATE_ARENAS];
  uint32_t arena_count, count;
  bool results;          /* these alone: the states are updated in place once it is taken over */
  spec_chunk_t chunks[]; /* [count] */
} gmi_spec_t;

static void add_figure(_Atomic uint64_t *figure, uint64_t more) {
  gmi_stat_set(figure, atomic_load_explicit(figure, memory_order_relaxed) + more);
}

/* Takes the record from the list and from its chunks. */
static void forget(gmi_manager_t *m, gmi_spec_t *s) {
  *(s->previous ? &s->previous->next : &m->update.first_spec) = s->next;
  *(s->next ? &s->next->previous : &m->update.last_spec) = s->previous;
  for (uint32_t i = 0; i < s->count; i++) gmi_chunk_spec_set(m, s->chunks[i].chunk, NULL);
}

void gmi_spec_drop(gmi_manager_t *m, gmi_spec_t *s) {
  forget(m, s);
  gmi_attempt_drop(m, s->attempt);
  for (uint32_t i = 0; i < s->count; i++)
    if (s->chunks[i].slot != GMI_NONE) gmi_host_spare_give(m, s->chunks[i].slot);
  add_figure(&m->stats.dropped_elements, s->end - s->begin);
  free(s);
}
void gmi_specs_drop(gmi_manager_t *m) {
  while (m->update.last_spec) gmi_spec_drop(m, m->update.last_spec);
}
void gmi_specs_room(gmi_manager_t *m, uint32_t count) {
  while (m->update.last_spec && gmi_host_free(m) < count) gmi_spec_drop(m, m->update.last_spec);
}

/* Is it the same update of the same elements? Pieces that an earlier update has left (after a failure) come first. A
 * tensor that was registered since makes a gap, whose gradient is zero. */
static bool is_of(const gmi_spec_t *s, const gmi_walk_t *k, const gmi_piece_t *p) {
  bool same =
      s->begin == p->begin && s->end == p->end && s->arena_count == k->u.arena_count && !gmi_piece_has_gaps(k, p);
  for (uint32_t i = 0; same && i < s->arena_count; i++)
    same = s->arenas[i] == k->arenas[i] && s->modes[i] == k->modes[i];
  for (uint32_t i = 0; same && i < p->count; i++)
    same = !gmi_chunk_left(p->chunks[i]) && !(p->modes[i] & GEMINI_WRITE && gmi_chunk_in_graphs(p->chunks[i]));
  return same;
}

/* The new values of a chunk that lies on the device alone would take a slot for which no room was made. */
static bool needs_slots(const gmi_piece_t *p) {
  for (uint32_t i = 0; i < p->count; i++)
    if (p->modes[i] & GEMINI_WRITE && !gmi_chunk_has_slot(p->chunks[i])) return true;
  return false;
}

bool gmi_spec_take(gmi_walk_t *k, const gmi_piece_t *p, bool device) {
  gmi_manager_t *m = k->m;
  gmi_spec_t *s = gmi_chunk_spec(p->chunks[0]);
  if (!s) return false;
  uint32_t slots[GMI_PIECE_CHUNKS];
  gmi_job_t *states = NULL;
  bool usable = is_of(s, k, p) && !gmi_piece_is_pinned(p) && !(device && (s->results || needs_slots(p)));
  for (uint32_t i = 0; usable && i < s->count; i++) slots[i] = s->chunks[i].slot;
  if (usable && s->results) usable = (states = gmi_job_of_states(k, p, slots)) != NULL;
  if (!usable) {
    gmi_spec_drop(m, s);
    return false;
  }
  forget(m, s);
  const bool taken = gmi_attempt_take(m, s->attempt, p->next_use, p->two_passes);
  if (states && taken) gmi_job_use_slots(k, p, slots, states);
  for (uint32_t i = 0; i < s->count; i++) {
    if (slots[i] != GMI_NONE && taken) gmi_host_spare_bind(m, slots[i], p->chunks[i]);
    if (slots[i] != GMI_NONE && !taken) gmi_host_spare_give(m, slots[i]);
    if (taken && p->modes[i] & GEMINI_WRITE) gmi_chunk_host_wrote(m, p->chunks[i]);
  }
  if (states && taken) gmi_workers_push(m, states);
  else gmi_job_drop(states);
  add_figure(taken ? &m->stats.committed_elements : &m->stats.dropped_elements, s->end - s->begin);
  free(s);
  return taken;
}

/* Can the chunk's part be computed where its bytes are? Sends acquires without the lock to the slow path. */
static bool chunk_is_ready(gmi_manager_t *m, gmi_chunk_t *c, uint32_t mode) {
  const bool reads = mode & GEMINI_READ, writes = mode & GEMINI_WRITE;
  gmi_chunk_unspeculate(m, c);
  if (gmi_chunk_deferred(c) || gmi_chunk_is_loading(c) || gmi_chunk_host_writers(c) || gmi_chunk_graph_held(c))
    return false;
  if (gmi_chunk_has_slot(c) && gmi_chunk_slot(c) >= m->host.slot_count) return false;
  if (writes && (gmi_chunk_is_pinned(c) || gmi_chunk_in_graphs(c))) return false;
  if (reads && !gmi_chunk_has(c, GMI_VALID_HOST)) {
    const uint32_t kind = gmi_chunk_arena(m, c)->kind;
    const bool gradient = kind == GEMINI_KIND_GRAD || kind == GEMINI_KIND_PARAM; /* PARAM: of a reusing arena */
    if (!gradient || !gmi_chunk_has(c, GMI_VALID_DEVICE)) return false;
  }
  return gmi_chunk_unsettle(c, GMI_CHUNK_WRITERS);
}

/* Does what is speculated write the chunk? */
static bool is_written(const gmi_walk_t *k, const gmi_piece_t *p, uint32_t i, bool results) {
  return p->modes[i] & GEMINI_WRITE && (!results || gmi_chunk_is_result(k, p->chunks[i]));
}

/* Looks at all chunks before anything changes. */
static bool is_ready(gmi_walk_t *k, gmi_piece_t *p) {
  bool ready = gmi_piece_is_unit(k, p), writes = false;
  for (uint32_t i = 0; ready && i < p->count; i++) {
    ready = chunk_is_ready(k->m, p->chunks[i], p->modes[i]);
    writes |= p->modes[i] & GEMINI_WRITE;
  }
  return ready && writes;
}
/* Slots that the new values and the copies of gradients need. */
static uint32_t slots_needed(const gmi_walk_t *k, const gmi_piece_t *p, bool results) {
  uint32_t need = 0;
  for (uint32_t i = 0; i < p->count; i++) {
    need += is_written(k, p, i, results);
    need += (p->modes[i] & GEMINI_READ) && !gmi_chunk_has_slot(p->chunks[i]);
  }
  return need;
}

/* Does a job still use states of the unit? Then the gradients that it reads may have the slot that is spare for results
 * (chunk/passes.c), and to take another one would leave none for gradients that come. */
static bool states_are_busy(const gmi_walk_t *k, const gmi_piece_t *p) {
  bool busy = false;
  for (uint32_t i = 0; i < p->count; i++)
    busy |= p->modes[i] == GEMINI_READ_WRITE && !gmi_chunk_is_result(k, p->chunks[i]) &&
            gmi_slot_is_busy(k->m, gmi_chunk_slot(p->chunks[i]));
  return busy;
}

/* Brings the gradients to the host, and takes a spare slot for each written chunk. False: some could not be had, and
 * nothing has changed but where gradients are. The bytes of the record's chunks are held on the host by the caller. */
static bool slots_take(const gmi_walk_t *k, const gmi_piece_t *p, gmi_spec_t *s, uint32_t *slots) {
  gmi_manager_t *m = k->m;
  bool got = true;
  for (uint32_t i = 0; got && i < p->count; i++)
    if (p->modes[i] & GEMINI_READ) got = !gmi_chunk_to_host(m, p->chunks[i], false, GEMINI_REASON_UPDATE);
  for (uint32_t i = 0; i < p->count; i++) {
    s->chunks[i] = (spec_chunk_t){ p->chunks[i], GMI_NONE };
    if (got && is_written(k, p, i, s->results)) got = gmi_host_spare_take(m, false, &s->chunks[i].slot);
    slots[i] = s->chunks[i].slot;
    s->count++;
  }
  return got;
}

static bool unit_speculate(gmi_walk_t *k, gmi_piece_t *p, bool results) {
  gmi_manager_t *m = k->m;
  gmi_spec_t *s = calloc(1, sizeof *s + p->count * sizeof *s->chunks);
  gmi_attempt_t *attempt = calloc(1, sizeof *attempt);
  gmi_job_t *job = NULL;
  uint32_t slots[GMI_PIECE_CHUNKS];
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_hold_host(m, p->chunks[i], false);
  if (s) s->results = results;
  if (s && attempt && slots_take(k, p, s, slots)) job = gmi_job_beside(k, p, slots);
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_unhold_host(m, p->chunks[i], false);
  if (!job) {
    for (uint32_t i = 0; s && i < s->count; i++)
      if (s->chunks[i].slot != GMI_NONE) gmi_host_spare_give(m, s->chunks[i].slot);
    free(s);
    free(attempt);
    return false;
  }
  *attempt = (gmi_attempt_t){ .job = job, .refs = 2, .state = GMI_ATTEMPT_OPEN };
  job->attempt = s->attempt = attempt;
  s->begin = p->begin;
  s->end = p->end;
  s->arena_count = k->u.arena_count;
  for (uint32_t i = 0; i < s->arena_count; i++) {
    s->arenas[i] = k->arenas[i];
    s->modes[i] = k->modes[i];
  }
  s->previous = m->update.last_spec;
  *(s->previous ? &s->previous->next : &m->update.first_spec) = s;
  m->update.last_spec = s;
  if (results) job->passes.now = GEMINI_PASS_RESULTS, job->passes.alone = true;
  gmi_job_use_slots(k, p, slots, job);
  for (uint32_t i = 0; i < s->count; i++) gmi_chunk_spec_set(m, s->chunks[i].chunk, s);
  job->next_use = UINT64_MAX; /* behind all that is certain */
  add_figure(&m->stats.speculated_elements, s->end - s->begin);
  gmi_workers_push(m, job);
  return true;
}

void gmi_speculate(gmi_walk_t *k, uint32_t stream) {
  gmi_manager_t *m = k->m;
  gmi_piece_t p = { 0 };
  if (m->file.store) return;
  for (uint64_t at = k->u.first_element, end = at + k->u.element_count; at < end; at = p.end) {
    bool results;
    gmi_piece_at(k, at, end, &p);
    if (!is_ready(k, &p)) continue;
    if (!m->trace.advice->unit_ahead(m, k->arenas[0]->index, at, k->unit, &results)) continue;
    results = results && gmi_unit_has_passes(k);
    if (results && states_are_busy(k, &p)) continue;
    const uint32_t need = slots_needed(k, &p, results);
    if (gmi_host_spare(m) < need) gmi_host_spare_reclaim(m);
    if (gmi_host_spare(m) < need) break;
    /* Memory that was never used is committed first, which takes long, but only once: no part of the operator. */
    gmi_pause_t pause = { 0 };
    const bool slow = !gmi_host_spare_is_committed(m, need);
    if (slow) m->trace.observer->pause_begins(m, stream, true, &pause);
    const bool done = unit_speculate(k, &p, results);
    if (slow) m->trace.observer->pause_ends(m, stream, &pause);
    if (!done) break; /* the next one would have no memory, either */
  }
}

static gemini_status_t drop(gmi_manager_t *m) {
  gmi_specs_drop(m);
  return GEMINI_OK;
}
gemini_status_t gemini_update_drop(gemini_manager_t mgr) { API_LOCKED(drop(m)); }
