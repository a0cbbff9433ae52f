/* Load, store, norm, update. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tester.h"

/* ---- load: seed, bytes that the file lacks, where in the file; access */
/* Sets the states of tensors into which bytes were read, even in part. */
static void loaded(part_t *p, int arena, uint64_t at, uint64_t size, bool surely) {
  for (int i = 0; i < TENSORS && size; i++) {
    tensor_t *t = &p->tensors[i];
    if (!t->live || t->arena != arena || t->offset >= at + size || at >= t->offset + t->size) continue;
    if (!(t->states >> GEMINI_STATE_FREE & 1)) continue;
    t->states |= 1u << GEMINI_STATE_HOLD;
    if (surely) t->states &= ~(1u << GEMINI_STATE_FREE);
  }
}

void run_load(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 3);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  if (!m->open || !r.live) return;
  uint64_t seed = op->arg[0], lacks = op->arg[1] < r.size ? op->arg[1] : r.size, from = op->arg[2];
  statuses_t wrong = r.wrong, perhaps = no_room(a, m, 0);
  if (!wrong) {
    use_t use = range_use(p, &r, chunk_bytes(a, m));
    if (use.device || use.host || use.pins) wrong |= BUSY;
    if (content_of(p, &r, true) == CONTENT_WRONG) wrong |= STATE;
    if (ftruncate(a->fd, 0) || ftruncate(a->fd, (off_t)(from + r.size - lacks))) abort();
    uint8_t *bytes = malloc(r.size + 1);
    pattern_fill(bytes, r.at, r.size, seed);
    if (pwrite(a->fd, bytes, r.size - lacks, (off_t)from) != (ssize_t)(r.size - lacks)) abort();
    free(bytes);
  }
  gemini_access_t access = ACCESS(r.object, s.offset, s.size, s.mode, s.tier);
  gemini_status_t status =
      CALL(a, wrong ? wrong | perhaps : (lacks ? FORMAT : OK) | perhaps, gemini_load, m->handle, &access, a->fd, from);
  bool no_room_midway = ONE(status) & NO_ROOM && (m->has_files || a->w->parallel || a->fired);
  bool failed_midway = status == GEMINI_ERR_IO || status == GEMINI_ERR_DEVICE || status == GEMINI_ERR_OOM_SYSTEM;
  if (!wrong && (failed_midway || no_room_midway)) {
    uint8_t *wanted = malloc(r.size + 1);
    pattern_fill(wanted, r.at, r.size, seed);
    look_at_bytes(a, m, r.store, r.at, r.size, wanted, "a load");
    free(wanted);
    loaded(p, r.arena, r.at, r.size, false);
  } else if (status == GEMINI_OK || status == GEMINI_ERR_FORMAT) {
    uint64_t done = r.size - lacks;
    pattern_fill(p->arenas[r.store].bytes + r.at, r.at, done, seed);
    loaded(p, r.arena, r.at, done, true);
    if (!status) content_written(p, r.arena, r.at, r.size);
    p->touched = true;
  }
}
bool make_load(actor_t *a, op_t *op) {
  spec_t s;
  if (!spec_make(a, manager_of(a, op), &s)) return false;
  op_add(op, 1 + rnd(a, 1 << 20));
  op_add(op, chance(a, 10) ? rnd(a, 100000) : 0);
  op_add(op, chance(a, 30) ? rnd(a, 5000) : 0);
  s.hold = 0;
  spec_add(op, s);
  return true;
}

/* ---- borrow: number of the file, where in it; access */
static int borrowed_file(actor_t *a, uint64_t k) {
  if (a->borrowed[k]) return a->borrowed[k];
  int fd = memfd_create("borrowed", MFD_CLOEXEC);
  uint8_t *bytes = malloc(BORROWED_BYTES);
  if (fd <= 0 || !bytes) abort();
  pattern_fill(bytes, 0, BORROWED_BYTES, k + 1);
  if (pwrite(fd, bytes, BORROWED_BYTES, 0) != BORROWED_BYTES) abort();
  free(bytes);
  return a->borrowed[k] = fd;
}

