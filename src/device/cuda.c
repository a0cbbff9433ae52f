/* The CUDA device, over the CUDA driver opened at run time. SPDX-License-Identifier: Apache-2.0
 *
 * Context. Everything lives in the GPU's primary context, which other users of the process (a framework, the CUDA
 * runtime) share: it is retained, never configured and never reset. Each operation looks at what the thread has
 * current (a few nanoseconds); only where that is another context it sets ours and afterwards puts the other one back.
 *
 * Marks are events: mark m of a stream is an event at m % capacity of the stream's ring. An event is used again once
 * its mark has been passed by MARK_TIMES reached ones; while the stream is further behind than that, the ring grows. A
 * mark that has left the ring is therefore always known to be reached. An event that takes the time costs the GPU a
 * microsecond and the host another one, one that does not costs next to nothing: so there are two kinds of marks.
 *
 * Waiting is looking again and again, with sleeps in between. The driver's own ways are worse: it spins, or, for
 * events made for blocking, pays 20 us an event and takes no more than 55 of them on a held stream; and a thread that
 * waits in the driver may wait for others that are held up in it.
 *
 * Flags. A GPU cannot watch any word of the host's, so the stream waits for a *gate*, a word of page-locked memory of
 * this device's, which wait_flag() and flag_wake() open when the flag they stand for has its value. Nothing of it runs
 * on the driver's callback thread, which serves all streams and must not wait. Streams share the GPU's few hardware
 * queues, so that a stream held by a gate may hold others behind it. That cannot become a deadlock as long as what
 * stores a flag waits only for device work that was queued before the wait for the flag: then everything waits for
 * what was queued before it, in whatever queues that is.
 *
 * Sums of squares are collected and run together when anything else is queued on the stream; their results go to where
 * they were asked for in a host function, queued behind them.
 *
 * Queues. The driver holds about a thousand copies, kernels and timed events per stream (of calls, waits and other
 * events any number): whoever queues more waits for the GPU, and meanwhile whoever makes an event or locks host memory
 * waits for him. Copies from or to host memory that is not locked also wait. So a stream's lock may be held for long,
 * and looking at marks, waiting for them and waking flags does without it.
 *
 * Failures. An error of a kernel, of the user's too, loses the context: all streams fail from then on, until the
 * process ends. It is stored for the device (lost) and every sync() returns it.
 *
 * Lock order: streams_lock, stream.lock, stream.points_lock. renew_lock comes before clock_lock. These, memory_lock,
 * host_lock, flag_lock and sum_lock are otherwise innermost. A host function of the user's takes none of them. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/status.h"
#include "device/cuda_driver.h"
#include "device/device.h"

#define BASE_ALIGN_BYTES (UINT64_C(2) << 20)
#define MEMORY_MAX_BYTES (UINT64_C(1) << 60)
#define MARK_TIMES 4096u
#define POINTS_FIRST (2 * MARK_TIMES)
#define POINTS_MAX (UINT64_C(1) << 24)
#define GATES 16384u
#define SUMS 4096u
#define SUM_THREADS 32u /* the kernel's */
#define NS_PER_S UINT64_C(1000000000)
/* Times are counted from an event whose host time is known. The driver gives the distance as a float of milliseconds:
 * 15 ns fine when it is less than this. A new base costs some 20 us, when times are asked for. */
#define BASE_LIFE_NS (NS_PER_S / 4)
#define BASE_WAIT_NS UINT64_C(100000)
#define BASE_RETRY_NS (BASE_LIFE_NS / 16)
/* Waiting: without sleep at first, then sleeping for an eighth of the time waited so far, within limits. */
#define WAIT_SPIN_NS UINT64_C(30000)
#define WAIT_SLEEP_MIN_NS UINT64_C(20000)
#define WAIT_SLEEP_MAX_NS UINT64_C(500000)

enum { STREAM_NONE, STREAM_LIVE, STREAM_CLOSING };

enum { UNTIMED, TIMED, POINT_KINDS };
typedef struct point {
  cu_event_t events[POINT_KINDS]; /* NULL: not made yet */
  uint64_t placed_ns;
  uint32_t kind;  /* the event that counts */
  uint32_t users; /* threads that queue waits for it: it must not be recorded again */
} point_t;

typedef struct sum_batch {
  struct sum_batch *next, *next_of_all;
  gmi_cuda_sum_t *items; /* page-locked */
  cu_address_t address;  /* the GPU's name of items */
  struct cuda *cuda;
  uint32_t count, reserved;
  double *sums[SUMS];
} sum_batch_t;

typedef struct stream {
  _Atomic bool made; /* marks of it can be asked for */

  pthread_mutex_t lock; /* held while something is queued */
  uint32_t state;       /* STREAM_*. Guarded by lock, as the next five */
  bool adopted;         /* somebody else's */
  bool shared;          /* somebody else may queue on it, and capture it */
  cu_stream_t native;
  unsigned long long id;   /* adopted: of native, that of no other stream ever; 0 = not known */
  cu_event_t idle;         /* for the end of the stream */
  sum_batch_t *sums;       /* not yet queued */
  _Atomic uint64_t placed; /* Written under lock */

  pthread_mutex_t points_lock;
  point_t *points; /* capacity of them, a power of two. Guarded by points_lock, as all of these */
  uint64_t capacity;
  _Atomic uint64_t reached;      /* what is known. Written under points_lock */
  uint64_t noted_ns;             /* when it was written */
  uint64_t timed_mark, timed_ns; /* the latest mark whose time was told */
} stream_t;

typedef struct frame {
  uint64_t name;
  uint64_t size_bytes; /* 0: destroyed */
  cu_memory_t memory;
  uint64_t mappings;
} frame_t;
typedef struct page { /* a granule of a range */
  uint64_t frame;     /* mapped here; 0 = none */
  uint64_t first;     /* the mapping's first page */
} page_t;
typedef struct range {
  uint64_t base, size_bytes;
  page_t *pages;
} range_t;
typedef struct locked {
  uint64_t base, size_bytes;
} locked_t;

typedef struct waiter {
  const _Atomic uint64_t *flag;
  uint64_t value;
  uint32_t gate;
  uint32_t reserved;
} waiter_t;

typedef struct cuda {
  const gmi_cuda_driver_t *driver;
  cu_context_t context;
  _Atomic int lost; /* the error that lost the context */
  cu_device_t device;
  uint64_t granule;

  pthread_mutex_t memory_lock;
  uint64_t memory_bytes, used_bytes, frames_made; /* Guarded by memory_lock, as the rest of these */
  frame_t *frames;                                /* in the order of name, which is the order of creation */
  size_t frame_count, frame_capacity, frames_destroyed;
  range_t *ranges; /* in the order of base */
  size_t range_count, range_capacity;

  pthread_mutex_t host_lock;
  locked_t *locked; /* in the order of base. Guarded by host_lock, as the next two */
  size_t locked_count, locked_capacity;

  pthread_mutex_t flag_lock;
  _Atomic uint64_t *gates; /* page-locked. A gate's number only grows: so it can serve again as soon as it is open */
  cu_address_t gates_address;
  uint32_t free_gates[GATES]; /* Guarded by flag_lock, as the next three */
  uint32_t free_gate_count, waiter_count;
  waiter_t waiters[GATES];
  _Atomic uint32_t flag_waiters; /* waiter_count, for a look without the lock */

  pthread_mutex_t sum_lock;
  sum_batch_t *sums_free, *sums_all; /* Guarded by sum_lock */
  cu_module_t module;
  cu_function_t sum_kernel;

  pthread_mutex_t renew_lock; /* held by who takes a new base; nobody waits for it */
  cu_stream_t clock;
  cu_event_t bases[2]; /* the one that counts, and the one that will */
  pthread_mutex_t clock_lock;
  uint32_t base;                /* Guarded by clock_lock, as base_ns */
  uint64_t base_ns;             /* bases[base] on the host's clock */
  _Atomic uint64_t base_due_ns; /* when to take a new one */

  pthread_mutex_t streams_lock; /* held to create and to destroy */
  stream_t streams[GMI_DEVICE_MAX_STREAMS];
} cuda_t;

static uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}
static uint64_t cuda_now(void *self) {
  (void)self;
  return now_ns();
}

/* Between two looks at something waited for since begin_ns. */
static void wait_a_little(uint64_t begin_ns) {
  uint64_t waited_ns = now_ns() - begin_ns, ns = waited_ns / 8;
  if (waited_ns < WAIT_SPIN_NS) return;
  if (ns < WAIT_SLEEP_MIN_NS) ns = WAIT_SLEEP_MIN_NS;
  if (ns > WAIT_SLEEP_MAX_NS) ns = WAIT_SLEEP_MAX_NS;
  nanosleep(&(struct timespec){ 0, (long)ns }, NULL);
}

/* --- errors and the context --- */

/* Does this error stay until the process ends? */
static bool loses_context(cu_result_t result) {
  switch (result) {
  case CU_DEINITIALIZED:
  case CU_ECC_UNCORRECTABLE:
  case CU_NVLINK_UNCORRECTABLE:
  case CU_CONTAINED:
  case CU_ILLEGAL_ADDRESS:
  case CU_LAUNCH_TIMEOUT:
  case CU_CONTEXT_IS_DESTROYED:
  case CU_ASSERT:
  case CU_TENSOR_MEMORY_LEAK:
  case CU_MPS_CLIENT_TERMINATED:
  case CU_EXTERNAL_DEVICE: return true;
  default: return result >= CU_HARDWARE_STACK_ERROR && result <= CU_LAUNCH_FAILED;
  }
}

