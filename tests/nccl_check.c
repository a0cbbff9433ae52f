/* Communicators over the machine's own NCCL, a process for each GPU, against gmi_reduce() on the host. Built and run by
 * nccl_check.sh. SPDX-License-Identifier: Apache-2.0
 *
 * nccl_check [--threads] [--shared-gpu] [RANKS...]: groups of these sizes; without any, 2 to the number of GPUs.
 * --threads runs the ranks as threads of one process that share the GPUs, which only the stand-ins of the unit tests
 * allow. --shared-gpu runs the processes, 2 to 4, without RANKS 2 and 3, all on GPU 0, with
 * NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment; they take turns there, so that all is small and may take long. Exits
 * 77 if there are fewer GPUs than that, or no NCCL, or for --shared-gpu none of version 2.30 or later. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/clock.h"
#include "base/status.h"
#include "comm/comm.h"
#include "comm/nccl_library.h"
#include "comm_values.h"
#include "fork.h"

#define MIB (UINT64_C(1) << 20)
#define NS_PER_S UINT64_C(1000000000)
enum { MOST_RANKS = 16, PERIOD = 65521 /* values after which the ranks' bytes repeat */, KILLED_AFTER = 20 };

/* ---- what all ranks see */
static struct {
  pthread_barrier_t barrier;
  gmi_comm_id_t id;
  _Atomic uint32_t calls; /* of the rank that is killed */
  _Atomic uint64_t killed_ns;
} *shared;
static bool threads, shared_gpu;
static uint64_t most_bytes = 64 * MIB;       /* of a chunk; less among threads and on a shared GPU */
static uint64_t deadline_ns = 30 * NS_PER_S; /* where nothing goes wrong */
static uint64_t fault_deadline_ns = 5 * NS_PER_S;
static uint32_t gpus;
enum { SHARED_RANKS = 4, NCCL_SHARES_GPUS = 23000 /* version */ };

/* ---- a rank */
typedef struct rank {
  void (*fn)(struct rank *r);
  gmi_comm_nccl_config_t config;
  const gmi_cuda_driver_t *driver;
  cu_context_t context; /* current */
  cu_stream_t stream;
  unsigned char *buffer, *host; /* buffer_bytes() each, on the device and page-locked */
  gmi_comm_t comm;
} rank_t;
#define CU(call) CHECK_EQ(call, CU_SUCCESS)
#define OK(call)                                                                                         \
  do {                                                                                                   \
    gemini_status_t ok_status = (call);                                                                  \
    if (ok_status) fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, gmi_fail_message()); \
    CHECK_EQ(ok_status, GEMINI_OK);                                                                      \
  } while (0)

static uint64_t buffer_bytes(void) { return most_bytes + 2 * MIB; }
static cu_address_t address_of(const void *buffer) { return (uintptr_t)buffer; }

/* Frames of the library are memory of this sort. */
static void *device_memory(rank_t *r, cu_memory_t *memory_out) {
  const cu_location_t here = { CU_LOCATION_DEVICE, r->config.device };
  const cu_allocation_t allocation = { .type = CU_ALLOCATION_PINNED, .location = here };
  const cu_access_t access = { here, CU_ACCESS_READ_WRITE };
  cu_address_t base;
  CU(r->driver->address_reserve(&base, buffer_bytes(), 2 * MIB, 0, 0));
  CU(r->driver->memory_create(memory_out, buffer_bytes(), &allocation, 0));
  CU(r->driver->memory_map(base, buffer_bytes(), 0, *memory_out, 0));
  CU(r->driver->memory_access(base, buffer_bytes(), &access, 1));
  return (void *)(uintptr_t)base;
}
static void join(rank_t *r, uint64_t within_ns, bool rank_order) {
  r->config.deadline_ns = within_ns;
  r->config.rank_order = rank_order;
  pthread_barrier_wait(&shared->barrier);
  if (!r->config.rank) OK(gmi_comm_nccl_id(&shared->id));
  pthread_barrier_wait(&shared->barrier);
  OK(gmi_comm_nccl_join(&shared->id, &r->config, &r->comm));
}
static void leave(rank_t *r) { r->comm.ops->close(r->comm.self); }

