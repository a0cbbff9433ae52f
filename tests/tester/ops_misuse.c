/* Destroyed handles and wrong arguments. SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "tester.h"

static void nothing(void *user) { (void)user; }
static void no_span(void *user, const gemini_update_span_t *span) {
  (void)user;
  (void)span;
}

/* ---- dead: which handle, which call */
enum { DEAD_CALLS = 21 };
void run_dead(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  uint32_t count = a->gone_count < GONE ? a->gone_count : GONE;
  if (!m->open || !count) return;
  void *dead = a->gone[op->arg[0] % count];
  int tensor = -1;
  for (int i = 0; i < TENSORS && tensor < 0; i++)
    if (p->tensors[i].live) tensor = i;
  gemini_tensor_t live = tensor < 0 ? NULL : p->tensors[tensor].handle;
  gemini_access_t access = ACCESS(dead, 0, 0, GEMINI_READ, op->arg[1] & 1);
  gemini_access_t two[2] = { ACCESS(live, 0, 0, GEMINI_READ, 0), access };
  gemini_tensor_info_t tensor_info = GEMINI_TENSOR_INFO_INIT;
  gemini_arena_info_t arena_info = GEMINI_ARENA_INFO_INIT;
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  gemini_update_t update = GEMINI_UPDATE_INIT;
  gemini_stats_t stats = GEMINI_STATS_INIT;
  uint32_t mode = GEMINI_READ_WRITE;
  any_handle_t out = { 0 };
  void *ptr = NULL;
  double norm;
  config.name = "follows nobody";
  config.like = dead;
  update.arenas = &config.like;
  update.modes = &mode;
  update.arena_count = 1;
  update.fn = no_span;
  gemini_manager_t h = m->handle;
  switch (op->arg[1] % DEAD_CALLS) {
  case 0: CALL(a, HANDLE, gemini_tensor_info, h, dead, &tensor_info); break;
  case 1: CALL(a, HANDLE, gemini_arena_info, h, dead, &arena_info); break;
  case 2:
  case 3: CALL(a, HANDLE, gemini_acquire, h, &access, 1, 0); break;
  case 4: CALL(a, HANDLE, gemini_release, h, &access, 1, 0); break;
  case 5: CALL(a, HANDLE, gemini_tensor_state_set, h, dead, GEMINI_STATE_HOLD); break;
  case 6: CALL(a, HANDLE, gemini_zero, h, &access); break;
  case 7: CALL(a, HANDLE, gemini_stream_synchronize, h, dead); break;
  case 8: CALL(a, HANDLE, gemini_stream_call, h, dead, nothing, NULL); break;
  case 9: CALL(a, HANDLE, gemini_arena_destroy, h, dead); break;
  case 10: CALL(a, HANDLE, gemini_tensor_unregister, h, dead); break;
  case 11: CALL(a, HANDLE, gemini_stream_destroy, h, dead); break;
  case 12: CALL(a, HANDLE, gemini_stats, dead, &stats); break;
  case 13: CALL(a, HANDLE, gemini_alloc, h, 100, dead, &ptr); break;
  case 14: CALL(a, HANDLE, gemini_arena_create, h, &config, &out.arena); break;
  case 15: CALL(a, HANDLE, gemini_tensor_counterpart, h, dead, dead, &out.tensor); break;
  case 16: CALL(a, HANDLE | updates_failed(a), gemini_update, h, &update); break;
  case 17: CALL(a, HANDLE, gemini_norm, h, &access, GEMINI_DTYPE_F32, 0, &norm); break;
  case 18: CALL(a, HANDLE, gemini_manager_close, dead); break;
  case 19: CALL(a, HANDLE, gemini_tensor_register, h, dead, "nobody's", 16, GEMINI_OFFSET_NEXT, &out.tensor); break;
  default:
    if (live) CALL(a, HANDLE, gemini_move, h, two, 2); /* no chunk moves */
  }
  if (out.id || ptr) differs(a, "a failed call has set its result");
}
bool make_dead(actor_t *a, op_t *op) {
  if (!manager_of(a, op)->open || !a->gone_count) return false;
  op_add(op, rnd(a, GONE));
  op_add(op, rnd(a, DEAD_CALLS));
  return true;
}

