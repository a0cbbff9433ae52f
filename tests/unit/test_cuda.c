/* The CUDA device over a fake driver: what the contract that test_device.c checks does not show. Failures of every
 * driver call, lost contexts, other people's contexts and streams, rings of events, gates, clocks.
 * SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "../check.h"
#include "device/cuda_driver.h"
#include "device/device.h"
#include "fake_cuda.h"

#define MIB (UINT64_C(1) << 20)
#define GRANULE (2 * MIB)
#define MS UINT64_C(1000000)
#define NOTHING UINT64_C(0x5EED)

static const gmi_device_ops_t *const ops = &gmi_device_cuda;
static const gmi_cuda_driver_t *driver; /* the fake, by its own names */

/* --- helpers --- */

static void *device_open(uint64_t memory_bytes) {
  gmi_device_config_t config = { .memory_bytes = memory_bytes };
  void *device = NULL;
  CHECK_EQ(ops->open(&config, &device), GEMINI_OK);
  return device;
}
static void device_close(void *device) {
  ops->close(device);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}
static uint32_t stream_new(void *device) {
  uint32_t stream;
  CHECK_EQ(ops->stream.create(device, false, &stream), GEMINI_OK);
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
  return frame;
}
static unsigned char *range_new(void *device, uint64_t size_bytes) {
  void *base = NULL;
  CHECK_EQ(ops->memory.reserve(device, size_bytes, &base), GEMINI_OK);
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
static void sleep_ns(uint64_t ns) {
  struct timespec ts = { (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) };
  nanosleep(&ts, NULL);
}
/* The byte at a device address, by a copy. */
static int byte_at(void *device, uint32_t stream, const unsigned char *address, unsigned char *host) {
  host[0] = 0;
  CHECK_EQ(ops->queue.copy(device, stream, host, address, 1, GMI_COPY_D2H), GEMINI_OK);
  stream_drain(device, stream);
  return host[0];
}
static void set_byte(void *device, uint32_t stream, unsigned char *address, unsigned char *host, int byte) {
  host[0] = (unsigned char)byte;
  CHECK_EQ(ops->queue.copy(device, stream, address, host, 1, GMI_COPY_H2D), GEMINI_OK);
  stream_drain(device, stream);
}
/* Does the thread's last error say that, with that native code? */
static bool error_says(const char *words, int64_t native_code) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  if (strstr(info.message, words) && info.native_code == native_code) return true;
  fprintf(stderr, "    error is: %s (%lld)\n", info.message, (long long)info.native_code);
  return false;
}
static void start(void) {
  fake_cuda_reset();
  gmi_cuda_driver_replace(fake_cuda_symbol);
  driver = gmi_cuda_driver();
  CHECK(driver);
}

/* --- opening --- */

static void test_cuda_open_says_what_is_missing(void) {
  static const struct {
    int attribute;
    const char *words;
  } needed[] = { { CU_ATTRIBUTE_UNIFIED_ADDRESSING, "unified addressing" },
                 { CU_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory" },
                 { CU_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, "64-bit" },
                 { CU_ATTRIBUTE_HOST_REGISTER_SUPPORTED, "page-locking" },
                 { CU_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, "host addresses" } };
  gmi_device_config_t config = { .memory_bytes = GRANULE };
  void *device = (void *)NOTHING;
  start();
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
    fake_cuda.lacking_attribute = needed[i].attribute;
    CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_UNSUPPORTED);
    CHECK(error_says(needed[i].words, 0));
  }
  fake_cuda.lacking_attribute = 0;
  config.ordinal = 2;
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_UNSUPPORTED);
  CHECK(error_says("device_ordinal is 2, this machine has 2 GPUs", 0));
  config.ordinal = 0;
  config.memory_bytes = MIB;
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_INVALID);
  CHECK(error_says("multiple of 2097152", 0));
  config.memory_bytes = GRANULE;
  fake_cuda.device_count = 0;
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_UNSUPPORTED);
  CHECK(error_says("no GPU", CU_NO_DEVICE));
  fake_cuda.device_count = 2;
  fake_cuda_fail_function("cuInit", CU_UNKNOWN);
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_DEVICE);
  CHECK(error_says("CUDA_ERROR_UNKNOWN", CU_UNKNOWN));
  fake_cuda_fail_function("cuModuleLoadData", 222); /* a PTX version that the driver does not know */
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_DEVICE);
  CHECK(error_says("cuModuleLoadData: CUDA error 222", 222));
  fake_cuda_fail_function(NULL, 0);
  fake_cuda.lacking_symbol = "cuStreamWaitValue64_v2";
  gmi_cuda_driver_replace(fake_cuda_symbol);
  CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_UNSUPPORTED);
  CHECK(error_says("has no cuStreamWaitValue64_v2", 0));
  CHECK(device == (void *)NOTHING);
  /* The driver of this machine, if it has one. */
  gmi_cuda_driver_replace(NULL);
  if (!gmi_cuda_driver()) {
    CHECK_EQ(ops->open(&config, &device), GEMINI_ERR_UNSUPPORTED);
    CHECK(error_says("libcuda.so.1", 0));
  }
  start();
  config.ordinal = 1; /* the other GPU */
  CHECK_EQ(ops->open(&config, &device), GEMINI_OK);
  uint64_t frame = frame_new(device, GRANULE);
  CHECK_EQ(ops->memory.map(device, range_new(device, GRANULE), frame, GRANULE), GEMINI_OK);
  device_close(device);
}

/* --- contexts --- */

