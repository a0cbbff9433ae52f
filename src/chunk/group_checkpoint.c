/* Checkpoints that all ranks of a group make together, and resume from. SPDX-License-Identifier: Apache-2.0
 *
 * Both calls are collectives. A rank keeps the manager's lock from begin to end; ranks *meet* in exchanges, where each
 * says whether it has failed, and how. So a failure of one ends the call on all of them, at the same point. While ranks
 * write or read, which takes them different times, they meet every ROUND_NS, so that none waits for the deadline.
 *
 * Checkpoint: (1) all check what they have and agree on the name of the parts; (2) each writes its part, a store with a
 * commit of its own (io/commit.c), which is durable before (3) the ranks meet; (4) rank 0 reads all indexes, replaces
 * the root, and (5) tells the others. A part that no root names is nobody's, whoever was killed when: (6) rank 0
 * removes those of the number that it has replaced, and before. Where it is not known whether the root names a part, it
 * stays.
 *
 * Resume: (1) all read root and indexes, and compare what they see; (2) each reads the blocks that have bytes of its
 * own; (3) they meet, and only if all have succeeded do tensors get their states; otherwise all bytes that were read
 * are given up again. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/hash.h"
#include "chunk/checkpoint.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/group_files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/update.h"
#include "core/workers.h"
#include "gemini/group.h"
#include "io/checksum.h"
#include "io/store.h"

#define ROUND_NS UINT64_C(500000000) /* the longest that ranks work without meeting, but for one chunk or a sync */

/* ---- meeting */
typedef gmi_report_t report_t;

typedef struct {
  gmi_manager_t *m;
  gmi_group_t *group; /* NULL: this process alone */
  const char *directories, *name, *call;
  uint32_t rank, ranks; /* of all replicas, which meet */
  gmi_part_id_t id;     /* of the part that this rank writes, if it is one of the first replica */
  gmi_part_id_t before; /* rank 0: of the checkpoint that is to be replaced; number 0: there is none */
  report_t *reports;    /* of all ranks, from the last meeting: the group's, or the one below */
  report_t alone;
  bool parted; /* a meeting failed: what other ranks do is not known */
} session_t;

