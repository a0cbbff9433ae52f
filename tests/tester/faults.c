/* The wrapped calls. SPDX-License-Identifier: Apache-2.0 */
#include "faults.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>
#include <unwind.h>

/* Declared in the library's private headers; the only private function that the tester uses. */
void gmi_cuda_driver_replace(void *(*symbol)(const char *name));

static _Atomic int armed; /* fault_kind_t */
static _Atomic uint64_t calls, skip, run, failed, failed_ever[FAULT_KINDS];
static _Atomic int error_number;
static _Atomic bool any_thread;
static _Thread_local bool mine; /* this thread called faults_arm() */
static _Thread_local int paused;

void faults_arm(fault_kind_t kind, uint64_t skip_calls, uint64_t run_calls, int error, bool any) {
  atomic_store(&calls, 0);
  atomic_store(&failed, 0);
  atomic_store(&skip, skip_calls);
  atomic_store(&run, run_calls);
  atomic_store(&error_number, error);
  atomic_store(&any_thread, any);
  mine = true;
  atomic_store(&armed, kind);
}
uint64_t faults_disarm(void) {
  atomic_store(&armed, FAULT_NONE);
  mine = false;
  return atomic_load(&failed);
}
uint64_t faults_failed(fault_kind_t kind) { return atomic_load(&failed_ever[kind]); }
void faults_pause(bool pause) { paused += pause ? 1 : -1; }
uint64_t faults_calls(void) { return atomic_load(&calls); }
void faults_use_driver(void *(*symbol)(const char *name)) { gmi_cuda_driver_replace(symbol); }

/* ---- ways */
enum { SITES = 8192, DEPTH = 16 };
static _Atomic bool noting;
static _Atomic uint64_t wanted_path; /* the way on which the next call fails; 0: none */
static _Atomic bool site_failed;
static pthread_mutex_t sites_lock = PTHREAD_MUTEX_INITIALIZER;
static fault_site_t sites[SITES];
static uint32_t site_count;

extern char _end[] __attribute__((visibility("hidden"))); /* end of this shared library, defined by the linker */
static uintptr_t library_base(void) {
  static _Atomic uintptr_t base;
  Dl_info info;
  if (!atomic_load(&base) && dladdr((void *)(uintptr_t)&faults_arm, &info))
    atomic_store(&base, (uintptr_t)info.dli_fbase);
  return atomic_load(&base);
}
const char *faults_library(void) {
  Dl_info info;
  return dladdr((void *)(uintptr_t)&faults_arm, &info) ? info.dli_fname : "";
}

typedef struct {
  uint64_t hash;
  uint32_t depth;
} path_t;
static _Unwind_Reason_Code step(struct _Unwind_Context *context, void *user) {
  path_t *path = user;
  uintptr_t offset = _Unwind_GetIP(context) - library_base();
  if (path->depth++ && offset < (uintptr_t)_end - library_base()) path->hash = (path->hash ^ offset) * 1099511628211u;
  return path->depth < DEPTH ? _URC_NO_REASON : _URC_END_OF_STACK;
}
static uint64_t path_here(void) {
  path_t path = { UINT64_C(14695981039346656037), 0 };
  paused++;
  _Unwind_Backtrace(step, &path);
  paused--;
  return path.hash;
}

static void note(fault_kind_t kind, const char *function, void *from) {
  uint64_t path = path_here();
  pthread_mutex_lock(&sites_lock);
  uint32_t i = 0;
  while (i < site_count && sites[i].path != path) i++;
  if (i == site_count && i < SITES) {
    sites[site_count++] = (fault_site_t){ .place = (uintptr_t)from - library_base(), .path = path, .kind = kind };
    strncpy(sites[i].function, function, sizeof sites[i].function - 1);
  }
  if (i < SITES) sites[i].calls++;
  pthread_mutex_unlock(&sites_lock);
}
void faults_note_sites(bool on) { atomic_store(&noting, on); }
uint32_t faults_sites(fault_site_t *out, uint32_t capacity) {
  pthread_mutex_lock(&sites_lock);
  uint32_t count = site_count < capacity ? site_count : capacity;
  memcpy(out, sites, count * sizeof *out);
  pthread_mutex_unlock(&sites_lock);
  return count;
}
void faults_arm_site(uint64_t path) {
  atomic_store(&site_failed, false);
  atomic_store(&wanted_path, path);
}
bool faults_site_failed(void) { return atomic_load(&site_failed); }

