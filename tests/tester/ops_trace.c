/* Iterations, operators, traces, plans, timelines, statistics. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <unistd.h>

#include "gemini/hook.h"
#include "tester.h"

/* ---- brackets */
/* Label. */
void run_iteration_begin(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  const statuses_t allowed = m->iteration ? STATE : OK;
  if (!m->open) return;
  if (op->arg[0] ? CALL(a, allowed, gemini_iteration_begin_with, m->handle, op->arg[0])
                 : CALL(a, allowed, gemini_iteration_begin, m->handle))
    return;
  m->iteration = true;
  m->ops = 0;
  atomic_store(&m->record_lost, false);
}

enum { OPERATORS = 8, CHOSEN_FROM = 6 }; /* names; operators with the higher numbers are chosen at run time */

/* Plans iterations as a training loop has them: operators that acquire and release, then updates, repeated. */
static bool plan_iterations(actor_t *a, uint8_t manager) {
  manager_t *m = &a->w->managers[manager % MANAGERS];
  part_t *p = part_of(a, m);
  uint32_t ops = 1 + rnd(a, 5), repeats = 1 + rnd(a, 4), first = a->queue_end;
  if (a->queue_end + (ops * 4 + 8) * repeats > QUEUE) return false;
  for (uint32_t k = 0; k < ops; k++) {
    spec_t s;
    op_t *begin, *acquire, *release;
    if (chance(a, 30)) op_add(plan(a, OP_phase, manager), rnd(a, 4));
    begin = plan(a, OP_op_begin, manager);
    op_add(begin, chance(a, 20) ? CHOSEN_FROM + rnd(a, OPERATORS - CHOSEN_FROM) : k);
    op_add(begin, (uint32_t)(chance(a, 40) ? -1 : PICK(a, p->streams, STREAMS)) + 1);
    acquire = plan(a, OP_acquire, manager);
    op_add(acquire, begin->arg[1]);
    op_add(acquire, 1 + rnd(a, 1 << 20));
    release = plan(a, OP_release, manager);
    op_add(release, begin->arg[1]);
    op_add(release, 0);
    op_add(release, 0);
    for (int i = 0; i < 3 && spec_make(a, m, &s); i++) {
      s.tier = GEMINI_TIER_DEVICE;
      s.hold = HOLDS - 1 - i;
      spec_add(acquire, s);
      op_add(release, (uint32_t)s.hold);
    }
    plan(a, OP_op_end, manager);
  }
  const uint32_t at = a->queue_end;
  if (chance(a, 60) && plan_made(a, OP_update, manager) && chance(a, 50) && a->queue_end < QUEUE) {
    a->queue[a->queue_end++] = a->queue[at]; /* first computed ahead, then taken over */
    a->queue[at].arg[1] = GEMINI_UPDATE_SPECULATE;
    a->queue[at + 1].arg[1] = GEMINI_UPDATE_COMMIT | a->queue[at + 1].arg[1] % 2 * GEMINI_UPDATE_LATE;
  }
  plan(a, OP_iteration_end, manager);
  uint32_t length = a->queue_end - first;
  const uint32_t label = chance(a, 40) ? 1 + rnd(a, 2) : 0;
  for (uint32_t r = 0; r < repeats; r++) {
    op_t *begin = plan(a, OP_iteration_begin, manager);
    if (!begin) return true;
    op_add(begin, label);
    for (uint32_t i = 0; i < length && a->queue_end < QUEUE; i++) a->queue[a->queue_end++] = a->queue[first + i];
  }
  return true;
}
bool make_iteration_begin(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open || (m->iteration && chance(a, 95))) return false;
  op_add(op, chance(a, 30) ? 1 + rnd(a, 2) : 0);
  if (chance(a, 60)) plan_iterations(a, op->manager);
  return true;
}

