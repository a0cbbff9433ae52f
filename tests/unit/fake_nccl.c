/* A stand-in for NCCL's library among threads of one process, over the fake CUDA driver. SPDX-License-Identifier: Apache-2.0
 *
 * Each rank is a thread. Collectives are kernels on the ranks' streams: the last rank that arrives moves the bytes of
 * all. It is stricter than NCCL: buffers must be in place, contexts current, ranks must agree. As in NCCL, a
 * non-blocking communicator queues its work some time after its function has returned, sums are not in the order of
 * ranks, and a kernel whose peers do not come runs until its communicator is aborted. */
#include "fake_nccl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/dtype.h"
#include "comm/nccl_library.h"
#include "device/sum.h"
#include "fake_cuda.h"

#define API __attribute__((visibility("default")))
/* Callers find these functions by name, as they find NCCL's; no header declares them. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

enum { RANKS = 16, SLOTS = 2048, OPS = 2 * RANKS, NAMES = 32 };
enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, SEND, RECV };

typedef struct meeting { /* of one collective, of all ranks */
  int kind, type, root;
  uint64_t number, count;
  uint32_t of, arrived; /* of: collectives in the group of NCCL's that it is in; 1: it is alone */
  const void *from[RANKS];
  void *to[RANKS];
  bool done, left; /* left: the kernel of one of the ranks was aborted */
} meeting_t;
typedef struct message {
  struct message *next;
  const void *from;
  void *to;
  uint64_t sent, received;           /* bytes */
  bool has_from, has_to, done, left; /* left: the kernel of one of the two was aborted */
} message_t;
typedef struct group {
  struct group *next;
  uint64_t id;
  int ranks;
  uint32_t joined;
  meeting_t meetings[SLOTS];
  message_t *messages[RANKS][RANKS]; /* [from][to], oldest first */
} group_t;

typedef struct op {
  int kind, type, peer;
  const void *from;
  void *to;
  uint64_t count;
  meeting_t *meeting;
  message_t *message;
} op_t;
typedef struct kernel {
  struct kernel *next; /* of all */
  struct nccl_comm *comm;
  cu_stream_t stream;
  op_t ops[OPS];
  uint32_t count;
  uint64_t number; /* of the communicator's kernels, which run one after the other on whatever streams */
  bool arrived;
} kernel_t;

typedef struct registration {
  struct registration *next;
  uintptr_t base;
  uint64_t bytes, memory; /* memory: what was mapped there, by its name */
} registration_t;

struct nccl_comm {
  struct nccl_comm *next;
  group_t *group;
  int rank, device;
  bool blocking, joined, finalized, over, busy;
  _Atomic bool aborted; /* Atomic: a word of its own, that kernels look at */
  nccl_result_t state;
  uint32_t polls; /* left until `pending` is queued */
  kernel_t *pending;
  uint64_t number;                      /* of collectives */
  uint32_t max_ctas;                    /* 0: not set */
  uint64_t kernels_queued, kernels_run; /* counts */
  registration_t *registered;
};

#define DEFAULTS { 23007, 2, "", NULL, 0, false, false, false }
API fake_nccl_options_t fake_nccl = DEFAULTS;
API const char *fake_nccl_lacking;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static group_t *groups;
static struct nccl_comm *comms;
static kernel_t *kernels;
static uint64_t ids;
static _Atomic uint32_t violations; /* Atomic: counted without the lock, too */
static uint32_t live, registered, in_registered, beside_registered;
static struct {
  const char *name;
  uint32_t calls, max_ctas; /* of the communicator that was used last */
} counts[NAMES];
static const char *fail_function;
static uint32_t fail_call;
static int fail_result, async_results[RANKS];
static _Thread_local int depth;
static _Thread_local kernel_t *grouped;

