/* Leases: a count for each range that callers have acquired.
 * SPDX-License-Identifier: Apache-2.0
 *
 * 16 hash tables with open addressing and linear probing, each with a mutex. The object chooses the table, so that a
 * search for any lease of one object looks into one table. Every function runs on the caller's thread and holds one
 * table's lock for a few probes; there are no atomics, as a lock that is rarely contended costs about as much as the
 * compare-and-swap it replaces. Tables only grow: a program acquires about the same ranges in each iteration. */
#include "core/lease.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"

enum { FIRST_CAPACITY = 64 };

void gmi_leases_init(gmi_leases_t *leases) {
  memset(leases, 0, sizeof *leases);
  for (int i = 0; i < GMI_LEASE_TABLES; i++) pthread_mutex_init(&leases->tables[i].lock, NULL);
}

void gmi_leases_free(gmi_leases_t *leases) {
  for (int i = 0; i < GMI_LEASE_TABLES; i++) {
    free(leases->tables[i].entries);
    pthread_mutex_destroy(&leases->tables[i].lock);
  }
}

/* The upper bits of a product by an odd constant depend on all lower bits of the object (Fibonacci hashing). */
static gmi_lease_table_t *table_of(gmi_leases_t *leases, uint64_t object) {
  return &leases->tables[object * UINT64_C(0x9e3779b97f4a7c15) >> 32 & (GMI_LEASE_TABLES - 1)];
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

/* Returns the key's entry, or the empty entry where it belongs. Ends because at least half of the entries are empty.
 * Called with the table's lock held, as are grow() and empty(). */
static gmi_lease_t *find(const gmi_lease_table_t *l, const gmi_lease_key_t *key) {
  uint64_t at = hash(key) & (l->capacity - 1);
  while (l->entries[at].count && !same(&l->entries[at].key, key)) at = (at + 1) & (l->capacity - 1);
  return &l->entries[at];
}

/* Doubles the table. On failure (no memory) the table is unchanged and remains usable. */
static bool grow(gmi_lease_table_t *l) {
  gmi_lease_table_t larger = { .capacity = l->capacity ? l->capacity * 2 : FIRST_CAPACITY };
  larger.entries = calloc(larger.capacity, sizeof *larger.entries);
  if (!larger.entries) return false;
  for (uint64_t i = 0; i < l->capacity; i++)
    if (l->entries[i].count) *find(&larger, &l->entries[i].key) = l->entries[i];
  free(l->entries);
  l->entries = larger.entries;
  l->capacity = larger.capacity;
  return true;
}

/* Empties an entry, and moves later entries of the probe sequence into the hole where a search would otherwise stop
 * before it finds them (Knuth, The Art of Computer Programming, volume 3, section 6.4, algorithm R). Tombstones would
 * be simpler, but would fill a table whose ranges change, and searches for absent keys would get slower. */
static void empty(gmi_lease_table_t *l, gmi_lease_t *entry) {
  uint64_t mask = l->capacity - 1, hole = (uint64_t)(entry - l->entries);
  l->used--;
  for (uint64_t at = (hole + 1) & mask; l->entries[at].count; at = (at + 1) & mask) {
    uint64_t home = hash(&l->entries[at].key) & mask;
    if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its probe sequence begins behind the hole */
    l->entries[hole] = l->entries[at];
    hole = at;
  }
  l->entries[hole].count = 0;
}

gemini_status_t gmi_lease_add(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  gmi_lease_table_t *l = table_of(leases, key->object);
  gemini_status_t status = GEMINI_OK;
  pthread_mutex_lock(&l->lock);
  gmi_lease_t *entry = l->used * 2 < l->capacity || grow(l) ? find(l, key) : NULL;
  if (!entry) {
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to record the acquire of a range");
  } else if (!entry->count) {
    *entry = (gmi_lease_t){ .key = *key, .count = 1 };
    l->used++;
  } else if (entry->count == UINT32_MAX) {
    status = gmi_fail(GEMINI_ERR_BUSY, 0, "the range is acquired %u times with this mode and tier, which is the limit",
                      entry->count);
  } else {
    entry->count++;
  }
  pthread_mutex_unlock(&l->lock);
  return status;
}

bool gmi_lease_claim(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  gmi_lease_table_t *l = table_of(leases, key->object);
  pthread_mutex_lock(&l->lock);
  gmi_lease_t *entry = l->capacity ? find(l, key) : NULL;
  bool found = entry && entry->claimed < entry->count; /* each acquire is released once, also by concurrent releases */
  if (found) entry->claimed++;
  pthread_mutex_unlock(&l->lock);
  return found;
}

/* A claimed entry cannot become empty before its claim ends, so find() returns that entry here and below. */
void gmi_lease_unclaim(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  gmi_lease_table_t *l = table_of(leases, key->object);
  pthread_mutex_lock(&l->lock);
  find(l, key)->claimed--;
  pthread_mutex_unlock(&l->lock);
}

void gmi_lease_end(gmi_leases_t *leases, const gmi_lease_key_t *key) {
  gmi_lease_table_t *l = table_of(leases, key->object);
  pthread_mutex_lock(&l->lock);
  gmi_lease_t *entry = find(l, key);
  entry->claimed--;
  if (!--entry->count) empty(l, entry);
  pthread_mutex_unlock(&l->lock);
}

static bool find_object(gmi_lease_table_t *l, uint64_t object, gmi_lease_t *lease_out) {
  bool found = false;
  pthread_mutex_lock(&l->lock);
  for (uint64_t i = 0; l->used && !found && i < l->capacity; i++) {
    found = l->entries[i].count && (!object || l->entries[i].key.object == object);
    if (found) *lease_out = l->entries[i];
  }
  pthread_mutex_unlock(&l->lock);
  return found;
}

bool gmi_lease_find(gmi_leases_t *leases, uint64_t object, gmi_lease_t *lease_out) {
  if (object) return find_object(table_of(leases, object), object, lease_out);
  int i = 0;
  while (i < GMI_LEASE_TABLES && !find_object(&leases->tables[i], 0, lease_out)) i++;
  return i < GMI_LEASE_TABLES;
}

void gmi_leases_each(gmi_leases_t *leases, void (*fn)(const gmi_lease_t *lease, void *user), void *user) {
  for (int table = 0; table < GMI_LEASE_TABLES; table++) {
    gmi_lease_table_t *l = &leases->tables[table];
    pthread_mutex_lock(&l->lock);
    for (uint64_t i = 0; l->used && i < l->capacity; i++)
      if (l->entries[i].count) fn(&l->entries[i], user);
    pthread_mutex_unlock(&l->lock);
  }
}

static void drop_graph(gmi_lease_table_t *l, uint32_t graph_1) {
  pthread_mutex_lock(&l->lock);
  /* empty() can move an entry into index i, which this round has passed; the loop therefore repeats until a whole round
   * removes nothing. */
  for (bool dropped = true; dropped;) {
    dropped = false;
    for (uint64_t i = 0; l->used && i < l->capacity; i++) {
      if (!l->entries[i].count || l->entries[i].key.graph_1 != graph_1) continue;
      empty(l, &l->entries[i]);
      dropped = true;
    }
  }
  pthread_mutex_unlock(&l->lock);
}
void gmi_lease_drop_graph(gmi_leases_t *leases, uint32_t graph_1) {
  for (int i = 0; i < GMI_LEASE_TABLES; i++) drop_graph(&leases->tables[i], graph_1);
}
