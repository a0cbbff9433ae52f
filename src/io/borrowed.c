/* Borrowed blocks: their files, their pieces, and requests to read them. SPDX-License-Identifier: Apache-2.0
 *
 * A request becomes one request of the engine for each piece, in a record of its own (gmi_borrowed_read_t), so that
 * the block may be given back meanwhile. The last one that ends calls done.
 *
 * Descriptors are opened and closed between gmi_fork_hold() and gmi_fork_let(), as in blockfile.c. */
#include "io/borrowed.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/array.h"
#include "base/fork.h"
#include "base/status.h"

typedef struct {
  uint64_t at, size, offset; /* in the block; bytes; in the file */
  uint32_t file;
} piece_t;
typedef struct {
  piece_t *pieces; /* in the order of `at`, without overlap; NULL: the record is free */
  uint32_t count;
  uint32_t next; /* of a free record: the next one, or GMI_BLOCK_NONE */
} block_t;
typedef struct {
  struct stat then; /* when it was borrowed first */
  int fd;
  uint32_t engine_file;
  uint32_t pieces;   /* of blocks, that are of this file */
  atomic_uint reads; /* Atomic: requests under way. Released when one is over: then the record may be another file's */
  char name[128];
} file_t;

struct gmi_borrowed {
  const gmi_sys_t *sys;
  gmi_engine_t *engine;
  file_t **files; /* records that do not move: parts refer to them */
  block_t *blocks;
  uint32_t file_count, file_capacity, block_count, block_capacity;
  uint32_t free; /* the first free record of blocks, or GMI_BLOCK_NONE */
};

/* A request under way, and its parts. The last part that ends frees it. */
typedef struct {
  gmi_request_t io; /* first, so that the engine's request leads to this record */
  gmi_borrowed_read_t *of;
  file_t *file;
} part_t;
struct gmi_borrowed_read {
  gmi_block_request_t *request;
  /* Atomic: parts that are not over. Its decrements synchronise, so that the thread that ends the last part sees what
   * the others have written. */
  atomic_uint left;
  atomic_uint failed;      /* Atomic: number of a part that failed, from 1 on; 0: none. Ordered by `left` */
  gemini_status_t refusal; /* OK, or why nothing is read: the message is the request's */
  int refusal_code;        /* the native one of the refusal */
  uint32_t count;          /* of parts that are submitted */
  part_t parts[];
};

gemini_status_t gmi_borrowed_open(uint32_t engine_kind, const gmi_sys_t *sys, gmi_borrowed_t **out) {
  gmi_borrowed_t *b = calloc(1, sizeof *b);
  if (!b) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the table of borrowed files");
  b->sys = sys ? sys : &gmi_sys_real;
  b->free = GMI_BLOCK_NONE;
  gemini_status_t status = gmi_engine_open(&(gmi_engine_config_t){ .kind = engine_kind, .sys = sys }, &b->engine);
  if (status) free(b);
  else *out = b;
  return status;
}

static void close_file(const gmi_borrowed_t *b, int fd) {
  gmi_fork_hold();
  gmi_fork_close_not(fd);
  b->sys->close(fd);
  gmi_fork_let();
}

void gmi_borrowed_close(gmi_borrowed_t *b) {
  if (!b) return;
  gmi_engine_close(b->engine);
  for (uint32_t i = 0; i < b->file_count; i++) {
    close_file(b, b->files[i]->fd);
    free(b->files[i]);
  }
  for (uint32_t i = 0; i < b->block_count; i++) free(b->blocks[i].pieces);
  free(b->files);
  free(b->blocks);
  free(b);
}

/* ---- files */
static bool is_same(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}
static bool is_unchanged(const struct stat *a, const struct stat *b) {
  return a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Opens the file anew, in a record that has none (fd < 0) or one that nobody uses: the caller may close its descriptor,
 * and may have opened it with O_DIRECT. */
static gemini_status_t open_file(gmi_borrowed_t *b, int fd, const struct stat *now, file_t *file) {
  char link[64], name[sizeof file->name];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, name, sizeof name - 1);
  name[length > 0 ? length : 0] = 0;
  gmi_fork_hold();
  int opened;
  do opened = b->sys->open(link, O_RDONLY | O_CLOEXEC, 0);
  while (opened < 0 && errno == EINTR);
  int error = errno;
  gmi_fork_close(opened);
  gmi_fork_let();
  if (opened < 0) return gmi_fail(GEMINI_ERR_IO, error, "%s cannot be opened for reading: %s", name, strerror(error));
  gemini_status_t status = GEMINI_OK;
  if (file->fd < 0) status = gmi_engine_file_add(b->engine, opened, false, &file->engine_file);
  else gmi_engine_file_change(b->engine, file->engine_file, opened);
  if (status) {
    close_file(b, opened);
    return status;
  }
  if (file->fd >= 0) close_file(b, file->fd);
  file->fd = opened;
  file->then = *now;
  memcpy(file->name, name, sizeof name);
  return GEMINI_OK;
}

