/* AdamW and SGD over whole arenas: one rule for all elements, in one call. SPDX-License-Identifier: Apache-2.0
 *
 * gemini_update() copies the rule, and its spans report failures, so nothing is borrowed after the call and nothing has
 * to be asked for after it. All that can be wrong is checked before the update is submitted; a span can then fail only
 * where a GPU or the memory for its record does. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "update/beside.h"
#include "update/update.h"

enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ROLES };
static const char *const role_names[ROLES] = { "param", "grad", "master", "momentum", "variance" };

/* What the spans get: a copy of it. */
typedef struct rule {
  gemini_adamw_t adamw;
  gemini_sgd_t sgd;
  gemini_manager_t mgr;
  bool is_sgd;
  uint8_t role_of[8]; /* of each arena of the update */
} rule_t;

static const char *operation_of(const rule_t *rule) {
  return rule->is_sgd ? "gemini_sgd_arenas" : "gemini_adamw_arenas";
}

static gmi_arrays_t arrays_of(const rule_t *rule, const gemini_update_span_t *span) {
  void *ptr[ROLES] = { NULL };
  for (uint32_t i = 0; i < span->arena_count; i++) ptr[rule->role_of[i]] = span->ptr[i];
  return (gmi_arrays_t){ ptr[PARAM], ptr[GRAD], ptr[MASTER], ptr[MOMENTUM], ptr[VARIANCE] };
}

static gmi_arrays_t written_of(const rule_t *rule, const gemini_update_span_t *span) {
  void *ptr[ROLES] = { NULL };
  for (uint32_t i = 0; i < span->arena_count; i++) ptr[rule->role_of[i]] = gmi_span_out(span, i);
  return (gmi_arrays_t){ ptr[PARAM], ptr[GRAD], ptr[MASTER], ptr[MOMENTUM], ptr[VARIANCE] };
}

static gemini_status_t prepare(const rule_t *rule, uint64_t count, const gmi_arrays_t *a) {
  gmi_adamw_t adamw;
  gmi_sgd_t sgd;
  return rule->is_sgd ? gmi_sgd_prepare(operation_of(rule), &rule->sgd, count, a, &sgd)
                      : gmi_adamw_prepare(operation_of(rule), &rule->adamw, 0, count, a, &adamw);
}
static bool is_split(const rule_t *rule) { return !rule->is_sgd && rule->adamw.flags & GEMINI_ADAMW_SPLIT; }

static gemini_status_t on_host(const rule_t *rule, const gemini_update_span_t *span) {
  const gmi_arrays_t a = arrays_of(rule, span), to = written_of(rule, span);
  const uint64_t first = span->first_element, count = span->element_count;
  if (span->pass == GEMINI_PASS_RESULTS)
    return rule->is_sgd ? gmi_sgd_results(operation_of(rule), &rule->sgd, count, &a)
                        : gmi_adamw_results(operation_of(rule), &rule->adamw, first, count, &a);
  if (a.master != to.master) /* speculated: beside the old values */
    return rule->is_sgd ? gmi_sgd_beside(operation_of(rule), &rule->sgd, count, &a, &to)
                        : gmi_adamw_beside(operation_of(rule), &rule->adamw, first, count, &a, &to);
  return rule->is_sgd ? gemini_sgd_host(&rule->sgd, count, a.param, a.grad, a.master, a.momentum, NULL)
                      : gmi_adamw_host("gemini_adamw_host", &rule->adamw, first, count, &a, NULL);
}

