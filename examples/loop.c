/* A whole training loop on libgemini in 40 lines: one block of weights, pointers into it, SGD.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "gemini_update.h"

enum { LAYERS = 6, N = 1 << 16, STEPS = 4, DEVICE = GEMINI_TIER_DEVICE };
static void must(gemini_status_t status) {
  if (status) fprintf(stderr, "%s\n", gemini_error_text()), exit(1);
}
int main(void) {
  gemini_manager_t mgr;
  gemini_config_t config = GEMINI_CONFIG_INIT; /* the simulated device, which holds two of the six layers */
  config.device_bytes = 1 << 20, config.host_bytes = 16 << 20, config.chunk_bytes = 64 << 10;
  must(gemini_manager_open(&config, &mgr));
  gemini_arena_t weights, gradients;
  gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
  arena.kind = GEMINI_KIND_MASTER, arena.element_bytes = sizeof(float);
  must(gemini_arena_create(mgr, &arena, &weights));
  arena.kind = GEMINI_KIND_GRAD, arena.like = weights;
  must(gemini_arena_create(mgr, &arena, &gradients));
  void *block;
  must(gemini_arena_take_pointer(mgr, weights, LAYERS * N * sizeof(float), &block));
  gemini_sgd_t sgd = GEMINI_SGD_INIT;
  sgd.lr = 0.25, sgd.grad_dtype = GEMINI_DTYPE_F32;
  for (sgd.step = 1; sgd.step <= STEPS; sgd.step++) { /* weights begin as zeros; their loss is (w - 1)^2 / 2 */
    must(gemini_iteration_begin(mgr));
    for (int i = 0; i < LAYERS; i++) {
      float *w = (float *)block + i * N, *g;
      gemini_access_t uses[] = { gemini_address_access(w, N * sizeof *w, GEMINI_READ, DEVICE),
                                 gemini_arena_access(gradients, (uint64_t)i * N * sizeof *g, N * sizeof *g,
                                                     GEMINI_WRITE, DEVICE) };
      must(gemini_op_begin_with(mgr, "layer", GEMINI_STREAM_CALLER, uses, 2));
      g = uses[1].ptr;
      for (int k = 0; k < N; k++) g[k] = w[k] - 1;
      if (i == LAYERS - 1) printf("step %d: w = %g\n", (int)sgd.step, (double)w[N - 1]);
      must(gemini_op_end(mgr));
    }
    gemini_update_arenas_t update = GEMINI_UPDATE_ARENAS_INIT;
    update.master = weights, update.grad = gradients;
    must(gemini_sgd_arenas(mgr, &sgd, &update));
    must(gemini_iteration_end(mgr));
  }
  return gemini_manager_close(mgr) != GEMINI_OK;
}
