/* Every public function with arguments that are null, zero, huge, misaligned, foreign, destroyed or out of order: the
 * error that gemini.h names, words that say what was wrong, results untouched, nothing changed.
 * SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../check.h"
#include "gemini.h"

#define OK(call) CHECK_EQ(call, GEMINI_OK)
#define PATTERN UINT64_C(0x5a5a5a5a5a5a5a5a)
enum { WINDOW = 65536, TENSORS = 3, TENSOR_BYTES = 2 * WINDOW, NAMES = 64 };

/* ---- a world with one of everything, and its likeness */
typedef struct {
  gemini_manager_t mgr;
  gemini_arena_t params, grads, master, plain;
  gemini_tensor_t tensor[TENSORS], tied;
  gemini_stream_t stream;
  void *block;
  char folder[64];
} world_t;
static world_t w, foreign;
static gemini_manager_t closed_manager;
static gemini_arena_t destroyed_arena;
static gemini_tensor_t destroyed_tensor;
static gemini_stream_t destroyed_stream;

static gemini_config_t config_of(const char *folder) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  c.device_bytes = 16 * WINDOW;
  c.host_bytes = 32 * WINDOW;
  c.file_bytes = 16 * WINDOW;
  c.file_dir = folder;
  c.window_bytes = WINDOW;
  c.update_threads = 1;
  return c;
}

static gemini_arena_t arena_of(gemini_manager_t mgr, uint32_t kind, uint32_t element_bytes, gemini_arena_t like,
                               gemini_arena_t reuse) {
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t arena;
  c.kind = kind;
  c.element_bytes = element_bytes;
  c.capacity_bytes = 8 * WINDOW * element_bytes;
  c.like = like;
  c.reuse = reuse;
  OK(gemini_arena_create(mgr, &c, &arena));
  return arena;
}

static world_t world_open(void) {
  world_t o = { 0 };
  const char *base = getenv("TMPDIR");
  snprintf(o.folder, sizeof o.folder, "%.40s/gemini.XXXXXX", base ? base : "/tmp");
  CHECK(mkdtemp(o.folder));
  gemini_config_t c = config_of(o.folder);
  OK(gemini_manager_open(&c, &o.mgr));
  o.params = arena_of(o.mgr, GEMINI_KIND_PARAM, 2, 0, 0);
  o.grads = arena_of(o.mgr, GEMINI_KIND_GRAD, 2, 0, o.params);
  o.master = arena_of(o.mgr, GEMINI_KIND_MASTER, 4, o.params, 0);
  o.plain = arena_of(o.mgr, GEMINI_KIND_OTHER, 1, 0, 0);
  static const uint32_t tiers[TENSORS] = { GEMINI_TIER_DEVICE, GEMINI_TIER_HOST, GEMINI_TIER_FILE };
  for (uint32_t i = 0; i < TENSORS; i++) {
    char name[32];
    snprintf(name, sizeof name, "tensor.%u", i);
    OK(gemini_tensor_register(o.mgr, o.params, name, TENSOR_BYTES, GEMINI_OFFSET_NEXT, &o.tensor[i]));
    gemini_access_t a = { .object = o.tensor[i], .mode = GEMINI_WRITE, .tier = GEMINI_TIER_HOST };
    OK(gemini_acquire(o.mgr, &a, 1, GEMINI_STREAM_CALLER));
    memset(a.ptr, (int)i + 1, TENSOR_BYTES);
    OK(gemini_release(o.mgr, &a, 1, GEMINI_STREAM_CALLER));
    a.tier = tiers[i];
    OK(gemini_move(o.mgr, &a, 1));
  }
  OK(gemini_tensor_register(o.mgr, o.params, "tied", WINDOW, 512, &o.tied));
  uint64_t offset;
  OK(gemini_arena_take(o.mgr, o.plain, 1000, &offset));
  OK(gemini_stream_create(o.mgr, &o.stream));
  OK(gemini_alloc(o.mgr, 5000, o.stream, &o.block));
  OK(gemini_stream_synchronize(o.mgr, o.stream));
  return o;
}
static void world_close(world_t *o) {
  OK(gemini_manager_close(o->mgr));
  CHECK(!rmdir(o->folder)); /* nothing was left in it */
}

typedef struct {
  gemini_stats_t stats;
  gemini_arena_info_t arenas[4];
  gemini_tensor_info_t tensors[TENSORS + 1];
} picture_t;
static void picture(picture_t *p) {
  memset(p, 0, sizeof *p);
  p->stats = (gemini_stats_t)GEMINI_STATS_INIT;
  OK(gemini_stats(w.mgr, &p->stats));
  p->stats.acquire_hits = p->stats.acquire_misses = 0; /* what was looked for, not what is */
  gemini_arena_t arenas[] = { w.params, w.grads, w.master, w.plain };
  for (int i = 0; i < 4; i++) {
    p->arenas[i] = (gemini_arena_info_t)GEMINI_ARENA_INFO_INIT;
    OK(gemini_arena_info(w.mgr, arenas[i], &p->arenas[i]));
  }
  for (int i = 0; i <= TENSORS; i++) {
    p->tensors[i] = (gemini_tensor_info_t)GEMINI_TENSOR_INFO_INIT;
    OK(gemini_tensor_info(w.mgr, i < TENSORS ? w.tensor[i] : w.tied, &p->tensors[i]));
  }
}

/* Bytes of the tensors, by a file, which moves chunks about. */
static void check_bytes(void) {
  int fd = memfd_create("bytes", MFD_CLOEXEC);
  uint8_t *bytes = malloc(TENSOR_BYTES);
  CHECK(fd >= 0 && bytes);
  for (int i = 0; i < TENSORS; i++) {
    gemini_access_t a = { .object = w.tensor[i] };
    OK(gemini_store(w.mgr, &a, fd, 0));
    CHECK_EQ(pread(fd, bytes, TENSOR_BYTES, 0), TENSOR_BYTES);
    for (int k = 0; k < TENSOR_BYTES; k++) CHECK_EQ(bytes[k], i + 1);
  }
  free(bytes);
  close(fd);
}

/* ---- refusals */
static char tried[NAMES][64]; /* functions that were called wrongly */
static int tried_count;
static void note(const char *call) {
  size_t length = strcspn(call, "(");
  for (int i = 0; i < tried_count; i++)
    if (strlen(tried[i]) == length && !strncmp(tried[i], call, length)) return;
  CHECK(tried_count < NAMES);
  snprintf(tried[tried_count++], sizeof tried[0], "%.*s", (int)length, call);
}

