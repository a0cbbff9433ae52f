/* The tasks on the CPU. SPDX-License-Identifier: Apache-2.0
 *
 * ADAMW, FILL and HASH are what runs for chunks on the host; the others only serve models tiny enough for a test, and
 * are written to be read. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/task.h"

static const float epsilon = 1e-5f; /* of RMS norms */

static float widen(uint16_t bf16) {
  uint32_t bits = (uint32_t)bf16 << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
static uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* A matrix in fp32, rows side by side, transposed when asked for. */
static float *widened(const uint16_t *matrix, int rows, int columns, int ld, bool transpose) {
  float *wide = malloc((size_t)rows * (size_t)columns * sizeof *wide);
  if (wide == NULL) abort(); /* of the tiny models that this is for */
  for (int i = 0; i < rows; i++) {
    for (int j = 0; j < columns; j++) {
      size_t at = transpose ? (size_t)j * (size_t)ld + (size_t)i : (size_t)i * (size_t)ld + (size_t)j;
      wide[(size_t)i * (size_t)columns + (size_t)j] = widen(matrix[at]);
    }
  }
  return wide;
}
static float dot(const float *a, const float *b, int count) {
  float sums[8] = { 0 }, sum = 0;
  int i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int k = 0; k < 8; k++) sums[k] += a[i + k] * b[i + k];
  }
  for (; i < count; i++) sum += a[i] * b[i];
  for (int k = 0; k < 8; k++) sum += sums[k];
  return sum;
}
static void gemm(const gpu_gemm_t *g) {
  float *a = widened(g->a, g->m, g->k, g->lda, g->a_transposed);
  float *b = widened(g->b, g->n, g->k, g->ldb, !g->b_transposed);
  for (int i = 0; i < g->m; i++) {
    for (int j = 0; j < g->n; j++) {
      uint16_t *c = (uint16_t *)g->c + (size_t)i * (size_t)g->ldc + (size_t)j;
      float sum = g->alpha * dot(a + (size_t)i * (size_t)g->k, b + (size_t)j * (size_t)g->k, g->k);
      *c = narrow(g->beta != 0 ? sum + g->beta * widen(*c) : sum);
    }
  }
  free(a);
  free(b);
}

static void embed(const task_t *t) {
  const uint16_t *table = t->in[0];
  const int32_t *tokens = t->in[1];
  size_t width = (size_t)t->width;
  for (int r = 0; r < t->rows; r++) {
    memcpy((uint16_t *)t->out[0] + (size_t)r * width, table + (size_t)tokens[r] * width, width * sizeof *table);
  }
}
static void embed_gradient(const task_t *t) {
  const uint16_t *dy = t->in[0];
  const int32_t *first = t->in[1], *where = t->in[2];
  size_t width = (size_t)t->width;
  for (int r = 0; r < t->rows; r++) {
    for (size_t i = 0; i < width; i++) {
      float sum = 0;
      for (int32_t k = first[r]; k < first[r + 1]; k++) sum += widen(dy[(size_t)where[k] * width + i]);
      ((uint16_t *)t->out[0])[(size_t)r * width + i] = narrow(sum);
    }
  }
}

static float norm_scale(const uint16_t *x, int width) {
  float squares = 0;
  for (int i = 0; i < width; i++) squares += widen(x[i]) * widen(x[i]);
  return 1.0f / sqrtf(squares / (float)width + epsilon);
}
static void norm(const task_t *t) {
  const uint16_t *weight = t->in[1];
  for (int r = 0; r < t->rows; r++) {
    const uint16_t *x = (const uint16_t *)t->in[0] + (size_t)r * (size_t)t->width;
    uint16_t *y = (uint16_t *)t->out[0] + (size_t)r * (size_t)t->width;
    float scale = norm_scale(x, t->width);
    for (int i = 0; i < t->width; i++) y[i] = narrow(widen(x[i]) * scale * widen(weight[i]));
  }
}
/* With h = x scale and g = weight dy: dx = scale (g - h mean(g h)). */
static void norm_gradient(const task_t *t) {
  const uint16_t *weight = t->in[1];
  for (int r = 0; r < t->rows; r++) {
    size_t row = (size_t)r * (size_t)t->width;
    const uint16_t *x = (const uint16_t *)t->in[0] + row, *dy = (const uint16_t *)t->in[2] + row;
    float scale = norm_scale(x, t->width), mean = 0;
    for (int i = 0; i < t->width; i++) mean += widen(weight[i]) * widen(dy[i]) * widen(x[i]) * scale;
    mean /= (float)t->width;
    for (int i = 0; i < t->width; i++) {
      float rest = t->in[3] != NULL ? widen(((const uint16_t *)t->in[3])[row + (size_t)i]) : 0;
      float dx = scale * (widen(weight[i]) * widen(dy[i]) - widen(x[i]) * scale * mean);
      ((uint16_t *)t->out[0])[row + (size_t)i] = narrow(rest + dx);
    }
    ((float *)t->out[1])[r] = scale;
  }
}
static void norm_weight(const task_t *t) {
  const uint16_t *x = t->in[0], *dy = t->in[1];
  const float *scales = t->in[2];
  for (int i = 0; i < t->width; i++) {
    float sum = 0;
    for (int r = 0; r < t->rows; r++) {
      size_t at = (size_t)r * (size_t)t->width + (size_t)i;
      sum += widen(x[at]) * scales[r] * widen(dy[at]);
    }
    ((uint16_t *)t->out[0])[i] = narrow(sum);
  }
}

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
static void gate(const task_t *t) {
  const uint16_t *g = t->in[0], *u = t->in[1], *v = t->in[2];
  uint16_t *y = t->out[0];
  for (uint64_t i = 0; i < t->count; i++) {
    float x = widen(g[i]);
    y[i] = narrow((v != NULL ? widen(v[i]) : 0) + x * sigmoid(x) * widen(u[i]));
  }
}
static void gate_gradient(const task_t *t) {
  const uint16_t *dy = t->in[0];
  uint16_t *g = t->out[0], *u = t->out[1];
  for (uint64_t i = 0; i < t->count; i++) {
    float x = widen(g[i]), s = sigmoid(x), d = widen(dy[i]);
    g[i] = narrow(d * widen(u[i]) * s * (1.0f + x * (1.0f - s)));
    u[i] = narrow(d * x * s);
  }
}

