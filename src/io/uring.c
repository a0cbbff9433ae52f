/* The io_uring backend of the engine: one thread owns a ring, submits parts and reaps completions.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Threads. The ring thread (run()) is the only one that touches the ring; the kernel may therefore run completion work
 * in that thread alone (IORING_SETUP_SINGLE_ISSUER, DEFER_TASKRUN), which is the cheapest mode. Other threads only
 * append requests to the engine's lists, or commands (register a file or a buffer) to the command list, and wake the
 * ring thread. done functions run on the ring thread.
 *
 * Wake-up. The ring thread sleeps in io_uring_enter until a completion arrives. One read of an eventfd is kept
 * outstanding in the ring at all times while the thread may sleep; writing to the eventfd completes that read and so
 * ends the sleep. This needs no second wait primitive and no polling.
 *
 * Life of an entry. entries[] holds depth records, one per part that the backend has taken. An entry is on exactly one
 * of: free_list; the ready queue (waits for space in the submission queue); the submission queue or the kernel. A part
 * that must pause before its next try goes through the ring as a timeout and returns to the ready queue when the
 * timeout completes.
 *
 * Bounds. At most depth parts and the one eventfd read are in the kernel, and the completion queue holds twice as many
 * entries as the submission queue, so completions do not overflow in normal operation.
 *
 * Only functions that liburing 2.1 has are used. */
#include <errno.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/fork.h"
#include "base/status.h"
#include "base/thread.h"
#include "io/backend.h"

/* Flags of the kernel's interface that older system headers lack. */
#ifndef IORING_SETUP_SUBMIT_ALL
#define IORING_SETUP_SUBMIT_ALL (1U << 7)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

enum {
  ENTRIES_MOST = 1 << 14, /* size of the registered-buffer table: the kernel's limit */
  ENTRIES_LEAST = 16,     /* smallest table worth having; less than this counts as refused */
  /* The kernel copies what its page cache holds while a read is submitted: one part after another, at 6 GB/s. Parts of
   * so many bytes are given to its workers, which copy side by side. */
  ASIDE_BYTES = 64 << 10,
  RESULTS_AT_ONCE = 64, /* completions copied out of the queue before their done functions run */
  /* A stall is a kernel call that brought no completion although one was waited for or submissions are left. The first
   * STALLS_AT_ONCE stalls in a row are retried at once, later ones a millisecond apart; after STALLS_LIMIT of them the
   * parts that the kernel did not take fail. */
  STALLS_AT_ONCE = 8,
  STALLS_LIMIT = 1000
};
static const uint64_t BUFFER_LIMIT_BYTES = UINT64_C(1) << 30; /* the kernel's limit for one registered buffer */
static const uint64_t OF_WAKE = UINT64_MAX; /* user_data of the eventfd read; a part's user_data is its entry index */

/* A part that this backend has taken. Its address stays fixed while the kernel holds it: pause is read by the kernel
 * when the timeout is submitted. */
typedef struct entry {
  gmi_part_t part;
  struct __kernel_timespec pause;
  bool pausing; /* the entry's next or current submission is a timeout, not the transfer */
} entry_t;

typedef struct buffer {
  uintptr_t base;
  uint64_t size_bytes;
  uint32_t index; /* in the kernel's table of registered buffers */
} buffer_t;

/* A registration that the ring thread performs for another thread. Lives on the caller's stack until done is set. */
enum { COMMAND_FILE_ADD, COMMAND_BUFFER_ADD, COMMAND_BUFFER_REMOVE };
typedef struct command {
  struct command *next;
  uint32_t kind;
  uint32_t file;
  uintptr_t base;
  uint64_t size_bytes;
  gemini_status_t status;
  bool done; /* Guarded by the engine's lock; the command's memory is the caller's again once it is set */
} command_t;