static picture_t before, after;
static void refused(const char *file, int line, const char *call, gemini_status_t status, gemini_status_t expected,
                    const char *words) {
  gemini_error_info_t e = GEMINI_ERROR_INFO_INIT;
  OK(gemini_last_error(&e));
  size_t length = strcspn(call, "(");
  bool named = strlen(e.operation) == length && !strncmp(e.operation, call, length);
  picture(&after);
  bool same = !memcmp(&before, &after, sizeof before);
  if (status == expected && e.status == expected && named && strstr(e.message, words) && same) return;
  fprintf(stderr, "%s:%d: %s\n  is %d, expected %d; %s: \"%s\" (%d), expected words \"%s\"; %s\n", file, line, call,
          status, expected, e.operation, e.message, e.status, words, same ? "nothing changed" : "something changed");
  exit(1);
}
/* The call fails with this status, its message has these words, and the picture stays. */
#define REFUSED(call, expected, words)                                   \
  do {                                                                   \
    note(#call);                                                         \
    picture(&before);                                                    \
    gemini_status_t refused_status = (call);                             \
    refused(__FILE__, __LINE__, #call, refused_status, expected, words); \
  } while (0)
#define INVALID GEMINI_ERR_INVALID
#define HANDLE GEMINI_ERR_HANDLE
#define STATE GEMINI_ERR_STATE
#define BUSY GEMINI_ERR_BUSY

/* What is no manager: every one of them in place of mgr in an otherwise good call. */
#define NO_MANAGERS(call)                                                                                 \
  do {                                                                                                    \
    const uint64_t no_managers[] = { 0, 1, UINT64_MAX, closed_manager, w.params, w.tensor[0], w.stream }; \
    for (size_t no = 0; no < sizeof no_managers / sizeof *no_managers; no++) {                            \
      gemini_manager_t mgr = no_managers[no];                                                             \
      REFUSED(call, HANDLE, "no open manager");                                                           \
    }                                                                                                     \
  } while (0)
#define NEVER_GIVEN(handle) (((handle) & ~((UINT64_C(1) << 42) - 1)) | 60)
/* What is no object of one kind: wrong kinds, strangers, the dead. */
#define NO_OBJECTS(call, own_dead, own_foreign, other_kind)                  \
  do {                                                                       \
    const uint64_t no_objects[] = { 1,                                       \
                                    UINT64_MAX,                              \
                                    w.mgr,                                   \
                                    own_dead,                                \
                                    own_foreign,                             \
                                    other_kind,                              \
                                    NEVER_GIVEN(w.tensor[0]),                \
                                    NEVER_GIVEN(w.params),                   \
                                    NEVER_GIVEN(w.stream) };                 \
    for (size_t no = 0; no < sizeof no_objects / sizeof *no_objects; no++) { \
      uint64_t object = no_objects[no];                                      \
      REFUSED(call, HANDLE, "");                                             \
    }                                                                        \
  } while (0)

/* A struct that a caller passes: sizes that cannot be, and bytes past what this library knows. */
typedef union {
  uint32_t struct_size;
  uint8_t bytes[8192];
} padded_t;
static padded_t padded;
static void *with_size(const void *good, size_t size, uint32_t struct_size) {
  memset(&padded, 0, sizeof padded);
  memcpy(&padded, good, size);
  padded.struct_size = struct_size;
  return &padded;
}
#define BAD_STRUCTS(call, good, size, in)               \
  do {                                                  \
    void *bad = NULL;                                   \
    REFUSED(call, INVALID, "NULL");                     \
    bad = with_size(good, size, (uint32_t)(size) - 1);  \
    REFUSED(call, INVALID, "struct_size");              \
    bad = with_size(good, size, 0);                     \
    REFUSED(call, INVALID, "struct_size is 0");         \
    bad = with_size(good, size, 4097);                  \
    REFUSED(call, INVALID, "struct_size is 4097");      \
    bad = with_size(good, size, (uint32_t)(size) + 64); \
    if (in) padded.bytes[(size) + 5] = 1;               \
    if (in) REFUSED(call, INVALID, "is set");           \
  } while (0)

/* ---- managers */
#define BAD_CONFIG(change, words)                           \
  do {                                                      \
    gemini_config_t c = config_of(w.folder);                \
    change;                                                 \
    REFUSED(gemini_manager_open(&c, &out), INVALID, words); \
    CHECK_EQ(out, PATTERN);                                 \
  } while (0)

static void test_manager_open_bad_config_is_refused(void) {
  gemini_config_t good = config_of(w.folder);
  gemini_manager_t out = PATTERN;
  REFUSED(gemini_manager_open(&good, NULL), INVALID, "mgr_out");
  BAD_STRUCTS(gemini_manager_open(bad, &out), &good, sizeof good, true);
  BAD_CONFIG(c.flags = 2, "flags");
  BAD_CONFIG(c.flags = UINT32_MAX, "flags");
  BAD_CONFIG(c.placement = 4, "placement is 4");
  BAD_CONFIG(c.device = 2, "device is 2");
  BAD_CONFIG(c.device_ordinal = 1, "device_ordinal is 1");
  BAD_CONFIG(c.warmup_iterations = 1001, "1001, at most 1000");
  BAD_CONFIG(c.update_threads = 257, "257, at most 256");
  BAD_CONFIG(c.log_level = 5, "log_level is 5");
  BAD_CONFIG(c.device_bytes = 0, "device_bytes is 0");
  BAD_CONFIG(c.host_bytes = 0, "host_bytes is 0");
  BAD_CONFIG(c.device_bytes = UINT64_MAX, "device_bytes is 18446744073709551615");
  BAD_CONFIG(c.host_bytes = UINT64_MAX, "host_bytes is 18446744073709551615");
  BAD_CONFIG(c.file_bytes = UINT64_MAX, "file_bytes is 18446744073709551615");
  BAD_CONFIG(c.device_margin_bytes = c.device_bytes, "device_margin_bytes");
  BAD_CONFIG(c.device_margin_bytes = UINT64_MAX, "device_margin_bytes");
  BAD_CONFIG(c.device_margin_bytes = c.device_bytes - 100; c.window_bytes = 0, "at least 65536");
  BAD_CONFIG(c.window_bytes = 65535, "window_bytes is 65535");
  BAD_CONFIG(c.window_bytes = 3 * WINDOW, "power of two");
  BAD_CONFIG(c.window_bytes = UINT64_C(1) << 31, "power of two");
  BAD_CONFIG(c.window_bytes = 32 * WINDOW, "more than the device budget");
  BAD_CONFIG(c.static_param_fraction = -0.1, "static_param_fraction is -0.1");
  BAD_CONFIG(c.static_param_fraction = (double)NAN, "static_param_fraction");
  BAD_CONFIG(c.static_optim_fraction = 1.5, "static_optim_fraction is 1.5");
  BAD_CONFIG(c.file_dir = NULL, "file_dir");
  BAD_CONFIG(c.file_dir = "", "file_dir");
  good.device = GEMINI_DEVICE_CUDA;
  REFUSED(gemini_manager_open(&good, &out), GEMINI_ERR_UNSUPPORTED, "CUDA");
  good = config_of("/nonexistent/folder");
  REFUSED(gemini_manager_open(&good, &out), GEMINI_ERR_IO, "/nonexistent/folder");
  CHECK_EQ(out, PATTERN);
  gemini_manager_t wide; /* a newer caller's zeros are welcome */
  good = config_of(w.folder);
  OK(gemini_manager_open(with_size(&good, sizeof good, sizeof good + 64), &wide));
  OK(gemini_manager_close(wide));
}

static void test_manager_open_65_is_refused(void) {
  gemini_config_t c = GEMINI_CONFIG_INIT;
  gemini_manager_t many[64], out = PATTERN;
  c.device_bytes = c.host_bytes = WINDOW;
  c.update_threads = 1;
  int count = 0;
  while (count < 62) OK(gemini_manager_open(&c, &many[count++])); /* beside the two worlds */
  REFUSED(gemini_manager_open(&c, &out), INVALID, "limit is 64");
  CHECK_EQ(out, PATTERN);
  while (count > 0) OK(gemini_manager_close(many[--count]));
}

static void test_manager_calls_without_manager_are_refused(void) {
  gemini_access_t a = { .object = w.tensor[0], .mode = GEMINI_READ };
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_info_t arena_info = GEMINI_ARENA_INFO_INIT;
  gemini_tensor_info_t tensor_info = GEMINI_TENSOR_INFO_INIT;
  gemini_stats_t stats = GEMINI_STATS_INIT;
  gemini_update_t update = GEMINI_UPDATE_INIT;
  uint64_t out = PATTERN;
  double norm = 7;
  void *ptr = &out;
  char text[8] = "text";
  for (int no = 0; no < 3; no++) { /* 0 is accepted by close: nothing is closed */
    gemini_manager_t mgr = ((const uint64_t[]){ 1, closed_manager, w.params })[no];
    REFUSED(gemini_manager_close(mgr), HANDLE, "no open manager");
  }
  NO_MANAGERS(gemini_budget_set(mgr, 0, WINDOW));
  NO_MANAGERS(gemini_stream_create(mgr, &out));
  NO_MANAGERS(gemini_stream_call(mgr, w.stream, free, NULL));
  NO_MANAGERS(gemini_stream_synchronize(mgr, w.stream));
  NO_MANAGERS(gemini_arena_create(mgr, &c, &out));
  NO_MANAGERS(gemini_arena_destroy(mgr, w.plain));
  NO_MANAGERS(gemini_arena_info(mgr, w.plain, &arena_info));
  NO_MANAGERS(gemini_arena_take(mgr, w.plain, 8, &out));
  NO_MANAGERS(gemini_tensor_register(mgr, w.params, "new", 8, GEMINI_OFFSET_NEXT, &out));
  NO_MANAGERS(gemini_tensor_unregister(mgr, w.tensor[0]));
  NO_MANAGERS(gemini_tensor_find(mgr, "tensor.0", &out));
  NO_MANAGERS(gemini_tensor_counterpart(mgr, w.tensor[0], w.master, &out));
  NO_MANAGERS(gemini_tensor_state_set(mgr, w.tensor[0], GEMINI_STATE_HOLD));
  NO_MANAGERS(gemini_tensor_info(mgr, w.tensor[0], &tensor_info));
  NO_MANAGERS(gemini_iteration_begin(mgr));
  NO_MANAGERS(gemini_iteration_end(mgr));
  NO_MANAGERS(gemini_phase_set(mgr, 1));
  NO_MANAGERS(gemini_op_begin(mgr, "op", w.stream));
  NO_MANAGERS(gemini_op_end(mgr));
  NO_MANAGERS(gemini_acquire(mgr, &a, 1, w.stream));
  NO_MANAGERS(gemini_release(mgr, &a, 1, w.stream));
  NO_MANAGERS(gemini_hint(mgr, &a, 1));
  NO_MANAGERS(gemini_move(mgr, &a, 1));
  NO_MANAGERS(gemini_pin(mgr, &a));
  NO_MANAGERS(gemini_unpin(mgr, &a));
  NO_MANAGERS(gemini_alloc(mgr, 8, w.stream, &ptr));
  NO_MANAGERS(gemini_free(mgr, w.block, w.stream));
  NO_MANAGERS(gemini_zero(mgr, &a));
  NO_MANAGERS(gemini_load(mgr, &a, 0, 0));
  NO_MANAGERS(gemini_store(mgr, &a, 1, 0));
  NO_MANAGERS(gemini_norm(mgr, &a, 0, w.stream, &norm));
  NO_MANAGERS(gemini_update(mgr, &update));
  NO_MANAGERS(gemini_update_wait(mgr));
  NO_MANAGERS(gemini_stats(mgr, &stats));
  NO_MANAGERS(gemini_stats_reset(mgr));
  NO_MANAGERS(gemini_plan_explain(mgr, text, sizeof text, &out));
  NO_MANAGERS(gemini_trace_save(mgr, "/dev/null"));
  NO_MANAGERS(gemini_trace_load(mgr, "/dev/null"));
  NO_MANAGERS(gemini_timeline_start(mgr, "/dev/null"));
  NO_MANAGERS(gemini_timeline_stop(mgr));
  CHECK_EQ(out, PATTERN);
  CHECK(norm == 7 && ptr == &out && !strcmp(text, "text") && !a.ptr);
}

static void test_manager_close_in_use_is_refused(void) {
  gemini_access_t device = { .object = w.tensor[0], .mode = GEMINI_READ };
  gemini_access_t host = { .object = w.tensor[1], .mode = GEMINI_READ, .tier = GEMINI_TIER_HOST };
  gemini_access_t range = { .object = w.plain, .size_bytes = 100, .mode = GEMINI_WRITE };
  gemini_access_t host_range = { .object = w.plain, .size_bytes = 9, .mode = GEMINI_WRITE, .tier = GEMINI_TIER_HOST };
  gemini_access_t *each[] = { &device, &host, &range, &host_range };
  for (int i = 0; i < 4; i++) {
    OK(gemini_acquire(w.mgr, each[i], 1, w.stream));
    REFUSED(gemini_manager_close(w.mgr), BUSY, "acquired");
    OK(gemini_release(w.mgr, each[i], 1, w.stream));
  }
}

static void test_budget_set_bad_values_are_refused(void) {
  REFUSED(gemini_budget_set(w.mgr, 3, WINDOW), INVALID, "tier is 3");
  REFUSED(gemini_budget_set(w.mgr, UINT32_MAX, WINDOW), INVALID, "tier is 4294967295");
  for (uint32_t tier = 0; tier < 3; tier++)
    REFUSED(gemini_budget_set(w.mgr, tier, UINT64_MAX), INVALID, "18446744073709551615");
  REFUSED(gemini_budget_set(w.mgr, GEMINI_TIER_DEVICE, 0), INVALID, "device budget 0");
  REFUSED(gemini_budget_set(w.mgr, GEMINI_TIER_DEVICE, WINDOW - 1), INVALID, "less than one window");
  REFUSED(gemini_budget_set(w.mgr, GEMINI_TIER_HOST, 0), INVALID, "cannot be 0");
  REFUSED(gemini_budget_set(w.mgr, GEMINI_TIER_FILE, 0), GEMINI_ERR_OOM_FILE, "131072 bytes are in files");
  gemini_config_t c = config_of(NULL);
  gemini_manager_t two_tiers;
  c.file_bytes = 0;
  OK(gemini_manager_open(&c, &two_tiers));
  REFUSED(gemini_budget_set(two_tiers, GEMINI_TIER_FILE, WINDOW), STATE, "without a file tier");
  OK(gemini_manager_close(two_tiers));
}

/* ---- streams */
static void nothing(void *user) { (void)user; }
static void test_streams_bad_calls_are_refused(void) {
  REFUSED(gemini_stream_create(w.mgr, NULL), INVALID, "stream_out");
  NO_OBJECTS(gemini_stream_destroy(object), destroyed_stream, closed_manager, w.tensor[0]);
  NO_OBJECTS(gemini_stream_call(w.mgr, object, nothing, NULL), destroyed_stream, foreign.stream, w.params);
  REFUSED(gemini_stream_call(w.mgr, w.stream, NULL, NULL), INVALID, "fn");
  NO_OBJECTS(gemini_stream_synchronize(w.mgr, object), destroyed_stream, foreign.stream, w.tensor[0]);
  OK(gemini_stream_destroy(0));
  gemini_stream_t many[48], out = PATTERN;
  int count = 0;
  while (count < 46) OK(gemini_stream_create(w.mgr, &many[count++]));
  REFUSED(gemini_stream_create(w.mgr, &out), INVALID, "limit is 48");
  CHECK_EQ(out, PATTERN);
  while (count > 0) OK(gemini_stream_destroy(many[--count]));
  OK(gemini_iteration_begin(w.mgr));
  OK(gemini_op_begin(w.mgr, "op", w.stream));
  REFUSED(gemini_stream_destroy(w.stream), BUSY, "operator");
  OK(gemini_op_end(w.mgr));
  OK(gemini_iteration_end(w.mgr));
}

/* ---- arenas and tensors */
#define BAD_ARENA(change, expected, words)                          \
  do {                                                              \
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;             \
    change;                                                         \
    REFUSED(gemini_arena_create(w.mgr, &c, &out), expected, words); \
    CHECK_EQ(out, PATTERN);                                         \
  } while (0)

static void test_arenas_bad_calls_are_refused(void) {
  gemini_arena_config_t good = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  uint64_t out = PATTERN;
  char name[65];
  memset(name, 'n', 64);
  name[64] = 0;
  REFUSED(gemini_arena_create(w.mgr, &good, NULL), INVALID, "arena_out");
  BAD_STRUCTS(gemini_arena_create(w.mgr, bad, &out), &good, sizeof good, true);
  BAD_ARENA(c.kind = 6, INVALID, "kind is 6");
  BAD_ARENA(c.element_bytes = 3, INVALID, "element_bytes is 3");
  BAD_ARENA(c.element_bytes = 32, INVALID, "element_bytes is 32");
  BAD_ARENA(c.flags = 1, INVALID, "flags");
  BAD_ARENA(c.capacity_bytes = UINT64_MAX, INVALID, "capacity_bytes is 18446744073709551615");
  BAD_ARENA(c.name = name, INVALID, "63");
  BAD_ARENA(c.name = "", INVALID, "name");
  BAD_ARENA(c.like = destroyed_arena, HANDLE, "destroyed");
  BAD_ARENA(c.like = foreign.params, HANDLE, "");
  BAD_ARENA(c.like = w.tensor[0], HANDLE, "");
  BAD_ARENA(c.like = w.master, INVALID, "");                                                  /* itself a follower */
  BAD_ARENA(c.reuse = w.params, INVALID, "");                                                 /* only gradients do */
  BAD_ARENA(c.kind = GEMINI_KIND_GRAD; c.element_bytes = 4; c.reuse = w.params, INVALID, ""); /* other elements */
  BAD_ARENA(c.kind = GEMINI_KIND_GRAD; c.element_bytes = 2; c.reuse = w.params, INVALID, ""); /* reused already */
  BAD_ARENA(c.kind = GEMINI_KIND_GRAD; c.reuse = w.plain, INVALID, "");                       /* no parameters */
  NO_OBJECTS(gemini_arena_destroy(w.mgr, object), destroyed_arena, foreign.params, w.tensor[0]);
  REFUSED(gemini_arena_destroy(w.mgr, w.params), BUSY, "follow or reuse");
  OK(gemini_arena_destroy(w.mgr, 0));
  NO_OBJECTS(gemini_arena_info(w.mgr, object, &info), destroyed_arena, foreign.params, w.tensor[0]);
  BAD_STRUCTS(gemini_arena_info(w.mgr, w.params, bad), &info, sizeof info, false);
  NO_OBJECTS(gemini_arena_take(w.mgr, object, 8, &out), destroyed_arena, foreign.params, w.tensor[0]);
  REFUSED(gemini_arena_take(w.mgr, w.plain, 8, NULL), INVALID, "offset_out");
  REFUSED(gemini_arena_take(w.mgr, w.plain, 0, &out), INVALID, "0");
  REFUSED(gemini_arena_take(w.mgr, w.plain, UINT64_MAX, &out), INVALID, "18446744073709551615");
  REFUSED(gemini_arena_take(w.mgr, w.plain, 8 * WINDOW, &out), INVALID, "524288");
  REFUSED(gemini_arena_take(w.mgr, w.params, 3, &out), INVALID, "3");
  CHECK_EQ(out, PATTERN);
  gemini_access_t a = { .object = w.plain, .size_bytes = 100, .mode = GEMINI_WRITE };
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  REFUSED(gemini_arena_destroy(w.mgr, w.plain), BUSY, "acquired");
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  OK(gemini_pin(w.mgr, &a));
  REFUSED(gemini_arena_destroy(w.mgr, w.plain), BUSY, "pinned");
  OK(gemini_unpin(w.mgr, &a));
}

static void test_tensors_bad_calls_are_refused(void) {
  const uint64_t next = GEMINI_OFFSET_NEXT;
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  gemini_tensor_t out = PATTERN, t = w.tensor[1];
  char name[129];
  memset(name, 'n', 128);
  name[128] = 0;
  NO_OBJECTS(gemini_tensor_register(w.mgr, object, "new", 8, next, &out), destroyed_arena, foreign.params, t);
  REFUSED(gemini_tensor_register(w.mgr, w.params, NULL, 8, next, &out), INVALID, "name");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "", 8, next, &out), INVALID, "name");
  REFUSED(gemini_tensor_register(w.mgr, w.params, name, 8, next, &out), INVALID, "127");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "tensor.1", 8, next, &out), GEMINI_ERR_EXISTS, "tensor.1");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", 8, next, NULL), INVALID, "tensor_out");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", 0, next, &out), INVALID, "0");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", 3, next, &out), INVALID, "3");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", UINT64_MAX - 1, next, &out), INVALID, "18446744073709551614");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", 16 * WINDOW, next, &out), INVALID, "1048576");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", 8, 1, &out), INVALID, "1 + 8");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", 8, 7 * WINDOW, &out), INVALID, "458752 + 8");
  REFUSED(gemini_tensor_register(w.mgr, w.params, "new", UINT64_MAX - 1, 2, &out), INVALID, "2 + ");
  REFUSED(gemini_tensor_register(w.mgr, w.master, "new", 8, next, &out), INVALID, "follows");
  REFUSED(gemini_tensor_register(w.mgr, w.grads, "new", 8, next, &out), INVALID, "follows");
  NO_OBJECTS(gemini_tensor_unregister(w.mgr, object), destroyed_tensor, foreign.tensor[0], w.params);
  OK(gemini_tensor_unregister(w.mgr, 0));
  REFUSED(gemini_tensor_find(w.mgr, NULL, &out), INVALID, "name");
  REFUSED(gemini_tensor_find(w.mgr, "tensor.0", NULL), INVALID, "tensor_out");
  REFUSED(gemini_tensor_find(w.mgr, "tensor", &out), GEMINI_ERR_NOT_FOUND, "tensor");
  NO_OBJECTS(gemini_tensor_counterpart(w.mgr, object, w.master, &out), destroyed_tensor, foreign.tensor[0], w.params);
  NO_OBJECTS(gemini_tensor_counterpart(w.mgr, t, object, &out), destroyed_arena, foreign.params, t);
  REFUSED(gemini_tensor_counterpart(w.mgr, t, w.plain, &out), INVALID, "not like");
  REFUSED(gemini_tensor_counterpart(w.mgr, t, w.master, NULL), INVALID, "tensor_out");
  NO_OBJECTS(gemini_tensor_state_set(w.mgr, object, GEMINI_STATE_HOLD), destroyed_tensor, foreign.tensor[0], w.params);
  REFUSED(gemini_tensor_state_set(w.mgr, t, GEMINI_STATE_COUNT), INVALID, "state is 6");
  REFUSED(gemini_tensor_state_set(w.mgr, t, UINT32_MAX), INVALID, "state is 4294967295");
  REFUSED(gemini_tensor_state_set(w.mgr, t, GEMINI_STATE_COMPUTE), STATE, "to COMPUTE");
  NO_OBJECTS(gemini_tensor_info(w.mgr, object, &info), destroyed_tensor, foreign.tensor[0], w.params);
  BAD_STRUCTS(gemini_tensor_info(w.mgr, t, bad), &info, sizeof info, false);
  CHECK_EQ(out, PATTERN);
  gemini_access_t a = { .object = t, .mode = GEMINI_READ };
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  REFUSED(gemini_tensor_unregister(w.mgr, t), BUSY, "acquired");
  REFUSED(gemini_tensor_state_set(w.mgr, t, GEMINI_STATE_FREE), STATE, "COMPUTE to FREE");
  OK(gemini_release(w.mgr, &a, 1, w.stream));
}

