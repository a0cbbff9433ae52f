/* Opens the CUDA driver at run time and looks up its functions. SPDX-License-Identifier: Apache-2.0
 *
 * The first caller opens the library, under a lock; the table stays for the life of the process, so callers use it
 * without the lock. The lock is taken around fork(), so that a child never inherits it locked. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/fork.h"
#include "base/status.h"
#include "device/cuda_driver.h"

#define LIBRARY "libcuda.so.1"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;              /* driver is filled in. Guarded by lock, as the next three */
static gmi_cuda_driver_t driver; /* does not change once loaded */
static void *library;            /* never closed: the driver's threads run its code to the end of the process */
static void *(*replacement)(const char *name); /* for tests: looks up functions instead of dlsym() */

static void fork_prepare(void) { pthread_mutex_lock(&lock); }
static void fork_parent(void) { pthread_mutex_unlock(&lock); }
static void fork_child(void) { pthread_mutex_init(&lock, NULL); }
static const gmi_fork_ops_t fork_ops = { fork_prepare, fork_parent, fork_child };

static void *symbol_of(const char *name) { return replacement ? replacement(name) : dlsym(library, name); }

/* Called with lock held. */
static bool load(void) {
  if (!replacement && !library) {
    library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char *why = dlerror();
      gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "no CUDA driver on this machine: %s", why ? why : LIBRARY);
      return false;
    }
  }
  gmi_cuda_driver_t found;
  const char *missing = NULL;
  void *address;
  /* dlsym() returns an object pointer. ISO C has no cast from that to a function pointer; POSIX allows copying it. */
#define FIND(field, symbol, parameters)       \
  address = symbol_of(symbol);                \
  if (!address && !missing) missing = symbol; \
  memcpy(&found.field, &address, sizeof address);
  GMI_CUDA_FUNCTIONS(FIND)
  const char *needed = missing;
  GMI_CUDA_OPTIONAL(FIND)
#undef FIND
  missing = needed;
  if (missing) {
    gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "the CUDA driver is too old: %s has no %s", LIBRARY, missing);
    return false;
  }
  driver = found;
  return true;
}

const gmi_cuda_driver_t *gmi_cuda_driver(void) {
  gmi_fork_watch(&fork_ops);
  pthread_mutex_lock(&lock);
  if (!loaded) loaded = load();
  const gmi_cuda_driver_t *result = loaded ? &driver : NULL;
  pthread_mutex_unlock(&lock);
  return result;
}

void gmi_cuda_driver_replace(void *(*symbol)(const char *name)) {
  pthread_mutex_lock(&lock);
  replacement = symbol;
  loaded = false;
  pthread_mutex_unlock(&lock);
}

const char *gmi_cuda_error_name(const gmi_cuda_driver_t *from, cu_result_t result) {
  static _Thread_local char number[32];
  const char *name = NULL;
  if (from->error_name(result, &name) == CU_SUCCESS && name) return name;
  snprintf(number, sizeof number, "CUDA error %d", result);
  return number;
}
