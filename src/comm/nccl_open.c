/* Communicators over NCCL: making and ending them. SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/thread.h"
#include "comm/nccl.h"
#include "device/rank_sum.h"

#define DEADLINE_NS UINT64_C(60000000000)
#define GRANULE_BYTES (UINT64_C(2) << 20) /* of device memory */
#define SCRATCH_BYTES (UINT64_C(32) << 20)
#define SCRATCH_MOST (UINT64_C(1) << 40)

/* ---- the end */

/* Lets what is queued end, and then the communicator. */
static void finalize(nccl_t *n, nccl_comm_t comm) {
  nccl_result_t result = n->library->finalize(comm), asked;
  for (uint64_t begin = gmi_now_ns(); result == NCCL_IN_PROGRESS;) {
    if (gmi_now_ns() - begin >= n->deadline_ns) result = NCCL_REMOTE_ERROR;
    else {
      gmi_nccl_wait(begin);
      asked = n->library->async_error(comm, &result);
      if (asked != NCCL_SUCCESS) result = asked;
    }
  }
  if (result == NCCL_SUCCESS) n->library->destroy(comm);
  else n->library->abort(comm);
}

static void end(nccl_t *n) {
  pthread_mutex_lock(&n->lock);
  nccl_comm_t comm = n->comm;
  n->comm = NULL;
  pthread_mutex_unlock(&n->lock);
  if (!comm || n->adopted) return;
  entry_t had = gmi_nccl_enter(n);
  if (gmi_has_failed(&n->failure)) n->library->abort(comm);
  else finalize(n, comm);
  gmi_nccl_leave(n, had);
}
static void *ender_main(void *user) {
  nccl_t *n = user;
  end(n);
  atomic_store_explicit(&n->ender.ended, true, memory_order_release);
  return NULL;
}

void gmi_nccl_ender_start(nccl_t *n) {
  if (n->adopted) return;
  pthread_mutex_lock(&n->ender_lock);
  if (n->ender.state == ENDER_NONE && !gmi_thread_start(&n->ender.thread, ender_main, n)) n->ender.state = ENDER_RUNS;
  pthread_mutex_unlock(&n->ender_lock);
}

/* Ends NCCL's communicator, when no other thread calls it. False: that did not end in time. */
static bool ended(nccl_t *n) {
  if (n->ender.state == ENDER_NONE && n->comm) gmi_nccl_ender_start(n);
  if (n->ender.state == ENDER_NONE) {
    end(n);
    return true;
  }
  for (uint64_t begin = gmi_now_ns(); !atomic_load_explicit(&n->ender.ended, memory_order_acquire);) {
    if (gmi_now_ns() - begin >= 2 * n->deadline_ns) {
      pthread_detach(n->ender.thread);
      return false;
    }
    gmi_nccl_wait(begin);
  }
  pthread_join(n->ender.thread, NULL);
  return true;
}

/* Has the GPU done what uses the scratch memory and the buffers of exchanges? An event that was never recorded is
 * reached. */
static bool idle(const nccl_t *n) {
  const cu_event_t events[] = { n->scratch.free, n->exchange.done };
  uint64_t begin = gmi_now_ns();
  for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
    while (events[i] && n->driver->event_query(events[i]) == CU_NOT_READY) {
      if (gmi_now_ns() - begin >= n->deadline_ns) return false;
      gmi_nccl_wait(begin);
    }
  }
  return true;
}

/* Frees what was made of a communicator, which may be a part. */
static void free_all(nccl_t *n) {
  const gmi_cuda_driver_t *driver = n->driver;
  for (uint32_t i = 0; n->ring && i < GMI_NCCL_WATCHED; i++) {
    if (n->ring[i].begin) driver->event_destroy(n->ring[i].begin);
    if (n->ring[i].end) driver->event_destroy(n->ring[i].end);
  }
  if (n->exchange.done) driver->event_destroy(n->exchange.done);
  if (n->exchange.stream) driver->stream_destroy(n->exchange.stream);
  if (n->exchange.host) driver->host_free(n->exchange.host);
  if (n->scratch.free) driver->event_destroy(n->scratch.free);
  if (n->scratch.module) driver->module_unload(n->scratch.module);
  if (n->scratch.mapped_bytes) driver->memory_unmap(n->scratch.base, n->scratch.mapped_bytes);
  if (n->scratch.created_bytes) driver->memory_release(n->scratch.memory);
  if (n->scratch.reserved_bytes) driver->address_free(n->scratch.base, n->scratch.reserved_bytes);
}

