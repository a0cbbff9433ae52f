/* Host slots: places for windows in the one range of page-locked host memory, and who leaves when it is full.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A window's place is any slot. At home, windows lie one after another as in their arenas, so that ranges of several
 * windows are contiguous; where the budget is too small for that, gmi_host_run() brings the windows of one range
 * together. What is queued on a slot's bytes is noted with the slot, so that whoever gets it next is behind it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "base/space.h"
#include "chunk/cut.h"
#include "core/manager.h"
#include "host/blocks.h"
#include "host/limits.h"
#include "host/reserve.h"
#include "host/topology.h"

/* Memory is committed and page-locked in parts of at most so many bytes, as slots come into use. */
#define PART_MAX (UINT64_C(256) << 20)
#define PART_MIN (UINT64_C(1) << 20)
#define PART_GPU (UINT64_C(64) << 20)   /* the largest window that is searched */
#define HUGE_FROM (UINT64_C(256) << 20) /* budgets from here on: a huge page is less than 1 % */

static uint64_t window_bytes(const gmi_manager_t *m) { return UINT64_C(1) << m->window_shift; }

/* ---- memory */
static bool has_several_nodes(void) {
  char nodes[64] = "";
  FILE *file = fopen("/sys/devices/system/node/has_memory", "re");
  if (!file) return false;
  bool several = fgets(nodes, sizeof nodes, file) && strpbrk(nodes, "-,");
  fclose(file);
  return several;
}

/* The node that the memory should lie on: near the GPU, else near the disks of the files. */
static bool near_node(gmi_manager_t *m, const gmi_topology_t *topology, uint32_t *node_out) {
  uint32_t disks[64], count = 0;
  struct stat at;
  *node_out = GEMINI_INDEX_NONE;
  char pci[GMI_DEVICE_PCI_BYTES]; /* the driver counts GPUs in an order of its own */
  gemini_topology_object_t gpu = GEMINI_TOPOLOGY_OBJECT_INIT;
  if (m->dev->pci(m->dev_self, pci) == GEMINI_OK &&
      gmi_topology_object(topology, GEMINI_OBJECT_GPU, gmi_topology_gpu_at(topology, pci), &gpu) == GEMINI_OK)
    *node_out = gpu.node;
  for (const char *dir = m->file_dir; *node_out == GEMINI_INDEX_NONE && dir && *dir;) {
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

gemini_status_t gmi_host_open(gmi_manager_t *m) {
  gmi_limits_t limits;
  gemini_status_t status = gmi_limits_read("", &limits);
  if (status) return status;
  if (!m->config.host_bytes) {
    m->config.host_bytes = gmi_limits_default_host_bytes(&limits, false);
    if (!m->config.host_bytes)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "host_bytes is 0, and what the system has free is not known: name it");
  }
  gmi_stat_set(&m->stats.budget_bytes[GEMINI_TIER_HOST], m->config.host_bytes);
  status = gmi_limits_check(&limits, "host_bytes", m->config.host_bytes, false);
  if (status) return status;
  /* Addresses for a budget that grows; they cost nothing. */
  uint64_t most = limits.memory.limit_bytes == GMI_LIMIT_NONE ? 0 : limits.memory.limit_bytes;
  status = reserve_open(m, most > m->config.host_bytes ? most : m->config.host_bytes);
  if (status == GEMINI_ERR_OOM_HOST && most > m->config.host_bytes) /* too few addresses: then it cannot grow */
    status = reserve_open(m, m->config.host_bytes);
  if (status) return status;
  m->host.base = gmi_reserve_base(m->host.reserve);
  m->host.grain_bytes = m->host.part_bytes = gmi_reserve_grain(m->host.reserve);
  /* A GPU copies from and to memory locked in one go: no window may lie in two parts. */
  uint64_t least = m->config.window_bytes > PART_MIN ? m->config.window_bytes : PART_MIN;
  if (!m->config.window_bytes && m->config.device == GEMINI_DEVICE_CUDA) least = PART_GPU;
  while (m->host.part_bytes < least ||
         (m->host.part_bytes < PART_MAX && m->host.part_bytes * 2 <= m->config.host_bytes / 256))
    m->host.part_bytes *= 2;
  m->host.part_count = (gmi_reserve_size(m->host.reserve) + m->host.part_bytes - 1) / m->host.part_bytes;
  m->host.committed = gmi_space(m->host.part_count * sizeof *m->host.committed);
  if (!m->host.committed) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the host tier's records");
  return GEMINI_OK;
}

void gmi_host_blocks_close(gmi_manager_t *m) {
  gmi_blocks_close(m->host.blocks); /* gives its slots back */
  m->host.blocks = NULL;
}

void gmi_host_close(gmi_manager_t *m) {
  for (uint64_t part = 0; m->host.committed && part < m->host.part_count; part++)
    if (m->host.committed[part])
      m->dev->host_unlock(m->dev_self, m->host.base + part * m->host.part_bytes, m->host.committed[part]);
  gmi_space_free(m->host.committed, m->host.part_count * sizeof *m->host.committed);
  gmi_space_free(m->host.slots, m->host.slot_map_bytes);
  gmi_space_free(m->host.free_map, m->host.free_map_bytes);
  gmi_reserve_close(m->host.reserve);
  memset(&m->host, 0, sizeof m->host);
}

/* Nothing may copy from or to memory whose lock changes. */
static gemini_status_t copies_finish(gmi_manager_t *m) {
  const uint32_t streams[] = { m->copy_in, m->copy_out };
  gemini_status_t status = GEMINI_OK;
  for (int i = 0; i < 2 && !status; i++) {
    gmi_fence_t end;
    status = gmi_fence_now(m, streams[i], &end);
    if (!status) status = gmi_fence_sync(m, end);
  }
  return status;
}

/* Pages are had in grains, of which the last may pass the budget: by less than 1 % of what it was at open. */
static uint64_t grains(const gmi_manager_t *m, uint64_t bytes) {
  uint64_t all = (bytes + m->host.grain_bytes - 1) / m->host.grain_bytes * m->host.grain_bytes;
  return all < gmi_reserve_size(m->host.reserve) ? all : gmi_reserve_size(m->host.reserve);
}

/* Makes the first want bytes of a part exist, page-locked, and no others. */
static gemini_status_t part_set(gmi_manager_t *m, uint64_t part, uint64_t want) {
  uint8_t *base = m->host.base + part * m->host.part_bytes;
  uint64_t begin = part * m->host.part_bytes, has = m->host.committed[part];
  gemini_status_t status = GEMINI_OK, changed;
  for (uint64_t s = begin >> m->window_shift; s << m->window_shift < begin + has; s++)
    if (m->host.slots && m->host.slots[s].window && m->host.slots[s].window->graphs)
      return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "%llu bytes of host memory stay as they are while graphs copy from them",
                      (unsigned long long)has);
  if (has) {
    status = copies_finish(m);
    if (status) return status;
  }
  gmi_wait_t wait;
  gmi_wait_begin(m, &wait, NULL, GMI_WAIT_MEMORY, 0);
  if (has) {
    gmi_files_buffer(m, base, has, false);
    m->dev->host_unlock(m->dev_self, base, has);
  }
  changed = want > has   ? gmi_reserve_commit(m->host.reserve, begin + has, want - has)
            : want < has ? gmi_reserve_decommit(m->host.reserve, begin + want, has - want)
                         : GEMINI_OK;
  uint64_t now = changed ? has : want;
  status = now ? m->dev->host_lock(m->dev_self, base, now) : GEMINI_OK;
  if (status) {
    if (status == GEMINI_ERR_INVALID) status = GEMINI_ERR_DEVICE; /* to the device; the caller's values were right */
    changed = gmi_fail(status, 0, "the device could not page-lock %llu bytes", (unsigned long long)now);
    if (now > has && gmi_reserve_decommit(m->host.reserve, begin + has, now - has) == GEMINI_OK) now = has;
    if (now && m->dev->host_lock(m->dev_self, base, now)) /* as it was; without, copies from it are slow, or fail */
      gmi_log(m, GEMINI_LOG_WARNING, "%llu bytes of host memory are not page-locked", (unsigned long long)now);
  }
  if (now) gmi_files_buffer(m, base, now, true);
  gmi_wait_end(m, &wait);
  m->host.committed[part] = now;
  return changed;
}

