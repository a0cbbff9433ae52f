/* The GPU's operators of a GPT without a GPU: gpt_kernels.cu compiled as C with loops for threads, matrix products by the
 * CPU's BLAS, and the rest of bench/model/gpt_cuda.c as it is. Called for the same shapes, that BLAS gives the same bits, and the
 * kernels claim the order of the CPU's sums: so everything must equal the CPU's operators to the bit, one by one and in
 * whole trainings; and those under libgemini, on a fake CUDA driver, must equal those in plain memory.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <cblas.h>
#include <math.h>

#include "check.h"
#include "figures.h"

#define PANEL_FLOATS 65536 /* GPT_PANEL_FLOATS: the CPU's panels */
#include "../../bench/model/gpt_cuda.c"
#include "device/cuda_driver.h"
#include "examples/gpt_model.h"
#include "fake_cuda.h"

#define CHECK_OK(call) CHECK_EQ((call), GEMINI_OK)

/* ---- Kernels as C ---- */

static _Thread_local struct {
  uint32_t x;
} threadIdx, blockIdx, blockDim;

#define KERNEL(name, type)                                                        \
  static void body_##name(const type a);                                          \
  static void call_##name(const void *args) { body_##name(*(const type *)args); } \
  static void body_##name(const type a)
/* Threads and blocks in either order: where one looked at what another writes in the same phase, these would differ. */
static bool backwards;
static _Thread_local bool in_phase; /* its threads have not waited for one another yet */
static inline bool thread_is(uint32_t number) {
  if (number == 0) {
    CHECK(!in_phase);
    in_phase = true;
  }
  threadIdx.x = backwards ? blockDim.x - 1 - number : number;
  return number < blockDim.x;
}
#define PHASE for (uint32_t number = 0; thread_is(number); number++)
#define NEXT_PHASE (in_phase = false)
#define SHARED
#define INLINE static inline
#include "../../bench/model/gpt_kernels.cu"

typedef struct kernel {
  const char *name;
  void (*call)(const void *args);
  size_t args_bytes;
} kernel_t;
static const kernel_t all_kernels[] = {
#define ROW(name, type, block) { "gpt_kernel_" #name, call_##name, sizeof(type) },
  GPT_KERNELS(ROW)
#undef ROW
};

/* ---- bench/common/gpu.h on the host. A stream is NULL's address: at once, or one of the fake driver's ---- */

cu_result_t cuInit(unsigned flags);
cu_result_t cuLaunchHostFunc(cu_stream_t stream, cu_host_fn_t fn, void *user);
cu_result_t cuDevicePrimaryCtxRetain(cu_context_t *context_out, cu_device_t device);
cu_result_t cuDevicePrimaryCtxRelease_v2(cu_device_t device);
cu_result_t cuCtxSetCurrent(cu_context_t context);

static char at_once;
static uint64_t launches;
static uint64_t largest_alloc = UINT64_MAX; /* bytes; more are refused */
static bool broken;                         /* every launch fails */

typedef struct work {
  const kernel_t *kernel; /* NULL: a product or a copy */
  uint32_t grid, block;
  gpu_gemm_t gemm;
  void *to;
  const void *from; /* NULL: zeros */
  uint64_t bytes;   /* of a copy; 0: a product */
  max_align_t args[16];
} work_t;

static void multiply(const gpu_gemm_t *g) {
  CHECK_EQ(g->inputs, GPU_F32);
  CHECK_EQ(g->output, GPU_F32);
  for (int i = 0; i < (g->count ? g->count : 1); i++) {
    cblas_sgemm(CblasRowMajor, g->a_transposed ? CblasTrans : CblasNoTrans, g->b_transposed ? CblasTrans : CblasNoTrans,
                g->m, g->n, g->k, g->alpha, (const float *)g->a + i * g->stride_a, g->lda,
                (const float *)g->b + i * g->stride_b, g->ldb, g->beta, (float *)g->c + i * g->stride_c, g->ldc);
  }
}

