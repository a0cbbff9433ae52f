/* Host slots: ranges of several chunks side by side, under budgets that are tight and change, with bytes and memory
 * looked at after each step. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "chunk/cut.h"
#include "host/reserve.h"
#include "tiers_world.h"

#define W WORLD_CHUNK

/* Bytes of arena i are those of seed[i], up to size. */
static gemini_arena_t arena_of(world_t *w, const char *name, uint64_t chunks) {
  gemini_arena_t arena = world_arena(w, GEMINI_KIND_OTHER, 1, name, 0, 0);
  uint64_t offset;
  if (chunks) CHECK_OK(gemini_arena_take(w->mgr, arena, chunks * W, &offset));
  return arena;
}
static void fill_on_host(world_t *w, gemini_arena_t arena, uint64_t chunks, uint64_t seed) {
  for (uint64_t i = 0; i < chunks; i++) world_fill(w, arena, i * W, W, GEMINI_TIER_HOST, seed);
}
static gemini_access_t hold(world_t *w, gemini_arena_t arena, uint64_t first, uint64_t count, uint32_t mode) {
  gemini_access_t a = world_part(arena, first * W, count * W, mode, GEMINI_TIER_HOST);
  CHECK_OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
  return a;
}
static void let_go(world_t *w, gemini_access_t a) { CHECK_OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER)); }
static bool right(const uint8_t *bytes, uint64_t offset, uint64_t size, uint64_t seed) {
  for (uint64_t i = 0; i < size; i++)
    if (bytes[i] != world_byte(seed, offset + i)) {
      fprintf(stderr, "byte %" PRIu64 " is not of seed %" PRIu64 "\n", offset + i, seed);
      return false;
    }
  return true;
}

/* ---- ranges */
static void test_ranges_of_any_length_lie_side_by_side(void) {
  for (uint64_t files = 0; files <= 40; files += 40) {
    world_t w = world_open(tiers_config(3, 8, files));
    gemini_arena_t a = arena_of(&w, "a", files ? 12 : 4), b = arena_of(&w, "b", files ? 12 : 4);
    uint64_t n = files ? 12 : 4;
    for (uint64_t i = 0; i < n; i++) { /* in turns, so that neighbours do not come together by themselves */
      world_fill(&w, a, (n - 1 - i) * W, W, GEMINI_TIER_HOST, 1);
      world_fill(&w, b, i * W, W, GEMINI_TIER_HOST, 2);
    }
    for (uint64_t count = 1; count <= (files ? 8 : 4); count++) {
      for (uint64_t first = 0; first + count <= n; first++) {
        gemini_access_t x = hold(&w, first & 1 ? a : b, first, count, GEMINI_READ);
        CHECK(right(x.ptr, first * W, count * W, first & 1 ? 1 : 2));
        let_go(&w, x);
        CHECK(chunks_right(&w));
      }
    }
    CHECK(world_stats(&w).peak_bytes[GEMINI_TIER_HOST] <= 8 * W);
    world_close(&w);
  }
}

/* An arena that has grown chunk by chunk has room for more; those that come later have what they need all the same, and
 * ranges that are acquired again and again soon stay where they are. */
static void test_ranges_find_their_place_and_stay(void) {
  enum { SLOTS = 35, COUNT = 4 }; /* of which none is to spare */
  static const uint64_t counts[COUNT] = { 5, 10, 10, 10 };
  world_t w = world_open(tiers_config(3, SLOTS, 0));
  gemini_arena_t a[COUNT];
  uint64_t offset;
  for (uint64_t i = 0; i < COUNT; i++) {
    char name[8];
    snprintf(name, sizeof name, "a%u", (unsigned)i);
    a[i] = arena_of(&w, name, i ? counts[i] : 0);
    for (uint64_t k = 0; !i && k < counts[0]; k++) {
      CHECK_OK(gemini_arena_take(w.mgr, a[0], W, &offset));
      world_fill(&w, a[0], k * W, W, GEMINI_TIER_HOST, 7);
    }
  }
  for (uint64_t k = 0; k < 10; k++) /* in turns */
    for (uint64_t i = 1; i < COUNT; i++) world_fill(&w, a[i], (k * 7 + i) % 10 * W, W, GEMINI_TIER_HOST, i);
  void *before[COUNT][16] = { 0 }, *now[COUNT][16] = { 0 };
  for (int round = 0; round < 3; round++) {
    if (round) memcpy(before, now, sizeof now);
    for (uint64_t i = 0; i < COUNT; i++)
      for (uint64_t first = 0; first + 2 <= counts[i]; first++) {
        gemini_access_t x = hold(&w, a[i], first, 2, GEMINI_READ);
        CHECK(right(x.ptr, first * W, 2 * W, i ? i : 7));
        now[i][first] = x.ptr;
        let_go(&w, x);
        if (round == 2) CHECK(now[i][first] == before[i][first]);
      }
  }
  CHECK(chunks_right(&w));
  world_close(&w);
}

