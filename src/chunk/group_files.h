/* What the files of a group's checkpoint say: the parts that ranks have written, and the root that names them. The
 * caller holds the manager's lock.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Files, of which all but the chunks are in the first directory (docs/checkpoint.md):
 *   <name>.ranks                              the root, an index without blocks; its text names the parts
 *   <name>.<number>-<token>.<rank>.index      a part: its blocks, and a text with arenas, tensors and spans
 *   <name>.<number>-<token>.<rank>.<n>.chunks its blocks */
#ifndef GMI_GROUP_FILES_H
#define GMI_GROUP_FILES_H

#include "chunk/arena.h"
#include "io/saved.h"

enum { GMI_PART_NAME_BYTES = 288 };

/* Which bytes of an arena a part has: count ranges of size bytes each, of which each is step bytes behind the one
 * before in the arena, and step_at bytes in the part. In the part, the bytes of an arena are cut into chunks, and a
 * block has the key arena << 32 | chunk; a chunk without a block is zeros. */
typedef struct gmi_span {
  uint64_t arena; /* in a part that was read: its own number of it */
  uint64_t offset, size, at, count, step, step_at;
} gmi_span_t;
/* The spans of an arena of this manager that rank writes; returns their number. An arena that is not sharded is divided
 * among ranks by chunks. */
enum { GMI_SPANS_OF_ARENA = 2 };
uint32_t gmi_spans_of(gmi_manager_t *m, gmi_arena_t *a, uint32_t rank, uint32_t ranks,
                      gmi_span_t spans_out[GMI_SPANS_OF_ARENA]);
/* Does a checkpoint hold bytes of the arena itself? Not of one whose bytes are another's, or that is slices. */
static inline bool gmi_arena_is_saved(const gmi_arena_t *a) {
  return a->store == a->index && a->shard.whole == GMI_NONE;
}
/* Finds the first bytes of [from, end) of a saved arena that this rank keeps, and where they are in the arena that has
 * their chunks (gmi_saved_store()). False: there are none. */
bool gmi_saved_own(gmi_manager_t *m, gmi_arena_t *a, uint64_t from, uint64_t end, uint64_t *offset_out,
                   uint64_t *size_out, uint64_t *at_out);
gmi_arena_t *gmi_saved_store(gmi_manager_t *m, gmi_arena_t *a);

/* Who a checkpoint is, and which part of it. */
typedef struct gmi_part_id {
  uint32_t rank, ranks;
  uint64_t number, token; /* counted from 1; of an attempt */
} gmi_part_id_t;
/* "<name>.<number>-<token>.<rank>" */
void gmi_part_name(const char *name, const gmi_part_id_t *id, char name_out[GMI_PART_NAME_BYTES]);
bool gmi_part_has_name(const char *name); /* some rank's part could have it; files of old parts are removed by name */
/* The text of this rank's part. The caller frees it. */
gemini_status_t gmi_part_describe(gmi_manager_t *m, const gmi_part_id_t *id, char **text_out, size_t *size_out);

typedef struct gmi_part {
  gmi_saved_t files;
  gmi_part_id_t id;
  bool of_group; /* false: it is the checkpoint of one process, gemini_checkpoint() */
  uint64_t chunk_bytes, held_bytes;
  gmi_span_t *spans;
  uint32_t span_count, span_capacity;
  uint32_t arena_of[GMI_ARENAS];  /* the part's number of an arena to this manager's */
  uint32_t sums[GMI_ARENAS / 32]; /* bit map by this manager's number: gradients of earlier micro-batches */
} gmi_part_t;

typedef struct gmi_root {
  bool of_group;  /* false: there is the index of one process's checkpoint in its place */
  uint32_t parts; /* 1 of one process */
  uint64_t number, token;
  uint32_t checksum; /* of the file */
  uint32_t *sums;    /* checksum of each part's index; owned */
} gmi_root_t;
/* Reads "<name>.ranks", or looks whether there is "<name>.index". NOT_FOUND: there is neither; FORMAT: damaged, or both
 * are there. */
gemini_status_t gmi_root_read(gmi_manager_t *m, const char *directories, const char *name, gmi_root_t *root_out);
/* Replaces the root. If the rename fails, the root is read again: where it is the new one, the call goes on.
 * *in_force_out: it is replaced, or may be, also if the call fails. */
gemini_status_t gmi_root_write(gmi_manager_t *m, const char *directories, const char *name, const gmi_root_t *root,
                               bool *in_force_out);
void gmi_root_free(gmi_root_t *root);

/* Reads the description of a part and compares it with the manager's arenas and tensors. FORMAT also if it is not the
 * one that root names, or was looked at, of one process. */
gemini_status_t gmi_part_open(gmi_manager_t *m, const char *directories, const char *name, const gmi_root_t *root,
                              uint32_t rank, gmi_part_t *part_out);
/* Gives tensors the states, and sums, that the part says. */
void gmi_part_apply(gmi_manager_t *m, gmi_part_t *part);
void gmi_part_close(gmi_part_t *part); /* of all zeros: does nothing */

const struct gmi_sys *gmi_files_sys_of(const gmi_manager_t *m);

#endif
