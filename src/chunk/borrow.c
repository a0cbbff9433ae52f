/* gemini_borrow(): chunks whose lowest copy lies in a file of the caller's, which is only read.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A borrowed block (io/borrowed.h) is a chunk's copy in the file tier like any other: the chunk is read from it when
 * its bytes are wanted, leaves the tiers above without a copy, and gives the block up when it is written. A chunk that
 * has other bytes beside those of the range, somewhere else than in borrowed files, cannot have such a block. That can
 * be the first and the last chunk of a range: the part of the range in them is loaded. */
#include <errno.h>
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

/* A range of a file that becomes that of an arena, and the parts of it that are left to be loaded: in the first and in
 * the last chunk. */
typedef struct {
  gmi_range_t range;
  uint64_t fd_offset;
  struct {
    uint64_t begin, size; /* from the range's begin; size 0: none */
  } loads[2];
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

/* All that can refuse the call. */
static gemini_status_t check(gmi_manager_t *m, const gemini_access_t *theirs, int fd, borrow_t *b) {
  gemini_access_t access;
  gmi_range_t *r = &b->range;
  gemini_status_t status = gmi_access_in(&access, theirs, "access");
  if (!status && fd < 0) status = gmi_fail(GEMINI_ERR_INVALID, 0, "fd is %d, must be an open file descriptor", fd);
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
  bool queued = false; /* does not matter: each chunk is checked below */
  status = gmi_updates_queue_range(m, r->store, r->first, r->last, &queued);
  for (uint64_t i = r->first; !status && i <= r->last; i++) {
    const char *why = gmi_chunk_busy(&r->store->chunks[i], GMI_TO_LOAD);
    if (!why) why = gmi_chunk_unsettle_to_change(&r->store->chunks[i]);
    if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", r->store->name, why);
  }
  return status;
}

/* Makes a block for each chunk that can have one, and gives it to the chunk once all are there. */
static gemini_status_t borrow_chunks(gmi_manager_t *m, borrow_t *b, int fd) {
  const gmi_range_t *r = &b->range;
  const uint64_t count = (uint64_t)r->last - r->first + 1;
  gemini_status_t status = GEMINI_OK;
  uint32_t file, *blocks = calloc(count, sizeof *blocks);
  if (!blocks) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a list of borrowed blocks");
  if (!m->file.borrowed) status = gmi_borrowed_open(gmi_files_engine_wanted(m), gmi_files_sys_of(m), &m->file.borrowed);
  if (!status) status = gmi_borrowed_file(m->file.borrowed, fd, b->fd_offset + r->size, &file);
  uint64_t made = 0;
  for (; !status && made < count; made += !status) {
    const gmi_chunk_t *c = &r->store->chunks[r->first + made];
    uint64_t begin, end;
    part_of(m, r, r->first + made, &begin, &end);
    blocks[made] = GMI_BLOCK_NONE;
    if (can_borrow(m, c, end - begin)) {
      const bool extends = gmi_block_is_borrowed(gmi_chunk_block(c));
      status = gmi_borrowed_take(m->file.borrowed, extends ? gmi_chunk_block(c) : GMI_BLOCK_NONE, file,
                                 b->fd_offset + (begin - r->offset), begin & (gmi_chunk_bytes(m) - 1), end - begin,
                                 &blocks[made]);
    } else {
      b->loads[made > 0].begin = begin - r->offset;
      b->loads[made > 0].size = end - begin;
    }
  }
  for (uint64_t i = 0; i < made; i++) {
    if (blocks[i] == GMI_BLOCK_NONE) continue;
    gmi_chunk_t *c = &r->store->chunks[r->first + i];
    if (status) {
      gmi_borrowed_give(m->file.borrowed, blocks[i]);
      continue;
    }
    gmi_chunk_forget(m, c);
    gmi_chunk_block_claim(m, c, blocks[i]);
    gmi_chunk_resumed(m, c);
  }
  free(blocks);
  return status;
}

static gemini_status_t borrow(gmi_manager_t *m, const gemini_access_t *theirs, int fd, borrow_t *b) {
  gemini_status_t status = check(m, theirs, fd, b);
  if (status || !b->range.size) return status;
  status = borrow_chunks(m, b, fd);
  if (!status) gmi_arena_each(m, b->range.arena, b->range.offset, b->range.size, gmi_tensor_not_free, NULL);
  return status;
}

gemini_status_t gemini_borrow(gemini_manager_t mgr, const gemini_access_t *access, int fd, uint64_t fd_offset) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  borrow_t b = { .fd_offset = fd_offset };
  gmi_lock(m, "gemini_borrow");
  gemini_status_t status = borrow(m, access, fd, &b);
  gmi_unlock(m);
  for (int i = 0; !status && i < 2; i++) {
    gemini_access_t part;
    if (!b.loads[i].size) continue;
    status = gmi_access_in(&part, access, "access");
    part.offset_bytes += b.loads[i].begin;
    part.size_bytes = b.loads[i].size;
    if (!status) status = gemini_load(mgr, &part, fd, fd_offset + b.loads[i].begin);
  }
  API_RETURN(status);
}
