/* Fused updates on the GPU, through the CUDA driver opened at run time. SPDX-License-Identifier: Apache-2.0
 *
 * A call finds the context that its stream belongs to, loads the kernels into that context at first use, makes it
 * current, launches, and restores the thread's context. It does not wait for the GPU. Any thread.
 *
 * The lock guards the driver's table and the list of contexts. It is released before the launch, which may block while
 * the driver's queue is full: what the launch needs does not change once it is in the list. */
#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda_driver.h" /* its types; nothing is called */
#include "update/update.h"

#define LIBRARY "libcuda.so.1"
#define THREADS 256u /* in a block; kernels.cu has the same number */

/* X(field, symbol): the functions of gmi_cuda_driver_t that are used. */
#define FUNCTIONS(X)                            \
  X(init, "cuInit")                             \
  X(error_name, "cuGetErrorName")               \
  X(device_get, "cuDeviceGet")                  \
  X(primary_retain, "cuDevicePrimaryCtxRetain") \
  X(current_get, "cuCtxGetCurrent")             \
  X(current_set, "cuCtxSetCurrent")             \
  X(stream_context, "cuStreamGetCtx")           \
  X(module_load, "cuModuleLoadData")            \
  X(module_function, "cuModuleGetFunction")     \
  X(module_unload, "cuModuleUnload")            \
  X(launch, "cuLaunchKernel")

enum { ADAMW, SGD, NARROW, BLOCKS, SUM, KERNELS };
static const char *const kernel_names[KERNELS] = { "gmi_adamw", "gmi_sgd", "gmi_narrow", "gmi_blocks",
                                                   "gmi_update_sum" };

/* A context in which the kernels are loaded. Records and modules are kept until the process ends. */
typedef struct context {
  struct context *next;
  cu_context_t handle;
  cu_function_t kernels[KERNELS];
} context_t;

static _Thread_local const char *operation; /* the public function that this thread is in, for error messages */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool loaded; /* Guarded by lock, as the next five; driver does not change once loaded, and needs no lock then */
static gmi_cuda_driver_t driver;
static void *library; /* never closed: the driver's threads run its code to the end of the process */
static void *(*replacement)(const char *name);
static context_t *contexts;
static cu_context_t primary; /* of GPU 0, once retained; never released */

/* fork() waits for the lock: a child would otherwise inherit it locked by a thread that does not exist there. */
static void fork_prepare(void) { pthread_mutex_lock(&lock); }
static void fork_parent(void) { pthread_mutex_unlock(&lock); }
static void fork_child(void) { pthread_mutex_init(&lock, NULL); }
static void fork_watch(void) { (void)pthread_atfork(fork_prepare, fork_parent, fork_child); }
static pthread_once_t fork_watched = PTHREAD_ONCE_INIT;

static gemini_status_t failed(cu_result_t result, const char *function) {
  const char *name = NULL;
  if (driver.error_name(result, &name) != CU_SUCCESS || !name) name = "unknown error";
  gemini_status_t status = result == CU_NO_DEVICE ? GEMINI_ERR_UNSUPPORTED : GEMINI_ERR_DEVICE;
  return gmi_update_fail(operation, status, result, "%s: %s", function, name);
}
#define TRY(call, function)                                            \
  do {                                                                 \
    cu_result_t try_result = (call);                                   \
    if (try_result != CU_SUCCESS) return failed(try_result, function); \
  } while (0)

/* Called with lock held. */
static gemini_status_t load_driver(void) {
  if (loaded) return GEMINI_OK;
  if (!replacement && !library) {
    library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char *why = dlerror();
      return gmi_update_fail(operation, GEMINI_ERR_UNSUPPORTED, 0, "no CUDA driver on this machine: %s",
                             why ? why : LIBRARY);
    }
  }
  const char *missing = NULL;
  void *address;
  /* dlsym() returns an object pointer. ISO C has no cast from that to a function pointer; POSIX allows copying it. */
#define FIND(field, symbol)                                             \
  address = replacement ? replacement(symbol) : dlsym(library, symbol); \
  if (!address && !missing) missing = symbol;                           \
  memcpy(&driver.field, &address, sizeof address);
  FUNCTIONS(FIND)
#undef FIND
  if (missing)
    return gmi_update_fail(operation, GEMINI_ERR_UNSUPPORTED, 0, "the CUDA driver is too old: %s has no %s", LIBRARY,
                           missing);
  TRY(driver.init(0), "cuInit");
  loaded = true;
  return GEMINI_OK;
}

/* The context to launch in: that of the stream; for a default stream the thread's current one, or, if it has none, the
 * primary context of GPU 0. Called with lock held. */
static gemini_status_t context_of(cu_stream_t stream, cu_context_t current, cu_context_t *context_out) {
  if ((uintptr_t)stream > CU_STREAM_PER_THREAD_HANDLE) {
    TRY(driver.stream_context(stream, context_out), "cuStreamGetCtx");
    return GEMINI_OK;
  }
  *context_out = current;
  if (current) return GEMINI_OK;
  if (!primary) {
    cu_device_t device;
    TRY(driver.device_get(&device, 0), "cuDeviceGet");
    TRY(driver.primary_retain(&primary, device), "cuDevicePrimaryCtxRetain");
  }
  *context_out = primary;
  return GEMINI_OK;
}