/* ---- fails() says whether this call is to fail, and sets errno then. */
static bool fails(fault_kind_t kind, const char *function, void *from, int error) {
  bool hit = false;
  if (paused) return false;
  if (atomic_load_explicit(&armed, memory_order_relaxed) == (int)kind && (mine || atomic_load(&any_thread))) {
    uint64_t at = atomic_fetch_add(&calls, 1), first = atomic_load(&skip);
    hit = at >= first && at - first < atomic_load(&run);
    if (hit) {
      atomic_fetch_add(&failed, 1);
      atomic_fetch_add(&failed_ever[kind], 1);
      int wanted = atomic_load(&error_number);
      errno = wanted ? wanted : error;
    }
  }
  int kept = errno;
  if (atomic_load_explicit(&noting, memory_order_relaxed)) note(kind, function, from);
  uint64_t path = atomic_load_explicit(&wanted_path, memory_order_relaxed);
  errno = kept;
  if (!path || path_here() != path || !atomic_exchange(&wanted_path, 0)) return hit;
  atomic_store(&site_failed, true);
  atomic_fetch_add(&failed_ever[kind], 1);
  errno = error;
  return true;
}
#define FAILS(kind, error) fails(kind, __func__ + sizeof "__wrap", __builtin_return_address(0), error)

/* Declares the real function and defines the wrapper that the library calls. */
#define WRAP(result, name, ...)                                            \
  result __real_##name(__VA_ARGS__);                                       \
  __attribute__((visibility("hidden"))) result __wrap_##name(__VA_ARGS__); \
  result __wrap_##name(__VA_ARGS__)

/* ---- memory */
WRAP(void *, malloc, size_t size) { return FAILS(FAULT_MEMORY, ENOMEM) ? NULL : __real_malloc(size); }
WRAP(void *, calloc, size_t count, size_t size) {
  return FAILS(FAULT_MEMORY, ENOMEM) ? NULL : __real_calloc(count, size);
}
WRAP(void *, realloc, void *old, size_t size) { return FAILS(FAULT_MEMORY, ENOMEM) ? NULL : __real_realloc(old, size); }
WRAP(void *, aligned_alloc, size_t alignment, size_t size) {
  return FAILS(FAULT_MEMORY, ENOMEM) ? NULL : __real_aligned_alloc(alignment, size);
}
WRAP(char *, strdup, const char *text) { return FAILS(FAULT_MEMORY, ENOMEM) ? NULL : __real_strdup(text); }
WRAP(void *, mmap, void *at, size_t size, int access, int flags, int fd, off_t offset) {
  return FAILS(FAULT_MEMORY, ENOMEM) ? MAP_FAILED : __real_mmap(at, size, access, flags, fd, offset);
}
WRAP(int, mprotect, void *at, size_t size, int access) {
  return FAILS(FAULT_MEMORY, ENOMEM) ? -1 : __real_mprotect(at, size, access);
}
WRAP(int, memfd_create, const char *name, unsigned flags) {
  return FAILS(FAULT_MEMORY, ENOMEM) ? -1 : __real_memfd_create(name, flags);
}
WRAP(FILE *, open_memstream, char **text, size_t *size) {
  return FAILS(FAULT_MEMORY, ENOMEM) ? NULL : __real_open_memstream(text, size);
}
WRAP(int, pthread_create, pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *), void *user) {
  return FAILS(FAULT_THREAD, EAGAIN) ? EAGAIN : __real_pthread_create(thread, attr, fn, user);
}

