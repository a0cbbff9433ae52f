/* Updates: walking parallel arenas span by span, each span where its chunks live, late if so wished.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/manager.h"
#include "tracer/timeline.h"
#include "tracer/tracer.h"

enum { PIECE_WINDOWS = GMI_UPDATE_ARENAS * 32 }; /* arenas x largest ratio of element sizes, and a boundary more */

typedef struct {
  uint64_t begin, end; /* elements whose gradient was not written */
} gap_t;

/* One gemini_update(), and what of it is deferred. */
typedef struct walk {
  uint32_t refs; /* the call itself, and deferred pieces */
  gmi_manager_t *m;
  gemini_update_t u;
  gmi_arena_t *arenas[GMI_UPDATE_ARENAS];
  uint32_t modes[GMI_UPDATE_ARENAS];
  gmi_fence_t after; /* the caller's stream */
  gap_t *gaps;
  uint64_t gap_count, gap_capacity;
  bool gaps_lost;
  uint32_t gap_arena; /* which of arenas has the gaps; GMI_NONE */
} walk_t;

typedef struct {
  uint64_t begin, end; /* elements */
  uint64_t next_use;   /* as gmi_tracer_piece_use() */
  uint32_t count;
  gmi_window_t *windows[PIECE_WINDOWS];
  uint32_t modes[PIECE_WINDOWS];
} piece_t;

static void piece_windows(walk_t *k, piece_t *p) {
  p->count = 0;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_arena_t *a = k->arenas[i], *store = gmi_arena_at(k->m, a->store);
    uint64_t first = p->begin * a->element_bytes >> k->m->window_shift;
    uint64_t last = (p->end * a->element_bytes - 1) >> k->m->window_shift;
    for (uint64_t w = first; w <= last; w++) {
      uint32_t n = 0;
      while (n < p->count && p->windows[n] != &store->windows[w]) n++;
      if (n == p->count) {
        p->modes[p->count] = 0;
        p->windows[p->count++] = &store->windows[w];
      }
      p->modes[n] |= k->modes[i];
    }
  }
}

/* Without addresses. */
static gemini_update_span_t piece_span(const walk_t *k, const piece_t *p, uint32_t tier) {
  return (gemini_update_span_t){ .struct_size = sizeof(gemini_update_span_t),
                                 .tier = tier,
                                 .first_element = p->begin,
                                 .element_count = p->end - p->begin,
                                 .arena_count = k->u.arena_count };
}

/* Parts of the gaps inside a piece: the first index, and how many. Gaps are sorted and do not overlap. */
static uint64_t piece_gaps(const walk_t *k, const piece_t *p, uint64_t *count_out) {
  uint64_t low = 0, high = k->gap_count;
  while (low < high) {
    uint64_t mid = (low + high) / 2;
    if (k->gaps[mid].end <= p->begin) low = mid + 1;
    else high = mid;
  }
  uint64_t n = 0;
  while (low + n < k->gap_count && k->gaps[low + n].begin < p->end) n++;
  *count_out = n;
  return low;
}

static void gap_in_piece(const walk_t *k, const piece_t *p, uint64_t gap, uint64_t *begin_out, uint64_t *count_out) {
  *begin_out = k->gaps[gap].begin > p->begin ? k->gaps[gap].begin : p->begin;
  uint64_t end = k->gaps[gap].end < p->end ? k->gaps[gap].end : p->end;
  *count_out = end - *begin_out;
}

/* Windows of an arena in a piece. */
static void piece_range(const walk_t *k, const piece_t *p, uint32_t i, uint32_t *first_out, uint32_t *count_out) {
  uint32_t bytes = k->arenas[i]->element_bytes;
  *first_out = (uint32_t)(p->begin * bytes >> k->m->window_shift);
  *count_out = (uint32_t)((p->end * bytes - 1) >> k->m->window_shift) - *first_out + 1;
}

