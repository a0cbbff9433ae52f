/* The device simulated in host memory: streams, marks and queued work. SPDX-License-Identifier: Apache-2.0
 *
 * Frames are extents of one memory file (sim_memory.c). An extent is never handed out twice: file offsets last for
 * years, a destroyed frame's memory is given back by punching a hole, and a stale frame name is always detected.
 *
 * A stream is a thread and a ring of tasks. Calling threads append tasks; the stream's thread executes them in order,
 * up to TASK_BATCH per critical section. Waits (for marks, for flags) block the stream's thread, never a caller.
 *
 * Pacing. A device with a link rate keeps, for each stream, the simulated time at which its work ends (at_ns). A thread
 * wakes up a little after the time it slept for; at_ns does not include that latency, and the next task starts from
 * at_ns. So the rates hold exactly over any number of copies instead of losing a wake-up's latency with each.
 *
 * Sleeping threads. Marks and flags are checked without a lock. Only a thread that has to sleep takes a lock, and the
 * other side takes it only if a sleeper has announced itself; mark_reach() and sim_flag_wake() say why none is missed.
 *
 * Lock order: streams_lock, stream.lock. memory_lock, link.lock, flag_lock and stream.reach_lock are innermost. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "device/sim.h"
#include "device/sum.h"

static uint64_t sim_now(void *self) {
  (void)self;
  return gmi_now_ns();
}

bool gmi_sim_size_ok(uint64_t size_bytes) {
  return size_bytes && size_bytes % GRANULE_BYTES == 0 && size_bytes <= MEMORY_MAX_BYTES;
}

/* --- marks --- */

/* Reads a mark's time without a lock. The ring is twice MARK_TIMES long. The thread overwrites entry m for mark
 * m + TIME_RING only after it has stored reached = m + TIME_RING - 1, so a reader of the new value finds, on the second
 * look, that m is too old. */
static gemini_status_t mark_time(stream_t *stream, uint64_t mark, uint64_t *ns_out) {
  uint64_t reached = atomic_load_explicit(&stream->reached, memory_order_acquire);
  if (!mark || mark > reached || reached - mark >= MARK_TIMES) return GEMINI_ERR_INVALID;
  /* The acquire load pairs with the release store in mark_reach(): with a time it brings the `reached` stored before
   * it, so that the relaxed load below cannot return an older one. */
  uint64_t ns = atomic_load_explicit(&stream->times_ns[mark % TIME_RING], memory_order_acquire);
  reached = atomic_load_explicit(&stream->reached, memory_order_relaxed);
  if (reached - mark >= MARK_TIMES) return GEMINI_ERR_INVALID;
  *ns_out = ns;
  return GEMINI_OK;
}

/* Publishes that a mark is reached, and wakes waiters. This side stores `reached`, then loads `wanted`; a waiter stores
 * `wanted`, then loads `reached`. All four are sequentially consistent, so at least one side sees the other's store:
 * either the waiter finds the mark reached, or this finds it wanted. The lock is taken only in the latter case; taking
 * it also makes sure that the waiter is asleep, not between its check and its sleep. All waiters are woken and announce
 * their marks again, as they may wait for different ones. */
static void mark_reach(stream_t *stream, uint64_t mark) {
  uint64_t ns = stream->sim->paced ? stream->at_ns : sim_now(NULL);
  atomic_store_explicit(&stream->times_ns[mark % TIME_RING], ns, memory_order_release);
  atomic_store(&stream->reached, mark);
  if (atomic_load(&stream->wanted) > mark) return;
  pthread_mutex_lock(&stream->reach_lock);
  atomic_store(&stream->wanted, UINT64_MAX);
  pthread_mutex_unlock(&stream->reach_lock);
  pthread_cond_broadcast(&stream->reach);
}

