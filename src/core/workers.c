/* Host workers: threads that run updates on chunks on the host, and sum such chunks for norms.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Callers push jobs under the manager's lock; workers run them under workers.lock alone, which they release while they
 * compute or wait for the device. A job is divided into slices, each within one chunk of every arena, so that all
 * workers work on the most urgent job at the same time. The most urgent job is the one whose chunks have the nearest
 * next use, among the jobs that are ready: their bytes have come and the earlier work on their slots is done. The older
 * of two equal jobs goes first. When no job is ready, up to WAITERS workers block on the oldest jobs that no worker
 * waits for yet; the others stay free for jobs that become ready.
 *
 * A job waits only for device work, for transfers and for jobs queued before it, so one worker is enough for progress.
 * A job's state: QUEUED -> CAME -> WAITED_FOR -> READY, or QUEUED -> WAITED_FOR -> READY; then its slices are handed
 * out, and the worker that finishes the last slice frees the job. */
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
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
  COLD = 3, /* first iterations, in which memory is committed beside the workers */
  PASSES = GEMINI_PASS_STATES + 1,
  LOOK = 32,        /* unready jobs that one pass examines at either end of the queue: bounds its cost */
  LOOK_NS = 200000, /* time between two passes while there is other work; a quarter of it if that is second passes */
  WAITERS = 2       /* workers that may block on unready jobs */
};
enum {
  JOB_QUEUED,     /* its bytes may still be moving */
  JOB_WAITED_FOR, /* one worker is in prepare() for it */
  JOB_CAME,       /* its bytes have come; prepare() has yet to check for failures and clear gaps */
  JOB_READY       /* its slices can run */
};

typedef struct {
  struct gmi_workers *workers;
  pthread_t thread;
  uint32_t index;
} worker_t;

/* lock guards all fields that change after gmi_workers_open(), and the jobs' private fields. Invariants: every job in
 * the ready list, or in that of queued ones, is also in the list from first to last; jobs are in that of queued ones
 * while they are JOB_QUEUED. */
typedef struct gmi_workers {
  pthread_mutex_t lock; /* taken after the manager's lock; the locks of the device are taken under it */
  /* more: workers wait here for jobs. done: callers, and workers in prepare(), wait here for finished work. */
  pthread_cond_t more, done;
  gmi_job_t *first, *last;         /* unfinished jobs in the order of submission */
  gmi_job_t *queued, *queued_last; /* JOB_QUEUED, in the order of submission */
  gmi_job_t *ready, *ready_last;   /* JOB_CAME, or JOB_READY with slices left; sorted by next use, then by age */
  uint64_t looked_ns;              /* time of the last pass over the queue */
  uint32_t waiters;                /* workers in prepare() */
  uint64_t pending;                /* jobs queued or running */
  uint64_t deferred;               /* the deferred ones among them */
  uint64_t submitted;              /* jobs ever submitted */
  uint64_t finished;               /* jobs and other work ever finished: an event counter for waits */
  gemini_status_t failure;         /* of the first update that did not run, or whose function failed; never reset */
  int64_t failure_code;
  char failure_text[440]; /* in words */
  uint64_t begun_states;  /* second passes */
  uint64_t iterations;    /* that have begun */
  bool stop;
  uint32_t thread_count;
  /* By pass. updated: by slices of updates, all in all; begun: at the begins of the last iteration but one, and the
   * last; ns_per_element: of an update and one worker, see rate() */
  struct {
    struct {
      uint64_t elements;
      double ns;
    } updated, begun[2];
    double ns_per_element;
  } passes[PASSES];
  gmi_manager_t *m;
  bool bound; /* to these cores */
  cpu_set_t cores;
  bool recording;
  uint32_t interval_count;
  gmi_workers_interval_t intervals[INTERVALS_LIMIT];
  worker_t workers[WORKERS_LIMIT];
} gmi_workers_t;

/* Can the job run without waiting? The acquire load of work_done pairs with the release increments in finish() and
 * gmi_workers_work_done(): the worker that sees the count also sees the bytes. Called with the lock held. */
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

