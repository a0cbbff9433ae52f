/* Checkpoints, and resuming from them. Only gemini.h. SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "../seed.h"
#include "world.h"

enum { W = 65536, TENSORS = 6, SIZE = 2 * W + 512 };
static const uint32_t HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE, FILES = GEMINI_TIER_FILE;
static char dir[64];

typedef struct {
  world_t w;
  gemini_arena_t params, grads, master;
  gemini_tensor_t p[TENSORS], g[TENSORS], m[TENSORS];
} model_t;

static int clear_dir(void) { /* files that were in it */
  DIR *d = opendir(dir);
  int files = 0;
  CHECK(d);
  for (struct dirent *e; (e = readdir(d));) {
    char path[400];
    if (*e->d_name == '.') continue;
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    CHECK_EQ(unlink(path), 0);
    files++;
  }
  closedir(d);
  CHECK_EQ(rmdir(dir), 0);
  return files;
}

static gemini_config_t checkpoint_config(void) {
  gemini_config_t c = world_config(6, 12, 120);
  c.file_dir = dir;
  c.checkpoint_name = "run";
  return c;
}
static model_t model_open_sized(gemini_config_t c, uint64_t size) {
  model_t k = { .w = world_open(c) };
  k.params = world_arena(&k.w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  k.grads = world_arena(&k.w, GEMINI_KIND_GRAD, 2, "grads", 0, k.params);
  k.master = world_arena(&k.w, GEMINI_KIND_MASTER, 4, "master", k.params, 0);
  for (int i = 0; i < TENSORS; i++) {
    char name[16];
    snprintf(name, sizeof name, "p %d", i);
    k.p[i] = world_tensor(&k.w, k.params, name, size);
    CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.p[i], k.grads, &k.g[i]));
    CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.p[i], k.master, &k.m[i]));
  }
  return k;
}
static model_t model_open(void) { return model_open_sized(checkpoint_config(), SIZE); }

/* Tensor 0 stays zero, tensor 1 is a gradient. */
static void model_fill(model_t *k, uint64_t seed) {
  for (int i = 1; i < TENSORS; i++) {
    world_fill(&k->w, i == 1 ? k->g[i] : k->p[i], 0, SIZE, i % 2 ? DEVICE : HOST, seed + (uint64_t)i);
    world_fill(&k->w, k->m[i], 0, 2 * SIZE, i % 3 ? HOST : DEVICE, seed + 100 + (uint64_t)i);
  }
}
static bool model_holds(model_t *k, uint64_t seed) {
  bool right = world_holds(&k->w, k->p[0], 0, SIZE, 0) && world_holds(&k->w, k->m[0], 0, 2 * SIZE, 0);
  for (int i = 1; i < TENSORS && right; i++)
    right = world_holds(&k->w, i == 1 ? k->g[i] : k->p[i], 0, SIZE, seed + (uint64_t)i) &&
            world_holds(&k->w, k->m[i], 0, 2 * SIZE, seed + 100 + (uint64_t)i);
  return right;
}

/* Leaves a directory with the checkpoint of a model that was filled with seed 10, and is closed. */
static void checkpoint_made(void) {
  dir_make(dir);
  model_t k = model_open();
  model_fill(&k, 10);
  CHECK_OK(gemini_checkpoint(k.w.mgr));
  world_close(&k.w);
}

static void test_what_was_checkpointed_comes_back(void) {
  dir_make(dir);
  model_t k = model_open();
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_NOT_FOUND);
  CHECK_SAYS(world_error().message, "there is no checkpoint yet");
  model_fill(&k, 10);
  CHECK_OK(gemini_tensor_state_set(k.w.mgr, k.p[2], GEMINI_STATE_READY_FOR_REDUCE));
  CHECK_OK(gemini_checkpoint(k.w.mgr));
  CHECK(model_holds(&k, 10)); /* it goes on as it was */
  model_fill(&k, 50);
  CHECK(model_holds(&k, 50));
  CHECK_OK(gemini_stream_synchronize(k.w.mgr, k.w.stream));
  world_close(&k.w); /* what came after the checkpoint is gone */
  for (int round = 0; round < 2; round++) {
    k = model_open();
    CHECK_OK(gemini_resume(k.w.mgr));
    CHECK_EQ(world_stats(&k.w).used_bytes[HOST], 0); /* nothing is read before it is used */
    CHECK_EQ(world_tensor_info(&k.w, k.p[2]).state, GEMINI_STATE_READY_FOR_REDUCE);
    CHECK_EQ(world_tensor_info(&k.w, k.p[3]).state, GEMINI_STATE_HOLD);
    CHECK_EQ(world_tensor_info(&k.w, k.p[0]).state, GEMINI_STATE_FREE);
    gemini_access_t wrong = world_whole(k.p[1], GEMINI_READ, HOST);
    CHECK_STATUS(gemini_acquire(k.w.mgr, &wrong, 1, GEMINI_STREAM_CALLER),
                 GEMINI_ERR_STATE); /* its gradient is there */
    CHECK(model_holds(&k, 10));
    CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_STATE);
    world_close(&k.w);
  }
  CHECK_EQ(clear_dir(), 2); /* one file of chunks, one index */
}