static void work_run(void *user) {
  work_t *w = user;
  if (w->kernel != NULL) {
    blockDim.x = w->block;
    for (uint32_t i = 0; i < w->grid; i++) {
      blockIdx.x = backwards ? w->grid - 1 - i : i;
      in_phase = false;
      w->kernel->call(w->args);
    }
  } else if (w->bytes == 0) {
    multiply(&w->gemm);
  } else if (w->from != NULL) {
    memcpy(w->to, w->from, w->bytes);
  } else {
    memset(w->to, 0, w->bytes);
  }
  free(w);
}

static bool queue(void *stream, work_t work) {
  work_t *w = malloc(sizeof *w);
  CHECK(w != NULL);
  *w = work;
  if (stream != &at_once) return cuLaunchHostFunc(stream, work_run, w) == CU_SUCCESS;
  work_run(w);
  return true;
}

bool gpu_load(gpu_t *gpu, const char *ptx, const char *const *names, void **kernels_out, int count) {
  (void)gpu;
  CHECK_EQ((size_t)count, sizeof all_kernels / sizeof *all_kernels);
  for (int i = 0; i < count; i++) {
    char entry[96];
    snprintf(entry, sizeof entry, ".visible .entry %s(", names[i]);
    CHECK(strstr(ptx, entry) != NULL); /* gpt_kernels.ptx has the kernels of gpt_kernels.h */
    kernels_out[i] = NULL;
    for (int k = 0; k < count; k++) {
      if (!strcmp(names[i], all_kernels[k].name)) kernels_out[i] = (void *)(uintptr_t)&all_kernels[k];
    }
    CHECK(kernels_out[i] != NULL);
  }
  return true;
}
bool gpu_launch(gpu_t *gpu, void *kernel, uint32_t grid_x, uint32_t grid_y, uint32_t block, void *stream,
                void **arguments) {
  (void)gpu;
  work_t w = { .kernel = kernel, .grid = grid_x, .block = block };
  CHECK_EQ(grid_y, 1);
  CHECK(w.kernel->args_bytes <= sizeof w.args);
  memcpy(w.args, arguments[0], w.kernel->args_bytes);
  launches++;
  return !broken && queue(stream, w);
}
bool gpu_gemm(gpu_t *gpu, const gpu_gemm_t *gemm, void *stream) {
  (void)gpu;
  return queue(stream, (work_t){ .gemm = *gemm });
}
bool gpu_copy(gpu_t *gpu, void *to, const void *from, uint64_t bytes, void *stream) {
  (void)gpu;
  return queue(stream, (work_t){ .to = to, .from = from, .bytes = bytes });
}
bool gpu_set(gpu_t *gpu, void *to, unsigned char byte, uint64_t bytes, void *stream) {
  (void)gpu;
  CHECK_EQ(byte, 0);
  return queue(stream, (work_t){ .to = to, .bytes = bytes });
}
bool gpu_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out) {
  (void)gpu;
  if (bytes > largest_alloc) return false;
  *ptr_out = aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (*ptr_out != NULL) memset(*ptr_out, 0xff, bytes); /* NaNs: nothing of them may stay */
  return *ptr_out != NULL;
}
bool gpu_alloc_async(gpu_t *gpu, uint64_t bytes, void *stream, void **ptr_out) {
  CHECK(stream == &at_once); /* under libgemini all memory is its own */
  return gpu_alloc(gpu, bytes, ptr_out);
}
bool gpu_free(gpu_t *gpu, void *ptr) {
  (void)gpu;
  free(ptr);
  return true;
}
bool gpu_free_async(gpu_t *gpu, void *ptr, void *stream) {
  (void)gpu, (void)stream;
  free(ptr);
  return true;
}
bool gpu_host_alloc(gpu_t *gpu, uint64_t bytes, void **ptr_out) {
  (void)gpu;
  *ptr_out = calloc(1, bytes);
  return *ptr_out != NULL;
}
bool gpu_host_free(gpu_t *gpu, void *ptr) {
  (void)gpu;
  free(ptr);
  return true;
}
bool gpu_stream_create(gpu_t *gpu, void **stream_out) {
  (void)gpu;
  *stream_out = &at_once;
  return true;
}
bool gpu_stream_destroy(gpu_t *gpu, void *stream) {
  (void)gpu;
  return stream == &at_once;
}
bool gpu_stream_synchronize(gpu_t *gpu, void *stream) {
  (void)gpu;
  return stream == &at_once;
}
bool gpu_blas_stream(gpu_t *gpu, void *stream, uint64_t workspace_bytes) {
  (void)gpu, (void)stream, (void)workspace_bytes;
  return true;
}

