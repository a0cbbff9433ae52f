/* The states of tensors: every transition of docs/states.md by every means there is, what is refused changes nothing; the
 * states of counterparts; gradients in their parameters' bytes; what is FREE. SPDX-License-Identifier: Apache-2.0 */
#include "../check.h"
#include "gemini.h"
#include "world.h"

#define W WORLD_CHUNK
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, BOTH = GEMINI_READ_WRITE };
enum {
  FREE = GEMINI_STATE_FREE,
  HOLD = GEMINI_STATE_HOLD,
  FORWARD = GEMINI_STATE_HOLD_AFTER_FWD,
  BACKWARD = GEMINI_STATE_HOLD_AFTER_BWD,
  COMPUTE = GEMINI_STATE_COMPUTE,
  READY = GEMINI_STATE_READY_FOR_REDUCE,
  STATES = GEMINI_STATE_COUNT
};
static const char *const names[STATES] = { "FREE",           "HOLD",    "HOLD_AFTER_FWD",
                                           "HOLD_AFTER_BWD", "COMPUTE", "READY_FOR_REDUCE" };

/* ---- the table: by what a tensor goes from one state to another */
enum { BY_SET = 1, BY_ACQUIRE = 2, BY_RELEASE = 4, BY_UPDATE = 8, BY_LOAD = 16 };
typedef struct {
  uint8_t by[STATES][STATES]; /* from, to */
} table_t;
static const table_t legal = { {
    [FREE] = { [HOLD] = BY_SET | BY_LOAD | BY_UPDATE, [COMPUTE] = BY_ACQUIRE },
    [HOLD] = { [FREE] = BY_SET, [HOLD] = BY_LOAD | BY_UPDATE, [COMPUTE] = BY_ACQUIRE, [READY] = BY_SET },
    [FORWARD] = { [HOLD] = BY_SET | BY_UPDATE, [FORWARD] = BY_LOAD, [COMPUTE] = BY_ACQUIRE },
    [BACKWARD] = { [HOLD] = BY_SET | BY_UPDATE, [BACKWARD] = BY_LOAD, [COMPUTE] = BY_ACQUIRE, [READY] = BY_SET },
    [COMPUTE] = { [HOLD] = BY_RELEASE, [FORWARD] = BY_RELEASE, [BACKWARD] = BY_RELEASE, [COMPUTE] = BY_ACQUIRE },
    [READY] = { [HOLD] = BY_SET | BY_UPDATE, [COMPUTE] = BY_ACQUIRE, [READY] = BY_LOAD },
} };

/* ---- one tensor, alone in its chunks but for its last one, and brought into a state by public calls */
enum { PLAIN, COUNTERPART, REUSING, KINDS };
enum { BYTES = 2 * 65536 + 4096, SEED = 7, SEED_NEXT = 8 };
typedef struct {
  world_t w;
  int kind;
  gemini_arena_t arena, base;
  gemini_tensor_t t, next; /* next: shares t's last chunk; untouched by whatever happens to t */
  gemini_access_t held;    /* from COMPUTE */
} subject_t;

static gemini_access_t whole_of(gemini_tensor_t t, uint32_t mode, uint32_t tier) { return world_whole(t, mode, tier); }

static void use(const subject_t *s, uint32_t phase, uint32_t tier, uint32_t mode, uint64_t seed) {
  gemini_access_t a = whole_of(s->t, mode, tier);
  CHECK_OK(gemini_phase_set(s->w.mgr, phase));
  CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  if (mode & WRITE) world_write(a.ptr, 0, BYTES, seed);
  CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_phase_set(s->w.mgr, GEMINI_PHASE_NONE));
}

static uint32_t state_of(const subject_t *s) { return world_tensor_info(&s->w, s->t).state; }

static subject_t bring(int kind, uint32_t state, uint32_t place) {
  subject_t s = { .kind = kind, .w = world_open(world_config(8, 16, 16)) };
  gemini_arena_t base = world_arena(&s.w, kind == PLAIN ? GEMINI_KIND_OTHER : GEMINI_KIND_PARAM, 2, "base", 0, 0);
  s.arena = s.base = base;
  if (kind == COUNTERPART) s.arena = world_arena(&s.w, GEMINI_KIND_MASTER, 2, "like", base, 0);
  if (kind == REUSING) s.arena = world_arena(&s.w, GEMINI_KIND_GRAD, 2, "grad", 0, base);
  s.t = world_tensor(&s.w, base, "t", BYTES);
  s.next = world_tensor(&s.w, base, "next", 4096);
  if (kind != PLAIN) {
    CHECK_OK(gemini_tensor_counterpart(s.w.mgr, s.t, s.arena, &s.t));
    CHECK_OK(gemini_tensor_counterpart(s.w.mgr, s.next, s.arena, &s.next));
  }
  world_fill(&s.w, s.next, 0, 4096, HOST, SEED_NEXT);
  CHECK_EQ(state_of(&s), FREE);
  if (state == FREE) return s;
  use(&s, GEMINI_PHASE_NONE, HOST, WRITE, SEED);
  if (state == FORWARD) use(&s, GEMINI_PHASE_FORWARD, DEVICE, READ, 0);
  if (state == BACKWARD) use(&s, GEMINI_PHASE_BACKWARD, DEVICE, READ, 0);
  if (state == READY) CHECK_OK(gemini_tensor_state_set(s.w.mgr, s.t, READY));
  gemini_access_t to = whole_of(s.t, READ, place);
  CHECK_OK(gemini_move(s.w.mgr, &to, 1));
  if (state == COMPUTE) {
    s.held = whole_of(s.t, BOTH, place == DEVICE ? DEVICE : HOST);
    CHECK_OK(gemini_acquire(s.w.mgr, &s.held, 1, GEMINI_STREAM_CALLER));
  }
  CHECK_EQ(state_of(&s), state);
  return s;
}

