/* The training step of training_step.c over several ranks, each a process that keeps its share of the model (ZeRO).
 * SPDX-License-Identifier: Apache-2.0
 *
 *   training_ranks [RANKS]    default: 4
 *
 * What differs from one process is marked by "ranks:" below; docs/groups.md explains it. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gemini.h"
#include "gemini/group.h"

enum { LAYERS = 8, ELEMENTS = 1 << 16, STEPS = 4, RANKS_MOST = 16 };

static void forward(void *weight) { (void)weight; /* stands for a kernel */ }
static void backward(void *grad) {
  for (int i = 0; i < ELEMENTS; i++) ((float *)grad)[i] = 1;
}

/* Gradient descent over one span. ranks: a span has elements of this rank's slices only, and its gradients are sums
 * over all ranks, so the mean needs a division. */
typedef struct optimizer {
  gemini_manager_t mgr;
  float rate; /* divided by the number of ranks */
  _Atomic bool failed;
} optimizer_t;
typedef struct queued {
  float rate;
  gemini_update_span_t span;
} queued_t;
static void descend(const gemini_update_span_t *span, float rate) {
  float *param = span->ptr[0], *master = span->ptr[2];
  const float *grad = span->ptr[1];
  for (uint64_t i = 0; i < span->element_count; i++) param[i] = master[i] -= rate * grad[i];
}
static void descend_queued(void *user) {
  const queued_t *queued = user;
  descend(&queued->span, queued->rate);
  free(user);
}
static void sgd(void *user, const gemini_update_span_t *span) {
  optimizer_t *optimizer = user;
  if (span->tier == GEMINI_TIER_HOST) {
    descend(span, optimizer->rate);
    return;
  }
  queued_t *queued = malloc(sizeof *queued); /* the span is only valid until this function returns */
  if (queued) *queued = (queued_t){ optimizer->rate, *span };
  if (!queued || gemini_stream_call(optimizer->mgr, span->stream, descend_queued, queued)) optimizer->failed = true;
}

/* Returns from train() at the first failure; the process then ends, and the other ranks' calls fail, too. */
#define TRY(call)                      \
  do {                                 \
    gemini_status_t try_status = call; \
    if (try_status) return try_status; \
  } while (0)

