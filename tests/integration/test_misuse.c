/* Misuse of every public function: wrong, huge, foreign, destroyed and stale arguments and calls out of order return the
 * status that the header gives, with a message that says what is wrong, and change nothing.
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <unistd.h>

#include "../check.h"
#include "../fork.h"
#include "gemini.h"
#include "gemini/address.h"
#include "gemini/chosen.h"
#include "gemini/graph.h"
#include "gemini/group.h"
#include "gemini/hook.h"
#include "gemini/plan.h"
#include "gemini/topology.h"
#include "world.h"

#define W WORLD_CHUNK
#define UNTOUCHED UINT64_C(0xa5a5a5a5a5a5a5a5)
enum { DEVICE = GEMINI_TIER_DEVICE, HOST = GEMINI_TIER_HOST, FILES = GEMINI_TIER_FILE };
enum { READ = GEMINI_READ, WRITE = GEMINI_WRITE, BOTH = GEMINI_READ_WRITE };
enum { BATCH_LIMIT = 1 << 20 };

/* ---- which public functions have been seen to refuse something; compared with the list of exports at the end */
static const char *covered[128];
static int covered_count;
static void cover(const char *function) {
  for (int i = 0; i < covered_count; i++)
    if (!strcmp(covered[i], function)) return;
  CHECK(covered_count < 128);
  covered[covered_count++] = function;
}

/* ---- what the misuse is aimed at: two managers with arenas of all sorts, and handles that are no longer good */
enum { TRIPLE = 3 };
typedef struct {
  world_t w, x; /* the manager that is misused, and another one */
  gemini_arena_t params, grads, master, other, empty, x_arena, dead_arena;
  gemini_tensor_t p[TRIPLE], g[TRIPLE], s[TRIPLE], o[TRIPLE], x_tensor, dead_tensor;
  gemini_stream_t dead_stream;
  gemini_manager_t dead_mgr;
  void *block, *x_block, *freed_block;
} bed_t;
static bed_t bed;
static const uint64_t param_bytes[TRIPLE] = { W, 5 * W / 2, 1000 }, other_bytes[TRIPLE] = { 3 * W, 2 * W, 64 };

static void bed_open(void) {
  bed = (bed_t){ 0 };
  world_t dead = world_open(world_config(4, 4, 0));
  bed.dead_mgr = dead.mgr;
  world_close(&dead);
  bed.w = world_open(world_config(8, 32, 16)); /* in the place of the closed one */
  bed.x = world_open(world_config(4, 4, 0));
  world_t *w = &bed.w;

  bed.dead_arena = world_arena(w, GEMINI_KIND_OTHER, 1, "dead", 0, 0);
  CHECK_OK(gemini_arena_destroy(w->mgr, bed.dead_arena));
  bed.params = world_arena(w, GEMINI_KIND_PARAM, 2, "params", 0, 0); /* likewise */
  bed.grads = world_arena(w, GEMINI_KIND_GRAD, 2, "grads", 0, bed.params);
  bed.master = world_arena(w, GEMINI_KIND_MASTER, 4, "master", bed.params, 0);
  bed.other = world_arena(w, GEMINI_KIND_OTHER, 1, "other", 0, 0);
  bed.empty = world_arena(w, GEMINI_KIND_OTHER, 8, "empty", 0, 0);
  bed.dead_tensor = world_tensor(w, bed.other, "dead", 64);
  CHECK_OK(gemini_tensor_unregister(w->mgr, bed.dead_tensor));
  for (int i = 0; i < TRIPLE; i++) {
    char name[16];
    snprintf(name, sizeof name, "p%d", i);
    bed.p[i] = world_tensor(w, bed.params, name, param_bytes[i]); /* the first one likewise */
    CHECK_OK(gemini_tensor_counterpart(w->mgr, bed.p[i], bed.grads, &bed.g[i]));
    CHECK_OK(gemini_tensor_counterpart(w->mgr, bed.p[i], bed.master, &bed.s[i]));
    snprintf(name, sizeof name, "o%d", i);
    bed.o[i] = world_tensor(w, bed.other, name, other_bytes[i]);
  }
  CHECK_OK(gemini_stream_create(w->mgr, &bed.dead_stream));
  CHECK_OK(gemini_stream_destroy(w->mgr, bed.dead_stream));
  bed.x_arena = world_arena(&bed.x, GEMINI_KIND_OTHER, 1, "x", 0, 0);
  bed.x_tensor = world_tensor(&bed.x, bed.x_arena, "x", 2 * W);
  world_fill(&bed.x, bed.x_tensor, 0, 2 * W, DEVICE, 31);

  for (int i = 0; i < TRIPLE; i++) {
    world_fill(w, bed.s[i], 0, 2 * param_bytes[i], HOST, 10 + (uint64_t)i);
    world_fill(w, bed.o[i], 0, other_bytes[i], HOST, 20 + (uint64_t)i);
    world_fill(w, i < 2 ? bed.p[i] : bed.g[i], 0, param_bytes[i], DEVICE, 1 + (uint64_t)i); /* p2's bytes: a gradient */
  }
  gemini_access_t a = world_whole(bed.o[0], READ, FILES);
  CHECK_OK(gemini_move(w->mgr, &a, 1));
  CHECK_OK(gemini_tensor_state_set(w->mgr, bed.g[2], GEMINI_STATE_READY_FOR_REDUCE));
  CHECK_OK(gemini_alloc(w->mgr, 5000, w->stream, &bed.block));
  CHECK_OK(gemini_alloc(w->mgr, 600, w->stream, &bed.freed_block));
  CHECK_OK(gemini_free(w->mgr, bed.freed_block, w->stream));
  CHECK_OK(gemini_alloc(bed.x.mgr, 512, bed.x.stream, &bed.x_block));
  CHECK_OK(gemini_stream_synchronize(w->mgr, w->stream));
}

static void bed_check_bytes(void) {
  for (int i = 0; i < TRIPLE; i++) {
    CHECK(world_holds(&bed.w, bed.s[i], 0, 2 * param_bytes[i], 10 + (uint64_t)i));
    CHECK(world_holds(&bed.w, bed.o[i], 0, other_bytes[i], 20 + (uint64_t)i));
    CHECK(world_holds(&bed.w, i < 2 ? bed.p[i] : bed.g[i], 0, param_bytes[i], 1 + (uint64_t)i));
  }
  CHECK(world_holds(&bed.x, bed.x_tensor, 0, 2 * W, 31));
}

static void bed_close(void) {
  bed_check_bytes();
  world_close(&bed.w); /* refused if something were acquired */
  world_close(&bed.x);
  bed = (bed_t){ 0 };
}

/* ---- everything about both managers that can be seen without moving a byte */
typedef struct {
  figures_t stats[2];
  gemini_arena_info_t arenas[6];
  gemini_tensor_info_t tensors[4 * TRIPLE + 1];
  uint64_t arena_bytes[6][GEMINI_TIER_COUNT], tensor_bytes[4 * TRIPLE + 1][GEMINI_TIER_COUNT];
  uint64_t plan_length;
  char plan[256];
} picture_t;

static void picture_tiers(const world_t *w, gemini_object_t object, uint64_t bytes_out[GEMINI_TIER_COUNT]) {
  for (uint32_t tier = 0; tier < GEMINI_TIER_COUNT; tier++) bytes_out[tier] = world_tier_bytes(w, object, tier);
}
static picture_t picture(void) {
  picture_t p;
  memset(&p, 0, sizeof p);
  if (!bed.w.mgr) return p;
  p.stats[0] = world_stats(&bed.w);
  p.stats[1] = world_stats(&bed.x);
  const gemini_arena_t arenas[] = { bed.params, bed.grads, bed.master, bed.other, bed.empty };
  for (int i = 0; i < 5; i++) {
    p.arenas[i] = world_arena_info(&bed.w, arenas[i]);
    picture_tiers(&bed.w, OBJECT(arenas[i]), p.arena_bytes[i]);
  }
  p.arenas[5] = world_arena_info(&bed.x, bed.x_arena);
  picture_tiers(&bed.x, OBJECT(bed.x_arena), p.arena_bytes[5]);
  for (int i = 0; i < TRIPLE; i++) {
    p.tensors[i] = world_tensor_info(&bed.w, bed.p[i]);
    p.tensors[TRIPLE + i] = world_tensor_info(&bed.w, bed.g[i]);
    p.tensors[2 * TRIPLE + i] = world_tensor_info(&bed.w, bed.s[i]);
    p.tensors[3 * TRIPLE + i] = world_tensor_info(&bed.w, bed.o[i]);
  }
  p.tensors[4 * TRIPLE] = world_tensor_info(&bed.x, bed.x_tensor);
  for (int i = 0; i < 4 * TRIPLE; i++) {
    const gemini_tensor_t *const tensors[] = { bed.p, bed.g, bed.s, bed.o };
    picture_tiers(&bed.w, OBJECT(tensors[i / TRIPLE][i % TRIPLE]), p.tensor_bytes[i]);
  }
  picture_tiers(&bed.x, OBJECT(bed.x_tensor), p.tensor_bytes[4 * TRIPLE]);
  CHECK_OK(gemini_plan_explain(bed.w.mgr, sizeof p.plan, p.plan, &p.plan_length));
  return p;
}

static bool same_picture(const picture_t *before) {
  const picture_t now = picture();
  const uint8_t *a = (const uint8_t *)before, *b = (const uint8_t *)&now;
  if (!memcmp(a, b, sizeof now)) return true;
  size_t i = 0;
  while (a[i] == b[i]) i++;
  const struct {
    const char *name;
    size_t begin, size;
  } parts[] = {
    { "stats", offsetof(picture_t, stats), sizeof now.stats[0] },
    { "arena", offsetof(picture_t, arenas), sizeof now.arenas[0] },
    { "tensor", offsetof(picture_t, tensors), sizeof now.tensors[0] },
    { "bytes of a tier", offsetof(picture_t, arena_bytes), sizeof(uint64_t) },
    { "plan", offsetof(picture_t, plan_length), sizeof now },
  };
  int k = 4;
  while (i < parts[k].begin) k--;
  fprintf(stderr, "  changed: %s %zu, byte %zu\n", parts[k].name, (i - parts[k].begin) / parts[k].size,
          (i - parts[k].begin) % parts[k].size);
  return false;
}

/* texts: parts that the message must have, separated by '|' */
static void check_refused(int line, gemini_status_t status, gemini_status_t expected, const char *function,
                          const char *texts) {
  gemini_error_info_t e = world_error();
  bool right = status == expected && e.status == expected && !strcmp(e.operation, function) && *e.message;
  char copy[512], *rest = copy;
  snprintf(copy, sizeof copy, "%s", texts);
  for (char *text; right && (text = strsep(&rest, "|"));) right = strstr(e.message, text) != NULL;
  if (right) return;
  fprintf(stderr, "%s:%d: %s returned %d, expected %d; record: %s, %d, \"%s\", expected to have \"%s\"\n", __FILE__,
          line, function, status, expected, e.operation, e.status, e.message, texts);
  exit(1);
}
static void check_unchanged(int line, const char *function, const picture_t *before) {
  if (same_picture(before)) return;
  fprintf(stderr, "%s:%d: the refused call of %s changed something\n", __FILE__, line, function);
  exit(1);
}

/* Calls fn, which must refuse with a message of its own that has all texts, and must change nothing. */
#define REFUSED(expected, texts, fn, ...)                                                          \
  do {                                                                                             \
    picture_t check_before = picture();                                                            \
    CHECK_EQ(gemini_phase_set(handle_of(0xdeadbeef), 0), GEMINI_ERR_HANDLE); /* an older record */ \
    check_refused(__LINE__, fn(__VA_ARGS__), GEMINI_ERR_##expected, #fn, texts);                   \
    check_unchanged(__LINE__, #fn, &check_before);                                                 \
    cover(#fn);                                                                                    \
  } while (0)

/* Texts made of numbers; the newest 16 stay. */
static const char *text(const char *format, ...) {
  static char texts[16][256];
  static unsigned next;
  char *at = texts[next++ % 16];
  va_list args;
  va_start(args, format);
  vsnprintf(at, sizeof texts[0], format, args);
  va_end(args);
  return at;
}
static const char *hex(const void *handle) { return text("%#llx", (unsigned long long)handle_id(handle)); }

/* ---- every function with a manager that is none */
static void nothing(void *user) { (void)user; }
static void no_span(void *user, const gemini_update_span_t *span) { (void)user, (void)span; }

static void refuse_manager(gemini_manager_t mgr, const char *why) {
  const char *says = text("%s|%s", hex(mgr), why);
  gemini_arena_config_t arena_config = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_info_t arena_info = GEMINI_ARENA_INFO_INIT;
  gemini_tensor_info_t tensor_info = GEMINI_TENSOR_INFO_INIT;
  gemini_stats_t stats = GEMINI_STATS_INIT;
  gemini_tier_stats_t tier_stats = GEMINI_TIER_STATS_INIT;
  gemini_link_stats_t link_stats = GEMINI_LINK_STATS_INIT;
  uint32_t links = 77;
  const uint32_t modes[] = { READ };
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.arenas = &bed.other;
  update.modes = modes;
  update.arena_count = 1;
  update.fn = no_span;
  gemini_access_t a = world_whole(bed.o[2], READ, HOST);
  any_handle_t out = { UNTOUCHED };
  void *ptr = NULL;
  double norm = -1;
  if (mgr) REFUSED(HANDLE, says, gemini_manager_close, mgr);
  REFUSED(HANDLE, says, gemini_budget_set, mgr, HOST, 40 * W);
  REFUSED(HANDLE, says, gemini_hook_set, mgr, 0);
  REFUSED(HANDLE, says, gemini_hook_clear, mgr);
  REFUSED(HANDLE, says, gemini_hook_compacted, mgr);
  REFUSED(HANDLE, says, gemini_hook_forget, mgr, NULL);
  REFUSED(HANDLE, says, gemini_stream_create, mgr, &out.stream);
  REFUSED(HANDLE, says, gemini_stream_adopt, mgr, &out.stream, &out.stream);
  REFUSED(HANDLE, says, gemini_stream_native, mgr, GEMINI_STREAM_CALLER, &ptr);
  REFUSED(HANDLE, says, gemini_stream_destroy, mgr, bed.w.stream);
  REFUSED(HANDLE, says, gemini_stream_destroy, mgr, NULL);
  REFUSED(HANDLE, says, gemini_stream_call, mgr, GEMINI_STREAM_CALLER, nothing, NULL);
  REFUSED(HANDLE, says, gemini_stream_synchronize, mgr, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_arena_create, mgr, &arena_config, &out.arena);
  REFUSED(HANDLE, says, gemini_arena_destroy, mgr, bed.other);
  REFUSED(HANDLE, says, gemini_arena_destroy, mgr, 0);
  REFUSED(HANDLE, says, gemini_arena_info, mgr, bed.other, &arena_info);
  REFUSED(HANDLE, says, gemini_arena_take, mgr, bed.other, 64, &out.id);
  REFUSED(HANDLE, says, gemini_arena_take_pointer, mgr, bed.other, 64, &ptr);
  gemini_location_t location = GEMINI_LOCATION_INIT;
  REFUSED(HANDLE, says, gemini_locate, mgr, &location, &location);
  REFUSED(HANDLE, says, gemini_tensor_register, mgr, bed.other, "new", 64, GEMINI_OFFSET_NEXT, &out.tensor);
  REFUSED(HANDLE, says, gemini_tensor_unregister, mgr, bed.o[0]);
  REFUSED(HANDLE, says, gemini_tensor_unregister, mgr, 0);
  REFUSED(HANDLE, says, gemini_tensor_find, mgr, "p0", &out.tensor);
  REFUSED(HANDLE, says, gemini_tensor_counterpart, mgr, bed.p[0], bed.master, &out.tensor);
  REFUSED(HANDLE, says, gemini_tensor_state_set, mgr, bed.o[0], GEMINI_STATE_FREE);
  REFUSED(HANDLE, says, gemini_tensor_info, mgr, bed.o[0], &tensor_info);
  REFUSED(HANDLE, says, gemini_iteration_begin, mgr);
  REFUSED(HANDLE, says, gemini_iteration_begin_with, mgr, 1);
  REFUSED(HANDLE, says, gemini_iteration_end, mgr);
  REFUSED(HANDLE, says, gemini_phase_set, mgr, GEMINI_PHASE_FORWARD);
  REFUSED(HANDLE, says, gemini_op_begin, mgr, "op", GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_op_begin_with, mgr, "op", GEMINI_STREAM_CALLER, &a, 1);
  REFUSED(HANDLE, says, gemini_op_begin_chosen, mgr, "op", GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_op_end, mgr);
  REFUSED(HANDLE, says, gemini_acquire, mgr, &a, 1, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_release, mgr, &a, 1, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_acquire, mgr, NULL, 0, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_release, mgr, NULL, 0, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_hint, mgr, &a, 1);
  REFUSED(HANDLE, says, gemini_priority_set, mgr, &a, 1, 1);
  REFUSED(HANDLE, says, gemini_move, mgr, &a, 1);
  REFUSED(HANDLE, says, gemini_pin, mgr, &a);
  REFUSED(HANDLE, says, gemini_unpin, mgr, &a);
  REFUSED(HANDLE, says, gemini_graph_begin, mgr, GEMINI_STREAM_CALLER, W, &out.graph);
  REFUSED(HANDLE, says, gemini_graph_end, mgr, 0);
  REFUSED(HANDLE, says, gemini_graph_enter, mgr, 0, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_graph_leave, mgr, 0);
  REFUSED(HANDLE, says, gemini_graph_destroy, mgr, NULL);
  gemini_group_config_t group = GEMINI_GROUP_CONFIG_INIT;
  gemini_group_stats_t group_stats = GEMINI_GROUP_STATS_INIT;
  gemini_group_t group_out = NULL;
  uint64_t slice[2] = { 77, 77 };
  REFUSED(HANDLE, says, gemini_group_open, mgr, &group, &group_out);
  REFUSED(HANDLE, says, gemini_group_close, mgr, NULL);
  REFUSED(HANDLE, says, gemini_group_exchange, mgr, NULL, NULL, 0, NULL);
  REFUSED(HANDLE, says, gemini_group_stats, mgr, NULL, &group_stats);
  REFUSED(HANDLE, says, gemini_group_checkpoint, mgr, NULL, ".", "run");
  REFUSED(HANDLE, says, gemini_group_resume, mgr, NULL, ".", "run");
  REFUSED(HANDLE, says, gemini_slice_next, mgr, &a, 0, &slice[0], &slice[1]);
  CHECK(!group_out && slice[0] == 77 && slice[1] == 77);
  REFUSED(HANDLE, says, gemini_alloc, mgr, 512, GEMINI_STREAM_CALLER, &ptr);
  REFUSED(HANDLE, says, gemini_free, mgr, bed.block, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_free, mgr, NULL, GEMINI_STREAM_CALLER);
  REFUSED(HANDLE, says, gemini_host_alloc, mgr, 512, 0, &ptr);
  REFUSED(HANDLE, says, gemini_host_free, mgr, bed.block);
  REFUSED(HANDLE, says, gemini_host_free, mgr, NULL);
  REFUSED(HANDLE, says, gemini_checkpoint, mgr);
  REFUSED(HANDLE, says, gemini_resume, mgr);
  REFUSED(HANDLE, says, gemini_zero, mgr, &a);
  REFUSED(HANDLE, says, gemini_discard, mgr, &a);
  REFUSED(HANDLE, says, gemini_load, mgr, &a, 0, 0);
  REFUSED(HANDLE, says, gemini_borrow, mgr, &a, 0, 0);
  REFUSED(HANDLE, says, gemini_store, mgr, &a, 1, 0);
  REFUSED(HANDLE, says, gemini_norm, mgr, &a, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm);
  REFUSED(HANDLE, says, gemini_update, mgr, &update);
  REFUSED(HANDLE, says, gemini_update_drop, mgr);
  REFUSED(HANDLE, says, gemini_update_wait, mgr);
  REFUSED(HANDLE, says, gemini_stats, mgr, &stats);
  REFUSED(HANDLE, says, gemini_tier_stats, mgr, HOST, &tier_stats);
  REFUSED(HANDLE, says, gemini_link_count, mgr, &links);
  REFUSED(HANDLE, says, gemini_link_stats, mgr, 0, GEMINI_REASON_ALL, &link_stats);
  REFUSED(HANDLE, says, gemini_tier_bytes, mgr, &a, &out.id);
  REFUSED(HANDLE, says, gemini_stats_reset, mgr);
  REFUSED(HANDLE, says, gemini_manager_dump, mgr, 0, NULL, &out.id);
  REFUSED(HANDLE, says, gemini_stats_text, mgr, 0, NULL, &out.id);
  REFUSED(HANDLE, says, gemini_explain_address, mgr, &out, 0, NULL, &out.id);
  REFUSED(HANDLE, says, gemini_plan_explain, mgr, 0, NULL, &out.id);
  REFUSED(HANDLE, says, gemini_trace_save, mgr, "/nowhere/trace");
  REFUSED(HANDLE, says, gemini_trace_load, mgr, "/nowhere/trace");
  REFUSED(HANDLE, says, gemini_timeline_start, mgr, "/nowhere/timeline");
  REFUSED(HANDLE, says, gemini_timeline_stop, mgr);
  CHECK_EQ(out.id, UNTOUCHED);
  CHECK(!ptr && norm == -1 && !a.ptr && links == 77);
}

static void test_manager_that_is_none_is_refused_everywhere(void) {
  bed_open();
  void *const none[] = { NULL,
                         handle_of(1),
                         handle_of(UINT64_MAX),
                         bed.dead_mgr,
                         handle_of(handle_id(bed.w.mgr) ^ UINT64_C(1) << 42),
                         handle_of(handle_id(bed.w.mgr) | 1),
                         bed.w.stream,
                         bed.other,
                         bed.o[0] };
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) refuse_manager(none[i], "is no open manager");
  CHECK_OK(gemini_manager_close(0));
  bed_close();
}

/* In a child, what the parent opened is refused with the process that has it; nothing there can reach the parent's bytes. */
static void test_manager_of_a_parent_is_refused_everywhere(void) {
  bed_open();
  const pid_t parent = getpid();
  const pid_t child = fork_child();
  if (!child) {
    const char *why = text("of process %ld|forked", (long)parent);
    gemini_manager_t managers[2] = { bed.w.mgr, bed.x.mgr };
    bed.w.mgr = 0; /* there is nothing to be seen of them */
    for (int i = 0; i < 2; i++) refuse_manager(managers[i], why);
    refuse_manager(bed.dead_mgr, "is no open manager");
    _exit(0);
  }
  fork_expect_end(child);
  bed_close();
}

/* ---- every function with an arena, tensor, stream that is none */
static void test_arena_that_is_none_is_refused_everywhere(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  void *const none[] = { NULL,
                         handle_of(1),
                         handle_of(UINT64_MAX),
                         bed.dead_arena,
                         bed.x_arena,
                         mgr,
                         bed.x.mgr,
                         bed.dead_mgr,
                         bed.w.stream,
                         bed.o[0],
                         bed.p[0],
                         bed.x_tensor,
                         handle_of(handle_id(bed.other) ^ UINT64_C(1) << 32),
                         handle_of(handle_id(bed.other) | UINT32_MAX) };
  const uint32_t modes[] = { READ, READ };
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    const char *says = hex(none[i]);
    any_handle_t out = { UNTOUCHED };
    gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
    info.base = UNTOUCHED;
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
    if (none[i]) {
      REFUSED(HANDLE, says, gemini_arena_destroy, mgr, none[i]);
      c.like = none[i];
      REFUSED(HANDLE, says, gemini_arena_create, mgr, &c, &out.arena);
      c.like = 0;
      c.kind = GEMINI_KIND_GRAD;
      c.reuse = none[i];
      REFUSED(HANDLE, says, gemini_arena_create, mgr, &c, &out.arena);
    }
    REFUSED(HANDLE, says, gemini_arena_info, mgr, none[i], &info);
    REFUSED(HANDLE, says, gemini_arena_take, mgr, none[i], 64, &out.id);
    REFUSED(HANDLE, says, gemini_arena_take_pointer, mgr, none[i], 64, (void **)&out.id);
    REFUSED(HANDLE, says, gemini_tensor_register, mgr, none[i], "new", 64, GEMINI_OFFSET_NEXT, &out.tensor);
    REFUSED(HANDLE, says, gemini_tensor_counterpart, mgr, bed.p[0], none[i], &out.tensor);
    const gemini_arena_t arenas[] = { bed.params, none[i] };
    gemini_update_t update = GEMINI_UPDATE_INIT;
    update.arenas = arenas;
    update.modes = modes;
    update.arena_count = 2;
    update.fn = no_span;
    REFUSED(HANDLE, says, gemini_update, mgr, &update);
    CHECK(out.id == UNTOUCHED && info.base == UNTOUCHED);
  }
  CHECK_OK(gemini_arena_destroy(mgr, 0));
  bed_close();
}

static void test_tensor_that_is_none_is_refused_everywhere(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  void *const none[] = { NULL,
                         handle_of(1),
                         handle_of(UINT64_MAX),
                         bed.dead_tensor,
                         bed.x_arena,
                         bed.x.mgr,
                         bed.dead_mgr,
                         bed.w.stream,
                         mgr,
                         bed.other,
                         bed.x_tensor,
                         handle_of(handle_id(bed.o[0]) ^ UINT64_C(1) << 32),
                         handle_of(handle_id(bed.o[0]) | UINT32_MAX) };
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    const char *says = hex(none[i]);
    any_handle_t out = { UNTOUCHED };
    gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
    info.address = UNTOUCHED;
    if (none[i]) REFUSED(HANDLE, says, gemini_tensor_unregister, mgr, none[i]);
    REFUSED(HANDLE, says, gemini_tensor_counterpart, mgr, none[i], bed.master, &out.tensor);
    for (uint32_t state = 0; state <= GEMINI_STATE_COUNT; state++)
      REFUSED(HANDLE, says, gemini_tensor_state_set, mgr, none[i], state);
    REFUSED(HANDLE, says, gemini_tensor_info, mgr, none[i], &info);
    CHECK(out.id == UNTOUCHED && info.address == UNTOUCHED);
  }
  CHECK_OK(gemini_tensor_unregister(mgr, 0));
  bed_close();
}