static void *rank_main(void *user) {
  rank_t *r = user;
  cu_device_t device;
  cu_memory_t memory;
  void *host;
  r->driver = gmi_cuda_driver();
  CHECK(r->driver);
  r->config.device = (int32_t)(r->config.rank % gpus);
  CU(r->driver->init(0));
  CU(r->driver->device_get(&device, r->config.device));
  CU(r->driver->primary_retain(&r->context, device));
  CU(r->driver->current_set(r->context));
  CU(r->driver->stream_create(&r->stream, CU_STREAM_NON_BLOCKING_FLAG));
  CU(r->driver->host_alloc(&host, buffer_bytes(), CU_HOST_PORTABLE));
  r->buffer = device_memory(r, &memory);
  r->host = host;
  r->fn(r);
  if (threads) pthread_barrier_wait(&shared->barrier); /* the stand-ins' ranks share their driver */
  CU(r->driver->memory_unmap(address_of(r->buffer), buffer_bytes()));
  CU(r->driver->memory_release(memory));
  CU(r->driver->address_free(address_of(r->buffer), buffer_bytes()));
  CU(r->driver->host_free(r->host));
  CU(r->driver->stream_destroy(r->stream));
  CU(r->driver->current_set(NULL));
  CU(r->driver->primary_release(device));
  return NULL;
}

/* Returns false if the stream has not done everything after the time. */
static bool settled(rank_t *r, uint64_t most_ns) {
  cu_event_t event;
  cu_result_t result;
  CU(r->driver->event_create(&event, CU_EVENT_NO_TIME));
  CU(r->driver->event_record(event, r->stream));
  for (uint64_t begin = gmi_now_ns(); (result = r->driver->event_query(event)) == CU_NOT_READY;) {
    if (gmi_now_ns() - begin > most_ns) return false;
    nanosleep(&(struct timespec){ 0, 20000 }, NULL);
  }
  CU(result);
  CU(r->driver->event_destroy(event));
  return true;
}
static void settle(rank_t *r) { CHECK(settled(r, deadline_ns)); }
static void to_device(rank_t *r, uint64_t bytes) {
  CU(r->driver->copy_h2d(address_of(r->buffer), r->host, bytes, r->stream));
}
static void from_device(rank_t *r, uint64_t at, uint64_t bytes) {
  CU(r->driver->copy_d2h(r->host, address_of(r->buffer + at), bytes, r->stream));
  settle(r);
}

/* ---- values */

/* count values that repeat after PERIOD, from a table. */
static void repeat(unsigned char *to, const unsigned char *table, uint64_t first, uint64_t count, uint64_t width) {
  for (uint64_t i = 0, now; i < count; i += now) {
    uint64_t at = (first + i) % PERIOD;
    now = count - i < PERIOD - at ? count - i : PERIOD - at;
    memcpy(to + i * width, table + at * width, now * width);
  }
}
static void check_repeated(const unsigned char *actual, const unsigned char *table, uint64_t first, uint64_t count,
                           uint32_t dtype) {
  const uint64_t width = gmi_dtype_bytes(dtype);
  for (uint64_t i = 0, now; i < count; i += now) {
    uint64_t at = (first + i) % PERIOD;
    now = count - i < PERIOD - at ? count - i : PERIOD - at;
    comm_values_check(actual + i * width, table + at * width, now, dtype);
  }
}
/* Small whole numbers, whose sums are exact in every order and type. */
static void fill_small(unsigned char *to, uint32_t rank, uint32_t dtype) {
  static const uint16_t halves[2][4] = { { 0x3F80, 0xC000, 0x4040, 0x0000 }, { 0x3C00, 0xC000, 0x4200, 0x0000 } };
  static const double values[4] = { 1, -2, 3, 0 };
  uint64_t state = rank + 1;
  for (uint64_t i = 0; i < PERIOD; i++) {
    uint64_t x = check_random(&state) >> 62;
    float value = (float)values[x];
    if (dtype == GEMINI_DTYPE_F64) memcpy(to + i * 8, &values[x], 8);
    else if (dtype == GEMINI_DTYPE_F32) memcpy(to + i * 4, &value, 4);
    else memcpy(to + i * 2, &halves[dtype == GEMINI_DTYPE_F16][x], 2);
  }
}

