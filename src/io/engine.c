/* The engine's front: queues requests, cuts them into parts for a backend, and turns the parts' results into requests'.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Submitting threads validate requests and append them to a list per file and urgency. A backend's threads take parts
 * from these lists and report results here. Everything shared is guarded by the engine's lock; done is called without
 * it, on a thread of the backend, so that it may submit further requests.
 *
 * Life of a request. It stays in its file's list until all of its bytes have been cut into parts (issued_bytes ==
 * size_bytes) or a part fails; `parts` counts those that are not over. The request is done when it is out of the list
 * and parts is 0. Parts are cut one at a time, when a backend asks: an urgent request can overtake the rest of a long
 * one, and a long request does not fill the kernel's queue.
 *
 * Choice of the next part: urgent requests before others; among files of the same urgency round robin; within a file in
 * the order of submission. Requests that are not urgent leave a quarter of the depth free and are limited to
 * OTHERS_BYTES per file, so that an urgent request finds a short queue in the kernel and in the drive. */
#include "io/engine.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/file_limit.h"
#include "base/status.h"
#include "io/backend.h"

enum {
  DEPTH_LIMIT = 4096,
  URING_DEPTH = 64,
  THREADS_DEPTH = 16,
  PART_BYTES = 2 << 20,
  PAGE_BYTES = 4096,
  /* Tries in a row that move nothing: the first TRIES_AT_ONCE follow each other at once, the next have pauses that
   * double from PAUSE_US to PAUSE_LIMIT_US, and after TRIES_LIMIT the part fails: after a little less than a second. */
  TRIES_AT_ONCE = 8,
  TRIES_LIMIT = 64,
  PAUSE_US = 1000,
  PAUSE_LIMIT_US = 16000
};
/* The most bytes that non-urgent requests of one file may have in the kernel at once. An urgent request has to wait for
 * them; they suffice to keep a drive busy that moves 8 GB/s with a latency of 2 ms. */
static const uint64_t OTHERS_BYTES = UINT64_C(16) << 20;

uint32_t gmi_direct_alignment_bytes(const gmi_sys_t *sys, int fd) {
  /* STATX_DIOALIGN came with Linux 6.1. Older headers have neither the flag nor the two fields, so both fields are read
   * at their fixed offsets in struct statx. A kernel that does not set the flag in stx_mask gives no answer: a page is
   * then assumed. */
  enum { DIOALIGN = 0x2000, MEMORY_AT = 0x98, OFFSET_AT = 0x9c };
  struct statx info;
  memset(&info, 0, sizeof info);
  if (!sys) sys = &gmi_sys_real;
  if (sys->statx(fd, "", AT_EMPTY_PATH, DIOALIGN, &info) || !(info.stx_mask & DIOALIGN)) return PAGE_BYTES;
  uint32_t memory, offset;
  memcpy(&memory, (const char *)&info + MEMORY_AT, sizeof memory);
  memcpy(&offset, (const char *)&info + OFFSET_AT, sizeof offset);
  uint32_t larger = memory > offset ? memory : offset;
  return larger && (larger & (larger - 1)) == 0 && larger <= GMI_PART_LIMIT_BYTES ? larger : PAGE_BYTES;
}