static void test_stream_that_is_none_is_refused_everywhere(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  void *const none[] = { handle_of(1),
                         handle_of(UINT64_MAX),
                         bed.dead_stream,
                         bed.x.stream,
                         bed.x_arena,
                         bed.x.mgr,
                         bed.x_tensor,
                         mgr,
                         bed.other,
                         bed.o[0],
                         bed.dead_mgr,
                         handle_of(handle_id(bed.w.stream) ^ UINT64_C(1) << 32),
                         handle_of(handle_id(bed.w.stream) | UINT32_MAX) };
  const uint32_t modes[] = { READ };
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.arenas = &bed.other;
  update.modes = modes;
  update.arena_count = 1;
  update.fn = no_span;
  CHECK_OK(gemini_iteration_begin(mgr));
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    const char *says = hex(none[i]);
    gemini_access_t a = world_whole(bed.o[2], READ, DEVICE);
    void *ptr = NULL;
    double norm = -1;
    update.stream = none[i];
    REFUSED(HANDLE, says, gemini_stream_destroy, mgr, none[i]);
    REFUSED(HANDLE, says, gemini_stream_call, mgr, none[i], nothing, NULL);
    REFUSED(HANDLE, says, gemini_stream_synchronize, mgr, none[i]);
    REFUSED(HANDLE, says, gemini_op_begin, mgr, "op", none[i]);
    REFUSED(HANDLE, says, gemini_op_begin_with, mgr, "op", none[i], &a, 1);
    REFUSED(HANDLE, says, gemini_op_begin_chosen, mgr, "op", none[i]);
    REFUSED(HANDLE, says, gemini_acquire, mgr, &a, 1, none[i]);
    REFUSED(HANDLE, says, gemini_acquire, mgr, NULL, 0, none[i]);
    CHECK_OK(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
    REFUSED(HANDLE, says, gemini_release, mgr, &a, 1, none[i]);
    CHECK_OK(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
    REFUSED(HANDLE, says, gemini_alloc, mgr, 512, none[i], &ptr);
    REFUSED(HANDLE, says, gemini_free, mgr, bed.block, none[i]);
    REFUSED(HANDLE, says, gemini_norm, mgr, &a, GEMINI_DTYPE_F32, none[i], &norm);
    REFUSED(HANDLE, says, gemini_update, mgr, &update);
    CHECK(!ptr && norm == -1);
  }
  CHECK_EQ(gemini_op_end(mgr), GEMINI_ERR_STATE); /* none of them opened */
  CHECK_OK(gemini_iteration_end(mgr));
  CHECK_OK(gemini_free(mgr, bed.block, GEMINI_STREAM_CALLER)); /* still there */
  CHECK_OK(gemini_stream_destroy(mgr, NULL));
  bed_close();
}

static void test_object_that_is_none_is_refused_everywhere(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  void *const none[] = { NULL,
                         handle_of(1),
                         handle_of(UINT64_MAX),
                         bed.dead_tensor,
                         bed.dead_arena,
                         bed.x_tensor,
                         bed.x_arena,
                         mgr,
                         bed.dead_mgr,
                         bed.w.stream,
                         handle_of(handle_id(bed.o[0]) ^ UINT64_C(1) << 32),
                         handle_of(handle_id(bed.o[0]) | UINT32_MAX),
                         handle_of(handle_id(bed.other) | UINT32_MAX) };
  FILE *file = tmpfile();
  CHECK(file && fputs("some text that is long enough for any of these ranges: sixty-four bytes", file) >= 0);
  CHECK(!fflush(file));
  const int fd = fileno(file);
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    const char *says = hex(none[i]);
    double norm = -1;
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
      gemini_access_t a[3] = { world_whole(bed.o[2], READ, tier), world_whole(none[i], READ, tier),
                               world_whole(bed.o[0], READ, tier) };
      a[0].ptr = a[1].ptr = a[2].ptr = &norm;
      REFUSED(HANDLE, says, gemini_acquire, mgr, &a[1], 1, GEMINI_STREAM_CALLER);
      REFUSED(HANDLE, says, gemini_acquire, mgr, a, 3, bed.w.stream);
      CHECK(a[0].ptr == &norm && a[1].ptr == &norm && a[2].ptr == &norm);
      REFUSED(HANDLE, says, gemini_release, mgr, &a[1], 1, GEMINI_STREAM_CALLER);
      REFUSED(HANDLE, says, gemini_hint, mgr, a, 3);
      REFUSED(HANDLE, says, gemini_move, mgr, a, 3);
      REFUSED(HANDLE, says, gemini_pin, mgr, &a[1]);
      REFUSED(HANDLE, says, gemini_unpin, mgr, &a[1]);
      REFUSED(HANDLE, says, gemini_zero, mgr, &a[1]);
      REFUSED(HANDLE, says, gemini_discard, mgr, &a[1]);
      REFUSED(HANDLE, says, gemini_load, mgr, &a[1], fd, 0);
      REFUSED(HANDLE, says, gemini_store, mgr, &a[1], fd, 0);
      REFUSED(HANDLE, says, gemini_norm, mgr, &a[1], GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm);
      CHECK(norm == -1);
    }
  }
  CHECK(!fclose(file));
  bed_close();
}

/* ---- results without a place */
static void test_null_arguments_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_config_t config = world_config(4, 4, 0);
  gemini_arena_config_t arena_config = GEMINI_ARENA_CONFIG_INIT;
  gemini_access_t a = world_whole(bed.o[2], READ, HOST);
  any_handle_t out = { UNTOUCHED };
  double norm = -1;
  REFUSED(INVALID, "config is NULL", gemini_manager_open, NULL, &out.manager);
  REFUSED(INVALID, "mgr_out is NULL", gemini_manager_open, &config, NULL);
  REFUSED(INVALID, "stream_out is NULL", gemini_stream_create, mgr, NULL);
  REFUSED(INVALID, "fn is NULL", gemini_stream_call, mgr, GEMINI_STREAM_CALLER, NULL, NULL);
  REFUSED(INVALID, "fn is NULL", gemini_stream_call, mgr, bed.w.stream, NULL, NULL);
  REFUSED(INVALID, "config is NULL", gemini_arena_create, mgr, NULL, &out.arena);
  REFUSED(INVALID, "arena_out is NULL", gemini_arena_create, mgr, &arena_config, NULL);
  REFUSED(INVALID, "info_out is NULL", gemini_arena_info, mgr, bed.other, NULL);
  REFUSED(INVALID, "offset_out is NULL", gemini_arena_take, mgr, bed.other, 64, NULL);
  REFUSED(INVALID, "ptr_out is NULL", gemini_arena_take_pointer, mgr, bed.other, 64, NULL);
  REFUSED(INVALID, "location_out is NULL", gemini_locate, mgr,
          (void *)(uintptr_t)world_tensor_info(&bed.w, bed.o[0]).address, NULL);
  REFUSED(INVALID, "accesses is NULL|1", gemini_op_begin_with, mgr, "op", GEMINI_STREAM_CALLER, NULL, 1);
  REFUSED(INVALID, "accesses is NULL|1", gemini_priority_set, mgr, NULL, 1, 0);
  REFUSED(INVALID, "priority is 256|0 to 255", gemini_priority_set, mgr, NULL, 0, 256);
  REFUSED(INVALID, "text_out is NULL|16", gemini_stats_text, mgr, 16, NULL, &out.id);
  REFUSED(INVALID, "text_out is NULL|16", gemini_explain_address, mgr, &out, 16, NULL, &out.id);
  const uint32_t rows[] = { 0, 1 };
  gemini_access_t table = world_part(bed.o[0], 0, 3 * W, READ, DEVICE), row[2];
  REFUSED(INVALID, "table is NULL", gemini_row_accesses, NULL, 64, 4, 2, rows, 2, row, &out.id);
  REFUSED(INVALID, "rows is NULL|2", gemini_row_accesses, &table, 64, 4, 2, NULL, 2, row, &out.id);
  REFUSED(INVALID, "accesses_out is NULL", gemini_row_accesses, &table, 64, 4, 2, rows, 2, NULL, &out.id);
  REFUSED(INVALID, "count_out is NULL", gemini_row_accesses, &table, 64, 4, 2, rows, 2, row, NULL);
  REFUSED(INVALID, "capacity is 0", gemini_row_accesses, &table, 64, 4, 2, rows, 0, row, &out.id);
  REFUSED(INVALID, "row_bytes is 0|196608", gemini_row_accesses, &table, 0, 4, 2, rows, 2, row, &out.id);
  REFUSED(INVALID, "row_bytes is 100|196608", gemini_row_accesses, &table, 100, 4, 2, rows, 2, row, &out.id);
  const gemini_access_t beyond = gemini_tensor_access(handle_of(7), UINT64_MAX - 99, 128, 0, 0);
  REFUSED(INVALID, "offset_bytes is 18446744073709551516|128", gemini_row_accesses, &beyond, 64, 4, 2, rows, 2, row,
          &out.id);
  REFUSED(INVALID, "index_bytes is 2|4 or 8", gemini_row_accesses, &table, 64, 2, 2, rows, 2, row, &out.id);
  REFUSED(INVALID, "row_count is 1048577|1048576", gemini_row_accesses, &table, 64, 4, BATCH_LIMIT + 1, rows, 2, row,
          &out.id);
  REFUSED(INVALID, "name is NULL", gemini_tensor_register, mgr, bed.other, NULL, 64, GEMINI_OFFSET_NEXT, &out.tensor);
  REFUSED(INVALID, "tensor_out is NULL", gemini_tensor_register, mgr, bed.other, "new", 64, GEMINI_OFFSET_NEXT, NULL);
  REFUSED(INVALID, "name is NULL", gemini_tensor_find, mgr, NULL, &out.tensor);
  REFUSED(INVALID, "tensor_out is NULL", gemini_tensor_find, mgr, "p0", NULL);
  REFUSED(INVALID, "tensor_out is NULL", gemini_tensor_counterpart, mgr, bed.p[0], bed.master, NULL);
  REFUSED(INVALID, "info_out is NULL", gemini_tensor_info, mgr, bed.p[0], NULL);
  REFUSED(INVALID, "accesses is NULL|1", gemini_acquire, mgr, NULL, 1, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, "accesses is NULL|1", gemini_release, mgr, NULL, 1, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, "accesses is NULL|3", gemini_hint, mgr, NULL, 3);
  REFUSED(INVALID, "accesses is NULL|3", gemini_move, mgr, NULL, 3);
  REFUSED(INVALID, "access is NULL", gemini_pin, mgr, NULL);
  REFUSED(INVALID, "access is NULL", gemini_unpin, mgr, NULL);
  REFUSED(INVALID, "ptr_out is NULL", gemini_alloc, mgr, 512, GEMINI_STREAM_CALLER, NULL);
  REFUSED(INVALID, "access is NULL", gemini_zero, mgr, NULL);
  REFUSED(INVALID, "access is NULL", gemini_discard, mgr, NULL);
  REFUSED(INVALID, "access is NULL", gemini_load, mgr, NULL, 0, 0);
  REFUSED(INVALID, "access is NULL", gemini_borrow, mgr, NULL, 0, 0);
  REFUSED(INVALID, "access is NULL", gemini_store, mgr, NULL, 1, 0);
  REFUSED(INVALID, "access is NULL", gemini_norm, mgr, NULL, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm);
  REFUSED(INVALID, "norm_out is NULL", gemini_norm, mgr, &a, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, NULL);
  REFUSED(INVALID, "update is NULL", gemini_update, mgr, NULL);
  REFUSED(INVALID, "stats_out is NULL", gemini_stats, mgr, NULL);
  REFUSED(INVALID, "stats_out is NULL", gemini_tier_stats, mgr, HOST, NULL);
  REFUSED(INVALID, "count_out is NULL", gemini_link_count, mgr, NULL);
  REFUSED(INVALID, "stats_out is NULL", gemini_link_stats, mgr, 0, GEMINI_REASON_PLAN, NULL);
  REFUSED(INVALID, "range is NULL", gemini_tier_bytes, mgr, NULL, &out.id);
  REFUSED(INVALID, "bytes_out is NULL", gemini_tier_bytes, mgr, &a, NULL);
  REFUSED(INVALID, "text_out is NULL|16", gemini_plan_explain, mgr, 16, NULL, &out.id);
  REFUSED(INVALID, "text_out is NULL|16", gemini_manager_dump, mgr, 16, NULL, &out.id);
  REFUSED(INVALID, "path is NULL", gemini_trace_save, mgr, NULL);
  REFUSED(INVALID, "path is NULL", gemini_trace_load, mgr, NULL);
  REFUSED(INVALID, "path is NULL", gemini_timeline_start, mgr, NULL);
  gemini_config_t planned = GEMINI_CONFIG_INIT;
  gemini_forecast_t forecast = GEMINI_FORECAST_INIT;
  planned.device_bytes = planned.host_bytes = 1 << 20;
  REFUSED(INVALID, "config is NULL", gemini_plan_forecast, NULL, "/nowhere/trace", &forecast, 0, NULL, &out.id);
  REFUSED(INVALID, "trace_path is NULL", gemini_plan_forecast, &planned, NULL, &forecast, 0, NULL, &out.id);
  REFUSED(INVALID, "text_out is NULL|16", gemini_plan_forecast, &planned, "/nowhere/trace", &forecast, 16, NULL,
          &out.id);
  REFUSED(IO, "/nowhere/trace", gemini_plan_forecast, &planned, "/nowhere/trace", &forecast, 0, NULL, &out.id);
  planned.device_bytes = 0;
  REFUSED(INVALID, "device_bytes is 0", gemini_plan_forecast, &planned, "/nowhere/trace", &forecast, 0, NULL, &out.id);
  CHECK(out.id == UNTOUCHED && norm == -1);
  /* NULL that the header allows. */
  CHECK_OK(gemini_acquire(mgr, NULL, 0, bed.w.stream));
  CHECK_OK(gemini_release(mgr, NULL, 0, bed.w.stream));
  CHECK_OK(gemini_hint(mgr, NULL, 0));
  CHECK_OK(gemini_move(mgr, NULL, 0));
  CHECK_OK(gemini_free(mgr, NULL, bed.w.stream));
  CHECK_OK(gemini_plan_explain(mgr, 0, NULL, NULL));
  bed_close();
}

/* ---- structs and their sizes. A page holds any size that is accepted. */
typedef union {
  uint32_t struct_size;
  uint8_t bytes[4200];
} page_t;

static page_t page_of(const void *from, size_t size, uint32_t struct_size, uint8_t rest) {
  page_t page;
  memset(page.bytes, rest, sizeof page.bytes);
  memcpy(page.bytes, from, size);
  page.struct_size = struct_size;
  return page;
}

static const uint32_t wrong_sizes[] = { 0, 1, 4, 4097, 8192, UINT32_MAX };

static void test_input_structs_of_wrong_size_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_config_t config = world_config(4, 4, 0);
  gemini_arena_config_t arena_config = GEMINI_ARENA_CONFIG_INIT;
  const uint32_t modes[] = { READ };
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.arenas = &bed.other;
  update.modes = modes;
  update.arena_count = 1;
  update.fn = no_span;
  any_handle_t out = { UNTOUCHED };
  for (size_t i = 0; i <= sizeof wrong_sizes / sizeof *wrong_sizes; i++) {
    bool below = i == sizeof wrong_sizes / sizeof *wrong_sizes; /* one byte too small */
    uint32_t wrong = below ? 0 : wrong_sizes[i];
    page_t p = page_of(&config, sizeof config, below ? sizeof config - 1 : wrong, 0);
    REFUSED(INVALID, text("struct_size is %u|%zu to 4096", p.struct_size, sizeof config), gemini_manager_open,
            (const gemini_config_t *)p.bytes, &out.manager);
    const size_t first = offsetof(gemini_arena_config_t, group); /* its size before it had groups */
    p = page_of(&arena_config, sizeof arena_config, below ? first - 1 : wrong, 0);
    REFUSED(INVALID, text("struct_size is %u|%zu to 4096", p.struct_size, first), gemini_arena_create, mgr,
            (const gemini_arena_config_t *)p.bytes, &out.arena);
    const size_t older = offsetof(gemini_update_t, user_bytes); /* likewise */
    p = page_of(&update, sizeof update, below ? older - 1 : wrong, 0);
    REFUSED(INVALID, text("struct_size is %u|%zu to 4096", p.struct_size, older), gemini_update, mgr,
            (const gemini_update_t *)p.bytes);
  }
  CHECK_EQ(out.id, UNTOUCHED);
  bed_close();
}

static void test_longer_input_structs_are_fine_while_the_rest_is_zero(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_config_t config = world_config(4, 4, 0);
  gemini_arena_config_t arena_config = GEMINI_ARENA_CONFIG_INIT;
  const uint32_t modes[] = { READ };
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.arenas = &bed.other;
  update.modes = modes;
  update.arena_count = 1;
  update.fn = no_span;
  for (int i = 0; i < 3; i++) { /* how much longer: by a byte, by some, as much as there may be */
    uint32_t longer[] = { 1, 64, 4096 };
    uint64_t size, at;
    any_handle_t out = { UNTOUCHED };
    page_t p;
#define SIZE_OF(type) (size = longer[i] == 4096 ? 4096 : sizeof(type) + longer[i])
    for (int first = 0; first < 2; first++) { /* the first byte behind what is known is set, or the last */
      p = page_of(&config, sizeof config, (uint32_t)SIZE_OF(config), 0);
      p.bytes[at = first ? sizeof config : size - 1] = 1;
      REFUSED(INVALID, text("byte %d|%zu", (int)at, sizeof config), gemini_manager_open,
              (const gemini_config_t *)p.bytes, &out.manager);
      p = page_of(&arena_config, sizeof arena_config, (uint32_t)SIZE_OF(arena_config), 0);
      p.bytes[at = first ? sizeof arena_config : size - 1] = 1;
      REFUSED(INVALID, text("byte %d|%zu", (int)at, sizeof arena_config), gemini_arena_create, mgr,
              (const gemini_arena_config_t *)p.bytes, &out.arena);
      p = page_of(&update, sizeof update, (uint32_t)SIZE_OF(update), 0);
      p.bytes[at = first ? sizeof update : size - 1] = 1;
      REFUSED(INVALID, text("byte %d|%zu", (int)at, sizeof update), gemini_update, mgr,
              (const gemini_update_t *)p.bytes);
    }
    CHECK_EQ(out.id, UNTOUCHED);
    p = page_of(&config, sizeof config, (uint32_t)SIZE_OF(config), 0);
    memset(p.bytes + size, 0xff, sizeof p.bytes - size); /* not looked at */
    CHECK_OK(gemini_manager_open((const gemini_config_t *)p.bytes, &out.manager));
    CHECK_OK(gemini_manager_close(out.manager));
    p = page_of(&arena_config, sizeof arena_config, (uint32_t)SIZE_OF(arena_config), 0);
    memset(p.bytes + size, 0xff, sizeof p.bytes - size);
    CHECK_OK(gemini_arena_create(mgr, (const gemini_arena_config_t *)p.bytes, &out.arena));
    CHECK_OK(gemini_arena_destroy(mgr, out.arena));
    p = page_of(&update, sizeof update, (uint32_t)SIZE_OF(update), 0);
    memset(p.bytes + size, 0xff, sizeof p.bytes - size);
    CHECK_OK(gemini_update(mgr, (const gemini_update_t *)p.bytes));
#undef SIZE_OF
  }
  bed_close();
}

