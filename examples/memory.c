/* A training program's calls of libgemini, in the order in which it makes them; memory.h has an overview.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each function makes one or a few calls of the library. Calls of plain_*() (plain.c) are for runs without libgemini.
 * Your own program needs neither these nor the sums of bytes, which only the report uses. */
#define _GNU_SOURCE
#include "memory.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plain.h"

enum { ALIGN_ELEMENTS = 256 }; /* tensors begin at multiples of it: the library's default for arenas of one layout */

const uint32_t memory_element_bytes[MEMORY_KINDS] = { 2, 2, 4, 4, 4 };

uint64_t memory_model_bytes(uint64_t elements) {
  return elements * (memory_element_bytes[GEMINI_KIND_PARAM] + memory_element_bytes[GEMINI_KIND_MASTER] +
                     memory_element_bytes[GEMINI_KIND_MOMENTUM] + memory_element_bytes[GEMINI_KIND_VARIANCE]);
}

/* ---- Failures ---- */

const char *memory_error(const memory_t *memory) { return memory->failed ? memory->error : NULL; }

bool memory_fail(memory_t *memory, const char *message) {
  if (!memory->failed) snprintf(memory->error, sizeof memory->error, "%s", message);
  memory->failed = true;
  return false;
}

/* The library keeps a message for the last failed call of each thread. */
bool memory_check(memory_t *memory, gemini_status_t status) {
  if (status == GEMINI_OK) return true;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  char message[sizeof memory->error];
  if (gemini_last_error(&info) == GEMINI_OK && info.status == status) {
    snprintf(message, sizeof message, "%s: %s", info.operation, info.message);
  } else {
    snprintf(message, sizeof message, "libgemini: %s", gemini_status_string(status));
  }
  return memory_fail(memory, message);
}

/* Notes a failure of the device, which has printed its cause. */
static void check_device(memory_t *memory) {
  if (memory->device->failed()) memory_fail(memory, "the GPU failed, as said above");
}

/* ---- Open: a manager, a stream, the arenas ---- */

/* Joins the group. Each rank says which one it is; rank 0 has made the group's id. */
static bool join(memory_t *memory, const memory_ranks_t *ranks) {
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  group.rank = ranks->rank;
  group.ranks = ranks->ranks;
  group.id = &ranks->id;
  group.deadline_ns = UINT64_C(30000000000); /* an operator of a large model takes seconds on a CPU */
  return memory_check(memory, gemini_group_open(memory->manager, &group, &memory->group));
}

static void open_with(memory_t *memory, const device_t *device, const gemini_config_t *config, bool own_gradients,
                      const memory_ranks_t *ranks) {
  memset(memory, 0, sizeof *memory);
  memory->device = device;
  memory->managed = config != NULL;
  memory->own_gradients = own_gradients;
  if (memory->managed) {
    /* The manager is opened with budgets: how much of the device, the host and the files it may use. */
    if (!memory_check(memory, gemini_manager_open(config, &memory->manager))) return;

    /* The stream of the operators. A program with its own stream passes it to gemini_stream_adopt() instead. */
    if (!memory_check(memory, gemini_stream_create(memory->manager, &memory->stream))) return;
    if (device->is_gpu &&
        !memory_check(memory, gemini_stream_native(memory->manager, memory->stream, &memory->native_stream))) {
      return;
    }

    /* Arenas of one layout: with `like`, a tensor has the same element offset in all five, so an update can walk them
     * in parallel. With `reuse`, gradients take the bytes of their parameters. In a group the parameters name it, which
     * divides all five among the ranks; gradients are then added, and say what type their values have. */
    if (ranks != NULL && !join(memory, ranks)) return;
    static const char *const names[MEMORY_KINDS] = { "param", "grad", "master", "momentum", "variance" };
    for (uint32_t kind = 0; kind < MEMORY_KINDS; kind++) {
      gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
      arena.kind = kind;
      arena.element_bytes = memory_element_bytes[kind];
      arena.name = names[kind];
      if (kind == GEMINI_KIND_GRAD) {
        arena.reuse = memory->arenas[GEMINI_KIND_PARAM];
        if (ranks != NULL) arena.dtype = GEMINI_DTYPE_BF16;
      } else if (kind != GEMINI_KIND_PARAM) {
        arena.like = memory->arenas[GEMINI_KIND_PARAM];
      } else if (ranks != NULL) {
        arena.group = memory->group;
        arena.zero_stage = ranks->zero_stage;
      }
      if (!memory_check(memory, gemini_arena_create(memory->manager, &arena, &memory->arenas[kind]))) return;
    }
  }
  if (!memory->managed) memory->native_stream = device->stream();
  device->stream_prepare(memory->native_stream);
  check_device(memory);
}

