/* Compares the library with the model. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <unistd.h>

#include "../figures.h"
#include "tester.h"

/* ---- bytes */
static void compare(actor_t *a, const arena_t *store, int entry, const uint8_t *got, uint64_t at, uint64_t size) {
  const uint8_t *expected = store->bytes + at;
  atomic_fetch_add_explicit(&a->w->shared->bytes_checked, size, memory_order_relaxed);
  if (!memcmp(got, expected, size)) return;
  uint64_t i = 0, wrong = 0, zeros = 0;
  while (got[i] == expected[i]) i++;
  for (uint64_t k = i; k < size; k++) {
    wrong += got[k] != expected[k];
    zeros += got[k] != expected[k] && !got[k];
  }
  differs(a,
          "arena %d \"%s\": %llu of %llu bytes from %llu on are wrong (%llu of these are zero), the first at %llu is "
          "%#x instead of %#x",
          entry, store->name, (unsigned long long)wrong, (unsigned long long)size, (unsigned long long)at,
          (unsigned long long)zeros, (unsigned long long)(at + i), got[i], expected[i]);
}

/* Tries gemini_store() first, which moves nothing to the device; then, chunk by chunk, an acquire on the device, and
 * one on the host. */
bool read_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, uint8_t *to) {
  part_t *p = part_of(a, m);
  gemini_access_t access = ACCESS(p->arenas[store].handle, at, size, GEMINI_READ, GEMINI_TIER_HOST);
  if (!QUIET(a, OK | no_room(a, m, 0), gemini_store, m->handle, &access, a->fd, 0)) {
    memcpy(to, a->file, size);
    return true;
  }
  uint64_t chunk = chunk_bytes(a, m);
  if (!chunk) chunk = a->w->unit;
  for (uint64_t begin = at, end; begin < at + size; begin = end) {
    end = (begin / chunk + 1) * chunk;
    if (end > at + size) end = at + size;
    access.offset_bytes = begin;
    access.size_bytes = end - begin;
    range_t r = { .live = true, .is_arena = true, .arena = store, .store = store, .at = begin, .size = end - begin };
    bool taken = content_of(p, &r, false) == CONTENT_WRONG; /* by gradients: only the store reads them as they are */
    gemini_status_t status = GEMINI_ERR_BUSY;
    for (int tier = GEMINI_TIER_DEVICE; status && tier <= GEMINI_TIER_HOST; tier++) {
      access.tier = (uint32_t)tier;
      status = QUIET(a, (taken ? STATE : OK) | NO_ROOM, gemini_acquire, m->handle, &access, 1, GEMINI_STREAM_CALLER);
    }
    if (status) return false;
    memcpy(to + (begin - at), access.ptr, end - begin);
    QUIET(a, OK, gemini_release, m->handle, &access, 1, GEMINI_STREAM_CALLER);
  }
  return true;
}

bool read_surely(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, uint8_t *to) {
  if (read_bytes(a, m, store, at, size, to)) return true;
  pthread_mutex_lock(&a->w->budgets);
  uint64_t more = m->config.host_bytes + (UINT64_C(64) << 20);
  QUIET(a, OK | OOM_HOST, gemini_budget_set, m->handle, GEMINI_TIER_HOST, more);
  bool read = read_bytes(a, m, store, at, size, to);
  if (QUIET(a, OK | NO_ROOM, gemini_budget_set, m->handle, GEMINI_TIER_HOST, m->config.host_bytes))
    m->config.host_bytes = more;
  m->host_bytes_most = more;
  pthread_mutex_unlock(&a->w->budgets);
  if (!read) part_of(a, m)->arenas[store].unknown = true;
  return read;
}

void look_at_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, const uint8_t *wanted,
                   const char *what) {
  uint8_t *model = part_of(a, m)->arenas[store].bytes + at, *got = malloc(size + 1);
  bool read = read_surely(a, m, store, at, size, got);
  for (uint64_t i = 0; read && i < size; i++)
    if (got[i] != model[i] && got[i] != wanted[i])
      differs(a, "byte %llu is %#x after %s that failed: neither what it was, %#x, nor what it was to be, %#x",
              (unsigned long long)i, got[i], what, model[i], wanted[i]);
  if (read) memcpy(model, got, size);
  free(got);
}

