/* The table of operations that a device implements: the simulated device (sim.c) and the CUDA device (cuda.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Terms. A *stream* is an in-order queue, named by a small index. A *mark* is a point in a stream, named by a sequence
 * number that grows by one with each mark: mark m is reached when everything queued before it is done; mark 0 always
 * is. A *frame* is physical memory, never named 0; mapping frames into a reserved address range gives the range memory.
 *
 * INVALID: a size is 0 or no multiple of the granularity, an address lies outside the reserved ranges, or a frame,
 * stream or mark does not exist. OOM_SYSTEM: the process has no memory, addresses or threads left. A failure changes
 * nothing and leaves results named *_out untouched. With DEVICE, STATE and OOM_SYSTEM the thread's last error says what
 * failed (gmi_fail()), which gmi_fail_device() keeps.
 *
 * A device carries out operations and decides nothing. Except where a comment says "blocks", no operation waits for
 * queued work. Every operation may be called from any thread; the caller must not hold a lock that a queued function
 * takes. */
#ifndef GMI_DEVICE_H
#define GMI_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

#define GMI_DEVICE_MAX_STREAMS 64u
#define GMI_DEVICE_PCI_BYTES 32

enum { GMI_COPY_H2D = 0, GMI_COPY_D2H = 1, GMI_COPY_D2D = 2 };

typedef struct gmi_device_config {
  uint32_t ordinal;
  uint32_t reserved;
  uint64_t memory_bytes;    /* most bytes of frames that can exist at once; a multiple of the granularity */
  uint64_t h2d_bytes_per_s; /* simulated device only; 0 = as fast as memcpy */
  uint64_t d2h_bytes_per_s;
} gmi_device_config_t;

