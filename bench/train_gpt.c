/* The main job: trains a GPT on the bytes of a text, its model data under libgemini.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Where to look when writing a training loop of your own:
 *   gpt/memory.c  opens a manager, makes the arenas, registers tensors, acquires, releases, allocates, updates
 *   gpt/model.c   the operators: what each acquires, and where a gradient takes the place of its parameter
 *   here          the loop, and the optimizer as libgemini calls it on the host or queues it on the device
 *
 *   gpt/device.h  what computes: the CPU, or a GPU by kernels and cuBLAS
 *
 * The results, losses and parameters to the last bit, do not depend on the policy, the budgets or the timing; policy
 * none, which does without libgemini, is the reference for that. They do depend on what computes: a GPU adds the terms of
 * matrix products in another order than the CPU. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/cli.h"
#include "common/row.h"
#include "gemini.h"
#include "gpt/device.h"
#include "gpt/gpt.h"
#include "gpt/memory.h"
#include "gpt/model.h"
#include "gpt/text.h"

static const char program[] = "train_gpt";

/* ---- Options ---- */

enum { POLICY_NONE, POLICY_CUDA, POLICY_CPU, POLICY_AUTO, POLICY_STATIC };
static const char *const policy_names[] = { "none", "cuda", "cpu", "auto", "static", NULL };
enum { SCHEDULE_CONSTANT, SCHEDULE_COSINE };
static const char *const schedule_names[] = { "constant", "cosine", NULL };
enum { DEVICE_SIM, DEVICE_CUDA };
static const char *const device_names[] = { "sim", "cuda", NULL };

typedef struct options {
  const char *text, *device_mem, *host_mem, *file_dir, *trace, *load_trace, *timeline, *cublas;
  uint32_t policy, schedule, device;
  uint64_t host_mem_bytes, file_mem_bytes, window_bytes, margin_bytes, sim_h2d_bytes_per_s, sim_d2h_bytes_per_s;
  uint64_t layers, width, heads, context, batch, steps, seed, warmup, update_threads, device_ordinal;
  uint64_t lr_warmup, eval_every, context_every, skip_layer_every;
  double lr, weight_decay, clip, static_params, static_optim;
  bool strict, explain, quiet, verbose;
} options_t;

