/* Writes a plan as text for people: gemini_plan_explain() of tracer/tracer.c calls gmi_plan_explain().
 * SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "policy/model.h"

#define KIND_COUNT (GEMINI_KIND_OTHER + 1)

typedef struct writer {
  char *text;
  uint64_t size, length; /* length counts also what did not fit in size */
} writer_t;

__attribute__((format(printf, 2, 3))) static void say(writer_t *c, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  uint64_t left = c->length < c->size ? c->size - c->length : 0;
  int length = vsnprintf(left > 0 ? c->text + c->length : NULL, left, format, arguments);
  va_end(arguments);
  if (length > 0) c->length += (uint64_t)length;
}

static const char *kind_name(uint32_t kind) {
  static const char *const names[KIND_COUNT] = { "parameters", "gradients", "master copies",
                                                 "momentum",   "variance",  "other" };
  return names[kind < KIND_COUNT ? kind : GEMINI_KIND_OTHER];
}
static const char *placement_name(uint32_t placement) {
  static const char *const names[] = { "auto", "cuda", "cpu", "static" };
  _Static_assert(sizeof names / sizeof *names == GMI_PLACEMENTS, "each placement has a name");
  return names[placement]; /* gmi_plan_make() refuses others */
}

static double mib(uint64_t count, uint64_t bytes) { return (double)count * (double)bytes / 1048576.0; }
static double ms(uint64_t ns) { return (double)ns / 1e6; }

static void say_op(writer_t *c, const char *const *op_names, uint32_t op) {
  say(c, "op %" PRIu32, op);
  if (op_names == NULL || op_names[op] == NULL) return;
  say(c, " (");
  /* as in other texts for people (base/names.h): a name begins no line of its own and steers no terminal */
  for (const char *at = op_names[op]; *at; at++) say(c, (unsigned char)*at < ' ' || *at == 0x7f ? "%%%02X" : "%c", *at);
  say(c, ")");
}

static void say_stays(writer_t *c, const gmi_plan_input_t *input, const gmi_plan_t *plan) {
  uint64_t stays[KIND_COUNT] = { 0 }, in_all[KIND_COUNT] = { 0 }, total = 0;
  for (uint32_t i = 0; i < input->chunk_count; i++) {
    uint32_t kind = input->chunk_kind[i] < KIND_COUNT ? input->chunk_kind[i] : (uint32_t)GEMINI_KIND_OTHER;
    in_all[kind]++;
    if (plan->stays[i]) stays[kind]++, total++;
  }
  say(c, "stays: %" PRIu64 " of %" PRIu32 " chunks for good", total, input->chunk_count);
  for (uint32_t kind = 0; kind < KIND_COUNT; kind++)
    if (in_all[kind] > 0)
      say(c, "; %s %.1f of %.1f MiB", kind_name(kind), mib(stays[kind], input->chunk_bytes),
          mib(in_all[kind], input->chunk_bytes));
  say(c, "\n");
}

enum { RESOURCES = GEMINI_BINDS_SUMS + 1 };
static void busy_times(const gmi_plan_t *plan, uint64_t busy_ns[RESOURCES]) {
  busy_ns[GEMINI_BINDS_COMPUTE] = plan->compute_ns;
  busy_ns[GEMINI_BINDS_FETCHES] = plan->fetch_busy_ns;
  busy_ns[GEMINI_BINDS_EVICTS] = plan->evict_busy_ns;
  busy_ns[GEMINI_BINDS_UPDATES] = plan->update_busy_ns;
  busy_ns[GEMINI_BINDS_FILES] = plan->file_busy_ns;
  busy_ns[GEMINI_BINDS_GATHERS] = plan->gather_busy_ns;
  busy_ns[GEMINI_BINDS_SUMS] = plan->sum_busy_ns;
}

uint32_t gmi_plan_binds(const gmi_plan_t *plan) {
  uint64_t busy_ns[RESOURCES];
  uint32_t most = 0;
  busy_times(plan, busy_ns);
  for (uint32_t i = 1; i < RESOURCES; i++)
    if (busy_ns[i] > busy_ns[most]) most = i;
  return most;
}

/* The resource with the longest busy time limits the step. If even that resource is idle for more than a tenth of
 * the step, dependencies between resources cost time as well, and the text says so. */
static void say_binding(writer_t *c, const gmi_plan_t *plan) {
  static const char *const names[RESOURCES] = {
    "compute", "the link to the device", "the link from the device", "updates on the host",
    "files",   "gathers over the ranks", "sums over the ranks"
  };
  uint64_t busy_ns[RESOURCES];
  const uint32_t most = gmi_plan_binds(plan);
  busy_times(plan, busy_ns);
  say(c, "binds: %s, busy for %.0f %% of the step", names[most],
      plan->predicted_ns > 0 ? 100.0 * (double)busy_ns[most] / (double)plan->predicted_ns : 100.0);
  if ((double)busy_ns[most] < 0.9 * (double)plan->predicted_ns)
    say(c, "; the rest is time in which one of them waits for another");
  say(c, "\n");
}