/* Blocks until the mark is reached. The first look is the common case; acquire pairs with the store in mark_reach(). */
static void mark_wait(stream_t *stream, uint64_t mark) {
  if (atomic_load_explicit(&stream->reached, memory_order_acquire) >= mark) return;
  pthread_mutex_lock(&stream->reach_lock);
  for (;;) {
    if (atomic_load(&stream->wanted) > mark) atomic_store(&stream->wanted, mark);
    if (atomic_load(&stream->reached) >= mark) break;
    pthread_cond_wait(&stream->reach, &stream->reach_lock);
  }
  pthread_mutex_unlock(&stream->reach_lock);
}

/* Blocks a stream's thread until *flag >= value. The acquire load pairs with the owner's release store of the flag. The
 * counter is incremented before the flag is checked again; see sim_flag_wake(). */
static void flag_wait(sim_t *sim, const _Atomic uint64_t *flag, uint64_t value) {
  if (atomic_load_explicit(flag, memory_order_acquire) >= value) return;
  pthread_mutex_lock(&sim->flag_lock);
  atomic_fetch_add(&sim->flag_waiters, 1);
  while (atomic_load(flag) < value) pthread_cond_wait(&sim->flag_changed, &sim->flag_lock);
  atomic_fetch_sub(&sim->flag_waiters, 1);
  pthread_mutex_unlock(&sim->flag_lock);
}

static void sim_flag_wake(void *self) {
  sim_t *sim = self;
  /* Pairs with the increment in flag_wait(). Both are read-modify-writes of one word, so one comes first. If the
   * increment does, this one sees it and wakes the waiter. If this one does, the increment synchronises with it, and
   * the waiter's next load of the flag sees the value stored before this call. */
  if (!atomic_fetch_add(&sim->flag_waiters, 0)) return;
  /* The empty critical section: a waiter that has seen the old value holds the lock until it sleeps on the
   * condition. */
  pthread_mutex_lock(&sim->flag_lock);
  pthread_mutex_unlock(&sim->flag_lock);
  pthread_cond_broadcast(&sim->flag_changed);
}

/* --- the stream's thread --- */

static void sleep_until(uint64_t ns) {
  struct timespec ts = { (time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S) };
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) continue;
}

/* Work other than paced copies takes as long as it takes: simulated time catches up with the clock. */
static void work_done(stream_t *stream) {
  if (stream->sim->paced) stream->at_ns = sim_now(NULL);
}

/* Copies, and on a link with a rate sleeps until the copy would have ended on it. */
static void run_copy(stream_t *stream, const task_t *task) {
  sim_t *sim = stream->sim;
  link_t *link = task->variant == GMI_COPY_D2D ? NULL : &sim->links[task->variant];
  uint64_t size_bytes = task->u.copy.size_bytes;
  if (!link || !link->bytes_per_s) {
    if (size_bytes) memcpy(task->u.copy.dst, task->u.copy.src, size_bytes);
    work_done(stream);
    return;
  }
  /* The copy occupies the link from when stream and link are free, for its whole length: copies of several streams
   * follow each other in the order in which they get here. */
  uint64_t need_ns = (uint64_t)(((unsigned __int128)size_bytes * NS_PER_S + link->bytes_per_s - 1) / link->bytes_per_s);
  pthread_mutex_lock(&link->lock);
  uint64_t end_ns = (stream->at_ns > link->free_ns ? stream->at_ns : link->free_ns) + need_ns;
  link->free_ns = end_ns;
  pthread_mutex_unlock(&link->lock);
  uint64_t begin_ns = sim_now(NULL);
  if (size_bytes) memcpy(task->u.copy.dst, task->u.copy.src, size_bytes);
  uint64_t now_ns = sim_now(NULL), took_ns = now_ns - begin_ns;
  if (took_ns > need_ns) { /* memcpy was slower than the link's rate: the link was occupied for that time */
    end_ns += took_ns - need_ns;
    pthread_mutex_lock(&link->lock);
    if (link->free_ns < end_ns) link->free_ns = end_ns;
    pthread_mutex_unlock(&link->lock);
  }
  if (now_ns < end_ns) sleep_until(end_ns);
  stream->at_ns = end_ns;
}