void run_borrow(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 2);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  /* the file's pattern at this place are finite numbers, as all patterns are */
  uint64_t file = op->arg[0] % BORROWED, from = op->arg[1] - op->arg[1] % 8 + r.at % 8;
  if (!m->open || !r.live) return;
  statuses_t wrong = r.wrong, perhaps = no_room(a, m, 0);
  bool ends_early = r.size && from + r.size > BORROWED_BYTES;
  if (!wrong) {
    use_t use = range_use(p, &r, chunk_bytes(a, m));
    if (use.device || use.host || use.pins) wrong |= BUSY;
    range_t all = r; /* with the other tensors that lie in it */
    all.is_arena = true;
    if (content_of(p, &all, true) != CONTENT_FINE) wrong |= STATE;
  }
  if (ends_early) perhaps |= FORMAT;
  gemini_access_t access = ACCESS(r.object, s.offset, s.size, s.mode, s.tier);
  gemini_status_t status = CALL(a, wrong ? wrong | perhaps : (ends_early ? FORMAT : OK) | perhaps, gemini_borrow,
                                m->handle, &access, borrowed_file(a, file), from);
  if (wrong || !r.size || status == GEMINI_ERR_FORMAT) return;
  uint8_t *wanted = malloc(r.size);
  pattern_fill(wanted, from, r.size, file + 1);
  if (status) look_at_bytes(a, m, r.store, r.at, r.size, wanted, "a borrow"); /* of which a part was to be loaded */
  else memcpy(p->arenas[r.store].bytes + r.at, wanted, r.size);
  free(wanted);
  loaded(p, r.arena, r.at, r.size, !status);
  p->touched = true;
}
bool make_borrow(actor_t *a, op_t *op) {
  spec_t s;
  if (!spec_make(a, manager_of(a, op), &s)) return false;
  op_add(op, rnd(a, BORROWED));
  op_add(op, chance(a, 90) ? rnd(a, 100000) : BORROWED_BYTES - rnd(a, 100000));
  s.hold = 0;
  spec_add(op, s);
  return true;
}

/* ---- store: where in the file, kind of file; access */
void run_store(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 2);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  if (!m->open || !r.live) return;
  statuses_t wrong = r.wrong, perhaps = no_room(a, m, 0);
  if (!wrong) {
    use_t use = range_use(p, &r, chunk_bytes(a, m));
    if (use.device_writers || use.host_writers) wrong |= BUSY;
    if (!r.is_arena && content_of(p, &r, false) == CONTENT_WRONG) wrong |= STATE; /* an arena's is stored as it is */
  }
  gemini_access_t access = ACCESS(r.object, s.offset, s.size, s.mode, s.tier);
  if (op->arg[1] == 1) { /* a full disk */
    int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    if (full >= 0) {
      CALL(a, wrong ? wrong | perhaps | OOM_FILE : (r.size ? OOM_FILE : OK) | perhaps, gemini_store, m->handle, &access,
           full, 0);
      close(full);
    }
    return;
  }
  uint64_t to = op->arg[0];
  if (ftruncate(a->fd, 0)) abort();
  if (CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_store, m->handle, &access, a->fd, to) || !r.size) return;
  const uint8_t *model = p->arenas[r.store].bytes + r.at;
  if (!p->arenas[r.store].unknown && memcmp(a->file + to, model, r.size)) {
    uint64_t i = 0;
    while (a->file[to + i] == model[i]) i++;
    differs(a, "byte %llu is stored as %#x, expected %#x", (unsigned long long)i, a->file[to + i], model[i]);
  }
}
bool make_store(actor_t *a, op_t *op) {
  spec_t s;
  if (!spec_make(a, manager_of(a, op), &s)) return false;
  op_add(op, chance(a, 30) ? rnd(a, 5000) : 0);
  op_add(op, chance(a, 4));
  s.hold = 0;
  spec_add(op, s);
  return true;
}

