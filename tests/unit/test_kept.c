/* Kept blocks: commits, what a later store finds, and every fault between them in a test of its own.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "store_world.h"

#include "io/checksum.h"
#include "io/index.h"

static world_t kept_world(int directories) {
  world_t w = world(directories);
  w.config.keep = true;
  w.config.checkpoint_name = "model";
  return w;
}
static void remove_files(world_t *w) {
  char path[256];
  for (int d = 0; d < w->dir_count; d++) {
    snprintf(path, sizeof path, "%s/model.%d.chunks", w->dirs[d], d);
    CHECK_EQ(unlink(path), 0);
  }
  snprintf(path, sizeof path, "%s/model.index", w->dirs[0]);
  CHECK_EQ(unlink(path), 0);
}
static void end_and_remove(world_t *w) {
  if (w->store) close_store(w);
  remove_files(w);
  end(w);
}
static void index_path(const world_t *w, char path[256]) { snprintf(path, 256, "%s/model.index", w->dirs[0]); }

/* Commits blocks [first, first + count), with keys 1000 + block and a blob of text. */
static gemini_status_t commit(world_t *w, uint32_t first, uint32_t count, const char *text) {
  gmi_kept_t kept[64];
  CHECK(count <= 64);
  for (uint32_t i = 0; i < count; i++) kept[i] = (gmi_kept_t){ .block = first + i, .key = 1000 + first + i };
  return gmi_store_commit(w->store, kept, count, text, strlen(text));
}
static void check_committed(world_t *w, uint32_t first, uint32_t count, const char *text) {
  const gmi_kept_t *kept;
  const void *blob;
  uint32_t found;
  uint64_t bytes;
  CHECK_OK(gmi_store_committed(w->store, &kept, &found, &blob, &bytes));
  CHECK_EQ(found, count);
  for (uint32_t i = 0; i < count; i++) {
    CHECK_EQ(kept[i].block, first + i);
    CHECK_EQ(kept[i].key, 1000 + first + i);
  }
  CHECK_EQ(bytes, strlen(text));
  CHECK(!memcmp(blob, text, bytes));
}
/* As a process that is killed: nothing of what close does to the files. */
static void reopen(world_t *w) {
  close_store(w);
  open_store(w);
}

static void test_commit_is_what_a_later_store_finds(void) {
  for (int variant = 0; variant < 8; variant++) {
    world_t w = kept_world(variant & 1 ? 3 : 1);
    sim.no_direct = variant & 2 ? EINVAL : 0;
    w.config.block_bytes = variant & 4 ? 320 << 10 : 8192;
    w.config.engine_kind = GMI_ENGINE_AUTO;
    open_store(&w);
    const gmi_kept_t *kept;
    const void *blob;
    uint32_t count;
    uint64_t bytes;
    CHECK_STATUS(gmi_store_committed(w.store, &kept, &count, &blob, &bytes), GEMINI_ERR_NOT_FOUND);
    for (uint32_t i = 0; i < 6; i++) CHECK_OK(put(&w, take(&w), i));
    CHECK_OK(put(&w, 2, 22)); /* generations differ */
    CHECK_OK(commit(&w, 0, 5, "first"));
    check_committed(&w, 0, 5, "first");
    reopen(&w);
    check_committed(&w, 0, 5, "first");
    CHECK_EQ(figures(&w).blocks_used, 5);
    for (uint32_t i = 0; i < 5; i++) CHECK_OK(get(&w, i, i == 2 ? 22 : i));
    CHECK_EQ(take(&w), 5); /* was not committed, and is free */
    CHECK_STATUS(get(&w, 5, 5), GEMINI_ERR_STATE);
    CHECK_OK(put(&w, 5, 55));
    CHECK_OK(get(&w, 5, 55));
    CHECK_OK(commit(&w, 3, 3, ""));
    reopen(&w);
    check_committed(&w, 3, 3, "");
    CHECK_OK(get(&w, 3, 3));
    CHECK_OK(get(&w, 5, 55));
    CHECK_OK(commit(&w, 0, 0, "nothing is kept"));
    reopen(&w);
    check_committed(&w, 0, 0, "nothing is kept");
    CHECK_EQ(figures(&w).blocks_used, 0);
    end_and_remove(&w);
  }
}

