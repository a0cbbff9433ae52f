/* The store of blocks: one suite over both engines, direct and buffered, one directory and three; then every fault in a
 * test of its own, made at the table of system calls or on the disk. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "store_world.h"

#include "io/engine.h"

/* ---- the suite */
typedef struct flavour {
  uint32_t engine;
  bool buffered;
  int directories;
  uint64_t block_bytes;
} flavour_t;

static world_t flavoured(const flavour_t *f) {
  world_t w = world(f->directories);
  w.config.engine_kind = f->engine;
  w.config.block_bytes = f->block_bytes;
  sim.no_direct = f->buffered ? EINVAL : 0;
  open_store(&w);
  return w;
}

static void suite_every_block_keeps_its_bytes(const flavour_t *f) {
  world_t w = flavoured(f);
  uint32_t count = w.config.block_count;
  uint64_t size = w.config.block_bytes;
  gmi_store_figures_t before = figures(&w);
  CHECK_EQ(before.engine.kind, f->engine);
  CHECK_EQ(before.files, f->directories);
  CHECK_EQ(before.block_count, count);
  CHECK_EQ(before.blocks_used, 0);
  CHECK(before.reserved_up_front);
  CHECK_EQ(before.reserved_bytes, count * size);
  CHECK_EQ(before.direct, !f->buffered);
  CHECK_EQ(before.summing_threads, size > 256 << 10 ? f->directories : 0);
  CHECK_EQ(!*before.note, !f->buffered);
  for (uint32_t i = 0; i < count; i++) CHECK_EQ(take(&w), i); /* in order, so that the files fill evenly */
  uint32_t none = 12345;
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_EQ(none, 12345);
  for (uint64_t generation = 1; generation <= 3; generation++) {
    for (uint32_t i = 0; i < count; i++) CHECK_OK(put(&w, i, generation * 100 + i));
    for (uint32_t i = count; i--;) CHECK_OK(get(&w, i, generation * 100 + i));
  }
  gmi_store_figures_t after = figures(&w);
  CHECK_EQ(after.blocks_used, count);
  CHECK_EQ(after.engine.written_bytes, 3 * count * size);
  CHECK_EQ(after.engine.read_bytes, 3 * count * size);
  /* They are where the store says. */
  uint8_t *bytes = buffer_of(&w);
  raw(&w, 7, 0, bytes, size, false);
  CHECK(holds(bytes, size, 307));
  free(bytes);
  end(&w);
}

typedef struct job {
  gmi_block_request_t request;
  uint8_t *buffer;
  world_t *w;
  uint64_t seed;
  int reads_left;
  sem_t *over;
} job_t;
/* Reads again what was written, from within done. */
static void job_done(gmi_block_request_t *r) {
  job_t *j = r->user;
  CHECK_EQ(r->io.status, GEMINI_OK);
  if (!r->write) CHECK(holds(j->buffer, j->w->config.block_bytes, j->seed));
  if (j->reads_left-- > 0) {
    memset(j->buffer, 0, j->w->config.block_bytes);
    r->write = false;
    r->urgent = j->reads_left % 2;
    gmi_store_submit(j->w->store, r);
  } else {
    sem_post(j->over);
  }
}
static void suite_many_at_once_and_from_done(const flavour_t *f) {
  world_t w = flavoured(f);
  uint32_t count = w.config.block_count;
  job_t *jobs = calloc(count, sizeof *jobs);
  CHECK(jobs);
  sem_t over;
  sem_init(&over, 0, 0);
  for (uint32_t i = 0; i < count; i++) {
    job_t *j = &jobs[i];
    *j = (job_t){ .buffer = buffer_of(&w), .w = &w, .seed = i + 1, .reads_left = 4, .over = &over };
    CHECK_OK(gmi_store_buffer_add(w.store, j->buffer, w.config.block_bytes));
    fill(j->buffer, w.config.block_bytes, j->seed);
    j->request = (gmi_block_request_t){
      .block = take(&w), .write = true, .buffer = j->buffer, .owner = "job", .done = job_done, .user = j
    };
  }
  for (uint32_t i = 0; i < count; i++) gmi_store_submit(w.store, &jobs[i].request);
  for (uint32_t i = 0; i < count; i++) sem_wait(&over);
  for (uint32_t i = 0; i < count; i++) gmi_store_buffer_remove(w.store, jobs[i].buffer, w.config.block_bytes);
  close_store(&w);
  for (uint32_t i = 0; i < count; i++) free(jobs[i].buffer);
  free(jobs);
  sem_destroy(&over);
  end(&w);
}