static void test_ranges_beside_acquired_ones(void) {
  world_t w = world_open(tiers_config(3, 6, 40));
  gemini_arena_t a = arena_of(&w, "a", 12), b = arena_of(&w, "b", 4);
  fill_on_host(&w, a, 12, 1);
  fill_on_host(&w, b, 4, 2);
  /* The one in the middle stays where it is, and others come to its sides. */
  gemini_access_t middle = hold(&w, a, 5, 1, GEMINI_READ);
  uint8_t *was = middle.ptr;
  int fine = 0, full = 0;
  for (uint64_t first = 2; first <= 5; first++) {
    gemini_access_t x = world_part(a, first * W, 4 * W, GEMINI_READ, GEMINI_TIER_HOST);
    gemini_status_t status = gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
    CHECK(right(was, 5 * W, W, 1)); /* whatever else moved */
    if (status) {
      full++;
      CHECK_SAYS(world_error().message, "cannot be adjacent");
      CHECK_SAYS(world_error().message, "arena a");
    } else {
      fine++;
      CHECK((uint8_t *)x.ptr + (5 - first) * W == was);
      CHECK(right(x.ptr, first * W, 4 * W, 1));
      let_go(&w, x);
    }
    CHECK(chunks_right(&w));
  }
  CHECK(fine > 0);
  /* Another arena's chunk in the middle of everything: no four slots in a row are free beside it if it lies there. */
  let_go(&w, middle);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 5 * W));
  uint8_t *base = gmi_manager_get(w.mgr)->host.base;
  gemini_access_t other = { 0 };
  for (uint64_t i = 0; i < 200; i++) { /* until one lies in the third slot */
    other = hold(&w, b, i % 4, 1, GEMINI_READ);
    if ((uint64_t)((uint8_t *)other.ptr - base) / W == 2) break;
    let_go(&w, other);
    gemini_access_t around = hold(&w, a, i % 11, 2, GEMINI_READ);
    let_go(&w, around);
    other.ptr = NULL;
  }
  CHECK(other.ptr);
  figures_t before = world_stats(&w);
  gemini_access_t wide = world_part(a, 0, 4 * W, GEMINI_READ_WRITE, GEMINI_TIER_HOST);
  CHECK_STATUS(gemini_acquire(w.mgr, &wide, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_HOST);
  CHECK_SAYS(world_error().message, "cannot be adjacent");
  full++;
  CHECK(chunks_right(&w));
  CHECK_EQ(world_stats(&w).used_bytes[GEMINI_TIER_HOST] > 5 * W, 0);
  CHECK_EQ(world_stats(&w).model_bytes, before.model_bytes);
  CHECK(right(other.ptr, other.offset_bytes, W, 2));
  gemini_access_t pair = hold(&w, a, 0, 2, GEMINI_READ); /* there is room for */
  CHECK(right(pair.ptr, 0, 2 * W, 1));
  let_go(&w, pair);
  let_go(&w, other);
  CHECK_OK(gemini_acquire(w.mgr, &wide, 1, GEMINI_STREAM_CALLER));
  CHECK(right(wide.ptr, 0, 4 * W, 1));
  let_go(&w, wide);
  /* More than there is at all. */
  wide.size_bytes = 6 * W;
  CHECK_STATUS(gemini_acquire(w.mgr, &wide, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_HOST);
  CHECK(chunks_right(&w));
  for (uint64_t i = 0; i < 12; i++) CHECK(world_holds(&w, a, i * W, W, 1));
  CHECK(full > 0);
  world_close(&w);
}

static void test_overlapping_ranges_of_a_batch_share_their_bytes(void) {
  world_t w = world_open(tiers_config(3, 7, 40));
  gemini_arena_t a = arena_of(&w, "a", 12);
  fill_on_host(&w, a, 12, 1);
  uint64_t r = 5;
  for (int round = 0; round < 60; round++) {
    gemini_access_t x[4];
    uint64_t from = below(&r, 6) * W;
    for (int k = 0; k < 4; k++) {
      uint64_t at = from + below(&r, 3 * W);
      x[k] = world_part(a, at, 1 + below(&r, 2 * W), round % 2 ? GEMINI_READ : GEMINI_READ_WRITE, GEMINI_TIER_HOST);
    }
    CHECK_OK(gemini_acquire(w.mgr, x, 4, GEMINI_STREAM_CALLER));
    for (int k = 0; k < 4; k++) {
      CHECK(right(x[k].ptr, x[k].offset_bytes, x[k].size_bytes, 1));
      for (int j = 0; j < k; j++) {
        bool overlap = x[k].offset_bytes < x[j].offset_bytes + x[j].size_bytes &&
                       x[j].offset_bytes < x[k].offset_bytes + x[k].size_bytes;
        if (overlap)
          CHECK((uint8_t *)x[k].ptr - (uint8_t *)x[j].ptr ==
                (ptrdiff_t)(x[k].offset_bytes - x[j].offset_bytes)); /* one place for a byte */
      }
    }
    CHECK_OK(gemini_release(w.mgr, x, 4, GEMINI_STREAM_CALLER));
    CHECK(chunks_right(&w));
  }
  world_close(&w);
}

static void test_ranges_after_arenas_grew(void) {
  world_t w = world_open(tiers_config(3, 10, 60));
  gemini_arena_t arenas[3];
  uint64_t sizes[3] = { 0 }, offset;
  for (int i = 0; i < 3; i++) arenas[i] = arena_of(&w, i == 0 ? "a" : i == 1 ? "b" : "c", 0);
  for (int round = 0; round < 10; round++) {
    int i = round % 3;
    CHECK_OK(gemini_arena_take(w.mgr, arenas[i], W + W / 2, &offset)); /* grows by halves of chunks */
    uint64_t end = offset + W + W / 2;
    world_fill(&w, arenas[i], offset, end - offset, round % 2 ? GEMINI_TIER_HOST : GEMINI_TIER_DEVICE, (uint64_t)i + 1);
    sizes[i] = end;
    for (int k = 0; k < 3; k++)
      if (sizes[k]) CHECK(world_holds(&w, arenas[k], 0, sizes[k], (uint64_t)k + 1));
    CHECK(chunks_right(&w));
  }
  /* One goes, another takes its place. */
  CHECK_OK(gemini_arena_destroy(w.mgr, arenas[1]));
  arenas[1] = arena_of(&w, "d", 5);
  fill_on_host(&w, arenas[1], 5, 9);
  CHECK(world_holds(&w, arenas[1], 0, 5 * W, 9));
  CHECK(world_holds(&w, arenas[0], 0, sizes[0], 1));
  CHECK(world_holds(&w, arenas[2], 0, sizes[2], 3));
  CHECK(chunks_right(&w));
  world_close(&w);
}

/* ---- a new cut */
static void recut_to(world_t *w, uint64_t chunk) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  gmi_lock(m, __func__);
  m->config.chunk_bytes = 0; /* as if the library had chosen the size */
  gemini_status_t status = gmi_recut(m, chunk);
  gmi_unlock(m);
  CHECK_EQ(status, GEMINI_OK);
  CHECK_EQ(world_stats(w).chunk_bytes, chunk);
}
static void test_bytes_are_right_after_a_new_cut_wherever_they_were(void) {
  for (int shrunk = 0; shrunk < 3; shrunk++) {
    world_t w = world_open(tiers_config(16, 64, 0));
    gemini_arena_t a = arena_of(&w, "a", 9), b = arena_of(&w, "b", 7), c = arena_of(&w, "c", 5);
    for (uint64_t i = 0; i < 9; i++) /* on the device, on the host, never written, in no order */
      if (i % 4 != 1) world_fill(&w, a, ((i * 5) % 9) * W, W, i % 2 ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST, 1);
    for (uint64_t i = 7; i-- > 0;) world_fill(&w, b, i * W, W, GEMINI_TIER_HOST, 2);
    if (shrunk) { /* with something that was acquired where the budget ended */
      fill_on_host(&w, c, 5, 3);
      gemini_access_t x[3] = { hold(&w, a, 8, 1, GEMINI_READ), hold(&w, b, 6, 1, GEMINI_READ),
                               hold(&w, c, 3, 2, GEMINI_READ) };
      CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 28 * W));
      CHECK(chunks_right(&w));
      CHECK(right(x[0].ptr, 8 * W, W, 1) && right(x[1].ptr, 6 * W, W, 2) && right(x[2].ptr, 3 * W, 2 * W, 3));
      for (int k = 0; k < 3; k++) let_go(&w, x[k]);
      if (shrunk == 2) CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 40 * W));
    }
    static const uint64_t chunks[] = { 2 * W, 4 * W, W, 4 * W, 2 * W, W };
    for (int i = 0; i < 6; i++) {
      recut_to(&w, chunks[i]);
      for (uint64_t k = 0; k < 9; k++) CHECK(world_holds(&w, a, ((k * 5) % 9) * W, W, k % 4 != 1 ? 1 : 0));
      CHECK(world_holds(&w, b, 0, 7 * W, 2));
      CHECK(world_holds(&w, c, 0, 5 * W, shrunk ? 3 : 0));
      if (i % 2) world_fill(&w, b, W, W, GEMINI_TIER_DEVICE, 2);
      if (i % 2) CHECK(world_holds(&w, a, 0, 2 * W, 1) || true); /* side by side again, wherever */
    }
    CHECK(chunks_right(&w));
    world_close(&w);
  }
}