/* With AUTO, threads are used where io_uring does not work; features then says why. */
gemini_status_t gmi_engine_open(const gmi_engine_config_t *config, gmi_engine_t **engine_out) {
  if (config->kind > GMI_ENGINE_THREADS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file engine: kind is %u, must be 0 to %d", config->kind,
                    GMI_ENGINE_THREADS);
  if (config->depth > DEPTH_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file engine: depth is %u, must be at most %d", config->depth, DEPTH_LIMIT);
  if (config->part_bytes && (config->part_bytes < PAGE_BYTES || config->part_bytes > GMI_PART_LIMIT_BYTES))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file engine: part_bytes is %llu, must be 0 or %d to %d",
                    (unsigned long long)config->part_bytes, PAGE_BYTES, GMI_PART_LIMIT_BYTES);
  gmi_engine_t *e = calloc(1, sizeof *e);
  if (!e) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the file engine");
  pthread_mutex_init(&e->lock, NULL);
  e->sys = config->sys ? config->sys : &gmi_sys_real;
  e->part_bytes = config->part_bytes ? (uint32_t)config->part_bytes / PAGE_BYTES * PAGE_BYTES : PART_BYTES;
  e->others_bytes_limit = OTHERS_BYTES;
  e->refused_end = &e->refused;

  gemini_status_t status = GEMINI_ERR_UNSUPPORTED;
  char why[sizeof e->features] = "";
  if (config->kind != GMI_ENGINE_THREADS) {
    e->kind = GMI_ENGINE_URING;
    e->depth = config->depth ? config->depth : URING_DEPTH;
    e->others_parts_limit = e->depth - e->depth / 4;
    status = gmi_uring_open(e);
    if (status) snprintf(why, sizeof why, "%.200s", gmi_fail_message());
  }
  if (status && config->kind != GMI_ENGINE_URING) {
    e->kind = GMI_ENGINE_THREADS;
    e->depth = config->depth ? config->depth : THREADS_DEPTH;
    e->others_parts_limit = e->depth - e->depth / 4;
    status = gmi_threads_open(e);
    if (!status && why[0]) snprintf(e->features, sizeof e->features, "threads: %.200s", why);
  }
  if (status) {
    pthread_mutex_destroy(&e->lock);
    free(e);
    return status;
  }
  *engine_out = e;
  return GEMINI_OK;
}

void gmi_engine_close(gmi_engine_t *engine) {
  if (!engine) return;
  pthread_mutex_lock(&engine->lock);
  engine->stop = true;
  engine->backend->wake(engine);
  pthread_mutex_unlock(&engine->lock);
  engine->backend->close(engine);
  pthread_mutex_destroy(&engine->lock);
  free(engine);
}

gemini_status_t gmi_engine_file_add(gmi_engine_t *engine, int fd, bool direct, uint32_t *file_out) {
  gmi_engine_t *e = engine;
  uint32_t alignment_bytes = direct ? gmi_direct_alignment_bytes(e->sys, fd) : 1;
  pthread_mutex_lock(&e->lock);
  uint32_t file = e->file_count;
  if (file < GMI_ENGINE_FILES_LIMIT) {
    gmi_engine_file_t *f = &e->files[file];
    f->fd = fd;
    f->alignment_bytes = alignment_bytes;
    for (int urgent = 0; urgent < 2; urgent++) f->end[urgent] = &f->first[urgent];
    e->file_count++;
  }
  pthread_mutex_unlock(&e->lock);
  if (file >= GMI_ENGINE_FILES_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file engine: no more than %d files", GMI_ENGINE_FILES_LIMIT);
  /* Called without the lock: the ring backend waits for its own thread, which takes the lock. */
  if (e->backend->file_add) e->backend->file_add(e, file);
  *file_out = file;
  return GEMINI_OK;
}

void gmi_engine_file_change(gmi_engine_t *e, uint32_t file, int fd) {
  pthread_mutex_lock(&e->lock);
  GMI_ASSERT(file < e->file_count);
  e->files[file].fd = fd;
  e->files[file].alignment_bytes = 1;
  pthread_mutex_unlock(&e->lock);
  if (e->backend->file_add) e->backend->file_add(e, file);
}

gemini_status_t gmi_engine_buffer_add(gmi_engine_t *engine, void *base, uint64_t size_bytes) {
  if (!base || !size_bytes || size_bytes > UINTPTR_MAX - (uintptr_t)base)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file engine: a buffer of %llu bytes at %p", (unsigned long long)size_bytes,
                    base);
  return engine->backend->buffer_add ? engine->backend->buffer_add(engine, base, size_bytes) : GEMINI_OK;
}

