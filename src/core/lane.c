/* Host workers: they run updates on chunks that live on the host, first in first out.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A job waits only for device work and for jobs queued before it, so one worker is enough for progress. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/manager.h"

enum { WORKERS_LIMIT = 256, SPANS_LIMIT = 4096 };

typedef struct {
  struct gmi_lane *lane;
  pthread_t thread;
  uint64_t running; /* number of the job; 0 = none */
  uint32_t index;
} worker_t;

typedef struct gmi_lane {
  pthread_mutex_t lock; /* after the manager's, never the other way round */
  pthread_cond_t more, done;
  gmi_job_t *first, **end;
  uint64_t pending;        /* queued or running */
  uint64_t deferred;       /* of these, those that were deferred */
  uint64_t submitted;      /* in all */
  uint64_t events;         /* jobs and other work finished */
  gemini_status_t failure; /* of the first job that did not run */
  char failure_text[384];  /* why */
  char last_text[384];     /* of the last read that failed */
  bool stop;
  uint32_t thread_count;
  double ns_per_element; /* of one worker, running mean */
  uint64_t samples;
  gmi_manager_t *m;
  bool recording;
  uint32_t span_count;
  gmi_lane_span_t spans[SPANS_LIMIT];
  worker_t workers[WORKERS_LIMIT];
} gmi_lane_t;

static void run_job(gmi_lane_t *l, gmi_job_t *job, worker_t *worker) {
  gmi_manager_t *m = l->m;
  gemini_status_t status = GEMINI_OK; /* of the work before it: on bytes that did not come, nothing is computed */
  for (uint32_t i = 0; i < job->fence_count; i++) {
    gemini_status_t one = m->dev->sync(m->dev_self, gmi_fence_stream(job->fences[i]), gmi_fence_mark(job->fences[i]));
    if (one) status = one;
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
  uint64_t begin = m->dev->now(m->dev_self);
  for (uint32_t i = 0; !status && i < job->zero_count; i++) memset(job->zeros[i].address, 0, job->zeros[i].bytes);
  if (!status) job->fn(job->user, &job->span);
  uint64_t end = m->dev->now(m->dev_self);
  double ns = (double)(end - begin) / (double)job->span.element_count;
  pthread_mutex_lock(&l->lock);
  if (l->recording && l->span_count < SPANS_LIMIT)
    l->spans[l->span_count++] = (gmi_lane_span_t){ begin, end, worker->index, 0 };
  for (uint32_t i = 0; i < job->slot_count; i++)
    atomic_fetch_add_explicit(&job->slots[i]->work_done, 1, memory_order_release);
  l->samples++;
  l->ns_per_element += (ns - l->ns_per_element) / (double)(l->samples < 64 ? l->samples : 64);
  if (status && !l->failure) l->failure = status;
  worker->running = 0;
  l->pending--;
  l->deferred -= job->deferred;
  l->events++;
  pthread_cond_broadcast(&l->done);
  pthread_mutex_unlock(&l->lock);
  m->dev->flag_wake(m->dev_self);
  free(job);
}

static void *work(void *user) {
  worker_t *me = user;
  gmi_lane_t *l = me->lane;
  pthread_mutex_lock(&l->lock);
  for (;;) {
    while (!l->first && !l->stop) pthread_cond_wait(&l->more, &l->lock);
    gmi_job_t *job = l->first;
    if (!job) break;
    l->first = job->next;
    if (!l->first) l->end = &l->first;
    me->running = job->number;
    pthread_mutex_unlock(&l->lock);
    run_job(l, job, me);
    pthread_mutex_lock(&l->lock);
  }
  pthread_mutex_unlock(&l->lock);
  return NULL;
}

gemini_status_t gmi_lane_open(gmi_manager_t *m, uint32_t threads) {
  if (!threads) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    threads = cores > WORKERS_LIMIT ? WORKERS_LIMIT : cores > 1 ? (uint32_t)cores - 1 : 1;
  }
  gmi_lane_t *l = calloc(1, sizeof *l);
  if (!l) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the update workers");
  pthread_mutex_init(&l->lock, NULL);
  pthread_cond_init(&l->more, NULL);
  pthread_cond_init(&l->done, NULL);
  l->end = &l->first;
  l->m = m;
  m->lane = l;
  for (; l->thread_count < threads; l->thread_count++) {
    worker_t *w = &l->workers[l->thread_count];
    *w = (worker_t){ .lane = l, .index = l->thread_count };
    int error = pthread_create(&w->thread, NULL, work, w);
    if (error)
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start update worker %u of %u", l->thread_count, threads);
  }
  m->config.update_threads = threads;
  return GEMINI_OK;
}

