/* The heap's records, for heap.c and for the unit test that damages them. SPDX-License-Identifier: Apache-2.0
 *
 * Everything is counted in units of GMI_HEAP_ALIGN bytes: 2^46 bytes are 2^37 units. Nodes are named by their index
 * in one array, which moves when it grows; index 0 is no node. */
#ifndef GMI_HEAP_INTERNAL_H
#define GMI_HEAP_INTERNAL_H

#include "chunk/heap.h"

/* A class holds the free blocks of one range of sizes: sizes below 32 units have a class each, every power of two
 * from there on is cut into 32 classes. 2^37 units lie in row 37 - 4. */
#define GMI_HEAP_COLUMNS_LOG2 5u
#define GMI_HEAP_COLUMNS 32u
#define GMI_HEAP_ROWS 34u

enum { GMI_HEAP_SPARE = 0, GMI_HEAP_FREE = 1, GMI_HEAP_LIVE = 2 };

typedef struct gmi_heap_node {
  uint64_t first; /* unit */
  uint64_t units;
  gmi_heap_tag_t tag;    /* free: wait for it before use; live: of the block it was cut from */
  uint32_t below, above; /* neighbours by address */
  uint32_t prev, next;   /* free: in its class; spare: next only */
  uint32_t state;
  uint32_t reserved;
} gmi_heap_node_t;

typedef struct gmi_heap_page {
  uint32_t users; /* live blocks that touch it */
  uint32_t cover; /* the free block whose first whole page this is */
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

  uint32_t *buckets; /* open addressing, live blocks by first unit; a power of two, at most half full */
  uint64_t bucket_mask;
  uint32_t bucket_shift; /* 64 - log2 of their number */
  uint32_t reserved2;

  gmi_heap_page_t *pages; /* pages [page_count, range_pages) have no user, and no cover starts there */
  uint64_t page_count;

  uint64_t pages_used, units_used, blocks_used;
  uint64_t row_map;
  uint32_t column_map[GMI_HEAP_ROWS];
  uint32_t heads[GMI_HEAP_ROWS][GMI_HEAP_COLUMNS];
};

#endif