gemini_status_t gmi_host_commit(gmi_manager_t *m, uint64_t begin, uint64_t size) {
  uint64_t budget = grains(m, m->config.host_bytes);
  for (uint64_t part = begin / m->host.part_bytes; part * m->host.part_bytes < begin + size; part++) {
    uint64_t base = part * m->host.part_bytes, has = m->host.committed[part];
    if (base + has >= begin + size || has == m->host.part_bytes) continue;
    uint64_t want = budget - base < m->host.part_bytes ? budget - base : m->host.part_bytes;
    gemini_status_t status = part_set(m, part, want);
    if (status) return status;
  }
  return GEMINI_OK;
}

/* ---- slots */
uint8_t *gmi_slot_address(const gmi_manager_t *m, uint32_t slot) {
  return m->host.base + ((uint64_t)slot << m->window_shift);
}
uint8_t *gmi_window_host(gmi_manager_t *m, const gmi_window_t *w) {
  return w->slot == GMI_NONE ? NULL : gmi_slot_address(m, w->slot);
}
static gmi_slot_t *slot_of(const gmi_manager_t *m, const gmi_window_t *w) { return &m->host.slots[w->slot]; }

static uint32_t budget_slots(const gmi_manager_t *m, uint64_t bytes) {
  uint64_t count = bytes >> m->window_shift;
  return count < GMI_NONE ? (uint32_t)count : GMI_NONE - 1;
}

static bool is_free(const gmi_manager_t *m, uint32_t slot) { return m->host.free_map[slot >> 6] >> (slot & 63) & 1; }
/* Slots behind the budget (gmi_host_resize) are never free. */
static void mark_free(gmi_manager_t *m, uint32_t slot, bool free) {
  if (slot >= m->host.slot_count) return;
  if (free) m->host.free_map[slot >> 6] |= UINT64_C(1) << (slot & 63);
  else m->host.free_map[slot >> 6] &= ~(UINT64_C(1) << (slot & 63));
  m->host.free_count += free ? 1 : -1u;
}

