/* Where bench_stack's memory is, and where its tasks run. SPDX-License-Identifier: Apache-2.0 */
#include "place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN_ELEMENTS = 256 };

static const uint32_t element_bytes[PLACE_KINDS] = { 2, 2, 4, 4, 4 };

/* ---- Failures ---- */

const char *place_error(const place_t *place) { return place->failed ? place->error : NULL; }

static bool fail(place_t *place, const char *message) {
  if (!place->failed) snprintf(place->error, sizeof place->error, "%s", message);
  place->failed = true;
  return false;
}

bool place_check(place_t *place, gemini_status_t status) {
  if (status == GEMINI_OK) return true;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  char text[640];
  if (gemini_last_error(&info) == GEMINI_OK && info.status == status) {
    snprintf(text, sizeof text, "%s: %s", info.operation, info.message);
  } else {
    snprintf(text, sizeof text, "libgemini: %s", gemini_status_string(status));
  }
  return fail(place, text);
}

/* gpu.c has printed what. */
static bool gpu_check(place_t *place, bool worked) { return worked || fail(place, "a call of the GPU failed"); }

/* ---- Opening, tensors, closing ---- */

void place_open(place_t *place, const gemini_config_t *config, task_gpu_t *gpu, void *gpu_stream) {
  *place = (place_t){ .gpu = gpu, .gpu_stream = gpu_stream, .managed = config != NULL };
  if (config == NULL) return;
  if (!place_check(place, gemini_manager_open(config, &place->manager))) return;
  gemini_status_t status = gpu != NULL ? gemini_stream_adopt(place->manager, gpu_stream, &place->stream)
                                       : gemini_stream_create(place->manager, &place->stream);
  if (!place_check(place, status)) return;
  static const char *const names[PLACE_KINDS] = { "param", "grad", "master", "momentum", "variance" };
  for (uint32_t kind = 0; kind < PLACE_KINDS; kind++) {
    gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
    arena.kind = kind;
    arena.element_bytes = element_bytes[kind];
    arena.name = names[kind];
    if (kind == GEMINI_KIND_GRAD) {
      arena.reuse = place->arenas[GEMINI_KIND_PARAM];
    } else if (kind != GEMINI_KIND_PARAM) {
      arena.like = place->arenas[GEMINI_KIND_PARAM];
    }
    if (!place_check(place, gemini_arena_create(place->manager, &arena, &place->arenas[kind]))) return;
  }
}

int place_register(place_t *place, const char *name, uint64_t elements) {
  if (place->failed) return 0;
  if (place->tensor_count == place->tensor_capacity) {
    int capacity = 2 * place->tensor_capacity + 64;
    place_tensor_t *tensors = realloc(place->tensors, (size_t)capacity * sizeof *tensors);
    if (tensors == NULL) return fail(place, "out of memory for the list of tensors");
    place->tensors = tensors;
    place->tensor_capacity = capacity;
  }
  place_tensor_t *tensor = &place->tensors[place->tensor_count];
  *tensor = (place_tensor_t){ .elements = elements };
  tensor->first = (place->elements + ALIGN_ELEMENTS - 1) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
  place->elements = tensor->first + elements;
  place->tensor_elements += elements;
  if (place->managed &&
      (!place_check(place, gemini_tensor_register(place->manager, place->arenas[GEMINI_KIND_PARAM], name,
                                                  elements * element_bytes[GEMINI_KIND_PARAM], GEMINI_OFFSET_NEXT,
                                                  &tensor->handles[0])) ||
       !place_check(place, gemini_tensor_counterpart(place->manager, tensor->handles[0],
                                                     place->arenas[GEMINI_KIND_GRAD], &tensor->handles[1])))) {
    return 0;
  }
  return place->tensor_count++;
}

void place_ready(place_t *place) {
  for (uint32_t kind = 0; !place->failed && !place->managed && kind < PLACE_KINDS; kind++) {
    if (kind == GEMINI_KIND_GRAD) continue;
    uint64_t bytes = place->elements * element_bytes[kind];
    if (place->gpu != NULL) {
      gpu_t *gpu = place->gpu->gpu;
      gpu_check(place, gpu_alloc(gpu, bytes, &place->plain[kind]) &&
                           gpu_set(gpu, place->plain[kind], 0, bytes, place->gpu_stream));
    } else if ((place->plain[kind] = calloc(1, bytes)) == NULL) {
      fail(place, "out of memory for model data");
    }
  }
}