typedef struct uring {
  gmi_engine_t *e;
  pthread_t thread;
  int wake_fd;         /* eventfd; a write ends the ring thread's sleep */
  pthread_cond_t news; /* used with the engine's lock: state has left STARTING, or a command is done */

  /* Guarded by the engine's lock. */
  enum { STARTING, RUNNING, FAILED } state;
  command_t *commands, **commands_end;
  char failure[160];
  int failure_code;

  /* Used by the ring thread only, without a lock. */
  struct io_uring ring;
  uint32_t setup_flags; /* the IORING_SETUP_* combination that the kernel accepted */
  uint64_t wake_word;   /* target of the eventfd read; the kernel may write it while wake_armed */
  bool wake_armed;      /* the eventfd read is in the submission queue or the kernel */
  uint32_t stalls;      /* in a row */
  entry_t *entries;     /* [depth] */
  uint32_t *free_list;  /* [depth]; a stack of unused entries */
  uint32_t free_count;
  struct {
    uint32_t *entries; /* [depth]; circular FIFO of entries that wait for space in the submission queue */
    uint32_t first, count;
  } ready;
  bool files_registered; /* submissions name files by their index; else by descriptor */
  int files_error;       /* errno: why not */
  struct {
    buffer_t *list; /* registered buffers, sorted by address, disjoint */
    uint32_t count, capacity;
    uint32_t hint; /* position of the last hit: neighbouring parts mostly lie in one buffer */
    uint32_t *free_indices;
    uint32_t free_index_count;
    bool indices_tried; /* the kernel's table has been requested once; it is not requested again */
  } buffers;
  int buffers_error; /* errno of the last refused registration */
  uint64_t buffers_refused_bytes;
} uring_t;

/* --- registered buffers and files ---
 *
 * Registering saves the kernel from looking up the file and pinning the pages with each request. It is an optimisation:
 * where the kernel refuses (RLIMIT_MEMLOCK, table full, old kernel) transfers work without, and features says why. */

/* Position in buffers.list of the first buffer that ends after the address. */
static uint32_t buffer_after(const uring_t *u, uintptr_t address) {
  uint32_t low = 0, high = u->buffers.count;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    if (u->buffers.list[middle].base + u->buffers.list[middle].size_bytes > address) high = middle;
    else low = middle + 1;
  }
  return low;
}

/* The kernel's index of the registered buffer that contains the whole part, or -1. A part that spans two registered
 * buffers is transferred as unregistered memory: one submission can name one buffer only. */
static int32_t buffer_of(uring_t *u, uintptr_t address, uint32_t size_bytes) {
  if (!u->buffers.count) return -1;
  const buffer_t *b = &u->buffers.list[u->buffers.hint < u->buffers.count ? u->buffers.hint : 0];
  if (address < b->base || address >= b->base + b->size_bytes) {
    uint32_t i = buffer_after(u, address);
    if (i == u->buffers.count) return -1;
    u->buffers.hint = i;
    b = &u->buffers.list[i];
  }
  bool within = address >= b->base && size_bytes <= b->base + b->size_bytes - address;
  return within ? (int32_t)b->index : -1;
}

/* Requests an empty table of buffers from the kernel, at first use, halving its size while the kernel refuses: kernels
 * differ in the largest table they accept. */
static void make_indices(uring_t *u) {
  if (u->buffers.indices_tried) return;
  u->buffers.indices_tried = true;
  int error = -EINVAL;
  uint32_t count = ENTRIES_MOST;
  for (; count >= ENTRIES_LEAST; count /= 2) {
    error = u->e->sys->ring_register_buffers_sparse(&u->ring, count);
    if (error >= 0) break;
  }
  if (error >= 0) {
    u->buffers.free_indices = malloc(count * sizeof *u->buffers.free_indices);
    if (!u->buffers.free_indices) error = -ENOMEM;
  }
  if (error < 0) {
    u->buffers_error = -error;
    return;
  }
  for (uint32_t i = 0; i < count; i++) u->buffers.free_indices[i] = count - 1 - i;
  u->buffers.free_index_count = count;
}