/* Through the arena, which changes no tensor's state; of a gradient that is not there, through its parameters'. */
static bool has_bytes(const subject_t *s, uint64_t seed) {
  uint64_t offset = world_tensor_info(&s->w, s->t).offset_bytes;
  gemini_access_t a = world_part(s->arena, offset, BYTES, READ, s->held.object.tensor ? s->held.tier : HOST);
  if (s->held.object.tensor && s->held.tier == HOST) a.ptr = s->held.ptr; /* who has it for writing sees it */
  else {
    gemini_status_t status = gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER);
    CHECK(!status || (s->kind == REUSING && status == GEMINI_ERR_STATE));
    if (status) a.object.arena = s->base;
    if (status) CHECK_OK(gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  }
  const bool right = world_reads(a.ptr, 0, BYTES, seed);
  if (!s->held.object.tensor || s->held.tier == DEVICE) CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  return right;
}

static void finish(subject_t *s, uint64_t seed) {
  uint32_t state = state_of(s);
  CHECK(has_bytes(s, seed));
  CHECK_EQ(state_of(s), state);
  if (s->held.object.tensor) CHECK_OK(gemini_release(s->w.mgr, &s->held, 1, GEMINI_STREAM_CALLER));
  CHECK(world_holds(&s->w, s->next, 0, 4096, SEED_NEXT));
  world_close(&s->w);
}

/* Everything that can be seen of the tensor and its manager. */
typedef struct {
  figures_t stats;
  gemini_tensor_info_t t, next;
} seen_t;
static seen_t look(const subject_t *s) {
  seen_t seen;
  memset(&seen, 0, sizeof seen);
  seen.stats = world_stats(&s->w);
  seen.t = world_tensor_info(&s->w, s->t);
  seen.next = world_tensor_info(&s->w, s->next);
  return seen;
}

static void nothing(void *user, const gemini_update_span_t *span) { (void)user, (void)span; }
static gemini_status_t update(const subject_t *s, uint32_t mode, uint32_t flags) {
  gemini_tensor_info_t info = world_tensor_info(&s->w, s->t);
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = &s->arena;
  u.modes = &mode;
  u.arena_count = 1;
  u.first_element = info.offset_bytes / 2;
  u.element_count = info.size_bytes / 2;
  u.flags = flags;
  u.fn = nothing;
  return gemini_update(s->w.mgr, &u);
}

/* Tries one means; notes where it led, or that it was refused as it should be. */
typedef gemini_status_t (*means_fn)(subject_t *s, uint32_t a, uint32_t b);
static void try_means(table_t *seen, int kind, uint32_t from, uint32_t place, uint8_t by, means_fn fn, uint32_t a,
                      uint32_t b, gemini_status_t refused) {
  subject_t s = bring(kind, from, place);
  seen_t before = look(&s);
  gemini_status_t status = fn(&s, a, b);
  uint64_t seed = from == FREE ? 0 : SEED;
  if (status == GEMINI_OK) {
    uint32_t to = state_of(&s);
    seen->by[from][to] |= by;
    if (to == FREE) seed = 0;
    if (by == BY_LOAD || (by == BY_ACQUIRE && a == WRITE)) seed = SEED;
  } else {
    gemini_error_info_t e = world_error();
    seen_t after = look(&s);
    if (status != refused || memcmp(&before, &after, sizeof before) || e.status != status) {
      fprintf(stderr, "kind %d, from %s, place %u, means %u (%u, %u): status %d, expected %d; changed: %d; %s: %s\n",
              kind, names[from], place, by, a, b, status, refused, memcmp(&before, &after, sizeof before) != 0,
              e.operation, e.message);
      exit(1);
    }
    if (by == BY_SET && a < STATES) CHECK(strstr(e.message, names[from]) && strstr(e.message, names[a]));
  }
  finish(&s, seed);
}