void gmi_engine_buffer_remove(gmi_engine_t *engine, void *base, uint64_t size_bytes) {
  if (size_bytes && engine->backend->buffer_remove) engine->backend->buffer_remove(engine, base, size_bytes);
}

/* What is wrong with a request, in words for detail; NULL: nothing. Called with the lock held. */
static const char *fault_of(const gmi_engine_t *e, const gmi_request_t *r) {
  if (r->file >= e->file_count) return "no such file";
  uint64_t mask = e->files[r->file].alignment_bytes - 1;
  if (!r->buffer) return "the buffer is NULL";
  if (!r->size_bytes) return "the size is 0";
  if (r->size_bytes > INT64_MAX || r->offset_bytes > INT64_MAX - r->size_bytes)
    return "offset and size end beyond the largest file offset";
  if (r->size_bytes > UINTPTR_MAX - (uintptr_t)r->buffer) return "buffer and size end beyond the address space";
  if (r->offset_bytes & mask) return "the offset is no multiple of the file's alignment";
  if (r->size_bytes & mask) return "the size is no multiple of the file's alignment";
  if ((uintptr_t)r->buffer & mask) return "the buffer is not aligned as the file demands";
  return NULL;
}

/* An invalid request goes to the list of refused ones instead of failing the call: done must be called for it, too, and
 * on the engine's threads, never within submit, where the caller may hold its own locks. */
void gmi_engine_submit(gmi_engine_t *engine, gmi_request_t *const *requests, uint32_t count) {
  gmi_engine_t *e = engine;
  pthread_mutex_lock(&e->lock);
  for (uint32_t i = 0; i < count; i++) {
    gmi_request_t *r = requests[i];
    r->status = GEMINI_OK;
    r->native_code = 0;
    r->done_bytes = r->issued_bytes = 0;
    r->failed_bytes = UINT64_MAX;
    r->detail = "";
    r->parts = 0;
    r->next = NULL;
    e->in_flight++;
    e->requests++;
    const char *fault = fault_of(e, r);
    if (fault) {
      r->status = GEMINI_ERR_INVALID;
      r->native_code = EINVAL;
      r->detail = fault;
      *e->refused_end = r;
      e->refused_end = &r->next;
    } else {
      gmi_engine_file_t *f = &e->files[r->file];
      *f->end[r->urgent] = r;
      f->end[r->urgent] = &r->next;
      e->waiting[r->urgent]++;
    }
  }
  if (e->asleep && gmi_engine_ready(e)) e->backend->wake(e);
  pthread_mutex_unlock(&e->lock);
}

void gmi_engine_figures(gmi_engine_t *engine, gmi_engine_figures_t *figures_out) {
  gmi_engine_t *e = engine;
  gmi_engine_figures_t figures = { .kind = e->kind, .depth = e->depth, .threads = e->threads };
  pthread_mutex_lock(&e->lock);
  memcpy(figures.features, e->features, sizeof figures.features);
  figures.read_bytes = e->read_bytes;
  figures.written_bytes = e->written_bytes;
  figures.requests = e->requests;
  figures.parts = e->parts;
  figures.retries = e->retries;
  figures.in_flight = e->in_flight;
  pthread_mutex_unlock(&e->lock);
  *figures_out = figures;
}

/* Size of a request's next part: the configured size, rounded down to the file's alignment but at least one unit of it,
 * so that every part of a valid O_DIRECT request begins and ends at a multiple. */
static uint32_t part_bytes_of(const gmi_engine_t *e, const gmi_engine_file_t *f, const gmi_request_t *r) {
  uint32_t longest = e->part_bytes / f->alignment_bytes * f->alignment_bytes;
  if (!longest) longest = f->alignment_bytes;
  uint64_t left = r->size_bytes - r->issued_bytes;
  return left < longest ? (uint32_t)left : longest;
}

