/* The CUDA device: address ranges, frames and mappings; page-locked host memory. SPDX-License-Identifier: Apache-2.0
 *
 * The driver offers physical memory, address ranges and mappings between them, and fails when they are used wrongly,
 * but does not tell what is mapped where. The records here do: every reserved range has an array of pages (granules),
 * which name the frame mapped there. They are what makes checking, replacing and undoing possible.
 *
 * Replacing a mapping takes two steps, since the driver refuses to map over a mapping: clear() unmaps in the driver but
 * keeps the records, then the new mapping is made, then forget() drops the old records. If a step in between fails,
 * restore() maps again what the records say: a failed call has changed nothing. During the replacement the addresses
 * are unmapped for a moment; the caller makes sure that no queued work uses them.
 *
 * All runs on the caller's thread. memory.lock guards budget, frames, ranges and pages, and is held across driver
 * calls, so that records and driver agree at any time; host.lock guards the list of locked memory only, and is not held
 * across driver calls, as these may wait for the GPU. Both are innermost. */
#include <stdlib.h>
#include <string.h>

#include "device/cuda.h"

/* --- memory --- */

static bool size_ok(const cuda_t *cuda, uint64_t size_bytes) {
  return size_bytes && size_bytes % cuda->granule == 0 && size_bytes <= MEMORY_MAX_BYTES;
}

/* Grows an array to hold one more element. */
static bool array_reserve(void **array, size_t *capacity, size_t count, size_t element_bytes) {
  if (count < *capacity) return true;
  size_t larger = *capacity ? *capacity * 2 : 64;
  void *grown = larger <= SIZE_MAX / element_bytes ? realloc(*array, larger * element_bytes) : NULL;
  if (!grown) return false;
  *array = grown;
  *capacity = larger;
  return true;
}

gemini_status_t gmi_cuda_no_memory(const char *what) {
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, 0, "no memory for records of %s", what);
}

/* The live frame of that name, or NULL. The pointer is valid until a frame is created or destroyed. Called with
 * memory.lock held. */
frame_t *gmi_cuda_frame_named(cuda_t *cuda, uint64_t name) {
  size_t low = 0, high = cuda->memory.frame_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (cuda->memory.frames[middle].name < name) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == cuda->memory.frame_count || cuda->memory.frames[low].name != name || !cuda->memory.frames[low].size_bytes)
    return NULL;
  return &cuda->memory.frames[low];
}

/* Index of the first range that does not lie below base. Called with memory.lock held. */
static size_t range_at(const cuda_t *cuda, uint64_t base) {
  size_t low = 0, high = cuda->memory.range_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (cuda->memory.ranges[middle].base < base) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/* The range that holds [va, va + size), or NULL. Called with memory.lock held. */
static range_t *range_of(cuda_t *cuda, uint64_t va, uint64_t size_bytes) {
  if (va % cuda->granule || !size_ok(cuda, size_bytes)) return NULL;
  size_t at = range_at(cuda, va);
  if (at == cuda->memory.range_count || cuda->memory.ranges[at].base != va) {
    if (at == 0) return NULL;
    at--;
  }
  range_t *range = &cuda->memory.ranges[at];
  uint64_t offset = va - range->base;
  return offset < range->size_bytes && size_bytes <= range->size_bytes - offset ? range : NULL;
}

/* Do all mappings that touch pages first..end lie within them? The driver removes whole mappings only. */
static bool pages_are_whole(cuda_t *cuda, const range_t *range, uint64_t first, uint64_t end) {
  const page_t *head = &range->pages[first], *tail = &range->pages[end - 1];
  if (head->frame && head->first != first) return false;
  return !tail->frame || tail->first + gmi_cuda_frame_named(cuda, tail->frame)->size_bytes / cuda->granule <= end;
}

/* Maps a frame at unmapped addresses. A new mapping has no access until it is granted. */
static cu_result_t map_here(cuda_t *cuda, uint64_t va, const frame_t *frame) {
  const cu_access_t access = { { CU_LOCATION_DEVICE, cuda->device }, CU_ACCESS_READ_WRITE };
  cu_result_t result = cuda->driver->memory_map(va, frame->size_bytes, 0, frame->memory, 0);
  if (result != CU_SUCCESS) return result;
  result = cuda->driver->memory_access(va, frame->size_bytes, &access, 1);
  if (result != CU_SUCCESS) cuda->driver->memory_unmap(va, frame->size_bytes);
  return result;
}

/* Drops the records of the mapping that begins at page first. */
static void pages_forget(cuda_t *cuda, range_t *range, uint64_t first) {
  frame_t *frame = gmi_cuda_frame_named(cuda, range->pages[first].frame);
  frame->mappings--;
  memset(&range->pages[first], 0, frame->size_bytes / cuda->granule * sizeof *range->pages);
}

/* Maps again what clear() unmapped from page first up to end. A mapping that the driver refuses to restore is dropped
 * from the records: they never name a mapping that does not exist. */
static void restore(cuda_t *cuda, range_t *range, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end;) {
    const frame_t *frame = range->pages[at].frame ? gmi_cuda_frame_named(cuda, range->pages[at].frame) : NULL;
    uint64_t pages = frame ? frame->size_bytes / cuda->granule : 1;
    if (frame && map_here(cuda, range->base + at * cuda->granule, frame) != CU_SUCCESS) pages_forget(cuda, range, at);
    at += pages;
  }
}

