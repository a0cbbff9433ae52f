/* Acquire, release, hint, move, pin. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tester.h"

enum { BATCH = 20 };

/* ---- acquire: stream, seed, accesses */
static uint32_t batch_read(const op_t *op, uint32_t first, spec_t *specs) {
  uint32_t n = 0;
  for (uint32_t i = first; i + ACCESS_ARGS <= op->count && n < BATCH; i += ACCESS_ARGS) specs[n++] = spec_at(op, i);
  return n;
}
/* By address where that names the same range: some ranges of arenas whose bytes no gradients reuse. A release names the
 * arena all the same. */
static gemini_access_t access_of(const part_t *p, const spec_t *s, const range_t *r) {
  bool plain = r->is_arena && !r->wrong && r->size && r->store == r->arena && reused_by(p, r->arena) < 0;
  if (plain && (r->at + r->size) % 3 == 0)
    return gemini_address_access((void *)(uintptr_t)(p->arenas[r->arena].base + r->at), r->size, s->mode, s->tier);
  return (gemini_access_t)ACCESS(r->object, s->offset, s->size, s->mode, s->tier);
}

/* Do two acquires exclude each other if one chunk has bytes of both? */
static bool excluded(uint32_t tier, uint32_t mode, uint32_t other_tier, uint32_t other_mode) {
  return tier != other_tier && (mode | other_mode) & GEMINI_WRITE;
}
static bool share_chunk(const range_t *a, const range_t *b, uint64_t chunk) {
  return a->store == b->store && first_chunk(a, chunk) < end_chunk(b, chunk) &&
         first_chunk(b, chunk) < end_chunk(a, chunk);
}

static bool is_busy(const part_t *p, const spec_t *s, const range_t *r, uint64_t chunk) {
  for (uint64_t i = first_chunk(r, chunk); i < end_chunk(r, chunk); i++) {
    use_t use = chunk_use(p, r->store, i, chunk);
    bool write = s->mode & GEMINI_WRITE;
    if (s->tier == GEMINI_TIER_DEVICE && (use.host_writers || (write && use.host))) return true;
    if (s->tier == GEMINI_TIER_HOST && (use.device_writers || (write && (use.device || use.pins)))) return true;
  }
  return false;
}

/* Counts the chunks that a batch needs on the device, without those that are held there already; all: with them. */
static uint64_t chunks_wanted(const part_t *p, const spec_t *specs, const range_t *ranges, uint32_t n, uint64_t chunk,
                              bool all) {
  uint64_t wanted = 0;
  for (uint32_t k = 0; k < n; k++) {
    if (specs[k].tier != GEMINI_TIER_DEVICE || ranges[k].wrong) continue;
    for (uint64_t i = first_chunk(&ranges[k], chunk); i < end_chunk(&ranges[k], chunk); i++) {
      bool counted = false;
      for (uint32_t j = 0; j < k && !counted; j++)
        counted = specs[j].tier == GEMINI_TIER_DEVICE && !ranges[j].wrong && ranges[j].store == ranges[k].store &&
                  i >= first_chunk(&ranges[j], chunk) && i < end_chunk(&ranges[j], chunk);
      use_t use = chunk_use(p, ranges[k].store, i, chunk);
      wanted += !counted && (all || !(use.device || use.pins));
    }
  }
  return wanted;
}

static bool host_held(const manager_t *m, uint32_t threads) {
  for (uint32_t t = 0; t < threads; t++)
    for (int i = 0; i < HOLDS; i++)
      if (m->parts[t].holds[i].live && m->parts[t].holds[i].tier == GEMINI_TIER_HOST) return true;
  return false;
}

/* Does a batch write a parameter and its gradient, whose bytes are the same? */
static bool both_written(const part_t *p, const spec_t *specs, const range_t *ranges, uint32_t n) {
  for (uint32_t k = 0; k < n; k++)
    for (uint32_t j = 0; j < k; j++)
      for (int i = 0; i < TENSORS; i++)
        if (ranges[j].store == ranges[k].store && ranges[j].arena != ranges[k].arena &&
            specs[j].mode & specs[k].mode & GEMINI_WRITE && !ranges[j].wrong && !ranges[k].wrong &&
            range_touches(p, &ranges[j], i) && range_touches(p, &ranges[k], i))
          return true;
  return false;
}

