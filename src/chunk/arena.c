/* Arenas and tensors: registration, layout, lookup. SPDX-License-Identifier: Apache-2.0
 *
 * An arena reserves device addresses for its whole capacity when it is created, so that it can grow while tensors keep
 * their addresses. Tensors lie in it one after another; an arena that follows another (like, reuse) has the same
 * layout, scaled by the element size. All changes are made under the manager's lock on the caller's thread. Acquires
 * and releases look arenas and tensors up without the lock, so the order of stores matters: a record is filled before
 * its pointer or its generation is stored (release). Before a record is freed, its tensors are marked DEAD, which makes
 * acquires fail. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "base/check.h"
#include "base/names.h"
#include "base/space.h"
#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/data.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/workers.h"

enum { ELEMENT_ALIGN = 256, NAME_LIMIT = 127 };
static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

gmi_arena_t *gmi_arena_get(gmi_manager_t *m, gemini_arena_t handle) {
  uint32_t index;
  uint64_t generation;
  if (!gmi_handle_open(m, handle, GMI_HANDLE_ARENA, &index, &generation)) return NULL;
  gmi_arena_t *a = gmi_arena_at(m, index);
  if (a && a->generation == generation) return a;
  gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is a destroyed arena", (unsigned long long)handle);
  return NULL;
}

static gmi_arena_t *arena_named(gmi_manager_t *m, const char *name) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && !strcmp(a->name, name)) return a;
  }
  return NULL;
}

void gmi_arenas_write(gmi_manager_t *m, FILE *file) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a) continue;
    fprintf(file, "arena %u %u %u %u %u %" PRIu64 " ", i, a->kind, a->element_bytes, a->like, a->store,
            atomic_load(&a->size));
    gmi_name_write(file, a->name);
    fputc('\n', file);
  }
}

const char *gmi_arena_read(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS], char name[GMI_ARENA_NAME]) {
  uint64_t n[5], size; /* number, kind, element_bytes, like, store */
  *name = 0;
  if (!gmi_numbers_at(&at, ' ', UINT32_MAX, 5, n) || !gmi_number_at(&at, ' ', UINT64_MAX, &size) ||
      n[0] >= GMI_ARENAS || n[3] >= GMI_ARENAS || n[4] >= GMI_ARENAS || !gmi_name_read(at, name, GMI_ARENA_NAME))
    return "malformed arena";
  const gmi_arena_t *a = arena_named(m, name);
  if (!a || a->kind != n[1] || a->element_bytes != n[2] || atomic_load(&a->size) != size ||
      (a->store == a->index) != (n[4] == n[0]))
    return "no arena here has this name, kind, element size and size";
  for (uint32_t i = 0; i < GMI_ARENAS; i++)
    if (i == n[0] ? arena_of[i] != GMI_NONE : arena_of[i] == a->index) return "an arena is named twice";
  arena_of[n[0]] = a->index;
  return NULL;
}

/* The acquire load of life pairs with the store in tensor_new(): the record's other fields are visible. */
gmi_tensor_t *gmi_tensor_get(gmi_manager_t *m, gemini_tensor_t handle) {
  uint32_t index;
  uint64_t generation;
  if (!gmi_handle_open(m, handle, GMI_HANDLE_TENSOR, &index, &generation)) return NULL;
  if (generation && atomic_load_explicit(&m->tensors.at[index].life, memory_order_acquire) == generation)
    return &m->tensors.at[index];
  gmi_fail(GEMINI_ERR_HANDLE, 0, "%#llx is an unregistered tensor", (unsigned long long)handle);
  return NULL;
}

gmi_arena_t *gmi_chunk_arena(gmi_manager_t *m, const gmi_chunk_t *c) { return gmi_arena_at(m, c->arena); }
uint8_t *gmi_chunk_device(gmi_manager_t *m, const gmi_chunk_t *c) {
  return gmi_arena_at(m, c->arena)->base + ((uint64_t)c->index << m->cut.chunk_shift);
}

/* ---- chunks
 *
 * Their records exist once the chunk size has been chosen (cut.c). Address space is reserved for the records of the
 * whole capacity, so that the array never moves under acquires that run without the lock. */
gemini_status_t gmi_arena_grow(gmi_manager_t *m, gmi_arena_t *store) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint64_t chunk_bytes = atomic_load(&m->cut.chunk_bytes);
  if (!chunk_bytes || store->store != store->index) return GEMINI_OK;
  if (!store->chunks) {
    uint64_t bytes = (store->capacity >> m->cut.chunk_shift) * sizeof(gmi_chunk_t);
    store->chunks = gmi_space(bytes);
    if (!store->chunks)
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address space for the %llu chunks of arena %s",
                      (unsigned long long)(store->capacity >> m->cut.chunk_shift), store->name);
    store->chunk_map_bytes = bytes;
  }
  uint32_t count = atomic_load(&store->chunk_count);
  uint32_t want = (uint32_t)((atomic_load(&store->size) + chunk_bytes - 1) >> m->cut.chunk_shift);
  for (uint32_t i = count; i < want; i++) gmi_chunk_init(&store->chunks[i], store->index, i);
  if (want > count) {
    m->cut.chunk_count += want - count;
    atomic_store_explicit(&store->chunk_count, want, memory_order_release); /* after the records: see fast_chunks() */
  }
  return GEMINI_OK;
}