static bool all_are(const uint8_t *bytes, size_t begin, size_t end, uint8_t value) {
  while (begin < end && bytes[begin] == value) begin++;
  return begin == end;
}

static void test_output_structs_of_wrong_size_are_refused_and_longer_ones_are_filled_in_part(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const size_t sizes[] = { offsetof(gemini_arena_info_t, element_bytes), sizeof(gemini_tensor_info_t),
                           offsetof(gemini_stats_t, speculated_elements), sizeof(gemini_tier_stats_t),
                           sizeof(gemini_link_stats_t) };
  for (int what = 0; what < 5; what++) {
    for (size_t i = 0; i <= sizeof wrong_sizes / sizeof *wrong_sizes; i++) {
      uint32_t wrong = i < sizeof wrong_sizes / sizeof *wrong_sizes ? wrong_sizes[i] : (uint32_t)sizes[what] - 1;
      page_t p = page_of(&wrong, 4, wrong, 0xa5);
      const char *says = text("struct_size is %u|%zu to 4096", wrong, sizes[what]);
      if (what == 0) REFUSED(INVALID, says, gemini_arena_info, mgr, bed.other, (gemini_arena_info_t *)p.bytes);
      if (what == 1) REFUSED(INVALID, says, gemini_tensor_info, mgr, bed.o[0], (gemini_tensor_info_t *)p.bytes);
      if (what == 2) REFUSED(INVALID, says, gemini_stats, mgr, (gemini_stats_t *)p.bytes);
      if (what == 3) REFUSED(INVALID, says, gemini_tier_stats, mgr, HOST, (gemini_tier_stats_t *)p.bytes);
      if (what == 4) REFUSED(INVALID, says, gemini_link_stats, mgr, 0, 0, (gemini_link_stats_t *)p.bytes);
      CHECK_EQ(p.struct_size, wrong);
      CHECK(all_are(p.bytes, 4, sizeof p.bytes, 0xa5));
    }
    const uint32_t right[] = { (uint32_t)sizes[what], (uint32_t)sizes[what] + 1, (uint32_t)sizes[what] + 100, 4096 };
    for (int i = 0; i < 4; i++) {
      page_t p = page_of(&right[i], 4, right[i], 0xa5);
      if (what == 0) CHECK_OK(gemini_arena_info(mgr, bed.other, (gemini_arena_info_t *)p.bytes));
      if (what == 1) CHECK_OK(gemini_tensor_info(mgr, bed.o[0], (gemini_tensor_info_t *)p.bytes));
      if (what == 2) CHECK_OK(gemini_stats(mgr, (gemini_stats_t *)p.bytes));
      if (what == 3) CHECK_OK(gemini_tier_stats(mgr, HOST, (gemini_tier_stats_t *)p.bytes));
      if (what == 4) CHECK_OK(gemini_link_stats(mgr, 0, 0, (gemini_link_stats_t *)p.bytes));
      const size_t now = what == 0 ? sizeof(gemini_arena_info_t) : what == 2 ? sizeof(gemini_stats_t) : sizes[what];
      const size_t filled = right[i] < now ? right[i] : now;
      CHECK_EQ(p.struct_size, filled);
      CHECK(!all_are(p.bytes, sizes[what] - 8, sizes[what], 0xa5));
      CHECK(all_are(p.bytes, filled, sizeof p.bytes, 0xa5));
    }
  }
  bed_close();
}

static void *fresh_thread(void *user) {
  *(gemini_error_info_t *)user = world_error();
  return NULL;
}
static void test_error_set_takes_errors_only(void) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT, again;
  info.status = GEMINI_ERR_DEVICE;
  info.native_code = -7;
  memset(info.operation, 'o', sizeof info.operation); /* nothing ends them */
  memset(info.message, 'm', sizeof info.message);
  CHECK_OK(gemini_error_set(&info));
  cover("gemini_error_set");
  again = world_error();
  CHECK(again.status == GEMINI_ERR_DEVICE && again.native_code == -7);
  CHECK_EQ(strspn(again.operation, "o"), sizeof info.operation - 1);
  CHECK_EQ(strspn(again.message, "m"), sizeof info.message - 1);
  CHECK_EQ(gemini_error_set(NULL), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "info is NULL");
  info.status = GEMINI_OK;
  CHECK_EQ(gemini_error_set(&info), GEMINI_ERR_INVALID);
  CHECK_SAYS(world_error().message, "info: status is 0");
  for (size_t i = 0; i < sizeof wrong_sizes / sizeof *wrong_sizes; i++) {
    info.status = GEMINI_ERR_IO;
    info.struct_size = wrong_sizes[i];
    CHECK_EQ(gemini_error_set(&info), GEMINI_ERR_INVALID);
    CHECK_SAYS(world_error().message, "info: struct_size");
  }
}
static void test_last_error_keeps_its_record(void) {
  CHECK_EQ(gemini_phase_set(handle_of(0xdeadbeef), 0), GEMINI_ERR_HANDLE);
  const gemini_error_info_t first = world_error();
  CHECK(!strcmp(first.operation, "gemini_phase_set") && strstr(first.message, "0xdeadbeef"));
  CHECK_EQ(gemini_last_error(NULL), GEMINI_ERR_INVALID);
  cover("gemini_last_error");
  for (size_t i = 0; i <= sizeof wrong_sizes / sizeof *wrong_sizes; i++) {
    uint32_t wrong = i < sizeof wrong_sizes / sizeof *wrong_sizes ? wrong_sizes[i] : (uint32_t)sizeof first - 1;
    page_t p = page_of(&wrong, 4, wrong, 0xa5);
    CHECK_EQ(gemini_last_error((gemini_error_info_t *)p.bytes), GEMINI_ERR_INVALID);
    CHECK(p.struct_size == wrong && all_are(p.bytes, 4, sizeof p.bytes, 0xa5));
  }
  page_t p = page_of(&first, 4, 4096, 0xa5);
  CHECK_OK(gemini_last_error((gemini_error_info_t *)p.bytes));
  CHECK_EQ(p.struct_size, sizeof first);
  CHECK(!memcmp(p.bytes, &first, sizeof first)); /* none of the above has changed it */
  CHECK(all_are(p.bytes, sizeof first, sizeof p.bytes, 0xa5));
  world_t w = world_open(world_config(4, 4, 0)); /* successes do not clear it */
  world_close(&w);
  gemini_error_info_t again = world_error(), other;
  CHECK(!memcmp(&again, &first, sizeof first));
  pthread_t thread;
  CHECK(!pthread_create(&thread, NULL, fresh_thread, &other));
  CHECK(!pthread_join(thread, NULL));
  CHECK(other.status == GEMINI_OK && !*other.operation && !*other.message && !other.native_code);
}

static void test_statuses_have_words_of_their_own(void) {
  const char *unknown = gemini_status_string(1);
  CHECK(unknown && *unknown);
  const gemini_status_t none[] = { 2, 15, -17, -100, INT32_MAX, INT32_MIN };
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) CHECK(!strcmp(gemini_status_string(none[i]), unknown));
  for (gemini_status_t s = 0; s >= GEMINI_ERR_PEER; s--) {
    CHECK(gemini_status_string(s) && *gemini_status_string(s) && strcmp(gemini_status_string(s), unknown));
    for (gemini_status_t other = 0; other > s; other--)
      CHECK(strcmp(gemini_status_string(s), gemini_status_string(other)));
  }
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", GEMINI_VERSION_MAJOR, GEMINI_VERSION_MINOR, GEMINI_VERSION_PATCH);
  CHECK(!strcmp(gemini_version(), version));
  cover("gemini_status_string"); /* these cannot refuse */
  cover("gemini_error_text");
  cover("gemini_version");
}

/* ---- configurations, a field at a time */
#define REFUSED_CONFIG(expected, texts, ...)                 \
  do {                                                       \
    gemini_config_t c = world_config(8, 8, 0);               \
    __VA_ARGS__;                                             \
    gemini_manager_t mgr = handle_of(UNTOUCHED);             \
    REFUSED(expected, texts, gemini_manager_open, &c, &mgr); \
    CHECK_EQ(handle_id(mgr), UNTOUCHED);                     \
  } while (0)

static void test_manager_config_out_of_range_is_refused(void) {
  bed_open();
  const uint64_t most = UINT64_C(1) << 46;
  REFUSED_CONFIG(INVALID, "flags|0x4", c.flags = 4);
  REFUSED_CONFIG(UNSUPPORTED, "EXPLAIN_FAULTS", c.flags = GEMINI_CONFIG_EXPLAIN_FAULTS, c.device = GEMINI_DEVICE_CUDA);
  REFUSED_CONFIG(INVALID, "flags|0x80000000", c.flags = UINT32_C(1) << 31 | GEMINI_CONFIG_STRICT);
  REFUSED_CONFIG(INVALID, "placement is 4|3", c.placement = 4);
  REFUSED_CONFIG(INVALID, "placement is 4294967295|3", c.placement = UINT32_MAX);
  REFUSED_CONFIG(UNSUPPORTED, "CUDA", c.device = GEMINI_DEVICE_CUDA);
  REFUSED_CONFIG(INVALID, "device is 2|1", c.device = 2);
  REFUSED_CONFIG(INVALID, "device is 4294967295|1", c.device = UINT32_MAX);
  REFUSED_CONFIG(INVALID, "device_ordinal is 1", c.device_ordinal = 1);
  REFUSED_CONFIG(INVALID, "warmup_iterations is 1001|1000", c.warmup_iterations = 1001);
  REFUSED_CONFIG(INVALID, "update_threads is 257|256", c.update_threads = 257);
  REFUSED_CONFIG(INVALID, "log_level is 5|4", c.log_level = 5);
  REFUSED_CONFIG(INVALID, "device_bytes is 0", c.device_bytes = 0);
  REFUSED_CONFIG(OOM_HOST, text("host_bytes|%llu", 0ull + most), c.host_bytes = most); /* more than there is */
  REFUSED_CONFIG(INVALID, "file_engine is 3|2", c.file_engine = 3);
  REFUSED_CONFIG(INVALID, "cache_policy is 3|0 to 2", c.cache_policy = 3);
  REFUSED_CONFIG(INVALID, "checkpoint_name is \"kept\"|file tier", c.checkpoint_name = "kept");
  REFUSED_CONFIG(INVALID, "checkpoint_name is \"\"", c.checkpoint_name = "");
  REFUSED_CONFIG(INVALID, text("device_bytes is %llu|%llu", 1ull + most, 0ull + most), c.device_bytes = most + 1);
  REFUSED_CONFIG(INVALID, text("host_bytes is %llu|%llu", UINT64_MAX + 0ull, 0ull + most), c.host_bytes = UINT64_MAX);
  REFUSED_CONFIG(INVALID, text("file_bytes is %llu|%llu", UINT64_MAX + 0ull, 0ull + most), c.file_bytes = UINT64_MAX);
  REFUSED_CONFIG(INVALID, text("device_margin_bytes is %llu|%llu", 8ull * W, 8ull * W), c.device_margin_bytes = 8 * W);
  REFUSED_CONFIG(INVALID, "device_margin_bytes is 18446744073709551615", c.device_margin_bytes = UINT64_MAX);
  REFUSED_CONFIG(INVALID, "file_dir|65536", c.file_bytes = W);
  REFUSED_CONFIG(INVALID, "file_dir", c.file_bytes = W; c.file_dir = "");
  REFUSED_CONFIG(IO, "/nowhere/at/all", c.file_bytes = W; c.file_dir = "/nowhere/at/all");
  CHECK_EQ(world_error().native_code, ENOENT);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 1,|65536|1 GiB", c.chunk_bytes = 1);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 32768|65536|1 GiB", c.chunk_bytes = W / 2);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 98304|65536|1 GiB", c.chunk_bytes = W + W / 2);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 2147483648|1 GiB", c.chunk_bytes = UINT64_C(1) << 31; c.device_bytes = most);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 9223372036854775808|1 GiB", c.chunk_bytes = UINT64_C(1) << 63);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 1048576|524288", c.chunk_bytes = UINT64_C(1) << 20);
  REFUSED_CONFIG(INVALID, "chunk_bytes is 65536|65535", c.device_margin_bytes = 7 * W + 1);
  REFUSED_CONFIG(INVALID, "65535|65536", c.chunk_bytes = 0; c.device_bytes = W - 1);
  REFUSED_CONFIG(INVALID, "|65536", c.chunk_bytes = 0; c.device_bytes = 1);
  const double fractions[] = { -1e-9, 1.0000001, -INFINITY, INFINITY, NAN };
  for (int i = 0; i < 5; i++) {
    REFUSED_CONFIG(INVALID, "static_param_fraction|0 to 1", c.static_param_fraction = fractions[i]);
    REFUSED_CONFIG(INVALID, "static_optim_fraction|0 to 1", c.static_optim_fraction = fractions[i]);
  }
  bed_close();
}

static void test_manager_config_at_its_limits_is_accepted(void) {
  gemini_config_t c = world_config(1, 1, 0);
  c.flags = GEMINI_CONFIG_STRICT;
  c.placement = GEMINI_PLACEMENT_STATIC;
  c.warmup_iterations = 1000;
  c.log_level = GEMINI_LOG_DEBUG;
  c.static_param_fraction = c.static_optim_fraction = 1.0;
  c.device_bytes = 2 * W;
  c.device_margin_bytes = W;
  c.sim_h2d_bytes_per_s = c.sim_d2h_bytes_per_s = UINT64_MAX;
  world_t w = world_open(c);
  world_close(&w);
  c.update_threads = 256;
  w = world_open(c);
  world_close(&w);
  c = world_config(1, 1, 0);
  c.chunk_bytes = UINT64_C(1) << 30;
  c.device_bytes = UINT64_C(1) << 46;
  w = world_open(c);
  world_close(&w);
}

static void test_manager_sixty_fifth_is_refused(void) {
  enum { MANAGERS = 64 };
  gemini_config_t c = world_config(1, 1, 0);
  gemini_manager_t mgr[MANAGERS + 1] = { 0 };
  for (int i = 0; i < MANAGERS; i++) CHECK_OK(gemini_manager_open(&c, &mgr[i]));
  REFUSED(INVALID, "64 managers are open, the limit is 64", gemini_manager_open, &c, &mgr[MANAGERS]);
  CHECK_EQ(mgr[MANAGERS], 0);
  CHECK_OK(gemini_manager_close(mgr[30]));
  REFUSED(HANDLE, hex(mgr[30]), gemini_manager_close, mgr[30]);
  gemini_manager_t old = mgr[30];
  CHECK_OK(gemini_manager_open(&c, &mgr[30]));
  CHECK(mgr[30] != old);
  REFUSED(HANDLE, hex(old), gemini_manager_close, old);
  for (int i = 0; i < MANAGERS; i++) CHECK_OK(gemini_manager_close(mgr[i]));
}

/* ---- arenas and tensors */
#define REFUSED_ARENA(expected, texts, ...)                               \
  do {                                                                    \
    gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;                   \
    __VA_ARGS__;                                                          \
    gemini_arena_t arena = handle_of(UNTOUCHED);                          \
    REFUSED(expected, texts, gemini_arena_create, bed.w.mgr, &c, &arena); \
    CHECK_EQ(handle_id(arena), UNTOUCHED);                                \
  } while (0)

static void test_arena_config_out_of_range_is_refused(void) {
  bed_open();
  char name[65];
  memset(name, 'n', 64);
  name[64] = 0;
  REFUSED_ARENA(INVALID, "kind is 6|5", c.kind = 6);
  REFUSED_ARENA(INVALID, "kind is 4294967295|5", c.kind = UINT32_MAX);
  const uint32_t elements[] = { 3, 5, 15, 17, 32, UINT32_C(1) << 31, UINT32_MAX };
  for (int i = 0; i < 7; i++)
    REFUSED_ARENA(INVALID, text("element_bytes is %u|16", elements[i]), c.element_bytes = elements[i]);
  REFUSED_ARENA(INVALID, "flags|0x2", c.flags = 3);
  REFUSED_ARENA(INVALID, "GEMINI_ARENA_GROWS", c.flags = GEMINI_ARENA_GROWS; c.like = bed.params);
  REFUSED_ARENA(INVALID, "flags|0x80000000", c.flags = UINT32_C(1) << 31);
  REFUSED_ARENA(INVALID, "name|1 to 63", c.name = name);
  REFUSED_ARENA(INVALID, "name|1 to 63", c.name = "");
  REFUSED_ARENA(INVALID, "capacity_bytes is 35184372088833|35184372088832", c.capacity_bytes = (UINT64_C(1) << 45) + 1);
  REFUSED_ARENA(INVALID, "capacity_bytes is 18446744073709551615", c.capacity_bytes = UINT64_MAX);
  /* like and reuse */
  const gemini_arena_t followers[] = { bed.grads, bed.master };
  for (int i = 0; i < 2; i++) {
    REFUSED_ARENA(INVALID, i ? "master" : "grads", c.like = followers[i]);
    REFUSED_ARENA(INVALID, i ? "master" : "grads", c.reuse = followers[i]; c.kind = GEMINI_KIND_GRAD);
  }
  REFUSED_ARENA(INVALID, "params", c.reuse = bed.params; c.kind = GEMINI_KIND_GRAD; c.element_bytes = 2); /* twice */
  REFUSED_ARENA(INVALID, "capacity_bytes is 4096|params", c.like = bed.params; c.capacity_bytes = 4096);
  for (uint32_t kind = GEMINI_KIND_PARAM; kind <= GEMINI_KIND_OTHER;
       kind++) { /* only gradients reuse only parameters */
    REFUSED_ARENA(INVALID, "gradient", c.reuse = bed.other; c.kind = kind);
    if (kind != GEMINI_KIND_GRAD) REFUSED_ARENA(INVALID, "gradient", c.reuse = bed.params; c.kind = kind);
  }
  gemini_arena_t free_params = world_arena(&bed.w, GEMINI_KIND_PARAM, 2, "more", 0, 0);
  REFUSED_ARENA(INVALID, "element_bytes is 4|2", c.reuse = free_params; c.kind = GEMINI_KIND_GRAD; c.element_bytes = 4);
  REFUSED_ARENA(INVALID, "element_bytes is 1|2", c.reuse = free_params; c.kind = GEMINI_KIND_GRAD);
  REFUSED_ARENA(INVALID, "like and reuse", c.reuse = free_params; c.like = bed.params; c.kind = GEMINI_KIND_GRAD;
                c.element_bytes = 2);
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, free_params));
  name[63] = 0;
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t arena;
  c.name = name;
  c.kind = GEMINI_KIND_OTHER;
  c.element_bytes = 16;
  CHECK_OK(gemini_arena_create(bed.w.mgr, &c, &arena));
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, arena));
  REFUSED(HANDLE, hex(arena), gemini_arena_destroy, bed.w.mgr, arena);
  REFUSED(BUSY, "params", gemini_arena_destroy, bed.w.mgr, bed.params); /* two follow it */
  bed_close();
}

static void test_arena_beyond_the_limit_is_refused(void) {
  if (SANITIZED) return; /* addresses for a thousand arenas take a sanitizer a minute to reserve */
  enum { ARENAS = 1024 };
  world_t w = world_open(world_config(2, 2, 0));
  static gemini_arena_t arena[ARENAS + 1];
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  for (int i = 0; i < ARENAS; i++) {
    c.capacity_bytes = W;
    CHECK_OK(gemini_arena_create(w.mgr, &c, &arena[i]));
  }
  REFUSED(INVALID, "1024", gemini_arena_create, w.mgr, &c, &arena[ARENAS]);
  CHECK_EQ(arena[ARENAS], 0);
  CHECK_OK(gemini_arena_destroy(w.mgr, arena[700]));
  CHECK_OK(gemini_arena_create(w.mgr, &c, &arena[ARENAS]));
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  REFUSED(HANDLE, hex(arena[700]), gemini_arena_info, w.mgr, arena[700], &info);
  world_close(&w);
}

static void test_arena_of_a_name_that_is_taken_is_refused(void) {
  bed_open();
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t first = 0, second = 0, third = 0;
  c.kind = GEMINI_KIND_VARIANCE;
  c.capacity_bytes = W;
  c.name = "other";
  REFUSED(EXISTS, "other", gemini_arena_create, bed.w.mgr, &c, &first);
  c.name = NULL;
  CHECK_OK(gemini_arena_create(bed.w.mgr, &c, &first)); /* named after its kind, the others with a number */
  CHECK_OK(gemini_arena_create(bed.w.mgr, &c, &second));
  c.name = "variance";
  REFUSED(EXISTS, "variance", gemini_arena_create, bed.w.mgr, &c, &third);
  c.name = "variance.2";
  REFUSED(EXISTS, "variance.2", gemini_arena_create, bed.w.mgr, &c, &third);
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, second));
  CHECK_OK(gemini_arena_create(bed.w.mgr, &c, &third));
  c.name = "other";
  CHECK_OK(gemini_arena_create(bed.x.mgr, &c, &second)); /* another manager's names are its own */
  CHECK_OK(gemini_arena_destroy(bed.x.mgr, second));
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, third));
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, first));
  bed_close();
}

