/* What the sources of gathers share: records of iterations, kinds and their plans.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_GATHERS_KINDS_H
#define GMI_GATHERS_KINDS_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "chunk/group_check.h"
#include "core/manager.h"
#include "policy/policy.h"
#include "tracer/history.h"

enum { KINDS = 4 };
_Static_assert((int)KINDS <= (int)GMI_HISTORY_KINDS, "a kind's number is one of the history");

typedef struct {
  uint64_t hash; /* of name and phase: equal names on all ranks have equal ones */
  uint32_t use_first, use_count;
  uint32_t op; /* its index in the trace of the iteration; ranks may differ in it */
  uint32_t reserved;
} op_t;
/* Operators in order; a use is an arena's index << 32 | a chunk's, sorted and unique for each operator that has
 * ended. */
typedef struct {
  op_t *ops;
  uint64_t *uses;
  uint32_t op_count, op_capacity, use_count, use_capacity;
} record_t;

typedef struct {
  uint64_t *chunks; /* [chunk_count] by their numbers in the plan */
  uint32_t chunk_count, reserved;
  gmi_gather_plan_t plan; /* empty: the group has none */
  gmi_journal_t *journal; /* what the ranks compare of such an iteration; NULL: the group has no arenas */
} group_plan_t;
typedef struct {
  bool used;
  uint64_t last_used, runs;
  record_t record;
  group_plan_t groups[GMI_GROUPS];
} kind_t;

/* What the end of the iteration has done together with other ranks, which do it once. A call that fails keeps this, and
 * the next one goes on behind it. */
typedef struct {
  uint64_t *agreed; /* [count] values on which the ranks have agreed, in order */
  uint64_t count, next;
  uint32_t posted; /* bit per group */
  bool done;       /* gmi_gathers_end() has succeeded; agreed is of gmi_gathers_choose() */
} ending_t;

typedef struct gmi_gathers {
  record_t record;    /* of this iteration */
  ending_t ending;    /* likewise */
  uint32_t use_mark;  /* uses from here on are of the open operator */
  uint64_t op_hash;   /* of the open operator */
  uint32_t on_demand; /* bit per group: the last operator that began gathers its chunks when it acquires them */
  bool lost;          /* no memory for the record: of this iteration, ranks have nothing to compare, and gave up */
  bool noted;         /* the other ranks can see that this iteration has departed */
  bool changed;       /* it has come to follow another kind, whose plan does not know of all that is gathered */
  uint32_t active;    /* the kind that this iteration follows, or GMI_NONE */
  uint64_t iterations;
  uint32_t ended; /* the kind of the last iteration, or GMI_NONE */
  bool ended_new; /* it took the record of that iteration */
  kind_t kinds[KINDS];
  gmi_history_t history; /* kinds of the last iterations */
} gmi_gathers_t;

int gmi_gathers_by_use(const void *a, const void *b);
static inline const uint64_t *find_use(const uint64_t *sorted, uint32_t count, uint64_t use) {
  return count ? bsearch(&use, sorted, count, sizeof use, gmi_gathers_by_use) : NULL;
}

/* Of the iteration that ends: its own, or that of the kind which has taken it. */
static inline const record_t *record_of(const gmi_gathers_t *g) {
  return g->ended != GMI_NONE && g->ended_new ? &g->kinds[g->ended].record : &g->record;
}

static inline gemini_status_t no_memory(const record_t *r) {
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to plan the gathers of %u operators", r->op_count);
}
#endif