gemini_status_t gmi_range_bytes(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  gmi_range_t r = { 0 };
  uint64_t start = 0, limit;
  if (gmi_object_id(access) >> 60 == GMI_HANDLE_ARENA) {
    r.arena = gmi_arena_get(m, access->object.arena);
    if (!r.arena) return GEMINI_ERR_HANDLE;
    limit = atomic_load_explicit(&r.arena->size, memory_order_acquire);
  } else {
    r.tensor = gmi_tensor_get(m, access->object.tensor);
    if (!r.tensor) return GEMINI_ERR_HANDLE;
    r.arena = gmi_arena_at(m, r.tensor->arena);
    start = r.tensor->offset;
    limit = r.tensor->size;
  }
  r.store = gmi_arena_at(m, r.arena->store);
  uint64_t size = access->size_bytes;
  const char *name = r.tensor ? gmi_tensor_base(m, r.tensor)->name : r.arena->name;
  if (!size && access->offset_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "range %llu + 0 bytes of %s of %llu bytes: a size of 0 names the whole object, from offset 0 on",
                    (unsigned long long)access->offset_bytes, name, (unsigned long long)limit);
  if (!size) size = limit;
  if (access->offset_bytes > limit || size > limit - access->offset_bytes || (!size && r.tensor))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "range %llu + %llu bytes is not inside %s of %llu bytes",
                    (unsigned long long)access->offset_bytes, (unsigned long long)size, name,
                    (unsigned long long)limit);
  r.offset = start + access->offset_bytes;
  r.size = size;
  r.first = 1;
  *range_out = r;
  return GEMINI_OK;
}

void gmi_range_chunks(gmi_manager_t *m, gmi_range_t *range) {
  if (!range->size || !atomic_load(&m->cut.chunk_bytes)) return;
  range->first = (uint32_t)(range->offset >> m->cut.chunk_shift);
  range->last = (uint32_t)((range->offset + range->size - 1) >> m->cut.chunk_shift);
}

gemini_status_t gmi_range_resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  gemini_status_t status = gmi_range_bytes(m, access, range_out);
  if (!status) gmi_range_chunks(m, range_out);
  return status;
}

gemini_status_t gmi_range_ready(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  bool cut = atomic_load(&m->cut.chunk_bytes);
  gemini_status_t status = gmi_range_resolve(m, access, range_out);
  if (!status && !cut) status = gmi_cut(m);
  return status || cut ? status : gmi_range_resolve(m, access, range_out);
}

/* ---- arenas */
/* Checks the configuration and resolves its handles: like and reuse, NULL where none is named. An arena that follows
 * another cannot be followed itself: layouts then have one source, which alone grows. */
static gemini_status_t arena_check(gmi_manager_t *m, gemini_arena_config_t *c, gmi_arena_t **like,
                                   gmi_arena_t **reuse) {
  if (c->kind > GEMINI_KIND_OTHER)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "kind is %u, the last one is %d", c->kind, GEMINI_KIND_OTHER);
  if (!c->element_bytes) c->element_bytes = 1;
  if (c->element_bytes > 16 || (c->element_bytes & (c->element_bytes - 1)))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "element_bytes is %u, must be 1, 2, 4, 8 or 16", c->element_bytes);
  if (c->flags) return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", c->flags);
  if (c->name && (!*c->name || strnlen(c->name, 64) > 63))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "an arena's name must have 1 to 63 bytes");
  if (c->capacity_bytes > (UINT64_C(1) << 45))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "capacity_bytes is %llu, at most %llu",
                    (unsigned long long)c->capacity_bytes, 1ull << 45);
  *like = *reuse = NULL;
  if (c->like && !(*like = gmi_arena_get(m, c->like))) return GEMINI_ERR_HANDLE;
  if (c->reuse && !(*reuse = gmi_arena_get(m, c->reuse))) return GEMINI_ERR_HANDLE;
  gmi_arena_t *other = *reuse ? *reuse : *like;
  if (other && (other->like != other->index || other->store != other->index))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s follows another arena: name that one in like or reuse",
                    other->name);
  if (*reuse) {
    if (*like && *like != *reuse) return gmi_fail(GEMINI_ERR_INVALID, 0, "like and reuse name different arenas");
    if (c->kind != GEMINI_KIND_GRAD || (*reuse)->kind != GEMINI_KIND_PARAM)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "only a gradient arena can reuse a parameter arena");
    if (c->element_bytes != (*reuse)->element_bytes)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "element_bytes is %u, but the reused arena's is %u", c->element_bytes,
                      (*reuse)->element_bytes);
    if ((*reuse)->reused) return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s is reused already", (*reuse)->name);
  }
  return GEMINI_OK;
}

