/* The heap of non-model memory: which offsets allocations get. SPDX-License-Identifier: Apache-2.0
 *
 * A two-level segregated-fit allocator (Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems",
 * ECRTS 2004) over offsets of one address range. Its records are out of band, because the range is device memory. It
 * makes no device calls: it counts the live blocks of each page (the caller's unit of backing memory), and the caller
 * backs pages that have a user and may take back those without.
 *
 * Not thread-safe: guarded by its owner's lock. Placement depends only on the sequence of calls, never on which pages
 * have memory, so equal sequences give equal layouts. */
#ifndef GMI_HEAP_H
#define GMI_HEAP_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

#define GMI_HEAP_ALIGN 512u

typedef struct gmi_heap gmi_heap_t;

/* The work that must be done before freed bytes are reused: points in streams. A point has its stream, not 0, in the
 * top byte and a mark in that stream below it; 0 = no point. A tag holds several, so that blocks freed by a few streams
 * merge without a device call. The range begins as one free block whose tag is all zero. */
enum { GMI_HEAP_POINTS = 3, GMI_HEAP_POINT_STREAM_SHIFT = 56 };
typedef struct gmi_heap_tag {
  uint64_t point[GMI_HEAP_POINTS];
} gmi_heap_tag_t;

/* Called when two free neighbours with different tags merge (the zero tag is not special): returns a tag whose work
 * includes that of both. Must not call the heap. */
typedef gmi_heap_tag_t (*gmi_heap_join_fn)(void *user, gmi_heap_tag_t a, gmi_heap_tag_t b);

typedef struct gmi_heap_block {
  uint64_t offset;     /* bytes, multiple of GMI_HEAP_ALIGN */
  uint64_t size_bytes; /* rounded up to GMI_HEAP_ALIGN */
  gmi_heap_tag_t tag;  /* of the free block it was cut from: to be waited for before the bytes are used */
} gmi_heap_block_t;

/* range_bytes and page_bytes: multiples of GMI_HEAP_ALIGN, not 0; range_bytes a multiple of page_bytes, at most 2^46;
 * join is required. INVALID otherwise. */
gemini_status_t gmi_heap_create(uint64_t range_bytes, uint64_t page_bytes, gmi_heap_join_fn join, void *user,
                                gmi_heap_t **heap_out);
void gmi_heap_destroy(gmi_heap_t *heap); /* NULL is accepted */

/* Allocates a block. stream: as in the top byte of a point, or 0; among blocks that fit equally well, one without
 * points of other streams is preferred, as it needs no wait. OOM_DEVICE: no free block is long enough. OOM_SYSTEM: no
 * memory for a record. INVALID: size_bytes is 0. A failure changes nothing. The block's pages count as used from here
 * on. Takes time in proportion to the pages touched (under 1 ns each); the free blocks of the request's class are all
 * searched only when OOM_DEVICE is the alternative. */
gemini_status_t gmi_heap_alloc(gmi_heap_t *heap, uint64_t size_bytes, uint32_t stream, gmi_heap_block_t *block_out);
/* Finds the live block that starts at offset; false when none does. */
bool gmi_heap_find(const gmi_heap_t *heap, uint64_t offset, gmi_heap_block_t *block_out);
/* Marks the live block that starts at offset, until it is freed; gmi_heap_marked() counts those. */
void gmi_heap_mark(gmi_heap_t *heap, uint64_t offset);
uint64_t gmi_heap_marked(const gmi_heap_t *heap);
/* Frees the block that starts at offset; false, and nothing changed, when none does. tag: the work after which the
 * bytes may be reused. */
bool gmi_heap_free(gmi_heap_t *heap, uint64_t offset, gmi_heap_tag_t tag);

/* How many live blocks touch a page; at 0 its backing memory may be taken. */
uint32_t gmi_heap_page_users(const gmi_heap_t *heap, uint64_t page);
/* The tag of the free block that covers a page without users; all zero for a page with users. Takes time in proportion
 * to the unused pages below it. */
gmi_heap_tag_t gmi_heap_page_tag(const gmi_heap_t *heap, uint64_t page);
/* How many pages have a user now. */
uint64_t gmi_heap_pages_used(const gmi_heap_t *heap);
/* Bytes in live blocks, by their rounded sizes, and the number of live blocks. */
uint64_t gmi_heap_bytes_used(const gmi_heap_t *heap);
uint64_t gmi_heap_blocks_used(const gmi_heap_t *heap);
/* Checks the invariants: blocks tile the range, no two neighbours are free, free lists and bitmaps agree, the pages'
 * user counts are right. For tests and debug builds. */
bool gmi_heap_check(const gmi_heap_t *heap);

#endif
