/* Managers: open, close, budgets, checkpoints. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tester.h"

/* ---- open: arguments, budgets in chunks */
enum { DEVICE_CHUNKS, MARGIN, HOST_CHUNKS, FILE_CHUNKS, CHUNK, FLAGS, PLACEMENT, WARMUP, WORKERS, KEEP, ENGINE, RATE };

static uint32_t manager_index(const actor_t *a, const manager_t *m) { return (uint32_t)(m - a->w->managers); }

/* The names of a manager's folders and files. */
static void folders(const actor_t *a, const manager_t *m, char paths[2 * PATHS + 64], char keep[32]) {
  uint32_t i = manager_index(a, m);
  snprintf(paths, 2 * PATHS + 64, "%s/a%u:%s/b%u", a->w->directory, i, a->w->directory, i);
  snprintf(keep, 32, "kept%u", i);
}

static statuses_t open_allowed(const actor_t *a, const gemini_config_t *c, bool kept) {
  statuses_t allowed = OK;
  if (c->file_bytes && c->file_engine == GEMINI_FILE_ENGINE_URING && !a->w->uring) return UNSUPPORTED;
  /* the failing driver does not report the GPU's features */
  if (a->op && a->op->fault == FAULT_DRIVER) allowed |= UNSUPPORTED;
  /* the budget may be too small for the last checkpoint */
  if (kept) allowed |= OOM_FILE;
  return allowed;
}

static gemini_status_t open_manager(actor_t *a, manager_t *m, const gemini_config_t *config, bool quiet) {
  char paths[2 * PATHS + 64], keep[32];
  gemini_config_t c = *config;
  gemini_manager_t handle = 0;
  folders(a, m, paths, keep);
  c.file_dir = c.file_bytes ? paths : NULL;
  c.checkpoint_name = c.checkpoint_name ? keep : NULL;
  statuses_t allowed = open_allowed(a, &c, c.checkpoint_name && a->w->kept_count[manager_index(a, m)]);
  gemini_status_t status =
      quiet ? QUIET(a, allowed, gemini_manager_open, &c, &handle) : CALL(a, allowed, gemini_manager_open, &c, &handle);
  if (status) {
    if (handle) differs(a, "a failed call has set its result");
    bool needs_uring = c.file_bytes && c.file_engine == GEMINI_FILE_ENGINE_URING;
    if (status == GEMINI_ERR_UNSUPPORTED && !needs_uring && !(allowed & UNSUPPORTED))
      differs(a, "a manager that does not need io_uring was refused as not supported");
    return status;
  }
  m->open = true;
  m->handle = handle;
  m->config = m->opened = *config;
  m->host_bytes_most = config->host_bytes;
  m->has_files = config->file_bytes > 0;
  m->cannot_grow = a->fired > 0;
  m->op_stream = -1;
  return status;
}

void run_open(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  uint64_t unit = a->w->unit;
  if (m->open) return;
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device = a->w->options.cuda ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  c.device_bytes = op->arg[DEVICE_CHUNKS] * unit;
  c.device_margin_bytes = op->arg[MARGIN] * unit;
  c.host_bytes = op->arg[HOST_CHUNKS] * unit;
  c.file_bytes = op->arg[FILE_CHUNKS] * unit;
  c.chunk_bytes = op->arg[CHUNK] ? unit << (op->arg[CHUNK] - 1) : 0;
  c.flags = op->arg[FLAGS];
  c.placement = op->arg[PLACEMENT];
  c.warmup_iterations = op->arg[WARMUP];
  c.update_threads = op->arg[WORKERS];
  c.checkpoint_name = op->arg[KEEP] ? "kept" : NULL;
  c.file_engine = op->arg[ENGINE];
  c.static_param_fraction = c.static_optim_fraction = 0.5;
  c.sim_h2d_bytes_per_s = c.sim_d2h_bytes_per_s = op->arg[RATE] ? UINT64_C(4) << 30 : 0;
  uint64_t least = c.chunk_bytes ? c.chunk_bytes : unit;
  if (c.device_bytes < c.device_margin_bytes + least || !c.host_bytes) return;
  const kept_t *kept = &a->w->kept[manager_index(a, m)][0];
  if (c.checkpoint_name && (!c.file_bytes || !c.chunk_bytes)) return;
  if (c.checkpoint_name && a->w->kept_count[manager_index(a, m)] && kept->chunk_bytes != c.chunk_bytes) return;
  open_manager(a, m, &c, false);
}