void memory_open(memory_t *memory, const device_t *device, const gemini_config_t *config, bool own_gradients) {
  open_with(memory, device, config, own_gradients, NULL);
}

void memory_open_ranks(memory_t *memory, const device_t *device, const gemini_config_t *config,
                       const memory_ranks_t *ranks) {
  open_with(memory, device, config, false, ranks);
}

/* ---- Tensors ---- */

int memory_register(memory_t *memory, const char *name, uint64_t elements) {
  if (memory->failed) return 0;
  if (memory->tensor_count == memory->tensor_capacity) {
    int capacity = 2 * memory->tensor_capacity + 32;
    memory_tensor_t *tensors = realloc(memory->tensors, (size_t)capacity * sizeof *tensors);
    if (tensors == NULL) return memory_fail(memory, "out of memory for the list of tensors");
    memory->tensors = tensors;
    memory->tensor_capacity = capacity;
  }
  memory_tensor_t *tensor = &memory->tensors[memory->tensor_count];
  *tensor = (memory_tensor_t){ .elements = elements };
  tensor->first_element = (memory->elements + ALIGN_ELEMENTS - 1) / ALIGN_ELEMENTS * ALIGN_ELEMENTS;
  memory->elements = tensor->first_element + elements;
  memory->tensor_elements += elements;
  if (memory->managed) {
    /* A tensor is registered in one arena and exists in all arenas of the layout; in the others it is a counterpart. */
    gemini_tensor_t *handles = tensor->handles;
    uint64_t bytes = elements * memory_element_bytes[GEMINI_KIND_PARAM];
    if (!memory_check(memory, gemini_tensor_register(memory->manager, memory->arenas[GEMINI_KIND_PARAM], name, bytes,
                                                     GEMINI_OFFSET_NEXT, &handles[GEMINI_KIND_PARAM]))) {
      return 0;
    }
    for (uint32_t kind = GEMINI_KIND_GRAD; kind < MEMORY_KINDS; kind++) {
      if (!memory_check(memory, gemini_tensor_counterpart(memory->manager, handles[GEMINI_KIND_PARAM],
                                                          memory->arenas[kind], &handles[kind]))) {
        return 0;
      }
    }
  }
  return memory->tensor_count++;
}

void memory_ready(memory_t *memory) {
  if (memory->failed || memory->managed) return; /* libgemini provides memory at the first acquire */
  plain_ready(memory);
  check_device(memory);
}

/* ---- Iterations, phases, operators: libgemini records them in the first iterations, and makes its plans of that
 * ---- */

void memory_iteration_begin(memory_t *memory) {
  if (memory->failed) return;
  for (int i = 0; i < memory->tensor_count; i++) memory->tensors[i].gradient_written = false;
  if (memory->managed) memory_check(memory, gemini_iteration_begin(memory->manager));
}

void memory_iteration_end(memory_t *memory) {
  if (!memory->failed && memory->managed) memory_check(memory, gemini_iteration_end(memory->manager));
}

void memory_phase(memory_t *memory, uint32_t phase) {
  if (!memory->failed && memory->managed) memory_check(memory, gemini_phase_set(memory->manager, phase));
}

void memory_op_begin(memory_t *memory, const char *name) {
  if (memory->failed) return;
  snprintf(memory->op, sizeof memory->op, "%s", name);
  if (memory->managed) memory->op_open = memory_check(memory, gemini_op_begin(memory->manager, name, memory->stream));
}

void memory_op_end(memory_t *memory) {
  if (memory->failed || !memory->managed) return;
  memory->op_open = false;
  memory_check(memory, gemini_op_end(memory->manager));
}

static void note_working_set(memory_t *memory) {
  if (memory->nonmodel_bytes > memory->nonmodel_peak_bytes) memory->nonmodel_peak_bytes = memory->nonmodel_bytes;
  if (memory->acquired_bytes + memory->nonmodel_bytes <= memory->working_peak_bytes) return;
  memory->working_peak_bytes = memory->acquired_bytes + memory->nonmodel_bytes;
  memcpy(memory->working_peak_op, memory->op, sizeof memory->op);
}

