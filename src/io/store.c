/* The store's blocks and files: which blocks are free, space for them, open and close.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A bit map per file holds the blocks that can be taken. A block counts as used while a caller has taken it, a commit
 * names it or a request is on it; gmi_block_settle() derives that from the block's record after every change.
 *
 * Two counts describe the size: `wanted` blocks can be taken, `block_count` blocks have space. They differ after a
 * resize to fewer blocks, while used blocks lie behind the new end: the files are truncated block by block as these
 * become free (trim()).
 *
 * No thread of its own: everything here runs on the caller's thread. Calls that only look at records take `lock`;
 * resizing holds `admin` throughout, and `lock` only for the moments in which records change. */
#include "io/store.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "io/store_internal.h"

/* ---- free blocks. Called with lock held unless it says otherwise. */
static bool in_use(const gmi_block_t *b) {
  return b->flags & (BLOCK_TAKEN | BLOCK_COMMITTED | BLOCK_PENDING | BLOCK_WRITING) || b->readers;
}

/* Sets or clears a block's bit in its file's map of free blocks. */
static void free_bit(gmi_store_t *s, uint32_t block, bool set) {
  gmi_stripe_t *stripe = &s->stripes[block % s->file_count];
  uint32_t at = block / s->file_count, word = at / 64;
  uint64_t bit = UINT64_C(1) << at % 64;
  if (!set) {
    stripe->free[word] &= ~bit;
  } else {
    stripe->free[word] |= bit;
    if (word < stripe->first) stripe->first = word;
  }
}

void gmi_block_settle(gmi_store_t *store, uint32_t block) {
  gmi_block_t *b = &store->blocks[block];
  bool used = in_use(b);
  if (used == !!(b->flags & BLOCK_USED)) return;
  b->flags ^= BLOCK_USED;
  uint32_t *count = &store->stripes[block % store->file_count].used;
  if (used) store->used++, ++*count;
  else store->used--, --*count;
  free_bit(store, block, !used && block < store->wanted);
  if (!used && block >= store->wanted) store->trim_due = true;
}

/* Of block_count blocks, how many lie in this file. */
static uint32_t blocks_of(const gmi_store_t *s, uint32_t file, uint32_t block_count) {
  return block_count / s->file_count + (file < block_count % s->file_count);
}

/* Enlarges the arrays for the records of block_count blocks. Counts and bits stay as they are, so that a failure, or an
 * enlargement that is not used in the end, has no visible effect. */
static gemini_status_t make_room(gmi_store_t *s, uint32_t block_count) {
  gmi_block_t *blocks = realloc(s->blocks, ((size_t)block_count + 1) * sizeof *blocks);
  if (!blocks) goto none;
  s->blocks = blocks;
  if (block_count > s->block_count)
    memset(blocks + s->block_count, 0, (size_t)(block_count - s->block_count) * sizeof *blocks);
  for (uint32_t f = 0; f < s->file_count; f++) {
    gmi_stripe_t *stripe = &s->stripes[f];
    uint32_t words = blocks_of(s, f, block_count) / 64 + 1;
    if (words <= stripe->words) continue;
    uint64_t *more = realloc(stripe->free, words * sizeof *more);
    if (!more) goto none;
    memset(more + stripe->words, 0, (words - stripe->words) * sizeof *more);
    stripe->free = more;
    stripe->words = words;
  }
  return GEMINI_OK;
none:
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of %u blocks", block_count);
}

/* Sets how many blocks can be taken, and the bits of the blocks between the old and the new limit. */
static void want(gmi_store_t *s, uint32_t block_count) {
  uint32_t from = block_count < s->wanted ? block_count : s->wanted;
  s->wanted = block_count;
  for (uint32_t b = from; b < s->block_count; b++)
    free_bit(s, b, b < block_count && !(s->blocks[b].flags & BLOCK_USED));
}

/* The file with the fewest used blocks is chosen to spread transfers over the drives, and its lowest block to leave the
 * end of the files free for shrinking. */
