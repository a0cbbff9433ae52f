/* Training over a group of ranks, against a model that every rank computes by itself. Only public headers.
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef GROUP_WORLD_H
#define GROUP_WORLD_H

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "gemini/group.h"
#include "world.h"

#define DEVICE GEMINI_TIER_DEVICE
#define HOST GEMINI_TIER_HOST
enum { LAYERS = 7, RANKS_MOST = 4, ELEMENTS_MOST = 1 << 20 };

typedef struct {
  uint32_t ranks, stage, element_bytes; /* 4: float; 2: bfloat16 */
  uint64_t device_chunks, host_chunks, file_chunks;
  bool unused;            /* some layers get no gradient on some ranks */
  bool wait;              /* a gradient is never READY_FOR_REDUCE: the update adds it */
  uint32_t micro_batches; /* of a step, whose gradients have bytes of their own; 0: they reuse those of parameters */
  bool parts;             /* of the one micro-batch: updated in the backward pass, by parts that differ between ranks */
  uint32_t device, ordinal; /* GEMINI_DEVICE_* */
  uint32_t placement;       /* GEMINI_PLACEMENT_*, where a test depends on it */
  /* Copies to or from device memory behind the work of the native stream, and blocks; for GPUs, whose memory functions
   * of the host cannot access. NULL: they can. */
  void (*copy)(uint32_t ordinal, void *native, void *to, const void *from, uint64_t bytes, bool to_device);
  uint64_t scale, layers; /* chunks, and tensors, are so much larger; 0: 1 */
  bool alone;             /* ranks is 1, and there is no group */
  uint32_t replicas;      /* hybrid sharding: of ranks / replicas ranks each; 0: 1 */
  uint32_t bucket;        /* chunks whose gradients are added together; 0: 1 */
} shape_t;
/* The ranks of a replica. */
OWN_MEMORY static inline uint32_t shard_ranks(const shape_t *shape) {
  return shape->replicas ? shape->ranks / shape->replicas : shape->ranks;
}
static inline uint64_t scale_of(const shape_t *shape) { return shape->scale ? shape->scale : 1; }
static inline uint64_t chunk_of(const shape_t *shape) { return scale_of(shape) * WORLD_CHUNK; }
/* As the library has it: more than 16 are as many, and one rank has nobody to add with. */
static inline uint32_t bucket_of(const shape_t *shape) {
  const uint32_t chunks = shape->bucket < 16 ? shape->bucket : 16;
  return shard_ranks(shape) == 1 || !chunks ? 1 : chunks;
}
/* Planned from the second on. Under sanitizers those are left out that run no code that the ones before do not. */
static inline uint32_t steps_of(const shape_t *shape) {
  if (!SANITIZED) return 6;
  return shape->micro_batches ? 4 : 3;
}