/* ---- Acquire and release: between the two, a tensor has an address ---- */

/* An acquire on the device does not block: the stream waits for the copies. A release does not block either: the chunks
 * are free once the stream has passed it. An acquire on the host blocks, and returns memory that the calling thread may
 * use itself. */
static gemini_stream_t stream_of(const memory_t *memory, uint32_t tier) {
  return tier == GEMINI_TIER_DEVICE ? memory->stream : GEMINI_STREAM_CALLER;
}

static void acquire(memory_t *memory, uint32_t tier, uint32_t kind, uint32_t mode, int first, int count,
                    void **ptrs_out) {
  for (int i = 0; i < count; i++) ptrs_out[i] = NULL;
  if (memory->failed) return;
  if (count > MEMORY_BATCH_MAX || memory->held_count + (uint64_t)count > sizeof memory->held / sizeof memory->held[0]) {
    memory_fail(memory, "too many tensors acquired at once");
    return;
  }
  if (memory->managed) {
    /* One call for all tensors: it makes all of them available, or fails and changes nothing. */
    gemini_access_t *accesses = memory->held + memory->held_count;
    for (int i = 0; i < count; i++) {
      accesses[i] = gemini_tensor_access(memory->tensors[first + i].handles[kind], 0, 0, mode, tier);
    }
    if (!memory_check(memory, gemini_acquire(memory->manager, accesses, (uint64_t)count, stream_of(memory, tier)))) {
      return;
    }
    memory->held_count += (uint64_t)count;
    for (int i = 0; i < count; i++) ptrs_out[i] = accesses[i].ptr;
  } else {
    for (int i = 0; i < count; i++) {
      ptrs_out[i] = plain_acquire(memory, tier == GEMINI_TIER_HOST, kind, mode, first + i);
    }
    check_device(memory);
  }
  for (int i = 0; i < count && tier == GEMINI_TIER_DEVICE; i++) {
    memory->acquired_bytes += memory->tensors[first + i].elements * memory_element_bytes[kind];
  }
  note_working_set(memory);
}

static void release(memory_t *memory, uint32_t tier, uint32_t kind, int first, int count) {
  if (memory->failed) return;
  if (count > MEMORY_BATCH_MAX) {
    memory_fail(memory, "too many tensors released at once");
    return;
  }
  gemini_access_t accesses[MEMORY_BATCH_MAX];
  for (int i = 0; i < count; i++) {
    const memory_tensor_t *tensor = &memory->tensors[first + i];
    if (tier == GEMINI_TIER_DEVICE) memory->acquired_bytes -= tensor->elements * memory_element_bytes[kind];
    if (!memory->managed) {
      plain_release(memory, kind, first + i);
      continue;
    }
    uint64_t at = 0;
    while (at < memory->held_count &&
           (memory->held[at].object.tensor != tensor->handles[kind] || memory->held[at].tier != tier)) {
      at++;
    }
    if (at == memory->held_count) {
      memory_fail(memory, "a tensor is released that was not acquired");
      return;
    }
    accesses[i] = memory->held[at];
    memory->held[at] = memory->held[--memory->held_count];
  }
  if (memory->managed) {
    memory_check(memory, gemini_release(memory->manager, accesses, (uint64_t)count, stream_of(memory, tier)));
  } else {
    check_device(memory);
  }
}

void memory_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int first, int count, void **ptrs_out) {
  acquire(memory, GEMINI_TIER_DEVICE, kind, mode, first, count, ptrs_out);
}

void memory_release(memory_t *memory, uint32_t kind, int first, int count) {
  release(memory, GEMINI_TIER_DEVICE, kind, first, count);
}

void *memory_host_acquire(memory_t *memory, uint32_t kind, uint32_t mode, int tensor) {
  void *ptr = NULL;
  acquire(memory, GEMINI_TIER_HOST, kind, mode, tensor, 1, &ptr);
  return ptr;
}

void memory_host_release(memory_t *memory, uint32_t kind, int tensor) {
  release(memory, GEMINI_TIER_HOST, kind, tensor, 1);
}

bool memory_part_next(memory_t *memory, int tensor, uint64_t from, uint64_t *first_out, uint64_t *count_out) {
  const memory_tensor_t *t = &memory->tensors[tensor];
  uint64_t offset = 0, size = 0, element = memory_element_bytes[GEMINI_KIND_PARAM];
  if (memory->failed || from >= t->elements) return false;
  if (memory->managed) {
    gemini_access_t all = gemini_tensor_access(t->handles[GEMINI_KIND_PARAM], 0, 0, 0, 0);
    memory_check(memory, gemini_slice_next(memory->manager, &all, from * element, &offset, &size));
  } else {
    offset = from * element;
    size = (t->elements - from) * element;
  }
  *first_out = offset / element;
  *count_out = size / element;
  return !memory->failed && size > 0;
}