/* ---- files */
WRAP(FILE *, fopen, const char *path, const char *mode) {
  return FAILS(FAULT_FILE, EMFILE) ? NULL : __real_fopen(path, mode);
}
WRAP(int, open, const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  mode_t mode = va_arg(args, mode_t); /* every caller passes a mode, or open() ignores it */
  va_end(args);
  return FAILS(FAULT_FILE, EMFILE) ? -1 : __real_open(path, flags, mode);
}
WRAP(int, openat, int dir, const char *path, int flags, ...) {
  va_list args;
  va_start(args, flags);
  mode_t mode = va_arg(args, mode_t);
  va_end(args);
  return FAILS(FAULT_FILE, EMFILE) ? -1 : __real_openat(dir, path, flags, mode);
}
WRAP(ssize_t, pread, int fd, void *bytes, size_t size, off_t offset) {
  return FAILS(FAULT_FILE, EIO) ? -1 : __real_pread(fd, bytes, size, offset);
}
WRAP(ssize_t, pwrite, int fd, const void *bytes, size_t size, off_t offset) {
  return FAILS(FAULT_FILE, ENOSPC) ? -1 : __real_pwrite(fd, bytes, size, offset);
}
WRAP(int, fallocate, int fd, int mode, off_t offset, off_t size) {
  return FAILS(FAULT_FILE, ENOSPC) ? -1 : __real_fallocate(fd, mode, offset, size);
}
WRAP(int, ftruncate, int fd, off_t size) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_ftruncate(fd, size); }
WRAP(int, fsync, int fd) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_fsync(fd); }
WRAP(int, fdatasync, int fd) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_fdatasync(fd); }
WRAP(int, rename, const char *from, const char *to) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_rename(from, to); }
WRAP(int, unlink, const char *path) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_unlink(path); }
WRAP(int, linkat, int from_dir, const char *from, int to_dir, const char *to, int flags) {
  return FAILS(FAULT_FILE, EIO) ? -1 : __real_linkat(from_dir, from, to_dir, to, flags);
}
WRAP(int, fstat, int fd, struct stat *out) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_fstat(fd, out); }
WRAP(int, fstatfs, int fd, struct statfs *out) { return FAILS(FAULT_FILE, EIO) ? -1 : __real_fstatfs(fd, out); }
WRAP(int, statx, int dir, const char *restrict path, int flags, unsigned mask, struct statx *restrict out) {
  return FAILS(FAULT_FILE, EIO) ? -1 : __real_statx(dir, path, flags, mask, out);
}
WRAP(int, mkostemp, char *path, int flags) { return FAILS(FAULT_FILE, EMFILE) ? -1 : __real_mkostemp(path, flags); }
WRAP(int, flock, int fd, int operation) { return FAILS(FAULT_FILE, EINTR) ? -1 : __real_flock(fd, operation); }
WRAP(int, eventfd, unsigned value, int flags) { return FAILS(FAULT_FILE, EMFILE) ? -1 : __real_eventfd(value, flags); }

/* ---- io_uring: results are negative errnos */
WRAP(int, io_uring_queue_init_params, unsigned entries, struct io_uring *ring, struct io_uring_params *params) {
  return FAILS(FAULT_RING, ENOMEM) ? -ENOMEM : __real_io_uring_queue_init_params(entries, ring, params);
}
WRAP(int, io_uring_register_files, struct io_uring *ring, const int *fds, unsigned count) {
  return FAILS(FAULT_RING, ENOMEM) ? -ENOMEM : __real_io_uring_register_files(ring, fds, count);
}
WRAP(int, io_uring_register_files_update, struct io_uring *ring, unsigned first, const int *fds, unsigned count) {
  return FAILS(FAULT_RING, ENOMEM) ? -ENOMEM : __real_io_uring_register_files_update(ring, first, fds, count);
}
WRAP(int, io_uring_register_buffers_tags, struct io_uring *ring, const struct iovec *buffers, const __u64 *tags,
     unsigned count) {
  return FAILS(FAULT_RING, ENOMEM) ? -ENOMEM : __real_io_uring_register_buffers_tags(ring, buffers, tags, count);
}
WRAP(int, io_uring_register_buffers_update_tag, struct io_uring *ring, unsigned first, const struct iovec *buffers,
     const __u64 *tags, unsigned count) {
  return FAILS(FAULT_RING, ENOMEM) ? -ENOMEM
                                   : __real_io_uring_register_buffers_update_tag(ring, first, buffers, tags, count);
}
WRAP(int, io_uring_submit_and_wait, struct io_uring *ring, unsigned count) {
  return FAILS(FAULT_RING, EAGAIN) ? -EAGAIN : __real_io_uring_submit_and_wait(ring, count);
}
