/* What a GPU and its driver do where the documentation is silent and src/device/cuda.c depends on it. Prints; judges
 * nothing. Built and run by cuda_check.sh. SPDX-License-Identifier: Apache-2.0 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "check.h"
#include "device/cuda_driver.h"
#include "device/device.h"

#define MIB (UINT64_C(1) << 20)
#define MS UINT64_C(1000000)

static const gmi_device_ops_t *const ops = &gmi_device_cuda;
static const gmi_cuda_driver_t *driver;
static void *device;
static cu_context_t context;

static uint64_t now(void) { return ops->now(NULL); }
static void sleep_ns(uint64_t ns) {
  nanosleep(&(struct timespec){ (time_t)(ns / 1000000000u), (long)(ns % 1000000000u) }, NULL);
}
static uint32_t stream_new(void) {
  uint32_t stream;
  CHECK_EQ(ops->stream.create(device, false, &stream), GEMINI_OK);
  return stream;
}
static uint64_t mark_new(uint32_t stream) {
  uint64_t mark = 0;
  CHECK_EQ(ops->stream.mark(device, stream, &mark), GEMINI_OK);
  return mark;
}
static void nothing(void *user) { (void)user; }
static cu_result_t (*event_sync)(cu_event_t event); /* what the library does not use */

/* --- how much a held stream takes, and whom a full one holds up --- */

enum {
  FILL_EVENTS = 0,
  FILL_CALLS = 4,
  FILL_COPIES,
  FILL_ZEROS,
  FILL_WAITS,
  FILL_MARKED_COPIES,
  FILLS
}; /* 0..3: event flags */
static const char *const fill_names[] = {
  "timed events",
  "timed blocking events",
  "untimed events",
  "untimed blocking events",
  "calls",
  "copies",
  "zeros",
  "waits for events",
  "copies between two untimed blocking events",
};
enum { FILL_MAX = 20000 };
typedef struct filler {
  cu_stream_t stream;
  int kind;
  unsigned char *memory, *host;
  cu_event_t *events;
  _Atomic uint64_t queued, last_ns;
  _Atomic int stop, ended;
} filler_t;
static void *filler_main(void *user) {
  filler_t *f = user;
  driver->current_set(context);
  for (uint64_t i = 0; i < FILL_MAX && !atomic_load(&f->stop); i++) {
    int result = 0;
    if (f->kind < FILL_CALLS) result = driver->event_record(f->events[i], f->stream);
    if (f->kind == FILL_CALLS) result = driver->host_call(f->stream, nothing, NULL);
    if (f->kind == FILL_MARKED_COPIES) result = driver->event_record(f->events[i], f->stream);
    if (f->kind == FILL_COPIES || f->kind == FILL_MARKED_COPIES)
      result |= driver->copy_h2d((uintptr_t)f->memory, f->host, 4096, f->stream);
    if (f->kind == FILL_ZEROS) result = driver->set_bytes((uintptr_t)f->memory, 0, 4096, f->stream);
    if (f->kind == FILL_WAITS) result = driver->stream_wait(f->stream, f->events[0], 0);
    CHECK_EQ(result, 0);
    atomic_fetch_add(&f->queued, 1);
    atomic_store(&f->last_ns, now());
  }
  atomic_store(&f->ended, 1);
  return NULL;
}