void *memory_host_acquire_part(memory_t *memory, uint32_t kind, uint32_t mode, int tensor, uint64_t first,
                               uint64_t count) {
  uint64_t element = memory_element_bytes[kind];
  if (!memory->managed) {
    char *whole = memory_host_acquire(memory, kind, mode, tensor);
    return whole == NULL ? NULL : whole + first * element;
  }
  if (memory->failed) return NULL;
  if (memory->held_count == sizeof memory->held / sizeof memory->held[0]) {
    memory_fail(memory, "too many tensors acquired at once");
    return NULL;
  }
  gemini_access_t *access = &memory->held[memory->held_count];
  *access = gemini_tensor_access(memory->tensors[tensor].handles[kind], first * element, count * element, mode,
                                 GEMINI_TIER_HOST);
  if (!memory_check(memory, gemini_acquire(memory->manager, access, 1, GEMINI_STREAM_CALLER))) return NULL;
  memory->held_count++;
  return access->ptr;
}

/* ---- Ranks ---- */

void memory_exchange(memory_t *memory, const void *mine, uint64_t bytes, void *all_out) {
  if (memory->failed) return;
  if (memory->group == NULL) {
    memmove(all_out, mine, bytes);
  } else {
    memory_check(memory, gemini_group_exchange(memory->manager, memory->group, mine, bytes, all_out));
  }
}

void memory_gradients_ready(memory_t *memory, int first, int count) {
  if (memory->group == NULL) return;
  for (int i = first; i < first + count && !memory->failed; i++) {
    gemini_tensor_t gradient = memory->tensors[i].handles[GEMINI_KIND_GRAD];
    gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
    if (!memory_check(memory, gemini_tensor_info(memory->manager, gradient, &info))) return;
    if (info.state == GEMINI_STATE_FREE &&
        !memory_check(memory, gemini_tensor_state_set(memory->manager, gradient, GEMINI_STATE_HOLD))) {
      return;
    }
    memory_check(memory, gemini_tensor_state_set(memory->manager, gradient, GEMINI_STATE_READY_FOR_REDUCE));
  }
}

void memory_store(memory_t *memory, uint32_t kind, int fd) {
  for (int i = 0; i < memory->tensor_count && memory->group != NULL && !memory->failed; i++) {
    gemini_access_t all = gemini_tensor_access(memory->tensors[i].handles[kind], 0, 0, GEMINI_READ, GEMINI_TIER_HOST);
    uint64_t at_bytes = memory->tensors[i].first_element * memory_element_bytes[kind];
    memory_check(memory, gemini_store(memory->manager, &all, fd, at_bytes));
  }
}

void memory_gradients_add(memory_t *memory, int index, int count) {
  if (!memory->failed && !memory->managed) plain_gradients_add(memory, index, count);
}

/* ---- Activations and workspace, from the same device budget ---- */

void *memory_alloc(memory_t *memory, uint64_t bytes) {
  if (memory->failed) return NULL;
  if (memory->block_count == memory->block_capacity) {
    uint64_t capacity = 2 * memory->block_capacity + 64;
    memory_block_t *blocks = realloc(memory->blocks, capacity * sizeof *blocks);
    if (blocks == NULL) {
      memory_fail(memory, "out of memory for the list of allocations");
      return NULL;
    }
    memory->blocks = blocks;
    memory->block_capacity = capacity;
  }
  void *ptr = NULL;
  if (memory->managed) {
    if (!memory_check(memory, gemini_alloc(memory->manager, bytes, memory->stream, &ptr))) return NULL;
  } else {
    ptr = memory->device->alloc(bytes);
    if (ptr == NULL) {
      memory_fail(memory, "out of memory for activations");
      return NULL;
    }
  }
  memory->blocks[memory->block_count++] = (memory_block_t){ ptr, bytes };
  memory->nonmodel_bytes += bytes;
  note_working_set(memory);
  return ptr;
}

