/* A GPT's operators on a GPU: gpt_kernels.cu for all but the matrix products, which are cuBLAS's.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Operators are those of gpt.c, step by step, in its notation; only attention takes all heads of a sequence at once. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/gpt_kernels.h"
#include "model/gpt_operators.h"

/* Weights are widened, and weight gradients made and rounded, in panels of this many floats at most. A test has its
 * own. */
#ifndef PANEL_FLOATS
#define PANEL_FLOATS ((uint64_t)16 << 20)
#endif

enum {
#define NUMBER(name, type, block) KERNEL_##name,
  GPT_KERNELS(NUMBER)
#undef NUMBER
      KERNEL_COUNT
};
static const char *const kernel_names[] = {
#define NAME(name, type, block) "gpt_kernel_" #name,
  GPT_KERNELS(NAME)
#undef NAME
};
static const uint32_t kernel_blocks[] = {
#define BLOCK(name, type, block) block,
  GPT_KERNELS(BLOCK)
#undef BLOCK
};

static device_cuda_state_t *const cuda = &device_cuda_state;
static void *kernels[KERNEL_COUNT];

bool gpt_cuda_open(void) { return gpu_load(cuda->gpu, gpt_kernels_ptx, kernel_names, kernels, KERNEL_COUNT); }

/* ---- What operators are made of ---- */

/* threads: how many the kernel needs; its last block may have more. */
static void launch(void *stream, int kernel, uint64_t threads, const void *args) {
  if (cuda->failed) return;
  uint32_t block = kernel_blocks[kernel];
  void *arguments[] = { (void *)(uintptr_t)args };
  uint32_t blocks = (uint32_t)((threads + block - 1) / block); /* no GPU's memory has elements for more */
  device_cuda_done(gpu_launch(cuda->gpu, kernels[kernel], blocks, 1, block, stream, arguments));
}
static uint64_t row_threads(int rows) { return (uint64_t)rows * KERNEL_LANES; }

static void product(void *stream, gpu_gemm_t gemm) {
  if (!cuda->failed) device_cuda_done(gpu_gemm(cuda->gpu, &gemm, stream));
}

static void widen(void *stream, const uint16_t *from, float *to, uint64_t count) {
  launch(stream, KERNEL_widen, count, &(kernel_widen_t){ count, from, to });
}

/* ---- Data movement, embedding ---- */

static bool copy(void *stream, const void *args) {
  const gpt_copy_t *a = args;
  if (!cuda->failed) device_cuda_done(gpu_copy(cuda->gpu, a->to, a->from, a->bytes, stream));
  return !cuda->failed;
}
static bool zero(void *stream, const void *args) {
  const gpt_zero_t *a = args;
  if (!cuda->failed) device_cuda_done(gpu_set(cuda->gpu, a->to, 0, a->bytes, stream));
  return !cuda->failed;
}
static bool store(void *stream, const void *args) {
  const gpt_store_t *a = args;
  launch(stream, KERNEL_store, a->count, a);
  return !cuda->failed;
}

static bool embed_forward(void *stream, const void *args) {
  const gpt_embed_t *a = args;
  launch(stream, KERNEL_embed_forward, (uint64_t)a->batch * (uint64_t)a->context * (uint64_t)a->width, a);
  return !cuda->failed;
}
static bool embed_backward(void *stream, const void *args) {
  const gpt_embed_gradient_t *a = args;
  launch(stream, KERNEL_embed_tokens, GPT_VOCABULARY * (uint64_t)a->width, a);
  launch(stream, KERNEL_embed_positions, (uint64_t)a->positions * (uint64_t)a->width, a);
  return !cuda->failed;
}

/* ---- Layer norm ---- */

static bool norm_forward(void *stream, const void *args) {
  const gpt_norm_t *a = args;
  launch(stream, KERNEL_norm_forward, row_threads(a->rows), a);
  return !cuda->failed;
}
static bool norm_backward(void *stream, const void *args) {
  const gpt_norm_gradient_t *a = args;
  launch(stream, KERNEL_norm_rows, row_threads(a->rows), a);
  launch(stream, KERNEL_norm_columns, (uint64_t)a->width, a);
  return !cuda->failed;
}

