/* Times a training step of a LLaMA on the simulated device, with the times of a GPU: operators, updates and copies
 * sleep for as long as they are said to take, and so nothing but the library's decisions, plans and order of work make
 * a step longer. What a change of them brings can be seen without a GPU, up to what the calling thread itself would
 * cost there, such as mappings. SPDX-License-Identifier: Apache-2.0
 *
 * A step adds the gradients of some micro-batches; the update follows a norm of all gradients, as with clipping that
 * never clips, and is speculated meanwhile. Each unit (embedding, blocks, head) is an operator in either pass. A chunk
 * of 64 KiB stands for one of a GPU. Defaults: 3.4 billion parameters in chunks of 16 MiB, 24 GiB of an H200. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "call.h"
#include "cli.h"
#include "gemini.h"
#include "row.h"

#define PROGRAM "bench_step"
enum {
  CHUNK = 65536,
  ARENAS = 5,
  UNITS_MAX = 514,
  STEPS_MAX = 1000,
  SPAN = CHUNK / 2 /* elements of a chunk of bf16 */
};
enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE };
static const uint32_t kinds[ARENAS] = { GEMINI_KIND_PARAM, GEMINI_KIND_GRAD, GEMINI_KIND_MASTER, GEMINI_KIND_MOMENTUM,
                                        GEMINI_KIND_VARIANCE };
static const uint32_t modes[ARENAS] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                        GEMINI_READ_WRITE };
static const uint32_t sizes[ARENAS] = { 2, 2, 4, 4, 4 };

static uint64_t blocks = 26, block_tenths = 148, end_chunks = 12, micro_batches = 4, frames = 1536, host_chunks = 5960,
                steps = 12, warmup = 5;
static double forward_ms = 2.3, backward_ms = 6.7, head_ms = 4.2, copy_ms = 0.335, host_ms = 2.54, device_ms = 0.085,
              embedding_ms = 0.5;
static const char *timeline;
static bool explains;

static gemini_manager_t manager;
static gemini_stream_t stream;
static gemini_arena_t arenas[ARENAS];
static void *kept[UNITS_MAX]; /* what a unit's forward pass leaves for its backward pass */

static bool ok(gemini_status_t status, const char *what) { return call_ok(PROGRAM, status, what); }
#define TRY(call, what)                    \
  do {                                     \
    if (!ok((call), (what))) return false; \
  } while (0)

/* ---- work that sleeps. A resource goes on where its last work has ended, if that was just now: sleeps that end late
 * do not add up. */
typedef struct {
  uint64_t end_ns;
} resource_t;
/* Each used by one thread: of the stream, of the library's stream for updates, and of the only update worker. */
static resource_t gpu, gpu_updates, worker;
static void sleep_on(resource_t *resource, double ms) {
  const uint64_t now = cli_now_ns();
  if (now > resource->end_ns + 200000) resource->end_ns = now;
  resource->end_ns += (uint64_t)(ms * 1e6);
  const struct timespec end = { (time_t)(resource->end_ns / 1000000000), (long)(resource->end_ns % 1000000000) };
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, NULL)) continue;
}
static void compute(void *user) { sleep_on(&gpu, *(const double *)user); }
static void compute_update(void *user) { sleep_on(&gpu_updates, *(const double *)user); }
static gemini_status_t update_span(void *user, const gemini_update_span_t *span) {
  (void)user;
  if (span->tier == GEMINI_TIER_DEVICE) return gemini_stream_call(manager, span->stream, compute_update, &device_ms);
  sleep_on(&worker, host_ms * (double)span->element_count / SPAN);
  return GEMINI_OK;
}