/* ---- bad: which */
enum { BAD_CALLS = 26 };
void run_bad(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  gemini_manager_t h = m->handle;
  if (!m->open) return;
  char long_name[200];
  memset(long_name, 'x', sizeof long_name - 1);
  long_name[sizeof long_name - 1] = 0;
  gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
  gemini_config_t open = GEMINI_CONFIG_INIT;
  gemini_update_t update = GEMINI_UPDATE_INIT;
  gemini_stats_t stats = GEMINI_STATS_INIT;
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  gemini_access_t access = ACCESS((void *)NULL, 0, 0, GEMINI_READ, 0);
  any_handle_t out = { 0 };
  switch (op->arg[0] % BAD_CALLS) {
  case 0: CALL(a, INVALID, gemini_acquire, h, NULL, 1, 0); break;
  case 1: CALL(a, INVALID, gemini_acquire, h, &access, (1 << 20) + 1, 0); break;
  case 2: CALL(a, HANDLE, gemini_acquire, h, &access, 1, 0); break;
  case 3: CALL(a, OK, gemini_acquire, h, NULL, 0, 0); break;
  case 4: CALL(a, INVALID, gemini_release, h, NULL, 1, 0); break;
  case 5: CALL(a, INVALID, gemini_move, h, NULL, 2); break;
  case 6: CALL(a, INVALID, gemini_pin, h, NULL); break;
  case 7: CALL(a, INVALID, gemini_zero, h, NULL); break;
  case 8: CALL(a, INVALID, gemini_load, h, &access, -1, 0); break;
  case 9: CALL(a, INVALID, gemini_arena_create, h, NULL, &out.arena); break;
  case 10:
    config.struct_size = 4;
    CALL(a, INVALID, gemini_arena_create, h, &config, &out.arena);
    break;
  case 11:
    config.flags = 1u << 30;
    CALL(a, INVALID, gemini_arena_create, h, &config, &out.arena);
    break;
  case 12:
    config.name = long_name;
    CALL(a, INVALID, gemini_arena_create, h, &config, &out.arena);
    break;
  case 13:
    config.name = "";
    CALL(a, INVALID, gemini_arena_create, h, &config, &out.arena);
    break;
  case 14: CALL(a, INVALID | updates_failed(a), gemini_update, h, &update); break;
  case 15:
    stats.struct_size = 2;
    CALL(a, INVALID, gemini_stats, h, &stats);
    break;
  case 16: CALL(a, OK, gemini_tensor_unregister, h, 0); break;
  case 17: CALL(a, OK, gemini_arena_destroy, h, 0); break;
  case 18: CALL(a, OK, gemini_stream_destroy, h, NULL); break;
  case 19: CALL(a, OK, gemini_manager_close, 0); break;
  case 20: CALL(a, INVALID, gemini_manager_open, &open, &out.manager); break; /* without a device budget */
  case 21:
    open.device_bytes = 1 << 20;
    open.flags = 1u << 30;
    CALL(a, INVALID, gemini_manager_open, &open, &out.manager);
    break;
  case 22: CALL(a, OK, gemini_free, h, NULL, 0); break;
  case 23: CALL(a, OK, gemini_host_free, h, NULL); break;
  case 24:
    if (a->index == 0) CALL(a, m->iteration && !m->op ? INVALID : INVALID | STATE, gemini_op_begin, h, long_name, 0);
    break;
  default:
    info.struct_size = 1;
    if (gemini_last_error(&info) != GEMINI_ERR_INVALID) differs(a, "gemini_last_error() takes any struct_size");
  }
  if (out.id) differs(a, "a failed call has set its result");
}
bool make_bad(actor_t *a, op_t *op) {
  op_add(op, rnd(a, BAD_CALLS));
  return manager_of(a, op)->open;
}

/* ---- churn: kind, how often. An entry of the library that is used again and again never gives the same handle
 * twice. */
static int by_value(const void *x, const void *y) {
  uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
  return (a > b) - (a < b);
}
void run_churn(actor_t *a, const op_t *op) {
  manager_t *m = manager_of(a, op);
  part_t *p = part_of(a, m);
  uint32_t kind = op->arg[0] % 3, n = op->arg[1];
  int in = -1;
  for (int i = 0; i < ARENAS && in < 0; i++)
    if (p->arenas[i].live && p->arenas[i].root == i && p->arenas[i].size >= p->arenas[i].element_bytes) in = i;
  if (!m->open || (kind == 0 && in < 0) || n > 100000) return;
  if (kind == 1 && (a->w->parallel || a->updates)) return; /* destroying an arena may have to wait for updates */
  any_handle_t *handles = calloc(n + 1, sizeof *handles);
  for (uint32_t i = 0; i < n; i++) {
    char name[32];
    snprintf(name, sizeof name, "churn %u", a->index);
    gemini_arena_config_t config = GEMINI_ARENA_CONFIG_INIT;
    config.name = name;
    config.capacity_bytes = a->w->unit;
    if (kind == 0) {
      QUIET(a, OK, gemini_tensor_register, m->handle, p->arenas[in].handle, name, p->arenas[in].element_bytes, 0,
            &handles[i].tensor);
      QUIET(a, OK, gemini_tensor_unregister, m->handle, handles[i].tensor);
    } else if (kind == 1) {
      QUIET(a, OK, gemini_arena_create, m->handle, &config, &handles[i].arena);
      QUIET(a, OK, gemini_arena_destroy, m->handle, handles[i].arena);
      if (atomic_load(&m->traced)) atomic_store(&m->perhaps_traced, true);
      atomic_store(&m->traced, false);
      atomic_store(&m->record_lost, true);
    } else {
      QUIET(a, OK, gemini_stream_create, m->handle, &handles[i].stream);
      QUIET(a, OK, gemini_stream_destroy, m->handle, handles[i].stream);
    }
  }
  any_handle_t first = n ? handles[0] : (any_handle_t){ 0 };
  qsort(handles, n, sizeof *handles, by_value);
  for (uint32_t i = 1; i < n; i++)
    if (handles[i].id == handles[i - 1].id)
      differs(a, "handle %#llx was given twice within %u uses", (unsigned long long)handles[i].id, n);
  free(handles);
  if (first.id) gone(a, first.tensor);
}
bool make_churn(actor_t *a, op_t *op) {
  if (!manager_of(a, op)->open) return false;
  uint32_t kind = chance(a, 85) ? 0 : 1 + rnd(a, 2);
  op_add(op, kind);
  op_add(op, chance(a, 50) ? 50 : kind ? 1200 : 3000);
  return true;
}