/* ---- Linear ---- */

static uint64_t panel_of(uint64_t in, uint64_t out) {
  uint64_t floats = in * out;
  if (floats > PANEL_FLOATS) floats = PANEL_FLOATS < in ? in : PANEL_FLOATS;
  return floats;
}
static int panel_rows(int in, int out) { return (int)(panel_of((uint64_t)in, (uint64_t)out) / (uint64_t)in); }
static uint64_t panel_floats(int width) {
  uint64_t w = (uint64_t)width, most = 0;
  const uint64_t shapes[][2] = { { w, 3 * w }, { w, 4 * w }, { 4 * w, w }, { w, GPT_VOCABULARY } };
  for (int i = 0; i < 4; i++) {
    uint64_t floats = panel_of(shapes[i][0], shapes[i][1]);
    if (floats > most) most = floats;
  }
  return most;
}

static bool linear_forward(void *stream, const void *args) {
  const gpt_linear_t *a = args;
  uint64_t count = (uint64_t)a->rows * (uint64_t)a->out;
  launch(stream, KERNEL_linear_start, count, &(kernel_linear_start_t){ count, a->out, a->bias, a->residual, a->y });
  int panel = panel_rows(a->in, a->out);
  for (int first = 0; first < a->out; first += panel) {
    int rows = panel < a->out - first ? panel : a->out - first;
    widen(stream, a->weight + (size_t)first * (size_t)a->in, a->workspace, (uint64_t)rows * (uint64_t)a->in);
    product(stream, (gpu_gemm_t){ .m = a->rows,
                                  .n = rows,
                                  .k = a->in,
                                  .b_transposed = true,
                                  .alpha = 1,
                                  .beta = 1,
                                  .a = a->x,
                                  .lda = a->in,
                                  .b = a->workspace,
                                  .ldb = a->in,
                                  .c = a->y + first,
                                  .ldc = a->out });
  }
  return !cuda->failed;
}

static bool linear_backward_x(void *stream, const void *args) {
  const gpt_linear_gradient_x_t *a = args;
  int panel = panel_rows(a->in, a->out);
  for (int first = 0; first < a->out; first += panel) {
    int rows = panel < a->out - first ? panel : a->out - first;
    widen(stream, a->weight + (size_t)first * (size_t)a->in, a->workspace, (uint64_t)rows * (uint64_t)a->in);
    product(stream, (gpu_gemm_t){ .m = a->rows,
                                  .n = a->in,
                                  .k = rows,
                                  .alpha = 1,
                                  .beta = first == 0 ? 0.0f : 1.0f,
                                  .a = a->dy + first,
                                  .lda = a->out,
                                  .b = a->workspace,
                                  .ldb = a->in,
                                  .c = a->dx,
                                  .ldc = a->in });
  }
  return !cuda->failed;
}

static bool linear_backward_weight(void *stream, const void *args) {
  const gpt_linear_gradient_weight_t *a = args;
  if (a->dweight_f32 != NULL) {
    product(stream, (gpu_gemm_t){ .m = a->out,
                                  .n = a->in,
                                  .k = a->rows,
                                  .a_transposed = true,
                                  .alpha = 1,
                                  .a = a->dy,
                                  .lda = a->out,
                                  .b = a->x,
                                  .ldb = a->in,
                                  .c = a->dweight_f32,
                                  .ldc = a->in });
  }
  int panel = panel_rows(a->in, a->out);
  for (int first = 0; a->dweight != NULL && first < a->out; first += panel) {
    int rows = panel < a->out - first ? panel : a->out - first;
    product(stream, (gpu_gemm_t){ .m = rows,
                                  .n = a->in,
                                  .k = a->rows,
                                  .a_transposed = true,
                                  .alpha = 1,
                                  .a = a->dy + first,
                                  .lda = a->out,
                                  .b = a->x,
                                  .ldb = a->in,
                                  .c = a->workspace,
                                  .ldc = a->in });
    uint64_t count = (uint64_t)rows * (uint64_t)a->in;
    launch(stream, KERNEL_store, count,
           &(gpt_store_t){ count, a->workspace, a->dweight + (size_t)first * (size_t)a->in });
  }
  if (a->dbias != NULL) {
    launch(stream, KERNEL_columns, (uint64_t)a->out, &(kernel_columns_t){ a->rows, a->out, a->dy, a->dbias });
  }
  return !cuda->failed;
}