static void note(cuda_t *cuda, cu_result_t result) { /* the first one stays */
  int none = CU_SUCCESS;
  if (loses_context(result)) atomic_compare_exchange_strong(&cuda->lost, &none, result);
}

static gemini_status_t failed(cuda_t *cuda, cu_result_t result, const char *function) {
  note(cuda, result);
  return gmi_fail(GEMINI_ERR_DEVICE, result, "%s: %s", function, gmi_cuda_error_name(cuda->driver, result));
}
static gemini_status_t done(cuda_t *cuda, cu_result_t result, const char *function) {
  return result == CU_SUCCESS ? GEMINI_OK : failed(cuda, result, function);
}
/* As failed(), but memory that ran out has a status of its own. */
static gemini_status_t failed_or_full(cuda_t *cuda, cu_result_t result, const char *function, gemini_status_t full) {
  gemini_status_t status = failed(cuda, result, function);
  if (result != CU_OUT_OF_MEMORY) return status;
  return gmi_fail(full, result, "%s: %s", function, gmi_cuda_error_name(cuda->driver, result));
}

static bool is_lost(const cuda_t *cuda) {
  return atomic_load_explicit(&cuda->lost, memory_order_relaxed) != CU_SUCCESS;
}
static gemini_status_t stored_failure(cuda_t *cuda) {
  int lost = atomic_load(&cuda->lost);
  if (lost == CU_SUCCESS) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_DEVICE, lost, "the GPU's context was lost by %s", gmi_cuda_error_name(cuda->driver, lost));
}

/* What a thread had before enter(). */
typedef struct entry {
  cu_context_t context;
  int capture_mode;
} entry_t;

/* Makes our context the thread's, and lets it do what would otherwise end another thread's capture of a graph; what it
 * had goes to leave(). What cannot be set is noticed by the call that needs it. */
static entry_t enter(cuda_t *cuda) {
  entry_t had = { NULL, CU_CAPTURE_MODE_RELAXED };
  cuda->driver->current_get(&had.context);
  if (had.context != cuda->context) cuda->driver->current_set(cuda->context);
  cuda->driver->capture_mode(&had.capture_mode);
  return had;
}
static void leave(cuda_t *cuda, entry_t had) {
  cuda->driver->capture_mode(&had.capture_mode);
  if (had.context != cuda->context) cuda->driver->current_set(had.context);
}

static gemini_status_t event_wait(cuda_t *cuda, cu_event_t event) {
  cu_result_t result;
  for (uint64_t begin = now_ns(); (result = cuda->driver->event_query(event)) == CU_NOT_READY;) wait_a_little(begin);
  return done(cuda, result, "cuEventQuery");
}

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

static gemini_status_t no_memory(const char *what) {
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, 0, "no memory for records of %s", what);
}

/* The live frame of that name, or NULL. Called with memory_lock held. */
static frame_t *frame_named(cuda_t *cuda, uint64_t name) {
  size_t low = 0, high = cuda->frame_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (cuda->frames[middle].name < name) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == cuda->frame_count || cuda->frames[low].name != name || !cuda->frames[low].size_bytes) return NULL;
  return &cuda->frames[low];
}

/* Index of the first range that does not lie below base. Called with memory_lock held. */
static size_t range_at(const cuda_t *cuda, uint64_t base) {
  size_t low = 0, high = cuda->range_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (cuda->ranges[middle].base < base) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/* The range that holds [va, va + size), or NULL. Called with memory_lock held. */
static range_t *range_of(cuda_t *cuda, uint64_t va, uint64_t size_bytes) {
  if (va % cuda->granule || !size_ok(cuda, size_bytes)) return NULL;
  size_t at = range_at(cuda, va);
  if (at == cuda->range_count || cuda->ranges[at].base != va) {
    if (at == 0) return NULL;
    at--;
  }
  range_t *range = &cuda->ranges[at];
  uint64_t offset = va - range->base;
  return offset < range->size_bytes && size_bytes <= range->size_bytes - offset ? range : NULL;
}

/* Do all mappings that touch pages first..end lie within them? The driver removes whole mappings only. */
static bool pages_are_whole(cuda_t *cuda, const range_t *range, uint64_t first, uint64_t end) {
  const page_t *head = &range->pages[first], *tail = &range->pages[end - 1];
  if (head->frame && head->first != first) return false;
  return !tail->frame || tail->first + frame_named(cuda, tail->frame)->size_bytes / cuda->granule <= end;
}

static cu_result_t map_here(cuda_t *cuda, uint64_t va, const frame_t *frame) {
  const cu_access_t access = { { CU_LOCATION_DEVICE, cuda->device }, CU_ACCESS_READ_WRITE };
  cu_result_t result = cuda->driver->memory_map(va, frame->size_bytes, 0, frame->memory, 0);
  if (result != CU_SUCCESS) return result;
  result = cuda->driver->memory_access(va, frame->size_bytes, &access, 1);
  if (result != CU_SUCCESS) cuda->driver->memory_unmap(va, frame->size_bytes);
  return result;
}

static void pages_forget(cuda_t *cuda, range_t *range, uint64_t first) {
  frame_t *frame = frame_named(cuda, range->pages[first].frame);
  frame->mappings--;
  memset(&range->pages[first], 0, frame->size_bytes / cuda->granule * sizeof *range->pages);
}

/* Puts back what clear() took away from first up to end. What cannot be put back is forgotten. */
static void restore(cuda_t *cuda, range_t *range, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end;) {
    const frame_t *frame = range->pages[at].frame ? frame_named(cuda, range->pages[at].frame) : NULL;
    uint64_t pages = frame ? frame->size_bytes / cuda->granule : 1;
    if (frame && map_here(cuda, range->base + at * cuda->granule, frame) != CU_SUCCESS) pages_forget(cuda, range, at);
    at += pages;
  }
}

/* Unmaps what is mapped from page first up to end, but keeps its records, so that restore() can undo it. Called with
 * memory_lock held. */
