/* Arenas and tensors, and the ranges of them that callers name.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_ARENA_H
#define GMI_ARENA_H

#include "chunk/chunk.h"
#include "core/manager.h"

gmi_arena_t *gmi_arena_get(gmi_manager_t *m, gemini_arena_t handle);
gmi_tensor_t *gmi_tensor_get(gmi_manager_t *m, gemini_tensor_t handle);
uint32_t gmi_tensor_named(gmi_manager_t *m, const char *name); /* index of the registered one, or GMI_NONE */
static inline bool gmi_tensor_alive(const gmi_tensor_t *t) { return atomic_load(&t->life) != 0; }
static inline gmi_arena_t *gmi_arena_at(gmi_manager_t *m, uint32_t index) {
  return atomic_load_explicit(&m->arenas.at[index], memory_order_acquire);
}
static inline gmi_tensor_t *gmi_tensor_base(gmi_manager_t *m, gmi_tensor_t *t) { return &m->tensors.at[t->base]; }
/* A range of chunks of the arena that stores it. */
typedef struct gmi_range {
  gmi_arena_t *arena; /* as named by the caller */
  gmi_arena_t *store;
  gmi_tensor_t *tensor; /* or NULL when an arena was named */
  uint64_t offset, size;
  uint32_t first, last; /* chunks; first > last when not cut yet or empty */
} gmi_range_t;
/* What messages call the range: its tensor, or its arena. */
static inline const char *gmi_range_name(gmi_manager_t *m, const gmi_range_t *r) {
  return r->tensor ? gmi_tensor_base(m, r->tensor)->name : r->arena->name;
}
/* Resolves the range, and cuts the arenas into chunks if they are not yet; nothing is cut for a range that is
 * wrong. */
gemini_status_t gmi_range_ready(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
gemini_status_t gmi_range_resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
/* The same in two steps: the bytes, for which no lock is needed while a tensor's handle is valid; then their chunks,
 * for which the range must be held, or the lock. */
gemini_status_t gmi_range_bytes(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
void gmi_range_chunks(gmi_manager_t *m, gmi_range_t *range);
/* Arenas in text files (traces, checkpoints), a line "arena ..." for each; lock held. gmi_arena_read() takes the line
 * from behind its first word, finds the arena of this manager that it describes, and enters it into arena_of, which
 * maps arena numbers of the file to this manager's (GMI_NONE: not read yet). Returns NULL, or what is wrong in static
 * words, with the arena's name if that could be read, else "". */
void gmi_arenas_write(gmi_manager_t *m, FILE *file);
const char *gmi_arena_read(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS],
                           char name_out[GMI_ARENA_NAME]);
gemini_status_t gmi_arena_grow(gmi_manager_t *m, gmi_arena_t *store); /* chunks for all of size; lock held */
void gmi_arena_sort(gmi_manager_t *m, gmi_arena_t *a);
/* Calls fn for every tensor of arena a that overlaps [offset, offset + size). */
void gmi_arena_each(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size,
                    void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user), void *user);
void gmi_arena_free_all(gmi_manager_t *m);
bool gmi_state_legal(uint32_t from, uint32_t to);
static inline uint32_t gmi_tensor_state(uint64_t word) {
  return word & GMI_TENSOR_USERS ? GEMINI_STATE_COMPUTE : (uint32_t)(word >> GMI_TENSOR_STATE_SHIFT);
}
static inline uint64_t gmi_tensor_word(uint64_t word, uint32_t state) {
  return (word & ((UINT64_C(1) << GMI_TENSOR_STATE_SHIFT) - 1)) | (uint64_t)state << GMI_TENSOR_STATE_SHIFT;
}

#endif