static int parse_options(options_t *o, int argc, char **argv) {
  *o = (options_t){ .text = "/usr/share/common-licenses",
                    .device_mem = "30%",
                    .policy = POLICY_AUTO,
                    .schedule = SCHEDULE_COSINE,
                    .layers = 8,
                    .width = 256,
                    .heads = 4,
                    .context = 64,
                    .batch = 3,
                    .steps = 120,
                    .seed = 1,
                    .warmup = 1,
                    .lr_warmup = 10,
                    .lr = 1e-3,
                    .weight_decay = 0.1,
                    .clip = 1.0,
                    .static_params = 0.1 };
  const cli_option_t table[] = {
    { "text", CLI_STRING, &o->text, "file, or directory of files, whose bytes are learned", 0, 0, NULL },
    { "policy", CLI_CHOICE, &o->policy, "where model data live", 0, 0, policy_names },
    { "device", CLI_CHOICE, &o->device, "what computes: the CPU, on a simulated device, or a GPU", 0, 0, device_names },
    { "device-ordinal", CLI_U64, &o->device_ordinal, "which GPU", 0, 63, NULL },
    { "cublas", CLI_STRING, &o->cublas, "file of cuBLAS; default: GEMINI_CUBLAS, or what the system finds", 0, 0,
      NULL },
    { "device-mem", CLI_STRING, &o->device_mem, "device budget: bytes, or % of the model data", 0, 0, NULL },
    { "host-mem", CLI_STRING, &o->host_mem, "host budget, likewise; default: the model data, a quarter, and 8 MiB", 0,
      0, NULL },
    { "file", CLI_STRING, &o->file_dir,
      "directory, or several separated by ':', for what neither device nor host can hold", 0, 0, NULL },
    { "file-mem", CLI_SIZE, &o->file_mem_bytes, "file budget; default: as the host's", 0, 0, NULL },
    { "window", CLI_SIZE, &o->window_bytes, "chunk size; default: searched", 0, 0, NULL },
    { "margin", CLI_SIZE, &o->margin_bytes, "of the device budget, left unused", 0, 0, NULL },
    { "static-params", CLI_F64, &o->static_params, "policy static: share of parameters kept on the device", 0, 0,
      NULL },
    { "static-optim", CLI_F64, &o->static_optim, "policy static: the same for optimizer states", 0, 0, NULL },
    { "warmup", CLI_U64, &o->warmup, "iterations recorded before the first plan", 1, 1000, NULL },
    { "update-threads", CLI_U64, &o->update_threads, "workers for updates on the host; 0: cores - 1", 0, 256, NULL },
    { "sim-h2d", CLI_SIZE, &o->sim_h2d_bytes_per_s, "simulated copy rate to the device, bytes/s", 0, 0, NULL },
    { "sim-d2h", CLI_SIZE, &o->sim_d2h_bytes_per_s, "simulated copy rate from the device, bytes/s", 0, 0, NULL },
    { "strict", CLI_FLAG, &o->strict, "make a stale access to an evicted chunk fault", 0, 0, NULL },
    { "layers", CLI_U64, &o->layers, "blocks", 1, MODEL_LAYERS_MAX, NULL },
    { "width", CLI_U64, &o->width, "width of the residual stream", 1, MODEL_WIDTH_MAX, NULL },
    { "heads", CLI_U64, &o->heads, "attention heads; divides the width", 1, MODEL_WIDTH_MAX, NULL },
    { "context", CLI_U64, &o->context, "tokens of a sequence", 1, MODEL_CONTEXT_MAX / 2, NULL },
    { "batch", CLI_U64, &o->batch, "sequences of a step", 1, MODEL_BATCH_MAX, NULL },
    { "steps", CLI_U64, &o->steps, "training steps", 1, 10000000, NULL },
    { "seed", CLI_U64, &o->seed, "of initial values and data order", 0, 0, NULL },
    { "lr", CLI_F64, &o->lr, "learning rate", 0, 0, NULL },
    { "lr-warmup", CLI_U64, &o->lr_warmup, "steps in which it rises from 0", 0, 0, NULL },
    { "lr-schedule", CLI_CHOICE, &o->schedule, "after that", 0, 0, schedule_names },
    { "weight-decay", CLI_F64, &o->weight_decay, "decoupled, of all parameters", 0, 0, NULL },
    { "clip", CLI_F64, &o->clip, "limit of the gradients' norm; 0: off, and no step waits for all gradients", 0, 0,
      NULL },
    { "eval-every", CLI_U64, &o->eval_every, "a forward pass alone after every N steps; 0: never", 0, 0, NULL },
    { "context-every", CLI_U64, &o->context_every, "twice the context in every Nth step; 0: never", 0, 0, NULL },
    { "skip-layer-every", CLI_U64, &o->skip_layer_every, "leave a block out in every Nth step; 0: never", 0, 0, NULL },
    { "trace", CLI_STRING, &o->trace, "write the last iteration's trace to this file", 0, 0, NULL },
    { "load-trace", CLI_STRING, &o->load_trace, "plan from this trace instead of a warm-up", 0, 0, NULL },
    { "timeline", CLI_STRING, &o->timeline, "write a timeline, Chrome trace JSON, to this file", 0, 0, NULL },
    { "explain", CLI_FLAG, &o->explain, "print the plan in words", 0, 0, NULL },
    { "verbose", CLI_FLAG, &o->verbose, "print what the library logs", 0, 0, NULL },
    { "quiet", CLI_FLAG, &o->quiet, "print the ROW only", 0, 0, NULL },
    { 0 },
  };
  int status = cli_parse(program, "Trains a GPT on the bytes of a text; its model data move as the policy says.", table,
                         argc, argv);
  if (status >= 0) return status;
  if (o->width % o->heads != 0) {
    cli_error(program, "heads do not divide the width: width %" PRIu64 ", heads %" PRIu64, o->width, o->heads);
    return CLI_EXIT_USAGE;
  }
  if (o->static_params > 1 || o->static_optim > 1) {
    cli_error(program, "bad share: --static-params %g --static-optim %g, at most 1", o->static_params, o->static_optim);
    return CLI_EXIT_USAGE;
  }
  return -1;
}