/* A device budget that is no multiple of the chunks it was set for holds more of the smaller ones. */
static void test_a_new_cut_has_all_frames_of_the_budget(void) {
  world_t w = world_open(tiers_config(16, 64, 0));
  gemini_arena_t a = arena_of(&w, "a", 16);
  fill_on_host(&w, a, 16, 1);
  recut_to(&w, 2 * W);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_DEVICE, 11 * W));
  recut_to(&w, W);
  gemini_access_t all = world_part(a, 0, 11 * W, GEMINI_READ, GEMINI_TIER_DEVICE);
  CHECK_OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(world_stats(&w).used_bytes[GEMINI_TIER_DEVICE], 11 * W);
  CHECK_OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
  CHECK(world_holds(&w, a, 0, 16 * W, 1));
  world_close(&w);
}

/* ---- budgets and memory */
static uint64_t resident(world_t *w) {
  gmi_reserve_figures_t f;
  CHECK_EQ(gmi_reserve_figures(gmi_manager_get(w->mgr)->host.reserve, &f), GEMINI_OK);
  return f.resident_bytes;
}
static void test_budgets_shrink_and_grow_with_files_beneath(void) {
  /* Parts of several chunks, so that registered memory is registered anew again and again. */
  world_t w = world_open(tiers_config(4, 100, 300));
  gemini_arena_t a = arena_of(&w, "a", 140);
  fill_on_host(&w, a, 140, 1);
  static const uint64_t budgets[] = { 100, 37, 4, 64, 7, 90, 17, 100, 16, 33 };
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 10; i++) {
      CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, budgets[i] * W + (round ? 5000 : 0)));
      CHECK(chunks_right(&w));
      figures_t s = world_stats(&w);
      CHECK(s.used_bytes[GEMINI_TIER_HOST] <= s.budget_bytes[GEMINI_TIER_HOST]);
      CHECK(resident(&w) <= s.budget_bytes[GEMINI_TIER_HOST] + 4096); /* whole pages */
      uint64_t count = budgets[i] < 20 ? budgets[i] : 20;
      for (uint64_t at = 0; at < 140; at += count) { /* all of it passes through what there is */
        gemini_access_t x =
            hold(&w, a, at, at + count > 140 ? 140 - at : count, round ? GEMINI_READ_WRITE : GEMINI_READ);
        CHECK(right(x.ptr, x.offset_bytes, x.size_bytes, 1));
        let_go(&w, x);
      }
      CHECK(chunks_right(&w));
      CHECK(resident(&w) <= budgets[i] * W + (round ? 5000 + 4096 : 0));
    }
  }
  CHECK_STATUS(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 0), GEMINI_ERR_INVALID);
  world_close(&w);
}

