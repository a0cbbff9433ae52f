/* Chunks in files, at the manager's level: updates with states in files, with every fault that the system calls below
 * can have, by both engines. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiers_world.h"

/* ---- without faults: three tiers against plain arrays */
static void test_updates_in_three_tiers_are_those_of_plain_arrays(void) {
  for (uint32_t late = 0; late < 2; late++) {
    opt_t *o = opt_open(tiers_config(6, 14, 120), 12);
    uint64_t r = 11 + late;
    for (int step = 0; step < 5; step++) {
      if (step == 3) faults.delay_us[0] = faults.delay_us[1] = 100;
      CHECK_OK(opt_update(o, late ? GEMINI_UPDATE_LATE : 0));
      opt_model(o, 0, o->n);
      if (step % 2) continue; /* a second one on top of what still waits */
      for (int k = 0; k < 12; k++) {
        int a = (int)below(&r, OPT_ARENAS);
        uint64_t size = o->n * opt_bytes[a], at = below(&r, size), part = 1 + below(&r, 2 * WORLD_CHUNK);
        if (part > size - at) part = size - at;
        opt_check_range(o, a, at, part, a == PARAMS && k % 2 ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST);
      }
    }
    CHECK_OK(gemini_update_wait(o->w.mgr));
    CHECK_EQ(opt_waits(o), 0);
    opt_check(o);
    figures_t s = world_stats(&o->w);
    CHECK(s.moved_chunks[LINK_H2F][GEMINI_REASON_PRESSURE] > 20);
    CHECK(s.moved_chunks[LINK_F2H][GEMINI_REASON_UPDATE] > 20);
    CHECK(s.peak_bytes[GEMINI_TIER_HOST] <= 14 * WORLD_CHUNK);
    CHECK_EQ(s.file_engine, engine);
    opt_close(o);
  }
}

/* Transfers that fall short, or are interrupted, go on as if nothing had been. */
static void test_short_and_interrupted_transfers_go_on(void) {
  opt_t *o = opt_open(tiers_config(6, 14, 120), 12);
  for (int step = 0; step < 3; step++) {
    faults.shortened = 150;
    faults.interrupted = 60;
    CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
    opt_model(o, 0, o->n);
    CHECK_OK(gemini_update_wait(o->w.mgr));
  }
  CHECK(faults.shortened < 150 && faults.interrupted < 60);
  faults.shortened = faults.interrupted = 0;
  opt_check(o);
  opt_close(o);
}

/* ---- reads that fail */
static void check_names_a_chunk(gemini_status_t status, const char *what) {
  gemini_error_info_t e = world_error();
  CHECK_EQ(e.status, status);
  CHECK_SAYS(e.message, what);
  CHECK_SAYS(e.message, "chunk ");
  CHECK_SAYS(e.message, " of arena ");
  CHECK_SAYS(e.message, " at offset ");
  CHECK_SAYS(e.message, "gemini."); /* the directory */
}

static void test_an_acquire_whose_read_fails_says_so_and_loses_nothing(void) {
  opt_t *o = opt_open(tiers_config(6, 14, 120), 8);
  opt_to_files(o, MASTER);
  opt_to_files(o, MOMENTUM);
  for (uint32_t tier = GEMINI_TIER_DEVICE; tier <= GEMINI_TIER_HOST; tier++) {
    break_files(false, EIO, 0, -1);
    gemini_access_t x = world_part(o->arenas[MASTER], 3 * WORLD_CHUNK, WORLD_CHUNK + 5, GEMINI_READ, tier);
    CHECK_STATUS(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_IO);
    CHECK_EQ(world_error().native_code, EIO);
    check_names_a_chunk(GEMINI_ERR_IO, "could not read");
    CHECK_SAYS(world_error().message, "of arena master");
    CHECK(chunks_right(&o->w));
    /* The same behind a chunk that would be overwritten, whose frame goes again. */
    gemini_access_t both[] = { world_part(o->arenas[MOMENTUM], 0, WORLD_CHUNK, GEMINI_WRITE, GEMINI_TIER_DEVICE), x };
    CHECK_STATUS(gemini_acquire(o->w.mgr, both, 2, GEMINI_STREAM_CALLER), GEMINI_ERR_IO);
    CHECK_EQ(world_error().native_code, EIO);
    check_names_a_chunk(GEMINI_ERR_IO, "could not read");
    CHECK(chunks_right(&o->w));
    int out = open("/dev/null", O_WRONLY);
    gemini_access_t whole = world_part(o->arenas[MASTER], 6 * WORLD_CHUNK, 100, GEMINI_READ, 0);
    CHECK_STATUS(gemini_store(o->w.mgr, &whole, out, 0), GEMINI_ERR_IO);
    close(out);
    double norm;
    CHECK_STATUS(gemini_norm(o->w.mgr, &whole, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm), GEMINI_ERR_IO);
    gemini_access_t move = world_part(o->arenas[MASTER], 9 * WORLD_CHUNK, 1, 0, tier);
    CHECK_STATUS(gemini_move(o->w.mgr, &move, 1), GEMINI_ERR_IO);
    mend_files();
    CHECK_OK(gemini_move(o->w.mgr, &move, 1));
    opt_check_range(o, MASTER, 3 * WORLD_CHUNK, WORLD_CHUNK + 5, tier);
    opt_to_files(o, MASTER);
  }
  opt_check(o);
  opt_close(o);
}

/* One of a range's chunks cannot be read, while the call is at the next ones. */
static void test_a_move_tells_of_each_chunk_that_did_not_come(void) {
  for (int failing = 0; failing < 4; failing++) {
    opt_t *o = opt_open(tiers_config(6, 20, 120), 4);
    opt_to_files(o, MASTER);
    faults.delay_us[0] = engine == GEMINI_FILE_ENGINE_THREADS ? 2000 : 0;
    uint32_t block = chunk_of(&o->w, o->arenas[MASTER], (uint64_t)failing * WORLD_CHUNK)->block_;
    faults.only_at[0] = (long long)(block * WORLD_CHUNK) + 1;
    break_files(false, EIO, 0, -1);
    gemini_access_t x = world_part(o->arenas[MASTER], 0, 6 * WORLD_CHUNK, 0, GEMINI_TIER_HOST);
    CHECK_STATUS(gemini_move(o->w.mgr, &x, 1), GEMINI_ERR_IO);
    CHECK(chunks_right(&o->w));
    faults.only_at[0] = 0;
    mend_files();
    CHECK_OK(gemini_move(o->w.mgr, &x, 1));
    for (uint64_t at = 0; at < x.size_bytes; at += WORLD_CHUNK)
      CHECK(gmi_chunk_has(chunk_of(&o->w, o->arenas[MASTER], at), GMI_VALID_HOST));
    opt_check(o);
    opt_close(o);
  }
}

/* A read ahead that fails is no matter to who wants the bytes, as long as it can be done then. */
static void test_a_read_ahead_that_fails_is_tried_again_by_who_wants_it(void) {
  for (uint32_t tier = GEMINI_TIER_DEVICE; tier <= GEMINI_TIER_HOST; tier++) {
    for (int over = 0; over < 2; over++) { /* when it is wanted: still to fail, or failed */
      opt_t *o = opt_open(tiers_config(6, 20, 120), 4);
      opt_to_files(o, MASTER);
      faults.delay_us[0] = 20000;
      break_files(false, EIO, 0, 1);
      gemini_access_t x = world_part(o->arenas[MASTER], 0, WORLD_CHUNK, GEMINI_READ, GEMINI_TIER_HOST);
      CHECK_OK(gemini_hint(o->w.mgr, &x, 1));
      if (over) sleep_us(60000);
      opt_check_range(o, MASTER, 0, WORLD_CHUNK, tier);
      CHECK_EQ(faults.left[0], 0);
      mend_files();
      faults.delay_us[0] = 0;
      opt_check(o);
      opt_close(o);
    }
  }
}

