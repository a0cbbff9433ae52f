/* Two-level segregated-fit allocator over offsets (see heap.h). SPDX-License-Identifier: Apache-2.0
 *
 * Free blocks are in lists by size class; two bitmaps find the smallest class that is not empty with two bit scans. An
 * allocation cuts its block from the low end of a free block, a free merges with free neighbours, both in constant time
 * except for the pages that they touch. This differs from TLSF as published in two ways: a request first looks for a
 * close fit in its own class, and records are found by a hash of the offset instead of by a header in the block.
 *
 * Each operation first reserves memory for its records, and changes the heap only when that has succeeded, so a failed
 * call changes nothing. gmi_heap_free() needs no memory and cannot fail for a lack of it. */
#include "chunk/heap.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "chunk/heap_internal.h"

typedef gmi_heap_node_t node_t;

#define RANGE_MAX_BYTES (UINT64_C(1) << 46)
/* How many blocks of the request's own class are tried before a block of a larger class is cut. */
#define FIT_TRIES 8u
#define NODES_FIRST 64u
#define BUCKETS_FIRST_LOG2 7u

/* --- classes --- */

/* The class of a size: row 0 has the sizes below GMI_HEAP_COLUMNS, one each. From there on a row is a power of two, and
 * the column is the next GMI_HEAP_COLUMNS_LOG2 bits below the leading one. */
static void class_of(uint64_t units, uint32_t *row, uint32_t *column) {
  if (units < GMI_HEAP_COLUMNS) {
    *row = 0;
    *column = (uint32_t)units;
    return;
  }
  uint32_t log2 = 63u - (uint32_t)__builtin_clzll(units);
  *row = log2 - (GMI_HEAP_COLUMNS_LOG2 - 1);
  *column = (uint32_t)(units >> (log2 - GMI_HEAP_COLUMNS_LOG2)) - GMI_HEAP_COLUMNS;
}

static uint64_t page_of(const gmi_heap_t *heap, uint64_t unit) {
  return heap->page_shift != UINT32_MAX ? unit >> heap->page_shift : unit / heap->page_units;
}

/* The first page that lies entirely within a block; false when none does. */
static bool first_whole_page(const gmi_heap_t *heap, const node_t *node, uint64_t *page_out) {
  if (node->units < heap->page_units) return false;
  uint64_t page = page_of(heap, node->first + heap->page_units - 1);
  *page_out = page;
  return (page + 1) * heap->page_units <= node->first + node->units;
}

/* Puts a block at the head of its class, so that the block freed last is reused first: its pages are likely to have
 * frames. Also enters it as the cover of its first whole page. */
static void free_insert(gmi_heap_t *heap, uint32_t index) {
  node_t *node = &heap->nodes[index];
  uint32_t row, column;
  class_of(node->units, &row, &column);
  uint32_t *head = &heap->heads[row][column];
  node->state = GMI_HEAP_FREE;
  node->prev = 0;
  node->next = *head;
  if (*head) heap->nodes[*head].prev = index;
  *head = index;
  heap->column_map[row] |= 1u << column;
  heap->row_map |= UINT64_C(1) << row;
  uint64_t page;
  if (first_whole_page(heap, node, &page)) heap->pages[page].cover = index;
}

/* The reverse of free_insert(). Must run before the block's size changes, which selects class and cover. */
static void free_remove(gmi_heap_t *heap, uint32_t index) {
  node_t *node = &heap->nodes[index];
  if (node->next) heap->nodes[node->next].prev = node->prev;
  if (node->prev) {
    heap->nodes[node->prev].next = node->next;
  } else {
    uint32_t row, column;
    class_of(node->units, &row, &column);
    heap->heads[row][column] = node->next;
    if (!node->next) {
      heap->column_map[row] &= ~(1u << column);
      if (!heap->column_map[row]) heap->row_map &= ~(UINT64_C(1) << row);
    }
  }
  uint64_t page;
  if (first_whole_page(heap, node, &page)) heap->pages[page].cover = 0;
}