/* Registers one buffer of at most BUFFER_LIMIT_BYTES. Returns 0 or an errno; on failure nothing has changed, because
 * the list is enlarged before the kernel is called and inserting afterwards cannot fail. */
static int add_one_buffer(uring_t *u, uintptr_t base, uint64_t size_bytes) {
  if (!u->buffers.free_index_count) return u->buffers_error ? u->buffers_error : ENOSPC;
  if (u->buffers.count == u->buffers.capacity) {
    uint32_t capacity = u->buffers.capacity ? u->buffers.capacity * 2 : 16;
    buffer_t *more = realloc(u->buffers.list, capacity * sizeof *more);
    if (!more) return ENOMEM;
    u->buffers.list = more;
    u->buffers.capacity = capacity;
  }
  uint32_t index = u->buffers.free_indices[u->buffers.free_index_count - 1];
  struct iovec memory = { (void *)base, size_bytes };
  int result = u->e->sys->ring_register_buffers_update(&u->ring, index, &memory, 1);
  if (result < 0) return -result;
  u->buffers.free_index_count--;
  uint32_t at = buffer_after(u, base);
  memmove(u->buffers.list + at + 1, u->buffers.list + at, (u->buffers.count - at) * sizeof *u->buffers.list);
  u->buffers.list[at] = (buffer_t){ base, size_bytes, index };
  u->buffers.count++;
  return 0;
}

/* INVALID: the memory overlaps a registered buffer. A refusal by the kernel is no failure: what could not be registered
 * is counted for features. */
static gemini_status_t add_buffers(uring_t *u, uintptr_t base, uint64_t size_bytes) {
  uint32_t at = buffer_after(u, base);
  if (at < u->buffers.count && u->buffers.list[at].base < base + size_bytes) return GEMINI_ERR_INVALID;
  make_indices(u);
  while (size_bytes) {
    uint64_t part = size_bytes < BUFFER_LIMIT_BYTES ? size_bytes : BUFFER_LIMIT_BYTES;
    int error = add_one_buffer(u, base, part);
    if (error) {
      u->buffers_error = error;
      u->buffers_refused_bytes += size_bytes;
      break;
    }
    base += part;
    size_bytes -= part;
  }
  return GEMINI_OK;
}

static void remove_buffers(uring_t *u, uintptr_t base, uint64_t size_bytes) {
  uint32_t at = buffer_after(u, base);
  while (at < u->buffers.count && u->buffers.list[at].base < base + size_bytes) {
    struct iovec none = { NULL, 0 };
    uint32_t index = u->buffers.list[at].index;
    /* An index that the kernel does not release is never used again: it may still refer to the old pages. */
    if (u->e->sys->ring_register_buffers_update(&u->ring, index, &none, 1) >= 0)
      u->buffers.free_indices[u->buffers.free_index_count++] = index;
    u->buffers.count--;
    memmove(u->buffers.list + at, u->buffers.list + at + 1, (u->buffers.count - at) * sizeof *u->buffers.list);
  }
}

static void register_file(uring_t *u, uint32_t file, int fd) {
  if (!u->files_registered) return;
  int result = u->e->sys->ring_register_files_update(&u->ring, file, &fd, 1);
  if (result >= 0) return;
  u->files_registered = false; /* for all files: prepare() looks at this one flag, and describe() has one answer */
  u->files_error = -result;
}

/* Writes into features how the ring is set up. Called without the lock, which it takes for the copy only. */
static void describe(uring_t *u) {
  gmi_engine_t *e = u->e;
  char text[sizeof e->features];
  size_t used = 0;
#define ADD(...)                                                        \
  do {                                                                  \
    int added = snprintf(text + used, sizeof text - used, __VA_ARGS__); \
    if (added > 0) used += (size_t)added;                               \
    if (used >= sizeof text) used = sizeof text - 1;                    \
  } while (0)
  if (u->setup_flags & IORING_SETUP_DEFER_TASKRUN) ADD("io_uring: single issuer, deferred task running");
  else if (u->setup_flags & IORING_SETUP_COOP_TASKRUN) ADD("io_uring: cooperative task running");
  else ADD("io_uring: plain");
  if (u->files_registered) ADD(", registered files");
  else ADD(", no registered files (%s)", strerror(u->files_error));
  ADD(", %u registered buffers", u->buffers.count);
  if (u->buffers_refused_bytes)
    ADD(" (%s: %llu MiB without)", strerror(u->buffers_error), (unsigned long long)(u->buffers_refused_bytes >> 20));
#undef ADD
  pthread_mutex_lock(&e->lock);
  memcpy(e->features, text, used + 1);
  pthread_mutex_unlock(&e->lock);
}

