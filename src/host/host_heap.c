/* The heap: blocks from a private jemalloc, which takes its extents from one range. SPDX-License-Identifier: Apache-2.0
 *
 * tests/jemalloc.sh builds that jemalloc: all its names begin with gmi_je_, none is visible outside the library, and
 * the process's malloc stays as it is. It has no caches (no per-thread cache, no decay, nothing retained), because what
 * it would keep is page-locked memory that chunks could use. It serves sizes that fit in slabs of 128 KiB, so that its
 * records of slabs are small compared to the slabs.
 *
 * Layers, from the bottom: holes (free parts of the range, sorted), grains (which parts are backed), range_take() and
 * range_give() over both, jemalloc's extent hooks, and blocks. `parts` counts extents and large blocks; holes always
 * has the capacity for that many parts plus two, so that giving a part back never needs memory and cannot fail.
 *
 * Lock. One mutex guards everything and is held around every call into jemalloc. The extent hooks therefore run with it
 * held, and no other thread can keep jemalloc from giving back at once what is freed. It is released only inside the
 * allocation hook, while this thread commits a grain or waits for another thread's commit: at that point jemalloc holds
 * no lock of its own (arena_malloc_small(), large_palloc(), pac_alloc_real() of 5.3), so other threads may enter it. */
#include "host/host_heap.h"

#include <errno.h>
#include <inttypes.h>
#include <jemalloc/jemalloc.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"

enum { ALIGN_LEAST = 256 };                   /* as device allocators guarantee it */
#define GRAIN_PAGES_LIMIT (UINT64_C(1) << 32) /* grain_t counts them in 32 bits */

/* A part of the range, by its offset from config.base. */
typedef struct {
  uint64_t offset, size_bytes;
} range_t;
typedef struct {
  range_t *items; /* sorted by offset, disjoint */
  uint64_t count, capacity;
} ranges_t;

/* EMPTY: not backed. COMING: a thread is in commit. READY: backed. */
enum { GRAIN_EMPTY = 0, GRAIN_COMING = 1, GRAIN_READY = 2 };
/* `pages` keeps a grain backed: a READY grain has pages > 0 and is decommitted when they become 0. A COMING grain has
 * pages > 0, too: those of the thread in commit, and of threads that wait for it. */
typedef struct {
  uint32_t pages; /* pages of the grain that lie in extents, or in parts that wait for the grain */
  uint32_t state;
} grain_t;

struct gmi_host_heap {
  extent_hooks_t hooks; /* first: jemalloc passes its address to hooks, which cast it to the heap */
  gmi_host_heap_config_t config;
  uint64_t page_bytes;
  uint64_t unit_bytes;  /* jemalloc's page size; large blocks are multiples of it */
  uint64_t small_bytes; /* the largest size that jemalloc serves from slabs */
  unsigned arena;
  pthread_mutex_t lock; /* guards the rest */
  pthread_cond_t came;  /* a commit has ended */
  ranges_t holes;       /* free parts; no two touch, so there are at most parts + 1 */
  ranges_t large;       /* live blocks that are extents of their own */
  uint64_t *small_live; /* bit map in units of ALIGN_LEAST: a live block of jemalloc's begins there */
  uint64_t parts;       /* extents and large blocks; holes has capacity for parts + 2 */
  uint64_t extent_bytes;
  uint64_t ready_bytes; /* in READY grains */
  uint64_t block_bytes, block_count;
  grain_t *grains;
};

/* A result of range_take() that is no status: there is no space, and the caller has to record the error. */
enum { RANGE_FULL = 1 };
/* Why the allocation hook refused in this thread's current allocation: 0 (it did not), RANGE_FULL, or a status whose
 * message is recorded. It is a variable because jemalloc passes only "failed" from a hook to its caller, and
 * thread-local because hooks run on the thread that allocates and the lock may be released meanwhile. */