static gemini_status_t by_set(subject_t *s, uint32_t state, uint32_t unused) {
  (void)unused;
  return gemini_tensor_state_set(s->w.mgr, s->t, state);
}
static gemini_status_t by_acquire(subject_t *s, uint32_t mode, uint32_t tier) {
  gemini_access_t a = whole_of(s->t, mode, tier);
  gemini_status_t status = gemini_acquire(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER);
  if (status) return status;
  CHECK_EQ(world_tensor_info(&s->w, s->t).users, s->held.object.tensor ? 2 : 1);
  if (mode == WRITE && !s->held.object.tensor) /* its old bytes need not have come */
    for (uint64_t i = 0; i < BYTES; i++) ((uint8_t *)a.ptr)[i] = world_byte(SEED, i);
  if (s->held.object.tensor) { /* the second of two: it stays COMPUTE as long as one is left */
    CHECK_OK(gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    CHECK_EQ(state_of(s), COMPUTE);
  } else {
    s->held = a;
  }
  return GEMINI_OK;
}
static gemini_status_t by_release(subject_t *s, uint32_t phase, uint32_t unused) {
  (void)unused;
  gemini_access_t a = s->held.object.tensor ? s->held : whole_of(s->t, READ, DEVICE);
  CHECK_OK(gemini_phase_set(s->w.mgr, phase));
  gemini_status_t status = gemini_release(s->w.mgr, &a, 1, GEMINI_STREAM_CALLER);
  if (!status) s->held.object.tensor = NULL;
  return status;
}
static gemini_status_t by_update(subject_t *s, uint32_t mode, uint32_t flags) {
  gemini_status_t status = update(s, mode, flags);
  if (!status) CHECK_OK(gemini_update_wait(s->w.mgr));
  return status;
}

/* A file that holds SEED's bytes, from which part of a tensor can be read. */
static FILE *content_file(uint64_t bytes) {
  FILE *file = tmpfile();
  CHECK(file);
  for (uint64_t i = 0; i < bytes; i++) CHECK(fputc(world_byte(SEED, i), file) != EOF);
  CHECK_EQ(fflush(file), 0);
  return file;
}
static gemini_status_t by_load(subject_t *s, uint32_t mode, uint32_t tier) {
  FILE *file = content_file(BYTES);
  gemini_access_t a = whole_of(s->t, mode, tier); /* which do not matter */
  gemini_status_t status = gemini_load(s->w.mgr, &a, fileno(file), 0);
  CHECK(!fclose(file));
  return status;
}

static void check_table(int kind, uint32_t place) {
  if (check_is_slow() && place != FILES && kind != REUSING) return; /* each table opens thousands of managers */
  table_t seen = { { { 0 } } };
  for (uint32_t from = 0; from < STATES; from++) {
    for (uint32_t to = 0; to < STATES; to++)
      try_means(&seen, kind, from, place, BY_SET, by_set, to, 0, GEMINI_ERR_STATE);
    try_means(&seen, kind, from, place, BY_SET, by_set, STATES, 0, GEMINI_ERR_INVALID);
    try_means(&seen, kind, from, place, BY_SET, by_set, UINT32_MAX, 0, GEMINI_ERR_INVALID);
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
      for (uint32_t mode = READ; mode <= BOTH; mode++) {
        /* COMPUTE here means acquired for writing on one tier, which the other one must keep off. What is no gradient
         * yet becomes one only by being written whole. */
        gemini_status_t refused = from == FREE && kind == REUSING && mode & READ ? GEMINI_ERR_STATE : GEMINI_ERR_BUSY;
        try_means(&seen, kind, from, place, BY_ACQUIRE, by_acquire, mode, tier, refused);
      }
    }
    for (uint32_t phase = 0; phase <= GEMINI_PHASE_UPDATE; phase++)
      try_means(&seen, kind, from, place, BY_RELEASE, by_release, phase, 0, GEMINI_ERR_STATE);
    for (uint32_t flags = 0; kind != REUSING && flags <= GEMINI_UPDATE_LATE; flags++)
      try_means(&seen, kind, from, place, BY_UPDATE, by_update, BOTH, flags, GEMINI_ERR_BUSY);
    try_means(&seen, kind, from, place, BY_LOAD, by_load, READ, place, GEMINI_ERR_BUSY);
  }
  for (uint32_t from = 0; from < STATES; from++) {
    for (uint32_t to = 0; to < STATES; to++) {
      uint8_t want = legal.by[from][to] & (kind == REUSING ? (uint8_t)~BY_UPDATE : 255);
      if (seen.by[from][to] == want) continue;
      fprintf(stderr, "kind %d, place %u: from %s to %s by %#x, expected %#x\n", kind, place, names[from], names[to],
              seen.by[from][to], want);
      exit(1);
    }
  }
}

static void test_transitions_of_a_tensor_on_the_device_follow_the_table(void) { check_table(PLAIN, DEVICE); }
static void test_transitions_of_a_tensor_on_the_host_follow_the_table(void) { check_table(PLAIN, HOST); }
static void test_transitions_of_a_tensor_in_files_follow_the_table(void) { check_table(PLAIN, FILES); }
static void test_transitions_of_a_counterpart_follow_the_table(void) { check_table(COUNTERPART, DEVICE); }
static void test_transitions_of_a_reusing_gradient_follow_the_table(void) { check_table(REUSING, HOST); }

/* docs/states.md has the same table. */
static void test_table_in_the_documentation_is_this_one(void) {
  char path[512], line[512];
  const char *slash = strrchr(__FILE__, '/');
  snprintf(path, sizeof path, "%.*s../../docs/states.md", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__);
  FILE *file = fopen(path, "r");
  if (!file) fprintf(stderr, "cannot open %s\n", path);
  CHECK(file);
  int rows = -1; /* of the table whose head has been seen */
  while (fgets(line, sizeof line, file)) {
    if (!strncmp(line, "| from", 6)) rows = 0;
    if (rows < 0 || rows == STATES || line[0] != '|' || !strncmp(line, "| from", 6) || !strncmp(line, "| ---", 5))
      continue;
    char *rest = line + 1, *cell = strsep(&rest, "|");
    CHECK(strstr(cell, names[rows])); /* rows in the order of the states */
    for (int to = 0; to < STATES; to++) {
      cell = strsep(&rest, "|");
      CHECK(cell && rest);
      uint8_t by = (uint8_t)((strstr(cell, "set") ? BY_SET : 0) | (strstr(cell, "acquire") ? BY_ACQUIRE : 0) |
                             (strstr(cell, "release") ? BY_RELEASE : 0) | (strstr(cell, "update") ? BY_UPDATE : 0) |
                             (strstr(cell, "load") ? BY_LOAD : 0));
      if (rows != to && by != legal.by[rows][to]) { /* what stays where it is, is no transition */
        fprintf(stderr, "docs/states.md: from %s to %s: \"%s\", expected %#x\n", names[rows], names[to], cell,
                legal.by[rows][to]);
        exit(1);
      }
    }
    rows++;
  }
  CHECK(!fclose(file));
  CHECK_EQ(rows, STATES);
}

/* ---- the last release decides */
static void test_state_is_that_of_the_phase_of_the_last_release(void) {
  for (uint32_t first = 0; first <= GEMINI_PHASE_UPDATE; first++) {
    for (uint32_t last = 0; last <= GEMINI_PHASE_UPDATE; last++) {
      static const uint32_t after[] = { HOLD, FORWARD, BACKWARD, HOLD };
      subject_t s = bring(PLAIN, READY, DEVICE);
      gemini_access_t a[3] = { whole_of(s.t, READ, DEVICE), whole_of(s.t, READ, HOST),
                               world_part(s.t, 100, 200, READ, DEVICE) };
      CHECK_OK(gemini_phase_set(s.w.mgr, (first + 1) % 4)); /* of the acquires does not matter */
      CHECK_OK(gemini_acquire(s.w.mgr, a, 3, s.w.stream));
      CHECK_EQ(world_tensor_info(&s.w, s.t).users, 3);
      CHECK_OK(gemini_phase_set(s.w.mgr, first));
      for (int i = 0; i < 2; i++) {
        CHECK_OK(gemini_release(s.w.mgr, &a[i], 1, s.w.stream));
        CHECK_EQ(state_of(&s), COMPUTE);
        CHECK_EQ(world_tensor_info(&s.w, s.t).users, 2 - i);
      }
      CHECK_OK(gemini_phase_set(s.w.mgr, last));
      CHECK_OK(gemini_release(s.w.mgr, &a[2], 1, s.w.stream));
      CHECK_EQ(state_of(&s), after[last]);
      CHECK_EQ(world_tensor_info(&s.w, s.t).users, 0);
      finish(&s, SEED);
    }
  }
}

