/* The update callback for whole arenas: applies to each element of a span the rule that the walk's table names for it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The table is a sorted list of ranges, each with the index of a rule (an AdamW or SGD), so that parameter groups share
 * one update. gemini_update_walk() is called for spans in any order, by several workers of the library at once and, for
 * spans on a GPU, by the thread that queues the update. The walk is read only, except for its first failure, which is
 * stored without a lock; gemini_update_walk_status() returns it. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "update/beside.h"
#include "update/update.h"

#define WALK "gemini_update_walk"
#define WALK_CHECK "gemini_update_walk_check"

/* The role of an arena in an update. */
enum { PARAM, GRAD, MASTER, MOMENTUM, VARIANCE, ROLES };
static const char *const role_names[ROLES] = { "param", "grad", "master", "momentum", "variance" };

typedef struct roles {
  uint32_t index[ROLES]; /* in the update's list of arenas; GEMINI_INDEX_NONE: the update has no arena in this role */
} roles_t;
static roles_t roles_of(const gemini_update_walk_t *walk) {
  return (roles_t){ { walk->param_index, walk->grad_index, walk->master_index, walk->momentum_index,
                      walk->adamws ? walk->variance_index : GEMINI_INDEX_NONE } };
}
static bool may_lack(const gemini_update_walk_t *walk, int role) {
  return role == PARAM || (!walk->adamws && role >= MOMENTUM);
}

/* A rule of either table: adamw or sgd is set. The dtypes are those that its arenas must have. */
typedef struct rule {
  const gemini_adamw_t *adamw;
  const gemini_sgd_t *sgd;
  uint32_t param_dtype, grad_dtype;
} rule_t;
static uint32_t size_of(const void *sized) {
  uint32_t struct_size;
  memcpy(&struct_size, sized, sizeof struct_size);
  return struct_size;
}
static const void *table_of(const gemini_update_walk_t *walk) {
  return walk->adamws ? (const void *)walk->adamws : walk->sgds;
}
static rule_t rule_at(const gemini_update_walk_t *walk, uint64_t index) {
  const void *table = table_of(walk);
  /* The stride is the first entry's size: all entries have the same, which may be larger than ours. */
  const void *at = (const char *)table + index * size_of(table);
  const gemini_adamw_t *adamw = walk->adamws ? at : NULL;
  const gemini_sgd_t *sgd = walk->adamws ? NULL : at;
  return (rule_t){ adamw, sgd, adamw ? adamw->param_dtype : sgd->param_dtype,
                   adamw ? adamw->grad_dtype : sgd->grad_dtype };
}

static gmi_widths_t widths_of(const rule_t *rule) {
  return rule->adamw ? gmi_adamw_widths(rule->adamw) : (gmi_widths_t){ 4, 4, 4 };
}

/* Index of the first range that ends after element; range_count: there is none. In a table that is not ascending the
 * answer is wrong, but still an index of the table, and update_span() detects the error. */
static uint64_t range_of(const gemini_update_walk_t *walk, uint64_t element) {
  uint64_t low = 0, high = walk->range_count;
  while (low < high) {
    uint64_t mid = low + (high - low) / 2;
    if (walk->ranges[mid].end_element <= element) low = mid + 1;
    else high = mid;
  }
  return low;
}

/* --- spans --- */

/* Stores this thread's last failure in the walk, unless it has one. The compare-and-swap on `failing` selects the one
 * thread that may write message and code; relaxed, as it only selects. status is stored last, with release; it pairs
 * with the acquire load in gemini_update_walk_status(), so a thread that sees it sees the message, too. */