/* As many slots as a budget has room for. */
static void use_slots(gmi_manager_t *m, uint64_t bytes) {
  uint32_t count = budget_slots(m, bytes), most = (uint32_t)(gmi_reserve_size(m->host.reserve) >> m->window_shift);
  if (count > most) count = most;
  uint32_t before = m->host.slot_count;
  for (uint32_t s = count; s < before; s++)
    if (is_free(m, s)) mark_free(m, s, false);
  m->host.slot_count = count;
  if (count > m->host.slot_most) m->host.slot_most = count;
  for (uint32_t s = before; s < count; s++)
    if (!m->host.slots[s].window && !m->host.slots[s].block) mark_free(m, s, true);
}

/* Windows that may get a slot without another leaving its own. */
uint32_t gmi_host_free(const gmi_manager_t *m) {
  uint64_t used = m->host_used >> m->window_shift, left = m->host.slot_count > used ? m->host.slot_count - used : 0;
  return left < m->host.free_count ? (uint32_t)left : m->host.free_count;
}

gemini_status_t gmi_host_prepare(gmi_manager_t *m, gmi_cut_t *cut) {
  uint64_t most = gmi_reserve_size(m->host.reserve) >> cut->shift;
  cut->slot_map_bytes = (most + 1) * sizeof(gmi_slot_t);
  cut->free_map_bytes = (most / 64 + 1) * sizeof(uint64_t);
  cut->slots = gmi_space(cut->slot_map_bytes);
  cut->free_map = gmi_space(cut->free_map_bytes);
  if (cut->slots && cut->free_map) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no address space for the records of %llu host slots",
                  (unsigned long long)most);
}

void gmi_host_install(gmi_manager_t *m, gmi_cut_t *cut) {
  gmi_host_blocks_close(m); /* none is live */
  gmi_space_free(m->host.slots, m->host.slot_map_bytes);
  gmi_space_free(m->host.free_map, m->host.free_map_bytes);
  m->host.slots = cut->slots;
  m->host.slot_map_bytes = cut->slot_map_bytes;
  m->host.free_map = cut->free_map;
  m->host.free_map_bytes = cut->free_map_bytes;
  cut->slots = NULL;
  cut->free_map = NULL;
  m->host.slot_count = m->host.slot_most = m->host.free_count = m->host.hand = 0;
  m->host_used = 0;
  use_slots(m, m->config.host_bytes);
  gmi_host_homes(m, m->window_shift);
}

/* At home, arenas lie one after another, with room between them where there is some, so that they can grow. */
void gmi_host_homes(gmi_manager_t *m, uint32_t shift) {
  uint64_t windows = 0, arenas = 0, slots = m->config.host_bytes >> shift, home = 0;
  for (int pass = 0; pass < 2; pass++) {
    uint64_t gap = slots > windows ? (slots - windows) / (2 * arenas + 2) : 0;
    for (uint32_t i = 0; i < GMI_ARENAS; i++) {
      gmi_arena_t *a = gmi_arena_at(m, i);
      if (!a || a->store != i) continue;
      uint64_t count = (atomic_load(&a->size) + (UINT64_C(1) << shift) - 1) >> shift;
      windows += count;
      arenas++;
      a->home = (uint32_t)home;
      a->home_count = (uint32_t)(count + gap);
      home += pass ? a->home_count : 0;
    }
  }
  m->host.home_end = home;
}

/* An arena that is new or has outgrown its home has one behind all others. Where no room is left there because others
 * have more than they need, all of them have new ones; what lies elsewhere moves when it has to (gmi_host_run). */
static void home_extend(gmi_manager_t *m, gmi_arena_t *a) {
  uint64_t count = atomic_load(&a->window_count), end = m->host.home_end;
  if (end + count > m->host.slot_count) {
    gmi_host_homes(m, m->window_shift);
    if (count <= a->home_count) return;
    end = m->host.home_end;
  }
  uint64_t gap = m->host.slot_count > end + count ? (m->host.slot_count - end - count) / 4 : 0;
  a->home = (uint32_t)end;
  a->home_count = (uint32_t)(count + gap);
  m->host.home_end = end + a->home_count;
}

static uint32_t home_of(gmi_manager_t *m, const gmi_window_t *w) {
  gmi_arena_t *a = gmi_window_arena(m, w);
  if (w->index >= a->home_count) home_extend(m, a);
  return m->host.slot_count ? (uint32_t)(((uint64_t)a->home + w->index) % m->host.slot_count) : GMI_NONE;
}

/* First of count free slots in a row, from hint on and then from the start; GMI_NONE. */
static uint32_t free_run(const gmi_manager_t *m, uint32_t hint, uint32_t count) {
  for (int pass = 0; pass < 2; pass++) {
    uint32_t begin = pass == 0 ? hint : 0, end = pass == 0 ? m->host.slot_count : hint + count - 1, have = 0;
    if (end > m->host.slot_count) end = m->host.slot_count;
    for (uint32_t s = begin; s < end; s++) {
      if (!(s & 63) && !have && !m->host.free_map[s >> 6]) {
        s += 63;
        continue;
      }
      have = is_free(m, s) ? have + 1 : 0;
      if (have == count) return s - count + 1;
    }
  }
  return GMI_NONE;
}

