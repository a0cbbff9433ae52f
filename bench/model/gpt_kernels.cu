/* The GPU's kernels of a GPT: all of it but the matrix products. SPDX-License-Identifier: Apache-2.0
 *
 * The build does not compile this file: it embeds gpt_kernels.ptx, which cmake/ptx.py makes from it. A test compiles it as C,
 * with loops for threads, and compares every kernel with the CPU's operator to the bit. For that, what threads of a block do
 * between two points where they wait for one another stands in a PHASE, nothing but shared memory lives from one phase
 * to the next, and no thread returns early.
 *
 * Every sum has the order of gpt.c's: a row's by KERNEL_LANES partial sums, element i in sum i % KERNEL_LANES, then these
 * left to right; a column's downwards. So kernels need no atomic additions and results do not depend on the GPU. Compiled
 * without contraction to fused multiply-add, like gpt.c. */
#include "gpt_kernels.h"

#ifdef __CUDACC__
#define KERNEL(name, type) extern "C" __global__ void gpt_kernel_##name(const type a)
#define PHASE
#define NEXT_PHASE __syncthreads()
#define SHARED __shared__
#define INLINE static __device__ __forceinline__
#endif

enum { AHEAD = 16 }; /* a column's values that are on their way together */

/* Of all threads of the grid. */
INLINE uint64_t thread_number(void) { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }

INLINE int lane_of(void) { return (int)(threadIdx.x % KERNEL_LANES); }
/* In its block. */
INLINE int local_row(void) { return (int)(threadIdx.x / KERNEL_LANES); }
INLINE int row_of(void) { return (int)blockIdx.x * KERNEL_BLOCK_ROWS + local_row(); }

INLINE float lanes_total(const float *lanes) {
  float total = 0;
  for (int i = 0; i < KERNEL_LANES; i++) total += lanes[i];
  return total;
}

INLINE float lanes_maximum(const float *lanes) {
  float result = lanes[0];
  for (int i = 1; i < KERNEL_LANES; i++) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

INLINE float lane_sum(const float *x, int count) {
  float total = 0;
  for (int i = lane_of(); i < count; i += KERNEL_LANES) total += x[i];
  return total;
}

INLINE float lane_maximum(const float *x, int count) {
  float result = x[0];
  for (int i = lane_of(); i < count; i += KERNEL_LANES) result = x[i] > result ? x[i] : result;
  return result;
}

/* Of sum (x - mean)^2. */
INLINE float lane_distance(const float *x, float mean, int count) {
  float total = 0;
  for (int i = lane_of(); i < count; i += KERNEL_LANES) total += (x[i] - mean) * (x[i] - mean);
  return total;
}

/* ---- Data movement, embedding ---- */

KERNEL(store, gpt_store_t) {
  PHASE {
    uint64_t i = thread_number();
    if (i < a.count) a.to[i] = gpt_bf16_from_f32(a.from[i]);
  }
}

KERNEL(widen, kernel_widen_t) {
  PHASE {
    uint64_t i = thread_number();
    if (i < a.count) a.to[i] = gpt_f32_from_bf16(a.from[i]);
  }
}

KERNEL(embed_forward, gpt_embed_t) {
  PHASE {
    uint64_t i = thread_number(), width = (uint64_t)a.width, t = i / width, column = i % width;
    if (t < (uint64_t)a.batch * (uint64_t)a.context) {
      uint64_t token = (uint64_t)a.tokens[t], position = t % (uint64_t)a.context;
      a.x[i] = gpt_f32_from_bf16(a.wte[token * width + column]) + gpt_f32_from_bf16(a.wpe[position * width + column]);
    }
  }
}

/* One thread for an element of a token's gradient: adds up all places where the token stands, in their order. */
KERNEL(embed_tokens, gpt_embed_gradient_t) {
  PHASE {
    uint64_t i = thread_number(), width = (uint64_t)a.width, column = i % width;
    if (i < GPT_VOCABULARY * width) {
      int32_t token = (int32_t)(i / width);
      float total = a.dwte_f32[i];
      for (int t = 0; t < a.batch * a.context; t++) {
        if (a.tokens[t] == token) total += a.dx[(uint64_t)t * width + column];
      }
      a.dwte_f32[i] = total;
      a.dwte[i] = gpt_bf16_from_f32(total);
    }
  }
}

KERNEL(embed_positions, gpt_embed_gradient_t) {
  PHASE {
    uint64_t i = thread_number(), width = (uint64_t)a.width, position = i / width, column = i % width;
    if (position < (uint64_t)a.positions) {
      float total = 0;
      for (int b = 0; position < (uint64_t)a.context && b < a.batch; b++) {
        total += a.dx[((uint64_t)b * (uint64_t)a.context + position) * width + column];
      }
      a.dwpe[i] = gpt_bf16_from_f32(total);
    }
  }
}

/* ---- Layer norm ---- */

KERNEL(norm_forward, gpt_norm_t) {
  SHARED float sums[KERNEL_BLOCK_ROWS][KERNEL_LANES], distances[KERNEL_BLOCK_ROWS][KERNEL_LANES];
  PHASE {
    int row = row_of();
    if (row < a.rows) sums[local_row()][lane_of()] = lane_sum(a.x + (uint64_t)row * (uint64_t)a.width, a.width);
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      float mean = lanes_total(sums[local_row()]) / (float)a.width;
      distances[local_row()][lane_of()] = lane_distance(a.x + (uint64_t)row * (uint64_t)a.width, mean, a.width);
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      const float *x = a.x + (uint64_t)row * (uint64_t)a.width;
      float *y = a.y + (uint64_t)row * (uint64_t)a.width;
      float mean = lanes_total(sums[local_row()]) / (float)a.width;
      float variance = lanes_total(distances[local_row()]) / (float)a.width;
      float scale = 1.0f / sqrtf(variance + GPT_NORM_EPSILON);
      for (int i = lane_of(); i < a.width; i += KERNEL_LANES) {
        y[i] = (x[i] - mean) * scale * gpt_f32_from_bf16(a.weight[i]) + gpt_f32_from_bf16(a.bias[i]);
      }
    }
  }
}

