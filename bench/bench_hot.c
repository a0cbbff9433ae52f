/* Measures the most frequent calls: acquire and release of a resident tensor, allocation and free of non-model memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The calls run inside an open operator, as in a training loop. Each thread uses its own tensors and its own stream.
 * In each round the same thread also measures a floor: what cannot be left out of an acquire and release, two atomic
 * changes of each of two records (the tensor's and its chunk's), which are as many and come in as random an order.
 * Seconds per pair are those of one thread, so that perfect scaling leaves them unchanged. The memory of the library's
 * records is the growth of resident memory while tensors are registered. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "call.h"
#include "cli.h"
#include "gemini.h"
#include "row.h"

#define PROGRAM "bench_hot"
enum { TENSOR_BYTES = 512, ROUNDS = 7, ALLOC_PAIRS = 200000 };

static gemini_manager_t manager;
static gemini_tensor_t *tensors;
static uint64_t tensor_count = 100000, thread_count = 1, pairs = 2000000, seed = 1;
static pthread_barrier_t barrier;

/* A record of the floor, as large as those of the library: a cache line. */
typedef struct record {
  _Alignas(64) _Atomic uint64_t word;
} record_t;
static record_t *records; /* [tensor_count] */

/* Changes a word as the library does, a compare-and-swap after a look at it; returns the old one. */
static uint64_t change(record_t *record, uint64_t by) {
  uint64_t word = atomic_load_explicit(&record->word, memory_order_relaxed);
  while (!atomic_compare_exchange_weak_explicit(&record->word, &word, word + by, memory_order_acq_rel,
                                                memory_order_relaxed)) {
  }
  return word;
}

static bool ok(gemini_status_t status, const char *what) { return call_ok(PROGRAM, status, what); }

typedef struct worker {
  pthread_t thread;
  uint64_t first, count; /* tensors of its own */
  uint64_t order_seed;
  double acquire_s[ROUNDS], alloc_s[ROUNDS]; /* seconds per pair */
  double cpu_s[ROUNDS];                      /* CPU time of the same pairs, without the time that other programs took */
  double floor_s[ROUNDS];                    /* CPU time of the floor of a pair */
  bool failed;
} worker_t;

