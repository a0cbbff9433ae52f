/* Host workers: they run updates on chunks that live on the host, and sum these for norms.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A job is cut into slices, each within one chunk of every arena, so that all workers share in the one that is wanted
 * soonest. Which that is: among jobs whose bytes are there and whose slots' earlier work is done, the one whose chunks
 * are used next soonest, of equals the oldest. When none is ready, the oldest one that nobody waits for is waited for,
 * by a few workers at once: those that wait cannot help.
 * A job waits only for device work and for jobs queued before it, so one worker is enough for progress. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/thread.h"
#include "core/manager.h"
#include "core/workers.h"

enum {
  WORKERS_LIMIT = 256,
  INTERVALS_LIMIT = 16384,
  LOOK = 32,        /* jobs that are not ready yet, at either end of the queue, that are looked at */
  LOOK_NS = 200000, /* how often, while there is other work */
  WAITERS = 2
};
enum {
  JOB_QUEUED,     /* its bytes may be on their way */
  JOB_WAITED_FOR, /* by one worker */
  JOB_CAME,       /* ready, but for what happens before its first slice */
  JOB_READY
};

typedef struct {
  struct gmi_workers *workers;
  pthread_t thread;
  uint32_t index;
} worker_t;

typedef struct gmi_workers {
  pthread_mutex_t lock; /* after the manager's, never the other way round */
  pthread_cond_t more, done;
  gmi_job_t *first, *last;       /* not done yet, in the order of submission */
  gmi_job_t *queued;             /* of these: none before it is JOB_QUEUED; NULL: none is */
  gmi_job_t *ready, *ready_last; /* JOB_CAME, or JOB_READY with slices left; by next use, of equals by age */
  uint64_t looked_ns;            /* when the queue was looked at */
  uint32_t waiters;              /* workers that wait for a job's bytes */
  uint64_t pending;              /* queued or running */
  uint64_t deferred;             /* of these, those that were deferred */
  uint64_t submitted;            /* in all */
  uint64_t finished;             /* jobs and other work finished */
  gemini_status_t failure;       /* of the first update that did not run */
  char failure_text[384];        /* why */
  char last_text[384];           /* of the last read that failed */
  bool stop;
  uint32_t thread_count;
  double ns_per_element; /* of an update and one worker, running mean */
  uint64_t samples;
  gmi_manager_t *m;
  bool recording;
  uint32_t interval_count;
  gmi_workers_interval_t intervals[INTERVALS_LIMIT];
  worker_t workers[WORKERS_LIMIT];
} gmi_workers_t;

/* Can it run without waiting? Called with the lock. */
static bool is_ready(const gmi_workers_t *l, const gmi_job_t *job) {
  const gmi_manager_t *m = l->m;
  for (uint32_t i = 0; i < job->slot_count; i++)
    if (atomic_load_explicit(&job->slots[i]->work_done, memory_order_acquire) < job->after[i]) return false;
  for (uint32_t i = 0; i < job->fence_count; i++)
    if (!m->device.ops->stream.reached(m->device.self, gmi_fence_stream(job->fences[i]),
                                       gmi_fence_mark(job->fences[i])))
      return false;
  return true;
}

/* Called with the lock, as those below. */
static bool goes_before(const gmi_job_t *a, const gmi_job_t *b) {
  return a->next_use != b->next_use ? a->next_use < b->next_use : a->number < b->number;
}
static void add_ready(gmi_workers_t *l, gmi_job_t *job) {
  gmi_job_t **link = &l->ready; /* a backward pass adds at the begin, an update of all at the end */
  if (l->ready && goes_before(l->ready_last, job)) link = &l->ready_last->next_ready;
  while (*link && goes_before(*link, job)) link = &(*link)->next_ready;
  job->next_ready = *link;
  *link = job;
  if (!job->next_ready) l->ready_last = job;
}
static void take_first_ready(gmi_workers_t *l) {
  l->ready = l->ready->next_ready;
  if (!l->ready) l->ready_last = NULL;
}
static void leave_queue(gmi_workers_t *l, gmi_job_t *job, uint32_t state) {
  job->state = state;
  while (l->queued && l->queued->state != JOB_QUEUED) l->queued = l->queued->next;
}