/* ---- what changes no state */
static void test_other_calls_leave_states_alone(void) {
  for (uint32_t state = 0; state < STATES; state++) {
    if (state == COMPUTE) continue;
    subject_t s = bring(PLAIN, state, HOST);
    FILE *file = tmpfile();
    CHECK(file);
    double norm;
    gemini_access_t a = whole_of(s.t, READ, DEVICE);
    for (uint32_t tier = DEVICE; tier <= FILES; tier++) {
      a.tier = tier;
      CHECK_OK(gemini_hint(s.w.mgr, &a, 1));
      CHECK_EQ(state_of(&s), state);
      CHECK_OK(gemini_move(s.w.mgr, &a, 1));
      CHECK_EQ(state_of(&s), state);
    }
    CHECK_OK(gemini_pin(s.w.mgr, &a));
    CHECK_EQ(state_of(&s), state);
    CHECK_OK(gemini_unpin(s.w.mgr, &a));
    CHECK_OK(gemini_store(s.w.mgr, &a, fileno(file), 0));
    CHECK_OK(gemini_norm(s.w.mgr, &a, GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm));
    CHECK_OK(update(&s, READ, 0)); /* which does not write it */
    CHECK_OK(gemini_update_wait(s.w.mgr));
    CHECK_EQ(state_of(&s), state);
    CHECK(has_bytes(&s, state == FREE ? 0 : SEED));
    CHECK_OK(gemini_zero(s.w.mgr, &a));
    CHECK_EQ(state_of(&s), state);
    CHECK(!fclose(file));
    finish(&s, 0);
  }
}

/* ---- loads: what bytes were read into cannot be FREE any more, nothing else changes */
static void test_load_makes_free_what_it_reaches_hold(void) {
  static const uint64_t at[4] = { 0, W + 512, 2 * W + 1024, 3 * W }; /* of four tensors, in chunks of others, too */
  static const uint64_t size[4] = { W, W, 512, W };
  const struct {
    uint64_t offset, size, file; /* of the range; of the file */
    gemini_status_t status;
    const char *free; /* x: stays FREE */
  } cases[] = {
    { 0, 0, 4 * W, GEMINI_OK, "    " },
    { at[0] + W - 1, 1, 1, GEMINI_OK, " xxx" },
    { at[1] + 100, 8, 8, GEMINI_OK, "x xx" },
    { at[1] + W, 512, 512, GEMINI_OK, "xxxx" }, /* between two */
    { at[1] + W - 1, 513 + 512, 513 + 512, GEMINI_OK, "x  x" },
    { at[0] + 100, 3 * W, 100, GEMINI_ERR_FORMAT, " xxx" },                 /* ends in the first one */
    { at[0] + 100, 3 * W, at[2] - at[0] - 100, GEMINI_ERR_FORMAT, "  xx" }, /* before the third one */
    { at[0] + 100, 3 * W, at[2] - at[0] - 99, GEMINI_ERR_FORMAT, "   x" },  /* with its first byte */
    { 0, 0, 0, GEMINI_ERR_FORMAT, "xxxx" },
    { at[0] + 100, 8, 0, GEMINI_ERR_FORMAT, "xxxx" },
    { at[0] + 100, 8, UINT64_MAX, GEMINI_ERR_IO, "xxxx" }, /* cannot be read at all */
  };
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    world_t w = world_open(world_config(8, 16, 16));
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, NULL, 0, 0);
    gemini_arena_t like = world_arena(&w, GEMINI_KIND_OTHER, 1, "like", arena, 0);
    uint64_t offset;
    CHECK_OK(gemini_arena_take(w.mgr, arena, 4 * W, &offset));
    gemini_tensor_t t[4], other[4], tied;
    for (int i = 0; i < 4; i++) {
      char name[16];
      snprintf(name, sizeof name, "t%d", i);
      CHECK_OK(gemini_tensor_register(w.mgr, arena, name, size[i], at[i], &t[i]));
      CHECK_OK(gemini_tensor_counterpart(w.mgr, t[i], like, &other[i]));
    }
    CHECK_OK(gemini_tensor_register(w.mgr, arena, "tied", at[2] - at[1], at[1], &tied)); /* t1's bytes, and a gap's */
    bool readable = cases[k].file != UINT64_MAX;
    FILE *file = content_file(readable ? cases[k].file : 0);
    int fds[2];
    CHECK_EQ(pipe(fds), 0);
    gemini_access_t a = world_part(arena, cases[k].offset, cases[k].size, READ, HOST);
    CHECK_STATUS(gemini_load(w.mgr, &a, readable ? fileno(file) : fds[0], 0), cases[k].status);
    for (int i = 0; i < 4; i++) {
      CHECK_EQ(world_tensor_info(&w, t[i]).state, cases[k].free[i] == 'x' ? FREE : HOLD);
      CHECK_EQ(world_tensor_info(&w, other[i]).state, FREE); /* bytes of its own */
    }
    CHECK_EQ(world_tensor_info(&w, tied).state, cases[k].free[1] == 'x' && k != 3 ? FREE : HOLD);
    CHECK_EQ(close(fds[0]) | close(fds[1]), 0);
    CHECK(!fclose(file));
    world_close(&w);
  }
}