static gemini_status_t no_memory(void) { return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a checkpoint"); }

static gemini_status_t exchange(session_t *k, const void *mine, uint64_t bytes, void *all, const char *what) {
  char label[96];
  if (!k->group) {
    memcpy(all, mine, bytes);
    return GEMINI_OK;
  }
  snprintf(label, sizeof label, "%s, %s", k->call, what);
  gemini_status_t status = gmi_group_exchange_locked(k->m, k->group, mine, bytes, all, label);
  k->parted |= status != GEMINI_OK;
  return status;
}

/* Tells the other ranks status, the failure of this one, and hears theirs. Returns the failure of this rank, or of the
 * first one that has failed. */
static gemini_status_t meet(session_t *k, gemini_status_t status, report_t mine, const char *what) {
  gmi_failure_t own;
  gmi_fail_keep(status, &own);
  mine.status = status;
  mine.native_code = own.native_code;
  memset(mine.message, 0, sizeof mine.message);
  if (status) memcpy(mine.message, own.message, sizeof own.message);
  gemini_status_t exchanged = exchange(k, &mine, sizeof mine, k->reports, what);
  if (own.status) return gmi_fail_again(&own);
  for (uint32_t r = 0; !exchanged && r < k->ranks; r++)
    if (k->reports[r].status)
      return gmi_fail(k->reports[r].status, k->reports[r].native_code, "rank %u: %.400s", r, k->reports[r].message);
  return exchanged;
}

/* Does work in rounds until all ranks are done. */
static gemini_status_t meet_in_rounds(session_t *k, gemini_status_t (*work)(void *user, uint64_t until_ns, bool *done),
                                      void *user, const char *what) {
  gemini_status_t status = GEMINI_OK;
  for (bool done = false, all = false; !status && !all;) {
    if (!done) status = work(user, gmi_now_ns() + ROUND_NS, &done);
    status = meet(k, status, (report_t){ .done = done }, what);
    all = true;
    for (uint32_t r = 0; r < k->ranks; r++) all &= k->reports[r].done;
  }
  return status;
}

/* Compares a value for each arena of this manager with the other ranks'; of_slices: of a sharded one only with those of
 * the ranks that have the same slices. differs: what it means if one is another. */
static gemini_status_t meet_over_arenas(session_t *k, const uint64_t mine[GMI_ARENAS], bool of_slices, const char *what,
                                        const char *differs) {
  uint64_t *all = calloc((uint64_t)k->ranks * GMI_ARENAS, sizeof *all);
  gemini_status_t status = meet(k, all ? GEMINI_OK : no_memory(), (report_t){ 0 }, what);
  if (!status) status = exchange(k, mine, GMI_ARENAS * sizeof *mine, all, what);
  for (uint32_t r = 1; !status && r < k->ranks; r++)
    for (uint32_t i = 0; !status && i < GMI_ARENAS; i++) {
      const gmi_arena_t *a = gmi_arena_at(k->m, i);
      const uint32_t other = of_slices && a && gmi_arena_is_sharded(a) ? r % k->id.ranks : 0;
      if (all[(uint64_t)r * GMI_ARENAS + i] != all[(uint64_t)other * GMI_ARENAS + i])
        status = gmi_fail(GEMINI_ERR_INVALID, 0, "rank %u differs from rank %u: %s arena %s", r, other, differs,
                          a ? a->name : "that this rank lacks");
    }
  free(all);
  return status;
}

static gemini_status_t session_open(gmi_manager_t *m, gemini_group_t group, const char *directories, const char *name,
                                    const char *call, session_t *k) {
  *k = (session_t){ .m = m, .directories = directories, .name = name, .call = call, .ranks = 1, .id = { .ranks = 1 } };
  if (group && !(k->group = gmi_group_get(m, group))) return GEMINI_ERR_HANDLE;
  if (k->group) {
    k->rank = k->group->rank;
    k->ranks = k->group->ranks;
    k->id = (gmi_part_id_t){ .rank = k->group->gather.rank, .ranks = k->group->gather.ranks };
  }
  k->reports = k->group ? k->group->reports : &k->alone;
  return GEMINI_OK;
}

/* most: bytes of name. Ends of files take up to 53 bytes of the 255 that systems have for a name. */
enum { NAME_BYTES = 160, NAME_BYTES_OF_ONE = 200 };
static gemini_status_t check_names(const session_t *k, size_t most) {
  if (!k->directories || !*k->directories) return gmi_fail(GEMINI_ERR_INVALID, 0, "directories names none");
  if (*k->directories == ':' || strstr(k->directories, "::") || k->directories[strlen(k->directories) - 1] == ':')
    return gmi_fail(GEMINI_ERR_INVALID, 0, "directories is \"%.200s\", which has an empty name", k->directories);
  if (!k->name || !*k->name || strchr(k->name, '/') || strlen(k->name) > most)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "name is \"%.60s\": it must have 1 to %zu bytes, and no /",
                    k->name ? k->name : "", most);
  return GEMINI_OK;
}

/* What ranks must have alike, beside their arenas. */
static uint64_t names_hash(const session_t *k) {
  uint64_t hash = gmi_hash(GMI_HASH_NOTHING, gmi_chunk_bytes(k->m));
  return k->name ? gmi_hash_text(hash, k->name) : hash;
}
static gemini_status_t check_names_agree(const session_t *k) {
  for (uint32_t r = 1; r < k->ranks; r++)
    if (k->reports[r].values[2] != k->reports[0].values[2])
      return gmi_fail(GEMINI_ERR_INVALID, 0,
                      "rank %u differs from rank 0: name is another, \"%.60s\" here, or chunk_bytes, %llu here", r,
                      k->name, (unsigned long long)gmi_chunk_bytes(k->m));
  return GEMINI_OK;
}

/* A hash of the layout of each arena. States of tensors may differ: those of rank 0 are saved. */
static void hash_layout(gmi_manager_t *m, uint64_t hashes_out[GMI_ARENAS]) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(m, i);
    hashes_out[i] = 0;
    if (!a || a->shard.whole != GMI_NONE) continue;
    const uint64_t numbers[] = { a->kind,
                                 a->element_bytes,
                                 a->like,
                                 a->store,
                                 atomic_load(&a->size),
                                 gmi_arena_is_sharded(a),
                                 gmi_arena_has_sums(a) && a->shard.summed };
    hashes_out[i] = gmi_hash_text(GMI_HASH_NOTHING, a->name);
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++) hashes_out[i] = gmi_hash(hashes_out[i], numbers[n]);
  }
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    gmi_tensor_t *t = &m->tensors.at[i];
    if (!gmi_tensor_alive(t) || t->base != i) continue; /* counterparts exist once a rank has asked for them */
    uint64_t hash = gmi_hash_text(GMI_HASH_NOTHING, t->name);
    hash = gmi_hash(gmi_hash(hash, t->offset), t->size);
    /* their order does not matter */
    hashes_out[t->arena] += gmi_hash(hash, (atomic_load(&t->word) & GMI_TENSOR_GRADIENT) != 0);
  }
}