static void *plain_at(const place_t *place, uint32_t kind, uint64_t element) {
  if (kind == GEMINI_KIND_GRAD) kind = GEMINI_KIND_PARAM;
  return (char *)place->plain[kind] + element * element_bytes[kind];
}

void place_close(place_t *place) {
  gpu_t *gpu = place->gpu != NULL ? place->gpu->gpu : NULL;
  if (place->manager != 0) {
    gemini_status_t status = GEMINI_OK;
    if (place->held_count > 0) { /* after a failure only */
      status = gemini_release(place->manager, place->held, place->held_count, place->stream);
    }
    if (status == GEMINI_OK && place->op_open) status = gemini_op_end(place->manager); /* likewise */
    if (status == GEMINI_OK) status = gemini_stream_destroy(place->stream);
    if (status == GEMINI_OK) status = gemini_manager_close(place->manager); /* the rest goes with it */
    place_check(place, status);
  }
  if (gpu != NULL && !place->managed) gpu_stream_synchronize(gpu, place->gpu_stream);
  for (uint64_t i = 0; i < place->block_count; i++) {
    if (gpu != NULL) {
      gpu_free_async(gpu, place->blocks[i].ptr, place->gpu_stream);
    } else {
      free(place->blocks[i].ptr);
    }
  }
  for (uint32_t kind = 0; kind < PLACE_KINDS; kind++) {
    if (gpu != NULL) {
      gpu_free(gpu, place->plain[kind]);
    } else {
      free(place->plain[kind]);
    }
  }
  for (int i = 0; i < place->host_block_count && !place->managed; i++) {
    if (gpu != NULL) {
      gpu_host_free(gpu, place->host_blocks[i]);
    } else {
      free(place->host_blocks[i]);
    }
  }
  free(place->blocks);
  free(place->tensors);
  place->blocks = NULL;
  place->tensors = NULL;
}

/* ---- Iterations and operators ---- */

void place_iteration_begin(place_t *place) {
  if (!place->failed && place->managed) place_check(place, gemini_iteration_begin(place->manager));
}
void place_iteration_end(place_t *place) {
  if (!place->failed && place->managed) place_check(place, gemini_iteration_end(place->manager));
}
void place_phase(place_t *place, uint32_t phase) {
  if (!place->failed && place->managed) place_check(place, gemini_phase_set(place->manager, phase));
}
void place_op_begin(place_t *place, const char *name) {
  if (place->failed || !place->managed) return;
  place->op_open = place_check(place, gemini_op_begin(place->manager, name, place->stream));
}
void place_op_end(place_t *place) {
  if (place->failed || !place->managed) return;
  place->op_open = false;
  place_check(place, gemini_op_end(place->manager));
}

/* ---- Acquire and release ---- */

void place_acquire(place_t *place, uint32_t kind, int first, int count, void **ptrs_out) {
  for (int i = 0; i < count; i++) ptrs_out[i] = NULL;
  if (place->failed) return;
  if (!place->managed) {
    for (int i = 0; i < count; i++) ptrs_out[i] = plain_at(place, kind, place->tensors[first + i].first);
    return;
  }
  if (place->held_count > 0 || count > PLACE_HELD_MAX) {
    fail(place, "too many tensors acquired at once");
    return;
  }
  for (int i = 0; i < count; i++) {
    place->held[i] = (gemini_access_t){ .object = place->tensors[first + i].handles[kind],
                                        .mode = kind == GEMINI_KIND_GRAD ? GEMINI_WRITE : GEMINI_READ,
                                        .tier = GEMINI_TIER_DEVICE };
  }
  if (!place_check(place, gemini_acquire(place->manager, place->held, (uint64_t)count, place->stream))) return;
  place->held_count = (uint64_t)count;
  for (int i = 0; i < count; i++) ptrs_out[i] = place->held[i].ptr;
}

void place_release(place_t *place) {
  if (place->failed || !place->managed) return;
  uint64_t count = place->held_count;
  place->held_count = 0;
  place_check(place, gemini_release(place->manager, place->held, count, place->stream));
}

/* ---- Allocation ---- */

