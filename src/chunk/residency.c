/* Where chunks are: frames, fetches, evictions. Everything here runs under the manager's lock and only queues device
 * work; it decides nothing but which victim makes room when no plan says so.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/nvtx.h"
#include "chunk/arena.h"
#include "chunk/cut.h"
#include "chunk/files.h"
#include "chunk/heap.h"
#include "chunk/host.h"
#include "chunk/nonmodel.h"
#include "chunk/residency.h"
#include "core/manager.h"
#include "core/streams.h"

void gmi_rate_add(gmi_rate_t *rate, double ns) {
  rate->samples++;
  /* The first one does not count once there is another: what is done for the first time loads code, or touches
   * memory. */
  double weight = rate->samples <= 2 ? 1.0 : rate->samples < 33 ? 1.0 / (double)(rate->samples - 1) : 1.0 / 32;
  rate->mean += (ns - rate->mean) * weight;
}

static void peak(gmi_manager_t *m, uint32_t tier, uint64_t used) {
  if (used > m->stats.peak_bytes[tier]) m->stats.peak_bytes[tier] = used;
}

/* ---- measured times */
void gmi_reap(gmi_manager_t *m) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < m->rate.timed_count; i++) {
    if (!gmi_fence_reached(m, m->rate.timed[i].end)) {
      m->rate.timed[kept++] = m->rate.timed[i];
      continue;
    }
    uint64_t begin, end;
    gmi_fence_t b = m->rate.timed[i].begin, e = m->rate.timed[i].end;
    gmi_link_t *link = m->rate.timed[i].link;
    if (m->device.ops->stream.mark_time(m->device.self, gmi_fence_stream(b), gmi_fence_mark(b), &begin) == GEMINI_OK &&
        m->device.ops->stream.mark_time(m->device.self, gmi_fence_stream(e), gmi_fence_mark(e), &end) == GEMINI_OK) {
      gmi_rate_add(link ? &link->chunk_ns : &m->rate.device_update,
                   (double)(end - begin) / (double)m->rate.timed[i].elements);
      if (link) gmi_link_measured(m, link);
    }
  }
  m->rate.timed_count = kept;
}

/* ---- mapping */
gemini_status_t gmi_map(gmi_manager_t *m, void *address, uint32_t frame, gmi_mapping_t *mapping) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  if (mapping->frame_1 == frame + 1) return GEMINI_OK;
  /* Work that uses the frame it has lost may still run: let it finish. */
  gemini_status_t status = mapping->frame_1 ? gmi_fence_sync(m, mapping->left) : GEMINI_OK;
  if (status) return status;
  status = m->device.ops->memory.map(m->device.self, address, m->frames.at[frame].handle, gmi_frame_bytes(m));
  if (status) m->device.ops->memory.unmap(m->device.self, address, gmi_frame_bytes(m));
  mapping->frame_1 = status ? 0 : frame + 1;
  return status ? gmi_fail(status, 0, "the device could not map %llu bytes", (unsigned long long)gmi_frame_bytes(m))
                : status;
}

static void unmap(gmi_manager_t *m, void *address, gmi_mapping_t *mapping) {
  if (!mapping->frame_1) return;
  gmi_fence_sync(m, mapping->left);
  if (!m->device.ops->memory.unmap(m->device.self, address, gmi_frame_bytes(m))) mapping->frame_1 = 0;
}

void gmi_map_leave(gmi_manager_t *m, void *address, gmi_mapping_t *mapping, gmi_fence_t fence) {
  mapping->left = fence;
  if (m->config.flags & GEMINI_CONFIG_STRICT) unmap(m, address, mapping);
}

