/* Reads and writes the index file of checkpoints; its layout is in index.h. SPDX-License-Identifier: Apache-2.0
 *
 * Nothing in the file is trusted: header fields are checked against each other and against the file's size before
 * memory is allocated by them, then the checksum of the whole file, then each entry. Numbers are converted byte by
 * byte, so the format does not depend on the machine. Runs on the caller's thread; no shared state. */
#include "io/index.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_limit.h"
#include "base/status.h"
#include "io/blockfile.h"
#include "io/checksum.h"
#include "io/store.h"

enum { HEADER_BYTES = 80, ENTRY_BYTES = 24, SUM_BYTES = 4, VERSION = 1 };
static const char magic[8] = "gmiblock";

static uint64_t get(const uint8_t *bytes, int count) {
  uint64_t value = 0;
  while (count--) value = value << 8 | bytes[count];
  return value;
}
static void put(uint8_t *bytes, uint64_t value, int count) {
  for (int i = 0; i < count; i++) bytes[i] = (uint8_t)(value >> 8 * i);
}

static gemini_status_t failed(const char *what, const char *path, int error) {
  return gmi_fail(gmi_file_status(error), error, "index %s: could not %s it: %s", path, what,
                  error ? strerror(error) : "it ends early");
}
static gemini_status_t malformed(const char *path, uint64_t offset, const char *what) {
  return gmi_fail(GEMINI_ERR_FORMAT, 0, "index %s, byte %llu: %s", path, (unsigned long long)offset, what);
}

