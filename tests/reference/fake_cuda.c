/* A CUDA driver over host memory, as far as src/device/cuda.c uses it. SPDX-License-Identifier: Apache-2.0
 *
 * Streams are spread over channels, each a thread and a queue of limited length. Device memory is extents of a memory
 * file; addresses are ordinary ones without access until mapped and made accessible. Host functions run one at a time
 * on one thread. The devices' clock starts anywhere. It is stricter than a GPU where the documentation allows it to be:
 * a mapping must be free before it is mapped again and is unmapped whole, memory that is copied must be mapped, every
 * call wants a context.
 *
 * A captured graph is a list of nodes with what each must follow, and nothing else: a launch runs them one at a time in
 * an order that obeys that, now with every copy as early as it may be, now as late, now at random.
 *
 * Functions have the driver's names: compiled as a shared library, this file is a libcuda.so.1, too. */
#define _GNU_SOURCE
#include "fake_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "device/cuda_driver.h"
#include "device/device.h"
#include "device/rank_sum.h"
#include "device/sum.h"

#define GRANULE (UINT64_C(2) << 20)
#define CHANNELS 64u
#define DEVICES 2
#define API __attribute__((visibility("default")))
/* Callers find these functions by name, as they find the driver's; no header declares them. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"

enum {
  TASK_RECORD,
  TASK_WAIT,
  TASK_WAIT_VALUE,
  TASK_COPY,
  TASK_SET,
  TASK_CALL,
  TASK_SUM,
  TASK_RANK_SUM,
  TASK_KERNEL,
  TASK_GRAPH
};
enum {
  LIVE_CONTEXT,
  LIVE_RANGE,
  LIVE_MEMORY,
  LIVE_MAPPING,
  LIVE_HOST,
  LIVE_STREAM,
  LIVE_EVENT,
  LIVE_MODULE,
  LIVE_GRAPH,
  LIVE_KINDS
};
static const char *const live_names[LIVE_KINDS] = { "contexts", "address ranges", "memories",
                                                    "mappings", "host memories",  "streams",
                                                    "events",   "modules",        "graphs" };

/* Nodes that something follows. */
typedef struct ends {
  uint32_t count;
  uint32_t node[64];
} ends_t;

struct cu_context {
  int device, retained;
  struct cu_stream *null_stream;
};
enum { HIGHEST_PRIORITY = -5 }; /* of streams, as GPUs have it */
struct cu_stream {
  struct cu_stream *next;
  struct cu_context *context;
  struct channel *channel;
  unsigned long long id; /* unlike the address, never given again */
  int priority;          /* 0, or below: more urgent */
  bool destroyed, capturing;
  struct cu_graph *capture; /* into which the stream's work goes, or NULL */
  ends_t ends;              /* what its next node follows */
};
struct cu_event {
  struct cu_event *next;
  struct cu_graph *capture; /* it was recorded in, or NULL */
  ends_t ends;
  uint64_t recorded, done, ns; /* numbers of records; the device's clock at the last one done */
  unsigned flags;
  bool destroyed;
};
struct cu_module {
  int any;
};
struct cu_function {
  int any;
};

typedef struct task {
  struct task *next;
  int kind;
  struct cu_event *event;
  uint64_t number; /* of the record; the value; the size */
  void *dst;
  const void *src;
  cu_host_fn_t fn;
  bool (*step)(void *user);
  gmi_rank_sum_t ranks; /* of a TASK_RANK_SUM */
  bool counts;          /* towards the queue's limit: copies, kernels, timed events, waits for values */
} task_t;
typedef struct node {
  task_t task;
  ends_t after;
} node_t;
struct cu_graph { /* also an instantiated one, which is a copy */
  struct cu_graph *next;
  struct cu_stream *origin; /* while it is captured */
  uint64_t id;
  node_t *nodes;
  uint32_t count, capacity;
  bool destroyed, invalid;
};

typedef struct channel {
  pthread_t thread;
  bool started;
  task_t *first, **end;
  uint32_t count; /* of tasks that count */
  pthread_cond_t more;
} channel_t;

typedef struct span { /* a range, a piece of device memory, a mapping or page-locked memory */
  struct span *next;
  uint64_t base, size;
  struct span *memory; /* of a mapping */
  uint64_t offset;     /* of a memory, in the file */
  int device;
  uint32_t mappings;
  bool released, accessible, ours;
} span_t;

fake_cuda_options_t fake_cuda = { DEVICES, 0, NULL, 32, 1024, UINT64_C(1) << 30, 1.0, NULL, NULL, 0, false };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static bool initialised, stop;
static uint32_t held_up; /* threads that wait for room in a queue */
static int lost;
static struct cu_context contexts[DEVICES] = { { 0, 0, NULL }, { 1, 0, NULL } };
static channel_t channels[CHANNELS];
static uint32_t streams_made;
static unsigned long long stream_ids;
static struct cu_stream *streams;
static struct cu_event *events;
static struct cu_graph *graphs;
static uint64_t captures, launches;
static span_t *ranges, *memories, *mappings, *hosts;
static int memory_fd = -1;
static uint64_t memory_end, memory_used[DEVICES], memories_made;
static uint64_t live[LIVE_KINDS], calls, fail_first, fail_last, pageable, violations;
static int fail_result;
static const char *fail_function;
static task_t *call_task; /* the host function that is to run */
static pthread_t call_thread;
static bool call_started;
static _Thread_local struct cu_context *current;
static _Thread_local bool in_host_function;
static _Thread_local int capture_mode;

static uint64_t host_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
static uint64_t device_ns(void) {
  static _Atomic uint64_t start;
  uint64_t now = host_ns(), none = 0;
  atomic_compare_exchange_strong(&start, &none, now);
  return UINT64_C(777000000000) + (uint64_t)((double)(now - atomic_load(&start)) * fake_cuda.clock_rate);
}

/* --- calls --- */

/* Takes the lock when it returns CU_SUCCESS. */
static cu_result_t begin(const char *name, bool in_context) {
  pthread_mutex_lock(&lock);
  cu_result_t result = CU_SUCCESS;
  calls++;
  if (in_host_function) {
    violations++;
    result = 800; /* CUDA_ERROR_NOT_PERMITTED */
  } else if (calls >= fail_first && calls <= fail_last) {
    result = fail_result;
  } else if (fail_function && !strcmp(fail_function, name)) {
    result = fail_result;
  } else if (lost) {
    result = lost;
  } else if (!initialised && strcmp(name, "cuInit") != 0) {
    result = CU_NOT_INITIALIZED;
  } else if (in_context && !(current && current->retained)) {
    /* A program may come here only when setting its context has failed. */
    if (fail_last == 0 && !fail_function) violations++;
    result = CU_INVALID_CONTEXT;
  }
  if (result != CU_SUCCESS) pthread_mutex_unlock(&lock);
  return result;
}
#define BEGIN(name, in_context)                    \
  do {                                             \
    cu_result_t refused = begin(name, in_context); \
    if (refused != CU_SUCCESS) return refused;     \
  } while (0)
static cu_result_t end(cu_result_t result) {
  pthread_mutex_unlock(&lock);
  return result;
}
static cu_result_t misuse(void) {
  violations++;
  return end(CU_INVALID_HANDLE);
}