/* frame GMI_NONE: whatever it is mapped to. */
static void unmap_chunks(gmi_manager_t *m, const gmi_arena_t *store, uint32_t frame) {
  uint32_t count = store->chunks ? atomic_load(&store->chunk_count) : 0;
  for (uint32_t i = 0; i < count; i++) {
    gmi_chunk_t *c = &store->chunks[i];
    if (frame == GMI_NONE || gmi_chunk_mapping(c)->frame_1 == frame + 1)
      unmap(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c));
  }
}
static void unmap_from(gmi_manager_t *m, uint32_t frame) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && a->store == i) unmap_chunks(m, a, frame);
  }
  for (uint64_t page = 0; page < m->nonmodel.page_high; page++) {
    gmi_mapping_t *mapping = &m->nonmodel.pages[page].mapping;
    if (frame == GMI_NONE || mapping->frame_1 == frame + 1)
      unmap(m, m->nonmodel.base + page * gmi_frame_bytes(m), mapping);
  }
}
void gmi_arena_unmap(gmi_manager_t *m, const gmi_arena_t *store) { unmap_chunks(m, store, GMI_NONE); }
void gmi_unmap_all(gmi_manager_t *m) { unmap_from(m, GMI_NONE); }

/* ---- frames */
static gemini_status_t frames_reserve(gmi_manager_t *m, uint32_t count) {
  if (count <= m->frames.capacity) return GEMINI_OK;
  gmi_frame_t *frames = realloc(m->frames.at, count * sizeof *frames);
  if (frames) m->frames.at = frames;
  uint32_t *unmade = realloc(m->frames.unmade, count * sizeof *unmade);
  if (unmade) m->frames.unmade = unmade;
  if (!frames || !unmade)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of %u frames", count);
  for (uint32_t i = count; i-- > m->frames.capacity;) {
    m->frames.at[i] = (gmi_frame_t){ 0 };
    m->frames.unmade[m->frames.unmade_count++] = i;
  }
  m->frames.capacity = count;
  return GEMINI_OK;
}

uint32_t gmi_frames_of(const gmi_manager_t *m, uint64_t frame_bytes) {
  uint64_t count = (m->config.device_bytes - m->config.device_margin_bytes) / frame_bytes;
  return count < UINT32_MAX - 1 ? (uint32_t)count : UINT32_MAX - 1;
}

gemini_status_t gmi_frames_prepare(gmi_manager_t *m, gmi_cut_t *cut) {
  uint32_t count = gmi_frames_of(m, cut->sizes.frame_bytes);
  if (!count)
    return gmi_fail(GEMINI_ERR_OOM_DEVICE, 0, "the device budget without its margin holds no frame of %llu bytes",
                    (unsigned long long)cut->sizes.frame_bytes);
  cut->frame_count = count;
  cut->frames = calloc(count, sizeof *cut->frames);
  cut->unmade = malloc(count * sizeof *cut->unmade);
  if (!cut->frames || !cut->unmade)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of %u frames", cut->frame_count);
  return GEMINI_OK;
}

void gmi_frames_install(gmi_manager_t *m, gmi_cut_t *cut) {
  m->frames.at = cut->frames;
  m->frames.unmade = cut->unmade;
  m->frames.capacity = m->frames.count = cut->frame_count;
  cut->frames = NULL;
  cut->unmade = NULL;
  for (uint32_t i = m->frames.count; i-- > 0;) m->frames.unmade[m->frames.unmade_count++] = i;
}

void gmi_frames_free(gmi_manager_t *m) {
  for (uint32_t i = 0; i < m->frames.capacity; i++)
    if (m->frames.at[i].handle)
      m->device.ops->memory.frame_destroy(m->device.self, m->frames.at[i].handle, gmi_frame_bytes(m));
  free(m->frames.at);
  free(m->frames.unmade);
  m->frames.at = NULL;
  m->frames.unmade = NULL;
  m->frames.used = m->frames.capacity = m->frames.count = m->frames.made = m->frames.free_count =
      m->frames.unmade_count = 0;
}