/* The simulated device: a span is queued, as its bytes are there when the stream gets to it. The rule stays as long. */
typedef struct queued {
  const rule_t *rule;
  gemini_update_span_t span;
} queued_t;
static void run_queued(void *user) {
  queued_t *queued = user;
  (void)on_host(queued->rule, &queued->span); /* cannot fail: queue() has checked all that it checks */
  free(queued);
}
static gemini_status_t queue(const rule_t *rule, const gemini_update_span_t *span) {
  const gmi_arrays_t a = arrays_of(rule, span);
  gemini_status_t status = prepare(rule, span->element_count, &a);
  if (status) return status;
  queued_t *queued = malloc(sizeof *queued);
  if (!queued)
    return gmi_update_fail(operation_of(rule), GEMINI_ERR_OOM_SYSTEM, 0, "no memory for the record of a span");
  *queued = (queued_t){ rule, *span };
  status = gemini_stream_call(rule->mgr, span->stream, run_queued, queued);
  if (status) free(queued);
  return status;
}

static gemini_status_t update_span(void *user, const gemini_update_span_t *theirs) {
  const rule_t *rule = user;
  gemini_update_span_t span = { 0 }; /* the library may be of another version than this one */
  memcpy(&span, theirs, theirs->struct_size < sizeof span ? theirs->struct_size : sizeof span);
  if (span.tier != GEMINI_TIER_DEVICE) return on_host(rule, &span);
  void *stream;
  gemini_status_t status = gemini_stream_native(rule->mgr, span.stream, &stream);
  if (status == GEMINI_ERR_UNSUPPORTED) return queue(rule, &span);
  if (status) return status;
  const gmi_arrays_t a = arrays_of(rule, &span);
  const uint64_t count = span.element_count;
  return rule->is_sgd ? gemini_sgd_cuda(&rule->sgd, count, a.param, a.grad, a.master, a.momentum, stream, NULL)
                      : gmi_adamw_cuda("gemini_adamw_cuda", &rule->adamw, span.first_element, count, &a, stream, NULL);
}

/* ---- the call */
/* The arenas of the update, by role; NULL where it has none. */
typedef struct roles {
  gemini_arena_t arena[ROLES];
} roles_t;

static gemini_status_t check_arena(const rule_t *rule, int role, gemini_arena_t arena) {
  const uint32_t param_dtype = rule->is_sgd ? rule->sgd.param_dtype : rule->adamw.param_dtype;
  const uint32_t grad_dtype = rule->is_sgd ? rule->sgd.grad_dtype : rule->adamw.grad_dtype;
  const gmi_widths_t widths = rule->is_sgd ? (gmi_widths_t){ 4, 4, 4 } : gmi_adamw_widths(&rule->adamw);
  const uint64_t bytes[ROLES] = { gmi_dtype_bytes(param_dtype), gmi_dtype_bytes(grad_dtype), widths.master,
                                  widths.momentum, widths.variance };
  const uint64_t want = bytes[role];
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  gemini_status_t status = gemini_arena_info(rule->mgr, arena, &info);
  if (status) return gmi_update_fail_in(operation_of(rule), "%s", role_names[role]);
  if (info.element_bytes == want) return GEMINI_OK;
  return gmi_update_fail(operation_of(rule), GEMINI_ERR_INVALID, 0,
                         "%s: the arena has elements of %" PRIu32 " bytes, the update of %" PRIu64, role_names[role],
                         info.element_bytes, want);
}

/* 8-bit states are updated in whole blocks. */
static gemini_status_t check_blocks(const rule_t *rule, const gemini_update_arenas_t *arenas) {
  const gmi_widths_t widths = rule->is_sgd ? (gmi_widths_t){ 4, 4, 4 } : gmi_adamw_widths(&rule->adamw);
  gemini_arena_info_t info = GEMINI_ARENA_INFO_INIT;
  if (widths.momentum != 1 && widths.variance != 1) return GEMINI_OK;
  gemini_status_t status = gemini_arena_info(rule->mgr, arenas->master, &info);
  if (status) return gmi_update_fail_in(operation_of(rule), "master");
  const uint64_t count = arenas->element_count ? arenas->element_count : info.size_bytes / info.element_bytes;
  if (arenas->first_element % GMI_BLOCK == 0 && count % GMI_BLOCK == 0) return GEMINI_OK;
  return gmi_update_fail(operation_of(rule), GEMINI_ERR_INVALID, 0,
                         "the update has elements %" PRIu64 " + %" PRIu64 ", 8-bit states want multiples of %u",
                         arenas->first_element, count, GMI_BLOCK);
}