/* Its windows' bytes come to the host, each window's anywhere. */
static gemini_status_t piece_to_host(walk_t *k, piece_t *p) {
  gmi_manager_t *m = k->m;
  uint32_t missing = 0;
  for (uint32_t i = 0; i < p->count; i++) {
    p->windows[i]->host_users++; /* no slot goes while others look for theirs */
    missing += p->windows[i]->slot == GMI_NONE;
  }
  gemini_status_t status = gmi_host_room(m, missing);    /* for all at once, before any transfer is under way */
  if (status == GEMINI_ERR_OOM_FILE) status = GEMINI_OK; /* one by one: what has come from a file leaves room there */
  for (uint32_t i = 0; !status && i < p->count; i++)
    status = gmi_window_to_host(m, p->windows[i], p->modes[i] & GEMINI_WRITE, GEMINI_REASON_UPDATE);
  for (uint32_t i = 0; !status && i < p->count; i++) /* a read may have failed by now: then nothing is changed */
    if (!(p->windows[i]->valid & GMI_VALID_HOST)) status = gmi_files_reap(m, p->windows[i]);
  for (uint32_t i = 0; i < p->count; i++) p->windows[i]->host_users--;
  return status;
}

/* Where the bytes of gaps in a piece are, which become zeros, window by window. */
static void gap_zeros(const walk_t *k, const piece_t *p, uint64_t first_gap, uint64_t gaps, gmi_job_t *job) {
  gmi_manager_t *m = k->m;
  uint64_t window = UINT64_C(1) << m->window_shift;
  for (uint64_t i = 0; i < gaps; i++) {
    uint64_t begin, count;
    gap_in_piece(k, p, first_gap + i, &begin, &count);
    gmi_arena_t *a = k->arenas[k->gap_arena];
    uint64_t at = begin * a->element_bytes, end = at + count * a->element_bytes, stop;
    for (; at < end; at = stop) {
      stop = (at / window + 1) * window < end ? (at / window + 1) * window : end;
      job->zeros[job->zero_count].address = gmi_range_host(m, gmi_arena_at(m, a->store), at);
      job->zeros[job->zero_count++].bytes = stop - at;
    }
  }
}

static gemini_status_t host_piece(walk_t *k, piece_t *p, bool deferred) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = piece_to_host(k, p);
  if (status) return status;
  uint64_t gaps, first_gap = piece_gaps(k, p, &gaps);
  uint32_t first, count, windows = 0;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    piece_range(k, p, i, &first, &count);
    windows += count;
  }
  uint64_t zeros = gaps ? gaps + windows : 0; /* a gap may go on in the next window */
  size_t bytes = sizeof(gmi_job_t) + p->count * (sizeof(gmi_fence_t) + sizeof(gmi_slot_t *) + sizeof(uint64_t)) +
                 windows * sizeof(uint8_t *) + zeros * sizeof *((gmi_job_t *)0)->zeros + sizeof(gmi_fence_t);
  gmi_job_t *job = calloc(1, bytes);
  if (!job) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
  uint8_t *at = (uint8_t *)(job + 1);
  job->zeros = (void *)at;
  at += zeros * sizeof *job->zeros;
  job->fences = (void *)at;
  at += (p->count + 1) * sizeof *job->fences;
  job->slots = (void *)at;
  at += p->count * sizeof *job->slots;
  job->after = (void *)at;
  at += p->count * sizeof *job->after;
  uint8_t **addresses = (void *)at;
  job->fn = k->u.fn;
  job->user = k->u.user;
  job->deferred = deferred;
  job->span = piece_span(k, p, GEMINI_TIER_HOST);
  job->next_use = p->next_use;
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    const gmi_arena_t *store = gmi_arena_at(m, k->arenas[i]->store);
    job->element_bytes[i] = k->arenas[i]->element_bytes;
    job->windows[i] = addresses;
    piece_range(k, p, i, &first, &count);
    for (uint32_t w = first; w < first + count; w++) *addresses++ = gmi_window_host(m, &store->windows[w]);
  }
  gap_zeros(k, p, first_gap, gaps, job);
  if (!gmi_fence_reached(m, k->after)) job->fences[job->fence_count++] = k->after;
  for (uint32_t i = 0; i < p->count; i++) {
    gmi_window_t *w = p->windows[i];
    gmi_slot_t *slot = &m->host.slots[w->slot];
    if (!gmi_fence_reached(m, slot->fence)) job->fences[job->fence_count++] = slot->fence;
    job->after[job->slot_count] = slot->work_queued++;
    job->slots[job->slot_count++] = slot;
    if (!(p->modes[i] & GEMINI_WRITE)) continue;
    gmi_window_host_wrote(m, w);
    uint32_t kind = gmi_window_arena(m, w)->kind;
    if (m->files && kind != GEMINI_KIND_PARAM && kind != GEMINI_KIND_GRAD) gmi_host_updated(m, w);
  }
  gmi_lane_push(m, job);
  return GEMINI_OK;
}

