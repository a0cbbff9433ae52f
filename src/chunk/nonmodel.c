/* Non-model memory: heap blocks at stable addresses, backed by frames from the pool that chunks use.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The heap (heap.c) assigns offsets of one reserved address range. A page is the part of the range that one frame
 * backs; it gets a frame when a block first touches it and keeps it after its last block is freed, until the frame is
 * needed elsewhere (gmi_heap_reclaim). Streams are ordered by tags: a freed block carries fences of its last uses, and
 * the stream of the next allocation there waits for them, so neither alloc nor free waits for the device.
 *
 * Threads: any thread that holds the manager's lock. Allocation does not look at chunks' bytes, so it uses
 * gmi_lock_beside() and goes on while another thread's update callback runs. */
#include <errno.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/space.h"
#include "chunk/cut.h"
#include "chunk/heap.h"
#include "chunk/hook.h"
#include "chunk/nonmodel.h"
#include "chunk/residency.h"
#include "core/manager.h"
#include "core/streams.h"

/* The heap's tags hold fences, which it compares by stream (gmi_heap_alloc); so it must find the stream where it
 * looks. */
_Static_assert(GMI_FENCE_MARK_BITS == GMI_HEAP_POINT_STREAM_SHIFT, "a fence's stream lies in its top byte");

/* Adds a fence to a tag: keeps the later one of a stream, else uses a free point or one whose fence has been reached.
 * Only when all points are taken by other streams does the device have to join two fences. */
static void tag_add(gmi_manager_t *m, gmi_heap_tag_t *tag, gmi_fence_t fence) {
  gmi_fence_t *free_point = NULL;
  if (!fence) return;
  for (int i = 0; i < GMI_HEAP_POINTS; i++) {
    gmi_fence_t *point = &tag->point[i];
    if (!*point) {
      if (!free_point) free_point = point;
    } else if (gmi_fence_stream(*point) == gmi_fence_stream(fence)) {
      if (gmi_fence_mark(fence) > gmi_fence_mark(*point)) *point = fence;
      return;
    }
  }
  for (int i = 0; !free_point && i < GMI_HEAP_POINTS; i++)
    if (gmi_fence_reached(m, tag->point[i])) free_point = &tag->point[i];
  if (!free_point && gmi_fence_reached(m, fence)) return;
  if (free_point) *free_point = fence;
  else tag->point[0] = gmi_fence_join(m, tag->point[0], fence);
}
static gmi_heap_tag_t join_tags(void *user, gmi_heap_tag_t a, gmi_heap_tag_t b) {
  for (int i = 0; i < GMI_HEAP_POINTS; i++) tag_add(user, &a, b.point[i]);
  return a;
}

/* Reserves a range in which no late free of a closed manager's pointer can fall. Unsuitable ranges stay reserved until
 * a suitable one is found, because the system would return the same range again. */
static gemini_status_t reserve_new(gmi_manager_t *m, uint64_t range, void **base_out) {
  void **held = NULL, *base;
  uint32_t held_count = 0;
  gemini_status_t status;
  while (!(status = m->device.ops->memory.reserve(m->device.self, range, &base)) && gmi_hook_left(base, range)) {
    void **grown = realloc(held, (held_count + 1) * sizeof *held);
    if (!grown) {
      m->device.ops->memory.unreserve(m->device.self, base, range);
      status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for a list of ranges");
      break;
    }
    held = grown;
    held[held_count++] = base;
  }
  while (held_count) m->device.ops->memory.unreserve(m->device.self, held[--held_count], range);
  free(held);
  if (!status) *base_out = base;
  return status;
}

/* Reserves at least eight times the budget (up to 16 TiB): address space is cheap, and fragmentation of a range much
 * longer than the budget leaves holes for large blocks. */
static gemini_status_t reserve_once(gmi_manager_t *m) {
  if (m->nonmodel.base) return GEMINI_OK;
  uint64_t range = UINT64_C(1) << 30;
  while (range < m->config.device_bytes * 8 && range < (UINT64_C(1) << 44)) range *= 2;
  void *base = NULL;
  gemini_status_t status = reserve_new(m, range, &base);
  if (status)
    return gmi_fail_device(status, "no address range of %llu bytes for non-model memory", (unsigned long long)range);
  m->nonmodel.base = base;
  m->nonmodel.range = range;
  return GEMINI_OK;
}

gemini_status_t gmi_heap_prepare(gmi_manager_t *m, gmi_cut_t *cut) {
  gemini_status_t status = reserve_once(m);
  if (status) return status;
  cut->page_map_bytes = m->nonmodel.range / cut->sizes.frame_bytes * sizeof *cut->pages;
  cut->pages = gmi_space(cut->page_map_bytes);
  if (cut->pages) status = gmi_heap_create(m->nonmodel.range, cut->sizes.frame_bytes, join_tags, m, &cut->heap);
  if (!cut->pages || status)
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the records of non-model memory");
  return GEMINI_OK;
}

