/* The mathematics of a GPT, one function per operator, on plain pointers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Arithmetic is fp32, parameters and their gradients are bf16. Matrices are row-major. Letters in the comments:
 *   B sequences of C tokens, T = B*C rows; W width; H heads of D = W/H; V = GPT_VOCABULARY.
 *
 * Every operator takes one struct, `const void *` to a gpt_*_t, so that it can be called at once or queued on a
 * stream with a copy of the struct; memory_queue() in examples/memory.h does either. Operators allocate nothing, call no
 * library but cblas, and keep no state. Their results depend on the values they are given only: every sum has a fixed
 * order and no result depends on where a buffer lies. (cblas must be deterministic for that: gpt_setup().)
 *
 * Buffers must not overlap unless the comment says that they may be one. */
#ifndef BENCH_GPT_H
#define BENCH_GPT_H

#include <stdint.h>

#include "scalar.h"

enum { GPT_VOCABULARY = 256 };

/* Makes cblas single-threaded and so deterministic, where it is OpenBLAS. Call once, first. */
void gpt_setup(void);

/* ---- Data movement ---- */

typedef struct gpt_copy {
  void *to;         /* bytes */
  const void *from; /* bytes */
  uint64_t bytes;
} gpt_copy_t;
void gpt_copy(const void *copy);

typedef struct gpt_zero {
  void *to; /* bytes */
  uint64_t bytes;
} gpt_zero_t;
void gpt_zero(const void *zero);

typedef struct gpt_store {
  uint64_t count;
  const float *from; /* (count) */
  uint16_t *to;      /* (count) */
} gpt_store_t;
/* to = from, rounded to bf16. */
void gpt_store(const void *store);

/* ---- Embedding ---- */

typedef struct gpt_embed {
  int batch, context, width;
  int positions;         /* rows of wpe, at least context */
  const int32_t *tokens; /* (B, C), each below V */
  const uint16_t *wte;   /* (V, W) */
  const uint16_t *wpe;   /* (positions, W) */
  float *x;              /* (B, C, W) */
} gpt_embed_t;
/* x = wte[token] + wpe[position] */
void gpt_embed_forward(const void *embed);

typedef struct gpt_embed_gradient {
  int batch, context, width;
  int positions;
  const int32_t *tokens; /* (B, C) */
  const float *dx;       /* (B, C, W) */
  float *dwte_f32;       /* (V, W): added to, since the head has put its share there */
  uint16_t *dwte;        /* (V, W): dwte_f32, rounded */
  uint16_t *dwpe;        /* (positions, W); zero from row C on */
  float *workspace;      /* (W) */
} gpt_embed_gradient_t;
void gpt_embed_backward(const void *embed);

/* ---- Layer norm: y = weight * (x - mean(x)) / sqrt(variance(x) + GPT_NORM_EPSILON) + bias, row by row ---- */

#define GPT_NORM_EPSILON 1e-5f

typedef struct gpt_norm {
  int rows, width;
  const float *x;         /* (rows, W) */
  const uint16_t *weight; /* (W) */
  const uint16_t *bias;   /* (W) */
  float *y;               /* (rows, W) */
} gpt_norm_t;
void gpt_norm_forward(const void *norm);

typedef struct gpt_norm_gradient {
  int rows, width;
  const float *x;         /* (rows, W) */
  const uint16_t *weight; /* (W) */
  const float *dy;        /* (rows, W) */
  float *dx;              /* (rows, W): added to */
  float *dweight;         /* (W): set */
  float *dbias;           /* (W): set */
  float *workspace;       /* GPU: (rows, 2), each row's mean and scale; CPU: unused */
} gpt_norm_gradient_t;
void gpt_norm_backward(const void *norm);

/* ---- Linear: y = residual + x weight^T + bias ----
 * Weights are widened to fp32 a panel of rows at a time, and weight gradients are made and rounded likewise, so a
 * workspace is GPT_PANEL_FLOATS floats, or max(in, out) if that is more (gpt_panel_floats()). */

enum { GPT_PANEL_FLOATS = 65536 };
static inline uint64_t gpt_panel_floats(int in, int out) {
  uint64_t floats = GPT_PANEL_FLOATS;
  if (floats < (uint64_t)in) floats = (uint64_t)in;
  if (floats < (uint64_t)out) floats = (uint64_t)out;
  return floats;
}

typedef struct gpt_linear {
  int rows, in, out;
  const float *x;         /* (rows, in) */
  const uint16_t *weight; /* (out, in) */
  const uint16_t *bias;   /* (out), or NULL */
  const float *residual;  /* (rows, out), or NULL; may be y */
  float *y;               /* (rows, out) */
  float *workspace;       /* gpt_panel_floats(in, out) */
} gpt_linear_t;
void gpt_linear_forward(const void *linear);