/* Nor does it matter to who overwrites them. */
static void test_a_read_ahead_that_fails_harms_nobody_who_overwrites(void) {
  for (int on_host = 0; on_host < 2; on_host++) {
    opt_t *o = opt_open(tiers_config(6, 20, 120), 4);
    opt_to_files(o, MASTER);
    faults.delay_us[0] = 20000;
    break_files(false, EIO, 0, -1);
    gemini_access_t hint = world_part(o->arenas[MASTER], 0, 2 * WORLD_CHUNK, 0, GEMINI_TIER_HOST);
    CHECK_OK(gemini_hint(o->w.mgr, &hint, 1));
    for (uint64_t at = 0; at < 2 * WORLD_CHUNK; at += WORLD_CHUNK) { /* while it is read */
      for (uint64_t i = 0; i < WORLD_CHUNK; i++) o->model[MASTER][at + i] = world_byte(77, at + i);
      gemini_access_t x =
          world_part(o->arenas[MASTER], at, WORLD_CHUNK, GEMINI_WRITE, on_host ? GEMINI_TIER_HOST : GEMINI_TIER_DEVICE);
      gemini_status_t status = gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER);
      CHECK_EQ(status, GEMINI_OK);
      memcpy(x.ptr, o->model[MASTER] + at, WORLD_CHUNK);
      CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
    sleep_us(60000); /* now it has failed */
    CHECK(chunks_right(&o->w));
    gemini_access_t down = world_part(o->arenas[MASTER], 0, 2 * WORLD_CHUNK, 0, GEMINI_TIER_HOST);
    CHECK_OK(gemini_move(o->w.mgr, &down, 1));
    CHECK(chunks_right(&o->w));
    mend_files();
    faults.delay_us[0] = 0;
    opt_check(o);
    opt_close(o);
  }
}

/* What an update that did not run left: each piece is old or new, as a whole. Returns how many are old. */
static uint64_t settle_model(opt_t *o) {
  uint64_t unit = WORLD_CHUNK / 2, old = 0;
  for (uint64_t at = 0; at < o->n; at += unit) {
    uint64_t count = o->n - at < unit ? o->n - at : unit;
    gemini_access_t x = world_part(o->arenas[MASTER], at * 4, 4, GEMINI_READ, GEMINI_TIER_HOST);
    CHECK_OK(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    bool is_old = !memcmp(x.ptr, o->model[MASTER] + at * 4, 4);
    CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    old += is_old;
    if (!is_old) opt_model(o, at, count);
  }
  return old;
}

static void test_an_update_whose_reads_fail_is_reported_and_loses_nothing(void) {
  for (int late = 0; late < 2; late++) {
    for (int after = 0; after < 8; after += 3) {
      for (int delay = 0; delay <= 500; delay += 500) { /* they fail at once, or when all has been queued */
        opt_t *o = opt_open(tiers_config(6, 15, 120), 6);
        for (int a = 0; a < OPT_ARENAS; a++) opt_to_files(o, a);
        faults.delay_us[0] = delay;
        bool for_long = after % 2 == 0; /* else it works when it is tried again */
        break_files(false, EIO, after, for_long ? -1 : 2);
        gemini_status_t status = opt_update(o, late ? GEMINI_UPDATE_LATE : 0);
        CHECK(status == GEMINI_ERR_PENDING ||
              (!status && (late || !for_long))); /* an error else: it was not accepted */
        if (status) check_names_a_chunk(status, "could not read");
        gemini_status_t waited = gemini_update_wait(o->w.mgr);
        CHECK(waited == GEMINI_ERR_IO || (!waited && !for_long));
        if (waited) check_names_a_chunk(GEMINI_ERR_IO, "could not read");
        mend_files();
        faults.delay_us[0] = 0;
        gemini_status_t stays = gemini_update_wait(o->w.mgr);   /* says so for ever, or has caught up */
        for (int tries = 0; tries < 3 && opt_waits(o); tries++) /* what failed before it was mended is told once */
          stays = gemini_update_wait(o->w.mgr);
        CHECK(stays == GEMINI_ERR_IO || !stays);
        CHECK_EQ(opt_waits(o), 0);
        CHECK(chunks_right(&o->w));
        uint64_t old = settle_model(o);
        CHECK(!old || status || waited);
        CHECK(!stays || old);
        opt_check(o);
        /* Where an update is missing, others are refused, and the end says so. */
        CHECK_STATUS(opt_update(o, late ? GEMINI_UPDATE_LATE : 0), stays);
        if (!stays) opt_model(o, 0, o->n);
        CHECK_STATUS(gemini_update_wait(o->w.mgr), stays);
        opt_check(o);
        CHECK_STATUS(gemini_manager_close(o->w.mgr), stays);
        CHECK_EQ(rmdir(o->w.dir), 0);
        opt_free(o);
      }
    }
  }
}

/* ---- writes that fail */
/* Whose update waits for room that cannot be made is not given out without it, however often it is asked for. */
static void check_waiting_are_refused(opt_t *o, gemini_status_t expected) {
  gmi_manager_t *m = gmi_manager_get(o->w.mgr);
  int waiting = 0;
  for (int round = 0; round < 3; round++) {
    for (int a = 0; a < OPT_ARENAS; a++) {
      for (uint64_t at = 0; at < o->n * opt_bytes[a]; at += WORLD_CHUNK) {
        gmi_lock(m, __func__);
        bool waits = chunk_of(&o->w, o->arenas[a], at)->deferred_;
        gmi_unlock(m);
        if (!waits) continue;
        waiting++;
        gemini_access_t x = world_part(o->arenas[a], at, 100, GEMINI_READ, (uint32_t)round % 2);
        CHECK_STATUS(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER), expected);
        CHECK_STATUS(gemini_update_wait(o->w.mgr), expected);
      }
    }
  }
  CHECK(waiting > 6);
  CHECK(chunks_right(&o->w));
}

static void test_writes_that_fail_lose_nothing_and_updates_catch_up(void) {
  static const int errors[] = { EIO, ENOSPC };
  for (int e = 0; e < 2; e++) {
    for (int late = 0; late < 2; late++) {
      gemini_status_t expected = errors[e] == EIO ? GEMINI_ERR_IO : GEMINI_ERR_OOM_FILE;
      opt_t *o = opt_open(tiers_config(6, 15, 120), 6);
      break_files(true, errors[e], 0, -1);
      gemini_status_t status = opt_update(o, late ? GEMINI_UPDATE_LATE : 0);
      CHECK_EQ(status, late ? GEMINI_OK : GEMINI_ERR_PENDING);
      if (status) check_names_a_chunk(status, "could not write");
      CHECK_STATUS(gemini_update_wait(o->w.mgr), expected);
      check_names_a_chunk(expected, "could not write");
      CHECK_EQ(world_error().native_code, errors[e]);
      CHECK(chunks_right(&o->w));
      check_waiting_are_refused(o, expected);
      mend_files();
      gemini_status_t mended = gemini_update_wait(o->w.mgr); /* what failed before is told once */
      for (int tries = 0; tries < 3 && mended; tries++) mended = gemini_update_wait(o->w.mgr);
      CHECK_EQ(mended, GEMINI_OK);
      CHECK_EQ(opt_waits(o), 0);
      opt_model(o, 0, o->n);
      opt_check(o);
      CHECK_OK(opt_update(o, 0));
      opt_model(o, 0, o->n);
      opt_check(o);
      opt_close(o);
    }
  }
}