/* ---- norm: dtype, stream; access */
/* The bytes that a norm sums: zeros where a reusing arena has no gradient. padding_out: bytes between tensors are not
 * zero, and no document says whether a reusing arena counts them. */
static uint8_t *norm_bytes(const part_t *p, const range_t *r, bool *padding_out) {
  uint8_t *bytes = malloc(r->size + 8);
  const uint8_t *model = p->arenas[r->store].bytes;
  memcpy(bytes, model + r->at, r->size);
  *padding_out = false;
  if (r->store == r->arena) return bytes;
  uint8_t *in_tensor = calloc(1, r->size + 1); /* bit 0: in a tensor; bit 1: in a tensor that holds no gradient */
  bool any = false;
  for (int i = 0; i < TENSORS; i++) {
    const tensor_t *t = &p->tensors[i];
    if (!t->live || t->arena != r->store) continue;
    uint64_t begin = t->offset > r->at ? t->offset : r->at, end = t->offset + t->size;
    if (end > r->at + r->size) end = r->at + r->size;
    for (uint64_t k = begin; k < end; k++) in_tensor[k - r->at] |= t->gradient ? 1 : 2;
    any |= begin < end;
  }
  for (uint64_t k = 0; k < r->size && any; k++) {
    if (!in_tensor[k]) *padding_out |= bytes[k] != 0;
    if (in_tensor[k] == 2) bytes[k] = 0;
    if (in_tensor[k] == 3) *padding_out = true; /* tied tensors, of which one holds a gradient and one does not */
  }
  free(in_tensor);
  return bytes;
}

void run_norm(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  spec_t s = spec_at(op, 2);
  range_t r = range_of(p, s.is_arena, s.entry, s.offset, s.size);
  uint32_t dtype = op->arg[0];
  int stream = (int)op->arg[1] - 1;
  if (!m->open || !r.live || stream >= STREAMS) return;
  statuses_t wrong = r.wrong | (dtype > GEMINI_DTYPE_F64 ? INVALID : 0), perhaps = no_room(a, m, 0);
  if (!wrong) {
    if (r.at % dtype_bytes(dtype) || r.size % dtype_bytes(dtype)) wrong |= INVALID;
    if (r.store == r.arena && content_of(p, &r, false) == CONTENT_WRONG) wrong |= STATE;
    use_t use = range_use(p, &r, chunk_bytes(a, m));
    if (use.device_writers || use.host_writers) perhaps |= BUSY; /* gemini.h does not say what happens then */
    sync_holds(a, m, r.store, r.at, r.size, true);
  }
  gemini_access_t access = ACCESS(r.object, s.offset, s.size, s.mode, s.tier);
  double norm = -1;
  if (CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_norm, m->handle, &access, dtype,
           stream_handle(a, m, stream), &norm)) {
    if (norm != -1) differs(a, "a failed call has set its result");
    return;
  }
  bool padding;
  uint8_t *bytes = norm_bytes(p, &r, &padding);
  double expected = norm_of(bytes, r.at, r.size, dtype);
  free(bytes);
  if (padding || r.wrong || p->arenas[r.store].unknown) return;
  /* The sums of gradients that are not adjacent may be added separately. */
  bool same = r.store == r.arena ? norm == expected : fabs(norm - expected) <= 1e-12 * expected;
  if (!same) differs(a, "norm is %.17g, expected %.17g", norm, expected);
}
bool make_norm(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  spec_t s;
  if (!spec_make(a, m, &s)) return false;
  op_add(op, chance(a, 98) ? rnd(a, 4) : rnd(a, 8));
  op_add(op, (uint32_t)(chance(a, 60) ? -1 : PICK(a, part_of(a, m)->streams, STREAMS)) + 1);
  s.hold = 0;
  spec_add(op, s);
  return true;
}