/* ---- deferred pieces: their states are in files, or there is no room for them yet. In order, and a window's in the
 * order of its updates. A thread queues them as room comes, or whoever wants one of their windows. */
typedef struct deferred_piece {
  struct deferred_piece *next;
  walk_t *walk;
  uint64_t begin, end, next_use;
} deferred_piece_t;

typedef struct gmi_deferred {
  deferred_piece_t *first, **end; /* under the manager's lock, as all but stop */
  pthread_cond_t more;            /* with the manager's lock */
  pthread_t thread;
  uint64_t count;
  bool started, stop;
  bool told; /* that the first one cannot be queued; it is tried again all the same */
} gmi_deferred_t;

uint32_t gmi_updates_ahead(const gmi_manager_t *m, uint32_t windows) {
  uint64_t most = UINT64_C(64) << 20 >> m->window_shift;
  if (most > m->host.slot_count / 8) most = m->host.slot_count / 8;
  return most / windows > 2 ? (uint32_t)(most / windows) : 2;
}

static void walk_unref(walk_t *k) {
  if (--k->refs) return;
  free(k->gaps);
  free(k);
}

/* Can the piece be queued at once, without waiting for room or a file? */
static bool piece_is_ready(const walk_t *k, const piece_t *p) {
  uint32_t missing = 0;
  if (!k->m->files) return true;
  for (uint32_t i = 0; i < p->count; i++) {
    const gmi_window_t *w = p->windows[i];
    if (w->deferred || w->valid == GMI_VALID_FILE) return false;
    missing += w->slot == GMI_NONE;
  }
  return missing <= gmi_host_free(k->m);
}

static gemini_status_t piece_defer(walk_t *k, piece_t *p) {
  gmi_deferred_t *d = k->m->deferred;
  for (uint32_t i = 0; i < p->count; i++) {
    gemini_status_t status = p->windows[i]->deferred == UINT16_MAX ? gmi_updates_queue(k->m, p->windows[i]) : GEMINI_OK;
    if (status) return status;
  }
  deferred_piece_t *piece = malloc(sizeof *piece);
  if (!piece) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
  *piece = (deferred_piece_t){ .walk = k, .begin = p->begin, .end = p->end, .next_use = p->next_use };
  k->refs++;
  for (uint32_t i = 0; i < p->count; i++) p->windows[i]->deferred++;
  *d->end = piece;
  d->end = &piece->next;
  d->count++;
  pthread_cond_signal(&d->more);
  return GEMINI_OK;
}