/* Runs on the ring thread, without the lock: registering may pin pages and so take long. */
static void execute(uring_t *u, command_t *c) {
  switch (c->kind) {
  case COMMAND_FILE_ADD: register_file(u, c->file, u->e->files[c->file].fd); break;
  case COMMAND_BUFFER_ADD: c->status = add_buffers(u, c->base, c->size_bytes); break;
  case COMMAND_BUFFER_REMOVE: remove_buffers(u, c->base, c->size_bytes); break;
  }
  describe(u);
}

/* --- parts --- */

/* Cannot overflow: the queue has a place for each of the depth entries, and an entry is in it once at most. */
static void push_ready(uring_t *u, uint32_t entry) {
  u->ready.entries[(u->ready.first + u->ready.count++) % u->e->depth] = entry;
}

/* Fills in the submission of an entry: its timeout, or its transfer. */
static void prepare(uring_t *u, uint32_t entry, struct io_uring_sqe *sqe) {
  entry_t *s = &u->entries[entry];
  const gmi_part_t *p = &s->part;
  if (s->pausing) {
    io_uring_prep_timeout(sqe, &s->pause, 0, 0);
  } else {
    int fd = u->files_registered ? (int)p->file : p->fd;
    int32_t index = buffer_of(u, (uintptr_t)p->buffer, p->size_bytes);
    if (index >= 0 && p->write) io_uring_prep_write_fixed(sqe, fd, p->buffer, p->size_bytes, p->offset_bytes, index);
    else if (index >= 0) io_uring_prep_read_fixed(sqe, fd, p->buffer, p->size_bytes, p->offset_bytes, index);
    else if (p->write) io_uring_prep_write(sqe, fd, p->buffer, p->size_bytes, p->offset_bytes);
    else io_uring_prep_read(sqe, fd, p->buffer, p->size_bytes, p->offset_bytes);
    unsigned flags = u->files_registered ? IOSQE_FIXED_FILE : 0;
    if (p->buffered && !p->write && p->size_bytes >= ASIDE_BYTES) flags |= IOSQE_ASYNC;
    io_uring_sqe_set_flags(sqe, flags);
  }
  sqe->user_data = entry;
}

/* Moves ready entries into the submission queue. The eventfd read goes first: without it the thread must not sleep.
 * False: the queue is full and something is left. */
static bool fill(uring_t *u) {
  struct io_uring_sqe *sqe;
  if (!u->wake_armed) {
    if (!(sqe = io_uring_get_sqe(&u->ring))) return false;
    io_uring_prep_read(sqe, u->wake_fd, &u->wake_word, sizeof u->wake_word, 0);
    sqe->user_data = OF_WAKE;
    u->wake_armed = true;
  }
  while (u->ready.count) {
    if (!(sqe = io_uring_get_sqe(&u->ring))) return false;
    uint32_t entry = u->ready.entries[u->ready.first];
    u->ready.first = (u->ready.first + 1) % u->e->depth;
    u->ready.count--;
    prepare(u, entry, sqe);
  }
  return true;
}