/* The record, its memory and the context stay, as work may still use them. */
static void leave_it(nccl_t *n) {
  static _Atomic(nccl_t *) left; /* Atomic: a list that only grows, for tools that look for leaks */
  n->next_left = atomic_load_explicit(&left, memory_order_relaxed);
  while (!atomic_compare_exchange_weak(&left, &n->next_left, n)) {
  }
}

void gmi_nccl_close(void *self) {
  nccl_t *n = self;
  if (!n) return;
  bool over = ended(n);
  if (n->context) {
    entry_t had = gmi_nccl_enter(n);
    over = over && !n->in_use && idle(n);
    if (over) free_all(n);
    gmi_nccl_leave(n, had);
    if (over) n->driver->primary_release(n->device);
  }
  if (!over) {
    leave_it(n);
    return;
  }
  pthread_mutex_destroy(&n->turn);
  pthread_mutex_destroy(&n->lock);
  pthread_mutex_destroy(&n->ender_lock);
  gmi_first_failure_close(&n->failure);
  free(n->ring);
  free(n);
}

/* ---- making */
static gemini_status_t check_config(const gmi_comm_nccl_config_t *config) {
  if (!config->ranks || config->ranks > GMI_COMM_RANKS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranks is %u, must be 1 to %d", config->ranks, GMI_COMM_RANKS);
  if (config->rank >= config->ranks)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "rank is %u, must be below ranks, %u", config->rank, config->ranks);
  if (config->scratch_bytes > SCRATCH_MOST)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "scratch_bytes is %" PRIu64 ", must be at most 2^40", config->scratch_bytes);
  return GEMINI_OK;
}

static gemini_status_t open_device(nccl_t *n, int32_t ordinal) {
  const gmi_cuda_driver_t *driver = n->driver;
  const char *function = NULL;
  cu_result_t result = CU_SUCCESS;
  GMI_NCCL_DO(driver->init(0), "cuInit");
  GMI_NCCL_DO(driver->device_get(&n->device, ordinal), "cuDeviceGet");
  GMI_NCCL_DO(driver->primary_retain(&n->context, n->device), "cuDevicePrimaryCtxRetain");
  if (result == CU_SUCCESS) return GEMINI_OK;
  n->context = NULL;
  return gmi_fail(result == CU_INVALID_DEVICE ? GEMINI_ERR_INVALID : GEMINI_ERR_DEVICE, result, "device %d: %s: %s",
                  ordinal, function, gmi_cuda_error_name(driver, result));
}

