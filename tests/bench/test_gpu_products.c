/* bench/common/gpu.c without a GPU: that row-major products are asked of column-major cuBLAS rightly, each stream with its
 * own workspace, and that nothing goes on without a driver. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "check.h"

#include "../../bench/common/gpu.c"

enum { MOST = 4096 };

/* ---- A cuBLAS as its documentation has it: element (i,j) at i + j * ld ---- */

static void *blas_stream, *blas_workspace, *product_stream, *product_workspace;
static uint64_t blas_workspace_bytes;

static int fake_stream(blas_t blas, cu_stream_t stream) {
  (void)blas;
  blas_stream = stream;
  blas_workspace = NULL; /* back to cuBLAS's own */
  return 0;
}
static int fake_workspace(blas_t blas, void *workspace, size_t workspace_bytes) {
  (void)blas;
  blas_workspace = workspace;
  blas_workspace_bytes = workspace_bytes;
  return 0;
}
static int fake_gemm(blas_t blas, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type,
                     int lda, long long stride_a, const void *b, int b_type, int ldb, long long stride_b,
                     const void *beta, void *c, int c_type, int ldc, long long stride_c, int count, int compute,
                     int algorithm) {
  (void)blas;
  CHECK(a_type == BLAS_R_32F && b_type == BLAS_R_32F && c_type == BLAS_R_32F);
  CHECK(compute == BLAS_COMPUTE_32F && algorithm == BLAS_GEMM_DEFAULT);
  CHECK(lda >= (op_a == BLAS_OP_N ? m : k) && ldb >= (op_b == BLAS_OP_N ? k : n) && ldc >= m);
  for (int p = 0; p < count; p++) {
    const float *x = (const float *)a + p * stride_a, *y = (const float *)b + p * stride_b;
    float *z = (float *)c + p * stride_c;
    for (int i = 0; i < m; i++) {
      for (int j = 0; j < n; j++) {
        float total = 0;
        for (int l = 0; l < k; l++) {
          total += (op_a == BLAS_OP_N ? x[i + l * lda] : x[l + i * lda]) *
                   (op_b == BLAS_OP_N ? y[l + j * ldb] : y[j + l * ldb]);
        }
        z[i + j * ldc] = *(const float *)alpha * total + *(const float *)beta * z[i + j * ldc];
      }
    }
  }
  product_stream = blas_stream;
  product_workspace = blas_workspace;
  return 0;
}
static int fake_gemm_one(blas_t blas, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a,
                         int a_type, int lda, const void *b, int b_type, int ldb, const void *beta, void *c, int c_type,
                         int ldc, int compute, int algorithm) {
  return fake_gemm(blas, op_a, op_b, m, n, k, alpha, a, a_type, lda, 0, b, b_type, ldb, 0, beta, c, c_type, ldc, 0, 1,
                   compute, algorithm);
}
static cu_result_t fake_alloc(cu_address_t *address_out, size_t size_bytes) {
  static uint64_t end = 4096;
  *address_out = end;
  end += size_bytes;
  return CU_SUCCESS;
}

static gpu_t fake_gpu(void) {
  gpu_t gpu = { .program = "test", .blas_stream = -1 };
  gpu.blas_calls.stream = fake_stream;
  gpu.blas_calls.workspace = fake_workspace;
  gpu.blas_calls.gemm = fake_gemm;
  gpu.blas_calls.gemm_one = fake_gemm_one;
  gpu.more.alloc = fake_alloc;
  return gpu;
}

/* ---- Tests ---- */

/* Small whole numbers: every product and sum is exact. */
static void test_products_are_row_major(void) {
  static float a[MOST], b[MOST], c[MOST], want[MOST];
  gpu_t gpu = fake_gpu();
  uint64_t random = 3;
  int stream;
  CHECK(gpu_blas_stream(&gpu, &stream, 0));
  CHECK(blas_workspace_bytes == 0);
  for (int variant = 0; variant < 8; variant++) {
    bool ta = variant & 1, tb = variant & 2;
    gpu_gemm_t g = { .m = 5,
                     .n = 7,
                     .k = 3,
                     .a_transposed = ta,
                     .b_transposed = tb,
                     .alpha = 2,
                     .beta = 3,
                     .a = a,
                     .b = b,
                     .c = c,
                     .lda = ta ? 6 : 4,
                     .ldb = tb ? 5 : 9,
                     .ldc = 11 };
    if (variant & 4) g.count = 4, g.stride_a = 50, g.stride_b = 60, g.stride_c = 100;
    for (int i = 0; i < MOST; i++) {
      a[i] = (float)(check_random(&random) % 9) - 4;
      b[i] = (float)(check_random(&random) % 9) - 4;
      want[i] = c[i] = (float)(check_random(&random) % 9) - 4;
    }
    for (int p = 0; p < (g.count ? g.count : 1); p++) {
      const float *x = a + p * g.stride_a, *y = b + p * g.stride_b;
      for (int i = 0; i < g.m; i++) {
        for (int j = 0; j < g.n; j++) {
          float total = 0, *z = want + p * g.stride_c + i * g.ldc + j;
          for (int l = 0; l < g.k; l++) {
            total += (ta ? x[l * g.lda + i] : x[i * g.lda + l]) * (tb ? y[j * g.ldb + l] : y[l * g.ldb + j]);
          }
          *z = 2 * total + 3 * *z;
        }
      }
    }
    CHECK(gpu_gemm(&gpu, &g, &stream));
    CHECK(memcmp(c, want, sizeof c) == 0);
  }
  CHECK_EQ(blas_workspace_bytes, GPU_BLAS_WORKSPACE_BYTES);
}

static void test_products_have_their_streams_workspace(void) {
  static float a[4], b[4], c[4];
  gpu_t gpu = fake_gpu();
  gpu_gemm_t g = { .m = 2, .n = 2, .k = 2, .alpha = 1, .a = a, .b = b, .c = c, .lda = 2, .ldb = 2, .ldc = 2 };
  char streams[3];
  CHECK(gpu_blas_stream(&gpu, &streams[0], 100));
  CHECK(gpu_blas_stream(&gpu, &streams[1], 200));
  void *first = NULL;
  for (int i = 0; i < 4; i++) {
    CHECK(gpu_gemm(&gpu, &g, &streams[i % 2]));
    CHECK(product_stream == &streams[i % 2]);
    CHECK(product_workspace != NULL);
    CHECK_EQ(blas_workspace_bytes, i % 2 ? 200 : 100);
    if (i == 0) first = product_workspace;
    CHECK((product_workspace == first) == (i % 2 == 0));
  }
  CHECK(!gpu_gemm(&gpu, &g, &streams[2])); /* which has none */
  for (int i = 2; i < BLAS_STREAMS_MAX; i++) CHECK(gpu_blas_stream(&gpu, &a[0], 1));
  CHECK(!gpu_blas_stream(&gpu, &a[0], 1));
}

static void test_gpu_open_without_driver_or_with_no_such_gpu_fails(void) {
  CHECK(gpu_open("test", 1000000, NULL) == NULL);
  gpu_close(NULL);
}

int main(void) {
  RUN(test_products_are_row_major);
  RUN(test_products_have_their_streams_workspace);
  RUN(test_gpu_open_without_driver_or_with_no_such_gpu_fails);
  return check_done();
}
