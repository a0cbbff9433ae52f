/* Handles in tests: converting them to numbers, to make invalid ones, and to the objects of accesses.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef HANDLES_H
#define HANDLES_H

#include <stdint.h>

#include "gemini.h"
#include "gemini/graph.h"
#include "gemini/topology.h"

static inline uint64_t handle_id(const void *handle) { return (uintptr_t)handle; }
/* A handle of any type, even the wrong one, as a caller's wrong cast would pass it. */
static inline void *handle_of(uint64_t id) { return (void *)(uintptr_t)id; }

/* Storage for a handle of any type, readable as a number. */
typedef union any_handle {
  uint64_t id;
  gemini_manager_t manager;
  gemini_arena_t arena;
  gemini_tensor_t tensor;
  gemini_stream_t stream;
  gemini_graph_t graph;
  gemini_topology_t topology;
} any_handle_t;

static inline gemini_object_t object_of_tensor(gemini_tensor_t tensor) { return (gemini_object_t){ .tensor = tensor }; }
static inline gemini_object_t object_of_arena(gemini_arena_t arena) { return (gemini_object_t){ .arena = arena }; }
static inline gemini_object_t object_of_any(const void *handle) {
  return object_of_tensor(handle_of(handle_id(handle)));
}
static inline gemini_object_t object_itself(gemini_object_t object) { return object; }
/* Makes a gemini_object_t of a tensor, an arena, an untyped handle or an object. */
#define OBJECT(of)                       \
  _Generic((of),                         \
      gemini_tensor_t: object_of_tensor, \
      gemini_arena_t: object_of_arena,   \
      void *: object_of_any,             \
      gemini_object_t: object_itself)(of)
/* Initializer of an access to any of these. */
#define ACCESS(of, offset_bytes, size_bytes, mode, tier) \
  { sizeof(gemini_access_t), mode, tier, 0, OBJECT(of), offset_bytes, size_bytes, NULL }

#endif
