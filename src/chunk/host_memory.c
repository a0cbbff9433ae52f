/* The memory of the host tier: address space reserved at open, committed and page-locked part by part as slots come
 * into use.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Page-locking takes time in proportion to the bytes, so a program pays only for what it uses. The committed bytes of
 * a part are always one prefix, locked by one call: a GPU requires that the host memory of one copy lies within one
 * lock.
 *
 * Threads: gmi_host_open() and gmi_host_close() run alone; the rest under the manager's lock. */
#include "base/space.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/host.h"
#include "chunk/host_ahead.h"
#include "core/manager.h"
#include "core/streams.h"
#include "host/host_heap.h"
#include "host/limits.h"
#include "host/reserve.h"
#include "host/topology.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

/* Bytes of a part: 1/256 of the budget within these bounds, more where a chunk is larger. */
#define PART_MAX (UINT64_C(256) << 20)
#define PART_MIN (UINT64_C(1) << 20)
#define HUGE_FROM (UINT64_C(256) << 20) /* smallest budget on huge pages: rounding up to one adds less than 1 % */

static bool has_several_nodes(void) {
  char nodes[64] = "";
  FILE *file = fopen("/sys/devices/system/node/has_memory", "re");
  if (!file) return false;
  bool several = fgets(nodes, sizeof nodes, file) && strpbrk(nodes, "-,");
  fclose(file);
  return several;
}

/* Finds the NUMA node for the memory: the GPU's, else that of the disks under file_dir. False: neither is known. */
static bool near_node(gmi_manager_t *m, const gmi_topology_t *topology, uint32_t *node_out) {
  uint32_t disks[64], count = 0;
  struct stat at;
  *node_out = GEMINI_INDEX_NONE;
  char pci[GMI_DEVICE_PCI_BYTES]; /* found by PCI address: the driver counts GPUs in its own order */
  gemini_topology_object_t gpu = GEMINI_TOPOLOGY_OBJECT_INIT;
  if (m->device.ops->pci(m->device.self, pci) == GEMINI_OK &&
      gmi_topology_object(topology, GEMINI_OBJECT_GPU, gmi_topology_gpu_at(topology, pci), &gpu) == GEMINI_OK)
    *node_out = gpu.node;
  for (const char *dir = m->file.dir; *node_out == GEMINI_INDEX_NONE && dir && *dir;) {
    char path[4096];
    size_t length = strcspn(dir, ":");
    snprintf(path, sizeof path, "%.*s", (int)length, dir);
    if (!stat(path, &at) && !gmi_topology_disks_of(topology, "", major(at.st_dev), minor(at.st_dev), disks, 64, &count))
      *node_out = gmi_topology_node_of(topology, disks, count);
    dir += length + (dir[length] == ':');
  }
  return *node_out != GEMINI_INDEX_NONE;
}

static gemini_status_t reserve_open(gmi_manager_t *m, uint64_t size) {
  gmi_reserve_config_t config = { .size_bytes = size,
                                  .flags = m->config.host_bytes < HUGE_FROM ? GMI_RESERVE_SMALL_PAGES : 0 };
  gmi_topology_t *topology = NULL;
  uint32_t node;
  if (has_several_nodes() && gmi_topology_load(NULL, &topology) == GEMINI_OK && near_node(m, topology, &node)) {
    config.topology = topology;
    config.nodes = &node;
    config.node_count = 1;
  }
  gemini_status_t status = gmi_reserve_open(&config, &m->host.reserve);
  gmi_topology_free(topology);
  return status;
}

bool gmi_host_cores(const gmi_manager_t *m, cpu_set_t *cores_out) {
  return gmi_reserve_cores(m->host.reserve, cores_out);
}