/* Stores a stream's first failure: later ones follow from it. Only the stream's thread calls it while the stream is
 * live; the exchange expresses "unless there is one" in one step. */
static void fail(stream_t *stream, int32_t status) {
  int32_t none = GEMINI_OK;
  if (status) atomic_compare_exchange_strong(&stream->failure, &none, status);
}

/* Executes one task on the stream's thread, without locks. A failed stream goes on: its marks are still reached, so
 * that no thread waits forever, and sync() and reached() report the failure. */
static void run_task(stream_t *stream, const task_t *task) {
  sim_t *sim = stream->sim;
  if (stream->at_ns < task->queued_ns) stream->at_ns = task->queued_ns;
  switch (task->kind) {
  case TASK_MARK: mark_reach(stream, task->u.mark); break;
  case TASK_WAIT: {
    uint64_t ns;
    mark_wait(task->u.wait.other, task->u.wait.mark);
    fail(stream, atomic_load(&task->u.wait.other->failure));
    if (!sim->paced) break;
    if (mark_time(task->u.wait.other, task->u.wait.mark, &ns) == GEMINI_OK && stream->at_ns < ns) stream->at_ns = ns;
    break;
  }
  case TASK_WAIT_FLAG:
    flag_wait(sim, task->u.flag.flag, task->u.flag.value);
    work_done(stream); /* the time at which the flag was stored is unknown: now at the latest */
    break;
  case TASK_COPY: run_copy(stream, task); break;
  case TASK_ZERO:
    if (task->u.copy.size_bytes) memset(task->u.copy.dst, 0, task->u.copy.size_bytes);
    work_done(stream);
    break;
  case TASK_CALL:
    task->u.call.fn(task->u.call.user);
    work_done(stream);
    break;
  case TASK_RUN:
    fail(stream, task->u.run.fn(task->u.run.user));
    work_done(stream);
    break;
  case TASK_SUM_SQUARES:
    *task->u.sum.sum = gmi_sum_squares(task->u.sum.src, task->variant, task->u.sum.count);
    work_done(stream);
    break;
  case TASK_ADD: {
    const void *const both[] = { task->u.add.dst, task->u.add.src };
    gmi_reduce(task->variant, GMI_REDUCE_SUM, 2, both, task->u.add.dst, task->u.add.count);
    work_done(stream);
    break;
  }
  case TASK_FAIL: fail(stream, (int32_t)task->variant); break;
  default: break;
  }
}

/* A stream's thread. Ends when the stream is closing and its ring is empty: everything queued is still executed. */
static void *stream_main(void *user) {
  stream_t *stream = user;
  task_t batch[TASK_BATCH];
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); /* ns; the default lets sleeps end 50 us late */
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (stream->head == stream->tail && stream->state == STREAM_LIVE) {
      stream->asleep = true;
      pthread_cond_wait(&stream->more, &stream->lock);
      stream->asleep = false;
    }
    if (stream->head == stream->tail) break;
    uint32_t count = 0;
    while (count < TASK_BATCH && stream->head != stream->tail)
      batch[count++] = stream->ring[stream->head++ & (stream->capacity - 1)];
    pthread_mutex_unlock(&stream->lock);
    for (uint32_t i = 0; i < count; i++) run_task(stream, &batch[i]);
    pthread_mutex_lock(&stream->lock);
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

/* --- streams --- */

static stream_t *stream_of(sim_t *sim, uint32_t index) {
  return index < GMI_DEVICE_MAX_STREAMS ? atomic_load_explicit(&sim->streams[index], memory_order_acquire) : NULL;
}

/* Appends a task to the stream, doubling the ring if it is full. *mark_out receives a mark's number, which is assigned
 * under the lock, so that marks are numbered in the order of the ring. */