/* ---- update: stream, flags, salt, first, count; arenas and modes */
static void span_work(const update_t *u, const gemini_update_span_t *span) {
  void *ptr[UPDATE_ARENAS];
  for (uint32_t k = 0; k < u->count; k++) {
    ptr[k] = span->out[k]; /* speculated: starts from a copy of the old values */
    if (ptr[k] != span->ptr[k]) memcpy(ptr[k], span->ptr[k], span->element_count * u->element_bytes[k]);
  }
  update_apply(u, span->first_element, span->element_count, ptr);
}

typedef struct span_job {
  update_t *u;
  gemini_update_span_t span;
} span_job_t;
static void span_job_run(void *user) {
  span_job_t *j = user;
  span_work(j->u, &j->span);
  free(j);
}

static void update_span(void *user, const gemini_update_span_t *span) {
  update_t *u = user;
  const world_t *w = u->actor->w;
  if (span->struct_size != sizeof *span || span->arena_count != u->count || !span->element_count ||
      span->first_element < u->first || span->first_element + span->element_count > u->first + u->elements)
    differs_in_callback(w, "gemini_update_fn is called with a span that is not of the update");
  atomic_fetch_add(&u->seen, span->element_count);
  if (span->tier == GEMINI_TIER_HOST) {
    span_work(u, span);
    return;
  }
  span_job_t *j = malloc(sizeof *j);
  *j = (span_job_t){ u, *span };
  faults_pause(true); /* faults are for the operation's own call, not for calls in the callback */
  driver_pause(w, true);
  if (gemini_stream_call(u->mgr, span->stream, span_job_run, j))
    differs_in_callback(w, "gemini_stream_call() fails in an update's span");
  driver_pause(w, false);
  faults_pause(false);
}

void updates_free(actor_t *a, gemini_manager_t mgr) {
  for (update_t **at = &a->updates, *u; (u = *at);) {
    if (u->mgr == mgr) {
      *at = u->next;
      free(u);
    } else {
      at = &u->next;
    }
  }
}

/* Computes what an update must make of each element, from the arenas as they are now. */
static void update_model(const part_t *p, const update_t *u, const int *arenas, uint8_t *results[UPDATE_ARENAS]) {
  void *ptr[UPDATE_ARENAS];
  for (uint32_t k = 0; k < u->count; k++) {
    const arena_t *arena = &p->arenas[arenas[k]], *store = &p->arenas[arena->store];
    uint64_t at = u->first * arena->element_bytes, size = u->elements * arena->element_bytes;
    uint8_t *copy = malloc(size + 8);
    memcpy(copy, store->bytes + at, size);
    /* a gradient that was not written counts as zero */
    for (int i = 0; i < TENSORS && arena->store != arenas[k]; i++) {
      const tensor_t *t = &p->tensors[i];
      if (!t->live || t->arena != arena->store || t->gradient || t->offset >= at + size || at >= t->offset + t->size)
        continue;
      uint64_t begin = t->offset > at ? t->offset : at, end = t->offset + t->size;
      if (end > at + size) end = at + size;
      memset(copy + (begin - at), 0, end - begin);
    }
    ptr[k] = results[k] = copy;
  }
  update_apply(u, u->first, u->elements, ptr);
}