/* Queues the first deferred piece. now: blocks until there is room; else *waits_out says that there is none yet. */
static gemini_status_t deferred_first(gmi_manager_t *m, bool now, bool *waits_out) {
  gmi_deferred_t *d = m->deferred;
  deferred_piece_t *piece = d->first;
  walk_t *k = piece->walk;
  piece_t p = { .begin = piece->begin, .end = piece->end, .next_use = piece->next_use };
  piece_windows(k, &p);
  uint32_t missing = 0;
  for (uint32_t i = 0; i < p.count; i++) missing += p.windows[i]->slot == GMI_NONE;
  gemini_status_t status = GEMINI_OK;
  *waits_out = false;
  if (!now) {
    *waits_out = gmi_lane_deferred(m) >= gmi_updates_ahead(m, p.count);
    /* Those behind it will want room too: what they take it from is written while this one is read. */
    uint64_t ahead = gmi_updates_ahead(m, p.count);
    if (!*waits_out) status = gmi_host_room_soon(m, missing, missing * (uint32_t)(d->count < ahead ? d->count : ahead));
    if (!status && gmi_host_free(m) < missing) *waits_out = true;
    if (status || *waits_out) return status;
  }
  for (uint32_t i = 0; i < p.count; i++) p.windows[i]->deferred--;
  status = host_piece(k, &p, true);
  if (status) {
    for (uint32_t i = 0; i < p.count; i++) p.windows[i]->deferred++;
    return status;
  }
  d->first = piece->next;
  if (!d->first) d->end = &d->first;
  d->count--;
  free(piece);
  walk_unref(k);
  return GEMINI_OK;
}

gemini_status_t gmi_updates_queue(gmi_manager_t *m, const gmi_window_t *w) {
  gemini_status_t status = GEMINI_OK;
  bool waits;
  while (!status && m->deferred && m->deferred->first && (!w || w->deferred)) status = deferred_first(m, true, &waits);
  return status;
}

static void *defer_work(void *user) {
  gmi_manager_t *m = user;
  gmi_deferred_t *d = m->deferred;
  pthread_mutex_lock(&m->lock);
  while (!d->stop) {
    uint64_t events = gmi_lane_events(m);
    bool waits = !d->first;
    gemini_status_t status = GEMINI_OK;
    while (!waits && !status) {
      status = deferred_first(m, false, &waits);
      waits |= !d->first;
    }
    if (status && !d->told) gmi_log(m, GEMINI_LOG_WARNING, "an update waits: %s", gmi_fail_message());
    d->told = status != GEMINI_OK;
    bool idle = !d->first;
    if (idle) {
      if (!d->stop) pthread_cond_wait(&d->more, &m->lock);
      continue;
    }
    gmi_unlock(m);             /* sends logs */
    if (status) usleep(10000); /* until somebody gives up what is in the way, or wants the update and is told */
    else gmi_lane_wait_event(m, events);
    pthread_mutex_lock(&m->lock);
  }
  pthread_mutex_unlock(&m->lock);
  return NULL;
}

uint64_t gmi_updates_deferred(const gmi_manager_t *m) { return m->deferred ? m->deferred->count : 0; }

gemini_status_t gmi_updates_open(gmi_manager_t *m) {
  if (!m->files) return GEMINI_OK;
  gmi_deferred_t *d = m->deferred = calloc(1, sizeof *d);
  if (!d) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for deferred updates");
  d->end = &d->first;
  pthread_cond_init(&d->more, NULL);
  int error = pthread_create(&d->thread, NULL, defer_work, m);
  d->started = !error;
  return error ? gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start the thread of deferred updates") : GEMINI_OK;
}

void gmi_updates_close(gmi_manager_t *m) {
  gmi_deferred_t *d = m->deferred;
  if (!d) return;
  gmi_lock(m);
  d->stop = true;
  pthread_cond_signal(&d->more);
  gmi_unlock(m);
  gmi_lane_nudge(m);
  if (d->started) pthread_join(d->thread, NULL);
  for (deferred_piece_t *piece = d->first, *next; piece; piece = next) {
    next = piece->next;
    walk_unref(piece->walk);
    free(piece);
  }
  pthread_cond_destroy(&d->more);
  free(d);
  m->deferred = NULL;
}