static gemini_status_t enqueue(sim_t *sim, uint32_t index, task_t *task, uint64_t *mark_out) {
  stream_t *stream = stream_of(sim, index);
  if (!stream) return GEMINI_ERR_INVALID;
  task->queued_ns = sim->paced ? sim_now(NULL) : 0;
  pthread_mutex_lock(&stream->lock);
  gemini_status_t status = GEMINI_OK;
  if (stream->state != STREAM_LIVE) {
    status = GEMINI_ERR_INVALID;
  } else if (stream->tail - stream->head == stream->capacity) {
    task_t *grown = calloc(stream->capacity * 2, sizeof *grown);
    if (grown) {
      for (uint64_t i = stream->head; i != stream->tail; i++)
        grown[i & (stream->capacity * 2 - 1)] = stream->ring[i & (stream->capacity - 1)];
      free(stream->ring);
      stream->ring = grown;
      stream->capacity *= 2;
    } else {
      status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for %llu queued operations",
                        (unsigned long long)stream->capacity * 2);
    }
  }
  bool wake = false;
  if (status == GEMINI_OK) {
    if (task->kind == TASK_MARK) {
      task->u.mark = atomic_load_explicit(&stream->recorded, memory_order_relaxed) + 1;
      atomic_store_explicit(&stream->recorded, task->u.mark, memory_order_release);
      *mark_out = task->u.mark;
    }
    stream->ring[stream->tail++ & (stream->capacity - 1)] = *task;
    wake = stream->asleep;
    stream->asleep = false; /* further tasks before it wakes up need no signal */
  }
  pthread_mutex_unlock(&stream->lock);
  if (wake) pthread_cond_signal(&stream->more);
  return status;
}

static void stream_free(stream_t *stream) {
  if (!stream) return;
  pthread_mutex_destroy(&stream->lock);
  pthread_cond_destroy(&stream->more);
  pthread_mutex_destroy(&stream->reach_lock);
  pthread_cond_destroy(&stream->reach);
  free(stream->ring);
  free(stream);
}

static stream_t *stream_new(sim_t *sim, uint32_t index) {
  stream_t *stream = calloc(1, sizeof *stream);
  if (!stream) return NULL;
  stream->sim = sim;
  stream->index = index;
  atomic_init(&stream->wanted, UINT64_MAX);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->more, NULL);
  pthread_mutex_init(&stream->reach_lock, NULL);
  pthread_cond_init(&stream->reach, NULL);
  stream->capacity = TASKS_FIRST;
  stream->ring = calloc(TASKS_FIRST, sizeof *stream->ring);
  if (!stream->ring) {
    stream_free(stream);
    return NULL;
  }
  return stream;
}

static gemini_status_t stream_start(stream_t *stream) {
  int error = gmi_thread_start(&stream->thread, stream_main, stream);
  if (error) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start a thread: %s", strerror(error));
  char name[16];
  snprintf(name, sizeof name, "gmi-sim-%u", stream->index);
  pthread_setname_np(stream->thread, name);
  return GEMINI_OK;
}

/* Starts a thread for the lowest free index. A record that an earlier stream left is used again: it is idle, and its
 * failure is cleared. */
static gemini_status_t sim_stream_create(void *self, bool urgent, uint32_t *stream_out) {
  sim_t *sim = self;
  (void)urgent;
  if (!stream_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = GEMINI_OK;
  bool unused = false;
  pthread_mutex_lock(&sim->streams_lock);
  for (uint32_t index = 0; !unused && index < GMI_DEVICE_MAX_STREAMS; index++) {
    stream_t *stream = stream_of(sim, index);
    if (!stream) {
      unused = true;
      stream = stream_new(sim, index);
      if (!stream) status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for its records");
      if (!stream) break;
      atomic_store_explicit(&sim->streams[index], stream, memory_order_release);
    }
    pthread_mutex_lock(&stream->lock);
    unused = stream->state == STREAM_NONE;
    if (unused) {
      stream->at_ns = 0;
      atomic_store(&stream->failure, GEMINI_OK);
      stream->state = STREAM_LIVE;
      status = stream_start(stream);
      if (status) stream->state = STREAM_NONE;
      else *stream_out = index;
    }
    pthread_mutex_unlock(&stream->lock);
  }
  pthread_mutex_unlock(&sim->streams_lock);
  if (!unused)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, 0, "%u streams exist, which is the limit", GMI_DEVICE_MAX_STREAMS);
  return status;
}