/* ---- Optimizer ---- */

/* One step's update. Spans of it may still be under way when the next steps run, so each step has its own. */
typedef struct step_update {
  gpt_adamw_factors_t adamw;
  const gpt_device_t *device;
  gemini_manager_t manager; /* 0: plain memory */
  atomic_bool failed;       /* a span could not be queued */
} step_update_t;

typedef struct span_job {
  gpt_adamw_factors_t adamw;
  gemini_update_span_t span;
} span_job_t;

static void update_arrays(const gpt_adamw_factors_t *adamw, const gemini_update_span_t *span) {
  gpt_adamw_range(adamw, span->element_count, span->ptr[0], span->ptr[1], span->ptr[2], span->ptr[3], span->ptr[4]);
}

static void span_job_run(void *user) {
  span_job_t *job = user;
  update_arrays(&job->adamw, &job->span);
  free(job);
}

/* On a GPU: its kernel gives the same bits as gpt_adamw_range(), so that it does not matter where a chunk is. */
static void update_on_gpu(step_update_t *update, const gemini_update_span_t *span) {
  void *native = NULL; /* plain: the device's own */
  if (update->manager != 0 && gemini_stream_native(update->manager, span->stream, &native) != GEMINI_OK) {
    atomic_store(&update->failed, true);
    return;
  }
  update->device->adamw(native, &update->adamw, span->element_count, span->ptr[0], span->ptr[1], span->ptr[2],
                        span->ptr[3], span->ptr[4]);
}

/* Called by libgemini for each span: on a worker when its chunks are on the host, else to queue work. */
static void update_span(void *user, const gemini_update_span_t *span) {
  step_update_t *update = user;
  if (span->tier == GEMINI_TIER_HOST) {
    update_arrays(&update->adamw, span);
    return;
  }
  if (update->device->is_gpu) {
    update_on_gpu(update, span);
    return;
  }
  span_job_t *job = malloc(sizeof *job); /* the span itself is gone when the stream gets to it */
  if (job != NULL) {
    *job = (span_job_t){ update->adamw, *span };
    if (gemini_stream_call(update->manager, span->stream, span_job_run, job) == GEMINI_OK) return;
    free(job);
  }
  atomic_store(&update->failed, true);
}

static float learning_rate(const options_t *o, uint64_t step) {
  if (step < o->lr_warmup) return (float)(o->lr * (double)(step + 1) / (double)o->lr_warmup);
  if (o->schedule == SCHEDULE_CONSTANT || o->steps <= o->lr_warmup) return (float)o->lr;
  double progress = (double)(step - o->lr_warmup) / (double)(o->steps - o->lr_warmup); /* down to a tenth */
  return (float)(o->lr * (0.55 + 0.45 * cos(3.14159265358979323846 * progress)));
}

/* ---- The loop ---- */

typedef struct trainer {
  options_t o;
  gpu_t *gpu; /* NULL: the CPU computes */
  const gpt_device_t *device;
  text_t text;
  memory_t memory;
  model_t model;
  uint64_t random;        /* data order */
  int32_t *tokens;        /* of the step: (batch, context + 1); of the device's host memory, as losses, eval_losses */
  step_update_t *updates; /* (steps) */
  double *losses, *norms; /* (steps) */
  double *seconds;        /* (steps) */
  double *eval_losses;    /* (steps), eval_count used */
  uint64_t eval_count;
  uint64_t device_budget_bytes, host_budget_bytes, file_budget_bytes;
} trainer_t;

static bool every(uint64_t n, uint64_t step) { return n > 0 && (step + 1) % n == 0; }