bool gmi_borrowed_from(const gmi_borrowed_t *b, int fd) {
  struct stat now;
  bool is = false;
  if (b->sys->fstat(fd, &now)) return false;
  for (uint32_t i = 0; i < b->file_count; i++) is |= b->files[i]->pieces && is_same(&b->files[i]->then, &now);
  return is;
}

/* A file of which no block has a range and no request reads, or NULL. */
static file_t *idle_file(const gmi_borrowed_t *b, uint32_t *index_out) {
  for (uint32_t i = 0; i < b->file_count; i++) {
    *index_out = i;
    if (!b->files[i]->pieces && !atomic_load_explicit(&b->files[i]->reads, memory_order_acquire)) return b->files[i];
  }
  return NULL;
}

gemini_status_t gmi_borrowed_file(gmi_borrowed_t *b, int fd, uint64_t end, uint32_t *file_out) {
  struct stat now;
  if (b->sys->fstat(fd, &now)) {
    int error = errno;
    return error == EBADF
               ? gmi_fail(GEMINI_ERR_INVALID, error, "fd is %d, must be an open file descriptor", fd)
               : gmi_fail(GEMINI_ERR_IO, error, "file descriptor %d cannot be looked at: %s", fd, strerror(error));
  }
  if (!S_ISREG(now.st_mode)) return gmi_fail(GEMINI_ERR_INVALID, 0, "fd %d is not of a regular file", fd);
  if ((uint64_t)now.st_size < end)
    return gmi_fail(GEMINI_ERR_FORMAT, 0, "file descriptor %d ends at offset %llu, the range needs %llu bytes", fd,
                    (unsigned long long)now.st_size, (unsigned long long)end);
  uint32_t i = b->file_count;
  while (i-- > 0) {
    if (!is_same(&b->files[i]->then, &now)) continue;
    *file_out = i;
    if (!is_unchanged(&b->files[i]->then, &now) && b->files[i]->pieces)
      return gmi_fail(GEMINI_ERR_FORMAT, 0, "%s was changed since a range of it was borrowed", b->files[i]->name);
    b->files[i]->then = now;
    return GEMINI_OK;
  }
  file_t *idle = idle_file(b, file_out);
  if (idle) return open_file(b, fd, &now, idle);
  if (b->file_count == GMI_ENGINE_FILES_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "ranges of %d files are borrowed, the limit is %d", GMI_ENGINE_FILES_LIMIT,
                    GMI_ENGINE_FILES_LIMIT);
  file_t **files = gmi_array_room(b->files, b->file_count, &b->file_capacity, sizeof *files);
  if (files) b->files = files;
  file_t *file = files ? calloc(1, sizeof *file) : NULL;
  if (!file) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the table of borrowed files");
  file->fd = -1;
  gemini_status_t status = open_file(b, fd, &now, file);
  if (status) {
    free(file);
    return status;
  }
  *file_out = b->file_count;
  files[b->file_count++] = file;
  return GEMINI_OK;
}

/* ---- blocks */
static block_t *block_of(const gmi_borrowed_t *b, uint32_t block) { return &b->blocks[block & ~GMI_BLOCK_BORROWED]; }

gemini_status_t gmi_borrowed_take(gmi_borrowed_t *b, uint32_t from, uint32_t file, uint64_t offset, uint64_t at,
                                  uint64_t size, uint32_t *block_out) {
  const gemini_status_t none = GEMINI_ERR_OOM_SYSTEM;
  const uint32_t before = from == GMI_BLOCK_NONE ? 0 : block_of(b, from)->count;
  if (b->free == GMI_BLOCK_NONE) {
    block_t *blocks = gmi_array_room(b->blocks, b->block_count, &b->block_capacity, sizeof *blocks);
    if (!blocks || b->block_count >= GMI_BLOCK_BORROWED - 1)
      return gmi_fail(none, ENOMEM, "no memory for the table of borrowed blocks");
    b->blocks = blocks;
    blocks[b->block_count] = (block_t){ .next = GMI_BLOCK_NONE };
    b->free = b->block_count++;
  }
  piece_t *pieces = calloc((size_t)before + 2, sizeof *pieces); /* the new one may cut an old one in two */
  if (!pieces) return gmi_fail(none, ENOMEM, "no memory for a borrowed block");
  const piece_t added = { at, size, offset, file };
  uint32_t count = 0;
  bool done = false;
  for (uint32_t i = 0; i < before; i++) {
    const piece_t old = block_of(b, from)->pieces[i];
    const uint64_t end = old.at + old.size;
    if (old.at < at) {
      pieces[count] = old;
      if (end > at) pieces[count].size = at - old.at;
      count++;
    }
    if (!done && end > at) pieces[count++] = added, done = true;
    if (end <= at + size) continue;
    const uint64_t cut = old.at < at + size ? at + size - old.at : 0;
    pieces[count++] = (piece_t){ old.at + cut, old.size - cut, old.offset + cut, old.file };
  }
  if (!done) pieces[count++] = added;
  block_t *block = &b->blocks[b->free];
  *block_out = b->free | GMI_BLOCK_BORROWED;
  b->free = block->next;
  *block = (block_t){ .pieces = pieces, .count = count };
  for (uint32_t i = 0; i < count; i++) b->files[pieces[i].file]->pieces++;
  return GEMINI_OK;
}

