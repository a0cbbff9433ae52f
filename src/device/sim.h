/* Inside the simulated device: its records, and what its files call of each other.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GMI_SIM_H
#define GMI_SIM_H

#include "base/fork.h"
#include "base/status.h"
#include "base/thread.h"
#include "device/device.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define GRANULE_BYTES UINT64_C(4096)
#define BASE_ALIGN_BYTES (UINT64_C(2) << 20)
#define MEMORY_MAX_BYTES (UINT64_C(1) << 60)
/* Marks whose time can be asked for. The ring is twice as long, so that a reader sees whether its entry was
 * overwritten meanwhile. */
#define MARK_TIMES 4096u
#define TIME_RING (2 * MARK_TIMES)
#define TASKS_FIRST 256u
/* Tasks taken from the ring under one lock. */
#define TASK_BATCH 16u
#define NS_PER_S UINT64_C(1000000000)

enum { TASK_MARK, TASK_WAIT, TASK_WAIT_FLAG, TASK_COPY, TASK_ZERO, TASK_CALL, TASK_SUM_SQUARES, TASK_FAIL };
enum { STREAM_NONE, STREAM_LIVE, STREAM_CLOSING };

struct stream;

typedef struct task {
  uint32_t kind;
  uint32_t variant;   /* copy: GMI_COPY_*; sum: GEMINI_DTYPE_*; fail: the status */
  uint64_t queued_ns; /* paced devices only */
  union {
    uint64_t mark;
    struct {
      struct stream *other;
      uint64_t mark;
    } wait;
    struct {
      const _Atomic uint64_t *flag;
      uint64_t value;
    } flag;
    struct {
      void *dst;
      const void *src;
      uint64_t size_bytes;
    } copy; /* and zero */
    struct {
      void (*fn)(void *user);
      void *user;
    } call;
    struct {
      const void *src;
      double *sum;
      uint64_t count;
    } sum;
  } u;
} task_t;

typedef struct stream {
  struct sim *sim;
  uint32_t index;
  uint32_t state; /* STREAM_*. Guarded by lock */
  pthread_t thread;

  pthread_mutex_t lock;
  pthread_cond_t more; /* the ring is no longer empty, or the stream is closing */
  task_t *ring;        /* capacity entries, a power of two. Guarded by lock, as the next four */
  uint64_t capacity, head, tail;
  bool asleep;               /* the thread waits for more */
  _Atomic uint64_t recorded; /* last mark recorded. Written under lock */

  pthread_mutex_t reach_lock;
  pthread_cond_t reach;    /* wanted has been reached */
  _Atomic uint64_t wanted; /* lowest mark that somebody waits for. Written under reach_lock */
  _Atomic uint64_t reached;
  _Atomic int32_t failure;
  uint64_t at_ns; /* end of the work so far, paced devices only. The thread's own */
  _Atomic uint64_t times_ns[TIME_RING];
} stream_t;

typedef struct frame {
  uint64_t offset;
  uint64_t size_bytes; /* 0: destroyed */
} frame_t;
typedef struct range {
  unsigned char *base;
  uint64_t size_bytes;
} range_t;
typedef struct link {
  pthread_mutex_t lock;
  uint64_t bytes_per_s;
  uint64_t free_ns; /* end of the last copy that took the link. Guarded by lock */
} link_t;

typedef struct sim {
  int memory_fd;
  bool paced;
  pthread_mutex_t memory_lock;
  uint64_t memory_bytes, used_bytes, file_bytes, file_limit_bytes; /* Guarded by memory_lock, as the rest of these */
  frame_t *frames; /* in the order of offset, which is the order of creation */
  size_t frame_count, frame_capacity, frames_destroyed;
  range_t *ranges; /* in the order of base */
  size_t range_count, range_capacity;

  link_t links[2]; /* GMI_COPY_H2D, GMI_COPY_D2H */

  pthread_mutex_t flag_lock;
  pthread_cond_t flag_changed;
  _Atomic uint32_t flag_waiters;

  pthread_mutex_t streams_lock;                        /* held to create and to destroy */
  _Atomic(stream_t *) streams[GMI_DEVICE_MAX_STREAMS]; /* once made, a stream's record stays until close */
} sim_t;

/* device/sim.c */
bool gmi_sim_size_ok(uint64_t size_bytes);

/* device/sim_memory.c */
gemini_status_t gmi_sim_reserve(void *self, uint64_t size_bytes, void **base_out);
gemini_status_t gmi_sim_unreserve(void *self, void *base, uint64_t size_bytes);
gemini_status_t gmi_sim_frame_create(void *self, uint64_t size_bytes, uint64_t *frame_out);
gemini_status_t gmi_sim_frame_destroy(void *self, uint64_t frame, uint64_t size_bytes);
gemini_status_t gmi_sim_map(void *self, void *va, uint64_t frame, uint64_t size_bytes);
gemini_status_t gmi_sim_unmap(void *self, void *va, uint64_t size_bytes);
uint64_t gmi_sim_granularity(void *self);
bool gmi_sim_memory_bytes_ok(uint64_t memory_bytes);
gemini_status_t gmi_sim_resize(void *self, uint64_t memory_bytes);
gemini_status_t gmi_sim_host_lock(void *self, void *base, uint64_t size_bytes);

#endif
