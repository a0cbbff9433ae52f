/* Random training programs over several ranks, each a process: every rank computes from the seed what each call must
 * give. In every fourth program a rank is killed at a random step; all others must then fail, and name it. Only public
 * headers. SPDX-License-Identifier: Apache-2.0
 *
 * GEMINI_STRESS_STEPS is the number of steps of all programs together. A step is a call of rank 0 that does something:
 * it begins an iteration or an operator, acquires, sets a state, updates, zeroes, computes a norm, registers, loads,
 * stores, moves, hints, pins, exchanges, saves or resumes. Not counted are the calls that end one of these, those that
 * only ask, and the calls of the other ranks, which are about as many on each. */
#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include "../fork.h"
#include "../integration/world.h"
#include "../process.h"
#include "../seed.h"
#include "gemini/group.h"

#define CHUNK WORLD_CHUNK
#define DEVICE GEMINI_TIER_DEVICE
#define HOST GEMINI_TIER_HOST
enum { RANKS_MOST = 4, TENSORS_MOST = 16, OPS_MOST = 12, SCRIPTS = 3, USES_MOST = 4, ROUNDS = 25 };
enum { NOBODY = RANKS_MOST, LATEST_DEATH = 600 /* in steps */ };
/* After a rank was killed, all others have an error within this time, far below the deadline of the group. */
#define LATEST_NS (SANITIZED ? UINT64_C(30000000000) : UINT64_C(10000000000))
#define DEADLINE_NS UINT64_C(60000000000)

/* What all processes of a program share. */
typedef struct {
  _Atomic uint64_t steps;   /* of rank 0 */
  _Atomic uint64_t died_ns; /* when the victim was killed; 0: it lives */
  pid_t pids[RANKS_MOST];
} shared_t;
static shared_t *shared;

/* ---- what a program is made of; all of it follows from the seed */
typedef struct {
  uint32_t uses[USES_MOST], use_count; /* tensors that the operator reads as parameters */
  int32_t writes;                      /* the parameter that it overwrites, or -1 */
  uint32_t gradients;                  /* a bit for each of uses: its gradient is written, by some ranks */
} op_t;
typedef struct {
  op_t ops[OPS_MOST];
  uint32_t op_count, number;
} script_t;

typedef struct {
  uint64_t seed, state; /* state: of the choices that all ranks make alike */
  uint64_t own_state;   /* of those that each rank makes by itself */
  uint32_t rank, ranks, shard_ranks, stage, element_bytes;
  uint32_t bucket;         /* chunks that are added together */
  uint64_t steps, dies_at; /* dies_at: of the victim */
  uint32_t victim;         /* the rank that is killed, or NOBODY */
  jmp_buf failed;          /* of a survivor: to where it goes when a call reports the failure */
  world_t w, loading;      /* loading: of a checkpoint that is compared */
  gemini_group_t group;
  gemini_arena_t params, grads, masters;
  gemini_tensor_t param[TENSORS_MOST], grad[TENSORS_MOST];
  uint64_t first[TENSORS_MOST], elements[TENSORS_MOST], end; /* in the arena */
  uint32_t tensors;
  uint32_t step, written; /* written: counts writes of parameters, to give each other values */
  bool has_gradient[TENSORS_MOST];
  float *p, *m, *g; /* parameters, masters, sums of gradients: what all ranks together must have */
  float *scratch;   /* of as many elements */
  struct {          /* gradients with bytes of their own, which are added in rounds */
    bool on;
    float *local[RANKS_MOST]; /* what each rank has written and not added */
    bool ready[TENSORS_MOST], due, written, summed;
    uint32_t reduced; /* chunks of the round that have been added, from the last one down */
  } sums;
  uint32_t batch; /* gradients differ with it */
  script_t scripts[SCRIPTS];
  struct update *updates;
  int fd;
  bool files;                            /* there is a file tier */
  const char *dir;                       /* for checkpoints of all ranks */
  _Atomic uint64_t wrong, wrong_on_host; /* wrong_on_host: gradients that an update on the host was given */
} rank_t;