/* OOM_DEVICE: nothing was done; it can still run on the host. */
static gemini_status_t device_piece(walk_t *k, piece_t *p) {
  gmi_manager_t *m = k->m;
  uint32_t stream = m->update_stream, held = 0;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < p->count; i++) status = gmi_updates_queue(m, p->windows[i]);
  if (status) return status;
  for (; held < p->count; held++) atomic_fetch_add(&p->windows[held]->word, 1);
  for (uint32_t i = 0; !status && i < p->count; i++)
    status = gmi_window_fetch(m, p->windows[i], false, GEMINI_REASON_UPDATE, GMI_TAKE_EVICT);
  if (!status) status = gmi_fence_wait(m, stream, k->after);
  for (uint32_t i = 0; !status && i < p->count; i++) {
    gmi_window_t *w = p->windows[i];
    status = gmi_window_wait(m, stream, w, p->modes[i]);
    if (!status && (p->modes[i] & GEMINI_WRITE)) status = gmi_fence_wait(m, stream, w->copied_out);
  }
  uint64_t gaps, first_gap = piece_gaps(k, p, &gaps);
  for (uint64_t i = 0; !status && i < gaps; i++) {
    uint64_t begin, count;
    gap_in_piece(k, p, first_gap + i, &begin, &count);
    gmi_arena_t *a = k->arenas[k->gap_arena];
    status = gmi_device_zero(m, stream, a->base + begin * a->element_bytes, count * a->element_bytes);
  }
  gmi_fence_t begin = 0, end = 0;
  if (!status) status = gmi_fence_now(m, stream, &begin);
  if (!status) {
    gemini_update_span_t span = piece_span(k, p, GEMINI_TIER_DEVICE);
    span.stream = gmi_handle(m, GMI_HANDLE_STREAM, m->streams[m->update_stream].generation, m->update_stream);
    for (uint32_t i = 0; i < k->u.arena_count; i++)
      span.ptr[i] = k->arenas[i]->base + p->begin * k->arenas[i]->element_bytes;
    for (uint32_t i = 0; i < p->count; i++)
      if (p->modes[i] & GEMINI_WRITE) gmi_window_wrote(m, p->windows[i]);
    gmi_unlock(m); /* never call out with the lock; the windows are held */
    k->u.fn(k->u.user, &span);
    for (uint32_t i = 0; i < p->count; i++) {
      gemini_status_t used = gmi_window_use(m, p->windows[i], p->modes[i], stream, false);
      if (!status) status = used;
    }
    gmi_lock(m);
    if (!status) status = gmi_fence_now(m, stream, &end);
  }
  for (uint32_t i = 0; i < held; i++) atomic_fetch_sub(&p->windows[i]->word, 1);
  if (end) {
    m->update_end = end;
    gmi_timeline_span(m, "update", "update on the device", begin, end);
    if (m->timed_count < sizeof m->timed / sizeof *m->timed) {
      m->timed[m->timed_count].begin = begin;
      m->timed[m->timed_count].end = end;
      m->timed[m->timed_count].link = GMI_TIMED_UPDATE;
      m->timed[m->timed_count++].elements = p->end - p->begin;
    }
  }
  return status;
}

static void add_gap(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  walk_t *k = user;
  (void)m;
  if (atomic_load(&t->word) & GMI_TENSOR_GRADIENT) return;
  if (k->gap_count == k->gap_capacity) {
    uint64_t capacity = k->gap_capacity ? k->gap_capacity * 2 : 64;
    gap_t *gaps = realloc(k->gaps, capacity * sizeof *gaps);
    if (!gaps) {
      k->gaps_lost = true;
      return;
    }
    k->gaps = gaps;
    k->gap_capacity = capacity;
  }
  uint32_t bytes = k->arenas[k->gap_arena]->element_bytes;
  gap_t gap = { t->offset / bytes, (t->offset + t->size) / bytes };
  gap_t *last = k->gap_count ? &k->gaps[k->gap_count - 1] : NULL;
  if (last && gap.begin < last->end) { /* tied tensors overlap */
    if (gap.end > last->end) last->end = gap.end;
  } else {
    k->gaps[k->gap_count++] = gap;
  }
}

