/* Belady's MIN over a cycle: decides which accesses find their chunk on the device such that as few as possible do not.
 * Called by plan.c for every candidate plan.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Between two consecutive accesses a chunk is either kept or dropped. A kept chunk occupies a frame in every stage
 * between the two accesses. So an iteration is a circle with a capacity at each stage, a kept chunk is an arc of that
 * circle, and minimising fetches means choosing as many arcs as the capacities allow.
 *
 * 1. MIN (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
 *    1966) runs over one iteration after another and evicts the chunk whose next use is furthest away. MIN is optimal
 *    over any number of iterations, so if its state repeats after one iteration, that iteration is the best plan of one
 *    iteration.
 * 2. The state may repeat only after several iterations: three chunks used in turn with two frames give 1, 2, 1, 2
 *    fetches. Then the problem is solved as call control in a ring (U. Adamy, C. Ambuehl, R. S. Anand, T. Erlebach,
 *    "Call control in rings", Algorithmica 47(3), 2007), which decides whether k arcs can be kept: each round greedily
 *    takes the k arcs begun in one iteration that end first and that fit beside the arcs which the round before left
 *    open. From round to round the ends of the arcs only move outward, so the rounds reach either a fixed point, which
 *    is a plan, or a round that finds fewer than k arcs, which proves that no plan keeps k.
 *
 * A resident chunk is represented by the index of its next access, as a bit in a bitmap with summary levels. Indices
 * ascend with time within an iteration; those below the current access belong to the next iteration. So the furthest
 * next use is the highest bit below the current access or, if there is none, the highest bit of all. */
#include <stdlib.h>
#include <string.h>

#include "policy/model.h"

#define NONE UINT32_MAX
#define LEVELS 6 /* enough for 2^31 accesses: 64^6 > 2^31 */
#define CONVERGE_ROUNDS 4
/* The search for k stops after this many visits or rounds, whichever is more. The limit applies to each call and
 * does not depend on the planner's remaining work: making the same candidate twice must give the same plan. */
#define SEARCH_VISITS UINT64_C(4000000)
#define SEARCH_ROUNDS 16

/* A set of integers below bit_count. Level 0 has one bit per member; a bit of level l + 1 is set if and only if its
 * word of level l is not 0. Finding a neighbour looks at two words per level: O(log64 bit_count). */
typedef struct bits {
  uint64_t *level[LEVELS];
  uint32_t level_count, reserved;
} bits_t;

static uint64_t word_count(uint64_t bit_count) { return (bit_count + 63) / 64; }

static bool bits_make(bits_t *bits, uint32_t bit_count) {
  /* one bit more than members, so that bits_below() accepts end == bit_count */
  uint64_t total = 0, words = (uint64_t)bit_count + 1;
  memset(bits, 0, sizeof *bits);
  do {
    words = word_count(words);
    total += words;
    bits->level_count++;
  } while (words > 1);
  uint64_t *memory = calloc(total, sizeof *memory);
  if (memory == NULL) return false;
  words = (uint64_t)bit_count + 1;
  for (uint32_t l = 0; l < bits->level_count; l++) {
    bits->level[l] = memory;
    words = word_count(words);
    memory += words;
  }
  return true;
}

static bool bits_at(const bits_t *bits, uint32_t i) { return (bits->level[0][i >> 6] >> (i & 63) & 1) != 0; }

static void bits_set(bits_t *bits, uint32_t i) {
  for (uint32_t l = 0; l < bits->level_count; l++, i >>= 6) {
    uint64_t before = bits->level[l][i >> 6];
    bits->level[l][i >> 6] = before | UINT64_C(1) << (i & 63);
    if (before != 0) return;
  }
}

static void bits_clear(bits_t *bits, uint32_t i) {
  for (uint32_t l = 0; l < bits->level_count; l++, i >>= 6) {
    bits->level[l][i >> 6] &= ~(UINT64_C(1) << (i & 63));
    if (bits->level[l][i >> 6] != 0) return;
  }
}

