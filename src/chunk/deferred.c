/* Deferred updates: the list of pieces that are accepted and not queued yet, and the thread that queues them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * An accepted update is carried out completely: its tensors hold parameters from then on, and every use of one of its
 * chunks queues the chunk's pieces first. Pieces that cannot be queued yet stay in a list, in the order of submission,
 * so the pieces of one chunk run in that order. They are queued by the thread of deferred updates (with a file tier),
 * by a caller that needs one of their chunks, or by gemini_update_wait(). Pieces that run on the device are left where
 * the links have much to do (walk_run()), and are also queued as operators begin and end, when there is room again.
 *
 * Threads: any thread that holds the manager's lock. defer_work() is a thread of its own. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/thread.h"
#include "chunk/deferred.h"
#include "chunk/host.h"
#include "chunk/shard.h"
#include "chunk/speculate.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/workers.h"

uint32_t gmi_updates_ahead(const gmi_manager_t *m, uint32_t chunks) {
  uint64_t most = (UINT64_C(64) << 20) / gmi_slot_bytes(m);
  if (most > m->host.slot_count / 8) most = m->host.slot_count / 8;
  return most / chunks > 2 ? (uint32_t)(most / chunks) : 2;
}

void gmi_rest_insert(gmi_deferred_t *d, gmi_rest_t *rest, gmi_rest_t *before) {
  rest->walk->refs++;
  rest->next = before;
  rest->previous = before ? before->previous : d->last;
  *(rest->previous ? &rest->previous->next : &d->first) = rest;
  *(before ? &before->previous : &d->last) = rest;
}
static void rest_remove(gmi_deferred_t *d, gmi_rest_t *rest) {
  *(rest->previous ? &rest->previous->next : &d->first) = rest->next;
  *(rest->next ? &rest->next->previous : &d->last) = rest->previous;
  gmi_walk_t *k = rest->walk;
  if (rest == k->tail) k->tail = NULL;
  free(rest);
  gmi_walk_unref(k);
}

void gmi_rest_queued(gmi_deferred_t *d, gmi_rest_t *rest, const gmi_piece_t *p) {
  for (uint32_t i = 0; i < p->count; i++) {
    gmi_chunk_piece_queued(p->chunks[i], rest->left);
  }
  d->count--;
  rest->begin = p->end;
  if (rest->begin == rest->end) rest_remove(d, rest);
}

gmi_rest_t *gmi_tail_leave_one(gmi_deferred_t *d, gmi_walk_t *k, const gmi_piece_t *p) {
  gmi_rest_t *rest = malloc(sizeof *rest);
  if (!rest) return NULL;
  *rest = (gmi_rest_t){ .walk = k, .begin = p->begin, .end = p->end, .next_use = p->next_use, .left = true };
  gmi_rest_insert(d, rest, k->tail);
  for (uint32_t i = 0; i < p->count; i++) gmi_chunk_piece_left(p->chunks[i]);
  k->tail->begin = p->end;
  if (k->tail->begin == k->tail->end) rest_remove(d, k->tail);
  return rest;
}

/* Needs no memory: the tail itself becomes the record. */
void gmi_tail_leave(gmi_walk_t *k) {
  gmi_piece_t p;
  k->tail->left = true;
  k->tail->next_use = UINT64_MAX;
  for (uint64_t at = k->tail->begin; at < k->tail->end; at = p.end) {
    gmi_piece_at(k, at, k->tail->end, &p);
    for (uint32_t i = 0; i < p.count; i++) gmi_chunk_piece_left(p.chunks[i]);
  }
}

/* Queues the piece of a rest where the plan has it run, or where a chunk of it is pinned. */
static gemini_status_t queue_on_device(gmi_manager_t *m, gmi_rest_t *rest, gmi_piece_t *p) {
  const uint32_t update = rest->update, number = rest->number;
  const bool planned = rest->on_device;
  if (planned) m->trace.observer->piece_begins(m, update, number);
  gemini_status_t status = gmi_piece_on_device(rest->walk, p, rest);
  if (planned) m->trace.observer->piece_ends(m, update, number);
  return status;
}

/* Queues the first piece in the list. now: blocks until there is room; else *waits_out: there is none, try again after
 * the next job or transfer has ended. */
