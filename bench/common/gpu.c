/* A GPU for benches: the CUDA driver and cuBLAS, both opened at run time.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "gpu.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "device/cuda_driver.h" /* types and values only */

#define DRIVER "libcuda.so.1"

/* Of the driver, beside what libgemini uses; names carry their versions as there. */
typedef struct cu_pool *cu_pool_t;
enum { CU_POOL_RELEASE_THRESHOLD = 4 }; /* CU_MEMPOOL_ATTR_RELEASE_THRESHOLD */
#define MORE_FUNCTIONS(X)                                                                                \
  X(alloc, "cuMemAlloc_v2", (cu_address_t * address_out, size_t size_bytes))                             \
  X(free, "cuMemFree_v2", (cu_address_t address))                                                        \
  X(alloc_async, "cuMemAllocAsync", (cu_address_t * address_out, size_t size_bytes, cu_stream_t stream)) \
  X(free_async, "cuMemFreeAsync", (cu_address_t address, cu_stream_t stream))                            \
  X(default_pool, "cuDeviceGetDefaultMemPool", (cu_pool_t * pool_out, cu_device_t device))               \
  X(pool_set, "cuMemPoolSetAttribute", (cu_pool_t pool, int attribute, void *value))                     \
  X(memory_info, "cuMemGetInfo_v2", (size_t * free_bytes_out, size_t * total_bytes_out))                 \
  X(copy, "cuMemcpyAsync", (cu_address_t dst, cu_address_t src, size_t size_bytes, cu_stream_t stream))  \
  X(stream_synchronize, "cuStreamSynchronize", (cu_stream_t stream))                                     \
  X(event_synchronize, "cuEventSynchronize", (cu_event_t event))                                         \
  X(device_name, "cuDeviceGetName", (char *name_out, int name_bytes, cu_device_t device))

/* Of cuBLAS, the same since its version 11. */
typedef struct blas *blas_t; /* cublasHandle_t */
enum { BLAS_OP_N = 0, BLAS_OP_T = 1 };
enum { BLAS_R_32F = 0, BLAS_R_16BF = 14 };              /* cudaDataType */
enum { BLAS_COMPUTE_32F = 68, BLAS_GEMM_DEFAULT = -1 }; /* COMPUTE_32F_FAST_TF32 is another */
enum { BLAS_ATOMICS_NOT_ALLOWED = 0, BLAS_DEFAULT_MATH = 0 };
#define BLAS_FUNCTIONS(X)                                                                                         \
  X(create, "cublasCreate_v2", (blas_t * blas_out))                                                               \
  X(destroy, "cublasDestroy_v2", (blas_t blas))                                                                   \
  X(version, "cublasGetVersion_v2", (blas_t blas, int *version_out))                                              \
  X(stream, "cublasSetStream_v2", (blas_t blas, cu_stream_t stream))                                              \
  X(workspace, "cublasSetWorkspace_v2", (blas_t blas, void *workspace, size_t workspace_bytes))                   \
  X(math, "cublasSetMathMode", (blas_t blas, int mode))                                                           \
  X(atomics, "cublasSetAtomicsMode", (blas_t blas, int mode))                                                     \
  X(gemm, "cublasGemmStridedBatchedEx",                                                                           \
    (blas_t blas, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda, \
     long long stride_a, const void *b, int b_type, int ldb, long long stride_b, const void *beta, void *c,       \
     int c_type, int ldc, long long stride_c, int count, int compute, int algorithm))                             \
  X(gemm_one, "cublasGemmEx",                                                                                     \
    (blas_t blas, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda, \
     const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int compute, int algorithm))

enum { MODULES_MAX = 8, BLAS_STREAMS_MAX = 16 };

struct gpu {
  const char *program;
  void *driver_library, *blas_library;
  gmi_cuda_driver_t driver;
#define FIELD(field, symbol, parameters) cu_result_t(*field) parameters;
  struct {
    MORE_FUNCTIONS(FIELD)
  } more;
  struct {
    BLAS_FUNCTIONS(FIELD)
  } blas_calls;
#undef FIELD
  cu_device_t device;
  cu_context_t context; /* NULL: none retained */
  char name[128];
  cu_module_t modules[MODULES_MAX];
  int module_count;
  blas_t blas;
  int blas_version;
  struct {
    void *stream, *workspace;
    uint64_t workspace_bytes;
  } blas_streams[BLAS_STREAMS_MAX];
  int blas_stream_count, blas_stream; /* the one set now; -1: none */
};

