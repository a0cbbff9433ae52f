/* Norms: the same bits by any number of workers and wherever the bytes are; reads ahead, reads that fail, updates and
 * copies that are under way. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "chunk/arena.h"
#include "chunk/update.h"
#include "core/streams.h"
#include "core/workers.h"
#include "device/device.h"
#include "tiers_world.h"

enum { BLOCK = 65536 };
static const uint32_t widths[] = { 4, 2, 2, 8 };

/* ---- what it should be: block by block, each from left to right, added up from the first to the last */
static double square_of(const uint8_t *at, uint32_t dtype) {
  static double halves[65536];
  uint16_t half;
  memcpy(&half, at, 2);
  if (dtype == GEMINI_DTYPE_F16) {
    if (halves[1] == 0) /* without infinities */
      for (uint32_t i = 0; i < 65536; i++) {
        double value = i >> 10 & 31 ? ldexp(1024 + (i & 1023), (int)(i >> 10 & 31) - 25) : ldexp(i & 1023, -24);
        halves[i] = value * value;
      }
    return halves[half];
  }
  if (dtype == GEMINI_DTYPE_F64) {
    double value;
    memcpy(&value, at, 8);
    volatile double square = value * value; /* rounded before it is added */
    return square;
  }
  uint32_t bits = (uint32_t)half << 16;
  if (dtype == GEMINI_DTYPE_F32) memcpy(&bits, at, 4);
  float value;
  memcpy(&value, &bits, 4);
  return (double)value * value;
}
static double sum_of(const uint8_t *at, uint64_t size, uint32_t dtype) {
  double sum = 0;
  for (uint64_t i = 0; i < size; i += widths[dtype]) sum += square_of(at + i, dtype);
  return sum;
}
static double norm_of(const uint8_t *bytes, uint64_t offset, uint64_t size, uint32_t dtype) {
  double sum = 0;
  for (uint64_t at = offset, end = offset + size, next; at < end; at = next) {
    next = (at / BLOCK + 1) * BLOCK < end ? (at / BLOCK + 1) * BLOCK : end;
    sum += sum_of(bytes + at, next - at, dtype);
  }
  return sqrt(sum);
}
/* Finite in every dtype, and not large: the highest bit of each exponent is 0. */
static void fill(uint8_t *bytes, uint64_t size, uint64_t seed) {
  for (uint64_t i = 0; i < size; i++) bytes[i] = world_byte(seed, i) & 0xbf;
}
#define CHECK_BITS(norm, expected)                                                                \
  do {                                                                                            \
    double check_n = (norm), check_e = (expected);                                                \
    if (memcmp(&check_n, &check_e, sizeof check_n)) {                                             \
      fprintf(stderr, "%s:%d: norm is %.17g, not %.17g\n", __FILE__, __LINE__, check_n, check_e); \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)

static void test_blocks_summed_side_by_side_are_summed_each(void) {
  enum { MOST = 19 };
  static const uint64_t counts[] = { 0, 1, 2, 63, 64, 65, 127, 128, 1000 };
  static uint8_t bytes[MOST * 1000 * 8 + 8];
  fill(bytes, sizeof bytes, 3);
  for (uint32_t dtype = 0; dtype < 4; dtype++)
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
      for (uint64_t blocks = 0; blocks <= MOST; blocks++)
        for (uint64_t shift = 0; shift < 8; shift += 7) { /* unaligned, too */
          uint64_t size = counts[c] * widths[dtype];
          double sums[MOST + 1];
          for (uint64_t b = 0; b <= MOST; b++) sums[b] = -7;
          gmi_sum_squares_each(bytes + shift, dtype, counts[c], blocks, sums);
          for (uint64_t b = 0; b < blocks; b++) {
            double expected = 0;
            for (uint64_t i = 0; i < counts[c]; i++) {
              uint8_t value[8]; /* aligned */
              memcpy(value, bytes + shift + b * size + i * widths[dtype], widths[dtype]);
              expected += square_of(value, dtype);
            }
            CHECK_BITS(sums[b], expected);
            CHECK_BITS(gmi_sum_squares(bytes + shift + b * size, dtype, counts[c]), expected);
          }
          CHECK(sums[blocks] == -7);
        }
}

/* ---- an arena of bytes */
typedef struct {
  world_t w;
  gemini_arena_t arena;
  uint64_t size, chunk;
  uint8_t *model;
} bytes_t;
static gemini_config_t norm_config(uint64_t chunk, uint64_t device, uint64_t host, uint64_t file, uint32_t threads) {
  gemini_config_t c = tiers_config(device, host, file);
  c.device_bytes = device * chunk;
  c.host_bytes = host * chunk;
  c.file_bytes = file * chunk;
  c.chunk_bytes = chunk;
  c.update_threads = threads;
  return c;
}
static void bytes_put(bytes_t *b) { /* as the model says */
  for (uint64_t at = 0; at < b->size; at += b->chunk) {
    uint64_t size = b->size - at < b->chunk ? b->size - at : b->chunk;
    gemini_access_t x = world_part(b->arena, at, size, GEMINI_WRITE, GEMINI_TIER_HOST);
    CHECK_OK(gemini_acquire(b->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    memcpy(x.ptr, b->model + at, size);
    CHECK_OK(gemini_release(b->w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  }
}
static bytes_t bytes_open(gemini_config_t c, uint64_t size) {
  bytes_t b = { .w = world_open(c), .size = size, .chunk = c.chunk_bytes, .model = malloc(size) };
  CHECK(b.model);
  b.arena = world_arena(&b.w, GEMINI_KIND_MASTER, 4, "bytes", 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(b.w.mgr, b.arena, size, &offset));
  fill(b.model, size, 1);
  bytes_put(&b);
  return b;
}
static void bytes_close(bytes_t *b) {
  world_close(&b->w);
  free(b->model);
}
static gmi_chunk_t *bytes_chunk(const bytes_t *b, uint64_t i) {
  return &gmi_arena_get(gmi_manager_get(b->w.mgr), b->arena)->chunks[i];
}
static uint64_t bytes_chunks(const bytes_t *b) { return (b->size + b->chunk - 1) / b->chunk; }
static void bytes_move(const bytes_t *b, uint64_t i, uint32_t tier) {
  gemini_access_t x = world_part(b->arena, i * b->chunk, 1, 0, tier);
  CHECK_OK(gemini_move(b->w.mgr, &x, 1));
  uint8_t valid = bytes_chunk(b, i)->valid_;
  CHECK(tier == GEMINI_TIER_DEVICE ? valid & GMI_VALID_DEVICE
        : tier == GEMINI_TIER_HOST ? (valid & (GMI_VALID_DEVICE | GMI_VALID_HOST)) == GMI_VALID_HOST
                                   : valid == GMI_VALID_FILE);
}
static double bytes_norm(const bytes_t *b, uint64_t offset, uint64_t size, uint32_t dtype) {
  gemini_access_t x = world_part(b->arena, offset, size, 0, 0);
  double norm = -7;
  CHECK_OK(gemini_norm(b->w.mgr, &x, dtype, GEMINI_STREAM_CALLER, &norm));
  return norm;
}

enum { EVERYWHERE = GEMINI_TIER_COUNT };
static void bytes_spread(const bytes_t *b, uint32_t tier, uint64_t *random) {
  for (uint64_t i = 0; i < bytes_chunks(b); i++)
    bytes_move(b, i, tier == EVERYWHERE ? (uint32_t)below(random, GEMINI_TIER_COUNT) : tier);
}

static const uint32_t thread_counts[] = { 1, 2, 7 };
enum { THREAD_COUNTS = 3 };

/* Ranges whose bounds are beside those of blocks and chunks. */
static void run_placements(uint64_t chunk, uint64_t size) {
  const uint64_t u = 8;
  const uint64_t offsets[] = { 0, u, 2 * BLOCK - u, chunk - u, chunk, size - u };
  const uint64_t sizes[] = { u, BLOCK, BLOCK + u, 9 * BLOCK + u, size };
  enum { OFFSETS = sizeof offsets / sizeof *offsets, SIZES = sizeof sizes / sizeof *sizes };
  static double expected[4][OFFSETS][SIZES];
  uint64_t random = 5, chunks = (size + chunk - 1) / chunk;
  for (int t = 0; t < THREAD_COUNTS; t++) {
    bytes_t b = bytes_open(norm_config(chunk, chunks, chunks, 2 * chunks, thread_counts[t]), size);
    for (uint32_t tier = 0; tier <= EVERYWHERE; tier++) {
      bytes_spread(&b, tier, &random);
      for (uint32_t dtype = 0; dtype < 4; dtype++) {
        for (int o = 0; o < OFFSETS; o++) {
          for (int s = 0; s < SIZES; s++) {
            uint64_t part = sizes[s] < size - offsets[o] ? sizes[s] : size - offsets[o];
            double *e = &expected[dtype][o][s];
            if (!t && !tier) *e = norm_of(b.model, offsets[o], part, dtype);
            CHECK_BITS(bytes_norm(&b, offsets[o], part, dtype), *e);
            if ((o + s) % 3 == 0) bytes_spread(&b, tier, &random); /* what was in files is on the host now */
          }
        }
      }
    }
    /* What was never written is zero, and so is what was zeroed. */
    gemini_access_t zero = world_part(b.arena, chunk, chunk, 0, 0);
    CHECK_OK(gemini_zero(b.w.mgr, &zero));
    memset(b.model + chunk, 0, chunk);
    CHECK_BITS(bytes_norm(&b, 0, size, GEMINI_DTYPE_BF16), norm_of(b.model, 0, size, GEMINI_DTYPE_BF16));
    bytes_close(&b);
  }
}
static void test_bits_depend_on_neither_workers_nor_places(void) { run_placements(BLOCK, 6 * BLOCK - 24); }
static void test_bits_are_the_same_in_large_chunks(void) {
  /* A worker takes 8 blocks of halves at once: more than one slice a chunk, and the last one in part. */
  run_placements(1 << 20, (2 << 20) + 11 * BLOCK - 24);
}

static void test_infinities_and_no_numbers_are_the_same_everywhere(void) {
  bytes_t b = bytes_open(norm_config(BLOCK, 6, 6, 12, 2), 6 * BLOCK);
  uint64_t random = 1;
  for (int what = 0; what < 2; what++) {
    uint32_t bits[] = { 0x7f800000u, 0xffc12345u }; /* then it is none, whatever else there is */
    memcpy(b.model + 2 * BLOCK + 100, &bits[what], 4);
    memcpy(b.model + 4 * BLOCK, &bits[what], 4);
    bytes_put(&b);
    for (uint32_t tier = 0; tier <= EVERYWHERE; tier++) {
      bytes_spread(&b, tier, &random);
      CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F32), what ? (double)NAN : (double)INFINITY);
    }
  }
  bytes_close(&b);
}

/* Gradients in their parameters' bytes, of which some were written. */
static void test_gradients_among_parameters_have_the_same_bits(void) {
  enum { TENSORS = 60, CHUNKS = 40 };
  double first = -1;
  for (int t = 0; t < THREAD_COUNTS; t++) {
    world_t w = world_open(norm_config(BLOCK, CHUNKS, CHUNKS, 2 * CHUNKS, thread_counts[t]));
    gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
    gemini_arena_t grads = world_arena(&w, GEMINI_KIND_GRAD, 2, "grads", 0, params);
    uint64_t random = 21;
    double sum = 0;
    for (int i = 0; i < TENSORS; i++) {
      char name[16];
      snprintf(name, sizeof name, "t%d", i);
      uint64_t size = 2 + 2 * below(&random, i % 4 ? 3000 : 50000);
      gemini_tensor_t p = world_tensor(&w, params, name, size), g;
      CHECK_OK(gemini_tensor_counterpart(w.mgr, p, grads, &g));
      bool gradient = below(&random, 3);
      gemini_access_t x = world_whole(gradient ? g : p, GEMINI_WRITE, GEMINI_TIER_HOST);
      CHECK_OK(gemini_acquire(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
      fill(x.ptr, size, (uint64_t)i + 1);
      if (gradient) sum += sum_of(x.ptr, size, GEMINI_DTYPE_BF16);
      CHECK_OK(gemini_release(w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    }
    gemini_access_t all = world_whole(grads, 0, 0);
    for (int round = 0; round < 6; round++) {
      uint64_t size = world_arena_info(&w, params).size_bytes;
      for (uint64_t at = 0; at < size; at += BLOCK) {
        gemini_access_t x = world_part(params, at, 1, 0, round < 3 ? (uint32_t)round : (uint32_t)below(&random, 3));
        CHECK_OK(gemini_move(w.mgr, &x, 1));
      }
      double norm = -7;
      CHECK_OK(gemini_norm(w.mgr, &all, GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm));
      CHECK(fabs(norm - sqrt(sum)) <= 1e-12 * sqrt(sum)); /* the order of additions is the library's */
      if (first < 0) first = norm;
      CHECK_BITS(norm, first);
    }
    CHECK(chunks_right(&w));
    world_close(&w);
  }
}

/* ---- who works */
static void test_workers_sum_the_host_and_times_of_updates_are_left_alone(void) {
  enum { CHUNK = 1 << 20, CHUNKS = 5, SPANS = 64 };
  bytes_t b = bytes_open(norm_config(CHUNK, 2, CHUNKS, 0, 2), CHUNKS * CHUNK - 3 * BLOCK);
  gmi_manager_t *m = gmi_manager_get(b.w.mgr);
  gmi_workers_record(m, true);
  bytes_move(&b, 1, GEMINI_TIER_DEVICE);
  CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_BF16), norm_of(b.model, 0, b.size, GEMINI_DTYPE_BF16));
  gmi_workers_interval_t spans[SPANS];
  uint32_t count = gmi_workers_recorded(m, spans, SPANS);
  CHECK_EQ(count, 2 * (CHUNKS - 1)); /* slices of 512 KiB, but of the chunk on the device */
  for (uint32_t i = 0; i < count; i++) CHECK(spans[i].norm && spans[i].begin_ns <= spans[i].end_ns);
  CHECK(gmi_workers_ns_per_element(m, GEMINI_PASS_BOTH) == 0); /* the planner counts on updates being updates */
  CHECK_EQ(gmi_workers_pending(m), 0);
  gmi_workers_record(m, false);
  bytes_close(&b);
}

/* Bytes on their way from the device are summed as they come. */
static void test_copies_under_way_are_summed_as_they_land(void) {
  enum { CHUNKS = 16, COPY_MS = 10 };
  gemini_config_t c = norm_config(BLOCK, CHUNKS, CHUNKS, 0, 1);
  c.sim_d2h_bytes_per_s = BLOCK * 1000 / COPY_MS;
  bytes_t b = bytes_open(c, CHUNKS * BLOCK);
  gmi_manager_t *m = gmi_manager_get(b.w.mgr);
  for (uint64_t i = 0; i < CHUNKS; i++) {
    gemini_access_t x = world_part(b.arena, i * BLOCK, BLOCK, GEMINI_WRITE, GEMINI_TIER_DEVICE);
    CHECK_OK(gemini_acquire(b.w.mgr, &x, 1, GEMINI_STREAM_CALLER));
    fill(x.ptr, BLOCK, 100 + i);
    fill(b.model + i * BLOCK, BLOCK, 100 + i);
    CHECK_OK(gemini_release(b.w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  }
  gmi_workers_record(m, true);
  for (uint64_t i = 0; i < CHUNKS; i++) bytes_move(&b, i, GEMINI_TIER_HOST);
  gmi_fence_t last = m->host.slots[bytes_chunk(&b, CHUNKS - 1)->slot_].fence;
  CHECK(!gmi_fence_reached(m, last));
  CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F32), norm_of(b.model, 0, b.size, GEMINI_DTYPE_F32));
  uint64_t last_ns;
  CHECK(gmi_fence_reached(m, last));
  CHECK_OK(m->device.ops->stream.mark_time(m->device.self, gmi_fence_stream(last), gmi_fence_mark(last), &last_ns));
  gmi_workers_interval_t spans[CHUNKS];
  CHECK_EQ(gmi_workers_recorded(m, spans, CHUNKS), CHUNKS);
  uint32_t early = 0;
  for (uint32_t i = 0; i < CHUNKS; i++) early += spans[i].end_ns < last_ns;
  CHECK(early >= CHUNKS / 2);
  bytes_close(&b);
}

/* The caller's stream has still to write what is on the host. */
typedef struct {
  uint8_t *at;
  const uint8_t *bytes;
} late_copy_t;
static void late_copy(void *user) {
  late_copy_t *l = user;
  sleep_us(20000);
  memcpy(l->at, l->bytes, BLOCK);
}
static void test_norm_comes_after_its_streams_work(void) {
  bytes_t b = bytes_open(norm_config(BLOCK, 4, 8, 16, 2), 3 * BLOCK);
  for (uint64_t i = 0; i < 3; i++) {
    gemini_access_t x =
        world_part(b.arena, i * BLOCK, BLOCK, GEMINI_WRITE, i == 1 ? GEMINI_TIER_DEVICE : GEMINI_TIER_HOST);
    gemini_access_t all = world_whole(b.arena, 0, 0);
    fill(b.model + i * BLOCK, BLOCK, 50 + i);
    CHECK_OK(gemini_acquire(b.w.mgr, &x, 1, b.w.stream));
    late_copy_t l = { x.ptr, b.model + i * BLOCK };
    CHECK_OK(gemini_stream_call(b.w.mgr, b.w.stream, late_copy, &l));
    CHECK_OK(gemini_release(b.w.mgr, &x, 1, b.w.stream));
    double norm = -7;
    CHECK_OK(gemini_norm(b.w.mgr, &all, GEMINI_DTYPE_F32, b.w.stream, &norm));
    CHECK_BITS(norm, norm_of(b.model, 0, b.size, GEMINI_DTYPE_F32));
  }
  bytes_close(&b);
}

/* ---- updates under way */
typedef struct {
  _Atomic bool held; /* an update waits until it is not */
  uint32_t us;       /* a span takes */
} slow_t;
static void halve(void *user, const gemini_update_span_t *span) {
  slow_t *s = user;
  CHECK_EQ(span->tier, GEMINI_TIER_HOST);
  while (s && atomic_load(&s->held)) sleep_us(200);
  if (s) sleep_us(s->us);
  float *values = span->ptr[0];
  for (uint64_t i = 0; i < span->element_count; i++) values[i] = values[i] * 0.5f + 0.25f;
}
static void halve_model(bytes_t *b) {
  float *values = (float *)(void *)b->model;
  for (uint64_t i = 0; i < b->size / 4; i++) values[i] = values[i] * 0.5f + 0.25f;
}
static void update_late(const bytes_t *b, gemini_arena_t arena, slow_t *slow) {
  static const uint32_t mode = GEMINI_READ_WRITE;
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = &arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.fn = halve;
  u.user = slow;
  CHECK_OK(gemini_update(b->w.mgr, &u));
}

/* Of the chunks it sums, pending updates come first, be they deferred or not; with room for all, and for few. */
static void test_pending_updates_come_first(void) {
  for (int t = 0; t < THREAD_COUNTS; t++) {
    for (int tight = 0; tight < 2; tight++) {
      bytes_t b = bytes_open(norm_config(BLOCK, 4, tight ? 10 : 40, 80, thread_counts[t]), 30 * BLOCK - 40);
      slow_t slow = { .us = 300 };
      if (tight) faults.delay_us[0] = faults.delay_us[1] = 200;
      for (int step = 0; step < 3; step++) {
        atomic_store(&slow.held, true);
        update_late(&b, b.arena, &slow);
        halve_model(&b);
        if (step == 1) { /* a second one on top */
          update_late(&b, b.arena, &slow);
          halve_model(&b);
        }
        CHECK(world_stats(&b.w).pending_updates > 0);
        atomic_store(&slow.held, false);
        uint64_t at = step == 2 ? 7 * BLOCK + 8 : 0;
        CHECK_BITS(bytes_norm(&b, at, b.size - at, GEMINI_DTYPE_F32),
                   norm_of(b.model, at, b.size - at, GEMINI_DTYPE_F32));
      }
      CHECK_OK(gemini_update_wait(b.w.mgr));
      CHECK(chunks_right(&b.w));
      CHECK(world_stats(&b.w).peak_bytes[GEMINI_TIER_HOST] <= (tight ? 10u : 40u) * BLOCK);
      faults.delay_us[0] = faults.delay_us[1] = 0;
      bytes_close(&b);
    }
  }
}

static void test_other_chunks_updates_are_not_waited_for(void) {
  bytes_t b = bytes_open(norm_config(BLOCK, 4, 40, 0, 2), 3 * BLOCK);
  gemini_arena_t other = world_arena(&b.w, GEMINI_KIND_MASTER, 4, "other", 0, 0);
  uint64_t offset;
  CHECK_OK(gemini_arena_take(b.w.mgr, other, BLOCK, &offset));
  slow_t slow = { .held = true };
  update_late(&b, other, &slow); /* one worker is held by it */
  CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F32), norm_of(b.model, 0, b.size, GEMINI_DTYPE_F32));
  CHECK_EQ(world_stats(&b.w).pending_updates, 1);
  atomic_store(&slow.held, false);
  CHECK_OK(gemini_update_wait(b.w.mgr));
  bytes_close(&b);
}

/* ---- files */
static atomic_int reading, reading_most;
static ssize_t counted_pread(int fd, void *buffer, size_t size, off_t offset) {
  int now = atomic_fetch_add(&reading, 1) + 1, most = atomic_load(&reading_most);
  while (now > most && !atomic_compare_exchange_weak(&reading_most, &most, now)) {
  }
  sleep_us(5000);
  ssize_t n = gmi_sys_real.pread(fd, buffer, size, offset);
  atomic_fetch_sub(&reading, 1);
  return n;
}

static void test_files_are_read_ahead_but_not_more_than_fits(void) {
  enum { CHUNKS = 48 };
  static const uint64_t hosts[] = { 64, 24, 5, 1 };
  for (int h = 0; h < 4; h++) {
    bytes_t b = bytes_open(norm_config(BLOCK, 4, hosts[h], 3 * CHUNKS, 2), CHUNKS * BLOCK);
    bytes_spread(&b, GEMINI_TIER_FILE, NULL);
    CHECK_OK(gemini_stats_reset(b.w.mgr));
    if (engine == GEMINI_FILE_ENGINE_THREADS) fault_sys.pread = counted_pread;
    reading_most = 0;
    CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F16), norm_of(b.model, 0, b.size, GEMINI_DTYPE_F16));
    fault_sys.pread = fault_pread;
    figures_t s = world_stats(&b.w);
    CHECK_EQ(s.moved_chunks[LINK_F2H][GEMINI_REASON_UPDATE], CHUNKS); /* each once */
    CHECK_EQ(s.moved_chunks[LINK_H2F][GEMINI_REASON_PRESSURE], 0);
    CHECK(s.peak_bytes[GEMINI_TIER_HOST] <= hosts[h] * BLOCK);
    uint32_t ahead = gmi_updates_ahead(gmi_manager_get(b.w.mgr), 1);
    if (engine == GEMINI_FILE_ENGINE_THREADS) {
      CHECK(reading_most <= (int)ahead);
      CHECK(reading_most >= (hosts[h] > 1 ? 2 : 1) && (hosts[h] < 64 || reading_most >= (int)ahead / 2));
    }
    CHECK(chunks_right(&b.w));
    bytes_close(&b);
  }
}

/* One of its chunks cannot be read: the call says which, and leaves nothing behind; it is tried once more. */
static void test_a_read_that_fails_is_told_and_leaves_nothing_held(void) {
  enum { CHUNKS = 12 };
  for (uint64_t failing = 0; failing < CHUNKS; failing += failing % 3 + 1) {
    for (int fleeting = 0; fleeting < 2; fleeting++) {
      bytes_t b = bytes_open(norm_config(BLOCK, 4, failing % 2 ? 5 : 40, 60, failing % 2 + 1), CHUNKS * BLOCK);
      double expected = norm_of(b.model, 0, b.size, GEMINI_DTYPE_F32), norm = -7;
      bytes_spread(&b, GEMINI_TIER_FILE, NULL);
      faults.only_at[0] = (long long)(bytes_chunk(&b, failing)->block_ * BLOCK) + 1;
      break_files(false, EIO, 0, fleeting ? 1 : -1);
      gemini_access_t all = world_whole(b.arena, 0, 0);
      gemini_status_t status = gemini_norm(b.w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm);
      CHECK_EQ(status, fleeting ? GEMINI_OK : GEMINI_ERR_IO);
      if (fleeting) {
        CHECK_EQ(faults.left[0], 0);
        CHECK_BITS(norm, expected);
      } else {
        char chunk[40];
        snprintf(chunk, sizeof chunk, "chunk %" PRIu64 " of arena bytes", failing);
        CHECK_SAYS(world_error().message, chunk);
        CHECK_EQ(world_error().native_code, EIO);
        CHECK(norm == -7);
      }
      faults.only_at[0] = 0;
      mend_files();
      CHECK(chunks_right(&b.w));
      for (uint64_t i = 0; i < CHUNKS; i++) CHECK(!bytes_chunk(&b, i)->host_users_ && !bytes_chunk(&b, i)->user_pins_);
      CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F32), expected);
      CHECK_OK(gemini_update_wait(b.w.mgr)); /* that a norm failed is no update's failure */
      update_late(&b, b.arena, NULL);        /* and nothing is in use */
      halve_model(&b);
      CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F32), norm_of(b.model, 0, b.size, GEMINI_DTYPE_F32));
      CHECK_OK(gemini_update_wait(b.w.mgr));
      bytes_close(&b);
    }
  }
}

