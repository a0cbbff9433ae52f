/* Which chunk of the cache leaves first: the policies of GEMINI_CACHE_*. Pure functions of what is noted in each chunk.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The cache are the chunks of operators that are chosen at run time, as the experts of a mixture. No policy knows the
 * next use of one; each guesses from the uses so far. A *pass* is an iteration of the caller's, and a *position* in it
 * the number of the plan's operators before the use, so experts of one layer have one position. docs/policy.md says
 * what each policy assumes. */
#ifndef GMI_CACHE_H
#define GMI_CACHE_H

#include <stdint.h>

#include "gemini.h"

enum { GMI_CACHE_PRIORITY_MOST = 255 };

/* What is noted in a chunk. All zero: it was never used by a chosen operator. */
typedef struct gmi_cache_note {
  uint64_t pass;     /* of its last use; 0: none */
  uint64_t hinted;   /* the pass in which the caller said that it will be used, if it was not used since; 0: none */
  uint32_t position; /* of its last use */
  uint32_t priority; /* the caller's, 0 to GMI_CACHE_PRIORITY_MOST: chunks with a higher one leave later */
  uint32_t reserved;
  uint32_t frequency; /* passes that used it, in 65536ths, of which those long past count less; as of pass */
} gmi_cache_note_t;

/* Where the caller is. */
typedef struct gmi_cache_now {
  uint64_t pass;
  uint32_t position;
  uint32_t policy; /* GEMINI_CACHE_* */
} gmi_cache_now_t;

/* The chunk is used now; now->policy does not matter. */
void gmi_cache_use(gmi_cache_note_t *note, const gmi_cache_now_t *now);

/* Of two chunks the one with the larger rank is to leave first, and of equal ones the one used longest ago. 0: one that
 * the caller has said will be used in this pass. */
uint64_t gmi_cache_rank(const gmi_cache_note_t *note, const gmi_cache_now_t *now);

#endif