/* ---- Errors ---- */

static bool check(gpu_t *gpu, cu_result_t result, const char *what, uint64_t value) {
  if (result == CU_SUCCESS) return true;
  const char *name = NULL;
  if (gpu->driver.error_name(result, &name) != CU_SUCCESS || name == NULL) name = "unknown error";
  cli_error(gpu->program, "%s: %s (%d): %" PRIu64, what, name, result, value);
  return false;
}
static bool blas_check(gpu_t *gpu, int result, const char *what, uint64_t value) {
  static const char *const names[] = { [1] = "not initialised", [3] = "out of memory",  [7] = "invalid value",
                                       [8] = "GPU too old",     [11] = "mapping error", [13] = "execution failed",
                                       [14] = "internal error", [15] = "not supported", [16] = "licence error" };
  if (result == 0) return true;
  const char *name = result > 0 && result < (int)(sizeof names / sizeof *names) ? names[result] : NULL;
  cli_error(gpu->program, "%s: cuBLAS: %s (%d): %" PRIu64, what, name ? name : "unknown error", result, value);
  return false;
}

static cu_address_t address_of(const void *ptr) { return (cu_address_t)(uintptr_t)ptr; }

/* ---- Opening ---- */

/* A function pointer out of an object pointer: ISO C has no cast for it, POSIX lets it be copied. */
#define FIND(field, symbol, parameters)       \
  address = dlsym(library, symbol);           \
  if (!address && !missing) missing = symbol; \
  memcpy(&into->field, &address, sizeof address);

static bool open_driver(gpu_t *gpu, uint32_t ordinal) {
  void *library = gpu->driver_library = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL), *address;
  if (library == NULL) {
    cli_error(gpu->program, "no CUDA driver on this machine: %s", dlerror());
    return false;
  }
  const char *missing = NULL;
  {
    gmi_cuda_driver_t *into = &gpu->driver;
    GMI_CUDA_FUNCTIONS(FIND)
  }
  {
    __typeof__(gpu->more) *into = &gpu->more;
    MORE_FUNCTIONS(FIND)
  }
  if (missing != NULL) {
    cli_error(gpu->program, "the CUDA driver is too old: %s has no %s", DRIVER, missing);
    return false;
  }
  int count = 0;
  if (!check(gpu, gpu->driver.init(0), "cuInit", 0)) return false;
  if (!check(gpu, gpu->driver.device_count(&count), "cuDeviceGetCount", 0)) return false;
  if (ordinal >= (uint32_t)count) {
    cli_error(gpu->program, "no such GPU: %" PRIu32 ", the driver has %d", ordinal, count);
    return false;
  }
  cu_context_t context;
  if (!check(gpu, gpu->driver.device_get(&gpu->device, (int)ordinal), "cuDeviceGet", ordinal)) return false;
  if (!check(gpu, gpu->driver.primary_retain(&context, gpu->device), "cuDevicePrimaryCtxRetain", ordinal)) return false;
  gpu->context = context;
  if (!check(gpu, gpu->driver.current_set(context), "cuCtxSetCurrent", ordinal)) return false;
  if (!check(gpu, gpu->more.device_name(gpu->name, sizeof gpu->name, gpu->device), "cuDeviceGetName", ordinal)) {
    return false;
  }
  cu_pool_t pool; /* what is freed stays in the pool, so that the next allocation need not ask the system */
  uint64_t threshold = UINT64_MAX;
  return check(gpu, gpu->more.default_pool(&pool, gpu->device), "cuDeviceGetDefaultMemPool", ordinal) &&
         check(gpu, gpu->more.pool_set(pool, CU_POOL_RELEASE_THRESHOLD, &threshold), "cuMemPoolSetAttribute", ordinal);
}

/* cuBLAS needs its libcublasLt, which the loader does not look for beside it: one that is loaded already is taken. */
static void open_blas_lt(const char *file) {
  static const char name[] = "libcublas.so";
  char path[4096];
  const char *at = strstr(file, name);
  if (at == NULL) return;
  int length = snprintf(path, sizeof path, "%.*slibcublasLt.so%s", (int)(at - file), file, at + sizeof name - 1);
  if (length > 0 && (size_t)length < sizeof path)
    dlopen(path, RTLD_NOW | RTLD_LOCAL); /* without it, the next one says so */
}