static _Thread_local gemini_status_t refusal;
/* The extent that jemalloc has got in this thread's current allocation. If the allocation fails afterwards, as jemalloc
 * has no memory for its records, jemalloc forgets the extent: small_alloc() gives it back. */
static _Thread_local range_t fresh;
/* This thread is in commit or decommit. Using the heap there would enter jemalloc a second time on the same thread, and
 * jemalloc would serve the block from another arena. */
static _Thread_local bool in_callback;

/* ---- ranges */

/* Position of the first range that begins at or after offset. */
static uint64_t range_search(const ranges_t *s, uint64_t offset) {
  uint64_t low = 0, high = s->count;
  while (low < high) {
    uint64_t middle = low + (high - low) / 2;
    if (s->items[middle].offset < offset) low = middle + 1;
    else high = middle;
  }
  return low;
}

static bool ranges_reserve(ranges_t *s, uint64_t count) {
  if (count <= s->capacity) return true;
  uint64_t capacity = count < 32 ? 64 : count * 2;
  range_t *items = realloc(s->items, capacity * sizeof *items);
  if (!items) return false;
  s->items = items;
  s->capacity = capacity;
  return true;
}

static void range_insert(ranges_t *s, uint64_t at, range_t range) {
  memmove(s->items + at + 1, s->items + at, (s->count - at) * sizeof range);
  s->items[at] = range;
  s->count++;
}

static void range_remove(ranges_t *s, uint64_t at) {
  s->count--;
  memmove(s->items + at, s->items + at + 1, (s->count - at) * sizeof *s->items);
}

/* Removes size bytes at offset from the hole that contains them, which may leave a hole on either side. */
static void hole_cut(ranges_t *holes, uint64_t offset, uint64_t size) {
  uint64_t at = range_search(holes, offset + 1) - 1; /* the last that begins at or before offset */
  range_t *h = &holes->items[at];
  range_t behind = { offset + size, h->offset + h->size_bytes - offset - size };
  uint64_t before = offset - h->offset;
  if (before) h->size_bytes = before;
  if (before && behind.size_bytes) range_insert(holes, at + 1, behind);
  else if (behind.size_bytes) *h = behind;
  else if (!before) range_remove(holes, at);
}

/* Adds a hole, joined with neighbours that it touches. Never allocates: holes has the capacity (see the top). */
static void hole_add(ranges_t *holes, uint64_t offset, uint64_t size) {
  uint64_t at = range_search(holes, offset);
  range_t *before = at ? &holes->items[at - 1] : NULL, *behind = at < holes->count ? &holes->items[at] : NULL;
  bool joins_before = before && before->offset + before->size_bytes == offset;
  bool joins_behind = behind && offset + size == behind->offset;
  if (joins_before) {
    before->size_bytes += size;
    if (joins_behind) {
      before->size_bytes += behind->size_bytes;
      range_remove(holes, at);
    }
  } else if (joins_behind) {
    behind->offset = offset;
    behind->size_bytes += size;
  } else {
    range_insert(holes, at, (range_t){ offset, size });
  }
}

/* ---- grains */

static uint64_t grain_size(const gmi_host_heap_t *b, uint64_t grain) {
  uint64_t begin = grain * b->config.grain_bytes;
  uint64_t left = b->config.size_bytes - begin;
  return left < b->config.grain_bytes ? left : b->config.grain_bytes;
}

/* How many pages of a part lie in this grain. */
static uint32_t pages_within(const gmi_host_heap_t *b, uint64_t grain, uint64_t offset, uint64_t size) {
  uint64_t begin = grain * b->config.grain_bytes, end = begin + grain_size(b, grain);
  if (offset > begin) begin = offset;
  if (offset + size < end) end = offset + size;
  return (uint32_t)((end - begin) / b->page_bytes);
}

/* A part no longer uses its grains; grains without pages are decommitted. The lock stays held during decommit: if it
 * were released, another thread could take the grain before it is gone. */
