/* The functions of the CUDA driver, which is opened at run time. SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_driver.h"

#include <stddef.h>
#include <stdio.h>

#include "base/library.h"
#include "base/status.h"

static gmi_cuda_driver_t driver; /* does not change once it has been filled in */

static bool find(const gmi_library_t *library) {
  gmi_cuda_driver_t found;
  const char *missing = NULL;
#define FIND(field, symbol, parameters) \
  if (!gmi_library_function(library, symbol, &found.field) && !missing) missing = symbol;
  GMI_CUDA_FUNCTIONS(FIND)
#undef FIND
#define FIND(field, symbol, parameters) (void)gmi_library_function(library, symbol, &found.field);
  GMI_CUDA_OPTIONAL(FIND)
#undef FIND
  if (missing) {
    gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "the CUDA driver is too old: %s has no %s", library->file, missing);
    return false;
  }
  driver = found;
  return true;
}

static gmi_library_t library = { .file = "libcuda.so.1", .absent = "no CUDA driver on this machine", .find = find };

const gmi_cuda_driver_t *gmi_cuda_driver(void) { return gmi_library_open(&library) ? &driver : NULL; }

void gmi_cuda_driver_replace(void *(*symbol)(const char *name)) { gmi_library_replace(&library, symbol); }

const char *gmi_cuda_error_name(const gmi_cuda_driver_t *from, cu_result_t result) {
  static _Thread_local char number[32];
  const char *name = NULL;
  if (from->error_name(result, &name) == CU_SUCCESS && name) return name;
  snprintf(number, sizeof number, "CUDA error %d", result);
  return number;
}