static void update_done(part_t *p, const update_t *u, const int *arenas, uint8_t *results[UPDATE_ARENAS]) {
  bool unknown = false;
  for (uint32_t k = 0; k < u->count; k++) unknown |= p->arenas[p->arenas[arenas[k]].store].unknown;
  for (uint32_t k = 0; k < u->count; k++) {
    const arena_t *arena = &p->arenas[arenas[k]];
    uint64_t bytes = arena->element_bytes, at = u->first * bytes, size = u->elements * bytes;
    if (!(u->modes[k] & GEMINI_WRITE) || !size) continue;
    memcpy(p->arenas[arena->store].bytes + at, results[k], size);
    p->arenas[arena->store].unknown = unknown;
    for (int i = 0; i < TENSORS; i++) {
      tensor_t *t = &p->tensors[i];
      if (!t->live || t->arena != arenas[k] || t->offset >= at + size || at >= t->offset + t->size) continue;
      t->states = 1u << GEMINI_STATE_HOLD;
      t->gradient = false;
    }
  }
}

/* Does the last error say that a piece of an update will never run? */
static bool says_did_not_run(void) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  return !gemini_last_error(&info) && strstr(info.message, "an update did not run");
}

/* The update failed for good: nobody can tell how far it ran, so the bytes count as unknown. */
static void update_lost(const update_t *u) {
  part_t *p = u->part;
  for (uint32_t k = 0; k < u->count; k++) {
    int store = p->arenas[u->arenas[k]].store;
    if (u->modes[k] & GEMINI_WRITE && p->arenas[u->arenas[k]].live) p->arenas[store].unknown = true;
  }
}
void updates_lost(world_t *w, bool pending_only) {
  for (uint32_t t = 0; t < w->options.threads; t++)
    for (const update_t *u = w->actors[t].updates; u; u = u->next) {
      if (!u->accepted || (pending_only && !u->pending)) continue;
      update_lost(u);
      if (pending_only) atomic_store(&w->update_failed, true);
    }
}

static statuses_t update_wrong(const part_t *p, const update_t *u, const int *arenas, bool zero_count, uint64_t chunk,
                               statuses_t *perhaps) {
  statuses_t wrong = 0;
  uint64_t least = UINT64_MAX;
  for (uint32_t k = 0; k < u->count; k++) {
    const arena_t *arena = &p->arenas[arenas[k]];
    if (!u->modes[k] || u->modes[k] > GEMINI_READ_WRITE) wrong |= INVALID;
    if (arena->root != p->arenas[arenas[0]].root) wrong |= INVALID;
    for (uint32_t j = 0; j < k; j++)
      if (arenas[j] == arenas[k]) wrong |= INVALID;
    if (arena->store != arenas[k] && u->modes[k] & GEMINI_WRITE) wrong |= INVALID;
    if (arena->size / arena->element_bytes < least) least = arena->size / arena->element_bytes;
  }
  if (zero_count && u->first) wrong |= INVALID;
  if (u->first > least || u->elements > least - u->first) wrong |= INVALID;
  if (wrong) return wrong;
  bool zero_gradient = false, param_written = false, param_read = false;
  for (uint32_t k = 0; k < u->count; k++) {
    const arena_t *arena = &p->arenas[arenas[k]];
    uint64_t bytes = arena->element_bytes, at = u->first * bytes, size = u->elements * bytes;
    range_t r = { .arena = arenas[k], .store = arena->store, .at = at, .size = size };
    use_t use = range_use(p, &r, chunk);
    if (size && (use.device || use.host)) wrong |= BUSY;
    if (use.pins) *perhaps |= OOM_DEVICE;
    bool gradients = arena->store != arenas[k], reused = reused_by(p, arenas[k]) >= 0;
    for (int i = 0; i < TENSORS && (gradients || reused); i++) {
      const tensor_t *t = &p->tensors[i];
      if (!t->live || t->arena != arena->store || t->offset >= at + size || at >= t->offset + t->size) continue;
      if (gradients) zero_gradient |= !t->gradient;
      if (!reused || !t->gradient) continue;
      if (u->modes[k] & GEMINI_READ) wrong |= STATE;
      if (u->modes[k] & GEMINI_WRITE && (t->offset < at || t->offset + t->size > at + size)) wrong |= INVALID;
    }
    if (gradients)
      for (uint32_t j = 0; j < u->count; j++) {
        if (arenas[j] != arena->store) continue;
        param_written |= u->modes[j] & GEMINI_WRITE;
        param_read |= u->modes[j] & GEMINI_READ;
      }
  }
  /* A parameter and a gradient that counts as zero cannot both be read from the same bytes. */
  if (zero_gradient && (!param_written || param_read)) wrong |= STATE;
  return wrong;
}

