/* The device tier: the pool of frames, mapping frames at chunk addresses, fetching and evicting chunks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A fetch takes a frame, maps it at the chunk's address and queues a copy from the host slot on the link's stream. An
 * eviction queues the copy back, when the device copy is the only one, and returns the frame to the pool. Neither waits
 * for its copy: each frame, slot and mapping carries a fence, and the next user queues its work behind that fence. A
 * frame therefore changes owner while queued work still uses it, and the calling thread rarely waits for the device.
 *
 * The only policy here is the choice of a victim when a frame is needed and no plan has made one free.
 *
 * Threads: any thread that holds the manager's lock. */
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
#include "chunk/shard.h"
#include "core/manager.h"
#include "core/streams.h"

void gmi_rate_add(gmi_rate_t *rate, double ns) {
  rate->samples++;
  /* The second sample replaces the first, which includes one-off costs (loading code, first touch of memory). From then
   * on this is the mean of the samples after the first, past 32 of them an exponential moving average. */
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
      uint64_t *shortest = m->rate.timed[i].shortest;
      if (shortest) {
        uint64_t each = end > begin ? (end - begin) / m->rate.timed[i].elements : 0;
        if (!*shortest || each < *shortest) *shortest = each ? each : 1;
        continue;
      }
      gmi_rate_add(link ? &link->chunk_ns : &m->rate.device_update,
                   (double)(end - begin) / (double)m->rate.timed[i].elements);
      if (link) gmi_link_measured(m, link);
    }
  }
  m->rate.timed_count = kept;
}

/* ---- mapping
 *
 * A mapping outlives residency, because queued work may still use the address and because mapping and unmapping cost
 * the calling thread about 0.4 ms per 16 MiB chunk on a GPU. Several addresses may therefore map one frame; only the
 * chunk that owns the frame may be used. With GEMINI_CONFIG_STRICT, a chunk is unmapped as soon as it loses its frame,
 * so that an access without an acquire faults. */
gemini_status_t gmi_map(gmi_manager_t *m, void *address, uint32_t frame, gmi_mapping_t *mapping) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  if (mapping->frame_1 == frame + 1) return GEMINI_OK;
  /* Queued work may still use the old frame through this address; a remap under it would redirect its accesses. */
  gemini_status_t status = mapping->frame_1 ? gmi_fence_sync(m, mapping->left) : GEMINI_OK;
  if (status) return status;
  status = m->device.ops->memory.map(m->device.self, address, m->frames.at[frame].handle, gmi_frame_bytes(m));
  /* A failed map may have removed the old mapping: make the address unmapped for certain, so that the record is
   * true. */
  if (status) m->device.ops->memory.unmap(m->device.self, address, gmi_frame_bytes(m));
  mapping->frame_1 = status ? 0 : frame + 1;
  return status ? gmi_fail_device(status, "the device could not map %llu bytes", (unsigned long long)gmi_frame_bytes(m))
                : status;
}

static void unmap(gmi_manager_t *m, void *address, gmi_mapping_t *mapping) {
  if (!mapping->frame_1) return;
  gmi_fence_sync(m, mapping->left);
  if (!m->device.ops->memory.unmap(m->device.self, address, gmi_frame_bytes(m))) mapping->frame_1 = 0;
}

void gmi_map_leave(gmi_manager_t *m, void *address, gmi_mapping_t *mapping, gmi_fence_t fence) {
  mapping->left = fence;
  /* Where the wait fails, the work may go on: the address stays mapped, as it does without STRICT. */
  if (m->config.flags & GEMINI_CONFIG_STRICT && !gmi_fence_sync(m, fence)) unmap(m, address, mapping);
}

/* Unmaps the chunks that map frame; GMI_NONE: all mapped chunks. */
static void unmap_chunks(gmi_manager_t *m, const gmi_arena_t *store, uint32_t frame) {
  uint32_t count = store->chunks ? atomic_load(&store->chunk_count) : 0;
  for (uint32_t i = 0; i < count; i++) {
    gmi_chunk_t *c = &store->chunks[i];
    if (frame == GMI_NONE || gmi_chunk_mapping(c)->frame_1 == frame + 1)
      unmap(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c));
  }
}
/* Removes a frame (GMI_NONE: all frames) from every address that maps it: of chunks and of the heap's pages. */
static void unmap_from(gmi_manager_t *m, uint32_t frame) {
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a && gmi_arena_has_chunks(a)) unmap_chunks(m, a, frame);
  }
  for (uint64_t page = 0; page < m->nonmodel.page_high; page++) {
    gmi_mapping_t *mapping = &m->nonmodel.pages[page].mapping;
    if (frame == GMI_NONE || mapping->frame_1 == frame + 1)
      unmap(m, m->nonmodel.base + page * gmi_frame_bytes(m), mapping);
  }
}
void gmi_arena_unmap(gmi_manager_t *m, const gmi_arena_t *store) { unmap_chunks(m, store, GMI_NONE); }
void gmi_unmap_all(gmi_manager_t *m) { unmap_from(m, GMI_NONE); }

