/* Tests of the policy: plans against an independent optimum, a checker that replays plans, timelines by hand.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <unistd.h>

#include "check.h"
#include "min_fetch.h"
#include "policy/model.h"
#include "step_time.h"

/* ---- instances ---- */

#define MAX_OPS 48
#define MAX_CHUNKS 40
#define MAX_PIECES 24
#define MAX_ACCESSES (MAX_OPS * MAX_CHUNKS)
#define MAX_PIECE_CHUNKS (MAX_PIECES * 6)
#define MAX_COLLECTIVES 40

typedef struct instance {
  gmi_plan_input_t input;
  gmi_plan_op_t ops[MAX_OPS + 1];
  gmi_plan_access_t accesses[MAX_ACCESSES];
  gmi_plan_piece_t pieces[MAX_PIECES + 1];
  uint32_t piece_chunks[MAX_PIECE_CHUNKS];
  uint8_t kind[MAX_CHUNKS], pinned[MAX_CHUNKS], has_slot[MAX_CHUNKS];
  gmi_plan_collective_t gathers[MAX_COLLECTIVES], sums[MAX_COLLECTIVES];
  gmi_plan_group_t links[2];
} instance_t;

static void instance_begin(instance_t *i, uint32_t chunks, uint32_t frames, uint64_t fetch_ns, uint64_t evict_ns) {
  CHECK(chunks <= MAX_CHUNKS);
  memset(i, 0, sizeof *i);
  i->input.chunk_count = chunks;
  i->input.frame_count = frames;
  i->input.ops = i->ops;
  i->input.accesses = i->accesses;
  i->input.pieces = i->pieces;
  i->input.piece_chunks = i->piece_chunks;
  i->input.chunk_kind = i->kind;
  i->input.chunk_pinned = i->pinned;
  i->input.chunk_has_slot = i->has_slot;
  i->input.chunk_bytes = i->input.frame_bytes = i->input.link_bytes = i->input.file_bytes = 2097152;
  i->input.fetch_ns = fetch_ns;
  i->input.evict_ns = evict_ns;
  i->input.placement = GEMINI_PLACEMENT_CUDA;
}
static void add_op(instance_t *i, uint64_t compute_ns, uint32_t heap_frames) {
  CHECK(i->input.op_count < MAX_OPS);
  gmi_plan_op_t *op = &i->ops[i->input.op_count++];
  op->compute_ns = compute_ns;
  op->heap_frames = heap_frames;
  op[1].access_first = op->access_first;
}
/* To the last op; in ascending order of chunk. */
static void add_access(instance_t *i, uint32_t chunk, uint32_t mode) {
  uint32_t *end = &i->ops[i->input.op_count].access_first;
  CHECK(*end < MAX_ACCESSES);
  i->accesses[*end].chunk = chunk;
  i->accesses[(*end)++].mode = mode;
}
static void add_piece(instance_t *i, uint32_t after_op, uint64_t host_ns, uint64_t device_ns) {
  CHECK(i->input.piece_count < MAX_PIECES);
  gmi_plan_piece_t *piece = &i->pieces[i->input.piece_count++];
  piece->after_op = after_op;
  piece->host_ns = host_ns;
  piece->device_ns = device_ns;
  piece[1].chunk_first = piece->chunk_first;
}
/* Shared chunks come first. */
static void add_piece_chunk(instance_t *i, uint32_t chunk, bool shared) {
  gmi_plan_piece_t *piece = &i->pieces[i->input.piece_count - 1];
  i->piece_chunks[piece[1].chunk_first++] = chunk;
  if (shared) piece->shared_count++;
}

static void add_group(instance_t *i, uint64_t gather_ns, uint64_t sum_ns) {
  i->links[i->input.groups.group_count++] = (gmi_plan_group_t){ gather_ns, sum_ns };
  i->input.groups.gathers = i->gathers;
  i->input.groups.sums = i->sums;
  i->input.groups.links = i->links;
}
/* Of the last group, with this rank's slice in one chunk. */
static void add_gather(instance_t *i, uint32_t op, uint32_t use_op, uint32_t frame_op, uint32_t part, uint64_t bytes) {
  CHECK(i->input.groups.gather_count < MAX_COLLECTIVES);
  i->gathers[i->input.groups.gather_count++] =
      (gmi_plan_collective_t){ op,       use_op,    frame_op, i->input.groups.group_count - 1, 1, 0,
                               { part }, { bytes }, 3 * bytes };
}
static void add_sum(instance_t *i, uint32_t op, uint32_t part, uint64_t bytes) {
  CHECK(i->input.groups.sum_count < MAX_COLLECTIVES);
  i->sums[i->input.groups.sum_count++] = (gmi_plan_collective_t){
    op, op, GMI_NO_OP, i->input.groups.group_count - 1, 1, 0, { part }, { bytes }, 3 * bytes
  };
}

/* One in a full expression, so that all compilers draw the same instances. */
static uint32_t below(uint64_t *seed, uint32_t limit) { return (uint32_t)(check_random(seed) % limit); }

/* At random: can the piece be computed ahead, from when on, and how many slots does it take? */
static void compute_ahead(instance_t *i, uint32_t p, uint64_t *seed) {
  i->pieces[p].ahead_slots = i->pieces[p].after_op > 0 ? below(seed, 4) : 0;
  if (i->pieces[p].ahead_slots > 0) i->pieces[p].ahead_op = below(seed, i->pieces[p].after_op);
}

typedef struct shape {
  uint32_t ops, chunks, pieces, per_op, heap, pin_one_in, fresh_one_in; /* the last two: 0 = none */
} shape_t;

/* Random, but such that every op fits. slack: frames above what the largest op needs, at most. */
static void instance_random(instance_t *i, uint64_t *seed, const shape_t *shape, uint32_t slack) {
  uint32_t chunks = 1 + below(seed, shape->chunks), ops = 1 + below(seed, shape->ops), need = 0, pinned = 0;
  const uint32_t evict_ns = 1 + below(seed, 200), fetch_ns = 1 + below(seed, 200);
  instance_begin(i, chunks, 0, fetch_ns, evict_ns);
  for (uint32_t w = 0; w < chunks; w++) {
    i->pinned[w] = shape->pin_one_in > 0 && below(seed, shape->pin_one_in) == 0;
    pinned += i->pinned[w];
    i->kind[w] = (uint8_t)below(seed, 6);
    i->has_slot[w] = i->pinned[w] || i->kind[w] % 2;
  }
  for (uint32_t op = 0; op < ops; op++) {
    uint32_t heap = shape->heap > 0 ? below(seed, shape->heap + 1) : 0, used = 0;
    add_op(i, below(seed, 500), heap);
    uint32_t wanted = below(seed, shape->per_op + 1);
    for (uint32_t w = 0; w < chunks; w++) {
      if (below(seed, chunks) >= wanted) continue;
      uint32_t mode = 1 + below(seed, 3);
      if (shape->fresh_one_in > 0 && below(seed, shape->fresh_one_in) == 0) mode = GMI_ACCESS_WRITE | GMI_ACCESS_FRESH;
      add_access(i, w, mode);
      used += !i->pinned[w];
    }
    if (used + pinned + heap > need) need = used + pinned + heap;
  }
  uint32_t pieces = shape->pieces > 0 ? below(seed, shape->pieces + 1) : 0;
  for (uint32_t p = 0; p < pieces; p++) {
    const uint32_t device_ns = below(seed, 100), host_ns = below(seed, 300);
    add_piece(i, below(seed, ops), host_ns, device_ns);
    compute_ahead(i, p, seed);
    uint32_t chunk = below(seed, chunks), count = 1 + below(seed, chunks < 5 ? chunks : 5),
             shared = below(seed, count + 1);
    for (uint32_t w = 0; w < count; w++) add_piece_chunk(i, (chunk + w) % chunks, w < shared);
  }
  i->input.frame_count = need + (slack > 0 ? below(seed, slack + 1) : 0);
  i->input.spare_slots = below(seed, 2 * pieces + 1);
  i->input.pieces_apart = below(seed, 2);
  i->input.static_param_fraction = 0.25 * below(seed, 5);
  i->input.static_optim_fraction = 0.25 * below(seed, 5);
}

/* A training step: forward, backward over layers of chunks; each layer's update after its backward op or at the end.
 * Gradients take the parameters' chunks. Always the same for the same numbers. */
