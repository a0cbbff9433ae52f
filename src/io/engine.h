/* Reads and writes of files that go on by themselves: io_uring, or threads where that is forbidden.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A request is submitted and its done function called once when it is over, in any order, on a thread of the engine:
 * completion is per request. Urgent requests go ahead of all others that have not been handed to the kernel, also of
 * the rest of a long one that has been begun. A request may be of any size: it is cut into parts, short transfers go
 * on, EINTR and EAGAIN are tried again. Knows nothing of managers or chunks. */
#ifndef GMI_ENGINE_H
#define GMI_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "io/sys.h"

typedef struct gmi_engine gmi_engine_t;
typedef struct gmi_request gmi_request_t;

enum { GMI_ENGINE_AUTO = 0, GMI_ENGINE_URING = 1, GMI_ENGINE_THREADS = 2 };
enum { GMI_ENGINE_FILES_LIMIT = 256 };

struct gmi_request {
  /* Set by the caller. Request and buffer are the engine's from submit until done is called. */
  void *buffer;        /* O_DIRECT files: buffer, size and offset are multiples of the file's alignment */
  uint64_t size_bytes; /* not 0; may pass 2 GiB */
  uint64_t offset_bytes;
  uint32_t file; /* of gmi_engine_file_add() */
  bool write, urgent;
  bool reserved[2];
  void (*done)(gmi_request_t *request); /* may submit others; must not wait for or close the engine */
  void *user;
  /* Results, set before done: */
  gemini_status_t status; /* OK; INVALID (nothing was transferred); OOM_FILE (gmi_file_status()); IO (all else: EIO, the
                             file ends early, ...) */
  int native_code;        /* errno, or 0 when the system call did not fail (an early end) */
  uint64_t done_bytes;    /* transferred from the start on, without a hole */
  const char *detail;     /* what was wrong, in static words, where native_code does not say it; else "" */
  /* The engine's own: */
  gmi_request_t *next;
  uint64_t issued_bytes; /* cut into parts so far */
  uint64_t failed_bytes; /* lowest position where a part failed */
  uint32_t parts;        /* not over yet */
  uint32_t private_flags;
};

typedef struct gmi_engine_config {
  uint32_t kind;        /* GMI_ENGINE_*; AUTO: io_uring where it works, else threads; URING: fails where it does not */
  uint32_t depth;       /* parts in the kernel at once, at most 4096; 0 = chosen */
  uint64_t part_bytes;  /* longest part; 0 = what was measured best; rounded down to 4 KiB */
  const gmi_sys_t *sys; /* NULL = gmi_sys_real */
} gmi_engine_config_t;

typedef struct gmi_engine_figures {
  uint32_t kind;           /* URING or THREADS */
  uint32_t depth, threads; /* parts in the kernel at once; threads of the engine's own */
  char features[256]; /* "io_uring: single issuer, deferred task running, registered files, 3 registered buffers" or
                              "threads: io_uring is not to be had (io_uring_setup: Operation not permitted)" */
  uint64_t read_bytes, written_bytes, requests, parts, retries;
  uint64_t in_flight; /* requests submitted and not done */
} gmi_engine_figures_t;

/* What positions, sizes and buffers of an O_DIRECT descriptor must be multiples of: as the system says, else 4096. */
uint32_t gmi_direct_alignment_bytes(const gmi_sys_t *sys, int fd);

/* INVALID: a number of the config is out of range; UNSUPPORTED: URING was asked for and cannot be had; OOM_SYSTEM. */
gemini_status_t gmi_engine_open(const gmi_engine_config_t *config, gmi_engine_t **engine_out);
/* Finishes what was submitted (every done is called). NULL is accepted. Threads: no other call may run. */
void gmi_engine_close(gmi_engine_t *engine);
/* Registers an open descriptor (stays the caller's; must outlive its requests; the open file itself lives until the
 * engine is closed). direct: it was opened with O_DIRECT. INVALID: GMI_ENGINE_FILES_LIMIT is reached. Threads: any. */
gemini_status_t gmi_engine_file_add(gmi_engine_t *engine, int fd, bool direct, uint32_t *file_out);
/* Tells the engine of memory that buffers will lie in, so that the kernel need not pin it each time; parts may come as
 * memory is committed. Its pages are touched and pinned now. That the system refuses (RLIMIT_MEMLOCK, number of
 * buffers) is no failure: transfers go without. Threads: any, not in done. */
gemini_status_t gmi_engine_buffer_add(gmi_engine_t *engine, void *base, uint64_t size_bytes);
/* Forgets all memory told of that overlaps this. To be called before it is unmapped or given back to the system, with
 * no request on it in flight: else its pages stay pinned, and transfers to new pages at its addresses would go to the
 * old ones. Threads: any, not in done. */
void gmi_engine_buffer_remove(gmi_engine_t *engine, void *base, uint64_t size_bytes);
/* A batch, in one go. Never blocks on I/O and never fails: what cannot be done fails through done. Threads: any. */
void gmi_engine_submit(gmi_engine_t *engine, gmi_request_t *const *requests, uint32_t count);
void gmi_engine_figures(gmi_engine_t *engine, gmi_engine_figures_t *figures_out);

#endif