/* ---- brackets */
static void test_brackets_out_of_order_are_refused(void) {
  char name[129];
  memset(name, 'n', 128);
  name[128] = 0;
  REFUSED(gemini_iteration_end(w.mgr), STATE, "no iteration");
  REFUSED(gemini_op_begin(w.mgr, "op", w.stream), STATE, "no iteration");
  REFUSED(gemini_op_end(w.mgr), STATE, "no operator");
  REFUSED(gemini_phase_set(w.mgr, 4), INVALID, "phase is 4");
  OK(gemini_iteration_begin(w.mgr));
  REFUSED(gemini_iteration_begin(w.mgr), STATE, "open already");
  REFUSED(gemini_op_begin(w.mgr, NULL, w.stream), INVALID, "name");
  REFUSED(gemini_op_begin(w.mgr, "", w.stream), INVALID, "name");
  REFUSED(gemini_op_begin(w.mgr, name, w.stream), INVALID, "127");
  NO_OBJECTS(gemini_op_begin(w.mgr, "op", object), destroyed_stream, foreign.stream, w.params);
  REFUSED(gemini_op_end(w.mgr), STATE, "no operator");
  OK(gemini_op_begin(w.mgr, "op", w.stream));
  REFUSED(gemini_op_begin(w.mgr, "other", w.stream), STATE, "op is open");
  REFUSED(gemini_iteration_end(w.mgr), STATE, "op is open");
  REFUSED(gemini_iteration_begin(w.mgr), STATE, "open already");
  REFUSED(gemini_phase_set(w.mgr, 1), STATE, "op is open");
  REFUSED(gemini_trace_load(w.mgr, "/dev/null"), STATE, "iteration");
  OK(gemini_op_end(w.mgr));
  OK(gemini_iteration_end(w.mgr));
}