/* One reduction over `bytes` bytes of each rank. Sums of NCCL are compared where they have to be exact: of two ranks,
 * and of small numbers. */
static void reduce_once(rank_t *r, uint64_t bytes, uint32_t dtype, gmi_reduce_t how, bool scatter) {
  const gmi_comm_ops_t *ops = r->comm.ops;
  const uint32_t ranks = r->comm.ranks;
  const uint64_t width = gmi_dtype_bytes(dtype), count = bytes / width / (scatter ? ranks : 1);
  const uint64_t whole = scatter ? count * ranks : count, first = scatter ? r->comm.rank * count : 0;
  const bool ordered = r->config.rank_order || how == GMI_REDUCE_MAX, small = !ordered && ranks > 2;
  unsigned char *in[MOST_RANKS], *expected = malloc(PERIOD * width);
  const void *from[MOST_RANKS];
  for (uint32_t p = 0; p < ranks; p++) {
    from[p] = in[p] = malloc(PERIOD * width);
    if (small) fill_small(in[p], p, dtype);
    else comm_values_fill(in[p], p, PERIOD, dtype, (uint32_t)bytes);
  }
  gmi_reduce(dtype, how, ranks, from, expected, PERIOD);
  repeat(r->host, in[r->comm.rank], 0, whole, width);
  memset(r->host + whole * width, 0xA5, 64); /* stays */
  to_device(r, whole * width + 64);
  if (scatter) OK(ops->reduce_scatter(r->comm.self, r->buffer, count, dtype, how, r->stream, "check"));
  else OK(ops->all_reduce(r->comm.self, r->buffer, count, dtype, how, r->stream, "check"));
  from_device(r, first * width, (whole - first) * width + 64);
  check_repeated(r->host, expected, first, count, dtype);
  for (int i = 0; i < 64; i++) CHECK_EQ(r->host[(whole - first) * width + (uint64_t)i], 0xA5);
  for (uint32_t p = 0; p < ranks; p++) free(in[p]);
  free(expected);
}
static void reductions(rank_t *r) {
  const uint64_t sizes[] = { 8, most_bytes, 4104, MIB, most_bytes / 4 + 8 };
  for (int i = 0; i < (shared_gpu ? 2 : 5); i++)
    for (uint32_t dtype = 0; dtype < 4; dtype++)
      for (int how = 0; how < 3; how++)
        for (int scatter = 0; scatter < 2; scatter++) reduce_once(r, sizes[i], dtype, (gmi_reduce_t)how, scatter);
  OK(r->comm.ops->poll(r->comm.self));
}

