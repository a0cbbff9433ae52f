/* The table of operations that a device implements; one file per device (sim.c, cuda.c).
 * SPDX-License-Identifier: Apache-2.0
 *
 * Terms. A *stream* is an in-order queue, named by a small index. A *mark* is a point in a stream, named by a
 * sequence number that grows by one a mark: mark m is reached when everything queued before it is done, and mark 0
 * always is. A *frame* is physical memory, never named 0; a reserved address range is backed by mapping frames into
 * it.
 *
 * A size that is 0 or no multiple of the granularity, an address outside the ranges reserved, a frame, stream or mark
 * that does not exist: INVALID. No memory for records: OOM_SYSTEM. A failure changes nothing and leaves results
 * named *_out untouched.
 *
 * The device decides nothing. Except where a comment says "blocks", no operation waits for queued work. Every
 * operation may be called from any thread; the caller never holds a lock that a queued function takes. */
#ifndef GMI_DEVICE_H
#define GMI_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "gemini.h"

#define GMI_DEVICE_ABI 1u
#define GMI_DEVICE_MAX_STREAMS 64u
#define GMI_DEVICE_PCI_BYTES 32

enum { GMI_COPY_H2D = 0, GMI_COPY_D2H = 1, GMI_COPY_D2D = 2 };

typedef struct gmi_device_config {
  uint32_t ordinal;
  uint32_t reserved;
  uint64_t memory_bytes;    /* frames that can exist at once, in bytes; a multiple of the granularity */
  uint64_t h2d_bytes_per_s; /* simulated device only; 0 = as fast as memcpy */
  uint64_t d2h_bytes_per_s;
} gmi_device_config_t;

typedef struct gmi_device_ops {
  uint32_t struct_size, abi;
  const char *name;           /* static storage */
  uint64_t chunk_overhead_ns; /* of a chunk's way to the device or back, besides its bytes: mapping, marks */
  uint64_t link_bytes_per_s;  /* to be expected of a copy, until one was measured */

  /* What failed is in the thread's last error (gmi_fail). */
  gemini_status_t (*open)(const gmi_device_config_t *config, void **self_out);
  /* Blocks until every stream is idle. Everything made from it is gone. NULL is accepted. */
  void (*close)(void *self);
  /* Nanoseconds, monotonic. */
  uint64_t (*now)(void *self);
  /* Where the device is on the PCI bus, as "0000:1b:00.0" in either case. UNSUPPORTED on the simulated device. */
  gemini_status_t (*pci)(void *self, char address_out[GMI_DEVICE_PCI_BYTES]);
  /* What the device's memory is made for, bytes/s; 0: no more than the host's, or not known. */
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
    /* Page-locks host memory so that copies are asynchronous; a no-op on the simulated device. */
    gemini_status_t (*host_lock)(void *self, void *base, uint64_t size_bytes);
    /* May block until all work queued on the device is done. */
    gemini_status_t (*host_unlock)(void *self, void *base, uint64_t size_bytes);
  } memory;

  /* Streams, their marks, and waits. */
  struct {
    /* OOM_SYSTEM when GMI_DEVICE_MAX_STREAMS exist. */
    gemini_status_t (*create)(void *self, uint32_t *stream_out);
    /* Blocks until the stream is idle. Its index may be handed out again, with its marks going on, not restarting. */
    gemini_status_t (*destroy)(void *self, uint32_t stream);
    /* Makes a stream of the caller's own (a cudaStream_t or CUstream of the device's primary context; NULL is its
     * default stream) usable by an index. It stays the caller's: destroying the index waits for what is queued so far
     * and leaves the stream as it is. It must outlive the index. UNSUPPORTED where there are no such streams, INVALID
     * when it belongs to another device, OOM_SYSTEM as stream_create. */
    gemini_status_t (*adopt)(void *self, void *native, uint32_t *stream_out);
    /* The stream as the device's own API names it. */
    gemini_status_t (*native)(void *self, uint32_t stream, void **native_out);
    /* Looks whether an adopted stream's handle names another stream now, because its owner destroyed it and got the
     * handle again. Then the index is that one's from here on, behind everything queued on the device so far: blocks
     * for that, or BUSY when it may not, and nothing changed. Cheap when it does not. Which is not known with drivers
     * before CUDA 12. */
    gemini_status_t (*renew)(void *self, uint32_t stream, bool may_block);
    /* Records a mark at the stream's end. */
    gemini_status_t (*mark)(void *self, uint32_t stream, uint64_t *mark_out);
    /* As mark(), for one whose time is not asked for: mark_time() of it may be INVALID. Much cheaper on a GPU. */
    gemini_status_t (*mark_untimed)(void *self, uint32_t stream, uint64_t *mark_out);
    /* When a mark was reached, on the clock of now(). Only for reached marks of the stream's latest 4,096;
     * otherwise INVALID. */
    gemini_status_t (*mark_time)(void *self, uint32_t stream, uint64_t mark, uint64_t *ns_out);
    /* Makes stream wait until other has reached mark, which has been recorded. other may be destroyed since. When other
     * has failed, so does stream. */
    gemini_status_t (*wait)(void *self, uint32_t stream, uint32_t other, uint64_t mark);
    /* Makes stream wait until *flag >= value. Whoever stores the flag (release order) calls flag_wake after it.
     * flag must stay valid until a later mark of stream is reached. */
    gemini_status_t (*wait_flag)(void *self, uint32_t stream, const _Atomic uint64_t *flag, uint64_t value);
    void (*flag_wake)(void *self);
    /* Has stream reached mark, and has nothing on it failed so far? A few nanoseconds. Who is told no waits by sync,
     * which says what failed: so what is behind a failure is never taken for done. */
    bool (*reached)(void *self, uint32_t stream, uint64_t mark);
    /* Blocks until stream has reached mark, which has been recorded; returns the stream's stored failure, which stays
     * until the stream is destroyed. */
    gemini_status_t (*sync)(void *self, uint32_t stream, uint64_t mark);
  } stream;

  /* Queued work. STATE on a stream of which somebody else is capturing a graph (CUDA), as for marks and waits. Buffers
   * are the device's until a later mark is reached. kind is GMI_COPY_*. A size or count of 0 is accepted. */
  struct {
    gemini_status_t (*copy)(void *self, uint32_t stream, void *dst, const void *src, uint64_t size_bytes,
                            uint32_t kind);
    gemini_status_t (*zero)(void *self, uint32_t stream, void *dst, uint64_t size_bytes);
    gemini_status_t (*call)(void *self, uint32_t stream, void (*fn)(void *user), void *user);
    /* Sum of squares of count values (GEMINI_DTYPE_*) into *sum, host memory, valid once a later mark is reached;
     * by gmi_sum_squares()'s order of additions. */
    gemini_status_t (*sum_squares)(void *self, uint32_t stream, const void *src, uint32_t dtype, uint64_t count,
                                   double *sum);
  } queue;

  /* Copies in a graph that somebody else captures of a stream; all NULL where a device has no graphs. */
  struct {
    /* The stream is not
     * being captured yet. frames: how many parts of device memory the copies take in turns. */
    gemini_status_t (*open)(void *self, uint32_t stream, uint32_t frames, void **capture_out);
    void (*close)(void *self, void *capture); /* the capture has ended; NULL is accepted */
    /* Is the stream being captured? STATE: for another graph than the one that has copies by now. */
    gemini_status_t (*active)(void *self, void *capture, bool *active_out);
    /* Adds a copy from the host, beside what the stream does: behind what had been captured at the frame's last
     * capture_used(), or at the first fetch. The stream goes on behind the copy. STATE: it is not being captured, or
     * for another graph. After any other failure the capture is of no use. */
    gemini_status_t (*fetch)(void *self, void *capture, uint32_t frame, void *dst, const void *src,
                             uint64_t size_bytes);
    /* What has been captured so far uses the frame; what follows does not, until its next fetch. As capture_fetch(). */
    gemini_status_t (*used)(void *self, void *capture, uint32_t frame);
  } capture;
} gmi_device_ops_t;

