/* Programs that have pointers: accesses by address, where an address lies, operators with their accesses, rows of a
 * table, and the texts of errors and statistics. SPDX-License-Identifier: Apache-2.0 */
#include "gemini/address.h"

#include "world.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, BOTH = GEMINI_READ_WRITE };

static uint8_t *take(const world_t *w, gemini_arena_t arena, uint64_t bytes) {
  void *ptr = NULL;
  CHECK_OK(gemini_arena_take_pointer(w->mgr, arena, bytes, &ptr));
  return ptr;
}
static void fill(const world_t *w, void *address, uint64_t bytes, uint64_t seed) {
  gemini_access_t a = gemini_address_access(address, bytes, WRITE, DEVICE);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(a.ptr == address);
  world_write(address, 0, bytes, seed);
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
}
static bool holds(const world_t *w, void *address, uint64_t from, uint64_t bytes, uint64_t seed, uint32_t tier) {
  gemini_access_t a = gemini_address_access((char *)address + from, bytes, READ, tier);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK((a.ptr == (char *)address + from) == (tier == DEVICE));
  bool right = world_reads(a.ptr, from, bytes, seed);
  CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  return right;
}

/* ---- accesses by address */
static void test_bytes_taken_as_a_pointer_are_used_by_their_address(void) {
  world_t w = world_open(world_config(3, 32, 0)); /* the device holds a part */
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 4, "block", 0, 0);
  uint8_t *first = take(&w, arena, 3 * W / 2), *second = take(&w, arena, 5 * W);
  gemini_arena_info_t info = world_arena_info(&w, arena);
  CHECK((uint64_t)(uintptr_t)first == info.base && second > first && (second - first) % 1024 == 0);
  CHECK_EQ(info.size_bytes, (uint64_t)(second - first) + 5 * W);
  fill(&w, first, 3 * W / 2, 1);
  for (uint64_t at = 0; at < 5 * W; at += W) fill(&w, second + at, W, 2 + at / W);
  CHECK(holds(&w, first, 0, 3 * W / 2, 1, DEVICE));
  CHECK(holds(&w, first, 700, 33, 1, DEVICE));
  CHECK(holds(&w, first, 700, 33, 1, HOST));
  for (uint64_t at = 0; at < 5 * W; at += W)
    CHECK(holds(&w, second + at, 0, W, 2 + at / W, at % (2 * W) ? HOST : DEVICE));
  world_close(&w);
}

/* The same range by its arena and by its address is the same acquire. */
static void test_an_access_by_address_is_a_range_of_its_arena(void) {
  world_t w = world_open(world_config(8, 32, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "block", 0, 0);
  uint8_t *block = take(&w, arena, 4 * W);
  gemini_access_t by_address = gemini_address_access(block + 1000, W, READ, DEVICE);
  gemini_access_t by_arena = world_part(arena, 1000, W, READ, DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &by_address, 1, w.stream));
  CHECK_STATUS(gemini_arena_destroy(w.mgr, arena), GEMINI_ERR_BUSY);
  CHECK_STATUS(gemini_manager_close(w.mgr), GEMINI_ERR_BUSY);
  CHECK_SAYS(world_error().message, "65536 bytes at offset 1000 of arena block are acquired");
  CHECK_OK(gemini_release(w.mgr, &by_arena, 1, w.stream));
  CHECK_STATUS(gemini_release(w.mgr, &by_address, 1, w.stream), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "65536 bytes at offset 1000 of block were not acquired");
  /* Every call with an access takes it. */
  gemini_access_t all = gemini_address_access(block, 4 * W, READ, DEVICE), host = all;
  uint64_t bytes = 0;
  double norm = 0;
  CHECK_OK(gemini_pin(w.mgr, &all));
  CHECK_OK(gemini_tier_bytes(w.mgr, &all, &bytes));
  CHECK_EQ(bytes, 4 * W);
  CHECK_OK(gemini_unpin(w.mgr, &all));
  fill(&w, block, 4 * W, 3);
  host.tier = HOST;
  CHECK_OK(gemini_move(w.mgr, &host, 1));
  CHECK_OK(gemini_tier_bytes(w.mgr, &host, &bytes));
  CHECK_EQ(bytes, 4 * W);
  CHECK_OK(gemini_zero(w.mgr, &all));
  CHECK_OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_F32, w.stream, &norm));
  CHECK(norm == 0);
  CHECK(holds(&w, block, 0, 4 * W, 0, DEVICE));
  world_close(&w);
}

