/* The list of threads that wait inside the library, for gemini_manager_dump() and for the watchdog.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every wait that can take long (for the manager's lock, queued work, transfers, workers, the system) is enclosed by
 * gmi_wait_begin() and gmi_wait_end(). A thread that waits while it holds the manager's lock leaves the records
 * consistent before the wait and needs watch.lock to end the wait. While such a wait is in the list, the holder of
 * watch.lock may therefore read the records without the manager's lock. */
#ifndef GMI_WATCH_H
#define GMI_WATCH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "gemini.h"

typedef enum gmi_wait_kind {
  GMI_WAIT_LOCK,     /* the manager's lock */
  GMI_WAIT_STREAM,   /* work queued on a stream; number: its index */
  GMI_WAIT_CHUNK,    /* an update, a norm or a transfer on a host slot; number: index of the slot */
  GMI_WAIT_ROOM,     /* any update or transfer to end, for room on the host */
  GMI_WAIT_FILES,    /* transfers from and to files; number: how many were under way */
  GMI_WAIT_WORKERS,  /* every submitted update and norm; number: how many were pending */
  GMI_WAIT_COMMIT,   /* checkpoint files to be synced and their index to be written */
  GMI_WAIT_FD,       /* the caller's file; number: its descriptor */
  GMI_WAIT_CALLBACK, /* the caller's update callback */
  GMI_WAIT_PLAN,     /* the planner */
  GMI_WAIT_MEMORY,   /* the system to commit host memory, and the device and the file engine to page-lock it */
  GMI_WAIT_TEXT,     /* the file of a trace or a timeline */
  GMI_WAIT_SPACE,    /* file space for chunks to be reserved or given back */
  GMI_WAIT_DRIVER,   /* the device to change its memory or its streams */
  GMI_WAIT_RANKS,    /* the other ranks of a group; number: this rank */
  GMI_WAIT_KINDS
} gmi_wait_kind_t;

/* A wait under way, on the stack of the waiting thread. Guarded by watch.lock while it is in the list. */
typedef struct gmi_wait {
  struct gmi_wait *next, *previous;
  const char *function; /* the public function that waits, or in words (with a blank) what does; static storage */
  gmi_wait_kind_t kind;
  const char *what, *label;   /* RANKS: the sort of call (static storage), and what it is for; both NULL: not known */
  uint32_t thread;            /* thread id (gettid) */
  uint64_t number;            /* as described at the kind; 0 for kinds without a number */
  uint64_t since_ns, told_ns; /* told_ns: length of the wait when the watchdog last reported it; 0 = not yet */
  bool has_lock;              /* the thread holds the manager's lock during the wait */
} gmi_wait_t;

struct gmi_manager;
typedef struct gmi_watch {
  pthread_mutex_t lock; /* guards the list of waits and stop; taken after the manager's lock */
  gmi_wait_t *first;
  const char *_Atomic holder; /* Atomic: function that last took the manager's lock; relaxed, see gmi_watch_locked() */
  pthread_cond_t stopped;
  pthread_t thread; /* the watchdog */
  /* Writes the manager's state in words, one fact a line, and waits for nothing but locks that are held for moments.
   * NULL: the manager is being taken apart. Guarded by state_lock, which is held while it runs and taken first. */
  void (*write_state)(struct gmi_manager *m, FILE *file);
  pthread_mutex_t state_lock;
  bool runs, stop;
} gmi_watch_t;

void gmi_watch_init(struct gmi_manager *m);
gemini_status_t gmi_watchdog_start(struct gmi_manager *m, void (*write_state)(struct gmi_manager *m, FILE *file));
void gmi_watchdog_blind(struct gmi_manager *m); /* it reads nothing but waits after this returns */
void gmi_watchdog_stop(struct gmi_manager *m);  /* joins the watchdog: it sends no log after this returns */
void gmi_watch_destroy(struct gmi_manager *m);
void gmi_watch_forked(void); /* called in a forked child, where the thread has another id */

/* function: the public function that waits; NULL if this thread holds the manager's lock, then it is the function that
 * took the lock. */
void gmi_wait_begin(struct gmi_manager *m, gmi_wait_t *wait, const char *function, gmi_wait_kind_t kind,
                    uint64_t number);
/* The same for other ranks, as this one. what, label: of the call that all of them make; label may be NULL, else it
 * stays until the wait has ended. */
void gmi_wait_for_ranks(struct gmi_manager *m, gmi_wait_t *wait, const char *function, uint32_t rank, const char *what,
                        const char *label);
void gmi_wait_end(struct gmi_manager *m, gmi_wait_t *wait);
/* This thread has taken the manager's lock. Relaxed: the holder reads it for its own reports and for those of other
 * threads. A reader without the lock may get another holder's; it prints text for people. */
static inline void gmi_watch_locked(gmi_watch_t *watch, const char *function) {
  atomic_store_explicit(&watch->holder, function, memory_order_relaxed);
}

/* How the dump may read the records without blocking on the manager's lock. */
typedef enum {
  GMI_READING_NOT,    /* it may not: another thread is changing them */
  GMI_READING_LOCKED, /* this thread has taken the manager's lock, which was free */
  GMI_READING_FROZEN  /* this thread holds watch.lock, which keeps the manager's lock's holder in its wait */
} gmi_reading_t;
gmi_reading_t gmi_reading_begin(struct gmi_manager *m);
void gmi_reading_end(struct gmi_manager *m, gmi_reading_t reading);
void gmi_watch_write_holder(struct gmi_manager *m, FILE *file); /* the function that has the lock, and its thread */
void gmi_watch_write_waits(struct gmi_manager *m, gmi_reading_t reading, FILE *file); /* one line per wait */
/* Returns what one of the library's own streams does, or NULL for a caller's stream. */
const char *gmi_stream_job(struct gmi_manager *m, uint32_t stream);

#endif
