/* Opens NVTX at run time and forwards ranges to it. SPDX-License-Identifier: Apache-2.0 */
#include "base/nvtx.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* CUDA up to 12 has NVTX in nvToolsExt, later versions in nvtx3interop. */
static const char *const names[] = { "libnvToolsExt.so.1", "libnvtx3interop.so.1", "libnvtx3interop.so" };
static int (*push)(const char *name);
static int (*pop)(void);
/* Atomic: push and pop are set. Stored after them; pairs with the acquire load in gmi_nvtx_on(), so that a thread which
 * sees true may call them without a lock. */
static atomic_bool on;

static void load(void) {
  for (size_t i = 0; i < sizeof names / sizeof *names && !atomic_load(&on); i++) {
    void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL); /* never closed: a profiler may call into it later */
    if (!library) continue;
    /* dlsym() returns an object pointer. ISO C has no cast from that to a function pointer; POSIX allows copying it. */
    void *found[] = { dlsym(library, "nvtxRangePushA"), dlsym(library, "nvtxRangePop") };
    if (!found[0] || !found[1]) continue;
    memcpy(&push, &found[0], sizeof push);
    memcpy(&pop, &found[1], sizeof pop);
    atomic_store(&on, true);
  }
}

void gmi_nvtx_open(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, load);
}

bool gmi_nvtx_on(void) { return atomic_load_explicit(&on, memory_order_acquire); }

void gmi_nvtx_push(const char *name) {
  if (gmi_nvtx_on()) push(name);
}

void gmi_nvtx_pop(void) {
  if (gmi_nvtx_on()) pop();
}