static void grains_leave(gmi_host_heap_t *b, uint64_t offset, uint64_t size) {
  if (!size) return;
  uint64_t first = offset / b->config.grain_bytes, last = (offset + size - 1) / b->config.grain_bytes;
  for (uint64_t g = first; g <= last; g++) {
    grain_t *grain = &b->grains[g];
    grain->pages -= pages_within(b, g, offset, size);
    if (grain->pages || grain->state != GRAIN_READY) continue;
    grain->state = GRAIN_EMPTY;
    b->ready_bytes -= grain_size(b, g);
    if (!b->config.decommit) continue;
    in_callback = true;
    b->config.decommit(b->config.user, g * b->config.grain_bytes, grain_size(b, g));
    in_callback = false;
  }
}

/* Commits a grain, with the lock released, as commit may block. COMING makes threads that need the same grain wait;
 * they look at the state again when commit has ended, and commit themselves if it failed. */
static gemini_status_t grain_commit(gmi_host_heap_t *b, uint64_t g) {
  gemini_status_t status = GEMINI_OK;
  b->grains[g].state = GRAIN_COMING;
  if (b->config.commit) {
    pthread_mutex_unlock(&b->lock);
    in_callback = true;
    status = b->config.commit(b->config.user, g * b->config.grain_bytes, grain_size(b, g));
    in_callback = false;
    pthread_mutex_lock(&b->lock);
  }
  b->grains[g].state = status ? GRAIN_EMPTY : GRAIN_READY;
  if (!status) b->ready_bytes += grain_size(b, g);
  pthread_cond_broadcast(&b->came);
  return status;
}

/* Makes all grains of a part READY. Each grain's pages are counted before it is waited for or committed, so that no
 * other thread decommits it meanwhile. On failure the part's pages are taken back from all its grains, and *refused_out
 * is the grain that could not be committed. */
static gemini_status_t grains_enter(gmi_host_heap_t *b, uint64_t offset, uint64_t size, uint64_t *refused_out) {
  uint64_t first = offset / b->config.grain_bytes, last = (offset + size - 1) / b->config.grain_bytes;
  for (uint64_t g = first; g <= last; g++) {
    uint32_t pages = pages_within(b, g, offset, size);
    b->grains[g].pages += pages;
    while (b->grains[g].state == GRAIN_COMING) pthread_cond_wait(&b->came, &b->lock);
    gemini_status_t status = b->grains[g].state == GRAIN_READY ? GEMINI_OK : grain_commit(b, g);
    if (!status) continue;
    b->grains[g].pages -= pages;
    if (g > first) grains_leave(b, offset, g * b->config.grain_bytes - offset);
    *refused_out = g;
    return status;
  }
  return GEMINI_OK;
}

/* ---- places in the range */

/* The highest place between two offsets, aligned by address rather than by offset. */
static bool place_within(const gmi_host_heap_t *b, uint64_t begin, uint64_t end, uint64_t size, uint64_t alignment,
                         uint64_t *offset_out) {
  if (begin >= end || end - begin < size) return false;
  uintptr_t base = (uintptr_t)b->config.base;
  uintptr_t at = (base + end - size) & ~(uintptr_t)(alignment - 1);
  if (at < base + begin) return false;
  *offset_out = at - base;
  return true;
}

/* The highest place in any hole that ends at or before below. */
static bool place_highest(const gmi_host_heap_t *b, uint64_t below, uint64_t size, uint64_t alignment,
                          uint64_t *offset_out) {
  for (uint64_t i = b->holes.count; i--;) {
    const range_t *h = &b->holes.items[i];
    uint64_t end = h->offset + h->size_bytes;
    if (place_within(b, h->offset, end < below ? end : below, size, alignment, offset_out)) return true;
  }
  return false;
}

/* The highest place that lies in READY grains only and so needs no commit. A READY grain contains a part of an extent,
 * so within a hole only its first and last grain can be READY; they are tried together where they are neighbours. */
