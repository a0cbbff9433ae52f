/* The mathematics of a GPT, one function per operator, on plain pointers.
 * SPDX-License-Identifier: Apache-2.0 */
#include "model/gpt.h"

#include <cblas.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

/* OpenBLAS's own; absent from other implementations of cblas. */
extern void openblas_set_num_threads(int count) __attribute__((weak));

void gpt_setup(void) {
  if (openblas_set_num_threads != NULL) openblas_set_num_threads(1);
}

/* ---- Helpers ---- */

enum { LANES = 16 };

/* Sums in a fixed order: LANES partial sums, element i in partial sum i % LANES, then these left to right. Written
 * out so that the compiler can use vectors without being allowed to reorder. */
static float lanes_total(const float *lanes) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += lanes[i];
  return total;
}

static float sum(const float *x, int count) {
  float lanes[LANES] = { 0 };
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int k = 0; k < LANES; k++) lanes[k] += x[i + k];
  }
  for (int k = 0; k < LANES && i < count; i++, k++) lanes[k] += x[i];
  return lanes_total(lanes);
}

static float dot(const float *x, const float *y, int count) {
  float lanes[LANES] = { 0 };
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int k = 0; k < LANES; k++) lanes[k] += x[i + k] * y[i + k];
  }
  for (int k = 0; k < LANES && i < count; i++, k++) lanes[k] += x[i] * y[i];
  return lanes_total(lanes);
}

/* Sum of (x - mean)^2. */
static float squared_distance(const float *x, float mean, int count) {
  float lanes[LANES] = { 0 };
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int k = 0; k < LANES; k++) lanes[k] += (x[i + k] - mean) * (x[i + k] - mean);
  }
  for (int k = 0; k < LANES && i < count; i++, k++) lanes[k] += (x[i] - mean) * (x[i] - mean);
  return lanes_total(lanes);
}

static float maximum(const float *x, int count) {
  float result = x[0];
  for (int i = 1; i < count; i++) result = x[i] > result ? x[i] : result;
  return result;
}

static void widen(const uint16_t *from, float *to, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) to[i] = gpt_f32_from_bf16(from[i]);
}

static void narrow(const float *from, uint16_t *to, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) to[i] = gpt_bf16_from_f32(from[i]);
}

/* ---- Data movement ---- */

void gpt_copy(const void *copy) {
  const gpt_copy_t *a = copy;
  memcpy(a->to, a->from, a->bytes);
}

void gpt_zero(const void *zero) {
  const gpt_zero_t *a = zero;
  memset(a->to, 0, a->bytes);
}

void gpt_store(const void *store) {
  const gpt_store_t *a = store;
  narrow(a->from, a->to, a->count);
}

/* ---- Embedding ---- */

void gpt_embed_forward(const void *embed) {
  const gpt_embed_t *a = embed; /* tokens (B,C), wte (V,W), wpe (positions,W) -> x (B,C,W) */
  size_t width = (size_t)a->width;
  for (size_t t = 0; t < (size_t)a->batch * (size_t)a->context; t++) {
    const uint16_t *token = a->wte + (size_t)a->tokens[t] * width;
    const uint16_t *position = a->wpe + t % (size_t)a->context * width;
    float *x = a->x + t * width;
    for (size_t i = 0; i < width; i++) x[i] = gpt_f32_from_bf16(token[i]) + gpt_f32_from_bf16(position[i]);
  }
}

void gpt_embed_backward(const void *embed) {
  const gpt_embed_gradient_t *a = embed; /* dx (B,C,W) -> dwte (V,W), dwpe (positions,W) */
  size_t width = (size_t)a->width, context = (size_t)a->context;
  for (size_t t = 0; t < (size_t)a->batch * context; t++) {
    const float *dx = a->dx + t * width;
    float *dtoken = a->dwte_f32 + (size_t)a->tokens[t] * width;
    for (size_t i = 0; i < width; i++) dtoken[i] += dx[i];
  }
  narrow(a->dwte_f32, a->dwte, GPT_VOCABULARY * width);
  for (size_t c = 0; c < (size_t)a->positions; c++) {
    memset(a->workspace, 0, width * sizeof(float));
    for (size_t b = 0; c < context && b < (size_t)a->batch; b++) {
      const float *dx = a->dx + (b * context + c) * width;
      for (size_t i = 0; i < width; i++) a->workspace[i] += dx[i];
    }
    narrow(a->workspace, a->dwpe + c * width, width);
  }
}

/* ---- Layer norm ---- */