static void test_kept_block_that_is_damaged_is_found(void) {
  world_t w = kept_world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  uint8_t *old = buffer_of(&w);
  raw(&w, 1, 0, old, 8192, false);
  CHECK_OK(put(&w, 1, 11));
  CHECK_OK(commit(&w, 0, 3, "x"));
  reopen(&w);
  raw(&w, 1, 0, old, 8192, true);
  CHECK_STATUS(get(&w, 1, 11), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "chunk 3 of arena master: block 1 at offset 8192 of ");
  CHECK_SAYS(gmi_fail_message(), "/model.0.chunks is damaged");
  CHECK_SAYS(gmi_fail_message(), "generation 2");
  CHECK_OK(get(&w, 0, 0));
  CHECK_OK(get(&w, 2, 2));
  /* What was written after the commit may have had any generation, but none from the commit's highest on. */
  CHECK_EQ(take(&w), 3);
  CHECK_OK(put(&w, 3, 3));
  raw(&w, 3, 0, old, 8192, true);
  CHECK_STATUS(get(&w, 3, 3), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "that of generation 3 is");
  free(old);
  end_and_remove(&w);
}

static void test_store_without_a_commit_leaves_no_files(void) {
  world_t w = kept_world(3);
  open_store(&w);
  for (int d = 0; d < 3; d++) CHECK_EQ(names_in(w.dirs[d]), 1);
  CHECK_OK(put(&w, take(&w), 1));
  close_store(&w);
  end(&w);
}

static void test_open_that_fails_later_leaves_no_files(void) {
  world_t w = kept_world(3);
  CHECK_EQ(rmdir(w.dirs[2]), 0);
  CHECK_STATUS(try_open(&w), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), w.dirs[2]);
  CHECK_EQ(mkdir(w.dirs[2], 0700), 0);
  end(&w);
}

static void test_blocks_of_the_last_commit_stay(void) {
  world_t w = kept_world(1);
  w.config.block_count = 4;
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 2, "a"));
  CHECK_STATUS(put(&w, 0, 9), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "belongs to a checkpoint");
  CHECK_OK(get(&w, 0, 0));
  gmi_store_give(w.store, 0);
  gmi_store_give(w.store, 2);
  CHECK_EQ(figures(&w).blocks_used, 2);
  CHECK_EQ(take(&w), 2); /* not 0 */
  CHECK_EQ(take(&w), 3);
  uint32_t none;
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_OK(put(&w, 3, 3));
  CHECK_OK(put(&w, 2, 22));
  CHECK_OK(commit(&w, 1, 3, "b"));
  CHECK_EQ(take(&w), 0); /* now it is free */
  CHECK_OK(put(&w, 0, 5));
  CHECK_STATUS(commit(&w, 0, 4, "c") ? GEMINI_ERR_STATE : GEMINI_OK, GEMINI_OK);
  reopen(&w);
  check_committed(&w, 0, 4, "c");
  CHECK_OK(get(&w, 0, 5));
  CHECK_OK(get(&w, 2, 22));
  end_and_remove(&w);
}

static void test_commit_of_what_cannot_be_kept_is_refused(void) {
  world_t w = kept_world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 2, "good"));
  CHECK_STATUS(commit(&w, 2, 2, "not taken"), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "block 3 was not taken");
  CHECK_STATUS(commit(&w, 12, 1, "no such block"), GEMINI_ERR_STATE);
  CHECK_EQ(take(&w), 3);
  CHECK_STATUS(commit(&w, 2, 2, "not written"), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "block 3 was never written");
  sim.write_error = EIO;
  CHECK_STATUS(put(&w, 3, 3), GEMINI_ERR_IO);
  sim.write_error = 0;
  CHECK_STATUS(commit(&w, 2, 2, "failed"), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "block 3 could not be written");
  gmi_kept_t twice[2] = { { .block = 2, .key = 1 }, { .block = 2, .key = 2 } };
  CHECK_STATUS(gmi_store_commit(w.store, twice, 2, NULL, 0), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "named twice");
  CHECK_STATUS(gmi_store_commit(w.store, NULL, 2, NULL, 0), GEMINI_ERR_INVALID);
  CHECK_STATUS(gmi_store_commit(w.store, twice, 1, NULL, 1), GEMINI_ERR_INVALID);
  CHECK_STATUS(gmi_store_commit(w.store, twice, 1, "", UINT64_MAX), GEMINI_ERR_INVALID);
  check_committed(&w, 0, 2, "good");
  /* Nothing of them sticks: the blocks can be written and given. */
  CHECK_OK(put(&w, 2, 33));
  gmi_store_give(w.store, 2);
  CHECK_EQ(take(&w), 2);
  reopen(&w);
  check_committed(&w, 0, 2, "good");
  end_and_remove(&w);
}

