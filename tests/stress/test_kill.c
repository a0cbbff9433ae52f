/* A process that writes blocks and commits is killed at any moment, again and again. SPDX-License-Identifier: Apache-2.0
 *
 * The child has a store with checkpoints, in which it writes and commits in a loop, and one without names, on which
 * writes are always in flight. It is killed after a random time, or by itself before or after a random one of the system calls that a
 * commit is made of. Afterwards the first one opens with the commit that the child had begun last, or the one before,
 * whole: blob, keys, and every block with the bytes that belong to its key. Of the other store, no name and no space is
 * left.
 *
 * GEMINI_KILLS        how often, 30 times by default
 * GEMINI_STRESS_SEED  seed, otherwise the time */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "../seed.h"
#include "../system.h"
#include "base/status.h"
#include "io/store.h"

enum { KEPT_BLOCK = 65536, KEPT_BLOCKS = 24, LOOSE_BLOCK = 1 << 20, LOOSE_BLOCKS = 256, LOOSE_FLYING = 8 };
static const char BLOB_TEXT[] = "layout of commit ";

/* What the child says, in memory that outlives it. */
typedef struct report {
  atomic_ullong begun, ended; /* number of the commit that was begun, and returned, last */
  atomic_ullong calls;        /* of this life */
} report_t;
static report_t *report;
static int report_fd;
static uint64_t seed, die_at_call; /* 0: not by itself */
static char dirs[2][64], list[200];
static uint32_t engine_kind;

static report_t *map_report(void) {
  return mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, report_fd, 0);
}

static void fail(int line, const char *what) {
  fprintf(stderr, "%s:%d: seed %" PRIu64 ": %s: %s\n", __FILE__, line, seed, what, gmi_fail_message());
  if (*seed_rest) seed_print(seed); /* not of a child, whose program this is, too */
  _exit(1);
}
#define NEED(condition)                           \
  do {                                            \
    if (!(condition)) fail(__LINE__, #condition); \
  } while (0)

static void fill(uint8_t *bytes, uint64_t size, uint64_t key) {
  uint64_t state = key * 2 + 1;
  for (uint64_t i = 0; i < size; i += 8) {
    uint64_t word = check_random(&state);
    memcpy(bytes + i, &word, 8);
  }
}
static bool holds(const uint8_t *bytes, uint64_t size, uint64_t key) {
  uint64_t state = key * 2 + 1;
  for (uint64_t i = 0; i < size; i += 8) {
    uint64_t word = check_random(&state);
    if (memcmp(bytes + i, &word, 8)) return false;
  }
  return true;
}

/* ---- the child */
static void call(void) {
  if (atomic_fetch_add(&report->calls, 1) + 1 == die_at_call) raise(SIGKILL);
}
static int child_fdatasync(int fd) {
  call();
  int result = gmi_sys_real.fdatasync(fd);
  call();
  return result;
}
static int child_fsync(int fd) {
  call();
  int result = gmi_sys_real.fsync(fd);
  call();
  return result;
}
static int child_rename(const char *from, const char *to) {
  call();
  int result = gmi_sys_real.rename(from, to);
  call();
  return result;
}
static int child_open(const char *path, int flags, mode_t mode) {
  bool index = strstr(path, ".index.new");
  if (index) call();
  int fd = gmi_sys_real.open(path, flags, mode);
  if (index) call();
  return fd;
}
/* The index in pieces, with a death between them; the engine's writes, too, where it is made of threads. */
static ssize_t child_pwrite(int fd, const void *bytes, size_t size, off_t offset) {
  if (size >= KEPT_BLOCK) return gmi_sys_real.pwrite(fd, bytes, size, offset);
  call();
  return gmi_sys_real.pwrite(fd, bytes, size > 300 ? 300 : size, offset);
}

static gmi_store_config_t kept_config(const gmi_sys_t *sys) {
  return (gmi_store_config_t){ .directories = list,
                               .block_bytes = KEPT_BLOCK,
                               .block_count = KEPT_BLOCKS,
                               .engine_kind = engine_kind,
                               .checksum = true,
                               .keep = true,
                               .checkpoint_name = "model",
                               .sys = sys };
}

static gmi_store_t *loose;
static void again(gmi_block_request_t *r) {
  NEED(r->io.status == GEMINI_OK);
  r->write = !r->write;
  gmi_store_submit(loose, r);
}
static void commit_until_killed(void) {
  gmi_store_config_t config = { .directories = list,
                                .block_bytes = LOOSE_BLOCK,
                                .block_count = LOOSE_BLOCKS,
                                .engine_kind = engine_kind,
                                .checksum = true };
  NEED(!gmi_store_open(&config, &loose));
  static gmi_block_request_t requests[LOOSE_FLYING];
  for (int i = 0; i < LOOSE_FLYING; i++) {
    uint8_t *buffer = aligned_alloc(4096, LOOSE_BLOCK);
    NEED(buffer);
    fill(buffer, LOOSE_BLOCK, (uint64_t)i);
    requests[i] = (gmi_block_request_t){ .write = true, .buffer = buffer, .owner = "loose", .done = again };
    NEED(!gmi_store_take(loose, &requests[i].block));
    gmi_store_submit(loose, &requests[i]);
  }
}

static _Noreturn void child(uint64_t random) {
  gmi_sys_t sys = gmi_sys_real;
  sys.open = child_open;
  sys.pwrite = child_pwrite;
  sys.fdatasync = child_fdatasync;
  sys.fsync = child_fsync;
  sys.rename = child_rename;
  commit_until_killed();
  gmi_store_config_t config = kept_config(&sys);
  gmi_store_t *store;
  NEED(!gmi_store_open(&config, &store));
  uint8_t *buffer = aligned_alloc(4096, KEPT_BLOCK);
  NEED(buffer);

  gmi_kept_t mine[KEPT_BLOCKS];
  uint32_t count = 0;
  const gmi_kept_t *kept;
  const void *blob;
  uint64_t blob_bytes;
  uint64_t number = atomic_load(&report->ended);
  if (!gmi_store_committed(store, &kept, &count, &blob, &blob_bytes)) memcpy(mine, kept, count * sizeof *kept);
  for (;;) {
    number++;
    /* About half of the blocks change: their new bytes go to other blocks. */
    uint32_t wanted = 1 + (uint32_t)(check_random(&random) >> 33) % 10;
    uint32_t old[KEPT_BLOCKS], old_count = 0, mine_count = 0;
    gmi_kept_t next[KEPT_BLOCKS];
    for (uint32_t i = 0; i < count; i++) {
      if (check_random(&random) >> 63 && mine_count < wanted) next[mine_count++] = mine[i];
      else old[old_count++] = mine[i].block;
    }
    /* Now, although they are of the last commit: handed out before the next one, they would be overwritten. */
    for (uint32_t i = 0; i < old_count; i++) gmi_store_give(store, old[i]);
    while (mine_count < wanted) {
      gmi_kept_t *k = &next[mine_count++];
      *k = (gmi_kept_t){ .key = number << 16 | mine_count };
      NEED(!gmi_store_take(store, &k->block));
      fill(buffer, KEPT_BLOCK, k->key);
      gmi_block_request_t r = { .block = k->block, .write = true, .buffer = buffer, .owner = "kept" };
      NEED(!gmi_store_wait(store, &r));
    }
    char text[64];
    int length = snprintf(text, sizeof text, "%s%" PRIu64 " of %u blocks", BLOB_TEXT, number, mine_count);
    atomic_store(&report->begun, number);
    NEED(!gmi_store_commit(store, next, mine_count, text, (uint64_t)length + 1));
    atomic_store(&report->ended, number);
    memcpy(mine, next, sizeof mine);
    count = mine_count;
  }
}

/* Its arguments are what the parent says of it. */
static void child_main(char **arguments) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  report_fd = atoi(arguments[0]);
  engine_kind = (uint32_t)atoi(arguments[1]);
  seed = strtoull(arguments[2], NULL, 0);
  die_at_call = strtoull(arguments[3], NULL, 0);
  snprintf(list, sizeof list, "%s", arguments[5]);
  report = map_report();
  NEED(report != MAP_FAILED);
  child(strtoull(arguments[4], NULL, 0));
}

