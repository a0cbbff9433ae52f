/* Arenas, tensors, states. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tester.h"

static const char *const kind_names[] = { "param", "grad", "master", "momentum", "variance", "other" };

/* ---- arenas */
/* While other threads run, their arenas are not examined; names contain the thread's number, so they differ. */
static bool name_taken(const actor_t *a, const manager_t *m, const char *name) {
  bool alone = !a->w->parallel;
  for (uint32_t t = alone ? 0 : a->index; t < (alone ? a->w->options.threads : a->index + 1); t++)
    for (int i = 0; i < ARENAS; i++)
      if (m->parts[t].arenas[i].live && !strcmp(m->parts[t].arenas[i].name, name)) return true;
  return false;
}

/* The name that the library gives an arena without a name. */
static void default_name(const actor_t *a, const manager_t *m, uint32_t kind, char name[64]) {
  snprintf(name, 64, "%s", kind_names[kind]);
  for (int i = 2; name_taken(a, m, name); i++) snprintf(name, 64, "%s.%d", kind_names[kind], i);
}

/* An arena came or went, so recorded traces no longer apply. */
static void arenas_changed(manager_t *m) {
  if (atomic_load(&m->traced)) atomic_store(&m->perhaps_traced, true);
  atomic_store(&m->traced, false);
  atomic_store(&m->record_lost, true);
}

/* Arguments: entry, kind, element_bytes, capacity, name (0: none), like + 1, reuse + 1. */
void run_arena_create(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  uint32_t entry = op->arg[0];
  int like = (int)op->arg[5] - 1, reuse = (int)op->arg[6] - 1, base = reuse >= 0 ? reuse : like;
  char name[64] = "";
  if (!m->open || entry >= ARENAS || p->arenas[entry].live) return;
  if (like >= ARENAS || reuse >= ARENAS || (like >= 0 && !p->arenas[like].live) ||
      (reuse >= 0 && !p->arenas[reuse].live))
    return;
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.kind = op->arg[1];
  c.element_bytes = op->arg[2];
  c.capacity_bytes = op->arg[3];
  c.like = like < 0 ? 0 : p->arenas[like].handle;
  c.reuse = reuse < 0 ? 0 : p->arenas[reuse].handle;
  bool fits = c.kind <= GEMINI_KIND_OTHER, taken = false;
  if (op->arg[4]) snprintf(name, sizeof name, "arena %u.%u", a->index, op->arg[4]);
  else if (a->w->parallel) return; /* its default name would depend on other threads */
  if (op->arg[4]) taken = name_taken(a, m, name);
  else if (fits) default_name(a, m, c.kind, name);
  c.name = op->arg[4] ? name : NULL;
  if (a->w->parallel && base < 0 && !c.capacity_bytes) return; /* its default capacity would depend on other threads */

  uint64_t element = c.element_bytes ? c.element_bytes : 1, capacity = c.capacity_bytes;
  const arena_t *b = base < 0 ? NULL : &p->arenas[base];
  statuses_t wrong = fits ? 0 : INVALID;
  if (element > 16 || element & (element - 1)) wrong |= INVALID;
  if (b && b->root != base) wrong |= INVALID;
  if (like >= 0 && reuse >= 0 && like != reuse) wrong |= INVALID;
  if (reuse >= 0 && (c.kind != GEMINI_KIND_GRAD || b->kind != GEMINI_KIND_PARAM || element != b->element_bytes ||
                     reused_by(p, reuse) >= 0))
    wrong |= INVALID;
  if (!capacity)
    capacity = b ? b->capacity / b->element_bytes * element
                 : m->config.device_bytes + m->config.host_bytes + m->config.file_bytes;
  capacity -= capacity % element;
  if (b && b->size / b->element_bytes * element > capacity) wrong |= INVALID;
  if (taken) wrong |= EXISTS;
  gemini_arena_t handle = 0;
  if (CALL(a, wrong ? wrong : OK, gemini_arena_create, m->handle, &c, &handle)) {
    if (handle) differs(a, "a failed call has set its result");
    return;
  }
  arena_t *arena = &p->arenas[entry];
  *arena = (arena_t){ .live = true,
                      .handle = handle,
                      .kind = c.kind,
                      .element_bytes = (uint32_t)element,
                      .capacity = capacity,
                      .size = b ? b->size / b->element_bytes * element : 0,
                      .root = b ? base : (int)entry,
                      .store = reuse >= 0 ? reuse : (int)entry };
  memcpy(arena->name, name, sizeof name);
  if (reuse < 0) arena->bytes = calloc(1, capacity + 1);
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  QUIET(a, OK, gemini_arena_info, m->handle, handle, &info);
  arena->base = info.base;
  arenas_changed(m);
}