/* As a network's file system does that sends the request again. If the index cannot be read then, either commit may be in
 * force, so the blocks of both stay protected. */
static void test_a_rename_that_is_done_and_fails_loses_nothing(void) {
  for (int blind = 0; blind < 2; blind++) {
    world_t w = kept_world(1);
    open_store(&w);
    for (uint32_t i = 0; i < 6; i++) CHECK_OK(put(&w, take(&w), i));
    CHECK_OK(commit(&w, 0, 3, "old"));
    for (uint32_t i = 0; i < 3; i++) gmi_store_give(w.store, i);
    sim.rename_lies = true;
    sim.rename_error = EIO;
    sim.read_error = blind ? EIO : 0;
    CHECK_STATUS(commit(&w, 3, 3, "new"), blind ? GEMINI_ERR_IO : GEMINI_OK);
    sim.rename_lies = false;
    sim.rename_error = sim.read_error = 0;
    for (uint32_t i = 3; i < 6; i++) gmi_store_give(w.store, i);
    uint32_t block, taken = 0; /* of 12 */
    while (!gmi_store_take(w.store, &block)) {
      CHECK(block > 5 || (block < 3 && !blind));
      CHECK_OK(put(&w, block, 77));
      taken++;
    }
    CHECK_EQ(taken, blind ? 6 : 9);
    reopen(&w);
    check_committed(&w, 3, 3, "new");
    end_and_remove(&w);
  }
}

/* The steps of a commit fail one after the other; the old one stays in force, and the next one works. */
static void test_commit_that_fails_leaves_the_one_before(void) {
  static const char *const says[] = { "could not sync", "could not make", "could not write", "could not sync",
                                      "could not rename" };
  for (int step = 0; step < 5; step++) {
    world_t w = kept_world(2);
    open_store(&w);
    for (uint32_t i = 0; i < 6; i++) CHECK_OK(put(&w, take(&w), i));
    CHECK_OK(commit(&w, 0, 3, "old"));
    gmi_store_give(w.store, 0);
    if (step == 0) sim.fdatasync_error = EIO;
    if (step == 1) sim.index_error = EACCES;
    if (step == 2) sim.write_error = ENOSPC;
    if (step == 3) sim.fsync_error = EIO;
    if (step == 4) sim.rename_error = EIO;
    CHECK_STATUS(commit(&w, 1, 5, "new"), step == 2 ? GEMINI_ERR_OOM_FILE : GEMINI_ERR_IO);
    CHECK_SAYS(gmi_fail_message(), says[step]);
    CHECK_SAYS(gmi_fail_message(), step ? "/model.index.new" : ".chunks");
    sim.fdatasync_error = sim.index_error = sim.write_error = sim.fsync_error = sim.rename_error = 0;
    check_committed(&w, 0, 3, "old");
    CHECK_EQ(names_in(w.dirs[0]), 2);              /* no new index left */
    CHECK_STATUS(put(&w, 1, 7), GEMINI_ERR_STATE); /* still protected */
    for (uint32_t i = 6; i < 12; i++) CHECK_EQ(take(&w), i);
    uint32_t none;
    CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE); /* 0 as well */
    if (step == 0) {
      /* What was to be synced is suspect until it is written again. */
      CHECK_STATUS(commit(&w, 1, 5, "new"), GEMINI_OK); /* the blocks were synced by the first commit */
    } else {
      CHECK_OK(put(&w, 4, 44));
      CHECK_OK(commit(&w, 1, 5, "new"));
    }
    check_committed(&w, 1, 5, "new");
    CHECK_EQ(take(&w), 0);
    reopen(&w);
    check_committed(&w, 1, 5, "new");
    for (uint32_t i = 1; i < 6; i++) CHECK_OK(get(&w, i, i == 4 && step ? 44 : i));
    end_and_remove(&w);
  }
}

