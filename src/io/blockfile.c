/* Opens, locks, resizes and closes the files that hold blocks. SPDX-License-Identifier: Apache-2.0
 *
 * An unnamed file is made with O_TMPFILE, or created and unlinked at once where the file system lacks that. A named
 * file is opened twice: first without O_DIRECT, to check what it is, then with O_DIRECT, and the two must be the same
 * file. O_DIRECT is given up, with a note, where the file system refuses it or demands an alignment that blocks do not
 * have.
 *
 * Descriptors are opened and closed between gmi_fork_hold() and gmi_fork_let(), so that a child forked at any moment
 * closes exactly those that are open: an open copy would hold the file's lock and space.
 *
 * Runs on the caller's thread: at open, or with the store's admin lock held. */
#include "io/blockfile.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "base/file_limit.h"
#include "base/fork.h"
#include "base/status.h"
#include "io/engine.h"

enum { BUFFER_ALIGNMENT = 4096 };                   /* what callers of the store guarantee for buffers */
enum { LOCK_TRIES = 400, LOCK_PAUSE_NS = 5000000 }; /* two seconds */

void gmi_note_add(gmi_note_t *note, const char *format, ...) {
  char part[sizeof note->text];
  va_list args;
  va_start(args, format);
  vsnprintf(part, sizeof part, format, args);
  va_end(args);
  if (strstr(note->text, part)) return; /* several directories may report the same */
  size_t length = strlen(note->text);
  snprintf(note->text + length, sizeof note->text - length, "%s%s", length ? "; " : "", part);
}

void gmi_blockfile_name(const gmi_blockfile_t *file, char text_out[GMI_BLOCKFILE_NAME_BYTES]) {
  enum { MOST = 100 };
  const char *name = file->path ? file->path : file->directory;
  size_t length = strlen(name);
  bool cut = length > MOST;
  snprintf(text_out, GMI_BLOCKFILE_NAME_BYTES, "%s%s%s", file->path ? "" : "an unnamed file in ", cut ? "..." : "",
           cut ? name + length - MOST : name);
}

/* open(), repeated while a signal interrupts it. */
static int open_again(const gmi_sys_t *sys, const char *path, int flags) {
  int fd;
  do fd = sys->open(path, flags | O_RDWR | O_CLOEXEC, 0600);
  while (fd < 0 && errno == EINTR);
  return fd;
}

static void close_fd(gmi_blockfile_t *file) {
  gmi_fork_hold();
  gmi_fork_close_not(file->fd);
  if (file->fd >= 0) file->sys->close(file->fd);
  file->fd = -1;
  gmi_fork_let();
}

/* For file systems without O_TMPFILE: creates a file under a random name and unlinks it at once, while it is empty, so
 * that a kill in between leaves an empty file at most. It is opened again, with O_DIRECT, while it has its name. */
static gemini_status_t open_and_unlink(gmi_blockfile_t *file, bool direct) {
  const gmi_sys_t *sys = file->sys;
  static const char template[] = "/.gemini.XXXXXX";
  size_t length = strlen(file->directory);
  char *path = malloc(length + sizeof template);
  if (!path) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the name of a file");
  memcpy(path, file->directory, length);
  memcpy(path + length, template, sizeof template);
  gemini_status_t status = GEMINI_OK;
  file->fd = sys->mkostemp(path, O_CLOEXEC);
  if (file->fd < 0) {
    status = gmi_fail(gmi_file_status(errno), errno, "file tier: could not make a file in %s: %s", file->directory,
                      strerror(errno));
  } else {
    int again = direct ? open_again(sys, path, O_DIRECT | O_NOFOLLOW) : -1;
    if (sys->unlink(path))
      status = gmi_fail(GEMINI_ERR_IO, errno, "file tier: could not unlink %s: %s", path, strerror(errno));
    if (again >= 0) {
      close_fd(file);
      file->fd = again;
      file->direct = true;
    }
  }
  free(path);
  return status;
}