/* Handles one completion. moved: bytes, or a negative errno; of no interest for the eventfd read and for timeouts. */
static void result(uring_t *u, uint64_t user_data, int32_t moved) {
  if (user_data == OF_WAKE) {
    u->wake_armed = false;
    return;
  }
  uint32_t entry = (uint32_t)user_data;
  entry_t *s = &u->entries[entry];
  if (s->pausing) { /* the pause is over (or the timeout failed): try the transfer again */
    s->pausing = false;
    push_ready(u, entry);
    return;
  }
  uint32_t delay_us;
  if (gmi_engine_result(u->e, &s->part, moved, &delay_us)) {
    s->pausing = delay_us > 0;
    s->pause = (struct __kernel_timespec){ 0, (long long)delay_us * 1000 };
    push_ready(u, entry);
  } else {
    u->free_list[u->free_count++] = entry;
  }
}

/* Handles everything in the completion queue and returns the number of completions. Each batch is copied out and the
 * queue advanced before done functions run: they take as long as they like, and meanwhile the kernel has the space. */
static uint32_t reap(uring_t *u) {
  uint32_t total = 0, count;
  do {
    struct {
      uint64_t user_data;
      int32_t moved;
    } batch[RESULTS_AT_ONCE];
    struct io_uring_cqe *cqe;
    unsigned head;
    count = 0;
    io_uring_for_each_cqe(&u->ring, head, cqe) {
      batch[count].user_data = cqe->user_data;
      batch[count].moved = cqe->res;
      if (++count == RESULTS_AT_ONCE) break;
    }
    io_uring_cq_advance(&u->ring, count);
    for (uint32_t i = 0; i < count; i++) result(u, batch[i].user_data, batch[i].moved);
    total += count;
  } while (count == RESULTS_AT_ONCE);
  return total;
}

/* Withdraws the submissions that the kernel has not consumed, and fails their parts with error.
 *
 * liburing has no call for this: the entries between the kernel's head and our tail are read back and the tail is reset
 * to the head. The kernel reads the tail only within io_uring_enter, which only this thread calls (no
 * IORING_SETUP_SQPOLL), so a plain store suffices.
 *
 * All submissions are read back before the first part fails, so that done functions find the ring in order. The unused
 * space of the ready queue's array serves as the list: the entries to withdraw are not in that queue, so ready.count +
 * parts is at most depth. */
static void give_up(uring_t *u, int error) {
  struct io_uring_sq *sq = &u->ring.sq;
  unsigned head = *sq->khead, count = sq->sqe_tail - head;
  uint32_t from = u->ready.first + u->ready.count;
  uint32_t parts = 0;
  for (unsigned i = 0; i < count; i++) {
    uint64_t user_data = sq->sqes[(head + i) & *sq->kring_mask].user_data;
    if (user_data == OF_WAKE) u->wake_armed = false;
    else u->ready.entries[(from + parts++) % u->e->depth] = (uint32_t)user_data;
  }
  *sq->ktail = head;
  sq->sqe_head = sq->sqe_tail = head;
  for (uint32_t i = 0; i < parts; i++) {
    /* gmi_engine_give_up() ends a part for good and pushes nothing to ready, so the rest of the list stays intact. */
    uint32_t entry = u->ready.entries[(from + i) % u->e->depth];
    u->entries[entry].pausing = false;
    gmi_engine_give_up(u->e, &u->entries[entry].part, error, "io_uring_enter");
    u->free_list[u->free_count++] = entry;
  }
}

/* Submits what is in the submission queue and handles completions; with wait, sleeps until there is one.
 *
 * io_uring_enter can refuse: EINTR, EAGAIN, EBUSY and ENOMEM are transient, everything else ("hard") will not go away
 * by trying again. Parts that the kernel never took are failed after a hard error or after STALLS_LIMIT stalls, rather
 * than waited for forever; parts that are in the kernel are always waited for, since it may still write to their
 * buffers. */