static uint64_t iterations(actor_t *a, manager_t *m) {
  gemini_stats_t s = GEMINI_STATS_INIT;
  QUIET(a, OK, gemini_stats, m->handle, &s);
  return s.iterations;
}
void run_iteration_end(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open) return;
  bool may = m->iteration && !m->op;
  uint64_t before = iterations(a, m);
  gemini_status_t status = CALL(a, may ? OK | OOM_DEVICE : STATE, gemini_iteration_end, m->handle);
  if (!may) return;
  bool ended = iterations(a, m) > before;
  if ((!status || status == GEMINI_ERR_OOM_DEVICE) && !ended) differs(a, "the iteration has not been counted");
  if (!ended) return;
  m->iteration = false;
  m->phase = GEMINI_PHASE_NONE;
  m->iterations++;
  if (m->ops && !atomic_load(&m->record_lost) && !a->fired) atomic_store(&m->traced, true);
  else atomic_store(&m->perhaps_traced, true);
}
bool make_iteration_end(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  return m->open && ((m->iteration && !m->op) || chance(a, 5));
}

void run_phase(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  uint32_t phase = op->arg[0];
  if (!m->open) return;
  statuses_t wrong = (phase > GEMINI_PHASE_UPDATE ? INVALID : 0) | (m->op ? STATE : 0);
  if (!CALL(a, wrong ? wrong : OK, gemini_phase_set, m->handle, phase)) m->phase = phase;
}
bool make_phase(actor_t *a, op_t *op) {
  op_add(op, chance(a, 97) ? rnd(a, 4) : 4);
  return true;
}

/* Whatever is live: at worst the next iteration needs more than the plan that is made expects. */
void run_compacted(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (m->open) CALL(a, m->iteration && !m->op ? OK : STATE, gemini_hook_compacted, m->handle);
}
bool make_compacted(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  return m->open && ((m->iteration && !m->op) || chance(a, 5));
}

/* Name, stream. */
void run_op_begin(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  int stream = (int)op->arg[1] - 1;
  char name[32];
  if (!m->open || stream >= STREAMS) return;
  gemini_stream_t handle = stream_handle(a, m, stream);
  snprintf(name, sizeof name, "operator %u", op->arg[0]);
  const bool chosen = op->arg[0] >= CHOSEN_FROM;
  const statuses_t wanted = m->iteration && !m->op ? OK : STATE;
  if (chosen && CALL(a, wanted, gemini_op_begin_chosen, m->handle, name, handle)) return;
  if (!chosen && CALL(a, wanted, gemini_op_begin, m->handle, name, handle)) return;
  m->op = true;
  m->op_stream = handle ? stream : -1;
  m->ops += !chosen;
}
bool make_op_begin(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open || (!m->iteration && chance(a, 95))) return false;
  op_add(op, rnd(a, OPERATORS));
  op_add(op, (uint32_t)(chance(a, 50) ? -1 : PICK(a, part_of(a, m)->streams, STREAMS)) + 1);
  return true;
}
void run_op_end(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (m->open && !CALL(a, m->op ? OK : STATE, gemini_op_end, m->handle)) m->op = false;
}
bool make_op_end(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  return m->open && (m->op || chance(a, 3));
}

/* ---- traces: number of the file; TRACES: a path that does not exist */
static void trace_path(const actor_t *a, uint32_t file, char path[PATHS + 32]) {
  if (file < TRACES) snprintf(path, PATHS + 32, "%s/trace%u", a->w->directory, file);
  else snprintf(path, PATHS + 32, "%s/nowhere/trace", a->w->directory);
}
void run_trace_save(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  uint32_t file = op->arg[0];
  char path[PATHS + 32];
  if (!m->open || (file > TRACES)) return;
  trace_path(a, file, path);
  bool surely = atomic_load(&m->traced) && !a->w->parallel,
       perhaps = surely || atomic_load(&m->perhaps_traced) || atomic_load(&m->traced);
  statuses_t allowed = surely ? 0 : STATE;
  if (perhaps) allowed |= file < TRACES ? OK : IO;
  gemini_status_t status = CALL(a, allowed, gemini_trace_save, m->handle, path);
  if (file == TRACES || a->w->parallel) return;
  if (status == GEMINI_ERR_STATE) return;
  kept_free(&a->w->traces[file]);
  if (status) unlink(path);
  else a->w->traces[file] = layout_of(a, m);
}
bool make_trace_save(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open || (!atomic_load(&m->traced) && chance(a, 90))) return false;
  uint32_t file = chance(a, 3) ? TRACES : rnd(a, TRACES);
  op_add(op, file);
  if (chance(a, 50)) {
    op_t *rewrite = chance(a, 60) ? plan(a, OP_trace_rewrite, op->manager) : NULL;
    if (rewrite) op_add(rewrite, file), op_add(rewrite, rnd(a, 5));
    op_t *load = plan(a, OP_trace_load, op->manager);
    if (load) op_add(load, file);
  }
  return true;
}