static void test_unchanged_chunks_are_not_written_again(void) {
  dir_make(dir);
  model_t k = model_open();
  model_fill(&k, 10);
  CHECK_OK(gemini_checkpoint(k.w.mgr));
  uint64_t used = world_stats(&k.w).used_bytes[GEMINI_TIER_FILE];
  CHECK_OK(gemini_stats_reset(k.w.mgr));
  CHECK_OK(gemini_checkpoint(k.w.mgr));
  figures_t s = world_stats(&k.w);
  for (int r = 0; r < GEMINI_REASON_COUNT; r++) CHECK_EQ(s.moved_bytes[LINK_H2F][r], 0);
  world_fill(&k.w, k.m[5], 0, 64, HOST, 9); /* one chunk, or two when it lies on a boundary */
  CHECK_OK(gemini_checkpoint(k.w.mgr));
  s = world_stats(&k.w);
  uint64_t written = 0;
  for (int r = 0; r < GEMINI_REASON_COUNT; r++) written += s.moved_bytes[LINK_H2F][r];
  CHECK(written >= W && written <= 2 * W);
  CHECK_EQ(s.used_bytes[GEMINI_TIER_FILE], used);
  world_close(&k.w);
  clear_dir();
}

static void test_checkpoints_one_after_another_need_room_for_two(void) {
  dir_make(dir);
  model_t k = model_open();
  for (uint64_t round = 0; round < 6; round++) {
    model_fill(&k, 10 * round);
    CHECK_OK(gemini_checkpoint(k.w.mgr));
  }
  world_close(&k.w);
  k = model_open(); /* which does not take it up: it goes with the next checkpoint */
  for (uint64_t round = 0; round < 3; round++) {
    model_fill(&k, 700 + 10 * round);
    CHECK_OK(gemini_checkpoint(k.w.mgr));
  }
  world_close(&k.w);
  k = model_open();
  CHECK_OK(gemini_resume(k.w.mgr));
  CHECK(model_holds(&k, 720));
  world_close(&k.w);
  clear_dir();
}

/* Arenas that their caller gave no name have names of their own all the same. */
static void test_arenas_without_a_name_keep_their_bytes_apart(void) {
  dir_make(dir);
  for (int round = 0; round < 2; round++) {
    world_t w = world_open(checkpoint_config());
    gemini_arena_t arenas[3];
    for (int i = 0; i < 3; i++) {
      uint64_t offset;
      arenas[i] = world_arena(&w, GEMINI_KIND_PARAM, 2, NULL, 0, 0);
      CHECK_OK(gemini_arena_take(w.mgr, arenas[i], 2 * W, &offset));
    }
    if (round) CHECK_OK(gemini_resume(w.mgr));
    for (int i = 0; i < 3 && !round; i++) world_fill(&w, arenas[i], 0, 2 * W, HOST, 60 + (uint64_t)i);
    for (int i = 0; i < 3; i++) CHECK(world_holds(&w, arenas[i], 0, 2 * W, 60 + (uint64_t)i));
    if (!round) CHECK_OK(gemini_checkpoint(w.mgr));
    world_close(&w);
  }
  clear_dir();
}