static void test_an_address_that_names_no_bytes_is_refused(void) {
  world_t w = world_open(world_config(8, 32, 0)), other = world_open(world_config(8, 32, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  gemini_arena_t theirs = world_arena(&other, GEMINI_KIND_PARAM, 2, "theirs", 0, 0);
  uint8_t *block = take(&w, arena, W), *foreign = take(&other, theirs, W), local = 0;
  const struct {
    void *address;
    uint64_t bytes;
    gemini_status_t status;
    const char *says;
  } wrong[] = { { &local, 1, GEMINI_ERR_INVALID, "lies in no arena" },
                { foreign, 16, GEMINI_ERR_INVALID, "lies in no arena" },
                { block - 1, 2, GEMINI_ERR_INVALID, "lies in no arena" },
                { block, W + 1, GEMINI_ERR_INVALID, "are not inside the 65536 bytes that are used of it" },
                { block + W, 1, GEMINI_ERR_INVALID, "offset 65536 of arena params" },
                { block, 0, GEMINI_ERR_INVALID, "size_bytes is 0" },
                { NULL, 16, GEMINI_ERR_HANDLE, "0" } };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    gemini_access_t a = gemini_address_access(wrong[i].address, wrong[i].bytes, READ, DEVICE);
    CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), wrong[i].status);
    CHECK_SAYS(world_error().message, wrong[i].says);
    CHECK(!a.ptr);
  }
  gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "grads", 0, arena);
  gemini_access_t shared = gemini_address_access(block, 16, READ, DEVICE);
  CHECK_STATUS(gemini_acquire(w.mgr, &shared, 1, w.stream), GEMINI_ERR_UNSUPPORTED);
  CHECK_SAYS(world_error().message, "whose bytes gradients reuse");
  CHECK_OK(gemini_arena_destroy(w.mgr, grads));
  CHECK_OK(gemini_acquire(w.mgr, &shared, 1, w.stream));
  CHECK_OK(gemini_release(w.mgr, &shared, 1, w.stream));
  world_close(&w);
  world_close(&other);
}

