/* Compares the fused AdamW of bindings/update on the host with a plain pass that reads and writes the same bytes on the
 * same threads. SPDX-License-Identifier: Apache-2.0
 *
 * Each thread has arrays of its own, far larger than the caches. The plain pass reads and writes in the update's order,
 * a block of 64 elements at a time, and computes nothing. Both alternate, and all threads start a pass together. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cli.h"
#include "gemini_update.h"
#include "row.h"

#define PROGRAM "bench_update"
enum { ARRAYS = 5, PASSES_MAX = 101, THREADS_MAX = 1024 };
enum { GRAD, MOMENTUM, VARIANCE, MASTER, PARAM }; /* in the order in which they are read; the last four are written */

static const char *const dtype_names[] = { "f32", "bf16", "f16", NULL };
static const uint32_t dtypes[] = { GEMINI_DTYPE_F32, GEMINI_DTYPE_BF16, GEMINI_DTYPE_F16 };
static const char *const state_names[] = { "fp32", "bf16", "8bit", NULL };
static const uint32_t state_dtypes[] = { GEMINI_DTYPE_F32, GEMINI_DTYPE_BF16, GEMINI_DTYPE_BLOCK8 };
static const uint64_t state_widths[] = { 4, 2, 1 };
static const char *const pass_names[] = { "both", "results", "states", NULL }; /* by GEMINI_PASS_BOTH and so on */
static const char *const isa_names[] = { "best", "plain", "avx2", "avx512", NULL };

static uint64_t thread_count, elements = UINT64_C(32) << 20, passes = 11;
static uint32_t dtype = 1, states, isa, pass_kind;
static bool own_param;
static pthread_barrier_t barrier;

typedef struct worker {
  pthread_t thread;
  char *arrays[ARRAYS];
  uint64_t begin_ns[2][PASSES_MAX + 1], end_ns[2][PASSES_MAX + 1];
  bool failed;
} worker_t;

static uint64_t width(void) { return dtypes[dtype] == GEMINI_DTYPE_F32 ? 4 : 2; }
static uint64_t width_of(int array) {
  return array == GRAD || array == PARAM ? width() : array == MASTER ? 4 : state_widths[states];
}
static uint64_t array_bytes(int array) { return elements * width_of(array); }

/* --- the plain pass --- */

typedef uint64_t block_t __attribute__((vector_size(64), may_alias));
static volatile uint64_t nothing;                 /* always 0, but the compiler does not know that */
static _Thread_local volatile uint64_t last_seen; /* so that it must read */

static inline __attribute__((always_inline)) void touch(void *dst, const void *src, uint64_t bytes,
                                                        const block_t *change) {
  for (uint64_t at = 0; at < bytes; at += sizeof(block_t))
    *(block_t *)((char *)dst + at) = *(const block_t *)((const char *)src + at) ^ *change;
}
static inline __attribute__((always_inline)) void look_at(const void *src, uint64_t bytes, block_t *seen) {
  for (uint64_t at = 0; at < bytes; at += sizeof(block_t)) *seen ^= *(const block_t *)((const char *)src + at);
}
static inline __attribute__((always_inline)) void pass_over(char *const *a, uint64_t half) {
  const uint64_t widths[ARRAYS] = { [MOMENTUM] = width_of(MOMENTUM), width_of(VARIANCE), width_of(MASTER) };
  const block_t change = { nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing };
  block_t seen = change;
  for (uint64_t i = 0; i < elements; i += 64) {
    for (int array = MOMENTUM; array <= MASTER; array++) {
      char *const at = a[array] + i * widths[array];
      if (pass_kind == GEMINI_PASS_RESULTS) look_at(at, 64 * widths[array], &seen);
      else touch(at, at, 64 * widths[array], &change);
    }
    if (pass_kind == GEMINI_PASS_STATES) look_at(a[GRAD] + i * half, 64 * half, &seen);
    else touch(a[PARAM] + i * half, a[GRAD] + i * half, 64 * half, &change);
  }
  if (pass_kind) last_seen = seen[0];
}
#ifdef __x86_64__
__attribute__((target("avx512f"))) static void pass_avx512(char *const *a) {
  if (width() == 2) pass_over(a, 2);
  else pass_over(a, 4);
}
#endif
static void pass_plain(char *const *a) {
  if (width() == 2) pass_over(a, 2);
  else pass_over(a, 4);
}

/* --- threads --- */