/* Iterates over the chunks of all saved arenas. NULL: there are no more. */
typedef struct {
  uint32_t arena, chunk;
} cursor_t;
static gmi_chunk_t *next_chunk(gmi_manager_t *m, cursor_t *at, gmi_arena_t **arena_out) {
  for (; at->arena < GMI_ARENAS; at->arena++, at->chunk = 0) {
    gmi_arena_t *a = gmi_arena_at(m, at->arena);
    if (!a || !gmi_arena_is_saved(a)) continue;
    gmi_arena_t *store = gmi_saved_store(m, a);
    *arena_out = a;
    if (store->chunks && at->chunk < atomic_load(&store->chunk_count)) return &store->chunks[at->chunk++];
  }
  return NULL;
}

/* Do parts have all bytes of all arenas? bytes: added up from them. */
static void add_bytes(const gmi_part_t *p, uint64_t bytes[GMI_ARENAS]) {
  for (uint32_t i = 0; i < p->span_count; i++)
    bytes[p->arena_of[p->spans[i].arena]] += p->spans[i].size * p->spans[i].count;
}
static gemini_status_t check_whole(const session_t *k, const uint64_t bytes[GMI_ARENAS]) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    const gmi_arena_t *a = gmi_arena_at(k->m, i);
    if (a && gmi_arena_is_saved(a) && bytes[i] != atomic_load(&a->size))
      return gmi_fail(GEMINI_ERR_FORMAT, 0, "checkpoint %s has %llu bytes of arena %s, which has %llu", k->name,
                      (unsigned long long)bytes[i], a->name, (unsigned long long)atomic_load(&a->size));
  }
  return GEMINI_OK;
}

/* ---- checkpoint */
typedef struct {
  session_t *session;
  cursor_t at;
  gmi_store_t *store;
  gmi_kept_t *kept;
  uint32_t count;
  uint64_t copies[GMI_ARENAS]; /* checksums of what other ranks have, too */
} writer_t;

static gemini_status_t check_sharded(const session_t *k, gmi_arena_t *a) {
  gmi_manager_t *m = k->m;
  if (!k->group || a->shard.group != k->group->index)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "arena %s is sharded over %s: the group over which all sharded arenas of the manager are makes the "
                    "checkpoint",
                    a->name, k->group ? "another group" : "a group, and group is NULL");
  if (a->shard.reduced || a->shard.updated || (gmi_arena_has_sums(a) && a->shard.due))
    return gmi_fail(
        GEMINI_ERR_STATE, 0,
        "gradients of arena %s are being added over the ranks: make the checkpoint after the update, or, of "
        "several micro-batches, after gemini_norm()",
        a->name);
  const gmi_range_t all = { .arena = a, .store = a, .size = atomic_load(&a->size) };
  return gmi_gathered_settle(m, &all, false);
}

static gemini_status_t prepare(const session_t *k) {
  gmi_manager_t *m = k->m;
  cursor_t at = { 0, 0 };
  gmi_arena_t *a;
  gemini_status_t status = gmi_cut(m);
  if (!status) status = gmi_updates_queue(m, NULL);
  if (status) return status;
  gmi_workers_drain(m, NULL);
  status = gmi_workers_failure(m);
  for (uint32_t i = 0; !status && i < GMI_ARENAS; i++)
    if ((a = gmi_arena_at(m, i)) && gmi_arena_is_sharded(a)) status = check_sharded(k, a);
  for (uint32_t i = 0; !status && i < m->tensors.high; i++) {
    gmi_tensor_t *t = &m->tensors.at[i];
    if (gmi_tensor_alive(t) && gmi_arena_is_sharded(gmi_arena_at(m, t->arena)) &&
        atomic_load(&t->word) & GMI_TENSOR_GRADIENT)
      status = gmi_fail(GEMINI_ERR_STATE, 0,
                        "tensor %s is sharded and its bytes hold a gradient: make the checkpoint after the update",
                        gmi_tensor_base(m, t)->name);
  }
  for (gmi_chunk_t *c; !status && (c = next_chunk(m, &at, &a));) {
    const char *why = gmi_chunk_busy(c, GMI_TO_STORE);
    if (why) status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", a->name, why);
  }
  return status;
}

