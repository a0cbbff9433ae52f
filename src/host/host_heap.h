/* A heap: blocks of any size from one given range of host memory. SPDX-License-Identifier: Apache-2.0
 *
 * Block: what a caller gets. Extent: a part of the range that holds blocks. Grain: the unit in which the range is
 * backed by memory. Small blocks come from a jemalloc arena, which takes extents from the range and gives each back as
 * soon as it is empty. A large block is an extent of its own: an arena would round it up by as much as a quarter. All
 * records lie outside the range, so that blocks can be freed while the range is full.
 *
 * Extents are taken from the end of the range downwards, so that its beginning stays free for chunks. commit is called
 * before a grain's first extent is used, decommit after its last one is given back; outside of that time the grain's
 * memory is not touched. */
#ifndef GMI_HOST_HEAP_H
#define GMI_HOST_HEAP_H

#include <stdint.h>

#include "gemini.h"

typedef struct gmi_host_heap gmi_host_heap_t;

/* Backs one grain with memory; the last grain of the range may be short. GEMINI_ERR_BUSY: this grain cannot be had, but
 * another may; any other failure fails the allocation.
 * Called on the allocating thread, without the heap's lock: it may block, and other threads may allocate and free
 * meanwhile. Threads that need the same grain wait for it; a lock that commit takes must therefore be held by every
 * caller of gmi_host_heap_alloc(), or by none. commit must not use the heap itself: its calls return STATE then. */
typedef gemini_status_t (*gmi_host_heap_commit_fn)(void *user, uint64_t offset_bytes, uint64_t size_bytes);
/* Called on the thread that frees, or whose allocation failed, with the heap's lock held: it must not wait for a thread
 * that uses the heap, nor use the heap itself. */
typedef void (*gmi_host_heap_decommit_fn)(void *user, uint64_t offset_bytes, uint64_t size_bytes);

typedef struct gmi_host_heap_config {
  void *base;                         /* page-aligned; borrowed until close */
  uint64_t size_bytes;                /* whole pages, not 0 */
  uint64_t grain_bytes;               /* whole pages, fewer than 2^32; 0 = the whole range is one grain */
  gmi_host_heap_commit_fn commit;     /* NULL: the whole range is backed already */
  gmi_host_heap_decommit_fn decommit; /* NULL: grains stay backed */
  void *user;
} gmi_host_heap_config_t;

typedef struct gmi_host_heap_figures {
  uint64_t range_bytes;
  uint64_t grain_bytes_used; /* in grains that are backed */
  uint64_t extent_bytes;     /* in extents */
  uint64_t block_bytes;      /* in live blocks, at their rounded sizes */
  uint64_t block_count;      /* live blocks */
} gmi_host_heap_figures_t;

/* INVALID: a value is out of range; OOM_SYSTEM: no memory for records, or no jemalloc arena left (some 4,000 can exist
 * in a process). */
gemini_status_t gmi_host_heap_open(const gmi_host_heap_config_t *config, gmi_host_heap_t **blocks_out);
/* Frees every block. NULL is accepted. Threads: no other call may run. */
void gmi_host_heap_close(gmi_host_heap_t *blocks);

/* Allocates a block; its bytes are undefined. alignment: a power of two or 0; at least 256 is used. Blocks of more than
 * 56 KiB are rounded up to a multiple of 16 KiB and aligned to that; smaller ones to a multiple of 256 bytes, and from
 * 1 KiB on to a size class at most a quarter larger.
 * OOM_HOST: the range has no space; the message names the size asked for and what the range has. OOM_SYSTEM: no memory
 * for records. INVALID: size_bytes is 0 or alignment is no power of two. STATE: called in commit or decommit. Any other
 * failure is commit's. A failure changes nothing. Threads: any. */
gemini_status_t gmi_host_heap_alloc(gmi_host_heap_t *blocks, uint64_t size_bytes, uint64_t alignment, void **block_out);
/* Frees a block. NULL is accepted. If it was the last block in a grain, decommit is called before this returns.
 * INVALID: no live block begins there; nothing changed. STATE: as above. Threads: any. */
gemini_status_t gmi_host_heap_free(gmi_host_heap_t *blocks, void *block);
void gmi_host_heap_figures(gmi_host_heap_t *blocks, gmi_host_heap_figures_t *figures_out);

#endif