/* The host copy of a chunk whose write failed is as good as before: its updates run. */
static void test_a_chunk_that_could_not_be_written_can_be_updated(void) {
  opt_t *o = opt_open(tiers_config(6, 40, 120), 4);
  break_files(true, ENOSPC, 0, -1);
  gemini_access_t x = world_part(o->arenas[MASTER], 0, 3 * WORLD_CHUNK, 0, GEMINI_TIER_FILE);
  CHECK_STATUS(gemini_move(o->w.mgr, &x, 1), GEMINI_ERR_OOM_FILE);
  check_names_a_chunk(GEMINI_ERR_OOM_FILE, "could not write");
  mend_files();
  CHECK_OK(opt_update(o, 0));
  opt_model(o, 0, o->n);
  opt_check(o);
  opt_close(o);
}

/* A slot into which a read failed gets other bytes, whose updates have nothing to do with it. */
static void test_a_failed_read_does_not_follow_its_slot(void) {
  for (int how = 0; how < 4; how++) {
    opt_t *o = opt_open(tiers_config(6, 20, 120), 4);
    opt_to_files(o, MASTER);
    break_files(false, EIO, 0, -1);
    gemini_access_t x = world_part(o->arenas[MASTER], 0, WORLD_CHUNK, GEMINI_READ, GEMINI_TIER_HOST);
    CHECK_STATUS(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_IO);
    mend_files();
    if (how == 3) {
      CHECK_OK(gemini_zero(o->w.mgr, &x));
      memset(o->model[MASTER], 0, WORLD_CHUNK);
    } else { /* written whole, so that nothing is read; on the device, from where it comes down into the same slot */
      x.mode = GEMINI_WRITE;
      x.tier = how == 2 ? GEMINI_TIER_HOST : GEMINI_TIER_DEVICE;
      CHECK_OK(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      memcpy(x.ptr, o->model[MASTER], WORLD_CHUNK);
      CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      x.tier = GEMINI_TIER_HOST;
      if (how == 1) CHECK_OK(gemini_move(o->w.mgr, &x, 1));
    }
    CHECK_OK(opt_update(o, 0));
    opt_model(o, 0, o->n);
    opt_check(o);
    opt_close(o);
  }
}

/* ---- damage on disk */
typedef struct {
  int fd; /* a second descriptor of the chunks' file */
  off_t offset;
} place_t;
/* Where a chunk's block lies: the file is found among the process's own. */
static place_t place_of(opt_t *o, int a, uint64_t offset) {
  place_t p = { -1, 0 };
  uint32_t block = chunk_of(&o->w, o->arenas[a], offset)->block_;
  CHECK(block != GMI_NONE);
  p.offset = (off_t)(block * WORLD_CHUNK);
  for (int fd = 0; fd < 1024 && p.fd < 0; fd++) {
    char link[64], target[256] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, target, sizeof target - 1) > 0 && strstr(target, o->w.dir) && !strstr(target, "test_"))
      p.fd = open(link, O_RDWR | O_CLOEXEC);
  }
  CHECK(p.fd >= 0);
  return p;
}
static void put_back(place_t p, uint8_t *bytes, bool write) {
  CHECK_EQ(write ? pwrite(p.fd, bytes, WORLD_CHUNK, p.offset) : pread(p.fd, bytes, WORLD_CHUNK, p.offset), WORLD_CHUNK);
}

static void test_damaged_and_stale_blocks_are_named_and_never_used(void) {
  opt_t *o = opt_open(tiers_config(6, 16, 120), 4);
  uint8_t *good = malloc(WORLD_CHUNK), *bad = malloc(WORLD_CHUNK);
  CHECK(good && bad);
  uint64_t at = 5 * WORLD_CHUNK;
  opt_to_files(o, MASTER);
  place_t p = place_of(o, MASTER, at);
  put_back(p, good, false);
  CHECK(!memcmp(good, o->model[MASTER] + at, WORLD_CHUNK)); /* it is the place */
  memcpy(bad, good, WORLD_CHUNK);
  bad[54321] ^= 0x10;
  put_back(p, bad, true);
  for (uint32_t tier = 0; tier < 2; tier++) {
    gemini_access_t x = world_part(o->arenas[MASTER], at + 100, 10, GEMINI_READ, tier);
    CHECK_STATUS(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_FORMAT);
    check_names_a_chunk(GEMINI_ERR_FORMAT, "damaged");
    CHECK_SAYS(world_error().message, "chunk 5 of arena master");
  }
  CHECK_STATUS(opt_update(o, 0), GEMINI_ERR_PENDING);
  CHECK_SAYS(world_error().message, "chunk 5 of arena master");
  put_back(p, good, true); /* the disk has come to its senses: nothing was lost */
  gemini_status_t stays = gemini_update_wait(o->w.mgr);
  for (int tries = 0; tries < 3 && opt_waits(o); tries++) stays = gemini_update_wait(o->w.mgr);
  CHECK(!stays || stays == GEMINI_ERR_FORMAT);
  uint64_t old = settle_model(o); /* the piece of that chunk was not computed on wrong bytes */
  CHECK(!stays || old == 1);
  opt_check(o);
  close(p.fd);
  CHECK_STATUS(gemini_manager_close(o->w.mgr), stays);
  CHECK_EQ(rmdir(o->w.dir), 0);
  opt_free(o);

  o = opt_open(tiers_config(6, 16, 120), 4);
  opt_to_files(o, MASTER);
  p = place_of(o, MASTER, at);
  uint32_t block = chunk_of(&o->w, o->arenas[MASTER], at)->block_;
  put_back(p, bad, false);
  for (int i = 0; i < 50; i++) { /* until the same block has a newer generation of it */
    for (uint64_t k = 0; k < WORLD_CHUNK; k++) o->model[MASTER][at + k]++;
    gemini_access_t x = world_part(o->arenas[MASTER], at, WORLD_CHUNK, GEMINI_WRITE, GEMINI_TIER_HOST);
    CHECK_OK(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    memcpy(x.ptr, o->model[MASTER] + at, WORLD_CHUNK);
    CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    opt_to_files(o, MASTER);
    if (chunk_of(&o->w, o->arenas[MASTER], at)->block_ == block && i > 0) break;
  }
  CHECK_EQ(chunk_of(&o->w, o->arenas[MASTER], at)->block_, block);
  put_back(p, good, false);
  memcpy(bad, good, WORLD_CHUNK);
  for (uint64_t k = 0; k < WORLD_CHUNK; k++) bad[k]--; /* what it held one generation before */
  put_back(p, bad, true);
  gemini_access_t x = world_part(o->arenas[MASTER], at, WORLD_CHUNK, GEMINI_READ, GEMINI_TIER_HOST);
  CHECK_STATUS(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_FORMAT);
  check_names_a_chunk(GEMINI_ERR_FORMAT, "stale");
  put_back(p, good, true);
  opt_check(o);
  close(p.fd);
  opt_close(o);
  free(good);
  free(bad);
}

/* ---- opening */
static void test_io_uring_refused_falls_back_or_says_so(void) {
  faults.ring_error = EPERM;
  gemini_config_t c = tiers_config(6, 16, 40);
  c.file_engine = GEMINI_FILE_ENGINE_AUTO;
  opt_t *o = opt_open(c, 4);
  CHECK_EQ(world_stats(&o->w).file_engine, GEMINI_FILE_ENGINE_THREADS);
  opt_to_files(o, MASTER);
  CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
  opt_model(o, 0, o->n);
  opt_check(o);
  opt_close(o);
  c.file_engine = GEMINI_FILE_ENGINE_URING;
  c.file_dir = "/tmp";
  gemini_manager_t mgr = 0;
  process_t before = process_now();
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_UNSUPPORTED);
  CHECK_SAYS(world_error().message, "Operation not permitted");
  CHECK_EQ(mgr, 0);
  process_check(before);
}