/* Where a window goes: home, beside its neighbours, or anywhere. There is a free slot. */
static uint32_t choose_slot(gmi_manager_t *m, const gmi_window_t *w) {
  gmi_arena_t *a = gmi_window_arena(m, w);
  uint32_t home = home_of(m, w), below = w->index ? a->windows[w->index - 1].slot : GMI_NONE;
  uint32_t above = w->index + 1 < atomic_load(&a->window_count) ? a->windows[w->index + 1].slot : GMI_NONE;
  if (is_free(m, home)) return home;
  if (below != GMI_NONE && below + 1 < m->host.slot_count && is_free(m, below + 1)) return below + 1;
  if (above != GMI_NONE && above && is_free(m, above - 1)) return above - 1;
  uint32_t pair = free_run(m, home, 2);
  return pair != GMI_NONE ? pair : free_run(m, home, 1);
}

static void decommit_from(gmi_manager_t *m, uint64_t budget);
static void count_used(gmi_manager_t *m, uint32_t slots) {
  m->host_used += (uint64_t)slots << m->window_shift;
  if (m->host_used > m->stats.peak_bytes[GEMINI_TIER_HOST]) m->stats.peak_bytes[GEMINI_TIER_HOST] = m->host_used;
}

void gmi_host_slot_bind(gmi_manager_t *m, gmi_window_t *w, uint32_t slot) {
  mark_free(m, slot, false);
  m->host.slots[slot].window = w;
  m->host.slots[slot].failure = GEMINI_OK;
  w->slot = slot;
  count_used(m, 1);
}

void gmi_host_slot_drop(gmi_manager_t *m, gmi_window_t *w) {
  if (w->slot == GMI_NONE || w->graphs) return;
  uint32_t slot = w->slot;
  gmi_file_forgive(w);
  m->host.slots[slot].window = NULL;
  mark_free(m, slot, true);
  w->slot = GMI_NONE;
  m->host_used -= window_bytes(m);
  if (slot >= m->host.slot_count) decommit_from(m, m->config.host_bytes);
}

/* Blocks until nothing uses a slot. What failed is for who wants its window. */
static gemini_status_t slot_quiet(gmi_manager_t *m, gmi_slot_t *s) {
  if (atomic_load_explicit(&s->work_done, memory_order_acquire) < s->work_queued)
    gmi_lane_wait_slot(m, s, s->work_queued);
  gemini_status_t status = gmi_fence_sync(m, s->fence);
  if (!status) s->fence = 0;
  gmi_files_poll(m);
  return status;
}

void gmi_window_refilled(gmi_manager_t *m, gmi_window_t *w) {
  if (w->io) (void)slot_quiet(m, &m->host.slots[w->slot]); /* a read of bytes that are dead must not fail others */
  m->host.slots[w->slot].failure = GEMINI_OK;
  gmi_file_forgive(w);
}

bool gmi_window_work_pending(const gmi_manager_t *m, const gmi_window_t *w) {
  if (w->slot == GMI_NONE) return false;
  const gmi_slot_t *s = slot_of(m, w);
  return atomic_load_explicit(&s->work_done, memory_order_acquire) < s->work_queued;
}

gemini_status_t gmi_window_settle_host(gmi_manager_t *m, gmi_window_t *w) {
  if (w->slot == GMI_NONE) return GEMINI_OK;
  gemini_status_t status = slot_quiet(m, slot_of(m, w));
  if (status || !w->failed_read || !(w->valid & GMI_VALID_FILE)) return status ? status : gmi_files_reap(m, w);
  /* Who wants the window hears of an attempt of his own: the one that failed may have been begun long ago. */
  status = gmi_file_read(m, w, GEMINI_REASON_DEMAND);
  if (!status) status = slot_quiet(m, slot_of(m, w));
  return status ? status : gmi_files_reap(m, w);
}

/* ---- reclaim: slots whose window can do without, from those that cost nothing to those that must go to a file
 *
 * States are used once an iteration, in turn. Of what is used in turn, what was used last is used again last (Belady),
 * so the windows that were updated last go first; what stays is a set that needs no file. */
enum { RECLAIM_STALE, RECLAIM_CLEAN, RECLAIM_STATES, RECLAIM_DEFERRED, RECLAIM_ANY, RECLAIM_LEVELS };

void gmi_host_updated(gmi_manager_t *m, gmi_window_t *w) {
  gmi_host_t *h = &m->host;
  h->updated[h->updated_end++ % GMI_UPDATED] = w;
  if (h->updated_end - h->updated_first > GMI_UPDATED) h->updated_first++;
}
void gmi_host_forget(gmi_manager_t *m) { m->host.updated_first = m->host.updated_end; }

static bool reclaimable(gmi_manager_t *m, const gmi_window_t *w, int level) {
  if (!w || w->host_users || w->graphs || w->io || gmi_window_work_pending(m, w)) return false;
  if (!(w->valid & GMI_VALID_HOST)) return level == RECLAIM_STALE;
  if (w->valid & (GMI_VALID_DEVICE | GMI_VALID_FILE | GMI_VALID_ZERO)) return level == RECLAIM_CLEAN;
  uint32_t kind = gmi_window_arena(m, w)->kind;
  if (kind == GEMINI_KIND_PARAM || kind == GEMINI_KIND_GRAD) return level == RECLAIM_ANY;
  return level == (w->deferred ? RECLAIM_DEFERRED : RECLAIM_STATES);
}

