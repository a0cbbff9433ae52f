/* Programs: made as they run, or replayed. With several threads, rounds in which one thread works alternate with rounds
 * in which all do. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fake_cuda.h"
#include "tester.h"

#define X(name, weight, who) { run_##name, make_##name },
const operation_t operations[OP_COUNT] = { OPERATIONS(X) };
#undef X

enum { FILE_BYTES = 1 << 30 }; /* address space; larger than any arena */

/* ---- one operation */
void run_op(actor_t *a, const op_t *op) {
  shared_t *s = a->w->shared;
  uint64_t at = atomic_load(&s->threads[a->index].count);
  if (at < s->log_capacity) shared_log(s, a->index)[at] = *op;
  atomic_store(&s->threads[a->index].count, at + 1);
  a->op = op;
  if (a->w->options.verbose) op_write(stderr, op);
  a->fault_used = a->refused = false;
  operations[op->code].run(a, op);
  atomic_fetch_add(&s->steps, 1);
}

static bool may_run(const actor_t *a, uint8_t code) {
  if (a->w->options.without[code]) return false;
  if (!a->w->parallel) return true;
  return op_who(code) == OWN || (op_who(code) == FIRST && a->index == 0);
}

/* The operation that a thread runs in a calm round; OP_COUNT: any. */
static uint8_t calm_code(actor_t *a) {
  if (!a->w->parallel || !a->w->calm) return OP_COUNT;
  if (a->index) return chance(a, 90) ? OP_acquire : OP_norm;
  static const uint8_t codes[] = { OP_trace_load, OP_trace_load, OP_stats_reset, OP_explain };
  return codes[rnd(a, sizeof codes)];
}
/* An acquire of a calm round is released at once. */
static void calm_release(actor_t *a, const op_t *acquire) {
  op_t *release = plan(a, OP_release, acquire->manager);
  if (!release) return;
  op_add(release, acquire->arg[0]);
  op_add(release, 0);
  op_add(release, 0);
  for (uint32_t i = 2; i + ACCESS_ARGS <= acquire->count; i += ACCESS_ARGS)
    op_add(release, (uint32_t)spec_at(acquire, i).hold);
}

static void add_fault(actor_t *a, op_t *op) {
  static const uint8_t kinds[] = { FAULT_MEMORY, FAULT_MEMORY, FAULT_MEMORY, FAULT_MEMORY, FAULT_MEMORY,
                                   FAULT_THREAD, FAULT_FILE,   FAULT_FILE,   FAULT_FILE,   FAULT_RING };
  if (!chance(a, a->w->options.faults) || a->w->options.spared[op->code]) return;
  /* Memory that a failing driver does not give back when a manager closes stays, and may be missing for the next
   * manager. */
  bool closes = op->code == OP_close || op->code == OP_reopen;
  bool driver = a->w->options.cuda && chance(a, 40) && !a->w->parallel && !closes;
  op->fault = driver ? FAULT_DRIVER : kinds[rnd(a, sizeof kinds)];
  op->skip = (uint16_t)rnd(a, 1u << rnd(a, 6));
  op->run = chance(a, 70) ? 1 : chance(a, 70) ? 3 : 1000;
  if (driver) op->run = 1; /* otherwise the library could not undo what it had begun */
  op->errors = (uint8_t)(op->fault != FAULT_FILE || chance(a, 60) ? 0 : rnd(a, 5));
}

static uint32_t weight(const actor_t *a, uint8_t code) { return op_weight(code) * (a->w->options.more[code] ? 10 : 1); }

/* Makes the next operation of a thread: the next one of a sequence, or a random one. */
static void make_op(actor_t *a, op_t *op) {
  uint32_t total = 0;
  a->op = NULL;
  for (int i = 0; i < OP_COUNT; i++) total += weight(a, (uint8_t)i);
  for (uint32_t tries = 0;; tries++) {
    while (a->queue_first < a->queue_end) {
      *op = a->queue[a->queue_first++];
      if (a->queue_first == a->queue_end) a->queue_first = a->queue_end = 0;
      if (may_run(a, op->code)) goto made;
    }
    uint32_t at = rnd(a, total);
    uint8_t code = calm_code(a);
    bool calm = code < OP_COUNT && tries < 10;
    if (!calm)
      for (code = 0; at >= weight(a, code); code++) at -= weight(a, code);
    if (!may_run(a, code)) continue;
    uint8_t manager = a->w->managers[1].open && chance(a, 30);
    if (code == OP_open) manager = (uint8_t)rnd(a, MANAGERS);
    else if (!a->w->managers[manager].open) manager = !manager;
    if (tries > 1000) code = OP_stats_reset; /* no other operation is possible */
    *op = (op_t){ .code = code, .manager = manager };
    if (tries > 1000 || (code == OP_open ? operations[code].make(a, op)
                                         : a->w->managers[manager].open && operations[code].make(a, op))) {
      if (calm && code == OP_acquire) calm_release(a, op);
      break;
    }
    a->queue_first = a->queue_end = 0;
  }
made:
  op->thread = (uint8_t)a->index;
  op->round = a->w->round;
  op->check = (uint32_t)atomic_load(&a->w->shared->threads[a->index].count) + 1;
  add_fault(a, op);
}