static uint32_t choose(rank_t *k, uint32_t below) { return (uint32_t)(check_random(&k->state) >> 33) % below; }
static uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x = a * UINT64_C(0x9e3779b97f4a7c15) ^ b * UINT64_C(0xd1342543de82ef95) ^ c * UINT64_C(0xa0761d6478bd642f);
  x ^= x >> 32;
  x *= UINT64_C(0xe7037ed1a0b428db);
  return x ^ x >> 29;
}
static float small_value(uint64_t a, uint64_t b, uint64_t c) {
  return (float)(int32_t)(mix(a, b, c) >> 40) / (float)(1 << 23) - 1.0F;
}
static void put(void *at, uint64_t i, uint32_t element_bytes, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (element_bytes == 4) ((float *)at)[i] = value;
  else ((uint16_t *)at)[i] = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); /* no NaN occurs */
}
static float get(const void *at, uint64_t i, uint32_t element_bytes) {
  if (element_bytes == 4) return ((const float *)at)[i];
  uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float rounded(const rank_t *k, float value) {
  float own[1];
  put(own, 0, k->element_bytes, value);
  return get(own, 0, k->element_bytes);
}
static float gradient_of(const rank_t *k, uint32_t rank, uint64_t i) {
  return rounded(k, small_value(i + (uint64_t)k->batch * 1000003, rank + 1, k->seed));
}
static bool takes_part(const rank_t *k, uint32_t rank, uint32_t tensor) {
  return mix(tensor, rank + 7, k->seed * 131 + k->batch) % 4 != 0;
}

/* ---- steps */
static void step(rank_t *k) {
  if (k->rank == 0) atomic_fetch_add(&shared->steps, 1);
  if (++k->steps != k->dies_at || k->rank != k->victim) return;
  atomic_store(&shared->died_ns, now_ns());
  kill(getpid(), SIGKILL);
}
/* A call may fail only because a rank was killed; then this does not return. PENDING: of an update that was accepted
 * before. */
static void expect(rank_t *k, gemini_status_t status, gemini_status_t expected, const char *call, int line) {
  if (status == expected) return;
  if ((status == GEMINI_ERR_PEER || status == GEMINI_ERR_PENDING) && k->victim != NOBODY) longjmp(k->failed, 1);
  fprintf(stderr, "%s:%d: rank %u: %s is %d, expected %d\n  last error: %s: %s\n", __FILE__, line, k->rank, call,
          status, expected, world_error().operation, world_error().message);
  exit(1);
}
#define OK(k, call) expect(k, call, GEMINI_OK, #call, __LINE__)
#define STEP(k, call) (step(k), OK(k, call))

/* ---- queued functions */
typedef struct {
  rank_t *k;
  void *at;
  float *values; /* of the tensor: to be found there, or to be put there; owned */
  uint64_t count;
} call_t;
static void compare(void *user) {
  call_t *c = user;
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < c->count; i++) wrong += get(c->at, i, c->k->element_bytes) != c->values[i];
  if (wrong) atomic_fetch_add(&c->k->wrong, wrong);
  free(c->values);
  free(c);
}
static void fill(void *user) {
  call_t *c = user;
  for (uint64_t i = 0; i < c->count; i++) put(c->at, i, c->k->element_bytes, c->values[i]);
  free(c->values);
  free(c);
}
static void add(void *user) {
  call_t *c = user;
  const uint32_t bytes = c->k->element_bytes;
  for (uint64_t i = 0; i < c->count; i++) put(c->at, i, bytes, get(c->at, i, bytes) + c->values[i]);
  free(c->values);
  free(c);
}
static void queue(rank_t *k, gemini_stream_t stream, void (*fn)(void *), void *at, uint32_t tensor, const float *from) {
  call_t *c = malloc(sizeof *c);
  *c = (call_t){ k, at, malloc(k->elements[tensor] * sizeof(float)), k->elements[tensor] };
  memcpy(c->values, from + k->first[tensor], c->count * sizeof(float));
  gemini_status_t status = stream ? gemini_stream_call(k->w.mgr, stream, fn, c) : GEMINI_OK;
  if (status) {
    free(c->values);
    free(c);
    OK(k, status);
  }
  if (!stream) fn(c);
}

/* One update; it may run after its call has returned. */
typedef struct update {
  struct update *next;
  rank_t *k;
  float *g; /* the sums that it must find */
} update_t;
static void span(void *user, const gemini_update_span_t *s) {
  const update_t *u = user;
  rank_t *k = u->k;
  uint64_t wrong = 0;
  for (uint64_t i = 0; i < s->element_count; i++) {
    float gradient = get(s->ptr[1], i, k->element_bytes), *master = (float *)s->ptr[2] + i;
    wrong += gradient != u->g[s->first_element + i];
    *master = 0.875F * *master - 0.125F * gradient;
    put(s->ptr[0], i, k->element_bytes, *master);
  }
  if (wrong) atomic_fetch_add(&k->wrong, wrong);
  if (wrong && s->tier == HOST) atomic_fetch_add(&k->wrong_on_host, wrong);
}
typedef struct {
  update_t *u;
  gemini_update_span_t s;
} device_span_t;
static void device_span(void *user) {
  device_span_t *d = user;
  span(d->u, &d->s);
  free(d);
}
static void any_span(void *user, const gemini_update_span_t *s) {
  update_t *u = user;
  if (s->tier == HOST) {
    span(user, s);
    return;
  }
  device_span_t *d = malloc(sizeof *d);
  *d = (device_span_t){ u, *s };
  CHECK_OK(gemini_stream_call(u->k->w.mgr, s->stream, device_span, d));
}

/* ---- calls that each rank makes by itself: they change where its slices are, and nothing else */
static uint32_t choose_alone(rank_t *k, uint32_t below) {
  return (uint32_t)(check_random(&k->own_state) >> 33) % below;
}
static void move_slices(rank_t *k) {
  const uint32_t t = choose_alone(k, k->tensors);
  gemini_tensor_t tensor = choose_alone(k, 2) ? k->param[t] : k->grad[t];
  if (choose_alone(k, 3) == 0) OK(k, gemini_tensor_counterpart(k->w.mgr, k->param[t], k->masters, &tensor));
  gemini_access_t range = world_whole(tensor, 0, choose_alone(k, 3));
  uint64_t bytes = 0;
  gemini_status_t status = GEMINI_OK;
  switch (choose_alone(k, 4)) {
  case 0: STEP(k, gemini_hint(k->w.mgr, &range, 1)); break;
  case 1:
    step(k);
    status = gemini_move(k->w.mgr, &range, 1);
    break;
  case 2:
    step(k);
    status = gemini_pin(k->w.mgr, &range);
    if (!status) OK(k, gemini_unpin(k->w.mgr, &range));
    break;
  default: OK(k, gemini_tier_bytes(k->w.mgr, &range, &bytes));
  }
  if (status != GEMINI_ERR_BUSY && status != GEMINI_ERR_OOM_DEVICE && status != GEMINI_ERR_OOM_HOST &&
      status != GEMINI_ERR_OOM_FILE && (k->files || range.tier != GEMINI_TIER_FILE))
    OK(k, status);
}
static void move_some(rank_t *k) {
  while (choose_alone(k, 4) == 0) move_slices(k);
}