/* A tensor of a reused arena that cannot be written, or read, now. */
typedef struct {
  uint64_t begin, end; /* bytes */
  gmi_tensor_t *cut;   /* holds a gradient and lies in the range in part: half of it used up leaves neither */
  gmi_tensor_t *taken; /* holds a gradient */
} taken_t;
static void find_taken(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  taken_t *f = user;
  (void)m;
  if (!(atomic_load(&t->word) & GMI_TENSOR_GRADIENT)) return;
  f->taken = t;
  if (t->offset < f->begin || t->offset + t->size > f->end) f->cut = t;
}

static gemini_status_t check_taken(walk_t *k) {
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_arena_t *a = k->arenas[i];
    if (!a->reused) continue;
    taken_t f = { .begin = k->u.first_element * a->element_bytes };
    f.end = f.begin + k->u.element_count * a->element_bytes;
    gmi_arena_each(k->m, a, f.begin, f.end - f.begin, find_taken, &f);
    if (f.taken && k->modes[i] & GEMINI_READ)
      return gmi_fail(GEMINI_ERR_STATE, 0, "parameter %s cannot be read: its gradient has taken its bytes",
                      f.taken->name);
    if (f.cut && k->modes[i] & GEMINI_WRITE)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "elements %llu + %llu cut tensor %s, which holds a gradient",
                      (unsigned long long)k->u.first_element, (unsigned long long)k->u.element_count, f.cut->name);
  }
  return GEMINI_OK;
}

static void after_update(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  (void)m;
  (void)user;
  uint64_t word = atomic_load(&t->word);
  while (
      !atomic_compare_exchange_weak(&t->word, &word, gmi_tensor_word(word & ~GMI_TENSOR_GRADIENT, GEMINI_STATE_HOLD))) {
  }
}

static gemini_status_t walk_check(walk_t *k, const gemini_update_t *theirs, uint32_t *stream_out) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = gmi_struct_in(&k->u, sizeof k->u, theirs, sizeof k->u, "update");
  if (status) return status;
  gemini_update_t *u = &k->u;
  if (u->flags & ~(uint32_t)GEMINI_UPDATE_LATE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", u->flags & ~(uint32_t)GEMINI_UPDATE_LATE);
  if (u->reserved) return gmi_fail(GEMINI_ERR_INVALID, 0, "reserved is %u, must be 0", u->reserved);
  if (!u->arenas || !u->modes || !u->fn) return gmi_fail(GEMINI_ERR_INVALID, 0, "arenas, modes or fn is NULL");
  if (!u->arena_count || u->arena_count > GMI_UPDATE_ARENAS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "arena_count is %u, must be 1 to %d", u->arena_count, GMI_UPDATE_ARENAS);
  status = gmi_stream_resolve(m, u->stream, stream_out);
  if (status) return status;
  k->gap_arena = GMI_NONE;
  uint64_t elements = UINT64_MAX;
  for (uint32_t i = 0; i < u->arena_count; i++) {
    gmi_arena_t *a = k->arenas[i] = gmi_arena_get(m, u->arenas[i]);
    if (!a) return GEMINI_ERR_HANDLE;
    k->modes[i] = u->modes[i];
    if (u->modes[i] < GEMINI_READ || u->modes[i] > GEMINI_READ_WRITE)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "modes[%u] is %u, must be 1 to 3", i, u->modes[i]);
    if (a->like != k->arenas[0]->like)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s is not laid out like arena %s", a->name, k->arenas[0]->name);
    for (uint32_t j = 0; j < i; j++)
      if (k->arenas[j] == a) return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s is named twice", a->name);
    if (a->store != a->index) {
      if (u->modes[i] & GEMINI_WRITE)
        return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s reuses its parameters' bytes: an update can only read it",
                        a->name);
      k->gap_arena = i;
    }
    uint64_t has = atomic_load(&a->size) / a->element_bytes;
    if (has < elements) elements = has;
  }
  if (!u->element_count && u->first_element)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "element_count is 0, first_element %llu",
                    (unsigned long long)u->first_element);
  if (!u->element_count) u->element_count = elements;
  if (u->first_element > elements || u->element_count > elements - u->first_element)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "elements %llu + %llu are not among the %llu there are",
                    (unsigned long long)u->first_element, (unsigned long long)u->element_count,
                    (unsigned long long)elements);
  return GEMINI_OK;
}