static void test_a_budget_that_cannot_be_met_stays(void) {
  world_t w = world_open(tiers_config(3, 12, 0));
  gemini_arena_t a = arena_of(&w, "a", 8);
  fill_on_host(&w, a, 8, 1);
  CHECK_STATUS(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 7 * W), GEMINI_ERR_OOM_HOST);
  CHECK_SAYS(world_error().message, "must stay");
  CHECK_EQ(world_stats(&w).budget_bytes[GEMINI_TIER_HOST], 12 * W);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 8 * W));
  CHECK(world_holds(&w, a, 0, 8 * W, 1));
  gemini_access_t x = hold(&w, a, 2, 3, GEMINI_READ);
  CHECK_STATUS(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, UINT64_C(1) << 45), GEMINI_ERR_OOM_HOST);
  CHECK_EQ(world_stats(&w).budget_bytes[GEMINI_TIER_HOST], 8 * W);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 30 * W));
  CHECK(right(x.ptr, 2 * W, 3 * W, 1));
  let_go(&w, x);
  CHECK(world_holds(&w, a, 0, 8 * W, 1));
  CHECK(chunks_right(&w));
  world_close(&w);
}

/* Who has the address of a chunk has it as long as he wants; then the memory behind the budget goes. */
static void test_what_was_acquired_behind_a_smaller_budget_goes_when_released(void) {
  world_t w = world_open(tiers_config(4, 128, 300));
  gemini_arena_t a = arena_of(&w, "a", 120);
  fill_on_host(&w, a, 120, 1);
  gemini_access_t x = hold(&w, a, 60, 2, GEMINI_READ_WRITE), y = hold(&w, a, 118, 2, GEMINI_READ);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 16 * W));
  CHECK(chunks_right(&w));
  CHECK(right(x.ptr, 60 * W, 2 * W, 1) && right(y.ptr, 118 * W, 2 * W, 1));
  CHECK_EQ(world_stats(&w).used_bytes[GEMINI_TIER_HOST] <= 16 * W, 1);
  for (uint64_t i = 0; i < 2 * W; i++) ((uint8_t *)x.ptr)[i] = world_byte(4, 60 * W + i);
  for (uint64_t i = 0; i < 40; i += 2) CHECK(world_holds(&w, a, i * W, 2 * W, 1));
  CHECK_EQ(world_stats(&w).used_bytes[GEMINI_TIER_HOST] <= 16 * W, 1);
  let_go(&w, x);
  let_go(&w, y);
  CHECK(world_holds(&w, a, 60 * W, 2 * W, 4));
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 16 * W));
  CHECK(chunks_right(&w));
  CHECK(resident(&w) <= 16 * W);
  for (uint64_t i = 0; i < 120; i += 2) CHECK(world_holds(&w, a, i * W, 2 * W, i == 60 ? 4 : 1));
  world_close(&w);
}