/* Returns the highest set bit below end, or NONE. */
static uint32_t bits_below(const bits_t *bits, uint32_t end) {
  for (uint32_t l = 0; l < bits->level_count; l++, end >>= 6) {
    if ((end & 63) == 0) continue; /* no lower bit in this word; this also avoids a read behind the last word */
    uint64_t word = bits->level[l][end >> 6] & ((UINT64_C(1) << (end & 63)) - 1);
    if (word == 0) continue;
    uint32_t found = (end & ~UINT32_C(63)) + 63 - (uint32_t)__builtin_clzll(word);
    while (l-- > 0) found = (found << 6) + 63 - (uint32_t)__builtin_clzll(bits->level[l][found]);
    return found;
  }
  return NONE;
}

/* Returns the lowest set bit at begin or above, or NONE. begin may equal bit_count. */
static uint32_t bits_from(const bits_t *bits, uint32_t begin, uint64_t bit_count) {
  for (uint32_t l = 0; l < bits->level_count; l++) {
    if (begin >= bit_count) return NONE;
    uint64_t word = bits->level[l][begin >> 6] & ~UINT64_C(0) << (begin & 63);
    if (word != 0) {
      uint32_t found = (begin & ~UINT32_C(63)) + (uint32_t)__builtin_ctzll(word);
      while (l-- > 0) found = (found << 6) + (uint32_t)__builtin_ctzll(bits->level[l][found]);
      return found;
    }
    begin = (begin >> 6) + 1;
    bit_count = word_count(bit_count);
  }
  return NONE;
}

/* State of a sweep over an iteration, and scratch memory of the call-control search. Invariants: open is the number
 * of bits in clean, dirty, idle and kept together; the four are disjoint, because each access has one predecessor. */
typedef struct sweep {
  const gmi_model_t *model;
  uint32_t reduce, open;
  bits_t clean, dirty; /* resident chunks by the index of their next access */
  bits_t idle;         /* resident chunks that the next access overwrites: dropping one costs no fetch */
  bits_t kept;         /* call control only: arcs that the round before left open; this round must not drop them */
  bits_t starts;       /* the index of the first access of each stage that has accesses */
  uint64_t *hit;       /* accesses that hit in this iteration */
  uint64_t *saved;     /* copy of clean, dirty and idle at the begin of the iteration; in call control, of kept */
  uint8_t *is_dirty;   /* [chunk_count] 1: written since it was fetched */
  uint64_t hit_count, own_count; /* hits that save a fetch; own_count: those of them whose arc was not in kept */
} sweep_t;

static void sweep_free(sweep_t *s) {
  free(s->clean.level[0]);
  free(s->dirty.level[0]);
  free(s->idle.level[0]);
  free(s->kept.level[0]);
  free(s->starts.level[0]);
  free(s->hit);
  free(s->saved);
  free(s->is_dirty);
}

static bool sweep_make(sweep_t *s, const gmi_model_t *model, uint32_t reduce) {
  uint32_t count = model->access_count;
  memset(s, 0, sizeof *s);
  s->model = model, s->reduce = reduce;
  bool made = bits_make(&s->clean, count);
  made = bits_make(&s->dirty, count) && made;
  made = bits_make(&s->idle, count) && made;
  made = bits_make(&s->kept, count) && made;
  made = bits_make(&s->starts, count) && made;
  s->hit = calloc(word_count(count) + 1, sizeof *s->hit);
  s->saved = calloc(3 * word_count(count) + 1, sizeof *s->saved);
  s->is_dirty = calloc((size_t)model->facts->input->chunk_count + 1, 1);
  if (!made || s->hit == NULL || s->saved == NULL || s->is_dirty == NULL) {
    sweep_free(s);
    return false;
  }
  for (uint32_t j = 0; j < model->stage_count; j++)
    if (model->stage_first[j] < model->stage_first[j + 1]) bits_set(&s->starts, model->stage_first[j]);
  return true;
}

/* Frames left for chunks that this stage does not access, after its own chunks and the held-back frames are
 * subtracted. 0 at least: a stage always gets the frames that it needs itself. */