bool check_bytes(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size) {
  part_t *p = part_of(a, m);
  range_t r = { .live = true, .is_arena = true, .arena = store, .store = store, .at = at, .size = size };
  uint64_t chunk = chunk_bytes(a, m);
  if (!size || !chunk) return true;
  use_t use = range_use(p, &r, chunk);
  if (use.device_writers || use.host_writers) return false;
  uint8_t *got = malloc(size);
  bool read = read_bytes(a, m, store, at, size, got);
  if (read && !p->arenas[store].unknown) compare(a, &p->arenas[store], store, got, at, size);
  else if (!read) atomic_fetch_add(&a->w->shared->unread, 1);
  free(got);
  return read;
}

/* ---- objects */
/* Bytes of an object in all tiers together, which are `most` at most. If other threads move chunks between the calls,
 * the sum may be too large or too small. So may it for a moment if there are none: the library's own thread moves the
 * chunks of late updates. A sum that is too large is therefore made again. */
static uint64_t tier_sum(actor_t *a, manager_t *m, gemini_object_t object, uint64_t most) {
  uint64_t sum = 0;
  for (int tries = 0; !tries || (sum > most && tries < 100); tries++) {
    sum = 0;
    if (tries) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) {
      gemini_access_t all = ACCESS(object, 0, 0, 0, tier);
      uint64_t bytes = 0;
      QUIET(a, OK, gemini_tier_bytes, m->handle, &all, &bytes);
      sum += bytes;
    }
  }
  return sum;
}

void check_tensor(actor_t *a, manager_t *m, int entry) {
  part_t *p = part_of(a, m);
  const tensor_t *t = &p->tensors[entry];
  const arena_t *arena = &p->arenas[t->arena];
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  QUIET(a, OK, gemini_tensor_info, m->handle, t->handle, &info);
  uint32_t states = t->users ? 1u << GEMINI_STATE_COMPUTE : t->states;
  if (!(states >> info.state & 1))
    differs(a, "tensor %d is in state %u, expected one of the bits %#x", entry, info.state, states);
  if (info.users != t->users)
    differs(a, "tensor %d has %llu users, expected %u", entry, (unsigned long long)info.users, t->users);
  if (info.address != arena->base + t->offset || info.size_bytes != t->size || info.offset_bytes != t->offset ||
      info.arena != arena->handle || strcmp(info.name, t->name))
    differs(a, "tensor %d is \"%s\" at %llu + %llu, expected \"%s\" at %llu + %llu", entry, info.name,
            (unsigned long long)info.offset_bytes, (unsigned long long)info.size_bytes, t->name,
            (unsigned long long)t->offset, (unsigned long long)t->size);
  uint64_t sum = a->w->parallel ? 0 : tier_sum(a, m, OBJECT(t->handle), t->size);
  if (sum > t->size)
    differs(a, "tensor %d has %llu bytes in tiers, of %llu", entry, (unsigned long long)sum,
            (unsigned long long)t->size);
}

void check_arena(actor_t *a, manager_t *m, int entry) {
  part_t *p = part_of(a, m);
  const arena_t *arena = &p->arenas[entry];
  uint64_t tensors = 0;
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  QUIET(a, OK, gemini_arena_info, m->handle, arena->handle, &info);
  for (int i = 0; i < TENSORS; i++) tensors += p->tensors[i].live && p->tensors[i].arena == entry;
  if (info.kind != arena->kind || info.size_bytes != arena->size || info.capacity_bytes != arena->capacity ||
      info.base != arena->base || info.tensor_count != tensors)
    differs(a, "arena %d: kind %u, %llu of %llu bytes, %llu tensors; expected %u, %llu of %llu, %llu", entry, info.kind,
            (unsigned long long)info.size_bytes, (unsigned long long)info.capacity_bytes,
            (unsigned long long)info.tensor_count, arena->kind, (unsigned long long)arena->size,
            (unsigned long long)arena->capacity, (unsigned long long)tensors);
  uint64_t sum = a->w->parallel ? 0 : tier_sum(a, m, OBJECT(arena->handle), arena->size);
  if (sum > arena->size)
    differs(a, "arena %d has %llu bytes in tiers, of %llu", entry, (unsigned long long)sum,
            (unsigned long long)arena->size);
}

