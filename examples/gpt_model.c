/* The GPT's operators: each acquires its tensors, allocates its activations, queues its work and releases.
 * SPDX-License-Identifier: Apache-2.0 */
#include "gpt_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- Tensors ---- */

typedef struct tensor_shape {
  const char *name;
  int rows, columns; /* in multiples of the width; 0: one element */
  float deviation;   /* of the initial values; 0: all equal to fill */
  float fill;
  int residual; /* the weight's product is added to the residual stream, so its initial values are smaller */
} tensor_shape_t;

static const tensor_shape_t block_tensors[MODEL_BLOCK_TENSORS] = {
  { "ln_1.weight", 0, 1, 0, 1, 0 },          { "ln_1.bias", 0, 1, 0, 0, 0 },
  { "attn.qkv.weight", 3, 1, 0.02f, 0, 0 },  { "attn.qkv.bias", 0, 3, 0, 0, 0 },
  { "attn.proj.weight", 1, 1, 0.02f, 0, 1 }, { "attn.proj.bias", 0, 1, 0, 0, 0 },
  { "ln_2.weight", 0, 1, 0, 1, 0 },          { "ln_2.bias", 0, 1, 0, 0, 0 },
  { "mlp.fc.weight", 4, 1, 0.02f, 0, 0 },    { "mlp.fc.bias", 0, 4, 0, 0, 0 },
  { "mlp.fc2.weight", 1, 4, 0.02f, 0, 1 },   { "mlp.fc2.bias", 0, 1, 0, 0, 0 },
};

static uint64_t block_tensor_elements(const model_shape_t *shape, int which) {
  const tensor_shape_t *tensor = &block_tensors[which];
  uint64_t width = (uint64_t)shape->width;
  return (tensor->rows == 0 ? 1 : (uint64_t)tensor->rows * width) * (uint64_t)tensor->columns * width;
}

static uint64_t with_gap(uint64_t elements) { return (elements + 255) / 256 * 256; }

uint64_t model_elements(const model_shape_t *shape) {
  uint64_t width = (uint64_t)shape->width, block = 0;
  for (int which = 0; which < MODEL_BLOCK_TENSORS; which++) block += with_gap(block_tensor_elements(shape, which));
  /* Tensors are aligned, so a gap may follow each of them but the last. */
  return with_gap(GPT_VOCABULARY * width) + with_gap((uint64_t)shape->positions * width) +
         (uint64_t)shape->layers * block + with_gap(width) + width;
}

bool model_open(model_t *model, memory_t *memory, const gpt_operators_t *operators, const model_shape_t *shape) {
  uint64_t width = (uint64_t)shape->width;
  *model = (model_t){ .memory = memory, .operators = operators, .shape = *shape };
  model->inputs = calloc((size_t)shape->layers + 1, sizeof *model->inputs);
  if (model->inputs == NULL) return false;
  memory_register(memory, "wte.weight", GPT_VOCABULARY * width);
  memory_register(memory, "wpe.weight", (uint64_t)shape->positions * width);
  for (int layer = 0; layer < shape->layers; layer++) {
    for (int which = 0; which < MODEL_BLOCK_TENSORS; which++) {
      char name[64];
      snprintf(name, sizeof name, "h.%d.%s", layer, block_tensors[which].name);
      memory_register(memory, name, block_tensor_elements(shape, which));
    }
  }
  memory_register(memory, "ln_f.weight", width);
  memory_register(memory, "ln_f.bias", width);
  return true;
}

void model_close(model_t *model) {
  free(model->inputs);
  model->inputs = NULL;
}

static int final_norm_tensor(const model_t *model) { return model_block_tensor(model->shape.layers, 0); }

static float draw(float deviation, float value, uint64_t *random) {
  return deviation > 0 ? deviation * gpt_random_normal(random) : value;
}

