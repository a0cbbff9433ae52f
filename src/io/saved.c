/* The files of checkpoints, for readers that do not own them. SPDX-License-Identifier: Apache-2.0
 *
 * Blocks are read with pread(), not through an engine: a reader needs each block once, and the system reads ahead. */
#include "io/saved.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>

#include "base/clock.h"
#include "base/file_limit.h"
#include "base/fork.h"
#include "base/names.h"
#include "base/status.h"
#include "io/blockfile.h"
#include "io/checksum.h"
#include "io/store.h"

/* ---- names */
/* The n-th directory of the list, not NUL-terminated; NULL: there are fewer. */
static const char *directory_at(const char *list, uint32_t n, size_t *length_out) {
  while (n && *list) {
    list += strcspn(list, ":");
    list += *list == ':';
    n--;
  }
  *length_out = strcspn(list, ":");
  return *list ? list : NULL;
}

char *gmi_saved_path(const char *directories, uint32_t n, const char *name, const char *end) {
  size_t length;
  const char *directory = directory_at(directories, n, &length);
  if (!directory) return NULL;
  const size_t size = length + strlen(name) + strlen(end) + 2;
  char *path = malloc(size);
  if (path) snprintf(path, size, "%.*s/%s%s", (int)length, directory, name, end);
  return path;
}

/* A file that cannot be removed only takes space. */
static bool remove_file(const gmi_sys_t *sys, const char *directories, uint32_t n, const char *name, const char *end) {
  char *path = gmi_saved_path(directories, n, name, end);
  const bool removed = path && !sys->unlink(path);
  free(path);
  return removed;
}
void gmi_saved_remove(const gmi_sys_t *sys, const char *directories, const char *name) {
  size_t length;
  (void)remove_file(sys, directories, 0, name, ".index"); /* first: without it the blocks mean nothing */
  (void)remove_file(sys, directories, 0, name, ".index.new");
  for (uint32_t f = 0; directory_at(directories, f, &length); f++) {
    char end[32];
    snprintf(end, sizeof end, ".%u.chunks", f);
    (void)remove_file(sys, directories, f, name, end);
  }
}

/* Is a file's name one of a part "<name>.<number>-<number>.<number>", the first number at most `most`? */
static bool is_part(const char *file, const char *name, uint64_t most) {
  const size_t length = strlen(name);
  uint64_t number;
  if (strncmp(file, name, length) != 0 || file[length] != '.') return false;
  file += length + 1;
  if (!gmi_number_at(&file, '-', most, &number) || !gmi_number_at(&file, '.', UINT64_MAX, &number) ||
      !gmi_number_at(&file, '.', UINT64_MAX, &number))
    return false;
  return !strcmp(file, "index") || !strcmp(file, "index.new") ||
         (gmi_number_at(&file, '.', UINT64_MAX, &number) && !strcmp(file, "chunks"));
}
bool gmi_saved_sweep(const gmi_sys_t *sys, const char *directories, const char *name, uint64_t most,
                     uint64_t until_ns) {
  size_t length;
  bool removed = false, all = true;
  for (uint32_t f = 0; all && directory_at(directories, f, &length); f++) {
    char *path = gmi_saved_path(directories, f, "", "");
    DIR *directory = path ? opendir(path) : NULL;
    for (struct dirent *e; all && directory && (e = readdir(directory));) {
      if (!is_part(e->d_name, name, most)) continue;
      removed |= remove_file(sys, directories, f, e->d_name, "");
      all = gmi_now_ns() < until_ns;
    }
    if (directory) closedir(directory);
    free(path);
  }
  return all || !removed;
}

/* ---- the lock of writers */
gemini_status_t gmi_saved_lock(const gmi_sys_t *sys, const char *directories, const char *name, int *fd_out,
                               int *error_out) {
  char *path = gmi_saved_path(directories, 0, name, ".lock");
  struct stat info;
  if (!path) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the name of a file");
  int fd, result;
  gmi_fork_hold();
  do fd = sys->open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0600);
  while (fd < 0 && errno == EINTR);
  gmi_fork_close(fd); /* a child's copy would hold the lock */
  gmi_fork_let();
  gemini_status_t status = GEMINI_OK;
  *error_out = 0;
  if (fd < 0) {
    status = gmi_fail(gmi_file_status(errno), errno, "checkpoint: could not open %s: %s", path, strerror(errno));
  } else {
    status = gmi_file_check_own(sys, fd, path, &info);
    do result = status ? 0 : sys->flock(fd, LOCK_EX | LOCK_NB);
    while (result && errno == EINTR);
    if (result && errno == EWOULDBLOCK)
      status = gmi_fail(GEMINI_ERR_BUSY, errno, "checkpoint: another process makes one of this name: it has locked %s",
                        path);
    else if (result) *error_out = errno;
  }
  free(path);
  if (status) gmi_saved_unlock(sys, fd);
  else *fd_out = fd;
  return status;
}

void gmi_saved_unlock(const gmi_sys_t *sys, int fd) {
  if (fd < 0) return;
  gmi_fork_hold();
  gmi_fork_close_not(fd);
  sys->close(fd);
  gmi_fork_let();
}

