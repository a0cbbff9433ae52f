/* Commits parts of the host tier ahead of their use. SPDX-License-Identifier: Apache-2.0
 *
 * A part that is not in use is in one of four states. taken() makes others WANTED and queues them; the thread makes
 * one BUSY, and then READY, or NONE again if there is no memory; take() waits for a BUSY one, and hands a READY one
 * over.
 *
 * The thread does not page-lock: the driver does that under a lock that it needs for most other calls, too, and while
 * threads locked memory all the time, a caller that mapped frames took several times as long.
 *
 * Threads: a->lock guards all of gmi_ahead_t but what is set at open. It is taken after the manager's lock, and is not
 * held while memory is committed. */
#include "chunk/host_ahead.h"

#include <errno.h>
#include <stdlib.h>

#include "base/thread.h"
#include "chunk/arena.h"
#include "chunk/host.h"
#include "core/watch.h"
#include "host/reserve.h"

enum { NONE, WANTED, BUSY, READY };

typedef struct gmi_ahead {
  gmi_manager_t *m;
  pthread_mutex_t lock;
  pthread_cond_t wanted, changed; /* something is queued, or closing is set; a part is BUSY no more */
  pthread_t thread;
  bool started, closing;
  bool used;             /* a part has come into use since the last iteration began, or is expected to */
  bool prepared;         /* a part became READY since all were given back */
  bool failed;           /* the system refused memory: nothing is prepared until an iteration begins */
  uint64_t first, count; /* of queue, a ring */
  uint64_t *queue;       /* [part_count] of the WANTED parts, in the order in which they came */
  uint64_t *bytes;       /* [part_count] what is committed at the start of a part that is not NONE */
  uint8_t *states;       /* [part_count] */
} gmi_ahead_t;

static void queue_clear(gmi_ahead_t *a) {
  for (; a->count; a->count--) a->states[a->queue[(a->first + a->count - 1) % a->m->host.part_count]] = NONE;
}

static void *ahead_main(void *user) {
  gmi_ahead_t *a = user;
  pthread_mutex_lock(&a->lock);
  while (!a->closing) {
    if (!a->count) {
      pthread_cond_wait(&a->wanted, &a->lock);
      continue;
    }
    const uint64_t part = a->queue[a->first], bytes = a->bytes[part];
    a->first = (a->first + 1) % a->m->host.part_count;
    a->count--;
    a->states[part] = BUSY;
    pthread_mutex_unlock(&a->lock);
    const bool ready = !gmi_reserve_commit_early(a->m->host.reserve, part * a->m->host.part_bytes, bytes);
    pthread_mutex_lock(&a->lock);
    a->states[part] = ready ? READY : NONE;
    a->prepared |= ready;
    if (!ready) {
      a->failed = true;
      queue_clear(a);
    }
    pthread_cond_broadcast(&a->changed);
  }
  pthread_mutex_unlock(&a->lock);
  return NULL;
}

gemini_status_t gmi_ahead_open(gmi_manager_t *m) {
  const uint64_t parts = m->host.part_count;
  gmi_ahead_t *a = calloc(1, sizeof *a + parts * (sizeof *a->queue + sizeof *a->bytes + sizeof *a->states));
  if (!a)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of %llu parts of host memory",
                    (unsigned long long)parts);
  a->m = m;
  a->queue = (uint64_t *)(a + 1);
  a->bytes = a->queue + parts;
  a->states = (uint8_t *)(a->bytes + parts);
  pthread_mutex_init(&a->lock, NULL);
  pthread_cond_init(&a->wanted, NULL);
  pthread_cond_init(&a->changed, NULL);
  m->host.ahead = a;
  return GEMINI_OK;
}

void gmi_ahead_close(gmi_manager_t *m) {
  gmi_ahead_t *a = m->host.ahead;
  if (!a) return;
  pthread_mutex_lock(&a->lock);
  a->closing = true;
  pthread_cond_broadcast(&a->wanted);
  pthread_mutex_unlock(&a->lock);
  if (a->started) pthread_join(a->thread, NULL);
  pthread_cond_destroy(&a->wanted);
  pthread_cond_destroy(&a->changed);
  pthread_mutex_destroy(&a->lock);
  free(a);
  m->host.ahead = NULL;
}

/* How many parts in a row are in use, up to this one if step is 1, from this one on if it is -1. */
static uint64_t row(const gmi_manager_t *m, uint64_t part, int step) {
  uint64_t count = 0;
  while (count < GMI_AHEAD_MOST && part < m->host.part_count && m->host.committed[part]) {
    count++;
    part -= (uint64_t)step; /* below 0 it is more than any part */
  }
  return count;
}

/* Queues a part of the budget, which is not in use, before what is queued already or behind it. Returns whether it was
 * not known yet. */
static bool want(gmi_ahead_t *a, uint64_t part, bool behind) {
  const gmi_manager_t *m = a->m;
  const uint64_t base = part * m->host.part_bytes, budget = gmi_host_grains(m, m->config.host_bytes);
  if (a->failed || base >= budget || a->states[part] != NONE) return false;
  if (!a->started && gmi_thread_start(&a->thread, ahead_main, a)) return false;
  a->started = true;
  a->bytes[part] = budget - base < m->host.part_bytes ? budget - base : m->host.part_bytes;
  if (!behind) a->first = (a->first + m->host.part_count - 1) % m->host.part_count;
  a->queue[behind ? (a->first + a->count) % m->host.part_count : a->first] = part;
  a->count++;
  a->states[part] = WANTED;
  return true;
}