/* ---- steps */
static void meet(rank_t *k) { /* all ranks are here */
  uint64_t mine = k->state, all[RANKS_MOST];
  STEP(k, gemini_group_exchange(k->w.mgr, k->group, &mine, sizeof mine, all));
  for (uint32_t r = 0; r < k->ranks; r++) CHECK_EQ(all[r], mine);
}

static void new_values(rank_t *k, uint32_t tensor) {
  k->written++;
  for (uint64_t i = k->first[tensor]; i < k->first[tensor] + k->elements[tensor]; i++)
    k->p[i] = rounded(k, small_value(i, k->written, k->seed + 5));
}

/* The tensor's values as this rank may write them on the device: only those in its own slices count. */
static float *own_slices(rank_t *k, uint32_t t) {
  float *mine = k->scratch;
  gemini_access_t all = world_whole(k->param[t], GEMINI_READ, DEVICE);
  uint64_t offset, size, next = 0;
  for (uint64_t i = k->first[t]; i < k->first[t] + k->elements[t]; i++) mine[i] = 12345;
  for (;; next = offset + size) {
    OK(k, gemini_slice_next(k->w.mgr, &all, next, &offset, &size));
    if (!size) return mine;
    uint64_t first = k->first[t] + offset / k->element_bytes;
    memcpy(mine + first, k->p + first, size / k->element_bytes * sizeof *mine);
  }
}

/* The sum of a value of each rank: in the order of ranks, within each replica first. */
static float sum_over(const rank_t *k, const float values[]) {
  float all = 0, sum = 0;
  for (uint32_t r = 0; r < k->ranks; r++) {
    sum = r % k->shard_ranks ? sum + values[r] : values[r];
    if ((r + 1) % k->shard_ranks) continue;
    all = r < k->shard_ranks ? rounded(k, sum) : all + rounded(k, sum);
  }
  return rounded(k, all);
}

/* ---- rounds of sums, as every rank expects them */
static uint32_t chunk_count(const rank_t *k) { return (uint32_t)((k->end * k->element_bytes + CHUNK - 1) / CHUNK); }
static uint64_t chunk_of(const rank_t *k, uint64_t element) { return element * k->element_bytes / CHUNK; }
static void sums_add_chunk(rank_t *k) {
  const uint64_t c = chunk_count(k) - 1 - k->sums.reduced;
  for (uint64_t e = c * CHUNK / k->element_bytes; e < k->end && chunk_of(k, e) == c; e++) {
    float values[RANKS_MOST];
    for (uint32_t r = 0; r < k->ranks; r++) {
      values[r] = k->sums.local[r][e];
      k->sums.local[r][e] = 0;
    }
    const float sum = sum_over(k, values);
    k->g[e] = k->sums.summed ? rounded(k, k->g[e] + sum) : sum;
  }
  for (uint32_t t = 0; t < k->tensors; t++)
    if (chunk_of(k, k->first[t]) == c) k->sums.ready[t] = false;
  if (++k->sums.reduced < chunk_count(k)) return;
  k->sums.reduced = 0;
  k->sums.due = k->sums.written = false;
  k->sums.summed = true;
}
/* Chunks that are added together next. */
static uint32_t sums_bucket(const rank_t *k) { return (chunk_count(k) - 1 - k->sums.reduced) % k->bucket + 1; }
static void sums_add_bucket(rank_t *k) {
  for (uint32_t left = sums_bucket(k); left > 0; left--) sums_add_chunk(k);
}
static bool sums_next_is_ready(const rank_t *k) {
  const uint64_t last = chunk_count(k) - 1 - k->sums.reduced, first = last + 1 - sums_bucket(k);
  for (uint32_t t = 0; t < k->tensors; t++)
    if (chunk_of(k, k->first[t]) <= last && chunk_of(k, k->first[t] + k->elements[t] - 1) >= first && !k->sums.ready[t])
      return false;
  return true;
}
static void sums_ready(rank_t *k, uint32_t t) {
  k->sums.ready[t] = k->sums.due = true;
  while (k->sums.due && k->stage != GEMINI_ZERO_STATES && sums_next_is_ready(k)) sums_add_bucket(k);
}
static void sums_add_all(rank_t *k) {
  k->sums.due |= k->sums.written;
  while (k->sums.due) sums_add_bucket(k);
}
static void sums_zero(rank_t *k) {
  const bool all = choose(k, 3) == 0;
  const uint32_t t = choose(k, k->tensors);
  const uint64_t first = all ? 0 : k->first[t], count = all ? k->end : k->elements[t];
  gemini_access_t range = all ? world_whole(k->grads, 0, 0) : world_whole(k->grad[t], 0, 0);
  STEP(k, gemini_zero(k->w.mgr, &range));
  memset(k->g + first, 0, count * sizeof(float));
  for (uint32_t r = 0; r < k->ranks; r++) memset(k->sums.local[r] + first, 0, count * sizeof(float));
  if (all) k->sums.summed = false;
}
static void sums_gradient(rank_t *k, uint32_t t) {
  if (chunk_of(k, k->first[t] + k->elements[t] - 1) + k->sums.reduced >= chunk_count(k)) { /* added in this round */
    gemini_access_t refused = world_whole(k->grad[t], GEMINI_READ_WRITE, DEVICE);
    step(k);
    expect(k, gemini_acquire(k->w.mgr, &refused, 1, k->w.stream), GEMINI_ERR_STATE, "gemini_acquire", __LINE__);
    return;
  }
  const bool adds = choose(k, 2) || k->sums.ready[t], ready = k->sums.ready[t] || choose(k, 8);
  k->batch++;
  for (uint32_t r = 0; r < k->ranks; r++)
    for (uint64_t e = k->first[t]; takes_part(k, r, t) && e < k->first[t] + k->elements[t]; e++) {
      k->sums.local[r][e] = adds ? rounded(k, k->sums.local[r][e] + gradient_of(k, r, e)) : gradient_of(k, r, e);
      k->sums.written = true;
    }
  if (takes_part(k, k->rank, t)) {
    gemini_access_t use = world_whole(k->grad[t], adds ? GEMINI_READ_WRITE : GEMINI_WRITE, DEVICE);
    float *mine = k->scratch;
    for (uint64_t e = k->first[t]; e < k->first[t] + k->elements[t]; e++) mine[e] = gradient_of(k, k->rank, e);
    STEP(k, gemini_acquire(k->w.mgr, &use, 1, k->w.stream));
    queue(k, k->w.stream, adds ? add : fill, use.ptr, t, mine);
    OK(k, gemini_release(k->w.mgr, &use, 1, k->w.stream));
  }
  if (!ready) return;
  const uint32_t state = world_tensor_info(&k->w, k->grad[t]).state;
  if (state == GEMINI_STATE_FREE) STEP(k, gemini_tensor_state_set(k->w.mgr, k->grad[t], GEMINI_STATE_HOLD));
  if (state != GEMINI_STATE_READY_FOR_REDUCE)
    STEP(k, gemini_tensor_state_set(k->w.mgr, k->grad[t], GEMINI_STATE_READY_FOR_REDUCE));
  sums_ready(k, t);
}

