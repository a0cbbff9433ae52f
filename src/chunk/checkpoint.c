/* Checkpoints: every chunk in a block of the files, and a description of what the blocks mean.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The store commits atomically: until a commit is complete, the blocks of the previous one stay unchanged. This file
 * only decides what is committed: the block of each chunk, named by arena and index, and a text that describes the
 * arenas and tensors (docs/checkpoint.md). Runs on the caller's thread under the manager's lock; transfers run on the
 * engine's threads. */
#include "chunk/checkpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/names.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/workers.h"
#include "io/borrowed.h"
#include "io/store.h"

enum { WRITES_AT_ONCE = 64 };

static uint64_t chunk_key(const gmi_chunk_t *c) { return (uint64_t)c->arena << 32 | c->index; }

/* Iterates over all chunks, arena by arena. NULL: there are no more. */
static gmi_chunk_t *next_chunk(gmi_manager_t *m, uint32_t *arena, uint32_t *index) {
  for (; *arena < GMI_ARENAS; ++*arena, *index = 0) {
    gmi_arena_t *a = gmi_arena_at(m, *arena);
    if (a && a->chunks && *index < atomic_load(&a->chunk_count)) return &a->chunks[(*index)++];
  }
  return NULL;
}

static gemini_status_t check_kept(gmi_manager_t *m) {
  return m->file.checkpoint_name ? GEMINI_OK
                                 : gmi_fail(GEMINI_ERR_STATE, 0, "the manager was opened without checkpoint_name");
}

/* ---- checkpoint */
void gmi_layout_write(gmi_manager_t *m, FILE *file) {
  gmi_arenas_write(m, file, false);
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    gmi_tensor_t *t = &m->tensors.at[i];
    if (!gmi_tensor_alive(t)) continue;
    uint64_t word = atomic_load(&t->word);
    fprintf(file, "tensor %u %" PRIu64 " %" PRIu64 " %u %d ", t->arena, t->offset, t->size,
            word & GMI_TENSOR_USERS ? GEMINI_STATE_HOLD : gmi_tensor_state(word), (word & GMI_TENSOR_GRADIENT) != 0);
    gmi_name_write(file, gmi_tensor_base(m, t)->name);
    fputc('\n', file);
  }
}
static void write_layout(gmi_manager_t *m, FILE *file) {
  fprintf(file, "gemini-keep 1\n");
  uint64_t held = gmi_copy_bytes(m, GEMINI_TIER_HOST, GEMINI_TIER_FILE);
  if (gmi_chunk_bytes(m) != gmi_block_bytes(m) || held != gmi_block_bytes(m))
    fprintf(file, "sizes %" PRIu64 " %" PRIu64 "\n", gmi_chunk_bytes(m), held);
  gmi_layout_write(m, file);
  fprintf(file, "end\n");
}

/* Waits until at most most transfers are under way, and processes their results. Returns at the first failed write,
 * while others may be under way. */
static gemini_status_t wait_transfers(gmi_manager_t *m, uint32_t most) {
  while (true) {
    uint64_t events = gmi_workers_finished(m);
    gemini_status_t status = gmi_files_reap(m, NULL);
    if (status || m->io.count <= most) return status;
    gmi_workers_wait(m, events, GMI_WAIT_FILES, m->io.count);
  }
}

/* Waits for all transfers. Returns the first failure, which is status unless that is OK, and forgets the others: a
 * failure that ends after this call would be reported by a later one, whose writes may all succeed. */
static gemini_status_t end_transfers(gmi_manager_t *m, gemini_status_t status) {
  gmi_failure_t first;
  gmi_fail_keep(status, &first);
  while ((status = wait_transfers(m, 0)))
    if (!first.status) gmi_fail_keep(status, &first);
  return gmi_fail_again(&first);
}

/* Gives every chunk with bytes a valid block. A block whose content the store suspects (a sync failed) is written
 * again, to another block. */
