/* The kernels of bindings/update/kernels.cu compiled for the host: what their source says, without a GPU. The threads of
 * a block are stacks that take turns: each runs up to its next barrier. Shuffles and votes are barriers of the whole
 * block, as all of its threads reach them. fp16 is missing, whose conversions are PTX. SPDX-License-Identifier: Apache-2.0
 */
#include "kernels_on_host.h"

#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace {
struct index_t {
  uint32_t x;
} threadIdx, blockIdx;
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  uint32_t x, y;
};
float4 make_float4(float x, float y, float z, float w) { return { x, y, z, w }; }
uint2 make_uint2(uint32_t x, uint32_t y) { return { x, y }; }

enum { THREAD_COUNT = 256, STACK_BYTES = 64 << 10 };
ucontext_t scheduler, threads[THREAD_COUNT];
char stacks[THREAD_COUNT][STACK_BYTES];
uint32_t said[THREAD_COUNT]; /* what each thread brings to a shuffle or a vote */
int reached;                 /* the line of the barrier that the thread has come to; 0: its end */
const std::function<void()> *body;

void run_thread() {
  (*body)();
  reached = 0;
}
void barrier(int line) {
  reached = line;
  swapcontext(&threads[threadIdx.x], &scheduler);
}
void run_block(const std::function<void()> &kernel) {
  body = &kernel;
  for (uint32_t i = 0; i < THREAD_COUNT; i++) {
    getcontext(&threads[i]);
    threads[i].uc_stack.ss_sp = stacks[i];
    threads[i].uc_stack.ss_size = STACK_BYTES;
    threads[i].uc_link = &scheduler;
    makecontext(&threads[i], run_thread, 0);
  }
  for (int first = 1; first;) {
    for (threadIdx.x = 0; threadIdx.x < THREAD_COUNT; threadIdx.x++) {
      swapcontext(&scheduler, &threads[threadIdx.x]);
      if (threadIdx.x == 0) first = reached;
      if (reached != first) abort(); /* threads part before a barrier, which hangs or is undefined on a GPU */
    }
  }
}

float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
uint32_t vote(int line, uint32_t predicate) {
  uint32_t bits = 0;
  said[threadIdx.x] = predicate != 0;
  barrier(line);
  for (uint32_t i = 0; i < 32; i++) bits |= said[threadIdx.x / 32 * 32 + i] << i;
  barrier(line);
  return bits;
}
uint32_t exchanged(int line, uint32_t value, uint32_t distance) {
  said[threadIdx.x] = value;
  barrier(line);
  value = said[threadIdx.x ^ distance];
  barrier(line);
  return value;
}
void raise_to(uint32_t *most, uint32_t value) {
  if (value > *most) *most = value;
}
} // namespace

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#define __constant__ static
#define asm(...) abort()
#define __syncthreads() barrier(__LINE__)
#define __ballot_sync(mask, predicate) vote(__LINE__, predicate)
#define __shfl_xor_sync(mask, value, distance) exchanged(__LINE__, value, distance)
#define atomicMax(address, value) raise_to(address, value)
#define __uint_as_float(bits) float_of_bits(bits)
#define __float_as_uint(value) bits_of_float(value)
#define __uint2float_rn(number) ((float)(number))
#define __float2int_rz(value) ((int32_t)(value))
#define __fadd_rn(a, b) ((float)(a) + (float)(b))
#define __fsub_rn(a, b) ((float)(a) - (float)(b))
#define __fmul_rn(a, b) ((float)(a) * (float)(b))
#define __fdiv_rn(a, b) ((float)(a) / (float)(b))
#define __fsqrt_rn(a) sqrtf(a)
#define __dmul_rn(a, b) ((a) * (b))
#define __dadd_rn(a, b) ((a) + (b))
#include "update/kernels.cu"

void kernel_on_host(const char *name, const gmi_adamw_t *k, const gmi_arrays_t *a, uint64_t count, double *sums) {
  void (*const kernel)(gmi_adamw_t, gmi_arrays_t, uint64_t, double *) = !strcmp(name, "gmi_adamw")    ? gmi_adamw
                                                                        : !strcmp(name, "gmi_narrow") ? gmi_narrow
                                                                        : !strcmp(name, "gmi_blocks") ? gmi_blocks
                                                                                                      : nullptr;
  const uint32_t tiles = (uint32_t)((count + GMI_TILE - 1) / GMI_TILE);
  if (!kernel) abort();
  for (blockIdx.x = 0; blockIdx.x < tiles; blockIdx.x++) run_block([&] { kernel(*k, *a, count, sums); });
  blockIdx.x = 0;
  run_block([&] { gmi_update_sum(tiles, sums); });
}