/* However often its place is used again, a handle stays dead. */
static void test_handle_of_what_was_destroyed_stays_dead(void) {
  enum { STREAMS = 1100 };
  const uint32_t times = check_repetitions(5000);
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.capacity_bytes = W;
  gemini_tensor_info_t info = GEMINI_TENSOR_INFO_INIT;
  gemini_arena_info_t arena_info = GEMINI_ARENA_INFO_INIT;
  const gemini_tensor_t tensor = world_tensor(&bed.w, bed.other, "again", 64);
  gemini_arena_t arena, again;
  gemini_stream_t stream, next;
  CHECK_OK(gemini_arena_create(mgr, &c, &arena));
  CHECK_OK(gemini_stream_create(mgr, &stream));
  CHECK_OK(gemini_tensor_unregister(mgr, tensor));
  CHECK_OK(gemini_arena_destroy(mgr, arena));
  CHECK_OK(gemini_stream_destroy(mgr, stream));
  for (uint32_t i = 0; i < times; i++) {
    gemini_tensor_t t = 0;
    CHECK_OK(gemini_tensor_register(mgr, bed.other, "again", 64, 0, &t));
    CHECK(t != tensor);
    REFUSED(HANDLE, "", gemini_tensor_info, mgr, tensor, &info);
    CHECK_OK(gemini_tensor_unregister(mgr, t));
    CHECK_OK(gemini_arena_create(mgr, &c, &again));
    CHECK(again != arena);
    REFUSED(HANDLE, "", gemini_arena_info, mgr, arena, &arena_info);
    CHECK_OK(gemini_arena_destroy(mgr, again));
  }
  /* Also while the tensor that has its place is acquired as it would have been, and by the same modes. */
  gemini_tensor_t t = 0;
  CHECK_OK(gemini_tensor_register(mgr, bed.other, "again", 64, 0, &t));
  for (uint32_t mode = READ; mode <= BOTH; mode++) {
    gemini_access_t live = world_whole(t, mode, DEVICE), dead = world_whole(tensor, mode, DEVICE);
    for (int i = 0; i < 2; i++) { /* the second acquire finds the chunk on the device */
      CHECK_OK(gemini_acquire(mgr, &live, 1, bed.w.stream));
      REFUSED(HANDLE, "unregistered", gemini_acquire, mgr, &dead, 1, bed.w.stream);
      REFUSED(HANDLE, "unregistered", gemini_release, mgr, &dead, 1, bed.w.stream);
      CHECK_OK(gemini_release(mgr, &live, 1, bed.w.stream));
    }
  }
  CHECK_OK(gemini_tensor_unregister(mgr, t));
  for (int i = 0; i < STREAMS; i++) {
    CHECK_OK(gemini_stream_create(mgr, &next));
    CHECK(next != stream);
    REFUSED(HANDLE, "", gemini_stream_synchronize, mgr, stream);
    CHECK_OK(gemini_stream_destroy(mgr, next));
  }
  bed_close(); /* of closed managers: unit.test_manager */
}

static void test_take_and_register_out_of_range_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const gemini_arena_info_t params = world_arena_info(&bed.w, bed.params);
  const uint64_t next = (params.size_bytes + 511) / 512 * 512, left = params.capacity_bytes - next;
  any_handle_t out = { UNTOUCHED };
  const struct {
    uint64_t size;
    const char *says;
  } sizes[] = { { 0, "size_bytes is 0|2" },
                { 1, "size_bytes is 1,|2" },
                { 4097, "size_bytes is 4097|2" },
                { UINT64_MAX, "size_bytes is 18446744073709551615" },
                { UINT64_MAX - 1, "size_bytes is 18446744073709551614|params" },
                { left + 2, text("size_bytes is %" PRIu64 "|%" PRIu64 " left", left + 2, left) } };
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    REFUSED(INVALID, sizes[i].says, gemini_arena_take, mgr, bed.params, sizes[i].size, &out.id);
    REFUSED(INVALID, sizes[i].says, gemini_arena_take_pointer, mgr, bed.params, sizes[i].size, (void **)&out.id);
    REFUSED(INVALID, sizes[i].says, gemini_tensor_register, mgr, bed.params, "new", sizes[i].size, GEMINI_OFFSET_NEXT,
            &out.tensor);
  }
  const struct {
    uint64_t offset, size;
  } ranges[] = { { 0, 0 },
                 { 0, 1 },
                 { 1, 2 },
                 { 0, params.size_bytes + 2 },
                 { params.size_bytes, 2 },
                 { params.size_bytes - 2, 4 },
                 { UINT64_MAX - 1, 2 },
                 { UINT64_MAX - 1, 4 },
                 { 2, UINT64_MAX - 1 },
                 { UINT64_C(1) << 63, UINT64_C(1) << 63 } };
  for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
    REFUSED(INVALID,
            text("%" PRIu64 "|%" PRIu64 "|%" PRIu64 "|params", ranges[i].offset, ranges[i].size, params.size_bytes),
            gemini_tensor_register, mgr, bed.params, "new", ranges[i].size, ranges[i].offset, &out.tensor);
  const gemini_arena_t followers[] = { bed.grads, bed.master };
  for (int i = 0; i < 2; i++) { /* what follows another arena takes nothing itself */
    REFUSED(INVALID, "params", gemini_arena_take, mgr, followers[i], 512, &out.id);
    REFUSED(INVALID, "params", gemini_tensor_register, mgr, followers[i], "new", 512, GEMINI_OFFSET_NEXT, &out.tensor);
    REFUSED(INVALID, "params", gemini_tensor_register, mgr, followers[i], "new", 512, 0, &out.tensor);
  }
  char name[129];
  memset(name, 'n', 128);
  name[128] = 0;
  REFUSED(INVALID, "name has 0 bytes, must have 1 to 127", gemini_tensor_register, mgr, bed.other, "", 64,
          GEMINI_OFFSET_NEXT, &out.tensor);
  REFUSED(INVALID, text("name has %zu bytes, must have 1 to 127", strlen(name)), gemini_tensor_register, mgr, bed.other,
          name, 64, GEMINI_OFFSET_NEXT, &out.tensor);
  REFUSED(EXISTS, "p0", gemini_tensor_register, mgr, bed.other, "p0", 64, GEMINI_OFFSET_NEXT, &out.tensor);
  REFUSED(EXISTS, "o0", gemini_tensor_register, mgr, bed.other, "o0", 64, 0, &out.tensor);
  REFUSED(NOT_FOUND, "new", gemini_tensor_find, mgr, "new", &out.tensor);
  REFUSED(NOT_FOUND, "", gemini_tensor_find, mgr, "", &out.tensor);
  REFUSED(NOT_FOUND, "dead", gemini_tensor_find, mgr, "dead", &out.tensor);
  REFUSED(NOT_FOUND, "nnnn", gemini_tensor_find, mgr, name, &out.tensor);
  /* An arena that is not like the tensor's. */
  REFUSED(INVALID, "other|params|p0", gemini_tensor_counterpart, mgr, bed.p[0], bed.other, &out.tensor);
  REFUSED(INVALID, "params|other|o0", gemini_tensor_counterpart, mgr, bed.o[0], bed.params, &out.tensor);
  REFUSED(INVALID, "empty", gemini_tensor_counterpart, mgr, bed.s[0], bed.empty, &out.tensor);
  CHECK_EQ(out.id, UNTOUCHED);
  CHECK_OK(gemini_arena_take(mgr, bed.params, left, &out.id)); /* all of it, nothing was lost to the refusals */
  CHECK_EQ(out.id, next);
  REFUSED(INVALID, "size_bytes is 2,|0 left", gemini_arena_take, mgr, bed.params, 2, &out.id);
  bed_close();
}

static void test_take_beyond_a_followers_room_is_refused(void) {
  bed_open();
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  c.kind = GEMINI_KIND_MOMENTUM;
  c.element_bytes = 4;
  c.name = "short";
  c.like = bed.params;
  c.capacity_bytes = 2 * world_arena_info(&bed.w, bed.params).size_bytes + 4096;
  gemini_arena_t follower;
  any_handle_t out = { UNTOUCHED };
  CHECK_OK(gemini_arena_create(bed.w.mgr, &c, &follower));
  REFUSED(INVALID, "short", gemini_arena_take, bed.w.mgr, bed.params, 4 * W, &out.id);
  REFUSED(INVALID, "short", gemini_tensor_register, bed.w.mgr, bed.params, "new", 4 * W, GEMINI_OFFSET_NEXT,
          &out.tensor);
  CHECK_EQ(out.id, UNTOUCHED);
  CHECK_EQ(gemini_tensor_find(bed.w.mgr, "new", &out.tensor), GEMINI_ERR_NOT_FOUND);
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, follower));
  bed_close();
}

/* ---- streams */
static void test_streams_beyond_the_limit_and_in_use_are_refused(void) {
  enum { STREAMS = 48 };
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_stream_t stream[STREAMS + 1] = { 0 };
  for (int i = 1; i < STREAMS; i++) CHECK_OK(gemini_stream_create(mgr, &stream[i])); /* and the bed's */
  REFUSED(INVALID, "48", gemini_stream_create, mgr, &stream[STREAMS]);
  CHECK_EQ(stream[STREAMS], 0);
  for (int i = 2; i < STREAMS; i++) CHECK_OK(gemini_stream_destroy(mgr, stream[i]));
  REFUSED(HANDLE, hex(stream[2]), gemini_stream_destroy, mgr, stream[2]);
  CHECK_OK(gemini_iteration_begin(mgr));
  CHECK_OK(gemini_op_begin(mgr, "op", stream[1]));
  REFUSED(BUSY, "operator", gemini_stream_destroy, mgr, stream[1]);
  CHECK_OK(gemini_op_end(mgr));
  CHECK_OK(gemini_iteration_end(mgr));
  CHECK_OK(gemini_stream_destroy(mgr, stream[1]));
  world_t gone = world_open(world_config(2, 2, 0));
  world_close(&gone);
  REFUSED(HANDLE, hex(gone.stream), gemini_stream_destroy, mgr, gone.stream); /* it went with its manager */
  bed_close();
}

/* ---- accesses */
static int file_of(const char *contents) { /* a descriptor of an unnamed file */
  FILE *file = tmpfile();
  CHECK(file && fputs(contents, file) >= 0 && !fflush(file));
  int fd = dup(fileno(file));
  CHECK(fd >= 0 && !fclose(file));
  return fd;
}

static void test_access_ranges_outside_their_object_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const uint64_t used = world_arena_info(&bed.w, bed.other).size_bytes;
  const int fd = file_of("sixteen bytes.. and more");
  const struct {
    void *object;
    uint64_t offset, size, limit;
  } ranges[] = { { bed.o[1], 0, 2 * W + 1, 2 * W },
                 { bed.o[1], 2 * W, 1, 2 * W },
                 { bed.o[1], 2 * W, 0, 2 * W },
                 { bed.o[1], 1, 0, 2 * W },
                 { bed.o[1], 1, 2 * W, 2 * W },
                 { bed.o[1], 0, UINT64_MAX, 2 * W },
                 { bed.o[1], UINT64_MAX, 1, 2 * W },
                 { bed.o[1], UINT64_MAX, UINT64_MAX, 2 * W },
                 { bed.o[1], 4, UINT64_MAX - 3, 2 * W },
                 { bed.o[1], UINT64_C(1) << 63, UINT64_C(1) << 63, 2 * W },
                 { bed.other, 0, used + 1, used },
                 { bed.other, used, 1, used },
                 { bed.other, 64, UINT64_MAX - 63, used },
                 { bed.other, 64, 0, used }, /* no empty range, and not the rest either */
                 { bed.other, used, 0, used },
                 { bed.empty, 0, 1, 0 },
                 { bed.empty, 1, 0, 0 } };
  for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
    for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
      const char *says = text("offset_bytes %" PRIu64 "|%" PRIu64, ranges[i].offset, ranges[i].limit);
      double norm = -1;
      gemini_access_t a[3] = { world_whole(bed.o[2], BOTH, tier),
                               world_part(ranges[i].object, ranges[i].offset, ranges[i].size, READ, tier),
                               world_whole(bed.p[0], READ, tier) };
      a[0].ptr = a[1].ptr = a[2].ptr = &norm;
      REFUSED(INVALID, says, gemini_acquire, mgr, &a[1], 1, GEMINI_STREAM_CALLER);
      REFUSED(INVALID, says, gemini_acquire, mgr, a, 3, bed.w.stream);
      CHECK(a[0].ptr == &norm && a[1].ptr == &norm && a[2].ptr == &norm);
      REFUSED(INVALID, says, gemini_release, mgr, &a[1], 1, GEMINI_STREAM_CALLER);
      REFUSED(INVALID, says, gemini_hint, mgr, a, 3);
      REFUSED(INVALID, says, gemini_move, mgr, a, 3);
      REFUSED(INVALID, says, gemini_pin, mgr, &a[1]);
      REFUSED(INVALID, says, gemini_unpin, mgr, &a[1]);
      REFUSED(INVALID, says, gemini_zero, mgr, &a[1]);
      REFUSED(INVALID, says, gemini_discard, mgr, &a[1]);
      REFUSED(INVALID, says, gemini_load, mgr, &a[1], fd, 0);
      REFUSED(INVALID, says, gemini_store, mgr, &a[1], fd, 0);
      REFUSED(INVALID, says, gemini_norm, mgr, &a[1], GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm);
      CHECK(norm == -1);
      uint64_t bytes = UNTOUCHED;
      REFUSED(INVALID, says, gemini_tier_bytes, mgr, &a[1], &bytes);
      CHECK_EQ(bytes, UNTOUCHED);
    }
  }
  char text_of_file[32] = "";
  CHECK_EQ(pread(fd, text_of_file, sizeof text_of_file - 1, 0), 24);
  CHECK(!strcmp(text_of_file, "sixteen bytes.. and more"));
  CHECK(!close(fd));
  bed_close();
}

/* An access that cannot be, wherever one is taken: batch[which] of three, then it alone. */
static void refuse_access(gemini_access_t batch[3], int which, const char *says) {
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_access_t *a = &batch[which];
  uint64_t bytes = UNTOUCHED;
  double norm = -1;
  int here;
  batch[0].ptr = batch[1].ptr = batch[2].ptr = &here;
  REFUSED(INVALID, says, gemini_acquire, mgr, batch, 3, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, says, gemini_release, mgr, batch, 3, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, says, gemini_hint, mgr, batch, 3);
  REFUSED(INVALID, says, gemini_move, mgr, batch, 3);
  CHECK(batch[0].ptr == &here && batch[1].ptr == &here && batch[2].ptr == &here);
  if (strstr(says, "all must be the same")) return; /* which one alone is */
  REFUSED(INVALID, says, gemini_acquire, mgr, a, 1, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, says, gemini_pin, mgr, a);
  REFUSED(INVALID, says, gemini_unpin, mgr, a);
  REFUSED(INVALID, says, gemini_zero, mgr, a);
  REFUSED(INVALID, says, gemini_discard, mgr, a);
  REFUSED(INVALID, says, gemini_load, mgr, a, 0, 0);
  REFUSED(INVALID, says, gemini_store, mgr, a, 1, 0);
  REFUSED(INVALID, says, gemini_norm, mgr, a, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm);
  REFUSED(INVALID, says, gemini_tier_bytes, mgr, a, &bytes);
  CHECK(norm == -1 && bytes == UNTOUCHED);
}
static void test_accesses_of_wrong_size_are_refused(void) {
  bed_open();
  for (size_t i = 0; i <= sizeof wrong_sizes / sizeof *wrong_sizes; i++) {
    uint32_t wrong = i < sizeof wrong_sizes / sizeof *wrong_sizes ? wrong_sizes[i] : sizeof(gemini_access_t) - 1;
    gemini_access_t a[3] = { world_whole(bed.o[2], READ, HOST), world_whole(bed.o[1], READ, HOST),
                             world_whole(bed.p[0], READ, HOST) };
    a[0].struct_size = wrong;
    refuse_access(a, 0, text("struct_size is %u|%zu to 4096", wrong, sizeof a[0]));
    a[0].struct_size = sizeof a[0];
    a[2].struct_size = wrong;
    refuse_access(a, 2,
                  text("accesses[2]: struct_size is %u|accesses[0] is %zu|all must be the same", wrong, sizeof a[0]));
  }
  for (int which = 0; which < 3; which++) {
    gemini_access_t a[3] = { world_whole(bed.o[2], READ, HOST), world_whole(bed.o[1], READ, HOST),
                             world_whole(bed.p[0], READ, HOST) };
    a[which].reserved = 5;
    refuse_access(a, which, "reserved is 5|must be 0");
  }
  bed_close();
}

static void test_statistics_of_what_there_is_not_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_tier_stats_t tier = GEMINI_TIER_STATS_INIT;
  gemini_link_stats_t link = GEMINI_LINK_STATS_INIT;
  gemini_access_t range = world_whole(bed.o[2], READ, GEMINI_TIER_COUNT);
  uint64_t bytes = UNTOUCHED;
  uint32_t links;
  CHECK_OK(gemini_link_count(mgr, &links));
  CHECK_EQ(links, 4);
  REFUSED(INVALID, "tier is 3|2", gemini_tier_stats, mgr, GEMINI_TIER_COUNT, &tier);
  REFUSED(INVALID, "tier is 4294967295|2", gemini_tier_stats, mgr, UINT32_MAX, &tier);
  REFUSED(INVALID, "link is 4|4", gemini_link_stats, mgr, links, GEMINI_REASON_ALL, &link);
  REFUSED(INVALID, "link is 4294967295|4", gemini_link_stats, mgr, UINT32_MAX, GEMINI_REASON_ALL, &link);
  REFUSED(INVALID, "reason is 5|4", gemini_link_stats, mgr, 0, GEMINI_REASON_COUNT, &link);
  REFUSED(INVALID, "tier is 3|2", gemini_tier_bytes, mgr, &range, &bytes);
  CHECK(bytes == UNTOUCHED && !tier.budget_bytes && link.from_tier == link.to_tier);
  bed_close();
}

static void test_access_modes_tiers_and_counts_out_of_range_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const uint32_t modes[] = { 0, 4, 5, UINT32_C(1) << 31, UINT32_MAX };
  const uint32_t tiers[] = { FILES, GEMINI_TIER_COUNT, UINT32_C(1) << 31, UINT32_MAX };
  int here;
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
      gemini_access_t a[3] = { world_whole(bed.o[2], WRITE, tier), world_whole(bed.o[1], modes[i], tier),
                               world_whole(bed.p[0], READ, tier) };
      a[0].ptr = a[1].ptr = a[2].ptr = &here;
      REFUSED(INVALID, text("mode is %u|1 to 3", modes[i]), gemini_acquire, mgr, &a[1], 1, bed.w.stream);
      REFUSED(INVALID, text("mode is %u|1 to 3", modes[i]), gemini_acquire, mgr, a, 3, bed.w.stream);
      CHECK(a[0].ptr == &here && a[1].ptr == &here && a[2].ptr == &here);
      a[1].mode = READ;
      CHECK_OK(gemini_acquire(mgr, &a[1], 1, GEMINI_STREAM_CALLER));
      a[1].mode = modes[i];
      REFUSED(INVALID, text("mode is %u|1 to 3", modes[i]), gemini_release, mgr, &a[1], 1, GEMINI_STREAM_CALLER);
      a[1].mode = READ;
      CHECK_OK(gemini_release(mgr, &a[1], 1, GEMINI_STREAM_CALLER));
    }
  }
  for (size_t i = 0; i < sizeof tiers / sizeof *tiers; i++) {
    gemini_access_t a[3] = { world_whole(bed.o[2], WRITE, DEVICE), world_whole(bed.o[1], READ, tiers[i]),
                             world_whole(bed.p[0], READ, HOST) };
    a[0].ptr = a[1].ptr = a[2].ptr = &here;
    REFUSED(INVALID, text("tier is %u", tiers[i]), gemini_acquire, mgr, &a[1], 1, bed.w.stream);
    REFUSED(INVALID, text("tier is %u", tiers[i]), gemini_acquire, mgr, a, 3, bed.w.stream);
    REFUSED(INVALID, text("tier is %u", tiers[i]), gemini_release, mgr, &a[1], 1, bed.w.stream);
    CHECK(a[0].ptr == &here && a[1].ptr == &here && a[2].ptr == &here);
    if (tiers[i] == FILES) continue; /* these may go there */
    REFUSED(INVALID, text("tier is %u|2", tiers[i]), gemini_hint, mgr, a, 3);
    REFUSED(INVALID, text("tier is %u|2", tiers[i]), gemini_move, mgr, a, 3);
  }
  const uint64_t counts[] = { BATCH_LIMIT + 1, UINT64_C(1) << 32, UINT64_MAX };
  for (int i = 0; i < 3; i++) { /* nothing of the array is looked at */
    gemini_access_t a = world_whole(bed.o[1], READ, HOST);
    const char *says = text("count is %" PRIu64 "|%d", counts[i], BATCH_LIMIT);
    REFUSED(INVALID, says, gemini_acquire, mgr, &a, counts[i], GEMINI_STREAM_CALLER);
    REFUSED(INVALID, says, gemini_release, mgr, &a, counts[i], GEMINI_STREAM_CALLER);
    REFUSED(INVALID, says, gemini_hint, mgr, &a, counts[i]);
    REFUSED(INVALID, says, gemini_move, mgr, &a, counts[i]);
  }
  bed_close();
}

static void test_acquire_of_contents_that_are_not_there_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  int here;
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) { /* p2 has become a gradient; p0 and p1 have none */
    const struct {
      gemini_tensor_t t;
      uint64_t size;
      const char *says;
    } wrong[] = { { bed.p[2], param_bytes[2], "p2" },
                  { bed.g[0], param_bytes[0], "p0" },
                  { bed.g[1], param_bytes[1], "p1" } };
    for (int i = 0; i < 3; i++) {
      gemini_access_t a[2] = { world_whole(bed.o[2], WRITE, tier), world_whole(wrong[i].t, READ, tier) };
      a[0].ptr = a[1].ptr = &here;
      REFUSED(STATE, wrong[i].says, gemini_acquire, mgr, a, 2, bed.w.stream);
      a[1].mode = BOTH;
      REFUSED(STATE, wrong[i].says, gemini_acquire, mgr, a, 2, bed.w.stream);
      a[1] = world_part(wrong[i].t, 0, wrong[i].size - 2, WRITE, tier); /* all but an element */
      a[1].ptr = &here;
      REFUSED(STATE, wrong[i].says, gemini_acquire, mgr, a, 2, bed.w.stream);
      CHECK(a[0].ptr == &here && a[1].ptr == &here);
    }
  }
  bed_close();
}