static void test_locate_names_arena_and_tensor(void) {
  world_t w = world_open(world_config(8, 32, 0));
  gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  gemini_arena_t master = world_arena(&w, GEMINI_KIND_MASTER, 4, "master", params, 0);
  uint8_t *plain = take(&w, params, 100);
  gemini_tensor_t t = world_tensor(&w, params, "t", 3 * W), tied, counterpart;
  gemini_tensor_info_t info = world_tensor_info(&w, t);
  CHECK_OK(gemini_tensor_register(w.mgr, params, "tied", W, info.offset_bytes + W, &tied));
  CHECK_OK(gemini_tensor_counterpart(w.mgr, t, master, &counterpart));
  const struct {
    uint64_t address;
    gemini_arena_t arena;
    gemini_tensor_t tensor;
    uint64_t arena_offset, tensor_offset;
  } right[] = { { (uint64_t)(uintptr_t)plain + 99, params, NULL, 99, 0 },
                { info.address, params, t, info.offset_bytes, 0 },
                { info.address + W, params, tied, info.offset_bytes + W, 0 },
                { info.address + 2 * W - 1, params, tied, info.offset_bytes + 2 * W - 1, W - 1 },
                { info.address + 2 * W, params, t, info.offset_bytes + 2 * W, 2 * W },
                { world_tensor_info(&w, counterpart).address + 8, master, counterpart, 2 * info.offset_bytes + 8, 8 } };
  for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
    gemini_location_t at = GEMINI_LOCATION_INIT;
    CHECK_OK(gemini_locate(w.mgr, (void *)(uintptr_t)right[i].address, &at));
    CHECK_EQ(at.struct_size, sizeof at);
    CHECK(at.arena == right[i].arena && at.tensor == right[i].tensor);
    CHECK_EQ(at.arena_offset_bytes, right[i].arena_offset);
    CHECK_EQ(at.tensor_offset_bytes, right[i].tensor_offset);
  }
  gemini_location_t none = GEMINI_LOCATION_INIT;
  uint64_t end = world_arena_info(&w, params).base + world_arena_info(&w, params).size_bytes;
  CHECK_STATUS(gemini_locate(w.mgr, (void *)(uintptr_t)end, &none), GEMINI_ERR_NOT_FOUND);
  CHECK_STATUS(gemini_locate(w.mgr, &none, &none), GEMINI_ERR_NOT_FOUND);
  CHECK(!none.arena && !none.tensor);
  CHECK_OK(gemini_locate(w.mgr, (void *)(uintptr_t)(end - 1), &none));
  CHECK_OK(gemini_arena_destroy(w.mgr, master)); /* the arena that was found last is gone */
  CHECK_STATUS(gemini_locate(w.mgr, (void *)(uintptr_t)end, &none), GEMINI_ERR_NOT_FOUND);
  world_close(&w);
}

/* ---- operators with their accesses */
static void step(const world_t *w, uint8_t *block, int layers) {
  CHECK_OK(gemini_iteration_begin(w->mgr));
  CHECK_OK(gemini_phase_set(w->mgr, GEMINI_PHASE_FORWARD));
  for (int i = 0; i < layers; i++) {
    char name[16];
    snprintf(name, sizeof name, "op %d", i);
    gemini_access_t uses[] = { gemini_address_access(block + (uint64_t)i * W, W, BOTH, DEVICE),
                               gemini_address_access(block, 8, READ, DEVICE) };
    CHECK_OK(gemini_op_begin_with(w->mgr, name, GEMINI_STREAM_CALLER, uses, 2));
    CHECK(uses[0].ptr == block + (uint64_t)i * W && uses[1].ptr == block);
    block[(uint64_t)i * W + 8] = (uint8_t)(block[(uint64_t)i * W + 8] + i + 1);
    CHECK_OK(gemini_op_end(w->mgr));
  }
  CHECK_OK(gemini_iteration_end(w->mgr));
}

static void test_an_operator_releases_what_it_began_with(void) {
  world_t w = world_open(world_config(3, 32, 0));
  enum { LAYERS = 6, STEPS = 5 };
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "block", 0, 0);
  uint8_t *block = take(&w, arena, LAYERS * W);
  for (int i = 0; i < STEPS; i++) step(&w, block, LAYERS);
  for (int i = 0; i < LAYERS; i++) {
    gemini_access_t a = gemini_address_access(block + (uint64_t)i * W + 8, 1, READ, HOST);
    CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_EQ(*(uint8_t *)a.ptr, STEPS * (i + 1));
    CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_EQ(world_stats(&w).planned_iterations, STEPS - 1);
  world_close(&w); /* refused if something were acquired */
}

