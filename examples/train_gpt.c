/* train_gpt: trains a GPT on the bytes of a text, with model data managed by libgemini. An example to copy from.
 * SPDX-License-Identifier: Apache-2.0
 *
 * How a training program uses libgemini, and where it does so here:
 *
 * open a manager with budgets, make arenas, register tensors      set_up() below, memory_open() and memory_register()
 * an iteration is forward, backward, update                       train_step() below an operator acquires its tensors,
 * allocates its activations,    model_block() and its neighbours in gpt_model.c, queues its work, releases what it
 * acquired                      memory_acquire() ... memory_release() an update walks over all parameters, on the
 * device and on the   update_span() below, memory_update() host, wherever each chunk is close
 * main() below, memory_close()
 *
 * The functions memory_*() are in memory.c: most of them are one call of the library. gpt_model.c has the operators of
 * the model. train_gpt_report.c has the options and the report, which your own program does not need.
 * With --ranks the program becomes several processes, in train_gpt_ranks.c; docs/groups.md says what changes.
 *
 * Losses and parameters do not depend, to the last bit, on the placement, the budgets or the timing. The placement
 * "none", which runs without libgemini, is the reference for that; for several ranks, with as many micro-batches. They do depend on the kind of device: a GPU adds the
 * terms of matrix products in another order than the CPU. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/cli.h"
#include "gemini.h"
#include "gpt_model.h"
#include "memory.h"
#include "train_gpt_ranks.h"
#include "train_gpt_report.h"

/* ---- Open ---- */

/* The manager's configuration. It starts as GEMINI_CONFIG_INIT; a field that is zero means the library's default. */
static gemini_config_t config_of(const trainer_t *t) {
  static const uint32_t placements[] = { 0, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU, GEMINI_PLACEMENT_AUTO,
                                         GEMINI_PLACEMENT_STATIC };
  const options_t *o = &t->o;
  gemini_config_t config = GEMINI_CONFIG_INIT;

  /* Every program sets these: the device, the bytes it may use of each tier, and where model data is placed. */
  config.device = o->device == DEVICE_CUDA ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  config.device_ordinal = o->device == DEVICE_CUDA ? (uint32_t)o->device_ordinal : 0;
  config.device_bytes = t->device_budget_bytes;
  config.host_bytes = t->host_budget_bytes;
  config.file_bytes = t->file_budget_bytes;
  config.file_dir = o->file_dir;
  config.placement = placements[o->policy];
  config.log_level = o->verbose ? GEMINI_LOG_INFO : GEMINI_LOG_WARNING;
  config.log_fn = memory_print_log;

  /* For experiments. */
  config.flags = o->strict ? GEMINI_CONFIG_STRICT : 0;
  config.warmup_iterations = (uint32_t)o->warmup;
  config.update_threads = (uint32_t)o->update_threads;
  config.device_margin_bytes = o->margin_bytes;
  config.chunk_bytes = o->chunk_bytes;
  config.static_param_fraction = o->static_params;
  config.static_optim_fraction = o->static_optim;
  config.sim_h2d_bytes_per_s = o->sim_h2d_bytes_per_s;
  config.sim_d2h_bytes_per_s = o->sim_d2h_bytes_per_s;
  return config;
}

/* Opens the memory, registers the model's tensors, and gives them their first values. Returns the status to exit with,
 * or -1. */
static int open_model(trainer_t *t, const model_shape_t *shape) {
  const options_t *o = &t->o;
  memory_t *memory = &t->memory;
  bool managed = o->policy != POLICY_NONE;
  if (managed) {
    int status = train_gpt_budgets(t, memory_model_bytes(model_elements(shape)));
    if (status >= 0) return status;
  }
  gemini_config_t config = config_of(t);
  if (!train_gpt_ranks_start(t)) return CLI_EXIT_FAILURE; /* before the first manager */
  if (o->zero > 0) {
    memory_open_ranks(memory, t->operators->device, &config, &t->ranks);
  } else {
    memory_open(memory, t->operators->device, managed ? &config : NULL, true);
  }
  if (!model_open(&t->model, memory, t->operators, shape)) {
    cli_error(train_gpt_program, "out of memory for %" PRIu64 " layers", o->layers);
    return CLI_EXIT_FAILURE;
  }
  memory_ready(memory);
  if (memory_error(memory) == NULL && managed && o->timeline != NULL && t->ranks.rank == 0) {
    memory_check(memory, gemini_timeline_start(memory->manager, o->timeline));
  }
  model_initialise(&t->model, o->seed);
  /* Load the trace of an earlier run: plans are made from it, without iterations of warm-up. */
  if (memory_error(memory) == NULL && managed && o->load_trace != NULL) {
    memory_check(memory, gemini_trace_load(memory->manager, o->load_trace));
  }
  return memory_error(memory) == NULL ? -1 : CLI_EXIT_FAILURE;
}

