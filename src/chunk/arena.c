/* Arenas: layout, chunk records, ranges. SPDX-License-Identifier: Apache-2.0
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
#include "base/dtype.h"
#include "base/names.h"
#include "base/space.h"
#include "chunk/accesses.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/data.h"
#include "chunk/faults.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/host_ahead.h"
#include "chunk/residency.h"
#include "chunk/shard.h"
#include "chunk/speculate.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/workers.h"

enum { ELEMENT_ALIGN = 256 };
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

gmi_arena_t *gmi_arena_reuser(gmi_manager_t *m, const gmi_arena_t *params) {
  for (uint32_t i = 0; params->reused && i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && a->store == params->index && a != params) return a;
  }
  return NULL;
}

void gmi_arenas_write(gmi_manager_t *m, FILE *file, bool slices) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (!a || (!slices && a->shard.whole != GMI_NONE)) continue;
    fprintf(file, "arena %u %u %u %u %u %" PRIu64 " ", i, a->kind, a->element_bytes, a->like, a->store,
            atomic_load(&a->size));
    gmi_name_write(file, a->name);
    fputc('\n', file);
  }
}

/* numbers: number, kind, element_bytes, like, store */
static bool arena_line(const char *at, uint64_t numbers[5], uint64_t *size_out, char name[GMI_ARENA_NAME]) {
  *name = 0;
  return gmi_numbers_at(&at, ' ', UINT32_MAX, 5, numbers) && gmi_number_at(&at, ' ', UINT64_MAX, size_out) &&
         numbers[0] < GMI_ARENAS && numbers[3] < GMI_ARENAS && numbers[4] < GMI_ARENAS &&
         gmi_name_read(at, name, GMI_ARENA_NAME);
}

const char *gmi_arena_read(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS], char name[GMI_ARENA_NAME]) {
  uint64_t n[5], size;
  if (!arena_line(at, n, &size, name)) return "malformed arena";
  const gmi_arena_t *a = arena_named(m, name);
  if (!a || a->kind != n[1] || a->element_bytes != n[2] || atomic_load(&a->size) != size ||
      (a->store == a->index) != (n[4] == n[0]))
    return "this manager has no arena of this name, kind, element size and size";
  for (uint32_t i = 0; i < GMI_ARENAS; i++)
    if (i == n[0] ? arena_of[i] != GMI_NONE : arena_of[i] == a->index) return "an arena is named twice";
  arena_of[n[0]] = a->index;
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
  if (!chunk_bytes || !gmi_arena_has_chunks(store)) return GEMINI_OK;
  if (!store->chunks) {
    uint64_t bytes = (store->capacity >> m->cut.chunk_shift) * sizeof(gmi_chunk_t);
    store->chunks = gmi_space(bytes);
    if (!store->chunks)
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address space for the %llu chunks of arena %s",
                      (unsigned long long)(store->capacity >> m->cut.chunk_shift), store->name);
    store->chunk_map_bytes = bytes;
  }
  const bool gathered = gmi_arena_is_sharded(store) && !gmi_arena_is_gradients(store); /* those begin as zeros */
  uint32_t count = atomic_load(&store->chunk_count);
  uint32_t want = (uint32_t)((atomic_load(&store->size) + chunk_bytes - 1) >> m->cut.chunk_shift);
  for (uint32_t i = count; i < want; i++) gmi_chunk_init(&store->chunks[i], store->index, i, gathered);
  if (want > count) {
    m->cut.chunk_count += want - count;
    atomic_store_explicit(&store->chunk_count, want, memory_order_release); /* after the records: see fast_chunks() */
  }
  return GEMINI_OK;
}

/* Makes the chunk records of a sharded arena and of its slices. */
static gemini_status_t slices_grow(gmi_manager_t *m, gmi_arena_t *a) {
  uint64_t chunk_bytes = atomic_load(&m->cut.chunk_bytes);
  gemini_status_t status = chunk_bytes ? gmi_slices_resize(m, chunk_bytes) : GEMINI_OK;
  if (!status) status = gmi_arena_grow(m, a);
  return status ? status : gmi_arena_grow(m, gmi_arena_slices(m, a));
}