/* An operator whose accesses are refused has not begun: neither the record nor the plan sees it. */
static void test_an_operator_whose_accesses_are_refused_has_not_begun(void) {
  world_t w = world_open(world_config(3, 32, 0));
  enum { LAYERS = 6 };
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "block", 0, 0);
  uint8_t *block = take(&w, arena, LAYERS * W);
  for (int i = 0; i < 3; i++) step(&w, block, LAYERS);
  figures_t before = world_stats(&w);
  CHECK_EQ(gemini_iteration_begin(w.mgr), GEMINI_OK);
  gemini_access_t none = gemini_address_access(&w, 8, READ, DEVICE);
  gemini_access_t large = gemini_address_access(block, LAYERS * W, READ, DEVICE);
  for (int i = 0; i < 2; i++) {
    CHECK_STATUS(gemini_op_begin_with(w.mgr, "op 0", w.stream, &none, 1), GEMINI_ERR_INVALID);
    CHECK(!strcmp(world_error().operation, "gemini_op_begin_with"));
    CHECK_STATUS(gemini_op_begin_with(w.mgr, "another name", w.stream, &large, 1), GEMINI_ERR_OOM_DEVICE);
    CHECK_STATUS(gemini_op_end(w.mgr), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, "no operator is open");
  }
  CHECK_OK(gemini_iteration_end(w.mgr)); /* without operators: nothing new is learned */
  step(&w, block, LAYERS);
  step(&w, block, LAYERS);
  CHECK_EQ(world_stats(&w).departures, before.departures + 1); /* that of the empty iteration */
  CHECK_EQ(world_stats(&w).plans, before.plans);               /* and no other kind of iteration has been seen */

  /* Refused while another operator is open: that one keeps what it has. */
  CHECK_OK(gemini_iteration_begin(w.mgr));
  gemini_access_t uses[2] = { world_part(arena, 0, 0, READ, HOST), gemini_address_access(block, 8, READ, HOST) };
  CHECK_OK(gemini_op_begin_with(w.mgr, "first", w.stream, uses, 2));
  CHECK_STATUS(gemini_op_begin_with(w.mgr, "second", w.stream, uses, 1), GEMINI_ERR_STATE);
  /* What the caller has released itself cannot be released again: the operator stays open until it is acquired. */
  CHECK_OK(gemini_release(w.mgr, &uses[1], 1, w.stream));
  CHECK_STATUS(gemini_op_end(w.mgr), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "8 bytes at offset 0 of block were not acquired");
  CHECK_OK(gemini_acquire(w.mgr, &uses[1], 1, w.stream));
  (void)take(&w, arena, W); /* the whole arena is more now than what was acquired */
  CHECK_OK(gemini_op_end(w.mgr));
  CHECK_OK(gemini_iteration_end(w.mgr));
  world_close(&w);
}

/* An address does not say whether the parameter or the gradient is meant, once gradients reuse the bytes. What an open
 * operator has acquired by it is released all the same. */
static void test_an_operator_releases_what_gradients_can_reuse_meanwhile(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 2, "block", 0, 0);
  uint8_t *block = take(&w, arena, 3 * W);
  gemini_access_t uses[2] = { gemini_address_access(block + W, W, READ, DEVICE),
                              gemini_address_access(block, 8, READ, HOST) };
  CHECK_OK(gemini_iteration_begin(w.mgr));
  CHECK_OK(gemini_op_begin_with(w.mgr, "op", w.stream, uses, 2));
  gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "gradients", 0, arena);
  CHECK_OK(gemini_op_end(w.mgr));
  CHECK_OK(gemini_iteration_end(w.mgr));
  CHECK_OK(gemini_arena_destroy(w.mgr, grads));
  CHECK_OK(gemini_arena_destroy(w.mgr, arena)); /* refused if something were acquired */
  world_close(&w);
}