/* Called with the lock held. attempt: of the job that fails, or NULL. */
static __attribute__((format(printf, 5, 6))) void fail(gmi_workers_t *l, gmi_attempt_t *attempt, gemini_status_t status,
                                                       int64_t code, const char *format, ...) {
  if (attempt && attempt->state != GMI_ATTEMPT_TAKEN) {
    if (attempt->state == GMI_ATTEMPT_OPEN) attempt->state = GMI_ATTEMPT_FAILED;
    return;
  }
  if (l->failure) return;
  va_list args;
  va_start(args, format);
  vsnprintf(l->failure_text, sizeof l->failure_text, format, args);
  va_end(args);
  l->failure_code = code;
  l->failure = status;
}

void gmi_span_run(gmi_manager_t *m, gemini_update_fn fn, gemini_update_try_fn try_fn, void *user,
                  const gemini_update_span_t *span, gmi_attempt_t *attempt) {
  if (!try_fn) {
    fn(user, span);
    return;
  }
  uint64_t before = gmi_fail_count();
  gemini_status_t status = try_fn(user, span);
  if (!status) return;
  gmi_failure_t own;
  gmi_fail_keep(status, &own);
  bool told = gmi_fail_count() != before && gmi_fail_status() == status;
  unsigned long long first = span->first_element, end = first + span->element_count;
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  if (status > 0)
    fail(l, attempt, GEMINI_ERR_INVALID, 0,
         "the function of an update returned %d, which is no status, for elements %llu to %llu", status, first, end);
  else
    fail(l, attempt, status, told ? own.native_code : 0,
         "the function of an update failed for elements %llu to %llu: %.300s", first, end,
         told ? own.message : gemini_status_string(status));
  pthread_mutex_unlock(&l->lock);
}

/* Called with the lock held, as are the functions up to pick(). */
static bool goes_before(const gmi_job_t *a, const gmi_job_t *b) {
  return a->next_use != b->next_use ? a->next_use < b->next_use : a->number < b->number;
}
static void add_ready(gmi_workers_t *l, gmi_job_t *job) {
  gmi_job_t **link = &l->ready; /* short: backward passes add at the start of the list, whole updates at its end */
  if (l->ready && goes_before(l->ready_last, job)) link = &l->ready_last->lane.next;
  while (*link && goes_before(*link, job)) link = &(*link)->lane.next;
  job->lane.next = *link;
  *link = job;
  if (!job->lane.next) l->ready_last = job;
}
static void take_first_ready(gmi_workers_t *l) {
  l->ready = l->ready->lane.next;
  if (!l->ready) l->ready_last = NULL;
}
static void enter_queue(gmi_workers_t *l, gmi_job_t *job) {
  job->state = JOB_QUEUED;
  job->lane.next = NULL;
  job->lane.previous = l->queued_last;
  *(l->queued_last ? &l->queued_last->lane.next : &l->queued) = job;
  l->queued_last = job;
}
static void leave_queue(gmi_workers_t *l, gmi_job_t *job, uint32_t state) {
  if (job->state == JOB_QUEUED) {
    *(job->lane.previous ? &job->lane.previous->lane.next : &l->queued) = job->lane.next;
    *(job->lane.next ? &job->lane.next->lane.previous : &l->queued_last) = job->lane.previous;
  }
  job->state = state;
}

/* Moves jobs that have become ready to the ready list. */
static void look(gmi_workers_t *l, bool from_end) {
  uint32_t waiting = 0;
  for (gmi_job_t *job = from_end ? l->queued_last : l->queued, *next; job && waiting < LOOK; job = next) {
    next = from_end ? job->lane.previous : job->lane.next;
    if (!is_ready(l, job)) {
      waiting++;
      continue;
    }
    leave_queue(l, job, JOB_CAME);
    add_ready(l, job);
  }
}

/* Returns the job to run or to wait for; NULL: there is none. Looks at both ends of the queue: old jobs usually become
 * ready first, but the newest may concern chunks that are on the host already. */