/* The frame that is wished for, when it is free; else the one given up longest ago. */
static uint32_t free_take(gmi_manager_t *m, uint32_t wish) {
  uint32_t frame = wish < m->frames.capacity && m->frames.at[wish].free ? wish : m->frames.free_first;
  gmi_frame_t *f = &m->frames.at[frame];
  if (frame == m->frames.free_first) m->frames.free_first = f->next;
  else m->frames.at[f->previous].next = f->next;
  if (frame == m->frames.free_last) m->frames.free_last = f->previous;
  else m->frames.at[f->next].previous = f->previous;
  f->free = false;
  m->frames.free_count--;
  return frame;
}

void gmi_frame_give(gmi_manager_t *m, uint32_t frame, gmi_fence_t ready) {
  gmi_frame_t *f = &m->frames.at[frame];
  GMI_ASSERT(gmi_lock_is_mine(m));
  GMI_ASSERT(frame < m->frames.capacity && f->handle && !f->free && !f->chunk && m->frames.used);
  f->ready = ready;
  f->chunk = NULL;
  f->free = true;
  f->next = GMI_NONE;
  f->previous = m->frames.free_count ? m->frames.free_last : GMI_NONE;
  if (m->frames.free_count) m->frames.at[m->frames.free_last].next = frame;
  else m->frames.free_first = frame;
  m->frames.free_last = frame;
  m->frames.free_count++;
  m->frames.used--;
}

/* The resident chunk whose next use is furthest, as far as known; among the unknown, the one used longest ago.
 * clean: only one that leaves without a copy. */
static gmi_chunk_t *choose_victim(gmi_manager_t *m, bool clean) {
  gmi_chunk_t *best = NULL;
  uint64_t best_next = 0, best_last = 0;
  for (uint32_t i = 0; i < m->frames.capacity; i++) {
    gmi_chunk_t *c = m->frames.at[i].chunk;
    if (!c || gmi_chunk_is_pinned(c) || gmi_chunk_device_users(c)) continue;
    if (clean && gmi_chunk_has_only(c, GMI_VALID_DEVICE)) continue;
    uint64_t next = m->trace.advice->next_use(m, c), last = gmi_chunk_touched(c);
    if (best && (next < best_next || (next == best_next && last >= best_last))) continue;
    best = c;
    best_next = next;
    best_last = last;
  }
  return best;
}

gemini_status_t gmi_oom_device(gmi_manager_t *m, uint64_t need_bytes) {
  uint64_t pinned = 0, acquired = 0, frame_bytes = gmi_frame_bytes(m);
  for (uint32_t i = 0; i < m->frames.capacity; i++) {
    gmi_chunk_t *c = m->frames.at[i].chunk;
    if (!c) continue;
    if (gmi_chunk_device_users(c)) acquired += frame_bytes;
    else if (gmi_chunk_is_pinned(c)) pinned += frame_bytes;
  }
  const char *op = m->trace.advice->op_name(m);
  return gmi_fail(
      GEMINI_ERR_OOM_DEVICE, 0,
      "%s%s%llu more bytes of device memory are needed: of the budget %llu less margin %llu, chunks "
      "acquired hold %llu, pinned %llu, graphs %llu, non-model memory %llu (%llu of it live)",
      op ? op : "", op ? ": " : "", (unsigned long long)need_bytes, (unsigned long long)m->config.device_bytes,
      (unsigned long long)m->config.device_margin_bytes, (unsigned long long)acquired, (unsigned long long)pinned,
      (unsigned long long)m->graphs.frames * frame_bytes, (unsigned long long)m->nonmodel.frames * frame_bytes,
      (unsigned long long)(m->nonmodel.heap ? gmi_heap_bytes_used(m->nonmodel.heap) : 0));
}

