/* What engine.c and the two ways of moving bytes, uring.c and threads.c, share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * engine.c keeps requests that wait and cuts them into parts; a backend takes parts, moves their bytes and brings
 * the results back. How many parts of what may be in the kernel at once is decided in engine.c, except that a backend
 * takes no more than its depth. */
#ifndef GMI_BACKEND_H
#define GMI_BACKEND_H

#include <pthread.h>

#include "io/engine.h"

enum { GMI_PART_LIMIT_BYTES = 1 << 30 }; /* what the kernel takes at once is a little below 2 GiB */

typedef struct gmi_part {
  gmi_request_t *request;
  uint8_t *buffer;
  uint64_t offset_bytes; /* in the file */
  uint32_t size_bytes;   /* still to move; at most GMI_PART_LIMIT_BYTES */
  uint32_t whole_bytes;  /* to move at first */
  int fd;
  uint32_t file;
  bool write, urgent;
  uint32_t tries; /* in a row that moved nothing */
} gmi_part_t;

typedef struct gmi_engine_file {
  int fd;
  uint32_t alignment_bytes;          /* 1: not O_DIRECT */
  gmi_request_t *first[2], **end[2]; /* by urgency: not wholly cut into parts */
  uint64_t others_bytes;             /* in the kernel, of requests that are not urgent */
} gmi_engine_file_t;

typedef struct gmi_backend {
  /* Called with the lock held, when there may be work for a thread that sleeps. */
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
  void *self; /* the backend's */
  uint32_t kind, depth, threads;
  uint32_t part_bytes;
  uint32_t others_parts_limit; /* in the kernel; the rest of depth is kept for urgent ones */
  uint64_t others_bytes_limit; /* in the kernel, of one file */

  pthread_mutex_t lock; /* guards what follows; never held in done, nor while bytes move */
  bool stop;
  uint32_t asleep; /* threads that only wake() brings back */
  uint32_t file_count;
  uint32_t turn[2];    /* by urgency: the file whose turn it is */
  uint32_t waiting[2]; /* by urgency: requests in the lists of all files */
  uint32_t others_parts;
  gmi_request_t *refused, **refused_end; /* have their status; to be finished by a thread of the backend */
  uint64_t read_bytes, written_bytes, requests, parts, retries, in_flight;
  char features[256];
  gmi_engine_file_t files[GMI_ENGINE_FILES_LIMIT];
};

/* Set engine's backend, self and features, and start its threads; on failure nothing is left behind. */
gemini_status_t gmi_uring_open(gmi_engine_t *engine);
gemini_status_t gmi_threads_open(gmi_engine_t *engine);

/* With the lock held: is there anything to take; take the next part; take all refused requests; is nothing left. */
bool gmi_engine_ready(const gmi_engine_t *engine);
bool gmi_engine_next(gmi_engine_t *engine, gmi_part_t *part_out);
gmi_request_t *gmi_engine_refused(gmi_engine_t *engine);
bool gmi_engine_idle(const gmi_engine_t *engine);

/* Without the lock. Finishes a list of refused requests. */
void gmi_engine_finish(gmi_engine_t *engine, gmi_request_t *list);
/* Bytes moved, or a negative errno. True: the part is not over, is to be tried again after that many microseconds.
 * False: it is over, and may have been its request's last, so that done has been called. */
bool gmi_engine_result(gmi_engine_t *engine, gmi_part_t *part, int64_t result, uint32_t *delay_us_out);
/* As a result that no further try can mend. */
void gmi_engine_give_up(gmi_engine_t *engine, gmi_part_t *part, int error, const char *detail);

#endif