static void test_block_whose_sync_failed_must_be_written_again(void) {
  world_t w = kept_world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 2, "old"));
  CHECK_EQ(take(&w), 3);
  CHECK_OK(put(&w, 3, 3)); /* after the sync; 2 before it */
  sim.fdatasync_error = EIO;
  CHECK_STATUS(commit(&w, 2, 2, "new"), GEMINI_ERR_IO);
  sim.fdatasync_error = 0;
  CHECK_STATUS(commit(&w, 2, 2, "new"), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "block 3 could not be synced, and has to be written again");
  CHECK_OK(commit(&w, 2, 1, "without it"));
  CHECK_OK(put(&w, 3, 33));
  CHECK_OK(commit(&w, 2, 2, "new"));
  reopen(&w);
  CHECK_OK(get(&w, 3, 33));
  end_and_remove(&w);
}

/* Then the index is the new one already, but the old one might come back: both are held until the next commit. */
static void test_commit_whose_directory_cannot_be_synced_holds_both(void) {
  world_t w = kept_world(1);
  w.config.block_count = 5;
  open_store(&w);
  for (uint32_t i = 0; i < 4; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 2, "old"));
  sim.directory_error = EIO;
  CHECK_STATUS(commit(&w, 2, 2, "new"), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "could not sync the directory");
  CHECK_SAYS(gmi_fail_message(), w.dirs[0]);
  sim.directory_error = 0;
  for (uint32_t i = 0; i < 4; i++) CHECK_STATUS(put(&w, i, 9), GEMINI_ERR_STATE);
  for (uint32_t i = 0; i < 4; i++) gmi_store_give(w.store, i);
  CHECK_EQ(take(&w), 4);
  uint32_t none;
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  reopen(&w);
  check_committed(&w, 2, 2, "new");
  CHECK_OK(get(&w, 2, 2));
  CHECK_OK(commit(&w, 3, 1, "newer"));
  gmi_store_give(w.store, 2);
  CHECK_EQ(take(&w), 0);
  CHECK_EQ(take(&w), 1);
  CHECK_EQ(take(&w), 2);
  /* Some file systems cannot sync directories at all. */
  sim.directory_error = EINVAL;
  CHECK_OK(commit(&w, 3, 1, "newest"));
  check_committed(&w, 3, 1, "newest");
  end_and_remove(&w);
}

/* The first one of all: the files stay then, as the index may be found. */
static void test_first_commit_whose_directory_cannot_be_synced(void) {
  world_t w = kept_world(1);
  open_store(&w);
  CHECK_OK(put(&w, take(&w), 0));
  sim.directory_error = EIO;
  CHECK_STATUS(commit(&w, 0, 1, "a"), GEMINI_ERR_IO); /* names of the files: nothing was committed */
  sim.directory_error = 0;
  close_store(&w);
  end(&w);
}

static void test_shrunk_store_keeps_its_commit(void) {
  world_t w = kept_world(2);
  open_store(&w);
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 7, 2, "a"));
  for (uint32_t i = 0; i < 12; i++) gmi_store_give(w.store, i);
  CHECK_OK(gmi_store_resize(w.store, 2));
  CHECK_EQ(figures(&w).reserved_bytes, 9 * 8192);
  w.config.block_count = 2;
  reopen(&w);
  CHECK_EQ(figures(&w).reserved_bytes, 9 * 8192);
  CHECK_EQ(figures(&w).block_count, 2);
  CHECK_OK(get(&w, 7, 7));
  CHECK_OK(get(&w, 8, 8));
  CHECK_EQ(take(&w), 0);
  CHECK_EQ(take(&w), 1);
  CHECK_OK(put(&w, 0, 5));
  gmi_store_give(w.store, 7);
  gmi_store_give(w.store, 8);
  CHECK_EQ(figures(&w).reserved_bytes, 9 * 8192);
  CHECK_OK(commit(&w, 0, 1, "b"));
  CHECK_EQ(figures(&w).reserved_bytes, 2 * 8192);
  w.config.block_count = 20;
  reopen(&w);
  CHECK_OK(get(&w, 0, 5));
  CHECK_EQ(figures(&w).reserved_bytes, 20 * 8192);
  end_and_remove(&w);
}