/* Something that another thread does meanwhile. */
typedef struct other {
  const char *name;
  int what;
  cu_event_t event; /* of it, where it is about one */
  cu_stream_t stream;
  cu_address_t address;
  void *host;
  pthread_t thread;
  _Atomic uint64_t ended_ns;
} other_t;
enum { DO_QUERY, DO_SYNC, DO_RECORD, DO_WAIT, DO_MAP, DO_REGISTER, DO_CREATE };
static void *other_main(void *user) {
  other_t *o = user;
  int result = driver->current_set(context);
  if (o->what == DO_QUERY) result = driver->event_query(o->event) & ~600;
  if (o->what == DO_SYNC) result = event_sync(o->event);
  if (o->what == DO_RECORD) result = driver->event_record(o->event, o->stream);
  if (o->what == DO_WAIT) result = driver->stream_wait(o->stream, o->event, 0);
  if (o->what == DO_REGISTER) result = driver->host_register(o->host, 4096, 3) | driver->host_unregister(o->host);
  if (o->what == DO_CREATE) result = driver->event_create(&o->event, 2) | driver->event_destroy(o->event);
  if (o->what == DO_MAP) {
    void *base = NULL;
    uint64_t frame = 0;
    result = ops->memory.reserve(device, 2 * MIB, &base) | ops->memory.frame_create(device, 2 * MIB, &frame) |
             ops->memory.map(device, base, frame, 2 * MIB) | ops->memory.unmap(device, base, 2 * MIB) |
             ops->memory.frame_destroy(device, frame, 2 * MIB) | ops->memory.unreserve(device, base, 2 * MIB);
  }
  CHECK_EQ(result, 0);
  atomic_store(&o->ended_ns, now());
  return NULL;
}

static void probe_full_queue(unsigned char *memory, unsigned char *host) {
  static cu_event_t events[FILL_MAX];
  cu_stream_t held, side;
  cu_address_t gate_address;
  void *gates = NULL;
  CHECK_EQ(driver->host_alloc(&gates, 4096, 3), 0);
  CHECK_EQ(driver->host_address(&gate_address, gates, 0), 0);
  _Atomic uint64_t *gate = gates; /* two of them */
  uint64_t round = 0;
  for (int kind = 0; kind < FILLS; kind++) {
    CHECK_EQ(driver->stream_create(&held, 1), 0);
    CHECK_EQ(driver->stream_create(&side, 1), 0);
    unsigned flags = kind < FILL_CALLS ? (unsigned)kind : 3u;
    bool many = kind < FILL_CALLS || kind == FILL_MARKED_COPIES;
    for (int i = 0; i < (many ? FILL_MAX : 1); i++) CHECK_EQ(driver->event_create(&events[i], flags), 0);
    cu_event_t marks[6];
    for (int i = 0; i < 6; i++) CHECK_EQ(driver->event_create(&marks[i], i == 3 ? 2 : 3), 0);
    round++;
    CHECK_EQ(driver->event_record(marks[0], side), 0); /* reached */
    CHECK_EQ(event_sync(marks[0]), 0);
    CHECK_EQ(driver->stream_wait_value(side, gate_address + 8, round, 0), 0);
    for (int i = 2; i < 4; i++) CHECK_EQ(driver->event_record(marks[i], side), 0); /* reached when gate[1] opens */
    CHECK_EQ(driver->stream_wait_value(held, gate_address, round, 0), 0);
    CHECK_EQ(driver->event_record(marks[1], held), 0); /* reached when gate[0] opens */
    if (kind == FILL_WAITS) CHECK_EQ(driver->event_record(events[0], side), 0);
    filler_t f = { .stream = held, .kind = kind, .memory = memory, .host = host, .events = events };
    pthread_t thread;
    uint64_t begin = now(), queued;
    CHECK_EQ(pthread_create(&thread, NULL, filler_main, &f), 0);
    do {
      sleep_ns(50 * MS);
      queued = atomic_load(&f.queued);
      sleep_ns(100 * MS);
    } while (queued != atomic_load(&f.queued) && !atomic_load(&f.ended));
    queued = atomic_load(&f.queued);
    bool full = !atomic_load(&f.ended);
    printf("held stream takes %s%llu %s, each in %.0f ns\n", full ? "" : "more than ", (unsigned long long)queued,
           fill_names[kind], (double)(atomic_load(&f.last_ns) - begin) / (double)queued);
    fflush(stdout);
    other_t others[] = {
      { .name = "query of a reached event", .what = DO_QUERY, .event = marks[0] },
      { .name = "query of an unreached event", .what = DO_QUERY, .event = marks[2] },
      { .name = "query of the full stream's event", .what = DO_QUERY, .event = marks[1] },
      { .name = "sync of a reached event", .what = DO_SYNC, .event = marks[0] },
      { .name = "blocking sync of an event reached meanwhile", .what = DO_SYNC, .event = marks[2] },
      { .name = "spinning sync of an event reached meanwhile", .what = DO_SYNC, .event = marks[3] },
      { .name = "event_create", .what = DO_CREATE },
      { .name = "map and unmap", .what = DO_MAP },
      { .name = "host_register", .what = DO_REGISTER, .host = (char *)host + 4096 },
      { .name = "record on another stream", .what = DO_RECORD, .event = marks[4], .stream = side },
      { .name = "wait on another stream", .what = DO_WAIT, .event = marks[0], .stream = side },
    };
    enum { OTHERS = sizeof others / sizeof *others };
    if (full && kind != FILL_CALLS) {
      begin = now();
      for (int i = 0; i < OTHERS; i++) CHECK_EQ(pthread_create(&others[i].thread, NULL, other_main, &others[i]), 0);
      sleep_ns(100 * MS);
      uint64_t opened = now();
      atomic_store_explicit(&gate[1], round, memory_order_release);
      sleep_ns(100 * MS);
      uint64_t end = now();
      for (int i = 0; i < OTHERS; i++) {
        uint64_t ended = atomic_load(&others[i].ended_ns), from = i == 4 || i == 5 ? opened : begin;
        if (ended && ended < end) {
          printf("  meanwhile, %s: %.1f us\n", others[i].name, (double)(ended - from) / 1e3);
        } else {
          printf("  meanwhile, %s: stuck\n", others[i].name);
        }
      }
    }
    fflush(stdout);
    atomic_store(&f.stop, 1);
    atomic_store_explicit(&gate[1], round, memory_order_release);
    atomic_store_explicit(&gate[0], round, memory_order_release);
    pthread_join(thread, NULL);
    if (full && kind != FILL_CALLS)
      for (int i = 0; i < OTHERS; i++) pthread_join(others[i].thread, NULL);
    CHECK_EQ(driver->event_record(marks[5], held), 0);
    CHECK_EQ(event_sync(marks[5]), 0);
    CHECK_EQ(driver->event_record(marks[5], side), 0);
    CHECK_EQ(event_sync(marks[5]), 0);
    for (int i = 0; i < (many ? FILL_MAX : 1); i++) CHECK_EQ(driver->event_destroy(events[i]), 0);
    for (int i = 0; i < 6; i++) CHECK_EQ(driver->event_destroy(marks[i]), 0);
    CHECK_EQ(driver->stream_destroy(held), 0);
    CHECK_EQ(driver->stream_destroy(side), 0);
  }
  CHECK_EQ(driver->host_free(gates), 0);
}

