/* A GPT whose operators use memory_t: each is bracketed, acquires tensors, allocates activations, queues work,
 * releases.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Learned token and position embeddings; blocks of layer norm, causal attention, layer norm, and an MLP with GELU, four
 * times as wide; a final layer norm; a head tied to the token embedding. Every block is checkpointed: the forward pass
 * keeps only each block's input, and the backward pass recomputes the block.
 *
 * One step, between memory_iteration_begin() and memory_iteration_end():
 *   model_embed(), model_block() for each block upwards, model_head(),
 *   model_block_backward() for each block downwards, model_embed_backward().
 * Without the backward pass: model_head() with with_gradient 0, then model_drop(). */
#ifndef EXAMPLES_GPT_MODEL_H
#define EXAMPLES_GPT_MODEL_H

#include <stdint.h>

#include "memory.h"
#include "model/gpt_operators.h"

enum { MODEL_LAYERS_MAX = 1024, MODEL_WIDTH_MAX = 65536, MODEL_CONTEXT_MAX = 65536, MODEL_BATCH_MAX = 4096 };

typedef struct model_shape {
  int layers, width, heads; /* width is a multiple of heads */
  int positions;            /* longest context */
} model_shape_t;

/* A block's tensors, in the order in which its forward pass uses them. */
enum {
  MODEL_LN1_WEIGHT,
  MODEL_LN1_BIAS, /* (W) */
  MODEL_QKV_WEIGHT,
  MODEL_QKV_BIAS, /* (3W, W), (3W) */
  MODEL_PROJ_WEIGHT,
  MODEL_PROJ_BIAS, /* (W, W), (W) */
  MODEL_LN2_WEIGHT,
  MODEL_LN2_BIAS,
  MODEL_FC_WEIGHT,
  MODEL_FC_BIAS, /* (4W, W), (4W) */
  MODEL_FC2_WEIGHT,
  MODEL_FC2_BIAS, /* (W, 4W), (W) */
  MODEL_BLOCK_TENSORS
};

/* Indices of tensors in memory_t, in this order: wte, wpe, those of the blocks, ln_f.weight, ln_f.bias. */
enum { MODEL_WTE = 0, MODEL_WPE = 1, MODEL_FIRST_BLOCK = 2 };
static inline int model_block_tensor(int layer, int which) {
  return MODEL_FIRST_BLOCK + layer * MODEL_BLOCK_TENSORS + which;
}

typedef struct model {
  memory_t *memory; /* borrowed */
  const gpt_operators_t *operators;
  model_shape_t shape;

  /* State of the current pass; the pointers come from memory_alloc(). */
  int batch, context;
  int32_t *tokens;  /* (B, C) */
  int32_t *targets; /* (B, C) */
  float **inputs;   /* layers + 1 of (B, C, W): each block's input, then the head's; NULL for a skipped block */
  float *dx;        /* (B, C, W): gradient of the input of the operator that ran last in the backward pass */
  float *dwte;      /* (V, W): the head's part of the token embedding's gradient */
} model_t;

/* Elements of all tensors, with the gaps between them; equals memory->elements after model_open(). Fits in 64 bits for
 * any legal shape. */
uint64_t model_elements(const model_shape_t *shape);

/* Registers the tensors. False when out of memory; memory_error() tells of failures of the library. */
bool model_open(model_t *model, memory_t *memory, const gpt_operators_t *operators, const model_shape_t *shape);
void model_close(model_t *model);
/* Initializes as GPT-2 does: weights are normal with deviation 0.02, divided by sqrt(2 layers) for those that add to
 * the residual stream; biases are 0, norms 1. The master gets the drawn value, the parameter the same value rounded. */
void model_initialise(model_t *model, uint64_t seed);
/* gpt_hash() of the masters' bytes, tensor after tensor. This process must keep all of them. */
uint64_t model_hash(model_t *model);

/* @param host_tokens (B, C + 1): each row holds the inputs, and shifted by one, the targets; borrowed until
 *                    memory_synchronize(); memory of the device's host_alloc(), as is loss of model_head() */
void model_embed(model_t *model, int batch, int context, const int32_t *host_tokens);
void model_block(model_t *model, int layer);
/* Passes the input through, as if the block did not exist; the caller then skips the block's backward pass, too. */
void model_block_skip(model_t *model, int layer);
/* What follows in the backward pass of such a block: its gradients are zero. */
void model_block_skip_backward(model_t *model, int layer);
/* Computes the loss and, if with_gradient, the head's backward pass. loss: valid after memory_synchronize(). */
void model_head(model_t *model, int with_gradient, double *loss);
void model_block_backward(model_t *model, int layer);
void model_embed_backward(model_t *model);
/* Frees the activations that a forward pass has kept, when no backward pass follows. */
void model_drop(model_t *model);

#endif
