/* Borrowed blocks: bytes that lie in files of the caller's, such as those of a model's weights, and are only read.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A borrowed block stands where a block of the store (store.h) does, as the copy of a chunk in the lowest tier. It is a
 * list of pieces, each a range of a file, at any offset; what no piece covers reads as zero. There is no copy of the
 * bytes in the store, and no checksum: a file that has another size or another time of modification than it had when it
 * was borrowed first is not read any more, until no block has a range of it and it is borrowed again.
 *
 * Files are read through the page cache, as offsets in them are not aligned for O_DIRECT. Threads: calls on one record
 * are made one at a time (under the manager's lock); only done runs on a thread of the engine. */
#ifndef GMI_BORROWED_H
#define GMI_BORROWED_H

#include "io/store.h"

typedef struct gmi_borrowed gmi_borrowed_t;
typedef struct gmi_borrowed_read gmi_borrowed_read_t; /* a read that is to be made */

/* Set in the numbers of borrowed blocks, and in none of the store's. */
#define GMI_BLOCK_BORROWED 0x80000000u
static inline bool gmi_block_is_borrowed(uint32_t block) {
  return block != GMI_BLOCK_NONE && (block & GMI_BLOCK_BORROWED) != 0;
}

/* engine_kind: GMI_ENGINE_*; sys: NULL = gmi_sys_real. UNSUPPORTED, OOM_SYSTEM: as gmi_engine_open(). */
gemini_status_t gmi_borrowed_open(uint32_t engine_kind, const gmi_sys_t *sys, gmi_borrowed_t **borrowed_out);
/* Blocks until all requests are done. NULL is accepted. */
void gmi_borrowed_close(gmi_borrowed_t *borrowed);
/* Opens a file for itself that fd is open for, or finds it again, and checks that it has end_bytes. INVALID: fd is not
 * open, or not a regular file; too many files are borrowed. FORMAT: it ends before, or was changed since it was
 * borrowed first, and blocks still have ranges of it. IO: it cannot be looked at, or opened for reading. */
gemini_status_t gmi_borrowed_file(gmi_borrowed_t *borrowed, int fd, uint64_t end_bytes, uint32_t *file_out);
/* Do blocks have ranges of the file that fd is open for? */
bool gmi_borrowed_from(const gmi_borrowed_t *borrowed, int fd);
/* Makes a block: the pieces of another one (GMI_BLOCK_NONE: of none), with those bytes replaced that the new piece
 * covers: size_bytes at `at` are those of the file at offset_bytes. OOM_SYSTEM. */
gemini_status_t gmi_borrowed_take(gmi_borrowed_t *borrowed, uint32_t from, uint32_t file, uint64_t offset_bytes,
                                  uint64_t at, uint64_t size_bytes, uint32_t *block_out);
/* Gives a block back. Requests on it that are under way go on. */
void gmi_borrowed_give(gmi_borrowed_t *borrowed, uint32_t block);
/* Takes the memory that a read of the block needs: OOM_SYSTEM. */
gemini_status_t gmi_borrowed_read_new(const gmi_borrowed_t *borrowed, uint32_t block,
                                      gmi_borrowed_read_t **reading_out);
/* As gmi_store_submit(), of a read with a size; reading ends with it. The buffer needs no alignment. */
void gmi_borrowed_submit(gmi_borrowed_t *borrowed, gmi_borrowed_read_t *reading, gmi_block_request_t *request);

#endif