static void instance_training(instance_t *i, uint32_t layers, uint32_t frames, bool update_at_end) {
  instance_begin(i, 4 * layers, frames, 100, 100);
  for (uint32_t l = 0; l < layers; l++) {
    i->kind[l] = GEMINI_KIND_PARAM;
    for (uint32_t k = 1; k < 4; k++) i->kind[layers * k + l] = (uint8_t)(GEMINI_KIND_GRAD + k);
    add_op(i, 150, 0);
    add_access(i, l, GMI_ACCESS_READ);
  }
  for (uint32_t l = layers; l-- > 0;) {
    add_op(i, 300, 0);
    add_access(i, l, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  }
  for (uint32_t l = 0; l < layers; l++) {
    add_piece(i, update_at_end ? 2 * layers - 1 : 2 * layers - 1 - l, 120, 10);
    add_piece_chunk(i, l, true);
    for (uint32_t k = 1; k < 4; k++) add_piece_chunk(i, layers * k + l, false);
  }
}

/* ---- the checker ---- */

typedef struct stage {
  uint32_t op, piece;
} stage_t;

static uint32_t list_stages(const gmi_plan_input_t *in, const gmi_plan_t *plan, stage_t *stages) {
  uint32_t count = 0;
  for (uint32_t op = 0; op < in->op_count; op++) {
    stages[count++] = (stage_t){ op, GMI_NO_PIECE };
    for (uint32_t p = 0; p < in->piece_count; p++)
      if (in->pieces[p].after_op == op && plan->piece_on_device[p]) stages[count++] = (stage_t){ op, p };
  }
  return count;
}
static uint32_t find_stage(const stage_t *stages, uint32_t count, uint32_t op, uint32_t piece) {
  for (uint32_t j = 0; j < count; j++)
    if (stages[j].op == op && stages[j].piece == piece) return j;
  fprintf(stderr, "no stage is piece %u of op %u, which a move names\n", piece, op);
  exit(1);
}
/* 0: the stage does not use the chunk; else GMI_ACCESS_*. */
static uint32_t stage_mode(const gmi_plan_input_t *in, stage_t stage, uint32_t chunk) {
  if (stage.piece != GMI_NO_PIECE) {
    for (uint32_t k = in->pieces[stage.piece].chunk_first; k < in->pieces[stage.piece + 1].chunk_first; k++)
      if (in->piece_chunks[k] == chunk) return GMI_ACCESS_READ | GMI_ACCESS_WRITE;
    return 0;
  }
  for (uint32_t x = in->ops[stage.op].access_first; x < in->ops[stage.op + 1].access_first; x++)
    if (in->accesses[x].chunk == chunk) return in->accesses[x].mode;
  return 0;
}
static bool is_pinned(const gmi_plan_input_t *in, uint32_t w) {
  return in->chunk_pinned != NULL && in->chunk_pinned[w];
}
/* Does a host piece take this chunk right behind this stage? */
static bool is_taken(const gmi_plan_input_t *in, const gmi_plan_t *plan, const stage_t *stages, uint32_t count,
                     uint32_t j, uint32_t chunk) {
  if (j + 1 < count && stages[j + 1].op == stages[j].op) return false;
  for (uint32_t p = 0; p < in->piece_count; p++) {
    if (plan->piece_on_device[p] || in->pieces[p].after_op != stages[j].op) continue;
    for (uint32_t k = in->pieces[p].chunk_first; k < in->pieces[p + 1].chunk_first; k++)
      if (in->piece_chunks[k] == chunk) return true;
  }
  return false;
}

static void check_shape(const gmi_plan_input_t *in, const gmi_plan_t *plan, const stage_t *stages, uint32_t count) {
  CHECK_EQ(plan->op_count, in->op_count);
  CHECK_EQ(plan->chunk_count, in->chunk_count);
  CHECK_EQ(plan->piece_count, in->piece_count);
  CHECK_EQ(plan->fetch_first[0], 0);
  CHECK_EQ(plan->evict_first[0], 0);
  CHECK_EQ(plan->fetch_first[in->op_count], plan->fetch_count);
  int64_t before = -1, first_use = -1, last_use = -1;
  for (uint32_t op = 0; op < in->op_count; op++) {
    CHECK(plan->fetch_first[op] <= plan->fetch_first[op + 1]);
    CHECK(plan->evict_first[op] <= plan->evict_first[op + 1]);
    for (uint32_t f = plan->fetch_first[op]; f < plan->fetch_first[op + 1]; f++) {
      const gmi_plan_move_t *move = &plan->fetches[f];
      CHECK_EQ(move->op, op);
      CHECK_EQ(move->flags, 0);
      int64_t at = find_stage(stages, count, op, move->piece),
              use = find_stage(stages, count, move->use_op, move->use_piece);
      CHECK(at >= before); /* in order of issue */
      before = at;
      if (use < at) use += count;
      CHECK(use >= last_use); /* and of need, the wrap included */
      if (first_use < 0) first_use = use;
      last_use = use;
      CHECK(use < first_use + count || (use == first_use + count));
      CHECK(stage_mode(in, stages[use % count], move->chunk) != 0);
      for (int64_t j = at; j < use; j++) CHECK_EQ(stage_mode(in, stages[j % count], move->chunk), 0);
    }
  }
  uint64_t dirty = 0, devices = 0;
  before = -1;
  for (uint32_t op = 0; op < in->op_count; op++) {
    for (uint32_t e = plan->evict_first[op]; e < plan->evict_first[op + 1]; e++) {
      const gmi_plan_move_t *move = &plan->evicts[e];
      CHECK_EQ(move->op, op);
      CHECK_EQ(move->use_op, 0);
      int64_t at = find_stage(stages, count, op, move->piece);
      CHECK(at >= before);
      before = at;
      CHECK(stage_mode(in, stages[at], move->chunk) != 0); /* right behind the last use */
      dirty += (move->flags & GMI_EVICT_DIRTY) != 0;
      bool taken = false;
      for (uint32_t j = (uint32_t)at; !taken; j = (j + 1) % count) {
        taken = is_taken(in, plan, stages, count, j, move->chunk);
        if (stage_mode(in, stages[(j + 1) % count], move->chunk) != 0) break;
      }
      CHECK_EQ((move->flags & GMI_EVICT_FOR_UPDATE) != 0, taken);
    }
  }
  for (uint32_t p = 0; p < in->piece_count; p++) devices += plan->piece_on_device[p];
  CHECK_EQ(dirty, plan->evict_dirty_count);
  CHECK_EQ(devices, plan->device_piece_count);
  CHECK(plan->predicted_ns >= plan->compute_ns);
  CHECK(plan->predicted_ns >= plan->fetch_busy_ns);
  CHECK(plan->predicted_ns >= plan->evict_busy_ns);
  CHECK(plan->predicted_ns >= plan->update_busy_ns);
  CHECK_EQ(plan->fetch_busy_ns, plan->fetch_count * in->fetch_ns);
  CHECK_EQ(plan->evict_busy_ns, plan->evict_dirty_count * in->evict_ns);
}

/* Follows the plan's moves over three iterations. In the first, what was written before it is not known. */
static void check_replay(const gmi_plan_input_t *in, const gmi_plan_t *plan, const stage_t *stages, uint32_t count) {
  uint8_t resident[MAX_CHUNKS], dirty[MAX_CHUNKS];
  memcpy(resident, plan->resident_at_start, in->chunk_count);
  memset(dirty, 0, sizeof dirty);
  for (uint32_t w = 0; w < in->chunk_count; w++) {
    CHECK(!is_pinned(in, w) || (plan->stays[w] && resident[w]));
    CHECK(!plan->stays[w] || resident[w]);
  }
  for (uint32_t iteration = 0; iteration < 3; iteration++) {
    uint32_t f = 0, e = 0;
    for (uint32_t j = 0; j < count; j++) {
      for (; f < plan->fetch_count && plan->fetches[f].op == stages[j].op && plan->fetches[f].piece == stages[j].piece;
           f++) {
        uint32_t w = plan->fetches[f].chunk;
        CHECK(!resident[w] && !plan->stays[w] && !is_pinned(in, w));
        resident[w] = 1, dirty[w] = 0;
      }
      for (uint32_t w = 0; w < in->chunk_count; w++) {
        uint32_t mode = stage_mode(in, stages[j], w);
        if (mode == 0) continue;
        if (!resident[w]) CHECK((mode & GMI_ACCESS_FRESH) != 0 && !plan->stays[w]);
        resident[w] = 1;
        if ((mode & (GMI_ACCESS_WRITE | GMI_ACCESS_FRESH)) != 0) dirty[w] = 1;
      }
      uint32_t taken = in->ops[stages[j].op].heap_frames;
      for (uint32_t w = 0; w < in->chunk_count; w++) taken += resident[w];
      CHECK(taken <= in->frame_count);
      for (; e < plan->evict_first[in->op_count] && plan->evicts[e].op == stages[j].op &&
             plan->evicts[e].piece == stages[j].piece;
           e++) {
        uint32_t w = plan->evicts[e].chunk;
        CHECK(resident[w] && !plan->stays[w] && !is_pinned(in, w));
        if (iteration > 0) CHECK_EQ((plan->evicts[e].flags & GMI_EVICT_DIRTY) != 0, dirty[w]);
        resident[w] = 0, dirty[w] = 0;
      }
      for (uint32_t w = 0; w < in->chunk_count; w++)
        if (is_taken(in, plan, stages, count, j, w)) CHECK(!resident[w] || is_pinned(in, w));
    }
    CHECK_EQ(f, plan->fetch_count);
    CHECK_EQ(e, plan->evict_first[in->op_count]);
    CHECK(memcmp(resident, plan->resident_at_start, in->chunk_count) == 0);
  }
  for (uint32_t w = 0; w < in->chunk_count; w++) { /* stays is not missing where it holds */
    bool moves = !resident[w];
    for (uint32_t e = 0; e < plan->evict_first[in->op_count]; e++) moves = moves || plan->evicts[e].chunk == w;
    CHECK_EQ(plan->stays[w], !moves);
  }
}

static void check_next_use(const gmi_plan_input_t *in, const gmi_plan_t *plan, const stage_t *stages, uint32_t count) {
  for (uint32_t op = 0; op < in->op_count; op++) {
    uint32_t begin = find_stage(stages, count, op, GMI_NO_PIECE);
    for (uint32_t x = in->ops[op].access_first; x < in->ops[op + 1].access_first; x++) {
      uint32_t w = in->accesses[x].chunk, expected = UINT32_MAX;
      for (uint32_t j = begin; j < begin + count; j++) {
        if (is_taken(in, plan, stages, count, j % count, w) && !is_pinned(in, w)) break;
        uint32_t next = j + 1;
        if (stage_mode(in, stages[next % count], w) == 0) continue;
        expected = stages[next % count].op + (next >= count ? in->op_count : 0);
        break;
      }
      CHECK_EQ(plan->next_use[x], expected);
    }
  }
}

static void check_piece_use(const gmi_plan_input_t *in, const gmi_plan_t *plan) {
  for (uint32_t p = 0; p < in->piece_count; p++) {
    const gmi_plan_piece_t *piece = &in->pieces[p];
    uint32_t expected = UINT32_MAX;
    for (uint32_t i = 1; expected == UINT32_MAX && i <= in->op_count; i++) {
      uint32_t op = (piece->after_op + i) % in->op_count;
      for (uint32_t x = in->ops[op].access_first; x < in->ops[op + 1].access_first; x++)
        for (uint32_t w = piece->chunk_first; w < piece->chunk_first + piece->shared_count; w++)
          if (in->accesses[x].chunk == in->piece_chunks[w]) expected = piece->after_op + i;
    }
    CHECK_EQ(plan->piece_use[p], expected);
  }
}

/* What is computed ahead has room in spare slots, and in those of states that stay on the device. */
static void check_ahead(const gmi_plan_input_t *in, const gmi_plan_t *plan) {
  uint64_t slots = in->spare_slots, taken = 0;
  for (uint32_t w = 0; w < in->chunk_count; w++) {
    const bool state = in->chunk_kind[w] == GEMINI_KIND_MASTER || in->chunk_kind[w] == GEMINI_KIND_MOMENTUM ||
                       in->chunk_kind[w] == GEMINI_KIND_VARIANCE;
    slots += state && in->chunk_has_slot[w] && plan->stays[w];
  }
  for (uint32_t p = 0; p < in->piece_count; p++) {
    CHECK(!plan->piece_ahead[p] || (!plan->piece_on_device[p] && in->pieces[p].ahead_slots));
    CHECK(!plan->piece_passes[p] || (!plan->piece_on_device[p] && in->pieces[p].result_ns));
    CHECK(plan->piece_ahead[p] <= GMI_AHEAD_ALL || plan->piece_passes[p]);
    const bool all = plan->piece_ahead[p] == GMI_AHEAD_ALL;
    taken += all ? in->pieces[p].ahead_slots : plan->piece_passes[p] ? in->pieces[p].pass_slots : 0;
  }
  CHECK(taken <= slots);
}

static void check_plan(const gmi_plan_input_t *in, const gmi_plan_t *plan) {
  stage_t stages[MAX_OPS + MAX_PIECES];
  uint32_t count = list_stages(in, plan, stages);
  check_shape(in, plan, stages, count);
  check_replay(in, plan, stages, count);
  check_next_use(in, plan, stages, count);
  check_piece_use(in, plan);
  check_ahead(in, plan);
}

static void make(const gmi_plan_input_t *in, gmi_plan_t *plan) {
  gmi_plan_failure_t failure;
  memset(plan, 0xee, sizeof *plan);
  CHECK_EQ(gmi_plan_make(in, plan, &failure), GEMINI_OK);
}

/* ---- the reference ---- */

#define TINY_CHUNKS 5

/* The fewest fetches an iteration, over every way to fill the frames in every stage: for each set resident at the
 * begin, the cheapest way to come back to it. */
static uint64_t exhaustive(const gmi_plan_input_t *in, const uint8_t *on_device) {
  enum { SETS = 1 << TINY_CHUNKS };
  gmi_plan_t placed = { .piece_on_device = (uint8_t *)(uintptr_t)on_device };
  stage_t stages[MAX_OPS + MAX_PIECES];
  uint32_t count = list_stages(in, &placed, stages), sets = 1u << in->chunk_count, pinned = 0;
  uint64_t best = UINT64_MAX;
  CHECK(in->chunk_count <= TINY_CHUNKS);
  for (uint32_t w = 0; w < in->chunk_count; w++) pinned |= (uint32_t)is_pinned(in, w) << w;
  for (uint32_t start = 0; start < sets; start++) {
    uint64_t cost[SETS], after[SETS];
    for (uint32_t s = 0; s < sets; s++) cost[s] = s == start ? 0 : UINT64_MAX;
    for (uint32_t j = 0; j < count; j++) {
      uint32_t need = pinned, fresh = 0, leave = 0;
      for (uint32_t w = 0; w < in->chunk_count; w++) {
        uint32_t mode = stage_mode(in, stages[j], w);
        need |= (uint32_t)(mode != 0) << w;
        fresh |= (uint32_t)((mode & GMI_ACCESS_FRESH) != 0) << w;
        leave |= (uint32_t)(is_taken(in, &placed, stages, count, j, w) && !is_pinned(in, w)) << w;
      }
      int64_t frames = (int64_t)in->frame_count - in->ops[stages[j].op].heap_frames;
      for (uint32_t s = 0; s < sets; s++) after[s] = UINT64_MAX;
      for (uint32_t s = 0; s < sets; s++) {
        if (cost[s] == UINT64_MAX) continue;
        for (uint32_t t = 0; t < sets; t++) {
          if ((t & need) != need || __builtin_popcount(t) > frames) continue;
          uint64_t total = cost[s] + (uint64_t)__builtin_popcount(t & ~s & ~fresh & ~pinned);
          if (total < after[t & ~leave]) after[t & ~leave] = total;
        }
      }
      memcpy(cost, after, sizeof cost);
    }
    if (cost[start] < best) best = cost[start];
  }
  return best;
}

static void test_reference_tiny_instances_equals_exhaustive_search(void) {
  static instance_t i;
  const shape_t shape = { 7, TINY_CHUNKS, 3, 3, 2, 8, 6 };
  uint64_t seed = 11, above_zero = 0;
  for (uint32_t n = 0; n < 3000; n++) {
    uint8_t on_device[MAX_PIECES];
    instance_random(&i, &seed, &shape, 3);
    for (uint32_t p = 0; p < i.input.piece_count; p++) on_device[p] = (uint8_t)below(&seed, 2);
    uint64_t expected = exhaustive(&i.input, on_device);
    CHECK_EQ(min_fetch(&i.input, on_device), expected);
    above_zero += expected > 0 && expected < UINT64_MAX;
  }
  CHECK(above_zero > 500);
}

static void test_reference_cyclic_use_of_too_few_frames_rounds_up(void) {
  static instance_t i;
  uint8_t none[1] = { 0 };
  /* Three chunks in turn, two frames: MIN alone takes 1 and 2 fetches in turn; a plan that repeats takes 2. */
  instance_begin(&i, 3, 2, 1, 1);
  for (uint32_t w = 0; w < 3; w++) add_op(&i, 1, 0), add_access(&i, w, GMI_ACCESS_READ);
  CHECK_EQ(min_fetch(&i.input, none), 2);
}

/* ---- plans ---- */

static void check_against_reference(instance_t *i, uint64_t *fetching) {
  static const uint32_t placements[] = { GEMINI_PLACEMENT_AUTO, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU,
                                         GEMINI_PLACEMENT_STATIC };
  for (uint32_t k = 0; k < 4; k++) {
    gmi_plan_t plan;
    gmi_plan_failure_t failure = { 77, 0, 0, 0 };
    i->input.placement = placements[k];
    gemini_status_t status = gmi_plan_make(&i->input, &plan, &failure);
    if (k == 3 && status == GEMINI_ERR_OOM_DEVICE) {
      CHECK(failure.op < i->input.op_count && failure.need_frames > failure.have_frames);
      continue;
    }
    CHECK_EQ(status, GEMINI_OK);
    check_plan(&i->input, &plan);
    CHECK_EQ(plan.optimum_count, min_fetch(&i->input, plan.piece_on_device));
    CHECK(plan.fetch_count >= plan.optimum_count);
    if (k < 2) CHECK(plan.fetch_count * 20 <= plan.optimum_count * 21);
    if (k == 2) CHECK_EQ(plan.device_piece_count, 0);
    *fetching += plan.fetch_count > 0;
    gmi_plan_free(&plan);
  }
}

static void test_plan_small_random_instances_are_optimal_and_consistent(void) {
  static instance_t i;
  const shape_t shape = { 9, 10, 5, 4, 3, 10, 6 };
  uint64_t seed = 1, fetching = 0;
  const uint32_t count = check_repetitions(20000);
  for (uint32_t n = 0; n < count; n++) {
    instance_random(&i, &seed, &shape, 4);
    check_against_reference(&i, &fetching);
  }
  CHECK(fetching > count);
}

static void test_plan_medium_random_instances_are_optimal_and_consistent(void) {
  static instance_t i;
  const shape_t shapes[] = { { MAX_OPS, MAX_CHUNKS, MAX_PIECES, 6, 4, 20, 8 },
                             { 40, 30, 0, 3, 0, 0, 0 },
                             { 20, MAX_CHUNKS, 10, 2, 2, 0, 5 } };
  uint64_t seed = 2, fetching = 0;
  const uint32_t count = check_repetitions(3000);
  for (uint32_t n = 0; n < count; n++) {
    instance_random(&i, &seed, &shapes[n % 3], 16);
    check_against_reference(&i, &fetching);
  }
  CHECK(fetching > count);
}

static void test_plan_chunks_used_in_turn_reaches_reference(void) {
  static instance_t i;
  uint64_t fetching = 0; /* where MIN's state does not repeat from one iteration to the next */
  for (uint32_t chunks = 2; chunks <= MAX_CHUNKS; chunks += 3) {
    for (uint32_t frames = 1; frames <= chunks; frames++) {
      instance_begin(&i, chunks, frames, 10, 10);
      for (uint32_t w = 0; w < chunks; w++) add_op(&i, 100, 0), add_access(&i, w, GMI_ACCESS_READ);
      check_against_reference(&i, &fetching);
    }
  }
  CHECK(fetching > 0);
}

static void test_plan_everything_fits_moves_nothing(void) {
  static instance_t i;
  instance_training(&i, 6, 24, true);
  for (uint32_t k = 0; k < 4; k++) {
    gmi_plan_t plan;
    /* Updates that would be hidden on the host are no reason to move anything. */
    for (uint32_t p = 0; p < 6; p++) i.pieces[p].host_ns = k < 2 ? 10000 : 1;
    i.input.placement = k % 2 == 0 ? GEMINI_PLACEMENT_CUDA : GEMINI_PLACEMENT_AUTO;
    make(&i.input, &plan);
    CHECK_EQ(plan.fetch_count, 0);
    CHECK_EQ(plan.evict_first[i.input.op_count], 0);
    CHECK_EQ(plan.device_piece_count, 6);
    CHECK_EQ(plan.predicted_ns, 6 * 150 + 6 * 300 + 6 * 10);
    CHECK_EQ(plan.predicted_ns, plan.compute_ns);
    for (uint32_t w = 0; w < 24; w++) CHECK_EQ(plan.stays[w], 1);
    gmi_plan_free(&plan);
  }
}

static void test_plan_cpu_drops_all_but_for_adjacent_ops(void) {
  static instance_t i;
  instance_begin(&i, 3, 3, 10, 10);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  add_op(&i, 100, 0), add_access(&i, 0, GMI_ACCESS_READ), add_access(&i, 1, GMI_ACCESS_READ);
  add_op(&i, 100, 0), add_access(&i, 0, GMI_ACCESS_READ);
  add_op(&i, 100, 0), add_access(&i, 2, GMI_ACCESS_READ);
  add_op(&i, 100, 0), add_access(&i, 1, GMI_ACCESS_READ);
  gmi_plan_t plan;
  make(&i.input, &plan);
  check_plan(&i.input, &plan);
  CHECK_EQ(plan.fetch_count, 3); /* 0 once, 2 once, 1 once: op 3 and op 0 are adjacent */
  CHECK_EQ(plan.optimum_count, 0);
  CHECK_EQ(plan.predicted_ns, 400);
  gmi_plan_free(&plan);
}

static void test_plan_static_keeps_the_fractions(void) {
  static instance_t i;
  instance_training(&i, 8, 16, true);
  i.input.placement = GEMINI_PLACEMENT_STATIC;
  i.input.static_param_fraction = 0.5;
  i.input.static_optim_fraction = 0.25;
  gmi_plan_t plan;
  make(&i.input, &plan);
  check_plan(&i.input, &plan);
  CHECK_EQ(plan.device_piece_count, 2);
  for (uint32_t p = 0; p < 8; p++) CHECK_EQ(plan.piece_on_device[p], p < 2);
  for (uint32_t w = 0; w < 8; w++) CHECK_EQ(plan.stays[w], w < 2); /* 2 and 3 stay but for their updates */
  for (uint32_t l = 0; l < 8; l++)
    for (uint32_t k = 1; k < 4; k++) CHECK_EQ(plan.stays[8 * k + l], l < 2);
  uint32_t evicts[32] = { 0 };
  for (uint32_t e = 0; e < plan.evict_first[i.input.op_count]; e++) evicts[plan.evicts[e].chunk]++;
  CHECK_EQ(evicts[2], 1); /* once an iteration, for the update */
  CHECK_EQ(evicts[3], 1);
  CHECK_EQ(evicts[4], 2); /* after each use */
  gmi_plan_free(&plan);

  gmi_plan_failure_t failure;
  i.input.frame_count = 10; /* 4 parameters, 6 states, and an op's own chunk from op 4 on */
  CHECK_EQ(gmi_plan_make(&i.input, &plan, &failure), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(failure.op, 4);
  CHECK_EQ(failure.need_frames, 11);
  CHECK_EQ(failure.have_frames, 10);
  i.input.frame_count = 11;
  make(&i.input, &plan);
  check_plan(&i.input, &plan);
  gmi_plan_free(&plan);
}

static void test_plan_infeasible_names_the_first_op(void) {
  static instance_t i;
  static const uint32_t placements[] = { GEMINI_PLACEMENT_AUTO, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU,
                                         GEMINI_PLACEMENT_STATIC };
  for (uint32_t k = 0; k < 4; k++) {
    instance_begin(&i, 6, 4, 10, 10);
    i.pinned[5] = 1;
    for (uint32_t op = 0; op < 6; op++) {
      add_op(&i, 10, op == 2 ? 2 : 0);
      for (uint32_t w = 0; w < (op >= 2 ? 2u : 1u); w++) add_access(&i, w, GMI_ACCESS_READ);
      if (op == 4) add_access(&i, 2, GMI_ACCESS_READ), add_access(&i, 3, GMI_ACCESS_READ);
    }
    i.input.placement = placements[k];
    gmi_plan_t plan;
    gmi_plan_failure_t failure;
    CHECK_EQ(gmi_plan_make(&i.input, &plan, &failure), GEMINI_ERR_OOM_DEVICE);
    CHECK_EQ(failure.op, 2); /* 2 chunks, 2 of heap, 1 pinned */
    CHECK_EQ(failure.need_frames, 5);
    CHECK_EQ(failure.have_frames, 4);
    i.ops[2].heap_frames = 1;
    CHECK_EQ(gmi_plan_make(&i.input, &plan, &failure), GEMINI_ERR_OOM_DEVICE);
    CHECK_EQ(failure.op, 4);
    CHECK_EQ(failure.need_frames, 5);
    i.input.frame_count = 5;
    make(&i.input, &plan);
    check_plan(&i.input, &plan);
    gmi_plan_free(&plan);
  }
}

static void test_plan_contradictory_input_is_refused(void) {
  static instance_t i;
  gmi_plan_t plan;
  gmi_plan_failure_t failure;
#define REFUSED(change)                                                     \
  do {                                                                      \
    instance_training(&i, 4, 16, true);                                     \
    change;                                                                 \
    CHECK_EQ(gmi_plan_make(&i.input, &plan, &failure), GEMINI_ERR_INVALID); \
  } while (0)
  REFUSED(i.input.op_count = 0);
  REFUSED(i.input.placement = 4);
  REFUSED(i.input.static_param_fraction = 1.01);
  REFUSED(i.input.static_optim_fraction = 0.0 / (double)(i.input.pieces_apart));
  REFUSED(i.accesses[3].chunk = 16);
  REFUSED(i.accesses[3].mode = 0);
  REFUSED(i.accesses[3].mode = 8);
  REFUSED(i.ops[2].access_first = 4);
  REFUSED(i.ops[0].access_first = 1);
  REFUSED(i.ops[2].compute_ns = UINT64_MAX);
  REFUSED(i.input.fetch_ns = UINT64_MAX / 8);
  REFUSED(i.pieces[1].after_op = 8);
  REFUSED(i.pieces[1].shared_count = 5);
  REFUSED(i.pieces[1].chunk_first = 9);
  REFUSED(i.piece_chunks[1] = i.piece_chunks[0]);
  REFUSED(i.piece_chunks[1] = 16);
  REFUSED(i.ops[1].access_first = 0; i.ops[2].access_first = 2; i.accesses[1].chunk = 0);
#undef REFUSED
}

static void test_plan_no_chunks_is_made(void) {
  static instance_t i;
  for (uint32_t placement = 0; placement < 4; placement++) {
    instance_begin(&i, 0, 0, 10, 10);
    add_op(&i, 5, 0);
    i.input.placement = placement;
    gmi_plan_t plan;
    make(&i.input, &plan);
    CHECK_EQ(plan.predicted_ns, 5);
    check_plan(&i.input, &plan);
    gmi_plan_free(&plan);
  }
}

/* A chunk of two pieces, one on each side: the device piece goes first, then the chunk leaves for the host piece. */
static void test_plan_chunk_of_pieces_on_both_sides_is_consistent(void) {
  static instance_t i;
  instance_begin(&i, 6, 6, 10, 10);
  add_op(&i, 100, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  for (uint32_t p = 0; p < 2; p++) {
    add_piece(&i, 0, 5, 5);
    add_piece_chunk(&i, 0, true), add_piece_chunk(&i, 1 + p, false);
  }
  i.input.placement = GEMINI_PLACEMENT_STATIC;
  i.input.static_optim_fraction = 0.5;
  gmi_plan_t plan;
  make(&i.input, &plan);
  check_plan(&i.input, &plan);
  CHECK_EQ(plan.piece_on_device[0], 1);
  CHECK_EQ(plan.piece_on_device[1], 0);
  CHECK_EQ(plan.fetch_count, 1);
  CHECK_EQ(plan.optimum_count, 1);
  CHECK_EQ(plan.evicts[0].chunk, 0);
  CHECK_EQ(plan.evicts[0].piece, 0);
  CHECK_EQ(plan.evicts[0].flags, GMI_EVICT_DIRTY | GMI_EVICT_FOR_UPDATE);
  gmi_plan_free(&plan);
}

static void test_plan_auto_is_never_slower_than_cuda_or_host_pieces_only(void) {
  static instance_t i;
  for (uint32_t frames = 6; frames <= 34; frames += 4) {
    gmi_plan_t plan;
    uint64_t predicted_ns[3];
    static const uint32_t placements[] = { GEMINI_PLACEMENT_AUTO, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU };
    instance_training(&i, 8, frames, frames % 8 == 2);
    for (uint32_t k = 0; k < 3; k++) {
      i.input.placement = placements[k];
      make(&i.input, &plan);
      check_plan(&i.input, &plan);
      predicted_ns[k] = plan.predicted_ns;
      gmi_plan_free(&plan);
    }
    CHECK(predicted_ns[0] <= predicted_ns[1]);
    CHECK(predicted_ns[0] <= predicted_ns[2]);
  }
}

/* ---- simulation, by hand ---- */

static void check_times(const gmi_plan_input_t *in, uint64_t predicted, uint64_t compute, uint64_t fetch,
                        uint64_t evict, uint64_t update) {
  gmi_plan_t plan;
  make(in, &plan);
  CHECK_EQ(plan.predicted_ns, predicted);
  CHECK_EQ(plan.compute_ns, compute);
  CHECK_EQ(plan.fetch_busy_ns, fetch);
  CHECK_EQ(plan.evict_busy_ns, evict);
  CHECK_EQ(plan.update_busy_ns, update);
  CHECK_EQ(plan.compute_ns, compute);
  plan.predicted_ns = plan.compute_ns = 0;
  CHECK_EQ(gmi_plan_simulate(in, &plan), GEMINI_OK);
  CHECK_EQ(plan.predicted_ns, predicted);
  CHECK_EQ(plan.compute_ns, compute);
  gmi_plan_free(&plan);
}

static void test_simulate_compute_only_is_the_sum(void) {
  static instance_t i;
  instance_begin(&i, 2, 2, 1000, 1000);
  add_op(&i, 100, 0), add_access(&i, 0, GMI_ACCESS_READ);
  add_op(&i, 200, 0), add_access(&i, 1, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_op(&i, 300, 0);
  check_times(&i.input, 600, 600, 0, 0, 0);
}

static void test_simulate_fetch_bound(void) {
  static instance_t i;
  /* One frame: A comes 0..100, runs 100..110; B comes 110..210, runs 210..220. */
  instance_begin(&i, 2, 1, 100, 500);
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ);
  add_op(&i, 10, 0), add_access(&i, 1, GMI_ACCESS_READ);
  check_times(&i.input, 220, 20, 200, 0, 0);
}

static void test_simulate_evict_bound(void) {
  static instance_t i;
  /* As above, written: B goes 0..500, A comes 500..600, runs ..610, goes ..1110, B comes ..1210, runs ..1220. */
  instance_begin(&i, 2, 1, 100, 500);
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_op(&i, 10, 0), add_access(&i, 1, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  check_times(&i.input, 1220, 20, 200, 1000, 0);
}

static void test_simulate_update_bound(void) {
  static instance_t i;
  /* A goes 0..50, is updated ..1050, comes ..1150, runs ..1160. */
  instance_begin(&i, 1, 1, 100, 50);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_piece(&i, 0, 1000, 200), add_piece_chunk(&i, 0, true);
  check_times(&i.input, 1160, 10, 100, 50, 1000);
  /* Evictions of no time: both pieces are ready. B is used first, so its piece goes first: 0..1000, then A's ..2000. B
   * comes 1000..1100 for op 0 and is dropped; A comes 2000..2100 for op 1 and stays for op 2; B comes again 2100..2200,
   * beside op 1. Evictions of 50: A goes 0..50, so it is updated 50..1050 while B goes, then B ..2050, which comes
   * 2050..2150; A ..2250, B again ..2350. */
  for (uint32_t evict_ns = 0; evict_ns <= 50; evict_ns += 50) {
    instance_begin(&i, 2, 2, 100, evict_ns);
    i.input.placement = GEMINI_PLACEMENT_CPU;
    add_op(&i, 10, 0), add_access(&i, 1, GMI_ACCESS_READ);
    add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ);
    add_op(&i, 0, 0), add_access(&i, 0, GMI_ACCESS_WRITE), add_access(&i, 1, GMI_ACCESS_WRITE);
    add_piece(&i, 2, 1000, 200), add_piece_chunk(&i, 0, true);
    add_piece(&i, 2, 1000, 200), add_piece_chunk(&i, 1, true);
    check_times(&i.input, evict_ns == 0 ? 2200 : 2350, 20, 300, 2 * evict_ns, 2000);
  }
}

static void test_simulate_first_layer_is_updated_before_those_submitted_earlier(void) {
  static instance_t i;
  /* From the end of op 3: C goes ..50 and is updated ..1050. B and A, behind ops 4 and 5, go ..100 and ..150. At 1050 the
   * worker takes A, which op 0 uses, ..2050: A comes ..2150, op 0 runs ..3150, while B is updated ..3050 and comes ..3150;
   * op 1 runs ..4150, op 2 ..5150, op 3 ..5160. B before A would be 1000 more. */
  instance_begin(&i, 3, 3, 100, 50);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  for (uint32_t w = 0; w < 3; w++) add_op(&i, 1000, 0), add_access(&i, w, GMI_ACCESS_READ);
  for (uint32_t w = 3; w-- > 0;) add_op(&i, 10, 0), add_access(&i, w, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  for (uint32_t w = 0; w < 3; w++) add_piece(&i, 5 - w, 1000, 200), add_piece_chunk(&i, w, true);
  check_times(&i.input, 5160, 3030, 500, 150, 3000);
}

static uint32_t iterations_of(const instance_t *i) {
  gmi_facts_t facts;
  gmi_plan_t plan;
  uint32_t iterations;
  make(&i->input, &plan);
  CHECK_EQ(gmi_facts_make(&i->input, &facts), GEMINI_OK);
  CHECK_EQ(gmi_simulate(&facts, &plan, &iterations), GEMINI_OK);
  gmi_facts_free(&facts);
  gmi_plan_free(&plan);
  return iterations;
}

static void test_simulate_goes_on_while_more_work_is_left_behind(void) {
  static instance_t i;
  /* Pieces on pinned chunks, which no op waits for. Two in each 100: at the end both are owed, and it is steady; of 60,
   * the workers are 20 later each time. Three of 100 in 200: two are owed at the end, then three, as the workers end
   * one exactly then. */
  static const struct {
    uint64_t host_ns, more_compute_ns;
    uint32_t pieces, iterations;
  } cases[] = { { 50, 0, 2, 2 }, { 60, 0, 2, 6 }, { 100, 100, 2, 2 }, { 100, 100, 3, 6 } };
  for (uint32_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    instance_begin(&i, 3, 3, 100, 50);
    i.input.placement = GEMINI_PLACEMENT_CPU;
    add_op(&i, 100, 0);
    for (uint32_t w = 0; w < 3; w++) i.pinned[w] = 1, add_access(&i, w, GMI_ACCESS_READ);
    if (cases[k].more_compute_ns > 0) add_op(&i, cases[k].more_compute_ns, 0);
    for (uint32_t p = 0; p < cases[k].pieces; p++) {
      add_piece(&i, 0, cases[k].host_ns, 1);
      add_piece_chunk(&i, p, true);
    }
    CHECK_EQ(iterations_of(&i), cases[k].iterations);
  }
  /* Eight fetches of 100 beside eight ops: of 102, the link keeps up; of 95, it is 40 later each time, which no op feels
   * before the two fetches to spare are used up. */
  for (uint32_t late = 0; late < 2; late++) {
    instance_begin(&i, 8, 6, 100, 50);
    i.input.placement = GEMINI_PLACEMENT_CPU;
    for (uint32_t w = 0; w < 8; w++) add_op(&i, late ? 95 : 102, 0), add_access(&i, w, GMI_ACCESS_READ);
    CHECK_EQ(iterations_of(&i), late ? 6 : 2);
  }
}

static void test_fetches_for_pieces_come_before_the_time_outside_ops(void) {
  /* Three ops of 100, whose non-model memory leaves states no frame in the first one; a piece behind the last one, whose
   * four states take 80 to come. With two fetches to spare, the first of them does not wait for the last op, and the 1000
   * behind the piece are of no use. */
  static instance_t i;
  gmi_plan_t plan;
  uint64_t states = 0;
  instance_begin(&i, 5, 5, 20, 20);
  for (uint32_t op = 0; op < 3; op++) add_op(&i, 100, op == 0 ? 4 : 0), add_access(&i, 0, GMI_ACCESS_READ);
  add_piece(&i, 2, 10000, 10);
  add_piece_chunk(&i, 0, true);
  for (uint32_t w = 1; w < 5; w++) add_piece_chunk(&i, w, false);
  i.input.outside_ns = 1000;
  i.input.placement = GEMINI_PLACEMENT_AUTO;
  make(&i.input, &plan);
  CHECK_EQ(plan.device_piece_count, 1);
  for (uint32_t f = 0; f < plan.fetch_count; f++) {
    if (plan.fetches[f].use_piece == GMI_NO_PIECE) continue;
    CHECK(plan.fetches[f].piece == GMI_NO_PIECE);
    CHECK_EQ(plan.fetches[f].op, states ? 2 : 1);
    states++;
  }
  CHECK_EQ(states, 4);
  CHECK_EQ(plan.compute_ns, 1310);
  CHECK_EQ(plan.predicted_ns, 1310);
  gmi_plan_free(&plan);
}

#define EVENT_ITERATIONS 8 /* steady by then */

/* Groups whose gathers and sums are as a library's: the slices lie in chunks that no op uses, and are updated behind
 * their gathers and sums; each gather is for an op at or behind the one before. */
static void add_groups(instance_t *i, uint64_t *seed) {
  uint8_t used[MAX_CHUNKS] = { 0 };
  uint32_t ops = i->input.op_count, use_op = 0, groups = 1 + below(seed, 2);
  for (uint32_t x = 0; x < i->ops[ops].access_first; x++) used[i->accesses[x].chunk] = 1;
  for (uint32_t group = 0; group < groups; group++) {
    const uint32_t sum_ns = below(seed, 300);
    add_group(i, below(seed, 300), sum_ns);
  }
  for (uint32_t op = 0; op < ops; op++) {
    for (uint32_t n = below(seed, 4); n-- > 0 && i->input.groups.gather_count < MAX_COLLECTIVES;) {
      uint32_t last = op + below(seed, 4);
      if (last >= ops) last = ops - 1;
      if (use_op < op) use_op = op;
      if (use_op < last) use_op += below(seed, last - use_op + 1);
      uint32_t frame_op = op > 0 && below(seed, 2) ? below(seed, op) : GMI_NO_OP;
      const uint32_t bytes = below(seed, 2097153);
      add_gather(i, op, use_op, frame_op, below(seed, i->input.chunk_count), bytes);
    }
    for (uint32_t n = below(seed, 3); n-- > 0 && i->input.groups.sum_count < MAX_COLLECTIVES;) {
      const uint32_t bytes = below(seed, 2097153);
      add_sum(i, op, below(seed, i->input.chunk_count), bytes);
    }
  }
  for (uint32_t n = 0; n < i->input.groups.gather_count + i->input.groups.sum_count; n++) {
    bool sum = n >= i->input.groups.gather_count;
    gmi_plan_collective_t *c = sum ? &i->sums[n - i->input.groups.gather_count] : &i->gathers[n];
    c->group = below(seed, groups);
    if (c->parts[0] + 1 < i->input.chunk_count && below(seed, 2)) {
      c->part_count = 2;
      c->parts[1] = c->parts[0] + 1;
      c->part_bytes[1] = below(seed, 2097153);
    }
    bool fits = true;
    for (uint32_t k = 0; k < c->part_count; k++) fits = fits && !used[c->parts[k]];
    for (uint32_t p = 0; p < i->input.piece_count; p++)
      for (uint32_t x = i->pieces[p].chunk_first; x < i->pieces[p + 1].chunk_first; x++)
        for (uint32_t k = 0; k < c->part_count; k++)
          fits = fits && (i->piece_chunks[x] != c->parts[k] || i->pieces[p].after_op >= c->use_op);
    if (!fits) c->part_count = 0; /* the slice is zero */
  }
}

static void check_events(bool groups, uint64_t seed) {
  static instance_t i;
  uint64_t other = seed + 1, equal = 0, bound = 0, ordered = 0, waiting = 0, ahead = 0, passes = 0, results = 0;
  for (uint32_t n = 0; n < 480; n++) {
    const shape_t shape = { 14, 12, 10, 3, 2, 20, 8 };
    gmi_plan_t plan;
    uint64_t length_ns, other_ns;
    if (n % 4 == 0) {
      instance_random(&i, &seed, &shape, 8);
    } else { /* training steps whose updates lag; some take a chunk of their neighbour's as well */
      uint32_t layers = 2 + below(&seed, 6);
      const bool at_end = n % 4 == 2 && !groups; /* sharded arenas are not computed ahead */
      instance_training(&i, layers, 2 + below(&seed, 2 * layers), at_end);
      for (uint32_t op = 0; op < i.input.op_count; op++) i.ops[op].compute_ns = below(&seed, 500);
      for (uint32_t p = 0; p < layers; p++) {
        i.pieces[p].host_ns = below(&seed, 600);
        if (below(&seed, at_end ? 9 : 3) == 0) i.piece_chunks[4 * p + 1] = layers + (p + 1) % layers;
        if (n % 4 != 1) continue;
        i.pieces[p].after_op = below(&seed, i.input.op_count); /* and some of the iteration before */
        i.pieces[p].host_ns = below(&seed, 2000);
      }
      for (uint32_t p = 1; p < layers && at_end; p++) { /* from the layer's backward op on, or from a later one */
        i.pieces[p].ahead_slots = below(&seed, 4);
        i.pieces[p].ahead_op = 2 * layers - 1 - p + below(&seed, p);
      }
      for (uint32_t p = 0; p < layers; p++) { /* two passes together take longer than one, by chance much */
        i.pieces[p].result_ns = i.pieces[p].host_ns * (3 + below(&other, 5)) / 8 + 1;
        i.pieces[p].state_ns = i.pieces[p].host_ns * (4 + below(&other, 5)) / 8 + 1;
        i.pieces[p].pass_slots = below(&other, 2);
      }
      i.input.spare_slots = below(&seed, 5 * layers);
    }
    i.input.placement = n % 3;
    i.input.pieces_apart = 0;
    i.input.outside_ns = n % 4 == 1 ? below(&other, 300) : 0;
    if (groups) add_groups(&i, &seed);
    if (n % 5 == 0) i.input.groups.gather_count = 0; /* sums alone */
    make(&i.input, &plan);
    for (uint32_t p = 0; p < plan.piece_count; p++) { /* as is best, and what no plan chooses */
      if (plan.piece_ahead[p] == GMI_AHEAD_ALL && i.pieces[p].result_ns && below(&other, 2))
        plan.piece_ahead[p] = GMI_AHEAD_RESULTS, plan.piece_passes[p] = 1;
      if (plan.piece_ahead[p] == GMI_AHEAD_ALL) plan.piece_passes[p] = 0;
    }
    CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
    if (step_time(&i.input, &plan, EVENT_ITERATIONS, 0, &length_ns)) {
      uint64_t busy_ns = plan.update_busy_ns;
      if (busy_ns < plan.fetch_busy_ns) busy_ns = plan.fetch_busy_ns;
      if (busy_ns < plan.evict_busy_ns) busy_ns = plan.evict_busy_ns;
      if (busy_ns < plan.gather_busy_ns) busy_ns = plan.gather_busy_ns;
      if (busy_ns < plan.sum_busy_ns) busy_ns = plan.sum_busy_ns;
      CHECK_EQ(plan.predicted_ns, length_ns > busy_ns ? length_ns : busy_ns);
      equal++;
      for (uint32_t p = 0; p < plan.piece_count; p++) {
        passes += plan.piece_passes[p];
        results += plan.piece_ahead[p] == GMI_AHEAD_RESULTS;
      }
      bound += length_ns >= busy_ns && length_ns > plan.compute_ns;
      step_time(&i.input, &plan, EVENT_ITERATIONS, STEP_TIME_FIRST_IN_FIRST_OUT, &other_ns);
      ordered += length_ns >= busy_ns && other_ns != length_ns;
      step_time(&i.input, &plan, EVENT_ITERATIONS, STEP_TIME_NONE_AHEAD, &other_ns);
      ahead += length_ns >= busy_ns && other_ns > length_ns;
      i.input.groups.gather_count = i.input.groups.sum_count = 0;
      CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
      waiting += length_ns >= busy_ns && plan.predicted_ns < length_ns;
    }
    gmi_plan_free(&plan);
  }
  CHECK(equal > 350 && bound > 200 && ordered > (groups ? 15 : 30));
  CHECK(groups ? waiting > 100 : ahead > 40);
  CHECK(passes > 20 && (groups || results > 50));
}
static uint32_t count_set(const uint8_t *marks, uint64_t count) {
  uint32_t set = 0;
  for (uint64_t i = 0; i < count; i++) set += marks[i] != 0;
  return set;
}
/* A training step in whose backward pass pieces can be computed ahead, but there are no spare slots for that, except
 * those of states that stay, if chunks have slots. */
static void plan_ahead(instance_t *i, bool have_slots, gmi_plan_t *plan) {
  enum { LAYERS = 8, FRAMES = 8 };
  instance_training(i, LAYERS, FRAMES, true);
  i->input.fetch_ns = i->input.evict_ns = 80;
  for (uint32_t p = 0; p < LAYERS; p++) {
    i->pieces[p].host_ns = 300;
    i->pieces[p].ahead_slots = p > 0 ? 2 : 0;
    i->pieces[p].ahead_op = 2 * LAYERS - 1 - p;
  }
  memset(i->has_slot, have_slots, i->input.chunk_count);
  i->input.placement = GEMINI_PLACEMENT_AUTO;
  make(&i->input, plan);
  check_plan(&i->input, plan);
}
/* MIN lets states come and go, and keeps parameters between their two uses. */
static void test_plan_states_stay_if_that_makes_room_for_pieces_ahead(void) {
  static instance_t i;
  gmi_plan_t plan, none;
  plan_ahead(&i, true, &plan);
  plan_ahead(&i, false, &none);
  CHECK_EQ(count_set(none.piece_ahead, none.piece_count), 0);
  CHECK_EQ(count_set(plan.piece_ahead, plan.piece_count), 3);
  const uint64_t layers = plan.piece_count; /* chunks behind those of parameters are states */
  CHECK_EQ(count_set(plan.stays + layers, 3 * layers), 6);
  CHECK(plan.predicted_ns * 20 < none.predicted_ns * 17 && plan.fetch_count * 20 <= plan.optimum_count * 21);
  CHECK_EQ(plan.optimum_count, min_fetch(&i.input, plan.piece_on_device));
  gmi_plan_free(&none);
  gmi_plan_free(&plan);
}
/* A training step whose pieces come at its end, so that the next forward pass waits for them and the backward pass has
 * time for states. Two passes take a third longer than one. */
static void plan_passes(instance_t *i, uint64_t host_ns, uint32_t spare, gmi_plan_t *plan) {
  enum { LAYERS = 8, FRAMES = 8 };
  instance_training(i, LAYERS, FRAMES, true);
  i->input.fetch_ns = i->input.evict_ns = 10;
  for (uint32_t p = 0; p < LAYERS; p++) {
    i->pieces[p].host_ns = host_ns;
    i->pieces[p].device_ns = 100000; /* they run on the host */
    i->pieces[p].result_ns = host_ns / 2;
    i->pieces[p].state_ns = host_ns * 5 / 6;
    i->pieces[p].pass_slots = 1;
  }
  i->input.spare_slots = spare;
  i->input.placement = GEMINI_PLACEMENT_AUTO;
  make(&i->input, plan);
  check_plan(&i->input, plan);
}
static void test_plan_has_two_passes_where_that_gains_and_there_is_room(void) {
  static instance_t i;
  gmi_plan_t one, some, all, busy;
  plan_passes(&i, 300, 0, &one);
  plan_passes(&i, 300, 3, &some);
  plan_passes(&i, 300, 8, &all);
  CHECK_EQ(one.device_piece_count + some.device_piece_count + all.device_piece_count, 0);
  CHECK_EQ(count_set(one.piece_passes, 8), 0);
  CHECK_EQ(count_set(some.piece_passes, 8), 3);
  CHECK_EQ(count_set(all.piece_passes, 8), 8);
  CHECK(all.predicted_ns < some.predicted_ns && some.predicted_ns < one.predicted_ns);
  CHECK_EQ(one.update_busy_ns, 8 * 300);
  CHECK_EQ(all.update_busy_ns, 8 * (150 + 250));
  /* Pieces are computed ahead besides if slots are left for the gradients of all others as well. */
  for (uint32_t ahead = 0; ahead < 2; ahead++) {
    gmi_plan_free(&all);
    for (uint32_t p = 1; p < 8; p++) i.pieces[p].ahead_slots = 8, i.pieces[p].ahead_op = 15 - p;
    i.input.spare_slots = ahead ? 16 : 15;
    make(&i.input, &all);
    check_plan(&i.input, &all);
    CHECK_EQ(count_set(all.piece_passes, 8), 8);
    CHECK_EQ(count_set(all.piece_ahead, 8), ahead);
  }
  /* With as many times a layer's time, the workers are what binds, and passes would only give them more to do. */
  plan_passes(&i, 3000, 8, &busy);
  CHECK_EQ(count_set(busy.piece_passes, 8), 0);
  gmi_plan_free(&one);
  gmi_plan_free(&some);
  gmi_plan_free(&all);
  gmi_plan_free(&busy);
}
/* With a slot for each, first passes are computed beside the backward pass, but all of a piece where there is room. */
static void test_plan_computes_first_passes_ahead_where_there_is_no_room_for_more(void) {
  static instance_t i;
  gmi_plan_t behind, results, all;
  plan_passes(&i, 350, 8, &behind);
  gmi_plan_free(&behind);
  for (uint32_t p = 0; p < 8; p++) i.pieces[p].result_ns = 250, i.pieces[p].state_ns = 150;
  make(&i.input, &behind);
  CHECK_EQ(count_set(behind.piece_passes, 8), 8);
  for (uint32_t p = 1; p < 8; p++) i.pieces[p].ahead_slots = 8, i.pieces[p].ahead_op = 15 - p;
  make(&i.input, &results);
  check_plan(&i.input, &results);
  for (uint32_t p = 0; p < 8; p++) CHECK_EQ(results.piece_ahead[p], p > 0 ? GMI_AHEAD_RESULTS : GMI_AHEAD_NONE);
  CHECK_EQ(count_set(results.piece_passes, 8), 8);
  CHECK(results.predicted_ns + results.predicted_ns / 32 < behind.predicted_ns);
  i.input.spare_slots = 64;
  make(&i.input, &all);
  for (uint32_t p = 0; p < 8; p++) CHECK_EQ(all.piece_ahead[p], p > 0 ? GMI_AHEAD_ALL : GMI_AHEAD_NONE);
  gmi_plan_free(&behind);
  gmi_plan_free(&results);
  gmi_plan_free(&all);
}
static void test_plan_states_stay_if_that_takes_fewer_copies_and_no_more_time(void) {
  enum { LAYERS = 8 };
  static instance_t i;
  gmi_plan_t plan;
  instance_training(&i, LAYERS, 8, true);
  for (uint32_t p = 0; p < LAYERS; p++) i.pieces[p].host_ns = 300;
  i.input.placement = GEMINI_PLACEMENT_AUTO;
  make(&i.input, &plan);
  check_plan(&i.input, &plan);
  CHECK_EQ(plan.fetch_count, 12);
  CHECK_EQ(plan.evict_dirty_count, LAYERS); /* the layers' own chunks; otherwise also four of states */
  gmi_plan_free(&plan);
}
static void test_simulate_random_instances_equal_events(void) {
  check_events(false, 31);
  check_events(false, 16); /* has pieces computed ahead beside one whose chunks no op uses */
}
static void test_simulate_random_groups_equal_events(void) {
  check_events(true, 31);
  check_events(true, 4); /* has a gather of a slice of zeros behind fetches for a later op */
}

static void test_simulate_gathers_and_sums_by_hand(void) {
  static instance_t i;
  gmi_plan_t plan;
  instance_begin(&i, 2, 4, 100, 50);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  add_group(&i, 30, 40);
  add_op(&i, 200, 2), add_op(&i, 100, 2);
  /* Half a chunk comes 0..50, is gathered ..80, for op 0, which ends at 280. */
  add_gather(&i, 0, 0, GMI_NO_OP, 0, i.input.link_bytes / 2);
  /* A whole one comes 50..150, is gathered ..180: op 1 does not wait. */
  add_gather(&i, 0, 1, GMI_NO_OP, 1, i.input.link_bytes);
  check_times(&i.input, 80 + 200 + 100, 300, 150, 0, 0);
  /* In the frame that op 0 leaves it would come 280..380, ..410. */
  i.gathers[1].op = 1, i.gathers[1].frame_op = 0;
  check_times(&i.input, 410 + 100, 300, 150, 0, 0);
  /* Its sum goes 510..550, back to the host ..600, is updated ..1600 and comes for the next iteration's gather. */
  add_sum(&i, 1, 0, i.input.link_bytes);
  add_piece(&i, 1, 1000, 1), add_piece_chunk(&i, 0, true);
  i.gathers[1].op = 0, i.gathers[1].frame_op = GMI_NO_OP;
  check_times(&i.input, 100 + 40 + 50 + 1000 + 50 + 30 + 200, 300, 150, 50, 1000);
  make(&i.input, &plan);
  CHECK_EQ(plan.gather_busy_ns, 60);
  CHECK_EQ(plan.sum_busy_ns, 40);
  CHECK_EQ(plan.traffic->fetched, i.input.link_bytes / 2 * 3);
  CHECK_EQ(plan.traffic->gathered, 3 * plan.traffic->fetched);
  CHECK_EQ(plan.traffic->stored, i.input.link_bytes);
  CHECK_EQ(plan.traffic->summed, 3 * plan.traffic->stored);
  gmi_plan_free(&plan);
  /* A group that is slow is what the step takes. */
  i.links[0].gather_ns = 5000;
  make(&i.input, &plan);
  CHECK(plan.predicted_ns >= 10000);
  gmi_plan_free(&plan);
  const gmi_plan_collective_t right = i.gathers[1];
  for (int wrong = 0; wrong < 6; wrong++) {
    i.gathers[1] = right;
    if (wrong == 0) i.gathers[1].op = 2, i.gathers[1].use_op = 2;
    if (wrong == 1) i.gathers[1].group = 1;
    if (wrong == 2) i.gathers[1].parts[0] = 2;
    if (wrong == 3) i.gathers[1].part_count = 3;
    if (wrong == 4) i.gathers[1].frame_op = i.gathers[1].op;
    if (wrong == 5) i.gathers[1].part_bytes[0] = i.input.link_bytes + 1;
    CHECK_EQ(gmi_plan_make(&i.input, &plan, NULL), GEMINI_ERR_INVALID);
  }
}

static void test_simulate_updates_are_current_after_a_delay(void) {
  static instance_t i;
  /* A goes 10..60, is updated ..1060, current at 1360 and back at 1460, which the op of the next iteration waits for. */
  instance_begin(&i, 1, 1, 100, 50);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  i.input.host_delay_ns = 300;
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_piece(&i, 0, 1000, 200), add_piece_chunk(&i, 0, true);
  check_times(&i.input, 50 + 1000 + 300 + 100 + 10, 10, 100, 50, 1000);
  /* A second piece of the chunk starts when it is current, though the workers are free before. */
  add_piece(&i, 0, 500, 200), add_piece_chunk(&i, 0, true);
  check_times(&i.input, 50 + 1000 + 300 + 500 + 300 + 100 + 10, 10, 100, 50, 1500);
}

static void test_simulate_device_piece_runs_on_the_stream(void) {
  static instance_t i;
  instance_begin(&i, 2, 2, 100, 50);
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_piece(&i, 0, 1000, 200), add_piece_chunk(&i, 0, true), add_piece_chunk(&i, 1, false);
  check_times(&i.input, 210, 210, 0, 0, 0);
}

static void test_simulate_device_pieces_apart_run_beside_ops(void) {
  static instance_t i;
  for (int used = 0; used < 2; used++) { /* 500..800, beside op 1 or before it */
    instance_begin(&i, 2, 2, 100, 50);
    i.input.pieces_apart = 1;
    add_op(&i, 500, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
    add_op(&i, 500, 0), add_access(&i, used ? 0 : 1, GMI_ACCESS_READ);
    add_piece(&i, 0, 5000, 300), add_piece_chunk(&i, 0, true);
    check_times(&i.input, used ? 1300 : 1000, 1000, 0, 0, 0);
  }
  /* One behind the other: the next iteration's op waits for the first one, or for neither, but they fall behind. */
  for (int used = 0; used < 2; used++) {
    instance_begin(&i, 3, 3, 100, 50);
    i.input.pieces_apart = 1;
    add_op(&i, 10, 0), add_access(&i, used ? 0 : 2, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
    add_piece(&i, 0, 5000, 200), add_piece_chunk(&i, 0, true);
    add_piece(&i, 0, 5000, 300), add_piece_chunk(&i, 1, false);
    check_times(&i.input, 500, 10, 0, 0, 0);
  }
  /* The chunk leaves its frame to op 1's memory behind the piece and the copy: 10..210..260. */
  instance_begin(&i, 1, 1, 100, 50);
  i.input.pieces_apart = 1;
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_op(&i, 20, 1);
  add_piece(&i, 0, 5000, 200), add_piece_chunk(&i, 0, true);
  check_times(&i.input, 100 + 10 + 200 + 50 + 20, 30, 100, 50, 0);
}

static void test_simulate_prefetch_hides_fetches(void) {
  static instance_t i;
  instance_begin(&i, 4, 2, 100, 50);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  for (uint32_t w = 0; w < 4; w++) add_op(&i, 1000, 0), add_access(&i, w, GMI_ACCESS_READ);
  check_times(&i.input, 4000, 4000, 400, 0, 0);
}

static void test_simulate_heap_growth_waits_for_write_back(void) {
  static instance_t i;
  /* B comes 0..100, op 0 runs ..110, B goes ..160 and leaves its frame to op 1's heap: op 1 runs 160..170. */
  instance_begin(&i, 2, 2, 100, 50);
  add_op(&i, 10, 0);
  add_access(&i, 0, GMI_ACCESS_READ), add_access(&i, 1, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_op(&i, 10, 1), add_access(&i, 0, GMI_ACCESS_READ);
  check_times(&i.input, 170, 20, 100, 50, 0);
}

static void test_simulate_fresh_chunk_waits_for_its_frame(void) {
  static instance_t i;
  /* A comes 0..100, runs ..110, goes ..160; B takes its frame, runs ..170, goes ..220, when A can come again: the next
   * iteration begins at 170, so A comes 50 later. */
  instance_begin(&i, 2, 1, 100, 50);
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  add_op(&i, 10, 0), add_access(&i, 1, GMI_ACCESS_WRITE | GMI_ACCESS_FRESH);
  check_times(&i.input, 50 + 100 + 10 + 50 + 10, 20, 100, 100, 0);
}

static void test_simulate_nothing_is_issued_before_the_iteration_begins(void) {
  static instance_t i;
  gmi_plan_t plan;
  instance_begin(&i, 2, 3, 100, 50);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  i.pinned[0] = 1;
  add_op(&i, 10, 0), add_access(&i, 0, GMI_ACCESS_READ);
  add_op(&i, 10, 0), add_access(&i, 1, GMI_ACCESS_READ);
  add_op(&i, 1000, 0);
  make(&i.input, &plan);
  CHECK_EQ(plan.predicted_ns, 1020); /* fetched beside op 2 of the iteration before */
  CHECK_EQ(plan.fetch_count, 1);
  CHECK_EQ(plan.fetches[0].op, 2);
  plan.fetches[0].op = 0;
  plan.fetch_first[1] = plan.fetch_first[2] = 1;
  plan.resident_at_start[1] = 0;
  CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
  CHECK_EQ(plan.predicted_ns, 100 + 10 + 1000); /* the link and two frames are free long before, to no avail */
  CHECK_EQ(plan.predicted_ns - plan.compute_ns, 90);
  gmi_plan_free(&plan);
}

/* ---- passes that only read ---- */

/* A forward pass of repeated blocks and a large last op, whose times do not follow their sizes. */
enum { PASS_BLOCKS = 32, PASS_BLOCK_OPS = 4, PASS_OPS = PASS_BLOCKS * PASS_BLOCK_OPS + 1, PASS_CHUNKS = 1024 + 20 };
typedef struct pass {
  gmi_plan_input_t input;
  gmi_plan_op_t ops[PASS_OPS + 1];
  gmi_plan_access_t accesses[PASS_CHUNKS + PASS_BLOCKS];
  gmi_plan_piece_t none;
  uint8_t kind[PASS_CHUNKS];
} pass_t;

static void pass_begin(pass_t *pass, uint32_t frames) {
  static const uint32_t sizes[PASS_BLOCK_OPS] = { 4, 4, 12, 12 };
  uint32_t accesses = 0, chunk = 0;
  memset(pass, 0, sizeof *pass);
  for (uint32_t op = 0; op < PASS_OPS; op++) {
    pass->ops[op] = (gmi_plan_op_t){ .compute_ns = op % 3 ? 90 : 150, .heap_frames = 3, .access_first = accesses };
    const uint32_t own = op == PASS_OPS - 1 ? PASS_CHUNKS - chunk : sizes[op % PASS_BLOCK_OPS];
    for (uint32_t c = 0; c < own; c++) pass->accesses[accesses++] = (gmi_plan_access_t){ chunk++, GMI_ACCESS_READ };
    /* what the block's first op and its last one share, as small tensors side by side do */
    if (op % PASS_BLOCK_OPS == 3) {
      const gmi_plan_access_t shared = { chunk - 32, GMI_ACCESS_READ };
      memmove(&pass->accesses[accesses - own + 1], &pass->accesses[accesses - own], own * sizeof shared);
      pass->accesses[accesses++ - own] = shared;
    }
  }
  pass->ops[PASS_OPS].access_first = accesses;
  pass->input = (gmi_plan_input_t){ .op_count = PASS_OPS,
                                    .chunk_count = PASS_CHUNKS,
                                    .frame_count = frames,
                                    .ops = pass->ops,
                                    .accesses = pass->accesses,
                                    .pieces = &pass->none,
                                    .chunk_kind = pass->kind,
                                    .chunk_bytes = 100,
                                    .frame_bytes = 100,
                                    .link_bytes = 100,
                                    .file_bytes = 100,
                                    .fetch_ns = 100,
                                    .evict_ns = 100 };
}

/* Carries the plan out: each op finds its chunks, and they never take more frames than there are. */
static void pass_replay(const pass_t *pass, const gmi_plan_t *plan) {
  static uint8_t there[PASS_CHUNKS];
  uint32_t count = 0;
  for (uint32_t c = 0; c < PASS_CHUNKS; c++) count += there[c] = plan->resident_at_start[c];
  for (uint32_t op = 0; op < PASS_OPS; op++) {
    for (uint32_t f = plan->fetch_first[op]; f < plan->fetch_first[op + 1]; f++) {
      CHECK(!there[plan->fetches[f].chunk]);
      there[plan->fetches[f].chunk] = 1;
      count++;
    }
    CHECK(count + pass->ops[op].heap_frames <= pass->input.frame_count);
    for (uint32_t x = pass->ops[op].access_first; x < pass->ops[op + 1].access_first; x++)
      CHECK(there[pass->accesses[x].chunk]);
    for (uint32_t e = plan->evict_first[op]; e < plan->evict_first[op + 1]; e++) {
      CHECK(there[plan->evicts[e].chunk]);
      there[plan->evicts[e].chunk] = 0;
      count--;
    }
  }
  for (uint32_t c = 0; c < PASS_CHUNKS; c++) CHECK_EQ(there[c], plan->resident_at_start[c]);
}

/* Where the link takes longer than the ops, it works all the time: the pass takes what the fewest possible fetches take,
 * and no more beside that than the time in which the link could have no free frame. */
static void test_plan_forward_pass_keeps_the_link_busy(void) {
  static pass_t pass;
  for (uint32_t frames = PASS_CHUNKS / 10; frames < PASS_CHUNKS; frames += PASS_CHUNKS / 10) {
    gmi_plan_t plan;
    gmi_plan_failure_t failure;
    pass_begin(&pass, frames);
    CHECK_EQ(gmi_plan_make(&pass.input, &plan, &failure), GEMINI_OK);
    pass_replay(&pass, &plan);
    const uint64_t link_ns = plan.optimum_count * pass.input.fetch_ns;
    const uint64_t least_ns = link_ns > plan.compute_ns ? link_ns : plan.compute_ns;
    CHECK(plan.predicted_ns >= least_ns);
    CHECK(plan.predicted_ns - least_ns <= least_ns / 40);
    CHECK(plan.fetch_count * 20 <= plan.optimum_count * 21);
    gmi_plan_free(&plan);
  }
}

/* Plans for a few frames more or less keep almost the same chunks, so to go over to another one costs few fetches. */
static void test_plan_forward_pass_changes_little_with_the_frames(void) {
  static pass_t pass;
  static uint8_t stays[PASS_CHUNKS];
  uint32_t little = 0;
  for (uint32_t frames = 630; frames >= 590; frames -= 8) {
    gmi_plan_t plan;
    gmi_plan_failure_t failure;
    uint32_t gone = 0, come = 0;
    pass_begin(&pass, frames);
    CHECK_EQ(gmi_plan_make(&pass.input, &plan, &failure), GEMINI_OK);
    for (uint32_t c = 0; c < PASS_CHUNKS; c++) gone += stays[c] && !plan.stays[c], come += !stays[c] && plan.stays[c];
    little += gone <= 32 && come <= 32;
    memcpy(stays, plan.stays, sizeof stays);
    gmi_plan_free(&plan);
  }
  CHECK(little >= 4); /* of 5; MIN's plan may be as good as an evenly spread one, and be taken */
}

static void test_simulate_foreign_plan_is_refused(void) {
  static instance_t i;
  gmi_plan_t plan;
  instance_training(&i, 4, 6, true);
  make(&i.input, &plan);
  i.input.frame_count = 3;
  CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_ERR_INVALID);
  i.input.frame_count = 6;
  CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
  i.input.op_count--;
  CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_ERR_INVALID);
  i.input.op_count++;
  gmi_plan_free(&plan);
  i.input.placement = GEMINI_PLACEMENT_CPU;
  make(&i.input, &plan);
  CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
  plan.fetches[0].use_piece = 0; /* on the host: no stage */
  CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_ERR_INVALID);
  gmi_plan_free(&plan);
}

/* ---- determinism ---- */

static void hash_bytes(uint64_t *hash, const void *bytes, uint64_t size) {
  for (uint64_t i = 0; i < size; i++) *hash = (*hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(1099511628211);
}
static uint64_t hash_plan(const gmi_plan_input_t *in, const gmi_plan_t *p) {
  uint64_t hash = UINT64_C(14695981039346656037);
  const uint64_t numbers[] = { p->fetch_count,    p->optimum_count,  p->evict_dirty_count, p->device_piece_count,
                               p->predicted_ns,   p->compute_ns,     p->fetch_busy_ns,     p->evict_busy_ns,
                               p->update_busy_ns, p->worst_stall_ns, p->file_chunks,       p->file_busy_ns };
  hash_bytes(&hash, numbers, sizeof numbers);
  hash_bytes(&hash, p->fetches, p->fetch_count * sizeof *p->fetches);
  hash_bytes(&hash, p->fetch_first, (p->op_count + 1) * sizeof *p->fetch_first);
  hash_bytes(&hash, p->evicts, p->evict_first[p->op_count] * sizeof *p->evicts);
  hash_bytes(&hash, p->evict_first, (p->op_count + 1) * sizeof *p->evict_first);
  hash_bytes(&hash, p->piece_on_device, p->piece_count);
  hash_bytes(&hash, p->resident_at_start, p->chunk_count);
  hash_bytes(&hash, p->stays, p->chunk_count);
  hash_bytes(&hash, p->next_use, in->ops[in->op_count].access_first * sizeof *p->next_use);
  hash_bytes(&hash, p->piece_use, in->piece_count * sizeof *p->piece_use);
  return hash;
}
static uint64_t hash_many(void) {
  static instance_t i;
  const shape_t shape = { MAX_OPS, MAX_CHUNKS, MAX_PIECES, 6, 4, 20, 8 };
  uint64_t seed = 5, hash = 0;
  for (uint32_t n = 0; n < 100; n++) {
    gmi_plan_t plan;
    instance_random(&i, &seed, &shape, 12);
    i.input.placement = n % 3;
    if (n % 2) {
      i.input.host_slots = 1 + n % 20;
      i.input.host_pieces_ahead = n % 4;
      i.input.file_read_ns = n;
      i.input.file_write_ns = 100 - n;
    }
    make(&i.input, &plan);
    hash = hash * 31 + hash_plan(&i.input, &plan);
    gmi_plan_free(&plan);
  }
  return hash;
}

static void test_plan_same_input_same_plan(void) {
  uint64_t expected = hash_many();
  /* Fresh memory with other contents, at other addresses. */
  void *garbage[64];
  for (uint32_t k = 0; k < 64; k++) {
    garbage[k] = malloc(100 + 977 * k);
    CHECK(garbage[k] != NULL);
    memset(garbage[k], 0xa5, 100 + 977 * k);
  }
  for (uint32_t k = 0; k < 64; k += 2) free(garbage[k]);
  CHECK_EQ(hash_many(), expected);
  for (uint32_t k = 1; k < 64; k += 2) free(garbage[k]);
  /* Another process, where addresses are random. */
  char self[4096], command[4200];
  ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  CHECK(length > 0);
  self[length] = 0;
  snprintf(command, sizeof command, "'%s' --hash", self);
  for (uint32_t k = 0; k < 2; k++) {
    FILE *pipe = popen(command, "r");
    uint64_t other = 0;
    CHECK(pipe != NULL);
    CHECK_EQ(fscanf(pipe, "%" SCNx64, &other), 1);
    CHECK_EQ(pclose(pipe), 0);
    CHECK_EQ(other, expected);
  }
}

/* ---- states in files */

/* Ops of one shared chunk each, and after the last one a piece for each of them: its chunk, and two of states. */
static void instance_streamed(instance_t *i, uint32_t pieces, uint64_t compute_ns, uint32_t host_slots) {
  instance_begin(i, 3 * pieces, 3, 100, 50);
  i->input.placement = GEMINI_PLACEMENT_CPU;
  for (uint32_t p = 0; p < pieces; p++) add_op(i, compute_ns, 0), add_access(i, p, GMI_ACCESS_READ | GMI_ACCESS_WRITE);
  for (uint32_t p = 0; p < pieces; p++) {
    add_piece(i, pieces - 1, 5, 1), add_piece_chunk(i, p, true);
    for (uint32_t k = 0; k < 2; k++) {
      i->kind[pieces + 2 * p + k] = (uint8_t)(GEMINI_KIND_MASTER + k);
      add_piece_chunk(i, pieces + 2 * p + k, false);
    }
  }
  i->input.host_slots = host_slots;
  i->input.host_pieces_ahead = 1;
  i->input.file_read_ns = 1000;
  i->input.file_write_ns = 700;
}

static void check_streamed(const instance_t *i, uint64_t chunks) {
  gmi_plan_t plan;
  make(&i->input, &plan);
  check_plan(&i->input, &plan);
  CHECK_EQ(plan.file_chunks, chunks);
  CHECK_EQ(plan.file_busy_ns, chunks * (i->input.file_read_ns + i->input.file_write_ns));
  CHECK(plan.predicted_ns >= plan.file_busy_ns);
  uint64_t predicted = plan.predicted_ns;
  plan.file_chunks = plan.file_busy_ns = plan.predicted_ns = 77;
  CHECK_EQ(gmi_plan_simulate(&i->input, &plan), GEMINI_OK);
  CHECK_EQ(plan.file_chunks, chunks);
  CHECK_EQ(plan.predicted_ns, predicted);
  gmi_plan_free(&plan);
}

/* With 8 pieces, each of a shared chunk and two of states, 20 of 24 chunks have room on the host, less the 3 of a piece:
 * the states of 4 pieces, 8 chunks, stay on the device. With fewer frames, as many as fit. */
static void test_states_without_room_below_stay_on_the_device(void) {
  static const struct {
    uint32_t home_slots, frames, stay;
  } cases[] = { { 0, 12, 0 }, { 27, 12, 0 }, { 26, 12, 1 }, { 19, 12, 4 }, { 18, 12, 5 }, { 11, 20, 8 }, { 18, 9, 4 } };
  for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
    static instance_t i;
    gmi_plan_t plan;
    uint32_t pieces = 0, states = 0;
    instance_streamed(&i, 8, 10000, 20);                           /* time enough for all pieces on the host, */
    for (uint32_t p = 0; p < 8; p++) i.pieces[p].device_ns = 5000; /* where they take much less */
    i.input.placement = GEMINI_PLACEMENT_AUTO;
    i.input.home_slots = cases[n].home_slots;
    i.input.frame_count = cases[n].frames;
    make(&i.input, &plan);
    check_plan(&i.input, &plan);
    for (uint32_t p = 0; p < 8; p++) pieces += plan.piece_on_device[p];
    for (uint32_t c = 8; c < 24; c++) states += plan.stays[c];
    CHECK_EQ(pieces, cases[n].stay);
    CHECK_EQ(states, 2 * cases[n].stay);
    gmi_plan_free(&plan);
  }
}

static void test_simulate_files_bound_is_the_sum_of_reads_and_writes(void) {
  static instance_t i;
  gmi_plan_t plan;
  /* Read P0 ..2000, P1 ..4000, write P0 ..5400, read P2 ..7400, write P1 ..8800, P2 ..10200: and so on, without a gap. */
  instance_streamed(&i, 3, 10, 5);
  make(&i.input, &plan);
  CHECK_EQ(plan.file_chunks, 6);
  CHECK_EQ(plan.file_busy_ns, 6 * 1700);
  CHECK_EQ(plan.predicted_ns, 6 * 1700);
  CHECK_EQ(plan.compute_ns, 30);
  CHECK_EQ(plan.update_busy_ns, 15);
  gmi_plan_free(&plan);
  i.input.file_write_ns = 0;
  make(&i.input, &plan);
  CHECK_EQ(plan.file_busy_ns, 6000);
  CHECK(plan.predicted_ns >= 6000 && plan.predicted_ns < 6000 + 1000);
  gmi_plan_free(&plan);
  /* An update that takes longer than its reads binds in their place. */
  i.input.file_write_ns = 700;
  for (uint32_t p = 0; p < 3; p++) i.pieces[p].host_ns = 9000;
  make(&i.input, &plan);
  CHECK_EQ(plan.update_busy_ns, 27000);
  CHECK(plan.predicted_ns >= 27000);
  gmi_plan_free(&plan);
}

static void test_simulate_only_what_the_host_has_no_room_for_is_streamed(void) {
  static instance_t i;
  static const struct {
    uint32_t host_slots, ahead, chunks;
  } cases[] = {
    { 0, 1, 0 },               /* no files */
    { 9, 1, 0 },               /* 3 shared and 6 of states: all */
    { 10, 4, 0 }, { 8, 1, 3 }, /* two slots for what is under way, three for what stays */
    { 7, 1, 4 },  { 6, 1, 5 }, { 5, 1, 6 }, { 1, 1, 6 }, { 8, 2, 5 }, /* four slots are under way */
    { 8, 9, 6 },
  };
  for (uint32_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    instance_streamed(&i, 3, 10, cases[k].host_slots);
    i.input.host_pieces_ahead = cases[k].ahead;
    check_streamed(&i, cases[k].chunks);
  }
  /* A chunk of states that two pieces share is there once. */
  instance_streamed(&i, 3, 10, 5);
  i.piece_chunks[i.pieces[1].chunk_first + 1] = i.piece_chunks[i.pieces[0].chunk_first + 2];
  check_streamed(&i, 5);
  /* One that stays on the device, pinned, needs neither. */
  instance_streamed(&i, 3, 10, 5);
  i.pinned[4] = i.pinned[5] = 1;
  i.input.frame_count = 6;
  check_streamed(&i, 4);
}

static void test_simulate_pieces_that_fit_wait_for_no_file(void) {
  static instance_t i;
  gmi_plan_t plan;
  /* The last two pieces are streamed while the first ops run: 6800 of 15000 are hidden. Were it the first ones, op 0
   * would wait for 2000 more. */
  instance_streamed(&i, 3, 5000, 7);
  make(&i.input, &plan);
  CHECK_EQ(plan.file_chunks, 4);
  uint64_t some = plan.predicted_ns;
  gmi_plan_free(&plan);
  i.input.host_slots = 0;
  make(&i.input, &plan);
  CHECK_EQ(plan.predicted_ns, some); /* as if there were no files */
  CHECK(some < 15000 + 1000);
  gmi_plan_free(&plan);
  /* All are streamed: op 0 waits for the reads of its own. */
  i.input.host_slots = 5;
  make(&i.input, &plan);
  CHECK(plan.predicted_ns >= 15000 + 2000);
  CHECK(plan.predicted_ns <= some + 2000);
  gmi_plan_free(&plan);
}

static void test_plan_states_of_device_pieces_stay_where_the_host_is_short(void) {
  static instance_t i;
  uint64_t some = 0, none = 0;
  for (uint32_t frames = 6; frames <= 34; frames += 2) {
    for (uint32_t slots = 4; slots <= 32; slots += 7) {
      gmi_plan_t plan, free_plan;
      instance_training(&i, 8, frames, frames % 4 == 2);
      i.input.placement = GEMINI_PLACEMENT_AUTO;
      for (uint32_t p = 0; p < 8; p++) i.pieces[p].host_ns = 400; /* so that the device is worth it */
      make(&i.input, &free_plan);
      i.input.host_slots = slots;
      i.input.host_pieces_ahead = 1;
      i.input.file_read_ns = 300;
      i.input.file_write_ns = 300;
      make(&i.input, &plan);
      check_plan(&i.input, &plan);
      CHECK(plan.predicted_ns >= plan.file_busy_ns);
      CHECK(plan.predicted_ns >= free_plan.predicted_ns || slots >= 32 || plan.device_piece_count);
      for (uint32_t p = 0; p < 8 && slots < 32; p++) {
        none += !plan.piece_on_device[p];
        if (!plan.piece_on_device[p]) continue;
        some++;
        for (uint32_t w = i.pieces[p].chunk_first + i.pieces[p].shared_count; w < i.pieces[p + 1].chunk_first; w++)
          CHECK(plan.stays[i.piece_chunks[w]]);
      }
      if (slots >= 32) {
        CHECK_EQ(plan.file_chunks, 0);
        CHECK_EQ(plan.predicted_ns, free_plan.predicted_ns);
      }
      gmi_plan_free(&plan);
      gmi_plan_free(&free_plan);
    }
  }
  CHECK(some > 20 && none > 20);
}

/* States of a device piece that a host piece takes as well come and go by demand. */
static bool pieces_share_states(const gmi_plan_input_t *in, const gmi_plan_t *plan) {
  uint8_t device[MAX_CHUNKS] = { 0 };
  for (uint32_t p = 0; p < in->piece_count; p++)
    for (uint32_t k = in->pieces[p].chunk_first; plan->piece_on_device[p] && k < in->pieces[p + 1].chunk_first; k++)
      device[in->piece_chunks[k]] |= k >= in->pieces[p].chunk_first + in->pieces[p].shared_count;
  bool share = false;
  for (uint32_t p = 0; p < in->piece_count; p++)
    for (uint32_t k = in->pieces[p].chunk_first; !plan->piece_on_device[p] && k < in->pieces[p + 1].chunk_first; k++)
      share |= device[in->piece_chunks[k]];
  return share;
}

static void test_plan_random_inputs_with_files_are_consistent(void) {
  static instance_t i;
  const shape_t shape = { 20, 24, 12, 5, 3, 20, 8 };
  uint64_t seed = 21, streaming = 0, checked = 0;
  for (uint32_t n = 0; n < 400; n++) {
    gmi_plan_t plan, other;
    instance_random(&i, &seed, &shape, 10);
    i.input.placement = n % 3;
    i.input.file_read_ns = below(&seed, 500);
    i.input.file_write_ns = below(&seed, 500);
    i.input.host_pieces_ahead = below(&seed, 4);
    i.input.host_slots = 1 + below(&seed, 24);
    make(&i.input, &plan);
    bool share = pieces_share_states(&i.input, &plan);
    if (!share) check_plan(&i.input, &plan);
    checked += !share;
    CHECK_EQ(plan.file_busy_ns, plan.file_chunks * (i.input.file_read_ns + i.input.file_write_ns));
    CHECK(plan.predicted_ns >= plan.file_busy_ns && plan.predicted_ns >= plan.update_busy_ns);
    make(&i.input, &other); /* the same input, the same plan */
    CHECK(hash_plan(&i.input, &plan) == hash_plan(&i.input, &other));
    CHECK(plan.file_chunks == other.file_chunks && plan.predicted_ns == other.predicted_ns);
    gmi_plan_free(&other);
    streaming += plan.file_chunks > 0;
    /* The same moves with more room on the host: never more chunks from files. */
    uint64_t chunks = plan.file_chunks;
    for (uint32_t slots = i.input.host_slots; slots <= 26; slots += 5) {
      i.input.host_slots = slots;
      CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
      CHECK(plan.file_chunks <= chunks);
      chunks = plan.file_chunks;
    }
    i.input.host_slots = 0;
    CHECK_EQ(gmi_plan_simulate(&i.input, &plan), GEMINI_OK);
    CHECK_EQ(plan.file_chunks, 0);
    gmi_plan_free(&plan);
  }
  CHECK(streaming > 50 && checked > 200);
}

static void test_plan_times_of_files_that_are_too_long_are_refused(void) {
  static instance_t i;
  gmi_plan_t plan = { 0 };
  for (uint32_t k = 0; k < 2; k++) {
    instance_streamed(&i, 3, 10, 5);
    *(k ? &i.input.file_read_ns : &i.input.file_write_ns) = UINT64_C(1) << 57;
    CHECK_EQ(gmi_plan_make(&i.input, &plan, NULL), GEMINI_ERR_INVALID);
    *(k ? &i.input.file_read_ns : &i.input.file_write_ns) = UINT64_MAX;
    CHECK_EQ(gmi_plan_make(&i.input, &plan, NULL), GEMINI_ERR_INVALID);
  }
}

static void test_explain_tells_of_files(void) {
  static instance_t i;
  gmi_plan_t plan;
  char text[4096];
  instance_streamed(&i, 3, 10, 5);
  make(&i.input, &plan);
  CHECK(gmi_plan_explain(&i.input, &plan, NULL, text, sizeof text) < sizeof text);
  CHECK(strstr(text, "\nfiles: 6 chunks of states, 12.0 MiB, read and written a step, busy for 0.010 ms\n") != NULL);
  CHECK(strstr(text, "\nbinds: files, busy for 100 % of the step\n") != NULL);
  gmi_plan_free(&plan);
  i.input.host_slots = 9;
  make(&i.input, &plan);
  CHECK(gmi_plan_explain(&i.input, &plan, NULL, text, sizeof text) < sizeof text);
  CHECK(strstr(text, "files") == NULL);
  gmi_plan_free(&plan);
}

/* ---- words ---- */

static void test_explain_names_what_matters(void) {
  static instance_t i;
  const char *names[MAX_OPS] = { NULL };
  gmi_plan_t plan;
  instance_training(&i, 6, 8, true);
  i.ops[3].heap_frames = 2;
  names[3] = "attention\n.3"; /* names are any bytes */
  make(&i.input, &plan);
  char text[4096], part[40];
  uint64_t length = gmi_plan_explain(&i.input, &plan, names, text, sizeof text);
  CHECK(length < sizeof text && strlen(text) == length);
  CHECK_EQ(gmi_plan_explain(&i.input, &plan, names, NULL, 0), length);
  memset(part, 'x', sizeof part);
  CHECK_EQ(gmi_plan_explain(&i.input, &plan, names, part, 20), length);
  CHECK(memcmp(part, text, 19) == 0 && part[19] == 0 && part[20] == 'x');
  CHECK(strstr(text, "largest op: op 3 (attention%0A.3) needs 3 frames, 6.0 MiB") != NULL);
  CHECK(strstr(text, "placement: cuda, 12 ops, 24 chunks of 2.0 MiB\n") != NULL);
  CHECK(strstr(text, "budget: 8 frames, 16.0 MiB") != NULL);
  CHECK(strstr(text, "\nstays: ") != NULL && strstr(text, "parameters ") != NULL);
  CHECK(strstr(text, "\nbinds: ") != NULL && strstr(text, "\nlongest wait: ") != NULL);
  uint32_t lines = 0;
  for (const char *c = text; *c != 0; c++) lines += *c == '\n';
  CHECK(lines >= 10 && lines <= 14 && text[length - 1] == '\n');
  gmi_plan_free(&plan);
}

/* ---- chunk size ---- */

static uint64_t search_by_marking(const gmi_chunk_search_t *s) {
  uint64_t best = s->min_bytes, least = UINT64_MAX;
  bool found = false;
  for (uint64_t bytes = s->min_bytes; bytes <= s->max_bytes; bytes *= 2) {
    uint64_t touched = 0, largest = 0;
    for (uint64_t i = 0; i < s->use_count;) {
      uint8_t marks[4096] = { 0 };
      uint64_t here = 0, first = i;
      for (; i < s->use_count && s->uses[i].op == s->uses[first].op; i++) {
        for (uint64_t b = s->uses[i].offset; b < s->uses[i].offset + s->uses[i].size_bytes; b++) {
          CHECK(b / bytes < sizeof marks);
          here += !marks[b / bytes];
          marks[b / bytes] = 1;
        }
      }
      touched += here;
      if (here > largest) largest = here;
    }
    uint64_t cost = touched * (s->overhead_ns * s->bytes_per_s + bytes * UINT64_C(1000000000));
    if (2 * largest * bytes > s->device_bytes - s->nonmodel_bytes) continue;
    if (!found || cost <= least) found = true, least = cost, best = bytes;
  }
  return best;
}

static void test_chunk_search_random_uses_equals_marking(void) {
  uint64_t seed = 3, sizes[16] = { 0 };
  for (uint32_t n = 0; n < 2000; n++) {
    gmi_chunk_use_t uses[12];
    gmi_chunk_search_t s = { .uses = uses, .use_count = below(&seed, 13), .min_bytes = 4, .max_bytes = 64 };
    uint32_t op = 0;
    for (uint64_t i = 0; i < s.use_count; i++) {
      op += below(&seed, 2);
      uses[i] = (gmi_chunk_use_t){ below(&seed, 500), below(&seed, 100), op, 0 };
    }
    s.device_bytes = 100 + below(&seed, 1500);
    s.nonmodel_bytes = below(&seed, 100);
    s.overhead_ns = below(&seed, 40);
    s.bytes_per_s = 1000000000;
    uint64_t expected = search_by_marking(&s);
    CHECK_EQ(gmi_chunk_size_search(&s), expected);
    sizes[__builtin_ctzll(expected)]++;
  }
  for (uint32_t k = 2; k <= 6; k++) CHECK(sizes[k] > 20);
}

static void test_chunk_search_limits(void) {
  gmi_chunk_use_t use = { 0, 100, 0, 0 };
  gmi_chunk_search_t s = { &use, 0, 16, 256, 1000, 0, 10, 1000000000 };
  CHECK_EQ(gmi_chunk_size_search(&s), 256); /* nothing touched: all cost the same */
  s.use_count = 1;
  s.overhead_ns = 1000000;
  CHECK_EQ(gmi_chunk_size_search(&s), 128); /* 128 and 256 take one copy each, of 128 a shorter one */
  s.overhead_ns = 0;
  CHECK_EQ(gmi_chunk_size_search(&s), 16); /* 7 chunks of 16 are 112 bytes */
  s.device_bytes = 223;
  CHECK_EQ(gmi_chunk_size_search(&s), 16); /* nothing fits: the smallest */
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "--hash") == 0) {
    printf("%" PRIx64 "\n", hash_many());
    return 0;
  }
  RUN(test_reference_tiny_instances_equals_exhaustive_search);
  RUN(test_reference_cyclic_use_of_too_few_frames_rounds_up);
  RUN(test_plan_small_random_instances_are_optimal_and_consistent);
  RUN(test_plan_medium_random_instances_are_optimal_and_consistent);
  RUN(test_plan_chunks_used_in_turn_reaches_reference);
  RUN(test_plan_everything_fits_moves_nothing);
  RUN(test_plan_cpu_drops_all_but_for_adjacent_ops);
  RUN(test_plan_static_keeps_the_fractions);
  RUN(test_plan_infeasible_names_the_first_op);
  RUN(test_plan_contradictory_input_is_refused);
  RUN(test_plan_no_chunks_is_made);
  RUN(test_plan_chunk_of_pieces_on_both_sides_is_consistent);
  RUN(test_plan_auto_is_never_slower_than_cuda_or_host_pieces_only);
  RUN(test_simulate_compute_only_is_the_sum);
  RUN(test_simulate_fetch_bound);
  RUN(test_simulate_evict_bound);
  RUN(test_simulate_update_bound);
  RUN(test_simulate_first_layer_is_updated_before_those_submitted_earlier);
  RUN(test_simulate_goes_on_while_more_work_is_left_behind);
  RUN(test_fetches_for_pieces_come_before_the_time_outside_ops);
  RUN(test_plan_states_stay_if_that_makes_room_for_pieces_ahead);
  RUN(test_plan_has_two_passes_where_that_gains_and_there_is_room);
  RUN(test_plan_computes_first_passes_ahead_where_there_is_no_room_for_more);
  RUN(test_plan_states_stay_if_that_takes_fewer_copies_and_no_more_time);
  RUN(test_simulate_random_instances_equal_events);
  RUN(test_simulate_random_groups_equal_events);
  RUN(test_simulate_gathers_and_sums_by_hand);
  RUN(test_simulate_updates_are_current_after_a_delay);
  RUN(test_simulate_device_piece_runs_on_the_stream);
  RUN(test_simulate_device_pieces_apart_run_beside_ops);
  RUN(test_simulate_prefetch_hides_fetches);
  RUN(test_simulate_heap_growth_waits_for_write_back);
  RUN(test_simulate_fresh_chunk_waits_for_its_frame);
  RUN(test_simulate_nothing_is_issued_before_the_iteration_begins);
  RUN(test_plan_forward_pass_keeps_the_link_busy);
  RUN(test_plan_forward_pass_changes_little_with_the_frames);
  RUN(test_simulate_foreign_plan_is_refused);
  RUN(test_plan_same_input_same_plan);
  RUN(test_states_without_room_below_stay_on_the_device);
  RUN(test_simulate_files_bound_is_the_sum_of_reads_and_writes);
  RUN(test_simulate_only_what_the_host_has_no_room_for_is_streamed);
  RUN(test_simulate_pieces_that_fit_wait_for_no_file);
  RUN(test_plan_states_of_device_pieces_stay_where_the_host_is_short);
  RUN(test_plan_random_inputs_with_files_are_consistent);
  RUN(test_plan_times_of_files_that_are_too_long_are_refused);
  RUN(test_explain_names_what_matters);
  RUN(test_explain_tells_of_files);
  RUN(test_chunk_search_random_uses_equals_marking);
  RUN(test_chunk_search_limits);
  return check_done();
}