gemini_status_t gmi_range_bytes(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  gmi_range_t r = { 0 };
  uint64_t start = 0, limit;
  if (!gmi_object_id(access) && access->offset_bytes) return gmi_address_range(m, access, range_out);
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
  r.store = gmi_arena_is_sharded(r.arena) ? r.arena : gmi_arena_at(m, r.arena->store);
  uint64_t size = access->size_bytes;
  const char *name = r.tensor ? gmi_tensor_base(m, r.tensor)->name : r.arena->name;
  if (!size && access->offset_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "size_bytes is 0 with offset_bytes %llu of %s, which has %llu bytes: size 0 means the "
                    "whole object and needs offset 0",
                    (unsigned long long)access->offset_bytes, name, (unsigned long long)limit);
  if (!size) size = limit;
  if (access->offset_bytes > limit || size > limit - access->offset_bytes || (!size && r.tensor))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "offset_bytes %llu + size_bytes %llu is not inside %s of %llu bytes",
                    (unsigned long long)access->offset_bytes, (unsigned long long)size, name,
                    (unsigned long long)limit);
  r.offset = r.at = start + access->offset_bytes;
  r.size = size;
  r.first = 1;
  *range_out = r;
  return GEMINI_OK;
}

void gmi_range_chunks(gmi_manager_t *m, gmi_range_t *range) {
  if (!range->size || !atomic_load(&m->cut.chunk_bytes)) return;
  range->first = (uint32_t)(range->at >> m->cut.chunk_shift);
  range->last = (uint32_t)((range->at + range->size - 1) >> m->cut.chunk_shift);
}

gemini_status_t gmi_range_resolve_any(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  gemini_status_t status = gmi_range_bytes(m, access, range_out);
  if (!status) gmi_range_chunks(m, range_out);
  return status;
}
gemini_status_t gmi_range_resolve(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  gmi_range_t r;
  gemini_status_t status = gmi_range_resolve_any(m, access, &r);
  if (status) return status;
  if (gmi_arena_is_sharded(r.arena))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "arena %s is sharded over a group, which graphs do not support",
                    r.arena->name);
  *range_out = r;
  return GEMINI_OK;
}

gemini_status_t gmi_range_ready_any(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  bool cut = atomic_load(&m->cut.chunk_bytes);
  gemini_status_t status = gmi_range_resolve_any(m, access, range_out);
  if (!status && !cut) status = gmi_cut(m);
  return status || cut ? status : gmi_range_resolve_any(m, access, range_out);
}
gemini_status_t gmi_range_ready(gmi_manager_t *m, const gemini_access_t *access, gmi_range_t *range_out) {
  gemini_status_t status = gmi_range_resolve(m, access, range_out);
  return status ? status : gmi_range_ready_any(m, access, range_out);
}

/* ---- arenas */
/* Checks the configuration and resolves its handles: like and reuse, NULL where none is named. An arena that follows
 * another cannot be followed itself: layouts then have one source, which alone grows. */
static gemini_status_t arena_check(gmi_manager_t *m, gemini_arena_config_t *c, gmi_arena_t **like,
                                   gmi_arena_t **reuse) {
  if (c->kind > GEMINI_KIND_OTHER)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "kind is %u, must be 0 to %d", c->kind, GEMINI_KIND_OTHER);
  if (!c->element_bytes) c->element_bytes = 1;
  if (c->element_bytes > 16 || (c->element_bytes & (c->element_bytes - 1)))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "element_bytes is %u, must be 1, 2, 4, 8 or 16", c->element_bytes);
  if (c->flags & ~(uint32_t)GEMINI_ARENA_GROWS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", c->flags & ~(uint32_t)GEMINI_ARENA_GROWS);
  if (c->flags && (c->like || c->reuse || c->group))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "flags is GEMINI_ARENA_GROWS, but the arena follows another or is sharded");
  if (c->name && (!*c->name || strnlen(c->name, 64) > 63))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "an arena's name must have 1 to 63 bytes");
  if (c->capacity_bytes > (UINT64_C(1) << 45))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "capacity_bytes is %llu, must be at most %llu",
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

/* Loads what adds gradients to earlier ones, before collectives are under way. */
static gemini_status_t adds_prepare(gmi_manager_t *m, uint32_t dtype) {
  gemini_status_t status = m->device.ops->queue.add(m->device.self, gmi_link_out(m)->stream, NULL, NULL, dtype, 0);
  return status ? gmi_fail_device(status, "device %s is not ready to add gradients", m->device.ops->name) : GEMINI_OK;
}