/* ---- Attention: all heads of a sequence at once ---- */

static uint64_t attention_floats(int context, int heads) {
  return (uint64_t)heads * (uint64_t)context * (uint64_t)context;
}

/* p (H,C,C) = softmax of q k^T / sqrt(D). q, k: heads D apart in rows of 3 W. */
static void attention_weights(void *stream, const float *q, const float *k, int context, int width, int heads,
                              float *p) {
  int head_width = width / heads;
  product(stream, (gpu_gemm_t){ .m = context,
                                .n = context,
                                .k = head_width,
                                .b_transposed = true,
                                .alpha = 1.0f / sqrtf((float)head_width),
                                .a = q,
                                .lda = 3 * width,
                                .b = k,
                                .ldb = 3 * width,
                                .c = p,
                                .ldc = context,
                                .count = heads,
                                .stride_a = head_width,
                                .stride_b = head_width,
                                .stride_c = (int64_t)context * context });
  launch(stream, KERNEL_softmax, row_threads(heads * context), &(kernel_softmax_t){ heads * context, context, p });
}

static bool attention_forward(void *stream, const void *args) {
  const gpt_attention_t *a = args;
  int head_width = a->width / a->heads, context = a->context;
  for (int b = 0; b < a->batch; b++) {
    const float *q = a->qkv + (size_t)b * (size_t)context * 3 * (size_t)a->width, *k = q + a->width, *v = k + a->width;
    attention_weights(stream, q, k, context, a->width, a->heads, a->workspace);
    product(stream, (gpu_gemm_t){ .m = context,
                                  .n = head_width,
                                  .k = context,
                                  .alpha = 1,
                                  .a = a->workspace,
                                  .lda = context,
                                  .b = v,
                                  .ldb = 3 * a->width,
                                  .c = a->y + (size_t)b * (size_t)context * (size_t)a->width,
                                  .ldc = a->width,
                                  .count = a->heads,
                                  .stride_a = (int64_t)context * context,
                                  .stride_b = head_width,
                                  .stride_c = head_width });
  }
  return !cuda->failed;
}