/* ---- accesses: ranges that every function refuses alike */
typedef struct {
  gemini_access_t access;
  gemini_status_t status;
  const char *words;
} bad_range_t;
static bad_range_t bad_ranges[12];
static int bad_range_count;
static void make_bad_ranges(void) {
  const bad_range_t list[] = {
    { { .object = 0 }, HANDLE, "" },
    { { .object = UINT64_MAX }, HANDLE, "" },
    { { .object = w.mgr }, HANDLE, "" },
    { { .object = w.stream }, HANDLE, "" },
    { { .object = destroyed_tensor }, HANDLE, "unregistered" },
    { { .object = destroyed_arena }, HANDLE, "destroyed" },
    { { .object = foreign.tensor[0] }, HANDLE, "" },
    { { .object = w.tensor[0], .offset_bytes = TENSOR_BYTES + 1, .size_bytes = 1 }, INVALID, "131073 + 1" },
    { { .object = w.tensor[0], .offset_bytes = 8, .size_bytes = TENSOR_BYTES }, INVALID, "of 131072" },
    { { .object = w.tensor[0], .offset_bytes = 8, .size_bytes = UINT64_MAX - 4 }, INVALID, "18446744073709551611" },
    { { .object = w.tensor[0], .offset_bytes = 8 }, INVALID, "8 + 0" },
    { { .object = w.plain, .size_bytes = 1001 }, INVALID, "of 1000" },
  };
  bad_range_count = sizeof list / sizeof *list;
  for (int i = 0; i < bad_range_count; i++) {
    bad_ranges[i] = list[i];
    bad_ranges[i].access.mode = GEMINI_READ;
    bad_ranges[i].access.ptr = &bad_ranges; /* must stay */
  }
}
/* bad: one access; batch: a good one before it, which must not be done either. */
#define BAD_RANGES(call)                                                                           \
  do {                                                                                             \
    for (int no = 0; no < bad_range_count; no++) {                                                 \
      gemini_access_t batch[] = { { .object = w.tensor[1], .mode = GEMINI_READ, .ptr = &foreign }, \
                                  bad_ranges[no].access };                                         \
      gemini_access_t *bad = &batch[1];                                                            \
      (void)bad;                                                                                   \
      REFUSED(call, bad_ranges[no].status, bad_ranges[no].words);                                  \
      CHECK(batch[0].ptr == &foreign && batch[1].ptr == &bad_ranges);                              \
    }                                                                                              \
  } while (0)