void gmi_lane_close(gmi_manager_t *m) {
  gmi_lane_t *l = m->lane;
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
  m->lane = NULL;
}

void gmi_lane_push(gmi_manager_t *m, gmi_job_t *job) {
  gmi_lane_t *l = m->lane;
  pthread_mutex_lock(&l->lock);
  job->next = NULL;
  job->number = ++l->submitted;
  *l->end = job;
  l->end = &job->next;
  l->pending++;
  l->deferred += job->deferred;
  pthread_cond_signal(&l->more);
  pthread_mutex_unlock(&l->lock);
}

uint64_t gmi_lane_pending(gmi_manager_t *m) {
  pthread_mutex_lock(&m->lane->lock);
  uint64_t pending = m->lane->pending;
  pthread_mutex_unlock(&m->lane->lock);
  return pending;
}

uint64_t gmi_lane_deferred(gmi_manager_t *m) {
  pthread_mutex_lock(&m->lane->lock);
  uint64_t deferred = m->lane->deferred;
  pthread_mutex_unlock(&m->lane->lock);
  return deferred;
}

void gmi_lane_nudge(gmi_manager_t *m) {
  pthread_mutex_lock(&m->lane->lock);
  m->lane->events++;
  pthread_cond_broadcast(&m->lane->done);
  pthread_mutex_unlock(&m->lane->lock);
}

/* Jobs start in their order, but need not end in it. */
static bool done_until(const gmi_lane_t *l, uint64_t number) {
  if (l->first && l->first->number <= number) return false;
  for (uint32_t i = 0; i < l->thread_count; i++)
    if (l->workers[i].running && l->workers[i].running <= number) return false;
  return true;
}

void gmi_lane_drain(gmi_manager_t *m) {
  gmi_lane_t *l = m->lane;
  pthread_mutex_lock(&l->lock);
  uint64_t last = l->submitted; /* not for ever when others go on submitting */
  while (!done_until(l, last)) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
}

void gmi_lane_wait_slot(gmi_manager_t *m, gmi_slot_t *slot, uint64_t count) {
  gmi_lane_t *l = m->lane;
  pthread_mutex_lock(&l->lock);
  while (atomic_load_explicit(&slot->work_done, memory_order_acquire) < count) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
}

void gmi_lane_work_done(gmi_manager_t *m, gmi_slot_t *slot, gemini_status_t status, const char *message) {
  gmi_lane_t *l = m->lane;
  pthread_mutex_lock(&l->lock);
  slot->failure = status;
  if (status) snprintf(l->last_text, sizeof l->last_text, "%s", message);
  atomic_fetch_add_explicit(&slot->work_done, 1, memory_order_release);
  l->events++;
  pthread_cond_broadcast(&l->done);
  pthread_mutex_unlock(&l->lock);
  m->dev->flag_wake(m->dev_self);
}

uint64_t gmi_lane_events(gmi_manager_t *m) {
  pthread_mutex_lock(&m->lane->lock);
  uint64_t events = m->lane->events;
  pthread_mutex_unlock(&m->lane->lock);
  return events;
}

void gmi_lane_wait_event(gmi_manager_t *m, uint64_t events) {
  gmi_lane_t *l = m->lane;
  pthread_mutex_lock(&l->lock);
  while (l->events == events) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
}

double gmi_lane_ns_per_element(gmi_manager_t *m) {
  pthread_mutex_lock(&m->lane->lock);
  double ns = m->lane->ns_per_element;
  pthread_mutex_unlock(&m->lane->lock);
  return ns;
}

void gmi_lane_record(gmi_manager_t *m, bool on) {
  pthread_mutex_lock(&m->lane->lock);
  m->lane->recording = on;
  m->lane->span_count = 0;
  pthread_mutex_unlock(&m->lane->lock);
}

uint32_t gmi_lane_recorded(gmi_manager_t *m, gmi_lane_span_t *spans_out, uint32_t limit) {
  gmi_lane_t *l = m->lane;
  pthread_mutex_lock(&l->lock);
  uint32_t count = l->span_count < limit ? l->span_count : limit;
  l->span_count -= count;
  memcpy(spans_out, l->spans, count * sizeof *spans_out);
  memmove(l->spans, l->spans + count, l->span_count * sizeof *l->spans);
  pthread_mutex_unlock(&l->lock);
  return count;
}

gemini_status_t gmi_lane_failure(gmi_manager_t *m) {
  pthread_mutex_lock(&m->lane->lock);
  gemini_status_t failure = m->lane->failure;
  pthread_mutex_unlock(&m->lane->lock);
  if (!failure) return GEMINI_OK;
  return gmi_fail(failure, 0, "an update did not run: %s",
                  failure != GEMINI_ERR_DEVICE ? m->lane->failure_text : "the device work before it failed");
}
