/* Frames, slots and blocks of different sizes: what a tier uses, what its budget holds, and what copies move is counted
 * in that tier's own unit, and no byte goes astray. SPDX-License-Identifier: Apache-2.0
 *
 * Sizes that are expected come from the padding that a test sets, never from the manager. */
#include "chunk/cut.h"

#include "tiers_world.h"
#include "tracer/tracer.h"

enum { W = WORLD_CHUNK, DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE, CHUNKS = 12 };
static const gmi_sizes_padding_t paddings[] = { { 0, 0 }, { 0, 4096 }, { 0, 65536 }, { 1, 0 }, { 1, 12288 } };
enum { PADDINGS = sizeof paddings / sizeof *paddings };

static void pad(gmi_sizes_padding_t padding) { gmi_sizes_padding = padding; }
static uint64_t slot_bytes(void) { return (uint64_t)W << gmi_sizes_padding.slot_shift; }
static uint64_t block_bytes(void) { return slot_bytes() + gmi_sizes_padding.block_bytes; }
static gemini_config_t config_of(uint64_t frames, uint64_t slots, uint64_t blocks) {
  gemini_config_t c = tiers_config(frames, 0, 0);
  c.host_bytes = slots * slot_bytes();
  c.file_bytes = blocks * block_bytes();
  return c;
}

/* ---- a model of one arena: the seed of each chunk's bytes, and where they are by the records */
typedef struct {
  world_t w;
  gemini_arena_t arena;
  uint64_t seeds[CHUNKS];
} one_t;
static one_t one_open(gemini_config_t c) {
  one_t o = { .w = world_open(c) };
  o.arena = world_arena(&o.w, GEMINI_KIND_OTHER, 1, "one", 0, 0);
  world_tensor(&o.w, o.arena, "t", (uint64_t)CHUNKS * W);
  return o;
}
static void one_fill(one_t *o, uint32_t chunk, uint32_t tier, uint64_t seed) {
  world_fill(&o->w, o->arena, (uint64_t)chunk * W, W, tier, seed);
  o->seeds[chunk] = seed;
}
static bool one_holds(one_t *o, uint32_t chunk, uint32_t tier) {
  return world_holds_on(&o->w, o->arena, (uint64_t)chunk * W, W, tier, o->seeds[chunk]);
}
static gemini_status_t one_move(one_t *o, uint32_t chunk, uint32_t tier) {
  gemini_access_t a = world_part(o->arena, (uint64_t)chunk * W, W, 0, tier);
  return gemini_move(o->w.mgr, &a, 1);
}

static uint64_t moved(const figures_t *s, int link, bool chunks) {
  uint64_t sum = 0;
  for (int r = 0; r < GEMINI_REASON_COUNT; r++) sum += chunks ? s->moved_chunks[link][r] : s->moved_bytes[link][r];
  return sum;
}
/* Every figure of bytes is a count of places, or of chunks moved, times the size that is its own. */
static void figures_right(const one_t *o) {
  CHECK(chunks_right(&o->w));
  gmi_manager_t *m = gmi_manager_get(o->w.mgr);
  uint64_t frames = 0, slots = 0, blocks = 0;
  for (uint32_t k = 0; k < CHUNKS; k++) {
    const gmi_chunk_t *c = chunk_of(&o->w, o->arena, (uint64_t)k * W);
    frames += c->frame_ != GMI_NONE;
    slots += c->slot_ != GMI_NONE;
    blocks += c->block_ != GMI_NONE;
  }
  CHECK_EQ(m->io.count, 0);
  figures_t s = world_stats(&o->w);
  CHECK_EQ(s.used_bytes[DEVICE], (frames + m->nonmodel.frames) * W);
  CHECK_EQ(s.used_bytes[HOST], slots * slot_bytes());
  CHECK_EQ(s.used_bytes[FILES], blocks * block_bytes());
  CHECK_EQ(s.peak_bytes[DEVICE] % W, 0);
  CHECK_EQ(s.peak_bytes[HOST] % slot_bytes(), 0);
  CHECK_EQ(s.peak_bytes[FILES] % block_bytes(), 0);
  for (int i = 0; i < GEMINI_TIER_COUNT; i++) CHECK(s.used_bytes[i] <= s.budget_bytes[i]);
  CHECK_EQ(moved(&s, LINK_H2D, false), moved(&s, LINK_H2D, true) * W);
  CHECK_EQ(moved(&s, LINK_D2H, false), moved(&s, LINK_D2H, true) * W);
  CHECK_EQ(moved(&s, LINK_H2F, false), moved(&s, LINK_H2F, true) * slot_bytes());
  CHECK_EQ(moved(&s, LINK_F2H, false), moved(&s, LINK_F2H, true) * slot_bytes());
}
static void one_settle(const one_t *o) { /* what is queued has come */
  for (uint32_t k = 0; k < CHUNKS; k++) {
    gmi_manager_t *m = gmi_manager_get(o->w.mgr);
    gmi_lock(m, __func__);
    CHECK_OK(gmi_chunk_settle_host(m, chunk_of(&o->w, o->arena, (uint64_t)k * W)));
    gmi_unlock(m);
  }
}