bool make_open(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  const kept_t *kept = &a->w->kept[manager_index(a, m)][0];
  bool has_kept = a->w->kept_count[manager_index(a, m)] > 0;
  if (m->open || (manager_index(a, m) && chance(a, 90))) return false; /* mostly one manager is open */
  /* Three sorts of configurations: everything fits, so that the chunk size may be searched again; with files; tight
   * budgets. */
  bool easy = chance(a, 30), files = !easy && a->w->options.files && chance(a, 70);
  bool keep = files && chance(a, has_kept ? 80 : 50), ample = easy || chance(a, 20);
  uint32_t chunk = keep ? 1 + rnd(a, 2) : easy || chance(a, 40) ? 0 : 1 + rnd(a, 2);
  if (keep && has_kept) chunk = kept->chunk_bytes == a->w->unit ? 1 : 2;
  if (a->w->options.cuda) chunk = chunk > 1 ? 1 : chunk;
  bool wide = !a->w->options.cuda && (easy || chance(a, 20));
  op_add(op, wide ? 32 + rnd(a, 64) : 3 + rnd(a, 20));
  op_add(op, chance(a, 20) ? 1 : 0);
  op_add(op, ample ? 100 + 50 * a->w->options.threads + rnd(a, 100) : chance(a, 50) ? 2 + rnd(a, 10) : 10 + rnd(a, 40));
  op_add(op, files ? 16 + rnd(a, 300) : 0);
  op_add(op, chunk);
  op_add(op, chance(a, 30) ? GEMINI_CONFIG_STRICT : 0);
  op_add(op, chance(a, 50) ? GEMINI_PLACEMENT_AUTO : rnd(a, 4));
  op_add(op, rnd(a, 3));
  op_add(op, 1 + rnd(a, 3));
  op_add(op, keep);
  op_add(op, chance(a, 40) ? GEMINI_FILE_ENGINE_AUTO : a->w->uring ? rnd(a, 3) : 2 * rnd(a, 2));
  op_add(op, chance(a, 5));
  return true;
}

/* ---- close */
void manager_forget(actor_t *a, manager_t *m) {
  world_t *w = a->w;
  for (uint32_t t = 0; t < w->options.threads; t++) {
    part_t *p = &m->parts[t];
    actor_t *of = &w->actors[t];
    for (int i = 0; i < ARENAS; i++)
      if (p->arenas[i].live) arena_forget(of, m, p, i);
    for (int i = 0; i < STREAMS; i++)
      if (p->streams[i].live) gone(of, p->streams[i].handle);
    updates_free(of, m->handle);
  }
  gone(a, m->handle);
  memset(m, 0, sizeof *m);
}

static bool any_hold(const actor_t *a, const manager_t *m, bool writing) {
  for (uint32_t t = 0; t < a->w->options.threads; t++)
    for (int i = 0; i < HOLDS; i++) {
      const hold_t *h = &m->parts[t].holds[i];
      if (h->live && h->size && (!writing || h->mode & GEMINI_WRITE)) return true;
    }
  return false;
}