static void violation(const char *function, const char *what) {
  fprintf(stderr, "    fake NCCL: %s: %s\n", function, what);
  violations++;
}
/* Counts the call; does this one fail? With the lock. */
static nccl_result_t counted(const char *function, uint32_t max_ctas) {
  int i = 0;
  while (counts[i].name && strcmp(counts[i].name, function) != 0) i++;
  counts[i].name = function;
  counts[i].calls++;
  counts[i].max_ctas = max_ctas;
  if (!fail_function || strcmp(fail_function, function) != 0 || fail_call-- > 0) return NCCL_SUCCESS;
  fail_function = NULL;
  return fail_result;
}
static bool is_stalled(const struct nccl_comm *comm, const char *function) {
  return fake_nccl.stalled && !strcmp(fake_nccl.stalled, function) && comm->rank == (int)fake_nccl.stalled_rank;
}

/* What every call of a communicator begins with. With the lock. */
static nccl_result_t begin(struct nccl_comm *comm, const char *function) {
  if (comm->over) violation(function, "the communicator has been destroyed");
  if (fake_cuda_device() != comm->device && strcmp(function, "ncclCommAbort") != 0) /* which uses its own device */
    violation(function, "another context is current");
  if (comm->busy) violation(function, "another thread calls the same communicator");
  comm->busy = true;
  /* Give another thread that calls at the same time the time to. */
  pthread_mutex_unlock(&lock);
  nanosleep(&(struct timespec){ 0, 2000 }, NULL);
  pthread_mutex_lock(&lock);
  return counted(function, comm->max_ctas);
}
static nccl_result_t end(struct nccl_comm *comm, nccl_result_t result) {
  comm->busy = false;
  pthread_mutex_unlock(&lock);
  return result;
}
/* The same for what NCCL does from a thread of its own. */
static nccl_result_t left_to_thread(struct nccl_comm *comm, const char *function) {
  comm->polls = is_stalled(comm, function) ? UINT32_MAX : fake_nccl.polls;
  comm->state = comm->polls ? NCCL_IN_PROGRESS : NCCL_SUCCESS;
  return comm->state;
}

/* ---- kernels. Arrival and progress, with the lock. */
static uint32_t width_of(int type) {
  switch (type) {
  case NCCL_FLOAT64: return 8;
  case NCCL_FLOAT32: return 4;
  case NCCL_FLOAT16:
  case NCCL_BFLOAT16: return 2;
  default: return 1;
  }
}
static uint32_t dtype_of(int type) {
  return type == NCCL_FLOAT32    ? GEMINI_DTYPE_F32
         : type == NCCL_BFLOAT16 ? GEMINI_DTYPE_BF16
         : type == NCCL_FLOAT16  ? GEMINI_DTYPE_F16
                                 : GEMINI_DTYPE_F64;
}
static void meet_all(meeting_t *m, int ranks) {
  const uint64_t width = width_of(m->type), bytes = m->count * width,
                 whole = m->kind == REDUCE_SCATTER ? (uint64_t)ranks : 1;
  if (m->kind == ALL_GATHER) {
    for (int to = 0; to < ranks; to++)
      for (int from = 0; from < ranks; from++)
        if (from != to) memcpy((char *)m->to[to] + (uint64_t)from * bytes, m->from[from], bytes);
    m->done = true;
    return;
  }
  if (m->kind == BROADCAST) {
    for (int to = 0; to < ranks; to++)
      if (to != m->root) memcpy(m->to[to], m->from[m->root], bytes);
    m->done = true;
    return;
  }
  unsigned char *sum = malloc(bytes * whole + 1);
  const void *from[RANKS];
  for (int r = 0; r < ranks; r++) from[r] = m->from[ranks - 1 - r]; /* in another order than that of ranks */
  gmi_reduce(dtype_of(m->type), GMI_REDUCE_SUM_ROUNDED, (uint32_t)ranks, from, sum, m->count * whole);
  for (int r = 0; r < ranks; r++) memcpy(m->to[r], sum + (m->kind == REDUCE_SCATTER ? (uint64_t)r * bytes : 0), bytes);
  free(sum);
  m->done = true;
}

