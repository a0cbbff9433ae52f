/* Opens and closes managers, and changes their budgets: gemini_manager_open(), gemini_manager_close(),
 * gemini_budget_set().
 * SPDX-License-Identifier: Apache-2.0
 *
 * Opening builds a manager from the bottom up (device, streams, host, files, tracer, workers, updates, watchdog) and
 * publishes its handle last. A failure on the way, like closing, ends in gmi_manager_free(), which takes a manager
 * apart in the order that its threads and its queued work require, and copes with parts that were never opened. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/manager.h"
#include "api/text.h"
#include "base/abi.h"
#include "base/log.h"
#include "base/nvtx.h"
#include "base/space.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/faults.h"
#include "chunk/files.h"
#include "chunk/graph.h"
#include "chunk/group.h"
#include "chunk/group_files.h"
#include "chunk/hook.h"
#include "chunk/host.h"
#include "chunk/host_ahead.h"
#include "chunk/nonmodel.h"
#include "chunk/residency.h"
#include "chunk/update.h"
#include "core/manager.h"
#include "core/streams.h"
#include "core/workers.h"
#include "tracer/timeline.h"
#include "tracer/tracer.h"

/* ---- open and close */
static gemini_status_t check_fraction(const char *name, double value) {
  if (value >= 0.0 && value <= 1.0) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is %g, must be 0 to 1", name, value);
}

/* Checks a configuration and replaces zeros by defaults. The values that depend on the device (chunk_bytes) are
 * checked by gmi_manager_make(). */
static gemini_status_t config_check(gemini_config_t *c, bool plans_only) {
  const uint32_t flags = GEMINI_CONFIG_STRICT | GEMINI_CONFIG_EXPLAIN_FAULTS;
  if (c->flags & ~flags) return gmi_fail(GEMINI_ERR_INVALID, 0, "flags has unknown bits %#x", c->flags & ~flags);
  if (c->flags & GEMINI_CONFIG_EXPLAIN_FAULTS && c->device != GEMINI_DEVICE_SIMULATED)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "flags has GEMINI_CONFIG_EXPLAIN_FAULTS, and device %u is not simulated",
                    c->device);
  if (c->placement > GEMINI_PLACEMENT_STATIC)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "placement is %u, must be 0 to %d", c->placement, GEMINI_PLACEMENT_STATIC);
  if (c->device > GEMINI_DEVICE_CUDA)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device is %u, must be 0 to %d", c->device, GEMINI_DEVICE_CUDA);
  if (c->device_ordinal && c->device == GEMINI_DEVICE_SIMULATED)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device_ordinal is %u, the simulated device has only 0", c->device_ordinal);
  if (c->warmup_iterations > 1000)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "warmup_iterations is %u, must be at most 1000", c->warmup_iterations);
  if (c->update_threads > 256)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "update_threads is %u, must be at most 256", c->update_threads);
  if (c->log_level > GEMINI_LOG_DEBUG)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "log_level is %u, must be at most %d", c->log_level, GEMINI_LOG_DEBUG);
  const uint64_t limit = UINT64_C(1) << 46;
  const struct {
    const char *name;
    uint64_t value;
  } sizes[] = { { "device_bytes", c->device_bytes }, { "host_bytes", c->host_bytes }, { "file_bytes", c->file_bytes } };
  for (int i = 0; i < 3; i++)
    if (sizes[i].value > limit)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "%s is %llu, must be at most %llu", sizes[i].name,
                      (unsigned long long)sizes[i].value, (unsigned long long)limit);
  if (!c->device_bytes) return gmi_fail(GEMINI_ERR_INVALID, 0, "device_bytes is 0, a device budget is required");
  if (c->device_margin_bytes >= c->device_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device_margin_bytes is %llu, must be less than device_bytes, %llu",
                    (unsigned long long)c->device_margin_bytes, (unsigned long long)c->device_bytes);
  if (c->checkpoint_name && (!*c->checkpoint_name || !c->file_bytes || !c->chunk_bytes))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "checkpoint_name is \"%.60s\": it must not be empty, and needs %s",
                    c->checkpoint_name, c->file_bytes ? "chunk_bytes" : "a file tier");
  if (c->checkpoint_name && gmi_part_has_name(c->checkpoint_name))
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "checkpoint_name is \"%.60s\": names that end like .1-2.3, numbers, are those of "
                    "gemini_group_checkpoint()",
                    c->checkpoint_name);
  gemini_status_t status = gmi_log_environment(c);
  if (status) return status;
  if (c->watchdog_ns && (!c->log_fn || c->log_level == GEMINI_LOG_ERROR))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "watchdog_ns is %llu, but %s", (unsigned long long)c->watchdog_ns,
                    c->log_fn ? "log_level leaves out warnings, which are what the watchdog sends"
                              : "the watchdog has nothing to report to: log_fn is NULL, and GEMINI_LOG is not set");
  if (c->cache_policy > GEMINI_CACHE_LEAST_STALE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "cache_policy is %u, must be 0 to %d", c->cache_policy,
                    GEMINI_CACHE_LEAST_STALE);
  if (c->file_engine > GEMINI_FILE_ENGINE_THREADS)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file_engine is %u, must be 0 to %d", c->file_engine,
                    GEMINI_FILE_ENGINE_THREADS);
  if (c->file_bytes && (!c->file_dir || !*c->file_dir) && !plans_only)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file_bytes is %llu but file_dir is not set",
                    (unsigned long long)c->file_bytes);
  status = check_fraction("static_param_fraction", c->static_param_fraction);
  if (!status) status = check_fraction("static_optim_fraction", c->static_optim_fraction);
  if (!c->warmup_iterations) c->warmup_iterations = 1;
  if (!c->log_level) c->log_level = GEMINI_LOG_WARNING;
  return status;
}