gemini_status_t gmi_frame_take(gmi_manager_t *m, const gmi_mapping_t *mapping, uint32_t reason, uint32_t flags,
                               uint32_t *frame_out) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint32_t frame, wish = mapping && mapping->frame_1 ? mapping->frame_1 - 1 : GMI_NONE;
  if (wish != GMI_NONE && m->frames.at[wish].free) {
    frame = free_take(m, wish);
  } else if (m->frames.made < m->frames.count && m->frames.unmade_count &&
             (!m->frames.free_count || !gmi_fence_reached(m, m->frames.at[m->frames.free_first].ready))) {
    frame = m->frames.unmade[m->frames.unmade_count - 1];
    gemini_status_t status =
        m->device.ops->memory.frame_create(m->device.self, gmi_frame_bytes(m), &m->frames.at[frame].handle);
    if (status)
      return gmi_fail(status, 0, "the device could not create a frame of %llu bytes",
                      (unsigned long long)gmi_frame_bytes(m));
    m->frames.unmade_count--;
    m->frames.made++;
    m->frames.at[frame].ready = 0;
  } else if (m->frames.free_count) {
    frame = free_take(m, GMI_NONE);
  } else if (gmi_heap_reclaim(m, &frame)) {
    m->frames.used--; /* counted again below */
  } else {
    if (!(flags & GMI_TAKE_EVICT)) return GEMINI_ERR_OOM_DEVICE; /* the caller goes without: no message */
    gemini_status_t status = GEMINI_OK;
    bool clean = false;
    do {
      gmi_chunk_t *victim = choose_victim(m, clean);
      if (!victim && clean) break;
      if (!victim) return gmi_oom_device(m, gmi_frame_bytes(m));
      status = gmi_chunk_evict(m, victim, reason);
      /* No place for its bytes below: then one that needs none. BUSY: somebody acquired it since it was chosen. */
      if (!clean && (status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_OOM_FILE)) clean = true;
      else if (status != GEMINI_ERR_BUSY) break;
    } while (true);
    if (status) return status;
    frame = free_take(m, GMI_NONE);
  }
  m->frames.used++;
  peak(m, GEMINI_TIER_DEVICE, m->frames.used * gmi_frame_bytes(m));
  *frame_out = frame;
  return GEMINI_OK;
}

gemini_status_t gmi_frames_resize(gmi_manager_t *m, uint32_t frame_count) {
  uint64_t memory = frame_count * gmi_frame_bytes(m);
  gemini_status_t status = frames_reserve(m, frame_count);
  if (status) return status;
  while (m->frames.made > frame_count) {
    uint32_t frame;
    if (m->frames.free_count) {
      frame = free_take(m, GMI_NONE);
    } else {
      uint32_t before = m->frames.count;
      m->frames.count = m->frames.made; /* no new ones meanwhile */
      status = gmi_frame_take(m, NULL, GEMINI_REASON_CALLER, GMI_TAKE_EVICT, &frame);
      m->frames.count = before;
      if (status) return status; /* those evicted so far stay out; nothing is lost */
      m->frames.used--;
    }
    status = gmi_fence_sync(m, m->frames.at[frame].ready);
    unmap_from(m, frame); /* old addresses still map it */
    if (!status && m->device.ops->memory.frame_destroy(m->device.self, m->frames.at[frame].handle, gmi_frame_bytes(m)))
      status = gmi_fail(GEMINI_ERR_DEVICE, 0, "the device could not free a frame of %llu bytes",
                        (unsigned long long)gmi_frame_bytes(m));
    if (status) {
      m->frames.used++; /* gmi_frame_give() counts it off again */
      gmi_frame_give(m, frame, m->frames.at[frame].ready);
      return status;
    }
    m->frames.at[frame] = (gmi_frame_t){ 0 };
    m->frames.unmade[m->frames.unmade_count++] = frame;
    m->frames.made--;
  }
  status = gmi_device_resize(m, memory);
  if (!status) m->frames.count = frame_count;
  return status;
}

/* ---- moves */
void gmi_chunk_wrote(gmi_manager_t *m, gmi_chunk_t *c) {
  gmi_file_supersede(c);
  if (!gmi_chunk_has_only(c, GMI_VALID_DEVICE)) gmi_file_drop_block(m, c, gmi_chunk_wrote_device(m, c));
}