/* The next file, from turn[] on, that has a request of this urgency which may go to the kernel now;
 * GMI_ENGINE_FILES_LIMIT: none. A file with nothing in flight (others_bytes 0) is never held back by the byte limit, or
 * a part larger than the limit could not start at all. */
static uint32_t file_next(const gmi_engine_t *e, uint32_t urgent) {
  if (!e->waiting[urgent] || (!urgent && e->others_parts >= e->others_parts_limit)) return GMI_ENGINE_FILES_LIMIT;
  for (uint32_t i = 0; i < e->file_count; i++) {
    uint32_t file = (e->turn[urgent] + i) % e->file_count;
    const gmi_engine_file_t *f = &e->files[file];
    const gmi_request_t *r = f->first[urgent];
    if (!r) continue;
    if (!urgent && f->others_bytes && f->others_bytes + part_bytes_of(e, f, r) > e->others_bytes_limit) continue;
    return file;
  }
  return GMI_ENGINE_FILES_LIMIT;
}

bool gmi_engine_ready(const gmi_engine_t *engine) {
  return engine->refused || file_next(engine, 1) < GMI_ENGINE_FILES_LIMIT ||
         file_next(engine, 0) < GMI_ENGINE_FILES_LIMIT;
}

bool gmi_engine_idle(const gmi_engine_t *engine) {
  return !engine->refused && !engine->waiting[0] && !engine->waiting[1];
}

/* Removes a request from its file's list. Parts are cut from the first request of a list only, so a request that is
 * wholly cut, or has failed with bytes left to cut, is found at the head. */
static void unlist(gmi_engine_t *e, gmi_request_t *r) {
  gmi_engine_file_t *f = &e->files[r->file];
  gmi_request_t **at = &f->first[r->urgent];
  while (*at != r) at = &(*at)->next;
  *at = r->next;
  if (!r->next) f->end[r->urgent] = at;
  e->waiting[r->urgent]--;
}

bool gmi_engine_next(gmi_engine_t *engine, gmi_part_t *part_out) {
  gmi_engine_t *e = engine;
  uint32_t urgent = 1, file = file_next(e, 1);
  if (file == GMI_ENGINE_FILES_LIMIT) urgent = 0, file = file_next(e, 0);
  if (file == GMI_ENGINE_FILES_LIMIT) return false;
  gmi_engine_file_t *f = &e->files[file];
  gmi_request_t *r = f->first[urgent];
  uint32_t bytes = part_bytes_of(e, f, r);
  *part_out = (gmi_part_t){ .request = r,
                            .buffer = (uint8_t *)r->buffer + r->issued_bytes,
                            .offset_bytes = r->offset_bytes + r->issued_bytes,
                            .size_bytes = bytes,
                            .whole_bytes = bytes,
                            .fd = f->fd,
                            .file = file,
                            .write = r->write,
                            .urgent = urgent,
                            .buffered = f->alignment_bytes == 1 };
  r->issued_bytes += bytes;
  r->parts++;
  e->parts++;
  if (!urgent) {
    f->others_bytes += bytes;
    e->others_parts++;
  }
  e->turn[urgent] = file + 1;
  if (r->issued_bytes == r->size_bytes) unlist(e, r);
  return true;
}

gmi_request_t *gmi_engine_refused(gmi_engine_t *engine) {
  gmi_request_t *list = engine->refused;
  engine->refused = NULL;
  engine->refused_end = &engine->refused;
  return list;
}

void gmi_engine_finish(gmi_engine_t *engine, gmi_request_t *list) {
  uint64_t count = 0;
  for (gmi_request_t *r = list; r; r = r->next) count++;
  if (!count) return;
  pthread_mutex_lock(&engine->lock);
  engine->in_flight -= count;
  pthread_mutex_unlock(&engine->lock);
  while (list) {
    gmi_request_t *r = list;
    list = r->next; /* done may free it */
    r->done(r);
  }
}