/* ---- reading */
static gemini_status_t no_memory(const char *name) {
  return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the files of checkpoint %s", name);
}

static void close_file(gmi_saved_t *s) {
  if (s->fd >= 0) s->sys->close(s->fd);
  free(s->fd_path);
  s->fd = -1;
  s->fd_path = NULL;
}

static gemini_status_t open_file(gmi_saved_t *s, uint32_t file, uint64_t *size_out) {
  char end[32];
  struct stat info;
  size_t length;
  close_file(s);
  if (!directory_at(s->directories, file, &length))
    return gmi_fail(GEMINI_ERR_FORMAT, 0, "checkpoint %s has files in %u directories, but only %u are named: %s",
                    s->index_path, s->index.file_count, file, s->directories);
  snprintf(end, sizeof end, ".%u.chunks", file);
  s->fd_path = gmi_saved_path(s->directories, file, s->name, end);
  if (!s->fd_path) return no_memory(s->name);
  do s->fd = s->sys->open(s->fd_path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0);
  while (s->fd < 0 && errno == EINTR);
  if (s->fd < 0)
    return gmi_fail(errno == ENOENT ? GEMINI_ERR_FORMAT : GEMINI_ERR_IO, errno, "checkpoint: could not open %s: %s",
                    s->fd_path, strerror(errno));
  s->file = file;
  gemini_status_t status = gmi_file_check_own(s->sys, s->fd, s->fd_path, &info);
  if (!status) *size_out = (uint64_t)info.st_size;
  return status;
}

static gemini_status_t check_files(gmi_saved_t *s) {
  const gmi_index_t *x = &s->index;
  gemini_status_t status = GEMINI_OK;
  for (uint32_t f = 0; !status && f < x->file_count; f++) {
    uint64_t end = 0, size = 0;
    for (uint32_t i = 0; i < x->entry_count; i++) {
      const uint64_t stop = ((uint64_t)x->entries[i].block / x->file_count + 1) * x->block_bytes;
      if (x->entries[i].block % x->file_count == f && stop > end) end = stop;
    }
    if (end) status = open_file(s, f, &size);
    if (!status && size < end)
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "checkpoint: %s ends at %llu, before a block that ends at %llu",
                        s->fd_path, (unsigned long long)size, (unsigned long long)end);
  }
  close_file(s);
  return status;
}

gemini_status_t gmi_saved_open(const gmi_sys_t *sys, const char *directories, const char *name,
                               gmi_saved_t *saved_out) {
  gmi_saved_t s = { .sys = sys, .directories = directories, .fd = -1 };
  s.name = strdup(name);
  s.index_path = gmi_saved_path(directories, 0, name, ".index");
  gemini_status_t status = s.name && s.index_path ? GEMINI_OK : no_memory(name);
  if (!status) status = gmi_index_read(sys, s.index_path, &s.index);
  if (!status) status = check_files(&s);
  if (status) gmi_saved_close(&s);
  else *saved_out = s;
  return status;
}

gemini_status_t gmi_saved_read(gmi_saved_t *s, uint32_t entry, void *buffer, uint64_t size_bytes) {
  const gmi_index_t *x = &s->index;
  const gmi_index_entry_t *e = &x->entries[entry];
  const uint32_t file = e->block % x->file_count;
  const uint64_t begin = (uint64_t)(e->block / x->file_count) * x->block_bytes;
  gemini_status_t status = GEMINI_OK;
  uint64_t size;
  if (s->fd < 0 || s->file != file) status = open_file(s, file, &size);
  for (uint64_t done = 0; !status && done < size_bytes;) {
    const uint64_t left = size_bytes - done;
    ssize_t n = s->sys->pread(s->fd, (uint8_t *)buffer + done, left < 1 << 30 ? left : 1 << 30, (off_t)(begin + done));
    if (n < 0 && errno == EINTR) continue;
    if (n > 0) done += (uint64_t)n;
    else if (n < 0)
      status = gmi_fail(gmi_file_status(errno), errno, "checkpoint: could not read %s, offset %llu: %s", s->fd_path,
                        (unsigned long long)(begin + done), strerror(errno));
    else
      status = gmi_fail(GEMINI_ERR_FORMAT, 0, "checkpoint: %s ends at %llu, in a block", s->fd_path,
                        (unsigned long long)(begin + done));
  }
  if (status || !x->checksums) return status;
  const uint32_t sum = gmi_crc32c(gmi_crc32c_generation(e->generation), buffer, size_bytes);
  if (sum == e->checksum) return GEMINI_OK;
  return gmi_fail(GEMINI_ERR_FORMAT, 0,
                  "checkpoint: %s, offset %llu: the block's checksum is %#x, but its index says %#x: it is damaged or "
                  "of another checkpoint",
                  s->fd_path, (unsigned long long)begin, sum, e->checksum);
}

void gmi_saved_rest(gmi_saved_t *s) { close_file(s); }

void gmi_saved_close(gmi_saved_t *s) {
  if (!s->sys) return;
  close_file(s);
  gmi_index_free(&s->index);
  free(s->name);
  free(s->index_path);
  *s = (gmi_saved_t){ .fd = -1 };
}
