/* Host workers: threads that run updates on chunks on the host, and sum such chunks for norms.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_WORKERS_H
#define GMI_WORKERS_H

#include <sched.h>

#include "core/manager.h"

/* What becomes of a job that is speculated: shared by the job and the record of what is speculated, and freed with the
 * later one. Guarded by the workers' lock. */
typedef struct gmi_job gmi_job_t;
enum {
  GMI_ATTEMPT_OPEN,
  GMI_ATTEMPT_FAILED,  /* its function, or work that it waits for, failed: its results are not to be used */
  GMI_ATTEMPT_TAKEN,   /* it is as a job of an update from now on: a failure is one of the update */
  GMI_ATTEMPT_DROPPED, /* nobody wants its results: its function need not run */
};
typedef struct gmi_attempt {
  gmi_job_t *job; /* NULL: done */
  uint32_t refs, state;
} gmi_attempt_t;
/* Both give up the caller's reference, and the attempt must be OPEN or FAILED. take: false if it has failed; next_use:
 * from now on the job's; two_passes: it has two if it can, and has not begun. */
bool gmi_attempt_take(gmi_manager_t *m, gmi_attempt_t *attempt, uint64_t next_use, bool two_passes);
void gmi_attempt_drop(gmi_manager_t *m, gmi_attempt_t *attempt);

/* One piece of an update, or one chunk of a norm. The pointers point into the job's own allocation or to records that
 * outlive it. */
struct gmi_job {
  gmi_job_t *next, *previous;
  uint64_t number;     /* order of submission, from 1 */
  uint64_t next_use;   /* earliest gmi_chunk_next_use() of the chunks; the caller sets this and what follows */
  gemini_update_fn fn; /* or NULL, and try_fn */
  gemini_update_try_fn try_fn;
  void *user;
  _Atomic uint32_t *user_refs; /* NULL, or decremented when the job is done: user is not used any more */
  gemini_update_span_t span;
  uint64_t named_shift;      /* added to span.first_element for fn: of slices, where they lie in their arena */
  uint8_t *const *chunks[8]; /* for each arena: addresses of its chunks; NULL: span.ptr is contiguous */
  uint8_t *const *outs[8];   /* the same for what fn writes; NULL: as chunks */
  gmi_attempt_t *attempt;    /* of a job that is speculated; else NULL */
  struct {
    uint32_t now;          /* GEMINI_PASS_RESULTS: the first of two passes. STATES, set by the caller: the second one of
                            * a job that is done */
    bool alone;            /* RESULTS: the second one is not this job's */
    uint32_t writes[2];    /* bit per arena: what the first and the second pass write; 0: it cannot have two */
    uint32_t result_count; /* the first ones of slots: of results, which are done after the first pass */
  } passes;
  uint32_t fence_count, slot_count, zero_count;
  bool deferred;       /* counted by gmi_workers_deferred() */
  bool norm;           /* reads only: a failure is not an update's, and the caller checks whether fn ran */
  gmi_fence_t *fences; /* [fence_count] device work to wait for */
  gmi_slot_t **slots;  /* [slot_count] slots whose work_done this job increments when it is done */
  uint64_t *after;     /* [slot_count] value of work_done to wait for first */
  struct {
    void *address;
    uint64_t bytes;
  } *zeros;                  /* [zero_count] memory to clear before fn runs */
  uint32_t element_bytes[8]; /* for each arena */
  /* private to workers.c; guarded by its lock */
  uint64_t next_element, done_elements; /* elements of the span handed to workers; finished; in this pass */
  struct {
    gmi_job_t *next, *previous; /* previous: while it is queued */
  } lane;                       /* among those that are queued, or ready */
  uint32_t state;
  bool awaited; /* a thread waits for it */
};
enum { GMI_WORKERS_SLICE = 1 << 18 }; /* most elements in one slice: some 7 MB of memory, less than a millisecond */
/* near: the cores next to the host tier's memory, and so to the GPU, on which updates run fastest; NULL: not known. The
 * workers run there if there are as many. Borrowed until return. Called with the manager's lock held. */
gemini_status_t gmi_workers_open(gmi_manager_t *m, uint32_t threads, const cpu_set_t *near);
void gmi_workers_close(gmi_manager_t *m);                /* finishes all queued jobs, then joins the threads */
void gmi_workers_push(gmi_manager_t *m, gmi_job_t *job); /* owns the job, one allocation, and frees it when done */
uint64_t gmi_workers_pending(gmi_manager_t *m);
uint64_t gmi_workers_deferred(gmi_manager_t *m); /* pending jobs that were deferred */
void gmi_workers_nudge(gmi_manager_t *m);        /* wakes waits for gmi_workers_finished() to change */
/* Blocks until all jobs submitted so far are done. function: the public function that waits; NULL: the manager's lock
 * is held. */
void gmi_workers_drain(gmi_manager_t *m, const char *function);
/* Blocks until work_done is count; lock held. The jobs that it waits for come before all others. */
void gmi_workers_wait_slot(gmi_manager_t *m, gmi_slot_t *slot, uint64_t count);
/* A transfer on a slot has ended with status; message: why it failed. Any thread, no lock. */
void gmi_workers_work_done(gmi_manager_t *m, gmi_slot_t *slot, gemini_status_t status, const char *message);
uint64_t gmi_workers_finished(gmi_manager_t *m); /* jobs and transfers ever finished */
/* Both block until gmi_workers_finished() differs from finished. The first is for threads that hold the manager's lock;
 * kind and number describe the wait. The second is for the library's own threads, which do not hold it. */
void gmi_workers_wait(gmi_manager_t *m, uint64_t finished, gmi_wait_kind_t kind, uint64_t number);
void gmi_workers_idle(gmi_manager_t *m, uint64_t finished);
/* Calls the caller's function, and records its failure as the update's, or the attempt's unless that is NULL. Any
 * thread, no lock. */
void gmi_span_run(gmi_manager_t *m, gemini_update_fn fn, gemini_update_try_fn try_fn, void *user,
                  const gemini_update_span_t *span, gmi_attempt_t *attempt);
void gmi_workers_iteration(gmi_manager_t *m); /* an iteration begins */
/* The mean of one worker in such passes since the last iteration but one began; before that if there was no update
 * since. 0: there was none. */
double gmi_workers_ns_per_element(gmi_manager_t *m, uint32_t pass);
/* Of an update; permanent, as the bytes are wrong from then on. PEER, with the rank's name, if a group has failed, too,
 * as the work that an update waited for was the group's. The manager's lock. */
gemini_status_t gmi_workers_failure(gmi_manager_t *m);
/* For timelines: when workers ran. gmi_workers_recorded() removes the oldest intervals and returns them; intervals
 * beyond the limit of the table are not recorded. */
typedef struct gmi_workers_interval {
  uint64_t begin_ns, end_ns;
  uint32_t worker, norm; /* norm: 1 for a norm, 0 for an update */
} gmi_workers_interval_t;
void gmi_workers_record(gmi_manager_t *m, bool on);
uint32_t gmi_workers_recorded(gmi_manager_t *m, gmi_workers_interval_t *intervals_out, uint32_t limit);

#endif