static bool close_manager(actor_t *a, manager_t *m, bool quiet) {
  bool busy = any_hold(a, m, false);
  /* gemini_manager_close() is the last call that can report an update that found no room. */
  statuses_t perhaps = updates_failed(a);
  for (uint32_t t = 0; t < a->w->options.threads; t++)
    for (const update_t *u = a->w->actors[t].updates; u; u = u->next)
      if (u->mgr == m->handle) perhaps |= NO_ROOM;
  gemini_status_t status = quiet ? QUIET(a, busy ? BUSY : OK | perhaps, gemini_manager_close, m->handle)
                                 : CALL(a, busy ? BUSY : OK | perhaps, gemini_manager_close, m->handle);
  if (status == GEMINI_ERR_BUSY || status == GEMINI_ERR_HANDLE) return false;
  return true;
}
void run_close(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open) return;
  check_part(a, m);
  if (close_manager(a, m, false)) manager_forget(a, m);
}
bool make_close(actor_t *a, op_t *op) { return manager_of(a, op)->open; }

/* ---- reopen: close, open, create all arenas and tensors again; argument 1: in another order */
static void make_again(actor_t *a, manager_t *m, const part_t *was, bool backwards) {
  part_t *p = part_of(a, m);
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < ARENAS; k++) {
      int i = backwards ? ARENAS - 1 - k : k;
      const arena_t *old = &was->arenas[i];
      if (!old->live || (old->root == i) != !pass) continue; /* first arenas that follow no other */
      gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
      c.kind = old->kind;
      c.element_bytes = old->element_bytes;
      c.capacity_bytes = old->capacity;
      c.name = old->name;
      c.like = old->root == i ? 0 : p->arenas[old->root].handle;
      c.reuse = old->store == i ? 0 : p->arenas[old->store].handle;
      arena_t *arena = &p->arenas[i];
      *arena = *old;
      arena->unknown = false;
      memset(arena->pins, 0, sizeof arena->pins);
      arena->bytes = old->store == i ? calloc(1, old->capacity + 1) : NULL;
      if (QUIET(a, OK, gemini_arena_create, m->handle, &c, &arena->handle)) abort();
      gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
      QUIET(a, OK, gemini_arena_info, m->handle, arena->handle, &info);
      arena->base = info.base;
      arena->size = 0;
    }
  for (int i = 0; i < ARENAS; i++) { /* takes all bytes of each arena, then registers tensors at their offsets */
    const arena_t *old = &was->arenas[i];
    uint64_t at;
    if (!old->live || old->root != i || !old->size) continue;
    QUIET(a, OK, gemini_arena_take, m->handle, p->arenas[i].handle, old->size, &at);
  }
  for (int i = 0; i < ARENAS; i++) p->arenas[i].size = was->arenas[i].size;
  for (int pass = 0; pass < 2; pass++)
    for (int k = 0; k < TENSORS; k++) {
      int i = backwards ? TENSORS - 1 - k : k;
      const tensor_t *old = &was->tensors[i];
      if (!old->live || (old->base == i) != !pass) continue;
      tensor_t *t = &p->tensors[i];
      *t = *old;
      t->users = 0;
      t->states = 1u << GEMINI_STATE_FREE;
      t->gradient = false;
      if (pass)
        QUIET(a, OK, gemini_tensor_counterpart, m->handle, p->tensors[old->base].handle, p->arenas[old->arena].handle,
              &t->handle);
      else
        QUIET(a, OK, gemini_tensor_register, m->handle, p->arenas[old->arena].handle, old->name, old->size, old->offset,
              &t->handle);
    }
}

void run_reopen(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  world_t *w = a->w;
  if (!m->open) return;
  check_part(a, m);
  if (!close_manager(a, m, false)) return;
  part_t *was = malloc(sizeof m->parts);
  gemini_config_t config = m->opened;
  if (!was) abort();
  memcpy(was, m->parts, sizeof m->parts);
  manager_forget(a, m);
  if (!open_manager(a, m, &config, true))
    for (uint32_t t = 0; t < w->options.threads; t++) {
      actor_t *of = &w->actors[t];
      const op_t *before = of->op;
      of->op = a->op;
      make_again(of, m, &was[t], op->arg[0] & 1);
      of->op = before;
    }
  free(was);
}
bool make_reopen(actor_t *a, op_t *op) {
  if (!manager_of(a, op)->open) return false;
  op_add(op, rnd(a, 2));
  if (chance(a, 80)) plan(a, OP_resume, op->manager);
  return true;
}