static double thread_cpu_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Uses the tensors in a random order, which the processor cannot prefetch; it is drawn before the clock runs. */
static bool run_worker(worker_t *w) {
  gemini_stream_t stream;
  if (!ok(gemini_stream_create(manager, &stream), "stream")) return false;
  uint32_t *order = malloc(w->count * sizeof *order);
  if (!order) return false;
  for (uint64_t i = 0; i < w->count; i++) order[i] = (uint32_t)(w->first + i);
  uint64_t x = w->order_seed;
  for (uint64_t i = w->count - 1; i > 0; i--) {
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    uint64_t j = x * UINT64_C(2685821657736338717) % (i + 1);
    uint32_t swap = order[i];
    order[i] = order[j];
    order[j] = swap;
  }
  bool fine = true;
  for (int round = -1; fine && round < ROUNDS; round++) { /* the first round warms up */
    pthread_barrier_wait(&barrier);
    uint64_t begin = cli_now_ns();
    double cpu_begin = thread_cpu_s();
    for (uint64_t i = 0, k = 0; i < pairs; i++) {
      gemini_access_t access = gemini_tensor_access(tensors[order[k]], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
      fine &= gemini_acquire(manager, &access, 1, stream) == GEMINI_OK;
      fine &= gemini_release(manager, &access, 1, stream) == GEMINI_OK;
      if (++k == w->count) k = 0;
    }
    if (round >= 0) {
      w->acquire_s[round] = (double)(cli_now_ns() - begin) * 1e-9 / (double)pairs;
      w->cpu_s[round] = (thread_cpu_s() - cpu_begin) / (double)pairs;
    }
    cpu_begin = thread_cpu_s();
    for (uint64_t i = 0, k = 0; i < pairs; i++) {
      record_t *one = &records[order[k]], *other = &records[order[w->count - 1 - k]];
      uint64_t left = change(one, 1) + change(other, 1);
      left += change(other, UINT64_MAX) + change(one, UINT64_MAX);
      k += left - 1; /* left is 2: a pair begins when the one before has ended, as a call does */
      if (k >= w->count) k = 0;
    }
    if (round >= 0) w->floor_s[round] = (thread_cpu_s() - cpu_begin) / (double)pairs;
  }
  /* The allocations come after all acquires: allocations on several streams leave waits between streams behind, and the
   * threads of simulated streams execute these waits on the same cores. */
  for (int round = -1; fine && round < ROUNDS; round++) {
    pthread_barrier_wait(&barrier);
    uint64_t begin = cli_now_ns();
    for (int i = 0; i < ALLOC_PAIRS; i++) {
      void *ptr;
      fine &= gemini_alloc(manager, 4096, stream, &ptr) == GEMINI_OK;
      fine &= gemini_free(manager, ptr, stream) == GEMINI_OK;
    }
    if (round >= 0) w->alloc_s[round] = (double)(cli_now_ns() - begin) * 1e-9 / ALLOC_PAIRS;
  }
  free(order);
  return ok(gemini_stream_destroy(manager, stream), "stream") && fine;
}
static void *worker(void *user) {
  worker_t *w = user;
  w->failed = !run_worker(w);
  return NULL;
}

enum { ACQUIRE, ALLOC, CPU, FLOOR };
static double median_of(worker_t *workers, uint64_t count, int which) {
  double values[64 * ROUNDS];
  for (uint64_t i = 0; i < count; i++)
    memcpy(values + i * ROUNDS,
           which == ALLOC   ? workers[i].alloc_s
           : which == CPU   ? workers[i].cpu_s
           : which == FLOOR ? workers[i].floor_s
                            : workers[i].acquire_s,
           ROUNDS * sizeof *values);
  cli_sort(values, count * ROUNDS);
  return values[count * ROUNDS / 2];
}

static uint64_t resident_bytes(void) {
  unsigned long long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (file && fscanf(file, "%*u %llu", &pages) != 1) pages = 0;
  if (file) fclose(file);
  return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

typedef struct result {
  double acquire_s, alloc_s, cpu_s, floor_s; /* a pair; the last two are CPU time */
} result_t;
static bool run(uint64_t threads, result_t *result_out) {
  worker_t *workers = calloc(threads, sizeof *workers);
  if (!workers) return false;
  pthread_barrier_init(&barrier, NULL, (unsigned)threads);
  bool fine = true;
  uint64_t share = tensor_count / threads;
  for (uint64_t i = 0; i < threads; i++) {
    workers[i].first = i * share;
    workers[i].count = share;
    workers[i].order_seed = seed * 1000003 + i + 1;
    /* the other threads would wait forever at the barrier */
    if (pthread_create(&workers[i].thread, NULL, worker, &workers[i])) exit(CLI_EXIT_FAILURE);
  }
  for (uint64_t i = 0; i < threads; i++) {
    pthread_join(workers[i].thread, NULL);
    fine &= !workers[i].failed;
  }
  pthread_barrier_destroy(&barrier);
  *result_out = (result_t){ median_of(workers, threads, ACQUIRE), median_of(workers, threads, ALLOC),
                            median_of(workers, threads, CPU), median_of(workers, threads, FLOOR) };
  free(workers);
  return fine;
}

int main(int argc, char **argv) {
  const cli_option_t options[] = {
    { "tensors", CLI_U64, &tensor_count, "tensors of 512 bytes, all resident", 64, 10000000, NULL },
    { "threads", CLI_U64, &thread_count, "threads at once", 1, 64, NULL },
    { "pairs", CLI_U64, &pairs, "acquires and releases a thread and round", 1, 0, NULL },
    { "seed", CLI_U64, &seed, "of the order", 1, 0, NULL },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int status = cli_parse(PROGRAM, "Costs of the hot calls.", options, argc, argv);
  if (status >= 0) return status;
  if (thread_count > tensor_count) {
    cli_error(PROGRAM, "bad usage: %llu threads, more than the tensors", (unsigned long long)thread_count);
    return CLI_EXIT_USAGE;
  }
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device_bytes = tensor_count * TENSOR_BYTES * 2 + (UINT64_C(64) << 20);
  config.host_bytes = config.device_bytes;
  if (!ok(gemini_manager_open(&config, &manager), "open")) return CLI_EXIT_FAILURE;
  gemini_arena_config_t arena_config = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t arena;
  if (!ok(gemini_arena_create(manager, &arena_config, &arena), "arena")) return CLI_EXIT_FAILURE;
  tensors = calloc(tensor_count, sizeof *tensors);
  if (!tensors) return CLI_EXIT_FAILURE;
  memset(tensors, 0xff, tensor_count * sizeof *tensors); /* touched before memory is measured */
  uint64_t before = resident_bytes();
  for (uint64_t i = 0; i < tensor_count; i++) {
    char name[32];
    snprintf(name, sizeof name, "tensor.%llu", (unsigned long long)i);
    if (!ok(gemini_tensor_register(manager, arena, name, TENSOR_BYTES, GEMINI_OFFSET_NEXT, &tensors[i]), name))
      return CLI_EXIT_FAILURE;
  }
  uint64_t record_bytes = resident_bytes() - before;
  gemini_access_t all = gemini_arena_access(arena, 0, 0, GEMINI_READ_WRITE, GEMINI_TIER_DEVICE);
  if (!ok(gemini_pin(manager, &all), "pin")) return CLI_EXIT_FAILURE;
  if (!ok(gemini_acquire(manager, &all, 1, GEMINI_STREAM_CALLER), "acquire") ||
      !ok(gemini_release(manager, &all, 1, GEMINI_STREAM_CALLER), "release"))
    return CLI_EXIT_FAILURE;
  if (!ok(gemini_iteration_begin(manager), "iteration") ||
      !ok(gemini_op_begin(manager, "hot", GEMINI_STREAM_CALLER), "op"))
    return CLI_EXIT_FAILURE;
  records = aligned_alloc(sizeof *records, tensor_count * sizeof *records);
  if (!records) return CLI_EXIT_FAILURE;
  memset(records, 0, tensor_count * sizeof *records);
  result_t one, all_threads;
  bool fine = run(1, &one);
  all_threads = one;
  if (fine && thread_count > 1) fine = run(thread_count, &all_threads);
  if (!fine) {
    cli_error(PROGRAM, "a call failed");
    return CLI_EXIT_FAILURE;
  }
  row_t row;
  row_begin(&row, PROGRAM, "acquire+release");
  row_value(&row, all_threads.acquire_s, "s");
  row_u64(&row, "tensors", tensor_count);
  row_u64(&row, "threads", thread_count);
  row_f64(&row, "one_thread", one.acquire_s);
  row_f64(&row, "speedup", (double)thread_count * one.acquire_s / all_threads.acquire_s);
  row_f64(&row, "cpu_seconds", all_threads.cpu_s);
  row_f64(&row, "cpu_speedup", (double)thread_count * one.cpu_s / all_threads.cpu_s);
  row_f64(&row, "floor_cpu_seconds", all_threads.floor_s);
  row_f64(&row, "times_floor", all_threads.cpu_s / all_threads.floor_s);
  row_f64(&row, "record_bytes_per_tensor", (double)record_bytes / (double)tensor_count);
  bool printed = row_end(&row);
  row_begin(&row, PROGRAM, "alloc+free");
  row_value(&row, all_threads.alloc_s, "s");
  row_u64(&row, "threads", thread_count);
  row_f64(&row, "one_thread", one.alloc_s);
  printed &= row_end(&row);
  fine = ok(gemini_op_end(manager), "op") && ok(gemini_iteration_end(manager), "iteration") &&
         ok(gemini_unpin(manager, &all), "unpin") && ok(gemini_manager_close(manager), "close");
  free(records);
  free(tensors);
  return printed && fine ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}