static void suite_close_finishes_what_was_submitted(const flavour_t *f) {
  world_t w = flavoured(f);
  sem_t over;
  sem_init(&over, 0, 0);
  job_t jobs[8];
  for (int i = 0; i < 8; i++) {
    jobs[i] = (job_t){ .buffer = buffer_of(&w), .w = &w, .seed = 5, .reads_left = 2, .over = &over };
    fill(jobs[i].buffer, w.config.block_bytes, 5);
    jobs[i].request = (gmi_block_request_t){
      .block = take(&w), .write = true, .buffer = jobs[i].buffer, .owner = "job", .done = job_done, .user = &jobs[i]
    };
    gmi_store_submit(w.store, &jobs[i].request);
  }
  close_store(&w);
  for (int i = 0; i < 8; i++) {
    CHECK_EQ(sem_trywait(&over), 0);
    free(jobs[i].buffer);
  }
  end(&w);
}

static void suite_damage_is_found(const flavour_t *f) {
  world_t w = flavoured(f);
  uint64_t size = w.config.block_bytes;
  uint8_t *old = buffer_of(&w), *new = buffer_of(&w);
  uint32_t block = 0;
  for (uint32_t i = 0; i < 8; i++) block = take(&w);
  char expected[200], offset[64];
  snprintf(expected, sizeof expected, "an unnamed file in %s", w.dirs[7 % f->directories]);
  snprintf(offset, sizeof offset, "block 7 at offset %llu of", (unsigned long long)offset_of(&w, block));

  /* A flipped bit, anywhere. */
  static const double places[] = { 0, 0.3, 0.5, 0.999999 };
  for (int k = 0; k < 4; k++) {
    CHECK_OK(put(&w, block, 1));
    uint64_t at = (uint64_t)(places[k] * (double)size);
    uint8_t byte;
    raw(&w, block, at, &byte, 1, false);
    byte ^= (uint8_t)(1 << k);
    raw(&w, block, at, &byte, 1, true);
    CHECK_STATUS(get(&w, block, 1), GEMINI_ERR_FORMAT);
    CHECK_SAYS(gmi_fail_message(), "chunk 3 of arena master");
    CHECK_SAYS(gmi_fail_message(), offset);
    CHECK_SAYS(gmi_fail_message(), expected);
    CHECK_SAYS(gmi_fail_message(), "is damaged: its checksum is");
  }
  /* An older generation put back. */
  CHECK_OK(put(&w, block, 2));
  raw(&w, block, 0, old, size, false);
  CHECK_OK(put(&w, block, 3));
  raw(&w, block, 0, new, size, false);
  raw(&w, block, 0, old, size, true);
  CHECK_STATUS(get(&w, block, 3), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "chunk 3 of arena master");
  CHECK_SAYS(gmi_fail_message(), offset);
  CHECK_SAYS(gmi_fail_message(), expected);
  CHECK_SAYS(gmi_fail_message(), "is stale: it holds generation 5");
  CHECK_SAYS(gmi_fail_message(), "not generation 6");
  /* Torn: half of it is old. */
  raw(&w, block, 0, new, size, true);
  CHECK_OK(get(&w, block, 3));
  raw(&w, block, size / 2, old + size / 2, size - size / 2, true);
  CHECK_STATUS(get(&w, block, 3), GEMINI_ERR_FORMAT);
  CHECK_SAYS(gmi_fail_message(), "is damaged");
  /* Another block's bytes. */
  CHECK_OK(put(&w, 6, 9));
  CHECK_OK(put(&w, block, 10));
  raw(&w, 6, 0, old, size, false);
  raw(&w, block, 0, old, size, true);
  CHECK_STATUS(get(&w, block, 10), GEMINI_ERR_FORMAT);
  CHECK_OK(get(&w, 6, 9));
  /* Writing it again mends it. */
  CHECK_OK(put(&w, block, 4));
  CHECK_OK(get(&w, block, 4));
  free(old);
  free(new);
  end(&w);
}

static void suite_file_that_ends_early_is_an_error(const flavour_t *f) {
  world_t w = flavoured(f);
  uint32_t block = 0;
  for (uint32_t i = 0; i < 8; i++) block = take(&w);
  CHECK_OK(put(&w, block, 1));
  int fd = fd_of(&w, block);
  CHECK_EQ(ftruncate(fd, offset_of(&w, block) + 4096), 0);
  close(fd);
  CHECK_STATUS(get(&w, block, 1), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "chunk 3 of arena master: could not read block 7 at offset");
  CHECK_SAYS(gmi_fail_message(), "ends early");
  CHECK_OK(put(&w, block, 2));
  CHECK_OK(get(&w, block, 2));
  end(&w);
}