/* Unmaps whatever is mapped from page first up to end in the driver, but keeps the records, so that restore() can undo
 * it. On failure everything is mapped as before. Called with memory.lock held, as forget(). */
static gemini_status_t clear(cuda_t *cuda, range_t *range, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end;) {
    const frame_t *frame = range->pages[at].frame ? gmi_cuda_frame_named(cuda, range->pages[at].frame) : NULL;
    if (frame) {
      cu_result_t result = cuda->driver->memory_unmap(range->base + at * cuda->granule, frame->size_bytes);
      if (result != CU_SUCCESS) {
        restore(cuda, range, first, at);
        return gmi_cuda_failed(cuda, result, "cuMemUnmap");
      }
    }
    at += frame ? frame->size_bytes / cuda->granule : 1;
  }
  return GEMINI_OK;
}
static void forget(cuda_t *cuda, range_t *range, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end; at++)
    if (range->pages[at].frame) pages_forget(cuda, range, at);
}

/* The address range is reserved before the lock is taken: until it is in the list no other call can name it. */
gemini_status_t gmi_cuda_reserve(void *self, uint64_t size_bytes, void **base_out) {
  cuda_t *cuda = self;
  if (!size_ok(cuda, size_bytes) || !base_out) return GEMINI_ERR_INVALID;
  uint64_t base = 0;
  gemini_status_t status = GEMINI_OK;
  entry_t had = gmi_cuda_enter(cuda);
  cu_result_t result = cuda->driver->address_reserve(&base, size_bytes, BASE_ALIGN_BYTES, 0, 0);
  if (result != CU_SUCCESS)
    status = gmi_cuda_failed_or_full(cuda, result, "cuMemAddressReserve", GEMINI_ERR_OOM_SYSTEM);
  if (!status) {
    page_t *pages = calloc(size_bytes / cuda->granule, sizeof *pages);
    pthread_mutex_lock(&cuda->memory.lock);
    if (pages && array_reserve((void **)&cuda->memory.ranges, &cuda->memory.range_capacity, cuda->memory.range_count,
                               sizeof *cuda->memory.ranges)) {
      size_t at = range_at(cuda, base);
      memmove(&cuda->memory.ranges[at + 1], &cuda->memory.ranges[at],
              (cuda->memory.range_count - at) * sizeof *cuda->memory.ranges);
      cuda->memory.ranges[at] = (range_t){ base, size_bytes, pages };
      cuda->memory.range_count++;
    } else {
      status = gmi_cuda_no_memory("address ranges");
    }
    pthread_mutex_unlock(&cuda->memory.lock);
    if (status) {
      free(pages);
      cuda->driver->address_free(base, size_bytes);
    } else {
      *base_out = (void *)(uintptr_t)base;
    }
  }
  gmi_cuda_leave(cuda, had);
  return status;
}

