/* Checkpoints beside system calls that fail: the next one makes good what the last one could not.
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>

#include "tiers_world.h"

#define W WORLD_CHUNK
enum { CHUNKS = 6 };

static _Atomic int syncs_fail; /* how many fdatasync() are still to fail */
static int fault_fdatasync(int fd) {
  if (atomic_load(&syncs_fail) > 0) {
    atomic_fetch_sub(&syncs_fail, 1);
    return errno = EIO, -1;
  }
  return gmi_sys_real.fdatasync(fd);
}

/* The first write of a chunk fails at once. All others fail too, but only when the checkpoint has returned, or after a
 * while in which it could have. */
static atomic_int writes;       /* so far */
static atomic_bool ckpt_failed; /* the checkpoint has returned */
static ssize_t fault_late_pwrite(int fd, const void *buffer, size_t size, off_t offset) {
  if (size < 4096) return gmi_sys_real.pwrite(fd, buffer, size, offset);
  bool first = !atomic_fetch_add(&writes, 1);
  for (int ms = 0; !first && ms < 100 && !atomic_load(&ckpt_failed); ms++) sleep_ms(1);
  if (!first) sleep_ms(5);
  return errno = EIO, -1;
}

static char dir[64];
static gemini_arena_t arena;
static gemini_tensor_t tensors[CHUNKS];
static world_t open_kept(void) {
  gemini_config_t c = tiers_config(4, 8, 64);
  c.file_dir = dir;
  c.checkpoint_name = "run";
  fault_sys.fdatasync = fault_fdatasync;
  world_t w = world_open(c);
  arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "a", 0, 0);
  for (int i = 0; i < CHUNKS; i++) {
    char name[16];
    snprintf(name, sizeof name, "t%d", i);
    tensors[i] = world_tensor(&w, arena, name, W);
  }
  return w;
}
static void fill(world_t *w, uint64_t seed) {
  for (int i = 0; i < CHUNKS; i++)
    world_fill(w, tensors[i], 0, W, i % 2 ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST, seed + (uint64_t)i);
}
static bool holds(world_t *w, uint64_t seed) {
  bool right = true;
  for (int i = 0; i < CHUNKS; i++) right &= world_holds(w, tensors[i], 0, W, seed + (uint64_t)i);
  return right;
}
static void remove_kept(void) {
  static const char *const names[] = { "run.0.chunks", "run.index" };
  for (int i = 0; i < 2; i++) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, names[i]);
    CHECK_EQ(unlink(path), 0);
  }
  CHECK_EQ(rmdir(dir), 0);
}

/* After a failed sync nobody knows what the disk has: the blocks are written again, from wherever their bytes are, if only
 * in the file itself. */
static void test_checkpoint_after_a_sync_that_failed(void) {
  for (int where = 0; where < 3; where++) {
    for (int failures = 1; failures <= 3; failures += check_is_slow() ? 2 : 1) {
      dir_make(dir);
      world_t w = open_kept();
      fill(&w, 10);
      CHECK_OK(gemini_checkpoint(w.mgr));
      fill(&w, 20);
      atomic_store(&syncs_fail, failures);
      for (int i = 0; i < failures; i++) {
        CHECK_STATUS(gemini_checkpoint(w.mgr), GEMINI_ERR_IO);
        CHECK_SAYS(world_error().message, "checkpoint: could not sync");
        for (int k = 0; k < CHUNKS && where; k++) { /* to where the only copies are in files, or on the device */
          gemini_access_t to = world_whole(tensors[k], 0, where == 1 ? GEMINI_TIER_FILE : GEMINI_TIER_DEVICE);
          if (where == 1 || k < 4) CHECK_OK(gemini_move(w.mgr, &to, 1));
        }
      }
      CHECK_OK(gemini_checkpoint(w.mgr));
      CHECK(chunks_right(&w));
      fill(&w, 30); /* which nobody keeps */
      world_close(&w);
      w = open_kept();
      CHECK_OK(gemini_resume(w.mgr));
      CHECK(holds(&w, 20));
      world_close(&w);
      remove_kept();
    }
  }
}

/* The writes that a failed checkpoint has started are over when it returns: the next one, with files that are mended,
 * gets none of their failures. */
static void test_checkpoint_after_writes_that_failed_succeeds(void) {
  dir_make(dir);
  fault_sys.pwrite = fault_late_pwrite;
  world_t w = open_kept();
  gmi_manager_t *m = gmi_manager_get(w.mgr);
  for (int round = 0; round < 3; round++) {
    fill(&w, 10 + (uint64_t)round);
    atomic_store(&writes, 0);
    atomic_store(&ckpt_failed, false);
    fault_sys.pwrite = fault_late_pwrite;
    CHECK_STATUS(gemini_checkpoint(w.mgr), GEMINI_ERR_IO);
    atomic_store(&ckpt_failed, true);
    CHECK_SAYS(world_error().message, "chunk");
    CHECK_EQ(world_error().native_code, EIO);
    fault_sys.pwrite = fault_pwrite;
    gmi_lock(m, __func__);
    CHECK_EQ(m->io.count, 0);
    CHECK_EQ(m->io.failure, 0);
    gmi_unlock(m);
    CHECK_OK(gemini_checkpoint(w.mgr));
    CHECK(chunks_right(&w));
  }
  world_close(&w);
  w = open_kept();
  CHECK_OK(gemini_resume(w.mgr));
  CHECK(holds(&w, 12));
  world_close(&w);
  remove_kept();
}

/* A write that an earlier call started, as for room, fails during the checkpoint, or before it and nobody was told. */
static void test_checkpoint_does_not_report_writes_of_others(void) {
  for (int polled = 0; polled < 2; polled++) {
    dir_make(dir);
    world_t w = open_kept();
    fill(&w, 10);
    gmi_manager_t *m = gmi_manager_get(w.mgr);
    gmi_chunk_t *c = chunk_of(&w, arena, 0);
    break_files(true, EIO, 0, 1);
    gmi_lock(m, __func__);
    CHECK_OK(gmi_file_write(m, c, GEMINI_REASON_PRESSURE));
    if (polled) {
      CHECK_OK(gmi_chunk_settle_host(m, c));
      CHECK_EQ(m->io.failure, GEMINI_ERR_IO);
    }
    gmi_unlock(m);
    CHECK_OK(gemini_checkpoint(w.mgr));
    CHECK_EQ(faults.left[1], 0); /* it did fail */
    CHECK(chunks_right(&w) && holds(&w, 10));
    world_close(&w);
    mend_files();
    remove_kept();
  }
}

int main(void) {
  tiers_begin();
  RUN_TIMED(test_checkpoint_after_a_sync_that_failed);
  RUN_TIMED(test_checkpoint_after_writes_that_failed_succeeds);
  RUN_TIMED(test_checkpoint_does_not_report_writes_of_others);
  if (has_uring()) {
    engine = GEMINI_FILE_ENGINE_URING;
    RUN_TIMED(test_checkpoint_after_a_sync_that_failed);
    RUN_TIMED(test_checkpoint_does_not_report_writes_of_others);
  }
  return check_done();
}