/* ---- rows */
enum { ROW = 64, ROWS = 1000 };
static void test_rows_become_sorted_ranges_without_repeats(void) {
  int local;
  const gemini_access_t table = gemini_address_access(&local, ROW * ROWS, BOTH, HOST);
  const int32_t narrow[] = { 7, 3, 999, 4, 7, 0, 5 };
  const uint64_t wide[] = { 7, 3, 999, 4, 7, 0, 5 };
  for (int i = 0; i < 2; i++) {
    gemini_access_t a[8];
    uint64_t count = 77;
    const void *rows = i ? (const void *)wide : narrow;
    CHECK_OK(gemini_row_accesses(&table, ROW, i ? 8 : 4, 7, rows, 8, a, &count));
    CHECK_EQ(count, 4);
    const uint64_t first[] = { 0, 3, 7, 999 }, rows_of[] = { 1, 3, 1, 1 };
    for (uint64_t k = 0; k < count; k++) {
      CHECK_EQ(a[k].offset_bytes, (uint64_t)(uintptr_t)&local + first[k] * ROW);
      CHECK_EQ(a[k].size_bytes, rows_of[k] * ROW);
      CHECK(a[k].mode == BOTH && a[k].tier == HOST && a[k].struct_size == sizeof *a && !a[k].object.tensor);
    }
    CHECK_OK(gemini_row_accesses(&table, ROW, i ? 8 : 4, 7, rows, 3, a, &count)); /* the gap between 5 and 7 closes */
    CHECK_EQ(count, 3);
    CHECK_EQ(a[1].size_bytes, 5 * ROW);
    CHECK_OK(gemini_row_accesses(&table, ROW, i ? 8 : 4, 7, rows, 1, a, &count));
    CHECK(count == 1 && a[0].size_bytes == 1000 * ROW);
    CHECK_OK(gemini_row_accesses(&table, ROW, i ? 8 : 4, 0, NULL, 1, a, &count));
    CHECK_EQ(count, 0);
  }
}

/* Random rows: every row named is in an access, there are at most as many as asked for, they neither overlap nor touch,
 * and no choice of gaps would have acquired fewer rows. */
static void test_random_rows_are_covered_by_as_few_bytes_as_possible(void) {
  const gemini_access_t table = gemini_address_access(&table, ROW * ROWS, READ, DEVICE);
  uint64_t random = 1;
  for (int round = 0; round < 2000; round++) {
    uint32_t rows[40];
    bool named[ROWS] = { false };
    random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    uint64_t n = 1 + (random >> 33) % 40, most = 1 + (random >> 50) % 12, spread = 1 + (random >> 40) % ROWS;
    for (uint64_t i = 0; i < n; i++) {
      random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
      rows[i] = (uint32_t)((random >> 33) % spread);
      named[rows[i]] = true;
    }
    gemini_access_t a[12];
    uint64_t count = 0, covered = 0, distinct = 0, gaps[ROWS], gap_count = 0;
    CHECK_OK(gemini_row_accesses(&table, ROW, 4, n, rows, most, a, &count));
    CHECK(count >= 1 && count <= most);
    uint64_t last = ROWS;
    for (uint64_t row = 0; row < ROWS; row++) {
      if (!named[row]) continue;
      distinct++;
      if (last < ROWS && row > last + 1) gaps[gap_count++] = row - last - 1;
      last = row;
    }
    for (uint64_t k = 0; k < count; k++) {
      uint64_t first = (a[k].offset_bytes - table.offset_bytes) / ROW, size = a[k].size_bytes / ROW;
      CHECK(named[first] && named[first + size - 1]);
      if (k) CHECK(a[k].offset_bytes > a[k - 1].offset_bytes + a[k - 1].size_bytes);
      covered += size;
      for (uint64_t row = first; row < first + size; row++) named[row] = false;
    }
    for (uint64_t row = 0; row < ROWS; row++) CHECK(!named[row]);
    /* The fewest rows: those named, and the smallest gaps that have to be closed. */
    uint64_t fewest = distinct;
    for (uint64_t closed = 0; gap_count + 1 > most + closed; closed++) {
      uint64_t smallest = 0;
      for (uint64_t g = 1; g < gap_count; g++)
        if (gaps[g] < gaps[smallest]) smallest = g;
      fewest += gaps[smallest];
      gaps[smallest] = ROWS;
    }
    CHECK_EQ(covered, fewest);
  }
}