static void test_directories_that_are_not_there_are_refused(void) {
  process_t before = process_now();
  gemini_config_t c = tiers_config(6, 16, 40);
  gemini_manager_t mgr = 0;
  char first[64], both[160];
  dir_make(first);
  snprintf(both, sizeof both, "%s:%s/none", first, first);
  c.file_dir = both;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, ENOENT);
  CHECK_SAYS(world_error().message, "/none");
  process_check(before);
  c.file_dir = "/proc";
  gemini_status_t status = gemini_manager_open(&c, &mgr);
  CHECK(status == GEMINI_ERR_IO || status == GEMINI_ERR_UNSUPPORTED);
  process_check(before);
  CHECK_EQ(rmdir(first), 0);
}

static void test_a_directory_that_disappears_takes_nothing_along(void) {
  for (uint64_t chunk = 0; chunk <= WORLD_CHUNK; chunk += WORLD_CHUNK) {
    gemini_config_t c = tiers_config(16, 16, 100);
    c.chunk_bytes = WORLD_CHUNK;
    opt_t *o = opt_open(c, 4);
    opt_to_files(o, MASTER);
    CHECK_EQ(rmdir(o->w.dir), 0); /* the files have no names */
    CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
    opt_model(o, 0, o->n);
    CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 130 * WORLD_CHUNK));
    CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 60 * WORLD_CHUNK));
    opt_check(o);
    CHECK_OK(gemini_manager_close(o->w.mgr));
    opt_free(o);
  }
  /* Before the size of chunks was known: it cannot be opened anew, and that is said each time. */
  char dir[64];
  dir_make(dir);
  gemini_config_t c = tiers_config(16, 16, 100);
  c.chunk_bytes = 0;
  c.device_bytes = 16 << 20; /* where larger chunks than the smallest are chosen */
  c.host_bytes = 16 << 20;
  c.file_dir = dir;
  world_t w = world_open(c);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 3 << 20);
  CHECK_EQ(rmdir(dir), 0);
  gemini_access_t x = world_whole(t, GEMINI_WRITE, GEMINI_TIER_DEVICE);
  gemini_status_t first = gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER);
  gemini_status_t second = first ? gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER) : GEMINI_ERR_IO;
  if (first) {
    CHECK_EQ(first, GEMINI_ERR_IO);
    CHECK_EQ(second, first);
    CHECK_EQ(mkdir(dir, 0700), 0); /* back again */
    CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  CHECK(world_stats(&w).file_engine != GEMINI_FILE_ENGINE_AUTO);
  CHECK(world_stats(&w).chunk_bytes > WORLD_CHUNK);
  CHECK_OK(gemini_manager_close(w.mgr));
  rmdir(dir);
}

static void test_space_that_cannot_be_reserved_is_refused(void) {
  process_t before = process_now();
  gemini_config_t c = tiers_config(6, 16, 40);
  char dir[64];
  dir_make(dir);
  c.file_dir = dir;
  gemini_manager_t mgr = 0;
  faults.fallocate_error = ENOSPC;
  CHECK_STATUS(gemini_manager_open(&c, &mgr), GEMINI_ERR_OOM_FILE);
  CHECK_EQ(world_error().native_code, ENOSPC);
  CHECK_SAYS(world_error().message, dir);
  process_check(before);
  CHECK_EQ(rmdir(dir), 0);
  faults.fallocate_error = 0;
  opt_t *o = opt_open(c = tiers_config(6, 16, 40), 4);
  opt_to_files(o, MASTER);
  faults.fallocate_error = ENOSPC;
  CHECK_STATUS(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 400 * WORLD_CHUNK), GEMINI_ERR_OOM_FILE);
  CHECK_EQ(world_stats(&o->w).budget_bytes[GEMINI_TIER_FILE], 40 * WORLD_CHUNK);
  opt_to_files(o, MOMENTUM);
  faults.fallocate_error = 0;
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 400 * WORLD_CHUNK));
  opt_check(o);
  opt_close(o);
}

static void test_chunks_are_spread_over_several_directories(void) {
  char dirs[3][64], list[200] = "";
  for (int d = 0; d < 3; d++) {
    dir_make(dirs[d]);
    snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", d ? ":" : "", dirs[d]);
  }
  gemini_config_t c = tiers_config(6, 14, 120);
  c.file_dir = list;
  opt_t *o = opt_open(c, 10);
  for (int a = 0; a < OPT_ARENAS; a++) opt_to_files(o, a);
  uint32_t spread[3] = { 0, 0, 0 };
  for (int a = 0; a < OPT_ARENAS; a++)
    for (uint64_t at = 0; at < o->n * opt_bytes[a]; at += WORLD_CHUNK)
      spread[chunk_of(&o->w, o->arenas[a], at)->block_ % 3]++;
  for (int d = 0; d < 3; d++) CHECK(spread[d] >= 16 && spread[d] <= 17);
  for (int step = 0; step < 3; step++) {
    CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
    opt_model(o, 0, o->n);
  }
  opt_check(o);
  CHECK_OK(gemini_manager_close(o->w.mgr));
  for (int d = 0; d < 3; d++) CHECK_EQ(rmdir(dirs[d]), 0);
  opt_free(o);
}

/* ---- what waits: all that may happen to it */
static opt_t *opt_waiting(void) { /* the last of two updates, or most of it, waits */
  opt_t *o = opt_open(tiers_config(8, 16, 120), 8);
  faults.delay_us[0] = faults.delay_us[1] = 2000;
  for (int i = 0; i < 2; i++) {
    CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
    opt_model(o, 0, o->n);
  }
  CHECK(opt_waits(o) > 0);
  return o;
}

static void test_whoever_wants_a_chunk_gets_it_updated(void) {
  for (int what = 0; what < 9; what++) {
    opt_t *o = opt_waiting();
    uint64_t size = 3 * WORLD_CHUNK / 2, at = (what % 2 ? o->n * 4 - size - 64 : WORLD_CHUNK / 2 + 64) / 4096 * 4096;
    gemini_access_t x = world_part(o->arenas[MASTER], at, size, GEMINI_READ, GEMINI_TIER_HOST);
    double norm;
    uint8_t *bytes = malloc(size);
    CHECK(bytes);
    switch (what) {
    case 0:
    case 1: opt_check_range(o, MASTER, at, size, GEMINI_TIER_HOST); break;
    case 2:
    case 3: /* parameters that the next forward pass wants on the device */
      opt_check_range(o, PARAMS, at / 2, size / 2, GEMINI_TIER_DEVICE);
      break;
    case 4: { /* a sum over bytes as if they were doubles would not compare: f32 of small integers does */
      CHECK_OK(gemini_norm(o->w.mgr, &x, GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm));
      double sum = 0;
      bool finite = true;
      for (uint64_t i = 0; i < size; i += 2) {
        uint32_t bits = (uint32_t)(o->model[MASTER][at + i] | o->model[MASTER][at + i + 1] << 8) << 16;
        float value;
        memcpy(&value, &bits, 4);
        finite &= isfinite(value);
        sum += (double)value * value;
      }
      CHECK(!finite || fabs(norm - sqrt(sum)) <= 1e-9 * sqrt(sum));
      break;
    }
    case 5: {
      FILE *file = tmpfile();
      CHECK(file);
      CHECK_OK(gemini_store(o->w.mgr, &x, fileno(file), 10));
      CHECK_EQ(pread(fileno(file), bytes, size, 10), size);
      CHECK(!memcmp(bytes, o->model[MASTER] + at, size));
      fclose(file);
      break;
    }
    case 6: {
      FILE *file = tmpfile();
      CHECK(file);
      memset(bytes, 0x3c, size);
      CHECK_EQ(pwrite(fileno(file), bytes, size, 0), size);
      CHECK_OK(gemini_load(o->w.mgr, &x, fileno(file), 0));
      memset(o->model[MASTER] + at, 0x3c, size);
      fclose(file);
      break;
    }
    case 7:
      CHECK_OK(gemini_zero(o->w.mgr, &x));
      memset(o->model[MASTER] + at, 0, size);
      break;
    default:
      CHECK_OK(gemini_pin(o->w.mgr, &x));
      opt_check_range(o, MASTER, at, size, GEMINI_TIER_DEVICE);
      CHECK_OK(gemini_unpin(o->w.mgr, &x));
    }
    free(bytes);
    faults.delay_us[0] = faults.delay_us[1] = 0;
    opt_check(o);
    CHECK_OK(opt_update(o, what % 2 ? GEMINI_UPDATE_LATE : 0));
    opt_model(o, 0, o->n);
    opt_check(o);
    opt_close(o);
  }
}