/* ---- Operators one by one ---- */

static uint64_t random_state;
/* About normal; some are 0, some far away. */
static float draw(void) {
  uint64_t bits = check_random(&random_state);
  if (bits % 97 == 0) return bits & 128 ? -0.0f : 0.0f;
  float value = gpt_random_normal(&random_state);
  return bits % 89 == 0 ? 30 * value : value;
}
static float *floats(uint64_t count) {
  float *x = malloc(count * sizeof *x);
  CHECK(x != NULL);
  for (uint64_t i = 0; i < count; i++) x[i] = draw();
  return x;
}
static uint16_t *bf16s(uint64_t count) {
  uint16_t *x = malloc(count * sizeof *x);
  CHECK(x != NULL);
  for (uint64_t i = 0; i < count; i++) x[i] = gpt_bf16_from_f32(draw());
  return x;
}
static void *same(const void *of, uint64_t bytes) {
  void *x = malloc(bytes);
  CHECK(x != NULL);
  memcpy(x, of, bytes);
  return x;
}
static void check_same(const void *cpu, const void *gpu, uint64_t bytes, uint64_t element, const char *what) {
  for (uint64_t i = 0; i < bytes / element; i++) {
    if (!memcmp((const char *)cpu + i * element, (const char *)gpu + i * element, element)) continue;
    fprintf(stderr, "%s: element %" PRIu64 " differs\n", what, i);
    exit(1);
  }
}
/* A result of the CPU's and one of the GPU's operator, which must be the same; frees both. */
static void take(void *cpu, void *gpu, uint64_t bytes, uint64_t element, const char *what) {
  CHECK(cpu != gpu);
  check_same(cpu, gpu, bytes, element, what);
  free(cpu);
  free(gpu);
}
#define F sizeof(float)
#define B sizeof(uint16_t)

static void test_gpu_norm_equals_cpu(void) {
  static const int shapes[][2] = { { 3, 32 }, { 8, 21 }, { 17, 5 }, { 40, 130 } };
  for (int s = 0; s < 4; s++) {
    int rows = shapes[s][0], width = shapes[s][1];
    uint64_t w = (uint64_t)width, n = (uint64_t)rows * w;
    float *x = floats(n), *dy = floats(n), *dx = floats(n), *dx2 = same(dx, n * F), *y = floats(n), *y2 = floats(n);
    float *d = floats(2 * w), *d2 = floats(2 * w), *workspace = floats(2 * (uint64_t)rows);
    uint16_t *weight = bf16s(w), *bias = bf16s(w);
    gpt_norm_t forward = { rows, width, x, weight, bias, y };
    gpt_norm_forward(&forward);
    forward.y = y2;
    CHECK(gpt_cuda.norm_forward(&at_once, &forward));
    take(y, y2, n * F, F, "norm");
    gpt_norm_gradient_t backward = { rows, width, x, weight, dy, dx, d, d + w, NULL };
    gpt_norm_backward(&backward);
    CHECK_EQ(gpt_cuda.norm_floats(rows), 2 * rows);
    backward = (gpt_norm_gradient_t){ rows, width, x, weight, dy, dx2, d2, d2 + w, workspace };
    CHECK(gpt_cuda.norm_backward(&at_once, &backward));
    take(dx, dx2, n * F, F, "norm dx");
    take(d, d2, 2 * w * F, F, "norm dweight, dbias");
    free(x), free(dy), free(weight), free(bias), free(workspace);
  }
}

