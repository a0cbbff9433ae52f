/* The description of a checkpoint: its arenas and tensors, as text (docs/checkpoint.md). The caller holds the manager's
 * lock.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_CHECKPOINT_H
#define GMI_CHECKPOINT_H

#include <stdio.h>

#include "core/manager.h"

/* Writes a line for each arena, except those of slices, and for each tensor. */
void gmi_layout_write(gmi_manager_t *m, FILE *file);

typedef struct gmi_layout_reader {
  gmi_manager_t *m;
  const char *first;    /* the first line */
  uint64_t block_bytes; /* of the file: the sizes below where there is no line of them */
  bool apply;           /* sets the states of tensors, otherwise changes nothing */
  /* Takes a line that is none of those here. Returns NULL, or what is wrong with it. NULL: there are no others. */
  const char *(*line)(void *user, const char *line);
  void *user;
  /* Results: */
  uint32_t arena_of[GMI_ARENAS]; /* the description's arena number to this manager's; GMI_NONE: it has no such arena */
  uint64_t tensors;
  uint64_t sizes[2]; /* of a chunk, and of what a block holds of it */
  bool ended;        /* private */
} gmi_layout_reader_t;
/* Reads a description, and compares it with the manager's arenas and tensors. FORMAT: it is malformed, or they
 * differ; sharded arenas do not differ from whole ones, unless their bytes are gradients. */
gemini_status_t gmi_layout_read(gmi_layout_reader_t *r, const char *blob, uint64_t bytes);

/* NULL: the chunk has no bytes and nothing uses it, until the lock is released; otherwise the reason. */
const char *gmi_chunk_why_not_resumed(gmi_chunk_t *c);

#endif