/* If a system call failed in this operation and the operation reported it, nothing has changed, and a second try must
 * succeed. */
static void try_again(actor_t *a, const op_t *op) {
  if (!a->site_failed) return;
  a->site_failed = false;
  if (!a->own_status) return;
  for (int i = 0; i < MANAGERS; i++) check_part(a, &a->w->managers[i]);
  faults_all_told(a->w);
  run_op(a, op);
}

static void step(actor_t *a, const op_t *op) {
  run_op(a, op);
  try_again(a, op);
  manager_t *m = manager_of(a, op);
  check_some(a, m, op->check);
  /* checks that a failed operation has changed nothing */
  if (op->check % a->w->options.all_every && !a->refused) return;
  for (int i = 0; i < MANAGERS; i++) check_part(a, &a->w->managers[i]);
}

/* ---- rounds */
static uint32_t round_length(actor_t *first) {
  static const uint32_t most[] = { 8, 40, 200 };
  return 1 + rnd(first, most[rnd(first, 3)]);
}

/* A thread's share of a round. */
static void work(actor_t *a, uint32_t length) {
  const world_t *w = a->w;
  for (uint64_t i = 0; w->replay && i < w->replay_count; i++)
    if (w->replay[i].thread == a->index && w->replay[i].round == w->round) step(a, &w->replay[i]);
  for (uint32_t i = 0; !w->replay && (i < length || (!w->parallel && a->queue_first < a->queue_end)); i++) {
    op_t op;
    make_op(a, &op);
    step(a, &op);
  }
}

static void *thread_main(void *user) {
  actor_t *a = user;
  world_t *w = a->w;
  uint64_t seen = 0;
  for (;;) {
    pthread_mutex_lock(&w->lock);
    while (w->generation == seen && !w->stop) pthread_cond_wait(&w->begin, &w->lock);
    seen = w->generation;
    bool stop = w->stop;
    pthread_mutex_unlock(&w->lock);
    if (stop) return NULL;
    if (a->active) work(a, round_length(a));
    pthread_mutex_lock(&w->lock);
    if (!--w->running) pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
  }
}

static void threads_start(world_t *w) {
  w->generation = 0;
  w->stop = false;
  for (uint32_t i = 0; i < w->options.threads; i++)
    if (pthread_create(&w->actors[i].thread, NULL, thread_main, &w->actors[i])) abort();
}
static void threads_stop(world_t *w) {
  pthread_mutex_lock(&w->lock);
  w->stop = true;
  pthread_cond_broadcast(&w->begin);
  pthread_mutex_unlock(&w->lock);
  for (uint32_t i = 0; i < w->options.threads; i++) pthread_join(w->actors[i].thread, NULL);
}

static void round_parallel(world_t *w) {
  actor_t *first = &w->actors[0];
  /* the first thread and a few others */
  uint32_t threads = w->options.threads, active = 1 + rnd(first, 1 + rnd(first, threads));
  for (uint32_t i = 0; i < threads; i++) w->actors[i].active = w->replay || !i;
  for (uint32_t i = 0; i < active; i++) w->actors[rnd(first, threads)].active = true;
  w->parallel = true;
  pthread_mutex_lock(&w->lock);
  w->running = w->options.threads;
  w->generation++;
  pthread_cond_broadcast(&w->begin);
  while (w->running) pthread_cond_wait(&w->done, &w->lock);
  pthread_mutex_unlock(&w->lock);
  w->parallel = false;
  if (w->calm) w->calm--;
}

static bool replay_has_more(const world_t *w) {
  for (uint64_t i = 0; i < w->replay_count; i++)
    if (w->replay[i].round >= w->round) return true;
  return false;
}

static void check_all(world_t *w) {
  for (int i = 0; i < MANAGERS; i++)
    for (uint32_t t = 0; t < w->options.threads; t++) check_part(&w->actors[t], &w->managers[i]);
}