/* Both return 0 or an errno; read_all() returns -1 when the file ends early. */
static int read_all(const gmi_sys_t *sys, int fd, uint8_t *bytes, uint64_t size, uint64_t offset) {
  while (size) {
    ssize_t n = sys->pread(fd, bytes, size < 1 << 30 ? size : 1 << 30, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n ? errno : -1;
    bytes += n, offset += (uint64_t)n, size -= (uint64_t)n;
  }
  return 0;
}
static int write_all(const gmi_sys_t *sys, int fd, const uint8_t *bytes, uint64_t size) {
  for (uint64_t offset = 0; size;) {
    ssize_t n = sys->pwrite(fd, bytes, size < 1 << 30 ? size : 1 << 30, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n ? errno : EIO;
    bytes += n, offset += (uint64_t)n, size -= (uint64_t)n;
  }
  return 0;
}

/* Checks the header's numbers against each other and the file's size. On success entries and blob lie within the file,
 * and no size computed from the header overflows. */
static gemini_status_t check_header(const char *path, const uint8_t *h, uint64_t file_bytes, gmi_index_t *x) {
  if (memcmp(h, magic, sizeof magic)) return malformed(path, 0, "this is no index of blocks");
  if (get(h + 8, 4) != VERSION) return malformed(path, 8, "another version of the index");
  x->file_count = (uint32_t)get(h + 12, 4);
  x->block_bytes = get(h + 24, 8);
  x->block_count = (uint32_t)get(h + 32, 4);
  x->entry_count = (uint32_t)get(h + 40, 4);
  x->checksums = get(h + 44, 4) & 1;
  x->blob_bytes = get(h + 48, 8);
  x->number = get(h + 56, 8);
  x->generations = get(h + 64, 8);
  if (!x->file_count || x->file_count > GMI_ENGINE_FILES_LIMIT)
    return malformed(path, 12, "the number of files is out of range");
  if (!x->block_bytes || x->block_bytes % 512 || x->block_bytes > INT64_MAX)
    return malformed(path, 24, "the size of a block is out of range");
  if (x->block_count == GMI_BLOCK_NONE || x->block_count > (uint64_t)INT64_MAX / x->block_bytes)
    return malformed(path, 32, "the number of blocks is out of range");
  if (get(h + 36, 4)) return malformed(path, 36, "a reserved field is not 0");
  if (x->entry_count > x->block_count) return malformed(path, 40, "more blocks are kept than there are");
  if (get(h + 44, 4) > 1) return malformed(path, 44, "the flag of checksums is neither 0 nor 1");
  if (x->blob_bytes > GMI_BLOB_LIMIT_BYTES) return malformed(path, 48, "the blob is too long");
  if (!x->number) return malformed(path, 56, "the number of the checkpoint is 0");
  if (get(h + 72, 8)) return malformed(path, 72, "a reserved field is not 0");
  uint64_t whole = HEADER_BYTES + (uint64_t)x->entry_count * ENTRY_BYTES + x->blob_bytes + SUM_BYTES;
  if (get(h + 16, 8) != whole) return malformed(path, 16, "the size of the file does not agree with its contents");
  if (file_bytes != whole) return malformed(path, file_bytes, "the file is shorter or longer than it says");
  return GEMINI_OK;
}

/* seen: a bit map of the blocks that earlier entries name. */
static gemini_status_t read_entries(const char *path, const uint8_t *bytes, gmi_index_t *x) {
  uint64_t *seen = calloc(x->block_count / 64 + 1, sizeof *seen);
  x->entries = calloc((size_t)x->entry_count + 1, sizeof *x->entries);
  if (!seen || !x->entries) {
    free(seen);
    return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "index %s: no memory for it", path);
  }
  gemini_status_t status = GEMINI_OK;
  for (uint32_t i = 0; i < x->entry_count && !status; i++) {
    uint64_t at = HEADER_BYTES + (uint64_t)i * ENTRY_BYTES;
    gmi_index_entry_t *e = &x->entries[i];
    e->key = get(bytes + at, 8);
    e->generation = get(bytes + at + 8, 8);
    e->block = (uint32_t)get(bytes + at + 16, 4);
    e->checksum = (uint32_t)get(bytes + at + 20, 4);
    if (!e->generation || e->generation > x->generations)
      status = malformed(path, at + 8, "the generation is out of range");
    else if (e->block >= x->block_count) status = malformed(path, at + 16, "there is no such block");
    else if (seen[e->block / 64] >> e->block % 64 & 1) status = malformed(path, at + 16, "a block is kept twice");
    else if (!x->checksums && e->checksum)
      status = malformed(path, at + 20, "an entry has a checksum, but the index says that none has");
    else seen[e->block / 64] |= UINT64_C(1) << e->block % 64;
  }
  free(seen);
  return status;
}

/* The header is read twice, alone and with the whole file. The first reading bounds the allocation; the second must be
 * equal, as the file may change in between. */
static gemini_status_t read_file(const gmi_sys_t *sys, const char *path, int fd, gmi_index_t *x) {
  struct stat info;
  gemini_status_t status = gmi_file_check_own(sys, fd, path, &info);
  if (status) return status;
  uint64_t size = (uint64_t)info.st_size;
  uint8_t header[HEADER_BYTES];
  if (size < HEADER_BYTES + SUM_BYTES) return malformed(path, size, "the file is too short");
  int error = read_all(sys, fd, header, sizeof header, 0);
  if (error) return failed("read", path, error < 0 ? 0 : error);
  status = check_header(path, header, size, x);
  if (status) return status;

  uint8_t *bytes = malloc(size);
  if (!bytes) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "index %s: no memory for it", path);
  error = read_all(sys, fd, bytes, size, 0);
  if (error) {
    status = failed("read", path, error < 0 ? 0 : error);
  } else if (memcmp(bytes, header, sizeof header) ||
             get(bytes + size - SUM_BYTES, SUM_BYTES) != gmi_crc32c(0, bytes, size - SUM_BYTES)) {
    status = malformed(path, size - SUM_BYTES, "its checksum is not that of its bytes");
  } else {
    x->checksum = (uint32_t)get(bytes + size - SUM_BYTES, SUM_BYTES);
    status = read_entries(path, bytes, x);
  }
  if (!status) {
    x->blob = malloc(x->blob_bytes + 1);
    if (x->blob) memcpy(x->blob, bytes + size - SUM_BYTES - x->blob_bytes, x->blob_bytes);
    else status = gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "index %s: no memory for it", path);
  }
  free(bytes);
  return status;
}

/* Opens a file of this library's for reading. Returns -errno on failure. */
static int open_to_read(const gmi_sys_t *sys, const char *path) {
  int fd;
  do fd = sys->open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW, 0);
  while (fd < 0 && errno == EINTR);
  return fd < 0 ? -errno : fd;
}