/* CLOSING lets the thread end after its last task and refuses new ones. The state becomes NONE only after the join, so
 * the index is not reused before. */
static gemini_status_t sim_stream_destroy(void *self, uint32_t index) {
  stream_t *stream = stream_of(self, index);
  if (!stream) return GEMINI_ERR_INVALID;
  pthread_mutex_lock(&stream->lock);
  bool live = stream->state == STREAM_LIVE;
  if (live) stream->state = STREAM_CLOSING;
  pthread_t thread = stream->thread;
  pthread_mutex_unlock(&stream->lock);
  if (!live) return GEMINI_ERR_INVALID;
  pthread_cond_signal(&stream->more);
  pthread_join(thread, NULL);
  pthread_mutex_lock(&stream->lock);
  stream->state = STREAM_NONE;
  pthread_mutex_unlock(&stream->lock);
  return GEMINI_OK;
}

static gemini_status_t sim_mark(void *self, uint32_t stream, uint64_t *mark_out) {
  if (!mark_out) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_MARK };
  return enqueue(self, stream, &task, mark_out);
}

/* Acquire pairs with the release store in enqueue(). */
static bool mark_recorded(const stream_t *stream, uint64_t mark) {
  return mark <= atomic_load_explicit(&stream->recorded, memory_order_acquire);
}

static gemini_status_t sim_wait(void *self, uint32_t stream, uint32_t other_index, uint64_t mark) {
  stream_t *other = stream_of(self, other_index);
  if (!other || !mark_recorded(other, mark)) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_WAIT, .u.wait = { other, mark } };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_wait_flag(void *self, uint32_t stream, const _Atomic uint64_t *flag, uint64_t value) {
  if (!flag) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_WAIT_FLAG, .u.flag = { flag, value } };
  return enqueue(self, stream, &task, NULL);
}

/* The acquire load of `reached` comes first: a failure of work before the mark was stored before it, so a relaxed load
 * of the failure suffices. */
static bool sim_reached(void *self, uint32_t index, uint64_t mark) {
  stream_t *stream = stream_of(self, index);
  return stream && atomic_load_explicit(&stream->reached, memory_order_acquire) >= mark &&
         (!mark || !atomic_load_explicit(&stream->failure, memory_order_relaxed));
}

static gemini_status_t sim_sync(void *self, uint32_t index, uint64_t mark) {
  stream_t *stream = stream_of(self, index);
  if (!stream || !mark_recorded(stream, mark)) return GEMINI_ERR_INVALID;
  mark_wait(stream, mark);
  gemini_status_t failure = atomic_load(&stream->failure);
  return failure ? gmi_fail(failure, 0, "a failure that was queued on stream %u of the simulated device", index)
                 : GEMINI_OK;
}

static gemini_status_t sim_mark_time(void *self, uint32_t index, uint64_t mark, uint64_t *ns_out) {
  stream_t *stream = stream_of(self, index);
  return stream && ns_out ? mark_time(stream, mark, ns_out) : GEMINI_ERR_INVALID;
}