static void suite_misuse_is_refused(const flavour_t *f) {
  world_t w = flavoured(f);
  uint8_t *buffer = aligned_alloc(4096, w.config.block_bytes + 4096);
  CHECK(buffer);
  memset(buffer, 1, w.config.block_bytes + 4096);
  CHECK(buffer);
  uint32_t block = take(&w);
  CHECK_STATUS(move(&w, block, buffer, false), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "chunk 3 of arena master: could not read block 0: it was never written");
  CHECK_STATUS(move(&w, 5, buffer, false), GEMINI_ERR_STATE);
  CHECK_SAYS(gmi_fail_message(), "not taken");
  CHECK_STATUS(move(&w, 5, buffer, true), GEMINI_ERR_STATE);
  CHECK_STATUS(move(&w, 12, buffer, true), GEMINI_ERR_INVALID);
  CHECK_STATUS(move(&w, GMI_BLOCK_NONE, buffer, true), GEMINI_ERR_INVALID);
  CHECK_STATUS(move(&w, block, NULL, true), GEMINI_ERR_INVALID);
  CHECK_OK(put(&w, block, 1));
  CHECK_STATUS(move(&w, block, buffer + 8, true), f->buffered ? GEMINI_OK : GEMINI_ERR_INVALID);
  if (!f->buffered) CHECK_OK(get(&w, block, 1)); /* a refused write changes nothing */
  /* Given and taken again, it holds nothing. */
  gmi_store_give(w.store, block);
  CHECK_STATUS(move(&w, block, buffer, false), GEMINI_ERR_STATE);
  CHECK_EQ(take(&w), block);
  CHECK_STATUS(move(&w, block, buffer, false), GEMINI_ERR_STATE);
  CHECK_STATUS(gmi_store_commit(w.store, NULL, 0, NULL, 0), GEMINI_ERR_STATE);
  const gmi_kept_t *kept;
  const void *blob;
  uint32_t count;
  uint64_t bytes;
  CHECK_STATUS(gmi_store_committed(w.store, &kept, &count, &blob, &bytes), GEMINI_ERR_STATE);
  free(buffer);
  end(&w);
}

static void suite_directories_may_go_while_open(const flavour_t *f) {
  world_t w = flavoured(f);
  for (int d = 0; d < w.dir_count; d++) CHECK_EQ(rmdir(w.dirs[d]), 0);
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(get(&w, i, i));
  CHECK_OK(gmi_store_resize(w.store, 24));
  close_store(&w);
  for (int d = 0; d < w.dir_count; d++) CHECK_EQ(mkdir(w.dirs[d], 0700), 0);
  end(&w);
}

static void suite_of(const flavour_t *f) {
  fprintf(stderr, "   %s, %s, %d %s, blocks of %" PRIu64 "\n", f->engine == GMI_ENGINE_URING ? "io_uring" : "threads",
          f->buffered ? "buffered" : "direct", f->directories, f->directories > 1 ? "directories" : "directory",
          f->block_bytes);
  suite_every_block_keeps_its_bytes(f);
  suite_many_at_once_and_from_done(f);
  suite_close_finishes_what_was_submitted(f);
  suite_damage_is_found(f);
  suite_file_that_ends_early_is_an_error(f);
  suite_misuse_is_refused(f);
  suite_directories_may_go_while_open(f);
}

static bool has_uring, has_direct;
static void test_suite_over_engines_and_files(void) {
  for (uint32_t engine = GMI_ENGINE_URING; engine <= GMI_ENGINE_THREADS; engine++)
    for (int buffered = 0; buffered < 2; buffered++)
      for (int directories = 1; directories <= 3; directories += 2)
        for (int large = 0; large < 2; large++) {
          /* Large ones are summed by threads of the store. */
          flavour_t f = { engine, buffered, directories, large ? 320 << 10 : 8192 };
          if ((engine == GMI_ENGINE_URING && !has_uring) || (!buffered && !has_direct)) continue;
          suite_of(&f);
        }
}

/* Longer than what is summed, and than what is moved, in one piece. */
static void test_long_blocks_keep_their_bytes(void) {
  world_t w = world(1);
  w.config.block_bytes = (9 << 20) + 4096;
  w.config.block_count = 3;
  w.config.engine_kind = GMI_ENGINE_AUTO;
  open_store(&w);
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
  for (uint32_t i = 0; i < 3; i++) CHECK_OK(get(&w, i, i));
  uint8_t byte;
  raw(&w, 1, 9 << 20, &byte, 1, false);
  byte ^= 1;
  raw(&w, 1, 9 << 20, &byte, 1, true);
  CHECK_STATUS(get(&w, 1, 1), GEMINI_ERR_FORMAT);
  end(&w);
}