/* base and size must be those of a whole range. Frames that are mapped in it are unmapped, not destroyed. */
gemini_status_t gmi_cuda_unreserve(void *self, void *base, uint64_t size_bytes) {
  cuda_t *cuda = self;
  entry_t had = gmi_cuda_enter(cuda);
  gemini_status_t status = GEMINI_ERR_INVALID;
  pthread_mutex_lock(&cuda->memory.lock);
  size_t at = range_at(cuda, (uintptr_t)base);
  range_t *range = &cuda->memory.ranges[at];
  if (at < cuda->memory.range_count && range->base == (uintptr_t)base && range->size_bytes == size_bytes) {
    uint64_t pages = size_bytes / cuda->granule;
    status = clear(cuda, range, 0, pages);
    if (!status) {
      status = gmi_cuda_done(cuda, cuda->driver->address_free(range->base, size_bytes), "cuMemAddressFree");
      if (status) restore(cuda, range, 0, pages);
    }
    if (!status) {
      forget(cuda, range, 0, pages);
      free(range->pages);
      cuda->memory.range_count--;
      memmove(range, range + 1, (cuda->memory.range_count - at) * sizeof *range);
    }
  }
  pthread_mutex_unlock(&cuda->memory.lock);
  gmi_cuda_leave(cuda, had);
  return status;
}

/* Where it can be, memory is made so that another process could map it: NCCL registers no other (group.h). */
cu_allocation_t gmi_cuda_allocation_of(const gmi_cuda_driver_t *driver, cu_device_t device) {
  cu_allocation_t allocation;
  int shares = 0;
  memset(&allocation, 0, sizeof allocation);
  allocation.type = CU_ALLOCATION_PINNED;
  allocation.location = (cu_location_t){ CU_LOCATION_DEVICE, device };
  if (driver->device_attribute(&shares, CU_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) ==
          CU_SUCCESS &&
      shares)
    allocation.handle_types = CU_HANDLE_POSIX_FILE_DESCRIPTOR;
  return allocation;
}

/* Names are never reused (frames_made only grows), so the name of a destroyed frame is always recognised as stale, and
 * appending keeps the array sorted. */