/* Files of the kept name that are somebody else's, or not only this run's, are not touched. */
static void test_kept_files_of_others_are_refused(void) {
  for (int which = 0; which < 2; which++) {
    dir_make(dir);
    model_t k = model_open();
    model_fill(&k, 10);
    CHECK_OK(gemini_checkpoint(k.w.mgr));
    world_close(&k.w);
    char path[300], other[300];
    snprintf(path, sizeof path, "%s/%s", dir, which ? "run.index" : "run.0.chunks");
    snprintf(other, sizeof other, "%s/other", dir);
    gemini_config_t c = checkpoint_config();
    gemini_manager_t mgr;
    CHECK_EQ(link(path, other), 0); /* the same file by another name */
    CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_FORMAT);
    CHECK_SAYS(world_error().message, "2 names");
    CHECK_EQ(unlink(other), 0);
    CHECK_EQ(rename(path, other), 0);
    CHECK_EQ(symlink(other, path), 0);
    gemini_status_t status = gemini_manager_open(&c, &mgr);
    CHECK(status == GEMINI_ERR_IO || status == GEMINI_ERR_FORMAT);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_FORMAT);
    CHECK_EQ(unlink(path), 0);
    CHECK_EQ(rename(other, path), 0);
    if (!geteuid()) { /* only root can give a file away */
      CHECK_EQ(chown(path, 12345, (gid_t)-1), 0);
      CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_FORMAT);
      CHECK_SAYS(world_error().message, "user 12345");
      CHECK_EQ(chown(path, 0, (gid_t)-1), 0);
    }
    k = model_open();
    CHECK_OK(gemini_resume(k.w.mgr)); /* none of this harmed it */
    CHECK(model_holds(&k, 10));
    world_close(&k.w);
    clear_dir();
  }
}

/* Whatever has the name under which a new index is written: it is not written to, and nothing waits for it. */
static void test_what_lies_where_the_index_is_written_is_left_alone(void) {
  enum { HARD_LINK, SYMBOLIC_LINK, FIFO, DIRECTORY, KINDS };
  for (int kind = 0; kind < KINDS; kind++) {
    dir_make(dir);
    char path[300], other[300], bytes[20];
    snprintf(path, sizeof path, "%s/run.index.new", dir);
    snprintf(other, sizeof other, "%s/other", dir);
    model_t k = model_open();
    model_fill(&k, 10);
    int fd = open(other, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, "another's", 9), 9);
    CHECK_EQ(kind == HARD_LINK       ? link(other, path)
             : kind == SYMBOLIC_LINK ? symlink(other, path)
             : kind == FIFO          ? mkfifo(path, 0600)
                                     : mkdir(path, 0700),
             0);
    if (kind == DIRECTORY) {
      CHECK_STATUS(gemini_checkpoint(k.w.mgr), GEMINI_ERR_IO);
      CHECK_SAYS(world_error().message, path);
      CHECK_EQ(world_error().native_code, EEXIST);
      CHECK_EQ(rmdir(path), 0);
    }
    alarm(300); /* one that waits for a reader of the FIFO would do so for ever */
    CHECK_OK(gemini_checkpoint(k.w.mgr));
    alarm(0);
    CHECK_EQ(pread(fd, bytes, sizeof bytes, 0), 9);
    CHECK(!memcmp(bytes, "another's", 9));
    CHECK_EQ(close(fd), 0);
    world_close(&k.w);
    k = model_open();
    CHECK_OK(gemini_resume(k.w.mgr));
    CHECK(model_holds(&k, 10));
    world_close(&k.w);
    clear_dir();
  }
}

static void test_other_arenas_and_tensors_are_refused(void) {
  checkpoint_made();
  model_t k = model_open_sized(checkpoint_config(), SIZE - 512);
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_FORMAT);
  CHECK(strstr(world_error().message, "arena params"));
  world_close(&k.w);
  k = model_open();
  world_arena(&k.w, GEMINI_KIND_OTHER, 1, "more", 0, 0);
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_FORMAT);
  CHECK_SAYS(world_error().message, "arena more of this manager");
  world_close(&k.w);
  k = model_open();
  gemini_tensor_t tied;
  CHECK_OK(gemini_tensor_register(k.w.mgr, k.params, "one more", 512, 0, &tied));
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_FORMAT);
  CHECK(strstr(world_error().message, "6 tensors") && strstr(world_error().message, "7"));
  world_close(&k.w);
  k = model_open();
  world_fill(&k.w, k.p[3], 0, 64, HOST, 1);
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_STATE);
  CHECK(strstr(world_error().message, "params"));
  world_close(&k.w);
  gemini_config_t c = checkpoint_config();
  c.chunk_bytes = 2 * W;
  gemini_manager_t mgr;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_FORMAT); /* blocks of another size */
  k = model_open();
  CHECK_OK(gemini_resume(k.w.mgr)); /* none of this harmed it */
  CHECK(model_holds(&k, 10));
  world_close(&k.w);
  clear_dir();
}

