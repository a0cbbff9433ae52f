/* Measures the planner on a generated or recorded trace: time, memory, and quality of the plan.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <malloc.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chunk/arena.h"
#include "chunk/cut.h"
#include "common/cli.h"
#include "common/row.h"
#include "min_fetch.h"
#include "model/plan_ranks.h"
#include "policy/policy.h"
#include "tracer/tracer.h"

/* ---- heap use ---- Heap use is counted in the allocator itself, because peaks inside gmi_plan_make() cannot be
 * sampled from outside. The C library lets a program replace malloc() and the others; sanitizers replace them, too, so
 * under a sanitizer nothing is counted. */
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HEAP_IS_COUNTED 1
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *ptr, size_t size);
extern void __libc_free(void *ptr);
static uint64_t heap_now_bytes, heap_peak_bytes;

static void *heap_took(void *ptr) {
  if (ptr != NULL) heap_now_bytes += malloc_usable_size(ptr);
  if (heap_now_bytes > heap_peak_bytes) heap_peak_bytes = heap_now_bytes;
  return ptr;
}
void *malloc(size_t size) { return heap_took(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return heap_took(__libc_calloc(count, size)); }
void *realloc(void *ptr, size_t size) {
  uint64_t before = ptr != NULL ? malloc_usable_size(ptr) : 0;
  void *moved = __libc_realloc(ptr, size);
  if (moved == NULL && size > 0) return NULL;
  heap_now_bytes -= before;
  return heap_took(moved);
}
void free(void *ptr) {
  if (ptr != NULL) heap_now_bytes -= malloc_usable_size(ptr);
  __libc_free(ptr);
}
#else
#define HEAP_IS_COUNTED 0
static uint64_t heap_now_bytes, heap_peak_bytes;
#endif

/* ---- traces ---- */

typedef struct trace {
  gmi_plan_input_t input;
  gmi_plan_op_t *ops;
  gmi_plan_access_t *accesses;
  gmi_plan_piece_t *pieces;
  uint32_t *piece_chunks;
  uint8_t *kind;
} trace_t;

static uint64_t random_next(uint64_t *state) { /* xorshift64* */
  uint64_t x = *state;
  x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
  *state = x;
  return x * UINT64_C(2685821657736338717);
}
static int compare_u32(const void *a, const void *b) {
  const uint32_t *x = a, *y = b;
  return *x < *y ? -1 : *x > *y;
}

#define OPS_PER_LAYER 10 /* in each direction */
#define ACCESSES_PER_OP 30
#define REUSE_PER_OP 2 /* of these, accesses anywhere in the model: tied weights, norms, experts */

/* A training step of a transformer: layers forward, then backward. Each tensor is one chunk. Of four tensors, one is a
 * parameter, whose gradient takes its bytes, and three are its optimizer states. An op uses adjacent parameters of its
 * layer and a few of any layer. A parameter is updated when the last backward op that uses it has ended. */
static int generate_trace(trace_t *t, uint32_t ops, uint32_t tensors, uint32_t frames) {
  uint32_t params = tensors / 4 > 0 ? tensors / 4 : 1, layers = ops / (2 * OPS_PER_LAYER);
  uint64_t seed = 88172645463325252u;
  if (layers == 0) layers = 1;
  t->ops = calloc((size_t)ops + 1, sizeof *t->ops);
  t->accesses = calloc((size_t)ops * ACCESSES_PER_OP, sizeof *t->accesses);
  t->pieces = calloc((size_t)params + 1, sizeof *t->pieces);
  t->piece_chunks = calloc(tensors, sizeof *t->piece_chunks);
  t->kind = calloc(tensors, 1);
  if (t->ops == NULL || t->accesses == NULL || t->pieces == NULL || t->piece_chunks == NULL || t->kind == NULL)
    return -1;
  uint32_t count = 0;
  for (uint32_t op = 0; op < ops; op++) {
    uint32_t half = ops / 2, is_backward = op >= half;
    uint32_t place = is_backward ? ops - 1 - op : op; /* backward runs in reverse order */
    uint32_t layer = (uint32_t)((uint64_t)place * layers / (ops - half));
    uint32_t first = (uint32_t)((uint64_t)params * layer / layers);
    uint32_t end = (uint32_t)((uint64_t)params * (layer + 1) / layers), chunks[ACCESSES_PER_OP], used = 0;
    uint32_t run = ACCESSES_PER_OP - REUSE_PER_OP, span = end - first;
    uint32_t offset = span > run ? (uint32_t)((uint64_t)(span - run) * (place % OPS_PER_LAYER) / OPS_PER_LAYER) : 0;
    for (uint32_t w = 0; w < run && w < span; w++) chunks[used++] = first + offset + w;
    for (uint32_t w = 0; w < REUSE_PER_OP; w++) chunks[used++] = (uint32_t)(random_next(&seed) % params);
    qsort(chunks, used, sizeof *chunks, compare_u32);
    t->ops[op].access_first = count;
    t->ops[op].compute_ns = 400000 + random_next(&seed) % 800000;
    t->ops[op].heap_frames = (uint32_t)(random_next(&seed) % (frames / 16 + 1));
    for (uint32_t w = 0; w < used; w++) {
      if (w > 0 && chunks[w] == chunks[w - 1]) continue;
      t->accesses[count].chunk = chunks[w];
      t->accesses[count++].mode = is_backward ? GMI_ACCESS_READ | GMI_ACCESS_WRITE : GMI_ACCESS_READ;
      t->pieces[chunks[w]].after_op = op; /* a later op of the same parameter overwrites it */
    }
  }
  t->ops[ops].access_first = count;
  uint32_t next = params, listed = 0;
  for (uint32_t p = 0; p < params; p++) {
    t->kind[p] = GEMINI_KIND_PARAM;
    t->pieces[p].chunk_first = listed;
    t->pieces[p].shared_count = 1;
    t->pieces[p].host_ns = 120000;
    t->pieces[p].device_ns = 10000;
    t->piece_chunks[listed++] = p;
    for (uint32_t k = 0; k < 3 && next < tensors; k++) {
      t->kind[next] = (uint8_t)(GEMINI_KIND_MASTER + k);
      t->piece_chunks[listed++] = next++;
    }
  }
  t->pieces[params].chunk_first = listed;
  t->input = (gmi_plan_input_t){ .op_count = ops,
                                 .chunk_count = tensors,
                                 .frame_count = frames,
                                 .piece_count = params,
                                 .ops = t->ops,
                                 .accesses = t->accesses,
                                 .pieces = t->pieces,
                                 .piece_chunks = t->piece_chunks,
                                 .chunk_kind = t->kind,
                                 .chunk_bytes = 4u << 20,
                                 .frame_bytes = 4u << 20,
                                 .link_bytes = 4u << 20,
                                 .file_bytes = 4u << 20,
                                 .fetch_ns = 80000,
                                 .evict_ns = 80000 };
  return 0;
}

/* ---- recorded traces: a manager with the trace's arenas and budget turns them into the policy's terms ---- */

static gemini_manager_t trace_manager;
static gmi_plan_bundle_t trace_bundle;

static int create_arena(gmi_manager_t *m, const char *line, char *error, size_t error_bytes) {
  uint32_t number, kind, element_bytes, like, store;
  uint64_t size;
  char name[64];
  if (sscanf(line, "arena %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu64 " %63s", &number, &kind,
             &element_bytes, &like, &store, &size, name) != 7)
    return 0; /* not a line of an arena: gmi_trace_read() checks it */
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  config.kind = kind;
  config.element_bytes = element_bytes;
  config.capacity_bytes = size;
  config.name = name;
  for (uint32_t i = 0; i < GMI_ARENAS; i++) {
    gmi_arena_t *a = gmi_arena_at(m, i);
    if (a == NULL) continue;
    gemini_arena_t handle = gmi_handle(m, GMI_HANDLE_ARENA, a->generation, i);
    if (i == like && like != number) config.like = handle;
    if (i == store && store != number) config.reuse = handle;
  }
  gemini_arena_t arena;
  uint64_t offset;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  gemini_status_t status = gemini_arena_create(trace_manager, &config, &arena);
  if (status == GEMINI_OK && config.like == NULL && config.reuse == NULL && size != 0)
    status = gemini_arena_take(trace_manager, arena, size, &offset);
  if (status == GEMINI_OK) return 0;
  (void)gemini_last_error(&info);
  snprintf(error, error_bytes, "%s", info.message);
  return -1;
}

/* device_bytes, chunk_bytes: 0 = those that the trace was recorded with. */
static int load_trace(trace_t *t, const char *path, uint64_t device_bytes, uint64_t chunk_bytes, uint32_t placement,
                      char *error, size_t error_bytes) {
  FILE *file = fopen(path, "r");
  if (file == NULL) {
    snprintf(error, error_bytes, "%s: %s", path, strerror(errno));
    return -1;
  }
  gemini_config_t config = GEMINI_CONFIG_INIT;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  char line[1024];
  int failed = 0;
  while (!failed && fgets(line, sizeof line, file) != NULL) {
    uint64_t chunk, device;
    if (trace_manager == 0 && sscanf(line, "budget %" SCNu64 " %" SCNu64, &chunk, &device) == 2) {
      config.placement = placement;
      config.device_bytes = device_bytes != 0 ? device_bytes : device;
      config.chunk_bytes = chunk_bytes != 0 ? chunk_bytes : chunk;
      config.host_bytes = UINT64_C(64) << 20; /* nothing is ever stored there */
      failed = gemini_manager_open(&config, &trace_manager) != GEMINI_OK;
      if (failed) {
        (void)gemini_last_error(&info);
        snprintf(error, error_bytes, "%s: %s", path, info.message);
      }
    } else if (trace_manager != 0) {
      failed = create_arena(gmi_manager_get(trace_manager), line, error, error_bytes);
    }
  }
  fclose(file);
  if (failed) return -1;
  if (trace_manager == 0) {
    snprintf(error, error_bytes, "%s: no budget line, not a trace", path);
    return -1;
  }
  gmi_manager_t *m = gmi_manager_get(trace_manager);
  gmi_trace_t trace;
  gmi_lock(m, "bench_plan");
  gemini_status_t status = gmi_cut(m);
  if (status == GEMINI_OK) status = gmi_trace_read(m, &trace, path);
  if (status == GEMINI_OK) {
    status = gmi_plan_bundle_make(m, &trace, m->cut.chunk_shift, &trace_bundle);
    gmi_trace_free(&trace);
  }
  gmi_unlock(m);
  if (status != GEMINI_OK) {
    snprintf(error, error_bytes, "%s", gmi_fail_message());
    return -1;
  }
  t->input = trace_bundle.input;
  t->ops = (gmi_plan_op_t *)(uintptr_t)t->input.ops;
  t->pieces = (gmi_plan_piece_t *)(uintptr_t)t->input.pieces;
  return 0;
}

static void free_trace(trace_t *t) {
  if (trace_manager != 0) { /* the bundle owns the arrays */
    gmi_plan_bundle_free(&trace_bundle);
    (void)gemini_manager_close(trace_manager);
    return;
  }
  free(t->ops);
  free(t->accesses);
  free(t->pieces);
  free(t->piece_chunks);
  free(t->kind);
}

/* ---- many ranks ---- */
static int plan_of_ranks(const plan_ranks_config_t *c) {
  plan_ranks_t p;
  row_t row;
  char error[256], name[64];
  if (!plan_ranks_make(c, &p, error, sizeof error)) {
    fprintf(stderr, "bench_plan: no plan for %s on %" PRIu64 " ranks: %s\n", c->shape.name, c->ranks, error);
    plan_ranks_free(&p);
    return CLI_EXIT_FAILURE;
  }
  const uint64_t compute_ns = p.plan.compute_ns;
  const struct {
    const char *name;
    uint64_t ns;
  } terms[] = { { "compute", compute_ns },
                { "copies to the device", p.plan.fetch_busy_ns },
                { "copies to the host", p.plan.evict_busy_ns },
                { "updates on the host", p.plan.update_busy_ns },
                { "gathers", p.plan.gather_busy_ns },
                { "sums", p.plan.sum_busy_ns } };
  uint32_t binds = 0;
  for (uint32_t i = 1; i < sizeof terms / sizeof *terms; i++)
    if (terms[i].ns > terms[binds].ns) binds = i;
  snprintf(name, sizeof name, "llama-%s-%s-%" PRIu64 "x%" PRIu64, c->shape.name, c->hybrid ? "hybrid" : "full",
           c->hosts, c->ranks / c->hosts);
  row_begin(&row, "plan", name);
  row_rounded(&row, "value", (double)p.plan.predicted_ns * 1e-9, 4);
  row_text(&row, "unit", "s");
  row_u64(&row, "ranks", c->ranks);
  row_u64(&row, "hosts", c->hosts);
  row_text(&row, "sharding", c->hybrid ? "hybrid" : "full");
  row_u64(&row, "params", p.params);
  row_u64(&row, "tokens", c->tokens * c->ranks);
  row_rounded(&row, "plan_seconds", p.plan_seconds, 6);
  row_u64(&row, "moved_bytes", p.plan.fetch_count * p.input.link_bytes);
  row_u64(&row, "optimum_bytes", p.plan.optimum_count * p.input.link_bytes);
  row_u64(&row, "gathered_bytes", p.plan.traffic->gathered);
  row_u64(&row, "reduced_bytes", p.plan.traffic->summed);
  row_u64(&row, "slices_fetched_bytes", p.plan.traffic->fetched);
  row_u64(&row, "rank_bytes", p.rank_bytes);
  row_u64(&row, "device_budget", c->device_bytes);
  row_u64(&row, "gathered_share", p.share);
  row_u64(&row, "pieces", p.input.piece_count);
  row_u64(&row, "device_pieces", p.plan.device_piece_count);
  row_rounded(&row, "predicted_seconds", (double)p.plan.predicted_ns * 1e-9, 4);
  row_rounded(&row, "bound_seconds", (double)terms[binds].ns * 1e-9, 4);
  row_text(&row, "binds", terms[binds].name);
  row_rounded(&row, "compute_seconds", (double)compute_ns * 1e-9, 4);
  row_rounded(&row, "gather_seconds", (double)p.plan.gather_busy_ns * 1e-9, 4);
  row_rounded(&row, "sum_seconds", (double)p.plan.sum_busy_ns * 1e-9, 4);
  plan_ranks_free(&p);
  return row_end(&row) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}

/* ---- main ---- */

/* The reference takes time in proportion to accesses x stages, or more, so it runs only on small traces. */
#define REFERENCE_LIMIT UINT64_C(20000000)

int main(int argc, char **argv) {
  static const char *const shardings[] = { "full", "hybrid", NULL };
  static const char *const policies[] = { "auto", "cuda", "cpu", NULL };
  static const uint32_t placements[] = { GEMINI_PLACEMENT_AUTO, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU };
  uint64_t ops = 10000, tensors = 100000, frames = 0, runs = 3, device_bytes = 0, chunk_bytes = 0;
  uint32_t policy = 0, size = 0;
  plan_ranks_config_t many = { .tokens = 16384,
                               .host_bytes = UINT64_C(2) << 40,
                               .operations = UINT64_C(600000000000000),
                               .memory_rate = UINT64_C(4000000000000),
                               .copy_rate = UINT64_C(40000000000),
                               .inside_rate = UINT64_C(300000000000),
                               .between_rate = UINT64_C(50000000000),
                               .host_rate = UINT64_C(200000000000),
                               .latency_ns = 30000 };
  const char *trace_path = NULL;
  bool explain = false;
  const cli_option_t options[] = {
    { "ops", CLI_U64, &ops, "operators of the generated trace", 1, 10000000, NULL },
    { "tensors", CLI_U64, &tensors, "its tensors, one chunk each", 4, 100000000, NULL },
    { "frames", CLI_U64, &frames, "device budget in chunks; default: a fifth of the tensors, 80 at least", 1, 100000000,
      NULL },
    { "policy", CLI_CHOICE, &policy, "placement to plan", 0, 0, policies },
    { "runs", CLI_U64, &runs, "times the plan is made; times are their median", 1, 99, NULL },
    { "trace", CLI_STRING, &trace_path, "plan a recorded trace instead (train_gpt --trace writes one)", 0, 0, NULL },
    { "device-mem", CLI_SIZE, &device_bytes, "its device budget; default: as recorded", 65536, UINT64_C(1) << 45,
      NULL },
    { "chunk-size", CLI_SIZE, &chunk_bytes, "its chunk size, a power of two; default: as recorded", 65536,
      UINT64_C(1) << 30, NULL },
    { "ranks", CLI_U64, &many.ranks, "instead, plan a step of one of so many ranks that train a LLaMA", 1, 65536,
      NULL },
    { "hosts", CLI_U64, &many.hosts, "machines of these ranks; default: one for 8", 1, 65536, NULL },
    { "size", CLI_CHOICE, &size, "the LLaMA", 0, 0, plan_ranks_names },
    { "sharding", CLI_CHOICE, &many.hybrid, "over all ranks, or inside each host with copies on the others", 0, 0,
      shardings },
    { "tokens", CLI_U64, &many.tokens, "of a rank's step", 1, UINT64_C(1) << 30, NULL },
    { "host-mem", CLI_SIZE, &many.host_bytes, "of a host", 1, 0, NULL },
    { "gpu-operations", CLI_U64, &many.operations, "a second, of matrix products", 1, 0, NULL },
    { "gpu-memory-rate", CLI_SIZE, &many.memory_rate, "of a GPU, bytes/s", 1, 0, NULL },
    { "copy-rate", CLI_SIZE, &many.copy_rate, "of a GPU's copies, each way, bytes/s", 1, 0, NULL },
    { "inside-rate", CLI_SIZE, &many.inside_rate, "from a GPU to the others of its host, bytes/s", 1, 0, NULL },
    { "between-rate", CLI_SIZE, &many.between_rate, "from a GPU to other hosts, bytes/s", 1, 0, NULL },
    { "host-rate", CLI_SIZE, &many.host_rate, "of a host's memory in updates, bytes/s", 1, 0, NULL },
    { "latency-ns", CLI_U64, &many.latency_ns, "of a gather or a sum", 0, UINT64_C(1000000000), NULL },
    { "explain", CLI_FLAG, &explain, "also print the plan in words, on standard error", 0, 0, NULL },
    { NULL, 0, NULL, NULL, 0, 0, NULL },
  };
  int usage = cli_parse("bench_plan", "Measures the time, memory and quality of plans.", options, argc, argv);
  if (usage >= 0) return usage;
  uint32_t placement = placements[policy];
  if (many.ranks != 0) {
    if (many.hosts == 0) many.hosts = (many.ranks + 7) / 8;
    many.shape = plan_ranks_shapes[size];
    many.device_bytes = device_bytes != 0 ? device_bytes : UINT64_C(128) << 30;
    many.chunk_bytes = chunk_bytes != 0 ? chunk_bytes : UINT64_C(64) << 20;
    if (many.ranks % many.hosts == 0) return plan_of_ranks(&many);
    cli_error("bench_plan", "--ranks %" PRIu64 " is not a multiple of --hosts %" PRIu64, many.ranks, many.hosts);
    return CLI_EXIT_USAGE;
  }

  trace_t t = { 0 };
  char error[512] = "out of memory, for the trace", name[96];
  if (frames == 0) frames = tensors / 5 > 80 ? tensors / 5 : 80;
  int failed = trace_path != NULL
                   ? load_trace(&t, trace_path, device_bytes, chunk_bytes, placement, error, sizeof error)
                   : generate_trace(&t, (uint32_t)ops, (uint32_t)tensors, (uint32_t)frames);
  if (failed) {
    fprintf(stderr, "bench_plan: no trace: %s\n", error);
    free_trace(&t);
    return 1;
  }
  t.input.placement = placement;

  gmi_plan_t plan = { 0 };
  gmi_plan_failure_t failure = { 0, 0, 0, 0 };
  double seconds[99];
  uint64_t heap_bytes = 0;
  for (uint64_t run = 0; run < runs; run++) {
    gmi_plan_free(&plan);
    uint64_t before_bytes = heap_now_bytes;
    heap_peak_bytes = before_bytes;
    uint64_t begin_ns = cli_now_ns();
    gemini_status_t status = gmi_plan_make(&t.input, &plan, &failure);
    seconds[run] = 1e-9 * (double)(cli_now_ns() - begin_ns);
    heap_bytes = heap_peak_bytes - before_bytes;
    if (status == GEMINI_ERR_OOM_DEVICE)
      fprintf(stderr, "bench_plan: op %" PRIu32 " does not fit: %" PRIu64 " frames, %" PRIu64 " there\n", failure.op,
              failure.need_frames, failure.have_frames);
    else if (status != GEMINI_OK)
      fprintf(stderr, "bench_plan: planning failed: status %d, none other than 0\n", status);
    if (status != GEMINI_OK) {
      free_trace(&t);
      return 1;
    }
  }
  cli_sort(seconds, runs);
  double plan_seconds = seconds[runs / 2];

  uint64_t accesses = t.ops[t.input.op_count].access_first, optimum = plan.optimum_count;
  const char *optimum_from = "plan";
  if ((accesses + t.pieces[t.input.piece_count].chunk_first) * (t.input.op_count + plan.device_piece_count) <=
      REFERENCE_LIMIT) {
    optimum = min_fetch(&t.input, plan.piece_on_device);
    optimum_from = "reference";
  }
  if (explain) {
    char text[4096];
    gmi_plan_explain(&t.input, &plan, NULL, text, sizeof text);
    fputs(text, stderr);
  }
  row_t row;
  snprintf(name, sizeof name, "%s-%s-%" PRIu32 "x%" PRIu32, trace_path != NULL ? "recorded" : "generated",
           policies[policy], t.input.op_count, t.input.chunk_count);
  row_begin(&row, "plan", name);
  row_rounded(&row, "value", plan_seconds, 6);
  row_text(&row, "unit", "s");
  row_rounded(&row, "plan_seconds", plan_seconds, 6);
  row_rounded(&row, "plan_seconds_max", seconds[runs - 1], 6);
  row_u64(&row, "runs", runs);
  row_u64(&row, "moved_bytes", plan.fetch_count * t.input.link_bytes);
  row_u64(&row, "optimum_bytes", optimum * t.input.link_bytes);
  row_text(&row, "optimum_from", optimum_from);
  row_u64(&row, "written_back_bytes", plan.evict_dirty_count * t.input.link_bytes);
  row_u64(&row, "ops", t.input.op_count);
  row_u64(&row, "chunks", t.input.chunk_count);
  row_u64(&row, "accesses", accesses);
  row_u64(&row, "frames", t.input.frame_count);
  row_u64(&row, "pieces", t.input.piece_count);
  row_u64(&row, "device_pieces", plan.device_piece_count);
  row_rounded(&row, "predicted_seconds", (double)plan.predicted_ns * 1e-9, 6);
  row_rounded(&row, "stall_seconds", (double)(plan.predicted_ns - plan.compute_ns) * 1e-9, 6);
  double bytes_per_tensor = HEAP_IS_COUNTED ? (double)heap_bytes / (double)t.input.chunk_count : NAN;
  row_rounded(&row, "bytes_per_tensor", bytes_per_tensor, 1);
  gmi_plan_free(&plan);
  free_trace(&t);
  return row_end(&row) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}