bool make_arena_create(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = PICK_FREE(p->arenas, ARENAS), base = PICK(a, p->arenas, ARENAS);
  if (entry < 0) return false;
  bool like = base >= 0 && chance(a, 60), reuse = like && chance(a, 50);
  if (like && chance(a, 90)) base = p->arenas[base].root;
  uint32_t element = 1u << rnd(a, 5);
  if (like && reuse) element = p->arenas[base].element_bytes;
  op_add(op, (uint32_t)entry);
  op_add(op, reuse ? GEMINI_KIND_GRAD : chance(a, 40) ? GEMINI_KIND_PARAM : rnd(a, chance(a, 3) ? 9 : 6));
  op_add(op, chance(a, 2) ? 3 : chance(a, 10) && !reuse ? 0 : element);
  op_add(op, chance(a, 15) ? 0 : (1 + rnd(a, a->w->options.cuda ? 3 : 10)) * a->w->unit + rnd(a, 5000));
  bool same = feature(a, FEATURE_same_names);
  op_add(op, same && chance(a, 15) && !a->w->parallel ? 0 : 1 + (!same || chance(a, 85) ? ++a->names + 8 : rnd(a, 8)));
  op_add(op, like && (!reuse || chance(a, 20)) ? (uint32_t)(chance(a, 3) ? PICK(a, p->arenas, ARENAS) : base) + 1 : 0);
  op_add(op, reuse ? (uint32_t)base + 1 : 0);
  return true;
}

void arena_forget(actor_t *a, manager_t *m, part_t *p, int entry) {
  arena_t *arena = &p->arenas[entry];
  (void)m;
  for (int i = 0; i < TENSORS; i++) {
    tensor_t *t = &p->tensors[i];
    if (!t->live || t->arena != entry) continue;
    gone(a, t->handle);
    t->live = false;
  }
  gone(a, arena->handle);
  free(arena->bytes);
  arena->bytes = NULL;
  arena->live = false;
}

/* Bytes outside of all tensors may become zero together with the gradients around them: compares them, and copies them
 * to the model. */
static void gaps_look(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size) {
  part_t *p = part_of(a, m);
  uint8_t *model = p->arenas[store].bytes + at, *inside = calloc(1, size + 1), *got = malloc(size + 1);
  bool any = false;
  for (int i = 0; i < TENSORS; i++) {
    const tensor_t *t = &p->tensors[i];
    if (!t->live || t->arena != store || t->offset >= at + size || at >= t->offset + t->size) continue;
    uint64_t begin = t->offset > at ? t->offset : at, end = t->offset + t->size;
    memset(inside + (begin - at), 1, (end < at + size ? end : at + size) - begin);
  }
  for (uint64_t i = 0; i < size && !any; i++) any = !inside[i] && model[i];
  bool read = any && read_surely(a, m, store, at, size, got);
  for (uint64_t i = 0; read && i < size; i++)
    if (!inside[i] && !got[i]) model[i] = 0;
  free(got);
  free(inside);
}

