/* The options of train_gpt, and the report at its end. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "train_gpt_report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/cli.h"
#include "common/row.h"
#include "train_gpt_ranks.h"

const char *train_gpt_program = "train_gpt";

/* ---- Options ---- */

static const char *const policy_names[] = { "none", "cuda", "cpu", "auto", "static", NULL };
static const char *const zero_names[] = { "0", "1", "2", "3", "auto", NULL };
static const char *const schedule_names[] = { "constant", "cosine", NULL };
static const char *const device_names[] = { "sim", "cuda", NULL };

int train_gpt_options(options_t *o, int argc, char **argv) {
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
                    .ranks = 1,
                    .micro_batches = 1,
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
    { "chunk-size", CLI_SIZE, &o->chunk_bytes, "chunk size; default: searched", 0, 0, NULL },
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
    { "ranks", CLI_U64, &o->ranks,
      "processes that share the model data, each with its part of the batch; budgets are those of one", 1,
      TRAIN_GPT_RANKS_MAX, NULL },
    { "zero", CLI_CHOICE, &o->zero,
      "what ranks share: 1 states, 2 and gradients, 3 and parameters; auto: as 3, and what stays gathered is predicted "
      "to be fastest; 0: 3, or with one rank, no group",
      0, 0, zero_names },
    { "micro-batches", CLI_U64, &o->micro_batches,
      "policy none: parts of the batch, one after the other, as so many ranks compute them", 1, MODEL_BATCH_MAX, NULL },
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
  int status =
      cli_parse(train_gpt_program, "Trains a GPT on the bytes of a text; its model data move as the policy says.",
                table, argc, argv);
  if (status >= 0) return status;
  if (o->width % o->heads != 0) {
    cli_error(train_gpt_program, "heads do not divide the width: width %" PRIu64 ", heads %" PRIu64, o->width,
              o->heads);
    return CLI_EXIT_USAGE;
  }
  if (o->static_params > 1 || o->static_optim > 1) {
    cli_error(train_gpt_program, "bad share: --static-params %g --static-optim %g, at most 1", o->static_params,
              o->static_optim);
    return CLI_EXIT_USAGE;
  }
  const uint64_t parts = o->ranks * o->micro_batches;
  if (o->ranks > 1 && o->zero == 0) o->zero = 3;
  if (o->zero > 0 && (o->policy == POLICY_NONE || o->device != DEVICE_SIM)) {
    cli_error(train_gpt_program, "ranks need the simulated device and libgemini: not --device cuda, not --policy none");
    return CLI_EXIT_USAGE;
  }
  if (o->micro_batches > 1 && (o->policy != POLICY_NONE || o->device != DEVICE_SIM)) {
    cli_error(train_gpt_program, "--micro-batches %" PRIu64 " needs --policy none and the simulated device",
              o->micro_batches);
    return CLI_EXIT_USAGE;
  }
  if (o->batch % parts != 0) {
    cli_error(train_gpt_program, "the batch has no equal parts: %" PRIu64 " sequences, %" PRIu64 " %s", o->batch, parts,
              o->ranks > 1 ? "ranks" : "micro-batches");
    return CLI_EXIT_USAGE;
  }
  return -1;
}

/* ---- Budgets ---- */

static bool parse_budget(const char *option, const char *text, uint64_t model_bytes, uint64_t *bytes_out) {
  if (cli_parse_share(text, model_bytes, bytes_out) && *bytes_out > 0) return true;
  cli_error(train_gpt_program, "bad value of --%s: %s, expected a size such as 512MiB or a share such as 30%%", option,
            text);
  return false;
}