static void test_gpu_linear_equals_cpu(void) {
  static const int shapes[][3] = { { 5, 24, 31 }, { 33, 600, 250 } }; /* the second in panels */
  for (int s = 0; s < 2; s++) {
    int rows = shapes[s][0], in = shapes[s][1], out = shapes[s][2];
    uint64_t nx = (uint64_t)(rows * in), nw = (uint64_t)(in * out), ny = (uint64_t)(rows * out);
    float *x = floats(nx), *residual = floats(ny), *dy = floats(ny), *workspace = floats(gpt_panel_floats(in, out));
    uint16_t *weight = bf16s(nw), *bias = bf16s((uint64_t)out);
    for (int variant = 0; variant < 3; variant++) { /* neither, both, both in place */
      float *y = floats(ny), *y2 = floats(ny);
      if (variant == 2) memcpy(y, residual, ny * F), memcpy(y2, residual, ny * F);
      gpt_linear_t a = { rows, in, out, x, weight, variant ? bias : NULL, residual, y, workspace };
      a.residual = variant == 0 ? NULL : variant == 1 ? residual : y;
      gpt_linear_forward(&a);
      a.y = y2;
      if (variant == 2) a.residual = y2;
      CHECK(gpt_cuda.linear_forward(&at_once, &a));
      take(y, y2, ny * F, F, "linear");
    }
    float *dx = floats(nx), *dx2 = floats(nx), *dw = floats(nw), *dw2 = floats(nw);
    gpt_linear_backward_x(&(gpt_linear_gradient_x_t){ rows, in, out, dy, weight, dx, workspace });
    CHECK(
        gpt_cuda.linear_backward_x(&at_once, &(gpt_linear_gradient_x_t){ rows, in, out, dy, weight, dx2, workspace }));
    take(dx, dx2, nx * F, F, "linear dx");
    uint16_t *db = bf16s((uint64_t)out), *db2 = bf16s((uint64_t)out), *dwb = bf16s(nw), *dwb2 = bf16s(nw);
    gpt_linear_gradient_weight_t a = { rows, in, out, x, dy, dwb, db, dw, workspace };
    gpt_linear_backward_weight(&a);
    a.dweight = dwb2, a.dbias = db2, a.dweight_f32 = dw2;
    CHECK(gpt_cuda.linear_backward_weight(&at_once, &a));
    take(dw, dw2, nw * F, F, "linear dweight_f32");
    take(dwb, dwb2, nw * B, B, "linear dweight");
    take(db, db2, (uint64_t)out * B, B, "linear dbias");
    free(x), free(residual), free(dy), free(workspace), free(weight), free(bias);
  }
}

static void test_gpu_attention_equals_cpu(void) {
  static const int shapes[][4] = { { 2, 7, 12, 3 }, { 1, 40, 32, 2 }, { 3, 1, 8, 4 } };
  for (int s = 0; s < 3; s++) {
    int batch = shapes[s][0], context = shapes[s][1], width = shapes[s][2], heads = shapes[s][3];
    uint64_t n = (uint64_t)(batch * context * width);
    float *qkv = floats(3 * n), *dy = floats(n), *y = floats(n), *y2 = floats(n), *dqkv = floats(3 * n),
          *dqkv2 = floats(3 * n), *workspace = floats(2 * gpt_cuda.attention_floats(context, heads));
    gpt_attention_t forward = { batch, context, width, heads, qkv, y, workspace };
    gpt_attention_forward(&forward);
    forward.y = y2;
    CHECK(gpt_cuda.attention_forward(&at_once, &forward));
    take(y, y2, n * F, F, "attention");
    gpt_attention_gradient_t backward = { batch, context, width, heads, qkv, dy, dqkv, workspace };
    gpt_attention_backward(&backward);
    backward.dqkv = dqkv2;
    CHECK(gpt_cuda.attention_backward(&at_once, &backward));
    take(dqkv, dqkv2, 3 * n * F, F, "attention dqkv");
    free(qkv), free(dy), free(workspace);
  }
}

