/* The step of one of many ranks that train a LLaMA, in the policy's terms.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each block is an operator forward and one backward, which computes the block again; its matrix products take the time
 * that their operations take at a given rate (attention over tokens is left out). Parameters are bf16 and gathered in
 * chunks; gradients take their bytes and are summed as soon as their operator has ended; master, momentum and variance
 * are fp32. All elements are updated behind the last operator. Full sharding divides chunks over all ranks; hybrid
 * sharding over those of a host, and sums are then added over the hosts. */
#ifndef BENCH_PLAN_RANKS_H
#define BENCH_PLAN_RANKS_H

#include "policy/policy.h"

typedef struct plan_ranks_shape {
  const char *name;
  uint64_t layers, width, kv_width, hidden, vocabulary;
} plan_ranks_shape_t;
extern const plan_ranks_shape_t plan_ranks_shapes[];
extern const char *const plan_ranks_names[]; /* of these, then NULL */

typedef struct plan_ranks_config {
  plan_ranks_shape_t shape;
  uint64_t ranks, hosts; /* hosts divides ranks */
  uint32_t hybrid;       /* 1: chunks are divided over the ranks of a host only */
  uint32_t reserved;
  uint64_t tokens; /* of a rank's step */
  uint64_t chunk_bytes, device_bytes;
  uint64_t host_bytes; /* of a host */
  /* operations a second of a GPU; bytes a second: of its memory, of its copies each way, to GPUs of its host, to other
   * hosts, of a host's memory in updates */
  uint64_t operations, memory_rate, copy_rate, inside_rate, between_rate, host_rate;
  uint64_t latency_ns; /* of a collective */
} plan_ranks_config_t;

typedef struct plan_ranks {
  gmi_plan_input_t input; /* its arrays belong to the record */
  gmi_plan_t plan;
  uint32_t share;      /* of 4 parts of the free frames that hold what is gathered: the one with the shortest step */
  uint64_t params;     /* elements */
  uint64_t rank_bytes; /* that a rank keeps of parameters and states */
  double plan_seconds; /* for all shares */
} plan_ranks_t;

/* False, with the reason in error: the step does not fit, or there is no memory. The caller frees the record. */
bool plan_ranks_make(const plan_ranks_config_t *c, plan_ranks_t *out, char *error, size_t error_bytes);
void plan_ranks_free(plan_ranks_t *p);

#endif