static bool open_blas(gpu_t *gpu, const char *file) {
  static const char *const names[] = { "libcublas.so.13",
                                       "libcublas.so.12",
                                       "libcublas.so.11",
                                       "/usr/local/cuda/lib64/libcublas.so.13",
                                       "/usr/local/cuda/lib64/libcublas.so.12",
                                       "/usr/local/cuda/lib64/libcublas.so.11" };
  if (file == NULL) file = getenv("GEMINI_CUBLAS");
  void *library = NULL, *address;
  if (file != NULL) {
    open_blas_lt(file);
    library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
      cli_error(gpu->program, "cannot open cuBLAS: %s", dlerror());
      return false;
    }
  }
  for (size_t i = 0; library == NULL && i < sizeof names / sizeof *names; i++) {
    library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
  }
  if (library == NULL) {
    cli_error(gpu->program, "no cuBLAS found: libcublas.so.13, .12, .11; name its file with --cublas or GEMINI_CUBLAS");
    return false;
  }
  gpu->blas_library = library;
  const char *missing = NULL;
  {
    __typeof__(gpu->blas_calls) *into = &gpu->blas_calls;
    BLAS_FUNCTIONS(FIND)
  }
  if (missing != NULL) {
    cli_error(gpu->program, "cuBLAS is too old: it has no %s", missing);
    return false;
  }
  blas_t blas;
  if (!blas_check(gpu, gpu->blas_calls.create(&blas), "cublasCreate", 0)) return false;
  gpu->blas = blas;
  return blas_check(gpu, gpu->blas_calls.version(blas, &gpu->blas_version), "cublasGetVersion", 0) &&
         blas_check(gpu, gpu->blas_calls.math(blas, BLAS_DEFAULT_MATH), "cublasSetMathMode", BLAS_DEFAULT_MATH) &&
         blas_check(gpu, gpu->blas_calls.atomics(blas, BLAS_ATOMICS_NOT_ALLOWED), "cublasSetAtomicsMode", 0);
}

gpu_t *gpu_open(const char *program, uint32_t ordinal, const char *cublas) {
  gpu_t *gpu = calloc(1, sizeof *gpu);
  if (gpu == NULL) {
    cli_error(program, "out of memory for the GPU's records");
    return NULL;
  }
  gpu->program = program;
  gpu->blas_stream = -1;
  if (open_driver(gpu, ordinal) && open_blas(gpu, cublas)) return gpu;
  gpu_close(gpu);
  return NULL;
}

void gpu_close(gpu_t *gpu) {
  if (gpu == NULL) return;
  if (gpu->context != NULL) {
    if (gpu->blas != NULL) gpu->blas_calls.destroy(gpu->blas);
    for (int i = 0; i < gpu->blas_stream_count; i++) gpu->more.free(address_of(gpu->blas_streams[i].workspace));
    for (int i = 0; i < gpu->module_count; i++) gpu->driver.module_unload(gpu->modules[i]);
    gpu->driver.current_set(NULL);
    gpu->driver.primary_release(gpu->device);
  }
  free(gpu); /* the libraries stay: their threads run their code to the end of the process */
}

const char *gpu_name(const gpu_t *gpu) { return gpu->name; }
int gpu_cublas_version(const gpu_t *gpu) { return gpu->blas_version; }

bool gpu_memory(gpu_t *gpu, uint64_t *free_bytes_out, uint64_t *total_bytes_out) {
  size_t free_bytes, total_bytes;
  if (!check(gpu, gpu->more.memory_info(&free_bytes, &total_bytes), "cuMemGetInfo", 0)) return false;
  *free_bytes_out = free_bytes;
  *total_bytes_out = total_bytes;
  return true;
}

/* ---- Memory ---- */

bool gpu_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out) {
  cu_address_t address;
  if (!check(gpu, gpu->more.alloc(&address, bytes ? bytes : 1), "cuMemAlloc", bytes)) return false;
  *ptr_out = (void *)(uintptr_t)address;
  return true;
}
bool gpu_free(gpu_t *gpu, void *ptr) {
  return ptr == NULL || check(gpu, gpu->more.free(address_of(ptr)), "cuMemFree", address_of(ptr));
}