/* ---- frames
 *
 * Each index below frames.capacity is in one of three conditions: unmade (no device memory behind it), free (in the
 * free list, with the fence `ready` after which it may be overwritten), or owned by a chunk, a heap page or a graph.
 * frames.used counts all owned ones. */
static gemini_status_t frames_reserve(gmi_manager_t *m, uint32_t count) {
  if (count <= m->frames.capacity) return GEMINI_OK;
  gmi_frame_t *frames = realloc(m->frames.at, count * sizeof *frames);
  if (frames) m->frames.at = frames;
  uint32_t *unmade = realloc(m->frames.unmade, count * sizeof *unmade);
  if (unmade) m->frames.unmade = unmade;
  if (!frames || !unmade)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of %u frames", count);
  /* Downwards: unmade is a stack, so the lowest index is taken first. */
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
  for (uint32_t i = 0; i < m->frames.capacity; i++) {
    gmi_registered_leave(m, i);
    if (m->frames.at[i].handle)
      m->device.ops->memory.frame_destroy(m->device.self, m->frames.at[i].handle, gmi_frame_bytes(m));
  }
  free(m->frames.at);
  free(m->frames.unmade);
  m->frames.at = NULL;
  m->frames.unmade = NULL;
  m->frames.used = m->frames.capacity = m->frames.count = m->frames.made = m->frames.unmade_count = 0;
  m->frames.free = m->frames.due = (gmi_frame_list_t){ 0 };
}

static void list_append(gmi_manager_t *m, gmi_frame_list_t *list, uint32_t frame) {
  gmi_frame_t *f = &m->frames.at[frame];
  f->next = GMI_NONE;
  f->previous = list->count ? list->last : GMI_NONE;
  if (list->count) m->frames.at[list->last].next = frame;
  else list->first = frame;
  list->last = frame;
  list->count++;
}
static void list_remove(gmi_manager_t *m, gmi_frame_list_t *list, uint32_t frame) {
  const gmi_frame_t *f = &m->frames.at[frame];
  if (frame == list->first) list->first = f->next;
  else m->frames.at[f->previous].next = f->next;
  if (frame == list->last) list->last = f->previous;
  else m->frames.at[f->next].previous = f->previous;
  list->count--;
}

/* Removes a frame from the free list: the wished one if it is free, else the head, which was given up longest ago and
 * whose fence is therefore the most likely to have been reached. The list must not be empty. */
static uint32_t free_take(gmi_manager_t *m, uint32_t wish) {
  uint32_t frame = wish < m->frames.capacity && m->frames.at[wish].free ? wish : m->frames.free.first;
  list_remove(m, &m->frames.free, frame);
  m->frames.at[frame].free = false;
  return frame;
}

static void due_end(gmi_manager_t *m, uint32_t frame) {
  if (!m->frames.at[frame].due) return;
  list_remove(m, &m->frames.due, frame);
  m->frames.at[frame].due = false;
}

void gmi_frame_give(gmi_manager_t *m, uint32_t frame, gmi_fence_t ready) {
  gmi_frame_t *f = &m->frames.at[frame];
  GMI_ASSERT(gmi_lock_is_mine(m));
  GMI_ASSERT(frame < m->frames.capacity && f->handle && !f->free && !f->chunk && m->frames.used);
  due_end(m, frame);
  f->ready = ready;
  f->chunk = NULL;
  f->free = true;
  f->given = ++m->frames.given;
  list_append(m, &m->frames.free, frame);
  m->frames.used--;
}

/* Picks the chunk to evict: the one with the furthest next use (Belady's rule), which is known while a plan is
 * followed. Unknown next uses compare as furthest, and equal ones by last use, so without a plan this is least recently
 * used; the chunks of chosen operators, which no plan knows, leave before the plan's, in the order of the cache's
 * policy. clean: considers only chunks whose bytes are valid in another tier, too, and which need no space there.
 * cached: only chunks whose next use is unknown. */