/* What events cost copies: 1 MiB each, both ways at once, with none, one or two of each kind of event a copy. */
static void probe_events_beside_copies(void) {
  enum { COPIES = 400, BYTES = 1 << 20 };
  static cu_event_t events[2 * 2 * COPIES];
  uint64_t frames[2];
  void *base = NULL, *host[2];
  cu_stream_t streams[2];
  CHECK_EQ(ops->memory.reserve(device, 128 * MIB, &base), GEMINI_OK);
  for (int d = 0; d < 2; d++) {
    CHECK_EQ(ops->memory.frame_create(device, 64 * MIB, &frames[d]), GEMINI_OK);
    CHECK_EQ(ops->memory.map(device, (char *)base + (uint64_t)d * 64 * MIB, frames[d], 64 * MIB), GEMINI_OK);
    CHECK_EQ(driver->host_alloc(&host[d], 64 * MIB, 3), 0);
    CHECK_EQ(driver->stream_create(&streams[d], 1), 0);
  }
  for (unsigned flags = 0; flags < 4; flags++) {
    for (int i = 0; i < 4 * COPIES; i++) CHECK_EQ(driver->event_create(&events[i], flags), 0);
    for (int per_copy = 0; per_copy < 3; per_copy++) {
      for (int ways = 1; ways < 3; ways++) {
        double best = 0, host_ns = 0;
        for (int pass = 0; pass < 4; pass++) {
          uint64_t begin = now(), n = 0;
          for (uint64_t i = 0; i < COPIES; i++) {
            for (int d = 0; d < ways; d++) {
              cu_address_t memory = (uintptr_t)base + (uint64_t)d * 64 * MIB + i % 64 * BYTES;
              void *at = (char *)host[d] + i % 64 * BYTES;
              if (per_copy > 1) CHECK_EQ(driver->event_record(events[n++], streams[d]), 0);
              CHECK_EQ(d ? driver->copy_d2h(at, memory, BYTES, streams[d])
                         : driver->copy_h2d(memory, at, BYTES, streams[d]),
                       0);
              if (per_copy > 0) CHECK_EQ(driver->event_record(events[n++], streams[d]), 0);
            }
          }
          uint64_t queued = now() - begin;
          for (int d = 0; d < ways; d++) {
            CHECK_EQ(driver->event_record(events[d], streams[d]), 0);
            CHECK_EQ(event_sync(events[d]), 0);
          }
          double rate = (double)COPIES * ways * BYTES / (double)(now() - begin);
          if (rate > best) {
            best = rate;
            host_ns = (double)queued / COPIES / ways;
          }
        }
        printf("1 MiB copies, %s, %d %s events each: %.2f GB/s, queued in %.0f ns\n", ways == 1 ? "in" : "both ways",
               per_copy, fill_names[flags], best, host_ns);
      }
    }
    for (int i = 0; i < 4 * COPIES; i++) CHECK_EQ(driver->event_destroy(events[i]), 0);
  }
  for (int d = 0; d < 2; d++) {
    CHECK_EQ(driver->host_free(host[d]), 0);
    CHECK_EQ(driver->stream_destroy(streams[d]), 0);
  }
  CHECK_EQ(ops->memory.unreserve(device, base, 128 * MIB), GEMINI_OK);
  for (int d = 0; d < 2; d++) CHECK_EQ(ops->memory.frame_destroy(device, frames[d], 64 * MIB), GEMINI_OK);
}