static void arrive_meeting(struct nccl_comm *comm, op_t *op, uint32_t of) {
  group_t *g = comm->group;
  meeting_t *m = &g->meetings[comm->number % SLOTS];
  if (m->number != comm->number + 1)
    *m = (meeting_t){
      .kind = op->kind, .type = op->type, .root = op->peer, .of = of, .number = comm->number + 1, .count = op->count
    };
  if (m->of != of) violation("a collective", "ranks make different groups");
  if (m->kind != op->kind || m->type != op->type || m->root != op->peer || m->count != op->count)
    violation("a collective", "ranks call different ones");
  comm->number++;
  m->from[comm->rank] = op->from;
  m->to[comm->rank] = op->to;
  op->meeting = m;
  if (++m->arrived == (uint32_t)g->ranks && !m->left) meet_all(m, g->ranks);
}
static void arrive_message(struct nccl_comm *comm, op_t *op) {
  bool sends = op->kind == SEND;
  int from = sends ? comm->rank : op->peer, to = sends ? op->peer : comm->rank;
  message_t **at = &comm->group->messages[from][to], *m;
  while ((m = *at) && (sends ? m->has_from : m->has_to)) at = &m->next;
  if (!m) m = *at = calloc(1, sizeof *m);
  if (sends) m->from = op->from, m->sent = op->count, m->has_from = true;
  else m->to = op->to, m->received = op->count, m->has_to = true;
  op->message = m;
  if (!m->has_from || !m->has_to || m->left) return;
  if (m->sent != m->received) violation("ncclRecv", "the peer sends another number of bytes");
  else memcpy(m->to, m->from, m->sent);
  m->done = true;
}
/* An aborted kernel ends before its peers have come: none of them touches its memory from here on. */
static void leave(kernel_t *k) {
  for (uint32_t i = 0; i < k->count; i++) {
    if (k->ops[i].meeting) k->ops[i].meeting->left = true;
    if (k->ops[i].message) k->ops[i].message->left = true;
  }
}
static bool kernel_step(void *user) {
  kernel_t *k = user;
  pthread_mutex_lock(&lock);
  if (!k->comm->aborted && k->number != k->comm->kernels_run) {
    pthread_mutex_unlock(&lock);
    return false;
  }
  if (!k->arrived && !k->comm->aborted) {
    for (uint32_t i = 0; i < k->count; i++) {
      if (k->ops[i].kind < SEND) arrive_meeting(k->comm, &k->ops[i], k->count);
      else arrive_message(k->comm, &k->ops[i]);
    }
    k->arrived = true;
  }
  bool done = true;
  for (uint32_t i = 0; i < k->count && done; i++)
    done = k->ops[i].meeting ? k->ops[i].meeting->done : k->ops[i].message && k->ops[i].message->done;
  done = (done && !fake_nccl.kernels_hang) || k->comm->aborted;
  done = done && !fake_nccl.kernels_stay;
  if (done && k->comm->aborted) leave(k);
  k->comm->kernels_run += done;
  pthread_mutex_unlock(&lock);
  return done;
}

/* Gives up the lock, as the driver may block. */
static nccl_result_t launch(kernel_t *k) {
  k->number = k->comm->kernels_queued++;
  pthread_mutex_unlock(&lock);
  int result = fake_cuda_kernel(k->stream, kernel_step, k);
  pthread_mutex_lock(&lock);
  return result ? 1 /* ncclUnhandledCudaError */ : NCCL_SUCCESS;
}
static nccl_result_t queue(struct nccl_comm *comm, kernel_t *k, const char *function) {
  if (comm->blocking) return launch(k);
  comm->pending = k;
  nccl_result_t result = left_to_thread(comm, function);
  if (result == NCCL_SUCCESS) result = launch(k);
  return result;
}
static kernel_t *kernel_new(struct nccl_comm *comm, cu_stream_t stream) {
  kernel_t *k = calloc(1, sizeof *k);
  k->comm = comm;
  k->stream = stream;
  k->next = kernels;
  kernels = k;
  return k;
}