static statuses_t acquire_allowed(actor_t *a, manager_t *m, const spec_t *specs, const range_t *ranges, uint32_t n) {
  part_t *p = part_of(a, m);
  uint64_t chunk = chunk_bytes(a, m);
  statuses_t wrong = 0, perhaps = 0;
  bool long_on_host = false;
  for (uint32_t k = 0; k < n; k++) {
    const spec_t *s = &specs[k];
    const range_t *r = &ranges[k];
    if (!s->mode || s->mode > GEMINI_READ_WRITE || s->tier > GEMINI_TIER_HOST) wrong |= INVALID;
    wrong |= r->wrong;
    if (r->wrong) continue;
    if (content_of(p, r, s->mode == GEMINI_WRITE) == CONTENT_WRONG) wrong |= STATE;
    if (chunk && is_busy(p, s, r, chunk)) wrong |= BUSY;
    for (uint32_t j = 0; j < k; j++) {
      if (ranges[j].wrong || ranges[j].store != r->store || !excluded(s->tier, s->mode, specs[j].tier, specs[j].mode))
        continue;
      if (!chunk) perhaps |= BUSY;
      else if (share_chunk(r, &ranges[j], chunk)) wrong |= BUSY;
    }
    if (s->tier == GEMINI_TIER_HOST && (!chunk || end_chunk(r, chunk) - first_chunk(r, chunk) > 1)) long_on_host = true;
  }
  if (both_written(p, specs, ranges, n)) wrong |= STATE;
  perhaps |= no_room(a, m, chunk ? chunks_wanted(p, specs, ranges, n, chunk, false) : 0);
  if (long_on_host && (a->w->parallel || n > 1 || host_held(m, a->w->options.threads))) perhaps |= OOM_HOST;
  if (wrong) return wrong | perhaps;
  if (a->w->parallel) return OK | perhaps;
  uint64_t frames = chunk ? (m->config.device_bytes - m->config.device_margin_bytes) / chunk : 0;
  if (chunk && chunks_wanted(p, specs, ranges, n, chunk, true) > frames) return perhaps; /* the chunks never fit */
  return OK | perhaps;
}

static void check_pointer(actor_t *a, manager_t *m, const spec_t *s, const range_t *r, const void *ptr) {
  part_t *p = part_of(a, m);
  if (s->tier == GEMINI_TIER_DEVICE) {
    if ((uint64_t)(uintptr_t)ptr != p->arenas[r->store].base + r->at)
      differs(a, "ptr is %p, its device address is %#llx", ptr, (unsigned long long)(p->arenas[r->store].base + r->at));
    return;
  }
  if (!ptr) differs(a, "ptr on the host is NULL");
  for (int i = 0; i < HOLDS; i++) { /* each byte has a single address on the host */
    const hold_t *h = &p->holds[i];
    if (!h->live || h->tier != GEMINI_TIER_HOST || h->store != r->store || h->at >= r->at + r->size ||
        r->at >= h->at + h->size)
      continue;
    if ((intptr_t)ptr - (intptr_t)r->at != (intptr_t)h->ptr - (intptr_t)h->at)
      differs(a, "a byte is at two addresses of the host at once");
  }
}

static void hold_begin(actor_t *a, manager_t *m, const spec_t *s, const range_t *r, const gemini_access_t *access,
                       int stream, uint64_t seed) {
  part_t *p = part_of(a, m);
  check_pointer(a, m, s, r, access->ptr);
  if (!r->is_arena) p->tensors[r->entry].users++;
  if (s->mode == GEMINI_WRITE) content_written(p, r->arena, r->at, r->size);
  bool device = s->tier == GEMINI_TIER_DEVICE;
  p->holds[s->hold] = (hold_t){ .live = true,
                                .is_arena = r->is_arena,
                                .entry = r->entry,
                                .offset = r->offset,
                                .size = r->size,
                                .mode = s->mode,
                                .tier = s->tier,
                                .ptr = access->ptr,
                                .stream = stream,
                                .store = r->store,
                                .at = r->at };
  if (!r->size) return;
  uint8_t *model = p->arenas[r->store].bytes + r->at;
  char what[96];
  snprintf(what, sizeof what, "acquired on the %s, %s %d at %llu", device ? "device" : "host",
           r->is_arena ? "arena" : "tensor", r->entry, (unsigned long long)r->offset);
  bool write = s->mode & GEMINI_WRITE;
  use_bytes(a, m, stream, access->ptr, r->at, r->size,
            s->mode & GEMINI_READ && !p->arenas[r->store].unknown ? model : NULL, write, seed, what);
  if (write) pattern_fill(model, r->at, r->size, seed);
  p->touched = true;
}