static gmi_chunk_t *choose_victim(gmi_manager_t *m, bool clean, bool cached) {
  gmi_chunk_t *best = NULL;
  uint64_t best_next = 0, best_rank = 0, best_last = 0;
  for (uint32_t i = 0; i < m->frames.capacity; i++) {
    gmi_chunk_t *c = m->frames.at[i].chunk;
    if (!c || gmi_chunk_is_pinned(c) || gmi_chunk_device_users(c) || gmi_chunk_is_gathered(m, c)) continue;
    if (clean && gmi_chunk_has_only(c, GMI_VALID_DEVICE)) continue;
    const uint64_t next = m->trace.advice->next_use(m, c), last = gmi_chunk_touched(c);
    if ((cached && next != UINT64_MAX) || next < best_next) continue;
    const uint64_t rank = next == UINT64_MAX ? m->trace.advice->cache_rank(m, c) : 0;
    if (best && next == best_next && (rank < best_rank || (rank == best_rank && last >= best_last))) continue;
    best = c;
    best_next = next;
    best_rank = rank;
    best_last = last;
  }
  return best;
}

gemini_status_t gmi_oom_device(gmi_manager_t *m, uint64_t need_bytes) {
  uint64_t pinned = 0, acquired = 0, gathered = 0, frame_bytes = gmi_frame_bytes(m);
  for (uint32_t i = 0; i < m->frames.capacity; i++) {
    gmi_chunk_t *c = m->frames.at[i].chunk;
    if (!c) continue;
    if (gmi_chunk_device_users(c)) acquired += frame_bytes;
    else if (gmi_chunk_is_gathered(m, c)) gathered += frame_bytes;
    else if (gmi_chunk_is_pinned(c)) pinned += frame_bytes;
  }
  const char *op = m->trace.advice->op_name(m);
  return gmi_fail(
      GEMINI_ERR_OOM_DEVICE, 0,
      "%s%s%llu more bytes of device memory are needed: of the budget %llu less margin %llu, chunks "
      "acquired hold %llu, pinned %llu, gathered %llu, graphs %llu, non-model memory %llu (%llu of it live)",
      op ? op : "", op ? ": " : "", (unsigned long long)need_bytes, (unsigned long long)m->config.device_bytes,
      (unsigned long long)m->config.device_margin_bytes, (unsigned long long)acquired, (unsigned long long)pinned,
      (unsigned long long)gathered, (unsigned long long)m->graphs.frames * frame_bytes,
      (unsigned long long)m->nonmodel.frames * frame_bytes,
      (unsigned long long)(m->nonmodel.heap ? gmi_heap_bytes_used(m->nonmodel.heap) : 0));
}

static bool can_make(const gmi_manager_t *m) { return m->frames.made < m->frames.count && m->frames.unmade_count; }

bool gmi_frames_left(const gmi_manager_t *m) {
  return m->frames.free.count || can_make(m) ||
         (m->nonmodel.heap && m->nonmodel.frames > gmi_heap_pages_used(m->nonmodel.heap));
}

enum { FAR = 64 }; /* that many copies take 20 ms and more where to map a frame takes 0.4 */
/* May a mapping have its former frame again, which spares the calls that map another one? With GMI_TAKE_READY and
 * GMI_TAKE_SOON not if its work would have to wait for the frame, and not, or much less, for another: its fence has not
 * been reached, it has had another user since, and it was given back later than most free ones (READY), or than FAR
 * others (SOON). Mappings last, so frames would follow each other so in each iteration. */
static bool suits_again(gmi_manager_t *m, const gmi_mapping_t *mapping, uint32_t frame, uint32_t flags) {
  const gmi_frame_t *f = &m->frames.at[frame];
  if (!f->free) return false;
  const bool late = m->frames.given - f->given < m->frames.free.count / 2;
  const gmi_frame_t *first = &m->frames.at[m->frames.free.first];
  const bool far = f->given - first->given >= FAR && f->ready != first->ready;
  if (!(flags & GMI_TAKE_READY && late) && !(flags & GMI_TAKE_SOON && far)) return true;
  return f->ready == mapping->left || gmi_fence_reached(m, f->ready);
}

/* ---- chunks that are due to leave
 *
 * Behind updates on the device, hundreds of states have to be copied to the host. A chunk takes the frame that its
 * address is mapped to, and would wait for the copy from it, though other frames are free; the parameters that are
 * needed first in the next iteration gave theirs to states last, so they would wait for all copies. So states are only
 * noted, and leave when their frame is asked for, when no other one is free, or when the link has little to do. */
static void due_leave(gmi_manager_t *m, uint32_t frame) {
  gmi_chunk_t *c = m->frames.at[frame].chunk;
  due_end(m, frame);
  if (gmi_chunk_device_users(c) || gmi_chunk_is_pinned(c)) return; /* it is evicted when its frame is needed */
  m->frames.leaving = true;
  if (gmi_chunk_evict(m, c, GEMINI_REASON_PLAN))
    gmi_log(m, GEMINI_LOG_WARNING, "planned eviction: %s", gmi_fail_message());
  m->frames.leaving = false;
}
/* What leaves may need room on the host, for which another chunk may be fetched: that one takes no such frame. */
static bool is_due(const gmi_manager_t *m, uint32_t frame) {
  return frame < m->frames.capacity && m->frames.at[frame].due && !m->frames.leaving;
}

