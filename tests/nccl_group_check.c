/* Groups of managers over the machine's own NCCL: training of a small sharded model on real GPUs, against the model that
 * every rank computes by itself; and a rank that is killed. Only public headers, the shared library and the driver.
 * Built and run by nccl_check.sh. SPDX-License-Identifier: Apache-2.0
 *
 * nccl_group_check [--threads] [--shared-gpu] RANKS...: groups of these sizes. --threads runs the ranks as threads of one
 * process, which only the stand-ins of the unit tests allow; no rank is killed then. Rank r uses GPU r, of threads r
 * modulo 2, with --shared-gpu always 0: see nccl_check.c. */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#include "fork.h"
#include "integration/group_world.h"

#define NS_PER_S UINT64_C(1000000000)
enum { MOST_RANKS = RANKS_MOST, SCALE = 32, FEW_LAYERS = 8, KILLED_IN_STEP = 2 };

static struct shared {
  pthread_barrier_t barrier;
  gemini_group_id_t id;
  _Atomic uint64_t killed_ns; /* Atomic: when the last rank is about to be killed; 0: not yet */
} *shared;
static bool threads, shared_gpu;
static uint64_t deadline_ns = 5 * NS_PER_S; /* where a rank is killed */

/* ---- the driver: as much as copies need */
typedef void *handle_t;
static struct {
  int (*init)(unsigned flags);
  int (*device_get)(int *device_out, int ordinal);
  int (*retain)(handle_t *context_out, int device);
  int (*release)(int device);
  int (*current_set)(handle_t context);
  int (*copy_h2d)(unsigned long long to, const void *from, size_t bytes, handle_t stream);
  int (*copy_d2h)(void *to, unsigned long long from, size_t bytes, handle_t stream);
  int (*event_create)(handle_t *event_out, unsigned flags);
  int (*event_record)(handle_t event, handle_t stream);
  int (*event_query)(handle_t event);
  int (*event_destroy)(handle_t event);
} driver;
static void find(void *library, const char *name, void *function_out) {
  void *symbol = dlsym(library, name);
  CHECK(symbol);
  memcpy(function_out, &symbol, sizeof symbol);
}
static void driver_open(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  CHECK(library);
  find(library, "cuInit", &driver.init);
  find(library, "cuDeviceGet", &driver.device_get);
  find(library, "cuDevicePrimaryCtxRetain", &driver.retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", &driver.release);
  find(library, "cuCtxSetCurrent", &driver.current_set);
  find(library, "cuMemcpyHtoDAsync_v2", &driver.copy_h2d);
  find(library, "cuMemcpyDtoHAsync_v2", &driver.copy_d2h);
  find(library, "cuEventCreate", &driver.event_create);
  find(library, "cuEventRecord", &driver.event_record);
  find(library, "cuEventQuery", &driver.event_query);
  find(library, "cuEventDestroy_v2", &driver.event_destroy);
  CHECK_EQ(driver.init(0), 0);
}
static handle_t contexts[MOST_RANKS]; /* by GPU */

static void copy(uint32_t ordinal, void *stream, void *to, const void *from, uint64_t bytes, bool to_device) {
  handle_t event;
  int result;
  CHECK_EQ(driver.current_set(contexts[ordinal]), 0);
  if (to_device) CHECK_EQ(driver.copy_h2d((uintptr_t)to, from, bytes, stream), 0);
  else CHECK_EQ(driver.copy_d2h(to, (uintptr_t)from, bytes, stream), 0);
  CHECK_EQ(driver.event_create(&event, 2), 0); /* without times */
  CHECK_EQ(driver.event_record(event, stream), 0);
  while ((result = driver.event_query(event)) == 600) /* not ready */
    nanosleep(&(struct timespec){ 0, 20000 }, NULL);
  CHECK_EQ(result, 0);
  CHECK_EQ(driver.event_destroy(event), 0);
  CHECK_EQ(driver.current_set(NULL), 0);
}

/* ---- a rank */
typedef struct check_rank {
  void (*fn)(struct check_rank *c);
  uint32_t rank, ranks, flags;
  shape_t shape;
  gemini_group_config_t group;
  int fd;
} check_rank_t;

/* Rank 0 makes the id: its process must stay until all have joined. */
static void meet(check_rank_t *c) {
  pthread_barrier_wait(&shared->barrier);
  if (!c->rank) CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_NCCL, c->ranks, &shared->id));
  pthread_barrier_wait(&shared->barrier);
  c->group = (gemini_group_config_t)GEMINI_GROUP_CONFIG_INIT;
  c->group.id = &shared->id;
  c->group.flags = c->flags;
}
static uint32_t gpu_of(const check_rank_t *c) { return shared_gpu ? 0 : threads ? c->rank % 2 : c->rank; }
static shape_t shape_of(const check_rank_t *c, uint32_t stage, uint32_t element_bytes) {
  return (shape_t){ .ranks = c->ranks,
                    .stage = stage,
                    .element_bytes = element_bytes,
                    .device_chunks = 64,
                    .host_chunks = 64,
                    .unused = stage == GEMINI_ZERO_PARAMS,
                    .device = GEMINI_DEVICE_CUDA,
                    .ordinal = gpu_of(c),
                    .copy = copy,
                    .scale = SCALE,
                    .layers = shared_gpu || threads ? FEW_LAYERS : SCALE };
}
static void train(check_rank_t *c, uint32_t stage, uint32_t flags, uint32_t micro_batches, uint32_t replicas) {
  const uint32_t bytes = stage == GEMINI_ZERO_GRADIENTS ? 2 : 4;
  c->flags = flags;
  meet(c);
  shape_t shape = shape_of(c, stage, bytes);
  shape.micro_batches = micro_batches;
  shape.replicas = replicas;
  uint64_t begin = now_ns();
  train_rank(&shape, c->rank, c->group, c->fd);
  if (c->rank) return;
  printf("  %u ranks, %u replicas, stage %u, %u bytes, %s, %u micro-batches: %u steps ok after %.2f s\n", c->ranks,
         replicas ? replicas : 1, stage, bytes, flags ? "rank order" : "NCCL's order",
         micro_batches ? micro_batches : 1, steps_of(&shape), (double)(now_ns() - begin) / 1e9);
  fflush(stdout);
}
/* NCCL's own sums have the bits of the model only of two ranks. */
static void trains(check_rank_t *c) {
  for (uint32_t flags = c->ranks > 2 ? GEMINI_GROUP_RANK_ORDER : 0; flags <= GEMINI_GROUP_RANK_ORDER; flags++)
    for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) train(c, stage, flags, 0, 0);
  for (uint32_t stage = threads ? GEMINI_ZERO_PARAMS : GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++)
    train(c, stage, GEMINI_GROUP_RANK_ORDER, 2, 0);
}
/* Two replicas: each sum is of two values at most, so NCCL's has the bits of the model also with 4 ranks. */
static void replicas_train(check_rank_t *c) {
  for (uint32_t flags = 0; flags <= GEMINI_GROUP_RANK_ORDER; flags++)
    for (uint32_t stage = threads ? GEMINI_ZERO_PARAMS : GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++)
      train(c, stage, flags, stage == GEMINI_ZERO_GRADIENTS ? 2 : 0, 2);
}