static void turn(uring_t *u, bool wait) {
  const gmi_sys_t *sys = u->e->sys;
  int n = sys->ring_submit_and_wait(&u->ring, wait ? 1 : 0);
  uint32_t left = io_uring_sq_ready(&u->ring), taken = reap(u);
  if (!taken && (n == -EAGAIN || n == -EBUSY)) { /* the completion queue overflowed: flush the kernel's backlog */
    (void)sys->ring_get_events(&u->ring);
    taken = reap(u);
  }
  if (taken || (n >= 0 && !left && !wait)) {
    u->stalls = 0;
    return;
  }
  bool hard = n < 0 && n != -EINTR && n != -EAGAIN && n != -EBUSY && n != -ENOMEM;
  u->stalls++;
  if (left && (hard || u->stalls > STALLS_LIMIT)) {
    give_up(u, n < 0 ? -n : EIO);
    u->stalls = 0;
  }
  if (hard || u->stalls > STALLS_AT_ONCE) nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
}

/* --- the thread --- */

/* gmi_fork_hold() keeps fork() out between the two steps: a child that still had the number on its list of descriptors
 * to close could close an unrelated file that got the same number. */
static void ring_exit(uring_t *u) {
  gmi_fork_hold();
  gmi_fork_close_not(u->ring.ring_fd);
  u->e->sys->ring_exit(&u->ring);
  gmi_fork_let();
}

/* Creates the ring, in the best mode that the kernel knows and on the thread that will use it (SINGLE_ISSUER demands
 * that), and tries it. False: failure says why io_uring cannot be used.
 *
 * The trial, one eventfd read, is needed because set-up alone proves little: seccomp filters and container policies may
 * allow io_uring_setup and refuse io_uring_enter or the read. Without IORING_FEAT_NODROP the kernel could lose
 * completions when the queue overflows, so such kernels are refused. */
static bool make_ring(uring_t *u) {
  static const uint32_t choices[] = { IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_SUBMIT_ALL,
                                      IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL, 0 };
  const gmi_sys_t *sys = u->e->sys;
  struct io_uring_params params;
  int result = -EINVAL;
  for (size_t i = 0; result == -EINVAL && i < sizeof choices / sizeof *choices; i++) {
    memset(&params, 0, sizeof params);
    params.flags = choices[i] | IORING_SETUP_CLAMP;
    u->setup_flags = choices[i];
    gmi_fork_hold();
    result = sys->ring_init(u->e->depth + 1, &u->ring, &params);
    if (result >= 0) gmi_fork_close(u->ring.ring_fd);
    gmi_fork_let();
  }
  if (result < 0) {
    u->failure_code = -result;
    snprintf(u->failure, sizeof u->failure, "io_uring is unavailable (io_uring_setup: %s)", strerror(-result));
    return false;
  }
  uint64_t one = 1;
  const char *what = "io_uring_enter";
  int got = params.features & IORING_FEAT_NODROP ? 0 : -EOPNOTSUPP;
  if (!got && fill(u) && write(u->wake_fd, &one, sizeof one) == sizeof one) {
    for (int tries = 0; tries < STALLS_AT_ONCE; tries++) {
      got = sys->ring_submit_and_wait(&u->ring, 1);
      if (got >= 0 || (got != -EINTR && got != -EAGAIN && got != -EBUSY)) break;
    }
    if (got >= 0) {
      struct io_uring_cqe *cqe = NULL;
      unsigned head;
      io_uring_for_each_cqe(&u->ring, head, cqe) break;
      got = cqe ? cqe->res : -EIO;
      what = "a read";
      if (cqe) {
        io_uring_cq_advance(&u->ring, 1);
        u->wake_armed = false;
      }
    }
  }
  if (got != sizeof u->wake_word) {
    u->failure_code = got < 0 ? -got : EIO;
    snprintf(u->failure, sizeof u->failure, "io_uring is unavailable (%s: %s)", what, strerror(u->failure_code));
    ring_exit(u);
    return false;
  }
  int none[GMI_ENGINE_FILES_LIMIT];
  for (int i = 0; i < GMI_ENGINE_FILES_LIMIT; i++) none[i] = -1;
  result = sys->ring_register_files(&u->ring, none, GMI_ENGINE_FILES_LIMIT);
  u->files_registered = result >= 0;
  u->files_error = result < 0 ? -result : 0;
  return true;
}