/* Finds jobs that have become ready. */
static void look(gmi_workers_t *l, bool from_end) {
  uint32_t waiting = 0;
  for (gmi_job_t *job = from_end ? l->last : l->queued; l->queued && job && waiting < LOOK;
       job = from_end ? job->previous : job->next) {
    if (job->state == JOB_QUEUED && is_ready(l, job)) {
      leave_queue(l, job, JOB_CAME);
      add_ready(l, job);
    }
    waiting += job->state == JOB_QUEUED;
  }
}

/* The job to work on, or to wait for; NULL: neither. */
static gmi_job_t *pick(gmi_workers_t *l) {
  if (!l->first) return NULL;
  uint64_t now_ns = l->m->device.ops->now(l->m->device.self);
  if (!l->ready || now_ns - l->looked_ns >= LOOK_NS) {
    l->looked_ns = now_ns;
    look(l, false);
    look(l, true);
  }
  return l->ready ? l->ready : l->waiters < WAITERS ? l->queued : NULL;
}

/* Waits for what the job waits for, and makes it ready. A job whose bytes did not come has no slices: on these, nothing
 * is computed. Called with the lock, which it gives up meanwhile. */
static void prepare(gmi_workers_t *l, gmi_job_t *job) {
  gmi_manager_t *m = l->m;
  gemini_status_t status = GEMINI_OK;
  if (job->state == JOB_CAME) take_first_ready(l);
  leave_queue(l, job, JOB_WAITED_FOR);
  l->waiters++;
  pthread_mutex_unlock(&l->lock);
  for (uint32_t i = 0; i < job->fence_count; i++) {
    gemini_status_t one =
        m->device.ops->stream.sync(m->device.self, gmi_fence_stream(job->fences[i]), gmi_fence_mark(job->fences[i]));
    if (one) status = GEMINI_ERR_DEVICE; /* whatever the device says of a mark that it has not placed */
  }
  pthread_mutex_lock(&l->lock);
  for (uint32_t i = 0; i < job->slot_count; i++) {
    gmi_slot_t *slot = job->slots[i];
    while (atomic_load_explicit(&slot->work_done, memory_order_acquire) < job->after[i])
      pthread_cond_wait(&l->done, &l->lock);
    if (!slot->failure) continue;
    status = slot->failure;
    if (!l->failure) memcpy(l->failure_text, l->last_text, sizeof l->failure_text);
  }
  pthread_mutex_unlock(&l->lock);
  for (uint32_t i = 0; !status && i < job->zero_count; i++) memset(job->zeros[i].address, 0, job->zeros[i].bytes);
  pthread_mutex_lock(&l->lock);
  l->waiters--;
  job->state = JOB_READY;
  if (!status) {
    add_ready(l, job);
  } else {
    job->done_elements = job->span.element_count;
    if (!l->failure && !job->norm) l->failure = status;
  }
  pthread_cond_broadcast(&l->more);
}

/* The bytes of the span's arenas from an element on, and how many elements from there on lie in one piece. */
static uint64_t locate(const gmi_job_t *job, uint32_t chunk_shift, uint64_t at, gemini_update_span_t *span) {
  uint64_t count = job->span.element_count - at, chunk_bytes = UINT64_C(1) << chunk_shift;
  for (uint32_t i = 0; i < span->arena_count; i++) {
    uint64_t bytes = job->element_bytes[i], offset = at * bytes;
    if (!job->chunks[i]) {
      span->ptr[i] = (uint8_t *)job->span.ptr[i] + offset;
      continue;
    }
    offset += job->span.first_element * bytes & (chunk_bytes - 1);
    span->ptr[i] = job->chunks[i][offset >> chunk_shift] + (offset & (chunk_bytes - 1));
    uint64_t left = (chunk_bytes - (offset & (chunk_bytes - 1))) / bytes;
    if (left < count) count = left;
  }
  return count;
}

