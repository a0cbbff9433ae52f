/* bench_stack's way to a GPU without a GPU: bench/model/task_gpu.c, whose kernels are played by the CPU's tasks, and
 * libgemini's CUDA device on a fake driver. What a kernel is launched with must be what it takes, for all its elements;
 * and a training under libgemini, in chunks that come and go, must give the bits of one on the CPU in plain memory.
 * The kernels' own arithmetic is not tested here. SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>

#include "check.h"
#include "figures.h"

#define gemini_adamw_cuda played_adamw_cuda /* that one would open the real driver */
#include "../../bench/model/task_gpu.c"
#undef gemini_adamw_cuda
#include "device/cuda_driver.h"
#include "fake_cuda.h"
#include "model/llama.h"

static const llama_shape_t shape = { "test", 6, 256, 704, 512 };
enum { ROWS = 8, STEPS = 4, CHUNK_BYTES = 2 << 20 };

/* ---- bench/common/gpu.h on the host; streams are the fake driver's ---- */

cu_result_t cuInit(unsigned flags);
cu_result_t cuLaunchHostFunc(cu_stream_t stream, cu_host_fn_t fn, void *user);
cu_result_t cuDevicePrimaryCtxRetain(cu_context_t *context_out, cu_device_t device);
cu_result_t cuDevicePrimaryCtxRelease_v2(cu_device_t device);
cu_result_t cuCtxSetCurrent(cu_context_t context);
cu_result_t cuStreamCreate(cu_stream_t *stream_out, unsigned flags);
cu_result_t cuStreamDestroy_v2(cu_stream_t stream);
cu_result_t cuEventCreate(cu_event_t *event_out, unsigned flags);
cu_result_t cuEventDestroy_v2(cu_event_t event);
cu_result_t cuEventRecord(cu_event_t event, cu_stream_t stream);
cu_result_t cuEventQuery(cu_event_t event);

static uint64_t played[TASK_KERNELS], plain_bytes;

static void run_task(void *user) {
  task_run(user);
  free(user);
}
static bool queue(void *stream, const task_t *task) {
  task_t *copy = malloc(sizeof *copy);
  CHECK(copy != NULL && stream != NULL);
  *copy = *task;
  return cuLaunchHostFunc(stream, run_task, copy) == CU_SUCCESS;
}

bool gpu_load(gpu_t *gpu, const char *ptx, const char *const *names, void **kernels_out, int count) {
  (void)gpu;
  for (int i = 0; i < count; i++) {
    char entry[96];
    snprintf(entry, sizeof entry, ".visible .entry %s(", names[i]);
    CHECK(strstr(ptx, entry) != NULL);
    kernels_out[i] = &played[i];
  }
  return true;
}

static const void *pointer(void **arguments, int i) { return *(void **)arguments[i]; }
static void *target(void **arguments, int i) { return *(void **)arguments[i]; }
static uint32_t number(void **arguments, int i) { return *(uint32_t *)arguments[i]; }
static uint64_t large(void **arguments, int i) { return *(uint64_t *)arguments[i]; }
/* Just enough blocks for so many threads. */
static void check_grid(uint32_t grid, uint32_t block, uint64_t threads) {
  CHECK((uint64_t)grid * block >= threads && (uint64_t)(grid - 1) * block < threads);
}