static void loss(const task_t *t) {
  float share = 1.0f / (float)t->rows;
  for (int r = 0; r < t->rows; r++) {
    uint16_t *logits = (uint16_t *)t->out[0] + (size_t)r * (size_t)t->width;
    int32_t target = ((const int32_t *)t->in[0])[r];
    float largest = widen(logits[0]), total = 0;
    for (int i = 1; i < t->width; i++) largest = fmaxf(largest, widen(logits[i]));
    for (int i = 0; i < t->width; i++) total += expf(widen(logits[i]) - largest);
    ((float *)t->out[1])[r] = logf(total) + largest - widen(logits[target]);
    for (int i = 0; i < t->width; i++) {
      logits[i] = narrow((expf(widen(logits[i]) - largest) / total - (i == target ? 1.0f : 0.0f)) * share);
    }
  }
}
static void loss_mean(const task_t *t) {
  double sum = 0;
  for (int r = 0; r < t->rows; r++) sum += (double)((const float *)t->in[0])[r];
  *(double *)t->out[0] = sum / t->rows;
}

/* The bytes of the parameter hold its gradient. A value out of range would be a mistake in this program. */
static void adamw(const task_t *t) {
  if (gemini_adamw_host(&t->with.adamw, t->count, t->out[0], t->out[0], t->out[1], t->out[2], t->out[3], NULL) !=
      GEMINI_OK) {
    abort();
  }
}

/* SplitMix64's output function. */
static uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}
static const uint64_t stride = UINT64_C(0x9e3779b97f4a7c15);

static void fill(const task_t *t) {
  const task_fill_t *f = &t->with.fill;
  for (uint64_t i = 0; i < t->count; i++) {
    int32_t drawn = (int32_t)(mix(f->seed + (t->first - f->origin + i) * stride) >> 40) - (1 << 23);
    float value = f->offset + f->scale * ((float)drawn * (1.0f / (1 << 23)));
    ((float *)t->out[1])[i] = value;
    ((uint16_t *)t->out[0])[i] = narrow(value);
  }
}

/* A sum, so that the order does not count. */
static void hash(const task_t *t) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < t->count; i++) {
    uint32_t bits;
    memcpy(&bits, (const float *)t->in[0] + i, sizeof bits);
    sum += mix((t->first + i) * stride + bits);
  }
  __atomic_fetch_add((uint64_t *)t->out[0], sum, __ATOMIC_RELAXED);
}

void task_run(const task_t *t) {
  switch (t->kind) {
  case TASK_GEMM: gemm(&t->gemm); break;
  case TASK_COPY: memcpy(t->out[0], t->in[0], t->count); break;
  case TASK_EMBED: embed(t); break;
  case TASK_EMBED_GRADIENT: embed_gradient(t); break;
  case TASK_NORM: norm(t); break;
  case TASK_NORM_GRADIENT: norm_gradient(t); break;
  case TASK_NORM_WEIGHT: norm_weight(t); break;
  case TASK_GATE: gate(t); break;
  case TASK_GATE_GRADIENT: gate_gradient(t); break;
  case TASK_LOSS: loss(t); break;
  case TASK_LOSS_MEAN: loss_mean(t); break;
  case TASK_ADAMW: adamw(t); break;
  case TASK_FILL: fill(t); break;
  case TASK_HASH: hash(t); break;
  default: abort(); /* no such kind */
  }
}

bool task_on_cpu(void *stream, const void *task) {
  (void)stream;
  task_run(task);
  return true;
}