/* Completes the outstanding eventfd read before the ring goes: the kernel must not write to wake_word after *u has been
 * freed. Closing a ring cancels its requests, but asynchronously. */
static void end_ring(uring_t *u) {
  uint64_t one = 1;
  if (u->wake_armed && write(u->wake_fd, &one, sizeof one) == sizeof one)
    for (int tries = 0; u->wake_armed && tries < STALLS_AT_ONCE; tries++) turn(u, true);
  ring_exit(u);
}

/* The ring thread. Each round: execute commands, take parts from the engine into free entries, submit and reap.
 *
 * The decision to sleep is made with the lock held: asleep is set only when no command, no refused request and no part
 * that this thread could take is left. A later submit sees asleep under the same lock and writes to the eventfd; a
 * command always writes. A write that precedes the io_uring_enter makes the read complete at once, so that no wake-up
 * is lost. */
static void *run(void *user) {
  uring_t *u = user;
  gmi_engine_t *e = u->e;
  pthread_setname_np(pthread_self(), "gemini-io");
  bool made = make_ring(u);
  if (made) describe(u);
  pthread_mutex_lock(&e->lock);
  u->state = made ? RUNNING : FAILED;
  pthread_cond_broadcast(&u->news);
  if (!made) {
    pthread_mutex_unlock(&e->lock);
    return NULL;
  }
  for (;;) {
    e->asleep = 0;
    while (u->commands) {
      command_t *c = u->commands;
      u->commands = c->next;
      if (!u->commands) u->commands_end = &u->commands;
      pthread_mutex_unlock(&e->lock);
      execute(u, c);
      pthread_mutex_lock(&e->lock);
      c->done = true;
      pthread_cond_broadcast(&u->news);
    }
    gmi_request_t *refused = gmi_engine_refused(e);
    while (u->free_count) {
      uint32_t entry = u->free_list[u->free_count - 1];
      if (!gmi_engine_next(e, &u->entries[entry].part)) break;
      u->entries[entry].pausing = false;
      u->free_count--;
      push_ready(u, entry);
    }
    if (e->stop && !refused && u->free_count == e->depth && gmi_engine_idle(e)) break;
    bool wait = !refused && fill(u); /* with a full submission queue the eventfd read may be missing: do not sleep */
    e->asleep = wait;
    pthread_mutex_unlock(&e->lock);
    gmi_engine_finish(e, refused);
    turn(u, wait);
    pthread_mutex_lock(&e->lock);
  }
  pthread_mutex_unlock(&e->lock);
  end_ring(u);
  return NULL;
}

/* --- called by other threads --- */

