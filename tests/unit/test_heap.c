/* The heap against a naive model, and its checker against damage. SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>
#include <sys/resource.h>
#include <time.h>

#include "../check.h"
#include "chunk/heap.h"
#include "chunk/heap_internal.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

static gmi_heap_tag_t tag_of(uint32_t stream, uint64_t mark) {
  return (gmi_heap_tag_t){ { (uint64_t)stream << GMI_HEAP_POINT_STREAM_SHIFT | mark } };
}
static uint32_t tag_stream(gmi_heap_tag_t tag) { return (uint32_t)(tag.point[0] >> GMI_HEAP_POINT_STREAM_SHIFT); }
static uint64_t tag_mark(gmi_heap_tag_t tag) {
  return tag.point[0] & ((UINT64_C(1) << GMI_HEAP_POINT_STREAM_SHIFT) - 1);
}

/* A join that does not depend on the order of joining: the later mark, and the union of the streams' bits. */
static uint64_t join_calls;
static gmi_heap_tag_t tag_join(void *user, gmi_heap_tag_t a, gmi_heap_tag_t b) {
  CHECK(user == &join_calls);
  CHECK(memcmp(&a, &b, sizeof a));
  join_calls++;
  return tag_of(tag_stream(a) | tag_stream(b), tag_mark(a) > tag_mark(b) ? tag_mark(a) : tag_mark(b));
}

static gmi_heap_t *heap_new(uint64_t range_bytes, uint64_t page_bytes) {
  gmi_heap_t *heap = NULL;
  CHECK_EQ(gmi_heap_create(range_bytes, page_bytes, tag_join, &join_calls, &heap), GEMINI_OK);
  return heap;
}

static uint64_t alloc_ok(gmi_heap_t *heap, uint64_t size_bytes) {
  gmi_heap_block_t block;
  CHECK_EQ(gmi_heap_alloc(heap, size_bytes, 0, &block), GEMINI_OK);
  return block.offset;
}

static void check_tag(gmi_heap_tag_t tag, uint32_t stream, uint64_t mark) {
  CHECK_EQ(tag_stream(tag), stream);
  CHECK_EQ(tag_mark(tag), mark);
  CHECK(!tag.point[1] && !tag.point[2]);
}

/* --- model: the blocks of the range in order --- */

typedef struct interval {
  uint64_t offset, size_bytes;
  gmi_heap_tag_t tag;
  bool live;
} interval_t;
typedef struct model {
  interval_t *blocks;
  size_t count, live_count;
  uint64_t live_bytes;
} model_t;

#define MODEL_MAX 20000u

static void model_init(model_t *model, uint64_t range_bytes) {
  memset(model, 0, sizeof *model);
  model->blocks = calloc(MODEL_MAX, sizeof *model->blocks);
  CHECK(model->blocks);
  model->blocks[0].size_bytes = range_bytes;
  model->count = 1;
}

