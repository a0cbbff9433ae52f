/* Host workers: they run updates on chunks that live on the host, and sum these for norms.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_WORKERS_H
#define GMI_WORKERS_H

#include "core/manager.h"

typedef struct gmi_job gmi_job_t;
struct gmi_job {
  gmi_job_t *next, *previous;
  uint64_t number;   /* in the order of submission, from 1 */
  uint64_t next_use; /* of the chunks, position as of gmi_chunk_t; set by the caller, as what follows */
  gemini_update_fn fn;
  void *user;
  gemini_update_span_t span;
  uint8_t *const *chunks[8]; /* of the span's arenas: where each lies, in the place of ptr; NULL: ptr has all */
  uint32_t fence_count, slot_count, zero_count;
  bool deferred;       /* it was; gmi_workers_deferred() counts it */
  bool norm;           /* it changes nothing: who waits for it looks whether fn ran, and a failure is no update's */
  gmi_fence_t *fences; /* device work to wait for */
  gmi_slot_t **slots;  /* whose work_done grows when this is done */
  uint64_t *after;     /* [slot_count] work_done to wait for first */
  struct {
    void *address;
    uint64_t bytes;
  } *zeros;                  /* to clear before fn runs */
  uint32_t element_bytes[8]; /* of the span's arenas */
  /* the workers' own */
  uint64_t next_element, done_elements; /* of the span: handed to workers, done */
  gmi_job_t *next_ready;
  uint32_t state, reserved;
};
enum {
  GMI_WORKERS_SLICE = 1 << 18
}; /* elements that a worker takes at once, at most: some 7 MB of memory, less than a millisecond */
gemini_status_t gmi_workers_open(gmi_manager_t *m, uint32_t threads);
void gmi_workers_close(gmi_manager_t *m);                /* finishes what is queued */
void gmi_workers_push(gmi_manager_t *m, gmi_job_t *job); /* takes the job: one allocation, freed when done */
uint64_t gmi_workers_pending(gmi_manager_t *m);
uint64_t gmi_workers_deferred(gmi_manager_t *m); /* of these, those that were deferred */
void gmi_workers_nudge(gmi_manager_t *m);        /* as if something had ended */
/* Blocks until nothing is pending. function: that waits; NULL: the lock is held. */
void gmi_workers_drain(gmi_manager_t *m, const char *function);
void gmi_workers_wait_slot(gmi_manager_t *m, gmi_slot_t *slot, uint64_t count); /* blocks; lock held */
/* Other work on a slot is over: its user, its failure. Any thread, no lock. */
void gmi_workers_work_done(gmi_manager_t *m, gmi_slot_t *slot, gemini_status_t status, const char *message);
uint64_t gmi_workers_finished(gmi_manager_t *m); /* jobs and other work that are over */
/* Blocks until there are more; lock held, and kind says what for. The other is for threads of the library's own,
 * without. */
void gmi_workers_wait(gmi_manager_t *m, uint64_t finished, gmi_wait_kind_t kind, uint64_t number);
void gmi_workers_idle(gmi_manager_t *m, uint64_t finished);
double gmi_workers_ns_per_element(gmi_manager_t *m);   /* of updates */
gemini_status_t gmi_workers_failure(gmi_manager_t *m); /* of an update; stays: bytes are wrong from then on */
/* For timelines: when workers ran. Hands out the oldest ones and forgets them; what nobody asks for is lost. */
typedef struct gmi_workers_interval {
  uint64_t begin_ns, end_ns;
  uint32_t worker, norm; /* norm: of one, else of an update */
} gmi_workers_interval_t;
void gmi_workers_record(gmi_manager_t *m, bool on);
uint32_t gmi_workers_recorded(gmi_manager_t *m, gmi_workers_interval_t *intervals_out, uint32_t limit);

#endif