static void test_only_the_chunks_of_the_rows_are_fetched(void) {
  world_t w = world_open(world_config(4, 64, 0));
  enum { TABLE_ROWS = 40 * 65536 / ROW };
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 4, "embeddings", 0, 0);
  gemini_tensor_t table = world_tensor(&w, arena, "table", 40 * W);
  world_fill(&w, table, 0, 40 * W, HOST, 5);
  const int64_t rows[] = { 30 * 1024 + 3, 5, 30 * 1024 + 1, 5 };
  gemini_access_t whole = gemini_tensor_access(table, 0, 40 * W, READ, DEVICE), a[8];
  uint64_t count;
  CHECK_STATUS(gemini_acquire(w.mgr, &whole, 1, w.stream), GEMINI_ERR_OOM_DEVICE);
  CHECK_OK(gemini_row_accesses(&whole, ROW, 8, 4, rows, 8, a, &count));
  CHECK_EQ(count, 3);
  gemini_access_t away = gemini_tensor_access(table, 0, 0, READ, HOST);
  CHECK_OK(gemini_move(w.mgr, &away, 1));
  CHECK_OK(gemini_stats_reset(w.mgr));
  CHECK_OK(gemini_acquire(w.mgr, a, count, GEMINI_STREAM_CALLER));
  CHECK(world_reads(a[0].ptr, 5 * ROW, ROW, 5) && world_reads(a[2].ptr, (30 * 1024 + 3) * ROW, ROW, 5));
  CHECK_EQ(world_stats(&w).acquire_misses, 2); /* of 40 chunks */
  CHECK_OK(gemini_release(w.mgr, a, count, GEMINI_STREAM_CALLER));
  world_close(&w);
}

static void test_wrong_rows_are_refused(void) {
  gemini_access_t table = gemini_address_access(&table, ROW * ROWS, READ, DEVICE), a[4];
  memset(a, 0xa5, sizeof a);
  gemini_access_t untouched = a[0];
  const int32_t negative[] = { 1, 2, -1 }, spread[] = { 0, 10, 20, 30, 40 };
  const uint64_t far[] = { 1, ROWS };
  uint64_t count = 77;
  CHECK_STATUS(gemini_row_accesses(&table, ROW, 4, 3, negative, 4, a, &count), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "rows[2] is 4294967295, the table has 1000 rows");
  CHECK_STATUS(gemini_row_accesses(&table, ROW, 8, 2, far, 4, a, &count), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "rows[1] is 1000, the table has 1000 rows");
  table.mode = WRITE;
  CHECK_STATUS(gemini_row_accesses(&table, ROW, 4, 5, spread, 4, a, &count), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "need 5 accesses, and capacity is 4");
  CHECK(!memcmp(a, &untouched, sizeof untouched) && count == 77);
  CHECK_OK(gemini_row_accesses(&table, ROW, 4, 4, spread, 4, a, &count));
  CHECK_EQ(count, 4);
}

/* ---- texts */
static void test_one_call_tells_the_last_error(void) {
  world_t w = world_open(world_config(4, 8, 0));
  gemini_access_t a = gemini_address_access(&w, 8, READ, DEVICE);
  CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, w.stream), GEMINI_ERR_INVALID);
  char says[128];
  snprintf(says, sizeof says, "gemini_acquire: invalid argument: address %p lies in no arena of this manager",
           (void *)&w);
  CHECK(!strcmp(gemini_error_text(), says));
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT; /* as another library records its failures */
  info.status = GEMINI_ERR_IO;
  info.native_code = 28;
  snprintf(info.operation, sizeof info.operation, "another_call");
  snprintf(info.message, sizeof info.message, "the disk is full");
  CHECK_OK(gemini_error_set(&info));
  CHECK(!strcmp(gemini_error_text(), "another_call: input/output error: the disk is full (native code 28)"));
  info.operation[0] = 0, info.native_code = 0;
  CHECK_OK(gemini_error_set(&info));
  CHECK(!strcmp(gemini_error_text(), "input/output error: the disk is full"));
  world_close(&w);
}

