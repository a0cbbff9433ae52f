/* train_gpt over several ranks: processes of one machine that share the model data, each with its part of the batch.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "train_gpt_ranks.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "common/cli.h"

/* ---- Processes ---- */

static void end_child(trainer_t *t, uint32_t rank) {
  kill(t->children[rank], SIGKILL);
  waitpid(t->children[rank], NULL, 0);
}

bool train_gpt_ranks_start(trainer_t *t) {
  if (t->o.zero == 0) return true;
  t->ranks = (memory_ranks_t){ .ranks = (uint32_t)t->o.ranks, .zero_stage = t->o.zero };
  if (t->o.zero == TRAIN_GPT_ZERO_AUTO) t->ranks.zero_stage = GEMINI_ZERO_AUTO;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  if (gemini_group_id_make(GEMINI_TRANSPORT_SHARED, t->ranks.ranks, &t->ranks.id) != GEMINI_OK) {
    cli_error(train_gpt_program, "cannot make a group: %s", gemini_last_error(&info) ? "" : info.message);
    return false;
  }
  t->whole = tmpfile();
  if (t->whole == NULL) {
    cli_error(train_gpt_program, "cannot make a file for the masters of all ranks: %s", strerror(errno));
    return false;
  }
  const pid_t parent = getpid();
  fflush(stdout); /* or each child prints it again */
  for (uint32_t rank = 1; rank < t->ranks.ranks; rank++) {
    t->children[rank] = fork();
    if (t->children[rank] < 0) {
      cli_error(train_gpt_program, "cannot start rank %" PRIu32 ": %s", rank, strerror(errno));
      while (--rank > 0) end_child(t, rank);
      return false;
    }
    if (t->children[rank] == 0) {
      static char name[32];
      t->ranks.rank = rank;
      snprintf(name, sizeof name, "train_gpt: rank %" PRIu32, rank);
      train_gpt_program = name;
      /* No rank outlives rank 0, which may have ended before the call. */
      if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) _exit(CLI_EXIT_FAILURE);
      return true;
    }
  }
  t->forked = true;
  return true;
}

/* Ranks that end well have nothing left to do when rank 0 has, and others see at once that rank 0 has closed its manager,
 * unless they have not joined, or are stopped. */
enum { WAIT_NS = 10000000, WAITS = 500 };

int train_gpt_ranks_finish(trainer_t *t, int status) {
  if (!t->forked) return status;
  int waits = 0;
  for (uint32_t rank = 1; rank < t->ranks.ranks; rank++) {
    int end = 0;
    pid_t ended;
    while ((ended = waitpid(t->children[rank], &end, WNOHANG)) == 0 && waits++ < WAITS) {
      nanosleep(&(struct timespec){ .tv_nsec = WAIT_NS }, NULL);
    }
    if (ended == 0) {
      cli_error(train_gpt_program, "rank %" PRIu32 " does not end: process %d is killed", rank, t->children[rank]);
      end_child(t, rank);
      status = CLI_EXIT_FAILURE;
    } else if (ended < 0 || WIFSIGNALED(end)) {
      cli_error(train_gpt_program, "rank %" PRIu32 " was ended by signal %d", rank, ended < 0 ? 0 : WTERMSIG(end));
      status = CLI_EXIT_FAILURE;
    } else if (WEXITSTATUS(end) != 0 && status == CLI_EXIT_OK) {
      status = WEXITSTATUS(end);
    }
  }
  return status;
}

/* ---- Numbers of all ranks ---- */

gemini_group_stats_t train_gpt_ranks_stats(trainer_t *t) {
  gemini_group_stats_t mine = GEMINI_GROUP_STATS_INIT, sum = GEMINI_GROUP_STATS_INIT, all[TRAIN_GPT_RANKS_MAX] = { 0 };
  memory_t *memory = &t->memory;
  if (memory_error(memory) != NULL || memory->group == NULL) return sum;
  memory_check(memory, gemini_group_stats(memory->manager, memory->group, &mine));
  memory_exchange(memory, &mine, sizeof mine, all);
  for (uint32_t rank = 0; rank < t->ranks.ranks && memory_error(memory) == NULL; rank++) {
    sum.gathered_chunks += all[rank].gathered_chunks;
    sum.gathered_bytes += all[rank].gathered_bytes;
    sum.reduced_chunks += all[rank].reduced_chunks;
    sum.fetched_bytes += all[rank].fetched_bytes;
    sum.stored_bytes += all[rank].stored_bytes;
    sum.reduced_bytes += all[rank].reduced_bytes;
    sum.planned_gathered_bytes += all[rank].planned_gathered_bytes;
    sum.planned_reduced_bytes += all[rank].planned_reduced_bytes;
    sum.planned_fetched_bytes += all[rank].planned_fetched_bytes;
  }
  return sum;
}

void train_gpt_ranks_by_plan(trainer_t *t) {
  uint64_t mine[2] = { t->by_plan.iterations, t->by_plan.difference_bytes }, all[TRAIN_GPT_RANKS_MAX][2] = { 0 };
  memory_exchange(&t->memory, mine, sizeof mine, all);
  t->by_plan.difference_bytes = 0;
  for (uint64_t rank = 0; rank < t->o.ranks; rank++) {
    if (all[rank][0] < t->by_plan.iterations) t->by_plan.iterations = all[rank][0];
    t->by_plan.difference_bytes += all[rank][1];
  }
}

/* ---- Iterations and their plans ---- */