void run_acquire(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t specs[BATCH];
  range_t ranges[BATCH];
  gemini_access_t accesses[BATCH];
  uint32_t n = batch_read(op, 2, specs);
  int stream = (int)op->arg[0] - 1;
  if (!m->open || stream >= STREAMS) return;
  gemini_stream_t handle = stream_handle(a, m, stream);
  if (!handle) stream = -1;
  for (uint32_t k = 0; k < n; k++) {
    ranges[k] = range_of(p, specs[k].is_arena, specs[k].entry, specs[k].offset, specs[k].size);
    if (!ranges[k].live || specs[k].hold >= HOLDS || p->holds[specs[k].hold].live) return;
    /* an empty range cannot be named any more once its arena has grown */
    if (!ranges[k].wrong && !ranges[k].size) return;
    for (uint32_t j = 0; j < k; j++)
      if (specs[j].hold == specs[k].hold) return;
    accesses[k] = access_of(part_of(a, m), &specs[k], &ranges[k]);
    if (!ranges[k].wrong) /* the tester orders its own work, as the library does not */
      sync_holds(a, m, ranges[k].store, ranges[k].at, ranges[k].size, !(specs[k].mode & GEMINI_WRITE));
  }
  statuses_t allowed = acquire_allowed(a, m, specs, ranges, n);
  gemini_status_t status = CALL(a, allowed, gemini_acquire, m->handle, accesses, n, handle);
  for (uint32_t k = 0; !status && k < n; k++)
    hold_begin(a, m, &specs[k], &ranges[k], &accesses[k], stream, op->arg[1] ? op->arg[1] + k : 0);
}

static int free_hold(const part_t *p, const spec_t *specs, uint32_t n) {
  for (int i = 0; i < HOLDS; i++) {
    bool taken = p->holds[i].live;
    for (uint32_t k = 0; k < n && !taken; k++) taken = specs[k].hold == i;
    if (!taken) return i;
  }
  return -1;
}

static int stream_pick(actor_t *a, manager_t *m) {
  return chance(a, 50) ? -1 : PICK(a, part_of(a, m)->streams, STREAMS);
}

bool make_acquire(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  uint32_t n = chance(a, 60) ? 1 : chance(a, 90) ? 2 + rnd(a, 3) : 17 + rnd(a, 3), held = 0, made = 0;
  for (int i = 0; i < HOLDS; i++) held += p->holds[i].live;
  if (held > 4 + rnd(a, HOLDS)) return false;
  uint32_t tier = chance(a, 70) ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST;
  spec_t specs[BATCH];
  for (uint32_t k = 0; k < n; k++) {
    spec_t s;
    if (!spec_make(a, m, &s) || (s.hold = free_hold(p, specs, made)) < 0) continue;
    s.tier = chance(a, 97) ? tier : rnd(a, 4);
    if (chance(a, 1)) s.mode = rnd(a, 8);
    range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
    if (content_of(p, &r, false) == CONTENT_WRONG && chance(a, 80)) s.mode = GEMINI_WRITE, s.offset = s.size = 0;
    specs[made++] = s;
  }
  if (!made) return false;
  op_add(op, (uint32_t)(stream_pick(a, m) + 1));
  op_add(op, chance(a, 90) ? 1 + rnd(a, 1 << 20) : 0);
  for (uint32_t k = 0; k < made; k++) spec_add(op, specs[k]);
  return true;
}

/* ---- release */
static gemini_access_t access_again(const part_t *p, const hold_t *h, bool by_zero) {
  bool all = by_zero && !h->offset && h->size == (h->is_arena ? p->arenas[h->entry].size : p->tensors[h->entry].size);
  return (gemini_access_t){ .struct_size = sizeof(gemini_access_t),
                            .object =
                                h->is_arena ? OBJECT(p->arenas[h->entry].handle) : OBJECT(p->tensors[h->entry].handle),
                            .offset_bytes = h->offset,
                            .size_bytes = all ? 0 : h->size,
                            .mode = h->mode,
                            .tier = h->tier,
                            .ptr = h->tier == GEMINI_TIER_HOST ? h->ptr : NULL };
}