static void test_accesses_bad_ranges_are_refused(void) {
  double norm = 7;
  int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
  BAD_RANGES(gemini_acquire(w.mgr, bad, 1, w.stream));
  BAD_RANGES(gemini_acquire(w.mgr, batch, 2, w.stream));
  BAD_RANGES(gemini_release(w.mgr, bad, 1, w.stream));
  BAD_RANGES(gemini_hint(w.mgr, batch, 2));
  BAD_RANGES(gemini_move(w.mgr, batch, 2));
  BAD_RANGES(gemini_pin(w.mgr, bad));
  BAD_RANGES(gemini_unpin(w.mgr, bad));
  BAD_RANGES(gemini_zero(w.mgr, bad));
  BAD_RANGES(gemini_load(w.mgr, bad, fd, 0));
  BAD_RANGES(gemini_store(w.mgr, bad, fd, 0));
  BAD_RANGES(gemini_norm(w.mgr, bad, GEMINI_DTYPE_BF16, w.stream, &norm));
  CHECK(norm == 7);
  close(fd);
}

static void test_accesses_bad_batches_are_refused(void) {
  gemini_access_t a = { .object = w.tensor[0], .mode = GEMINI_READ }, bad = a;
  const uint64_t huge = (1 << 20) + 1;
  REFUSED(gemini_acquire(w.mgr, NULL, 1, w.stream), INVALID, "NULL");
  REFUSED(gemini_acquire(w.mgr, &a, huge, w.stream), INVALID, "1048577, at most 1048576");
  REFUSED(gemini_release(w.mgr, NULL, 1, w.stream), INVALID, "NULL");
  REFUSED(gemini_release(w.mgr, &a, huge, w.stream), INVALID, "1048577, at most 1048576");
  REFUSED(gemini_hint(w.mgr, NULL, 1), INVALID, "NULL");
  REFUSED(gemini_hint(w.mgr, &a, huge), INVALID, "1048577, at most 1048576");
  REFUSED(gemini_move(w.mgr, NULL, 1), INVALID, "NULL");
  REFUSED(gemini_move(w.mgr, &a, huge), INVALID, "1048577, at most 1048576");
  REFUSED(gemini_pin(w.mgr, NULL), INVALID, "NULL");
  REFUSED(gemini_unpin(w.mgr, NULL), INVALID, "NULL");
  OK(gemini_acquire(w.mgr, NULL, 0, w.stream));
  OK(gemini_release(w.mgr, NULL, 0, w.stream));
  OK(gemini_hint(w.mgr, NULL, 0));
  OK(gemini_move(w.mgr, NULL, 0));
  NO_OBJECTS(gemini_acquire(w.mgr, &a, 1, object), destroyed_stream, foreign.stream, w.params);
  NO_OBJECTS(gemini_release(w.mgr, &a, 1, object), destroyed_stream, foreign.stream, w.params);
  bad.mode = 0;
  REFUSED(gemini_acquire(w.mgr, &bad, 1, w.stream), INVALID, "mode is 0");
  bad.mode = 4;
  REFUSED(gemini_acquire(w.mgr, &bad, 1, w.stream), INVALID, "mode is 4");
  REFUSED(gemini_release(w.mgr, &bad, 1, w.stream), INVALID, "mode is 4");
  bad.mode = GEMINI_READ;
  bad.tier = GEMINI_TIER_FILE;
  REFUSED(gemini_acquire(w.mgr, &bad, 1, w.stream), INVALID, "tier is 2");
  bad.tier = 3;
  REFUSED(gemini_hint(w.mgr, &bad, 1), INVALID, "tier is 3");
  REFUSED(gemini_move(w.mgr, &bad, 1), INVALID, "tier is 3");
}

