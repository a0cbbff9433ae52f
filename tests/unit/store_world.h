/* What tests of the store share: system calls that fail when told to, directories with a store over them, and after
 * which nothing may be left. SPDX-License-Identifier: Apache-2.0
 *
 * Directories are made in TMPDIR (/tmp), of which a disk shows more than memory. */
#ifndef STORE_WORLD_H
#define STORE_WORLD_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "../process.h"
#include "../system.h"
#include "base/status.h"
#include "io/store.h"

#define CHECK_STATUS(call, expected)                                                                          \
  do {                                                                                                        \
    gemini_status_t check_s = (call);                                                                         \
    if (check_s != (expected)) {                                                                              \
      fprintf(stderr, "%s:%d: %s: %s is %d, expected %s: %s\n", __FILE__, __LINE__, __func__, #call, check_s, \
              #expected, gmi_fail_message());                                                                 \
      exit(1);                                                                                                \
    }                                                                                                         \
  } while (0)
#define CHECK_OK(call) CHECK_STATUS(call, GEMINI_OK)

/* ---- the system calls, and what they are to do wrong */
enum { FILES = 16, DIRECTORIES = 3 };
static struct {
  atomic_int open_fds[FILES]; /* chunks' files that the store opened, in order; a direct one replaces the plain one */
  atomic_int open_count;
  int no_direct, no_tmpfile, no_fallocate, no_statx; /* != 0: errno of the call */
  int fallocate_error, fallocate_after;              /* the call after so many */
  int ftruncate_error, ftruncate_after;              /* likewise; every one from then on */
  void (*at_fdatasync)(void);                        /* called by each, before it */
  int read_error, write_error;
  atomic_int write_after;
  int fdatasync_error, fsync_error, rename_error, index_error, directory_error, unlink_error;
  unsigned owner_add; /* to the number of a file's owner */
  atomic_int short_transfers, interruptions;
  int fake_type;
  bool unlink_at_lock;
  bool rename_lies; /* a rename that fails with rename_error is done */
  bool hold_reads;
  sem_t reading, go_on;
  atomic_int reads, writes;
} sim;

static gmi_sys_t sys;

static inline int note_fd(int fd) {
  if (fd >= 0 && sim.open_count < FILES) sim.open_fds[sim.open_count++] = fd;
  return fd;
}
static inline int fail_with(int error) {
  errno = error;
  return -1;
}
static inline int sim_open(const char *path, int flags, mode_t mode) {
  bool tmpfile = (flags & O_TMPFILE) == O_TMPFILE;
  if (flags & O_DIRECT && sim.no_direct) return fail_with(sim.no_direct);
  if (tmpfile && sim.no_tmpfile) return fail_with(sim.no_tmpfile);
  if (sim.index_error && strstr(path, ".index.new")) return fail_with(sim.index_error);
  int fd = gmi_sys_real.open(path, flags, mode);
  return tmpfile || strstr(path, ".chunks") || strstr(path, "/.gemini.") ? note_fd(fd) : fd;
}
static inline int sim_mkostemp(char *path, int flags) { return note_fd(gmi_sys_real.mkostemp(path, flags)); }
static inline int sim_unlink(const char *path) {
  return sim.unlink_error ? fail_with(sim.unlink_error) : gmi_sys_real.unlink(path);
}
static inline int sim_fallocate(int fd, int mode, off_t offset, off_t size) {
  if (sim.no_fallocate) return fail_with(sim.no_fallocate);
  if (sim.fallocate_error && sim.fallocate_after-- == 0) {
    CHECK_EQ(gmi_sys_real.fallocate(fd, mode, offset, size / 2), 0); /* as real ones do: part of it is taken */
    return fail_with(sim.fallocate_error);
  }
  return gmi_sys_real.fallocate(fd, mode, offset, size);
}
static inline int sim_ftruncate(int fd, off_t size) {
  if (sim.ftruncate_error && sim.ftruncate_after-- <= 0) return fail_with(sim.ftruncate_error);
  return gmi_sys_real.ftruncate(fd, size);
}
static inline int sim_statx(int dir, const char *path, int flags, unsigned mask, struct statx *out) {
  return sim.no_statx ? fail_with(sim.no_statx) : gmi_sys_real.statx(dir, path, flags, mask, out);
}
static inline int sim_fstat(int fd, struct stat *out) {
  int result = gmi_sys_real.fstat(fd, out);
  if (!result && sim.owner_add && S_ISREG(out->st_mode)) out->st_uid += sim.owner_add;
  return result;
}
static inline int sim_fstatfs(int fd, struct statfs *out) {
  int result = gmi_sys_real.fstatfs(fd, out);
  if (sim.fake_type) out->f_type = sim.fake_type;
  return result;
}
static inline bool counted_down(atomic_int *left) {
  int now = atomic_load(left);
  while (now > 0)
    if (atomic_compare_exchange_weak(left, &now, now - 1)) return true;
  return false;
}
static inline ssize_t sim_pread(int fd, void *buffer, size_t size, off_t offset) {
  atomic_fetch_add(&sim.reads, 1);
  if (sim.hold_reads) {
    sem_post(&sim.reading);
    sem_wait(&sim.go_on);
  }
  if (sim.read_error) return fail_with(sim.read_error);
  if (counted_down(&sim.interruptions)) return fail_with(EINTR);
  if (size > 4096 && counted_down(&sim.short_transfers)) size = size / 2 / 4096 * 4096;
  return gmi_sys_real.pread(fd, buffer, size, offset);
}
static inline ssize_t sim_pwrite(int fd, const void *buffer, size_t size, off_t offset) {
  atomic_fetch_add(&sim.writes, 1);
  if (sim.write_error && sim.write_after-- <= 0) return fail_with(sim.write_error);
  if (counted_down(&sim.interruptions)) return fail_with(EINTR);
  if (size > 4096 && counted_down(&sim.short_transfers)) size = size / 2 / 4096 * 4096;
  return gmi_sys_real.pwrite(fd, buffer, size, offset);
}
static inline int sim_fdatasync(int fd) {
  if (sim.at_fdatasync) sim.at_fdatasync();
  return sim.fdatasync_error ? fail_with(sim.fdatasync_error) : gmi_sys_real.fdatasync(fd);
}
static inline int sim_fsync(int fd) {
  struct stat info;
  CHECK_EQ(fstat(fd, &info), 0);
  int error = S_ISDIR(info.st_mode) ? sim.directory_error : sim.fsync_error;
  return error ? fail_with(error) : gmi_sys_real.fsync(fd);
}
static inline int sim_rename(const char *from, const char *to) {
  if (sim.rename_lies) gmi_sys_real.rename(from, to);
  return sim.rename_error ? fail_with(sim.rename_error) : gmi_sys_real.rename(from, to);
}

static inline int sim_flock(int fd, int operation) {
  char link[64], path[256];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = sim.unlink_at_lock ? readlink(link, path, sizeof path - 1) : 0;
  if (length > 0) {
    path[length] = 0;
    unlink(path);
  }
  return gmi_sys_real.flock(fd, operation);
}

static inline void sim_reset(void) {
  memset(&sim, 0, sizeof sim);
  sem_init(&sim.reading, 0, 0);
  sem_init(&sim.go_on, 0, 0);
  sys = gmi_sys_real;
  sys.open = sim_open;
  sys.mkostemp = sim_mkostemp;
  sys.unlink = sim_unlink;
  sys.fallocate = sim_fallocate;
  sys.ftruncate = sim_ftruncate;
  sys.statx = sim_statx;
  sys.fstat = sim_fstat;
  sys.fstatfs = sim_fstatfs;
  sys.pread = sim_pread;
  sys.pwrite = sim_pwrite;
  sys.fdatasync = sim_fdatasync;
  sys.fsync = sim_fsync;
  sys.rename = sim_rename;
  sys.flock = sim_flock;
}

/* ---- a world: directories, a store, and afterwards nothing left of it */
typedef struct world {
  char dirs[DIRECTORIES][64];
  char list[320];
  int dir_count;
  gmi_store_config_t config;
  gmi_store_t *store;
  process_t before;
} world_t;

static inline int names_in(const char *path) { /* of files in a directory */ return process_entries(path) - 2; }

static inline world_t world(int dir_count) {
  world_t w = { .dir_count = dir_count };
  sim_reset();
  for (int d = 0; d < dir_count; d++) {
    dir_make(w.dirs[d]);
    snprintf(w.list + strlen(w.list), sizeof w.list - strlen(w.list), "%s%s", d ? ":" : "", w.dirs[d]);
  }
  w.config = (gmi_store_config_t){ .directories = NULL,
                                   .block_bytes = 8192,
                                   .block_count = 12,
                                   .engine_kind = GMI_ENGINE_THREADS,
                                   .checksum = true,
                                   .sys = &sys };
  w.before = process_now();
  return w;
}
static inline gemini_status_t try_open(world_t *w) {
  sim.open_count = 0;
  if (!w->config.directories) w->config.directories = w->list;
  gemini_status_t status = gmi_store_open(&w->config, &w->store);
  w->config.directories = NULL;
  return status;
}
static inline void open_store(world_t *w) { CHECK_OK(try_open(w)); }
static inline void close_store(world_t *w) {
  gmi_store_close(w->store);
  w->store = NULL;
  process_check(w->before);
}
static inline void end(world_t *w) {
  if (w->store) close_store(w);
  process_check(w->before);
  for (int d = 0; d < w->dir_count; d++) CHECK_EQ(rmdir(w->dirs[d]), 0); /* fails when a file was left in it */
}

/* ---- blocks */
static inline uint8_t *buffer_of(const world_t *w) {
  uint8_t *buffer = aligned_alloc(4096, (w->config.block_bytes + 4095) / 4096 * 4096);
  CHECK(buffer);
  memset(buffer, 1, w->config.block_bytes);
  CHECK(buffer);
  return buffer;
}
static inline void fill(uint8_t *buffer, uint64_t size, uint64_t seed) {
  uint64_t state = seed * 2 + 1;
  for (uint64_t i = 0; i < size; i += 8) {
    uint64_t word = check_random(&state);
    memcpy(buffer + i, &word, 8);
  }
}
static inline bool holds(const uint8_t *buffer, uint64_t size, uint64_t seed) {
  uint64_t state = seed * 2 + 1;
  for (uint64_t i = 0; i < size; i += 8) {
    uint64_t word = check_random(&state);
    if (memcmp(buffer + i, &word, 8)) return false;
  }
  return true;
}
static inline uint32_t take(world_t *w) {
  uint32_t block;
  CHECK_OK(gmi_store_take(w->store, &block));
  return block;
}
static inline gemini_status_t move(world_t *w, uint32_t block, void *buffer, bool write) {
  gmi_block_request_t r = {
    .block = block, .write = write, .urgent = !write, .buffer = buffer, .owner = "chunk 3 of arena master"
  };
  return gmi_store_wait(w->store, &r);
}
static inline gemini_status_t put(world_t *w, uint32_t block, uint64_t seed) {
  uint8_t *buffer = buffer_of(w);
  fill(buffer, w->config.block_bytes, seed);
  gemini_status_t status = move(w, block, buffer, true);
  free(buffer);
  return status;
}
static inline gemini_status_t get(world_t *w, uint32_t block, uint64_t seed) {
  uint8_t *buffer = buffer_of(w);
  memset(buffer, 0xee, w->config.block_bytes);
  gemini_status_t status = move(w, block, buffer, false);
  if (!status) CHECK(holds(buffer, w->config.block_bytes, seed));
  free(buffer);
  return status;
}
static inline gmi_store_figures_t figures(world_t *w) {
  gmi_store_figures_t f;
  gmi_store_figures(w->store, &f);
  return f;
}

/* The bytes of a block as they are in its file, past the store. */
static inline int fd_of(world_t *w, uint32_t block) {
  char path[64];
  int last = sim.open_count / w->dir_count - 1; /* each directory's last, as a plain descriptor may come before */
  CHECK(last >= 0);
  snprintf(path, sizeof path, "/proc/self/fd/%d", sim.open_fds[(int)block % w->dir_count * (last + 1) + last]);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  CHECK(fd >= 0);
  return fd;
}
static inline off_t offset_of(world_t *w, uint32_t block) {
  return (off_t)(block / (uint32_t)w->dir_count * w->config.block_bytes);
}
static inline void raw(world_t *w, uint32_t block, uint64_t at, void *bytes, uint64_t size, bool write) {
  int fd = fd_of(w, block);
  off_t offset = offset_of(w, block) + (off_t)at;
  CHECK_EQ(write ? pwrite(fd, bytes, size, offset) : pread(fd, bytes, size, offset), size);
  close(fd);
}

#endif
