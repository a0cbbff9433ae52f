/* The simulated device: address ranges, frames, mappings and host memory. SPDX-License-Identifier: Apache-2.0
 *
 * A reserved range is a mapping without access. Mapping a frame replaces a part of it by a shared mapping of the
 * frame's extent of the memory file; unmapping puts the mapping without access back. So the same addresses hold
 * different frames over time, one frame can be mapped at several addresses, and touching an unmapped address faults.
 *
 * All runs on the caller's thread. memory_lock guards the records and is not held during system calls that may take
 * long (mmap, fallocate): the caller does not map, unmap or destroy the same frame or address from two threads. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device/sim.h"

/* --- memory --- */

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

/* The live frame of that name and size, or NULL. Called with memory_lock held. */
static frame_t *frame_find(sim_t *sim, uint64_t frame, uint64_t size_bytes) {
  size_t low = 0, high = sim->frame_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (sim->frames[middle].offset < frame) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == sim->frame_count || sim->frames[low].offset != frame || !size_bytes) return NULL;
  return sim->frames[low].size_bytes == size_bytes ? &sim->frames[low] : NULL;
}

/* Index of the first range that does not lie below base. Called with memory_lock held. */
static size_t range_at(const sim_t *sim, const void *base) {
  size_t low = 0, high = sim->range_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if ((uintptr_t)sim->ranges[middle].base < (uintptr_t)base) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Does one range hold [va, va+size)? Called with memory_lock held. */
static bool range_holds(const sim_t *sim, const void *va, uint64_t size_bytes) {
  if ((uintptr_t)va % GRANULE_BYTES || !gmi_sim_size_ok(size_bytes)) return false;
  size_t at = range_at(sim, va);
  if (at == sim->range_count || sim->ranges[at].base != va) {
    if (at == 0) return false;
    at--;
  }
  uint64_t offset = (uintptr_t)va - (uintptr_t)sim->ranges[at].base;
  return offset < sim->ranges[at].size_bytes && size_bytes <= sim->ranges[at].size_bytes - offset;
}

static void *map_nothing(void *va, uint64_t size_bytes, int flags) {
  return mmap(va, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* A system call has failed: records it with errno. */
static gemini_status_t no_room(const char *function) {
  int error = errno;
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "%s: %s", function, strerror(error));
}

gemini_status_t gmi_sim_reserve(void *self, uint64_t size_bytes, void **base_out) {
  sim_t *sim = self;
  if (!gmi_sim_size_ok(size_bytes) || !base_out) return GEMINI_ERR_INVALID;
  uint64_t whole_bytes = size_bytes + BASE_ALIGN_BYTES;
  unsigned char *whole = map_nothing(NULL, whole_bytes, 0);
  if (whole == MAP_FAILED) return no_room("mmap");
  uint64_t skip_bytes = -(uintptr_t)whole % BASE_ALIGN_BYTES;
  unsigned char *base = whole + skip_bytes;
  if (skip_bytes) munmap(whole, skip_bytes);
  munmap(base + size_bytes, BASE_ALIGN_BYTES - skip_bytes);

  pthread_mutex_lock(&sim->memory_lock);
  bool ok = array_reserve((void **)&sim->ranges, &sim->range_capacity, sim->range_count, sizeof *sim->ranges);
  if (ok) {
    size_t at = range_at(sim, base);
    memmove(&sim->ranges[at + 1], &sim->ranges[at], (sim->range_count - at) * sizeof *sim->ranges);
    sim->ranges[at] = (range_t){ base, size_bytes };
    sim->range_count++;
  }
  pthread_mutex_unlock(&sim->memory_lock);
  if (!ok) {
    munmap(base, size_bytes);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for records of address ranges");
  }
  *base_out = base;
  return GEMINI_OK;
}

gemini_status_t gmi_sim_unreserve(void *self, void *base, uint64_t size_bytes) {
  sim_t *sim = self;
  pthread_mutex_lock(&sim->memory_lock);
  size_t at = range_at(sim, base);
  bool ok = at < sim->range_count && sim->ranges[at].base == base && sim->ranges[at].size_bytes == size_bytes;
  if (ok) {
    sim->range_count--;
    memmove(&sim->ranges[at], &sim->ranges[at + 1], (sim->range_count - at) * sizeof *sim->ranges);
  }
  pthread_mutex_unlock(&sim->memory_lock);
  if (!ok) return GEMINI_ERR_INVALID;
  munmap(base, size_bytes);
  return GEMINI_OK;
}

#ifdef GEMINI_CHECK
/* A new frame's contents are undefined. Filling it with a pattern makes tests find code that reads them. */
static void frame_poison(sim_t *sim, uint64_t frame, uint64_t size_bytes) {
  void *bytes = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, sim->memory_fd, (off_t)frame);
  if (bytes == MAP_FAILED) return;
  memset(bytes, 0xA5, size_bytes);
  munmap(bytes, size_bytes);
}
#endif

/* Appends an extent to the memory file. Offsets are never reused, so a stale frame name is always recognised; the file
 * is sparse, and its size does not matter. */
gemini_status_t gmi_sim_frame_create(void *self, uint64_t size_bytes, uint64_t *frame_out) {
  sim_t *sim = self;
  if (!gmi_sim_size_ok(size_bytes) || !frame_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = GEMINI_OK;
  uint64_t frame = 0;
  pthread_mutex_lock(&sim->memory_lock);
  if (size_bytes > sim->memory_bytes || sim->used_bytes > sim->memory_bytes - size_bytes) {
    status = GEMINI_ERR_OOM_DEVICE;
  } else if (size_bytes > sim->file_limit_bytes - sim->file_bytes) {
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, EFBIG,
                      "all frames created so far come to %llu bytes, the limit on file sizes is %llu",
                      (unsigned long long)sim->file_bytes, (unsigned long long)sim->file_limit_bytes);
  } else if (!array_reserve((void **)&sim->frames, &sim->frame_capacity, sim->frame_count, sizeof *sim->frames)) {
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for records of frames");
  } else if (ftruncate(sim->memory_fd, (off_t)(sim->file_bytes + size_bytes)) != 0) {
    status = no_room("ftruncate");
  } else {
    frame = sim->file_bytes;
    sim->frames[sim->frame_count++] = (frame_t){ frame, size_bytes };
    sim->file_bytes += size_bytes;
    sim->used_bytes += size_bytes;
  }
  pthread_mutex_unlock(&sim->memory_lock);
  if (status != GEMINI_OK) return status;
#ifdef GEMINI_CHECK
  frame_poison(sim, frame, size_bytes);
#endif
  *frame_out = frame;
  return GEMINI_OK;
}

/* Marks a frame's record as destroyed. The array is compacted only when more than half of it (and 32) is destroyed,
 * which makes destroying cheap on average. Called with memory_lock held. */
static void frame_forget(sim_t *sim, frame_t *frame) {
  frame->size_bytes = 0;
  if (++sim->frames_destroyed <= sim->frame_count / 2 + 32) return;
  size_t kept = 0;
  for (size_t i = 0; i < sim->frame_count; i++)
    if (sim->frames[i].size_bytes) sim->frames[kept++] = sim->frames[i];
  sim->frame_count = kept;
  sim->frames_destroyed = 0;
}

gemini_status_t gmi_sim_frame_destroy(void *self, uint64_t frame, uint64_t size_bytes) {
  sim_t *sim = self;
  pthread_mutex_lock(&sim->memory_lock);
  bool found = frame_find(sim, frame, size_bytes) != NULL;
  pthread_mutex_unlock(&sim->memory_lock);
  if (!found) return GEMINI_ERR_INVALID;
  /* The frame exists and its bytes count as used until the hole has been punched, so that existing memory never exceeds
   * the budget. */
  if (fallocate(sim->memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)frame, (off_t)size_bytes))
    return no_room("fallocate");
  pthread_mutex_lock(&sim->memory_lock);
  frame_forget(sim, frame_find(sim, frame, size_bytes)); /* looked up again: the array may have moved */
  sim->used_bytes -= size_bytes;
  pthread_mutex_unlock(&sim->memory_lock);
  return GEMINI_OK;
}