static void gathers(rank_t *r) {
  const uint64_t sizes[] = { 1, 4099, MIB, most_bytes / 4, most_bytes };
  const uint32_t ranks = r->comm.ranks;
  unsigned char *tables[MOST_RANKS];
  for (uint32_t p = 0; p < ranks; p++)
    comm_values_fill(tables[p] = malloc(PERIOD), p, PERIOD / 2, GEMINI_DTYPE_BF16, 7);
  for (int i = 0; i < 5; i++) {
    uint64_t slice = sizes[i] / ranks + 1;
    for (uint64_t at = 0; at < slice; at++) r->host[at] = tables[r->comm.rank][at % (PERIOD - 1)];
    CU(r->driver->set_bytes(address_of(r->buffer), 0, ranks * slice, r->stream));
    CU(r->driver->copy_h2d(address_of(r->buffer + r->comm.rank * slice), r->host, slice, r->stream));
    OK(r->comm.ops->all_gather(r->comm.self, r->buffer, slice, r->stream, "check"));
    from_device(r, 0, ranks * slice);
    for (uint32_t p = 0; p < ranks; p++)
      for (uint64_t at = 0; at < slice; at++) CHECK_EQ(r->host[p * slice + at], tables[p][at % (PERIOD - 1)]);
  }
  for (uint32_t p = 0; p < ranks; p++) free(tables[p]);
}
static void broadcasts(rank_t *r) {
  unsigned char *values = malloc(PERIOD);
  for (uint32_t root = 0; root < r->comm.ranks; root++) {
    comm_values_fill(values, r->comm.rank, PERIOD / 2, GEMINI_DTYPE_BF16, 7);
    memcpy(r->host, values, PERIOD);
    CU(r->driver->copy_h2d(address_of(r->buffer), r->host, PERIOD, r->stream));
    OK(r->comm.ops->broadcast(r->comm.self, r->buffer, PERIOD, root, r->stream, "check"));
    from_device(r, 0, PERIOD);
    comm_values_fill(values, root, PERIOD / 2, GEMINI_DTYPE_BF16, 7);
    for (uint64_t at = 0; at < PERIOD / 2 * 2; at++) CHECK_EQ(r->host[at], values[at]);
  }
  free(values);
}
static void exchanges(rank_t *r) {
  const uint64_t sizes[] = { 0, 1, 8, 4096, 3000001 };
  const uint32_t ranks = r->comm.ranks;
  for (int i = 0; i < 5; i++) {
    unsigned char *all = calloc(ranks, sizes[i] + 1), *mine = malloc(sizes[i] + 1);
    for (uint64_t at = 0; at < sizes[i]; at++) mine[at] = (unsigned char)(at * 7 + r->comm.rank * 101 + at / 251);
    OK(r->comm.ops->exchange(r->comm.self, mine, sizes[i], all, "check"));
    for (uint32_t p = 0; p < ranks; p++)
      for (uint64_t at = 0; at < sizes[i]; at++)
        CHECK_EQ(all[p * sizes[i] + at], (unsigned char)(at * 7 + p * 101 + at / 251));
    free(all);
    free(mine);
  }
}
static void check_values(rank_t *r) {
  join(r, deadline_ns, true);
  gathers(r);
  broadcasts(r);
  reductions(r);
  exchanges(r);
  leave(r);
  join(r, deadline_ns, false);
  reductions(r);
  leave(r);
}

/* A communicator of the caller's, one that blocks. */
static void check_adopted(rank_t *r) {
  const gmi_nccl_library_t *library = gmi_nccl_library();
  nccl_config_t settings = NCCL_CONFIG_NON_BLOCKING;
  nccl_comm_t theirs;
  nccl_id_t id;
  settings.blocking = 1;
  if (!r->config.rank) OK(gmi_comm_nccl_id(&shared->id));
  pthread_barrier_wait(&shared->barrier);
  memcpy(&id, &shared->id, sizeof id);
  r->config.deadline_ns = deadline_ns;
  r->config.rank_order = true;
  CHECK_EQ(library->init_rank_config(&theirs, (int)r->config.ranks, id, (int)r->config.rank, &settings), 0);
  for (int i = 0; i < 2; i++) {
    OK(gmi_comm_nccl_adopt(theirs, &r->config, &r->comm));
    gathers(r);
    broadcasts(r);
    exchanges(r);
    reduce_once(r, MIB, GEMINI_DTYPE_BF16, GMI_REDUCE_SUM, i);
    leave(r);
  }
  gmi_comm_nccl_config_t wrong = r->config;
  wrong.ranks++;
  CHECK_EQ(gmi_comm_nccl_adopt(theirs, &wrong, &r->comm), GEMINI_ERR_INVALID);
  CHECK_EQ(library->finalize(theirs), 0);
  CHECK_EQ(library->destroy(theirs), 0);
}