/* Does this rank write at all? */
static bool is_writer(const session_t *k) { return k->rank < k->id.ranks; }
/* Is the chunk saved? The next sums replace those that an update has taken. */
static bool is_saved(const gmi_arena_t *a) {
  return !gmi_arena_is_sharded(a) || !gmi_arena_has_sums(a) || a->shard.summed;
}
/* Does this rank write the chunk? */
static bool writes(const session_t *k, const gmi_arena_t *a, const gmi_chunk_t *c) {
  return is_writer(k) && is_saved(a) && (gmi_arena_is_sharded(a) || c->index % k->id.ranks == k->id.rank);
}
/* Do other ranks have the same chunk? */
static bool is_copy(const session_t *k, const gmi_arena_t *a) {
  return is_saved(a) && k->ranks > (gmi_arena_is_sharded(a) ? k->id.ranks : 1);
}

static uint32_t zeros_crc(uint32_t crc, uint64_t bytes) {
  static const uint8_t zeros[4096];
  for (; bytes; bytes -= bytes < sizeof zeros ? bytes : sizeof zeros)
    crc = gmi_crc32c(crc, zeros, bytes < sizeof zeros ? bytes : sizeof zeros);
  return crc;
}

static gemini_status_t write_chunk(writer_t *w, gmi_arena_t *a, gmi_chunk_t *c) {
  const session_t *k = w->session;
  gmi_manager_t *m = k->m;
  const bool compared = is_copy(k, a), mine = writes(k, a, c), zeros = gmi_chunk_has(c, GMI_VALID_ZERO);
  const uint64_t size = atomic_load(&gmi_saved_store(m, a)->size), at = (uint64_t)c->index << m->cut.chunk_shift;
  const uint64_t left = size > at ? size - at : 0;
  const uint64_t used = left < gmi_chunk_bytes(m) ? left : gmi_chunk_bytes(m);
  gemini_status_t status = GEMINI_OK;
  if (!compared && (!mine || zeros)) return GEMINI_OK;
  if (!zeros) status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_CALLER);
  if (!status && !zeros) status = gmi_chunk_settle_host(m, c);
  if (status) return status;
  if (compared) {
    const uint32_t crc = zeros ? zeros_crc(0, used) : gmi_crc32c(0, gmi_chunk_host(m, c), used);
    w->copies[a->index] = gmi_hash(w->copies[a->index], crc);
  }
  if (!mine || zeros) return GEMINI_OK;
  char owner[112];
  snprintf(owner, sizeof owner, "chunk %u of arena %s", c->index, a->name);
  gmi_block_request_t request = { .write = true, .buffer = gmi_chunk_host(m, c), .owner = owner };
  status = gmi_store_take(w->store, &request.block);
  if (status) return status;
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_FILES, 1);
  status = gmi_store_wait(w->store, &request);
  gmi_wait_end(m, &wait);
  if (!status) w->kept[w->count++] = (gmi_kept_t){ .block = request.block, .key = (uint64_t)a->index << 32 | c->index };
  return status;
}

static gemini_status_t open_store(writer_t *w) {
  const session_t *k = w->session;
  gmi_manager_t *m = k->m;
  char name[GMI_PART_NAME_BYTES];
  cursor_t at = { 0, 0 };
  gmi_arena_t *a;
  uint32_t count = 0;
  for (gmi_chunk_t *c; (c = next_chunk(m, &at, &a));) count += writes(k, a, c) && !gmi_chunk_has(c, GMI_VALID_ZERO);
  w->kept = calloc((size_t)count + 1, sizeof *w->kept);
  if (!w->kept) return no_memory();
  gmi_part_name(k->name, &k->id, name);
  const gmi_store_config_t config = { .directories = k->directories,
                                      .block_bytes = gmi_chunk_bytes(m),
                                      .block_count = count,
                                      .engine_kind = gmi_files_engine_wanted(m),
                                      .checksum = true,
                                      .keep = true,
                                      .checkpoint_name = name,
                                      .sys = m->file.sys };
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_SPACE, 0);
  gemini_status_t status = gmi_store_open(&config, &w->store);
  gmi_wait_end(m, &wait);
  return status;
}