static void test_a_checkpoint_larger_than_the_file_budget_is_refused(void) {
  checkpoint_made();
  gemini_config_t small = checkpoint_config();
  small.file_bytes = 10 * W;
  model_t k = model_open_sized(small, SIZE);
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_OOM_FILE);
  CHECK_SAYS(world_error().message, "the file budget is 655360");
  CHECK_EQ(world_stats(&k.w).used_bytes[FILES], 0);
  CHECK_OK(gemini_budget_set(k.w.mgr, FILES, 120 * W)); /* nothing has changed, and with more room it goes */
  CHECK_OK(gemini_resume(k.w.mgr));
  CHECK(model_holds(&k, 10));
  world_close(&k.w);
  clear_dir();
}

/* Chunks that were only read may still be on the device and on the host, as zeros: a checkpoint is taken up in their
 * place. */
static void test_what_was_read_before_is_taken_up(void) {
  checkpoint_made();
  model_t k = model_open();
  CHECK(world_holds_on(&k.w, k.p[3], 0, SIZE, DEVICE, 0));
  CHECK(world_holds_on(&k.w, k.m[4], 0, 2 * SIZE, HOST, 0));
  CHECK(world_stats(&k.w).used_bytes[DEVICE] > 0 && world_stats(&k.w).used_bytes[HOST] > 0);
  CHECK_OK(gemini_resume(k.w.mgr));
  CHECK_EQ(world_stats(&k.w).used_bytes[HOST], 0);
  CHECK_EQ(world_tier_bytes(&k.w, k.p[3], DEVICE), 0);
  CHECK(model_holds(&k, 10));
  world_close(&k.w);
  clear_dir();
}

static void test_a_pinned_chunk_stays_on_the_device(void) {
  checkpoint_made();
  model_t k = model_open();
  gemini_access_t pin = world_part(k.m[4], 0, 4, 0, DEVICE);
  CHECK_OK(gemini_pin(k.w.mgr, &pin));
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "arena master is pinned");
  CHECK(world_tier_bytes(&k.w, k.m[4], DEVICE) > 0);
  CHECK_OK(gemini_unpin(k.w.mgr, &pin));
  CHECK_OK(gemini_resume(k.w.mgr)); /* it has changed nothing */
  CHECK(model_holds(&k, 10));
  world_close(&k.w);
  clear_dir();
}

static void add_one(void *user, const gemini_update_span_t *span) {
  (void)user;
  for (uint64_t i = 0; i < span->element_count; i++) ((uint32_t *)span->ptr[0])[i]++;
}
/* The update was given zeros, and would add to the checkpoint's bytes. */
static void test_an_update_that_waits_keeps_a_resume_away(void) {
  checkpoint_made();
  model_t k = model_open();
  void *block;
  CHECK_OK(gemini_host_alloc(k.w.mgr, 12 * W, 0, &block)); /* leaves the update no room */
  gemini_update_t u = GEMINI_UPDATE_INIT;
  const uint32_t modes[] = { GEMINI_READ_WRITE };
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = &k.master;
  u.modes = modes;
  u.arena_count = 1;
  u.fn = add_one;
  CHECK_OK(gemini_update(k.w.mgr, &u));
  CHECK(world_stats(&k.w).pending_updates > 0);
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "arena master is waiting for an update");
  CHECK_OK(gemini_host_free(k.w.mgr, block));
  CHECK_OK(gemini_update_wait(k.w.mgr));
  gemini_access_t last = world_part(k.m[5], 0, 4, GEMINI_READ, HOST);
  CHECK_OK(gemini_acquire(k.w.mgr, &last, 1, GEMINI_STREAM_CALLER));
  CHECK_EQ(*(const uint32_t *)last.ptr, 1);
  CHECK_OK(gemini_release(k.w.mgr, &last, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "arena master is written");
  world_close(&k.w);
  clear_dir();
}