/* Arguments: file, chunk size. Rewrites the file as if it had been recorded with chunks of that size. */
void run_trace_rewrite(actor_t *a, const op_t *op) {
  char path[PATHS + 32], *text = NULL;
  size_t size = 0;
  uint32_t file = op->arg[0];
  if (file >= TRACES || !a->w->traces[file].arenas) return;
  trace_path(a, file, path);
  FILE *from = fopen(path, "r"), *to = open_memstream(&text, &size);
  if (!from || !to) abort();
  for (char line[2048]; fgets(line, sizeof line, from);) {
    unsigned long long chunk, budget;
    if (sscanf(line, "budget %llu %llu", &chunk, &budget) == 2)
      fprintf(to, "budget %llu %llu\n", (unsigned long long)a->w->unit << op->arg[1], budget);
    else fputs(line, to);
  }
  fclose(from);
  fclose(to);
  from = fopen(path, "w");
  if (!from || fwrite(text, 1, size, from) != size || fclose(from)) abort();
  free(text);
}
bool make_trace_rewrite(actor_t *a, op_t *op) {
  op_add(op, rnd(a, TRACES));
  op_add(op, rnd(a, 5));
  return true;
}

void run_trace_load(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  uint32_t file = op->arg[0];
  char path[PATHS + 32];
  if (!m->open || file > TRACES) return;
  trace_path(a, file, path);
  statuses_t wrong = m->iteration ? STATE : 0;
  bool there = file < TRACES && a->w->traces[file].arenas;
  if (!there) wrong |= IO;
  else if (!a->w->parallel && !layout_fits(a, m, &a->w->traces[file])) wrong |= FORMAT;
  statuses_t perhaps = NO_ROOM | (a->w->parallel ? FORMAT : 0);
  uint64_t before = chunk_bytes(a, m);
  gemini_status_t status = CALL(a, wrong ? wrong : OK | perhaps, gemini_trace_load, m->handle, path);
  if (!status) atomic_store(&m->traced, true);
  if (before && chunk_bytes(a, m) != before) atomic_fetch_add(&a->w->shared->recuts[a->w->parallel], 1);
  if (!status) return;
  if (before && chunk_bytes(a, m) != before)
    differs(a, "a trace that was refused has changed the size of chunks from %llu to %llu", (unsigned long long)before,
            (unsigned long long)chunk_bytes(a, m));
}
bool make_trace_load(actor_t *a, op_t *op) {
  if (!manager_of(a, op)->open) return false;
  bool calm = a->w->parallel && a->w->calm;
  op_add(op, calm ? (a->w->calm_file + rnd(a, 2)) % TRACES : chance(a, 3) ? TRACES : rnd(a, TRACES));
  return true;
}

/* Arguments: file, device and host in units, files in units. The arenas of a trace may be in an order in which they
 * cannot be made anew. */
