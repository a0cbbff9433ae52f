/* train_gpt over several ranks: processes of one machine that share the model data, each with its part of the batch.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef EXAMPLES_TRAIN_GPT_RANKS_H
#define EXAMPLES_TRAIN_GPT_RANKS_H

#include "train_gpt_report.h"

/* With several ranks, forks: the calling process is rank 0 from then on, and returns as the children do. It must have
 * neither threads nor managers. False after printing why; then there are no children. */
bool train_gpt_ranks_start(trainer_t *t);
/* Rank 0 waits for the others. Returns the status to exit with, of all ranks; the other ranks' own is `status`. */
int train_gpt_ranks_finish(trainer_t *t, int status);

/* memory_iteration_begin() and memory_iteration_end(), which compare what an iteration moved over the group with its
 * plan. `before` is passed from the one to the other. */
typedef struct train_gpt_traffic {
  uint64_t planned_iterations;
  gemini_group_stats_t group;
} train_gpt_traffic_t;
train_gpt_traffic_t train_gpt_ranks_iteration_begin(trainer_t *t);
void train_gpt_ranks_iteration_end(trainer_t *t, const train_gpt_traffic_t *before);

/* Statistics of the group, added over the ranks. Zeros without a group, and after a failure. */
gemini_group_stats_t train_gpt_ranks_stats(trainer_t *t);
/* Makes t->by_plan that of all ranks: the fewest iterations, and the differences added. */
void train_gpt_ranks_by_plan(trainer_t *t);
/* As model_hash(), of what all ranks keep together. Fails unless every rank sees the same parameters on its device, and
 * these are the masters, rounded. */
uint64_t train_gpt_ranks_hash(trainer_t *t);

#endif