typedef struct gpt_linear_gradient_x {
  int rows, in, out;
  const float *dy;        /* (rows, out) */
  const uint16_t *weight; /* (out, in) */
  float *dx;              /* (rows, in): set */
  float *workspace;       /* gpt_panel_floats(in, out) */
} gpt_linear_gradient_x_t;
/* Reads the weight and not its gradient; gpt_linear_backward_weight() the other way round. So the gradient can take
 * the place of the weight between the two. */
void gpt_linear_backward_x(const void *linear);

typedef struct gpt_linear_gradient_weight {
  int rows, in, out;
  const float *x;     /* (rows, in) */
  const float *dy;    /* (rows, out) */
  uint16_t *dweight;  /* (out, in), or NULL */
  uint16_t *dbias;    /* (out), or NULL */
  float *dweight_f32; /* (out, in), or NULL; set, unrounded */
  float *workspace;   /* gpt_panel_floats(in, out) */
} gpt_linear_gradient_weight_t;
void gpt_linear_backward_weight(const void *linear);

/* ---- Causal multi-head attention, one head at a time ---- */

typedef struct gpt_attention {
  int batch, context, width, heads;
  const float *qkv; /* (B, C, 3, H, D) */
  float *y;         /* (B, C, H, D) */
  float *workspace; /* (C, C); GPU: (H, C, C) */
} gpt_attention_t;
/* y = softmax(q k^T / sqrt(D), over this and earlier positions) v */
void gpt_attention_forward(const void *attention);

typedef struct gpt_attention_gradient {
  int batch, context, width, heads;
  const float *qkv; /* (B, C, 3, H, D) */
  const float *dy;  /* (B, C, H, D) */
  float *dqkv;      /* (B, C, 3, H, D): set */
  float *workspace; /* (2, C, C); GPU: (2, H, C, C) */
} gpt_attention_gradient_t;
void gpt_attention_backward(const void *attention);

/* ---- GELU by its tanh form: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) ---- */

typedef struct gpt_gelu {
  uint64_t count;
  const float *x; /* (count) */
  float *y;       /* (count); may be x */
} gpt_gelu_t;
void gpt_gelu_forward(const void *gelu);

typedef struct gpt_gelu_gradient {
  uint64_t count;
  const float *x; /* (count) */
  float *dy;      /* (count): becomes dx */
} gpt_gelu_gradient_t;
void gpt_gelu_backward(const void *gelu);

/* ---- Loss ---- */

typedef struct gpt_loss {
  int rows;
  const int32_t *targets; /* (rows), each below V */
  float *logits;          /* (rows, V): becomes the gradient of the mean loss, when with_gradient */
  int with_gradient;
  double *loss;      /* host: mean cross entropy, in nats */
  double *workspace; /* GPU: (rows + 1); CPU: unused */
} gpt_loss_t;
void gpt_loss(const void *loss);

/* ---- AdamW (Loshchilov & Hutter 2019, decoupled decay), on any range of elements ----
 * Every element is decayed, biases and norms too, so that a range needs no map of the tensors in it. */

typedef struct gpt_adamw {
  float learning_rate, beta1, beta2, epsilon, weight_decay;
  float gradient_scale; /* multiplies the gradient: clipping */
  uint32_t step;        /* from 1 */
} gpt_adamw_t;
/* What a step's elements have in common: made once, so that all of them, wherever they are, take the same. */
gpt_adamw_factors_t gpt_adamw_factors(const gpt_adamw_t *adamw);
/* gradient, parameter: (count) bf16; master, momentum, variance: (count) fp32. gradient and parameter may be one:
 * each element's gradient is read before its parameter is written. */
void gpt_adamw_range(const gpt_adamw_factors_t *adamw, uint64_t count, const uint16_t *gradient, uint16_t *parameter,
                     float *master, float *momentum, float *variance);

/* What the norm of gradients clips to: min(1, limit / norm); 1 when limit is 0. */
float gpt_clip_scale(double norm, double limit);

/* ---- Seeded randomness: SplitMix64, the same on every machine ---- */

uint64_t gpt_random(uint64_t *state);
/* Mean 0, variance 1, as the sum of twelve uniform values: within +-6, and no function of the C library in it. */
float gpt_random_normal(uint64_t *state);

/* 64-bit FNV-1a. Start with GPT_HASH_START. */
#define GPT_HASH_START UINT64_C(0xcbf29ce484222325)
uint64_t gpt_hash(uint64_t hash, const void *bytes, uint64_t count);

#endif