static void hold_end(actor_t *a, manager_t *m, int hold) {
  part_t *p = part_of(a, m);
  hold_t *h = &p->holds[hold];
  h->live = false;
  if (h->is_arena) return;
  tensor_t *t = &p->tensors[h->entry];
  if (--t->users) return;
  bool known = !a->w->parallel || a->index == 0; /* the first thread sets phases */
  t->states = known ? 1u << state_after_release(m->phase)
                    : 1u << GEMINI_STATE_HOLD | 1u << GEMINI_STATE_HOLD_AFTER_FWD | 1u << GEMINI_STATE_HOLD_AFTER_BWD;
}

/* Waits for the hold's stream if the range is released on another one. */
static void before_release(actor_t *a, manager_t *m, const hold_t *h, int stream) {
  if (h->stream < 0 || h->stream == stream) return;
  gemini_stream_t other = stream_handle(a, m, h->stream);
  if (other) QUIET(a, OK, gemini_stream_synchronize, m->handle, other);
}

/* Arguments: stream; seed with which the ranges are written once more (0: not); flags, 1: a whole object is named by
 * size 0; holds. */
void run_release(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  gemini_access_t accesses[BATCH];
  int holds[BATCH], stream = (int)op->arg[0] - 1;
  uint32_t n = 0;
  if (!m->open || stream >= STREAMS) return;
  gemini_stream_t handle = stream_handle(a, m, stream);
  if (!handle) stream = -1;
  for (uint32_t i = 3; i < op->count && n < BATCH; i++) {
    uint32_t k = op->arg[i];
    bool twice = false;
    for (uint32_t j = 0; j < n; j++) twice |= holds[j] == (int)k;
    if (k >= HOLDS || !p->holds[k].live || twice) continue;
    hold_t *h = &p->holds[k];
    /* after all work that has used these bytes in the meantime */
    if (op->arg[1] && h->mode & GEMINI_WRITE && h->size) {
      for (int other = 0; other < STREAMS; other++)
        if (p->streams[other].live && other != h->stream)
          QUIET(a, OK, gemini_stream_synchronize, m->handle, p->streams[other].handle);
      use_bytes(a, m, h->stream, h->ptr, h->at, h->size, NULL, true, op->arg[1] + n, "");
      pattern_fill(p->arenas[h->store].bytes + h->at, h->at, h->size, op->arg[1] + n);
    }
    before_release(a, m, h, stream);
    accesses[n] = access_again(p, h, op->arg[2] & 1);
    holds[n++] = (int)k;
  }
  if (!n) return;
  gemini_status_t status = CALL(a, OK, gemini_release, m->handle, accesses, n, handle);
  bool ended = status != GEMINI_ERR_STATE; /* the device's failures do not keep anything acquired */
  for (uint32_t k = 0; ended && k < n; k++) hold_end(a, m, holds[k]);
}

bool make_release(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int first = PICK(a, p->holds, HOLDS);
  if (first < 0) return false;
  uint32_t n = chance(a, 50) ? 1 : chance(a, 80) ? 2 + rnd(a, 3) : BATCH;
  int stream = chance(a, 70) ? p->holds[first].stream : stream_pick(a, m);
  op_add(op, (uint32_t)(stream + 1));
  op_add(op, chance(a, 30) ? 1 + rnd(a, 1 << 20) : 0);
  op_add(op, rnd(a, 2));
  for (int i = 0; i < HOLDS && n; i++) {
    int k = (first + i) % HOLDS;
    if (p->holds[k].live) op_add(op, (uint32_t)k), n--;
  }
  return true;
}

/* Arguments: stream; flags, 1: a wrong pointer; accesses, each with the hold whose pointer it passes. If one access
 * names no range that was acquired in this way, the whole batch must be refused. */
