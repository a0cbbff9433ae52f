/* gemini_borrow(): chunks whose lowest copy lies in a file of the caller's, which is only read.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A borrowed block (io/borrowed.h) is a chunk's copy in the file tier like any other: the chunk is read from it when
 * its bytes are wanted, leaves the tiers above without a copy, and gives the block up when it is written. A chunk that
 * has other bytes beside those of the range, somewhere else than in borrowed files, cannot have such a block. That can
 * be the first and the last chunk of a range: the part of the range in them is loaded. All chunks are claimed until
 * that is done, and only then do the others get their blocks: a call that is refused, or whose read fails, has borrowed
 * nothing. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/content.h"
#include "chunk/cut.h"
#include "chunk/data.h"
#include "chunk/files.h"
#include "chunk/group_files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "io/borrowed.h"

/* A range of a file that becomes that of an arena. */
typedef struct {
  gmi_range_t range;
  int fd;
  uint64_t fd_offset;
  uint32_t *blocks; /* [chunks of the range] GMI_BLOCK_NONE: the part of the range in the chunk is loaded */
} borrow_t;

static void part_of(gmi_manager_t *m, const gmi_range_t *r, uint64_t i, uint64_t *begin, uint64_t *end) {
  *begin = i << m->cut.chunk_shift;
  *end = *begin + gmi_chunk_bytes(m);
  if (*begin < r->offset) *begin = r->offset;
  if (*end > r->offset + r->size) *end = r->offset + r->size;
}

/* May all of the chunk's bytes be in borrowed files, once this part of it is? */
static bool can_borrow(gmi_manager_t *m, const gmi_chunk_t *c, uint64_t part_bytes) {
  return part_bytes == gmi_chunk_bytes(m) || gmi_chunk_has(c, GMI_VALID_ZERO) ||
         gmi_block_is_borrowed(gmi_chunk_block(c));
}

/* All that can refuse the call, but for chunks in use. */
static gemini_status_t check(gmi_manager_t *m, const gemini_access_t *theirs, borrow_t *b) {
  gemini_access_t access;
  gmi_range_t *r = &b->range;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  const int flags = fcntl(b->fd, F_GETFL);
  if (!status && flags < 0)
    status = gmi_fail(GEMINI_ERR_INVALID, errno, "fd is %d, must be an open file descriptor", b->fd);
  if (!status && ((flags & O_ACCMODE) == O_WRONLY || flags & O_PATH))
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "fd %d is not open for reading", b->fd);
  if (!status) status = gmi_range_ready_any(m, &access, r);
  if (status || !r->size) return status;
  if (b->fd_offset > (uint64_t)INT64_MAX - r->size)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "fd_offset is %llu: the range would end behind the largest file offset",
                    (unsigned long long)b->fd_offset);
  if (gmi_arena_is_sharded(r->arena))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "arena %s is sharded: load its ranges", r->arena->name);
  gmi_range_t all = *r; /* with the other tensors that lie in it (tied weights) */
  all.tensor = NULL;
  const gmi_content_t content = gmi_range_content(m, &all, true);
  if (content == GMI_CONTENT_WRONG) return GEMINI_ERR_STATE;
  if (content != GMI_CONTENT_FINE)
    return gmi_fail(GEMINI_ERR_STATE, 0, "a gradient has taken bytes of arena %s: load the range", r->store->name);
  return GEMINI_OK;
}

/* Makes a block for each chunk that can have one. *made_out: entries of blocks, also after a failure. */
static gemini_status_t make_blocks(gmi_manager_t *m, const borrow_t *b, uint64_t *made_out) {
  const gmi_range_t *r = &b->range;
  gemini_status_t status = GEMINI_OK;
  uint32_t file;
  *made_out = 0;
  if (!m->file.borrowed) status = gmi_borrowed_open(gmi_files_engine_wanted(m), gmi_files_sys_of(m), &m->file.borrowed);
  if (!status) status = gmi_borrowed_file(m->file.borrowed, b->fd, b->fd_offset + r->size, &file);
  for (uint64_t i = r->first; !status && i <= r->last; i++) {
    const gmi_chunk_t *c = &r->store->chunks[i];
    uint64_t begin, end;
    part_of(m, r, i, &begin, &end);
    b->blocks[*made_out] = GMI_BLOCK_NONE;
    if (can_borrow(m, c, end - begin)) {
      const bool extends = gmi_block_is_borrowed(gmi_chunk_block(c));
      status = gmi_borrowed_take(m->file.borrowed, extends ? gmi_chunk_block(c) : GMI_BLOCK_NONE, file,
                                 b->fd_offset + (begin - r->offset), begin & (gmi_chunk_bytes(m) - 1), end - begin,
                                 &b->blocks[*made_out]);
    }
    *made_out += !status;
  }
  return status;
}

/* Reads the parts of the range in chunks that have no block. Releases the lock meanwhile. */
static gemini_status_t load_parts(gmi_manager_t *m, const borrow_t *b) {
  const gmi_range_t *r = &b->range;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t i = r->first; !status && i <= r->last; i++) {
    if (b->blocks[i - r->first] != GMI_BLOCK_NONE) continue;
    gmi_range_t part = *r;
    uint64_t end;
    part_of(m, r, i, &part.offset, &end);
    part.at += part.offset - r->offset;
    part.size = end - part.offset;
    part.first = part.last = (uint32_t)i;
    status = gmi_load_claimed(m, &part, b->fd, b->fd_offset + (part.offset - r->offset));
  }
  return status;
}

/* Gives the blocks to their chunks. */
static void take_blocks(gmi_manager_t *m, const borrow_t *b) {
  const gmi_range_t *r = &b->range;
  for (uint64_t i = r->first; i <= r->last; i++) {
    gmi_chunk_t *c = &r->store->chunks[i];
    if (b->blocks[i - r->first] == GMI_BLOCK_NONE) continue;
    gmi_chunk_forget(m, c);
    gmi_chunk_block_claim(m, c, b->blocks[i - r->first]);
    gmi_chunk_resumed(m, c);
  }
  gmi_arena_each(m, r->arena, r->offset, r->size, gmi_tensor_not_free, NULL);
}

static gemini_status_t borrow(gmi_manager_t *m, const gemini_access_t *theirs, int fd, uint64_t fd_offset) {
  borrow_t b = { .fd = fd, .fd_offset = fd_offset };
  gemini_status_t status = check(m, theirs, &b);
  if (status || !b.range.size) return status;
  b.blocks = calloc((uint64_t)b.range.last - b.range.first + 1, sizeof *b.blocks);
  if (!b.blocks) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a list of borrowed blocks");
  uint64_t made = 0;
  status = gmi_load_begin(m, &b.range);
  if (!status) {
    status = make_blocks(m, &b, &made);
    if (!status) status = load_parts(m, &b);
    gmi_load_end(m, &b.range);
  }
  if (!status) take_blocks(m, &b);
  for (uint64_t i = 0; status && i < made; i++)
    if (b.blocks[i] != GMI_BLOCK_NONE) gmi_borrowed_give(m->file.borrowed, b.blocks[i]);
  free(b.blocks);
  return status;
}

gemini_status_t gemini_borrow(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset) {
  API_LOCKED(borrow(m, access, fd, fd_offset));
}