static gemini_status_t train(uint32_t rank, uint32_t ranks, const gemini_group_id_t *id, float *trained_out) {
  /* ranks: the host budget is one rank's, a share of the machine's memory. */
  gemini_config_t config = GEMINI_CONFIG_INIT;
  config.device = GEMINI_DEVICE_SIMULATED;
  config.device_bytes = 4 << 20;
  config.host_bytes = (64 << 20) / ranks;
  optimizer_t optimizer = { .rate = 0.5f / (float)ranks };
  TRY(gemini_manager_open(&config, &optimizer.mgr));
  const gemini_manager_t mgr = optimizer.mgr;

  /* ranks: joins the group; waits until all ranks have. */
  gemini_group_config_t joining = GEMINI_GROUP_CONFIG_INIT;
  joining.rank = rank;
  joining.ranks = ranks;
  joining.id = id;
  gemini_group_t group;
  TRY(gemini_group_open(mgr, &joining, &group));

  /* ranks: the parameters name the group; gradients reuse their bytes and say what type their values have. */
  gemini_arena_t params, grads, masters;
  gemini_arena_config_t arena = GEMINI_ARENA_CONFIG_INIT;
  arena.element_bytes = sizeof(float);
  arena.kind = GEMINI_KIND_PARAM;
  arena.group = group;
  arena.zero_stage = GEMINI_ZERO_PARAMS;
  TRY(gemini_arena_create(mgr, &arena, &params));
  arena.group = NULL;
  arena.zero_stage = 0;
  arena.kind = GEMINI_KIND_GRAD;
  arena.reuse = params;
  arena.dtype = GEMINI_DTYPE_F32;
  TRY(gemini_arena_create(mgr, &arena, &grads));
  arena.kind = GEMINI_KIND_MASTER;
  arena.reuse = NULL;
  arena.like = params;
  arena.dtype = 0;
  TRY(gemini_arena_create(mgr, &arena, &masters));
  gemini_tensor_t weight[LAYERS], grad[LAYERS];
  char name[32];
  for (int i = 0; i < LAYERS; i++) {
    snprintf(name, sizeof name, "layer %d", i);
    TRY(gemini_tensor_register(mgr, params, name, ELEMENTS * sizeof(float), GEMINI_OFFSET_NEXT, &weight[i]));
    TRY(gemini_tensor_counterpart(mgr, weight[i], grads, &grad[i]));
  }
  gemini_stream_t stream;
  TRY(gemini_stream_create(mgr, &stream));

  for (int step = 0; step < STEPS; step++) {
    TRY(gemini_iteration_begin(mgr));
    TRY(gemini_phase_set(mgr, GEMINI_PHASE_FORWARD));
    for (int i = 0; i < LAYERS; i++) {
      gemini_access_t use = gemini_tensor_access(weight[i], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
      snprintf(name, sizeof name, "forward %d", i);
      TRY(gemini_op_begin(mgr, name, stream));
      TRY(gemini_acquire(mgr, &use, 1, stream));
      TRY(gemini_stream_call(mgr, stream, forward, use.ptr));
      TRY(gemini_release(mgr, &use, 1, stream));
      TRY(gemini_op_end(mgr));
    }
    TRY(gemini_phase_set(mgr, GEMINI_PHASE_BACKWARD));
    for (int i = LAYERS; i-- > 0;) {
      gemini_access_t uses[2] = { gemini_tensor_access(weight[i], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE),
                                  gemini_tensor_access(grad[i], 0, 0, GEMINI_WRITE, GEMINI_TIER_DEVICE) };
      snprintf(name, sizeof name, "backward %d", i);
      TRY(gemini_op_begin(mgr, name, stream));
      TRY(gemini_acquire(mgr, uses, 2, stream));
      TRY(gemini_stream_call(mgr, stream, backward, uses[1].ptr));
      TRY(gemini_release(mgr, uses, 2, stream));
      /* ranks: this gradient is complete; it is added over the ranks while the backward phase goes on. */
      TRY(gemini_tensor_state_set(mgr, grad[i], GEMINI_STATE_READY_FOR_REDUCE));
      TRY(gemini_op_end(mgr));
    }
    TRY(gemini_phase_set(mgr, GEMINI_PHASE_UPDATE));
    const gemini_arena_t arenas[] = { params, grads, masters };
    const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE };
    gemini_update_t update = GEMINI_UPDATE_INIT;
    update.arenas = arenas;
    update.modes = modes;
    update.arena_count = 3;
    update.stream = stream;
    update.fn = sgd;
    update.user = &optimizer;
    TRY(gemini_update(mgr, &update));
    TRY(gemini_iteration_end(mgr));
  }

  /* ranks: on the device every rank can read a whole weight; all ranks make this call. */
  gemini_access_t last = gemini_tensor_access(weight[0], 0, 0, GEMINI_READ, GEMINI_TIER_DEVICE);
  TRY(gemini_acquire(mgr, &last, 1, GEMINI_STREAM_CALLER));
  *trained_out = *(const float *)last.ptr;
  TRY(gemini_release(mgr, &last, 1, GEMINI_STREAM_CALLER));

  gemini_group_stats_t stats = GEMINI_GROUP_STATS_INIT;
  TRY(gemini_group_stats(mgr, group, &stats));
  if (!rank)
    printf("%u ranks: rank 0 gathered %d chunks and added %d\n", ranks, (int)stats.gathered_chunks,
           (int)stats.reduced_chunks);
  TRY(gemini_manager_close(mgr));
  return optimizer.failed ? GEMINI_ERR_DEVICE : GEMINI_OK;
}

static int run(uint32_t rank, uint32_t ranks, const gemini_group_id_t *id) {
  float trained = 0;
  if (train(rank, ranks, id, &trained)) {
    gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
    if (!gemini_last_error(&info)) fprintf(stderr, "rank %u: %s: %s\n", rank, info.operation, info.message);
    return 1;
  }
  return trained != -0.5f * STEPS;
}

/* Rank 0 makes the group's id, and the other ranks get it: here as copies of this process, elsewhere in a message. */
int main(int argc, char **argv) {
  long ranks = argc > 1 ? strtol(argv[1], NULL, 10) : 4;
  if (ranks < 1 || ranks > RANKS_MOST) {
    fprintf(stderr, "training_ranks: RANKS is %ld, must be 1 to %d\n", ranks, RANKS_MOST);
    return 2;
  }
  gemini_group_id_t id;
  if (gemini_group_id_make(GEMINI_TRANSPORT_SHARED, (uint32_t)ranks, &id)) {
    fprintf(stderr, "training_ranks: cannot make a group\n");
    return 1;
  }
  pid_t children[RANKS_MOST];
  for (uint32_t rank = 1; rank < ranks; rank++) {
    children[rank] = fork();
    if (!children[rank]) return run(rank, (uint32_t)ranks, &id);
  }
  int failed = run(0, (uint32_t)ranks, &id);
  for (uint32_t rank = 1; rank < ranks; rank++) {
    int end = 1;
    if (children[rank] < 0 || waitpid(children[rank], &end, 0) < 0 || end) failed = 1;
  }
  if (!failed) printf("a weight that began at 0 is %.1f on all ranks\n", -0.5 * STEPS);
  return failed;
}