static void note_failure(gemini_update_walk_t *walk) {
  gemini_error_info_t info = GEMINI_ERROR_INFO_INIT;
  uint32_t none = 0;
  if (!__atomic_compare_exchange_n(&walk->failing, &none, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
  (void)gemini_last_error(&info);
  walk->native_code = info.native_code;
  memcpy(walk->message, info.message, sizeof walk->message);
  __atomic_store_n(&walk->status, info.status, __ATOMIC_RELEASE);
}

/* Where a span is computed: on the calling thread, or on a GPU's stream. */
typedef struct place {
  bool gpu;
  void *stream;
} place_t;

/* The arrays of a span, or of a part of it. `to` has where the written ones go: their own places, unless the update is
 * speculated. */
typedef struct arrays {
  gmi_arrays_t at, to;
  bool beside;
  bool results; /* the parameters alone are to be written */
} arrays_t;

static gemini_status_t update_arrays(const rule_t *rule, place_t on, uint64_t first, uint64_t count,
                                     const arrays_t *arrays) {
  const gmi_arrays_t *a = &arrays->at;
  if (arrays->results)
    return rule->adamw ? gmi_adamw_results(WALK, rule->adamw, first, count, a)
                       : gmi_sgd_results(WALK, rule->sgd, count, a);
  if (arrays->beside)
    return rule->adamw ? gmi_adamw_beside(WALK, rule->adamw, first, count, a, &arrays->to)
                       : gmi_sgd_beside(WALK, rule->sgd, count, a, &arrays->to);
  if (rule->adamw)
    return on.gpu ? gmi_adamw_cuda(WALK, rule->adamw, first, count, a, on.stream, NULL)
                  : gmi_adamw_host(WALK, rule->adamw, first, count, a, NULL);
  return on.gpu ? gemini_sgd_cuda(rule->sgd, count, a->param, a->grad, a->master, a->momentum, on.stream, NULL)
                : gemini_sgd_host(rule->sgd, count, a->param, a->grad, a->master, a->momentum, NULL);
}

/* Applies one rule to elements begin to end of a span. */
static gemini_status_t update_part(const gemini_update_walk_t *walk, const gemini_update_span_t *span, place_t on,
                                   uint64_t index, uint64_t begin, uint64_t end) {
  const roles_t roles = roles_of(walk);
  void *ptr[ROLES] = { NULL }, *out[ROLES] = { NULL };
  bool beside = false;
  for (int i = 0; i < ROLES; i++) {
    if (roles.index[i] == GEMINI_INDEX_NONE && may_lack(walk, i)) continue;
    if (roles.index[i] >= span->arena_count)
      return gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0, "%s_index is %" PRIu32 ", the update has %" PRIu32 " arenas",
                             role_names[i], roles.index[i], span->arena_count);
    ptr[i] = span->ptr[roles.index[i]];
    out[i] = gmi_span_out(span, roles.index[i]);
    beside |= i != GRAD && out[i] != ptr[i];
  }
  if (index == GEMINI_UPDATE_SKIP) {
    if (beside || span->pass)
      return gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0,
                             "an update that is speculated, or has two passes, can skip no elements");
    if (ptr[PARAM] != ptr[GRAD]) return GEMINI_OK;
    return gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0,
                           "the gradient has taken the parameter's bytes: it cannot be skipped");
  }
  if (index >= walk->rule_count)
    return gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0, "rule %" PRIu64 " is not among the %" PRIu64 " there are",
                           index, walk->rule_count);
  const rule_t rule = rule_at(walk, index);
  const gmi_widths_t widths = widths_of(&rule);
  const uint64_t bytes[ROLES] = { gmi_dtype_bytes(rule.param_dtype), gmi_dtype_bytes(rule.grad_dtype), widths.master,
                                  widths.momentum, widths.variance };
  for (int i = 0; i < ROLES; i++) {
    if (ptr[i]) ptr[i] = (char *)ptr[i] + (begin - span->first_element) * bytes[i];
    if (out[i]) out[i] = (char *)out[i] + (begin - span->first_element) * bytes[i];
  }
  const arrays_t arrays = { { ptr[PARAM], ptr[GRAD], ptr[MASTER], ptr[MOMENTUM], ptr[VARIANCE] },
                            { out[PARAM], ptr[GRAD], out[MASTER], out[MOMENTUM], out[VARIANCE] },
                            beside,
                            span->pass == GEMINI_PASS_RESULTS };
  return update_arrays(&rule, on, begin, end - begin, &arrays);
}

/* Goes through the ranges that the span overlaps, up to the first failure. The callback has no result, so a failure is
 * noted in the walk; elements behind it are not updated. */
static void update_span(gemini_update_walk_t *walk, const gemini_update_span_t *span, place_t on) {
  const gemini_update_range_t *ranges = walk->ranges;
  uint64_t begin = span->first_element, end = begin + span->element_count, stop;
  gemini_status_t status = GEMINI_OK;
  for (uint64_t r = range_of(walk, begin); !status && begin < end; begin = stop, r++) {
    stop = end;
    if (r == walk->range_count) {
      status = gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0, "no range of the walk covers them");
    } else {
      /* Neighbouring ranges with the same rule, such as the tensors of a group, are updated in one call. */
      while (r + 1 < walk->range_count && ranges[r + 1].rule == ranges[r].rule && ranges[r].end_element < end) r++;
      if (ranges[r].end_element < end) stop = ranges[r].end_element;
      status = stop > begin ? update_part(walk, span, on, ranges[r].rule, begin, stop)
                            : gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0,
                                              "range %" PRIu64 " ends at %" PRIu64 ", before it begins", r, stop);
    }
    if (status) {
      (void)gmi_update_fail_in(WALK, "elements %" PRIu64 " to %" PRIu64, begin, end);
      note_failure(walk);
    }
  }
}