/* A read that somebody else began, and that fails while the norm is under way, is tried again. */
static void test_a_read_that_somebody_else_began_is_tried_again(void) {
  bytes_t b = bytes_open(norm_config(BLOCK, 4, 20, 60, 1), 8 * BLOCK);
  for (int round = 0; round < 4; round++) {
    bytes_spread(&b, GEMINI_TIER_FILE, NULL);
    break_files(false, EIO, 2, 1);
    if (engine == GEMINI_FILE_ENGINE_THREADS) faults.delay_us[0] = round % 2 ? 5000 : 0;
    gemini_access_t x = world_part(b.arena, 0, 4 * BLOCK, 0, GEMINI_TIER_HOST);
    CHECK_OK(gemini_hint(b.w.mgr, &x, 1));
    if (round == 2) sleep_us(10000); /* it has failed before */
    CHECK_BITS(bytes_norm(&b, 0, b.size, GEMINI_DTYPE_F32), norm_of(b.model, 0, b.size, GEMINI_DTYPE_F32));
    CHECK_EQ(faults.left[0], 0);
    mend_files();
    faults.delay_us[0] = 0;
    CHECK(chunks_right(&b.w));
  }
  bytes_close(&b);
}

static void test_a_copy_that_fails_is_told_and_is_no_updates_failure(void) {
  bytes_t b = bytes_open(norm_config(BLOCK, 4, 8, 0, 2), 4 * BLOCK);
  gmi_manager_t *m = gmi_manager_get(b.w.mgr);
  gemini_access_t x = world_part(b.arena, BLOCK, BLOCK, GEMINI_WRITE, GEMINI_TIER_DEVICE),
                  all = world_whole(b.arena, 0, 0);
  CHECK_OK(gemini_acquire(b.w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_release(b.w.mgr, &x, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gmi_device_sim_fail(m->device.self, gmi_link_out(m)->stream, GEMINI_ERR_DEVICE));
  x.tier = GEMINI_TIER_HOST;
  CHECK_OK(gemini_move(b.w.mgr, &x, 1));
  double norm = -7;
  CHECK_STATUS(gemini_norm(b.w.mgr, &all, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm), GEMINI_ERR_DEVICE);
  CHECK(norm == -7);
  CHECK_OK(gemini_update_wait(b.w.mgr));
  x = world_part(b.arena, 0, BLOCK, 0, 0); /* others are not concerned */
  CHECK_OK(gemini_norm(b.w.mgr, &x, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm));
  CHECK_BITS(norm, norm_of(b.model, 0, BLOCK, GEMINI_DTYPE_F32));
  bytes_close(&b);
}

int main(void) {
  tiers_begin();
  bool uring = has_uring();
  RUN_TIMED(test_blocks_summed_side_by_side_are_summed_each);
  RUN_TIMED(test_infinities_and_no_numbers_are_the_same_everywhere);
  RUN_TIMED(test_workers_sum_the_host_and_times_of_updates_are_left_alone);
  RUN_TIMED(test_copies_under_way_are_summed_as_they_land);
  RUN_TIMED(test_norm_comes_after_its_streams_work);
  RUN_TIMED(test_other_chunks_updates_are_not_waited_for);
  RUN_TIMED(test_a_copy_that_fails_is_told_and_is_no_updates_failure);
  RUN_TIMED(test_bits_are_the_same_in_large_chunks);
  RUN_TIMED(test_gradients_among_parameters_have_the_same_bits);
  for (engine = GEMINI_FILE_ENGINE_THREADS; engine; engine = engine == GEMINI_FILE_ENGINE_THREADS && uring ? 1 : 0) {
    fprintf(stderr, "  engine: %s\n", engine == GEMINI_FILE_ENGINE_THREADS ? "threads" : "io_uring");
    RUN_TIMED(test_bits_depend_on_neither_workers_nor_places);
    RUN_TIMED(test_pending_updates_come_first);
    RUN_TIMED(test_files_are_read_ahead_but_not_more_than_fits);
    RUN_TIMED(test_a_read_that_fails_is_told_and_leaves_nothing_held);
    RUN_TIMED(test_a_read_that_somebody_else_began_is_tried_again);
  }
  return check_done();
}