/* ---- budgets: tier, chunks, bytes more */
void run_budget(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  uint32_t tier = op->arg[0];
  uint64_t bytes = op->arg[1] * a->w->unit + op->arg[2], chunk = chunk_bytes(a, m);
  if (!m->open) return;
  if (!chunk) chunk = m->config.chunk_bytes ? m->config.chunk_bytes : a->w->unit;
  pthread_mutex_lock(&a->w->budgets);
  uint64_t *budget = tier == GEMINI_TIER_DEVICE ? &m->config.device_bytes
                     : tier == GEMINI_TIER_HOST ? &m->config.host_bytes
                                                : &m->config.file_bytes;
  statuses_t allowed = bytes >= *budget && tier != GEMINI_TIER_FILE ? OK : OK | NO_ROOM;
  if (tier == GEMINI_TIER_HOST && m->cannot_grow) allowed |= OOM_HOST;
  if (m->traced || m->perhaps_traced) allowed |= OOM_DEVICE; /* no plan may exist for the new budget */
  if (tier > GEMINI_TIER_FILE) allowed = INVALID;
  else if (tier == GEMINI_TIER_DEVICE && bytes < m->config.device_margin_bytes + chunk) allowed = INVALID;
  else if (tier == GEMINI_TIER_HOST && !bytes) allowed = INVALID;
  else if (tier == GEMINI_TIER_FILE && !m->has_files) allowed = bytes ? STATE : OK;
  if (!CALL(a, allowed, gemini_budget_set, m->handle, tier, bytes)) {
    *budget = bytes;
    if (tier == GEMINI_TIER_HOST && bytes > m->host_bytes_most) m->host_bytes_most = bytes;
  }
  pthread_mutex_unlock(&a->w->budgets);
}
bool make_budget(actor_t *a, op_t *op) {
  uint32_t tier = chance(a, 2) ? 3 : rnd(a, 3);
  op_add(op, tier);
  op_add(op, tier == GEMINI_TIER_FILE ? rnd(a, 300) : chance(a, 60) ? 2 + rnd(a, 30) : rnd(a, 150));
  op_add(op, chance(a, 20) ? rnd(a, (uint32_t)a->w->unit) : 0);
  return true;
}

/* ---- checkpoints */
void kept_free(kept_t *k) {
  for (uint32_t i = 0; i < k->arena_count; i++) free(k->arenas[i].bytes);
  free(k->arenas);
  free(k->tensors);
  memset(k, 0, sizeof *k);
}

static kept_t kept_of(actor_t *a, manager_t *m) {
  kept_t k = { .chunk_bytes = m->config.chunk_bytes };
  uint32_t threads = a->w->options.threads;
  k.arenas = calloc(threads * ARENAS, sizeof *k.arenas);
  k.tensors = calloc(threads * TENSORS, sizeof *k.tensors);
  if (!k.arenas || !k.tensors) abort();
  for (uint32_t t = 0; t < threads; t++) {
    const part_t *p = &m->parts[t];
    int at[ARENAS];
    for (int i = 0; i < ARENAS; i++) {
      const arena_t *arena = &p->arenas[i];
      if (!arena->live) continue;
      at[i] = (int)k.arena_count;
      kept_arena_t *to = &k.arenas[k.arena_count++];
      memcpy(to->name, arena->name, sizeof to->name);
      to->kind = arena->kind;
      to->element_bytes = arena->element_bytes;
      to->size = arena->size;
      to->reuses = arena->store != i;
      to->unknown = arena->unknown;
      to->bytes = to->reuses ? NULL : malloc(arena->size + 1);
      if (!to->reuses) memcpy(to->bytes, arena->bytes, arena->size);
    }
    for (int i = 0; i < TENSORS; i++) {
      const tensor_t *tensor = &p->tensors[i];
      if (!tensor->live) continue;
      kept_tensor_t *to = &k.tensors[k.tensor_count++];
      memcpy(to->name, tensor->name, sizeof to->name);
      to->arena = at[tensor->arena];
      to->registered = tensor->base == i;
      to->gradient = tensor->gradient;
      to->offset = tensor->offset;
      to->size = tensor->size;
      to->states = tensor->states;
      /* no document says which state is saved: the state before the acquire, or one after a release */
      if (tensor->users)
        to->states |= 1u << GEMINI_STATE_HOLD | 1u << GEMINI_STATE_HOLD_AFTER_FWD | 1u << GEMINI_STATE_HOLD_AFTER_BWD;
    }
  }
  return k;
}