static uint64_t process_bytes(void) {
  unsigned long pages = 0, data = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  CHECK(file && fscanf(file, "%*u %lu", &pages) == 1);
  fclose(file);
  (void)data;
  return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}
/* What the process holds: the budget, 1 % and a little; of a budget on huge pages as of one on small ones. */
static void test_memory_is_the_budget_and_comes_back(void) {
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__ /* with their shadows */
  return;
#endif
  static const uint64_t mib = 1 << 20, little = 4 << 20;
  static const uint64_t hosts[] = { 48 * mib, 320 * mib };
  for (int i = 0; i < 2; i++) {
    gemini_config_t c = tiers_config(1, 1, 0);
    c.chunk_bytes = i ? 4 * mib : W;
    c.device_bytes = 2 * c.chunk_bytes;
    c.host_bytes = hosts[i];
    c.file_bytes = hosts[i];
    uint64_t before = process_bytes();
    world_t w = world_open(c);
    gemini_arena_t a = arena_of(&w, "a", 4 * mib / W), b;
    uint64_t offset, chunk = c.chunk_bytes;
    gemini_arena_config_t ac = GEMINI_ARENA_CONFIG_INIT;
    ac.kind = GEMINI_KIND_OTHER;
    ac.name = "b";
    CHECK_OK(gemini_arena_create(w.mgr, &ac, &b));
    CHECK_OK(gemini_arena_take(w.mgr, b, hosts[i], &offset));
    CHECK(process_bytes() - before < little);           /* nothing has been touched */
    for (uint64_t at = 0; at < hosts[i]; at += chunk) { /* as much as the budget, and then more */
      gemini_access_t x = world_part(b, at, chunk, GEMINI_WRITE, GEMINI_TIER_HOST);
      CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      memset(x.ptr, (int)(at / chunk) + 1, chunk);
      CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
    world_fill(&w, a, 0, 4 * mib, GEMINI_TIER_HOST, 7);
    uint64_t held = process_bytes() - before;
    fprintf(stderr, "    budget %" PRIu64 " MiB: %.1f MiB held\n", hosts[i] / mib, (double)held / (double)mib);
    CHECK(held <= hosts[i] + hosts[i] / 100 + little);
    CHECK(held >= hosts[i] - hosts[i] / 8);
    CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, hosts[i] / 4));
    held = process_bytes() - before;
    CHECK(held <= hosts[i] / 4 + hosts[i] / 100 + little);
    for (uint64_t at = 0; at < hosts[i]; at += chunk) {
      gemini_access_t x = world_part(b, at, chunk, GEMINI_READ, GEMINI_TIER_HOST);
      CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      CHECK(((uint8_t *)x.ptr)[0] == (uint8_t)(at / chunk + 1) &&
            ((uint8_t *)x.ptr)[chunk - 1] == (uint8_t)(at / chunk + 1));
      CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
    held = process_bytes() - before;
    CHECK(held <= hosts[i] / 4 + hosts[i] / 100 + little);
    CHECK(world_holds(&w, a, 0, 4 * mib, 7));
    world_close(&w);
    CHECK(process_bytes() < before + little);
  }
}

