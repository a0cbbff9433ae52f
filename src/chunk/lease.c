/* Leases: which ranges are acquired, exactly as their callers named them.
 * SPDX-License-Identifier: Apache-2.0 */
#include "chunk/lease.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"

enum { FIRST_CAPACITY = 64 };

void gmi_leases_init(gmi_leases_t *leases) {
  memset(leases, 0, sizeof *leases);
  pthread_mutex_init(&leases->lock, NULL);
}

void gmi_leases_free(gmi_leases_t *leases) {
  free(leases->entries);
  pthread_mutex_destroy(&leases->lock);
}

static bool same(const gmi_lease_key_t *a, const gmi_lease_key_t *b) {
  return a->object == b->object && a->offset == b->offset && a->size == b->size && a->mode == b->mode &&
         a->tier == b->tier && a->graph_1 == b->graph_1;
}

static uint64_t hash(const gmi_lease_key_t *key) {
  const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
  uint64_t h = key->object * odd;
  h = (h ^ h >> 29 ^ key->offset) * odd;
  h = (h ^ h >> 29 ^ key->size) * odd;
  h = (h ^ h >> 29 ^ ((uint64_t)key->graph_1 << 32 | (uint64_t)key->tier << 16 | key->mode)) * odd;
  return h ^ h >> 32;
}

/* The key's entry, or the empty one where it belongs; the table has room. With the lock held, as all that follow. */
static gmi_lease_t *find(const gmi_leases_t *l, const gmi_lease_key_t *key) {
  uint64_t at = hash(key) & (l->capacity - 1);
  while (l->entries[at].count && !same(&l->entries[at].key, key)) at = (at + 1) & (l->capacity - 1);
  return &l->entries[at];
}

static bool grow(gmi_leases_t *l) {
  gmi_leases_t larger = { .capacity = l->capacity ? l->capacity * 2 : FIRST_CAPACITY };
  larger.entries = calloc(larger.capacity, sizeof *larger.entries);
  if (!larger.entries) return false;
  for (uint64_t i = 0; i < l->capacity; i++)
    if (l->entries[i].count) *find(&larger, &l->entries[i].key) = l->entries[i];
  free(l->entries);
  l->entries = larger.entries;
  l->capacity = larger.capacity;
  return true;
}

/* Empties an entry, and moves up those behind it that a search would no longer find (Knuth, The Art of Computer
 * Programming, volume 3, section 6.4, algorithm R). */
static void empty(gmi_leases_t *l, gmi_lease_t *entry) {
  uint64_t mask = l->capacity - 1, hole = (uint64_t)(entry - l->entries);
  l->used--;
  for (uint64_t at = (hole + 1) & mask; l->entries[at].count; at = (at + 1) & mask) {
    uint64_t home = hash(&l->entries[at].key) & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its search begins behind the hole */
    l->entries[hole] = l->entries[at];
    hole = at;
  }
  l->entries[hole].count = 0;
}

gemini_status_t gmi_lease_add(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  gmi_leases_t *l = leases;
  gemini_status_t status = GEMINI_OK;
  pthread_mutex_lock(&l->lock);
  gmi_lease_t *entry = l->used * 2 < l->capacity || grow(l) ? find(l, key) : NULL;
  if (!entry) {
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to note that a range is acquired");
  } else if (!entry->count) {
    *entry = (gmi_lease_t){ .key = *key, .count = 1 };
    l->used++;
  } else if (entry->count == UINT32_MAX) {
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "a range is acquired %u times, the limit", entry->count);
  } else {
    entry->count++;
  }
  pthread_mutex_unlock(&l->lock);
  return status;
}

bool gmi_lease_claim(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  pthread_mutex_lock(&leases->lock);
  gmi_lease_t *entry = leases->capacity ? find(leases, key) : NULL;
  bool found = entry && entry->claimed < entry->count;
  if (found) entry->claimed++;
  pthread_mutex_unlock(&leases->lock);
  return found;
}

void gmi_lease_unclaim(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  pthread_mutex_lock(&leases->lock);
  find(leases, key)->claimed--;
  pthread_mutex_unlock(&leases->lock);
}

void gmi_lease_end(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  pthread_mutex_lock(&leases->lock);
  gmi_lease_t *entry = find(leases, key);
  entry->claimed--;
  if (!--entry->count) empty(leases, entry);
  pthread_mutex_unlock(&leases->lock);
}

bool gmi_lease_find(gmi_leases_t *leases, uint64_t object, gmi_lease_t *lease_out) {
  bool found = false;
  pthread_mutex_lock(&leases->lock);
  for (uint64_t i = 0; leases->used && !found && i < leases->capacity; i++) {
    found = leases->entries[i].count && (!object || leases->entries[i].key.object == object);
    if (found) *lease_out = leases->entries[i];
  }
  pthread_mutex_unlock(&leases->lock);
  return found;
}

void gmi_lease_drop_graph(gmi_leases_t *leases, uint32_t graph_1) {
  pthread_mutex_lock(&leases->lock);
  /* An entry that moves up into the hole is looked at in the next round; one that wraps around is before it already. */
  for (bool dropped = true; dropped;) {
    dropped = false;
    for (uint64_t i = 0; leases->used && i < leases->capacity; i++) {
      if (!leases->entries[i].count || leases->entries[i].key.graph_1 != graph_1) continue;
      empty(leases, &leases->entries[i]);
      dropped = true;
    }
  }
  pthread_mutex_unlock(&leases->lock);
}