/* The host copy goes, whose bytes are elsewhere. */
static void leave_slot(gmi_manager_t *m, gmi_window_t *w) {
  w->valid &= (uint8_t)~GMI_VALID_HOST;
  if (w->valid == GMI_VALID_DEVICE) atomic_fetch_or(&w->word, GMI_WINDOW_DIRTY);
  gmi_host_slot_drop(m, w);
}

/* The window updated last of those that can go. *busy_out: that will be one that is being updated. */
static gmi_window_t *updated_last(gmi_manager_t *m, bool *busy_out) {
  gmi_host_t *h = &m->host;
  *busy_out = false;
  for (uint64_t i = h->updated_end; i-- > h->updated_first;) {
    gmi_window_t *w = h->updated[i % GMI_UPDATED];
    bool state = reclaimable(m, w, RECLAIM_STATES);
    if (!state && i + 1 == h->updated_end && w->slot == GMI_NONE) h->updated_end--; /* gone since */
    if (state) return w;
    if (w->io || w->deferred || !gmi_window_work_pending(m, w)) continue;
    *busy_out = true;
    return NULL;
  }
  return NULL;
}

/* Frees one slot, or starts what will free one. A hand goes round, so that victims change. */
static gemini_status_t slot_reclaim(gmi_manager_t *m, bool *freed_out, bool *started_out) {
  *freed_out = *started_out = false;
  gemini_status_t status = gmi_files_reap(m, NULL);
  if (status) return status;
  for (int level = 0; level < (m->files ? RECLAIM_LEVELS : RECLAIM_STATES); level++) {
    /* Before what is wanted soon goes, one waits for what is under way. */
    if (level > RECLAIM_STATES && (m->io_count || gmi_lane_pending(m))) break;
    bool busy = false;
    gmi_window_t *last = level == RECLAIM_STATES ? updated_last(m, &busy) : NULL;
    if (last) {
      *started_out = true;
      return gmi_file_write(m, last, GEMINI_REASON_PRESSURE);
    }
    if (busy) break;
    for (uint32_t step = 0; step < m->host.slot_most; step++) {
      uint32_t slot = (uint32_t)(((uint64_t)m->host.hand + step) % m->host.slot_most);
      gmi_window_t *w = m->host.slots[slot].window;
      if (!reclaimable(m, w, level)) continue;
      m->host.hand = slot + 1;
      if (level <= RECLAIM_CLEAN) {
        if (level == RECLAIM_CLEAN) leave_slot(m, w);
        else gmi_host_slot_drop(m, w);
        *freed_out = true;
        return GEMINI_OK;
      }
      *started_out = true;
      return gmi_file_write(m, w, GEMINI_REASON_PRESSURE);
    }
  }
  return GEMINI_OK;
}

gemini_status_t gmi_host_room_soon(gmi_manager_t *m, uint32_t count, uint32_t ahead) {
  if (ahead < count) ahead = count;
  while (gmi_host_free(m) + m->io_writes < ahead) {
    bool freed, started;
    gemini_status_t status = slot_reclaim(m, &freed, &started);
    if (status == GEMINI_ERR_OOM_FILE) break; /* who needs the room now hears of it */
    if (status) return status;
    if (!freed && !started) break;
  }
  return GEMINI_OK;
}

gemini_status_t gmi_host_room(gmi_manager_t *m, uint32_t count) {
  if (gmi_host_free(m) >= count) return GEMINI_OK;
  if (gmi_files_reap(m, NULL)) gmi_log(m, GEMINI_LOG_WARNING, "%s", gmi_fail_message()); /* of earlier writes */
  while (gmi_host_free(m) < count) {
    bool freed, started;
    uint64_t events = gmi_lane_events(m);
    gemini_status_t status = slot_reclaim(m, &freed, &started);
    if (status && status != GEMINI_ERR_OOM_FILE) return status;
    if (!status && (freed || (started && m->io_writes < count - gmi_host_free(m)))) continue;
    bool busy = gmi_lane_pending(m) || m->io_count; /* before the events, of which the end of the last one is one */
    if (gmi_lane_events(m) != events) continue;
    if (!busy) {
      if (status) return status;
      return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                      "%s of %llu bytes does not fit in host memory: %llu of the budget %llu are in use%s",
                      count > 1 ? "a range of chunks" : "a chunk", (unsigned long long)count << m->window_shift,
                      (unsigned long long)m->host_used, (unsigned long long)m->config.host_bytes,
                      m->files ? " by chunks that are acquired" : " and there is no file tier");
    }
    gmi_lane_wait_event(m, events, GMI_WAIT_ROOM, 0); /* updates and transfers hold slots; one of them ends */
  }
  return GEMINI_OK;
}

gemini_status_t gmi_host_fits(gmi_manager_t *m, const char *what, uint64_t need_bytes,
                              bool (*inside)(const void *user, const gmi_window_t *w), const void *user) {
  uint64_t taken = 0;
  if (m->files) return GEMINI_OK;
  for (uint32_t s = 0; s < m->host.slot_most; s++) {
    const gmi_window_t *w = m->host.slots[s].window;
    if (m->host.slots[s].block) taken += window_bytes(m);
    if (!w || inside(user, w)) continue;
    bool clean = !(w->valid & GMI_VALID_HOST) || (w->valid & (GMI_VALID_DEVICE | GMI_VALID_ZERO));
    if (!clean || w->host_users || w->graphs) taken += window_bytes(m);
  }
  if (taken + need_bytes <= m->config.host_bytes) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                  "%s needs %llu bytes of host memory, of the budget %llu other chunks and blocks must keep %llu", what,
                  (unsigned long long)need_bytes, (unsigned long long)m->config.host_bytes, (unsigned long long)taken);
}