/* With the lock. NCCL would copy to what was mapped at the address when it was registered. */
static void look_up(const struct nccl_comm *comm, const void *buffer, uint64_t bytes, const char *function) {
  for (const registration_t *r = comm->registered; r; r = r->next) {
    const uintptr_t at = (uintptr_t)buffer;
    if (at >= r->base + r->bytes || r->base >= at + bytes) continue;
    if (at < r->base || at + bytes > r->base + r->bytes) violation(function, "a part of the buffer is registered");
    if (fake_cuda_memory_at(buffer) != r->memory) violation(function, "other memory was registered at the address");
    in_registered++;
    return;
  }
  beside_registered += comm->registered != NULL;
}
/* A call that queues an operation: alone, or as a part of the thread's group. */
static nccl_result_t operation(struct nccl_comm *comm, cu_stream_t stream, op_t op, const char *function) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, function);
  if (!result) result = async_results[comm->rank];
  if (result) return end(comm, result);
  if (comm->state == NCCL_IN_PROGRESS) violation(function, "the previous call is in progress");
  bool both = op.kind < SEND;
  uint64_t bytes = op.count * width_of(op.type), all = op.kind <= REDUCE_SCATTER ? (uint64_t)comm->group->ranks : 1;
  const void *buffer = op.kind == ALL_GATHER || op.kind == RECV ? op.to : op.from;
  if (!fake_cuda_reachable(buffer, bytes * all)) violation(function, "the device cannot reach the buffer");
  look_up(comm, buffer, bytes * all, function);
  if (!both && op.type != NCCL_INT8) violation(function, "not bytes");
  if (!op.count || (!both && (op.peer < 0 || op.peer >= comm->group->ranks || op.peer == comm->rank)))
    violation(function, "no values, or no such peer");
  if (both ? depth && op.kind != ALL_GATHER && op.kind != REDUCE_SCATTER : !depth)
    violation(function, "messages come in groups, of collectives only gathers and reduce-scatters may");
  if (depth && grouped &&
      (grouped->comm != comm || grouped->stream != stream || grouped->count == OPS ||
       (grouped->ops[0].kind < SEND ? grouped->ops[0].kind != op.kind : both)))
    violation(function, "does not belong to the group");
  if (!depth) {
    kernel_t *k = kernel_new(comm, stream);
    k->ops[k->count++] = op;
    return end(comm, queue(comm, k, function));
  }
  if (!grouped) grouped = kernel_new(comm, stream);
  grouped->ops[grouped->count++] = op;
  return end(comm, NCCL_SUCCESS);
}

/* ---- the interface */
API nccl_result_t ncclGetVersion(int *version_out) {
  *version_out = fake_nccl.version;
  return NCCL_SUCCESS;
}
API const char *ncclGetErrorString(nccl_result_t result) {
  static const char *const names[] = { "no error",
                                       "unhandled cuda error",
                                       "unhandled system error",
                                       "internal error",
                                       "invalid argument",
                                       "invalid usage",
                                       "remote process exited or there was a network error" };
  return result >= 0 && result <= NCCL_REMOTE_ERROR ? names[result] : "unknown result code";
}
API const char *ncclGetLastError(nccl_comm_t comm) {
  (void)comm;
  return fake_nccl.words;
}
API nccl_result_t ncclGetUniqueId(nccl_id_t *id_out) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = counted("ncclGetUniqueId", 0);
  memset(id_out, 0x5A, sizeof *id_out);
  uint64_t id = ++ids;
  memcpy(id_out, &id, sizeof id);
  pthread_mutex_unlock(&lock);
  return result;
}