static bool open_arrays(worker_t *w) {
  for (int i = 0; i < ARRAYS; i++) {
    if (i == PARAM && !own_param) {
      w->arrays[i] = w->arrays[GRAD];
      break;
    }
    w->arrays[i] = mmap(NULL, array_bytes(i), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (w->arrays[i] == MAP_FAILED) return false;
    madvise(w->arrays[i], array_bytes(i), MADV_HUGEPAGE);
    memset(w->arrays[i], 0, array_bytes(i));
  }
  for (uint64_t i = 0; i < elements; i++) {
    ((float *)w->arrays[MASTER])[i] = (float)(i % 1000) * 1e-3f;
    if (!states) ((float *)w->arrays[VARIANCE])[i] = 1e-4f; /* narrow ones begin with 0 */
    if (width() == 2)
      ((uint16_t *)w->arrays[GRAD])[i] = (uint16_t)(0x2c00 + i % 1024); /* small values in BF16 and in F16 */
    else ((float *)w->arrays[GRAD])[i] = (float)(i % 1000) * 1e-5f;
  }
  return true;
}

/* One of the two passes in which an update of the host may be made (GEMINI_UPDATE_PASSES). */
static void run_pass(worker_t *w, const gemini_adamw_t *adamw) {
  const gemini_update_range_t range = { elements, 0 };
  gemini_update_walk_t walk = GEMINI_UPDATE_WALK_INIT;
  walk.adamws = adamw, walk.rule_count = 1, walk.ranges = &range, walk.range_count = 1;
  gemini_update_span_t span = { .struct_size = sizeof span,
                                .tier = GEMINI_TIER_HOST,
                                .element_count = elements,
                                .arena_count = ARRAYS,
                                .pass = pass_kind };
  const bool is_results = pass_kind == GEMINI_PASS_RESULTS;
  const struct {
    uint32_t index;
    int array;
    bool is_out;
  } of[ARRAYS] = { { walk.param_index, PARAM, is_results },
                   { walk.grad_index, GRAD, true }, /* as in all spans; nothing is written there */
                   { walk.master_index, MASTER, !is_results },
                   { walk.momentum_index, MOMENTUM, !is_results },
                   { walk.variance_index, VARIANCE, !is_results } };
  for (int i = 0; i < ARRAYS; i++) {
    void *const at = w->arrays[of[i].array];
    span.ptr[of[i].index] = of[i].array == PARAM && !is_results ? NULL : at;
    span.out[of[i].index] = of[i].is_out ? at : NULL;
  }
  gemini_update_walk(&walk, &span);
  if (gemini_update_walk_status(&walk)) w->failed = true;
}

static void run_update(worker_t *w, uint64_t step) {
  gemini_adamw_t adamw = GEMINI_ADAMW_INIT;
  adamw.param_dtype = adamw.grad_dtype = dtypes[dtype];
  adamw.momentum_dtype = adamw.variance_dtype = state_dtypes[states];
  adamw.step = step;
  if (pass_kind) {
    run_pass(w, &adamw);
    return;
  }
  void *a[ARRAYS];
  memcpy(a, w->arrays, sizeof a);
  double sum;
  if (gemini_adamw_host(&adamw, elements, a[PARAM], a[GRAD], a[MASTER], a[MOMENTUM], a[VARIANCE], &sum))
    w->failed = true;
}

static void *run_worker(void *user) {
  worker_t *w = user;
  w->failed = !open_arrays(w);
  pthread_barrier_wait(&barrier);
  if (w->failed) return NULL;
  for (uint64_t pass = 0; pass <= passes; pass++) { /* the first pass warms up */
    for (int plain = 0; plain < 2; plain++) {
      pthread_barrier_wait(&barrier);
      w->begin_ns[plain][pass] = cli_now_ns();
      if (!plain) {
        run_update(w, pass + 1);
#ifdef __x86_64__
      } else if (__builtin_cpu_supports("avx512f")) {
        pass_avx512(w->arrays);
#endif
      } else {
        pass_plain(w->arrays);
      }
      w->end_ns[plain][pass] = cli_now_ns();
    }
  }
  return NULL;
}

/* Seconds of a pass, from the begin of the first thread to the end of the last one. */
static double seconds_of(const worker_t *workers, int plain, uint64_t pass) {
  uint64_t begin = UINT64_MAX, end = 0;
  for (uint64_t t = 0; t < thread_count; t++) {
    if (workers[t].begin_ns[plain][pass] < begin) begin = workers[t].begin_ns[plain][pass];
    if (workers[t].end_ns[plain][pass] > end) end = workers[t].end_ns[plain][pass];
  }
  return (double)(end - begin) * 1e-9;
}
static double median(double *values) {
  cli_sort(values, passes);
  return values[passes / 2];
}

int main(int argc, char **argv) {
  const cli_option_t options[] = {
    { "threads", CLI_U64, &thread_count, "threads, each on arrays of its own; 0: all cores", 0, THREADS_MAX, NULL },
    { "elements", CLI_U64, &elements, "parameters of a thread, rounded up to 256", 256, UINT64_C(1) << 36, NULL },
    { "passes", CLI_U64, &passes, "passes of each kind, of which the median counts", 1, PASSES_MAX, NULL },
    { "dtype", CLI_CHOICE, &dtype, "of gradients and parameters", 0, 0, dtype_names },
    { "states", CLI_CHOICE, &states, "how momentum and variance are kept", 0, 0, state_names },
    { "pass", CLI_CHOICE, &pass_kind, "of an update in two passes, with parameters of their own", 0, 0, pass_names },
    { "own-param", CLI_FLAG, &own_param, "parameters do not lie in their gradients' bytes", 0, 0, NULL },
    { "isa", CLI_CHOICE, &isa, "instructions of the update", 0, 0, isa_names },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int status = cli_parse(PROGRAM, "fused AdamW against a plain pass over the same bytes", options, argc, argv);
  if (status >= 0) return status;
  if (!thread_count) thread_count = (uint64_t)sysconf(_SC_NPROCESSORS_ONLN);
  elements = (elements + 255) / 256 * 256;
  own_param |= pass_kind != GEMINI_PASS_BOTH;
  if (isa && gemini_update_force_isa(isa_names[isa])) {
    cli_error(PROGRAM, "this machine has no %s", isa_names[isa]);
    return CLI_EXIT_FAILURE;
  }
  worker_t *workers = calloc(thread_count, sizeof *workers);
  if (!workers || pthread_barrier_init(&barrier, NULL, (unsigned)thread_count)) return CLI_EXIT_FAILURE;
  for (uint64_t t = 0; t < thread_count; t++) {
    if (pthread_create(&workers[t].thread, NULL, run_worker, &workers[t])) {
      cli_error(PROGRAM, "cannot start thread %llu of %llu", (unsigned long long)t, (unsigned long long)thread_count);
      exit(CLI_EXIT_FAILURE);
    }
  }
  bool failed = false;
  for (uint64_t t = 0; t < thread_count; t++) {
    pthread_join(workers[t].thread, NULL);
    failed |= workers[t].failed;
  }
  if (failed) {
    cli_error(PROGRAM, "no memory, or the update failed");
    return CLI_EXIT_FAILURE;
  }
  /* Each ratio compares two passes that followed each other, so that other load on the machine affects both. */
  double updates[PASSES_MAX], plains[PASSES_MAX], ratios[PASSES_MAX];
  for (uint64_t pass = 0; pass < passes; pass++) {
    updates[pass] = seconds_of(workers, 0, pass + 1);
    plains[pass] = seconds_of(workers, 1, pass + 1);
    ratios[pass] = plains[pass] / updates[pass];
  }
  const double params = (double)(elements * thread_count), update_s = median(updates), plain_s = median(plains);
  const uint64_t kept = width_of(MASTER) + width_of(MOMENTUM) + width_of(VARIANCE);
  const uint64_t bytes = width() + kept + (pass_kind == GEMINI_PASS_RESULTS ? width() : kept) +
                         (pass_kind == GEMINI_PASS_BOTH ? width() : 0);
  row_t row;
  row_begin(&row, PROGRAM, dtype_names[dtype]);
  row_value(&row, update_s / params, "s/parameter");
  row_ratio(&row, median(ratios), "plain read-write pass over the same bytes");
  row_f64(&row, "plain_s_per_parameter", plain_s / params);
  row_f64(&row, "bytes_per_s", (double)bytes * params / update_s);
  row_u64(&row, "bytes_per_parameter", bytes);
  row_u64(&row, "threads", thread_count);
  row_u64(&row, "parameters", elements * thread_count);
  row_text(&row, "states", state_names[states]);
  row_text(&row, "pass", pass_names[pass_kind]);
  row_text(&row, "isa", gemini_update_isa());
  row_text(&row, "param", own_param ? "of its own" : "in the gradient's bytes");
  for (uint64_t t = 0; t < thread_count; t++) {
    for (int i = 0; i < PARAM + (own_param ? 1 : 0); i++) munmap(workers[t].arrays[i], array_bytes(i));
  }
  free(workers);
  pthread_barrier_destroy(&barrier);
  return row_end(&row) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}