/* One row's mean and 1 / standard deviation. */
static void norm_moments(const float *x, int width, float *mean_out, float *scale_out) {
  float mean = sum(x, width) / (float)width;
  float variance = squared_distance(x, mean, width) / (float)width;
  *mean_out = mean;
  *scale_out = 1.0f / sqrtf(variance + GPT_NORM_EPSILON);
}

void gpt_norm_forward(const void *norm) {
  const gpt_norm_t *a = norm; /* x (rows,W), weight (W), bias (W) -> y (rows,W) */
  for (int row = 0; row < a->rows; row++) {
    const float *x = a->x + (size_t)row * (size_t)a->width;
    float *y = a->y + (size_t)row * (size_t)a->width;
    float mean, scale;
    norm_moments(x, a->width, &mean, &scale);
    for (int i = 0; i < a->width; i++) {
      y[i] = (x[i] - mean) * scale * gpt_f32_from_bf16(a->weight[i]) + gpt_f32_from_bf16(a->bias[i]);
    }
  }
}

/* With h = (x - mean) * scale and g = weight * dy: dx = scale * (g - mean(g) - h * mean(g h)). */
void gpt_norm_backward(const void *norm) {
  const gpt_norm_gradient_t *a = norm; /* x, dy (rows,W), weight (W) -> dx (rows,W) +=, dweight, dbias (W) */
  memset(a->dweight, 0, (size_t)a->width * sizeof(float));
  memset(a->dbias, 0, (size_t)a->width * sizeof(float));
  for (int row = 0; row < a->rows; row++) {
    const float *x = a->x + (size_t)row * (size_t)a->width;
    const float *dy = a->dy + (size_t)row * (size_t)a->width;
    float *dx = a->dx + (size_t)row * (size_t)a->width;
    float mean, scale, g_lanes[LANES] = { 0 }, gh_lanes[LANES] = { 0 };
    norm_moments(x, a->width, &mean, &scale);
    int i = 0;
    for (; i + LANES <= a->width; i += LANES) {
      for (int k = 0; k < LANES; k++) {
        float h = (x[i + k] - mean) * scale, g = gpt_f32_from_bf16(a->weight[i + k]) * dy[i + k];
        g_lanes[k] += g;
        gh_lanes[k] += g * h;
      }
    }
    for (int k = 0; k < LANES && i < a->width; i++, k++) {
      float h = (x[i] - mean) * scale, g = gpt_f32_from_bf16(a->weight[i]) * dy[i];
      g_lanes[k] += g;
      gh_lanes[k] += g * h;
    }
    float mean_g = lanes_total(g_lanes) / (float)a->width;
    float mean_gh = lanes_total(gh_lanes) / (float)a->width;
    for (i = 0; i < a->width; i++) {
      float h = (x[i] - mean) * scale, g = gpt_f32_from_bf16(a->weight[i]) * dy[i];
      dx[i] += scale * (g - mean_g - h * mean_gh);
      a->dweight[i] += dy[i] * h;
      a->dbias[i] += dy[i];
    }
  }
}

/* ---- Linear ---- */

/* Rows of a panel of a weight (out, in). */
static int panel_rows(int in, int out) {
  int rows = (int)(gpt_panel_floats(in, out) / (uint64_t)in);
  return rows < out ? rows : out;
}

void gpt_linear_forward(const void *linear) {
  const gpt_linear_t *a = linear; /* x (rows,in), weight (out,in), bias (out), residual (rows,out) -> y (rows,out) */
  size_t in = (size_t)a->in, out = (size_t)a->out;
  for (size_t row = 0; row < (size_t)a->rows; row++) {
    float *y = a->y + row * out;
    if (a->residual == NULL) {
      memset(y, 0, out * sizeof(float));
    } else if (a->residual != a->y) {
      memcpy(y, a->residual + row * out, out * sizeof(float));
    }
    for (size_t o = 0; a->bias != NULL && o < out; o++) y[o] += gpt_f32_from_bf16(a->bias[o]);
  }
  int panel = panel_rows(a->in, a->out);
  for (int first = 0; first < a->out; first += panel) {
    int rows = panel < a->out - first ? panel : a->out - first;
    widen(a->weight + (size_t)first * in, a->workspace, (uint64_t)rows * in);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, a->rows, rows, a->in, 1.0f, a->x, a->in, a->workspace, a->in,
                1.0f, a->y + first, a->out);
  }
}

