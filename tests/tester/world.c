/* Calls of the library, and helpers that all operations use. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "fake_cuda.h"
#include "tester.h"

uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- differences */
static void end_process(void) {
  if (getenv("GEMINI_TESTER_ABORT")) abort(); /* for a debugger */
  _exit(1);
}

void differs(actor_t *a, const char *format, ...) {
  shared_t *s = a->w->shared;
  if (!atomic_exchange(&s->failed, 1)) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    char *line = NULL;
    size_t size = 0;
    FILE *file = open_memstream(&line, &size);
    if (file && a->op) op_write(file, a->op);
    if (file) fclose(file);
    snprintf(s->message, sizeof s->message, "%s\n  in operation %llu of thread %u, whose status is %d: %s", text,
             (unsigned long long)atomic_load(&s->threads[a->index].count), a->index, a->own_status,
             line && *line ? line : "(none)\n");
    end_process();
  }
  for (;;) pause(); /* another thread ends the process */
}

void differs_in_callback(const world_t *w, const char *message) {
  if (!atomic_exchange(&w->shared->failed, 1)) {
    snprintf(w->shared->message, sizeof w->shared->message, "%s\n", message);
    end_process();
  }
  for (;;) pause();
}

/* ---- calls */
static const int errors_of[] = { 0, EIO, ENOSPC, EINTR, EDQUOT };

/* The statuses with which a call may report a fault. */
static statuses_t fault_statuses(uint32_t kind, const char *function) {
  /* io_uring could not be set up, for which its eventfd is needed, too */
  statuses_t no_uring = strcmp(function, "gemini_manager_open") && strcmp(function, "gemini_borrow") ? 0 : UNSUPPORTED;
  switch (kind) {
  case FAULT_MEMORY: return OOM_SYSTEM | OOM_HOST | PENDING; /* OOM_HOST: committing reserved memory failed */
  case FAULT_THREAD: return OOM_SYSTEM;
  case FAULT_FILE: /* the simulated device's memory is a file, too */
    return IO | OOM_FILE | OOM_SYSTEM | PENDING | no_uring;
  case FAULT_RING: return IO | OOM_SYSTEM | PENDING | no_uring;
  case FAULT_DRIVER: return DEVICE | OOM_SYSTEM | PENDING;
  default: return 0;
  }
}

static uint64_t faults_so_far(const world_t *w, fault_kind_t kind) {
  return kind == FAULT_DRIVER ? atomic_load(&w->driver_faults) : faults_failed(kind);
}
uint64_t faults_untold(const world_t *w, fault_kind_t kind) {
  return faults_so_far(w, kind) - atomic_load(&w->told[kind]);
}
void faults_all_told(world_t *w) {
  for (fault_kind_t kind = FAULT_NONE; kind < FAULT_KINDS; kind++) atomic_store(&w->told[kind], faults_so_far(w, kind));
}

void driver_pause(const world_t *w, bool pause) {
  if (w->driver_last) fake_cuda_fail(pause ? 0 : w->driver_first, pause ? 0 : w->driver_last, 999); /* unknown */
}

void call_begin(actor_t *a, const char *function, bool with_fault) {
  const op_t *op = a->op;
  uint32_t call = atomic_load_explicit(&a->w->shared->threads[a->index].calls, memory_order_relaxed);
  last_call_t *last = &a->w->shared->threads[a->index].last[call % LAST_CALLS];
  atomic_store_explicit(&last->end_ns, 0, memory_order_relaxed);
  strncpy(last->name, function, sizeof last->name - 1);
  atomic_store_explicit(&last->begin_ns, now_ns(), memory_order_release);
  atomic_store_explicit(&a->w->shared->threads[a->index].calls, call + 1, memory_order_release);
  a->fired = 0;
  a->own_call = with_fault;
  if (!with_fault && a->w->options.sites) faults_pause(true); /* system calls fail only in an operation's own calls */
  a->armed = with_fault && op && op->fault && !a->fault_used;
  if (a->armed && op->fault == FAULT_DRIVER) {
    a->fault_used = true;
    a->w->driver_first = fake_cuda_calls() + 1 + op->skip;
    a->w->driver_last = a->w->driver_first + op->run - 1;
    driver_pause(a->w, false);
  } else if (a->armed) {
    a->fault_used = true;
    faults_arm((fault_kind_t)op->fault, op->skip, op->run, errors_of[op->errors % 5], !a->w->parallel);
  }
}