static void time_copy(gmi_manager_t *m, gmi_link_t *link, gmi_fence_t begin, gmi_fence_t end) {
  if (m->rate.timed_count == sizeof m->rate.timed / sizeof *m->rate.timed) return;
  m->rate.timed[m->rate.timed_count].begin = begin;
  m->rate.timed[m->rate.timed_count].end = end;
  m->rate.timed[m->rate.timed_count].elements = 1; /* a chunk */
  m->rate.timed[m->rate.timed_count++].link = link;
}

static gemini_status_t queue_copy(gmi_manager_t *m, gmi_chunk_t *c, gmi_link_t *link, uint32_t reason,
                                  gmi_fence_t *fence_out) {
  const uint32_t stream = link->stream;
  gmi_fence_t begin, end;
  gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
  uint64_t bytes = gmi_copy_bytes(m, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST);
  gemini_status_t status = gmi_fence_wait(m, stream, slot->fence);
  if (!status && gmi_chunk_work_pending(m, c))
    status = m->device.ops->stream.wait_flag(m->device.self, stream, &slot->work_done, slot->work_queued);
  if (!status) status = gmi_fence_now(m, stream, &begin);
  bool queued = !status; /* else who uses the slot's bytes is still whom its fence says */
  if (queued) {
    void *device = gmi_chunk_device(m, c), *host = gmi_chunk_host(m, c);
    status = gmi_link_is_fetch(link)
                 ? m->device.ops->queue.copy(m->device.self, stream, device, host, bytes, GMI_COPY_H2D)
                 : m->device.ops->queue.copy(m->device.self, stream, host, device, bytes, GMI_COPY_D2H);
  }
  if (!status) status = gmi_fence_now(m, stream, &end);
  if (status && queued) { /* it may be all the same */
    slot->fence = gmi_fence_later(m, stream);
    if (!gmi_link_is_fetch(link)) gmi_chunk_copied(c, slot->fence);
  }
  if (status) return gmi_fail(status, 0, "the device could not queue a copy of %llu bytes", (unsigned long long)bytes);
  time_copy(m, link, begin, end);
  gmi_link_count(m, link, reason, 1);
  m->trace.observer->chunk_copied(m, c, link, reason, begin, end);
  slot->fence = end; /* the older ones are before it on the same stream, or it waited for them */
  if (!gmi_link_is_fetch(link)) gmi_chunk_copied(c, end);
  *fence_out = end;
  return GEMINI_OK;
}

void gmi_move_name(gmi_manager_t *m, const gmi_chunk_t *c, uint32_t reason, char name_out[GMI_MOVE_NAME_BYTES]) {
  static const char *const reasons[] = { "demand", "plan", "pressure", "caller", "update" };
  snprintf(name_out, GMI_MOVE_NAME_BYTES, "%s %u (%s)", gmi_chunk_arena(m, c)->name, c->index, reasons[reason]);
}

/* Queues one chunk's copy between its frame and its host slot; fence_out is reached when it is done. */
static gemini_status_t copy_chunk(gmi_manager_t *m, gmi_chunk_t *c, gmi_link_t *link, uint32_t reason,
                                  gmi_fence_t *fence_out) {
  if (!gmi_nvtx_on()) return queue_copy(m, c, link, reason, fence_out);
  char name[GMI_MOVE_NAME_BYTES], range[GMI_MOVE_NAME_BYTES + 8];
  gmi_move_name(m, c, reason, name);
  snprintf(range, sizeof range, "%s %s", gmi_link_is_fetch(link) ? "fetch" : "evict", name);
  gmi_nvtx_push(range);
  gemini_status_t status = queue_copy(m, c, link, reason, fence_out);
  gmi_nvtx_pop();
  return status;
}