static void test_budgets_change_while_updates_wait(void) {
  opt_t *o = opt_waiting();
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_HOST, 8 * WORLD_CHUNK));
  CHECK(world_stats(&o->w).used_bytes[GEMINI_TIER_HOST] <= 8 * WORLD_CHUNK);
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_DEVICE, 6 * WORLD_CHUNK));
  CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
  opt_model(o, 0, o->n);
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_HOST, 20 * WORLD_CHUNK));
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 60 * WORLD_CHUNK));
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 200 * WORLD_CHUNK));
  faults.delay_us[0] = faults.delay_us[1] = 0;
  /* Less than one piece needs: it is refused, or waits until there is more. */
  CHECK_OK(gemini_update_wait(o->w.mgr));
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_HOST, 4 * WORLD_CHUNK));
  CHECK_STATUS(opt_update(o, GEMINI_UPDATE_LATE), GEMINI_ERR_OOM_HOST);
  o->step_count--;
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_HOST, 16 * WORLD_CHUNK));
  opt_check(o);
  faults.delay_us[0] = faults.delay_us[1] = 2000;
  CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
  opt_model(o, 0, o->n);
  gemini_status_t shrunk = gemini_budget_set(o->w.mgr, GEMINI_TIER_HOST, 4 * WORLD_CHUNK);
  faults.delay_us[0] = faults.delay_us[1] = 0;
  if (!shrunk) {
    gemini_status_t status = gemini_update_wait(o->w.mgr);
    CHECK(!status || status == GEMINI_ERR_OOM_HOST);
    CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_HOST, 16 * WORLD_CHUNK));
  }
  CHECK_OK(gemini_update_wait(o->w.mgr));
  opt_check(o);
  opt_close(o);
}

/* A second update, of fewer arenas, comes after the first one that waits, though all it needs is there. */
static void seven(void *user, const gemini_update_span_t *span) {
  uint32_t *master = span->ptr[0];
  (void)user;
  CHECK_EQ(span->tier, GEMINI_TIER_HOST);
  for (uint64_t i = 0; i < span->element_count; i++) master[i] = master[i] * 7 + 1;
}
static void test_updates_of_a_chunk_run_in_their_order(void) {
  opt_t *o = opt_open(tiers_config(6, 40, 120), 4);
  opt_to_files(o, MOMENTUM);
  faults.delay_us[0] = 20000;
  for (int i = 0; i < 3; i++) {
    CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
    opt_model(o, 0, o->n);
    uint32_t mode = GEMINI_READ_WRITE;
    gemini_update_t u = GEMINI_UPDATE_INIT;
    u.flags = GEMINI_UPDATE_LATE;
    u.arenas = &o->arenas[MASTER];
    u.modes = &mode;
    u.arena_count = 1;
    u.fn = seven;
    CHECK_OK(gemini_update(o->w.mgr, &u));
    uint32_t *master = (uint32_t *)o->model[MASTER];
    for (uint64_t k = 0; k < o->n; k++) master[k] = master[k] * 7 + 1;
    if (i == 0) faults.delay_us[0] = 0;
    if (i) CHECK_OK(gemini_update_wait(o->w.mgr));
    if (i) opt_to_files(o, MOMENTUM);
  }
  opt_check(o);
  opt_close(o);
}

/* The update before a use cannot run: then the use is refused, or the update is given up for good and said to be. What has
 * been given out without it does not change any more. */
static void test_chunks_of_an_update_that_cannot_run_do_not_change_later(void) {
  for (int round = 0; round < 6; round++) {
    opt_t *o = opt_open(tiers_config(6, 40, 120), 4);
    uint64_t unit = WORLD_CHUNK / 2;
    bool given[4] = { false };
    opt_to_files(o, MASTER);
    break_files(false, EIO, round, -1);
    CHECK(opt_update(o, GEMINI_UPDATE_LATE) != GEMINI_ERR_INVALID);
    for (uint64_t i = 0; i < 8; i++) {
      gemini_access_t x = world_part(o->arenas[PARAMS], i % 4 * unit * 2 + 64, 100, GEMINI_READ, (uint32_t)i / 4);
      gemini_status_t status = gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_IO);
      if (status) CHECK_SAYS(world_error().message, "of arena master");
      if (status) continue;
      given[i % 4] |= !memcmp(x.ptr, o->model[PARAMS] + x.offset_bytes, 100); /* as it was before */
      CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
    sleep_us(30000); /* it is tried again, and again */
    mend_files();
    gemini_status_t status = gemini_update_wait(o->w.mgr);
    for (int tries = 0; tries < 3 && opt_waits(o); tries++) status = gemini_update_wait(o->w.mgr);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_IO);
    CHECK_EQ(opt_waits(o), 0);
    for (uint64_t i = 0; i < 4; i++) {
      gemini_access_t x = world_part(o->arenas[PARAMS], i * unit * 2 + 64, 100, GEMINI_READ, GEMINI_TIER_HOST);
      CHECK_OK(gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      bool old = !memcmp(x.ptr, o->model[PARAMS] + x.offset_bytes, 100);
      CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      CHECK(!given[i] || (old && status));
    }
    settle_model(o);
    opt_check(o);
    CHECK_STATUS(gemini_manager_close(o->w.mgr), status);
    CHECK_EQ(rmdir(o->w.dir), 0);
    opt_free(o);
  }
}

/* Blocks whose bytes are above as well give way to others; those that are the only ones do not. */
static void test_a_smaller_file_budget_drops_only_what_is_there_twice(void) {
  opt_t *o = opt_open(tiers_config(6, 40, 60), 4);
  opt_to_files(o, MASTER);
  opt_to_files(o, MOMENTUM);
  CHECK_EQ(world_stats(&o->w).used_bytes[GEMINI_TIER_FILE], 16 * WORLD_CHUNK);
  for (uint64_t budget = 15; budget < 16; budget--) {
    CHECK_STATUS(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, budget * WORLD_CHUNK), GEMINI_ERR_OOM_FILE);
    CHECK_EQ(world_stats(&o->w).budget_bytes[GEMINI_TIER_FILE], 60 * WORLD_CHUNK);
  }
  CHECK(chunks_right(&o->w));
  opt_check_range(o, MASTER, 0, 5 * WORLD_CHUNK, GEMINI_TIER_HOST);     /* five on the host as well */
  opt_check_range(o, MASTER, 5 * WORLD_CHUNK, 100, GEMINI_TIER_DEVICE); /* one on the device, and on the host */
  CHECK_STATUS(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 9 * WORLD_CHUNK), GEMINI_ERR_OOM_FILE);
  CHECK_OK(gemini_budget_set(o->w.mgr, GEMINI_TIER_FILE, 10 * WORLD_CHUNK));
  CHECK_EQ(world_stats(&o->w).used_bytes[GEMINI_TIER_FILE], 10 * WORLD_CHUNK);
  CHECK(chunks_right(&o->w));
  opt_check(o);
  CHECK_OK(opt_update(o, 0)); /* what is written anew frees its block */
  opt_model(o, 0, o->n);
  opt_check(o);
  /* A full one: moving there is refused, and loses nothing. */
  gemini_access_t x = world_part(o->arenas[MASTER], 0, 0, 0, GEMINI_TIER_FILE);
  CHECK_OK(gemini_move(o->w.mgr, &x, 1));
  x.object.arena = o->arenas[MOMENTUM];
  CHECK_STATUS(gemini_move(o->w.mgr, &x, 1), GEMINI_ERR_OOM_FILE);
  opt_check(o);
  opt_close(o);
}