static gemini_status_t queue_first(gmi_manager_t *m, bool now, bool *waits_out) {
  gmi_deferred_t *d = m->update.deferred;
  gmi_rest_t *rest = d->first;
  gmi_walk_t *k = rest->walk;
  gmi_piece_t p = { .next_use = rest->next_use };
  gmi_piece_at(k, rest->begin, rest->end, &p);
  uint32_t missing = 0;
  for (uint32_t i = 0; i < p.count; i++) missing += !gmi_chunk_has_slot(p.chunks[i]);
  gemini_status_t status = GEMINI_OK;
  *waits_out = false;
  if (!now) {
    *waits_out = gmi_workers_deferred(m) >= gmi_updates_ahead(m, p.count);
    /* Make room for the pieces behind it as well: their victims are written while this piece's chunks are read. */
    uint64_t ahead = gmi_updates_ahead(m, p.count);
    if (!*waits_out) status = gmi_host_room_soon(m, missing, missing * (uint32_t)(d->count < ahead ? d->count : ahead));
    if (!status && gmi_host_free(m) < missing) *waits_out = true;
    if (status || *waits_out) return status;
  }
  const bool pinned = gmi_piece_is_pinned(&p), device = rest->on_device || pinned;
  if (device) status = queue_on_device(m, rest, &p);
  if (!device || (!pinned && gmi_is_oom(status))) {
    status = gmi_piece_on_host(k, &p, true);
    if (!status) gmi_rest_queued(d, rest, &p);
  }
  if (status)
    gmi_fail_prefix("%llu parts of updates are pending, the first of arena %s from element %llu on: ",
                    (unsigned long long)atomic_load(&d->count), k->arenas[0]->name, (unsigned long long)p.begin);
  return status;
}

gemini_status_t gmi_updates_queue(gmi_manager_t *m, const gmi_chunk_t *c) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  gemini_status_t status = GEMINI_OK;
  bool waits;
  while (!status && m->update.deferred->first && (!c || gmi_chunk_deferred(c))) status = queue_first(m, true, &waits);
  return status;
}

bool gmi_updates_more(gmi_manager_t *m) {
  const gmi_deferred_t *d = m->update.deferred;
  gemini_status_t status = GEMINI_OK;
  bool waits;
  while (!status && d->first && d->first->on_device && !gmi_links_are_full(m)) status = queue_first(m, true, &waits);
  return d->first && d->first->on_device;
}

gemini_status_t gmi_updates_queue_range(gmi_manager_t *m, const gmi_arena_t *store, uint32_t first, uint32_t last,
                                        bool *queued_out) {
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = first; !status && i <= last; i++) {
    if (gmi_arena_is_sharded(store)) status = gmi_gathered_queue(m, &store->chunks[i], queued_out);
    if (status) break;
    *queued_out |= gmi_chunk_deferred(&store->chunks[i]) > 0;
    status = gmi_updates_queue(m, &store->chunks[i]);
  }
  return status;
}

gemini_status_t gmi_updates_queue_left(gmi_manager_t *m, const gmi_piece_t *p) {
  gemini_status_t status = GEMINI_OK;
  bool waits;
  for (uint32_t i = 0; i < p->count; i++)
    while (!status && gmi_chunk_left(p->chunks[i])) status = queue_first(m, true, &waits);
  return status;
}

static const char THREAD_NAME[] = "deferred updates"; /* the lock's holder in dumps, in place of a function's name */
static void *defer_work(void *user) {
  gmi_manager_t *m = user;
  gmi_deferred_t *d = m->update.deferred;
  gmi_lock(m, THREAD_NAME);
  while (!d->stop) {
    uint64_t events = gmi_workers_finished(m);
    bool waits = !d->first || !d->first->left;
    gemini_status_t status = GEMINI_OK;
    while (!waits && !status) {
      status = queue_first(m, false, &waits);
      waits |= !d->first || !d->first->left;
    }
    if (status && !d->warned) gmi_log(m, GEMINI_LOG_WARNING, "an update is pending: %s", gmi_fail_message());
    d->warned = status != GEMINI_OK;
    bool idle = !d->first || !d->first->left;
    if (idle) {
      if (!d->stop) gmi_lock_wait(m, &d->more);
      gmi_callbacks_wait(m, THREAD_NAME);
      continue;
    }
    gmi_unlock(m);             /* also sends logs */
    if (status) usleep(10000); /* retry: the obstacle may go; a caller that needs the chunk gets the error itself */
    else gmi_workers_idle(m, events);
    gmi_lock(m, THREAD_NAME);
  }
  gmi_unlock_quietly(m);
  return NULL;
}

uint64_t gmi_updates_deferred(const gmi_manager_t *m) { return m->update.deferred->count; }

void gmi_updates_room(gmi_manager_t *m) {
  if (m->update.deferred->first) gmi_workers_nudge(m);
}

gemini_status_t gmi_updates_open(gmi_manager_t *m) {
  gmi_deferred_t *d = m->update.deferred = calloc(1, sizeof *d);
  if (!d) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for deferred updates");
  pthread_cond_init(&d->more, NULL);
  if (!m->file.store) return GEMINI_OK;
  int error = gmi_thread_start(&d->thread, defer_work, m);
  d->started = !error;
  return error ? gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start the thread of deferred updates") : GEMINI_OK;
}

void gmi_updates_close(gmi_manager_t *m) {
  gmi_deferred_t *d = m->update.deferred;
  if (!d) return;
  gmi_lock(m, "gemini_manager_close");
  gmi_specs_drop(m);
  d->stop = true;
  pthread_cond_signal(&d->more);
  gmi_unlock(m);
  if (d->started) {
    gmi_workers_nudge(m);
    pthread_join(d->thread, NULL);
  }
  while (d->first) rest_remove(d, d->first);
  pthread_cond_destroy(&d->more);
  free(d);
  m->update.deferred = NULL;
}
