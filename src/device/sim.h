/* The simulated device's records, and the functions that its files call of each other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * How it works, and the order of its locks, is described in sim.c. */
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
/* How many of the latest marks have a time. The ring of times is twice as long, so that a reader without a lock can
 * tell whether its entry was overwritten while it read it. */
#define MARK_TIMES 4096u
#define TIME_RING (2 * MARK_TIMES)
#define TASKS_FIRST 256u
/* Most tasks that a stream's thread takes from its ring in one critical section. */
#define TASK_BATCH 16u
#define NS_PER_S UINT64_C(1000000000)

enum {
  TASK_MARK,
  TASK_WAIT,
  TASK_WAIT_FLAG,
  TASK_COPY,
  TASK_ZERO,
  TASK_CALL,
  TASK_RUN,
  TASK_SUM_SQUARES,
  TASK_ADD,
  TASK_FAIL
};
enum { STREAM_NONE, STREAM_LIVE, STREAM_CLOSING };

struct stream;

/* An operation queued on a stream. */
typedef struct task {
  uint32_t kind;      /* TASK_* */
  uint32_t variant;   /* copy: GMI_COPY_*; sum, add: GEMINI_DTYPE_*; fail: the status */
  uint64_t queued_ns; /* paced devices only: when it was queued; it cannot begin earlier in simulated time */
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
      gemini_status_t (*fn)(void *user);
      void *user;
    } run;
    struct {
      const void *src;
      double *sum;
      uint64_t count;
    } sum;
    struct {
      void *dst;
      const void *src;
      uint64_t count;
    } add;
  } u;
} task_t;

/* A stream: a thread and its ring of tasks. The record stays until the device is closed; when an index is reused, a new
 * thread continues with the same marks. */
typedef struct stream {
  struct sim *sim;
  uint32_t index;
  uint32_t state; /* STREAM_*. Guarded by lock */
  pthread_t thread;

  pthread_mutex_t lock;
  pthread_cond_t more; /* the ring is no longer empty, or the stream is closing */
  task_t *ring;        /* [capacity], a power of two; tasks head to tail - 1. Guarded by lock, as the next four */
  uint64_t capacity, head, tail;
  bool asleep; /* the thread waits for `more` and has not been signalled yet */
  /* Atomic: the last mark that was queued. Written under lock with release; pairs with the acquire load in
   * mark_recorded(). */
  _Atomic uint64_t recorded;

  pthread_mutex_t reach_lock; /* for sleeping on `reach` */
  pthread_cond_t reach;       /* the wanted mark has been reached */
  /* Atomic: the lowest mark that a thread waits for; UINT64_MAX: none. Written under reach_lock, read without it by
   * mark_reach(). */
  _Atomic uint64_t wanted;
  /* Atomic: the last mark reached. Written by the stream's thread only; its store publishes the results of the work
   * before it. Pairs with the acquire loads of threads that look. */
  _Atomic uint64_t reached;
  /* Atomic: the stream's first failure, or GEMINI_OK. Stored by the stream's thread before `reached` of any later mark,
   * so a thread that sees such a mark reached sees the failure. */
  _Atomic int32_t failure;
  uint64_t at_ns; /* paced devices only: simulated end of the work so far. Used by the stream's thread only */
  /* Atomic: when mark m was reached, at m % TIME_RING; see mark_time(). */
  _Atomic uint64_t times_ns[TIME_RING];
} stream_t;

/* A frame's name is its offset in the memory file. Records of destroyed frames stay until the array is compacted. */
typedef struct frame {
  uint64_t offset;
  uint64_t size_bytes; /* 0: destroyed */
} frame_t;
typedef struct range {
  unsigned char *base;
  uint64_t size_bytes;
} range_t;
/* One direction of the connection between host and device. */
typedef struct link {
  pthread_mutex_t lock;
  uint64_t bytes_per_s; /* 0: as fast as memcpy. Does not change */
  uint64_t free_ns;     /* simulated time at which the last copy that took the link ends. Guarded by lock */
} link_t;

typedef struct sim {
  int memory_fd;                     /* the memory file that frames are extents of */
  bool paced;                        /* a link has a rate */
  pthread_mutex_t memory_lock;       /* guards the next seven lines */
  uint64_t memory_bytes, used_bytes; /* the budget, and the bytes of live frames */
  uint64_t file_bytes, file_limit_bytes;
  frame_t *frames; /* sorted by offset, which is the order of creation */
  size_t frame_count, frame_capacity, frames_destroyed;
  range_t *ranges; /* sorted by base */
  size_t range_count, range_capacity;

  link_t links[2]; /* GMI_COPY_H2D, GMI_COPY_D2H */

  pthread_mutex_t flag_lock; /* for sleeping on flag_changed */
  pthread_cond_t flag_changed;
  _Atomic uint32_t flag_waiters; /* Atomic: stream threads that sleep for a flag, or are about to; see flag_wait() */

  pthread_mutex_t streams_lock; /* held while an index is chosen for a new stream; taken before stream.lock */
  /* Atomic: NULL until an index is first used. Stored with release when the record is complete; pairs with the acquire
   * load in stream_of(). The record stays until close, so the pointer needs no lock. */
  _Atomic(stream_t *) streams[GMI_DEVICE_MAX_STREAMS];
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