static uint32_t slack(const sweep_t *s, uint32_t stage) {
  uint32_t room = gmi_model_room(s->model, stage);
  uint32_t need = s->model->stage_first[stage + 1] - s->model->stage_first[stage];
  return room > need + (uint64_t)s->reduce ? room - need - s->reduce : 0;
}

/* The highest member below end of a and b together, or NONE. b may be NULL. */
static uint32_t furthest(const bits_t *a, const bits_t *b, uint32_t end) {
  uint32_t x = bits_below(a, end), y = b == NULL ? NONE : bits_below(b, end);
  if (x == NONE || y == NONE) return x == NONE ? y : x;
  return x > y ? x : y;
}

/* Drops one resident chunk that this stage does not access. Order of choice: an idle chunk (its drop costs no fetch);
 * then, among the chunks whose next use lies in the furthest stage, a clean one (its drop costs no write-back); then
 * the lowest index. first is the index of the current stage's first access; accesses below it come in the next
 * iteration and are therefore later than all others. */
static void drop_one(sweep_t *s, uint32_t first) {
  uint32_t count = s->model->access_count;
  uint32_t victim = furthest(&s->idle, NULL, first);
  if (victim == NONE) victim = furthest(&s->idle, NULL, count);
  if (victim != NONE) {
    bits_clear(&s->idle, victim);
  } else {
    uint32_t top = furthest(&s->clean, &s->dirty, first);
    if (top == NONE) top = furthest(&s->clean, &s->dirty, count);
    uint32_t begin = bits_below(&s->starts, top + 1);
    victim = bits_from(&s->clean, begin, count);
    if (victim != NONE && victim <= top) {
      bits_clear(&s->clean, victim);
    } else {
      bits_clear(&s->dirty, bits_from(&s->dirty, begin, count));
    }
  }
  s->open--;
}

/* Runs MIN over one iteration. In each stage: its accesses leave the sets (hits), then chunks are dropped until the
 * rest fit, then the stage's chunks enter the sets under their next access. Dropping comes before the insertion
 * because room excludes the stage's own chunks. With plain set, clean and dirty chunks are not distinguished: call
 * control counts arcs only. */
static void sweep_iteration(sweep_t *s, bool plain) {
  const gmi_model_t *model = s->model;
  memset(s->hit, 0, word_count(model->access_count) * sizeof *s->hit);
  s->hit_count = s->own_count = 0;
  for (uint32_t j = 0; j < model->stage_count; j++) {
    uint32_t first = model->stage_first[j], end = model->stage_first[j + 1], room = slack(s, j);
    for (uint32_t x = first; x < end; x++) {
      uint32_t access = model->access[x];
      uint8_t *is_dirty = &s->is_dirty[access & GMI_MODEL_CHUNK];
      bits_t *in = bits_at(&s->clean, x)   ? &s->clean
                   : bits_at(&s->dirty, x) ? &s->dirty
                   : bits_at(&s->idle, x)  ? &s->idle
                   : bits_at(&s->kept, x)  ? &s->kept
                                           : NULL;
      if (in != NULL) {
        bits_clear(in, x);
        s->open--;
        s->hit[x >> 6] |= UINT64_C(1) << (x & 63);
        s->hit_count += in != &s->idle;
        s->own_count += in != &s->idle && in != &s->kept;
      } else {
        *is_dirty = 0;
      }
      if ((access & GMI_MODEL_WRITE) != 0) *is_dirty = 1;
    }
    while (s->open > room) drop_one(s, first);
    for (uint32_t x = first; x < end; x++) {
      uint32_t next = model->next[x];
      if ((next & GMI_MODEL_LEAVE) != 0) continue;
      bool dirty = !plain && s->is_dirty[model->access[x] & GMI_MODEL_CHUNK];
      bits_set((model->access[next] & GMI_MODEL_FRESH) != 0 ? &s->idle : dirty ? &s->dirty : &s->clean, next);
      s->open++;
    }
  }
}