static gemini_status_t clear(cuda_t *cuda, range_t *range, uint64_t first, uint64_t end) {
  for (uint64_t at = first; at < end;) {
    const frame_t *frame = range->pages[at].frame ? frame_named(cuda, range->pages[at].frame) : NULL;
    if (frame) {
      cu_result_t result = cuda->driver->memory_unmap(range->base + at * cuda->granule, frame->size_bytes);
      if (result != CU_SUCCESS) {
        restore(cuda, range, first, at);
        return failed(cuda, result, "cuMemUnmap");
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

static gemini_status_t cuda_reserve(void *self, uint64_t size_bytes, void **base_out) {
  cuda_t *cuda = self;
  if (!size_ok(cuda, size_bytes) || !base_out) return GEMINI_ERR_INVALID;
  uint64_t base = 0;
  gemini_status_t status = GEMINI_OK;
  entry_t had = enter(cuda);
  cu_result_t result = cuda->driver->address_reserve(&base, size_bytes, BASE_ALIGN_BYTES, 0, 0);
  if (result != CU_SUCCESS) status = failed_or_full(cuda, result, "cuMemAddressReserve", GEMINI_ERR_OOM_SYSTEM);
  if (!status) {
    page_t *pages = calloc(size_bytes / cuda->granule, sizeof *pages);
    pthread_mutex_lock(&cuda->memory_lock);
    if (pages &&
        array_reserve((void **)&cuda->ranges, &cuda->range_capacity, cuda->range_count, sizeof *cuda->ranges)) {
      size_t at = range_at(cuda, base);
      memmove(&cuda->ranges[at + 1], &cuda->ranges[at], (cuda->range_count - at) * sizeof *cuda->ranges);
      cuda->ranges[at] = (range_t){ base, size_bytes, pages };
      cuda->range_count++;
    } else {
      status = no_memory("address ranges");
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    if (status) {
      free(pages);
      cuda->driver->address_free(base, size_bytes);
    } else {
      *base_out = (void *)(uintptr_t)base;
    }
  }
  leave(cuda, had);
  return status;
}

static gemini_status_t cuda_unreserve(void *self, void *base, uint64_t size_bytes) {
  cuda_t *cuda = self;
  entry_t had = enter(cuda);
  gemini_status_t status = GEMINI_ERR_INVALID;
  pthread_mutex_lock(&cuda->memory_lock);
  size_t at = range_at(cuda, (uintptr_t)base);
  range_t *range = &cuda->ranges[at];
  if (at < cuda->range_count && range->base == (uintptr_t)base && range->size_bytes == size_bytes) {
    uint64_t pages = size_bytes / cuda->granule;
    status = clear(cuda, range, 0, pages);
    if (!status) {
      status = done(cuda, cuda->driver->address_free(range->base, size_bytes), "cuMemAddressFree");
      if (status) restore(cuda, range, 0, pages);
    }
    if (!status) {
      forget(cuda, range, 0, pages);
      free(range->pages);
      cuda->range_count--;
      memmove(range, range + 1, (cuda->range_count - at) * sizeof *range);
    }
  }
  pthread_mutex_unlock(&cuda->memory_lock);
  leave(cuda, had);
  return status;
}

static cu_allocation_t allocation_of(cu_device_t device) {
  cu_allocation_t allocation;
  memset(&allocation, 0, sizeof allocation);
  allocation.type = CU_ALLOCATION_PINNED;
  allocation.location = (cu_location_t){ CU_LOCATION_DEVICE, device };
  return allocation;
}

static gemini_status_t cuda_frame_create(void *self, uint64_t size_bytes, uint64_t *frame_out) {
  cuda_t *cuda = self;
  if (!size_ok(cuda, size_bytes) || !frame_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = GEMINI_OK;
  entry_t had = enter(cuda);
  pthread_mutex_lock(&cuda->memory_lock);
  if (size_bytes > cuda->memory_bytes || cuda->used_bytes > cuda->memory_bytes - size_bytes) {
    status = GEMINI_ERR_OOM_DEVICE;
  } else if (!array_reserve((void **)&cuda->frames, &cuda->frame_capacity, cuda->frame_count, sizeof *cuda->frames)) {
    status = no_memory("frames");
  } else {
    cu_allocation_t allocation = allocation_of(cuda->device);
    frame_t frame = { .name = cuda->frames_made + 1, .size_bytes = size_bytes };
    cu_result_t result = cuda->driver->memory_create(&frame.memory, size_bytes, &allocation, 0);
    if (result == CU_SUCCESS) {
      cuda->frames_made++;
      cuda->frames[cuda->frame_count++] = frame;
      cuda->used_bytes += size_bytes;
      *frame_out = frame.name;
    } else {
      status = failed_or_full(cuda, result, "cuMemCreate", GEMINI_ERR_OOM_DEVICE);
    }
  }
  pthread_mutex_unlock(&cuda->memory_lock);
  leave(cuda, had);
  return status;
}

/* Called with memory_lock held. */
static void frame_forget(cuda_t *cuda, frame_t *frame) {
  frame->size_bytes = 0;
  if (++cuda->frames_destroyed <= cuda->frame_count / 2 + 32) return;
  size_t kept = 0;
  for (size_t i = 0; i < cuda->frame_count; i++)
    if (cuda->frames[i].size_bytes) cuda->frames[kept++] = cuda->frames[i];
  cuda->frame_count = kept;
  cuda->frames_destroyed = 0;
}

static gemini_status_t cuda_frame_destroy(void *self, uint64_t name, uint64_t size_bytes) {
  cuda_t *cuda = self;
  gemini_status_t status = GEMINI_ERR_INVALID;
  entry_t had = enter(cuda);
  pthread_mutex_lock(&cuda->memory_lock);
  frame_t *frame = frame_named(cuda, name);
  /* Mapped memory would live on, uncounted. */
  if (frame && frame->size_bytes == size_bytes && !frame->mappings) {
    status = done(cuda, cuda->driver->memory_release(frame->memory), "cuMemRelease");
    if (!status) {
      cuda->used_bytes -= size_bytes;
      frame_forget(cuda, frame);
    }
  }
  pthread_mutex_unlock(&cuda->memory_lock);
  leave(cuda, had);
  return status;
}

static gemini_status_t cuda_map(void *self, void *va, uint64_t name, uint64_t size_bytes) {
  cuda_t *cuda = self;
  gemini_status_t status = GEMINI_ERR_INVALID;
  entry_t had = enter(cuda);
  pthread_mutex_lock(&cuda->memory_lock);
  range_t *range = range_of(cuda, (uintptr_t)va, size_bytes);
  frame_t *frame = frame_named(cuda, name);
  if (range && frame && frame->size_bytes == size_bytes) {
    uint64_t first = ((uintptr_t)va - range->base) / cuda->granule, end = first + size_bytes / cuda->granule;
    page_t *head = &range->pages[first];
    if (head->frame == name && head->first == first) {
      status = GEMINI_OK; /* as it was */
    } else if (pages_are_whole(cuda, range, first, end)) {
      status = clear(cuda, range, first, end);
      if (!status) {
        cu_result_t result = map_here(cuda, (uintptr_t)va, frame);
        if (result != CU_SUCCESS) {
          restore(cuda, range, first, end);
          status = failed_or_full(cuda, result, "cuMemMap", GEMINI_ERR_OOM_SYSTEM);
        }
      }
      if (!status) {
        forget(cuda, range, first, end);
        for (uint64_t at = first; at < end; at++) range->pages[at] = (page_t){ name, first };
        frame->mappings++;
      }
    }
  }
  pthread_mutex_unlock(&cuda->memory_lock);
  leave(cuda, had);
  return status;
}

static gemini_status_t cuda_unmap(void *self, void *va, uint64_t size_bytes) {
  cuda_t *cuda = self;
  gemini_status_t status = GEMINI_ERR_INVALID;
  entry_t had = enter(cuda);
  pthread_mutex_lock(&cuda->memory_lock);
  range_t *range = range_of(cuda, (uintptr_t)va, size_bytes);
  if (range) {
    uint64_t first = ((uintptr_t)va - range->base) / cuda->granule, end = first + size_bytes / cuda->granule;
    if (pages_are_whole(cuda, range, first, end)) {
      status = clear(cuda, range, first, end);
      if (!status) forget(cuda, range, first, end);
    }
  }
  pthread_mutex_unlock(&cuda->memory_lock);
  leave(cuda, had);
  return status;
}

static uint64_t cuda_granularity(void *self) { return ((cuda_t *)self)->granule; }

static gemini_status_t cuda_resize(void *self, uint64_t memory_bytes) {
  cuda_t *cuda = self;
  if (memory_bytes % cuda->granule || memory_bytes > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  pthread_mutex_lock(&cuda->memory_lock);
  bool ok = cuda->used_bytes <= memory_bytes;
  if (ok) cuda->memory_bytes = memory_bytes;
  pthread_mutex_unlock(&cuda->memory_lock);
  return ok ? GEMINI_OK : GEMINI_ERR_OOM_DEVICE;
}

/* --- page-locked host memory --- */

/* Index of the first record that does not lie below base. Called with host_lock held. */
static size_t locked_at(const cuda_t *cuda, uint64_t base) {
  size_t low = 0, high = cuda->locked_count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (cuda->locked[middle].base < base) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Records base as locked; false: no memory. known_out: it was recorded before. */
static bool locked_add(cuda_t *cuda, uint64_t base, uint64_t size_bytes, bool *known_out) {
  pthread_mutex_lock(&cuda->host_lock);
  size_t at = locked_at(cuda, base);
  *known_out = at < cuda->locked_count && cuda->locked[at].base == base;
  bool ok = *known_out ||
            array_reserve((void **)&cuda->locked, &cuda->locked_capacity, cuda->locked_count, sizeof *cuda->locked);
  if (ok && !*known_out) {
    memmove(&cuda->locked[at + 1], &cuda->locked[at], (cuda->locked_count - at) * sizeof *cuda->locked);
    cuda->locked[at] = (locked_t){ base, size_bytes };
    cuda->locked_count++;
  }
  pthread_mutex_unlock(&cuda->host_lock);
  return ok;
}

static bool locked_remove(cuda_t *cuda, uint64_t base, uint64_t size_bytes) {
  pthread_mutex_lock(&cuda->host_lock);
  size_t at = locked_at(cuda, base);
  bool found = at < cuda->locked_count && cuda->locked[at].base == base && cuda->locked[at].size_bytes == size_bytes;
  if (found) {
    cuda->locked_count--;
    memmove(&cuda->locked[at], &cuda->locked[at + 1], (cuda->locked_count - at) * sizeof *cuda->locked);
  }
  pthread_mutex_unlock(&cuda->host_lock);
  return found;
}

static gemini_status_t cuda_host_lock(void *self, void *base, uint64_t size_bytes) {
  cuda_t *cuda = self;
  bool known;
  if (!base || !size_bytes) return GEMINI_ERR_INVALID;
  if (!locked_add(cuda, (uintptr_t)base, size_bytes, &known)) return no_memory("locked memory");
  if (known) return GEMINI_ERR_INVALID;
  entry_t had = enter(cuda);
  cu_result_t result = cuda->driver->host_register(base, size_bytes, CU_HOST_PORTABLE | CU_HOST_MAPPED);
  leave(cuda, had);
  if (result == CU_SUCCESS) return GEMINI_OK;
  locked_remove(cuda, (uintptr_t)base, size_bytes);
  gemini_status_t status = failed_or_full(cuda, result, "cuMemHostRegister", GEMINI_ERR_OOM_SYSTEM);
  bool wrong = result == CU_INVALID_VALUE || result == CU_HOST_MEMORY_ALREADY_REGISTERED;
  return wrong ? GEMINI_ERR_INVALID : status;
}

static gemini_status_t cuda_host_unlock(void *self, void *base, uint64_t size_bytes) {
  cuda_t *cuda = self;
  bool known;
  if (!locked_remove(cuda, (uintptr_t)base, size_bytes)) return GEMINI_ERR_INVALID;
  entry_t had = enter(cuda);
  cu_result_t result = cuda->driver->host_unregister(base);
  leave(cuda, had);
  if (result == CU_SUCCESS) return GEMINI_OK;
  locked_add(cuda, (uintptr_t)base, size_bytes, &known);
  return failed(cuda, result, "cuMemHostUnregister");
}

/* --- marks --- */

static point_t *point_of(stream_t *stream, uint64_t mark) { return &stream->points[mark & (stream->capacity - 1)]; }

static cu_event_t event_of(stream_t *stream, uint64_t mark) {
  const point_t *point = point_of(stream, mark);
  return point->events[point->kind];
}

static void note_reached(stream_t *stream, uint64_t mark) {
  if (atomic_load_explicit(&stream->reached, memory_order_relaxed) >= mark) return;
  stream->noted_ns = now_ns();
  atomic_store_explicit(&stream->reached, mark, memory_order_release);
}

/* Looks at a placed mark's event. Called with points_lock held, in the context. */
static cu_result_t look(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  if (atomic_load_explicit(&stream->reached, memory_order_relaxed) >= mark) return CU_SUCCESS;
  cu_result_t result = cuda->driver->event_query(event_of(stream, mark));
  if (result == CU_SUCCESS) note_reached(stream, mark);
  note(cuda, result);
  return result;
}

/* Is the event of this mark free to be used again? Nobody waits for it, and nobody may ask for its time any more. */
static bool point_is_free(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  if (point_of(stream, mark)->users) return false;
  uint64_t needed = mark + MARK_TIMES;
  uint64_t placed = atomic_load_explicit(&stream->placed, memory_order_relaxed);
  if (atomic_load_explicit(&stream->reached, memory_order_relaxed) >= needed) return true;
  /* Far ahead first, so that the answer lasts for many marks. */
  return look(cuda, stream, needed + (placed - needed) / 2) == CU_SUCCESS || look(cuda, stream, needed) == CU_SUCCESS;
}

static gemini_status_t points_grow(stream_t *stream) {
  uint64_t capacity = stream->capacity ? stream->capacity * 2 : POINTS_FIRST;
  point_t *points = capacity <= POINTS_MAX ? calloc(capacity, sizeof *points) : NULL;
  if (!points) return no_memory("marks");
  uint64_t placed = atomic_load_explicit(&stream->placed, memory_order_relaxed);
  /* It grows when it is full, or not there: every entry is a mark's. */
  for (uint64_t i = 0; i < stream->capacity; i++) points[(placed - i) & (capacity - 1)] = *point_of(stream, placed - i);
  free(stream->points);
  stream->points = points;
  stream->capacity = capacity;
  return GEMINI_OK;
}

/* Makes room for the mark and an event for it. Called with both locks held, in the context. */
static gemini_status_t point_prepare(cuda_t *cuda, stream_t *stream, uint64_t mark, uint32_t kind) {
  gemini_status_t status = GEMINI_OK;
  if (!stream->capacity || (mark > stream->capacity && !point_is_free(cuda, stream, mark - stream->capacity)))
    status = points_grow(stream);
  if (status) return status;
  cu_event_t *event = &point_of(stream, mark)->events[kind];
  if (*event) return GEMINI_OK;
  return done(cuda, cuda->driver->event_create(event, kind == TIMED ? 0 : CU_EVENT_NO_TIME), "cuEventCreate");
}

/* --- streams --- */

/* The stream of that index if it was ever made, or NULL. */
static stream_t *stream_of(cuda_t *cuda, uint32_t index) {
  if (index >= GMI_DEVICE_MAX_STREAMS) return NULL;
  return atomic_load_explicit(&cuda->streams[index].made, memory_order_acquire) ? &cuda->streams[index] : NULL;
}
static bool mark_placed(const stream_t *stream, uint64_t mark) {
  return mark <= atomic_load_explicit(&stream->placed, memory_order_acquire);
}

/* Runs in the driver's thread, which must not call the driver. */
static void sums_deliver(void *user) {
  sum_batch_t *batch = user;
  cuda_t *cuda = batch->cuda;
  for (uint32_t i = 0; i < batch->count; i++) *batch->sums[i] = batch->items[i].sum;
  pthread_mutex_lock(&cuda->sum_lock);
  batch->next = cuda->sums_free;
  cuda->sums_free = batch;
  pthread_mutex_unlock(&cuda->sum_lock);
}

/* Queues the collected sums. After a failure they are still there, to be queued, or queued again, by the next one.
 * Called with the stream's lock held, in the context. */
static gemini_status_t sums_flush(cuda_t *cuda, stream_t *stream) {
  sum_batch_t *batch = stream->sums;
  if (!batch) return GEMINI_OK;
  void *parameters[] = { &batch->address };
  gemini_status_t status = done(cuda,
                                cuda->driver->launch(cuda->sum_kernel, batch->count, 1, 1, SUM_THREADS, 1, 1, 0,
                                                     stream->native, parameters, NULL),
                                "cuLaunchKernel");
  if (status) return status;
  stream->sums = NULL; /* from here on the driver's thread may have it */
  status = done(cuda, cuda->driver->host_call(stream->native, sums_deliver, batch), "cuLaunchHostFunc");
  if (status) stream->sums = batch;
  return status;
}

static gemini_status_t sums_new(cuda_t *cuda, sum_batch_t **batch_out) {
  pthread_mutex_lock(&cuda->sum_lock);
  sum_batch_t *batch = cuda->sums_free;
  if (batch) cuda->sums_free = batch->next;
  pthread_mutex_unlock(&cuda->sum_lock);
  if (!batch) {
    void *items = NULL;
    batch = calloc(1, sizeof *batch);
    if (!batch) return no_memory("sums of squares");
    cu_result_t result =
        cuda->driver->host_alloc(&items, SUMS * sizeof *batch->items, CU_HOST_PORTABLE | CU_HOST_MAPPED);
    if (result == CU_SUCCESS) {
      result = cuda->driver->host_address(&batch->address, items, 0);
      if (result != CU_SUCCESS) cuda->driver->host_free(items);
    }
    if (result != CU_SUCCESS) {
      free(batch);
      return failed_or_full(cuda, result, "cuMemHostAlloc", GEMINI_ERR_OOM_SYSTEM);
    }
    batch->items = items;
    batch->cuda = cuda;
    pthread_mutex_lock(&cuda->sum_lock);
    batch->next_of_all = cuda->sums_all;
    cuda->sums_all = batch;
    pthread_mutex_unlock(&cuda->sum_lock);
  }
  batch->count = 0;
  *batch_out = batch;
  return GEMINI_OK;
}

/* A stream about to be queued on: locked, in the context, with its sums queued. */
typedef struct queue {
  stream_t *stream;
  entry_t had;
} queue_t;

static void queue_end(cuda_t *cuda, queue_t *queue) {
  leave(cuda, queue->had);
  pthread_mutex_unlock(&queue->stream->lock);
}

/* Without the sums: they come with whatever is queued next. */
static gemini_status_t queue_begin_sum(cuda_t *cuda, uint32_t index, queue_t *queue) {
  stream_t *stream = stream_of(cuda, index);
  if (!stream) return GEMINI_ERR_INVALID;
  pthread_mutex_lock(&stream->lock);
  if (stream->state != STREAM_LIVE) {
    pthread_mutex_unlock(&stream->lock);
    return GEMINI_ERR_INVALID;
  }
  *queue = (queue_t){ stream, enter(cuda) };
  /* What is queued now would run with every replay, and its marks never by themselves. */
  int capturing = CU_CAPTURE_NONE;
  cu_result_t result = stream->shared ? cuda->driver->stream_capturing(stream->native, &capturing) : CU_SUCCESS;
  if (capturing == CU_CAPTURE_NONE && result != CU_STREAM_CAPTURE_IMPLICIT) return GEMINI_OK;
  queue_end(cuda, queue);
  return gmi_fail(GEMINI_ERR_STATE, 0, "the stream is being captured: acquire before the capture, release after it");
}

static gemini_status_t queue_begin(cuda_t *cuda, uint32_t index, queue_t *queue) {
  gemini_status_t status = queue_begin_sum(cuda, index, queue);
  if (status) return status;
  status = sums_flush(cuda, queue->stream);
  if (status) queue_end(cuda, queue);
  return status;
}

static unsigned long long id_of(const cuda_t *cuda, cu_stream_t native) {
  unsigned long long id = 0;
  if (!native || !cuda->driver->stream_id || cuda->driver->stream_id(native, &id) != CU_SUCCESS) id = 0;
  return id;
}

/* Takes a free index for the native stream, or for a new one. */
static gemini_status_t stream_add(cuda_t *cuda, bool adopted, cu_stream_t native, uint32_t *stream_out) {
  gemini_status_t status = GEMINI_ERR_OOM_SYSTEM;
  entry_t had = enter(cuda);
  pthread_mutex_lock(&cuda->streams_lock);
  for (uint32_t index = 0; index < GMI_DEVICE_MAX_STREAMS; index++) {
    stream_t *stream = &cuda->streams[index];
    pthread_mutex_lock(&stream->lock);
    bool unused = stream->state == STREAM_NONE;
    if (unused) {
      status = GEMINI_OK;
      if (!stream->idle)
        status = done(cuda, cuda->driver->event_create(&stream->idle, CU_EVENT_NO_TIME), "cuEventCreate");
      if (!status && !adopted)
        status = done(cuda, cuda->driver->stream_create(&native, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate");
      if (!status) {
        stream->native = native;
        stream->adopted = adopted;
        stream->shared = adopted;
        stream->id = adopted ? id_of(cuda, native) : 0;
        stream->state = STREAM_LIVE;
        atomic_store_explicit(&stream->made, true, memory_order_release);
        *stream_out = index;
      }
    }
    pthread_mutex_unlock(&stream->lock);
    if (unused) break;
  }
  pthread_mutex_unlock(&cuda->streams_lock);
  leave(cuda, had);
  return status;
}

static gemini_status_t cuda_stream_create(void *self, uint32_t *stream_out) {
  return stream_out ? stream_add(self, false, NULL, stream_out) : GEMINI_ERR_INVALID;
}

static gemini_status_t cuda_stream_adopt(void *self, void *native, uint32_t *stream_out) {
  cuda_t *cuda = self;
  if (!stream_out) return GEMINI_ERR_INVALID;
  if ((uintptr_t)native == CU_STREAM_PER_THREAD_HANDLE)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "the per-thread default stream is another stream in each thread");
  cu_context_t context = NULL;
  entry_t had = enter(cuda);
  cu_result_t result = cuda->driver->stream_context(native, &context);
  leave(cuda, had);
  if (result != CU_SUCCESS && result != CU_INVALID_HANDLE && result != CU_INVALID_CONTEXT)
    return failed(cuda, result, "cuStreamGetCtx");
  if (result != CU_SUCCESS || context != cuda->context)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "the stream belongs to another GPU, or not to its primary context");
  return stream_add(cuda, true, native, stream_out);
}

static gemini_status_t cuda_stream_renew(void *self, uint32_t index, bool may_block) {
  cuda_t *cuda = self;
  queue_t queue;
  gemini_status_t status = queue_begin_sum(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  unsigned long long id = stream->id ? id_of(cuda, stream->native) : 0;
  if (id && id != stream->id) {
    if (!may_block) status = GEMINI_ERR_BUSY;
    /* Nothing else waits for a stream that is gone. */
    if (!status) status = done(cuda, cuda->driver->context_wait(), "cuCtxSynchronize");
    if (!status) stream->id = id;
  }
  queue_end(cuda, &queue);
  return status;
}

static gemini_status_t cuda_stream_native(void *self, uint32_t index, void **native_out) {
  queue_t queue;
  if (!native_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(self, index, &queue); /* what is queued by others comes after our sums */
  if (status) return status;
  queue.stream->shared = true;
  *native_out = queue.stream->native;
  queue_end(self, &queue);
  return GEMINI_OK;
}

static gemini_status_t cuda_pci(void *self, char address_out[GMI_DEVICE_PCI_BYTES]) {
  cuda_t *cuda = self;
  char address[GMI_DEVICE_PCI_BYTES];
  gemini_status_t status =
      done(cuda, cuda->driver->device_pci(address, sizeof address, cuda->device), "cuDeviceGetPCIBusId");
  if (!status) memcpy(address_out, address, sizeof address);
  return status;
}

static uint64_t cuda_memory_bytes_per_s(void *self) {
  cuda_t *cuda = self;
  int clock_khz = 0, bus_bits = 0;
  entry_t had = enter(cuda);
  cu_result_t result = cuda->driver->device_attribute(&clock_khz, CU_ATTRIBUTE_MEMORY_CLOCK_RATE, cuda->device);
  if (result == CU_SUCCESS)
    result = cuda->driver->device_attribute(&bus_bits, CU_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, cuda->device);
  leave(cuda, had);
  if (result != CU_SUCCESS || clock_khz <= 0 || bus_bits <= 0) return 0;
  return 2000 * (uint64_t)clock_khz * ((uint64_t)bus_bits / 8); /* twice a clock */
}

static gemini_status_t cuda_stream_destroy(void *self, uint32_t index) {
  cuda_t *cuda = self;
  queue_t queue;
  gemini_status_t status = queue_begin_sum(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  status = sums_flush(cuda, stream);
  if (!status) status = done(cuda, cuda->driver->event_record(stream->idle, stream->native), "cuEventRecord");
  if (is_lost(cuda)) status = GEMINI_OK; /* nothing will run, and nothing will be waited for */
  if (!status) stream->state = STREAM_CLOSING;
  pthread_mutex_unlock(&stream->lock);
  if (!status) {
    if (!is_lost(cuda)) status = event_wait(cuda, stream->idle);
    if (!status && !stream->adopted)
      status = done(cuda, cuda->driver->stream_destroy(stream->native), "cuStreamDestroy");
    if (is_lost(cuda)) status = GEMINI_OK;
    pthread_mutex_lock(&stream->lock);
    if (!status) {
      stream->state = STREAM_NONE;
      stream->native = NULL;
      stream->sums = NULL; /* of a lost device: freed when it is closed */
      pthread_mutex_lock(&stream->points_lock);
      if (!is_lost(cuda)) note_reached(stream, atomic_load(&stream->placed));
      pthread_mutex_unlock(&stream->points_lock);
    } else {
      stream->state = STREAM_LIVE;
    }
    pthread_mutex_unlock(&stream->lock);
  }
  leave(cuda, queue.had);
  return status;
}

static gemini_status_t mark_place(cuda_t *cuda, uint32_t index, uint32_t kind, uint64_t *mark_out) {
  queue_t queue;
  if (!mark_out) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  uint64_t mark = atomic_load_explicit(&stream->placed, memory_order_relaxed) + 1;
  cu_event_t event = NULL;
  pthread_mutex_lock(&stream->points_lock);
  status = point_prepare(cuda, stream, mark, kind);
  if (!status) {
    point_t *point = point_of(stream, mark); /* nobody else's until the mark is placed */
    point->kind = kind;
    point->placed_ns = now_ns();
    event = point->events[kind];
  }
  pthread_mutex_unlock(&stream->points_lock);
  if (!status) status = done(cuda, cuda->driver->event_record(event, stream->native), "cuEventRecord");
  if (!status) {
    atomic_store_explicit(&stream->placed, mark, memory_order_release);
    *mark_out = mark;
  }
  queue_end(cuda, &queue);
  return status;
}
static gemini_status_t cuda_mark(void *self, uint32_t index, uint64_t *mark_out) {
  return mark_place(self, index, TIMED, mark_out);
}
static gemini_status_t cuda_mark_untimed(void *self, uint32_t index, uint64_t *mark_out) {
  return mark_place(self, index, UNTIMED, mark_out);
}

/* A placed mark's event, held so that it is not used again, until point_drop(); NULL: it is reached. Called in the
 * context. */
static cu_event_t point_take(cuda_t *cuda, stream_t *stream, uint64_t mark) {
  cu_event_t event = NULL;
  pthread_mutex_lock(&stream->points_lock);
  if (look(cuda, stream, mark) != CU_SUCCESS) {
    event = event_of(stream, mark);
    point_of(stream, mark)->users++;
  }
  pthread_mutex_unlock(&stream->points_lock);
  return event;
}
static void point_drop(stream_t *stream, uint64_t mark) {
  pthread_mutex_lock(&stream->points_lock);
  point_of(stream, mark)->users--; /* the ring may have grown, but this mark is in it */
  pthread_mutex_unlock(&stream->points_lock);
}

static gemini_status_t cuda_wait(void *self, uint32_t index, uint32_t other_index, uint64_t mark) {
  cuda_t *cuda = self;
  queue_t queue;
  stream_t *other = stream_of(cuda, other_index);
  if (!other || !mark_placed(other, mark)) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(cuda, index, &queue);
  if (status) return status;
  cu_event_t event = other == queue.stream ? NULL : point_take(cuda, other, mark);
  if (event) {
    status = done(cuda, cuda->driver->stream_wait(queue.stream->native, event, 0), "cuStreamWaitEvent");
    point_drop(other, mark);
  }
  queue_end(cuda, &queue);
  return status;
}

static bool cuda_reached(void *self, uint32_t index, uint64_t mark) {
  cuda_t *cuda = self;
  stream_t *stream = stream_of(cuda, index);
  if (!stream) return false;
  if (atomic_load_explicit(&stream->reached, memory_order_acquire) >= mark) return !mark || !is_lost(cuda);
  if (!mark_placed(stream, mark)) return false;
  entry_t had = enter(cuda);
  pthread_mutex_lock(&stream->points_lock);
  bool reached = look(cuda, stream, mark) == CU_SUCCESS;
  pthread_mutex_unlock(&stream->points_lock);
  leave(cuda, had);
  return reached && !is_lost(cuda);
}

static gemini_status_t cuda_sync(void *self, uint32_t index, uint64_t mark) {
  cuda_t *cuda = self;
  stream_t *stream = stream_of(cuda, index);
  if (!stream || !mark_placed(stream, mark)) return GEMINI_ERR_INVALID;
  cu_result_t result = CU_SUCCESS;
  if (atomic_load_explicit(&stream->reached, memory_order_acquire) < mark && !is_lost(cuda)) {
    entry_t had = enter(cuda);
    for (uint64_t begin = now_ns();; wait_a_little(begin)) {
      pthread_mutex_lock(&stream->points_lock);
      result = look(cuda, stream, mark);
      pthread_mutex_unlock(&stream->points_lock);
      if (result != CU_NOT_READY) break;
    }
    leave(cuda, had);
  }
  gemini_status_t status = done(cuda, result, "cuEventQuery");
  return status ? status : stored_failure(cuda);
}

/* --- times --- */

static uint64_t ns_of(uint64_t base_ns, float ms) {
  double ns = (double)ms * 1e6;
  return ns < 0 ? base_ns - (uint64_t)(-ns + 0.5) : base_ns + (uint64_t)(ns + 0.5);
}

/* Takes a new base when the old one has become too old to count from. It continues the old one's time, corrected by
 * what the host's clock says: the two clocks drift. Called in the context, without locks. */
static void base_renew(cuda_t *cuda) {
  uint64_t before = now_ns(), after = before;
  if (before < atomic_load_explicit(&cuda->base_due_ns, memory_order_relaxed)) return;
  if (pthread_mutex_trylock(&cuda->renew_lock)) return;
  cu_event_t old = cuda->bases[cuda->base],
             event = cuda->bases[1 - cuda->base]; /* base changes under renew_lock, too */
  float ms = 0;
  cu_result_t result = cuda->driver->event_record(event, cuda->clock);
  while (result == CU_SUCCESS || result == CU_NOT_READY) {
    result = cuda->driver->event_query(event);
    after = now_ns();
    if (result != CU_NOT_READY || after - before > BASE_WAIT_NS) break;
  }
  if (result == CU_SUCCESS) result = cuda->driver->event_elapsed(&ms, old, event);
  if (result == CU_SUCCESS) {
    pthread_mutex_lock(&cuda->clock_lock);
    uint64_t ns = ns_of(cuda->base_ns, ms);
    cuda->base_ns = ns < before ? before : ns > after ? after : ns;
    cuda->base = 1 - cuda->base;
    pthread_mutex_unlock(&cuda->clock_lock);
  }
  /* The hardware queue may be shared with a stream that is held: then the old base serves on for a while. */
  atomic_store_explicit(&cuda->base_due_ns, after + (result == CU_SUCCESS ? BASE_LIFE_NS : BASE_RETRY_NS),
                        memory_order_relaxed);
  pthread_mutex_unlock(&cuda->renew_lock);
}

/* The first base: of some tries, the one whose host time is known best. Called in the context. */
static gemini_status_t base_open(cuda_t *cuda) {
  gemini_status_t status =
      done(cuda, cuda->driver->stream_create(&cuda->clock, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate");
  for (int i = 0; !status && i < 2; i++)
    status = done(cuda, cuda->driver->event_create(&cuda->bases[i], 0), "cuEventCreate");
  uint64_t best_ns = UINT64_MAX;
  for (int i = 0; !status && i < 5; i++) {
    uint64_t before = now_ns();
    status = done(cuda, cuda->driver->event_record(cuda->bases[1 - cuda->base], cuda->clock), "cuEventRecord");
    if (!status) status = event_wait(cuda, cuda->bases[1 - cuda->base]);
    uint64_t after = now_ns();
    if (status || after - before >= best_ns) continue;
    best_ns = after - before;
    cuda->base = 1 - cuda->base;
    cuda->base_ns = before + best_ns / 2;
    atomic_store_explicit(&cuda->base_due_ns, after + BASE_LIFE_NS, memory_order_relaxed);
  }
  return status;
}

static gemini_status_t cuda_mark_time(void *self, uint32_t index, uint64_t mark, uint64_t *ns_out) {
  cuda_t *cuda = self;
  stream_t *stream = stream_of(cuda, index);
  if (!stream || !ns_out || !mark || !mark_placed(stream, mark)) return GEMINI_ERR_INVALID;
  gemini_status_t status = GEMINI_ERR_INVALID;
  float ms = 0;
  entry_t had = enter(cuda);
  base_renew(cuda);
  pthread_mutex_lock(&stream->points_lock);
  if (look(cuda, stream, mark) == CU_SUCCESS && point_of(stream, mark)->kind == TIMED &&
      atomic_load_explicit(&stream->reached, memory_order_relaxed) - mark < MARK_TIMES) {
    point_t *point = point_of(stream, mark);
    pthread_mutex_lock(&cuda->clock_lock);
    status = done(cuda, cuda->driver->event_elapsed(&ms, cuda->bases[cuda->base], point->events[TIMED]),
                  "cuEventElapsedTime");
    uint64_t ns = ns_of(cuda->base_ns, ms);
    pthread_mutex_unlock(&cuda->clock_lock);
    if (!status) {
      /* What is certain wins: not before it was placed, not after it was seen, and not before an earlier mark. */
      if (ns < point->placed_ns) ns = point->placed_ns;
      if (ns > stream->noted_ns) ns = stream->noted_ns;
      if (mark < stream->timed_mark) {
        if (ns > stream->timed_ns) ns = stream->timed_ns;
      } else {
        if (ns < stream->timed_ns) ns = stream->timed_ns;
        stream->timed_mark = mark;
        stream->timed_ns = ns;
      }
      *ns_out = ns;
    }
  }
  pthread_mutex_unlock(&stream->points_lock);
  leave(cuda, had);
  return status;
}

/* --- flags --- */

/* Called with flag_lock held. */
static void gate_open(cuda_t *cuda, uint32_t gate) {
  uint64_t number = atomic_load_explicit(&cuda->gates[gate], memory_order_relaxed);
  atomic_store_explicit(&cuda->gates[gate], number + 1, memory_order_release);
  cuda->free_gates[cuda->free_gate_count++] = gate;
}

static void cuda_flag_wake(void *self) {
  cuda_t *cuda = self;
  /* A read that is also a write: in the order of these, either it follows a waiter's increment and sees it, or the
   * waiter's increment follows it and then the waiter sees the flag that was stored before. */
  if (!atomic_fetch_add(&cuda->flag_waiters, 0)) return;
  pthread_mutex_lock(&cuda->flag_lock);
  for (uint32_t i = 0; i < cuda->waiter_count;) {
    waiter_t *waiter = &cuda->waiters[i];
    if (atomic_load_explicit(waiter->flag, memory_order_acquire) < waiter->value) {
      i++;
      continue;
    }
    gate_open(cuda, waiter->gate); /* from here on the flag may be gone */
    *waiter = cuda->waiters[--cuda->waiter_count];
    atomic_fetch_sub(&cuda->flag_waiters, 1);
  }
  pthread_mutex_unlock(&cuda->flag_lock);
}

static gemini_status_t cuda_wait_flag(void *self, uint32_t index, const _Atomic uint64_t *flag, uint64_t value) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!flag) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(cuda, index, &queue);
  if (status) return status;
  if (atomic_load_explicit(flag, memory_order_acquire) < value) {
    uint32_t gate = GATES;
    pthread_mutex_lock(&cuda->flag_lock);
    if (cuda->free_gate_count) gate = cuda->free_gates[--cuda->free_gate_count];
    pthread_mutex_unlock(&cuda->flag_lock);
    if (gate == GATES) {
      status = no_memory("waits for flags");
    } else {
      uint64_t open = atomic_load_explicit(&cuda->gates[gate], memory_order_relaxed) + 1;
      status =
          done(cuda,
               cuda->driver->stream_wait_value(queue.stream->native, cuda->gates_address + gate * sizeof *cuda->gates,
                                               open, CU_WAIT_VALUE_GEQ),
               "cuStreamWaitValue64");
      pthread_mutex_lock(&cuda->flag_lock);
      if (status) {
        cuda->free_gates[cuda->free_gate_count++] = gate;
      } else {
        atomic_fetch_add(&cuda->flag_waiters, 1);
        if (atomic_load(flag) >= value) { /* stored meanwhile */
          gate_open(cuda, gate);
          atomic_fetch_sub(&cuda->flag_waiters, 1);
        } else {
          cuda->waiters[cuda->waiter_count++] = (waiter_t){ flag, value, gate, 0 };
        }
      }
      pthread_mutex_unlock(&cuda->flag_lock);
    }
  }
  queue_end(cuda, &queue);
  return status;
}

/* --- queued work --- */

static gemini_status_t cuda_copy(void *self, uint32_t index, void *dst, const void *src, uint64_t size_bytes,
                                 uint32_t kind) {
  cuda_t *cuda = self;
  queue_t queue;
  if (kind > GMI_COPY_D2D || ((!dst || !src) && size_bytes)) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(cuda, index, &queue);
  if (status) return status;
  const gmi_cuda_driver_t *driver = cuda->driver;
  cu_stream_t stream = queue.stream->native;
  if (!size_bytes) {
  } else if (kind == GMI_COPY_H2D) {
    status = done(cuda, driver->copy_h2d((uintptr_t)dst, src, size_bytes, stream), "cuMemcpyHtoDAsync");
  } else if (kind == GMI_COPY_D2H) {
    status = done(cuda, driver->copy_d2h(dst, (uintptr_t)src, size_bytes, stream), "cuMemcpyDtoHAsync");
  } else {
    status = done(cuda, driver->copy_d2d((uintptr_t)dst, (uintptr_t)src, size_bytes, stream), "cuMemcpyDtoDAsync");
  }
  queue_end(cuda, &queue);
  return status;
}

static gemini_status_t cuda_zero(void *self, uint32_t index, void *dst, uint64_t size_bytes) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!dst && size_bytes) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(cuda, index, &queue);
  if (status) return status;
  if (size_bytes)
    status =
        done(cuda, cuda->driver->set_bytes((uintptr_t)dst, 0, size_bytes, queue.stream->native), "cuMemsetD8Async");
  queue_end(cuda, &queue);
  return status;
}

static gemini_status_t cuda_call(void *self, uint32_t index, void (*fn)(void *user), void *user) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!fn) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin(cuda, index, &queue);
  if (status) return status;
  status = done(cuda, cuda->driver->host_call(queue.stream->native, fn, user), "cuLaunchHostFunc");
  queue_end(cuda, &queue);
  return status;
}

static gemini_status_t cuda_sum_squares(void *self, uint32_t index, const void *src, uint32_t dtype, uint64_t count,
                                        double *sum) {
  cuda_t *cuda = self;
  queue_t queue;
  if (!sum || (!src && count) || dtype > GEMINI_DTYPE_F64 || count > MEMORY_MAX_BYTES) return GEMINI_ERR_INVALID;
  gemini_status_t status = queue_begin_sum(cuda, index, &queue);
  if (status) return status;
  stream_t *stream = queue.stream;
  if (stream->sums && stream->sums->count == SUMS) status = sums_flush(cuda, stream);
  if (!status && !stream->sums) status = sums_new(cuda, &stream->sums);
  if (!status) {
    sum_batch_t *batch = stream->sums;
    batch->items[batch->count] = (gmi_cuda_sum_t){ .src = (uintptr_t)src, .count = count, .dtype = dtype };
    batch->sums[batch->count++] = sum;
  }
  queue_end(cuda, &queue);
  return status;
}

/* --- graphs --- */

/* Copies get into a capture on a stream of their own, which an event forks off and another joins after each copy. */
typedef struct capture {
  stream_t *stream;
  cu_stream_t side;
  bool begun;  /* something is in it */
  uint64_t id; /* of the driver's capture, then */
  uint32_t places;
  uint32_t reserved;
  cu_event_t begin, copied;
  struct {
    cu_event_t event;
    bool recorded;
  } used[]; /* [places] */
} capture_t;

static void capture_free(cuda_t *cuda, capture_t *capture) {
  if (capture->side) cuda->driver->stream_destroy(capture->side);
  if (capture->begin) cuda->driver->event_destroy(capture->begin);
  if (capture->copied) cuda->driver->event_destroy(capture->copied);
  for (uint32_t i = 0; i < capture->places; i++)
    if (capture->used[i].event) cuda->driver->event_destroy(capture->used[i].event);
  free(capture);
}

static void cuda_capture_close(void *self, void *opened) {
  if (!opened) return;
  entry_t had = enter(self);
  capture_free(self, opened);
  leave(self, had);
}

static gemini_status_t cuda_capture_open(void *self, uint32_t index, uint32_t places, void **capture_out) {
  cuda_t *cuda = self;
  stream_t *stream = stream_of(cuda, index);
  if (!stream || !places || !capture_out) return GEMINI_ERR_INVALID;
  capture_t *capture = calloc(1, sizeof *capture + (size_t)places * sizeof *capture->used);
  if (!capture) return no_memory("a capture");
  capture->stream = stream;
  capture->places = places;
  entry_t had = enter(cuda);
  const gmi_cuda_driver_t *driver = cuda->driver;
  gemini_status_t status =
      done(cuda, driver->stream_create(&capture->side, CU_STREAM_NON_BLOCKING_FLAG), "cuStreamCreate");
  if (status) capture->side = NULL;
  cu_result_t result = driver->event_create(&capture->begin, CU_EVENT_NO_TIME);
  if (result == CU_SUCCESS) result = driver->event_create(&capture->copied, CU_EVENT_NO_TIME);
  for (uint32_t i = 0; result == CU_SUCCESS && i < places; i++)
    result = driver->event_create(&capture->used[i].event, CU_EVENT_NO_TIME);
  if (!status) status = done(cuda, result, "cuEventCreate");
  if (status) capture_free(cuda, capture);
  else *capture_out = capture;
  leave(cuda, had);
  return status;
}

/* Called with the stream's lock, in the context. */
static gemini_status_t capture_look(cuda_t *cuda, const capture_t *capture, bool *active_out, uint64_t *id_out) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  const stream_t *stream = capture->stream;
  int state = CU_CAPTURE_NONE;
  cu_result_t result = CU_SUCCESS;
  *id_out = 0;
  if (stream->state == STREAM_LIVE && stream->shared) /* of others nobody knows */
    result = driver->capture_info ? driver->capture_info(stream->native, &state, id_out, NULL, NULL, NULL)
                                  : driver->stream_capturing(stream->native, &state);
  *active_out = state != CU_CAPTURE_NONE;
  if (state != CU_CAPTURE_NONE && capture->begun && capture->id != *id_out)
    return gmi_fail(GEMINI_ERR_STATE, 0, "the stream is being captured again, for another graph");
  return done(cuda, result == CU_STREAM_CAPTURE_IMPLICIT ? CU_SUCCESS : result, "cuStreamGetCaptureInfo");
}

static gemini_status_t cuda_capture_active(void *self, void *opened, bool *active_out) {
  capture_t *capture = opened;
  uint64_t id;
  bool active = false;
  pthread_mutex_lock(&capture->stream->lock);
  entry_t had = enter(self);
  gemini_status_t status = capture_look(self, capture, &active, &id);
  leave(self, had);
  pthread_mutex_unlock(&capture->stream->lock);
  if (!status) *active_out = active;
  return status;
}

/* The stream, locked and in the context, with the side stream in the capture: until capture_end(). */
static gemini_status_t capture_begin(cuda_t *cuda, capture_t *capture, entry_t *had_out) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  stream_t *stream = capture->stream;
  uint64_t id;
  bool active;
  pthread_mutex_lock(&stream->lock);
  *had_out = enter(cuda);
  gemini_status_t status = capture_look(cuda, capture, &active, &id);
  if (!status && !active) status = gmi_fail(GEMINI_ERR_STATE, 0, "the stream is not being captured");
  if (!status && !capture->begun) {
    status = done(cuda, driver->event_record(capture->begin, stream->native), "cuEventRecord");
    if (!status) status = done(cuda, driver->stream_wait(capture->side, capture->begin, 0), "cuStreamWaitEvent");
    capture->begun = !status;
    capture->id = id;
  }
  return status;
}
static void capture_end(cuda_t *cuda, capture_t *capture, entry_t had) {
  leave(cuda, had);
  pthread_mutex_unlock(&capture->stream->lock);
}

static gemini_status_t cuda_capture_fetch(void *self, void *opened, uint32_t place, void *dst, const void *src,
                                          uint64_t size_bytes) {
  cuda_t *cuda = self;
  capture_t *capture = opened;
  const gmi_cuda_driver_t *driver = cuda->driver;
  entry_t had;
  if (place >= capture->places) return GEMINI_ERR_INVALID;
  gemini_status_t status = capture_begin(cuda, capture, &had);
  if (!status && capture->used[place].recorded)
    status = done(cuda, driver->stream_wait(capture->side, capture->used[place].event, 0), "cuStreamWaitEvent");
  if (!status)
    status = done(cuda, driver->copy_h2d((uintptr_t)dst, src, size_bytes, capture->side), "cuMemcpyHtoDAsync");
  if (!status) status = done(cuda, driver->event_record(capture->copied, capture->side), "cuEventRecord");
  if (!status)
    status = done(cuda, driver->stream_wait(capture->stream->native, capture->copied, 0), "cuStreamWaitEvent");
  capture_end(cuda, capture, had);
  return status;
}

static gemini_status_t cuda_capture_used(void *self, void *opened, uint32_t place) {
  cuda_t *cuda = self;
  capture_t *capture = opened;
  entry_t had;
  if (place >= capture->places) return GEMINI_ERR_INVALID;
  gemini_status_t status = capture_begin(cuda, capture, &had);
  if (!status)
    status =
        done(cuda, cuda->driver->event_record(capture->used[place].event, capture->stream->native), "cuEventRecord");
  capture->used[place].recorded |= !status;
  capture_end(cuda, capture, had);
  return status;
}

/* --- the device --- */

/* What the device has been found to lack, or NULL. */
static const char *device_lacks(const gmi_cuda_driver_t *driver, cu_device_t device) {
  static const struct {
    int attribute;
    const char *name;
  } needed[] = {
    { CU_ATTRIBUTE_UNIFIED_ADDRESSING, "unified addressing" },
    { CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management" },
    { CU_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit memory operations in streams" },
    { CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED, "page-locking of host memory" },
    { CU_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, "host addresses for page-locked memory" },
  };
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
    int value = 0;
    if (driver->device_attribute(&value, needed[i].attribute, device) != CU_SUCCESS || !value) return needed[i].name;
  }
  return NULL;
}

static void stream_free(cuda_t *cuda, stream_t *stream) {
  if (stream->state != STREAM_NONE && !stream->adopted) cuda->driver->stream_destroy(stream->native);
  if (stream->idle) cuda->driver->event_destroy(stream->idle);
  for (uint64_t i = 0; i < stream->capacity; i++)
    for (int kind = 0; kind < POINT_KINDS; kind++)
      if (stream->points[i].events[kind]) cuda->driver->event_destroy(stream->points[i].events[kind]);
  free(stream->points);
}

/* Also of a device that has been opened only in part. */
static void cuda_close(void *self) {
  cuda_t *cuda = self;
  if (!cuda) return;
  const gmi_cuda_driver_t *driver = cuda->driver;
  if (cuda->context) {
    entry_t had = enter(cuda);
    /* Streams may wait for one another: each ends when its own work is done, whatever the order. But adopted ones may
     * be ours by another name. */
    for (int ours = 0; ours < 2; ours++)
      for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++)
        if (ours || cuda->streams[i].adopted) (void)cuda_stream_destroy(cuda, i);
    for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) stream_free(cuda, &cuda->streams[i]);
    while (cuda->range_count) {
      range_t *range = &cuda->ranges[--cuda->range_count];
      uint64_t pages = range->size_bytes / cuda->granule;
      for (uint64_t at = 0; at < pages; at++) {
        if (!range->pages[at].frame) continue;
        uint64_t size_bytes = frame_named(cuda, range->pages[at].frame)->size_bytes;
        driver->memory_unmap(range->base + at * cuda->granule, size_bytes);
        at += size_bytes / cuda->granule - 1;
      }
      driver->address_free(range->base, range->size_bytes);
      free(range->pages);
    }
    for (size_t i = 0; i < cuda->frame_count; i++)
      if (cuda->frames[i].size_bytes) driver->memory_release(cuda->frames[i].memory);
    for (size_t i = 0; i < cuda->locked_count; i++) driver->host_unregister((void *)(uintptr_t)cuda->locked[i].base);
    for (sum_batch_t *batch = cuda->sums_all, *next; batch; batch = next) {
      next = batch->next_of_all;
      driver->host_free(batch->items);
      free(batch);
    }
    if (cuda->gates) driver->host_free((void *)cuda->gates);
    if (cuda->module) driver->module_unload(cuda->module);
    for (int i = 0; i < 2; i++)
      if (cuda->bases[i]) driver->event_destroy(cuda->bases[i]);
    if (cuda->clock) driver->stream_destroy(cuda->clock);
    leave(cuda, had);
    driver->primary_release(cuda->device);
  }
  pthread_mutex_destroy(&cuda->memory_lock);
  pthread_mutex_destroy(&cuda->host_lock);
  pthread_mutex_destroy(&cuda->flag_lock);
  pthread_mutex_destroy(&cuda->sum_lock);
  pthread_mutex_destroy(&cuda->renew_lock);
  pthread_mutex_destroy(&cuda->clock_lock);
  pthread_mutex_destroy(&cuda->streams_lock);
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    pthread_mutex_destroy(&cuda->streams[i].lock);
    pthread_mutex_destroy(&cuda->streams[i].points_lock);
  }
  free(cuda->ranges);
  free(cuda->frames);
  free(cuda->locked);
  free(cuda);
}

static gemini_status_t gates_open(cuda_t *cuda) {
  void *gates = NULL;
  cu_result_t result = cuda->driver->host_alloc(&gates, GATES * sizeof *cuda->gates, CU_HOST_PORTABLE | CU_HOST_MAPPED);
  if (result != CU_SUCCESS) return failed_or_full(cuda, result, "cuMemHostAlloc", GEMINI_ERR_OOM_SYSTEM);
  cuda->gates = gates;
  for (uint32_t i = 0; i < GATES; i++) {
    atomic_init(&cuda->gates[i], 0);
    cuda->free_gates[i] = GATES - 1 - i;
  }
  cuda->free_gate_count = GATES;
  return done(cuda, cuda->driver->host_address(&cuda->gates_address, gates, 0), "cuMemHostGetDevicePointer");
}

/* What needs the context, in it. */
static gemini_status_t context_open(cuda_t *cuda) {
  const gmi_cuda_driver_t *driver = cuda->driver;
  gemini_status_t status = gates_open(cuda);
  if (!status) status = done(cuda, driver->module_load(&cuda->module, gmi_sum_squares_ptx), "cuModuleLoadData");
  if (!status)
    status =
        done(cuda, driver->module_function(&cuda->sum_kernel, cuda->module, "gmi_sum_squares"), "cuModuleGetFunction");
  if (!status) status = base_open(cuda);
  return status;
}

static gemini_status_t cuda_open(const gmi_device_config_t *config, void **self_out) {
  if (!config || !self_out || config->reserved) return GEMINI_ERR_INVALID;
  const gmi_cuda_driver_t *driver = gmi_cuda_driver();
  if (!driver) return GEMINI_ERR_UNSUPPORTED;
  int count = 0;
  cu_device_t device = 0;
  cu_result_t result = driver->init(0);
  if (result == CU_SUCCESS) result = driver->device_count(&count);
  if (result == CU_NO_DEVICE || (result == CU_SUCCESS && !count))
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, result, "the CUDA driver finds no GPU on this machine");
  if (result != CU_SUCCESS)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "the CUDA driver does not start: %s",
                    gmi_cuda_error_name(driver, result));
  if (config->ordinal >= (uint32_t)count)
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "GPU %u is asked for, this machine has %d", config->ordinal, count);
  result = driver->device_get(&device, (int)config->ordinal);
  if (result != CU_SUCCESS)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "cuDeviceGet: %s", gmi_cuda_error_name(driver, result));
  const char *lacking = device_lacks(driver, device);
  if (lacking) return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0, "GPU %u has no %s", config->ordinal, lacking);
  cu_allocation_t allocation = allocation_of(device);
  size_t granule = 0;
  result = driver->granularity(&granule, &allocation, CU_GRANULARITY_MINIMUM);
  if (result != CU_SUCCESS || !granule || BASE_ALIGN_BYTES % granule)
    return gmi_fail(GEMINI_ERR_DEVICE, result, "cuMemGetAllocationGranularity: %s, %zu bytes",
                    gmi_cuda_error_name(driver, result), granule);
  if (config->memory_bytes % granule || config->memory_bytes > MEMORY_MAX_BYTES)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "memory_bytes is %llu, must be a multiple of %zu",
                    (unsigned long long)config->memory_bytes, granule);

  cuda_t *cuda = calloc(1, sizeof *cuda);
  if (!cuda) return no_memory("a device");
  cuda->driver = driver;
  cuda->device = device;
  cuda->granule = granule;
  cuda->memory_bytes = config->memory_bytes;
  pthread_mutex_init(&cuda->memory_lock, NULL);
  pthread_mutex_init(&cuda->host_lock, NULL);
  pthread_mutex_init(&cuda->flag_lock, NULL);
  pthread_mutex_init(&cuda->sum_lock, NULL);
  pthread_mutex_init(&cuda->renew_lock, NULL);
  pthread_mutex_init(&cuda->clock_lock, NULL);
  pthread_mutex_init(&cuda->streams_lock, NULL);
  for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
    pthread_mutex_init(&cuda->streams[i].lock, NULL);
    pthread_mutex_init(&cuda->streams[i].points_lock, NULL);
  }
  gemini_status_t status = done(cuda, driver->primary_retain(&cuda->context, device), "cuDevicePrimaryCtxRetain");
  if (!status) {
    entry_t had = enter(cuda);
    status = context_open(cuda);
    leave(cuda, had);
  } else {
    cuda->context = NULL;
  }
  if (status) {
    cuda_close(cuda);
    return status;
  }
  *self_out = cuda;
  return GEMINI_OK;
}

