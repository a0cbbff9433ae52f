/* A training loop in plain C, and the same loop on libgemini: what is between #ifdef GEMINI and #endif (or #else) is all
 * that the move adds. docs/move.md goes through it, and a test compares what both variants print, to the bit.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     cc move_loop.c -lm                                                                        the plain loop
 *     cc -DGEMINI move_loop.c -lm $(pkg-config --cflags --libs gemini_update)                   on libgemini
 *
 * The model is a chain of layers, y = tanh(W x + b), trained to map vectors to their reverse. As in many C programs, all
 * values of one type are in one block (weights, gradients, momentum), and layer i is a pointer into it. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef GEMINI
#include "gemini_update.h"
#endif

enum { LAYERS = 8, WIDTH = 128, BATCH = 4, STEPS = 6, LAYER = WIDTH * WIDTH + WIDTH, ALL = LAYERS * LAYER };
static const double rate = 0.02, inertia = 0.9;

static float *weights, *gradients;
#ifdef GEMINI
static gemini_manager_t mgr;
static gemini_arena_t weight_arena, gradient_arena, momentum_arena;

static void must(gemini_status_t status) {
  if (status) fprintf(stderr, "%s\n", gemini_error_text()), exit(1);
}
static float *arena_new(uint32_t kind, gemini_arena_t like, gemini_arena_t *arena) {
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  config.kind = kind, config.like = like, config.element_bytes = sizeof(float);
  must(gemini_arena_create(mgr, &config, arena));
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  must(gemini_arena_info(mgr, *arena, &info));
  return (float *)(uintptr_t)info.base;
}
static void op_begin(const char *name, int layer, uint32_t mode, uint32_t gradient_mode) { /* 0: no gradients */
  float *w = weights + layer * LAYER, *g = gradients + layer * LAYER;
  gemini_access_t uses[] = { gemini_address_access(w, LAYER * sizeof *w, mode, GEMINI_TIER_DEVICE),
                             gemini_address_access(g, LAYER * sizeof *g, gradient_mode, GEMINI_TIER_DEVICE) };
  must(gemini_op_begin_with(mgr, name, GEMINI_STREAM_CALLER, uses, gradient_mode ? 2 : 1));
}
#else
static float *momentum;
#endif

/* y = tanh(W x + b), for each row of the batch */
static void forward(float *y, const float *x, const float *w) {
  for (int n = 0; n < BATCH; n++) {
    for (int o = 0; o < WIDTH; o++) {
      float sum = w[WIDTH * WIDTH + o];
      for (int i = 0; i < WIDTH; i++) sum += w[o * WIDTH + i] * x[n * WIDTH + i];
      y[n * WIDTH + o] = tanhf(sum);
    }
  }
}
/* dw and dx, all of them, from dy and the layer's own y */
static void backward(float *dx, float *dw, const float *dy, const float *y, const float *x, const float *w) {
  memset(dx, 0, BATCH * WIDTH * sizeof *dx);
  memset(dw, 0, LAYER * sizeof *dw);
  for (int n = 0; n < BATCH; n++) {
    for (int o = 0; o < WIDTH; o++) {
      float d = dy[n * WIDTH + o] * (1 - y[n * WIDTH + o] * y[n * WIDTH + o]);
      dw[WIDTH * WIDTH + o] += d;
      for (int i = 0; i < WIDTH; i++) {
        dw[o * WIDTH + i] += d * x[n * WIDTH + i];
        dx[n * WIDTH + i] += d * w[o * WIDTH + i];
      }
    }
  }
}
#ifndef GEMINI
static void update(int step) {
  for (int i = 0; i < ALL; i++) {
    momentum[i] = step == 1 ? gradients[i] : (float)inertia * momentum[i] + gradients[i];
    weights[i] -= (float)rate * momentum[i];
  }
}
#endif

static uint32_t random_state = 1;
static float random_value(void) { /* -1 to 1 */
  random_state = random_state * 1664525 + 1013904223;
  return (float)(random_state >> 8) / (1 << 23) - 1;
}

static float x[LAYERS + 1][BATCH * WIDTH], d[2][BATCH * WIDTH];
static double step_of(int step) {
  double loss = 0;
  for (int i = 0; i < LAYERS; i++) {
#ifdef GEMINI
    op_begin("forward", i, step == 1 ? GEMINI_READ_WRITE : GEMINI_READ, 0);
#endif
    for (int k = 0; step == 1 && k < LAYER; k++) weights[i * LAYER + k] = random_value() / 8;
    forward(x[i + 1], x[i], weights + i * LAYER);
#ifdef GEMINI
    must(gemini_op_end(mgr));
#endif
  }
  for (int n = 0; n < BATCH; n++) {
    for (int i = 0; i < WIDTH; i++) {
      float difference = x[LAYERS][n * WIDTH + i] - x[0][n * WIDTH + WIDTH - 1 - i];
      d[LAYERS % 2][n * WIDTH + i] = difference / BATCH;
      loss += difference * difference;
    }
  }
  for (int i = LAYERS; i-- > 0;) {
#ifdef GEMINI
    op_begin("backward", i, GEMINI_READ, GEMINI_WRITE);
#endif
    backward(d[i % 2], gradients + i * LAYER, d[(i + 1) % 2], x[i + 1], x[i], weights + i * LAYER);
#ifdef GEMINI
    must(gemini_op_end(mgr));
#endif
  }
#ifdef GEMINI
  gemini_sgd_t sgd = GEMINI_SGD_INIT;
  sgd.step = (uint64_t)step, sgd.lr = rate, sgd.momentum = inertia, sgd.grad_dtype = GEMINI_DTYPE_F32;
  gemini_update_arenas_t arenas = GEMINI_UPDATE_ARENAS_INIT;
  arenas.grad = gradient_arena, arenas.master = weight_arena, arenas.momentum = momentum_arena;
  must(gemini_sgd_arenas(mgr, &sgd, &arenas));
#else
  update(step);
#endif
  return loss / (BATCH * WIDTH);
}

int main(void) {
#ifdef GEMINI
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device_bytes = 512 << 10, config.host_bytes = 8 << 20, config.chunk_bytes = 64 << 10;
  must(gemini_manager_open(&config, &mgr));
  weights = arena_new(GEMINI_KIND_MASTER, NULL, &weight_arena);
  void *first; /* the arena's first byte, as nothing was taken before */
  must(gemini_arena_take_pointer(mgr, weight_arena, ALL * sizeof *weights, &first));
  gradients = arena_new(GEMINI_KIND_GRAD, weight_arena, &gradient_arena);
  (void)arena_new(GEMINI_KIND_MOMENTUM, weight_arena, &momentum_arena);
#else
  weights = malloc(ALL * sizeof *weights);
  gradients = malloc(ALL * sizeof *gradients);
  momentum = malloc(ALL * sizeof *momentum);
  if (!weights || !gradients || !momentum) return 1;
#endif
  for (int n = 0; n < BATCH * WIDTH; n++) x[0][n] = random_value() / 2;
  for (int step = 1; step <= STEPS; step++) {
#ifdef GEMINI
    must(gemini_iteration_begin(mgr));
#endif
    printf("step %d: loss %a\n", step, step_of(step));
#ifdef GEMINI
    must(gemini_iteration_end(mgr));
#endif
  }
#ifdef GEMINI
  return gemini_manager_close(mgr) != GEMINI_OK;
#else
  free(weights), free(gradients), free(momentum);
  return 0;
#endif
}