/* ---- The optimizer ---- */

/* libgemini calls this for each span of elements; span->ptr has the addresses of gradient, parameter, master, momentum
 * and variance. For a span on the host it computes, on one of the library's workers, while the device goes on. For a
 * span on the device it only queues work. Both compute the same bits, so it does not matter where a chunk is. */
static void update_span(void *user, const gemini_update_span_t *span) {
  step_update_t *update = user;
  gpt_adamw_span_t adamw = { update->adamw, span->element_count, span->ptr[0], span->ptr[1],
                             span->ptr[2],  span->ptr[3],        span->ptr[4] };
  if (span->tier == GEMINI_TIER_HOST) {
    gpt_cpu.adamw(NULL, &adamw);
  } else if (!memory_queue_on(update->memory, span->stream, update->operators->adamw, &adamw, sizeof adamw)) {
    atomic_store(&update->failed, true);
  }
}

static float learning_rate(const options_t *o, uint64_t step) {
  if (step < o->lr_warmup) return (float)(o->lr * (double)(step + 1) / (double)o->lr_warmup);
  if (o->schedule == SCHEDULE_CONSTANT || o->steps <= o->lr_warmup) return (float)o->lr;
  double progress = (double)(step - o->lr_warmup) / (double)(o->steps - o->lr_warmup); /* cosine decay to a tenth */
  return (float)(o->lr * (0.55 + 0.45 * cos(3.14159265358979323846 * progress)));
}

/* ---- One step ---- */

static bool every(uint64_t n, uint64_t step) { return n > 0 && (step + 1) % n == 0; }

/* Sequences and first token of a micro-batch: ranks and, without libgemini, micro-batches divide the batch equally. */
static int part_batch(const trainer_t *t) { return (int)(t->o.batch / t->parts_count); }
static const int32_t *part_tokens(const trainer_t *t, int micro_batch, int context) {
  int part = (int)t->ranks.rank + micro_batch;
  return t->tokens + (int64_t)part * part_batch(t) * (context + 1);
}

/* The mean loss of all micro-batches; t->parts has those that this process has computed. */
static double mean_loss(trainer_t *t) {
  double sum = 0;
  const double mine = t->parts[0];
  if (t->o.zero > 0) memory_exchange(&t->memory, &mine, sizeof mine, t->parts);
  for (uint64_t part = 0; part < t->parts_count; part++) sum = part == 0 ? t->parts[0] : sum + t->parts[part];
  return sum / (double)t->parts_count;
}

/* Forward and backward pass of a micro-batch. */
static void pass(trainer_t *t, int context, int skipped, int micro_batch) {
  memory_t *memory = &t->memory;
  model_t *model = &t->model;
  int layers = (int)t->o.layers;
  memory_phase(memory, GEMINI_PHASE_FORWARD);
  model_embed(model, part_batch(t), context, part_tokens(t, micro_batch, context));
  for (int layer = 0; layer < layers; layer++) {
    if (layer == skipped) {
      model_block_skip(model, layer);
    } else {
      model_block(model, layer);
    }
  }
  memory_phase(memory, GEMINI_PHASE_BACKWARD);
  model_head(model, 1, &t->parts[micro_batch]);
  for (int layer = layers - 1; layer >= 0; layer--) {
    if (layer != skipped) {
      model_block_backward(model, layer);
    } else {
      model_block_skip_backward(model, layer);
    }
  }
  model_embed_backward(model);
}