/* One iteration: forward, backward, norm, update. */
static void train_step(trainer_t *t, uint64_t step) {
  const options_t *o = &t->o;
  memory_t *memory = &t->memory;
  model_t *model = &t->model;
  int batch = (int)o->batch, context = (int)o->context, layers = (int)o->layers;
  if (every(o->context_every, step)) context *= 2;
  int skipped = every(o->skip_layer_every, step) ? (int)(step / o->skip_layer_every % o->layers) : -1;
  text_batch(&t->text, &t->random, batch, context, t->tokens);

  memory_iteration_begin(memory);
  memory_phase(memory, GEMINI_PHASE_FORWARD);
  model_embed(model, batch, context, t->tokens);
  for (int layer = 0; layer < layers; layer++) {
    if (layer == skipped) {
      model_block_skip(model, layer);
    } else {
      model_block(model, layer);
    }
  }
  memory_phase(memory, GEMINI_PHASE_BACKWARD);
  model_head(model, 1, &t->losses[step]);
  for (int layer = layers - 1; layer >= 0; layer--) {
    if (layer != skipped) model_block_backward(model, layer);
  }
  model_embed_backward(model);

  /* Clipping needs every gradient before the first parameter changes; without it nothing waits here. */
  t->norms[step] = o->clip > 0 ? memory_gradient_norm(memory) : 0;
  step_update_t *update = &t->updates[step];
  update->device = memory->device;
  update->manager = memory->manager;
  gpt_adamw_t adamw = { .learning_rate = learning_rate(o, step),
                        .beta1 = 0.9f,
                        .beta2 = 0.95f,
                        .epsilon = 1e-8f,
                        .weight_decay = (float)o->weight_decay,
                        .gradient_scale = gpt_clip_scale(t->norms[step], o->clip),
                        .step = (uint32_t)(step + 1) };
  update->adamw = gpt_adamw_factors(&adamw);
  memory_phase(memory, GEMINI_PHASE_UPDATE);
  memory_update(memory, update_span, update);
  memory_iteration_end(memory);
  memory_synchronize(memory); /* for the loss; updates may still be under way */
}

/* An iteration that departs from what was recorded: it ends behind the head. Always the same text. */
static void evaluate(trainer_t *t) {
  uint64_t random = t->o.seed ^ UINT64_C(0x5eed0fe7a1);
  text_batch(&t->text, &random, (int)t->o.batch, (int)t->o.context, t->tokens);
  memory_iteration_begin(&t->memory);
  memory_phase(&t->memory, GEMINI_PHASE_FORWARD);
  model_embed(&t->model, (int)t->o.batch, (int)t->o.context, t->tokens);
  for (int layer = 0; layer < (int)t->o.layers; layer++) model_block(&t->model, layer);
  model_head(&t->model, 0, &t->eval_losses[t->eval_count++]);
  model_drop(&t->model);
  memory_iteration_end(&t->memory);
  memory_synchronize(&t->memory);
}

/* False: memory_error() tells why, unless the loss is at fault, which is told here. */
static bool train(trainer_t *t) {
  for (uint64_t step = 0; step < t->o.steps; step++) {
    uint64_t start_ns = cli_now_ns();
    train_step(t, step);
    if (memory_error(&t->memory) != NULL) return false;
    t->seconds[step] = 1e-9 * (double)(cli_now_ns() - start_ns);
    if (!isfinite(t->losses[step])) {
      cli_error(program, "training diverged: loss %g in step %" PRIu64 ", not finite", t->losses[step], step);
      return false;
    }
    if (!t->o.quiet) {
      uint64_t tokens = t->o.batch * t->o.context * (every(t->o.context_every, step) ? 2 : 1);
      printf("step %4" PRIu64 "/%" PRIu64 "  loss %.4f  norm %.3f  %.0f tokens/s  %.1f ms\n", step + 1, t->o.steps,
             t->losses[step], t->norms[step], (double)tokens / t->seconds[step], 1e3 * t->seconds[step]);
      fflush(stdout);
    }
    if (!every(t->o.eval_every, step)) continue;
    evaluate(t);
    if (memory_error(&t->memory) != NULL) return false;
    if (!t->o.quiet) printf("step %4" PRIu64 "  evaluation loss %.4f\n", step + 1, t->eval_losses[t->eval_count - 1]);
  }
  memory_update_wait(&t->memory);
  for (uint64_t step = 0; step < t->o.steps; step++) {
    if (!atomic_load(&t->updates[step].failed)) continue;
    cli_error(program, "cannot queue an update on the device: step %" PRIu64, step + 1);
    return false;
  }
  return memory_error(&t->memory) == NULL;
}