/* Finds the manager's arena of the same name as a saved one, or NULL. part_out: the part that owns it. */
static arena_t *kept_arena(actor_t *a, manager_t *m, const kept_arena_t *k, part_t **part_out) {
  for (uint32_t t = 0; t < a->w->options.threads; t++)
    for (int i = 0; i < ARENAS; i++) {
      arena_t *arena = &m->parts[t].arenas[i];
      if (!arena->live || strcmp(arena->name, k->name) || arena->kind != k->kind ||
          arena->element_bytes != k->element_bytes || arena->size != k->size || (arena->store != i) != k->reuses)
        continue;
      *part_out = &m->parts[t];
      return arena;
    }
  return NULL;
}
static tensor_t *kept_tensor(actor_t *a, manager_t *m, const kept_t *k, const kept_tensor_t *t) {
  part_t *p = NULL;
  const arena_t *arena = kept_arena(a, m, &k->arenas[t->arena], &p);
  for (int i = 0; arena && i < TENSORS; i++) {
    tensor_t *has = &p->tensors[i];
    if (has->live && has->arena == (int)(arena - p->arenas) && !strcmp(has->name, t->name) &&
        (has->base == i) == t->registered)
      return has;
  }
  return NULL;
}

kept_t layout_of(actor_t *a, manager_t *m) {
  kept_t k = kept_of(a, m);
  for (uint32_t i = 0; i < k.arena_count; i++) {
    free(k.arenas[i].bytes);
    k.arenas[i].bytes = NULL;
  }
  return k;
}
bool layout_fits(actor_t *a, manager_t *m, const kept_t *k) {
  part_t *p;
  for (uint32_t i = 0; i < k->arena_count; i++)
    if (!kept_arena(a, m, &k->arenas[i], &p)) return false;
  return true;
}

/* The statuses that resuming it may return: OK, FORMAT, or either. */
static statuses_t kept_fits(actor_t *a, manager_t *m, const kept_t *k) {
  uint32_t arenas = 0, registered = 0, kept_registered = 0;
  part_t *p;
  for (uint32_t t = 0; t < a->w->options.threads; t++) {
    for (int i = 0; i < ARENAS; i++) arenas += m->parts[t].arenas[i].live;
    for (int i = 0; i < TENSORS; i++) registered += m->parts[t].tensors[i].live && m->parts[t].tensors[i].base == i;
  }
  for (uint32_t i = 0; i < k->arena_count; i++)
    if (!kept_arena(a, m, &k->arenas[i], &p)) return FORMAT;
  for (uint32_t i = 0; i < k->tensor_count; i++) {
    const kept_tensor_t *t = &k->tensors[i];
    const tensor_t *has = kept_tensor(a, m, k, t);
    kept_registered += t->registered;
    if (t->registered && (!has || has->offset != t->offset || has->size != t->size)) return FORMAT;
    if (!t->registered && has && (has->offset != t->offset || has->size != t->size)) return FORMAT;
  }
  if (registered != kept_registered) return FORMAT;
  return arenas == k->arena_count ? OK : OK | FORMAT;
}