static void run_op(rank_t *k, const op_t *op, uint32_t number, uint32_t script) {
  char name[32];
  gemini_access_t uses[USES_MOST];
  uint32_t used[USES_MOST], count = 0;
  snprintf(name, sizeof name, "op %u of %u", number, script);
  move_some(k);
  STEP(k, gemini_op_begin(k->w.mgr, name, k->w.stream));
  move_some(k);
  for (uint32_t i = 0; i < op->use_count; i++) { /* a parameter whose gradient is there cannot be read */
    if (k->has_gradient[op->uses[i]]) continue;
    used[count] = op->uses[i];
    uses[count++] = world_whole(k->param[op->uses[i]], GEMINI_READ, DEVICE);
  }
  if (count) step(k);
  OK(k, gemini_acquire(k->w.mgr, uses, count, k->w.stream));
  for (uint32_t i = 0; i < count; i++) queue(k, k->w.stream, compare, uses[i].ptr, used[i], k->p);
  OK(k, gemini_release(k->w.mgr, uses, count, k->w.stream));
  if (op->writes >= 0 && !k->has_gradient[op->writes]) {
    gemini_access_t write = world_whole(k->param[op->writes], GEMINI_WRITE, DEVICE);
    new_values(k, (uint32_t)op->writes);
    float *mine = own_slices(k, (uint32_t)op->writes);
    STEP(k, gemini_acquire(k->w.mgr, &write, 1, k->w.stream));
    queue(k, k->w.stream, fill, write.ptr, (uint32_t)op->writes, mine);
    OK(k, gemini_release(k->w.mgr, &write, 1, k->w.stream));
  }
  for (uint32_t i = 0; i < op->use_count; i++) {
    uint32_t t = op->uses[i];
    if (!(op->gradients >> i & 1) || k->has_gradient[t]) continue;
    if (k->sums.on) {
      sums_gradient(k, t);
      continue;
    }
    k->has_gradient[t] = true;
    for (uint64_t e = k->first[t]; e < k->first[t] + k->elements[t]; e++) {
      float values[RANKS_MOST];
      for (uint32_t r = 0; r < k->ranks; r++) values[r] = takes_part(k, r, t) ? gradient_of(k, r, e) : 0;
      k->g[e] = sum_over(k, values);
    }
    if (takes_part(k, k->rank, t)) {
      gemini_access_t write = world_whole(k->grad[t], GEMINI_WRITE, DEVICE);
      float *mine = k->scratch;
      for (uint64_t e = k->first[t]; e < k->first[t] + k->elements[t]; e++) mine[e] = gradient_of(k, k->rank, e);
      STEP(k, gemini_acquire(k->w.mgr, &write, 1, k->w.stream));
      queue(k, k->w.stream, fill, write.ptr, t, mine);
      OK(k, gemini_release(k->w.mgr, &write, 1, k->w.stream));
    }
    if (world_tensor_info(&k->w, k->grad[t]).state == GEMINI_STATE_FREE)
      STEP(k, gemini_tensor_state_set(k->w.mgr, k->grad[t], GEMINI_STATE_HOLD));
    if (mix(t, k->step, k->seed) % 8) /* else the update adds it, on all ranks */
      STEP(k, gemini_tensor_state_set(k->w.mgr, k->grad[t], GEMINI_STATE_READY_FOR_REDUCE));
  }
  OK(k, gemini_op_end(k->w.mgr));
}