/* ---- the parent */
/* A program of its own, as a fork alone would take over what the parent's libraries and sanitizers know of its threads
 * and locks. */
static pid_t start_child(uint64_t random) {
  char numbers[5][24], program[512];
  ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  NEED(length > 0);
  program[length] = 0;
  snprintf(numbers[0], sizeof numbers[0], "%d", report_fd);
  snprintf(numbers[1], sizeof numbers[1], "%u", engine_kind);
  snprintf(numbers[2], sizeof numbers[2], "%" PRIu64, seed);
  snprintf(numbers[3], sizeof numbers[3], "%" PRIu64, die_at_call);
  snprintf(numbers[4], sizeof numbers[4], "%" PRIu64, random);
  char *arguments[] = { program, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], list, NULL };
  pid_t pid = fork();
  NEED(pid >= 0);
  if (!pid) {
    execv(program, arguments);
    _exit(127);
  }
  return pid;
}

static uint64_t free_bytes(void) {
  struct statvfs info;
  NEED(!statvfs(dirs[0], &info));
  return (uint64_t)info.f_bfree * info.f_frsize;
}

/* Nothing but the checkpoint files, and what a commit leaves that was cut short. */
static void check_listing(bool committed) {
  for (int d = 0; d < 2; d++) {
    DIR *dir = opendir(dirs[d]);
    NEED(dir);
    for (struct dirent *e; (e = readdir(dir));) {
      if (e->d_name[0] == '.' && (!e->d_name[1] || e->d_name[1] == '.')) continue;
      bool known = !strcmp(e->d_name, d ? "model.1.chunks" : "model.0.chunks") ||
                   (!d && (!strcmp(e->d_name, "model.index") || (!committed && !strcmp(e->d_name, "model.index.new"))));
      if (!known) fail(__LINE__, e->d_name);
    }
    closedir(dir);
  }
}