/* How many of many streams move while one is held. */
static void probe_shared_queues(unsigned char *memory, unsigned char *host) {
  enum { STREAMS = 48 };
  uint32_t streams[STREAMS];
  uint64_t marks[STREAMS];
  for (int kind = 0; kind < 3; kind++) {
    _Atomic uint64_t gate = 0;
    for (int i = 0; i < STREAMS; i++) streams[i] = stream_new();
    CHECK_EQ(ops->stream.wait_flag(device, streams[0], &gate, 1), GEMINI_OK);
    for (int i = 0; i < STREAMS; i++) {
      if (kind == 1) CHECK_EQ(ops->queue.copy(device, streams[i], memory, host, 4096, GMI_COPY_H2D), GEMINI_OK);
      if (kind == 2) CHECK_EQ(ops->queue.zero(device, streams[i], memory, 4096), GEMINI_OK);
      marks[i] = mark_new(streams[i]);
    }
    sleep_ns(200 * MS);
    int moved = 0;
    for (int i = 1; i < STREAMS; i++) moved += ops->stream.reached(device, streams[i], marks[i]);
    printf("one of %d streams held, queued %s: %d of the others moved\n", STREAMS,
           kind == 0   ? "marks"
           : kind == 1 ? "copies"
                       : "zeros",
           moved);
    atomic_store(&gate, 1);
    ops->stream.flag_wake(device);
    for (int i = 0; i < STREAMS; i++) CHECK_EQ(ops->stream.destroy(device, streams[i]), GEMINI_OK);
  }
}

static double each(uint64_t begin, uint64_t count) { return (double)(now() - begin) / (double)count; }

