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

static char dir[64];
static gemini_tensor_t tensors[CHUNKS];
static world_t open_kept(void) {
  gemini_config_t c = tiers_config(4, 8, 64);
  c.file_dir = dir;
  c.checkpoint_name = "run";
  fault_sys.fdatasync = fault_fdatasync;
  world_t w = world_open(c);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, "a", 0, 0);
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
    for (int failures = 1; failures <= 3; failures++) {
      dir_make(dir);
      world_t w = open_kept();
      fill(&w, 10);
      CHECK_OK(gemini_checkpoint(w.mgr));
      fill(&w, 20);
      atomic_store(&syncs_fail, failures);
      for (int i = 0; i < failures; i++) {
        CHECK_STATUS(gemini_checkpoint(w.mgr), GEMINI_ERR_IO);
        CHECK_SAYS(world_error().message, "could not sync");
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

int main(void) {
  tiers_begin();
  RUN_TIMED(test_checkpoint_after_a_sync_that_failed);
  if (has_uring()) {
    engine = GEMINI_FILE_ENGINE_URING;
    RUN_TIMED(test_checkpoint_after_a_sync_that_failed);
  }
  return check_done();
}