/* Every rank draws the values of all elements, and writes those that it keeps. */
static void fill(model_t *model, int tensor, float deviation, float value, uint64_t *random) {
  memory_t *memory = model->memory;
  uint64_t at = 0, first, count;
  for (; memory_part_next(memory, tensor, at, &first, &count); at = first + count) {
    for (; at < first; at++) draw(deviation, value, random);
    float *master = memory_host_acquire_part(memory, GEMINI_KIND_MASTER, GEMINI_WRITE, tensor, first, count);
    uint16_t *parameter = memory_host_acquire_part(memory, GEMINI_KIND_PARAM, GEMINI_WRITE, tensor, first, count);
    if (memory_error(memory) != NULL) return;
    for (uint64_t i = 0; i < count; i++) {
      master[i] = draw(deviation, value, random);
      parameter[i] = gpt_bf16_from_f32(master[i]);
    }
    memory_host_release(memory, GEMINI_KIND_PARAM, tensor);
    memory_host_release(memory, GEMINI_KIND_MASTER, tensor);
  }
  for (; at < memory->tensors[tensor].elements; at++) draw(deviation, value, random);
}

void model_initialise(model_t *model, uint64_t seed) {
  uint64_t random = seed;
  fill(model, MODEL_WTE, 0.02f, 0, &random);
  fill(model, MODEL_WPE, 0.02f, 0, &random);
  float residual_scale = 1.0f / sqrtf(2.0f * (float)model->shape.layers);
  for (int layer = 0; layer < model->shape.layers; layer++) {
    for (int which = 0; which < MODEL_BLOCK_TENSORS; which++) {
      const tensor_shape_t *tensor = &block_tensors[which];
      float deviation = tensor->residual ? tensor->deviation * residual_scale : tensor->deviation;
      fill(model, model_block_tensor(layer, which), deviation, tensor->fill, &random);
    }
  }
  fill(model, final_norm_tensor(model), 0, 1, &random);
  fill(model, final_norm_tensor(model) + 1, 0, 0, &random);
}

uint64_t model_hash(model_t *model) {
  memory_t *memory = model->memory;
  uint64_t hash = GPT_HASH_START;
  for (int tensor = 0; tensor < memory->tensor_count; tensor++) {
    const float *master = memory_host_acquire(memory, GEMINI_KIND_MASTER, GEMINI_READ, tensor);
    if (memory_error(memory) != NULL) return 0;
    hash = gpt_hash(hash, master, memory->tensors[tensor].elements * sizeof *master);
    memory_host_release(memory, GEMINI_KIND_MASTER, tensor);
  }
  return hash;
}

/* ---- Parts of operators ---- */

/* Queues the operator of gpt.h with this name; the initializers of its argument struct follow. */
#define CALL(model, name, type, ...) \
  memory_queue((model)->memory, (model)->operators->name, &(type){ __VA_ARGS__ }, sizeof(type))

static float *alloc_floats(model_t *model, uint64_t count) {
  return memory_alloc(model->memory, count * sizeof(float));
}
static int rows_of(const model_t *model) { return model->batch * model->context; }
/* Allocates activations of shape (B, C, columns * W). */
static float *alloc_rows(model_t *model, int columns) {
  return alloc_floats(model, (uint64_t)rows_of(model) * (uint64_t)columns * (uint64_t)model->shape.width);
}
static uint64_t panel_floats(const model_t *model) { return model->operators->panel_floats(model->shape.width); }
static uint64_t attention_floats(const model_t *model) {
  return model->operators->attention_floats(model->context, model->shape.heads);
}
/* Allocates workspace; NULL where the device's operators need none. */
static void *alloc_workspace(model_t *model, uint64_t floats) {
  return floats == 0 ? NULL : alloc_floats(model, floats);
}

static void norm(model_t *model, const float *x, void *const *weight_and_bias, float *y) {
  CALL(model, norm_forward, gpt_norm_t, .rows = rows_of(model), .width = model->shape.width, .x = x,
       .weight = weight_and_bias[0], .bias = weight_and_bias[1], .y = y);
}

/* dx += gradient of the norm's input, from dy. Then releases weight and bias as parameters and writes their gradients,
 * which take the same bytes. */
