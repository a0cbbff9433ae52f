/* Address space by mmap() without reservation of memory. SPDX-License-Identifier: Apache-2.0 */
#include "base/space.h"

#include <stddef.h>
#include <sys/mman.h>

void *gmi_space(uint64_t bytes) {
  void *space = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return space == MAP_FAILED ? NULL : space;
}

void gmi_space_free(void *space, uint64_t bytes) {
  if (space) munmap(space, bytes);
}
