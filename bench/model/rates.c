/* What a machine can do. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "model/rates.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/cli.h"
#include "model/task.h"

enum { ROUNDS = 3, THREADS_MAX = 256 };

static void keep_largest(double *rate, uint64_t bytes, uint64_t since_ns) {
  double measured = 1e9 * (double)bytes / (double)(cli_now_ns() - since_ns);
  if (measured > *rate) *rate = measured;
}

/* ---- Copies ---- */

enum { COPIES = 8 };
#define COPY_BYTES (UINT64_C(256) << 20)

typedef struct copies {
  gpu_t *gpu;
  void *streams[2], *host[2], *device[2]; /* [0]: to the device, [1]: from it */
} copies_t;

static bool time_copies(const copies_t *c, bool to, bool from, double *rate) {
  for (int round = 0; round < ROUNDS; round++) {
    uint64_t begin_ns = cli_now_ns(), bytes = 0;
    for (int i = 0; i < COPIES; i++) {
      if (to && !gpu_copy(c->gpu, c->device[0], c->host[0], COPY_BYTES, c->streams[0])) return false;
      if (from && !gpu_copy(c->gpu, c->host[1], c->device[1], COPY_BYTES, c->streams[1])) return false;
      bytes += COPY_BYTES * ((uint64_t)to + (uint64_t)from);
    }
    if (!gpu_stream_synchronize(c->gpu, c->streams[0]) || !gpu_stream_synchronize(c->gpu, c->streams[1])) return false;
    keep_largest(rate, bytes, begin_ns);
  }
  return true;
}

bool rates_copies(rates_t *rates, gpu_t *gpu) {
  copies_t c = { .gpu = gpu };
  if (gpu == NULL) return true;
  bool worked = gpu_stream_create(gpu, &c.streams[0]) && gpu_stream_create(gpu, &c.streams[1]);
  for (int i = 0; worked && i < 2; i++) {
    worked = gpu_host_alloc(gpu, COPY_BYTES, &c.host[i]) && gpu_alloc(gpu, COPY_BYTES, &c.device[i]);
  }
  worked = worked && time_copies(&c, true, false, &rates->to_device) &&
           time_copies(&c, false, true, &rates->from_device) && time_copies(&c, true, true, &rates->both_ways);
  for (int i = 0; i < 2; i++) {
    gpu_host_free(gpu, c.host[i]);
    gpu_free(gpu, c.device[i]);
    if (c.streams[i] != NULL) gpu_stream_destroy(gpu, c.streams[i]);
  }
  return worked;
}

/* ---- Threads ---- */

typedef struct part {
  void (*fn)(struct part *part);
  void *memory;
  uint64_t bytes, offset;
  int fd;
  int error; /* out: errno */
} part_t;

static void *run_part(void *user) {
  part_t *part = user;
  part->fn(part);
  return NULL;
}

/* Runs all parts at once; 0, or errno of one that failed. */
static int run_parts(part_t *parts, uint32_t count) {
  pthread_t threads[THREADS_MAX];
  uint32_t started = 0;
  int error = 0;
  for (; started < count && error == 0; started += error == 0) {
    error = pthread_create(&threads[started], NULL, run_part, &parts[started]);
  }
  for (uint32_t i = 0; i < started; i++) {
    pthread_join(threads[i], NULL);
    if (error == 0) error = parts[i].error;
  }
  return error;
}

/* ---- Host memory ---- */

/* Makes the pages. Their words are numbers of ordinary size, be they taken for fp32 or bf16. */
static void touch(part_t *part) { memset(part->memory, 0x3c, part->bytes); }
static void pass(part_t *part) {
  uint64_t *words = part->memory;
  for (uint64_t i = 0; i < part->bytes / sizeof *words; i++) words[i] += 1;
}

static void update_pass(part_t *part) {
  uint64_t count = part->bytes / 14 / 64 * 64;
  char *at = part->memory;
  task_t task = { .kind = TASK_ADAMW, .count = count, .with.adamw = GEMINI_ADAMW_INIT };
  for (int i = 0; i < 3; i++, at += 4 * count) task.out[1 + i] = at;
  task.out[0] = at;
  task_run(&task);
}