static void test_arenas_and_managers_end_while_updates_wait(void) {
  opt_t *o = opt_waiting();
  for (int a = OPT_ARENAS; a-- > 1;) CHECK_OK(gemini_arena_destroy(o->w.mgr, o->arenas[a]));
  uint64_t size = o->n * 2;
  for (uint64_t at = 0; at < size; at += WORLD_CHUNK)
    opt_check_range(o, PARAMS, at, size - at < WORLD_CHUNK ? size - at : WORLD_CHUNK, GEMINI_TIER_HOST);
  CHECK_OK(gemini_arena_destroy(o->w.mgr, o->arenas[0]));
  figures_t s = world_stats(&o->w);
  CHECK_EQ(s.used_bytes[GEMINI_TIER_HOST] + s.used_bytes[GEMINI_TIER_FILE], 0);
  opt_close(o);
  o = opt_waiting();
  opt_close(o); /* runs them */
  o = opt_waiting();
  break_files(true, ENOSPC, 0, -1); /* they cannot run: that is said, and nothing stays behind */
  break_files(false, EIO, 0, -1);
  gemini_status_t status = gemini_manager_close(o->w.mgr);
  CHECK(status == GEMINI_ERR_OOM_FILE || status == GEMINI_ERR_IO);
  CHECK_EQ(rmdir(o->w.dir), 0);
  opt_free(o);
}

/* ---- several threads, each with arenas of its own, in one manager */
enum { THREADS = 3 };
typedef struct {
  opt_t *o;
  uint64_t seed;
} trainer_t;
static void *train(void *user) {
  trainer_t *t = user;
  opt_t *o = t->o;
  uint64_t r = t->seed * 2 + 1;
  for (int step = 0; step < 6; step++) {
    CHECK_OK(opt_update(o, below(&r, 3) ? GEMINI_UPDATE_LATE : 0));
    opt_model(o, 0, o->n);
    for (int k = 0; k < 10; k++) {
      int a = (int)below(&r, OPT_ARENAS);
      uint64_t size = o->n * opt_bytes[a], at = below(&r, size), part = 1 + below(&r, WORLD_CHUNK);
      if (part > size - at) part = size - at;
      gemini_access_t x = world_part(o->arenas[a], at, part, GEMINI_READ, (uint32_t)below(&r, 2));
      gemini_status_t status = gemini_acquire(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_OOM_DEVICE);
      if (status) continue;
      CHECK(!memcmp(x.ptr, o->model[a] + at, part));
      CHECK_OK(gemini_release(o->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
  }
  return NULL;
}
static atomic_bool stop_budgets;
static void *change_budgets(void *user) {
  const world_t *w = user;
  uint64_t r = 5;
  while (!stop_budgets) {
    gemini_status_t status = gemini_budget_set(w->mgr, GEMINI_TIER_HOST, (24 + below(&r, 30)) * WORLD_CHUNK);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
    void *block;
    status = gemini_host_alloc(w->mgr, 1 + below(&r, 3 * WORLD_CHUNK), 0, &block);
    CHECK(status == GEMINI_OK || status == GEMINI_ERR_OOM_HOST);
    world_stats(w);
    sleep_us(300);
    if (!status) CHECK_OK(gemini_host_free(w->mgr, block));
  }
  return NULL;
}
static void test_threads_train_side_by_side(void) {
  gemini_config_t c = tiers_config(10, 40, 250);
  c.update_threads = 2;
  world_t w = world_open(c);
  trainer_t trainers[THREADS];
  pthread_t threads[THREADS + 1];
  for (int i = 0; i < THREADS; i++) {
    char prefix[16];
    snprintf(prefix, sizeof prefix, "%d.", i);
    trainers[i] = (trainer_t){ opt_in(&w, 6, prefix), (uint64_t)i + 1 };
  }
  stop_budgets = false;
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, train, &trainers[i]), 0);
  CHECK_EQ(pthread_create(&threads[THREADS], NULL, change_budgets, &w), 0);
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  stop_budgets = true;
  CHECK_EQ(pthread_join(threads[THREADS], NULL), 0);
  CHECK_OK(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 40 * WORLD_CHUNK));
  CHECK_OK(gemini_update_wait(w.mgr));
  for (int i = 0; i < THREADS; i++) {
    opt_check(trainers[i].o);
    opt_free(trainers[i].o);
  }
  CHECK(chunks_right(&w));
  world_close(&w);
}

/* Room for one piece is made by as many writes as it needs, not by writing all that is there. */
static void test_room_for_a_piece_costs_no_more_writes_than_chunks(void) {
  opt_t *o = opt_open(tiers_config(6, 46, 200), 16); /* 16 + 32 + 32 chunks */
  CHECK_OK(opt_update(o, 0));
  opt_model(o, 0, o->n);
  CHECK_OK(gemini_stats_reset(o->w.mgr));
  faults.delay_us[1] = 3000;
  for (int i = 0; i < 3; i++) {
    CHECK_OK(opt_update(o, GEMINI_UPDATE_LATE));
    opt_model(o, 0, o->n);
    CHECK_OK(gemini_update_wait(o->w.mgr));
  }
  figures_t s = world_stats(&o->w);
  uint64_t writes = s.moved_chunks[LINK_H2F][GEMINI_REASON_PRESSURE], least = 80 - 46;
  fprintf(stderr, "    %" PRIu64 " writes a step, at least %" PRIu64 " of 80\n", writes / 3, least);
  /* Those that were updated last go, and one waits for them where they still are being updated: half as many more go if
   * others do, and in any other order all 80. Another piece of 5 chunks is under way, and one has just ended. */
  CHECK(writes <= 3 * (least + 10));
  faults.delay_us[1] = 0;
  opt_check(o);
  opt_close(o);

  /* One piece only, whose states are in files, beside many that are not touched. */
  o = opt_open(tiers_config(6, 46, 200), 16);
  uint64_t unit = WORLD_CHUNK / 2;
  for (int a = MASTER; a <= MOMENTUM; a++) {
    gemini_access_t x = world_part(o->arenas[a], 0, 2 * WORLD_CHUNK, 0, GEMINI_TIER_FILE);
    CHECK_OK(gemini_move(o->w.mgr, &x, 1));
  }
  for (uint64_t at = 2 * WORLD_CHUNK; world_stats(&o->w).used_bytes[GEMINI_TIER_HOST] < 46 * WORLD_CHUNK; at += 100)
    opt_check_range(o, MASTER, at, 100, GEMINI_TIER_HOST); /* until the host is full */
  CHECK_OK(gemini_stats_reset(o->w.mgr));
  faults.delay_us[1] = 3000;
  gemini_update_t u = opt_describe(o, GEMINI_UPDATE_LATE);
  u.element_count = unit;
  CHECK_OK(gemini_update(o->w.mgr, &u));
  sleep_us(50000);
  CHECK_OK(gemini_update_wait(o->w.mgr));
  opt_model(o, 0, unit);
  s = world_stats(&o->w);
  writes = s.moved_chunks[LINK_H2F][GEMINI_REASON_PRESSURE];
  fprintf(stderr, "    %" PRIu64 " writes for a piece of 5 chunks\n", writes);
  CHECK(writes <= 10);
  faults.delay_us[1] = 0;
  opt_check(o);
  opt_close(o);
}