static gemini_status_t slot_assign(gmi_manager_t *m, gmi_window_t *w, uint32_t slot) {
  gemini_status_t status = gmi_host_commit(m, (uint64_t)slot << m->window_shift, window_bytes(m));
  if (!status) gmi_host_slot_bind(m, w, slot);
  return status;
}

gemini_status_t gmi_host_slot_take(gmi_manager_t *m, gmi_window_t *w) {
  if (w->slot != GMI_NONE) return GEMINI_OK;
  gemini_status_t status = gmi_host_room(m, 1);
  return status ? status : slot_assign(m, w, choose_slot(m, w));
}

/* ---- runs: windows of one range side by side */
static bool together(const gmi_arena_t *store, uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < count; i++)
    if (store->windows[first + i].slot == GMI_NONE || store->windows[first + i].slot != store->windows[first].slot + i)
      return false;
  return true;
}

/* May the window be moved to another slot? Not when somebody has its address. */
static bool movable(const gmi_window_t *w) {
  return !w || (w->host_users == w->batch_users && !w->batch_placed && !w->graphs);
}

/* What it costs to let the run begin at slot, in moves of a window's bytes; UINT32_MAX: it cannot. Who lies there
 * moves, too, away from its neighbours, and may come back for that. */
static uint32_t run_cost(const gmi_manager_t *m, const gmi_arena_t *store, uint32_t first, uint32_t count,
                         uint32_t slot) {
  if (slot > m->host.slot_count || count > m->host.slot_count - slot) return UINT32_MAX;
  uint32_t cost = 0;
  for (uint32_t i = 0; i < count; i++) {
    const gmi_window_t *want = &store->windows[first + i], *is = m->host.slots[slot + i].window;
    if (is == want) continue;
    if (m->host.slots[slot + i].block || !movable(is) || !movable(want)) return UINT32_MAX;
    cost += (want->slot != GMI_NONE ? 1U : 0U) + (is ? 3U : 0U);
  }
  return cost;
}

static void swap_bytes(uint8_t *a, uint8_t *b, uint64_t bytes) {
  uint8_t held[4096];
  for (uint64_t at = 0; at < bytes; at += sizeof held) {
    memcpy(held, a + at, sizeof held);
    memcpy(a + at, b + at, sizeof held);
    memcpy(b + at, held, sizeof held);
  }
}

/* Exchanges what two slots hold; either may be empty. Blocks until both are quiet. */
static gemini_status_t exchange(gmi_manager_t *m, uint32_t a, uint32_t b) {
  gemini_status_t status = slot_quiet(m, &m->host.slots[a]);
  if (!status) status = slot_quiet(m, &m->host.slots[b]);
  gmi_window_t *wa = m->host.slots[a].window, *wb = m->host.slots[b].window;
  for (int i = 0; i < 2 && !status; i++) /* an empty one may lie where nothing is yet */
    status = gmi_host_commit(m, (uint64_t)(i ? b : a) << m->window_shift, window_bytes(m));
  if (status) return status;
  bool bytes_a = wa && wa->valid & GMI_VALID_HOST, bytes_b = wb && wb->valid & GMI_VALID_HOST;
  uint8_t *pa = gmi_slot_address(m, a), *pb = gmi_slot_address(m, b);
  if (bytes_a && bytes_b) swap_bytes(pa, pb, window_bytes(m));
  else if (bytes_a) memcpy(pb, pa, window_bytes(m));
  else if (bytes_b) memcpy(pa, pb, window_bytes(m));
  gemini_status_t failure = m->host.slots[a].failure;
  m->host.slots[a].failure = m->host.slots[b].failure;
  m->host.slots[b].failure = failure;
  m->host.slots[a].window = wb;
  m->host.slots[b].window = wa;
  if (wa) wa->slot = b;
  if (wb) wb->slot = a;
  if (!wa != !wb) {
    mark_free(m, a, !wb);
    mark_free(m, b, !wa);
  }
  return GEMINI_OK;
}