/* ---- Report ---- */

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Median of the steps after warm-up and two more, or of the last one if there are no more. */
static double median_seconds(trainer_t *t) {
  uint64_t first = t->o.warmup + 2 < t->o.steps ? t->o.warmup + 2 : t->o.steps - 1, count = t->o.steps - first;
  qsort(t->seconds + first, count, sizeof *t->seconds, by_value);
  double upper = t->seconds[first + count / 2];
  return count % 2 == 1 ? upper : 0.5 * (upper + t->seconds[first + count / 2 - 1]);
}

static uint64_t moved_bytes(const gemini_stats_t *stats, int link) {
  uint64_t bytes = 0;
  for (int reason = 0; reason < GEMINI_REASON_COUNT; reason++) bytes += stats->moved_bytes[link][reason];
  return bytes;
}

static void print_places(trainer_t *t, const gemini_stats_t *stats) {
  static const char *const links[GEMINI_LINK_COUNT] = { "host to device", "device to host", "host to file",
                                                        "file to host" };
  char a[32], b[32], c[32], d[32], e[32];
  printf("\n%-14s %12s %12s %12s %12s\n", "lives in", "arena", "device", "host", "file");
  static const char *const kinds[MEMORY_KINDS] = { "parameters", "(gradients)", "masters", "momenta", "variances" };
  for (int kind = 0; kind < MEMORY_KINDS; kind++) {
    gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
    if (!memory_check(&t->memory, gemini_arena_info(t->memory.manager, t->memory.arenas[kind], &info))) return;
    printf("%-14s %12s %12s %12s %12s\n", kinds[kind], cli_format_size(info.size_bytes, a, sizeof a),
           cli_format_size(info.tier_bytes[GEMINI_TIER_DEVICE], b, sizeof b),
           cli_format_size(info.tier_bytes[GEMINI_TIER_HOST], c, sizeof c),
           cli_format_size(info.tier_bytes[GEMINI_TIER_FILE], d, sizeof d));
  }
  printf("%-14s %12s %12s %12s %12s\n", "budget", "", cli_format_size(stats->budget_bytes[0], a, sizeof a),
         cli_format_size(stats->budget_bytes[1], b, sizeof b), cli_format_size(stats->budget_bytes[2], c, sizeof c));
  printf("%-14s %12s %12s %12s %12s\n", "peak", "", cli_format_size(stats->peak_bytes[0], a, sizeof a),
         cli_format_size(stats->peak_bytes[1], b, sizeof b), cli_format_size(stats->peak_bytes[2], c, sizeof c));
  printf("\n%-14s %12s %12s %12s %12s %12s\n", "moved", "demand", "plan", "pressure", "caller", "update");
  for (int link = 0; link < GEMINI_LINK_COUNT; link++) {
    const uint64_t *bytes = stats->moved_bytes[link];
    printf("%-14s %12s %12s %12s %12s %12s\n", links[link], cli_format_size(bytes[0], a, sizeof a),
           cli_format_size(bytes[1], b, sizeof b), cli_format_size(bytes[2], c, sizeof c),
           cli_format_size(bytes[3], d, sizeof d), cli_format_size(bytes[4], e, sizeof e));
  }
  printf("\nchunks of %s; %" PRIu64 " of %" PRIu64 " iterations under a plan, %" PRIu64 " departed, %" PRIu64
         " plans; acquires %" PRIu64 " hits, %" PRIu64 " misses; ops waited %.3f s in all\n",
         cli_format_size(stats->window_bytes, a, sizeof a), stats->planned_iterations, stats->iterations,
         stats->departures, stats->plans, stats->acquire_hits, stats->acquire_misses, 1e-9 * (double)stats->stall_ns);
}