static void check_norm(rank_t *k, gemini_arena_t arena, const float *values) {
  double norm, all[RANKS_MOST], squares = 0;
  if (k->sums.on && arena == k->grads) sums_add_all(k);
  gemini_access_t whole = world_whole(arena, GEMINI_READ, DEVICE);
  STEP(k,
       gemini_norm(k->w.mgr, &whole, k->element_bytes == 4 ? GEMINI_DTYPE_F32 : GEMINI_DTYPE_BF16, k->w.stream, &norm));
  for (uint32_t t = 0; t < k->tensors; t++)
    for (uint64_t i = k->first[t]; i < k->first[t] + k->elements[t]; i++)
      squares += (double)values[i] * (double)values[i];
  CHECK(fabs(norm - sqrt(squares)) <= 1e-12 * norm);
  STEP(k, gemini_group_exchange(k->w.mgr, k->group, &norm, sizeof norm, all));
  for (uint32_t r = 0; r < k->ranks; r++) CHECK(!memcmp(&all[r], &norm, sizeof norm));
}

static void update(rank_t *k) {
  for (uint32_t t = 0; t < k->tensors && !k->sums.on; t++)
    if (!k->has_gradient[t]) memset(k->g + k->first[t], 0, k->elements[t] * sizeof(float));
  if (choose(k, 3) == 0) check_norm(k, k->grads, k->g);
  const gemini_arena_t arenas[] = { k->params, k->grads, k->masters };
  const uint32_t modes[] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 3;
  u.stream = k->w.stream;
  u.fn = any_span;
  u.flags = choose(k, 2) ? GEMINI_UPDATE_LATE : 0;
  if (k->sums.on) sums_add_all(k);
  k->sums.summed = false;
  update_t *one = malloc(sizeof *one);
  *one = (update_t){ k->updates, k, malloc(k->end * sizeof(float)) };
  memcpy(one->g, k->g, k->end * sizeof(float));
  k->updates = one;
  u.user = one;
  STEP(k, gemini_update(k->w.mgr, &u));
  for (uint32_t t = 0; t < k->tensors; t++) {
    for (uint64_t i = k->first[t]; i < k->first[t] + k->elements[t]; i++) {
      k->m[i] = 0.875F * k->m[i] - 0.125F * k->g[i];
      k->p[i] = rounded(k, k->m[i]);
    }
    k->has_gradient[t] = false;
  }
}

static void iteration(rank_t *k) {
  script_t *script = &k->scripts[choose(k, SCRIPTS)], once;
  if (choose(k, 6) == 0) { /* one that departs */
    once = *script;
    op_t *op = &once.ops[choose(k, once.op_count)];
    op->uses[0] = choose(k, k->tensors);
    for (uint32_t i = 1; i < op->use_count; i++)
      if (op->uses[i] == op->uses[0]) op->use_count = 1;
    script = &once;
  }
  k->step++;
  if (!k->sums.on) k->batch = k->step;
  STEP(k, gemini_iteration_begin(k->w.mgr));
  OK(k, gemini_phase_set(k->w.mgr, GEMINI_PHASE_BACKWARD));
  const uint32_t passes = k->sums.on ? 1 + choose(k, 3) : 1; /* micro-batches */
  for (uint32_t i = 0; i < script->op_count * passes; i++) {
    run_op(k, &script->ops[i % script->op_count], i % script->op_count, script->number);
    if (k->sums.on && choose(k, 12) == 0) check_norm(k, k->grads, k->g);
    if (k->sums.on && choose(k, 20) == 0) sums_zero(k);
  }
  bool any = choose(k, 3) == 0;
  if (k->sums.on) any = choose(k, 2); /* else they are added to by the next iteration */
  for (uint32_t t = 0; t < k->tensors; t++) any |= k->has_gradient[t];
  OK(k, gemini_phase_set(k->w.mgr, GEMINI_PHASE_UPDATE));
  if (any) update(k);
  OK(k, gemini_iteration_end(k->w.mgr));
}

