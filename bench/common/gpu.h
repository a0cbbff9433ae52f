/* A GPU for benches: the CUDA driver and cuBLAS, both opened at run time, so that nothing links to them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Addresses of the GPU's memory are plain pointers, which the host must not follow. A stream is a CUstream, as
 * gemini_stream_native() gives it, or made here. Functions that return bool are false after printing what failed
 * (cli_error()): `PROGRAM: function: error: which value`. A GPU that a kernel has broken stays broken: every later call
 * fails, and only the end of the process helps.
 *
 * All calls for one gpu_t come from the thread that opened it, whose current context is the GPU's primary one
 * until gpu_close(); libgemini uses the same context. */
#ifndef BENCH_GPU_H
#define BENCH_GPU_H

#include <stdbool.h>
#include <stdint.h>

typedef struct gpu gpu_t;

/* @param program for messages; borrowed until gpu_close()
 * @param cublas  file of cuBLAS, borrowed; NULL: what the environment's GEMINI_CUBLAS names, else the newest libcublas
 *                that the system finds. Its libcublasLt must lie beside it or be found by the system.
 * NULL after printing what is missing. */
gpu_t *gpu_open(const char *program, uint32_t ordinal, const char *cublas);
/* Frees modules and cuBLAS workspaces; everything else must be freed before. NULL is accepted. */
void gpu_close(gpu_t *gpu);
/* "NVIDIA H200"; valid until gpu_close(). */
const char *gpu_name(const gpu_t *gpu);
/* As cuBLAS numbers itself: 120803 is 12.8.3. */
int gpu_cublas_version(const gpu_t *gpu);
/* Bytes of the GPU's memory that are free, for all processes, and that it has. */
bool gpu_memory(gpu_t *gpu, uint64_t *free_bytes_out, uint64_t *total_bytes_out);

/* ---- Memory ---- */

/* Aligned to 256 bytes at least; contents undefined. A size of 0 is rounded up to 1. */
bool gpu_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out);
/* Waits for all work of the GPU. NULL is accepted. */
bool gpu_free(gpu_t *gpu, void *ptr);
/* The same in a stream's order, from a pool that keeps what is freed: made for many allocations of one stream. */
bool gpu_alloc_async(gpu_t *gpu, uint64_t bytes, void *stream, void **ptr_out);
bool gpu_free_async(gpu_t *gpu, void *ptr, void *stream);
/* Page-locked host memory, of zeros. */
bool gpu_host_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out);
bool gpu_host_free(gpu_t *gpu, void *ptr);
/* Page-locks the caller's own memory, which makes its copies asynchronous. */
bool gpu_host_lock(gpu_t *gpu, void *ptr, uint64_t bytes);
bool gpu_host_unlock(gpu_t *gpu, void *ptr);

/* Queued on stream. Host memory on either side must be page-locked, else the caller waits. */
bool gpu_copy(gpu_t *gpu, void *to, const void *from, uint64_t bytes, void *stream);
bool gpu_set(gpu_t *gpu, void *to, unsigned char byte, uint64_t bytes, void *stream);

/* ---- Streams and events ---- */

bool gpu_stream_create(gpu_t *gpu, void **stream_out);
bool gpu_stream_destroy(gpu_t *gpu, void *stream);
/* Blocks until the work queued so far is done. */
bool gpu_stream_synchronize(gpu_t *gpu, void *stream);

bool gpu_event_create(gpu_t *gpu, void **event_out);
bool gpu_event_destroy(gpu_t *gpu, void *event);
bool gpu_event_record(gpu_t *gpu, void *event, void *stream);
/* What is queued on stream from now on waits for the event's last record. */
bool gpu_event_wait(gpu_t *gpu, void *event, void *stream);
/* Seconds between the records of two events. Blocks until both are reached. */
bool gpu_event_elapsed(gpu_t *gpu, void *begin, void *end, double *seconds_out);

/* ---- Kernels ---- */

/* Compiles PTX text and finds kernels in it by name; they live until gpu_close(). */
bool gpu_load(gpu_t *gpu, const char *ptx, const char *const *names, void **kernels_out, int count);
/* Queues grid_x * grid_y blocks of block threads. arguments: the address of each of the kernel's; copied. */
bool gpu_launch(gpu_t *gpu, void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t block, void *stream,
                void **arguments);

/* ---- Matrix products ---- */

enum { GPU_F32 = 0, GPU_BF16 = 1 };

/* c (m,n) = alpha a (m,k) b (k,n) + beta c, row-major: element (i,j) at i * ld + j; a transposed matrix lies as (k,m) or
 * (n,k). Products of fp32 are fp32, never tf32; sums are fp32. The same call on the same GPU gives the same bits, as long
 * as the matrices are aligned to 256 bytes, or by the same remainder. */
typedef struct gpu_gemm {
  int m, n, k;
  bool a_transposed, b_transposed;
  int inputs, output; /* GPU_*: of a and b, of c */
  float alpha, beta;
  const void *a, *b;
  void *c;
  int lda, ldb, ldc;                    /* elements from row to row as they lie in memory */
  int count;                            /* of products; 0 = 1 */
  int64_t stride_a, stride_b, stride_c; /* elements from product to product */
} gpu_gemm_t;

/* Gives products on a stream their workspace, of the GPU's own memory beside any budget; at most 16 streams. Results
 * depend on its size. 0: GPU_BLAS_WORKSPACE_BYTES. */
enum { GPU_BLAS_WORKSPACE_BYTES = 32 << 20 };
bool gpu_blas_stream(gpu_t *gpu, void *stream, uint64_t workspace_bytes);
/* Queued on stream, which gpu_blas_stream() knows. */
bool gpu_gemm(gpu_t *gpu, const gpu_gemm_t *gemm, void *stream);

#endif
