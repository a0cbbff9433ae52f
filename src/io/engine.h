/* Asynchronous reads and writes of files, through io_uring, or through threads where io_uring is forbidden.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Request: one read or write of a contiguous range of a file, of any size. Its done function is called exactly once,
 * on a thread of the engine; requests complete in any order. Part: the section of a request that one system call moves.
 * Short transfers are continued, EINTR and EAGAIN are retried. Urgent requests overtake all others that the kernel does
 * not have yet, including the remaining parts of a long request that has begun. The engine knows nothing of managers or
 * chunks. */
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
  /* Set by the caller. The engine owns request and buffer from submit until it calls done. */
  void *buffer;        /* O_DIRECT files: buffer, size and offset are multiples of the file's alignment */
  uint64_t size_bytes; /* not 0; may exceed 2 GiB */
  uint64_t offset_bytes;
  uint32_t file; /* index from gmi_engine_file_add() */
  bool write, urgent;
  bool reserved[2];
  /* May free the request and submit others; must not wait for the engine nor close it. */
  void (*done)(gmi_request_t *request);
  void *user;
  /* Results, set before done: */
  gemini_status_t status; /* OK; INVALID (nothing was transferred); OOM_FILE (gmi_file_status()); IO (all else: EIO, the
                             file ends early, ...) */
  int native_code;        /* errno; 0 when no system call failed (the file ends early) */
  uint64_t done_bytes;    /* bytes transferred from the start on without a hole */
  const char *detail;     /* static text: the cause where native_code does not tell it; else "" */
  /* Private to the engine. Guarded by its lock. */
  gmi_request_t *next;
  uint64_t issued_bytes; /* cut into parts so far */
  uint64_t failed_bytes; /* lowest offset in the request at which a part failed; UINT64_MAX: none did */
  uint32_t parts;        /* that are not over */
  uint32_t private_flags;
};

typedef struct gmi_engine_config {
  uint32_t kind;        /* GMI_ENGINE_*; AUTO: io_uring where it works, else threads; URING: fails where it does not */
  uint32_t depth;       /* parts in the kernel at once, at most 4096; 0 = default */
  uint64_t part_bytes;  /* longest part, rounded down to 4 KiB; 0 = default, the size measured fastest */
  const gmi_sys_t *sys; /* NULL = gmi_sys_real */
} gmi_engine_config_t;

typedef struct gmi_engine_figures {
  uint32_t kind;           /* URING or THREADS */
  uint32_t depth, threads; /* parts in the kernel at once; threads that the engine runs */
  char features[256]; /* "io_uring: single issuer, deferred task running, registered files, 3 registered buffers" or
                              "threads: io_uring is unavailable (io_uring_setup: Operation not permitted)" */
  uint64_t read_bytes, written_bytes, requests, parts, retries;
  uint64_t in_flight; /* requests submitted whose done has not been called */
} gmi_engine_figures_t;

/* The alignment of offsets, sizes and buffers for an O_DIRECT descriptor: what the kernel reports, else 4096. */
uint32_t gmi_direct_alignment_bytes(const gmi_sys_t *sys, int fd);

/* INVALID: a number in config is out of range; UNSUPPORTED: URING was requested and does not work; OOM_SYSTEM. */
gemini_status_t gmi_engine_open(const gmi_engine_config_t *config, gmi_engine_t **engine_out);
/* Blocks until all submitted requests are done. NULL is accepted. Threads: no other call may run. */
void gmi_engine_close(gmi_engine_t *engine);
/* Registers an open descriptor. The caller keeps it and must not close it before its requests are done; a ring holds a
 * reference to the open file until the engine is closed. direct: it was opened with O_DIRECT. INVALID:
 * GMI_ENGINE_FILES_LIMIT is reached. Threads: any. */
gemini_status_t gmi_engine_file_add(gmi_engine_t *engine, int fd, bool direct, uint32_t *file_out);
/* Another descriptor takes the place of one that was registered, of which no request is under way; the engine lets that
 * one go. Not direct. Threads: any. */
void gmi_engine_file_change(gmi_engine_t *engine, uint32_t file, int fd);
/* Registers memory that will hold buffers, so that the kernel need not pin pages with each transfer. Call it for each
 * range as it is committed: its pages are touched and pinned now. INVALID: the memory overlaps a registered buffer. A
 * refusal by the system (RLIMIT_MEMLOCK, number of buffers) is no failure: transfers work without. Threads: any, not in
 * done. */
gemini_status_t gmi_engine_buffer_add(gmi_engine_t *engine, void *base, uint64_t size_bytes);
/* Unregisters all buffers that overlap this memory. Call it before the memory is unmapped or given back to the system,
 * with no request on it in flight: otherwise its pages stay pinned, and transfers to new pages at these addresses would
 * go to the old pages. Threads: any, not in done. */
void gmi_engine_buffer_remove(gmi_engine_t *engine, void *base, uint64_t size_bytes);
/* Submits a batch under one lock. Never blocks on I/O and never fails: a request that cannot be carried out fails
 * through done. Threads: any. */
void gmi_engine_submit(gmi_engine_t *engine, gmi_request_t *const *requests, uint32_t count);
void gmi_engine_figures(gmi_engine_t *engine, gmi_engine_figures_t *figures_out);

#endif