/* The record of the current context, whose handle is given; loads the kernels if there is none. Called with lock
 * held. */
static gemini_status_t load_kernels(cu_context_t handle, const context_t **context_out) {
  for (context_t *c = contexts; c; c = c->next) {
    if (c->handle == handle) {
      *context_out = c;
      return GEMINI_OK;
    }
  }
  context_t *c = malloc(sizeof *c);
  if (!c) return gmi_update_fail(operation, GEMINI_ERR_OOM_SYSTEM, 0, "no memory for the record of a context");
  *c = (context_t){ .next = contexts, .handle = handle };
  cu_module_t module = NULL;
  const char *function = "cuModuleLoadData";
  cu_result_t result = driver.module_load(&module, gmi_update_ptx);
  if (result == CU_SUCCESS) {
    function = "cuModuleGetFunction";
    for (int i = 0; result == CU_SUCCESS && i < KERNELS; i++)
      result = driver.module_function(&c->kernels[i], module, kernel_names[i]);
    if (result != CU_SUCCESS) driver.module_unload(module);
  }
  if (result != CU_SUCCESS) {
    free(c);
    return failed(result, function);
  }
  *context_out = contexts = c;
  return GEMINI_OK;
}

/* Makes the stream's context current and loads its kernels. *had_out: the context to restore. A failure restores it
 * here. Called with lock held. */
static gemini_status_t enter(cu_stream_t stream, cu_context_t *had_out, const context_t **context_out) {
  cu_context_t had = NULL, wanted;
  TRY(driver.current_get(&had), "cuCtxGetCurrent");
  gemini_status_t status = context_of(stream, had, &wanted);
  if (status) return status;
  if (wanted != had) TRY(driver.current_set(wanted), "cuCtxSetCurrent");
  status = load_kernels(wanted, context_out);
  if (status && wanted != had) driver.current_set(had);
  *had_out = had;
  return status;
}

static gemini_status_t launch(const context_t *c, int kernel, void *k, gmi_arrays_t *a, uint64_t count, double *sums,
                              cu_stream_t stream) {
  uint64_t tiles = (count + GMI_TILE - 1) / GMI_TILE;
  void *update[] = { k, a, &count, &sums }, *sum[] = { &tiles, &sums };
  if (tiles)
    TRY(driver.launch(c->kernels[kernel], (unsigned)tiles, 1, 1, THREADS, 1, 1, 0, stream, update, NULL),
        "cuLaunchKernel");
  if (sums) TRY(driver.launch(c->kernels[SUM], 1, 1, 1, GMI_TILE_LANES, 1, 1, 0, stream, sum, NULL), "cuLaunchKernel");
  return GEMINI_OK;
}

uint64_t gemini_update_sums(uint64_t count) { return 1 + count / GMI_TILE + (count % GMI_TILE != 0); }

static gemini_status_t queue(int kernel, void *k, gmi_arrays_t *a, uint64_t count, double *sums, cu_stream_t stream) {
  if ((uintptr_t)sums % sizeof *sums)
    return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, "sums is %p, which is no multiple of %zu bytes",
                           (void *)sums, sizeof *sums);
  const context_t *context = NULL;
  cu_context_t current = NULL;
  pthread_once(&fork_watched, fork_watch);
  pthread_mutex_lock(&lock);
  gemini_status_t status = load_driver();
  if (!status) status = enter(stream, &current, &context);
  pthread_mutex_unlock(&lock);
  if (status) return status;
  status = launch(context, kernel, k, a, count, sums, stream);
  if (context->handle != current) driver.current_set(current);
  return status;
}

gemini_status_t gmi_adamw_cuda(const char *name, const gemini_adamw_t *adamw, uint64_t first, uint64_t count,
                               const gmi_arrays_t *arrays, void *stream, double *sums_out) {
  gmi_arrays_t a = *arrays;
  gmi_adamw_t k;
  operation = name;
  gemini_status_t status = gmi_adamw_prepare(operation, adamw, first, count, &a, &k);
  if (status) return status;
  const int kernel = gmi_has_blocks(&k) ? BLOCKS : gmi_is_narrow(&k) ? NARROW : ADAMW;
  return queue(kernel, &k, &a, count, sums_out, stream);
}

gemini_status_t gemini_adamw_cuda(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                  void *master, void *momentum, void *variance, void *stream, double *sums_out) {
  const gmi_arrays_t a = { param, grad, master, momentum, variance };
  return gmi_adamw_cuda(__func__, adamw, 0, count, &a, stream, sums_out);
}

gemini_status_t gemini_sgd_cuda(const gemini_sgd_t *sgd, uint64_t count, void *param, const void *grad, float *master,
                                float *momentum, void *stream, double *sums_out) {
  gmi_arrays_t a = { param, grad, master, momentum, NULL };
  gmi_sgd_t k;
  operation = __func__;
  gemini_status_t status = gmi_sgd_prepare(operation, sgd, count, &a, &k);
  return status ? status : queue(SGD, &k, &a, count, sums_out, stream);
}

void gmi_update_cuda_replace(void *(*symbol)(const char *name)) {
  pthread_mutex_lock(&lock);
  replacement = symbol;
  loaded = false;
  primary = NULL;
  for (context_t *c = contexts, *next; c; c = next) {
    next = c->next;
    free(c);
  }
  contexts = NULL;
  pthread_mutex_unlock(&lock);
}
