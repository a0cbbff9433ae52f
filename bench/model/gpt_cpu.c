/* A GPT's operators on the CPU: gpt.c's. SPDX-License-Identifier: Apache-2.0 */
#include "model/gpt_operators.h"

static bool adamw(void *stream, const void *span) {
  const gpt_adamw_span_t *s = span;
  (void)stream;
  gpt_adamw_range(&s->factors, s->count, s->gradient, s->parameter, s->master, s->momentum, s->variance);
  return true;
}

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

static uint64_t panel_floats(int width) { return gpt_panel_floats(4 * width, GPT_VOCABULARY); }
static uint64_t attention_floats(int context, int heads) {
  (void)heads; /* one after the other */
  return (uint64_t)context * (uint64_t)context;
}
static uint64_t no_floats(int rows) {
  (void)rows;
  return 0;
}

const gpt_operators_t gpt_cpu = {
  .device = &device_cpu,
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
  .squares = squares,
  .panel_floats = panel_floats,
  .attention_floats = attention_floats,
  .norm_floats = no_floats,
  .loss_floats = no_floats,
};