/* Ends a part. Bytes that are left of it make the request fail with error and detail. The status that a request reports
 * is that of its lowest failing offset, whichever part failed first in time: done_bytes then counts bytes without a
 * hole. After the first failure no further parts are cut, but parts that a backend has are waited for, since the kernel
 * may still access the buffer. The thread that ends the last part calls done. */
static void over(gmi_engine_t *e, const gmi_part_t *part, int error, const char *detail) {
  gmi_request_t *r = part->request;
  gmi_engine_file_t *f = &e->files[part->file];
  pthread_mutex_lock(&e->lock);
  if (!part->urgent) {
    f->others_bytes -= part->whole_bytes;
    e->others_parts--;
  }
  uint64_t moved = part->whole_bytes - part->size_bytes;
  if (part->write) e->written_bytes += moved;
  else e->read_bytes += moved;
  if (part->size_bytes) {
    uint64_t at = part->offset_bytes - r->offset_bytes;
    if (at < r->failed_bytes) {
      r->failed_bytes = at;
      r->status = part->write ? gmi_file_status(error) : GEMINI_ERR_IO;
      r->native_code = error;
      r->detail = detail;
    }
    if (r->issued_bytes < r->size_bytes) {
      unlist(e, r);
      r->issued_bytes = r->size_bytes;
    }
  }
  bool last = --r->parts == 0 && r->issued_bytes == r->size_bytes;
  if (last) {
    r->done_bytes = r->failed_bytes < r->size_bytes ? r->failed_bytes : r->size_bytes;
    e->in_flight--;
  }
  pthread_mutex_unlock(&e->lock);
  if (last) r->done(r); /* may free the request */
}

void gmi_engine_give_up(gmi_engine_t *engine, gmi_part_t *part, int error, const char *detail) {
  over(engine, part, error, detail);
}

/* Outcomes: all bytes moved: over. Some moved: advance, try the rest. EINTR or EAGAIN: try again, at first without a
 * pause. 0 bytes (end of file, or a write that moves nothing) or another error: over, failed. */
bool gmi_engine_result(gmi_engine_t *engine, gmi_part_t *part, int64_t result, uint32_t *delay_us_out) {
  gmi_engine_t *e = engine;
  int error = result < 0 ? (int)-result : 0;
  *delay_us_out = 0;
  if (result > 0) {
    /* min() guards the arithmetic against a result larger than what was asked for. A short O_DIRECT transfer resumes at
     * the last multiple of the alignment that was reached, as the next one must begin at a multiple. */
    uint64_t moved = (uint64_t)result < part->size_bytes ? (uint64_t)result : part->size_bytes;
    if (moved < part->size_bytes) moved -= moved % e->files[part->file].alignment_bytes;
    part->buffer += moved;
    part->offset_bytes += moved;
    part->size_bytes -= (uint32_t)moved;
    if (!part->size_bytes) {
      over(e, part, 0, "");
      return false;
    }
    if (moved) part->tries = 0;
    else if (!part->write) result = 0; /* a read of less than one unit of alignment: the file ends within it */
  }
  if (result == 0) {
    over(e, part, 0, part->write ? "nothing was written" : "the file ends early");
    return false;
  }
  if (error && error != EINTR && error != EAGAIN) {
    over(e, part, error, "");
    return false;
  }
  if (++part->tries > TRIES_LIMIT) {
    over(e, part, error, error ? "gave up after many tries" : "each try wrote less than the file's alignment");
    return false;
  }
  if (part->tries > TRIES_AT_ONCE) {
    uint32_t doublings = part->tries - TRIES_AT_ONCE - 1;
    *delay_us_out = doublings < 4 ? (uint32_t)PAUSE_US << doublings : PAUSE_LIMIT_US;
  }
  pthread_mutex_lock(&e->lock);
  e->retries++;
  pthread_mutex_unlock(&e->lock);
  return true;
}
