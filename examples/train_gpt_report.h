/* The parts of train_gpt that are not training: its options, and the report at its end.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef EXAMPLES_TRAIN_GPT_REPORT_H
#define EXAMPLES_TRAIN_GPT_REPORT_H

#include <stdatomic.h>
#include <stdio.h>
#include <sys/types.h>

#include "gpt_model.h"
#include "memory.h"
#include "model/text.h"

extern const char *train_gpt_program; /* its name, and the rank's, for messages */

enum { POLICY_NONE, POLICY_CUDA, POLICY_CPU, POLICY_AUTO, POLICY_STATIC };
enum { SCHEDULE_CONSTANT, SCHEDULE_COSINE };
enum { DEVICE_SIM, DEVICE_CUDA };
enum { TRAIN_GPT_RANKS_MAX = 64 };
enum { TRAIN_GPT_ZERO_AUTO = 4 };

typedef struct options {
  const char *text, *device_mem, *host_mem, *file_dir, *trace, *load_trace, *timeline, *cublas;
  uint32_t policy, schedule, device;
  uint64_t host_mem_bytes, file_mem_bytes, chunk_bytes, margin_bytes, sim_h2d_bytes_per_s, sim_d2h_bytes_per_s;
  uint64_t layers, width, heads, context, batch, steps, seed, warmup, update_threads, device_ordinal;
  uint64_t lr_warmup, eval_every, context_every, skip_layer_every;
  uint64_t ranks, micro_batches;
  uint32_t zero; /* 0: no group; 1 to 3: the stage; TRAIN_GPT_ZERO_AUTO */
  double lr, weight_decay, clip, static_params, static_optim;
  bool strict, explain, quiet, verbose;
} options_t;

/* The arguments of one step's update. Parts of it may still run during the next steps, so each step has its own. */
typedef struct step_update {
  const gpt_operators_t *operators;
  memory_t *memory;
  gpt_adamw_factors_t adamw;
  atomic_bool failed; /* a span could not be queued */
} step_update_t;

typedef struct trainer {
  options_t o;
  gpu_t *gpu; /* NULL: the CPU computes */
  const gpt_operators_t *operators;
  text_t text;
  memory_t memory;
  model_t model;
  uint64_t random;        /* data order */
  int32_t *tokens;        /* (batch, context + 1), of the current step; in memory of the device's host_alloc(), as is
                             parts */
  step_update_t *updates; /* (steps) */
  double *parts;          /* (parts_count): losses of the current step's micro-batches, those of all ranks */
  double *losses, *norms; /* (steps); means over the micro-batches */
  double *seconds;        /* (steps) */
  uint64_t parts_count;
  double *eval_losses; /* (steps), eval_count used */
  uint64_t eval_count;
  uint64_t device_budget_bytes, host_budget_bytes, file_budget_bytes;

  /* With a group. */
  memory_ranks_t ranks;
  pid_t children[TRAIN_GPT_RANKS_MAX]; /* of rank 0, by rank; used if forked */
  bool forked;
  FILE *whole;                /* to which all ranks write their masters, at the end */
  uint64_t gathered_in_first; /* chunks that all ranks gathered in the first step */
  struct {
    uint64_t iterations;       /* of this rank that followed one plan */
    uint64_t difference_bytes; /* between what these moved over the group and what their plans say, added */
  } by_plan;
} trainer_t;

/* Fills t->o. Returns -1 when the program should go on, else the status to exit with. */
int train_gpt_options(options_t *o, int argc, char **argv);
/* Computes the budgets in bytes that the options ask for, into t. Returns as train_gpt_options(). */
int train_gpt_budgets(trainer_t *t, uint64_t model_bytes);
/* All ranks call it; rank 0 prints. Prints where everything was, what moved, and the line that begins with ROW. False after a failure, which
 * memory_error() describes or which has been printed. */
bool train_gpt_report(trainer_t *t);

#endif