/* With the lock held. Clearing asleep spares the following submits the system call until the thread sleeps again. */
static void ring_wake(gmi_engine_t *e) {
  uring_t *u = e->self;
  uint64_t one = 1;
  e->asleep = 0;
  while (write(u->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

/* Has the ring thread execute a command, and waits for it. Called by a done function it runs on the ring thread itself,
 * which would wait for itself forever: then the command is executed in place. */
static gemini_status_t order(gmi_engine_t *e, command_t *c) {
  uring_t *u = e->self;
  if (pthread_equal(pthread_self(), u->thread)) {
    execute(u, c);
    return c->status;
  }
  pthread_mutex_lock(&e->lock);
  *u->commands_end = c;
  u->commands_end = &c->next;
  ring_wake(e);
  while (!c->done) pthread_cond_wait(&u->news, &e->lock);
  pthread_mutex_unlock(&e->lock);
  return c->status;
}

static void ring_file_add(gmi_engine_t *e, uint32_t file) {
  command_t c = { .kind = COMMAND_FILE_ADD, .file = file };
  (void)order(e, &c);
}

static gemini_status_t ring_buffer_add(gmi_engine_t *e, void *base, uint64_t size_bytes) {
  command_t c = { .kind = COMMAND_BUFFER_ADD, .base = (uintptr_t)base, .size_bytes = size_bytes };
  if (!order(e, &c)) return GEMINI_OK;
  return gmi_fail(c.status, 0, "file engine: %llu bytes at %p overlap a buffer that is registered already",
                  (unsigned long long)size_bytes, base);
}

static void ring_buffer_remove(gmi_engine_t *e, void *base, uint64_t size_bytes) {
  command_t c = { .kind = COMMAND_BUFFER_REMOVE, .base = (uintptr_t)base, .size_bytes = size_bytes };
  (void)order(e, &c);
}

/* Frees the records. The ring thread has ended, or was never started. */
static void dispose(uring_t *u) {
  gmi_fork_hold();
  gmi_fork_close_not(u->wake_fd);
  if (u->wake_fd >= 0) u->e->sys->close(u->wake_fd);
  gmi_fork_let();
  pthread_cond_destroy(&u->news);
  free(u->buffers.list);
  free(u->buffers.free_indices);
  free(u->ready.entries);
  free(u->free_list);
  free(u->entries);
  free(u);
}

static void ring_close(gmi_engine_t *e) {
  uring_t *u = e->self;
  pthread_join(u->thread, NULL);
  dispose(u);
}

static const gmi_backend_t backend = { .wake = ring_wake,
                                       .file_add = ring_file_add,
                                       .buffer_add = ring_buffer_add,
                                       .buffer_remove = ring_buffer_remove,
                                       .close = ring_close };

/* Valgrind runs one thread at a time and takes io_uring_enter for a call that does not block: while the ring thread
 * sleeps in it no other thread would run, and the program would hang. */
static bool under_valgrind(void) {
  const char *preload = getenv("LD_PRELOAD");
  return preload && strstr(preload, "/vgpreload_core");
}

gemini_status_t gmi_uring_open(gmi_engine_t *engine) {
  gmi_engine_t *e = engine;
  gemini_status_t status;
  if (under_valgrind())
    return gmi_fail(GEMINI_ERR_UNSUPPORTED, 0,
                    "io_uring is unavailable (valgrind stops all threads while one waits for it)");
  uring_t *u = calloc(1, sizeof *u);
  if (!u) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the file engine");
  u->e = e;
  u->commands_end = &u->commands;
  pthread_cond_init(&u->news, NULL);
  gmi_fork_hold();
  u->wake_fd = e->sys->eventfd(0, EFD_CLOEXEC); /* not EFD_NONBLOCK: older kernels would end the ring's read at once */
  gmi_fork_close(u->wake_fd);
  gmi_fork_let();
  if (u->wake_fd < 0) {
    status = gmi_fail(GEMINI_ERR_UNSUPPORTED, errno, "io_uring is unavailable (eventfd: %s)", strerror(errno));
    goto fail;
  }
  u->entries = calloc(e->depth, sizeof *u->entries);
  u->free_list = calloc(e->depth, sizeof *u->free_list);
  u->ready.entries = calloc(e->depth, sizeof *u->ready.entries);
  if (!u->entries || !u->free_list || !u->ready.entries) {
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the file engine");
    goto fail;
  }
  for (uint32_t i = 0; i < e->depth; i++) u->free_list[i] = e->depth - 1 - i;
  u->free_count = e->depth;
  e->backend = &backend;
  e->self = u;
  int error = gmi_thread_start(&u->thread, run, u);
  if (error) {
    status =
        gmi_fail(GEMINI_ERR_OOM_SYSTEM, error, "could not start the thread of the file engine: %s", strerror(error));
    goto fail;
  }
  pthread_mutex_lock(&e->lock);
  while (u->state == STARTING) pthread_cond_wait(&u->news, &e->lock);
  bool failed = u->state == FAILED;
  pthread_mutex_unlock(&e->lock);
  if (failed) {
    pthread_join(u->thread, NULL);
    status = gmi_fail(GEMINI_ERR_UNSUPPORTED, u->failure_code, "%s", u->failure);
    goto fail;
  }
  e->threads = 1;
  return GEMINI_OK;
fail:
  dispose(u);
  return status;
}