/* ---- the model */
/* The first chunk of a unit of the parameters; the embedding is unit 0, the head the last one. */
static uint64_t first_of(uint64_t unit) {
  if (unit == 0) return 0;
  const uint64_t behind = unit > blocks + 1;
  return end_chunks + (unit - 1 - behind) * block_tenths / 10 + behind * end_chunks;
}
static bool update(uint32_t flags, uint64_t first_chunk, uint64_t chunks) {
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = flags;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = ARENAS;
  u.first_element = first_chunk * SPAN;
  u.element_count = chunks * SPAN;
  u.stream = stream;
  u.try_fn = update_span;
  return ok(gemini_update(manager, &u), "an update");
}
static bool operator_of(uint64_t unit, bool backward, uint64_t micro_batch) {
  const uint64_t first = first_of(unit) * CHUNK, size = first_of(unit + 1) * CHUNK - first;
  const bool head = unit == blocks + 1;
  double *ms = head ? &head_ms : !unit ? &embedding_ms : backward ? &backward_ms : &forward_ms;
  char name[48];
  snprintf(name, sizeof name, "%llu.%s", (unsigned long long)unit, backward ? "backward" : "forward");
  TRY(gemini_op_begin(manager, name, stream), "an operator");
  gemini_access_t accesses[] = {
    gemini_arena_access(arenas[PARAM], first, size, GEMINI_READ, GEMINI_TIER_DEVICE),
    gemini_arena_access(arenas[GRAD], first, size, micro_batch ? GEMINI_READ_WRITE : GEMINI_WRITE, GEMINI_TIER_DEVICE)
  };
  TRY(gemini_acquire(manager, accesses, backward ? 2 : 1, stream), "an acquire");
  void *temporary; /* a tenth of the device's memory at the head, where the logits are */
  if (!backward && !head) TRY(gemini_alloc(manager, CHUNK * 17 / 10, stream, &kept[unit]), "an activation");
  const uint64_t share = head ? 100 : backward ? 58 : 13; /* thousandths */
  TRY(gemini_alloc(manager, frames * share / 1000 * CHUNK + 512, stream, &temporary), "memory of an operator");
  TRY(gemini_stream_call(manager, stream, compute, ms), "an operator's work");
  TRY(gemini_free(manager, temporary, stream), "a free");
  if (backward && !head) TRY(gemini_free(manager, kept[unit], stream), "a free");
  TRY(gemini_release(manager, accesses, backward ? 2 : 1, stream), "a release");
  return ok(gemini_op_end(manager), "an operator's end");
}
static bool step(void) {
  TRY(gemini_iteration_begin(manager), "an iteration");
  for (uint64_t m = 0; m < micro_batches; m++) {
    for (uint64_t unit = 0; unit < blocks + 2; unit++)
      if (!operator_of(unit, false, m)) return false;
    for (uint64_t unit = blocks + 2; unit-- > 0;) {
      if (!operator_of(unit, true, m)) return false;
      if (m + 1 == micro_batches &&
          !update(GEMINI_UPDATE_SPECULATE, first_of(unit), first_of(unit + 1) - first_of(unit)))
        return false;
    }
  }
  TRY(gemini_stream_synchronize(manager, stream), "the norm");
  if (!update(GEMINI_UPDATE_COMMIT | GEMINI_UPDATE_LATE, 0, 0)) return false;
  const gemini_access_t gradients = gemini_arena_access(arenas[GRAD], 0, 0, 0, 0);
  TRY(gemini_discard(manager, &gradients), "gradients that are used up");
  return ok(gemini_iteration_end(manager), "an iteration's end");
}

static bool open_model(void) {
  const uint64_t chunks = first_of(blocks + 2);
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.placement = GEMINI_PLACEMENT_AUTO;
  c.device = GEMINI_DEVICE_SIMULATED;
  c.device_bytes = frames * CHUNK;
  c.host_bytes = host_chunks * CHUNK;
  c.chunk_bytes = CHUNK;
  c.update_threads = 1;
  c.sim_h2d_bytes_per_s = c.sim_d2h_bytes_per_s = (uint64_t)(CHUNK / (copy_ms * 1e-3));
  TRY(gemini_manager_open(&c, &manager), "the manager");
  TRY(gemini_stream_create(manager, &stream), "the stream");
  for (int k = 0; k < ARENAS; k++) {
    gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
    a.kind = kinds[k];
    a.element_bytes = sizes[k];
    a.capacity_bytes = k == PARAM ? chunks * CHUNK : 0;
    if (k != PARAM) a.like = arenas[PARAM];
    TRY(gemini_arena_create(manager, &a, &arenas[k]), "an arena");
  }
  uint64_t offset;
  TRY(gemini_arena_take(manager, arenas[PARAM], chunks * CHUNK, &offset), "the parameters");
  for (int k = 0; k < ARENAS; k++) {
    for (uint64_t i = 0; i < chunks * sizes[k] / sizes[PARAM]; i++) {
      gemini_access_t a = gemini_arena_access(arenas[k], i * CHUNK, CHUNK, GEMINI_WRITE, GEMINI_TIER_HOST);
      TRY(gemini_acquire(manager, &a, 1, GEMINI_STREAM_CALLER), "the model's bytes");
      memset(a.ptr, 1, CHUNK);
      TRY(gemini_release(manager, &a, 1, GEMINI_STREAM_CALLER), "the model's bytes");
    }
  }
  return true;
}

