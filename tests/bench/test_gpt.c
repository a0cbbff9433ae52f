/* The GPT of the main job: every gradient against central differences of a float64 reference, and what else its
 * results rest on.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tolerances. The reference takes the same inputs, which are floats, in double, so that only the tested code rounds.
 * A central difference with step h = 2^-12 of a double function is wrong by h^2/6 |f'''| + 2^-52 |f| / h: with the
 * values here (f below 1e3, f''' below 1e2) by less than 2e-6.
 * A sum of n products in fp32 is wrong by at most n u sum|a b|, u = 2^-24. The operators' sums have at most 32 terms
 * of at most about 1, and at most four of them follow one another: 4 * 32 * 2^-24 * 32 = 2^-12. Twice that, 2^-11, is
 * FLOAT_TOLERANCE; a term that is missing or wrong shows as 2^-6 or more. Rounding to bf16, which keeps 8 bits, adds
 * half a unit in the last place: up to 2^-8 of the value. */
#define _GNU_SOURCE
#include <math.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../examples/gpt_model.h"
#include "check.h"
#include "model/text.h"

#define FLOAT_TOLERANCE 0x1p-11
#define BF16_TOLERANCE 0x1p-8
#define STEP 0x1p-12

static uint64_t random_state;

/* In [-1, 1), a multiple of 2^-7: a bf16 and so a float and a double. */
static double draw(void) { return (double)((int)(check_random(&random_state) >> 40 & 255) - 128) / 128; }

static void near(double actual, double expected, double tolerance, const char *what, uint64_t index) {
  if (fabs(actual - expected) <= tolerance) return; /* false for NaN */
  fprintf(stderr, "%s[%" PRIu64 "] is %.9g, expected %.9g within %.3g\n", what, index, actual, expected, tolerance);
  exit(1);
}

/* ---- A buffer of drawn values in the three precisions ---- */

typedef struct values {
  uint64_t count;
  double *d;
  float *f;
  uint16_t *b;
} values_t;

static values_t values_zero(uint64_t count) {
  values_t v = { count, calloc(count, sizeof(double)), calloc(count, sizeof(float)), calloc(count, sizeof(uint16_t)) };
  CHECK(v.d != NULL && v.f != NULL && v.b != NULL);
  return v;
}

static void values_set(values_t *v, uint64_t i, double value) {
  v->d[i] = value;
  v->f[i] = (float)value;
  v->b[i] = gpt_bf16_from_f32((float)value);
  CHECK((double)gpt_f32_from_bf16(v->b[i]) == value);
}

static values_t values_drawn(uint64_t count) {
  values_t v = values_zero(count);
  for (uint64_t i = 0; i < count; i++) values_set(&v, i, draw());
  return v;
}

static void values_free(values_t *v) {
  free(v->d);
  free(v->f);
  free(v->b);
}

/* ---- The reference: double, as simple as can be ---- */

static void reference_norm(const double *x, const double *w, const double *b, int rows, int width, double *y) {
  for (int r = 0; r < rows; r++) {
    double mean = 0, variance = 0;
    for (int i = 0; i < width; i++) mean += x[r * width + i] / width;
    for (int i = 0; i < width; i++) variance += (x[r * width + i] - mean) * (x[r * width + i] - mean) / width;
    double deviation = sqrt(variance + (double)GPT_NORM_EPSILON);
    for (int i = 0; i < width; i++) y[r * width + i] = (x[r * width + i] - mean) / deviation * w[i] + b[i];
  }
}

static void reference_linear(const double *x, const double *w, const double *b, const double *residual, int rows,
                             int in, int out, double *y) {
  for (int r = 0; r < rows; r++) {
    for (int o = 0; o < out; o++) {
      double total = (b == NULL ? 0 : b[o]) + (residual == NULL ? 0 : residual[r * out + o]);
      for (int i = 0; i < in; i++) total += x[r * in + i] * w[o * in + i];
      y[r * out + o] = total;
    }
  }
}

static void reference_attention(const double *qkv, int batch, int context, int width, int heads, double *y) {
  int d = width / heads;
  double p[64];
  CHECK(context <= 64);
  for (int b = 0; b < batch; b++) {
    for (int h = 0; h < heads; h++) {
      for (int c = 0; c < context; c++) {
        const double *q = qkv + (b * context + c) * 3 * width + h * d;
        double total = 0;
        for (int e = 0; e <= c; e++) {
          const double *k = qkv + (b * context + e) * 3 * width + width + h * d;
          double score = 0;
          for (int i = 0; i < d; i++) score += q[i] * k[i];
          total += p[e] = exp(score / sqrt(d));
        }
        for (int i = 0; i < d; i++) {
          double value = 0;
          for (int e = 0; e <= c; e++) {
            value += p[e] / total * qkv[(b * context + e) * 3 * width + 2 * width + h * d + i];
          }
          y[(b * context + c) * width + h * d + i] = value;
        }
      }
    }
  }
}