/* Checks what the configuration says of a group. *group_out: index of the group that the arena is sharded over, which
 * an arena that follows another shares with it; GMI_NONE: it is not sharded. */
static gemini_status_t group_check(gmi_manager_t *m, const gemini_arena_config_t *c, const gmi_arena_t *base,
                                   const gmi_arena_t *reuse, uint32_t *group_out) {
  const gmi_group_t *g = NULL;
  if (c->group && !(g = gmi_group_get(m, c->group))) return GEMINI_ERR_HANDLE;
  if (c->zero_stage > GEMINI_ZERO_PARAMS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "zero_stage is %u, must be 0 to %d", c->zero_stage, GEMINI_ZERO_PARAMS);
  if (!g && !(base && gmi_arena_is_sharded(base))) {
    if (c->zero_stage) return gmi_fail(GEMINI_ERR_INVALID, 0, "zero_stage is %u without a group", c->zero_stage);
    if (c->dtype) return gmi_fail(GEMINI_ERR_INVALID, 0, "dtype is %u, but the arena is not sharded", c->dtype);
    *group_out = GMI_NONE;
    return GEMINI_OK;
  }
  if (base) {
    if (c->group || c->zero_stage)
      return gmi_fail(GEMINI_ERR_INVALID, 0,
                      "group and zero_stage are those of arena %s, which this one follows: leave "
                      "them 0",
                      base->name);
    const bool gradients = c->kind == GEMINI_KIND_GRAD;
    if (gradients && c->element_bytes != base->element_bytes) /* their slices have the same bytes of a chunk */
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                      "element_bytes is %u, but gradients of arena %s, which is sharded, must have its %u",
                      c->element_bytes, base->name, base->element_bytes);
    if (gradients && (c->dtype > GEMINI_DTYPE_F64 || gmi_dtype_bytes(c->dtype) != c->element_bytes))
      return gmi_fail(GEMINI_ERR_INVALID, 0, "dtype is %u, which is no type of %u bytes (element_bytes)", c->dtype,
                      c->element_bytes);
    gemini_status_t status = gradients && !reuse ? adds_prepare(m, c->dtype) : GEMINI_OK;
    if (status) return status;
    if (reuse && base->shard.taken)
      return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                      "arena %s is sharded over a group and has bytes of no tensor (gemini_arena_take()), which "
                      "gradients must not reuse",
                      base->name);
    *group_out = base->shard.group;
    return GEMINI_OK;
  }
  if (c->kind != GEMINI_KIND_PARAM)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "kind is %u: group belongs to an arena of parameters", c->kind);
  if (c->dtype) return gmi_fail(GEMINI_ERR_INVALID, 0, "dtype is %u: it belongs to the arena of gradients", c->dtype);
  uint64_t chunk = atomic_load(&m->cut.chunk_bytes) ? atomic_load(&m->cut.chunk_bytes) : m->config.chunk_bytes;
  if (chunk && !gmi_slicing_of(chunk, c->element_bytes, 0, g->gather.ranks).slice)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "chunks of %llu bytes are too small for slices of %u ranks",
                    (unsigned long long)chunk, g->gather.ranks);
  if (m->file.checkpoint_name)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "a manager with checkpoint_name cannot have sharded arenas: leave it NULL, and use "
                    "gemini_group_checkpoint() and gemini_group_resume()");
  *group_out = g->index;
  return GEMINI_OK;
}