/* A block is given back while a commit holds the store, and the commit fails. */
static world_t *shrunk;
static void give_last(void) { gmi_store_give(shrunk->store, 11); }
static void test_block_given_during_a_commit_gives_its_space_back(void) {
  for (int fails = 0; fails < 2; fails++) {
    world_t w = kept_world(2);
    open_store(&w);
    for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
    CHECK_OK(commit(&w, 0, 1, "a"));
    for (uint32_t i = 1; i < 11; i++) gmi_store_give(w.store, i);
    CHECK_OK(gmi_store_resize(w.store, 1));
    CHECK_EQ(figures(&w).reserved_bytes, 12 * 8192);
    shrunk = &w;
    sim.at_fdatasync = give_last;
    sim.rename_error = fails ? EIO : 0;
    CHECK_STATUS(commit(&w, 0, 1, "b"), fails ? GEMINI_ERR_IO : GEMINI_OK);
    sim.at_fdatasync = NULL;
    sim.rename_error = 0;
    CHECK_EQ(figures(&w).reserved_bytes, 8192);
    end_and_remove(&w);
  }
}

static void test_store_in_use_is_refused(void) {
  world_t w = kept_world(2);
  open_store(&w);
  CHECK_OK(put(&w, take(&w), 1));
  world_t other = w;
  CHECK_STATUS(try_open(&other), GEMINI_ERR_BUSY);
  CHECK_SAYS(gmi_fail_message(), "/model.0.chunks is in use");
  CHECK_OK(commit(&w, 0, 1, "a"));
  CHECK_OK(get(&w, 0, 1));
  reopen(&w);
  CHECK_OK(get(&w, 0, 1));
  end_and_remove(&w);
}

/* Its owner closes and removes it, between that it is opened and locked. */
/* Whoever runs the tests: the files look like another user's. */
static void test_files_of_another_user_are_refused(void) {
  world_t w = kept_world(1);
  open_store(&w);
  CHECK_OK(put(&w, take(&w), 0));
  CHECK_OK(commit(&w, 0, 1, "a"));
  close_store(&w);
  sim.owner_add = 1;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_FORMAT);
  char says[40];
  snprintf(says, sizeof says, "user %u,", (unsigned)geteuid() + 1);
  CHECK_SAYS(gmi_fail_message(), says);
  sim.owner_add = 0;
  open_store(&w);
  check_committed(&w, 0, 1, "a");
  end_and_remove(&w);
}

static void test_file_that_vanishes_while_it_is_opened_is_refused(void) {
  world_t w = kept_world(1);
  sim.unlink_at_lock = true;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_BUSY);
  sim.unlink_at_lock = false;
  open_store(&w);
  CHECK_OK(put(&w, take(&w), 1));
  end(&w);
}

static void test_index_of_other_files_is_refused(void) {
  world_t w = kept_world(2);
  char path[256], aside[256];
  open_store(&w);
  for (uint32_t i = 0; i < 4; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 4, "a"));
  close_store(&w);
  w.config.block_bytes = 4096;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "/model.index");
  CHECK_SAYS(gmi_fail_message(), "blocks of 8192 bytes in 2 directories, want 4096 bytes in 2");
  w.config.block_bytes = 8192;
  w.config.directories = w.dirs[0];
  CHECK_STATUS(try_open(&w), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "blocks of 8192 bytes in 2 directories, want 8192 bytes in 1");

  snprintf(path, sizeof path, "%s/model.1.chunks", w.dirs[1]);
  snprintf(aside, sizeof aside, "%s/aside", w.dirs[1]);
  CHECK_EQ(rename(path, aside), 0);
  CHECK_STATUS(try_open(&w), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "/model.1.chunks is missing");
  CHECK_EQ(mkdir(path, 0700), 0);
  CHECK(try_open(&w) != GEMINI_OK);
  CHECK_SAYS(gmi_fail_message(), "/model.1.chunks");
  CHECK_EQ(rmdir(path), 0);
  CHECK_EQ(rename(aside, path), 0);
  CHECK_EQ(truncate(path, 3 * 4096), 0);
  CHECK_STATUS(try_open(&w), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "/model.1.chunks ends at 12288, before block 3 of the index, which ends at 16384");
  struct stat info;
  CHECK_EQ(stat(path, &info), 0);
  CHECK_EQ(info.st_size, 12288); /* refused stores change nothing */
  end_and_remove(&w);
}