/* Takes the manager apart; no other thread uses it any more. Order: the threads that queue work (deferred updates,
 * files, workers) end first, then all streams are drained, and only then the memory that queued work may access is
 * freed, the device last. */
void gmi_manager_free(gmi_manager_t *m) {
  gmi_watchdog_blind(m); /* it goes on to report waits for what is still to end */
  gmi_faults_close(m);
  gmi_updates_close(m);
  if (m->update.workers) gmi_workers_drain(m, "gemini_manager_close");
  gmi_files_close(m); /* before the workers close: transfers that end notify them */
  gmi_workers_close(m);
  if (m->device.self) gmi_streams_drain(m);
  gmi_update_users_free(m, true);
  gmi_groups_close(m); /* no queued collective is left */
  gmi_timeline_close(m);
  if (m->device.self) {
    gmi_tracer_close(m);
    gmi_lock(m, "gemini_manager_close");
    gmi_graphs_free(m);
    gmi_heap_close(m);
    gmi_host_heap_end(m);
    gmi_unlock(m);
    gmi_balance_check(m);
    gmi_arena_free_all(m);
    gmi_frames_free(m);
    gmi_host_close(m);
    m->device.ops->close(m->device.self);
  }
  for (gmi_leftover_t *l = m->device.leftovers, *next; l; l = next) {
    next = l->next;
    free(l);
  }
  gmi_space_free(m->tensors.at, (uint64_t)GMI_TENSORS * sizeof *m->tensors.at);
  free(m->tensors.buckets);
  free(m->hook.frees);
  free(m->file.dir);
  free(m->file.checkpoint_name);
  gmi_leases_free(&m->leases);
  pthread_mutex_destroy(&m->hook.lock);
  pthread_cond_destroy(&m->callback.ended);
  gmi_watchdog_stop(m);
  gmi_watch_destroy(m);
  pthread_mutex_destroy(&m->lock);
  free(m);
}