bool rates_host(rates_t *rates, const char *program, uint32_t threads, uint64_t bytes) {
  part_t parts[THREADS_MAX];
  if (threads > THREADS_MAX) threads = THREADS_MAX;
  uint64_t share = bytes / threads / 4096 * 4096;
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    cli_error(program, "no memory to measure memory with: %" PRIu64 " bytes: %s", bytes, strerror(errno));
    return false;
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  for (uint32_t i = 0; i < threads; i++) {
    parts[i] = (part_t){ .fn = touch, .memory = (char *)memory + i * share, .bytes = share };
  }
  int error = run_parts(parts, threads);
  for (int round = 0; round < 2 * ROUNDS && error == 0; round++) {
    bool plain = round < ROUNDS;
    for (uint32_t i = 0; i < threads; i++) parts[i].fn = plain ? pass : update_pass;
    uint64_t begin_ns = cli_now_ns();
    error = run_parts(parts, threads);
    if (plain) keep_largest(&rates->host, 2 * share * threads, begin_ns);
    if (!plain) keep_largest(&rates->update, share / 14 / 64 * 64 * 28 * threads, begin_ns);
  }
  munmap(memory, bytes);
  if (error != 0) cli_error(program, "cannot start %" PRIu32 " threads: %s", threads, strerror(error));
  return error == 0;
}

/* ---- Files ---- */

enum { FILE_THREADS = 8, FILE_DIRS_MAX = 16, FILE_BLOCK_BYTES = 4 << 20 };

static void write_part(part_t *part) {
  for (uint64_t at = 0; at < part->bytes; at += FILE_BLOCK_BYTES) {
    ssize_t done = pwrite(part->fd, part->memory, FILE_BLOCK_BYTES, (off_t)(part->offset + at));
    if (done != FILE_BLOCK_BYTES) part->error = done < 0 ? errno : EIO;
    if (part->error != 0) return;
  }
}
static void read_part(part_t *part) {
  for (uint64_t at = 0; at < part->bytes; at += FILE_BLOCK_BYTES) {
    ssize_t done = pread(part->fd, part->memory, FILE_BLOCK_BYTES, (off_t)(part->offset + at));
    if (done != FILE_BLOCK_BYTES) part->error = done < 0 ? errno : EIO;
    if (part->error != 0) return;
  }
}

/* A file that has no name; past the page cache where the file system can. */
static int open_file(const char *dir, size_t length) {
  char path[512];
  if (snprintf(path, sizeof path, "%.*s/gemini-rates-XXXXXX", (int)length, dir) >= (int)sizeof path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  int fd = mkostemp(path, O_CLOEXEC);
  if (fd < 0) return -1;
  unlink(path);
  (void)!fcntl(fd, F_SETFL, O_DIRECT);
  return fd;
}

bool rates_files(rates_t *rates, const char *program, const char *dirs, uint64_t bytes) {
  int fds[FILE_DIRS_MAX], count = 0, error = 0;
  part_t parts[FILE_DIRS_MAX * FILE_THREADS];
  uint64_t share = bytes / FILE_THREADS / FILE_BLOCK_BYTES * FILE_BLOCK_BYTES;
  void *memory = NULL;
  for (const char *dir = dirs; *dir != 0 && count < FILE_DIRS_MAX && error == 0;) {
    size_t length = strcspn(dir, ":");
    fds[count] = open_file(dir, length);
    if (fds[count] < 0) error = errno;
    if (error == 0) count++;
    dir += length + (dir[length] == ':');
  }
  uint32_t total = (uint32_t)count * FILE_THREADS;
  if (error == 0) error = posix_memalign(&memory, 4096, (size_t)total * FILE_BLOCK_BYTES);
  if (error == 0) memset(memory, 0x5a, (size_t)total * FILE_BLOCK_BYTES);
  for (int reading = 0; reading < 2 && error == 0; reading++) {
    for (uint32_t i = 0; i < total; i++) {
      parts[i] = (part_t){ .fn = reading ? read_part : write_part,
                           .memory = (char *)memory + (size_t)i * FILE_BLOCK_BYTES,
                           .bytes = share,
                           .offset = i % FILE_THREADS * share,
                           .fd = fds[i / FILE_THREADS] };
    }
    uint64_t begin_ns = cli_now_ns();
    error = run_parts(parts, total);
    keep_largest(reading ? &rates->file_read : &rates->file_write, share * total, begin_ns);
  }
  for (int i = 0; i < count; i++) close(fds[i]);
  free(memory);
  if (error != 0) cli_error(program, "cannot measure files: %s: %s", dirs, strerror(error));
  return error == 0;
}