/* Arguments in the order of task_kernels.cu. */
bool gpu_launch(gpu_t *gpu, void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t block, void *stream, void **a) {
  (void)gpu;
  task_t t = { .rows = (int)grid_x };
  CHECK(block % 32 == 0 && block <= 1024 && (grid_y == 1 || kernel == &played[KERNEL_NORM_WEIGHT]));
  (*(uint64_t *)kernel)++;
  switch ((uint64_t *)kernel - played) {
  case KERNEL_EMBED:
    t = (task_t){ TASK_EMBED, .rows = t.rows, .in = { pointer(a, 0), pointer(a, 1) }, .out = { target(a, 2) } };
    t.width = (int)number(a, 3) * 8;
    break;
  case KERNEL_EMBED_GRADIENT:
    t = (task_t){ TASK_EMBED_GRADIENT, .rows = t.rows, .in = { pointer(a, 0), pointer(a, 1), pointer(a, 2) } };
    t.out[0] = target(a, 3);
    t.width = (int)number(a, 4) * 8;
    break;
  case KERNEL_NORM:
    t = (task_t){ TASK_NORM, .rows = t.rows, .in = { pointer(a, 0), pointer(a, 1) }, .out = { target(a, 2) } };
    t.width = (int)number(a, 3) * 8;
    break;
  case KERNEL_NORM_GRADIENT:
    t = (task_t){ TASK_NORM_GRADIENT, .rows = t.rows, .out = { target(a, 4), target(a, 5) } };
    for (int i = 0; i < 4; i++) t.in[i] = pointer(a, i);
    t.width = (int)number(a, 6) * 8;
    break;
  case KERNEL_NORM_WEIGHT: /* the sums follow: all of it is done there */
    check_grid(grid_x, block, number(a, 4));
    check_grid(grid_y, number(a, 6), number(a, 5));
    t = (task_t){ TASK_NORM_WEIGHT, .rows = (int)number(a, 5), .width = (int)number(a, 4) * 8 };
    for (int i = 0; i < 3; i++) t.in[i] = pointer(a, i);
    t.out[0] = target(a, 3); /* bf16, into the workspace: it has room for that */
    break;
  case KERNEL_NORM_WEIGHT_SUM:
    check_grid(grid_x, block, number(a, 2));
    check_grid(number(a, 3), TASK_NORM_ROWS, ROWS);
    t = (task_t){ TASK_COPY, .in = { pointer(a, 0) }, .out = { target(a, 1) }, .count = number(a, 2) * UINT64_C(2) };
    break;
  case KERNEL_GATE:
    check_grid(grid_x, block, large(a, 4));
    t = (task_t){ TASK_GATE, .count = large(a, 4) * 8, .out = { target(a, 3) } };
    for (int i = 0; i < 3; i++) t.in[i] = pointer(a, i);
    break;
  case KERNEL_GATE_GRADIENT:
    check_grid(grid_x, block, large(a, 3));
    t = (task_t){ TASK_GATE_GRADIENT, .count = large(a, 3) * 8, .in = { pointer(a, 0) } };
    t.out[0] = target(a, 1);
    t.out[1] = target(a, 2);
    break;
  case KERNEL_LOSS:
    CHECK(*(float *)a[4] == 1.0f / (float)t.rows);
    t = (task_t){ TASK_LOSS, .rows = t.rows, .in = { pointer(a, 1) }, .out = { target(a, 0), target(a, 2) } };
    t.width = (int)number(a, 3) * 8;
    break;
  case KERNEL_LOSS_MEAN:
    CHECK(grid_x == 1 && block == 256);
    t = (task_t){ TASK_LOSS_MEAN, .rows = (int)number(a, 2), .in = { pointer(a, 0) }, .out = { target(a, 1) } };
    break;
  case KERNEL_FILL:
    check_grid(grid_x, block, large(a, 2));
    t = (task_t){ TASK_FILL, .count = large(a, 2), .first = large(a, 4), .out = { target(a, 0), target(a, 1) } };
    t.with.fill = (task_fill_t){ large(a, 3), 0, *(float *)a[5], *(float *)a[6] };
    break;
  case KERNEL_HASH:
    t = (task_t){ TASK_HASH, .count = large(a, 1), .first = large(a, 2), .in = { pointer(a, 0) } };
    t.out[0] = target(a, 3);
    break;
  default: CHECK(false);
  }
  return queue(stream, &t);
}
bool gpu_gemm(gpu_t *gpu, const gpu_gemm_t *gemm, void *stream) {
  (void)gpu;
  return queue(stream, &(task_t){ .kind = TASK_GEMM, .gemm = *gemm });
}
bool gpu_copy(gpu_t *gpu, void *to, const void *from, uint64_t bytes, void *stream) {
  (void)gpu;
  return queue(stream, &(task_t){ .kind = TASK_COPY, .in = { from }, .out = { to }, .count = bytes });
}
gemini_status_t played_adamw_cuda(const gemini_adamw_t *adamw, uint64_t count, void *param, const void *grad,
                                  void *master, void *momentum, void *variance, void *stream, double *sums_out) {
  CHECK(param == grad && sums_out == NULL);
  task_t t = { .kind = TASK_ADAMW, .count = count, .out = { param, master, momentum, variance }, .with.adamw = *adamw };
  return queue(stream, &t) ? GEMINI_OK : GEMINI_ERR_DEVICE;
}
bool gpu_set(gpu_t *gpu, void *to, unsigned char byte, uint64_t bytes, void *stream) {
  (void)gpu, (void)stream;
  memset(to, byte, bytes); /* of what nobody has used yet */
  return true;
}
bool gpu_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out) {
  (void)gpu;
  plain_bytes += bytes;
  *ptr_out = malloc(bytes);
  if (*ptr_out != NULL) memset(*ptr_out, 0xff, bytes); /* NaNs: nothing of them may stay */
  return *ptr_out != NULL;
}
bool gpu_free(gpu_t *gpu, void *ptr) {
  (void)gpu;
  free(ptr);
  return true;
}
bool gpu_alloc_async(gpu_t *gpu, uint64_t bytes, void *stream, void **ptr_out) {
  (void)stream;
  return gpu_alloc(gpu, bytes, ptr_out);
}
bool gpu_free_async(gpu_t *gpu, void *ptr, void *stream) {
  (void)gpu;
  return cuLaunchHostFunc(stream, free, ptr) == CU_SUCCESS;
}
bool gpu_host_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out) { return gpu_alloc(gpu, bytes, ptr_out); }
bool gpu_host_free(gpu_t *gpu, void *ptr) { return gpu_free(gpu, ptr); }
bool gpu_stream_create(gpu_t *gpu, void **stream_out) {
  (void)gpu;
  cu_stream_t stream;
  bool created = cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING_FLAG) == CU_SUCCESS;
  *stream_out = stream;
  return created;
}
bool gpu_stream_destroy(gpu_t *gpu, void *stream) {
  (void)gpu;
  return cuStreamDestroy_v2(stream) == CU_SUCCESS;
}
bool gpu_blas_stream(gpu_t *gpu, void *stream, uint64_t workspace_bytes) {
  (void)gpu, (void)workspace_bytes;
  return stream != NULL;
}
bool gpu_stream_synchronize(gpu_t *gpu, void *stream) {
  (void)gpu;
  cu_event_t event;
  CHECK_EQ(cuEventCreate(&event, CU_EVENT_NO_TIME), CU_SUCCESS);
  CHECK_EQ(cuEventRecord(event, stream), CU_SUCCESS);
  cu_result_t result;
  while ((result = cuEventQuery(event)) == CU_NOT_READY) sched_yield();
  return cuEventDestroy_v2(event) == CU_SUCCESS && result == CU_SUCCESS;
}