void gmi_chunk_leaves_late(gmi_manager_t *m, gmi_chunk_t *c) {
  const uint32_t frame = gmi_chunk_frame(c);
  GMI_ASSERT(gmi_chunk_is_resident(c) && !gmi_chunk_is_gathered(m, c));
  if (m->frames.at[frame].due) return;
  m->frames.at[frame].due = true;
  list_append(m, &m->frames.due, frame);
}
void gmi_due_chunks_leave(gmi_manager_t *m) {
  while (m->frames.due.count && !gmi_link_is_busy(m, gmi_link_out(m))) due_leave(m, m->frames.due.first);
}

/* Sources of a frame, cheapest first: the frame that the address maps already (no remap); a new frame, where the budget
 * allows one and the oldest free frame would have to be waited for; the oldest free frame; an unused page of the heap;
 * the frame of an evicted chunk. */
gemini_status_t gmi_frame_take(gmi_manager_t *m, const gmi_mapping_t *mapping, uint32_t reason, uint32_t flags,
                               uint32_t *frame_out) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint32_t frame, wish = mapping && mapping->frame_1 ? mapping->frame_1 - 1 : GMI_NONE;
  if (is_due(m, wish)) due_leave(m, wish);
  while (!m->frames.free.count && !can_make(m) && m->frames.due.count && !m->frames.leaving)
    due_leave(m, m->frames.due.first);
  if (wish != GMI_NONE && suits_again(m, mapping, wish, flags)) {
    frame = free_take(m, wish);
  } else if (can_make(m) &&
             (!m->frames.free.count || !gmi_fence_reached(m, m->frames.at[m->frames.free.first].ready))) {
    frame = m->frames.unmade[m->frames.unmade_count - 1];
    gemini_status_t status =
        m->device.ops->memory.frame_create(m->device.self, gmi_frame_bytes(m), &m->frames.at[frame].handle);
    if (status)
      return gmi_fail_device(status, "the device could not create a frame of %llu bytes",
                             (unsigned long long)gmi_frame_bytes(m));
    m->frames.unmade_count--;
    m->frames.made++;
    m->frames.at[frame].ready = 0;
  } else if (m->frames.free.count) {
    frame = free_take(m, GMI_NONE);
  } else if (gmi_heap_reclaim(m, &frame)) {
    m->frames.used--; /* the heap's frame is counted in used already, and is counted again below */
  } else {
    gemini_status_t status = GEMINI_OK;
    const bool cached = !(flags & GMI_TAKE_EVICT);
    bool clean = cached;
    do {
      gmi_chunk_t *victim = cached && !(flags & GMI_TAKE_CACHED) ? NULL : choose_victim(m, clean, cached);
      if (!victim && cached) return GEMINI_ERR_OOM_DEVICE; /* the caller handles it: no error is recorded */
      if (!victim && clean) break;
      if (!victim) return gmi_oom_device(m, gmi_frame_bytes(m));
      status = gmi_chunk_evict(m, victim, reason);
      /* The lower tiers have no space for its bytes: retry with chunks that need none. BUSY: another thread acquired
       * the victim without the lock after choose_victim() looked; the next choice skips it. */
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

gemini_status_t gmi_frames_resize(gmi_manager_t *m, uint32_t frame_count, uint64_t memory_bytes) {
  gemini_status_t status = frames_reserve(m, frame_count);
  if (status) return status;
  /* Shrinking frees and destroys one frame at a time, so a failure leaves a consistent pool of an intermediate size and
   * the budget as it was: chunks that were evicted for it come back on demand. */
  while (m->frames.made > frame_count) {
    uint32_t frame;
    if (m->frames.free.count) {
      frame = free_take(m, GMI_NONE);
    } else {
      uint32_t before = m->frames.count;
      m->frames.count = m->frames.made; /* makes gmi_frame_take() evict instead of creating a new frame */
      status = gmi_frame_take(m, NULL, GEMINI_REASON_CALLER, GMI_TAKE_EVICT, &frame);
      m->frames.count = before;
      if (status) return status;
      m->frames.used--;
    }
    status = gmi_fence_sync(m, m->frames.at[frame].ready);
    if (!status) unmap_from(m, frame); /* a frame must be idle and unmapped everywhere before it is destroyed */
    if (!status) gmi_registered_leave(m, frame);
    if (!status) {
      status = m->device.ops->memory.frame_destroy(m->device.self, m->frames.at[frame].handle, gmi_frame_bytes(m));
      if (status == GEMINI_ERR_INVALID)
        status = GEMINI_ERR_DEVICE; /* it is mapped: it could not be unmapped just now */
      if (status)
        gmi_fail_device(status, "the device could not free a frame of %llu bytes",
                        (unsigned long long)gmi_frame_bytes(m));
    }
    if (status) {
      m->frames.used++; /* gmi_frame_give() decrements it */
      gmi_frame_give(m, frame, m->frames.at[frame].ready);
      return status;
    }
    m->frames.at[frame] = (gmi_frame_t){ 0 };
    m->frames.unmade[m->frames.unmade_count++] = frame;
    m->frames.made--;
  }
  status = gmi_device_resize(m, memory_bytes);
  if (!status) m->frames.count = frame_count;
  return status;
}

/* ---- moves */
void gmi_chunk_wrote(gmi_manager_t *m, gmi_chunk_t *c) {
  gmi_chunk_unspeculate(m, c);
  gmi_chunk_keep(c);
  /* A transfer under way must not make the old bytes valid when it finishes. */
  gmi_file_supersede(c);
  if (!gmi_chunk_has_only(c, GMI_VALID_DEVICE)) gmi_file_drop_block(m, c, gmi_chunk_wrote_device(m, c));
}

void gmi_time_work(gmi_manager_t *m, gmi_timed_t work) {
  if (m->rate.timed_count < sizeof m->rate.timed / sizeof *m->rate.timed) m->rate.timed[m->rate.timed_count++] = work;
}
void gmi_forget_collectives(gmi_manager_t *m, const struct gmi_group *g) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < m->rate.timed_count; i++)
    if (m->rate.timed[i].shortest != &g->gathers.shortest_ns && m->rate.timed[i].shortest != &g->sums.shortest_ns)
      m->rate.timed[kept++] = m->rate.timed[i];
  m->rate.timed_count = kept;
}

