/* Inside the CUDA device: its records, and what its files call of each other. SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_CUDA_H
#define GMI_CUDA_H

#include "base/status.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include <pthread.h>
#include <time.h>

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
  uint64_t recorded_ns;
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
  unsigned long long id;     /* adopted: of native, that of no other stream ever; 0 = not known */
  cu_event_t idle;           /* for the end of the stream */
  sum_batch_t *sums;         /* not yet queued */
  _Atomic uint64_t recorded; /* Written under lock */

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

  struct {
    pthread_mutex_t lock; /* guards what follows */
    uint64_t budget_bytes, used_bytes, frames_made;
    frame_t *frames; /* in the order of name, which is the order of creation */
    size_t frame_count, frame_capacity, frames_destroyed;
    range_t *ranges; /* in the order of base */
    size_t range_count, range_capacity;
  } memory;

  struct {
    pthread_mutex_t lock; /* guards what follows */
    locked_t *ranges;     /* page-locked; in the order of base */
    size_t count, capacity;
  } host;

  struct {
    pthread_mutex_t lock;    /* guards what follows, but for what is said */
    _Atomic uint64_t *gates; /* page-locked. A gate's number only grows: so it can serve again as soon as it is open */
    cu_address_t gates_address;
    uint32_t free_gates[GATES];
    uint32_t free_gate_count, waiter_count;
    waiter_t waiters[GATES];
    _Atomic uint32_t waiting; /* waiter_count, for a look without the lock */
  } flags;

  struct {
    pthread_mutex_t lock;
    sum_batch_t *free, *all; /* guarded by lock */
    cu_module_t module;
    cu_function_t kernel;
  } sums;

  struct {
    pthread_mutex_t renew_lock; /* held by the thread that takes a new base; no thread waits for it */
    cu_stream_t stream;
    cu_event_t bases[2]; /* the one that counts, and the one that will */
    pthread_mutex_t lock;
    uint32_t base;           /* guarded by lock, as base_ns */
    uint64_t base_ns;        /* bases[base] on the host's clock */
    _Atomic uint64_t due_ns; /* when to take a new one */
  } clock;

  pthread_mutex_t streams_lock; /* held to create and to destroy */
  stream_t streams[GMI_DEVICE_MAX_STREAMS];
} cuda_t;

/* What a thread had before gmi_cuda_enter(). */
typedef struct entry {
  cu_context_t context;
  int capture_mode;
} entry_t;

/* A stream about to be queued on: locked, in the context, with its sums queued. */
typedef struct queue {
  stream_t *stream;
  entry_t had;
} queue_t;

/* device/cuda.c */
uint64_t gmi_cuda_now_ns(void);
void gmi_cuda_wait_a_little(uint64_t begin_ns);
void gmi_cuda_note(cuda_t *cuda, cu_result_t result);
gemini_status_t gmi_cuda_failed(cuda_t *cuda, cu_result_t result, const char *function);
gemini_status_t gmi_cuda_done(cuda_t *cuda, cu_result_t result, const char *function);
gemini_status_t gmi_cuda_failed_or_full(cuda_t *cuda, cu_result_t result, const char *function, gemini_status_t full);
bool gmi_cuda_is_lost(const cuda_t *cuda);
gemini_status_t gmi_cuda_stored_failure(cuda_t *cuda);
entry_t gmi_cuda_enter(cuda_t *cuda);
void gmi_cuda_leave(cuda_t *cuda, entry_t had);
gemini_status_t gmi_cuda_event_wait(cuda_t *cuda, cu_event_t event);