static bool place_ready(const gmi_host_heap_t *b, uint64_t size, uint64_t alignment, uint64_t *offset_out) {
  uint64_t grain_bytes = b->config.grain_bytes;
  if (b->ready_bytes < b->extent_bytes + size) return false;
  for (uint64_t i = b->holes.count; i--;) {
    uint64_t begin = b->holes.items[i].offset, end = begin + b->holes.items[i].size_bytes;
    uint64_t first = begin / grain_bytes, last = (end - 1) / grain_bytes;
    bool first_ready = b->grains[first].state == GRAIN_READY, last_ready = b->grains[last].state == GRAIN_READY;
    uint64_t low = last > first && !(first_ready && first + 1 == last) ? last * grain_bytes : begin;
    if (last_ready && place_within(b, low, end, size, alignment, offset_out)) return true;
    if (last > first && first_ready && place_within(b, begin, (first + 1) * grain_bytes, size, alignment, offset_out))
      return true;
  }
  return false;
}

/* Takes a part from the range and makes its grains READY. Prefers places that need no commit, then the highest one. The
 * part is cut out of its hole before the lock may be released, so no other thread can take it. If commit answers BUSY,
 * the search continues below the refused grain. Returns RANGE_FULL when no place is left. */
static gemini_status_t range_take(gmi_host_heap_t *b, uint64_t size, uint64_t alignment, uint64_t *offset_out) {
  uint64_t offset, refused = 0, below = b->config.size_bytes;
  bool ready = place_ready(b, size, alignment, &offset);
  while (ready || place_highest(b, below, size, alignment, &offset)) {
    if (!ranges_reserve(&b->holes, b->parts + 3))
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of host blocks");
    hole_cut(&b->holes, offset, size);
    b->parts++;
    b->extent_bytes += size;
    gemini_status_t status = grains_enter(b, offset, size, &refused);
    if (!status) {
      *offset_out = offset;
      return GEMINI_OK;
    }
    hole_add(&b->holes, offset, size);
    b->parts--;
    b->extent_bytes -= size;
    if (status != GEMINI_ERR_BUSY) return status;
    /* place_highest() found no higher place, and any other place that ends above the refused grain's beginning would
     * contain it. */
    below = refused * b->config.grain_bytes;
    ready = false;
  }
  return RANGE_FULL;
}

static void range_give(gmi_host_heap_t *b, uint64_t offset, uint64_t size) {
  hole_add(&b->holes, offset, size);
  b->parts--;
  b->extent_bytes -= size;
  grains_leave(b, offset, size);
}

/* ---- jemalloc's extent hooks. Called by jemalloc with the heap's lock held; NULL or true means failure. */

static gmi_host_heap_t *blocks_of(extent_hooks_t *hooks) { return (gmi_host_heap_t *)hooks; }

static void *extent_alloc(extent_hooks_t *hooks, void *wanted, size_t size, size_t alignment, bool *zero, bool *commit,
                          unsigned arena) {
  gmi_host_heap_t *b = blocks_of(hooks);
  (void)arena;
  if (wanted) return NULL; /* a wanted address serves to grow a block in place, which the heap never does */
  uint64_t offset;
  gemini_status_t status = range_take(b, size, alignment, &offset);
  if (status) {
    refusal = status;
    return NULL;
  }
  uint8_t *extent = (uint8_t *)b->config.base + offset;
  if (*zero) memset(extent, 0, size);
  *commit = true;
  fresh = (range_t){ offset, size };
  return extent;
}

static bool extent_dalloc(extent_hooks_t *hooks, void *extent, size_t size, bool committed, unsigned arena) {
  gmi_host_heap_t *b = blocks_of(hooks);
  uint64_t offset = (uint64_t)((uint8_t *)extent - (uint8_t *)b->config.base);
  (void)committed, (void)arena;
  if (offset == fresh.offset) fresh.size_bytes = 0;
  range_give(b, offset, size);
  return false;
}