int train_gpt_budgets(trainer_t *t, uint64_t model_bytes) {
  const options_t *o = &t->o;
  if (!parse_budget("device-mem", o->device_mem, model_bytes, &t->device_budget_bytes)) return CLI_EXIT_USAGE;
  /* The last chunk of each arena is partly unused, which matters for tiny models. */
  uint64_t roomy_bytes = model_bytes + model_bytes / 4 + (UINT64_C(8) << 20);
  t->host_budget_bytes = roomy_bytes;
  if (o->host_mem != NULL && !parse_budget("host-mem", o->host_mem, model_bytes, &t->host_budget_bytes)) {
    return CLI_EXIT_USAGE;
  }
  if (o->file_dir != NULL) t->file_budget_bytes = o->file_mem_bytes > 0 ? o->file_mem_bytes : roomy_bytes;
  return -1;
}

/* ---- Report ---- */

/* The median time of the steps from two after the warm-up on, or the last step's if there are none. */
static double median_seconds(trainer_t *t) {
  uint64_t first = t->o.warmup + 2 < t->o.steps ? t->o.warmup + 2 : t->o.steps - 1, count = t->o.steps - first;
  cli_sort(t->seconds + first, count);
  double upper = t->seconds[first + count / 2];
  return count % 2 == 1 ? upper : 0.5 * (upper + t->seconds[first + count / 2 - 1]);
}

/* The links that the report prints, and their names. */
static const struct {
  uint32_t from_tier, to_tier;
  const char *name, *row;
} links[] = { { GEMINI_TIER_HOST, GEMINI_TIER_DEVICE, "host to device", "fetched_bytes" },
              { GEMINI_TIER_DEVICE, GEMINI_TIER_HOST, "device to host", "evicted_bytes" },
              { GEMINI_TIER_HOST, GEMINI_TIER_FILE, "host to file", "file_written_bytes" },
              { GEMINI_TIER_FILE, GEMINI_TIER_HOST, "file to host", "file_read_bytes" } };
enum { LINKS = sizeof links / sizeof *links };

static void print_places(trainer_t *t, const gemini_stats_t *stats) {
  memory_t *memory = &t->memory;
  char a[32], b[32], c[32];
  const bool sharded = memory->group != NULL; /* where slices are is not known tensor by tensor */
  printf("\n%-14s %12s %12s %12s %12s\n", "lives in", "arena", "device", "host", "file");
  static const char *const kinds[MEMORY_KINDS] = { "parameters", "(gradients)", "masters", "momenta", "variances" };
  for (int kind = 0; kind < MEMORY_KINDS; kind++) {
    gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
    if (!memory_check(memory, gemini_arena_info(memory->manager, memory->arenas[kind], &info))) return;
    printf("%-14s %12s", kinds[kind], cli_format_size(info.size_bytes, a, sizeof a));
    for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT && !sharded; tier++)
      printf(" %12s", cli_format_size(memory_tier_bytes(memory, kind, tier), b, sizeof b));
    printf("%s\n", sharded ? "  of all ranks" : "");
  }
  const gemini_tier_stats_t device = memory_tier(memory, GEMINI_TIER_DEVICE),
                            host = memory_tier(memory, GEMINI_TIER_HOST), file = memory_tier(memory, GEMINI_TIER_FILE);
  printf("%-14s %12s %12s %12s %12s\n", "budget", "", cli_format_size(device.budget_bytes, a, sizeof a),
         cli_format_size(host.budget_bytes, b, sizeof b), cli_format_size(file.budget_bytes, c, sizeof c));
  printf("%-14s %12s %12s %12s %12s\n", "peak", "", cli_format_size(device.peak_bytes, a, sizeof a),
         cli_format_size(host.peak_bytes, b, sizeof b), cli_format_size(file.peak_bytes, c, sizeof c));
  printf("\n%-14s %12s %12s %12s %12s %12s\n", "moved", "demand", "plan", "pressure", "caller", "update");
  for (int i = 0; i < LINKS; i++) {
    printf("%-14s", links[i].name);
    for (uint32_t reason = 0; reason < GEMINI_REASON_COUNT; reason++)
      printf(" %12s",
             cli_format_size(memory_moved_bytes(memory, links[i].from_tier, links[i].to_tier, reason), a, sizeof a));
    printf("\n");
  }
  printf("\nchunks of %s; %" PRIu64 " of %" PRIu64 " iterations under a plan, %" PRIu64 " departed, %" PRIu64
         " plans; acquires %" PRIu64 " hits, %" PRIu64 " misses; ops waited %.3f s in all\n",
         cli_format_size(stats->chunk_bytes, a, sizeof a), stats->planned_iterations, stats->iterations,
         stats->departures, stats->plans, stats->acquire_hits, stats->acquire_misses, 1e-9 * (double)stats->stall_ns);
}