/* Reopening with more blocks than there is space for. */
static void test_kept_store_without_space_stays_as_it_is(void) {
  world_t w = kept_world(2);
  open_store(&w);
  for (uint32_t i = 0; i < 4; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 4, "a"));
  close_store(&w);
  w.config.block_count = 100;
  sim.fallocate_error = ENOSPC;
  sim.fallocate_after = 1;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_OOM_FILE);
  CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
  sim.fallocate_error = 0;
  for (int d = 0; d < 2; d++) {
    char path[256];
    struct stat info;
    snprintf(path, sizeof path, "%s/model.%d.chunks", w.dirs[d], d);
    CHECK_EQ(stat(path, &info), 0);
    CHECK_EQ(info.st_size, 6 * 8192);
  }
  w.config.block_count = 12;
  open_store(&w);
  check_committed(&w, 0, 4, "a");
  for (uint32_t i = 0; i < 4; i++) CHECK_OK(get(&w, i, i));
  end_and_remove(&w);
}

/* Sums are of the store that wrote a block; where some have none, none are compared. */
static void test_kept_blocks_with_and_without_sums(void) {
  world_t w = kept_world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 2, "a"));
  w.config.checksum = false;
  reopen(&w);
  CHECK_EQ(take(&w), 2);
  CHECK_OK(put(&w, 2, 2));
  CHECK_OK(commit(&w, 0, 3, "b"));
  w.config.checksum = true;
  reopen(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(get(&w, i, i));
  CHECK_EQ(take(&w), 3);
  CHECK_OK(put(&w, 3, 3));
  CHECK_OK(commit(&w, 3, 1, "c"));
  reopen(&w);
  uint8_t byte = 0;
  CHECK_OK(get(&w, 3, 3));
  raw(&w, 3, 5000, &byte, 1, true);
  CHECK_STATUS(get(&w, 3, 3), GEMINI_ERR_FORMAT);
  end_and_remove(&w);
}

/* ---- the index itself */
static uint8_t *read_index(const world_t *w, uint64_t *size_out) {
  char path[256];
  index_path(w, path);
  FILE *file = fopen(path, "rbe");
  CHECK(file);
  uint8_t *bytes = malloc(65536);
  CHECK(bytes);
  *size_out = fread(bytes, 1, 65536, file);
  fclose(file);
  return bytes;
}
static void write_index(const world_t *w, const uint8_t *bytes, uint64_t size) {
  char path[256];
  index_path(w, path);
  FILE *file = fopen(path, "wbe");
  CHECK(file);
  CHECK_EQ(fwrite(bytes, 1, size, file), size);
  CHECK_EQ(fclose(file), 0);
}
static void put_number(uint8_t *bytes, uint64_t value, int count) {
  for (int i = 0; i < count; i++) bytes[i] = (uint8_t)(value >> 8 * i);
}
static void check_refused(world_t *w, const char *says) {
  CHECK_STATUS(try_open(w), GEMINI_ERR_FORMAT);
  char path[256];
  index_path(w, path);
  CHECK_SAYS(gmi_fail_message(), path);
  CHECK_SAYS(gmi_fail_message(), says);
}