typedef struct gmi_device_ops {
  const char *name;           /* static storage */
  uint64_t chunk_overhead_ns; /* cost of moving a chunk besides copying its bytes: mapping, marks */
  uint64_t link_bytes_per_s;  /* assumed rate of a copy until one has been measured */

  /* On failure the thread's last error says what failed (gmi_fail). */
  gemini_status_t (*open)(const gmi_device_config_t *config, void **self_out);
  /* Blocks until every stream is idle, then destroys everything that was created on the device. NULL is accepted. */
  void (*close)(void *self);
  /* Nanoseconds, monotonic. */
  uint64_t (*now)(void *self);
  /* Where the device is on the PCI bus, as "0000:1b:00.0" in either case. UNSUPPORTED on the simulated device. */
  gemini_status_t (*pci)(void *self, char address_out[GMI_DEVICE_PCI_BYTES]);
  /* Nominal bandwidth of the device's memory in bytes/s; 0: unknown, or no higher than the host's. */
  uint64_t (*memory_bytes_per_s)(void *self);

  /* Addresses, frames and mappings, and page-locked host memory. */
  struct {
    /* Frames, mappings and reservations are multiples of this many bytes. */
    uint64_t (*granularity)(void *self);
    /* Changes how many bytes of frames may exist. Refused with OOM_DEVICE when more exist already. */
    gemini_status_t (*resize)(void *self, uint64_t memory_bytes);
    /* Address ranges, without access until mapped. base is aligned to 2 MiB at least. */
    gemini_status_t (*reserve)(void *self, uint64_t size_bytes, void **base_out);
    gemini_status_t (*unreserve)(void *self, void *base, uint64_t size_bytes);
    /* Physical memory: one contiguous frame. OOM_DEVICE when memory_bytes would be passed. Contents undefined. */
    gemini_status_t (*frame_create)(void *self, uint64_t size_bytes, uint64_t *frame_out);
    /* The frame must be unmapped everywhere and idle. */
    gemini_status_t (*frame_destroy)(void *self, uint64_t frame, uint64_t size_bytes);
    /* Maps all of a frame at va, replacing what was mapped there; several addresses may map one frame. */
    gemini_status_t (*map)(void *self, void *va, uint64_t frame, uint64_t size_bytes);
    /* Takes access away: a later touch faults. */
    gemini_status_t (*unmap)(void *self, void *va, uint64_t size_bytes);
    /* Page-locks host memory, so that copies from and to it are asynchronous; a no-op on the simulated device. */
    gemini_status_t (*host_lock)(void *self, void *base, uint64_t size_bytes);
    /* Ends a host_lock() of the same base and size. May block until all work queued on the device is done. */
    gemini_status_t (*host_unlock)(void *self, void *base, uint64_t size_bytes);
  } memory;

  /* Streams, their marks, and waits. */
  struct {
    /* urgent: where kernels of several streams wait for room on the device, this one's are begun first; the simulated
     * device runs all beside each other. OOM_SYSTEM when GMI_DEVICE_MAX_STREAMS exist. */
    gemini_status_t (*create)(void *self, bool urgent, uint32_t *stream_out);
    /* Blocks until the stream is idle. Its index may be given to a new stream, whose marks continue the old numbers. */
    gemini_status_t (*destroy)(void *self, uint32_t stream);
    /* Gives an index to a stream of the caller's (a cudaStream_t or CUstream of the device's primary context; NULL is
     * its default stream). The caller keeps the stream and must not destroy it before the index; destroying the index
     * waits for the work queued so far and leaves the stream as it is. UNSUPPORTED: the device has no such streams;
     * INVALID: the stream belongs to another device; OOM_SYSTEM as create(). */
    gemini_status_t (*adopt)(void *self, void *native, uint32_t *stream_out);
    /* The stream's handle in the device's own API. */
    gemini_status_t (*native)(void *self, uint32_t stream, void **native_out);
    /* Detects that an adopted stream's handle names another stream now, because its owner destroyed the stream and a
     * new one got the same handle. The index then belongs to the new stream, behind everything queued on the device so
     * far: this call blocks for that, or returns BUSY if it may not, with nothing changed. Cheap when the stream is the
     * same. Drivers before CUDA 12 give no way to tell; the stream then counts as the same. */
    gemini_status_t (*renew)(void *self, uint32_t stream, bool may_block);
    /* Records a mark at the stream's end. */
    gemini_status_t (*mark)(void *self, uint32_t stream, uint64_t *mark_out);
    /* As mark(), for a mark whose time is not needed: mark_time() may be INVALID for it. Much cheaper on a GPU. */
    gemini_status_t (*mark_untimed)(void *self, uint32_t stream, uint64_t *mark_out);
    /* When a mark was reached, on the clock of now(). INVALID unless the mark has been reached and is among the latest
     * 4,096 reached ones of the stream. */
    gemini_status_t (*mark_time)(void *self, uint32_t stream, uint64_t mark, uint64_t *ns_out);
    /* Makes stream wait until other has reached mark, which has been recorded; other may have been destroyed since. If
     * other has failed, stream fails, too. */
    gemini_status_t (*wait)(void *self, uint32_t stream, uint32_t other, uint64_t mark);
    /* Makes stream wait until *flag >= value. After storing the flag (release order) its owner calls flag_wake(). flag
     * must stay valid until a later mark of stream is reached. */
    gemini_status_t (*wait_flag)(void *self, uint32_t stream, const _Atomic uint64_t *flag, uint64_t value);
    void (*flag_wake)(void *self);
    /* Has stream reached mark, without a failure so far? Takes a few nanoseconds. Returns false after a stream failure,
     * too; call sync() for the error. Work behind a failure is so never reported complete. */
    bool (*reached)(void *self, uint32_t stream, uint64_t mark);
    /* Blocks until stream has reached mark, which has been recorded. Returns the stream's stored failure, which stays
     * until the stream is destroyed. */
    gemini_status_t (*sync)(void *self, uint32_t stream, uint64_t mark);
    /* Something is about to end queued work of unknown streams before it is done. Marks not known to be reached by now
     * never are, as behind a failure: reached() says false, and sync() waits and returns PEER. Stays until the
     * device is closed. Never blocks. NULL where queued functions fail by themselves (run()). */
    void (*distrust)(void *self);
  } stream;

  /* Queued work. STATE, here and for marks and waits: the stream is being captured into a graph (CUDA). The device owns
   * buffers until a later mark is reached. kind is GMI_COPY_*. A size or count of 0 is accepted. */
  struct {
    gemini_status_t (*copy)(void *self, uint32_t stream, void *dst, const void *src, uint64_t size_bytes,
                            uint32_t kind);
    gemini_status_t (*zero)(void *self, uint32_t stream, void *dst, uint64_t size_bytes);
    gemini_status_t (*call)(void *self, uint32_t stream, void (*fn)(void *user), void *user);
    /* As call(), for a function that can fail: the stream has then failed with its status. NULL where a queued function
     * cannot make a stream fail. */
    gemini_status_t (*run)(void *self, uint32_t stream, gemini_status_t (*fn)(void *user), void *user);
    /* Sum of squares of count values (GEMINI_DTYPE_*), with the order of additions of gmi_sum_squares(). *sum is host
     * memory, and valid once a later mark is reached. */
    gemini_status_t (*sum_squares)(void *self, uint32_t stream, const void *src, uint32_t dtype, uint64_t count,
                                   double *sum);
    /* dst[i] += src[i] for count values (GEMINI_DTYPE_*), each added in float (F64: in double) and rounded once, with
     * the bits of gmi_reduce() (sum.h) but for the payload of a NaN. src is device memory, dst device memory or within
     * one host_lock(); dst is a multiple of a value's size, src of 16 bytes. A count of 0 makes the device ready to
     * add, so that a later call does not take longer, or fail, for that. */
    gemini_status_t (*add)(void *self, uint32_t stream, void *dst, const void *src, uint32_t dtype, uint64_t count);
  } queue;

  /* Copies that become part of a graph that the caller captures from a stream. All are NULL where a device has no
   * graphs. */
  struct {
    /* Prepares copies into `frames` pieces of device memory that chunks share in turns; in the following a frame is an
     * index below that. The stream is not being captured yet. */
    gemini_status_t (*open)(void *self, uint32_t stream, uint32_t frames, void **capture_out);
    void (*close)(void *self, void *capture); /* the capture has ended; NULL is accepted */
    /* Is the stream being captured? STATE: it is, but for another graph than the one that copies were added to. */
    gemini_status_t (*active)(void *self, void *capture, bool *active_out);
    /* Adds a copy from the host into a frame, parallel to the stream's captured work: the copy waits for what had been
     * captured at the frame's last used(), or, without one, at the first fetch; what is captured next waits for the
     * copy. STATE: the stream is not being captured, or is for another graph. After any other failure the capture
     * cannot be used. */
    gemini_status_t (*fetch)(void *self, void *capture, uint32_t frame, void *dst, const void *src,
                             uint64_t size_bytes);
    /* Declares that work captured from here on does not use the frame until its next fetch(). Fails as fetch(). */
    gemini_status_t (*used)(void *self, void *capture, uint32_t frame);
  } capture;
} gmi_device_ops_t;