static gmi_job_t *pick(gmi_workers_t *l) {
  if (!l->first) return NULL;
  uint64_t now_ns = l->m->device.ops->now(l->m->device.self);
  /* Few second passes before the first ones that can run. */
  const uint64_t least_ns = !l->ready ? 0 : l->ready->passes.now == GEMINI_PASS_STATES ? LOOK_NS / 4 : LOOK_NS;
  if (now_ns - l->looked_ns >= least_ns) {
    l->looked_ns = now_ns;
    look(l, false);
    look(l, true);
  }
  return l->ready ? l->ready : l->waiters < WAITERS ? l->queued : NULL;
}

/* Waits for the device work and the slots' work that the job depends on, and makes the job ready. If a dependency
 * failed, the job's bytes are unusable: all its elements count as done without a call of fn, and the failure is
 * recorded. Called with the lock held, which it releases while it waits. */
static void prepare(gmi_workers_t *l, gmi_job_t *job) {
  gmi_manager_t *m = l->m;
  gemini_status_t status = GEMINI_OK;
  char text[384] = "device work that it waits for failed";
  if (job->state == JOB_CAME) take_first_ready(l);
  leave_queue(l, job, JOB_WAITED_FOR);
  l->waiters++;
  pthread_mutex_unlock(&l->lock);
  for (uint32_t i = 0; i < job->fence_count; i++) {
    gemini_status_t one =
        m->device.ops->stream.sync(m->device.self, gmi_fence_stream(job->fences[i]), gmi_fence_mark(job->fences[i]));
    if (one) status = GEMINI_ERR_DEVICE; /* one status for all, as sync() has others for marks that were never placed */
  }
  pthread_mutex_lock(&l->lock);
  for (uint32_t i = 0; i < job->slot_count; i++) {
    gmi_slot_t *slot = job->slots[i];
    while (atomic_load_explicit(&slot->work_done, memory_order_acquire) < job->after[i])
      pthread_cond_wait(&l->done, &l->lock);
    if (!slot->failure) continue;
    status = slot->failure;
    snprintf(text, sizeof text, "%s", slot->failure_text ? slot->failure_text : "a read from the files failed");
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
    job->passes.now = GEMINI_PASS_BOTH;
    if (!job->norm) fail(l, job->attempt, status, 0, "an update did not run: %s", text);
  }
  pthread_cond_broadcast(&l->more);
}

/* Sets span->ptr and span->out to element at of each arena, and returns the number of elements from there that are
 * contiguous in every arena: host slots of adjacent chunks need not be adjacent. */
static uint64_t locate(const gmi_job_t *job, uint32_t chunk_shift, uint64_t at, gemini_update_span_t *span) {
  uint64_t count = job->span.element_count - at, chunk_bytes = UINT64_C(1) << chunk_shift;
  for (uint32_t i = 0; i < span->arena_count; i++) {
    uint64_t bytes = job->element_bytes[i], offset = at * bytes;
    if (!job->chunks[i]) {
      span->ptr[i] = span->out[i] = (uint8_t *)job->span.ptr[i] + offset;
      continue;
    }
    offset += job->span.first_element * bytes & (chunk_bytes - 1);
    span->ptr[i] = span->out[i] = job->chunks[i][offset >> chunk_shift] + (offset & (chunk_bytes - 1));
    if (job->outs[i]) span->out[i] = job->outs[i][offset >> chunk_shift] + (offset & (chunk_bytes - 1));
    uint64_t left = (chunk_bytes - (offset & (chunk_bytes - 1))) / bytes;
    if (left < count) count = left;
  }
  return count;
}

/* What the pass is not to write, it has no memory for. Results are not read either. */
static void leave_out(const gmi_job_t *job, uint32_t pass, gemini_update_span_t *span) {
  span->pass = pass;
  for (uint32_t i = 0; pass && i < span->arena_count; i++) {
    if (job->passes.writes[pass == GEMINI_PASS_RESULTS] >> i & 1) span->out[i] = NULL;
    if (pass == GEMINI_PASS_STATES && job->passes.writes[0] >> i & 1) span->ptr[i] = NULL;
  }
}