/* The last rank ends in the middle of a step. */
static void is_killed(check_rank_t *c) {
  rank_t *k = malloc(sizeof *k);
  gemini_status_t status = GEMINI_OK;
  meet(c);
  c->group.deadline_ns = deadline_ns;
  const shape_t shape = shape_of(c, GEMINI_ZERO_PARAMS, 4);
  rank_open(k, &shape, c->rank, c->group);
  for (uint32_t n = 0; n < KILLED_IN_STEP; n++) CHECK_OK(step(k, n, true));
  if (c->rank + 1 == c->ranks) {
    atomic_store(&shared->killed_ns, now_ns());
    kill(getpid(), SIGKILL);
  }
  while (!status) status = step(k, KILLED_IN_STEP, true);
  const uint64_t failed_ns = now_ns();
  CHECK_EQ(status, GEMINI_ERR_PEER);
  printf("  rank %u: failed after %.1f s: %s\n", c->rank, (double)(failed_ns - shared->killed_ns) / 1e9,
         world_error().message);
  CHECK(failed_ns - shared->killed_ns < deadline_ns + 10 * NS_PER_S);
  CHECK_STATUS(gemini_stream_synchronize(k->w.mgr, k->w.stream), GEMINI_ERR_PEER);
  CHECK_EQ(atomic_load(&k->wrong_on_host), 0);
  gemini_status_t closed = gemini_manager_close(k->w.mgr);
  if (closed && closed != GEMINI_ERR_PEER && closed != GEMINI_ERR_DEVICE) CHECK_OK(closed);
  printf("  rank %u: closed after %.1f s\n", c->rank, (double)(now_ns() - failed_ns) / 1e9);
  CHECK(now_ns() - failed_ns < 10 * deadline_ns);
  fflush(stdout);
  model_free(k);
  free(k);
}