void run_arena_destroy(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  if (!m->open || entry >= ARENAS || !p->arenas[entry].live) return;
  arena_t *arena = &p->arenas[entry];
  statuses_t wrong = 0, perhaps = 0;
  for (int i = 0; i < ARENAS; i++)
    if (i != entry && p->arenas[i].live && (p->arenas[i].root == entry || p->arenas[i].store == entry)) wrong |= BUSY;
  for (int i = 0; i < HOLDS; i++) {
    const hold_t *h = &p->holds[i];
    if (!h->live || !h->size) continue;
    int of = h->is_arena ? h->entry : p->tensors[h->entry].arena;
    if (of == entry || (arena->store == entry && h->store == entry)) wrong |= BUSY;
    else if (h->store == arena->store) perhaps |= BUSY; /* its bytes are acquired through the parameter arena */
  }
  for (int i = 0; i < CHUNKS; i++)
    if (arena->pins[i]) wrong |= BUSY;
  perhaps |= no_room(a, m, 0);
  if (CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_arena_destroy, m->handle, arena->handle)) return;
  /* parameters whose bytes gradients had taken read as zero */
  for (int i = 0; i < TENSORS && arena->store != entry; i++) {
    tensor_t *t = &p->tensors[i];
    if (!t->live || t->arena != arena->store || !t->gradient) continue;
    memset(p->arenas[t->arena].bytes + t->offset, 0, t->size);
    t->gradient = false;
  }
  int store = arena->store;
  uint64_t size = p->arenas[store].size;
  arena_forget(a, m, p, entry);
  arenas_changed(m);
  if (store != entry) gaps_look(a, m, store, 0, size);
}
bool make_arena_destroy(actor_t *a, op_t *op) {
  int entry = PICK(a, part_of(a, manager_of(a, op))->arenas, ARENAS);
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  return true;
}

/* ---- places in arenas */
/* Models the growth of an arena by size bytes. *at_out: their offset. Returns the statuses with which the library must
 * refuse; 0: none. */
static statuses_t extend(const part_t *p, int entry, uint64_t size, uint64_t *at_out) {
  const arena_t *a = &p->arenas[entry];
  uint64_t step = 256 * (uint64_t)a->element_bytes;
  *at_out = (a->size + step - 1) / step * step;
  if (a->root != entry || !size || size % a->element_bytes || *at_out + size > a->capacity) return INVALID;
  for (int i = 0; i < ARENAS; i++) {
    const arena_t *f = &p->arenas[i];
    if (f->live && f->root == entry && (*at_out + size) / a->element_bytes > f->capacity / f->element_bytes)
      return INVALID;
  }
  return 0;
}
static void extended(part_t *p, int entry, uint64_t end) {
  uint64_t elements = end / p->arenas[entry].element_bytes;
  for (int i = 0; i < ARENAS; i++)
    if (p->arenas[i].live && p->arenas[i].root == entry) p->arenas[i].size = elements * p->arenas[i].element_bytes;
}
static uint64_t size_make(actor_t *a, const arena_t *arena) {
  uint64_t unit = a->w->unit, size;
  switch (rnd(a, 6)) {
  case 0: size = 1 + rnd(a, 64); break;
  case 1: size = unit; break;
  case 2: size = 1 + rnd(a, (uint32_t)unit * 3); break;
  default: size = 1 + rnd(a, (uint32_t)unit / (a->w->options.cuda ? 16 : 2));
  }
  return chance(a, 3) ? size : (size + arena->element_bytes - 1) / arena->element_bytes * arena->element_bytes;
}

/* Arguments: arena, size. */
void run_arena_take(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  if (!m->open || entry >= ARENAS || !p->arenas[entry].live) return;
  uint64_t at, got = 0;
  statuses_t wrong = extend(p, entry, op->arg[1], &at);
  if (CALL(a, wrong ? wrong : OK, gemini_arena_take, m->handle, p->arenas[entry].handle, op->arg[1], &got)) {
    if (got) differs(a, "a failed call has set its result");
    return;
  }
  if (got != at) differs(a, "offset is %llu, expected %llu", (unsigned long long)got, (unsigned long long)at);
  extended(p, entry, at + op->arg[1]);
}
bool make_arena_take(actor_t *a, op_t *op) {
  part_t *p = part_of(a, manager_of(a, op));
  int entry = PICK(a, p->arenas, ARENAS);
  if (entry < 0) return false;
  if (chance(a, 90)) entry = p->arenas[entry].root;
  op_add(op, (uint32_t)entry);
  op_add(op, chance(a, 2) ? 0 : size_make(a, &p->arenas[entry]));
  return true;
}

/* ---- tensors: entry, arena, name, size, offset + 1 (0: the next) */
static int tensor_named(const part_t *p, const char *name) {
  for (int i = 0; i < TENSORS; i++)
    if (p->tensors[i].live && p->tensors[i].base == i && !strcmp(p->tensors[i].name, name)) return i;
  return -1;
}