static gemini_status_t submit(rule_t *rule, const gemini_update_arenas_t *arenas, const roles_t *roles) {
  static const uint32_t role_modes[ROLES] = { GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE, GEMINI_READ_WRITE,
                                              GEMINI_READ_WRITE };
  gemini_arena_t list[ROLES];
  uint32_t modes[ROLES];
  gemini_update_t update = GEMINI_UPDATE_INIT;
  for (int role = 0; role < ROLES; role++) {
    if (!roles->arena[role]) continue;
    gemini_status_t status = check_arena(rule, role, roles->arena[role]);
    if (status) return status;
    rule->role_of[update.arena_count] = (uint8_t)role;
    modes[update.arena_count] = role == PARAM && is_split(rule) ? GEMINI_READ_WRITE : role_modes[role];
    list[update.arena_count++] = roles->arena[role];
  }
  update.flags = arenas->flags | GEMINI_UPDATE_PASSES;
  update.arenas = list;
  update.modes = modes;
  update.first_element = arenas->first_element;
  update.element_count = arenas->element_count;
  update.stream = arenas->stream;
  update.try_fn = update_span;
  update.user = rule;
  update.user_bytes = sizeof *rule;
  return gemini_update(rule->mgr, &update) ? gmi_update_fail_in(operation_of(rule), "the update") : GEMINI_OK;
}

static gemini_status_t update_arenas(rule_t *rule, const gemini_update_arenas_t *theirs) {
  const char *operation = operation_of(rule);
  gemini_update_arenas_t arenas;
  gemini_status_t status = gmi_update_struct(operation, "arenas", theirs, GMI_V1_UPDATE_ARENAS, &arenas, sizeof arenas);
  if (status) return status;
  const bool has_momentum = !rule->is_sgd || rule->sgd.momentum != 0;
  const roles_t roles = { { arenas.param, arenas.grad, arenas.master, has_momentum ? arenas.momentum : NULL,
                            rule->is_sgd ? NULL : arenas.variance } };
  const int needed[] = { GRAD, MASTER, has_momentum ? MOMENTUM : GRAD, rule->is_sgd ? GRAD : VARIANCE };
  for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
    if (!roles.arena[needed[i]])
      return gmi_update_fail(operation, GEMINI_ERR_INVALID, 0, "%s is NULL", role_names[needed[i]]);
  char some;
  const gmi_arrays_t a = { .param = arenas.param ? &some : NULL };
  status = prepare(rule, 0, &a);
  if (!status) status = check_blocks(rule, &arenas);
  return status ? status : submit(rule, &arenas, &roles);
}

gemini_status_t gemini_adamw_arenas(gemini_manager_t mgr, const gemini_adamw_t *adamw,
                                    const gemini_update_arenas_t *arenas) {
  rule_t rule = { .mgr = mgr };
  gemini_status_t status = gmi_update_struct(__func__, "adamw", adamw, GMI_V1_ADAMW, &rule.adamw, sizeof rule.adamw);
  rule.adamw.struct_size = sizeof rule.adamw;
  return status ? status : update_arenas(&rule, arenas);
}

gemini_status_t gemini_sgd_arenas(gemini_manager_t mgr, const gemini_sgd_t *sgd, const gemini_update_arenas_t *arenas) {
  rule_t rule = { .mgr = mgr, .is_sgd = true };
  gemini_status_t status = gmi_update_struct(__func__, "sgd", sgd, GMI_V1_SGD, &rule.sgd, sizeof rule.sgd);
  rule.sgd.struct_size = sizeof rule.sgd;
  return status ? status : update_arenas(&rule, arenas);
}