/* ---- times */
typedef void (*timed_fn)(rank_t *r, uint64_t bytes);
static void time_gather(rank_t *r, uint64_t bytes) {
  OK(r->comm.ops->all_gather(r->comm.self, r->buffer, bytes / r->comm.ranks, r->stream, "time"));
}
static void time_scatter(rank_t *r, uint64_t bytes) {
  OK(r->comm.ops->reduce_scatter(r->comm.self, r->buffer, bytes / r->comm.ranks / 2, GEMINI_DTYPE_BF16, GMI_REDUCE_SUM,
                                 r->stream, "time"));
}
static void time_all(rank_t *r, uint64_t bytes) {
  OK(r->comm.ops->all_reduce(r->comm.self, r->buffer, bytes / 2, GEMINI_DTYPE_BF16, GMI_REDUCE_SUM, r->stream, "time"));
}
static void time_one(rank_t *r, const char *name, timed_fn fn, uint64_t bytes) {
  const int calls = threads || shared_gpu ? 3 : 100;
  cu_event_t begin, end;
  float ms = 0;
  CU(r->driver->event_create(&begin, 0));
  CU(r->driver->event_create(&end, 0));
  for (int i = 0; i < calls / 5 + 1; i++) fn(r, bytes);
  settle(r);
  pthread_barrier_wait(&shared->barrier);
  CU(r->driver->event_record(begin, r->stream));
  uint64_t from = gmi_now_ns();
  for (int i = 0; i < calls; i++) fn(r, bytes);
  uint64_t host_ns = gmi_now_ns() - from;
  CU(r->driver->event_record(end, r->stream));
  settle(r);
  CU(r->driver->event_elapsed(&ms, begin, end));
  CU(r->driver->event_destroy(begin));
  CU(r->driver->event_destroy(end));
  if (!r->comm.rank)
    printf("  %-30s %5.2f MiB: %8.1f us each, %6.1f us of the caller's\n", name, (double)bytes / (double)MIB,
           ms * 1e3f / (float)calls, (double)host_ns / 1e3 / calls);
}
static void check_times(rank_t *r) {
  const uint64_t sizes[] = { most_bytes / 32, most_bytes / 4, most_bytes };
  memset(r->host, 0, most_bytes);
  to_device(r, most_bytes);
  for (int ordered = 0; ordered < 2; ordered++) {
    uint64_t from = gmi_now_ns();
    join(r, deadline_ns, ordered);
    if (!r->comm.rank) printf("  joined in %.2f s\n", (double)(gmi_now_ns() - from) / 1e9);
    for (int i = 0; i < 3 && !ordered; i++) time_one(r, "all-gather", time_gather, sizes[i]);
    for (int i = 0; i < 3; i++)
      time_one(r, ordered ? "reduce-scatter, rank order" : "reduce-scatter", time_scatter, sizes[i]);
    for (int i = 0; i < 3; i++) time_one(r, ordered ? "all-reduce, rank order" : "all-reduce", time_all, sizes[i]);
    uint64_t all[MOST_RANKS], mine = 0;
    from = gmi_now_ns();
    const int calls = shared_gpu ? 10 : 100;
    for (int i = 0; i < calls; i++) OK(r->comm.ops->exchange(r->comm.self, &mine, 8, all, "time"));
    if (!r->comm.rank) printf("  exchange of 8 bytes: %.1f us\n", (double)(gmi_now_ns() - from) / 1e3 / calls);
    leave(r);
  }
}

/* ---- faults */

/* After the failure of another rank at begin_ns: this one has failed in time, says so, and can go. */
static void check_gone(rank_t *r, gemini_status_t status, uint64_t begin_ns, const char *what) {
  uint64_t now = gmi_now_ns(), failed_ns = now - begin_ns;
  CHECK_EQ(status, GEMINI_ERR_PEER);
  printf("  rank %u, %s: failed after %.1f s: %s\n", r->comm.rank, what, (double)failed_ns / 1e9, gmi_fail_message());
  CHECK(failed_ns <= fault_deadline_ns + 5 * NS_PER_S);
  CHECK_EQ(r->comm.ops->all_gather(r->comm.self, r->buffer, 8, r->stream, "later"), GEMINI_ERR_PEER);
  uint64_t mine = 0, all[MOST_RANKS];
  CHECK_EQ(r->comm.ops->exchange(r->comm.self, &mine, 8, all, "later"), GEMINI_ERR_PEER);
  leave(r);
  uint64_t closed_ns = gmi_now_ns() - now;
  CHECK(closed_ns <= 3 * fault_deadline_ns + 5 * NS_PER_S);
  CHECK(settled(r, 5 * NS_PER_S)); /* the kernels have ended */
  printf("  rank %u, %s: closed after %.1f s\n", r->comm.rank, what, (double)closed_ns / 1e9);
  fflush(stdout);
}
static uint32_t victim_of(const rank_t *r) { return r->comm.ranks - 1; }
/* Works until another rank is gone. Of processes, the victim works, too, until main() kills it. */
static void work(rank_t *r, bool exchanging) {
  const bool victim = r->comm.rank == victim_of(r);
  gemini_status_t status = GEMINI_OK;
  uint64_t mine = 0, all[MOST_RANKS];
  memset(&all, 0, sizeof all);
  while (!status) {
    if (victim && threads && shared->calls == KILLED_AFTER) {
      shared->killed_ns = gmi_now_ns();
      return;
    }
    if (exchanging) status = r->comm.ops->exchange(r->comm.self, &mine, 8, all, "work");
    else status = r->comm.ops->all_gather(r->comm.self, r->buffer, most_bytes / 4 / r->comm.ranks, r->stream, "work");
    if (!status) status = r->comm.ops->poll(r->comm.self);
    if (victim) shared->calls++;
  }
  CHECK(shared->killed_ns != 0 || status);
  check_gone(r, status, shared->killed_ns, exchanging ? "in exchanges" : "in gathers");
}
static void work_in_gathers(rank_t *r) {
  join(r, fault_deadline_ns, false);
  work(r, false);
  if (r->comm.rank == victim_of(r)) leave(r);
}
static void work_in_exchanges(rank_t *r) {
  join(r, fault_deadline_ns, false);
  work(r, true);
  if (r->comm.rank == victim_of(r)) leave(r);
}