static void check_last_error(actor_t *a, const char *function, gemini_status_t status) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (gemini_last_error(&info) != GEMINI_OK) differs(a, "gemini_last_error() fails");
  if (info.status != status || strcmp(info.operation, function) || !*info.message)
    differs(a, "%s() is %d, but gemini_last_error() tells of %s(), %d, \"%s\"", function, status, info.operation,
            info.status, info.message);
}

static void names_of(statuses_t set, char *to, size_t size) {
  *to = 0;
  for (int i = 0; i < 16; i++)
    if (set >> i & 1)
      snprintf(to + strlen(to), size - strlen(to), "%s%d (%s)", *to ? ", " : "", -i, gemini_status_string(-i));
}

static void tell_call(const actor_t *a, const char *function, gemini_status_t status) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (status) (void)!gemini_last_error(&info);
  fprintf(stderr, "  thread %u: %s() is %d%s%s\n", a->index, function, status, *info.message ? ": " : "", info.message);
}

gemini_status_t call_end(actor_t *a, const char *function, statuses_t allowed, gemini_status_t status) {
  world_t *w = a->w;
  uint32_t call = atomic_load_explicit(&w->shared->threads[a->index].calls, memory_order_relaxed) - 1;
  atomic_store_explicit(&w->shared->threads[a->index].last[call % LAST_CALLS].end_ns, now_ns(), memory_order_relaxed);
  if (a->armed) {
    if (a->op->fault == FAULT_DRIVER) {
      uint64_t calls = fake_cuda_calls(), first = w->driver_first, last = w->driver_last;
      driver_pause(w, true);
      w->driver_first = w->driver_last = 0;
      a->fired = calls < first ? 0 : (calls < last ? calls : last) - first + 1;
      if (a->fired) updates_lost(w, false);
    } else {
      a->fired = faults_disarm();
      /* A read for a pending update may have failed, of which a later call tells: such an update never runs. Several
       * threads have no late updates beside faults (make_update()). */
      if (a->fired && w->options.threads == 1 && (a->op->fault == FAULT_FILE || a->op->fault == FAULT_RING))
        updates_lost(w, true);
    }
    if (a->fired) {
      atomic_fetch_add(&w->shared->faults_hit[a->op->fault], 1);
      if (a->op->fault == FAULT_DRIVER) atomic_fetch_add(&w->driver_faults, a->fired);
      for (int i = 0; i < MANAGERS; i++) atomic_store(&w->managers[i].record_lost, true); /* perhaps */
    }
  }
  if (!a->own_call && w->options.sites) faults_pause(false);
  if (a->own_call) a->own_status = status;
  if (w->options.verbose) tell_call(a, function, status);
  if (w->options.sites == SITES_FAIL && faults_site_failed() && !w->shared->site_failed) {
    w->shared->site_failed = a->site_failed = true;
    a->fired = 1;
    for (int i = 0; i < MANAGERS; i++) atomic_store(&w->managers[i].record_lost, true);
  }
  if (a->op && a->own_call && status <= 0 && status > -16)
    atomic_fetch_add(&w->shared->statuses[a->op->code][-status], 1);
  if (status > 0 || status < ERR_PENDING) differs(a, "%s() returns %d, which is no status", function, status);
  if (status) check_last_error(a, function, status);
  if ((status <= GEMINI_ERR_OOM_DEVICE && status >= GEMINI_ERR_FORMAT) || status < GEMINI_ERR_UNSUPPORTED)
    a->refused = true;
  if (allowed >> -status & 1) return status;
  for (uint32_t kind = 1; kind < FAULT_KINDS; kind++) /* a fault may be reported by a later call, but once only */
    if (faults_untold(w, (fault_kind_t)kind) && fault_statuses(kind, function) >> -status & 1) {
      if (!w->parallel) atomic_fetch_add(&w->told[kind], 1);
      return status;
    }
  char names[512];
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  names_of(allowed, names, sizeof names);
  if (status) (void)!gemini_last_error(&info);
  differs(a, "%s() is %d (%s), expected %s%s%s", function, status, gemini_status_string(status), names,
          status ? "\n  it says: " : "", info.message);
}