static void test_gpu_gelu_equals_cpu(void) {
  uint64_t n = 1000;
  float *x = floats(n), *y = floats(n), *y2 = floats(n), *dy = floats(n), *dy2 = same(dy, n * F);
  x[1] = 1e30f, x[2] = -1e30f, x[3] = 1e-40f;
  gpt_gelu_forward(&(gpt_gelu_t){ n, x, y });
  CHECK(gpt_cuda.gelu_forward(&at_once, &(gpt_gelu_t){ n, x, y2 }));
  gpt_gelu_backward(&(gpt_gelu_gradient_t){ n, x, dy });
  CHECK(gpt_cuda.gelu_backward(&at_once, &(gpt_gelu_gradient_t){ n, x, dy2 }));
  take(y, y2, n * F, F, "gelu");
  take(dy, dy2, n * F, F, "gelu dx");
  free(x);
}

static void test_gpu_loss_equals_cpu(void) {
  for (int rows = 1; rows <= 35; rows += 17) {
    for (int with_gradient = 0; with_gradient < 2; with_gradient++) {
      uint64_t n = (uint64_t)rows * GPT_VOCABULARY;
      float *logits = floats(n), *logits2 = same(logits, n * F);
      double of_cpu = -1, of_gpu = -2, *workspace = malloc(gpt_cuda.loss_floats(rows) * F);
      int32_t targets[64];
      CHECK(workspace != NULL);
      for (int i = 0; i < rows; i++) targets[i] = (int32_t)(check_random(&random_state) % GPT_VOCABULARY);
      gpt_loss(&(gpt_loss_t){ rows, targets, logits, with_gradient, &of_cpu, NULL });
      CHECK(gpt_cuda.loss(&at_once, &(gpt_loss_t){ rows, targets, logits2, with_gradient, &of_gpu, workspace }));
      CHECK(of_cpu == of_gpu && of_cpu > 0);
      take(logits, logits2, n * F, F, "dlogits");
      free(workspace);
    }
  }
}

static void test_gpu_embedding_equals_cpu(void) {
  int batch = 3, context = 9, width = 20, positions = 14;
  uint64_t w = (uint64_t)width, n = (uint64_t)(batch * context) * w, nt = GPT_VOCABULARY * w,
           np = (uint64_t)positions * w;
  int32_t tokens[27];
  for (int i = 0; i < 27; i++) tokens[i] = (int32_t)(check_random(&random_state) % 5) * 63; /* often the same */
  uint16_t *wte = bf16s(nt), *wpe = bf16s(np), *dwte = bf16s(nt), *dwte2 = bf16s(nt), *dwpe = bf16s(np),
           *dwpe2 = bf16s(np);
  float *x = floats(n), *x2 = floats(n), *dx = floats(n), *dw = floats(nt), *dw2 = same(dw, nt * F),
        *workspace = floats(w);
  gpt_embed_t forward = { batch, context, width, positions, tokens, wte, wpe, x };
  gpt_embed_forward(&forward);
  forward.x = x2;
  CHECK(gpt_cuda.embed_forward(&at_once, &forward));
  take(x, x2, n * F, F, "embedding");
  gpt_embed_gradient_t backward = { batch, context, width, positions, tokens, dx, dw, dwte, dwpe, workspace };
  gpt_embed_backward(&backward);
  backward.dwte_f32 = dw2, backward.dwte = dwte2, backward.dwpe = dwpe2;
  CHECK(gpt_cuda.embed_backward(&at_once, &backward));
  take(dw, dw2, nt * F, F, "dwte_f32");
  take(dwte, dwte2, nt * B, B, "dwte");
  take(dwpe, dwpe2, np * B, B, "dwpe");
  free(wte), free(wpe), free(dx), free(workspace);
}

