/* The CUDA device's records, and the functions that its files call of each other. SPDX-License-Identifier: Apache-2.0
 *
 * How it works, and the order of its locks, is described in cuda.c. */
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
#define ASK_AGAIN_NS UINT64_C(20000) /* for so long a mark that was not reached is taken for that */
#define POINTS_MAX (UINT64_C(1) << 24)
#define GATES 16384u
#define SUMS 4096u
#define SUM_THREADS 32u /* threads in a block of the kernel in sum_squares.cu */
#define NS_PER_S UINT64_C(1000000000)
/* Times of marks are counted from a base event whose host time is known. The driver tells the distance as a float in
 * milliseconds, which is accurate to 15 ns up to BASE_LIFE_NS. Taking a new base costs some 20 us, and happens only
 * when times are asked for. */
#define BASE_LIFE_NS (NS_PER_S / 4)
#define BASE_WAIT_NS UINT64_C(100000)
#define BASE_RETRY_NS (BASE_LIFE_NS / 16)
/* Polling: without sleep for WAIT_SPIN_NS, then sleeping an eighth of the time waited so far, within these limits. */
#define WAIT_SPIN_NS UINT64_C(30000)
#define WAIT_SLEEP_MIN_NS UINT64_C(20000)
#define WAIT_SLEEP_MAX_NS UINT64_C(500000)

enum { STREAM_NONE, STREAM_LIVE, STREAM_CLOSING };

/* An entry of a stream's ring of marks. A point has an event of each kind, made at first use, as timed events cost more
 * to record. */
enum { UNTIMED, TIMED, POINT_KINDS };
typedef struct point {
  cu_event_t events[POINT_KINDS]; /* NULL: not made yet */
  uint64_t recorded_ns;           /* host time just before the event was recorded */
  uint32_t kind;                  /* which event holds the current mark */
  uint32_t users;                 /* threads that are queueing a wait for the event: it must not be recorded again */
} point_t;

/* Sums of squares that one launch computes. While a stream collects it, it is guarded by the stream's lock; once queued
 * it belongs to the GPU and then to the callback thread, until it is back on the free list. */
typedef struct sum_batch {
  struct sum_batch *next;        /* in sums.free */
  struct sum_batch *next_of_all; /* in sums.all, for close */
  gmi_cuda_sum_t *items;         /* [SUMS], page-locked: arguments and results of the kernel */
  cu_address_t address;          /* device address of items */
  struct cuda *cuda;
  uint32_t count, reserved;
  double *sums[SUMS]; /* where the callers want the results */
} sum_batch_t;

typedef struct stream {
  /* Atomic: the index has been used, so its marks can be asked for. Set with release under lock, loaded with acquire;
   * never cleared. */
  _Atomic bool made;

  pthread_mutex_t lock; /* held while something is queued; taken before points_lock */
  uint32_t state;       /* STREAM_*. Guarded by lock, as the next six */
  bool adopted;         /* the caller's stream: not destroyed here */
  bool shared;          /* others may queue on it and capture it: adopted, or its native handle was given out */
  cu_stream_t native;
  unsigned long long id; /* adopted: the driver's id of native, unique for all time; 0 = unknown */
  cu_event_t idle;       /* recorded at the end of the stream when it is destroyed */
  sum_batch_t *sums;     /* collected, not yet queued; NULL: none */
  /* Atomic: the last mark that was recorded. Written under lock, with release, after the mark's point is complete;
   * pairs with the acquire load in mark_recorded(). */
  _Atomic uint64_t recorded;

  pthread_mutex_t points_lock; /* guards the rest */
  point_t *points;             /* [capacity], a power of two; NULL before the first mark */
  uint64_t capacity;
  /* Atomic: the last mark known to be reached. Written under points_lock, with release; pairs with the acquire loads of
   * threads that look without the lock. */
  _Atomic uint64_t reached;
  /* Atomic, relaxed: a mark that was not reached when the driver was asked, and until when that is the answer for it
   * and for all later marks. Written under points_lock, unreached first; a thread that reads one of two answers has an
   * older answer, which is as good. */
  _Atomic uint64_t unreached, unreached_until_ns;
  uint64_t noted_ns;             /* when `reached` was last raised: an upper bound of the time of all marks up to it */
  uint64_t timed_mark, timed_ns; /* the highest mark whose time was told, and that time: times never decrease */
} stream_t;

/* Physical memory. A destroyed frame's record stays, with size 0, until the array is compacted. */
typedef struct frame {
  uint64_t name;
  uint64_t size_bytes; /* 0: destroyed */
  cu_memory_t memory;
  uint64_t mappings; /* addresses it is mapped at; it can be destroyed only when 0 */
} frame_t;
/* A granule of a reserved range. All pages of a mapping name its frame and its first page, as the driver can unmap
 * mappings only as a whole. */
typedef struct page {
  uint64_t frame; /* mapped here; 0 = none */
  uint64_t first; /* the mapping's first page */
} page_t;
typedef struct range {
  uint64_t base, size_bytes;
  page_t *pages;
} range_t;
typedef struct locked {
  uint64_t base, size_bytes;
} locked_t;

/* A stream that waits until *flag >= value: it waits on a gate, which flag_wake() opens. The flag may be gone as soon
 * as the gate is open, so the waiter is removed in the same critical section. */
typedef struct waiter {
  const _Atomic uint64_t *flag; /* Atomic, the caller's: loaded with acquire, pairs with the caller's release store */
  uint64_t value;
  uint32_t gate;
  uint32_t reserved;
} waiter_t;