/* One iteration: forward, backward, norm, update. All calls only queue work, except the norm, which waits. */
static void train_step(trainer_t *t, uint64_t step) {
  const options_t *o = &t->o;
  memory_t *memory = &t->memory;
  int context = (int)o->context, micro_batches = (int)o->micro_batches;
  if (every(o->context_every, step)) context *= 2;
  int skipped = every(o->skip_layer_every, step) ? (int)(step / o->skip_layer_every % o->layers) : -1;
  text_batch(&t->text, &t->random, (int)o->batch, context, t->tokens); /* of all ranks */

  /* memory_iteration_begin() and, below, memory_iteration_end(); with ranks they count bytes, too. */
  const train_gpt_traffic_t before = train_gpt_ranks_iteration_begin(t);
  for (int i = 0; i < micro_batches; i++) {
    pass(t, context, skipped, i);
    if (micro_batches > 1) memory_gradients_add(memory, i, micro_batches);
  }

  /* Clipping needs the norm of all gradients before the first parameter changes. Without clipping nothing waits
   * here. */
  float parts = (float)t->parts_count; /* gradients are sums over these; what clips and updates is their mean */
  t->norms[step] = o->clip > 0 ? memory_gradient_norm(memory, t->operators->squares) / (double)parts : 0;
  gpt_adamw_t adamw = { .learning_rate = learning_rate(o, step),
                        .beta1 = 0.9f,
                        .beta2 = 0.95f,
                        .epsilon = 1e-8f,
                        .weight_decay = (float)o->weight_decay,
                        .gradient_scale = gpt_clip_scale(t->norms[step], o->clip) / parts,
                        .step = (uint32_t)(step + 1) };
  step_update_t *update = &t->updates[step];
  update->operators = t->operators;
  update->memory = memory;
  update->adamw = gpt_adamw_factors(&adamw);
  memory_phase(memory, GEMINI_PHASE_UPDATE);
  memory_update(memory, &memory_optimizer, 0, 0, update_span, update);
  train_gpt_ranks_iteration_end(t, &before);
  memory_synchronize(memory); /* waits for the loss; updates may still be running */
  t->losses[step] = mean_loss(t);
  if (step == 0) t->gathered_in_first = train_gpt_ranks_stats(t).gathered_chunks;
}

/* Evaluates the loss, always on the same text: an iteration that ends after the head, unlike the recorded ones. */
static void evaluate(trainer_t *t) {
  uint64_t random = t->o.seed ^ UINT64_C(0x5eed0fe7a1);
  text_batch(&t->text, &random, (int)t->o.batch, (int)t->o.context, t->tokens);
  memory_iteration_begin(&t->memory);
  memory_phase(&t->memory, GEMINI_PHASE_FORWARD);
  for (int i = 0; i < (int)t->o.micro_batches; i++) {
    model_embed(&t->model, part_batch(t), (int)t->o.context, part_tokens(t, i, (int)t->o.context));
    for (int layer = 0; layer < (int)t->o.layers; layer++) model_block(&t->model, layer);
    model_head(&t->model, 0, &t->parts[i]);
    model_drop(&t->model);
  }
  memory_iteration_end(&t->memory);
  memory_synchronize(&t->memory);
  t->eval_losses[t->eval_count++] = mean_loss(t);
}

/* ---- The loop ---- */

/* False after a failure, which memory_error() describes, or when a loss is not finite or an update could not be queued,
 * which is printed here. */
