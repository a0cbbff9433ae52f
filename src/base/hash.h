/* Hashes of names and numbers. Not for secrets. SPDX-License-Identifier: Apache-2.0
 *
 * FNV-1a of 64 bits: Fowler, Noll and Vo, IETF draft-eastlake-fnv. Pure functions: any thread. */
#ifndef GMI_HASH_H
#define GMI_HASH_H

#include <stdint.h>

#define GMI_HASH_NOTHING UINT64_C(14695981039346656037)

/* Extends hash by a number. As of FNV-1a where it is a byte. */
static inline uint64_t gmi_hash(uint64_t hash, uint64_t number) { return (hash ^ number) * UINT64_C(1099511628211); }

/* Extends hash by the bytes of a text. */
static inline uint64_t gmi_hash_text(uint64_t hash, const char *text) {
  for (; *text; text++) hash = gmi_hash(hash, (unsigned char)*text);
  return hash;
}

#endif