gemini_status_t gmi_host_open(gmi_manager_t *m) {
  gmi_limits_t limits;
  gemini_status_t status = gmi_limits_read("", &limits);
  if (status) return status;
  if (!m->config.host_bytes) {
    m->config.host_bytes = gmi_limits_default_host_bytes(&limits, false);
    if (!m->config.host_bytes)
      return gmi_fail(GEMINI_ERR_INVALID, 0,
                      "host_bytes is 0, but the system does not tell how much memory is free: set host_bytes");
  }
  gmi_stat_set(&m->stats.budget_bytes[GEMINI_TIER_HOST], m->config.host_bytes);
  if (!m->trace.plans_only) status = gmi_limits_check(&limits, "host_bytes", m->config.host_bytes, false);
  if (status) return status;
  /* Reserve addresses up to the process's memory limit, so that the budget can grow; addresses cost nothing. */
  uint64_t most = limits.memory.limit_bytes == GMI_LIMIT_NONE ? 0 : limits.memory.limit_bytes;
  status = reserve_open(m, most > m->config.host_bytes ? most : m->config.host_bytes);
  if (status == GEMINI_ERR_OOM_HOST && most > m->config.host_bytes) /* too few addresses: do without growth */
    status = reserve_open(m, m->config.host_bytes);
  if (status == GEMINI_ERR_OOM_HOST && m->trace.plans_only)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address range for a plan with host_bytes of %llu",
                    (unsigned long long)m->config.host_bytes);
  if (status) return status;
  m->host.base = gmi_reserve_base(m->host.reserve);
  m->host.grain_bytes = m->host.part_bytes = gmi_reserve_grain(m->host.reserve);
  /* A part must hold whole slots: a GPU's copy must lie within one lock. */
  uint64_t least = m->config.chunk_bytes ? gmi_sizes_of(m, m->config.chunk_bytes).slot_bytes : PART_MIN;
  if (!m->config.chunk_bytes && m->config.device == GEMINI_DEVICE_CUDA)
    least = gmi_sizes_of(m, GMI_CHUNK_MAX).slot_bytes;
  if (least < PART_MIN) least = PART_MIN;
  while (m->host.part_bytes < least ||
         (m->host.part_bytes < PART_MAX && m->host.part_bytes * 2 <= m->config.host_bytes / 256))
    m->host.part_bytes *= 2;
  m->host.part_count = (gmi_reserve_size(m->host.reserve) + m->host.part_bytes - 1) / m->host.part_bytes;
  m->host.committed = gmi_space(m->host.part_count * sizeof *m->host.committed);
  if (!m->host.committed) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the host tier's records");
  return gmi_ahead_open(m);
}

void gmi_host_heap_end(gmi_manager_t *m) {
  gmi_host_heap_close(m->host.heap); /* returns its slots by slots_from_blocks() */
  m->host.heap = NULL;
}

void gmi_host_close(gmi_manager_t *m) {
  gmi_ahead_close(m);
  for (uint64_t part = 0; m->host.committed && part < m->host.part_count; part++)
    if (m->host.committed[part])
      m->device.ops->memory.host_unlock(m->device.self, m->host.base + part * m->host.part_bytes,
                                        m->host.committed[part]);
  for (uint32_t s = 0; s < m->host.slot_most; s++) free(m->host.slots[s].failure_text);
  gmi_space_free(m->host.committed, m->host.part_count * sizeof *m->host.committed);
  gmi_space_free(m->host.slots, m->host.slot_map_bytes);
  gmi_space_free(m->host.free_map, m->host.free_map_bytes);
  gmi_reserve_close(m->host.reserve);
  memset(&m->host, 0, sizeof m->host);
}

/* Blocks until the copies queued so far on both directions' streams are done, and what other streams do with the slots
 * in [begin, end): ranges that were released on the host, gathers. No device work may use memory that is being unlocked
 * and locked again, or given back. */
static gemini_status_t device_finishes(gmi_manager_t *m, uint64_t begin, uint64_t end) {
  const uint32_t streams[] = { gmi_link_in(m)->stream, gmi_link_out(m)->stream };
  gemini_status_t status = GEMINI_OK;
  for (int i = 0; i < 2 && !status; i++) {
    gmi_fence_t copied;
    status = gmi_fence_now(m, streams[i], &copied);
    if (!status) status = gmi_fence_sync(m, copied);
  }
  for (uint64_t s = end ? begin / gmi_slot_bytes(m) : 0; !status && s * gmi_slot_bytes(m) < end; s++)
    status = gmi_fence_sync(m, m->host.slots[s].fence);
  return status;
}