static double reference_gelu(double x) {
  return 0.5 * x * (1 + tanh(sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static double reference_loss(const double *logits, const int32_t *targets, int rows) {
  double loss = 0;
  for (int r = 0; r < rows; r++) {
    double total = 0;
    for (int i = 0; i < GPT_VOCABULARY; i++) total += exp(logits[r * GPT_VOCABULARY + i]);
    loss += log(total) - logits[r * GPT_VOCABULARY + targets[r]];
  }
  return loss / rows;
}

/* d objective(context) / d *value */
static double slope(double (*objective)(void *context), void *context, double *value) {
  double kept = *value;
  *value = kept + STEP;
  double above = objective(context);
  *value = kept - STEP;
  double below = objective(context);
  *value = kept;
  return (above - below) / (2 * STEP);
}

/* An operator's objective: what its outputs weigh with dy. */
static double weighed(const double *y, const values_t *dy) {
  double total = 0;
  for (uint64_t i = 0; i < dy->count; i++) total += y[i] * dy->d[i];
  return total;
}

/* ---- bf16 ---- */

static void check_bf16(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  uint16_t actual = gpt_bf16_from_f32(value);
  if (isnan(value)) {
    CHECK((actual & 0x7f80) == 0x7f80 && (actual & 0x7f) != 0);
    CHECK_EQ(actual >> 15, bits >> 31);
    return;
  }
  uint32_t expected = bits >> 16, rest = bits & 0xffff; /* bits of floats are ordered as the floats are */
  if (rest > 0x8000 || (rest == 0x8000 && expected % 2 == 1)) expected++;
  CHECK_EQ(actual, expected);
}

static void test_bf16_from_f32_rounds_to_nearest_even(void) {
  static const uint32_t rests[] = { 0, 1, 0x7fff, 0x8000, 0x8001, 0xffff };
  random_state = 1;
  for (uint32_t high = 0; high <= 0xffff; high++) { /* every sign, exponent, upper part; infinities and NaNs too */
    for (size_t i = 0; i < sizeof rests / sizeof rests[0]; i++) check_bf16(high << 16 | rests[i]);
    check_bf16(high << 16 | (uint32_t)(check_random(&random_state) >> 48));
  }
  CHECK_EQ(gpt_bf16_from_f32(INFINITY), 0x7f80);
  CHECK_EQ(gpt_bf16_from_f32(-INFINITY), 0xff80);
  CHECK_EQ(gpt_bf16_from_f32(3.4e38f), 0x7f80); /* above the largest bf16 by more than half a unit */
}

static void test_bf16_to_f32_and_back_is_identity(void) {
  for (uint32_t bits = 0; bits <= 0xffff; bits++) {
    if ((bits & 0x7f80) == 0x7f80 && (bits & 0x7f) != 0) continue; /* NaNs may become quiet */
    CHECK_EQ(gpt_bf16_from_f32(gpt_f32_from_bf16((uint16_t)bits)), bits);
  }
}

/* ---- Layer norm ---- */

typedef struct norm_case {
  int rows, width;
  values_t x, w, b, dy;
  double *y;
} norm_case_t;

static double norm_objective(void *context) {
  norm_case_t *c = context;
  reference_norm(c->x.d, c->w.d, c->b.d, c->rows, c->width, c->y);
  return weighed(c->y, &c->dy);
}

static void check_norm(int rows, int width) {
  uint64_t count = (uint64_t)rows * (uint64_t)width;
  norm_case_t c = { rows,
                    width,
                    values_drawn(count),
                    values_drawn((uint64_t)width),
                    values_drawn((uint64_t)width),
                    values_drawn(count),
                    calloc(count, sizeof(double)) };
  values_t start = values_drawn(count); /* dx is added to */
  float *y = calloc(count, sizeof *y), *dw = calloc((size_t)width, sizeof *dw), *db = calloc((size_t)width, sizeof *db);
  CHECK(c.y != NULL && y != NULL && dw != NULL && db != NULL);
  memset(dw, 0x7f, (size_t)width * sizeof *dw); /* these are set */
  memset(db, 0x7f, (size_t)width * sizeof *db);
  gpt_norm_forward(&(gpt_norm_t){ rows, width, c.x.f, c.w.b, c.b.b, y });
  norm_objective(&c);
  for (uint64_t i = 0; i < count; i++) near(y[i], c.y[i], FLOAT_TOLERANCE, "norm", i);
  gpt_norm_backward(&(gpt_norm_gradient_t){ rows, width, c.x.f, c.w.b, c.dy.f, start.f, dw, db, NULL });
  for (uint64_t i = 0; i < count; i++) {
    near(start.f[i], start.d[i] + slope(norm_objective, &c, &c.x.d[i]), FLOAT_TOLERANCE, "norm dx", i);
  }
  for (uint64_t i = 0; i < (uint64_t)width; i++) {
    near(dw[i], slope(norm_objective, &c, &c.w.d[i]), FLOAT_TOLERANCE, "norm dweight", i);
    near(db[i], slope(norm_objective, &c, &c.b.d[i]), FLOAT_TOLERANCE, "norm dbias", i);
  }
  values_free(&c.x), values_free(&c.w), values_free(&c.b), values_free(&c.dy), values_free(&start);
  free(c.y), free(y), free(dw), free(db);
}

static void test_norm_backward_matches_differences(void) {
  random_state = 2;
  check_norm(3, 32); /* whole lanes */
  check_norm(2, 21); /* and a rest */
  check_norm(4, 5);  /* only a rest */
}

/* Where the variance is not above GPT_NORM_EPSILON, which is otherwise too small to be seen. */
static void test_norm_of_small_rows_keeps_epsilon(void) {
  random_state = 13;
  values_t x = values_drawn(2 * 16), w = values_drawn(16), b = values_drawn(16);
  double expected[2 * 16];
  float y[2 * 16];
  for (uint64_t i = 0; i < 16; i++) {
    values_set(&x, i, 0.75); /* no variance at all */
    values_set(&x, 16 + i, x.d[16 + i] / 256);
  }
  reference_norm(x.d, w.d, b.d, 2, 16, expected);
  gpt_norm_forward(&(gpt_norm_t){ 2, 16, x.f, w.b, b.b, y });
  for (uint64_t i = 0; i < 32; i++) near(y[i], expected[i], FLOAT_TOLERANCE, "norm of small rows", i);
  values_free(&x), values_free(&w), values_free(&b);
}

/* ---- Linear ---- */

typedef struct linear_case {
  int rows, in, out;
  values_t x, w, b, residual, dy;
  double *y;
} linear_case_t;

static double linear_objective(void *context) {
  linear_case_t *c = context;
  reference_linear(c->x.d, c->w.d, c->b.d, c->residual.d, c->rows, c->in, c->out, c->y);
  return weighed(c->y, &c->dy);
}

static void test_linear_backward_matches_differences(void) {
  random_state = 3;
  int rows = 5, in = 24, out = 31;
  uint64_t x_count = 5 * 24, w_count = 24 * 31, y_count = 5 * 31;
  linear_case_t c = { rows,
                      in,
                      out,
                      values_drawn(x_count),
                      values_drawn(w_count),
                      values_drawn(31),
                      values_drawn(y_count),
                      values_drawn(y_count),
                      calloc(y_count, sizeof(double)) };
  values_t y = values_zero(y_count), dx = values_zero(x_count), dw = values_zero(w_count), db = values_zero(31);
  values_t workspace = values_zero(gpt_panel_floats(in, out));
  memset(dx.f, 0xff, x_count * sizeof(float)); /* NaNs: nothing of them may stay */
  gpt_linear_forward(&(gpt_linear_t){ rows, in, out, c.x.f, c.w.b, c.b.b, c.residual.f, y.f, workspace.f });
  linear_objective(&c);
  for (uint64_t i = 0; i < y_count; i++) near(y.f[i], c.y[i], FLOAT_TOLERANCE, "linear", i);
  memcpy(y.f, c.residual.f, y_count * sizeof(float));
  gpt_linear_forward(&(gpt_linear_t){ rows, in, out, c.x.f, c.w.b, c.b.b, y.f, y.f, workspace.f });
  for (uint64_t i = 0; i < y_count; i++) near(y.f[i], c.y[i], FLOAT_TOLERANCE, "linear in place", i);

  gpt_linear_backward_x(&(gpt_linear_gradient_x_t){ rows, in, out, c.dy.f, c.w.b, dx.f, workspace.f });
  gpt_linear_backward_weight(
      &(gpt_linear_gradient_weight_t){ rows, in, out, c.x.f, c.dy.f, dw.b, db.b, dw.f, workspace.f });
  for (uint64_t i = 0; i < x_count; i++) {
    near(dx.f[i], slope(linear_objective, &c, &c.x.d[i]), FLOAT_TOLERANCE, "linear dx", i);
  }
  for (uint64_t i = 0; i < w_count; i++) {
    double expected = slope(linear_objective, &c, &c.w.d[i]);
    near(dw.f[i], expected, FLOAT_TOLERANCE, "linear dweight_f32", i);
    near(gpt_f32_from_bf16(dw.b[i]), expected, FLOAT_TOLERANCE + BF16_TOLERANCE * fabs(expected), "linear dweight", i);
  }
  for (uint64_t i = 0; i < 31; i++) {
    double expected = slope(linear_objective, &c, &c.b.d[i]);
    near(gpt_f32_from_bf16(db.b[i]), expected, FLOAT_TOLERANCE + BF16_TOLERANCE * fabs(expected), "linear dbias", i);
  }
  values_free(&c.x), values_free(&c.w), values_free(&c.b), values_free(&c.residual), values_free(&c.dy);
  values_free(&y), values_free(&dx), values_free(&dw), values_free(&db), values_free(&workspace);
  free(c.y);
}

/* A weight of more than one panel; the last one smaller. Against the reference's own gradients, which are sums. */
static void test_linear_in_panels_matches_reference(void) {
  random_state = 4;
  int rows = 2, in = 600, out = 250; /* 109 rows of 600 in a panel */
  uint64_t w_count = 600 * 250;
  values_t x = values_drawn(1200), w = values_drawn(w_count), dy = values_drawn(500), y = values_zero(500);
  values_t dx = values_zero(1200), dw = values_zero(w_count), workspace = values_zero(gpt_panel_floats(in, out));
  CHECK(workspace.count < w_count);
  reference_linear(x.d, w.d, NULL, NULL, rows, in, out, y.d);
  gpt_linear_forward(&(gpt_linear_t){ rows, in, out, x.f, w.b, NULL, NULL, y.f, workspace.f });
  /* Terms are multiples of 2^-14 below 1, sums of up to 600 of them below 2^10: exact in fp32's 24 bits. */
  for (uint64_t i = 0; i < 500; i++) near(y.f[i], y.d[i], 0, "linear in panels", i);
  gpt_linear_backward_x(&(gpt_linear_gradient_x_t){ rows, in, out, dy.f, w.b, dx.f, workspace.f });
  gpt_linear_backward_weight(
      &(gpt_linear_gradient_weight_t){ rows, in, out, x.f, dy.f, dw.b, NULL, NULL, workspace.f });
  for (int r = 0; r < rows; r++) {
    for (int i = 0; i < in; i++) {
      double expected = 0;
      for (int o = 0; o < out; o++) expected += dy.d[r * out + o] * w.d[o * in + i];
      near(dx.f[r * in + i], expected, 0, "dx in panels", (uint64_t)(r * in + i));
    }
  }
  for (int o = 0; o < out; o++) {
    for (int i = 0; i < in; i++) {
      double expected = dy.d[o] * x.d[i] + dy.d[out + o] * x.d[in + i];
      near(gpt_f32_from_bf16(dw.b[o * in + i]), expected, BF16_TOLERANCE * fabs(expected), "dweight in panels",
           (uint64_t)(o * in + i));
    }
  }
  values_free(&x), values_free(&w), values_free(&dy), values_free(&y), values_free(&dx), values_free(&dw);
  values_free(&workspace);
}

/* ---- Attention ---- */

enum { BATCH = 2, CONTEXT = 7, HEADS = 3, WIDTH = 12, ROWS = BATCH * CONTEXT };

typedef struct attention_case {
  values_t qkv, dy;
  double *y;
} attention_case_t;

static double attention_objective(void *context) {
  attention_case_t *c = context;
  reference_attention(c->qkv.d, BATCH, CONTEXT, WIDTH, HEADS, c->y);
  return weighed(c->y, &c->dy);
}

static void test_attention_backward_matches_differences(void) {
  random_state = 5;
  attention_case_t c = { values_drawn(ROWS * 3 * WIDTH), values_drawn(ROWS * WIDTH),
                         calloc(ROWS * WIDTH, sizeof(double)) };
  values_t y = values_zero(ROWS * WIDTH), dqkv = values_zero(ROWS * 3 * WIDTH);
  float workspace[2 * CONTEXT * CONTEXT];
  for (uint64_t i = 0; i < c.qkv.count; i++) values_set(&c.qkv, i, 2 * c.qkv.d[i]); /* weights far from equal */
  memset(dqkv.f, 0xff, dqkv.count * sizeof(float));
  gpt_attention_forward(&(gpt_attention_t){ BATCH, CONTEXT, WIDTH, HEADS, c.qkv.f, y.f, workspace });
  attention_objective(&c);
  for (uint64_t i = 0; i < y.count; i++) near(y.f[i], c.y[i], FLOAT_TOLERANCE, "attention", i);
  gpt_attention_backward(
      &(gpt_attention_gradient_t){ BATCH, CONTEXT, WIDTH, HEADS, c.qkv.f, c.dy.f, dqkv.f, workspace });
  for (uint64_t i = 0; i < dqkv.count; i++) {
    near(dqkv.f[i], slope(attention_objective, &c, &c.qkv.d[i]), FLOAT_TOLERANCE, "attention dqkv", i);
  }
  values_free(&c.qkv), values_free(&c.dy), values_free(&y), values_free(&dqkv);
  free(c.y);
}

/* ---- GELU ---- */

static double gelu_objective(void *context) { return reference_gelu(*(double *)context); }

static void test_gelu_matches_reference_and_differences(void) {
  float x[321], y[321], dy[321];
  for (int i = 0; i < 321; i++) x[i] = (float)(i - 160) / 16, dy[i] = 3; /* -10 .. 10 */
  gpt_gelu_forward(&(gpt_gelu_t){ 321, x, y });
  gpt_gelu_backward(&(gpt_gelu_gradient_t){ 321, x, dy });
  for (int i = 0; i < 321; i++) {
    double value = (double)x[i];
    /* 1 + tanh is wrong by a few u, whatever x. */
    near(y[i], reference_gelu(value), 0x1p-21 * (1 + fabs(value)), "gelu", (uint64_t)i);
    near(dy[i], 3 * slope(gelu_objective, &value, &value), FLOAT_TOLERANCE, "gelu dx", (uint64_t)i);
  }
  gpt_gelu_forward(&(gpt_gelu_t){ 321, x, x }); /* in place */
  CHECK(memcmp(x, y, sizeof x) == 0);
  float odd[2] = { NAN, 200.0f };
  gpt_gelu_forward(&(gpt_gelu_t){ 2, odd, odd });
  CHECK(isnan(odd[0]) && odd[1] == 200.0f);
}

/* ---- Loss, embedding ---- */

typedef struct loss_case {
  values_t logits;
  int32_t targets[3];
} loss_case_t;

static double loss_objective(void *context) {
  loss_case_t *c = context;
  return reference_loss(c->logits.d, c->targets, 3);
}

static void test_loss_backward_matches_differences(void) {
  random_state = 6;
  loss_case_t c = { values_drawn(3 * GPT_VOCABULARY), { 0, 17, GPT_VOCABULARY - 1 } };
  for (uint64_t i = 0; i < c.logits.count; i++) values_set(&c.logits, i, 8 * c.logits.d[i]);
  values_t untouched = values_zero(c.logits.count);
  memcpy(untouched.f, c.logits.f, c.logits.count * sizeof(float));
  double loss = 0, loss_alone = 0;
  gpt_loss(&(gpt_loss_t){ 3, c.targets, untouched.f, 0, &loss_alone, NULL });
  CHECK(memcmp(untouched.f, c.logits.f, c.logits.count * sizeof(float)) == 0);
  gpt_loss(&(gpt_loss_t){ 3, c.targets, c.logits.f, 1, &loss, NULL });
  CHECK(loss == loss_alone);
  near(loss, loss_objective(&c), 0x1p-20 * fabs(loss), "loss", 0);
  for (uint64_t i = 0; i < c.logits.count; i++) {
    /* Gradients are below 1/3, and not sums: 2e-6 is the difference's own error. */
    near(c.logits.f[i], slope(loss_objective, &c, &c.logits.d[i]), 2e-6, "loss dlogits", i);
  }
  untouched.f[5] = NAN; /* of no target, yet it must show */
  gpt_loss(&(gpt_loss_t){ 3, c.targets, untouched.f, 0, &loss, NULL });
  CHECK(isnan(loss));
  values_free(&c.logits), values_free(&untouched);
}

static void test_embed_backward_adds_up_rows(void) {
  enum { B = 2, C = 3, W = 4, POSITIONS = 5 };
  random_state = 7;
  const int32_t tokens[B * C] = { 9, 200, 9, 0, 9, 255 };
  values_t wte = values_drawn(GPT_VOCABULARY * W), wpe = values_drawn(POSITIONS * W), x = values_zero(B * C * W);
  values_t dx = values_drawn(B * C * W), dwte = values_drawn(GPT_VOCABULARY * W), dwpe = values_drawn(POSITIONS * W);
  float workspace[W];
  gpt_embed_forward(&(gpt_embed_t){ B, C, W, POSITIONS, tokens, wte.b, wpe.b, x.f });
  for (int t = 0; t < B * C; t++) {
    for (int i = 0; i < W; i++) {
      near(x.f[t * W + i], wte.d[tokens[t] * W + i] + wpe.d[t % C * W + i], 0, "embed", (uint64_t)(t * W + i));
    }
  }
  gpt_embed_backward(&(gpt_embed_gradient_t){ B, C, W, POSITIONS, tokens, dx.f, dwte.f, dwte.b, dwpe.b, workspace });
  for (int v = 0; v < GPT_VOCABULARY; v++) {
    for (int i = 0; i < W; i++) {
      double expected = dwte.d[v * W + i]; /* multiples of 2^-7 below 4: 9 bits, so bf16 rounds some */
      for (int t = 0; t < B * C; t++) expected += tokens[t] == v ? dx.d[t * W + i] : 0;
      near(gpt_f32_from_bf16(dwte.b[v * W + i]), expected, BF16_TOLERANCE * fabs(expected), "dwte",
           (uint64_t)(v * W + i));
    }
  }
  for (int p = 0; p < POSITIONS; p++) {
    for (int i = 0; i < W; i++) {
      double expected = p < C ? dx.d[p * W + i] + dx.d[(C + p) * W + i] : 0;
      near(gpt_f32_from_bf16(dwpe.b[p * W + i]), expected, BF16_TOLERANCE * fabs(expected), "dwpe",
           (uint64_t)(p * W + i));
    }
  }
  values_free(&wte), values_free(&wpe), values_free(&x), values_free(&dx), values_free(&dwte), values_free(&dwpe);
}

/* ---- AdamW ---- */

static void test_adamw_matches_float64_reference(void) {
  enum { COUNT = 67, STEPS = 60 };
  random_state = 8;
  values_t p = values_drawn(COUNT);
  float m[COUNT] = { 0 }, v[COUNT] = { 0 };
  double rm[COUNT] = { 0 }, rv[COUNT] = { 0 };
  gpt_adamw_t adamw = { 1e-2f, 0.9f, 0.95f, 0.05f, 0.1f, 0.25f, 0 };
  /* The large epsilon makes the gradient's scale matter: without it AdamW hardly changes with it. */
  for (uint32_t step = 1; step <= STEPS; step++) {
    values_t g = values_drawn(COUNT);
    values_set(&g, 0, 0); /* an element that never has a gradient: decay only */
    adamw.step = step;
    gpt_adamw_factors_t factors = gpt_adamw_factors(&adamw);
    gpt_adamw_range(&factors, COUNT, g.b, p.b, p.f, m, v);
    double b1 = (double)adamw.beta1, b2 = (double)adamw.beta2, lr = (double)adamw.learning_rate;
    for (int i = 0; i < COUNT; i++) {
      double gradient = g.d[i] * (double)adamw.gradient_scale;
      rm[i] = b1 * rm[i] + (1 - b1) * gradient;
      rv[i] = b2 * rv[i] + (1 - b2) * gradient * gradient;
      double m_hat = rm[i] / (1 - pow(b1, step)), v_hat = rv[i] / (1 - pow(b2, step));
      p.d[i] -= lr * (m_hat / (sqrt(v_hat) + (double)adamw.epsilon) + (double)adamw.weight_decay * p.d[i]);
      /* A step rounds p, which is below 2, twice (2 * 2^-24 * 2) and a change below 0.1 some ten times
       * (10 * 2^-24 * 0.1): 5 * 2^-24 a step. */
      near(p.f[i], p.d[i], 5 * 0x1p-24 * step, "adamw", (uint64_t)i);
      CHECK_EQ(p.b[i], gpt_bf16_from_f32(p.f[i]));
    }
    values_free(&g);
  }
  values_free(&p);
}

static void test_adamw_in_pieces_gives_the_same_bits(void) {
  enum { COUNT = 1000 };
  random_state = 9;
  gpt_adamw_t step = { 3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.7f, 3 };
  gpt_adamw_factors_t adamw = gpt_adamw_factors(&step);
  values_t g = values_drawn(COUNT), whole = values_drawn(COUNT), m = values_drawn(COUNT), v = values_drawn(COUNT);
  values_t pieces = values_zero(COUNT), m2 = values_zero(COUNT), v2 = values_zero(COUNT);
  for (int i = 0; i < COUNT; i++) v.f[i] = fabsf(v.f[i]);
  memcpy(pieces.f, whole.f, COUNT * sizeof(float));
  memcpy(m2.f, m.f, COUNT * sizeof(float));
  memcpy(v2.f, v.f, COUNT * sizeof(float));
  memcpy(pieces.b, g.b, COUNT * sizeof(uint16_t)); /* the gradient in the place of the parameter */
  gpt_adamw_range(&adamw, COUNT, g.b, whole.b, whole.f, m.f, v.f);
  for (uint64_t first = 0, count; first < COUNT; first += count) {
    count = 1 + check_random(&random_state) % 40;
    if (count > COUNT - first) count = COUNT - first;
    gpt_adamw_range(&adamw, count, pieces.b + first, pieces.b + first, pieces.f + first, m2.f + first, v2.f + first);
  }
  CHECK(memcmp(pieces.f, whole.f, COUNT * sizeof(float)) == 0);
  CHECK(memcmp(pieces.b, whole.b, COUNT * sizeof(uint16_t)) == 0);
  CHECK(memcmp(m2.f, m.f, COUNT * sizeof(float)) == 0 && memcmp(v2.f, v.f, COUNT * sizeof(float)) == 0);
  values_free(&g), values_free(&whole), values_free(&m), values_free(&v), values_free(&pieces), values_free(&m2);
  values_free(&v2);
}

static void test_clip_scale_limits_the_norm(void) {
  CHECK(gpt_clip_scale(4, 1) == 0.25f);
  CHECK(gpt_clip_scale(0.5, 1) == 1.0f);
  CHECK(gpt_clip_scale(0, 1) == 1.0f);
  CHECK(gpt_clip_scale(4, 0) == 1.0f);
}

/* ---- The model as a whole, over plain memory ---- */

static const model_shape_t shape = { .layers = 2, .width = WIDTH, .heads = HEADS, .positions = CONTEXT + 2 };

typedef struct rig {
  memory_t memory;
  model_t model;
  values_t *tensors; /* the model's parameters, memory.tensor_count of them */
  int32_t tokens[BATCH * (CONTEXT + 1)];
  int skipped; /* block, or -1 */
} rig_t;

static rig_t *rig_open(void) {
  rig_t *rig = calloc(1, sizeof *rig);
  CHECK(rig != NULL);
  rig->skipped = -1;
  memory_open(&rig->memory, &device_cpu, NULL, true);
  CHECK(model_open(&rig->model, &rig->memory, &gpt_cpu, &shape));
  memory_ready(&rig->memory);
  CHECK(memory_error(&rig->memory) == NULL);
  rig->tensors = calloc((size_t)rig->memory.tensor_count, sizeof *rig->tensors);
  CHECK(rig->tensors != NULL);
  for (int i = 0; i < rig->memory.tensor_count; i++) { /* far from the initial values, where much is near zero */
    rig->tensors[i] = values_drawn(rig->memory.tensors[i].elements);
    uint16_t *parameter = memory_host_acquire(&rig->memory, GEMINI_KIND_PARAM, GEMINI_WRITE, i);
    memcpy(parameter, rig->tensors[i].b, rig->tensors[i].count * sizeof *parameter);
    memory_host_release(&rig->memory, GEMINI_KIND_PARAM, i);
  }
  for (size_t i = 0; i < sizeof rig->tokens / sizeof rig->tokens[0]; i++) {
    rig->tokens[i] = (int32_t)(check_random(&random_state) >> 59); /* of 32, so that some come twice */
  }
  return rig;
}

static void rig_close(rig_t *rig) {
  for (int i = 0; i < rig->memory.tensor_count; i++) values_free(&rig->tensors[i]);
  free(rig->tensors);
  CHECK_EQ(rig->memory.nonmodel_bytes, 0); /* every activation was freed */
  CHECK_EQ(rig->memory.acquired_bytes, 0);
  model_close(&rig->model);
  memory_close(&rig->memory);
  free(rig);
}

static double rig_step(rig_t *rig) {
  double loss = 0;
  memory_iteration_begin(&rig->memory);
  model_embed(&rig->model, BATCH, CONTEXT, rig->tokens);
  for (int layer = 0; layer < shape.layers; layer++) {
    if (layer == rig->skipped) {
      model_block_skip(&rig->model, layer);
    } else {
      model_block(&rig->model, layer);
    }
  }
  model_head(&rig->model, 1, &loss);
  for (int layer = shape.layers - 1; layer >= 0; layer--) {
    if (layer != rig->skipped) model_block_backward(&rig->model, layer);
  }
  model_embed_backward(&rig->model);
  memory_iteration_end(&rig->memory);
  CHECK(memory_error(&rig->memory) == NULL);
  return loss;
}

/* The whole model in double: its loss as a function of rig->tensors. */
static double rig_objective(void *context) {
  rig_t *rig = context;
  double x[ROWS * WIDTH], n[ROWS * WIDTH], qkv[ROWS * 3 * WIDTH], hidden[ROWS * 4 * WIDTH];
  double logits[ROWS * GPT_VOCABULARY];
  int32_t targets[ROWS];
  const double *wte = rig->tensors[MODEL_WTE].d;
  for (int t = 0; t < ROWS; t++) {
    const int32_t *token = &rig->tokens[t / CONTEXT * (CONTEXT + 1) + t % CONTEXT];
    targets[t] = token[1];
    for (int i = 0; i < WIDTH; i++) {
      x[t * WIDTH + i] = wte[*token * WIDTH + i] + rig->tensors[MODEL_WPE].d[t % CONTEXT * WIDTH + i];
    }
  }
  for (int layer = 0; layer < shape.layers; layer++) {
    if (layer == rig->skipped) continue;
    const values_t *p = rig->tensors + model_block_tensor(layer, 0);
    reference_norm(x, p[MODEL_LN1_WEIGHT].d, p[MODEL_LN1_BIAS].d, ROWS, WIDTH, n);
    reference_linear(n, p[MODEL_QKV_WEIGHT].d, p[MODEL_QKV_BIAS].d, NULL, ROWS, WIDTH, 3 * WIDTH, qkv);
    reference_attention(qkv, BATCH, CONTEXT, WIDTH, HEADS, n);
    reference_linear(n, p[MODEL_PROJ_WEIGHT].d, p[MODEL_PROJ_BIAS].d, x, ROWS, WIDTH, WIDTH, x);
    reference_norm(x, p[MODEL_LN2_WEIGHT].d, p[MODEL_LN2_BIAS].d, ROWS, WIDTH, n);
    reference_linear(n, p[MODEL_FC_WEIGHT].d, p[MODEL_FC_BIAS].d, NULL, ROWS, WIDTH, 4 * WIDTH, hidden);
    for (int i = 0; i < ROWS * 4 * WIDTH; i++) hidden[i] = reference_gelu(hidden[i]);
    reference_linear(hidden, p[MODEL_FC2_WEIGHT].d, p[MODEL_FC2_BIAS].d, x, ROWS, 4 * WIDTH, WIDTH, x);
  }
  const values_t *final = rig->tensors + model_block_tensor(shape.layers, 0);
  reference_norm(x, final[0].d, final[1].d, ROWS, WIDTH, n);
  reference_linear(n, wte, NULL, NULL, ROWS, WIDTH, GPT_VOCABULARY, logits);
  return reference_loss(logits, targets, ROWS);
}

/* The errors of fp32 pass through some 25 sums of up to 48 terms, each of relative error below 48 * 2^-24, and what
 * they add to an element is relative to the largest elements of its tensor: 25 * 48 * 2^-24 = 7e-5 of these; twice
 * that, 2^-13 with room. */
static void check_gradients(rig_t *rig) {
  near(rig_step(rig), rig_objective(rig), 0x1p-18 * 8, "loss of the model", 0);
  for (int tensor = 0; tensor < rig->memory.tensor_count; tensor++) {
    values_t *values = &rig->tensors[tensor];
    const uint16_t *gradient = memory_host_acquire(&rig->memory, GEMINI_KIND_GRAD, GEMINI_READ, tensor);
    double largest = 0, expected[64];
    uint64_t at[64], count = values->count < 64 ? values->count : 64;
    for (uint64_t k = 0; k < count; k++) {
      at[k] = values->count <= 64 ? k : check_random(&random_state) % values->count;
      expected[k] = slope(rig_objective, rig, &values->d[at[k]]);
      if (fabs(expected[k]) > largest) largest = fabs(expected[k]);
    }
    for (uint64_t k = 0; k < count; k++) {
      double tolerance = 0x1p-13 * largest + BF16_TOLERANCE * fabs(expected[k]) + 2e-6;
      near(gpt_f32_from_bf16(gradient[at[k]]), expected[k], tolerance, "gradient of the model",
           (uint64_t)tensor * 1000000 + at[k]);
    }
    memory_host_release(&rig->memory, GEMINI_KIND_GRAD, tensor);
  }
}

static void test_model_gradients_match_differences(void) {
  random_state = 10;
  rig_t *rig = rig_open();
  check_gradients(rig);
  rig_close(rig);
}

/* First a step with all blocks, so that the skipped one's gradient is there, stale. */
static void test_model_skipped_block_has_zero_gradient(void) {
  random_state = 11;
  rig_t *rig = rig_open();
  rig_step(rig);
  double full = memory_gradient_norm(&rig->memory, gpt_cpu.squares);
  for (rig->skipped = 0; rig->skipped < shape.layers; rig->skipped++) {
    rig_step(rig);
    double part = memory_gradient_norm(&rig->memory, gpt_cpu.squares), squares = 0;
    for (int tensor = 0; tensor < rig->memory.tensor_count; tensor++) {
      const uint16_t *gradient = memory_host_acquire(&rig->memory, GEMINI_KIND_GRAD, GEMINI_READ, tensor);
      bool skipped = (tensor - MODEL_FIRST_BLOCK) / MODEL_BLOCK_TENSORS == rig->skipped && tensor >= MODEL_FIRST_BLOCK;
      for (uint64_t i = 0; i < rig->tensors[tensor].count; i++) {
        double g = (double)gpt_f32_from_bf16(gradient[i]);
        if (skipped) CHECK(g == 0);
        squares += g * g;
      }
      memory_host_release(&rig->memory, GEMINI_KIND_GRAD, tensor);
    }
    near(part, sqrt(squares), 1e-12 * part, "norm", 0);
    CHECK(part != full);
  }
  rig->skipped = 1;
  near(rig_step(rig), rig_objective(rig), 0x1p-18 * 8, "loss without a block", 0);
  rig_close(rig);
}

/* What the head sees of a position, to the last bit, before and after a later token changes. */
static void test_model_later_token_changes_nothing_earlier(void) {
  random_state = 12;
  rig_t *rig = rig_open();
  for (int changed = 0; changed < CONTEXT; changed++) {
    float before[ROWS * WIDTH];
    for (int run = 0; run < 2; run++) {
      if (run == 1) rig->tokens[changed] += 100;
      memory_iteration_begin(&rig->memory);
      model_embed(&rig->model, BATCH, CONTEXT, rig->tokens);
      for (int layer = 0; layer < shape.layers; layer++) model_block(&rig->model, layer);
      const float *x = rig->model.inputs[shape.layers];
      for (int t = 0; t < ROWS && run == 1; t++) {
        bool same = memcmp(x + t * WIDTH, before + t * WIDTH, WIDTH * sizeof(float)) == 0;
        CHECK_EQ(same, t < changed || t >= CONTEXT); /* t >= CONTEXT: the other sequence */
      }
      memcpy(before, x, sizeof before);
      model_drop(&rig->model);
      memory_iteration_end(&rig->memory);
    }
    rig->tokens[changed] -= 100;
  }
  rig_close(rig);
}

static void test_model_initial_values_are_seeded(void) {
  uint64_t hashes[3], elements = model_elements(&shape);
  for (int run = 0; run < 3; run++) {
    rig_t *rig = rig_open();
    CHECK_EQ(rig->memory.elements, elements);
    model_initialise(&rig->model, run < 2 ? 5 : 6);
    hashes[run] = model_hash(&rig->model);
    const float *master = memory_host_acquire(&rig->memory, GEMINI_KIND_MASTER, GEMINI_READ, MODEL_WTE);
    const uint16_t *parameter = memory_host_acquire(&rig->memory, GEMINI_KIND_PARAM, GEMINI_READ, MODEL_WTE);
    double sum = 0, squares = 0;
    uint64_t count = rig->tensors[MODEL_WTE].count;
    for (uint64_t i = 0; i < count; i++) {
      CHECK_EQ(parameter[i], gpt_bf16_from_f32(master[i]));
      sum += (double)master[i];
      squares += (double)master[i] * (double)master[i];
    }
    /* Four standard errors: of a mean 0.02 / sqrt(n), of a deviation 0.02 / sqrt(2n). */
    near(sum / (double)count, 0, 4 * 0.02 / sqrt((double)count), "mean", 0);
    near(sqrt(squares / (double)count), 0.02, 4 * 0.02 / sqrt(2 * (double)count), "deviation", 0);
    rig_close(rig);
  }
  CHECK(hashes[0] == hashes[1]);
  CHECK(hashes[0] != hashes[2]);
}

static void test_memory_norm_adds_in_blocks_of_65536_bytes(void) {
  enum { BLOCK = 32768 };
  memory_t memory;
  memory_open(&memory, &device_cpu, NULL, true);
  memory_register(&memory, "a", 2 * BLOCK);
  memory_ready(&memory);
  memory_iteration_begin(&memory);
  uint16_t *gradient = memory_host_acquire(&memory, GEMINI_KIND_GRAD, GEMINI_WRITE, 0);
  CHECK(gradient != NULL);
  memset(gradient, 0, 2 * BLOCK * sizeof *gradient);
  /* The first block's sum is 2^53; ones that were added to it one by one would all be lost. */
  gradient[0] = gradient[1] = gpt_bf16_from_f32(0x1p26f);
  for (int i = BLOCK; i < 2 * BLOCK; i++) gradient[i] = gpt_bf16_from_f32(1);
  memory_host_release(&memory, GEMINI_KIND_GRAD, 0);
  double norm = memory_gradient_norm(&memory, gpt_cpu.squares);
  CHECK(norm == sqrt(0x1p53 + BLOCK) && norm != sqrt(0x1p53));
  memory_close(&memory);
}

static void test_memory_gradients_add_in_order_in_float_rounded_once(void) {
  enum { TENSORS = 3, MICRO_BATCHES = 3 };
  static const float nothing = -1; /* not written: zero */
  const float values[TENSORS][MICRO_BATCHES] = {
    { 0x1p24f, 1, -0x1p24f }, /* 0; 1 in another order */
    { 1, 0x1p-8f, 0x1p-8f },  /* 1 + 2^-7; 1 if each sum is rounded */
    { 3, nothing, 4 },        /* 7; 10 if the second micro-batch's gradient is that of the first */
  };
  static const float expected[TENSORS] = { 0, 1 + 0x1p-7f, 7 };
  memory_t memory;
  memory_open(&memory, &device_cpu, NULL, true);
  for (int tensor = 0; tensor < TENSORS; tensor++) memory_register(&memory, "t", 1);
  memory_ready(&memory);
  for (int step = 0; step < 2; step++) {
    memory_iteration_begin(&memory);
    for (int i = 0; i < MICRO_BATCHES; i++) {
      for (int tensor = 0; tensor < TENSORS; tensor++) {
        if (values[tensor][i] == nothing) continue;
        uint16_t *gradient = memory_host_acquire(&memory, GEMINI_KIND_GRAD, GEMINI_WRITE, tensor);
        CHECK(gradient != NULL);
        *gradient = gpt_bf16_from_f32(values[tensor][i]);
        memory_host_release(&memory, GEMINI_KIND_GRAD, tensor);
      }
      memory_gradients_add(&memory, i, MICRO_BATCHES);
    }
    for (int tensor = 0; tensor < TENSORS; tensor++) {
      const uint16_t *sum = memory_host_acquire(&memory, GEMINI_KIND_GRAD, GEMINI_READ, tensor);
      CHECK(sum != NULL && gpt_f32_from_bf16(*sum) == expected[tensor]);
      memory_host_release(&memory, GEMINI_KIND_GRAD, tensor);
    }
    memory_iteration_end(&memory);
  }
  CHECK(memory_error(&memory) == NULL);
  memory_close(&memory);
}

/* ---- Text ---- */

static void write_file(const char *directory, const char *name, const char *content) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  FILE *file = fopen(path, "w");
  CHECK(file != NULL);
  CHECK(fputs(content, file) >= 0);
  CHECK(fclose(file) == 0);
}

static void test_text_directory_reads_each_file_once_by_name(void) {
  char directory[] = "/tmp/test_gpt.XXXXXX", path[128], message[256];
  CHECK(mkdtemp(directory) != NULL);
  write_file(directory, "c", "last");
  write_file(directory, "B", "first, ");
  snprintf(path, sizeof path, "%s/a", directory); /* a link sorts where its own name does */
  CHECK(symlink("c", path) == 0);
  snprintf(path, sizeof path, "%s/nothing", directory);
  CHECK(symlink("missing", path) == 0);
  snprintf(path, sizeof path, "%s/folder", directory);
  CHECK(mkdir(path, 0700) == 0);
  text_t text;
  CHECK(text_load(&text, directory, message, sizeof message));
  CHECK_EQ(text.count, 11);
  CHECK(memcmp(text.bytes, "first, last", 11) == 0);
  int32_t tokens[2 * 11], again[2 * 11];
  uint64_t random = 1;
  text_batch(&text, &random, 2, 10, tokens); /* one place only */
  for (int i = 0; i < 22; i++) CHECK_EQ(tokens[i], "first, last"[i % 11]);
  random = 2;
  text_batch(&text, &random, 2, 5, tokens);
  random = 2;
  text_batch(&text, &random, 2, 5, again);
  CHECK(memcmp(tokens, again, 12 * sizeof tokens[0]) == 0);
  text_free(&text);
  static const char *const names[] = { "a", "B", "c", "nothing" };
  for (int i = 0; i < 4; i++) {
    snprintf(path, sizeof path, "%s/%s", directory, names[i]);
    CHECK(unlink(path) == 0);
  }
  snprintf(path, sizeof path, "%s/folder", directory);
  CHECK(rmdir(path) == 0);
  CHECK(rmdir(directory) == 0);
  CHECK(!text_load(&text, directory, message, sizeof message));
  CHECK(strstr(message, directory) != NULL);
}

int main(void) {
  gpt_setup();
  RUN(test_bf16_from_f32_rounds_to_nearest_even);
  RUN(test_bf16_to_f32_and_back_is_identity);
  RUN(test_norm_backward_matches_differences);
  RUN(test_norm_of_small_rows_keeps_epsilon);
  RUN(test_linear_backward_matches_differences);
  RUN(test_linear_in_panels_matches_reference);
  RUN(test_attention_backward_matches_differences);
  RUN(test_gelu_matches_reference_and_differences);
  RUN(test_loss_backward_matches_differences);
  RUN(test_embed_backward_adds_up_rows);
  RUN(test_adamw_matches_float64_reference);
  RUN(test_adamw_in_pieces_gives_the_same_bits);
  RUN(test_clip_scale_limits_the_norm);
  RUN(test_model_gradients_match_differences);
  RUN(test_model_skipped_block_has_zero_gradient);
  RUN(test_model_later_token_changes_nothing_earlier);
  RUN(test_model_initial_values_are_seeded);
  RUN(test_memory_norm_adds_in_blocks_of_65536_bytes);
  RUN(test_memory_gradients_add_in_order_in_float_rounded_once);
  RUN(test_text_directory_reads_each_file_once_by_name);
  return check_done();
}