/* ---- values */
OWN_MEMORY static inline uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) ^ b * UINT64_C(0xd1342543de82ef95) ^ c * UINT64_C(0xa0761d6478bd642f);
  x ^= x >> 32;
  x *= UINT64_C(0xe7037ed1a0b428db);
  return x ^ x >> 29;
}
OWN_MEMORY static inline float small_value(uint64_t a, uint64_t b, uint64_t c) { /* -1 to 1 */
  return (float)(int32_t)(mix(a, b, c) >> 40) / (float)(1 << 23) - 1.0F;
}
OWN_MEMORY static inline float bf16_get(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
OWN_MEMORY static inline uint16_t bf16_of(float value) { /* to nearest, ties to even; no NaN occurs */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
OWN_MEMORY static inline void put_value(void *at, uint64_t i, uint32_t element_bytes, float value) {
  if (element_bytes == 4) ((float *)at)[i] = value;
  else ((uint16_t *)at)[i] = bf16_of(value);
}
OWN_MEMORY static void put_values(void *to, const float *values, uint64_t count, uint32_t element_bytes) {
  for (uint64_t i = 0; i < count; i++) put_value(to, i, element_bytes, values[i]);
}
OWN_MEMORY static inline float get_value(const void *at, uint64_t i, uint32_t element_bytes) {
  return element_bytes == 4 ? ((const float *)at)[i] : bf16_get(((const uint16_t *)at)[i]);
}
OWN_MEMORY static inline float sgd(float *momentum, float *master, float gradient) {
  *momentum = 0.875F * *momentum + gradient;
  *master -= 0.03125F * *momentum;
  return *master;
}

/* ---- a rank */
/* The model: what all ranks together must have. */
typedef struct {
  uint64_t first[LAYERS + 1], elements[LAYERS]; /* in the arena */
  float *param, *momentum, *master, *gradient;  /* by element of the arena; gradient: what the slices hold */
  float *local[RANKS_MOST];                     /* gradients of each rank that have not been added */
  bool written, summed; /* a gradient has not been added; gradients are added to those of earlier micro-batches */
  uint32_t rounds;      /* how often all chunks of gradients were added */
} model_t;

typedef struct {
  shape_t shape;
  uint32_t rank;
  world_t w;
  gemini_group_t group;
  gemini_arena_t params, grads, masters, momenta;
  gemini_tensor_t param[LAYERS], grad[LAYERS];
  model_t model;
  _Atomic uint64_t wrong, updated; /* values that differ from the model; elements updated */
  _Atomic uint64_t wrong_on_host;  /* of gradients that an update on the host was given */
} rank_t;

/* A gradient depends on its parameter, so that a wrong one spreads. */
OWN_MEMORY static inline float gradient_of(const rank_t *k, uint32_t rank, uint32_t step, uint64_t i, float param) {
  (void)k;
  return small_value(i, rank + 1, step + 1) + 0.0625F * param;
}
OWN_MEMORY static inline bool has_sums(const rank_t *k) { return k->shape.micro_batches; }
/* Steps and micro-batches have numbers of their own in gradient_of() and is_used(). */
static uint32_t batch_number(uint32_t step, uint32_t micro_batch) { return step + 100 * micro_batch; }
OWN_MEMORY static inline bool is_used(const rank_t *k, uint32_t rank, uint32_t step, uint32_t layer) {
  if (!k->shape.unused) return true;
  return layer != 3 && (layer + rank + step) % 4 != 0; /* layer 3: by no rank */
}

/* What queued functions get. */
typedef struct {
  rank_t *k;
  uint32_t layer, step;
  const void *param;
  void *grad;
} call_t;
/* Memory for a moment, which a thread uses again and again: of fresh memory a sanitizer has to map the shadow each time,
 * which takes longer than what the test does there. */
typedef struct {
  void *at;
  uint64_t bytes;
  bool taken;
} buffer_t;
typedef struct {
  buffer_t all[4]; /* so many are taken at once */
} buffers_t;
static pthread_key_t buffers_key;
static pthread_once_t buffers_once = PTHREAD_ONCE_INIT;
static void buffers_free(void *user) {
  buffers_t *b = user;
  for (size_t i = 0; i < sizeof b->all / sizeof *b->all; i++) free(b->all[i].at);
  free(b);
}
static void buffers_begin(void) { CHECK(!pthread_key_create(&buffers_key, buffers_free)); }
static void *buffer_take(uint64_t bytes) {
  CHECK(!pthread_once(&buffers_once, buffers_begin));
  buffers_t *b = pthread_getspecific(buffers_key);
  if (!b) {
    b = calloc(1, sizeof *b);
    CHECK(b && !pthread_setspecific(buffers_key, b));
  }
  buffer_t *free_one = b->all;
  while (free_one->taken) CHECK(++free_one < b->all + sizeof b->all / sizeof *b->all);
  if (free_one->bytes < bytes) {
    free(free_one->at);
    free_one->at = malloc(bytes);
    free_one->bytes = bytes;
  }
  free_one->taken = true;
  return free_one->at;
}
/* By the thread that took it. */
static void buffer_give_back(const void *at) {
  buffer_t *one = ((buffers_t *)pthread_getspecific(buffers_key))->all;
  while (one->at != at) one++;
  CHECK(one->taken);
  one->taken = false;
}
/* The library's bytes, copied into a buffer. */
static void *copied(const void *from, uint64_t bytes) {
  void *here = buffer_take(bytes);
  memcpy(here, from, bytes);
  return here;
}
OWN_MEMORY static uint64_t count_wrong(const void *values, const float *expected, uint64_t count,
                                       uint32_t element_bytes) {
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < count; i++) wrong += get_value(values, i, element_bytes) != expected[i];
  return wrong;
}
static void forward(void *user) {
  call_t *c = user;
  const model_t *model = &c->k->model;
  const uint64_t count = model->elements[c->layer];
  const uint32_t bytes = c->k->shape.element_bytes;
  void *param = copied(c->param, count * bytes);
  uint64_t wrong = count_wrong(param, model->param + model->first[c->layer], count, bytes);
  if (wrong) atomic_fetch_add(&c->k->wrong, wrong);
  buffer_give_back(param);
  free(c);
}
OWN_MEMORY static void make_gradient(const call_t *c, void *grad, bool adds) {
  const uint64_t first = c->k->model.first[c->layer];
  const uint32_t bytes = c->k->shape.element_bytes;
  for (uint64_t i = 0; i < c->k->model.elements[c->layer]; i++) {
    float own[1];
    put_value(own, 0, bytes, gradient_of(c->k, c->k->rank, c->step, first + i, c->k->model.param[first + i]));
    put_value(grad, i, bytes, (adds ? get_value(grad, i, bytes) : 0) + get_value(own, 0, bytes));
  }
}
static void run_backward(call_t *c, bool adds) {
  const uint64_t size = c->k->model.elements[c->layer] * c->k->shape.element_bytes;
  void *grad = adds ? copied(c->grad, size) : buffer_take(size);
  make_gradient(c, grad, adds);
  memcpy(c->grad, grad, size);
  buffer_give_back(grad);
  free(c);
}
static void backward(void *user) { run_backward(user, false); } /* the gradient takes its parameter's bytes */
static void backward_adds(void *user) { run_backward(user, true); }
static void copy_by(const rank_t *k, gemini_stream_t stream, void *to, const void *from, uint64_t bytes,
                    bool to_device) {
  void *native;
  CHECK_OK(gemini_stream_native(k->w.mgr, stream, &native));
  k->shape.copy(k->shape.ordinal, native, to, from, bytes, to_device);
}
static call_t *call_of(rank_t *k, uint32_t layer, uint32_t step, const gemini_access_t *uses) {
  call_t *c = malloc(sizeof *c);
  *c = (call_t){ k, layer, step, uses[0].ptr, uses[0].ptr };
  return c;
}

/* Queues forward() or backward() on what was acquired, or does it at once. */
static void compute(rank_t *k, uint32_t layer, uint32_t step, const gemini_access_t *use, void (*work)(void *user)) {
  call_t *c = call_of(k, layer, step, use);
  const uint64_t bytes = k->model.elements[layer] * k->shape.element_bytes;
  if (!k->shape.copy) {
    CHECK_OK(gemini_stream_call(k->w.mgr, k->w.stream, work, c));
    return;
  }
  void *here = malloc(bytes);
  c->param = c->grad = here;
  if (use->mode & GEMINI_READ) copy_by(k, k->w.stream, here, use->ptr, bytes, false);
  work(c);
  if (use->mode & GEMINI_WRITE) copy_by(k, k->w.stream, use->ptr, here, bytes, true);
  free(here);
}

OWN_MEMORY static void sgd_all(void *const values[4], uint64_t count, uint32_t bytes) {
  for (uint64_t i = 0; i < count; i++)
    put_value(values[0], i, bytes, sgd((float *)values[3] + i, (float *)values[2] + i, get_value(values[1], i, bytes)));
}
static void update_span(void *user, const gemini_update_span_t *span) {
  rank_t *k = user;
  const uint64_t bytes = k->shape.element_bytes, count = span->element_count;
  void *values[4];
  for (int i = 0; i < 4; i++)
    values[i] = i ? copied(span->ptr[i], count * (i < 2 ? bytes : 4)) : buffer_take(count * bytes);
  const uint64_t wrong = count_wrong(values[1], k->model.gradient + span->first_element, count, k->shape.element_bytes);
  sgd_all(values, count, k->shape.element_bytes);
  for (int i = 0; i < 4; i++) {
    if (i != 1) memcpy(span->ptr[i], values[i], count * (i < 2 ? bytes : 4));
    buffer_give_back(values[i]);
  }
  if (wrong) atomic_fetch_add(&k->wrong, wrong);
  if (wrong && span->tier == HOST) atomic_fetch_add(&k->wrong_on_host, wrong);
  atomic_fetch_add(&k->updated, span->element_count);
}
/* On the device the span is computed by a function in the stream's order. */
typedef struct {
  rank_t *k;
  gemini_update_span_t span;
} device_span_t;
static void queued_span(void *user) {
  device_span_t *d = user;
  update_span(d->k, &d->span);
  free(d);
}
static void any_span(void *user, const gemini_update_span_t *span) {
  rank_t *k = user;
  if (span->tier == HOST) {
    update_span(user, span);
    return;
  }
  if (k->shape.copy) {
    gemini_update_span_t here = *span;
    for (int i = 0; i < 4; i++) {
      const uint64_t bytes = span->element_count * (i < 2 ? k->shape.element_bytes : 4);
      here.ptr[i] = malloc(bytes);
      copy_by(k, span->stream, here.ptr[i], span->ptr[i], bytes, false);
    }
    update_span(k, &here);
    for (int i = 0; i < 4; i++) {
      const uint64_t bytes = span->element_count * (i < 2 ? k->shape.element_bytes : 4);
      if (i != 1) copy_by(k, span->stream, span->ptr[i], here.ptr[i], bytes, true);
      free(here.ptr[i]);
    }
    return;
  }
  device_span_t *d = malloc(sizeof *d);
  *d = (device_span_t){ k, *span };
  CHECK_OK(gemini_stream_call(k->w.mgr, span->stream, queued_span, d));
}

OWN_MEMORY static inline float rounded(const rank_t *k, float value) {
  float own[1];
  put_value(own, 0, k->shape.element_bytes, value);
  return get_value(own, 0, k->shape.element_bytes);
}
/* Each rank's gradients of one micro-batch, added to those that it has. */
OWN_MEMORY static void model_backward(rank_t *k, uint32_t step) {
  model_t *model = &k->model;
  for (uint32_t r = 0; r < k->shape.ranks; r++)
    for (uint32_t layer = 0; layer < LAYERS; layer++)
      for (uint64_t n = 0, i = model->first[layer]; is_used(k, r, step, layer) && n < model->elements[layer]; n++, i++)
        model->local[r][i] = rounded(k, model->local[r][i] + rounded(k, gradient_of(k, r, step, i, model->param[i])));
  model->written = true;
}
/* The sum of an element's gradients in a replica, in the order of ranks. */
OWN_MEMORY static inline float model_sum(const rank_t *k, uint32_t first, uint64_t i) {
  float sum = k->model.local[first][i];
  for (uint32_t r = first + 1; r < first + shard_ranks(&k->shape); r++) sum += k->model.local[r][i];
  return rounded(k, sum);
}
/* The sums of all ranks' gradients, in the order of replicas, added to those of earlier micro-batches. */
OWN_MEMORY static void model_reduce(rank_t *k) {
  model_t *model = &k->model;
  if (!model->written) return;
  for (uint64_t i = 0; i < model->first[LAYERS]; i++) {
    float sum = model_sum(k, 0, i);
    for (uint32_t r = shard_ranks(&k->shape); r < k->shape.ranks; r += shard_ranks(&k->shape))
      sum += model_sum(k, r, i);
    for (uint32_t r = 0; r < k->shape.ranks; r++) model->local[r][i] = 0;
    model->gradient[i] = model->summed ? rounded(k, model->gradient[i] + rounded(k, sum)) : rounded(k, sum);
  }
  model->summed = has_sums(k);
  model->written = false;
  model->rounds++;
}
OWN_MEMORY static void model_zero(rank_t *k, uint64_t first, uint64_t count) {
  for (uint64_t i = first; i < first + count; i++) {
    k->model.gradient[i] = 0;
    for (uint32_t r = 0; r < k->shape.ranks; r++) k->model.local[r][i] = 0;
  }
}
OWN_MEMORY static double model_norm(const rank_t *k) {
  double squares = 0;
  for (uint64_t i = 0; i < k->model.first[LAYERS]; i++)
    squares += (double)k->model.gradient[i] * (double)k->model.gradient[i];
  return sqrt(squares);
}
OWN_MEMORY static void model_update(rank_t *k) {
  model_t *model = &k->model;
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    for (uint64_t i = model->first[layer]; i < model->first[layer] + model->elements[layer]; i++) {
      model->param[i] = rounded(k, sgd(&model->momentum[i], &model->master[i], model->gradient[i]));
    }
  }
  model->summed = false;
}