static void arena_free(gmi_manager_t *m, gmi_arena_t *a) {
  if (gmi_arena_has_chunks(a)) {
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

static void arena_remove(gmi_manager_t *m, gmi_arena_t *a);
/* What an arena is made from: a checked configuration with its handles resolved. */
typedef struct {
  const gemini_arena_config_t *c;
  char name[GMI_ARENA_NAME];
  uint64_t capacity; /* bytes, as asked for */
  gmi_arena_t *like, *reuse;
  bool no_addresses;  /* a sharded arena of states: nothing of it comes to the device */
  bool own_addresses; /* sharded gradients: on the device they lie beside their parameters */
} order_t;
static gmi_arena_t *followed(const order_t *o) { return o->reuse ? o->reuse : o->like; }

/* Makes an arena that nothing knows yet. */
static gemini_status_t arena_new(gmi_manager_t *m, const order_t *o, uint32_t index, gmi_arena_t **arena_out) {
  gmi_arena_t *a = calloc(1, sizeof *a);
  if (!a) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for an arena's record");
  memcpy(a->name, o->name, sizeof a->name);
  a->index = a->like = a->store = index;
  a->shard.slices = a->shard.whole = GMI_NONE;
  a->kind = o->c->kind;
  a->grows = o->c->flags & GEMINI_ARENA_GROWS;
  a->element_bytes = o->c->element_bytes;
  const gmi_arena_t *base = followed(o);
  a->capacity_asked = o->capacity - o->capacity % a->element_bytes;
  a->capacity = round_up(o->capacity, m->config.chunk_bytes > GMI_CHUNK_MAX ? m->config.chunk_bytes : GMI_CHUNK_MAX);
  if (base) {
    a->like = base->index;
    atomic_store(&a->size, atomic_load(&base->size) / base->element_bytes * a->element_bytes);
    if (atomic_load(&a->size) > a->capacity_asked) {
      free(a);
      return gmi_fail(GEMINI_ERR_INVALID, 0, "capacity_bytes is %llu, but arena %s has %llu elements already",
                      (unsigned long long)o->capacity, base->name,
                      (unsigned long long)(atomic_load(&base->size) / base->element_bytes));
    }
  }
  if (o->reuse) a->store = o->reuse->index;
  if (o->reuse && !o->own_addresses) {
    a->base = o->reuse->base;
  } else if (!o->no_addresses) {
    void *address = NULL;
    gemini_status_t status = m->device.ops->memory.reserve(m->device.self, a->capacity, &address);
    a->base = status ? NULL : address;
    if (status) {
      arena_free(m, a);
      return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address range of %llu bytes for arena %s",
                      (unsigned long long)o->capacity, o->name);
    }
  }
  *arena_out = a;
  return GEMINI_OK;
}

/* Makes the arena known. */
static void arena_enter(gmi_manager_t *m, const order_t *o, gmi_arena_t *a) {
  gmi_arena_t *base = followed(o);
  if (base) base->followers++;
  if (o->reuse) o->reuse->reused = true;
  else if (!gmi_arena_is_sharded(a)) m->stats.model_bytes += atomic_load(&a->size);
  a->generation = ++m->arenas.generations[a->index];
  atomic_store_explicit(&m->arenas.at[a->index], a, memory_order_release);
  gmi_faults_arena_add(m, a);
}

static uint32_t index_free(gmi_manager_t *m, uint32_t from) {
  while (from < GMI_ARENAS && gmi_arena_at(m, from)) from++;
  return from;
}

/* Makes the arena of slices behind a sharded arena. */
static gemini_status_t slices_new(gmi_manager_t *m, const order_t *o, gmi_arena_t *whole, uint32_t group,
                                  order_t *order_out, gmi_arena_t **slices_out) {
  const gmi_arena_t *base = followed(o);
  order_t slices = *o;
  gmi_arena_t *a;
  /* equal slices of a short last chunk can be longer together than what they are slices of */
  slices.capacity = whole->capacity + GMI_CHUNK_MAX;
  slices.like = base ? gmi_arena_slices(m, base) : NULL;
  slices.reuse = o->reuse ? slices.like : NULL;
  slices.no_addresses = slices.own_addresses = false;
  int length = snprintf(slices.name, sizeof slices.name, "%.*s", GMI_ARENA_NAME - (int)sizeof " slices", o->name);
  snprintf(slices.name + length, sizeof slices.name - (size_t)length, " slices");
  uint32_t index = index_free(m, whole->index + 1);
  if (index == GMI_ARENAS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u arenas exist, the limit is %u; a sharded arena counts twice",
                    GMI_ARENAS - 1, GMI_ARENAS);
  if (arena_named(m, slices.name))
    return gmi_fail(GEMINI_ERR_EXISTS, 0, "an arena named %s exists: arena %s keeps its slices under this name",
                    slices.name, whole->name);
  gemini_status_t status = arena_new(m, &slices, index, &a);
  if (status) return status;
  whole->shard.slices = index;
  a->shard.whole = whole->index;
  whole->shard.group = a->shard.group = group;
  *order_out = slices;
  *slices_out = a;
  return GEMINI_OK;
}

static gemini_status_t arena_create(gmi_manager_t *m, const gemini_arena_config_t *theirs, gemini_arena_t *arena_out) {
  static const char *const kinds[] = { "param", "grad", "master", "momentum", "variance", "other" };
  if (!arena_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "arena_out is NULL");
  gemini_arena_config_t c;
  gemini_status_t status = gmi_struct_in(&c, sizeof c, theirs, GMI_V1_ARENA_CONFIG, "config");
  if (status) return status;
  order_t order = { .c = &c }, slices_order;
  uint32_t group = GMI_NONE;
  status = arena_check(m, &c, &order.like, &order.reuse);
  if (!status) status = group_check(m, &c, followed(&order), order.reuse, &group);
  if (status) return status;
  snprintf(order.name, sizeof order.name, "%s", c.name ? c.name : kinds[c.kind]);
  if (c.name && arena_named(m, order.name))
    return gmi_fail(GEMINI_ERR_EXISTS, 0, "an arena named %s exists", order.name);
  for (uint32_t number = 2; arena_named(m, order.name); number++)
    snprintf(order.name, sizeof order.name, "%s.%u", kinds[c.kind], number);
  uint32_t index = index_free(m, 0);
  if (index == GMI_ARENAS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "%u arenas exist, the limit is %u", GMI_ARENAS, GMI_ARENAS);
  const gmi_arena_t *base = followed(&order);
  order.capacity = c.capacity_bytes;
  if (!order.capacity)
    order.capacity = base ? base->capacity_asked / base->element_bytes * c.element_bytes
                          : m->config.device_bytes + m->config.host_bytes + m->config.file_bytes;
  order.no_addresses = group != GMI_NONE && base && c.kind != GEMINI_KIND_GRAD;
  order.own_addresses = group != GMI_NONE;
  gmi_arena_t *a, *slices = NULL;
  status = arena_new(m, &order, index, &a);
  if (status) return status;
  if (group != GMI_NONE) {
    status = slices_new(m, &order, a, group, &slices_order, &slices);
    const gmi_arena_t *root = base ? base : a;
    a->shard.stage = base ? root->shard.stage : c.zero_stage;
  }
  if (!status && !gmi_arena_is_sharded(a)) status = gmi_arena_grow(m, a);
  if (status) {
    arena_free(m, a);
    return status;
  }
  arena_enter(m, &order, a);
  if (slices) {
    arena_enter(m, &slices_order, slices);
    gmi_group_at(m, group)->arenas++;
    a->shard.dtype = c.dtype;
    status = slices_grow(m, a);
    if (status) {
      arena_remove(m, a);
      return status;
    }
  }
  m->trace.observer->arenas_change(m);
  *arena_out = gmi_handle(m, GMI_HANDLE_ARENA, a->generation, index);
  return GEMINI_OK;
}
gemini_status_t gemini_arena_create(gemini_manager_t mgr, const gemini_arena_config_t *config,
                                    gemini_arena_t *arena_out) {
  API_LOCKED(arena_create(m, config, arena_out));
}

/* Fails with BUSY if something uses the chunks of an arena. */
static gemini_status_t chunks_kept(const gmi_arena_t *a, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    if (gmi_chunk_is_pinned(&a->chunks[i]))
      return gmi_fail(GEMINI_ERR_BUSY, 0, "a range of arena %s is acquired or pinned", a->name);
    if (gmi_chunk_in_graphs(&a->chunks[i]))
      return gmi_fail(GEMINI_ERR_BUSY, 0, "arena %s is used in a graph: destroy the graph first", a->name);
  }
  return GEMINI_OK;
}
static gemini_status_t chunks_unused(const gmi_arena_t *a, uint32_t count) {
  gemini_status_t status = chunks_kept(a, count);
  for (uint32_t i = 0; !status && i < count; i++) {
    const gmi_chunk_t *c = &a->chunks[i];
    if (gmi_chunk_device_users(c) || gmi_chunk_host_users(c) || gmi_chunk_is_loading(c))
      status = gmi_fail(GEMINI_ERR_BUSY, 0, "a range of arena %s is acquired or pinned", a->name);
  }
  return status;
}