void gmi_borrowed_give(gmi_borrowed_t *b, uint32_t block) {
  block_t *record = block_of(b, block);
  for (uint32_t i = 0; i < record->count; i++) b->files[record->pieces[i].file]->pieces--;
  free(record->pieces);
  *record = (block_t){ .next = b->free };
  b->free = block & ~GMI_BLOCK_BORROWED;
}

/* ---- requests */
static void part_done(gmi_request_t *io) {
  part_t *part = (part_t *)io; /* its first member */
  gmi_borrowed_read_t *r = part->of;
  gmi_block_request_t *request = r->request;
  if (io->status) atomic_store(&r->failed, (uint32_t)(part - r->parts) + 1);
  if (atomic_fetch_sub(&r->left, 1) > 1) return; /* the last one lets all files go: messages name them */
  const uint32_t failed = atomic_load(&r->failed);
  request->io.status = r->refusal;
  request->io.native_code = r->refusal_code;
  if (failed && !r->refusal) {
    part = &r->parts[failed - 1];
    request->io.status = part->io.status;
    request->io.native_code = part->io.native_code;
    snprintf(request->message, sizeof request->message,
             "%.112s: could not read %llu bytes at offset %llu of %.128s: %.80s",
             request->owner ? request->owner : "borrowed files", (unsigned long long)part->io.size_bytes,
             (unsigned long long)part->io.offset_bytes, part->file->name,
             part->io.native_code && !*part->io.detail ? strerror(part->io.native_code) : part->io.detail);
  }
  for (uint32_t i = 0; i < r->count; i++) atomic_fetch_sub_explicit(&r->parts[i].file->reads, 1, memory_order_release);
  free(r);
  request->done(request);
}

/* Refuses to read files that are not what they were. The answer may be outdated at once: this finds files that were
 * replaced or written to, not writes beside the read. */
static gemini_status_t check_files(const gmi_borrowed_t *b, const block_t *block, gmi_block_request_t *request,
                                   int *native_code_out) {
  const char *owner = request->owner ? request->owner : "borrowed files";
  for (uint32_t i = 0; i < block->count; i++) {
    const file_t *file = b->files[block->pieces[i].file];
    struct stat now;
    if (i && block->pieces[i].file == block->pieces[i - 1].file) continue;
    if (b->sys->fstat(file->fd, &now)) {
      *native_code_out = errno;
      snprintf(request->message, sizeof request->message, "%.112s: %.128s cannot be looked at: %.80s", owner,
               file->name, strerror(*native_code_out));
      return GEMINI_ERR_IO;
    }
    if (is_unchanged(&file->then, &now)) continue;
    snprintf(request->message, sizeof request->message,
             "%.112s: %.128s was changed since a range of it was borrowed, so its bytes are not what they were", owner,
             file->name);
    return GEMINI_ERR_FORMAT;
  }
  return GEMINI_OK;
}

gemini_status_t gmi_borrowed_read_new(const gmi_borrowed_t *b, uint32_t block, gmi_borrowed_read_t **out) {
  const gmi_borrowed_read_t *r = NULL;
  *out = calloc(1, sizeof *r + block_of(b, block)->count * sizeof *r->parts);
  return *out ? GEMINI_OK : gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to read a borrowed block");
}

void gmi_borrowed_submit(gmi_borrowed_t *b, gmi_borrowed_read_t *r, gmi_block_request_t *request) {
  const block_t *block = block_of(b, request->block);
  uint8_t *buffer = request->buffer;
  request->message[0] = 0;
  r->request = request;
  r->refusal = check_files(b, block, request, &r->refusal_code);
  /* The engine refuses size 0 and calls done on its own thread: a refused request ends like any other, and never within
   * the caller's submit. */
  const uint32_t count = r->refusal ? 1 : block->count;
  atomic_init(&r->left, count);
  r->count = count;
  uint64_t at = 0;
  for (uint32_t i = 0; i < count; i++) {
    const piece_t *piece = &block->pieces[i];
    part_t *part = &r->parts[i];
    if (!r->refusal) memset(buffer + at, 0, piece->at - at);
    at = piece->at + piece->size;
    part->of = r;
    part->file = b->files[piece->file];
    atomic_fetch_add_explicit(&part->file->reads, 1, memory_order_relaxed);
    part->io = (gmi_request_t){ .buffer = buffer + piece->at,
                                .size_bytes = r->refusal ? 0 : piece->size,
                                .offset_bytes = piece->offset,
                                .file = part->file->engine_file,
                                .urgent = request->urgent,
                                .done = part_done };
  }
  if (!r->refusal) memset(buffer + at, 0, request->size_bytes - at);
  /* The last part that ends frees r, and may do so before the loop goes on: nothing is read from r after it. */
  for (uint32_t i = 0; i < count; i++) gmi_engine_submit(b->engine, (gmi_request_t *[]){ &r->parts[i].io }, 1);
}