/* Takes the next slice of the job and runs it. Called with the lock held, which it releases while fn runs. Other
 * workers may run other slices of the job meanwhile; the job stays allocated until done_elements covers all of them. */
static void run_slice(gmi_workers_t *l, gmi_job_t *job, uint32_t worker) {
  gmi_manager_t *m = l->m;
  gemini_update_span_t span = job->span;
  const uint32_t pass = job->passes.now;
  uint64_t at = job->next_element, count = locate(job, m->cut.chunk_shift, at, &span);
  const bool dropped = job->attempt && job->attempt->state == GMI_ATTEMPT_DROPPED;
  if (dropped) count = job->span.element_count - at;
  else if (count > GMI_WORKERS_SLICE) count = GMI_WORKERS_SLICE;
  job->next_element += count;
  if (job->next_element == job->span.element_count) take_first_ready(l); /* no slice is left for other workers */
  if (dropped) {
    job->done_elements += count;
    return;
  }
  pthread_mutex_unlock(&l->lock);
  span.first_element += at + job->named_shift;
  span.element_count = count;
  leave_out(job, pass, &span);
  uint64_t begin = m->device.ops->now(m->device.self);
  gmi_span_run(m, job->fn, job->try_fn, job->user, &span, job->attempt);
  uint64_t end = m->device.ops->now(m->device.self);
  pthread_mutex_lock(&l->lock);
  job->done_elements += count;
  if (l->recording && l->interval_count < INTERVALS_LIMIT)
    l->intervals[l->interval_count++] = (gmi_workers_interval_t){ begin, end, worker, job->norm };
  if (job->norm) return;
  l->passes[pass].updated.elements += count;
  l->passes[pass].updated.ns += (double)(end - begin);
}

/* Gives up a reference. Called with the lock held. */
static void attempt_unref(gmi_attempt_t *attempt) {
  if (!--attempt->refs) free(attempt);
}
static void to_next_use(gmi_workers_t *l, gmi_job_t *job, uint64_t next_use) {
  gmi_job_t *before = NULL, *at = l->ready;
  for (; at && at != job; at = at->lane.next) before = at;
  if (at) *(before ? &before->lane.next : &l->ready) = job->lane.next;
  if (at && l->ready_last == job) l->ready_last = before;
  job->next_use = next_use;
  if (at) add_ready(l, job);
}
bool gmi_attempt_take(gmi_manager_t *m, gmi_attempt_t *attempt, uint64_t next_use, bool two_passes) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  const bool usable = attempt->state == GMI_ATTEMPT_OPEN;
  if (usable) attempt->state = GMI_ATTEMPT_TAKEN;
  gmi_job_t *job = usable ? attempt->job : NULL;
  if (job && two_passes && job->passes.writes[0] && job->passes.writes[1] && !job->next_element)
    job->passes.now = GEMINI_PASS_RESULTS;
  if (job && !job->awaited) to_next_use(l, job, next_use);
  attempt_unref(attempt);
  pthread_mutex_unlock(&l->lock);
  return usable;
}
void gmi_attempt_drop(gmi_manager_t *m, gmi_attempt_t *attempt) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  attempt->state = GMI_ATTEMPT_DROPPED;
  attempt_unref(attempt);
  pthread_mutex_unlock(&l->lock);
}

/* The release increment of work_done publishes the written bytes to every thread that loads the count (acquire), with
 * or without a lock. Called with the lock held, as are the next two. */
static void slots_done(const gmi_job_t *job, uint32_t first, uint32_t end) {
  for (uint32_t i = first; i < end; i++) atomic_fetch_add_explicit(&job->slots[i]->work_done, 1, memory_order_release);
}

/* The next use of a second pass: behind all that is wanted soon, and before what is speculated. Gradients are written
 * again in the other order than parameters are used, so the one that was begun last comes first. Called with the lock
 * held. */
static uint64_t states_use(gmi_workers_t *l) { return UINT64_MAX - 1 - l->begun_states++; }

/* Begins the second pass of a job whose first one is done. Releases the lock to wake streams; the job may be gone
 * then. */