/* a is acquired, by this thread. Nothing that is like it but for one thing can be released. */
static void refuse_releases_like(gemini_access_t a, gemini_tensor_t neighbour) {
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_access_t wrong = a;
  wrong.mode = a.mode & WRITE ? READ : WRITE;
  if (a.tier == HOST || wrong.mode == WRITE) REFUSED(STATE, "not acquired", gemini_release, mgr, &wrong, 1, 0);
  wrong.mode = a.mode & WRITE ? READ : BOTH;
  if (a.tier == HOST || wrong.mode == BOTH) REFUSED(STATE, "not acquired", gemini_release, mgr, &wrong, 1, 0);
  wrong = a;
  wrong.tier = a.tier == HOST ? DEVICE : HOST;
  REFUSED(STATE, "not acquired", gemini_release, mgr, &wrong, 1, 0);
  if (neighbour) { /* shares a chunk with it */
    wrong = world_whole(neighbour, a.mode, a.tier);
    wrong.ptr = a.ptr;
    REFUSED(STATE, "", gemini_release, mgr, &wrong, 1, 0);
  }
  if (a.tier == HOST) {
    wrong = a;
    wrong.ptr = NULL;
    REFUSED(STATE, "ptr", gemini_release, mgr, &wrong, 1, 0);
    wrong.ptr = (uint8_t *)a.ptr + 1;
    REFUSED(STATE, "ptr", gemini_release, mgr, &wrong, 1, 0);
  }
  gemini_access_t twice[2] = { a, a }, others[2] = { a, world_whole(bed.s[1], READ, a.tier) };
  REFUSED(STATE, "", gemini_release, mgr, twice, 2, bed.w.stream);
  REFUSED(STATE, "not acquired", gemini_release, mgr, others, 2, bed.w.stream);
  others[1].object.tensor = bed.dead_tensor;
  REFUSED(HANDLE, hex(bed.dead_tensor), gemini_release, mgr, others, 2, bed.w.stream);
}

static void test_release_of_what_is_not_acquired_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    for (uint32_t mode = READ; mode <= BOTH; mode++) {
      gemini_access_t a[] = { world_whole(bed.o[2], mode, tier), world_part(bed.o[1], W - 8, 16, mode, tier),
                              world_part(bed.other, 5 * W - 8, 16, mode, tier), world_whole(bed.p[0], mode, tier) };
      for (int i = 0; i < 4; i++) {
        if (mode == WRITE && i) continue; /* the old bytes stay */
        if (mode == WRITE) a[i].size_bytes = 64;
        gemini_access_t before = a[i];
        before.ptr = &before;
        REFUSED(STATE, "not acquired", gemini_release, mgr, &a[i], 1, bed.w.stream);
        CHECK_OK(gemini_acquire(mgr, &a[i], 1, GEMINI_STREAM_CALLER));
        if (mode == WRITE)
          for (uint64_t k = 0; k < 64; k++) ((uint8_t *)a[i].ptr)[k] = world_byte(22, k);
        refuse_releases_like(a[i], i == 0 ? bed.o[1] : i == 1 ? bed.o[0] : 0);
        CHECK_OK(gemini_release(mgr, &a[i], 1, GEMINI_STREAM_CALLER));
        REFUSED(STATE, "not acquired", gemini_release, mgr, &a[i], 1, bed.w.stream);
      }
    }
  }
  bed_close();
}

/* A batch that names one use more often than there is one releases nothing. */
static void test_release_of_more_than_was_acquired_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const struct {
    gemini_access_t acquired[2];
    int which; /* of them is named twice in one release */
  } cases[] = {
    { { world_whole(bed.o[1], READ, HOST), world_whole(bed.o[1], READ, DEVICE) }, 0 },
    { { world_whole(bed.o[1], READ, HOST), world_whole(bed.o[1], READ, DEVICE) }, 1 },
    { { world_whole(bed.o[1], READ, HOST), world_whole(bed.o[1], BOTH, HOST) }, 0 },
    { { world_whole(bed.o[1], READ, HOST), world_whole(bed.o[1], BOTH, HOST) }, 1 },
    { { world_whole(bed.o[1], READ, DEVICE), world_whole(bed.o[1], BOTH, DEVICE) }, 1 },
    { { world_whole(bed.other, READ, HOST), world_whole(bed.s[1], READ, HOST) }, 0 },
    { { world_part(bed.other, W, W, READ, DEVICE), world_whole(bed.s[1], READ, HOST) }, 0 },
    { { world_part(bed.other, W, W, BOTH, DEVICE), world_whole(bed.s[1], READ, HOST) }, 0 },
    { { world_part(bed.other, W, W, READ, DEVICE), world_part(bed.other, W, W, BOTH, DEVICE) }, 1 },
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    gemini_access_t a[2] = { cases[i].acquired[0], cases[i].acquired[1] };
    CHECK_OK(gemini_acquire(mgr, &a[0], 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_acquire(mgr, &a[1], 1, GEMINI_STREAM_CALLER));
    gemini_access_t twice[2] = { a[cases[i].which], a[cases[i].which] };
    REFUSED(STATE, "acquired", gemini_release, mgr, twice, 2, GEMINI_STREAM_CALLER);
    CHECK_OK(gemini_release(mgr, a, 2, GEMINI_STREAM_CALLER));
    REFUSED(STATE, "acquired", gemini_release, mgr, &a[0], 1, GEMINI_STREAM_CALLER);
  }
  bed_close();
}

static void test_release_of_a_long_batch_is_all_or_none(void) {
  enum { ACQUIRED = 30, NAMED = 40 };
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    gemini_access_t a[NAMED];
    for (int i = 0; i < NAMED; i++) a[i] = world_whole(bed.o[1], READ, tier);
    CHECK_OK(gemini_acquire(mgr, a, ACQUIRED, GEMINI_STREAM_CALLER));
    for (int i = ACQUIRED; i < NAMED; i++) a[i].ptr = a[0].ptr;
    REFUSED(STATE, "o1", gemini_release, mgr, a, NAMED, GEMINI_STREAM_CALLER);
    CHECK_EQ(world_tensor_info(&bed.w, bed.o[1]).users, ACQUIRED);
    CHECK_OK(gemini_release(mgr, a, ACQUIRED, GEMINI_STREAM_CALLER));
  }
  bed_close();
}

/* A release names one range of one acquire: no part of it, no sum of several, no other mode. */
static void test_release_of_a_part_or_of_several_at_once_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const gemini_object_t objects[] = { OBJECT(bed.o[1]), OBJECT(bed.other) };
  const uint64_t end = 2 * W;
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    for (uint32_t mode = READ; mode <= BOTH; mode += 2) {
      for (int i = 0; i < 2; i++) {
        const gemini_object_t o = objects[i];
        gemini_access_t all = world_part(o, 0, end, mode, tier), half = world_part(o, 0, W, mode, tier),
                        rest = world_part(o, W, W, mode, tier), other = all;
        CHECK_OK(gemini_acquire(mgr, &all, 1, GEMINI_STREAM_CALLER));
        half.ptr = all.ptr;
        rest.ptr = (uint8_t *)all.ptr + W;
        other.mode = mode == READ ? BOTH : WRITE;
        other.ptr = all.ptr;
        gemini_access_t parts[] = { half, rest };
        REFUSED(STATE, "not acquired", gemini_release, mgr, &half, 1, GEMINI_STREAM_CALLER);
        REFUSED(STATE, "not acquired", gemini_release, mgr, &rest, 1, bed.w.stream);
        REFUSED(STATE, "not acquired", gemini_release, mgr, parts, 2, bed.w.stream);
        REFUSED(STATE, "not acquired", gemini_release, mgr, &other, 1, bed.w.stream);
        CHECK_OK(gemini_release(mgr, &all, 1, GEMINI_STREAM_CALLER));
        CHECK_OK(gemini_acquire(mgr, parts, 2, GEMINI_STREAM_CALLER));
        all.ptr = parts[0].ptr;
        REFUSED(STATE, "not acquired", gemini_release, mgr, &all, 1, GEMINI_STREAM_CALLER);
        CHECK_OK(gemini_release(mgr, &parts[1], 1, GEMINI_STREAM_CALLER));
        CHECK_OK(gemini_release(mgr, &parts[0], 1, GEMINI_STREAM_CALLER));
      }
    }
  }
  bed_close();
}

/* Nothing of it is acquired, so nothing is released, and nothing is in use. */
static void test_release_of_an_empty_arena_is_not_counted(void) {
  bed_open();
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    for (int acquires = 0; acquires < 3; acquires++) {
      gemini_access_t batch[] = { world_whole(bed.empty, READ, tier), world_whole(bed.o[0], READ, tier) };
      for (int i = 0; i < acquires; i++) CHECK_OK(gemini_acquire(bed.w.mgr, batch, 1, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_release(bed.w.mgr, batch, 1, GEMINI_STREAM_CALLER));
      REFUSED(STATE, "not acquired", gemini_release, bed.w.mgr, batch, 2, GEMINI_STREAM_CALLER);
      CHECK_OK(gemini_acquire(bed.w.mgr, batch, 2, GEMINI_STREAM_CALLER));
      CHECK_OK(gemini_release(bed.w.mgr, batch, 2, GEMINI_STREAM_CALLER));
    }
  }
  CHECK_OK(gemini_arena_destroy(bed.w.mgr, bed.empty));
  bed_close();
}

/* ---- what is in use stays */
static void test_objects_in_use_are_busy(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const int fd = file_of("sixty-four bytes, or more than these, so that a load would be possible");
  const uint32_t modes[] = { BOTH };
  gemini_update_t update = GEMINI_UPDATE_INIT;
  update.arenas = &bed.other;
  update.modes = modes;
  update.arena_count = 1;
  update.fn = no_span;
  for (uint32_t tier = DEVICE; tier <= HOST; tier++) {
    for (uint32_t mode = READ; mode <= BOTH; mode += 2) {
      gemini_access_t a = world_whole(bed.o[1], mode, tier), all = world_whole(bed.other, READ, tier);
      CHECK_OK(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
      gemini_access_t other = a, neighbour = world_whole(bed.o[2], READ, FILES);
      other.tier = tier == DEVICE ? HOST : DEVICE;
      other.mode = BOTH;
      REFUSED(BUSY, "acquired", gemini_acquire, mgr, &other, 1, GEMINI_STREAM_CALLER); /* a writer on the other side */
      other.mode = READ;
      if (mode == BOTH) REFUSED(BUSY, "acquired", gemini_acquire, mgr, &other, 1, GEMINI_STREAM_CALLER);
      REFUSED(BUSY, "acquired", gemini_manager_close, mgr);
      REFUSED(BUSY, "acquired", gemini_arena_destroy, mgr, bed.other);
      REFUSED(BUSY, "o1", gemini_tensor_unregister, mgr, bed.o[1]);
      REFUSED(BUSY, "acquired", gemini_zero, mgr, &a);
      REFUSED(BUSY, "acquired", gemini_zero, mgr, &all);
      REFUSED(BUSY, "acquired", gemini_load, mgr, &a, fd, 0);
      REFUSED(BUSY, "acquired", gemini_borrow, mgr, &a, fd, 0);
      REFUSED(BUSY, "acquired", gemini_update, mgr, &update);
      REFUSED(STATE, "o1|COMPUTE", gemini_tensor_state_set, mgr, bed.o[1], GEMINI_STATE_FREE);
      REFUSED(STATE, "o1|COMPUTE", gemini_tensor_state_set, mgr, bed.o[1], GEMINI_STATE_HOLD);
      if (mode == BOTH) REFUSED(BUSY, "acquired", gemini_store, mgr, &a, fd, 0);
      gemini_access_t to_file = a;
      to_file.tier = FILES;
      REFUSED(BUSY, "acquired", gemini_move, mgr, &to_file, 1);
      if (tier == DEVICE) {
        to_file.tier = HOST;
        REFUSED(BUSY, "acquired", gemini_move, mgr, &to_file, 1);
        REFUSED(BUSY, "acquired", gemini_move, mgr, &neighbour, 1); /* it lies in the chunk where o1 ends */
      }
      CHECK_OK(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
    }
  }
  /* The same by way of the arena, and of a counterpart. */
  gemini_access_t a = world_part(bed.other, W, 64, READ, HOST);
  CHECK_OK(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
  REFUSED(BUSY, "acquired", gemini_manager_close, mgr);
  REFUSED(BUSY, "acquired", gemini_arena_destroy, mgr, bed.other);
  CHECK_OK(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
  a = world_whole(bed.s[1], READ, DEVICE);
  CHECK_OK(gemini_acquire(mgr, &a, 1, GEMINI_STREAM_CALLER));
  REFUSED(BUSY, "p1", gemini_tensor_unregister, mgr, bed.p[1]);
  REFUSED(BUSY, "p1", gemini_tensor_unregister, mgr, bed.s[1]);
  REFUSED(BUSY, "acquired", gemini_arena_destroy, mgr, bed.master);
  REFUSED(BUSY, "follow", gemini_arena_destroy, mgr, bed.params);
  CHECK_OK(gemini_release(mgr, &a, 1, GEMINI_STREAM_CALLER));
  CHECK(!close(fd));
  bed_close();
}

/* Two chunks, the second of which cannot follow: the first one must not have gone either. */
static void test_refused_in_the_middle_is_refused_whole(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const uint8_t bytes[16] = { 1 };
  const int fd = file_of("");
  for (uint64_t at = 0; at < 2 * W; at += sizeof bytes)
    CHECK_EQ(pwrite(fd, bytes, sizeof bytes, (off_t)at), sizeof bytes);
  gemini_access_t last = world_part(bed.o[0], 2 * W, W, READ, DEVICE),
                  both = world_part(bed.o[0], W, 2 * W, READ, HOST);
  /* loaded */
  CHECK_OK(gemini_pin(mgr, &last));
  REFUSED(BUSY, "pinned", gemini_load, mgr, &both, fd, 0);
  REFUSED(BUSY, "pinned", gemini_borrow, mgr, &both, fd, 0);
  CHECK(world_holds(&bed.w, bed.o[0], 0, other_bytes[0], 20));
  CHECK_OK(gemini_unpin(mgr, &last));
  /* stored: the file is not the library's, but a file half written helps nobody */
  last.mode = BOTH;
  CHECK_OK(gemini_acquire(mgr, &last, 1, GEMINI_STREAM_CALLER));
  REFUSED(BUSY, "acquired", gemini_store, mgr, &both, fd, 0);
  uint8_t first = 0;
  CHECK_EQ(pread(fd, &first, 1, 0), 1);
  CHECK_EQ(first, 1);
  /* moved */
  gemini_access_t here = world_part(bed.o[0], W, W, READ, DEVICE);
  CHECK_OK(gemini_move(mgr, &here, 1));
  REFUSED(BUSY, "acquired", gemini_move, mgr, &both, 1);
  both.tier = FILES;
  REFUSED(BUSY, "acquired", gemini_move, mgr, &both, 1);
  CHECK_OK(gemini_release(mgr, &last, 1, GEMINI_STREAM_CALLER));
  CHECK(!close(fd));
  bed_close();
}

/* ---- pins, allocations, files, norms */
static void test_unpin_of_what_is_not_pinned_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_access_t one = world_part(bed.o[1], 0, W, READ, DEVICE), two = world_whole(bed.o[1], READ, DEVICE);
  REFUSED(STATE, "o1|not pinned", gemini_unpin, mgr, &one);
  CHECK_OK(gemini_pin(mgr, &one));
  REFUSED(STATE, "o1|not pinned", gemini_unpin, mgr, &two); /* its second chunk is not */
  gemini_access_t gone = world_whole(bed.o[1], READ, HOST);
  REFUSED(BUSY, "pinned", gemini_move, mgr, &gone, 1);
  gone.tier = FILES;
  REFUSED(BUSY, "pinned", gemini_move, mgr, &gone, 1);
  REFUSED(BUSY, "pinned", gemini_arena_destroy, mgr, bed.other);
  gone = world_whole(bed.o[1], BOTH, HOST);
  REFUSED(BUSY, "pinned", gemini_acquire, mgr, &gone, 1, GEMINI_STREAM_CALLER);
  CHECK_OK(gemini_unpin(mgr, &one));
  REFUSED(STATE, "o1|not pinned", gemini_unpin, mgr, &one);
  bed_close();
}

static void test_alloc_and_free_out_of_range_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  void *ptr = &ptr;
  REFUSED(INVALID, "size_bytes is 0", gemini_alloc, mgr, 0, bed.w.stream, &ptr);
  const uint64_t sizes[] = { 8 * W + 1, UINT64_C(1) << 46, UINT64_MAX - 511, UINT64_MAX };
  for (int i = 0; i < 4; i++)
    REFUSED(OOM_DEVICE, text("size_bytes is %" PRIu64 "|%" PRIu64, sizes[i], 8 * W), gemini_alloc, mgr, sizes[i],
            bed.w.stream, &ptr);
  CHECK(ptr == &ptr);
  uint8_t *block = bed.block;
  const world_t *w = &bed.w;
  void *const wrong[] = { block + 1,
                          block + 512,
                          block - 512,
                          bed.freed_block,
                          bed.x_block,
                          &ptr,
                          (void *)(uintptr_t)1,
                          (void *)UINTPTR_MAX,
                          (void *)(uintptr_t)world_arena_info(w, bed.other).base };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    REFUSED(INVALID, text("%p|live allocation", wrong[i]), gemini_free, mgr, wrong[i], bed.w.stream);
    REFUSED(INVALID, text("%p|live allocation", wrong[i]), gemini_free, mgr, wrong[i], GEMINI_STREAM_CALLER);
  }
  CHECK_OK(gemini_free(mgr, block, bed.w.stream));
  REFUSED(INVALID, "live allocation", gemini_free, mgr, block, bed.w.stream);
  bed_close();
}

/* They return no status: what they refused is in the last error, and nothing else has changed. */
#define HOOK_REFUSED(expected, says, fn, call)                                          \
  do {                                                                                  \
    picture_t hook_before = picture();                                                  \
    call;                                                                               \
    CHECK_EQ(world_error().status, GEMINI_ERR_##expected);                              \
    CHECK(!strcmp(world_error().operation, fn) && strstr(world_error().message, says)); \
    CHECK(same_picture(&hook_before));                                                  \
    cover(fn);                                                                          \
  } while (0)

static void test_hooks_out_of_range_are_refused(void) {
  bed_open();
  void *none = (void *)(uintptr_t)bed.dead_stream, *own = (void *)(uintptr_t)bed.w.stream;
  HOOK_REFUSED(STATE, "device 0", "gemini_torch_malloc", CHECK(!gemini_torch_malloc(512, 0, own)));
  HOOK_REFUSED(STATE, "device 0", "gemini_cupy_malloc", CHECK(!gemini_cupy_malloc(own, 512, 0)));
  REFUSED(STATE, "gemini_hook_set", gemini_hook_clear, bed.w.mgr);
  REFUSED(INVALID, "0x80000001", gemini_hook_set, bed.w.mgr, 0x80000001u);
  CHECK_OK(gemini_hook_set(bed.w.mgr, 0));
  REFUSED(EXISTS, "device 0", gemini_hook_set, bed.x.mgr, 0);
  REFUSED(NOT_FOUND, "not a stream", gemini_hook_forget, bed.w.mgr, own);
  HOOK_REFUSED(INVALID, "negative", "gemini_torch_malloc", CHECK(!gemini_torch_malloc(-512, 0, own)));
  HOOK_REFUSED(STATE, "device 1", "gemini_torch_malloc", CHECK(!gemini_torch_malloc(512, 1, own)));
  HOOK_REFUSED(HANDLE, "destroyed", "gemini_torch_malloc", CHECK(!gemini_torch_malloc(512, 0, none)));
  HOOK_REFUSED(HANDLE, "destroyed", "gemini_cupy_malloc", CHECK(!gemini_cupy_malloc(none, 512, 0)));
  HOOK_REFUSED(OOM_DEVICE, "budget", "gemini_cupy_malloc", CHECK(!gemini_cupy_malloc(own, SIZE_MAX, 0)));
  uint8_t *block = gemini_torch_malloc(1000, 0, own);
  CHECK(block);
  HOOK_REFUSED(HANDLE, "destroyed", "gemini_torch_free", gemini_torch_free(block, 1000, 0, none));
  HOOK_REFUSED(INVALID, "live allocation", "gemini_torch_free", gemini_torch_free(block + 1, 1000, 0, own));
  HOOK_REFUSED(INVALID, "does not point to memory", "gemini_cupy_free", gemini_cupy_free(own, &bed, 0));
  gemini_torch_free(block, 1000, 0, own);
  HOOK_REFUSED(INVALID, "live allocation", "gemini_cupy_free", gemini_cupy_free(own, block, 0));
  CHECK_OK(gemini_hook_clear(bed.w.mgr));
  bed_close();
}

static void test_host_blocks_out_of_range_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  void *ptr = &ptr, *small, *large, *gone, *theirs;
  REFUSED(INVALID, "size_bytes is 0", gemini_host_alloc, mgr, 0, 0, &ptr);
  REFUSED(INVALID, "ptr_out is NULL", gemini_host_alloc, mgr, 512, 0, NULL);
  const uint64_t alignments[] = { 3, 48, (UINT64_C(1) << 21) + 1, UINT64_C(1) << 22, UINT64_C(1) << 63, UINT64_MAX };
  for (int i = 0; i < 6; i++)
    REFUSED(INVALID, text("alignment is %" PRIu64 "|2 MiB", alignments[i]), gemini_host_alloc, mgr, 512, alignments[i],
            &ptr);
  const uint64_t sizes[] = { 32 * W + 1, UINT64_C(1) << 46, UINT64_MAX - 511, UINT64_MAX };
  for (int i = 0; i < 4; i++)
    REFUSED(OOM_HOST, text("size_bytes is %" PRIu64 "|%" PRIu64, sizes[i], 32 * W), gemini_host_alloc, mgr, sizes[i], 0,
            &ptr);
  CHECK(ptr == &ptr);
  CHECK_OK(gemini_host_alloc(mgr, 700, 0, &small));
  CHECK_OK(gemini_host_alloc(mgr, 3 * W, 0, &large));
  CHECK_OK(gemini_host_alloc(mgr, 700, 0, &gone));
  CHECK_OK(gemini_host_alloc(bed.x.mgr, 700, 0, &theirs));
  CHECK_OK(gemini_host_free(mgr, gone));
  void *const wrong[] = { (uint8_t *)small + 1,
                          (uint8_t *)small + 256,
                          (uint8_t *)small - 256,
                          (uint8_t *)large + W,
                          (uint8_t *)large - W,
                          gone,
                          theirs,
                          &ptr,
                          (void *)(uintptr_t)256,
                          (void *)UINTPTR_MAX,
                          bed.block };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
    REFUSED(INVALID, text("%p|live", wrong[i]), gemini_host_free, mgr, wrong[i]);
  CHECK_OK(gemini_host_free(mgr, NULL));
  CHECK_OK(gemini_host_free(mgr, large));
  REFUSED(INVALID, "live", gemini_host_free, mgr, large);
  CHECK_OK(gemini_host_free(mgr, small));
  REFUSED(INVALID, "live", gemini_host_free, mgr, small);
  REFUSED(INVALID, "live", gemini_host_free, bed.x.mgr, small);
  CHECK_OK(gemini_host_free(bed.x.mgr, theirs));
  bed_close();
}

static void test_checkpoints_of_a_manager_that_keeps_nothing_are_refused(void) {
  bed_open();
  REFUSED(STATE, "checkpoint_name", gemini_checkpoint, bed.w.mgr);
  REFUSED(STATE, "checkpoint_name", gemini_resume, bed.w.mgr);
  REFUSED(INVALID, "directories", gemini_group_checkpoint, bed.w.mgr, NULL, NULL, "run");
  REFUSED(INVALID, "directories|a::b", gemini_group_checkpoint, bed.w.mgr, NULL, "a::b", "run");
  REFUSED(INVALID, "name|1 to 160", gemini_group_checkpoint, bed.w.mgr, NULL, ".", NULL);
  REFUSED(INVALID, "name|a/b", gemini_group_checkpoint, bed.w.mgr, NULL, ".", "a/b");
  REFUSED(INVALID, "directories", gemini_group_resume, bed.w.mgr, NULL, "", "run");
  REFUSED(INVALID, "name is \"\"", gemini_group_resume, bed.w.mgr, NULL, ".", "");
  REFUSED(HANDLE, "no group", gemini_group_checkpoint, bed.w.mgr, handle_of(7), ".", "run");
  bed_close();
}

/* ---- groups, and arenas that are sharded over one of a single rank */
static gemini_group_t group_of_one(gemini_manager_t mgr) {
  gemini_group_id_t id;
  CHECK_OK(gemini_group_id_make(GEMINI_TRANSPORT_SHARED, 1, &id));
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  c.ranks = 1;
  c.id = &id;
  gemini_group_t group;
  CHECK_OK(gemini_group_open(mgr, &c, &group));
  return group;
}

/* ---- functions of the caller's, of which none must be called */
static gemini_status_t never_gather(void *user, void *buffer, uint64_t bytes, void *stream, const char *label) {
  (void)user, (void)buffer, (void)bytes, (void)stream, (void)label;
  CHECK(false);
  return GEMINI_OK;
}
static gemini_status_t never_two(void *user, void *buffer, uint64_t n, uint32_t m, void *stream, const char *label) {
  (void)m;
  return never_gather(user, buffer, n, stream, label);
}
static gemini_status_t never_exchange(void *user, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  (void)mine;
  return never_gather(user, all_out, bytes, NULL, label);
}
static gemini_status_t meets_as_others(void *user, const void *mine, uint64_t bytes, void *all_out, const char *label) {
  (void)user, (void)mine, (void)label;
  memset(all_out, 0, 2 * bytes);
  return GEMINI_OK;
}

static void test_communicators_that_do_not_fit_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_group_t out = handle_of(UNTOUCHED);
  gemini_group_id_t id = { { 0 } };
  gemini_comm_t good = GEMINI_COMM_INIT, t[GEMINI_GROUP_COMMS];
  good.all_gather = never_gather;
  good.broadcast = good.reduce_scatter = good.all_reduce = never_two;
  good.exchange = never_exchange;
  for (int i = 0; i < GEMINI_GROUP_COMMS; i++) t[i] = good;
  const gemini_comm_t *comms[GEMINI_GROUP_COMMS] = { &t[0], &t[1], &t[2] };
  void *const nccl[GEMINI_GROUP_COMMS] = { &id, &good, &out };
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT;
  c.ranks = 2;
  REFUSED(INVALID, "id is NULL|nccl_comms and comms", gemini_group_open, mgr, &c, &out);
  c.comms = comms;
  c.id = &id;
  REFUSED(INVALID, "id and comms are given", gemini_group_open, mgr, &c, &out);
  c.nccl_comms = nccl;
  c.id = NULL;
  REFUSED(INVALID, "nccl_comms and comms are given", gemini_group_open, mgr, &c, &out);
  c.comms = NULL;
  c.id = &id;
  REFUSED(INVALID, "id and nccl_comms are given", gemini_group_open, mgr, &c, &out);
  c.id = NULL;
  REFUSED(UNSUPPORTED, "NCCL|GPU|device sim", gemini_group_open, mgr, &c, &out);
  c.nccl_comms = NULL;
  c.comms = comms;
  c.flags = GEMINI_GROUP_RANK_ORDER;
  REFUSED(INVALID, "flags is 0x1|order of sums", gemini_group_open, mgr, &c, &out);
  c.flags = GEMINI_GROUP_REGISTER;
  REFUSED(INVALID, "comms[0]|register_memory is NULL", gemini_group_open, mgr, &c, &out);
  c.flags = 0;
  c.deadline_ns = 5;
  REFUSED(INVALID, "deadline_ns is 5|0", gemini_group_open, mgr, &c, &out);
  c.deadline_ns = 0;
  c.rank = 2;
  REFUSED(INVALID, "rank is 2|2", gemini_group_open, mgr, &c, &out);
  c.rank = 0;
  for (int i = 0; i < 2; i++) {
    c.ranks = i ? 1025 : 0;
    REFUSED(INVALID, i ? "ranks is 1025|1024" : "ranks is 0|1024", gemini_group_open, mgr, &c, &out);
  }
  c.ranks = 2;
  comms[1] = NULL;
  REFUSED(INVALID, "comms[1] is NULL", gemini_group_open, mgr, &c, &out);
  comms[1] = &t[1];
#define REFUSED_TABLE(expected, texts, i, ...)                  \
  do {                                                          \
    __VA_ARGS__;                                                \
    REFUSED(expected, texts, gemini_group_open, mgr, &c, &out); \
    t[i] = good;                                                \
  } while (0)
  REFUSED_TABLE(INVALID, "comms[2]: struct_size is 71|72 to 4096", 2, t[2].struct_size = 71);
  REFUSED_TABLE(INVALID, "comms[0]: flags|0x2", 0, t[0].flags = 2);
  REFUSED_TABLE(INVALID, "comms[0]: all_gather is NULL", 0, t[0].all_gather = NULL);
  REFUSED_TABLE(INVALID, "comms[0]: broadcast is NULL", 0, t[0].broadcast = NULL);
  REFUSED_TABLE(INVALID, "comms[1]: reduce_scatter is NULL", 1, t[1].reduce_scatter = NULL);
  REFUSED_TABLE(INVALID, "comms[1]: all_reduce is NULL", 1, t[1].all_reduce = NULL);
  REFUSED_TABLE(INVALID, "comms[2]: exchange is NULL", 2, t[2].exchange = NULL);
  REFUSED_TABLE(UNSUPPORTED, "comms[1]|GEMINI_COMM_QUEUES|device sim", 1, t[1].flags = GEMINI_COMM_QUEUES);
  REFUSED_TABLE(INVALID, "comms[2]: exchange() gives rank 0 of 0 in the place of rank 0 of 2", 2,
                t[2].exchange = meets_as_others);
  CHECK_EQ(handle_id(out), UNTOUCHED);
  bed_close();
}