static void extent_destroy(extent_hooks_t *hooks, void *extent, size_t size, bool committed, unsigned arena) {
  extent_dalloc(hooks, extent, size, committed, arena);
}

/* One extent becomes two. Nothing changes in the range, but each may be given back by itself: the capacity of holes has
 * to grow now, as extent_dalloc() must not fail. */
static bool extent_split(extent_hooks_t *hooks, void *extent, size_t size, size_t size_a, size_t size_b, bool committed,
                         unsigned arena) {
  gmi_host_heap_t *b = blocks_of(hooks);
  (void)extent, (void)size, (void)size_a, (void)size_b, (void)committed, (void)arena;
  if (!ranges_reserve(&b->holes, b->parts + 3)) return true;
  b->parts++;
  return false;
}

static bool extent_merge(extent_hooks_t *hooks, void *a, size_t size_a, void *b, size_t size_b, bool committed,
                         unsigned arena) {
  (void)a, (void)size_a, (void)b, (void)size_b, (void)committed, (void)arena;
  blocks_of(hooks)->parts--;
  return false;
}

/* ---- blocks */

static gemini_status_t config_check(const gmi_host_heap_config_t *c, uint64_t page) {
  uint64_t grain = c->grain_bytes ? c->grain_bytes : c->size_bytes;
  if (!c->base || (uintptr_t)c->base % page || !c->size_bytes || c->size_bytes % page || c->grain_bytes % page ||
      c->size_bytes > UINT64_C(1) << 46)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "host blocks: %" PRIu64 " bytes at %p in grains of %" PRIu64 " are not whole pages of %" PRIu64,
                    c->size_bytes, c->base, c->grain_bytes, page);
  if (grain / page >= GRAIN_PAGES_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "host blocks: a grain of %" PRIu64 " bytes, must be less than %" PRIu64,
                    grain, GRAIN_PAGES_LIMIT * page);
  return GEMINI_OK;
}

/* The argument of experimental.arenas_create_ext, as jemalloc 5.3 defines it in a header that it does not install.
 * metadata_use_hooks false keeps jemalloc's records out of the range. */
typedef struct {
  extent_hooks_t *hooks;
  bool metadata_use_hooks;
} arena_config_t;

static int arena_create(gmi_host_heap_t *b) {
  arena_config_t config = { &b->hooks, false };
  char name[64];
  unsigned bins = 0;
  size_t unit = 0, small = 0, size = sizeof unit, bins_size = sizeof bins, arena_size = sizeof b->arena;
  int error = gmi_je_mallctl("arenas.page", &unit, &size, NULL, 0);
  if (!error) error = gmi_je_mallctl("arenas.nbins", &bins, &bins_size, NULL, 0);
  snprintf(name, sizeof name, "arenas.bin.%u.size", bins - 1);
  if (!error) error = gmi_je_mallctl(name, &small, &size, NULL, 0);
  b->unit_bytes = unit;
  b->small_bytes = small;
  if (!error) error = gmi_je_mallctl("experimental.arenas_create_ext", &b->arena, &arena_size, &config, sizeof config);
  static const char *const decays[] = { "dirty_decay_ms", "muzzy_decay_ms" };
  for (int i = 0; !error && i < 2; i++) { /* give empty extents back at once, whatever the build's default is */
    ssize_t at_once = 0;
    snprintf(name, sizeof name, "arena.%u.%s", b->arena, decays[i]);
    error = gmi_je_mallctl(name, NULL, NULL, &at_once, sizeof at_once);
  }
  return error;
}

/* The bit map is mapped without reservation: only pages of it that are written take memory. */
static uint64_t small_live_bytes(const gmi_host_heap_t *b) {
  return (b->config.size_bytes / ALIGN_LEAST + 63) / 64 * 8;
}

static void blocks_free(gmi_host_heap_t *b) {
  if (b->small_live) munmap(b->small_live, small_live_bytes(b));
  pthread_cond_destroy(&b->came);
  pthread_mutex_destroy(&b->lock);
  free(b->holes.items);
  free(b->large.items);
  free(b->grains);
  free(b);
}