static void test_release_of_what_is_not_acquired_is_refused(void) {
  gemini_access_t device = { .object = w.tensor[0], .mode = GEMINI_READ };
  gemini_access_t host = { .object = w.tensor[1], .mode = GEMINI_READ, .tier = GEMINI_TIER_HOST };
  gemini_access_t range = { .object = w.plain, .mode = GEMINI_READ };
  REFUSED(gemini_release(w.mgr, &device, 1, w.stream), STATE, "not acquired");
  REFUSED(gemini_release(w.mgr, &host, 1, w.stream), STATE, "not acquired");
  REFUSED(gemini_release(w.mgr, &range, 1, w.stream), STATE, "not acquired");
  REFUSED(gemini_unpin(w.mgr, &device), STATE, "not pinned");
  OK(gemini_acquire(w.mgr, &device, 1, w.stream));
  OK(gemini_acquire(w.mgr, &host, 1, w.stream));
  gemini_access_t other = device;
  other.mode = GEMINI_WRITE;
  REFUSED(gemini_release(w.mgr, &other, 1, w.stream), STATE, "not acquired");
  other = host;
  other.mode = GEMINI_READ_WRITE;
  REFUSED(gemini_release(w.mgr, &other, 1, w.stream), STATE, "not acquired");
  other = host;
  other.ptr = &other;
  REFUSED(gemini_release(w.mgr, &other, 1, w.stream), STATE, "but it was acquired at");
  other = device;
  other.tier = GEMINI_TIER_HOST;
  REFUSED(gemini_release(w.mgr, &other, 1, w.stream), STATE, "not acquired");
  gemini_access_t twice[] = { device, device };
  REFUSED(gemini_release(w.mgr, twice, 2, w.stream), STATE, "acquired so");
  gemini_access_t mixed[] = { device, range };
  REFUSED(gemini_release(w.mgr, mixed, 2, w.stream), STATE, "not acquired");
  gemini_access_t wish = device;
  wish.tier = GEMINI_TIER_HOST;
  wish.mode = GEMINI_WRITE;
  REFUSED(gemini_acquire(w.mgr, &wish, 1, w.stream), BUSY, "tensor.0");
  wish = host;
  wish.tier = GEMINI_TIER_DEVICE;
  wish.mode = GEMINI_WRITE;
  REFUSED(gemini_acquire(w.mgr, &wish, 1, w.stream), BUSY, "tensor.1");
  wish = device;
  wish.tier = GEMINI_TIER_HOST;
  REFUSED(gemini_move(w.mgr, &wish, 1), BUSY, "acquired");
  wish = host;
  wish.tier = GEMINI_TIER_FILE;
  REFUSED(gemini_move(w.mgr, &wish, 1), BUSY, "acquired");
  REFUSED(gemini_zero(w.mgr, &device), BUSY, "acquired");
  REFUSED(gemini_zero(w.mgr, &host), BUSY, "acquired");
  REFUSED(gemini_load(w.mgr, &device, 0, 0), BUSY, "acquired");
  OK(gemini_release(w.mgr, &device, 1, w.stream));
  OK(gemini_release(w.mgr, &host, 1, w.stream));
  gemini_tensor_t gradient;
  OK(gemini_tensor_counterpart(w.mgr, w.tensor[0], w.grads, &gradient));
  gemini_access_t g = { .object = gradient, .mode = GEMINI_READ };
  REFUSED(gemini_acquire(w.mgr, &g, 1, w.stream), STATE, "gradient of tensor.0");
}