/* Opens what the child left, and says which commit it is. */
static uint64_t check_kept(void) {
  gmi_store_config_t config = kept_config(NULL);
  gmi_store_t *store;
  NEED(!gmi_store_open(&config, &store));
  check_listing(true);
  const gmi_kept_t *kept;
  uint32_t count;
  const void *blob;
  uint64_t blob_bytes, number = 0;
  gemini_status_t status = gmi_store_committed(store, &kept, &count, &blob, &blob_bytes);
  if (status) {
    NEED(status == GEMINI_ERR_NOT_FOUND);
  } else {
    const char *text = blob;
    unsigned blocks;
    NEED(blob_bytes > strlen(BLOB_TEXT) && !text[blob_bytes - 1] && !memcmp(text, BLOB_TEXT, strlen(BLOB_TEXT)));
    NEED(sscanf(text + strlen(BLOB_TEXT), "%" SCNu64 " of %u blocks", &number, &blocks) == 2 && blocks == count);
    uint8_t *buffer = aligned_alloc(4096, KEPT_BLOCK);
    NEED(buffer);
    for (uint32_t i = 0; i < count; i++) {
      gmi_block_request_t r = { .block = kept[i].block, .buffer = buffer, .owner = "kept" };
      NEED(kept[i].key >> 16 <= number);
      NEED(!gmi_store_wait(store, &r));
      NEED(holds(buffer, KEPT_BLOCK, kept[i].key));
    }
    free(buffer);
  }
  gmi_store_close(store);
  return number;
}

static void test_kill_at_any_time_leaves_a_whole_commit_and_nothing_else(void) {
  seed = seed_begin(__func__);
  uint64_t random = seed * 2 + 1;
  int kills = (int)seed_setting("GEMINI_KILLS", 30);
  fprintf(stderr, "  %d kills\n", kills);
  for (int d = 0; d < 2; d++) dir_make(dirs[d]);
  snprintf(list, sizeof list, "%s:%s", dirs[0], dirs[1]);
  report_fd = memfd_create("report", 0);
  NEED(report_fd >= 0 && !ftruncate(report_fd, sizeof *report));
  report = map_report();
  NEED(report != MAP_FAILED);

  uint64_t before = free_bytes(), last = 0, previous = 0, new_ones = 0;
  for (int k = 0; k < kills; k++) {
    engine_kind = k % 2 ? GMI_ENGINE_THREADS : GMI_ENGINE_AUTO;
    bool by_itself = k % 3 != 0;
    die_at_call = by_itself ? 1 + (check_random(&random) >> 33) % 40 : 0;
    uint64_t delay_us = (check_random(&random) >> 33) % 120000, child_random = check_random(&random);
    atomic_store(&report->begun, last);
    atomic_store(&report->ended, last);
    atomic_store(&report->calls, 0);
    pid_t pid = start_child(child_random);
    if (!by_itself) {
      nanosleep(&(struct timespec){ 0, (long)delay_us * 1000 }, NULL);
      NEED(!kill(pid, SIGKILL));
    }
    int status;
    NEED(waitpid(pid, &status, 0) == pid);
    NEED(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    check_listing(false);
    uint64_t begun = atomic_load(&report->begun), ended = atomic_load(&report->ended), found = check_kept();
    if (found != begun && found != ended) {
      fprintf(stderr, "commit %" PRIu64 " is found, %" PRIu64 " was begun last, %" PRIu64 " returned\n", found, begun,
              ended);
      fail(__LINE__, "neither the previous nor the new commit");
    }
    if (begun != ended) *(found == begun ? &new_ones : &previous) += 1;
    last = found;
  }
  fprintf(stderr, "    %" PRIu64 " commits; killed within one: %" PRIu64 " times it was there, %" PRIu64 " times not\n",
          last, new_ones, previous);
  /* Had their space stayed, it would be a quarter of a gigabyte a life; others use the disk as well. */
  uint64_t lost = (uint64_t)kills * LOOSE_BLOCKS * LOOSE_BLOCK / 2;
  for (int tries = 0; tries < 1000 && free_bytes() + lost < before; tries++)
    nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
  NEED(free_bytes() + lost >= before);

  munmap(report, sizeof *report);
  close(report_fd);
  char path[256];
  for (int d = 0; d < 2; d++) {
    snprintf(path, sizeof path, "%s/model.%d.chunks", dirs[d], d);
    unlink(path);
  }
  snprintf(path, sizeof path, "%s/model.index", dirs[0]);
  unlink(path);
  for (int d = 0; d < 2; d++) NEED(!rmdir(dirs[d]));
}

int main(int argc, char **argv) {
  if (argc == 7) child_main(argv + 1);
  RUN(test_kill_at_any_time_leaves_a_whole_commit_and_nothing_else);
  return check_done();
}