void gone(actor_t *a, void *handle) { a->gone[a->gone_count++ % GONE] = handle; }

uint64_t chunk_bytes(actor_t *a, manager_t *m) {
  gemini_stats_t s = GEMINI_STATS_INIT;
  if (!m->open) return 0;
  QUIET(a, OK, gemini_stats, m->handle, &s);
  return s.chunk_bytes;
}

/* ---- room */
uint64_t held_chunks(actor_t *a, const manager_t *m, uint64_t chunk) {
  uint64_t held = 0;
  for (uint32_t t = 0; t < a->w->options.threads; t++) {
    const part_t *p = &m->parts[t];
    for (int i = 0; i < ARENAS; i++) {
      const arena_t *arena = &p->arenas[i];
      for (uint64_t k = 0; arena->live && arena->store == i && k * chunk < arena->size; k++) {
        use_t use = chunk_use(p, i, k, chunk);
        held += use.device || use.pins;
      }
    }
  }
  return held;
}

bool any_pin(const actor_t *a, const manager_t *m) {
  bool pins = false;
  for (uint32_t t = 0; t < a->w->options.threads; t++)
    for (int i = 0; i < ARENAS; i++)
      for (int k = 0; k < CHUNKS; k++) pins |= m->parts[t].arenas[i].live && m->parts[t].arenas[i].pins[k];
  return pins;
}

/* Updates of pinned chunks run on the device, where all chunks of the piece must then have room. */
static bool may_wait_for_device(const actor_t *a, const manager_t *m) {
  bool updates = false;
  for (uint32_t t = 0; t < a->w->options.threads; t++)
    for (const update_t *u = a->w->actors[t].updates; u; u = u->next) updates |= u->mgr == m->handle;
  return updates && any_pin(a, m);
}

statuses_t no_room(actor_t *a, manager_t *m, uint64_t device_chunks) {
  uint64_t chunk = a->w->parallel ? 0 : chunk_bytes(a, m), model = 0, nonmodel = 0;
  if (!chunk || may_wait_for_device(a, m)) return NO_ROOM;
  for (uint32_t t = 0; t < a->w->options.threads; t++) {
    const part_t *p = &m->parts[t];
    for (int i = 0; i < BLOCKS; i++)
      if (p->blocks[i].live) return NO_ROOM;
    for (int i = 0; i < ALLOCS; i++)
      if (p->allocs[i].live) nonmodel += (p->allocs[i].size + chunk - 1) / chunk + 1;
    for (int i = 0; i < ARENAS; i++)
      if (p->arenas[i].live && p->arenas[i].store == i) model += (p->arenas[i].size + chunk - 1) / chunk;
  }
  uint64_t frames = (m->config.device_bytes - m->config.device_margin_bytes) / chunk;
  bool ample = model <= m->config.host_bytes / chunk && m->config.host_bytes == m->host_bytes_most &&
               held_chunks(a, m, chunk) + device_chunks + nonmodel <= frames;
  return ample ? 0 : NO_ROOM;
}

/* ---- streams */
gemini_stream_t stream_handle(actor_t *a, manager_t *m, int entry) {
  part_t *p = part_of(a, m);
  return entry >= 0 && entry < STREAMS && p->streams[entry].live ? p->streams[entry].handle : GEMINI_STREAM_CALLER;
}

typedef struct job {
  const world_t *w;
  uint8_t *ptr, *expected;
  uint64_t at, size, seed;
  bool write;
  char what[160];
} job_t;

static void job_run(void *user) {
  job_t *j = user;
  if (j->expected && memcmp(j->ptr, j->expected, j->size)) {
    uint64_t i = 0, wrong = 0;
    while (j->ptr[i] == j->expected[i]) i++;
    for (uint64_t k = i; k < j->size; k++) wrong += j->ptr[k] != j->expected[k];
    char text[512];
    snprintf(text, sizeof text, "%s: %llu of %llu bytes are wrong, the first at %llu is %#x instead of %#x", j->what,
             (unsigned long long)wrong, (unsigned long long)j->size, (unsigned long long)i, j->ptr[i], j->expected[i]);
    differs_in_callback(j->w, text);
  }
  if (j->write) pattern_fill(j->ptr, j->at, j->size, j->seed);
  free(j->expected);
  free(j);
}