void gpt_linear_backward_x(const void *linear) {
  const gpt_linear_gradient_x_t *a = linear; /* dy (rows,out), weight (out,in) -> dx (rows,in) */
  int panel = panel_rows(a->in, a->out);
  for (int first = 0; first < a->out; first += panel) {
    int rows = panel < a->out - first ? panel : a->out - first;
    widen(a->weight + (size_t)first * (size_t)a->in, a->workspace, (uint64_t)rows * (uint64_t)a->in);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, a->rows, a->in, rows, 1.0f, a->dy + first, a->out,
                a->workspace, a->in, first == 0 ? 0.0f : 1.0f, a->dx, a->in);
  }
}

void gpt_linear_backward_weight(const void *linear) {
  const gpt_linear_gradient_weight_t *a = linear; /* x (rows,in), dy (rows,out) -> dweight (out,in), dbias (out) */
  if (a->dweight_f32 != NULL) {
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, a->out, a->in, a->rows, 1.0f, a->dy, a->out, a->x, a->in, 0.0f,
                a->dweight_f32, a->in);
  }
  int panel = panel_rows(a->in, a->out);
  for (int first = 0; a->dweight != NULL && first < a->out; first += panel) {
    int rows = panel < a->out - first ? panel : a->out - first;
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, rows, a->in, a->rows, 1.0f, a->dy + first, a->out, a->x, a->in,
                0.0f, a->workspace, a->in);
    narrow(a->workspace, a->dweight + (size_t)first * (size_t)a->in, (uint64_t)rows * (uint64_t)a->in);
  }
  if (a->dbias == NULL) return;
  size_t out = (size_t)a->out;
  memset(a->workspace, 0, out * sizeof(float));
  for (size_t row = 0; row < (size_t)a->rows; row++) {
    for (size_t o = 0; o < out; o++) a->workspace[o] += a->dy[row * out + o];
  }
  narrow(a->workspace, a->dbias, out);
}

/* ---- Attention ---- */

/* p (C,C) = softmax of q k^T / sqrt(D) over columns up to the row's; zero beyond. q, k: (C,D), rows ld apart. */
static void attention_weights(const float *q, const float *k, int context, int head_width, int ld, float *p) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, context, context, head_width, 1.0f / sqrtf((float)head_width), q,
              ld, k, ld, 0.0f, p, context);
  for (int c = 0; c < context; c++) {
    float *row = p + (size_t)c * (size_t)context;
    float largest = maximum(row, c + 1);
    for (int i = 0; i <= c; i++) row[i] = gpt_exponential(row[i] - largest);
    float scale = 1.0f / sum(row, c + 1);
    for (int i = 0; i <= c; i++) row[i] *= scale;
    memset(row + c + 1, 0, (size_t)(context - c - 1) * sizeof(float));
  }
}

void gpt_attention_forward(const void *attention) {
  const gpt_attention_t *a = attention; /* qkv (B,C,3,H,D) -> y (B,C,H,D); workspace (C,C) */
  int head_width = a->width / a->heads, ld = 3 * a->width, context = a->context;
  for (int b = 0; b < a->batch; b++) {
    for (int head = 0; head < a->heads; head++) {
      const float *q = a->qkv + (size_t)b * (size_t)context * (size_t)ld + (size_t)head * (size_t)head_width;
      const float *k = q + a->width, *v = k + a->width;
      float *y = a->y + (size_t)b * (size_t)context * (size_t)a->width + (size_t)head * (size_t)head_width;
      attention_weights(q, k, context, head_width, ld, a->workspace);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, context, head_width, context, 1.0f, a->workspace, context,
                  v, ld, 0.0f, y, a->width);
    }
  }
}

/* With p the weights and y = p v: dv = p^T dy, dp = dy v^T, ds = p (dp - rowsum(p dp)) / sqrt(D), dq = ds k,
 * dk = ds^T q. */
void gpt_attention_backward(const void *attention) {
  const gpt_attention_gradient_t *a = attention; /* qkv, dqkv (B,C,3,H,D), dy (B,C,H,D); workspace (2,C,C) */
  int head_width = a->width / a->heads, ld = 3 * a->width, context = a->context;
  float score_scale = 1.0f / sqrtf((float)head_width);
  float *p = a->workspace, *ds = a->workspace + (size_t)context * (size_t)context;
  for (int b = 0; b < a->batch; b++) {
    for (int head = 0; head < a->heads; head++) {
      size_t offset = (size_t)b * (size_t)context * (size_t)ld + (size_t)head * (size_t)head_width;
      const float *q = a->qkv + offset, *k = q + a->width, *v = k + a->width;
      float *dq = a->dqkv + offset, *dk = dq + a->width, *dv = dk + a->width;
      const float *dy = a->dy + (size_t)b * (size_t)context * (size_t)a->width + (size_t)head * (size_t)head_width;
      attention_weights(q, k, context, head_width, ld, p);
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, context, head_width, context, 1.0f, p, context, dy, a->width,
                  0.0f, dv, ld);
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, context, context, head_width, 1.0f, dy, a->width, v, ld,
                  0.0f, ds, context);
      for (int c = 0; c < context; c++) {
        float *p_row = p + (size_t)c * (size_t)context, *ds_row = ds + (size_t)c * (size_t)context;
        float weighted = dot(p_row, ds_row, c + 1);
        for (int i = 0; i <= c; i++) ds_row[i] = p_row[i] * (ds_row[i] - weighted) * score_scale;
        memset(ds_row + c + 1, 0, (size_t)(context - c - 1) * sizeof(float));
      }
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, context, head_width, context, 1.0f, ds, context, k, ld,
                  0.0f, dq, ld);
      cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, context, head_width, context, 1.0f, ds, context, q, ld, 0.0f,
                  dk, ld);
    }
  }
}

