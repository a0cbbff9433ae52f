/* Arenas, tensors, and the ranges of them that callers name.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The manager's lock is held in every call, unless said otherwise. */
#ifndef GMI_ARENA_H
#define GMI_ARENA_H

#include "chunk/chunk.h"
#include "core/manager.h"

/* These two return NULL, with the error recorded, for a handle that is not valid. Without the lock the tensor may go at
 * any time unless the caller has acquired it. */
gmi_arena_t *gmi_arena_get(gmi_manager_t *m, gemini_arena_t handle);
gmi_tensor_t *gmi_tensor_get(gmi_manager_t *m, gemini_tensor_t handle);
gmi_arena_t *gmi_chunk_arena(gmi_manager_t *m, const gmi_chunk_t *c); /* the one that owns it */
uint32_t gmi_tensor_named(gmi_manager_t *m, const char *name);        /* index of the registered tensor, or GMI_NONE */
static inline bool gmi_tensor_alive(const gmi_tensor_t *t) { return atomic_load(&t->life) != 0; }
/* The acquire load pairs with the store in arena_create(): the record is filled. Without the lock, a held tensor or
 * chunk must keep the arena. */
static inline gmi_arena_t *gmi_arena_at(gmi_manager_t *m, uint32_t index) {
  return atomic_load_explicit(&m->arenas.at[index], memory_order_acquire);
}
static inline gmi_tensor_t *gmi_tensor_base(gmi_manager_t *m, gmi_tensor_t *t) { return &m->tensors.at[t->base]; }
/* A range that a caller named, as bytes and chunks of the arena that owns the chunks. */
typedef struct gmi_range {
  gmi_arena_t *arena;    /* the caller's arena, or the tensor's */
  gmi_arena_t *store;    /* the arena that owns the chunks: arena, or the one it reuses if it is not sharded */
  gmi_tensor_t *tensor;  /* NULL: the caller named an arena */
  uint64_t offset, size; /* bytes in the arena */
  uint64_t at;           /* the first byte in store: offset, except where gmi_range_place() has set another */
  uint32_t first, last;  /* chunks; first > last: the range is empty, or the chunk size is not chosen yet */
} gmi_range_t;
/* A sharded arena: chunk/shard.h. */
static inline bool gmi_arena_is_sharded(const gmi_arena_t *a) { return a->shard.slices != GMI_NONE; }
/* Does it own chunks that live in the tiers? Not if it shares another's, or is sharded: then its slices do. */
static inline bool gmi_arena_has_tiers(const gmi_arena_t *a) {
  return a->store == a->index && !gmi_arena_is_sharded(a);
}
/* Sharded gradients; and those among them whose sums do not take the bytes of their parameters. */
static inline bool gmi_arena_is_gradients(const gmi_arena_t *a) {
  return gmi_arena_is_sharded(a) && a->kind == GEMINI_KIND_GRAD;
}
static inline bool gmi_arena_has_sums(const gmi_arena_t *a) {
  return gmi_arena_is_gradients(a) && a->store == a->index;
}
/* Is it sharded and has no chunks on the device? Neither parameters nor gradients. */
static inline bool gmi_arena_is_sliced_only(const gmi_arena_t *a) {
  return gmi_arena_is_sharded(a) && a->like != a->index && a->kind != GEMINI_KIND_GRAD;
}
/* Does it have chunks of its own? Sharded gradients have, also where their slices take those of the parameters. */
static inline bool gmi_arena_has_chunks(const gmi_arena_t *a) {
  return gmi_arena_is_sharded(a) ? !gmi_arena_is_sliced_only(a) : a->store == a->index;
}
/* The arena of gradients that reuses the arena's bytes, or NULL. */
gmi_arena_t *gmi_arena_reuser(gmi_manager_t *m, const gmi_arena_t *params);
/* The range's name in messages: its tensor's, or its arena's. */
static inline const char *gmi_range_name(gmi_manager_t *m, const gmi_range_t *r) {
  return r->tensor ? gmi_tensor_base(m, r->tensor)->name : r->arena->name;
}
/* Resolves the range, and chooses the chunk size if it is not chosen yet and the range is valid. Both refuse a range of
 * a sharded arena (UNSUPPORTED). */