gemini_status_t gmi_host_run(gmi_manager_t *m, gmi_arena_t *store, uint32_t first, uint32_t count) {
  if (together(store, first, count)) return GEMINI_OK;
  uint32_t missing = 0;
  for (uint32_t i = 0; i < count; i++) {
    gmi_window_t *w = &store->windows[first + i];
    missing += w->slot == GMI_NONE;
    w->host_users++; /* none of them may lose its slot while room is made for the others */
  }
  gemini_status_t status = gmi_host_room(m, missing);
  for (uint32_t i = 0; i < count; i++) store->windows[first + i].host_users--;
  if (status) return status;
  uint32_t best = GMI_NONE, least = UINT32_MAX, home = home_of(m, &store->windows[first]);
  /* Where every window has a home of its own, one that goes there stays there, and soon none moves any more. */
  if (m->host.home_end <= m->host.slot_count && run_cost(m, store, first, count, home) != UINT32_MAX) best = home;
  for (uint32_t i = 0; best == GMI_NONE && i < count + 2; i++) {
    uint32_t slot = i == count ? home : i == count + 1 ? free_run(m, home, count) : store->windows[first + i].slot;
    if (i < count && (slot == GMI_NONE || slot < i)) continue;
    if (i < count) slot -= i;
    uint32_t cost = slot == GMI_NONE ? UINT32_MAX : run_cost(m, store, first, count, slot);
    if (cost < least) least = cost, best = slot;
  }
  for (uint32_t slot = 0; best == GMI_NONE && slot < m->host.slot_count; slot++) {
    uint32_t cost = run_cost(m, store, first, count, slot);
    if (cost < least) least = cost, best = slot;
  }
  if (best == GMI_NONE)
    return gmi_fail(GEMINI_ERR_OOM_HOST, 0,
                    "%u chunks of arena %s cannot lie side by side in host memory: others that are acquired lie "
                    "between, in a budget of %llu bytes",
                    count, store->name, (unsigned long long)m->config.host_bytes);
  for (uint32_t i = 0; i < count && !status; i++) {
    gmi_window_t *w = &store->windows[first + i];
    uint32_t slot = best + i;
    if (w->slot == slot) continue;
    if (w->slot != GMI_NONE) {
      status = exchange(m, w->slot, slot);
      continue;
    }
    if (!is_free(m, slot)) {
      /* A free one outside the run: there are as many as windows without a slot. */
      uint32_t other = free_run(m, best + count < m->host.slot_count ? best + count : 0, 1);
      if (other >= best && other < best + count) other = free_run(m, 0, 1);
      status = exchange(m, slot, other);
    }
    if (!status) status = slot_assign(m, w, slot);
  }
  return status;
}

/* ---- budgets */
/* Gives back what lies behind the budget, but for parts where somebody still has an address. */
static void decommit_from(gmi_manager_t *m, uint64_t budget) {
  budget = grains(m, budget);
  for (uint64_t part = budget / m->host.part_bytes; part < m->host.part_count; part++) {
    uint64_t base = part * m->host.part_bytes, keep = budget > base ? budget - base : 0, end = base;
    if (m->host.committed[part] <= keep) continue;
    end += m->host.committed[part];
    bool used = false;
    for (uint64_t s = (base + keep) >> m->window_shift; s << m->window_shift < end; s++)
      used |= s >= m->host.slot_count && (m->host.slots[s].window || m->host.slots[s].block);
    if (!used) part_set(m, part, keep); /* refused: it stays, which does no harm */
  }
}

gemini_status_t gmi_host_resize(gmi_manager_t *m, uint64_t bytes) {
  if (bytes > gmi_reserve_size(m->host.reserve))
    return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "a host budget of %llu bytes is more than the %llu there were at open",
                    (unsigned long long)bytes, (unsigned long long)gmi_reserve_size(m->host.reserve));
  if (bytes > m->config.host_bytes) {
    gmi_limits_t limits;
    gemini_status_t status = gmi_limits_read("", &limits);
    if (!status)
      status = gmi_limits_check(&limits, "the growth of the host budget", bytes - m->config.host_bytes, false);
    if (status) return status;
  }
  if (!atomic_load(&m->window_bytes)) return GEMINI_OK;
  uint32_t count = budget_slots(m, bytes);
  /* Updates that wait for room may need more than there will be. */
  gemini_status_t queued = count < m->host.slot_count ? gmi_updates_queue(m, NULL) : GEMINI_OK;
  if (queued) return queued;
  while (m->host_used > (uint64_t)count << m->window_shift) {
    gemini_status_t status = gmi_host_room(m, gmi_host_free(m) + 1);
    if (status == GEMINI_ERR_OOM_HOST)
      return gmi_fail(status, 0, "%llu bytes must stay in host memory, more than the new budget, %llu",
                      (unsigned long long)m->host_used, (unsigned long long)bytes);
    if (status) return status;
  }
  use_slots(m, bytes);
  for (uint32_t s = m->host.slot_count; s < m->host.slot_most;
       s++) { /* those that somebody has the address of stay as long as he has it */
    gmi_window_t *w = m->host.slots[s].window;
    uint32_t inside = w && movable(w) ? free_run(m, 0, 1) : GMI_NONE;
    gemini_status_t status = inside != GMI_NONE ? exchange(m, s, inside) : GEMINI_OK;
    if (status) {
      use_slots(m, m->config.host_bytes);
      return status;
    }
  }
  decommit_from(m, bytes);
  return GEMINI_OK;
}

void gmi_host_released(gmi_manager_t *m, gmi_window_t *w) {
  if (w->slot != GMI_NONE && w->slot >= m->host.slot_count && movable(w)) {
    uint32_t behind = w->slot, inside = free_run(m, 0, 1);
    if (inside != GMI_NONE && exchange(m, behind, inside) == GEMINI_OK) decommit_from(m, m->config.host_bytes);
  }
}