/* Whatever a thread has current, an operation leaves it so. */
static void test_cuda_operations_leave_the_threads_context_alone(void) {
  start();
  void *device = device_open(16 * MIB);
  cu_context_t ours = NULL, other = NULL, now = NULL;
  CHECK_EQ(driver->primary_retain(&ours, 0), CU_SUCCESS);
  CHECK_EQ(driver->primary_retain(&other, 1), CU_SUCCESS);
  cu_context_t had[] = { NULL, ours, other };
  for (size_t i = 0; i < 3; i++) {
    CHECK_EQ(driver->current_set(had[i]), CU_SUCCESS);
    uint32_t stream = 0, adopted = 0;
    uint64_t frame = 0, mark = 0, ns;
    void *base = NULL, *native, *host = NULL;
    char pci[GMI_DEVICE_PCI_BYTES];
    double sum;
    _Atomic uint64_t flag = 0;
    CHECK_EQ(posix_memalign(&host, 4096, 4096), 0);
#define KEEPS(call)                                                  \
  do {                                                               \
    CHECK_EQ(call, GEMINI_OK);                                       \
    CHECK(driver->current_get(&now) == CU_SUCCESS && now == had[i]); \
  } while (0)
    KEEPS(ops->memory.host_lock(device, host, 4096));
    KEEPS(ops->memory.reserve(device, GRANULE, &base));
    KEEPS(ops->memory.frame_create(device, GRANULE, &frame));
    KEEPS(ops->memory.map(device, base, frame, GRANULE));
    KEEPS(ops->stream.create(device, false, &stream));
    KEEPS(ops->stream.wait_flag(device, stream, &flag, 1));
    atomic_store(&flag, 1);
    ops->stream.flag_wake(device);
    KEEPS(ops->queue.copy(device, stream, base, host, 4096, GMI_COPY_H2D));
    KEEPS(ops->queue.zero(device, stream, base, 4096));
    KEEPS(ops->queue.sum_squares(device, stream, base, GEMINI_DTYPE_F32, 1024, &sum));
    KEEPS(ops->queue.add(device, stream, host, base, GEMINI_DTYPE_F32, 1024));
    KEEPS(ops->stream.mark(device, stream, &mark));
    KEEPS((ops->stream.reached(device, stream, mark), GEMINI_OK));
    KEEPS(ops->stream.sync(device, stream, mark));
    KEEPS(ops->stream.mark_time(device, stream, mark, &ns));
    KEEPS(ops->stream.mark_untimed(device, stream, &mark));
    KEEPS(ops->stream.native(device, stream, &native));
    KEEPS(ops->stream.adopt(device, native, &adopted));
    KEEPS(ops->pci(device, pci));
    CHECK(!strcmp(pci, "0000:1A:00.0"));
    KEEPS(ops->memory_bytes_per_s(device) == UINT64_C(128000000000) ? GEMINI_OK : GEMINI_ERR_INVALID);
    KEEPS(ops->stream.renew(device, adopted, true));
    KEEPS(ops->stream.wait(device, adopted, stream, mark));
    KEEPS(ops->stream.destroy(device, adopted));
    KEEPS(ops->stream.destroy(device, stream));
    KEEPS(ops->memory.unmap(device, base, GRANULE));
    KEEPS(ops->memory.frame_destroy(device, frame, GRANULE));
    KEEPS(ops->memory.unreserve(device, base, GRANULE));
    KEEPS(ops->memory.host_unlock(device, host, 4096));
    free(host);
  }
  CHECK_EQ(driver->current_set(NULL), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(0), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(1), CU_SUCCESS);
  device_close(device);
}

/* --- failures --- */

static void store_sum(void *user) { ((double *)user)[1] = ((double *)user)[0]; }

/* Does the call; should it fail, it must have changed nothing, so that doing it again succeeds. */
static int failures;
#define AGAIN(call)                                                                       \
  do {                                                                                    \
    gemini_status_t again_status = call;                                                  \
    if (again_status != GEMINI_OK) {                                                      \
      failures++;                                                                         \
      CHECK(again_status == GEMINI_ERR_DEVICE || again_status == GEMINI_ERR_OOM_DEVICE || \
            again_status == GEMINI_ERR_OOM_SYSTEM);                                       \
      CHECK_EQ(call, GEMINI_OK);                                                          \
    }                                                                                     \
  } while (0)

/* Uses every operation once; the results are checked. */
enum { USED = SANITIZED ? 4096 : GRANULE }; /* bytes: all of them, hundreds of times, take a sanitizer a minute */
static void use_everything(void *device) {
  uint64_t frames[2] = { NOTHING, NOTHING }, mark = NOTHING, other_mark = NOTHING, ns = NOTHING;
  uint32_t stream = 99, other = 99, adopted = 99;
  void *base = NULL, *memory = NULL, *native = NULL;
  double sums[2] = { -1.0, -1.0 };
  _Atomic uint64_t flag = 0;
  CHECK_EQ(posix_memalign(&memory, 4096, GRANULE), 0);
  unsigned char *host = memory;
  for (uint64_t i = 0; i < USED; i++) host[i] = (unsigned char)(i * 7 + i / 1000);
  double expected = gmi_sum_squares(host, GEMINI_DTYPE_BF16, 1000);
  AGAIN(ops->memory.host_lock(device, host, GRANULE));
  AGAIN(ops->memory.reserve(device, 2 * GRANULE, &base));
  unsigned char *va = base;
  for (int i = 0; i < 2; i++) AGAIN(ops->memory.frame_create(device, GRANULE, &frames[i]));
  AGAIN(ops->stream.create(device, false, &stream));
  AGAIN(ops->stream.create(device, false, &other));
  AGAIN(ops->memory.map(device, va, frames[0], GRANULE));
  AGAIN(ops->queue.copy(device, stream, va, host, USED, GMI_COPY_H2D));
  AGAIN(ops->queue.sum_squares(device, stream, va, GEMINI_DTYPE_BF16, 1000, &sums[0]));
  AGAIN(ops->queue.call(device, stream, store_sum, sums));
  AGAIN(ops->stream.mark(device, stream, &mark));
  AGAIN(ops->stream.wait_flag(device, other, &flag, 1));
  AGAIN(ops->stream.wait(device, other, stream, mark));
  AGAIN(ops->stream.mark_untimed(device, other, &other_mark));
  CHECK(!ops->stream.reached(device, other, other_mark));
  atomic_store(&flag, 1);
  ops->stream.flag_wake(device);
  AGAIN(ops->stream.sync(device, other, other_mark));
  AGAIN(ops->stream.sync(device, stream, mark));
  CHECK(ops->stream.reached(device, stream, mark) || ops->stream.reached(device, stream, mark));
  CHECK(sums[0] == expected || (isnan(sums[0]) && isnan(expected)));
  CHECK(!memcmp(&sums[0], &sums[1], sizeof sums[0]));
  AGAIN(ops->stream.mark_time(device, stream, mark, &ns));
  CHECK(ns <= ops->now(device));
  /* Another frame comes where the first one was, and goes again. */
  AGAIN(ops->memory.map(device, va, frames[1], GRANULE));
  AGAIN(ops->queue.zero(device, stream, va, USED));
  AGAIN(ops->memory.map(device, va + GRANULE, frames[0], GRANULE));
  AGAIN(ops->queue.copy(device, stream, va, va + GRANULE, 100, GMI_COPY_D2D));
  memset(host + 200, 9, 300);
  AGAIN(ops->queue.copy(device, stream, host + 200, va, 300, GMI_COPY_D2H));
  AGAIN(ops->stream.mark(device, stream, &mark));
  AGAIN(ops->stream.sync(device, stream, mark));
  CHECK(!memcmp(host + 200, host, 100));
  for (int i = 300; i < 500; i++) CHECK_EQ(host[i], 0);
  AGAIN(ops->stream.native(device, other, &native));
  AGAIN(ops->stream.adopt(device, native, &adopted));
  AGAIN(ops->stream.mark_untimed(device, adopted, &mark));
  CHECK(ops->stream.mark_time(device, adopted, mark, &ns) != GEMINI_OK);
  AGAIN(ops->stream.destroy(device, adopted));
  AGAIN(ops->stream.destroy(device, other));
  AGAIN(ops->stream.destroy(device, stream));
  AGAIN(ops->memory.unmap(device, va, GRANULE));
  for (int i = 1; i >= 0; i--) {
    if (i == 0) AGAIN(ops->memory.unreserve(device, base, 2 * GRANULE)); /* with a frame mapped in it */
    AGAIN(ops->memory.frame_destroy(device, frames[i], GRANULE));
  }
  AGAIN(ops->memory.host_unlock(device, host, GRANULE));
  free(memory);
}