static void test_a_pinned_sharded_arena_is_not_destroyed(void) {
  world_t w = world_open(world_config(8, 8, 0));
  gemini_arena_config_t c = GEMINI_ARENA_CONFIG_INIT;
  gemini_arena_t arena;
  gemini_tensor_t t;
  c.element_bytes = 4;
  c.group = group_of_one(w.mgr);
  CHECK_OK(gemini_arena_create(w.mgr, &c, &arena));
  CHECK_OK(gemini_tensor_register(w.mgr, arena, "t", WORLD_CHUNK, GEMINI_OFFSET_NEXT, &t));
  gemini_access_t pinned = gemini_tensor_access(t, 0, 0, 0, 0);
  CHECK_OK(gemini_pin(w.mgr, &pinned));
  CHECK_STATUS(gemini_arena_destroy(w.mgr, arena), GEMINI_ERR_BUSY);
  CHECK_SAYS(world_error().message, "acquired or pinned");
  CHECK_OK(gemini_unpin(w.mgr, &pinned));
  CHECK_OK(gemini_arena_destroy(w.mgr, arena));
  world_close(&w);
}

static void test_groups_that_are_not_there_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_group_t dead = group_of_one(mgr), theirs = group_of_one(bed.x.mgr);
  CHECK_OK(gemini_group_close(mgr, dead));
  CHECK_OK(gemini_group_close(mgr, NULL));
  void *const none[] = { NULL, handle_of(1), dead, theirs, mgr, bed.params, bed.o[0] };
  uint8_t byte = 1, bytes[2] = { 77, 77 };
  gemini_group_stats_t stats = GEMINI_GROUP_STATS_INIT;
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    const char *why = none[i] == dead ? "closed group" : "no group";
    if (none[i]) REFUSED(HANDLE, why, gemini_group_close, mgr, none[i]);
    REFUSED(HANDLE, why, gemini_group_exchange, mgr, none[i], &byte, 1, bytes);
    REFUSED(HANDLE, why, gemini_group_stats, mgr, none[i], &stats);
  }
  CHECK_EQ(bytes[0], 77);
  gemini_group_id_t id, other = { { 2 } };
  REFUSED(INVALID, "id_out is NULL", gemini_group_id_make, 0, 1, NULL);
  REFUSED(INVALID, "transport is 2|1", gemini_group_id_make, 2, 1, &id);
  REFUSED(INVALID, "ranks is 0|1024", gemini_group_id_make, 0, 0, &id);
  REFUSED(INVALID, "ranks is 1025|1024", gemini_group_id_make, 0, 1025, &id);
  REFUSED(INVALID, "ranks is 0|1024", gemini_group_id_make, GEMINI_TRANSPORT_NCCL, 0, &id);
  REFUSED(INVALID, "ranks is 1025|1024", gemini_group_id_make, GEMINI_TRANSPORT_NCCL, 1025, &id);
  CHECK_OK(gemini_group_id_make(0, 2, &id));
  gemini_group_t out = handle_of(UNTOUCHED);
  gemini_group_config_t c = GEMINI_GROUP_CONFIG_INIT, good;
  c.ranks = 2;
  c.id = &id;
  c.deadline_ns = 1000000;
  good = c;
  REFUSED(INVALID, "group_out is NULL", gemini_group_open, mgr, &c, NULL);
  REFUSED(INVALID, "config is NULL", gemini_group_open, mgr, NULL, &out);
  c.flags = 7;
  REFUSED(INVALID, "flags|0x4", gemini_group_open, mgr, &c, &out);
  c.flags = GEMINI_GROUP_REGISTER;
  REFUSED(UNSUPPORTED, "GEMINI_GROUP_REGISTER", gemini_group_open, mgr, &c, &out);
  c = good;
  c.id = NULL;
  REFUSED(INVALID, "id is NULL", gemini_group_open, mgr, &c, &out);
  c.id = &other;
  REFUSED(INVALID, "gemini_group_id_make", gemini_group_open, mgr, &c, &out);
  other.bytes[0] = GEMINI_TRANSPORT_NCCL;
  REFUSED(INVALID, "gemini_group_id_make", gemini_group_open, mgr, &c, &out);
  other.bytes[4] = 2; /* ranks */
  REFUSED(UNSUPPORTED, "NCCL|GPU|device sim|GEMINI_TRANSPORT_SHARED", gemini_group_open, mgr, &c, &out);
  memset(&other, 0, sizeof other);
  REFUSED(INVALID, "group over shared memory", gemini_group_open, mgr, &c, &out);
  c = good;
  c.rank = 2;
  REFUSED(INVALID, "rank is 2|2", gemini_group_open, mgr, &c, &out);
  c.rank = 0;
  c.ranks = 3;
  REFUSED(INVALID, "ranks is 3|2", gemini_group_open, mgr, &c, &out);
  c = good;
  c.shard_ranks = 3;
  REFUSED(INVALID, "shard_ranks is 3|ranks, 2", gemini_group_open, mgr, &c, &out);
  c.shard_ranks = 1;
  c.rank = 2;
  REFUSED(INVALID, "rank is 2|2", gemini_group_open, mgr, &c, &out);
  c = good;
  c.struct_size = 47;
  REFUSED(INVALID, "struct_size is 47|48 to 4096", gemini_group_open, mgr, &c, &out);
  c = good;
  REFUSED(PEER, "these are missing: 1", gemini_group_open, mgr, &c, &out);
  CHECK_EQ(handle_id(out), UNTOUCHED);
  gemini_group_t group = group_of_one(mgr);
  REFUSED(INVALID, "mine is NULL|1", gemini_group_exchange, mgr, group, NULL, 1, bytes);
  REFUSED(INVALID, "all_out is NULL|1", gemini_group_exchange, mgr, group, &byte, 1, NULL);
  REFUSED(INVALID, "stats_out", gemini_group_stats, mgr, group, NULL);
  stats.struct_size = 55;
  REFUSED(INVALID, "struct_size is 55|56 to 4096", gemini_group_stats, mgr, group, &stats);
  gemini_group_t many[16] = { group };
  for (int i = 1; i < 16; i++) many[i] = group_of_one(mgr);
  CHECK_OK(gemini_group_id_make(0, 1, &id));
  c.ranks = 1;
  REFUSED(INVALID, "16 groups|16", gemini_group_open, mgr, &c, &out);
  for (int i = 0; i < 16; i++) CHECK_OK(gemini_group_close(mgr, many[i]));
  bed_close();
}

/* Gradients of sharded parameters that have bytes of their own. */
static void test_what_sums_of_gradients_cannot_do_is_refused(void) {
  for (uint32_t stage = GEMINI_ZERO_STATES; stage <= GEMINI_ZERO_PARAMS; stage++) {
    bed_open();
    const gemini_manager_t mgr = bed.w.mgr;
    gemini_arena_config_t made = GEMINI_ARENA_CONFIG_INIT;
    made.group = group_of_one(mgr);
    made.zero_stage = stage;
    made.element_bytes = 2;
    made.capacity_bytes = 64 * W;
    made.name = "sharded";
    gemini_arena_t params, sums;
    CHECK_OK(gemini_arena_create(mgr, &made, &params));
    made.group = NULL;
    made.zero_stage = 0;
    made.like = params;
    made.kind = GEMINI_KIND_GRAD;
    made.dtype = GEMINI_DTYPE_BF16;
    made.name = "sums";
    CHECK_OK(gemini_arena_create(mgr, &made, &sums));
    gemini_tensor_t p[2], g[2];
    for (int i = 0; i < 2; i++) { /* one chunk and a half each: they share a chunk */
      p[i] = world_tensor(&bed.w, params, i ? "upper" : "lower", 3 * W / 2);
      CHECK_OK(gemini_tensor_counterpart(mgr, p[i], sums, &g[i]));
    }
    gemini_access_t a = world_whole(g[1], READ, DEVICE), slice = world_part(g[1], W, 64, WRITE, HOST);
    REFUSED(STATE, "upper|slices|on the host", gemini_acquire, mgr, &a, 1, bed.w.stream);
    CHECK_OK(gemini_acquire(mgr, &slice, 1, GEMINI_STREAM_CALLER));
    a = world_whole(g[1], WRITE, DEVICE);
    CHECK_OK(gemini_acquire(mgr, &a, 1, bed.w.stream));
    REFUSED(BUSY, "acquired", gemini_zero, mgr, &a);
    CHECK_OK(gemini_release(mgr, &slice, 1, GEMINI_STREAM_CALLER));
    REFUSED(BUSY, "acquired", gemini_zero, mgr, &a);
    CHECK_OK(gemini_release(mgr, &a, 1, bed.w.stream));
    slice.mode = READ;
    REFUSED(STATE, "not been added", gemini_acquire, mgr, &slice, 1, GEMINI_STREAM_CALLER);
    REFUSED(STATE, "not been added", gemini_store, mgr, &a, 2, 0);
    REFUSED(UNSUPPORTED, "gradients of arena sums", gemini_load, mgr, &a, 0, 0);
    REFUSED(UNSUPPORTED, "arena sums is sharded", gemini_borrow, mgr, &a, 0, 0);
    CHECK_OK(gemini_acquire(mgr, &a, 1, bed.w.stream)); /* written anew, before it is ready */
    CHECK_OK(gemini_release(mgr, &a, 1, bed.w.stream));
    CHECK_OK(gemini_tensor_state_set(mgr, g[1], GEMINI_STATE_READY_FOR_REDUCE));
    const char *why = stage == GEMINI_ZERO_STATES ? "upper|READY_FOR_REDUCE|set it HOLD" : "upper|others";
    REFUSED(STATE, why, gemini_acquire, mgr, &a, 1, bed.w.stream);
    gemini_access_t part = world_part(g[1], 0, 2, WRITE, DEVICE); /* its first chunk waits for the other tensor */
    REFUSED(STATE, "upper|READY_FOR_REDUCE|set it HOLD", gemini_acquire, mgr, &part, 1, bed.w.stream);
    part.mode = GEMINI_READ_WRITE;
    CHECK_OK(gemini_acquire(mgr, &part, 1, bed.w.stream));
    CHECK_OK(gemini_release(mgr, &part, 1, bed.w.stream));
    gemini_tensor_t more = handle_of(UNTOUCHED);
    if (stage != GEMINI_ZERO_STATES)
      REFUSED(STATE, "being added", gemini_tensor_register, mgr, params, "more", W, GEMINI_OFFSET_NEXT, &more);
    double norm;
    CHECK_OK(gemini_norm(mgr, &a, GEMINI_DTYPE_BF16, bed.w.stream, &norm)); /* adds what is left */
    CHECK_EQ(world_tensor_info(&bed.w, g[1]).state, GEMINI_STATE_HOLD);
    a.mode = READ;
    REFUSED(STATE, "upper|slices", gemini_acquire, mgr, &a, 1, bed.w.stream);
    a.mode = WRITE;
    CHECK_OK(gemini_acquire(mgr, &a, 1, bed.w.stream));
    CHECK_OK(gemini_release(mgr, &a, 1, bed.w.stream));
    CHECK_OK(gemini_iteration_begin(mgr));
    CHECK_OK(gemini_zero(mgr, &a)); /* also inside an iteration */
    CHECK_OK(gemini_iteration_end(mgr));
    /* Inside an operator, too, an acquire of what is ready is not taken for one that needs no checks. */
    CHECK_OK(gemini_iteration_begin(mgr));
    REFUSED(UNSUPPORTED, "sharded arenas", gemini_op_begin_chosen, mgr, "an operator", bed.w.stream);
    REFUSED(UNSUPPORTED, "group", gemini_hook_compacted, mgr);
    CHECK_OK(gemini_op_begin(mgr, "an operator", bed.w.stream));
    part = world_part(g[0], 0, 0, WRITE, DEVICE);
    for (int i = 0; i < 2; i++) {
      CHECK_OK(gemini_acquire(mgr, &part, 1, bed.w.stream));
      CHECK_OK(gemini_release(mgr, &part, 1, bed.w.stream));
      CHECK_OK(gemini_stream_synchronize(mgr, bed.w.stream));
    }
    CHECK_OK(gemini_tensor_state_set(mgr, g[0], GEMINI_STATE_READY_FOR_REDUCE));
    REFUSED(STATE, "lower|READY_FOR_REDUCE|set it HOLD", gemini_acquire, mgr, &part, 1, bed.w.stream);
    CHECK_OK(gemini_op_end(mgr));
    CHECK_OK(gemini_iteration_end(mgr));
    CHECK_OK(gemini_norm(mgr, &a, GEMINI_DTYPE_BF16, bed.w.stream, &norm));
    /* What is ready and cannot be added stays, and nothing may be added to it meanwhile. */
    slice = world_part(sums, 2 * W, 64, READ, HOST);
    CHECK_OK(gemini_acquire(mgr, &slice, 1, GEMINI_STREAM_CALLER));
    for (int i = 0; i < 2; i++) CHECK_OK(gemini_tensor_state_set(mgr, g[i], GEMINI_STATE_READY_FOR_REDUCE));
    part.mode = GEMINI_READ_WRITE;
    if (stage != GEMINI_ZERO_STATES)
      REFUSED(STATE, "sums|could not be added", gemini_acquire, mgr, &part, 1, bed.w.stream);
    REFUSED(BUSY, "a slice of arena sums is acquired", gemini_norm, mgr, &a, GEMINI_DTYPE_BF16, bed.w.stream, &norm);
    CHECK_OK(gemini_release(mgr, &slice, 1, GEMINI_STREAM_CALLER));
    CHECK_OK(gemini_tensor_state_set(mgr, g[0], GEMINI_STATE_HOLD));
    CHECK_OK(gemini_tensor_state_set(mgr, g[0], GEMINI_STATE_READY_FOR_REDUCE));
    CHECK_OK(gemini_acquire(mgr, &part, 1, bed.w.stream));
    CHECK_OK(gemini_release(mgr, &part, 1, bed.w.stream));
    REFUSED(BUSY, "sharded", gemini_arena_destroy, mgr, params);
    CHECK_OK(gemini_arena_destroy(mgr, sums));
    CHECK_OK(gemini_arena_destroy(mgr, params));
    bed_close();
  }
}

static void never_update(void *user, const gemini_update_span_t *span) {
  (void)user, (void)span;
  CHECK(false);
}