static void probe_costs(void) {
  enum { N = 4000 };
  static cu_event_t events[N];
  cu_stream_t stream;
  float ms = 0;
  CHECK_EQ(driver->stream_create(&stream, 1), 0);
  for (unsigned flags = 0; flags < 4; flags++) {
    uint64_t begin = now();
    for (int i = 0; i < N; i++) CHECK_EQ(driver->event_create(&events[i], flags), 0);
    double create = each(begin, N);
    begin = now();
    for (int i = 0; i < N; i++) CHECK_EQ(driver->event_record(events[i], stream), 0);
    double record = each(begin, N);
    CHECK_EQ(event_sync(events[N - 1]), 0);
    double drain = each(begin, N);
    begin = now();
    for (int i = 0; i < N; i++) CHECK_EQ(driver->event_query(events[i]), 0);
    double query = each(begin, N);
    begin = now();
    for (int i = 0; i < N; i++) CHECK_EQ(driver->event_record(events[0], stream) | event_sync(events[0]), 0);
    double turn = each(begin, N);
    if (!(flags & CU_EVENT_NO_TIME)) {
      begin = now();
      for (int i = 1; i < N; i++) CHECK_EQ(driver->event_elapsed(&ms, events[1], events[i]), 0);
      printf("elapsed: %.0f ns; backwards: %d, %f ms\n", each(begin, N),
             driver->event_elapsed(&ms, events[N - 1], events[1]), (double)ms);
      float least = 1;
      for (int i = 2; i < N; i++) {
        CHECK_EQ(driver->event_elapsed(&ms, events[i - 1], events[i]), 0);
        if (ms > 0 && ms < least) least = ms;
      }
      printf("smallest step of its clock: %.1f ns\n", (double)least * 1e6);
    }
    begin = now();
    for (int i = 0; i < N; i++) CHECK_EQ(driver->event_destroy(events[i]), 0);
    printf(
        "events, %s, %s: create %.0f ns, record %.0f, drained %.0f, query %.0f, record and sync %.0f, destroy %.0f\n",
        flags & 1 ? "blocking" : "spinning", flags & 2 ? "no time" : "timed", create, record, drain, query, turn,
        each(begin, N));
  }
  cu_context_t had;
  uint64_t begin = now();
  for (int i = 0; i < 100000; i++) driver->current_get(&had);
  printf("context: get %.1f ns", each(begin, 100000));
  begin = now();
  for (int i = 0; i < 100000; i++) driver->current_set(i & 1 ? context : NULL);
  printf(", set %.1f ns\n", each(begin, 100000));
  driver->current_set(context);
  CHECK_EQ(driver->stream_destroy(stream), 0);
}