/* Does a checkpoint fit into the files beside the last one? Certain only if there is much room. */
static statuses_t checkpoint_room(actor_t *a, manager_t *m) {
  uint64_t chunk = chunk_bytes(a, m), chunks = 0;
  statuses_t perhaps = no_room(a, m, 0);
  for (uint32_t t = 0; chunk && t < a->w->options.threads; t++)
    for (int i = 0; i < ARENAS; i++)
      if (m->parts[t].arenas[i].live) chunks += (m->parts[t].arenas[i].size + chunk - 1) / chunk;
  for (int k = 0; chunk && k < 2; k++) {
    const kept_t *kept = &a->w->kept[manager_index(a, m)][k];
    for (uint32_t i = 0; i < kept->arena_count; i++) chunks += (kept->arenas[i].size + chunk - 1) / chunk;
  }
  if (!chunk || m->config.file_bytes / chunk < 4 * chunks) perhaps |= OOM_FILE;
  return perhaps;
}

void run_checkpoint(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  world_t *w = a->w;
  if (!m->open) return;
  uint32_t i = manager_index(a, m);
  statuses_t wrong = !m->config.checkpoint_name ? STATE : any_hold(a, m, true) ? BUSY : 0, perhaps = 0;
  if (m->config.checkpoint_name) perhaps = checkpoint_room(a, m) | updates_failed(a);
  uint64_t untold = faults_untold(w, FAULT_FILE) + faults_untold(w, FAULT_RING);
  gemini_status_t status = CALL(a, (wrong ? wrong : OK) | perhaps, gemini_checkpoint, m->handle);
  if (wrong) return;
  if (!status) {
    for (int k = 0; k < 2; k++) kept_free(&w->kept[i][k]);
    w->kept[i][0] = kept_of(a, m);
    w->kept_count[i] = 1;
    m->resumed = true;
  } else if (a->fired || untold) { /* a later process finds the previous checkpoint or this one */
    kept_free(&w->kept[i][1]);
    w->kept[i][1] = kept_of(a, m);
    if (!w->kept_count[i]) { /* or no checkpoint */
      w->kept[i][0] = w->kept[i][1];
      memset(&w->kept[i][1], 0, sizeof w->kept[i][1]);
    }
    w->kept_count[i] = 2;
    m->resumed = m->resumed || w->kept_count[i] == 0;
  }
}
bool make_checkpoint(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open || (!m->config.checkpoint_name && chance(a, 90))) return false;
  if (chance(a, 40)) { /* a checkpoint is useful only with a later resume */
    plan(a, OP_checkpoint, op->manager);
    plan_made(a, OP_reopen, op->manager);
  }
  return true;
}

static bool any_byte(const actor_t *a, const manager_t *m) {
  for (uint32_t t = 0; t < a->w->options.threads; t++)
    for (int i = 0; i < ARENAS; i++) {
      const arena_t *arena = &m->parts[t].arenas[i];
      for (uint64_t k = 0; arena->live && arena->store == i && k < arena->size; k++)
        if (arena->bytes[k]) return true;
    }
  return false;
}

static void take_up(actor_t *a, manager_t *m, const kept_t *k) {
  for (uint32_t i = 0; i < k->arena_count; i++) {
    part_t *p;
    arena_t *arena = kept_arena(a, m, &k->arenas[i], &p);
    if (!arena || !k->arenas[i].bytes) continue;
    memcpy(arena->bytes, k->arenas[i].bytes, k->arenas[i].size);
    arena->unknown = k->arenas[i].unknown;
  }
  for (uint32_t i = 0; i < k->tensor_count; i++) {
    tensor_t *t = kept_tensor(a, m, k, &k->tensors[i]);
    if (!t) continue;
    t->states = k->tensors[i].states;
    t->gradient = k->tensors[i].gradient;
  }
}

