/* A caller that was built with another version's headers. SPDX-License-Identifier: Apache-2.0
 *
 * Compiled against the frozen headers of version 1 (frozen/), and against headers in which each sized struct has one
 * field more (grow.sh); run with today's library, and with one that is built with the grown headers. It uses each
 * struct and each call. Every struct that it hands over ends at the end of a page, behind which there is nothing to be
 * read or written.
 *
 * CALLER_GROWN, LIBRARY_GROWN: 1 where the headers, or the library, are the grown ones. */
#include <math.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../src/base/abi.h"
#include "../check.h"
#if CALLER_GROWN /* what has come since the headers were frozen */
#include "gemini/address.h"
#include "gemini/chosen.h"
#include "gemini/plan.h"
#endif
#include "gemini/graph.h"
#include "gemini/hook.h"
#include "gemini/topology.h"
#include "gemini_update.h"

enum { W = 65536, AHEAD = CALLER_GROWN && !LIBRARY_GROWN, DEVICE = 0, HOST = 1, FILES = 2 };

/* Version 1's sizes, once more: a constant that changes breaks the callers that exist. */
#define V1(type, constant, bytes)                                                  \
  _Static_assert(constant == bytes, "version 1's size of " #type " has changed");  \
  _Static_assert(CALLER_GROWN || sizeof(type) == bytes, "frozen headers: " #type); \
  _Static_assert(!CALLER_GROWN || sizeof(type) >= bytes + 8, "grown headers: " #type)
V1(gemini_error_info_t, GMI_V1_ERROR_INFO, 520);
V1(gemini_config_t, GMI_V1_CONFIG, 152);
V1(gemini_arena_config_t, GMI_V1_ARENA_CONFIG, 48);
V1(gemini_arena_info_t, GMI_V1_ARENA_INFO, 48);
V1(gemini_tensor_info_t, GMI_V1_TENSOR_INFO, 176);
V1(gemini_access_t, GMI_V1_ACCESS, 48);
V1(gemini_update_span_t, GMI_V1_UPDATE_SPAN, 104);
V1(gemini_update_t, GMI_V1_UPDATE, 72);
#if CALLER_GROWN
V1(gemini_location_t, GMI_V1_LOCATION, 40);
V1(gemini_forecast_t, GMI_V1_FORECAST, 184);
#endif
V1(gemini_topology_object_t, GMI_V1_TOPOLOGY_OBJECT, 176);
V1(gemini_stats_t, GMI_V1_STATS, 152);
V1(gemini_tier_stats_t, GMI_V1_TIER_STATS, 32);
V1(gemini_link_stats_t, GMI_V1_LINK_STATS, 48);
V1(gemini_adamw_t, GMI_V1_ADAMW, 72);
V1(gemini_sgd_t, GMI_V1_SGD, 64);
V1(gemini_update_walk_t, GMI_V1_UPDATE_WALK, 552);
#if CALLER_GROWN
V1(gemini_update_arenas_t, GMI_V1_UPDATE_ARENAS, 72);
#endif

/* ---- structs that end at the end of a page */
static void *edge(size_t size) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (size + page - 1) / page * page;
  char *at = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(at != MAP_FAILED && !mprotect(at + room, page, PROT_NONE));
  return at + room - size; /* left to the end of the program */
}
static void *at_edge(const void *from, size_t size) { return memcpy(edge(size), from, size); }
#define INPUT(type, init) ((type *)at_edge(&(type)init, sizeof(type)))

static void *output_of(uint32_t size) {
  void *out = memset(edge(size), 0xa5, size);
  return memcpy(out, &size, sizeof size);
}
#define OUTPUT(type) ((type *)output_of(sizeof(type)))
/* Is as much of it filled as both know? */
static void filled(const void *out, size_t size, const char *type) {
  const unsigned char *bytes = out;
  uint32_t have;
  memcpy(&have, out, sizeof have);
  const size_t known = size - 8 * AHEAD;
  if (have != known) fprintf(stderr, "%s: struct_size is %u, expected %zu of %zu\n", type, have, known, size);
  CHECK_EQ(have, known);
  for (size_t i = known; i < size; i++) CHECK_EQ(bytes[i], 0xa5);
  if (CALLER_GROWN && LIBRARY_GROWN)
    for (size_t i = size - 8; i < size; i++) CHECK_EQ(bytes[i], 0);
}
#define FILLED(out, type) filled(out, sizeof(type), #type)

static const char *message(void) {
  static gemini_error_info_t info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_EQ(gemini_last_error(&info), GEMINI_OK);
  return info.message;
}
static void ok(gemini_status_t status, int line) {
  if (!status) return;
  fprintf(stderr, "%s:%d: status %d: %s\n", __FILE__, line, status, message());
  exit(1);
}
#define OK(call) ok(call, __LINE__)

/* ---- a new field that is set, for a library that does not know it: the error names struct, size and limit */
#if CALLER_GROWN
static void refused(gemini_status_t status, const char *name, size_t size, int line) {
  char says[128];
  snprintf(says, sizeof says, "%s: byte %zu of %zu is not 0", name, size - 8, size);
  if (status != GEMINI_ERR_INVALID || !strstr(message(), says) || !strstr(message(), GEMINI_VERSION_STRING)) {
    fprintf(stderr, "%s:%d: status %d, message '%s', expected '%s'\n", __FILE__, line, status, message(), says);
    exit(1);
  }
}
#define NEW_FIELD(record, name, call)                \
  do {                                               \
    if (LIBRARY_GROWN) break;                        \
    (record)->grown = 1;                             \
    refused(call, name, sizeof *(record), __LINE__); \
    (record)->grown = 0;                             \
  } while (0)
#else
#define NEW_FIELD(record, name, call) (void)0
#endif

/* ---- the scene */
static gemini_manager_t mgr;
static gemini_stream_t stream;
static gemini_arena_t arena, like;
static gemini_tensor_t tensors[4];
static char dir[] = "/tmp/caller.XXXXXX";

static void nothing(void *user) { ++*(int *)user; }
static void log_nothing(void *user, int32_t level, const char *text) { (void)user, (void)level, (void)text; }

static void open_all(void) {
  CHECK(mkdtemp(dir));
  gemini_config_t *c = INPUT(gemini_config_t, GEMINI_CONFIG_INIT);
  c->device_bytes = 6 * W;
  c->host_bytes = 64 * W;
  c->file_bytes = 64 * W;
  c->chunk_bytes = W;
  c->file_dir = dir;
  c->checkpoint_name = "kept";
  c->update_threads = 1;
  c->log_fn = log_nothing;
  NEW_FIELD(c, "config", gemini_manager_open(c, &mgr));
  c->struct_size = sizeof *c - 8 - 8 * CALLER_GROWN - (CALLER_GROWN ? sizeof *c - 8 - GMI_V1_CONFIG : 0);
  CHECK_EQ(gemini_manager_open(c, &mgr), GEMINI_ERR_INVALID); /* less than version 1 */
  CHECK_SAYS(message(), "config: struct_size is 144, must be 152 to 4096");
  c->struct_size = sizeof *c;
  OK(gemini_manager_open(c, &mgr));
  OK(gemini_stream_create(mgr, &stream));
  void *native;
  gemini_stream_t adopted;
  CHECK_EQ(gemini_stream_native(mgr, stream, &native), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(gemini_stream_adopt(mgr, NULL, &adopted), GEMINI_ERR_UNSUPPORTED);
  int calls = 0;
  OK(gemini_stream_call(mgr, stream, nothing, &calls));
  OK(gemini_stream_synchronize(mgr, stream));
  CHECK_EQ(calls, 1);
  OK(gemini_budget_set(mgr, HOST, 60 * W));
  CHECK(*gemini_version() && *gemini_status_string(GEMINI_OK));
}

static void register_all(void) {
  gemini_arena_config_t *c = INPUT(gemini_arena_config_t, GEMINI_ARENA_CONFIG_INIT);
  c->kind = GEMINI_KIND_MASTER;
  c->element_bytes = 4;
  c->capacity_bytes = 16 * W;
  c->name = "masters";
  NEW_FIELD(c, "config", gemini_arena_create(mgr, c, &arena));
  OK(gemini_arena_create(mgr, c, &arena));
  c->kind = GEMINI_KIND_GRAD;
  c->name = "gradients";
  c->like = arena;
  OK(gemini_arena_create(mgr, c, &like));
  for (int i = 0; i < 4; i++) {
    char name[8];
    snprintf(name, sizeof name, "t%d", i);
    OK(gemini_tensor_register(mgr, arena, name, W, GEMINI_OFFSET_NEXT, &tensors[i]));
  }
  uint64_t offset;
  OK(gemini_arena_take(mgr, arena, W, &offset));
  CHECK_EQ(offset, 4 * W);
  gemini_tensor_t found, other;
  OK(gemini_tensor_register(mgr, arena, "gone", W, offset, &other));
  OK(gemini_tensor_find(mgr, "gone", &found));
  CHECK_EQ(found, other);
  OK(gemini_tensor_unregister(mgr, other));
#if CALLER_GROWN
  void *taken;
  OK(gemini_arena_take_pointer(mgr, arena, W, &taken));
  gemini_location_t *at = OUTPUT(gemini_location_t);
  OK(gemini_locate(mgr, (char *)taken + 100, at));
  FILLED(at, gemini_location_t);
  char text[256];
  uint64_t length;
  OK(gemini_explain_address(mgr, taken, sizeof text, text, &length));
  CHECK_SAYS(text, "arena: masters, offset 327680 of the 393216 bytes that are used\n");
  CHECK(at->arena == arena && !at->tensor && at->arena_offset_bytes == 5 * W + 100);
#endif
  OK(gemini_tensor_counterpart(mgr, tensors[0], like, &other));
  gemini_tensor_info_t *t = OUTPUT(gemini_tensor_info_t);
  OK(gemini_tensor_info(mgr, other, t));
  FILLED(t, gemini_tensor_info_t);
  CHECK(t->size_bytes == W && t->arena == like && !strcmp(t->name, "t0") && !t->users);
  gemini_arena_info_t *a = OUTPUT(gemini_arena_info_t);
  OK(gemini_arena_info(mgr, arena, a));
  FILLED(a, gemini_arena_info_t);
  CHECK(a->kind == GEMINI_KIND_MASTER && a->size_bytes == (5 + CALLER_GROWN) * W && a->tensor_count == 4);
}

/* ---- accesses, alone and in arrays, whose stride is the caller's */
static uint64_t tier_bytes(uint32_t tier) {
  gemini_access_t range = gemini_arena_access(arena, 0, 4 * W, 0, tier), *at = at_edge(&range, sizeof range);
  uint64_t bytes;
  NEW_FIELD(at, "range", gemini_tier_bytes(mgr, at, &bytes));
  OK(gemini_tier_bytes(mgr, at, &bytes));
  return bytes;
}

static void batches_of(uint64_t count, uint32_t tier) {
  char last_name[32];
  snprintf(last_name, sizeof last_name, "accesses[%d]", (int)count - 1);
  gemini_access_t *all = edge(count * sizeof *all);
  const uint64_t part = 4 * W / count / 4 * 4;
  for (uint64_t i = 0; i < count; i++) {
    gemini_access_t one = gemini_arena_access(arena, i * part, part, GEMINI_WRITE, tier);
    all[i] = one;
  }
  gemini_access_t *last = &all[count - 1];
  NEW_FIELD(last, last_name, gemini_acquire(mgr, all, count, stream));
  OK(gemini_acquire(mgr, all, count, stream));
  OK(gemini_stream_synchronize(mgr, stream));
  for (uint64_t i = 0; i < count; i++) {
    CHECK_EQ((char *)all[i].ptr - (char *)all[0].ptr, i * part); /* one range behind another on both tiers */
    memset(all[i].ptr, (int)(i % 251 + 1), part);
  }
  last->struct_size += 8;
  CHECK_EQ(gemini_release(mgr, all, count, stream), GEMINI_ERR_INVALID);
  char says[128];
  snprintf(says, sizeof says, "accesses[%d]: struct_size is %zu, that of accesses[0] is %zu", (int)count - 1,
           sizeof *all + 8, sizeof *all);
  CHECK_SAYS(message(), says);
  last->struct_size -= 8;
  NEW_FIELD(last, last_name, gemini_release(mgr, all, count, stream));
  OK(gemini_release(mgr, all, count, stream));
  for (uint64_t i = 0; i < count; i++) all[i].mode = GEMINI_READ;
  OK(gemini_acquire(mgr, all, count, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < count; i++) CHECK_EQ(((unsigned char *)all[i].ptr)[part - 1], i % 251 + 1);
  OK(gemini_release(mgr, all, count, GEMINI_STREAM_CALLER));
  for (uint64_t i = 0; i < count; i++) all[i].tier = i % 2 ? DEVICE : HOST;
  NEW_FIELD(last, last_name, gemini_hint(mgr, all, count));
  OK(gemini_hint(mgr, all, count));
  for (uint64_t i = 0; i < count; i++) all[i].tier = FILES;
  NEW_FIELD(last, last_name, gemini_move(mgr, all, count));
  OK(gemini_move(mgr, all, count));
  CHECK(tier_bytes(FILES) == 4 * W && !tier_bytes(DEVICE) && !tier_bytes(HOST));
}

static void use_accesses(void) {
  batches_of(2, DEVICE);
  batches_of(4, HOST);
  batches_of(64, HOST); /* more than a small batch */
  batches_of(64, DEVICE);
  gemini_access_t one = gemini_tensor_access(tensors[1], 0, 0, GEMINI_READ_WRITE, DEVICE),
                  *a = at_edge(&one, sizeof one);
  FILE *file = tmpfile();
  CHECK(file);
  double norm;
  NEW_FIELD(a, "access", gemini_pin(mgr, a));
  NEW_FIELD(a, "access", gemini_unpin(mgr, a));
  NEW_FIELD(a, "access", gemini_zero(mgr, a));
  NEW_FIELD(a, "access", gemini_load(mgr, a, fileno(file), 0));
  NEW_FIELD(a, "access", gemini_store(mgr, a, fileno(file), 0));
  NEW_FIELD(a, "access", gemini_norm(mgr, a, GEMINI_DTYPE_F32, stream, &norm));
  OK(gemini_pin(mgr, a));
  CHECK_EQ(tier_bytes(DEVICE), W);
  OK(gemini_unpin(mgr, a));
  OK(gemini_store(mgr, a, fileno(file), 0));
  OK(gemini_zero(mgr, a));
  OK(gemini_norm(mgr, a, GEMINI_DTYPE_F32, stream, &norm));
  CHECK(norm == 0);
  OK(gemini_load(mgr, a, fileno(file), 0));
  OK(gemini_norm(mgr, a, GEMINI_DTYPE_F32, GEMINI_STREAM_CALLER, &norm));
  CHECK(norm > 0);
  CHECK(!fclose(file));
#if CALLER_GROWN
  gemini_tensor_info_t *t = OUTPUT(gemini_tensor_info_t);
  OK(gemini_tensor_info(mgr, tensors[1], t));
  one = gemini_address_access((void *)(uintptr_t)t->address, W, GEMINI_READ, HOST), a = at_edge(&one, sizeof one);
  NEW_FIELD(a, "accesses[0]", gemini_acquire(mgr, a, 1, GEMINI_STREAM_CALLER));
  OK(gemini_acquire(mgr, a, 1, GEMINI_STREAM_CALLER));
  OK(gemini_release(mgr, a, 1, GEMINI_STREAM_CALLER));
  const int32_t rows[] = { 9, 3, 4 };
  gemini_access_t *each = edge(2 * sizeof *each);
  uint64_t count;
  NEW_FIELD(a, "table", gemini_row_accesses(a, 64, 4, 3, rows, 2, each, &count));
  OK(gemini_row_accesses(a, 64, 4, 3, rows, 2, each, &count));
  CHECK(count == 2 && each[1].struct_size == sizeof *each && each[1].offset_bytes == t->address + 9 * 64);
  OK(gemini_acquire(mgr, each, 2, GEMINI_STREAM_CALLER));
  OK(gemini_release(mgr, each, 2, GEMINI_STREAM_CALLER));
#endif
  OK(gemini_tensor_state_set(mgr, tensors[1], GEMINI_STATE_FREE));
  CHECK_EQ(tier_bytes(FILES) + tier_bytes(HOST) + tier_bytes(DEVICE), 3 * W);
}

/* ---- iterations, memory, graphs, frameworks */
static void use_brackets(void) {
  gemini_access_t one = gemini_tensor_access(tensors[0], 0, 0, GEMINI_READ, DEVICE), *a = at_edge(&one, sizeof one);
  for (int i = 0; i < 3; i++) {
    OK(gemini_iteration_begin(mgr));
    OK(gemini_phase_set(mgr, GEMINI_PHASE_FORWARD));
    OK(gemini_op_begin(mgr, "op", stream));
    OK(gemini_acquire(mgr, a, 1, stream));
    OK(gemini_release(mgr, a, 1, stream));
    OK(gemini_op_end(mgr));
#if CALLER_GROWN
    NEW_FIELD(a, "accesses[0]", gemini_op_begin_with(mgr, "another op", stream, a, 1));
    a->ptr = NULL;
    OK(gemini_op_begin_with(mgr, "another op", stream, a, 1));
    CHECK(a->ptr);
    OK(gemini_op_end(mgr));
    OK(gemini_op_begin_chosen(mgr, "a third one", stream));
    NEW_FIELD(a, "accesses[0]", gemini_priority_set(mgr, a, 1, 1));
    OK(gemini_priority_set(mgr, a, 1, 1));
    OK(gemini_op_end(mgr));
#endif
    OK(gemini_iteration_end(mgr));
  }
  void *ptr;
  OK(gemini_alloc(mgr, 1000, stream, &ptr));
  OK(gemini_free(mgr, ptr, stream));
  OK(gemini_host_alloc(mgr, 1000, 64, &ptr));
  OK(gemini_host_free(mgr, ptr));
  gemini_graph_t graph = 0;
  CHECK_EQ(gemini_graph_begin(mgr, stream, 2 * W, &graph), GEMINI_ERR_UNSUPPORTED);
  CHECK_EQ(gemini_graph_end(mgr, graph), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_graph_enter(mgr, graph, stream), GEMINI_ERR_HANDLE);
  CHECK_EQ(gemini_graph_leave(mgr, graph), GEMINI_ERR_HANDLE);
  OK(gemini_graph_destroy(mgr, graph));
  OK(gemini_hook_set(mgr, 0));
  gemini_torch_free(gemini_torch_malloc(100, 0, NULL), 100, 0, NULL);
  gemini_cupy_free(NULL, gemini_cupy_malloc(NULL, 100, 0), 0);
  CHECK_EQ(gemini_hook_forget(mgr, NULL), GEMINI_ERR_NOT_FOUND);
  OK(gemini_hook_clear(mgr));
}

/* ---- updates */
static int spans;
static void on_span(void *user, const gemini_update_span_t *span) {
  const size_t size = sizeof *span - 8 * AHEAD;
  CHECK(span->struct_size >= size);
  CHECK(span->arena_count == 2 && span->element_count && span->ptr[0] && !(&span->arena_count)[1]);
  spans += *(int *)user;
}
static gemini_status_t no_native(gemini_manager_t m, gemini_stream_t s, void **native_out) {
  (void)m, (void)s, (void)native_out;
  return GEMINI_ERR_UNSUPPORTED;
}
static gemini_status_t call_now(gemini_manager_t m, gemini_stream_t s, gemini_call_fn fn, void *user) {
  (void)m, (void)s;
  fn(user);
  return GEMINI_OK;
}

#if CALLER_GROWN
static gemini_status_t on_copy(void *user, const gemini_update_span_t *span) {
  on_span(user, span);
  return GEMINI_OK;
}
#endif

static void use_updates(void) {
  const uint32_t modes[] = { GEMINI_READ_WRITE, GEMINI_READ };
  const gemini_arena_t arenas[] = { arena, like };
  int one = 1;
  gemini_update_t *u = INPUT(gemini_update_t, GEMINI_UPDATE_INIT);
  u->arenas = arenas;
  u->modes = modes;
  u->arena_count = 2;
  u->fn = on_span;
  u->user = &one;
  NEW_FIELD(u, "update", gemini_update(mgr, u));
  OK(gemini_update(mgr, u));
  OK(gemini_update_wait(mgr));
  CHECK(spans > 0);

#if CALLER_GROWN
  /* Fields and calls that have come since the headers were frozen. */
  u->fn = NULL, u->try_fn = on_copy;
  u->user_bytes = sizeof one;
  OK(gemini_update(mgr, u));
  OK(gemini_update_wait(mgr));
  u->fn = on_span, u->try_fn = NULL;
  u->user_bytes = 0;
  gemini_update_arenas_t *whole = INPUT(gemini_update_arenas_t, GEMINI_UPDATE_ARENAS_INIT);
  whole->master = arena, whole->grad = like, whole->momentum = whole->variance = NULL;
  gemini_sgd_t *sgd = INPUT(gemini_sgd_t, GEMINI_SGD_INIT);
  sgd->grad_dtype = GEMINI_DTYPE_F32;
  gemini_adamw_t *adamw = INPUT(gemini_adamw_t, GEMINI_ADAMW_INIT);
  OK(gemini_sgd_arenas(mgr, sgd, whole));
  CHECK_EQ(gemini_adamw_arenas(mgr, adamw, whole), GEMINI_ERR_INVALID);
  CHECK_SAYS(message(), "momentum is NULL");
  NEW_FIELD(whole, "arenas", gemini_sgd_arenas(mgr, sgd, whole));
  NEW_FIELD(sgd, "sgd", gemini_sgd_arenas(mgr, sgd, whole));
#endif

  /* A table of rules, whose stride is the caller's. */
  gemini_sgd_t *sgds = edge(2 * sizeof *sgds);
  for (int i = 0; i < 2; i++) {
    sgds[i] = (gemini_sgd_t)GEMINI_SGD_INIT;
    sgds[i].grad_dtype = GEMINI_DTYPE_F32;
    sgds[i].lr = i ? 0.5 : 0.25;
  }
  gemini_access_t all[2] = { gemini_arena_access(arena, 0, 2 * W, GEMINI_WRITE, HOST),
                             gemini_arena_access(like, 0, 2 * W, GEMINI_WRITE, HOST) };
  OK(gemini_acquire(mgr, all, 2, GEMINI_STREAM_CALLER));
  for (int i = 0; i < 2 * W / 4; i++) ((float *)all[0].ptr)[i] = 1, ((float *)all[1].ptr)[i] = 1;
  OK(gemini_release(mgr, all, 2, GEMINI_STREAM_CALLER));
  const gemini_update_range_t ranges[] = { { W / 4, 0 }, { 2 * W / 4, 1 } };
  gemini_update_walk_t *walk = INPUT(gemini_update_walk_t, GEMINI_UPDATE_WALK_INIT);
  walk->sgds = sgds;
  walk->rule_count = 2;
  walk->ranges = ranges;
  walk->range_count = 2;
  walk->param_index = walk->momentum_index = GEMINI_INDEX_NONE;
  walk->master_index = 0;
  walk->grad_index = 1;
  walk->mgr = mgr;
  walk->stream_native = gemini_stream_native;
  walk->stream_call = gemini_stream_call;
  u->fn = gemini_update_walk;
  u->user = walk;
  u->element_count = 2 * W / 4;
  NEW_FIELD(walk, "walk", gemini_update_walk_check(u));
  NEW_FIELD(u, "update", gemini_update_walk_check(u));
  NEW_FIELD(&sgds[1], "sgds[1]: sgd", gemini_update_walk_check(u));
  sgds[1].struct_size += 8;
  CHECK_EQ(gemini_update_walk_check(u), GEMINI_ERR_INVALID);
  CHECK_SAYS(message(), "sgds[1]: struct_size is");
  sgds[1].struct_size -= 8;
  OK(gemini_update_walk_check(u));
  OK(gemini_update(mgr, u));
  OK(gemini_update_wait(mgr));
  OK(gemini_update_walk_status(walk));
  all[0].mode = GEMINI_READ;
  OK(gemini_acquire(mgr, all, 1, GEMINI_STREAM_CALLER));
  CHECK(((float *)all[0].ptr)[0] == 0.75f && ((float *)all[0].ptr)[W / 4] == 0.5f);
  OK(gemini_release(mgr, all, 1, GEMINI_STREAM_CALLER));

  /* A span of another version's library, which waits for its turn on a stream. */
  float master[8] = { 1, 1, 1, 1, 1, 1, 1, 1 }, gradient[8] = { 1, 1, 1, 1, 1, 1, 1, 1 };
  gemini_update_span_t *span = edge(sizeof *span);
  memset(span, 0, sizeof *span);
  span->struct_size = sizeof *span;
  span->tier = GEMINI_TIER_DEVICE;
  span->element_count = 8;
  span->stream = stream;
  span->arena_count = 2;
  span->ptr[0] = master;
  span->ptr[1] = gradient;
  walk->stream_native = no_native;
  walk->stream_call = call_now;
  gemini_update_walk(walk, span);
  OK(gemini_update_walk_status(walk));
  CHECK(master[0] == 0.75f && master[7] == 0.75f);
}

static void use_fused(void) {
  float master[2] = { 1, 1 }, gradient[2] = { 1, 1 }, momentum[2] = { 0 }, variance[2] = { 0 };
  gemini_adamw_t *adamw = INPUT(gemini_adamw_t, GEMINI_ADAMW_INIT);
  adamw->grad_dtype = GEMINI_DTYPE_F32;
  NEW_FIELD(adamw, "adamw", gemini_adamw_host(adamw, 2, NULL, gradient, master, momentum, variance, NULL));
  OK(gemini_adamw_host(adamw, 2, NULL, gradient, master, momentum, variance, NULL));
  CHECK(fabsf(master[0] - (1 - 1e-3f - 1e-5f)) < 1e-6f);
  gemini_sgd_t *sgd = INPUT(gemini_sgd_t, GEMINI_SGD_INIT);
  sgd->grad_dtype = GEMINI_DTYPE_F32;
  sgd->lr = 0.5;
  master[1] = 1;
  NEW_FIELD(sgd, "sgd", gemini_sgd_host(sgd, 2, NULL, gradient, master, NULL, NULL));
  OK(gemini_sgd_host(sgd, 2, NULL, gradient, master, NULL, NULL));
  CHECK(master[1] == 0.5f);
  /* Without a driver, or of no elements: nothing is changed. */
  NEW_FIELD(adamw, "adamw", gemini_adamw_cuda(adamw, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL));
  NEW_FIELD(sgd, "sgd", gemini_sgd_cuda(sgd, 0, NULL, NULL, NULL, NULL, NULL, NULL));
  CHECK_EQ(gemini_adamw_cuda(adamw, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL) == GEMINI_ERR_INVALID, 0);
  CHECK_EQ(gemini_sgd_cuda(sgd, 0, NULL, NULL, NULL, NULL, NULL, NULL) == GEMINI_ERR_INVALID, 0);
  CHECK(gemini_update_sums(1000) >= 1 && *gemini_update_isa());
  OK(gemini_update_force_isa("plain"));
  OK(gemini_update_force_isa(NULL));
}

/* ---- statistics */
static void use_statistics(void) {
  gemini_stats_t *s = OUTPUT(gemini_stats_t);
  OK(gemini_stats(mgr, s));
  FILLED(s, gemini_stats_t);
  CHECK(s->chunk_bytes == W && s->iterations == 3 && s->model_bytes == (10 + 2 * CALLER_GROWN) * W &&
        !s->host_alloc_bytes);
  for (uint32_t tier = 0; tier < 3; tier++) {
    gemini_tier_stats_t *t = OUTPUT(gemini_tier_stats_t);
    OK(gemini_tier_stats(mgr, tier, t));
    FILLED(t, gemini_tier_stats_t);
    CHECK(t->tier == tier && t->used_bytes <= t->peak_bytes && t->peak_bytes <= t->budget_bytes);
    CHECK_EQ(t->budget_bytes, (tier == DEVICE ? 6 : tier == HOST ? 60 : 64) * W);
  }
  uint32_t links, ends = 0;
  OK(gemini_link_count(mgr, &links));
  for (uint32_t link = 0; link < links; link++) {
    uint64_t bytes = 0, chunks = 0;
    gemini_link_stats_t *l;
    for (uint32_t reason = 0; reason < GEMINI_REASON_COUNT; reason++) {
      l = OUTPUT(gemini_link_stats_t);
      OK(gemini_link_stats(mgr, link, reason, l));
      CHECK_EQ(l->reason, reason);
      bytes += l->moved_bytes;
      chunks += l->moved_chunks;
    }
    l = OUTPUT(gemini_link_stats_t);
    OK(gemini_link_stats(mgr, link, GEMINI_REASON_ALL, l));
    FILLED(l, gemini_link_stats_t);
    CHECK(l->moved_bytes >= bytes && l->moved_chunks >= chunks && l->moved_bytes == l->moved_chunks * W);
    CHECK(l->moved_chunks > 0 && l->bw_bytes_per_s > 0 && !l->from_ordinal && !l->to_ordinal);
    ends |= 1u << (l->from_tier * 3 + l->to_tier);
  }
  CHECK_EQ(ends, 1u << 3 | 1u << 1 | 1u << 5 | 1u << 7); /* each of the four there are */
  OK(gemini_stats_reset(mgr));
  char text[4096], path[64];
  uint64_t length;
  OK(gemini_manager_dump(mgr, sizeof text, text, &length));
#if CALLER_GROWN
  OK(gemini_stats_text(mgr, sizeof text, text, &length));
  CHECK_SAYS(text, "\niterations: 3\n");
#endif
  OK(gemini_plan_explain(mgr, sizeof text, text, &length));
  snprintf(path, sizeof path, "%s/trace", dir);
  OK(gemini_trace_save(mgr, path));
  OK(gemini_trace_load(mgr, path));
#if CALLER_GROWN
  gemini_config_t config = GEMINI_CONFIG_INIT;
  gemini_forecast_t *forecast = OUTPUT(gemini_forecast_t);
  config.device_bytes = config.host_bytes = 1 << 30;
  OK(gemini_plan_forecast(&config, path, forecast, sizeof text, text, &length));
  FILLED(forecast, gemini_forecast_t);
#endif
  CHECK(!unlink(path));
  OK(gemini_timeline_start(mgr, path));
  OK(gemini_timeline_stop(mgr));
  CHECK(!unlink(path));
}

/* ---- errors and the topology */
static void use_errors(void) {
  gemini_error_info_t *e = INPUT(gemini_error_info_t, GEMINI_ERROR_INFO_INIT);
  e->status = GEMINI_ERR_IO;
  e->native_code = 5;
  memset(e->message, 'm', sizeof e->message); /* the last field of version 1, to its last byte */
  NEW_FIELD(e, "info", gemini_error_set(e));
  OK(gemini_error_set(e));
  gemini_error_info_t *out = OUTPUT(gemini_error_info_t);
  OK(gemini_last_error(out));
  FILLED(out, gemini_error_info_t);
  CHECK(out->status == GEMINI_ERR_IO && out->native_code == 5 && strspn(out->message, "m") == 439);
#if CALLER_GROWN
  CHECK_SAYS(gemini_error_text(), "input/output error: mmm");
#endif
  e->struct_size = GMI_V1_ERROR_INFO - 8;
  CHECK_EQ(gemini_last_error(e), GEMINI_ERR_INVALID);
}

static void use_topology(void) {
  gemini_topology_t topology;
  gemini_status_t status = gemini_topology_open(NULL, &topology);
  if (status == GEMINI_ERR_UNSUPPORTED) return;
  OK(status);
  uint32_t count, distance, nearest, disks[64], node;
  OK(gemini_topology_count(topology, GEMINI_OBJECT_NODE, &count));
  for (uint32_t i = 0; i < count; i++) {
    gemini_topology_object_t *o = OUTPUT(gemini_topology_object_t);
    OK(gemini_topology_object(topology, GEMINI_OBJECT_NODE, i, o));
    FILLED(o, gemini_topology_object_t);
    CHECK(o->kind == GEMINI_OBJECT_NODE && *o->name && o->node == i);
  }
  if (count) OK(gemini_topology_distance(topology, 0, 0, 0, 0, &distance));
  if (count) OK(gemini_topology_nearest(topology, 0, 0, 0, &nearest));
  status = gemini_topology_directory(topology, "/tmp", 64, disks, &count, &node);
  CHECK(!status || status == GEMINI_ERR_NOT_FOUND);
  OK(gemini_topology_close(topology));
}

static void close_all(void) {
  OK(gemini_checkpoint(mgr));
  CHECK_EQ(gemini_resume(mgr), GEMINI_ERR_STATE);
  OK(gemini_arena_destroy(mgr, like));
  OK(gemini_stream_destroy(mgr, stream));
  OK(gemini_manager_close(mgr));
  char command[64];
  snprintf(command, sizeof command, "rm -r %s", dir);
  CHECK(!system(command));
}

int main(void) {
  open_all();
  register_all();
  use_accesses();
  use_brackets();
  use_updates();
  use_fused();
  use_statistics();
  use_errors();
  use_topology();
  close_all();
  return 0;
}