/* The fence covers queued copies, the flag updates and transfers, which are not device work. */
gemini_status_t gmi_chunk_wait_slot(gmi_manager_t *m, uint32_t stream, const gmi_chunk_t *c) {
  gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
  gemini_status_t status = gmi_fence_wait(m, stream, slot->fence);
  if (!status && gmi_chunk_work_pending(m, c))
    status = m->device.ops->stream.wait_flag(m->device.self, stream, &slot->work_done, slot->work_queued);
  return status;
}

/* The mark is placed now, as workers wait for a slot's fence without the lock. If the device refuses it, it is placed
 * when it is first needed; a worker that comes before that fails. */
gemini_status_t gmi_slots_use(gmi_manager_t *m, const gmi_chunk_t *chunks, uint32_t first, uint32_t last,
                              uint32_t stream) {
  gmi_fence_t fence;
  if (stream == GMI_CALLER || first > last) return GEMINI_OK;
  gemini_status_t status = gmi_fence_now_untimed(m, stream, &fence);
  if (status) fence = gmi_fence_later(m, stream);
  for (uint64_t i = first; i <= last; i++) {
    gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(&chunks[i])];
    slot->fence = gmi_fence_join(m, slot->fence, fence);
  }
  return status;
}
gemini_status_t gmi_slots_may_be_used(gmi_manager_t *m, uint32_t stream) {
  gmi_fence_t fence; /* asking is placing a mark */
  gemini_status_t status = stream == GMI_CALLER ? GEMINI_OK : gmi_fence_now_untimed(m, stream, &fence);
  return status == GEMINI_ERR_STATE ? status : GEMINI_OK;
}

/* Queues the copy in three steps: the link's stream waits for the slot's users, then copies, then places the mark that
 * becomes the slot's fence. The caller has made the stream wait for the frame's users. */