gemini_status_t gmi_store_take(gmi_store_t *store, uint32_t *block_out) {
  gmi_store_t *s = store;
  pthread_mutex_lock(&s->lock);
  uint32_t best = s->file_count;
  for (uint32_t f = 0; f < s->file_count; f++) {
    gmi_stripe_t *stripe = &s->stripes[f];
    while (stripe->first < stripe->words && !stripe->free[stripe->first]) stripe->first++;
    if (stripe->first < stripe->words && (best == s->file_count || stripe->used < s->stripes[best].used)) best = f;
  }
  uint32_t used = s->used, wanted = s->wanted;
  if (best < s->file_count) {
    gmi_stripe_t *stripe = &s->stripes[best];
    uint32_t at = stripe->first * 64 + (uint32_t)__builtin_ctzll(stripe->free[stripe->first]);
    uint32_t block = at * s->file_count + best;
    /* The checksum of the bytes on the disk stays known: if the first write is lost, the block is reported as stale. */
    s->blocks[block].flags &= BLOCK_SUMMED | BLOCK_PREVIOUS;
    s->blocks[block].flags |= BLOCK_TAKEN;
    gmi_block_settle(s, block);
    *block_out = block;
  }
  pthread_mutex_unlock(&s->lock);
  if (best < s->file_count) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_FILE, 0, "file tier: %u blocks of %llu bytes are in use, and there are %u", used,
                  (unsigned long long)s->block_bytes, wanted);
}

void gmi_store_give(gmi_store_t *store, uint32_t block) {
  gmi_store_t *s = store;
  pthread_mutex_lock(&s->lock);
  if (block < s->block_count) {
    s->blocks[block].flags &= (uint16_t)~BLOCK_TAKEN;
    gmi_block_settle(s, block);
  }
  pthread_mutex_unlock(&s->lock);
  gmi_store_trim_due(s);
}

/* ---- space. Called with admin held. */
typedef gemini_error_info_t failure_t;
/* Saves the thread's recorded failure over clean-up that may record failures of its own; fail_again() restores it. */
static failure_t failure(void) {
  failure_t why = GEMINI_ERROR_INFO_INIT;
  if (gemini_last_error(&why)) why.message[0] = 0;
  return why;
}
static gemini_status_t fail_again(const failure_t *why) {
  return gmi_fail(why->status, why->native_code, "%s", why->message);
}

/* Resizes the files to hold block_count blocks; stops at the first file that fails. */
static gemini_status_t resize_files(gmi_store_t *s, uint32_t block_count) {
  uint32_t f = 0;
  gemini_status_t status = GEMINI_OK;
  for (; f < s->file_count && !status; f++)
    status = gmi_blockfile_resize(&s->stripes[f].file, blocks_of(s, f, block_count) * s->block_bytes, &s->note);
  return status;
}

/* Updates the figures of the files, which admin guards, in the copy that lock guards. */
static void show(gmi_store_t *s) {
  gmi_store_figures_t f = { .files = s->file_count, .direct = true, .reserved_up_front = true };
  for (uint32_t i = 0; i < s->file_count; i++) {
    const gmi_blockfile_t *file = &s->stripes[i].file;
    f.direct &= file->direct;
    f.reserved_up_front &= file->reserves;
    f.reserved_bytes += file->reserves ? file->reserved_bytes : 0;
  }
  f.summing_threads = s->sums.thread_count;
  memcpy(f.note, s->note.text, sizeof f.note);
  pthread_mutex_lock(&s->lock);
  s->shown = f;
  pthread_mutex_unlock(&s->lock);
}

/* Gives the space of unused blocks behind `wanted` back to the file system. After a failure some files are shorter and
 * others are not, so `block_count` no longer counts these blocks, and a later enlargement reserves their space anew. */
static gemini_status_t trim(gmi_store_t *s) {
  pthread_mutex_lock(&s->lock);
  uint32_t before = s->block_count, count = before;
  while (count > s->wanted && !(s->blocks[count - 1].flags & BLOCK_USED)) count--;
  /* From here on no request can use these blocks. They cannot be taken meanwhile: only a holder of admin, which is this
   * thread, raises `wanted`. */
  s->block_count = count;
  s->trim_due = false;
  pthread_mutex_unlock(&s->lock);
  if (count == before) return GEMINI_OK;
  gemini_status_t status = resize_files(s, count);
  show(s);
  return status;
}

void gmi_store_trim_due(gmi_store_t *store) {
  gmi_store_t *s = store;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    bool due = s->trim_due;
    pthread_mutex_unlock(&s->lock);
    if (!due || pthread_mutex_trylock(&s->admin)) return;
    failure_t why = failure(); /* that of the call which ends with this one */
    if (trim(s)) {
      gmi_note_add(&s->note, "%.120s", gmi_fail_message());
      if (why.status) fail_again(&why);
    }
    pthread_mutex_unlock(&s->admin);
  }
}

/* Growing reserves space before the blocks can be taken; shrinking makes blocks unavailable before their space goes. On
 * failure the files and counts return to what they were; if a file that was shortened cannot get its space back, the
 * blocks that lost theirs stay unavailable. */
