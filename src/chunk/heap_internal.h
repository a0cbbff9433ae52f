/* The heap's records, for heap.c and for the unit test that corrupts them. SPDX-License-Identifier: Apache-2.0
 *
 * Offsets and sizes are in units of GMI_HEAP_ALIGN bytes: 2^46 bytes are 2^37 units. Nodes refer to each other by index
 * in one array instead of by pointer, because the array moves when it grows; index 0 means none. */
#ifndef GMI_HEAP_INTERNAL_H
#define GMI_HEAP_INTERNAL_H

#include "chunk/heap.h"

/* A class is the list of free blocks whose sizes fall in one range: each size below 32 units has a class of its own,
 * and every power of two from there on is divided into 32 classes. The largest block, 2^37 units, is in row 37 - 4,
 * hence 34 rows. */
#define GMI_HEAP_COLUMNS_LOG2 5u
#define GMI_HEAP_COLUMNS 32u
#define GMI_HEAP_ROWS 34u

enum { GMI_HEAP_SPARE = 0, GMI_HEAP_FREE = 1, GMI_HEAP_LIVE = 2 };

/* A block, free or live, or a spare record. Blocks tile the range: `above` of each begins where it ends. Two free
 * blocks are never neighbours. */
typedef struct gmi_heap_node {
  uint64_t first; /* unit */
  uint64_t units;
  gmi_heap_tag_t tag;    /* free: to be waited for before reuse; live: of the free block it was cut from */
  uint32_t below, above; /* neighbours by address, 0: none; they make merging on free constant time */
  uint32_t prev, next;   /* free: links of its class's list; spare: next only */
  uint32_t state;
  bool marked; /* only of a live block */
  bool reserved[3];
} gmi_heap_node_t;

typedef struct gmi_heap_page {
  uint32_t users; /* live blocks that touch it */
  uint32_t cover; /* the free block whose first whole page this is; 0: none */
} gmi_heap_page_t;

struct gmi_heap {
  uint64_t range_units, page_units;
  uint64_t range_pages;
  uint32_t page_shift; /* page_units is 2^page_shift; UINT32_MAX: no power of two */
  uint32_t reserved;
  gmi_heap_join_fn join;
  void *user;

  gmi_heap_node_t *nodes;
  uint32_t node_count, node_capacity; /* nodes ever in use, node 0 among them */
  uint32_t spare;                     /* list of spare nodes */
  uint32_t lowest;                    /* the block at offset 0 */

  uint32_t *buckets; /* hash table of live blocks by first unit: linear probing, a power of two, at most half full */
  uint64_t bucket_mask;
  uint32_t bucket_shift; /* 64 - log2 of their number */
  uint32_t reserved2;

  gmi_heap_page_t *pages; /* grows as pages are used: those from page_count on have no user and no cover */
  uint64_t page_count;

  uint64_t pages_used, units_used, blocks_used, blocks_marked;
  uint64_t row_map; /* bit per row with a free block; column_map: bit per class of a row; heads: the classes' lists */
  uint32_t column_map[GMI_HEAP_ROWS];
  uint32_t heads[GMI_HEAP_ROWS][GMI_HEAP_COLUMNS];
};

#endif