static gemini_status_t queue_copy(gmi_manager_t *m, gmi_chunk_t *c, gmi_link_t *link, uint32_t reason,
                                  gmi_fence_t *fence_out) {
  const uint32_t stream = link->stream;
  gmi_fence_t begin, end;
  gmi_slot_t *slot = &m->host.slots[gmi_chunk_slot(c)];
  uint64_t bytes = gmi_copy_bytes(m, GEMINI_TIER_DEVICE, GEMINI_TIER_HOST);
  gemini_status_t status = gmi_chunk_wait_slot(m, stream, c);
  if (!status) status = gmi_fence_now(m, stream, &begin);
  bool queued = !status; /* false: nothing uses the slot beyond what its fence covers already */
  if (queued) {
    void *device = gmi_chunk_device(m, c), *host = gmi_chunk_host(m, c);
    status = gmi_link_is_fetch(link)
                 ? m->device.ops->queue.copy(m->device.self, stream, device, host, bytes, GMI_COPY_H2D)
                 : m->device.ops->queue.copy(m->device.self, stream, host, device, bytes, GMI_COPY_D2H);
  }
  if (!status) status = gmi_fence_now(m, stream, &end);
  if (status && queued) {
    /* The device may have queued the copy although it reported a failure: keep slot and frame from being reused before
     * the stream has passed this point. The mark is placed when it is first needed. */
    slot->fence = gmi_fence_later(m, stream);
    if (!gmi_link_is_fetch(link)) gmi_chunk_copied(c, slot->fence);
  }
  if (status)
    return gmi_fail_device(status, "the device could not queue a copy of %llu bytes", (unsigned long long)bytes);
  gmi_time_work(m, (gmi_timed_t){ .begin = begin, .end = end, .elements = 1, .link = link });
  gmi_link_moved(m, link, reason, 1);
  m->trace.observer->chunk_copied(m, c, link, reason, begin, end);
  slot->fence = end; /* covers the old fence: same stream, or the stream waited for it above */
  if (!gmi_link_is_fetch(link)) gmi_chunk_copied(c, end);
  *fence_out = end;
  return GEMINI_OK;
}

void gmi_move_name(gmi_manager_t *m, const gmi_chunk_t *c, uint32_t reason, char name_out[GMI_MOVE_NAME_BYTES]) {
  snprintf(name_out, GMI_MOVE_NAME_BYTES, "%s %u (%s)", gmi_chunk_arena(m, c)->name, c->index, gmi_reason_name(reason));
}

/* queue_copy() inside an NVTX range, for Nsight Systems. fence_out is reached when the copy is done. */
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
  if (gmi_chunk_is_resident(c)) {
    due_end(m, gmi_chunk_frame(c)); /* it is needed again */
    return GEMINI_OK;
  }
  if (gmi_chunk_is_gathered(m, c)) return gmi_gathered_fetch(m, c, fresh, reason, flags);
  const char *why = gmi_chunk_busy(c, GMI_TO_FETCH);
  if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", gmi_chunk_arena(m, c)->name, why);
  if (gmi_chunk_io(c)) gmi_files_poll(m);
  gemini_status_t status = GEMINI_OK;
  if (!fresh && !gmi_chunk_has(c, GMI_VALID_HOST | GMI_VALID_ZERO)) { /* the bytes are only in a file */
    status = gmi_host_slot_take(m, c);
    if (!status) status = gmi_file_read(m, c, reason);
    if (status) return status;
  }
  /* Wait for a read from a file before queueing the copy: a queued copy cannot be withdrawn, so after a failed read it
   * would give operators undefined bytes. */
  if (!fresh && gmi_chunk_io(c) && !gmi_chunk_has(c, GMI_VALID_ZERO) && (status = gmi_chunk_settle_host(m, c)))
    return status;
  uint32_t frame;
  gmi_chunk_hold_host(m, c, false); /* the eviction that frees a frame needs a slot and must not take this chunk's */
  status = gmi_frame_take(m, gmi_chunk_mapping(c), reason == GEMINI_REASON_DEMAND ? GEMINI_REASON_PRESSURE : reason,
                          flags, &frame);
  gmi_chunk_unhold_host(m, c, false);
  if (status) return status;
  gmi_fence_t ready = m->frames.at[frame].ready, arrive = ready;
  status = gmi_map(m, gmi_chunk_device(m, c), frame, gmi_chunk_mapping(c));
  bool mapped = !status;
  gmi_link_t *link = gmi_link_in(m);
  if (!status && !fresh) {
    status = gmi_fence_wait(m, link->stream, ready); /* the frame's previous user */
    if (!status && gmi_chunk_has(c, GMI_VALID_HOST)) {
      status = copy_chunk(m, c, link, reason, &arrive);
    } else if (!status) {
      status = gmi_device_zero(m, link->stream, gmi_chunk_device(m, c), gmi_frame_bytes(m));
      if (!status) status = gmi_fence_now(m, link->stream, &arrive);
    }
  }
  if (status) {
    /* The failed copy may be queued, and possibly without the wait for `ready`: the frame is reusable after both. */
    ready = gmi_fence_join(m, ready, gmi_fence_later(m, link->stream));
    gmi_frame_give(m, frame, ready);
    if (mapped) gmi_map_leave(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c), ready);
    return status;
  }
  /* A fresh frame does not make the copies in other tiers invalid yet: if the batch fails before the commit, the frame
   * is dropped and they are still the chunk's bytes. The commit calls gmi_chunk_wrote(). */
  gmi_chunk_arrived(m, c, frame, arrive, fresh);
  gmi_counters_change(m);
  return GEMINI_OK;
}