static bool print_plan(memory_t *memory) {
  uint64_t length = 0;
  if (!memory_check(memory, gemini_plan_explain(memory->manager, NULL, 0, &length))) return false;
  char *text = malloc(length + 1);
  if (text == NULL) {
    cli_error(program, "out of memory for the plan's text: %" PRIu64 " bytes", length);
    return false;
  }
  bool ok = memory_check(memory, gemini_plan_explain(memory->manager, text, length + 1, NULL));
  if (ok) printf("\n%s\n", text);
  free(text);
  return ok;
}

static bool report(trainer_t *t) {
  memory_t *memory = &t->memory;
  char a[32], b[32], c[32], hash[17];
  gemini_stats_t stats = GEMINI_STATS_INIT;
  if (memory->managed) {
    if (!memory_check(memory, gemini_stats(memory->manager, &stats))) return false;
    if (t->o.trace != NULL && !memory_check(memory, gemini_trace_save(memory->manager, t->o.trace))) return false;
    if (!t->o.quiet) print_places(t, &stats);
    if (t->o.explain && !print_plan(memory)) return false;
    if (t->o.timeline != NULL && !memory_check(memory, gemini_timeline_stop(memory->manager))) return false;
  } else {
    stats.model_bytes = memory_model_bytes(memory->elements);
    stats.peak_bytes[GEMINI_TIER_DEVICE] = stats.model_bytes + memory->nonmodel_peak_bytes;
  }
  snprintf(hash, sizeof hash, "%016" PRIx64, model_hash(&t->model));
  if (memory_error(memory) != NULL) return false;
  double sec_per_step = median_seconds(t);
  if (!t->o.quiet) {
    printf("\n%" PRIu64
           " parameters, model data %s; non-model peak %s; largest working set %s (%s, %.1f %% of the model "
           "data)\n",
           memory->tensor_elements, cli_format_size(stats.model_bytes, a, sizeof a),
           cli_format_size(memory->nonmodel_peak_bytes, b, sizeof b),
           cli_format_size(memory->working_peak_bytes, c, sizeof c), memory->working_peak_op,
           100.0 * (double)memory->working_peak_bytes / (double)stats.model_bytes);
  }
  row_t row;
  row_begin(&row, program, policy_names[t->o.policy]);
  row_value(&row, sec_per_step, "s");
  row_text(&row, "policy", policy_names[t->o.policy]);
  row_text(&row, "device", t->gpu != NULL ? gpu_name(t->gpu) : device_names[DEVICE_SIM]);
  if (t->gpu != NULL) row_u64(&row, "cublas", (uint64_t)gpu_cublas_version(t->gpu));
  row_u64(&row, "params", memory->tensor_elements);
  row_u64(&row, "model_bytes", stats.model_bytes);
  row_u64(&row, "device_budget", t->device_budget_bytes);
  row_u64(&row, "device_peak", stats.peak_bytes[GEMINI_TIER_DEVICE]);
  row_u64(&row, "host_budget", t->host_budget_bytes);
  row_u64(&row, "host_peak", stats.peak_bytes[GEMINI_TIER_HOST]);
  row_u64(&row, "file_budget", t->file_budget_bytes);
  row_u64(&row, "file_bytes", stats.peak_bytes[GEMINI_TIER_FILE]);
  row_u64(&row, "fetched_bytes", moved_bytes(&stats, GEMINI_LINK_H2D));
  row_u64(&row, "evicted_bytes", moved_bytes(&stats, GEMINI_LINK_D2H));
  row_u64(&row, "file_read_bytes", moved_bytes(&stats, GEMINI_LINK_F2H));
  row_u64(&row, "file_written_bytes", moved_bytes(&stats, GEMINI_LINK_H2F));
  row_u64(&row, "window_bytes", stats.window_bytes);
  row_u64(&row, "nonmodel_peak_bytes", memory->nonmodel_peak_bytes);
  row_u64(&row, "working_set_bytes", memory->working_peak_bytes);
  row_u64(&row, "planned_iterations", stats.planned_iterations);
  row_u64(&row, "departures", stats.departures);
  row_f64(&row, "stall_seconds", 1e-9 * (double)stats.stall_ns);
  row_u64(&row, "steps", t->o.steps);
  row_f64_list(&row, "losses", t->losses, t->o.steps);
  if (t->eval_count > 0) row_f64_list(&row, "eval_losses", t->eval_losses, t->eval_count);
  row_text(&row, "params_hash", hash);
  row_f64(&row, "sec_per_step", sec_per_step);
  row_f64(&row, "predicted_sec_per_step", 1e-9 * (double)stats.predicted_step_ns);
  row_u64(&row, "op_peak_error_bytes", stats.op_peak_error_bytes);
  if (row_end(&row)) return true;
  cli_error(program, "cannot print the result: out of memory, or standard output is closed");
  return false;
}

