/* Who waits for what: the threads that wait inside the library, a dump of the manager's state in words, and the
 * watchdog. SPDX-License-Identifier: Apache-2.0
 *
 * Every wait that can last (for the manager's lock, for queued work, transfers, workers, the system) lies between
 * gmi_wait_begin() and gmi_wait_end(). A thread that waits with the manager's lock leaves the records consistent before
 * it waits, and needs watch.lock to go on: a thread that holds watch.lock may read them without the manager's lock. */
#ifndef GMI_WATCH_H
#define GMI_WATCH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "gemini.h"

typedef enum gmi_wait_kind {
  GMI_WAIT_LOCK,     /* the manager's */
  GMI_WAIT_STREAM,   /* work queued on a stream; number: its index */
  GMI_WAIT_CHUNK,    /* an update, a norm or a transfer in a host slot; number: which slot */
  GMI_WAIT_ROOM,     /* any update or transfer to end, for room on the host */
  GMI_WAIT_FILES,    /* transfers from and to files; number: how many there were */
  GMI_WAIT_WORKERS,  /* every update submitted; number: how many were pending */
  GMI_WAIT_COMMIT,   /* checkpoint files to be synced and their index to be written */
  GMI_WAIT_FD,       /* the caller's file; number: its descriptor */
  GMI_WAIT_CALLBACK, /* the caller's update callback */
  GMI_WAIT_PLAN,     /* the planner */
  GMI_WAIT_MEMORY,   /* the system, to make host memory, and the device and the files' engine, to lock it */
  GMI_WAIT_TEXT,     /* the file of a trace or a timeline */
  GMI_WAIT_SPACE,    /* space for chunks in files, to be reserved or given back */
  GMI_WAIT_DRIVER,   /* the device, to change its memory or its streams */
  GMI_WAIT_KINDS
} gmi_wait_kind_t;

/* A wait under way, on the stack of the thread that waits. */
typedef struct gmi_wait {
  struct gmi_wait *next, *previous;
  const char *function; /* of the public interface; static storage */
  gmi_wait_kind_t kind;
  uint32_t thread; /* as the system numbers it */
  uint64_t number; /* says which one, as the list of kinds above has it; 0 where it has nothing */
  uint64_t since_ns, told_ns;
  bool has_lock; /* the manager's */
} gmi_wait_t;

typedef struct gmi_watch {
  pthread_mutex_t lock; /* after the manager's; guards the list of waits */
  gmi_wait_t *first;
  const char *_Atomic holder; /* function that took the manager's lock last */
  _Atomic uint32_t holder_thread;
  pthread_cond_t stopped;
  pthread_t thread; /* the watchdog */
  bool runs, stop;
} gmi_watch_t;

struct gmi_manager;
void gmi_watch_init(struct gmi_manager *m);
gemini_status_t gmi_watchdog_start(struct gmi_manager *m);
void gmi_watchdog_stop(struct gmi_manager *m); /* no log is being sent any more */
void gmi_watch_destroy(struct gmi_manager *m);
void gmi_watch_forked(void); /* in a child: the thread has another number */

/* function: NULL where this thread holds the manager's lock, then it is the one that took it. */
void gmi_wait_begin(struct gmi_manager *m, gmi_wait_t *wait, const char *function, gmi_wait_kind_t kind,
                    uint64_t number);
void gmi_wait_end(struct gmi_manager *m, gmi_wait_t *wait);
void gmi_watch_locked(struct gmi_manager *m, const char *function); /* this thread has taken the lock */

/* For the dump: how the records may be read without waiting for whoever has the manager's lock. */
typedef enum {
  GMI_READING_NOT,    /* they are being changed */
  GMI_READING_LOCKED, /* the lock was free, and is taken */
  GMI_READING_FROZEN  /* watch.lock is held, and with it who has the manager's, in a wait */
} gmi_reading_t;
gmi_reading_t gmi_reading_begin(struct gmi_manager *m);
void gmi_reading_end(struct gmi_manager *m, gmi_reading_t reading);
void gmi_watch_write_holder(struct gmi_manager *m, FILE *file); /* the function that has the lock, and its thread */
void gmi_watch_write_waits(struct gmi_manager *m, gmi_reading_t reading, FILE *file); /* a line for each */
/* What a stream of the library's own does; NULL: it is the caller's. */
const char *gmi_stream_job(struct gmi_manager *m, uint32_t stream);

#endif