static void test_gpu_adamw_equals_cpu(void) {
  enum { COUNT = 1000 };
  gpt_adamw_t step = { 3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.7f, 3 };
  gpt_adamw_factors_t factors = gpt_adamw_factors(&step);
  uint16_t *g = bf16s(COUNT), *g2 = same(g, COUNT * B);
  float *master = floats(COUNT), *m = floats(COUNT), *v = floats(COUNT);
  for (int i = 0; i < COUNT; i++) v[i] = fabsf(v[i]) * (i % 7 ? 1 : 1e-30f);
  float *master2 = same(master, COUNT * F), *m2 = same(m, COUNT * F), *v2 = same(v, COUNT * F);
  gpt_adamw_range(&factors, COUNT, g, g, master, m, v); /* the parameter in the gradient's place */
  CHECK(gpt_cuda.adamw(&at_once, &(gpt_adamw_span_t){ factors, COUNT, g2, g2, master2, m2, v2 }));
  take(g, g2, COUNT * B, B, "parameter");
  take(master, master2, COUNT * F, F, "master");
  take(m, m2, COUNT * F, F, "momentum");
  take(v, v2, COUNT * F, F, "variance");
}

static void test_gpu_squares_and_store_equal_cpu(void) {
  uint64_t n = 5000;
  float *x = floats(n);
  uint16_t *y = bf16s(n), *y2 = bf16s(n);
  gpt_store(&(gpt_store_t){ n, x, y });
  CHECK(gpt_cuda.store(&at_once, &(gpt_store_t){ n, x, y2 }));
  double of_gpu = gpt_cuda.squares(y, n, 96); /* 53 blocks, the last one smaller */
  CHECK(of_gpu == gpt_cpu.squares(y, n, 96) && of_gpu > 0);
  take(y, y2, n * B, B, "store");
  free(x);
}

/* ---- Whole trainings ---- */

enum { LAYERS = 3, WIDTH = 224, HEADS = 4, CONTEXT = 8, BATCH = 2, STEPS = 5 };

typedef struct training {
  const gpt_operators_t *operators;
  memory_t *memory;
  _Atomic uint64_t device_spans, host_spans;
} training_t;
typedef struct step {
  training_t *training;
  gpt_adamw_factors_t adamw;
} step_t;

static void update_span(void *user, const gemini_update_span_t *span) {
  step_t *s = user;
  training_t *t = s->training;
  void *const *p = span->ptr;
  gpt_adamw_span_t adamw = { s->adamw, span->element_count, p[0], p[1], p[2], p[3], p[4] };
  if (span->tier == GEMINI_TIER_HOST) {
    t->host_spans++;
    CHECK(gpt_cpu.adamw(NULL, &adamw));
    return;
  }
  t->device_spans++;
  CHECK(memory_queue_on(t->memory, span->stream, t->operators->adamw, &adamw, sizeof adamw));
}

typedef struct result {
  uint64_t hash;
  double losses[STEPS], norms[STEPS];
  uint64_t device_spans, host_spans, moved_bytes;
} result_t;