void run_release_wrong(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t specs[BATCH];
  gemini_access_t accesses[BATCH];
  int matched[BATCH], stream = (int)op->arg[0] - 1;
  statuses_t wrong = 0;
  uint32_t n = batch_read(op, 2, specs);
  if (!m->open || stream >= STREAMS) return;
  gemini_stream_t handle = stream_handle(a, m, stream);
  if (!handle) stream = -1;
  bool taken[HOLDS] = { false };
  for (uint32_t k = 0; k < n; k++) {
    spec_t *s = &specs[k];
    range_t r = range_of(p, s->is_arena, s->entry, s->offset, s->size);
    if (!r.live) return;
    const hold_t *near = &p->holds[s->hold % HOLDS];
    accesses[k] = access_of(part_of(a, m), s, &r);
    if (near->live && near->tier == GEMINI_TIER_HOST && near->store == r.store)
      accesses[k].ptr = (uint8_t *)near->ptr + (intptr_t)(r.at - near->at) + (op->arg[1] & 1);
    wrong |= r.wrong;
    if (!s->mode || s->mode > GEMINI_READ_WRITE || s->tier > GEMINI_TIER_HOST) wrong |= INVALID;
    matched[k] = -1;
    for (int i = 0; i < HOLDS && matched[k] < 0 && !r.wrong; i++) {
      const hold_t *h = &p->holds[i];
      if (!h->live || taken[i] || h->is_arena != r.is_arena || h->entry != r.entry || h->offset != r.offset ||
          h->size != r.size || h->mode != s->mode || h->tier != s->tier ||
          (h->tier == GEMINI_TIER_HOST && h->ptr != accesses[k].ptr))
        continue;
      matched[k] = i;
      taken[i] = true;
      before_release(a, m, h, stream);
    }
    if (matched[k] < 0) wrong |= STATE;
  }
  gemini_status_t status = CALL(a, wrong ? wrong : OK, gemini_release, m->handle, accesses, n, handle);
  for (uint32_t k = 0; !status && k < n; k++) hold_end(a, m, matched[k]);
}

bool make_release_wrong(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int hold = PICK(a, p->holds, HOLDS);
  op_add(op, (uint32_t)(stream_pick(a, m) + 1));
  op_add(op, chance(a, 10));
  spec_t s;
  if (hold < 0 || chance(a, 10)) {
    if (!spec_make(a, m, &s)) return false;
    s.tier = rnd(a, 2);
    s.hold = 0;
    spec_add(op, s);
    return true;
  }
  const hold_t *h = &p->holds[hold];
  spec_t right = { .is_arena = h->is_arena,
                   .entry = h->entry,
                   .hold = hold,
                   .mode = h->mode,
                   .tier = h->tier,
                   .offset = h->offset,
                   .size = h->size };
  s = right;
  switch (rnd(a, 7)) {
  case 0: s.mode = 1 + s.mode % 3; break;
  case 1: s.tier = !s.tier; break;
  case 2: spec_add(op, right); break; /* released more often than acquired */
  case 3: s.entry = s.is_arena ? PICK(a, p->arenas, ARENAS) : PICK(a, p->tensors, TENSORS); break;
  case 4: /* a part from the beginning */
  case 5: /* a part to the end */
    if (s.size < 2) break;
    s.size = 1 + rnd(a, (uint32_t)s.size - 1);
    if (chance(a, 50)) s.offset += h->size - s.size;
    if (chance(a, 30)) spec_add(op, right);
    break;
  default: /* its bytes under the name of its arena, or together with another hold */
    s.is_arena = true;
    s.entry = h->store;
    s.offset = h->at;
  }
  spec_add(op, s);
  return true;
}

/* ---- hint and move: accesses */
static uint32_t moves_read(actor_t *a, const op_t *op, spec_t *specs, range_t *ranges, gemini_access_t *accesses) {
  manager_t *m = manager_of(a, op);
  uint32_t n = m->open ? batch_read(op, 0, specs) : 0;
  for (uint32_t k = 0; k < n; k++) {
    ranges[k] = range_of(part_of(a, m), specs[k].is_arena, specs[k].entry, specs[k].offset, specs[k].size);
    if (!ranges[k].live) return 0;
    accesses[k] = access_of(part_of(a, m), &specs[k], &ranges[k]);
  }
  return n;
}
static bool moves_make(actor_t *a, op_t *op) {
  spec_t s;
  uint32_t n = 1 + (chance(a, 30) ? rnd(a, 4) : 0);
  while (n-- && spec_make(a, manager_of(a, op), &s)) {
    s.hold = 0;
    if (chance(a, 2)) s.tier = 3;
    spec_add(op, s);
  }
  return op->count > 0;
}

void run_hint(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  spec_t specs[BATCH];
  range_t ranges[BATCH];
  gemini_access_t accesses[BATCH];
  uint32_t n = moves_read(a, op, specs, ranges, accesses);
  statuses_t wrong = 0;
  for (uint32_t k = 0; k < n; k++) wrong |= ranges[k].wrong | (specs[k].tier > GEMINI_TIER_FILE ? INVALID : 0);
  if (n) CALL(a, wrong ? wrong : OK, gemini_hint, m->handle, accesses, n);
}
bool make_hint(actor_t *a, op_t *op) { return moves_make(a, op); }