gemini_status_t gmi_index_read(const gmi_sys_t *sys, const char *path, gmi_index_t *index_out) {
  const int fd = open_to_read(sys, path);
  if (fd == -ENOENT) return gmi_fail(GEMINI_ERR_NOT_FOUND, ENOENT, "index %s: there is none", path);
  if (fd < 0) return failed("open", path, -fd);
  gmi_index_t index = { 0 };
  gemini_status_t status = read_file(sys, path, fd, &index);
  sys->close(fd);
  if (status) gmi_index_free(&index);
  else *index_out = index;
  return status;
}

/* Compares the file with what was to take its place. *surely_out: whether that could be done. */
static bool file_is(const gmi_sys_t *sys, const char *path, const uint8_t *bytes, uint64_t size, bool *surely_out) {
  struct stat info;
  const int fd = open_to_read(sys, path);
  *surely_out = fd == -ENOENT;
  if (fd < 0) return false;
  uint8_t *now = malloc(size);
  const bool sized = now && !sys->fstat(fd, &info);
  bool same = sized && (uint64_t)info.st_size == size;
  *surely_out = sized && (!same || !read_all(sys, fd, now, size, 0));
  same = same && *surely_out && !memcmp(now, bytes, size);
  free(now);
  sys->close(fd);
  return same;
}

gemini_status_t gmi_index_write(const gmi_sys_t *sys, const char *path, const char *beside, const gmi_index_t *index,
                                bool *in_force_out) {
  *in_force_out = false;
  uint64_t size = HEADER_BYTES + (uint64_t)index->entry_count * ENTRY_BYTES + index->blob_bytes + SUM_BYTES;
  uint8_t *bytes = calloc(1, size);
  if (!bytes) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "index %s: no memory for it", path);
  memcpy(bytes, magic, sizeof magic);
  put(bytes + 8, VERSION, 4);
  put(bytes + 12, index->file_count, 4);
  put(bytes + 16, size, 8);
  put(bytes + 24, index->block_bytes, 8);
  put(bytes + 32, index->block_count, 4);
  put(bytes + 40, index->entry_count, 4);
  put(bytes + 44, index->checksums, 4);
  put(bytes + 48, index->blob_bytes, 8);
  put(bytes + 56, index->number, 8);
  put(bytes + 64, index->generations, 8);
  uint8_t *at = bytes + HEADER_BYTES;
  for (uint32_t i = 0; i < index->entry_count; i++, at += ENTRY_BYTES) {
    put(at, index->entries[i].key, 8);
    put(at + 8, index->entries[i].generation, 8);
    put(at + 16, index->entries[i].block, 4);
    put(at + 20, index->entries[i].checksum, 4);
  }
  if (index->blob_bytes) memcpy(at, index->blob, index->blob_bytes);
  put(bytes + size - SUM_BYTES, gmi_crc32c(0, bytes, size - SUM_BYTES), SUM_BYTES);

  /* The name may exist: a killed process left the file, or the name is a hard link, or what it names is no regular
   * file. It is removed and created anew with O_EXCL, so that this call writes only a file that it has created. */
  int fd;
  gmi_file_limit_t limit = gmi_file_limit_begin();
  (void)sys->unlink(beside); /* if it cannot be removed, open() with O_EXCL fails and says so */
  do fd = sys->open(beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  while (fd < 0 && errno == EINTR);
  int error = fd < 0 ? errno : 0;
  const char *what = "make";
  if (!error) what = "write", error = write_all(sys, fd, bytes, size);
  if (!error && sys->fsync(fd)) what = "sync", error = errno;
  if (fd >= 0 && sys->close(fd) && !error) what = "close", error = errno;
  if (!error) {
    bool surely = true;
    if (sys->rename(beside, path)) what = "rename", error = errno;
    if (error && file_is(sys, path, bytes, size, &surely)) error = 0;
    *in_force_out = !error || !surely;
  }
  gmi_file_limit_end(&limit);
  free(bytes);
  if (!error) return GEMINI_OK;
  if (fd >= 0) sys->unlink(beside);
  return failed(what, beside, error);
}

void gmi_index_free(gmi_index_t *index) {
  free(index->entries);
  free(index->blob);
  memset(index, 0, sizeof *index);
}