static result_t train(const gpt_operators_t *operators, const gemini_config_t *config) {
  result_t r = { 0 };
  memory_t memory;
  training_t training = { .operators = operators, .memory = &memory };
  const device_t *device = operators->device;
  step_t steps[STEPS];
  model_t model;
  uint64_t random = 5;
  double *losses = device->host_alloc(STEPS * sizeof *losses);
  int32_t *tokens = device->host_alloc(BATCH * (CONTEXT + 1) * sizeof *tokens);
  CHECK(losses != NULL && tokens != NULL);
  memory_open(&memory, device, config, true);
  CHECK(model_open(&model, &memory, operators, &(model_shape_t){ LAYERS, WIDTH, HEADS, CONTEXT }));
  memory_ready(&memory);
  model_initialise(&model, 7);
  for (int i = 0; i < STEPS; i++) {
    for (int k = 0; k < BATCH * (CONTEXT + 1); k++) tokens[k] = (int32_t)(check_random(&random) % 20);
    int skipped = i == 2 ? 1 : -1; /* whose gradients nobody writes */
    memory_iteration_begin(&memory);
    memory_phase(&memory, GEMINI_PHASE_FORWARD);
    model_embed(&model, BATCH, CONTEXT, tokens);
    for (int l = 0; l < LAYERS; l++) l == skipped ? model_block_skip(&model, l) : model_block(&model, l);
    memory_phase(&memory, GEMINI_PHASE_BACKWARD);
    model_head(&model, 1, &losses[i]);
    for (int l = LAYERS - 1; l >= 0; l--) {
      if (l != skipped) model_block_backward(&model, l);
    }
    model_embed_backward(&model);
    r.norms[i] = memory_gradient_norm(&memory, operators->squares);
    gpt_adamw_t adamw_step = { 1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, gpt_clip_scale(r.norms[i], 1), (uint32_t)i + 1 };
    steps[i] = (step_t){ &training, gpt_adamw_factors(&adamw_step) };
    memory_phase(&memory, GEMINI_PHASE_UPDATE);
    memory_update(&memory, &memory_optimizer, 0, 0, update_span, &steps[i]);
    memory_iteration_end(&memory);
    memory_synchronize(&memory);
  }
  memory_update_wait(&memory);
  r.hash = model_hash(&model);
  memcpy(r.losses, losses, sizeof r.losses);
  r.device_spans = training.device_spans;
  r.host_spans = training.host_spans;
  if (config != NULL) {
    figures_t stats = { 0 };
    CHECK_OK(figures_read(memory.manager, &stats));
    CHECK(stats.peak_bytes[0] <= stats.budget_bytes[0]);
    for (int i = 0; i < GEMINI_REASON_COUNT; i++) r.moved_bytes += stats.moved_bytes[LINK_H2D][i];
  }
  if (memory_error(&memory) != NULL) fprintf(stderr, "%s\n", memory_error(&memory));
  CHECK(memory_error(&memory) == NULL);
  memory_close(&memory);
  model_close(&model);
  CHECK(memory_error(&memory) == NULL);
  device->host_free(losses);
  device->host_free(tokens);
  return r;
}

static void check_results(const result_t *a, const result_t *b) {
  for (int i = 0; i < STEPS; i++) {
    CHECK(a->losses[i] == b->losses[i] && a->losses[i] > 0);
    CHECK(a->norms[i] == b->norms[i] && a->norms[i] > 0);
  }
  CHECK_EQ(a->hash, b->hash);
}

static void test_gpu_training_in_plain_memory_equals_cpu(void) {
  result_t cpu = train(&gpt_cpu, NULL);
  uint64_t before = launches;
  result_t gpu = train(&gpt_cuda, NULL);
  CHECK(launches > before + STEPS * 50);
  CHECK_EQ(gpu.device_spans, STEPS);
  check_results(&cpu, &gpu);
}

static void test_gpu_training_under_libgemini_equals_plain_memory(void) {
  result_t plain = train(&gpt_cuda, NULL);
  fake_cuda_reset();
  gmi_cuda_driver_replace(fake_cuda_symbol);
  cu_context_t context; /* as gpu_open() makes it the thread's */
  CHECK_EQ(cuInit(0), CU_SUCCESS);
  CHECK_EQ(cuDevicePrimaryCtxRetain(&context, 0), CU_SUCCESS);
  CHECK_EQ(cuCtxSetCurrent(context), CU_SUCCESS);
  static const struct {
    uint32_t placement;
    uint64_t device_bytes;
  } cases[] = { { GEMINI_PLACEMENT_AUTO, UINT64_C(200) << 20 }, /* all fits */
                { GEMINI_PLACEMENT_AUTO, UINT64_C(20) << 20 },
                { GEMINI_PLACEMENT_CUDA, UINT64_C(20) << 20 },
                { GEMINI_PLACEMENT_CPU, UINT64_C(16) << 20 } };
  uint64_t device_spans = 0, host_spans = 0, moved_bytes = 0;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    gemini_config_t config = GEMINI_CONFIG_INIT;
    config.device = GEMINI_DEVICE_CUDA;
    config.placement = cases[i].placement;
    config.device_bytes = cases[i].device_bytes;
    config.host_bytes = UINT64_C(128) << 20;
    config.chunk_bytes = UINT64_C(2) << 20;
    config.update_threads = 2;
    result_t managed = train(&gpt_cuda, &config);
    check_results(&plain, &managed);
    device_spans += managed.device_spans;
    host_spans += managed.host_spans;
    moved_bytes += managed.moved_bytes;
  }
  CHECK(device_spans > 0 && host_spans > 0 && moved_bytes > 0); /* updates were made on both sides */
  CHECK_EQ(cuCtxSetCurrent(NULL), CU_SUCCESS);
  CHECK_EQ(cuDevicePrimaryCtxRelease_v2(0), CU_SUCCESS);
  CHECK_EQ(fake_cuda_violations(), 0);
  CHECK_EQ(fake_cuda_live(true), 0);
  gmi_cuda_driver_replace(NULL);
}

