/* bench_stack's model: its gradients are those of its loss, its hash is of all parameters.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "model/llama.h"

static const llama_shape_t shape = { "test", 2, 64, 128, 64 };
enum { ROWS = 256, BLOCK_TENSORS = 9, TENSORS = 1 + 2 * BLOCK_TENSORS + 2 };

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

/* The loss of one step; the gradient of all parameters, when asked for, from the first momentum: 0.1 of it. Before the
 * step, amount * direction is added to the elements of a tensor; tensor -1: to none. *moved_out: by how much the
 * parameters, which are bf16, went along direction, direction's length times. */
static double step(int tensor, const float *direction, double amount, float *gradient, double *moved_out) {
  memory_t memory;
  llama_t llama;
  memory_open(&memory, &device_cpu, NULL, false);
  llama_open(&llama, &memory, &shape, ROWS, 1, 3);
  CHECK_EQ(memory.tensor_count, TENSORS);
  if (tensor >= 0) {
    const memory_tensor_t *t = &memory.tensors[tensor];
    uint16_t *parameter = (uint16_t *)memory.plain[GEMINI_KIND_PARAM] + t->first_element;
    double along = 0;
    for (uint64_t i = 0; i < t->elements; i++) {
      float before = widen(parameter[i]);
      parameter[i] = narrow(before + (float)amount * direction[t->first_element + i]);
      along += ((double)widen(parameter[i]) - (double)before) * (double)direction[t->first_element + i];
    }
    *moved_out = along;
  }
  llama_step(&llama, 0);
  double loss = llama.losses[0];
  for (uint64_t i = 0; gradient && i < memory.elements; i++) gradient[i] = 10 * ((float *)memory.plain[3])[i];
  CHECK(memory_error(&memory) == NULL);
  memory_close(&memory);
  llama_close(&llama);
  return loss;
}

/* Along its own gradient, each tensor changes the loss as much as the gradient says. What bf16 rounds off is noise in the
 * difference, so the step is large, and both sides of it are taken, which cancels the curvature. */
static void test_stack_gradients_are_those_of_the_loss(void) {
  uint64_t elements = llama_elements(&shape);
  float *gradient = calloc(elements, sizeof *gradient);
  CHECK(gradient != NULL);
  step(-1, NULL, 0, gradient, NULL);
  memory_t memory; /* for the tensors' places only */
  llama_t llama;
  memory_open(&memory, &device_cpu, NULL, false);
  llama_open(&llama, &memory, &shape, ROWS, 1, 3);
  for (int i = 0; i < TENSORS; i++) {
    const memory_tensor_t *t = &memory.tensors[i];
    double squares = 0;
    for (uint64_t k = t->first_element; k < t->first_element + t->elements; k++)
      squares += (double)gradient[k] * (double)gradient[k];
    CHECK(squares > 0);
    double amount = 0.05 / squares, moved[2]; /* about 0.05 of loss each way */
    double above = step(i, gradient, amount, NULL, &moved[0]), below = step(i, gradient, -amount, NULL, &moved[1]);
    double ratio = (above - below) / (moved[0] - moved[1]);
    if (!(fabs(ratio - 1) < 0.05)) fprintf(stderr, "tensor %d: %.3f of what its gradient says\n", i, ratio);
    CHECK(fabs(ratio - 1) < 0.05); /* rounding makes 0.02 of it; a term that is missing makes 0.2 and more */
  }
  memory_close(&memory);
  llama_close(&llama);
  free(gradient);
}

static void test_stack_hash_sees_every_master(void) {
  memory_t memory;
  llama_t llama;
  memory_open(&memory, &device_cpu, NULL, false);
  llama_open(&llama, &memory, &shape, ROWS, 1, 3);
  float *master = memory.plain[GEMINI_KIND_MASTER];
  uint64_t hash = walk_hash(&memory);
  for (uint64_t i = 0; i < memory.elements; i += 4999) {
    float was = master[i];
    master[i] += 1;
    CHECK(walk_hash(&memory) != hash);
    master[i] = was;
  }
  float first = master[0];
  master[0] = master[1];
  master[1] = first;
  CHECK(walk_hash(&memory) != hash); /* also the order */
  memory_close(&memory);
  llama_close(&llama);
}

int main(void) {
  RUN(test_stack_hash_sees_every_master);
  RUN(test_stack_gradients_are_those_of_the_loss);
  return check_done();
}