/* Called with the lock, which it gives up meanwhile. */
static void run_slice(gmi_workers_t *l, gmi_job_t *job, uint32_t worker) {
  gmi_manager_t *m = l->m;
  gemini_update_span_t span = job->span;
  uint64_t at = job->next_element, count = locate(job, m->cut.chunk_shift, at, &span);
  if (count > GMI_WORKERS_SLICE) count = GMI_WORKERS_SLICE;
  job->next_element += count;
  if (job->next_element == job->span.element_count) take_first_ready(l); /* none is left for others */
  pthread_mutex_unlock(&l->lock);
  span.first_element += at;
  span.element_count = count;
  uint64_t begin = m->device.ops->now(m->device.self);
  job->fn(job->user, &span);
  uint64_t end = m->device.ops->now(m->device.self);
  double ns = (double)(end - begin) / (double)count;
  pthread_mutex_lock(&l->lock);
  job->done_elements += count;
  if (l->recording && l->interval_count < INTERVALS_LIMIT)
    l->intervals[l->interval_count++] = (gmi_workers_interval_t){ begin, end, worker, job->norm };
  if (job->norm) return;
  l->samples++;
  l->ns_per_element += (ns - l->ns_per_element) / (double)(l->samples < 64 ? l->samples : 64);
}

/* Called with the lock, which it gives up meanwhile. */
static void finish(gmi_workers_t *l, gmi_job_t *job) {
  *(job->previous ? &job->previous->next : &l->first) = job->next;
  *(job->next ? &job->next->previous : &l->last) = job->previous;
  for (uint32_t i = 0; i < job->slot_count; i++)
    atomic_fetch_add_explicit(&job->slots[i]->work_done, 1, memory_order_release);
  l->pending--;
  l->deferred -= job->deferred;
  l->finished++;
  pthread_cond_broadcast(&l->done);
  if (!l->first) pthread_cond_broadcast(&l->more); /* who ends waits for that */
  pthread_mutex_unlock(&l->lock);
  l->m->device.ops->stream.flag_wake(l->m->device.self);
  free(job);
  pthread_mutex_lock(&l->lock);
}

static void *work(void *user) {
  worker_t *me = user;
  gmi_workers_t *l = me->workers;
  pthread_mutex_lock(&l->lock);
  while (!l->stop || l->first) {
    gmi_job_t *job = pick(l);
    if (!job) {
      pthread_cond_wait(&l->more, &l->lock);
      continue;
    }
    if (job->state == JOB_READY) run_slice(l, job, me->index);
    else prepare(l, job);
    if (job->done_elements == job->span.element_count) finish(l, job);
  }
  pthread_mutex_unlock(&l->lock);
  return NULL;
}

gemini_status_t gmi_workers_open(gmi_manager_t *m, uint32_t threads) {
  if (!threads) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    threads = cores > WORKERS_LIMIT ? WORKERS_LIMIT : cores > 1 ? (uint32_t)cores - 1 : 1;
  }
  gmi_workers_t *l = calloc(1, sizeof *l);
  if (!l) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the update workers");
  pthread_mutex_init(&l->lock, NULL);
  pthread_cond_init(&l->more, NULL);
  pthread_cond_init(&l->done, NULL);
  l->m = m;
  m->update.workers = l;
  for (; l->thread_count < threads; l->thread_count++) {
    worker_t *c = &l->workers[l->thread_count];
    *c = (worker_t){ .workers = l, .index = l->thread_count };
    int error = gmi_thread_start(&c->thread, work, c);
    if (error)
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start update worker %u of %u", l->thread_count, threads);
  }
  m->config.update_threads = threads;
  return GEMINI_OK;
}

void gmi_workers_close(gmi_manager_t *m) {
  gmi_workers_t *l = m->update.workers;
  if (!l) return;
  pthread_mutex_lock(&l->lock);
  l->stop = true;
  pthread_cond_broadcast(&l->more);
  pthread_mutex_unlock(&l->lock);
  for (uint32_t i = 0; i < l->thread_count; i++) pthread_join(l->workers[i].thread, NULL);
  pthread_cond_destroy(&l->more);
  pthread_cond_destroy(&l->done);
  pthread_mutex_destroy(&l->lock);
  free(l);
  m->update.workers = NULL;
}