void use_bytes(actor_t *a, manager_t *m, int stream, void *ptr, uint64_t at, uint64_t size, const uint8_t *expected,
               bool write, uint64_t seed, const char *what) {
  job_t *j = malloc(sizeof *j);
  uint8_t *copy = expected ? malloc(size + 1) : NULL;
  if (!j || (expected && !copy)) abort();
  if (expected) memcpy(copy, expected, size);
  *j = (job_t){ .w = a->w, .ptr = ptr, .expected = copy, .at = at, .size = size, .seed = seed, .write = write };
  snprintf(j->what, sizeof j->what, "%s (queued by thread %u in its operation %llu)", what, a->index,
           (unsigned long long)atomic_load(&a->w->shared->threads[a->index].count));
  if (expected) atomic_fetch_add_explicit(&a->w->shared->bytes_checked, size, memory_order_relaxed);
  gemini_stream_t handle = stream_handle(a, m, stream);
  if (handle == GEMINI_STREAM_CALLER) job_run(j);
  else QUIET(a, OK, gemini_stream_call, m->handle, handle, job_run, j);
}

void sync_holds(actor_t *a, manager_t *m, int store, uint64_t at, uint64_t size, bool writers_only) {
  part_t *p = part_of(a, m);
  for (int i = 0; i < HOLDS; i++) {
    hold_t *h = &p->holds[i];
    if (!h->live || h->store != store || h->stream < 0 || h->at >= at + size || at >= h->at + h->size ||
        (writers_only && !(h->mode & GEMINI_WRITE)))
      continue;
    gemini_stream_t handle = stream_handle(a, m, h->stream);
    if (handle != GEMINI_STREAM_CALLER) QUIET(a, OK, gemini_stream_synchronize, m->handle, handle);
  }
}

/* ---- updates: each element becomes a hash of the bytes read and their positions, block by block */
enum { BLOCK = 256 };
static void mix(uint64_t *hash, const uint8_t *from, uint32_t bytes, uint64_t count) {
  for (uint64_t i = 0; i < count; i++, from += bytes) {
    uint64_t value = 0;
    if (bytes == 1) value = *from;
    else if (bytes == 2) memcpy(&value, from, 2);
    else if (bytes == 4) memcpy(&value, from, 4);
    else memcpy(&value, from, 8);
    value = (hash[i] ^ value) * UINT64_C(0xbf58476d1ce4e5b9);
    hash[i] = value ^ value >> 29;
  }
}
/* Writes patterns that are finite numbers, as pattern_fill() does. */
static void put(const uint64_t *hash, uint64_t odd, uint8_t *to, uint32_t bytes, uint64_t first, uint64_t count) {
  const uint64_t finite = UINT64_C(0xbfffbfffbfffbfff);
  for (uint64_t i = 0; i < count; i++, to += bytes) {
    uint64_t value = hash[i] * odd & finite;
    if (bytes == 1) *to = (uint8_t)(value & ((first + i) & 1 ? 0xbf : 0xff));
    else if (bytes == 2) memcpy(to, &value, 2);
    else if (bytes == 4) memcpy(to, &value, 4);
    else memcpy(to, &value, 8);
    if (bytes == 16) memcpy(to + 8, &value, 8);
  }
}
void update_apply(const update_t *u, uint64_t first, uint64_t count, void *const *ptr) {
  uint64_t hash[BLOCK];
  for (uint64_t at = 0; at < count; at += BLOCK) {
    uint64_t n = count - at < BLOCK ? count - at : BLOCK;
    for (uint64_t i = 0; i < n; i++) hash[i] = u->salt ^ (first + at + i) * UINT64_C(0x9e3779b97f4a7c15);
    for (uint32_t k = 0; k < u->count; k++)
      if (u->modes[k] & GEMINI_READ)
        mix(hash, (const uint8_t *)ptr[k] + at * u->element_bytes[k], u->element_bytes[k], n);
    for (uint32_t k = 0; k < u->count; k++)
      if (u->modes[k] & GEMINI_WRITE)
        put(hash, 2 * k + 3, (uint8_t *)ptr[k] + at * u->element_bytes[k], u->element_bytes[k], first + at, n);
  }
}