static gemini_status_t open_unnamed(gmi_blockfile_t *file, bool direct) {
  if (direct) file->fd = open_again(file->sys, file->directory, O_TMPFILE | O_EXCL | O_DIRECT);
  file->direct = file->fd >= 0;
  if (file->fd < 0) file->fd = open_again(file->sys, file->directory, O_TMPFILE | O_EXCL);
  if (file->fd >= 0) return GEMINI_OK;
  /* The errors of kernels and file systems that do not know O_TMPFILE. */
  if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOSYS)
    return open_and_unlink(file, direct);
  return gmi_fail(gmi_file_status(errno), errno, "file tier: could not make a file in %s: %s", file->directory,
                  strerror(errno));
}

gemini_status_t gmi_file_check_own(const gmi_sys_t *sys, int fd, const char *path, struct stat *info_out) {
  if (sys->fstat(fd, info_out))
    return gmi_fail(GEMINI_ERR_IO, errno, "file tier: could not look up %s: %s", path, strerror(errno));
  if (!S_ISREG(info_out->st_mode)) return gmi_fail(GEMINI_ERR_FORMAT, 0, "file tier: %s is no regular file", path);
  if (info_out->st_uid != geteuid())
    return gmi_fail(GEMINI_ERR_FORMAT, EPERM, "file tier: %s belongs to user %u, but this process is user %u", path,
                    (unsigned)info_out->st_uid, (unsigned)geteuid());
  if (info_out->st_nlink > 1)
    return gmi_fail(GEMINI_ERR_FORMAT, EMLINK,
                    "file tier: %s has %lu names (hard links): another program may use it under another name", path,
                    (unsigned long)info_out->st_nlink);
  return GEMINI_OK;
}

/* O_NOFOLLOW: a symbolic link could lead to another user's file. O_NONBLOCK: opening a FIFO must not block; the check
 * afterwards refuses it. */
static gemini_status_t open_named(gmi_blockfile_t *file, bool direct, uint32_t flags) {
  const gmi_sys_t *sys = file->sys;
  struct stat info, again_info;
  int fd = -1;
  if (flags & GMI_BLOCKFILE_MAKE && !file->made) {
    fd = open_again(sys, file->path, O_CREAT | O_EXCL | O_NOFOLLOW);
    file->made = fd >= 0;
  }
  if (fd < 0) fd = open_again(sys, file->path, O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0 && errno == ENOENT && !(flags & GMI_BLOCKFILE_MAKE))
    return gmi_fail(GEMINI_ERR_FORMAT, ENOENT, "file tier: %s is missing, but there is an index that needs it",
                    file->path);
  if (fd < 0)
    return gmi_fail(gmi_file_status(errno), errno, "file tier: could not open %s: %s", file->path, strerror(errno));
  file->fd = fd;
  gemini_status_t status = gmi_file_check_own(sys, fd, file->path, &info);
  if (status) return status;
  int again = direct ? open_again(sys, file->path, O_DIRECT | O_NOFOLLOW | O_NONBLOCK) : -1;
  if (again < 0) return GEMINI_OK;
  if (sys->fstat(again, &again_info)) {
    int error = errno;
    sys->close(again);
    return gmi_fail(GEMINI_ERR_IO, error, "file tier: could not look at %s: %s", file->path, strerror(error));
  }
  if (again_info.st_dev != info.st_dev || again_info.st_ino != info.st_ino) {
    sys->close(again);
    return gmi_fail(GEMINI_ERR_BUSY, 0, "file tier: %s was exchanged while it was opened", file->path);
  }
  close_fd(file);
  file->fd = again;
  file->direct = true;
  return GEMINI_OK;
}

/* Locks the descriptor that transfers use. The ring of a killed process keeps its descriptor, and with it the lock,
 * until that process's last write is over; the lock is therefore tried for two seconds. A file system without locks is
 * noted. BUSY also when the file lost its name meanwhile: its owner removed it before this call got the lock. */