static bool sweep_repeats(const sweep_t *s) {
  uint64_t words = word_count(s->model->access_count), bytes = words * sizeof(uint64_t);
  return memcmp(s->saved, s->clean.level[0], bytes) == 0 && memcmp(s->saved + words, s->dirty.level[0], bytes) == 0 &&
         memcmp(s->saved + 2 * words, s->idle.level[0], bytes) == 0;
}

static void sweep_save(sweep_t *s) {
  uint64_t words = word_count(s->model->access_count), bytes = words * sizeof(uint64_t);
  memcpy(s->saved, s->clean.level[0], bytes);
  memcpy(s->saved + words, s->dirty.level[0], bytes);
  memcpy(s->saved + 2 * words, s->idle.level[0], bytes);
}

static void bits_empty(bits_t *bits, uint32_t count) {
  for (uint32_t i; (i = bits_below(bits, count)) != NONE;) bits_clear(bits, i);
}

/* Call control: the arcs left open at the end of the iteration (all in clean) continue into the next iteration.
 * Drops the arcs that end last until the others fit beside the accesses of that iteration, then the arcs in excess
 * of k. Idle arcs save no fetch and do not count. Returns whether k arcs are left. */
static bool sweep_tail(sweep_t *s, uint64_t k) {
  const gmi_model_t *model = s->model;
  uint32_t count = model->access_count;
  bits_empty(&s->idle, count);
  uint64_t crossing = 0, alive, lowest;
  for (uint64_t c = 0; c < word_count(count); c++) crossing += (uint64_t)__builtin_popcountll(s->clean.level[0][c]);
  alive = crossing;
  lowest = bits_from(&s->clean, 0, count);
  for (uint32_t j = 0; j < model->stage_count && alive > 0; j++) {
    for (; alive > 0 && lowest < model->stage_first[j + 1]; alive--)
      lowest = bits_from(&s->clean, (uint32_t)lowest + 1, count);
    for (uint32_t room = slack(s, j); alive > room; alive--, crossing--)
      bits_clear(&s->clean, bits_below(&s->clean, count));
  }
  for (; crossing > 0 && s->own_count + crossing > k; crossing--) bits_clear(&s->clean, bits_below(&s->clean, count));
  s->open = (uint32_t)crossing;
  return s->own_count + crossing >= k;
}

enum { DECIDE_NO, DECIDE_YES, DECIDE_UNKNOWN };

/* Decides whether k arcs can be kept. On DECIDE_YES, the hits of the last round are a plan. DECIDE_UNKNOWN: *work
 * ran out. */
static int decide(sweep_t *s, uint64_t k, uint64_t *work) {
  const gmi_model_t *model = s->model;
  uint64_t words = word_count(model->access_count), bytes = words * sizeof(uint64_t);
  uint64_t visits = (uint64_t)model->access_count + model->stage_count;
  bits_empty(&s->clean, model->access_count);
  bits_empty(&s->dirty, model->access_count);
  bits_empty(&s->idle, model->access_count);
  bits_empty(&s->kept, model->access_count);
  s->open = 0;
  for (;;) {
    if (k > 0 && *work < visits) return DECIDE_UNKNOWN; /* k = 0 always ends after the first round */
    *work -= *work < visits ? *work : visits;
    memcpy(s->saved, s->kept.level[0], bytes);
    sweep_iteration(s, true);
    if (!sweep_tail(s, k)) return DECIDE_NO;
    bits_t swap = s->kept;
    s->kept = s->clean, s->clean = swap;
    if (memcmp(s->saved, s->kept.level[0], bytes) == 0) return DECIDE_YES;
  }
}

/* Searches the largest k that decide() confirms: from guess with a stride that doubles until k is bracketed, then by
 * bisection. [yes, no) brackets it; proven is the smallest k shown to be impossible, and a k that ran out of work
 * lowers no but not proven. With frames held back the plan is one of several candidates, so the search ends within
 * half a per cent of the fetches. */