static void arena_free(gmi_manager_t *m, gmi_arena_t *a) {
  if (a->store == a->index) {
    if (a->base) m->device.ops->memory.unreserve(m->device.self, a->base, a->capacity);
    for (uint32_t i = 0; m->file.dir && a->chunks && i < atomic_load(&a->chunk_count); i++)
      gmi_file_forgive(&a->chunks[i]);
    gmi_chunks_check(m);
    gmi_chunks_forget_checks(m);
    gmi_space_free(a->chunks, a->chunk_map_bytes);
  }
  free(a->order);
  free(a);
}

static gemini_status_t arena_create(gmi_manager_t *m, const gemini_arena_config_t *theirs, gemini_arena_t *arena_out) {
  static const char *const kinds[] = { "param", "grad", "master", "momentum", "variance", "other" };
  if (!arena_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "arena_out is NULL");
  gemini_arena_config_t c;
  gemini_status_t status = gmi_struct_in(&c, sizeof c, theirs, GMI_V1_ARENA_CONFIG, "config");
  if (status) return status;
  gmi_arena_t *like = NULL, *reuse = NULL;
  status = arena_check(m, &c, &like, &reuse);
  if (status) return status;
  char name[sizeof like->name];
  snprintf(name, sizeof name, "%s", c.name ? c.name : kinds[c.kind]);
  if (c.name && arena_named(m, name)) return gmi_fail(GEMINI_ERR_EXISTS, 0, "an arena named %s exists", name);
  for (uint32_t number = 2; arena_named(m, name); number++) snprintf(name, sizeof name, "%s.%u", kinds[c.kind], number);
  uint32_t index = 0;
  while (index < GMI_ARENAS && gmi_arena_at(m, index)) index++;
  if (index == GMI_ARENAS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u arenas exist, the limit is %u", GMI_ARENAS, GMI_ARENAS);
  gmi_arena_t *a = calloc(1, sizeof *a);
  if (!a) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an arena's record");
  memcpy(a->name, name, sizeof a->name);
  a->index = a->like = a->store = index;
  a->kind = c.kind;
  a->element_bytes = c.element_bytes;
  gmi_arena_t *base = reuse ? reuse : like;
  uint64_t total = m->config.device_bytes + m->config.host_bytes + m->config.file_bytes;
  uint64_t capacity = c.capacity_bytes;
  if (!capacity) capacity = base ? base->capacity_asked / base->element_bytes * a->element_bytes : total;
  a->capacity_asked = capacity - capacity % a->element_bytes;
  a->capacity = round_up(capacity, m->config.chunk_bytes > GMI_CHUNK_MAX ? m->config.chunk_bytes : GMI_CHUNK_MAX);
  if (base) {
    a->like = base->index;
    atomic_store(&a->size, atomic_load(&base->size) / base->element_bytes * a->element_bytes);
    if (atomic_load(&a->size) > a->capacity_asked) {
      free(a);
      return gmi_fail(GEMINI_ERR_INVALID, 0, "capacity_bytes is %llu, but arena %s has %llu elements already",
                      (unsigned long long)capacity, base->name,
                      (unsigned long long)(atomic_load(&base->size) / base->element_bytes));
    }
  }
  if (reuse) {
    a->store = reuse->index;
    a->base = reuse->base;
  } else {
    void *address = NULL;
    status = m->device.ops->memory.reserve(m->device.self, a->capacity, &address);
    a->base = status ? NULL : address;
    if (status) {
      arena_free(m, a);
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address range of %llu bytes for arena %s",
                      (unsigned long long)capacity, name);
    }
    status = gmi_arena_grow(m, a);
    if (status) {
      arena_free(m, a);
      return status;
    }
  }
  if (base) base->followers++;
  if (reuse) reuse->reused = true;
  else m->stats.model_bytes += atomic_load(&a->size);
  a->generation = ++m->arenas.generations[index];
  atomic_store_explicit(&m->arenas.at[index], a, memory_order_release);
  m->trace.observer->arenas_change(m);
  *arena_out = gmi_handle(m, GMI_HANDLE_ARENA, a->generation, index);
  return GEMINI_OK;
}
gemini_status_t gemini_arena_create(gemini_manager_t mgr, const gemini_arena_config_t *config,
                                    gemini_arena_t *arena_out) {
  API_LOCKED(arena_create(m, config, arena_out));
}

static void name_remove(gmi_manager_t *m, uint32_t index);
static void tensor_drop(gmi_manager_t *m, uint32_t index) {
  gmi_tensor_t *t = &m->tensors.at[index];
  if (t->base == index) name_remove(m, index);
  free(t->name);
  atomic_store_explicit(&t->life, 0, memory_order_release);
  t->name = NULL;
  m->tensors.alive--;
  if (t->generation == GMI_TENSOR_GENERATIONS) return; /* its handles are used up */
  t->hash_next = m->tensors.free;
  m->tensors.free = index;
}

