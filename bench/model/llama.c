/* A stack of matrix products with the parameters of a LLaMA. SPDX-License-Identifier: Apache-2.0 */
#include "model/llama.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* A block's tensors, in their order. */
enum { NORM1, Q, K, V, O, NORM2, GATE, UP, DOWN, BLOCK_TENSORS };
enum { EMBEDDING = 0, FIRST_BLOCK = 1 };
enum { ATTENTION_TENSORS = NORM2, MLP_TENSORS = BLOCK_TENSORS - NORM2 };

static int block_tensor(int layer, int which) { return FIRST_BLOCK + layer * BLOCK_TENSORS + which; }

/* ---- Setting up ---- */

typedef struct tensor_shape {
  const char *name;
  uint64_t elements;
  float scale, offset; /* of its first values */
} tensor_shape_t;

/* Uniform, with deviation 1 / sqrt(inputs); those into the residual stream smaller by sqrt(2 layers). */
static tensor_shape_t tensor_shape(const llama_shape_t *s, int which) {
  static const char *const names[BLOCK_TENSORS] = { "norm1", "q", "k", "v", "o", "norm2", "gate", "up", "down" };
  uint64_t width = (uint64_t)s->width, hidden = (uint64_t)s->hidden;
  float narrow = sqrtf(3.0f / (float)s->width), residual = 1.0f / sqrtf(2.0f * (float)s->layers);
  switch (which) {
  case NORM1:
  case NORM2: return (tensor_shape_t){ names[which], width, 0, 1 };
  case O: return (tensor_shape_t){ names[which], width * width, narrow * residual, 0 };
  case GATE:
  case UP: return (tensor_shape_t){ names[which], hidden * width, narrow, 0 };
  case DOWN: return (tensor_shape_t){ names[which], width * hidden, sqrtf(3.0f / (float)s->hidden) * residual, 0 };
  default: return (tensor_shape_t){ names[which], width * width, narrow, 0 };
  }
}
static tensor_shape_t embedding_shape(const llama_shape_t *s) {
  return (tensor_shape_t){ "embedding", (uint64_t)s->vocabulary * (uint64_t)s->width, sqrtf(3.0f), 0 };
}
static tensor_shape_t final_shape(const llama_shape_t *s, bool head) {
  uint64_t width = (uint64_t)s->width;
  if (!head) return (tensor_shape_t){ "norm", width, 0, 1 };
  return (tensor_shape_t){ "head", (uint64_t)s->vocabulary * width, sqrtf(3.0f / (float)width), 0 };
}

static uint64_t aligned(uint64_t elements) { return (elements + 255) / 256 * 256; }

uint64_t llama_elements(const llama_shape_t *shape) {
  uint64_t block = 0;
  for (int i = 0; i < BLOCK_TENSORS; i++) block += aligned(tensor_shape(shape, i).elements);
  return aligned(embedding_shape(shape).elements) + (uint64_t)shape->layers * block +
         aligned(final_shape(shape, false).elements) + final_shape(shape, true).elements;
}