/* ---- memory, data */
static void test_alloc_bad_calls_are_refused(void) {
  uint64_t mark;
  void *out = &mark;
  REFUSED(gemini_alloc(w.mgr, 8, w.stream, NULL), INVALID, "ptr_out");
  REFUSED(gemini_alloc(w.mgr, 0, w.stream, &out), INVALID, "size_bytes is 0");
  REFUSED(gemini_alloc(w.mgr, UINT64_MAX, w.stream, &out), GEMINI_ERR_OOM_DEVICE, "18446744073709551615");
  REFUSED(gemini_alloc(w.mgr, 16 * WINDOW + 1, w.stream, &out), GEMINI_ERR_OOM_DEVICE, "1048577");
  NO_OBJECTS(gemini_alloc(w.mgr, 8, object, &out), destroyed_stream, foreign.stream, w.params);
  NO_OBJECTS(gemini_free(w.mgr, w.block, object), destroyed_stream, foreign.stream, w.params);
  REFUSED(gemini_free(w.mgr, (char *)w.block + 1, w.stream), INVALID, "live allocation");
  REFUSED(gemini_free(w.mgr, (char *)w.block + 512, w.stream), INVALID, "live allocation");
  REFUSED(gemini_free(w.mgr, foreign.block, w.stream), INVALID, "live allocation");
  REFUSED(gemini_free(w.mgr, &mark, w.stream), INVALID, "live allocation");
  REFUSED(gemini_free(w.mgr, (void *)UINTPTR_MAX, w.stream), INVALID, "live allocation");
  OK(gemini_free(w.mgr, NULL, w.stream));
  CHECK(out == &mark);
  OK(gemini_alloc(w.mgr, 8, w.stream, &out));
  OK(gemini_free(w.mgr, out, w.stream));
  REFUSED(gemini_free(w.mgr, out, w.stream), INVALID, "live allocation");
}

static void test_data_bad_calls_are_refused(void) {
  gemini_access_t a = { .object = w.tensor[1] }, odd = { .object = w.tensor[1], .offset_bytes = 1, .size_bytes = 4 };
  double norm = 7;
  REFUSED(gemini_zero(w.mgr, NULL), INVALID, "NULL");
  REFUSED(gemini_load(w.mgr, NULL, 0, 0), INVALID, "NULL");
  REFUSED(gemini_load(w.mgr, &a, -1, 0), INVALID, "fd is -1");
  REFUSED(gemini_load(w.mgr, &a, 0, UINT64_MAX), INVALID, "18446744073709551615");
  REFUSED(gemini_store(w.mgr, NULL, 1, 0), INVALID, "NULL");
  REFUSED(gemini_store(w.mgr, &a, -1, 0), INVALID, "fd is -1");
  REFUSED(gemini_store(w.mgr, &a, 1, UINT64_MAX), INVALID, "18446744073709551615");
  REFUSED(gemini_store(w.mgr, &a, 9999, 0), GEMINI_ERR_IO, "9999");
  REFUSED(gemini_norm(w.mgr, NULL, 0, w.stream, &norm), INVALID, "NULL");
  REFUSED(gemini_norm(w.mgr, &a, 0, w.stream, NULL), INVALID, "NULL");
  REFUSED(gemini_norm(w.mgr, &a, 4, w.stream, &norm), INVALID, "dtype is 4");
  REFUSED(gemini_norm(w.mgr, &odd, 0, w.stream, &norm), INVALID, "multiple");
  NO_OBJECTS(gemini_norm(w.mgr, &a, 0, object, &norm), destroyed_stream, foreign.stream, w.params);
  CHECK(norm == 7);
}

static void no_span(void *user, const gemini_update_span_t *span) {
  (void)span;
  ++*(int *)user;
}
#define BAD_UPDATE(change, expected, words)                      \
  do {                                                           \
    gemini_arena_t arenas[] = { w.params, w.master };            \
    uint32_t modes[] = { GEMINI_READ_WRITE, GEMINI_READ_WRITE }; \
    gemini_update_t u = GEMINI_UPDATE_INIT;                      \
    u.arenas = arenas;                                           \
    u.modes = modes;                                             \
    u.arena_count = 2;                                           \
    u.fn = no_span;                                              \
    u.user = &spans;                                             \
    change;                                                      \
    REFUSED(gemini_update(w.mgr, &u), expected, words);          \
  } while (0)