gemini_status_t gmi_store_resize(gmi_store_t *store, uint32_t block_count) {
  gmi_store_t *s = store;
  if (block_count == GMI_BLOCK_NONE || block_count > (uint64_t)INT64_MAX / s->block_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: %u blocks of %llu bytes", block_count,
                    (unsigned long long)s->block_bytes);
  pthread_mutex_lock(&s->admin);
  pthread_mutex_lock(&s->lock);
  uint32_t before = s->block_count, wanted = s->wanted;
  gemini_status_t status = GEMINI_OK;
  if (block_count > before) status = make_room(s, block_count);
  else want(s, block_count);
  pthread_mutex_unlock(&s->lock);
  if (!status && block_count > before) {
    status = resize_files(s, block_count);
    if (status) {
      failure_t why = failure();
      resize_files(s, before);
      fail_again(&why);
    } else {
      pthread_mutex_lock(&s->lock);
      s->block_count = block_count;
      want(s, block_count);
      pthread_mutex_unlock(&s->lock);
    }
    show(s);
  } else if (!status) {
    status = trim(s);
    if (status) {
      failure_t why = failure();
      bool restored = !resize_files(s, before);
      if (!restored) gmi_note_add(&s->note, "%.120s", gmi_fail_message());
      pthread_mutex_lock(&s->lock);
      if (restored) s->block_count = before;
      want(s, wanted < s->block_count ? wanted : s->block_count); /* only blocks that have space can be taken */
      pthread_mutex_unlock(&s->lock);
      show(s);
      fail_again(&why);
    }
  }
  pthread_mutex_unlock(&s->admin);
  gmi_store_trim_due(s);
  return status;
}

/* ---- open and close */
static gemini_status_t check_config(const gmi_store_config_t *c, uint32_t *files_out) {
  if (!c->directories || !*c->directories)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: file_dir names no directory");
  if (!c->block_bytes || c->block_bytes % 512 || c->block_bytes > INT64_MAX)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: blocks of %llu bytes, must be a multiple of 512",
                    (unsigned long long)c->block_bytes);
  if (c->block_count == GMI_BLOCK_NONE || c->block_count > (uint64_t)INT64_MAX / c->block_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: %u blocks of %llu bytes", c->block_count,
                    (unsigned long long)c->block_bytes);
  if (c->keep && (!c->checkpoint_name || !*c->checkpoint_name || strchr(c->checkpoint_name, '/') ||
                  strlen(c->checkpoint_name) > 200))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: '%.60s' cannot be the name of checkpoint files",
                    c->checkpoint_name ? c->checkpoint_name : "");
  uint32_t count = 0;
  for (const char *at = c->directories;; at++) {
    size_t length = strcspn(at, ":");
    if (!length)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: file_dir '%.200s' names an empty directory", c->directories);
    if (++count > GMI_ENGINE_FILES_LIMIT)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: file_dir names more than %d directories",
                      GMI_ENGINE_FILES_LIMIT);
    at += length;
    if (!*at) break;
  }
  *files_out = count;
  return GEMINI_OK;
}

static char *name_in(const char *directory, const char *name, const char *end) {
  size_t size = strlen(directory) + strlen(name) + strlen(end) + 2;
  char *path = malloc(size);
  if (path) snprintf(path, size, "%s/%s%s", directory, name, end);
  return path;
}

static gemini_status_t open_files(gmi_store_t *s, const gmi_store_config_t *c) {
  uint32_t flags = GMI_BLOCKFILE_MAKE;
  if (c->keep) {
    /* If there is an index, its files must exist: a missing one is an error and is not created. The index itself is
     * read again once the files are locked, when no other process can replace it any more. */
    char first[4096];
    size_t length = strcspn(c->directories, ":");
    if (length >= sizeof first)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: the name of a directory is too long");
    memcpy(first, c->directories, length);
    first[length] = 0;
    s->index_path = name_in(first, c->checkpoint_name, ".index");
    s->index_beside = name_in(first, c->checkpoint_name, ".index.new");
    if (!s->index_path || !s->index_beside)
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the name of a file");
    gmi_index_t index = { 0 };
    gemini_status_t status = gmi_index_read(s->sys, s->index_path, &index);
    gmi_index_free(&index);
    if (status && status != GEMINI_ERR_NOT_FOUND) return status;
    if (!status) flags = 0;
  }
  const char *directory = c->directories;
  for (uint32_t f = 0; f < s->file_count; f++) {
    gmi_stripe_t *stripe = &s->stripes[f];
    size_t length = strcspn(directory, ":");
    char name[240];
    if (c->keep) snprintf(name, sizeof name, "%s.%u.chunks", c->checkpoint_name, f);
    gemini_status_t status = gmi_blockfile_open(&stripe->file, s->sys, directory, length, c->keep ? name : NULL, flags,
                                                s->block_bytes, &s->note);
    if (!status) status = gmi_engine_file_add(s->engine, stripe->file.fd, stripe->file.direct, &stripe->engine_file);
    if (status) return status;
    directory += length + 1;
  }
  return GEMINI_OK;
}