static void counterpart_unlink(gmi_manager_t *m, uint32_t index) {
  gmi_tensor_t *t = &m->tensors.at[index];
  for (uint32_t *link = &m->tensors.at[t->base].next; *link != GMI_NONE; link = &m->tensors.at[*link].next) {
    if (*link == index) {
      *link = t->next;
      return;
    }
  }
}

/* Marks a tensor DEAD: acquires fail from now on. Returns false if it has users. One compare-and-swap checks and marks,
 * so it cannot miss an acquire, which adds its user in the same word; seeing the word without users makes all that
 * their releases did visible. */
static bool tensor_kill(gmi_tensor_t *t) {
  uint64_t word = atomic_load(&t->word);
  do {
    if (word & GMI_TENSOR_USERS) return false;
  } while (!atomic_compare_exchange_weak(&t->word, &word, word | GMI_TENSOR_DEAD));
  return true;
}
static void tensor_revive(gmi_tensor_t *t) { atomic_fetch_and(&t->word, ~GMI_TENSOR_DEAD); }

/* Marks all tensors of an arena, or none. */
static gemini_status_t tensors_kill(gmi_manager_t *m, gmi_arena_t *a) {
  for (uint32_t i = 0; i < a->tensor_count; i++) {
    gmi_tensor_t *t = &m->tensors.at[a->order[i]];
    if (tensor_kill(t)) continue;
    while (i-- > 0) tensor_revive(&m->tensors.at[a->order[i]]);
    return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s is acquired", gmi_tensor_base(m, t)->name);
  }
  return GEMINI_OK;
}

/* Fails with BUSY if something uses the chunks of an arena. */
static gemini_status_t chunks_unused(const gmi_arena_t *a, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    const gmi_chunk_t *c = &a->chunks[i];
    if (gmi_chunk_device_users(c) || gmi_chunk_host_users(c) || gmi_chunk_is_pinned(c))
      return gmi_fail(GEMINI_ERR_BUSY, 0, "a range of arena %s is acquired or pinned", a->name);
    if (gmi_chunk_in_graphs(c))
      return gmi_fail(GEMINI_ERR_BUSY, 0, "arena %s is used in a graph: destroy the graph first", a->name);
  }
  return GEMINI_OK;
}

static gemini_status_t arena_destroy(gmi_manager_t *m, gemini_arena_t handle) {
  gmi_arena_t *a = gmi_arena_get(m, handle);
  if (!a) return GEMINI_ERR_HANDLE;
  if (a->followers) return gmi_fail(GEMINI_ERR_BUSY, 0, "%u arenas follow or reuse arena %s", a->followers, a->name);
  gmi_lease_t lease;
  if (gmi_lease_find(&m->leases, gmi_id(handle), &lease))
    return gmi_fail(GEMINI_ERR_BUSY, 0, "%llu bytes at offset %llu of arena %s are acquired",
                    (unsigned long long)lease.key.size, (unsigned long long)lease.key.offset, a->name);
  gemini_status_t status = gmi_updates_queue(m, NULL); /* no piece that is left may name the arena */
  if (status) return status;
  gmi_workers_drain(m, NULL);
  uint32_t count = a->store == a->index ? atomic_load(&a->chunk_count) : 0;
  status = tensors_kill(m, a);
  if (status) return status;
  /* After the kill no acquire without the lock can begin. One that was released before the kill may still hold chunks,
   * as release_whole() drops the tensor's user first: so the chunks are checked last. */
  status = chunks_unused(a, count);
  if (!status && a->store != a->index)
    status = gmi_gradients_drop(m, a); /* parameters whose bytes hold gradients become zeros: their values are lost */
  for (uint32_t i = 0; status && i < a->tensor_count; i++) tensor_revive(&m->tensors.at[a->order[i]]);
  if (status) return status;
  for (uint32_t i = 0; i < count; i++) gmi_chunk_forget(m, &a->chunks[i]);
  gmi_host_forget(m);
  if (a->store == a->index) gmi_arena_unmap(m, a);
  while (a->tensor_count) {
    uint32_t index = a->order[--a->tensor_count];
    if (m->tensors.at[index].base != index) counterpart_unlink(m, index);
    tensor_drop(m, index);
  }
  m->cut.chunk_count -= count;
  gmi_arena_t *base = gmi_arena_at(m, a->like);
  if (base != a) base->followers--;
  if (a->store != a->index) gmi_arena_at(m, a->store)->reused = false;
  else m->stats.model_bytes -= atomic_load(&a->size);
  atomic_store_explicit(&m->arenas.at[a->index], NULL, memory_order_release);
  arena_free(m, a);
  m->trace.observer->arenas_change(m);
  return GEMINI_OK;
}
gemini_status_t gemini_arena_destroy(gemini_manager_t mgr, gemini_arena_t arena) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!arena) return GEMINI_OK;
  gmi_lock(m, __func__);
  gemini_status_t status = arena_destroy(m, arena);
  gmi_unlock(m);
  API_RETURN(status);
}