/* Forgets the arena's bytes and tensors, frees it, and with it its slices. Nothing uses it. */
static void arena_remove(gmi_manager_t *m, gmi_arena_t *a) {
  gmi_arena_t *slices = gmi_arena_is_sharded(a) ? gmi_arena_slices(m, a) : NULL, *base = gmi_arena_at(m, a->like);
  uint32_t count = gmi_arena_has_chunks(a) ? atomic_load(&a->chunk_count) : 0;
  for (uint32_t i = 0; i < count; i++) gmi_chunk_forget(m, &a->chunks[i]);
  gmi_host_forget(m);
  if (gmi_arena_has_chunks(a)) gmi_arena_unmap(m, a);
  gmi_tensors_drop(m, a);
  m->cut.chunk_count -= count;
  if (base != a) base->followers--;
  if (a->store != a->index) gmi_arena_at(m, a->store)->reused = false;
  else if (!slices) m->stats.model_bytes -= atomic_load(&a->size);
  if (slices) gmi_group_at(m, a->shard.group)->arenas--;
  atomic_store_explicit(&m->arenas.at[a->index], NULL, memory_order_release);
  gmi_faults_arena_remove(m, a);
  arena_free(m, a);
  if (slices) arena_remove(m, slices);
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
  status = gmi_tensors_kill(m, a);
  if (status) return status;
  if (gmi_arena_has_chunks(a)) status = chunks_kept(a, atomic_load(&a->chunk_count));
  if (!status) {
    gmi_specs_drop(m); /* some may name the arena */
    gmi_workers_drain(m, NULL);
  }
  /* After the kill no acquire without the lock can begin. One that was released before the kill may still hold chunks,
   * as release_whole() drops the tensor's user first: so the chunks are checked last. */
  if (!status && gmi_arena_has_chunks(a)) status = chunks_unused(a, atomic_load(&a->chunk_count));
  if (!status && gmi_arena_is_sharded(a)) status = gmi_slices_unused(m, a);
  else if (!status && a->store != a->index)
    status = gmi_gradients_drop(m, a); /* parameters whose bytes hold gradients become zeros: their values are lost */
  if (status) {
    gmi_tensors_revive(m, a);
    return status;
  }
  arena_remove(m, a);
  gmi_ahead_drop(m); /* some may be for the arena */
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

/* How many bytes of [begin, end) of an arena that owns chunks a tier holds. */
static uint64_t bytes_in_tier(gmi_manager_t *m, const gmi_arena_t *store, uint64_t begin, uint64_t end, uint32_t tier) {
  uint64_t bytes = 0, stop;
  for (; begin < end; begin = stop) {
    const uint64_t i = begin >> m->cut.chunk_shift;
    stop = (i + 1) << m->cut.chunk_shift;
    if (stop > end) stop = end;
    if (i < atomic_load(&store->chunk_count) && highest_tier(&store->chunks[i]) == tier) bytes += stop - begin;
  }
  return bytes;
}

static gemini_status_t tier_bytes(gmi_manager_t *m, const gemini_access_t *theirs, uint64_t *bytes_out) {
  gemini_access_t range;
  gmi_range_t r;
  gmi_slice_t slice;
  if (!bytes_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "bytes_out is NULL");
  gemini_status_t status = gmi_access_in(&range, theirs, "range");
  if (!status && range.tier >= GEMINI_TIER_COUNT)
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, must be 0 to %d", range.tier, GEMINI_TIER_COUNT - 1);
  if (!status) status = gmi_range_resolve_any(m, &range, &r);
  if (status) return status;
  const uint64_t end = r.offset + r.size, element = r.arena->element_bytes;
  uint64_t bytes = 0;
  if (!atomic_load(&m->cut.chunk_bytes)) { /* nothing has bytes yet */
  } else if (!gmi_arena_is_sharded(r.arena)) {
    bytes = bytes_in_tier(m, r.store, r.offset, end, range.tier);
  } else { /* of this rank's slices, whole elements */
    const gmi_arena_t *slices = gmi_arena_at(m, gmi_arena_slices(m, r.arena)->store);
    const gmi_slicing_t s = gmi_slicing(m, r.arena);
    for (uint64_t from = r.offset / element; gmi_slice_find(&s, from, (end + element - 1) / element, &slice);
         from = slice.whole + slice.count)
      bytes += bytes_in_tier(m, slices, slice.slices * element, (slice.slices + slice.count) * element, range.tier);
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
    info.element_bytes = a->element_bytes;
  }
  gmi_unlock(m);
  API_RETURN(a ? gmi_struct_out(info_out, &info, sizeof info, GMI_V1_ARENA_INFO, "info_out") : GEMINI_ERR_HANDLE);
}

/* Grows the arena, and all that follow it, by size_bytes at *offset_out, which is aligned to ELEMENT_ALIGN elements, so
 * that the offset is aligned in every follower too. Checks all followers before it changes the first. After that
 * nothing fails: gmi_arena_grow() has address space for the chunk records since the arena was created or cut. */
gemini_status_t gmi_arena_extend(gmi_manager_t *m, gmi_arena_t *a, uint64_t size_bytes, uint64_t *offset_out) {
  if (a->like != a->index || a->store != a->index)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s follows arena %s: take the bytes of that one", a->name,
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
  for (uint32_t i = 0; a->followers && i < GMI_ARENAS; i++) {
    const gmi_arena_t *f = gmi_arena_at(m, i);
    if (!f || f->like != a->index || !(f->shard.reduced || f->shard.updated)) continue;
    return gmi_fail(GEMINI_ERR_STATE, 0,
                    "gradients of arena %s are being added over the ranks: it can grow again after "
                    "the update",
                    a->name);
  }
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
    if (gmi_arena_has_tiers(f)) m->stats.model_bytes += elements * f->element_bytes - atomic_load(&f->size);
    atomic_store_explicit(&f->size, elements * f->element_bytes, memory_order_release);
    status = gmi_arena_is_sharded(f) ? slices_grow(m, f) : gmi_arena_grow(m, f);
  }
  *offset_out = offset;
  return status;
}