static void norm_backward(model_t *model, const float *x, int tensor, void *const *weight_and_bias, const float *dy,
                          float *dx) {
  memory_t *memory = model->memory;
  uint64_t width = (uint64_t)model->shape.width;
  float *dweight = alloc_floats(model, 2 * width), *dbias = dweight == NULL ? NULL : dweight + width;
  float *workspace = alloc_workspace(model, model->operators->norm_floats(rows_of(model)));
  CALL(model, norm_backward, gpt_norm_gradient_t, .rows = rows_of(model), .width = model->shape.width, .x = x,
       .weight = weight_and_bias[0], .dy = dy, .dx = dx, .dweight = dweight, .dbias = dbias, .workspace = workspace);
  memory_free(memory, workspace);
  memory_release(memory, GEMINI_KIND_PARAM, tensor, 2);
  void *gradients[2];
  memory_acquire(memory, GEMINI_KIND_GRAD, GEMINI_WRITE, tensor, 2, gradients);
  CALL(model, store, gpt_store_t, .count = width, .from = dweight, .to = gradients[0]);
  CALL(model, store, gpt_store_t, .count = width, .from = dbias, .to = gradients[1]);
  memory_release(memory, GEMINI_KIND_GRAD, tensor, 2);
  memory_free(memory, dweight);
}

/* in and out are in multiples of the width. */
static void linear(model_t *model, int in, int out, const float *x, void *const *weight_and_bias, const float *residual,
                   float *y, float *workspace) {
  CALL(model, linear_forward, gpt_linear_t, .rows = rows_of(model), .in = in * model->shape.width,
       .out = out * model->shape.width, .x = x, .weight = weight_and_bias[0], .bias = weight_and_bias[1],
       .residual = residual, .y = y, .workspace = workspace);
}

/* Computes the gradient of the input, which is the last use of the weight, and releases the parameter. */
static void linear_backward_x(model_t *model, int in, int out, const float *dy, int tensor,
                              void *const *weight_and_bias, float *dx, float *workspace) {
  CALL(model, linear_backward_x, gpt_linear_gradient_x_t, .rows = rows_of(model), .in = in * model->shape.width,
       .out = out * model->shape.width, .dy = dy, .weight = weight_and_bias[0], .dx = dx, .workspace = workspace);
  memory_release(model->memory, GEMINI_KIND_PARAM, tensor, 2);
}

/* Writes the gradients of weight and bias into the bytes of the parameters. */
static void linear_backward_weight(model_t *model, int in, int out, const float *x, const float *dy, int tensor,
                                   float *workspace) {
  void *gradients[2];
  memory_acquire(model->memory, GEMINI_KIND_GRAD, GEMINI_WRITE, tensor, 2, gradients);
  CALL(model, linear_backward_weight, gpt_linear_gradient_weight_t, .rows = rows_of(model),
       .in = in * model->shape.width, .out = out * model->shape.width, .x = x, .dy = dy, .dweight = gradients[0],
       .dbias = gradients[1], .workspace = workspace);
  memory_release(model->memory, GEMINI_KIND_GRAD, tensor, 2);
}

static void attention(model_t *model, const float *qkv, float *y) {
  float *workspace = alloc_floats(model, attention_floats(model));
  CALL(model, attention_forward, gpt_attention_t, .batch = model->batch, .context = model->context,
       .width = model->shape.width, .heads = model->shape.heads, .qkv = qkv, .y = y, .workspace = workspace);
  memory_free(model->memory, workspace);
}

static void op_begin(model_t *model, int layer, const char *pass) {
  char name[64];
  snprintf(name, sizeof name, "h.%d.%s", layer, pass);
  memory_op_begin(model->memory, name);
}

/* ---- Forward ---- */

