/* This rank's own slice of a chunk of a sharded arena: its parts in the arena of slices, and copies between these and
 * the chunk's frame. For shard.c and sums.c. The caller holds the manager's lock.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_SLICES_H
#define GMI_SLICES_H

#include "chunk/shard.h"

typedef struct gmi_own_part {
  gmi_chunk_t *chunk; /* of the arena of slices */
  uint64_t in_chunk;  /* bytes */
  uint64_t in_slice;
  uint64_t bytes;
} gmi_own_part_t;
typedef struct gmi_own_slice {
  gmi_arena_t *whole;
  gmi_group_t *group;
  gmi_slicing_t slicing;
  uint64_t begin, bytes; /* of the slice in its chunk */
  uint32_t count;
  gmi_own_part_t parts[GMI_SLICE_PARTS]; /* in ascending order */
} gmi_own_slice_t;

gmi_own_slice_t gmi_own_slice_of(gmi_manager_t *m, const gmi_chunk_t *c);
/* BUSY: something uses a part, so that it cannot be read now, or changed. Of parts to be changed, acquires take the
 * slow path from now on. */
gemini_status_t gmi_own_slice_check(const gmi_own_slice_t *p, bool change);
/* Parts that are held keep their host slots. */
void gmi_own_slice_hold(gmi_manager_t *m, const gmi_own_slice_t *p);
void gmi_own_slice_unhold(gmi_manager_t *m, const gmi_own_slice_t *p);
/* Makes each part's bytes valid on the host, unless they are on the device or, to be read only, zero. The parts are
 * held: making room for one does not take another's slot. */
gemini_status_t gmi_own_slice_bring(gmi_manager_t *m, const gmi_own_slice_t *p, bool write);
/* Queues copies of the own slice into the chunk's frame. */
gemini_status_t gmi_own_slice_copy_in(gmi_manager_t *m, const gmi_own_slice_t *p, uint8_t *frame, uint32_t stream);
/* Queues copies of the own slice from the chunk's frame, which is complete behind after, into the arena of slices,
 * or adds it to what is there. Its parts were brought for writing. *end_out: behind all of them. What fails here is the
 * device. */
gemini_status_t gmi_own_slice_copy_out(gmi_manager_t *m, const gmi_own_slice_t *p, const uint8_t *frame,
                                       gmi_fence_t after, gmi_fence_t *end_out);

#endif