static void search(sweep_t *s, uint64_t guess, uint64_t most, uint64_t *work, gmi_hits_t *hits) {
  uint64_t bytes = word_count(s->model->access_count) * sizeof(uint64_t);
  uint64_t no = most + 1, proven = most + 1, yes = 0, k = guess < most ? guess : most, stride = 1;
  bool found = false;
  while (!found || yes + 1 < no) {
    if (found && s->reduce > 0 && (no - yes) * 200 <= most - yes) break;
    int answer = decide(s, k, work);
    if (answer == DECIDE_YES) {
      found = true;
      yes = s->hit_count > k ? s->hit_count : k;
      hits->fetch_count = most - yes;
      memcpy(hits->words, s->hit, bytes);
    } else {
      no = k;
      if (answer == DECIDE_NO) proven = k;
      else if (found) break;
    }
    if (found && no <= most) k = yes + (no - yes) / 2;
    else if (found) k = yes + stride < most ? yes + stride : most;
    else k = answer == DECIDE_UNKNOWN || no <= stride ? 0 : no - stride;
    stride *= 2;
  }
  hits->bound_count = most - (proven - 1);
}

void gmi_hits_free(gmi_hits_t *hits) {
  free(hits->words);
  memset(hits, 0, sizeof *hits);
}

gemini_status_t gmi_min_make(const gmi_model_t *model, uint32_t reduce, gmi_hits_t *hits_out) {
  uint64_t words = word_count(model->access_count) + 1, visits = (uint64_t)model->access_count + model->stage_count;
  gmi_hits_t hits = { .words = calloc(words, sizeof *hits.words) };
  sweep_t s;
  if (hits.words == NULL || !sweep_make(&s, model, reduce)) {
    free(hits.words);
    return GEMINI_ERR_OOM_SYSTEM;
  }
  /* most: accesses that need the chunk's bytes, so most - hits is the number of fetches */
  uint64_t most = 0, guess = 0;
  for (uint32_t x = 0; x < model->access_count; x++) most += (model->access[x] & GMI_MODEL_FRESH) == 0;
  bool repeats = false;
  for (uint32_t round = 0; round < CONVERGE_ROUNDS && !repeats; round++) {
    sweep_save(&s);
    sweep_iteration(&s, false);
    hits.visits += visits;
    repeats = sweep_repeats(&s);
    guess = s.hit_count;
  }
  if (repeats) {
    memcpy(hits.words, s.hit, words * sizeof *hits.words);
    /* The state repeats after one iteration: MIN's plan is optimal (point 1 of the header). */
    hits.fetch_count = hits.bound_count = most - s.hit_count;
  } else {
    uint64_t limit = visits * SEARCH_ROUNDS > SEARCH_VISITS ? visits * SEARCH_ROUNDS : SEARCH_VISITS, work = limit;
    search(&s, guess, most, &work, &hits);
    hits.visits += limit - work;
  }
  sweep_free(&s);
  *hits_out = hits;
  return GEMINI_OK;
}

gemini_status_t gmi_visit_make(const gmi_model_t *model, const uint8_t *sticky, gmi_hits_t *hits_out) {
  gmi_hits_t hits = { .words = calloc(word_count(model->access_count) + 1, sizeof *hits.words) };
  if (hits.words == NULL) return GEMINI_ERR_OOM_SYSTEM;
  for (uint32_t j = 0; j < model->stage_count; j++) {
    uint32_t adjacent = j + 1 < model->stage_count ? j + 1 : 0;
    for (uint32_t x = model->stage_first[j]; x < model->stage_first[j + 1]; x++) {
      uint32_t next = model->next[x];
      if ((next & GMI_MODEL_LEAVE) != 0) continue;
      bool stays = sticky != NULL && sticky[model->access[x] & GMI_MODEL_CHUNK];
      if (!stays && (next < model->stage_first[adjacent] || next >= model->stage_first[adjacent + 1])) continue;
      hits.words[next >> 6] |= UINT64_C(1) << (next & 63);
    }
  }
  for (uint32_t x = 0; x < model->access_count; x++)
    hits.fetch_count += (model->access[x] & GMI_MODEL_FRESH) == 0 && !gmi_hits_at(&hits, x);
  hits.bound_count = hits.fetch_count;
  *hits_out = hits;
  return GEMINI_OK;
}