/* ---- free blocks */
/* A block may hold less than it has room for: the rest of it is left as it is, and so are its neighbours. */
static void test_requests_move_a_part_of_their_block(void) {
  static const uint64_t blocks[] = { 16384, (1 << 20) + 8192 }; /* summed where they end, and by a thread */
  for (int i = 0; i < 2; i++) {
    world_t w = world(1);
    w.config.block_bytes = blocks[i];
    open_store(&w);
    uint64_t part = blocks[i] - 8192;
    uint8_t *bytes = buffer_of(&w), *rest = buffer_of(&w);
    for (int b = 0; b < 3; b++) CHECK_OK(put(&w, take(&w), 30 + (uint64_t)b));
    fill(bytes, part, 77);
    memset(bytes + part, 0x55, blocks[i] - part); /* does not go into the file */
    gmi_block_request_t r = { .block = 1, .write = true, .buffer = bytes, .size_bytes = part };
    CHECK_OK(gmi_store_wait(w.store, &r));
    memset(bytes, 0xee, blocks[i]);
    r = (gmi_block_request_t){ .block = 1, .buffer = bytes, .size_bytes = part };
    CHECK_OK(gmi_store_wait(w.store, &r));
    CHECK(holds(bytes, part, 77));
    for (uint64_t at = part; at < blocks[i]; at++) CHECK(bytes[at] == 0xee); /* not behind the part */
    raw(&w, 1, part, rest, 8192, false);
    fill(bytes, blocks[i], 31);
    CHECK(!memcmp(rest, bytes + part, 8192)); /* of the write before */
    CHECK_OK(get(&w, 0, 30));
    CHECK_OK(get(&w, 2, 32));
    /* More or fewer bytes than were written are not what was written. */
    r = (gmi_block_request_t){ .block = 1, .buffer = bytes };
    CHECK_STATUS(gmi_store_wait(w.store, &r), GEMINI_ERR_FORMAT);
    r = (gmi_block_request_t){ .block = 1, .buffer = bytes, .size_bytes = part - 4096 };
    CHECK_STATUS(gmi_store_wait(w.store, &r), GEMINI_ERR_FORMAT);
    const uint64_t wrong[] = { blocks[i] + 4096, part - 512 };
    for (int k = 0; k < 2; k++) {
      r = (gmi_block_request_t){ .block = 1, .buffer = bytes, .size_bytes = wrong[k] };
      CHECK_STATUS(gmi_store_wait(w.store, &r), GEMINI_ERR_INVALID);
      CHECK_SAYS(gmi_fail_message(), "its size is");
    }
    free(bytes);
    free(rest);
    end(&w);
  }
}

static void test_take_keeps_files_even_and_low(void) {
  world_t w = world(3);
  w.config.block_count = 300;
  open_store(&w);
  for (uint32_t i = 0; i < 300; i++) CHECK_EQ(take(&w), i);
  static const uint32_t given[] = { 299, 4, 7, 100, 3, 200 };
  for (int i = 0; i < 6; i++) gmi_store_give(w.store, given[i]);
  /* Files have given 1 (3), 3 (4, 7, 100), 2 (200, 299). */
  CHECK_EQ(take(&w), 4);
  CHECK_EQ(take(&w), 7);
  CHECK_EQ(take(&w), 200);
  CHECK_EQ(take(&w), 3);
  CHECK_EQ(take(&w), 100);
  CHECK_EQ(take(&w), 299);
  uint32_t none;
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_SAYS(gmi_fail_message(), "300 blocks of 8192 bytes are in use, and there are 300");
  gmi_store_give(w.store, 50);
  gmi_store_give(w.store, 50); /* of no effect */
  gmi_store_give(w.store, 5000);
  CHECK_EQ(figures(&w).blocks_used, 299);
  CHECK_EQ(take(&w), 50);
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  end(&w);
}

static off_t size_of(world_t *w, uint32_t file) {
  struct stat info;
  int fd = fd_of(w, file);
  CHECK_EQ(fstat(fd, &info), 0);
  close(fd);
  return info.st_size;
}
static void test_resize_moves_the_space_with_it(void) {
  world_t w = world(3);
  w.config.block_count = 0;
  open_store(&w);
  uint32_t none;
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_OK(gmi_store_resize(w.store, 10));
  CHECK_EQ(size_of(&w, 0), 4 * 8192);
  CHECK_EQ(size_of(&w, 1), 3 * 8192);
  for (uint32_t i = 0; i < 10; i++) CHECK_OK(put(&w, take(&w), i));
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_OK(gmi_store_resize(w.store, 200));
  CHECK_EQ(figures(&w).reserved_bytes, 200 * 8192);
  for (uint32_t i = 0; i < 10; i++) CHECK_OK(get(&w, i, i));
  for (uint32_t i = 10; i < 200; i++) CHECK_EQ(take(&w), i);
  for (uint32_t i = 10; i < 190; i++) gmi_store_give(w.store, i);
  /* The last ones are in the way: the space stays until they are given, but is not handed out. */
  CHECK_OK(gmi_store_resize(w.store, 10));
  CHECK_EQ(figures(&w).block_count, 10);
  CHECK_EQ(figures(&w).reserved_bytes, 200 * 8192);
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_OK(put(&w, 195, 77));
  for (uint32_t i = 196; i < 200; i++) gmi_store_give(w.store, i);
  CHECK_EQ(figures(&w).reserved_bytes, 196 * 8192);
  CHECK_OK(get(&w, 195, 77));
  /* Some of them come back. */
  CHECK_OK(gmi_store_resize(w.store, 12));
  CHECK_EQ(take(&w), 10);
  CHECK_EQ(take(&w), 11);
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  for (uint32_t i = 190; i < 196; i++) gmi_store_give(w.store, i);
  CHECK_EQ(figures(&w).reserved_bytes, 12 * 8192);
  CHECK_EQ(size_of(&w, 0), 4 * 8192);
  for (uint32_t i = 0; i < 10; i++) CHECK_OK(get(&w, i, i));
  /* One that was in the way is not handed out when it no longer is. */
  CHECK_OK(gmi_store_resize(w.store, 14));
  for (uint32_t i = 12; i < 14; i++) CHECK_EQ(take(&w), i);
  gmi_store_give(w.store, 12);
  CHECK_OK(gmi_store_resize(w.store, 12));
  CHECK_OK(gmi_store_resize(w.store, 14));
  CHECK_EQ(take(&w), 12);
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  CHECK_STATUS(gmi_store_resize(w.store, GMI_BLOCK_NONE), GEMINI_ERR_INVALID);
  end(&w);
}