void gmi_arena_free_all(gmi_manager_t *m) {
  for (uint32_t i = 0; i < m->tensors.high; i++) free(m->tensors.at[i].name);
  for (int pass = 0; pass < 2; pass++) { /* first the arenas that reuse another's chunks */
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *a = gmi_arena_at(m, i);
      if (!a || (pass == 0 && a->store == i)) continue;
      atomic_store(&m->arenas.at[i], NULL);
      arena_free(m, a);
    }
  }
}

/* The highest tier that holds a chunk's bytes: device, host, file; GMI_NONE: it reads as zeros and has no copy. */
static uint32_t highest_tier(const gmi_chunk_t *c) {
  return gmi_chunk_has(c, GMI_VALID_DEVICE) ? GEMINI_TIER_DEVICE
         : gmi_chunk_has(c, GMI_VALID_HOST) ? GEMINI_TIER_HOST
         : gmi_chunk_has(c, GMI_VALID_FILE) ? GEMINI_TIER_FILE
                                            : GMI_NONE;
}

static gemini_status_t tier_bytes(gmi_manager_t *m, const gemini_access_t *theirs, uint64_t *bytes_out) {
  gemini_access_t range;
  gmi_range_t resolved, *r = &resolved;
  if (!bytes_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "bytes_out is NULL");
  gemini_status_t status = gmi_access_in(&range, theirs, "range");
  if (!status && range.tier >= GEMINI_TIER_COUNT)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, the last one is %d", range.tier, GEMINI_TIER_COUNT - 1);
  if (!status) status = gmi_range_resolve(m, &range, r);
  if (status) return status;
  uint64_t bytes = 0;
  for (uint64_t i = r->first; i <= r->last && i < atomic_load(&r->store->chunk_count); i++) {
    const gmi_chunk_t *c = &r->store->chunks[i];
    uint64_t begin = i << m->cut.chunk_shift, end = begin + atomic_load(&m->cut.chunk_bytes);
    if (begin < r->offset) begin = r->offset;
    if (end > r->offset + r->size) end = r->offset + r->size;
    if (highest_tier(c) == range.tier) bytes += end - begin;
  }
  *bytes_out = bytes;
  return GEMINI_OK;
}
gemini_status_t gemini_tier_bytes(gemini_manager_t mgr, const gemini_access_t *range, uint64_t *bytes_out) {
  API_LOCKED(tier_bytes(m, range, bytes_out));
}

gemini_status_t gemini_arena_info(gemini_manager_t mgr, gemini_arena_t arena, gemini_arena_info_t *info_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  gmi_lock(m, __func__);
  gmi_arena_t *a = gmi_arena_get(m, arena);
  if (a) {
    info.kind = a->kind;
    info.base = (uint64_t)(uintptr_t)a->base;
    info.size_bytes = atomic_load(&a->size);
    info.capacity_bytes = a->capacity_asked;
    info.chunk_bytes = atomic_load(&m->cut.chunk_bytes);
    info.tensor_count = a->tensor_count;
  }
  gmi_unlock(m);
  API_RETURN(a ? gmi_struct_out(info_out, &info, sizeof info, GMI_V1_ARENA_INFO, "info_out") : GEMINI_ERR_HANDLE);
}

/* Grows the arena, and all that follow it, by size_bytes at *offset_out, which is aligned to ELEMENT_ALIGN elements, so
 * that the offset is aligned in every follower too. Checks all followers before it changes the first. After that
 * nothing fails: gmi_arena_grow() has address space for the chunk records since the arena was created or cut. */
static gemini_status_t arena_extend(gmi_manager_t *m, gmi_arena_t *a, uint64_t size_bytes, uint64_t *offset_out) {
  if (a->like != a->index || a->store != a->index)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s follows %s: register there", a->name,
                    gmi_arena_at(m, a->like)->name);
  if (!size_bytes || size_bytes % a->element_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is %llu, must be a multiple of %u and not 0",
                    (unsigned long long)size_bytes, a->element_bytes);
  uint64_t offset = round_up(atomic_load(&a->size), (uint64_t)ELEMENT_ALIGN * a->element_bytes);
  if (offset > a->capacity_asked || size_bytes > a->capacity_asked - offset)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is %llu, arena %s has %llu left of %llu",
                    (unsigned long long)size_bytes, a->name,
                    (unsigned long long)(offset > a->capacity_asked ? 0 : a->capacity_asked - offset),
                    (unsigned long long)a->capacity_asked);
  uint64_t elements = (offset + size_bytes) / a->element_bytes;
  for (uint32_t i = 0; a->followers && i < GMI_ARENAS; i++) {
    gmi_arena_t *f = gmi_arena_at(m, i);
    if (f && f != a && f->like == a->index && elements > f->capacity_asked / f->element_bytes)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s, like %s, has room for %llu elements, not %llu", f->name,
                      a->name, (unsigned long long)(f->capacity_asked / f->element_bytes),
                      (unsigned long long)elements);
  }
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; !status && i < GMI_ARENAS; i++) {
    gmi_arena_t *f = gmi_arena_at(m, i);
    if (!f || f->like != a->index) continue;
    if (f->store == f->index) m->stats.model_bytes += elements * f->element_bytes - atomic_load(&f->size);
    atomic_store_explicit(&f->size, elements * f->element_bytes, memory_order_release);
    status = gmi_arena_grow(m, f);
  }
  *offset_out = offset;
  return status;
}

