/* Measures the time and the fragmentation of non-model allocations: pairs of alloc and free of one size, and a recorded
 * trace. SPDX-License-Identifier: Apache-2.0
 *
 * It calls the functions that PyTorch calls, inside an open operator, so that the operator's peak is counted.
 * Fragmentation is reported as two ratios to the peak of live bytes: the peak of device memory under an ample budget,
 * idle chunks included, and the smallest budget under which the trace runs to its end. */
#include <stdio.h>
#include <stdlib.h>

#include "alloc_trace.h"
#include "call.h"
#include "cli.h"
#include "gemini.h"
#include "gemini/hook.h"
#include "row.h"

#define PROGRAM "bench_alloc"
enum { ROUNDS = 7 };

static const char *trace_path;
static uint64_t pairs = 200000, scale = 1, chunk_bytes = UINT64_C(2) << 20, ordinal;
static uint32_t device;
static void *stream; /* the native handle that hooks take */

static bool ok(gemini_status_t status, const char *what) { return call_ok(PROGRAM, status, what); }

static void *get(void *user, uint64_t size_bytes) {
  (void)user;
  return gemini_torch_malloc((ptrdiff_t)size_bytes, (int)ordinal, stream);
}
static void put(void *user, void *ptr, uint64_t size_bytes) {
  (void)user;
  gemini_torch_free(ptr, (ptrdiff_t)size_bytes, (int)ordinal, stream);
}

/* Seconds per pair, the median of the rounds; negative: an allocation was refused. */
static double time_pairs(uint64_t size_bytes) {
  double seconds[ROUNDS];
  for (int round = -1; round < ROUNDS; round++) { /* the first round warms up */
    uint64_t begin = cli_now_ns();
    for (uint64_t i = 0; i < pairs; i++) {
      void *ptr = get(NULL, size_bytes);
      if (!ptr) return -1;
      put(NULL, ptr, size_bytes);
    }
    if (round >= 0) seconds[round] = (double)(cli_now_ns() - begin) * 1e-9 / (double)pairs;
  }
  cli_sort(seconds, ROUNDS);
  return seconds[ROUNDS / 2];
}

static double time_trace(const alloc_trace_t *trace) {
  double seconds[ROUNDS];
  for (int round = -1; round < ROUNDS; round++) {
    uint64_t begin = cli_now_ns();
    if (!alloc_trace_play(trace, get, put, NULL)) return -1;
    if (round >= 0) seconds[round] = (double)(cli_now_ns() - begin) * 1e-9 / ((double)trace->count / 2);
  }
  cli_sort(seconds, ROUNDS);
  return seconds[ROUNDS / 2];
}

static bool row_of_time(const char *name, uint64_t size_bytes, double seconds) {
  row_t row;
  if (seconds < 0) {
    gemini_error_info_t error = GEMINI_ERROR_INFO_INIT;
    (void)gemini_last_error(&error);
    cli_error(PROGRAM, "%s: %s", name, error.message);
    return false;
  }
  row_begin(&row, PROGRAM, name);
  row_value(&row, seconds, "s");
  if (size_bytes) row_u64(&row, "size_bytes", size_bytes);
  row_text(&row, "device", device == GEMINI_DEVICE_CUDA ? "cuda" : "sim");
  row_u64(&row, "chunk_bytes", chunk_bytes);
  return row_end(&row);
}

static bool times(const gemini_config_t *config, const alloc_trace_t *trace) {
  static const struct {
    const char *name;
    uint64_t size_bytes;
  } sizes[] = { { "512B", 512 }, { "1MiB", UINT64_C(1) << 20 }, { "32MiB", UINT64_C(32) << 20 } };
  gemini_manager_t mgr;
  gemini_stream_t own = 0;
  if (!ok(gemini_manager_open(config, &mgr), "open")) return false;
  bool fine = ok(gemini_hook_set(mgr, 0), "hook");
  if (fine && device == GEMINI_DEVICE_SIMULATED) fine = ok(gemini_stream_create(mgr, &own), "stream");
  stream = (void *)(uintptr_t)own;
  fine = fine && ok(gemini_iteration_begin(mgr), "iteration") &&
         ok(gemini_op_begin(mgr, "alloc", GEMINI_STREAM_CALLER), "op");
  for (int i = 0; fine && i < 3; i++)
    fine = row_of_time(sizes[i].name, sizes[i].size_bytes, time_pairs(sizes[i].size_bytes));
  if (fine && trace) fine = row_of_time("trace", 0, time_trace(trace));
  fine = fine && ok(gemini_op_end(mgr), "op") && ok(gemini_iteration_end(mgr), "iteration");
  return ok(gemini_manager_close(mgr), "close") && fine;
}

static bool fragmentation(gemini_config_t config, const alloc_trace_t *trace) {
  uint64_t held;
  if (!ok(alloc_trace_serve(trace, &config, &held), "trace")) return false;
  uint64_t least = alloc_trace_least(trace, &config);
  row_t row;
  row_begin(&row, PROGRAM, "fragmentation");
  row_value(&row, (double)least / (double)trace->live_peak_bytes, "ratio");
  if (trace->reserved_bytes) row_ratio(&row, (double)trace->reserved_bytes / (double)held, "PyTorch's rules");
  row_text(&row, "trace", trace_path);
  row_text(&row, "device", device == GEMINI_DEVICE_CUDA ? "cuda" : "sim");
  row_u64(&row, "events", trace->count);
  row_u64(&row, "chunk_bytes", chunk_bytes);
  row_u64(&row, "scale", scale);
  row_u64(&row, "live_peak_bytes", trace->live_peak_bytes);
  row_u64(&row, "held_peak_bytes", held);
  row_f64(&row, "held_ratio", (double)held / (double)trace->live_peak_bytes);
  row_u64(&row, "least_budget_bytes", least);
  return row_end(&row) && least;
}

int main(int argc, char **argv) {
  static const char *const devices[] = { "sim", "cuda", NULL };
  const cli_option_t options[] = {
    { "device", CLI_CHOICE, &device, "simulated device or GPU", 0, 0, devices },
    { "ordinal", CLI_U64, &ordinal, "which GPU", 0, 63, NULL },
    { "pairs", CLI_U64, &pairs, "allocations and frees a round", 1, 0, NULL },
    { "chunk-size", CLI_SIZE, &chunk_bytes, "size of a chunk, a power of two", 0, 0, NULL },
    { "trace", CLI_STRING, &trace_path, "recorded trace (bench/data/gpt_1.3b.trace); none: no such rows", 0, 0, NULL },
    { "scale", CLI_U64, &scale, "the trace's sizes are divided by this: the simulated device has real memory", 1, 0,
      NULL },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int status = cli_parse(PROGRAM, "Costs and waste of allocations of non-model memory.", options, argc, argv);
  if (status >= 0) return status;
  alloc_trace_t trace = { 0 };
  char why[512];
  if (trace_path && !alloc_trace_load(trace_path, scale, &trace, why, sizeof why)) {
    cli_error(PROGRAM, "bad usage: %s", why);
    return CLI_EXIT_USAGE;
  }
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device = device ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  config.device_ordinal = (uint32_t)ordinal;
  config.chunk_bytes = chunk_bytes;
  config.device_bytes = trace.live_peak_bytes * 2 + (UINT64_C(256) << 20);
  config.host_bytes = UINT64_C(64) << 20;
  config.update_threads = 1;
  device = config.device;
  bool fine = times(&config, trace_path ? &trace : NULL);
  if (fine && trace_path) fine = fragmentation(config, &trace);
  alloc_trace_free(&trace);
  return fine ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}