/* Some calls of the driver wait for those who wait for room. With the lock. */
static void wait_for_others(void) {
  while (held_up && !lost) pthread_cond_wait(&progress, &lock);
}
/* And some for everything queued. */
static void wait_for_all(void) {
  for (uint32_t i = 0; i < CHANNELS && !lost; i++) {
    if (!channels[i].started || !channels[i].first) continue;
    pthread_cond_wait(&progress, &lock);
    i = UINT32_MAX; /* again from 0 */
  }
}

/* --- what channels do --- */

static void host_call(task_t *task) { /* with the lock */
  while (call_task && !lost) pthread_cond_wait(&progress, &lock);
  if (lost) return;
  call_task = task;
  pthread_cond_broadcast(&progress);
  while (call_task == task) pthread_cond_wait(&progress, &lock);
}

static void *call_main(void *user) {
  (void)user;
  in_host_function = true;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!call_task && !stop) pthread_cond_wait(&progress, &lock);
    if (!call_task) break;
    task_t *task = call_task;
    pthread_mutex_unlock(&lock);
    task->fn(task->dst);
    pthread_mutex_lock(&lock);
    call_task = NULL;
    pthread_cond_broadcast(&progress);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static void rank_sum(const gmi_rank_sum_t *args) {
  const void *from[64];
  for (uint32_t r = 0; r < args->ranks; r++) {
    from[r] = (const void *)(uintptr_t)(args->others + (r - (r > args->rank)) * args->slot_bytes);
    if (r == args->rank) from[r] = (const void *)(uintptr_t)args->own;
  }
  gmi_reduce(args->dtype, (gmi_reduce_t)args->reduce, args->ranks, from, (void *)(uintptr_t)args->own, args->count);
}

/* Between two looks at what other threads do, without the lock. Each look waits longer than the one before: many
 * channels that look every few microseconds leave no time to those that they wait for. */
static void look_again(uint32_t *looks) {
  const uint32_t doublings = *looks < 6 ? *looks : 6;
  nanosleep(&(struct timespec){ 0, 5000L << doublings }, NULL);
  *looks += 1;
}

static void run_graph(const struct cu_graph *graph);
static void run(task_t *task) { /* with the lock, which it gives up while it works */
  uint32_t looks = 0;
  switch (task->kind) {
  case TASK_RECORD:
    task->event->done = task->number;
    task->event->ns = device_ns();
    break;
  case TASK_WAIT:
    while (task->event->done < task->number && !lost) pthread_cond_wait(&progress, &lock);
    break;
  case TASK_CALL: host_call(task); break;
  case TASK_GRAPH: run_graph(task->dst); break;
  case TASK_KERNEL:
    for (bool over = false; !over && !lost;) {
      pthread_mutex_unlock(&lock);
      over = task->step(task->dst);
      if (!over) look_again(&looks);
      pthread_mutex_lock(&lock);
    }
    break;
  case TASK_WAIT_VALUE:
    while (!lost && (int64_t)(atomic_load_explicit((const _Atomic uint64_t *)task->src, memory_order_acquire) -
                              task->number) < 0) {
      pthread_mutex_unlock(&lock);
      look_again(&looks);
      pthread_mutex_lock(&lock);
    }
    break;
  default:
    pthread_mutex_unlock(&lock);
    if (task->kind == TASK_COPY) memmove(task->dst, task->src, task->number);
    if (task->kind == TASK_SET) memset(task->dst, 0, task->number);
    if (task->kind == TASK_RANK_SUM) {
      nanosleep(&(struct timespec){ 0, (long)fake_cuda.sum_delay_ns }, NULL);
      rank_sum(&task->ranks);
    }
    if (task->kind == TASK_SUM) {
      gmi_cuda_sum_t *sums = task->dst;
      for (uint64_t i = 0; i < task->number; i++)
        sums[i].sum = gmi_sum_squares((const void *)(uintptr_t)sums[i].src, sums[i].dtype, sums[i].count);
    }
    pthread_mutex_lock(&lock);
  }
}

static bool reachable(uint64_t address, uint64_t size);

/* With the lock. Of the nodes that nothing holds back, the one that is to run next. */
static uint32_t next_node(const struct cu_graph *graph, const bool *ran, uint64_t launch, uint64_t *random) {
  uint32_t best = UINT32_MAX;
  uint64_t best_rank = 0;
  for (uint32_t i = 0; i < graph->count; i++) {
    bool ready = !ran[i];
    for (uint32_t k = 0; ready && k < graph->nodes[i].after.count; k++) ready = ran[graph->nodes[i].after.node[k]];
    if (!ready) continue;
    *random = *random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    bool copy = graph->nodes[i].task.kind == TASK_COPY;
    uint64_t rank = *random >> 33;
    if (launch % 3 == 1) rank = copy ? UINT64_MAX - i : UINT32_MAX - i; /* copies come early */
    if (launch % 3 == 2) rank = copy ? UINT32_MAX - i : UINT64_MAX - i; /* late */
    if (best != UINT32_MAX && rank <= best_rank) continue;
    best = i;
    best_rank = rank;
  }
  return best;
}
static void run_graph(const struct cu_graph *graph) {
  uint64_t launch = launches++, random = launch;
  bool *ran = calloc(graph->count + 1, sizeof *ran);
  for (uint32_t done = 0; ran && done < graph->count && !lost; done++) {
    uint32_t i = next_node(graph, ran, launch, &random);
    task_t task = graph->nodes[i].task;
    ran[i] = true;
    if (task.kind == TASK_COPY &&
        (!reachable((uintptr_t)task.dst, task.number) || !reachable((uintptr_t)task.src, task.number)))
      violations++;
    else run(&task);
  }
  free(ran);
}

static void *channel_main(void *user) {
  channel_t *channel = user;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!channel->first && !stop) pthread_cond_wait(&channel->more, &lock);
    task_t *task = channel->first;
    if (!task) break;
    if (!lost) run(task);
    channel->first = task->next;
    if (!channel->first) channel->end = &channel->first;
    channel->count -= task->counts;
    free(task);
    pthread_cond_broadcast(&progress);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static bool ends_add(ends_t *ends, uint32_t node) {
  for (uint32_t i = 0; i < ends->count; i++)
    if (ends->node[i] == node) return true;
  if (ends->count == sizeof ends->node / sizeof *ends->node) return false;
  ends->node[ends->count++] = node;
  return true;
}

/* With the lock. The stream's work goes into a graph. */
static cu_result_t capture(struct cu_stream *stream, const task_t *what) {
  struct cu_graph *graph = stream->capture;
  if (what->kind == TASK_RECORD) {
    what->event->capture = graph;
    what->event->ends = stream->ends;
    return CU_SUCCESS;
  }
  if (what->kind == TASK_WAIT) {
    if (what->event->capture != graph) graph->invalid = true; /* an event of another time */
    for (uint32_t i = 0; !graph->invalid && i < what->event->ends.count; i++)
      graph->invalid |= !ends_add(&stream->ends, what->event->ends.node[i]);
    return graph->invalid ? 905 : CU_SUCCESS; /* CUDA_ERROR_STREAM_CAPTURE_ISOLATION */
  }
  if (what->kind == TASK_WAIT_VALUE || what->kind == TASK_SUM || what->kind == TASK_RANK_SUM)
    violations++; /* nothing that is ours gets into a graph */
  if (graph->count == graph->capacity) {
    uint32_t capacity = graph->capacity ? graph->capacity * 2 : 64;
    node_t *nodes = realloc(graph->nodes, capacity * sizeof *nodes);
    if (!nodes) return CU_OUT_OF_MEMORY;
    graph->nodes = nodes;
    graph->capacity = capacity;
  }
  graph->nodes[graph->count] = (node_t){ .task = *what, .after = stream->ends };
  stream->ends = (ends_t){ .count = 1, .node = { graph->count++ } };
  return CU_SUCCESS;
}

