/* A file that blocks lie in: made without a name or with one, its space reserved. SPDX-License-Identifier:
 * Apache-2.0 */
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
  uint32_t alignment_bytes; /* direct: of offsets, sizes and buffers */
  bool reserves;            /* the file system can reserve space */
  bool made;                /* has a name, and got it here */
  char *directory;          /* owned */
  char *path;               /* owned; NULL: it has no name */
  uint64_t opened_bytes;    /* size when it was opened */
  uint64_t size_bytes;
  uint64_t reserved_bytes; /* of these, known to have their space, or as much of it as can be known */
} gmi_blockfile_t;

/* What is not as wished is added to note, parts separated by "; ". */
typedef struct gmi_note {
  char text[200];
} gmi_note_t;
void gmi_note_add(gmi_note_t *note, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum { GMI_BLOCKFILE_MAKE = 1 /* a file with a name that is not there yet is made */ };
/* directory: its first length bytes. name: of a file in it; NULL: none. O_DIRECT where the file system takes it and
 * block_bytes is a multiple of its alignment. A file with a name is locked against other processes: BUSY. IO, OOM_FILE,
 * OOM_SYSTEM; FORMAT: a name that is of something other than a file, or of none without GMI_BLOCKFILE_MAKE. On failure
 * file is as if closed. */
gemini_status_t gmi_blockfile_open(gmi_blockfile_t *file, const gmi_sys_t *sys, const char *directory, size_t length,
                                   const char *name, uint32_t flags, uint64_t block_bytes, gmi_note_t *note);
/* Is an open file one of the process's own: a regular file, of its user, with no other name? FORMAT: it is not, and the
 * message says why; IO. */
gemini_status_t gmi_file_check_own(const gmi_sys_t *sys, int fd, const char *path, struct stat *info_out);
/* Reserves more, or gives back what is behind size_bytes. OOM_FILE: the message names what was asked for and what there
 * is; IO. Nothing changed then. */
gemini_status_t gmi_blockfile_resize(gmi_blockfile_t *file, uint64_t size_bytes, gmi_note_t *note);
/* Makes sure that the file itself can be found again. */
gemini_status_t gmi_directory_sync(const gmi_sys_t *sys, const char *directory);
/* Takes the name from a file that has one, so that it vanishes, too, when it is closed. */
void gmi_blockfile_remove(const gmi_blockfile_t *file);
void gmi_blockfile_close(gmi_blockfile_t *file);
/* For messages: "DIR/x.0.chunks" or "an unnamed file in DIR", of which the end of a long DIR is shown. */
enum { GMI_BLOCKFILE_NAME_BYTES = 128 };
void gmi_blockfile_name(const gmi_blockfile_t *file, char text_out[GMI_BLOCKFILE_NAME_BYTES]);

#endif