void run_update(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int arenas[UPDATE_ARENAS], stream = (int)op->arg[0] - 1;
  gemini_arena_t handles[UPDATE_ARENAS];
  if (!m->open || stream >= STREAMS) return;
  update_t *u = calloc(1, sizeof *u);
  *u = (update_t){
    .actor = a, .salt = op->arg[2], .first = op->arg[3], .elements = op->arg[4], .mgr = m->handle, .part = p
  };
  uint64_t least = UINT64_MAX;
  for (uint32_t i = 5; i + 1 < op->count && u->count < UPDATE_ARENAS; i += 2, u->count++) {
    int entry = (int)op->arg[i];
    if (entry >= ARENAS || !p->arenas[entry].live) {
      free(u);
      return;
    }
    arenas[u->count] = u->arenas[u->count] = entry;
    handles[u->count] = p->arenas[entry].handle;
    u->modes[u->count] = op->arg[i + 1];
    u->element_bytes[u->count] = p->arenas[entry].element_bytes;
    if (p->arenas[entry].size / p->arenas[entry].element_bytes < least)
      least = p->arenas[entry].size / p->arenas[entry].element_bytes;
  }
  if (!u->count) {
    free(u);
    return;
  }
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.flags = op->arg[1];
  update.arenas = handles;
  update.modes = u->modes;
  update.arena_count = u->count;
  update.first_element = u->first;
  update.element_count = u->elements;
  update.stream = stream_handle(a, m, stream);
  update.fn = update_span;
  update.user = u;
  /* What is speculated is only taken over by an update of the same function. */
  const bool speculates = update.flags & GEMINI_UPDATE_SPECULATE, commits = update.flags & GEMINI_UPDATE_COMMIT;
  if (speculates || commits) u->salt = 7;
  bool zero_count = !u->elements;
  if (zero_count) u->elements = least;
  statuses_t perhaps = no_room(a, m, 0) | (m->has_files ? OOM_HOST | OOM_FILE : 0);
  statuses_t wrong = update_wrong(p, u, arenas, zero_count, chunk_bytes(a, m), &perhaps);
  if (op->arg[1] & ~7U || (speculates && update.flags != GEMINI_UPDATE_SPECULATE)) wrong |= INVALID;
  uint8_t *results[UPDATE_ARENAS] = { NULL };
  if (!wrong) update_model(p, u, arenas, results);
  u->next = a->updates;
  a->updates = u;
  bool late = update.flags & GEMINI_UPDATE_LATE;
  if (perhaps && !wrong && !late) perhaps |= PENDING;
  perhaps |= updates_failed(a);
  if (speculates) { /* changes nothing; chunks that are in use are left out */
    QUIET(a, OK | wrong | perhaps, gemini_update, m->handle, &update);
    for (uint32_t k = 0; k < u->count; k++) free(results[k]);
    return;
  }
  gemini_status_t status = CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_update, m->handle, &update);
  u->accepted = !status || status == ERR_PENDING; /* an update is accepted as a whole or not at all */
  u->commits = commits;
  u->pending = u->accepted && (late || status == ERR_PENDING);
  if (!wrong && u->accepted) {
    if (!status && !late && !commits && atomic_load(&u->seen) != u->elements)
      differs(a, "spans of %llu elements were given to the function, of %llu", (unsigned long long)u->seen,
              (unsigned long long)u->elements);
    update_done(p, u, arenas, results);
    /* A late one tells later that the read of a chunk failed when a worker had its piece already. */
    bool failed =
        a->fired && (op->fault == FAULT_FILE || op->fault == FAULT_RING) && (status ? says_did_not_run() : late);
    if (failed) atomic_store(&a->w->update_failed, true);
    if (failed || (a->fired && op->fault == FAULT_DRIVER)) update_lost(u);
    p->touched = true;
  }
  for (uint32_t k = 0; k < u->count; k++) free(results[k]);
}