/* With the lock. */
static cu_result_t push(struct cu_stream *stream, task_t what) {
  if (!stream) stream = current->null_stream;
  if (stream->destroyed) {
    violations++;
    return CU_INVALID_HANDLE;
  }
  if (what.kind == TASK_WAIT && what.event->capture && !stream->capture && what.event->capture->origin) {
    stream->capture = what.event->capture; /* forked off */
    stream->ends = (ends_t){ 0 };
  }
  if (stream->capture) return capture(stream, &what);
  if (what.kind == TASK_WAIT && what.event->capture) return CU_INVALID_VALUE;
  if (what.kind == TASK_RECORD) what.event->capture = NULL;
  channel_t *channel = stream->channel;
  if (what.kind == TASK_RECORD && !channel->first && !lost) { /* nothing to wait for: done at once, as on a GPU */
    run(&what);
    pthread_cond_broadcast(&progress);
    return CU_SUCCESS;
  }
  what.counts = what.kind == TASK_RECORD ? !(what.event->flags & CU_EVENT_NO_TIME)
                                         : what.kind != TASK_WAIT && what.kind != TASK_CALL;
  held_up++;
  while (what.counts && channel->count >= fake_cuda.queue_limit && !lost) pthread_cond_wait(&progress, &lock);
  held_up--;
  pthread_cond_broadcast(&progress);
  task_t *task = malloc(sizeof *task);
  if (lost || !task) {
    free(task);
    return lost ? lost : CU_OUT_OF_MEMORY;
  }
  *task = what;
  task->next = NULL;
  *channel->end = task;
  channel->end = &task->next;
  channel->count += task->counts;
  pthread_cond_signal(&channel->more);
  return CU_SUCCESS;
}

/* --- devices and contexts --- */