gemini_status_t gemini_arena_take(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size_bytes,
                                  uint64_t *offset_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!offset_out) API_RETURN(gmi_fail(GEMINI_ERR_INVALID, 0, "offset_out is NULL"));
  gmi_lock(m, __func__);
  gmi_arena_t *a = gmi_arena_get(m, arena);
  gemini_status_t status = a ? arena_extend(m, a, size_bytes, offset_out) : GEMINI_ERR_HANDLE;
  gmi_unlock(m);
  API_RETURN(status);
}

/* ---- tensors. Names are in a hash table with chains; FNV-1a. Only registered tensors have names, counterparts share
 * that of their base. */
static uint64_t name_hash(const char *name) {
  uint64_t h = UINT64_C(14695981039346656037);
  for (; *name; name++) h = (h ^ (unsigned char)*name) * UINT64_C(1099511628211);
  return h;
}
uint32_t gmi_tensor_named(gmi_manager_t *m, const char *name) {
  uint32_t i = m->tensors.buckets[name_hash(name) % m->tensors.bucket_count];
  while (i != GMI_NONE && strcmp(m->tensors.at[i].name, name)) i = m->tensors.at[i].hash_next;
  return i;
}
static void name_remove(gmi_manager_t *m, uint32_t index) {
  uint32_t *link = &m->tensors.buckets[name_hash(m->tensors.at[index].name) % m->tensors.bucket_count];
  while (*link != index) link = &m->tensors.at[*link].hash_next;
  *link = m->tensors.at[index].hash_next;
}
static void name_insert(gmi_manager_t *m, uint32_t index) {
  uint32_t *link = &m->tensors.buckets[name_hash(m->tensors.at[index].name) % m->tensors.bucket_count];
  m->tensors.at[index].hash_next = *link;
  *link = index;
}
static void names_grow(gmi_manager_t *m) { /* without memory the chains only get longer */
  uint32_t count = m->tensors.bucket_count * 4;
  uint32_t *buckets = malloc(count * sizeof *buckets);
  if (!buckets) return;
  memset(buckets, 0xff, count * sizeof *buckets);
  free(m->tensors.buckets);
  m->tensors.buckets = buckets;
  m->tensors.bucket_count = count;
  for (uint32_t i = 0; i < m->tensors.high; i++)
    if (gmi_tensor_alive(&m->tensors.at[i]) && m->tensors.at[i].base == i) name_insert(m, i);
}

/* Makes room for one more tensor in arena a, so that tensor_new() cannot fail. */
static gemini_status_t tensor_room(gmi_manager_t *m, gmi_arena_t *a) {
  if (m->tensors.free == GMI_NONE && m->tensors.high == GMI_TENSORS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u tensors exist, the limit is %u", GMI_TENSORS, GMI_TENSORS);
  if (a->tensor_count == a->tensor_capacity) {
    uint32_t capacity = a->tensor_capacity ? a->tensor_capacity * 2 : 16;
    uint32_t *order = realloc(a->order, capacity * sizeof *order);
    if (!order) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a tensor's record");
    a->order = order;
    a->tensor_capacity = capacity;
  }
  return GEMINI_OK;
}

/* Creates a tensor in arena a after tensor_room(); the caller sets its name and links. life is stored last (release),
 * as it makes the record visible to acquires without the lock. The plain store of word loses no count: the record was
 * DEAD, or unused, so no acquire could add a user to it. */
static uint32_t tensor_new(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size) {
  uint32_t index = m->tensors.free;
  if (index != GMI_NONE) m->tensors.free = m->tensors.at[index].hash_next;
  else index = m->tensors.high++;
  gmi_tensor_t *t = &m->tensors.at[index];
  if (!t->generation) t->generation = m->identity.generation_before;
  t->generation++;
  t->arena = a->index;
  t->offset = offset;
  t->size = size;
  t->base = index;
  t->next = GMI_NONE;
  atomic_store(&t->word, gmi_tensor_word(0, GEMINI_STATE_FREE));
  atomic_store(&t->seen, 0);
  atomic_store_explicit(&t->life, t->generation, memory_order_release);
  a->order_sorted =
      a->tensor_count == 0 || (a->order_sorted && m->tensors.at[a->order[a->tensor_count - 1]].offset <= offset);
  a->order[a->tensor_count++] = index;
  if (size > a->longest) a->longest = size;
  m->tensors.alive++;
  return index;
}

static gemini_status_t tensor_register(gmi_manager_t *m, gemini_arena_t arena, const char *name, uint64_t size,
                                       uint64_t offset, gemini_tensor_t *tensor_out) {
  gmi_arena_t *a = gmi_arena_get(m, arena);
  if (!a) return GEMINI_ERR_HANDLE;
  if (!tensor_out || !name) return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", name ? "tensor_out" : "name");
  size_t length = strnlen(name, NAME_LIMIT + 1);
  if (!length || length > NAME_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "a tensor's name has %zu bytes or more, must have 1 to %d", length,
                    NAME_LIMIT);
  if (gmi_tensor_named(m, name) != GMI_NONE) return gmi_fail(GEMINI_ERR_EXISTS, 0, "a tensor named %s exists", name);
  bool next = offset == GEMINI_OFFSET_NEXT;
  uint64_t used = atomic_load(&a->size);
  if (!next) {
    if (a->like != a->index)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s follows %s: register there", a->name,
                      gmi_arena_at(m, a->like)->name);
    if (offset % a->element_bytes || !size || size % a->element_bytes || offset > used || size > used - offset)
      return gmi_fail(
          GEMINI_ERR_INVALID, 0,
          "tensor at %llu + %llu bytes is not inside the %llu bytes taken of arena %s, or no multiple of %u",
          (unsigned long long)offset, (unsigned long long)size, (unsigned long long)used, a->name, a->element_bytes);
  }
  char *copy = malloc(length + 1);
  if (!copy) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a tensor's name");
  memcpy(copy, name, length + 1);
  gemini_status_t status = tensor_room(m, a);
  if (!status && next) status = arena_extend(m, a, size, &offset);
  if (status) {
    free(copy);
    return status;
  }
  uint32_t index = tensor_new(m, a, offset, size);
  m->tensors.at[index].name = copy;
  if (m->tensors.alive > (uint64_t)m->tensors.bucket_count * 2) names_grow(m);
  if (gmi_tensor_named(m, copy) == GMI_NONE) name_insert(m, index); /* unless names_grow() has inserted it */
  *tensor_out = gmi_handle(m, GMI_HANDLE_TENSOR, m->tensors.at[index].generation, index);
  return GEMINI_OK;
}
gemini_status_t gemini_tensor_register(gemini_manager_t mgr, gemini_arena_t arena, const char *name,
                                       uint64_t size_bytes, uint64_t offset_bytes, gemini_tensor_t *tensor_out) {
  API_LOCKED(tensor_register(m, arena, name, size_bytes, offset_bytes, tensor_out));
}

