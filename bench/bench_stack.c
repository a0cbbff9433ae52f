/* Trains a stack of matrix products with the parameter shapes of a LLaMA under libgemini and with all memory on the
 * GPU, compares the times, and shows what bounds them on this machine. SPDX-License-Identifier: Apache-2.0
 *
 * One process makes both runs, one after the other, with the same kernels, and compares losses and parameters to the
 * bit.
 *   model/llama.c       the operators: what each acquires, allocates and computes
 *   examples/memory.c   where memory comes from and where work runs
 *   model/rates.c       the rates of the machine
 * With --device sim it runs without a GPU, on the simulated device: for tiny sizes only, to show that the loop is
 * right; its times mean nothing. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/cli.h"
#include "common/row.h"
#include "model/llama.h"
#include "model/rates.h"

static const char program[] = "bench_stack";

/* ---- Options ---- */

enum { POLICY_NONE, POLICY_CUDA, POLICY_CPU, POLICY_AUTO, POLICY_STATIC };
static const char *const policy_names[] = { "none", "cuda", "cpu", "auto", "static", NULL };
enum { DEVICE_CUDA, DEVICE_SIM };
static const char *const device_names[] = { "cuda", "sim", NULL };
enum { AGAINST_NONE, AGAINST_SKIP };
static const char *const against_names[] = { "none", "skip", NULL };

/* Parameters: 0.4 M; Sheared-LLaMA-1.3B, OpenLLaMA-3B, LLaMA-7B. */
static const llama_shape_t shapes[] = { { "tiny", 8, 64, 160, 256 },
                                        { "1.3b", 24, 2048, 5504, 32000 },
                                        { "3b", 26, 3200, 8640, 32000 },
                                        { "7b", 32, 4096, 11008, 32000 } };
static const char *const size_names[] = { "tiny", "1.3b", "3b", "7b", NULL };
enum { SIZE_7B = 3, ROWS_MAX = 1 << 20 };

typedef struct options {
  const char *device_mem, *host_mem, *file_dir, *timeline, *trace, *cublas;
  uint32_t size, device, policy, against;
  uint64_t batch, sequence, layers, file_mem_bytes, chunk_bytes, steps, warm_up, update_threads, seed;
  double static_params, static_optim;
  bool explain, quiet, verbose;
} options_t;