gemini_status_t gmi_manager_make(const gemini_config_t *theirs, bool plans_only, gmi_manager_t **manager_out) {
  gemini_config_t config;
  gemini_status_t status = gmi_struct_in(&config, sizeof config, theirs, GMI_V1_CONFIG, "config");
  if (!status) status = config_check(&config, plans_only);
  if (status) return status;
  gmi_manager_t *m = aligned_alloc(_Alignof(gmi_manager_t), sizeof *m);
  if (!m) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a manager (%zu bytes)", sizeof *m);
  memset(m, 0, sizeof *m);
  pthread_mutex_init(&m->lock, NULL);
  pthread_mutex_init(&m->hook.lock, NULL);
  pthread_cond_init(&m->callback.ended, NULL);
  gmi_leases_init(&m->leases);
  gmi_watch_init(m);
  m->config = config;
  m->identity.id = (uint64_t)GMI_HANDLE_MANAGER << 60; /* gmi_manager_enter() sets the rest; a forecast needs none */
  m->trace.plans_only = plans_only;
  m->trace.observer = &gmi_tracer_observer;
  m->trace.advice = &gmi_tracer_advice;
  m->hook.when_locked = gmi_hook_drain;
  m->groups.failure = gmi_groups_failure;
  m->groups.queue_held = gmi_group_queue_held;
  m->check.call = gmi_chunks_check;
  m->stats.budget_bytes[GEMINI_TIER_DEVICE] = config.device_bytes;
  m->stats.budget_bytes[GEMINI_TIER_FILE] = config.file_bytes;
  gmi_links_open(m);
  m->config.file_dir = m->config.checkpoint_name = NULL;
  m->file.sys = gmi_files_sys;
  m->cut.padding = gmi_sizes_padding;
  const bool cuda = config.device == GEMINI_DEVICE_CUDA && !plans_only;
  m->device.ops = cuda ? &gmi_device_cuda : &gmi_device_sim;
  m->tensors.free = GMI_NONE;
  m->tensors.at = gmi_space((uint64_t)GMI_TENSORS * sizeof *m->tensors.at);
  m->tensors.bucket_count = 1024;
  m->tensors.buckets = malloc(m->tensors.bucket_count * sizeof *m->tensors.buckets);
  const bool files = config.file_bytes && !plans_only;
  if (files) m->file.dir = strdup(config.file_dir);
  if (config.checkpoint_name) m->file.checkpoint_name = strdup(config.checkpoint_name);
  if (!m->tensors.at || !m->tensors.buckets || (files && !m->file.dir) ||
      (config.checkpoint_name && !m->file.checkpoint_name)) {
    gmi_manager_free(m);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a manager's tables");
  }
  memset(m->tensors.buckets, 0xff, m->tensors.bucket_count * sizeof *m->tensors.buckets);
  gmi_device_config_t device = { .ordinal = plans_only ? 0 : config.device_ordinal,
                                 .memory_bytes = plans_only ? 1 : config.device_bytes,
                                 .h2d_bytes_per_s = config.sim_h2d_bytes_per_s,
                                 .d2h_bytes_per_s = config.sim_d2h_bytes_per_s };
  const uint64_t unit = cuda ? GMI_DEVICE_CUDA_UNIT : 4096;
  device.memory_bytes -= device.memory_bytes % unit;
  if (!device.memory_bytes) device.memory_bytes = unit;
  gmi_nvtx_open();
  status = m->device.ops->open(&device, &m->device.self);
  if (status) {
    m->device.self = NULL;
    gmi_fail_prefix("device %s could not be opened with %llu bytes: ", m->device.ops->name,
                    (unsigned long long)device.memory_bytes);
    gmi_manager_free(m);
    return status;
  }
  m->device.granularity = m->device.ops->memory.granularity(m->device.self);
  uint64_t c = config.chunk_bytes;
  if (c && ((c & (c - 1)) || c < 65536 || c < m->device.granularity || c > (UINT64_C(1) << 30))) {
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "chunk_bytes is %llu, must be a power of two from %llu to 1 GiB",
                      (unsigned long long)c,
                      (unsigned long long)(m->device.granularity > 65536 ? m->device.granularity : 65536));
  } else if (!plans_only) { /* a forecast says what lacks */
    const uint64_t usable = config.device_bytes - config.device_margin_bytes;
    const uint64_t least = gmi_sizes_of(m, gmi_chunk_min(m)).frame_bytes; /* of c, if it is configured */
    if (least > usable && c)
      status =
          gmi_fail(GEMINI_ERR_INVALID, 0, "chunk_bytes is %llu, more than the device budget without its margin, %llu",
                   (unsigned long long)c, (unsigned long long)usable);
    else if (least > usable)
      status = gmi_fail(GEMINI_ERR_INVALID, 0, "device_bytes without its margin is %llu, must be at least %llu",
                        (unsigned long long)usable, (unsigned long long)least);
  }
  gmi_lock(m, "gemini_manager_open");
  if (!status) status = gmi_stream_open(m, GMI_STREAM_INTERNAL, NULL, &gmi_link_in(m)->stream);
  if (!status) status = gmi_stream_open(m, GMI_STREAM_INTERNAL, NULL, &gmi_link_out(m)->stream);
  if (!status) status = gmi_stream_open(m, GMI_STREAM_INTERNAL, NULL, &m->update.stream);
  if (!status) status = gmi_host_open(m);
  if (!status && !plans_only) status = gmi_files_open(m);
  if (!status) status = gmi_tracer_open(m);
  cpu_set_t near;
  const bool is_near = !status && gmi_host_cores(m, &near);
  if (!status) status = gmi_workers_open(m, config.update_threads, is_near ? &near : NULL);
  if (!status) status = gmi_updates_open(m);
  if (!status) status = gmi_watchdog_start(m, gmi_dump_write);
  if (!status) status = gmi_faults_open(m);
  gmi_unlock(m);
  if (status) {
    gmi_failure_t first;
    gmi_fail_keep(status, &first);
    gmi_manager_free(m);
    return gmi_fail_again(&first);
  }
  *manager_out = m;
  return GEMINI_OK;
}