static gemini_status_t lock_named(gmi_blockfile_t *file, gmi_note_t *note) {
  const gmi_sys_t *sys = file->sys;
  int result;
  for (int tries = 0; tries < LOCK_TRIES; tries++) {
    result = sys->flock(file->fd, LOCK_EX | LOCK_NB);
    if (!result || (errno != EWOULDBLOCK && errno != EINTR)) break;
    nanosleep(&(struct timespec){ 0, LOCK_PAUSE_NS }, NULL);
  }
  bool others = result && (errno == EWOULDBLOCK || errno == EINTR);
  if (result && !others) gmi_note_add(note, "%.80s cannot be locked (%s)", file->directory, strerror(errno));
  struct stat info;
  if (sys->fstat(file->fd, &info))
    return gmi_fail(GEMINI_ERR_IO, errno, "file tier: could not look up %s: %s", file->path, strerror(errno));
  if (others || !info.st_nlink) {
    file->made = false; /* a file of this name is another process's now: it must not be unlinked */
    return gmi_fail(GEMINI_ERR_BUSY, EWOULDBLOCK, "file tier: %s is in use by another process or manager", file->path);
  }
  file->opened_bytes = file->size_bytes = (uint64_t)info.st_size;
  return GEMINI_OK;
}

/* The first length bytes of directory, and "/name" unless name is NULL; to be freed. */
static char *joined(const char *directory, size_t length, const char *name) {
  size_t more = name ? strlen(name) + 1 : 0;
  char *path = malloc(length + more + 1);
  if (!path) return NULL;
  memcpy(path, directory, length);
  path[length] = 0;
  if (name) {
    path[length] = '/';
    memcpy(path + length + 1, name, more);
  }
  return path;
}

gemini_status_t gmi_blockfile_open(gmi_blockfile_t *file, const gmi_sys_t *sys, const char *directory, size_t length,
                                   const char *name, uint32_t flags, uint64_t block_bytes, gmi_note_t *note) {
  *file = (gmi_blockfile_t){ .sys = sys, .fd = -1, .reserves = true };
  file->directory = joined(directory, length, NULL);
  if (name) file->path = joined(directory, length, name);
  gemini_status_t status = GEMINI_OK;
  if (!file->directory || (name && !file->path))
    status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the name of a file");

  /* At most two rounds: with O_DIRECT, and without it if its alignment does not suit. */
  bool direct = true;
  gmi_fork_hold();
  while (!status) {
    status = name ? open_named(file, direct, flags) : open_unnamed(file, direct);
    if (status || !direct) break;
    if (!file->direct) {
      gmi_note_add(note, "%.80s has no O_DIRECT: buffered", file->directory);
      break;
    }
    uint32_t alignment_bytes = gmi_direct_alignment_bytes(sys, file->fd);
    if (block_bytes % alignment_bytes == 0 && alignment_bytes <= BUFFER_ALIGNMENT) {
      file->alignment_bytes = alignment_bytes;
      break;
    }
    gmi_note_add(note, "%.80s wants multiples of %u for O_DIRECT: buffered", file->directory, alignment_bytes);
    close_fd(file);
    file->direct = direct = false;
  }
  gmi_fork_close(file->fd); /* a child's copy would hold the lock and the space */
  gmi_fork_let();
  if (!status && name) status = lock_named(file, note);
  struct statfs info;
  if (!status && !sys->fstatfs(file->fd, &info) && info.f_type == TMPFS_MAGIC)
    gmi_note_add(note, "%.80s is memory (tmpfs)", file->directory);
  if (status) {
    if (file->made) gmi_blockfile_remove(file);
    gmi_blockfile_close(file);
  }
  return status;
}

/* Is there space for size_bytes? Asked before fallocate(), which may take all free space of the file system before it
 * fails, so that other programs run out of space meanwhile. An unknown answer counts as yes. */
static gemini_status_t check_space(const gmi_blockfile_t *file, uint64_t size_bytes, uint64_t *free_out) {
  struct statfs info;
  struct stat now;
  *free_out = UINT64_MAX;
  if (file->sys->fstatfs(file->fd, &info) || !info.f_blocks || file->sys->fstat(file->fd, &now)) return GEMINI_OK;
  uint64_t unit = info.f_frsize > 0 ? (uint64_t)info.f_frsize : (uint64_t)info.f_bsize;
  uint64_t has = (uint64_t)now.st_blocks * 512, more = size_bytes > has ? size_bytes - has : 0;
  *free_out = info.f_bavail > UINT64_MAX / (unit ? unit : 1) ? UINT64_MAX : (uint64_t)info.f_bavail * unit;
  return more > *free_out ? GEMINI_ERR_OOM_FILE : GEMINI_OK;
}

