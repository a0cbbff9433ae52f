/* The system calls of the file tier in one table, so that a test can make each of them fail or transfer too little.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The functions are the C library's and liburing's of the same names, with their conventions: the first group returns
 * -1 and sets errno, the ring_* group returns a negative errno. Any may be called from any thread at once. */
#ifndef GMI_SYS_H
#define GMI_SYS_H

#include <sys/stat.h>
#include <sys/types.h>

struct io_uring;
struct io_uring_params;
struct iovec;
struct statfs;
struct statx;

typedef struct gmi_sys {
  int (*open)(const char *path, int flags, mode_t mode);
  int (*openat)(int dir, const char *path, int flags, mode_t mode);
  int (*close)(int fd);
  ssize_t (*pread)(int fd, void *buffer, size_t size_bytes, off_t offset_bytes);
  ssize_t (*pwrite)(int fd, const void *buffer, size_t size_bytes, off_t offset_bytes);
  int (*fallocate)(int fd, int mode, off_t offset_bytes, off_t size_bytes);
  int (*ftruncate)(int fd, off_t size_bytes);
  int (*fsync)(int fd);
  int (*fdatasync)(int fd);
  int (*rename)(const char *from, const char *to);
  int (*unlink)(const char *path);
  int (*linkat)(int from_dir, const char *from, int to_dir, const char *to, int flags);
  int (*fstat)(int fd, struct stat *out);
  int (*fstatfs)(int fd, struct statfs *out);
  int (*statx)(int dir, const char *path, int flags, unsigned mask, struct statx *out);
  int (*mkostemp)(char *path_template, int flags);
  int (*flock)(int fd, int operation);
  int (*eventfd)(unsigned value, int flags);

  int (*ring_init)(unsigned entries, struct io_uring *ring, struct io_uring_params *params);
  void (*ring_exit)(struct io_uring *ring);
  int (*ring_register_files)(struct io_uring *ring, const int *fds, unsigned count);
  int (*ring_register_files_update)(struct io_uring *ring, unsigned first, const int *fds, unsigned count);
  /* Registers a table of count empty entries, which ring_register_buffers_update fills and clears. */
  int (*ring_register_buffers_sparse)(struct io_uring *ring, unsigned count);
  int (*ring_register_buffers_update)(struct io_uring *ring, unsigned first, const struct iovec *buffers,
                                      unsigned count);
  int (*ring_submit_and_wait)(struct io_uring *ring, unsigned completions);
  /* io_uring_enter with GETEVENTS and nothing to submit: the kernel moves completions that did not fit into the
   * completion queue before. */
  int (*ring_get_events)(struct io_uring *ring);
} gmi_sys_t;

extern const gmi_sys_t gmi_sys_real;

#endif