static bool config_is_right(const nccl_config_t *config) {
  return config->size == 48 && config->magic == 0xcafebeef && config->version == GMI_NCCL_OLDEST &&
         config->cga_cluster_size == INT32_MIN && config->min_ctas == INT32_MIN && config->max_ctas != 0 &&
         !config->net_name && config->split_share == INT32_MIN && config->traffic_class == INT32_MIN;
}
API nccl_result_t ncclCommInitRankConfig(nccl_comm_t *comm_out, int ranks, nccl_id_t id, int rank,
                                         nccl_config_t *config) {
  uint64_t number;
  memcpy(&number, &id, sizeof number);
  pthread_mutex_lock(&lock);
  nccl_result_t result = counted("ncclCommInitRankConfig", 0);
  if (!config_is_right(config)) violation("ncclCommInitRankConfig", "config is not what it should be");
  if (fake_cuda_device() < 0) violation("ncclCommInitRankConfig", "no context is current");
  if (ranks < 1 || ranks > RANKS || rank < 0 || rank >= ranks) result = NCCL_INVALID_ARGUMENT;
  if (result) {
    *comm_out = NULL;
    pthread_mutex_unlock(&lock);
    return result;
  }
  group_t *g = groups;
  while (g && g->id != number) g = g->next;
  if (!g) {
    g = calloc(1, sizeof *g);
    *g = (group_t){ .next = groups, .id = number, .ranks = ranks };
    groups = g;
  }
  if (g->ranks != ranks) violation("ncclCommInitRankConfig", "ranks differ in their number");
  struct nccl_comm *comm = calloc(1, sizeof *comm);
  comm->next = comms;
  comms = comm;
  comm->group = g;
  comm->rank = rank;
  comm->device = fake_cuda_device();
  comm->blocking = config->blocking != 0;
  g->joined++;
  comm->max_ctas = config->max_ctas == INT32_MIN ? 0 : (uint32_t)config->max_ctas;
  live++;
  *comm_out = comm;
  if (!comm->blocking) result = left_to_thread(comm, "ncclCommInitRankConfig");
  pthread_mutex_unlock(&lock);
  return result;
}
API nccl_result_t ncclCommGetAsyncError(nccl_comm_t comm, nccl_result_t *result_out) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, "ncclCommGetAsyncError");
  if (comm->state == NCCL_IN_PROGRESS && comm->polls != UINT32_MAX) {
    bool all = comm->group->joined == (uint32_t)comm->group->ranks;
    if (comm->polls) comm->polls--;
    if (!comm->polls && all) {
      comm->state = comm->pending ? launch(comm->pending) : NCCL_SUCCESS;
      comm->pending = NULL;
    }
  }
  *result_out = async_results[comm->rank] ? async_results[comm->rank] : comm->state;
  return end(comm, result);
}
static nccl_result_t tell(nccl_comm_t comm, const char *function, int value, int *value_out) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, function);
  if (!result) *value_out = value;
  return end(comm, result);
}
API nccl_result_t ncclCommCount(nccl_comm_t comm, int *ranks_out) {
  return tell(comm, "ncclCommCount", comm->group->ranks, ranks_out);
}
API nccl_result_t ncclCommUserRank(nccl_comm_t comm, int *rank_out) {
  return tell(comm, "ncclCommUserRank", comm->rank, rank_out);
}
API nccl_result_t ncclCommCuDevice(nccl_comm_t comm, int *device_out) {
  return tell(comm, "ncclCommCuDevice", comm->device, device_out);
}
API nccl_result_t ncclCommFinalize(nccl_comm_t comm) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, "ncclCommFinalize");
  if (comm->finalized) violation("ncclCommFinalize", "called twice");
  comm->finalized = true;
  return end(comm, result || comm->blocking ? result : left_to_thread(comm, "ncclCommFinalize"));
}
/* With the lock. */
static void forget(registration_t **at) {
  registration_t *r = *at;
  *at = r->next;
  registered--;
  free(r);
}
/* With the lock, after begin(). */
static nccl_result_t over(nccl_comm_t comm, nccl_result_t result) {
  while (comm->registered) forget(&comm->registered);
  comm->over = true;
  live--;
  return end(comm, result);
}
API nccl_result_t ncclCommDestroy(nccl_comm_t comm) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, "ncclCommDestroy");
  if (!comm->finalized || comm->state == NCCL_IN_PROGRESS) violation("ncclCommDestroy", "it is not finalized");
  if (comm->registered) violation("ncclCommDestroy", "memory is registered");
  return over(comm, result);
}
API nccl_result_t ncclCommAbort(nccl_comm_t comm) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, "ncclCommAbort");
  comm->aborted = true;
  while (fake_nccl.abort_hangs) {
    pthread_mutex_unlock(&lock);
    nanosleep(&(struct timespec){ 0, 1000000 }, NULL);
    pthread_mutex_lock(&lock);
  }
  return over(comm, result);
}