/* Would an allocation on stream have to wait for work of other streams? */
static bool is_foreign(const node_t *node, uint32_t stream) {
  for (int i = 0; i < GMI_HEAP_POINTS; i++)
    if (node->tag.point[i] && node->tag.point[i] >> GMI_HEAP_POINT_STREAM_SHIFT != stream) return true;
  return false;
}

/* Best fit among the first `tries` blocks of a list; among equal sizes one that is not foreign; among these the first
 * in the list, which was freed last. */
static uint32_t fit_in_list(const gmi_heap_t *heap, uint32_t index, uint64_t units, uint32_t stream, uint64_t tries) {
  uint32_t best = 0;
  uint64_t best_units = UINT64_MAX;
  bool best_foreign = false;
  for (; index && tries; index = heap->nodes[index].next, tries--) {
    uint64_t have = heap->nodes[index].units;
    if (have < units || have > best_units || (have == best_units && !best_foreign)) continue;
    bool foreign = is_foreign(&heap->nodes[index], stream);
    if (have == best_units && foreign) continue;
    best = index, best_units = have, best_foreign = foreign;
    if (have == units && !foreign) break;
  }
  return best;
}

/* Chooses the free block to cut; 0: none is long enough. Blocks in the request's own class may be shorter than the
 * request, so only a few are tried at first. */
static uint32_t fit_find(const gmi_heap_t *heap, uint64_t units, uint32_t stream) {
  uint32_t row, column;
  class_of(units, &row, &column);
  uint32_t index = fit_in_list(heap, heap->heads[row][column], units, stream, FIT_TRIES);
  if (index) return index;
  /* Every block of a larger class fits: take the smallest class that is not empty. The long free block at the end of
   * the range is therefore cut last, which keeps the part of the range that was ever used short. */
  uint32_t columns = column + 1 < GMI_HEAP_COLUMNS ? heap->column_map[row] & (UINT32_MAX << (column + 1)) : 0;
  if (!columns) {
    uint64_t rows = heap->row_map & (UINT64_MAX << (row + 1));
    /* No larger class has a block: one of the request's own class beyond the first tries may still fit. */
    if (!rows) return fit_in_list(heap, heap->heads[row][column], units, stream, UINT64_MAX);
    row = (uint32_t)__builtin_ctzll(rows);
    columns = heap->column_map[row];
  }
  return heap->heads[row][__builtin_ctz(columns)];
}

/* --- live blocks by offset ---
 *
 * A hash table with linear probing. Multiplicative hashing (Fibonacci) spreads the multiples of large powers of two
 * that offsets often are. */

static uint64_t bucket_of(const gmi_heap_t *heap, uint64_t first) {
  return (first * UINT64_C(0x9E3779B97F4A7C15)) >> heap->bucket_shift;
}

/* The bucket of the live block that starts at a unit, or the empty bucket where it would be. */
static uint64_t bucket_find(const gmi_heap_t *heap, uint64_t first) {
  uint64_t bucket = bucket_of(heap, first);
  while (heap->buckets[bucket] && heap->nodes[heap->buckets[bucket]].first != first)
    bucket = (bucket + 1) & heap->bucket_mask;
  return bucket;
}

/* Deletes without tombstones (Knuth's Algorithm R): moves back each following entry whose probe sequence passes the
 * hole, so that no later search stops at the hole too early. */
static void bucket_clear(gmi_heap_t *heap, uint64_t hole) {
  for (uint64_t bucket = hole;;) {
    bucket = (bucket + 1) & heap->bucket_mask;
    uint32_t index = heap->buckets[bucket];
    if (!index) break;
    uint64_t home = bucket_of(heap, heap->nodes[index].first);
    if (((bucket - home) & heap->bucket_mask) >= ((bucket - hole) & heap->bucket_mask)) {
      heap->buckets[hole] = index;
      hole = bucket;
    }
  }
  heap->buckets[hole] = 0;
}

/* --- memory for records, reserved before anything changes --- */