/* On the simulated device a span is queued on the stream, as its bytes are valid only when the stream gets there. The
 * record is freed by the queued function. */
typedef struct queued_span {
  gemini_update_walk_t *walk;
  gemini_update_span_t span;
} queued_span_t;
static void run_queued(void *user) {
  queued_span_t *queued = user;
  update_span(queued->walk, &queued->span, (place_t){ false, NULL });
  free(queued);
}
static gemini_status_t queue_call(gemini_update_walk_t *walk, const gemini_update_span_t *span) {
  if (!walk->stream_call)
    return gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0, "they are on the simulated device, and stream_call is NULL");
  queued_span_t *queued = malloc(sizeof *queued);
  if (!queued) return gmi_update_fail(WALK, GEMINI_ERR_OOM_SYSTEM, 0, "no memory for the record of a span");
  queued->walk = walk;
  memset(&queued->span, 0, sizeof queued->span); /* the library may be of another version than this one */
  memcpy(&queued->span, span, span->struct_size < sizeof *span ? span->struct_size : sizeof *span);
  gemini_status_t status = walk->stream_call(walk->mgr, span->stream, run_queued, queued);
  if (!status) return GEMINI_OK;
  free(queued);
  return gmi_update_fail(WALK, status, 0, "stream_call failed with %" PRId32, status);
}

static gemini_status_t update_on_device(gemini_update_walk_t *walk, const gemini_update_span_t *span) {
  place_t gpu = { true, NULL };
  if (!walk->stream_native)
    return gmi_update_fail(WALK, GEMINI_ERR_INVALID, 0, "they are on the device, and stream_native is NULL");
  gemini_status_t status = walk->stream_native(walk->mgr, span->stream, &gpu.stream);
  if (status == GEMINI_ERR_UNSUPPORTED) return queue_call(walk, span);
  if (status) return gmi_update_fail(WALK, status, 0, "stream_native failed with %" PRId32, status);
  update_span(walk, span, gpu);
  return GEMINI_OK;
}

void gemini_update_walk(void *user, const gemini_update_span_t *span) {
  gemini_update_walk_t *walk = user;
  if (span->tier != GEMINI_TIER_DEVICE) {
    update_span(walk, span, (place_t){ false, NULL });
  } else if (update_on_device(walk, span)) {
    (void)gmi_update_fail_in(WALK, "elements %" PRIu64 " to %" PRIu64, span->first_element,
                             span->first_element + span->element_count);
    note_failure(walk);
  }
}

/* --- checks --- */

#define REFUSE(...) return gmi_update_fail(WALK_CHECK, GEMINI_ERR_INVALID, 0, __VA_ARGS__)

static gemini_status_t check_rules(const gemini_update_walk_t *walk) {
  const char *table = walk->adamws ? "adamws" : "sgds";
  char some;
  const gmi_arrays_t a = { .param = walk->param_index == GEMINI_INDEX_NONE ? NULL : &some };
  gmi_adamw_t adamw;
  gmi_sgd_t sgd = { .flags = 0 };
  if (!walk->adamws == !walk->sgds) REFUSE("walk: want exactly one of adamws and sgds, and the other NULL");
  if (!walk->rule_count) REFUSE("walk: rule_count is 0");
  const rule_t first = rule_at(walk, 0);
  for (uint64_t i = 0; i < walk->rule_count; i++) {
    const rule_t rule = rule_at(walk, i);
    const uint32_t stride = size_of(table_of(walk)), size = size_of(rule.adamw ? (const void *)rule.adamw : rule.sgd);
    if (i && size != stride)
      REFUSE("%s[%" PRIu64 "]: struct_size is %" PRIu32 ", in %s[0] %" PRIu32 ": all must be the same", table, i, size,
             table, stride);
    if (rule.adamw ? gmi_adamw_prepare(WALK_CHECK, rule.adamw, 0, 0, &a, &adamw)
                   : gmi_sgd_prepare(WALK_CHECK, rule.sgd, 0, &a, &sgd))
      return gmi_update_fail_in(WALK_CHECK, "%s[%" PRIu64 "]", table, i);
    if (gmi_dtype_bytes(rule.grad_dtype) != gmi_dtype_bytes(first.grad_dtype))
      REFUSE("%s[%" PRIu64 "]: grad_dtype is %" PRIu32 ", in %s[0] %" PRIu32 ", which has another size", table, i,
             rule.grad_dtype, table, first.grad_dtype);
    if (a.param && gmi_dtype_bytes(rule.param_dtype) != gmi_dtype_bytes(first.param_dtype))
      REFUSE("%s[%" PRIu64 "]: param_dtype is %" PRIu32 ", in %s[0] %" PRIu32 ", which has another size", table, i,
             rule.param_dtype, table, first.param_dtype);
    const gmi_widths_t widths = widths_of(&rule), wanted = widths_of(&first);
    if (widths.master != wanted.master || widths.momentum != wanted.momentum || widths.variance != wanted.variance)
      REFUSE("%s[%" PRIu64 "]: its states have %" PRIu32 ", %" PRIu32 " and %" PRIu32 " bytes (master, momentum, "
             "variance), in %s[0] %" PRIu32 ", %" PRIu32 " and %" PRIu32 ": all must be the same",
             table, i, widths.master, widths.momentum, widths.variance, table, wanted.master, wanted.momentum,
             wanted.variance);
    if (sgd.flags & GMI_SGD_MOMENTUM && walk->momentum_index == GEMINI_INDEX_NONE)
      REFUSE("%s[%" PRIu64 "]: momentum is %g, and momentum_index names no arena", table, i, rule.sgd->momentum);
  }
  return GEMINI_OK;
}

