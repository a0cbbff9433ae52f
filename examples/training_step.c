/* One training step on the simulated device, from opening a manager to closing it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The lines between the two marker comments are also the introduction of include/gemini.h; lint.training_step compares
 * the two. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "gemini.h"

enum { LAYERS = 8, ELEMENTS = 1 << 16, STEPS = 4 };

/* Stand-ins for kernels: a queued call takes the same arguments as a kernel launch would. */
static _Atomic long forwards;
static void forward(void *weight) {
  const float *w = weight;
  forwards += w[0] == w[ELEMENTS - 1];
}
static void backward(void *grad) {
  for (int i = 0; i < ELEMENTS; i++) ((float *)grad)[i] = 1;
}

/* Gradient descent over one span; span->ptr is in the order of update.arenas: parameter, gradient, master copy. */
static void descend(const gemini_update_span_t *span) {
  float *param = span->ptr[0], *master = span->ptr[2];
  const float *grad = span->ptr[1];
  for (uint64_t i = 0; i < span->element_count; i++) param[i] = master[i] -= 0.5f * grad[i];
}
static void descend_queued(void *user) {
  descend(user);
  free(user);
}
static _Atomic bool failed;
static void sgd(void *mgr, const gemini_update_span_t *span) {
  if (span->tier == GEMINI_TIER_HOST) {
    descend(span);
    return;
  }
  gemini_update_span_t *copy = malloc(sizeof *copy); /* the span is only valid until this function returns */
  if (copy) *copy = *span;
  if (!copy || gemini_stream_call(*(gemini_manager_t *)mgr, span->stream, descend_queued, copy)) failed = true;
}

/* Returns from train() at the first failure. A program that goes on after one would close the manager first. */
#define TRY(call)                      \
  do {                                 \
    gemini_status_t try_status = call; \
    if (try_status) return try_status; \
  } while (0)

static gemini_status_t train(float *trained_out) {
  /* --- gemini.h begins with this --- */
  // A manager owns one device and a budget for each tier. The device holds a third of this model.
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device = GEMINI_DEVICE_SIMULATED;
  config.device_bytes = 2 << 20;
  config.host_bytes = 64 << 20;
  gemini_manager_t mgr;
  TRY(gemini_manager_open(&config, &mgr));

  // Three arenas of one layout: each tensor of the first has a counterpart in the others.
  gemini_arena_t params, grads, masters;
  gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
  arena.element_bytes = sizeof(float);
  arena.kind = GEMINI_KIND_PARAM;
  TRY(gemini_arena_create(mgr, &arena, &params));
  arena.like = params;
  arena.kind = GEMINI_KIND_GRAD;
  TRY(gemini_arena_create(mgr, &arena, &grads));
  arena.kind = GEMINI_KIND_MASTER;
  TRY(gemini_arena_create(mgr, &arena, &masters));
  gemini_tensor_t weight[LAYERS], grad[LAYERS];
  char name[32];
  for (int i = 0; i < LAYERS; i++) {
    snprintf(name, sizeof name, "layer %d", i);
    TRY(gemini_tensor_register(mgr, params, name, ELEMENTS * sizeof(float), GEMINI_OFFSET_NEXT, &weight[i]));
    TRY(gemini_tensor_counterpart(mgr, weight[i], grads, &grad[i]));
  }
  gemini_stream_t stream;
  TRY(gemini_stream_create(mgr, &stream));

  // The first iteration is recorded; the next ones run under a plan made from the record.
  for (int step = 0; step < STEPS; step++) {
    TRY(gemini_iteration_begin(mgr));
    TRY(gemini_phase_set(mgr, GEMINI_PHASE_FORWARD));
    for (int i = 0; i < LAYERS; i++) {
      gemini_access_t use = gemini_tensor_access(weight[i], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE); // all of it
      snprintf(name, sizeof name, "forward %d", i);
      TRY(gemini_op_begin(mgr, name, stream));
      TRY(gemini_acquire(mgr, &use, 1, stream));
      TRY(gemini_stream_call(mgr, stream, forward, use.ptr)); // or a kernel
      TRY(gemini_release(mgr, &use, 1, stream));
      TRY(gemini_op_end(mgr));
    }
    TRY(gemini_phase_set(mgr, GEMINI_PHASE_BACKWARD));
    for (int i = LAYERS; i-- > 0;) {
      gemini_access_t uses[2] = { gemini_tensor_access(weight[i], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE),
                                  gemini_tensor_access(grad[i], 0, 0, GEMINI_WRITE, GEMINI_TIER_DEVICE) };
      snprintf(name, sizeof name, "backward %d", i);
      TRY(gemini_op_begin(mgr, name, stream));
      TRY(gemini_acquire(mgr, uses, 2, stream));
      TRY(gemini_stream_call(mgr, stream, backward, uses[1].ptr));
      TRY(gemini_release(mgr, uses, 2, stream));
      TRY(gemini_op_end(mgr));
    }
    // sgd() is called once for each part of the three arenas. If the part is on the host, a worker thread
    // calls it and it computes; if the part is on the device, it only queues work.
    TRY(gemini_phase_set(mgr, GEMINI_PHASE_UPDATE));
    const gemini_arena_t arenas[] = { params, grads, masters };
    const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE };
    gemini_update_t update = GEMINI_UPDATE_INIT;
    update.arenas = arenas;
    update.modes = modes;
    update.arena_count = 3;
    update.stream = stream;
    update.fn = sgd;
    update.user = &mgr;
    TRY(gemini_update(mgr, &update));
    TRY(gemini_iteration_end(mgr));
  }

  // The caller's own thread reads a weight on the host.
  gemini_access_t last = gemini_tensor_access(weight[0], 0, 0, GEMINI_READ, GEMINI_TIER_HOST);
  TRY(gemini_acquire(mgr, &last, 1, GEMINI_STREAM_CALLER));
  *trained_out = *(const float *)last.ptr;
  TRY(gemini_release(mgr, &last, 1, GEMINI_STREAM_CALLER));

  gemini_stats_t stats = GEMINI_STATS_INIT;
  TRY(gemini_stats(mgr, &stats));
  printf("%d of %d steps ran under a plan\n", (int)stats.planned_iterations, (int)stats.iterations);
  return gemini_manager_close(mgr);
  /* --- to here --- */
}

int main(void) {
  float trained = 0;
  if (train(&trained)) {
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    if (!gemini_last_error(&info)) fprintf(stderr, "%s: %s\n", info.operation, info.message);
    return 1;
  }
  printf("a weight that began at 0 is %.1f\n", (double)trained);
  return failed || trained != -0.5f * STEPS || forwards != LAYERS * STEPS;
}