API nccl_result_t ncclCommRegister(nccl_comm_t comm, void *memory, size_t bytes, void **handle_out) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, "ncclCommRegister");
  if (!result && !fake_cuda_reachable(memory, bytes)) violation("ncclCommRegister", "the device cannot reach it");
  registration_t *r = result ? NULL : calloc(1, sizeof *r);
  if (r) {
    *r = (registration_t){ comm->registered, (uintptr_t)memory, bytes, fake_cuda_memory_at(memory) };
    comm->registered = r;
    registered++;
    *handle_out = r;
  }
  return end(comm, result);
}
API nccl_result_t ncclCommDeregister(nccl_comm_t comm, void *handle) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = begin(comm, "ncclCommDeregister");
  registration_t **at = &comm->registered;
  while (*at && *at != handle) at = &(*at)->next;
  if (!*at) violation("ncclCommDeregister", "it is not registered");
  else if (fake_cuda_memory_at((void *)(*at)->base) != (*at)->memory)
    violation("ncclCommDeregister", "the memory has gone already");
  if (*at) forget(at);
  return end(comm, result);
}

API nccl_result_t ncclAllGather(const void *from, void *to, size_t count, int type, nccl_comm_t comm,
                                cu_stream_t stream) {
  if (type != NCCL_INT8 || from != (char *)to + (uint64_t)comm->rank * count)
    violation("ncclAllGather", "not bytes, or not in place");
  return operation(comm, stream, (op_t){ .kind = ALL_GATHER, .type = type, .from = from, .to = to, .count = count },
                   "ncclAllGather");
}
API nccl_result_t ncclBroadcast(const void *from, void *to, size_t count, int type, int root, nccl_comm_t comm,
                                cu_stream_t stream) {
  if (type != NCCL_INT8 || from != to || root < 0 || root >= comm->group->ranks)
    violation("ncclBroadcast", "not bytes, not in place, or no such root");
  return operation(comm, stream,
                   (op_t){ .kind = BROADCAST, .type = type, .peer = root, .from = from, .to = to, .count = count },
                   "ncclBroadcast");
}
API nccl_result_t ncclReduceScatter(const void *from, void *to, size_t count, int type, int how, nccl_comm_t comm,
                                    cu_stream_t stream) {
  if (how != NCCL_SUM || to != (char *)from + (uint64_t)comm->rank * count * width_of(type))
    violation("ncclReduceScatter", "no sum, or not in place");
  return operation(comm, stream, (op_t){ .kind = REDUCE_SCATTER, .type = type, .from = from, .to = to, .count = count },
                   "ncclReduceScatter");
}
API nccl_result_t ncclAllReduce(const void *from, void *to, size_t count, int type, int how, nccl_comm_t comm,
                                cu_stream_t stream) {
  if (how != NCCL_SUM || to != from) violation("ncclAllReduce", "no sum, or not in place");
  return operation(comm, stream, (op_t){ .kind = ALL_REDUCE, .type = type, .from = from, .to = to, .count = count },
                   "ncclAllReduce");
}
API nccl_result_t ncclSend(const void *from, size_t count, int type, int peer, nccl_comm_t comm, cu_stream_t stream) {
  return operation(comm, stream, (op_t){ .kind = SEND, .type = type, .peer = peer, .from = from, .count = count },
                   "ncclSend");
}
API nccl_result_t ncclRecv(void *to, size_t count, int type, int peer, nccl_comm_t comm, cu_stream_t stream) {
  return operation(comm, stream, (op_t){ .kind = RECV, .type = type, .peer = peer, .to = to, .count = count },
                   "ncclRecv");
}
API nccl_result_t ncclGroupStart(void) {
  pthread_mutex_lock(&lock);
  nccl_result_t result = counted("ncclGroupStart", 0);
  if (!result && depth++) violation("ncclGroupStart", "the thread's last group has not ended");
  pthread_mutex_unlock(&lock);
  return result;
}
API nccl_result_t ncclGroupEnd(void) {
  pthread_mutex_lock(&lock);
  kernel_t *k = grouped;
  grouped = NULL;
  nccl_result_t result = counted("ncclGroupEnd", 0);
  if (depth-- != 1) violation("ncclGroupEnd", "there is no group");
  if (!result && k) result = queue(k->comm, k, "ncclGroupEnd");
  pthread_mutex_unlock(&lock);
  return result;
}