gemini_status_t gmi_range_ready(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
gemini_status_t gmi_range_resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
/* gmi_range_resolve() in two steps. The first sets the bytes; for a tensor whose handle stays valid it needs no lock.
 * The second sets the chunks; it needs the lock, or a hold on the range, as the chunk size may change otherwise. */
gemini_status_t gmi_range_bytes(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
void gmi_range_chunks(gmi_manager_t *m, gmi_range_t *range);
/* chunk/address.c. The arena whose bytes an address is one of, or NULL: of arenas that share bytes, the one that owns
 * the chunks. And gmi_range_bytes() of an access that names no object: its offset is an address. */
gmi_arena_t *gmi_address_arena(gmi_manager_t *m, uint64_t address);
gemini_status_t gmi_address_range(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
/* The key of the lease of an access: of its range, size_bytes not 0. An access by address is leased as a range of its
 * arena. */
static inline gmi_lease_key_t gmi_lease_key(const gemini_access_t *access, uint64_t size_bytes) {
  return (gmi_lease_key_t){ .object = gmi_object_id(access),
                            .offset = access->offset_bytes,
                            .size = size_bytes,
                            .mode = (uint16_t)access->mode,
                            .tier = (uint16_t)access->tier };
}
static inline gmi_lease_key_t gmi_range_key(gmi_manager_t *m, const gemini_access_t *access, const gmi_range_t *r) {
  gmi_lease_key_t key = gmi_lease_key(access, r->size);
  if (key.object || !r->arena) return key;
  key.object = gmi_id(gmi_handle(m, GMI_HANDLE_ARENA, r->arena->generation, r->arena->index));
  key.offset = r->offset;
  return key;
}
/* As gmi_range_ready() and gmi_range_resolve(), for callers that know about sharded arenas. */
gemini_status_t gmi_range_ready_any(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
gemini_status_t gmi_range_resolve_any(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out);
/* Arenas in text files (traces, checkpoints): one line "arena ..." each. gmi_arena_read() parses the line behind its
 * first word, finds the arena of this manager that it describes, and enters it into arena_of, which maps the file's
 * arena numbers to this manager's (GMI_NONE: not read yet). Returns NULL, or a static string that says what is wrong;
 * name_out is the arena's name if it could be read, else "". slices: also the arenas of slices of sharded ones. */
void gmi_arenas_write(gmi_manager_t *m, FILE *file, bool slices);
const char *gmi_arena_read(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS],
                           char name_out[GMI_ARENA_NAME]);
/* As gmi_arena_read(), but makes the arena first. */
const char *gmi_arena_make(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS],
                           char name_out[GMI_ARENA_NAME]);
/* Takes size_bytes more of the arena, and of all that follow it, at *offset_out. */
gemini_status_t gmi_arena_extend(gmi_manager_t *m, gmi_arena_t *a, uint64_t size_bytes, uint64_t *offset_out);
/* chunk/tensor.c, for an arena that goes: marks all its tensors DEAD, or none (BUSY: one is acquired); takes the marks
 * back; drops them. */
gemini_status_t gmi_tensors_kill(gmi_manager_t *m, gmi_arena_t *a);
void gmi_tensors_revive(gmi_manager_t *m, gmi_arena_t *a);
void gmi_tensors_drop(gmi_manager_t *m, gmi_arena_t *a);
gemini_status_t gmi_arena_grow(gmi_manager_t *m, gmi_arena_t *store); /* makes chunk records for all of its size */
void gmi_arena_sort(gmi_manager_t *m, gmi_arena_t *a);                /* sorts order by offset */
/* Calls fn for every tensor of arena a that overlaps [offset, offset + size). */
void gmi_arena_each(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size,
                    void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user), void *user);
/* For gmi_arena_each(): a tensor that gets bytes from a file, even in part, goes from FREE to HOLD, as after an
 * update. */
void gmi_tensor_not_free(gmi_manager_t *m, gmi_tensor_t *t, void *user);
void gmi_arena_free_all(gmi_manager_t *m);
bool gmi_state_legal(uint32_t from, uint32_t to);
static inline uint32_t gmi_tensor_state(uint64_t word) {
  return word & GMI_TENSOR_USERS ? GEMINI_STATE_COMPUTE : (uint32_t)(word >> GMI_TENSOR_STATE_SHIFT);
}
static inline uint64_t gmi_tensor_word(uint64_t word, uint32_t state) {
  return (word & ((UINT64_C(1) << GMI_TENSOR_STATE_SHIFT) - 1)) | (uint64_t)state << GMI_TENSOR_STATE_SHIFT;
}

#endif
