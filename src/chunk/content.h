/* Parameters and the gradients that reuse their bytes: do the bytes of a range hold what it names?
 * SPDX-License-Identifier: Apache-2.0
 *
 * The registered tensor's word says what its bytes hold (GMI_TENSOR_GRADIENT). Tensors that overlap (tied weights) hold
 * the same: one is not written as what it is not while a part of another one would stay. The flag changes under the
 * manager's lock, which is held in every call below. */
#ifndef GMI_CONTENT_H
#define GMI_CONTENT_H

#include "chunk/arena.h"

/* Does another arena share the range's bytes? If not, they always hold what the range names. */
static inline bool gmi_range_shares(const gmi_range_t *r) {
  return r->arena->store != r->arena->index || r->arena->reused;
}

typedef enum {
  GMI_CONTENT_FINE,
  GMI_CONTENT_FLIPS, /* not all hold it, but they will: those tensors lie in the range, which is overwritten whole */
  GMI_CONTENT_WRONG  /* some tensor does not hold it */
} gmi_content_t;
/* Looks at all tensors that the range touches. overwrites: the call
 * overwrites the range. WRONG: the error is recorded. */
gmi_content_t gmi_range_content(gmi_manager_t *m, const gmi_range_t *r, bool overwrites);
/* Calls fn for every registered tensor whose bytes the range touches. */
void gmi_range_each(gmi_manager_t *m, const gmi_range_t *r, void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user),
                    void *user);
/* Do the bytes of a tensor that is to be registered there hold a gradient? STATE: some do, and not all. */
gemini_status_t gmi_content_of_place(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size,
                                     bool *gradient_out);
/* After FLIPS: the tensors that it was about hold what the range names. */
void gmi_range_flip(gmi_manager_t *m, const gmi_range_t *r);
/* The bytes of the range have been overwritten: the same for all tensors that lie in it, tied ones of a tensor too. */
void gmi_range_written(gmi_manager_t *m, const gmi_range_t *r);

#endif
