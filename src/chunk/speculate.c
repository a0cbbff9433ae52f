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
  uint32_t slot; /* for its new values; GMI_NONE: the update only reads it */
} spec_chunk_t;
typedef struct gmi_spec {
  struct gmi_spec *next, *previous;
  gmi_attempt_t *attempt;
  uint64_t begin, end; /* elements */
  const gmi_arena_t *arenas[GMI_UPDATE_ARENAS];
  uint32_t modes[GMI_UPDATE_ARENAS];
  uint32_t arena_count, count;
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
  if (!is_of(s, k, p) || gmi_piece_is_pinned(p) || (device && needs_slots(p))) {
    gmi_spec_drop(m, s);
    return false;
  }
  forget(m, s);
  bool taken = gmi_attempt_take(m, s->attempt, p->next_use);
  for (uint32_t i = 0; i < s->count; i++) {
    spec_chunk_t *c = &s->chunks[i];
    if (c->slot == GMI_NONE) continue;
    if (!taken) {
      gmi_host_spare_give(m, c->slot);
      continue;
    }
    gmi_host_spare_bind(m, c->slot, c->chunk);
    gmi_chunk_host_wrote(m, c->chunk);
  }
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

/* Is the piece a whole unit, of which the update reads and writes nothing else? */
static bool is_unit(const gmi_walk_t *k, const gmi_piece_t *p) {
  if (p->begin % k->unit) return false;
  bool last = true;
  for (uint32_t i = 0; i < k->u.arena_count; i++)
    last &= p->end == atomic_load(&k->arenas[i]->size) / k->arenas[i]->element_bytes;
  return (p->end % k->unit == 0 || last) && !gmi_piece_has_gaps(k, p);
}

/* Looks at all chunks before anything changes. *missing_out: slots that copies of gradients need. */
static bool is_ready(gmi_walk_t *k, gmi_piece_t *p, uint32_t *written_out, uint32_t *missing_out) {
  *written_out = *missing_out = 0;
  bool ready = is_unit(k, p);
  for (uint32_t i = 0; ready && i < p->count; i++) {
    ready = chunk_is_ready(k->m, p->chunks[i], p->modes[i]);
    *written_out += (p->modes[i] & GEMINI_WRITE) != 0;
    *missing_out += (p->modes[i] & GEMINI_READ) && !gmi_chunk_has_slot(p->chunks[i]);
  }
  return ready && *written_out;
}

/* The job of a unit whose slots are there. NULL: no memory for it. */
static gmi_job_t *job_of(gmi_walk_t *k, const gmi_piece_t *p, const gmi_spec_t *s) {
  gmi_manager_t *m = k->m;
  uint32_t chunks = 0, written = 0, first, count;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_piece_range(k, p, i, &first, &count);
    chunks += count;
  }
  for (uint32_t i = 0; i < s->count; i++) written += s->chunks[i].slot != GMI_NONE;
  const uint32_t slots = p->count + written;
  gmi_job_t *job =
      calloc(1, sizeof *job + (slots + 1) * sizeof(gmi_fence_t) + slots * (sizeof(gmi_slot_t *) + sizeof(uint64_t)) +
                    2 * chunks * sizeof(uint8_t *) + chunks * sizeof *job->zeros);
  if (!job) return NULL;
  uint8_t *at = (uint8_t *)(job + 1);
  job->zeros = (void *)at;
  at += chunks * sizeof *job->zeros;
  job->fences = (void *)at;
  at += (slots + 1) * sizeof *job->fences;
  job->slots = (void *)at;
  at += slots * sizeof *job->slots;
  job->after = (void *)at;
  at += slots * sizeof *job->after;
  uint8_t **addresses = (void *)at;
  job->fn = k->u.fn;
  job->try_fn = k->u.try_fn;
  job->user = k->u.user;
  job->next_use = UINT64_MAX; /* behind all that is certain */
  job->span = (gemini_update_span_t){ .struct_size = sizeof(gemini_update_span_t),
                                      .tier = GEMINI_TIER_HOST,
                                      .first_element = p->begin,
                                      .element_count = p->end - p->begin,
                                      .arena_count = k->u.arena_count };
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
      while (s->chunks[n].chunk != chunk) n++;
      if (k->modes[i] != GEMINI_WRITE) ins[c] = gmi_chunk_host(m, chunk);
      if (!(k->modes[i] & GEMINI_WRITE)) continue;
      outs[c] = gmi_slot_address(m, s->chunks[n].slot);
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

/* Brings the gradients to the host, and takes a spare slot for each written chunk. False: some could not be had, and
 * nothing has changed but where gradients are. The bytes of the record's chunks are held on the host by the caller. */
static bool slots_take(gmi_manager_t *m, const gmi_piece_t *p, gmi_spec_t *s) {
  bool got = true;
  for (uint32_t i = 0; got && i < p->count; i++)
    if (p->modes[i] & GEMINI_READ) got = !gmi_chunk_to_host(m, p->chunks[i], false, GEMINI_REASON_UPDATE);
  for (uint32_t i = 0; i < p->count; i++) {
    s->chunks[i] = (spec_chunk_t){ p->chunks[i], GMI_NONE };
    if (got && p->modes[i] & GEMINI_WRITE) got = gmi_host_spare_take(m, &s->chunks[i].slot);
    s->count++;
  }
  return got;
}

static bool unit_speculate(gmi_walk_t *k, gmi_piece_t *p) {
  gmi_manager_t *m = k->m;
  gmi_spec_t *s = calloc(1, sizeof *s + p->count * sizeof *s->chunks);
  gmi_attempt_t *attempt = calloc(1, sizeof *attempt);
  gmi_job_t *job = NULL;
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_hold_host(m, p->chunks[i], false);
  if (s && attempt && slots_take(m, p, s)) job = job_of(k, p, s);
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
  if (!gmi_fence_reached(m, k->after)) job->fences[job->fence_count++] = k->after;
  for (uint32_t i = 0; i < s->count; i++) {
    if (p->modes[i] & GEMINI_READ) use_slot(m, job, gmi_chunk_slot(s->chunks[i].chunk));
    if (s->chunks[i].slot != GMI_NONE) use_slot(m, job, s->chunks[i].slot);
    gmi_chunk_spec_set(m, s->chunks[i].chunk, s);
  }
  if (k->user) {
    atomic_fetch_add(&k->user->refs, 1);
    job->user_refs = &k->user->refs;
  }
  add_figure(&m->stats.speculated_elements, s->end - s->begin);
  gmi_workers_push(m, job);
  return true;
}

void gmi_speculate(gmi_walk_t *k, uint32_t stream) {
  gmi_manager_t *m = k->m;
  gmi_piece_t p = { 0 };
  if (m->file.store) return;
  for (uint64_t at = k->u.first_element, end = at + k->u.element_count; at < end; at = p.end) {
    uint32_t written, missing;
    gmi_piece_at(k, at, end, &p);
    if (!is_ready(k, &p, &written, &missing)) continue;
    if (!m->trace.advice->unit_ahead(m, k->arenas[0]->index, at, k->unit)) continue;
    if (gmi_host_spare(m) < written + missing) gmi_host_spare_reclaim(m);
    if (gmi_host_spare(m) < written + missing) break;
    /* Memory that was never used is committed first, which takes long, but only once: no part of the operator. */
    gmi_pause_t pause = { 0 };
    const bool slow = !gmi_host_spare_is_committed(m, written + missing);
    if (slow) m->trace.observer->pause_begins(m, stream, true, &pause);
    const bool done = unit_speculate(k, &p);
    if (slow) m->trace.observer->pause_ends(m, stream, &pause);
    if (!done) break; /* the next one would have no memory, either */
  }
}

static gemini_status_t drop(gmi_manager_t *m) {
  gmi_specs_drop(m);
  return GEMINI_OK;
}
gemini_status_t gemini_update_drop(gemini_manager_t mgr) { API_LOCKED(drop(m)); }