static int parse_options(options_t *o, int argc, char **argv) {
  *o = (options_t){ .size = SIZE_7B,
                    .batch = 16,
                    .sequence = 1024,
                    .device_mem = "24GiB",
                    .policy = POLICY_AUTO,
                    .steps = 6,
                    .warm_up = 5,
                    .seed = 1 };
  const cli_option_t table[] = {
    { "size", CLI_CHOICE, &o->size, "parameter shapes", 0, 0, size_names },
    { "layers", CLI_U64, &o->layers, "blocks; 0: as the size has", 0, 1024, NULL },
    { "batch", CLI_U64, &o->batch, "sequences of a step", 1, ROWS_MAX, NULL },
    { "seq", CLI_U64, &o->sequence, "tokens of a sequence", 1, ROWS_MAX, NULL },
    { "device", CLI_CHOICE, &o->device, "a GPU, or the simulated device", 0, 0, device_names },
    { "device-mem", CLI_STRING, &o->device_mem, "device budget: bytes, or % of the model data", 0, 0, NULL },
    { "host-mem", CLI_STRING, &o->host_mem, "host budget, likewise; default: the model data, 1/28 and 8 MiB", 0, 0,
      NULL },
    { "file", CLI_STRING, &o->file_dir,
      "directory, or several separated by ':', for what neither device nor host can hold", 0, 0, NULL },
    { "file-mem", CLI_SIZE, &o->file_mem_bytes, "file budget; default: as the host's", 0, 0, NULL },
    { "policy", CLI_CHOICE, &o->policy, "where model data live; none: all on the GPU, without libgemini", 0, 0,
      policy_names },
    { "static-params", CLI_F64, &o->static_params, "policy static: share of parameters kept on the device", 0, 0,
      NULL },
    { "static-optim", CLI_F64, &o->static_optim, "policy static: the same for optimizer states", 0, 0, NULL },
    { "against", CLI_CHOICE, &o->against, "run policy none first and compare, or skip that", 0, 0, against_names },
    { "chunk-size", CLI_SIZE, &o->chunk_bytes, "chunk size; default: searched", 0, 0, NULL },
    { "steps", CLI_U64, &o->steps, "timed steps", 1, 100000, NULL },
    { "warm-up", CLI_U64, &o->warm_up, "steps before them; plans are made and corrected in the first four", 1, 100000,
      NULL },
    { "update-threads", CLI_U64, &o->update_threads, "workers for updates on the host; 0: cores - 1", 0, 256, NULL },
    { "seed", CLI_U64, &o->seed, "of parameters and tokens", 0, 0, NULL },
    { "timeline", CLI_STRING, &o->timeline,
      "write a timeline of two more steps to this file; bench/stalls.py explains the second", 0, 0, NULL },
    { "trace", CLI_STRING, &o->trace, "write the last step's trace to this file, for bench_plan", 0, 0, NULL },
    { "cublas", CLI_STRING, &o->cublas, "file of cuBLAS; default: what the system finds", 0, 0, NULL },
    { "explain", CLI_FLAG, &o->explain, "print the plan in words", 0, 0, NULL },
    { "verbose", CLI_FLAG, &o->verbose, "print what the library logs", 0, 0, NULL },
    { "quiet", CLI_FLAG, &o->quiet, "print the ROW only", 0, 0, NULL },
    { 0 },
  };
  int status =
      cli_parse(program,
                "Trains a stack of matrix products with a LLaMA's parameter shapes, under libgemini and all on "
                "the GPU. There is no attention over tokens: o's input is silu(q) k + v.",
                table, argc, argv);
  if (status >= 0) return status;
  if (o->sequence > ROWS_MAX / o->batch) {
    cli_error(program, "too many tokens in a step: %" PRIu64 " x %" PRIu64 ", the limit is %d", o->batch, o->sequence,
              ROWS_MAX);
    return CLI_EXIT_USAGE;
  }
  if (o->static_params > 1 || o->static_optim > 1) {
    cli_error(program, "bad share: --static-params %g --static-optim %g, at most 1", o->static_params, o->static_optim);
    return CLI_EXIT_USAGE;
  }
  return -1;
}

/* ---- One run ---- */

enum { LINK_IN, LINK_OUT, LINK_WRITE, LINK_READ, LINKS };
static const uint32_t links[LINKS][2] = { { GEMINI_TIER_HOST, GEMINI_TIER_DEVICE },
                                          { GEMINI_TIER_DEVICE, GEMINI_TIER_HOST },
                                          { GEMINI_TIER_HOST, GEMINI_TIER_FILE },
                                          { GEMINI_TIER_FILE, GEMINI_TIER_HOST } };

typedef struct result {
  double *losses, *seconds; /* (steps), owned; seconds of the timed steps */
  uint64_t loss_count, params, model_bytes, hash;
  double sec_per_step;
  double queue_seconds; /* of each step, the time in which the calling thread queued work; median */
  uint64_t device_peak_bytes, host_peak_bytes, file_peak_bytes, nonmodel_peak_bytes, resident_bytes;
  double host_elements; /* elements updated on the host per step */
  gemini_stats_t stats; /* of the timed steps */
  double moved[LINKS];  /* bytes per step, in the order of links[] */
} result_t;

typedef struct bench {
  options_t o;
  llama_shape_t shape;
  uint64_t model_bytes, device_budget_bytes, host_budget_bytes, file_budget_bytes;
  gpu_t *gpu; /* NULL: simulated */
  rates_t rates;
  result_t all_resident, managed;
} bench_t;

static void result_free(result_t *r) {
  free(r->losses);
  free(r->seconds);
}

static double median(double *values, uint64_t count) {
  cli_sort(values, count);
  return 0.5 * (values[count / 2] + values[(count - 1) / 2]);
}