static bool is_nowhere(const world_t *w, gemini_tensor_t t) {
  uint64_t bytes = 0;
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) bytes += world_tier_bytes(w, t, tier);
  return !bytes;
}

/* ---- FREE reads as zero and holds no memory */
static void test_free_reads_as_zero_and_holds_no_memory(void) {
  for (uint32_t place = DEVICE; place <= FILES; place++) {
    world_t w = world_open(world_config(8, 8, 8));
    gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, NULL, 0, 0);
    gemini_tensor_t before = world_tensor(&w, arena, "before", W), t = world_tensor(&w, arena, "t", 3 * W),
                    after = world_tensor(&w, arena, "after", W);
    gemini_access_t a = world_whole(t, READ, place);
    gemini_tensor_info_t info = world_tensor_info(&w, t);
    CHECK(info.state == FREE && is_nowhere(&w, t));
    CHECK_EQ(world_stats(&w).used_bytes[DEVICE] + world_stats(&w).used_bytes[HOST] + world_stats(&w).used_bytes[FILES],
             0);
    world_fill(&w, before, 0, W, HOST, 1);
    world_fill(&w, after, 0, W, HOST, 2);
    figures_t without = world_stats(&w);
    world_fill(&w, t, 0, 3 * W, HOST, 3);
    CHECK_OK(gemini_move(w.mgr, &a, 1));
    info = world_tensor_info(&w, t);
    CHECK_EQ(world_tier_bytes(&w, t, place), 3 * W);
    CHECK_EQ(world_stats(&w).used_bytes[place], without.used_bytes[place] + 3 * W);
    CHECK_OK(gemini_tensor_state_set(w.mgr, t, FREE));
    info = world_tensor_info(&w, t);
    CHECK(info.state == FREE && is_nowhere(&w, t));
    figures_t now = world_stats(&w);
    for (int tier = 0; tier < GEMINI_TIER_COUNT; tier++) CHECK_EQ(now.used_bytes[tier], without.used_bytes[tier]);
    uint32_t readers[] = { DEVICE, HOST };
    for (uint32_t i = 0; i < 2; i++) { /* on both tiers, also after the other one */
      a = world_whole(t, READ, readers[(i + place) % 2]);
      CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      for (uint64_t k = 0; k < 3 * W; k++) CHECK(!((uint8_t *)a.ptr)[k]);
      CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
    CHECK_OK(gemini_tensor_state_set(w.mgr, t, FREE)); /* from HOLD again */
    CHECK(world_holds(&w, before, 0, W, 1));
    CHECK(world_holds(&w, after, 0, W, 2));
    world_close(&w);
  }
}