/* ---- GELU ---- */

void gpt_gelu_forward(const void *gelu) {
  const gpt_gelu_t *a = gelu; /* x (count) -> y (count) */
  for (uint64_t i = 0; i < a->count; i++) a->y[i] = gpt_gelu_of(a->x[i]);
}

void gpt_gelu_backward(const void *gelu) {
  const gpt_gelu_gradient_t *a = gelu; /* x (count), dy (count) -> dy */
  for (uint64_t i = 0; i < a->count; i++) a->dy[i] *= gpt_gelu_slope(a->x[i]);
}

/* ---- Loss ---- */

void gpt_loss(const void *loss) {
  const gpt_loss_t *a = loss; /* logits (rows,V), targets (rows) -> loss, logits = dlogits (rows,V) */
  double total = 0;
  for (int row = 0; row < a->rows; row++) {
    float *logits = a->logits + (size_t)row * GPT_VOCABULARY;
    int32_t target = a->targets[row];
    float p[GPT_VOCABULARY], largest = maximum(logits, GPT_VOCABULARY);
    for (int i = 0; i < GPT_VOCABULARY; i++) p[i] = gpt_exponential(logits[i] - largest);
    float denominator = sum(p, GPT_VOCABULARY);
    total += log((double)denominator) + (double)largest - (double)logits[target];
    if (!a->with_gradient) continue;
    float scale = 1.0f / denominator, share = 1.0f / (float)a->rows;
    for (int i = 0; i < GPT_VOCABULARY; i++) logits[i] = p[i] * scale * share;
    logits[target] -= share;
  }
  *a->loss = total / a->rows;
}

/* ---- AdamW ---- */

gpt_adamw_factors_t gpt_adamw_factors(const gpt_adamw_t *a) {
  return (gpt_adamw_factors_t){ .beta1 = a->beta1,
                                .beta2 = a->beta2,
                                .epsilon = a->epsilon,
                                .scale = a->gradient_scale,
                                .step_size = a->learning_rate / (float)(1.0 - pow((double)a->beta1, a->step)),
                                .variance = 1.0f / (float)(1.0 - pow((double)a->beta2, a->step)),
                                .kept = 1.0f - a->learning_rate * a->weight_decay };
}

void gpt_adamw_range(const gpt_adamw_factors_t *adamw, uint64_t count, const uint16_t *gradient, uint16_t *parameter,
                     float *master, float *momentum, float *variance) {
  gpt_adamw_factors_t factors = *adamw; /* a copy, which no array can overlap */
  for (uint64_t i = 0; i < count; i++) {
    gpt_adamw_element_t e = { master[i], momentum[i], variance[i] };
    e = gpt_adamw_of(factors, gradient[i], e);
    momentum[i] = e.momentum;
    variance[i] = e.variance;
    master[i] = e.master;
    parameter[i] = gpt_bf16_from_f32(e.master);
  }
}

float gpt_clip_scale(double norm, double limit) { return limit > 0 && norm > limit ? (float)(limit / norm) : 1.0f; }

/* ---- Randomness, hash ---- */

uint64_t gpt_random(uint64_t *state) {
  uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

float gpt_random_normal(uint64_t *state) {
  uint64_t total = 0; /* twelve 32-bit values */
  for (int i = 0; i < 6; i++) {
    uint64_t pair = gpt_random(state);
    total += (pair >> 32) + (pair & 0xffffffffu);
  }
  return (float)((double)total / 4294967296.0 - 6.0);
}

uint64_t gpt_hash(uint64_t hash, const void *bytes, uint64_t count) {
  const unsigned char *byte = bytes;
  for (uint64_t i = 0; i < count; i++) hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
  return hash;
}