void run_tensor_register(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0], in = (int)op->arg[1];
  uint64_t size = op->arg[3], at = 0;
  if (!m->open || entry >= TENSORS || p->tensors[entry].live || in >= ARENAS || !p->arenas[in].live) return;
  const arena_t *arena = &p->arenas[in];
  char name[32];
  snprintf(name, sizeof name, "tensor %u.%u", a->index, op->arg[2]);
  statuses_t wrong = tensor_named(p, name) >= 0 ? EXISTS : 0;
  uint64_t offset = GEMINI_OFFSET_NEXT;
  if (op->arg[4]) {
    at = offset = op->arg[4] - 1;
    if (arena->root != in || at % arena->element_bytes || !size || size % arena->element_bytes || at > arena->size ||
        size > arena->size - at)
      wrong |= INVALID;
  } else {
    wrong |= extend(p, in, size, &at);
  }
  /* where gradients have taken bytes that it shares with other tensors */
  bool gradient = false, in_part = false;
  for (int i = 0; i < TENSORS && op->arg[4] && reused_by(p, in) >= 0; i++) {
    const tensor_t *t = &p->tensors[i];
    if (!t->live || t->arena != in || !t->gradient || t->offset >= at + size || at >= t->offset + t->size) continue;
    if (at >= t->offset && at + size <= t->offset + t->size) gradient = true;
    else in_part = true;
  }
  if (in_part && !gradient) wrong |= STATE;
  gemini_tensor_t handle = 0;
  if (CALL(a, wrong ? wrong : OK, gemini_tensor_register, m->handle, arena->handle, name, size, offset, &handle)) {
    if (handle) differs(a, "a failed call has set its result");
    return;
  }
  if (!op->arg[4]) extended(p, in, at + size);
  tensor_t *t = &p->tensors[entry];
  *t = (tensor_t){ .live = true,
                   .handle = handle,
                   .arena = in,
                   .base = entry,
                   .offset = at,
                   .size = size,
                   .gradient = gradient,
                   .states = 1u << GEMINI_STATE_FREE };
  memcpy(t->name, name, sizeof name);
}

bool make_tensor_register(actor_t *a, op_t *op) {
  part_t *p = part_of(a, manager_of(a, op));
  int entry = PICK_FREE(p->tensors, TENSORS), in = PICK(a, p->arenas, ARENAS);
  if (entry < 0 || in < 0) return false;
  if (chance(a, 97)) in = p->arenas[in].root;
  const arena_t *arena = &p->arenas[in];
  uint64_t size = size_make(a, arena), at = 0;
  /* inside the bytes taken so far: tied weights, or a place used before */
  if (arena->size > arena->element_bytes && chance(a, 25)) {
    at = rnd(a, (uint32_t)(arena->size / arena->element_bytes)) * (uint64_t)arena->element_bytes;
    if (chance(a, 95) && size > arena->size - at) size = arena->size - at;
    int other = PICK(a, p->tensors, TENSORS);
    if (other >= 0 && p->tensors[other].arena == in && chance(a, 40))
      at = p->tensors[other].offset, size = p->tensors[other].size;
    at++;
  }
  op_add(op, (uint32_t)entry);
  op_add(op, (uint32_t)in);
  op_add(op, chance(a, 3) ? rnd(a, (uint32_t)a->names + 1) : ++a->names);
  op_add(op, size);
  op_add(op, at);
  return true;
}

void run_tensor_unregister(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  if (!m->open || entry >= TENSORS || !p->tensors[entry].live) return;
  bool base = p->tensors[entry].base == entry;
  statuses_t wrong = 0;
  for (int i = 0; i < TENSORS; i++)
    if (p->tensors[i].live && (i == entry || (base && p->tensors[i].base == entry)) && p->tensors[i].users)
      wrong |= BUSY;
  if (CALL(a, wrong ? wrong : OK, gemini_tensor_unregister, m->handle, p->tensors[entry].handle)) return;
  for (int i = 0; i < TENSORS; i++) {
    if (!p->tensors[i].live || (i != entry && !(base && p->tensors[i].base == entry))) continue;
    gone(a, p->tensors[i].handle);
    p->tensors[i].live = false;
  }
}
bool make_tensor_unregister(actor_t *a, op_t *op) {
  int entry = PICK(a, part_of(a, manager_of(a, op))->tensors, TENSORS);
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  return true;
}