/* ---- control */
API void *fake_nccl_symbol(const char *name) {
  void *address = NULL;
  if (fake_nccl_lacking && !strcmp(name, fake_nccl_lacking)) return NULL;
#define FIND(function)                             \
  if (!strcmp(name, #function)) {                  \
    __typeof__(&(function)) pointer = &(function); \
    memcpy(&address, &pointer, sizeof address);    \
  }
  FIND(ncclGetVersion)
  FIND(ncclGetErrorString)
  FIND(ncclGetLastError)
  FIND(ncclGetUniqueId)
  FIND(ncclCommInitRankConfig)
  FIND(ncclCommGetAsyncError)
  FIND(ncclCommCount)
  FIND(ncclCommUserRank)
  FIND(ncclCommCuDevice)
  FIND(ncclCommFinalize)
  FIND(ncclCommDestroy)
  FIND(ncclCommAbort)
  FIND(ncclCommRegister)
  FIND(ncclCommDeregister)
  FIND(ncclAllGather)
  FIND(ncclBroadcast)
  FIND(ncclReduceScatter)
  FIND(ncclAllReduce)
  FIND(ncclSend)
  FIND(ncclRecv)
  FIND(ncclGroupStart)
  FIND(ncclGroupEnd)
  return address;
}
API void fake_nccl_reset(void) {
  pthread_mutex_lock(&lock);
  for (group_t *g; (g = groups);) {
    groups = g->next;
    for (int i = 0; i < RANKS * RANKS; i++) {
      for (message_t *m; (m = g->messages[i / RANKS][i % RANKS]);) {
        g->messages[i / RANKS][i % RANKS] = m->next;
        free(m);
      }
    }
    free(g);
  }
  for (struct nccl_comm *c; (c = comms);) {
    comms = c->next;
    while (c->registered) forget(&c->registered);
    free(c);
  }
  for (kernel_t *k; (k = kernels);) {
    kernels = k->next;
    free(k);
  }
  registered = 0;
  in_registered = 0;
  beside_registered = 0;
  fake_nccl = (fake_nccl_options_t)DEFAULTS;
  fake_nccl_lacking = fail_function = NULL;
  live = 0;
  violations = 0;
  memset(counts, 0, sizeof counts);
  memset(async_results, 0, sizeof async_results);
  pthread_mutex_unlock(&lock);
}
API void fake_nccl_fail(const char *function, uint32_t call, int result) {
  pthread_mutex_lock(&lock);
  fail_function = function;
  fail_call = call;
  fail_result = result;
  pthread_mutex_unlock(&lock);
}
API uint32_t fake_nccl_calls(const char *function) {
  uint32_t calls = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < NAMES; i++)
    if (counts[i].name && !strcmp(counts[i].name, function)) calls = counts[i].calls;
  pthread_mutex_unlock(&lock);
  return calls;
}
API uint32_t fake_nccl_max_ctas(const char *function) {
  uint32_t most = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < NAMES; i++)
    if (counts[i].name && !strcmp(counts[i].name, function)) most = counts[i].max_ctas;
  pthread_mutex_unlock(&lock);
  return most;
}
static uint32_t read_count(const uint32_t *count) {
  pthread_mutex_lock(&lock);
  const uint32_t value = *count;
  pthread_mutex_unlock(&lock);
  return value;
}
API uint32_t fake_nccl_in_registered(void) { return read_count(&in_registered); }
API uint32_t fake_nccl_beside_registered(void) { return read_count(&beside_registered); }
API uint32_t fake_nccl_registered(void) { return read_count(&registered); }
API void fake_nccl_async(uint32_t rank, int result) {
  pthread_mutex_lock(&lock);
  async_results[rank] = result;
  pthread_mutex_unlock(&lock);
}
API int fake_nccl_depth(void) { return depth; }
API uint32_t fake_nccl_live(void) {
  pthread_mutex_lock(&lock);
  uint32_t result = live;
  pthread_mutex_unlock(&lock);
  return result;
}
API uint32_t fake_nccl_violations(void) {
  pthread_mutex_lock(&lock);
  uint32_t result = violations;
  pthread_mutex_unlock(&lock);
  return result;
}