static int truncate_to(const gmi_blockfile_t *file, uint64_t size_bytes) {
  int result;
  do result = file->sys->ftruncate(file->fd, (off_t)size_bytes);
  while (result && errno == EINTR);
  return result;
}

/* Extends the file to size_bytes, with its space reserved where the file system can do that; elsewhere only the size is
 * set, and writes may find the disk full. Returns 0 or an errno. */
static int lengthen(gmi_blockfile_t *file, uint64_t size_bytes, gmi_note_t *note) {
  int result = -1;
  uint64_t from = file->reserved_bytes;
  errno = EOPNOTSUPP;
  if (file->reserves) {
    do result = file->sys->fallocate(file->fd, 0, (off_t)from, (off_t)(size_bytes - from));
    while (result && errno == EINTR);
    if (result && errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  }
  if (!result) return 0;
  file->reserves = false;
  gmi_note_add(note, "%.80s cannot reserve space (%s): it may run out later", file->directory, strerror(errno));
  if (size_bytes <= file->size_bytes) return 0;
  return truncate_to(file, size_bytes) ? errno : 0;
}

/* gmi_file_limit_begin() blocks SIGXFSZ: passing RLIMIT_FSIZE must be an error here, not the end of the process. */
gemini_status_t gmi_blockfile_resize(gmi_blockfile_t *file, uint64_t size_bytes, gmi_note_t *note) {
  char name[GMI_BLOCKFILE_NAME_BYTES];
  gmi_blockfile_name(file, name);
  if (size_bytes > INT64_MAX)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "file tier: %s cannot have %llu bytes", name,
                    (unsigned long long)size_bytes);
  if (size_bytes < file->size_bytes) {
    if (truncate_to(file, size_bytes))
      return gmi_fail(GEMINI_ERR_IO, errno, "file tier: could not shorten %s: %s", name, strerror(errno));
    file->size_bytes = size_bytes;
    if (file->reserved_bytes > size_bytes) file->reserved_bytes = size_bytes;
  }
  if (size_bytes <= file->reserved_bytes) return GEMINI_OK;
  uint64_t free_bytes;
  gmi_file_limit_t limit = gmi_file_limit_begin();
  int error = check_space(file, size_bytes, &free_bytes) ? ENOSPC : lengthen(file, size_bytes, note);
  gmi_file_limit_end(&limit);
  if (error) {
    /* fallocate() may have reserved a part before it failed. */
    if (truncate_to(file, file->size_bytes)) gmi_note_add(note, "%s could not be shortened again", name);
    char room[80] = "";
    if (free_bytes != UINT64_MAX)
      snprintf(room, sizeof room, "; its file system has %llu bytes free", (unsigned long long)free_bytes);
    return gmi_fail(gmi_file_status(error), error, "file tier: could not reserve %llu bytes in %s: %s%s",
                    (unsigned long long)(size_bytes - file->reserved_bytes), file->directory, strerror(error), room);
  }
  file->size_bytes = file->reserved_bytes = size_bytes;
  return GEMINI_OK;
}

gemini_status_t gmi_directory_sync(const gmi_sys_t *sys, const char *directory) {
  int fd, result;
  do fd = sys->open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  while (fd < 0 && errno == EINTR);
  result = fd < 0 ? -1 : sys->fsync(fd);
  int error = result ? errno : 0;
  if (fd >= 0) sys->close(fd);
  /* EINVAL: this file system does not sync directories. There is no other way, so this is no failure. */
  if (error && error != EINVAL)
    return gmi_fail(gmi_file_status(error), error, "file tier: could not sync the directory %s: %s", directory,
                    strerror(error));
  return GEMINI_OK;
}

void gmi_blockfile_remove(const gmi_blockfile_t *file) {
  if (file->path) file->sys->unlink(file->path);
}

void gmi_blockfile_close(gmi_blockfile_t *file) {
  /* Closing the descriptor alone might not release the lock: a ring may keep the open file for a while after the engine
   * was closed. */
  if (file->path && file->fd >= 0) (void)file->sys->flock(file->fd, LOCK_UN);
  close_fd(file);
  free(file->directory);
  free(file->path);
  file->directory = file->path = NULL;
  file->made = false;
}
