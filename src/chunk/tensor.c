/* Tensors: registration, names, counterparts, lookup, states. SPDX-License-Identifier: Apache-2.0
 *
 * Acquires and releases look tensors up without the lock, so the order of stores matters: a record is filled before its
 * generation is stored (release). Before a record is freed, its tensor is marked DEAD, which makes acquires fail. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "base/hash.h"
#include "chunk/arena.h"
#include "chunk/content.h"
#include "core/manager.h"

enum { NAME_LIMIT = 127 };

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

/* ---- tensors. Names are in a hash table with chains. Only registered tensors have names, counterparts share that of
 * their base. */
static uint32_t *bucket_of(gmi_manager_t *m, const char *name) {
  return &m->tensors.buckets[gmi_hash_text(GMI_HASH_NOTHING, name) % m->tensors.bucket_count];
}
uint32_t gmi_tensor_named(gmi_manager_t *m, const char *name) {
  uint32_t i = *bucket_of(m, name);
  while (i != GMI_NONE && strcmp(m->tensors.at[i].name, name)) i = m->tensors.at[i].hash_next;
  return i;
}
static void name_remove(gmi_manager_t *m, uint32_t index) {
  uint32_t *link = bucket_of(m, m->tensors.at[index].name);
  while (*link != index) link = &m->tensors.at[*link].hash_next;
  *link = m->tensors.at[index].hash_next;
}
static void name_insert(gmi_manager_t *m, uint32_t index) {
  uint32_t *link = bucket_of(m, m->tensors.at[index].name);
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

gemini_status_t gmi_tensors_kill(gmi_manager_t *m, gmi_arena_t *a) {
  for (uint32_t i = 0; i < a->tensor_count; i++) {
    gmi_tensor_t *t = &m->tensors.at[a->order[i]];
    if (tensor_kill(t)) continue;
    while (i-- > 0) tensor_revive(&m->tensors.at[a->order[i]]);
    return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s is acquired", gmi_tensor_base(m, t)->name);
  }
  return GEMINI_OK;
}

void gmi_tensors_revive(gmi_manager_t *m, gmi_arena_t *a) {
  for (uint32_t i = 0; i < a->tensor_count; i++) tensor_revive(&m->tensors.at[a->order[i]]);
}
void gmi_tensors_drop(gmi_manager_t *m, gmi_arena_t *a) {
  while (a->tensor_count) {
    uint32_t index = a->order[--a->tensor_count];
    if (m->tensors.at[index].base != index) counterpart_unlink(m, index);
    tensor_drop(m, index);
  }
}

static gemini_status_t tensor_register(gmi_manager_t *m, gemini_arena_t arena, const char *name, uint64_t size,
                                       uint64_t offset, gemini_tensor_t *tensor_out) {
  gmi_arena_t *a = gmi_arena_get(m, arena);
  if (!a) return GEMINI_ERR_HANDLE;
  if (!tensor_out || !name) return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", name ? "tensor_out" : "name");
  size_t length = strlen(name);
  if (!length || length > NAME_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "a tensor's name has %zu bytes, must have 1 to %d", length, NAME_LIMIT);
  if (gmi_tensor_named(m, name) != GMI_NONE) return gmi_fail(GEMINI_ERR_EXISTS, 0, "a tensor named %s exists", name);
  bool next = offset == GEMINI_OFFSET_NEXT;
  uint64_t used = atomic_load(&a->size);
  if (!next) {
    if (a->like != a->index)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "arena %s follows arena %s: register the tensor in that one", a->name,
                      gmi_arena_at(m, a->like)->name);
    if (offset % a->element_bytes || !size || size % a->element_bytes || offset > used || size > used - offset)
      return gmi_fail(
          GEMINI_ERR_INVALID, 0,
          "tensor at %llu + %llu bytes is not inside the %llu bytes taken of arena %s, or is no multiple of %u bytes",
          (unsigned long long)offset, (unsigned long long)size, (unsigned long long)used, a->name, a->element_bytes);
  }
  bool gradient = false;
  gemini_status_t status = next ? GEMINI_OK : gmi_content_of_place(m, a, offset, size, &gradient);
  if (status) return status;
  char *copy = malloc(length + 1);
  if (!copy) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a tensor's name");
  memcpy(copy, name, length + 1);
  status = tensor_room(m, a);
  if (!status && next) status = gmi_arena_extend(m, a, size, &offset);
  if (status) {
    free(copy);
    return status;
  }
  uint32_t index = tensor_new(m, a, offset, size);
  m->tensors.at[index].name = copy;
  if (gradient) atomic_fetch_or(&m->tensors.at[index].word, GMI_TENSOR_GRADIENT);
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
                    i == index ? "" : "'s counterpart in another arena");
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
    if (a->base) info.address = (uint64_t)(uintptr_t)a->base + t->offset; /* else it exists in slices only */
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

void gmi_tensor_not_free(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  uint64_t word = atomic_load(&t->word);
  (void)m;
  (void)user;
  while (word >> GMI_TENSOR_STATE_SHIFT == GEMINI_STATE_FREE &&
         !atomic_compare_exchange_weak(&t->word, &word, gmi_tensor_word(word, GEMINI_STATE_HOLD))) {
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