bool train_gpt_report(trainer_t *t) {
  memory_t *memory = &t->memory;
  char a[32], b[32], c[32], hash[17], losses_hash[17];
  gemini_stats_t stats = GEMINI_STATS_INIT;
  uint64_t peaks[GEMINI_TIER_COUNT] = { 0 }, moved[LINKS] = { 0 };
  const gemini_group_stats_t group = train_gpt_ranks_stats(t);
  if (memory->group != NULL) train_gpt_ranks_by_plan(t);
  const bool prints = t->ranks.rank == 0;
  if (memory->managed) {
    for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) peaks[tier] = memory_tier(memory, tier).peak_bytes;
    for (int i = 0; i < LINKS; i++)
      moved[i] = memory_moved_bytes(memory, links[i].from_tier, links[i].to_tier, GEMINI_REASON_ALL);
    if (!memory_check(memory, gemini_stats(memory->manager, &stats))) return false;
    if (prints && t->o.trace != NULL && !memory_check(memory, gemini_trace_save(memory->manager, t->o.trace)))
      return false;
    if (prints && !t->o.quiet) print_places(t, &stats);
    if (prints && t->o.explain && !memory_print_plan(memory)) return false;
    if (prints && t->o.timeline != NULL && !memory_check(memory, gemini_timeline_stop(memory->manager))) return false;
  } else {
    stats.model_bytes = memory_model_bytes(memory->elements);
    peaks[GEMINI_TIER_DEVICE] = stats.model_bytes + memory->nonmodel_peak_bytes;
  }
  snprintf(hash, sizeof hash, "%016" PRIx64, train_gpt_ranks_hash(t));
  if (memory_error(memory) != NULL) return false;
  if (!prints) return true;
  const uint64_t kept_bytes = stats.model_bytes; /* by this rank */
  if (memory->group != NULL) stats.model_bytes = memory_model_bytes(memory->elements);
  uint64_t all_losses = gpt_hash(GPT_HASH_START, t->losses, t->o.steps * sizeof *t->losses);
  all_losses = gpt_hash(all_losses, t->eval_losses, t->eval_count * sizeof *t->eval_losses);
  snprintf(losses_hash, sizeof losses_hash, "%016" PRIx64, all_losses);
  double sec_per_step = median_seconds(t);
  if (!t->o.quiet) {
    printf("\n%" PRIu64
           " parameters, model data %s; non-model peak %s; largest working set %s (%s, %.1f %% of the model "
           "data)\n",
           memory->tensor_elements, cli_format_size(stats.model_bytes, a, sizeof a),
           cli_format_size(memory->nonmodel_peak_bytes, b, sizeof b),
           cli_format_size(memory->working_peak_bytes, c, sizeof c), memory->working_peak_op,
           100.0 * (double)memory->working_peak_bytes / (double)stats.model_bytes);
    if (t->o.zero > 0)
      printf("%" PRIu64 " ranks, ZeRO %s; all together gathered %s from each other, brought %s of their own to "
             "the device and took %s back\n",
             t->o.ranks, zero_names[t->o.zero], cli_format_size(group.gathered_bytes, a, sizeof a),
             cli_format_size(group.fetched_bytes, b, sizeof b), cli_format_size(group.stored_bytes, c, sizeof c));
  }
  row_t row;
  row_begin(&row, train_gpt_program, policy_names[t->o.policy]);
  row_value(&row, sec_per_step, "s");
  row_text(&row, "policy", policy_names[t->o.policy]);
  row_text(&row, "device", t->gpu != NULL ? gpu_name(t->gpu) : device_names[DEVICE_SIM]);
  if (t->gpu != NULL) row_u64(&row, "cublas", (uint64_t)gpu_cublas_version(t->gpu));
  row_u64(&row, "params", memory->tensor_elements);
  row_u64(&row, "model_bytes", stats.model_bytes);
  row_u64(&row, "device_budget", t->device_budget_bytes);
  row_u64(&row, "device_peak", peaks[GEMINI_TIER_DEVICE]);
  row_u64(&row, "host_budget", t->host_budget_bytes);
  row_u64(&row, "host_peak", peaks[GEMINI_TIER_HOST]);
  row_u64(&row, "file_budget", t->file_budget_bytes);
  row_u64(&row, "file_bytes", peaks[GEMINI_TIER_FILE]);
  for (int i = 0; i < LINKS; i++) row_u64(&row, links[i].row, moved[i]);
  row_u64(&row, "chunk_bytes", stats.chunk_bytes);
  row_u64(&row, "nonmodel_peak_bytes", memory->nonmodel_peak_bytes);
  row_u64(&row, "working_set_bytes", memory->working_peak_bytes);
  row_u64(&row, "planned_iterations", stats.planned_iterations);
  row_u64(&row, "departures", stats.departures);
  row_f64(&row, "stall_seconds", 1e-9 * (double)stats.stall_ns);
  if (t->o.zero > 0) {
    row_u64(&row, "ranks", t->o.ranks);
    if (t->o.zero == TRAIN_GPT_ZERO_AUTO) row_text(&row, "zero", zero_names[t->o.zero]);
    else row_u64(&row, "zero", t->o.zero);
    row_u64(&row, "rank_model_bytes", kept_bytes);
    row_u64(&row, "gathered_chunks", group.gathered_chunks);
    row_u64(&row, "gathered_chunks_first_step", t->gathered_in_first);
    row_u64(&row, "gathered_bytes", group.gathered_bytes);
    row_u64(&row, "reduced_chunks", group.reduced_chunks);
    row_u64(&row, "reduced_bytes", group.reduced_bytes);
    row_u64(&row, "planned_gathered_bytes", group.planned_gathered_bytes);
    row_u64(&row, "planned_reduced_bytes", group.planned_reduced_bytes);
    row_u64(&row, "planned_slices_fetched_bytes", group.planned_fetched_bytes);
    row_u64(&row, "iterations_by_plan", t->by_plan.iterations);
    row_u64(&row, "plan_difference_bytes", t->by_plan.difference_bytes);
    row_u64(&row, "slices_fetched_bytes", group.fetched_bytes);
    row_u64(&row, "slices_stored_bytes", group.stored_bytes);
  }
  if (t->o.micro_batches > 1) row_u64(&row, "micro_batches", t->o.micro_batches);
  row_u64(&row, "steps", t->o.steps);
  row_f64_list(&row, "losses", t->losses, t->o.steps);
  if (t->eval_count > 0) row_f64_list(&row, "eval_losses", t->eval_losses, t->eval_count);
  row_text(&row, "losses_hash", losses_hash);
  row_f64(&row, "norm", t->norms[t->o.steps - 1]);
  row_text(&row, "params_hash", hash);
  row_f64(&row, "sec_per_step", sec_per_step);
  row_f64(&row, "predicted_sec_per_step", 1e-9 * (double)stats.predicted_step_ns);
  row_u64(&row, "op_peak_error_bytes", stats.op_peak_error_bytes);
  if (row_end(&row)) return true;
  cli_error(train_gpt_program, "cannot print the result: out of memory, or standard output is closed");
  return false;
}