/* Rank 0 gives up while it waits for the others in a call. */
static void *abort_soon(void *user) {
  rank_t *r = user;
  nanosleep(&(struct timespec){ 0, 500000000 }, NULL);
  r->comm.ops->abort(r->comm.self, "the check says so");
  return NULL;
}
static void check_abort(rank_t *r) {
  uint64_t mine = 0, all[MOST_RANKS], begin;
  pthread_t thread;
  join(r, fault_deadline_ns, false);
  OK(r->comm.ops->exchange(r->comm.self, &mine, 8, all, "all"));
  if (!r->comm.rank) {
    begin = gmi_now_ns();
    CHECK(!pthread_create(&thread, NULL, abort_soon, r));
    CHECK_EQ(r->comm.ops->exchange(r->comm.self, &mine, 8, all, "alone"), GEMINI_ERR_PEER);
    CHECK_SAYS(gmi_fail_message(), "gave up: the check says so");
    CHECK(gmi_now_ns() - begin < 2 * NS_PER_S);
    CHECK(!pthread_join(thread, NULL));
  }
  pthread_barrier_wait(&shared->barrier); /* nobody has left before */
  begin = gmi_now_ns();
  leave(r);
  if (r->comm.rank < 2) printf("  rank %u closed after %.1f s\n", r->comm.rank, (double)(gmi_now_ns() - begin) / 1e9);
}

/* ---- groups */
static void hangs(int signal) {
  static const char words[] = "a rank hangs: the check ends after 540 s\n";
  (void)signal;
  (void)!write(2, words, sizeof words - 1);
  _exit(1); /* processes of other ranks end with this one */
}
static void run_threads(uint32_t ranks, void (*fn)(rank_t *r)) {
  pthread_t made[MOST_RANKS];
  rank_t all[MOST_RANKS];
  for (uint32_t r = 0; r < ranks; r++) {
    all[r] = (rank_t){ .fn = fn, .config = { .rank = r, .ranks = ranks } };
    CHECK(!pthread_create(&made[r], NULL, rank_main, &all[r]));
  }
  for (uint32_t r = 0; r < ranks; r++) CHECK(!pthread_join(made[r], NULL));
}
/* kills: the last rank is killed once it has made some calls. */
static void run_processes(uint32_t ranks, void (*fn)(rank_t *r), bool kills) {
  pid_t pids[MOST_RANKS];
  bool failed = false;
  for (uint32_t r = 0; r < ranks; r++) {
    if ((pids[r] = fork_child())) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    rank_t rank = { .fn = fn, .config = { .rank = r, .ranks = ranks } };
    rank_main(&rank);
    exit(0);
  }
  for (uint32_t left = ranks; left;) {
    if (kills && shared->calls >= KILLED_AFTER) {
      shared->killed_ns = gmi_now_ns();
      kill(pids[ranks - 1], SIGKILL);
      kills = false;
    }
    int end;
    pid_t pid = waitpid(-1, &end, WNOHANG);
    CHECK(pid >= 0);
    if (!pid) {
      nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
      continue;
    }
    left--;
    bool expected = end == 0 || (pid == pids[ranks - 1] && shared->killed_ns && WIFSIGNALED(end));
    if (expected || failed) continue;
    failed = true; /* the others would wait for it */
    for (uint32_t r = 0; r < ranks; r++)
      if (pids[r] != pid) kill(pids[r], SIGKILL);
  }
  CHECK(!failed);
}
static void run(uint32_t ranks, const char *name, void (*fn)(rank_t *r), bool kills) {
  pthread_barrierattr_t attributes;
  printf("%u ranks: %s\n", ranks, name);
  fflush(stdout);
  memset(shared, 0, sizeof *shared);
  CHECK(!pthread_barrierattr_init(&attributes));
  CHECK(!pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED));
  CHECK(!pthread_barrier_init(&shared->barrier, &attributes, ranks));
  uint64_t begin = gmi_now_ns();
  if (threads) run_threads(ranks, fn);
  else run_processes(ranks, fn, kills);
  printf("%u ranks: %s: ok after %.1f s\n", ranks, name, (double)(gmi_now_ns() - begin) / 1e9);
  fflush(stdout);
}