static bool buckets_reserve(gmi_heap_t *heap) {
  uint64_t old_count = heap->bucket_mask + 1;
  if ((heap->blocks_used + 1) * 2 <= old_count) return true;
  uint32_t *old = heap->buckets;
  uint32_t *grown = calloc(old_count * 2, sizeof *grown);
  if (!grown) return false;
  heap->buckets = grown;
  heap->bucket_mask = old_count * 2 - 1;
  heap->bucket_shift--;
  for (uint64_t i = 0; i < old_count; i++)
    if (old[i]) grown[bucket_find(heap, heap->nodes[old[i]].first)] = old[i];
  free(old);
  return true;
}

static bool spare_reserve(gmi_heap_t *heap) {
  if (heap->spare || heap->node_count < heap->node_capacity) return true;
  if (heap->node_capacity > UINT32_MAX / 2) return false;
  uint32_t capacity = heap->node_capacity * 2;
  node_t *grown = realloc(heap->nodes, capacity * sizeof *grown);
  if (!grown) return false;
  heap->nodes = grown;
  heap->node_capacity = capacity;
  return true;
}

static uint32_t spare_take(gmi_heap_t *heap) {
  uint32_t index = heap->spare;
  if (index) {
    heap->spare = heap->nodes[index].next;
  } else {
    index = heap->node_count++;
  }
  memset(&heap->nodes[index], 0, sizeof heap->nodes[index]);
  return index;
}

static void spare_give(gmi_heap_t *heap, uint32_t index) {
  heap->nodes[index].state = GMI_HEAP_SPARE;
  heap->nodes[index].next = heap->spare;
  heap->spare = index;
}

/* Makes page_count at least count, or all pages of the range; doubles, so that growth is amortized. */
static bool pages_reserve(gmi_heap_t *heap, uint64_t count) {
  if (count > heap->range_pages) count = heap->range_pages;
  if (count <= heap->page_count) return true;
  if (count < heap->page_count * 2) count = heap->page_count * 2;
  if (count > heap->range_pages) count = heap->range_pages;
  gmi_heap_page_t *grown = realloc(heap->pages, count * sizeof *grown);
  if (!grown) return false;
  memset(grown + heap->page_count, 0, (count - heap->page_count) * sizeof *grown);
  heap->pages = grown;
  heap->page_count = count;
  return true;
}

/* --- pages ---
 *
 * A block shares only its first and its last page with other blocks. Those between have one user while it lives, so
 * their counts are set instead of adjusted. */

static void pages_enter(gmi_heap_t *heap, const node_t *node) {
  uint64_t first = page_of(heap, node->first), last = page_of(heap, node->first + node->units - 1);
  heap->pages_used += heap->pages[first].users++ == 0;
  if (first == last) return;
  for (uint64_t page = first + 1; page < last; page++) heap->pages[page].users = 1;
  heap->pages_used += last - first - 1;
  heap->pages_used += heap->pages[last].users++ == 0;
}

static void pages_leave(gmi_heap_t *heap, const node_t *node) {
  uint64_t first = page_of(heap, node->first), last = page_of(heap, node->first + node->units - 1);
  heap->pages_used -= --heap->pages[first].users == 0;
  if (first == last) return;
  for (uint64_t page = first + 1; page < last; page++) heap->pages[page].users = 0;
  heap->pages_used -= last - first - 1;
  heap->pages_used -= --heap->pages[last].users == 0;
}

/* --- interface --- */

gemini_status_t gmi_heap_create(uint64_t range_bytes, uint64_t page_bytes, gmi_heap_join_fn join, void *user,
                                gmi_heap_t **heap_out) {
  if (!heap_out || !join || !range_bytes || !page_bytes || range_bytes > RANGE_MAX_BYTES ||
      page_bytes % GMI_HEAP_ALIGN || range_bytes % page_bytes)
    return GEMINI_ERR_INVALID;
  gmi_heap_t *heap = calloc(1, sizeof *heap);
  if (!heap) return GEMINI_ERR_OOM_SYSTEM;
  heap->range_units = range_bytes / GMI_HEAP_ALIGN;
  heap->page_units = page_bytes / GMI_HEAP_ALIGN;
  heap->range_pages = range_bytes / page_bytes;
  heap->page_shift =
      heap->page_units & (heap->page_units - 1) ? UINT32_MAX : (uint32_t)__builtin_ctzll(heap->page_units);
  heap->join = join;
  heap->user = user;
  heap->nodes = calloc(NODES_FIRST, sizeof *heap->nodes);
  heap->node_capacity = NODES_FIRST;
  heap->node_count = 1;
  heap->buckets = calloc(UINT64_C(1) << BUCKETS_FIRST_LOG2, sizeof *heap->buckets);
  heap->bucket_mask = (UINT64_C(1) << BUCKETS_FIRST_LOG2) - 1;
  heap->bucket_shift = 64 - BUCKETS_FIRST_LOG2;
  if (!heap->nodes || !heap->buckets || !pages_reserve(heap, 1)) {
    gmi_heap_destroy(heap);
    return GEMINI_ERR_OOM_SYSTEM;
  }
  uint32_t index = spare_take(heap);
  heap->nodes[index].units = heap->range_units;
  heap->lowest = index;
  free_insert(heap, index);
  *heap_out = heap;
  return GEMINI_OK;
}