static gemini_status_t write_chunks(gmi_manager_t *m) {
  gemini_status_t status = GEMINI_OK;
  uint32_t arena = 0, index = 0;
  for (gmi_chunk_t *c; !status && (c = next_chunk(m, &arena, &index));)
    if (gmi_chunk_busy(c, GMI_TO_STORE))
      status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired for writing", gmi_chunk_arena(m, c)->name);
  if (status) return status;
  /* Writes of earlier calls end first. A chunk whose write fails is written again below. */
  while (wait_transfers(m, 0)) gmi_log(m, GEMINI_LOG_WARNING, "%s", gmi_fail_message());
  arena = index = 0;
  for (gmi_chunk_t *c; !status && (c = next_chunk(m, &arena, &index));) {
    const uint32_t block = gmi_chunk_block(c);
    bool suspect = gmi_chunk_has(c, GMI_VALID_FILE) &&
                   (gmi_block_is_borrowed(block) || gmi_store_is_suspect(m->file.store, block));
    if (gmi_chunk_has(c, GMI_VALID_ZERO | GMI_VALID_FILE) && !suspect) continue;
    status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_CALLER);
    if (status) break;
    gmi_chunk_hold_host(m, c, false); /* keeps its slot until the write is queued */
    if (gmi_chunk_io(c) || suspect) status = gmi_chunk_settle_host(m, c);
    if (!status && suspect) gmi_file_drop(m, c); /* written to another block below */
    if (!status && !gmi_chunk_has(c, GMI_VALID_FILE)) status = gmi_file_write(m, c, GEMINI_REASON_CALLER);
    gmi_chunk_unhold_host(m, c, false);
    if (!status) status = wait_transfers(m, WRITES_AT_ONCE);
  }
  return end_transfers(m, status);
}

static gemini_status_t commit_chunks(gmi_manager_t *m, const void *blob, uint64_t blob_bytes) {
  uint32_t arena = 0, index = 0, count = 0, old_count = 0;
  const gmi_kept_t *old = NULL;
  const void *old_blob;
  uint64_t old_blob_bytes;
  gmi_kept_t *kept = calloc(m->cut.chunk_count + 1, sizeof *kept), *before = NULL;
  gemini_status_t status = kept ? GEMINI_OK : gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a checkpoint");
  for (gmi_chunk_t *c; !status && (c = next_chunk(m, &arena, &index));) {
    if (gmi_chunk_has(c, GMI_VALID_ZERO)) continue;
    if (!gmi_chunk_has(c, GMI_VALID_FILE) || gmi_block_is_borrowed(gmi_chunk_block(c)))
      status = gmi_fail(GEMINI_ERR_BUSY, 0, "chunk %u of arena %s changed during the checkpoint", c->index,
                        gmi_chunk_arena(m, c)->name);
    kept[count++] = (gmi_kept_t){ .block = gmi_chunk_block(c), .key = chunk_key(c) };
  }
  /* The new commit replaces the old checkpoint. If this process did not resume from it, no chunk record owns its
   * blocks: they are freed here. */
  if (!status && !m->file.checkpoint_is_ours &&
      gmi_store_committed(m->file.store, &old, &old_count, &old_blob, &old_blob_bytes) == GEMINI_OK) {
    before = malloc(((size_t)old_count + 1) * sizeof *before);
    if (before) memcpy(before, old, old_count * sizeof *before);
    else status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a checkpoint");
  }
  if (!status) {
    gmi_wait_t wait;
    gmi_wait_begin(m, &wait, NULL, GMI_WAIT_COMMIT, 0);
    status = gmi_store_commit(m->file.store, kept, count, blob, blob_bytes);
    gmi_wait_end(m, &wait);
  }
  for (uint32_t i = 0; !status && before && i < old_count; i++) gmi_store_give(m->file.store, before[i].block);
  if (!status) m->file.checkpoint_is_ours = true;
  free(before);
  free(kept);
  return status;
}

static gemini_status_t checkpoint(gmi_manager_t *m) {
  gemini_status_t status = check_kept(m);
  if (!status) status = gmi_cut(m);
  if (!status) status = gmi_updates_queue(m, NULL);
  if (status) return status;
  gmi_workers_drain(m, NULL);
  status = gmi_workers_failure(m);
  m->file.checkpointing = true;
  if (!status) status = write_chunks(m);
  m->file.checkpointing = false;
  if (status) return status;
  char *text = NULL;
  size_t size = 0;
  FILE *file = open_memstream(&text, &size);
  if (file) write_layout(m, file);
  if (!file || fclose(file)) {
    free(text);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a checkpoint's description");
  }
  status = commit_chunks(m, text, size);
  free(text);
  return status;
}
gemini_status_t gemini_checkpoint(gemini_manager_t mgr) { API_LOCKED(checkpoint(m)); }

/* ---- resume */
static gemini_status_t differs(const char *what, const char *name) {
  return gmi_fail(GEMINI_ERR_FORMAT, 0,
                  "the checkpoint has %s %s, but this manager has none of this name, arena, offset and size", what,
                  name);
}