static gemini_status_t check_ranges(const gemini_update_walk_t *walk) {
  if (!walk->ranges || !walk->range_count) REFUSE("walk has no ranges: ranges is NULL, or range_count 0");
  for (uint64_t i = 0, begin = 0; i < walk->range_count; begin = walk->ranges[i++].end_element) {
    const gemini_update_range_t *r = &walk->ranges[i];
    if (r->end_element <= begin)
      REFUSE("ranges[%" PRIu64 "] ends at %" PRIu64 ", want more than %" PRIu64 ", where it begins", i, r->end_element,
             begin);
    if (r->rule >= walk->rule_count && r->rule != GEMINI_UPDATE_SKIP)
      REFUSE("ranges[%" PRIu64 "]: rule %" PRIu64 " is not among the %" PRIu64 " there are", i, r->rule,
             walk->rule_count);
  }
  return GEMINI_OK;
}

static gemini_status_t check_arenas(const gemini_update_walk_t *walk, const gemini_update_t *update) {
  const rule_t first = rule_at(walk, 0);
  const bool split = first.adamw && first.adamw->flags & GEMINI_ADAMW_SPLIT; /* the parameter is half of the master */
  const uint32_t needed[ROLES] = { split ? GEMINI_READ_WRITE : GEMINI_WRITE, GEMINI_READ, GEMINI_READ_WRITE,
                                   GEMINI_READ_WRITE, GEMINI_READ_WRITE };
  static const char *const mode_names[] = { "0", "READ", "WRITE", "READ_WRITE" };
  const roles_t roles = roles_of(walk);
  for (int i = 0; i < ROLES; i++) {
    const uint32_t index = roles.index[i];
    if (index == GEMINI_INDEX_NONE && may_lack(walk, i)) continue;
    if (index >= update->arena_count)
      REFUSE("%s_index is %" PRIu32 ", the update has %" PRIu32 " arenas", role_names[i], index, update->arena_count);
    if (!update->modes) REFUSE("modes is NULL");
    if (needed[i] & ~update->modes[index])
      REFUSE("%s_index: modes[%" PRIu32 "] is %" PRIu32 ", want %s", role_names[i], index, update->modes[index],
             mode_names[needed[i]]);
    for (int k = i + 1; k < ROLES; k++) {
      if (index == roles.index[k])
        REFUSE("%s_index and %s_index both are %" PRIu32, role_names[i], role_names[k], index);
    }
  }
  /* In place an arena that the walk does not write stays as it is; beside the old values it would have undefined
   * ones. */
  const uint32_t beside = update->flags & (GEMINI_UPDATE_SPECULATE | GEMINI_UPDATE_PASSES);
  for (uint32_t k = 0; beside && k < update->arena_count; k++) {
    bool written = !(update->modes[k] & GEMINI_WRITE);
    for (int i = 0; i < ROLES; i++) written |= i != GRAD && roles.index[i] == k;
    if (!written)
      REFUSE("modes[%" PRIu32 "] is %" PRIu32 ", but the walk does not write that arena, as an update with "
             "%s must: want READ",
             k, update->modes[k],
             beside & GEMINI_UPDATE_SPECULATE ? "GEMINI_UPDATE_SPECULATE" : "GEMINI_UPDATE_PASSES");
  }
  return GEMINI_OK;
}