API cu_result_t cuInit(unsigned flags) {
  BEGIN("cuInit", false);
  initialised = flags == 0;
  return end(fake_cuda.device_count ? CU_SUCCESS : CU_NO_DEVICE);
}
API cu_result_t cuDriverGetVersion(int *version_out) {
  *version_out = 13000;
  return CU_SUCCESS;
}
API cu_result_t cuGetErrorName(cu_result_t result, const char **name_out) {
  static const struct {
    cu_result_t result;
    const char *name;
  } names[] = { { CU_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE" },
                { CU_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY" },
                { CU_NO_DEVICE, "CUDA_ERROR_NO_DEVICE" },
                { CU_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT" },
                { CU_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE" },
                { CU_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS" },
                { CU_UNKNOWN, "CUDA_ERROR_UNKNOWN" } };
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (names[i].result != result) continue;
    *name_out = names[i].name;
    return CU_SUCCESS;
  }
  *name_out = NULL;
  return CU_INVALID_VALUE;
}
API cu_result_t cuDeviceGetCount(int *count_out) {
  BEGIN("cuDeviceGetCount", false);
  *count_out = fake_cuda.device_count;
  return end(CU_SUCCESS);
}
API cu_result_t cuDeviceGet(cu_device_t *device_out, int ordinal) {
  BEGIN("cuDeviceGet", false);
  if (ordinal < 0 || ordinal >= fake_cuda.device_count) return end(CU_INVALID_DEVICE);
  *device_out = ordinal;
  return end(CU_SUCCESS);
}
API cu_result_t cuDeviceGetPCIBusId(char *address_out, int size, cu_device_t device) {
  BEGIN("cuDeviceGetPCIBusId", false);
  if (device < 0 || device >= fake_cuda.device_count || size < 13) return end(CU_INVALID_VALUE);
  snprintf(address_out, (size_t)size, "0000:%02X:00.0", 0x1a + device);
  return end(CU_SUCCESS);
}
API cu_result_t cuDeviceGetAttribute(int *value_out, int attribute, cu_device_t device) {
  BEGIN("cuDeviceGetAttribute", false);
  if (device < 0 || device >= fake_cuda.device_count) return end(CU_INVALID_DEVICE);
  *value_out = attribute == CU_ATTRIBUTE_MEMORY_CLOCK_RATE         ? 1000000 /* 1 GHz */
               : attribute == CU_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH ? 512
                                                                   : 1;
  if (attribute == fake_cuda.lacking_attribute) *value_out = 0;
  return end(CU_SUCCESS);
}

static struct cu_stream *stream_make(struct cu_context *context, uint32_t number) {
  struct cu_stream *stream = calloc(1, sizeof *stream);
  channel_t *channel = &channels[number % fake_cuda.channels];
  if (!stream) return NULL;
  stream->context = context;
  stream->channel = channel;
  stream->next = streams;
  streams = stream;
  if (!channel->started) {
    channel->first = NULL;
    channel->end = &channel->first;
    channel->count = 0;
    pthread_cond_init(&channel->more, NULL);
    channel->started = pthread_create(&channel->thread, NULL, channel_main, channel) == 0;
  }
  return stream;
}

API cu_result_t cuDevicePrimaryCtxRetain(cu_context_t *context_out, cu_device_t device) {
  BEGIN("cuDevicePrimaryCtxRetain", false);
  struct cu_context *context = &contexts[device];
  if (!call_started) {
    stop = false;
    call_started = pthread_create(&call_thread, NULL, call_main, NULL) == 0;
  }
  if (memory_fd < 0) memory_fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (!context->null_stream) context->null_stream = stream_make(context, CHANNELS - 1);
  if (!context->null_stream || memory_fd < 0) return end(CU_OUT_OF_MEMORY);
  live[LIVE_CONTEXT] += context->retained++ == 0;
  *context_out = context;
  return end(CU_SUCCESS);
}

/* Ends all threads once nobody has a context. With the lock. */
static void all_stop(void) {
  for (int i = 0; i < DEVICES; i++)
    if (contexts[i].retained) return;
  stop = true;
  pthread_cond_broadcast(&progress);
  for (uint32_t i = 0; i < CHANNELS; i++) {
    if (!channels[i].started) continue;
    pthread_cond_signal(&channels[i].more);
    pthread_mutex_unlock(&lock);
    pthread_join(channels[i].thread, NULL);
    pthread_mutex_lock(&lock);
    pthread_cond_destroy(&channels[i].more);
    channels[i].started = false;
  }
  if (call_started) {
    pthread_mutex_unlock(&lock);
    pthread_join(call_thread, NULL);
    pthread_mutex_lock(&lock);
    call_started = false;
  }
  for (struct cu_stream *next; streams; streams = next) {
    next = streams->next;
    free(streams);
  }
  for (struct cu_event *next; events; events = next) {
    next = events->next;
    free(events);
  }
  for (struct cu_graph *next; graphs; graphs = next) {
    next = graphs->next;
    free(graphs->nodes);
    free(graphs);
  }
  for (int i = 0; i < DEVICES; i++) contexts[i].null_stream = NULL;
  streams_made = 0;
}

API cu_result_t cuDevicePrimaryCtxRelease_v2(cu_device_t device) {
  cu_result_t result = begin("cuDevicePrimaryCtxRelease", false);
  if (result != CU_SUCCESS && result != lost) return result;
  if (result != CU_SUCCESS) pthread_mutex_lock(&lock); /* a lost one is let go all the same */
  struct cu_context *context = &contexts[device];
  if (context->retained == 0) return misuse();
  if (--context->retained == 0) {
    live[LIVE_CONTEXT]--;
    all_stop();
  }
  return end(result);
}
API cu_result_t cuCtxGetCurrent(cu_context_t *context_out) {
  *context_out = current;
  return CU_SUCCESS;
}
API cu_result_t cuCtxSetCurrent(cu_context_t context) {
  BEGIN("cuCtxSetCurrent", false);
  current = context;
  return end(CU_SUCCESS);
}

/* --- memory --- */

static span_t *span_new(span_t **list, uint64_t base, uint64_t size, int kind) {
  span_t *span = calloc(1, sizeof *span);
  if (!span) return NULL;
  span->base = base;
  span->size = size;
  span->next = *list;
  *list = span;
  live[kind]++;
  return span;
}
static span_t *span_take(span_t **list, uint64_t base, int kind) { /* out of its list */
  for (; *list; list = &(*list)->next) {
    if ((*list)->base != base) continue;
    span_t *span = *list;
    *list = span->next;
    live[kind]--;
    return span;
  }
  return NULL;
}
static span_t *span_find(span_t *list, uint64_t base) {
  while (list && list->base != base) list = list->next;
  return list;
}
/* The one that holds that address. */
static span_t *span_of(span_t *list, uint64_t address) {
  while (list && (address < list->base || address - list->base >= list->size)) list = list->next;
  return list;
}
static bool span_overlaps(span_t *list, uint64_t base, uint64_t size) {
  for (; list; list = list->next)
    if (base < list->base + list->size && list->base < base + size) return true;
  return false;
}
/* Can the device reach all of it? By mappings side by side, or by one page-locked piece. */
static bool reachable(uint64_t address, uint64_t size) {
  span_t *host = span_of(hosts, address);
  if (host) return size <= host->size - (address - host->base);
  while (size) {
    span_t *mapping = span_of(mappings, address);
    if (!mapping || !mapping->accessible) return false;
    uint64_t here = mapping->size - (address - mapping->base);
    if (here >= size) return true;
    address += here;
    size -= here;
  }
  return true;
}

API cu_result_t cuMemGetAllocationGranularity(size_t *bytes_out, const cu_allocation_t *allocation, int option) {
  BEGIN("cuMemGetAllocationGranularity", false);
  if (allocation->type != CU_ALLOCATION_PINNED || allocation->location.type != CU_LOCATION_DEVICE || option)
    return end(CU_INVALID_VALUE);
  *bytes_out = GRANULE;
  return end(CU_SUCCESS);
}
API cu_result_t cuMemAddressReserve(cu_address_t *address_out, size_t size, size_t align, cu_address_t wish,
                                    unsigned long long flags) {
  BEGIN("cuMemAddressReserve", true);
  if (!size || size % GRANULE || align % GRANULE || wish || flags) return end(CU_INVALID_VALUE);
  uint64_t whole = size + align;
  unsigned char *base = mmap(NULL, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return end(CU_OUT_OF_MEMORY);
  uint64_t skip = -(uintptr_t)base % align;
  if (skip) munmap(base, skip);
  munmap(base + skip + size, align - skip);
  if (!span_new(&ranges, (uintptr_t)(base + skip), size, LIVE_RANGE)) return end(CU_OUT_OF_MEMORY);
  *address_out = (uintptr_t)(base + skip);
  return end(CU_SUCCESS);
}
API cu_result_t cuMemAddressFree(cu_address_t address, size_t size) {
  BEGIN("cuMemAddressFree", true);
  span_t *range = span_find(ranges, address);
  if (!range || range->size != size || span_overlaps(mappings, address, size)) return end(CU_INVALID_VALUE);
  free(span_take(&ranges, address, LIVE_RANGE));
  munmap((void *)(uintptr_t)address, size);
  return end(CU_SUCCESS);
}
API cu_result_t cuMemCreate(cu_memory_t *memory_out, size_t size, const cu_allocation_t *allocation,
                            unsigned long long flags) {
  BEGIN("cuMemCreate", true);
  static const cu_allocation_t zero;
  int device = allocation->location.id;
  if (!size || size % GRANULE || flags || allocation->type != CU_ALLOCATION_PINNED ||
      allocation->handle_types & ~CU_HANDLE_POSIX_FILE_DESCRIPTOR ||
      (allocation->handle_types &&
       fake_cuda.lacking_attribute == CU_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) ||
      allocation->location.type != CU_LOCATION_DEVICE || device < 0 || device >= fake_cuda.device_count ||
      memcmp(&allocation->windows_only, &zero.windows_only, sizeof zero - offsetof(cu_allocation_t, windows_only)) != 0)
    return end(CU_INVALID_VALUE);
  if (size > fake_cuda.memory_bytes - memory_used[device]) return end(CU_OUT_OF_MEMORY);
  if (ftruncate(memory_fd, (off_t)(memory_end + size)) != 0) return end(CU_OUT_OF_MEMORY);
  span_t *memory = span_new(&memories, memories_made++, size, LIVE_MEMORY); /* the first one is named 0 */
  if (!memory) return end(CU_OUT_OF_MEMORY);
  memory->offset = memory_end;
  memory->device = device;
  memory_end += size;
  memory_used[device] += size;
  *memory_out = memory->base;
  return end(CU_SUCCESS);
}
static void memory_drop(span_t *memory) {
  if (!memory->released || memory->mappings) return;
  memory_used[memory->device] -= memory->size;
  fallocate(memory_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)memory->offset, (off_t)memory->size);
  free(span_take(&memories, memory->base, LIVE_MEMORY));
}
API cu_result_t cuMemRelease(cu_memory_t handle) {
  BEGIN("cuMemRelease", true);
  span_t *memory = span_find(memories, handle);
  if (!memory || memory->released) return misuse();
  memory->released = true;
  memory_drop(memory);
  return end(CU_SUCCESS);
}
API cu_result_t cuMemMap(cu_address_t address, size_t size, size_t offset, cu_memory_t handle,
                         unsigned long long flags) {
  BEGIN("cuMemMap", true);
  span_t *memory = span_find(memories, handle), *range = span_of(ranges, address);
  if (!memory || memory->released) return misuse();
  if (address % GRANULE || !range || size > range->size - (address - range->base) || size != memory->size || offset ||
      flags || span_overlaps(mappings, address, size))
    return end(CU_INVALID_VALUE);
  span_t *mapping = span_new(&mappings, address, size, LIVE_MAPPING);
  if (!mapping || mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_fd,
                       (off_t)memory->offset) == MAP_FAILED)
    return end(CU_OUT_OF_MEMORY);
  mapping->memory = memory;
  memory->mappings++;
  return end(CU_SUCCESS);
}
API cu_result_t cuMemSetAccess(cu_address_t address, size_t size, const cu_access_t *access, size_t count) {
  BEGIN("cuMemSetAccess", true);
  span_t *mapping = span_find(mappings, address);
  if (!mapping || mapping->size != size || count != 1 || access->flags != CU_ACCESS_READ_WRITE ||
      access->location.type != CU_LOCATION_DEVICE || access->location.id != mapping->memory->device)
    return end(CU_INVALID_VALUE);
  mprotect((void *)(uintptr_t)address, size, PROT_READ | PROT_WRITE);
  mapping->accessible = true;
  return end(CU_SUCCESS);
}
API cu_result_t cuMemUnmap(cu_address_t address, size_t size) {
  BEGIN("cuMemUnmap", true);
  span_t *mapping = span_find(mappings, address);
  if (!mapping || mapping->size != size) return misuse();
  span_take(&mappings, address, LIVE_MAPPING);
  mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  mapping->memory->mappings--;
  memory_drop(mapping->memory);
  free(mapping);
  return end(CU_SUCCESS);
}

API cu_result_t cuMemHostAlloc(void **host_out, size_t size, unsigned flags) {
  BEGIN("cuMemHostAlloc", true);
  if (!size || flags & ~3u) return end(CU_INVALID_VALUE);
  void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  span_t *host = base == MAP_FAILED ? NULL : span_new(&hosts, (uintptr_t)base, size, LIVE_HOST);
  if (!host) return end(CU_OUT_OF_MEMORY);
  host->ours = true;
  *host_out = base;
  return end(CU_SUCCESS);
}
API cu_result_t cuMemFreeHost(void *base) {
  BEGIN("cuMemFreeHost", true);
  span_t *host = span_find(hosts, (uintptr_t)base);
  if (!host || !host->ours) return misuse();
  munmap(base, host->size);
  free(span_take(&hosts, (uintptr_t)base, LIVE_HOST));
  return end(CU_SUCCESS);
}
API cu_result_t cuMemHostGetDevicePointer_v2(cu_address_t *address_out, void *base, unsigned flags) {
  BEGIN("cuMemHostGetDevicePointer", true);
  if (!span_of(hosts, (uintptr_t)base) || flags) return end(CU_INVALID_VALUE);
  *address_out = (uintptr_t)base;
  return end(CU_SUCCESS);
}
API cu_result_t cuMemHostRegister_v2(void *base, size_t size, unsigned flags) {
  BEGIN("cuMemHostRegister", true);
  wait_for_others();
  if (!base || !size || flags & ~3u) return end(CU_INVALID_VALUE);
  if (span_overlaps(hosts, (uintptr_t)base, size)) return end(CU_HOST_MEMORY_ALREADY_REGISTERED);
  return end(span_new(&hosts, (uintptr_t)base, size, LIVE_HOST) ? CU_SUCCESS : CU_OUT_OF_MEMORY);
}
API cu_result_t cuMemHostUnregister(void *base) {
  BEGIN("cuMemHostUnregister", true);
  wait_for_all();
  span_t *host = span_find(hosts, (uintptr_t)base);
  if (!host || host->ours) return end(CU_HOST_MEMORY_NOT_REGISTERED);
  free(span_take(&hosts, (uintptr_t)base, LIVE_HOST));
  return end(CU_SUCCESS);
}

/* --- streams and events --- */

static cu_result_t stream_create(cu_stream_t *stream_out, unsigned flags, int priority) {
  if (flags & ~1u) return end(CU_INVALID_VALUE);
  struct cu_stream *stream = stream_make(current, streams_made++), *gone = NULL;
  if (!stream) return end(CU_OUT_OF_MEMORY);
  for (struct cu_stream *s = streams; s && fake_cuda.reuse_streams && !gone; s = s->next)
    if (s->destroyed && s->context == current) gone = s;
  if (gone) { /* the new one's record goes, unused */
    gone->channel = stream->channel;
    gone->destroyed = false;
    streams = stream->next;
    free(stream);
    stream = gone;
  }
  stream->id = ++stream_ids;
  stream->priority = priority < HIGHEST_PRIORITY ? HIGHEST_PRIORITY : priority > 0 ? 0 : priority;
  live[LIVE_STREAM]++;
  *stream_out = stream;
  return end(CU_SUCCESS);
}
API cu_result_t cuStreamCreate(cu_stream_t *stream_out, unsigned flags) {
  BEGIN("cuStreamCreate", true);
  return stream_create(stream_out, flags, 0);
}
API cu_result_t cuStreamCreateWithPriority(cu_stream_t *stream_out, unsigned flags, int priority) {
  BEGIN("cuStreamCreateWithPriority", true);
  return stream_create(stream_out, flags, priority);
}
API int fake_cuda_stream_priority(const struct cu_stream *stream) { return stream ? stream->priority : 0; }
API cu_result_t cuStreamDestroy_v2(cu_stream_t stream) {
  BEGIN("cuStreamDestroy", true);
  if (!stream || stream->destroyed || stream->capture) return misuse();
  stream->destroyed = true; /* its record stays: pointers to it are recognised */
  live[LIVE_STREAM]--;
  return end(CU_SUCCESS);
}
/* May this thread's context use it? What a capture would take is not expected here. */
static bool foreign(cu_stream_t stream) {
  if (!stream || (stream->context == current && !stream->destroyed && !stream->capturing)) return false;
  violations++;
  return true;
}
API cu_result_t cuStreamGetId(cu_stream_t stream, unsigned long long *id_out) {
  BEGIN("cuStreamGetId", true);
  if (stream && (stream->context != current || stream->destroyed)) return misuse();
  *id_out = stream ? stream->id : UINT64_MAX;
  return end(CU_SUCCESS);
}
API cu_result_t cuCtxSynchronize(void) {
  BEGIN("cuCtxSynchronize", true);
  wait_for_all();
  return end(lost ? lost : CU_SUCCESS);
}
API cu_result_t cuStreamGetCtx(cu_stream_t stream, cu_context_t *context_out) {
  BEGIN("cuStreamGetCtx", true);
  struct cu_stream *known = streams;
  while (stream && known && known != stream) known = known->next;
  if (stream && (!known || known->destroyed)) return end(CU_INVALID_HANDLE);
  *context_out = stream ? stream->context : current;
  return end(CU_SUCCESS);
}
API cu_result_t cuStreamIsCapturing(cu_stream_t stream, int *status_out) {
  BEGIN("cuStreamIsCapturing", true);
  *status_out = stream && (stream->capturing || stream->capture) ? CU_CAPTURE_ACTIVE : CU_CAPTURE_NONE;
  return end(CU_SUCCESS);
}
API cu_result_t cuStreamGetCaptureInfo_v2(cu_stream_t stream, int *status_out, uint64_t *id_out, void **graph_out,
                                          const void **dependencies_out, size_t *count_out) {
  BEGIN("cuStreamGetCaptureInfo", true);
  if (graph_out || dependencies_out || count_out) return end(CU_INVALID_VALUE);
  struct cu_graph *graph = stream ? stream->capture : NULL;
  *status_out = !graph ? CU_CAPTURE_NONE : graph->invalid ? 2 : CU_CAPTURE_ACTIVE;
  if (graph) *id_out = graph->id;
  return end(CU_SUCCESS);
}

/* --- graphs --- */

static struct cu_graph *graph_make(void) {
  struct cu_graph *graph = calloc(1, sizeof *graph);
  if (!graph) return NULL;
  graph->next = graphs;
  graphs = graph;
  return graph;
}
cu_result_t cuStreamBeginCapture_v2(cu_stream_t stream, int mode) {
  BEGIN("cuStreamBeginCapture", true);
  struct cu_graph *graph = stream && !stream->capture && mode >= 0 && mode <= 2 ? graph_make() : NULL;
  if (!graph) return end(CU_INVALID_VALUE);
  graph->origin = stream;
  graph->id = ++captures;
  stream->capture = graph;
  stream->ends = (ends_t){ 0 };
  return end(CU_SUCCESS);
}
cu_result_t cuStreamEndCapture(cu_stream_t stream, struct cu_graph **graph_out) {
  BEGIN("cuStreamEndCapture", true);
  struct cu_graph *graph = stream ? stream->capture : NULL;
  *graph_out = NULL;
  if (!graph || graph->origin != stream) return end(CU_INVALID_VALUE);
  /* Everything must come before the origin's end: nodes follow lower ones only. */
  bool *before = calloc(graph->count + 1, sizeof *before), joined = true;
  for (uint32_t i = 0; before && i < stream->ends.count; i++) before[stream->ends.node[i]] = true;
  for (uint32_t i = graph->count; before && i-- > 0;) {
    joined &= before[i];
    for (uint32_t k = 0; before[i] && k < graph->nodes[i].after.count; k++)
      before[graph->nodes[i].after.node[k]] = true;
  }
  free(before);
  graph->origin = NULL;
  for (struct cu_stream *s = streams; s; s = s->next)
    if (s->capture == graph) s->capture = NULL;
  if (graph->invalid || !joined) return end(graph->invalid ? 901 : 904); /* INVALIDATED, UNJOINED */
  live[LIVE_GRAPH]++;
  *graph_out = graph;
  return end(CU_SUCCESS);
}
cu_result_t cuGraphInstantiateWithFlags(struct cu_graph **exec_out, struct cu_graph *graph, unsigned long long flags) {
  BEGIN("cuGraphInstantiate", true);
  struct cu_graph *exec = graph->destroyed || flags ? NULL : graph_make();
  if (!exec) return misuse();
  exec->nodes = malloc((graph->count + 1) * sizeof *exec->nodes);
  if (!exec->nodes) return end(CU_OUT_OF_MEMORY);
  if (graph->count) memcpy(exec->nodes, graph->nodes, graph->count * sizeof *exec->nodes);
  exec->count = graph->count;
  live[LIVE_GRAPH]++;
  *exec_out = exec;
  return end(CU_SUCCESS);
}
cu_result_t cuGraphLaunch(struct cu_graph *exec, cu_stream_t stream) {
  BEGIN("cuGraphLaunch", true);
  if (exec->destroyed) return misuse();
  return end(push(stream, (task_t){ .kind = TASK_GRAPH, .dst = exec }));
}
static cu_result_t graph_destroy(struct cu_graph *graph) { /* its record stays: a launch may still run it */
  if (graph->destroyed) return misuse();
  graph->destroyed = true;
  live[LIVE_GRAPH]--;
  return end(CU_SUCCESS);
}
cu_result_t cuGraphDestroy(struct cu_graph *graph) {
  BEGIN("cuGraphDestroy", true);
  return graph_destroy(graph);
}
cu_result_t cuGraphExecDestroy(struct cu_graph *exec) {
  BEGIN("cuGraphExecDestroy", true);
  return graph_destroy(exec);
}
void fake_cuda_graph_nodes(const struct cu_graph *graph, uint32_t *copies_out, uint32_t *beside_out) {
  pthread_mutex_lock(&lock);
  *copies_out = *beside_out = 0;
  for (uint32_t i = 0; i < graph->count; i++) {
    if (graph->nodes[i].task.kind != TASK_COPY) continue;
    ++*copies_out;
    /* Does the call captured last before this copy have to be done first? */
    uint32_t call = i;
    while (call-- > 0 && graph->nodes[call].task.kind != TASK_CALL) {
    }
    if (call == UINT32_MAX) continue;
    bool *before = calloc(graph->count, sizeof *before);
    if (!before) continue;
    before[i] = true;
    for (uint32_t n = i + 1; n-- > 0;)
      for (uint32_t k = 0; before[n] && k < graph->nodes[n].after.count; k++)
        before[graph->nodes[n].after.node[k]] = true;
    *beside_out += !before[call];
    free(before);
  }
  pthread_mutex_unlock(&lock);
}

API cu_result_t cuThreadExchangeStreamCaptureMode(int *mode) {
  int had = capture_mode;
  capture_mode = *mode;
  *mode = had;
  return CU_SUCCESS;
}
void fake_cuda_capture(void *stream, bool capturing) {
  pthread_mutex_lock(&lock);
  ((struct cu_stream *)stream)->capturing = capturing;
  pthread_mutex_unlock(&lock);
}
int fake_cuda_capture_mode(void) { return capture_mode; }
API cu_result_t cuStreamWaitEvent(cu_stream_t stream, cu_event_t event, unsigned flags) {
  BEGIN("cuStreamWaitEvent", true);
  if (event->destroyed || foreign(stream) || flags) return misuse();
  return end(push(stream, (task_t){ .kind = TASK_WAIT, .event = event, .number = event->recorded }));
}
API cu_result_t cuStreamWaitValue64_v2(cu_stream_t stream, cu_address_t address, uint64_t value, unsigned flags) {
  BEGIN("cuStreamWaitValue64", true);
  if (foreign(stream)) return misuse();
  if (flags != CU_WAIT_VALUE_GEQ || address % 8 || !reachable(address, 8)) return end(CU_INVALID_VALUE);
  task_t task = { .kind = TASK_WAIT_VALUE, .src = (const void *)(uintptr_t)address, .number = value };
  cu_result_t result = end(push(stream, task));
  if (fake_cuda.on_wait_value) fake_cuda.on_wait_value();
  return result;
}
API cu_result_t cuEventCreate(cu_event_t *event_out, unsigned flags) {
  if (fake_cuda.on_event) fake_cuda.on_event();
  BEGIN("cuEventCreate", true);
  wait_for_others();
  struct cu_event *event = calloc(1, sizeof *event);
  if (!event || flags & ~3u) {
    free(event);
    return end(CU_INVALID_VALUE);
  }
  event->flags = flags;
  event->next = events;
  events = event;
  live[LIVE_EVENT]++;
  *event_out = event;
  return end(CU_SUCCESS);
}
API cu_result_t cuEventDestroy_v2(cu_event_t event) {
  BEGIN("cuEventDestroy", true);
  if (event->destroyed) return misuse();
  event->destroyed = true; /* queued work may still need its record */
  live[LIVE_EVENT]--;
  return end(CU_SUCCESS);
}
API cu_result_t cuEventRecord(cu_event_t event, cu_stream_t stream) {
  BEGIN("cuEventRecord", true);
  if (event->destroyed || foreign(stream)) return misuse();
  cu_result_t result = push(stream, (task_t){ .kind = TASK_RECORD, .event = event, .number = event->recorded + 1 });
  event->recorded += result == CU_SUCCESS;
  return end(result);
}
API cu_result_t cuEventQuery(cu_event_t event) {
  /* Those who look until it is done are one call, whatever their number. */
  pthread_mutex_lock(&lock);
  bool waits = !lost && !in_host_function && current && current->retained && !event->destroyed &&
               event->done < event->recorded && !fail_function;
  pthread_mutex_unlock(&lock);
  if (waits) return CU_NOT_READY;
  BEGIN("cuEventQuery", true);
  if (event->destroyed) return misuse();
  return end(event->done >= event->recorded ? CU_SUCCESS : CU_NOT_READY);
}
API cu_result_t cuEventElapsedTime(float *ms_out, cu_event_t from, cu_event_t to) {
  BEGIN("cuEventElapsedTime", true);
  if (from->destroyed || to->destroyed || (from->flags | to->flags) & CU_EVENT_NO_TIME) return misuse();
  if (!from->recorded || !to->recorded) return misuse();
  if (from->done < from->recorded || to->done < to->recorded) return end(CU_NOT_READY);
  *ms_out = (float)((double)(int64_t)(to->ns - from->ns) / 1e6);
  return end(CU_SUCCESS);
}

/* --- queued work --- */

static cu_result_t copy(cu_stream_t stream, uint64_t dst, uint64_t src, size_t size, uint64_t host) {
  if (foreign(stream)) return misuse();
  if ((dst != host && !reachable(dst, size)) || (src != host && !reachable(src, size))) return end(CU_INVALID_VALUE);
  bool locked = !host || reachable(host, size);
  task_t task = {
    .kind = TASK_COPY, .dst = (void *)(uintptr_t)dst, .src = (const void *)(uintptr_t)src, .number = size
  };
  cu_result_t result = push(stream, task);
  if (locked || result != CU_SUCCESS) return end(result);
  pageable++;
  channel_t *channel = (stream ? stream : current->null_stream)->channel;
  while (channel->first && !lost) pthread_cond_wait(&progress, &lock);
  return end(lost);
}
API cu_result_t cuMemcpyHtoDAsync_v2(cu_address_t dst, const void *src, size_t size, cu_stream_t stream) {
  BEGIN("cuMemcpyHtoDAsync", true);
  return copy(stream, dst, (uintptr_t)src, size, (uintptr_t)src);
}
API cu_result_t cuMemcpyDtoHAsync_v2(void *dst, cu_address_t src, size_t size, cu_stream_t stream) {
  BEGIN("cuMemcpyDtoHAsync", true);
  return copy(stream, (uintptr_t)dst, src, size, (uintptr_t)dst);
}
API cu_result_t cuMemcpyDtoDAsync_v2(cu_address_t dst, cu_address_t src, size_t size, cu_stream_t stream) {
  BEGIN("cuMemcpyDtoDAsync", true);
  return copy(stream, dst, src, size, 0);
}
API cu_result_t cuMemsetD8Async(cu_address_t dst, unsigned char byte, size_t count, cu_stream_t stream) {
  BEGIN("cuMemsetD8Async", true);
  if (foreign(stream)) return misuse();
  if (!reachable(dst, count) || byte) return end(CU_INVALID_VALUE);
  return end(push(stream, (task_t){ .kind = TASK_SET, .dst = (void *)(uintptr_t)dst, .number = count }));
}
API cu_result_t cuLaunchHostFunc(cu_stream_t stream, cu_host_fn_t fn, void *user) {
  BEGIN("cuLaunchHostFunc", true);
  if (foreign(stream)) return misuse();
  return end(push(stream, (task_t){ .kind = TASK_CALL, .fn = fn, .dst = user }));
}
static const char *const kernels[] = { "gmi_sum_squares", "gmi_rank_sum" }; /* each alone in its module */
enum { KERNELS = sizeof kernels / sizeof *kernels, SUM_SQUARES = 0 };
static struct cu_module modules[KERNELS];
static struct cu_function functions[KERNELS];
API cu_result_t cuModuleLoadData(cu_module_t *module_out, const void *image) {
  BEGIN("cuModuleLoadData", true);
  for (int i = 0; i < KERNELS; i++) {
    char entry[64];
    snprintf(entry, sizeof entry, ".entry %s(", kernels[i]);
    if (!strstr(image, entry)) continue;
    live[LIVE_MODULE]++;
    *module_out = &modules[i];
    return end(CU_SUCCESS);
  }
  return end(200); /* CUDA_ERROR_INVALID_IMAGE */
}
API cu_result_t cuModuleGetFunction(cu_function_t *function_out, cu_module_t module, const char *name) {
  BEGIN("cuModuleGetFunction", true);
  for (int i = 0; i < KERNELS; i++) {
    if (module != &modules[i] || strcmp(name, kernels[i]) != 0) continue;
    *function_out = &functions[i];
    return end(CU_SUCCESS);
  }
  return end(CU_NOT_FOUND);
}
API cu_result_t cuModuleUnload(cu_module_t module) {
  BEGIN("cuModuleUnload", true);
  if (module < modules || module >= modules + KERNELS) return misuse();
  live[LIVE_MODULE]--;
  return end(CU_SUCCESS);
}
/* With the lock. */
static cu_result_t launch_rank_sum(unsigned grid_x, unsigned block_x, cu_stream_t stream, void **parameters) {
  const gmi_rank_sum_t *args = parameters[0];
  const uint64_t bytes = args->count * (args->dtype == 3 ? 8 : args->dtype ? 2 : 4), slot = args->slot_bytes;
  if (!grid_x || grid_x > 1024 || block_x != GMI_RANK_SUM_THREADS ||
      args->own % (args->dtype == 3 ? 8
                   : args->dtype    ? 2
                                    : 4) ||
      args->ranks < 2 || args->ranks > 64 || args->rank >= args->ranks || slot % 16 || args->others % 16 ||
      bytes > slot || !reachable(args->own, bytes) || !reachable(args->others, slot * (args->ranks - 2) + bytes))
    return CU_INVALID_VALUE;
  return push(stream, (task_t){ .kind = TASK_RANK_SUM, .ranks = *args });
}
API cu_result_t cuLaunchKernel(cu_function_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                               cu_stream_t stream, void **parameters, void **extra) {
  BEGIN("cuLaunchKernel", true);
  if (function < functions || function >= functions + KERNELS || foreign(stream)) return misuse();
  if (function != &functions[SUM_SQUARES]) {
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared_bytes || extra)
      return end(CU_INVALID_VALUE);
    return end(launch_rank_sum(grid_x, block_x, stream, parameters));
  }
  cu_address_t items = *(cu_address_t *)parameters[0];
  if (!grid_x || grid_y != 1 || grid_z != 1 || block_x != 32 || block_y != 1 || block_z != 1 || shared_bytes || extra ||
      !reachable(items, grid_x * sizeof(gmi_cuda_sum_t)))
    return end(CU_INVALID_VALUE);
  return end(push(stream, (task_t){ .kind = TASK_SUM, .dst = (void *)(uintptr_t)items, .number = grid_x }));
}

/* --- control --- */

API int fake_cuda_kernel(struct cu_stream *stream, bool (*step)(void *user), void *user) {
  BEGIN("another library's cuLaunchKernel", true);
  if (foreign(stream)) return misuse();
  return end(push(stream, (task_t){ .kind = TASK_KERNEL, .step = step, .dst = user }));
}
API int fake_cuda_device(void) { return current ? current->device : -1; }
API bool fake_cuda_reachable(const void *address, uint64_t size) {
  pthread_mutex_lock(&lock);
  bool result = reachable((uintptr_t)address, size);
  pthread_mutex_unlock(&lock);
  return result;
}

API uint64_t fake_cuda_memory_at(const void *address) {
  pthread_mutex_lock(&lock);
  const span_t *mapping = span_of(mappings, (uintptr_t)address);
  const uint64_t name = mapping ? mapping->memory->base + 1 : 0; /* the first one is named 0 */
  pthread_mutex_unlock(&lock);
  return name;
}

void *fake_cuda_symbol(const char *name) {
  if (fake_cuda.lacking_symbol && !strcmp(name, fake_cuda.lacking_symbol)) return NULL;
  void *address = NULL;
#define FIND(field, symbol, parameters)               \
  if (!strcmp(name, symbol)) {                        \
    cu_result_t(*function) parameters = FAKE_##field; \
    memcpy(&address, &function, sizeof address);      \
  }
#define FAKE_init cuInit
#define FAKE_version cuDriverGetVersion
#define FAKE_error_name cuGetErrorName
#define FAKE_device_count cuDeviceGetCount
#define FAKE_device_get cuDeviceGet
#define FAKE_device_pci cuDeviceGetPCIBusId
#define FAKE_device_attribute cuDeviceGetAttribute
#define FAKE_primary_retain cuDevicePrimaryCtxRetain
#define FAKE_primary_release cuDevicePrimaryCtxRelease_v2
#define FAKE_current_get cuCtxGetCurrent
#define FAKE_current_set cuCtxSetCurrent
#define FAKE_granularity cuMemGetAllocationGranularity
#define FAKE_address_reserve cuMemAddressReserve
#define FAKE_address_free cuMemAddressFree
#define FAKE_memory_create cuMemCreate
#define FAKE_memory_release cuMemRelease
#define FAKE_memory_map cuMemMap
#define FAKE_memory_access cuMemSetAccess
#define FAKE_memory_unmap cuMemUnmap
#define FAKE_host_alloc cuMemHostAlloc
#define FAKE_host_free cuMemFreeHost
#define FAKE_host_address cuMemHostGetDevicePointer_v2
#define FAKE_host_register cuMemHostRegister_v2
#define FAKE_host_unregister cuMemHostUnregister
#define FAKE_stream_create cuStreamCreate
#define FAKE_stream_create_priority cuStreamCreateWithPriority
#define FAKE_stream_destroy cuStreamDestroy_v2
#define FAKE_stream_capturing cuStreamIsCapturing
#define FAKE_capture_mode cuThreadExchangeStreamCaptureMode
#define FAKE_stream_context cuStreamGetCtx
#define FAKE_stream_wait cuStreamWaitEvent
#define FAKE_stream_wait_value cuStreamWaitValue64_v2
#define FAKE_event_create cuEventCreate
#define FAKE_event_destroy cuEventDestroy_v2
#define FAKE_event_record cuEventRecord
#define FAKE_event_query cuEventQuery
#define FAKE_event_elapsed cuEventElapsedTime
#define FAKE_copy_h2d cuMemcpyHtoDAsync_v2
#define FAKE_copy_d2h cuMemcpyDtoHAsync_v2
#define FAKE_copy_d2d cuMemcpyDtoDAsync_v2
#define FAKE_set_bytes cuMemsetD8Async
#define FAKE_host_call cuLaunchHostFunc
#define FAKE_launch cuLaunchKernel
#define FAKE_module_load cuModuleLoadData
#define FAKE_module_function cuModuleGetFunction
#define FAKE_module_unload cuModuleUnload
#define FAKE_context_wait cuCtxSynchronize
#define FAKE_stream_id cuStreamGetId
#define FAKE_capture_info cuStreamGetCaptureInfo_v2
  GMI_CUDA_FUNCTIONS(FIND)
  GMI_CUDA_OPTIONAL(FIND)
  return address;
}

void fake_cuda_reset(void) {
  pthread_mutex_lock(&lock);
  fake_cuda = (fake_cuda_options_t){ DEVICES, 0, NULL, 32, 1024, UINT64_C(1) << 30, 1.0, NULL, NULL, 0, false };
  initialised = false;
  lost = 0;
  calls = fail_first = fail_last = pageable = violations = 0;
  fail_function = NULL;
  memset(live, 0, sizeof live);
  memset(memory_used, 0, sizeof memory_used);
  span_t **lists[] = { &ranges, &memories, &mappings, &hosts };
  for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
    for (span_t *next; *lists[i]; *lists[i] = next) {
      next = (*lists[i])->next;
      if (lists[i] == &ranges || (*lists[i])->ours) munmap((void *)(uintptr_t)(*lists[i])->base, (*lists[i])->size);
      free(*lists[i]);
    }
  }
  for (int i = 0; i < DEVICES; i++) contexts[i].retained = 0;
  all_stop();
  if (memory_fd >= 0) close(memory_fd);
  memory_fd = -1;
  memory_end = memories_made = 0;
  pthread_mutex_unlock(&lock);
}

uint64_t fake_cuda_calls(void) {
  pthread_mutex_lock(&lock);
  uint64_t result = calls;
  pthread_mutex_unlock(&lock);
  return result;
}
void fake_cuda_fail(uint64_t first, uint64_t last, int result) {
  pthread_mutex_lock(&lock);
  fail_first = first;
  fail_last = last;
  fail_result = result;
  pthread_mutex_unlock(&lock);
}
void fake_cuda_fail_function(const char *name, int result) {
  pthread_mutex_lock(&lock);
  fail_function = name;
  fail_result = result;
  pthread_mutex_unlock(&lock);
}
void fake_cuda_lose(int result) {
  pthread_mutex_lock(&lock);
  lost = result;
  pthread_cond_broadcast(&progress);
  pthread_mutex_unlock(&lock);
}
uint64_t fake_cuda_live(bool print) {
  uint64_t sum = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < LIVE_KINDS; i++) {
    sum += live[i];
    if (print && live[i]) fprintf(stderr, "    %llu %s live\n", (unsigned long long)live[i], live_names[i]);
  }
  pthread_mutex_unlock(&lock);
  return sum;
}
uint64_t fake_cuda_pageable_copies(void) {
  pthread_mutex_lock(&lock);
  uint64_t result = pageable;
  pthread_mutex_unlock(&lock);
  return result;
}
uint64_t fake_cuda_violations(void) {
  pthread_mutex_lock(&lock);
  uint64_t result = violations;
  pthread_mutex_unlock(&lock);
  return result;
}