void *place_alloc(place_t *place, uint64_t bytes) {
  void *ptr = NULL;
  if (place->failed) return NULL;
  if (place->managed) {
    place_check(place, gemini_alloc(place->manager, bytes, place->stream, &ptr));
    return ptr;
  }
  if (place->block_count == place->block_capacity) {
    uint64_t capacity = 2 * place->block_capacity + 64;
    place_block_t *blocks = realloc(place->blocks, capacity * sizeof *blocks);
    if (blocks == NULL) {
      fail(place, "out of memory for the list of allocations");
      return NULL;
    }
    place->blocks = blocks;
    place->block_capacity = capacity;
  }
  if (place->gpu != NULL) {
    if (!gpu_check(place, gpu_alloc_async(place->gpu->gpu, bytes, place->gpu_stream, &ptr))) return NULL;
  } else if ((ptr = malloc(bytes)) == NULL) {
    fail(place, "out of memory for activations");
    return NULL;
  }
  place->blocks[place->block_count++] = (place_block_t){ ptr, bytes };
  place->nonmodel_bytes += bytes;
  if (place->nonmodel_bytes > place->nonmodel_peak_bytes) place->nonmodel_peak_bytes = place->nonmodel_bytes;
  return ptr;
}

void place_free(place_t *place, void *ptr) {
  if (place->failed || ptr == NULL) return;
  if (place->managed) {
    place_check(place, gemini_free(place->manager, ptr, place->stream));
    return;
  }
  uint64_t i = 0;
  while (i < place->block_count && place->blocks[i].ptr != ptr) i++;
  if (i == place->block_count) {
    fail(place, "memory is freed that was not allocated");
    return;
  }
  place->nonmodel_bytes -= place->blocks[i].bytes;
  place->blocks[i] = place->blocks[--place->block_count];
  if (place->gpu != NULL) {
    gpu_check(place, gpu_free_async(place->gpu->gpu, ptr, place->gpu_stream));
  } else {
    free(ptr);
  }
}

void *place_host_alloc(place_t *place, uint64_t bytes) {
  void *ptr = NULL;
  if (place->failed) return NULL;
  if (place->host_block_count == (int)(sizeof place->host_blocks / sizeof *place->host_blocks)) {
    fail(place, "too many blocks of host memory");
  } else if (place->managed) {
    place_check(place, gemini_host_alloc(place->manager, bytes, 0, &ptr));
  } else if (place->gpu != NULL) {
    gpu_check(place, gpu_host_alloc(place->gpu->gpu, bytes, &ptr));
  } else if ((ptr = malloc(bytes)) == NULL) {
    fail(place, "out of memory for host blocks");
  }
  if (ptr != NULL) place->host_blocks[place->host_block_count++] = ptr;
  return ptr;
}

/* ---- Tasks ---- */

static void call_task(void *user) {
  task_run(user);
  free(user);
}

/* On any stream of the place's device; native as the GPU names it. */
static bool queue_on(place_t *place, gemini_stream_t stream, void *native, const task_t *task) {
  if (place->gpu != NULL) return task_gpu_queue(place->gpu, task, native);
  if (!place->managed) {
    task_run(task);
    return true;
  }
  task_t *copy = malloc(sizeof *copy);
  if (copy == NULL) return false;
  *copy = *task;
  if (gemini_stream_call(place->manager, stream, call_task, copy) == GEMINI_OK) return true;
  free(copy);
  return false;
}

void place_queue(place_t *place, const task_t *task) {
  if (place->failed) return;
  if (!queue_on(place, place->stream, place->gpu_stream, task)) fail(place, "a task could not be queued");
}

/* Which arenas a walk needs, and where their addresses go in its task: out[...], or in[0] for -1; -2: nowhere. */
enum { WALK_ARENAS = 5 };
typedef struct walk_plan {
  uint32_t count;
  uint32_t kinds[WALK_ARENAS], modes[WALK_ARENAS];
  int slots[WALK_ARENAS];
} walk_plan_t;
static const walk_plan_t *plan_of(int kind) {
  static const walk_plan_t adamw = {
    5,
    { GEMINI_KIND_GRAD, GEMINI_KIND_PARAM, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM, GEMINI_KIND_VARIANCE },
    { GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE },
    { -2, 0, 1, 2, 3 } /* gradient and parameter have one address */
  };
  static const walk_plan_t fill = {
    2, { GEMINI_KIND_PARAM, GEMINI_KIND_MASTER }, { GEMINI_WRITE, GEMINI_WRITE }, { 0, 1 }
  };
  static const walk_plan_t hash = { 1, { GEMINI_KIND_MASTER }, { GEMINI_READ }, { -1 } };
  return kind == TASK_ADAMW ? &adamw : kind == TASK_FILL ? &fill : &hash;
}