static void open_arenas(rank_t *k, gemini_group_t group) {
  static const uint64_t sizes[LAYERS] = { 70001, 333, 16384, 40000, 1, 99999, 25003 };
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.element_bytes = k->shape.element_bytes;
  c.group = group;
  c.zero_stage = group ? k->shape.stage : 0;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &k->params));
  c.group = NULL;
  c.zero_stage = 0;
  c.kind = GEMINI_KIND_GRAD;
  if (has_sums(k)) c.like = k->params;
  else c.reuse = k->params;
  c.dtype = group && k->shape.element_bytes == 2 ? GEMINI_DTYPE_BF16 : GEMINI_DTYPE_F32;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &k->grads));
  c.reuse = NULL;
  c.dtype = 0;
  c.like = k->params;
  c.element_bytes = 4;
  c.kind = GEMINI_KIND_MASTER;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &k->masters));
  c.kind = GEMINI_KIND_MOMENTUM;
  CHECK_OK(gemini_arena_create(k->w.mgr, &c, &k->momenta));
  uint64_t end = 0;
  for (uint32_t i = 0; i < LAYERS; i++) {
    char name[16];
    snprintf(name, sizeof name, "layer %u", i);
    const uint64_t size = sizes[i] * (k->shape.layers ? k->shape.layers : 1);
    k->model.elements[i] = size;
    k->param[i] = world_tensor(&k->w, k->params, name, size * k->shape.element_bytes);
    CHECK_OK(gemini_tensor_counterpart(k->w.mgr, k->param[i], k->grads, &k->grad[i]));
    k->model.first[i] = world_tensor_info(&k->w, k->param[i]).offset_bytes / k->shape.element_bytes;
    end = k->model.first[i] + size;
  }
  k->model.first[LAYERS] = end;
  k->model.param = calloc(end, sizeof(float));
  k->model.momentum = calloc(end, sizeof(float));
  k->model.master = calloc(end, sizeof(float));
  k->model.gradient = calloc(end, sizeof(float));
  for (uint32_t r = 0; r < k->shape.ranks; r++) k->model.local[r] = calloc(end, sizeof(float));
}