/* ---- blocks of any size, in whole slots from the top of the budget down */
static gemini_status_t slots_to_blocks(void *user, uint64_t offset, uint64_t size) {
  gmi_manager_t *m = user;
  uint32_t first = (uint32_t)(offset >> m->window_shift), end = (uint32_t)((offset + size) >> m->window_shift);
  gemini_status_t status = GEMINI_OK;
  uint32_t slot = first;
  for (; !status && slot < end; slot++) {
    if (slot >= m->host.slot_count)
      status = gmi_fail(GEMINI_ERR_BUSY, 0, "the host budget, %llu bytes, has shrunk since the first block",
                        (unsigned long long)m->config.host_bytes);
    if (!status) status = gmi_host_room(m, 1);
    if (!status && !is_free(m, slot)) {
      uint32_t other = free_run(m, 0, 1);
      if (!movable(m->host.slots[slot].window))
        status = gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s that cannot move lies where a block would",
                          gmi_window_arena(m, m->host.slots[slot].window)->name);
      else status = exchange(m, slot, other);
    }
    if (!status) status = gmi_fence_sync(m, m->host.slots[slot].fence);
    if (!status) status = gmi_host_commit(m, (uint64_t)slot << m->window_shift, window_bytes(m));
    if (status) break;
    mark_free(m, slot, false);
    m->host.slots[slot].block = true;
    count_used(m, 1);
  }
  while (status && slot-- > first) {
    m->host.slots[slot].block = false;
    mark_free(m, slot, true);
    m->host_used -= window_bytes(m);
  }
  return status;
}

static void slots_from_blocks(void *user, uint64_t offset, uint64_t size) {
  gmi_manager_t *m = user;
  for (uint64_t slot = offset >> m->window_shift; slot < (offset + size) >> m->window_shift; slot++) {
    m->host.slots[slot].block = false;
    mark_free(m, (uint32_t)slot, true);
    m->host_used -= window_bytes(m);
  }
  if ((offset + size) >> m->window_shift > m->host.slot_count) decommit_from(m, m->config.host_bytes);
}

/* Live blocks, and their bytes. */
static gmi_blocks_figures_t blocks_figures(const gmi_manager_t *m) {
  gmi_blocks_figures_t figures = { 0 };
  if (m->host.blocks) gmi_blocks_figures(m->host.blocks, &figures);
  return figures;
}
uint64_t gmi_host_blocks(gmi_manager_t *m) { return blocks_figures(m).block_bytes; }

static gemini_status_t host_alloc(gmi_manager_t *m, uint64_t size, uint64_t alignment, void **ptr_out) {
  if (!ptr_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "ptr_out is NULL");
  if (!size) return gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is 0");
  if (alignment & (alignment - 1) || alignment > (UINT64_C(1) << 21))
    return gmi_fail(GEMINI_ERR_INVALID, 0, "alignment is %llu, must be a power of two up to 2 MiB",
                    (unsigned long long)alignment);
  if (size > m->config.host_bytes)
    return gmi_fail(GEMINI_ERR_OOM_HOST, 0, "size_bytes is %llu, more than the host budget, %llu",
                    (unsigned long long)size, (unsigned long long)m->config.host_bytes);
  gemini_status_t status = gmi_cut(m);
  if (!status && !m->host.slot_count)
    status = gmi_fail(GEMINI_ERR_OOM_HOST, 0, "the host budget, %llu bytes, holds no chunk of %llu bytes",
                      (unsigned long long)m->config.host_bytes, (unsigned long long)window_bytes(m));
  if (!status && m->host.blocks && !blocks_figures(m).block_count && m->host.block_slots != m->host.slot_count) {
    gmi_host_blocks_close(m); /* the budget has changed */
  }
  if (!status && !m->host.blocks) {
    m->host.block_slots = m->host.slot_count;
    gmi_blocks_config_t config = { .base = m->host.base,
                                   .size_bytes = (uint64_t)m->host.slot_count << m->window_shift,
                                   .grain_bytes = window_bytes(m),
                                   .commit = slots_to_blocks,
                                   .decommit = slots_from_blocks,
                                   .user = m };
    status = gmi_blocks_open(&config, &m->host.blocks);
  }
  void *block = NULL;
  if (!status) status = gmi_blocks_alloc(m->host.blocks, size, alignment, &block);
  if (status == GEMINI_ERR_BUSY) status = gmi_fail(GEMINI_ERR_OOM_HOST, 0, "%s", gmi_fail_message());
  if (status) return status;
  gmi_stat_set(&m->stats.host_block_bytes, gmi_host_blocks(m));
  *ptr_out = block;
  return GEMINI_OK;
}
gemini_status_t gemini_host_alloc(gemini_manager_t mgr, uint64_t size_bytes, uint64_t alignment, void **ptr_out) {
  API_LOCKED(host_alloc(m, size_bytes, alignment, ptr_out));
}

static gemini_status_t host_free(gmi_manager_t *m, void *ptr) {
  if (!ptr) return GEMINI_OK;
  gemini_status_t status = m->host.blocks ? gmi_blocks_free(m->host.blocks, ptr) : GEMINI_ERR_INVALID;
  if (status == GEMINI_ERR_INVALID) return gmi_fail(status, 0, "%p is no live block of this manager", ptr);
  gmi_stat_set(&m->stats.host_block_bytes, gmi_host_blocks(m));
  gmi_updates_room(m);
  return status;
}
gemini_status_t gemini_host_free(gemini_manager_t mgr, void *ptr) { API_LOCKED(host_free(m, ptr)); }
