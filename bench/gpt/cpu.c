/* The CPU as a GPT's device: operators are gpt.c's, plain memory is the C library's.
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "device.h"

enum { ALIGN_BYTES = 512 };

static void adamw(void *stream, const gpt_adamw_factors_t *factors, uint64_t count, const uint16_t *gradient,
                  uint16_t *parameter, float *master, float *momentum, float *variance) {
  (void)stream;
  gpt_adamw_range(factors, count, gradient, parameter, master, momentum, variance);
}

static uint64_t panel_floats(int width) { return gpt_panel_floats(4 * width, GPT_VOCABULARY); }
static uint64_t attention_floats(int context, int heads) {
  (void)heads; /* one after the other */
  return (uint64_t)context * (uint64_t)context;
}
static uint64_t no_floats(int rows) {
  (void)rows;
  return 0;
}

static void *alloc(uint64_t bytes) {
  return aligned_alloc(ALIGN_BYTES, (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES);
}
static void move(void *to, const void *from, uint64_t bytes) { memcpy(to, from, bytes); }

static double squares(const uint16_t *from, uint64_t count, uint64_t block_elements) {
  double total = 0;
  for (uint64_t first = 0; first < count; first += block_elements) {
    uint64_t end = count - first < block_elements ? count : first + block_elements;
    double block = 0;
    for (uint64_t i = first; i < end; i++) {
      double g = (double)gpt_f32_from_bf16(from[i]);
      block += g * g;
    }
    total += block;
  }
  return total;
}

static void *host_alloc(uint64_t bytes) { return calloc(1, bytes); }
static bool stream_use(void *stream) {
  (void)stream;
  return true;
}
static void synchronize(void) {}
static bool failed(void) { return false; }

const gpt_device_t gpt_device_cpu = {
  .name = "cpu",
  .copy = gpt_copy,
  .zero = gpt_zero,
  .store = gpt_store,
  .embed_forward = gpt_embed_forward,
  .embed_backward = gpt_embed_backward,
  .norm_forward = gpt_norm_forward,
  .norm_backward = gpt_norm_backward,
  .linear_forward = gpt_linear_forward,
  .linear_backward_x = gpt_linear_backward_x,
  .linear_backward_weight = gpt_linear_backward_weight,
  .attention_forward = gpt_attention_forward,
  .attention_backward = gpt_attention_backward,
  .gelu_forward = gpt_gelu_forward,
  .gelu_backward = gpt_gelu_backward,
  .loss = gpt_loss,
  .adamw = adamw,
  .panel_floats = panel_floats,
  .attention_floats = attention_floats,
  .norm_floats = no_floats,
  .loss_floats = no_floats,
  .alloc = alloc,
  .free = free,
  .move = move,
  .squares = squares,
  .host_alloc = host_alloc,
  .host_free = free,
  .stream_use = stream_use,
  .synchronize = synchronize,
  .failed = failed,
};
