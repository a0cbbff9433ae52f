/* The contract of a device (device.h), for all of them. SPDX-License-Identifier: Apache-2.0
 *
 * Without more, it runs on the simulated device and then on the CUDA device over the fake driver of
 * tests/reference/fake_cuda.c. GEMINI_TEST_DEVICE names one device only: sim, fake or cuda, the GPU of this machine
 * (skipped without one).
 *
 * Device memory is touched through queued work only, except where a test says that it is for the simulated device. */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"
#include "../touch.h"
#include "base/status.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/sum.h"
#include "fake_cuda.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define MS UINT64_C(1000000)
#define NOTHING UINT64_C(0x5EED) /* what a result holds that must stay untouched */

static const gmi_device_ops_t *ops = &gmi_device_sim;
/* A real driver's queues are finite: this much waits on a held stream without trouble. */
#define HELD_LIMIT (ops == &gmi_device_sim ? UINT64_MAX : UINT64_C(400))

/* --- helpers --- */

static void *device_open(uint64_t memory_bytes, uint64_t h2d_bytes_per_s, uint64_t d2h_bytes_per_s) {
  gmi_device_config_t config = { 0, 0, memory_bytes, h2d_bytes_per_s, d2h_bytes_per_s };
  void *device = NULL;
  CHECK_EQ(ops->open(&config, &device), GEMINI_OK);
  CHECK(device);
  return device;
}

/* Bytes in frames of at least that many bytes. */
static uint64_t round_up(void *device, uint64_t bytes) {
  uint64_t granule = ops->memory.granularity(device);
  return (bytes + granule - 1) / granule * granule;
}

static uint32_t stream_new(void *device) {
  uint32_t stream = UINT32_MAX;
  CHECK_EQ(ops->stream.create(device, false, &stream), GEMINI_OK);
  CHECK(stream < GMI_DEVICE_MAX_STREAMS);
  return stream;
}

static uint64_t mark_new(void *device, uint32_t stream) {
  uint64_t mark = 0;
  CHECK_EQ(ops->stream.mark(device, stream, &mark), GEMINI_OK);
  return mark;
}

static void stream_drain(void *device, uint32_t stream) {
  CHECK_EQ(ops->stream.sync(device, stream, mark_new(device, stream)), GEMINI_OK);
}

static uint64_t frame_new(void *device, uint64_t size_bytes) {
  uint64_t frame = 0;
  CHECK_EQ(ops->memory.frame_create(device, size_bytes, &frame), GEMINI_OK);
  CHECK(frame != 0);
  return frame;
}

/* An address range backed by one frame. */
static unsigned char *memory_new(void *device, uint64_t size_bytes) {
  void *base = NULL;
  CHECK_EQ(ops->memory.reserve(device, size_bytes, &base), GEMINI_OK);
  CHECK_EQ(ops->memory.map(device, base, frame_new(device, size_bytes), size_bytes), GEMINI_OK);
  return base;
}

static unsigned char *host_new(void *device, uint64_t size_bytes) {
  void *base = NULL;
  CHECK_EQ(posix_memalign(&base, 4096, size_bytes), 0);
  memset(base, 0, size_bytes);
  CHECK_EQ(ops->memory.host_lock(device, base, size_bytes), GEMINI_OK);
  return base;
}

static void host_delete(void *device, void *base, uint64_t size_bytes) {
  CHECK_EQ(ops->memory.host_unlock(device, base, size_bytes), GEMINI_OK);
  free(base);
}

static void copy_in(void *device, uint32_t stream, void *dst, const void *src, uint64_t size_bytes) {
  CHECK_EQ(ops->queue.copy(device, stream, dst, src, size_bytes, GMI_COPY_H2D), GEMINI_OK);
}
static void copy_out(void *device, uint32_t stream, void *dst, const void *src, uint64_t size_bytes) {
  CHECK_EQ(ops->queue.copy(device, stream, dst, src, size_bytes, GMI_COPY_D2H), GEMINI_OK);
}

static void sleep_ns(uint64_t ns) {
  struct timespec ts = { (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) };
  nanosleep(&ts, NULL);
}

/* Holds a stream until the gate is opened. */
static void gate_close(void *device, uint32_t stream, _Atomic uint64_t *gate) {
  atomic_store(gate, 0);
  CHECK_EQ(ops->stream.wait_flag(device, stream, gate, 1), GEMINI_OK);
}
static void gate_open(void *device, _Atomic uint64_t *gate) {
  atomic_store_explicit(gate, 1, memory_order_release);
  ops->stream.flag_wake(device);
}

/* --- frames and addresses --- */

/* The simulated device's memory: errno of calls for it, or 0. */
static atomic_int fallocate_error;
int fallocate(int fd, int mode, off_t offset, off_t size) {
  int error = fallocate_error;
  if (!error) return (int)syscall(SYS_fallocate, fd, mode, offset, size);
  errno = error;
  return -1;
}
static void test_device_frame_that_cannot_be_freed_still_counts(void) {
  if (ops != &gmi_device_sim) return;
  void *device = device_open(4 * MIB, 0, 0), *base = NULL;
  uint64_t frame = frame_new(device, 4 * MIB), other = NOTHING;
  CHECK_EQ(ops->memory.reserve(device, 4 * MIB, &base), GEMINI_OK);
  fallocate_error = ENOMEM;
  CHECK_EQ(ops->memory.frame_destroy(device, frame, 4 * MIB), GEMINI_ERR_OOM_SYSTEM);
  fallocate_error = 0;
  CHECK_EQ(ops->memory.frame_create(device, 2 * MIB, &other), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(ops->memory.map(device, base, frame, 4 * MIB), GEMINI_OK); /* it is as it was */
  CHECK_EQ(ops->memory.unmap(device, base, 4 * MIB), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_destroy(device, frame, 4 * MIB), GEMINI_OK);
  frame = frame_new(device, 4 * MIB);
  CHECK_EQ(ops->memory.frame_destroy(device, frame, 4 * MIB), GEMINI_OK);
  CHECK_EQ(ops->memory.unreserve(device, base, 4 * MIB), GEMINI_OK);
  ops->close(device);
}

static void test_device_open_with_bad_config_is_refused(void) {
  void *device = &device;
  gmi_device_config_t config = { 0, 0, 4097, 0, 0 };
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_INVALID);
  if (ops == &gmi_device_sim) CHECK_SAYS(gmi_fail_message(), "memory_bytes is 4097, must be a multiple of 4096 up to ");
  config.memory_bytes = 1 * MIB;
  config.reserved = 1;
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_INVALID);
  if (ops == &gmi_device_sim) CHECK_SAYS(gmi_fail_message(), "reserved is 1, must be 0");
  config.reserved = 0;
  config.ordinal = 1000;
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(ops->open(NULL, &device), GEMINI_ERR_INVALID);
  CHECK(device == &device);
  ops->close(NULL);
  CHECK(ops->name && *ops->name);
}

static void test_device_budget_is_exact_to_the_byte(void) {
  enum { GRANULES = 64 };
  void *device = device_open(64 * 2 * MIB, 0, 0);
  uint64_t granule = ops->memory.granularity(device), budget = GRANULES * granule, frames[GRANULES], frame = NOTHING;
  CHECK(granule && 2 * MIB % granule == 0);
  CHECK_EQ(ops->memory.resize(device, budget), GEMINI_OK);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < GRANULES; i++) frames[i] = frame_new(device, granule);
    CHECK_EQ(ops->memory.frame_create(device, granule, &frame), GEMINI_ERR_OOM_DEVICE);
    CHECK_EQ(ops->memory.frame_destroy(device, frames[7], granule), GEMINI_OK);
    CHECK_EQ(ops->memory.frame_create(device, 2 * granule, &frame), GEMINI_ERR_OOM_DEVICE);
    CHECK_EQ(frame, NOTHING);
    frames[7] = frame_new(device, granule);
    /* Frames that do not lie side by side make room for one long one. */
    for (int i = 0; i < GRANULES; i += 2) CHECK_EQ(ops->memory.frame_destroy(device, frames[i], granule), GEMINI_OK);
    CHECK_EQ(ops->memory.frame_create(device, (GRANULES / 2 + 1) * granule, &frame), GEMINI_ERR_OOM_DEVICE);
    uint64_t half = frame_new(device, GRANULES / 2 * granule);
    CHECK_EQ(ops->memory.frame_create(device, granule, &frame), GEMINI_ERR_OOM_DEVICE);
    CHECK_EQ(ops->memory.frame_destroy(device, half, GRANULES / 2 * granule), GEMINI_OK);
    for (int i = 1; i < GRANULES; i += 2) CHECK_EQ(ops->memory.frame_destroy(device, frames[i], granule), GEMINI_OK);
    uint64_t whole = frame_new(device, budget);
    CHECK_EQ(ops->memory.frame_destroy(device, whole, budget), GEMINI_OK);
    CHECK_EQ(ops->memory.frame_create(device, budget + granule, &frame), GEMINI_ERR_OOM_DEVICE);
  }
  ops->close(device);
}