static void test_index_that_is_damaged_is_refused(void) {
  world_t w = kept_world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 3, "some text"));
  close_store(&w);
  uint64_t size;
  uint8_t *good = read_index(&w, &size), *bad = malloc(size + 100);
  CHECK(bad);
  CHECK_EQ(size, 80 + 3 * 24 + 9 + 4);
  /* Every byte, and every length. */
  for (uint64_t at = 0; at < size; at++) {
    memcpy(bad, good, size);
    bad[at] ^= (uint8_t)(1 << at % 8);
    write_index(&w, bad, size);
    check_refused(&w, "byte ");
  }
  for (uint64_t length = 0; length < size; length += length < 70 ? 23 : 1) {
    write_index(&w, good, length);
    check_refused(&w, "byte ");
  }
  memcpy(bad, good, size);
  memset(bad + size, 0, 100);
  write_index(&w, bad, size + 100);
  check_refused(&w, "shorter or longer");
  write_index(&w, good, size);
  open_store(&w);
  check_committed(&w, 0, 3, "some text");
  free(good);
  free(bad);
  end_and_remove(&w);
}

/* Numbers that cannot be, under a checksum that is right. */
static void test_index_whose_numbers_cannot_be_is_refused(void) {
  world_t w = kept_world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_OK(commit(&w, 0, 3, "some text"));
  close_store(&w);
  uint64_t size;
  uint8_t *good = read_index(&w, &size), *bad = malloc(size);
  CHECK(bad);
  static const struct {
    int at, bytes;
    uint64_t value;
    const char *says;
  } cases[] = {
    { 0, 1, 'G', "byte 0: this is no index" },
    { 8, 4, 2, "byte 8: another version" },
    { 12, 4, 0, "byte 12: the number of files is out of range" },
    { 12, 4, 257, "byte 12: the number of files is out of range" },
    { 16, 8, 10000, "byte 16: the size of the file does not agree" },
    { 24, 8, 0, "byte 24: the size of a block is out of range" },
    { 24, 8, 8193, "byte 24: the size of a block is out of range" },
    { 24, 8, UINT64_C(1) << 63, "byte 24: the size of a block is out of range" },
    { 24, 8, UINT64_C(1) << 60, "byte 32: the number of blocks is out of range" },
    { 32, 4, UINT32_MAX, "byte 32: the number of blocks is out of range" },
    { 32, 4, 2, "byte 40: more blocks are kept than there are" },
    { 36, 4, 1, "byte 36: a reserved field is not 0" },
    { 40, 4, 4, "byte 16: the size of the file does not agree" },
    { 40, 4, UINT32_MAX, "byte 40: more blocks are kept than there are" },
    { 44, 4, 2, "byte 44: the flag of checksums is neither 0 nor 1" },
    { 44, 4, 0, "byte 100: an entry has a checksum, but the index says that none has" },
    { 48, 8, 10, "byte 16: the size of the file does not agree" },
    { 48, 8, UINT64_MAX - 80, "byte 48: the blob is too long" },
    { 56, 8, 0, "byte 56: the number of the checkpoint is 0" },
    { 64, 8, 0, "byte 88: the generation is out of range" },
    { 72, 8, 1, "byte 72: a reserved field is not 0" },
    { 88, 8, 0, "byte 88: the generation is out of range" },
    { 88, 8, 2, "byte 88: the generation is out of range" },
    { 96, 4, 12, "byte 96: there is no such block" },
    { 96, 4, UINT32_MAX, "byte 96: there is no such block" },
    { 96, 4, 1, "byte 120: a block is kept twice" },
  };
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    memcpy(bad, good, size);
    put_number(bad + cases[k].at, cases[k].value, cases[k].bytes);
    put_number(bad + size - 4, gmi_crc32c(0, bad, size - 4), 4);
    write_index(&w, bad, size);
    check_refused(&w, cases[k].says);
  }
  free(good);
  free(bad);
  end_and_remove(&w);
}

static void test_index_that_cannot_be_read_is_an_error(void) {
  world_t w = kept_world(1);
  open_store(&w);
  CHECK_OK(put(&w, take(&w), 0));
  CHECK_OK(commit(&w, 0, 1, "a"));
  close_store(&w);
  sim.read_error = EIO;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "/model.index: could not read it: Input/output error");
  sim.read_error = 0;
  sim.interruptions = 2;
  open_store(&w);
  check_committed(&w, 0, 1, "a");
  sim.interruptions = 2;
  CHECK_OK(commit(&w, 0, 1, "b"));
  end_and_remove(&w);
}