void gmi_workers_push(gmi_manager_t *m, gmi_job_t *job) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  job->next = NULL;
  job->previous = l->last;
  job->number = ++l->submitted;
  job->state = JOB_QUEUED;
  job->next_element = job->done_elements = 0;
  *(l->last ? &l->last->next : &l->first) = job;
  l->last = job;
  if (!l->queued) l->queued = job;
  l->pending++;
  l->deferred += job->deferred;
  pthread_cond_signal(&l->more);
  pthread_mutex_unlock(&l->lock);
}

uint64_t gmi_workers_pending(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  uint64_t pending = m->update.workers->pending;
  pthread_mutex_unlock(&m->update.workers->lock);
  return pending;
}

uint64_t gmi_workers_deferred(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  uint64_t deferred = m->update.workers->deferred;
  pthread_mutex_unlock(&m->update.workers->lock);
  return deferred;
}

void gmi_workers_nudge(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  m->update.workers->finished++;
  pthread_cond_broadcast(&m->update.workers->done);
  pthread_mutex_unlock(&m->update.workers->lock);
}

void gmi_workers_drain(gmi_manager_t *m, const char *function) {
  gmi_workers_t *l = m->update.workers;
  uint64_t pending = gmi_workers_pending(m);
  if (!pending) return;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, function, GMI_WAIT_WORKERS, pending);
  pthread_mutex_lock(&l->lock);
  uint64_t last = l->submitted; /* not for ever when others go on submitting */
  while (l->first && l->first->number <= last) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
  gmi_wait_end(m, &wait);
}

void gmi_workers_wait_slot(gmi_manager_t *m, gmi_slot_t *slot, uint64_t count) {
  gmi_workers_t *l = m->update.workers;
  gmi_wait_t wait;
  if (atomic_load_explicit(&slot->work_done, memory_order_acquire) >= count) return;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_CHUNK, (uint64_t)(slot - m->host.slots));
  pthread_mutex_lock(&l->lock);
  while (atomic_load_explicit(&slot->work_done, memory_order_acquire) < count) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
  gmi_wait_end(m, &wait);
}

void gmi_workers_work_done(gmi_manager_t *m, gmi_slot_t *slot, gemini_status_t status, const char *message) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  slot->failure = status;
  if (status) snprintf(l->last_text, sizeof l->last_text, "%s", message);
  atomic_fetch_add_explicit(&slot->work_done, 1, memory_order_release);
  l->finished++;
  pthread_cond_broadcast(&l->done);
  pthread_mutex_unlock(&l->lock);
  m->device.ops->stream.flag_wake(m->device.self);
}

uint64_t gmi_workers_finished(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  uint64_t finished = m->update.workers->finished;
  pthread_mutex_unlock(&m->update.workers->lock);
  return finished;
}

void gmi_workers_wait(gmi_manager_t *m, uint64_t finished, gmi_wait_kind_t kind, uint64_t number) {
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, kind, number);
  gmi_workers_idle(m, finished);
  gmi_wait_end(m, &wait);
}

void gmi_workers_idle(gmi_manager_t *m, uint64_t finished) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  while (l->finished == finished) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
}

double gmi_workers_ns_per_element(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  double ns = m->update.workers->ns_per_element;
  pthread_mutex_unlock(&m->update.workers->lock);
  return ns;
}

void gmi_workers_record(gmi_manager_t *m, bool on) {
  pthread_mutex_lock(&m->update.workers->lock);
  m->update.workers->recording = on;
  m->update.workers->interval_count = 0;
  pthread_mutex_unlock(&m->update.workers->lock);
}

uint32_t gmi_workers_recorded(gmi_manager_t *m, gmi_workers_interval_t *intervals_out, uint32_t limit) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  uint32_t count = l->interval_count < limit ? l->interval_count : limit;
  l->interval_count -= count;
  memcpy(intervals_out, l->intervals, count * sizeof *intervals_out);
  memmove(l->intervals, l->intervals + count, l->interval_count * sizeof *l->intervals);
  pthread_mutex_unlock(&l->lock);
  return count;
}

gemini_status_t gmi_workers_failure(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  gemini_status_t failure = m->update.workers->failure;
  pthread_mutex_unlock(&m->update.workers->lock);
  if (!failure) return GEMINI_OK;
  return gmi_fail(failure, 0, "an update did not run: %s",
                  failure != GEMINI_ERR_DEVICE ? m->update.workers->failure_text : "the device work before it failed");
}
