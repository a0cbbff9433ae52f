/* Random programs of collectives over shared memory: every rank computes what each call must give from the seed.
 * SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>

#include "base/dtype.h"
#include "comm/comm.h"
#include "comm_world.h"
#include "process.h"
#include "seed.h"

enum { BYTES_MOST = 3 * 256 * 1024 + 77 };

/* The bytes that a rank brings to a step, as values of a type; small whole numbers, so that sums are exact in all. */
static void fill(uint8_t *to, uint64_t bytes, uint64_t seed, uint32_t step, uint32_t rank, uint32_t dtype) {
  static const uint16_t halves[2][4] = { { 0x3F80, 0xC000, 0x4040, 0x0000 }, { 0x3C00, 0xC000, 0x4200, 0x0000 } };
  static const double values[4] = { 1, -2, 3, 0 };
  uint64_t state = (seed * 1000003 + step) * 31 + rank + 1, width = dtype > 3 ? 1 : gmi_dtype_bytes(dtype);
  for (uint64_t i = 0; i < bytes / width; i++) {
    uint64_t x = check_random(&state) >> 40;
    float value = (float)values[x % 4];
    if (dtype > 3) to[i] = (uint8_t)x;
    else if (dtype == GEMINI_DTYPE_F64) memcpy(to + i * 8, &values[x % 4], 8);
    else if (dtype == GEMINI_DTYPE_F32) memcpy(to + i * 4, &value, 4);
    else memcpy(to + i * 2, &halves[dtype == GEMINI_DTYPE_F16][x % 4], 2);
  }
}

typedef struct {
  uint64_t seed, steps;
  uint32_t victim; /* the rank that ends without a word in the middle; GMI_COMM_RANKS: none does */
  uint64_t ends_at;
} program_t;

static uint64_t random_bytes(uint64_t *state) {
  uint64_t x = check_random(state) >> 32;
  return x % 8 == 0 ? x / 8 % BYTES_MOST : x / 8 % 3000;
}

/* One step: the same choices on each rank. Returns what the call returned; checks the bytes of one that succeeded. */
static gemini_status_t step(gmi_comm_t *c, const program_t *p, uint32_t n, uint64_t *state, uint8_t *data,
                            uint8_t *expected, uint8_t *ranks_in) {
  uint32_t kind = (uint32_t)(check_random(state) >> 60) % 5, dtype = (uint32_t)(check_random(state) >> 62);
  gmi_reduce_t how = (gmi_reduce_t)((check_random(state) >> 60) % 3);
  uint64_t width = gmi_dtype_bytes(dtype), bytes = random_bytes(state) / c->ranks / width * width;
  const void *from[COMM_WORLD_RANKS];
  gemini_status_t status;
  char label[32];
  snprintf(label, sizeof label, "step %u", n);
  if (kind == 4) {
    uint32_t root = n % c->ranks;
    for (uint32_t r = 0; r < c->ranks; r++) fill(r == root ? expected : data, bytes, p->seed, n, r, 9);
    if (c->rank == root) memcpy(data, expected, bytes);
    status = c->ops->broadcast(c->self, data, bytes, root, NULL, label);
    if (!status) CHECK(!memcmp(data, expected, bytes));
    return status;
  }
  if (kind < 2) {
    for (uint32_t r = 0; r < c->ranks; r++) fill(expected + r * bytes, bytes, p->seed, n, r, 9);
    memset(data, 0xEE, c->ranks * bytes);
    uint8_t *mine = expected + c->rank * bytes;
    if (bytes && !kind) memcpy(data + c->rank * bytes, mine, bytes);
    status = kind ? c->ops->exchange(c->self, mine, bytes, data, label)
                  : c->ops->all_gather(c->self, data, bytes, NULL, label);
    if (!status) CHECK(!memcmp(data, expected, c->ranks * bytes));
    return status;
  }
  const uint64_t whole = kind == 2 ? c->ranks * bytes : bytes, at = kind == 2 ? c->rank * bytes : 0;
  for (uint32_t r = 0; r < c->ranks; r++) {
    fill(ranks_in + r * whole, whole, p->seed, n, r, dtype);
    from[r] = ranks_in + r * whole + at;
  }
  gmi_reduce(dtype, how, c->ranks, from, expected, bytes / width);
  memcpy(data, ranks_in + c->rank * whole, whole);
  status = kind == 2 ? c->ops->reduce_scatter(c->self, data, bytes / width, dtype, how, NULL, label)
                     : c->ops->all_reduce(c->self, data, bytes / width, dtype, how, NULL, label);
  if (!status) CHECK(!memcmp(data + at, expected, bytes));
  return status;
}

static void run(gmi_comm_t *c, void *user) {
  const program_t *p = user;
  uint64_t state = p->seed * 2 + 1;
  uint8_t *data = malloc(BYTES_MOST), *expected = malloc(BYTES_MOST), *ranks_in = malloc((size_t)c->ranks * BYTES_MOST);
  gemini_status_t status = GEMINI_OK;
  uint32_t n = 0;
  /* The victim ends when all have returned from joining, which finds ranks that have ended. */
  uint8_t own[8] = { 0 }, all[8 * COMM_WORLD_RANKS];
  if (p->victim != GMI_COMM_RANKS) CHECK_EQ(c->ops->exchange(c->self, own, sizeof own, all, "joined"), GEMINI_OK);
  for (; n < p->steps && !status; n++) {
    if (c->rank == p->victim && n == p->ends_at) kill(getpid(), SIGKILL);
    status = step(c, p, n, &state, data, expected, ranks_in);
  }
  if (p->victim == GMI_COMM_RANKS) CHECK_EQ(status, GEMINI_OK);
  else CHECK_EQ(status, GEMINI_ERR_PEER);
  /* The victim took part in all steps before its end, and in none after it. */
  if (p->victim != GMI_COMM_RANKS) CHECK_EQ(n - 1, p->ends_at);
  free(data);
  free(expected);
  free(ranks_in);
}

static void test_comm_random_programs(void) {
  uint64_t seed = seed_begin(__func__), steps = seed_setting("GEMINI_STRESS_STEPS", 20000) / 20;
  process_t before = process_now();
  for (uint64_t done = 0; done < steps; seed++) {
    uint64_t state = seed * 2 + 1;
    uint32_t ranks = 1 + (uint32_t)(check_random(&state) >> 62);
    program_t p = { .seed = seed, .steps = 100, .victim = GMI_COMM_RANKS };
    if (ranks > 1 && check_random(&state) >> 62 == 0) { /* rank 0 is this process */
      p.victim = 1 + (uint32_t)(check_random(&state) >> 33) % (ranks - 1);
      p.ends_at = (check_random(&state) >> 33) % p.steps;
    }
    pid_t pids[COMM_WORLD_RANKS];
    comm_world_processes(ranks, COMM_WORLD_DEADLINE_NS, run, &p, pids);
    for (uint32_t r = 1; r < ranks; r++) {
      int end;
      CHECK_EQ(waitpid(pids[r], &end, 0), pids[r]);
      bool right = r == p.victim ? WIFSIGNALED(end) && WTERMSIG(end) == SIGKILL : end == 0;
      if (!right) seed_print(seed);
      CHECK(right);
    }
    done += p.steps;
  }
  process_check(before);
}

int main(void) {
  RUN(test_comm_random_programs);
  return check_done();
}