static void tables_free(gmi_manager_t *m) {
  gmi_heap_destroy(m->nonmodel.heap);
  gmi_space_free(m->nonmodel.pages, m->nonmodel.page_map_bytes);
  m->nonmodel.heap = NULL;
  m->nonmodel.pages = NULL;
  m->nonmodel.frames = 0;
  m->nonmodel.page_high = 0;
}

void gmi_heap_install(gmi_manager_t *m, gmi_cut_t *cut) {
  tables_free(m);
  m->nonmodel.heap = cut->heap;
  m->nonmodel.pages = cut->pages;
  m->nonmodel.page_map_bytes = cut->page_map_bytes;
  cut->heap = NULL;
  cut->pages = NULL;
}

void gmi_heap_close(gmi_manager_t *m) {
  tables_free(m);
  if (m->nonmodel.base) m->device.ops->memory.unreserve(m->device.self, m->nonmodel.base, m->nonmodel.range);
  m->nonmodel.base = NULL;
}

/* Searches from the top: the heap cuts the long free block at its end last, so high pages are the least likely to be
 * used again. The frame may be overwritten after its own fence and those of the free block that covers the page. */
bool gmi_heap_reclaim(gmi_manager_t *m, uint32_t *frame_out) {
  if (!m->nonmodel.heap || m->nonmodel.frames == 0) return false;
  for (uint64_t page = m->nonmodel.page_high; page-- > 0;) {
    if (!m->nonmodel.pages[page].frame_1 || gmi_heap_page_users(m->nonmodel.heap, page)) continue;
    uint32_t frame = m->nonmodel.pages[page].frame_1 - 1;
    m->nonmodel.pages[page].frame_1 = 0;
    m->nonmodel.frames--;
    m->nonmodel.pages[page].settled = false;
    gmi_heap_tag_t tag = gmi_heap_page_tag(m->nonmodel.heap, page);
    for (int i = 0; i < GMI_HEAP_POINTS; i++)
      m->frames.at[frame].ready = gmi_fence_join(m, m->frames.at[frame].ready, tag.point[i]);
    gmi_map_leave(m, m->nonmodel.base + page * gmi_frame_bytes(m), &m->nonmodel.pages[page].mapping,
                  m->frames.at[frame].ready);
    *frame_out = frame;
    return true;
  }
  return false;
}

/* Makes stream wait for earlier users of the block's bytes, then gives each of its pages a frame. On a failure the
 * frames stay with their pages; the caller frees the block, and gmi_heap_reclaim() can take them. */
static gemini_status_t back_block(gmi_manager_t *m, const gmi_heap_block_t *block, uint32_t stream) {
  uint64_t last = (block->offset + block->size_bytes - 1) >> m->cut.frame_shift;
  gemini_status_t status = GEMINI_OK;
  for (int i = 0; !status && i < GMI_HEAP_POINTS; i++) status = gmi_fence_wait(m, stream, block->tag.point[i]);
  for (uint64_t page = block->offset >> m->cut.frame_shift; !status && page <= last; page++) {
    if (m->nonmodel.pages[page].settled) continue;
    /* The page has a frame, but its fence was not reached at last look. The allocation that took the frame waited on
     * its own stream, or failed before it did, so this stream waits as well. */
    if (m->nonmodel.pages[page].frame_1) {
      gmi_fence_t before = m->frames.at[m->nonmodel.pages[page].frame_1 - 1].ready;
      m->nonmodel.pages[page].settled = gmi_fence_reached(m, before);
      if (!m->nonmodel.pages[page].settled) status = gmi_fence_wait(m, stream, before);
      continue;
    }
    uint32_t frame;
    status = gmi_frame_take(m, &m->nonmodel.pages[page].mapping, GEMINI_REASON_PRESSURE, GMI_TAKE_EVICT, &frame);
    if (status) break;
    gmi_fence_t ready = m->frames.at[frame].ready;
    status = gmi_map(m, m->nonmodel.base + page * gmi_frame_bytes(m), frame, &m->nonmodel.pages[page].mapping);
    if (status) {
      gmi_frame_give(m, frame, ready);
      break;
    }
    m->nonmodel.pages[page].frame_1 = frame + 1;
    m->nonmodel.frames++;
    if (page >= m->nonmodel.page_high) m->nonmodel.page_high = page + 1;
    status = gmi_fence_wait(m, stream, ready);
  }
  return status;
}

