/* Arrays that grow. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_ARRAY_H
#define GMI_ARRAY_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Returns array, of *capacity elements, count of them used, with room for one more; it may have moved. NULL: there is
 * no memory; the array stays as it is. Threads: the caller excludes other uses of the array. */
static inline void *gmi_array_room(void *array, uint64_t count, uint32_t *capacity, size_t element_bytes) {
  if (count < *capacity) return array;
  if (*capacity > UINT32_MAX / 2) return NULL;
  uint32_t larger = *capacity ? *capacity * 2 : 64;
  void *grown = realloc(array, larger * element_bytes);
  if (grown) *capacity = larger;
  return grown;
}

#endif