static void test_what_sharded_arenas_cannot_do_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_group_t group = group_of_one(mgr), theirs = group_of_one(bed.x.mgr);
  REFUSED_ARENA(HANDLE, "no group", c.group = theirs);
  REFUSED_ARENA(INVALID, "zero_stage is 4|3", c.group = group, c.zero_stage = 4);
  REFUSED_ARENA(INVALID, "zero_stage is 1", c.zero_stage = 1);
  REFUSED_ARENA(INVALID, "dtype is 1", c.dtype = 1);
  REFUSED_ARENA(INVALID, "kind is 2", c.group = group, c.kind = GEMINI_KIND_MASTER);
  REFUSED_ARENA(INVALID, "dtype is 1", c.group = group, c.dtype = 1);
  REFUSED_ARENA(INVALID, "leave them 0|params", c.group = group, c.like = bed.params);
  gemini_arena_config_t made = GEMINI_ARENA_CONFIG_INIT;
  made.group = group;
  made.element_bytes = 2;
  made.capacity_bytes = 64 * W;
  made.name = "sharded";
  gemini_arena_t params, grads, states;
  uint64_t taken = 77;
  CHECK_OK(gemini_arena_create(mgr, &made, &params));
  CHECK_OK(gemini_arena_take(mgr, params, 512, &taken));
  CHECK_EQ(taken, 0);
  REFUSED_ARENA(UNSUPPORTED, "sharded is sharded|no tensor", c.reuse = params, c.kind = GEMINI_KIND_GRAD,
                c.element_bytes = 2, c.dtype = GEMINI_DTYPE_BF16);
  CHECK_OK(gemini_arena_destroy(mgr, params));
  CHECK_OK(gemini_arena_create(mgr, &made, &params));
  REFUSED(BUSY, "1 arenas", gemini_group_close, mgr, group);
  REFUSED_ARENA(EXISTS, "sharded slices", c.name = "sharded slices");
  REFUSED_ARENA(UNSUPPORTED, "element_bytes is 4|sharded|its 2", c.like = params, c.kind = GEMINI_KIND_GRAD,
                c.element_bytes = 4);
  REFUSED_ARENA(INVALID, "dtype is 0|2", c.like = params, c.kind = GEMINI_KIND_GRAD, c.element_bytes = 2);
  REFUSED_ARENA(INVALID, "dtype is 0|2", c.reuse = params, c.kind = GEMINI_KIND_GRAD, c.element_bytes = 2);
  REFUSED_ARENA(INVALID, "group and zero_stage|sharded", c.like = params, c.zero_stage = 1);
  made.group = NULL;
  made.reuse = params;
  made.kind = GEMINI_KIND_GRAD;
  made.dtype = GEMINI_DTYPE_BF16;
  made.name = "sharded gradients";
  CHECK_OK(gemini_arena_create(mgr, &made, &grads));
  made.reuse = NULL;
  made.like = params;
  made.kind = GEMINI_KIND_MASTER;
  made.dtype = 0;
  made.element_bytes = 4;
  made.name = "sharded states";
  CHECK_OK(gemini_arena_create(mgr, &made, &states));
  taken = 77;
  REFUSED(UNSUPPORTED, "sharded is sharded", gemini_arena_take, mgr, params, 512, &taken);
  CHECK_EQ(taken, 77);
  gemini_tensor_t p = world_tensor(&bed.w, params, "shared weight", 2 * W), g, s;
  CHECK_OK(gemini_tensor_counterpart(mgr, p, grads, &g));
  CHECK_OK(gemini_tensor_counterpart(mgr, p, states, &s));
  const gemini_arena_t all_three[] = { params, states, grads };
  const uint32_t three_modes[] = { GEMINI_WRITE, GEMINI_READ_WRITE, GEMINI_READ };
  gemini_update_t some = GEMINI_UPDATE_INIT;
  some.flags = GEMINI_UPDATE_PART;
  some.arenas = all_three;
  some.modes = three_modes;
  some.arena_count = 3;
  some.fn = never_update;
  REFUSED(UNSUPPORTED, "gradients take the bytes of arena sharded", gemini_update, mgr, &some);
  some.arena_count = 1;
  some.arenas = &states;
  some.modes = &three_modes[1];
  REFUSED(INVALID, "sharded states names no arena of gradients", gemini_update, mgr, &some);
  gemini_access_t a = world_whole(p, READ, DEVICE);
  uint64_t bytes = 77, offset = 77, size = 77;
  REFUSED(STATE, "sharded slices is not pinned", gemini_unpin, mgr, &a);
  CHECK_OK(gemini_pin(mgr, &a));
  CHECK_OK(gemini_tier_bytes(mgr, &a, &bytes));
  CHECK_EQ(bytes, 2 * W);
  a.tier = HOST;
  REFUSED(BUSY, "sharded slices is pinned", gemini_move, mgr, &a, 1);
  CHECK_OK(gemini_hint(mgr, &a, 1));
  CHECK_OK(gemini_unpin(mgr, &a));
  a.tier = 3;
  REFUSED(INVALID, "tier is 3", gemini_move, mgr, &a, 1);
  REFUSED(INVALID, "tier is 3", gemini_tier_bytes, mgr, &a, &bytes);
  bytes = 77;
  REFUSED(UNSUPPORTED, "sharded is sharded over a group, and group is NULL", gemini_group_checkpoint, mgr, NULL, ".",
          "run");
  REFUSED(UNSUPPORTED, "sharded is sharded over a group, and group is NULL", gemini_group_resume, mgr, NULL, ".",
          "run");
  REFUSED(INVALID, "offset_out is NULL", gemini_slice_next, mgr, &a, 0, NULL, &size);
  REFUSED(INVALID, "size_out is NULL", gemini_slice_next, mgr, &a, 0, &offset, NULL);
  CHECK(bytes == 77 && offset == 77 && size == 77);
  gemini_access_t part = world_part(p, 100, 1000, READ, HOST);
  CHECK_OK(gemini_slice_next(mgr, &part, 0, &offset, &size));
  CHECK(offset == 100 && size == 1000); /* all is this rank's */
  CHECK_OK(gemini_slice_next(mgr, &part, 600, &offset, &size));
  CHECK(offset == 600 && size == 500);
  const uint64_t behind[] = { 1100, 1101, 3 * W, UINT64_MAX };
  for (int i = 0; i < 4; i++) {
    CHECK_OK(gemini_slice_next(mgr, &part, behind[i], &offset, &size));
    CHECK(offset == 1100 && size == 0);
  }
  CHECK_EQ(world_tensor_info(&bed.w, s).address, 0);
  a = world_whole(s, READ, DEVICE);
  REFUSED(UNSUPPORTED, "sharded states|slices only", gemini_acquire, mgr, &a, 1, bed.w.stream);
  a = world_part(p, W - 100, 200, READ, HOST); /* across the end of a chunk */
  REFUSED(INVALID, "shared weight|gemini_slice_next", gemini_acquire, mgr, &a, 1, GEMINI_STREAM_CALLER);
  a = world_whole(g, WRITE, DEVICE);
  REFUSED(UNSUPPORTED, "sharded gradients", gemini_zero, mgr, &a);
  CHECK_OK(gemini_acquire(mgr, &a, 1, bed.w.stream));
  CHECK_OK(gemini_release(mgr, &a, 1, bed.w.stream));
  a = world_part(g, 0, W, READ, HOST);
  REFUSED(STATE, "not been added", gemini_acquire, mgr, &a, 1, GEMINI_STREAM_CALLER);
  a = world_whole(p, WRITE, DEVICE);
  REFUSED(STATE, "shared weight|gradient", gemini_acquire, mgr, &a, 1, bed.w.stream);
  REFUSED(STATE, "shared weight", gemini_zero, mgr, &a);
  REFUSED(BUSY, "sharded gradients", gemini_arena_destroy, mgr, grads);
  CHECK_OK(gemini_tensor_state_set(mgr, g, GEMINI_STATE_READY_FOR_REDUCE));
  a = world_whole(g, WRITE, DEVICE);
  REFUSED(STATE, "has been added", gemini_acquire, mgr, &a, 1, bed.w.stream);
  const gemini_arena_t arenas[] = { params, grads };
  const uint32_t modes[] = { WRITE, READ };
  gemini_update_t u = GEMINI_UPDATE_INIT;
  u.arenas = arenas;
  u.modes = modes;
  u.arena_count = 2;
  u.fn = no_span;
  u.element_count = 256;
  REFUSED(UNSUPPORTED, "0 + 256|all of their", gemini_update, mgr, &u);
  u.element_count = 0;
  CHECK_OK(gemini_update(mgr, &u));
  /* A gradient that is ready has its parameter's bytes, also if it was not written. */
  CHECK_OK(gemini_tensor_state_set(mgr, g, GEMINI_STATE_READY_FOR_REDUCE));
  a = world_whole(p, READ, DEVICE);
  REFUSED(STATE, "shared weight|gradient", gemini_acquire, mgr, &a, 1, bed.w.stream);
  CHECK_OK(gemini_update(mgr, &u));
  CHECK_OK(gemini_iteration_begin(mgr));
  CHECK_OK(gemini_op_begin(mgr, "an operator", bed.w.stream));
  a = world_whole(p, WRITE, DEVICE);
  REFUSED(STATE, "while an operator is open", gemini_zero, mgr, &a);
  CHECK_OK(gemini_op_end(mgr));
  CHECK_OK(gemini_zero(mgr, &a));
  CHECK_OK(gemini_iteration_end(mgr));
  CHECK_OK(gemini_arena_destroy(mgr, states));
  CHECK_OK(gemini_arena_destroy(mgr, grads));
  CHECK_OK(gemini_arena_destroy(mgr, params));
  CHECK_OK(gemini_group_close(mgr, group));
  bed_close();
}

/* ---- topologies: of this machine, if it is described */
static void test_topology_of_nothing_is_refused(void) {
  bed_open();
  gemini_topology_t t = handle_of(UNTOUCHED), closed = NULL;
  uint32_t out = 77, disks[64] = { 77 }, node = 77;
  REFUSED(INVALID, "topology_out is NULL", gemini_topology_open, NULL, NULL);
  REFUSED(IO, "/nowhere/at/all", gemini_topology_open, "/nowhere/at/all", &t);
  REFUSED(FORMAT, "topology", gemini_topology_open, __FILE__, &t);
  CHECK(handle_id(t) == UNTOUCHED);
  gemini_status_t status = gemini_topology_open(NULL, &t);
  if (!status) {
    CHECK_OK(gemini_topology_open(NULL, &closed));
    CHECK_OK(gemini_topology_close(closed));
  }
  CHECK_OK(gemini_topology_close(0));
  void *const none[] = { handle_of(1), handle_of(UINT64_MAX), closed, bed.w.mgr, bed.other, bed.w.stream };
  gemini_topology_object_t object = GEMINI_TOPOLOGY_OBJECT_INIT;
  object.size_bytes = UNTOUCHED;
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    const char *says = text("%s|topology", hex(none[i]));
    if (none[i]) REFUSED(HANDLE, says, gemini_topology_close, none[i]);
    REFUSED(HANDLE, "topology", gemini_topology_count, none[i], GEMINI_OBJECT_NODE, &out);
    REFUSED(HANDLE, "topology", gemini_topology_object, none[i], GEMINI_OBJECT_NODE, 0, &object);
    REFUSED(HANDLE, "topology", gemini_topology_distance, none[i], GEMINI_OBJECT_NODE, 0, GEMINI_OBJECT_NODE, 0, &out);
    REFUSED(HANDLE, "topology", gemini_topology_nearest, none[i], GEMINI_OBJECT_NODE, 0, GEMINI_OBJECT_NODE, &out);
    REFUSED(HANDLE, "topology", gemini_topology_directory, none[i], ".", 64, disks, &out, &node);
  }
  const uint32_t kinds[] = { GEMINI_OBJECT_COUNT, GEMINI_OBJECT_COUNT + 1, UINT32_MAX };
  for (int i = 0; !status && i < 3; i++) {
    const char *says = text("kind is %u|%d", kinds[i], GEMINI_OBJECT_COUNT - 1);
    REFUSED(INVALID, says, gemini_topology_count, t, kinds[i], &out);
    REFUSED(INVALID, says, gemini_topology_object, t, kinds[i], 0, &object);
    REFUSED(INVALID, says, gemini_topology_distance, t, kinds[i], 0, GEMINI_OBJECT_NODE, 0, &out);
    REFUSED(INVALID, says, gemini_topology_distance, t, GEMINI_OBJECT_NODE, 0, kinds[i], 0, &out);
    REFUSED(INVALID, says, gemini_topology_nearest, t, kinds[i], 0, GEMINI_OBJECT_NODE, &out);
    REFUSED(INVALID, says, gemini_topology_nearest, t, GEMINI_OBJECT_NODE, 0, kinds[i], &out);
  }
  for (uint32_t kind = 0; !status && kind < GEMINI_OBJECT_COUNT; kind++) {
    uint32_t count;
    CHECK_OK(gemini_topology_count(t, kind, &count));
    const uint32_t indexes[] = { count, count + 1, UINT32_MAX };
    for (int i = 0; i < 3; i++) {
      const char *says = text("%u|there are %u", indexes[i], count);
      REFUSED(INVALID, says, gemini_topology_object, t, kind, indexes[i], &object);
      REFUSED(INVALID, says, gemini_topology_distance, t, kind, indexes[i], GEMINI_OBJECT_NODE, 0, &out);
      REFUSED(INVALID, says, gemini_topology_nearest, t, kind, indexes[i], GEMINI_OBJECT_NODE, &out);
    }
  }
  if (!status) {
    REFUSED(INVALID, "count_out is NULL", gemini_topology_count, t, GEMINI_OBJECT_NODE, NULL);
    REFUSED(INVALID, "object_out is NULL", gemini_topology_object, t, GEMINI_OBJECT_NODE, 0, NULL);
    REFUSED(INVALID, "distance_out is NULL", gemini_topology_distance, t, GEMINI_OBJECT_NODE, 0, GEMINI_OBJECT_NODE, 0,
            NULL);
    REFUSED(INVALID, "index_out is NULL", gemini_topology_nearest, t, GEMINI_OBJECT_NODE, 0, GEMINI_OBJECT_NODE, NULL);
    REFUSED(INVALID, "path is NULL", gemini_topology_directory, t, NULL, 64, disks, &out, &node);
    REFUSED(INVALID, "disks_out is NULL", gemini_topology_directory, t, ".", 64, NULL, &out, &node);
    REFUSED(INVALID, "count_out is NULL", gemini_topology_directory, t, ".", 64, disks, NULL, &node);
    REFUSED(IO, "/nowhere/at/all", gemini_topology_directory, t, "/nowhere/at/all", 64, disks, &out, &node);
    REFUSED(NOT_FOUND, "/proc", gemini_topology_directory, t, "/proc", 64, disks, &out, &node);
    for (size_t i = 0; i <= sizeof wrong_sizes / sizeof *wrong_sizes; i++) {
      uint32_t wrong = i < sizeof wrong_sizes / sizeof *wrong_sizes ? wrong_sizes[i] : (uint32_t)sizeof object - 1;
      page_t p = page_of(&wrong, 4, wrong, 0xa5);
      REFUSED(INVALID, text("struct_size is %u|%zu to 4096", wrong, sizeof object), gemini_topology_object, t,
              GEMINI_OBJECT_NODE, 0, (gemini_topology_object_t *)p.bytes);
      CHECK(p.struct_size == wrong && all_are(p.bytes, 4, sizeof p.bytes, 0xa5));
    }
    CHECK_OK(gemini_topology_close(t));
    REFUSED(HANDLE, hex(t), gemini_topology_close, t);
  }
  CHECK(out == 77 && disks[0] == 77 && node == 77 && object.size_bytes == UNTOUCHED);
  bed_close();
}

static void test_load_and_store_with_wrong_files_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  gemini_access_t a = world_whole(bed.o[1], READ, HOST);
  const int fd = file_of("short");
  for (int i = 0; i < 2; i++) {
    REFUSED(INVALID, "fd is -", gemini_load, mgr, &a, i ? INT32_MIN : -1, 0);
    REFUSED(INVALID, "fd is -", gemini_borrow, mgr, &a, i ? INT32_MIN : -1, 0);
    REFUSED(INVALID, "fd is -", gemini_store, mgr, &a, i ? INT32_MIN : -1, 0);
  }
  const uint64_t offsets[] = { UINT64_MAX, UINT64_MAX - W, UINT64_C(1) << 63, (UINT64_C(1) << 63) - W };
  for (int i = 0; i < 4; i++) {
    REFUSED(INVALID, text("fd_offset is %" PRIu64, offsets[i]), gemini_load, mgr, &a, fd, offsets[i]);
    REFUSED(INVALID, text("fd_offset is %" PRIu64, offsets[i]), gemini_borrow, mgr, &a, fd, offsets[i]);
    REFUSED(INVALID, text("fd_offset is %" PRIu64, offsets[i]), gemini_store, mgr, &a, fd, offsets[i]);
  }
  /* Whatever moved to the host for these, no byte has changed: the file ends before the range begins. */
  a = world_whole(bed.o[2], READ, HOST);
  CHECK_EQ(gemini_load(mgr, &a, fd, 5), GEMINI_ERR_FORMAT);
  CHECK(strstr(world_error().message, "offset 5") && strstr(world_error().message, "64 bytes"));
  CHECK_EQ(world_error().native_code, 0);
  int ends[2];
  CHECK(!pipe(ends));
  CHECK_EQ(gemini_load(mgr, &a, ends[0], 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, ESPIPE);
  CHECK_EQ(gemini_store(mgr, &a, ends[1], 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, ESPIPE);
  CHECK(!close(ends[0]) && !close(ends[1]) && !close(fd));
  CHECK_EQ(gemini_load(mgr, &a, fd, 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, EBADF);
  CHECK_EQ(gemini_store(mgr, &a, fd, 0), GEMINI_ERR_IO);
  CHECK_EQ(world_error().native_code, EBADF);
  bed_close();
}

static void test_norm_of_wrong_types_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  double norm = -1;
  gemini_access_t a = world_whole(bed.o[1], READ, HOST);
  const uint32_t types[] = { 4, UINT32_C(1) << 31, UINT32_MAX };
  for (int i = 0; i < 3; i++)
    REFUSED(INVALID, text("dtype is %u|3", types[i]), gemini_norm, mgr, &a, types[i], bed.w.stream, &norm);
  const uint32_t widths[] = { 4, 2, 2, 8 };
  for (uint32_t type = 0; type < 4; type++) {
    a = world_part(bed.o[1], 0, widths[type] * 3 - 1, READ, HOST);
    REFUSED(INVALID, text("elements of %u bytes", widths[type]), gemini_norm, mgr, &a, type, bed.w.stream, &norm);
    a = world_part(bed.o[1], widths[type] / 2, widths[type], READ, HOST);
    REFUSED(INVALID, text("elements of %u bytes", widths[type]), gemini_norm, mgr, &a, type, bed.w.stream, &norm);
  }
  CHECK(norm == -1);
  bed_close();
}

/* ---- updates */
#define REFUSED_UPDATE(expected, texts, ...)                                       \
  do {                                                                             \
    gemini_arena_t arenas[9] = { bed.params, bed.grads, bed.master };              \
    uint32_t modes[9] = { WRITE, READ, BOTH, READ, READ, READ, READ, READ, READ }; \
    gemini_update_t u = GEMINI_UPDATE_INIT;                                        \
    u.arenas = arenas;                                                             \
    u.modes = modes;                                                               \
    u.arena_count = 3;                                                             \
    u.fn = count_span;                                                             \
    u.user = &spans;                                                               \
    u.stream = bed.w.stream;                                                       \
    __VA_ARGS__;                                                                   \
    REFUSED(expected, texts, gemini_update, bed.w.mgr, &u);                        \
    u.flags |= GEMINI_UPDATE_LATE;                                                 \
    REFUSED(expected, texts, gemini_update, bed.w.mgr, &u);                        \
    CHECK_EQ(spans, 0);                                                            \
  } while (0)

static void count_span(void *user, const gemini_update_span_t *span) {
  (void)span;
  __atomic_fetch_add((int *)user, 1, __ATOMIC_RELAXED);
}

static void test_updates_out_of_range_are_refused(void) {
  bed_open();
  int spans = 0;
  const uint64_t elements = world_arena_info(&bed.w, bed.params).size_bytes / 2;
  REFUSED_UPDATE(INVALID, "flags|0x20", u.flags = 32);
  REFUSED_UPDATE(INVALID, "GEMINI_UPDATE_PART is for sharded arenas|params", u.flags = GEMINI_UPDATE_PART);
  REFUSED_UPDATE(INVALID, "GEMINI_UPDATE_PART does not go with", u.flags = GEMINI_UPDATE_PART | GEMINI_UPDATE_COMMIT);
  REFUSED_UPDATE(INVALID, "flags|goes with no other flag", u.flags = GEMINI_UPDATE_SPECULATE | GEMINI_UPDATE_COMMIT);
  REFUSED_UPDATE(INVALID, "flags|0x8000000", u.flags = UINT32_C(1) << 31);
  REFUSED_UPDATE(INVALID, "NULL", u.arenas = NULL);
  REFUSED_UPDATE(INVALID, "NULL", u.modes = NULL);
  REFUSED_UPDATE(INVALID, "NULL", u.fn = NULL);
  REFUSED_UPDATE(INVALID, "arena_count is 0|1 to 8", u.arena_count = 0);
  REFUSED_UPDATE(INVALID, "arena_count is 9|1 to 8", u.arena_count = 9);
  REFUSED_UPDATE(INVALID, "arena_count is 4294967295|1 to 8", u.arena_count = UINT32_MAX);
  REFUSED_UPDATE(INVALID, "reserved is 1", u.reserved = 1);
  for (uint32_t i = 0; i < 3; i++) {
    REFUSED_UPDATE(INVALID, text("modes[%u] is 0|1 to 3", i), modes[i] = 0);
    REFUSED_UPDATE(INVALID, text("modes[%u] is 4|1 to 3", i), modes[i] = 4);
    REFUSED_UPDATE(INVALID, text("modes[%u] is 4294967295|1 to 3", i), modes[i] = UINT32_MAX);
  }
  REFUSED_UPDATE(INVALID, "other|params", arenas[2] = bed.other);
  REFUSED_UPDATE(INVALID, "grads|other", arenas[0] = bed.other);
  REFUSED_UPDATE(INVALID, "params is named twice", arenas[2] = bed.params);
  REFUSED_UPDATE(INVALID, "grads|read", modes[1] = WRITE);
  REFUSED_UPDATE(INVALID, "grads|read", modes[1] = BOTH);
  REFUSED_UPDATE(INVALID, text("0 + %" PRIu64 "|%" PRIu64, elements + 1, elements), u.element_count = elements + 1);
  REFUSED_UPDATE(INVALID, text("%" PRIu64 " + 1|%" PRIu64, elements, elements), u.first_element = elements;
                 u.element_count = 1);
  REFUSED_UPDATE(INVALID, text("1 + %" PRIu64, elements), u.first_element = 1; u.element_count = elements);
  REFUSED_UPDATE(INVALID, text("%" PRIu64 " + ", UINT64_MAX), u.first_element = UINT64_MAX; u.element_count = 1);
  REFUSED_UPDATE(INVALID, "1 + ", u.first_element = 1; u.element_count = UINT64_MAX);
  REFUSED_UPDATE(INVALID, " + ", u.first_element = u.element_count = UINT64_C(1) << 63);
  /* p2's bytes hold a gradient, those of p0 and p1 do not. */
  REFUSED_UPDATE(STATE, "p2", modes[0] = BOTH);
  REFUSED_UPDATE(STATE, "p2", arenas[1] = bed.master; u.arena_count = 2; modes[0] = READ; modes[1] = READ);
  REFUSED_UPDATE(STATE, "grads|params", arenas[0] = bed.master; modes[0] = BOTH; u.arena_count = 2);
  REFUSED_UPDATE(INVALID, "p2", u.element_count = elements - 1);
  gemini_tensor_info_t p2 = world_tensor_info(&bed.w, bed.p[2]);
  REFUSED_UPDATE(INVALID, "p2", u.first_element = p2.offset_bytes / 2 + 1; u.element_count = 4);
  REFUSED_UPDATE(INVALID, "p2", arenas[1] = bed.master; u.arena_count = 2; u.first_element = p2.offset_bytes / 2 + 1;
                 u.element_count = 4);
  bed_close();
}

/* ---- brackets */
static void test_brackets_out_of_order_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  char name[129];
  memset(name, 'n', 128);
  name[128] = 0;
  REFUSED(STATE, "no iteration", gemini_iteration_end, mgr);
  REFUSED(STATE, "no iteration", gemini_op_begin, mgr, "op", bed.w.stream);
  REFUSED(STATE, "no iteration", gemini_op_begin_chosen, mgr, "op", bed.w.stream);
  gemini_access_t use = world_whole(bed.o[2], READ, DEVICE), wide = world_whole(bed.o[0], READ, DEVICE), none = use;
  wide.size_bytes = 1 << 30;
  none.object.tensor = bed.dead_tensor;
  REFUSED(STATE, "no iteration", gemini_op_begin_with, mgr, "op", bed.w.stream, &use, 1);
  REFUSED(STATE, "no operator", gemini_op_end, mgr);
  REFUSED(STATE, "no iteration", gemini_hook_compacted, mgr);
  REFUSED(INVALID, "phase is 4|3", gemini_phase_set, mgr, 4);
  REFUSED(INVALID, "phase is 4294967295|3", gemini_phase_set, mgr, UINT32_MAX);
  for (int round = 0; round < 3; round++) { /* without a plan, and under one */
    CHECK_OK(gemini_iteration_begin(mgr));
    REFUSED(STATE, "open", gemini_iteration_begin, mgr);
    REFUSED(STATE, "open", gemini_iteration_begin_with, mgr, 1);
    REFUSED(STATE, "no operator", gemini_op_end, mgr);
    REFUSED(INVALID, "name is NULL", gemini_op_begin, mgr, NULL, bed.w.stream);
    REFUSED(INVALID, "name|1 to 127", gemini_op_begin, mgr, "", bed.w.stream);
    REFUSED(INVALID, "name|1 to 127", gemini_op_begin, mgr, name, bed.w.stream);
    REFUSED(INVALID, "name|1 to 127", gemini_op_begin_chosen, mgr, name, bed.w.stream);
    REFUSED(INVALID, "name|1 to 127", gemini_op_begin_with, mgr, name, bed.w.stream, &use, 1);
    REFUSED(INVALID, "size_bytes 1073741824", gemini_op_begin_with, mgr, "first", bed.w.stream, &wide, 1);
    REFUSED(HANDLE, "unregistered", gemini_op_begin_with, mgr, "first", bed.w.stream, &none, 1);
    REFUSED(STATE, "iteration is open", gemini_trace_load, mgr, "/nowhere/trace");
    CHECK_OK(gemini_op_begin(mgr, "first", bed.w.stream));
    gemini_access_t a = world_whole(bed.o[2], READ, DEVICE);
    CHECK_OK(gemini_acquire(mgr, &a, 1, bed.w.stream));
    REFUSED(STATE, "first", gemini_op_begin, mgr, "second", bed.w.stream);
    REFUSED(STATE, "first", gemini_op_begin_chosen, mgr, "second", bed.w.stream);
    REFUSED(STATE, "first", gemini_op_begin_with, mgr, "second", bed.w.stream, &use, 1);
    REFUSED(STATE, "first", gemini_iteration_end, mgr);
    REFUSED(STATE, "open", gemini_iteration_begin, mgr);
    REFUSED(STATE, "first", gemini_phase_set, mgr, GEMINI_PHASE_BACKWARD);
    REFUSED(STATE, "first", gemini_hook_compacted, mgr);
    CHECK_OK(gemini_stream_synchronize(mgr, bed.w.stream));
    CHECK_OK(gemini_op_end(mgr));
    CHECK_OK(gemini_release(mgr, &a, 1, bed.w.stream));
    CHECK_OK(gemini_stream_synchronize(mgr, bed.w.stream));
    world_stats(&bed.w); /* reads the times of what has ended */
    REFUSED(STATE, "no operator", gemini_op_end, mgr);
    CHECK_OK(gemini_iteration_end(mgr));
    REFUSED(STATE, "no iteration", gemini_iteration_end, mgr);
    CHECK_EQ(world_stats(&bed.w).iterations, round + 1);
    CHECK_EQ(world_stats(&bed.w).departures, 0);
  }
  CHECK(world_stats(&bed.w).planned_iterations > 0);
  bed_close();
}