static void order_remove(gmi_manager_t *m, uint32_t index) {
  gmi_arena_t *a = gmi_arena_at(m, m->tensors.at[index].arena);
  for (uint32_t i = 0; i < a->tensor_count; i++) {
    if (a->order[i] != index) continue;
    memmove(&a->order[i], &a->order[i + 1], (a->tensor_count - i - 1) * sizeof *a->order);
    a->tensor_count--;
    return;
  }
}

static gemini_status_t tensor_unregister(gmi_manager_t *m, gemini_tensor_t handle) {
  gmi_tensor_t *t = gmi_tensor_get(m, handle);
  if (!t) return GEMINI_ERR_HANDLE;
  uint32_t index = (uint32_t)(t - m->tensors.at);
  bool base = t->base == index;
  for (uint32_t i = index; i != GMI_NONE; i = base ? m->tensors.at[i].next : GMI_NONE) {
    if (tensor_kill(&m->tensors.at[i])) continue;
    for (uint32_t k = index; k != i; k = m->tensors.at[k].next) tensor_revive(&m->tensors.at[k]);
    return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s%s is acquired", gmi_tensor_base(m, t)->name,
                    i == index ? "" : ", in another arena,");
  }
  if (!base) counterpart_unlink(m, index);
  uint32_t next;
  for (uint32_t i = index; i != GMI_NONE; i = next) {
    next = base ? m->tensors.at[i].next : GMI_NONE;
    order_remove(m, i);
    tensor_drop(m, i);
  }
  return GEMINI_OK;
}
gemini_status_t gemini_tensor_unregister(gemini_manager_t mgr, gemini_tensor_t tensor) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!tensor) return GEMINI_OK;
  gmi_lock(m, __func__);
  gemini_status_t status = tensor_unregister(m, tensor);
  gmi_unlock(m);
  API_RETURN(status);
}

gemini_status_t gemini_tensor_find(gemini_manager_t mgr, const char *name, gemini_tensor_t *tensor_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!name || !tensor_out) API_RETURN(gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", name ? "tensor_out" : "name"));
  gmi_lock(m, __func__);
  uint32_t index = gmi_tensor_named(m, name);
  if (index != GMI_NONE) *tensor_out = gmi_handle(m, GMI_HANDLE_TENSOR, m->tensors.at[index].generation, index);
  gmi_unlock(m);
  API_RETURN(index != GMI_NONE ? GEMINI_OK : gmi_fail(GEMINI_ERR_NOT_FOUND, 0, "no tensor is named %.127s", name));
}