/* The host-simulated device: frames are extents of one memory file, never more than memory_bytes of them, addresses
 * are ordinary ones without access until mapped, streams are threads, copies are memcpy held to the configured rates.
 * A direction's rate is one link's, shared by all streams in the order in which their copies come to it. With a rate
 * set, a mark after a copy is timed when the copy ends on its link, not when the thread woke up after it.
 *
 * Work on it cannot fail by itself: gmi_device_sim_fail() queues a failure, for tests. */
extern const gmi_device_ops_t gmi_device_sim;
gemini_status_t gmi_device_sim_fail(void *self, uint32_t stream, gemini_status_t status);

/* A GPU under the CUDA driver, which is looked for when it is opened: UNSUPPORTED without driver or GPU. What differs
 * from the simulated device:
 * - a mapping can be replaced or removed as a whole only: a map() or unmap() that cuts one is INVALID, and so is
 *   destroying a frame that is still mapped;
 * - the driver's queues are finite: with about a thousand copies, kernels and timed marks waiting on a stream, whoever
 *   queues more blocks until the GPU has caught up, and meanwhile others may block that record marks or lock host
 *   memory
 *   (never those who sync or wake flags); a copy from or to host memory that is not locked blocks, too;
 * - one copy's host memory must lie within one host_lock();
 * - a failure on one stream is one on all, and stays until the process ends;
 * - a wait_flag() may hold other streams, too (they share hardware queues): what stores the flag must not wait for
 *   device work queued after it;
 * - marks' times are good to a microsecond between marks, and to some 20 us against now().
 * What failed is in the thread's last error (gmi_fail), with the driver's name for it. */
enum { GMI_DEVICE_CUDA_UNIT = 2 << 20 }; /* its memory_bytes are a multiple of this many */
extern const gmi_device_ops_t gmi_device_cuda;

/* Sum of squares in double, left to right. Never fails on a valid dtype. */
double gmi_sum_squares(const void *src, uint32_t dtype, uint64_t count);
/* The same of so many blocks of count values that lie one after another, each summed on its own. */
void gmi_sum_squares_each(const void *src, uint32_t dtype, uint64_t count, uint64_t blocks, double *sums_out);

#endif