static gemini_status_t write_round(void *user, uint64_t until_ns, bool *done) {
  writer_t *w = user;
  gmi_manager_t *m = w->session->m;
  gmi_arena_t *a;
  gemini_status_t status = w->store || !is_writer(w->session) ? GEMINI_OK : open_store(w);
  m->file.checkpointing = true; /* what is in files stays there, so that its copies on the host need not go back */
  while (!status && !*done && gmi_now_ns() < until_ns) {
    gmi_chunk_t *c = next_chunk(m, &w->at, &a);
    if (c) status = write_chunk(w, a, c);
    *done = !c;
  }
  m->file.checkpointing = false;
  return status;
}

/* Makes the part durable, and finds the checksum of its index. */
static gemini_status_t finish_part(writer_t *w, uint32_t *sum_out) {
  session_t *k = w->session;
  gmi_manager_t *m = k->m;
  char name[GMI_PART_NAME_BYTES], *text = NULL;
  size_t size;
  gmi_part_name(k->name, &k->id, name);
  gemini_status_t status = gmi_part_describe(m, &k->id, &text, &size);
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_COMMIT, 0);
  if (!status) status = gmi_store_commit(w->store, w->kept, w->count, text, size);
  free(text);
  gmi_store_close(w->store);
  w->store = NULL;
  char *path = gmi_saved_path(k->directories, 0, name, ".index");
  gmi_index_t index = { 0 };
  if (!status && !path) status = no_memory();
  if (!status) status = gmi_index_read(gmi_files_sys_of(m), path, &index);
  gmi_wait_end(m, &wait);
  *sum_out = index.checksum;
  gmi_index_free(&index);
  free(path);
  return status;
}

/* Rank 0: looks for a checkpoint of this name. number 0: there is none. */
static gemini_status_t look(const session_t *k, gmi_part_id_t *found_out) {
  gmi_root_t root = { 0 };
  gemini_status_t status = gmi_root_read(k->m, k->directories, k->name, &root);
  if (status == GEMINI_ERR_NOT_FOUND) status = GEMINI_OK;
  else if (!status && !root.of_group)
    status = gmi_fail(GEMINI_ERR_EXISTS, 0,
                      "%s.index in %s is the checkpoint of one process (gemini_checkpoint()), which this one would not "
                      "replace: choose another name",
                      k->name, k->directories);
  *found_out = (gmi_part_id_t){ .number = root.number, .token = root.token };
  gmi_root_free(&root);
  return status;
}

/* Where there are no locks: the parts that a root names which has come meanwhile must not be removed. */
static gemini_status_t check_still(const session_t *k) {
  gmi_part_id_t now;
  gemini_status_t status = look(k, &now);
  if (!status && (now.number != k->before.number || now.token != k->before.token))
    status = gmi_fail(GEMINI_ERR_BUSY, 0,
                      "another process has made checkpoint %llu of the name %s meanwhile, which this one would replace",
                      (unsigned long long)now.number, k->name);
  return status;
}

/* Rank 0, when all parts are durable: looks at them, and replaces the root. */
static gemini_status_t commit(const session_t *k, bool *in_force_out) {
  gmi_root_t root = { .of_group = true, .parts = k->id.ranks, .number = k->id.number, .token = k->id.token };
  gmi_part_t *part = malloc(sizeof *part);
  uint64_t bytes[GMI_ARENAS] = { 0 };
  root.sums = calloc(k->id.ranks, sizeof *root.sums);
  gemini_status_t status = part && root.sums ? GEMINI_OK : no_memory();
  for (uint32_t r = 0; !status && r < k->id.ranks; r++) root.sums[r] = (uint32_t)k->reports[r].values[0];
  for (uint32_t r = 0; !status && r < k->id.ranks; r++) {
    status = gmi_part_open(k->m, k->directories, k->name, &root, r, part);
    if (status)
      gmi_fail_prefix("rank 0 does not find what rank %u has written (ranks of several machines need directories that "
                      "all of them share): ",
                      r);
    if (status) break;
    add_bytes(part, bytes);
    gmi_part_close(part);
  }
  if (!status) status = check_whole(k, bytes);
  if (!status) status = check_still(k);
  if (!status) status = gmi_root_write(k->m, k->directories, k->name, &root, in_force_out);
  gmi_root_free(&root);
  free(part);
  return status;
}