static gemini_status_t sim_copy(void *self, uint32_t stream, void *dst, const void *src, uint64_t size_bytes,
                                uint32_t kind) {
  if (kind > GMI_COPY_D2D || ((!dst || !src) && size_bytes)) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_COPY, .variant = kind, .u.copy = { dst, src, size_bytes } };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_zero(void *self, uint32_t stream, void *dst, uint64_t size_bytes) {
  if (!dst && size_bytes) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_ZERO, .u.copy = { dst, NULL, size_bytes } };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_call(void *self, uint32_t stream, void (*fn)(void *user), void *user) {
  if (!fn) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_CALL, .u.call = { fn, user } };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_run(void *self, uint32_t stream, gemini_status_t (*fn)(void *user), void *user) {
  if (!fn) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_RUN, .u.run = { fn, user } };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_sum_squares(void *self, uint32_t stream, const void *src, uint32_t dtype, uint64_t count,
                                       double *sum) {
  if (!sum || (!src && count) || dtype > GEMINI_DTYPE_F64 || count > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_SUM_SQUARES, .variant = dtype, .u.sum = { src, sum, count } };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_add(void *self, uint32_t stream, void *dst, const void *src, uint32_t dtype,
                               uint64_t count) {
  if (dtype > GEMINI_DTYPE_F64 || count > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  const uint32_t width = gmi_dtype_bytes(dtype);
  if (count && (!dst || !src || (uintptr_t)dst % width || (uintptr_t)src % 16)) return GEMINI_ERR_INVALID;
  task_t task = { .kind = TASK_ADD, .variant = dtype, .u.add = { dst, src, count } };
  return enqueue(self, stream, &task, NULL);
}

gemini_status_t gmi_device_sim_fail(void *self, uint32_t stream, gemini_status_t status) {
  task_t task = { .kind = TASK_FAIL, .variant = (uint32_t)status };
  return enqueue(self, stream, &task, NULL);
}

static gemini_status_t sim_stream_adopt(void *self, void *native, uint32_t *stream_out) {
  (void)self, (void)native, (void)stream_out;
  return GEMINI_ERR_UNSUPPORTED;
}
static gemini_status_t sim_stream_renew(void *self, uint32_t stream, bool may_block) {
  (void)self, (void)stream, (void)may_block; /* nothing is ever adopted */
  return GEMINI_ERR_UNSUPPORTED;
}
static gemini_status_t sim_stream_native(void *self, uint32_t stream, void **native_out) {
  (void)self, (void)stream, (void)native_out;
  return GEMINI_ERR_UNSUPPORTED;
}

static gemini_status_t sim_pci(void *self, char address_out[GMI_DEVICE_PCI_BYTES]) {
  (void)self, (void)address_out;
  return GEMINI_ERR_UNSUPPORTED;
}

static uint64_t sim_memory_bytes_per_s(void *self) {
  (void)self;
  return 0;
}

/* --- the device --- */

static void sim_close(void *self) {
  sim_t *sim = self;
  if (!sim) return;
  /* Streams may wait for one another, but all their threads run until their work is done: any order of joining does. */
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) sim_stream_destroy(sim, i);
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) stream_free(stream_of(sim, i));
  for (size_t i = 0; i < sim->range_count; i++) munmap(sim->ranges[i].base, sim->ranges[i].size_bytes);
  for (int i = 0; i < 2; i++) pthread_mutex_destroy(&sim->links[i].lock);
  pthread_mutex_destroy(&sim->memory_lock);
  pthread_mutex_destroy(&sim->flag_lock);
  pthread_mutex_destroy(&sim->streams_lock);
  pthread_cond_destroy(&sim->flag_changed);
  gmi_fork_hold();
  gmi_fork_close_not(sim->memory_fd);
  close(sim->memory_fd);
  gmi_fork_let();
  free(sim->ranges);
  free(sim->frames);
  free(sim);
}