bool make_update(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  int first = PICK(a, p->arenas, ARENAS);
  if (first < 0) return false;
  int root = p->arenas[first].root;
  uint64_t elements = p->arenas[root].size / p->arenas[root].element_bytes, begin = 0, count = 0;
  if (!elements) return false;
  if (chance(a, 40)) {
    begin = rnd(a, (uint32_t)elements);
    count = 1 + rnd(a, (uint32_t)(elements - begin));
  } else if (chance(a, 30)) { /* a tensor */
    int t = PICK(a, p->tensors, TENSORS);
    if (t >= 0 && p->arenas[p->tensors[t].arena].root == root) {
      begin = p->tensors[t].offset / p->arenas[p->tensors[t].arena].element_bytes;
      count = p->tensors[t].size / p->arenas[p->tensors[t].arena].element_bytes;
    }
  }
  op_add(op, (uint32_t)(chance(a, 50) ? -1 : PICK(a, p->streams, STREAMS)) + 1);
  /* With faults and several threads nobody could tell which bytes an update has that another thread's fault ended. */
  bool late = chance(a, 50) && !(a->w->options.faults && a->w->options.threads > 1);
  uint32_t flags = late ? GEMINI_UPDATE_LATE : 0;
  if (chance(a, 30)) flags = GEMINI_UPDATE_SPECULATE;
  else if (chance(a, 50)) flags |= GEMINI_UPDATE_COMMIT;
  op_add(op, flags);
  op_add(op, 1 + rnd(a, 1 << 20));
  op_add(op, begin);
  op_add(op, count);
  for (int i = 0; i < ARENAS; i++) {
    const arena_t *arena = &p->arenas[i];
    if (!arena->live || arena->root != root || (i != root && chance(a, 20))) continue;
    bool reuses = arena->store != i, reused = reused_by(p, i) >= 0;
    uint32_t mode = reuses ? GEMINI_READ : reused && chance(a, 90) ? GEMINI_WRITE : 1 + rnd(a, 3);
    if (reused && !feature(a, FEATURE_reuse_read)) mode = GEMINI_WRITE;
    op_add(op, (uint32_t)i);
    op_add(op, chance(a, 1) && feature(a, FEATURE_reuse_read) ? rnd(a, 5) : mode);
  }
  return op->count > 5;
}

void run_update_wait(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open) return;
  statuses_t perhaps = no_room(a, m, 0) | (m->has_files ? OOM_HOST | OOM_FILE : 0);
  if (CALL(a, OK | perhaps | updates_failed(a), gemini_update_wait, m->handle)) return;
  updates_done(a, m);
}
/* All updates are done: checks that the function of each was called for every element, and forgets them. */
void updates_done(actor_t *a, const manager_t *m) {
  for (const update_t *u = a->updates; u; u = u->next)
    if (u->mgr == m->handle && u->accepted && !u->commits && atomic_load(&u->seen) != u->elements)
      differs(a, "an update is done, but spans of %llu elements were given to its function, of %llu",
              (unsigned long long)atomic_load(&u->seen), (unsigned long long)u->elements);
  updates_free(a, m->handle);
}
bool make_update_wait(actor_t *a, op_t *op) {
  (void)op;
  return a->updates != NULL || chance(a, 20);
}

void run_update_drop(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (m->open) CALL(a, OK, gemini_update_drop, m->handle);
}
bool make_update_drop(actor_t *a, op_t *op) { return manager_of(a, op)->open; }