/* Rank 0: finds the number of the new checkpoint. */
static gemini_status_t begin(session_t *k, int *lock_out) {
  int error;
  gemini_status_t status = gmi_saved_lock(gmi_files_sys_of(k->m), k->directories, k->name, lock_out, &error);
  if (status) return status;
  if (error)
    gmi_log(k->m, GEMINI_LOG_WARNING,
            "checkpoint %.100s: its directory has no locks (%s): no other process may make one of this name now",
            k->name, strerror(error));
  status = look(k, &k->before);
  k->id.number = k->before.number + 1;
  k->id.token = (gmi_now_ns() ^ (uint64_t)getpid() << 20) & UINT32_MAX;
  return status;
}

/* Rank 0 removes the parts of checkpoints from before. Those of a number that it has not seen may be another process's,
 * where there are no locks: they go with the next checkpoint. */
static gemini_status_t sweep_round(void *user, uint64_t until_ns, bool *done) {
  const session_t *k = user;
  *done = k->rank || gmi_saved_sweep(gmi_files_sys_of(k->m), k->directories, k->name, k->before.number, until_ns);
  return GEMINI_OK;
}

static gemini_status_t write_all(session_t *k, writer_t *w, bool *in_force_out, bool *written_out) {
  uint64_t layout[GMI_ARENAS];
  uint32_t sum = 0;
  k->id.number = k->reports[0].values[0];
  k->id.token = k->reports[0].values[1];
  gemini_status_t status = check_names_agree(k);
  hash_layout(k->m, layout);
  if (!status) status = meet_over_arenas(k, layout, false, "arenas", "other name, kind, size, tensors or content of");
  if (status) return status;
  *written_out = is_writer(k);
  status = meet_in_rounds(k, write_round, w, "writing");
  if (!status)
    status = meet_over_arenas(k, w->copies, true, "what several ranks have",
                              "its bytes, of which one copy would be saved, are others in");
  if (status) return status;
  if (is_writer(k)) status = finish_part(w, &sum);
  status = meet(k, status, (report_t){ .values = { sum } }, "parts");
  if (status) return status;
  if (!k->rank) status = commit(k, in_force_out);
  status = meet(k, status, (report_t){ .values = { *in_force_out } }, "commit");
  if (!k->parted) *in_force_out = k->reports[0].values[0];
  return status ? status : meet_in_rounds(k, sweep_round, k, "removing the checkpoint before");
}

static gemini_status_t checkpoint(gmi_manager_t *m, gemini_group_t group, const char *directories, const char *name) {
  session_t k;
  writer_t *w = NULL;
  bool in_force = false, written = false;
  int lock = -1;
  char part[GMI_PART_NAME_BYTES];
  gemini_status_t status = session_open(m, group, directories, name, "gemini_group_checkpoint", &k);
  if (status) return status;
  const gmi_sys_t *sys = gmi_files_sys_of(m);
  w = calloc(1, sizeof *w);
  status = w ? check_names(&k, NAME_BYTES) : no_memory();
  if (!status) status = prepare(&k);
  if (!status && !k.rank) status = begin(&k, &lock);
  const report_t mine = { .values = { k.id.number, k.id.token, names_hash(&k) } };
  status = meet(&k, status, mine, "begin");
  if (!status) {
    w->session = &k;
    status = write_all(&k, w, &in_force, &written);
  }
  gmi_failure_t first;
  gmi_fail_keep(status, &first);
  if (w) {
    gmi_store_close(w->store);
    free(w->kept);
    free(w);
  }
  gmi_part_name(name ? name : "", &k.id, part);
  if (written && status && !in_force && !k.parted) gmi_saved_remove(sys, directories, part);
  gmi_saved_unlock(sys, lock);
  return gmi_fail_again(&first);
}
gemini_status_t gemini_group_checkpoint(gemini_manager_t mgr, gemini_group_t group, const char *directories,
                                        const char *name) {
  API_LOCKED(checkpoint(m, group, directories, name));
}

/* ---- resume */
typedef struct {
  session_t *session;
  gmi_root_t root;
  gmi_part_t *parts;
  uint32_t part, entry; /* what is read next */
  uint8_t *buffer;
  uint64_t buffer_bytes;
} reader_t;