static gemini_status_t tensor_counterpart(gmi_manager_t *m, gemini_tensor_t handle, gemini_arena_t arena,
                                          gemini_tensor_t *tensor_out) {
  gmi_tensor_t *t = gmi_tensor_get(m, handle);
  gmi_arena_t *a = t ? gmi_arena_get(m, arena) : NULL;
  if (!a) return GEMINI_ERR_HANDLE;
  if (!tensor_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "tensor_out is NULL");
  gmi_tensor_t *base = gmi_tensor_base(m, t);
  gmi_arena_t *from = gmi_arena_at(m, base->arena);
  uint32_t index = t->base;
  while (index != GMI_NONE && m->tensors.at[index].arena != a->index) index = m->tensors.at[index].next;
  if (index == GMI_NONE) {
    if (a->like != from->index)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s is not like %s, where tensor %s is", a->name, from->name,
                      base->name);
    gemini_status_t status = tensor_room(m, a);
    if (status) return status;
    index = tensor_new(m, a, base->offset / from->element_bytes * a->element_bytes,
                       base->size / from->element_bytes * a->element_bytes);
    m->tensors.at[index].base = t->base;
    m->tensors.at[index].next = base->next;
    base->next = index;
  }
  *tensor_out = gmi_handle(m, GMI_HANDLE_TENSOR, m->tensors.at[index].generation, index);
  return GEMINI_OK;
}
gemini_status_t gemini_tensor_counterpart(gemini_manager_t mgr, gemini_tensor_t tensor, gemini_arena_t arena,
                                          gemini_tensor_t *tensor_out) {
  API_LOCKED(tensor_counterpart(m, tensor, arena, tensor_out));
}

gemini_status_t gemini_tensor_info(gemini_manager_t mgr, gemini_tensor_t tensor, gemini_tensor_info_t *info_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  gmi_lock(m, __func__);
  gmi_tensor_t *t = gmi_tensor_get(m, tensor);
  if (t) {
    gmi_arena_t *a = gmi_arena_at(m, t->arena);
    uint64_t word = atomic_load(&t->word);
    info.state = gmi_tensor_state(word);
    info.users = gmi_tensor_users(word);
    info.address = (uint64_t)(uintptr_t)a->base + t->offset;
    info.size_bytes = t->size;
    info.offset_bytes = t->offset;
    info.arena = gmi_handle(m, GMI_HANDLE_ARENA, a->generation, a->index);
    snprintf(info.name, sizeof info.name, "%s", gmi_tensor_base(m, t)->name);
  }
  gmi_unlock(m);
  API_RETURN(t ? gmi_struct_out(info_out, &info, sizeof info, GMI_V1_TENSOR_INFO, "info_out") : GEMINI_ERR_HANDLE);
}

static int by_offset(const void *a, const void *b, void *user) {
  const gmi_manager_t *m = user;
  const gmi_tensor_t *x = &m->tensors.at[*(const uint32_t *)a], *y = &m->tensors.at[*(const uint32_t *)b];
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return x < y ? -1 : x > y;
}
void gmi_arena_sort(gmi_manager_t *m, gmi_arena_t *a) {
  if (a->order_sorted || !a->tensor_count) return;
  qsort_r(a->order, a->tensor_count, sizeof *a->order, by_offset, m);
  a->order_sorted = true;
}

void gmi_arena_each(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size,
                    void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user), void *user) {
  gmi_arena_sort(m, a);
  /* A tensor that reaches into the range begins at most the longest tensor's size before it. */
  uint64_t from = offset > a->longest ? offset - a->longest : 0;
  uint32_t low = 0, high = a->tensor_count;
  while (low < high) {
    uint32_t mid = low + (high - low) / 2;
    if (m->tensors.at[a->order[mid]].offset < from) low = mid + 1;
    else high = mid;
  }
  for (uint32_t i = low; i < a->tensor_count; i++) {
    gmi_tensor_t *t = &m->tensors.at[a->order[i]];
    if (t->offset >= offset + size) break;
    if (t->offset + t->size > offset) fn(m, t, user);
  }
}

/* The legal transitions; docs/states.md gives the reasons. */
bool gmi_state_legal(uint32_t from, uint32_t to) {
  static const uint8_t to_bits[GEMINI_STATE_COUNT] = {
#define TO(state) (1u << GEMINI_STATE_##state)
    [GEMINI_STATE_FREE] = TO(HOLD) | TO(COMPUTE),
    [GEMINI_STATE_HOLD] = TO(FREE) | TO(COMPUTE) | TO(READY_FOR_REDUCE),
    [GEMINI_STATE_HOLD_AFTER_FWD] = TO(HOLD) | TO(COMPUTE),
    [GEMINI_STATE_HOLD_AFTER_BWD] = TO(HOLD) | TO(COMPUTE) | TO(READY_FOR_REDUCE),
    [GEMINI_STATE_COMPUTE] = TO(HOLD) | TO(HOLD_AFTER_FWD) | TO(HOLD_AFTER_BWD),
    [GEMINI_STATE_READY_FOR_REDUCE] = TO(HOLD) | TO(COMPUTE),
#undef TO
  };
  return from < GEMINI_STATE_COUNT && to < GEMINI_STATE_COUNT && (to_bits[from] >> to & 1);
}
