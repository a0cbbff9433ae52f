/* A file that holds blocks, without a name or with one, and the reservation of its space.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A file without a name vanishes when its last descriptor is closed. A named one stays, and is locked with flock()
 * while it is open. Threads: one at a time per file. */
#ifndef GMI_BLOCKFILE_H
#define GMI_BLOCKFILE_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"
#include "io/sys.h"

typedef struct gmi_blockfile {
  const gmi_sys_t *sys;
  int fd;                   /* -1: not open */
  bool direct;              /* opened with O_DIRECT */
  uint32_t alignment_bytes; /* of offsets, sizes and buffers; set only when direct */
  bool reserves;            /* the file system can reserve space (fallocate) */
  bool made;                /* has a name, and was created by this open */
  char *directory;          /* owned */
  char *path;               /* owned; NULL: it has no name */
  uint64_t opened_bytes;    /* size when it was opened */
  uint64_t size_bytes;
  uint64_t reserved_bytes; /* from the start on, bytes whose space is reserved, as far as the file system can do that */
} gmi_blockfile_t;

/* A text that collects limitations found while files are opened and resized, separated by "; ". */
typedef struct gmi_note {
  char text[200];
} gmi_note_t;
/* Appends a text unless note contains it already. */
void gmi_note_add(gmi_note_t *note, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum { GMI_BLOCKFILE_MAKE = 1 /* create a named file that does not exist */ };
/* directory: path of length bytes, not NUL-terminated. name: of a file in it; NULL: a file without a name. O_DIRECT is
 * used where the file system accepts it and block_bytes is a multiple of its alignment. BUSY: another process or
 * manager has locked the named file. FORMAT: what has this name is not a regular file of this user with a single name,
 * or, without GMI_BLOCKFILE_MAKE, there is no file. IO, OOM_FILE, OOM_SYSTEM. After a failure file is as if closed. */
gemini_status_t gmi_blockfile_open(gmi_blockfile_t *file, const gmi_sys_t *sys, const char *directory, size_t length,
                                   const char *name, uint32_t flags, uint64_t block_bytes, gmi_note_t *note);
/* Checks that an open file is a regular one, belongs to this process's user and has no second name: writing to it then
 * cannot damage another user's file or one that is linked under another name. FORMAT: it is not; the message says why.
 * IO. */
gemini_status_t gmi_file_check_own(const gmi_sys_t *sys, int fd, const char *path, struct stat *info_out);
/* Reserves space up to size_bytes, or gives back the space behind it. OOM_FILE: the message names the bytes asked for
 * and the bytes free; IO. On failure nothing changed. */
gemini_status_t gmi_blockfile_resize(gmi_blockfile_t *file, uint64_t size_bytes, gmi_note_t *note);
/* fsync() of a directory: makes the names of files created or renamed in it durable. */
gemini_status_t gmi_directory_sync(const gmi_sys_t *sys, const char *directory);
/* Unlinks a named file, so that it vanishes when it is closed. */
void gmi_blockfile_remove(const gmi_blockfile_t *file);
void gmi_blockfile_close(gmi_blockfile_t *file);
/* For messages: "DIR/x.0.chunks" or "an unnamed file in DIR"; of a long path the end is shown. */
enum { GMI_BLOCKFILE_NAME_BYTES = 128 };
void gmi_blockfile_name(const gmi_blockfile_t *file, char text_out[GMI_BLOCKFILE_NAME_BYTES]);

#endif