static void test_cuda_every_driver_call_may_fail_once(void) {
  static const int results[] = { CU_UNKNOWN, CU_OUT_OF_MEMORY };
  gmi_device_config_t config = { .memory_bytes = 4 * GRANULE };
  int opens_failed = 0, uses_failed = 0;
  for (size_t r = 0; r < 2; r++) {
    for (uint64_t n = 1;; n += check_stride()) {
      start();
      void *device = (void *)NOTHING;
      fake_cuda_fail(n, n, results[r]);
      gemini_status_t status = ops->open(&config, &device);
      if (status != GEMINI_OK) {
        opens_failed++;
        CHECK(device == (void *)NOTHING);
        CHECK(status == GEMINI_ERR_DEVICE || status == GEMINI_ERR_OOM_SYSTEM || status == GEMINI_ERR_UNSUPPORTED);
        CHECK_EQ(fake_cuda_live(true), 0);
        CHECK_EQ(ops->open(&config, &device), GEMINI_OK);
      }
      failures = 0;
      use_everything(device);
      CHECK(failures <= 1);
      uses_failed += failures;
      use_everything(device); /* with no failure any more, or the first one */
      uint64_t before_close = fake_cuda_calls();
      ops->close(device);
      /* What a call of close failed to end cannot be ended any more. */
      if (n <= before_close) CHECK_EQ(fake_cuda_live(true), 0);
      CHECK_EQ(fake_cuda_violations(), 0);
      if (n > fake_cuda_calls()) break;
    }
  }
  fprintf(stderr, "    %d failures in open, %d in use\n", opens_failed, uses_failed);
  CHECK(check_is_slow() ? opens_failed > 6 && uses_failed > 30 : opens_failed > 20 && uses_failed > 100);
}

static void test_cuda_failures_say_the_drivers_words(void) {
  start();
  void *device = device_open(64 * MIB), *host = NULL;
  uint64_t frame = NOTHING;
  fake_cuda.memory_bytes = 3 * GRANULE; /* a GPU smaller than the budget, or taken by others */
  uint64_t kept = frame_new(device, 2 * GRANULE);
  CHECK_EQ(ops->memory.frame_create(device, 2 * GRANULE, &frame), GEMINI_ERR_OOM_DEVICE);
  CHECK(error_says("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY", CU_OUT_OF_MEMORY));
  CHECK_EQ(frame, NOTHING);
  CHECK_EQ(ops->memory.frame_destroy(device, kept, 2 * GRANULE), GEMINI_OK);
  frame_new(device, 2 * GRANULE);
  CHECK_EQ(posix_memalign(&host, 4096, 8192), 0);
  fake_cuda_fail_function("cuMemHostRegister", CU_OUT_OF_MEMORY);
  CHECK_EQ(ops->memory.host_lock(device, host, 8192), GEMINI_ERR_OOM_SYSTEM);
  CHECK(error_says("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY", CU_OUT_OF_MEMORY));
  fake_cuda_fail_function(NULL, 0);
  CHECK_EQ(ops->memory.host_lock(device, host, 4096), GEMINI_OK);
  CHECK_EQ(ops->memory.host_lock(device, host, 8192), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.host_lock(device, (char *)host - 4096, 8192), GEMINI_ERR_INVALID); /* a part is locked */
  CHECK_EQ(ops->memory.host_unlock(device, host, 8192), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.host_unlock(device, (char *)host + 4096, 4096), GEMINI_ERR_INVALID);
  device_close(device); /* unlocks what still is */
  free(host);
}

/* A lost context: waits end, everything fails and says why, nothing is taken for done, and close comes through. */
typedef struct loser {
  void *device;
  uint32_t stream;
  uint64_t mark;
  gemini_status_t status;
} loser_t;
static void *loser_main(void *user) {
  loser_t *loser = user;
  loser->status = ops->stream.sync(loser->device, loser->stream, loser->mark);
  CHECK(error_says("CUDA_ERROR_ILLEGAL_ADDRESS", CU_ILLEGAL_ADDRESS));
  return NULL;
}
static void test_cuda_lost_context_ends_every_wait(void) {
  start();
  void *device = device_open(16 * MIB), *base = range_new(device, 2 * GRANULE);
  uint32_t stream = stream_new(device), other = stream_new(device), index = 0;
  uint64_t frame = frame_new(device, GRANULE), early = mark_new(device, other), out = NOTHING;
  unsigned char *host = host_new(device, 4096);
  double sum = -1.0;
  _Atomic uint64_t flag = 0;
  CHECK_EQ(ops->memory.map(device, base, frame, GRANULE), GEMINI_OK);
  CHECK_EQ(ops->stream.sync(device, other, early), GEMINI_OK);
  CHECK(ops->stream.reached(device, other, early));
  CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, 1), GEMINI_OK);
  CHECK_EQ(ops->queue.sum_squares(device, stream, base, GEMINI_DTYPE_F32, 64, &sum), GEMINI_OK);
  loser_t loser = { device, stream, mark_new(device, stream), GEMINI_OK };
  CHECK_EQ(ops->queue.sum_squares(device, stream, base, GEMINI_DTYPE_F32, 64, &sum), GEMINI_OK);
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, loser_main, &loser), 0);
  sleep_ns(5 * MS);
  fake_cuda_lose(CU_ILLEGAL_ADDRESS);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK_EQ(loser.status, GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.sync(device, stream, loser.mark), GEMINI_ERR_DEVICE);
  CHECK(error_says("earlier failure, CUDA_ERROR_ILLEGAL_ADDRESS", CU_ILLEGAL_ADDRESS));
  CHECK_EQ(ops->stream.sync(device, other, early), GEMINI_ERR_DEVICE);
  CHECK(!ops->stream.reached(device, stream, loser.mark) && !ops->stream.reached(device, other, early));
  CHECK(ops->stream.reached(device, other, 0));
  CHECK_EQ(ops->stream.mark(device, stream, &out), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->queue.copy(device, stream, base, host, 64, GMI_COPY_H2D), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, 1), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.wait(device, other, stream, loser.mark), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->memory.map(device, base, frame, GRANULE), GEMINI_OK); /* as it is */
  CHECK_EQ(ops->memory.map(device, (unsigned char *)base + GRANULE, frame, GRANULE), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->memory.unmap(device, base, GRANULE), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->memory.frame_create(device, GRANULE, &out), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.create(device, false, &index), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->stream.mark_time(device, stream, loser.mark, &out), GEMINI_ERR_INVALID);
  CHECK_EQ(out, NOTHING);
  atomic_store(&flag, 1);
  ops->stream.flag_wake(device);
  CHECK_EQ(ops->stream.destroy(device, stream), GEMINI_OK);
  CHECK(sum == -1.0);
  ops->close(device); /* what the driver made of it is the driver's */
  CHECK_EQ(fake_cuda_violations(), 0);
  free(host);
  /* The other way of noticing: nobody waits, a mark is looked at. */
  start();
  device = device_open(0);
  stream = stream_new(device);
  uint64_t mark = mark_new(device, stream);
  fake_cuda_lose(CU_LAUNCH_FAILED);
  CHECK(!ops->stream.reached(device, stream, mark));
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_ERR_DEVICE);
  CHECK(error_says("earlier failure, CUDA error 719", CU_LAUNCH_FAILED));
  ops->close(device);
}

