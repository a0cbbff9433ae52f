/* The step of one of many ranks that train a LLaMA, in the policy's terms.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/plan_ranks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/cli.h"

/* LLaMA-7B, Llama-2-70B and Llama-3.1-405B. */
const plan_ranks_shape_t plan_ranks_shapes[] = { { "7b", 32, 4096, 4096, 11008, 32000 },
                                                 { "70b", 80, 8192, 1024, 28672, 32000 },
                                                 { "405b", 126, 16384, 1024, 53248, 128256 } };
const char *const plan_ranks_names[] = { "7b", "70b", "405b", NULL };

enum {
  PARAM_BYTES = 2,
  STATE_CHUNKS = 6 /* of one chunk of parameters: three of fp32 */,
  UPDATE_BYTES = 28,
  SHARES = 5
};

static uint64_t block_params(const plan_ranks_shape_t *s) {
  return 2 * s->width * s->width + 2 * s->width * s->kv_width + 3 * s->width * s->hidden + 2 * s->width;
}
static uint64_t divided(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
static uint64_t ns_of(double amount, uint64_t rate) { return (uint64_t)(amount * 1e9 / (double)rate) + 1; }

/* What operators need. Operators: embedding and head are like a block, before the first and behind the last one; each
 * comes forward and, in reverse order, backward. */
typedef struct {
  const plan_ranks_config_t *c;
  uint32_t parts, ops, slicing;                       /* operators of a pass; of both; ranks that divide a chunk */
  uint32_t *first;                                    /* [parts + 1] chunks of each */
  uint32_t *use_first, *uses, *frames, *own, *others; /* [ops + 1], of gathers; others: frames for all else */
  gmi_plan_op_t *op;
  gmi_plan_collective_t *gathers, *sums;
  gmi_plan_piece_t *pieces;
  uint32_t *piece_chunks;
  uint8_t *kind;
  gmi_plan_group_t link;
} builder_t;

static void builder_free(builder_t *b) {
  free(b->first);
  free(b->use_first);
  free(b->uses);
  free(b->frames);
  free(b->own);
  free(b->others);
}

static uint32_t part_of(const builder_t *b, uint32_t op) { return op < b->parts ? op : b->ops - 1 - op; }

/* Bytes of activations in an op: the inputs of all blocks so far, and what a block computes with, in bf16. */
static uint64_t activations(const builder_t *b, uint32_t op) {
  const plan_ranks_shape_t *s = &b->c->shape;
  const uint32_t part = part_of(b, op);
  const uint64_t inputs = (part + 1) * b->c->tokens * s->width * 2, working = 3 * s->hidden + 8 * s->width;
  /* the head's logits and their gradient are computed in parts, of 2048 tokens */
  const uint64_t logits = (b->c->tokens < 2048 ? b->c->tokens : 2048) * s->vocabulary * 2 * 2;
  return inputs + (part == b->parts - 1 ? logits : b->c->tokens * working * 2);
}

/* A chunk's gather and sum. With full sharding the two ways, inside a host and between hosts, are used at the same time,
 * in parts. With hybrid sharding a sum is two collectives, one after the other, and only the second is between hosts: an
 * all-reduce of each GPU's part of the chunk. */
static gmi_plan_group_t link_of(const plan_ranks_config_t *c) {
  const double chunk = (double)c->chunk_bytes, hosts = (double)c->hosts, local = (double)(c->ranks / c->hosts);
  const uint64_t inside = ns_of(chunk * (local - 1) / local, c->inside_rate);
  const double part = chunk / local * (hosts - 1) / hosts;
  if (c->hybrid)
    return (gmi_plan_group_t){ c->latency_ns + inside,
                               (c->hosts > 1 ? 2 : 1) * c->latency_ns + inside + ns_of(2 * part, c->between_rate) };
  const uint64_t between = ns_of(part, c->between_rate), both = c->latency_ns + (inside > between ? inside : between);
  return (gmi_plan_group_t){ both, both };
}

static bool builder_make(builder_t *b) {
  const plan_ranks_config_t *c = b->c;
  const uint64_t block = block_params(&c->shape), ends = c->shape.width * c->shape.vocabulary;
  b->parts = (uint32_t)c->shape.layers + 2;
  b->ops = 2 * b->parts;
  b->slicing = (uint32_t)(c->hybrid ? c->ranks / c->hosts : c->ranks);
  b->link = link_of(c);
  b->first = calloc(b->parts + 1, sizeof *b->first);
  b->use_first = calloc(b->ops + 1, sizeof *b->use_first);
  b->frames = calloc(b->ops + 1, sizeof *b->frames);
  b->own = calloc(b->ops + 1, sizeof *b->own);
  b->others = calloc(b->ops + 1, sizeof *b->others);
  b->op = calloc(b->ops + 1, sizeof *b->op);
  if (!b->first || !b->use_first || !b->frames || !b->own || !b->others || !b->op) return false;
  for (uint32_t i = 0; i < b->parts; i++) {
    const uint64_t params = i == 0 || i == b->parts - 1 ? ends : block;
    b->first[i + 1] = b->first[i] + (uint32_t)divided(params * PARAM_BYTES, c->chunk_bytes);
  }
  for (uint32_t op = 0; op < b->ops; op++) {
    const uint32_t part = part_of(b, op);
    b->own[op] = b->first[part + 1] - b->first[part];
    b->use_first[op + 1] = b->use_first[op] + b->own[op];
    b->others[op] = (uint32_t)divided(activations(b, op), c->chunk_bytes) + (op < b->parts ? 0 : b->own[op]);
    /* multiply and add forward; backward again, and for two gradients; a look-up in the embedding takes none */
    const double operations = 2.0 * (double)(part == b->parts - 1 ? ends : block) * (double)c->tokens;
    b->op[op].compute_ns = part == 0 ? 1000 : ns_of(operations * (op < b->parts ? 1 : 3), c->operations);
  }
  const uint32_t uses = b->use_first[b->ops], chunks = b->first[b->parts];
  const uint32_t pieces = (uint32_t)divided(chunks, b->slicing);
  b->uses = calloc(uses + 1, sizeof *b->uses);
  b->gathers = calloc(uses + 1, sizeof *b->gathers);
  b->sums = calloc(chunks + 1, sizeof *b->sums);
  b->pieces = calloc(pieces + 1, sizeof *b->pieces);
  b->piece_chunks = calloc((uint64_t)pieces * (1 + STATE_CHUNKS) + 1, sizeof *b->piece_chunks);
  b->kind = calloc((uint64_t)pieces * (1 + STATE_CHUNKS) + 1, 1);
  if (!b->uses || !b->gathers || !b->sums || !b->pieces || !b->piece_chunks || !b->kind) return false;
  for (uint32_t op = 0; op < b->ops; op++)
    for (uint32_t k = 0; k < b->own[op]; k++) b->uses[b->use_first[op] + k] = b->first[part_of(b, op)] + k;
  return true;
}

static gmi_plan_collective_t collective(const builder_t *b, uint32_t op, uint32_t use_op, uint32_t chunk) {
  const uint64_t slice = b->c->chunk_bytes / b->slicing;
  return (gmi_plan_collective_t){ .op = op,
                                  .use_op = use_op,
                                  .frame_op = GMI_NO_OP,
                                  .part_count = 1,
                                  .parts = { chunk / b->slicing },
                                  .part_bytes = { slice },
                                  .bytes = b->c->chunk_bytes - slice };
}

/* Gathers with a share of the frames that ops leave. False: there is no memory. */
static bool add_gathers(builder_t *b, gmi_plan_input_t *in, uint32_t share) {
  gmi_gather_plan_t plan;
  const uint32_t chunks = b->first[b->parts];
  const gmi_gather_input_t gathers = { .op_count = b->ops,
                                       .chunk_count = chunks,
                                       .frames = b->frames,
                                       .use_first = b->use_first,
                                       .uses = b->uses,
                                       .ahead = GMI_GATHERS_AHEAD,
                                       .burst = GMI_GATHERS_BURST,
                                       .batch = GMI_GATHERS_BATCH };
  for (uint32_t op = 0; op < b->ops; op++) {
    const uint32_t need = b->own[op] + b->others[op];
    b->frames[op] = need > in->frame_count ? 0 : b->own[op] + (in->frame_count - need) * share / (SHARES - 1);
  }
  if (gmi_gather_plan_make(&gathers, &plan)) return false;
  uint32_t *left = calloc(plan.event_first[b->ops] + 1, sizeof *left), first = 0, end = 0;
  uint32_t count = 0;
  for (uint32_t op = 0; left && op < b->ops; op++) {
    for (uint32_t e = plan.event_first[op]; e < plan.event_first[op + 1]; e++) {
      const uint32_t chunk = plan.events[e].chunk;
      uint32_t use = op, last = 0;
      while (part_of(b, use) >= b->parts || chunk < b->first[part_of(b, use)] || chunk >= b->first[part_of(b, use) + 1])
        if (++use == b->ops) break;
      if (plan.events[e].leaves) { /* it was used last forward: all that leave are needed once more */
        for (uint32_t k = 0; k < op; k++)
          if (chunk >= b->first[part_of(b, k)] && chunk < b->first[part_of(b, k) + 1]) last = k;
        left[end++] = last;
        continue;
      }
      b->gathers[count] = collective(b, op, use, chunk);
      if (first < end) b->gathers[count].frame_op = left[first++];
      count++;
    }
    b->op[op].heap_frames = b->others[op] + plan.gathered[op];
  }
  in->groups.gather_count = count;
  gmi_gather_plan_free(&plan);
  free(left);
  return left != NULL;
}

static void add_updates(builder_t *b, gmi_plan_input_t *in) {
  const plan_ranks_config_t *c = b->c;
  const uint32_t chunks = b->first[b->parts], pieces = (uint32_t)divided(chunks, b->slicing);
  const uint64_t elements = c->chunk_bytes / PARAM_BYTES, local = c->ranks / c->hosts;
  uint32_t listed = 0;
  in->piece_count = pieces;
  in->chunk_count = pieces * (1 + STATE_CHUNKS);
  for (uint32_t p = 0; p < pieces; p++) {
    b->kind[p] = GEMINI_KIND_PARAM;
    b->pieces[p] = (gmi_plan_piece_t){ .after_op = b->ops - 1, .chunk_first = listed, .shared_count = 1 };
    b->pieces[p].host_ns = ns_of((double)(elements * UPDATE_BYTES * local), c->host_rate);
    b->pieces[p].device_ns = ns_of((double)(elements * UPDATE_BYTES), c->memory_rate);
    b->piece_chunks[listed++] = p;
    for (uint32_t k = 0; k < STATE_CHUNKS; k++) {
      b->kind[pieces + p * STATE_CHUNKS + k] = (uint8_t)(GEMINI_KIND_MASTER + k / 2);
      b->piece_chunks[listed++] = pieces + p * STATE_CHUNKS + k;
    }
  }
  b->pieces[pieces].chunk_first = listed;
  for (uint32_t op = b->parts; op < b->ops; op++)
    for (uint32_t chunk = b->first[part_of(b, op) + 1]; chunk-- > b->first[part_of(b, op)];)
      b->sums[in->groups.sum_count++] = collective(b, op, op, chunk);
}

/* Plans all shares and keeps the one with the shortest step; of equals the largest. */
static bool plan_shares(builder_t *b, plan_ranks_t *out, char *error, size_t error_bytes) {
  gmi_plan_failure_t failure = { 0 };
  bool planned = false;
  out->share = SHARES - 1;
  for (uint32_t round = 0; round <= SHARES; round++) {
    const uint32_t share = round < SHARES ? SHARES - 1 - round : out->share; /* last, the best one again */
    gmi_plan_t plan = { 0 };
    if (!add_gathers(b, &out->input, share)) return false;
    gemini_status_t status = gmi_plan_make(&out->input, &plan, &failure);
    if (status == GEMINI_ERR_OOM_DEVICE) {
      snprintf(error, error_bytes, "op %" PRIu32 " needs %" PRIu64 " frames of %" PRIu64 " bytes, %" PRIu64 " there",
               failure.op, failure.need_frames, b->c->chunk_bytes, failure.have_frames);
    } else if (status != GEMINI_OK) {
      snprintf(error, error_bytes, "planning failed: status %d", status);
    } else if (!planned || round == SHARES || plan.predicted_ns < out->plan.predicted_ns) {
      gmi_plan_free(&out->plan);
      out->plan = plan;
      out->share = share;
      planned = true;
      continue;
    }
    gmi_plan_free(&plan);
  }
  return planned;
}

bool plan_ranks_make(const plan_ranks_config_t *c, plan_ranks_t *out, char *error, size_t error_bytes) {
  builder_t b = { .c = c };
  *out =
      (plan_ranks_t){ .params = c->shape.layers * block_params(&c->shape) + 2 * c->shape.width * c->shape.vocabulary };
  snprintf(error, error_bytes, "out of memory");
  bool made = builder_make(&b);
  out->input = (gmi_plan_input_t){ .op_count = b.ops,
                                   .frame_count = (uint32_t)(c->device_bytes / c->chunk_bytes),
                                   .ops = b.op,
                                   .pieces = b.pieces,
                                   .piece_chunks = b.piece_chunks,
                                   .chunk_kind = b.kind,
                                   .chunk_bytes = c->chunk_bytes,
                                   .frame_bytes = c->chunk_bytes,
                                   .link_bytes = c->chunk_bytes,
                                   .file_bytes = c->chunk_bytes,
                                   .fetch_ns = ns_of((double)c->chunk_bytes, c->copy_rate),
                                   .evict_ns = ns_of((double)c->chunk_bytes, c->copy_rate),
                                   .placement = GEMINI_PLACEMENT_AUTO,
                                   .groups = { .group_count = 1, .gathers = b.gathers, .sums = b.sums } };
  if (made) {
    gmi_plan_group_t *link = malloc(sizeof *link);
    if (link) *link = b.link;
    out->input.groups.links = link;
    made = link != NULL;
  }
  if (made) {
    add_updates(&b, &out->input);
    out->rank_bytes = out->input.chunk_count * c->chunk_bytes;
    const uint64_t host = out->rank_bytes * (c->ranks / c->hosts);
    if (host > c->host_bytes) {
      snprintf(error, error_bytes, "the ranks of a host keep %" PRIu64 " bytes, it has %" PRIu64, host, c->host_bytes);
      made = false;
    }
  }
  const uint64_t begin_ns = cli_now_ns();
  if (made) made = plan_shares(&b, out, error, error_bytes);
  out->plan_seconds = 1e-9 * (double)(cli_now_ns() - begin_ns);
  builder_free(&b);
  return made;
}

void plan_ranks_free(plan_ranks_t *p) {
  gmi_plan_free(&p->plan);
  free((void *)(uintptr_t)p->input.ops);
  free((void *)(uintptr_t)p->input.pieces);
  free((void *)(uintptr_t)p->input.piece_chunks);
  free((void *)(uintptr_t)p->input.chunk_kind);
  free((void *)(uintptr_t)p->input.groups.gathers);
  free((void *)(uintptr_t)p->input.groups.sums);
  free((void *)(uintptr_t)p->input.groups.links);
}
