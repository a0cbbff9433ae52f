/* Leases: the record of which ranges are acquired, under the names that callers gave them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A release must name a range exactly as one acquire did: object, offset, size, mode and tier. Acquires of a whole
 * tensor on the device, the frequent case, are counted in the tensor's own word (gmi_tensor.word). All other acquires
 * are counted here.
 *
 * Threads: any. All leases of an object are in the same one of several tables. Each table has its own lock, so that
 * threads that use different objects rarely contend. No other lock is taken while a table's lock is held. */
#ifndef GMI_LEASE_H
#define GMI_LEASE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

typedef struct gmi_lease_key {
  uint64_t object;       /* handle of a tensor or an arena */
  uint64_t offset, size; /* bytes in the object; a size of 0 ("whole object") has been replaced by the object's size */
  uint16_t mode, tier;   /* GEMINI_READ..., GEMINI_TIER_* */
  uint32_t graph_1;      /* index + 1 of the graph whose capture acquired the range; 0 = no capture */
} gmi_lease_key_t;

/* Invariant: claimed <= count. */
typedef struct gmi_lease {
  gmi_lease_key_t key;
  uint32_t count;   /* acquires not yet released; 0 = the entry is empty */
  uint32_t claimed; /* acquires that a release under way has claimed */
} gmi_lease_t;

typedef struct gmi_lease_table {
  _Alignas(128) pthread_mutex_t lock; /* guards the fields below; 128 bytes against false sharing between tables */
  gmi_lease_t *entries;               /* [capacity] */
  uint64_t capacity;                  /* a power of two, or 0 */
  uint64_t used;                      /* entries that are not empty: at most half of capacity */
} gmi_lease_table_t;

enum { GMI_LEASE_TABLES = 16 };
typedef struct gmi_leases {
  gmi_lease_table_t tables[GMI_LEASE_TABLES]; /* chosen by a hash of the object */
} gmi_leases_t;

void gmi_leases_init(gmi_leases_t *leases);
void gmi_leases_free(gmi_leases_t *leases);
/* Counts one more acquire. On failure nothing has changed. OOM_SYSTEM: no memory for the entry. BUSY: the range already
 * has 2^32 - 1 acquires. */
gemini_status_t gmi_lease_add(gmi_leases_t *leases, const gmi_lease_key_t *key);
/* A release has two steps, so that a whole batch is checked before its first acquire ends. gmi_lease_claim() reserves
 * one acquire that no other release has claimed; it returns false if there is none. Then gmi_lease_end() ends the
 * acquire, or gmi_lease_unclaim() gives the claim up. */
bool gmi_lease_claim(gmi_leases_t *leases, const gmi_lease_key_t *key);
void gmi_lease_unclaim(gmi_leases_t *leases, const gmi_lease_key_t *key);
void gmi_lease_end(gmi_leases_t *leases, const gmi_lease_key_t *key);
/* Copies one lease of the object, or with object 0 of any object. Returns false if there is none. */
bool gmi_lease_find(gmi_leases_t *leases, uint64_t object, gmi_lease_t *lease_out);
/* Calls fn for every lease, with the lock of its table held. */
void gmi_leases_each(gmi_leases_t *leases, void (*fn)(const gmi_lease_t *lease, void *user), void *user);
/* Removes all leases that a graph's capture holds. */
void gmi_lease_drop_graph(gmi_leases_t *leases, uint32_t graph_1);

#endif