/* Returns the chunk's former frame to the pool. fence: after it, no queued work uses the frame or the address. */
static void give_frame(gmi_manager_t *m, gmi_chunk_t *c, uint32_t frame, gmi_fence_t fence) {
  gmi_frame_give(m, frame, fence);
  gmi_map_leave(m, gmi_chunk_device(m, c), gmi_chunk_mapping(c), fence);
  if (gmi_chunk_is_gathered(m, c)) gmi_gathered_count(m, c, -1u);
  gmi_counters_change(m);
}

void gmi_chunk_leave_frame(gmi_manager_t *m, gmi_chunk_t *c, uint32_t becomes, gmi_fence_t fence) {
  give_frame(m, c, gmi_chunk_departed(m, c, becomes, fence), fence);
}

void gmi_chunk_drop_device(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t word;
  if (!gmi_chunk_is_resident(c)) return;
  bool departs = gmi_chunk_departs(c, &word);
  GMI_ASSERT(departs);
  (void)departs;
  gmi_fence_t used = gmi_chunk_used(m, c); /* before departed(), which clears the fences; includes copies out */
  gmi_chunk_leave_frame(m, c, 0, used);
}

void gmi_chunk_host_wrote(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t frame, block;
  gmi_chunk_unspeculate(m, c);
  gmi_fence_t used = gmi_chunk_used(m, c);
  gmi_chunk_wrote_host(m, c, &frame, &block);
  if (frame != GMI_NONE) give_frame(m, c, frame, used);
  gmi_file_drop_block(m, c, block);
}

/* The slot is taken first, because that can fail or block and the chunk is still usable then. gmi_chunk_departs() is
 * the point from which fast-path acquires fail; after it, only a refused copy makes the chunk stay. */
gemini_status_t gmi_chunk_evict(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  if (!gmi_chunk_is_resident(c)) return GEMINI_OK;
  const char *why = gmi_chunk_busy(c, GMI_TO_EVICT);
  if (why)
    return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s at offset %llu is %s", gmi_chunk_arena(m, c)->name,
                    (unsigned long long)c->index << m->cut.chunk_shift, why);
  bool copy = gmi_chunk_has_only(c, GMI_VALID_DEVICE);
  if (copy && gmi_chunk_is_discarded(c)) {
    gmi_chunk_forget(m, c);
    return GEMINI_OK;
  }
  gemini_status_t status = copy ? gmi_host_slot_take(m, c) : GEMINI_OK;
  if (status) return status;
  uint32_t word;
  /* Pairs with gmi_chunk_hold_fast(): either this fails because an acquire came first, or that acquire sees the cleared
   * flags and goes to the slow path, which waits for the lock. */
  if (!gmi_chunk_departs(c, &word))
    return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s was acquired by another thread during this call",
                    gmi_chunk_arena(m, c)->name);
  if (!copy) {
    gmi_fence_t used = gmi_chunk_used(m, c);
    gmi_chunk_leave_frame(m, c, 0, used);
    return GEMINI_OK;
  }
  gmi_chunk_refilled(m, c);
  gmi_fence_t fence = 0; /* of the copy, which is queued behind all uses: it alone guards frame and address */
  status = gmi_chunk_wait(m, gmi_link_out(m)->stream, c, GEMINI_READ_WRITE);
  if (!status) status = copy_chunk(m, c, gmi_link_out(m), reason, &fence);
  if (status) {
    gmi_chunk_departs_not(c, word);
    return status;
  }
  gmi_chunk_leave_frame(m, c, GMI_VALID_HOST, fence);
  return GEMINI_OK;
}

static bool is_zero(const uint8_t *bytes, uint64_t size) { return !bytes[0] && !memcmp(bytes, bytes + 1, size - 1); }
/* Of a chunk that is only known to be zero. Its first lazy_bytes bytes are not written. */
static gemini_status_t zeros_to_host(gmi_manager_t *m, gmi_chunk_t *c, uint64_t lazy_bytes) {
  bool blank;
  gemini_status_t status = gmi_host_slot_take_blank(m, c, &blank);
  if (status) return status;
  gmi_chunk_refilled(m, c);
  status = gmi_chunk_settle_host(m, c);
  if (status) return status;
  uint8_t *rest = gmi_chunk_host(m, c) + lazy_bytes;
  const uint64_t rest_bytes = gmi_slot_bytes(m) - lazy_bytes;
  if (!blank) memset(rest, 0, rest_bytes);
  GMI_ASSERT(!rest_bytes || is_zero(rest, rest_bytes));
  gmi_chunk_host_valid(m, c);
  if (!blank) gmi_chunk_lazy_zeros_set(m, c, lazy_bytes);
  return GEMINI_OK;
}