/* ---- Trainings ---- */

typedef struct result {
  double losses[STEPS];
  uint64_t hash, host_elements, fetched_bytes;
} result_t;

/* config NULL: plain. */
static result_t train(const gemini_config_t *config, const device_t *device) {
  result_t r = { .hash = 0 };
  memory_t memory;
  llama_t llama;
  memory_open(&memory, device, config, false);
  llama_open(&llama, &memory, &shape, ROWS, STEPS, 7);
  for (int step = 0; step < STEPS; step++) {
    llama_step(&llama, (uint64_t)step);
    memory_synchronize(&memory);
    if (memory.failed) break;
    r.losses[step] = llama.losses[step];
  }
  memory_update_wait(&memory);
  memory_synchronize(&memory);
  r.hash = walk_hash(&memory);
  for (int step = 0; step < STEPS; step++) r.host_elements += atomic_load(&llama.updates[step].host_elements);
  if (config != NULL && !memory.failed) {
    figures_t stats = { 0 };
    CHECK_EQ(figures_read(memory.manager, &stats), GEMINI_OK);
    for (int i = 0; i < GEMINI_REASON_COUNT; i++) r.fetched_bytes += stats.moved_bytes[LINK_H2D][i];
    CHECK_EQ(stats.op_peak_error_bytes, 0);
    CHECK(stats.peak_bytes[GEMINI_TIER_DEVICE] <= config->device_bytes);
  }
  memory_close(&memory);
  llama_close(&llama);
  if (memory_error(&memory) != NULL) fprintf(stderr, "%s\n", memory_error(&memory));
  CHECK(memory_error(&memory) == NULL);
  return r;
}

