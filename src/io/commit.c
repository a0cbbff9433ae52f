/* Commits of stores that keep checkpoints: how blocks become the state that a later process finds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A commit runs on the caller's thread, with admin held throughout:
 *   1. Under lock: check the blocks and mark them PENDING; turn DIRTY blocks into SYNCING ones.
 *   2. fdatasync() every file; the directories of the files once, the first time.
 *   3. Write the new index beside the old one, fsync() it, rename() it over the old one.
 *   4. fsync() the directory of the index, which makes the rename durable.
 * Blocks are synced before the index that names them, so an index on the disk never names bytes that are not. Until
 * step 3 succeeds the previous commit is in force; a failure releases the PENDING blocks, and blocks whose sync failed
 * become SUSPECT.
 *
 * From the first step on, the blocks of the previous and of the new commit are both protected. If step 4 fails, a power
 * failure may bring back either index, so both sets stay protected (COMMITTED) until a later commit succeeds.
 *
 * Other threads may take, write and read other blocks while a commit runs; a block written after step 1 is DIRTY again
 * and belongs to the next sync. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_limit.h"
#include "base/status.h"
#include "io/store_internal.h"

static gmi_kept_t *kept_of(const gmi_index_t *index) {
  gmi_kept_t *kept = calloc((size_t)index->entry_count + 1, sizeof *kept);
  for (uint32_t i = 0; kept && i < index->entry_count; i++)
    kept[i] = (gmi_kept_t){ .block = index->entries[i].block, .key = index->entries[i].key };
  return kept;
}

/* ---- at open */
gemini_status_t gmi_commit_read(gmi_store_t *store, uint32_t *block_count_io) {
  gmi_store_t *s = store;
  gmi_index_t *x = &s->committed;
  s->sys->unlink(s->index_beside); /* left by a process that was killed while it committed */
  gemini_status_t status = gmi_index_read(s->sys, s->index_path, x);
  if (status == GEMINI_ERR_NOT_FOUND) return GEMINI_OK;
  s->index_there = true; /* also when it is unreadable: close must not remove files that may still be repaired */
  if (status) return status;
  if (x->block_bytes != s->block_bytes || x->file_count != s->file_count)
    return gmi_fail(GEMINI_ERR_FORMAT, 0,
                    "index %s, byte 12: it has blocks of %llu bytes in %u directories, want %llu bytes in %u",
                    s->index_path, (unsigned long long)x->block_bytes, x->file_count,
                    (unsigned long long)s->block_bytes, s->file_count);
  /* Files may have been truncated or exchanged since: a block beyond the end is found here, not at its first read. */
  for (uint32_t i = 0; i < x->entry_count; i++) {
    uint32_t block = x->entries[i].block;
    const gmi_blockfile_t *file = &s->stripes[block % s->file_count].file;
    uint64_t end = ((uint64_t)block / s->file_count + 1) * s->block_bytes;
    if (end > file->size_bytes)
      return gmi_fail(GEMINI_ERR_FORMAT, 0,
                      "file tier: %s ends at %llu, before block %u of the index, which ends at %llu", file->path,
                      (unsigned long long)file->size_bytes, block, (unsigned long long)end);
    if (block >= *block_count_io) *block_count_io = block + 1;
  }
  s->kept = kept_of(x);
  if (!s->kept) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "index %s: no memory for it", s->index_path);
  s->number = x->number;
  s->names_synced = true; /* the commit that made this index synced them */
  return GEMINI_OK;
}

/* The blocks keep the generations and checksums of the index, so that reading them compares what was committed. */
void gmi_commit_adopt(gmi_store_t *store) {
  gmi_store_t *s = store;
  const gmi_index_t *x = &s->committed;
  pthread_mutex_lock(&s->lock);
  /* The process that made the commit may have written other blocks after it, with generations that are lost. All other
   * blocks therefore start from the highest generation of the index. */
  for (uint32_t b = 0; b < s->block_count; b++) s->blocks[b].generation = x->generations;
  for (uint32_t i = 0; i < x->entry_count; i++) {
    const gmi_index_entry_t *e = &x->entries[i];
    s->blocks[e->block] = (gmi_block_t){ .generation = e->generation, .checksum = e->checksum };
    s->blocks[e->block].flags = BLOCK_TAKEN | BLOCK_COMMITTED | BLOCK_READABLE | (x->checksums ? BLOCK_SUMMED : 0);
    gmi_block_settle(s, e->block);
  }
  pthread_mutex_unlock(&s->lock);
}