/* ---- counterparts */
static void test_counterparts_have_states_and_bytes_of_their_own(void) {
  world_t w = world_open(world_config(8, 16, 0));
  gemini_arena_t params = world_arena(&w, GEMINI_KIND_PARAM, 2, NULL, 0, 0);
  gemini_arena_t arenas[3] = { world_arena(&w, GEMINI_KIND_GRAD, 2, NULL, 0, params),
                               world_arena(&w, GEMINI_KIND_MASTER, 4, NULL, params, 0),
                               world_arena(&w, GEMINI_KIND_MOMENTUM, 4, NULL, params, 0) };
  gemini_tensor_t t[4] = { world_tensor(&w, params, "t", 1000) };
  for (int i = 0; i < 3; i++) CHECK_OK(gemini_tensor_counterpart(w.mgr, t[0], arenas[i], &t[i + 1]));
  uint32_t want[4] = { FREE, FREE, FREE, FREE };
#define CHECK_STATES() \
  for (int i = 0; i < 4; i++) CHECK_EQ(world_tensor_info(&w, t[i]).state, want[i])
  CHECK_STATES();
  world_fill(&w, t[0], 0, 1000, HOST, 1);
  want[0] = HOLD;
  CHECK_STATES();
  CHECK_OK(gemini_phase_set(w.mgr, GEMINI_PHASE_BACKWARD));
  world_fill(&w, t[1], 0, 1000, DEVICE, 2);
  want[1] = BACKWARD;
  CHECK_STATES();
  CHECK_OK(gemini_tensor_state_set(w.mgr, t[1], READY));
  want[1] = READY;
  CHECK_OK(gemini_phase_set(w.mgr, GEMINI_PHASE_FORWARD));
  world_fill(&w, t[2], 0, 2000, HOST, 3);
  want[2] = FORWARD;
  CHECK_STATES();
  gemini_access_t a = world_whole(t[3], BOTH, HOST);
  CHECK_OK(gemini_acquire(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  want[3] = COMPUTE;
  CHECK_STATES();
  CHECK_EQ(world_tensor_info(&w, t[0]).users, 0);
  CHECK_OK(gemini_phase_set(w.mgr, GEMINI_PHASE_NONE));
  CHECK_OK(gemini_release(w.mgr, &a, 1, GEMINI_STREAM_CALLER));
  want[3] = HOLD;
  CHECK_STATES();
  CHECK(world_holds(&w, t[1], 0, 1000, 2));
  want[1] = HOLD;
  CHECK(world_holds(&w, t[2], 0, 2000, 3));
  want[2] = HOLD;
  CHECK(world_holds(&w, t[3], 0, 2000, 0));
  CHECK_STATES();
#undef CHECK_STATES
  world_close(&w);
}

/* ---- gradients in their parameters' bytes */
typedef struct {
  world_t w;
  gemini_arena_t params, grads, master;
  gemini_tensor_t p[2], g[2];
} pair_t;
enum { PAIR_BYTES = 65536 + 4096 }; /* their bytes share a chunk */

static pair_t pair_open(void) {
  pair_t k = { .w = world_open(world_config(8, 16, 16)) };
  k.params = world_arena(&k.w, GEMINI_KIND_PARAM, 2, "params", 0, 0);
  k.grads = world_arena(&k.w, GEMINI_KIND_GRAD, 2, "grads", 0, k.params);
  k.master = world_arena(&k.w, GEMINI_KIND_MASTER, 2, "master", k.params, 0);
  for (int i = 0; i < 2; i++) {
    char name[16];
    snprintf(name, sizeof name, "p%d", i);
    k.p[i] = world_tensor(&k.w, k.params, name, PAIR_BYTES);
    CHECK_OK(gemini_tensor_counterpart(k.w.mgr, k.p[i], k.grads, &k.g[i]));
    world_fill(&k.w, k.p[i], 0, PAIR_BYTES, i ? HOST : DEVICE, 10 + (uint64_t)i);
  }
  return k;
}

/* Offset of the first byte that differs, or -1. */
static int64_t differs_at(const void *a, const void *b, uint64_t size) {
  for (uint64_t i = 0; i < size; i++)
    if (((const uint8_t *)a)[i] != ((const uint8_t *)b)[i]) return (int64_t)i;
  return -1;
}

/* Neither read, nor read and written, nor written in part; and that changes nothing. */
static void check_taken(pair_t *k, gemini_tensor_t t) {
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    gemini_access_t wrong[] = { world_whole(t, READ, tier), world_whole(t, BOTH, tier),
                                world_part(t, 0, PAIR_BYTES - 2, WRITE, tier), world_part(t, 2, 64, READ, tier),
                                world_part(t, PAIR_BYTES - 2, 2, WRITE, tier) };
    for (int i = 0; i < 5; i++) {
      figures_t stats = world_stats(&k->w), after;
      gemini_tensor_info_t info = world_tensor_info(&k->w, t), now;
      CHECK_STATUS(gemini_acquire(k->w.mgr, &wrong[i], 1, k->w.stream), GEMINI_ERR_STATE);
      CHECK(strstr(world_error().message, info.name) && strstr(world_error().message, "gradient"));
      after = world_stats(&k->w);
      now = world_tensor_info(&k->w, t);
      stats.pending_updates = after.pending_updates = 0; /* late ones go on meanwhile */
      stats.pending_updates = after.pending_updates = 0; /* workers go on meanwhile */
      CHECK_EQ(differs_at(&stats, &after, sizeof stats), -1);
      CHECK_EQ(differs_at(&info, &now, sizeof info), -1);
    }
  }
}

static void test_reusing_gradient_takes_the_place_of_its_parameter(void) {
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    for (uint32_t place = DEVICE; place <= FILES; place++) {
      pair_t k = pair_open();
      gemini_access_t all = world_whole(k.params, READ, place);
      CHECK_OK(gemini_move(k.w.mgr, &all, 1));
      for (int i = 0; i < 2; i++) check_taken(&k, k.g[i]);
      CHECK_EQ(world_tensor_info(&k.w, k.g[0]).state, FREE);
      CHECK_EQ(world_tensor_info(&k.w, k.p[0]).address, world_tensor_info(&k.w, k.g[0]).address);
      /* A batch that fails takes nothing. */
      gemini_access_t batch[2] = { world_whole(k.g[0], WRITE, tier), world_whole(k.g[1], READ, tier) };
      CHECK_STATUS(gemini_acquire(k.w.mgr, batch, 2, k.w.stream), GEMINI_ERR_STATE);
      check_taken(&k, k.g[0]);
      CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, 10));
      /* A whole write does, of that tensor only. */
      world_fill(&k.w, k.g[0], 0, PAIR_BYTES, tier, 20);
      check_taken(&k, k.p[0]);
      check_taken(&k, k.g[1]);
      CHECK_EQ(world_tensor_info(&k.w, k.p[0]).state, HOLD); /* its state is its own */
      CHECK_OK(gemini_move(k.w.mgr, &all, 1));
      CHECK(world_holds(&k.w, k.g[0], 0, PAIR_BYTES, 20));
      CHECK(world_holds(&k.w, k.p[1], 0, PAIR_BYTES, 11));
      world_fill(&k.w, k.g[0], 2, 64, tier, 21); /* once it is there, it is written like any tensor */
      CHECK(world_holds(&k.w, k.g[0], 2, 64, 21));
      /* And the parameter's whole write takes it back. */
      world_fill(&k.w, k.p[0], 0, PAIR_BYTES, tier, 12);
      check_taken(&k, k.g[0]);
      CHECK_OK(gemini_move(k.w.mgr, &all, 1));
      CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, 12));
      CHECK(world_holds(&k.w, k.p[1], 0, PAIR_BYTES, 11));
      world_close(&k.w);
    }
  }
}

/* params = gradient's bytes + 1, as a byte-wise update may. */
static void add_one(void *user, const gemini_update_span_t *span) {
  (void)user;
  if (span->tier != GEMINI_TIER_HOST) return;
  for (uint64_t i = 0; i < 2 * span->element_count; i++)
    ((uint8_t *)span->ptr[0])[i] = (uint8_t)(((uint8_t *)span->ptr[1])[i] + 1);
}