/* ---- Setting up ---- */

/* The library never prints; what it has to say comes here. */
static void print_log(void *user, int32_t level, const char *message) {
  static const char *const levels[] = { "", "error", "warning", "info", "debug" };
  (void)user;
  fprintf(stderr, "libgemini %s: %s\n", level >= 1 && level <= 4 ? levels[level] : "", message);
}

/* The status to exit with, or -1. */
static int open_memory(trainer_t *t, const model_shape_t *shape) {
  const options_t *o = &t->o;
  if (o->policy == POLICY_NONE) {
    memory_open(&t->memory, t->device, NULL);
    return -1;
  }
  static const uint32_t placements[] = { 0, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU, GEMINI_PLACEMENT_AUTO,
                                         GEMINI_PLACEMENT_STATIC };
  uint64_t model_bytes = memory_model_bytes(model_elements(shape));
  if (!cli_parse_share(o->device_mem, model_bytes, &t->device_budget_bytes) || t->device_budget_bytes == 0) {
    cli_error(program, "bad value of --device-mem: %s, expected a size such as 512MiB or a share such as 30%%",
              o->device_mem);
    return CLI_EXIT_USAGE;
  }
  /* Each arena's last chunk is part empty, which counts when the model is tiny. */
  uint64_t roomy_bytes = model_bytes + model_bytes / 4 + (UINT64_C(8) << 20);
  t->host_budget_bytes = roomy_bytes;
  if (o->host_mem != NULL &&
      (!cli_parse_share(o->host_mem, model_bytes, &t->host_budget_bytes) || t->host_budget_bytes == 0)) {
    cli_error(program, "bad value of --host-mem: %s, expected a size such as 512MiB or a share such as 30%%",
              o->host_mem);
    return CLI_EXIT_USAGE;
  }
  if (o->file_dir != NULL) t->file_budget_bytes = o->file_mem_bytes > 0 ? o->file_mem_bytes : roomy_bytes;
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.flags = o->strict ? GEMINI_CONFIG_STRICT : 0;
  config.placement = placements[o->policy];
  config.device = o->device == DEVICE_CUDA ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  config.device_ordinal = o->device == DEVICE_CUDA ? (uint32_t)o->device_ordinal : 0;
  config.warmup_iterations = (uint32_t)o->warmup;
  config.update_threads = (uint32_t)o->update_threads;
  config.log_level = o->verbose ? GEMINI_LOG_INFO : GEMINI_LOG_WARNING;
  config.device_bytes = t->device_budget_bytes;
  config.device_margin_bytes = o->margin_bytes;
  config.host_bytes = t->host_budget_bytes;
  config.file_bytes = t->file_budget_bytes;
  config.window_bytes = o->window_bytes;
  config.static_param_fraction = o->static_params;
  config.static_optim_fraction = o->static_optim;
  config.sim_h2d_bytes_per_s = o->sim_h2d_bytes_per_s;
  config.sim_d2h_bytes_per_s = o->sim_d2h_bytes_per_s;
  config.file_dir = o->file_dir;
  config.log_fn = print_log;
  memory_open(&t->memory, t->device, &config);
  return -1;
}