gemini_status_t gmi_chunk_fetch(gmi_manager_t *m, gmi_chunk_t *c, bool fresh, uint32_t reason, uint32_t flags) {
  if (gmi_chunk_is_resident(c)) return GEMINI_OK;
  const char *why = gmi_chunk_busy(c, GMI_TO_FETCH);
  if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", gmi_chunk_arena(m, c)->name, why);
  if (gmi_chunk_io(c)) gmi_files_poll(m);
  gemini_status_t status = GEMINI_OK;
  if (!fresh && !gmi_chunk_has(c, GMI_VALID_HOST | GMI_VALID_ZERO)) { /* in a file only */
    status = gmi_host_slot_take(m, c);
    if (!status) status = gmi_file_read(m, c, reason);
    if (status) return status;
  }
  /* What comes from a file is waited for here: a copy of bytes that did not come could not be taken back. */
  if (!fresh && gmi_chunk_io(c) && !gmi_chunk_has(c, GMI_VALID_ZERO) && (status = gmi_chunk_settle_host(m, c)))
    return status;
  uint32_t frame;
  gmi_chunk_hold_host(m, c, false); /* its slot must outlive the search for a frame */
  status = gmi_frame_take(m, gmi_chunk_mapping(c), reason == GEMINI_REASON_DEMAND ? GEMINI_REASON_PRESSURE : reason,
                          flags, &frame);
  gmi_chunk_unhold_host(m, c, false);
  if (status) return status;
  gmi_fence_t ready = m->frames.at[frame].ready, arrive = ready;
  status = gmi_map(m, gmi_chunk_device(m, c), frame, gmi_chunk_mapping(c));
  bool mapped = !status;
  gmi_link_t *link = gmi_link_in(m);
  if (!status && !fresh) {
    status = gmi_fence_wait(m, link->stream, ready);
    if (!status && gmi_chunk_has(c, GMI_VALID_HOST)) {
      status = copy_chunk(m, c, link, reason, &arrive);
    } else if (!status) {
      status = gmi_device_zero(m, link->stream, gmi_chunk_device(m, c), gmi_frame_bytes(m));
      if (!status) status = gmi_fence_now(m, link->stream, &arrive);
    }
  }
  if (status) {
    /* A copy may be queued all the same, without having waited for who used the frame before. */
    ready = gmi_fence_join(m, ready, gmi_fence_later(m, link->stream));
    gmi_frame_give(m, frame, ready);
    if (mapped) gmi_map_leave(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c), ready);
    return status;
  }
  /* Should a fresh chunk's batch fail before its writer has it, the copies elsewhere still count. */
  gmi_chunk_arrived(m, c, frame, arrive, fresh);
  m->trace.observer->counters_change(m);
  return GEMINI_OK;
}

/* The frame that it had goes on behind fence, and so does the address. */
static void give_frame(gmi_manager_t *m, gmi_chunk_t *c, uint32_t frame, gmi_fence_t fence) {
  gmi_frame_give(m, frame, fence);
  gmi_map_leave(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c), fence);
  m->trace.observer->counters_change(m);
}

void gmi_chunk_drop_device(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t word;
  if (!gmi_chunk_is_resident(c)) return;
  bool departs = gmi_chunk_departs(c, &word);
  GMI_ASSERT(departs);
  (void)departs;
  gmi_fence_t used = gmi_chunk_used(m, c); /* copies out of the frame included */
  give_frame(m, c, gmi_chunk_departed(m, c, 0, used), used);
}

void gmi_chunk_host_wrote(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t frame, block;
  gmi_fence_t used = gmi_chunk_used(m, c);
  gmi_chunk_wrote_host(m, c, &frame, &block);
  if (frame != GMI_NONE) give_frame(m, c, frame, used);
  gmi_file_drop_block(m, c, block);
}