static bool in_walk(const walk_t *k, const gmi_window_t *w) {
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    const gmi_arena_t *a = k->arenas[i];
    uint64_t begin = k->u.first_element * a->element_bytes, end = begin + k->u.element_count * a->element_bytes;
    if (a->store == w->arena && w->index >= begin >> k->m->window_shift && w->index <= (end - 1) >> k->m->window_shift)
      return true;
  }
  return false;
}

/* Nothing in the range may be in use, and without a file tier the host must have room for what will be there. */
static gemini_status_t walk_room(walk_t *k, uint32_t index, uint64_t unit) {
  gmi_manager_t *m = k->m;
  uint64_t need = 0, taken = 0, window = atomic_load(&m->window_bytes), number = 0;
  piece_t p;
  for (uint64_t at = k->u.first_element, end = at + k->u.element_count; at < end; at = p.end, number++) {
    p.begin = at;
    p.end = (at / unit + 1) * unit < end ? (at / unit + 1) * unit : end;
    piece_windows(k, &p);
    if (m->files && p.count > m->host.slot_count)
      return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "the update needs %llu bytes of host memory at once, the budget is %llu",
                      (unsigned long long)p.count * window, (unsigned long long)m->config.host_bytes);
    bool on_device = index != GMI_NONE && gmi_tracer_piece_on_device(m, index, (uint32_t)number);
    for (uint32_t i = 0; i < p.count; i++) {
      gmi_window_t *w = p.windows[i];
      if (w->host_users || !gmi_window_unsettle(w, GMI_WINDOW_PINS))
        return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired", gmi_window_arena(m, w)->name);
      need += w->slot != GMI_NONE || !(on_device || w->user_pins) ? window : 0;
    }
  }
  for (uint32_t i = 0; !m->files && i < GMI_ARENAS; i++) { /* what of the others must stay there */
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t w = 0; a && a->windows && w < atomic_load(&a->window_count); w++) {
      gmi_window_t *x = &a->windows[w];
      bool clean = !(x->valid & GMI_VALID_HOST) || (x->valid & (GMI_VALID_DEVICE | GMI_VALID_ZERO));
      if (x->slot != GMI_NONE && (!clean || x->host_users || x->graphs) && !in_walk(k, x)) taken += window;
    }
  }
  if (m->files || taken + need <= m->config.host_bytes) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                  "the update needs %llu bytes of host memory, of the budget %llu other chunks must keep %llu",
                  (unsigned long long)need, (unsigned long long)m->config.host_bytes, (unsigned long long)taken);
}

