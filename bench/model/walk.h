/* Tasks that walk over elements of the model, wherever these are: AdamW, the first values, a hash.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BENCH_WALK_H
#define BENCH_WALK_H

#include <stdatomic.h>

#include "examples/memory.h"
#include "model/task.h"

/* It may still be under way when later tasks run, so it must stay until memory_update_wait(). */
typedef struct walk {
  memory_t *memory;
  task_t task;                    /* kind ADAMW, FILL or HASH, and with */
  void *device_hash;              /* HASH */
  _Atomic uint64_t host_hash;     /* HASH */
  _Atomic uint64_t host_elements; /* how many were walked on the host */
  atomic_bool failed;             /* a part could not be queued */
} walk_t;

/* Queues a task behind those queued before; it is copied. */
void walk_queue(memory_t *memory, const task_t *task);
/* Walks elements first .. first + count - 1, behind the tasks queued so far, and returns at once; a chunk is walked
 * before its next use. */
void walk_range(memory_t *memory, walk_t *walk, uint64_t first, uint64_t count);
/* Over all masters. Blocks until all walks and tasks are done. */
uint64_t walk_hash(memory_t *memory);

#endif
