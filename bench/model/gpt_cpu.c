/* A GPT's operators on the CPU: gpt.c's. SPDX-License-Identifier: Apache-2.0 */
#include "model/gpt_operators.h"

/* An operator of gpt.c, which computes now. */
#define OPERATOR(name)                               \
  static bool name(void *stream, const void *args) { \
    (void)stream;                                    \
    gpt_##name(args);                                \
    return true;                                     \
  }
OPERATOR(copy)
OPERATOR(zero)
OPERATOR(store)
OPERATOR(embed_forward)
OPERATOR(embed_backward)
OPERATOR(norm_forward)
OPERATOR(norm_backward)
OPERATOR(linear_forward)
OPERATOR(linear_backward_x)
OPERATOR(linear_backward_weight)
OPERATOR(attention_forward)
OPERATOR(attention_backward)
OPERATOR(gelu_forward)
OPERATOR(gelu_backward)
OPERATOR(loss)

static bool adamw(void *stream, const void *args) {
  const gpt_adamw_span_t *a = args;
  (void)stream;
  gpt_adamw_range(&a->factors, a->count, a->gradient, a->parameter, a->master, a->momentum, a->variance);
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
  .copy = copy,
  .zero = zero,
  .store = store,
  .embed_forward = embed_forward,
  .embed_backward = embed_backward,
  .norm_forward = norm_forward,
  .norm_backward = norm_backward,
  .linear_forward = linear_forward,
  .linear_backward_x = linear_backward_x,
  .linear_backward_weight = linear_backward_weight,
  .attention_forward = attention_forward,
  .attention_backward = attention_backward,
  .gelu_forward = gelu_forward,
  .gelu_backward = gelu_backward,
  .loss = loss,
  .adamw = adamw,
  .squares = squares,
  .panel_floats = panel_floats,
  .attention_floats = attention_floats,
  .norm_floats = no_floats,
  .loss_floats = no_floats,
};
