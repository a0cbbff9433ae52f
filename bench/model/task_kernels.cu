/* The kernels of the tasks, but for matrix products; task.h says what each computes. SPDX-License-Identifier: Apache-2.0
 *
 * The build does not compile this file: it embeds task_kernels.ptx, which cmake/ptx.py makes from it.
 *
 * Sums have a fixed order, so that the same input gives the same bits. fill and hash give the bits of task_cpu.c: every
 * operation is one that IEEE 754 defines, and none is fused. Rows and counts come in units of eight bf16: 16
 * bytes, one access. */
#include <stdint.h>

#define UNIT 8

struct unit {
  float v[UNIT];
};

__device__ __forceinline__ float widen(uint32_t bf16) { return __uint_as_float(bf16 << 16); }
__device__ __forceinline__ uint32_t narrow(float value) {
  uint32_t bits = __float_as_uint(value);
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
__device__ __forceinline__ unit load(const uint16_t *from, uint64_t at) {
  uint4 raw = ((const uint4 *)from)[at];
  uint32_t words[4] = { raw.x, raw.y, raw.z, raw.w };
  unit u;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u.v[2 * i] = widen(words[i] & 0xffffu);
    u.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
  return u;
}
__device__ __forceinline__ void store(uint16_t *to, uint64_t at, const unit &u) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = narrow(u.v[2 * i]) | narrow(u.v[2 * i + 1]) << 16;
  ((uint4 *)to)[at] = make_uint4(words[0], words[1], words[2], words[3]);
}

/* Of all threads of the block, at most 1024, in a fixed order; every thread gets it. */
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[32];
  __syncthreads();
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
  for (uint32_t i = 0; i < blockDim.x / 32; i++) total += sums[i];
  return total;
}
__device__ __forceinline__ float block_max(float value) {
  __shared__ float largest[32];
  __syncthreads();
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_down_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = value;
  __syncthreads();
  float total = largest[0];
  for (uint32_t i = 1; i < blockDim.x / 32; i++) total = fmaxf(total, largest[i]);
  return total;
}

/* A block a row. */
extern "C" __global__ void stack_embed(const uint16_t *table, const int32_t *tokens, uint16_t *out, uint32_t units) {
  const uint4 *from = (const uint4 *)table + (uint64_t)tokens[blockIdx.x] * units;
  uint4 *to = (uint4 *)out + (uint64_t)blockIdx.x * units;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) to[i] = from[i];
}

/* A block a row of the table. */
extern "C" __global__ void stack_embed_gradient(const uint16_t *dy, const int32_t *first, const int32_t *where,
                                          uint16_t *dtable, uint32_t units) {
  int32_t begin = first[blockIdx.x], end = first[blockIdx.x + 1];
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit sum = { { 0 } };
    for (int32_t k = begin; k < end; k++) {
      unit u = load(dy, (uint64_t)where[k] * units + i);
#pragma unroll
      for (int j = 0; j < UNIT; j++) sum.v[j] += u.v[j];
    }
    store(dtable, (uint64_t)blockIdx.x * units + i, sum);
  }
}

#define EPSILON 1e-5f

/* A block a row. */
extern "C" __global__ void stack_norm(const uint16_t *x, const uint16_t *weight, uint16_t *y, uint32_t units) {
  uint64_t row = (uint64_t)blockIdx.x * units;
  float squares = 0;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(x, row + i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) squares += u.v[j] * u.v[j];
  }
  float scale = rsqrtf(block_sum(squares) / (float)(units * UNIT) + EPSILON);
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(x, row + i), w = load(weight, i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) u.v[j] *= scale * w.v[j];
    store(y, row + i, u);
  }
}

/* With h = x scale and g = weight dy: dx = scale (g - h mean(g h)). A block a row. */
extern "C" __global__ void stack_norm_gradient(const uint16_t *x, const uint16_t *weight, const uint16_t *dy,
                                         const uint16_t *dresidual, uint16_t *dx, float *scales, uint32_t units) {
  uint64_t row = (uint64_t)blockIdx.x * units;
  float squares = 0, products = 0;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(x, row + i), w = load(weight, i), d = load(dy, row + i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) {
      squares += u.v[j] * u.v[j];
      products += w.v[j] * d.v[j] * u.v[j];
    }
  }
  float scale = rsqrtf(block_sum(squares) / (float)(units * UNIT) + EPSILON);
  float mean = block_sum(products) * scale / (float)(units * UNIT);
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(x, row + i), w = load(weight, i), d = load(dy, row + i), r = { { 0 } };
    if (dresidual) r = load(dresidual, row + i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) r.v[j] += scale * (w.v[j] * d.v[j] - u.v[j] * scale * mean);
    store(dx, row + i, r);
  }
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