/* ---- borrowed files */
static int fstat_error;
static int fault_fstat(int fd, struct stat *info) {
  return fstat_error ? (errno = fstat_error, -1) : gmi_sys_real.fstat(fd, info);
}
/* A file whose time of modification cannot be asked for has not changed for all that. */
static void test_a_borrowed_file_that_cannot_be_looked_at_is_no_changed_one(void) {
  fault_sys.fstat = fault_fstat;
  world_t w = world_open(tiers_config(2, 2, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 2 * WORLD_CHUNK);
  static uint8_t bytes[2 * WORLD_CHUNK];
  world_write(bytes, 0, sizeof bytes, 3);
  int fd = memfd_create("weights", MFD_CLOEXEC);
  CHECK_EQ(write(fd, bytes, sizeof bytes), sizeof bytes);
  gemini_access_t all = world_whole(t, GEMINI_READ, GEMINI_TIER_HOST);
  fstat_error = EIO;
  CHECK_STATUS(gemini_borrow(w.mgr, &all, fd, 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, EIO);
  fstat_error = 0;
  CHECK_OK(gemini_borrow(w.mgr, &all, fd, 0));
  fstat_error = ENOMEM;
  CHECK_STATUS(gemini_acquire(w.mgr, &all, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, ENOMEM);
  CHECK_SAYS(world_error().message, "chunk 0 of arena weights: ");
  CHECK_SAYS(world_error().message, "cannot be looked at");
  fstat_error = 0;
  CHECK(world_holds(&w, t, 0, 2 * WORLD_CHUNK, 3));
  close(fd);
  world_close(&w);
}

/* A load has the system read all that it comes to, and nothing else. */
static _Atomic uint64_t asked_begin, asked_bytes;
int posix_fadvise(int fd, off_t offset, off_t size, int advice) { /* in place of the C library's */
  if (advice == POSIX_FADV_WILLNEED) {
    if (!atomic_load(&asked_bytes)) atomic_store(&asked_begin, (uint64_t)offset);
    atomic_fetch_add(&asked_bytes, (uint64_t)size);
  }
  return syscall(SYS_fadvise64, fd, offset, size, advice) ? errno : 0;
}
static void test_a_load_asks_for_what_it_reads(void) {
  enum { BYTES = 3 * WORLD_CHUNK + 512, AT = 1024 };
  static uint8_t bytes[AT + BYTES + WORLD_CHUNK];
  world_write(bytes + AT, 0, BYTES, 3);
  int fd = memfd_create("weights", MFD_CLOEXEC);
  CHECK_EQ(write(fd, bytes, sizeof bytes), sizeof bytes);
  world_t w = world_open(tiers_config(2, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", BYTES);
  gemini_access_t all = world_whole(t, GEMINI_WRITE, 0);
  atomic_store(&asked_bytes, 0);
  CHECK_OK(gemini_load(w.mgr, &all, fd, AT));
  CHECK_EQ(atomic_load(&asked_begin), AT);
  CHECK_EQ(atomic_load(&asked_bytes), BYTES);
  CHECK(world_holds(&w, t, 0, BYTES, 3));
  CHECK_EQ(lseek(fd, 0, SEEK_CUR), sizeof bytes);
  close(fd);
  world_close(&w);
}

/* Passes that read more weights than the device and the host have room for. Each pass reads what neither could keep and
 * a few more, where keeping the newest would read all; and the next chunks are read while operators run. */
static atomic_int reads_now, reads_most;
static ssize_t counted_pread(int fd, void *bytes, size_t size, off_t offset) {
  const int now = atomic_fetch_add(&reads_now, 1) + 1;
  for (int most = atomic_load(&reads_most); now > most && !atomic_compare_exchange_weak(&reads_most, &most, now);) {
  }
  sleep_us(1000);
  const ssize_t n = gmi_sys_real.pread(fd, bytes, size, offset);
  atomic_fetch_sub(&reads_now, 1);
  return n;
}
static uint64_t file_reads(world_t *w) {
  const figures_t s = world_stats(w);
  uint64_t sum = 0;
  for (int reason = 0; reason < GEMINI_REASON_COUNT; reason++) sum += s.moved_chunks[LINK_F2H][reason];
  return sum;
}
/* A world with weights that lie in a file. */
typedef struct {
  world_t w;
  gemini_tensor_t t;
  int fd;
} weights_t;
static weights_t weights_open(gemini_config_t config, uint64_t size) {
  weights_t n = { .fd = memfd_create("weights", MFD_CLOEXEC) };
  uint8_t *bytes = malloc(size);
  CHECK(bytes != NULL);
  world_write(bytes, 0, size, 3);
  CHECK_EQ(write(n.fd, bytes, size), size);
  free(bytes);
  fault_sys.pread = counted_pread;
  n.w = world_open(config);
  gemini_arena_t arena = world_arena(&n.w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  n.t = world_tensor(&n.w, arena, "t", size);
  gemini_access_t all = world_whole(n.t, GEMINI_READ, 0);
  CHECK_OK(gemini_borrow(n.w.mgr, &all, n.fd, 0));
  return n;
}
static void weights_close(weights_t *n) {
  close(n->fd);
  world_close(&n->w); /* no read is under way any more */
  fault_sys.pread = fault_pread;
}
/* A pass that reads all weights in so many ops of size bytes. reads: of files, by quarters of the pass. */
enum { QUARTERS = 4 };
static void weights_pass(weights_t *n, uint64_t ops, uint64_t size, uint64_t reads[QUARTERS]) {
  memset(reads, 0, QUARTERS * sizeof *reads);
  uint64_t before = file_reads(&n->w);
  CHECK_OK(gemini_iteration_begin(n->w.mgr));
  for (uint64_t i = 0; i < ops; i++) {
    CHECK_OK(gemini_op_begin(n->w.mgr, "op", GEMINI_STREAM_CALLER));
    gemini_access_t a = world_part(n->t, i * size, size, GEMINI_READ, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_acquire(n->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK(world_reads(a.ptr, i * size, size, 3));
    CHECK_OK(gemini_release(n->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_op_end(n->w.mgr));
    const uint64_t so_far = file_reads(&n->w);
    reads[i * QUARTERS / ops] += so_far - before;
    before = so_far;
  }
  CHECK_OK(gemini_iteration_end(n->w.mgr));
}

/* Several passes. reads: of the one with the fewest, as where other programs take the processors some reads come too late
 * for their op, and others are made besides. Returns their sum. reads_most: of all of these passes. */
static uint64_t weights_passes(weights_t *n, uint64_t ops, uint64_t size, uint64_t reads[QUARTERS]) {
  uint64_t fewest = UINT64_MAX;
  atomic_store(&reads_most, 0);
  for (int pass = 0; pass < 5; pass++) {
    uint64_t of_pass[QUARTERS], sum = 0;
    weights_pass(n, ops, size, of_pass);
    for (int i = 0; i < QUARTERS; i++) sum += of_pass[i];
    if (sum >= fewest) continue;
    fewest = sum;
    memcpy(reads, of_pass, sizeof of_pass);
  }
  return fewest;
}

static void test_a_plan_reads_ahead_and_keeps_what_it_can(void) {
  enum { FRAMES = 10, SLOTS = 24, OPS = 28, SIZE = 2 * WORLD_CHUNK, LEAST = 2 * OPS - FRAMES - SLOTS };
  weights_t n = weights_open(tiers_config(FRAMES, SLOTS, 0), OPS * SIZE);
  uint64_t quarters[QUARTERS];
  for (int pass = 0; pass < 5; pass++) weights_pass(&n, OPS, SIZE, quarters);
  uint64_t reads = weights_passes(&n, OPS, SIZE, quarters);
  for (int again = 0; again < 3 && reads > LEAST + FRAMES; again++) reads = weights_passes(&n, OPS, SIZE, quarters);
  fprintf(stderr, "    %" PRIu64 " reads, at least %d, %d at a time\n", reads, LEAST, atomic_load(&reads_most));
  CHECK(reads >= LEAST && reads <= LEAST + FRAMES); /* those of the frames in which chunks come and go are kept twice */
  if (engine == GEMINI_FILE_ENGINE_THREADS) CHECK(atomic_load(&reads_most) >= 2);
  weights_close(&n);
}

/* Passes over weights of which the host has room for so many chunks; others: of these slots, those that are taken by
 * something else behind some of the passes; states: chunks of states that were written on the host, with as many blocks
 * of a store. reads: in the quarters of one of the last passes. Returns their sum. */
enum { SPREAD_FRAMES = 8, SPREAD_OPS = 96 };
static uint64_t reads_of_last_passes(uint32_t slots, uint32_t others, uint32_t states, uint64_t reads[QUARTERS]) {
  enum { PASSES = 12 };
  void *taken = NULL;
  weights_t n = weights_open(tiers_config(SPREAD_FRAMES, slots, states), SPREAD_OPS * WORLD_CHUNK);
  if (states) {
    gemini_arena_t other = world_arena(&n.w, GEMINI_KIND_MASTER, 1, "states", 0, 0);
    gemini_tensor_t kept = world_tensor(&n.w, other, "kept", states * WORLD_CHUNK);
    gemini_access_t written = world_whole(kept, GEMINI_WRITE, GEMINI_TIER_HOST);
    CHECK_OK(gemini_acquire(n.w.mgr, &written, 1, GEMINI_STREAM_CALLER));
    memset(written.ptr, 7, states * WORLD_CHUNK);
    CHECK_OK(gemini_release(n.w.mgr, &written, 1, GEMINI_STREAM_CALLER));
  }
  for (int pass = 0; pass < PASSES; pass++) {
    if (pass == 2 * PASSES / 3 && others) CHECK_OK(gemini_host_alloc(n.w.mgr, others * WORLD_CHUNK, 0, &taken));
    weights_pass(&n, SPREAD_OPS, WORLD_CHUNK, reads);
  }
  const uint64_t sum = weights_passes(&n, SPREAD_OPS, WORLD_CHUNK, reads);
  fprintf(stderr,
          "    %" PRIu32 " slots, %" PRIu32 " taken: %" PRIu64 " reads, by quarters %" PRIu64 " %" PRIu64 " %" PRIu64
          " %" PRIu64 ", %d at a time\n",
          slots, others, sum, reads[0], reads[1], reads[2], reads[3], atomic_load(&reads_most));
  if (sum && slots >= SPREAD_OPS / 2 && engine == GEMINI_FILE_ENGINE_THREADS) CHECK(atomic_load(&reads_most) >= 2);
  CHECK_OK(gemini_host_free(n.w.mgr, taken));
  weights_close(&n);
  return sum;
}
/* What the host has no room for is read all through a pass, not in one stretch of it, and is no more for that; also
 * when that has become more. */
static void test_reads_are_spread_over_a_pass(void) {
  enum { SLOTS = 64 };
  uint64_t reads[QUARTERS];
  for (uint32_t others = 0; others <= 16; others += 16) {
    const uint64_t sum = reads_of_last_passes(SLOTS, others, 0, reads),
                   least = SPREAD_OPS - SPREAD_FRAMES - SLOTS + others;
    /* Besides what has no room: what is on the device only in passing, and slots for what is read ahead. */
    CHECK(sum >= least && sum <= least + 2 * SPREAD_FRAMES + SLOTS / 8);
    for (int i = 0; i < QUARTERS; i++) CHECK(2 * QUARTERS * reads[i] >= sum && QUARTERS * reads[i] <= 2 * sum);
  }
}
/* Where there is room for all, nothing is read ahead in its place; where there is next to none, all is read. */
static void test_reads_of_hosts_with_all_and_with_little_room(void) {
  uint64_t reads[QUARTERS];
  CHECK_EQ(reads_of_last_passes(SPREAD_OPS, 0, 0, reads), 0);
  CHECK(reads_of_last_passes(2, 0, 0, reads) <= SPREAD_OPS);
}
/* States that may go to files: slots are not kept free for reads ahead, as what has room is not known. */
static void test_reads_beside_states_that_may_go_to_files(void) {
  enum { STATES = 32 };
  uint64_t reads[QUARTERS];
  CHECK(reads_of_last_passes(SPREAD_OPS, 0, STATES, reads) <= STATES); /* and the device has room for some */
}

int main(void) {
  tiers_begin();
  bool uring = has_uring();
  for (engine = GEMINI_FILE_ENGINE_THREADS; engine; engine = engine == GEMINI_FILE_ENGINE_THREADS && uring ? 1 : 0) {
    fprintf(stderr, "  engine: %s\n", engine == GEMINI_FILE_ENGINE_THREADS ? "threads" : "io_uring");
    RUN_TIMED(test_updates_in_three_tiers_are_those_of_plain_arrays);
    RUN_TIMED(test_a_load_asks_for_what_it_reads);
    RUN_TIMED(test_a_plan_reads_ahead_and_keeps_what_it_can);
    RUN_TIMED(test_reads_are_spread_over_a_pass);
    RUN_TIMED(test_reads_of_hosts_with_all_and_with_little_room);
    RUN_TIMED(test_reads_beside_states_that_may_go_to_files);
    RUN_TIMED(test_short_and_interrupted_transfers_go_on);
    RUN_TIMED(test_an_acquire_whose_read_fails_says_so_and_loses_nothing);
    RUN_TIMED(test_a_move_tells_of_each_chunk_that_did_not_come);
    RUN_TIMED(test_a_read_ahead_that_fails_is_tried_again_by_who_wants_it);
    RUN_TIMED(test_a_read_ahead_that_fails_harms_nobody_who_overwrites);
    RUN_TIMED(test_an_update_whose_reads_fail_is_reported_and_loses_nothing);
    RUN_TIMED(test_writes_that_fail_lose_nothing_and_updates_catch_up);
    RUN_TIMED(test_a_chunk_that_could_not_be_written_can_be_updated);
    RUN_TIMED(test_a_failed_read_does_not_follow_its_slot);
    RUN_TIMED(test_damaged_and_stale_blocks_are_named_and_never_used);
    RUN_TIMED(test_io_uring_refused_falls_back_or_says_so);
    RUN_TIMED(test_directories_that_are_not_there_are_refused);
    RUN_TIMED(test_a_directory_that_disappears_takes_nothing_along);
    RUN_TIMED(test_space_that_cannot_be_reserved_is_refused);
    RUN_TIMED(test_chunks_are_spread_over_several_directories);
    RUN_TIMED(test_whoever_wants_a_chunk_gets_it_updated);
    RUN_TIMED(test_budgets_change_while_updates_wait);
    RUN_TIMED(test_updates_of_a_chunk_run_in_their_order);
    RUN_TIMED(test_chunks_of_an_update_that_cannot_run_do_not_change_later);
    RUN_TIMED(test_a_smaller_file_budget_drops_only_what_is_there_twice);
    RUN_TIMED(test_arenas_and_managers_end_while_updates_wait);
    RUN_TIMED(test_threads_train_side_by_side);
    RUN_TIMED(test_room_for_a_piece_costs_no_more_writes_than_chunks);
    RUN_TIMED(test_a_borrowed_file_that_cannot_be_looked_at_is_no_changed_one);
  }
  return check_done();
}
