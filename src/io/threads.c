/* The fallback backend of the engine, for systems that forbid io_uring: a pool of depth threads, each of which moves
 * one part at a time with pread() or pwrite(). SPDX-License-Identifier: Apache-2.0
 *
 * All state is the engine's and is guarded by the engine's lock, which a thread releases while it moves bytes or calls
 * done. A thread sleeps on `more` when there is nothing to take. done functions run on the pool's threads. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/status.h"
#include "base/thread.h"
#include "io/backend.h"

typedef struct pool {
  pthread_cond_t more; /* used with the engine's lock: there may be work, or the engine is closing */
  uint32_t thread_count;
  pthread_t threads[];
} pool_t;

/* Moves one part to its end, retries and pauses included: a pause costs this thread its time, but no other part waits
 * for it. */
static void transfer(gmi_engine_t *e, gmi_part_t *part) {
  const gmi_sys_t *sys = e->sys;
  for (;;) {
    ssize_t n = part->write ? sys->pwrite(part->fd, part->buffer, part->size_bytes, (off_t)part->offset_bytes)
                            : sys->pread(part->fd, part->buffer, part->size_bytes, (off_t)part->offset_bytes);
    uint32_t delay_us;
    if (!gmi_engine_result(e, part, n < 0 ? -(int64_t)errno : n, &delay_us)) return;
    if (delay_us) nanosleep(&(struct timespec){ 0, (long)delay_us * 1000 }, NULL);
  }
}

static void *work(void *user) {
  gmi_engine_t *e = user;
  pool_t *pool = e->self;
  pthread_mutex_lock(&e->lock);
  for (;;) {
    gmi_request_t *refused = gmi_engine_refused(e);
    gmi_part_t part;
    if (refused) {
      pthread_mutex_unlock(&e->lock);
      gmi_engine_finish(e, refused);
      pthread_mutex_lock(&e->lock);
    } else if (gmi_engine_next(e, &part)) {
      /* Each thread that takes a part wakes the next one while work is left, so that a submit wakes one thread only and
       * need not compute how many threads its parts can use. */
      if (e->asleep && gmi_engine_ready(e)) pthread_cond_signal(&pool->more);
      pthread_mutex_unlock(&e->lock);
      transfer(e, &part);
      pthread_mutex_lock(&e->lock);
    } else {
      /* Idle means that nothing is left to take. Parts that other threads still move are theirs to finish: pool_close()
       * joins them all. */
      if (e->stop && gmi_engine_idle(e)) break;
      e->asleep++;
      pthread_cond_wait(&pool->more, &e->lock);
      e->asleep--;
    }
  }
  pthread_cond_broadcast(&pool->more); /* a thread that went to sleep while this one had work must see the end, too */
  pthread_mutex_unlock(&e->lock);
  return NULL;
}

static void pool_wake(gmi_engine_t *e) {
  pool_t *pool = e->self;
  if (e->stop) pthread_cond_broadcast(&pool->more);
  else pthread_cond_signal(&pool->more);
}

static void pool_close(gmi_engine_t *e) {
  pool_t *pool = e->self;
  for (uint32_t i = 0; i < pool->thread_count; i++) pthread_join(pool->threads[i], NULL);
  pthread_cond_destroy(&pool->more);
  free(pool);
}

static const gmi_backend_t backend = { .wake = pool_wake, .close = pool_close };

gemini_status_t gmi_threads_open(gmi_engine_t *engine) {
  gmi_engine_t *e = engine;
  pool_t *pool = calloc(1, sizeof *pool + e->depth * sizeof *pool->threads);
  if (!pool) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the threads of the file engine");
  pthread_cond_init(&pool->more, NULL);
  e->backend = &backend;
  e->self = pool;
  for (; pool->thread_count < e->depth; pool->thread_count++) {
    int error = gmi_thread_start(&pool->threads[pool->thread_count], work, e);
    if (!error) continue;
    /* The threads started so far find nothing to take and end; pool_close() joins just those. */
    uint32_t started = pool->thread_count;
    pthread_mutex_lock(&e->lock);
    e->stop = true;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&e->lock);
    pool_close(e);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start thread %u of %u of the file engine: %s", started + 1,
                    e->depth, strerror(error));
  }
  e->threads = pool->thread_count;
  snprintf(e->features, sizeof e->features, "threads: as asked for");
  return GEMINI_OK;
}