/* ---- commit */

/* Checks one block, marks it PENDING and fills in its entry of the index. Called with lock held. */
static gemini_status_t include(gmi_store_t *s, const gmi_kept_t *kept, gmi_index_entry_t *entry_out) {
  uint32_t block = kept->block;
  if (block >= s->block_count || !(s->blocks[block].flags & BLOCK_TAKEN))
    return gmi_fail(GEMINI_ERR_STATE, 0, "checkpoint: block %u was not taken", block);
  gmi_block_t *b = &s->blocks[block];
  if (b->flags & BLOCK_PENDING) return gmi_fail(GEMINI_ERR_STATE, 0, "checkpoint: block %u is named twice", block);
  if (b->flags & BLOCK_WRITING) return gmi_fail(GEMINI_ERR_BUSY, 0, "checkpoint: block %u is being written", block);
  if (!(b->flags & BLOCK_READABLE))
    return gmi_fail(GEMINI_ERR_STATE, 0, "checkpoint: block %u %s", block,
                    b->flags & BLOCK_FAILED ? "could not be written" : "was never written");
  if (b->flags & BLOCK_SUSPECT)
    return gmi_fail(GEMINI_ERR_IO, EIO, "checkpoint: block %u could not be synced, and has to be written again", block);
  b->flags |= BLOCK_PENDING;
  *entry_out = (gmi_index_entry_t){ .key = kept->key, .generation = b->generation, .block = block };
  if (b->flags & BLOCK_SUMMED) entry_out->checksum = b->checksum;
  return GEMINI_OK;
}

/* Ends a commit. in_force: the new index is in place, or may be, so its blocks are protected from now on. lasts:
 * the rename is durable, so the previous commit's blocks need no protection any more. */
static void conclude(gmi_store_t *s, bool in_force, bool lasts) {
  pthread_mutex_lock(&s->lock);
  for (uint32_t b = 0; b < s->block_count; b++) {
    uint16_t *flags = &s->blocks[b].flags;
    if (lasts) *flags &= (uint16_t)~BLOCK_COMMITTED;
    if (in_force && *flags & BLOCK_PENDING) *flags |= BLOCK_COMMITTED;
    *flags &= (uint16_t)~BLOCK_PENDING;
    gmi_block_settle(s, b);
  }
  pthread_mutex_unlock(&s->lock);
}

/* Syncs all files. After a failed fdatasync() the kernel may mark the pages clean although they never reached the disk,
 * so that the next call succeeds: the error is reported once only. The blocks that were being synced are therefore
 * marked SUSPECT, and a commit refuses them until they are written again. All files are synced even after one has
 * failed, so that each block's SYNCING flag is resolved. lock is not held during the system calls. */
static gemini_status_t sync_blocks(gmi_store_t *s) {
  gemini_status_t status = GEMINI_OK;
  for (uint32_t f = 0; f < s->file_count; f++) {
    const gmi_blockfile_t *file = &s->stripes[f].file;
    int result;
    do result = s->sys->fdatasync(file->fd);
    while (result && errno == EINTR);
    if (result)
      status =
          gmi_fail(gmi_file_status(errno), errno, "checkpoint: could not sync %s: %s", file->path, strerror(errno));
    pthread_mutex_lock(&s->lock);
    for (uint32_t b = f; b < s->block_count; b += s->file_count) {
      uint16_t *flags = &s->blocks[b].flags;
      if (result && *flags & BLOCK_SYNCING) *flags |= BLOCK_SUSPECT;
      *flags &= (uint16_t)~BLOCK_SYNCING;
    }
    pthread_mutex_unlock(&s->lock);
  }
  for (uint32_t f = 0; f < s->file_count && !status && !s->names_synced; f++)
    status = gmi_directory_sync(s->sys, s->stripes[f].file.directory);
  if (!status) s->names_synced = true;
  return status;
}