static gemini_status_t walk(walk_t *k, uint32_t stream) {
  gmi_manager_t *m = k->m;
  gemini_status_t status = gmi_cut(m);
  if (status || !k->u.element_count) return status;
  gmi_reap(m);
  uint32_t indexes[GMI_UPDATE_ARENAS];
  gmi_trace_update_t record = { .arena_count = k->u.arena_count,
                                .first_element = k->u.first_element,
                                .element_count = k->u.element_count };
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    indexes[i] = record.arenas[i] = k->arenas[i]->index;
    record.modes[i] = k->modes[i];
  }
  uint64_t unit = gmi_piece_elements(m, indexes, k->u.arena_count);
  status = check_taken(k);
  if (status) return status;
  if (k->gap_arena != GMI_NONE) {
    gmi_arena_t *store = gmi_arena_at(m, k->arenas[k->gap_arena]->store);
    gmi_arena_each(m, store, k->u.first_element * store->element_bytes, k->u.element_count * store->element_bytes,
                   add_gap, k);
    if (k->gaps_lost) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record");
    bool written = false; /* a zero gradient takes the parameter's bytes, so that the parameter must come anew */
    for (uint32_t i = 0; i < k->u.arena_count; i++) written |= k->arenas[i] == store && k->modes[i] & GEMINI_WRITE;
    if (k->gap_count && !written)
      return gmi_fail(GEMINI_ERR_STATE, 0,
                      "elements %llu to %llu of arena %s hold no gradient, and the update does not write arena %s",
                      (unsigned long long)k->gaps[0].begin, (unsigned long long)k->gaps[0].end,
                      k->arenas[k->gap_arena]->name, store->name);
  }
  status = walk_room(k, GMI_NONE, unit);
  if (status && status != GEMINI_ERR_OOM_HOST) return status;
  gemini_status_t room = status;
  uint32_t index;
  gmi_tracer_update(m, &record, &index);
  if (room && (status = walk_room(k, index, unit))) return status;
  if (stream != GMI_CALLER) {
    status = gmi_fence_now(m, stream, &k->after);
    if (status) return status;
  }
  piece_t p;
  uint32_t number = 0;
  uint64_t done = 0; /* elements */
  for (uint64_t at = k->u.first_element, end = at + k->u.element_count; !status && at < end; at = p.end, number++) {
    p.begin = at;
    p.end = (at / unit + 1) * unit < end ? (at / unit + 1) * unit : end;
    p.next_use = gmi_tracer_piece_use(m, index, number);
    piece_windows(k, &p);
    bool pinned = false, device = index != GMI_NONE && gmi_tracer_piece_on_device(m, index, number);
    for (uint32_t i = 0; i < p.count; i++) pinned |= p.windows[i]->user_pins && (p.modes[i] & GEMINI_WRITE);
    status = GEMINI_ERR_OOM_DEVICE;
    if (device || pinned) {
      gmi_tracer_piece_begin(m, index, number);
      status = device_piece(k, &p);
      gmi_tracer_piece_end(m, index, number);
    }
    bool no_room = status == GEMINI_ERR_OOM_DEVICE || status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_OOM_FILE;
    if (no_room && !pinned) status = piece_is_ready(k, &p) ? host_piece(k, &p, false) : piece_defer(k, &p);
    if (!status) done = p.end - k->u.first_element;
  }
  for (uint32_t i = 0; i < k->u.arena_count; i++) {
    gmi_arena_t *a = k->arenas[i];
    if (done && k->modes[i] & GEMINI_WRITE)
      gmi_arena_each(m, a, k->u.first_element * a->element_bytes, done * a->element_bytes, after_update, NULL);
  }
  return status;
}

gemini_status_t gmi_updates_finish(gmi_manager_t *m) {
  gmi_lock(m);
  gemini_status_t queued = gmi_updates_queue(m, NULL);
  gmi_unlock(m);
  if (queued) return queued;
  gmi_lane_drain(m);
  gmi_lock(m);
  gmi_fence_t end;
  gemini_status_t status = gmi_fence_now(m, m->update_stream, &end);
  gmi_unlock(m);
  if (!status && (status = m->dev->sync(m->dev_self, m->update_stream, gmi_fence_mark(end))))
    gmi_fail(status, 0, "an update on the device failed");
  return status ? status : gmi_lane_failure(m);
}

gemini_status_t gemini_update(gemini_manager_t mgr, const gemini_update_t *update) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  walk_t *k = calloc(1, sizeof *k);
  if (!k) API_RETURN(gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an update's record"));
  k->m = m;
  k->refs = 1;
  uint32_t stream;
  gmi_lock(m);
  gemini_status_t status = walk_check(k, update, &stream);
  if (!status) status = walk(k, stream);
  bool late = k->u.flags & GEMINI_UPDATE_LATE;
  walk_unref(k);
  gmi_unlock(m);
  if (!status && !late) status = gmi_updates_finish(m);
  API_RETURN(status);
}

gemini_status_t gemini_update_wait(gemini_manager_t mgr) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? gmi_updates_finish(m) : GEMINI_ERR_HANDLE);
}