/* What ranks share is not among the chunks above: those are this rank's own, its slices among them. */
static void say_groups(writer_t *c, const gmi_plan_input_t *input, const gmi_plan_t *plan) {
  for (uint32_t i = 0; i < input->groups.group_count; i++) {
    const gmi_plan_traffic_t *t = &plan->traffic[i];
    uint64_t gathers = 0, sums = 0;
    for (uint32_t k = 0; k < input->groups.gather_count; k++) gathers += input->groups.gathers[k].group == i;
    for (uint32_t k = 0; k < input->groups.sum_count; k++) sums += input->groups.sums[k].group == i;
    say(c,
        "group %" PRIu32 ": %" PRIu64 " chunks gathered a step (%.1f MiB of own slices fetched, %.1f MiB from other "
        "ranks), %" PRIu64 " added over the ranks (%.1f MiB to other ranks); the counts above are this rank's slices\n",
        i, gathers, mib(t->fetched, 1), mib(t->gathered, 1), sums, mib(t->summed, 1));
  }
  if (input->groups.group_count > 0)
    say(c, "busy: gathers %.3f ms, sums %.3f ms\n", ms(plan->gather_busy_ns), ms(plan->sum_busy_ns));
}

uint64_t gmi_plan_explain(const gmi_plan_input_t *input, const gmi_plan_t *plan, const char *const *op_names,
                          char *text, uint64_t size_bytes) {
  writer_t c = { text, size_bytes, 0 };
  uint64_t evicts = plan->evict_first[plan->op_count], for_update = 0, ahead = 0, results = 0, passes = 0, largest = 0,
           largest_chunks = 0;
  uint32_t largest_op = 0;
  for (uint64_t e = 0; e < evicts; e++) for_update += (plan->evicts[e].flags & GMI_EVICT_FOR_UPDATE) != 0;
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint64_t chunks = input->ops[op + 1].access_first - input->ops[op].access_first;
    if (chunks + input->ops[op].heap_frames < largest || (op > 0 && chunks + input->ops[op].heap_frames == largest))
      continue;
    largest = chunks + input->ops[op].heap_frames, largest_chunks = chunks, largest_op = op;
  }

  say(&c, "placement: %s, %" PRIu32 " ops, %" PRIu32 " chunks of %.1f MiB\n", placement_name(input->placement),
      input->op_count, input->chunk_count, mib(1, input->chunk_bytes));
  say(&c, "budget: %" PRIu32 " frames, %.1f MiB, with non-model memory\n", input->frame_count,
      mib(input->frame_count, input->frame_bytes));
  say(&c, "largest op: ");
  say_op(&c, op_names, largest_op);
  say(&c, " needs %" PRIu64 " frames, %.1f MiB: %" PRIu64 " chunks and %" PRIu32 " of %s\n", largest,
      mib(largest, input->frame_bytes), largest_chunks, input->ops[largest_op].heap_frames,
      input->groups.group_count > 0 ? "non-model memory and what is gathered" : "non-model memory");
  say_stays(&c, input, plan);
  say(&c, "fetched a step: %" PRIu64 " chunks, %.1f MiB; the optimum is %" PRIu64, plan->fetch_count,
      mib(plan->fetch_count, input->link_bytes), plan->optimum_count);
  if (plan->fetch_count == plan->optimum_count) say(&c, ", met\n");
  else if (plan->optimum_count == 0) say(&c, "\n");
  else say(&c, ", exceeded by %.1f %%\n", 100.0 * ((double)plan->fetch_count / (double)plan->optimum_count - 1.0));
  say(&c,
      "evicted a step: %" PRIu64 " chunks, of them %" PRIu64 " written back (%.1f MiB), %" PRIu64
      " for updates on the host\n",
      evicts, plan->evict_dirty_count, mib(plan->evict_dirty_count, input->link_bytes), for_update);
  say(&c, "updates: %" PRIu64 " pieces on the device, %" PRIu64 " on the host", plan->device_piece_count,
      plan->piece_count - plan->device_piece_count);
  for (uint32_t p = 0; p < plan->piece_count; p++) {
    ahead += plan->piece_ahead[p] == GMI_AHEAD_ALL;
    results += plan->piece_ahead[p] == GMI_AHEAD_RESULTS;
  }
  if (ahead > 0) say(&c, ", %" PRIu64 " of these computed ahead", ahead);
  for (uint32_t p = 0; p < plan->piece_count; p++) passes += plan->piece_passes[p];
  if (passes > 0) say(&c, ", %" PRIu64 " in two passes", passes);
  if (results > 0) say(&c, ", of %" PRIu64 " the first one ahead", results);
  say(&c, "\n");
  say_groups(&c, input, plan);
  if (plan->file_chunks > 0)
    say(&c, "files: %" PRIu64 " chunks of states, %.1f MiB, read and written a step, busy for %.3f ms\n",
        plan->file_chunks, mib(plan->file_chunks, input->file_bytes), ms(plan->file_busy_ns));
  say(&c, "predicted step: %.3f ms, of it %.3f ms waiting\n", ms(plan->predicted_ns),
      ms(plan->predicted_ns - plan->compute_ns));
  say(&c, "busy: compute %.3f ms, fetches %.3f ms, write-backs %.3f ms, updates on the host %.3f ms\n",
      ms(plan->compute_ns), ms(plan->fetch_busy_ns), ms(plan->evict_busy_ns), ms(plan->update_busy_ns));
  say_binding(&c, plan);
  if (plan->worst_stall_ns == 0) {
    say(&c, "longest wait: none\n");
  } else {
    say(&c, "longest wait: %.3f ms in ", ms(plan->worst_stall_ns));
    say_op(&c, op_names, plan->worst_op);
    say(&c, "\n");
  }
  return c.length;
}
