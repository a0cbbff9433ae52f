/* Files that are read are fed with damaged ones: traces, and the index of kept blocks. SPDX-License-Identifier: Apache-2.0
 *
 * Valid files are mutated: bits, bytes, numbers, lengths, lines and entries, splices of two. Whatever is read is refused
 * with an error of its own or taken; it never hangs or crashes, and the sanitizers find nothing. What is taken must be
 * valid as a second reader, written from the description of the format, understands it, and what is refused invalid,
 * except where only the library can know (a trace whose plan does not fit).
 *
 * GEMINI_FUZZ_SECONDS  for both kinds of files together, 4 by default
 * GEMINI_STRESS_SEED   seed, otherwise the time
 * GEMINI_FUZZ_STEP     begin with this step of that seed, as a failure names it */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../integration/world.h"
#include "../seed.h"
#include "base/status.h"
#include "gemini/plan.h"
#include "io/checksum.h"
#include "io/index.h"
#include "io/store.h"

enum { MOST_BYTES = 1 << 16, HANG_S = 300 };
static uint64_t seed, step, first_step;
static double seconds, slowest_s;
static uint64_t slowest_step;
static char dir[64], path[160];

/* ---- failures; the file that caused one stays */
static void print_again(void) {
  fprintf(stderr, "  again: GEMINI_FUZZ_STEP=%" PRIu64 " GEMINI_STRESS_SEED=%" PRIu64 " %s\n", step, seed, seed_rest);
}
static _Noreturn void fail(int line, const char *what) {
  fprintf(stderr, "%s:%d: seed %" PRIu64 ", step %" PRIu64 ": %s: %s (%s is the file)\n", __FILE__, line, seed, step,
          what, world_error().message, path);
  print_again();
  _exit(1);
}
#define NEED(condition)                           \
  do {                                            \
    if (!(condition)) fail(__LINE__, #condition); \
  } while (0)
static void hung(int number) {
  (void)number;
  fprintf(stderr, "seed %" PRIu64 ", step %" PRIu64 ": hangs on %s\n", seed, step, path);
  print_again();
  _exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void timed(double begin) {
  if (now() - begin <= slowest_s) return;
  slowest_s = now() - begin;
  slowest_step = step;
}

static void write_file(const char *name, const uint8_t *bytes, uint64_t size) {
  /* Without O_TRUNC, for which some file systems write to the disk at once. */
  int fd = open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  NEED(fd >= 0);
  NEED(write(fd, bytes, size) == (ssize_t)size);
  NEED(!ftruncate(fd, (off_t)size));
  NEED(!close(fd));
}
static uint64_t read_file(const char *name, uint8_t *bytes) {
  int fd = open(name, O_RDONLY | O_CLOEXEC);
  NEED(fd >= 0);
  ssize_t size = read(fd, bytes, MOST_BYTES);
  NEED(size >= 0 && size < MOST_BYTES);
  close(fd);
  return (uint64_t)size;
}

/* ---- mutations */
static uint64_t below(uint64_t *random, uint64_t count) { return (check_random(random) >> 16) % count; }

/* Numbers at which something may turn over; exact: only such that are near a given one. */
static uint64_t odd_number(uint64_t *random, uint64_t near) {
  static const uint64_t list[] = { 0,
                                   1,
                                   2,
                                   3,
                                   24,
                                   80,
                                   255,
                                   4096,
                                   65535,
                                   65536,
                                   INT32_MAX,
                                   UINT64_C(1) << 31,
                                   UINT32_MAX,
                                   UINT64_C(1) << 32,
                                   (UINT64_C(1) << 32) + 1,
                                   UINT64_C(1) << 40,
                                   UINT64_C(1) << 46,
                                   UINT64_C(1) << 56,
                                   UINT64_C(1) << 62,
                                   INT64_MAX,
                                   UINT64_C(1) << 63,
                                   UINT64_MAX - 1,
                                   UINT64_MAX };
  switch (below(random, 4)) {
  case 0: return list[below(random, sizeof list / sizeof *list)];
  case 1: return near + below(random, 9) - 4;
  case 2: return near ^ UINT64_C(1) << below(random, 64);
  default: return check_random(random) >> below(random, 64);
  }
}

/* Replaces size bytes at at by those of with, as far as there is room. */
static uint64_t replace(uint8_t *bytes, uint64_t length, uint64_t at, uint64_t size, const void *with, uint64_t more) {
  if (at > length) at = length;
  if (size > length - at) size = length - at;
  if (length - size + more > MOST_BYTES - 1) return length;
  memmove(bytes + at + more, bytes + at + size, length - at - size);
  memcpy(bytes + at, with, more);
  return length - size + more;
}

/* Of any file. */
static uint64_t mutate_bytes(uint8_t *bytes, uint64_t length, const uint8_t *other, uint64_t other_length,
                             uint64_t *random) {
  uint64_t at = length ? below(random, length) : 0;
  uint8_t piece[64];
  for (int i = 0; i < 64; i++) piece[i] = (uint8_t)(check_random(random) >> 40);
  switch (below(random, 7)) {
  case 0:
    if (length) bytes[at] ^= (uint8_t)(1 << below(random, 8));
    return length;
  case 1:
    if (length) bytes[at] = piece[0];
    return length;
  case 2: return at; /* cut off */
  case 3: return replace(bytes, length, at, below(random, 40), piece, 0);
  case 4: return replace(bytes, length, at, 0, piece, 1 + below(random, 60));
  case 5: { /* what is there once more */
    uint8_t again[2048];
    uint64_t size = 1 + below(random, sizeof again);
    if (size > length - at) size = length - at;
    memcpy(again, bytes + at, size);
    return replace(bytes, length, at, 0, again, size);
  }
  default: { /* the rest of another */
    uint64_t from = below(random, other_length);
    return replace(bytes, length, at, length - at, other + from, other_length - from);
  }
  }
}

/* ---- traces */
enum { TRACES = 3, LINE = 2048 };
static uint8_t traces[TRACES][MOST_BYTES];
static uint64_t trace_sizes[TRACES];

typedef struct net {
  world_t w;
  gemini_arena_t params, grads, masters;
  gemini_tensor_t layers[4];
} net_t;

static net_t net_open(void) {
  net_t n = { .w = world_open(world_config(12, 64, 0)) };
  n.params = world_arena(&n.w, GEMINI_KIND_PARAM, 2, "params of 100%", 0, 0);
  n.grads = world_arena(&n.w, GEMINI_KIND_GRAD, 2, "grads", n.params, n.params);
  n.masters = world_arena(&n.w, GEMINI_KIND_MASTER, 4, "masters", n.params, 0);
  for (int i = 0; i < 4; i++) {
    char name[32];
    snprintf(name, sizeof name, "layer %d", i);
    n.layers[i] = world_tensor(&n.w, n.params, name, (uint64_t)(i + 1) * 40000);
    world_fill(&n.w, n.layers[i], 0, (uint64_t)(i + 1) * 40000, GEMINI_TIER_HOST, (uint64_t)i + 1);
  }
  return n;
}

static void no_change(void *user, const gemini_update_span_t *span) {
  (void)user;
  (void)span;
}
/* One iteration; shape: which of its ops are there. */
static void net_step(net_t *n, int shape) {
  CHECK_OK(gemini_iteration_begin(n->w.mgr));
  for (int i = 0; i < 4; i++) {
    if (shape == 1 && i == 2) continue;
    char name[32];
    snprintf(name, sizeof name, "op %d%%", i);
    CHECK_OK(gemini_op_begin(n->w.mgr, name, n->w.stream));
    gemini_access_t a[2] = { world_whole(n->layers[i], GEMINI_READ, GEMINI_TIER_DEVICE),
                             world_whole(n->layers[shape], GEMINI_READ_WRITE, GEMINI_TIER_DEVICE) };
    uint32_t count = shape == 2 && i != shape ? 2 : 1;
    CHECK_OK(gemini_acquire(n->w.mgr, a, count, n->w.stream));
    void *work;
    CHECK_OK(gemini_alloc(n->w.mgr, 3000 + 1000 * (uint64_t)i, n->w.stream, &work));
    CHECK_OK(gemini_free(n->w.mgr, work, n->w.stream));
    CHECK_OK(gemini_release(n->w.mgr, a, count, n->w.stream));
    CHECK_OK(gemini_op_end(n->w.mgr));
  }
  gemini_arena_t arenas[] = { n->params, n->masters };
  uint32_t modes[] = { GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.flags = GEMINI_UPDATE_LATE;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 2;
  u.stream = n->w.stream;
  u.fn = no_change;
  if (shape != 1) CHECK_OK(gemini_update(n->w.mgr, &u));
  CHECK_OK(gemini_iteration_end(n->w.mgr));
  CHECK_OK(gemini_update_wait(n->w.mgr));
}

/* A number as docs/trace.md means it: digits, nothing else, of what fits 64 bits. */
static bool number_in(const char **at, char end, uint64_t most) {
  uint64_t value = 0;
  const char *c = *at;
  if (*c < '0' || *c > '9') return false;
  for (; *c >= '0' && *c <= '9'; c++) {
    if (value > (UINT64_MAX - (uint64_t)(*c - '0')) / 10) return false;
    value = value * 10 + (uint64_t)(*c - '0');
  }
  if (*c != end || value > most) return false;
  *at = c + (end != 0);
  return true;
}
static bool name_in(const char *c) {
  if (!*c) return false;
  for (; *c; c++) {
    if (*c <= ' ' || *c > '~') return false;
    if (*c == '%' && (!strchr("0123456789ABCDEFabcdef", c[1]) || !c[1] || !c[2] ||
                      !strchr("0123456789ABCDEFabcdef", c[2]) || (c[1] == '0' && c[2] == '0')))
      return false;
  }
  return true;
}
/* Is every line of the form that docs/trace.md gives? Which numbers fit the manager, the library alone knows. */
static const char *trace_fault(const uint8_t *bytes, uint64_t size) {
  static char line[MOST_BYTES];
  bool ended = false;
  uint64_t count = 0;
  if (memchr(bytes, 0, size)) return "a NUL";
  for (uint64_t at = 0; at < size;) {
    const uint8_t *end = memchr(bytes + at, '\n', size - at);
    if (!end || ended) return "no end, or more after it";
    uint64_t length = (uint64_t)(end - bytes) - at;
    memcpy(line, bytes + at, length);
    line[length] = 0;
    at += length + 1;
    const char *c = line;
    bool good = false;
    if (!count++) {
      good = !strcmp(line, "gemini-trace 1");
    } else if (!strcmp(line, "end")) {
      good = ended = true;
    } else if (!strncmp(line, "budget ", 7)) {
      c += 7;
      good = number_in(&c, ' ', UINT64_MAX) && number_in(&c, 0, UINT64_MAX);
    } else if (!strncmp(line, "rates ", 6)) {
      c += 6;
      good = number_in(&c, ' ', UINT64_MAX) && number_in(&c, ' ', UINT64_MAX) && number_in(&c, ' ', UINT64_MAX) &&
             number_in(&c, 0, UINT64_MAX);
    } else if (!strncmp(line, "files ", 6)) {
      c += 6;
      good = number_in(&c, ' ', UINT64_MAX) && number_in(&c, 0, UINT64_MAX);
    } else if (!strncmp(line, "outside ", 8)) {
      c += 8;
      good = number_in(&c, 0, UINT64_MAX);
    } else if (!strncmp(line, "arena ", 6)) {
      c += 6;
      good = true;
      for (int i = 0; i < 5; i++) good = good && number_in(&c, ' ', UINT32_MAX);
      good = good && number_in(&c, ' ', UINT64_MAX) && name_in(c);
    } else if (!strncmp(line, "op ", 3)) {
      c += 3;
      good = number_in(&c, ' ', 3) && number_in(&c, ' ', UINT64_MAX) && number_in(&c, ' ', UINT64_MAX) &&
             number_in(&c, ' ', UINT64_MAX) && name_in(c);
    } else if (!strncmp(line, "use ", 4)) {
      c += 4;
      good = number_in(&c, ' ', UINT32_MAX) && number_in(&c, ' ', UINT64_MAX) && number_in(&c, ' ', UINT64_MAX) &&
             number_in(&c, 0, 3);
    } else if (!strncmp(line, "update ", 7)) {
      c += 7;
      good = number_in(&c, ' ', UINT64_MAX) && number_in(&c, ' ', UINT64_MAX);
      while (good && strchr(c, ' ')) good = number_in(&c, ':', UINT32_MAX) && number_in(&c, ' ', 3);
      good = good && number_in(&c, ':', UINT32_MAX) && number_in(&c, 0, 3);
    }
    if (!good) return line;
  }
  return ended ? NULL : "no end";
}

/* Of text: lines, and numbers in them. */
static uint64_t mutate_text(uint8_t *bytes, uint64_t length, const uint8_t *other, uint64_t other_length,
                            uint64_t *random) {
  uint64_t at = length ? below(random, length) : 0, begin = at, end = at;
  while (begin && bytes[begin - 1] != '\n') begin--;
  while (end < length && bytes[end] != '\n') end++;
  if (end < length) end++;
  switch (below(random, 8)) {
  case 0: return replace(bytes, length, begin, end - begin, "", 0);
  case 1: { /* a line of the other file, before or for this one */
    uint64_t from = below(random, other_length), to = from;
    while (from && other[from - 1] != '\n') from--;
    while (to < other_length && other[to] != '\n') to++;
    if (to < other_length) to++;
    return replace(bytes, length, begin, below(random, 2) ? end - begin : 0, other + from, to - from);
  }
  case 2: { /* the same line again */
    uint8_t line[LINE];
    if (end - begin > LINE) return length;
    memcpy(line, bytes + begin, end - begin);
    return replace(bytes, length, begin, 0, line, end - begin);
  }
  case 3: { /* a name, or line, that is too long */
    uint8_t word[1500];
    memset(word, below(random, 2) ? 'x' : '%', sizeof word);
    return replace(bytes, length, at, 0, word, 1 + below(random, sizeof word));
  }
  case 4: return replace(bytes, length, at, 1, below(random, 2) ? "-" : " ", 1);
  default: { /* a number */
    while (at < end && (bytes[at] < '0' || bytes[at] > '9')) at++;
    uint64_t digits = at;
    while (digits < end && bytes[digits] >= '0' && bytes[digits] <= '9') digits++;
    char text[64];
    static const char *const signs[] = { "", "", "", "", "-", "+", "0", "99999999999999999999" };
    uint64_t near = digits > at ? strtoull((const char *)bytes + at, NULL, 10) : 0;
    int n = snprintf(text, sizeof text, "%s%" PRIu64, signs[below(random, 8)], odd_number(random, near));
    return replace(bytes, length, at, digits - at, text, (uint64_t)n);
  }
  }
}

/* Forecasts make the arenas that a file names. Large chunks, so that large arenas are no large tables. */
static void check_forecast(uint64_t *random) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_forecast_t f = GEMINI_FORECAST_INIT;
  c.device_bytes = UINT64_C(1) << (20 + below(random, 20));
  c.host_bytes = UINT64_C(1) << (20 + below(random, 20));
  c.file_bytes = below(random, 2) ? UINT64_C(1) << 36 : 0;
  c.chunk_bytes = UINT64_C(1) << 28;
  c.update_threads = 1;
  gemini_status_t status = gemini_plan_forecast(&c, path, &f, 0, NULL, NULL);
  NEED(!status || status == GEMINI_ERR_FORMAT || status == GEMINI_ERR_INVALID || status == GEMINI_ERR_OOM_SYSTEM);
  if (!status) NEED(f.device_bytes <= c.device_bytes && f.step_ns >= f.compute_ns);
}

static void check_trace(net_t *n, const uint8_t *bytes, uint64_t size, uint64_t *taken, uint64_t *random) {
  write_file(path, bytes, size);
  alarm(HANG_S);
  if (below(random, 16) == 0) check_forecast(random);
  double begin = now();
  gemini_status_t status = gemini_trace_load(n->w.mgr, path);
  timed(begin);
  if (status) {
    NEED(status == GEMINI_ERR_FORMAT || status == GEMINI_ERR_OOM_DEVICE || status == GEMINI_ERR_STATE ||
         status == GEMINI_ERR_OOM_HOST || status == GEMINI_ERR_OOM_SYSTEM);
    if (status == GEMINI_ERR_FORMAT) NEED(strstr(world_error().message, path));
    return;
  }
  const char *fault = trace_fault(bytes, size);
  if (fault) {
    fprintf(stderr, "taken although malformed: %s\n", fault);
    fail(__LINE__, "a malformed trace was taken");
  }
  ++*taken;
  /* What it is taken for can be saved and loaded, and is the same then. */
  static uint8_t once[MOST_BYTES], twice[MOST_BYTES];
  char again[180];
  snprintf(again, sizeof again, "%s.again", path);
  NEED(!gemini_trace_save(n->w.mgr, again));
  uint64_t once_size = read_file(again, once);
  NEED(!trace_fault(once, once_size));
  NEED(!gemini_trace_load(n->w.mgr, again));
  NEED(!gemini_trace_save(n->w.mgr, again));
  NEED(read_file(again, twice) == once_size && !memcmp(once, twice, once_size));
  unlink(again);
  uint64_t length;
  NEED(!gemini_plan_explain(n->w.mgr, 0, NULL, &length));
  /* And its plan, which may be of another iteration, does no harm. */
  if (below(random, 8) == 0) {
    net_step(n, (int)below(random, TRACES));
    for (uint64_t i = 0; i < 4; i++) NEED(world_holds(&n->w, n->layers[i], 0, (i + 1) * 40000, i + 1));
  }
  alarm(0);
}

/* Puts other numbers in the place of those that were measured, so that a seed gives the same files every time. */
static uint64_t without_measures(uint8_t *bytes, uint64_t size) {
  static char text[MOST_BYTES];
  uint64_t length = 0, ops = 0;
  bytes[size] = 0;
  for (char *line = strtok((char *)bytes, "\n"); line; line = strtok(NULL, "\n")) {
    unsigned phase;
    int rest = 0;
    if (!strncmp(line, "rates ", 6)) line = "rates 12000000000 11000000000 300 2";
    else if (!strncmp(line, "files ", 6)) line = "files 3000000000 2000000000";
    else if (!strncmp(line, "outside ", 8)) line = "outside 250000";
    char *at = text + length;
    if (sscanf(line, "op %u %*u%n", &phase, &rest) == 1 && rest)
      length += (uint64_t)sprintf(at, "op %u %u%s\n", phase, 100000 * (unsigned)++ops, line + rest);
    else length += (uint64_t)sprintf(at, "%s\n", line);
  }
  memcpy(bytes, text, length);
  return length;
}

static void test_fuzz_traces(void) {
  seed = seed_begin(__func__);
  snprintf(path, sizeof path, "%s/trace", dir);
  for (int shape = 0; shape < TRACES; shape++) {
    net_t n = net_open();
    net_step(&n, shape);
    net_step(&n, shape);
    CHECK_OK(gemini_trace_save(n.w.mgr, path));
    trace_sizes[shape] = read_file(path, traces[shape]);
    trace_sizes[shape] = without_measures(traces[shape], trace_sizes[shape]);
    CHECK(!trace_fault(traces[shape], trace_sizes[shape]));
    world_close(&n.w);
  }
  static uint8_t bytes[MOST_BYTES];
  uint64_t taken = 0;
  double end = now() + seconds / 2;
  net_t n = net_open();
  for (step = first_step; now() < end; step++) {
    uint64_t random = (seed + step * UINT64_C(0x9e3779b97f4a7c15)) | 1;
    check_random(&random);
    if (step % 500 == 499) { /* names of refused traces stay in the manager; and new ones are not cut yet */
      world_close(&n.w);
      n = net_open();
    }
    uint64_t which = below(&random, TRACES), other = below(&random, TRACES), size = trace_sizes[which];
    memcpy(bytes, traces[which], size);
    for (uint64_t k = below(&random, 4) + (step % 50 != 0); k; k--) {
      if (below(&random, 3)) size = mutate_text(bytes, size, traces[other], trace_sizes[other], &random);
      else size = mutate_bytes(bytes, size, traces[other], trace_sizes[other], &random);
    }
    check_trace(&n, bytes, size, &taken, &random);
  }
  alarm(0);
  world_close(&n.w);
  unlink(path);
  fprintf(stderr,
          "    %" PRIu64 " traces, of which %" PRIu64 " were taken; the longest took %.3f s, in step %" PRIu64 "\n",
          step - first_step, taken, slowest_s, slowest_step);
  CHECK(taken > 0);
}

/* ---- indices */
enum { INDICES = 3, BLOCK = 4096, BLOCKS = 40, HEADER = 80, ENTRY = 24 };
static uint8_t indices[INDICES][MOST_BYTES];
static uint64_t index_sizes[INDICES];

static uint64_t get_number(const uint8_t *bytes, int count) {
  uint64_t value = 0;
  while (count--) value = value << 8 | bytes[count];
  return value;
}
static void put_number(uint8_t *bytes, uint64_t value, int count) {
  for (int i = 0; i < count; i++) bytes[i] = (uint8_t)(value >> 8 * i);
}

/* The second reader: as the table in io/index.h says. */
static bool index_valid(const uint8_t *b, uint64_t size) {
  if (size < HEADER + 4 || memcmp(b, "gmiblock", 8) || get_number(b + 8, 4) != 1) return false;
  uint64_t files = get_number(b + 12, 4), whole = get_number(b + 16, 8), block = get_number(b + 24, 8),
           blocks = get_number(b + 32, 4), kept = get_number(b + 40, 4), sums = get_number(b + 44, 4),
           blob = get_number(b + 48, 8), number = get_number(b + 56, 8), highest = get_number(b + 64, 8);
  if (!files || files > 256 || whole != size || !block || block % 512 || block >> 63) return false;
  if (blocks == UINT32_MAX || blocks > INT64_MAX / block || get_number(b + 36, 4) || sums > 1 || !number) return false;
  if (get_number(b + 72, 8) || blob > size || kept > blocks || HEADER + kept * ENTRY + blob + 4 != size) return false;
  for (uint64_t i = 0; i < kept; i++) {
    const uint8_t *e = b + HEADER + i * ENTRY;
    uint64_t generation = get_number(e + 8, 8), at = get_number(e + 16, 4);
    if (!generation || generation > highest || at >= blocks || (!sums && get_number(e + 20, 4))) return false;
    for (uint64_t k = 0; k < i; k++)
      if (get_number(b + HEADER + k * ENTRY + 16, 4) == at) return false;
  }
  return get_number(b + size - 4, 4) == gmi_crc32c_tables(0, b, size - 4);
}

static uint64_t mutate_index(uint8_t *bytes, uint64_t length, const uint8_t *other, uint64_t other_length,
                             uint64_t *random) {
  static const struct {
    uint8_t at, size;
  } fields[] = { { 8, 4 },  { 12, 4 }, { 16, 8 }, { 24, 8 }, { 32, 4 }, { 36, 4 },
                 { 40, 4 }, { 44, 4 }, { 48, 8 }, { 56, 8 }, { 64, 8 }, { 72, 8 } };
  static const struct {
    uint8_t at, size;
  } entries[] = { { 0, 8 }, { 8, 8 }, { 16, 4 }, { 20, 4 } };
  if (length < HEADER + 4) return mutate_bytes(bytes, length, other, other_length, random);
  uint64_t count = (length - HEADER - 4) / ENTRY, k = below(random, 12), size;
  uint8_t *at;
  switch (below(random, 5)) {
  case 0:
    at = bytes + fields[k].at;
    size = fields[k].size;
    break;
  case 1:
  case 2:
    if (!count) return length;
    at = bytes + HEADER + below(random, count) * ENTRY + entries[k % 4].at;
    size = entries[k % 4].size;
    break;
  case 3: { /* an entry comes, with the header's numbers right: from elsewhere, or once more */
    if (!count) return length;
    uint8_t entry[ENTRY];
    memcpy(entry, bytes + HEADER + below(random, count) * ENTRY, ENTRY);
    if (below(random, 2)) put_number(entry + 16, below(random, BLOCKS + 5), 4);
    length = replace(bytes, length, HEADER, 0, entry, ENTRY);
    put_number(bytes + 40, get_number(bytes + 40, 4) + 1, 4);
    put_number(bytes + 16, length, 8);
    return length;
  }
  default: /* or goes */
    if (!count) return length;
    length = replace(bytes, length, HEADER, ENTRY, "", 0);
    put_number(bytes + 40, get_number(bytes + 40, 4) - 1, 4);
    put_number(bytes + 16, length, 8);
    return length;
  }
  put_number(at, odd_number(random, get_number(at, (int)size)), (int)size);
  return length;
}

static gemini_status_t open_kept(gmi_store_t **store_out) {
  gmi_store_config_t config = { .directories = dir,
                                .block_bytes = BLOCK,
                                .block_count = BLOCKS,
                                .engine_kind = GMI_ENGINE_THREADS,
                                .depth = 2,
                                .checksum = true,
                                .keep = true,
                                .checkpoint_name = "fuzz" };
  return gmi_store_open(&config, store_out);
}
static void block_bytes(uint8_t *buffer, uint32_t block) {
  for (uint32_t i = 0; i < BLOCK; i++) buffer[i] = world_byte(block + 1, i);
}

/* A store over an index that may be read: what it names is there, or refused, and life goes on. */
static void use_store(const gmi_index_t *x) {
  gmi_store_t *store;
  gemini_status_t status = open_kept(&store);
  if (status) {
    /* It is of other blocks, or of blocks past the file's end. */
    NEED(status == GEMINI_ERR_FORMAT || status == GEMINI_ERR_OOM_FILE || status == GEMINI_ERR_INVALID);
    return;
  }
  NEED(x->block_bytes == BLOCK && x->file_count == 1);
  const gmi_kept_t *kept;
  uint32_t count;
  const void *blob;
  uint64_t blob_size;
  NEED(!gmi_store_committed(store, &kept, &count, &blob, &blob_size));
  NEED(count == x->entry_count && blob_size == x->blob_bytes && !memcmp(blob, x->blob, blob_size));
  uint8_t *buffer = aligned_alloc(4096, BLOCK), *expected = malloc(BLOCK);
  NEED(buffer && expected);
  for (uint32_t i = 0; i < count; i++) {
    NEED(kept[i].block == x->entries[i].block && kept[i].key == x->entries[i].key);
    gmi_block_request_t r = { .block = kept[i].block, .buffer = buffer, .owner = "fuzz" };
    status = gmi_store_wait(store, &r);
    block_bytes(expected, kept[i].block);
    if (x->checksums) NEED(status ? status == GEMINI_ERR_FORMAT : !memcmp(buffer, expected, BLOCK));
    else NEED(!status);
  }
  uint32_t block;
  if (!gmi_store_take(store, &block)) {
    block_bytes(buffer, block);
    gmi_block_request_t r = { .block = block, .write = true, .buffer = buffer, .owner = "fuzz" };
    for (uint32_t i = 0; i < count; i++) NEED(kept[i].block != block);
    /* Into a block that the valid indices do not name, or its bytes are the same. */
    NEED(!gmi_store_wait(store, &r));
    r.write = false;
    NEED(!gmi_store_wait(store, &r));
  }
  free(buffer);
  free(expected);
  gmi_store_close(store);
}

static void test_fuzz_indices(void) {
  seed = seed_begin(__func__);
  snprintf(path, sizeof path, "%s/fuzz.index", dir);
  char chunks[160];
  snprintf(chunks, sizeof chunks, "%s/fuzz.0.chunks", dir);
  gmi_store_t *store;
  CHECK_OK(open_kept(&store));
  uint8_t *buffer = aligned_alloc(4096, BLOCK);
  CHECK(buffer);
  gmi_kept_t kept[BLOCKS];
  for (uint32_t i = 0; i < BLOCKS; i++) {
    CHECK_OK(gmi_store_take(store, &kept[i].block));
    kept[i].key = i * UINT64_C(0x123456789);
    kept[i].reserved = 0;
    block_bytes(buffer, kept[i].block);
    gmi_block_request_t r = { .block = kept[i].block, .write = true, .buffer = buffer, .owner = "fuzz" };
    CHECK_OK(gmi_store_wait(store, &r));
  }
  free(buffer);
  static const uint32_t counts[INDICES] = { BLOCKS, 5, 0 };
  for (int i = 0; i < INDICES; i++) {
    CHECK_OK(gmi_store_commit(store, kept + 10 * (i == 1), counts[i], traces[0], (uint64_t)i * 100));
    index_sizes[i] = read_file(path, indices[i]);
    CHECK(index_valid(indices[i], index_sizes[i]));
  }
  gmi_store_close(store);

  static uint8_t bytes[MOST_BYTES];
  uint64_t taken = 0, opened = 0;
  double end = now() + seconds / 2;
  for (step = first_step; now() < end; step++) {
    uint64_t random = (seed + step * UINT64_C(0x9e3779b97f4a7c15)) | 1;
    check_random(&random);
    uint64_t which = below(&random, INDICES), other = below(&random, INDICES), size = index_sizes[which];
    memcpy(bytes, indices[which], size);
    for (uint64_t k = below(&random, 4) + (step % 50 != 0); k; k--) {
      if (below(&random, 3)) size = mutate_index(bytes, size, indices[other], index_sizes[other], &random);
      else size = mutate_bytes(bytes, size, indices[other], index_sizes[other], &random);
    }
    /* Mostly, the checksum does not give it away. */
    if (below(&random, 10) && size >= 4) put_number(bytes + size - 4, gmi_crc32c(0, bytes, size - 4), 4);
    write_file(path, bytes, size);
    alarm(HANG_S);
    gmi_index_t x = { 0 };
    gemini_status_t status = gmi_index_read(&gmi_sys_real, path, &x);
    bool valid = index_valid(bytes, size);
    NEED(status == GEMINI_OK || status == GEMINI_ERR_FORMAT);
    NEED((status == GEMINI_OK) == valid);
    if (status) {
      NEED(strstr(world_error().message, path) && strstr(world_error().message, "byte "));
    } else {
      NEED(x.entry_count == get_number(bytes + 40, 4) && x.blob_bytes == get_number(bytes + 48, 8));
      for (uint32_t i = 0; i < x.entry_count; i++) {
        const uint8_t *e = bytes + HEADER + (uint64_t)i * ENTRY;
        NEED(x.entries[i].key == get_number(e, 8) && x.entries[i].generation == get_number(e + 8, 8));
        NEED(x.entries[i].block == get_number(e + 16, 4) && x.entries[i].checksum == get_number(e + 20, 4));
      }
      taken++;
    }
    if (!status || below(&random, 16) == 0) {
      if (!status) use_store(&x);
      else NEED(open_kept(&store) == GEMINI_ERR_FORMAT);
      opened++;
    }
    gmi_index_free(&x);
    /* Stores give back space behind their blocks. */
    NEED(!truncate(chunks, (off_t)BLOCKS * BLOCK));
  }
  alarm(0);
  fprintf(stderr, "    %" PRIu64 " indices, of which %" PRIu64 " were valid; %" PRIu64 " stores\n", step - first_step,
          taken, opened);
  CHECK(taken > 0);
  unlink(path);
  unlink(chunks);
}

int main(void) {
  const char *text = getenv("GEMINI_FUZZ_SECONDS");
  seconds = text ? strtod(text, NULL) : 4;
  first_step = seed_setting("GEMINI_FUZZ_STEP", 0);
  dir_make(dir);
  signal(SIGALRM, hung);
  RUN(test_fuzz_traces);
  RUN(test_fuzz_indices);
  CHECK_EQ(rmdir(dir), 0);
  return check_done();
}
