/* The functions of NCCL, which is opened at run time. SPDX-License-Identifier: Apache-2.0 */
#include "comm/nccl_library.h"

#include <stddef.h>

#include "base/library.h"
#include "base/status.h"

static gmi_nccl_library_t table; /* does not change once it has been filled in */

static bool find(const gmi_library_t *library) {
  gmi_nccl_library_t found;
  const char *missing = NULL;
#define FIND(field, symbol, parameters) \
  if (!gmi_library_function(library, symbol, &found.field) && !missing) missing = symbol;
  GMI_NCCL_FUNCTIONS(FIND)
  FIND(error_string, "ncclGetErrorString", )
#undef FIND
  (void)gmi_library_function(library, "ncclGetLastError", &found.last_error);
  if (!gmi_library_function(library, "ncclCommRegister", &found.register_memory) ||
      !gmi_library_function(library, "ncclCommDeregister", &found.unregister_memory)) {
    found.register_memory = NULL;
    found.unregister_memory = NULL;
  }
  int version = 0;
  if (found.version && found.version(&version) != NCCL_SUCCESS) version = 0;
  /* 2.8.4 is 2804, later versions are of the form 21804. */
  if (version < GMI_NCCL_OLDEST) {
    int unit = version < 10000 ? 1000 : 10000;
    gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "NCCL is too old: %s is version %d.%d.%d, must be 2.18 or later", library->file,
             version / unit, version % unit / 100, version % 100);
    return false;
  }
  if (missing) {
    gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "%s has no %s", library->file, missing);
    return false;
  }
  table = found;
  return true;
}

static gmi_library_t library = {
  .file = "libnccl.so.2", .absent = "no NCCL on this machine", .folder = "GEMINI_NCCL", .find = find
};

const gmi_nccl_library_t *gmi_nccl_library(void) { return gmi_library_open(&library) ? &table : NULL; }

void gmi_nccl_library_replace(void *(*symbol)(const char *name)) { gmi_library_replace(&library, symbol); }