/* An error that is not the context's end is told, and forgotten. */
static void test_cuda_passing_error_of_a_mark_is_not_stored(void) {
  start();
  void *device = device_open(0);
  uint32_t stream = stream_new(device);
  uint64_t mark = mark_new(device, stream);
  sleep_ns(MS);
  fake_cuda_fail_function("cuEventQuery", 907); /* CUDA_ERROR_CAPTURED_EVENT */
  CHECK(!ops->stream.reached(device, stream, mark));
  fake_cuda_fail_function(NULL, 0);
  CHECK(ops->stream.reached(device, stream, mark));
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  device_close(device);
}

/* --- mappings --- */

static void test_cuda_mappings_are_replaced_and_removed_whole(void) {
  start();
  void *device = device_open(64 * MIB);
  uint32_t stream = stream_new(device);
  unsigned char *va = range_new(device, 6 * GRANULE), *host = host_new(device, 4096);
  uint64_t one[4], two = frame_new(device, 2 * GRANULE), four = frame_new(device, 4 * GRANULE);
  for (int i = 0; i < 4; i++) {
    one[i] = frame_new(device, GRANULE);
    CHECK_EQ(ops->memory.map(device, va + (uint64_t)i * GRANULE, one[i], GRANULE), GEMINI_OK);
    set_byte(device, stream, va + (uint64_t)i * GRANULE, host, 10 + i);
  }
  CHECK_EQ(ops->memory.frame_destroy(device, one[0], GRANULE), GEMINI_ERR_INVALID); /* mapped */
  /* One large frame in place of three small ones and a gap. */
  CHECK_EQ(ops->memory.map(device, va + GRANULE, four, 4 * GRANULE), GEMINI_OK);
  set_byte(device, stream, va + 4 * GRANULE, host, 44);
  CHECK_EQ(byte_at(device, stream, va, host), 10);
  for (int i = 1; i < 4; i++) CHECK_EQ(ops->memory.frame_destroy(device, one[i], GRANULE), GEMINI_OK);
  /* Whatever would cut it is refused, and changes nothing. */
  CHECK_EQ(ops->memory.map(device, va, two, 2 * GRANULE), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va + 4 * GRANULE, two, 2 * GRANULE), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.map(device, va + 2 * GRANULE, one[0], GRANULE), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unmap(device, va, 2 * GRANULE), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unmap(device, va + 2 * GRANULE, 3 * GRANULE), GEMINI_ERR_INVALID);
  CHECK_EQ(ops->memory.unmap(device, va + 2 * GRANULE, GRANULE), GEMINI_ERR_INVALID);
  CHECK_EQ(byte_at(device, stream, va + 4 * GRANULE, host), 44);
  CHECK_EQ(byte_at(device, stream, va, host), 10);
  CHECK_EQ(ops->memory.unmap(device, va, 6 * GRANULE), GEMINI_OK); /* two mappings and gaps */
  CHECK_EQ(ops->memory.unmap(device, va, 6 * GRANULE), GEMINI_OK); /* nothing */
  CHECK_EQ(ops->queue.copy(device, stream, host, va, 1, GMI_COPY_D2H), GEMINI_ERR_DEVICE);
  CHECK_EQ(ops->memory.frame_destroy(device, one[0], GRANULE), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_destroy(device, four, 4 * GRANULE), GEMINI_OK);
  host_delete(device, host, 4096);
  device_close(device);
}

/* Every driver call of a map that replaces fails once: the old mapping is still there, with its bytes. */
static void test_cuda_failed_map_leaves_the_old_mapping(void) {
  start();
  void *device = device_open(64 * MIB);
  uint32_t stream = stream_new(device);
  unsigned char *va = range_new(device, 2 * GRANULE), *host = host_new(device, 4096);
  uint64_t large = frame_new(device, 2 * GRANULE);
  for (int i = 0; i < 2; i++) {
    CHECK_EQ(ops->memory.map(device, va + (uint64_t)i * GRANULE, frame_new(device, GRANULE), GRANULE), GEMINI_OK);
    set_byte(device, stream, va + (uint64_t)i * GRANULE, host, 70 + i);
  }
  int failed = 0;
  for (uint64_t n = 1; n < 100; n++) {
    uint64_t before = fake_cuda_calls();
    fake_cuda_fail(before + n, before + n, CU_UNKNOWN);
    gemini_status_t status = ops->memory.map(device, va, large, 2 * GRANULE);
    bool came = fake_cuda_calls() >= before + n;
    fake_cuda_fail(0, 0, 0);
    CHECK_EQ(driver->current_set(NULL), CU_SUCCESS); /* where putting it back failed */
    if (!came) {
      CHECK_EQ(status, GEMINI_OK);
      break;
    }
    if (status == GEMINI_OK) { /* only putting the context back failed */
      CHECK_EQ(ops->memory.unmap(device, va, 2 * GRANULE), GEMINI_OK);
      break;
    }
    failed++;
    for (int i = 0; i < 2; i++) CHECK_EQ(byte_at(device, stream, va + (uint64_t)i * GRANULE, host), 70 + i);
  }
  CHECK(failed >= 4);
  host_delete(device, host, 4096);
  device_close(device);
}

/* --- marks --- */

static void test_cuda_events_are_used_again(void) {
  start();
  void *device = device_open(0);
  uint32_t stream = stream_new(device);
  uint64_t mark = 0, ns, events = 0;
  for (uint64_t i = 1; i <= 40000; i++) {
    mark = mark_new(device, stream);
    CHECK_EQ(mark, i);
    if (i % 97 == 0) CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
    if (i == 9000) events = fake_cuda_live(false);
  }
  CHECK(fake_cuda_live(false) <= events);
  CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  CHECK(ops->stream.reached(device, stream, 1));
  CHECK_EQ(ops->stream.sync(device, stream, 17), GEMINI_OK);
  CHECK_EQ(ops->stream.mark_time(device, stream, mark - 4095, &ns), GEMINI_OK);
  CHECK_EQ(ops->stream.mark_time(device, stream, mark - 4096, &ns), GEMINI_ERR_INVALID);
  device_close(device);
}