/* Compares the bytes, which show which of two checkpoints was resumed. */
static bool is_kept(actor_t *a, manager_t *m, const kept_t *k) {
  for (uint32_t i = 0; i < k->arena_count; i++) {
    part_t *p;
    const arena_t *arena = kept_arena(a, m, &k->arenas[i], &p);
    if (!arena) return false;
    if (!k->arenas[i].bytes || !arena->size || k->arenas[i].unknown) continue;
    actor_t *of = &a->w->actors[p - m->parts];
    uint8_t *got = malloc(arena->size);
    bool same = read_surely(of, m, (int)(arena - p->arenas), 0, arena->size, got) &&
                !memcmp(got, k->arenas[i].bytes, arena->size);
    free(got);
    if (!same) return false;
  }
  return true;
}

/* May the checkpoint be larger than the file budget? Chunks that read as zero take no space. */
static statuses_t resume_room(const manager_t *m, const kept_t *k) {
  uint64_t chunk = k->chunk_bytes, most = 0, least = 0;
  for (uint32_t i = 0; i < k->arena_count; i++)
    for (uint64_t at = 0; k->arenas[i].bytes && at < k->arenas[i].size; at += chunk, most++) {
      uint64_t size = k->arenas[i].size - at < chunk ? k->arenas[i].size - at : chunk, byte = 0;
      while (byte < size && !k->arenas[i].bytes[at + byte]) byte++;
      least += byte < size && !k->arenas[i].unknown;
    }
  uint64_t blocks = m->config.file_bytes / chunk;
  return least > blocks ? OOM_FILE : most > blocks ? OK | OOM_FILE : OK;
}

void run_resume(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  world_t *w = a->w;
  if (!m->open) return;
  uint32_t i = manager_index(a, m);
  statuses_t wrong = 0, perhaps = 0, fits = 0, room = 0;
  if (!m->config.checkpoint_name || m->resumed) wrong |= STATE;
  if (!w->kept_count[i]) wrong |= NOT_FOUND;
  if (w->kept_count[i] == 2) perhaps |= NOT_FOUND | STATE;
  if (any_byte(a, m) || any_hold(a, m, false) || any_pin(a, m)) wrong |= STATE;
  for (uint32_t t = 0; t < w->options.threads; t++)
    if (m->parts[t].touched) perhaps |= STATE;
  for (uint32_t k = 0; k < w->kept_count[i]; k++)
    if (w->kept[i][k].arenas) {
      fits |= kept_fits(a, m, &w->kept[i][k]);
      room |= m->config.checkpoint_name ? resume_room(m, &w->kept[i][k]) : OK;
    }
  if (fits == FORMAT) wrong |= FORMAT;
  if (room == OOM_FILE) wrong |= OOM_FILE;
  perhaps |= (fits | room) & ~OK;
  if (CALL(a, wrong ? wrong | perhaps : OK | perhaps, gemini_resume, m->handle)) return;
  m->resumed = true;
  const kept_t *k = &w->kept[i][0], *other = w->kept_count[i] == 2 && w->kept[i][1].arenas ? &w->kept[i][1] : NULL;
  bool first = !other || (kept_fits(a, m, k) != FORMAT && is_kept(a, m, k));
  bool second = other && kept_fits(a, m, other) != FORMAT && is_kept(a, m, other);
  if (!first && !second) differs(a, "the bytes are those of neither checkpoint");
  take_up(a, m, first ? k : other);
  /* the bytes are those of one checkpoint, the states may be those of the other */
  for (uint32_t t = 0; first && second && t < other->tensor_count; t++) {
    tensor_t *tensor = kept_tensor(a, m, other, &other->tensors[t]);
    if (tensor) tensor->states |= other->tensors[t].states;
  }
  for (uint32_t t = 0; t < w->options.threads; t++) check_part(&w->actors[t], m);
}
bool make_resume(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  return m->open && (m->config.checkpoint_name || chance(a, 10));
}