static void begin_states(gmi_workers_t *l, gmi_job_t *job) {
  slots_done(job, 0, job->passes.result_count);
  job->passes.now = GEMINI_PASS_STATES;
  job->next_element = job->done_elements = 0;
  job->next_use = job->awaited ? 0 : states_use(l);
  add_ready(l, job);
  l->finished++;
  pthread_cond_broadcast(&l->done);
  pthread_cond_broadcast(&l->more);
  pthread_mutex_unlock(&l->lock);
  l->m->device.ops->stream.flag_wake(l->m->device.self);
  pthread_mutex_lock(&l->lock);
}

/* Removes a job whose elements are all done, and frees it. Releases the lock to wake streams, as the device takes its
 * own locks. */
static void finish(gmi_workers_t *l, gmi_job_t *job) {
  *(job->previous ? &job->previous->next : &l->first) = job->next;
  *(job->next ? &job->next->previous : &l->last) = job->previous;
  slots_done(job, job->passes.now == GEMINI_PASS_STATES ? job->passes.result_count : 0, job->slot_count);
  l->pending--;
  l->deferred -= job->deferred;
  l->finished++;
  if (job->attempt) {
    job->attempt->job = NULL;
    attempt_unref(job->attempt);
  }
  pthread_cond_broadcast(&l->done);
  if (!l->first) pthread_cond_broadcast(&l->more); /* a worker that stops waits for an empty queue */
  pthread_mutex_unlock(&l->lock);
  l->m->device.ops->stream.flag_wake(l->m->device.self);
  if (job->user_refs) atomic_fetch_sub(job->user_refs, 1);
  free(job);
  pthread_mutex_lock(&l->lock);
}

static void *work(void *user) {
  worker_t *me = user;
  gmi_workers_t *l = me->workers;
  if (l->bound) sched_setaffinity(0, sizeof l->cores, &l->cores); /* refused: it runs where the process may */
  gmi_thread_give_way(); /* to the threads that queue work for the GPU, which would wait for them */
  pthread_mutex_lock(&l->lock);
  while (!l->stop || l->first) {
    gmi_job_t *job = pick(l);
    if (!job) {
      pthread_cond_wait(&l->more, &l->lock);
      continue;
    }
    if (job->state == JOB_READY) run_slice(l, job, me->index);
    else prepare(l, job);
    if (job->done_elements < job->span.element_count) continue;
    if (job->passes.now == GEMINI_PASS_RESULTS && !job->passes.alone) begin_states(l, job);
    else finish(l, job);
  }
  pthread_mutex_unlock(&l->lock);
  return NULL;
}

/* Those that the calling thread may run on; its new threads get the same. More than 1024: all that are online. */
static long usable_cores(void) {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
}

/* With more workers than there are cores near, as by default of a process that may use the whole machine, all cores
 * serve. */
static void bind_to(gmi_workers_t *l, const cpu_set_t *near, uint32_t threads) {
  l->bound = near && (uint32_t)CPU_COUNT(near) >= threads;
  if (!l->bound) return;
  l->cores = *near;
  gmi_log(l->m, GEMINI_LOG_INFO, "%u update workers on %d cores near the host tier's memory", threads, CPU_COUNT(near));
}

gemini_status_t gmi_workers_open(gmi_manager_t *m, uint32_t threads, const cpu_set_t *near) {
  if (!threads) {
    long cores = usable_cores();
    threads = cores > WORKERS_LIMIT ? WORKERS_LIMIT : cores > 1 ? (uint32_t)cores - 1 : 1;
  }
  gmi_workers_t *l = calloc(1, sizeof *l);
  if (!l) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the update workers");
  pthread_mutex_init(&l->lock, NULL);
  pthread_cond_init(&l->more, NULL);
  pthread_cond_init(&l->done, NULL);
  l->m = m;
  m->update.workers = l;
  bind_to(l, near, threads);
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
  enter_queue(l, job);
  job->next_element = job->done_elements = 0;
  if (job->passes.now == GEMINI_PASS_STATES) job->next_use = states_use(l);
  *(l->last ? &l->last->next : &l->first) = job;
  l->last = job;
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
  uint64_t last = l->submitted; /* later jobs of other threads must not prolong the wait */
  while (l->first && l->first->number <= last) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
  gmi_wait_end(m, &wait);
}