/* ---- updates whose chunks lie anywhere */
static void quadruple(void *user, const gemini_update_span_t *span) { /* one byte of a, four of b */
  (void)user;
  uint8_t *a = span->ptr[0], *b = span->ptr[1];
  CHECK_EQ(span->tier, GEMINI_TIER_HOST);
  for (uint64_t i = 0; i < span->element_count; i++)
    for (int k = 0; k < 4; k++) b[4 * i + (uint64_t)k] = (uint8_t)(b[4 * i + (uint64_t)k] + a[i] + 1);
}
/* Each piece is done once. */
static void check_quadrupled(world_t *w, gemini_arena_t b, uint64_t pieces) {
  for (uint64_t p = 0; p < pieces; p++) {
    gemini_access_t x = hold(w, b, 4 * p, 4, GEMINI_READ);
    const uint8_t *bytes = x.ptr;
    uint64_t at = 4 * p * W;
    for (uint64_t k = 0; k < 4 * W; k++)
      CHECK_EQ(bytes[k], (uint8_t)(world_byte(2, at + k) + world_byte(1, (at + k) / 4) + 1));
    let_go(w, x);
  }
}
/* With an acquired chunk of another arena in each of the slots. */
static void test_an_update_is_done_whatever_lies_in_the_way(void) {
  enum { PIECES = 2 };
  for (uint64_t files = 0; files <= 40; files += 40) {
    uint64_t host = files ? 6 : 5 * PIECES + 1; /* all of them, or one piece and the one in the way */
    for (uint64_t slot = 0; slot < host; slot++) {
      world_t w = world_open(tiers_config(3, host, files));
      gemini_arena_t a = arena_of(&w, "a", PIECES), b = world_arena(&w, GEMINI_KIND_MASTER, 4, "b", a, 0),
                     c = arena_of(&w, "c", 1);
      fill_on_host(&w, c, 1, 3);
      fill_on_host(&w, a, PIECES, 1);
      fill_on_host(&w, b, 4 * PIECES, 2);
      uint8_t *base = gmi_manager_get(w.mgr)->host.base;
      gemini_access_t wall = { 0 };
      for (uint64_t i = 0; i < 100; i++) { /* until c lies there */
        wall = hold(&w, c, 0, 1, GEMINI_READ);
        if ((uint64_t)((uint8_t *)wall.ptr - base) / W == slot) break;
        let_go(&w, wall);
        wall.ptr = NULL;
        gemini_access_t x = hold(&w, b, i % (4 * PIECES - 1), 1 + i % 2, GEMINI_READ);
        let_go(&w, x);
        gemini_access_t move = world_part(c, 0, W, 0, GEMINI_TIER_FILE);
        if (files) CHECK_OK(gemini_move(w.mgr, &move, 1));
      }
      gemini_arena_t arenas[] = { a, b };
      uint32_t modes[] = { GEMINI_READ, GEMINI_READ_WRITE };
      gemini_update_t u = GEMINI_UPDATE_INIT;
      u.arenas = arenas;
      u.modes = modes;
      u.arena_count = 2;
      u.fn = quadruple;
      gemini_status_t status = gemini_update(w.mgr, &u);
      CHECK_EQ(status, GEMINI_OK); /* each chunk lies where there is room */
      if (wall.ptr) {
        CHECK(right(wall.ptr, 0, W, 3));
        let_go(&w, wall);
      }
      CHECK_OK(gemini_update_wait(w.mgr));
      check_quadrupled(&w, b, PIECES);
      CHECK(chunks_right(&w));
      world_close(&w);
    }
  }
}