/* Nothing may have been written yet, or be in use. */
static gemini_status_t check_untouched(const session_t *k) {
  gmi_manager_t *m = k->m;
  cursor_t at = { 0, 0 };
  gmi_arena_t *a;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    a = gmi_arena_at(m, i);
    if (!a || !gmi_arena_is_sharded(a)) continue;
    if (!k->group)
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "arena %s is sharded over a group, and group is NULL", a->name);
    bool used = a->shard.reduced || a->shard.summed || (gmi_arena_has_sums(a) && a->shard.due);
    for (uint32_t n = 0; a->chunks && n < atomic_load(&a->chunk_count); n++)
      used |= gmi_chunk_is_resident(&a->chunks[n]);
    if (used) return gmi_fail(GEMINI_ERR_STATE, 0, "arena %s has been used on the device: resume first", a->name);
  }
  for (gmi_chunk_t *c; (c = next_chunk(m, &at, &a));) {
    const char *why = gmi_chunk_why_not_resumed(c);
    if (why) return gmi_fail(GEMINI_ERR_STATE, 0, "arena %s is %s: resume first", a->name, why);
  }
  return GEMINI_OK;
}

static gemini_status_t open_parts(reader_t *r) {
  const session_t *k = r->session;
  uint64_t bytes[GMI_ARENAS] = { 0 };
  gemini_status_t status = gmi_root_read(k->m, k->directories, k->name, &r->root);
  if (status) return status;
  r->parts = calloc(r->root.parts, sizeof *r->parts);
  if (!r->parts) return no_memory();
  for (uint32_t n = 0; !status && n < r->root.parts; n++) {
    status = gmi_part_open(k->m, k->directories, k->name, &r->root, n, &r->parts[n]);
    if (status) break;
    if (r->parts[n].held_bytes > r->buffer_bytes) r->buffer_bytes = r->parts[n].held_bytes;
    add_bytes(&r->parts[n], bytes);
  }
  if (!status) status = check_whole(k, bytes);
  if (status) return status;
  r->buffer = malloc(r->buffer_bytes + 1);
  return r->buffer ? GEMINI_OK : no_memory();
}

/* Writes bytes to an arena that has chunks in the tiers. */
static gemini_status_t put(gmi_manager_t *m, gmi_arena_t *store, uint64_t at, const uint8_t *bytes, uint64_t size) {
  gemini_status_t status = GEMINI_OK;
  while (!status && size) {
    gmi_chunk_t *c = &store->chunks[at >> m->cut.chunk_shift];
    const uint64_t in_chunk = at & (gmi_chunk_bytes(m) - 1), left = gmi_chunk_bytes(m) - in_chunk,
                   part = size < left ? size : left;
    status = gmi_chunk_to_host(m, c, false, GEMINI_REASON_CALLER);
    if (!status) status = gmi_chunk_settle_host(m, c);
    if (status) break;
    memcpy(gmi_chunk_host(m, c) + in_chunk, bytes, part);
    gmi_chunk_host_wrote(m, c);
    at += part, bytes += part, size -= part;
  }
  return status;
}

/* Takes from a block what this rank keeps of one range: size bytes at `in_block`, which are at offset in the arena.
 * *read_io: the block is in the buffer. */
static gemini_status_t take_range(reader_t *r, gmi_arena_t *a, uint64_t offset, uint64_t in_block, uint64_t size,
                                  bool *read_io) {
  gmi_manager_t *m = r->session->m;
  gmi_part_t *p = &r->parts[r->part];
  uint64_t own, own_bytes, at;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t from = offset; !status && gmi_saved_own(m, a, from, offset + size, &own, &own_bytes, &at);
       from = own + own_bytes) {
    if (!*read_io) status = gmi_saved_read(&p->files, r->entry, r->buffer, p->held_bytes);
    *read_io = true;
    if (!status) status = put(m, gmi_saved_store(m, a), at, r->buffer + in_block + (own - offset), own_bytes);
  }
  return status;
}