/* device/cuda_memory.c */
gemini_status_t gmi_cuda_no_memory(const char *what);
frame_t *gmi_cuda_frame_named(cuda_t *cuda, uint64_t name);
gemini_status_t gmi_cuda_reserve(void *self, uint64_t size_bytes, void **base_out);
gemini_status_t gmi_cuda_unreserve(void *self, void *base, uint64_t size_bytes);
cu_allocation_t gmi_cuda_allocation_of(cu_device_t device);
gemini_status_t gmi_cuda_frame_create(void *self, uint64_t size_bytes, uint64_t *frame_out);
gemini_status_t gmi_cuda_frame_destroy(void *self, uint64_t name, uint64_t size_bytes);
gemini_status_t gmi_cuda_map(void *self, void *va, uint64_t name, uint64_t size_bytes);
gemini_status_t gmi_cuda_unmap(void *self, void *va, uint64_t size_bytes);
uint64_t gmi_cuda_granularity(void *self);
gemini_status_t gmi_cuda_resize(void *self, uint64_t memory_bytes);
gemini_status_t gmi_cuda_host_lock(void *self, void *base, uint64_t size_bytes);
gemini_status_t gmi_cuda_host_unlock(void *self, void *base, uint64_t size_bytes);

/* device/cuda_streams.c */
stream_t *gmi_cuda_stream_of(cuda_t *cuda, uint32_t index);
gemini_status_t gmi_cuda_sums_flush(cuda_t *cuda, stream_t *stream);
gemini_status_t gmi_cuda_sums_new(cuda_t *cuda, sum_batch_t **batch_out);
void gmi_cuda_queue_end(cuda_t *cuda, queue_t *queue);
gemini_status_t gmi_cuda_queue_begin_sum(cuda_t *cuda, uint32_t index, queue_t *queue);
gemini_status_t gmi_cuda_queue_begin(cuda_t *cuda, uint32_t index, queue_t *queue);
gemini_status_t gmi_cuda_stream_create(void *self, uint32_t *stream_out);
gemini_status_t gmi_cuda_stream_adopt(void *self, void *native, uint32_t *stream_out);
gemini_status_t gmi_cuda_stream_renew(void *self, uint32_t index, bool may_block);
gemini_status_t gmi_cuda_stream_native(void *self, uint32_t index, void **native_out);
gemini_status_t gmi_cuda_pci(void *self, char address_out[GMI_DEVICE_PCI_BYTES]);
uint64_t gmi_cuda_memory_bytes_per_s(void *self);
gemini_status_t gmi_cuda_stream_destroy(void *self, uint32_t index);
gemini_status_t gmi_cuda_mark(void *self, uint32_t index, uint64_t *mark_out);
gemini_status_t gmi_cuda_mark_untimed(void *self, uint32_t index, uint64_t *mark_out);
gemini_status_t gmi_cuda_wait(void *self, uint32_t index, uint32_t other_index, uint64_t mark);
bool gmi_cuda_reached(void *self, uint32_t index, uint64_t mark);
gemini_status_t gmi_cuda_sync(void *self, uint32_t index, uint64_t mark);
gemini_status_t gmi_cuda_base_open(cuda_t *cuda);
gemini_status_t gmi_cuda_mark_time(void *self, uint32_t index, uint64_t mark, uint64_t *ns_out);

/* device/cuda_queue.c */
void gmi_cuda_flag_wake(void *self);
gemini_status_t gmi_cuda_wait_flag(void *self, uint32_t index, const _Atomic uint64_t *flag, uint64_t value);
gemini_status_t gmi_cuda_copy(void *self, uint32_t index, void *dst, const void *src, uint64_t size_bytes,
                              uint32_t kind);
gemini_status_t gmi_cuda_zero(void *self, uint32_t index, void *dst, uint64_t size_bytes);
gemini_status_t gmi_cuda_call(void *self, uint32_t index, void (*fn)(void *user), void *user);
gemini_status_t gmi_cuda_sum_squares(void *self, uint32_t index, const void *src, uint32_t dtype, uint64_t count,
                                     double *sum);
void gmi_cuda_capture_close(void *self, void *opened);
gemini_status_t gmi_cuda_capture_open(void *self, uint32_t index, uint32_t frames, void **capture_out);
gemini_status_t gmi_cuda_capture_active(void *self, void *opened, bool *active_out);
gemini_status_t gmi_cuda_capture_fetch(void *self, void *opened, uint32_t frame, void *dst, const void *src,
                                       uint64_t size_bytes);
gemini_status_t gmi_cuda_capture_used(void *self, void *opened, uint32_t frame);

#endif