static void test_reusing_gradient_is_given_back_by_an_update(void) {
  for (int late = 0; late < 2; late++) {
    for (int reads = 0; reads < 2; reads++) { /* the gradients are read, or only overwritten by their parameters */
      pair_t k = pair_open();
      world_fill(&k.w, k.g[0], 0, PAIR_BYTES, DEVICE, 20);
      CHECK_OK(gemini_tensor_state_set(k.w.mgr, k.g[0], READY));
      const gemini_arena_t arenas[] = { k.params, reads ? k.grads : k.master };
      const uint32_t modes[] = { WRITE, READ };
      gemini_update_t u = GEMINI_UPDATE_INIT;
      u.flags = late ? GEMINI_UPDATE_LATE : 0;
      u.arenas = arenas;
      u.modes = modes;
      u.arena_count = 2;
      u.fn = add_one;
      gemini_access_t held = world_whole(k.g[0], READ, HOST);
      CHECK_OK(gemini_acquire(k.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
      CHECK_STATUS(gemini_update(k.w.mgr, &u), GEMINI_ERR_BUSY);
      CHECK_OK(gemini_release(k.w.mgr, &held, 1, GEMINI_STREAM_CALLER));
      check_taken(&k, k.p[0]);
      CHECK_OK(gemini_update(k.w.mgr, &u));
      for (int i = 0; i < 2; i++) { /* from the call on, whether or not its spans have run */
        check_taken(&k, k.g[i]);
        CHECK_EQ(world_tensor_info(&k.w, k.p[i]).state, HOLD);
        gemini_access_t a = world_whole(k.p[i], READ, i ? HOST : DEVICE);
        CHECK_OK(gemini_acquire(k.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
        for (uint64_t b = 0; b < PAIR_BYTES; b++) /* p1's gradient was not written: zero */
          CHECK_EQ(((uint8_t *)a.ptr)[b], (uint8_t)(world_byte(reads && !i ? 20 : 0, b) + 1));
        CHECK_OK(gemini_release(k.w.mgr, &a, 1, GEMINI_STREAM_CALLER));
      }
      world_close(&k.w);
    }
  }
}

/* Loads and zeros of the whole say whose the bytes are, as whole writes do. */
static void test_reusing_gradient_comes_and_goes_by_load_and_zero(void) {
  pair_t k = pair_open();
  FILE *file = content_file(PAIR_BYTES);
  gemini_access_t p = world_whole(k.p[0], READ, HOST), g = world_whole(k.g[0], READ, HOST);
  CHECK_OK(gemini_load(k.w.mgr, &g, fileno(file), 0));
  check_taken(&k, k.p[0]);
  check_taken(&k, k.g[1]);
  CHECK(world_holds(&k.w, k.g[0], 0, PAIR_BYTES, SEED));
  CHECK_OK(gemini_zero(k.w.mgr, &g)); /* it stays one */
  check_taken(&k, k.p[0]);
  CHECK(world_holds(&k.w, k.g[0], 0, PAIR_BYTES, 0));
  CHECK_OK(gemini_load(k.w.mgr, &p, fileno(file), 0));
  check_taken(&k, k.g[0]);
  CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, SEED));
  CHECK_OK(gemini_tensor_state_set(k.w.mgr, k.g[0], FREE)); /* drops nothing: there is no gradient */
  CHECK_OK(gemini_zero(k.w.mgr, &g));
  CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, SEED));
  world_fill(&k.w, k.g[0], 0, PAIR_BYTES, DEVICE, 20);
  CHECK_OK(gemini_zero(k.w.mgr, &p));
  check_taken(&k, k.g[0]);
  CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, 0));
  world_fill(&k.w, k.g[0], 0, PAIR_BYTES, DEVICE, 20);
  CHECK_OK(gemini_tensor_state_set(k.w.mgr, k.p[0], FREE));
  check_taken(&k, k.g[0]);
  CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, 0));
  CHECK(world_holds(&k.w, k.p[1], 0, PAIR_BYTES, 11));
  CHECK(!fclose(file));
  world_close(&k.w);
}

/* Whoever asks for a parameter does not get a gradient, nor the other way round, by other calls than acquire either. */
static void test_taken_bytes_are_neither_stored_nor_counted_nor_written_in_part(void) {
  pair_t k = pair_open();
  world_fill(&k.w, k.g[0], 0, PAIR_BYTES, HOST, 20);
  FILE *file = tmpfile();
  CHECK(file);
  const int fd = fileno(file);
  double norm = -1;
  for (int i = 0; i < 2; i++) { /* p0 is taken; g1 is not there */
    gemini_access_t a = world_whole(i ? k.g[1] : k.p[0], READ, HOST), part = world_part(a.object, 0, 64, READ, HOST);
    CHECK_STATUS(gemini_store(k.w.mgr, &a, fd, 0), GEMINI_ERR_STATE);
    CHECK_STATUS(gemini_store(k.w.mgr, &part, fd, 0), GEMINI_ERR_STATE);
    CHECK_STATUS(gemini_load(k.w.mgr, &part, fd, 0), GEMINI_ERR_STATE);
    if (i) continue;
    CHECK_STATUS(gemini_norm(k.w.mgr, &a, GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm), GEMINI_ERR_STATE);
    CHECK_STATUS(gemini_zero(k.w.mgr, &part), GEMINI_ERR_STATE);
  }
  CHECK(!fclose(file));
  CHECK(norm == -1);
  CHECK(world_holds(&k.w, k.g[0], 0, PAIR_BYTES, 20));
  CHECK(world_holds(&k.w, k.p[1], 0, PAIR_BYTES, 11));
  world_close(&k.w);
}