/* Checks that each chunk with a byte that is not zero is in some tier, if all updates are done. */
static void check_tiers(actor_t *a, manager_t *m, int entry) {
  part_t *p = part_of(a, m);
  for (const update_t *u = a->updates; u; u = u->next)
    if (u->mgr == m->handle) return;
  const arena_t *arena = &p->arenas[entry];
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  QUIET(a, OK, gemini_arena_info, m->handle, arena->handle, &info);
  uint64_t chunk = info.chunk_bytes, least = 0;
  const uint8_t *bytes = p->arenas[arena->store].bytes;
  for (uint64_t at = 0; chunk && at < arena->size; at += chunk) {
    uint64_t size = arena->size - at < chunk ? arena->size - at : chunk, i = 0;
    while (i < size && !bytes[at + i]) i++;
    if (i < size) least += size;
  }
  uint64_t sum = a->w->parallel ? UINT64_MAX : tier_sum(a, m, OBJECT(arena->handle), arena->size);
  if (sum < least)
    differs(a, "arena %d has %llu bytes in tiers, but %llu are in chunks that hold bytes", entry,
            (unsigned long long)sum, (unsigned long long)least);
}

/* ---- statistics; while no other thread runs */
void check_stats(actor_t *a, manager_t *m) {
  figures_t s = { 0 };
  const world_t *w = a->w;
  QUIET(a, OK, figures_read, m->handle, &s);
  uint64_t budgets[] = { m->config.device_bytes, m->config.host_bytes, m->config.file_bytes };
  uint64_t model = 0, live = 0, blocks = 0, updates = 0;
  for (uint32_t t = 0; t < w->options.threads; t++) {
    const part_t *p = &m->parts[t];
    for (int i = 0; i < ARENAS; i++)
      if (p->arenas[i].live && p->arenas[i].store == i) model += p->arenas[i].size;
    for (int i = 0; i < ALLOCS; i++)
      if (p->allocs[i].live) live += (p->allocs[i].size + 511) / 512 * 512;
    for (int i = 0; i < BLOCKS; i++)
      if (p->blocks[i].live) blocks += p->blocks[i].size;
    for (const update_t *u = w->actors[t].updates; u; u = u->next) updates += u->mgr == m->handle;
  }
#define SAME(what, got, expected) \
  if ((got) != (expected))        \
  differs(a, "statistics: %s is %llu, expected %llu", what, (unsigned long long)(got), (unsigned long long)(expected))
#define AT_MOST(what, got, most)                                                                   \
  if ((got) > (most))                                                                              \
  differs(a, "statistics: %s is %llu, at most %llu are possible", what, (unsigned long long)(got), \
          (unsigned long long)(most))
  for (int tier = 0; tier < GEMINI_TIER_COUNT; tier++) {
    static const char *const names[] = { "used_bytes of the device", "used_bytes of the host", "used_bytes of files" };
    SAME("a budget", s.budget_bytes[tier], budgets[tier]);
    AT_MOST(names[tier], s.used_bytes[tier], budgets[tier] - (tier ? 0 : m->config.device_margin_bytes));
    AT_MOST("used_bytes beside its peak", s.used_bytes[tier], s.peak_bytes[tier]);
  }
  SAME("model_bytes", s.model_bytes, model);
  SAME("nonmodel_bytes", s.nonmodel_bytes, live);
  AT_MOST("nonmodel_bytes beside its peak", s.nonmodel_bytes, s.nonmodel_peak_bytes);
  AT_MOST("live host blocks", blocks, s.host_alloc_bytes);
  AT_MOST("host_alloc_bytes", s.host_alloc_bytes, blocks ? s.used_bytes[GEMINI_TIER_HOST] : 0);
  SAME("iterations", s.iterations, m->iterations);
  AT_MOST("planned_iterations", s.planned_iterations, s.iterations);
  for (int link = 0; link < LINKS; link++)
    for (int reason = 0; reason < GEMINI_REASON_COUNT; reason++)
      if (!s.moved_bytes[link][reason] != !s.moved_chunks[link][reason])
        differs(a, "statistics: %llu bytes moved in %llu chunks", (unsigned long long)s.moved_bytes[link][reason],
                (unsigned long long)s.moved_chunks[link][reason]);
  if (!updates) SAME("pending_updates", s.pending_updates, 0);
  /* the engine is opened anew when the chunk size is chosen, which a fault can prevent */
  if (s.chunk_bytes || !w->options.faults)
    SAME("whether there is a file engine", s.file_engine != GEMINI_FILE_ENGINE_AUTO, m->has_files);
  if (m->config.chunk_bytes) AT_MOST("chunk_bytes", s.chunk_bytes, m->config.chunk_bytes);
#undef SAME
#undef AT_MOST
}