/* In the context. */
static gemini_status_t open_memory(nccl_t *n, uint64_t scratch_bytes) {
  const gmi_cuda_driver_t *driver = n->driver;
  const cu_location_t here = { CU_LOCATION_DEVICE, n->device };
  const cu_allocation_t allocation = { .type = CU_ALLOCATION_PINNED, .location = here };
  const cu_access_t access = { here, CU_ACCESS_READ_WRITE };
  const uint64_t bytes = GMI_NCCL_EXCHANGE_BYTES + (scratch_bytes + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
  const char *function = NULL;
  cu_result_t result = CU_SUCCESS;
  void *host = NULL;
  GMI_NCCL_DO(driver->address_reserve(&n->scratch.base, bytes, GRANULE_BYTES, 0, 0), "cuMemAddressReserve");
  if (result == CU_SUCCESS) n->scratch.reserved_bytes = bytes;
  GMI_NCCL_DO(driver->memory_create(&n->scratch.memory, bytes, &allocation, 0), "cuMemCreate");
  if (result == CU_SUCCESS) n->scratch.created_bytes = bytes;
  GMI_NCCL_DO(driver->memory_map(n->scratch.base, bytes, 0, n->scratch.memory, 0), "cuMemMap");
  if (result == CU_SUCCESS) n->scratch.mapped_bytes = bytes;
  GMI_NCCL_DO(driver->memory_access(n->scratch.base, bytes, &access, 1), "cuMemSetAccess");
  GMI_NCCL_DO(driver->module_load(&n->scratch.module, gmi_rank_sum_ptx), "cuModuleLoadData");
  GMI_NCCL_DO(driver->module_function(&n->scratch.kernel, n->scratch.module, "gmi_rank_sum"), "cuModuleGetFunction");
  GMI_NCCL_DO(driver->event_create(&n->scratch.free, CU_EVENT_NO_TIME), "cuEventCreate");
  GMI_NCCL_DO(driver->host_alloc(&host, GMI_NCCL_EXCHANGE_BYTES, CU_HOST_PORTABLE), "cuMemHostAlloc");
  n->exchange.host = host;
  GMI_NCCL_DO(driver->stream_create(&n->exchange.stream, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate");
  GMI_NCCL_DO(driver->event_create(&n->exchange.done, CU_EVENT_NO_TIME), "cuEventCreate");
  if (result == CU_SUCCESS) return GEMINI_OK;
  gemini_status_t status = GEMINI_ERR_DEVICE;
  if (result == CU_OUT_OF_MEMORY)
    status = strcmp(function, "cuMemHostAlloc") ? GEMINI_ERR_OOM_DEVICE : GEMINI_ERR_OOM_HOST;
  return gmi_fail(status, result, "a communicator's %" PRIu64 " bytes of device memory: %s: %s", bytes, function,
                  gmi_cuda_error_name(driver, result));
}

/* Closes a communicator that could not be made; the failure stays the thread's last one. */
static gemini_status_t refused(nccl_t *n, gemini_status_t status) {
  gmi_failure_t kept;
  gmi_fail_keep(status, &kept);
  gmi_nccl_close(n);
  return gmi_fail_again(&kept);
}

/* A record without a communicator of NCCL. On failure there is none. */
static gemini_status_t make(const gmi_comm_nccl_config_t *config, bool adopted, nccl_t **nccl_out) {
  gemini_status_t status = check_config(config);
  if (status) return status;
  const gmi_nccl_library_t *library = gmi_nccl_library();
  const gmi_cuda_driver_t *driver = library ? gmi_cuda_driver() : NULL;
  if (!driver) return GEMINI_ERR_UNSUPPORTED;
  nccl_t *n = calloc(1, sizeof *n);
  watched_t *ring = calloc(GMI_NCCL_WATCHED, sizeof *ring);
  if (!n || !ring) {
    free(n);
    free(ring);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a communicator");
  }
  n->library = library;
  n->driver = driver;
  n->ring = ring;
  n->rank = config->rank;
  n->ranks = config->ranks;
  n->deadline_ns = config->deadline_ns ? config->deadline_ns : DEADLINE_NS;
  n->adopted = adopted;
  n->rank_order = config->rank_order;
  pthread_mutex_init(&n->turn, NULL);
  pthread_mutex_init(&n->lock, NULL);
  pthread_mutex_init(&n->ender_lock, NULL);
  gmi_first_failure_open(&n->failure, config->named_of ? config->named : n->rank,
                         config->named_of ? config->named_of : n->ranks, config->listener);
  status = open_device(n, config->device);
  if (!status) {
    uint64_t scratch = config->scratch_bytes ? config->scratch_bytes : n->rank_order ? SCRATCH_BYTES : GRANULE_BYTES;
    entry_t had = gmi_nccl_enter(n);
    status = open_memory(n, scratch);
    gmi_nccl_leave(n, had);
  }
  if (!status) *nccl_out = n;
  return status ? refused(n, status) : GEMINI_OK;
}

static gemini_status_t done(nccl_t *n, gemini_status_t status, gmi_comm_t *comm_out) {
  if (status) return refused(n, status);
  *comm_out = (gmi_comm_t){ &gmi_nccl_ops, n, n->rank, n->ranks };
  return GEMINI_OK;
}

gemini_status_t gmi_comm_nccl_id(gmi_comm_id_t *id_out) {
  const gmi_nccl_library_t *library = gmi_nccl_library();
  nccl_id_t id;
  _Static_assert(sizeof id == sizeof *id_out, "an id is NCCL's");
  if (!library) return GEMINI_ERR_UNSUPPORTED;
  nccl_result_t result = library->unique_id(&id);
  if (result != NCCL_SUCCESS)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "ncclGetUniqueId: %s", library->error_string(result));
  memcpy(id_out, &id, sizeof id);
  return GEMINI_OK;
}

gemini_status_t gmi_comm_nccl_join(const gmi_comm_id_t *from, const gmi_comm_nccl_config_t *config,
                                   gmi_comm_t *comm_out) {
  nccl_t *n;
  nccl_id_t id;
  nccl_config_t settings = NCCL_CONFIG_NON_BLOCKING;
  if (config->most_blocks) settings.max_ctas = (int)config->most_blocks;
  gemini_status_t status = make(config, false, &n);
  if (status) return status;
  memcpy(&id, from, sizeof id);
  entry_t had = gmi_nccl_enter(n);
  cu_context_t current = NULL; /* says to NCCL which GPU it is */
  if (n->driver->current_get(&current) != CU_SUCCESS || current != n->context) {
    status = gmi_fail(GEMINI_ERR_DEVICE, 0, "device %d: its context cannot be made current", n->device);
  } else {
    pthread_mutex_lock(&n->lock);
    nccl_result_t result = n->library->init_rank_config(&n->comm, (int)n->ranks, id, (int)n->rank, &settings);
    pthread_mutex_unlock(&n->lock);
    status = gmi_nccl_ready(n, result, "ncclCommInitRankConfig", "joining");
  }
  gmi_nccl_leave(n, had);
  return done(n, status, comm_out);
}

/* Is the caller's communicator what the configuration says? */
static gemini_status_t check_adopted(const nccl_t *n) {
  const struct {
    nccl_result_t (*ask)(nccl_comm_t comm, int *value_out);
    const char *function, *name;
    int expected;
  } asked[] = { { n->library->count, "ncclCommCount", "ranks", (int)n->ranks },
                { n->library->user_rank, "ncclCommUserRank", "rank", (int)n->rank },
                { n->library->cu_device, "ncclCommCuDevice", "device", n->device },
                { n->library->async_error, "ncclCommGetAsyncError", NULL, NCCL_SUCCESS } };
  for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
    int value = -1;
    nccl_result_t result = asked[i].ask(n->comm, &value);
    if (result == NCCL_SUCCESS && value == asked[i].expected) continue;
    if (result == NCCL_SUCCESS && asked[i].name)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is %d, %s says %d", asked[i].name, asked[i].expected,
                      asked[i].function, value);
    if (result == NCCL_SUCCESS) result = value;
    return gmi_fail(GEMINI_ERR_INVALID, result, "the communicator to adopt: %s: %s", asked[i].function,
                    n->library->error_string(result));
  }
  return GEMINI_OK;
}

gemini_status_t gmi_comm_nccl_adopt(void *nccl_comm, const gmi_comm_nccl_config_t *config, gmi_comm_t *comm_out) {
  nccl_t *n;
  if (!nccl_comm) return gmi_fail(GEMINI_ERR_INVALID, 0, "the communicator to adopt is NULL");
  gemini_status_t status = make(config, true, &n);
  if (status) return status;
  n->comm = nccl_comm;
  entry_t had = gmi_nccl_enter(n);
  status = check_adopted(n);
  gmi_nccl_leave(n, had);
  return done(n, status, comm_out);
}
