/* What the bytes that parameters and gradients share hold. SPDX-License-Identifier: Apache-2.0 */
#include "chunk/content.h"

static bool names_gradient(const gmi_range_t *r) { return r->arena->store != r->arena->index; }

void gmi_range_each(gmi_manager_t *m, const gmi_range_t *r, void (*fn)(gmi_manager_t *m, gmi_tensor_t *t, void *user),
                    void *user) {
  if (r->size) gmi_arena_each(m, gmi_arena_at(m, r->arena->store), r->offset, r->size, fn, user);
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

typedef struct {
  uint64_t begin, end;
  const gmi_tensor_t *taken; /* one that holds a gradient */
  bool inside;               /* of one */
} place_t;
static void look_at_place(gmi_manager_t *m, gmi_tensor_t *t, void *user) {
  place_t *p = user;
  (void)m;
  if (!(atomic_load(&t->word) & GMI_TENSOR_GRADIENT)) return;
  p->taken = t;
  p->inside |= t->offset <= p->begin && p->end <= t->offset + t->size;
}
gemini_status_t gmi_content_of_place(gmi_manager_t *m, gmi_arena_t *a, uint64_t offset, uint64_t size,
                                     bool *gradient_out) {
  place_t p = { .begin = offset, .end = offset + size };
  if (a->reused) gmi_arena_each(m, a, offset, size, look_at_place, &p);
  *gradient_out = p.inside;
  if (!p.taken || p.inside) return GEMINI_OK;
  return gmi_fail(
      GEMINI_ERR_STATE, 0,
      "%llu bytes at offset %llu of arena %s are in part those of parameter %s, which its gradient has taken",
      (unsigned long long)size, (unsigned long long)offset, a->name, p.taken->name);
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