static void test_resize_without_space_changes_nothing(void) {
  world_t w = world(3);
  open_store(&w);
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
  sim.fallocate_error = ENOSPC;
  sim.fallocate_after = 1; /* of the second file */
  CHECK_STATUS(gmi_store_resize(w.store, 60), GEMINI_ERR_OOM_FILE);
  CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
  CHECK_SAYS(gmi_fail_message(), "could not reserve 131072 bytes");
  CHECK_SAYS(gmi_fail_message(), "bytes free");
  sim.fallocate_error = 0;
  for (uint32_t f = 0; f < 3; f++) CHECK_EQ(size_of(&w, f), 4 * 8192);
  CHECK_EQ(figures(&w).block_count, 12);
  CHECK_EQ(figures(&w).reserved_bytes, 12 * 8192);
  uint32_t none;
  CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(get(&w, i, i));
  CHECK_OK(gmi_store_resize(w.store, 60));
  CHECK_EQ(take(&w), 12);
  end(&w);
}

/* The first file is shortened, the second one cannot be. Blocks that can be taken afterwards have their space. */
static void test_resize_that_cannot_shorten_a_file_changes_nothing(void) {
  for (int room = 0; room < 2; room++) {
    world_t w = world(3);
    open_store(&w);
    for (uint32_t i = 0; i < 3; i++) CHECK_OK(put(&w, take(&w), i));
    sim.ftruncate_error = EIO;
    sim.ftruncate_after = 1;
    if (!room) sim.fallocate_error = ENOSPC; /* the space of the first file is taken meanwhile */
    CHECK_STATUS(gmi_store_resize(w.store, 3), GEMINI_ERR_IO);
    CHECK_SAYS(gmi_fail_message(), "could not shorten");
    CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
    sim.ftruncate_error = sim.fallocate_error = 0;
    if (room)
      for (uint32_t f = 0; f < 3; f++) CHECK_EQ(size_of(&w, f), 4 * 8192);
    CHECK_EQ(figures(&w).block_count, room ? 12 : 3);
    for (uint32_t i = 3; i < figures(&w).block_count; i++) CHECK_OK(put(&w, take(&w), i));
    uint32_t none;
    CHECK_STATUS(gmi_store_take(w.store, &none), GEMINI_ERR_OOM_FILE);
    CHECK_OK(gmi_store_resize(w.store, 15));
    CHECK_EQ(figures(&w).reserved_bytes, 15 * 8192);
    for (uint32_t f = 0; f < 3; f++) CHECK_EQ(size_of(&w, f), 5 * 8192);
    for (uint32_t i = room ? 12 : 3; i < 15; i++) CHECK_OK(put(&w, take(&w), i));
    for (uint32_t i = 0; i < 15; i++) CHECK_OK(get(&w, i, i));
    end(&w);
  }
}

/* ---- faults at open */
static void test_open_of_bad_config_is_refused(void) {
  world_t w = world(1);
  static const char *const lists[] = { "", ":", "/tmp:", ":/tmp", "/tmp::/tmp" };
  for (int i = 0; i < 5; i++) {
    w.config.directories = lists[i];
    CHECK_STATUS(try_open(&w), GEMINI_ERR_INVALID);
  }
  static const uint64_t sizes[] = { 0, 100, 513, UINT64_MAX / 512 * 512 };
  for (int i = 0; i < 4; i++) {
    w.config.block_bytes = sizes[i];
    CHECK_STATUS(try_open(&w), GEMINI_ERR_INVALID);
  }
  w.config.block_bytes = UINT64_C(1) << 40;
  w.config.block_count = 1 << 30;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_INVALID);
  w.config.block_bytes = 512;
  w.config.block_count = GMI_BLOCK_NONE;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_INVALID);
  w.config.block_count = 1;
  w.config.keep = true;
  static const char *const names[] = { NULL, "", "a/b" };
  for (int i = 0; i < 3; i++) {
    w.config.checkpoint_name = names[i];
    CHECK_STATUS(try_open(&w), GEMINI_ERR_INVALID);
  }
  end(&w);
}