const char *gmi_arena_make(gmi_manager_t *m, const char *at, uint32_t arena_of[GMI_ARENAS], char name[GMI_ARENA_NAME]) {
  uint64_t n[5], size, offset;
  if (!arena_line(at, n, &size, name)) return "malformed arena";
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  const bool follows = n[3] != n[0], reuses = n[4] != n[0];
  const uint32_t base = arena_of[reuses ? n[4] : n[3]];
  gmi_arena_t *followed = follows && base != GMI_NONE ? gmi_arena_at(m, base) : NULL;
  if ((follows || reuses) && !followed) return "it follows an arena that is not in a line above";
  c.kind = (uint32_t)n[1];
  c.element_bytes = (uint32_t)n[2];
  c.capacity_bytes = size ? size : 1;
  c.name = name;
  if (followed) *(reuses ? &c.reuse : &c.like) = gmi_handle(m, GMI_HANDLE_ARENA, followed->generation, followed->index);
  gemini_arena_t made;
  if (arena_create(m, &c, &made)) return "an arena that cannot be made";
  gmi_arena_t *a = gmi_arena_get(m, made);
  if (!follows && size && gmi_arena_extend(m, a, size, &offset)) return "an arena of an impossible size";
  return gmi_arena_read(m, at, arena_of, name);
}