const gmi_device_ops_t gmi_device_cuda = {
  .struct_size = sizeof(gmi_device_ops_t),
  .abi = GMI_DEVICE_ABI,
  .name = "cuda",
  .window_overhead_ns = 100000,
  .link_bytes_per_s = UINT64_C(50000000000),
  .open = cuda_open,
  .close = cuda_close,
  .granularity = cuda_granularity,
  .resize = cuda_resize,
  .reserve = cuda_reserve,
  .unreserve = cuda_unreserve,
  .frame_create = cuda_frame_create,
  .frame_destroy = cuda_frame_destroy,
  .map = cuda_map,
  .unmap = cuda_unmap,
  .stream_create = cuda_stream_create,
  .stream_destroy = cuda_stream_destroy,
  .mark = cuda_mark,
  .wait = cuda_wait,
  .wait_flag = cuda_wait_flag,
  .flag_wake = cuda_flag_wake,
  .reached = cuda_reached,
  .sync = cuda_sync,
  .mark_time = cuda_mark_time,
  .copy = cuda_copy,
  .zero = cuda_zero,
  .call = cuda_call,
  .sum_squares = cuda_sum_squares,
  .host_lock = cuda_host_lock,
  .host_unlock = cuda_host_unlock,
  .now = cuda_now,
  .stream_adopt = cuda_stream_adopt,
  .stream_native = cuda_stream_native,
  .pci = cuda_pci,
  .memory_bytes_per_s = cuda_memory_bytes_per_s,
  .mark_untimed = cuda_mark_untimed,
  .stream_renew = cuda_stream_renew,
  .capture_open = cuda_capture_open,
  .capture_close = cuda_capture_close,
  .capture_active = cuda_capture_active,
  .capture_fetch = cuda_capture_fetch,
  .capture_used = cuda_capture_used,
};