/* Resident memory of the process; 0: unknown. */
static uint64_t resident_bytes(void) {
  unsigned long long size = 0, resident = 0;
  FILE *f = fopen("/proc/self/statm", "re");
  if (f == NULL) return 0;
  if (fscanf(f, "%llu %llu", &size, &resident) != 2) resident = 0;
  fclose(f);
  return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void keep_peaks(result_t *r, memory_t *memory) {
  if (memory->failed) return;
  if (!memory->managed) {
    r->nonmodel_peak_bytes = memory->nonmodel_peak_bytes;
    r->device_peak_bytes = r->model_bytes + memory->nonmodel_peak_bytes;
    return;
  }
  r->stats = (gemini_stats_t)GEMINI_STATS_INIT;
  if (!memory_check(memory, gemini_stats(memory->manager, &r->stats))) return;
  uint64_t *const peaks[] = { &r->device_peak_bytes, &r->host_peak_bytes, &r->file_peak_bytes };
  for (uint32_t tier = 0; tier < sizeof peaks / sizeof *peaks; tier++) {
    uint64_t peak = memory_tier(memory, tier).peak_bytes;
    if (peak > *peaks[tier]) *peaks[tier] = peak;
  }
  for (int i = 0; i < LINKS; i++)
    r->moved[i] = (double)memory_moved_bytes(memory, links[i][0], links[i][1], GEMINI_REASON_ALL);
  if (r->stats.nonmodel_peak_bytes > r->nonmodel_peak_bytes) r->nonmodel_peak_bytes = r->stats.nonmodel_peak_bytes;
}

/* Steps of a run: warm-up, timed steps, and two for the timeline, because the second waits for work that the first
 * queued. Both runs make all of them, so that their results can be compared. */
static uint64_t total_steps(const options_t *o) { return o->warm_up + o->steps + (o->timeline != NULL ? 2 : 0); }

static void run_steps(const bench_t *b, memory_t *memory, llama_t *llama, result_t *r, double *queue_seconds) {
  const options_t *o = &b->o;
  uint64_t total = total_steps(o);
  for (uint64_t step = 0; step < total && !memory->failed; step++) {
    if (step == o->warm_up && memory->managed) {
      keep_peaks(r, memory);
      memory_check(memory, gemini_stats_reset(memory->manager));
    }
    if (step == o->warm_up + o->steps) {
      keep_peaks(r, memory);
      if (memory->managed) memory_check(memory, gemini_timeline_start(memory->manager, o->timeline));
    }
    uint64_t begin_ns = cli_now_ns();
    llama_step(llama, step);
    uint64_t queued_ns = cli_now_ns();
    memory_synchronize(memory); /* the loss is needed; updates may still be pending */
    if (memory->failed) return;
    double seconds = 1e-9 * (double)(cli_now_ns() - begin_ns);
    if (step >= o->warm_up && step < o->warm_up + o->steps) {
      r->seconds[step - o->warm_up] = seconds;
      queue_seconds[step - o->warm_up] = 1e-9 * (double)(queued_ns - begin_ns);
    }
    r->losses[r->loss_count++] = llama->losses[step];
    if (!isfinite(llama->losses[step])) {
      char message[128];
      snprintf(message, sizeof message, "training diverged: loss %g in step %" PRIu64 ", not finite",
               llama->losses[step], step);
      memory_fail(memory, message);
    } else if (!o->quiet) {
      printf("%-8s step %3" PRIu64 "/%" PRIu64 "  loss %.4f  %8.1f ms, queued in %.1f\n",
             memory->managed ? policy_names[o->policy] : "none", step + 1, total, llama->losses[step], 1e3 * seconds,
             1e-6 * (double)(queued_ns - begin_ns));
      fflush(stdout);
    }
  }
  memory_update_wait(memory);
  memory_synchronize(memory);
  for (uint64_t step = o->warm_up; step < o->warm_up + o->steps; step++) {
    r->host_elements += (double)atomic_load(&llama->updates[step].host_elements) / (double)o->steps;
  }
  if (o->timeline == NULL) {
    keep_peaks(r, memory);
  } else if (memory->managed && !memory->failed) {
    memory_check(memory, gemini_timeline_stop(memory->manager));
  }
}

/* One run. config NULL: all memory is on the device. Prints the reason and returns false on a failure. */
static bool run(bench_t *b, const gemini_config_t *config, result_t *r) {
  const options_t *o = &b->o;
  static memory_t memory;
  llama_t llama;
  double *queue_seconds = calloc(o->steps, sizeof *queue_seconds);
  r->losses = calloc(total_steps(o), sizeof *r->losses);
  r->seconds = calloc(o->steps, sizeof *r->seconds);
  if (queue_seconds == NULL || r->losses == NULL || r->seconds == NULL) {
    cli_error(program, "out of memory for the records of %" PRIu64 " steps", o->steps);
    free(queue_seconds);
    return false;
  }
  uint64_t begin_ns = cli_now_ns();
  memory_open(&memory, b->gpu != NULL ? &device_cuda : &device_cpu, config, false);
  llama_open(&llama, &memory, &b->shape, (int)(o->batch * o->sequence), total_steps(o), o->seed);
  r->params = memory.tensor_elements;
  r->model_bytes = 14 * memory.elements;
  if (!o->quiet && !memory.failed) {
    printf("%-8s %" PRIu64 " parameters set up in %.1f s\n", config ? policy_names[o->policy] : "none", r->params,
           1e-9 * (double)(cli_now_ns() - begin_ns));
  }
  run_steps(b, &memory, &llama, r, queue_seconds);
  r->resident_bytes = resident_bytes();
  if (!memory.failed && config != NULL && o->explain) memory_print_plan(&memory);
  if (!memory.failed && config != NULL && o->trace != NULL) {
    memory_check(&memory, gemini_trace_save(memory.manager, o->trace));
  }
  r->hash = walk_hash(&memory);
  memory_close(&memory);
  llama_close(&llama);
  if (memory_error(&memory) != NULL) {
    cli_error(program, "%s: %s", config ? policy_names[o->policy] : "none", memory_error(&memory));
  } else {
    r->sec_per_step = median(r->seconds, o->steps);
    r->queue_seconds = median(queue_seconds, o->steps);
    for (int link = 0; link < LINKS; link++) r->moved[link] /= (double)o->steps;
  }
  free(queue_seconds);
  return memory_error(&memory) == NULL;
}

/* ---- The bound ---- */

typedef struct term {
  const char *name;
  double bytes, rate, seconds; /* bytes per step and their rate; 0: the seconds were measured */
} term_t;
enum { TERM_GPU, TERM_TO_DEVICE, TERM_FROM_DEVICE, TERM_HOST, TERM_FILE, TERMS };

/* Fills the terms, the time that a step needs at least on each resource, and returns the index of the largest one,
 * which binds. Bytes are those of the plan; without a plan, those that were moved. */
static int find_bound(const bench_t *b, term_t terms[TERMS]) {
  const result_t *r = &b->managed;
  const rates_t *rates = &b->rates;
  bool planned = r->stats.predicted_step_ns > 0;
  double in = planned ? (double)r->stats.planned_fetch_bytes : r->moved[LINK_IN];
  double out = planned ? (double)r->stats.planned_evict_bytes : r->moved[LINK_OUT];
  double read = r->moved[LINK_READ], written = r->moved[LINK_WRITE];
  terms[TERM_GPU] = (term_t){ "all on the GPU", 0, 0, b->all_resident.sec_per_step };
  terms[TERM_TO_DEVICE] = (term_t){ "copies to the device", in, rates->to_device, 0 };
  terms[TERM_FROM_DEVICE] = (term_t){ "copies from the device", out, rates->from_device, 0 };
  double memory = rates->host > rates->update ? rates->host : rates->update; /* the larger rate gives the lower bound */
  terms[TERM_HOST] = (term_t){ "host memory", 28 * r->host_elements + in + out + read + written, memory, 0 };
  /* One disk serves reads and writes: the rate is that of the mixture. */
  double seconds = 0;
  if (rates->file_read > 0) seconds = read / rates->file_read + written / rates->file_write;
  terms[TERM_FILE] = (term_t){ "files", read + written, seconds > 0 ? (read + written) / seconds : 0, 0 };
  int binds = 0;
  for (int i = 0; i < TERMS; i++) {
    if (terms[i].rate > 0) terms[i].seconds = terms[i].bytes / terms[i].rate;
    if (terms[i].seconds > terms[binds].seconds) binds = i;
  }
  return binds;
}

static void print_report(const bench_t *b, const term_t *terms, int binds) {
  const result_t *r = &b->managed;
  char text[32];
  printf("\n%-24s %14s %12s %10s\n", "a step needs at least", "GB", "GB/s", "s");
  for (int i = 0; i < TERMS; i++) {
    if (terms[i].rate > 0) {
      printf("%-24s %14.3f %12.1f %10.4f%s\n", terms[i].name, 1e-9 * terms[i].bytes, 1e-9 * terms[i].rate,
             terms[i].seconds, i == binds ? "  <- binds" : "");
    } else if (terms[i].seconds > 0) {
      printf("%-24s %14s %12s %10.4f%s\n", terms[i].name, "", "", terms[i].seconds, i == binds ? "  <- binds" : "");
    } else {
      printf("%-24s %14.3f   not measured\n", terms[i].name, 1e-9 * terms[i].bytes);
    }
  }
  printf("measured: %.1f GB/s both ways at once, %.1f GB/s by the optimizer's pass alone (%s)\n",
         1e-9 * b->rates.both_ways, 1e-9 * b->rates.update, gemini_update_isa());
  printf("a step: %.4f s, %.3f of the bound; predicted %.4f s (%+.1f %%); streams waited %.4f s for chunks; queued in "
         "%.4f s\n",
         r->sec_per_step, r->sec_per_step / terms[binds].seconds, 1e-9 * (double)r->stats.predicted_step_ns,
         100 * (1e-9 * (double)r->stats.predicted_step_ns / r->sec_per_step - 1),
         1e-9 * (double)r->stats.stall_ns / (double)b->o.steps, r->queue_seconds);
  printf("device peak %s", cli_format_size(r->device_peak_bytes, text, sizeof text));
  printf(" of %s", cli_format_size(b->device_budget_bytes, text, sizeof text));
  printf(", non-model peak %s", cli_format_size(r->nonmodel_peak_bytes, text, sizeof text));
  printf("; host peak %s", cli_format_size(r->host_peak_bytes, text, sizeof text));
  printf(" of %s", cli_format_size(b->host_budget_bytes, text, sizeof text));
  printf(": %.2f bytes a parameter (the whole process: %.2f)\n", (double)r->host_peak_bytes / (double)r->params,
         (double)r->resident_bytes / (double)r->params);
  printf("updated on the host: %.1f %% of the parameters a step\n\n", 100 * r->host_elements / (double)r->params);
}

/* ---- Report ---- */

/* Prints a run's row. terms NULL: a run with policy none. parity: the result of comparing both runs. */
static bool print_row(const bench_t *b, const result_t *r, const term_t *terms, int binds, const char *parity) {
  const options_t *o = &b->o;
  const gemini_stats_t *s = &r->stats;
  static const char *const names[TERMS] = { "gpu", "to_device", "from_device", "host", "file" };
  char hash[32], name[128], field[64];
  snprintf(hash, sizeof hash, "%016" PRIx64, r->hash);
  snprintf(name, sizeof name, "%s %" PRIu64 "x%" PRIu64 " %s", b->shape.name, o->batch, o->sequence,
           device_names[o->device]);
  row_t row;
  row_begin(&row, program, name);
  row_value(&row, r->sec_per_step, "s");
  if (terms != NULL && b->all_resident.sec_per_step > 0) {
    row_ratio(&row, b->all_resident.sec_per_step / r->sec_per_step, "all on the GPU");
  }
  row_text(&row, "policy", terms != NULL ? policy_names[o->policy] : "none");
  row_text(&row, "gpu", b->gpu != NULL ? gpu_name(b->gpu) : NULL);
  row_u64(&row, "layers", (uint64_t)b->shape.layers);
  row_u64(&row, "params", r->params);
  row_u64(&row, "model_bytes", r->model_bytes);
  row_u64(&row, "device_budget", terms != NULL ? b->device_budget_bytes : 0);
  row_u64(&row, "device_peak", r->device_peak_bytes);
  row_u64(&row, "host_budget", terms != NULL ? b->host_budget_bytes : 0);
  row_u64(&row, "host_peak", r->host_peak_bytes);
  row_f64(&row, "host_bytes_per_param", (double)r->host_peak_bytes / (double)r->params);
  row_u64(&row, "resident_bytes", r->resident_bytes);
  row_u64(&row, "file_budget", terms != NULL ? b->file_budget_bytes : 0);
  row_u64(&row, "file_bytes", r->file_peak_bytes);
  row_f64(&row, "fetched_bytes", r->moved[LINK_IN]);
  row_f64(&row, "evicted_bytes", r->moved[LINK_OUT]);
  row_f64(&row, "file_read_bytes", r->moved[LINK_READ]);
  row_f64(&row, "file_written_bytes", r->moved[LINK_WRITE]);
  row_u64(&row, "planned_fetch_bytes", s->planned_fetch_bytes);
  row_u64(&row, "planned_evict_bytes", s->planned_evict_bytes);
  row_u64(&row, "chunk_bytes", s->chunk_bytes);
  row_u64(&row, "nonmodel_peak_bytes", r->nonmodel_peak_bytes);
  row_f64(&row, "host_updated_share", r->host_elements / (double)r->params);
  row_u64(&row, "planned_iterations", s->planned_iterations);
  row_u64(&row, "departures", s->departures);
  row_f64(&row, "stall_seconds", 1e-9 * (double)s->stall_ns / (double)o->steps);
  row_f64(&row, "queue_seconds", r->queue_seconds);
  row_u64(&row, "steps", o->steps);
  row_f64_list(&row, "step_seconds", r->seconds, o->steps);
  row_f64_list(&row, "losses", r->losses, r->loss_count);
  row_text(&row, "params_hash", hash);
  row_text(&row, "parity", parity);
  row_f64(&row, "sec_per_step", r->sec_per_step);
  row_f64(&row, "predicted_sec_per_step", 1e-9 * (double)s->predicted_step_ns);
  row_u64(&row, "op_peak_error_bytes", s->op_peak_error_bytes);
  for (int i = 0; terms != NULL && i < TERMS; i++) {
    snprintf(field, sizeof field, "bound_%s_seconds", names[i]);
    row_f64(&row, field, terms[i].seconds);
  }
  if (terms != NULL) {
    row_f64(&row, "bound_seconds", terms[binds].seconds);
    row_text(&row, "bound_by", names[binds]);
    row_f64(&row, "step_to_bound", r->sec_per_step / terms[binds].seconds);
    row_f64(&row, "to_device_bytes_per_s", b->rates.to_device);
    row_f64(&row, "from_device_bytes_per_s", b->rates.from_device);
    row_f64(&row, "both_ways_bytes_per_s", b->rates.both_ways);
    row_f64(&row, "host_bytes_per_s", b->rates.host);
    row_f64(&row, "update_bytes_per_s", b->rates.update);
    row_f64(&row, "file_read_bytes_per_s", b->rates.file_read);
    row_f64(&row, "file_write_bytes_per_s", b->rates.file_write);
  }
  if (row_end(&row)) return true;
  cli_error(program, "cannot print the result: out of memory, or standard output is closed");
  return false;
}

static bool within_limits(const bench_t *b) {
  const result_t *r = &b->managed;
  if (r->device_peak_bytes > b->device_budget_bytes || r->host_peak_bytes > b->host_budget_bytes) {
    cli_error(program, "a budget was passed: device %" PRIu64 " of %" PRIu64 ", host %" PRIu64 " of %" PRIu64,
              r->device_peak_bytes, b->device_budget_bytes, r->host_peak_bytes, b->host_budget_bytes);
    return false;
  }
  if (r->stats.op_peak_error_bytes == 0) return true;
  cli_error(program, "an operator's non-model peak was predicted wrong: by %" PRIu64 " bytes",
            r->stats.op_peak_error_bytes);
  return false;
}

/* Compares both runs: the place of model data must not change a bit of the result. */
static bool same_results(const bench_t *b) {
  const result_t *x = &b->all_resident, *y = &b->managed;
  for (uint64_t i = 0; i < y->loss_count; i++) {
    if (memcmp(&x->losses[i], &y->losses[i], sizeof x->losses[i]) == 0) continue;
    cli_error(program, "losses differ from policy none: step %" PRIu64 ": %.17g, none has %.17g", i + 1, y->losses[i],
              x->losses[i]);
    return false;
  }
  if (x->hash == y->hash) return true;
  cli_error(program, "parameters differ from policy none: hash %016" PRIx64 ", none has %016" PRIx64, y->hash, x->hash);
  return false;
}

/* ---- Setting up ---- */

static bool parse_budget(const bench_t *b, const char *option, const char *text, uint64_t *bytes_out) {
  if (cli_parse_share(text, b->model_bytes, bytes_out) && *bytes_out > 0) return true;
  cli_error(program, "bad value of --%s: %s, expected a size such as 24GiB or a share such as 30%%", option, text);
  return false;
}

static int run_all(bench_t *b) {
  static const uint32_t placements[] = { 0, GEMINI_PLACEMENT_CUDA, GEMINI_PLACEMENT_CPU, GEMINI_PLACEMENT_AUTO,
                                         GEMINI_PLACEMENT_STATIC };
  const options_t *o = &b->o;
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  uint32_t threads = cores > 0 ? (uint32_t)cores : 1;
  uint64_t scratch_bytes = b->gpu != NULL ? UINT64_C(4) << 30 : UINT64_C(64) << 20;
  if (o->policy == POLICY_NONE || o->against == AGAINST_NONE) {
    if (!run(b, NULL, &b->all_resident)) return CLI_EXIT_FAILURE;
  }
  if (o->policy == POLICY_NONE) return print_row(b, &b->all_resident, NULL, 0, NULL) ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
  if (!rates_copies(&b->rates, b->gpu) || !rates_host(&b->rates, program, threads, scratch_bytes) ||
      (o->file_dir != NULL && !rates_files(&b->rates, program, o->file_dir, scratch_bytes / 2))) {
    return CLI_EXIT_FAILURE;
  }
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.placement = placements[o->policy];
  config.device = b->gpu != NULL ? GEMINI_DEVICE_CUDA : GEMINI_DEVICE_SIMULATED;
  config.update_threads = (uint32_t)o->update_threads;
  config.log_level = o->verbose ? GEMINI_LOG_INFO : GEMINI_LOG_WARNING;
  config.device_bytes = b->device_budget_bytes;
  config.host_bytes = b->host_budget_bytes;
  config.file_bytes = b->file_budget_bytes;
  config.chunk_bytes = o->chunk_bytes;
  config.static_param_fraction = o->static_params;
  config.static_optim_fraction = o->static_optim;
  config.file_dir = o->file_dir;
  config.log_fn = memory_print_log;
  if (!run(b, &config, &b->managed)) return CLI_EXIT_FAILURE;
  term_t terms[TERMS];
  int binds = find_bound(b, terms);
  if (!o->quiet) print_report(b, terms, binds);
  bool same = o->against == AGAINST_SKIP || same_results(b), within = within_limits(b);
  const char *parity = o->against == AGAINST_SKIP ? NULL : same ? "the same bits" : "differs";
  return print_row(b, &b->managed, terms, binds, parity) && same && within ? CLI_EXIT_OK : CLI_EXIT_FAILURE;
}

int main(int argc, char **argv) {
  static bench_t b;
  options_t *o = &b.o;
  int status = parse_options(o, argc, argv);
  if (status >= 0) return status;
  b.shape = shapes[o->size];
  if (o->layers > 0) b.shape.layers = (int)o->layers;
  b.model_bytes = 14 * llama_elements(&b.shape);
  /* Leaves room for the empty part of each arena's last chunk, which matters for a tiny model. */
  b.host_budget_bytes = b.model_bytes + b.model_bytes / 28 + (UINT64_C(8) << 20);
  if (!parse_budget(&b, "device-mem", o->device_mem, &b.device_budget_bytes)) return CLI_EXIT_USAGE;
  if (o->host_mem != NULL && !parse_budget(&b, "host-mem", o->host_mem, &b.host_budget_bytes)) return CLI_EXIT_USAGE;
  if (o->file_dir != NULL) {
    b.file_budget_bytes = o->file_mem_bytes > 0 ? o->file_mem_bytes : b.model_bytes + b.model_bytes / 28 + (8 << 20);
  }
  status = CLI_EXIT_FAILURE;
  if (o->device == DEVICE_CUDA) {
    b.gpu = gpu_open(program, 0, o->cublas);
    if (b.gpu == NULL) return status;
    if (device_cuda_open(b.gpu) && task_gpu_open()) {
      if (!o->quiet) printf("%s, cuBLAS %d\n", gpu_name(b.gpu), gpu_cublas_version(b.gpu));
      status = run_all(&b);
    }
    device_cuda_close();
  } else {
    status = run_all(&b);
  }
  result_free(&b.all_resident);
  result_free(&b.managed);
  gpu_close(b.gpu);
  return status;
}