/* In a process of its own: a process that has used the driver must not fork. */
static uint32_t count_gpus(void) {
  pid_t child = fork_child();
  if (!child) {
    const gmi_cuda_driver_t *driver = gmi_cuda_driver();
    const gmi_nccl_library_t *library = gmi_nccl_library();
    int count = 0, version = 0;
    if (!driver || !library || driver->init(0) || driver->device_count(&count) || library->version(&version)) {
      printf("%s\n", driver && library ? "no GPU" : gmi_fail_message());
      exit(0);
    }
    printf("%d GPUs, NCCL %d.%d.%d\n", count, version / 10000, version % 10000 / 100, version % 100);
    if (shared_gpu && version < NCCL_SHARES_GPUS) {
      printf("NCCL 2.30 or later is needed for processes that share a GPU\n");
      exit(0);
    }
    exit(count < MOST_RANKS ? count : MOST_RANKS);
  }
  int end;
  CHECK_EQ(waitpid(child, &end, 0), child);
  CHECK(WIFEXITED(end));
  return (uint32_t)WEXITSTATUS(end);
}

static void check_group(uint32_t ranks) {
  run(ranks, "values", check_values, false);
  run(ranks, "a caller's communicator", check_adopted, false);
  run(ranks, "times", check_times, false);
  run(ranks, "abort", check_abort, false);
  run(ranks, "a rank is killed in gathers", work_in_gathers, true);
  run(ranks, "a rank is killed in exchanges", work_in_exchanges, true);
}

int main(int argc, char **argv) {
  bool any = false;
  int first = 1;
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  for (; first < argc && argv[first][0] == '-'; first++) {
    if (!strcmp(argv[first], "--threads")) threads = true;
    else if (!strcmp(argv[first], "--shared-gpu")) shared_gpu = true;
    else CHECK(!"an option that there is");
  }
  if (threads) most_bytes = 8 * MIB;
  if (shared_gpu) { /* kernels that wait for those of another process keep the GPU until its turn is over */
    most_bytes = 4 * MIB;
    deadline_ns = 120 * NS_PER_S;
    fault_deadline_ns = 15 * NS_PER_S;
  }
  gpus = count_gpus();
  if (gpus < (shared_gpu ? 1 : 2)) {
    printf("skipped: needs %s\n", shared_gpu ? "a GPU and NCCL 2.30" : "2 GPUs and NCCL");
    return 77;
  }
  if (shared_gpu) gpus = 1;
  signal(SIGALRM, hangs);
  alarm(540);
  const uint32_t most = threads ? MOST_RANKS : shared_gpu ? SHARED_RANKS : gpus;
  for (int i = first; i < argc; i++, any = true) {
    uint32_t ranks = (uint32_t)strtoul(argv[i], NULL, 10);
    CHECK(ranks >= 2 && ranks <= most);
    check_group(ranks);
  }
  for (uint32_t ranks = 2; !any && ranks <= (shared_gpu ? 3 : gpus); ranks++) check_group(ranks);
  return 0;
}