bool gmi_chunk_read_soon(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  const uint32_t here = GMI_VALID_DEVICE | GMI_VALID_HOST | GMI_VALID_ZERO;
  if (gmi_chunk_io(c)) gmi_files_poll(m);
  if (gmi_chunk_io(c) || gmi_chunk_has(c, here) || !gmi_chunk_has(c, GMI_VALID_FILE)) return true;
  if (gmi_chunk_failed_read(c) || gmi_chunk_work_pending(m, c) || gmi_chunk_busy(c, GMI_TO_FETCH)) return false;
  return gmi_host_slot_take_now(m, c, m->trace.advice->next_use(m, c)) && !gmi_file_read(m, c, reason);
}

gemini_status_t gmi_chunk_to_host(gmi_manager_t *m, gmi_chunk_t *c, bool drop, uint32_t reason) {
  if (gmi_chunk_io(c)) gmi_files_poll(m);
  if (gmi_chunk_has(c, GMI_VALID_HOST)) {
    (void)gmi_chunk_host(m, c); /* the caller may reach the slot from a neighbour's */
  } else if (gmi_chunk_has(c, GMI_VALID_ZERO)) {
    gemini_status_t status = zeros_to_host(m, c, 0);
    if (status) return status;
  } else {
    gemini_status_t status = gmi_host_slot_take(m, c);
    if (status) return status;
    if (gmi_chunk_has(c, GMI_VALID_DEVICE)) {
      gmi_fence_t fence;
      gmi_chunk_refilled(m, c);
      /* A writer during the copy would tear it, and one after it would change a chunk that is no longer marked dirty:
       * refuse while there is a writer, and send new acquires to the slow path. */
      if (!gmi_chunk_unsettle(c, GMI_CHUNK_WRITERS))
        return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is acquired for writing", gmi_chunk_arena(m, c)->name);
      status = gmi_chunk_wait(m, gmi_link_out(m)->stream, c, GEMINI_READ);
      if (!status) status = copy_chunk(m, c, gmi_link_out(m), reason, &fence);
    } else {
      status = gmi_file_read(m, c, reason);
    }
    if (status) return status;
    gmi_chunk_host_valid(m, c); /* the bytes may still be on their way: the slot's fence and work count guard them */
  }
  return drop ? gmi_chunk_evict(m, c, reason) : GEMINI_OK;
}

gemini_status_t gmi_chunk_to_host_to_overwrite(gmi_manager_t *m, gmi_chunk_t *c, uint64_t end) {
  const bool here = gmi_chunk_has(c, GMI_VALID_HOST);
  if (here && end <= gmi_chunk_lazy_zeros(c)) return GEMINI_OK;
  return !here && gmi_chunk_has(c, GMI_VALID_ZERO) ? zeros_to_host(m, c, end)
                                                   : gmi_chunk_to_host(m, c, false, GEMINI_REASON_DEMAND);
}

/* Blocks until the write has succeeded: the slot is given up only when the file, or zero, is a valid copy. */
gemini_status_t gmi_chunk_to_file(gmi_manager_t *m, gmi_chunk_t *c, uint32_t reason) {
  const char *why = gmi_chunk_busy(c, GMI_TO_LEAVE_HOST);
  if (why) return gmi_fail(GEMINI_ERR_BUSY, 0, "a chunk of arena %s is %s", gmi_chunk_arena(m, c)->name, why);
  gmi_files_poll(m);
  gmi_file_forgive(c); /* an earlier failed read does not matter: the bytes are in the file, their destination */
  gemini_status_t status = gmi_chunk_evict(m, c, reason);
  if (!status) status = gmi_chunk_settle_host(m, c);
  if (!status && !gmi_chunk_has(c, GMI_VALID_FILE | GMI_VALID_ZERO)) {
    status = gmi_file_write(m, c, reason);
    if (!status) status = gmi_chunk_settle_host(m, c);
    if (!status && !gmi_chunk_has(c, GMI_VALID_FILE)) status = gmi_files_reap(m, NULL); /* the write's error */
  }
  if (status) return status;
  gmi_chunk_below_host(m, c);
  gmi_host_slot_drop(m, c);
  return GEMINI_OK;
}

void gmi_chunk_forget(gmi_manager_t *m, gmi_chunk_t *c) {
  uint32_t frame, block;
  gmi_chunk_unspeculate(m, c);
  gmi_chunk_copies_end(m, c);
  gmi_fence_t used = gmi_chunk_used(m, c);
  gmi_chunk_zeroed(m, c, &frame, &block);
  if (frame != GMI_NONE) give_frame(m, c, frame, used);
  gmi_host_slot_drop(m, c);
  gmi_file_drop_block(m, c, block);
}