static void test_bytes_and_figures_hold_through_random_moves(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    one_t o = one_open(config_of(4, 5, CHUNKS + 2));
    uint64_t r = 77 + (uint64_t)p;
    for (uint32_t k = 0; k < CHUNKS; k++) one_fill(&o, k, k % 2 ? HOST : DEVICE, 1 + k);
    for (int step = 0; step < 300; step++) {
      uint32_t k = (uint32_t)below(&r, CHUNKS), tier = (uint32_t)below(&r, 3);
      gemini_access_t all = world_part(o.arena, (uint64_t)k * W, W, 0, 0);
      switch (below(&r, 4)) {
      case 0: one_fill(&o, k, tier % 2, check_random(&r) | 1); break;
      case 1: CHECK_OK(one_move(&o, k, tier)); break;
      case 2: CHECK(one_holds(&o, k, tier % 2)); break;
      default:
        if (below(&r, 4)) break;
        CHECK_OK(gemini_zero(o.w.mgr, &all));
        o.seeds[k] = 0;
      }
      one_settle(&o);
      figures_right(&o);
    }
    for (uint32_t k = 0; k < CHUNKS; k++) CHECK(one_holds(&o, k, HOST));
    world_close(&o.w);
  }
}

static void test_a_budget_holds_as_many_places_as_its_own_size_says(void) {
  char says[128];
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    gemini_config_t c = config_of(3, 4, 0); /* no files, */
    c.placement = GEMINI_PLACEMENT_CPU;     /* and the device does not count */
    one_t o = one_open(c);
    for (uint32_t k = 0; k < 4; k++) one_fill(&o, k, HOST, 9 + k);
    gemini_access_t fifth = world_part(o.arena, 4 * W, W, GEMINI_WRITE, HOST);
    CHECK_STATUS(gemini_acquire(o.w.mgr, &fifth, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_HOST);
    snprintf(says, sizeof says, "a slot of %" PRIu64 " bytes does not fit in host memory", slot_bytes());
    CHECK_SAYS(world_error().message, says);
    /* One byte less is one slot less. */
    CHECK_STATUS(gemini_budget_set(o.w.mgr, HOST, 4 * slot_bytes() - 1), GEMINI_ERR_OOM_HOST);
    CHECK_OK(one_move(&o, 3, DEVICE));
    CHECK_OK(gemini_budget_set(o.w.mgr, HOST, 4 * slot_bytes() - 1));
    CHECK_EQ(gmi_manager_get(o.w.mgr)->host.slot_count, 3);
    figures_right(&o);
    CHECK_OK(gemini_budget_set(o.w.mgr, HOST, 5 * slot_bytes()));
    one_fill(&o, 4, HOST, 21);
    /* Of the device: three frames, whatever is below. */
    for (uint32_t k = 0; k < 3; k++) CHECK_OK(one_move(&o, k, DEVICE));
    CHECK_EQ(world_stats(&o.w).used_bytes[DEVICE], 3 * W);
    CHECK_OK(gemini_budget_set(o.w.mgr, DEVICE, 3 * W - 1));
    CHECK_EQ(world_stats(&o.w).used_bytes[DEVICE], 2 * W);
    for (uint32_t k = 0; k < 5; k++) CHECK(one_holds(&o, k, HOST));
    figures_right(&o);
    world_close(&o.w);
  }
}