/* More marks on a held stream than the ring has events at first: each keeps its own meaning. */
typedef struct waiter {
  void *device;
  uint32_t stream;
  uint64_t mark;
  _Atomic int done;
} waiter_t;
static void *waiter_main(void *user) {
  waiter_t *w = user;
  CHECK_EQ(ops->stream.sync(w->device, w->stream, w->mark), GEMINI_OK);
  atomic_store(&w->done, 1);
  return NULL;
}
static void test_cuda_held_stream_keeps_all_its_marks(void) {
  enum { GATES = 5, EACH = 6000 };
  start();
  fake_cuda.queue_limit = 1u << 20;
  void *device = device_open(0);
  uint32_t stream = stream_new(device), others[GATES];
  uint64_t behind[GATES], ns;
  _Atomic uint64_t flag = 0;
  pthread_t threads[GATES];
  waiter_t waiters[GATES];
  stream_drain(device, stream);
  for (uint64_t g = 0; g < GATES; g++) {
    CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, g + 1), GEMINI_OK);
    for (uint64_t i = 0; i < EACH; i++) mark_new(device, stream);
    uint64_t first = 2 + g * EACH; /* behind the gate */
    waiters[g] = (waiter_t){ device, stream, first, 0 };
    CHECK_EQ(pthread_create(&threads[g], NULL, waiter_main, &waiters[g]), 0);
  }
  for (uint64_t g = 0; g < GATES; g++) {
    others[g] = stream_new(device);
    CHECK_EQ(ops->stream.wait(device, others[g], stream, 2 + g * EACH), GEMINI_OK);
    behind[g] = mark_new(device, others[g]);
  }
  for (uint64_t g = 0; g < GATES; g++) {
    uint64_t first = 2 + g * EACH, last = first + EACH - 1;
    sleep_ns(3 * MS);
    CHECK(!ops->stream.reached(device, stream, first) && !ops->stream.reached(device, others[g], behind[g]));
    CHECK(!atomic_load(&waiters[g].done));
    CHECK(g == 0 || ops->stream.reached(device, stream, first - 1));
    CHECK_EQ(ops->stream.mark_time(device, stream, first, &ns), GEMINI_ERR_INVALID);
    atomic_store_explicit(&flag, g + 1, memory_order_release);
    ops->stream.flag_wake(device);
    CHECK_EQ(ops->stream.sync(device, others[g], behind[g]), GEMINI_OK);
    CHECK_EQ(ops->stream.sync(device, stream, last), GEMINI_OK);
    CHECK_EQ(pthread_join(threads[g], NULL), 0);
    CHECK_EQ(ops->stream.mark_time(device, stream, last - 4095, &ns), GEMINI_OK);
    CHECK_EQ(ops->stream.mark_time(device, stream, last - 4096, &ns), GEMINI_ERR_INVALID);
  }
  device_close(device);
}

/* Many questions about marks of a stream that does not get on are one to the driver, for a moment; then it is asked
 * again. A machine that stops between two questions makes it ask again, too: hence the tries. */
static void test_cuda_driver_is_not_asked_again_at_once(void) {
  enum { MARKS = 200, TRIES = 50 };
  start();
  void *device = device_open(0);
  uint32_t stream = stream_new(device), other = stream_new(device);
  uint64_t marks[MARKS], least = UINT64_MAX;
  _Atomic uint64_t flag = 0;
  stream_drain(device, stream);
  CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, 1), GEMINI_OK);
  for (int i = 0; i < MARKS; i++) marks[i] = mark_new(device, stream);
  for (int n = 0; n < TRIES; n++) {
    const uint64_t before = fake_cuda_calls();
    for (int i = 0; i < MARKS; i++) CHECK(!ops->stream.reached(device, stream, marks[i]));
    if (fake_cuda_calls() - before < least) least = fake_cuda_calls() - before;
  }
  CHECK(least < 2 * MARKS);                                               /* else each question is four or more */
  CHECK_EQ(ops->stream.wait(device, other, stream, marks[0]), GEMINI_OK); /* it does not take the answer for the end */
  const uint64_t behind = mark_new(device, other);
  CHECK(!ops->stream.reached(device, other, behind));
  atomic_store_explicit(&flag, 1, memory_order_release);
  ops->stream.flag_wake(device);
  for (int n = 0; n < 5000 && !ops->stream.reached(device, stream, marks[MARKS - 1]); n++) sleep_ns(MS);
  for (int i = 0; i < MARKS; i++) CHECK(ops->stream.reached(device, stream, marks[i]));
  CHECK_EQ(ops->stream.sync(device, other, behind), GEMINI_OK);
  CHECK(ops->stream.reached(device, other, behind));
  device_close(device);
}

/* A thread's creation of an event takes long, as with a full queue. Others that look at the stream's marks do not wait. */
static waiter_t looker;
static bool looked;
static void *looker_main(void *user) {
  CHECK(!ops->stream.reached(looker.device, looker.stream, looker.mark));
  atomic_store(&looker.done, 1);
  return user;
}
static void look_meanwhile(void) {
  pthread_t thread;
  fake_cuda.on_event = NULL;
  CHECK_EQ(pthread_create(&thread, NULL, looker_main, NULL), 0);
  for (int i = 0; i < 5000 && !atomic_load(&looker.done); i++) sleep_ns(MS);
  looked = atomic_load(&looker.done);
  CHECK_EQ(pthread_detach(thread), 0);
}
static void test_cuda_marks_can_be_looked_at_while_an_event_is_created(void) {
  start();
  void *device = device_open(0);
  uint32_t stream = stream_new(device);
  _Atomic uint64_t flag = 0;
  CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, 1), GEMINI_OK);
  looker = (waiter_t){ device, stream, mark_new(device, stream), 0 };
  fake_cuda.on_event = look_meanwhile;
  uint64_t last = mark_new(device, stream);
  CHECK(!fake_cuda.on_event); /* it was called */
  while (!atomic_load(&looker.done)) sleep_ns(MS);
  CHECK(looked);
  atomic_store_explicit(&flag, 1, memory_order_release);
  ops->stream.flag_wake(device);
  CHECK_EQ(ops->stream.sync(device, stream, last), GEMINI_OK);
  device_close(device);
}

/* The GPU's clock is not the host's: times stay right though it runs fast or slow. The marks are looked at late, so
 * that nothing but the clock tells when they were reached; a second stream's, that waited for them, tell the host. */
static void test_cuda_mark_times_follow_the_hosts_clock(void) {
  for (int fast = 0; fast < 2; fast++) {
    start();
    fake_cuda.clock_rate = fast ? 1.1 : 0.9;
    void *device = device_open(0);
    uint32_t stream = stream_new(device), other = stream_new(device);
    uint64_t ns = 0, previous = 0;
    stream_drain(device, stream);
    for (int i = 0; i < 3; i++) {
      uint64_t before = ops->now(device), mark = mark_new(device, stream);
      CHECK_EQ(ops->stream.wait(device, other, stream, mark), GEMINI_OK);
      stream_drain(device, other);
      uint64_t after = ops->now(device);
      sleep_ns(60 * MS);
      CHECK_EQ(ops->stream.mark_time(device, stream, mark, &ns), GEMINI_OK);
      CHECK(ns >= before && ns < after + 25 * MS);
      CHECK(ns >= previous);
      previous = ns;
      sleep_ns(400 * MS);
    }
    device_close(device);
  }
}