/* dx, and each row's mean and scale for norm_columns. */
KERNEL(norm_rows, gpt_norm_gradient_t) {
  SHARED float sums[KERNEL_BLOCK_ROWS][KERNEL_LANES], distances[KERNEL_BLOCK_ROWS][KERNEL_LANES];
  SHARED float g_sums[KERNEL_BLOCK_ROWS][KERNEL_LANES], gh_sums[KERNEL_BLOCK_ROWS][KERNEL_LANES];
  PHASE {
    int row = row_of();
    if (row < a.rows) sums[local_row()][lane_of()] = lane_sum(a.x + (uint64_t)row * (uint64_t)a.width, a.width);
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      float mean = lanes_total(sums[local_row()]) / (float)a.width;
      distances[local_row()][lane_of()] = lane_distance(a.x + (uint64_t)row * (uint64_t)a.width, mean, a.width);
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      const float *x = a.x + (uint64_t)row * (uint64_t)a.width, *dy = a.dy + (uint64_t)row * (uint64_t)a.width;
      float mean = lanes_total(sums[local_row()]) / (float)a.width;
      float variance = lanes_total(distances[local_row()]) / (float)a.width;
      float scale = 1.0f / sqrtf(variance + GPT_NORM_EPSILON), g_sum = 0, gh_sum = 0;
      for (int i = lane_of(); i < a.width; i += KERNEL_LANES) {
        float h = (x[i] - mean) * scale, g = gpt_f32_from_bf16(a.weight[i]) * dy[i];
        g_sum += g;
        gh_sum += g * h;
      }
      g_sums[local_row()][lane_of()] = g_sum;
      gh_sums[local_row()][lane_of()] = gh_sum;
      if (lane_of() == 0) {
        a.workspace[2 * (uint64_t)row] = mean;
        a.workspace[2 * (uint64_t)row + 1] = scale;
      }
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      const float *x = a.x + (uint64_t)row * (uint64_t)a.width, *dy = a.dy + (uint64_t)row * (uint64_t)a.width;
      float *dx = a.dx + (uint64_t)row * (uint64_t)a.width;
      float mean = lanes_total(sums[local_row()]) / (float)a.width;
      float variance = lanes_total(distances[local_row()]) / (float)a.width;
      float scale = 1.0f / sqrtf(variance + GPT_NORM_EPSILON);
      float mean_g = lanes_total(g_sums[local_row()]) / (float)a.width;
      float mean_gh = lanes_total(gh_sums[local_row()]) / (float)a.width;
      for (int i = lane_of(); i < a.width; i += KERNEL_LANES) {
        float h = (x[i] - mean) * scale, g = gpt_f32_from_bf16(a.weight[i]) * dy[i];
        dx[i] += scale * (g - mean_g - h * mean_gh);
      }
    }
  }
}