/* Reads, or with write overwrites, this rank's slices of a tensor on the host. */
static void host_slices(rank_t *k, gemini_tensor_t tensor, uint32_t t, uint32_t bytes, const float *values,
                        bool write) {
  gemini_access_t all = world_whole(tensor, GEMINI_READ, HOST);
  uint64_t offset, size, next = 0, wrong = 0;
  for (;; next = offset + size) {
    OK(k, gemini_slice_next(k->w.mgr, &all, next, &offset, &size));
    if (!size) break;
    gemini_access_t slice = world_part(tensor, offset, size, write ? GEMINI_WRITE : GEMINI_READ, HOST);
    STEP(k, gemini_acquire(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
    for (uint64_t i = 0; i < size / bytes; i++) {
      float value = values[k->first[t] + offset / bytes + i];
      if (write) put(slice.ptr, i, bytes, value);
      else wrong += get(slice.ptr, i, bytes) != value;
    }
    OK(k, gemini_release(k->w.mgr, &slice, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_EQ(wrong, 0);
}

static void outside(rank_t *k, uint32_t t) {
  uint32_t bytes = k->element_bytes;
  gemini_access_t all = world_whole(k->param[t], GEMINI_READ, DEVICE);
  void *values;
  move_some(k);
  switch (choose(k, k->sums.on ? 11 : 9)) {
  case 0:
  case 1:
    STEP(k, gemini_acquire(k->w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    queue(k, NULL, compare, all.ptr, t, k->p);
    OK(k, gemini_release(k->w.mgr, &all, 1, GEMINI_STREAM_CALLER));
    break;
  case 2: host_slices(k, k->param[t], t, bytes, k->p, false); break;
  case 3:
    meet(k); /* no rank gathers the old values any more */
    new_values(k, t);
    host_slices(k, k->param[t], t, bytes, k->p, true);
    meet(k);
    break;
  case 4: {
    gemini_tensor_t master;
    OK(k, gemini_tensor_counterpart(k->w.mgr, k->param[t], k->masters, &master));
    host_slices(k, master, t, 4, k->m, false);
    break;
  }
  case 5: check_norm(k, k->params, k->p); break;
  case 6:
    meet(k);
    memset(k->p + k->first[t], 0, k->elements[t] * sizeof(float));
    STEP(k, gemini_zero(k->w.mgr, &all));
    meet(k);
    break;
  case 9:
    check_norm(k, k->grads, k->g); /* all have been added */
    host_slices(k, k->grad[t], t, bytes, k->g, false);
    break;
  case 10: sums_zero(k); break;
  case 7:
    meet(k);
    if (k->rank == 0) { /* the file is shared */
      values = malloc(k->elements[t] * bytes);
      k->written++;
      for (uint64_t i = 0; i < k->elements[t]; i++)
        put(values, i, bytes, small_value(k->first[t] + i, k->written, k->seed + 5));
      CHECK_EQ(pwrite(k->fd, values, k->elements[t] * bytes, 77), (ssize_t)(k->elements[t] * bytes));
      k->written--;
      free(values);
    }
    new_values(k, t);
    meet(k);
    STEP(k, gemini_load(k->w.mgr, &all, k->fd, 77));
    meet(k);
    break;
  default:
    meet(k);
    STEP(k, gemini_store(k->w.mgr, &all, k->fd, 13));
    meet(k);
    values = malloc(k->elements[t] * bytes);
    CHECK_EQ(pread(k->fd, values, k->elements[t] * bytes, 13), (ssize_t)(k->elements[t] * bytes));
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < k->elements[t]; i++) wrong += get(values, i, bytes) != k->p[k->first[t] + i];
    CHECK_EQ(wrong, 0);
    free(values);
    meet(k);
  }
}

/* ---- a rank */
static void add_tensor(rank_t *k) {
  char name[16];
  uint32_t t = k->tensors++;
  snprintf(name, sizeof name, "tensor %u", t);
  k->elements[t] = 1 + choose(k, choose(k, 2) ? 40000 : 600);
  STEP(k, gemini_tensor_register(k->w.mgr, k->params, name, k->elements[t] * k->element_bytes, GEMINI_OFFSET_NEXT,
                                 &k->param[t]));
  OK(k, gemini_tensor_counterpart(k->w.mgr, k->param[t], k->grads, &k->grad[t]));
  k->first[t] = world_tensor_info(&k->w, k->param[t]).offset_bytes / k->element_bytes;
  uint64_t end = k->first[t] + k->elements[t];
  float **arrays[] = { &k->p, &k->m, &k->g, &k->scratch };
  for (int i = 0; i < 4; i++) {
    *arrays[i] = realloc(*arrays[i], end * sizeof(float));
    memset(*arrays[i] + k->end, 0, (end - k->end) * sizeof(float));
  }
  for (uint32_t r = 0; r < k->ranks; r++) {
    k->sums.local[r] = realloc(k->sums.local[r], end * sizeof(float));
    memset(k->sums.local[r] + k->end, 0, (end - k->end) * sizeof(float));
  }
  k->end = end;
}

static void make_scripts(rank_t *k) {
  for (uint32_t s = 0; s < SCRIPTS; s++) {
    script_t *script = &k->scripts[s];
    *script = (script_t){ .op_count = 1 + choose(k, OPS_MOST), .number = s };
    for (uint32_t i = 0; i < script->op_count; i++) {
      op_t *op = &script->ops[i];
      uint32_t count = choose(k, USES_MOST + 1);
      for (uint32_t u = 0; u < count; u++) {
        uint32_t t = choose(k, k->tensors);
        bool known = false;
        for (uint32_t n = 0; n < op->use_count; n++) known |= op->uses[n] == t;
        if (!known) op->uses[op->use_count++] = t;
      }
      op->writes = choose(k, 10) ? -1 : (int32_t)choose(k, k->tensors);
      op->gradients = choose(k, 2) ? choose(k, 1 << USES_MOST) : 0;
    }
  }
}

static void open_rank(rank_t *k, const gemini_group_id_t *id) {
  k->ranks = 2 + choose(k, RANKS_MOST - 1);
  k->stage = choose(k, 4); /* GEMINI_ZERO_* */
  k->element_bytes = choose(k, 2) ? 4 : 2;
  k->shard_ranks = choose(k, 2) ? k->ranks : k->ranks == 4 ? 2 : 1; /* of several replicas in half of all programs */
  uint64_t files = choose(k, 2) ? 0 : 100;
  k->files = files;
  gemini_config_t c = world_config(90, files ? 8 + choose(k, 16) : 100, files);
  c.update_threads = 1 + choose(k, 2);
  c.flags = choose(k, 4) ? 0 : GEMINI_CONFIG_STRICT;
  k->w = world_open(c);
  gemini_group_config_t g = GEMINI_GROUP_CONFIG_INIT;
  g.rank = k->rank;
  g.ranks = k->ranks;
  g.shard_ranks = k->shard_ranks;
  g.id = id;
  g.deadline_ns = DEADLINE_NS;
  k->bucket = 1 + choose(k, 2) * choose(k, 6);
  g.bucket_bytes = k->bucket * CHUNK;
  if (k->shard_ranks == 1) k->bucket = 1; /* nobody to add with */
  OK(k, gemini_group_open(k->w.mgr, &g, &k->group));
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  a.element_bytes = k->element_bytes;
  a.group = k->group;
  a.zero_stage = k->stage;
  STEP(k, gemini_arena_create(k->w.mgr, &a, &k->params));
  a.group = NULL;
  a.zero_stage = 0;
  a.kind = GEMINI_KIND_GRAD;
  k->sums.on = choose(k, 2);
  if (k->sums.on) a.like = k->params;
  else a.reuse = k->params;
  a.dtype = k->element_bytes == 2 ? GEMINI_DTYPE_BF16 : GEMINI_DTYPE_F32;
  STEP(k, gemini_arena_create(k->w.mgr, &a, &k->grads));
  a.reuse = NULL;
  a.dtype = 0;
  a.like = k->params;
  a.kind = GEMINI_KIND_MASTER;
  a.element_bytes = 4;
  STEP(k, gemini_arena_create(k->w.mgr, &a, &k->masters));
  for (uint32_t n = 2 + choose(k, 9); n-- > 0;) add_tensor(k);
  make_scripts(k);
  /* All gradients may be on the device at once, and the parameters of an operator; of stages that keep them, all. */
  uint64_t chunks = (k->end * k->element_bytes + CHUNK - 1) / CHUNK + 8; /* 3 more tensors may come */
  if (k->stage == GEMINI_ZERO_PARAMS || k->stage == GEMINI_ZERO_AUTO)
    OK(k, gemini_budget_set(k->w.mgr, DEVICE, (chunks + 18 + choose(k, 6)) * CHUNK));
}

/* A checkpoint of all ranks, which each of them then loads by itself, whole. */
static void check_saved(rank_t *k) {
  bool gradients = false;
  for (uint32_t t = 0; t < k->tensors; t++) gradients |= k->has_gradient[t];
  if (gradients) {
    STEP(k, gemini_iteration_begin(k->w.mgr));
    update(k);
    OK(k, gemini_iteration_end(k->w.mgr));
  }
  if (k->sums.on) check_norm(k, k->grads, k->g); /* all have been added */
  for (uint32_t i = 1 + choose(k, 2); i-- > 0;) {
    STEP(k, gemini_group_checkpoint(k->w.mgr, k->group, k->dir, "run"));
    move_some(k);
  }
  rank_t one = *k;
  one.w = k->loading = world_open(world_config(90, 200, 0));
  one.group = NULL;
  gemini_arena_config_t a = GEMINI_ARENA_CONFIG_INIT;
  a.element_bytes = k->element_bytes;
  OK(k, gemini_arena_create(one.w.mgr, &a, &one.params));
  one.grads = world_arena(&one.w, GEMINI_KIND_GRAD, k->element_bytes, NULL, k->sums.on ? one.params : NULL,
                          k->sums.on ? NULL : one.params);
  one.masters = world_arena(&one.w, GEMINI_KIND_MASTER, 4, NULL, one.params, NULL);
  for (uint32_t t = 0; t < k->tensors; t++) {
    char name[24];
    snprintf(name, sizeof name, "tensor %u", t);
    one.param[t] = world_tensor(&one.w, one.params, name, k->elements[t] * k->element_bytes);
    OK(k, gemini_tensor_counterpart(one.w.mgr, one.param[t], one.grads, &one.grad[t]));
  }
  STEP(&one, gemini_group_resume(one.w.mgr, NULL, k->dir, "run"));
  for (uint32_t t = 0; t < k->tensors; t++) {
    gemini_tensor_t master;
    OK(k, gemini_tensor_counterpart(one.w.mgr, one.param[t], one.masters, &master));
    host_slices(&one, one.param[t], t, k->element_bytes, k->p, false);
    host_slices(&one, master, t, 4, k->m, false);
    if (k->sums.summed) host_slices(&one, one.grad[t], t, k->element_bytes, k->g, false);
  }
  world_close(&one.w);
  k->loading = (world_t){ 0 };
  k->steps = one.steps;
  meet(k);
}

/* ---- a program */
static uint32_t ranks_of(uint64_t seed) {
  rank_t k = { .state = seed };
  return 2 + choose(&k, RANKS_MOST - 1);
}
static uint32_t victim_of(uint64_t seed) { return seed % 4 ? NOBODY : (uint32_t)(mix(seed, 3, 5) % ranks_of(seed)); }

static void run_rounds(rank_t *k, const gemini_group_id_t *id) {
  open_rank(k, id);
  for (uint64_t n = 0; n < ROUNDS; n++) {
    if (choose(k, 3)) iteration(k);
    else
      for (uint32_t t = choose(k, k->tensors), count = 1 + choose(k, 5); count-- > 0;) outside(k, t);
    if (choose(k, 25) == 0 && k->tensors < 13 && !k->sums.reduced) add_tensor(k);
    if (choose(k, 20) == 0) check_saved(k);
    if (atomic_load(&k->wrong)) break;
  }
  OK(k, gemini_update_wait(k->w.mgr));
  OK(k, gemini_stream_synchronize(k->w.mgr, k->w.stream));
  if (k->victim == NOBODY) return;
  k->dies_at = k->steps + 1; /* if the program was too short for it */
  meet(k);
  CHECK(k->victim == NOBODY); /* a rank that was killed has taken part */
}

/* A survivor: the failure has come in time, it names the victim, and the group stays failed. */
static void check_failure(rank_t *k) {
  const uint64_t failed_ns = now_ns(), died_ns = atomic_load(&shared->died_ns);
  const gemini_error_info_t first = world_error();
  char name[32];
  snprintf(name, sizeof name, "rank %u ", k->victim);
  CHECK(died_ns);
  CHECK(failed_ns < died_ns + LATEST_NS);
  CHECK_SAYS(first.message, name);
  CHECK_SAYS(first.message, "has ended");
  uint8_t byte = 0, bytes[RANKS_MOST];
  if (k->group) /* else it could not be opened */
    CHECK_STATUS(gemini_group_exchange(k->w.mgr, k->group, &byte, 1, bytes), GEMINI_ERR_PEER);
}
static void close_failed(world_t *w) {
  const gemini_status_t status = gemini_manager_close(w->mgr);
  CHECK(status == GEMINI_OK || status == GEMINI_ERR_PEER || status == GEMINI_ERR_DEVICE);
  if (*w->dir) CHECK_EQ(rmdir(w->dir), 0);
}

static void run_rank(uint64_t seed, uint32_t rank, const gemini_group_id_t *id, int fd, const char *dir) {
  process_t before = process_now();
  rank_t *k = calloc(1, sizeof *k);
  k->seed = k->state = seed;
  k->rank = rank;
  k->fd = fd;
  k->dir = dir;
  k->own_state = mix(seed, rank, 99);
  k->victim = victim_of(seed);
  k->dies_at = 1 + mix(seed, 11, 13) % LATEST_DEATH;
  if (setjmp(k->failed)) {
    check_failure(k);
    if (k->loading.mgr) close_failed(&k->loading);
    close_failed(&k->w);
  } else {
    run_rounds(k, id);
    CHECK_EQ(atomic_load(&k->wrong), 0);
    world_close(&k->w);
  }
  /* On the device, what was queued behind a gather or a sum that failed has run over bytes that never came. */
  CHECK_EQ(atomic_load(&k->wrong_on_host), 0);
  for (update_t *u = k->updates, *next; u; u = next) {
    next = u->next;
    free(u->g);
    free(u);
  }
  free(k->p);
  free(k->m);
  free(k->g);
  free(k->scratch);
  for (uint32_t r = 0; r < RANKS_MOST; r++) free(k->sums.local[r]);
  free(k);
  process_check(before);
}

/* Becomes rank 0, and starts the others, which are the caller's children once rank 0 has ended. */
static void start(uint64_t seed, const char *dir) {
  gemini_group_id_t id;
  const uint32_t ranks = ranks_of(seed);
  uint32_t rank = 0;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, ranks, &id));
  const int fd = memfd_create("shared", MFD_CLOEXEC);
  CHECK_EQ(setenv("TMPDIR", dir, 1), 0); /* for the file tiers */
  shared->pids[0] = getpid();
  for (uint32_t r = 1; r < ranks && !rank; r++) {
    const pid_t child = fork_child();
    if (child) shared->pids[r] = child;
    else rank = r;
  }
  run_rank(seed, rank, &id, fd, dir);
  exit(0);
}

/* The files of checkpoints are left, and the folder of a victim's file tier. */
static void remove_dir(const char *dir, bool folders) {
  char path[400];
  DIR *files = opendir(dir);
  CHECK(files);
  for (struct dirent *e; (e = readdir(files));) {
    snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
    if (*e->d_name == '.') continue;
    if (folders && e->d_type == DT_DIR) remove_dir(path, false);
    else CHECK_EQ(unlink(path), 0);
  }
  closedir(files);
  CHECK_EQ(rmdir(dir), 0);
}

static void run(uint64_t seed) {
  const uint32_t victim = victim_of(seed);
  char dir[64];
  pid_t pid;
  bool right = true;
  int end;
  dir_make(dir);
  atomic_store(&shared->died_ns, 0);
  if (!fork_child()) start(seed, dir);
  while ((pid = waitpid(-1, &end, 0)) > 0)
    right &= victim != NOBODY && pid == shared->pids[victim] ? WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL : end == 0;
  if (!right) seed_print(seed);
  CHECK(right);
  remove_dir(dir, victim != NOBODY);
}

/* Departures from the recorded order in an acquire whose first chunks one rank served on the fast path, another not. */
enum { FAILED_ONCE_FROM = 5000 }; /* steps of a run that has the time for them */
static const uint64_t failed_once[] = { 813459851, 813459907 };

static void test_random_programs_of_ranks(void) {
  uint64_t seed = seed_begin(__func__), steps = seed_setting("GEMINI_STRESS_STEPS", 20000), programs = 0, killed = 0;
  CHECK(!prctl(PR_SET_CHILD_SUBREAPER, 1));
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  for (size_t i = 0; steps >= FAILED_ONCE_FROM && i < sizeof failed_once / sizeof *failed_once; i++)
    run(failed_once[i]);
  for (; atomic_load(&shared->steps) < steps; seed++) {
    run(seed);
    programs++;
    killed += victim_of(seed) != NOBODY;
  }
  fprintf(stderr, "    %" PRIu64 " steps of %" PRIu64 " programs, in %" PRIu64 " of which a rank was killed\n",
          atomic_load(&shared->steps), programs, killed);
  munmap(shared, sizeof *shared);
}

int main(void) {
  process_begin();
  RUN(test_random_programs_of_ranks);
  return check_done();
}