/* Where the clock is wrong, what the host has seen counts. */
static void test_cuda_mark_times_are_not_after_they_were_seen(void) {
  start();
  fake_cuda.clock_rate = 1.5;
  void *device = device_open(0);
  uint32_t stream = stream_new(device);
  uint64_t ns = 0;
  for (int i = 0; i < 5; i++) { /* within one base's life */
    sleep_ns(20 * MS);
    uint64_t before = ops->now(device), mark = mark_new(device, stream);
    CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
    uint64_t after = ops->now(device);
    sleep_ns(20 * MS);
    CHECK_EQ(ops->stream.mark_time(device, stream, mark, &ns), GEMINI_OK);
    CHECK(ns >= before && ns <= after);
  }
  device_close(device);
}

/* --- flags --- */

/* A flag stored while its wait is being queued, by a thread whose wake-up found nobody waiting. */
static struct {
  void *device;
  _Atomic uint64_t flag;
} meanwhile;
static void store_meanwhile(void) {
  atomic_store_explicit(&meanwhile.flag, 1, memory_order_release);
  ops->stream.flag_wake(meanwhile.device);
}
static void test_cuda_flag_stored_while_its_wait_is_queued_is_seen(void) {
  start();
  fake_cuda.on_wait_value = store_meanwhile;
  void *device = device_open(0);
  uint32_t stream = stream_new(device);
  meanwhile.device = device;
  atomic_store(&meanwhile.flag, 0);
  CHECK_EQ(ops->stream.wait_flag(device, stream, &meanwhile.flag, 1), GEMINI_OK);
  uint64_t mark = mark_new(device, stream);
  for (int i = 0; i < 1000 && !ops->stream.reached(device, stream, mark); i++) sleep_ns(MS);
  CHECK(ops->stream.reached(device, stream, mark));
  device_close(device);
}

static void test_cuda_gates_run_out_and_come_back(void) {
  enum { GATES = 16384 };
  start();
  fake_cuda.queue_limit = 1u << 20;
  void *device = device_open(0);
  uint32_t stream = stream_new(device);
  _Atomic uint64_t flag = 0;
  fake_cuda_fail_function("cuStreamWaitValue64", CU_UNKNOWN);
  for (int i = 0; i < 10; i++) CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, 1), GEMINI_ERR_DEVICE);
  fake_cuda_fail_function(NULL, 0);
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < GATES; i++)
      CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, (uint64_t)(round + 1)), GEMINI_OK);
    CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, (uint64_t)(round + 1)), GEMINI_ERR_OOM_SYSTEM);
    CHECK(error_says("waits for flags", 0));
    CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, (uint64_t)round), GEMINI_OK); /* has its value */
    uint64_t mark = mark_new(device, stream);
    CHECK(!ops->stream.reached(device, stream, mark));
    atomic_store_explicit(&flag, (uint64_t)(round + 1), memory_order_release);
    ops->stream.flag_wake(device);
    CHECK_EQ(ops->stream.sync(device, stream, mark), GEMINI_OK);
  }
  device_close(device);
}

