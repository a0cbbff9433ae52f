/* The fewest fetches an iteration, as choosing the most arcs on a ring. Shares no code with the planner; the unit test
 * of the policy proves it by exhaustive search on small instances.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Between two uses of a chunk that nothing forces it to leave for, it may stay on the device: an arc over the stages
 * between. Every use that reads and is not at the end of a chosen arc is a fetch. Arcs are chosen as Belady's rule
 * chooses: the one that ends first, if it fits. On a line that is optimal. On a ring, chosen arcs run into the next
 * lap; so laps are repeated, k arcs in each, the arcs that enter a lap being those that left the one before, until a
 * lap leaves what entered it (then its k arcs fit on the ring), or k do not fit (then they never do, because ends only
 * move outward from lap to lap). U. Adamy et al., "Call control in rings", Algorithmica 47(3), 2007. */
#include "min_fetch.h"

#include <stdlib.h>
#include <string.h>

typedef struct arc {
  /* stages of the uses; end counts on through the next lap; the stages strictly between are taken */
  int64_t begin, end;
} arc_t;

static int by_end(const void *a, const void *b) {
  const arc_t *x = a, *y = b;
  if (x->end != y->end) return x->end < y->end ? -1 : 1;
  return x->begin > y->begin ? -1 : x->begin < y->begin; /* of two that end together the shorter */
}

typedef struct ring {
  int64_t stages;
  int64_t *spare;   /* [stages] frames beside the stage's own chunks */
  int64_t *entered; /* [stages] arcs over the stage that the lap before left */
  int64_t *taken;   /* [2 * stages] arcs over the stage, of this lap and into the next */
  arc_t *arcs;
  uint64_t arc_count;
} ring_t;

static int can_keep(ring_t *r, uint64_t k) {
  size_t lap_bytes = (size_t)r->stages * sizeof(int64_t);
  memset(r->entered, 0, lap_bytes);
  for (;;) {
    uint64_t chosen = 0;
    memcpy(r->taken, r->entered, lap_bytes);
    memset(r->taken + r->stages, 0, lap_bytes);
    for (uint64_t a = 0; a < r->arc_count && chosen < k; a++) {
      int fits = 1;
      for (int64_t j = r->arcs[a].begin + 1; fits && j < r->arcs[a].end; j++)
        fits = r->taken[j] < r->spare[j % r->stages];
      if (!fits) continue;
      for (int64_t j = r->arcs[a].begin + 1; j < r->arcs[a].end; j++) r->taken[j]++;
      chosen++;
    }
    if (chosen < k) return 0;
    if (memcmp(r->entered, r->taken + r->stages, lap_bytes) == 0) return 1;
    memcpy(r->entered, r->taken + r->stages, lap_bytes);
  }
}

enum { USED = 1, FRESH = 2, LEAVES = 4 };

uint64_t min_fetch(const gmi_plan_input_t *input, const uint8_t *piece_on_device) {
  uint64_t chunks = input->chunk_count, stages = 0, uses = 0, fetches = UINT64_MAX, pinned = 0;
  for (uint32_t op = 0; op < input->op_count; op++) {
    stages++;
    for (uint32_t p = 0; p < input->piece_count; p++) stages += input->pieces[p].after_op == op && piece_on_device[p];
  }
  /* What each stage does with each chunk. */
  uint8_t *table = calloc(stages * chunks + 1, 1);
  ring_t r = { .stages = (int64_t)stages };
  r.spare = calloc(stages + 1, sizeof *r.spare);
  r.entered = calloc(stages + 1, sizeof *r.entered);
  r.taken = calloc(2 * stages + 1, sizeof *r.taken);
  if (table == NULL || r.spare == NULL || r.entered == NULL || r.taken == NULL) goto end;
  for (uint64_t w = 0; w < chunks; w++) pinned += input->chunk_pinned != NULL && input->chunk_pinned[w];
  uint64_t stage = 0;
  for (uint32_t op = 0; op < input->op_count; op++) {
    int64_t frames = (int64_t)input->frame_count - input->ops[op].heap_frames - (int64_t)pinned;
    for (uint32_t x = input->ops[op].access_first; x < input->ops[op + 1].access_first; x++)
      table[stage * chunks + input->accesses[x].chunk] |=
          (input->accesses[x].mode & GMI_ACCESS_FRESH) != 0 ? USED | FRESH : USED;
    r.spare[stage++] = frames;
    for (uint32_t p = 0; p < input->piece_count; p++) {
      if (input->pieces[p].after_op != op || !piece_on_device[p]) continue;
      for (uint32_t i = input->pieces[p].chunk_first; i < input->pieces[p + 1].chunk_first; i++)
        table[stage * chunks + input->piece_chunks[i]] |= USED;
      r.spare[stage++] = frames;
    }
    for (uint32_t p = 0; p < input->piece_count; p++) {
      if (input->pieces[p].after_op != op || piece_on_device[p]) continue;
      for (uint32_t i = input->pieces[p].chunk_first; i < input->pieces[p + 1].chunk_first; i++)
        table[(stage - 1) * chunks + input->piece_chunks[i]] |= LEAVES;
    }
  }
  for (uint64_t w = 0; w < chunks; w++) {
    for (uint64_t j = 0; j < stages; j++) {
      if (input->chunk_pinned != NULL && input->chunk_pinned[w]) table[j * chunks + w] = 0;
      if ((table[j * chunks + w] & USED) != 0) r.spare[j]--, uses++;
    }
  }
  for (uint64_t j = 0; j < stages; j++)
    if (r.spare[j] < 0) goto end;

  r.arcs = malloc(uses * sizeof *r.arcs + 1);
  if (r.arcs == NULL) goto end;
  uint64_t reads = 0;
  for (uint64_t w = 0; w < chunks; w++) {
    for (uint64_t j = 0; j < stages; j++) {
      if ((table[j * chunks + w] & USED) == 0) continue;
      reads += (table[j * chunks + w] & FRESH) == 0;
      /* Walk to the next use; a host piece on the way, or right behind this use, makes the chunk leave. */
      uint64_t at = j;
      int leaves = 0;
      do {
        leaves = leaves || (table[at % stages * chunks + w] & LEAVES) != 0;
        at++;
      } while ((table[at % stages * chunks + w] & USED) == 0);
      if (leaves || (table[at % stages * chunks + w] & FRESH) != 0) continue;
      r.arcs[r.arc_count++] = (arc_t){ (int64_t)j, (int64_t)at };
    }
  }
  qsort(r.arcs, r.arc_count, sizeof *r.arcs, by_end);
  uint64_t low = 0, high = r.arc_count;
  while (low < high) {
    uint64_t middle = low + (high - low + 1) / 2;
    if (can_keep(&r, middle)) low = middle;
    else high = middle - 1;
  }
  fetches = reads - low;
end:
  free(table);
  free(r.spare);
  free(r.entered);
  free(r.taken);
  free(r.arcs);
  return fetches;
}