/* ---- many random steps against a model */
enum { ARENAS = 3, HELD = 3, MOST = 20 };
static void random_program(uint64_t seed, bool files) {
  uint64_t r = seed * 2 + 1;
  for (int i = 0; i < 4; i++) check_random(&r);
  uint64_t host = 5 + below(&r, 20);
  world_t w = world_open(tiers_config(2 + below(&r, 5), files ? host : 60, files ? 100 : 0));
  gemini_arena_t arenas[ARENAS];
  uint64_t chunks[ARENAS] = { 0 }, offset;
  uint8_t *model[ARENAS];
  gemini_access_t held[HELD];
  void *block = NULL;
  int count = 0;
  uint64_t block_size = 0, most = MOST;
  for (int i = 0; i < ARENAS; i++) {
    static const char *const names[] = { "a", "b", "c" };
    arenas[i] = arena_of(&w, names[i], 0);
    model[i] = calloc(MOST, W);
    CHECK(model[i]);
  }
  for (int step = 0; step < 60; step++) {
    int i = (int)below(&r, ARENAS);
    if (chunks[i] < 2 || (below(&r, 8) == 0 && chunks[i] < most)) {
      uint64_t more = 1 + below(&r, 4);
      if (chunks[i] + more > most) more = most - chunks[i];
      CHECK_OK(gemini_arena_take(w.mgr, arenas[i], more * W, &offset));
      CHECK_EQ(offset, chunks[i] * W);
      chunks[i] += more;
      continue;
    }
    uint64_t size = chunks[i] * W, at = below(&r, size), length = 1 + below(&r, 3 * W);
    if (length > size - at) length = size - at;
    gemini_access_t x = world_part(arenas[i], at, length, 1 + (uint32_t)below(&r, 3), GEMINI_TIER_HOST);
    gemini_status_t status;
    switch (below(&r, 12)) {
    case 0: /* budgets; never more than the first */
      status = gemini_budget_set(w.mgr, GEMINI_TIER_HOST, (files ? 4 + below(&r, 30) : 40 + below(&r, 40)) * W);
      CHECK(status == GEMINI_OK || (status == GEMINI_ERR_OOM_HOST && (count || block || !files)));
      break;
    case 1:
      x.tier = (uint32_t)below(&r, files ? 3 : 2);
      if (length > W) x.size_bytes = W;
      status = gemini_move(w.mgr, &x, 1);
      CHECK(status == GEMINI_OK || ((status == GEMINI_ERR_BUSY || status == GEMINI_ERR_OOM_HOST) && count) ||
            (status == GEMINI_ERR_OOM_HOST && block));
      break;
    case 2:
    case 3: /* the device; one chunk, as there are few frames */
      if (length > W) x.size_bytes = W;
      x.tier = GEMINI_TIER_DEVICE;
      status = gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER);
      CHECK(status == GEMINI_OK || ((status == GEMINI_ERR_BUSY || status == GEMINI_ERR_OOM_HOST) && (count || block)));
      if (status) break;
      if (x.mode != GEMINI_WRITE) CHECK(!memcmp(x.ptr, model[i] + at, x.size_bytes));
      if (x.mode != GEMINI_READ) {
        for (uint64_t k = 0; k < x.size_bytes; k++)
          ((uint8_t *)x.ptr)[k] = model[i][at + k] = world_byte((uint64_t)step + 1, k);
      }
      CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      break;
    case 4:
      if (block) {
        CHECK(right(block, 0, block_size, seed + 5));
        CHECK_OK(gemini_host_free(w.mgr, block));
        block = NULL;
        break;
      }
      block_size = 1 + below(&r, 2 * W);
      status = gemini_host_alloc(w.mgr, block_size, UINT64_C(1) << below(&r, 17), &block);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
      for (uint64_t k = 0; !status && k < block_size; k++) ((uint8_t *)block)[k] = world_byte(seed + 5, k);
      break;
    case 5:
      while (count > 0) {
        count--;
        int j = held[count].object.arena == arenas[0] ? 0 : held[count].object.arena == arenas[1] ? 1 : 2;
        CHECK(!memcmp(held[count].ptr, model[j] + held[count].offset_bytes, held[count].size_bytes));
        let_go(&w, held[count]);
      }
      break;
    default:
      status = gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER);
      bool fits = at / W + gmi_manager_get(w.mgr)->host.slot_count >= (at + length - 1) / W + 1;
      CHECK(status == GEMINI_OK || (status == GEMINI_ERR_OOM_HOST && (count || block || !fits || !files)));
      if (status) break;
      if (x.mode != GEMINI_WRITE && memcmp(x.ptr, model[i] + at, length)) {
        fprintf(stderr, "seed %" PRIu64 ", step %d: wrong bytes in arena %d\n", seed, step, i);
        exit(1);
      }
      if (x.mode != GEMINI_READ)
        for (uint64_t k = 0; k < length; k++) ((uint8_t *)x.ptr)[k] = model[i][at + k] = world_byte((uint64_t)step, k);
      if (count < HELD && below(&r, 3) == 0) held[count++] = x;
      else let_go(&w, x);
    }
    CHECK(chunks_right(&w));
    figures_t s = world_stats(&w);
    CHECK(s.used_bytes[GEMINI_TIER_HOST] <= s.budget_bytes[GEMINI_TIER_HOST]);
  }
  while (count > 0) let_go(&w, held[--count]);
  if (block) CHECK_OK(gemini_host_free(w.mgr, block));
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 80 * W));
  for (int i = 0; i < ARENAS; i++) {
    for (uint64_t k = 0; k < chunks[i]; k++) {
      gemini_access_t x = hold(&w, arenas[i], k, 1, GEMINI_READ);
      CHECK(!memcmp(x.ptr, model[i] + k * W, W));
      let_go(&w, x);
    }
    CHECK_OK(gemini_arena_destroy(w.mgr, arenas[i]));
    free(model[i]);
  }
  figures_t s = world_stats(&w);
  CHECK_EQ(s.used_bytes[GEMINI_TIER_HOST] + s.used_bytes[GEMINI_TIER_FILE], 0);
  CHECK(resident(&w) <= 80 * W);
  world_close(&w);
}
/* ---- zeros that are not in their slot yet, as sums of ranks' gradients leave them in front of what they overwrite */