/* Memory comes in whole grains, so the last one may exceed the budget, by less than 1 % of what it was at open. */
uint64_t gmi_host_grains(const gmi_manager_t *m, uint64_t bytes) {
  uint64_t all = (bytes + m->host.grain_bytes - 1) / m->host.grain_bytes * m->host.grain_bytes;
  return all < gmi_reserve_size(m->host.reserve) ? all : gmi_reserve_size(m->host.reserve);
}

/* Marks the slots that lie whole in memory which was committed just now. */
static void slots_blank(gmi_manager_t *m, uint64_t begin, uint64_t end) {
  const uint64_t bytes = gmi_slot_bytes(m);
  if (!m->host.slots) return;
  for (uint64_t s = (begin + bytes - 1) / bytes; (s + 1) * bytes <= end; s++) m->host.slots[s].blank = true;
}

/* A lock covers one range and cannot grow, so a part that has memory is unlocked, committed or decommitted, and locked
 * again, with no device work on it under way. The I/O engine's registration of the part as a fixed buffer follows the
 * same steps. Fails without changes when a graph's copies name addresses in the part. If the new lock fails, the old
 * size is restored and locked again. */
gemini_status_t gmi_host_part_set(gmi_manager_t *m, uint64_t part, uint64_t want, bool ready) {
  uint8_t *base = m->host.base + part * m->host.part_bytes;
  uint64_t begin = part * m->host.part_bytes, has = m->host.committed[part];
  gemini_status_t status = GEMINI_OK, changed;
  uint64_t end = m->host.slots ? begin + has : 0; /* of what slots lie in */
  for (uint64_t s = end ? begin / gmi_slot_bytes(m) : 0; s * gmi_slot_bytes(m) < end; s++)
    if (m->host.slots[s].chunk && gmi_chunk_in_graphs(m->host.slots[s].chunk))
      return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                      "%llu bytes of host memory cannot change while graphs that copy from them exist",
                      (unsigned long long)has);
  if (has) {
    status = device_finishes(m, begin, end);
    if (status) return status;
  }
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_MEMORY, 0);
  if (has) {
    gmi_files_buffer(m, base, has, false);
    m->device.ops->memory.host_unlock(m->device.self, base, has);
  }
  changed = ready        ? GEMINI_OK
            : want > has ? gmi_reserve_commit(m->host.reserve, begin + has, want - has)
            : want < has ? gmi_reserve_decommit(m->host.reserve, begin + want, has - want)
                         : GEMINI_OK;
  uint64_t now = changed ? has : want;
  status = now ? m->device.ops->memory.host_lock(m->device.self, base, now) : GEMINI_OK;
  if (status) {
    if (status == GEMINI_ERR_INVALID) /* which would blame the caller's arguments */
      status = gmi_fail(GEMINI_ERR_DEVICE, 0, "the device knows this memory by other bounds");
    changed = gmi_fail_device(status, "the device could not page-lock %llu bytes", (unsigned long long)now);
    if (now > has && gmi_reserve_decommit(m->host.reserve, begin + has, now - has) == GEMINI_OK) now = has;
    /* Without the lock the memory is still usable, but copies from and to it are slow, or fail. */
    if (now && m->device.ops->memory.host_lock(m->device.self, base, now))
      gmi_log(m, GEMINI_LOG_WARNING, "%llu bytes of host memory are not page-locked", (unsigned long long)now);
  }
  if (now) gmi_files_buffer(m, base, now, true);
  slots_blank(m, begin + has, begin + now);
  gmi_wait_end(m, &wait);
  m->host.committed[part] = now;
  return changed;
}

gemini_status_t gmi_host_commit(gmi_manager_t *m, uint64_t begin, uint64_t size) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint64_t budget = gmi_host_grains(m, m->config.host_bytes);
  for (uint64_t part = begin / m->host.part_bytes; part * m->host.part_bytes < begin + size; part++) {
    uint64_t base = part * m->host.part_bytes, has = m->host.committed[part];
    if (base + has >= begin + size || has == m->host.part_bytes) continue;
    uint64_t want = budget - base < m->host.part_bytes ? budget - base : m->host.part_bytes;
    const bool ready = gmi_ahead_take(m, part, want);
    gemini_status_t status = gmi_host_part_set(m, part, want, ready);
    gmi_ahead_taken(m, part, !status);
    if (status) return status;
  }
  return GEMINI_OK;
}