static void run(world_t *w) {
  actor_t *first = &w->actors[0];
  if (w->options.threads == 1) {
    op_t op;
    for (uint64_t i = 0; w->replay ? i < w->replay_count : i < w->options.steps; i++) {
      if (!w->replay) make_op(first, &op);
      step(first, w->replay ? &w->replay[i] : &op);
    }
    check_all(w);
    return;
  }
  uint64_t end = atomic_load(&w->shared->steps) + w->options.steps;
  threads_start(w);
  for (w->round = 0; w->replay ? replay_has_more(w) : atomic_load(&w->shared->steps) < end; w->round++) {
    if (w->round & 1) round_parallel(w);
    else work(first, 1 + rnd(first, 10));
    for (uint32_t i = 0; i < w->options.threads; i++) w->actors[i].op = NULL;
    if (w->round % 32 == 31) check_all(w);
    if (w->round % 64 == 63) { /* ends the threads and starts new ones */
      threads_stop(w);
      threads_start(w);
    }
  }
  threads_stop(w);
  check_all(w);
}

void world_run(world_t *w) { run(w); }
void world_replay(world_t *w, const op_t *ops, uint64_t count) {
  w->replay = ops;
  w->replay_count = count;
  run(w);
}

/* ---- the world */
static void probe_uring(world_t *w) {
#ifndef __SANITIZE_THREAD__ /* ThreadSanitizer does not see what the kernel does */
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_manager_t mgr;
  c.device_bytes = c.host_bytes = c.file_bytes = 16 << 20;
  c.file_dir = w->directory;
  c.file_engine = GEMINI_FILE_ENGINE_URING;
  w->uring = gemini_manager_open(&c, &mgr) == GEMINI_OK;
  if (w->uring) gemini_manager_close(mgr);
#else
  (void)w;
#endif
}

void world_open(world_t *w, const options_t *options, shared_t *shared, const char *directory) {
  w->options = *options;
  w->shared = shared;
  w->unit = options->cuda ? UINT64_C(2) << 20 : 65536;
  snprintf(w->directory, sizeof w->directory, "%s", directory);
  pthread_mutex_init(&w->budgets, NULL);
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->begin, NULL);
  pthread_cond_init(&w->done, NULL);
  for (uint32_t i = 0; i < MANAGERS; i++) {
    char path[PATHS + 8];
    snprintf(path, sizeof path, "%s/a%u", directory, i);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/b%u", directory, i);
    mkdir(path, 0700);
  }
  for (uint32_t i = 0; i < options->threads; i++) {
    actor_t *a = &w->actors[i];
    a->w = w;
    a->index = i;
    a->random = (options->seed + 1) * UINT64_C(0x9e3779b97f4a7c15) + i;
    random_next(&a->random);
    a->fd = memfd_create("tester", MFD_CLOEXEC);
    if (a->fd < 0 || ftruncate(a->fd, FILE_BYTES)) abort();
    a->file = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, a->fd, 0);
    if (a->file == MAP_FAILED) abort();
  }
  if (options->cuda) {
    fake_cuda_reset();
    faults_use_driver(fake_cuda_symbol);
  }
  probe_uring(w);
  if (options->sites == SITES_NOTE) faults_note_sites(true);
  if (options->sites == SITES_FAIL) faults_arm_site(options->site_path);
}

/* Frees everything, so that whatever remains is a leak. */
void world_close(world_t *w) {
  for (uint32_t i = 0; i < w->options.threads; i++) w->actors[i].op = NULL;
  for (int i = 0; i < MANAGERS; i++) {
    manager_t *m = &w->managers[i];
    for (uint32_t t = 0; m->open && t < w->options.threads; t++)
      for (int k = 0; k < HOLDS; k++) {
        if (!m->parts[t].holds[k].live) continue;
        op_t op = { .code = OP_release, .manager = (uint8_t)i, .thread = (uint8_t)t };
        op_add(&op, (uint32_t)m->parts[t].holds[k].stream + 1);
        op_add(&op, 0);
        op_add(&op, 0);
        op_add(&op, (uint32_t)k);
        operations[OP_release].run(&w->actors[t], &op);
      }
    op_t op = { .code = OP_close, .manager = (uint8_t)i };
    if (m->open) operations[OP_close].run(&w->actors[0], &op);
    for (int k = 0; k < 2; k++) kept_free(&w->kept[i][k]);
  }
  for (int i = 0; i < TRACES; i++) kept_free(&w->traces[i]);
  if (w->options.cuda && fake_cuda_live(true)) differs(&w->actors[0], "things of the driver are left");
  if (w->options.cuda && fake_cuda_violations()) differs(&w->actors[0], "calls of the driver that no program may make");
  if (w->options.sites == SITES_NOTE) w->shared->site_count = faults_sites(w->shared->site, SITES_MOST);
  for (uint32_t i = 0; i < w->options.threads; i++) {
    munmap(w->actors[i].file, FILE_BYTES);
    close(w->actors[i].fd);
    for (int k = 0; k < BORROWED; k++)
      if (w->actors[i].borrowed[k]) close(w->actors[i].borrowed[k]);
  }
}
