/* Leases: which ranges are acquired, exactly as their callers named them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A release must name a range exactly as one acquire did: object, offset, size, mode and tier. Acquires of a whole
 * tensor on the device, the frequent case, are counted in the tensor's own word (gmi_tensor.word). All others are
 * counted here.
 *
 * Threads: any. The leases of an object are in one of several tables, each with a lock of its own, so that threads with
 * objects of their own seldom meet. These locks are the innermost: no other lock is taken while one is held. */
#ifndef GMI_LEASE_H
#define GMI_LEASE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

typedef struct gmi_lease_key {
  uint64_t object;       /* handle of a tensor or an arena */
  uint64_t offset, size; /* bytes in the object; the size is never the 0 that names the whole object */
  uint16_t mode, tier;   /* GEMINI_READ..., GEMINI_TIER_* */
  uint32_t graph_1;      /* index of the graph whose capture acquired it + 1; 0 = none did */
} gmi_lease_key_t;

typedef struct gmi_lease {
  gmi_lease_key_t key;
  uint32_t count;   /* acquires not yet released; 0 = the entry is empty */
  uint32_t claimed; /* of these, by releases under way */
} gmi_lease_t;

typedef struct gmi_lease_table {
  _Alignas(128) pthread_mutex_t lock; /* Guards what follows. A cache line of its own, and its neighbour's. */
  gmi_lease_t *entries;               /* [capacity], a hash table with linear probing */
  uint64_t capacity;                  /* a power of two, or 0 */
  uint64_t used;                      /* entries that are not empty: at most half of capacity */
} gmi_lease_table_t;

enum { GMI_LEASE_TABLES = 16 };
typedef struct gmi_leases {
  gmi_lease_table_t tables[GMI_LEASE_TABLES]; /* by the object */
} gmi_leases_t;

void gmi_leases_init(gmi_leases_t *leases);
void gmi_leases_free(gmi_leases_t *leases);
/* Counts one acquire more. OOM_SYSTEM: no memory for the entry. BUSY: 2^32 - 1 are counted. Nothing changed then. */
gemini_status_t gmi_lease_add(gmi_leases_t *leases, const gmi_lease_key_t *key);
/* A release in two steps, so that a batch can be checked whole before the first of it ends: a claim finds an acquire
 * that nothing has claimed yet (false: there is none), then the claim either ends the acquire or is given up. */
bool gmi_lease_claim(gmi_leases_t *leases, const gmi_lease_key_t *key);
void gmi_lease_unclaim(gmi_leases_t *leases, const gmi_lease_key_t *key);
void gmi_lease_end(gmi_leases_t *leases, const gmi_lease_key_t *key);
/* Finds any lease of an object, or with object 0 any lease at all. False: there is none. */
bool gmi_lease_find(gmi_leases_t *leases, uint64_t object, gmi_lease_t *lease_out);
/* Ends all leases that a graph's capture holds. */
void gmi_lease_drop_graph(gmi_leases_t *leases, uint32_t graph_1);

#endif