static void test_files_hold_as_many_blocks_as_their_own_size_says(void) {
  char says[128];
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    gemini_config_t c = config_of(3, 2, 5);
    c.file_bytes--; /* four blocks, and not quite a fifth */
    one_t o = one_open(c);
    for (uint32_t k = 0; k < 4; k++) {
      one_fill(&o, k, HOST, 5 + k);
      CHECK_OK(one_move(&o, k, FILES));
    }
    CHECK_EQ(world_stats(&o.w).used_bytes[FILES], 4 * block_bytes());
    one_fill(&o, 4, HOST, 11);
    CHECK_STATUS(one_move(&o, 4, FILES), GEMINI_ERR_OOM_FILE);
    snprintf(says, sizeof says, "a block of %" PRIu64 " bytes does not fit in files", block_bytes());
    CHECK_SAYS(world_error().message, says);
    CHECK_STATUS(gemini_budget_set(o.w.mgr, FILES, 4 * block_bytes() - 1), GEMINI_ERR_OOM_FILE);
    CHECK_OK(gemini_budget_set(o.w.mgr, FILES, 4 * block_bytes()));
    CHECK_STATUS(one_move(&o, 4, FILES), GEMINI_ERR_OOM_FILE);
    CHECK_OK(gemini_budget_set(o.w.mgr, FILES, 6 * block_bytes() - 1));
    gmi_store_figures_t figures;
    gmi_store_figures(gmi_manager_get(o.w.mgr)->file.store, &figures);
    CHECK_EQ(figures.block_count, 5);
    CHECK_OK(one_move(&o, 4, FILES));
    for (uint32_t k = 0; k < 5; k++) CHECK(one_holds(&o, k, HOST));
    one_settle(&o);
    figures_right(&o);
    /* Rates are of what was moved. */
    gmi_manager_t *m = gmi_manager_get(o.w.mgr);
    gmi_trace_t trace = { 0 };
    gmi_lock(m, __func__);
    gmi_trace_measure(m, &trace);
    for (int write = 0; write < 2; write++)
      CHECK_EQ(trace.file_bytes_per_s[write],
               (uint64_t)((double)slot_bytes() * 1e9 / gmi_link_file(m, write)->chunk_ns.mean));
    gmi_unlock(m);
    world_close(&o.w);
  }
}