static void test_open_in_directory_that_is_none_names_it(void) {
  world_t w = world(3);
  CHECK_EQ(rmdir(w.dirs[1]), 0);
  CHECK_STATUS(try_open(&w), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
  CHECK_SAYS(gmi_fail_message(), "No such file or directory");
  int fd = open(w.dirs[1], O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  CHECK(fd >= 0);
  close(fd);
  CHECK_STATUS(try_open(&w), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
  CHECK_SAYS(gmi_fail_message(), "Not a directory");
  CHECK_EQ(unlink(w.dirs[1]), 0);
  CHECK_EQ(mkdir(w.dirs[1], 0700), 0);
  end(&w);
}

/* More than there is: refused before anything is taken. */
static void test_open_with_more_than_the_file_system_has_is_refused(void) {
  world_t w = world(3);
  w.config.block_bytes = UINT64_C(1) << 30;
  w.config.block_count = 3 << 20; /* 3 PiB */
  CHECK_STATUS(try_open(&w), GEMINI_ERR_OOM_FILE);
  CHECK_SAYS(gmi_fail_message(), "could not reserve 1125899906842624 bytes in /");
  CHECK_SAYS(gmi_fail_message(), w.dirs[0]);
  CHECK_SAYS(gmi_fail_message(), "No space left on device; its file system has ");
  end(&w);
}

static void test_open_without_space_leaves_nothing(void) {
  for (int kept = 0; kept < 2; kept++)
    for (int at = 0; at < 3; at++) {
      world_t w = world(3);
      w.config.keep = kept;
      w.config.checkpoint_name = kept ? "kept" : NULL;
      sim.fallocate_error = at == 2 ? EDQUOT : ENOSPC;
      sim.fallocate_after = at;
      CHECK_STATUS(try_open(&w), GEMINI_ERR_OOM_FILE);
      CHECK_SAYS(gmi_fail_message(), w.dirs[at]);
      CHECK_SAYS(gmi_fail_message(), "could not reserve 32768 bytes");
      end(&w);
    }
}

static void test_open_without_fallocate_says_so_and_late_enospc_is_clear(void) {
  world_t w = world(1);
  sim.no_fallocate = EOPNOTSUPP;
  open_store(&w);
  CHECK(!figures(&w).reserved_up_front);
  CHECK_EQ(figures(&w).reserved_bytes, 0);
  CHECK_SAYS(figures(&w).note, "cannot reserve space");
  uint32_t old = take(&w), new = take(&w);
  CHECK_OK(put(&w, old, 1));
  sim.write_error = ENOSPC;
  CHECK_STATUS(put(&w, new, 2), GEMINI_ERR_OOM_FILE);
  CHECK_SAYS(gmi_fail_message(),
             "chunk 3 of arena master: could not write block 1 at offset 8192 of an unnamed file in ");
  CHECK_SAYS(gmi_fail_message(), w.dirs[0]);
  CHECK_SAYS(gmi_fail_message(), "No space left on device");
  CHECK_OK(get(&w, old, 1));
  CHECK_STATUS(get(&w, new, 2), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "the last write to it failed");
  sim.write_error = 0;
  CHECK_OK(put(&w, new, 3));
  CHECK_OK(get(&w, new, 3));
  gmi_store_figures_t before = figures(&w);
  CHECK_OK(gmi_store_resize(w.store, 100));
  CHECK_EQ(size_of(&w, 0), 100 * 8192);
  CHECK(!strcmp(figures(&w).note, before.note)); /* said once */
  end(&w);
}

static void test_open_without_direct_or_tmpfile_still_works(void) {
  for (int direct = 0; direct < 2; direct++)
    for (int tmpfile = 0; tmpfile < 3; tmpfile++) {
      world_t w = world(3);
      sim.no_direct = direct ? 0 : EINVAL;
      sim.no_tmpfile = tmpfile == 0 ? 0 : tmpfile == 1 ? EOPNOTSUPP : EISDIR;
      open_store(&w);
      CHECK_EQ(figures(&w).direct, direct && has_direct);
      if (!direct) CHECK_SAYS(figures(&w).note, "has no O_DIRECT: buffered");
      for (int d = 0; d < 3; d++) CHECK_EQ(names_in(w.dirs[d]), 0); /* no names while it is open */
      for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
      for (uint32_t i = 0; i < 12; i++) CHECK_OK(get(&w, i, i));
      end(&w);
    }
}

static void test_open_that_cannot_unlink_fails(void) {
  world_t w = world(1);
  sim.no_tmpfile = EOPNOTSUPP;
  sim.unlink_error = EIO;
  CHECK_STATUS(try_open(&w), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "could not unlink");
  CHECK_SAYS(gmi_fail_message(), w.dirs[0]);
  DIR *dir = opendir(w.dirs[0]);
  CHECK(dir);
  for (struct dirent *e; (e = readdir(dir));) unlinkat(dirfd(dir), e->d_name, 0);
  closedir(dir);
  end(&w);
}

/* Where the system does not say what O_DIRECT demands, 4096 is assumed; blocks that are no multiple go buffered. */
static void test_open_with_blocks_that_do_not_fit_direct_is_buffered(void) {
  if (!has_direct) return;
  world_t w = world(1);
  sim.no_statx = ENOSYS;
  w.config.block_bytes = 512 * 3;
  open_store(&w);
  CHECK(!figures(&w).direct);
  CHECK_SAYS(figures(&w).note, "wants multiples of 4096 for O_DIRECT: buffered");
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(get(&w, i, i));
  end(&w);
}

static void test_open_in_memory_is_said(void) {
  world_t w = world(1);
  sim.fake_type = 0x01021994; /* TMPFS_MAGIC */
  open_store(&w);
  CHECK_SAYS(figures(&w).note, "is memory (tmpfs)");
  end(&w);
}

/* A real one, where there is one. */
static void test_suite_in_memory(void) {
  if (setenv("TMPDIR", "/dev/shm", 1) || access("/dev/shm", W_OK)) return;
  world_t w = world(1);
  open_store(&w);
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(put(&w, take(&w), i));
  for (uint32_t i = 0; i < 12; i++) CHECK_OK(get(&w, i, i));
  end(&w);
}

/* ---- faults of transfers; io_uring's own are the engine's tests' */
static void test_read_error_names_everything_and_passes(void) {
  world_t w = world(3);
  open_store(&w);
  for (uint32_t i = 0; i < 8; i++) CHECK_OK(put(&w, take(&w), i));
  sim.read_error = EIO;
  CHECK_STATUS(get(&w, 7, 7), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(),
             "chunk 3 of arena master: could not read block 7 at offset 16384 of an unnamed file in ");
  CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
  CHECK_SAYS(gmi_fail_message(), "Input/output error");
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  CHECK_OK(gemini_last_error(&info));
  CHECK_EQ(info.native_code, EIO);
  sim.read_error = 0;
  CHECK_OK(get(&w, 7, 7));
  end(&w);
}

static void test_write_error_leaves_the_block_unreadable_until_written(void) {
  world_t w = world(3);
  open_store(&w);
  for (uint32_t i = 0; i < 8; i++) CHECK_OK(put(&w, take(&w), i));
  sim.write_error = EIO;
  CHECK_STATUS(put(&w, 7, 99), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(),
             "chunk 3 of arena master: could not write block 7 at offset 16384 of an unnamed file in ");
  CHECK_SAYS(gmi_fail_message(), w.dirs[1]);
  sim.write_error = 0;
  CHECK_STATUS(get(&w, 7, 7), GEMINI_ERR_IO);
  CHECK_SAYS(gmi_fail_message(), "the last write to it failed");
  for (uint32_t i = 0; i < 7; i++) CHECK_OK(get(&w, i, i));
  CHECK_OK(put(&w, 7, 100));
  CHECK_OK(get(&w, 7, 100));
  end(&w);
}

/* Of a large block, only the second part fails. */
static void test_write_error_in_the_middle_of_a_block(void) {
  world_t w = world(1);
  w.config.block_bytes = 4 << 20;
  open_store(&w);
  uint32_t block = take(&w);
  CHECK_OK(put(&w, block, 1));
  sim.write_error = EIO;
  sim.write_after = 1;
  CHECK_STATUS(put(&w, block, 2), GEMINI_ERR_IO);
  sim.write_error = 0;
  CHECK_STATUS(get(&w, block, 1), GEMINI_ERR_IO);
  CHECK_OK(put(&w, block, 3));
  CHECK_OK(get(&w, block, 3));
  end(&w);
}

static void test_short_and_interrupted_transfers_go_on(void) {
  world_t w = world(1);
  w.config.block_bytes = 1 << 20;
  open_store(&w);
  for (uint32_t i = 0; i < 6; i++) {
    uint32_t block = take(&w);
    sim.short_transfers = 5;
    sim.interruptions = 3;
    CHECK_OK(put(&w, block, i));
    sim.short_transfers = 5;
    sim.interruptions = 3;
    CHECK_OK(get(&w, block, i));
  }
  CHECK_EQ(sim.short_transfers, 0);
  end(&w);
}

static void test_without_checksums_nothing_is_compared(void) {
  world_t w = world(1);
  w.config.checksum = false;
  open_store(&w);
  uint32_t block = take(&w);
  CHECK_OK(put(&w, block, 1));
  CHECK_OK(get(&w, block, 1));
  uint8_t *bytes = buffer_of(&w);
  fill(bytes, 8192, 2);
  raw(&w, block, 0, bytes, 8192, true);
  CHECK_OK(get(&w, block, 2));
  free(bytes);
  end(&w);
}

/* ---- what is in flight on a block */
static void post(gmi_block_request_t *r) { sem_post(r->user); }
static void test_write_of_block_that_is_read_is_refused(void) {
  world_t w = world(1);
  open_store(&w);
  uint32_t block = take(&w);
  CHECK_OK(put(&w, block, 1));
  sem_t over;
  sem_init(&over, 0, 0);
  sim.hold_reads = true;
  uint8_t *buffer = buffer_of(&w), *other = buffer_of(&w);
  gmi_block_request_t read = { .block = block, .buffer = buffer, .done = post, .user = &over };
  gmi_store_submit(w.store, &read);
  sem_wait(&sim.reading);
  CHECK_STATUS(move(&w, block, other, true), GEMINI_ERR_BUSY);
  CHECK_SAYS(gmi_fail_message(), "it is being read");
  /* Given while it is read, it is not handed out until that is over. */
  gmi_store_give(w.store, block);
  CHECK_EQ(take(&w), 1);
  sim.hold_reads = false;
  sem_post(&sim.go_on);
  sem_wait(&over);
  CHECK_EQ(read.io.status, GEMINI_OK);
  CHECK(holds(buffer, 8192, 1));
  CHECK_EQ(take(&w), block);
  free(buffer);
  free(other);
  sem_destroy(&over);
  end(&w);
}

/* ---- from many threads at once */
typedef struct user {
  pthread_t thread;
  world_t *w;
  uint64_t seed;
} user_t;
static void *use(void *user) {
  user_t *u = user;
  uint64_t random = u->seed;
  uint32_t mine[4];
  uint64_t seeds[4];
  int count = 0;
  for (int step = 0; step < 150; step++) {
    uint64_t what = check_random(&random) >> 33;
    if (count < 4 && what % 3 == 0) {
      uint32_t block;
      if (gmi_store_take(u->w->store, &block)) continue;
      seeds[count] = what;
      CHECK_OK(put(u->w, block, what));
      mine[count++] = block;
    } else if (count) {
      int k = (int)(what / 3 % (uint64_t)count);
      CHECK_OK(get(u->w, mine[k], seeds[k]));
      if (what % 3 == 1) {
        gmi_store_give(u->w->store, mine[k]);
        count--;
        mine[k] = mine[count];
        seeds[k] = seeds[count];
      }
    }
    if (what % 50 == 7) CHECK_OK(gmi_store_resize(u->w->store, 12 + (uint32_t)(what / 64 % 30)));
    if (what % 50 == 8) (void)figures(u->w);
  }
  for (int k = 0; k < count; k++) gmi_store_give(u->w->store, mine[k]);
  return NULL;
}
static void test_threads_share_a_store(void) {
  for (int large = 0; large < 2; large++) {
    world_t w = world(2);
    w.config.engine_kind = GMI_ENGINE_AUTO;
    w.config.block_count = 20;
    w.config.block_bytes = large ? 320 << 10 : 4096;
    open_store(&w);
    user_t users[4];
    for (int i = 0; i < 4; i++) {
      users[i] = (user_t){ .w = &w, .seed = (uint64_t)i + 1 };
      CHECK_EQ(pthread_create(&users[i].thread, NULL, use, &users[i]), 0);
    }
    for (int i = 0; i < 4; i++) pthread_join(users[i].thread, NULL);
    CHECK_EQ(figures(&w).blocks_used, 0);
    end(&w);
  }
}

/* What the machine has: the suite goes without what it has not. */
static void look(void) {
  gmi_engine_config_t config = { .kind = GMI_ENGINE_URING };
  gmi_engine_t *engine;
  has_uring = !gmi_engine_open(&config, &engine);
  if (has_uring) gmi_engine_close(engine);
  world_t w = world(1);
  open_store(&w);
  has_direct = figures(&w).direct;
  gmi_store_close(w.store);
  CHECK_EQ(rmdir(w.dirs[0]), 0);
  if (!has_uring) fprintf(stderr, "  io_uring is not available here\n");
  if (!has_direct) fprintf(stderr, "  no O_DIRECT in TMPDIR\n");
}

int main(void) {
  look();
  RUN(test_suite_over_engines_and_files);
  RUN(test_long_blocks_keep_their_bytes);
  RUN(test_requests_move_a_part_of_their_block);
  RUN(test_take_keeps_files_even_and_low);
  RUN(test_resize_moves_the_space_with_it);
  RUN(test_resize_without_space_changes_nothing);
  RUN(test_resize_that_cannot_shorten_a_file_changes_nothing);
  RUN(test_open_of_bad_config_is_refused);
  RUN(test_open_in_directory_that_is_none_names_it);
  RUN(test_open_with_more_than_the_file_system_has_is_refused);
  RUN(test_open_without_space_leaves_nothing);
  RUN(test_open_without_fallocate_says_so_and_late_enospc_is_clear);
  RUN(test_open_without_direct_or_tmpfile_still_works);
  RUN(test_open_that_cannot_unlink_fails);
  RUN(test_open_with_blocks_that_do_not_fit_direct_is_buffered);
  RUN(test_open_in_memory_is_said);
  RUN(test_read_error_names_everything_and_passes);
  RUN(test_write_error_leaves_the_block_unreadable_until_written);
  RUN(test_write_error_in_the_middle_of_a_block);
  RUN(test_short_and_interrupted_transfers_go_on);
  RUN(test_without_checksums_nothing_is_compared);
  RUN(test_write_of_block_that_is_read_is_refused);
  RUN(test_threads_share_a_store);
  RUN(test_suite_in_memory);
  return check_done();
}
