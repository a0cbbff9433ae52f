/* Types of values, GEMINI_DTYPE_*. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_DTYPE_H
#define GMI_DTYPE_H

#include <stdint.h>

#include "gemini.h"

/* Bytes of a value; 0: there is no such type. */
static inline uint32_t gmi_dtype_bytes(uint32_t dtype) {
  switch (dtype) {
  case GEMINI_DTYPE_F32: return 4;
  case GEMINI_DTYPE_BF16:
  case GEMINI_DTYPE_F16: return 2;
  case GEMINI_DTYPE_F64: return 8;
  default: return 0;
  }
}

#endif