static gemini_status_t arena_take(gmi_manager_t *m, gemini_arena_t arena, uint64_t size_bytes, uint64_t *offset_out,
                                  void **ptr_out) {
  gmi_arena_t *a = gmi_arena_get(m, arena);
  if (!a) return GEMINI_ERR_HANDLE;
  if (gmi_arena_is_sharded(a) && a->reused) /* sums of gradients would stay where no tensor says so */
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "arena %s is sharded over a group and reused by gradients: its bytes must be those of tensors",
                    a->name);
  uint64_t offset;
  gemini_status_t status = gmi_arena_extend(m, a, size_bytes, &offset);
  if (status) return status;
  a->shard.taken = true;
  if (offset_out) *offset_out = offset;
  if (ptr_out) *ptr_out = a->base + offset;
  return GEMINI_OK;
}
gemini_status_t gemini_arena_take(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size_bytes,
                                  uint64_t *offset_out) {
  API_LOCKED(offset_out ? arena_take(m, arena, size_bytes, offset_out, NULL)
                        : gmi_fail(GEMINI_ERR_INVALID, 0, "offset_out is NULL"));
}
gemini_status_t gemini_arena_take_pointer(gemini_manager_t mgr, gemini_arena_t arena, uint64_t size_bytes,
                                          void **ptr_out) {
  API_LOCKED(ptr_out ? arena_take(m, arena, size_bytes, NULL, ptr_out)
                     : gmi_fail(GEMINI_ERR_INVALID, 0, "ptr_out is NULL"));
}