/* SplitMix64. */
static uint64_t random_next(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

/* Where the parts of the batch begin. */
static uint64_t batch_integers(const llama_t *l) { return 3 * (uint64_t)l->rows + (uint64_t)l->shape.vocabulary + 1; }
static int32_t *batch_targets(const llama_t *l, void *batch) { return (int32_t *)batch + l->rows; }
static int32_t *batch_first(const llama_t *l, void *batch) { return (int32_t *)batch + 2 * (size_t)l->rows; }
static int32_t *batch_where(const llama_t *l, void *batch) {
  return batch_first(l, batch) + (size_t)l->shape.vocabulary + 1;
}

static void draw_batch(llama_t *l, uint64_t seed) {
  uint64_t random = seed ^ UINT64_C(0x70cea5);
  int32_t *first = batch_first(l, l->tokens), *where = batch_where(l, l->tokens);
  int vocabulary = l->shape.vocabulary;
  for (int t = 0; t <= vocabulary; t++) first[t] = 0;
  for (int r = 0; r < l->rows; r++) {
    int32_t token = (int32_t)(random_next(&random) % (uint64_t)vocabulary);
    l->tokens[r] = token;
    batch_targets(l, l->tokens)[r] = (int32_t)((7 * (int64_t)token + 3) % vocabulary);
    first[token]++;
  }
  int32_t sum = 0; /* counts become the first place of each token, then, as places are given out, of the next one */
  for (int t = 0; t <= vocabulary; t++) {
    int32_t count = first[t];
    first[t] = sum;
    sum += count;
  }
  for (int r = 0; r < l->rows; r++) where[first[l->tokens[r]]++] = r;
  for (int t = vocabulary; t > 0; t--) first[t] = first[t - 1];
  first[0] = 0;
}

void llama_open(llama_t *l, memory_t *memory, const llama_shape_t *shape, int rows, uint64_t steps, uint64_t seed) {
  *l = (llama_t){ .memory = memory, .shape = *shape, .rows = rows, .steps = steps };
  char name[64];
  int count = FIRST_BLOCK + shape->layers * BLOCK_TENSORS + 2;
  tensor_shape_t *shapes = calloc((size_t)count, sizeof *shapes);
  walk_t *walks = calloc((size_t)count, sizeof *walks);
  l->updates = calloc(steps, sizeof *l->updates);
  l->inputs = calloc((size_t)shape->layers + 1, sizeof *l->inputs);
  if (shapes == NULL || walks == NULL || l->updates == NULL || l->inputs == NULL) {
    snprintf(name, sizeof name, "out of memory for the records of %d tensors", count);
    memory_fail(memory, name);
    free(shapes);
    free(walks);
    return;
  }
  shapes[0] = embedding_shape(shape);
  for (int layer = 0; layer < shape->layers; layer++) {
    for (int i = 0; i < BLOCK_TENSORS; i++) shapes[block_tensor(layer, i)] = tensor_shape(shape, i);
  }
  l->final_tensors = block_tensor(shape->layers, 0);
  shapes[l->final_tensors] = final_shape(shape, false);
  shapes[l->final_tensors + 1] = final_shape(shape, true);
  for (int i = 0; i < count; i++) {
    bool block = i >= FIRST_BLOCK && i < l->final_tensors;
    if (block) {
      snprintf(name, sizeof name, "block%d.%s", (i - FIRST_BLOCK) / BLOCK_TENSORS, shapes[i].name);
    } else {
      snprintf(name, sizeof name, "%s", shapes[i].name);
    }
    memory_register(memory, name, shapes[i].elements);
  }
  memory_ready(memory);
  l->tokens = memory_host_alloc(memory, batch_integers(l) * sizeof(int32_t));
  l->losses = memory_host_alloc(memory, steps * sizeof *l->losses);
  if (!memory->failed) draw_batch(l, seed);
  for (int i = 0; i < count && !memory->failed; i++) {
    const memory_tensor_t *tensor = &memory->tensors[i];
    walks[i].task.kind = TASK_FILL;
    walks[i].task.with.fill =
        (task_fill_t){ seed * 1000003 + (uint64_t)i, tensor->first_element, shapes[i].scale, shapes[i].offset };
    walk_range(memory, &walks[i], tensor->first_element, tensor->elements);
  }
  memory_update_wait(memory); /* also after a failure: walks are used until then */
  memory_synchronize(memory);
  free(shapes);
  free(walks);
}

void llama_close(llama_t *l) {
  free(l->updates);
  free(l->inputs);
}

/* ---- Tasks ---- */

static uint64_t matrix_bytes(const llama_t *l, int width) { return (uint64_t)l->rows * (uint64_t)width * 2; }
static void *alloc_rows(llama_t *l, int width) { return memory_alloc(l->memory, matrix_bytes(l, width)); }

static void gemm(llama_t *l, gpu_gemm_t g) {
  g.alpha = 1;
  g.inputs = g.output = GPU_BF16;
  task_t task = { .kind = TASK_GEMM, .gemm = g };
  walk_queue(l->memory, &task);
}
/* y (rows, out) = x (rows, in) weight (out, in)^T, added to what y holds when add. */
static void linear(llama_t *l, const void *x, const void *weight, void *y, int in, int out, bool add) {
  gemm(l, (gpu_gemm_t){ .m = l->rows,
                        .n = out,
                        .k = in,
                        .b_transposed = true,
                        .beta = add ? 1.0f : 0.0f,
                        .a = x,
                        .b = weight,
                        .c = y,
                        .lda = in,
                        .ldb = in,
                        .ldc = out });
}
/* dx (rows, in) = dy (rows, out) weight (out, in), likewise. */
static void linear_gradient(llama_t *l, const void *dy, const void *weight, void *dx, int in, int out, bool add) {
  gemm(l, (gpu_gemm_t){ .m = l->rows,
                        .n = in,
                        .k = out,
                        .beta = add ? 1.0f : 0.0f,
                        .a = dy,
                        .b = weight,
                        .c = dx,
                        .lda = out,
                        .ldb = in,
                        .ldc = in });
}
/* dweight (out, in) = dy (rows, out)^T x (rows, in). */
static void linear_weight(llama_t *l, const void *dy, const void *x, void *dweight, int in, int out) {
  gemm(l, (gpu_gemm_t){ .m = out,
                        .n = in,
                        .k = l->rows,
                        .a_transposed = true,
                        .a = dy,
                        .b = x,
                        .c = dweight,
                        .lda = out,
                        .ldb = in,
                        .ldc = in });
}
static void copy(llama_t *l, void *to, const void *from, uint64_t bytes) {
  task_t task = { .kind = TASK_COPY, .in = { from }, .out = { to }, .count = bytes };
  walk_queue(l->memory, &task);
}
static void *norm(llama_t *l, const void *x, const void *weight) {
  void *y = alloc_rows(l, l->shape.width);
  task_t task = { .kind = TASK_NORM, .rows = l->rows, .width = l->shape.width, .in = { x, weight }, .out = { y } };
  walk_queue(l->memory, &task);
  return y;
}
/* The gradient of x, with that of the residual path, which may be NULL, added. scales_out: for norm_weight(). */
static void *norm_gradient(llama_t *l, const void *x, const void *weight, const void *dy, const void *dresidual,
                           void **scales_out) {
  void *dx = alloc_rows(l, l->shape.width);
  *scales_out = memory_alloc(l->memory, (uint64_t)l->rows * sizeof(float));
  task_t task = { .kind = TASK_NORM_GRADIENT,
                  .rows = l->rows,
                  .width = l->shape.width,
                  .in = { x, weight, dy, dresidual },
                  .out = { dx, *scales_out } };
  walk_queue(l->memory, &task);
  return dx;
}
/* Frees scales. */
static void norm_weight(llama_t *l, const void *x, const void *dy, void *scales, void *dweight) {
  void *workspace = memory_alloc(l->memory, task_norm_floats(l->rows, l->shape.width) * sizeof(float));
  task_t task = { .kind = TASK_NORM_WEIGHT,
                  .rows = l->rows,
                  .width = l->shape.width,
                  .in = { x, dy, scales },
                  .out = { dweight, workspace } };
  walk_queue(l->memory, &task);
  memory_free(l->memory, workspace);
  memory_free(l->memory, scales);
}
static void gate(llama_t *l, const void *g, const void *u, const void *v, void *y, int width) {
  task_t task = { .kind = TASK_GATE, .count = (uint64_t)l->rows * (uint64_t)width, .in = { g, u, v }, .out = { y } };
  walk_queue(l->memory, &task);
}
static void gate_gradient(llama_t *l, const void *dy, void *g, void *u, int width) {
  task_t task = {
    .kind = TASK_GATE_GRADIENT, .count = (uint64_t)l->rows * (uint64_t)width, .in = { dy }, .out = { g, u }
  };
  walk_queue(l->memory, &task);
}

/* ---- Forward ---- */

static void op_begin(llama_t *l, const char *what, int layer) {
  char name[64];
  if (layer >= 0) {
    snprintf(name, sizeof name, "block %d %s", layer, what);
  } else {
    snprintf(name, sizeof name, "%s", what);
  }
  memory_op_begin(l->memory, name);
}

static void embed(llama_t *l) {
  void *table;
  op_begin(l, "embed", -1);
  uint64_t bytes = batch_integers(l) * sizeof(int32_t);
  l->batch = memory_alloc(l->memory, bytes);
  copy(l, l->batch, l->tokens, bytes);
  l->inputs[0] = alloc_rows(l, l->shape.width);
  memory_acquire(l->memory, GEMINI_KIND_PARAM, GEMINI_READ, EMBEDDING, 1, &table);
  task_t task = {
    .kind = TASK_EMBED, .rows = l->rows, .width = l->shape.width, .in = { table, l->batch }, .out = { l->inputs[0] }
  };
  walk_queue(l->memory, &task);
  memory_release(l->memory, GEMINI_KIND_PARAM, EMBEDDING, 1);
  memory_op_end(l->memory);
}

/* The first half of a block. keep: n, q, k and a stay, for the backward pass. */
static void attention(llama_t *l, int layer, bool keep) {
  int width = l->shape.width;
  void *w[ATTENTION_TENSORS];
  op_begin(l, keep ? "attention again" : "attention", layer);
  memory_acquire(l->memory, GEMINI_KIND_PARAM, GEMINI_READ, block_tensor(layer, NORM1), ATTENTION_TENSORS, w);
  void *n = norm(l, l->inputs[layer], w[NORM1]);
  void *q = alloc_rows(l, width), *k = alloc_rows(l, width), *a = alloc_rows(l, width);
  linear(l, n, w[Q], q, width, width, false);
  linear(l, n, w[K], k, width, width, false);
  linear(l, n, w[V], a, width, width, false);
  gate(l, q, k, a, a, width);
  l->x1 = alloc_rows(l, width);
  copy(l, l->x1, l->inputs[layer], matrix_bytes(l, width));
  linear(l, a, w[O], l->x1, width, width, true);
  memory_release(l->memory, GEMINI_KIND_PARAM, block_tensor(layer, NORM1), ATTENTION_TENSORS);
  if (keep) {
    l->n = n, l->q = q, l->k = k, l->a = a;
  } else {
    memory_free(l->memory, n);
    memory_free(l->memory, q);
    memory_free(l->memory, k);
    memory_free(l->memory, a);
  }
  memory_op_end(l->memory);
}

/* The second half; its output is the next block's input. */
static void mlp(llama_t *l, int layer) {
  int width = l->shape.width, hidden = l->shape.hidden;
  void *w[MLP_TENSORS];
  op_begin(l, "mlp", layer);
  memory_acquire(l->memory, GEMINI_KIND_PARAM, GEMINI_READ, block_tensor(layer, NORM2), MLP_TENSORS, w);
  void *n = norm(l, l->x1, w[0]);
  void *g = alloc_rows(l, hidden), *u = alloc_rows(l, hidden);
  linear(l, n, w[GATE - NORM2], g, width, hidden, false);
  linear(l, n, w[UP - NORM2], u, width, hidden, false);
  gate(l, g, u, NULL, g, hidden);
  linear(l, g, w[DOWN - NORM2], l->x1, hidden, width, true);
  memory_release(l->memory, GEMINI_KIND_PARAM, block_tensor(layer, NORM2), MLP_TENSORS);
  memory_free(l->memory, n);
  memory_free(l->memory, g);
  memory_free(l->memory, u);
  l->inputs[layer + 1] = l->x1;
  l->x1 = NULL;
  memory_op_end(l->memory);
}

/* ---- Backward ---- */

/* The gradients of tensors first, first + 1, ... are written, up to those that were handed to the optimizer before. */
static void update(llama_t *l, uint64_t step, int first) {
  uint64_t begin = l->memory->failed ? 0 : l->memory->tensors[first].first_element;
  walk_range(l->memory, &l->updates[step], begin, l->updated_below - begin);
  l->updated_below = begin;
}

static void head(llama_t *l, uint64_t step) {
  int width = l->shape.width, vocabulary = l->shape.vocabulary;
  void *w[2], *x = l->inputs[l->shape.layers], *scales;
  op_begin(l, "head", -1);
  memory_acquire(l->memory, GEMINI_KIND_PARAM, GEMINI_READ, l->final_tensors, 2, w);
  void *n = norm(l, x, w[0]), *logits = alloc_rows(l, vocabulary);
  void *losses = memory_alloc(l->memory, (uint64_t)l->rows * sizeof(float));
  void *mean = memory_alloc(l->memory, sizeof(double));
  linear(l, n, w[1], logits, width, vocabulary, false);
  task_t loss = { .kind = TASK_LOSS,
                  .rows = l->rows,
                  .width = vocabulary,
                  .in = { l->batch != NULL ? batch_targets(l, l->batch) : NULL },
                  .out = { logits, losses } };
  walk_queue(l->memory, &loss);
  task_t total = { .kind = TASK_LOSS_MEAN, .rows = l->rows, .in = { losses }, .out = { mean } };
  walk_queue(l->memory, &total);
  if (l->losses != NULL) copy(l, &l->losses[step], mean, sizeof(double));
  memory_free(l->memory, mean);
  memory_free(l->memory, losses);
  void *dn = alloc_rows(l, width);
  linear_gradient(l, logits, w[1], dn, width, vocabulary, false);
  l->dx = norm_gradient(l, x, w[0], dn, NULL, &scales);
  memory_release(l->memory, GEMINI_KIND_PARAM, l->final_tensors, 2);
  memory_acquire(l->memory, GEMINI_KIND_GRAD, GEMINI_WRITE, l->final_tensors, 2, w);
  linear_weight(l, logits, n, w[1], width, vocabulary);
  norm_weight(l, x, dn, scales, w[0]);
  memory_release(l->memory, GEMINI_KIND_GRAD, l->final_tensors, 2);
  memory_free(l->memory, logits);
  memory_free(l->memory, n);
  memory_free(l->memory, dn);
  memory_free(l->memory, x);
  memory_op_end(l->memory);
  update(l, step, l->final_tensors);
}

static void mlp_backward(llama_t *l, uint64_t step, int layer) {
  int width = l->shape.width, hidden = l->shape.hidden, first = block_tensor(layer, NORM2);
  void *w[MLP_TENSORS], *scales;
  op_begin(l, "mlp backward", layer);
  memory_acquire(l->memory, GEMINI_KIND_PARAM, GEMINI_READ, first, MLP_TENSORS, w);
  void *n = norm(l, l->x1, w[0]);
  void *g = alloc_rows(l, hidden), *u = alloc_rows(l, hidden), *h = alloc_rows(l, hidden);
  linear(l, n, w[GATE - NORM2], g, width, hidden, false);
  linear(l, n, w[UP - NORM2], u, width, hidden, false);
  gate(l, g, u, NULL, h, hidden);
  void *dh = alloc_rows(l, hidden);
  linear_gradient(l, l->dx, w[DOWN - NORM2], dh, hidden, width, false);
  gate_gradient(l, dh, g, u, hidden); /* g and u are their gradients from here on */
  memory_free(l->memory, dh);
  void *dn = alloc_rows(l, width);
  linear_gradient(l, g, w[GATE - NORM2], dn, width, hidden, false);
  linear_gradient(l, u, w[UP - NORM2], dn, width, hidden, true);
  void *dx1 = norm_gradient(l, l->x1, w[0], dn, l->dx, &scales);
  memory_release(l->memory, GEMINI_KIND_PARAM, first, MLP_TENSORS);
  memory_acquire(l->memory, GEMINI_KIND_GRAD, GEMINI_WRITE, first, MLP_TENSORS, w);
  linear_weight(l, l->dx, h, w[DOWN - NORM2], hidden, width);
  linear_weight(l, g, n, w[GATE - NORM2], width, hidden);
  linear_weight(l, u, n, w[UP - NORM2], width, hidden);
  norm_weight(l, l->x1, dn, scales, w[0]);
  memory_release(l->memory, GEMINI_KIND_GRAD, first, MLP_TENSORS);
  memory_free(l->memory, n);
  memory_free(l->memory, g);
  memory_free(l->memory, u);
  memory_free(l->memory, h);
  memory_free(l->memory, dn);
  memory_free(l->memory, l->dx);
  memory_free(l->memory, l->x1);
  l->dx = dx1;
  l->x1 = NULL;
  memory_op_end(l->memory);
  update(l, step, first);
}

static void attention_backward(llama_t *l, uint64_t step, int layer) {
  int width = l->shape.width, first = block_tensor(layer, NORM1);
  void *w[ATTENTION_TENSORS], *scales, *x = l->inputs[layer];
  op_begin(l, "attention backward", layer);
  memory_acquire(l->memory, GEMINI_KIND_PARAM, GEMINI_READ, first, ATTENTION_TENSORS, w);
  void *da = alloc_rows(l, width), *dn = alloc_rows(l, width);
  linear_gradient(l, l->dx, w[O], da, width, width, false); /* also v's */
  gate_gradient(l, da, l->q, l->k, width);                  /* q and k are their gradients from here on */
  linear_gradient(l, l->q, w[Q], dn, width, width, false);
  linear_gradient(l, l->k, w[K], dn, width, width, true);
  linear_gradient(l, da, w[V], dn, width, width, true);
  void *dx = norm_gradient(l, x, w[NORM1], dn, l->dx, &scales);
  memory_release(l->memory, GEMINI_KIND_PARAM, first, ATTENTION_TENSORS);
  memory_acquire(l->memory, GEMINI_KIND_GRAD, GEMINI_WRITE, first, ATTENTION_TENSORS, w);
  linear_weight(l, l->dx, l->a, w[O], width, width);
  linear_weight(l, l->q, l->n, w[Q], width, width);
  linear_weight(l, l->k, l->n, w[K], width, width);
  linear_weight(l, da, l->n, w[V], width, width);
  norm_weight(l, x, dn, scales, w[NORM1]);
  memory_release(l->memory, GEMINI_KIND_GRAD, first, ATTENTION_TENSORS);
  memory_free(l->memory, da);
  memory_free(l->memory, dn);
  memory_free(l->memory, l->n);
  memory_free(l->memory, l->q);
  memory_free(l->memory, l->k);
  memory_free(l->memory, l->a);
  memory_free(l->memory, l->dx);
  memory_free(l->memory, x);
  l->dx = dx;
  memory_op_end(l->memory);
  update(l, step, first);
}

static void embed_backward(llama_t *l, uint64_t step) {
  void *w;
  op_begin(l, "embed backward", -1);
  memory_acquire(l->memory, GEMINI_KIND_GRAD, GEMINI_WRITE, EMBEDDING, 1, &w);
  if (l->batch != NULL) {
    task_t task = { .kind = TASK_EMBED_GRADIENT,
                    .rows = l->shape.vocabulary,
                    .width = l->shape.width,
                    .in = { l->dx, batch_first(l, l->batch), batch_where(l, l->batch) },
                    .out = { w } };
    walk_queue(l->memory, &task);
  }
  memory_release(l->memory, GEMINI_KIND_GRAD, EMBEDDING, 1);
  memory_free(l->memory, l->dx);
  memory_free(l->memory, l->batch);
  memory_op_end(l->memory);
  update(l, step, EMBEDDING);
}

void llama_step(llama_t *l, uint64_t step) {
  l->updated_below = l->memory->elements;
  gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
  adamw.step = step + 1;
  adamw.lr = 3e-4;
  adamw.beta2 = 0.95;
  adamw.weight_decay = 0.1;
  l->updates[step].task = (task_t){ .kind = TASK_ADAMW, .with.adamw = adamw };
  memory_iteration_begin(l->memory);
  memory_phase(l->memory, GEMINI_PHASE_FORWARD);
  embed(l);
  for (int layer = 0; layer < l->shape.layers; layer++) {
    attention(l, layer, false);
    mlp(l, layer);
  }
  memory_phase(l->memory, GEMINI_PHASE_BACKWARD);
  head(l, step);
  for (int layer = l->shape.layers - 1; layer >= 0; layer--) {
    attention(l, layer, true);
    mlp_backward(l, step, layer);
    attention_backward(l, step, layer);
  }
  embed_backward(l, step);
  memory_iteration_end(l->memory);
}