static bool attention_backward(void *stream, const void *args) {
  const gpt_attention_gradient_t *a = args;
  int head_width = a->width / a->heads, context = a->context, ld = 3 * a->width, heads = a->heads;
  int64_t square = (int64_t)context * context;
  float *p = a->workspace, *ds = p + attention_floats(context, heads);
  for (int b = 0; b < a->batch; b++) {
    size_t offset = (size_t)b * (size_t)context * (size_t)ld;
    const float *q = a->qkv + offset, *k = q + a->width, *v = k + a->width;
    float *dq = a->dqkv + offset, *dk = dq + a->width, *dv = dk + a->width;
    const float *dy = a->dy + (size_t)b * (size_t)context * (size_t)a->width;
    attention_weights(stream, q, k, context, a->width, heads, p);
    product(stream, (gpu_gemm_t){ .m = context,
                                  .n = head_width,
                                  .k = context,
                                  .a_transposed = true,
                                  .alpha = 1,
                                  .a = p,
                                  .lda = context,
                                  .b = dy,
                                  .ldb = a->width,
                                  .c = dv,
                                  .ldc = ld,
                                  .count = heads,
                                  .stride_a = square,
                                  .stride_b = head_width,
                                  .stride_c = head_width });
    product(stream, (gpu_gemm_t){ .m = context,
                                  .n = context,
                                  .k = head_width,
                                  .b_transposed = true,
                                  .alpha = 1,
                                  .a = dy,
                                  .lda = a->width,
                                  .b = v,
                                  .ldb = ld,
                                  .c = ds,
                                  .ldc = context,
                                  .count = heads,
                                  .stride_a = head_width,
                                  .stride_b = head_width,
                                  .stride_c = square });
    launch(stream, KERNEL_softmax_gradient, row_threads(heads * context),
           &(kernel_softmax_gradient_t){ heads * context, context, 1.0f / sqrtf((float)head_width), p, ds });
    product(stream, (gpu_gemm_t){ .m = context,
                                  .n = head_width,
                                  .k = context,
                                  .alpha = 1,
                                  .a = ds,
                                  .lda = context,
                                  .b = k,
                                  .ldb = ld,
                                  .c = dq,
                                  .ldc = ld,
                                  .count = heads,
                                  .stride_a = square,
                                  .stride_b = head_width,
                                  .stride_c = head_width });
    product(stream, (gpu_gemm_t){ .m = context,
                                  .n = head_width,
                                  .k = context,
                                  .a_transposed = true,
                                  .alpha = 1,
                                  .a = ds,
                                  .lda = context,
                                  .b = q,
                                  .ldb = ld,
                                  .c = dk,
                                  .ldc = ld,
                                  .count = heads,
                                  .stride_a = square,
                                  .stride_b = head_width,
                                  .stride_c = head_width });
  }
  return !cuda->failed;
}

/* ---- GELU, loss, AdamW ---- */

static bool gelu_forward(void *stream, const void *args) {
  const gpt_gelu_t *a = args;
  launch(stream, KERNEL_gelu_forward, a->count, a);
  return !cuda->failed;
}
static bool gelu_backward(void *stream, const void *args) {
  const gpt_gelu_gradient_t *a = args;
  launch(stream, KERNEL_gelu_backward, a->count, a);
  return !cuda->failed;
}

static bool loss(void *stream, const void *args) {
  const gpt_loss_t *a = args;
  launch(stream, KERNEL_loss_rows, row_threads(a->rows), a);
  launch(stream, KERNEL_loss_total, 1, a);
  if (!cuda->failed) device_cuda_done(gpu_copy(cuda->gpu, a->loss, a->workspace + a->rows, sizeof *a->loss, stream));
  return !cuda->failed;
}

static bool adamw(void *stream, const void *args) {
  const gpt_adamw_span_t *a = args;
  launch(stream, KERNEL_adamw, a->count,
         &(kernel_adamw_t){ a->count, a->factors, a->gradient, a->parameter, a->master, a->momentum, a->variance });
  return !cuda->failed;
}

static uint64_t norm_floats(int rows) { return 2 * (uint64_t)rows; }
static uint64_t loss_floats(int rows) { return 2 * ((uint64_t)rows + 1); }

static double squares(const uint16_t *from, uint64_t count, uint64_t block_elements) {
  uint64_t blocks = (count + block_elements - 1) / block_elements;
  double total = 0, *sums = device_cuda.alloc(blocks * sizeof *sums), *host = malloc(blocks * sizeof *host);
  if (sums == NULL || host == NULL) {
    total = -1;
  } else {
    launch(cuda->stream, KERNEL_squares, blocks, &(kernel_squares_t){ count, block_elements, from, sums });
    device_cuda.move(host, sums, blocks * sizeof *sums);
    for (uint64_t i = 0; i < blocks; i++) total += host[i];
  }
  device_cuda.free(sums);
  free(host);
  return total;
}

const gpt_operators_t gpt_cuda = {
  .device = &device_cuda,
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
  .panel_floats = panel_floats,
  .attention_floats = attention_floats,
  .norm_floats = norm_floats,
  .loss_floats = loss_floats,
  .squares = squares,
};
