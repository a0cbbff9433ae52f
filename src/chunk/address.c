/* Device addresses as names of bytes: accesses by address, and where an address lies.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Addresses of arenas never change, so callers may keep pointers and no handles. An access by address is a range of the
 * arena that the address lies in: it is leased and recorded as one. */
#include "gemini/address.h"
#include "base/abi.h"
#include "chunk/arena.h"
#include "core/manager.h"

/* Does the arena own the chunks at its addresses? A reusing arena has those of its parameters; slices have none. */
static bool spans(const gmi_arena_t *a, uint64_t address) {
  uint64_t base = (uint64_t)(uintptr_t)a->base;
  return base && (a->store == a->index || gmi_arena_is_sharded(a)) && address >= base && address - base < a->capacity;
}

gmi_arena_t *gmi_address_arena(gmi_manager_t *m, uint64_t address) {
  gmi_arena_t *a = gmi_arena_at(m, m->arenas.found);
  if (a && spans(a, address)) return a;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    a = gmi_arena_at(m, i);
    if (!a || !spans(a, address)) continue;
    m->arenas.found = i;
    return a;
  }
  return NULL;
}

gemini_status_t gmi_address_range(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  uint64_t address = access->offset_bytes, size = access->size_bytes;
  gmi_arena_t *a = gmi_address_arena(m, address);
  if (!a)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "address %#llx lies in no arena of this manager",
                    (unsigned long long)address);
  if (a->reused && !gmi_arena_is_sharded(a)) /* gradients of sharded arenas have addresses of their own */
    return gmi_fail(
        GEMINI_ERR_UNSUPPORTED, 0,
        "address %#llx lies in arena %s, whose bytes gradients reuse: it does not say whether the parameter "
        "or the gradient is meant. Name the tensor",
        (unsigned long long)address, a->name);
  uint64_t offset = address - (uint64_t)(uintptr_t)a->base, limit = atomic_load(&a->size);
  if (!size)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is 0: an access by address says how many bytes it is of");
  if (offset > limit || size > limit - offset)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "%llu bytes at address %#llx, offset %llu of arena %s, are not inside the %llu bytes that are used "
                    "of it",
                    (unsigned long long)size, (unsigned long long)address, (unsigned long long)offset, a->name,
                    (unsigned long long)limit);
  *range_out = (gmi_range_t){ .arena = a, .store = a, .offset = offset, .at = offset, .size = size, .first = 1 };
  return GEMINI_OK;
}

/* ---- where an address lies */
static void consider(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  gmi_tensor_t **shortest = user;
  (void)m;
  if (!*shortest || t->size < (*shortest)->size) *shortest = t;
}
static gmi_tensor_t *tensor_at(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset) {
  gmi_tensor_t *shortest = NULL;
  gmi_arena_each(m, a, offset, 1, consider, &shortest);
  return shortest;
}

static gemini_status_t locate(gmi_manager_t *m, const void *address, gemini_location_t *location_out) {
  uint64_t at = (uint64_t)(uintptr_t)address;
  gmi_arena_t *a = gmi_address_arena(m, at);
  if (!a || at - (uint64_t)(uintptr_t)a->base >= atomic_load(&a->size))
    return gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "address %#llx is in use by no arena of this manager",
                    (unsigned long long)at);
  gemini_location_t location = GEMINI_LOCATION_INIT;
  location.arena = gmi_handle(m, GMI_HANDLE_ARENA, a->generation, a->index);
  location.arena_offset_bytes = at - (uint64_t)(uintptr_t)a->base;
  gmi_tensor_t *t = tensor_at(m, a, location.arena_offset_bytes);
  if (t) {
    location.tensor = gmi_handle(m, GMI_HANDLE_TENSOR, t->generation, (uint32_t)(t - m->tensors.at));
    location.tensor_offset_bytes = location.arena_offset_bytes - t->offset;
  }
  return gmi_struct_out(location_out, &location, sizeof location, GMI_V1_LOCATION, "location_out");
}
gemini_status_t gemini_locate(gemini_manager_t mgr, const void *address, gemini_location_t *location_out) {
  API_LOCKED(locate(m, address, location_out));
}