void memory_free(memory_t *memory, void *ptr) {
  if (memory->failed || ptr == NULL) return;
  uint64_t at = memory->block_count;
  while (at > 0 && memory->blocks[at - 1].ptr != ptr) at--; /* newest first: most are freed in reverse order */
  if (at == 0) {
    memory_fail(memory, "memory is freed that was not allocated");
    return;
  }
  memory->nonmodel_bytes -= memory->blocks[at - 1].bytes;
  memory->blocks[at - 1] = memory->blocks[--memory->block_count];
  if (memory->managed) {
    memory_check(memory, gemini_free(memory->manager, ptr, memory->stream));
  } else {
    memory->device->free(ptr);
  }
}

/* A block that a GPU's copy may take as a whole (gemini_host_alloc()); larger ones would be copied in pieces. */
static uint64_t alignment_for(uint64_t bytes) {
  uint64_t alignment = 64;
  while (alignment < bytes && alignment < UINT64_C(1) << 20) alignment *= 2;
  return alignment;
}

void *memory_host_alloc(memory_t *memory, uint64_t bytes) {
  void *ptr = NULL;
  if (memory->failed) return NULL;
  if (memory->host_block_count == (int)(sizeof memory->host_blocks / sizeof *memory->host_blocks)) {
    memory_fail(memory, "too many blocks of host memory");
  } else if (memory->managed) {
    memory_check(memory, gemini_host_alloc(memory->manager, bytes, alignment_for(bytes), &ptr));
  } else if ((ptr = memory->device->host_alloc(bytes)) == NULL) {
    memory_fail(memory, "out of memory for host blocks");
  }
  if (ptr != NULL) memory->host_blocks[memory->host_block_count++] = ptr;
  return ptr;
}

/* ---- Work ----
 * On a GPU, an operator queues kernels on the stream it is given. Without a GPU, a stream of the simulated device holds
 * function calls, which the library runs in order. */

typedef struct job {
  device_work_fn fn;
  max_align_t args[]; /* a copy: the caller's struct no longer exists when the stream runs the job */
} job_t;

static void job_run(void *user) {
  job_t *job = user;
  job->fn(NULL, job->args);
  free(job);
}

static gemini_status_t queue_on(memory_t *memory, gemini_stream_t stream, device_work_fn fn, const void *args,
                                uint64_t args_bytes) {
  void *native = memory->native_stream;
  if (memory->managed && memory->device->is_gpu && stream != memory->stream) {
    gemini_status_t status = gemini_stream_native(memory->manager, stream, &native);
    if (status != GEMINI_OK) return status;
  }
  if (!memory->managed || memory->device->is_gpu) return fn(native, args) ? GEMINI_OK : GEMINI_ERR_DEVICE;
  job_t *job = malloc(sizeof *job + args_bytes);
  if (job == NULL) return GEMINI_ERR_OOM_HOST;
  job->fn = fn;
  memcpy(job->args, args, args_bytes);
  gemini_status_t status = gemini_stream_call(memory->manager, stream, job_run, job);
  if (status != GEMINI_OK) free(job);
  return status;
}

bool memory_queue_on(memory_t *memory, gemini_stream_t stream, device_work_fn fn, const void *args,
                     uint64_t args_bytes) {
  return queue_on(memory, stream, fn, args, args_bytes) == GEMINI_OK;
}

void memory_queue(memory_t *memory, device_work_fn fn, const void *args, uint64_t args_bytes) {
  if (memory->failed) return;
  gemini_status_t status = queue_on(memory, memory->stream, fn, args, args_bytes);
  if (status != GEMINI_OK) check_device(memory);
  memory_check(memory, status);
}

void memory_synchronize(memory_t *memory) {
  if (memory->failed) return;
  if (memory->managed) {
    memory_check(memory, gemini_stream_synchronize(memory->manager, memory->stream));
  } else {
    memory->device->synchronize();
  }
  check_device(memory);
}

/* ---- Norm and update ---- */

double memory_gradient_norm(memory_t *memory,
                            double (*squares)(const uint16_t *from, uint64_t count, uint64_t block_elements)) {
  double norm = 0;
  if (memory->failed) return 0;
  if (!memory->managed) {
    norm = plain_gradient_norm(memory, squares);
    check_device(memory);
    return norm;
  }
  gemini_access_t all = gemini_arena_access(memory->arenas[GEMINI_KIND_GRAD], 0, 0, 0, 0);
  memory_check(memory, gemini_norm(memory->manager, &all, GEMINI_DTYPE_BF16, memory->stream, &norm));
  return norm;
}