static gemini_status_t read_tensor(gmi_layout_reader_t *r, const char *at) {
  uint64_t arena, range[2], state, gradient;
  char name[256];
  if (!gmi_number_at(&at, ' ', GMI_ARENAS - 1, &arena) || !gmi_numbers_at(&at, ' ', UINT64_MAX, 2, range) ||
      !gmi_number_at(&at, ' ', GEMINI_STATE_COUNT - 1, &state) || !gmi_number_at(&at, ' ', 1, &gradient) ||
      !gmi_name_read(at, name, sizeof name))
    return gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint's description has a malformed tensor");
  if (r->arena_of[arena] == GMI_NONE)
    return gmi_fail(GEMINI_ERR_FORMAT, 0,
                    "the checkpoint's description has tensor %s in an arena that it does not have", name);
  gmi_manager_t *m = r->m;
  uint32_t index = gmi_tensor_named(m, name);
  bool registered = index != GMI_NONE && m->tensors.at[index].arena == r->arena_of[arena];
  while (index != GMI_NONE && m->tensors.at[index].arena != r->arena_of[arena]) index = m->tensors.at[index].next;
  if (index == GMI_NONE && gmi_tensor_named(m, name) != GMI_NONE)
    return GEMINI_OK; /* a counterpart that this process has not created yet */
  if (index == GMI_NONE || m->tensors.at[index].offset != range[0] || m->tensors.at[index].size != range[1])
    return differs("tensor", name);
  if (gradient && gmi_arena_is_sharded(gmi_arena_at(m, r->arena_of[arena])))
    return gmi_fail(GEMINI_ERR_FORMAT, 0,
                    "the checkpoint has a gradient in the bytes of tensor %s, which this manager shards: make it after "
                    "an update",
                    name);
  r->tensors += registered;
  if (!r->apply) return GEMINI_OK;
  gmi_tensor_t *t = &m->tensors.at[index];
  uint64_t word = atomic_load(&t->word), mine = gradient ? GMI_TENSOR_GRADIENT : 0;
  while (!atomic_compare_exchange_weak(&t->word, &word, /* repeats when an acquire has changed a count meanwhile */
                                       gmi_tensor_word(word & ~GMI_TENSOR_GRADIENT, (uint32_t)state) | mine)) {
  }
  return GEMINI_OK;
}

/* Is all that this manager has in the description, too? */
static gemini_status_t check_complete(const gmi_layout_reader_t *r) {
  gmi_manager_t *m = r->m;
  uint64_t registered = 0;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    uint32_t number = 0;
    while (a && number < GMI_ARENAS && r->arena_of[number] != i) number++;
    if (a && a->shard.whole == GMI_NONE && number == GMI_ARENAS)
      return gmi_fail(GEMINI_ERR_FORMAT, 0, "arena %s of this manager is not in the checkpoint", a->name);
  }
  for (uint32_t i = 0; i < m->tensors.high; i++)
    registered += gmi_tensor_alive(&m->tensors.at[i]) && m->tensors.at[i].base == i;
  if (r->tensors == registered) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint has %" PRIu64 " tensors, this manager %" PRIu64, r->tensors,
                  registered);
}

gemini_status_t gmi_layout_read(gmi_layout_reader_t *r, const char *blob, uint64_t bytes) {
  gemini_status_t status = GEMINI_OK;
  char line[1024];
  char arena[GMI_ARENA_NAME];
  const char *rest, *other, *wrong = NULL;
  bool wrong_sizes = false;
  memset(r->arena_of, 0xff, sizeof r->arena_of);
  r->tensors = 0;
  r->ended = false;
  r->sizes[0] = r->sizes[1] = r->block_bytes;
  for (uint64_t at = 0, number = 0; !status && at < bytes; number++) {
    const char *end = memchr(blob + at, '\n', bytes - at);
    uint64_t length = end ? (uint64_t)(end - blob) - at : bytes - at;
    if (length >= sizeof line || r->ended)
      return gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint's description, line %" PRIu64 ", cannot be read",
                      number + 1);
    memcpy(line, blob + at, length);
    line[length] = 0;
    at += length + 1;
    r->ended = !strcmp(line, "end");
    rest = line;
    if (!number && strcmp(line, r->first) != 0)
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint has another format version: %.60s", line);
    else if (gmi_word_at(&rest, "arena")) wrong = gmi_arena_read(r->m, rest, r->arena_of, arena);
    else if (gmi_word_at(&rest, "tensor")) status = read_tensor(r, rest);
    else if (gmi_word_at(&rest, "sizes")) wrong_sizes = !gmi_numbers_at(&rest, 0, UINT64_MAX, 2, r->sizes);
    else if (number && !r->ended && (other = r->line ? r->line(r->user, line) : "which is unknown"))
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint's description has a line \"%.60s\", %s", line, other);
    if (wrong_sizes) status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint's description has malformed sizes");
    if (wrong)
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint's description, line %" PRIu64 ", arena %s: %s",
                        number + 1, arena, wrong);
  }
  if (!status && !r->ended) status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint's description ends early");
  return status ? status : check_complete(r);
}