/* A range of an arena stands for the tensors in it. p0 is taken by its gradient, p1 is not. */
static gemini_status_t range_acquire(pair_t *k, gemini_access_t range) {
  gemini_status_t status = gemini_acquire(k->w.mgr, &range, 1, GEMINI_STREAM_CALLER);
  if (!status) CHECK_OK(gemini_release(k->w.mgr, &range, 1, GEMINI_STREAM_CALLER));
  return status;
}
static void check_ranges(pair_t *k, uint32_t tier, int fd) {
  const uint64_t n = PAIR_BYTES;
  const gemini_access_t wrong[] = {
    world_whole(k->params, READ, tier),       world_whole(k->params, BOTH, tier),
    world_part(k->params, 0, n, READ, tier),  world_part(k->params, n - 64, 128, READ, tier),
    world_part(k->params, 2, n, WRITE, tier), world_part(k->params, n - 64, 128, WRITE, tier),
    world_whole(k->grads, READ, tier),        world_whole(k->grads, BOTH, tier),
    world_part(k->grads, n, n, READ, tier),   world_part(k->grads, n - 64, 128, WRITE, tier),
  };
  for (int i = 0; i < 10; i++) {
    CHECK_STATUS(range_acquire(k, wrong[i]), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, i < 6 ? "parameter p0 cannot be used" : "gradient of p1 cannot be used");
  }
  CHECK_OK(range_acquire(k, world_part(k->params, n, n, BOTH, tier)));
  CHECK_OK(range_acquire(k, world_part(k->grads, 0, n, BOTH, tier)));
  CHECK_OK(range_acquire(k, world_part(k->grads, 2, 64, WRITE, tier)));
  const gemini_access_t part[] = { wrong[3], wrong[4], wrong[9], world_part(k->params, 64, 2, 0, tier) };
  for (int i = 0; i < 4; i++) {
    CHECK_STATUS(gemini_load(k->w.mgr, &part[i], fd, 0), GEMINI_ERR_STATE);
    if (i != 2) CHECK_STATUS(gemini_zero(k->w.mgr, &part[i]), GEMINI_ERR_STATE);
  }
  double norm = -1;
  for (int i = 0; i < 5; i++)
    CHECK_STATUS(gemini_norm(k->w.mgr, &wrong[i], GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm), GEMINI_ERR_STATE);
  CHECK(norm == -1);
  CHECK_OK(gemini_norm(k->w.mgr, &wrong[6], GEMINI_DTYPE_BF16, GEMINI_STREAM_CALLER, &norm)); /* of p1's: zeros */
  CHECK_OK(gemini_store(k->w.mgr, &wrong[0], fd, 0));                                         /* as it is */
  for (int i = 0; i < 2; i++) { /* both arenas, in either order; an arena and a tensor */
    gemini_access_t both[] = { world_whole(i ? k->params : k->grads, WRITE, tier),
                               world_whole(i ? k->grads : k->params, WRITE, tier) };
    CHECK_STATUS(gemini_acquire(k->w.mgr, both, 2, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, "share their bytes");
    both[1] = world_whole(i ? k->g[1] : k->p[1], WRITE, tier);
    CHECK_STATUS(gemini_acquire(k->w.mgr, both, 2, GEMINI_STREAM_CALLER), GEMINI_ERR_STATE);
    CHECK_SAYS(world_error().message, "writes parameter p1");
  }
  CHECK(world_holds_on(&k->w, k->g[0], 0, n, tier, 20));
  CHECK(world_holds_on(&k->w, k->p[1], 0, n, tier, 11));
}
static void test_ranges_of_arenas_are_refused_where_bytes_are_taken(void) {
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    pair_t k = pair_open();
    FILE *file = content_file(2 * PAIR_BYTES);
    world_fill(&k.w, k.g[0], 0, PAIR_BYTES, tier, 20);
    check_ranges(&k, tier, fileno(file));
    CHECK(!fclose(file));
    world_close(&k.w);
  }
}

/* Ranges that are overwritten whole belong to the arena that they were written through, tensor by tensor. */
static void test_ranges_of_arenas_that_are_overwritten_change_hands(void) {
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    pair_t k = pair_open();
    FILE *file = content_file(2 * PAIR_BYTES);
    gemini_access_t params = world_whole(k.params, READ, tier), grads = world_whole(k.grads, WRITE, tier);
    world_fill(&k.w, k.g[0], 0, PAIR_BYTES, tier, 20);
    CHECK_OK(gemini_load(k.w.mgr, &params, fileno(file), 0)); /* discards the gradient */
    for (int i = 0; i < 2; i++) check_taken(&k, k.g[i]);
    CHECK(world_holds(&k.w, k.p[0], 0, PAIR_BYTES, SEED));
    CHECK_OK(range_acquire(&k, grads));
    for (int i = 0; i < 2; i++) check_taken(&k, k.p[i]);
    CHECK_OK(range_acquire(&k, world_part(k.params, 0, PAIR_BYTES, WRITE, tier)));
    check_taken(&k, k.g[0]);
    check_taken(&k, k.p[1]);
    CHECK_OK(gemini_zero(k.w.mgr, &params));
    for (int i = 0; i < 2; i++) check_taken(&k, k.g[i]);
    CHECK(world_holds(&k.w, k.p[1], 0, PAIR_BYTES, 0));
    CHECK_OK(gemini_load(k.w.mgr, &grads, fileno(file), 0));
    for (int i = 0; i < 2; i++) check_taken(&k, k.p[i]);
    CHECK(!fclose(file));
    world_close(&k.w);
  }
}

int main(void) {
  RUN(test_transitions_of_a_tensor_on_the_device_follow_the_table);
  RUN(test_transitions_of_a_tensor_on_the_host_follow_the_table);
  RUN(test_transitions_of_a_tensor_in_files_follow_the_table);
  RUN(test_transitions_of_a_counterpart_follow_the_table);
  RUN(test_transitions_of_a_reusing_gradient_follow_the_table);
  RUN(test_state_is_that_of_the_phase_of_the_last_release);
  RUN(test_other_calls_leave_states_alone);
  RUN(test_free_reads_as_zero_and_holds_no_memory);
  RUN(test_counterparts_have_states_and_bytes_of_their_own);
  RUN(test_reusing_gradient_takes_the_place_of_its_parameter);
  RUN(test_reusing_gradient_is_given_back_by_an_update);
  RUN(test_reusing_gradient_comes_and_goes_by_load_and_zero);
  RUN(test_load_makes_free_what_it_reaches_hold);
  RUN(test_taken_bytes_are_neither_stored_nor_counted_nor_written_in_part);
  RUN(test_ranges_of_arenas_are_refused_where_bytes_are_taken);
  RUN(test_ranges_of_arenas_that_are_overwritten_change_hands);
  RUN(test_table_in_the_documentation_is_this_one);
  return check_done();
}