static void free_store(gmi_store_t *s) {
  for (uint32_t f = 0; f < s->file_count; f++) {
    gmi_blockfile_close(&s->stripes[f].file);
    free(s->stripes[f].free);
  }
  gmi_index_free(&s->committed);
  free(s->kept);
  free(s->blocks);
  free(s->index_path);
  free(s->index_beside);
  pthread_cond_destroy(&s->idle);
  pthread_mutex_destroy(&s->lock);
  pthread_mutex_destroy(&s->admin);
  free(s);
}

/* After a failed open: removes files that this call has created, and, if all files could be locked and there is no
 * index, files that a killed process left behind, since no commit refers to them. Files of an index return to the size
 * that they had. Without all the locks another process may be about to commit, so its files stay. */
static void undo_files(gmi_store_t *s, bool all_locked) {
  for (uint32_t f = 0; f < s->file_count; f++) {
    gmi_blockfile_t *file = &s->stripes[f].file;
    if (file->made || (all_locked && !s->index_there)) gmi_blockfile_remove(file);
    else if (file->fd >= 0 && file->size_bytes > file->opened_bytes)
      (void)gmi_blockfile_resize(file, file->opened_bytes, &s->note);
  }
}

/* Order: the engine, the files and their locks, the last commit, records, space, summing threads. The store is not
 * published before all of it has succeeded, so locks are taken only where called functions expect them. */
gemini_status_t gmi_store_open(const gmi_store_config_t *config, gmi_store_t **store_out) {
  uint32_t file_count = 0;
  gemini_status_t status = check_config(config, &file_count);
  if (status) return status;
  gmi_store_t *s = calloc(1, sizeof *s + file_count * sizeof *s->stripes);
  if (!s) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the file tier");
  s->sys = config->sys ? config->sys : &gmi_sys_real;
  s->block_bytes = config->block_bytes;
  s->checksum = config->checksum;
  s->keep = config->keep;
  s->file_count = file_count;
  for (uint32_t f = 0; f < file_count; f++) s->stripes[f].file.fd = -1;
  pthread_mutex_init(&s->admin, NULL);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->idle, NULL);

  gmi_engine_config_t engine = { .kind = config->engine_kind, .depth = config->depth, .sys = config->sys };
  status = gmi_engine_open(&engine, &s->engine);
  if (!status) status = open_files(s, config);
  bool all_locked = !status;
  uint32_t block_count = config->block_count;
  if (!status && s->keep) status = gmi_commit_read(s, &block_count);
  if (!status) status = make_room(s, block_count);
  if (!status) status = resize_files(s, block_count);
  if (!status) {
    s->block_count = block_count;
    want(s, config->block_count);
    gmi_commit_adopt(s);
  }
  if (!status) status = gmi_sums_open(s);
  if (status) {
    failure_t why = failure();
    undo_files(s, all_locked);
    gmi_engine_close(s->engine);
    free_store(s);
    return fail_again(&why);
  }
  show(s);
  *store_out = s;
  return GEMINI_OK;
}

void gmi_store_close(gmi_store_t *store) {
  if (!store) return;
  /* The engine first: its threads may still queue blocks to be summed. The summing threads end last. */
  pthread_mutex_lock(&store->lock);
  while (store->outstanding) pthread_cond_wait(&store->idle, &store->lock);
  pthread_mutex_unlock(&store->lock);
  gmi_engine_close(store->engine);
  gmi_sums_close(store);
  for (uint32_t f = 0; f < store->file_count && !store->index_there; f++) gmi_blockfile_remove(&store->stripes[f].file);
  free_store(store);
}

gemini_status_t gmi_store_buffer_add(gmi_store_t *store, void *base, uint64_t size_bytes) {
  return gmi_engine_buffer_add(store->engine, base, size_bytes);
}
void gmi_store_buffer_remove(gmi_store_t *store, void *base, uint64_t size_bytes) {
  gmi_engine_buffer_remove(store->engine, base, size_bytes);
}

void gmi_store_figures(gmi_store_t *store, gmi_store_figures_t *figures_out) {
  gmi_store_figures_t figures;
  pthread_mutex_lock(&store->lock); /* not admin, which is held throughout commits */
  figures = store->shown;
  figures.blocks_used = store->used;
  figures.block_count = store->wanted;
  pthread_mutex_unlock(&store->lock);
  gmi_engine_figures(store->engine, &figures.engine);
  *figures_out = figures;
}