gemini_status_t gmi_chunk_evict(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  if (!gmi_chunk_is_resident(c)) return GEMINI_OK;
  const char *why = gmi_chunk_busy(c, GMI_TO_EVICT);
  if (why)
    return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s at offset %llu is %s", gmi_chunk_arena(m, c)->name,
                    (unsigned long long)c->index << m->cut.chunk_shift, why);
  bool copy = gmi_chunk_has_only(c, GMI_VALID_DEVICE);
  gemini_status_t status = copy ? gmi_host_slot_take(m, c) : GEMINI_OK;
  if (status) return status;
  uint32_t word;
  if (!gmi_chunk_departs(c, &word)) /* from here on nobody can acquire it without the lock */
    return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s was acquired meanwhile", gmi_chunk_arena(m, c)->name);
  if (!copy) {
    gmi_fence_t used = gmi_chunk_used(m, c);
    give_frame(m, c, gmi_chunk_departed(m, c, 0, used), used);
    return GEMINI_OK;
  }
  gmi_chunk_refilled(m, c);
  gmi_fence_t fence = 0; /* the copy is behind all uses, and so is what comes after it */
  status = gmi_chunk_wait(m, gmi_link_out(m)->stream, c, GEMINI_READ_WRITE);
  if (!status) status = copy_chunk(m, c, gmi_link_out(m), reason, &fence);
  if (status) {
    gmi_chunk_departs_not(c, word);
    return status;
  }
  give_frame(m, c, gmi_chunk_departed(m, c, GMI_VALID_HOST, fence), fence);
  return GEMINI_OK;
}

gemini_status_t gmi_chunk_to_host(gmi_manager_t *m, gmi_chunk_t *c, bool drop, uint32_t reason) {
  if (gmi_chunk_io(c)) gmi_files_poll(m);
  if (!gmi_chunk_has(c, GMI_VALID_HOST)) {
    gemini_status_t status = gmi_host_slot_take(m, c);
    if (status) return status;
    if (gmi_chunk_has(c, GMI_VALID_ZERO | GMI_VALID_DEVICE)) gmi_chunk_refilled(m, c);
    if (gmi_chunk_has(c, GMI_VALID_ZERO)) {
      status = gmi_chunk_settle_host(m, c);
      if (!status) memset(gmi_chunk_host(m, c), 0, gmi_slot_bytes(m));
    } else if (gmi_chunk_has(c, GMI_VALID_DEVICE)) {
      gmi_fence_t fence;
      if (!gmi_chunk_unsettle(c, GMI_CHUNK_WRITERS)) /* nobody may write it on its way, nor when it counts as clean */
        return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired for writing", gmi_chunk_arena(m, c)->name);
      status = gmi_chunk_wait(m, gmi_link_out(m)->stream, c, GEMINI_READ);
      if (!status) status = copy_chunk(m, c, gmi_link_out(m), reason, &fence);
    } else {
      status = gmi_file_read(m, c, reason);
    }
    if (status) return status;
    gmi_chunk_host_valid(m, c);
  }
  return drop ? gmi_chunk_evict(m, c, reason) : GEMINI_OK;
}

gemini_status_t gmi_chunk_to_file(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  const char *why = gmi_chunk_busy(c, GMI_TO_LEAVE_HOST);
  if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", gmi_chunk_arena(m, c)->name, why);
  gmi_files_poll(m);
  gmi_file_forgive(c); /* what could not be read is where it shall be */
  gemini_status_t status = gmi_chunk_evict(m, c, reason);
  if (!status) status = gmi_chunk_settle_host(m, c);
  if (!status && !gmi_chunk_has(c, GMI_VALID_FILE | GMI_VALID_ZERO)) {
    status = gmi_file_write(m, c, reason);
    if (!status) status = gmi_chunk_settle_host(m, c);
    if (!status && !gmi_chunk_has(c, GMI_VALID_FILE)) status = gmi_files_reap(m, NULL); /* which tells why */
  }
  if (status) return status;
  gmi_chunk_below_host(m, c);
  gmi_host_slot_drop(m, c);
  return GEMINI_OK;
}

void gmi_chunk_forget(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t frame, block;
  gmi_chunk_settle_host(m, c);
  gmi_fence_t used = gmi_chunk_used(m, c);
  gmi_chunk_zeroed(m, c, &frame, &block);
  if (frame != GMI_NONE) give_frame(m, c, frame, used);
  gmi_host_slot_drop(m, c);
  gmi_file_drop_block(m, c, block);
}