static bool report(double *seconds) {
  gemini_stats_t stats = GEMINI_STATS_INIT;
  TRY(gemini_stats(manager, &stats), "statistics");
  if (explains) {
    char text[16384];
    TRY(gemini_plan_explain(manager, sizeof text, text, NULL), "the plan");
    fputs(text, stderr);
  }
  const double all_ms =
      (double)micro_batches * (2 * embedding_ms + 2 * head_ms + (double)blocks * (forward_ms + backward_ms));
  double sorted[STEPS_MAX];
  memcpy(sorted, seconds, steps * sizeof *sorted);
  cli_sort(sorted, steps);
  row_t row;
  row_begin(&row, PROGRAM, "accumulation");
  row_value(&row, sorted[steps / 2], "s");
  row_ratio(&row, all_ms * 1e-3 / sorted[steps / 2], "the operators alone, all on the device");
  row_f64_list(&row, "seconds", seconds, steps);
  row_f64(&row, "predicted_seconds", (double)stats.predicted_step_ns * 1e-9);
  row_u64(&row, "departures", stats.departures);
  row_u64(&row, "plans", stats.plans);
  row_u64(&row, "planned_fetch_chunks", stats.planned_fetch_bytes / CHUNK);
  return row_end(&row);
}

static bool run(void) {
  static double seconds[STEPS_MAX];
  if (!open_model()) return false;
  for (uint64_t s = 0; s < warmup + steps; s++) {
    if (timeline && s + 1 == warmup + steps) TRY(gemini_timeline_start(manager, timeline), "the timeline");
    const uint64_t begin_ns = cli_now_ns();
    if (!step()) return false;
    if (s >= warmup) seconds[s - warmup] = (double)(cli_now_ns() - begin_ns) * 1e-9;
  }
  if (!report(seconds)) return false;
  TRY(gemini_update_drop(manager), "the end");
  TRY(gemini_update_wait(manager), "the last update");
  return ok(gemini_manager_close(manager), "closing");
}

int main(int argc, char **argv) {
  const cli_option_t options[] = {
    { "blocks", CLI_U64, &blocks, "blocks of the model", 1, UNITS_MAX - 2, NULL },
    { "block-tenths", CLI_U64, &block_tenths, "tenths of a chunk of parameters in a block", 10, 10000, NULL },
    { "end-chunks", CLI_U64, &end_chunks, "chunks of the embedding, and of the head", 1, 1000, NULL },
    { "micro-batches", CLI_U64, &micro_batches, "of a step", 1, 1000, NULL },
    { "frames", CLI_U64, &frames, "device budget in chunks", 8, 1000000, NULL },
    { "host-chunks", CLI_U64, &host_chunks, "host budget in chunks", 8, 1000000, NULL },
    { "forward-ms", CLI_F64, &forward_ms, "of a block, one micro-batch", 0, 0, NULL },
    { "backward-ms", CLI_F64, &backward_ms, "likewise", 0, 0, NULL },
    { "head-ms", CLI_F64, &head_ms, "of the head, in either pass", 0, 0, NULL },
    { "copy-ms", CLI_F64, &copy_ms, "of a chunk, each way", 0, 0, NULL },
    { "host-ms", CLI_F64, &host_ms, "of the update of a chunk of parameters by all workers", 0, 0, NULL },
    { "device-ms", CLI_F64, &device_ms, "the same on the device", 0, 0, NULL },
    { "warmup", CLI_U64, &warmup, "steps that do not count", 1, 1000, NULL },
    { "steps", CLI_U64, &steps, "steps that count; the value is their median", 1, STEPS_MAX, NULL },
    { "timeline", CLI_STRING, &timeline, "file for the timeline of the last step", 0, 0, NULL },
    { "explain", CLI_FLAG, &explains, "also print the plan in words, on standard error", 0, 0, NULL },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  const int done =
      cli_parse(PROGRAM, "Times a training step whose work sleeps, on the simulated device.", options, argc, argv);
  if (done >= 0) return done;
  if (copy_ms < 1e-6 || copy_ms > 1e6) { /* a rate of 0 would stand for copies that take no time */
    cli_error(PROGRAM, "--copy-ms is %g: want 1e-6 to 1e6", copy_ms);
    return CLI_EXIT_USAGE;
  }
  return run() ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}
