/* The interface between engine.c and the two backends that move bytes, uring.c and threads.c.
 * SPDX-License-Identifier: Apache-2.0
 *
 * engine.c queues requests and cuts them into parts. A backend takes parts with gmi_engine_next(), moves their bytes
 * and reports each outcome with gmi_engine_result() or gmi_engine_give_up(). engine.c limits how many parts and bytes
 * are in the kernel at once; a backend only has to take no more than depth parts. */
#ifndef GMI_BACKEND_H
#define GMI_BACKEND_H

#include <pthread.h>

#include "io/engine.h"

enum { GMI_PART_LIMIT_BYTES = 1 << 30 }; /* one read or write moves a little less than 2 GiB at most */

/* A contiguous section of a request, which one system call is to move. It belongs to the backend that took it; buffer,
 * offset_bytes and size_bytes advance together as short transfers make progress. */
typedef struct gmi_part {
  gmi_request_t *request;
  uint8_t *buffer;
  uint64_t offset_bytes; /* in the file */
  uint32_t size_bytes;   /* left to move; at most GMI_PART_LIMIT_BYTES */
  uint32_t whole_bytes;  /* size when it was cut; what it counts for in the limits */
  int fd;
  uint32_t file;
  bool write, urgent;
  bool buffered;  /* the file is not opened with O_DIRECT */
  uint32_t tries; /* in a row that moved nothing */
} gmi_part_t;

/* Index 0 of a pair is for requests that are not urgent, index 1 for urgent ones. end[] points to the link that will
 * hold the next request, so that appending needs no case for an empty list. */
typedef struct gmi_engine_file {
  int fd;
  uint32_t alignment_bytes;          /* 1: not O_DIRECT */
  gmi_request_t *first[2], **end[2]; /* by urgency: requests not yet wholly cut into parts, first in, first out */
  uint64_t others_bytes;             /* of requests that are not urgent: bytes in parts that a backend has */
} gmi_engine_file_t;

typedef struct gmi_backend {
  /* Called with the lock held, when there may be work and a thread sleeps, and at close. Must not block. */
  void (*wake)(gmi_engine_t *engine);
  void (*file_add)(gmi_engine_t *engine, uint32_t file);                                /* NULL: nothing to do */
  gemini_status_t (*buffer_add)(gmi_engine_t *engine, void *base, uint64_t size_bytes); /* NULL: nothing to do */
  void (*buffer_remove)(gmi_engine_t *engine, void *base, uint64_t size_bytes);         /* NULL: nothing to do */
  /* Returns when the threads have ended, which they do when stop is set and gmi_engine_idle(). */
  void (*close)(gmi_engine_t *engine);
} gmi_backend_t;

struct gmi_engine {
  const gmi_sys_t *sys;
  const gmi_backend_t *backend;
  void *self; /* the backend's record */
  uint32_t kind, depth, threads;
  uint32_t part_bytes;
  uint32_t others_parts_limit; /* parts of requests that are not urgent; the rest of depth is kept for urgent ones */
  uint64_t others_bytes_limit; /* of one file: limit of its others_bytes */

  pthread_mutex_t lock; /* Guards what follows. Innermost; never held while done runs or bytes move */
  bool stop;            /* the engine is closing: threads end once gmi_engine_idle() */
  uint32_t asleep;      /* threads that sleep until wake(); 0: a submit need not wake anyone */
  uint32_t file_count;
  uint32_t turn[2];    /* by urgency: the file that is served next (round robin) */
  uint32_t waiting[2]; /* by urgency: requests in the lists of all files */
  uint32_t others_parts;
  gmi_request_t *refused, **refused_end; /* invalid requests, status set; a thread of the backend calls their done */
  uint64_t read_bytes, written_bytes, requests, parts, retries, in_flight;
  char features[256];
  gmi_engine_file_t files[GMI_ENGINE_FILES_LIMIT];
};

/* Set the engine's backend, self and features and start its threads. A failure leaves no threads and no memory. */
gemini_status_t gmi_uring_open(gmi_engine_t *engine);
gemini_status_t gmi_threads_open(gmi_engine_t *engine);

/* These four are called with the lock held. */
bool gmi_engine_ready(const gmi_engine_t *engine);                /* is there a part to take, or a refused request? */
bool gmi_engine_next(gmi_engine_t *engine, gmi_part_t *part_out); /* takes the next part; false: there is none now */
gmi_request_t *gmi_engine_refused(gmi_engine_t *engine);          /* takes the list of refused requests */
bool gmi_engine_idle(const gmi_engine_t *engine); /* nothing is left to take; parts may still be in the kernel */

/* These are called without the lock: they call done. */
/* Calls done of each request in a list from gmi_engine_refused(). */
void gmi_engine_finish(gmi_engine_t *engine, gmi_request_t *list);
/* Reports the outcome of one system call for a part: bytes moved, or a negative errno. True: try what is left of the
 * part again, after *delay_us_out microseconds. False: the part is over; if it was the last of its request, done has
 * been called and the request may be gone. */
bool gmi_engine_result(gmi_engine_t *engine, gmi_part_t *part, int64_t result, uint32_t *delay_us_out);
/* Ends a part with error, for failures that another try cannot cure. */
void gmi_engine_give_up(gmi_engine_t *engine, gmi_part_t *part, int error, const char *detail);

#endif