/* ---- making */
uint32_t rnd(actor_t *a, uint32_t below) { return random_below(&a->random, below); }
bool chance(actor_t *a, uint32_t percent) { return random_percent(&a->random, percent); }

static bool is_live(const bool *live, size_t stride, uint32_t i) {
  return *(const bool *)((const char *)live + stride * i);
}
int pick(actor_t *a, const bool *live, size_t stride, uint32_t count) {
  uint32_t from = rnd(a, count);
  for (uint32_t i = 0; i < count; i++)
    if (is_live(live, stride, (from + i) % count)) return (int)((from + i) % count);
  return -1;
}
int pick_free(const bool *live, size_t stride, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (!is_live(live, stride, i)) return (int)i;
  return -1;
}

op_t *plan(actor_t *a, op_code_t code, uint8_t manager) {
  if (a->queue_end == QUEUE) return NULL;
  op_t *op = &a->queue[a->queue_end++];
  memset(op, 0, sizeof *op);
  op->code = (uint8_t)code;
  op->manager = manager;
  return op;
}
bool plan_made(actor_t *a, op_code_t code, uint8_t manager) {
  op_t op = { .code = (uint8_t)code, .manager = manager };
  if (!operations[code].make(a, &op)) return false;
  op_t *to = plan(a, code, manager);
  if (to) *to = op;
  return to != NULL;
}

void spec_add(op_t *op, spec_t s) {
  op_add(op, (uint32_t)s.entry | (uint32_t)s.is_arena << 8 | s.mode << 9 | s.tier << 12 | (uint32_t)s.hold << 16);
  op_add(op, s.offset);
  op_add(op, s.size);
}
spec_t spec_at(const op_t *op, uint32_t index) {
  uint32_t word = op->arg[index % OP_ARGS];
  return (spec_t){ .entry = (int)(word & 255),
                   .is_arena = word >> 8 & 1,
                   .mode = word >> 9 & 7,
                   .tier = word >> 12 & 7,
                   .hold = (int)(word >> 16 & 255),
                   .offset = op->arg[(index + 1) % OP_ARGS],
                   .size = op->arg[(index + 2) % OP_ARGS] };
}

bool spec_make(actor_t *a, manager_t *m, spec_t *out) {
  part_t *p = part_of(a, m);
  spec_t s = { .is_arena = chance(a, 15), .mode = 1 + rnd(a, 3), .tier = rnd(a, 3) };
  s.entry = s.is_arena ? PICK(a, p->arenas, ARENAS) : PICK(a, p->tensors, TENSORS);
  if (s.entry < 0) return false;
  uint64_t limit = s.is_arena ? p->arenas[s.entry].size : p->tensors[s.entry].size;
  if (!limit) return false;
  uint32_t element = p->arenas[s.is_arena ? s.entry : p->tensors[s.entry].arena].element_bytes;
  switch (rnd(a, 20)) {
  case 0: s.size = limit; break; /* the whole object, by its size */
  case 1:                        /* a part, at any byte */
    s.offset = rnd(a, (uint32_t)limit);
    s.size = 1 + rnd(a, (uint32_t)(limit - s.offset));
    break;
  case 2:
  case 3:
  case 4:
  case 5: /* a part, at whole elements */
    s.offset = rnd(a, (uint32_t)(limit / element)) * (uint64_t)element;
    s.size = (1 + rnd(a, (uint32_t)((limit - s.offset) / element))) * (uint64_t)element;
    break;
  case 6:
    if (chance(a, 60) || !feature(a, FEATURE_empty)) break;
    s.offset = 1 + rnd(a, (uint32_t)limit); /* an empty range at some offset */
    break;
  case 7:
    if (chance(a, 80)) break;
    s.offset = rnd(a, (uint32_t)limit); /* beyond the end */
    s.size = limit - s.offset + 1 + rnd(a, 1000);
    break;
  default: break; /* the whole object, by size 0 */
  }
  *out = s;
  return true;
}
