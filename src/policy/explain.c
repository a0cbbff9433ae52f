/* A plan in words.
 * SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "policy/model.h"

#define KIND_COUNT (GEMINI_KIND_OTHER + 1)

typedef struct writer {
  char *text;
  uint64_t size, length; /* length goes on where size ends */
} writer_t;

__attribute__((format(printf, 2, 3))) static void say(writer_t *w, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  uint64_t left = w->length < w->size ? w->size - w->length : 0;
  int length = vsnprintf(left > 0 ? w->text + w->length : NULL, left, format, arguments);
  va_end(arguments);
  if (length > 0) w->length += (uint64_t)length;
}

static const char *kind_name(uint32_t kind) {
  static const char *const names[KIND_COUNT] = { "parameters", "gradients", "master copies",
                                                 "momentum",   "variance",  "other" };
  return names[kind < KIND_COUNT ? kind : GEMINI_KIND_OTHER];
}
static const char *placement_name(uint32_t placement) {
  static const char *const names[] = { "auto", "cuda", "cpu", "static" };
  return names[placement <= GEMINI_PLACEMENT_STATIC ? placement : 0];
}

static double mib(const gmi_plan_input_t *input, uint64_t windows) {
  return (double)windows * (double)input->window_bytes / 1048576.0;
}
static double ms(uint64_t ns) { return (double)ns / 1e6; }

static void say_op(writer_t *w, const char *const *op_names, uint32_t op) {
  if (op_names != NULL && op_names[op] != NULL) say(w, "op %" PRIu32 " (%s)", op, op_names[op]);
  else say(w, "op %" PRIu32, op);
}

static void say_stays(writer_t *w, const gmi_plan_input_t *input, const gmi_plan_t *plan) {
  uint64_t stays[KIND_COUNT] = { 0 }, in_all[KIND_COUNT] = { 0 }, total = 0;
  for (uint32_t i = 0; i < input->window_count; i++) {
    uint32_t kind = input->window_kind[i] < KIND_COUNT ? input->window_kind[i] : (uint32_t)GEMINI_KIND_OTHER;
    in_all[kind]++;
    if (plan->stays[i]) stays[kind]++, total++;
  }
  say(w, "stays: %" PRIu64 " of %" PRIu32 " windows for good", total, input->window_count);
  for (uint32_t kind = 0; kind < KIND_COUNT; kind++)
    if (in_all[kind] > 0)
      say(w, "; %s %.1f of %.1f MiB", kind_name(kind), mib(input, stays[kind]), mib(input, in_all[kind]));
  say(w, "\n");
}

static void say_binding(writer_t *w, const gmi_plan_t *plan) {
  const char *const names[] = { "compute", "the link to the device", "the link from the device", "updates on the host",
                                "files" };
  const uint64_t busy_ns[] = { plan->compute_ns, plan->fetch_busy_ns, plan->evict_busy_ns, plan->update_busy_ns,
                               plan->file_busy_ns };
  uint32_t most = 0;
  for (uint32_t i = 1; i < 5; i++)
    if (busy_ns[i] > busy_ns[most]) most = i;
  say(w, "binds: %s, busy for %.0f %% of the step", names[most],
      plan->predicted_ns > 0 ? 100.0 * (double)busy_ns[most] / (double)plan->predicted_ns : 100.0);
  if ((double)busy_ns[most] < 0.9 * (double)plan->predicted_ns) say(w, "; the rest is waiting of one for another");
  say(w, "\n");
}

uint64_t gmi_plan_explain(const gmi_plan_input_t *input, const gmi_plan_t *plan, const char *const *op_names,
                          char *text, uint64_t size_bytes) {
  writer_t w = { text, size_bytes, 0 };
  uint64_t evicts = plan->evict_first[plan->op_count], for_update = 0, largest = 0, largest_windows = 0;
  uint32_t largest_op = 0;
  for (uint64_t e = 0; e < evicts; e++) for_update += (plan->evicts[e].flags & GMI_EVICT_FOR_UPDATE) != 0;
  for (uint32_t op = 0; op < input->op_count; op++) {
    uint64_t windows = input->ops[op + 1].access_first - input->ops[op].access_first;
    if (windows + input->ops[op].heap_frames < largest || (op > 0 && windows + input->ops[op].heap_frames == largest))
      continue;
    largest = windows + input->ops[op].heap_frames, largest_windows = windows, largest_op = op;
  }

  say(&w, "placement: %s, %" PRIu32 " ops, %" PRIu32 " windows of %.1f MiB\n", placement_name(input->placement),
      input->op_count, input->window_count, mib(input, 1));
  say(&w, "budget: %" PRIu32 " frames, %.1f MiB, with non-model memory\n", input->frame_count,
      mib(input, input->frame_count));
  say(&w, "largest op: ");
  say_op(&w, op_names, largest_op);
  say(&w, " needs %" PRIu64 " frames, %.1f MiB: %" PRIu64 " windows and %" PRIu32 " of non-model memory\n", largest,
      mib(input, largest), largest_windows, input->ops[largest_op].heap_frames);
  say_stays(&w, input, plan);
  say(&w, "fetched a step: %" PRIu64 " windows, %.1f MiB; the optimum is %" PRIu64, plan->fetch_count,
      mib(input, plan->fetch_count), plan->optimum_count);
  if (plan->fetch_count == plan->optimum_count) say(&w, ", met\n");
  else if (plan->optimum_count == 0) say(&w, "\n");
  else say(&w, ", exceeded by %.1f %%\n", 100.0 * ((double)plan->fetch_count / (double)plan->optimum_count - 1.0));
  say(&w,
      "evicted a step: %" PRIu64 " windows, of them %" PRIu64 " written back (%.1f MiB), %" PRIu64
      " for updates on the host\n",
      evicts, plan->evict_dirty_count, mib(input, plan->evict_dirty_count), for_update);
  say(&w, "updates: %" PRIu64 " pieces on the device, %" PRIu64 " on the host\n", plan->device_piece_count,
      plan->piece_count - plan->device_piece_count);
  if (plan->file_windows > 0)
    say(&w, "files: %" PRIu64 " windows of states, %.1f MiB, read and written a step, busy for %.3f ms\n",
        plan->file_windows, mib(input, plan->file_windows), ms(plan->file_busy_ns));
  say(&w, "predicted step: %.3f ms, of it %.3f ms waiting\n", ms(plan->predicted_ns), ms(plan->stall_ns));
  say(&w, "busy: compute %.3f ms, fetches %.3f ms, write-backs %.3f ms, updates on the host %.3f ms\n",
      ms(plan->compute_ns), ms(plan->fetch_busy_ns), ms(plan->evict_busy_ns), ms(plan->update_busy_ns));
  say_binding(&w, plan);
  if (plan->worst_stall_ns == 0) {
    say(&w, "longest wait: none\n");
  } else {
    say(&w, "longest wait: %.3f ms in ", ms(plan->worst_stall_ns));
    say_op(&w, op_names, plan->worst_op);
    say(&w, "\n");
  }
  return w.length;
}