static gemini_status_t read_layout(gmi_layout_reader_t *r, const char *blob, uint64_t bytes) {
  const uint64_t sizes[2] = { gmi_chunk_bytes(r->m), gmi_copy_bytes(r->m, GEMINI_TIER_HOST, GEMINI_TIER_FILE) };
  r->block_bytes = gmi_block_bytes(r->m);
  gemini_status_t status = gmi_layout_read(r, blob, bytes);
  if (!status && memcmp(r->sizes, sizes, sizeof sizes) != 0)
    status = gmi_fail(GEMINI_ERR_FORMAT, 0,
                      "the checkpoint has chunks of %" PRIu64 " bytes, of which a block holds %" PRIu64
                      "; this manager has chunks of %" PRIu64 ", of which a block holds %" PRIu64,
                      r->sizes[0], r->sizes[1], sizes[0], sizes[1]);
  return status;
}

static gmi_chunk_t *kept_chunk(const gmi_layout_reader_t *r, uint64_t key) {
  uint32_t number = (uint32_t)(key >> 32), index = (uint32_t)key;
  uint32_t mine = number < GMI_ARENAS ? r->arena_of[number] : GMI_NONE;
  gmi_arena_t *a = mine != GMI_NONE ? gmi_arena_at(r->m, mine) : NULL;
  return a && a->store == mine && index < atomic_load(&a->chunk_count) ? &a->chunks[index] : NULL;
}

const char *gmi_chunk_why_not_resumed(gmi_chunk_t *c) {
  if (!gmi_chunk_has(c, GMI_VALID_ZERO)) return "written";
  if (gmi_chunk_is_pinned(c)) return "pinned to the device";
  if (gmi_chunk_deferred(c)) return "waiting for an update";
  return gmi_chunk_unsettle_to_change(c);
}

static gemini_status_t resume(gmi_manager_t *m) {
  const gmi_kept_t *kept;
  const void *blob;
  uint32_t count, arena = 0, index = 0;
  uint64_t blob_bytes;
  gmi_layout_reader_t r = { .m = m, .first = "gemini-keep 1" };
  gemini_status_t status = check_kept(m);
  if (!status && m->file.checkpoint_is_ours)
    status = gmi_fail(GEMINI_ERR_STATE, 0,
                      "a checkpoint was resumed or made already: resume once, before the first checkpoint");
  if (!status) status = gmi_cut(m);
  if (!status) status = gmi_store_committed(m->file.store, &kept, &count, &blob, &blob_bytes);
  if (!status && count * gmi_block_bytes(m) > m->config.file_bytes)
    status = gmi_fail(GEMINI_ERR_OOM_FILE, 0, "the checkpoint has %llu bytes of blocks, the file budget is %llu",
                      (unsigned long long)(count * gmi_block_bytes(m)), (unsigned long long)m->config.file_bytes);
  for (gmi_chunk_t *c; !status && (c = next_chunk(m, &arena, &index));) {
    const char *why = gmi_chunk_why_not_resumed(c);
    if (why) status = gmi_fail(GEMINI_ERR_STATE, 0, "arena %s is %s: resume first", gmi_chunk_arena(m, c)->name, why);
  }
  if (!status) status = read_layout(&r, blob, blob_bytes);
  uint32_t named = 0; /* chunks that have claimed their block; all claims are given up on failure */
  for (; !status && named < count; named += !status) {
    gmi_chunk_t *c = kept_chunk(&r, kept[named].key);
    if (!c || !gmi_chunk_block_claim(m, c, kept[named].block))
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "the checkpoint names chunk %#" PRIx64 "%s", kept[named].key,
                        c ? " twice" : ", which no arena has");
  }
  while (status && named-- > 0) gmi_chunk_block_unclaim(m, kept_chunk(&r, kept[named].key));
  if (status) return status;
  r.apply = true;
  read_layout(&r, blob, blob_bytes);
  for (uint32_t i = 0; i < count; i++) {
    gmi_chunk_t *c = kept_chunk(&r, kept[i].key);
    gmi_chunk_resumed(m, c);
    gmi_chunk_drop_device(m, c); /* zeros */
    gmi_host_slot_drop(m, c);
    m->file.used += gmi_block_bytes(m);
  }
  if (m->file.used > m->stats.peak_bytes[GEMINI_TIER_FILE]) m->stats.peak_bytes[GEMINI_TIER_FILE] = m->file.used;
  m->file.checkpoint_is_ours = true;
  return GEMINI_OK;
}
gemini_status_t gemini_resume(gemini_manager_t mgr) { API_LOCKED(resume(m)); }