static void test_update_bad_calls_are_refused(void) {
  int spans = 0;
  gemini_update_t good = GEMINI_UPDATE_INIT;
  BAD_STRUCTS(gemini_update(w.mgr, bad), &good, sizeof good, true);
  BAD_UPDATE(u.flags = 2, INVALID, "flags");
  BAD_UPDATE(u.arenas = NULL, INVALID, "NULL");
  BAD_UPDATE(u.modes = NULL, INVALID, "NULL");
  BAD_UPDATE(u.fn = NULL, INVALID, "NULL");
  BAD_UPDATE(u.arena_count = 0, INVALID, "arena_count is 0");
  BAD_UPDATE(u.arena_count = 9, INVALID, "arena_count is 9");
  BAD_UPDATE(u.stream = destroyed_stream, HANDLE, "destroyed");
  BAD_UPDATE(u.stream = foreign.stream, HANDLE, "");
  BAD_UPDATE(arenas[1] = destroyed_arena, HANDLE, "destroyed");
  BAD_UPDATE(arenas[1] = foreign.master, HANDLE, "");
  BAD_UPDATE(arenas[1] = w.tensor[0], HANDLE, "");
  BAD_UPDATE(arenas[1] = w.params, INVALID, "twice");
  BAD_UPDATE(arenas[1] = w.plain, INVALID, "not laid out like");
  BAD_UPDATE(arenas[1] = w.grads, INVALID, "can only read");
  BAD_UPDATE(modes[0] = 0, INVALID, "modes[0] is 0");
  BAD_UPDATE(modes[1] = 4, INVALID, "modes[1] is 4");
  BAD_UPDATE(u.first_element = 1, INVALID, "element_count is 0");
  BAD_UPDATE(u.first_element = 3 * TENSOR_BYTES / 2 + 1; u.element_count = 1, INVALID, "196609 + 1");
  BAD_UPDATE(u.element_count = UINT64_MAX, INVALID, "18446744073709551615");
  gemini_access_t a = { .object = w.tensor[0], .mode = GEMINI_READ };
  OK(gemini_acquire(w.mgr, &a, 1, w.stream));
  BAD_UPDATE((void)0, BUSY, "acquired");
  OK(gemini_release(w.mgr, &a, 1, w.stream));
  CHECK_EQ(spans, 0);
}

/* ---- insight */
static void test_insight_bad_calls_are_refused(void) {
  gemini_stats_t stats = GEMINI_STATS_INIT;
  gemini_error_info_t error = GEMINI_ERROR_INFO_INIT;
  uint64_t length = PATTERN;
  BAD_STRUCTS(gemini_stats(w.mgr, bad), &stats, sizeof stats, false);
  REFUSED(gemini_plan_explain(w.mgr, NULL, 8, &length), INVALID, "NULL");
  CHECK_EQ(length, PATTERN);
  REFUSED(gemini_trace_save(w.mgr, NULL), INVALID, "NULL");
  REFUSED(gemini_trace_load(w.mgr, NULL), INVALID, "NULL");
  REFUSED(gemini_trace_load(w.mgr, "/nonexistent/file"), GEMINI_ERR_IO, "/nonexistent/file");
  REFUSED(gemini_trace_load(w.mgr, "/dev/null"), GEMINI_ERR_FORMAT, "line");
  REFUSED(gemini_timeline_start(w.mgr, NULL), INVALID, "NULL");
  REFUSED(gemini_timeline_start(w.mgr, ""), INVALID, "empty");
  REFUSED(gemini_timeline_start(w.mgr, "/nonexistent/file"), GEMINI_ERR_IO, "/nonexistent/file");
  REFUSED(gemini_timeline_stop(w.mgr), STATE, "no timeline");
  /* The record of the last failure outlives a bad question about it. */
  CHECK_EQ(gemini_last_error(NULL), INVALID);
  CHECK_EQ(gemini_last_error(with_size(&error, sizeof error, 8)), INVALID);
  CHECK_EQ(gemini_last_error(with_size(&error, sizeof error, 4097)), INVALID);
  OK(gemini_last_error(&error));
  CHECK(!strcmp(error.operation, "gemini_timeline_stop"));
  for (gemini_status_t s = -20; s <= 5; s++) CHECK(gemini_status_string(s) && *gemini_status_string(s));
  CHECK(!strcmp(gemini_status_string(-15), gemini_status_string(INT32_MIN)));
}

/* Every function that the library exports has been called wrongly here, but for those that nothing can be wrong with. */
static void test_every_public_function_was_tried(void) {
  static const char *const fine[] = { "gemini_version", "gemini_status_string", "gemini_last_error" };
  char path[4096], line[256];
  snprintf(path, sizeof path, "%s", __FILE__);
  char *end = strstr(path, "integration/test_misuse.c");
  CHECK(end);
  snprintf(end, sizeof path - (size_t)(end - path), "abi/symbols.txt");
  FILE *f = fopen(path, "r");
  CHECK(f);
  int count = 0;
  while (fgets(line, sizeof line, f)) {
    if (*line == '#') continue;
    line[strcspn(line, " \n")] = 0;
    bool found = false;
    for (int i = 0; i < 3; i++) found |= !strcmp(line, fine[i]);
    for (int i = 0; i < tried_count; i++) found |= !strcmp(line, tried[i]);
    if (!found) fprintf(stderr, "%s was not tried\n", line);
    CHECK(found);
    count++;
  }
  fclose(f);
  CHECK(count > 40);
}

int main(void) {
  w = world_open();
  foreign = world_open();
  gemini_config_t c = config_of(w.folder);
  OK(gemini_manager_open(&c, &closed_manager));
  OK(gemini_manager_close(closed_manager));
  destroyed_arena = arena_of(w.mgr, GEMINI_KIND_OTHER, 1, 0, 0);
  OK(gemini_tensor_register(w.mgr, w.plain, "dead", 8, 0, &destroyed_tensor));
  OK(gemini_stream_create(w.mgr, &destroyed_stream));
  OK(gemini_arena_destroy(w.mgr, destroyed_arena));
  OK(gemini_tensor_unregister(w.mgr, destroyed_tensor));
  OK(gemini_stream_destroy(destroyed_stream));
  /* Their places serve others by now: what is dead must be known by more than its place. */
  gemini_arena_t arena = arena_of(w.mgr, GEMINI_KIND_OTHER, 1, 0, 0);
  gemini_tensor_t tensor;
  gemini_stream_t stream;
  OK(gemini_tensor_register(w.mgr, w.plain, "alive", 8, 0, &tensor));
  OK(gemini_stream_create(w.mgr, &stream));
  CHECK_EQ((uint32_t)arena, (uint32_t)destroyed_arena);
  CHECK_EQ((uint32_t)tensor, (uint32_t)destroyed_tensor);
  CHECK_EQ((uint32_t)stream, (uint32_t)destroyed_stream);
  make_bad_ranges();
  RUN(test_manager_open_bad_config_is_refused);
  RUN(test_manager_open_65_is_refused);
  RUN(test_manager_calls_without_manager_are_refused);
  RUN(test_manager_close_in_use_is_refused);
  RUN(test_budget_set_bad_values_are_refused);
  RUN(test_streams_bad_calls_are_refused);
  RUN(test_arenas_bad_calls_are_refused);
  RUN(test_tensors_bad_calls_are_refused);
  RUN(test_brackets_out_of_order_are_refused);
  RUN(test_accesses_bad_ranges_are_refused);
  RUN(test_accesses_bad_batches_are_refused);
  RUN(test_release_of_what_is_not_acquired_is_refused);
  RUN(test_alloc_bad_calls_are_refused);
  RUN(test_data_bad_calls_are_refused);
  RUN(test_update_bad_calls_are_refused);
  RUN(test_insight_bad_calls_are_refused);
  RUN(test_every_public_function_was_tried);
  check_bytes();
  world_close(&w);
  world_close(&foreign);
  return check_done();
}