KERNEL(norm_columns, gpt_norm_gradient_t) {
  PHASE {
    uint64_t i = thread_number(), width = (uint64_t)a.width;
    if (i < width) {
      float dweight = 0, dbias = 0;
      for (int first = 0; first < a.rows; first += AHEAD) {
        float x[AHEAD], dy[AHEAD];
        for (int k = 0; k < AHEAD; k++) {
          uint64_t at = (uint64_t)(first + k < a.rows ? first + k : first) * width + i;
          x[k] = a.x[at];
          dy[k] = a.dy[at];
        }
        for (int k = 0; k < AHEAD; k++) {
          int row = first + k;
          if (row < a.rows) {
            float h = (x[k] - a.workspace[2 * (uint64_t)row]) * a.workspace[2 * (uint64_t)row + 1];
            dweight += dy[k] * h;
            dbias += dy[k];
          }
        }
      }
      a.dweight[i] = dweight;
      a.dbias[i] = dbias;
    }
  }
}

/* ---- Linear ---- */

/* What the product is added to. */
KERNEL(linear_start, kernel_linear_start_t) {
  PHASE {
    uint64_t i = thread_number();
    if (i < a.count) {
      float y = a.residual ? a.residual[i] : 0.0f;
      if (a.bias) y += gpt_f32_from_bf16(a.bias[i % (uint64_t)a.out]);
      a.y[i] = y;
    }
  }
}

KERNEL(columns, kernel_columns_t) {
  PHASE {
    uint64_t i = thread_number(), out = (uint64_t)a.out;
    if (i < out) {
      float total = 0;
      for (int first = 0; first < a.rows; first += AHEAD) {
        float dy[AHEAD];
        for (int k = 0; k < AHEAD; k++) dy[k] = a.dy[(uint64_t)(first + k < a.rows ? first + k : first) * out + i];
        for (int k = 0; k < AHEAD; k++) {
          if (first + k < a.rows) total += dy[k];
        }
      }
      a.sums[i] = gpt_bf16_from_f32(total);
    }
  }
}

/* ---- Attention ---- */

KERNEL(softmax, kernel_softmax_t) {
  SHARED float maxima[KERNEL_BLOCK_ROWS][KERNEL_LANES], sums[KERNEL_BLOCK_ROWS][KERNEL_LANES];
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      maxima[local_row()][lane_of()] = lane_maximum(a.p + (uint64_t)row * (uint64_t)a.context, row % a.context + 1);
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      float *p = a.p + (uint64_t)row * (uint64_t)a.context, largest = lanes_maximum(maxima[local_row()]), total = 0;
      for (int i = lane_of(); i <= row % a.context; i += KERNEL_LANES) {
        p[i] = gpt_exponential(p[i] - largest);
        total += p[i];
      }
      sums[local_row()][lane_of()] = total;
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      float *p = a.p + (uint64_t)row * (uint64_t)a.context, scale = 1.0f / lanes_total(sums[local_row()]);
      for (int i = lane_of(); i < a.context; i += KERNEL_LANES) p[i] = i <= row % a.context ? p[i] * scale : 0.0f;
    }
  }
}

KERNEL(softmax_gradient, kernel_softmax_gradient_t) {
  SHARED float sums[KERNEL_BLOCK_ROWS][KERNEL_LANES];
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      const float *p = a.p + (uint64_t)row * (uint64_t)a.context, *dp = a.ds + (uint64_t)row * (uint64_t)a.context;
      float total = 0;
      for (int i = lane_of(); i <= row % a.context; i += KERNEL_LANES) total += p[i] * dp[i];
      sums[local_row()][lane_of()] = total;
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      const float *p = a.p + (uint64_t)row * (uint64_t)a.context;
      float *ds = a.ds + (uint64_t)row * (uint64_t)a.context, weighted = lanes_total(sums[local_row()]);
      for (int i = lane_of(); i < a.context; i += KERNEL_LANES) {
        ds[i] = i <= row % a.context ? p[i] * (ds[i] - weighted) * a.scale : 0.0f;
      }
    }
  }
}