static gemini_status_t sim_open(const gmi_device_config_t *config, void **self_out) {
  if (!config || !self_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", config ? "self_out" : "config");
  if (config->reserved) return gmi_fail(GEMINI_ERR_INVALID, 0, "reserved is %u, must be 0", config->reserved);
  if (!gmi_sim_memory_bytes_ok(config->memory_bytes))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "memory_bytes is %llu, must be a multiple of %llu up to %llu",
                    (unsigned long long)config->memory_bytes, (unsigned long long)GRANULE_BYTES,
                    (unsigned long long)MEMORY_MAX_BYTES);
  if (config->ordinal)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "device_ordinal is %u, the simulated device has only 0",
                    config->ordinal);
  sim_t *sim = calloc(1, sizeof *sim);
  if (!sim) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of the simulated device");
  gmi_fork_hold();
  sim->memory_fd = memfd_create("gemini-sim", MFD_CLOEXEC);
  gmi_fork_close(sim->memory_fd); /* a child's copy would keep the memory alive as long as the child lives */
  gmi_fork_let();
  if (sim->memory_fd < 0) {
    int error = errno;
    free(sim);
    return gmi_fail(error == ENOSYS ? GEMINI_ERR_UNSUPPORTED : GEMINI_ERR_OOM_SYSTEM, error, "memfd_create: %s",
                    strerror(error));
  }
  /* Extending a file beyond RLIMIT_FSIZE sends SIGXFSZ, which ends the process: frame_create() refuses before that. */
  struct rlimit limit = { RLIM_INFINITY, RLIM_INFINITY };
  getrlimit(RLIMIT_FSIZE, &limit);
  sim->file_limit_bytes = limit.rlim_cur < INT64_MAX ? limit.rlim_cur : INT64_MAX;
  sim->file_bytes = BASE_ALIGN_BYTES; /* the first frame begins here, so that none is named 0 */
  if (sim->file_limit_bytes < sim->file_bytes) sim->file_limit_bytes = sim->file_bytes;
  sim->memory_bytes = config->memory_bytes;
  sim->links[GMI_COPY_H2D].bytes_per_s = config->h2d_bytes_per_s;
  sim->links[GMI_COPY_D2H].bytes_per_s = config->d2h_bytes_per_s;
  sim->paced = config->h2d_bytes_per_s || config->d2h_bytes_per_s;
  for (int i = 0; i < 2; i++) pthread_mutex_init(&sim->links[i].lock, NULL);
  pthread_mutex_init(&sim->memory_lock, NULL);
  pthread_mutex_init(&sim->flag_lock, NULL);
  pthread_mutex_init(&sim->streams_lock, NULL);
  pthread_cond_init(&sim->flag_changed, NULL);
  *self_out = sim;
  return GEMINI_OK;
}

const gmi_device_ops_t gmi_device_sim = {
  .name = "simulated",
  .chunk_overhead_ns = 20000,
  .link_bytes_per_s = UINT64_C(5000000000),
  .open = sim_open,
  .close = sim_close,
  .memory.granularity = gmi_sim_granularity,
  .memory.resize = gmi_sim_resize,
  .memory.reserve = gmi_sim_reserve,
  .memory.unreserve = gmi_sim_unreserve,
  .memory.frame_create = gmi_sim_frame_create,
  .memory.frame_destroy = gmi_sim_frame_destroy,
  .memory.map = gmi_sim_map,
  .memory.unmap = gmi_sim_unmap,
  .stream.create = sim_stream_create,
  .stream.destroy = sim_stream_destroy,
  .stream.mark = sim_mark,
  .stream.wait = sim_wait,
  .stream.wait_flag = sim_wait_flag,
  .stream.flag_wake = sim_flag_wake,
  .stream.reached = sim_reached,
  .stream.sync = sim_sync,
  .stream.mark_time = sim_mark_time,
  .queue.copy = sim_copy,
  .queue.zero = sim_zero,
  .queue.call = sim_call,
  .queue.run = sim_run,
  .queue.sum_squares = sim_sum_squares,
  .queue.add = sim_add,
  .memory.host_lock = gmi_sim_host_lock,
  .memory.host_unlock = gmi_sim_host_lock,
  .now = sim_now,
  .stream.adopt = sim_stream_adopt,
  .stream.native = sim_stream_native,
  .pci = sim_pci,
  .memory_bytes_per_s = sim_memory_bytes_per_s,
  .stream.mark_untimed = sim_mark,
  .stream.renew = sim_stream_renew,
};