void run_move(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t specs[BATCH];
  range_t ranges[BATCH];
  gemini_access_t accesses[BATCH];
  uint32_t n = moves_read(a, op, specs, ranges, accesses);
  uint64_t chunk = chunk_bytes(a, m);
  statuses_t wrong = 0, perhaps = 0;
  for (uint32_t k = 0; k < n; k++) {
    const range_t *r = &ranges[k];
    uint32_t tier = specs[k].tier;
    wrong |= r->wrong | (tier > GEMINI_TIER_FILE ? INVALID : 0);
    if (r->wrong) continue;
    use_t use = range_use(p, r, chunk);
    if (tier == GEMINI_TIER_DEVICE && use.host_writers) wrong |= BUSY;
    if (tier != GEMINI_TIER_DEVICE && (use.device || use.pins)) wrong |= BUSY;
    if (tier == GEMINI_TIER_FILE && use.host) wrong |= BUSY;
    if (tier == GEMINI_TIER_FILE) perhaps |= OOM_FILE | OOM_HOST;
    for (uint32_t j = 0; j < k; j++) /* because one access keeps the chunk that the other moves */
      if (specs[j].tier != tier && ranges[j].store == r->store) perhaps |= BUSY;
  }
  if (!n) return;
  perhaps |= no_room(a, m, chunk ? chunks_wanted(p, specs, ranges, n, chunk, false) : 0);
  CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_move, m->handle, accesses, n);
}
bool make_move(actor_t *a, op_t *op) { return moves_make(a, op); }

/* ---- pin and unpin: an access, whose mode and tier do not matter */
void run_pin(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 0);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  if (!m->open || !r.live) return;
  uint64_t chunk = chunk_bytes(a, m), wanted = 0;
  gemini_access_t access = access_of(part_of(a, m), &s, &r);
  for (uint64_t i = first_chunk(&r, chunk ? chunk : 1); chunk && i < end_chunk(&r, chunk); i++) {
    use_t use = chunk_use(p, r.store, i, chunk);
    wanted += !(use.device || use.pins);
  }
  statuses_t wrong = r.wrong, perhaps = no_room(a, m, wanted);
  if (!wrong && range_use(p, &r, chunk).host_writers) wrong |= BUSY;
  gemini_status_t status = CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_pin, m->handle, &access);
  if (status || !r.size) return;
  chunk = chunk_bytes(a, m);
  for (uint64_t i = first_chunk(&r, chunk); i < end_chunk(&r, chunk); i++) p->arenas[r.store].pins[i % CHUNKS]++;
}
bool make_pin(actor_t *a, op_t *op) {
  spec_t s;
  if (!spec_make(a, manager_of(a, op), &s)) return false;
  s.hold = 0;
  spec_add(op, s);
  return true;
}

void run_unpin(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 0);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  if (!m->open || !r.live) return;
  uint64_t chunk = chunk_bytes(a, m);
  gemini_access_t access = access_of(part_of(a, m), &s, &r);
  bool pinned = chunk || !r.size;
  for (uint64_t i = chunk ? first_chunk(&r, chunk) : 0; chunk && i < end_chunk(&r, chunk); i++)
    pinned &= p->arenas[r.store].pins[i % CHUNKS] > 0;
  statuses_t allowed = r.wrong ? r.wrong : pinned ? OK : STATE;
  gemini_status_t status = CALL(a, allowed, gemini_unpin, m->handle, &access);
  if (status || !r.size) return;
  for (uint64_t i = first_chunk(&r, chunk); i < end_chunk(&r, chunk); i++) p->arenas[r.store].pins[i % CHUNKS]--;
}
bool make_unpin(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  if (chance(a, 20)) return make_pin(a, op);
  uint64_t chunk = chunk_bytes(a, m);
  for (int i = 0; chunk && i < ARENAS; i++) { /* all adjacent pinned chunks */
    const arena_t *arena = &p->arenas[i];
    if (!arena->live || arena->store != i) continue;
    for (uint64_t k = 0; k * chunk < arena->size; k++) {
      if (!arena->pins[k]) continue;
      uint64_t end = k;
      while (end * chunk < arena->size && arena->pins[end]) end++;
      uint64_t last = end * chunk < arena->size ? end * chunk : arena->size;
      spec_add(op, (spec_t){ .is_arena = true, .entry = i, .offset = k * chunk, .size = last - k * chunk });
      return true;
    }
  }
  return false;
}