void model_embed(model_t *model, int batch, int context, const int32_t *host_tokens) {
  memory_t *memory = model->memory;
  model->batch = batch;
  model->context = context;
  uint64_t row_bytes = (uint64_t)context * sizeof *host_tokens;
  memory_op_begin(memory, "embed");
  model->tokens = memory_alloc(memory, (uint64_t)batch * row_bytes);
  model->targets = memory_alloc(memory, (uint64_t)batch * row_bytes);
  for (int b = 0; b < batch && memory_error(memory) == NULL; b++) {
    const int32_t *row = host_tokens + (int64_t)b * (context + 1);
    CALL(model, copy, gpt_copy_t, .to = model->tokens + (int64_t)b * context, .from = row, .bytes = row_bytes);
    CALL(model, copy, gpt_copy_t, .to = model->targets + (int64_t)b * context, .from = row + 1, .bytes = row_bytes);
  }
  model->inputs[0] = alloc_rows(model, 1);
  void *tables[2];
  memory_acquire(memory, GEMINI_KIND_PARAM, GEMINI_READ, MODEL_WTE, 2, tables);
  CALL(model, embed_forward, gpt_embed_t, .batch = batch, .context = context, .width = model->shape.width,
       .positions = model->shape.positions, .tokens = model->tokens, .wte = tables[0], .wpe = tables[1],
       .x = model->inputs[0]);
  memory_release(memory, GEMINI_KIND_PARAM, MODEL_WTE, 2);
  memory_op_end(memory);
}

void model_block(model_t *model, int layer) {
  memory_t *memory = model->memory;
  const float *x = model->inputs[layer];
  void *p[MODEL_BLOCK_TENSORS];
  op_begin(model, layer, "fwd");
  memory_acquire(memory, GEMINI_KIND_PARAM, GEMINI_READ, model_block_tensor(layer, 0), MODEL_BLOCK_TENSORS, p);
  float *y = alloc_rows(model, 1);
  float *workspace = alloc_floats(model, panel_floats(model));
  float *n = alloc_rows(model, 1), *qkv = alloc_rows(model, 3);

  norm(model, x, p + MODEL_LN1_WEIGHT, n);
  linear(model, 1, 3, n, p + MODEL_QKV_WEIGHT, NULL, qkv, workspace);
  attention(model, qkv, n);
  linear(model, 1, 1, n, p + MODEL_PROJ_WEIGHT, x, y, workspace);
  memory_free(memory, qkv);

  norm(model, y, p + MODEL_LN2_WEIGHT, n);
  float *hidden = alloc_rows(model, 4);
  linear(model, 1, 4, n, p + MODEL_FC_WEIGHT, NULL, hidden, workspace);
  CALL(model, gelu_forward, gpt_gelu_t, .count = (uint64_t)rows_of(model) * 4 * (uint64_t)model->shape.width,
       .x = hidden, .y = hidden);
  linear(model, 4, 1, hidden, p + MODEL_FC2_WEIGHT, y, y, workspace);
  memory_free(memory, hidden);
  memory_free(memory, n);
  memory_free(memory, workspace);
  memory_release(memory, GEMINI_KIND_PARAM, model_block_tensor(layer, 0), MODEL_BLOCK_TENSORS);
  memory_op_end(memory);
  model->inputs[layer + 1] = y;
}

void model_block_skip(model_t *model, int layer) {
  model->inputs[layer + 1] = model->inputs[layer];
  model->inputs[layer] = NULL;
}

void model_block_skip_backward(model_t *model, int layer) {
  memory_gradients_ready(model->memory, model_block_tensor(layer, 0), MODEL_BLOCK_TENSORS);
}

/* ---- Head ---- */