static gemini_status_t manager_open(const gemini_config_t *config, gemini_manager_t *mgr_out) {
  if (!mgr_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "mgr_out is NULL");
  gmi_manager_t *m;
  gemini_status_t status = gmi_manager_make(config, false, &m);
  if (status) return status;
  bool full;
  if (gmi_manager_enter(m, &full)) {
    *mgr_out = gmi_handle_of(m->identity.id);
    return GEMINI_OK;
  }
  gmi_manager_free(m);
  return full ? gmi_fail(GEMINI_ERR_INVALID, 0, "%u managers are open, the limit is %u", GMI_MANAGERS, GMI_MANAGERS)
              : gmi_fail(GEMINI_ERR_INVALID, 0, "this process has used all handles that managers can have");
}

gemini_status_t gemini_manager_open(const gemini_config_t *config, gemini_manager_t *mgr_out) {
  API_RETURN(manager_open(config, mgr_out));
}

/* Refuses to close a manager that is in use (GEMINI_ERR_BUSY); nothing has changed then. */
static gemini_status_t close_check(gmi_manager_t *m) {
  if (gmi_graphs_busy(m))
    return gmi_fail(GEMINI_ERR_BUSY, 0, "a graph was begun and not ended, or entered and not left");
  for (uint32_t i = 0; i < m->tensors.high; i++) {
    uint64_t users = gmi_tensor_users(atomic_load(&m->tensors.at[i].word));
    if (gmi_tensor_alive(&m->tensors.at[i]) && users)
      return gmi_fail(GEMINI_ERR_BUSY, 0, "tensor %s is acquired %llu times",
                      gmi_tensor_base(m, &m->tensors.at[i])->name, (unsigned long long)users);
  }
  gmi_lease_t lease;
  /* only leases of arena ranges can be left: those of tensors count as the tensors' users, checked above */
  if (gmi_lease_find(&m->leases, 0, &lease))
    return gmi_fail(GEMINI_ERR_BUSY, 0, "%llu bytes at offset %llu of arena %s are acquired",
                    (unsigned long long)lease.key.size, (unsigned long long)lease.key.offset,
                    gmi_arena_get(m, gmi_handle_of(lease.key.object))->name);
  for (uint32_t a = 0; a < GMI_ARENAS; a++) {
    gmi_arena_t *arena = gmi_arena_at(m, a);
    for (uint32_t i = 0; arena && arena->chunks && i < atomic_load(&arena->chunk_count); i++)
      if (gmi_chunk_device_users(&arena->chunks[i]))
        return gmi_fail(GEMINI_ERR_BUSY, 0, "a range of arena %s is acquired", arena->name);
  }
  return GEMINI_OK;
}

/* Finishes updates and the timeline while the handle is still valid, waits for allocator calls (gmi_hook_close()),
 * withdraws the handle, then reports the first asynchronous failure and frees everything. No other call of this
 * manager may run meanwhile, except frees of allocator hooks. */
static gemini_status_t manager_close(gemini_manager_t mgr) {
  if (!mgr) return GEMINI_OK;
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) return GEMINI_ERR_HANDLE;
  gmi_lock(m, "gemini_manager_close");
  gemini_status_t status = close_check(m);
  gmi_unlock(m);
  if (status) return status;
  gmi_updates_finish(m, "gemini_manager_close");
  gmi_failure_t first;
  gmi_fail_keep(m->trace.timeline ? gmi_timeline_finish(m) : GEMINI_OK, &first);
  gmi_hook_close(m);
  gmi_failure_t updates; /* the last try while the handle is valid, as callbacks may use it */
  gmi_fail_keep(gmi_updates_finish(m, "gemini_manager_close"), &updates);
  gmi_manager_leave(m);
  status = m->failure.status;
  if (status) gmi_fail(status, m->failure.native_code, "an earlier asynchronous failure: %s", m->failure.message);
  else status = updates.status ? gmi_fail_again(&updates) : gmi_workers_failure(m); /* of an update that ended since */
  if (status) gmi_fail_keep(status, &first); /* weighs more than a timeline that was not written */
  gmi_manager_free(m);
  return gmi_fail_again(&first);
}

