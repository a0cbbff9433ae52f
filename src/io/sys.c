/* The table of real system calls. SPDX-License-Identifier: Apache-2.0
 *
 * Most entries are the C library's and liburing's own functions. Wrappers exist where those are variadic or macros, and
 * where liburing 2.1, the oldest version supported, lacks a function. */
#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int real_open(const char *path, int flags, mode_t mode) { return open(path, flags, mode); }
static int real_openat(int dir, const char *path, int flags, mode_t mode) { return openat(dir, path, flags, mode); }
/* io_uring_ring_dontfork() keeps the ring's memory out of forked children: a mapping in a child would keep the ring
 * alive, and with it all its registered files. */
static int real_ring_init(unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  int result = io_uring_queue_init_params(entries, ring, params);
  if (!result) (void)io_uring_ring_dontfork(ring);
  return result;
}
static int real_eventfd(unsigned value, int flags) { return eventfd(value, flags); }

/* Does what io_uring_register_buffers_sparse() does, but also on kernels before 5.19: an entry without an address and
 * without a tag counts as empty. */
static int real_register_buffers_sparse(struct io_uring *ring, unsigned count) {
  struct iovec *empty = calloc(count, sizeof *empty);
  __u64 *tags = calloc(count, sizeof *tags);
  int result = empty && tags ? io_uring_register_buffers_tags(ring, empty, tags, count) : -ENOMEM;
  free(empty);
  free(tags);
  return result;
}

static int real_register_buffers_update(struct io_uring *ring, unsigned first, const struct iovec *buffers,
                                        unsigned count) {
  __u64 tags[16] = { 0 };
  if (count > sizeof tags / sizeof *tags) return -EINVAL;
  return io_uring_register_buffers_update_tag(ring, first, buffers, tags, count);
}

static int real_get_events(struct io_uring *ring) {
  long result = syscall(__NR_io_uring_enter, ring->ring_fd, 0, 0, IORING_ENTER_GETEVENTS, NULL, 0);
  return result < 0 ? -errno : (int)result;
}

static int real_register_files_update(struct io_uring *ring, unsigned first, const int *fds, unsigned count) {
  /* Before liburing 2.2 the parameter was not const; the call does not write to it. */
  return io_uring_register_files_update(ring, first, (int *)fds, count);
}

const gmi_sys_t gmi_sys_real = {
  .open = real_open,
  .openat = real_openat,
  .close = close,
  .pread = pread,
  .pwrite = pwrite,
  .fallocate = fallocate,
  .ftruncate = ftruncate,
  .fsync = fsync,
  .fdatasync = fdatasync,
  .rename = rename,
  .unlink = unlink,
  .linkat = linkat,
  .fstat = fstat,
  .fstatfs = fstatfs,
  .statx = statx,
  .mkostemp = mkostemp,
  .flock = flock,
  .eventfd = real_eventfd,
  .ring_init = real_ring_init,
  .ring_exit = io_uring_queue_exit,
  .ring_register_files = io_uring_register_files,
  .ring_register_files_update = real_register_files_update,
  .ring_register_buffers_sparse = real_register_buffers_sparse,
  .ring_register_buffers_update = real_register_buffers_update,
  .ring_submit_and_wait = io_uring_submit_and_wait,
  .ring_get_events = real_get_events,
};