void model_head(model_t *model, int with_gradient, double *loss) {
  memory_t *memory = model->memory;
  int width = model->shape.width, norm_tensor = final_norm_tensor(model);
  const float *x = model->inputs[model->shape.layers];
  memory_op_begin(memory, "head");
  void *wte, *p[2];
  memory_acquire(memory, GEMINI_KIND_PARAM, GEMINI_READ, norm_tensor, 2, p);
  memory_acquire(memory, GEMINI_KIND_PARAM, GEMINI_READ, MODEL_WTE, 1, &wte);
  float *n = alloc_rows(model, 1);
  float *logits = alloc_floats(model, (uint64_t)rows_of(model) * GPT_VOCABULARY);
  float *workspace = alloc_floats(model, panel_floats(model));

  norm(model, x, p, n);
  CALL(model, linear_forward, gpt_linear_t, .rows = rows_of(model), .in = width, .out = GPT_VOCABULARY, .x = n,
       .weight = wte, .y = logits, .workspace = workspace);
  double *losses = alloc_workspace(model, model->operators->loss_floats(rows_of(model)));
  CALL(model, loss, gpt_loss_t, .rows = rows_of(model), .targets = model->targets, .logits = logits,
       .with_gradient = with_gradient, .loss = loss, .workspace = losses);
  memory_free(memory, losses);
  if (with_gradient) {
    /* The token embedding's gradient has two parts: this one is kept until model_embed_backward() adds the other. */
    model->dwte = alloc_floats(model, (uint64_t)GPT_VOCABULARY * (uint64_t)width);
    CALL(model, linear_backward_weight, gpt_linear_gradient_weight_t, .rows = rows_of(model), .in = width,
         .out = GPT_VOCABULARY, .x = n, .dy = logits, .dweight_f32 = model->dwte, .workspace = workspace);
    CALL(model, linear_backward_x, gpt_linear_gradient_x_t, .rows = rows_of(model), .in = width, .out = GPT_VOCABULARY,
         .dy = logits, .weight = wte, .dx = n, .workspace = workspace);
    uint64_t dx_bytes = (uint64_t)rows_of(model) * (uint64_t)width * sizeof(float);
    model->dx = memory_alloc(memory, dx_bytes);
    CALL(model, zero, gpt_zero_t, .to = model->dx, .bytes = dx_bytes);
    norm_backward(model, x, norm_tensor, p, n, model->dx);
  } else {
    memory_release(memory, GEMINI_KIND_PARAM, norm_tensor, 2);
  }
  memory_release(memory, GEMINI_KIND_PARAM, MODEL_WTE, 1);
  memory_free(memory, workspace);
  memory_free(memory, logits);
  memory_free(memory, n);
  memory_free(memory, model->inputs[model->shape.layers]);
  model->inputs[model->shape.layers] = NULL;
  if (with_gradient) memory_gradients_ready(memory, norm_tensor, 2);
  memory_op_end(memory);
}

/* ---- Backward ---- */