static void *rank_main(void *user) {
  check_rank_t *c = user;
  if (!threads) {
    int device;
    driver_open();
    CHECK_EQ(driver.device_get(&device, (int)gpu_of(c)), 0);
    CHECK_EQ(driver.retain(&contexts[gpu_of(c)], device), 0);
  }
  c->fn(c);
  return NULL;
}

/* ---- groups */
static void run_threads(uint32_t ranks, void (*fn)(check_rank_t *c), int fd) {
  pthread_t made[MOST_RANKS];
  check_rank_t all[MOST_RANKS];
  for (uint32_t r = 0; r < ranks; r++) {
    all[r] = (check_rank_t){ .fn = fn, .rank = r, .ranks = ranks, .fd = fd };
    CHECK(!pthread_create(&made[r], NULL, rank_main, &all[r]));
  }
  for (uint32_t r = 0; r < ranks; r++) CHECK(!pthread_join(made[r], NULL));
}
static void run_processes(uint32_t ranks, void (*fn)(check_rank_t *c), int fd, bool kills) {
  pid_t pids[MOST_RANKS];
  bool failed = false;
  for (uint32_t r = 0; r < ranks; r++) {
    if ((pids[r] = fork_child())) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    check_rank_t c = { .fn = fn, .rank = r, .ranks = ranks, .fd = fd };
    rank_main(&c);
    exit(0);
  }
  for (uint32_t left = ranks; left; left--) {
    int end;
    pid_t pid = waitpid(-1, &end, 0);
    CHECK(pid > 0);
    if (end == 0 || failed || (kills && pid == pids[ranks - 1] && WIFSIGNALED(end))) continue;
    failed = true; /* the others would wait for it */
    for (uint32_t r = 0; r < ranks; r++)
      if (pids[r] != pid) kill(pids[r], SIGKILL);
  }
  CHECK(!failed);
}
static void run(uint32_t ranks, const char *name, void (*fn)(check_rank_t *c), bool kills) {
  pthread_barrierattr_t attributes;
  int fd = memfd_create("stored", MFD_CLOEXEC);
  printf("%u ranks: groups, %s\n", ranks, name);
  fflush(stdout);
  memset(shared, 0, sizeof *shared);
  CHECK(!pthread_barrierattr_init(&attributes));
  CHECK(!pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED));
  CHECK(!pthread_barrier_init(&shared->barrier, &attributes, ranks));
  if (threads) run_threads(ranks, fn, fd);
  else run_processes(ranks, fn, fd, kills);
  printf("%u ranks: groups, %s: ok\n", ranks, name);
  fflush(stdout);
  close(fd);
}

static void hangs(int signal) {
  static const char words[] = "a rank hangs: the check ends after 540 s\n";
  (void)signal;
  (void)!write(2, words, sizeof words - 1);
  _exit(1); /* processes of other ranks end with this one */
}

int main(int argc, char **argv) {
  int first = 1;
  for (; first < argc && argv[first][0] == '-'; first++) {
    if (!strcmp(argv[first], "--threads")) threads = true;
    else if (!strcmp(argv[first], "--shared-gpu")) shared_gpu = true;
    else CHECK(!"an option that there is");
  }
  if (shared_gpu) deadline_ns = 20 * NS_PER_S;
  signal(SIGALRM, hangs);
  alarm(540);
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  if (threads) { /* a process that has used the driver must not fork */
    driver_open();
    for (int i = 0; i < 2; i++) {
      int device;
      CHECK_EQ(driver.device_get(&device, i), 0);
      CHECK_EQ(driver.retain(&contexts[i], device), 0);
    }
  }
  for (int i = first; i < argc; i++) {
    uint32_t ranks = (uint32_t)strtoul(argv[i], NULL, 10);
    CHECK(ranks >= 2);
    if (ranks > MOST_RANKS) continue; /* more than the model's test has */
    run(ranks, "training", trains, false);
    /* more threads have more streams than the stand-in for the driver has queues */
    if (ranks == 2 || (ranks == 4 && !threads)) run(ranks, "replicas", replicas_train, false);
    if (!threads) run(ranks, "a rank is killed", is_killed, true);
  }
  return 0;
}