/* Puts the jobs of the slot's work up to count before all others; of jobs with two passes whose results it is, the
 * first one alone. Called with the lock held. */
static void await_jobs(gmi_workers_t *l, const gmi_slot_t *slot, uint64_t count) {
  for (gmi_job_t *job = l->first; job; job = job->next) {
    for (uint32_t i = job->passes.now == GEMINI_PASS_STATES ? job->passes.result_count : 0; i < job->slot_count; i++) {
      if (job->slots[i] != slot || job->after[i] >= count) continue;
      job->awaited |= job->passes.now != GEMINI_PASS_RESULTS || i >= job->passes.result_count;
      to_next_use(l, job, 0);
      break;
    }
  }
}
void gmi_workers_wait_slot(gmi_manager_t *m, gmi_slot_t *slot, uint64_t count) {
  gmi_workers_t *l = m->update.workers;
  gmi_wait_t wait;
  if (atomic_load_explicit(&slot->work_done, memory_order_acquire) >= count) return;
  pthread_mutex_lock(&l->lock);
  await_jobs(l, slot, count);
  pthread_mutex_unlock(&l->lock);
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_CHUNK, (uint64_t)(slot - m->host.slots));
  pthread_mutex_lock(&l->lock);
  while (atomic_load_explicit(&slot->work_done, memory_order_acquire) < count) pthread_cond_wait(&l->done, &l->lock);
  pthread_mutex_unlock(&l->lock);
  gmi_wait_end(m, &wait);
}

/* failure is stored before the release increment, so that a reader of the count sees it. The increment and the
 * broadcast are under the lock, as the waiters check the count under it. */
void gmi_workers_work_done(gmi_manager_t *m, gmi_slot_t *slot, gemini_status_t status, const char *message) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  slot->failure = status;
  free(slot->failure_text);
  slot->failure_text = status ? strdup(message) : NULL;
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

/* The slices of part of an iteration are not like the others: those beside the backward pass share the memory with its
 * copies. Called with the lock held. */
static double rate(gmi_workers_t *l, uint32_t pass) {
  /* A plan without two passes would never correct what was measured of them then. */
  if (pass != GEMINI_PASS_BOTH && l->iterations <= COLD) return 0;
  const uint64_t elements = l->passes[pass].updated.elements - l->passes[pass].begun[0].elements;
  if (elements)
    l->passes[pass].ns_per_element = (l->passes[pass].updated.ns - l->passes[pass].begun[0].ns) / (double)elements;
  return l->passes[pass].ns_per_element;
}

void gmi_workers_iteration(gmi_manager_t *m) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  for (uint32_t pass = 0; pass < PASSES; pass++) {
    (void)rate(l, pass);
    const bool cold = pass != GEMINI_PASS_BOTH && l->iterations <= COLD;
    l->passes[pass].begun[0] = cold ? l->passes[pass].updated : l->passes[pass].begun[1];
    l->passes[pass].begun[1] = l->passes[pass].updated;
  }
  l->iterations++;
  pthread_mutex_unlock(&l->lock);
}

double gmi_workers_ns_per_element(gmi_manager_t *m, uint32_t pass) {
  gmi_workers_t *l = m->update.workers;
  pthread_mutex_lock(&l->lock);
  const double ns = rate(l, pass);
  pthread_mutex_unlock(&l->lock);
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

/* failure_text is read without the lock: it does not change once failure is set. */
gemini_status_t gmi_workers_failure(gmi_manager_t *m) {
  pthread_mutex_lock(&m->update.workers->lock);
  gemini_status_t failure = m->update.workers->failure;
  pthread_mutex_unlock(&m->update.workers->lock);
  if (!failure) return GEMINI_OK;
  if (failure == GEMINI_ERR_DEVICE && m->groups.failure(m)) return GEMINI_ERR_PEER; /* its message names the rank */
  return gmi_fail(failure, m->update.workers->failure_code, "%s", m->update.workers->failure_text);
}