void gmi_heap_destroy(gmi_heap_t *heap) {
  if (!heap) return;
  free(heap->nodes);
  free(heap->buckets);
  free(heap->pages);
  free(heap);
}

static void block_fill(const node_t *node, gmi_heap_block_t *block_out) {
  block_out->offset = node->first * GMI_HEAP_ALIGN;
  block_out->size_bytes = node->units * GMI_HEAP_ALIGN;
  block_out->tag = node->tag;
}

gemini_status_t gmi_heap_alloc(gmi_heap_t *heap, uint64_t size_bytes, uint32_t stream, gmi_heap_block_t *block_out) {
  if (!heap || !block_out || !size_bytes) return GEMINI_ERR_INVALID;
  if (size_bytes > heap->range_units * GMI_HEAP_ALIGN) return GEMINI_ERR_OOM_DEVICE;
  uint64_t units = (size_bytes + GMI_HEAP_ALIGN - 1) / GMI_HEAP_ALIGN;
  uint32_t index = fit_find(heap, units, stream);
  if (!index) return GEMINI_ERR_OOM_DEVICE;
  /* One page more than the block touches: the remainder's first whole page, where its cover is entered, may be the next
   * page. */
  uint64_t last_page = page_of(heap, heap->nodes[index].first + units - 1);
  if (!buckets_reserve(heap) || !spare_reserve(heap) || !pages_reserve(heap, last_page + 2))
    return GEMINI_ERR_OOM_SYSTEM;

  /* Nothing fails from here on. */
  free_remove(heap, index);
  if (heap->nodes[index].units > units) {
    uint32_t rest_index = spare_take(heap);
    node_t *node = &heap->nodes[index], *rest = &heap->nodes[rest_index];
    rest->first = node->first + units;
    rest->units = node->units - units;
    rest->tag = node->tag;
    rest->below = index;
    rest->above = node->above;
    if (rest->above) heap->nodes[rest->above].below = rest_index;
    node->above = rest_index;
    node->units = units;
    free_insert(heap, rest_index);
  }
  node_t *node = &heap->nodes[index];
  node->state = GMI_HEAP_LIVE;
  heap->buckets[bucket_find(heap, node->first)] = index;
  pages_enter(heap, node);
  heap->blocks_used++;
  heap->units_used += units;
  block_fill(node, block_out);
  return GEMINI_OK;
}

bool gmi_heap_find(const gmi_heap_t *heap, uint64_t offset, gmi_heap_block_t *block_out) {
  if (offset % GMI_HEAP_ALIGN) return false;
  uint32_t index = heap->buckets[bucket_find(heap, offset / GMI_HEAP_ALIGN)];
  if (!index) return false;
  block_fill(&heap->nodes[index], block_out);
  return true;
}

void gmi_heap_mark(gmi_heap_t *heap, uint64_t offset) {
  node_t *node = &heap->nodes[heap->buckets[bucket_find(heap, offset / GMI_HEAP_ALIGN)]];
  GMI_ASSERT(node->state == GMI_HEAP_LIVE && node->first == offset / GMI_HEAP_ALIGN);
  heap->blocks_marked += !node->marked;
  node->marked = true;
}
uint64_t gmi_heap_marked(const gmi_heap_t *heap) { return heap->blocks_marked; }

