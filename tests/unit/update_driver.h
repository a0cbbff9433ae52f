/* A CUDA driver for tests of the fused updates: notes which functions are called, and computes what the kernels are to.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef UPDATE_DRIVER_H
#define UPDATE_DRIVER_H

#include <stdbool.h>

#include "check.h"
#include "device/cuda_driver.h"
#include "update/update.h"

enum { CALLS = 512 };
static struct {
  cu_context_t current;
  const char *calls[CALLS]; /* those after the loading */
  uint32_t call_count, loads, unloads;
  const char *failing, *lacking;
  cu_stream_t launched_on[CALLS];
} fake;
static char contexts[3][8], kernels[5][8], module[8]; /* what handles point to; context 0 is the primary one */
static cu_context_t context_at(int i) { return (cu_context_t)(void *)contexts[i]; }

static cu_result_t note(const char *function) {
  CHECK(fake.call_count < CALLS);
  fake.calls[fake.call_count++] = function;
  return fake.failing && !strcmp(fake.failing, function) ? CU_UNKNOWN : CU_SUCCESS;
}
static cu_result_t fake_init(unsigned flags) { return note(flags ? "?" : "cuInit"); }
static cu_result_t fake_error_name(cu_result_t result, const char **name_out) {
  *name_out = result == CU_UNKNOWN ? "CUDA_ERROR_UNKNOWN" : "?";
  return CU_SUCCESS;
}
static cu_result_t fake_device_get(cu_device_t *device_out, int ordinal) {
  *device_out = 40 + ordinal;
  return note("cuDeviceGet");
}
static cu_result_t fake_primary_retain(cu_context_t *context_out, cu_device_t device) {
  CHECK_EQ(device, 40);
  if (note("cuDevicePrimaryCtxRetain")) return CU_UNKNOWN;
  *context_out = context_at(0);
  return CU_SUCCESS;
}
static cu_result_t fake_current_get(cu_context_t *context_out) {
  *context_out = fake.current;
  return note("cuCtxGetCurrent");
}
static cu_result_t fake_current_set(cu_context_t context) {
  if (note("cuCtxSetCurrent")) return CU_UNKNOWN;
  fake.current = context;
  return CU_SUCCESS;
}
static cu_result_t fake_stream_context(cu_stream_t stream, cu_context_t *context_out) {
  *context_out = (cu_context_t)stream; /* a stream is named as its context here */
  return note("cuStreamGetCtx");
}
static cu_result_t fake_module_load(cu_module_t *module_out, const void *image) {
  CHECK(fake.current && strstr(image, ".visible .entry gmi_adamw("));
  fake.loads++;
  *module_out = (cu_module_t)(void *)module;
  return note("cuModuleLoadData");
}
static cu_result_t fake_module_function(cu_function_t *function_out, cu_module_t from, const char *name) {
  char entry[64];
  CHECK(from == (cu_module_t)(void *)module);
  snprintf(entry, sizeof entry, ".entry %s(", name);
  CHECK(strstr(gmi_update_ptx, entry));
  *function_out = (cu_function_t)(void *)kernels[!strcmp(name, "gmi_adamw")    ? 0
                                                 : !strcmp(name, "gmi_sgd")    ? 1
                                                 : !strcmp(name, "gmi_narrow") ? 3
                                                 : !strcmp(name, "gmi_blocks") ? 4
                                                                               : 2];
  return note("cuModuleGetFunction");
}
static cu_result_t fake_module_unload(cu_module_t which) {
  CHECK(which == (cu_module_t)(void *)module);
  fake.unloads++;
  return note("cuModuleUnload");
}
/* Does what the kernels are to do. */
static cu_result_t fake_launch(cu_function_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               cu_stream_t stream, void **parameters, void **extra) {
  CHECK(grid_y == 1 && grid_z == 1 && block_x == 256 && block_y == 1 && block_z == 1 && !shared_bytes && !extra);
  fake.launched_on[fake.call_count] = stream;
  if (function != (cu_function_t)(void *)kernels[2]) {
    const bool sgd = function == (cu_function_t)(void *)kernels[1];
    const bool narrow = function == (cu_function_t)(void *)kernels[3],
               blocks = function == (cu_function_t)(void *)kernels[4];
    const gmi_arrays_t *a = parameters[1];
    uint64_t count = *(uint64_t *)parameters[2];
    double *sums = *(double **)parameters[3];
    CHECK_EQ(grid_x, (count + 1023) / 1024);
    for (uint64_t tile = 0; tile < grid_x; tile++) {
      double lanes[16] = { 0 }, sum = 0;
      uint64_t here = count - tile * 1024 < 1024 ? count - tile * 1024 : 1024;
      (sgd      ? gmi_sgd_plain
       : narrow ? gmi_narrow_plain
       : blocks ? gmi_blocks_plain
                : gmi_adamw_plain)(parameters[0], a, tile * 1024, here, lanes);
      for (int i = 0; i < 16; i++) sum += lanes[i];
      if (sums) sums[1 + tile] = sum;
    }
    return note(sgd ? "gmi_sgd" : narrow ? "gmi_narrow" : blocks ? "gmi_blocks" : "gmi_adamw");
  }
  uint64_t tiles = *(uint64_t *)parameters[0];
  double *sums = *(double **)parameters[1];
  CHECK(grid_x == 1 && tiles <= 256);
  sums[0] = 0;
  for (uint64_t tile = 0; tile < tiles; tile++) sums[0] += sums[1 + tile];
  return note("gmi_update_sum");
}
static void *fake_symbol(const char *name) {
  void *address = NULL;
  if (fake.lacking && !strcmp(fake.lacking, name)) return NULL;
#define FAKE(field, symbol, parameters)               \
  if (!strcmp(name, symbol)) {                        \
    cu_result_t(*function) parameters = fake_##field; \
    memcpy(&address, &function, sizeof address);      \
  }
  FAKE(init, "cuInit", (unsigned))
  FAKE(error_name, "cuGetErrorName", (cu_result_t, const char **))
  FAKE(device_get, "cuDeviceGet", (cu_device_t *, int))
  FAKE(primary_retain, "cuDevicePrimaryCtxRetain", (cu_context_t *, cu_device_t))
  FAKE(current_get, "cuCtxGetCurrent", (cu_context_t *))
  FAKE(current_set, "cuCtxSetCurrent", (cu_context_t))
  FAKE(stream_context, "cuStreamGetCtx", (cu_stream_t, cu_context_t *))
  FAKE(module_load, "cuModuleLoadData", (cu_module_t *, const void *))
  FAKE(module_function, "cuModuleGetFunction", (cu_function_t *, cu_module_t, const char *))
  FAKE(module_unload, "cuModuleUnload", (cu_module_t))
  FAKE(launch, "cuLaunchKernel",
       (cu_function_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, cu_stream_t, void **,
        void **))
  return address;
}
static inline void fake_start(void) {
  memset(&fake, 0, sizeof fake);
  gmi_update_cuda_replace(fake_symbol);
}
/* Were these the calls, in this order, since the last time? */
static inline void check_calls(const char *const *want) {
  for (uint32_t i = 0; i < fake.call_count; i++) {
    if (!want[i] || strcmp(want[i], fake.calls[i]) != 0) fprintf(stderr, "call %u is %s\n", i, fake.calls[i]);
    CHECK(want[i] && !strcmp(want[i], fake.calls[i]));
  }
  CHECK(!want[fake.call_count]);
  fake.call_count = 0;
}
#define CALLED(...) check_calls((const char *const[]){ __VA_ARGS__, NULL })

#endif