static void test_calls_out_of_order_are_refused(void) {
  dir_make(dir);
  gemini_config_t c = checkpoint_config();
  c.checkpoint_name = NULL;
  model_t k = model_open_sized(c, SIZE);
  CHECK_STATUS(gemini_checkpoint(k.w.mgr), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_resume(k.w.mgr), GEMINI_ERR_STATE);
  world_close(&k.w);
  gemini_manager_t mgr;
  c = checkpoint_config();
  c.chunk_bytes = 0;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  c = checkpoint_config();
  c.checkpoint_name = "";
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  c.checkpoint_name = "a/b";
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_INVALID);
  k = model_open();
  gemini_access_t held = world_whole(k.m[2], GEMINI_READ_WRITE, HOST);
  CHECK_OK(gemini_acquire(k.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_checkpoint(k.w.mgr), GEMINI_ERR_BUSY);
  CHECK_OK(gemini_release(k.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  held.mode = GEMINI_READ, held.tier = DEVICE;
  CHECK_OK(gemini_acquire(k.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_checkpoint(k.w.mgr)); /* readers do no harm */
  CHECK_OK(gemini_release(k.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_checkpoint(k.w.mgr));
  world_close(&k.w);
  clear_dir();
}

/* Rounds of a process that writes and checkpoints until it is killed, with both engines of the file tier. */
static void kill_in_rounds(const char *dirs, int rounds, uint64_t random) {
  uint64_t reported = 0;
  for (int round = 0; round < rounds; round++) {
    gemini_config_t config = checkpoint_config();
    config.file_dir = dirs;
    config.file_engine = round % 2 ? GEMINI_FILE_ENGINE_THREADS : GEMINI_FILE_ENGINE_AUTO;
    int told[2];
    CHECK_EQ(pipe(told), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
      close(told[0]);
      model_t k = model_open_sized(config, SIZE);
      uint64_t seed = reported;
      if (reported) CHECK_OK(gemini_resume(k.w.mgr));
      for (;;) {
        seed += 1000;
        model_fill(&k, seed);
        CHECK_OK(gemini_checkpoint(k.w.mgr));
        CHECK_EQ(write(told[1], &seed, sizeof seed), sizeof seed);
      }
    }
    close(told[1]);
    uint64_t seed;
    if (!round) { /* there is one */
      CHECK_EQ(read(told[0], &seed, sizeof seed), sizeof seed);
      reported = seed;
    }
    usleep((useconds_t)(check_random(&random) % 60000));
    CHECK_EQ(kill(child, SIGKILL), 0);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    while (read(told[0], &seed, sizeof seed) == sizeof seed) reported = seed;
    close(told[0]);
    model_t k = model_open_sized(config, SIZE);
    CHECK_OK(gemini_resume(k.w.mgr));
    gemini_access_t a = world_part(k.m[5], 0, 1, GEMINI_READ, HOST);
    CHECK_OK(gemini_acquire(k.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    uint8_t first = *(const uint8_t *)a.ptr;
    CHECK_OK(gemini_release(k.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    if (first != world_byte(reported + 105, 0)) reported += 1000;
    CHECK(model_holds(&k, reported));
    world_close(&k.w);
  }
}
/* Killed at any moment, in the middle of write-backs and checkpoints: the last checkpoint that was reported, or the one
 * that was being made, is there, whole. In one directory and in two. GEMINI_KILLS: how often, 12 times by default. */
static void test_a_kill_leaves_a_whole_checkpoint(void) {
  int rounds = (int)seed_setting("GEMINI_KILLS", 12) / 2;
  uint64_t random = seed_begin(__func__);
  fprintf(stderr, "  %d kills\n", 2 * rounds);
  dir_make(dir);
  kill_in_rounds(dir, rounds, random);
  char first[sizeof dir], both[2 * sizeof dir];
  CHECK(clear_dir() > 1);
  dir_make(dir);
  memcpy(first, dir, sizeof dir);
  dir_make(dir);
  snprintf(both, sizeof both, "%s:%s", first, dir);
  kill_in_rounds(both, rounds, random + 1);
  CHECK(clear_dir() > 0); /* both were used */
  memcpy(dir, first, sizeof dir);
  CHECK(clear_dir() > 0);
}

int main(void) {
  RUN(test_what_was_checkpointed_comes_back);
  RUN(test_unchanged_chunks_are_not_written_again);
  RUN(test_checkpoints_one_after_another_need_room_for_two);
  RUN(test_arenas_without_a_name_keep_their_bytes_apart);
  RUN(test_kept_files_of_others_are_refused);
  RUN(test_what_lies_where_the_index_is_written_is_left_alone);
  RUN(test_other_arenas_and_tensors_are_refused);
  RUN(test_a_checkpoint_larger_than_the_file_budget_is_refused);
  RUN(test_what_was_read_before_is_taken_up);
  RUN(test_a_pinned_chunk_stays_on_the_device);
  RUN(test_an_update_that_waits_keeps_a_resume_away);
  RUN(test_calls_out_of_order_are_refused);
#ifndef __SANITIZE_THREAD__ /* a forked child of a process with threads is more than it can follow */
  RUN(test_a_kill_leaves_a_whole_checkpoint);
#else
  (void)test_a_kill_leaves_a_whole_checkpoint;
#endif
  return check_done();
}