static gmi_heap_tag_t tag_join(const gmi_heap_t *heap, gmi_heap_tag_t a, gmi_heap_tag_t b) {
  return memcmp(&a, &b, sizeof a) ? heap->join(heap->user, a, b) : a;
}

/* Merges two neighbours, neither of which is in a list, into the lower one's node. The tag becomes one after both. */
static void merge(gmi_heap_t *heap, uint32_t lower_index, uint32_t upper_index) {
  node_t *lower = &heap->nodes[lower_index], *upper = &heap->nodes[upper_index];
  lower->units += upper->units;
  lower->above = upper->above;
  if (upper->above) heap->nodes[upper->above].below = lower_index;
  lower->tag = tag_join(heap, lower->tag, upper->tag);
  spare_give(heap, upper_index);
}

/* Merges at once, in both directions, so no two free blocks are ever neighbours and the longest free range is always
 * one block. */
bool gmi_heap_free(gmi_heap_t *heap, uint64_t offset, gmi_heap_tag_t tag) {
  if (offset % GMI_HEAP_ALIGN) return false;
  uint64_t bucket = bucket_find(heap, offset / GMI_HEAP_ALIGN);
  uint32_t index = heap->buckets[bucket];
  if (!index) return false;
  bucket_clear(heap, bucket);
  node_t *node = &heap->nodes[index];
  pages_leave(heap, node);
  heap->blocks_used--;
  heap->blocks_marked -= node->marked;
  node->marked = false;
  heap->units_used -= node->units;
  node->tag = tag;
  uint32_t below = node->below, above = node->above;
  if (below && heap->nodes[below].state == GMI_HEAP_FREE) {
    free_remove(heap, below);
    merge(heap, below, index);
    index = below;
  }
  if (above && heap->nodes[above].state == GMI_HEAP_FREE) {
    free_remove(heap, above);
    merge(heap, index, above);
  }
  free_insert(heap, index);
  return true;
}

uint32_t gmi_heap_page_users(const gmi_heap_t *heap, uint64_t page) {
  return page < heap->page_count ? heap->pages[page].users : 0;
}

gmi_heap_tag_t gmi_heap_page_tag(const gmi_heap_t *heap, uint64_t page) {
  gmi_heap_tag_t none = { { 0 } };
  if (page >= heap->range_pages || gmi_heap_page_users(heap, page)) return none;
  /* A page without users lies within one free block. That block's first whole page is at or below this one and names it
   * as its cover; no other cover is in between. */
  if (page >= heap->page_count) page = heap->page_count - 1;
  while (page && !heap->pages[page].cover) page--;
  uint32_t index = heap->pages[page].cover;
  return index ? heap->nodes[index].tag : none;
}

uint64_t gmi_heap_pages_used(const gmi_heap_t *heap) { return heap->pages_used; }
uint64_t gmi_heap_bytes_used(const gmi_heap_t *heap) { return heap->units_used * GMI_HEAP_ALIGN; }
uint64_t gmi_heap_blocks_used(const gmi_heap_t *heap) { return heap->blocks_used; }

/* --- invariants ---
 *
 * Every index is checked before it is followed, and every walk is bounded, so that corrupt records make the check fail
 * instead of crash or hang. */

static bool node_in_use(const gmi_heap_t *heap, uint32_t index) {
  return index > 0 && index < heap->node_count && heap->nodes[index].state != GMI_HEAP_SPARE;
}

/* Do the pages [first, end) have no user? */
static bool pages_empty(const gmi_heap_t *heap, uint64_t first, uint64_t end) {
  for (uint64_t page = first; page < end && page < heap->page_count; page++)
    if (heap->pages[page].users) return false;
  return true;
}

/* Walks the blocks by address: they must tile the range, and their sums equal the heap's. Compares each page's users
 * with the live blocks that touch it. Counts free blocks and covers for the other checks. */
