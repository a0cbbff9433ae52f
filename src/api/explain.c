/* Says in words what is at an address: gemini_explain_address(). SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>

#include "api/text.h"
#include "base/names.h"
#include "chunk/arena.h"
#include "gemini/address.h"

typedef struct {
  gmi_manager_t *m;
  FILE *file;
  gmi_arena_t *arena;
  uint64_t offset; /* of the address in the arena */
  uint32_t holders;
} place_t;

static void write_range(place_t *p, uint64_t size, uint64_t offset, const char *name, uint32_t mode, uint32_t tier,
                        uint64_t times) {
  static const char *const modes[] = { "", "read", "written", "read and written" };
  fprintf(p->file, "acquired: %" PRIu64 " bytes at offset %" PRIu64 " of ", size, offset);
  gmi_name_print(p->file, name);
  fprintf(p->file, ", %s, %s, %" PRIu64 " times\n", modes[mode],
          tier == GEMINI_TIER_DEVICE ? "on the device" : "on the host", times);
  p->holders++;
}

/* The tensors at the address, and who has acquired them as a whole. */
static void write_tensor(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  place_t *p = user;
  uint64_t word = atomic_load(&t->word);
  const char *name = gmi_tensor_base(m, t)->name;
  fputs("tensor: ", p->file);
  gmi_name_print(p->file, name);
  fprintf(p->file, ", offset %" PRIu64 " of its %" PRIu64 " bytes\n", p->offset - t->offset, t->size);
  for (uint32_t mode = GEMINI_READ; mode <= GEMINI_READ_WRITE; mode++) {
    uint64_t users = gmi_tensor_field_users(word, mode);
    if (users) write_range(p, t->size, 0, name, mode, GEMINI_TIER_DEVICE, users);
  }
}

/* All other acquires have leases: of parts of tensors, of arenas, and on the host. */
static void write_lease(const gmi_lease_t *lease, void *user) {
  place_t *p = user;
  gmi_manager_t *m = p->m;
  const gmi_lease_key_t *key = &lease->key;
  uint64_t start = key->offset;
  const gmi_arena_t *arena;
  const char *name;
  if (key->object >> 60 == GMI_HANDLE_TENSOR) {
    gmi_tensor_t *t = gmi_tensor_get(m, gmi_handle_of(key->object));
    if (!t) return;
    arena = gmi_arena_at(m, t->arena);
    start += t->offset;
    name = gmi_tensor_base(m, t)->name;
  } else {
    arena = gmi_arena_get(m, gmi_handle_of(key->object));
    if (!arena) return;
    name = arena->name;
  }
  uint32_t store = gmi_arena_is_sharded(arena) ? arena->index : arena->store; /* a reusing arena has the same bytes */
  if (store != p->arena->index || p->offset < start || p->offset - start >= key->size) return;
  write_range(p, key->size, key->offset, name, key->mode, key->tier, lease->count);
}

static void write_chunk(place_t *p) {
  gmi_manager_t *m = p->m;
  if (!atomic_load(&m->cut.chunk_bytes)) {
    fputs("bytes: nothing has been used yet; all reads as zero\n", p->file);
    return;
  }
  uint64_t index = p->offset >> m->cut.chunk_shift;
  const gmi_chunk_t *c = &p->arena->chunks[index];
  fprintf(p->file, "chunk: %" PRIu64 " of %u, %" PRIu64 " bytes from %p\n", index, atomic_load(&p->arena->chunk_count),
          atomic_load(&m->cut.chunk_bytes), (void *)(p->arena->base + (index << m->cut.chunk_shift)));
  fputs("bytes:", p->file);
  if (gmi_chunk_has(c, GMI_VALID_DEVICE)) fputs(" on the device", p->file);
  if (gmi_chunk_has(c, GMI_VALID_HOST)) fputs(" on the host", p->file);
  if (gmi_chunk_has(c, GMI_VALID_FILE)) fputs(" in a file", p->file);
  if (gmi_chunk_has(c, GMI_VALID_SLICES)) fputs(" in the slices of the ranks", p->file);
  if (gmi_chunk_has(c, GMI_VALID_ZERO)) fputs(" nowhere: they read as zero", p->file);
  fputc('\n', p->file);
  if (gmi_chunk_is_pinned(c)) fputs("pinned: its chunk stays on the device\n", p->file);
  if (gmi_chunk_deferred(c)) fputs("updates: one of its chunk has yet to be queued\n", p->file);
  if (gmi_chunk_in_graphs(c)) fputs("graphs: one has its host address\n", p->file);
}

static void write_arena(place_t *p) {
  gmi_manager_t *m = p->m;
  fprintf(p->file, "arena: ");
  gmi_name_print(p->file, p->arena->name);
  fprintf(p->file, ", offset %" PRIu64 " of the %" PRIu64 " bytes that are used\n", p->offset,
          atomic_load(&p->arena->size));
  if (p->offset >= atomic_load(&p->arena->size)) return;
  gmi_arena_each(m, p->arena, p->offset, 1, write_tensor, p);
  gmi_arena_t *gradients = gmi_arena_is_sharded(p->arena) ? NULL : gmi_arena_reuser(m, p->arena);
  if (gradients) gmi_arena_each(m, gradients, p->offset, 1, write_tensor, p);
  write_chunk(p);
  gmi_leases_each(&m->leases, write_lease, p);
  if (!p->holders) fputs("acquired: no; it must not be used now\n", p->file);
}

static void write_host(place_t *p, uint64_t slot) {
  const gmi_chunk_t *c = p->m->host.slots[slot].chunk;
  fprintf(p->file, "host memory: slot %" PRIu64, slot);
  if (c) {
    fprintf(p->file, ", of chunk %u of arena ", c->index);
    gmi_name_print(p->file, gmi_chunk_arena(p->m, c)->name);
  } else {
    fputs(p->m->host.slots[slot].block   ? ", of gemini_host_alloc()"
          : p->m->host.slots[slot].spare ? ", of values that are speculated"
                                         : ", free",
          p->file);
  }
  fputc('\n', p->file);
}

static void explain(gmi_manager_t *m, FILE *file, void *user) {
  uint64_t address = (uint64_t)(uintptr_t)user, host = (uint64_t)(uintptr_t)m->host.base;
  uint64_t slot_bytes = gmi_tier_unit_bytes(m, GEMINI_TIER_HOST);
  uint64_t heap = (uint64_t)(uintptr_t)m->nonmodel.base;
  place_t p = { .m = m, .file = file };
  gmi_lock(m, "gemini_explain_address");
  fprintf(file, "address: %#" PRIx64 "\n", address);
  p.arena = gmi_address_arena(m, address);
  if (p.arena) {
    p.offset = address - (uint64_t)(uintptr_t)p.arena->base;
    write_arena(&p);
  } else if (host && slot_bytes && address >= host && (address - host) / slot_bytes < m->host.slot_count) {
    write_host(&p, (address - host) / slot_bytes);
  } else if (heap && address >= heap && address - heap < m->nonmodel.range) {
    fputs("non-model memory: the range of gemini_alloc()\n", file);
  } else {
    fputs("none: no memory of this manager\n", file);
  }
  gmi_unlock(m);
}

gemini_status_t gemini_explain_address(gemini_manager_t mgr, const void *address, uint64_t size_bytes, char *text_out,
                                       uint64_t *length_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  void *at = (void *)(uintptr_t)address;
  API_RETURN(m ? gmi_text_out(m, explain, at, size_bytes, text_out, length_out) : GEMINI_ERR_HANDLE);
}
