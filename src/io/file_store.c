/* The file tier: one unlinked file per manager, cut into blocks of one window each.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Reads and writes are synchronous here; the file vanishes with the process, however it ends. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/manager.h"

typedef struct gmi_file_store {
  int fd;
  uint32_t high;       /* blocks handed out so far */
  uint32_t *free_list; /* of blocks below high */
  uint32_t free_count, free_capacity;
} gmi_file_store_t;

gemini_status_t gmi_files_open(gmi_manager_t *m) {
  if (!m->config.file_bytes) return GEMINI_OK;
  gmi_file_store_t *f = calloc(1, sizeof *f);
  if (!f) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory for the file tier");
  f->fd = open(m->file_dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (f->fd < 0) { /* not every file system has unnamed files */
    char path[4096];
    int length = snprintf(path, sizeof path, "%s/gemini.XXXXXX", m->file_dir);
    if (length > 0 && (size_t)length < sizeof path && (f->fd = mkostemp(path, O_CLOEXEC)) >= 0) unlink(path);
  }
  if (f->fd < 0) {
    int error = errno;
    free(f);
    return gmi_fail(GEMINI_ERR_IO, error, "file_dir %s: could not create a file there: %s", m->file_dir,
                    strerror(error));
  }
  m->files = f;
  return GEMINI_OK;
}

void gmi_files_close(gmi_manager_t *m) {
  gmi_file_store_t *f = m->files;
  if (!f) return;
  close(f->fd);
  free(f->free_list);
  free(f);
  m->files = NULL;
}

void gmi_files_reset(gmi_manager_t *m) {
  gmi_file_store_t *f = m->files;
  if (f) f->high = f->free_count = 0;
}

/* Blocks whose bytes are in another tier as well give way. */
void gmi_files_shrink(gmi_manager_t *m, uint64_t bytes) {
  for (uint32_t i = 0; i < GMI_ARENAS && m->file_used > bytes; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    for (uint32_t k = 0; a && a->windows && k < atomic_load(&a->window_count) && m->file_used > bytes; k++) {
      gmi_window_t *w = &a->windows[k];
      if (w->file_block == GMI_NONE || !(w->valid & ~GMI_VALID_FILE)) continue;
      gmi_file_drop(m, w);
      if (w->valid == GMI_VALID_DEVICE) atomic_fetch_or(&w->word, GMI_WINDOW_DIRTY);
    }
  }
}

static gemini_status_t block_take(gmi_manager_t *m, uint32_t *block_out) {
  gmi_file_store_t *f = m->files;
  uint64_t window = UINT64_C(1) << m->window_shift;
  if (!f) return gmi_fail(GEMINI_ERR_OOM_FILE, 0, "a chunk must go to a file, but file_bytes is 0");
  if (m->config.file_bytes < m->file_used + window && m->config.file_bytes >= window)
    gmi_files_shrink(m, m->config.file_bytes - window);
  if (m->config.file_bytes < m->file_used + window)
    return gmi_fail(
        GEMINI_ERR_OOM_FILE, 0, "a chunk of %llu bytes does not fit in files: %llu of the budget %llu are in use",
        (unsigned long long)window, (unsigned long long)m->file_used, (unsigned long long)m->config.file_bytes);
  if (f->free_count) *block_out = f->free_list[--f->free_count];
  else *block_out = f->high++;
  m->file_used += window;
  if (m->file_used > m->stats.peak_bytes[GEMINI_TIER_FILE]) m->stats.peak_bytes[GEMINI_TIER_FILE] = m->file_used;
  return GEMINI_OK;
}

void gmi_file_drop(gmi_manager_t *m, gmi_window_t *w) {
  if (w->file_block == GMI_NONE) return;
  gmi_file_store_t *f = m->files;
  if (f->free_count == f->free_capacity) {
    uint32_t capacity = f->free_capacity ? f->free_capacity * 2 : 64;
    uint32_t *list = realloc(f->free_list, capacity * sizeof *list);
    if (list) {
      f->free_list = list;
      f->free_capacity = capacity;
    }
  }
  if (f->free_count < f->free_capacity)
    f->free_list[f->free_count++] = w->file_block; /* else the block is not used again */
  w->file_block = GMI_NONE;
  w->valid &= (uint8_t)~GMI_VALID_FILE;
  m->file_used -= UINT64_C(1) << m->window_shift;
}

static gemini_status_t transfer(gmi_manager_t *m, gmi_window_t *w, bool write) {
  uint64_t window = UINT64_C(1) << m->window_shift, done = 0;
  uint8_t *host = gmi_window_host(m, w);
  while (done < window) {
    off_t offset = (off_t)(w->file_block * window + done);
    ssize_t n = write ? pwrite(m->files->fd, host + done, window - done, offset)
                      : pread(m->files->fd, host + done, window - done, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      int error = n < 0 ? errno : 0;
      return gmi_fail(write && error == ENOSPC ? GEMINI_ERR_OOM_FILE : GEMINI_ERR_IO, error,
                      "file in %s, offset %llu: could not %s chunk %u of arena %s: %s", m->file_dir,
                      (unsigned long long)offset, write ? "write" : "read", w->index, gmi_window_arena(m, w)->name,
                      n < 0 ? strerror(error) : "the file ends early");
    }
    done += (uint64_t)n;
  }
  return GEMINI_OK;
}

gemini_status_t gmi_file_write(gmi_manager_t *m, gmi_window_t *w) {
  bool had = w->file_block != GMI_NONE;
  gemini_status_t status = had ? GEMINI_OK : block_take(m, &w->file_block);
  if (status) return status;
  status = transfer(m, w, true);
  if (status && !had) gmi_file_drop(m, w);
  if (!status) w->valid |= GMI_VALID_FILE;
  return status;
}

/* The caller holds the host slot and sets VALID_HOST. */
gemini_status_t gmi_file_read(gmi_manager_t *m, gmi_window_t *w) {
  gemini_status_t status = gmi_window_settle_host(m, w);
  return status ? status : transfer(m, w, false);
}