void run_forecast(actor_t *a, const op_t *op) {
  char path[PATHS + 32];
  uint32_t file = op->arg[0];
  if (file > TRACES) return;
  trace_path(a, file, path);
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_forecast_t f = GEMINI_FORECAST_INIT, before = f;
  c.device_bytes = (1 + op->arg[1]) * a->w->unit;
  c.host_bytes = (1 + op->arg[2]) * a->w->unit;
  c.file_bytes = op->arg[3] * a->w->unit;
  c.chunk_bytes = a->w->unit;
  c.update_threads = 1;
  const bool there = file < TRACES && a->w->traces[file].arenas;
  uint64_t length = 0;
  if (CALL(a, there ? OK | FORMAT : IO, gemini_plan_forecast, &c, path, &f, 0, NULL, &length)) {
    if (memcmp(&f, &before, sizeof f) || length) differs(a, "a forecast that was refused has changed its result");
    return;
  }
  const bool planned = !(f.lacks & 1u << GEMINI_TIER_DEVICE);
  if (planned != (f.device_needed <= c.device_bytes) || planned != (length > 0))
    differs(a, "a forecast has %s plan, where %llu bytes of %llu are needed on the device", planned ? "a" : "no",
            (unsigned long long)f.device_needed, (unsigned long long)c.device_bytes);
  if (f.device_bytes > c.device_bytes || f.host_bytes > c.host_bytes || f.stays_bytes > f.device_bytes ||
      f.step_ns < f.compute_ns)
    differs(a, "a forecast uses more than there is");
}
bool make_forecast(actor_t *a, op_t *op) {
  op_add(op, chance(a, 3) ? TRACES : rnd(a, TRACES));
  op_add(op, rnd(a, 40));
  op_add(op, rnd(a, 100));
  op_add(op, chance(a, 50) ? rnd(a, 100) : 0);
  return true;
}

/* ---- plans in words */
void run_explain(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  uint64_t length = 0, again = 0;
  if (!m->open || CALL(a, OK, gemini_plan_explain, m->handle, 0, NULL, &length)) return;
  char *text = malloc(length + 65);
  memset(text, 1, length + 65);
  uint64_t room = op->arg[0] ? 1 + op->arg[0] % (length + 64) : length + 1;
  QUIET(a, OK, gemini_plan_explain, m->handle, room, text, &again);
  if (strnlen(text, room) == room) differs(a, "the plan in words has no end");
  if (!a->w->parallel && again != length) differs(a, "the plan in words has another length than it was said to have");
  if (!a->w->parallel && strlen(text) != (length < room ? length : room - 1))
    differs(a, "the plan in words is %zu bytes long, of %llu in %llu", strlen(text), (unsigned long long)length,
            (unsigned long long)room);
  free(text);
}
bool make_explain(actor_t *a, op_t *op) {
  op_add(op, chance(a, 50) ? rnd(a, 1000) : 0);
  return manager_of(a, op)->open;
}

/* ---- timelines: 1 start, 0 stop */
void run_timeline(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  char path[PATHS + 32];
  if (!m->open) return;
  snprintf(path, sizeof path, "%s/timeline%u", a->w->directory, op->manager % MANAGERS);
  if (op->arg[0]) {
    if (!CALL(a, m->timeline ? STATE : OK, gemini_timeline_start, m->handle, path)) m->timeline = true;
    return;
  }
  gemini_status_t status = CALL(a, m->timeline ? OK : STATE, gemini_timeline_stop, m->handle);
  if (!m->timeline || status == GEMINI_ERR_STATE) return;
  m->timeline = false;
  FILE *file = status ? NULL : fopen(path, "r");
  if (status) return;
  int first = file ? fgetc(file) : EOF, last = EOF;
  for (int c; file && (c = fgetc(file)) != EOF;)
    if (c != '\n') last = c;
  if (file) fclose(file);
  if (first != '{' || last != '}') differs(a, "a timeline is no JSON: it begins with %d and ends with %d", first, last);
}
bool make_timeline(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  op_add(op, chance(a, 90) ? !m->timeline : m->timeline);
  return m->open;
}

