/* Host memory in blocks of any size, out of one given range. SPDX-License-Identifier: Apache-2.0
 *
 * A jemalloc arena hands out the small ones; what it hands them out of (extents) it takes from the range and gives back
 * as soon as it is empty. Large ones are parts of the range themselves: an arena would round them up by as much as a
 * quarter. Records lie outside the range, so that blocks can be freed while it is full.
 *
 * Extents come from the end of the range downwards, so that its beginning stays free for others. The range is backed
 * grain by grain: commit is called before a grain's first extent, decommit after its last. Outside the two calls
 * nothing of a grain is touched. */
#ifndef GMI_HOST_HEAP_H
#define GMI_HOST_HEAP_H

#include <stdint.h>

#include "gemini.h"

typedef struct gmi_host_heap gmi_host_heap_t;

/* Backs one grain; at the end of the range the last one may be short. GEMINI_ERR_BUSY: not this one, but perhaps
 * another; any other failure is that of the allocation.
 * Called by the thread that allocates, with no lock of the blocks held: it may wait, and others may allocate and free
 * meanwhile. They wait for it when they need the same grain, so a lock that commit takes must be held by every caller
 * of gmi_host_heap_alloc(), or by none. It must not allocate or free blocks itself: these calls return STATE. */
typedef gemini_status_t (*gmi_host_heap_commit_fn)(void *user, uint64_t offset_bytes, uint64_t size_bytes);
/* Called by the thread that frees, or whose allocation failed, with the blocks' lock held: it must not wait for another
 * that uses the blocks, nor use them itself. */
typedef void (*gmi_host_heap_decommit_fn)(void *user, uint64_t offset_bytes, uint64_t size_bytes);

typedef struct gmi_host_heap_config {
  void *base;                         /* page-aligned; borrowed until close */
  uint64_t size_bytes;                /* whole pages, not 0 */
  uint64_t grain_bytes;               /* whole pages, fewer than 2^32; 0 = the whole range is one grain */
  gmi_host_heap_commit_fn commit;     /* NULL: the range is backed all the time */
  gmi_host_heap_decommit_fn decommit; /* NULL: grains stay backed */
  void *user;
} gmi_host_heap_config_t;

typedef struct gmi_host_heap_figures {
  uint64_t range_bytes;
  uint64_t grain_bytes_used; /* in grains that are backed */
  uint64_t extent_bytes;     /* taken from the range */
  uint64_t block_bytes;      /* in live blocks, as large as they really are */
  uint64_t block_count;      /* live */
} gmi_host_heap_figures_t;

/* INVALID: a value is out of range; OOM_SYSTEM: no memory for records, or no arena is left (some 4,000 can exist). */
gemini_status_t gmi_host_heap_open(const gmi_host_heap_config_t *config, gmi_host_heap_t **blocks_out);
/* Frees every block. NULL is accepted. Threads: no other call may run. */
void gmi_host_heap_close(gmi_host_heap_t *blocks);

/* Bytes are undefined. alignment: a power of two or 0; 256 is the least. Blocks of more than 56 KiB are rounded up to
 * whole 16 KiB, and aligned to them; smaller ones to 256 bytes, and from 1 KiB on to a class at most a quarter larger.
 * OOM_HOST: the range has no room; the message names what was asked and what the range has. OOM_SYSTEM: no memory
 * for records. INVALID: size_bytes is 0, alignment is no power of two. STATE: called by commit or decommit. Otherwise
 * what commit returned. Nothing changed. Threads: any. */
gemini_status_t gmi_host_heap_alloc(gmi_host_heap_t *blocks, uint64_t size_bytes, uint64_t alignment, void **block_out);
/* NULL is accepted. Its grain is given back before this returns when the block was the last in it.
 * INVALID: no live block begins there; nothing changed. STATE: as above. Threads: any. */
gemini_status_t gmi_host_heap_free(gmi_host_heap_t *blocks, void *block);
void gmi_host_heap_figures(gmi_host_heap_t *blocks, gmi_host_heap_figures_t *figures_out);

#endif