static void test_stack_gpu_trains_to_the_bits_of_the_cpu(void) {
  static const struct {
    uint32_t placement;
    uint64_t chunks;
  } cases[] = { { GEMINI_PLACEMENT_AUTO, 64 }, /* all fits */
                { GEMINI_PLACEMENT_CUDA, 64 },
                { GEMINI_PLACEMENT_AUTO, 8 },
                { GEMINI_PLACEMENT_CPU, 8 } };
  uint64_t host_elements = 0, device_elements = 0, fetched_bytes = 0;
  result_t cpu = train(NULL, &device_cpu);
  CHECK(cpu.losses[STEPS - 1] < cpu.losses[0]);

  gmi_cuda_driver_replace(fake_cuda_symbol);
  cu_context_t context; /* as gpu_open() makes it the thread's */
  CHECK_EQ(cuInit(0), CU_SUCCESS);
  CHECK_EQ(cuDevicePrimaryCtxRetain(&context, 0), CU_SUCCESS);
  CHECK_EQ(cuCtxSetCurrent(context), CU_SUCCESS);
  CHECK(device_cuda_open((gpu_t *)(void *)played) && task_gpu_open()); /* some address: gpu_*() look at nothing in it */
  result_t plain = train(NULL, &device_cuda);
  CHECK(plain_bytes > 0);
  CHECK_EQ(plain.hash, cpu.hash);
  CHECK(!memcmp(plain.losses, cpu.losses, sizeof cpu.losses));
  plain_bytes = 0;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    gemini_config_t config = GEMINI_CONFIG_INIT;
    config.device = GEMINI_DEVICE_CUDA;
    config.placement = cases[i].placement;
    config.device_bytes = cases[i].chunks * CHUNK_BYTES;
    config.host_bytes = 64 * (uint64_t)CHUNK_BYTES;
    config.chunk_bytes = CHUNK_BYTES;
    config.update_threads = 2;
    result_t managed = train(&config, &device_cuda);
    CHECK_EQ(managed.hash, cpu.hash);
    CHECK(!memcmp(managed.losses, cpu.losses, sizeof cpu.losses));
    host_elements += managed.host_elements;
    device_elements += STEPS * llama_elements(&shape) - managed.host_elements;
    fetched_bytes += managed.fetched_bytes;
  }
  CHECK_EQ(plain_bytes, 0); /* all memory is libgemini's */
  CHECK(host_elements > 0 && device_elements > 0 && fetched_bytes > 0);
  for (int i = 0; i < TASK_KERNELS; i++) CHECK(played[i] > 0);
  device_cuda_close();
  CHECK_EQ(cuCtxSetCurrent(NULL), CU_SUCCESS);
  CHECK_EQ(cuDevicePrimaryCtxRelease_v2(0), CU_SUCCESS);
  CHECK_EQ(fake_cuda_violations(), 0);
  CHECK_EQ(fake_cuda_live(true), 0);
  gmi_cuda_driver_replace(NULL);
}

int main(void) {
  RUN(test_stack_gpu_trains_to_the_bits_of_the_cpu);
  return check_done();
}