bool gpu_alloc_async(gpu_t *gpu, uint64_t bytes, void *stream, void **ptr_out) {
  cu_address_t address;
  if (!check(gpu, gpu->more.alloc_async(&address, bytes ? bytes : 1, stream), "cuMemAllocAsync", bytes)) return false;
  *ptr_out = (void *)(uintptr_t)address;
  return true;
}
bool gpu_free_async(gpu_t *gpu, void *ptr, void *stream) {
  return ptr == NULL || check(gpu, gpu->more.free_async(address_of(ptr), stream), "cuMemFreeAsync", address_of(ptr));
}

bool gpu_host_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out) {
  void *ptr;
  if (!check(gpu, gpu->driver.host_alloc(&ptr, bytes ? bytes : 1, CU_HOST_PORTABLE), "cuMemHostAlloc", bytes)) {
    return false;
  }
  memset(ptr, 0, bytes ? bytes : 1);
  *ptr_out = ptr;
  return true;
}
bool gpu_host_free(gpu_t *gpu, void *ptr) {
  return ptr == NULL || check(gpu, gpu->driver.host_free(ptr), "cuMemFreeHost", address_of(ptr));
}

bool gpu_host_lock(gpu_t *gpu, void *ptr, uint64_t bytes) {
  return check(gpu, gpu->driver.host_register(ptr, bytes, CU_HOST_PORTABLE), "cuMemHostRegister", bytes);
}
bool gpu_host_unlock(gpu_t *gpu, void *ptr) {
  return check(gpu, gpu->driver.host_unregister(ptr), "cuMemHostUnregister", address_of(ptr));
}

bool gpu_copy(gpu_t *gpu, void *to, const void *from, uint64_t bytes, void *stream) {
  return bytes == 0 ||
         check(gpu, gpu->more.copy(address_of(to), address_of(from), bytes, stream), "cuMemcpyAsync", bytes);
}
bool gpu_set(gpu_t *gpu, void *to, unsigned char byte, uint64_t bytes, void *stream) {
  return bytes == 0 || check(gpu, gpu->driver.set_bytes(address_of(to), byte, bytes, stream), "cuMemsetD8Async", bytes);
}

/* ---- Streams and events ---- */