gemini_status_t gmi_host_heap_open(const gmi_host_heap_config_t *config, gmi_host_heap_t **blocks_out) {
  uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
  gemini_status_t status = config_check(config, page);
  if (status) return status;
  gmi_host_heap_t *b = calloc(1, sizeof *b);
  if (!b) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of host blocks");
  b->config = *config;
  if (!b->config.grain_bytes) b->config.grain_bytes = config->size_bytes;
  b->page_bytes = page;
  b->hooks = (extent_hooks_t){
    .alloc = extent_alloc,
    .dalloc = extent_dalloc,
    .destroy = extent_destroy,
    .split = extent_split,
    .merge = extent_merge,
  };
  pthread_mutex_init(&b->lock, NULL);
  pthread_cond_init(&b->came, NULL);
  uint64_t grains = (config->size_bytes + b->config.grain_bytes - 1) / b->config.grain_bytes;
  b->grains = calloc(grains, sizeof *b->grains);
  b->small_live =
      mmap(NULL, small_live_bytes(b), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (b->small_live == MAP_FAILED) b->small_live = NULL;
  int error = ENOMEM;
  if (b->small_live && b->grains && ranges_reserve(&b->holes, 2)) {
    range_insert(&b->holes, 0, (range_t){ 0, config->size_bytes });
    error = arena_create(b);
  }
  if (error) {
    blocks_free(b);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not create an arena for host blocks: %s", strerror(error));
  }
  *blocks_out = b;
  return GEMINI_OK;
}

void gmi_host_heap_close(gmi_host_heap_t *b) {
  if (!b) return;
  char name[64];
  snprintf(name, sizeof name, "arena.%u.destroy", b->arena);
  pthread_mutex_lock(&b->lock);
  gmi_je_mallctl(name, NULL, NULL, NULL, 0);
  while (b->large.count) {
    range_t last = b->large.items[--b->large.count];
    range_give(b, last.offset, last.size_bytes);
  }
  pthread_mutex_unlock(&b->lock);
  blocks_free(b);
}

/* Records OOM_HOST with the figures of this moment. Called with the lock held. */
static gemini_status_t range_full(const gmi_host_heap_t *b, uint64_t size) {
  uint64_t longest = 0;
  for (uint64_t i = 0; i < b->holes.count; i++)
    if (b->holes.items[i].size_bytes > longest) longest = b->holes.items[i].size_bytes;
  return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                  "a host block of %" PRIu64 " bytes does not fit: of %" PRIu64 " bytes, %" PRIu64
                  " are in use, the longest free part has %" PRIu64 "%s",
                  size, b->config.size_bytes, b->extent_bytes, longest,
                  longest >= size ? ", but it is not aligned as asked for, or is held by chunks" : "");
}

static gemini_status_t large_alloc(gmi_host_heap_t *b, uint64_t size, uint64_t alignment, void **block_out) {
  uint64_t offset, whole = (size + b->unit_bytes - 1) / b->unit_bytes * b->unit_bytes;
  gemini_status_t status = range_take(b, whole, alignment > b->unit_bytes ? alignment : b->unit_bytes, &offset);
  if (status) return status;
  if (!ranges_reserve(&b->large, b->large.count + 1)) {
    range_give(b, offset, whole);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of host blocks");
  }
  range_insert(&b->large, range_search(&b->large, offset), (range_t){ offset, whole });
  b->block_bytes += whole;
  *block_out = (uint8_t *)b->config.base + offset;
  return GEMINI_OK;
}