/* Checks that the ranges cover the update's elements, and that none is skipped whose parameters would be lost: with
 * mode WRITE the old bytes are not brought, so a skipped range would keep undefined ones. */
static gemini_status_t check_elements(const gemini_update_walk_t *walk, const gemini_update_t *update) {
  const uint64_t first = update->first_element, last = walk->ranges[walk->range_count - 1].end_element;
  const uint64_t count = update->element_count ? update->element_count : last > first ? last - first : 0;
  if (first > UINT64_MAX - count || first + count > last)
    REFUSE("the update has elements %" PRIu64 " + %" PRIu64 ", the last range ends at %" PRIu64, first, count, last);
  const rule_t rule = rule_at(walk, 0);
  const gmi_widths_t widths = widths_of(&rule);
  const bool blocks = widths.momentum == 1 || widths.variance == 1; /* updates have whole ones */
  if (blocks && (first % GMI_BLOCK || update->element_count % GMI_BLOCK))
    REFUSE("the update has elements %" PRIu64 " + %" PRIu64 ", 8-bit states want multiples of %u", first,
           update->element_count, GMI_BLOCK);
  for (uint64_t i = range_of(walk, first); blocks && walk->ranges[i].end_element < first + count; i++)
    if (walk->ranges[i].end_element % GMI_BLOCK)
      REFUSE("ranges[%" PRIu64 "] ends at %" PRIu64 ", 8-bit states want a multiple of %u", i,
             walk->ranges[i].end_element, GMI_BLOCK);
  const bool ahead = update->flags & GEMINI_UPDATE_SPECULATE; /* beside old values nothing can be left as it is */
  if (!ahead && (walk->param_index == GEMINI_INDEX_NONE || update->modes[walk->param_index] & GEMINI_READ))
    return GEMINI_OK;
  for (uint64_t i = range_of(walk, first), begin = first; begin < first + count;
       begin = walk->ranges[i++].end_element) {
    if (walk->ranges[i].rule == GEMINI_UPDATE_SKIP && ahead)
      REFUSE("ranges[%" PRIu64
             "] is skipped, which an update with GEMINI_UPDATE_SPECULATE cannot do within its elements",
             i);
    if (walk->ranges[i].rule == GEMINI_UPDATE_SKIP)
      REFUSE("ranges[%" PRIu64 "] is skipped, but its parameters would be lost: modes[%" PRIu32 "] is %" PRIu32
             ", want READ_WRITE",
             i, walk->param_index, update->modes[walk->param_index]);
  }
  return GEMINI_OK;
}

gemini_status_t gemini_update_walk_check(const gemini_update_t *theirs) {
  gemini_update_t ours;
  const gemini_update_t *update = &ours;
  gemini_status_t status = gmi_update_struct(WALK_CHECK, "update", theirs, GMI_V1_UPDATE, &ours, sizeof ours);
  if (status) return status;
  if (ours.user_bytes)
    REFUSE("user_bytes is %" PRIu64 ", want 0: failures would be stored in the copy", ours.user_bytes);
  const gemini_update_walk_t *walk = ours.user; /* stays where it is: fields behind version 1's may not be there */
  status = gmi_update_struct(WALK_CHECK, "walk", walk, GMI_V1_UPDATE_WALK, NULL, sizeof *walk);
  if (status) return status;
  if (walk->flags) REFUSE("walk: flags has unknown bits: %#" PRIx32, walk->flags);
  if (walk->reserved) REFUSE("walk: reserved is %" PRIu32 ", want 0", walk->reserved);
  if (walk->failing || walk->status) REFUSE("walk has failed before: initialise it anew");
  status = check_rules(walk);
  if (!status) status = check_ranges(walk);
  if (!status) status = check_arenas(walk, update);
  return status ? status : check_elements(walk, update);
}

gemini_status_t gemini_update_walk_status(const gemini_update_walk_t *walk) {
  if (!walk) return gmi_update_fail(__func__, GEMINI_ERR_INVALID, 0, "walk is NULL");
  gemini_status_t status = __atomic_load_n(&walk->status, __ATOMIC_ACQUIRE);
  return status ? gmi_update_fail(WALK, status, walk->native_code, "%.*s", (int)sizeof walk->message - 1, walk->message)
                : GEMINI_OK;
}