static bool train(trainer_t *t) {
  for (uint64_t step = 0; step < t->o.steps; step++) {
    uint64_t start_ns = cli_now_ns();
    train_step(t, step);
    if (memory_error(&t->memory) != NULL) return false;
    t->seconds[step] = 1e-9 * (double)(cli_now_ns() - start_ns);
    if (!isfinite(t->losses[step])) {
      cli_error(train_gpt_program, "training diverged: loss %g in step %" PRIu64 ", not finite", t->losses[step], step);
      return false;
    }
    const bool prints = !t->o.quiet && t->ranks.rank == 0;
    if (prints) {
      uint64_t tokens = t->o.batch * t->o.context * (every(t->o.context_every, step) ? 2 : 1);
      printf("step %4" PRIu64 "/%" PRIu64 "  loss %.4f  norm %.3f  %.0f tokens/s  %.1f ms\n", step + 1, t->o.steps,
             t->losses[step], t->norms[step], (double)tokens / t->seconds[step], 1e3 * t->seconds[step]);
      fflush(stdout);
    }
    if (!every(t->o.eval_every, step)) continue;
    evaluate(t);
    if (memory_error(&t->memory) != NULL) return false;
    if (prints) printf("step %4" PRIu64 "  evaluation loss %.4f\n", step + 1, t->eval_losses[t->eval_count - 1]);
  }
  memory_update_wait(&t->memory);
  for (uint64_t step = 0; step < t->o.steps; step++) {
    if (!atomic_load(&t->updates[step].failed)) continue;
    cli_error(train_gpt_program, "cannot queue an update on the device: step %" PRIu64, step + 1);
    return false;
  }
  return memory_error(&t->memory) == NULL;
}

/* ---- Setting up ---- */

/* Returns the status to exit with, or -1 to go on. */
static int set_up(trainer_t *t) {
  const options_t *o = &t->o;
  char message[512];
  uint64_t longest = o->context * (o->context_every > 0 ? 2 : 1);
  if (!text_load(&t->text, o->text, message, sizeof message)) {
    cli_error(train_gpt_program, "%s; name one with --text", message);
    return CLI_EXIT_FAILURE;
  }
  if (t->text.count <= longest) {
    cli_error(train_gpt_program,
              "text too short: %" PRIu64 " bytes, more than the longest context of %" PRIu64 " needed", t->text.count,
              longest);
    return CLI_EXIT_FAILURE;
  }
  t->operators = &gpt_cpu;
  if (o->device == DEVICE_CUDA) {
    t->gpu = gpu_open(train_gpt_program, (uint32_t)o->device_ordinal, o->cublas);
    if (t->gpu == NULL || !device_cuda_open(t->gpu) || !gpt_cuda_open()) return CLI_EXIT_FAILURE;
    t->operators = &gpt_cuda;
  }
  const device_t *device = t->operators->device;
  t->random = o->seed + UINT64_C(0xda7a);
  t->tokens = device->host_alloc(o->batch * (longest + 1) * sizeof *t->tokens);
  t->updates = calloc(o->steps, sizeof *t->updates);
  t->parts_count = o->ranks * o->micro_batches;
  t->parts = device->host_alloc(t->parts_count * sizeof *t->parts);
  t->losses = calloc(o->steps, sizeof *t->losses);
  t->norms = calloc(o->steps, sizeof *t->norms);
  t->seconds = calloc(o->steps, sizeof *t->seconds);
  t->eval_losses = calloc(o->steps, sizeof *t->eval_losses);
  model_shape_t shape = { (int)o->layers, (int)o->width, (int)o->heads, (int)longest };
  if (t->tokens == NULL || t->updates == NULL || t->parts == NULL || t->losses == NULL || t->norms == NULL ||
      t->seconds == NULL || t->eval_losses == NULL) {
    cli_error(train_gpt_program, "out of memory for the records of %" PRIu64 " steps", o->steps);
    return CLI_EXIT_FAILURE;
  }
  return open_model(t, &shape);
}

int main(int argc, char **argv) {
  static trainer_t t;
  int status = train_gpt_options(&t.o, argc, argv);
  if (status >= 0) return status;
  gpt_setup();
  status = set_up(&t);
  if (status < 0) status = train(&t) && train_gpt_report(&t) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
  memory_close(&t.memory);
  if (memory_error(&t.memory) != NULL) {
    cli_error(train_gpt_program, "%s", memory_error(&t.memory));
    status = CLI_EXIT_FAILURE;
  }
  model_close(&t.model);
  text_free(&t.text);
  if (t.operators != NULL) {
    t.operators->device->host_free(t.tokens);
    t.operators->device->host_free(t.parts);
  }
  free(t.updates);
  free(t.losses);
  free(t.eval_losses);
  free(t.norms);
  free(t.seconds);
  device_cuda_close();
  gpu_close(t.gpu);
  if (t.whole != NULL) fclose(t.whole);
  return train_gpt_ranks_finish(&t, status);
}