static gemini_status_t small_alloc(gmi_host_heap_t *b, uint64_t size, uint64_t alignment, void **block_out) {
  refusal = 0;
  fresh.size_bytes = 0;
  void *block =
      gmi_je_mallocx(size, MALLOCX_ARENA((int)b->arena) | MALLOCX_TCACHE_NONE | (int)MALLOCX_ALIGN(alignment));
  if (!block && fresh.size_bytes) range_give(b, fresh.offset, fresh.size_bytes);
  if (!block && refusal) return refusal;
  if (!block) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of host blocks");
  uint64_t place = (uint64_t)((uint8_t *)block - (uint8_t *)b->config.base) / ALIGN_LEAST;
  b->small_live[place / 64] |= UINT64_C(1) << place % 64;
  b->block_bytes += gmi_je_sallocx(block, 0);
  *block_out = block;
  return GEMINI_OK;
}

gemini_status_t gmi_host_heap_alloc(gmi_host_heap_t *b, uint64_t size, uint64_t alignment, void **block_out) {
  if (!size || (alignment & (alignment - 1)))
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "a host block of %" PRIu64 " bytes, aligned to %" PRIu64
                    ": must be a size above 0 and a power of two",
                    size, alignment);
  if (in_callback)
    return gmi_fail(GEMINI_ERR_STATE, 0, "a host block is allocated by a callback of the host heap itself");
  if (alignment < ALIGN_LEAST) alignment = ALIGN_LEAST;
  pthread_mutex_lock(&b->lock);
  gemini_status_t status = RANGE_FULL;
  if (size <= b->config.size_bytes && alignment <= b->config.size_bytes)
    status = size > b->small_bytes || alignment > b->unit_bytes ? large_alloc(b, size, alignment, block_out)
                                                                : small_alloc(b, size, alignment, block_out);
  if (status == RANGE_FULL) status = range_full(b, size);
  if (!status) b->block_count++;
  pthread_mutex_unlock(&b->lock);
  return status;
}

/* Called with the lock held. Looks in the heap's own records whether a live block begins at this address before
 * jemalloc sees it: a wrong pointer would damage jemalloc's records. */
static gemini_status_t block_free(gmi_host_heap_t *b, void *block) {
  uint64_t offset = (uint64_t)((uintptr_t)block - (uintptr_t)b->config.base), place = offset / ALIGN_LEAST;
  if (offset < b->config.size_bytes && (uintptr_t)block % ALIGN_LEAST == 0) {
    uint64_t at = range_search(&b->large, offset), bit = UINT64_C(1) << place % 64;
    if (at < b->large.count && b->large.items[at].offset == offset) {
      uint64_t size = b->large.items[at].size_bytes;
      range_remove(&b->large, at);
      b->block_bytes -= size;
      b->block_count--;
      range_give(b, offset, size);
      return GEMINI_OK;
    }
    if (b->small_live[place / 64] & bit) {
      b->small_live[place / 64] &= ~bit;
      b->block_bytes -= gmi_je_sallocx(block, 0);
      b->block_count--;
      gmi_je_dallocx(block, MALLOCX_TCACHE_NONE);
      return GEMINI_OK;
    }
  }
  return gmi_fail(GEMINI_ERR_INVALID, 0, "%p is not where a live host block begins", block);
}

gemini_status_t gmi_host_heap_free(gmi_host_heap_t *b, void *block) {
  if (!block) return GEMINI_OK;
  if (in_callback) return gmi_fail(GEMINI_ERR_STATE, 0, "a host block is freed by a callback of the host heap itself");
  pthread_mutex_lock(&b->lock);
  gemini_status_t status = block_free(b, block);
  pthread_mutex_unlock(&b->lock);
  return status;
}

void gmi_host_heap_figures(gmi_host_heap_t *b, gmi_host_heap_figures_t *figures_out) {
  pthread_mutex_lock(&b->lock);
  *figures_out = (gmi_host_heap_figures_t){
    .range_bytes = b->config.size_bytes,
    .grain_bytes_used = b->ready_bytes,
    .extent_bytes = b->extent_bytes,
    .block_bytes = b->block_bytes,
    .block_count = b->block_count,
  };
  pthread_mutex_unlock(&b->lock);
}