static task_t walk_task(const place_walk_t *walk, uint64_t first, uint64_t count, void *const *ptrs) {
  const walk_plan_t *plan = plan_of(walk->task.kind);
  task_t task = walk->task;
  task.first = first;
  task.count = count;
  for (uint32_t i = 0; i < plan->count; i++) {
    if (plan->slots[i] >= 0) task.out[plan->slots[i]] = ptrs[i];
    if (plan->slots[i] == -1) task.in[0] = ptrs[i];
  }
  if (task.kind == TASK_HASH) task.out[0] = walk->device_hash;
  return task;
}

/* Called by libgemini for each span: on a worker when its chunks are on the host, else to queue work. */
static void walk_span(void *user, const gemini_update_span_t *span) {
  place_walk_t *walk = user;
  place_t *place = walk->place;
  task_t task = walk_task(walk, span->first_element, span->element_count, span->ptr);
  if (span->tier == GEMINI_TIER_HOST) {
    if (task.kind == TASK_HASH) task.out[0] = &walk->host_hash;
    task_run(&task);
    atomic_fetch_add(&walk->host_elements, span->element_count);
    return;
  }
  void *native = NULL;
  if ((place->gpu != NULL && gemini_stream_native(place->manager, span->stream, &native) != GEMINI_OK) ||
      !queue_on(place, span->stream, native, &task)) {
    atomic_store(&walk->failed, true);
  }
}

void place_walk(place_t *place, place_walk_t *walk, uint64_t first, uint64_t count) {
  if (place->failed || count == 0) return;
  walk->place = place;
  const walk_plan_t *plan = plan_of(walk->task.kind);
  if (!place->managed) {
    void *ptrs[WALK_ARENAS];
    for (uint32_t i = 0; i < plan->count; i++) ptrs[i] = plain_at(place, plan->kinds[i], first);
    task_t task = walk_task(walk, first, count, ptrs);
    place_queue(place, &task);
    return;
  }
  gemini_arena_t arenas[WALK_ARENAS];
  for (uint32_t i = 0; i < plan->count; i++) arenas[i] = place->arenas[plan->kinds[i]];
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.flags = GEMINI_UPDATE_LATE;
  update.arenas = arenas;
  update.modes = plan->modes;
  update.arena_count = plan->count;
  update.first_element = first;
  update.element_count = count;
  update.stream = place->stream;
  update.fn = walk_span;
  update.user = walk;
  place_check(place, gemini_update(place->manager, &update));
  if (atomic_load(&walk->failed)) fail(place, "an update could not be queued on the device");
}

void place_synchronize(place_t *place) {
  if (place->failed) return;
  if (place->managed) {
    place_check(place, gemini_stream_synchronize(place->manager, place->stream));
  } else if (place->gpu != NULL) {
    gpu_check(place, gpu_stream_synchronize(place->gpu->gpu, place->gpu_stream));
  }
}

void place_wait(place_t *place) {
  if (!place->failed && place->managed) place_check(place, gemini_update_wait(place->manager));
  place_synchronize(place);
}

uint64_t place_hash(place_t *place) {
  place_wait(place);
  uint64_t bytes = sizeof place->hash;
  place_walk_t walk = { .task = { .kind = TASK_HASH }, .device_hash = place_alloc(place, bytes) };
  place->hash = 0;
  task_t to = { .kind = TASK_COPY, .in = { &place->hash }, .out = { walk.device_hash }, .count = bytes };
  task_t back = { .kind = TASK_COPY, .in = { walk.device_hash }, .out = { &place->hash }, .count = bytes };
  place_queue(place, &to);
  place_walk(place, &walk, 0, place->elements);
  /* Also when it failed in part: what is under way uses what lies here. */
  if (place->manager != 0) place_check(place, gemini_update_wait(place->manager));
  place_queue(place, &back);
  place_synchronize(place);
  place_free(place, walk.device_hash);
  return place->failed ? 0 : place->hash + atomic_load(&walk.host_hash);
}