/* Flags that live only until a later mark is reached, stored by one thread while others wait for theirs. */
static void *flagger_main(void *user) {
  loser_t *who = user;
  for (int i = 0; i < 400; i++) {
    _Atomic uint64_t *flag = malloc(sizeof *flag);
    CHECK(flag);
    atomic_init(flag, 0);
    CHECK_EQ(ops->stream.wait_flag(who->device, who->stream, flag, 3), GEMINI_OK);
    uint64_t mark = mark_new(who->device, who->stream);
    for (uint64_t v = 1; v <= 3; v++) {
      CHECK(!ops->stream.reached(who->device, who->stream, mark));
      atomic_store_explicit(flag, v, memory_order_release);
      ops->stream.flag_wake(who->device);
    }
    CHECK_EQ(ops->stream.sync(who->device, who->stream, mark), GEMINI_OK);
    free((void *)flag);
  }
  return NULL;
}
static void test_cuda_flags_of_several_threads_do_not_mix(void) {
  enum { THREADS = 3 };
  start();
  void *device = device_open(0);
  pthread_t threads[THREADS];
  loser_t who[THREADS];
  for (int i = 0; i < THREADS; i++) {
    who[i] = (loser_t){ device, stream_new(device), 0, 0 };
    CHECK_EQ(pthread_create(&threads[i], NULL, flagger_main, &who[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
  device_close(device);
}

/* All streams on one hardware queue, as a busy GPU may have them: gradients go out, a worker updates them when they
 * have come and raises the chunk's flag, and the chunk comes back behind its flag. It must not lock up. */
typedef struct chunk {
  uint64_t mark; /* of its copy out; 0 = not queued yet */
  _Atomic uint64_t ready, updates;
} chunk_t;
enum { CHUNKS = 60 };
typedef struct lane {
  void *device;
  uint32_t out;
  chunk_t chunks[CHUNKS];
} lane_t;
static void *lane_main(void *user) {
  lane_t *lane = user;
  for (int i = 0; i < CHUNKS; i++) {
    chunk_t *chunk = &lane->chunks[i];
    while (!atomic_load_explicit(&chunk->ready, memory_order_acquire)) sleep_ns(10000);
    CHECK_EQ(ops->stream.sync(lane->device, lane->out, chunk->mark), GEMINI_OK);
    atomic_store_explicit(&chunk->updates, 1, memory_order_release);
    ops->stream.flag_wake(lane->device);
  }
  return NULL;
}
static void run_one_queue(uint32_t queue_limit) {
  start();
  fake_cuda.channels = 1;
  fake_cuda.queue_limit = queue_limit; /* who queues is held up, too, wherever that is */
  static lane_t lane;
  memset(&lane, 0, sizeof lane);
  void *device = device_open(16 * MIB);
  uint32_t out = stream_new(device), in = stream_new(device), compute = stream_new(device);
  unsigned char *va = range_new(device, GRANULE), *host = host_new(device, CHUNKS * 64);
  CHECK_EQ(ops->memory.map(device, va, frame_new(device, GRANULE), GRANULE), GEMINI_OK);
  lane.device = device;
  lane.out = out;
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, lane_main, &lane), 0);
  uint64_t mark = 0;
  for (int i = 0; i < CHUNKS; i++) {
    chunk_t *chunk = &lane.chunks[i];
    if (mark) CHECK_EQ(ops->stream.wait(device, out, compute, mark), GEMINI_OK);
    CHECK_EQ(ops->queue.copy(device, out, host + 64 * i, va + 64 * i, 64, GMI_COPY_D2H), GEMINI_OK);
    chunk->mark = mark_new(device, out);
    atomic_store_explicit(&chunk->ready, 1, memory_order_release);
    CHECK_EQ(ops->stream.wait_flag(device, in, &chunk->updates, 1), GEMINI_OK);
    CHECK_EQ(ops->queue.copy(device, in, va + 64 * i, host + 64 * i, 64, GMI_COPY_H2D), GEMINI_OK);
    CHECK_EQ(ops->stream.wait(device, compute, in, mark_new(device, in)), GEMINI_OK);
    CHECK_EQ(ops->queue.zero(device, compute, va + 64 * i, 64), GEMINI_OK);
    mark = mark_new(device, compute);
  }
  CHECK_EQ(ops->stream.sync(device, compute, mark), GEMINI_OK);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  host_delete(device, host, CHUNKS * 64);
  device_close(device);
}

static void test_cuda_flags_on_one_hardware_queue_come_through(void) {
  for (uint32_t limit = 3; limit < 20; limit++) run_one_queue(limit);
}

/* --- streams of others --- */

static void test_cuda_adopted_stream_is_ordered_and_left_alone(void) {
  start();
  void *device = device_open(16 * MIB), *native = NULL;
  cu_context_t context = NULL, foreign = NULL;
  cu_stream_t theirs = NULL, far = NULL;
  CHECK_EQ(driver->primary_retain(&context, 0), CU_SUCCESS);
  CHECK_EQ(driver->primary_retain(&foreign, 1), CU_SUCCESS);
  CHECK_EQ(driver->current_set(foreign), CU_SUCCESS);
  CHECK_EQ(driver->stream_create(&far, 0), CU_SUCCESS);
  CHECK_EQ(driver->current_set(context), CU_SUCCESS);
  CHECK_EQ(driver->stream_create(&theirs, 0), CU_SUCCESS);
  CHECK_EQ(driver->current_set(NULL), CU_SUCCESS);
  unsigned char *va = range_new(device, GRANULE), *host = host_new(device, 8192);
  CHECK_EQ(ops->memory.map(device, va, frame_new(device, GRANULE), GRANULE), GEMINI_OK);
  uint32_t index = 77, ours = stream_new(device), again;
  CHECK_EQ(ops->stream.adopt(device, far, &index), GEMINI_ERR_INVALID);
  CHECK(error_says("another GPU", 0));
  CHECK_EQ(ops->stream.adopt(device, &index, &index), GEMINI_ERR_INVALID); /* no stream at all */
  CHECK_EQ(ops->stream.adopt(device, (void *)CU_STREAM_PER_THREAD_HANDLE, &index), GEMINI_ERR_INVALID);
  CHECK_EQ(index, 77);
  void *natives[] = { theirs, NULL }; /* NULL: the default stream */
  for (int i = 0; i < 2; i++) {
    _Atomic uint64_t gate = 0;
    CHECK_EQ(ops->stream.adopt(device, natives[i], &index), GEMINI_OK);
    CHECK_EQ(ops->stream.native(device, index, &native), GEMINI_OK);
    CHECK(native == natives[i]);
    CHECK_EQ(ops->stream.wait_flag(device, ours, &gate, 1), GEMINI_OK);
    memset(host, 30 + i, 4096);
    CHECK_EQ(ops->queue.copy(device, ours, va, host, 4096, GMI_COPY_H2D), GEMINI_OK);
    CHECK_EQ(ops->stream.wait(device, index, ours, mark_new(device, ours)), GEMINI_OK);
    uint64_t mark = mark_new(device, index);
    CHECK(!ops->stream.reached(device, index, mark));
    atomic_store(&gate, 1);
    ops->stream.flag_wake(device);
    CHECK_EQ(byte_at(device, index, va + 4095, host + 4096), 30 + i);
    CHECK(ops->stream.reached(device, index, mark));
    CHECK_EQ(ops->stream.destroy(device, index), GEMINI_OK);
    CHECK_EQ(ops->stream.native(device, index, &native), GEMINI_ERR_INVALID);
    CHECK_EQ(ops->stream.adopt(device, natives[i], &again), GEMINI_OK);
    CHECK_EQ(again, index);
    stream_drain(device, again);
    CHECK_EQ(ops->stream.destroy(device, again), GEMINI_OK);
  }
  CHECK_EQ(ops->stream.adopt(device, theirs, &index), GEMINI_OK);
  mark_new(device, index);
  host_delete(device, host, 8192);
  ops->close(device); /* with it adopted */
  CHECK_EQ(driver->current_set(context), CU_SUCCESS);
  CHECK_EQ(driver->stream_destroy(theirs), CU_SUCCESS);
  CHECK_EQ(driver->current_set(foreign), CU_SUCCESS);
  CHECK_EQ(driver->stream_destroy(far), CU_SUCCESS);
  CHECK_EQ(driver->current_set(NULL), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(0), CU_SUCCESS);
  CHECK_EQ(driver->primary_release(1), CU_SUCCESS);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);

  gmi_device_config_t config = { .memory_bytes = 4096 };
  CHECK_EQ(gmi_device_sim.open(&config, &device), GEMINI_OK);
  CHECK_EQ(gmi_device_sim.stream.adopt(device, NULL, &index), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(gmi_device_sim.stream.native(device, 0, &native), GEMINI_ERR_UNSUPPORTED);
  char pci[GMI_DEVICE_PCI_BYTES];
  CHECK_EQ(gmi_device_sim.pci(device, pci), GEMINI_ERR_UNSUPPORTED);
  gmi_device_sim.close(device);
}

/* Nothing of ours gets into a graph that somebody captures of a stream. */
static void test_cuda_captured_stream_takes_nothing(void) {
  start();
  void *device = device_open(16 * MIB), *native = NULL;
  unsigned char *va = range_new(device, GRANULE), *host = host_new(device, 4096);
  CHECK_EQ(ops->memory.map(device, va, frame_new(device, GRANULE), GRANULE), GEMINI_OK);
  uint32_t stream = stream_new(device), other = stream_new(device);
  uint64_t before = mark_new(device, other), mark = 7;
  double sum = 0;
  _Atomic uint64_t flag = 0;
  CHECK_EQ(ops->stream.native(device, stream, &native), GEMINI_OK);
  mark_new(device, stream);
  fake_cuda_capture(native, true);
#define REFUSED(call)                      \
  do {                                     \
    CHECK_EQ(call, GEMINI_ERR_STATE);      \
    CHECK(error_says("captured", 0));      \
    CHECK_EQ(fake_cuda_capture_mode(), 0); \
  } while (0)
  REFUSED(ops->stream.mark(device, stream, &mark));
  REFUSED(ops->stream.mark_untimed(device, stream, &mark));
  REFUSED(ops->stream.wait(device, stream, other, before));
  REFUSED(ops->stream.wait_flag(device, stream, &flag, 1));
  REFUSED(ops->queue.copy(device, stream, va, host, 4096, GMI_COPY_H2D));
  REFUSED(ops->queue.zero(device, stream, va, 4096));
  REFUSED(ops->queue.call(device, stream, store_sum, &sum));
  REFUSED(ops->queue.sum_squares(device, stream, va, GEMINI_DTYPE_F32, 8, &sum));
  REFUSED(ops->stream.destroy(device, stream));
#undef REFUSED
  CHECK_EQ(mark, 7);
  mark_new(device, other); /* the others go on */
  fake_cuda_capture(native, false);
  stream_drain(device, stream);
  CHECK_EQ(ops->stream.destroy(device, stream), GEMINI_OK);
  host_delete(device, host, 4096);
  ops->close(device);
  CHECK_EQ(fake_cuda_live(true), 0);
  CHECK_EQ(fake_cuda_violations(), 0);
}

/* Sums that nothing was queued behind are run before their stream is handed out or goes. */
static void test_cuda_sums_are_not_forgotten(void) {
  start();
  void *device = device_open(16 * MIB), *native;
  unsigned char *va = range_new(device, GRANULE), *host = host_new(device, 4096);
  uint32_t stream = stream_new(device);
  CHECK_EQ(ops->memory.map(device, va, frame_new(device, GRANULE), GRANULE), GEMINI_OK);
  float value = 3.0f;
  memcpy(host, &value, sizeof value);
  CHECK_EQ(ops->queue.copy(device, stream, va, host, 4, GMI_COPY_H2D), GEMINI_OK);
  for (int i = 0; i < 3; i++) {
    double sum = 0;
    CHECK_EQ(ops->queue.sum_squares(device, stream, va, GEMINI_DTYPE_F32, 1, &sum), GEMINI_OK);
    uint64_t calls = fake_cuda_calls();
    if (i == 0) CHECK_EQ(ops->stream.native(device, stream, &native), GEMINI_OK);
    if (i == 1) CHECK_EQ(ops->stream.destroy(device, stream), GEMINI_OK);
    if (i == 2) ops->close(device);
    CHECK(fake_cuda_calls() > calls);
    if (i == 0) stream_drain(device, stream);
    CHECK(sum == 9.0);
    if (i == 1) stream = stream_new(device);
  }
  CHECK_EQ(fake_cuda_live(true), 0);
  free(host);
}

/* --- distrust --- */

/* A kernel that runs until it is ended, as one that waits for another process. */
static bool until_true(void *user) {
  if (atomic_load((atomic_bool *)user)) return true;
  sleep_ns(MS);
  return false;
}

static void test_cuda_distrusted_work_is_never_done(void) {
  start();
  void *device = device_open(16 * MIB), *native;
  uint32_t stream = stream_new(device), other = stream_new(device), third = stream_new(device);
  atomic_bool ended = false;
  uint64_t before = mark_new(device, stream), ignored;
  CHECK_EQ(ops->stream.sync(device, stream, before), GEMINI_OK);
  CHECK_EQ(ops->stream.native(device, stream, &native), GEMINI_OK);
  cu_context_t context;
  CHECK_EQ(driver->primary_retain(&context, 0), 0);
  CHECK_EQ(driver->current_set(context), 0);
  CHECK_EQ(fake_cuda_kernel(native, until_true, &ended), 0);
  CHECK_EQ(driver->current_set(NULL), 0);
  CHECK_EQ(driver->primary_release(0), 0);
  uint64_t behind = mark_new(device, stream);
  CHECK_EQ(ops->stream.wait(device, other, stream, behind), GEMINI_OK);
  uint64_t dependent = mark_new(device, other), alone = mark_new(device, third);
  CHECK_EQ(ops->stream.sync(device, third, alone), GEMINI_OK);
  ops->stream.distrust(device);
  uint64_t later = mark_new(device, third);
  atomic_store(&ended, true);
  /* The waits end with the work. */
  CHECK_EQ(ops->stream.sync(device, other, dependent), GEMINI_ERR_PEER);
  CHECK_EQ(ops->stream.sync(device, stream, behind), GEMINI_ERR_PEER);
  CHECK_EQ(ops->stream.sync(device, third, later), GEMINI_ERR_PEER); /* it might depend on anything */
  CHECK(!ops->stream.reached(device, stream, behind) && !ops->stream.reached(device, other, dependent));
  CHECK(!ops->stream.reached(device, third, later));
  CHECK_EQ(ops->stream.mark_time(device, other, dependent, &ignored), GEMINI_ERR_INVALID);
  /* What was known to be done stays done. */
  CHECK(ops->stream.reached(device, stream, before) && ops->stream.reached(device, third, alone));
  CHECK_EQ(ops->stream.sync(device, stream, before), GEMINI_OK);
  CHECK_EQ(ops->stream.sync(device, third, alone), GEMINI_OK);
  /* Events are used again all the same. */
  for (int i = 0; i < 20000; i++) ignored = mark_new(device, third);
  CHECK_EQ(ops->stream.sync(device, third, ignored), GEMINI_ERR_PEER);
  CHECK(fake_cuda_live(false) < 20000);
  CHECK_EQ(ops->stream.destroy(device, stream), GEMINI_OK);
  device_close(device);
}

int main(void) {
  RUN(test_cuda_open_says_what_is_missing);
  RUN(test_cuda_operations_leave_the_threads_context_alone);
  RUN(test_cuda_every_driver_call_may_fail_once);
  RUN(test_cuda_failures_say_the_drivers_words);
  RUN(test_cuda_lost_context_ends_every_wait);
  RUN(test_cuda_passing_error_of_a_mark_is_not_stored);
  RUN(test_cuda_mappings_are_replaced_and_removed_whole);
  RUN(test_cuda_failed_map_leaves_the_old_mapping);
  RUN(test_cuda_events_are_used_again);
  RUN(test_cuda_held_stream_keeps_all_its_marks);
  RUN(test_cuda_driver_is_not_asked_again_at_once);
  RUN(test_cuda_marks_can_be_looked_at_while_an_event_is_created);
  RUN(test_cuda_mark_times_follow_the_hosts_clock);
  RUN(test_cuda_mark_times_are_not_after_they_were_seen);
  RUN(test_cuda_flag_stored_while_its_wait_is_queued_is_seen);
  RUN(test_cuda_gates_run_out_and_come_back);
  RUN(test_cuda_flags_of_several_threads_do_not_mix);
  RUN(test_cuda_flags_on_one_hardware_queue_come_through);
  RUN(test_cuda_adopted_stream_is_ordered_and_left_alone);
  RUN(test_cuda_captured_stream_takes_nothing);
  RUN(test_cuda_sums_are_not_forgotten);
  RUN(test_cuda_distrusted_work_is_never_done);
  fake_cuda_reset();
  return check_done();
}