/* A process that was killed may leave these. */
static void test_leftovers_of_a_killed_process_are_taken_up(void) {
  world_t w = kept_world(2);
  for (int indexed = 0; indexed < 2; indexed++) {
    char path[256];
    snprintf(path, sizeof path, "%s/model.index.new", w.dirs[0]);
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(write(fd, "rubbish", 7), 7);
    close(fd);
    if (!indexed) {
      snprintf(path, sizeof path, "%s/model.1.chunks", w.dirs[1]);
      fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
      CHECK(fd >= 0);
      CHECK_EQ(ftruncate(fd, 1 << 20), 0);
      close(fd);
    }
    open_store(&w);
    CHECK_EQ(names_in(w.dirs[0]), 1 + indexed);
    CHECK_EQ(figures(&w).reserved_bytes, 12 * 8192);
    if (!indexed) {
      close_store(&w);
      for (int d = 0; d < 2; d++) CHECK_EQ(names_in(w.dirs[d]), 0);
      open_store(&w);
      CHECK_OK(put(&w, take(&w), 0));
      CHECK_OK(commit(&w, 0, 1, "a"));
    } else {
      check_committed(&w, 0, 1, "a");
    }
    close_store(&w);
  }
  end_and_remove(&w);
}

/* Blocks come and go while commits are made: what a commit names is not disturbed. */
static void *commits(void *user) {
  world_t *w = user;
  for (int round = 0; round < 12; round++) {
    CHECK_OK(commit(w, 0, 3, "steady"));
    (void)figures(w);
  }
  return NULL;
}
static void test_commit_while_blocks_come_and_go(void) {
  world_t w = kept_world(1);
  w.config.engine_kind = GMI_ENGINE_AUTO;
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, commits, &w), 0);
  for (uint32_t round = 0; round < 60; round++) {
    uint32_t block = take(&w);
    CHECK(block >= 3);
    CHECK_OK(put(&w, block, 100));
    CHECK_OK(get(&w, round % 3, round % 3));
    CHECK_OK(get(&w, block, 100));
    gmi_store_give(w.store, block);
    if (round % 10 == 0) CHECK_OK(gmi_store_resize(w.store, 8 + round % 20));
  }
  pthread_join(thread, NULL);
  reopen(&w);
  check_committed(&w, 0, 3, "steady");
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(get(&w, i, i));
  end_and_remove(&w);
}

int main(void) {
  { /* what the sanitizers start, they start now */
    world_t w = world(1);
    open_store(&w);
    gmi_store_close(w.store);
    CHECK_EQ(rmdir(w.dirs[0]), 0);
  }
  RUN(test_commit_is_what_a_later_store_finds);
  RUN(test_kept_block_that_is_damaged_is_found);
  RUN(test_store_without_a_commit_leaves_no_files);
  RUN(test_open_that_fails_later_leaves_no_files);
  RUN(test_blocks_of_the_last_commit_stay);
  RUN(test_commit_of_what_cannot_be_kept_is_refused);
  RUN(test_commit_that_fails_leaves_the_one_before);
  RUN(test_a_rename_that_is_done_and_fails_loses_nothing);
  RUN(test_block_whose_sync_failed_must_be_written_again);
  RUN(test_commit_whose_directory_cannot_be_synced_holds_both);
  RUN(test_first_commit_whose_directory_cannot_be_synced);
  RUN(test_shrunk_store_keeps_its_commit);
  RUN(test_block_given_during_a_commit_gives_its_space_back);
  RUN(test_store_in_use_is_refused);
  RUN(test_files_of_another_user_are_refused);
  RUN(test_file_that_vanishes_while_it_is_opened_is_refused);
  RUN(test_index_of_other_files_is_refused);
  RUN(test_kept_store_without_space_stays_as_it_is);
  RUN(test_kept_blocks_with_and_without_sums);
  RUN(test_index_that_is_damaged_is_refused);
  RUN(test_index_whose_numbers_cannot_be_is_refused);
  RUN(test_index_that_cannot_be_read_is_an_error);
  RUN(test_leftovers_of_a_killed_process_are_taken_up);
  RUN(test_commit_while_blocks_come_and_go);
  return check_done();
}