/* Steps 1 to 4. x comes with its header, and its arrays allocated; entries are filled in here. */
static gemini_status_t make(gmi_store_t *s, gmi_index_t *x, const gmi_kept_t *blocks) {
  gemini_status_t status = GEMINI_OK;
  pthread_mutex_lock(&s->lock);
  x->block_count = s->block_count;
  x->checksums = true;
  for (uint32_t i = 0; i < x->entry_count && !status; i++) {
    status = include(s, &blocks[i], &x->entries[i]);
    if (!status) x->checksums &= !!(s->blocks[blocks[i].block].flags & BLOCK_SUMMED);
  }
  /* An index has checksums for all entries or for none. Blocks adopted from a store without checksums have none. */
  for (uint32_t i = 0; i < x->entry_count && !x->checksums; i++) x->entries[i].checksum = 0;
  for (uint32_t b = 0; b < s->block_count && !status; b++) {
    gmi_block_t *block = &s->blocks[b];
    if (block->generation > x->generations) x->generations = block->generation;
    if (block->flags & BLOCK_DIRTY) block->flags ^= BLOCK_DIRTY | BLOCK_SYNCING; /* SYNCING is clear before */
  }
  pthread_mutex_unlock(&s->lock);
  if (!status) status = sync_blocks(s);
  bool in_force = false;
  if (!status) status = gmi_index_write(s->sys, s->index_path, s->index_beside, x, &in_force);
  if (status) {
    conclude(s, in_force, false);
    return status;
  }
  s->index_there = true;
  status = gmi_directory_sync(s->sys, s->stripes[0].file.directory);
  conclude(s, true, !status);
  return status;
}

gemini_status_t gmi_store_commit(gmi_store_t *store, const gmi_kept_t *blocks, uint32_t count, const void *blob,
                                 uint64_t blob_bytes) {
  gmi_store_t *s = store;
  if (!s->keep) return gmi_fail(GEMINI_ERR_STATE, 0, "checkpoint: the files are not kept");
  if (blob_bytes > GMI_BLOB_LIMIT_BYTES || (blob_bytes && !blob) || (count && !blocks))
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "checkpoint: %u blocks at %p, a blob of %llu bytes at %p, must be at most %d", count,
                    (const void *)blocks, (unsigned long long)blob_bytes, blob, GMI_BLOB_LIMIT_BYTES);
  gmi_index_t x = {
    .block_bytes = s->block_bytes, .file_count = s->file_count, .entry_count = count, .blob_bytes = blob_bytes
  };
  gmi_kept_t *kept = calloc((size_t)count + 1, sizeof *kept);
  x.entries = calloc((size_t)count + 1, sizeof *x.entries);
  x.blob = malloc(blob_bytes + 1);
  gemini_status_t status = GEMINI_OK;
  pthread_mutex_lock(&s->admin);
  /* Everything that the committed state needs is allocated before the index is replaced: after that point no failure
   * may leave the records behind the files. */
  if (!kept || !x.entries || !x.blob) {
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "checkpoint: no memory for the index of %u blocks", count);
  } else {
    if (blob_bytes) memcpy(x.blob, blob, blob_bytes);
    for (uint32_t i = 0; i < count; i++) kept[i] = (gmi_kept_t){ .block = blocks[i].block, .key = blocks[i].key };
    x.number = ++s->number;
    status = make(s, &x, blocks);
  }
  if (!status) {
    gmi_index_free(&s->committed);
    free(s->kept);
    s->committed = x;
    s->kept = kept;
  } else {
    gmi_index_free(&x);
    free(kept);
  }
  pthread_mutex_unlock(&s->admin);
  gmi_store_trim_due(s); /* blocks of the previous commit, or given back meanwhile, may have become unused */
  return status;
}

bool gmi_store_is_suspect(gmi_store_t *store, uint32_t block) {
  pthread_mutex_lock(&store->lock);
  bool suspect = block < store->block_count && store->blocks[block].flags & BLOCK_SUSPECT;
  pthread_mutex_unlock(&store->lock);
  return suspect;
}

gemini_status_t gmi_store_committed(gmi_store_t *store, const gmi_kept_t **blocks_out, uint32_t *count_out,
                                    const void **blob_out, uint64_t *blob_bytes_out) {
  gmi_store_t *s = store;
  if (!s->keep) return gmi_fail(GEMINI_ERR_STATE, 0, "the files are not kept");
  pthread_mutex_lock(&s->admin);
  gemini_status_t status = GEMINI_OK;
  if (!s->committed.number) {
    status = gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "index %s: there is no checkpoint yet", s->index_path);
  } else {
    *blocks_out = s->kept;
    *count_out = s->committed.entry_count;
    *blob_out = s->committed.blob;
    *blob_bytes_out = s->committed.blob_bytes;
  }
  pthread_mutex_unlock(&s->admin);
  gmi_store_trim_due(s);
  return status;
}