static uint64_t figure(const char *text, const char *name) {
  char line[96];
  snprintf(line, sizeof line, "\n%s: ", name);
  const char *at = strstr(text, line);
  if (!at) fprintf(stderr, "no line '%s' in:\n%s\n", name, text);
  CHECK(at);
  return strtoull(at + strlen(line), NULL, 10);
}
static void test_statistics_as_text_are_the_statistics(void) {
  world_t w = world_open(world_config(3, 32, 16));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "block", 0, 0);
  uint8_t *block = take(&w, arena, 6 * W);
  for (int i = 0; i < 4; i++) step(&w, block, 6);
  char text[8192] = "\n", few[16];
  uint64_t length = 0;
  CHECK_OK(gemini_stats_text(w.mgr, sizeof text - 1, text + 1, &length));
  CHECK_EQ(strlen(text + 1), length);
  gemini_stats_t s = GEMINI_STATS_INIT;
  CHECK_OK(gemini_stats(w.mgr, &s));
#define FIELD(name) \
  if (strcmp(#name, "file_engine")) CHECK_EQ(figure(text, #name), s.name);
  FIGURES(FIELD)
#undef FIELD
  CHECK(s.iterations == 4 && s.plans && s.model_bytes == 6 * W && strstr(text, "\nfile_engine: "));
  gemini_tier_stats_t tier = GEMINI_TIER_STATS_INIT;
  CHECK_OK(gemini_tier_stats(w.mgr, DEVICE, &tier));
  CHECK_EQ(figure(text, "device budget_bytes"), tier.budget_bytes);
  CHECK_EQ(figure(text, "device used_bytes"), tier.used_bytes);
  CHECK_EQ(figure(text, "file budget_bytes"), 16 * W);
  gemini_link_stats_t link = GEMINI_LINK_STATS_INIT;
  CHECK_OK(gemini_link_stats(w.mgr, 0, GEMINI_REASON_ALL, &link));
  CHECK(link.from_tier == HOST && link.to_tier == DEVICE && link.moved_bytes);
  CHECK_EQ(figure(text, "host to device moved_bytes"), link.moved_bytes);
  CHECK_EQ(figure(text, "host to device moved_chunks"), link.moved_chunks);
  CHECK_OK(gemini_link_stats(w.mgr, 0, GEMINI_REASON_PLAN, &link));
  CHECK(link.moved_bytes);
  CHECK_EQ(figure(text, "host to device plan moved_bytes"), link.moved_bytes);
  CHECK_OK(gemini_stats_text(w.mgr, sizeof few, few, NULL)); /* what fits */
  CHECK(strlen(few) == sizeof few - 1 && !strncmp(few, text + 1, sizeof few - 1));
  world_close(&w);
}

int main(void) {
  RUN(test_bytes_taken_as_a_pointer_are_used_by_their_address);
  RUN(test_an_access_by_address_is_a_range_of_its_arena);
  RUN(test_an_address_that_names_no_bytes_is_refused);
  RUN(test_locate_names_arena_and_tensor);
  RUN(test_an_operator_releases_what_it_began_with);
  RUN(test_an_operator_whose_accesses_are_refused_has_not_begun);
  RUN(test_an_operator_releases_what_gradients_can_reuse_meanwhile);
  RUN(test_rows_become_sorted_ranges_without_repeats);
  RUN(test_random_rows_are_covered_by_as_few_bytes_as_possible);
  RUN(test_only_the_chunks_of_the_rows_are_fetched);
  RUN(test_wrong_rows_are_refused);
  RUN(test_one_call_tells_the_last_error);
  RUN(test_statistics_as_text_are_the_statistics);
  return check_done();
}