/* The device simulated in host memory. Frames are extents of one memory file, never more than memory_bytes of them;
 * device addresses are ordinary ones without access until mapped; streams are threads; copies are memcpy, slowed down
 * to the configured rates. The rate of a direction is that of one link, which all streams share in the order in which
 * their copies begin. If a rate is set, a mark behind a copy has the time at which the copy ends on its link, not the
 * time at which the stream's thread wakes up after it.
 *
 * Work on it cannot fail by itself. gmi_device_sim_fail() queues a failure, for tests. */
extern const gmi_device_ops_t gmi_device_sim;
gemini_status_t gmi_device_sim_fail(void *self, uint32_t stream, gemini_status_t status);

/* A GPU through the CUDA driver, which is opened at run time: UNSUPPORTED without driver or GPU. Differences from the
 * simulated device:
 * - a mapping can be replaced or removed only as a whole: a map() or unmap() that cuts one is INVALID, and so is
 *   destroying a frame that is mapped;
 * - the driver's queues are finite: with about a thousand copies, kernels and timed marks waiting on a stream, a thread
 *   that queues more blocks until the GPU has caught up. Meanwhile threads that record marks or lock host memory may
 *   block, too, but not those in sync() or flag_wake(). A copy from or to host memory that is not locked blocks as
 * well;
 * - the host memory of one copy must lie within one host_lock();
 * - a failure on one stream is a failure on all, and stays until the process ends;
 * - a wait_flag() may hold other streams, too, as they share hardware queues: the code that stores the flag must not
 *   wait for device work queued after the wait;
 * - times of marks are accurate to a microsecond relative to each other, and to some 20 us relative to now().
 * The thread's last error (gmi_fail) names the driver's error. */
enum { GMI_DEVICE_CUDA_UNIT = 2 << 20 }; /* memory_bytes must be a multiple of this */
extern const gmi_device_ops_t gmi_device_cuda;

/* Sum of squares in double, left to right. Never fails on a valid dtype. */
double gmi_sum_squares(const void *src, uint32_t dtype, uint64_t count);
/* The same for `blocks` blocks of count values that lie one after another; each gets a sum of its own. */
void gmi_sum_squares_each(const void *src, uint32_t dtype, uint64_t count, uint64_t blocks, double *sums_out);

#endif
