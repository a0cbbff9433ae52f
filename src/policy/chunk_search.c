/* Chooses the chunk size that minimises predicted copy time. policy.h defines the cost and the constraint. Called by
 * gmi_chunk_search() of chunk/cut.c: at the first need with the registration order as the uses, and before the first
 * plan with the recorded ops.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Small chunks cost overhead per copy, large chunks cost bytes that the op did not ask for. The range holds few
 * powers of two, so each of them is evaluated. */
#include <stdlib.h>
#include <string.h>

#include "policy/policy.h"

__extension__ typedef unsigned __int128 wide_t; /* wide enough for counts times nanoseconds times bytes */

static int compare_use(const void *a, const void *b) {
  const gmi_chunk_use_t *x = a, *y = b;
  if (x->op != y->op) return x->op < y->op ? -1 : 1;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return x->size_bytes < y->size_bytes ? -1 : x->size_bytes > y->size_bytes;
}

/* Counts the chunks touched by all ops, each chunk once per op, and the chunks of the largest op. uses must be
 * sorted by compare_use(), so a range overlaps only with the ranges before it in the same op. */
static void count_chunks(const gmi_chunk_use_t *uses, uint64_t count, uint64_t chunk_bytes, uint64_t *touched_out,
                         uint64_t *largest_out) {
  /* chunks below free_chunk are counted already in this op */
  uint64_t touched = 0, largest = 0, in_op = 0, free_chunk = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (i == 0 || uses[i].op != uses[i - 1].op) in_op = free_chunk = 0;
    if (uses[i].size_bytes == 0) continue;
    uint64_t first = uses[i].offset / chunk_bytes;
    uint64_t end = (uint64_t)(((wide_t)uses[i].offset + uses[i].size_bytes - 1) / chunk_bytes) + 1;
    if (first < free_chunk) first = free_chunk;
    if (end > first) in_op += end - first, touched += end - first, free_chunk = end;
    if (in_op > largest) largest = in_op;
  }
  *touched_out = touched;
  *largest_out = largest;
}

uint64_t gmi_chunk_size_search(const gmi_chunk_search_t *search) {
  uint64_t best_bytes = search->min_bytes;
  if (search->min_bytes == 0) return best_bytes;
  gmi_chunk_use_t *uses = malloc(search->use_count * sizeof *uses + 1);
  if (uses == NULL) return best_bytes; /* every size is correct; the smallest one fits best */
  if (search->use_count > 0) memcpy(uses, search->uses, search->use_count * sizeof *uses);
  if (search->use_count > 1) qsort(uses, search->use_count, sizeof *uses, compare_use);
  uint64_t model_bytes =
      search->device_bytes > search->nonmodel_bytes ? search->device_bytes - search->nonmodel_bytes : 0;
  uint64_t rate = search->bytes_per_s > 0 ? search->bytes_per_s : 1;
  wide_t least = 0;
  bool found = false;
  for (uint64_t bytes = search->min_bytes; bytes <= search->max_bytes; bytes *= 2) {
    uint64_t touched, largest;
    count_chunks(uses, search->use_count, bytes, &touched, &largest);
    /* The cost is in nanoseconds times the rate: no division, so rounding cannot decide. */
    wide_t cost = (wide_t)touched * ((wide_t)search->overhead_ns * rate + (wide_t)bytes * 1000000000u);
    if ((wide_t)largest * bytes * 2 <= model_bytes && (!found || cost <= least)) {
      found = true;
      least = cost;
      best_bytes = bytes;
    }
    /* the next doubling would overflow */
    if (bytes > UINT64_MAX / 2) break;
  }
  free(uses);
  return best_bytes;
}