/* ---- GELU ---- */

KERNEL(gelu_forward, gpt_gelu_t) {
  PHASE {
    uint64_t i = thread_number();
    if (i < a.count) a.y[i] = gpt_gelu_of(a.x[i]);
  }
}

KERNEL(gelu_backward, gpt_gelu_gradient_t) {
  PHASE {
    uint64_t i = thread_number();
    if (i < a.count) a.dy[i] *= gpt_gelu_slope(a.x[i]);
  }
}

/* ---- Loss ---- */

/* Each row's loss into workspace, and the gradient into logits. */
KERNEL(loss_rows, gpt_loss_t) {
  SHARED float maxima[KERNEL_BLOCK_ROWS][KERNEL_LANES], sums[KERNEL_BLOCK_ROWS][KERNEL_LANES];
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      maxima[local_row()][lane_of()] = lane_maximum(a.logits + (uint64_t)row * GPT_VOCABULARY, GPT_VOCABULARY);
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows) {
      const float *logits = a.logits + (uint64_t)row * GPT_VOCABULARY;
      float largest = lanes_maximum(maxima[local_row()]), total = 0;
      for (int i = lane_of(); i < GPT_VOCABULARY; i += KERNEL_LANES) total += gpt_exponential(logits[i] - largest);
      sums[local_row()][lane_of()] = total;
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows && lane_of() == 0) {
      double logit = (double)a.logits[(uint64_t)row * GPT_VOCABULARY + (uint64_t)a.targets[row]];
      float largest = lanes_maximum(maxima[local_row()]), denominator = lanes_total(sums[local_row()]);
      a.workspace[row] = log((double)denominator) + (double)largest - logit;
    }
  }
  NEXT_PHASE;
  PHASE {
    int row = row_of();
    if (row < a.rows && a.with_gradient) {
      float *logits = a.logits + (uint64_t)row * GPT_VOCABULARY;
      float largest = lanes_maximum(maxima[local_row()]);
      float scale = 1.0f / lanes_total(sums[local_row()]), share = 1.0f / (float)a.rows;
      for (int i = lane_of(); i < GPT_VOCABULARY; i += KERNEL_LANES) {
        float gradient = gpt_exponential(logits[i] - largest) * scale * share;
        logits[i] = i == a.targets[row] ? gradient - share : gradient;
      }
    }
  }
}

/* Their mean, behind them. */
KERNEL(loss_total, gpt_loss_t) {
  PHASE {
    double total = 0;
    for (int first = 0; first < a.rows; first += AHEAD) {
      double losses[AHEAD];
      for (int k = 0; k < AHEAD; k++) losses[k] = a.workspace[first + k < a.rows ? first + k : first];
      for (int k = 0; k < AHEAD; k++) {
        if (first + k < a.rows) total += losses[k];
      }
    }
    a.workspace[a.rows] = total / a.rows;
  }
}

/* ---- AdamW, norm ---- */

KERNEL(adamw, kernel_adamw_t) {
  PHASE {
    uint64_t i = thread_number();
    if (i < a.count) {
      gpt_adamw_element_t e = { a.master[i], a.momentum[i], a.variance[i] };
      e = gpt_adamw_of(a.factors, a.gradient[i], e);
      a.momentum[i] = e.momentum;
      a.variance[i] = e.variance;
      a.master[i] = e.master;
      a.parameter[i] = gpt_bf16_from_f32(e.master);
    }
  }
}

/* One thread a block of elements, left to right. */
KERNEL(squares, kernel_squares_t) {
  PHASE {
    uint64_t block = thread_number(), first = block * a.block;
    if (first < a.count) {
      uint64_t end = a.count - first < a.block ? a.count : first + a.block;
      double total = 0;
      for (uint64_t i = first; i < end; i++) {
        double g = (double)gpt_f32_from_bf16(a.from[i]);
        total += g * g;
      }
      a.sums[block] = total;
    }
  }
}