typedef struct cuda {
  const gmi_cuda_driver_t *driver;
  cu_context_t context;
  /* Atomic: the error that lost the context; CU_SUCCESS: none. Set once. A single word that nothing else depends on, so
   * relaxed order suffices. */
  _Atomic int lost;
  /* Atomic: set (seq_cst) before something ends queued work that is not done; loaded (acquire) after a mark was seen
   * reached, so that a mark that such an end let through is not taken for reached. */
  _Atomic bool distrusted;
  cu_device_t device;
  cu_allocation_t allocation; /* of frames */
  uint64_t granule;

  struct {
    pthread_mutex_t lock; /* guards what follows */
    uint64_t budget_bytes, used_bytes, frames_made;
    frame_t *frames; /* sorted by name: names are given in the order of creation */
    size_t frame_count, frame_capacity, frames_destroyed;
    range_t *ranges; /* sorted by base */
    size_t range_count, range_capacity;
  } memory;

  struct {
    pthread_mutex_t lock; /* guards what follows */
    locked_t *ranges;     /* page-locked memory; sorted by base */
    size_t count, capacity;
  } host;

  struct {
    pthread_mutex_t lock; /* guards the free gates and the waiters */
    /* Atomic: [GATES], page-locked; the GPU polls them. A gate's number only grows and a stream waits for "at least",
     * so a gate can be reused as soon as it is open, even if the stream has not noticed yet. Written by the owner of
     * the gate, with release, so that the GPU sees what was stored before the flag. */
    _Atomic uint64_t *gates;
    cu_address_t gates_address;
    uint32_t free_gates[GATES];
    uint32_t free_gate_count, waiter_count;
    waiter_t waiters[GATES];
    /* Atomic: waiter_count, plus a waiter that is being added. flag_wake() reads it without the lock; see there for the
     * ordering. */
    _Atomic uint32_t waiting;
  } flags;

  struct {
    pthread_mutex_t lock;
    sum_batch_t *free, *all; /* guarded by lock */
    cu_module_t module;
    cu_function_t kernel;
  } sums;

  struct {
    pthread_mutex_t lock; /* guards what follows, which the first call of add() makes */
    cu_module_t module;
    cu_function_t kernel;
  } adds;

  struct {
    pthread_mutex_t renew_lock; /* held by the thread that takes a new base; others only try it. Before lock */
    cu_stream_t stream;
    cu_event_t bases[2]; /* [base] is current, the other one is recorded next */
    pthread_mutex_t lock;
    uint32_t base;    /* written with both locks held, as base_ns: either lock suffices to read it */
    uint64_t base_ns; /* time of bases[base] on the host's clock */
    /* Atomic: host time from which on a new base is taken. Relaxed: a hint, the bases are guarded by the locks. */
    _Atomic uint64_t due_ns;
  } clock;

  pthread_mutex_t streams_lock; /* held while an index is chosen for a new stream; taken before stream.lock */
  stream_t streams[GMI_DEVICE_MAX_STREAMS];
} cuda_t;

/* What gmi_cuda_enter() replaced, for gmi_cuda_leave(). */
typedef struct entry {
  cu_context_t context;
  int capture_mode;
} entry_t;

/* A stream that is being queued on: its lock is held, the context is current, its collected sums are queued. */
typedef struct queue {
  stream_t *stream;
  entry_t had;
} queue_t;

/* device/cuda.c */
void gmi_cuda_wait_a_little(uint64_t begin_ns);
void gmi_cuda_note(cuda_t *cuda, cu_result_t result);
gemini_status_t gmi_cuda_failed(cuda_t *cuda, cu_result_t result, const char *function);
gemini_status_t gmi_cuda_done(cuda_t *cuda, cu_result_t result, const char *function);
gemini_status_t gmi_cuda_failed_or_full(cuda_t *cuda, cu_result_t result, const char *function, gemini_status_t full);
bool gmi_cuda_is_lost(const cuda_t *cuda);
void gmi_cuda_distrust(void *self);
gemini_status_t gmi_cuda_stored_failure(cuda_t *cuda);
entry_t gmi_cuda_enter(cuda_t *cuda);
void gmi_cuda_leave(cuda_t *cuda, entry_t had);
gemini_status_t gmi_cuda_event_wait(cuda_t *cuda, cu_event_t event);

/* device/cuda_memory.c */
gemini_status_t gmi_cuda_no_memory(const char *what);
frame_t *gmi_cuda_frame_named(cuda_t *cuda, uint64_t name);
gemini_status_t gmi_cuda_reserve(void *self, uint64_t size_bytes, void **base_out);
gemini_status_t gmi_cuda_unreserve(void *self, void *base, uint64_t size_bytes);
cu_allocation_t gmi_cuda_allocation_of(const gmi_cuda_driver_t *driver, cu_device_t device);
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
gemini_status_t gmi_cuda_stream_create(void *self, bool urgent, uint32_t *stream_out);
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
gemini_status_t gmi_cuda_add(void *self, uint32_t index, void *dst, const void *src, uint32_t dtype, uint64_t count);
void gmi_cuda_capture_close(void *self, void *opened);
gemini_status_t gmi_cuda_capture_open(void *self, uint32_t index, uint32_t frames, void **capture_out);
gemini_status_t gmi_cuda_capture_active(void *self, void *opened, bool *active_out);
gemini_status_t gmi_cuda_capture_fetch(void *self, void *opened, uint32_t frame, void *dst, const void *src,
                                       uint64_t size_bytes);
gemini_status_t gmi_cuda_capture_used(void *self, void *opened, uint32_t frame);

#endif
