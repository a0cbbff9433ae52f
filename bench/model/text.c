/* The bytes that a model is trained on, and batches of them.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "model/text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/gpt.h"

static bool fail(char *message_out, size_t message_bytes, const char *what, const char *path) {
  snprintf(message_out, message_bytes, "%s: %s, %s", what, path, strerror(errno));
  return false;
}

/* Appends all that fd has. */
static bool append(text_t *text, int fd, uint64_t size_hint) {
  uint64_t capacity = text->count + size_hint + 1; /* one more, so that the end is seen without growing */
  for (;;) {
    unsigned char *bytes = realloc(text->bytes, capacity);
    if (bytes == NULL) return false;
    text->bytes = bytes;
    while (text->count < capacity) {
      ssize_t got = read(fd, text->bytes + text->count, capacity - text->count);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return got == 0;
      text->count += (uint64_t)got;
    }
    capacity *= 2;
  }
}

static int not_hidden(const struct dirent *entry) { return entry->d_name[0] != '.'; }

/* By bytes: alphasort() follows the locale. */
static int by_name(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

typedef struct file_id {
  dev_t device;
  ino_t inode;
} file_id_t;

/* One name of a directory. False on failure; other things than regular files, and files met before, are passed. */
static bool append_entry(text_t *text, int directory, const char *name, file_id_t *seen, size_t *seen_count) {
  struct stat status;
  int fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not hold us up */
  if (fd < 0) return errno == ENOENT || errno == ELOOP;                /* a link to nothing */
  bool ok = fstat(fd, &status) == 0;
  bool take = ok && S_ISREG(status.st_mode);
  for (size_t i = 0; take && i < *seen_count; i++) {
    take = seen[i].device != status.st_dev || seen[i].inode != status.st_ino;
  }
  if (take) {
    seen[(*seen_count)++] = (file_id_t){ status.st_dev, status.st_ino };
    ok = append(text, fd, (uint64_t)status.st_size);
  }
  int native_code = errno;
  close(fd);
  errno = native_code;
  return ok;
}

static bool append_directory(text_t *text, const char *path) {
  bool ok = false;
  struct dirent **entries = NULL;
  file_id_t *seen = NULL;
  size_t seen_count = 0;
  int entry_count = 0;
  int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return false;
  entry_count = scandir(path, &entries, not_hidden, by_name);
  if (entry_count < 0) goto done;
  seen = malloc((size_t)entry_count * sizeof *seen + 1);
  if (seen == NULL) goto done;
  for (int i = 0; i < entry_count; i++) {
    if (!append_entry(text, directory, entries[i]->d_name, seen, &seen_count)) goto done;
  }
  ok = true;
done:;
  int native_code = errno;
  for (int i = 0; i < entry_count; i++) free(entries[i]);
  free(entries);
  free(seen);
  close(directory);
  errno = native_code;
  return ok;
}

bool text_load(text_t *text, const char *path, char *message_out, size_t message_bytes) {
  struct stat status;
  *text = (text_t){ NULL, 0 };
  if (stat(path, &status) != 0) return fail(message_out, message_bytes, "cannot find the text", path);
  bool ok;
  if (S_ISDIR(status.st_mode)) {
    ok = append_directory(text, path);
  } else {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ok = fd >= 0 && append(text, fd, (uint64_t)status.st_size);
    if (fd >= 0) close(fd);
  }
  if (ok) return true;
  fail(message_out, message_bytes, "cannot read the text", path);
  text_free(text);
  return false;
}

void text_free(text_t *text) {
  free(text->bytes);
  *text = (text_t){ NULL, 0 };
}

void text_batch(const text_t *text, uint64_t *random, int batch, int context, int32_t *tokens) {
  for (int b = 0; b < batch; b++) {
    uint64_t first = gpt_random(random) % (text->count - (uint64_t)context);
    for (int c = 0; c <= context; c++) *tokens++ = text->bytes[first + (uint64_t)c];
  }
}