/* Gives parameters and masters their first values: parameters on the device, as a framework does, or from a file;
 * masters on the host, slice by slice. */
static void fill_params(rank_t *k, uint32_t layer, bool from_file) {
  uint32_t bytes = k->shape.element_bytes;
  uint64_t first = k->model.first[layer], count = k->model.elements[layer];
  void *values = malloc(count * bytes);
  put_values(values, k->model.param + first, count, bytes);
  gemini_access_t use = world_whole(k->param[layer], GEMINI_WRITE, DEVICE);
  if (from_file) {
    int fd = memfd_create("parameters", MFD_CLOEXEC);
    CHECK_EQ(pwrite(fd, values, count * bytes, 100), (ssize_t)(count * bytes));
    CHECK_OK(gemini_load(k->w.mgr, &use, fd, 100));
    close(fd);
  } else {
    CHECK_OK(gemini_acquire(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
    if (k->shape.copy) copy_by(k, k->w.stream, use.ptr, values, count * bytes, true);
    else memcpy(use.ptr, values, count * bytes);
    CHECK_OK(gemini_release(k->w.mgr, &use, 1, GEMINI_STREAM_CALLER));
  }
  free(values);
}
static void fill_masters(rank_t *k, uint32_t layer) {
  gemini_tensor_t master;
  CHECK_OK(gemini_tensor_counterpart(k->w.mgr, k->param[layer], k->masters, &master));
  gemini_access_t all = world_whole(master, GEMINI_WRITE, HOST);
  uint64_t offset = 0, size, next = 0;
  for (;;) {
    CHECK_OK(gemini_slice_next(k->w.mgr, &all, next, &offset, &size));
    if (!size) break;
    CHECK(offset >= next && size % 4 == 0 && offset % 4 == 0);
    next = offset + size;
    gemini_access_t slice = world_part(master, offset, size, GEMINI_WRITE, HOST);
    CHECK_OK(gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
    memcpy(slice.ptr, k->model.master + k->model.first[layer] + offset / 4, size);
    CHECK_OK(gemini_release(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_EQ(offset, k->model.elements[layer] * 4);
}

/* The first values. */
OWN_MEMORY static void model_begin(rank_t *k) {
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    for (uint64_t i = k->model.first[layer]; i < k->model.first[layer] + k->model.elements[layer]; i++) {
      k->model.master[i] = small_value(i, 0, 7);
      k->model.param[i] = rounded(k, k->model.master[i]);
    }
  }
}
/* group: what to join, without ranks. Nothing has values yet; the model has the first ones. */
static void rank_begin(rank_t *k, const shape_t *shape, uint32_t rank, gemini_group_config_t group) {
  *k = (rank_t){ .shape = *shape, .rank = rank };
  const uint64_t scale = scale_of(shape);
  gemini_config_t c =
      world_config(shape->device_chunks * scale, shape->host_chunks * scale, shape->file_chunks * scale);
  c.chunk_bytes = chunk_of(shape);
  c.device = shape->device;
  if (shape->placement) c.placement = shape->placement;
  c.device_ordinal = shape->ordinal;
  k->w = world_open(c);
  group.rank = rank;
  group.ranks = shape->ranks;
  group.shard_ranks = shape->replicas ? shard_ranks(shape) : 0;
  group.bucket_bytes = shape->bucket * chunk_of(shape) + chunk_of(shape) / 2; /* what is over makes no difference */
  if (!shape->alone) CHECK_OK(gemini_group_open(k->w.mgr, &group, &k->group));
  open_arenas(k, k->group);
  model_begin(k);
}
static void rank_open(rank_t *k, const shape_t *shape, uint32_t rank, gemini_group_config_t group) {
  rank_begin(k, shape, rank, group);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    fill_params(k, layer, layer & 1);
    fill_masters(k, layer);
  }
}

static void model_free(rank_t *k) {
  free(k->model.param);
  free(k->model.momentum);
  free(k->model.master);
  free(k->model.gradient);
  for (uint32_t r = 0; r < k->shape.ranks; r++) free(k->model.local[r]);
}
static void rank_close(rank_t *k) {
  world_close(&k->w);
  model_free(k);
}

/* Rank 0 alone adds to a gradient and does not make it ready, in the operator in which the last one was. */
enum { LATE_BATCH = 2, LATE_LAYER = 1, LATE_NUMBER = 77 };
static gemini_status_t late_gradient(rank_t *k) {
  gemini_access_t use = world_whole(k->grad[LATE_LAYER], GEMINI_READ_WRITE, DEVICE);
  if (k->rank) return GEMINI_OK;
  gemini_status_t status = gemini_acquire(k->w.mgr, &use, 1, k->w.stream);
  if (status) return status;
  compute(k, LATE_LAYER, LATE_NUMBER, &use, backward_adds);
  return gemini_release(k->w.mgr, &use, 1, k->w.stream);
}
OWN_MEMORY static void model_late(rank_t *k) {
  model_t *model = &k->model;
  for (uint64_t n = 0, i = model->first[LATE_LAYER]; n < model->elements[LATE_LAYER]; n++, i++)
    model->local[0][i] =
        rounded(k, model->local[0][i] + rounded(k, gradient_of(k, 0, LATE_NUMBER, i, model->param[i])));
  model->written = true;
}
static gemini_status_t op(rank_t *k, uint32_t step, uint32_t layer, bool back) {
  char name[32];
  snprintf(name, sizeof name, "%s %u", back ? "backward" : "forward", layer);
  gemini_status_t status = gemini_op_begin(k->w.mgr, name, k->w.stream);
  if (status) return status;
  gemini_access_t use = world_whole(k->param[layer], GEMINI_READ, DEVICE);
  status = gemini_acquire(k->w.mgr, &use, 1, k->w.stream);
  if (!status) compute(k, layer, step, &use, forward);
  if (!status) status = gemini_release(k->w.mgr, &use, 1, k->w.stream);
  if (!status && back && is_used(k, k->rank, step, layer)) {
    /* What has been added is zero again: then it is the same whether an operator writes a gradient or adds to it. */
    const bool adds = has_sums(k) && (k->shape.stage == GEMINI_ZERO_STATES || (step + layer) & 1);
    use = world_whole(k->grad[layer], adds ? GEMINI_READ_WRITE : GEMINI_WRITE, DEVICE);
    status = gemini_acquire(k->w.mgr, &use, 1, k->w.stream);
    if (!status) compute(k, layer, step, &use, adds ? backward_adds : backward);
    if (!status) status = gemini_release(k->w.mgr, &use, 1, k->w.stream);
  }
  /* Also for a layer that this rank does not use: its gradient is zero. */
  const uint32_t state = world_tensor_info(&k->w, k->grad[layer]).state;
  if (!status && back && state == GEMINI_STATE_FREE)
    status = gemini_tensor_state_set(k->w.mgr, k->grad[layer], GEMINI_STATE_HOLD);
  if (!status && back && !(k->shape.wait && layer == 2) && state != GEMINI_STATE_READY_FOR_REDUCE)
    status = gemini_tensor_state_set(k->w.mgr, k->grad[layer], GEMINI_STATE_READY_FOR_REDUCE);
  if (!status && back && has_sums(k) && !k->shape.parts && step == LATE_BATCH && !layer) status = late_gradient(k);
  gemini_status_t ended = gemini_op_end(k->w.mgr);
  return status ? status : ended;
}

/* Updates parameters from gradients and, with arena_count 4, states. */
static gemini_status_t update(rank_t *k, uint32_t arena_count, gemini_update_fn fn) {
  const gemini_arena_t arenas[] = { k->params, k->grads, k->masters, k->momenta };
  const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = arena_count;
  u.stream = k->w.stream;
  u.fn = fn;
  u.user = k;
  return gemini_update(k->w.mgr, &u);
}

/* Updates elements [first, end) with all states, late. */
static gemini_status_t update_part(rank_t *k, uint64_t first, uint64_t end) {
  const gemini_arena_t arenas[] = { k->params, k->grads, k->masters, k->momenta };
  const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE | GEMINI_UPDATE_PART;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 4;
  u.first_element = first;
  u.element_count = end - first;
  u.stream = k->w.stream;
  u.fn = any_span;
  u.user = k;
  return gemini_update(k->w.mgr, &u);
}
/* What must not be done between a part and the last one, if it is the one that ended at the arena's end. */
static void check_part_refusals(rank_t *k, uint64_t first) {
  const gemini_manager_t mgr = k->w.mgr;
  const uint64_t chunk = chunk_of(&k->shape) / k->shape.element_bytes, bucket = bucket_of(&k->shape) * chunk;
  uint64_t offset;
  gemini_access_t use = world_whole(k->param[LAYERS - 1], GEMINI_READ, DEVICE), all = world_whole(k->grads, 0, 0);
  CHECK_STATUS(gemini_acquire(mgr, &use, 1, k->w.stream), GEMINI_ERR_STATE);
  use = world_whole(k->grad[LAYERS - 1], GEMINI_READ_WRITE, DEVICE);
  CHECK_STATUS(gemini_acquire(mgr, &use, 1, k->w.stream), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_zero(mgr, &all), GEMINI_ERR_STATE);
  CHECK_STATUS(gemini_arena_take(mgr, k->params, 4096, &offset), GEMINI_ERR_STATE);
  CHECK_STATUS(update(k, 4, any_span), GEMINI_ERR_STATE);
  CHECK_STATUS(update_part(k, first, k->model.first[LAYERS]), GEMINI_ERR_INVALID); /* a second time */
  CHECK_STATUS(update_part(k, first - chunk / 2, first), GEMINI_ERR_INVALID);
  if (bucket_of(&k->shape) > 1) CHECK_STATUS(update_part(k, first - chunk, first), GEMINI_ERR_INVALID);
  CHECK_STATUS(update_part(k, first - 2 * bucket, first - bucket), GEMINI_ERR_INVALID);
}
/* The backward pass of the model comes first, as spans compare what they get with it. */
static gemini_status_t backward_with_parts(rank_t *k, uint32_t number) {
  const uint64_t bucket = bucket_of(&k->shape) * chunk_of(&k->shape) / k->shape.element_bytes;
  uint64_t end = k->model.first[LAYERS];
  gemini_status_t status = GEMINI_OK;
  model_backward(k, number);
  model_reduce(k);
  for (uint32_t layer = LAYERS; !status && layer-- > 0;) {
    uint64_t first = (k->model.first[layer] + bucket - 1) / bucket * bucket, offset;
    status = op(k, number, layer, true);
    if (!status && !layer && end > bucket && !(k->rank & 1)) { /* where all are READY_FOR_REDUCE: when all are added */
      status = update_part(k, bucket, end);
      end = bucket;
      CHECK_STATUS(gemini_arena_take(k->w.mgr, k->params, 4096, &offset), GEMINI_ERR_STATE);
    }
    if (status || first >= end || (layer && (layer + k->rank) % 3 == 0)) continue;
    const bool refusals = number == 1 && end == k->model.first[LAYERS] && first > 2 * bucket;
    status = update_part(k, first, end);
    if (!status && refusals) check_part_refusals(k, first);
    end = first;
  }
  return status;
}

/* Forward and backward. */
static gemini_status_t micro_batch(rank_t *k, uint32_t number) {
  gemini_manager_t mgr = k->w.mgr;
  gemini_status_t status = gemini_phase_set(mgr, GEMINI_PHASE_FORWARD);
  for (uint32_t layer = 0; !status && layer < LAYERS; layer++) status = op(k, number, layer, false);
  if (!status) status = gemini_phase_set(mgr, GEMINI_PHASE_BACKWARD);
  if (!status && k->shape.parts) return backward_with_parts(k, number);
  for (uint32_t layer = LAYERS; !status && layer-- > 0;) status = op(k, number, layer, true);
  if (!status) status = gemini_stream_synchronize(mgr, k->w.stream); /* the model changes below */
  if (status) return status;
  model_backward(k, number);
  if (k->shape.stage != GEMINI_ZERO_STATES && !k->shape.wait) model_reduce(k);
  if (has_sums(k) && number == LATE_BATCH) model_late(k);
  return GEMINI_OK;
}
static gemini_status_t check_norm(rank_t *k) {
  double norm;
  model_reduce(k);
  double expected = model_norm(k);
  gemini_access_t all = world_whole(k->grads, GEMINI_READ, DEVICE);
  gemini_status_t status = gemini_norm(
      k->w.mgr, &all, k->shape.element_bytes == 4 ? GEMINI_DTYPE_F32 : GEMINI_DTYPE_BF16, k->w.stream, &norm);
  if (status) return status;
  CHECK(fabs(norm - expected) <= 1e-12 * expected);
  if (k->group) { /* the same bits on all ranks */
    double norms[RANKS_MOST];
    status = gemini_group_exchange(k->w.mgr, k->group, &norm, sizeof norm, norms);
    if (status) return status;
    for (uint32_t r = 0; r < k->shape.ranks; r++) CHECK(!memcmp(&norms[r], &norm, sizeof norm));
  }
  return GEMINI_OK;
}
/* A norm that fails on one rank once the ranks have agreed on a round can be called again there, and only there. */
static gemini_status_t check_norm_again(rank_t *k) {
  if (k->rank) return check_norm(k);
  const uint64_t bytes = k->shape.element_bytes, first = k->model.first[LAYERS - 1] * bytes;
  gemini_access_t layer = world_part(k->grads, first, k->model.elements[LAYERS - 1] * bytes, GEMINI_READ, HOST);
  uint64_t offset, size;
  double norm;
  CHECK_OK(gemini_slice_next(k->w.mgr, &layer, first, &offset, &size));
  if (!size) return check_norm(k); /* all of the layer is other ranks': nothing of it can be acquired here */
  gemini_access_t slice = world_part(k->grads, offset, size, GEMINI_READ, HOST);
  gemini_status_t status = gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER);
  if (status) return status;
  CHECK_STATUS(gemini_norm(k->w.mgr, &layer, bytes == 4 ? GEMINI_DTYPE_F32 : GEMINI_DTYPE_BF16, k->w.stream, &norm),
               GEMINI_ERR_BUSY);
  CHECK_OK(gemini_release(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
  return check_norm(k);
}
/* all: of the arena; the next sums replace what it holds. */
static void zero_gradients(rank_t *k, gemini_tensor_t grad, uint64_t first, uint64_t count, bool all) {
  gemini_access_t range = all ? world_whole(k->grads, 0, 0) : world_whole(grad, 0, 0);
  CHECK_OK(gemini_zero(k->w.mgr, &range));
  model_zero(k, first, count);
  if (all) k->model.summed = false;
}
/* After an update the slices hold the sums that it took. */
static void check_slices(rank_t *k) {
  uint32_t bytes = k->shape.element_bytes;
  uint64_t offset, size, wrong = 0;
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    gemini_access_t all = world_whole(k->grad[layer], GEMINI_READ, HOST);
    for (uint64_t next = 0;; next = offset + size) {
      CHECK_OK(gemini_slice_next(k->w.mgr, &all, next, &offset, &size));
      if (!size) break;
      gemini_access_t slice = world_part(k->grad[layer], offset, size, GEMINI_READ, HOST);
      CHECK_OK(gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
      void *values = copied(slice.ptr, size);
      wrong += count_wrong(values, k->model.gradient + k->model.first[layer] + offset / bytes, size / bytes, bytes);
      buffer_give_back(values);
      CHECK_OK(gemini_release(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
    }
  }
  CHECK_EQ(wrong, 0);
}

/* One step; the first failure ends it. */
static gemini_status_t step(rank_t *k, uint32_t n, bool with_norm) {
  gemini_manager_t mgr = k->w.mgr;
  const bool extras = has_sums(k) && !k->shape.parts;
  gemini_status_t status = gemini_iteration_begin(mgr);
  if (!status && extras && n == 3) { /* a micro-batch that is given up, after a part of it was */
    status = micro_batch(k, batch_number(n, 9));
    if (!status) zero_gradients(k, k->grad[4], k->model.first[4], k->model.elements[4], false);
    if (!status) status = check_norm(k);
    if (!status) status = micro_batch(k, batch_number(n, 8));
    if (!status) zero_gradients(k, NULL, 0, k->model.first[LAYERS], true);
  }
  for (uint32_t i = 0; !status && i < (has_sums(k) ? k->shape.micro_batches : 1); i++) {
    status = micro_batch(k, batch_number(n, i));
    if (!status && extras && (n + i) % 3 == 1) status = check_norm(k);
    if (!status && extras && n == LATE_BATCH && !i && k->shape.stage != GEMINI_ZERO_STATES)
      status = check_norm_again(k);
    if (!status && extras && n == 4 && !i)
      zero_gradients(k, k->grad[5], k->model.first[5], k->model.elements[5], false);
  }
  if (!status && with_norm) status = check_norm(k);
  if (status) return status;
  model_reduce(k);
  status = gemini_phase_set(mgr, GEMINI_PHASE_UPDATE);
  if (!status) status = k->shape.parts ? gemini_update_wait(mgr) : update(k, 4, any_span);
  if (!status) status = gemini_iteration_end(mgr);
  if (!status) model_update(k);
  if (!status && has_sums(k)) check_slices(k);
  if (!status && has_sums(k) && n == 1) status = check_norm(k); /* of what the update has left */
  return status;
}

/* Every rank writes its slices of every tensor to one file: the file must hold the model. */
static void check_stored(rank_t *k, int fd) {
  uint32_t bytes = k->shape.element_bytes;
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    gemini_access_t all = world_whole(k->param[layer], GEMINI_READ, HOST);
    CHECK_OK(gemini_store(k->w.mgr, &all, fd, k->model.first[layer] * bytes));
  }
  uint8_t here = 1, there[RANKS_MOST];
  CHECK_OK(gemini_group_exchange(k->w.mgr, k->group, &here, 1, there)); /* all have written */
  uint64_t count = k->model.first[LAYERS];
  char *stored = malloc(count * bytes);
  CHECK_EQ(pread(fd, stored, count * bytes, 0), (ssize_t)(count * bytes));
  uint64_t wrong = 0;
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    const uint64_t first = k->model.first[layer];
    wrong += count_wrong(stored + first * bytes, k->model.param + first, k->model.elements[layer], bytes);
  }
  CHECK_EQ(wrong, 0);
  free(stored);
}

/* Bytes of a chunk that the rank keeps: slices are multiples of 256 elements, the last rank keeps what is left over. */
static uint64_t own_bytes(const shape_t *shape, uint32_t rank) {
  const uint32_t ranks = shard_ranks(shape);
  uint64_t chunk = chunk_of(shape), slice = chunk / shape->element_bytes / ranks / 256 * 256 * shape->element_bytes;
  return rank + 1 == ranks ? chunk - (ranks - 1) * slice : slice;
}

/* fd: a file of all ranks. */
static inline void train_rank(const shape_t *shape, uint32_t rank, gemini_group_config_t group, int fd) {
  rank_t *k = malloc(sizeof *k);
  rank_open(k, shape, rank, group);
  gemini_group_stats_t stats = GEMINI_GROUP_STATS_INIT;
  uint64_t gathered_first = 0;
  const uint32_t steps = steps_of(shape);
  for (uint32_t n = 0; n < steps; n++) {
    CHECK_OK(step(k, n, n != 2));
    CHECK_OK(gemini_group_stats(k->w.mgr, k->group, &stats));
    if (!n) gathered_first = stats.gathered_chunks;
  }
  CHECK_EQ(atomic_load(&k->wrong), 0);
  uint64_t updated = atomic_load(&k->updated), all[RANKS_MOST], sum = 0;
  CHECK_OK(gemini_group_exchange(k->w.mgr, k->group, &updated, sizeof updated, all));
  for (uint32_t r = 0; r < shape->ranks; r++) sum += all[r];
  /* each element once a step, by one rank of each replica */
  CHECK_EQ(sum, steps * k->model.first[LAYERS] * (shape->ranks / shard_ranks(shape)));
  check_stored(k, fd);
  CHECK_EQ(stats.ranks, shape->ranks);
  CHECK_EQ(stats.rank, rank);
  CHECK_EQ(stats.shard_ranks, shard_ranks(shape));
  CHECK_EQ(stats.bucket_chunks, bucket_of(shape));
  const uint64_t chunk = chunk_of(shape);
  uint64_t chunks = (k->model.first[LAYERS] * shape->element_bytes + chunk - 1) / chunk;
  CHECK_EQ(k->model.rounds >= steps, true);
  CHECK_EQ(stats.reduced_chunks, k->model.rounds * chunks);
  /* From the second step on, each chunk is gathered once a step if there is room for all, whatever the stage. */
  if (shape->device_chunks >= 64 && !shape->micro_batches)
    CHECK_EQ(stats.gathered_chunks - gathered_first, (steps - 1) * chunks);
  else CHECK(stats.gathered_chunks - gathered_first >= (steps - 1) * chunks);
  CHECK_EQ(stats.gathered_bytes,
           stats.gathered_chunks * chunk - stats.gathered_chunks * own_bytes(shape, rank % shard_ranks(shape)));
  figures_t s = world_stats(&k->w);
  CHECK(s.planned_iterations > 0);
  CHECK(s.peak_bytes[HOST] <= shape->host_chunks * chunk);
  rank_close(k);
  free(k);
}

#endif