/* ---- Failures ---- */

static void test_gpu_too_small_for_plain_memory_is_named(void) {
  memory_t memory;
  largest_alloc = 4095;
  memory_open(&memory, &device_cuda, NULL, true);
  memory_register(&memory, "a", 1024); /* 2048 bytes of bf16, 4096 of fp32 */
  memory_ready(&memory);
  CHECK(memory_error(&memory) != NULL);
  CHECK(!strcmp(memory_error(&memory), "out of plain memory of the device cuda for model data: 4096 bytes of 16384"));
  CHECK(memory_alloc(&memory, 16) == NULL);
  memory_close(&memory);
  CHECK(!device_cuda.failed());
  largest_alloc = UINT64_MAX;
}

static void test_gpu_that_breaks_is_seen_by_the_next_wait(void) {
  memory_t memory;
  memory_open(&memory, &device_cuda, NULL, true);
  memory_register(&memory, "a", 1024);
  memory_ready(&memory);
  float *x = memory_alloc(&memory, 1024 * F);
  gpt_zero_t zeros = { x, 1024 * F };
  gpt_gelu_t gelu = { 1024, x, x };
  memory_queue(&memory, gpt_cuda.zero, &zeros, sizeof zeros);
  memory_synchronize(&memory);
  CHECK(memory_error(&memory) == NULL);
  broken = true;
  memory_queue(&memory, gpt_cuda.gelu_forward, &gelu, sizeof gelu);
  uint64_t before = launches;
  memory_queue(&memory, gpt_cuda.gelu_forward, &gelu, sizeof gelu);
  CHECK_EQ(launches, before); /* nothing goes on */
  memory_synchronize(&memory);
  CHECK(memory_error(&memory) != NULL);
  free(x);
  for (int kind = 0; kind < MEMORY_KINDS; kind++) free(memory.plain[kind]); /* which a broken GPU keeps */
  memory_close(&memory);
  broken = false;
  device_cuda_close();
  CHECK(device_cuda_open((gpu_t *)(uintptr_t)&at_once) && gpt_cuda_open());
}

int main(void) {
  gpt_setup();
  CHECK(device_cuda_open((gpu_t *)(uintptr_t)&at_once) && gpt_cuda_open());
  random_state = 11;
  for (int pass = 0; pass < 2; pass++, backwards = pass == 1) {
    RUN(test_gpu_norm_equals_cpu);
    RUN(test_gpu_linear_equals_cpu);
    RUN(test_gpu_attention_equals_cpu);
    RUN(test_gpu_gelu_equals_cpu);
    RUN(test_gpu_loss_equals_cpu);
    RUN(test_gpu_embedding_equals_cpu);
    RUN(test_gpu_adamw_equals_cpu);
    RUN(test_gpu_squares_and_store_equal_cpu);
  }
  RUN(test_gpu_training_in_plain_memory_equals_cpu);
  RUN(test_gpu_training_under_libgemini_equals_plain_memory);
  RUN(test_gpu_too_small_for_plain_memory_is_named);
  RUN(test_gpu_that_breaks_is_seen_by_the_next_wait);
  device_cuda_close();
  return check_done();
}