static bool check_blocks(const gmi_heap_t *heap, uint64_t *free_count, uint64_t *cover_count) {
  uint64_t unit = 0, live = 0, live_units = 0, pages_used = 0, walked = 0;
  uint64_t page = 0, users = 0; /* users of `page` so far; every page below has been compared */
  uint32_t below = 0, below_state = GMI_HEAP_LIVE;
  for (uint32_t index = heap->lowest; index; index = heap->nodes[index].above) {
    if (!node_in_use(heap, index) || ++walked >= heap->node_count) return false;
    const node_t *node = &heap->nodes[index];
    if (node->first != unit || !node->units || node->units > heap->range_units - unit || node->below != below)
      return false;
    unit += node->units;
    if (node->state == GMI_HEAP_FREE) {
      uint64_t whole;
      if (below_state == GMI_HEAP_FREE) return false;
      if (first_whole_page(heap, node, &whole)) {
        if (whole >= heap->page_count || heap->pages[whole].cover != index) return false;
        (*cover_count)++;
      }
      (*free_count)++;
    } else if (node->state == GMI_HEAP_LIVE) {
      if (heap->buckets[bucket_find(heap, node->first)] != index) return false;
      live++;
      live_units += node->units;
      uint64_t first = page_of(heap, node->first), last = page_of(heap, unit - 1);
      if (last >= heap->page_count) return false;
      for (uint64_t p = first; p <= last; p++) {
        if (p != page) {
          if (heap->pages[page].users != users || !pages_empty(heap, page + 1, p)) return false;
          page = p;
          users = 0;
        }
        if (users++ == 0) pages_used++;
      }
    } else {
      return false;
    }
    below = index;
    below_state = node->state;
  }
  return unit == heap->range_units && heap->pages[page].users == users &&
         pages_empty(heap, page + 1, heap->page_count) && live == heap->blocks_used && live_units == heap->units_used &&
         pages_used == heap->pages_used;
}

/* Every list must hold only free blocks of its class, and the bitmaps must say which lists are not empty. */
static bool check_lists(const gmi_heap_t *heap, uint64_t free_count) {
  uint64_t listed = 0;
  for (uint32_t row = 0; row < GMI_HEAP_ROWS; row++) {
    if (((heap->row_map >> row) & 1) != (heap->column_map[row] != 0)) return false;
    for (uint32_t column = 0; column < GMI_HEAP_COLUMNS; column++) {
      uint32_t prev = 0;
      if (((heap->column_map[row] >> column) & 1) != (heap->heads[row][column] != 0)) return false;
      for (uint32_t index = heap->heads[row][column]; index; index = heap->nodes[index].next) {
        if (!node_in_use(heap, index) || ++listed > free_count) return false;
        const node_t *node = &heap->nodes[index];
        uint32_t node_row, node_column;
        class_of(node->units, &node_row, &node_column);
        if (node->state != GMI_HEAP_FREE || node->prev != prev || node_row != row || node_column != column)
          return false;
        prev = index;
      }
    }
  }
  return listed == free_count && !(heap->row_map >> GMI_HEAP_ROWS);
}

bool gmi_heap_check(const gmi_heap_t *heap) {
  /* The hash table first, because check_blocks() searches it: it needs an empty bucket to end a search, and indices of
   * nodes only. */
  uint64_t buckets_used = 0;
  for (uint64_t bucket = 0; bucket <= heap->bucket_mask; bucket++) {
    if (!heap->buckets[bucket]) continue;
    if (!node_in_use(heap, heap->buckets[bucket])) return false;
    buckets_used++;
  }
  if (buckets_used != heap->blocks_used || buckets_used * 2 > heap->bucket_mask + 1) return false;

  uint64_t free_count = 0, cover_count = 0, covers = 0, spares = 0;
  if (!check_blocks(heap, &free_count, &cover_count) || !check_lists(heap, free_count)) return false;
  for (uint64_t page = 0; page < heap->page_count; page++) covers += heap->pages[page].cover != 0;
  if (covers != cover_count) return false;
  for (uint32_t index = heap->spare; index; index = heap->nodes[index].next) {
    if (index >= heap->node_count || heap->nodes[index].state != GMI_HEAP_SPARE || ++spares >= heap->node_count)
      return false;
  }
  return 1 + spares + free_count + heap->blocks_used == heap->node_count;
}