gemini_status_t gmi_sim_map(void *self, void *va, uint64_t frame, uint64_t size_bytes) {
  sim_t *sim = self;
  pthread_mutex_lock(&sim->memory_lock);
  bool ok = range_holds(sim, va, size_bytes) && frame_find(sim, frame, size_bytes);
  pthread_mutex_unlock(&sim->memory_lock);
  if (!ok) return GEMINI_ERR_INVALID;
  void *mapped =
      mmap(va, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, sim->memory_fd, (off_t)frame);
  if (mapped == MAP_FAILED) return no_room("mmap");
  (void)madvise(mapped, size_bytes, MADV_DONTFORK); /* the mapping is shared: a child would write to our chunks */
  return GEMINI_OK;
}

gemini_status_t gmi_sim_unmap(void *self, void *va, uint64_t size_bytes) {
  sim_t *sim = self;
  pthread_mutex_lock(&sim->memory_lock);
  bool ok = range_holds(sim, va, size_bytes);
  pthread_mutex_unlock(&sim->memory_lock);
  if (!ok) return GEMINI_ERR_INVALID;
  /* MAP_FIXED replaces the mapping in one step: between munmap() and mmap() another thread could take the addresses. */
  return map_nothing(va, size_bytes, MAP_FIXED) == MAP_FAILED ? no_room("mmap") : GEMINI_OK;
}

uint64_t gmi_sim_granularity(void *self) {
  (void)self;
  return GRANULE_BYTES;
}

bool gmi_sim_memory_bytes_ok(uint64_t memory_bytes) {
  return memory_bytes % GRANULE_BYTES == 0 && memory_bytes <= MEMORY_MAX_BYTES;
}

gemini_status_t gmi_sim_resize(void *self, uint64_t memory_bytes) {
  sim_t *sim = self;
  if (!gmi_sim_memory_bytes_ok(memory_bytes)) return GEMINI_ERR_INVALID;
  pthread_mutex_lock(&sim->memory_lock);
  bool ok = sim->used_bytes <= memory_bytes;
  if (ok) sim->memory_bytes = memory_bytes;
  pthread_mutex_unlock(&sim->memory_lock);
  return ok ? GEMINI_OK : GEMINI_ERR_OOM_DEVICE;
}

/* Host memory needs no page-locking here; arguments that a real device refuses are refused. */
gemini_status_t gmi_sim_host_lock(void *self, void *base, uint64_t size_bytes) {
  (void)self;
  return base && size_bytes ? GEMINI_OK : GEMINI_ERR_INVALID;
}