/* Without files, a call that needs more slots than the budget has is refused before it changes a byte. */
static void test_what_does_not_fit_in_slots_is_refused_at_once(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    char text[200];
    one_t o = one_open(config_of(3, 4, 0));
    FILE *file = tmpfile();
    CHECK(file && !ftruncate(fileno(file), CHUNKS * W));
    one_fill(&o, 11, HOST, 3);
    one_fill(&o, 0, DEVICE, 4);
    gemini_access_t four = world_part(o.arena, 0, 4 * W, 0, 0);
    CHECK_STATUS(gemini_load(o.w.mgr, &four, fileno(file), 0), GEMINI_ERR_OOM_HOST);
    snprintf(text, sizeof text,
             "the range needs %" PRIu64 " bytes of host memory, but of the budget %" PRIu64
             ", other chunks and blocks hold %" PRIu64,
             4 * slot_bytes(), 4 * slot_bytes(), slot_bytes());
    CHECK_SAYS(world_error().message, text);
    CHECK(one_holds(&o, 0, DEVICE));
    CHECK_OK(one_move(&o, 11, DEVICE));
    CHECK_OK(gemini_load(o.w.mgr, &four, fileno(file), 0)); /* its host copy can go */
    fclose(file);
    world_close(&o.w);

    gemini_config_t c = config_of(20, 5, 0);
    c.placement = GEMINI_PLACEMENT_CPU; /* the device does not count */
    opt_t *opt = opt_open(c, 1);        /* five chunks */
    for (int a = 0; a < OPT_ARENAS; a++) {
      gemini_access_t all = world_whole(opt->arenas[a], 0, DEVICE);
      CHECK_OK(gemini_move(opt->w.mgr, &all, 1));
      for (uint64_t at = 0; at < opt->n * opt_bytes[a]; at += W) {
        gemini_access_t x = world_part(opt->arenas[a], at, 4, GEMINI_READ_WRITE, DEVICE); /* the host copy goes */
        CHECK_OK(gemini_acquire(opt->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
        CHECK_OK(gemini_release(opt->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      }
    }
    CHECK_OK(gemini_budget_set(opt->w.mgr, HOST, 5 * slot_bytes() - 1));
    CHECK_STATUS(opt_update(opt, 0), GEMINI_ERR_OOM_HOST);
    snprintf(text, sizeof text, "the update needs %" PRIu64 " bytes of host memory", 5 * slot_bytes());
    CHECK_SAYS(world_error().message, text);
    opt_close(opt);
  }
}

/* A slot behind a smaller budget stays as long as somebody has its address, and so does its memory. */
static void test_memory_behind_the_budget_stays_while_it_is_acquired(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    one_t o = one_open(config_of(12, 12, 0));
    gmi_manager_t *m = gmi_manager_get(o.w.mgr);
    for (uint32_t k = 0; k < CHUNKS; k++) one_fill(&o, k, HOST, 50 + k);
    gmi_chunk_t *c = m->host.slots[2].chunk;
    CHECK(c);
    gemini_access_t held = world_part(o.arena, (uint64_t)c->index * W, W, GEMINI_READ_WRITE, HOST);
    CHECK_OK(gemini_acquire(o.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
    for (uint32_t k = 0; k < CHUNKS; k++) {
      gemini_access_t x = world_part(o.arena, (uint64_t)k * W, 4, GEMINI_READ_WRITE, DEVICE);
      if (k == c->index) continue;
      CHECK_OK(gemini_acquire(o.w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_release(o.w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
    CHECK_OK(gemini_budget_set(o.w.mgr, HOST, 2 * slot_bytes()));
    CHECK_EQ(c->slot_, 2);
    CHECK(world_reads(held.ptr, (uint64_t)c->index * W, W, o.seeds[c->index]));
    CHECK_OK(gemini_release(o.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
    CHECK(one_holds(&o, c->index, HOST));
    CHECK(c->slot_ < 2);
    world_close(&o.w);
  }
}

static void test_updates_and_transfers_go_on(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    opt_t *o = opt_open(config_of(6, 9, 60), 3);
    for (int step = 0; step < 6; step++) {
      CHECK_OK(opt_update(o, 0));
      opt_model(o, 0, o->n);
      if (step % 2) CHECK_OK(gemini_update_wait(o->w.mgr));
      if (step == 3) opt_to_files(o, MASTER);
    }
    CHECK_OK(gemini_update_wait(o->w.mgr));
    for (int a = 0; a < OPT_ARENAS; a++) {
      uint64_t size = o->n * opt_bytes[a];
      for (uint64_t at = 0; at < size; at += W) opt_check_range(o, a, at, size - at < W ? size - at : W, HOST);
    }
    CHECK(chunks_right(&o->w));
    double norm;
    gemini_access_t all = world_whole(o->arenas[PARAMS], 0, 0);
    CHECK_OK(gemini_norm(o->w.mgr, &all, GEMINI_DTYPE_F64, GEMINI_STREAM_CALLER, &norm)); /* any bits will do */
    opt_close(o);
  }
}

static void test_host_blocks_take_whole_slots(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    one_t o = one_open(config_of(3, 8, 0));
    one_fill(&o, 0, HOST, 3);
    void *block;
    CHECK_OK(gemini_host_alloc(o.w.mgr, 2 * slot_bytes() - 100, 0, &block));
    memset(block, 0xab, 2 * slot_bytes() - 100);
    uint64_t used = world_stats(&o.w).used_bytes[HOST];
    CHECK_EQ(used % slot_bytes(), 0);
    CHECK(used >= 3 * slot_bytes());
    for (uint32_t k = 1; k < 4; k++) one_fill(&o, k, HOST, 30 + k);
    for (uint64_t i = 0; i < 2 * slot_bytes() - 100; i++) CHECK(((uint8_t *)block)[i] == 0xab);
    for (uint32_t k = 0; k < 4; k++) CHECK(one_holds(&o, k, HOST));
    CHECK_OK(gemini_host_free(o.w.mgr, block));
    world_close(&o.w);
    /* Whatever is given back, the slots that a block reaches into stay its own. */
    o = one_open(config_of(3, 8, 0));
    gmi_manager_t *m = gmi_manager_get(o.w.mgr);
    void *blocks[3];
    for (int i = 0; i < 3; i++) CHECK_OK(gemini_host_alloc(o.w.mgr, W, 0, &blocks[i]));
    for (int gone = 0; gone < 3; gone++) {
      for (int i = gone; i < 3; i++) {
        uint64_t first = (uint64_t)((uint8_t *)blocks[i] - m->host.base), last = first + W - 1;
        for (uint64_t s = first / slot_bytes(); s <= last / slot_bytes(); s++) CHECK(m->host.slots[s].block);
      }
      CHECK_OK(gemini_host_free(o.w.mgr, blocks[gone]));
    }
    world_close(&o.w);
  }
}

/* Non-model memory takes frames; a plan counts what it moves in copies between frame and slot. */
static void test_a_plan_counts_frames_and_copies(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    one_t o = one_open(config_of(4, CHUNKS + 4, CHUNKS));
    for (uint32_t k = 0; k < CHUNKS; k++) one_fill(&o, k, HOST, 40 + k);
    const gmi_manager_t *m = gmi_manager_get(o.w.mgr);
    CHECK(m->host.home_end <= CHUNKS + 4); /* every chunk has a slot of its own */
    void *blocks[3];
    for (int i = 0; i < 3; i++) {
      CHECK_OK(gemini_alloc(o.w.mgr, W, GEMINI_STREAM_CALLER, &blocks[i]));
      memset(blocks[i], i + 1, W);
    }
    gemini_access_t two[2] = { world_part(o.arena, 0, W, GEMINI_READ, DEVICE),
                               world_part(o.arena, W, W, GEMINI_READ, DEVICE) };
    CHECK_STATUS(gemini_acquire(o.w.mgr, two, 2, GEMINI_STREAM_CALLER), GEMINI_ERR_OOM_DEVICE);
    CHECK_SAYS(world_error().message,
               "65536 more bytes of device memory are needed: of the budget 262144 less margin 0, "
               "chunks acquired hold 65536, pinned 0, gathered 0, graphs 0, non-model memory 196608");
    for (int i = 0; i < 3; i++) {
      for (uint64_t at = 0; at < W; at++) CHECK(((uint8_t *)blocks[i])[at] == i + 1);
      CHECK_OK(gemini_free(o.w.mgr, blocks[i], GEMINI_STREAM_CALLER));
    }
    figures_t before = world_stats(&o.w);
    for (int i = 0; i < 12; i++) { /* the last one goes round under a plan that neither is made anew nor comes back */
      before = world_stats(&o.w);
      CHECK_OK(gemini_iteration_begin(o.w.mgr));
      for (uint32_t k = 0; k < 6; k++) {
        char name[16];
        snprintf(name, sizeof name, "op %u", k);
        CHECK_OK(gemini_op_begin(o.w.mgr, name, o.w.stream));
        void *scratch;
        CHECK_OK(gemini_alloc(o.w.mgr, W + 1, o.w.stream, &scratch));
        gemini_access_t a = world_part(o.arena, (uint64_t)k * W, W, GEMINI_READ, DEVICE);
        CHECK_OK(gemini_acquire(o.w.mgr, &a, 1, o.w.stream));
        CHECK_OK(gemini_release(o.w.mgr, &a, 1, o.w.stream));
        CHECK_OK(gemini_free(o.w.mgr, scratch, o.w.stream));
        CHECK_OK(gemini_op_end(o.w.mgr));
      }
      CHECK_OK(gemini_iteration_end(o.w.mgr));
      one_settle(&o);
      figures_right(&o);
    }
    figures_t s = world_stats(&o.w);
    CHECK(s.plans);
    CHECK(s.planned_fetch_bytes);
    CHECK_EQ(moved(&s, LINK_H2D, false) - moved(&before, LINK_H2D, false), s.planned_fetch_bytes);
    char text[4096];
    CHECK_OK(gemini_plan_explain(o.w.mgr, sizeof text, text, NULL));
    CHECK_SAYS(text, "largest op: op 0 (op 0) needs 3 frames, 0.2 MiB: 1 chunks and 2 of non-model memory");
    world_close(&o.w);
  }
}

static void test_several_chunks_have_one_host_address_only_in_slots_without_gaps(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    one_t o = one_open(config_of(3, 6, 0));
    gemini_access_t two = world_part(o.arena, 0, 2 * W, GEMINI_WRITE, HOST);
    gemini_status_t status = gemini_acquire(o.w.mgr, &two, 1, GEMINI_STREAM_CALLER);
    CHECK_EQ(status, paddings[p].slot_shift ? GEMINI_ERR_UNSUPPORTED : GEMINI_OK);
    if (status) CHECK_SAYS(world_error().message, "a slot has 131072 bytes, a chunk 65536");
    else CHECK_OK(gemini_release(o.w.mgr, &two, 1, GEMINI_STREAM_CALLER));
    figures_right(&o);
    world_close(&o.w);
  }
}

/* ---- checkpoints */
static void test_a_checkpoint_is_taken_up_with_its_own_sizes_only(void) {
  for (int p = 0; p < PADDINGS; p++) {
    char dir[64];
    dir_make(dir);
    pad(paddings[p]);
    gemini_config_t c = config_of(4, 5, 2 * CHUNKS);
    c.file_dir = dir;
    c.checkpoint_name = "run";
    one_t o = one_open(c), again;
    for (uint32_t k = 0; k < CHUNKS - 1; k++) one_fill(&o, k, k % 2, 60 + k);
    CHECK_OK(gemini_checkpoint(o.w.mgr));
    one_settle(&o);
    figures_right(&o);
    CHECK_EQ(world_stats(&o.w).used_bytes[FILES], (CHUNKS - 1) * block_bytes());
    world_close(&o.w);
    again = one_open(c);
    memcpy(again.seeds, o.seeds, sizeof o.seeds);
    CHECK_OK(gemini_resume(again.w.mgr));
    figures_right(&again);
    CHECK_EQ(world_stats(&again.w).used_bytes[FILES], (CHUNKS - 1) * block_bytes());
    for (uint32_t k = 0; k < CHUNKS; k++) CHECK(one_holds(&again, k, HOST));
    world_close(&again.w);
    /* Blocks of another size. */
    gmi_sizes_padding.block_bytes += 4096;
    gemini_manager_t mgr;
    CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_FORMAT);
    CHECK_SAYS(world_error().message, "blocks of");
    pad(paddings[p]);
    /* Blocks of the same size, for chunks of another, or of which more is in the block. */
    uint64_t block = block_bytes();
    gmi_sizes_padding_t others[] = { { 0, (uint32_t)(block - 2 * W) }, { !paddings[p].slot_shift, 0 } };
    others[1].block_bytes = (uint32_t)(block - ((uint64_t)W << others[1].slot_shift));
    for (int i = 0; i < 2 && block >= 2 * W; i++) {
      c.chunk_bytes = i ? W : 2 * W;
      gmi_sizes_padding = others[i];
      world_t w = world_open(c);
      gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "one", 0, 0);
      world_tensor(&w, arena, "t", (uint64_t)CHUNKS * W);
      CHECK_STATUS(gemini_resume(w.mgr), GEMINI_ERR_FORMAT);
      CHECK_SAYS(world_error().message, "the checkpoint has chunks of 65536 bytes, of which a block holds");
      world_close(&w);
    }
    c.chunk_bytes = W;
    pad(paddings[p]);
    again = one_open(c); /* as it was */
    CHECK_OK(gemini_resume(again.w.mgr));
    world_close(&again.w);
    static const char *const names[] = { "run.index", "run.0.chunks" };
    for (int i = 0; i < 2; i++) {
      char path[128];
      snprintf(path, sizeof path, "%s/%s", dir, names[i]);
      CHECK_EQ(unlink(path), 0);
    }
    CHECK_EQ(rmdir(dir), 0);
  }
}

/* Recutting needs slots that are as large as chunks; without them the first size stays. */
static void test_arenas_are_cut_anew_only_without_gaps(void) {
  for (int p = 0; p < PADDINGS; p++) {
    pad(paddings[p]);
    gemini_config_t c = config_of(64, 256, 0);
    c.chunk_bytes = 0;
    world_t w = world_open(c);
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "one", 0, 0);
    gemini_tensor_t t = world_tensor(&w, arena, "t", 40 * W);
    gmi_manager_t *m = gmi_manager_get(w.mgr);
    gemini_access_t all = world_whole(t, GEMINI_WRITE, DEVICE);
    CHECK_OK(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_release(w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    uint64_t old = world_stats(&w).chunk_bytes, other = old == 2 * W ? W : 2 * W;
    world_fill(&w, t, 0, 40 * W, DEVICE, 8);
    gmi_lock(m, __func__);
    CHECK_OK(gmi_recut(m, other));
    gmi_unlock(m);
    CHECK_EQ(world_stats(&w).chunk_bytes, paddings[p].slot_shift ? old : other);
    CHECK(world_holds_on(&w, t, 0, 40 * W, DEVICE, 8));
    world_close(&w);
  }
}

int main(void) {
  tiers_begin();
  for (int e = 0; e < 2; e++) {
    if (e && !has_uring()) break;
    engine = e ? GEMINI_FILE_ENGINE_URING : GEMINI_FILE_ENGINE_THREADS;
    RUN_TIMED(test_bytes_and_figures_hold_through_random_moves);
    RUN_TIMED(test_files_hold_as_many_blocks_as_their_own_size_says);
    RUN_TIMED(test_updates_and_transfers_go_on);
    RUN_TIMED(test_a_checkpoint_is_taken_up_with_its_own_sizes_only);
  }
  RUN_TIMED(test_a_budget_holds_as_many_places_as_its_own_size_says);
  RUN_TIMED(test_what_does_not_fit_in_slots_is_refused_at_once);
  RUN_TIMED(test_memory_behind_the_budget_stays_while_it_is_acquired);
  RUN_TIMED(test_host_blocks_take_whole_slots);
  RUN_TIMED(test_a_plan_counts_frames_and_copies);
  RUN_TIMED(test_several_chunks_have_one_host_address_only_in_slots_without_gaps);
  RUN_TIMED(test_arenas_are_cut_anew_only_without_gaps);
  return check_done();
}