static void test_device_resize_keeps_what_exists(void) {
  void *device = device_open(64 * MIB, 0, 0);
  uint64_t granule = ops->memory.granularity(device), frame = NOTHING;
  CHECK_EQ(ops->memory.resize(device, 4 * granule), GEMINI_OK);
  uint64_t a = frame_new(device, 3 * granule);
  CHECK_EQ(ops->memory.resize(device, 2 * granule), GEMINI_ERR_OOM_DEVICE);
  uint64_t b = frame_new(device, granule); /* the old budget stays */
  CHECK_EQ(ops->memory.resize(device, 4 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_create(device, granule, &frame), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(ops->memory.resize(device, 5 * granule), GEMINI_OK);
  uint64_t c = frame_new(device, granule);
  CHECK_EQ(ops->memory.frame_destroy(device, a, 3 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.resize(device, 2 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_create(device, granule, &frame), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(ops->memory.resize(device, 2 * granule + 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.frame_destroy(device, b, granule), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_destroy(device, c, granule), GEMINI_OK);
  CHECK_EQ(ops->memory.resize(device, 0), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_create(device, granule, &frame), GEMINI_ERR_OOM_DEVICE);
  CHECK_EQ(frame, NOTHING);
  ops->close(device);
}

static void test_device_bad_addresses_and_frames_are_refused(void) {
  void *device = device_open(64 * MIB, 0, 0), *base = NULL, *other = (void *)NOTHING;
  uint64_t granule = ops->memory.granularity(device), frame = NOTHING;
  CHECK_EQ(ops->memory.reserve(device, 8 * granule, &base), GEMINI_OK);
  CHECK_EQ((uintptr_t)base % (2 * MIB), 0);
  CHECK_EQ(ops->memory.reserve(device, granule + 1, &other), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.reserve(device, 0, &other), GEMINI_ERR_INVALID);
  CHECK(other == (void *)NOTHING);
  unsigned char *va = base;
  CHECK_EQ(ops->memory.frame_create(device, granule + 512, &frame), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.frame_create(device, 0, &frame), GEMINI_ERR_INVALID);
  CHECK_EQ(frame, NOTHING);
  frame = frame_new(device, 2 * granule);
  CHECK_EQ(ops->memory.map(device, va, frame, granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va, frame + 1, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va, 0, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va + 512, frame, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va + 7 * granule, frame, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va - 2 * granule, frame, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, NULL, frame, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va + 6 * granule, frame, 2 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.unmap(device, va + 7 * granule, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unmap(device, va + 8 * granule, granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unmap(device, va + 6 * granule, 2 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_destroy(device, frame, granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.frame_destroy(device, frame, 2 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_destroy(device, frame, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va, frame, 2 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unreserve(device, va, 7 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unreserve(device, va + granule, 7 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unreserve(device, va, 8 * granule), GEMINI_OK);
  CHECK_EQ(ops->memory.unreserve(device, va, 8 * granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unmap(device, va, granule), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.host_lock(device, NULL, 4096), GEMINI_ERR_INVALID);
  ops->close(device);
}

static void test_device_ranges_do_not_overlap(void) {
  enum { RANGES = 40 };
  void *device = device_open(0, 0, 0), *bases[RANGES];
  uint64_t granule = ops->memory.granularity(device), random = 3;
  uint64_t sizes[RANGES];
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < RANGES; i++) {
      sizes[i] = (1 + check_random(&random) % 5000) * granule;
      CHECK_EQ(ops->memory.reserve(device, sizes[i], &bases[i]), GEMINI_OK);
      CHECK_EQ((uintptr_t)bases[i] % (2 * MIB), 0);
      for (int j = 0; j < i; j++)
        CHECK((char *)bases[j] + sizes[j] <= (char *)bases[i] || (char *)bases[i] + sizes[i] <= (char *)bases[j]);
    }
    for (int i = 0; i < RANGES; i++) {
      int at = (i * 7 + round) % RANGES;
      if (round < 2) CHECK_EQ(ops->memory.unreserve(device, bases[at], sizes[at]), GEMINI_OK);
    }
  }
  ops->close(device);
}

static void test_device_frame_at_two_addresses_is_one_memory(void) {
  void *device = device_open(16 * MIB, 0, 0), *base = NULL;
  uint64_t size = round_up(device, 64 * KIB), frame = frame_new(device, size);
  uint32_t stream = stream_new(device);
  unsigned char *in = host_new(device, size), *out = host_new(device, size);
  CHECK_EQ(ops->memory.reserve(device, 2 * size, &base), GEMINI_OK);
  unsigned char *a = base, *b = a + size;
  CHECK_EQ(ops->memory.map(device, a, frame, size), GEMINI_OK);
  CHECK_EQ(ops->memory.map(device, b, frame, size), GEMINI_OK);
  for (uint64_t i = 0; i < size; i++) in[i] = (unsigned char)(i * 31 + i / 251);
  copy_in(device, stream, a, in, size);
  copy_out(device, stream, out, b, size);
  stream_drain(device, stream);
  CHECK(!memcmp(in, out, size));
  /* What one mapping wrote stays when that one goes. */
  CHECK_EQ(ops->memory.unmap(device, a, size), GEMINI_OK);
  memset(out, 0, size);
  copy_out(device, stream, out, b, size);
  stream_drain(device, stream);
  CHECK(!memcmp(in, out, size));
  host_delete(device, in, size);
  host_delete(device, out, size);
  ops->close(device);
}

/* Four frames take turns at one address; each keeps its own bytes. */
static void test_device_map_replaces_what_was_mapped(void) {
  enum { FRAMES = 4, ROUNDS = 200 };
  void *device = device_open(16 * MIB, 0, 0), *base = NULL;
  uint64_t size = round_up(device, 16 * KIB), frames[FRAMES];
  uint32_t stream = stream_new(device), stamps[FRAMES] = { 0 };
  unsigned char *host = host_new(device, size);
  CHECK_EQ(ops->memory.reserve(device, size, &base), GEMINI_OK);
  for (int i = 0; i < FRAMES; i++) frames[i] = frame_new(device, size);
  uint64_t random = 11;
  for (uint32_t round = 1; round <= ROUNDS; round++) {
    int i = (int)(check_random(&random) % FRAMES);
    CHECK_EQ(ops->memory.map(device, base, frames[i], size), GEMINI_OK);
    copy_out(device, stream, host, base, size);
    stream_drain(device, stream);
    if (stamps[i]) CHECK(!memcmp(host, &stamps[i], 4) && !memcmp(host + size - 4, &stamps[i], 4));
    stamps[i] = round;
    memcpy(host, &round, 4);
    memcpy(host + size - 4, &round, 4);
    copy_in(device, stream, base, host, size);
    stream_drain(device, stream);
  }
  host_delete(device, host, size);
  ops->close(device);
}

/* While copies to and from one chunk are queued and running, another chunk is remapped over and over. */
static void test_device_remap_beside_running_copies_disturbs_nothing(void) {
  enum { COPIES = 4 };
  void *device = device_open(64 * MIB, 0, 0), *base = NULL;
  uint64_t size = round_up(device, 256 * KIB);
  const int rounds = size > MIB ? 40 : 300;
  uint64_t steady = frame_new(device, size), turning[2] = { frame_new(device, size), frame_new(device, size) };
  uint32_t copier = stream_new(device), other = stream_new(device);
  CHECK_EQ(ops->memory.reserve(device, 2 * size, &base), GEMINI_OK);
  unsigned char *a = base, *b = a + size;
  unsigned char *in = host_new(device, size), *out = host_new(device, size), *back = host_new(device, 2 * size);
  CHECK_EQ(ops->memory.map(device, a, steady, size), GEMINI_OK);
  for (int i = 0; i < 2; i++) {
    CHECK_EQ(ops->memory.map(device, b, turning[i], size), GEMINI_OK);
    memset(in, 0xC0 + i, size);
    copy_in(device, other, b, in, size);
    stream_drain(device, other);
  }
  for (int round = 0; round < rounds; round++) {
    memset(in, round, size);
    for (int i = 0; i < COPIES; i++) {
      copy_in(device, copier, a, in, size);
      copy_out(device, copier, out, a, size);
    }
    uint64_t copied = mark_new(device, copier);
    for (int i = 0; i < 2; i++) {
      CHECK_EQ(ops->memory.map(device, b, turning[i], size), GEMINI_OK);
      copy_out(device, other, back + (uint64_t)i * size, b, size);
      stream_drain(device, other);
      CHECK_EQ(ops->memory.unmap(device, b, size), GEMINI_OK);
    }
    CHECK_EQ(ops->stream.sync(device, copier, copied), GEMINI_OK);
    CHECK(!memcmp(in, out, size));
    for (int i = 0; i < 2; i++) {
      CHECK_EQ(back[(uint64_t)i * size], 0xC0 + i);
      CHECK_EQ(back[(uint64_t)(i + 1) * size - 1], 0xC0 + i);
    }
  }
  host_delete(device, in, size);
  host_delete(device, out, size);
  host_delete(device, back, 2 * size);
  ops->close(device);
}

/* --- streams --- */

static void test_device_streams_are_limited_and_reused(void) {
  void *device = device_open(0, 0, 0);
  uint32_t streams[GMI_DEVICE_MAX_STREAMS], stream = 12345;
  uint64_t last_marks[GMI_DEVICE_MAX_STREAMS] = { 0 };
  for (int round = 0; round < 2; round++) {
    uint64_t seen = 0;
    for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
      streams[i] = stream_new(device);
      CHECK(!(seen >> streams[i] & 1));
      seen |= UINT64_C(1) << streams[i];
      uint64_t mark = mark_new(device, streams[i]);
      CHECK_EQ(mark, last_marks[streams[i]] + 1);
      last_marks[streams[i]] = mark;
    }
    CHECK_EQ(gmi_fail(GEMINI_ERR_INVALID, 0, "an older failure"), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->stream.create(device, false, &stream), GEMINI_ERR_OOM_SYSTEM);
    CHECK_SAYS(gmi_fail_message(), "64 streams exist, which is the limit");
    CHECK_EQ(stream, 12345);
    for (uint32_t i = 0; i < GMI_DEVICE_MAX_STREAMS; i++) {
      CHECK_EQ(ops->stream.destroy(device, streams[i]), GEMINI_OK);
      CHECK(ops->stream.reached(device, streams[i], last_marks[streams[i]]));
      CHECK_EQ(ops->stream.sync(device, streams[i], last_marks[streams[i]]), GEMINI_OK);
    }
  }
  ops->close(device);
}

static void test_device_bad_stream_arguments_are_refused(void) {
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device), gone = stream_new(device), never = GMI_DEVICE_MAX_STREAMS - 1;
  uint64_t mark = mark_new(device, gone), out = NOTHING;
  double sum = 1.5;
  CHECK_EQ(ops->stream.destroy(device, gone), GEMINI_OK);
  CHECK_EQ(ops->stream.destroy(device, gone), GEMINI_ERR_INVALID);
  uint32_t bad[] = { gone, never, GMI_DEVICE_MAX_STREAMS, UINT32_MAX };
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK_EQ(ops->stream.mark(device, bad[i], &out), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->stream.wait(device, bad[i], stream, 0), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->queue.copy(device, bad[i], &sum, &out, 8, GMI_COPY_H2D), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->queue.zero(device, bad[i], &sum, 8), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->queue.sum_squares(device, bad[i], &out, GEMINI_DTYPE_F64, 1, &sum), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->queue.add(device, bad[i], &out, &out, GEMINI_DTYPE_F32, 0), GEMINI_ERR_INVALID);
    if (i == 0) continue; /* a destroyed stream's marks can still be asked for */
    CHECK(!ops->stream.reached(device, bad[i], 1));
    CHECK_EQ(ops->stream.sync(device, bad[i], 1), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->stream.mark_time(device, bad[i], 1, &out), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->stream.wait(device, stream, bad[i], 1), GEMINI_ERR_INVALID);
  }
  CHECK_EQ(ops->stream.wait(device, stream, gone, mark), GEMINI_OK);
  CHECK_EQ(ops->stream.wait(device, stream, gone, mark + 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.sync(device, gone, mark + 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.mark_time(device, stream, 0, &out), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.mark_time(device, stream, 1, &out), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.copy(device, stream, &sum, &out, 8, 3), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.copy(device, stream, NULL, &out, 8, GMI_COPY_H2D), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.copy(device, stream, &sum, NULL, 8, GMI_COPY_H2D), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.zero(device, stream, NULL, 8), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.call(device, stream, NULL, NULL), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.wait_flag(device, stream, NULL, 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.sum_squares(device, stream, &out, 4, 1, &sum), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.sum_squares(device, stream, &out, GEMINI_DTYPE_F64, 1, NULL), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.sum_squares(device, stream, NULL, GEMINI_DTYPE_F64, 1, &sum), GEMINI_ERR_INVALID);
  static _Alignas(16) uint64_t values[4];
  CHECK_EQ(ops->queue.add(device, stream, values, values + 2, 4, 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.add(device, stream, NULL, values, GEMINI_DTYPE_F32, 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.add(device, stream, values, NULL, GEMINI_DTYPE_F32, 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.add(device, stream, values, values + 1, GEMINI_DTYPE_F64, 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.add(device, stream, (char *)values + 2, values + 2, GEMINI_DTYPE_F32, 1), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.add(device, stream, values, values + 2, GEMINI_DTYPE_F32, UINT64_MAX), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->queue.copy(device, stream, NULL, NULL, 0, GMI_COPY_D2D), GEMINI_OK);
  CHECK_EQ(ops->queue.zero(device, stream, NULL, 0), GEMINI_OK);
  stream_drain(device, stream);
  CHECK(sum == 1.5);
  CHECK_EQ(out, NOTHING);
  ops->close(device);
}

static void test_device_marks_count_up_and_are_reached_in_order(void) {
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device);
  _Atomic uint64_t gate;
  CHECK(ops->stream.reached(device, stream, 0));
  CHECK_EQ(ops->stream.sync(device, stream, 0), GEMINI_OK);
  uint64_t first = mark_new(device, stream);
  CHECK_EQ(first, 1);
  CHECK_EQ(ops->stream.sync(device, stream, first), GEMINI_OK);
  CHECK(ops->stream.reached(device, stream, first));
  gate_close(device, stream, &gate);
  uint64_t last = HELD_LIMIT < 999 ? HELD_LIMIT : 999;
  for (uint64_t i = 2; i <= last; i++) CHECK_EQ(mark_new(device, stream), i);
  sleep_ns(5 * MS);
  CHECK(!ops->stream.reached(device, stream, 2));
  gate_open(device, &gate);
  CHECK_EQ(ops->stream.sync(device, stream, last / 2), GEMINI_OK);
  CHECK(ops->stream.reached(device, stream, last / 2) && ops->stream.reached(device, stream, 2));
  CHECK_EQ(ops->stream.sync(device, stream, last), GEMINI_OK);
  CHECK(!ops->stream.reached(device, stream, last + 1));
  ops->close(device);
}

static void test_device_mark_times_are_ordered_and_kept_for_4096(void) {
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device);
  uint64_t before = ops->now(device), ns, previous, last = 0;
  for (int i = 0; i < 10000; i++) last = mark_new(device, stream);
  CHECK_EQ(ops->stream.sync(device, stream, last), GEMINI_OK);
  uint64_t after = ops->now(device);
  ns = NOTHING;
  CHECK_EQ(ops->stream.mark_time(device, stream, 1, &ns), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.mark_time(device, stream, last - 4096, &ns), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.mark_time(device, stream, last + 1, &ns), GEMINI_ERR_INVALID);
  CHECK_EQ(ns, NOTHING);
  previous = before;
  for (uint64_t mark = last - 4095; mark <= last; mark++) {
    CHECK_EQ(ops->stream.mark_time(device, stream, mark, &ns), GEMINI_OK);
    CHECK(ns >= previous);
    previous = ns;
  }
  CHECK(previous <= after);
  /* A mark after an idle time is later than what was before it. */
  sleep_ns(20 * MS);
  before = ops->now(device);
  last = mark_new(device, stream);
  CHECK_EQ(ops->stream.sync(device, stream, last), GEMINI_OK);
  CHECK_EQ(ops->stream.mark_time(device, stream, last, &ns), GEMINI_OK);
  CHECK(ns >= before && ns <= ops->now(device));
  ops->close(device);
}

/* Marks with and without time are one sequence. */
static void test_device_untimed_marks_are_marks(void) {
  enum { MARKS = 20000 };
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device), other = stream_new(device);
  uint64_t random = 21, mark = NOTHING, last = 0, timed = 0, ns, previous = 0;
  CHECK_EQ(ops->stream.mark_untimed(device, GMI_DEVICE_MAX_STREAMS, &mark), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->stream.mark_untimed(device, stream, NULL), GEMINI_ERR_INVALID);
  for (uint64_t i = 1; i <= MARKS; i++) {
    bool with_time = check_random(&random) % 4 == 0;
    CHECK_EQ(with_time ? ops->stream.mark(device, stream, &mark) : ops->stream.mark_untimed(device, stream, &mark),
             GEMINI_OK);
    CHECK_EQ(mark, i);
    if (i % 100 == 0) {
      CHECK_EQ(ops->stream.wait(device, other, stream, mark - 7), GEMINI_OK);
      CHECK_EQ(ops->stream.mark_untimed(device, other, &last), GEMINI_OK);
      CHECK_EQ(ops->stream.sync(device, other, last), GEMINI_OK);
      CHECK(ops->stream.reached(device, stream, mark - 7));
      gemini_status_t status = ops->stream.mark_time(device, stream, mark - 7, &ns);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_INVALID);
    }
    if (with_time) timed = mark;
    if (!with_time || i % 3) continue;
    CHECK_EQ(ops->stream.sync(device, stream, timed), GEMINI_OK);
    CHECK_EQ(ops->stream.mark_time(device, stream, timed, &ns), GEMINI_OK);
    CHECK(ns >= previous && ns <= ops->now(device));
    previous = ns;
  }
  CHECK_EQ(ops->stream.sync(device, stream, MARKS), GEMINI_OK);
  ops->close(device);
}

/* Work on streams that wait for one another in a ring. */
static void append(void *user) {
  uint64_t *count = user;
  count[1 + count[0]] = count[0];
  count[0]++;
}
typedef struct step {
  uint64_t *next, expected;
} step_t;
static _Atomic uint64_t step_failures;
static void step_run(void *user) {
  step_t *step = user;
  if (*step->next != step->expected) atomic_fetch_add(&step_failures, 1);
  *step->next = step->expected + 1; /* not atomic: the waits must order it */
}

static void test_device_waits_order_work_across_streams(void) {
  enum { STREAMS = 4, STEPS = 20000 };
  void *device = device_open(0, 0, 0);
  static step_t steps[STEPS];
  uint32_t streams[STREAMS];
  uint64_t next = 0, mark = 0;
  for (int i = 0; i < STREAMS; i++) streams[i] = stream_new(device);
  atomic_store(&step_failures, 0);
  for (int i = 0; i < STEPS; i++) {
    uint32_t stream = streams[i % STREAMS], before = streams[(i + STREAMS - 1) % STREAMS];
    steps[i] = (step_t){ &next, (uint64_t)i };
    if (i) CHECK_EQ(ops->stream.wait(device, stream, before, mark), GEMINI_OK);
    CHECK_EQ(ops->queue.call(device, stream, step_run, &steps[i]), GEMINI_OK);
    mark = mark_new(device, stream);
  }
  CHECK_EQ(ops->stream.sync(device, streams[(STEPS - 1) % STREAMS], mark), GEMINI_OK);
  CHECK_EQ(atomic_load(&step_failures), 0);
  CHECK_EQ(next, STEPS);
  ops->close(device);
}

static void test_device_wait_holds_one_stream_only(void) {
  void *device = device_open(0, 0, 0);
  uint32_t held = stream_new(device), waiter = stream_new(device), free_one = stream_new(device);
  _Atomic uint64_t gate;
  gate_close(device, held, &gate);
  uint64_t held_mark = mark_new(device, held);
  CHECK_EQ(ops->stream.wait(device, waiter, held, held_mark), GEMINI_OK);
  uint64_t waiter_mark = mark_new(device, waiter);
  stream_drain(device, free_one);
  CHECK(!ops->stream.reached(device, held, held_mark) && !ops->stream.reached(device, waiter, waiter_mark));
  gate_open(device, &gate);
  CHECK_EQ(ops->stream.sync(device, waiter, waiter_mark), GEMINI_OK);
  /* A device may answer "no" for a moment after it has said so (cuda_streams.c). */
  CHECK_EQ(ops->stream.sync(device, held, held_mark), GEMINI_OK);
  CHECK(ops->stream.reached(device, held, held_mark));
  ops->close(device);
}

static void test_device_wait_flag_waits_for_its_value(void) {
  void *device = device_open(0, 0, 0);
  uint32_t streams[3];
  uint64_t marks[3];
  _Atomic uint64_t flag = 4;
  for (uint64_t i = 0; i < 3; i++) {
    streams[i] = stream_new(device);
    CHECK_EQ(ops->stream.wait_flag(device, streams[i], &flag, 4 + 2 * i), GEMINI_OK); /* 4, 6, 8 */
    marks[i] = mark_new(device, streams[i]);
  }
  CHECK_EQ(ops->stream.sync(device, streams[0], marks[0]), GEMINI_OK);
  sleep_ns(2 * MS);
  atomic_store_explicit(&flag, 5, memory_order_release);
  ops->stream.flag_wake(device);
  sleep_ns(5 * MS);
  CHECK(!ops->stream.reached(device, streams[1], marks[1]));
  atomic_store_explicit(&flag, 7, memory_order_release); /* more than asked for */
  ops->stream.flag_wake(device);
  CHECK_EQ(ops->stream.sync(device, streams[1], marks[1]), GEMINI_OK);
  sleep_ns(5 * MS);
  CHECK(!ops->stream.reached(device, streams[2], marks[2]));
  atomic_store_explicit(&flag, 8, memory_order_release);
  ops->stream.flag_wake(device);
  CHECK_EQ(ops->stream.sync(device, streams[2], marks[2]), GEMINI_OK);
  ops->close(device);
}

/* A wake-up between a stream's look at the flag and its sleep must not be lost. */
static void test_device_wait_flag_loses_no_wake_up(void) {
  const uint64_t rounds = ops == &gmi_device_sim ? 20000 : 4000;
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device);
  uint64_t random = 17;
  _Atomic uint64_t flag = 0;
  for (uint64_t i = 1; i <= rounds; i++) {
    CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, i), GEMINI_OK);
    uint64_t mark = mark_new(device, stream);
    /* Somewhere between the stream's waking up for the task and its sleeping for the flag. */
    for (uint64_t until = ops->now(device) + check_random(&random) % 60000; ops->now(device) < until;) continue;
    atomic_store_explicit(&flag, i, memory_order_release);
    ops->stream.flag_wake(device);
    CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  }
  ops->close(device);
}

static void test_device_queue_has_no_limit(void) {
  enum { CALLS = 200000 };
  const uint64_t calls = HELD_LIMIT < CALLS ? HELD_LIMIT : CALLS;
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device);
  static uint64_t order[CALLS + 1];
  _Atomic uint64_t gate;
  order[0] = 0;
  gate_close(device, stream, &gate);
  for (uint64_t i = 0; i < calls; i++) CHECK_EQ(ops->queue.call(device, stream, append, order), GEMINI_OK);
  uint64_t mark = mark_new(device, stream);
  CHECK(!ops->stream.reached(device, stream, mark));
  gate_open(device, &gate);
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  CHECK_EQ(order[0], calls);
  for (uint64_t i = 0; i < calls; i++) CHECK_EQ(order[1 + i], i);
  ops->close(device);
}

/* Each operation that must not wait for queued work, run while a stream is held: by another thread, so that one which
 * does wait is noticed, named, and freed. */
typedef struct held {
  void *device, *range, *host;
  uint32_t held, other, made;
  uint64_t size, frame, mark, ns;
  unsigned char *memory;
  double sum;
  gemini_status_t (*step)(struct held *h);
  gemini_status_t status;
  _Atomic int ended;
} held_t;
static gemini_status_t held_frame_create(held_t *h) { return ops->memory.frame_create(h->device, h->size, &h->frame); }
static gemini_status_t held_reserve(held_t *h) { return ops->memory.reserve(h->device, 4 * h->size, &h->range); }
static gemini_status_t held_map(held_t *h) { return ops->memory.map(h->device, h->range, h->frame, h->size); }
static gemini_status_t held_unmap(held_t *h) { return ops->memory.unmap(h->device, h->range, h->size); }
static gemini_status_t held_frame_destroy(held_t *h) { return ops->memory.frame_destroy(h->device, h->frame, h->size); }
static gemini_status_t held_unreserve(held_t *h) { return ops->memory.unreserve(h->device, h->range, 4 * h->size); }
static gemini_status_t held_host_lock(held_t *h) { return ops->memory.host_lock(h->device, h->host, h->size); }
static gemini_status_t held_resize(held_t *h) { return ops->memory.resize(h->device, 64 * MIB); }
static gemini_status_t held_stream_create(held_t *h) { return ops->stream.create(h->device, false, &h->made); }
static gemini_status_t held_stream_destroy(held_t *h) { return ops->stream.destroy(h->device, h->made); }
static gemini_status_t held_mark(held_t *h) { return ops->stream.mark(h->device, h->held, &h->mark); }
static gemini_status_t held_mark_untimed(held_t *h) { return ops->stream.mark_untimed(h->device, h->held, &h->mark); }
static gemini_status_t held_reached(held_t *h) {
  return ops->stream.reached(h->device, h->held, h->mark) ? -1 : GEMINI_OK;
}
static gemini_status_t held_wait(held_t *h) { return ops->stream.wait(h->device, h->other, h->held, h->mark); }
static gemini_status_t held_zero(held_t *h) { return ops->queue.zero(h->device, h->held, h->memory, h->size); }
static gemini_status_t held_copy(held_t *h) {
  return ops->queue.copy(h->device, h->held, h->memory, h->host, h->size, GMI_COPY_H2D);
}
static gemini_status_t held_copy_back(held_t *h) {
  return ops->queue.copy(h->device, h->held, h->host, h->memory, h->size, GMI_COPY_D2H);
}
static gemini_status_t held_sum(held_t *h) {
  return ops->queue.sum_squares(h->device, h->held, h->memory, GEMINI_DTYPE_BF16, h->size / 2, &h->sum);
}
static gemini_status_t held_time(held_t *h) {
  return ops->stream.mark_time(h->device, h->held, h->mark, &h->ns) == GEMINI_ERR_INVALID ? GEMINI_OK : -1;
}
static gemini_status_t held_sync(held_t *h) { /* of what is reached */ return ops->stream.sync(h->device, h->held, 1); }
static void *held_main(void *user) {
  held_t *h = user;
  h->status = h->step(h);
  atomic_store(&h->ended, 1);
  return NULL;
}

static void test_device_operations_do_not_wait_for_a_held_stream(void) {
  static const struct {
    const char *name;
    gemini_status_t (*step)(held_t *h);
  } steps[] = {
    { "frame_create", held_frame_create },
    { "reserve", held_reserve },
    { "map", held_map },
    { "unmap", held_unmap },
    { "map", held_map },
    { "map again", held_map },
    { "unmap", held_unmap },
    { "frame_destroy", held_frame_destroy },
    { "unreserve", held_unreserve },
    { "host_lock", held_host_lock },
    { "copy", held_copy },
    { "copy back", held_copy_back },
    { "zero", held_zero },
    { "sum_squares", held_sum },
    { "mark", held_mark },
    { "mark_untimed", held_mark_untimed },
    { "reached", held_reached },
    { "sync of what is reached", held_sync },
    { "mark_time", held_time },
    { "wait", held_wait },
    { "resize", held_resize },
    { "stream_create", held_stream_create },
    { "stream_destroy", held_stream_destroy },
  };
  void *device = device_open(64 * MIB, 0, 0);
  held_t h = { .device = device, .held = stream_new(device), .other = stream_new(device) };
  _Atomic uint64_t gate;
  uint64_t blocked = 0;
  h.size = round_up(device, MIB);
  h.memory = memory_new(device, h.size);
  stream_drain(device, h.held); /* mark 1 */
  void *base = NULL;
  CHECK_EQ(posix_memalign(&base, 4096, h.size), 0);
  memset(base, 1, h.size);
  h.host = base;
  gate_close(device, h.held, &gate);
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
    pthread_t thread;
    h.step = steps[i].step;
    atomic_store(&h.ended, 0);
    uint64_t begin = ops->now(device);
    CHECK_EQ(pthread_create(&thread, NULL, held_main, &h), 0);
    while (!atomic_load(&h.ended) && ops->now(device) - begin < 2000 * MS) sleep_ns(MS / 100);
    uint64_t took = ops->now(device) - begin;
    bool waits = !atomic_load(&h.ended);
    if (waits) {
      fprintf(stderr, "    %s waits for queued work\n", steps[i].name);
      blocked++;
      gate_open(device, &gate);
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(h.status, GEMINI_OK);
    if (took > 20 * MS) fprintf(stderr, "    %s: %.1f ms\n", steps[i].name, (double)took / 1e6);
    if (waits) {
      stream_drain(device, h.held);
      gate_close(device, h.held, &gate);
    }
  }
  gate_open(device, &gate);
  stream_drain(device, h.held);
  CHECK_EQ(blocked, 0);
  host_delete(device, h.host, h.size);
  ops->close(device);
}

static void slow_count(void *user) {
  sleep_ns(1 * MS);
  ++*(uint64_t *)user;
}

static void test_device_destroy_and_close_finish_queued_work(void) {
  void *device = device_open(0, 0, 0);
  uint32_t a = stream_new(device), b = stream_new(device);
  uint64_t a_count = 0, b_count = 0;
  for (int i = 0; i < 20; i++) CHECK_EQ(ops->queue.call(device, a, slow_count, &a_count), GEMINI_OK);
  CHECK_EQ(ops->stream.destroy(device, a), GEMINI_OK);
  CHECK_EQ(a_count, 20);
  a = stream_new(device);
  a_count = 0;
  /* Each waits for the other by turns; close joins them in any order. */
  for (int i = 0; i < 20; i++) {
    CHECK_EQ(ops->queue.call(device, a, slow_count, &a_count), GEMINI_OK);
    uint64_t mark = mark_new(device, a);
    CHECK_EQ(ops->stream.wait(device, b, a, mark), GEMINI_OK);
    CHECK_EQ(ops->queue.call(device, b, slow_count, &b_count), GEMINI_OK);
    mark = mark_new(device, b);
    CHECK_EQ(ops->stream.wait(device, a, b, mark), GEMINI_OK);
  }
  ops->close(device);
  CHECK_EQ(a_count, 20);
  CHECK_EQ(b_count, 20);
}

/* --- contents --- */

static void test_device_zero_clears_exactly_its_range(void) {
  void *device = device_open(16 * MIB, 0, 0);
  uint64_t size = round_up(device, 64 * KIB);
  uint32_t stream = stream_new(device);
  unsigned char *memory = memory_new(device, size), *host = host_new(device, size);
  memset(host, 0x77, size);
  copy_in(device, stream, memory, host, size);
  CHECK_EQ(ops->queue.zero(device, stream, memory + 100, 1001), GEMINI_OK);
  copy_out(device, stream, host, memory, size);
  stream_drain(device, stream);
  for (uint64_t i = 0; i < size; i++) CHECK_EQ(host[i], i >= 100 && i < 1101 ? 0 : 0x77);
  host_delete(device, host, size);
  ops->close(device);
}

/* A random program over cells of device and host memory on several streams, ordered by waits alone, must leave what
 * the same program leaves when run in order. */
static void test_device_random_copies_between_streams_agree_with_model(void) {
  enum { CELLS = 48, STREAMS = 5, STEPS = 100000 };
  const uint64_t cell_bytes = 768;
  typedef struct cell {
    uint64_t marks[STREAMS]; /* last use on each stream */
    uint64_t writer_mark;
    int writer; /* stream of the last write, -1 = none */
    unsigned char *bytes;
    uint64_t value; /* model */
  } cell_t;
  static cell_t cells[CELLS]; /* the lower half on the host, the upper on the device */
  void *device = device_open(64 * MIB, 0, 0);
  uint64_t size = round_up(device, CELLS * cell_bytes), random = 5, next_value = 1;
  unsigned char *host = host_new(device, size), *memory = memory_new(device, size), *seen = host_new(device, size);
  uint32_t streams[STREAMS];
  for (int i = 0; i < STREAMS; i++) streams[i] = stream_new(device);
  CHECK_EQ(ops->queue.zero(device, streams[0], memory, size), GEMINI_OK);
  stream_drain(device, streams[0]);
  for (int i = 0; i < CELLS; i++) {
    memset(&cells[i], 0, sizeof cells[i]);
    cells[i].writer = -1;
    cells[i].bytes = (i < CELLS / 2 ? host : memory) + (uint64_t)i * cell_bytes;
  }
  for (int step = 0; step <= STEPS; step++) {
    if (step % 5000 == 0) { /* compare; at the end, too */
      for (int i = 0; i < STREAMS; i++) stream_drain(device, streams[i]);
      copy_out(device, streams[0], seen, memory, size);
      stream_drain(device, streams[0]);
      for (int i = 0; i < CELLS; i++)
        for (uint64_t at = 0; at < cell_bytes; at += 8) {
          uint64_t value;
          memcpy(&value, (i < CELLS / 2 ? host : seen) + (uint64_t)i * cell_bytes + at, 8);
          CHECK_EQ(value, cells[i].value);
        }
    }
    uint64_t r = check_random(&random);
    int s = (int)(r % STREAMS), from = (int)((r >> 8) % CELLS), to = (int)((r >> 16) % CELLS);
    cell_t *src = &cells[from], *dst = &cells[to];
    if (from < CELLS / 2 && to < CELLS / 2) {
      /* Host to host is the host's own business: a new value, once the cell's users are done. */
      if ((r >> 32) % 8) continue;
      for (int i = 0; i < STREAMS; i++) CHECK_EQ(ops->stream.sync(device, streams[i], dst->marks[i]), GEMINI_OK);
      dst->value = next_value++;
      for (uint64_t i = 0; i < cell_bytes; i += 8) memcpy(dst->bytes + i, &dst->value, 8);
      memset(dst->marks, 0, sizeof dst->marks);
      dst->writer = -1;
      continue;
    }
    if (from == to) {
      if (src->writer >= 0 || from >= CELLS / 2) {
        for (int i = 0; i < STREAMS; i++)
          if (i != s) CHECK_EQ(ops->stream.wait(device, streams[s], streams[i], dst->marks[i]), GEMINI_OK);
        CHECK_EQ(ops->queue.zero(device, streams[s], dst->bytes, cell_bytes), GEMINI_OK);
        dst->value = 0;
        dst->writer = s;
        dst->writer_mark = dst->marks[s] = mark_new(device, streams[s]);
      }
      continue;
    }
    if (src->writer >= 0 && src->writer != s)
      CHECK_EQ(ops->stream.wait(device, streams[s], streams[src->writer], src->writer_mark), GEMINI_OK);
    for (int i = 0; i < STREAMS; i++)
      if (i != s && dst->marks[i]) CHECK_EQ(ops->stream.wait(device, streams[s], streams[i], dst->marks[i]), GEMINI_OK);
    uint32_t kind = from < CELLS / 2 ? GMI_COPY_H2D : to < CELLS / 2 ? GMI_COPY_D2H : GMI_COPY_D2D;
    CHECK_EQ(ops->queue.copy(device, streams[s], dst->bytes, src->bytes, cell_bytes, kind), GEMINI_OK);
    dst->value = src->value;
    dst->writer = s;
    dst->writer_mark = dst->marks[s] = src->marks[s] = mark_new(device, streams[s]);
  }
  CHECK(next_value > 100);
  for (int i = 0; i < STREAMS; i++) stream_drain(device, streams[i]); /* the last step's work */
  host_delete(device, host, size);
  host_delete(device, seen, size);
  ops->close(device);
}

static uint16_t f16_of(double value) { /* of values that F16 holds exactly */
  if (value == 0.0) return signbit(value) ? 0x8000u : 0;
  uint16_t sign = value < 0 ? 0x8000u : 0;
  int exponent;
  double fraction = frexp(fabs(value), &exponent); /* 0.5..1 */
  if (exponent < -13) return (uint16_t)(sign | (uint16_t)ldexp(fabs(value), 24));
  return (uint16_t)(sign | (uint16_t)((exponent + 14) << 10) | (uint16_t)((uint32_t)ldexp(fraction, 11) & 0x3FFu));
}

static void test_device_sum_squares_is_exact_and_ordered(void) {
  enum { COUNT = 5000 };
  void *device = device_open(16 * MIB, 0, 0);
  uint64_t size = round_up(device, 8 * COUNT), random = 9;
  uint32_t stream = stream_new(device);
  unsigned char *memory = memory_new(device, size), *host = host_new(device, size);
  static double values[COUNT];
  static const uint32_t dtypes[] = { GEMINI_DTYPE_F32, GEMINI_DTYPE_BF16, GEMINI_DTYPE_F16, GEMINI_DTYPE_F64 };
  double *sums = (double *)host_new(device, 4096);
  for (size_t d = 0; d < 4; d++) {
    uint32_t dtype = dtypes[d];
    double expected = 0.0;
    for (uint64_t i = 0; i < COUNT; i++) {
      /* Eight significant bits, exponents of F16's whole range, its subnormals included. */
      int mantissa = (int)(check_random(&random) % 256), exponent = (int)(check_random(&random) % 32) - 24;
      if (exponent > 7) exponent = 7;
      values[i] = ldexp((check_random(&random) & 1 ? -1.0 : 1.0) * mantissa, exponent);
      float as_float = (float)values[i];
      uint32_t bits;
      memcpy(&bits, &as_float, 4);
      uint16_t half = dtype == GEMINI_DTYPE_BF16 ? (uint16_t)(bits >> 16) : f16_of(values[i]);
      if (dtype == GEMINI_DTYPE_F32) memcpy(host + 4 * i, &as_float, 4);
      if (dtype == GEMINI_DTYPE_BF16 || dtype == GEMINI_DTYPE_F16) memcpy(host + 2 * i, &half, 2);
      if (dtype == GEMINI_DTYPE_F64) {
        values[i] += values[i] * 0x1p-40;
        memcpy(host + 8 * i, &values[i], 8);
      }
      volatile double square = values[i] * values[i]; /* rounded before it is added */
      expected += square;
    }
    copy_in(device, stream, memory, host, size);
    sums[0] = -1.0;
    sums[1] = -1.0;
    CHECK_EQ(ops->queue.sum_squares(device, stream, memory, dtype, COUNT, &sums[0]), GEMINI_OK);
    CHECK_EQ(ops->queue.sum_squares(device, stream, memory, dtype, 0, &sums[1]), GEMINI_OK);
    stream_drain(device, stream);
    CHECK(expected > 0 && sums[0] == expected);
    CHECK(sums[1] == 0.0);
  }
  host_delete(device, sums, 4096);
  host_delete(device, host, size);
  ops->close(device);
}

/* Pieces of random bytes, of every dtype, length and alignment, many at once, on two streams: bit for bit what the
 * host sums up, and there for a function that is queued behind them. */
typedef struct summed {
  const double *sums;
  double first, last;
  uint64_t count;
} summed_t;
static void look_at_sums(void *user) {
  summed_t *summed = user;
  summed->first = summed->sums[0];
  summed->last = summed->sums[summed->count - 1];
}
static bool same_number(double a, double b) { return isnan(a) ? isnan(b) : !memcmp(&a, &b, sizeof a); }

static void test_device_sum_squares_of_many_pieces_is_the_hosts(void) {
  enum { PIECES = 9001 }; /* more than a batch of any device */
  static const uint32_t widths[] = { 4, 2, 2, 8 };
  void *device = device_open(16 * MIB, 0, 0);
  uint64_t size = 2 * MIB, random = 77;
  uint32_t stream = stream_new(device), other = stream_new(device);
  unsigned char *memory = memory_new(device, size), *host = host_new(device, size);
  for (uint64_t i = 0; i < size; i += 8) {
    uint64_t value = check_random(&random);
    memcpy(host + i, &value, 8);
  }
  static double sums[PIECES], expected[PIECES]; /* not locked */
  copy_in(device, stream, memory, host, size);
  CHECK_EQ(ops->stream.wait(device, other, stream, mark_new(device, stream)), GEMINI_OK);
  for (int i = 0; i < PIECES; i++) {
    uint64_t r = check_random(&random);
    uint32_t dtype = (uint32_t)(r % 4), width = widths[dtype];
    uint64_t offset = (r >> 8) % (size - 65536), count = i % 100 ? (r >> 40) % 700 : 65536 / width;
    if (i % 3 == 0) offset -= offset % width;
    if (i % 7 == 0) { /* finite values */
      dtype = GEMINI_DTYPE_F16;
      offset -= offset % 2;
    }
    sums[i] = -1.0;
    expected[i] = gmi_sum_squares(host + offset, dtype, count);
    CHECK_EQ(ops->queue.sum_squares(device, i % 2 ? other : stream, memory + offset, dtype, count, &sums[i]),
             GEMINI_OK);
  }
  summed_t summed = { .sums = sums, .count = PIECES };
  CHECK_EQ(ops->queue.call(device, stream, look_at_sums, &summed), GEMINI_OK);
  stream_drain(device, stream);
  CHECK(same_number(summed.first, expected[0]) && same_number(summed.last, expected[PIECES - 1]));
  stream_drain(device, other);
  for (int i = 0; i < PIECES; i++) CHECK(same_number(sums[i], expected[i]));
  host_delete(device, host, size);
  ops->close(device);
}

/* Arrays in device memory and in page-locked host memory get the bits of gmi_reduce(), and bytes around them stay. */
static void test_device_add_has_the_bits_of_the_host(void) {
  enum { MOST = 65536 /* bytes */ };
  static const uint32_t widths[] = { 4, 2, 2, 8 };
  void *device = device_open(16 * MIB, 0, 0);
  const uint64_t size = round_up(device, 4 * MOST), used = 4 * MOST;
  uint64_t random = 5;
  uint32_t stream = stream_new(device);
  unsigned char *memory = memory_new(device, size), *host = host_new(device, size), *before = host_new(device, size);
  unsigned char *expected = malloc(used);
  for (int i = 0; i < 200; i++) {
    const uint32_t dtype = (uint32_t)i % 4, width = widths[dtype];
    const bool to_host = i / 4 % 2, whole = i % 5 == 0;
    const uint64_t most = MOST / width - 64, count = whole ? most : check_random(&random) % (i % 3 ? 300 : most);
    const uint64_t from = 16 * (check_random(&random) % 16),
                   to = 2 * MOST + (whole ? 0 : width * (check_random(&random) % 16));
    for (uint64_t at = 0; at < used; at += 2) {
      uint64_t value = check_random(&random) % 4096; /* finite values that round when they are added, mostly */
      uint16_t half = (uint16_t)((at / 2 % (width / 2) + 1 == width / 2 ? 0x3000u : 0u) + (value & 0x8FFFu));
      memcpy(before + at, &half, 2);
    }
    memcpy(expected, before, used);
    gmi_reduce(dtype, GMI_REDUCE_SUM, 2, (const void *const[]){ before + to, before + from }, expected + to, count);
    copy_in(device, stream, memory, before, used);
    memcpy(host, before, used);
    CHECK_EQ(ops->queue.add(device, stream, NULL, NULL, dtype, 0), GEMINI_OK);
    CHECK_EQ(ops->queue.add(device, stream, (to_host ? host : memory) + to, memory + from, dtype, count), GEMINI_OK);
    stream_drain(device, stream);
    if (!to_host) {
      CHECK_EQ(ops->queue.copy(device, stream, host, memory, used, GMI_COPY_D2H), GEMINI_OK);
      stream_drain(device, stream);
    }
    CHECK(!memcmp(host, expected, used));
    CHECK(count < 100 || memcmp(host, before, used) != 0);
  }
  free(expected);
  host_delete(device, before, size);
  host_delete(device, host, size);
  ops->close(device);
}

/* Every F16 pattern against arithmetic; infinities and NaNs as such. */
static void test_sum_squares_converts_every_half(void) {
  for (uint32_t bits = 0; bits < 65536; bits++) {
    uint16_t half = (uint16_t)bits;
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent ? ldexp(1024 + fraction, (int)exponent - 25) : ldexp(fraction, -24);
    double sum = gmi_sum_squares(&half, GEMINI_DTYPE_F16, 1);
    if (exponent == 31) {
      CHECK(fraction ? isnan(sum) : isinf(sum));
    } else {
      CHECK(sum == value * value);
    }
    float bf16;
    uint32_t wide = bits << 16;
    memcpy(&bf16, &wide, 4);
    sum = gmi_sum_squares(&half, GEMINI_DTYPE_BF16, 1);
    CHECK(isnan(bf16) ? isnan(sum) : sum == (double)bf16 * (double)bf16);
  }
}

/* --- rates --- */

/* Copies over a throttled link, on one stream or spread over several, by one or both directions: never faster than the
 * rate, by the host's clock and by marks. */
static void run_rate(int streams_count, bool both) {
  enum { COPIES = 60 };
  const uint64_t rate = 400 * 1000 * 1000;
  void *device = device_open(64 * MIB, rate, rate / 2);
  uint64_t size = round_up(device, 128 * KIB);
  uint32_t streams[4];
  unsigned char *memory = memory_new(device, 8 * size), *host = host_new(device, 8 * size);
  for (int i = 0; i < streams_count; i++) {
    streams[i] = stream_new(device);
    stream_drain(device, streams[i]);
  }
  uint64_t begin = ops->now(device), bytes[2] = { 0, 0 }, first_mark = mark_new(device, streams[0]);
  for (int i = 0; i < COPIES; i++) {
    int s = i % streams_count, out = both && i / streams_count % 2;
    uint64_t at = (uint64_t)(2 * s + out) * size;
    if (out) {
      copy_out(device, streams[s], host + at, memory + at, size);
    } else {
      copy_in(device, streams[s], memory + at, host + at, size);
    }
    bytes[out] += size;
  }
  uint64_t last_ns = 0, first_ns, ns;
  for (int i = 0; i < streams_count; i++) {
    uint64_t mark = mark_new(device, streams[i]);
    CHECK_EQ(ops->stream.sync(device, streams[i], mark), GEMINI_OK);
    CHECK_EQ(ops->stream.mark_time(device, streams[i], mark, &ns), GEMINI_OK);
    if (ns > last_ns) last_ns = ns;
  }
  uint64_t took = ops->now(device) - begin;
  CHECK_EQ(ops->stream.mark_time(device, streams[0], first_mark, &first_ns), GEMINI_OK);
  double least = (double)bytes[0] / (double)rate * 1e9, least_out = (double)bytes[1] / (double)(rate / 2) * 1e9;
  if (least_out > least) least = least_out;
  /* On one stream the directions take turns. */
  if (streams_count == 1) least = ((double)bytes[0] / (double)rate + (double)bytes[1] / (double)(rate / 2)) * 1e9;
  CHECK(least > 10e6);
  CHECK((double)took >= least * 0.99);
  CHECK((double)(last_ns - first_ns) >= least * 0.99);
  fprintf(stderr, "    %d streams, %s: %.2f ms, at the rate %.2f ms, by marks %.2f ms\n", streams_count,
          both ? "both ways" : "one way", (double)took / 1e6, least / 1e6, (double)(last_ns - first_ns) / 1e6);
  host_delete(device, host, 8 * size);
  ops->close(device);
}

static void test_device_sim_copies_are_never_faster_than_the_rate(void) {
  run_rate(1, false);
  run_rate(4, false);
  run_rate(1, true);
  run_rate(4, true);
}

/* Marks around a copy say its size over the rate, also behind a wait; a mark behind a gate is no earlier than its
 * opening. */
static void test_device_sim_marks_time_a_copy_by_its_link(void) {
  const uint64_t rate = 1000 * 1000 * 1000;
  void *device = device_open(64 * MIB, rate, 0);
  uint64_t size = round_up(device, 1 * MIB);
  uint32_t a = stream_new(device), b = stream_new(device);
  unsigned char *memory = memory_new(device, size), *host = host_new(device, size);
  _Atomic uint64_t gate;
  for (int round = 0; round < 20; round++) {
    uint64_t marks[4], ns[4];
    if (round % 2) gate_close(device, a, &gate);
    marks[0] = mark_new(device, a);
    copy_in(device, a, memory, host, size);
    marks[1] = mark_new(device, a);
    CHECK_EQ(ops->stream.wait(device, b, a, marks[1]), GEMINI_OK);
    marks[2] = mark_new(device, b);
    copy_in(device, b, memory, host, size);
    marks[3] = mark_new(device, b);
    if (round % 2) sleep_ns(1 * MS);
    uint64_t opened = ops->now(device);
    if (round % 2) gate_open(device, &gate);
    CHECK_EQ(ops->stream.sync(device, b, marks[3]), GEMINI_OK);
    for (int i = 0; i < 4; i++) CHECK_EQ(ops->stream.mark_time(device, i < 2 ? a : b, marks[i], &ns[i]), GEMINI_OK);
    CHECK(ns[1] - ns[0] >= size && ns[3] - ns[2] >= size); /* 1 byte a nanosecond */
    CHECK(ns[2] >= ns[1]);
    CHECK(ns[3] <= ops->now(device));
    if (round % 2) CHECK(ns[0] >= opened);
  }
  host_delete(device, host, size);
  ops->close(device);
}

/* --- threads --- */

typedef struct worker {
  void *device;
  uint64_t seed, errors;
} worker_t;

/* Makes streams, frames and ranges, moves bytes through them and checks them, beside others who do the same. */
static void *worker_main(void *user) {
  worker_t *worker = user;
  void *device = worker->device;
  uint64_t size = round_up(device, 32 * KIB), random = worker->seed;
  unsigned char *in = host_new(device, size), *out = host_new(device, size);
  for (int round = 0; round < (size > MIB ? 20 : 150); round++) {
    void *base = NULL;
    uint32_t a = stream_new(device), b = stream_new(device);
    CHECK_EQ(ops->memory.reserve(device, 2 * size, &base), GEMINI_OK);
    uint64_t frames[2] = { frame_new(device, size), frame_new(device, size) };
    for (int i = 0; i < 2; i++)
      CHECK_EQ(ops->memory.map(device, (unsigned char *)base + (uint64_t)i * size, frames[i], size), GEMINI_OK);
    for (uint64_t i = 0; i < size; i += 8) {
      uint64_t value = check_random(&random);
      memcpy(in + i, &value, 8);
    }
    copy_in(device, a, base, in, size);
    uint64_t mark = mark_new(device, a);
    CHECK_EQ(ops->stream.wait(device, b, a, mark), GEMINI_OK);
    CHECK_EQ(ops->queue.copy(device, b, (unsigned char *)base + size, base, size, GMI_COPY_D2D), GEMINI_OK);
    copy_out(device, b, out, (unsigned char *)base + size, size);
    stream_drain(device, b);
    worker->errors += memcmp(in, out, size) != 0;
    CHECK_EQ(ops->stream.destroy(device, a), GEMINI_OK);
    CHECK_EQ(ops->stream.destroy(device, b), GEMINI_OK);
    CHECK_EQ(ops->memory.unmap(device, base, 2 * size), GEMINI_OK);
    for (int i = 0; i < 2; i++) CHECK_EQ(ops->memory.frame_destroy(device, frames[i], size), GEMINI_OK);
    CHECK_EQ(ops->memory.unreserve(device, base, 2 * size), GEMINI_OK);
  }
  host_delete(device, in, size);
  host_delete(device, out, size);
  return NULL;
}

static void test_device_four_threads_share_it(void) {
  enum { THREADS = 4 };
  void *device = device_open(0, 0, 0);
  uint64_t size = round_up(device, 32 * KIB), frame = NOTHING;
  CHECK_EQ(ops->memory.resize(device, 2 * THREADS * size), GEMINI_OK);
  pthread_t threads[THREADS];
  worker_t workers[THREADS];
  for (uint64_t i = 0; i < THREADS; i++) {
    workers[i] = (worker_t){ device, i + 1, 0 };
    CHECK_EQ(pthread_create(&threads[i], NULL, worker_main, &workers[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) {
    CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(workers[i].errors, 0);
  }
  /* Not a byte was lost on the way. */
  CHECK_EQ(ops->memory.frame_create(device, (2 * THREADS + 1) * size, &frame), GEMINI_ERR_OOM_DEVICE);
  frame_new(device, 2 * THREADS * size);
  ops->close(device);
}

/* Several threads queue on one stream and ask for marks while it works. */
typedef struct sharer {
  void *device;
  uint32_t stream;
  _Atomic uint64_t *total;
} sharer_t;
static void count_one(void *user) { atomic_fetch_add_explicit((_Atomic uint64_t *)user, 1, memory_order_relaxed); }
static void *sharer_main(void *user) {
  sharer_t *sharer = user;
  uint64_t previous = 0, ns;
  for (int i = 0; i < 5000; i++) {
    CHECK_EQ(ops->queue.call(sharer->device, sharer->stream, count_one, sharer->total), GEMINI_OK);
    uint64_t mark = mark_new(sharer->device, sharer->stream);
    CHECK(mark > previous);
    if (previous && ops->stream.reached(sharer->device, sharer->stream, previous) && i % 3 == 0) {
      gemini_status_t status = ops->stream.mark_time(sharer->device, sharer->stream, previous, &ns);
      CHECK(status == GEMINI_OK || status == GEMINI_ERR_INVALID);
    }
    if (i % 50 == 0) CHECK_EQ(ops->stream.sync(sharer->device, sharer->stream, mark), GEMINI_OK);
    previous = mark;
  }
  CHECK_EQ(ops->stream.sync(sharer->device, sharer->stream, previous), GEMINI_OK);
  return NULL;
}

static void test_device_four_threads_share_one_stream(void) {
  enum { THREADS = 4 };
  void *device = device_open(0, 0, 0);
  _Atomic uint64_t total = 0;
  sharer_t sharer = { device, stream_new(device), &total };
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_create(&threads[i], NULL, sharer_main, &sharer), 0);
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  CHECK_EQ(atomic_load(&total), THREADS * 5000);
  CHECK_EQ(mark_new(device, sharer.stream), THREADS * 5000 + 1);
  ops->close(device);
}

/* --- the simulated device only --- */

static void test_device_sim_failure_is_stored_until_destroyed(void) {
  void *device = device_open(0, 0, 0);
  uint32_t stream = stream_new(device), other = stream_new(device);
  CHECK_EQ(gmi_device_sim_fail(device, stream, GEMINI_ERR_DEVICE), GEMINI_OK);
  CHECK_EQ(gmi_device_sim_fail(device, stream, GEMINI_ERR_IO), GEMINI_OK);
  uint64_t early = mark_new(device, other), mark = mark_new(device, stream);
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.sync(device, stream, mark_new(device, stream)), GEMINI_ERR_DEVICE);
  CHECK(!ops->stream.reached(device, stream, mark)); /* not as it should */
  CHECK(ops->stream.reached(device, stream, 0));
  CHECK_EQ(ops->stream.sync(device, other, early), GEMINI_OK);
  CHECK(ops->stream.reached(device, other, early));
  CHECK_EQ(ops->stream.wait(device, other, stream, mark), GEMINI_OK); /* a failure goes on to who builds on it */
  CHECK_EQ(ops->stream.sync(device, other, mark_new(device, other)), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.destroy(device, stream), GEMINI_OK);
  CHECK_EQ(stream_new(device), stream);
  stream_drain(device, stream);
  ops->close(device);
}

static void test_device_sim_touch_faults_unless_mapped(void) {
  void *device = device_open(16 * MIB, 0, 0), *base = NULL;
  uint64_t granule = ops->memory.granularity(device), frame = frame_new(device, granule);
  CHECK_EQ(ops->memory.reserve(device, 3 * granule, &base), GEMINI_OK);
  unsigned char *va = base;
  CHECK_EQ(touch(va, true), SIGSEGV);
  CHECK_EQ(ops->memory.map(device, va + granule, frame, granule), GEMINI_OK);
  CHECK_EQ(touch(va + granule, true), 0);
  CHECK_EQ(touch(va + granule - 1, true), SIGSEGV);
  CHECK_EQ(touch(va + 2 * granule, true), SIGSEGV);
  CHECK_EQ(ops->memory.unmap(device, va + granule, granule), GEMINI_OK);
  CHECK_EQ(touch(va + granule, true), SIGSEGV);
  ops->close(device);
}

/* Bytes that the device's memory file takes up: exact, and nobody else's. */
static uint64_t memory_file_bytes(void) {
  for (int fd = 0; fd < 1024; fd++) {
    char path[32], target[64] = "";
    struct stat info;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof target - 1) < 0 || !strstr(target, "memfd:gemini-sim")) continue;
    CHECK_EQ(fstat(fd, &info), 0);
    return (uint64_t)info.st_blocks * 512;
  }
  fprintf(stderr, "no memory file is open\n");
  exit(1);
}

static void test_device_sim_destroyed_frames_give_memory_back(void) {
  const uint64_t size = 16 * MIB;
  void *device = device_open(size, 0, 0), *base = NULL;
  CHECK_EQ(ops->memory.reserve(device, size, &base), GEMINI_OK);
  for (int round = 0; round < 200; round++) { /* enough for the records of destroyed frames to be dropped */
    uint64_t some = round % 50 ? 4096 : size, frame = frame_new(device, some);
    CHECK_EQ(ops->memory.map(device, base, frame, some), GEMINI_OK);
    CHECK(((unsigned char *)base)[some - 1] != 0x42); /* not the last frame's bytes */
    memset(base, 0x42, some);
    CHECK_EQ(memory_file_bytes(), some);
    CHECK_EQ(ops->memory.unmap(device, base, some), GEMINI_OK);
    CHECK_EQ(ops->memory.frame_destroy(device, frame, some), GEMINI_OK);
    CHECK_EQ(memory_file_bytes(), 0);
    CHECK_EQ(ops->memory.frame_destroy(device, frame, some), GEMINI_ERR_INVALID);
  }
  ops->close(device);
}

/* The process's limit on files must come back as a status; the system answers with a deadly signal. */
static void test_device_sim_file_size_limit_is_an_error(void) {
  struct rlimit before, tight;
  CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  tight = before;
  tight.rlim_cur = 4 * MIB;
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  void *device = device_open(64 * MIB, 0, 0);
  uint64_t frame = NOTHING;
  CHECK_EQ(ops->memory.frame_create(device, 8 * MIB, &frame), GEMINI_ERR_OOM_SYSTEM);
  CHECK_SAYS(gmi_fail_message(), "the limit on file sizes is 4194304");
  CHECK_EQ(frame, NOTHING);
  frame_new(device, 1 * MIB);
  ops->close(device);
  CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

/* --- speed: test_device bench --- */

static void nothing(void *user) { (void)user; }

static int bench(void) {
  enum { ROUNDS = 20000, QUEUED = 200000 };
  const int held = HELD_LIMIT < QUEUED ? (int)HELD_LIMIT : QUEUED;
  const uint64_t size = 64 * MIB;
  void *device = device_open(2 * size, 0, 0);
  uint32_t stream = stream_new(device);
  unsigned char *memory = memory_new(device, size), *host = host_new(device, size), *other = host_new(device, size);
  uint64_t begin, mark = 0, best = UINT64_MAX;

  begin = ops->now(device);
  for (int i = 0; i < ROUNDS; i++) {
    CHECK_EQ(ops->queue.call(device, stream, nothing, NULL), GEMINI_OK);
    stream_drain(device, stream);
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  printf("call + mark + sync, idle stream:  %7.0f ns\n", (double)(ops->now(device) - begin) / (double)ROUNDS);
  begin = ops->now(device);
  for (int i = 0; i < QUEUED; i++) CHECK_EQ(ops->queue.call(device, stream, nothing, NULL), GEMINI_OK);
  printf("enqueue, busy stream:             %7.0f ns\n", (double)(ops->now(device) - begin) / (double)QUEUED);
  stream_drain(device, stream);
  _Atomic uint64_t gate;
  gate_close(device, stream, &gate);
  begin = ops->now(device);
  for (int i = 0; i < held; i++) mark = mark_new(device, stream);
  printf("mark, held stream:                %7.0f ns\n", (double)(ops->now(device) - begin) / held);
  begin = ops->now(device);
  for (int i = 0; i < QUEUED; i++) CHECK(!ops->stream.reached(device, stream, mark));
  printf("reached, not yet:                 %7.1f ns\n", (double)(ops->now(device) - begin) / (double)QUEUED);
  gate_open(device, &gate);
  begin = ops->now(device);
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  printf("drain of marks:                   %7.0f ns each\n", (double)(ops->now(device) - begin) / held);
  begin = ops->now(device);
  for (int i = 0; i < ROUNDS; i++) mark = mark_new(device, stream);
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  printf("mark, free stream:                %7.0f ns\n", (double)(ops->now(device) - begin) / (double)ROUNDS);
  uint64_t ns, last = mark;
  begin = ops->now(device);
  for (int i = 0; i < ROUNDS; i++) CHECK_EQ(ops->stream.mark_untimed(device, stream, &last), GEMINI_OK);
  CHECK_EQ(ops->stream.sync(device, stream, last), GEMINI_OK);
  printf("mark_untimed, free stream:        %7.0f ns\n", (double)(ops->now(device) - begin) / (double)ROUNDS);
  for (int i = 0; i < 4096; i++) mark = mark_new(device, stream);
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  begin = ops->now(device);
  for (int i = 0; i < 4000; i++)
    CHECK_EQ(ops->stream.mark_time(device, stream, mark - 3999 + (uint64_t)i, &ns), GEMINI_OK);
  printf("mark_time:                        %7.0f ns\n", (double)(ops->now(device) - begin) / 4000);
  begin = ops->now(device);
  for (int i = 0; i < QUEUED; i++) CHECK(ops->stream.reached(device, stream, mark));
  printf("reached:                          %7.1f ns\n", (double)(ops->now(device) - begin) / (double)QUEUED);

  uint32_t pong = stream_new(device);
  begin = ops->now(device);
  for (int i = 0; i < ROUNDS; i++) {
    CHECK_EQ(ops->stream.wait(device, i % 2 ? stream : pong, i % 2 ? pong : stream, mark), GEMINI_OK);
    mark = mark_new(device, i % 2 ? stream : pong);
  }
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  printf("wait + mark between two streams:  %7.0f ns a turn\n", (double)(ops->now(device) - begin) / (double)ROUNDS);

  for (int i = 0; i < 10; i++) {
    begin = ops->now(device);
    memcpy(other, host, size);
    uint64_t took = ops->now(device) - begin;
    if (took < best) best = took;
  }
  printf("memcpy of 64 MiB:                 %7.2f GB/s\n", (double)size / (double)best);
  best = UINT64_MAX;
  for (int i = 0; i < 10; i++) {
    begin = ops->now(device);
    copy_in(device, stream, memory, host, size);
    stream_drain(device, stream);
    uint64_t took = ops->now(device) - begin;
    if (took < best) best = took;
  }
  printf("copy of 64 MiB:                   %7.2f GB/s\n", (double)size / (double)best);
  static double sums[1024];
  for (int round = 0; round < 2; round++) {
    begin = ops->now(device);
    for (uint64_t i = 0; i < size / 65536; i++)
      CHECK_EQ(ops->queue.sum_squares(device, stream, memory + i * 65536, GEMINI_DTYPE_BF16, 32768, &sums[i]),
               GEMINI_OK);
    uint64_t queued = ops->now(device) - begin;
    stream_drain(device, stream);
    uint64_t took = ops->now(device) - begin;
    printf("sums of squares, BF16, 64 KiB:    %7.2f Gvalues/s, 64 MiB in %.3f ms (queueing: %.0f ns each)\n",
           (double)(size / 2) / (double)took, (double)took / 1e6, (double)queued / (double)(size / 65536));
  }
  void *base = NULL;
  CHECK_EQ(ops->memory.reserve(device, size, &base), GEMINI_OK);
  uint64_t frame = frame_new(device, size);
  for (int i = 0; i < 2; i++) {
    begin = ops->now(device);
    CHECK_EQ(ops->memory.map(device, base, frame, size), GEMINI_OK);
    uint64_t mapped = ops->now(device);
    CHECK_EQ(ops->memory.unmap(device, base, size), GEMINI_OK);
    printf("map, unmap of 64 MiB, %-10s: %7.2f ms, %.2f ms\n", i ? "again" : "first time",
           (double)(mapped - begin) / 1e6, (double)(ops->now(device) - mapped) / 1e6);
  }
  host_delete(device, host, size);
  host_delete(device, other, size);
  ops->close(device);
  if (ops != &gmi_device_sim) return 0;

  device = device_open(2 * size, UINT64_C(2000000000), 0);
  stream = stream_new(device);
  memory = memory_new(device, MIB);
  host = host_new(device, MIB);
  begin = ops->now(device);
  for (int i = 0; i < 1000; i++) copy_in(device, stream, memory, host, MIB);
  stream_drain(device, stream);
  printf("1,000 copies of 1 MiB at 2 GB/s:  %7.4f GB/s\n", 1000.0 * (double)MIB / (double)(ops->now(device) - begin));
  host_delete(device, host, MIB);
  ops->close(device);
  return 0;
}

static void run_all(void) {
  RUN(test_device_open_with_bad_config_is_refused);
  RUN(test_device_frame_that_cannot_be_freed_still_counts);
  RUN(test_device_budget_is_exact_to_the_byte);
  RUN(test_device_resize_keeps_what_exists);
  RUN(test_device_bad_addresses_and_frames_are_refused);
  RUN(test_device_ranges_do_not_overlap);
  RUN(test_device_frame_at_two_addresses_is_one_memory);
  RUN(test_device_map_replaces_what_was_mapped);
  RUN(test_device_remap_beside_running_copies_disturbs_nothing);
  RUN(test_device_streams_are_limited_and_reused);
  RUN(test_device_bad_stream_arguments_are_refused);
  RUN(test_device_marks_count_up_and_are_reached_in_order);
  RUN(test_device_mark_times_are_ordered_and_kept_for_4096);
  RUN(test_device_untimed_marks_are_marks);
  RUN(test_device_waits_order_work_across_streams);
  RUN(test_device_wait_holds_one_stream_only);
  RUN(test_device_wait_flag_waits_for_its_value);
  RUN(test_device_wait_flag_loses_no_wake_up);
  RUN(test_device_queue_has_no_limit);
  RUN(test_device_operations_do_not_wait_for_a_held_stream);
  RUN(test_device_destroy_and_close_finish_queued_work);
  RUN(test_device_zero_clears_exactly_its_range);
  RUN(test_device_random_copies_between_streams_agree_with_model);
  RUN(test_device_sum_squares_is_exact_and_ordered);
  RUN(test_device_sum_squares_of_many_pieces_is_the_hosts);
  RUN(test_device_add_has_the_bits_of_the_host);
  RUN(test_sum_squares_converts_every_half);
  RUN(test_device_four_threads_share_it);
  RUN(test_device_four_threads_share_one_stream);
  if (ops == &gmi_device_sim) {
    RUN(test_device_sim_copies_are_never_faster_than_the_rate);
    RUN(test_device_sim_marks_time_a_copy_by_its_link);
    RUN(test_device_sim_failure_is_stored_until_destroyed);
    RUN(test_device_sim_touch_faults_unless_mapped);
    RUN(test_device_sim_destroyed_frames_give_memory_back);
    RUN(test_device_sim_file_size_limit_is_an_error);
  }
}

/* Is there a GPU? Says why not. */
static bool gpu_found(void) {
  gmi_device_config_t config = { 0 };
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  void *device = NULL;
  gemini_status_t status = gmi_device_cuda.open(&config, &device);
  if (status == GEMINI_OK) {
    gmi_device_cuda.close(device);
    return true;
  }
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  fprintf(stderr, "no GPU: %s: %s\n", gemini_status_string(status), info.message);
  CHECK_EQ(status, GEMINI_ERR_UNSUPPORTED);
  return false;
}

int main(int argc, char **argv) {
  const char *only = getenv("GEMINI_TEST_DEVICE");
  bool measure = argc > 1 && !strcmp(argv[1], "bench");
  if (only && !strcmp(only, "cuda")) {
    if (!gpu_found()) return 77;
    ops = &gmi_device_cuda;
    if (measure) return bench();
    run_all();
    return check_done();
  }
  if (!only || !strcmp(only, "sim")) {
    if (measure) return bench();
    run_all();
  }
  if (!only || !strcmp(only, "fake")) {
    fprintf(stderr, "  over the fake CUDA driver:\n");
    ops = &gmi_device_cuda;
    gmi_cuda_driver_replace(fake_cuda_symbol);
    if (measure) return bench();
    run_all();
    CHECK_EQ(fake_cuda_live(true), 0);
    CHECK_EQ(fake_cuda_violations(), 0);
    CHECK_EQ(fake_cuda_pageable_copies(), 0);
  }
  return check_done();
}