static void probe_memory(void) {
  for (uint64_t size = 2 * MIB; size <= 64 * MIB; size *= 2) {
    enum { N = 16 };
    uint64_t frames[N], t[8];
    void *base = NULL;
    unsigned char *host = mmap(NULL, N * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(host != MAP_FAILED);
    madvise(host, N * size, MADV_HUGEPAGE);
    memset(host, 1, N * size);
    t[0] = now();
    CHECK_EQ(ops->memory.reserve(device, N * size, &base), GEMINI_OK);
    unsigned char *va = base;
    t[1] = now();
    for (int i = 0; i < N; i++) CHECK_EQ(ops->memory.frame_create(device, size, &frames[i]), GEMINI_OK);
    t[2] = now();
    for (int i = 0; i < N; i++) CHECK_EQ(ops->memory.map(device, va + (uint64_t)i * size, frames[i], size), GEMINI_OK);
    t[3] = now();
    for (int i = 0; i < N; i++) CHECK_EQ(ops->memory.unmap(device, va + (uint64_t)i * size, size), GEMINI_OK);
    t[4] = now();
    for (int i = 0; i < N; i++) CHECK_EQ(ops->memory.frame_destroy(device, frames[i], size), GEMINI_OK);
    t[5] = now();
    for (int i = 0; i < N; i++) CHECK_EQ(ops->memory.host_lock(device, host + (uint64_t)i * size, size), GEMINI_OK);
    t[6] = now();
    for (int i = 0; i < N; i++) CHECK_EQ(ops->memory.host_unlock(device, host + (uint64_t)i * size, size), GEMINI_OK);
    t[7] = now();
    printf("%3llu MiB: reserve %.0f us, frame_create %.0f, map %.0f, unmap %.0f, frame_destroy %.0f, host_lock %.0f, "
           "host_unlock %.0f\n",
           (unsigned long long)(size / MIB), (double)(t[1] - t[0]) / 1e3, (double)(t[2] - t[1]) / 1e3 / N,
           (double)(t[3] - t[2]) / 1e3 / N, (double)(t[4] - t[3]) / 1e3 / N, (double)(t[5] - t[4]) / 1e3 / N,
           (double)(t[6] - t[5]) / 1e3 / N, (double)(t[7] - t[6]) / 1e3 / N);
    CHECK_EQ(ops->memory.unreserve(device, base, N * size), GEMINI_OK);
    munmap(host, N * size);
  }
}

/* From the flag's store to the mark behind the wait. */
static void probe_flags(void) {
  enum { N = 2000 };
  uint32_t stream = stream_new();
  _Atomic uint64_t flag = 0;
  uint64_t sum = 0, worst = 0, queueing = 0;
  for (uint64_t i = 1; i <= N; i++) {
    uint64_t begin = now();
    CHECK_EQ(ops->stream.wait_flag(device, stream, &flag, i), GEMINI_OK);
    queueing += now() - begin;
    uint64_t mark = mark_new(stream), t;
    sleep_ns(20000);
    begin = now();
    atomic_store_explicit(&flag, i, memory_order_release);
    ops->stream.flag_wake(device);
    while (!ops->stream.reached(device, stream, mark)) continue;
    t = now() - begin;
    sum += t;
    if (t > worst) worst = t;
  }
  printf("wait_flag: queued in %.0f ns; from the store to a reached mark %.1f us, at most %.1f us\n",
         (double)queueing / N, (double)sum / N / 1e3, (double)worst / 1e3);
  CHECK_EQ(ops->stream.destroy(device, stream), GEMINI_OK);
}

int main(void) {
  gmi_device_config_t config = { .memory_bytes = UINT64_C(8) << 30 };
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  uint64_t begin = now(), frame;
  int version = 0;
  if (ops->open(&config, &device)) {
    (void)gemini_last_error(&info);
    fprintf(stderr, "no GPU: %s\n", info.message);
    return 77;
  }
  driver = gmi_cuda_driver();
  driver->version(&version);
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *address = library ? dlsym(library, "cuEventSynchronize") : NULL;
  CHECK(address);
  memcpy(&event_sync, &address, sizeof address);
  printf("driver %d; open: %.1f ms\n", version, (double)(now() - begin) / 1e6);
  CHECK_EQ(driver->primary_retain(&context, 0), 0);
  CHECK_EQ(driver->current_set(context), 0);
  void *base = NULL, *host = NULL;
  CHECK_EQ(posix_memalign(&host, 4096, 8192), 0);
  CHECK_EQ(ops->memory.host_lock(device, host, 4096), GEMINI_OK);
  CHECK_EQ(ops->memory.reserve(device, 2 * MIB, &base), GEMINI_OK);
  CHECK_EQ(ops->memory.frame_create(device, 2 * MIB, &frame), GEMINI_OK);
  CHECK_EQ(ops->memory.map(device, base, frame, 2 * MIB), GEMINI_OK);
  probe_full_queue(base, host);
  probe_events_beside_copies();
  probe_flags();
  probe_shared_queues(base, host);
  probe_costs();
  probe_memory();
  CHECK_EQ(ops->memory.host_unlock(device, host, 4096), GEMINI_OK);
  free(host);
  driver->current_set(NULL);
  ops->close(device);
  return 0;
}