/* The block that holds an offset. */
static size_t model_at(const model_t *model, uint64_t offset) {
  size_t low = 0, high = model->count;
  while (high - low > 1) {
    size_t middle = (low + high) / 2;
    if (model->blocks[middle].offset <= offset) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

static void model_insert(model_t *model, size_t at, interval_t block) {
  CHECK(model->count < MODEL_MAX);
  memmove(&model->blocks[at + 1], &model->blocks[at], (model->count - at) * sizeof block);
  model->blocks[at] = block;
  model->count++;
}

static void model_remove(model_t *model, size_t at) {
  model->count--;
  memmove(&model->blocks[at], &model->blocks[at + 1], (model->count - at) * sizeof *model->blocks);
}

/* Cuts [offset, offset+size) out of the free block it must lie in, whose tag it must have. */
static void model_alloc(model_t *model, gmi_heap_block_t block) {
  size_t at = model_at(model, block.offset);
  interval_t hole = model->blocks[at];
  CHECK(!hole.live);
  CHECK(block.offset >= hole.offset && block.offset + block.size_bytes <= hole.offset + hole.size_bytes);
  CHECK_EQ(block.offset % GMI_HEAP_ALIGN, 0);
  check_tag(block.tag, tag_stream(hole.tag), tag_mark(hole.tag));
  interval_t live = { block.offset, block.size_bytes, block.tag, true };
  interval_t before = { hole.offset, block.offset - hole.offset, hole.tag, false };
  uint64_t end = block.offset + block.size_bytes;
  interval_t after = { end, hole.offset + hole.size_bytes - end, hole.tag, false };
  model->blocks[at] = live;
  if (after.size_bytes) model_insert(model, at + 1, after);
  if (before.size_bytes) model_insert(model, at, before);
  model->live_count++;
  model->live_bytes += block.size_bytes;
}

static void model_join(model_t *model, size_t at) {
  interval_t *a = &model->blocks[at], *b = &model->blocks[at + 1];
  a->size_bytes += b->size_bytes;
  if (tag_stream(a->tag) != tag_stream(b->tag) || tag_mark(a->tag) != tag_mark(b->tag))
    a->tag = tag_of(tag_stream(a->tag) | tag_stream(b->tag),
                    tag_mark(a->tag) > tag_mark(b->tag) ? tag_mark(a->tag) : tag_mark(b->tag));
  model_remove(model, at + 1);
}

static void model_free(model_t *model, size_t at, gmi_heap_tag_t tag) {
  interval_t *block = &model->blocks[at];
  CHECK(block->live);
  model->live_count--;
  model->live_bytes -= block->size_bytes;
  block->live = false;
  block->tag = tag;
  if (at + 1 < model->count && !model->blocks[at + 1].live) model_join(model, at);
  if (at && !model->blocks[at - 1].live) model_join(model, at - 1);
}

static uint64_t model_longest_free(const model_t *model) {
  uint64_t longest = 0;
  for (size_t i = 0; i < model->count; i++)
    if (!model->blocks[i].live && model->blocks[i].size_bytes > longest) longest = model->blocks[i].size_bytes;
  return longest;
}

/* Everything the heap says must be what the model says. */
static void compare(const gmi_heap_t *heap, const model_t *model, uint64_t range_bytes, uint64_t page_bytes) {
  CHECK(gmi_heap_check(heap));
  CHECK_EQ(gmi_heap_bytes_used(heap), model->live_bytes);
  CHECK_EQ(gmi_heap_blocks_used(heap), model->live_count);
  uint64_t used = 0;
  for (uint64_t page = 0; page < range_bytes / page_bytes; page++) {
    uint32_t users = 0;
    size_t first = model_at(model, page * page_bytes);
    for (size_t i = first; i < model->count && model->blocks[i].offset < (page + 1) * page_bytes; i++)
      users += model->blocks[i].live;
    CHECK_EQ(gmi_heap_page_users(heap, page), users);
    used += users > 0;
    if (!users) {
      gmi_heap_tag_t tag = gmi_heap_page_tag(heap, page);
      check_tag(tag, tag_stream(model->blocks[first].tag), tag_mark(model->blocks[first].tag));
    }
  }
  CHECK_EQ(gmi_heap_pages_used(heap), used);
  for (size_t i = 0; i < model->count; i++) {
    gmi_heap_block_t block;
    bool found = gmi_heap_find(heap, model->blocks[i].offset, &block);
    CHECK_EQ(found, model->blocks[i].live);
    if (found) {
      CHECK_EQ(block.offset, model->blocks[i].offset);
      CHECK_EQ(block.size_bytes, model->blocks[i].size_bytes);
      check_tag(block.tag, tag_stream(model->blocks[i].tag), tag_mark(model->blocks[i].tag));
    }
  }
}

/* Mostly small, some in the MiB, often one of a few sizes that recur. */
static uint64_t random_size(uint64_t *random) {
  static const uint64_t recurring[] = { 512, 4096, 20 * 1024, 96 * 1024, 768 * 1024, 1536 * 1024 };
  uint64_t r = check_random(random);
  if (r % 3 == 0) return recurring[(r >> 8) % 6];
  return 1 + (check_random(random) >> (64 - (9 + (r >> 8) % 13)));
}

static void run_against_model(uint64_t range_bytes, uint64_t page_bytes, uint64_t seed, int steps, int live_most) {
  gmi_heap_t *heap = heap_new(range_bytes, page_bytes);
  model_t model;
  model_init(&model, range_bytes);
  uint64_t *live = calloc((size_t)live_most, sizeof *live);
  CHECK(live);
  int live_count = 0, refused = 0;
  uint64_t random = seed;
  for (int step = 0; step < steps; step++) {
    /* Drifts between nearly empty and full. */
    int target = (int)((uint64_t)live_most * (1 + (uint64_t)(step / 1000) * 7 % 10) / 10);
    if (live_count < target && (live_count == 0 || check_random(&random) % 8)) {
      uint64_t size_bytes = random_size(&random), units = (size_bytes + 511) / 512;
      gmi_heap_block_t block = { 1, 2, tag_of(3, 4) };
      gemini_status_t status = gmi_heap_alloc(heap, size_bytes, 0, &block);
      if (status == GEMINI_OK) {
        CHECK_EQ(block.size_bytes, units * 512);
        model_alloc(&model, block);
        live[live_count++] = block.offset;
      } else {
        refused++;
        CHECK_EQ(status, GEMINI_ERR_OOM_DEVICE);
        CHECK(model_longest_free(&model) < units * 512);
        CHECK(block.offset == 1 && block.size_bytes == 2 && tag_stream(block.tag) == 3 && tag_mark(block.tag) == 4);
        if (refused % 16 == 0) compare(heap, &model, range_bytes, page_bytes);
      }
    } else if (live_count) {
      int pick = (int)(check_random(&random) % (uint64_t)live_count);
      uint64_t offset = live[pick];
      live[pick] = live[--live_count];
      gmi_heap_tag_t tag = tag_of(1u << (check_random(&random) % 8), (uint64_t)step / 4 + 1);
      CHECK(!gmi_heap_free(heap, offset + 1, tag));
      CHECK(gmi_heap_free(heap, offset, tag));
      CHECK(!gmi_heap_free(heap, offset, tag));
      model_free(&model, model_at(&model, offset), tag);
    }
    if (step % 997 == 0) compare(heap, &model, range_bytes, page_bytes);
  }
  CHECK(refused > 0);
  compare(heap, &model, range_bytes, page_bytes);
  while (live_count) {
    uint64_t offset = live[--live_count];
    CHECK(gmi_heap_free(heap, offset, tag_of(1, (uint64_t)steps)));
    model_free(&model, model_at(&model, offset), tag_of(1, (uint64_t)steps));
  }
  compare(heap, &model, range_bytes, page_bytes);
  CHECK_EQ(model.count, 1);
  CHECK_EQ(gmi_heap_pages_used(heap), 0);
  CHECK_EQ(alloc_ok(heap, range_bytes), 0); /* one block again */
  free(live);
  free(model.blocks);
  gmi_heap_destroy(heap);
}

static void test_heap_random_sequence_agrees_with_model(void) { run_against_model(64 * MIB, 2 * MIB, 1, 200000, 1000); }
static void test_heap_random_sequence_with_odd_pages_agrees_with_model(void) {
  run_against_model(1000 * 12 * 512, 12 * 512, 2, 50000, 400);
}
static void test_heap_random_sequence_with_least_pages_agrees_with_model(void) {
  run_against_model(4 * MIB, 512, 3, 50000, 300);
}

static void test_heap_equal_sequences_give_equal_offsets(void) {
  gmi_heap_t *heaps[2] = { heap_new(UINT64_C(1) << 40, 2 * MIB), heap_new(UINT64_C(1) << 40, 64 * MIB) };
  uint64_t live[500], random = 7;
  int count = 0;
  for (int step = 0; step < 50000; step++) {
    if (count < 500 && (count == 0 || check_random(&random) % 2)) {
      uint64_t size_bytes = random_size(&random);
      live[count] = alloc_ok(heaps[0], size_bytes);
      CHECK_EQ(alloc_ok(heaps[1], size_bytes), live[count]);
      count++;
    } else {
      int pick = (int)(check_random(&random) % (uint64_t)count);
      for (int i = 0; i < 2; i++) CHECK(gmi_heap_free(heaps[i], live[pick], tag_of((uint32_t)i, (uint64_t)step)));
      live[pick] = live[--count];
    }
  }
  for (int i = 0; i < 2; i++) gmi_heap_destroy(heaps[i]);
}

static void test_heap_arguments_out_of_range_are_refused(void) {
  static const uint64_t bad[][2] = { { 0, 512 },    { 512, 0 },        { 1024, 1000 },
                                     { 1000, 512 }, { 3 * 512, 1024 }, { UINT64_C(1) << 47, 512 } };
  gmi_heap_t *heap = (gmi_heap_t *)&join_calls;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK_EQ(gmi_heap_create(bad[i][0], bad[i][1], tag_join, NULL, &heap), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_heap_create(512, 512, NULL, NULL, &heap), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_heap_create(512, 512, tag_join, NULL, NULL), GEMINI_ERR_INVALID);
  CHECK(heap == (gmi_heap_t *)&join_calls);
  gmi_heap_destroy(NULL);
  heap = heap_new(1024, 512);
  gmi_heap_block_t block = { 1, 2, tag_of(3, 4) };
  CHECK_EQ(gmi_heap_alloc(heap, 0, 0, &block), GEMINI_ERR_INVALID);
  CHECK_EQ(gmi_heap_alloc(heap, UINT64_MAX, 0, &block), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(gmi_heap_alloc(heap, 1025, 0, &block), GEMINI_ERR_OOM_DEVICE);
  CHECK(!gmi_heap_free(heap, 0, tag_of(0, 0)));
  CHECK(!gmi_heap_free(heap, UINT64_MAX, tag_of(0, 0)));
  CHECK(!gmi_heap_free(heap, UINT64_MAX - 511, tag_of(0, 0)));
  CHECK(!gmi_heap_find(heap, 512, &block));
  CHECK_EQ(block.offset, 1);
  CHECK_EQ(gmi_heap_page_users(heap, UINT64_MAX), 0);
  check_tag(gmi_heap_page_tag(heap, UINT64_MAX), 0, 0);
  CHECK(gmi_heap_check(heap));
  gmi_heap_destroy(heap);
}

static void test_heap_longest_range_costs_memory_for_touched_pages_only(void) {
  gmi_heap_t *heap = heap_new(UINT64_C(1) << 46, 512);
  CHECK_EQ(alloc_ok(heap, 100 * KIB), 0);
  CHECK_EQ(gmi_heap_page_users(heap, 199), 1);
  CHECK_EQ(gmi_heap_page_users(heap, (UINT64_C(1) << 37) - 1), 0);
  CHECK(heap->page_count < 4096);
  CHECK(gmi_heap_free(heap, 0, tag_of(2, 9)));
  check_tag(gmi_heap_page_tag(heap, (UINT64_C(1) << 37) - 1), 2, 9);
  CHECK(gmi_heap_check(heap));
  gmi_heap_destroy(heap);
  heap = heap_new(UINT64_C(1) << 46, UINT64_C(1) << 45);
  CHECK_EQ(alloc_ok(heap, UINT64_C(1) << 46), 0);
  CHECK_EQ(gmi_heap_pages_used(heap), 2);
  CHECK(gmi_heap_check(heap));
  gmi_heap_destroy(heap);
}

/* A page table of 2^40 bytes cannot be had: the heap says so and goes on. */
static void test_heap_alloc_without_memory_for_records_changes_nothing(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  fprintf(stderr, "    (left out: the sanitizer ends a process that asks for so much)\n");
#else
  gmi_heap_t *heap = heap_new(UINT64_C(1) << 46, 512);
  gmi_heap_block_t block = { 1, 2, tag_of(3, 4) };
  /* Not left to the system: it may promise the memory and end the process later. */
  struct rlimit before, tight;
  CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
  tight = before;
  tight.rlim_cur = UINT64_C(1) << 36;
  CHECK_EQ(setrlimit(RLIMIT_AS, &tight), 0);
  CHECK_EQ(gmi_heap_alloc(heap, UINT64_C(1) << 46, 0, &block), GEMINI_ERR_OOM_SYSTEM);
  CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
  CHECK_EQ(block.offset, 1);
  CHECK_EQ(gmi_heap_blocks_used(heap), 0);
  CHECK(gmi_heap_check(heap));
  CHECK_EQ(alloc_ok(heap, 512), 0);
  gmi_heap_destroy(heap);
#endif
}

static void test_heap_same_size_is_reused_last_freed_first(void) {
  static const uint64_t sizes[] = { 512, 3 * MIB, 100 * KIB + 512 };
  for (size_t s = 0; s < 3; s++) {
    gmi_heap_t *heap = heap_new(UINT64_C(1) << 40, 2 * MIB);
    uint64_t offsets[8];
    for (int i = 0; i < 8; i++) offsets[i] = alloc_ok(heap, sizes[s]), alloc_ok(heap, 512);
    uint64_t top = alloc_ok(heap, 512);
    for (int i = 0; i < 8; i++) CHECK(gmi_heap_free(heap, offsets[i], tag_of(1, (uint64_t)i + 1)));
    for (int i = 7; i >= 0; i--) {
      gmi_heap_block_t block;
      CHECK_EQ(gmi_heap_alloc(heap, sizes[s], 0, &block), GEMINI_OK);
      CHECK_EQ(block.offset, offsets[i]);
      check_tag(block.tag, 1, (uint64_t)i + 1);
    }
    CHECK(alloc_ok(heap, sizes[s]) > top);
    gmi_heap_destroy(heap);
  }
}

/* A class of large blocks spans 3 %: a request finds a block of its own class that is a little longer, instead of
 * breaking the long block at the end. */
static void test_heap_large_block_is_reused_for_a_slightly_smaller_one(void) {
  gmi_heap_t *heap = heap_new(UINT64_C(1) << 40, 2 * MIB);
  uint64_t offset = alloc_ok(heap, 256 * MIB + 4 * MIB);
  alloc_ok(heap, 512);
  CHECK(gmi_heap_free(heap, offset, tag_of(1, 1)));
  CHECK_EQ(alloc_ok(heap, 256 * MIB + 3 * MIB), offset);
  CHECK_EQ(alloc_ok(heap, MIB), offset + 256 * MIB + 3 * MIB);
  gmi_heap_destroy(heap);
}

/* The only block that fits lies behind nine of its class that do not: found all the same. */
static void test_heap_last_fit_in_class_is_found_before_refusing(void) {
  gmi_heap_t *heap = heap_new(320 * MIB, 2 * MIB);
  uint64_t fit = alloc_ok(heap, 16 * MIB + 256 * KIB), small[12];
  for (int i = 0; i < 12; i++) alloc_ok(heap, 512), small[i] = alloc_ok(heap, 16 * MIB);
  gmi_heap_block_t block;
  while (gmi_heap_alloc(heap, MIB, 0, &block) == GEMINI_OK) continue;
  CHECK(gmi_heap_free(heap, fit, tag_of(1, 1)));
  for (int i = 0; i < 12; i++) CHECK(gmi_heap_free(heap, small[i], tag_of(1, 1)));
  CHECK_EQ(alloc_ok(heap, 16 * MIB + 128 * KIB), fit);
  CHECK_EQ(gmi_heap_alloc(heap, 16 * MIB + 128 * KIB, 0, &block), GEMINI_ERR_OOM_DEVICE);
  CHECK(gmi_heap_check(heap));
  gmi_heap_destroy(heap);
}

/* Of blocks that fit equally well, one that only the asking stream freed; never a worse fit for that. */
static void test_heap_alloc_prefers_blocks_of_its_own_stream(void) {
  gmi_heap_t *heap = heap_new(64 * MIB, MIB);
  uint64_t offsets[3][4];                                            /* by size, by stream - 1 */
  const uint64_t sizes[3] = { 4 * KIB, 100 * KIB, 100 * KIB + 512 }; /* the last two: of one class */
  for (int s = 0; s < 3; s++)
    for (int i = 0; i < 4; i++) {
      offsets[s][i] = alloc_ok(heap, sizes[s]);
      alloc_ok(heap, 512); /* keeps them apart */
    }
  for (int s = 0; s < 3; s++)
    for (int i = 0; i < 4; i++) CHECK(gmi_heap_free(heap, offsets[s][i], tag_of((uint32_t)i + 1, 7)));
  const uint32_t order[4] = { 3, 1, 4, 2 };
  gmi_heap_block_t block;
  for (int s = 0; s < 3; s++)
    for (int i = 0; i < 3; i++) {
      CHECK_EQ(gmi_heap_alloc(heap, sizes[s], order[i], &block), GEMINI_OK);
      CHECK_EQ(block.offset, offsets[s][order[i] - 1]);
    }
  CHECK_EQ(gmi_heap_alloc(heap, sizes[1], 1, &block),
           GEMINI_OK); /* another stream's, as it fits better than the rest */
  CHECK_EQ(block.offset, offsets[1][1]);
  CHECK_EQ(gmi_heap_alloc(heap, sizes[1] - 512, 1, &block), GEMINI_OK);
  CHECK_EQ(block.offset, offsets[2][1]);
  CHECK(gmi_heap_check(heap));
  gmi_heap_destroy(heap);
}

static void test_heap_join_is_called_for_differing_tags_only(void) {
  gmi_heap_t *heap = heap_new(64 * KIB, 4 * KIB);
  uint64_t a = alloc_ok(heap, 4 * KIB), b = alloc_ok(heap, 4 * KIB), c = alloc_ok(heap, 4 * KIB);
  alloc_ok(heap, 52 * KIB);
  join_calls = 0;
  CHECK(gmi_heap_free(heap, a, tag_of(1, 5)));
  CHECK_EQ(join_calls, 0);
  CHECK(gmi_heap_free(heap, b, tag_of(1, 5)));
  CHECK_EQ(join_calls, 0);
  CHECK(gmi_heap_free(heap, c, tag_of(2, 4)));
  CHECK_EQ(join_calls, 1);
  check_tag(gmi_heap_page_tag(heap, 0), 3, 5);
  check_tag(gmi_heap_page_tag(heap, 2), 3, 5);
  gmi_heap_block_t block;
  CHECK_EQ(gmi_heap_alloc(heap, 4 * KIB, 0, &block), GEMINI_OK); /* the rest keeps the tag */
  check_tag(block.tag, 3, 5);
  check_tag(gmi_heap_page_tag(heap, 1), 3, 5);
  CHECK(gmi_heap_check(heap));
  gmi_heap_destroy(heap);
}

/* --- damage --- */

static gmi_heap_t *damage_heap;
static uint32_t damage_live, damage_free; /* nodes; the free one covers a page and is alone in its class */

static void damage_begin(void) {
  damage_heap = heap_new(64 * MIB, MIB);
  uint64_t a = alloc_ok(damage_heap, 3 * MIB), b = alloc_ok(damage_heap, 3 * MIB), c = alloc_ok(damage_heap, MIB);
  CHECK(gmi_heap_free(damage_heap, b, tag_of(1, 1)));
  uint64_t d = alloc_ok(damage_heap, 512);
  (void)a, (void)c, (void)d;
  for (uint32_t i = 1; i < damage_heap->node_count; i++) {
    if (damage_heap->nodes[i].state == GMI_HEAP_LIVE && damage_heap->nodes[i].units > 1) damage_live = i;
    if (damage_heap->nodes[i].state == GMI_HEAP_FREE && damage_heap->nodes[i].above) damage_free = i;
  }
  CHECK(damage_live && damage_free);
  CHECK(gmi_heap_check(damage_heap));
}

/* Changes one field, wants it noticed, restores it, wants that noticed too. */
#define DAMAGE(field, value)                  \
  do {                                        \
    __typeof__(field) damage_saved = (field); \
    (field) = (value);                        \
    CHECK(damage_saved != (field));           \
    CHECK(!gmi_heap_check(damage_heap));      \
    (field) = damage_saved;                   \
    CHECK(gmi_heap_check(damage_heap));       \
  } while (0)

static void test_heap_check_notices_every_damaged_field(void) {
  damage_begin();
  gmi_heap_t *h = damage_heap;
  gmi_heap_node_t *live = &h->nodes[damage_live], *hole = &h->nodes[damage_free];
  DAMAGE(live->units, live->units + 1);
  DAMAGE(live->units, 0);
  DAMAGE(live->first, live->first + 1);
  DAMAGE(live->state, GMI_HEAP_FREE);
  DAMAGE(live->state, GMI_HEAP_SPARE);
  DAMAGE(live->state, 7);
  DAMAGE(live->below, 0);
  DAMAGE(live->above, 0);
  DAMAGE(live->above, damage_live);
  DAMAGE(live->above, 1000000);
  DAMAGE(hole->units, hole->units - 1);
  DAMAGE(hole->state, GMI_HEAP_LIVE);
  DAMAGE(hole->next, damage_live);
  DAMAGE(hole->next, damage_free);
  DAMAGE(hole->prev, damage_live);
  DAMAGE(h->lowest, 0);
  DAMAGE(h->pages[1].users, 0);
  DAMAGE(h->pages[1].users, 2);
  DAMAGE(h->pages[0].users, 2);
  DAMAGE(h->pages[4].users, 1);
  DAMAGE(h->pages[6].users, 2);
  DAMAGE(h->pages[h->page_count - 1].users, 1);
  DAMAGE(h->pages[4].cover, 0);
  DAMAGE(h->pages[1].cover, damage_free);
  DAMAGE(h->pages_used, h->pages_used + 1);
  DAMAGE(h->units_used, h->units_used + 1);
  DAMAGE(h->blocks_used, h->blocks_used - 1);
  DAMAGE(h->row_map, 0);
  DAMAGE(h->row_map, h->row_map | 1);
  DAMAGE(h->row_map, h->row_map | UINT64_C(1) << 60);
  DAMAGE(h->column_map[0], 2);
  for (uint32_t row = 0; row < GMI_HEAP_ROWS; row++) {
    if (!h->column_map[row]) continue;
    uint32_t column = (uint32_t)__builtin_ctz(h->column_map[row]);
    DAMAGE(h->column_map[row], h->column_map[row] ^ 3u << column);
    DAMAGE(h->heads[row][column], 0);
    DAMAGE(h->heads[row][column], damage_live);
  }
  for (uint64_t slot = 0; slot <= h->bucket_mask; slot++) {
    if (!h->buckets[slot]) {
      DAMAGE(h->buckets[slot], damage_live);
    } else {
      DAMAGE(h->buckets[slot], 0);
      DAMAGE(h->buckets[slot], 1000000);
    }
  }
  DAMAGE(h->node_count, h->node_count + 1);
  gmi_heap_destroy(h);
}

static void test_heap_check_notices_free_neighbours(void) {
  gmi_heap_t *h = heap_new(64 * MIB, MIB);
  alloc_ok(h, MIB);
  CHECK(gmi_heap_check(h));
  /* Free the block by hand, without joining it to its neighbour. */
  uint32_t index = h->lowest;
  h->nodes[index].state = GMI_HEAP_FREE;
  for (uint64_t slot = 0; slot <= h->bucket_mask; slot++) h->buckets[slot] = 0;
  h->pages[0].users = 0;
  h->pages[0].cover = index;
  h->pages_used = h->units_used = h->blocks_used = 0;
  /* 2048 units: row 11 - 4, column 0 */
  h->heads[7][0] = index;
  h->column_map[7] |= 1;
  h->row_map |= 1u << 7;
  CHECK(!gmi_heap_check(h));
  gmi_heap_destroy(h);
}

/* --- speed: test_heap bench --- */

static uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static int bench(void) {
  enum { PAIRS = 2000000, LIVE = 4096 };
  static uint64_t live[LIVE];
  gmi_heap_t *heap = heap_new(UINT64_C(1) << 40, 2 * MIB);
  uint64_t random = 1;
  for (int i = 0; i < LIVE; i++) live[i] = alloc_ok(heap, random_size(&random));
  static const uint64_t sizes[] = { 512, 64 * KIB, 2 * MIB, 64 * MIB, 1024 * MIB };
  for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    uint64_t start = now_ns();
    for (int i = 0; i < PAIRS; i++) CHECK(gmi_heap_free(heap, alloc_ok(heap, sizes[s]), tag_of(1, 1)));
    printf("alloc+free pair of %8" PRIu64 " KiB, %d live: %5.1f ns\n", sizes[s] / KIB, LIVE,
           (double)(now_ns() - start) / (double)PAIRS);
  }
  uint64_t *size_of = calloc(PAIRS, sizeof *size_of);
  CHECK(size_of);
  for (int i = 0; i < PAIRS; i++) size_of[i] = random_size(&random);
  uint64_t start = now_ns();
  for (int i = 0; i < PAIRS; i++) {
    uint64_t *victim = &live[(uint32_t)i * 2654435761u % LIVE];
    CHECK(gmi_heap_free(heap, *victim, tag_of(1, (uint64_t)i / 100)));
    *victim = alloc_ok(heap, size_of[i]);
  }
  printf("random free+alloc of mixed sizes, %d live:   %5.1f ns\n", LIVE, (double)(now_ns() - start) / (double)PAIRS);
  free(size_of);
  gmi_heap_destroy(heap);
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "bench")) return bench();
  RUN(test_heap_arguments_out_of_range_are_refused);
  RUN(test_heap_random_sequence_agrees_with_model);
  RUN(test_heap_random_sequence_with_odd_pages_agrees_with_model);
  RUN(test_heap_random_sequence_with_least_pages_agrees_with_model);
  RUN(test_heap_equal_sequences_give_equal_offsets);
  RUN(test_heap_longest_range_costs_memory_for_touched_pages_only);
  RUN(test_heap_alloc_without_memory_for_records_changes_nothing);
  RUN(test_heap_same_size_is_reused_last_freed_first);
  RUN(test_heap_large_block_is_reused_for_a_slightly_smaller_one);
  RUN(test_heap_last_fit_in_class_is_found_before_refusing);
  RUN(test_heap_alloc_prefers_blocks_of_its_own_stream);
  RUN(test_heap_join_is_called_for_differing_tags_only);
  RUN(test_heap_check_notices_every_damaged_field);
  RUN(test_heap_check_notices_free_neighbours);
  return check_done();
}