/* ---- statistics */
void run_stats_reset(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  gemini_stats_t s = GEMINI_STATS_INIT;
  if (!m->open || CALL(a, OK, gemini_stats_reset, m->handle) || a->w->parallel) return;
  QUIET(a, OK, gemini_stats, m->handle, &s);
  if (s.acquire_hits || s.acquire_misses) differs(a, "hits or misses are not 0 after gemini_stats_reset()");
  if (s.nonmodel_peak_bytes != s.nonmodel_bytes) differs(a, "the peak of non-model memory is not what is live");
}
bool make_stats_reset(actor_t *a, op_t *op) { return manager_of(a, op)->open; }

/* ---- settle: all threads release and free everything, and statistics start again, as at the end of a training */
static void settle_part(actor_t *a, manager_t *m, uint8_t manager) {
  part_t *p = part_of(a, m);
  uint64_t chunk = chunk_bytes(a, m);
  for (int i = 0; i < HOLDS; i++) {
    op_t op = { .manager = manager };
    if (!p->holds[i].live) continue;
    op_add(&op, (uint32_t)p->holds[i].stream + 1);
    op_add(&op, 0);
    op_add(&op, 0);
    op_add(&op, (uint32_t)i);
    run_release(a, &op);
  }
  for (int i = 0; i < ALLOCS; i++) {
    op_t op = { .manager = manager };
    op_add(&op, (uint32_t)i);
    op_add(&op, (uint32_t)p->allocs[i].stream + 1);
    op_add(&op, 0);
    run_free(a, &op);
  }
  for (int i = 0; i < BLOCKS; i++) {
    op_t op = { .manager = manager };
    op_add(&op, (uint32_t)i);
    op_add(&op, 0);
    run_host_free(a, &op);
  }
  for (int i = 0; chunk && i < ARENAS; i++)
    for (uint64_t k = 0; p->arenas[i].live && p->arenas[i].store == i && k * chunk < p->arenas[i].size; k++) {
      uint64_t left = p->arenas[i].size - k * chunk;
      gemini_access_t access = ACCESS(p->arenas[i].handle, k * chunk, left < chunk ? left : chunk, 0, 0);
      for (; p->arenas[i].pins[k]; p->arenas[i].pins[k]--) QUIET(a, OK, gemini_unpin, m->handle, &access);
    }
}
void run_settle(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open) return;
  for (uint32_t t = 0; t < a->w->options.threads; t++) {
    actor_t *of = &a->w->actors[t];
    of->op = op;
    of->fault_used = true; /* this operation has no call of its own for a fault */
    settle_part(of, m, op->manager);
  }
  if (m->op) run_op_end(a, op);
  if (m->iteration) run_iteration_end(a, op);
  QUIET(a, OK, gemini_stats_reset, m->handle);
}
bool make_settle(actor_t *a, op_t *op) {
  manager_t *m = manager_of(a, op);
  if (!m->open) return false;
  if (chance(a, 30)) return true;
  a->w->calm = 1 + rnd(a, 4); /* then trains, with plans from traces of other chunk sizes */
  plan_iterations(a, op->manager);
  uint32_t file = rnd(a, TRACES), size = rnd(a, 5);
  for (uint32_t i = 0; i < 2; i++) { /* two traces with other chunk sizes */
    op_t *save = plan(a, OP_trace_save, op->manager), *rewrite = plan(a, OP_trace_rewrite, op->manager);
    if (save) op_add(save, (file + i) % TRACES);
    if (rewrite) op_add(rewrite, (file + i) % TRACES), op_add(rewrite, (size + i) % 5);
  }
  plan(a, OP_settle, op->manager);
  a->w->calm_file = file;
  return true;
}

void run_read_all(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  gemini_stats_t s = GEMINI_STATS_INIT;
  if (!m->open) return;
  CALL(a, OK, gemini_stats, m->handle, &s);
  for (int i = 0; i < ARENAS; i++)
    if (p->arenas[i].live) check_arena(a, m, i);
  for (int i = 0; i < TENSORS; i++)
    if (p->tensors[i].live) check_tensor(a, m, i);
  if (strcmp(gemini_version(), GEMINI_VERSION_STRING)) differs(a, "the version is %s", gemini_version());
}
bool make_read_all(actor_t *a, op_t *op) { return manager_of(a, op)->open; }