/* Argument: a tensor; TENSORS: a name that no tensor has. */
void run_tensor_find(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  gemini_tensor_t handle = 0;
  if (!m->open) return;
  if (entry >= TENSORS) {
    CALL(a, NOT_FOUND, gemini_tensor_find, m->handle, "nobody", &handle);
    return;
  }
  if (!p->tensors[entry].live) return;
  const tensor_t *base = &p->tensors[p->tensors[entry].base];
  if (!CALL(a, OK, gemini_tensor_find, m->handle, base->name, &handle) && handle != base->handle)
    differs(a, "another tensor than the one that is named so");
}
bool make_tensor_find(actor_t *a, op_t *op) {
  int entry = PICK(a, part_of(a, manager_of(a, op))->tensors, TENSORS);
  op_add(op, entry < 0 || chance(a, 10) ? TENSORS : (uint32_t)entry);
  return true;
}

/* Arguments: entry for the result, tensor, arena. */
void run_counterpart(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0], of = (int)op->arg[1], in = (int)op->arg[2], has = -1;
  if (!m->open || entry >= TENSORS || p->tensors[entry].live || of >= TENSORS || !p->tensors[of].live || in >= ARENAS ||
      !p->arenas[in].live)
    return;
  int base = p->tensors[of].base, root = p->tensors[base].arena;
  for (int i = 0; i < TENSORS; i++)
    if (p->tensors[i].live && p->tensors[i].base == base && p->tensors[i].arena == in) has = i;
  statuses_t allowed = has >= 0 || p->arenas[in].root == root ? OK : INVALID;
  gemini_tensor_t handle = 0;
  if (CALL(a, allowed, gemini_tensor_counterpart, m->handle, p->tensors[of].handle, p->arenas[in].handle, &handle)) {
    if (handle) differs(a, "a failed call has set its result");
    return;
  }
  if (has >= 0) {
    if (handle != p->tensors[has].handle) differs(a, "a second counterpart in one arena");
    return;
  }
  uint64_t from = p->arenas[root].element_bytes, to = p->arenas[in].element_bytes;
  p->tensors[entry] = (tensor_t){ .live = true,
                                  .handle = handle,
                                  .arena = in,
                                  .base = base,
                                  .offset = p->tensors[base].offset / from * to,
                                  .size = p->tensors[base].size / from * to,
                                  .states = 1u << GEMINI_STATE_FREE };
  memcpy(p->tensors[entry].name, p->tensors[base].name, sizeof p->tensors[entry].name);
}
bool make_counterpart(actor_t *a, op_t *op) {
  part_t *p = part_of(a, manager_of(a, op));
  int entry = PICK_FREE(p->tensors, TENSORS), of = PICK(a, p->tensors, TENSORS), in = PICK(a, p->arenas, ARENAS);
  if (entry < 0 || of < 0 || in < 0) return false;
  for (int i = 0, at = in; i < ARENAS && chance(a, 95); i++) /* an arena of the same layout */
    if (p->arenas[(at + i) % ARENAS].live &&
        p->arenas[(at + i) % ARENAS].root == p->arenas[p->tensors[of].arena].root) {
      in = (at + i) % ARENAS;
      break;
    }
  op_add(op, (uint32_t)entry);
  op_add(op, (uint32_t)of);
  op_add(op, (uint32_t)in);
  return true;
}

/* ---- states and zeros */
/* Does to the model what gemini_zero() does to a range. */
static void zero_model(part_t *p, const range_t *r) {
  arena_t *store = &p->arenas[r->store];
  if (r->store != r->arena) { /* an arena that reuses: only bytes that hold gradients become zero */
    bool any = false;
    for (int i = 0; i < TENSORS; i++) {
      const tensor_t *t = &p->tensors[i];
      if (!t->live || t->arena != r->store || t->offset >= r->at + r->size || r->at >= t->offset + t->size) continue;
      any = true;
      uint64_t begin = t->offset > r->at ? t->offset : r->at, end = t->offset + t->size;
      if (end > r->at + r->size) end = r->at + r->size;
      if (t->gradient) memset(store->bytes + begin, 0, end - begin);
    }
    if (any) return;
  }
  memset(store->bytes + r->at, 0, r->size);
  content_written(p, r->arena, r->at, r->size);
}