gemini_status_t gmi_cuda_frame_create(void *self, uint64_t size_bytes, uint64_t *frame_out) {
  cuda_t *cuda = self;
  if (!size_ok(cuda, size_bytes) || !frame_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = GEMINI_OK;
  entry_t had = gmi_cuda_enter(cuda);
  pthread_mutex_lock(&cuda->memory.lock);
  if (size_bytes > cuda->memory.budget_bytes || cuda->memory.used_bytes > cuda->memory.budget_bytes - size_bytes) {
    status = GEMINI_ERR_OOM_DEVICE;
  } else if (!array_reserve((void **)&cuda->memory.frames, &cuda->memory.frame_capacity, cuda->memory.frame_count,
                            sizeof *cuda->memory.frames)) {
    status = gmi_cuda_no_memory("frames");
  } else {
    frame_t frame = { .name = cuda->memory.frames_made + 1, .size_bytes = size_bytes };
    cu_result_t result = cuda->driver->memory_create(&frame.memory, size_bytes, &cuda->allocation, 0);
    if (result == CU_SUCCESS) {
      cuda->memory.frames_made++;
      cuda->memory.frames[cuda->memory.frame_count++] = frame;
      cuda->memory.used_bytes += size_bytes;
      *frame_out = frame.name;
    } else {
      status = gmi_cuda_failed_or_full(cuda, result, "cuMemCreate", GEMINI_ERR_OOM_DEVICE);
    }
  }
  pthread_mutex_unlock(&cuda->memory.lock);
  gmi_cuda_leave(cuda, had);
  return status;
}

/* Marks a frame's record as destroyed. The array is compacted only when more than half of it (and 32) is destroyed:
 * that makes destroying cheap on average. Pointers to frames are invalid afterwards. Called with memory.lock held. */
static void frame_forget(cuda_t *cuda, frame_t *frame) {
  frame->size_bytes = 0;
  if (++cuda->memory.frames_destroyed <= cuda->memory.frame_count / 2 + 32) return;
  size_t kept = 0;
  for (size_t i = 0; i < cuda->memory.frame_count; i++)
    if (cuda->memory.frames[i].size_bytes) cuda->memory.frames[kept++] = cuda->memory.frames[i];
  cuda->memory.frame_count = kept;
  cuda->memory.frames_destroyed = 0;
}

gemini_status_t gmi_cuda_frame_destroy(void *self, uint64_t name, uint64_t size_bytes) {
  cuda_t *cuda = self;
  gemini_status_t status = GEMINI_ERR_INVALID;
  entry_t had = gmi_cuda_enter(cuda);
  pthread_mutex_lock(&cuda->memory.lock);
  frame_t *frame = gmi_cuda_frame_named(cuda, name);
  /* The driver would accept the release of a mapped frame and keep the memory until it is unmapped: memory that the
   * budget does not count. */
  if (frame && frame->size_bytes == size_bytes && !frame->mappings) {
    status = gmi_cuda_done(cuda, cuda->driver->memory_release(frame->memory), "cuMemRelease");
    if (!status) {
      cuda->memory.used_bytes -= size_bytes;
      frame_forget(cuda, frame);
    }
  }
  pthread_mutex_unlock(&cuda->memory.lock);
  gmi_cuda_leave(cuda, had);
  return status;
}

/* Replaces what is mapped at va; see the top of this file. Pages that are partly covered by another mapping are
 * INVALID, as the driver cannot cut a mapping. */
gemini_status_t gmi_cuda_map(void *self, void *va, uint64_t name, uint64_t size_bytes) {
  cuda_t *cuda = self;
  gemini_status_t status = GEMINI_ERR_INVALID;
  entry_t had = gmi_cuda_enter(cuda);
  pthread_mutex_lock(&cuda->memory.lock);
  range_t *range = range_of(cuda, (uintptr_t)va, size_bytes);
  frame_t *frame = gmi_cuda_frame_named(cuda, name);
  if (range && frame && frame->size_bytes == size_bytes) {
    uint64_t first = ((uintptr_t)va - range->base) / cuda->granule, end = first + size_bytes / cuda->granule;
    page_t *head = &range->pages[first];
    if (head->frame == name && head->first == first) {
      status = GEMINI_OK; /* the frame is mapped here already */
    } else if (pages_are_whole(cuda, range, first, end)) {
      status = clear(cuda, range, first, end);
      if (!status) {
        cu_result_t result = map_here(cuda, (uintptr_t)va, frame);
        if (result != CU_SUCCESS) {
          restore(cuda, range, first, end);
          status = gmi_cuda_failed_or_full(cuda, result, "cuMemMap", GEMINI_ERR_OOM_SYSTEM);
        }
      }
      if (!status) {
        forget(cuda, range, first, end);
        for (uint64_t at = first; at < end; at++) range->pages[at] = (page_t){ name, first };
        frame->mappings++;
      }
    }
  }
  pthread_mutex_unlock(&cuda->memory.lock);
  gmi_cuda_leave(cuda, had);
  return status;
}

gemini_status_t gmi_cuda_unmap(void *self, void *va, uint64_t size_bytes) {
  cuda_t *cuda = self;
  gemini_status_t status = GEMINI_ERR_INVALID;
  entry_t had = gmi_cuda_enter(cuda);
  pthread_mutex_lock(&cuda->memory.lock);
  range_t *range = range_of(cuda, (uintptr_t)va, size_bytes);
  if (range) {
    uint64_t first = ((uintptr_t)va - range->base) / cuda->granule, end = first + size_bytes / cuda->granule;
    if (pages_are_whole(cuda, range, first, end)) {
      status = clear(cuda, range, first, end);
      if (!status) forget(cuda, range, first, end);
    }
  }
  pthread_mutex_unlock(&cuda->memory.lock);
  gmi_cuda_leave(cuda, had);
  return status;
}

uint64_t gmi_cuda_granularity(void *self) { return ((cuda_t *)self)->granule; }

gemini_status_t gmi_cuda_resize(void *self, uint64_t memory_bytes) {
  cuda_t *cuda = self;
  if (memory_bytes % cuda->granule || memory_bytes > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  pthread_mutex_lock(&cuda->memory.lock);
  bool ok = cuda->memory.used_bytes <= memory_bytes;
  if (ok) cuda->memory.budget_bytes = memory_bytes;
  pthread_mutex_unlock(&cuda->memory.lock);
  return ok ? GEMINI_OK : GEMINI_ERR_OOM_DEVICE;
}

/* --- page-locked host memory --- */

/* Index of the first record that does not lie below base. Called with host.lock held. */
static size_t locked_at(const cuda_t *cuda, uint64_t base) {
  size_t low = 0, high = cuda->host.count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (cuda->host.ranges[middle].base < base) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Records memory as locked. False: no memory for the record. *known_out: memory at base was recorded before; nothing is
 * added then. */
static bool locked_add(cuda_t *cuda, uint64_t base, uint64_t size_bytes, bool *known_out) {
  pthread_mutex_lock(&cuda->host.lock);
  size_t at = locked_at(cuda, base);
  *known_out = at < cuda->host.count && cuda->host.ranges[at].base == base;
  bool ok = *known_out || array_reserve((void **)&cuda->host.ranges, &cuda->host.capacity, cuda->host.count,
                                        sizeof *cuda->host.ranges);
  if (ok && !*known_out) {
    memmove(&cuda->host.ranges[at + 1], &cuda->host.ranges[at], (cuda->host.count - at) * sizeof *cuda->host.ranges);
    cuda->host.ranges[at] = (locked_t){ base, size_bytes };
    cuda->host.count++;
  }
  pthread_mutex_unlock(&cuda->host.lock);
  return ok;
}

static bool locked_remove(cuda_t *cuda, uint64_t base, uint64_t size_bytes) {
  pthread_mutex_lock(&cuda->host.lock);
  size_t at = locked_at(cuda, base);
  bool found =
      at < cuda->host.count && cuda->host.ranges[at].base == base && cuda->host.ranges[at].size_bytes == size_bytes;
  if (found) {
    cuda->host.count--;
    memmove(&cuda->host.ranges[at], &cuda->host.ranges[at + 1], (cuda->host.count - at) * sizeof *cuda->host.ranges);
  }
  pthread_mutex_unlock(&cuda->host.lock);
  return found;
}

/* The record is made before the driver is called, so that of two threads that lock the same memory one is refused here;
 * it is removed again if the driver fails. Overlapping memory with another base is refused by the driver. */
gemini_status_t gmi_cuda_host_lock(void *self, void *base, uint64_t size_bytes) {
  cuda_t *cuda = self;
  bool known;
  if (!base || !size_bytes) return GEMINI_ERR_INVALID;
  if (!locked_add(cuda, (uintptr_t)base, size_bytes, &known)) return gmi_cuda_no_memory("locked memory");
  if (known) return GEMINI_ERR_INVALID;
  entry_t had = gmi_cuda_enter(cuda);
  cu_result_t result = cuda->driver->host_register(base, size_bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED);
  gmi_cuda_leave(cuda, had);
  if (result == CU_SUCCESS) return GEMINI_OK;
  locked_remove(cuda, (uintptr_t)base, size_bytes);
  gemini_status_t status = gmi_cuda_failed_or_full(cuda, result, "cuMemHostRegister", GEMINI_ERR_OOM_SYSTEM);
  bool wrong = result == CU_INVALID_VALUE || result == CU_HOST_MEMORY_ALREADY_REGISTERED;
  return wrong ? GEMINI_ERR_INVALID : status;
}

/* May wait for the GPU, within the driver. If it fails, the record is put back, so that the call can be repeated. */
gemini_status_t gmi_cuda_host_unlock(void *self, void *base, uint64_t size_bytes) {
  cuda_t *cuda = self;
  bool known;
  if (!locked_remove(cuda, (uintptr_t)base, size_bytes)) return GEMINI_ERR_INVALID;
  entry_t had = gmi_cuda_enter(cuda);
  cu_result_t result = cuda->driver->host_unregister(base);
  gmi_cuda_leave(cuda, had);
  if (result == CU_SUCCESS) return GEMINI_OK;
  locked_add(cuda, (uintptr_t)base, size_bytes, &known);
  return gmi_cuda_failed(cuda, result, "cuMemHostUnregister");
}
