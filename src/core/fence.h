/* Fences: a stream and a mark in one word. SPDX-License-Identifier: Apache-2.0
 *
 * A fence is reached when the stream has finished all work queued before the mark. One word, so that acquires and
 * releases can exchange fences by single atomic operations. */
#ifndef GMI_FENCE_H
#define GMI_FENCE_H

#include <stdint.h>

typedef uint64_t gmi_fence_t; /* stream index + 1 in the top 8 bits, mark below; 0 = nothing to wait for */
#define GMI_FENCE_MARK_BITS 56
static inline gmi_fence_t gmi_fence(uint32_t stream, uint64_t mark) {
  return ((uint64_t)(stream + 1) << GMI_FENCE_MARK_BITS) | mark;
}
static inline uint32_t gmi_fence_stream(gmi_fence_t f) { return (uint32_t)(f >> GMI_FENCE_MARK_BITS) - 1; }
static inline uint64_t gmi_fence_mark(gmi_fence_t f) { return f & ((UINT64_C(1) << GMI_FENCE_MARK_BITS) - 1); }

#endif