static gemini_status_t take_block(reader_t *r) {
  gmi_part_t *p = &r->parts[r->part];
  const uint64_t key = p->files.index.entries[r->entry].key, begin = (key & UINT32_MAX) * p->chunk_bytes,
                 end = begin + p->chunk_bytes;
  gmi_arena_t *a = gmi_arena_at(r->session->m, p->arena_of[key >> 32]);
  gemini_status_t status = GEMINI_OK;
  bool read = false;
  for (uint32_t i = 0; !status && i < p->span_count; i++) {
    const gmi_span_t *s = &p->spans[i];
    if (s->arena != key >> 32 || s->at >= end) continue;
    /* the first range that may end behind the block's begin */
    uint64_t n = s->count > 1 && begin > s->at + s->size ? (begin - s->at - s->size) / s->step_at : 0;
    for (; !status && n < s->count && s->at + n * s->step_at < end; n++) {
      uint64_t at = s->at + n * s->step_at, offset = s->offset + n * s->step, stop = at + s->size;
      if (stop <= begin) continue;
      if (stop > end) stop = end;
      const uint64_t cut = at < begin ? begin - at : 0;
      status = take_range(r, a, offset + cut, at + cut - begin, stop - at - cut, &read);
    }
  }
  return status;
}

static gemini_status_t read_round(void *user, uint64_t until_ns, bool *done) {
  reader_t *r = user;
  gemini_status_t status = GEMINI_OK;
  gmi_wait_t wait;
  gmi_wait_begin(r->session->m, &wait, NULL, GMI_WAIT_FILES, 1);
  while (!status && gmi_now_ns() < until_ns && r->part < r->root.parts) {
    if (r->entry < r->parts[r->part].files.index.entry_count) {
      status = take_block(r);
      r->entry++;
    } else {
      gmi_saved_rest(&r->parts[r->part].files);
      r->part++;
      r->entry = 0;
    }
  }
  gmi_wait_end(r->session->m, &wait);
  *done = r->part == r->root.parts;
  return status;
}

/* All chunks were zeros before, and are again. */
static void forget_all(gmi_manager_t *m) {
  cursor_t at = { 0, 0 };
  gmi_arena_t *a;
  for (gmi_chunk_t *c; (c = next_chunk(m, &at, &a));)
    if (!gmi_chunk_has(c, GMI_VALID_ZERO)) gmi_chunk_forget(m, c);
}

static gemini_status_t read_all(reader_t *r) {
  session_t *k = r->session;
  uint64_t layout[GMI_ARENAS];
  gemini_status_t status = check_names_agree(k);
  for (uint32_t n = 1; !status && n < k->ranks; n++)
    if (memcmp(k->reports[n].values, k->reports[0].values, sizeof k->reports[n].values) != 0)
      status = gmi_fail(GEMINI_ERR_INVALID, 0,
                        "rank %u differs from rank 0: it finds checkpoint %llu of the name %s, rank 0 finds %llu, or "
                        "another of this number",
                        n, (unsigned long long)k->reports[n].values[0], k->name,
                        (unsigned long long)k->reports[0].values[0]);
  hash_layout(k->m, layout);
  if (!status) status = meet_over_arenas(k, layout, false, "arenas", "other name, kind, size or tensors of");
  if (status) return status;
  status = meet_in_rounds(k, read_round, r, "reading");
  if (status) forget_all(k->m);
  else gmi_part_apply(k->m, &r->parts[0]);
  return status;
}

static gemini_status_t resume(gmi_manager_t *m, gemini_group_t group, const char *directories, const char *name) {
  session_t k;
  gemini_status_t status = session_open(m, group, directories, name, "gemini_group_resume", &k);
  if (status) return status;
  reader_t r = { .session = &k };
  status = check_names(&k, NAME_BYTES_OF_ONE);
  if (!status) status = gmi_cut(m);
  if (!status) status = gmi_updates_queue(m, NULL);
  if (!status) status = check_untouched(&k);
  if (!status) status = open_parts(&r);
  const report_t mine = { .values = { r.root.number, r.root.token ^ (uint64_t)r.root.checksum << 32, names_hash(&k) } };
  status = meet(&k, status, mine, "begin");
  if (!status) status = read_all(&r);
  gmi_failure_t first;
  gmi_fail_keep(status, &first);
  for (uint32_t n = 0; r.parts && n < r.root.parts; n++) gmi_part_close(&r.parts[n]);
  gmi_root_free(&r.root);
  free(r.parts);
  free(r.buffer);
  return gmi_fail_again(&first);
}
gemini_status_t gemini_group_resume(gemini_manager_t mgr, gemini_group_t group, const char *directories,
                                    const char *name) {
  API_LOCKED(resume(m, group, directories, name));
}