gemini_status_t gemini_manager_close(gemini_manager_t mgr) { API_RETURN(manager_close(mgr)); }

/* ---- budgets */
/* Changes the device budget and makes all plans again. Before the first cut into chunks only the device's memory
 * changes; afterwards the number of frames does. */
static gemini_status_t budget_device(gmi_manager_t *m, uint64_t bytes) {
  uint64_t margin = m->config.device_margin_bytes;
  uint64_t frame_bytes = gmi_frame_bytes(m) ? gmi_frame_bytes(m) : gmi_sizes_of(m, gmi_chunk_min(m)).frame_bytes;
  if (bytes <= margin || bytes - margin < frame_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "device budget %llu without its margin %llu is less than one chunk, %llu",
                    (unsigned long long)bytes, (unsigned long long)margin, (unsigned long long)frame_bytes);
  gemini_status_t status = GEMINI_OK;
  uint64_t old = m->config.device_bytes, memory = bytes - bytes % m->device.granularity;
  if (atomic_load(&m->cut.chunk_bytes)) {
    uint64_t frames = (bytes - margin) / frame_bytes;
    if (frames > UINT32_MAX - 1) frames = UINT32_MAX - 1;
    status = gmi_frames_resize(m, (uint32_t)frames, memory);
  } else {
    status = gmi_device_resize(m, memory);
    if (status) gmi_fail_device(status, "device %s refused to change its memory", m->device.ops->name);
  }
  if (status == GEMINI_ERR_OOM_DEVICE) gmi_fail_prefix("a device budget of %llu: ", (unsigned long long)bytes);
  if (status) return status;
  m->config.device_bytes = bytes;
  status = gmi_tracer_replan(m);
  if (!status) return GEMINI_OK;
  /* No plan fits the new budget: restores the old budget and its plans. Restoring works, because it grows back what
   * was just freed, or gives up frames that are not used yet. */
  gmi_failure_t refused;
  gmi_fail_keep(status, &refused);
  m->config.device_bytes = old;
  memory = old - old % m->device.granularity;
  if (atomic_load(&m->cut.chunk_bytes) &&
      gmi_frames_resize(m, (uint32_t)((old - margin) / frame_bytes), memory) == GEMINI_OK)
    (void)gmi_tracer_replan(m);
  return gmi_fail_again(&refused);
}

static gemini_status_t budget_set(gmi_manager_t *m, uint32_t tier, uint64_t bytes) {
  if (tier >= GEMINI_TIER_COUNT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "tier is %u, must be 0 to %d", tier, GEMINI_TIER_FILE);
  if (bytes > (UINT64_C(1) << 46))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "bytes is %llu, must be at most %llu", (unsigned long long)bytes,
                    1ull << 46);
  gmi_lock(m, "gemini_budget_set");
  gemini_status_t status = GEMINI_OK;
  if (tier == GEMINI_TIER_DEVICE) {
    status = budget_device(m, bytes);
  } else if (tier == GEMINI_TIER_HOST) {
    if (!bytes) status = gmi_fail(GEMINI_ERR_INVALID, 0, "the host budget cannot be 0");
    else status = gmi_host_resize(m, bytes);
    if (!status) m->config.host_bytes = bytes;
    if (!status) gmi_ahead_drop(m); /* it was for the old budget */
    gmi_updates_room(m);
  } else {
    status = gmi_files_resize(m, bytes);
    if (!status) m->config.file_bytes = bytes;
  }
  if (!status) gmi_stat_set(&m->stats.budget_bytes[tier], bytes);
  gmi_unlock(m);
  return status;
}

gemini_status_t gemini_budget_set(gemini_manager_t mgr, uint32_t tier, uint64_t bytes) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  API_RETURN(m ? budget_set(m, tier, bytes) : GEMINI_ERR_HANDLE);
}
