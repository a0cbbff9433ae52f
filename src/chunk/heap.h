/* Where non-model allocations lie. SPDX-License-Identifier: Apache-2.0
 *
 * A two-level segregated-fit allocator (Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems",
 * ECRTS 2004) over offsets of one address range, with its records out of band because the range is device memory.
 * It knows nothing of devices: it says which *pages* (frames of the caller's size) an allocation needs and which a
 * free leaves empty.
 *
 * Not thread-safe: guarded by its owner's lock. Placement depends on the sequence of calls only, never on which
 * pages are committed, so that equal sequences give equal layouts. */
#ifndef GMI_HEAP_H
#define GMI_HEAP_H

#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

#define GMI_HEAP_ALIGN 512u

typedef struct gmi_heap gmi_heap_t;

/* What must be over before freed bytes are reused: points in streams, each with its stream in the top byte, not 0, and
 * a mark below; 0 = none. Several, so that joining the tags of a few streams costs no call of the device. The range
 * begins as one free block whose tag is all zero. */
enum { GMI_HEAP_POINTS = 3, GMI_HEAP_POINT_STREAM_SHIFT = 56 };
typedef struct gmi_heap_tag {
  uint64_t point[GMI_HEAP_POINTS];
} gmi_heap_tag_t;

/* Called when a free block takes in a neighbour with another tag (the zero tag is not special): returns a tag that
 * comes after both. Must not call the heap. */
typedef gmi_heap_tag_t (*gmi_heap_join_fn)(void *user, gmi_heap_tag_t a, gmi_heap_tag_t b);

typedef struct gmi_heap_block {
  uint64_t offset;     /* bytes, multiple of GMI_HEAP_ALIGN */
  uint64_t size_bytes; /* rounded up to GMI_HEAP_ALIGN */
  gmi_heap_tag_t tag;  /* of the free block it was cut from: wait for it before use */
} gmi_heap_block_t;

/* range_bytes and page_bytes: multiples of GMI_HEAP_ALIGN, not 0; range_bytes a multiple of page_bytes, at most 2^46;
 * join is required. INVALID otherwise. */
gemini_status_t gmi_heap_create(uint64_t range_bytes, uint64_t page_bytes, gmi_heap_join_fn join, void *user,
                                gmi_heap_t **heap_out);
void gmi_heap_destroy(gmi_heap_t *heap); /* NULL is accepted */

/* stream: as in the top byte of a point, or 0; of blocks that fit equally well, one with no other stream's points is
 * taken. OOM_DEVICE: no free range is long enough. OOM_SYSTEM: no record. INVALID: size_bytes is 0. Each changes
 * nothing. The block's pages count as used from here on. Takes time in proportion to the pages touched (under 1 ns
 * each); only just before OOM_DEVICE is every free block of the size's class looked at. */
gemini_status_t gmi_heap_alloc(gmi_heap_t *heap, uint64_t size_bytes, uint32_t stream, gmi_heap_block_t *block_out);
/* The block that starts at offset; false when none does. */
bool gmi_heap_find(const gmi_heap_t *heap, uint64_t offset, gmi_heap_block_t *block_out);
/* False when no live block starts at offset; then nothing changed. tag: after which the bytes may be reused. */
bool gmi_heap_free(gmi_heap_t *heap, uint64_t offset, gmi_heap_tag_t tag);

/* Live blocks that touch a page; the page may be taken away when it is 0. */
uint32_t gmi_heap_page_users(const gmi_heap_t *heap, uint64_t page);
/* The tag of the free block that covers an unused page; all zero for a used one. Takes time in proportion to the
 * unused pages below it. */
gmi_heap_tag_t gmi_heap_page_tag(const gmi_heap_t *heap, uint64_t page);
/* Pages with a user, now. */
uint64_t gmi_heap_pages_used(const gmi_heap_t *heap);
/* Bytes in live blocks, rounded sizes, and their number. */
uint64_t gmi_heap_bytes_used(const gmi_heap_t *heap);
uint64_t gmi_heap_blocks_used(const gmi_heap_t *heap);
/* Invariants: blocks tile the range, no two free neighbours, free lists and bitmaps agree, page users are right.
 * For tests and debug builds. */
bool gmi_heap_check(const gmi_heap_t *heap);

#endif
