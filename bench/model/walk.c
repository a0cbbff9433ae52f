/* Tasks that walk over elements of the model. SPDX-License-Identifier: Apache-2.0 */
#include "model/walk.h"

static device_work_fn run_of(const memory_t *memory) { return memory->device->is_gpu ? task_on_gpu : task_on_cpu; }

void walk_queue(memory_t *memory, const task_t *task) { memory_queue(memory, run_of(memory), task, sizeof *task); }

static const memory_arrays_t *arrays_of(int kind) {
  static const memory_arrays_t fill = { 2, { GEMINI_KIND_PARAM, GEMINI_KIND_MASTER }, { GEMINI_WRITE, GEMINI_WRITE } };
  static const memory_arrays_t hash = { 1, { GEMINI_KIND_MASTER }, { GEMINI_READ } };
  return kind == TASK_ADAMW ? &memory_optimizer : kind == TASK_FILL ? &fill : &hash;
}

/* The task of a span, whose addresses are in the order of arrays_of(). */
static task_t task_of(walk_t *walk, const gemini_update_span_t *span) {
  bool on_host = span->tier == GEMINI_TIER_HOST;
  task_t task = walk->task;
  task.first = span->first_element;
  task.count = span->element_count;
  if (task.kind == TASK_HASH) {
    task.in[0] = span->ptr[0];
    task.out[0] = on_host ? (void *)&walk->host_hash : walk->device_hash;
  } else {
    /* AdamW's gradient has the address of its parameter, which comes second. */
    uint32_t skipped = task.kind == TASK_ADAMW ? 1 : 0;
    for (uint32_t i = skipped; i < span->arena_count; i++) task.out[i - skipped] = span->ptr[i];
  }
  return task;
}

/* Called by libgemini for each span: on a worker when its chunks are on the host, else to queue work. */
static void walk_span(void *user, const gemini_update_span_t *span) {
  walk_t *walk = user;
  task_t task = task_of(walk, span);
  if (span->tier == GEMINI_TIER_HOST) {
    task_run(&task);
    atomic_fetch_add(&walk->host_elements, span->element_count);
  } else if (!memory_queue_on(walk->memory, span->stream, run_of(walk->memory), &task, sizeof task)) {
    atomic_store(&walk->failed, true);
  }
}

void walk_range(memory_t *memory, walk_t *walk, uint64_t first, uint64_t count) {
  if (memory->failed || count == 0) return;
  walk->memory = memory;
  memory_update(memory, arrays_of(walk->task.kind), first, count, walk_span, walk);
  if (atomic_load(&walk->failed)) memory_fail(memory, "an update could not be queued on the device");
}

uint64_t walk_hash(memory_t *memory) {
  static uint64_t sum; /* work that is under way may use it after a failure */
  uint64_t bytes = sizeof sum;
  memory_update_wait(memory);
  memory_synchronize(memory);
  sum = 0;
  walk_t walk = { .task = { .kind = TASK_HASH }, .device_hash = memory_alloc(memory, bytes) };
  task_t to = { .kind = TASK_COPY, .in = { &sum }, .out = { walk.device_hash }, .count = bytes };
  task_t back = { .kind = TASK_COPY, .in = { walk.device_hash }, .out = { &sum }, .count = bytes };
  walk_queue(memory, &to);
  walk_range(memory, &walk, 0, memory->elements);
  memory_update_wait(memory); /* also when it failed in part: what is under way uses what lies here */
  walk_queue(memory, &back);
  memory_synchronize(memory);
  memory_free(memory, walk.device_hash);
  return memory->failed ? 0 : sum + atomic_load(&walk.host_hash);
}