/* The middle one of three chunks of zeros gets the bytes of seed 6 in its second half; its slot has others in the first. */
static void half_overwrite(world_t *w, gemini_arena_t arena) {
  gmi_manager_t *m = gmi_manager_get(w->mgr);
  gemini_access_t all = world_whole(arena, 0, GEMINI_TIER_HOST);
  fill_on_host(w, arena, 3, 5);
  CHECK_OK(gemini_zero(w->mgr, &all));
  gmi_lock(m, __func__);
  gmi_arena_t *a = gmi_arena_get(m, arena);
  CHECK(a != NULL);
  gmi_chunk_t *c = &a->chunks[1];
  CHECK_EQ(gmi_chunk_to_host_to_overwrite(m, c, W), GEMINI_OK);
  uint8_t *slot = gmi_slot_address(m, gmi_chunk_slot(c));
  CHECK(slot[0] || slot[1] || slot[2]); /* else this tests nothing */
  world_write(slot + W / 2, W + W / 2, W / 2, 6);
  gmi_chunk_host_wrote(m, c);
  gmi_chunk_lazy_zeros_set(m, c, W / 2);
  gmi_unlock(m);
}
static bool half_is_right(const uint8_t *bytes) {
  return world_reads(bytes, 0, W + W / 2, 0) && world_reads(bytes + W + W / 2, W + W / 2, W / 2, 6) &&
         world_reads(bytes + 2 * W, 0, W, 0);
}
static void test_zeros_that_are_not_written_yet_are_read_as_zeros(void) {
  enum {
    HOST,
    HOST_ALONE,
    DEVICE,
    FILES,
    STORED,
    NORM,
    OVERWRITTEN_HALF,
    OVERWRITTEN,
    ON_DEVICE,
    ZEROED,
    CLOSED,
    WAYS
  };
  for (int way = 0; way < WAYS; way++) {
    world_t w = world_open(tiers_config(4, 8, 8));
    gemini_arena_t arena = arena_of(&w, "a", 3);
    gemini_access_t all = world_whole(arena, GEMINI_READ, GEMINI_TIER_HOST);
    bool halves = true;
    half_overwrite(&w, arena);
    if (way == HOST_ALONE) CHECK(world_holds(&w, arena, W, W / 2, 0));
    if (way == DEVICE) all.tier = GEMINI_TIER_DEVICE;
    if (way == FILES) {
      gemini_access_t down = world_part(arena, W, W, 0, GEMINI_TIER_FILE);
      CHECK_OK(gemini_move(w.mgr, &down, 1));
    }
    if (way == STORED) {
      uint8_t *stored = malloc(3 * W);
      FILE *file = tmpfile();
      CHECK(stored && file);
      CHECK_OK(gemini_store(w.mgr, &all, fileno(file), 0));
      CHECK_EQ(pread(fileno(file), stored, 3 * W, 0), (ssize_t)(3 * W));
      CHECK(half_is_right(stored));
      fclose(file);
      free(stored);
    }
    if (way == NORM) {
      double norm = -1;
      gemini_access_t first = world_part(arena, 0, W + W / 2, GEMINI_READ, GEMINI_TIER_HOST);
      CHECK_OK(gemini_norm(w.mgr, &first, GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm));
      CHECK(norm == 0);
    }
    if (way == OVERWRITTEN_HALF) world_fill(&w, arena, W + W / 2, W / 2, GEMINI_TIER_HOST, 7);
    if (way == OVERWRITTEN) world_fill(&w, arena, W, W, GEMINI_TIER_HOST, 8);
    if (way == ON_DEVICE) world_fill(&w, arena, W, W, GEMINI_TIER_DEVICE, 8);
    if (way == ZEROED) {
      gemini_access_t zeros = world_part(arena, W, W, 0, GEMINI_TIER_HOST);
      CHECK_OK(gemini_zero(w.mgr, &zeros));
      fill_on_host(&w, arena, 3, 8);
    }
    if (way >= OVERWRITTEN_HALF) halves = false;
    if (way == OVERWRITTEN_HALF)
      CHECK(world_holds(&w, arena, W, W / 2, 0) && world_holds(&w, arena, W + W / 2, W / 2, 7));
    if (way == OVERWRITTEN || way == ON_DEVICE || way == ZEROED) CHECK(world_holds(&w, arena, W, W, 8));
    if (halves) {
      CHECK_OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
      CHECK(half_is_right(all.ptr));
      CHECK_OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    }
    CHECK(chunks_right(&w));
    world_close(&w);
  }
}

static void test_random_steps_keep_every_byte(void) {
  const char *first = getenv("GEMINI_STRESS_SEED");
  uint64_t seed = first ? strtoull(first, NULL, 0) : 1;
  for (uint64_t i = 0; i < (first ? 1 : check_repetitions(60)); i++) random_program(seed + i, (seed + i) % 4 != 0);
}

int main(void) {
  tiers_begin();
  bool uring = has_uring();
  RUN_TIMED(test_bytes_are_right_after_a_new_cut_wherever_they_were);
  RUN_TIMED(test_a_new_cut_has_all_frames_of_the_budget);
  RUN_TIMED(test_a_budget_that_cannot_be_met_stays);
  RUN_TIMED(test_memory_is_the_budget_and_comes_back);
  for (engine = GEMINI_FILE_ENGINE_THREADS; engine; engine = engine == GEMINI_FILE_ENGINE_THREADS && uring ? 1 : 0) {
    fprintf(stderr, "  engine: %s\n", engine == GEMINI_FILE_ENGINE_THREADS ? "threads" : "io_uring");
    RUN_TIMED(test_ranges_of_any_length_lie_side_by_side);
    RUN_TIMED(test_ranges_find_their_place_and_stay);
    RUN_TIMED(test_ranges_beside_acquired_ones);
    RUN_TIMED(test_overlapping_ranges_of_a_batch_share_their_bytes);
    RUN_TIMED(test_ranges_after_arenas_grew);
    RUN_TIMED(test_budgets_shrink_and_grow_with_files_beneath);
    RUN_TIMED(test_what_was_acquired_behind_a_smaller_budget_goes_when_released);
    RUN_TIMED(test_an_update_is_done_whatever_lies_in_the_way);
    RUN_TIMED(test_zeros_that_are_not_written_yet_are_read_as_zeros);
    RUN_TIMED(test_random_steps_keep_every_byte);
  }
  return check_done();
}