void check_part(actor_t *a, manager_t *m) {
  part_t *p = part_of(a, m);
  if (!m->open) return;
  for (int i = 0; i < ARENAS; i++) {
    if (!p->arenas[i].live) continue;
    check_arena(a, m, i);
    check_tiers(a, m, i);
    uint64_t chunk = chunk_bytes(a, m);
    if (p->arenas[i].store != i) continue;
    if (!chunk || check_bytes(a, m, i, 0, p->arenas[i].size)) continue;
    for (uint64_t at = 0; at < p->arenas[i].size; at += chunk) /* the chunks that can be read */
      check_bytes(a, m, i, at, p->arenas[i].size - at < chunk ? p->arenas[i].size - at : chunk);
  }
  for (int i = 0; i < TENSORS; i++)
    if (p->tensors[i].live) check_tensor(a, m, i);
  for (int i = 0; i < BLOCKS; i++) {
    const block_t *b = &p->blocks[i];
    uint8_t *expected = b->live ? malloc(b->size + 1) : NULL;
    if (!b->live) continue;
    pattern_fill(expected, 0, b->size, b->seed);
    if (memcmp(b->ptr, expected, b->size)) differs(a, "host block %d has changed", i);
    free(expected);
  }
  if (!a->w->parallel) check_stats(a, m);
}

void check_some(actor_t *a, manager_t *m, uint64_t step) {
  part_t *p = part_of(a, m);
  uint64_t random = (step + 1) * UINT64_C(0x9e3779b97f4a7c15);
  random_next(&random);
  if (!m->open) return;
  int tensor = (int)random_below(&random, TENSORS), arena = (int)random_below(&random, ARENAS);
  for (int i = 0; i < TENSORS; i++, tensor = (tensor + 1) % TENSORS)
    if (p->tensors[tensor].live) break;
  if (p->tensors[tensor].live) check_tensor(a, m, tensor);
  for (int i = 0; i < ARENAS; i++, arena = (arena + 1) % ARENAS)
    if (p->arenas[arena].live) break;
  if (p->arenas[arena].live && step % 4 == 0) check_arena(a, m, arena);
  if (step % 4 == 1 && !a->w->parallel) check_stats(a, m);
  if (!p->arenas[arena].live || step % 4 != 2 || !p->arenas[arena].size) return;
  const arena_t *store = &p->arenas[p->arenas[arena].store];
  uint64_t at = 0, size = store->size;
  if (random_below(&random, 8)) {
    at = random_below(&random, (uint32_t)store->size);
    size = 1 + random_below(&random, 4096);
    if (size > store->size - at) size = store->size - at;
  }
  check_bytes(a, m, p->arenas[arena].store, at, size);
}