/* The status to exit with, or -1. */
static int set_up(trainer_t *t) {
  const options_t *o = &t->o;
  char message[512];
  uint64_t longest = o->context * (o->context_every > 0 ? 2 : 1);
  if (!text_load(&t->text, o->text, message, sizeof message)) {
    cli_error(program, "%s; name one with --text", message);
    return CLI_EXIT_FAILURE;
  }
  if (t->text.count <= longest) {
    cli_error(program, "text too short: %" PRIu64 " bytes, more than the longest context of %" PRIu64 " needed",
              t->text.count, longest);
    return CLI_EXIT_FAILURE;
  }
  t->device = &gpt_device_cpu;
  if (o->device == DEVICE_CUDA) {
    t->gpu = gpu_open(program, (uint32_t)o->device_ordinal, o->cublas);
    if (t->gpu == NULL || !gpt_cuda_open(t->gpu)) return CLI_EXIT_FAILURE;
    t->device = &gpt_device_cuda;
  }
  t->random = o->seed + UINT64_C(0xda7a);
  t->tokens = t->device->host_alloc(o->batch * (longest + 1) * sizeof *t->tokens);
  t->updates = calloc(o->steps, sizeof *t->updates);
  t->losses = t->device->host_alloc(o->steps * sizeof *t->losses);
  t->norms = calloc(o->steps, sizeof *t->norms);
  t->seconds = calloc(o->steps, sizeof *t->seconds);
  t->eval_losses = t->device->host_alloc(o->steps * sizeof *t->eval_losses);
  model_shape_t shape = { (int)o->layers, (int)o->width, (int)o->heads, (int)longest };
  if (t->tokens == NULL || t->updates == NULL || t->losses == NULL || t->norms == NULL || t->seconds == NULL ||
      t->eval_losses == NULL) {
    cli_error(program, "out of memory for the records of %" PRIu64 " steps", o->steps);
    return CLI_EXIT_FAILURE;
  }
  int status = open_memory(t, &shape);
  if (status >= 0) return status;
  if (!model_open(&t->model, &t->memory, &shape)) {
    cli_error(program, "out of memory for %" PRIu64 " layers", o->layers);
    return CLI_EXIT_FAILURE;
  }
  memory_ready(&t->memory);
  if (memory_error(&t->memory) == NULL && t->memory.managed && o->timeline != NULL) {
    memory_check(&t->memory, gemini_timeline_start(t->memory.manager, o->timeline));
  }
  model_initialise(&t->model, o->seed);
  if (memory_error(&t->memory) == NULL && t->memory.managed && o->load_trace != NULL) {
    memory_check(&t->memory, gemini_trace_load(t->memory.manager, o->load_trace));
  }
  return memory_error(&t->memory) == NULL ? -1 : CLI_EXIT_FAILURE;
}

int main(int argc, char **argv) {
  static trainer_t t;
  int status = parse_options(&t.o, argc, argv);
  if (status >= 0) return status;
  gpt_setup();
  status = set_up(&t);
  if (status < 0) status = train(&t) && report(&t) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
  if (t.device != NULL) memory_close(&t.memory);
  if (memory_error(&t.memory) != NULL) {
    cli_error(program, "%s", memory_error(&t.memory));
    status = CLI_EXIT_FAILURE;
  }
  model_close(&t.model);
  text_free(&t.text);
  if (t.device != NULL) {
    t.device->host_free(t.tokens);
    t.device->host_free(t.losses);
    t.device->host_free(t.eval_losses);
  }
  free(t.updates);
  free(t.norms);
  free(t.seconds);
  if (t.gpu != NULL) gpt_cuda_close();
  gpu_close(t.gpu);
  return status;
}