void gmi_nonmodel_peak(gmi_manager_t *m) {
  const uint32_t pages = m->nonmodel.heap ? (uint32_t)gmi_heap_pages_used(m->nonmodel.heap) : 0;
  const uint32_t own = pages + m->groups.gradient_frames, all = pages + m->groups.frames;
  if (own > m->nonmodel.pages_peak_op) m->nonmodel.pages_peak_op = own;
  if (all > m->groups.peak_op) m->groups.peak_op = all;
}

gemini_status_t gmi_nonmodel_alloc(gmi_manager_t *m, uint64_t size, uint32_t stream, void **ptr_out) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  if (!size) return gmi_fail(GEMINI_ERR_INVALID, 0, "size_bytes is 0");
  uint64_t usable = m->config.device_bytes - m->config.device_margin_bytes;
  if (size > usable)
    return gmi_fail(GEMINI_ERR_OOM_DEVICE, 0,
                    "size_bytes is %llu, more than the device budget without its margin, %llu",
                    (unsigned long long)size, (unsigned long long)usable);
  gemini_status_t status = gmi_cut(m);
  if (status) return status;
  gmi_heap_block_t block;
  status = gmi_heap_alloc(m->nonmodel.heap, size, stream == GMI_CALLER ? 0 : stream + 1, &block);
  if (status == GEMINI_ERR_OOM_DEVICE) return gmi_oom_device(m, size);
  if (status) return gmi_fail(status, ENOMEM, "no memory for an allocation's record");
  status = back_block(m, &block, stream);
  if (status) {
    gmi_heap_free(m->nonmodel.heap, block.offset, block.tag);
    /* The words of the frame that was lacking count the block, and ask for one frame of it. */
    return status == GEMINI_ERR_OOM_DEVICE && !gmi_fail_code() ? gmi_oom_device(m, size) : status;
  }
  uint64_t bytes = gmi_heap_bytes_used(m->nonmodel.heap);
  gmi_stat_set(&m->stats.nonmodel_bytes, bytes);
  if (bytes > m->nonmodel.peak) gmi_stat_set(&m->nonmodel.peak, bytes);
  if (bytes > m->nonmodel.peak_op) m->nonmodel.peak_op = bytes;
  gmi_nonmodel_peak(m);
  gmi_counters_change(m);
  *ptr_out = m->nonmodel.base + block.offset;
  return GEMINI_OK;
}

static inline bool nonmodel_free(gmi_manager_t *m, void *ptr, uint32_t stream) {
  GMI_ASSERT(gmi_lock_is_mine(m));
  uint64_t offset = (uint64_t)((uintptr_t)ptr - (uintptr_t)m->nonmodel.base);
  gmi_heap_tag_t tag = { { gmi_fence_later(m, stream) } };
  if (!m->nonmodel.heap || (uint8_t *)ptr < m->nonmodel.base || offset >= m->nonmodel.range ||
      !gmi_heap_free(m->nonmodel.heap, offset, tag)) {
    gmi_fail(GEMINI_ERR_INVALID, 0, "%p is not the start of a live allocation", ptr);
    return false;
  }
  gmi_stat_set(&m->stats.nonmodel_bytes, gmi_heap_bytes_used(m->nonmodel.heap));
  gmi_counters_change(m);
  return true;
}

bool gmi_nonmodel_free(gmi_manager_t *m, void *ptr, uint32_t stream) { return nonmodel_free(m, ptr, stream); }

static gemini_status_t nonmodel_alloc(gmi_manager_t *m, uint64_t size, gemini_stream_t stream, void **ptr_out) {
  uint32_t s;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  if (status) return status;
  if (!ptr_out) return gmi_fail(GEMINI_ERR_INVALID, 0, "ptr_out is NULL");
  return gmi_nonmodel_alloc(m, size, s, ptr_out);
}
gemini_status_t gemini_alloc(gemini_manager_t mgr, uint64_t size_bytes, gemini_stream_t stream, void **ptr_out) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  gmi_lock_beside(m, __func__);
  gemini_status_t status = nonmodel_alloc(m, size_bytes, stream, ptr_out);
  gmi_unlock(m);
  API_RETURN(status);
}

gemini_status_t gemini_free(gemini_manager_t mgr, void *ptr, gemini_stream_t stream) {
  gmi_manager_t *m = gmi_manager_get(mgr);
  if (!m) API_RETURN(GEMINI_ERR_HANDLE);
  if (!ptr) return GEMINI_OK;
  gmi_lock_beside(m, __func__);
  uint32_t s;
  gemini_status_t status = gmi_stream_resolve(m, stream, &s);
  if (!status && !nonmodel_free(m, ptr, s)) status = GEMINI_ERR_INVALID;
  gmi_unlock(m);
  API_RETURN(status);
}
