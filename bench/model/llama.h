/* A stack of matrix products with the parameters of a LLaMA, as operators over memory_t.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Token embedding; blocks of RMS norm, q, k, v, o and RMS norm, gate, up, down; RMS norm; head (not tied); cross
 * entropy. What is left out is attention over tokens: o's input is silu(q) k + v, for each token alone. So all matrix
 * products with parameters are there, forward and backward, and nothing else of weight. Every block is checkpointed: the
 * forward pass keeps only each block's input, the backward pass computes the block again. Activations are bf16. */
#ifndef BENCH_LLAMA_H
#define BENCH_LLAMA_H

#include "model/walk.h"

typedef struct llama_shape {
  const char *name;
  int layers, width, hidden, vocabulary; /* all but layers are multiples of TASK_UNIT */
} llama_shape_t;

typedef struct llama {
  memory_t *memory; /* borrowed */
  llama_shape_t shape;
  int rows;          /* tokens of a step */
  int final_tensors; /* index of the last norm, and, behind it, the head */
  int32_t *tokens;   /* on the host: rows of tokens, rows of targets, first (vocabulary + 1), where (rows) */
  double *losses;    /* (steps), on the host, valid after memory_synchronize() */
  walk_t *updates;   /* (steps) */
  uint64_t steps;
  uint64_t updated_below; /* in this step: elements from here on were handed to the optimizer */

  /* Of the pass under way. */
  void *batch;         /* tokens on the device */
  void **inputs;       /* layers + 1 of (rows, width) */
  void *x1;            /* between a block's halves, computed again */
  void *n, *q, *k, *a; /* of its first half, likewise */
  void *dx;            /* (rows, width): gradient of the input of what was done last */
} llama_t;

/* Elements of the parameters with their gaps; fits in 64 bits for any shape whose numbers are below 2^20. */
uint64_t llama_elements(const llama_shape_t *shape);

/* Registers the tensors; then draws parameters, and one batch of random tokens, which every step uses. The target of a
 * token is a function of it, so that the loss falls. Failures are in memory_error(). */
void llama_open(llama_t *llama, memory_t *memory, const llama_shape_t *shape, int rows, uint64_t steps, uint64_t seed);
/* After memory_close(), which waits for what still uses it. */
void llama_close(llama_t *llama);

/* One iteration: forward, backward, and each operator's update as soon as its gradients are written. Only queues. */
void llama_step(llama_t *llama, uint64_t step);

#endif