/* Columns of each part of the rows; then, norm_weight_sum, of the parts. A thread eight columns. */
extern "C" __global__ void stack_norm_weight(const uint16_t *x, const uint16_t *dy, const float *scales, float *parts,
                                       uint32_t units, uint32_t rows, uint32_t part_rows) {
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, begin = blockIdx.y * part_rows;
  if (i >= units) return;
  uint32_t end = begin + part_rows < rows ? begin + part_rows : rows;
  unit sum = { { 0 } };
  for (uint32_t r = begin; r < end; r++) {
    unit u = load(x, (uint64_t)r * units + i), d = load(dy, (uint64_t)r * units + i);
    float scale = scales[r];
#pragma unroll
    for (int j = 0; j < UNIT; j++) sum.v[j] += u.v[j] * scale * d.v[j];
  }
#pragma unroll
  for (int j = 0; j < UNIT; j++) parts[((uint64_t)blockIdx.y * units + i) * UNIT + j] = sum.v[j];
}
extern "C" __global__ void stack_norm_weight_sum(const float *parts, uint16_t *dweight, uint32_t width, uint32_t count) {
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= width) return;
  float sum = 0;
  for (uint32_t k = 0; k < count; k++) sum += parts[(uint64_t)k * width + i];
  dweight[i] = (uint16_t)narrow(sum);
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* A thread eight elements. */
extern "C" __global__ void stack_gate(const uint16_t *g, const uint16_t *u, const uint16_t *v, uint16_t *y, uint64_t units) {
  uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= units) return;
  unit a = load(g, i), b = load(u, i), c = { { 0 } };
  if (v) c = load(v, i);
#pragma unroll
  for (int j = 0; j < UNIT; j++) c.v[j] += a.v[j] * sigmoid(a.v[j]) * b.v[j];
  store(y, i, c);
}
extern "C" __global__ void stack_gate_gradient(const uint16_t *dy, uint16_t *g, uint16_t *u, uint64_t units) {
  uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= units) return;
  unit a = load(g, i), b = load(u, i), d = load(dy, i);
#pragma unroll
  for (int j = 0; j < UNIT; j++) {
    float s = sigmoid(a.v[j]), x = a.v[j];
    a.v[j] = d.v[j] * b.v[j] * s * (1.0f + x * (1.0f - s));
    b.v[j] = d.v[j] * x * s;
  }
  store(g, i, a);
  store(u, i, b);
}

/* Cross entropy; the gradient is that of the mean over all rows. A block a row. */
extern "C" __global__ void stack_loss(uint16_t *logits, const int32_t *targets, float *losses, uint32_t units, float share) {
  uint64_t row = (uint64_t)blockIdx.x * units;
  uint32_t target = (uint32_t)targets[blockIdx.x];
  float largest = -3.4e38f, total = 0;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(logits, row + i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) largest = fmaxf(largest, u.v[j]);
  }
  largest = block_max(largest);
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(logits, row + i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) total += expf(u.v[j] - largest);
  }
  total = block_sum(total);
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) + largest - widen(logits[row * UNIT + target]);
  __syncthreads(); /* the target's logit was read */
  float scale = 1.0f / total;
  for (uint32_t i = threadIdx.x; i < units; i += blockDim.x) {
    unit u = load(logits, row + i);
#pragma unroll
    for (int j = 0; j < UNIT; j++) u.v[j] = (expf(u.v[j] - largest) * scale - (i * UNIT + j == target)) * share;
    store(logits, row + i, u);
  }
}
/* One block. */
extern "C" __global__ void stack_loss_mean(const float *losses, double *mean, uint32_t rows) {
  __shared__ double sums[256];
  double sum = 0;
  for (uint32_t i = threadIdx.x; i < rows; i += 256) sum += (double)losses[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (uint32_t i = 1; i < 256; i++) sum += sums[i];
  *mean = sum / rows;
}

__device__ __forceinline__ uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
/* A thread an element. */
extern "C" __global__ void stack_fill(uint16_t *parameter, float *master, uint64_t count, uint64_t seed, uint64_t first,
                                float scale, float offset) {
  uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  int32_t drawn = (int32_t)(mix(seed + (first + i) * 0x9e3779b97f4a7c15ull) >> 40) - (1 << 23);
  float value = __fadd_rn(offset, __fmul_rn(scale, __fmul_rn((float)drawn, 1.0f / (1 << 23))));
  master[i] = value;
  parameter[i] = (uint16_t)narrow(value);
}

/* A sum, so that the order does not count. */
extern "C" __global__ void stack_hash(const float *master, uint64_t count, uint64_t first, unsigned long long *sum) {
  uint64_t total = 0, all = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += all)
    total += mix((first + i) * 0x9e3779b97f4a7c15ull + __float_as_uint(master[i]));
  for (int step = 16; step > 0; step /= 2) total += __shfl_down_sync(0xffffffffu, total, step);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, total);
}
