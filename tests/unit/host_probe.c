/* A shared library that uses host blocks, to be loaded into a program that runs already. SPDX-License-Identifier: Apache-2.0 */
#include <string.h>
#include <sys/mman.h>

#include "host/host_heap.h"

/* 0 when blocks of all sizes could be had, written to and freed; else the line that failed. Any thread. */
__attribute__((visibility("default"))) int host_probe(void); /* found by name: no header declares it */
int host_probe(void) {
  const size_t range_bytes = (size_t)32 << 20;
  void *base = mmap(NULL, range_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *blocks[64];
  gmi_host_heap_t *b = NULL;
  gmi_host_heap_figures_t figures;
  gmi_host_heap_config_t config = { .base = base, .size_bytes = range_bytes };
  if (base == MAP_FAILED || gmi_host_heap_open(&config, &b)) return __LINE__;
  for (int round = 0; round < 100; round++) {
    for (int i = 0; i < 64; i++) {
      size_t size = (size_t)(i + 1) * (size_t)(i % 2 ? 4096 : 24);
      if (gmi_host_heap_alloc(b, size, 0, &blocks[i])) return __LINE__;
      memset(blocks[i], i, size);
    }
    for (int i = 0; i < 64; i++) {
      if (*(unsigned char *)blocks[i] != i) return __LINE__;
      if (gmi_host_heap_free(b, blocks[i])) return __LINE__;
    }
  }
  gmi_host_heap_figures(b, &figures);
  if (figures.extent_bytes) return __LINE__;
  gmi_host_heap_close(b);
  munmap(base, range_bytes);
  return 0;
}