const memory_arrays_t memory_optimizer = {
  5,
  { GEMINI_KIND_GRAD, GEMINI_KIND_PARAM, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM, GEMINI_KIND_VARIANCE },
  { GEMINI_READ, GEMINI_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE, GEMINI_READ_WRITE },
};

void memory_update(memory_t *memory, const memory_arrays_t *arrays, uint64_t first, uint64_t count, gemini_update_fn fn,
                   void *user) {
  if (memory->failed) return;
  if (!memory->managed) {
    plain_update(memory, arrays, first, count, fn, user);
    return;
  }
  gemini_arena_t arenas[MEMORY_KINDS];
  for (uint32_t i = 0; i < arrays->count; i++) arenas[i] = memory->arenas[arrays->kinds[i]];
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.flags = GEMINI_UPDATE_LATE;
  update.arenas = arenas;
  update.modes = arrays->modes;
  update.arena_count = arrays->count;
  update.first_element = first;
  update.element_count = count;
  update.stream = memory->stream;
  update.fn = fn;
  update.user = user;
  memory_check(memory, gemini_update(memory->manager, &update));
}

/* Waits even after a failure, because pieces that are still running use fn and user. */
void memory_update_wait(memory_t *memory) {
  if (memory->manager != 0) memory_check(memory, gemini_update_wait(memory->manager));
  check_device(memory);
}

/* ---- Statistics and logs ---- */

void memory_print_log(void *user, int32_t level, const char *message) {
  static const char *const levels[] = { "", "error", "warning", "info", "debug" };
  (void)user;
  fprintf(stderr, "libgemini %s: %s\n", level >= 1 && level <= 4 ? levels[level] : "", message);
}

uint64_t memory_moved_bytes(memory_t *memory, uint32_t from_tier, uint32_t to_tier, uint32_t reason) {
  uint64_t bytes = 0;
  uint32_t count = 0;
  memory_check(memory, gemini_link_count(memory->manager, &count));
  for (uint32_t link = 0; link < count; link++) { /* there may be several between two tiers */
    gemini_link_stats_t stats = GEMINI_LINK_STATS_INIT;
    if (!memory_check(memory, gemini_link_stats(memory->manager, link, reason, &stats))) return 0;
    if (stats.from_tier == from_tier && stats.to_tier == to_tier) bytes += stats.moved_bytes;
  }
  return bytes;
}

gemini_tier_stats_t memory_tier(memory_t *memory, uint32_t tier) {
  gemini_tier_stats_t stats = GEMINI_TIER_STATS_INIT;
  memory_check(memory, gemini_tier_stats(memory->manager, tier, &stats));
  return stats;
}

uint64_t memory_tier_bytes(memory_t *memory, int kind, uint32_t tier) {
  gemini_access_t all = gemini_arena_access(memory->arenas[kind], 0, 0, 0, tier);
  uint64_t bytes = 0;
  memory_check(memory, gemini_tier_bytes(memory->manager, &all, &bytes));
  return bytes;
}

bool memory_print_plan(memory_t *memory) {
  uint64_t length = 0;
  if (!memory_check(memory, gemini_plan_explain(memory->manager, 0, NULL, &length))) return false;
  char *text = malloc(length + 1);
  if (text == NULL) return memory_fail(memory, "out of memory for the plan's text");
  bool explained = memory_check(memory, gemini_plan_explain(memory->manager, length + 1, text, NULL));
  if (explained) printf("\n%s\n", text);
  free(text);
  return explained;
}

/* ---- Close ---- */

void memory_close(memory_t *memory) {
  if (memory->manager != 0) {
    if (memory->held_count > 0) { /* only after a failure */
      memory_check(memory, gemini_release(memory->manager, memory->held, memory->held_count, memory->stream));
    }
    if (memory->op_open) memory_check(memory, gemini_op_end(memory->manager)); /* only after a failure */
    memory_check(memory, gemini_stream_destroy(memory->manager, memory->stream));
    /* Also destroys arenas, tensors, and a stream that has failed; a rank's close tells the others. */
    memory_check(memory, gemini_manager_close(memory->manager));
  }
  if (!memory->managed && memory->device != NULL) plain_close(memory);
  free(memory->blocks);
  free(memory->tensors);
  memory->manager = 0;
  memory->blocks = NULL;
  memory->tensors = NULL;
  memory->held_count = memory->block_count = 0;
  memory->host_block_count = memory->tensor_count = 0;
}
