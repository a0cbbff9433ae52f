/* What the bytes that parameters and gradients share hold. SPDX-License-Identifier: Apache-2.0 */
#include "chunk/content.h"

static bool names_gradient(const gmi_range_t *r) { return r->arena->store != r->arena->index; }

void gmi_range_each(gmi_manager_t *m, const gmi_range_t *r, void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user),
                    void *user) {
  if (r->tensor) fn(m, gmi_tensor_base(m, r->tensor), user);
  else if (r->size) gmi_arena_each(m, gmi_arena_at(m, r->arena->store), r->offset, r->size, fn, user);
}

static bool inside(const gmi_range_t *r, const gmi_tensor_t *t) {
  return t->offset >= r->offset && t->offset + t->size <= r->offset + r->size;
}

typedef struct {
  const gmi_range_t *range;
  bool overwrites, flips;
  const gmi_tensor_t *wrong; /* the first one */
} look_t;
static void look(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  look_t *c = user;
  (void)m;
  if (!(atomic_load(&t->word) & GMI_TENSOR_GRADIENT) == !names_gradient(c->range)) return;
  if (c->overwrites && inside(c->range, t)) c->flips = true;
  else if (!c->wrong) c->wrong = t;
}
gmi_content_t gmi_range_content(gmi_manager_t *m, const gmi_range_t *r, bool overwrites) {
  look_t c = { .range = r, .overwrites = overwrites };
  if (!gmi_range_shares(r)) return GMI_CONTENT_FINE;
  gmi_range_each(m, r, look, &c);
  if (!c.wrong) return c.flips ? GMI_CONTENT_FLIPS : GMI_CONTENT_FINE;
  gmi_fail(GEMINI_ERR_STATE, 0,
           names_gradient(r)
               ? "gradient of %s cannot be used: it has not been written whole since its parameter was"
               : "parameter %s cannot be used: its gradient has taken its bytes until the parameter is written again",
           c.wrong->name);
  return GMI_CONTENT_WRONG;
}

/* Read-modify-writes, as acquires change the counts in the same words. */
static void take(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  const gmi_range_t *r = user;
  (void)m;
  if (!inside(r, t)) return;
  if (names_gradient(r)) atomic_fetch_or(&t->word, GMI_TENSOR_GRADIENT);
  else atomic_fetch_and(&t->word, ~GMI_TENSOR_GRADIENT);
}
void gmi_range_flip(gmi_manager_t *m, const gmi_range_t *r) {
  gmi_range_t range = *r;
  gmi_range_each(m, r, take, &range);
}
void gmi_range_written(gmi_manager_t *m, const gmi_range_t *r) {
  gmi_range_t range = *r;
  if (gmi_range_shares(r) && r->size)
    gmi_arena_each(m, gmi_arena_at(m, r->arena->store), r->offset, r->size, take, &range);
}