/* ---- statistics, plan, trace, timeline */
static void test_insight_out_of_order_is_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  REFUSED(STATE, "iteration", gemini_trace_save, mgr, "/nowhere/trace"); /* none yet */
  gemini_location_t location = GEMINI_LOCATION_INIT;
  REFUSED(NOT_FOUND, "in use by no arena", gemini_locate, mgr, bed.block, &location);
  REFUSED(NOT_FOUND, "in use by no arena", gemini_locate, mgr, NULL, &location);
  REFUSED(NOT_FOUND, "in use by no arena", gemini_locate, mgr,
          (void *)(uintptr_t)world_tensor_info(&bed.x, bed.x_tensor).address, &location);
  REFUSED(STATE, "timeline", gemini_timeline_stop, mgr);
  REFUSED(INVALID, "path is empty", gemini_timeline_start, mgr, "");
  REFUSED(IO, "/nowhere/timeline", gemini_timeline_start, mgr, "/nowhere/timeline");
  CHECK_EQ(world_error().native_code, ENOENT);
  REFUSED(STATE, "timeline", gemini_timeline_stop, mgr); /* that one did not start */
  REFUSED(IO, "/nowhere/trace", gemini_trace_load, mgr, "/nowhere/trace");
  CHECK_EQ(world_error().native_code, ENOENT);
  REFUSED(IO, "/", gemini_trace_load, mgr, "/"); /* a directory */

  char path[96];
  snprintf(path, sizeof path, "%s/file", bed.w.dir);
  static const struct {
    const char *text, *says;
  } contents[] = { { "", "the file is empty" },
                   { "gemini-trace 2\nend\n", "line 1: not a trace of version 1" },
                   { "gemini-trace 1\n", "line 1: the trace ends without a line \"end\"" },
                   { "gemini-trace 1\nend\n", "line 2: the trace has no op" },
                   { "gemini-trace 1\nwords\nend\n", "line 2: not a line of a trace" },
                   { "gemini-trace 1\nbudget 65536 1\nop 9 1 0 0 x\nend\n", "line" },
                   { "gemini-trace 1\nuse 0 0 64 1\nend\n", "line 2: " },
                   { "gemini-trace 1", "line 1: a line without an end, or too long" } };
  for (size_t i = 0; i < sizeof contents / sizeof *contents; i++) {
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(contents[i].text, file) >= 0 && !fclose(file));
    REFUSED(FORMAT, text("%s|%s", path, contents[i].says), gemini_trace_load, mgr, path);
  }
  CHECK(!unlink(path));

  CHECK_OK(gemini_timeline_start(mgr, path));
  REFUSED(STATE, path, gemini_timeline_start, mgr, "/nowhere/timeline");
  REFUSED(STATE, path, gemini_timeline_start, mgr, path);
  CHECK_OK(gemini_timeline_stop(mgr));
  REFUSED(STATE, "timeline", gemini_timeline_stop, mgr);
  CHECK(!unlink(path));

  CHECK_OK(gemini_iteration_begin(mgr));
  CHECK_OK(gemini_op_begin(mgr, "op", GEMINI_STREAM_CALLER));
  CHECK_OK(gemini_op_end(mgr));
  CHECK_OK(gemini_iteration_end(mgr));
  REFUSED(IO, "/nowhere/trace", gemini_trace_save, mgr, "/nowhere/trace");
  CHECK_EQ(world_error().native_code, ENOENT);
  REFUSED(IO, "", gemini_trace_save, mgr, "");
  /* The words that fit, and always an end. */
  uint64_t length = 0;
  CHECK_OK(gemini_plan_explain(mgr, 0, NULL, &length));
  CHECK(length > 16);
  for (uint64_t size = 0; size <= 16; size++) {
    char words[20];
    memset(words, '!', sizeof words);
    uint64_t again = 0;
    CHECK_OK(gemini_plan_explain(mgr, size, words, &again));
    CHECK_EQ(again, length);
    if (size) CHECK_EQ(strlen(words), size - 1);
    CHECK(all_are((uint8_t *)words, size, sizeof words, '!'));
  }
  bed_close();
}

/* ---- budgets */
static void test_budgets_out_of_range_are_refused(void) {
  bed_open();
  const gemini_manager_t mgr = bed.w.mgr;
  const uint64_t most = UINT64_C(1) << 46;
  REFUSED(INVALID, "tier is 3|2", gemini_budget_set, mgr, GEMINI_TIER_COUNT, 8 * W);
  REFUSED(INVALID, "tier is 4294967295|2", gemini_budget_set, mgr, UINT32_MAX, 8 * W);
  for (uint32_t tier = DEVICE; tier <= FILES; tier++) {
    REFUSED(INVALID, text("%" PRIu64 "|%" PRIu64, most + 1, most), gemini_budget_set, mgr, tier, most + 1);
    REFUSED(INVALID, text("%" PRIu64 "|%" PRIu64, UINT64_MAX, most), gemini_budget_set, mgr, tier, UINT64_MAX);
  }
  REFUSED(INVALID, "0|65536", gemini_budget_set, mgr, DEVICE, 0);
  REFUSED(INVALID, "65535|65536", gemini_budget_set, mgr, DEVICE, W - 1);
  REFUSED(INVALID, "0", gemini_budget_set, mgr, HOST, 0);
  REFUSED(OOM_FILE, text("%" PRIu64 "|%" PRIu64, 4 * W, 2 * W), gemini_budget_set, mgr, FILES, 2 * W);
  /* Seven chunks that are pinned and one with allocations: none of them can leave. */
  gemini_access_t pinned[2] = { world_whole(bed.s[0], READ, DEVICE), world_whole(bed.s[1], READ, DEVICE) };
  for (int i = 0; i < 2; i++) CHECK_OK(gemini_pin(mgr, &pinned[i]));
  CHECK_EQ(world_stats(&bed.w).used_bytes[DEVICE], 8 * W);
  REFUSED(OOM_DEVICE, text("%" PRIu64 "|%" PRIu64, 7 * W, 6 * W), gemini_budget_set, mgr, DEVICE,
          6 * W); /* both named */
  REFUSED(OOM_DEVICE, "", gemini_budget_set, mgr, DEVICE, W);
  for (int i = 0; i < 2; i++) CHECK_OK(gemini_unpin(mgr, &pinned[i]));
  CHECK_OK(gemini_budget_set(mgr, DEVICE, 7 * W));
  bed_close();
}

static void test_budget_of_a_tier_that_is_not_there_is_refused(void) {
  world_t w = world_open(world_config(4, 4, 0));
  REFUSED(STATE, "file tier", gemini_budget_set, w.mgr, FILES, W);
  CHECK_OK(gemini_budget_set(w.mgr, FILES, 0));
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, NULL, 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", W);
  world_fill(&w, t, 0, W, HOST, 5);
  gemini_access_t a = world_whole(t, READ, FILES);
  REFUSED(OOM_FILE, "file_bytes is 0", gemini_move, w.mgr, &a, 1);
  CHECK_OK(gemini_hint(w.mgr, &a, 1)); /* no effect where there is none */
  CHECK(world_holds(&w, t, 0, W, 5));
  world_close(&w);
}

/* ---- before the first access */
static void test_refused_before_the_first_access_chooses_nothing(void) {
  gemini_config_t c = world_config(64, 64, 0);
  c.chunk_bytes = 0; /* searched at the first access */
  world_t w = world_open(c);
  gemini_arena_t arena = world_arena(&w, GEMINI_KIND_OTHER, 1, NULL, 0, 0);
  gemini_tensor_t t = world_tensor(&w, arena, "t", 4 * W);
  gemini_access_t bad = world_part(t, 1, 4 * W, READ, HOST), mode = world_whole(t, 0, HOST);
  double norm;
  void *ptr;
  REFUSED(INVALID, "", gemini_acquire, w.mgr, &bad, 1, GEMINI_STREAM_CALLER);
  CHECK_EQ(world_stats(&w).chunk_bytes, 0);
  REFUSED(INVALID, "", gemini_acquire, w.mgr, &mode, 1, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, "", gemini_hint, w.mgr, &bad, 1);
  REFUSED(INVALID, "", gemini_move, w.mgr, &bad, 1);
  REFUSED(INVALID, "", gemini_pin, w.mgr, &bad);
  REFUSED(INVALID, "", gemini_unpin, w.mgr, &bad);
  REFUSED(INVALID, "", gemini_zero, w.mgr, &bad);
  REFUSED(INVALID, "", gemini_load, w.mgr, &bad, 0, 0);
  REFUSED(INVALID, "", gemini_store, w.mgr, &bad, 1, 0);
  REFUSED(INVALID, "", gemini_norm, w.mgr, &bad, 0, GEMINI_STREAM_CALLER, &norm);
  REFUSED(OOM_DEVICE, "", gemini_alloc, w.mgr, 65 * W, GEMINI_STREAM_CALLER, &ptr);
  CHECK_EQ(world_stats(&w).chunk_bytes, 0);
  gemini_access_t whole = world_whole(t, READ, DEVICE);
  REFUSED(STATE, "not pinned", gemini_unpin, w.mgr, &whole);
  REFUSED(STATE, "not acquired", gemini_release, w.mgr, &whole, 1, GEMINI_STREAM_CALLER);
  REFUSED(INVALID, "live allocation", gemini_free, w.mgr, &norm, GEMINI_STREAM_CALLER);
  world_close(&w);
}

/* ---- streams of the device's own API */
static void test_streams_of_an_api_that_is_not_there_are_refused(void) {
  bed_open();
  gemini_stream_t stream;
  void *native;
  REFUSED(UNSUPPORTED, "stream", gemini_stream_adopt, bed.w.mgr, NULL, &stream);
  REFUSED(INVALID, "stream_out", gemini_stream_adopt, bed.w.mgr, NULL, NULL);
  REFUSED(HANDLE, "", gemini_stream_adopt, bed.dead_mgr, NULL, &stream);
  REFUSED(UNSUPPORTED, "stream", gemini_stream_native, bed.w.mgr, bed.w.stream, &native);
  REFUSED(INVALID, "native_out", gemini_stream_native, bed.w.mgr, bed.w.stream, NULL);
  REFUSED(INVALID, "CALLER", gemini_stream_native, bed.w.mgr, GEMINI_STREAM_CALLER, &native);
  REFUSED(HANDLE, "", gemini_stream_native, bed.w.mgr, bed.dead_stream, &native);
  bed_close();
}

/* The simulated device has no graphs: more in unit/test_graph.c. */
static void test_graphs_that_are_not_there_are_refused(void) {
  bed_open();
  gemini_graph_t graph = handle_of(UNTOUCHED);
  REFUSED(UNSUPPORTED, "graphs", gemini_graph_begin, bed.w.mgr, bed.w.stream, W, &graph);
  REFUSED(INVALID, "graph_out", gemini_graph_begin, bed.w.mgr, bed.w.stream, W, NULL);
  CHECK(handle_id(graph) == UNTOUCHED);
  void *const none[] = { bed.w.stream, bed.x.stream, bed.other, handle_of(UNTOUCHED) };
  for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
    REFUSED(HANDLE, hex(none[i]), gemini_graph_end, bed.w.mgr, none[i]);
    REFUSED(HANDLE, hex(none[i]), gemini_graph_enter, bed.w.mgr, none[i], bed.w.stream);
    REFUSED(HANDLE, hex(none[i]), gemini_graph_leave, bed.w.mgr, none[i]);
    REFUSED(HANDLE, hex(none[i]), gemini_graph_destroy, bed.w.mgr, none[i]);
  }
  REFUSED(HANDLE, "", gemini_graph_destroy, bed.w.mgr, (void *)bed.dead_mgr);
  CHECK_OK(gemini_graph_destroy(bed.w.mgr, NULL));
  bed_close();
}

/* ---- every function has been seen to refuse something */
#define TESTS(X)                                                                      \
  X(test_manager_that_is_none_is_refused_everywhere)                                  \
  X(test_manager_of_a_parent_is_refused_everywhere)                                   \
  X(test_arena_that_is_none_is_refused_everywhere)                                    \
  X(test_tensor_that_is_none_is_refused_everywhere)                                   \
  X(test_stream_that_is_none_is_refused_everywhere)                                   \
  X(test_object_that_is_none_is_refused_everywhere)                                   \
  X(test_null_arguments_are_refused)                                                  \
  X(test_input_structs_of_wrong_size_are_refused)                                     \
  X(test_longer_input_structs_are_fine_while_the_rest_is_zero)                        \
  X(test_output_structs_of_wrong_size_are_refused_and_longer_ones_are_filled_in_part) \
  X(test_error_set_takes_errors_only)                                                 \
  X(test_last_error_keeps_its_record)                                                 \
  X(test_statuses_have_words_of_their_own)                                            \
  X(test_manager_config_out_of_range_is_refused)                                      \
  X(test_manager_config_at_its_limits_is_accepted)                                    \
  X(test_manager_sixty_fifth_is_refused)                                              \
  X(test_arena_config_out_of_range_is_refused)                                        \
  X(test_arena_beyond_the_limit_is_refused)                                           \
  X(test_arena_of_a_name_that_is_taken_is_refused)                                    \
  X(test_handle_of_what_was_destroyed_stays_dead)                                     \
  X(test_take_and_register_out_of_range_are_refused)                                  \
  X(test_take_beyond_a_followers_room_is_refused)                                     \
  X(test_streams_beyond_the_limit_and_in_use_are_refused)                             \
  X(test_access_ranges_outside_their_object_are_refused)                              \
  X(test_accesses_of_wrong_size_are_refused)                                          \
  X(test_statistics_of_what_there_is_not_are_refused)                                 \
  X(test_access_modes_tiers_and_counts_out_of_range_are_refused)                      \
  X(test_acquire_of_contents_that_are_not_there_is_refused)                           \
  X(test_release_of_what_is_not_acquired_is_refused)                                  \
  X(test_release_of_more_than_was_acquired_is_refused)                                \
  X(test_release_of_a_long_batch_is_all_or_none)                                      \
  X(test_release_of_a_part_or_of_several_at_once_is_refused)                          \
  X(test_release_of_an_empty_arena_is_not_counted)                                    \
  X(test_objects_in_use_are_busy)                                                     \
  X(test_refused_in_the_middle_is_refused_whole)                                      \
  X(test_unpin_of_what_is_not_pinned_is_refused)                                      \
  X(test_alloc_and_free_out_of_range_are_refused)                                     \
  X(test_hooks_out_of_range_are_refused)                                              \
  X(test_host_blocks_out_of_range_are_refused)                                        \
  X(test_checkpoints_of_a_manager_that_keeps_nothing_are_refused)                     \
  X(test_communicators_that_do_not_fit_are_refused)                                   \
  X(test_groups_that_are_not_there_are_refused)                                       \
  X(test_a_pinned_sharded_arena_is_not_destroyed)                                     \
  X(test_what_sharded_arenas_cannot_do_is_refused)                                    \
  X(test_what_sums_of_gradients_cannot_do_is_refused)                                 \
  X(test_topology_of_nothing_is_refused)                                              \
  X(test_load_and_store_with_wrong_files_are_refused)                                 \
  X(test_norm_of_wrong_types_is_refused)                                              \
  X(test_updates_out_of_range_are_refused)                                            \
  X(test_brackets_out_of_order_are_refused)                                           \
  X(test_insight_out_of_order_is_refused)                                             \
  X(test_budgets_out_of_range_are_refused)                                            \
  X(test_budget_of_a_tier_that_is_not_there_is_refused)                               \
  X(test_refused_before_the_first_access_chooses_nothing)                             \
  X(test_streams_of_an_api_that_is_not_there_are_refused)                             \
  X(test_graphs_that_are_not_there_are_refused)

#define CALL(test) test();
#define COUNT(test) +1
enum { TEST_COUNT = 0 TESTS(COUNT) };

static void test_all_public_functions_are_covered(void) {
  if (check_run.run_count < TEST_COUNT) { /* it was chosen alone: what the others see is seen now */
    TESTS(CALL)
  }
  char path[512];
  const char *slash = strrchr(__FILE__, '/');
  snprintf(path, sizeof path, "%.*s../abi/symbols.txt", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__);
  FILE *file = fopen(path, "r");
  if (!file) fprintf(stderr, "cannot open %s\n", path);
  CHECK(file);
  char line[256], name[128];
  int listed = 0, missing = 0;
  while (fgets(line, sizeof line, file)) {
    if (line[0] == '#' || sscanf(line, "%127s", name) != 1) continue;
    listed++;
    bool found = false;
    for (int i = 0; i < covered_count && !found; i++) found = !strcmp(covered[i], name);
    if (!found) fprintf(stderr, "no misuse of %s is tested\n", name);
    missing += !found;
  }
  CHECK(!fclose(file));
  CHECK(listed > 0 && !missing);
  CHECK_EQ(covered_count, listed); /* none that is not in the list */
}

#define RUN_IT(test) RUN(test);
int main(void) {
  TESTS(RUN_IT)
  RUN(test_all_public_functions_are_covered);
  return check_done();
}