bool gpu_stream_create(gpu_t *gpu, void **stream_out) {
  cu_stream_t stream;
  if (!check(gpu, gpu->driver.stream_create(&stream, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate", 0)) return false;
  *stream_out = stream;
  return true;
}
bool gpu_stream_destroy(gpu_t *gpu, void *stream) {
  return check(gpu, gpu->driver.stream_destroy(stream), "cuStreamDestroy", address_of(stream));
}
bool gpu_stream_synchronize(gpu_t *gpu, void *stream) {
  return check(gpu, gpu->more.stream_synchronize(stream), "cuStreamSynchronize", address_of(stream));
}

bool gpu_event_create(gpu_t *gpu, void **event_out) {
  cu_event_t event;
  if (!check(gpu, gpu->driver.event_create(&event, 0), "cuEventCreate", 0)) return false;
  *event_out = event;
  return true;
}
bool gpu_event_destroy(gpu_t *gpu, void *event) {
  return check(gpu, gpu->driver.event_destroy(event), "cuEventDestroy", address_of(event));
}
bool gpu_event_record(gpu_t *gpu, void *event, void *stream) {
  return check(gpu, gpu->driver.event_record(event, stream), "cuEventRecord", address_of(event));
}
bool gpu_event_wait(gpu_t *gpu, void *event, void *stream) {
  return check(gpu, gpu->driver.stream_wait(stream, event, 0), "cuStreamWaitEvent", address_of(event));
}
bool gpu_event_elapsed(gpu_t *gpu, void *begin, void *end, double *seconds_out) {
  float ms;
  if (!check(gpu, gpu->more.event_synchronize(begin), "cuEventSynchronize", address_of(begin))) return false;
  if (!check(gpu, gpu->more.event_synchronize(end), "cuEventSynchronize", address_of(end))) return false;
  if (!check(gpu, gpu->driver.event_elapsed(&ms, begin, end), "cuEventElapsedTime", address_of(end))) return false;
  *seconds_out = 1e-3 * (double)ms;
  return true;
}

/* ---- Kernels ---- */

bool gpu_load(gpu_t *gpu, const char *ptx, const char *const *names, void **kernels_out, int count) {
  if (gpu->module_count == MODULES_MAX) {
    cli_error(gpu->program, "too many modules of kernels: %d, the limit is %d", MODULES_MAX + 1, MODULES_MAX);
    return false;
  }
  cu_module_t module;
  if (!check(gpu, gpu->driver.module_load(&module, ptx), "cuModuleLoadData", strlen(ptx))) return false;
  gpu->modules[gpu->module_count++] = module;
  for (int i = 0; i < count; i++) {
    cu_function_t function;
    if (!check(gpu, gpu->driver.module_function(&function, module, names[i]), names[i], (uint64_t)i)) return false;
    kernels_out[i] = function;
  }
  return true;
}

bool gpu_launch(gpu_t *gpu, void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t block, void *stream,
                void **arguments) {
  if (grid_x == 0 || grid_y == 0) return true; /* nothing to do, which the driver refuses */
  return check(gpu, gpu->driver.launch(kernel, grid_x, grid_y, 1, block, 1, 1, 0, stream, arguments, NULL),
               "cuLaunchKernel", grid_x);
}

/* ---- Matrix products ---- */

bool gpu_blas_stream(gpu_t *gpu, void *stream, uint64_t workspace_bytes) {
  if (gpu->blas_stream_count == BLAS_STREAMS_MAX) {
    cli_error(gpu->program, "too many streams with matrix products: %d, the limit is %d", BLAS_STREAMS_MAX + 1,
              BLAS_STREAMS_MAX);
    return false;
  }
  if (workspace_bytes == 0) workspace_bytes = GPU_BLAS_WORKSPACE_BYTES;
  void *workspace;
  if (!gpu_alloc(gpu, workspace_bytes, &workspace)) return false;
  int i = gpu->blas_stream_count++;
  gpu->blas_streams[i].stream = stream;
  gpu->blas_streams[i].workspace = workspace;
  gpu->blas_streams[i].workspace_bytes = workspace_bytes;
  return true;
}

static bool select_stream(gpu_t *gpu, void *stream) {
  if (gpu->blas_stream >= 0 && gpu->blas_streams[gpu->blas_stream].stream == stream) return true;
  int i = 0;
  while (i < gpu->blas_stream_count && gpu->blas_streams[i].stream != stream) i++;
  if (i == gpu->blas_stream_count) {
    cli_error(gpu->program, "a matrix product on a stream without workspace: %p, %d have one", stream, i);
    return false;
  }
  /* In this order: setting the stream takes the workspace back to cuBLAS's own. */
  if (!blas_check(gpu, gpu->blas_calls.stream(gpu->blas, stream), "cublasSetStream", address_of(stream)) ||
      !blas_check(
          gpu,
          gpu->blas_calls.workspace(gpu->blas, gpu->blas_streams[i].workspace, gpu->blas_streams[i].workspace_bytes),
          "cublasSetWorkspace", gpu->blas_streams[i].workspace_bytes)) {
    return false;
  }
  gpu->blas_stream = i;
  return true;
}

/* cuBLAS is column-major: what it takes for a matrix is our transposed one, so it is asked for c^T = b^T a^T. */
bool gpu_gemm(gpu_t *gpu, const gpu_gemm_t *g, void *stream) {
  static const int types[] = { [GPU_F32] = BLAS_R_32F, [GPU_BF16] = BLAS_R_16BF };
  if (!select_stream(gpu, stream)) return false;
  int op_a = g->a_transposed ? BLAS_OP_T : BLAS_OP_N, op_b = g->b_transposed ? BLAS_OP_T : BLAS_OP_N;
  int in = types[g->inputs], out = types[g->output];
  if (g->count <= 1) {
    return blas_check(gpu,
                      gpu->blas_calls.gemm_one(gpu->blas, op_b, op_a, g->n, g->m, g->k, &g->alpha, g->b, in, g->ldb,
                                               g->a, in, g->lda, &g->beta, g->c, out, g->ldc, BLAS_COMPUTE_32F,
                                               BLAS_GEMM_DEFAULT),
                      "cublasGemmEx", (uint64_t)g->m);
  }
  return blas_check(gpu,
                    gpu->blas_calls.gemm(gpu->blas, op_b, op_a, g->n, g->m, g->k, &g->alpha, g->b, in, g->ldb,
                                         g->stride_b, g->a, in, g->lda, g->stride_a, &g->beta, g->c, out, g->ldc,
                                         g->stride_c, g->count, BLAS_COMPUTE_32F, BLAS_GEMM_DEFAULT),
                    "cublasGemmStridedBatchedEx", (uint64_t)g->m);
}