static statuses_t zero_wrong(const part_t *p, const range_t *r, uint64_t chunk) {
  if (r->wrong) return r->wrong;
  use_t use = range_use(p, r, chunk);
  statuses_t wrong = use.device || use.host ? BUSY : 0;
  if (r->store == r->arena && content_of(p, r, true) == CONTENT_WRONG) wrong |= STATE;
  return wrong;
}

/* The device has failed: some of the bytes may be zero, as gemini_zero() allows. */
static void zero_lost(actor_t *a, manager_t *m, const range_t *r) {
  uint8_t *zeros = calloc(1, r->size + 1);
  look_at_bytes(a, m, r->store, r->at, r->size, zeros, "a zero");
  free(zeros);
}

/* Arguments: tensor, state. */
void run_state_set(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int entry = (int)op->arg[0];
  uint32_t to = op->arg[1];
  if (!m->open || entry >= TENSORS || !p->tensors[entry].live) return;
  tensor_t *t = &p->tensors[entry];
  bool may = false, may_not = false;
  for (uint32_t from = 0; from < GEMINI_STATE_COUNT; from++)
    if (t->states >> from & 1) *(state_legal(from, to) && !t->users ? &may : &may_not) = true;
  statuses_t wrong = to >= GEMINI_STATE_COUNT ? INVALID : may_not ? STATE : 0, perhaps = 0;
  range_t r = range_of(p, false, entry, 0, 0);
  if (to == GEMINI_STATE_FREE) {
    statuses_t zero = zero_wrong(p, &r, chunk_bytes(a, m));
    if (zero) may = false;
    wrong |= zero;
    perhaps = no_room(a, m, 0);
  }
  gemini_status_t status = CALL(a, wrong | perhaps | (may && to < GEMINI_STATE_COUNT ? OK : 0), gemini_tensor_state_set,
                                m->handle, t->handle, to);
  if (status == GEMINI_ERR_DEVICE) zero_lost(a, m, &r);
  if (status) return;
  t->states = 1u << to;
  if (to != GEMINI_STATE_FREE) return;
  zero_model(p, &r);
  p->touched = true;
}
bool make_state_set(actor_t *a, op_t *op) {
  int entry = PICK(a, part_of(a, manager_of(a, op))->tensors, TENSORS);
  static const uint32_t states[] = { GEMINI_STATE_FREE, GEMINI_STATE_HOLD, GEMINI_STATE_READY_FOR_REDUCE };
  if (entry < 0) return false;
  op_add(op, (uint32_t)entry);
  op_add(op, chance(a, 90) ? states[rnd(a, 3)] : rnd(a, GEMINI_STATE_COUNT + 1));
  return true;
}

void run_zero(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 0);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  if (!m->open || !r.live) return;
  statuses_t wrong = zero_wrong(p, &r, chunk_bytes(a, m)), perhaps = no_room(a, m, 0);
  gemini_access_t access = ACCESS(r.object, s.offset, s.size, s.mode, s.tier);
  gemini_status_t status = CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_zero, m->handle, &access);
  if (status == GEMINI_ERR_DEVICE) zero_lost(a, m, &r);
  if (status || !r.size) return;
  zero_model(p, &r);
  p->touched = true;
  if (r.store != r.arena) gaps_look(a, m, r.store, r.at, r.size);
}
bool make_zero(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  spec_t s;
  if (!spec_make(a, m, &s)) return false;
  uint64_t limit = s.is_arena ? part_of(a, m)->arenas[s.entry].size : part_of(a, m)->tensors[s.entry].size;
  /* some whole chunks and a part of one */
  if (!s.offset && !s.size && chance(a, 40)) s.size = 1 + rnd(a, (uint32_t)limit);
  s.hold = 0;
  spec_add(op, s);
  return true;
}
