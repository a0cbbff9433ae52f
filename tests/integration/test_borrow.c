/* gemini_borrow(): ranges whose bytes stay in files of the caller's until they are wanted. SPDX-License-Identifier:
 * Apache-2.0 */
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "../process.h"
#include "world.h"

#define OK(call) CHECK_OK(call)
enum { CHUNK = WORLD_CHUNK, SEED = 5, HOST = GEMINI_TIER_HOST, DEVICE = GEMINI_TIER_DEVICE, FILES = GEMINI_TIER_FILE };

/* An unnamed file of the pattern. */
static int file_of(uint64_t size) {
  int fd = memfd_create("weights", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, (off_t)size) == 0);
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(at != MAP_FAILED);
  world_write(at, 0, size, SEED);
  munmap(at, size);
  return fd;
}

/* Are these bytes those of the file from file_offset on? In pieces, as the range may be larger than the tier. */
static bool reads_file(const world_t *w, gemini_tensor_t t, uint64_t offset, uint64_t size, uint64_t file_offset,
                       uint32_t tier) {
  for (uint64_t at = 0; at < size; at += CHUNK) {
    const uint64_t part = size - at < CHUNK ? size - at : CHUNK;
    gemini_access_t a = world_part(t, offset + at, part, GEMINI_READ, tier);
    OK(gemini_acquire(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
    const bool right = world_reads(a.ptr, file_offset + at, part, SEED);
    OK(gemini_release(w->mgr, &a, 1, GEMINI_STREAM_CALLER));
    if (!right) return false;
  }
  return true;
}

static uint64_t moved(const world_t *w, int link) {
  const figures_t s = world_stats(w);
  uint64_t bytes = 0;
  for (int i = 0; i < GEMINI_REASON_COUNT; i++) bytes += s.moved_bytes[link][i];
  return bytes;
}

/* Weights of 40 chunks with 6 chunks of host memory and no file tier: they are read where they lie, again and again,
 * and nothing is ever copied back. */
static void test_borrowed_weights_need_no_memory(void) {
  const uint64_t size = 40 * CHUNK + 700;
  int fd = file_of(size + 1234);
  world_t w = world_open(world_config(4, 6, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", size);
  gemini_access_t all = world_whole(t, 0, 0);
  OK(gemini_borrow(w.mgr, &all, fd, 1234));
  close(fd);
  CHECK_EQ(world_tier_bytes(&w, t, FILES), size);
  CHECK_EQ(world_tensor_info(&w, t).state, GEMINI_STATE_HOLD);
  CHECK_EQ(moved(&w, LINK_F2H), 0);
  for (int round = 0; round < 2; round++) CHECK(reads_file(&w, t, 0, size, 1234, DEVICE));
  CHECK(moved(&w, LINK_F2H) <= moved(&w, LINK_H2D)); /* some of the second round's are still on the host */
  CHECK(moved(&w, LINK_F2H) + 6 * CHUNK >= moved(&w, LINK_H2D));
  CHECK_EQ(moved(&w, LINK_D2H) + moved(&w, LINK_H2F), 0);
  CHECK(reads_file(&w, t, 0, size, 1234, HOST));
  CHECK_EQ(moved(&w, LINK_H2F), 0);
  figures_t s = world_stats(&w);
  CHECK_EQ(s.used_bytes[FILES], 0);
  CHECK(s.peak_bytes[HOST] <= s.budget_bytes[HOST]);
  world_close(&w);
}

/* The same under a plan: passes over all weights, with the bytes of the file in each operator. */
static void test_borrowed_weights_under_a_plan(void) {
  enum { TENSORS = 12, BYTES = 3 * CHUNK + 512 };
  int fd = file_of(TENSORS * BYTES);
  world_t w = world_open(world_config(12, 10, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t[TENSORS];
  for (int i = 0; i < TENSORS; i++) {
    char name[16];
    snprintf(name, sizeof name, "t%d", i);
    t[i] = world_tensor(&w, arena, name, BYTES);
    gemini_access_t all = world_whole(t[i], 0, 0);
    OK(gemini_borrow(w.mgr, &all, fd, (uint64_t)i * BYTES));
  }
  for (int pass = 0; pass < 5; pass++) {
    OK(gemini_iteration_begin(w.mgr));
    for (uint64_t i = 0; i < TENSORS; i++) {
      OK(gemini_op_begin(w.mgr, "op", GEMINI_STREAM_CALLER));
      gemini_access_t a = world_whole(t[i], GEMINI_READ, DEVICE);
      OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(world_reads(a.ptr, i * BYTES, BYTES, SEED));
      OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      OK(gemini_op_end(w.mgr));
    }
    OK(gemini_iteration_end(w.mgr));
  }
  CHECK_EQ(world_stats(&w).departures, 0);
  CHECK_EQ(world_stats(&w).planned_iterations, 4);
  CHECK_EQ(moved(&w, LINK_D2H), 0);
  close(fd);
  world_close(&w);
}

static void test_a_file_that_changes_is_not_read(void) {
  char path[] = "/tmp/gemini-test.XXXXXX";
  int fd = mkstemp(path);
  static uint8_t bytes[4 * CHUNK];
  world_write(bytes, 0, sizeof bytes, SEED);
  CHECK_EQ(pwrite(fd, bytes, sizeof bytes, 0), sizeof bytes);
  world_t w = world_open(world_config(4, 4, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 4 * CHUNK);
  gemini_access_t half = world_part(t, 0, 2 * CHUNK, 0, 0), rest = world_part(t, 2 * CHUNK, 2 * CHUNK, 0, 0);
  OK(gemini_borrow(w.mgr, &half, fd, 0));
  unlink(path); /* or replaced: the bytes are those of the file that was borrowed */
  CHECK(reads_file(&w, t, 0, CHUNK, 0, HOST));
  struct timespec times[2] = { { .tv_sec = 5 }, { .tv_sec = 5 } };
  CHECK_EQ(futimens(fd, times), 0);
  gemini_access_t a = world_part(t, CHUNK, CHUNK, GEMINI_READ, HOST);
  for (int i = 0; i < 2; i++) {
    CHECK_STATUS(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER), GEMINI_ERR_FORMAT);
    CHECK(strstr(world_error().message, "was changed since a range of it was borrowed"));
    CHECK(strstr(world_error().message, "chunk 1 of arena weights"));
  }
  CHECK(reads_file(&w, t, 0, CHUNK, 0, HOST)); /* which was read before */
  CHECK_STATUS(gemini_borrow(w.mgr, &rest, fd, 0), GEMINI_ERR_FORMAT);
  CHECK_EQ(ftruncate(fd, 2 * CHUNK), 0);
  close(fd);
  world_close(&w);
}

/* When nothing has bytes of a file any more, it may change, and be borrowed anew. */
static void test_a_file_that_nothing_is_borrowed_from_may_change(void) {
  int fd = file_of(2 * CHUNK);
  world_t w = world_open(world_config(4, 4, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 2 * CHUNK);
  gemini_access_t all = world_whole(t, 0, 0), first = world_part(t, 0, CHUNK, 0, 0);
  OK(gemini_borrow(w.mgr, &all, fd, 0));
  CHECK(reads_file(&w, t, 0, 2 * CHUNK, 0, HOST));
  static uint8_t bytes[2 * CHUNK];
  world_write(bytes, 0, sizeof bytes, SEED + 1);
  CHECK_EQ(pwrite(fd, bytes, sizeof bytes, 0), sizeof bytes);
  struct timespec times[2] = { { .tv_sec = 5 }, { .tv_sec = 5 } };
  CHECK_EQ(futimens(fd, times), 0);
  OK(gemini_zero(w.mgr, &first));
  CHECK_STATUS(gemini_borrow(w.mgr, &first, fd, 0), GEMINI_ERR_FORMAT); /* the other half is still that of the file */
  OK(gemini_zero(w.mgr, &all));
  OK(gemini_borrow(w.mgr, &all, fd, 0));
  CHECK(world_holds(&w, t, 0, 2 * CHUNK, SEED + 1));
  close(fd);
  world_close(&w);
}

static void test_borrow_refusals_change_nothing(void) {
  int fd = file_of(3 * CHUNK);
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 2 * CHUNK);
  world_fill(&w, t, 0, 2 * CHUNK, HOST, 1);
  gemini_access_t all = world_whole(t, 0, 0), a = world_part(t, 0, 1, GEMINI_READ, HOST);
  CHECK_STATUS(gemini_borrow(w.mgr, &all, fd, CHUNK + 1), GEMINI_ERR_FORMAT);
  CHECK(strstr(world_error().message, "ends at offset 196608, the range needs 196609 bytes"));
  CHECK(!strcmp(world_error().operation, "gemini_borrow"));
  CHECK_STATUS(gemini_borrow(w.mgr, &all, -1, 0), GEMINI_ERR_INVALID);
  CHECK_STATUS(gemini_borrow(w.mgr, &all, fd, INT64_MAX), GEMINI_ERR_INVALID);
  int pipes[2];
  CHECK_EQ(pipe(pipes), 0);
  CHECK_STATUS(gemini_borrow(w.mgr, &all, pipes[0], 0), GEMINI_ERR_INVALID);
  CHECK(strstr(world_error().message, "is not of a regular file"));
  close(pipes[0]), close(pipes[1]);
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const int unreadable[] = { open(path, O_WRONLY | O_CLOEXEC), open(path, O_PATH | O_CLOEXEC) };
  gemini_access_t half =
      world_part(t, 0, CHUNK + 1000, 0, 0); /* one chunk is borrowed, of the other a part is loaded */
  for (int i = 0; i < 2; i++) {
    CHECK(unreadable[i] >= 0);
    CHECK_STATUS(gemini_borrow(w.mgr, &half, unreadable[i], 0), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().message, "is not open for reading");
    close(unreadable[i]);
  }
  OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_borrow(w.mgr, &all, fd, 0), GEMINI_ERR_BUSY);
  OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(world_holds(&w, t, 0, 2 * CHUNK, 1));
  OK(gemini_borrow(w.mgr, &all, fd, CHUNK));
  /* What is borrowed would be lost, also where other bytes of the file are written. */
  CHECK_STATUS(gemini_store(w.mgr, &all, fd, 0), GEMINI_ERR_STATE);
  CHECK(strstr(world_error().message, "are borrowed: it must not change"));
  CHECK_STATUS(gemini_store(w.mgr, &all, fd, 3 * CHUNK), GEMINI_ERR_STATE);
  CHECK(reads_file(&w, t, 0, 2 * CHUNK, CHUNK, DEVICE));
  OK(gemini_zero(w.mgr, &all));
  OK(gemini_store(w.mgr, &all, fd, 0));
  close(fd);
  world_close(&w);
}

typedef struct {
  const world_t *w;
  gemini_tensor_t t;
  _Atomic bool stop; /* Atomic: set by the other thread; orders nothing else */
} neighbour_t;
static void *use_neighbour(void *user) {
  neighbour_t *n = user;
  while (!n->stop) {
    gemini_access_t a = world_whole(n->t, GEMINI_READ_WRITE, HOST);
    const gemini_status_t status = gemini_acquire(n->w->mgr, &a, 1, GEMINI_STREAM_CALLER);
    if (!status) OK(gemini_release(n->w->mgr, &a, 1, GEMINI_STREAM_CALLER));
    else CHECK(status == GEMINI_ERR_BUSY); /* the chunk is being loaded */
  }
  return NULL;
}
/* The range ends in a chunk that another thread uses: it is borrowed and read, or refused and as it was. */
static void test_borrow_beside_another_thread_is_whole(void) {
  enum { BYTES_OF = CHUNK + 4096, TIMES = 8000 };
  int fd = file_of(BYTES_OF), refused = 0, borrowed = 0;
  world_t w = world_open(world_config(16, 64, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", BYTES_OF);
  neighbour_t n = { &w, world_tensor(&w, arena, "neighbour", 4096), false };
  gemini_access_t all = world_whole(t, 0, 0);
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, use_neighbour, &n), 0);
  for (int i = 0; i < TIMES; i++) {
    gemini_access_t a = world_whole(t, GEMINI_WRITE, HOST);
    gemini_status_t status;
    OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    memset(a.ptr, 1, BYTES_OF);
    OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    status = gemini_borrow(w.mgr, &all, fd, 0);
    if (status) CHECK_EQ(status, GEMINI_ERR_BUSY);
    *(status ? &refused : &borrowed) += 1;
    a = world_whole(t, GEMINI_READ, HOST);
    OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    const uint8_t *bytes = a.ptr;
    if (status) CHECK(bytes[0] == 1 && !memcmp(bytes, bytes + 1, BYTES_OF - 1));
    else CHECK(world_reads(a.ptr, 0, BYTES_OF, SEED));
    OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  n.stop = true;
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK(refused + borrowed == TIMES && borrowed);
  close(fd);
  world_close(&w);
}

/* The part in the last chunk cannot be loaded for want of room on the host: nothing is borrowed, and it can be tried
 * again. */
static void test_a_borrow_whose_load_fails_borrows_nothing(void) {
  int fd = file_of(2 * CHUNK);
  world_t w = world_open(world_config(4, 4, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", CHUNK + 1000), next = world_tensor(&w, arena, "next", 1000);
  gemini_tensor_t other = world_tensor(&w, world_arena(&w, GEMINI_KIND_OTHER, 1, "other", 0, 0), "other", 4 * CHUNK);
  world_fill(&w, t, 0, CHUNK + 1000, DEVICE, 1);
  world_fill(&w, next, 0, 1000, DEVICE, 2);
  gemini_access_t all = world_whole(t, 0, 0), holds = world_whole(other, GEMINI_WRITE, HOST);
  OK(gemini_acquire(w.mgr, &holds, 1, GEMINI_STREAM_CALLER));
  CHECK_STATUS(gemini_borrow(w.mgr, &all, fd, 0), GEMINI_ERR_OOM_HOST);
  CHECK(!strcmp(world_error().operation, "gemini_borrow"));
  OK(gemini_release(w.mgr, &holds, 1, GEMINI_STREAM_CALLER));
  OK(gemini_zero(w.mgr, &holds)); /* takes no slots any more */
  CHECK(world_holds(&w, t, 0, CHUNK + 1000, 1));
  OK(gemini_borrow(w.mgr, &all, fd, 0));
  CHECK(reads_file(&w, t, 0, CHUNK + 1000, 0, HOST) && world_holds(&w, next, 0, 1000, 2));
  close(fd);
  world_close(&w);
}

/* Nor does a tensor in the range, of other name than the range's, keep a gradient that the file does not have. */
static void test_borrow_knows_gradients_of_tied_tensors(void) {
  int fd = file_of(2 * CHUNK);
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 2, "weights", 0, 0);
  gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "grads", 0, arena);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 2 * CHUNK), tied, gradient;
  OK(gemini_tensor_register(w.mgr, arena, "tied", CHUNK, CHUNK, &tied));
  OK(gemini_tensor_counterpart(w.mgr, t, grads, &gradient));
  world_fill(&w, gradient, 0, 2 * CHUNK, HOST, 3);
  gemini_access_t all = world_whole(t, 0, 0), half = world_whole(tied, 0, 0);
  CHECK_STATUS(gemini_borrow(w.mgr, &half, fd, 0), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "its gradient has taken its bytes");
  CHECK_STATUS(gemini_borrow(w.mgr, &all, fd, 0), GEMINI_ERR_STATE);
  CHECK_SAYS(world_error().message, "a gradient has taken bytes of arena weights");
  CHECK(world_holds(&w, gradient, 0, 2 * CHUNK, 3));
  CHECK_STATUS(gemini_zero(w.mgr, &half), GEMINI_ERR_STATE);
  OK(gemini_zero(w.mgr, &all));
  OK(gemini_borrow(w.mgr, &all, fd, 0));
  CHECK(reads_file(&w, tied, 0, CHUNK, CHUNK, HOST));
  close(fd);
  world_close(&w);
}

/* Borrowed bytes take no room in the file tier, so they do not leave their files when that becomes smaller. */
static void test_borrowed_bytes_are_not_in_the_file_tier(void) {
  int fd = file_of(8 * CHUNK);
  world_t w = world_open(world_config(2, 4, 4));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_arena_t states = world_arena(&w, GEMINI_KIND_OTHER, 1, "states", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 8 * CHUNK), state = world_tensor(&w, states, "s", CHUNK);
  gemini_access_t all = world_whole(t, 0, 0), down = world_whole(state, 0, FILES);
  OK(gemini_borrow(w.mgr, &all, fd, 0));
  world_fill(&w, state, 0, CHUNK, HOST, 9);
  OK(gemini_move(w.mgr, &down, 1));
  CHECK(world_holds(&w, state, 0, CHUNK, 9));
  CHECK(reads_file(&w, t, 0, 3 * CHUNK, 0, HOST)); /* these have copies on the host now */
  CHECK_EQ(world_stats(&w).used_bytes[FILES], CHUNK);
  OK(gemini_budget_set(w.mgr, FILES, 0));
  for (int round = 0; round < 2; round++) CHECK(reads_file(&w, t, 0, 8 * CHUNK, 0, HOST));
  CHECK_EQ(moved(&w, LINK_H2F), CHUNK);
  close(fd);
  world_close(&w);
}

/* Copies on the host of what is borrowed make room, as what has another copy does: for a load and for an update, which
 * therefore need not run on the device. */
static void update_span(void *user, const gemini_update_span_t *span) {
  (void)user;
  CHECK_EQ(span->tier, HOST);
  memset(span->out[0], 7, span->element_count);
}
static void test_borrowed_copies_on_the_host_make_room(void) {
  int fd = file_of(6 * CHUNK);
  world_t w = world_open(world_config(4, 6, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_arena_t states = world_arena(&w, GEMINI_KIND_OTHER, 1, "states", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 6 * CHUNK), state = world_tensor(&w, states, "s", 3 * CHUNK);
  gemini_access_t all = world_whole(t, 0, 0), whole = world_whole(state, 0, 0);
  uint32_t mode = GEMINI_WRITE;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &states, u.modes = &mode, u.arena_count = 1, u.fn = update_span;
  OK(gemini_borrow(w.mgr, &all, fd, 0));
  for (int how = 0; how < 2; how++) {
    CHECK(reads_file(&w, t, 0, 6 * CHUNK, 0, HOST));
    CHECK_EQ(world_stats(&w).used_bytes[HOST], 6 * CHUNK);
    if (how) OK(gemini_update(w.mgr, &u));
    else OK(gemini_load(w.mgr, &whole, fd, 0));
    if (!how) CHECK(reads_file(&w, state, 0, 3 * CHUNK, 0, HOST));
    if (!how) OK(gemini_tensor_state_set(w.mgr, state, GEMINI_STATE_FREE));
  }
  CHECK(reads_file(&w, t, 0, 6 * CHUNK, 0, DEVICE));
  close(fd);
  world_close(&w);
}

/* A checkpoint has bytes of its own of what was borrowed. */
static void test_a_checkpoint_of_borrowed_bytes_is_whole(void) {
  int fd = file_of(4 * CHUNK);
  char dir[64];
  dir_make(dir);
  gemini_config_t c = world_config(4, 8, 12);
  c.file_dir = dir;
  c.checkpoint_name = "kept";
  for (int round = 0; round < 2; round++) {
    world_t w = world_open(c);
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
    gemini_tensor_t t = world_tensor(&w, arena, "t", 4 * CHUNK);
    gemini_access_t all = world_whole(t, 0, 0);
    if (!round) {
      OK(gemini_borrow(w.mgr, &all, fd, 0));
      OK(gemini_checkpoint(w.mgr));
      CHECK_EQ(ftruncate(fd, 0), 0);
    } else {
      OK(gemini_resume(w.mgr));
    }
    CHECK(reads_file(&w, t, 0, 4 * CHUNK, 0, HOST));
    CHECK_EQ(gemini_manager_close(w.mgr), GEMINI_OK);
  }
  close(fd);
  char path[256];
  snprintf(path, sizeof path, "%s/kept.index", dir), unlink(path);
  snprintf(path, sizeof path, "%s/kept.0.chunks", dir), unlink(path);
  CHECK_EQ(rmdir(dir), 0);
}

/* ---- random calls, beside one array */
static uint64_t draw(uint64_t *state, uint64_t below) {
  *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (*state >> 33) % below;
}
static void random_calls(uint64_t seed, uint64_t file_chunks) {
  enum { BYTES = 11 * CHUNK + 300, FILE_BYTES = 20 * CHUNK };
  static uint8_t want[BYTES], other[BYTES];
  uint64_t state = seed * 77 + 1;
  int fd = file_of(FILE_BYTES), second = file_of(FILE_BYTES);
  memset(want, 0, sizeof want);
  world_t w = world_open(world_config(3, file_chunks ? 4 : 14, file_chunks));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", BYTES);
  for (int call = 0; call < 120; call++) {
    uint64_t offset = draw(&state, BYTES), size = 1 + draw(&state, BYTES - offset), from = draw(&state, CHUNK);
    const uint32_t tier = draw(&state, 2) ? HOST : DEVICE;
    uint64_t kind = draw(&state, 8);
    if (kind > 3 && kind < 7 && size > 2 * CHUNK) size = 2 * CHUNK;
    gemini_access_t a = world_part(t, offset, size, kind == 5 ? GEMINI_READ_WRITE : GEMINI_READ, tier);
    if (kind < 3) {
      OK(gemini_borrow(w.mgr, &a, draw(&state, 2) ? fd : second, from));
      world_write(want + offset, from, size, SEED);
    } else if (kind == 3) {
      OK(gemini_load(w.mgr, &a, fd, from));
      world_write(want + offset, from, size, SEED);
    } else if (kind < 6) {
      OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      CHECK(!memcmp(a.ptr, want + offset, size));
      if (kind == 5) {
        world_write(a.ptr, 0, size, (uint64_t)call + 1);
        world_write(want + offset, 0, size, (uint64_t)call + 1);
      }
      OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    } else if (kind == 6) {
      OK(gemini_zero(w.mgr, &a));
      memset(want + offset, 0, size);
    } else {
      a.tier = file_chunks && draw(&state, 2) ? FILES : HOST;
      if (a.tier == FILES || !file_chunks) OK(gemini_move(w.mgr, &a, 1));
    }
  }
  int out = memfd_create("out", MFD_CLOEXEC);
  gemini_access_t all = world_whole(t, 0, 0);
  OK(gemini_store(w.mgr, &all, out, 0));
  CHECK_EQ(pread(out, other, BYTES, 0), BYTES);
  CHECK(!memcmp(other, want, BYTES));
  close(fd), close(second), close(out);
  world_close(&w);
}
static void test_random_calls_have_the_bytes_of_one_array(void) {
  for (uint64_t seed = 0; seed < check_repetitions(40); seed++) random_calls(seed, seed % 2 ? 30 : 0);
}

/* As many files as one likes, one after the other: those of which nothing is borrowed any more are let go. */
static void test_any_number_of_files_one_after_the_other(void) {
  enum { MORE = 300 };
  world_t w = world_open(world_config(4, 8, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_PARAM, 1, "weights", 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", CHUNK), kept = world_tensor(&w, arena, "kept", CHUNK);
  gemini_access_t all = world_whole(t, 0, 0), other = world_whole(kept, 0, 0);
  int fd = file_of(CHUNK + 5);
  OK(gemini_borrow(w.mgr, &other, fd, 5));
  close(fd);
  const int before = process_now().fds;
  for (int i = 0; i < MORE; i++) {
    fd = file_of(CHUNK + 100 + (uint64_t)i);
    OK(gemini_zero(w.mgr, &all));
    OK(gemini_borrow(w.mgr, &all, fd, 100 + (uint64_t)i));
    close(fd);
    if (i % 50 == 0) CHECK(reads_file(&w, t, 0, CHUNK, 100 + (uint64_t)i, HOST));
  }
  CHECK(reads_file(&w, t, 0, CHUNK, 100 + MORE - 1, HOST));
  CHECK(reads_file(&w, kept, 0, CHUNK, 5, HOST));
  CHECK(process_now().fds <= before + 1);
  world_close(&w);
}
/* And no more than 256 at once. */
static void test_too_many_files_at_once_are_refused(void) {
  enum { MOST = 256, HALF = MOST / 2 };
  world_t w = world_open(world_config(4, 8, 0));
  static const char *const names[] = { "first", "second", "third" };
  gemini_tensor_t t[3]; /* in three arenas, which have room for 256 chunks each */
  for (int i = 0; i < 3; i++) {
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, names[i], 0, 0);
    t[i] = world_tensor(&w, arena, names[i], (uint64_t)HALF * CHUNK);
  }
  for (uint64_t i = 0; i <= MOST; i++) {
    gemini_access_t part = world_part(t[i / HALF], i % HALF * CHUNK, CHUNK, 0, 0);
    int fd = file_of(CHUNK + i);
    if (i < MOST) {
      OK(gemini_borrow(w.mgr, &part, fd, i));
    } else {
      CHECK_STATUS(gemini_borrow(w.mgr, &part, fd, i), GEMINI_ERR_INVALID);
      CHECK_SAYS(world_error().message, "ranges of 256 files are borrowed, the limit is 256");
    }
    close(fd);
  }
  CHECK(reads_file(&w, t[1], (HALF - 1) * (uint64_t)CHUNK, CHUNK, MOST - 1, HOST));
  world_close(&w);
}

int main(void) {
  RUN(test_borrowed_weights_need_no_memory);
  RUN(test_borrowed_weights_under_a_plan);
  RUN(test_a_file_that_changes_is_not_read);
  RUN(test_a_file_that_nothing_is_borrowed_from_may_change);
  RUN(test_borrow_refusals_change_nothing);
  RUN(test_borrow_beside_another_thread_is_whole);
  RUN(test_a_borrow_whose_load_fails_borrows_nothing);
  RUN(test_borrow_knows_gradients_of_tied_tensors);
  RUN(test_borrowed_bytes_are_not_in_the_file_tier);
  RUN(test_borrowed_copies_on_the_host_make_room);
  RUN(test_a_checkpoint_of_borrowed_bytes_is_whole);
  RUN(test_random_calls_have_the_bytes_of_one_array);
  RUN(test_any_number_of_files_one_after_the_other);
  RUN(test_too_many_files_at_once_are_refused);
  return check_done();
}