void model_block_backward(model_t *model, int layer) {
  memory_t *memory = model->memory;
  int tensor = model_block_tensor(layer, 0);
  uint64_t hidden_count = (uint64_t)rows_of(model) * 4 * (uint64_t)model->shape.width;
  float *x = model->inputs[layer], *dx = model->dx; /* dx: of the block's output, and at the end of its input */
  void *p[MODEL_BLOCK_TENSORS];
  op_begin(model, layer, "bwd");
  memory_acquire(memory, GEMINI_KIND_PARAM, GEMINI_READ, tensor, MODEL_BLOCK_TENSORS, p);
  float *workspace = alloc_floats(model, panel_floats(model));

  /* Recompute the forward pass from the block's input, up to the MLP's hidden layer. */
  float *n = alloc_rows(model, 1), *qkv = alloc_rows(model, 3), *att = alloc_rows(model, 1),
        *mid = alloc_rows(model, 1);
  norm(model, x, p + MODEL_LN1_WEIGHT, n);
  linear(model, 1, 3, n, p + MODEL_QKV_WEIGHT, NULL, qkv, workspace);
  attention(model, qkv, att);
  linear(model, 1, 1, att, p + MODEL_PROJ_WEIGHT, x, mid, workspace);
  norm(model, mid, p + MODEL_LN2_WEIGHT, n);
  float *hidden = alloc_rows(model, 4);
  linear(model, 1, 4, n, p + MODEL_FC_WEIGHT, NULL, hidden, workspace);

  /* MLP: out = mid + fc2(gelu(hidden)), hidden = fc(norm(mid)). */
  float *dhidden = alloc_rows(model, 4);
  linear_backward_x(model, 4, 1, dx, tensor + MODEL_FC2_WEIGHT, p + MODEL_FC2_WEIGHT, dhidden, workspace);
  float *activated = alloc_rows(model, 4);
  CALL(model, gelu_forward, gpt_gelu_t, .count = hidden_count, .x = hidden, .y = activated);
  linear_backward_weight(model, 4, 1, activated, dx, tensor + MODEL_FC2_WEIGHT, workspace);
  memory_free(memory, activated);
  CALL(model, gelu_backward, gpt_gelu_gradient_t, .count = hidden_count, .x = hidden, .dy = dhidden);
  memory_free(memory, hidden);
  float *dn = alloc_rows(model, 1);
  linear_backward_x(model, 1, 4, dhidden, tensor + MODEL_FC_WEIGHT, p + MODEL_FC_WEIGHT, dn, workspace);
  linear_backward_weight(model, 1, 4, n, dhidden, tensor + MODEL_FC_WEIGHT, workspace);
  memory_free(memory, dhidden);
  norm_backward(model, mid, tensor + MODEL_LN2_WEIGHT, p + MODEL_LN2_WEIGHT, dn, dx);
  memory_free(memory, mid);

  /* Attention: mid = x + proj(attention(qkv)), qkv = linear(norm(x)). */
  linear_backward_x(model, 1, 1, dx, tensor + MODEL_PROJ_WEIGHT, p + MODEL_PROJ_WEIGHT, dn, workspace);
  linear_backward_weight(model, 1, 1, att, dx, tensor + MODEL_PROJ_WEIGHT, workspace);
  memory_free(memory, att);
  float *dqkv = alloc_rows(model, 3), *weights = alloc_floats(model, 2 * attention_floats(model));
  CALL(model, attention_backward, gpt_attention_gradient_t, .batch = model->batch, .context = model->context,
       .width = model->shape.width, .heads = model->shape.heads, .qkv = qkv, .dy = dn, .dqkv = dqkv,
       .workspace = weights);
  memory_free(memory, weights);
  memory_free(memory, qkv);
  linear_backward_x(model, 1, 3, dqkv, tensor + MODEL_QKV_WEIGHT, p + MODEL_QKV_WEIGHT, dn, workspace);
  norm(model, x, p + MODEL_LN1_WEIGHT, n); /* recomputed: n was overwritten by the second norm */
  linear_backward_weight(model, 1, 3, n, dqkv, tensor + MODEL_QKV_WEIGHT, workspace);
  memory_free(memory, dqkv);
  norm_backward(model, x, tensor + MODEL_LN1_WEIGHT, p + MODEL_LN1_WEIGHT, dn, dx);

  memory_free(memory, dn);
  memory_free(memory, n);
  memory_free(memory, workspace);
  memory_free(memory, x);
  model->inputs[layer] = NULL;
  memory_gradients_ready(memory, tensor, MODEL_BLOCK_TENSORS);
  memory_op_end(memory);
}

void model_embed_backward(model_t *model) {
  memory_t *memory = model->memory;
  void *gradients[2];
  memory_op_begin(memory, "embed.bwd");
  float *workspace = alloc_floats(model, (uint64_t)model->shape.width);
  memory_acquire(memory, GEMINI_KIND_GRAD, GEMINI_WRITE, MODEL_WTE, 2, gradients);
  CALL(model, embed_backward, gpt_embed_gradient_t, .batch = model->batch, .context = model->context,
       .width = model->shape.width, .positions = model->shape.positions, .tokens = model->tokens, .dx = model->dx,
       .dwte_f32 = model->dwte, .dwte = gradients[0], .dwpe = gradients[1], .workspace = workspace);
  memory_release(memory, GEMINI_KIND_GRAD, MODEL_WTE, 2);
  memory_gradients_ready(memory, MODEL_WTE, 2);
  memory_free(memory, workspace);
  memory_free(memory, model->dwte);
  memory_free(memory, model->dx);
  model->dwte = model->dx = NULL;
  model_drop(model);
  memory_op_end(memory);
}

void model_drop(model_t *model) {
  for (int i = 0; i <= model->shape.layers; i++) {
    memory_free(model->memory, model->inputs[i]);
    model->inputs[i] = NULL;
  }
  memory_free(model->memory, model->targets);
  memory_free(model->memory, model->tokens);
  model->tokens = model->targets = NULL;
}