static void unqueue(gmi_ahead_t *a, uint64_t part) {
  uint64_t kept = 0;
  for (uint64_t i = 0; i < a->count; i++) {
    const uint64_t one = a->queue[(a->first + i) % a->m->host.part_count];
    if (one != part) a->queue[(a->first + kept++) % a->m->host.part_count] = one;
  }
  a->count = kept;
  a->states[part] = NONE;
}

/* Waits until the thread is not at work on a part. */
static void settle(gmi_ahead_t *a, uint64_t part) {
  if (a->states[part] != BUSY) return;
  gmi_wait_t wait;
  gmi_wait_begin(a->m, &wait, NULL, GMI_WAIT_MEMORY, 0);
  while (a->states[part] == BUSY) pthread_cond_wait(&a->changed, &a->lock);
  gmi_wait_end(a->m, &wait);
}

bool gmi_ahead_take(gmi_manager_t *m, uint64_t part, uint64_t bytes) {
  gmi_ahead_t *a = m->host.ahead;
  pthread_mutex_lock(&a->lock);
  a->used = true;
  if (a->states[part] == WANTED) unqueue(a, part);
  settle(a, part);
  const bool ready = a->states[part] == READY && a->bytes[part] >= bytes;
  a->states[part] = NONE;
  pthread_mutex_unlock(&a->lock);
  return ready;
}

/* Is a part that is not in use the home of chunks? Others have no use yet. */
static bool is_home(gmi_manager_t *m, uint64_t part) {
  const uint64_t first = part * m->host.part_bytes;
  for (uint32_t i = 0; i < GMI_ARENAS && part < m->host.part_count && !m->host.committed[part]; i++) {
    const gmi_arena_t *store = gmi_arena_at(m, i);
    uint64_t begin, end;
    if (!store || !gmi_arena_has_tiers(store)) continue;
    gmi_host_home_range(m, store, &begin, &end);
    if (begin < first + m->host.part_bytes && first < end) return true;
  }
  return false;
}

/* What follows a part in use. */
static void want_row(gmi_ahead_t *a, uint64_t part) {
  const uint64_t up = row(a->m, part, 1), down = row(a->m, part, -1);
  if (up == down) return; /* it is the first one here, or fills a gap */
  const uint64_t count = up > down ? up : down, step = up > down ? 1 : (uint64_t)-1;
  uint64_t free = 0;
  while (free < count && is_home(a->m, part + (free + 1) * step)) free++;
  for (; free; free--) (void)want(a, part + free * step, false); /* the nearest one comes first */
}

void gmi_ahead_taken(gmi_manager_t *m, uint64_t part, bool in_use) {
  gmi_ahead_t *a = m->host.ahead;
  pthread_mutex_lock(&a->lock);
  if (in_use) want_row(a, part);
  if (a->count) pthread_cond_signal(&a->wanted);
  pthread_mutex_unlock(&a->lock);
}

void gmi_ahead_expect(gmi_manager_t *m, uint64_t part) {
  gmi_ahead_t *a = m->host.ahead;
  if (m->host.committed[part]) return;
  pthread_mutex_lock(&a->lock);
  if (want(a, part, true)) a->used = true; /* the iteration that needs it may not have begun */
  if (a->count) pthread_cond_signal(&a->wanted);
  pthread_mutex_unlock(&a->lock);
}

void gmi_ahead_drop(gmi_manager_t *m) {
  gmi_ahead_t *a = m->host.ahead;
  pthread_mutex_lock(&a->lock);
  queue_clear(a);
  for (uint64_t part = 0; part < m->host.part_count; part++) {
    const uint64_t begin = part * m->host.part_bytes;
    settle(a, part);
    if (a->states[part] == READY && !gmi_reserve_decommit(m->host.reserve, begin, a->bytes[part]))
      a->states[part] = NONE;
  }
  a->failed = a->prepared = false;
  pthread_mutex_unlock(&a->lock);
}

void gmi_ahead_iteration(gmi_manager_t *m) {
  gmi_ahead_t *a = m->host.ahead;
  pthread_mutex_lock(&a->lock);
  const bool drop = !a->used && a->prepared;
  a->used = a->failed = false;
  pthread_mutex_unlock(&a->lock);
  if (drop) gmi_ahead_drop(m);
}

uint64_t gmi_ahead_idle(gmi_manager_t *m) {
  gmi_ahead_t *a = m->host.ahead;
  uint64_t bytes = 0;
  pthread_mutex_lock(&a->lock);
  for (uint64_t part = 0; part < m->host.part_count; part++) {
    while (a->states[part] == BUSY || a->states[part] == WANTED) pthread_cond_wait(&a->changed, &a->lock);
    bytes += a->states[part] == READY ? a->bytes[part] : 0;
  }
  pthread_mutex_unlock(&a->lock);
  return bytes;
}