static gemini_group_stats_t group_stats(memory_t *memory) {
  gemini_group_stats_t group = GEMINI_GROUP_STATS_INIT;
  if (memory_error(memory) == NULL) memory_check(memory, gemini_group_stats(memory->manager, memory->group, &group));
  return group;
}
static uint64_t planned_iterations(memory_t *memory) {
  gemini_stats_t stats = GEMINI_STATS_INIT;
  if (memory_error(memory) == NULL) memory_check(memory, gemini_stats(memory->manager, &stats));
  return stats.planned_iterations;
}

train_gpt_traffic_t train_gpt_ranks_iteration_begin(trainer_t *t) {
  memory_t *memory = &t->memory;
  train_gpt_traffic_t before = { 0 };
  if (memory->group != NULL) before.planned_iterations = planned_iterations(memory);
  memory_iteration_begin(memory);
  if (memory->group != NULL) before.group = group_stats(memory); /* with the plan of this iteration */
  return before;
}

static uint64_t difference(uint64_t a, uint64_t b) { return a > b ? a - b : b - a; }
void train_gpt_ranks_iteration_end(trainer_t *t, const train_gpt_traffic_t *before) {
  memory_t *memory = &t->memory;
  if (memory->group == NULL) {
    memory_iteration_end(memory);
    return;
  }
  const gemini_group_stats_t then = before->group, now = group_stats(memory);
  memory_iteration_end(memory);
  if (planned_iterations(memory) == before->planned_iterations || memory_error(memory) != NULL) return;
  if (now.plan_changes != then.plan_changes) return; /* it began as another kind of iteration */
  t->by_plan.iterations++;
  t->by_plan.difference_bytes += difference(now.gathered_bytes - then.gathered_bytes, then.planned_gathered_bytes) +
                                 difference(now.reduced_bytes - then.reduced_bytes, then.planned_reduced_bytes) +
                                 difference(now.fetched_bytes - then.fetched_bytes, then.planned_fetched_bytes);
}

/* ---- The model, as all ranks keep it ---- */

/* What a rank sees of the model. */
typedef struct sight {
  uint64_t masters, parameters; /* hashes */
  uint64_t wrong;               /* parameters that are not their masters, rounded */
} sight_t;

/* The whole tensor as this rank's device has it, in host, memory of the device's host_alloc(). */
static void read_parameters(trainer_t *t, int tensor, uint16_t *host) {
  memory_t *memory = &t->memory;
  void *parameters;
  memory_acquire(memory, GEMINI_KIND_PARAM, GEMINI_READ, tensor, 1, &parameters);
  gpt_copy_t copy = { host, parameters, memory->tensors[tensor].elements * sizeof *host };
  memory_queue(memory, t->operators->copy, &copy, sizeof copy);
  memory_release(memory, GEMINI_KIND_PARAM, tensor, 1);
  memory_synchronize(memory);
}

static bool look(trainer_t *t, int tensor, float *masters, uint16_t *parameters, sight_t *sight) {
  memory_t *memory = &t->memory;
  uint64_t elements = memory->tensors[tensor].elements, bytes = elements * sizeof *masters;
  off_t at = (off_t)(memory->tensors[tensor].first_element * sizeof *masters);
  read_parameters(t, tensor, parameters);
  if (memory_error(memory) != NULL) return false;
  for (uint64_t done = 0; done < bytes;) {
    ssize_t got = pread(fileno(t->whole), (char *)masters + done, bytes - done, at + (off_t)done);
    if (got <= 0) return memory_fail(memory, "cannot read the masters that all ranks have written");
    done += (uint64_t)got;
  }
  sight->masters = gpt_hash(sight->masters, masters, bytes);
  sight->parameters = gpt_hash(sight->parameters, parameters, elements * sizeof *parameters);
  for (uint64_t i = 0; i < elements; i++) sight->wrong += gpt_bf16_from_f32(masters[i]) != parameters[i];
  return true;
}

uint64_t train_gpt_ranks_hash(trainer_t *t) {
  memory_t *memory = &t->memory;
  const device_t *device = t->operators->device;
  uint64_t longest = 0;
  if (memory->group == NULL) return model_hash(&t->model);
  for (int i = 0; i < memory->tensor_count; i++) {
    if (memory->tensors[i].elements > longest) longest = memory->tensors[i].elements;
  }
  float *masters = malloc(longest * sizeof *masters);
  uint16_t *parameters = device->host_alloc(longest * sizeof *parameters);
  sight_t sight = { GPT_HASH_START, GPT_HASH_START, 0 }, all[TRAIN_GPT_RANKS_MAX] = { 0 };
  if (masters == NULL || parameters == NULL) memory_fail(memory, "out of memory for the hash of the parameters");
  memory_store(memory, GEMINI_KIND_MASTER, fileno(t->whole));
  memory_exchange(memory, &t->ranks.rank, sizeof t->ranks.rank, all); /* all ranks have written */
  for (int i = 0; i < memory->tensor_count && memory_error(memory) == NULL; i++) {
    look(t, i, masters, parameters, &sight);
  }
  memory_exchange(memory, &sight, sizeof sight, all);
  for (uint32_t rank = 0; rank < t->ranks.ranks && memory_error(memory) == NULL; rank++) {
    char message[160];
    if (all[rank].wrong == 0 && memcmp(&all[rank], &all[0], sizeof *all) == 0) continue;
    snprintf(message, sizeof message,
             "ranks see different parameters: hash %016" PRIx64 " on rank 0, %016" PRIx64 " on rank %" PRIu32
             ", where %" PRIu64 " are not their masters",
             all[0].parameters, all[rank].parameters, rank, all[rank].wrong);
    memory_fail(memory, message);
  }
  free(masters);
  device->host_free(parameters);
  return sight.masters;
}
